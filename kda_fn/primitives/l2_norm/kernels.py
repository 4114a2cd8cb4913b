"""The l2 normalisation in Triton: a tile of rows at a time, one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_rows
from kda_fn.types import Tensor

__all__ = ["launch_l2_norm"]


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
        rows, y, outer, inner, rows.stride(0), rows.stride(1), eps, F, tile.rows, tile.columns, **tile.launch
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
    blocks = tl.cdiv(outer, ROWS)
    f = tl.arange(0, COLUMNS)[None, :]
    for task in range(tl.program_id(0), blocks * inner, tl.num_programs(0)):
        row = (task % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        i = task // blocks
        mask = (row < outer) & (f < F)
        wide = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + wide * x_outer + i * x_inner + f, mask=mask, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(x * x, 1) + eps)
        y = x / norm[:, None]
        tl.store(y_ptr + (wide * inner + i) * F + f, y.to(y_ptr.dtype.element_ty), mask=mask)
