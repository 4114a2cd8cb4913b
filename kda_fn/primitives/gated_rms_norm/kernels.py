"""The gated RMS norm in Triton, weight and residual or not: a tile of rows at a time, one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_rows
from kda_fn.types import Activation, Tensor

__all__ = ["launch_gated_rms_norm", "launch_residual_gated_rms_norm"]


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
    blocks = tl.cdiv(outer, ROWS)
    f = tl.arange(0, COLUMNS)[None, :]
    for task in range(tl.program_id(0), blocks * inner, tl.num_programs(0)):
        row = (task % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        i = task // blocks
        mask = (row < outer) & (f < F)
        wide = tl.cast(row, tl.int64)
        packed = (wide * inner + i) * F + f
        x = tl.load(x_ptr + wide * x_outer + i * x_inner + f, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            at = wide * residual_outer + i * residual_inner + f
            x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(total_ptr + packed, x.to(total_ptr.dtype.element_ty), mask=mask)
        gate = tl.load(gate_ptr + wide * gate_outer + i * gate_inner + f, mask=mask, other=0.0).to(tl.float32)
        y = x / tl.sqrt(tl.sum(x * x, 1) / F + eps)[:, None]
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + f, mask=f < F, other=0.0).to(tl.float32)
        y /= 1.0 + tl.exp(-gate)
        if SILU:
            y *= gate
        tl.store(y_ptr + packed, y.to(y_ptr.dtype.element_ty), mask=mask)
