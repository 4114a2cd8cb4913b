"""The laws of the library, each once; `test_laws.py` runs them for every implementation of every subject.

A law is a function `law(subject, impl)` that asserts. Its dtype is the widest that the implementation serves,
unless it says otherwise. What a result should be comes from the float64 oracles on the very same numbers, or
is another result of the same function, to be identical to the bit. Errors are relative root mean squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import subjects
import torch
from subjects import DTYPES, IMPLS, KDA, KDA_STEP, PURE, WIDEST, Inputs, Subject, cast, leaves, tree_map
from torch import Tensor
from torch.func import grad, vmap

import kda_fn
from kda_fn.types import Impl

Law = Callable[[Subject, Impl], None]

VALUE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 5e-3}
GRADIENT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# The same by implementation, at its widest dtype.
EXACT = {impl: VALUE[dtype] for impl, dtype in WIDEST.items()}
SLOPE = {impl: GRADIENT[dtype] for impl, dtype in WIDEST.items()}
if subjects.DEVICE != "cpu":
    # An accelerator's exp is good to two units in the last place; a product of decays takes its power.
    EXACT["triton"] = 1e-5
# A layer in half precision rounds some eight intermediate tensors on its way, a primitive only its result.
LAYER_ROUNDINGS = 8**0.5

LAWS: dict[str, tuple[Law, Callable[[Subject], bool], tuple[Impl, ...]]] = {}
"""By name: the law, which subjects it speaks of, and the implementations that it binds."""


def law(
    applies: Callable[[Subject], bool] = lambda _: True, impls: tuple[Impl, ...] = IMPLS
) -> Callable[[Law], Law]:
    """Registers a law under its name."""

    def register(function: Law) -> Law:
        LAWS[function.__name__.replace("_", " ")] = function, applies, impls
        return function

    return register


def is_kda(subject: Subject) -> bool:
    return subject.name in (KDA.name, KDA_STEP.name)


def is_fused(subject: Subject) -> bool:
    return subject.name.startswith("fused_kda")


def has_heads(subject: Subject) -> bool:
    return is_kda(subject) or is_fused(subject)


def has_time(subject: Subject) -> bool:
    return subject.y_time != 0


def draw(subject: Subject, impl: Impl, **sizes: Any) -> Inputs:
    """`subject.inputs`, in the widest dtype that the implementation serves."""
    return cast(subject, subject.inputs(**sizes), WIDEST[impl])


# Comparisons


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative root mean square error."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    scale = expected.double().square().mean().sqrt()
    assert scale > 0, "an expected value of zeros proves nothing"
    difference = actual.to(expected.device, torch.float64) - expected.double()
    return float(difference.square().mean().sqrt() / scale)


MEASURED: list[tuple[float, float]] = []
"""Each error that `assert_close` found, and what it may be; whoever reads it empties it first."""


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    pairs = list(zip(leaves(actual), leaves(expected), strict=True))
    assert pairs
    for i, (a, e) in enumerate(pairs):
        assert torch.isfinite(a).all(), f"tensor {i} is not finite"
        found = error(a, e)
        MEASURED.append((found, tolerance))
        assert found <= tolerance, f"tensor {i}: {found:.2e} > {tolerance:.0e}"


def assert_identical(actual: Any, expected: Any) -> None:
    """Equal to the bit, and not all zero."""
    pairs = list(zip(leaves(actual), leaves(expected), strict=True))
    assert pairs
    for i, (a, e) in enumerate(pairs):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        assert torch.equal(a, e), f"tensor {i} differs by up to {(a.double() - e.double()).abs().max():.2e}"
    assert any(bool((e != 0).any()) for _, e in pairs if e.numel())


def weights_like(outputs: Iterable[Tensor], seed: int = 1) -> list[Tensor]:
    """Random cotangents in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device) for y in outputs]


