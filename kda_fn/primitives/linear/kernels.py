"""The quantisation of tokens in Triton: a tile of rows, read for its largest and again for its steps."""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_rows
from kda_fn.types import Tensor

__all__ = ["launch_quantize_tokens"]

# Adding it leaves a float32 no digits after the point: the sum is rounded, halves to even.
ROUNDS = tl.constexpr(12582912.0)
# The smallest normal float32.
TINY = tl.constexpr(1.1754943508222875e-38)


def launch_quantize_tokens(outputs: tuple[Tensor, ...], x: Tensor) -> None:
    tokens, scale = outputs
    if not tokens.numel():
        scale.zero_()
        return
    (rows,) = as_rows(x)
    outer, inner, F = rows.shape
    target = _targets.target_of(x)
    tile = _targets.row_sum_tile(target, F)
    # Ascend: a row takes 32 bytes of UB at least.
    size = min(tile.rows, 128)
    programs = target.vector_grid(inner * triton.cdiv(outer, size))
    _quantize_tokens[programs](
        rows, tokens, scale, outer, inner, *rows.stride()[:2], F, size, tile.columns, **tile.launch
    )


@triton.jit(do_not_specialize=["outer", "inner"])
def _quantize_tokens(
    x_ptr,
    tokens_ptr,
    scale_ptr,
    outer,
    inner,
    x_outer,
    x_inner,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(outer, ROWS)
    for task in range(tl.program_id(0), blocks * inner, tl.num_programs(0)):
        block = (task % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        row, i, inside = tl.cast(block, tl.int64), task // blocks, block < outer
        x_row = x_ptr + row * x_outer + i * x_inner
        packed = row * inner + i
        largest = tl.zeros((ROWS,), dtype=tl.float32)
        for start in range(0, F, COLUMNS):
            f = start + tl.arange(0, COLUMNS)[None, :]
            x = tl.load(x_row + f, mask=inside & (f < F), other=0.0).to(tl.float32)
            # A maximum may pass NaN over, not an infinity.
            size = tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))
            largest = tl.maximum(largest, tl.max(size, 1))
        # CUDA's plain quotient is good to two units in the last place: a half would go elsewhere.
        scale = tl.div_rn(largest, 127.0)
        scale = tl.where(scale < TINY, 0.0, scale)
        # A row without a scale is all zeros.
        step = tl.where(scale > 0.0, scale, float("inf"))[:, None]
        scale = tl.where(scale < float("inf"), scale, float("nan"))
        tl.store(scale_ptr + packed, scale[:, None], mask=inside)
        for start in range(0, F, COLUMNS):
            f = start + tl.arange(0, COLUMNS)[None, :]
            mask = inside & (f < F)
            x = tl.load(x_row + f, mask=mask, other=0.0).to(tl.float32)
            x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
            # No quotient is so far above 127 that it would be rounded to more.
            steps = (tl.div_rn(x, step) + ROUNDS) - ROUNDS
            tl.store(tokens_ptr + packed * F + f, steps.to(tl.int8), mask=mask)
