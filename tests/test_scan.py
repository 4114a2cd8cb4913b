"""`scan` keeps the contract of `jax.lax.scan`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

from kda_fn import KDAConfig, init_kimi_delta_attention, init_state, kimi_delta_attention, scan


class Pair(NamedTuple):
    """A carry of two leaves."""

    total: Tensor
    steps: Tensor


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible float64 noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decay(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A body that no reordering, dropped step or repeated step leaves unchanged."""
    carry = 0.5 * carry + x
    return carry, carry.sin()


def by_hand(body: Any, init: Any, xs: list[Any], reverse: bool = False) -> tuple[Any, list[Any]]:
    """The loop that scan stands for."""
    carry, ys = init, []
    for x in reversed(xs) if reverse else xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, ys[::-1] if reverse else ys


@pytest.mark.parametrize("T", [1, 2, 7])
@pytest.mark.parametrize("reverse", [False, True])
def test_equals_a_loop(T: int, reverse: bool) -> None:
    """Carry and outputs are those of the loop, outputs in the order of xs."""
    init, xs = rand(3), rand(T, 3, seed=1)
    carry, ys = scan(decay, init, xs, reverse=reverse)
    expected_carry, expected_ys = by_hand(decay, init, list(xs), reverse)
    assert torch.equal(carry, expected_carry)
    assert torch.equal(ys, torch.stack(expected_ys))
    assert ys.abs().min() > 0


@pytest.mark.parametrize("reverse", [False, True])
def test_nested_trees(reverse: bool) -> None:
    """dicts, tuples, lists, NamedTuples and None pass through every place a tree may stand."""

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        (first, nothing), more = x
        assert nothing is None
        pair = carry["pair"]
        new = Pair(0.5 * pair.total + first, pair.steps + 1)
        return {"pair": new, "none": None, "rest": [carry["rest"][0] + more["b"]]}, {
            "pair": new,
            "nothing": None,
            "tuple": (first + more["b"],),
        }

    init: Any = {"pair": Pair(rand(3), torch.tensor(0)), "none": None, "rest": [rand(3, seed=1)]}
    xs: Any = ((rand(4, 3, seed=2), None), {"b": rand(4, 3, seed=3)})
    carry, ys = scan(body, init, xs, reverse=reverse)
    rows = [((xs[0][0][t], None), {"b": xs[1]["b"][t]}) for t in range(4)]
    expected_carry, expected_ys = by_hand(body, init, rows, reverse)

    leaves, structure = optree.tree_flatten(carry)
    expected_leaves, expected_structure = optree.tree_flatten(expected_carry)
    assert structure == expected_structure
    assert len(leaves) == 3 and all(map(torch.equal, leaves, expected_leaves))
    assert type(carry["pair"]) is Pair and type(ys["pair"]) is Pair
    assert ys["nothing"] is None and isinstance(ys["tuple"], tuple)
    assert ys["pair"].steps.tolist() == ([4, 3, 2, 1] if reverse else [1, 2, 3, 4])
    assert torch.equal(ys["pair"].total, torch.stack([y["pair"].total for y in expected_ys]))
    assert torch.equal(ys["tuple"][0], torch.stack([y["tuple"][0] for y in expected_ys]))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("xs", [None, (), {"a": None}], ids=["none", "empty", "none inside"])
