"""What the laws do not say of the kernels: their bounds, their launches, and where they serve."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import subjects
import torch
from emulator import Emulator
from laws import SLOPE, assert_close, assert_identical, gradients, loss_of, row, weights_like
from subjects import (
    BOUNDED_GATE,
    CONV,
    CONV_BIAS,
    FUSED_KDA,
    KDA,
    KDA_STEP,
    L2_NORM,
    LAYER,
    NORM,
    RESIDUAL_NORM,
    SILU_NORM,
    SOFTPLUS_GATE,
    SUBJECTS,
    Inputs,
    Subject,
    cast,
)
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kda_fn
from kda_fn.primitives import _kernel, _targets
from kda_fn.primitives._primitive import PRIMITIVES
from kda_fn.types import Impl

# The fixture in conftest.py serves the kernels where impl is "triton".
on_the_emulator = pytest.mark.parametrize("impl", ["triton"])
PRIMITIVE_SUBJECTS = [subject for subject in SUBJECTS if not subject.is_layer]


def launches(call: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a call launches, in order."""
    with Emulator() as emulator:
        call()
    return [launch.kernel for launch in emulator.launches]


@on_the_emulator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("subject", PRIMITIVE_SUBJECTS, ids=lambda subject: subject.name)
def test_no_kernel_reads_or_writes_outside_of_its_tensors(
    subject: Subject, dtype: torch.dtype, impl: Impl
) -> None:
    """Forward and backward: fences around every argument; the emulator raises at the first access to one."""
    with Emulator(strict=True) as emulator:
        for T in (0, 1, 2, 9, 70):
            inputs = cast(subject, subject.inputs(batch=(2,), T=T), dtype)
            if any(x.numel() for x in inputs.values()):
                gradients(subject, inputs, impl)
        if subject.packs:
            lengths = (0, 3, 70, 1, 0, 17)
            inputs = subject.inputs(batch=(), T=sum(lengths), N=len(lengths))
            gradients(subject, cast(subject, inputs, dtype), impl, kda_fn.cu_seqlens_of(lengths))
    assert len(emulator.launches) >= 4


@on_the_emulator
def test_a_call_is_as_few_launches_as_it_can_be(impl: Impl) -> None:
    def call(subject: Subject, T: int, **options: Any) -> list[str]:
        inputs = cast(subject, subject.inputs(T=T, **options), torch.float32)
        return launches(lambda: subject.call(inputs, impl))

    chunks = ["chunk_terms", "_chunk_scan"]
    assert call(KDA, 70) == call(FUSED_KDA, 70) == chunks
    assert call(KDA, 1) == call(KDA, 8) == call(KDA_STEP, 1) == call(FUSED_KDA, 1) == ["_steps"]
    assert call(CONV, 70) == call(CONV, 1) == ["_causal_conv1d"]
    assert call(KDA, 0) == ["_steps"]
    assert call(LAYER, 70) == ["_causal_conv1d", *chunks, "_gated_rms_norm"]
    assert call(LAYER, 1) == ["_causal_conv1d", "_steps", "_gated_rms_norm"]
    lengths = (70, 1, 0, 9)
    inputs = cast(KDA, KDA.inputs(batch=(), T=80, N=4), torch.float32)
    packed = launches(lambda: KDA.call(inputs, impl, kda_fn.cu_seqlens_of(lengths)))
    assert packed == ["_steps", *chunks]


@on_the_emulator
def test_a_backward_is_as_few_launches_as_it_can_be(impl: Impl) -> None:
    """One, and where rows are summed one for the partial sums; of KDA's chunks one for each part of it."""

    def backward(subject: Subject) -> list[str]:
        inputs = cast(subject, subject.inputs(T=70), torch.bfloat16)
        return launches(lambda: gradients(subject, inputs, impl))

    assert backward(CONV) == ["_causal_conv1d", "_causal_conv1d_backward", "_sum_of_parts"]
    assert backward(SOFTPLUS_GATE) == ["_kda_gate", "_kda_gate_backward", "_sum_of_parts"]
    assert backward(L2_NORM) == ["_l2_norm", "_l2_norm_backward"]
    norm = ["_gated_rms_norm", "_gated_rms_norm_backward"]
    assert backward(NORM) == backward(RESIDUAL_NORM) == [*norm, "_sum_of_parts"]
    assert backward(SILU_NORM) == norm
    chunks = ["chunk_terms", "_chunk_scan"]
    kda = [*chunks, *chunks, "_chunk_scan_back", "_chunk_pairs_back", "chunk_gradients"]
    assert backward(KDA) == kda
    assert backward(FUSED_KDA) == [*kda, *["_l2_norm_backward"] * 2, *["_sum_of_parts"] * 2]


