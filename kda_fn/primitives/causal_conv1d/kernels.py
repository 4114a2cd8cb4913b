"""The short convolution in Triton: a tile of tokens and channels at a time, W shifted reads of it.

The piece that begins a sequence also computes its first W - 1 tokens, which see `conv_state`, and the new
window: prefill, decode and packed sequences are one launch of one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_batch, on_device, piece_at, pieces
from kda_fn.types import Tensor

__all__ = ["launch_causal_conv1d"]


def launch_causal_conv1d(
    outputs: tuple[Tensor, ...],
    conv_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None,
    cu_seqlens: tuple[int, ...] | None,
) -> None:
    new_state, y = outputs
    if not (new_state.numel() or y.numel()):
        return
    (T, P), W = x.shape[-2:], weight.shape[-1]
    x, state = as_batch(x, 2), as_batch(conv_state, 2)
    target = _targets.target_of(x)
    tile = _targets.conv_tile(target, P)
    if cu_seqlens is None:
        table, N, count = None, 1, triton.cdiv(max(T - (W - 1), 1), tile.rows)
    else:
        table = on_device(pieces(cu_seqlens, tile.rows, skip=W - 1), x)
        N, count = len(cu_seqlens) - 1, len(table)
    programs = target.vector_grid(len(x) * count * triton.cdiv(P, tile.columns))
    _causal_conv1d[programs](
        state,
        x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        new_state,
        y,
        table,
        len(x),
        T,
        N,
        count,
        x.stride(0),
        x.stride(1),
        state.stride(0),
        state.stride(1),
        P,
        W,
        activation == "silu",
        bias is not None,
        cu_seqlens is not None,
        tile.rows,
        tile.columns,
        **tile.launch,
    )


@triton.jit(do_not_specialize=["B", "T", "N", "count"])
def _causal_conv1d(
    state_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    new_state_ptr,
    y_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    x_batch,
    x_time,
    state_batch,
    state_row,
    P: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.cdiv(P, COLUMNS)
    for task in range(tl.program_id(0), B * count * columns, tl.num_programs(0)):
        c = (task % columns) * COLUMNS + tl.arange(0, COLUMNS)
        b = tl.cast(task // (columns * count), tl.int64)
        n, first, start, length = piece_at(table_ptr, (task // columns) % count, ROWS, T, PACKED)
        x = x_ptr + b * x_batch + start * x_time
        y = y_ptr + (b * T + start) * P
        state = state_ptr + (b * N + n) * state_batch
        new_state = new_state_ptr + (b * N + n) * (W - 1) * P
        bias = tl.zeros((COLUMNS,), dtype=tl.float32)
        if HAS_BIAS:
            bias += tl.load(bias_ptr + c, mask=c < P, other=0.0).to(tl.float32)

        # Tokens W - 1 and later see x alone.
        # Addresses of a long sequence pass 2^31: that of the piece's first row is of 64 bits.
        here = tl.cast(first, tl.int64)
        r = tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + bias[None, :]
        for i in tl.static_range(W):
            weight = tl.load(weight_ptr + c * W + i, mask=c < P, other=0.0).to(tl.float32)
            inside = (r < length - first - i)[:, None] & (c < P)[None, :]
            rows = tl.load(x + here * x_time + (r + i)[:, None] * x_time + c[None, :], mask=inside, other=0.0)
            total += weight[None, :] * rows.to(tl.float32)
        if SILU:
            total /= 1.0 + tl.exp(-total)
        inside = (r < length - first - (W - 1))[:, None] & (c < P)[None, :]
        tl.store(
            y + here * P + (r + W - 1)[:, None] * P + c[None, :],
            total.to(y_ptr.dtype.element_ty),
            mask=inside,
        )

        if first == 0:
            # The first W - 1 tokens, and the new window.
            for t in tl.static_range(W - 1):
                token = bias
                for i in tl.static_range(W):
                    weight = tl.load(weight_ptr + c * W + i, mask=c < P, other=0.0).to(tl.float32)
                    if t + i < W - 1:
                        seen = tl.load(state + (t + i) * state_row + c, mask=c < P, other=0.0)
                    else:
                        seen = _x_row(x, x_time, t + i - (W - 1), c, length, P)
                    token += weight * seen.to(tl.float32)
                if SILU:
                    token /= 1.0 + tl.exp(-token)
                tl.store(y + t * P + c, token.to(y_ptr.dtype.element_ty), mask=c < tl.where(t < length, P, 0))
                row = length + t
                old = tl.load(state + row * state_row + c, mask=c < tl.where(row < W - 1, P, 0), other=0.0)
                new = _x_row(x, x_time, row - (W - 1), c, length, P)
                tl.store(new_state + t * P + c, tl.where(row < W - 1, old, new), mask=c < P)


@triton.jit
def _x_row(x, x_time, t, c, length, P: tl.constexpr):
    """Row t of a sequence, zeros outside it."""
    # A mask is a bound on an index, or Ascend reads all of the tile.
    return tl.load(
        x + tl.cast(t, tl.int64) * x_time + c,
        mask=c < tl.where(t < length, tl.where(t >= 0, P, 0), 0),
        other=0.0,
    )
