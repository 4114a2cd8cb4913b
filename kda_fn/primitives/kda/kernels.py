"""KDA in Triton: two launches for a prefill, one for a few tokens.

A sequence of more than STEPS tokens is cut into chunks of C = 64, and `fallback.py`'s equations are computed
in two launches: `_chunk_terms` for all chunks at once, `_chunk_scan` along each sequence. A shorter one takes
the recurrence itself, in `_steps`. The choice is made for each sequence of a packed batch, so that it gives
the bits that it gives alone.

Nothing is promised about the gates: a chunk is visited in blocks of 16 tokens, every exponent is a sum of
gates over its own range (never a difference of sums), and pairs within a block take products of exp(g). With
the promise lower_bound >= -5 they are one matrix product, referenced to the block's first token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.primitives.kernels import as_batch, on_device, piece_at, pieces
from kda_fn.types import Tensor

__all__ = ["launch_kda", "launch_kda_step"]

C = 64
"""Tokens of a chunk."""
M = 16
"""Tokens of a block: the smallest matrix that matrix units take."""
STEPS = 8
"""Sequences up to this long take the recurrence: a chunk's matrices would be mostly padding."""


def launch_kda(
    outputs: tuple[Tensor, ...],
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    chunk_size: int,
    cu_seqlens: tuple[int, ...] | None,
) -> None:
    final_state, o = outputs
    if not (final_state.numel() or o.numel()):
        return
    call = _Call(final_state, o, initial_state, q, k, v, g, beta, scale, cu_seqlens)
    call.steps()
    call.chunks(lower_bound)


def launch_kda_step(
    outputs: tuple[Tensor, ...],
    state: Tensor,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    g_t: Tensor,
    beta_t: Tensor,
    *,
    scale: float | None,
) -> None:
    new_state, o_t = outputs
    if not (new_state.numel() or o_t.numel()):
        return
    inputs = (x.unsqueeze(-3) for x in (q_t, k_t, v_t, g_t))
    _Call(new_state, o_t.unsqueeze(-3), state, *inputs, beta_t.unsqueeze(-2), scale, None).steps()


