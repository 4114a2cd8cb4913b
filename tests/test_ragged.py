"""Packed sequences: pack and pad undo each other, and offsets are checked before anything is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kda_fn import cu_seqlens_of, lengths_of, pack, pad

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)
"""Of one sequence or more, empty ones included."""


def tokens(*shape: int) -> Tensor:
    """1, 2, 3, ..: every element is told from every other, and none from padding."""
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def padded_by_hand(x: Tensor, lengths: list[int], axis: int) -> Tensor:
    """Each sequence copied to the head of its row."""
    longest = max(lengths)
    shape = list(x.shape)
    shape[axis : axis + 1] = [len(lengths), longest]
    result = torch.zeros(shape, dtype=x.dtype)
    start = 0
    for n, length in enumerate(lengths):
        row = result.select(axis, n)
        row.narrow(axis, 0, length).copy_(x.narrow(axis, start, length))
        start += length
    return result


# Lengths and offsets


@given(LENGTHS)
def test_lengths_and_offsets_are_inverse(lengths: list[int]) -> None:
    """`lengths_of` and `cu_seqlens_of` undo each other."""
    cu_seqlens = cu_seqlens_of(lengths)
    assert lengths_of(cu_seqlens) == lengths
    assert len(cu_seqlens) == len(lengths) + 1
    assert cu_seqlens[0] == 0 and cu_seqlens[-1] == sum(lengths)
    assert cu_seqlens_of(lengths_of(cu_seqlens)) == cu_seqlens


FORMS: dict[str, Any] = {
    "tuple": tuple,
    "list": list,
    "int32": lambda values: torch.tensor(values, dtype=torch.int32),
    "int64": lambda values: torch.tensor(values, dtype=torch.int64),
    "strided": lambda values: torch.tensor([values, values]).mT[:, 0],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_offsets(form: str) -> None:
    """A tuple, a list and an integer tensor say the same."""
    cu_seqlens = FORMS[form]((0, 2, 2, 5))
    assert lengths_of(cu_seqlens) == [2, 0, 3]
    assert all(type(length) is int for length in lengths_of(cu_seqlens))
    x = tokens(5, 2)
    padded = pad(x, cu_seqlens)
    assert torch.equal(padded, padded_by_hand(x, [2, 0, 3], 0))
    assert torch.equal(pack(padded, cu_seqlens), x)


def test_offsets_are_static() -> None:
    """`cu_seqlens_of` gives ints in a tuple, which torch.compile sees as constants."""
    cu_seqlens = cu_seqlens_of([3, 0, 1])
    assert cu_seqlens == (0, 3, 3, 4)
    assert isinstance(cu_seqlens, tuple) and all(type(value) is int for value in cu_seqlens)


WRONG_OFFSETS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    # offsets of 5 tokens, error, what its message says
    "start": ((1, 5), ValueError, ["start at 0", "1"]),
    "negative start": ((-1, 5), ValueError, ["start at 0", "-1"]),
    "decreasing": ((0, 4, 3, 5), ValueError, ["not decrease", "4, 3", "sequence 1"]),
    "decreasing tensor": (torch.tensor([0, 4, 3, 5]), ValueError, ["not decrease", "4, 3", "sequence 1"]),
    "empty": ((), ValueError, [r"N\+1", r"\[\]"]),
    "empty tensor": (torch.zeros(0, dtype=torch.int64), ValueError, [r"N\+1", r"\[\]"]),
    "one offset": ((0,), ValueError, [r"N\+1", r"\[0\]"]),
    "floats": ((0.0, 5.0), TypeError, ["integers", "5.0"]),
    "strings": ("05", TypeError, ["integers", "'5'"]),
    "bools": ((False, True, True), TypeError, ["integers", "True"]),
    "float tensor": (torch.tensor([0.0, 5.0]), TypeError, ["int32 or int64", "torch.float32"]),
    "bool tensor": (torch.tensor([False, True]), TypeError, ["int32 or int64", "torch.bool"]),
    "int16 tensor": (torch.tensor([0, 5], dtype=torch.int16), TypeError, ["int32 or int64", "torch.int16"]),
    "two axes": (torch.tensor([[0, 5]]), ValueError, ["one axis", r"\(1, 2\)"]),
    "no axes": (torch.tensor(5), ValueError, ["one axis", r"\(\)"]),
    "None": (None, TypeError, ["integers", "NoneType"]),
    "a number": (5, TypeError, ["integers", "int"]),
    "a nested list": ([[0, 5]], TypeError, ["integers", r"\[0, 5\]"]),
    "no data": (torch.tensor([0, 5], device="meta"), ValueError, ["meta"]),
}
WRONG_ENDS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "too short": ((0, 2, 4), ValueError, ["end at T = 5", "ends at 4"]),
    "too long": ((0, 2, 6), ValueError, ["end at T = 5", "ends at 6"]),
    "too long tensor": (torch.tensor([0, 6], dtype=torch.int32), ValueError, ["end at T = 5", "ends at 6"]),
}


@pytest.mark.parametrize("name", [*WRONG_OFFSETS, *WRONG_ENDS])
def test_pad_checks_offsets(name: str) -> None:
    """Offsets that do not fit are told with what they are and what fits."""
    cu_seqlens, error, says = {**WRONG_OFFSETS, **WRONG_ENDS}[name]
    with pytest.raises(error, match="cu_seqlens") as caught:
        pad(tokens(5, 2), cu_seqlens)
    for part in says:
        assert caught.match(part)


@pytest.mark.parametrize("name", WRONG_OFFSETS)
def test_lengths_of_checks_offsets(name: str) -> None:
    """The same errors where only lengths are asked for."""
    cu_seqlens, error, says = WRONG_OFFSETS[name]
    with pytest.raises(error, match="cu_seqlens") as caught:
        lengths_of(cu_seqlens)
    for part in says:
        assert caught.match(part)


@pytest.mark.parametrize("name", WRONG_OFFSETS)
def test_pack_checks_offsets(name: str) -> None:
    """The same errors in the other direction."""
    cu_seqlens, error, says = WRONG_OFFSETS[name]
    with pytest.raises(error, match="cu_seqlens") as caught:
        pack(tokens(1, 5, 2), cu_seqlens)
    for part in says:
        assert caught.match(part)


@pytest.mark.parametrize(
    ("shape", "cu_seqlens", "says"),
    [
        ((2, 3), (0, 2, 4, 5), "holds 2 sequences of up to 3.*cu_seqlens says.*2, 2, 1"),
        ((3, 3), (0, 4, 6, 7), "holds 3 sequences of up to 3.*cu_seqlens says.*4, 2, 1"),
    ],
    ids=["sequences", "length"],
)
def test_pack_checks_its_rows(shape: tuple[int, int], cu_seqlens: tuple[int, ...], says: str) -> None:
    """x must have one row for each sequence, and room for the longest."""
    with pytest.raises(ValueError, match=says):
        pack(tokens(*shape), cu_seqlens)


@pytest.mark.parametrize(
    ("lengths", "error", "says"),
    [
        ([2, -1], ValueError, "-1"),
        ([], ValueError, r"lengths.*\[\]|N >= 1"),
        ([1.5], TypeError, "1.5"),
        ([True], TypeError, "True"),
    ],
)
def test_lengths_are_checked(lengths: Any, error: type[Exception], says: str) -> None:
    """Offsets that the library would refuse are not made."""
    with pytest.raises(error, match=says):
        cu_seqlens_of(lengths)


@pytest.mark.parametrize("axis", [2, -3, 5])
def test_axes_are_checked(axis: int) -> None:
    """An axis that x does not have is no other axis."""
    x = tokens(5, 5)
    with pytest.raises((IndexError, ValueError), match=f"axis.*{axis}"):
        pad(x, (0, 2, 5), axis=axis)
    with pytest.raises((IndexError, ValueError), match=f"axis.*{axis}"):
        pack(x, (0, 2, 5), axis=axis)


def test_pack_needs_two_axes() -> None:
    """N may not be the last axis: Tmax comes after it."""
    with pytest.raises((IndexError, ValueError), match=r"axis"):
        pack(tokens(2, 2), (0, 1, 2), axis=-1)


@pytest.mark.parametrize(
    "x", [None, [1.0, 2.0], torch.tensor([1.0, 2.0]).numpy()], ids=["None", "list", "array"]
)
def test_only_tensors_are_packed(x: Any) -> None:
    """x must be a tensor."""
    for function in (pad, pack):
        with pytest.raises(
            TypeError, match=f"{function.__name__}: x must be a tensor, got {type(x).__name__}"
        ):
            function(x, (0, 2))


# pack and pad


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 2), st.integers(0, 2))
def test_pad_and_pack_are_inverse(lengths: list[int], before: int, after: int) -> None:
    """Any lengths, any axis, any axes before and after it; negative axes count from the end."""
    cu_seqlens = cu_seqlens_of(lengths)
    x = tokens(*(2, 3)[:before], sum(lengths), *(3, 2)[:after])
    padded = pad(x, cu_seqlens, axis=before)
    assert torch.equal(padded, padded_by_hand(x, lengths, before))
    assert torch.equal(pack(padded, cu_seqlens, axis=before), x)
    assert torch.equal(pad(x, cu_seqlens, axis=-1 - after), padded)
    assert torch.equal(pack(padded, cu_seqlens, axis=-2 - after), x)


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 3))
def test_rows_may_be_longer_than_needed(lengths: list[int], more: int) -> None:
    """pack takes what is before each sequence's end, however long the rows are."""
    cu_seqlens = cu_seqlens_of(lengths)
    x = tokens(sum(lengths), 2)
    padded = torch.cat([pad(x, cu_seqlens), torch.full((len(lengths), more, 2), torch.nan)], 1)
    assert torch.equal(pack(padded, cu_seqlens), x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_any_dtype(dtype: torch.dtype) -> None:
    """Tokens are packed as their embeddings are."""
    x = torch.ones(5, 2, dtype=dtype)
    padded = pad(x, (0, 2, 5))
    assert padded.dtype == dtype and padded.sum() == 10 and padded.shape == (2, 3, 2)
    assert torch.equal(pack(padded, (0, 2, 5)), x)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_padding_is_zero_whatever_x_holds(strange: float, place: int) -> None:
    """No value of a sequence reaches the padding, not even by a product with zero."""
    x = tokens(5, 2)
    x[place] = strange
    padded = pad(x, (0, 1, 1, 5))
    assert torch.equal(padded[0, 1:], torch.zeros(3, 2))
    assert torch.equal(padded[1], torch.zeros(4, 2))
    torch.testing.assert_close(pack(padded, (0, 1, 1, 5)), x, rtol=0, atol=0, equal_nan=True)


def test_results_are_new_tensors() -> None:
    """Writing to a result leaves its source alone, also where nothing had to move."""
    x = tokens(4, 2)
    padded = pad(x, (0, 4))
    padded.zero_()
    assert torch.equal(x, tokens(4, 2))
    rows = tokens(1, 4, 2)
    pack(rows, (0, 4)).zero_()
    assert torch.equal(rows, tokens(1, 4, 2))


# Transforms


@pytest.mark.parametrize("in_dim", [0, 1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_vmap(form: str, in_dim: int) -> None:
    """Rows mapped by vmap share one packing, given in any form."""
    cu_seqlens = FORMS[form]((0, 2, 2, 5))
    x = tokens(3, 5, 2)
    padded = torch.vmap(lambda x: pad(x, cu_seqlens), in_dim)(x.movedim(0, in_dim))
    assert torch.equal(padded, pad(x, cu_seqlens, axis=1))
    packed = torch.vmap(lambda x: pack(x, cu_seqlens), in_dim)(padded.movedim(0, in_dim))
    assert torch.equal(packed, x)


@pytest.mark.parametrize("function", [pad, pack, lambda x, cu_seqlens: lengths_of(cu_seqlens)])
def test_offsets_are_not_mapped(function: Any) -> None:
    """A packing for each row has no shape: vmap over offsets is told so."""
    cu_seqlens = torch.tensor([[0, 2, 5], [0, 1, 5]])
    with pytest.raises(ValueError, match=r"cu_seqlens must not be mapped by vmap"):
        torch.vmap(function, (None, 0))(tokens(5, 2), cu_seqlens)


@pytest.mark.parametrize("form", FORMS)
def test_grad(form: str) -> None:
    """Both are linear: the gradient of one is the other."""
    cu_seqlens = FORMS[form]((0, 2, 2, 5))
    x, weight = tokens(5, 2), tokens(3, 3, 2)
    gradient = torch.func.grad(lambda x: (pad(x, cu_seqlens) * weight).sum())(x)
    assert torch.equal(gradient, pack(weight, cu_seqlens)) and gradient.abs().min() > 0
    gradient = torch.func.grad(lambda rows: (pack(rows, cu_seqlens) * x).sum())(weight)
    assert torch.equal(gradient, pad(x, cu_seqlens)) and gradient.abs().max() > 0


def test_per_sample_gradients() -> None:
    """vmap(grad): every row has its own."""
    x, weight = tokens(4, 5, 2), tokens(2, 3, 2)

    def loss(x: Tensor) -> Tensor:
        return (pad(x, (0, 2, 5)).square() * weight).sum()

    gradients = torch.vmap(torch.func.grad(loss))(x)
    assert torch.equal(gradients, 2 * x * pack(weight, (0, 2, 5)))


def test_autograd() -> None:
    """Plain backward, and no gradient from the padding."""
    x = tokens(5, 2).requires_grad_()
    (pad(x, (0, 1, 1, 5)) + 1).log().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 1 / (tokens(5, 2) + 1))