def loss_of(outputs: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """A scalar that every output has a part in."""
    terms = [(y * w.to(y.dtype)).double().sum() for y, w in zip(outputs, weights, strict=True)]
    return torch.stack(terms).sum()


def gradients(
    subject: Subject, inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None, weights: Any = None
) -> list[Tensor]:
    """Of `loss_of` the outputs, by reverse-mode autograd, for every tensor of the inputs.

    The weights are the cotangents as they are, strides of 0 too; the oracle's gradients stay float64.
    """
    tracked = tree_map(lambda x: (x if impl else x.double()).detach().requires_grad_(), inputs)
    outputs = subject.call(tracked, impl, cu_seqlens)
    weights = weights_like(outputs) if weights is None else weights
    cotangents = [w.to(y.dtype) for y, w in zip(outputs, weights, strict=True)]
    return list(torch.autograd.grad(outputs, [x for x in leaves(tracked) if x.numel()], cotangents))


def row(subject: Subject, inputs: Inputs, index: Any) -> Inputs:
    """The inputs at `index` of the first batch axis; shared ones as they are."""
    return {name: x if name in subject.shared else x[index] for name, x in inputs.items()}


def at_times(subject: Subject, inputs: Inputs, start: int, stop: int) -> Inputs:
    """The inputs with the time axis cut to [start, stop)."""
    return {
        name: x.narrow(subject.time[name], start, stop - start) if name in subject.time else x
        for name, x in inputs.items()
    }


def with_states(subject: Subject, inputs: Inputs, outputs: tuple[Tensor, ...]) -> Inputs:
    """The inputs of the next call: its states are the outputs of the last."""
    return {**inputs, **dict(zip(subject.states, outputs, strict=False))}


def in_pieces(subject: Subject, impl: Impl, inputs: Inputs, cuts: list[int]) -> tuple[Tensor, ...]:
    """One call for each piece between the cuts, states threaded, outputs joined."""
    columns: list[list[Tensor]] = []
    outputs: tuple[Tensor, ...] = ()
    for start, stop in pairwise(cuts):
        outputs = subject.call(at_times(subject, inputs, start, stop), impl)
        inputs = with_states(subject, inputs, outputs)
        columns.append(list(outputs[len(subject.states) :]))
    joined = (torch.cat(column, subject.y_time) for column in zip(*columns, strict=True))
    return *outputs[: len(subject.states)], *joined


# Agreement


def _agrees(subject: Subject, impl: Impl, dtype: torch.dtype) -> None:
    half = dtype in (torch.bfloat16, torch.float16)
    inputs = cast(subject, subject.inputs(batch=(2,), T=70), dtype)
    outputs = subject.call(inputs, impl)
    factor = LAYER_ROUNDINGS if half and subject.is_layer else 1
    assert_close(outputs, subject.call(inputs, None), factor * VALUE[dtype])
    assert outputs[-1].dtype == torch.promote_types(
        dtype, torch.float32 if "gate " in subject.name else dtype
    )
    for name, state in zip(subject.states, outputs, strict=False):
        assert state.dtype == inputs[name].dtype
    actual, expected = gradients(subject, inputs, impl), gradients(subject, inputs, None)
    if half and subject.cancels:
        # A sum that is wrong, not cancelled, is off by its own size.
        assert_close(actual, expected, 0.1)
        actual, expected = (torch.cat([g.double().flatten() for g in gs]) for gs in (actual, expected))
    assert_close(actual, expected, factor * GRADIENT[dtype])


@law(impls=PURE)
def agrees_in_float64(subject: Subject, impl: Impl) -> None:
    _agrees(subject, impl, torch.float64)


@law()
def agrees_in_float32(subject: Subject, impl: Impl) -> None:
    _agrees(subject, impl, torch.float32)


@law()
def agrees_in_bfloat16(subject: Subject, impl: Impl) -> None:
    _agrees(subject, impl, torch.bfloat16)


@law()
def agrees_in_float16(subject: Subject, impl: Impl) -> None:
    _agrees(subject, impl, torch.float16)


@law(has_time)
def any_length(subject: Subject, impl: Impl) -> None:
    """T = 0, 1, 2, 63, 64, 65, values and gradients."""
    for T in (0, 1, 2, 63, 64, 65):
        inputs = draw(subject, impl, batch=(), T=T)
        outputs = subject.call(inputs, impl)
        assert_close(outputs, subject.call(inputs, None), EXACT[impl])
        if T:
            assert_close(gradients(subject, inputs, impl), gradients(subject, inputs, None), SLOPE[impl])
        elif subject.states:
            assert outputs[-1].numel() == 0
            assert_identical(outputs[: len(subject.states)], [inputs[name] for name in subject.states])


@law(has_heads)
def any_heads_and_head_dims(subject: Subject, impl: Impl) -> None:
    """K != V, HV > H, sizes that are not powers of two, sizes of one."""
    for H, HV, K, V in ((1, 1, 1, 1), (1, 3, 3, 5), (2, 4, 60, 20), (2, 2, 16, 16), (1, 2, 128, 64)):
        inputs = draw(subject, impl, batch=(), T=9, H=H, HV=HV, K=K, V=V)
        assert_close(subject.call(inputs, impl), subject.call(inputs, None), EXACT[impl])


@law()
def any_batch_axes(subject: Subject, impl: Impl) -> None:
    """(), (3,), (2, 3), (0,), (2, 0): what is computed for a row does not depend on the axes around it."""
    full = draw(subject, impl, batch=(2, 3), T=5)
    expected = subject.call(full, None)
    assert_close(subject.call(full, impl), expected, EXACT[impl])
    one = row(subject, row(subject, full, 1), 2)
    assert_close(subject.call(one, impl), [e[1, 2] for e in expected], EXACT[impl])
    for empty in ((0,), (2, 0)):
        outputs = subject.call(draw(subject, impl, batch=empty, T=5), impl)
        for output, e in zip(outputs, expected, strict=True):
            assert output.shape == (*empty, *e.shape[2:])


# Time


@law(has_time)
def resume(subject: Subject, impl: Impl) -> None:
    """Any split of the sequence, states threaded, equals the whole."""
    inputs = draw(subject, impl, batch=(2,), T=71)
    expected = subject.call(inputs, None)
    for cuts in ([0, 1, 71], [0, 70, 71], [0, 64, 71], [0, 7, 7, 8, 66, 71], [0, 0, 33, 71]):
        assert_close(in_pieces(subject, impl, inputs, cuts), expected, EXACT[impl])


@law(has_time)
def decode_equals_prefill(subject: Subject, impl: Impl) -> None:
    """T calls of one token equal one call of T tokens."""
    inputs = draw(subject, impl, batch=(2,), T=19)
    steps = in_pieces(subject, impl, inputs, list(range(20)))
    assert_close(steps, subject.call(inputs, None), EXACT[impl])
    assert_close(steps, subject.call(inputs, impl), EXACT[impl])


@law(lambda subject: subject.name == KDA.name or is_fused(subject))
def identity_tokens(subject: Subject, impl: Impl) -> None:
    """g = 0 and beta = 0 leave no trace, wherever such tokens stand; alone they return the very state."""
    inputs, idle = (draw(subject, impl, batch=(2,), T=20, seed=seed) for seed in (3, 4))
    gate, zero = ("raw", -torch.inf) if is_fused(subject) else ("g", 0.0)
    idle |= {name: torch.full_like(idle[name], zero) for name in (gate, "beta")}
    places = torch.tensor([t for t in range(40) if t % 3 == 0 or t >= 31])[:20]
    others = torch.tensor([t for t in range(40) if t not in places])
    order = torch.argsort(torch.cat([others, places])).to(idle["v"].device)
    mixed = {
        name: torch.cat([x, idle[name]], subject.time[name]).index_select(subject.time[name], order)
        if name in subject.time
        else x
        for name, x in inputs.items()
    }
    state, o = subject.call(mixed, impl)
    assert_close((state, o.index_select(-3, others.to(o.device))), subject.call(inputs, None), EXACT[impl])
    alone = {**idle, "initial_state": inputs["initial_state"]}
    assert_identical(subject.call(alone, impl)[0], inputs["initial_state"])


@law(has_time)
def prefix_causality(subject: Subject, impl: Impl) -> None:
    """What comes later changes no bit of what came before, in values and in gradients."""
    for dtype in DTYPES[impl]:
        inputs = cast(subject, subject.inputs(batch=(2,), T=90, seed=5), dtype)
        other = cast(subject, subject.inputs(batch=(2,), T=90, seed=6), dtype)
        for t in (1, 21, 64, 89):
            later = {
                name: torch.cat([x.narrow(axis, 0, t), other[name].narrow(axis, t, 90 - t)], axis)
                if (axis := subject.time.get(name))
                else x
                for name, x in inputs.items()
            }
            results = []
            for changed in (inputs, later):
                tracked = tree_map(lambda x: x.detach().requires_grad_(), changed)
                y = subject.call(tracked, impl)[-1].narrow(subject.y_time, 0, t)
                wanted = {name: x for name, x in tracked.items() if name not in subject.shared}
                grads = torch.autograd.grad(y.sum(), list(wanted.values()))
                early = [
                    g.narrow(subject.time[name], 0, t) if name in subject.time else g
                    for name, g in zip(wanted, grads, strict=True)
                ]
                late = [
                    g.narrow(subject.time[name], t, 90 - t)
                    for name, g in zip(wanted, grads, strict=True)
                    if name in subject.time
                ]
                assert all(bool((g == 0).all()) for g in late)
                results.append((y.detach(), early))
            assert_identical(results[1], results[0])


# Neighbours


@law()
def batch_invariance(subject: Subject, impl: Impl) -> None:
    """A row's result is the same alone, among others, beside its own copies: to the bit for primitives."""
    for dtype in DTYPES[impl]:
        batch = cast(subject, subject.inputs(batch=(5,), T=70, seed=7), dtype)
        together = subject.call(batch, impl)
        alone = subject.call(row(subject, batch, 3), impl)
        single = subject.call(row(subject, batch, slice(3, 4)), impl)
        copies = subject.call(row(subject, batch, torch.tensor([3, 3, 3, 3])), impl)
        views = [
            [y[3] for y in together],
            [y[0] for y in single],
            *([y[i] for y in copies] for i in range(4)),
        ]
        for view in views:
            if subject.is_layer:
                # BLAS picks its kernel for a matrix product by its shape.
                assert_close(view, alone, 1e-12 if dtype == torch.float64 else 1e-6)
            else:
                assert_identical(view, alone)


@law(has_heads)
def head_invariance(subject: Subject, impl: Impl) -> None:
    """A head's result is the same with one head and with many, to the bit."""
    inputs = cast(subject, subject.inputs(batch=(), T=70, H=3, HV=3), torch.float32)
    state, o = subject.call(inputs, impl)
    axes = {"initial_state": -3, "beta": -1, "A_log": -1}
    one = {
        name: x.chunk(3)[1] if name == "dt_bias" else x.narrow(axes.get(name, -2), 1, 1)
        for name, x in inputs.items()
    }
    assert_identical(subject.call(one, impl), (state.narrow(-3, 1, 1), o.narrow(-2, 1, 1)))


LENGTHS = (0, 1, 5, 64, 0, 3, 65, 1, 0)


@law(lambda subject: subject.packs)
def ragged_equals_one_by_one(subject: Subject, impl: Impl) -> None:
    """Packed sequences give what each gives alone: to the bit for primitives; empty ones keep their state."""
    cu_seqlens = kda_fn.cu_seqlens_of(LENGTHS)
    N, T = len(LENGTHS), sum(LENGTHS)
    packed = draw(subject, impl, batch=(2,), T=T, N=N)
    for offsets in (cu_seqlens, torch.tensor(cu_seqlens), torch.tensor(cu_seqlens, dtype=torch.int32)):
        outputs = subject.call(packed, impl, offsets)
        assert_close(outputs, subject.call(packed, None, cu_seqlens), EXACT[impl])
    assert_close(
        gradients(subject, packed, impl, cu_seqlens),
        gradients(subject, packed, None, cu_seqlens),
        SLOPE[impl],
    )
    for n, length in enumerate(LENGTHS):
        one = at_times(subject, packed, cu_seqlens[n], cu_seqlens[n + 1])
        alone = subject.call({**one, **{name: packed[name][:, n] for name in subject.states}}, impl)
        states = [state[:, n] for state in outputs[: len(subject.states)]]
        y = outputs[-1].narrow(subject.y_time, cu_seqlens[n], length)
        if subject.is_layer:
            assert_close((*states, y), alone, EXACT[impl])
        else:
            assert_identical((*states, y), alone)
        if length == 0:
            assert_identical(states, [packed[name][:, n] for name in subject.states])


@law()
def nan_stays_in_its_sequence(subject: Subject, impl: Impl) -> None:
    """One sequence of NaN touches no bit of the others, in a batch or packed."""
    clean = draw(subject, impl, batch=(3,), T=66, seed=9)
    expected = subject.call(clean, impl)
    name = next(iter(subject.time), "v")
    mark = clean[name].new_tensor([0.0, torch.nan, 0.0]).view(3, *[1] * (clean[name].ndim - 1))
    outputs = subject.call({**clean, name: clean[name] + mark}, impl)
    assert bool(outputs[-1][1].isnan().any())
    assert_identical([y[[0, 2]] for y in outputs], [y[[0, 2]] for y in expected])
    if subject.packs:
        lengths = (40, 1, 25)
        cu_seqlens = kda_fn.cu_seqlens_of(lengths)
        packed = draw(subject, impl, batch=(), T=66, N=3, seed=9)
        expected = subject.call(packed, impl, cu_seqlens)
        axis = subject.time[name]
        lines = packed[name].clone()
        lines.narrow(axis, 40, 1).fill_(float("nan"))
        outputs = subject.call({**packed, name: lines}, impl, cu_seqlens)
        kept = torch.tensor([t for t in range(66) if t != 40], device=outputs[-1].device)
        states = [(y[[0, 2]], e[[0, 2]]) for y, e in zip(outputs[:-1], expected[:-1], strict=True)]
        ys = tuple(y[-1].index_select(subject.y_time, kept) for y in (outputs, expected))
        for actual, wanted in [*states, ys]:
            assert_identical(actual, wanted)


# Purity


@law()
def determinism(subject: Subject, impl: Impl) -> None:
    """The same call gives the same bits, values and gradients."""
    inputs = cast(subject, subject.inputs(batch=(3,), T=66), torch.float32)
    assert_identical(subject.call(inputs, impl), subject.call(inputs, impl))
    assert_identical(gradients(subject, inputs, impl), gradients(subject, inputs, impl))


@law()
def inputs_are_never_written(subject: Subject, impl: Impl) -> None:
    """Values and version counters of all inputs are as before, forward and backward."""
    for N, cu_seqlens in ((None, None), (3, (0, 7, 7, 21))):
        if N and not subject.packs:
            continue
        inputs = draw(subject, impl, batch=(2,), T=21, N=N)
        before = tree_map(lambda x: x.clone(), inputs)
        subject.call(inputs, impl, cu_seqlens)
        gradients(subject, inputs, impl, cu_seqlens)
        assert_identical(inputs, before)
        assert all(x._version == 0 for x in leaves(inputs))


@law()
def outputs_own_their_memory(subject: Subject, impl: Impl) -> None:
    """No output shares storage with an input or another output, and a state's storage is the state's size."""
    for T in (0, 1, 21, 64):
        for N, cu_seqlens in ((None, None), (2, (0, T, T))):
            if N and not subject.packs:
                continue
            inputs = draw(subject, impl, batch=(2,), T=T, N=N)
            with torch.no_grad():
                outputs = subject.call(inputs, impl, cu_seqlens)
            storages = [x.untyped_storage() for x in (*leaves(inputs), *outputs) if x.numel()]
            assert len({storage.data_ptr() for storage in storages}) == len(storages)
            for y in outputs:
                assert y.untyped_storage().nbytes() == y.numel() * y.element_size()


@law()
def any_strides(subject: Subject, impl: Impl) -> None:
    """Transposed, sliced (from memory full of 1e30) and expanded inputs, and an expanded cotangent."""

    def transposed(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    def sliced(x: Tensor) -> Tensor:
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 3), 1e30)
        view = wide[..., 2 : 2 + 2 * x.shape[-1] : 2]
        view.copy_(x)
        return view

    inputs = draw(subject, impl, batch=(3,), T=9, seed=12)
    expected, slopes = subject.call(inputs, None), gradients(subject, inputs, None)
    for layout in (transposed, sliced):
        laid = tree_map(layout, inputs)
        assert_close(subject.call(laid, impl), expected, EXACT[impl])
        assert_close(gradients(subject, laid, impl), slopes, SLOPE[impl])

    one = row(subject, inputs, slice(0, 1))
    expanded = {n: x if n in subject.shared else x.expand(3, *x.shape[1:]) for n, x in one.items()}
    three = {n: x if n in subject.shared else x.repeat(3, *[1] * (x.ndim - 1)) for n, x in one.items()}
    assert_close(subject.call(expanded, impl), subject.call(three, None), EXACT[impl])

    ones = [torch.ones((), dtype=WIDEST[impl], device=y.device).expand(y.shape) for y in expected]
    actual, wanted = (gradients(subject, inputs, i, weights=ones) for i in (impl, None))
    assert_close(actual, wanted, SLOPE[impl])