class _Call:
    """The tensors of a call, with one batch axis."""

    def __init__(
        self,
        final_state: Tensor,
        o: Tensor,
        initial_state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None,
        cu_seqlens: tuple[int, ...] | None,
    ) -> None:
        (self.T, H, self.K), (self.HV, self.V) = q.shape[-3:], v.shape[-2:]
        self.G = self.HV // H
        self.scale = self.K**-0.5 if scale is None else scale
        self.packed = cu_seqlens is not None
        self.bounds = (0, self.T) if cu_seqlens is None else cu_seqlens
        self.final_state, self.o = final_state, o
        self.initial_state = as_batch(initial_state, 3).contiguous()
        self.q, self.k, self.v, self.g = (as_batch(x, 3) for x in (q, k, v, g))
        self.beta = as_batch(beta, 2)
        self.B = len(self.q)
        self.target = _targets.target_of(q)

    def steps(self) -> None:
        """Sequences of no more than a few tokens: the recurrence, token by token."""
        table = pieces(self.bounds, C, wanted=lambda length: length <= STEPS)
        if not table:
            return
        tile = _targets.kda_steps_tile(self.target, self.K, self.V)
        tasks = self.B * len(table) * self.HV * triton.cdiv(self.V, tile.columns)
        _steps[self.target.vector_grid(tasks)](
            self.initial_state,
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.final_state,
            self.o,
            self._on_device(table),
            self.B,
            self.T,
            len(self.bounds) - 1,
            len(table),
            self.HV,
            self.G,
            *self.q.stride()[:3],
            *self.k.stride()[:3],
            *self.v.stride()[:3],
            *self.g.stride()[:3],
            *self.beta.stride()[:2],
            self.scale,
            self.K,
            self.V,
            self.packed,
            tile.rows,
            tile.columns,
            **tile.launch,
        )

    def chunks(self, lower_bound: float | None) -> None:
        """Longer sequences: what each chunk does to a state, for all at once, then along each sequence."""
        table = pieces(self.bounds, C, wanted=lambda length: length > STEPS)
        if not table:
            return
        B, T, HV, K = self.B, self.T, self.HV, self.K
        q_in, k_in, k_out = (self.q.new_empty(B, HV, T, K) for _ in range(3))
        A, solve = (self.q.new_empty(B, HV, T, C) for _ in range(2))
        decay = self.g.new_empty(B, HV, len(table), K, dtype=torch.float32)
        tile = _targets.kda_terms_tile(self.target, self.q.dtype, K)
        _chunk_terms[self.target.cube_grid(B * HV * len(table))](
            self.q,
            self.k,
            self.g,
            self.beta,
            q_in,
            k_in,
            k_out,
            A,
            solve,
            decay,
            self._on_device(table),
            B,
            T,
            len(table),
            HV,
            self.G,
            *self.q.stride()[:3],
            *self.k.stride()[:3],
            *self.g.stride()[:3],
            *self.beta.stride()[:2],
            self.scale,
            K,
            self.packed,
            lower_bound is not None,
            tile.precision,
            C,
            M,
            tile.columns,
            **tile.launch,
        )
        sequences = [
            (n, index, start, length) for index, (n, first, start, length) in enumerate(table) if not first
        ]
        tile = _targets.kda_scan_tile(self.target, self.q.dtype, K, self.V)
        tasks = B * len(sequences) * HV * triton.cdiv(self.V, tile.columns)
        _chunk_scan[self.target.cube_grid(tasks)](
            self.initial_state,
            q_in,
            k_in,
            k_out,
            self.v,
            A,
            solve,
            decay,
            self.final_state,
            self.o,
            self._on_device(sequences),
            B,
            T,
            len(self.bounds) - 1,
            len(sequences),
            len(table),
            HV,
            *self.v.stride()[:3],
            K,
            self.V,
            self.packed,
            tile.precision,
            C,
            M,
            tile.rows,
            tile.columns,
            **tile.launch,
        )

    def _on_device(self, table: list[tuple[int, int, int, int]]) -> Tensor | None:
        return on_device(table, self.q) if self.packed else None


