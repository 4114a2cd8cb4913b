"""Both decay gates in Triton: a tile of rows of one head at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import readable
from kda_fn.types import Tensor

__all__ = ["launch_kda_gate"]


def launch_kda_gate(
    outputs: tuple[Tensor, ...],
    raw: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
) -> None:
    (g,) = outputs
    if not g.numel():
        return
    HV, K = raw.shape[-2:]
    rows = readable(raw.reshape(-1, HV, K))
    target = _targets.target_of(raw)
    tile = _targets.row_tile(target, K, tensors=3)
    programs = target.vector_grid(HV * triton.cdiv(len(rows), tile.rows))
    _kda_gate[programs](
        rows,
        A_log.contiguous(),
        dt_bias.contiguous(),
        g,
        len(rows),
        rows.stride(0),
        rows.stride(1),
        0.0 if lower_bound is None else lower_bound,
        HV,
        K,
        lower_bound is not None,
        A_log.numel() > 0,
        tile.rows,
        tile.columns,
        **tile.launch,
    )


@triton.jit(do_not_specialize=["outer"])
def _kda_gate(
    raw_ptr,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    outer,
    raw_outer,
    raw_inner,
    lower_bound,
    HV: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_RATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(outer, ROWS)
    c = tl.arange(0, COLUMNS)
    for task in range(tl.program_id(0), blocks * HV, tl.num_programs(0)):
        row = (task % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        head = task // blocks
        mask = (row < outer) & (c < K)[None, :]
        wide = tl.cast(row, tl.int64)
        raw = tl.load(raw_ptr + wide * raw_outer + head * raw_inner + c[None, :], mask=mask, other=0.0)
        bias = tl.load(dt_bias_ptr + head * K + c, mask=c < K, other=0.0).to(tl.float32)
        x = raw.to(tl.float32) + bias[None, :]
        rate = 1.0
        if HAS_RATE:
            # A finite rate: inf times 0 would be NaN.
            rate = tl.exp(tl.minimum(tl.load(A_log_ptr + head).to(tl.float32), 87.0))
        if BOUNDED:
            g = lower_bound / (1.0 + tl.exp(-rate * x))
        else:
            g = -rate * _softplus(x)
        tl.store(g_ptr + (wide * HV + head) * K + c[None, :], g, mask=mask)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(u), u = exp(-|x|) in (0, 1]."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    # log1p as log(w) u / (w - 1): what w loses of u, the quotient gives back.
    lost = tl.where(w == 1.0, 1.0, w - 1.0)
    return tl.maximum(x, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / lost))
