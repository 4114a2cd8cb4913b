"""The vendor's KDA operators by contract: what is called, in which layout, and what is refused before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contracts import vendor_kda
from laws import assert_close, assert_identical
from torch import Tensor

import kda_fn
from kda_fn import cu_seqlens_of
from kda_fn.primitives.causal_conv1d import ascendc as conv
from kda_fn.primitives.kda import ascendc

LENGTHS = (3, 0, 1, 8, 0, 5)
LONG = (70, 0, 1, 64, 9)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def _vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operators are there, and CPU tensors are taken for theirs."""
    library = vendor_kda.register()
    for module in (conv, ascendc):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    yield
    library._destroy()


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _kda_inputs(
    batch: tuple[int, ...], T: int, *, N: tuple[int, ...] = (), H: int = 1, HV: int = 2, V: int = 128
) -> tuple[Tensor, ...]:
    K = 128
    q, k = (kda_fn.l2_norm(_draw(*batch, T, H, K, seed=i)).bfloat16() for i in (1, 2))
    v, g = _draw(*batch, T, HV, V, seed=3).bfloat16(), -5 * torch.sigmoid(_draw(*batch, T, HV, K, seed=4))
    return _draw(*batch, *N, HV, K, V, seed=0), q, k, v, g, torch.sigmoid(_draw(*batch, T, HV, seed=5))