@law()
def autocast_does_not_reach_the_memory(subject: Subject, impl: Impl) -> None:
    """Under torch.autocast a primitive gives the bits that it gives without; a layer keeps all its dtypes."""
    inputs = cast(subject, subject.inputs(batch=(2,), T=66), torch.float32)
    expected = subject.call(inputs, impl)
    with torch.autocast(subjects.DEVICE, torch.bfloat16):
        outputs = subject.call(inputs, impl)
    if subject.is_layer:
        assert [y.dtype for y in outputs] == [y.dtype for y in expected]
        assert_close(outputs, expected, LAYER_ROUNDINGS * VALUE[torch.bfloat16])
    else:
        assert_identical(outputs, expected)


# Transforms; test_transforms.py has the 32 of them


@law()
def vmap_equals_loop(subject: Subject, impl: Impl) -> None:
    """Mapping adds one axis and nothing else."""
    inputs = draw(subject, impl, batch=(3,), T=9)
    in_dims = {n: tree_map(lambda _: None, x) if n in subject.shared else 0 for n, x in inputs.items()}
    mapped = vmap(lambda x: subject.call(x, impl), in_dims=(in_dims,))(inputs)
    loop = [subject.call(row(subject, inputs, i), None) for i in range(3)]
    assert_close(mapped, [torch.stack(ys) for ys in zip(*loop, strict=True)], EXACT[impl])


