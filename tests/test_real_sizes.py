"""The kernels at the sizes they are made for, on an accelerator: `pytest -m device --device cuda`.

Expected values are the float64 recurrence's, by the fallback: `test_laws.py` holds it to 1e-12.
"""

from __future__ import annotations

import math

import pytest
import subjects
import torch
from laws import assert_close, assert_identical
from torch import Tensor

import kda_fn

pytestmark = pytest.mark.device

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}
LENGTHS = (1300, 547, 2048, 963, 271, 3063)
GATES = ("random", "initialised", "long", "strong")


def _inputs(
    dtype: torch.dtype,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    N: int = 0,
    gates: str = "initialised",
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(subjects.DEVICE)

    raw = draw(B, T, HV, K)
    uniform = torch.rand(HV * K, generator=generator).to(subjects.DEVICE)
    A_log, dt_bias = torch.zeros(HV, device=raw.device), torch.zeros(HV * K, device=raw.device)
    if gates == "initialised":
        step = torch.exp(math.log(1e-3) + uniform * math.log(100))
        raw, dt_bias = 0.3 * raw, step + torch.log(-torch.expm1(-step))
    if gates == "long":
        dt_bias -= 10
    g = kda_fn.kda_gate(raw, A_log, dt_bias, impl="reference")
    if gates == "strong":
        strong = torch.tensor([-20.0, -1000.0, -torch.inf], device=g.device)
        g = torch.where(uniform.view(HV, K) < 0.05, strong[(uniform.view(HV, K) * 1e4).long() % 3], g)
    rows = (B, N) if N else (B,)
    q, k = (kda_fn.l2_norm(draw(B, T, H, K), impl="reference") for _ in "qk")
    v, beta = draw(B, T, HV, V), torch.sigmoid(draw(B, T, HV))
    return draw(*rows, HV, K, V), q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def _wide(x: Tensor) -> Tensor:
    """In float64, on the CPU where the device may have none."""
    return x.to(x.device if x.device.type == "cuda" else "cpu", torch.float64)


def _assert_right(inputs: tuple[Tensor, ...], dtype: torch.dtype, **options: object) -> None:
    actual = kda_fn.kda(*inputs, impl="triton", **options)  # pyright: ignore[reportArgumentType]
    exact = {name: value for name, value in options.items() if name == "cu_seqlens"}
    wide = map(_wide, inputs)
    assert_close(actual, kda_fn.kda(*wide, impl="fallback", **exact), TOLERANCE[dtype])  # pyright: ignore[reportArgumentType]
    assert_identical(kda_fn.kda(*inputs, impl="triton", **options), actual)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_long(gates: str, dtype: torch.dtype) -> None:
    _assert_right(_inputs(dtype, 1, 8192, 32, 32, 128, 128, gates=gates), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bounded(dtype: torch.dtype) -> None:
    inputs = _inputs(dtype, 1, 8192, 32, 32, 128, 128)
    g = -5 * torch.sigmoid(2 * torch.randn_like(inputs[4]))
    _assert_right((*inputs[:4], g, inputs[5]), dtype, lower_bound=-5.0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_packed(dtype: torch.dtype) -> None:
    inputs = _inputs(dtype, 1, sum(LENGTHS), 32, 32, 128, 128, N=len(LENGTHS))
    cu_seqlens = kda_fn.cu_seqlens_of(LENGTHS)
    _assert_right(inputs, dtype, cu_seqlens=cu_seqlens)
    state, o = kda_fn.kda(*inputs, cu_seqlens=cu_seqlens, impl="triton")
    start, stop = cu_seqlens[3], cu_seqlens[4]
    alone = kda_fn.kda(inputs[0][:, 3], *(x[:, start:stop] for x in inputs[1:]), impl="triton")
    assert_identical((state[:, 3], o[:, start:stop]), alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("H", "HV", "K", "V"), [(16, 32, 128, 128), (4, 4, 128, 256), (4, 4, 96, 80)], ids=str
)
def test_heads(H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> None:
    _assert_right(_inputs(dtype, 2, 1000, H, HV, K, V), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode(dtype: torch.dtype) -> None:
    inputs = _inputs(dtype, 256, 1, 32, 32, 128, 128)
    _assert_right(inputs, dtype)
    state, o = kda_fn.kda(*inputs, impl="triton")
    step = kda_fn.kda_step(inputs[0], *(x.squeeze(1) for x in inputs[1:]), impl="triton")
    assert_identical(step, (state, o.squeeze(1)))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layer_primitives(dtype: torch.dtype) -> None:
    """A strided slice of a packed projection, read where it is."""
    B, T, H, K, P = 2, 4096, 32, 128, 3 * 32 * 128
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(B, T, P, generator=generator).to(subjects.DEVICE, dtype)
    weight = torch.randn(P, 4, generator=generator).to(subjects.DEVICE)
    state = packed[:, -3:].clone()
    wide = map(_wide, (state, packed, weight))
    assert_close(
        kda_fn.causal_conv1d(state, packed, weight, impl="triton"),
        kda_fn.causal_conv1d(*wide, impl="fallback"),
        TOLERANCE[dtype],
    )
    heads = packed[..., H * K : 2 * H * K].unflatten(-1, (H, K))
    assert_close(
        kda_fn.l2_norm(heads, impl="triton"),
        kda_fn.l2_norm(_wide(heads), impl="reference"),
        TOLERANCE[dtype],
    )
    gate = packed[..., 2 * H * K :].unflatten(-1, (H, K))
    norm = torch.randn(K, generator=generator).to(subjects.DEVICE, dtype)
    assert_close(
        kda_fn.gated_rms_norm(heads, gate, norm, eps=1e-5, impl="triton"),
        kda_fn.gated_rms_norm(*map(_wide, (heads, gate, norm)), eps=1e-5, impl="reference"),
        TOLERANCE[dtype],
    )
    A_log, dt_bias = (torch.randn(n, generator=generator).to(subjects.DEVICE) for n in (H, H * K))
    assert_close(
        kda_fn.kda_gate(gate, A_log, dt_bias, impl="triton"),
        kda_fn.kda_gate(*map(_wide, (gate, A_log, dt_bias)), impl="reference"),
        TOLERANCE[torch.float32],
    )
