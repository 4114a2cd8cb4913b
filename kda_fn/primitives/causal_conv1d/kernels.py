"""The short convolution in Triton: a tile of tokens and channels at a time, W shifted reads of it.

The piece that begins a sequence also computes its first W - 1 tokens, which see `conv_state`, and the new
window: prefill, decode and packed sequences are one launch of one kernel.

Backward, with u = [conv_state; x], of which token t sees the rows t to t + W - 1, in L tokens:

    dz_t = dy_t act'(z_t)    du_m = Σ_i weight[:, i] dz_{m-i} + dnew_state_{m-L}
    dweight[:, i] = Σ_t dz_t u_{t+i}                  dbias = Σ_t dz_t

A row of du gathers from the W tokens that saw it, each token's z computed anew. What is near the ends of a
sequence the piece that begins it computes row by row.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_batch, on_device, piece_at, pieces, sum_of_parts
from kda_fn.types import Tensor

__all__ = ["launch_causal_conv1d", "launch_causal_conv1d_backward"]

PART = 64
"""Tokens that share a partial sum: fewer sums to write, and still tasks enough."""


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


def launch_causal_conv1d_backward(
    gradients: tuple[Tensor, ...],
    dnew_state: Tensor,
    dy: Tensor,
    conv_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None,
    cu_seqlens: tuple[int, ...] | None,
    rows: int,
) -> None:
    dstate, dx, dweight, *dbiases = gradients
    if not (dstate.numel() or dx.numel()):
        for gradient in (dweight, *dbiases):
            gradient.zero_()
        return
    groups, (T, P), W = prod(x.shape[:rows]), x.shape[-2:], weight.shape[-1]
    state, x, dnew, dy = (as_batch(each, 2) for each in (conv_state, x, dnew_state, dy))
    target = _targets.target_of(x)
    tile = _targets.conv_backward_tile(target, P, W)
    if cu_seqlens is None:
        table, N, count = None, 1, triton.cdiv(max(T - (W - 1), 1), PART)
    else:
        table = on_device(pieces(cu_seqlens, PART, skip=W - 1), x)
        N, count = len(cu_seqlens) - 1, len(table)
    sums = W + len(dbiases)
    parts = x.new_empty(groups, len(x) // groups * count, sums * P, dtype=torch.float32)
    programs = target.vector_grid(len(x) * count * triton.cdiv(P, tile.columns))
    _causal_conv1d_backward[programs](
        state,
        x,
        weight.mT.contiguous(),
        None if bias is None else bias.contiguous(),
        dnew,
        dy,
        dstate,
        dx,
        parts,
        table,
        len(x),
        T,
        N,
        count,
        x.stride(0),
        x.stride(1),
        state.stride(0),
        state.stride(1),
        dy.stride(0),
        dy.stride(1),
        dnew.stride(0),
        dnew.stride(1),
        P,
        W,
        activation == "silu",
        bias is not None,
        cu_seqlens is not None,
        sums,
        triton.next_power_of_2(sums),
        PART,
        tile.rows,
        tile.columns,
        **tile.launch,
    )
    total = sum_of_parts(parts).view(groups, sums, P)
    dweight.copy_(total[:, :W].mT.reshape(dweight.shape))
    for dbias in dbiases:
        dbias.copy_(total[:, W].reshape(dbias.shape))


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


@triton.jit(do_not_specialize=["B", "T", "N", "count"])
def _causal_conv1d_backward(
    state_ptr,
    x_ptr,
    taps_ptr,
    bias_ptr,
    dnew_ptr,
    dy_ptr,
    dstate_ptr,
    dx_ptr,
    parts_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    x_batch,
    x_time,
    state_batch,
    state_row,
    dy_batch,
    dy_time,
    dnew_batch,
    dnew_row,
    P: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    SUMS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A task is a piece of TOKENS tokens, and one partial sum: of W taps and the bias."""
    columns = tl.cdiv(P, COLUMNS)
    for task in range(tl.program_id(0), B * count * columns, tl.num_programs(0)):
        c = (task % columns) * COLUMNS + tl.arange(0, COLUMNS)
        b = tl.cast(task // (columns * count), tl.int64)
        n, first, start, length = piece_at(table_ptr, (task // columns) % count, TOKENS, T, PACKED)
        x = x_ptr + b * x_batch + start * x_time
        dy = dy_ptr + b * dy_batch + start * dy_time
        dx = dx_ptr + (b * T + start) * P
        state = state_ptr + (b * N + n) * state_batch
        dnew = dnew_ptr + (b * N + n) * dnew_batch
        dstate = dstate_ptr + (b * N + n) * (W - 1) * P
        bias = tl.zeros((COLUMNS,), dtype=tl.float32)
        if HAS_BIAS:
            bias += tl.load(bias_ptr + c, mask=c < P, other=0.0).to(tl.float32)
        s = tl.arange(0, SUM_ROWS)[:, None]
        sums = tl.zeros((SUM_ROWS, COLUMNS), dtype=tl.float32)

        # Tokens W - 1 and later see x alone; dx is theirs alone up to the last W - 1.
        r = tl.arange(0, ROWS)
        for begin in range(first, tl.minimum(first + TOKENS, length - (W - 1)), ROWS):
            left = length - begin
            here = tl.cast(begin, tl.int64)
            x_here, dy_here = x + here * x_time, dy + here * dy_time
            du = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for j in tl.static_range(W):
                # The tokens j later.
                z = tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + bias[None, :]
                for i in tl.static_range(W):
                    tap = tl.load(taps_ptr + i * P + c, mask=c < P, other=0.0).to(tl.float32)
                    z += tap[None, :] * _rows(x_here, x_time, r + (i + j), c, left, P)
                dz = _slope(z, SILU) * _rows(dy_here, dy_time, r + (W - 1 + j), c, left, P)
                tap = tl.load(taps_ptr + (W - 1 - j) * P + c, mask=c < P, other=0.0).to(tl.float32)
                du += tap[None, :] * dz
                if j == 0:
                    for i in tl.static_range(W):
                        seen = _rows(x_here, x_time, r + i, c, left, P)
                        sums += tl.where(s == i, tl.sum(dz * seen, 0)[None, :], 0.0)
                    if HAS_BIAS:
                        sums += tl.where(s == W, tl.sum(dz, 0)[None, :], 0.0)
            inside = (r < left - 2 * (W - 1))[:, None] & (c < P)[None, :]
            tl.store(
                dx + here * P + (r + W - 1)[:, None] * P + c[None, :],
                du.to(dx_ptr.dtype.element_ty),
                mask=inside,
            )

        if first == 0:
            for t in range(W - 1):
                dz = _dz_row(
                    t, state, state_row, x, x_time, taps_ptr, bias, dy, dy_time, c, length, P, W, SILU
                )
                for i in range(W):
                    seen = _u_row(state, state_row, x, x_time, t + i, c, length, P, W)
                    sums += tl.where(s == i, (dz * seen)[None, :], 0.0)
                if HAS_BIAS:
                    sums += tl.where(s == W, dz[None, :], 0.0)
            # The first 2 (W - 1) rows of u, and the last W - 1, the new window, where they are others.
            end = length + W - 1
            for e in range(3 * (W - 1)):
                m = tl.where(e < 2 * (W - 1), e, e + tl.maximum(length - 2 * (W - 1), 0))
                held = tl.where(m < end, tl.where(m >= length, P, 0), 0)
                du = tl.load(dnew + (m - length) * dnew_row + c, mask=c < held, other=0.0).to(tl.float32)
                for i in range(W):
                    tap = tl.load(taps_ptr + i * P + c, mask=c < P, other=0.0).to(tl.float32)
                    du += tap * _dz_row(
                        m - i, state, state_row, x, x_time, taps_ptr, bias, dy, dy_time, c, length, P, W, SILU
                    )
                old = c < tl.where(m < W - 1, P, 0)
                tl.store(dstate + m * P + c, du.to(dstate_ptr.dtype.element_ty), mask=old)
                own = c < tl.where(m < end, tl.where(m >= W - 1, P, 0), 0)
                at = tl.cast(m - (W - 1), tl.int64) * P + c
                tl.store(dx + at, du.to(dx_ptr.dtype.element_ty), mask=own)

        part = tl.cast(task // columns, tl.int64) * SUMS * P
        tl.store(parts_ptr + part + s * P + c[None, :], sums, mask=(s < SUMS) & (c < P)[None, :])


@triton.jit
def _rows(x, x_time, t, c, length, P: tl.constexpr):
    """Rows t, zeros behind the end."""
    inside = (t < length)[:, None] & (c < P)[None, :]
    return tl.load(x + t[:, None] * x_time + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _u_row(state, state_row, x, x_time, m, c, length, P: tl.constexpr, W: tl.constexpr):
    """Row m of [state; x], zeros outside it."""
    old = c < tl.where(m < W - 1, tl.where(m >= 0, P, 0), 0)
    row = tl.load(state + m * state_row + c, mask=old, other=0.0).to(tl.float32)
    return row + _x_row(x, x_time, m - (W - 1), c, length, P).to(tl.float32)


@triton.jit
def _dz_row(
    t,
    state,
    state_row,
    x,
    x_time,
    taps_ptr,
    bias,
    dy,
    dy_time,
    c,
    length,
    P: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
):
    """dz of token t, zeros where there is no such token, whatever is around."""
    z = bias
    for i in range(W):
        tap = tl.load(taps_ptr + i * P + c, mask=c < P, other=0.0).to(tl.float32)
        z += tap * _u_row(state, state_row, x, x_time, t + i, c, length, P, W)
    dz = _slope(z, SILU) * _x_row(dy, dy_time, t, c, length, P).to(tl.float32)
    return tl.where(t < length, tl.where(t >= 0, dz, 0.0), 0.0)


@triton.jit
def _slope(z, SILU: tl.constexpr):
    """act'(z)"""
    slope = 1.0
    if SILU:
        act = 1.0 / (1.0 + tl.exp(-z))
        slope = act * (1.0 + z * (1.0 - act))
    return slope
