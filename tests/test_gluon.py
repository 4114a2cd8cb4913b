"""KDA's kernels in Gluon, on a Hopper GPU: `pytest -m device --device cuda tests/test_gluon.py`.

Expected values are the float64 recurrence's, by the fallback: `test_laws.py` holds it to 1e-12.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import subjects
import torch
from laws import assert_close, assert_identical, error
from torch import Tensor

import kda_fn
from kda_fn.primitives import _targets
from kda_fn.primitives.fused_kda import fused_kda

pytestmark = pytest.mark.device

VALUES, GRADIENTS = 5e-3, 1e-2
LENGTHS = (0, 1, 63, 64, 200, 9, 0, 129)
GATES = ("mild", "strong", "deep")
DIMS = ((128, 128), (64, 64), (128, 64), (64, 128))


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test here must have been served by these kernels."""
    if subjects.DEVICE != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU and --device cuda")
    answers = []
    in_gluon = _targets.in_gluon

    def spy(*args: Any) -> bool:
        answers.append(in_gluon(*args))
        return answers[-1]

    monkeypatch.setattr(_targets, "in_gluon", spy)
    yield
    assert answers and all(answers)


def _inputs(
    gates: str, T: int = 200, H: int = 2, HV: int = 4, K: int = 128, V: int = 128, N: int = 0
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(subjects.DEVICE)

    g = -0.1 * draw(2, T, HV, K).square()
    if gates == "deep":
        # Half of the blocks are too far from their starts for a product, from some token on.
        g = torch.where(draw(2, T, HV, 1) > 0, 40 * g, g)
    if gates == "strong":
        values = torch.tensor([-20.0, -1000.0, -torch.inf, 0.0], device=g.device)
        g = torch.where(draw(2, T, HV, K) > 1.5, values[(100 * draw(2, T, HV, K)).long() % 4], g)
    q, k = (kda_fn.l2_norm(draw(2, T, H, K), impl="reference").bfloat16() for _ in "qk")
    state = draw(*((2, N) if N else (2,)), HV, K, V)
    return state, q, k, draw(2, T, HV, V).bfloat16(), g, torch.sigmoid(draw(2, T, HV))


def _gradients(
    inputs: tuple[Tensor, ...], cotangents: tuple[Tensor, ...], **options: Any
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = kda_fn.kda(*leaves, **options)
    return torch.autograd.grad(
        outputs, leaves, [d.to(y.dtype) for d, y in zip(cotangents, outputs, strict=True)]
    )


def _double(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in inputs)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_values_and_gradients(gates: str, dims: tuple[int, int]) -> None:
    inputs = _inputs(gates, K=dims[0], V=dims[1])
    actual = kda_fn.kda(*inputs, impl="triton")
    expected = kda_fn.kda(*_double(inputs), impl="fallback")
    assert_close(actual, expected, VALUES)
    assert_identical(kda_fn.kda(*inputs, impl="triton"), actual)
    cotangents = tuple(torch.randn_like(y) for y in actual)
    expected = _gradients(_double(inputs), cotangents, impl="fallback")
    actual = _gradients(inputs, cotangents, impl="triton")
    assert_close(actual, expected, GRADIENTS)
    assert_identical(_gradients(inputs, cotangents, impl="triton"), actual)


@pytest.mark.parametrize("heads", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("T", [1, 65, 127])
def test_gradients_of_any_length(T: int, heads: tuple[int, int]) -> None:
    inputs = _inputs("strong", T, *heads)
    cotangents = torch.randn_like(inputs[0]), torch.randn_like(inputs[3])
    expected = _gradients(_double(inputs), cotangents, impl="fallback")
    assert_close(_gradients(inputs, cotangents, impl="triton"), expected, GRADIENTS)


@pytest.mark.parametrize("T", [9, 63, 64, 65, 128, 500])
def test_any_length(T: int) -> None:
    inputs = _inputs("mild", T)
    assert_close(kda_fn.kda(*inputs, impl="triton"), kda_fn.kda(*_double(inputs), impl="fallback"), VALUES)


@pytest.mark.parametrize("gates", GATES)
def test_packed(gates: str) -> None:
    """As alone, to the bit; a NaN stays in its sequence; and gradients."""
    offsets = kda_fn.cu_seqlens_of(LENGTHS)
    inputs = _inputs(gates, sum(LENGTHS), N=len(LENGTHS))
    state, o = kda_fn.kda(*inputs, cu_seqlens=offsets, impl="triton")
    for n, (start, stop) in enumerate(pairwise(offsets)):
        alone = kda_fn.kda(inputs[0][:, n], *(x[:, start:stop] for x in inputs[1:]), impl="triton")
        assert_identical((state[:, n], o[:, start:stop]), alone)
    cotangents = torch.randn_like(state), torch.randn_like(o)
    expected = _gradients(_double(inputs), cotangents, cu_seqlens=offsets, impl="fallback")
    assert_close(_gradients(inputs, cotangents, cu_seqlens=offsets, impl="triton"), expected, GRADIENTS)
    poisoned = tuple(x.clone() for x in inputs)
    start, stop = offsets[4], offsets[5]
    for x in poisoned[1:]:
        x[:, start:stop] = torch.nan
    state_nan, o_nan = kda_fn.kda(*poisoned, cu_seqlens=offsets, impl="triton")
    kept = [n for n in range(len(LENGTHS)) if n != 4]
    assert_identical(state_nan[:, kept], state[:, kept])
    assert_identical(
        torch.cat([o_nan[:, :start], o_nan[:, stop:]], 1), torch.cat([o[:, :start], o[:, stop:]], 1)
    )


@pytest.mark.parametrize("gates", GATES)
def test_what_comes_later_changes_nothing(gates: str) -> None:
    inputs = _inputs(gates)
    _state, o = kda_fn.kda(*inputs, impl="triton")
    for t in (1, 10, 30, 64, 100, 190):
        later = tuple(x.clone() for x in inputs)
        for x in later[1:4]:
            x[:, t:] = torch.randn_like(x[:, t:])
        later[4][:, t:] = -30.0
        assert_identical(kda_fn.kda(*later, impl="triton")[1][:, :t], o[:, :t])


def test_rows_and_strides() -> None:
    """A row does not depend on its neighbours; views are read where they are, to the same bits."""
    inputs = _inputs("mild")
    state, o = kda_fn.kda(*inputs, impl="triton")
    assert_identical(kda_fn.kda(*(x[1:] for x in inputs), impl="triton"), (state[1:], o[1:]))
    packed = torch.cat([inputs[1], inputs[2]], -2)
    strided = inputs[0], packed[:, :, :2], packed[:, :, 2:], *inputs[3:]
    assert_identical(kda_fn.kda(*strided, impl="triton"), (state, o))


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_with_a_layers_gates(lower_bound: float | None, spread: float) -> None:
    state, _q, _k, v, raw, beta = _inputs("mild")
    q, k = (3 * torch.randn(2, 200, 2, 128, device=v.device).bfloat16() for _ in "qk")
    raw, beta = (spread * torch.randn_like(raw)).bfloat16(), torch.randn_like(beta).bfloat16()
    weights = torch.randn(4, device=v.device), torch.randn(4 * 128, device=v.device)
    tensors = state, q, k, v, raw, beta, *weights
    options = {"lower_bound": lower_bound, "allow_neg_eigval": True}
    leaves = [x.detach().requires_grad_() for x in tensors]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    actual = fused_kda(*leaves, **options, impl="triton")  # pyright: ignore[reportArgumentType]
    expected = fused_kda(*wide, **options, impl="fallback")  # pyright: ignore[reportArgumentType]
    assert_close([y.detach() for y in actual], [y.detach() for y in expected], VALUES)
    cotangents = [torch.randn_like(y) for y in actual]
    d_actual = torch.autograd.grad(actual, leaves, cotangents)
    d_expected = torch.autograd.grad(expected, wide, [d.double() for d in cotangents])
    vector = torch.cat([d.double().flatten() for d in d_actual])
    assert error(vector, torch.cat([d.flatten() for d in d_expected])) < GRADIENTS
    for d, exact in zip(d_actual, d_expected, strict=True):
        assert error(d.double(), exact) < 10 * GRADIENTS