MANY_ROWS: dict[str, tuple[Subject, dict[str, int]]] = {
    "convolution": (CONV, {"P": 200}),
    "convolution, bias": (CONV_BIAS, {"P": 200}),
    "convolution, two taps": (CONV, {"W": 2}),
    "softplus gate": (SOFTPLUS_GATE, {"HV": 2, "K": 100}),
    "bounded gate": (BOUNDED_GATE, {"HV": 2, "K": 100}),
    "norm": (NORM, {"F": 200}),
    "norm of long rows": (NORM, {"F": 700}),
    "residual norm": (RESIDUAL_NORM, {"F": 200}),
    "residual norm of long rows": (RESIDUAL_NORM, {"F": 700}),
}
"""Sizes at which every sum over rows has several partial sums, the last of which is not full."""


@on_the_emulator
@pytest.mark.parametrize("case", MANY_ROWS)
def test_sums_over_many_rows(case: str, impl: Impl) -> None:
    subject, sizes = MANY_ROWS[case]
    inputs = cast(subject, subject.inputs(batch=(2,), T=150, **sizes), torch.float32)
    # A slice of a wider tensor has an axis between its rows.
    sliced = {
        n: x if n in subject.shared else torch.cat([x, x], -1)[..., : x.shape[-1]] for n, x in inputs.items()
    }
    expected = gradients(subject, inputs, None)
    for laid in (inputs, sliced):
        assert_close(gradients(subject, laid, impl), expected, SLOPE[impl])


@on_the_emulator
@pytest.mark.parametrize("case", MANY_ROWS)
def test_gradients_of_a_row_do_not_know_its_neighbours(case: str, impl: Impl) -> None:
    """To the bit, those of shared weights too: alone, and by vmap in one launch of each kernel."""
    subject, sizes = MANY_ROWS[case]
    inputs = cast(subject, subject.inputs(batch=(3,), T=150, **sizes), torch.float32)
    in_dims = {name: None if name in subject.shared else 0 for name in inputs}
    weights = weights_like(subject.call(row(subject, inputs, 0), impl))

    def per_sample(x: Inputs) -> Inputs:
        return grad(lambda x: loss_of(subject.call(x, impl), weights))(x)

    with Emulator() as emulator:
        together = vmap(per_sample, in_dims=(in_dims,))(inputs)
    assert len(emulator.launches) == 3
    for n in range(3):
        alone = gradients(subject, row(subject, inputs, n), impl, weights=weights)
        assert_identical([x[n] for x in together.values() if x.numel()], alone)


@on_the_emulator
def test_a_transform_adds_no_launch(impl: Impl) -> None:
    """vmap is one more batch axis, reverse mode one launch forward and one backward, in any order of both."""
    x = L2_NORM.inputs(batch=(3,), T=4)["x"].float()

    def loss(row: Tensor) -> Tensor:
        return kda_fn.l2_norm(row, impl=impl).square().sum()

    def rows(x: Tensor) -> Tensor:
        return kda_fn.l2_norm(x, impl=impl)

    def checkpointed(x: Tensor) -> None:
        checkpoint(loss, x.clone().requires_grad_(), use_reentrant=False).backward()

    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: loss(x),
        "vmap": lambda: vmap(loss)(x),
        "vmap(vmap)": lambda: vmap(vmap(loss))(x),
    }
    assert {name: launches(call) for name, call in calls.items()} == {name: ["_l2_norm"] for name in calls}
    both = {
        "backward": lambda: gradients(L2_NORM, {"x": x}, impl),
        "grad": lambda: grad(loss)(x),
        "vjp": lambda: vjp(loss, x)[1](torch.ones(())),
        "jacrev": lambda: jacrev(rows)(x),
        "grad(vmap)": lambda: grad(lambda x: vmap(loss)(x).sum())(x),
        "vmap(grad)": lambda: vmap(grad(loss))(x),
        "vmap(vmap(grad))": lambda: vmap(vmap(grad(loss)))(x),
    }
    expected = ["_l2_norm", "_l2_norm_backward"]
    assert {name: launches(call) for name, call in both.items()} == dict.fromkeys(both, expected)
    # A checkpoint computes the forward anew, by its very idea.
    assert launches(lambda: checkpointed(x)) == ["_l2_norm", *expected]
    assert launches(lambda: jvp(loss, (x,), (x,))) == []


