"""Both decay gates in Triton: a tile of rows of one head at a time.

With x = raw + dt_bias, the rate a = exp(A_log) and s' = s (1 - s) of a sigmoid s:

    g = -a softplus(x)         draw = -dg a sigmoid(x)               dA_log = a Σ -dg softplus(x)
    g = bound sigmoid(a x)     draw = dg a bound sigmoid'(a x)       dA_log = a Σ dg bound sigmoid'(a x) x
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import TILES, readable, sum_of_parts
from kda_fn.types import Tensor

__all__ = ["launch_kda_gate", "launch_kda_gate_backward"]

MOST = tl.constexpr(87.72283905206835)
"""Of A_log, as in `reference.py`: a finite rate, for inf times 0 would be NaN."""


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


def launch_kda_gate_backward(
    gradients: tuple[Tensor, ...],
    dg: Tensor,
    raw: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    rows: int,
) -> None:
    draw, dA_log, ddt_bias = gradients
    if not raw.numel():
        dA_log.zero_()
        ddt_bias.zero_()
        return
    groups, (HV, K) = prod(raw.shape[:rows]), raw.shape[-2:]
    raw, dg = (readable(x.reshape(-1, HV, K)) for x in (raw, dg))
    outer, rates = len(raw) // groups, len(A_log)
    target = _targets.target_of(raw)
    tile = _targets.row_sum_tile(target, K)
    part = tile.rows * TILES
    blocks = triton.cdiv(outer, part)
    parts = raw.new_empty(groups, blocks, HV * K + rates, dtype=torch.float32)
    _kda_gate_backward[target.vector_grid(groups * blocks * HV)](
        raw,
        A_log.contiguous(),
        dt_bias.contiguous(),
        dg,
        draw,
        parts,
        groups,
        outer,
        *raw.stride()[:2],
        *dg.stride()[:2],
        0.0 if lower_bound is None else lower_bound,
        HV,
        K,
        lower_bound is not None,
        rates > 0,
        part,
        tile.rows,
        tile.columns,
        **tile.launch,
    )
    of_bias, of_rate = sum_of_parts(parts).split([HV * K, rates], -1)
    ddt_bias.copy_(of_bias.reshape(ddt_bias.shape))
    dA_log.copy_(of_rate.reshape(dA_log.shape))


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
            rate = tl.exp(tl.minimum(tl.load(A_log_ptr + head).to(tl.float32), MOST))
        if BOUNDED:
            g = lower_bound / (1.0 + tl.exp(-rate * x))
        else:
            g = -rate * _softplus(x)
        tl.store(g_ptr + (wide * HV + head) * K + c[None, :], g, mask=mask)


@triton.jit(do_not_specialize=["groups", "outer"])
def _kda_gate_backward(
    raw_ptr,
    A_log_ptr,
    dt_bias_ptr,
    dg_ptr,
    draw_ptr,
    parts_ptr,
    groups,
    outer,
    raw_outer,
    raw_inner,
    dg_outer,
    dg_inner,
    lower_bound,
    HV: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_RATE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A task is a part of the rows of one group and one head: one partial sum."""
    blocks = tl.cdiv(outer, PART)
    c = tl.arange(0, COLUMNS)
    for task in range(tl.program_id(0), groups * blocks * HV, tl.num_programs(0)):
        head = task % HV
        begin = ((task // HV) % blocks) * PART
        group = tl.cast(task // (HV * blocks), tl.int64)
        bias = tl.load(dt_bias_ptr + head * K + c, mask=c < K, other=0.0).to(tl.float32)
        rate = 1.0
        if HAS_RATE:
            A_log = tl.load(A_log_ptr + head).to(tl.float32)
            rate = tl.exp(tl.minimum(A_log, MOST))
        # Tiles of sums, for rows lie with many threads: they meet once.
        dbias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        drate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(begin, tl.minimum(begin + PART, outer), ROWS):
            row = group * outer + first + tl.arange(0, ROWS)[:, None]
            mask = (first + tl.arange(0, ROWS)[:, None] < outer) & (c < K)[None, :]
            at = row * raw_outer + head * raw_inner + c[None, :]
            x = tl.load(raw_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
            at = row * dg_outer + head * dg_inner + c[None, :]
            dg = tl.load(dg_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if BOUNDED:
                z = rate * x
                dz = dg * lower_bound / ((1.0 + tl.exp(z)) * (1.0 + tl.exp(-z)))
                dx = dz * rate
                drate += dz * x
            else:
                dx = -dg * rate / (1.0 + tl.exp(-x))
                drate -= dg * _softplus(x)
            tl.store(
                draw_ptr + (row * HV + head) * K + c[None, :], dx.to(draw_ptr.dtype.element_ty), mask=mask
            )
            dbias += dx
        sums = tl.cast(task // HV, tl.int64) * (HV * K + HV * HAS_RATE)
        tl.store(parts_ptr + sums + head * K + c, tl.sum(dbias, 0), mask=c < K)
        if HAS_RATE:
            # Of a tensor of one element: an NPU's cores overwrite each other's neighbouring scalars.
            total = tl.sum(tl.sum(drate, 0)[None, :], 1) * tl.where(A_log <= MOST, rate, 0.0)
            tl.store(parts_ptr + sums + HV * K + head + tl.arange(0, 1), total)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(u), u = exp(-|x|) in (0, 1]."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    # log1p as log(w) u / (w - 1): what w loses of u, the quotient gives back.
    lost = tl.where(w == 1.0, 1.0, w - 1.0)
    return tl.maximum(x, 0.0) + tl.where(w == 1.0, u, tl.log(w) * (u / lost))
