"""What the laws do not say of the kernels: their bounds, their launches, and where they serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import subjects
import torch
from emulator import Emulator
from laws import gradients
from subjects import CONV, CONV_BIAS, KDA, KDA_STEP, L2_NORM, SUBJECTS, Inputs, Subject, cast
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
    """Fences before and behind every argument; the emulator raises at the first access to one."""
    with Emulator(strict=True) as emulator:
        for T in (0, 1, 2, 9, 70):
            subject.call(cast(subject, subject.inputs(batch=(2,), T=T), dtype), impl)
        if subject.packs:
            lengths = (0, 3, 70, 1, 0, 17)
            inputs = subject.inputs(batch=(), T=sum(lengths), N=len(lengths))
            subject.call(cast(subject, inputs, dtype), impl, kda_fn.cu_seqlens_of(lengths))
    assert len(emulator.launches) >= 4


@on_the_emulator
def test_a_call_is_as_few_launches_as_it_can_be(impl: Impl) -> None:
    def call(subject: Subject, T: int, **options: Any) -> list[str]:
        inputs = cast(subject, subject.inputs(T=T, **options), torch.float32)
        return launches(lambda: subject.call(inputs, impl))

    assert call(KDA, 70) == ["_chunk_terms", "_chunk_scan"]
    assert call(KDA, 1) == call(KDA, 8) == call(KDA_STEP, 1) == ["_steps"]
    assert call(CONV, 70) == call(CONV, 1) == ["_causal_conv1d"]
    assert call(KDA, 0) == ["_steps"]
    lengths = (70, 1, 0, 9)
    inputs = cast(KDA, KDA.inputs(batch=(), T=80, N=4), torch.float32)
    packed = launches(lambda: KDA.call(inputs, impl, kda_fn.cu_seqlens_of(lengths)))
    assert packed == ["_steps", "_chunk_terms", "_chunk_scan"]


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


def test_without_a_device_explain_says_why() -> None:
    for function, primitive in PRIMITIVES.items():
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
    for target in (_targets.ASCEND910B3, _targets.ASCEND910_9382, _targets.CUDA):
        for tasks in (1, 39, 10**9):
            for grid in (target.vector_grid(tasks), target.cube_grid(tasks)):
                assert 1 <= grid[0] <= min(tasks, 65_535)


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