@on_the_emulator
def test_a_weight_without_batch_axes_is_taken_once(impl: Impl) -> None:
    """Under vmap too; rows that have a weight each are a launch each."""
    inputs = cast(CONV_BIAS, CONV_BIAS.inputs(batch=(3,), T=9), torch.float32)
    state, x, weight, bias = inputs.values()

    def conv(state: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kda_fn.causal_conv1d(state, x, weight, bias, impl=impl)

    with Emulator() as emulator:
        shared = vmap(conv, in_dims=(0, 0, None))(state, x, weight)
    assert [launch.tensors["weight_ptr"] for launch in emulator.launches] == [4 * weight.numel()]
    with Emulator() as emulator:
        own = vmap(conv)(state, x, weight.expand(3, *weight.shape))
    assert len(emulator.launches) == 3
    assert all(torch.equal(a, b) for a, b in zip(shared, own, strict=True))


@on_the_emulator
def test_gradients_of_a_weight_by_sample(impl: Impl) -> None:
    """One launch for any number of maps over it; rows that have a weight each are a launch each."""
    inputs = cast(CONV_BIAS, CONV_BIAS.inputs(batch=(2, 3), T=9), torch.float32)
    state, x, weight, bias = inputs.values()

    def of_weights(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        def loss(weight: Tensor, bias: Tensor) -> Tensor:
            new_state, y = kda_fn.causal_conv1d(state, x, weight, bias, impl=impl)
            return y.square().sum() + new_state.sum()

        return grad(loss, (0, 1))(weight, bias)

    rows = (0, 0, None, None)
    with Emulator() as emulator:
        shared = vmap(vmap(of_weights, in_dims=rows), in_dims=rows)(state, x, weight, bias)
    kernels = ["_causal_conv1d", "_causal_conv1d_backward", "_sum_of_parts"]
    assert [launch.kernel for launch in emulator.launches] == kernels
    assert [tuple(g.shape) for g in shared] == [(2, 3, *weight.shape), (2, 3, *bias.shape)]
    with Emulator() as emulator:
        own = vmap(vmap(of_weights, in_dims=(0, 0, 0, None)), in_dims=rows)(
            state, x, weight.expand(3, *weight.shape), bias
        )
    assert len(emulator.launches) == 3 * len(kernels)
    assert_identical(own, shared)


@on_the_emulator
def test_gradients_of_no_token(impl: Impl) -> None:
    """Those of weights are zero, and that of a state is the next one's."""
    for subject, batch in product((CONV_BIAS, FUSED_KDA), ((2,), (0,))):
        inputs = cast(subject, subject.inputs(batch=batch, T=0), torch.float32)
        tracked = {name: x.requires_grad_() for name, x in inputs.items()}
        new_state, y = subject.call(tracked, impl)
        d_new = torch.randn_like(new_state)
        d_state, *rest = torch.autograd.grad((new_state, y), list(tracked.values()), (d_new, y))
        assert torch.equal(d_state, d_new) and d_state.shape == inputs[subject.states[0]].shape
        assert all((g == 0).all() for g in rest)


@on_the_emulator
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gradients_of_saturated_gates(lower_bound: float | None, impl: Impl) -> None:
    """Finite and right, with rates up to the end of float32; beyond it the rate has no slope."""
    subject = SOFTPLUS_GATE if lower_bound is None else BOUNDED_GATE
    inputs = cast(subject, subject.inputs(batch=(), T=40), torch.float32)
    inputs["raw"][::3] *= 1e3
    inputs["raw"][1::3] *= 1e6
    inputs["A_log"] = torch.tensor([1.0, -3.0, 87.5])
    weights = [1e-8 * w for w in weights_like(subject.call(inputs, impl))]
    actual, expected = (gradients(subject, inputs, i, weights=weights) for i in (impl, None))
    assert_close(actual, expected, SLOPE[impl])
    inputs["A_log"] = torch.tensor([1.0, -3.0, 200.0])
    of_rate = gradients(subject, inputs, impl, weights=weights)[1]
    assert of_rate[2] == 0 and (of_rate[:2] != 0).all()


@on_the_emulator
def test_strided_inputs_are_read_where_they_are(impl: Impl) -> None:
    """A slice of a packed projection: the launch is given the slice, no copy of it is made."""
    packed = torch.randn(2, 9, 3 * 32)
    heads = packed[..., 32:64].unflatten(-1, (2, 16))
    copies: list[Any] = []

    class NoCopies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies.append(func) if func.name().split("::")[1] in ("clone", "copy_", "_to_copy") else None
            return func(*args, **(kwargs or {}))

    with NoCopies():
        y = kda_fn.l2_norm(heads, impl=impl)
    assert not copies
    torch.testing.assert_close(y, torch.nn.functional.normalize(heads, dim=-1), rtol=1e-5, atol=1e-6)


@on_the_emulator
@pytest.mark.parametrize("subject", PRIMITIVE_SUBJECTS, ids=lambda subject: subject.name)
def test_operators_tell_their_outputs(subject: Subject, impl: Impl) -> None:
    """On fake tensors every kernel's outputs have the shapes, dtypes and strides of the real ones."""
    inputs: Inputs = cast(subject, subject.inputs(batch=(2,), T=9), torch.bfloat16)
    real = subject.call(inputs, impl)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = subject.call({name: mode.from_tensor(x) for name, x in inputs.items()}, impl)
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@on_the_emulator
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize(
    "subject", [CONV_BIAS, SILU_NORM, BOUNDED_GATE, L2_NORM, FUSED_KDA], ids=lambda s: s.name
)
def test_backward_operators_tell_their_gradients(subject: Subject, rows: int, impl: Impl) -> None:
    """One for each tensor that is there, in its dtype, those of shared ones behind `rows` axes."""
    operators: list[tuple[Any, Any, Any, Any]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.name().endswith("_backward"):
                operators.append((func, args, kwargs, result))
            return result

    inputs: Inputs = cast(subject, subject.inputs(batch=(2,), T=9), torch.bfloat16)
    with Record():
        gradients(subject, inputs, impl)
    ((operator, args, options, _),) = operators
    real = operator(*args, **{**options, "rows": rows})
    with torch._subclasses.FakeTensorMode() as mode:
        fake_args = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
        fake = operator(*fake_args, **{**options, "rows": rows})
    assert len(real) == len(inputs)
    for a, b, (name, x) in zip(fake, real, inputs.items(), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert b.dtype == x.dtype and b.is_contiguous()
        assert b.shape == ((2,) * rows if name in subject.shared else ()) + x.shape
        assert (b != 0).any()


def test_without_a_device_explain_says_why() -> None:
    for function, primitive in PRIMITIVES.items():
        if "triton" not in primitive.implementations:
            continue
        reason = primitive.unsupported("triton", torch.zeros(2, 3))
        assert reason is not None and "cuda and npu" in reason and "cpu" in reason, function
        wide = primitive.unsupported("triton", torch.zeros(2, 3, dtype=torch.float64))
        assert wide is not None and "float64" in wide
    with pytest.raises(NotImplementedError, match="cuda and npu"):
        kda_fn.l2_norm(torch.zeros(2, 3), impl="triton")


def test_without_triton_explain_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_targets, "HAS_TRITON", False)
    monkeypatch.setitem(_targets.TARGETS, "cpu", lambda _device: _targets.CUDA)
    assert "not installed" in str(kda_fn.explain(kda_fn.l2_norm, torch.zeros(2, 3))["triton"])


@pytest.mark.parametrize("name", ["Ascend910B3", "Ascend910_9382"])
def test_an_npu_is_known_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch_npu` is asked, when a tensor is on one."""

    class Module:
        class npu:  # noqa: N801
            get_device_name = staticmethod(lambda _index: name)

    monkeypatch.setitem(__import__("sys").modules, "torch_npu", Module)
    assert _targets.TARGETS["npu"](torch.device("cpu", 0)).name == name


@on_the_emulator
def test_what_does_not_fit_is_refused(impl: Impl) -> None:
    long = torch.zeros(1, 8193)
    assert "8193" in str(kda_fn.explain(kda_fn.l2_norm, long)["triton"])
    assert "8193" in str(kda_fn.explain(kda_fn.gated_rms_norm, long, long, None, eps=1e-6)["triton"])
    wide = KDA.inputs(batch=(), T=9, K=129)
    inputs = cast(KDA, wide, torch.float32)
    assert "K = 129" in str(kda_fn.explain(kda_fn.kda, *inputs.values())["triton"])
    with pytest.raises(NotImplementedError, match="K = 129"):
        KDA.call(inputs, impl)


def test_grids_stay_below_the_limit() -> None:
    limits = {_targets.ASCEND910B3: 65_535, _targets.ASCEND910_9382: 65_535, _targets.CUDA: 2**31 - 1}
    for target, limit in limits.items():
        for tasks in (1, 39, 10**10):
            for grid in (target.vector_grid(tasks), target.cube_grid(tasks)):
                assert 1 <= grid[0] <= min(tasks, limit)


def test_private_names_of_torch_are_still_there() -> None:
    """`_kernel.py` builds on these; where one has moved, it must be found again before anything else."""
    assert forward_ad._current_level == -1
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0
    stack = _kernel._functorch
    assert stack.get_interpreter_stack() is None and stack.peek_interpreter_stack() is None
    seen: list[Any] = []
    torch.func.functionalize(lambda x: seen.append(stack.get_interpreter_stack()[-1].key()) or x)(
        torch.ones(1)
    )
    assert seen == [stack.TransformType.Functionalize]
    x = torch.ones(2)
    wrapped: list[Tensor] = []
    grad(lambda x: (wrapped.append(x), x.sum())[1])(x)
    assert stack.is_functorch_wrapped_tensor(wrapped[0])
    assert torch.equal(stack.unwrap_if_dead(wrapped[0]), x)


def test_kernels_stay_out_of_other_tests() -> None:
    """The emulator serves only the tests that ask for it."""
    assert subjects.DEVICE != "cpu" or "cpu" not in _targets.TARGETS