def test_length_alone(xs: Any, reverse: bool) -> None:
    """Without leaves in xs, `length` says how often; the body sees xs' empty tree."""
    seen = []

    def body(carry: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        seen.append(x)
        return 2 * carry, carry

    carry, ys = scan(body, torch.tensor(1.0), xs, length=5, reverse=reverse)
    assert carry == 32
    assert ys.tolist() == ([16, 8, 4, 2, 1] if reverse else [1, 2, 4, 8, 16])
    assert seen == [xs] * 5


def test_length_may_agree_with_xs() -> None:
    """`length` beside xs is allowed where it is true."""
    carry, ys = scan(decay, rand(3), rand(4, 3, seed=1), length=4)
    expected = scan(decay, rand(3), rand(4, 3, seed=1))
    assert torch.equal(carry, expected[0]) and torch.equal(ys, expected[1])


def test_no_outputs() -> None:
    """A body may have nothing to say."""
    carry, ys = scan(lambda c, x: (c + x, None), rand(3), rand(4, 3, seed=1))
    assert ys is None
    torch.testing.assert_close(carry, rand(3) + rand(4, 3, seed=1).sum(0))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("named", [False, True], ids=["xs", "length"])
def test_no_steps(named: bool, reverse: bool) -> None:
    """T = 0: the carry is init, ys are empty with the right shapes, dtypes and structure."""
    calls = []

    def body(carry: Pair, x: Any) -> tuple[Pair, dict[str, Any]]:
        calls.append(x)
        y = {"sum": carry.total.unsqueeze(0), "half": carry.total.to(torch.bfloat16), "count": carry.steps}
        return Pair(carry.total + 1, carry.steps + 1), y

    init = Pair(rand(3), torch.tensor(7))
    xs, length = (None, 0) if named else (rand(0, 2, 3), None)
    carry, ys = scan(body, init, xs, length=length, reverse=reverse)
    assert carry is init
    assert len(calls) == 1, "the body is called once, to learn the shapes of ys"
    assert {name: (tuple(y.shape), y.dtype) for name, y in ys.items()} == {
        "sum": ((0, 1, 3), torch.float64),
        "half": ((0, 3), torch.bfloat16),
        "count": ((0,), torch.int64),
    }
    if not named:
        assert calls[0].shape == (2, 3) and calls[0].dtype == torch.float64


def test_outputs_own_their_memory() -> None:
    """Writing to a result changes neither the inputs nor another result."""
    init, xs = rand(3), rand(4, 3, seed=1)
    kept = init.clone(), xs.clone()
    # This body hands its inputs on: the outputs are copies all the same.
    carry, ys = scan(lambda c, x: (c + x, (c, x)), init, xs)
    expected_carry = carry.clone()
    for y in ys:
        assert y.data_ptr() not in (init.data_ptr(), xs.data_ptr(), carry.data_ptr())
        assert y.is_contiguous()
        y.zero_()
    assert torch.equal(init, kept[0]) and torch.equal(xs, kept[1]) and torch.equal(carry, expected_carry)


def test_inputs_of_any_layout() -> None:
    """Transposed, expanded and strided xs scan as their copies do."""
    for xs in (rand(3, 5).mT, rand(1, 3).expand(5, 3), rand(10, 6)[::2, ::2]):
        carry, ys = scan(decay, rand(3, seed=1), xs)
        expected_carry, expected_ys = scan(decay, rand(3, seed=1), xs.contiguous())
        assert torch.equal(carry, expected_carry) and torch.equal(ys, expected_ys)
        assert ys.abs().min() > 0


# Errors


class Wrong(NamedTuple):
    """A breach of the contract: the error, what its message says, and the call."""

    error: type[Exception]
    says: list[str]
    body: Any = lambda c, x: (c, x)
    init: Any = rand(3)
    xs: Any = rand(4, 3)
    length: Any = None


TWO = rand(3), rand(3)
WRONG = {
    "lengths differ": Wrong(
        ValueError,
        [r"xs\['a'\]\W*: 4", r"xs\['b'\]\[1\]\W*: 5"],
        xs={"a": rand(4, 3), "b": (rand(4), rand(5))},
    ),
    "length differs": Wrong(ValueError, [r"length\W*: 3", r"xs\['a'\]\W*: 4"], xs={"a": rand(4)}, length=3),
    "no length": Wrong(ValueError, ["xs has no leaves", "length="], xs=None),
    "negative length": Wrong(ValueError, ["length", "-1"], xs=None, length=-1),
    "fractional length": Wrong(TypeError, ["length", "2.5|float"], xs=None, length=2.5),
    "scalar in xs": Wrong(ValueError, [r"xs\['b'\] has no axis"], xs={"a": rand(4), "b": torch.tensor(1.0)}),
    "number in xs": Wrong(TypeError, ["must be tensors", r"xs\['b'\] is float"], xs={"a": rand(4), "b": 1.5}),
    "number in the carry": Wrong(
        TypeError,
        ["leaves of (the )?carry must be tensors", "int", "1"],
        body=lambda c, x: ((c[0] + x, c[1] + 1), x),
        init=(rand(3), 0),
    ),
    "number made a tensor": Wrong(
        TypeError,
        ["leaves of (the )?carry must be tensors", "float", "1"],
        body=lambda c, x: ((c[0], c[1] + x.sum()), x),
        init=(rand(3), 0.0),
    ),
    "tensor made a number": Wrong(
        TypeError,
        ["leaves of (the )?carry must be tensors", "float", "1"],
        body=lambda c, x: ((c[0], 1.5), x),
        init=TWO,
    ),
    "carry's structure": Wrong(
        TypeError,
        ["carry's structure", r"\*, \*\)", r"\*, \*, \*\)"],
        body=lambda c, x: ((*c, x), x),
        init=TWO,
    ),
    "carry's type": Wrong(
        TypeError, ["carry's structure", "Pair"], body=lambda c, x: (tuple(c), x), init=Pair(*TWO)
    ),
    "carry's shape": Wrong(
        TypeError,
        ["changed (the )?carry", "'b'", r"\(3,\)", r"\(2,\)"],
        body=lambda c, x: ({"a": c["a"], "b": c["b"][:2]}, x),
        init={"a": rand(3), "b": rand(3)},
    ),
    "carry's dtype": Wrong(
        TypeError, ["changed (the )?carry", "float64", "float32"], body=lambda c, x: (c.float(), x)
    ),
    "number in ys": Wrong(
        TypeError, ["output", "must be tensors", "float", "'y'"], body=lambda c, x: (c, {"y": 1.5})
    ),
    # Two rows of three: a tensor must not be unpacked by accident.
    "not a pair": Wrong(
        TypeError, [r"body must return .*carry, y", "Tensor"], body=lambda c, x: torch.stack([c, c])
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    """Every breach of the contract is told, by name."""
    wrong = WRONG[name]
    with pytest.raises(wrong.error, match=r"^scan: ") as caught:
        scan(wrong.body, wrong.init, wrong.xs, length=wrong.length)
    for part in wrong.says:
        assert caught.match(part)


@pytest.mark.parametrize("name", [name for name, wrong in WRONG.items() if isinstance(wrong.xs, Tensor)])
def test_errors_without_steps(name: str) -> None:
    """T = 0 is no excuse: the one call of the body is held to the contract."""
    wrong = WRONG[name]
    with pytest.raises(wrong.error, match=r"^scan: ") as caught:
        scan(wrong.body, wrong.init, wrong.xs[:0])
    for part in wrong.says:
        assert caught.match(part)


def test_wrong_leaves_are_found_before_the_body_runs() -> None:
    """What is wrong with init or xs needs no call of the body to see."""
    calls = []

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        calls.append(x)
        return carry, x

    for init, xs in ((1.5, rand(4)), (rand(3), 1.5), (rand(3), (rand(4), rand(5)))):
        with pytest.raises((TypeError, ValueError), match=r"^scan: "):
            scan(body, init, xs)
    assert not calls


CHANGES = {
    "structure": lambda x: (x,),
    "shape": lambda x: x[:2],
    "dtype": lambda x: x.float(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_outputs_that_change(what: str) -> None:
    """An output's structure, shape and dtype are those of the first step."""
    calls = []

    def body(carry: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        calls.append(x)
        return carry, CHANGES[what](x) if len(calls) == 3 else x

    with pytest.raises(TypeError, match=r"^scan: .*output"):
        scan(body, rand(3), rand(4, 3))


# Transforms


def test_grad() -> None:
    """The gradient is the loop's, in init and in xs."""
    init, xs = rand(3), rand(5, 3, seed=1)

    def loss(run: Any) -> Any:
        def value(init: Tensor, xs: Tensor) -> Tensor:
            carry, ys = run(decay, init, xs)
            return carry.sum() + (torch.stack(list(ys)) * rand(5, 3, seed=2)).sum()

        return torch.func.grad(value, argnums=(0, 1))(init, xs)

    got = loss(scan)
    expected = loss(lambda body, init, xs: by_hand(body, init, list(xs.unbind(0))))
    for a, b in zip(got, expected, strict=True):
        assert a.abs().min() > 0
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, 2), (None, 1), (0, None)])
def test_vmap(in_dims: tuple[int | None, int | None]) -> None:
    """vmap of a scan is the scan of each row."""
    init, xs = rand(3), rand(5, 3, seed=1)
    rows = 4
    inits = init if in_dims[0] is None else rand(rows, 3, seed=2).movedim(0, in_dims[0])
    xss = xs if in_dims[1] is None else rand(rows, 5, 3, seed=3).movedim(0, in_dims[1])
    carry, ys = torch.vmap(partial(scan, decay), in_dims)(inits, xss)
    for row in range(rows):
        row_init = inits if in_dims[0] is None else inits.select(in_dims[0], row)
        row_xs = xss if in_dims[1] is None else xss.select(in_dims[1], row)
        expected_carry, expected_ys = scan(decay, row_init, row_xs)
        torch.testing.assert_close(carry[row], expected_carry, rtol=1e-14, atol=0)
        torch.testing.assert_close(ys[row], expected_ys, rtol=1e-14, atol=0)
    assert ys.abs().min() > 0


def test_vmap_without_steps() -> None:
    """T = 0 under vmap: the mapped axis is there, the scanned one is empty."""
    carry, ys = torch.vmap(partial(scan, decay))(rand(4, 3), rand(4, 0, 3))
    assert torch.equal(carry, rand(4, 3))
    assert ys.shape == (4, 0, 3)


def test_jvp() -> None:
    """Forward mode agrees with the difference quotient of a body that is linear in its inputs."""

    def linear(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = 0.5 * carry + x
        return carry, 3 * carry

    primals = rand(3), rand(5, 3, seed=1)
    tangents = rand(3, seed=2), rand(5, 3, seed=3)
    moved = torch.func.jvp(partial(scan, linear), primals, tangents)[1]
    # A linear map is its own derivative.
    expected = scan(linear, *tangents)
    for a, b in zip(moved, expected, strict=True):
        assert a.abs().min() > 0
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_transforms_compose() -> None:
    """vmap(grad), grad(vmap) and the Hessian run, and agree with each other."""
    init, xs = rand(4, 3), rand(4, 5, 3, seed=1)

    def loss(init: Tensor, xs: Tensor) -> Tensor:
        carry, ys = scan(decay, init, xs)
        return carry.square().sum() + ys.sum()

    per_sample = torch.vmap(torch.func.grad(loss))(init, xs)
    summed = torch.func.grad(lambda init: torch.vmap(loss)(init, xs).sum())(init)
    torch.testing.assert_close(per_sample, summed, rtol=1e-14, atol=0)
    hessian = torch.func.hessian(loss)(init[0], xs[0])
    reverse = torch.func.jacrev(torch.func.jacrev(loss))(init[0], xs[0])
    torch.testing.assert_close(hessian, reverse, rtol=1e-13, atol=1e-15)
    assert per_sample.abs().min() > 0 and hessian.diagonal().abs().min() > 0


def graph(root: Tensor) -> list[str]:
    """The names of all nodes behind a tensor in autograd's graph."""
    seen, todo = set(), [root.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return [node.name() for node in seen]


def test_the_gradient_is_linear_in_time() -> None:
    """One node splits xs, whatever T.

    T selects of a [T, F] tensor would each write a [T, F] gradient: quadratic work and memory.
    """
    sizes = []
    for T in (10, 20, 30):
        xs = rand(T, 3).requires_grad_()
        carry, ys = scan(decay, rand(3), xs)
        nodes = graph(carry.sum() + ys.sum())
        assert nodes.count("UnbindBackward0") == 1
        assert not [name for name in nodes if name.startswith(("Select", "Index", "Slice"))]
        sizes.append(len(nodes))
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


def test_a_long_gradient() -> None:
    """T = 2000 over [T, 1000]: with a full-sized gradient for each step this would write 16 GB."""
    xs = torch.ones(2000, 1000, requires_grad=True)
    carry, ys = scan(lambda c, x: (0.5 * c + x, c[:1]), torch.zeros(1000), xs)
    carry.sum().backward()
    assert ys.shape == (2000, 1) and xs.grad is not None
    assert xs.grad[-1].eq(1).all() and xs.grad[-3].eq(0.25).all()


# Layers are bodies


@pytest.mark.parametrize("segments", [1, 3])
def test_a_partially_applied_layer_is_a_body(segments: int) -> None:
    """Scanning a layer over segments gives the layer over the whole."""
    config = KDAConfig(hidden_size=12, num_heads=2, head_dim=4, num_v_heads=4, head_v_dim=3, chunk_size=4)
    params = init_kimi_delta_attention(
        config, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    layer = partial(kimi_delta_attention, params, config=config)
    state = init_state(config, (2,), dtype=torch.float64)
    x = rand(2, 5 * segments, 12)
    expected_state, expected_y = layer(state, x)
    new_state, ys = scan(layer, state, x.unflatten(1, (segments, 5)).movedim(1, 0))
    y = ys.movedim(0, 1).flatten(1, 2)
    assert y.abs().min() > 0
    torch.testing.assert_close(y, expected_y, rtol=1e-10, atol=1e-12)
    for a, b in zip(new_state, expected_state, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