def _expected(inputs: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    return kda_fn.kda(*(x.double() for x in inputs), impl="reference", **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("_vendor")
@pytest.mark.parametrize(
    ("batch", "T", "lengths", "V"),
    [
        ((), 1, None, 128),
        ((2,), 8, None, 256),
        ((), sum(LENGTHS), LENGTHS, 128),
        ((2,), sum(LENGTHS), LENGTHS, 128),
    ],
    ids=str,
)
def test_few_tokens(batch: tuple[int, ...], T: int, lengths: tuple[int, ...] | None, V: int) -> None:
    N = () if lengths is None else (len(lengths),)
    inputs = _kda_inputs(batch, T, N=N, V=V)
    offsets = None if lengths is None else cu_seqlens_of(lengths)
    before = [x.clone() for x in inputs]
    actual = kda_fn.kda(*inputs, cu_seqlens=offsets, impl="ascendc")
    assert_close(actual, _expected(inputs, cu_seqlens=offsets), 5e-3)
    assert_identical(inputs, before)
    if lengths is not None:
        assert_identical(actual[0][..., 1, :, :, :], inputs[0][..., 1, :, :, :])


@pytest.mark.usefixtures("_vendor")
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("lengths", [None, LONG], ids=str)
def test_chunks(batch: tuple[int, ...], lengths: tuple[int, ...] | None) -> None:
    T = 75 if lengths is None else sum(lengths)
    inputs = _kda_inputs(batch, T, N=() if lengths is None else (len(lengths),))
    options: dict[str, Any] = {
        "cu_seqlens": None if lengths is None else cu_seqlens_of(lengths),
        "scale": 0.5,
    }
    before = [x.clone() for x in inputs]
    actual = kda_fn.kda(*inputs, lower_bound=-5.0, impl="ascendc", **options)
    assert_close(actual, _expected(inputs, **options), 5e-3)
    assert_identical(inputs, before)


@pytest.mark.usefixtures("_vendor")
def test_slots_in_place() -> None:
    """The serving form: states of the pool, V first, from and into their slots."""
    inputs = _kda_inputs((), sum(LENGTHS), N=(len(LENGTHS),))
    states, tokens = inputs[0], inputs[1:]
    pool = torch.full((10, 2, 128, 128), math.nan)
    slots = torch.tensor([7, 2, 0, 9, 4, 5])
    pool[slots] = states.mT
    o = ascendc.kda_(pool, slots, *tokens, scale=128**-0.5, bounds=cu_seqlens_of(LENGTHS))
    assert_close((pool[slots].mT, o), _expected(inputs, cu_seqlens=cu_seqlens_of(LENGTHS)), 5e-3)
    assert pool[[1, 3, 6, 8]].isnan().all()


@pytest.mark.usefixtures("_vendor")
def test_drafts_in_place() -> None:
    """Every token's state in its column, from the state after the last step's accepted token."""
    lengths, accepted = (3, 0, 1, 4), torch.tensor([2, 1, 3, 1])
    inputs = _kda_inputs((), sum(lengths))
    tokens, pool = inputs[1:], _draw(18, 2, 128, 128, seed=9)
    before, slots = pool.clone(), torch.randperm(16, generator=torch.Generator().manual_seed(0)).view(4, 4)
    offsets = cu_seqlens_of(lengths)
    o = ascendc.kda_(pool, slots, *tokens, scale=128**-0.5, bounds=offsets, accepted=accepted)
    written = set()
    for n, start in enumerate(offsets[:-1]):
        state = before[slots[n, accepted[n] - 1]].mT.double()
        for j in range(lengths[n]):
            token = (x[start + j : start + j + 1].double() for x in tokens)
            state, y = kda_fn.kda(state, *token, impl="reference")
            written.add(int(slots[n, j]))
            assert_close((pool[slots[n, j]].mT, o[start + j]), (state, y[0]), 5e-3)
    kept = sorted(set(range(18)) - written)
    assert_identical(pool[kept], before[kept])


@pytest.mark.usefixtures("_vendor")
@pytest.mark.parametrize("W", [2, 4])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(("batch", "lengths"), [((), None), ((2, 3), None), ((2,), LENGTHS)], ids=str)
def test_convolution(
    batch: tuple[int, ...], lengths: tuple[int, ...] | None, activation: Any, W: int
) -> None:
    T, P = sum(LENGTHS), 6
    N = () if lengths is None else (len(lengths),)
    state, x = (_draw(*batch, *N, W - 1, P, seed=0).bfloat16(), _draw(*batch, T, P, seed=1).bfloat16())
    weight, bias = _draw(P, W, seed=2), _draw(P, seed=3)
    options: dict[str, Any] = {
        "activation": activation,
        "cu_seqlens": None if lengths is None else cu_seqlens_of(lengths),
    }
    before = state.clone(), x.clone()
    actual = kda_fn.causal_conv1d(state, x, weight, bias, impl="ascendc", **options)
    rounded = (y.bfloat16().double() for y in (weight, bias))
    expected = kda_fn.causal_conv1d(state.double(), x.double(), *rounded, impl="reference", **options)
    assert_close(actual, expected, 5e-3)
    assert_identical((state, x), before)


@pytest.mark.usefixtures("_vendor")
def test_convolution_of_slots() -> None:
    lines, x, weight = _draw(5, 3, 6, seed=0).bfloat16(), _draw(9, 6, seed=1).bfloat16(), _draw(6, 4, seed=2)
    before, bounds = lines.clone(), cu_seqlens_of([4, 0, 2, 3])
    y = conv.causal_conv1d_(
        lines, torch.tensor([3, 1, -1, 0]), x, conv.packed_weight(weight, x), bounds=bounds
    )
    for slot, start, stop in ((3, 0, 4), (0, 6, 9)):
        expected = kda_fn.causal_conv1d(
            before[slot], x[start:stop], weight.bfloat16().float(), impl="reference"
        )
        assert_close((lines[slot], y[start:stop]), expected, 5e-3)
    assert not y[4:6].any()
    assert_identical(lines[[1, 2, 4]], before[[1, 2, 4]])


def _why(**change: Any) -> str:
    inputs = _kda_inputs((), 9)
    names = ("initial_state", "q", "k", "v", "g", "beta")
    given = {**dict(zip(names, inputs, strict=True)), "lower_bound": -5.0, **change}
    return str(kda_fn.explain(kda_fn.kda, *(given.pop(name) for name in names), **given)["ascendc"])


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "run on npu devices" in _why()
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    assert "runs on npu devices" in str(
        kda_fn.explain(kda_fn.causal_conv1d, x[:1, :].new_zeros(3, 8), x, torch.zeros(8, 4))["ascendc"]
    )
    for module in (conv, ascendc):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    assert "which registers kda_gate_cumsum, is not loaded" in _why()
    library = vendor_kda.register()
    assert _why() == "None"
    assert "right under a promised lower_bound alone" in _why(lower_bound=None)
    narrow = _kda_inputs((), 9)
    assert "float32, not in torch.float64" in _why(initial_state=narrow[0].double())
    q, k, v = (x.float() for x in narrow[1:4])
    assert "takes bfloat16 and float16, not torch.float32" in _why(q=q, k=k, v=v)
    assert "requires a gradient" in _why(beta=narrow[5].clone().requires_grad_())
    small = {
        "initial_state": narrow[0][..., :32, :],
        "q": narrow[1][..., :32],
        "k": narrow[2][..., :32],
        "g": narrow[4][..., :32],
    }
    assert "K = 32, V = 128" in _why(**small)
    with pytest.raises(NotImplementedError, match="right under a promised lower_bound alone"):
        kda_fn.kda(*narrow, impl="ascendc")
    reasons = {
        "takes a width of 2, 3 or 4, not 5": (x.new_zeros(4, 8), x, torch.zeros(8, 5)),
        "takes bfloat16 and float16, not torch.float32": (torch.zeros(3, 8), x.float(), torch.zeros(8, 4)),
        "takes at least one token": (x.new_zeros(3, 8), x[:0], torch.zeros(8, 4)),
    }
    for reason, arguments in reasons.items():
        assert reason in str(kda_fn.explain(kda_fn.causal_conv1d, *arguments)["ascendc"])
    library._destroy()


@pytest.mark.usefixtures("_vendor")
def test_the_stand_ins_refuse() -> None:
    """A stand-in that took everything would prove nothing."""
    ops = torch.ops._C_ascend
    state, q, k, v, g, beta = _kda_inputs((), 9)
    chunked = (q[None], k[None], v[None])
    good: dict[str, Any] = {
        "initial_state": state[None],
        "output_final_state": True,
        "cu_seqlens": [0, 9],
        "chunk_indices": [0, 0],
    }
    sums = ops.kda_gate_cumsum(g[None], 64, cu_seqlens=[0, 9])
    ops.chunk_kda_fwd(*chunked, sums, beta[None], 1.0, 64, **good)
    for change in (
        {"cu_seqlens": [0, 0, 9]},
        {"chunk_indices": [1, 0]},
        {"initial_state": state[None].mT},
        {"safe_gate": True},
    ):
        with pytest.raises(vendor_kda.RefusedError):
            ops.chunk_kda_fwd(*chunked, sums, beta[None], 1.0, 64, **{**good, **change})
    with pytest.raises(vendor_kda.RefusedError, match="clamp"):
        ops.chunk_kda_fwd(*chunked, 4 * sums, beta[None], 1.0, 64, **good)
    with pytest.raises(vendor_kda.RefusedError):
        ops.kda_gate_cumsum(g[None].bfloat16(), 64, cu_seqlens=[0, 9])
    pool, tokens = state[None].mT.contiguous(), (q, k, v, g, beta)
    weights = torch.zeros(2), torch.zeros(256)
    off: dict[str, Any] = {
        "scale": 1.0,
        "use_qk_l2norm_in_kernel": False,
        "use_gate_in_kernel": False,
        "safe_gate": False,
    }
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    slots = torch.tensor([0] * 4 + [5] * 5, dtype=torch.int32)
    o = ops.recurrent_kda(*tokens, pool, offsets, slots, *weights, **off)
    assert torch.isfinite(o[:4]).all() and o[4:].isnan().all()
    with pytest.raises(vendor_kda.RefusedError, match="8 tokens"):
        ops.recurrent_kda(*tokens, pool, offsets[::2].contiguous(), slots * 0, *weights, **off)