@triton.jit(do_not_specialize=["B", "T", "N", "count", "HV", "G"])
def _steps(
    initial_state_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    final_state_ptr,
    o_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    HV,
    G,
    q_batch,
    q_time,
    q_head,
    k_batch,
    k_time,
    k_head,
    v_batch,
    v_time,
    v_head,
    g_batch,
    g_time,
    g_head,
    beta_batch,
    beta_time,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    columns = tl.cdiv(V, BV)
    c = tl.arange(0, BK)
    for task in range(tl.program_id(0), B * count * HV * columns, tl.num_programs(0)):
        e = (task % columns) * BV + tl.arange(0, BV)
        hv = (task // columns) % HV
        row = (task // (columns * HV)) % count
        b = tl.cast(task // (columns * HV * count), tl.int64)
        n, _first, start, length = piece_at(table_ptr, row, 0, T, PACKED)
        h = hv // G
        q_at = q_ptr + b * q_batch + start * q_time + h * q_head + c
        k_at = k_ptr + b * k_batch + start * k_time + h * k_head + c
        v_at = v_ptr + b * v_batch + start * v_time + hv * v_head + e
        g_at = g_ptr + b * g_batch + start * g_time + hv * g_head + c
        beta_at = beta_ptr + b * beta_batch + start * beta_time + hv
        o_at = o_ptr + ((b * T + start) * HV + hv) * V + e
        state_at = ((b * N + n) * HV + hv) * K * V + c[:, None] * V + e[None, :]
        inside = (c < K)[:, None] & (e < V)[None, :]
        S = tl.load(initial_state_ptr + state_at, mask=inside, other=0.0).to(tl.float32)
        for t in range(0, length):
            q = tl.load(q_at + t * q_time, mask=c < K, other=0.0).to(tl.float32)
            k = tl.load(k_at + t * k_time, mask=c < K, other=0.0).to(tl.float32)
            v = tl.load(v_at + t * v_time, mask=e < V, other=0.0).to(tl.float32)
            g = tl.load(g_at + t * g_time, mask=c < K, other=0.0).to(tl.float32)
            beta = tl.load(beta_at + t * beta_time).to(tl.float32)
            S = S * tl.exp(g)[:, None]
            d = beta * (v - tl.sum(S * k[:, None], 0))
            S = S + k[:, None] * d[None, :]
            o = scale * tl.sum(S * q[:, None], 0)
            tl.store(o_at + t * HV * V, o.to(o_ptr.dtype.element_ty), mask=e < V)
        tl.store(final_state_ptr + state_at, S.to(final_state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "T", "count", "HV", "G"])
def _chunk_terms(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    A_ptr,
    solve_ptr,
    decay_ptr,
    table_ptr,
    B,
    T,
    count,
    HV,
    G,
    q_batch,
    q_time,
    q_head,
    k_batch,
    k_time,
    k_head,
    g_batch,
    g_time,
    g_head,
    beta_batch,
    beta_time,
    scale,
    K: tl.constexpr,
    PACKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
):
    c = tl.arange(0, BK)
    for task in range(tl.program_id(0), B * count * HV, tl.num_programs(0)):
        hv = task % HV
        piece = (task // HV) % count
        b = tl.cast(task // (HV * count), tl.int64)
        _n, first, start, length = piece_at(table_ptr, piece, C, T, PACKED)
        h = hv // G
        token = start + first
        left = length - first
        line = (b * HV + hv) * T + token
        q = q_ptr + b * q_batch + token * q_time + h * q_head
        k = k_ptr + b * k_batch + token * k_time + h * k_head
        g = g_ptr + b * g_batch + token * g_time + hv * g_head
        beta = beta_ptr + b * beta_batch + token * beta_time + hv
        q_in, k_in, k_out = q_in_ptr + line * K, k_in_ptr + line * K, k_out_ptr + line * K
        A, solve = A_ptr + line * C, solve_ptr + line * C

        # Row by row of blocks. Two blocks meet at the later one's start: k goes there through those between.
        # fmt: off
        d = tl.full((BK,), 1.0, dtype=tl.float32)
        _q, _p, k0, d_i, X00, beta0 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, q_in, k_in, A,
                                             0, left, d, scale, K, BOUNDED, PRECISION, C, M, BK)
        _store(solve, X00 * beta0, C, left, M, M, M)
        d *= d_i

        q1, p1, k1, d_i, X11, beta1 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, q_in, k_in, A,
                                             M, left, d, scale, K, BOUNDED, PRECISION, C, M, BK)
        L10 = _corner(q1, p1, k0, A + M * C, left - M, PRECISION, C, M)
        X10 = -_product(X11, _product(L10, X00, PRECISION), PRECISION)
        _store(solve + M * C, X10 * beta0, C, left - M, M, M, M)
        _store(solve + M * C + M, X11 * beta1, C, left - M, M, M, M)
        k0 *= d_i[None, :]
        d *= d_i

        q2, p2, k2, d_i, X22, beta2 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, q_in, k_in, A,
                                             2 * M, left, d, scale, K, BOUNDED, PRECISION, C, M, BK)
        L20 = _corner(q2, p2, k0, A + 2 * M * C, left - 2 * M, PRECISION, C, M)
        L21 = _corner(q2, p2, k1, A + 2 * M * C + M, left - 2 * M, PRECISION, C, M)
        X20 = -_product(X22, _product(L20, X00, PRECISION) + _product(L21, X10, PRECISION), PRECISION)
        X21 = -_product(X22, _product(L21, X11, PRECISION), PRECISION)
        _store(solve + 2 * M * C, X20 * beta0, C, left - 2 * M, M, M, M)
        _store(solve + 2 * M * C + M, X21 * beta1, C, left - 2 * M, M, M, M)
        _store(solve + 2 * M * C + 2 * M, X22 * beta2, C, left - 2 * M, M, M, M)
        k0 *= d_i[None, :]
        k1 *= d_i[None, :]
        d *= d_i

        q3, p3, k3, d_i, X33, beta3 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, q_in, k_in, A,
                                             3 * M, left, d, scale, K, BOUNDED, PRECISION, C, M, BK)
        L30 = _corner(q3, p3, k0, A + 3 * M * C, left - 3 * M, PRECISION, C, M)
        L31 = _corner(q3, p3, k1, A + 3 * M * C + M, left - 3 * M, PRECISION, C, M)
        L32 = _corner(q3, p3, k2, A + 3 * M * C + 2 * M, left - 3 * M, PRECISION, C, M)
        rest = _product(L31, X10, PRECISION) + _product(L32, X20, PRECISION)
        X30 = -_product(X33, _product(L30, X00, PRECISION) + rest, PRECISION)
        X31 = -_product(X33, _product(L31, X11, PRECISION) + _product(L32, X21, PRECISION), PRECISION)
        X32 = -_product(X33, _product(L32, X22, PRECISION), PRECISION)
        _store(solve + 3 * M * C, X30 * beta0, C, left - 3 * M, M, M, M)
        _store(solve + 3 * M * C + M, X31 * beta1, C, left - 3 * M, M, M, M)
        _store(solve + 3 * M * C + 2 * M, X32 * beta2, C, left - 3 * M, M, M, M)
        _store(solve + 3 * M * C + 3 * M, X33 * beta3, C, left - 3 * M, M, M, M)
        # fmt: on

        last = d_i[None, :]
        _store(k_out, k0 * last, K, left, K, M, BK)
        _store(k_out + M * K, k1 * last, K, left - M, K, M, BK)
        _store(k_out + 2 * M * K, k2 * last, K, left - 2 * M, K, M, BK)
        _store(k_out + 3 * M * K, k3, K, left - 3 * M, K, M, BK)
        tl.store(decay_ptr + ((b * HV + hv) * count + piece) * K + c, d * d_i, mask=c < K)


@triton.jit
def _block(
    q_at,
    q_time,
    k_at,
    k_time,
    g_at,
    g_time,
    beta_at,
    beta_time,
    q_in_at,
    k_in_at,
    A_at,
    first: tl.constexpr,
    left,
    entering,
    scale,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
):
    """A block of M tokens, `first` tokens into its chunk, by itself.

    Returns q and beta k decayed from its start, k decayed to its end, the decay through it, (I + L)^-1, and
    beta as a row.
    """
    c = tl.arange(0, BK)
    row = tl.arange(0, M)
    t = first + row
    inside = (t < left)[:, None] & (c < K)[None, :]
    q = tl.load(q_at + t[:, None] * q_time + c[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    k = tl.load(k_at + t[:, None] * k_time + c[None, :], mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_at + t[:, None] * g_time + c[None, :], mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(beta_at + t * beta_time, mask=t < left, other=0.0).to(tl.float32)
    # A mask is a bound on each index, or Ascend reads all of the tile.
    after = (row < tl.minimum(M - 1, left - first - 1))[:, None] & (c < K)[None, :]
    g_after = tl.load(g_at + (t + 1)[:, None] * g_time + c[None, :], mask=after, other=0.0).to(tl.float32)
    p = k * beta[:, None]
    if BOUNDED:
        A, L = _pairs_bounded(q, k, p, g, row, M, PRECISION)
    else:
        A, L = _pairs(q, p, k_at, k_time, g_at, g_time, first, left, row, c, M, K, BK)
    _store(A_at + first * C + first, A, C, left - first, M, M, M)

    from_start = tl.exp(tl.cumsum(g, 0))
    q *= from_start
    _store(q_in_at + first * K, q * entering[None, :], K, left - first, K, M, BK)
    _store(k_in_at + first * K, k * from_start * entering[None, :], K, left - first, K, M, BK)
    k_out = k * tl.exp(tl.cumsum(g_after, 0, reverse=True))
    return q, p * from_start, k_out, tl.exp(tl.sum(g, 0)), _inverse(L, row, M), beta[None, :]


@triton.jit
def _corner(q, p, k, A_at, left, PRECISION: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """Stores A and returns L of a pair of blocks."""
    dtype = A_at.dtype.element_ty
    k_far = tl.trans(k.to(dtype))
    # The device may overwrite a product's left operand: `+ 0.0` makes it one of its own.
    A = tl.dot((q + 0.0).to(dtype), k_far, input_precision=PRECISION)
    _store(A_at, A, C, left, M, M, M)
    return tl.dot((p + 0.0).to(dtype), k_far, input_precision=PRECISION)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    return tl.dot(a + 0.0, b, input_precision=PRECISION)


@triton.jit
def _product_of_wide(a, b, PRECISION: tl.constexpr):
    """a b for a float32 b: beside a half-precision a, b as the sum of two numbers of that precision."""
    high = b.to(a.dtype)
    if a.dtype == tl.float32:
        return tl.dot(a, high, input_precision=PRECISION)
    low = (b - high.to(tl.float32)).to(a.dtype)
    return tl.dot(a + 0.0, high, input_precision=PRECISION) + tl.dot(a, low, input_precision=PRECISION)


@triton.jit
def _store(at, x, stride, rows, columns, R: tl.constexpr, F: tl.constexpr):
    """x [R F], of which `rows` and `columns` exist, at rows of the given stride."""
    r = tl.arange(0, R)
    f = tl.arange(0, F)
    mask = (r < rows)[:, None] & (f < columns)[None, :]
    tl.store(at + r[:, None] * stride + f[None, :], x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _pairs(
    q,
    k_beta,
    k_at,
    k_time,
    g_at,
    g_time,
    first,
    left,
    row,
    c,
    M: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
):
    """A and L [M M] of a block, column by column from the last: decays are products of exp(g)."""
    A = tl.zeros((M, M), dtype=tl.float32)
    L = tl.zeros((M, M), dtype=tl.float32)
    decay = tl.full((M, BK), 1.0, dtype=tl.float32)
    for step in range(0, M):
        j = M - 1 - step
        mask = c < tl.where(first + j < left, K, 0)
        k_j = tl.load(k_at + (first + j) * k_time + c, mask=mask, other=0.0).to(tl.float32)
        g_j = tl.load(g_at + (first + j) * g_time + c, mask=mask, other=0.0).to(tl.float32)
        near = decay * k_j[None, :]
        here = row[None, :] == j
        A = tl.where(here, tl.where(row >= j, tl.sum(q * near, 1), 0.0)[:, None], A)
        L = tl.where(here, tl.where(row > j, tl.sum(k_beta * near, 1), 0.0)[:, None], L)
        decay = tl.where((row >= j)[:, None], decay * tl.exp(g_j)[None, :], decay)
    return A, L


@triton.jit
def _pairs_bounded(q, k, k_beta, g, row, M: tl.constexpr, PRECISION: tl.constexpr):
    """The same with g >= -5: both exponents are sums from the block's first token, at most 15 gates."""
    since_first = tl.cumsum(tl.where((row > 0)[:, None], g, 0.0), 0)
    decayed = tl.exp(since_first)
    k_grown = tl.trans(k * tl.exp(-since_first))
    A = tl.dot(q * decayed, k_grown, input_precision=PRECISION)
    L = tl.dot(k_beta * decayed, k_grown, input_precision=PRECISION)
    A = tl.where(row[:, None] >= row[None, :], A, 0.0)
    L = tl.where(row[:, None] > row[None, :], L, 0.0)
    return A, L


@triton.jit
def _inverse(L, row, M: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [M M], column by column from the last."""
    X = tl.zeros((M, M), dtype=tl.float32)
    for step in range(0, M):
        j = M - 1 - step
        here = row[None, :] == j
        # Column j as a row: the columns of X after it are known, and L's rows up to it are zero.
        l_j = tl.sum(tl.where(here, L, 0.0), 1)
        x_j = tl.where(row == j, 1.0, 0.0) - tl.sum(X * l_j[None, :], 1)
        X = tl.where(here, x_j[:, None], X)
    return X


@triton.jit(do_not_specialize=["B", "T", "N", "count", "chunks", "HV"])
def _chunk_scan(
    initial_state_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    v_ptr,
    A_ptr,
    solve_ptr,
    decay_ptr,
    final_state_ptr,
    o_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    chunks,
    HV,
    v_batch,
    v_time,
    v_head,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    dtype = q_in_ptr.dtype.element_ty
    columns = tl.cdiv(V, BV)
    c = tl.arange(0, BK)
    row = tl.arange(0, C)
    written = row[:, None] // M >= row[None, :] // M
    for task in range(tl.program_id(0), B * count * HV * columns, tl.num_programs(0)):
        e = (task % columns) * BV + tl.arange(0, BV)
        hv = (task // columns) % HV
        b = tl.cast(task // (columns * HV * count), tl.int64)
        n, chunk, start, length = piece_at(table_ptr, (task // (columns * HV)) % count, 0, T, PACKED)
        state_at = ((b * N + n) * HV + hv) * K * V + c[:, None] * V + e[None, :]
        inside = (c < K)[:, None] & (e < V)[None, :]
        v_at = v_ptr + b * v_batch + start * v_time + hv * v_head
        o_at = o_ptr + ((b * T + start) * HV + hv) * V
        line = (b * HV + hv) * T + start
        decay_at = decay_ptr + ((b * HV + hv) * chunks + chunk) * K + c

        S = tl.load(initial_state_ptr + state_at, mask=inside, other=0.0).to(tl.float32)
        for step in range(0, tl.cdiv(length, C)):
            # Addresses of a long sequence pass 2^31: those of a chunk's first token are of 64 bits.
            first = tl.cast(step * C, tl.int64)
            alive = (row < length - step * C)[:, None]
            keys = (line + first) * K + row[:, None] * K + c[None, :]
            key_mask = alive & (c < K)[None, :]
            pairs = (line + first) * C + row[:, None] * C + row[None, :]
            value_mask = alive & (e < V)[None, :]
            k_in = tl.load(k_in_ptr + keys, mask=key_mask, other=0.0)
            q_in = tl.load(q_in_ptr + keys, mask=key_mask, other=0.0)
            k_out = tl.load(k_out_ptr + keys, mask=key_mask, other=0.0)
            # Above the blocks on the diagonal nothing was written.
            solve = tl.where(written, tl.load(solve_ptr + pairs, mask=alive, other=0.0), 0.0)
            A = tl.where(written, tl.load(A_ptr + pairs, mask=alive, other=0.0), 0.0)
            values = v_at + first * v_time + row[:, None] * v_time + e[None, :]
            v = tl.load(values, mask=value_mask, other=0.0).to(tl.float32)
            decay = tl.load(decay_at + step * K, mask=c < K, other=0.0)

            # What the memory lacks and what fills it keep more digits than the inputs: they add up in S.
            narrow = S.to(dtype)
            missing = v - tl.dot(k_in, narrow, input_precision=PRECISION)
            d = _product_of_wide(solve, missing, PRECISION)
            o = tl.dot(q_in, narrow, input_precision=PRECISION) + _product_of_wide(A, d, PRECISION)
            S = S * decay[:, None] + _product_of_wide(tl.trans(k_out), d, PRECISION)
            outputs = o_at + first * (HV * V) + row[:, None] * (HV * V) + e[None, :]
            tl.store(outputs, o.to(o_ptr.dtype.element_ty), mask=value_mask)
        tl.store(final_state_ptr + state_at, S.to(final_state_ptr.dtype.element_ty), mask=inside)
