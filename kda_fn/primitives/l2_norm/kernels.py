"""The l2 normalisation in Triton: a tile of rows at a time, one pass.

With n = sqrt(Σ x² + eps):   y = x / n      dx = (dy - y Σ y dy) / n
"""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_rows, rows_at
from kda_fn.types import Tensor

__all__ = ["launch_l2_norm", "launch_l2_norm_backward"]


def launch_l2_norm(outputs: tuple[Tensor, ...], x: Tensor, *, eps: float) -> None:
    (y,) = outputs
    if not y.numel():
        return
    (rows,) = as_rows(x)
    outer, inner, F = rows.shape
    target = _targets.target_of(x)
    tile = _targets.row_tile(target, F, tensors=2)
    programs = target.vector_grid(inner * triton.cdiv(outer, tile.rows))
    _l2_norm[programs](
        rows, y, outer, inner, *rows.stride()[:2], eps, F, tile.rows, tile.columns, **tile.launch
    )


def launch_l2_norm_backward(
    gradients: tuple[Tensor, ...], dy: Tensor, x: Tensor, *, eps: float, rows: int
) -> None:
    (dx,) = gradients
    if not dx.numel():
        return
    x, dy = as_rows(x, dy)
    outer, inner, F = x.shape
    target = _targets.target_of(x)
    tile = _targets.row_tile(target, F, tensors=3)
    programs = target.vector_grid(inner * triton.cdiv(outer, tile.rows))
    _l2_norm_backward[programs](
        x,
        dy,
        dx,
        outer,
        inner,
        *x.stride()[:2],
        *dy.stride()[:2],
        eps,
        F,
        tile.rows,
        tile.columns,
        **tile.launch,
    )


@triton.jit(do_not_specialize=["outer", "inner"])
def _l2_norm(
    x_ptr,
    y_ptr,
    outer,
    inner,
    x_outer,
    x_inner,
    eps,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    for task in range(tl.program_id(0), tl.cdiv(outer, ROWS) * inner, tl.num_programs(0)):
        row, i, f, mask = rows_at(task, outer, F, ROWS, COLUMNS)
        x = tl.load(x_ptr + row * x_outer + i * x_inner + f, mask=mask, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(x * x, 1) + eps)
        y = x / norm[:, None]
        tl.store(y_ptr + (row * inner + i) * F + f, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["outer", "inner"])
def _l2_norm_backward(
    x_ptr,
    dy_ptr,
    dx_ptr,
    outer,
    inner,
    x_outer,
    x_inner,
    dy_outer,
    dy_inner,
    eps,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    for task in range(tl.program_id(0), tl.cdiv(outer, ROWS) * inner, tl.num_programs(0)):
        row, i, f, mask = rows_at(task, outer, F, ROWS, COLUMNS)
        x = tl.load(x_ptr + row * x_outer + i * x_inner + f, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_outer + i * dy_inner + f, mask=mask, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(x * x, 1) + eps)[:, None]
        y = x / norm
        dx = (dy - y * tl.sum(y * dy, 1)[:, None]) / norm
        tl.store(dx_ptr + (row * inner + i) * F + f, dx.to(dx_ptr.dtype.element_ty), mask=mask)