@law()
def per_sample_gradients(subject: Subject, impl: Impl) -> None:
    """vmap(grad) of everything, shared inputs included, equals a loop of backward passes."""
    inputs = draw(subject, impl, batch=(3,), T=9)
    in_dims = {n: tree_map(lambda _: None, x) if n in subject.shared else 0 for n, x in inputs.items()}
    weights = weights_like(subject.call(row(subject, inputs, 0), None))

    def loss(x: Inputs) -> Tensor:
        return loss_of(subject.call(x, impl), weights)

    mapped = [g for g in leaves(vmap(grad(loss), in_dims=(in_dims,))(inputs)) if g.numel()]
    loop = [gradients(subject, row(subject, inputs, i), None, weights=weights) for i in range(3)]
    assert_close(mapped, [torch.stack(gs) for gs in zip(*loop, strict=True)], SLOPE[impl])


# Gates


@law(is_kda)
def any_gate(subject: Subject, impl: Impl) -> None:
    """Decays of 1, e^-20, e^-1000 and exactly 0, alone and mixed: finite and right, with their gradients."""
    inputs = draw(subject, impl, batch=(), T=70, seed=10)
    g = inputs["g"]
    picks = torch.rand(g.shape, generator=torch.Generator().manual_seed(11)).to(g.device)
    strong = g.new_tensor([0.0, -20.0, -1000.0, -torch.inf])
    mixed = torch.where(picks < 0.8, g, strong[(picks * 1000).long() % 4])
    gates = {
        "none": torch.zeros_like(g),
        "-0.01": torch.full_like(g, -0.01),
        "-1.5": torch.full_like(g, -1.5),
        "-5": torch.full_like(g, -5.0),
        "-6": torch.full_like(g, -6.0),
        "-20": torch.full_like(g, -20.0),
        "-1000": torch.full_like(g, -1000.0),
        "mixed": mixed,
    }
    for dtype in DTYPES[impl]:
        for gate in gates.values():
            case = cast(subject, {**inputs, "g": gate}, dtype)
            assert_close(subject.call(case, impl), subject.call(case, None), VALUE[dtype])
            actual, expected = gradients(subject, case, impl), gradients(subject, case, None)
            for a, e in zip(actual, expected, strict=True):
                # Behind very strong decays the gradient of the state or of the gate itself is zero.
                if (e.abs() < 1e-30).all():
                    assert (a == 0).all()
                else:
                    assert_close([a], [e], GRADIENT[dtype])


