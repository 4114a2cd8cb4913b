"""The gated RMS norm in Triton, weight and residual or not: a tile of rows at a time.

With r = rsqrt(mean(x²) + eps), n = x r and h = dy · weight · act(gate), the gradient of n:

    y = n · weight · act(gate)      dx = r (h - n mean(n h))      dgate = dy · n · weight · act'(gate)

Forward in one pass; backward in two over the columns of a long row.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import TILES, as_rows, rows_at, sum_of_parts
from kda_fn.types import Activation, Tensor

__all__ = [
    "launch_gated_rms_norm",
    "launch_gated_rms_norm_backward",
    "launch_residual_gated_rms_norm",
    "launch_residual_gated_rms_norm_backward",
]


def launch_gated_rms_norm(
    outputs: tuple[Tensor, ...],
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    activation: Activation,
) -> None:
    (y,) = outputs
    _norm(y, None, None, x, gate, weight, eps, activation)


def launch_residual_gated_rms_norm(
    outputs: tuple[Tensor, ...],
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    activation: Activation,
) -> None:
    total, y = outputs
    _norm(y, total, residual, x, gate, weight, eps, activation)


def launch_gated_rms_norm_backward(
    gradients: tuple[Tensor, ...],
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    activation: Activation,
    rows: int,
) -> None:
    _norm_backward((None, *gradients), None, dy, None, x, gate, weight, eps, activation, rows)


def launch_residual_gated_rms_norm_backward(
    gradients: tuple[Tensor, ...],
    dtotal: Tensor,
    dy: Tensor,
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    activation: Activation,
    rows: int,
) -> None:
    _norm_backward(gradients, dtotal, dy, residual, x, gate, weight, eps, activation, rows)


def _norm(
    y: Tensor,
    total: Tensor | None,
    residual: Tensor | None,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: Activation,
) -> None:
    if not y.numel():
        return
    x, gate, *residuals = as_rows(x, gate, *([] if residual is None else [residual]))
    residual = residuals[0] if residuals else None
    outer, inner, F = x.shape
    target = _targets.target_of(x)
    tile = _targets.row_tile(target, F, tensors=3 if residual is None else 5)
    programs = target.vector_grid(inner * triton.cdiv(outer, tile.rows))
    _gated_rms_norm[programs](
        x,
        gate,
        None if weight is None else weight.contiguous(),
        residual,
        y,
        total,
        outer,
        inner,
        *x.stride()[:2],
        *gate.stride()[:2],
        *((0, 0) if residual is None else residual.stride()[:2]),
        eps,
        F,
        activation == "silu",
        weight is not None,
        residual is not None,
        tile.rows,
        tile.columns,
        **tile.launch,
    )


def _norm_backward(
    gradients: tuple[Tensor | None, ...],
    dtotal: Tensor | None,
    dy: Tensor,
    residual: Tensor | None,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: Activation,
    rows: int,
) -> None:
    dresidual, dx, dgate, *dweights = gradients
    if not x.numel():
        for dweight in dweights:
            dweight.zero_()
        return
    groups = prod(x.shape[:rows])
    residuals = [] if residual is None else [residual, dtotal]
    x, gate, dy, *residuals = as_rows(x, gate, dy, *residuals, kept=rows)
    residual, dtotal = residuals or (None, None)
    outer, inner, F = len(x) // groups, *x.shape[1:]
    target = _targets.target_of(x)
    tile = _targets.row_sum_tile(target, F)
    part = tile.rows * (TILES if tile.columns >= F else 1)
    blocks = inner * triton.cdiv(outer, part)
    parts = None if weight is None else x.new_empty(groups, blocks, F, dtype=torch.float32)
    _gated_rms_norm_backward[target.vector_grid(groups * blocks)](
        x,
        gate,
        None if weight is None else weight.contiguous(),
        residual,
        dy,
        dtotal,
        dx,
        dgate,
        dresidual,
        parts,
        groups,
        outer,
        inner,
        *x.stride()[:2],
        *gate.stride()[:2],
        *dy.stride()[:2],
        *((0, 0) if residual is None else residual.stride()[:2]),
        *((0, 0) if dtotal is None else dtotal.stride()[:2]),
        eps,
        F,
        activation == "silu",
        weight is not None,
        residual is not None,
        part,
        tile.rows,
        tile.columns,
        **tile.launch,
    )
    for dweight in dweights:
        dweight.copy_(sum_of_parts(parts).view(dweight.shape))


@triton.jit(do_not_specialize=["outer", "inner"])
def _gated_rms_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    residual_ptr,
    y_ptr,
    total_ptr,
    outer,
    inner,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    residual_outer,
    residual_inner,
    eps,
    F: tl.constexpr,
    SILU: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    for task in range(tl.program_id(0), tl.cdiv(outer, ROWS) * inner, tl.num_programs(0)):
        row, i, f, mask = rows_at(task, outer, F, ROWS, COLUMNS)
        packed = (row * inner + i) * F + f
        x = tl.load(x_ptr + row * x_outer + i * x_inner + f, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            at = row * residual_outer + i * residual_inner + f
            x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(total_ptr + packed, x.to(total_ptr.dtype.element_ty), mask=mask)
        gate = tl.load(gate_ptr + row * gate_outer + i * gate_inner + f, mask=mask, other=0.0).to(tl.float32)
        y = x / tl.sqrt(tl.sum(x * x, 1) / F + eps)[:, None]
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + f, mask=f < F, other=0.0).to(tl.float32)
        y /= 1.0 + tl.exp(-gate)
        if SILU:
            y *= gate
        tl.store(y_ptr + packed, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["groups", "outer", "inner"])
def _gated_rms_norm_backward(
    x_ptr,
    gate_ptr,
    weight_ptr,
    residual_ptr,
    dy_ptr,
    dtotal_ptr,
    dx_ptr,
    dgate_ptr,
    dresidual_ptr,
    parts_ptr,
    groups,
    outer,
    inner,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    dy_outer,
    dy_inner,
    residual_outer,
    residual_inner,
    dtotal_outer,
    dtotal_inner,
    eps,
    F: tl.constexpr,
    SILU: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A task is a part of the rows of one group at one index of inner: one partial sum."""
    blocks = tl.cdiv(outer, PART)
    for task in range(tl.program_id(0), groups * inner * blocks, tl.num_programs(0)):
        begin = (task % blocks) * PART
        i = (task // blocks) % inner
        group = tl.cast(task // (blocks * inner), tl.int64)
        sums = tl.cast(task, tl.int64) * F
        # A tile of sums, for rows lie with many threads: they meet once.
        dweight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(begin, tl.minimum(begin + PART, outer), ROWS):
            inside = (first + tl.arange(0, ROWS))[:, None] < outer
            row = group * outer + first + tl.arange(0, ROWS)[:, None]
            x_row = x_ptr + row * x_outer + i * x_inner
            gate_row = gate_ptr + row * gate_outer + i * gate_inner
            dy_row = dy_ptr + row * dy_outer + i * dy_inner
            residual_row = residual_ptr
            if HAS_RESIDUAL:
                residual_row = residual_ptr + row * residual_outer + i * residual_inner
            squares = tl.zeros((ROWS,), dtype=tl.float32)
            products = tl.zeros((ROWS,), dtype=tl.float32)
            for start in range(0, F, COLUMNS):
                f = start + tl.arange(0, COLUMNS)[None, :]
                mask = inside & (f < F)
                x, dy, weight, act, slope = _terms(
                    x_row,
                    residual_row,
                    gate_row,
                    dy_row,
                    weight_ptr,
                    f,
                    mask,
                    F,
                    SILU,
                    HAS_WEIGHT,
                    HAS_RESIDUAL,
                )
                squares += tl.sum(x * x, 1)
                products += tl.sum(x * (dy * weight * act), 1)
            r = 1.0 / tl.sqrt(squares / F + eps)
            mean = (r * products / F)[:, None]
            # One column of tiles is not loaded again: the compiler sees that it is the same.
            for start in range(0, F, COLUMNS):
                f = start + tl.arange(0, COLUMNS)[None, :]
                mask = inside & (f < F)
                x, dy, weight, act, slope = _terms(
                    x_row,
                    residual_row,
                    gate_row,
                    dy_row,
                    weight_ptr,
                    f,
                    mask,
                    F,
                    SILU,
                    HAS_WEIGHT,
                    HAS_RESIDUAL,
                )
                n = x * r[:, None]
                packed = (row * inner + i) * F + f
                dgate = dy * n * weight * slope
                tl.store(dgate_ptr + packed, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
                dx = r[:, None] * (dy * weight * act - n * mean)
                if HAS_RESIDUAL:
                    at = row * dtotal_outer + i * dtotal_inner + f
                    dx += tl.load(dtotal_ptr + at, mask=mask, other=0.0).to(tl.float32)
                    tl.store(dresidual_ptr + packed, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
                tl.store(dx_ptr + packed, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                if HAS_WEIGHT:
                    # A row outside is 0 / 0 where eps is 0.
                    part = tl.where(inside, dy * n * act, 0.0)
                    if F <= COLUMNS:
                        dweight += part
                    else:
                        c = start + tl.arange(0, COLUMNS)
                        tl.store(parts_ptr + sums + c, tl.sum(part, 0), mask=c < F)
        if HAS_WEIGHT and F <= COLUMNS:
            c = tl.arange(0, COLUMNS)
            tl.store(parts_ptr + sums + c, tl.sum(dweight, 0), mask=c < F)


@triton.jit
def _terms(
    x_row,
    residual_row,
    gate_row,
    dy_row,
    weight_ptr,
    f,
    mask,
    F: tl.constexpr,
    SILU: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """x with its residual, dy, weight, act(gate) and its slope."""
    x = tl.load(x_row + f, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_row + f, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_row + f, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_row + f, mask=mask, other=0.0).to(tl.float32)
    weight = 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + f, mask=f < F, other=0.0).to(tl.float32)
    act = 1.0 / (1.0 + tl.exp(-gate))
    # Of a large gate 1 - act would be nothing.
    rest = 1.0 / (1.0 + tl.exp(gate))
    slope = act * rest
    if SILU:
        slope = act + gate * slope
        act *= gate
    return x, dy, weight, act, slope