@law(is_fused)
def any_logit(subject: Subject, impl: Impl) -> None:
    """Gates and betas that are saturated, alone and mixed: right, and their gradients finite."""
    inputs = draw(subject, impl, batch=(), T=70, seed=10)
    raw, beta = inputs["raw"], inputs["beta"]
    cases = [{"raw": torch.full_like(raw, logit)} for logit in (-1000.0, -10.0, 10.0, 1000.0)]
    cases += [{"raw": torch.where(raw.abs() > 2, 1e3 * raw, raw), "beta": 40 * beta}]
    for dtype in DTYPES[impl]:
        for logits in cases:
            case = cast(subject, {**inputs, **logits}, dtype)
            assert_close(subject.call(case, impl), subject.call(case, None), VALUE[dtype])
            assert all(g.isfinite().all() for g in gradients(subject, case, impl))


@law(lambda subject: subject.name == KDA.name)
def chunk_size_changes_rounding_only(subject: Subject, impl: Impl) -> None:
    """Every power of two gives the result of the recurrence."""
    inputs = draw(subject, impl, batch=(2,), T=70)
    expected = subject.call(inputs, None)
    for chunk_size in (1, 2, 4, 16, 32, 128):
        outputs = kda_fn.kda(*inputs.values(), chunk_size=chunk_size, impl=impl)
        assert_close(outputs, expected, EXACT[impl])
