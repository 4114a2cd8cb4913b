"""KDA's terms and gradients as Ascend compiles them: arguments and results are those of `kda/kernels.py`.

A tile is a block of M tokens by channels, for a whole chunk's do not fit there. Pairs of tokens of one block
take products of decays, whatever the gates; two blocks meet at the later one's start, and every exponent is a
sum of gates over its own range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives.kda.kernels import LN_2, LOG2_E, _log2_decay, _rate, _store
from kda_fn.primitives.kernels import piece_at

__all__ = ["chunk_gradients", "chunk_terms"]


@triton.jit(do_not_specialize=["B", "T", "count", "HV", "G"])
def chunk_terms(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    A_ptr,
    Y_ptr,
    decay_ptr,
    rows_ptr,
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
    eps,
    lower_bound,
    most_beta,
    K: tl.constexpr,
    PACKED: tl.constexpr,
    KEEP: tl.constexpr,
    GATE: tl.constexpr,
    HAS_RATE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
    PART: tl.constexpr,
):
    """With KEEP also what each row of q and of k was multiplied by, and each beta, for the gradients."""
    c = tl.arange(0, BK)
    for task in range(tl.program_id(0), B * count * HV, tl.num_programs(0)):
        hv = task % HV
        piece = (task // HV) % count
        b = tl.cast(task // (HV * count), tl.int64)
        _n, first, start, length = piece_at(table_ptr, piece, C, T, PACKED)
        h = hv // G
        token = start + first
        left = length - first
        own = (b * HV + hv) * count + piece
        q = q_ptr + b * q_batch + token * q_time + h * q_head
        k = k_ptr + b * k_batch + token * k_time + h * k_head
        g = g_ptr + b * g_batch + token * g_time + hv * g_head
        beta = beta_ptr + b * beta_batch + token * beta_time + hv
        rows = rows_ptr
        if KEEP:
            rows = rows_ptr + own * 3 * C
        bias = dt_bias_ptr
        rate = 1.0
        if GATE != "none":
            bias = dt_bias_ptr + hv * K
            rate = _rate(A_log_ptr + hv, HAS_RATE)
        q_in, k_in, k_out = q_in_ptr + own * C * K, k_in_ptr + own * C * K, k_out_ptr + own * C * K
        A, Y = A_ptr + own * C * C, Y_ptr + own * C * C
        nothing = tl.zeros((M, M), dtype=tl.float32)
        for n in range(0, C // M):
            for m in range(n + 1, C // M):
                _store(A + n * M * C + m * M, nothing, C, M, M, M, M)
                _store(Y + n * M * C + m * M, nothing, C, M, M, M, M)

        # Row by row of blocks. Two blocks meet at the later one's start: p goes there through those between.
        # fmt: off
        d = tl.full((BK,), 1.0, dtype=tl.float32)
        _q, _k, p0, d_i, X00 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, bias, rows,
                                      q_in, k_in, A, 0, left, d, scale, eps, rate, lower_bound,
                                      most_beta, K, KEEP, GATE, C, M, BK)
        _store(Y, X00, C, M, M, M, M)
        d *= d_i

        q1, k1, p1, d_i, X11 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, bias, rows,
                                      q_in, k_in, A, M, left, d, scale, eps, rate, lower_bound,
                                      most_beta, K, KEEP, GATE, C, M, BK)
        L10 = _corner(q1, k1, p0, A + M * C, PRECISION, C, M)
        X10 = -_product(X11, _product(L10, X00, PRECISION), PRECISION)
        _store(Y + M * C, X10, C, M, M, M, M)
        _store(Y + M * C + M, X11, C, M, M, M, M)
        p0 *= d_i[None, :]
        d *= d_i

        q2, k2, p2, d_i, X22 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, bias, rows,
                                      q_in, k_in, A, 2 * M, left, d, scale, eps, rate, lower_bound,
                                      most_beta, K, KEEP, GATE, C, M, BK)
        L20 = _corner(q2, k2, p0, A + 2 * M * C, PRECISION, C, M)
        L21 = _corner(q2, k2, p1, A + 2 * M * C + M, PRECISION, C, M)
        X20 = -_product(X22, _product(L20, X00, PRECISION) + _product(L21, X10, PRECISION), PRECISION)
        X21 = -_product(X22, _product(L21, X11, PRECISION), PRECISION)
        _store(Y + 2 * M * C, X20, C, M, M, M, M)
        _store(Y + 2 * M * C + M, X21, C, M, M, M, M)
        _store(Y + 2 * M * C + 2 * M, X22, C, M, M, M, M)
        p0 *= d_i[None, :]
        p1 *= d_i[None, :]
        d *= d_i

        q3, k3, p3, d_i, X33 = _block(q, q_time, k, k_time, g, g_time, beta, beta_time, bias, rows,
                                      q_in, k_in, A, 3 * M, left, d, scale, eps, rate, lower_bound,
                                      most_beta, K, KEEP, GATE, C, M, BK)
        L30 = _corner(q3, k3, p0, A + 3 * M * C, PRECISION, C, M)
        L31 = _corner(q3, k3, p1, A + 3 * M * C + M, PRECISION, C, M)
        L32 = _corner(q3, k3, p2, A + 3 * M * C + 2 * M, PRECISION, C, M)
        rest = _product(L31, X10, PRECISION) + _product(L32, X20, PRECISION)
        X30 = -_product(X33, _product(L30, X00, PRECISION) + rest, PRECISION)
        X31 = -_product(X33, _product(L31, X11, PRECISION) + _product(L32, X21, PRECISION), PRECISION)
        X32 = -_product(X33, _product(L32, X22, PRECISION), PRECISION)
        _store(Y + 3 * M * C, X30, C, M, M, M, M)
        _store(Y + 3 * M * C + M, X31, C, M, M, M, M)
        _store(Y + 3 * M * C + 2 * M, X32, C, M, M, M, M)
        _store(Y + 3 * M * C + 3 * M, X33, C, M, M, M, M)
        # fmt: on

        last = d_i[None, :]
        _store(k_out, p0 * last, K, M, K, M, BK)
        _store(k_out + M * K, p1 * last, K, M, K, M, BK)
        _store(k_out + 2 * M * K, p2 * last, K, M, K, M, BK)
        _store(k_out + 3 * M * K, p3, K, M, K, M, BK)
        tl.store(decay_ptr + own * K + c, d * d_i, mask=c < K)


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
    bias_at,
    rows_at,
    q_in_at,
    k_in_at,
    A_at,
    first: tl.constexpr,
    left,
    entering,
    scale,
    eps,
    rate,
    lower_bound,
    most_beta,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    GATE: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
):
    """A block of M tokens, `first` tokens into its chunk, by itself.

    Returns q and k decayed from its start, p = beta k decayed to its end, the decay through it, (I + L)^-1.
    """
    row = tl.arange(0, M)
    t = first + row
    q = _rows(q_at, q_time, first, 0, left, K, M, BK)
    k = _rows(k_at, k_time, first, 0, left, K, M, BK)
    beta = tl.load(beta_at + t * beta_time, mask=t < left, other=0.0).to(tl.float32)
    if GATE == "none":
        q *= scale
        if KEEP:
            ones = tl.full((M,), 1.0, dtype=tl.float32)
            tl.store(rows_at + t, scale * ones)
            tl.store(rows_at + C + t, ones)
    else:
        beta = tl.where(t < left, most_beta / (1.0 + tl.exp(-beta)), 0.0)
        q_scale = scale * tl.rsqrt(tl.sum(q * q, 1) + eps)
        k_scale = tl.rsqrt(tl.sum(k * k, 1) + eps)
        q *= q_scale[:, None]
        k *= k_scale[:, None]
        if KEEP:
            tl.store(rows_at + t, q_scale)
            tl.store(rows_at + C + t, k_scale)
    if KEEP:
        tl.store(rows_at + 2 * C + t, beta)
    w = tl.exp2(_gates(g_at, g_time, bias_at, first, 0, left, rate, lower_bound, GATE, K, M, BK))

    # Column by column from the last: `decay` is that from column j to each row, `leaving` that to the end.
    p = k * beta[:, None]
    p_out = tl.zeros((M, BK), dtype=tl.float32)
    A = tl.zeros((M, M), dtype=tl.float32)
    L = tl.zeros((M, M), dtype=tl.float32)
    decay = tl.full((M, BK), 1.0, dtype=tl.float32)
    leaving = tl.full((BK,), 1.0, dtype=tl.float32)
    for step in range(0, M):
        j = M - 1 - step
        here = row == j
        p_j = tl.sum(tl.where(here[:, None], p, 0.0), 0)
        w_j = tl.sum(tl.where(here[:, None], w, 0.0), 0)
        near = decay * p_j[None, :]
        A = tl.where(here[None, :], tl.where(row >= j, tl.sum(q * near, 1), 0.0)[:, None], A)
        L = tl.where(here[None, :], tl.where(row > j, tl.sum(k * near, 1), 0.0)[:, None], L)
        p_out = tl.where(here[:, None], (p_j * leaving)[None, :], p_out)
        decay = tl.where((row >= j)[:, None], decay * w_j[None, :], decay)
        leaving *= w_j
    _store(A_at + first * C + first, A, C, M, M, M, M)

    q *= decay
    k *= decay
    _store(q_in_at + first * K, q * entering[None, :], K, M, K, M, BK)
    _store(k_in_at + first * K, k * entering[None, :], K, M, K, M, BK)
    return q, k, p_out, leaving, _inverse(L, row, M)


@triton.jit
def _rows(at, stride, first, c0, left, K, M: tl.constexpr, BK: tl.constexpr):
    """Rows [M BK] of a chunk in float32, from token `first` and channel c0 on; zeros where there are none."""
    r = tl.arange(0, M)
    c = tl.arange(0, BK)
    # A mask is a bound on each index, or Ascend reads all of the tile.
    mask = (r < left - first)[:, None] & (c < K - c0)[None, :]
    place = at + (first + r)[:, None] * stride + (c0 + c)[None, :]
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _gates(
    g_at,
    g_time,
    bias_at,
    first,
    c0,
    left,
    rate,
    lower_bound,
    GATE: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
):
    """log2 of the decays of such rows; 0 where there are none."""
    g = _rows(g_at, g_time, first, c0, left, K, M, BK)
    if GATE == "none":
        g *= LOG2_E
    else:
        r = tl.arange(0, M)
        c = tl.arange(0, BK)
        g += tl.load(bias_at + c0 + c, mask=c < K - c0, other=0.0).to(tl.float32)[None, :]
        g = tl.where((r < left - first)[:, None], _log2_decay(g, rate, lower_bound, GATE), 0.0)
    return g


@triton.jit
def _corner(q, k, p, A_at, PRECISION: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """Stores A and returns L of a pair of blocks."""
    dtype = A_at.dtype.element_ty
    p_far = tl.trans(p.to(dtype))
    # The device may overwrite a product's left operand: `+ 0.0` makes it one of its own.
    A = tl.dot((q + 0.0).to(dtype), p_far, input_precision=PRECISION)
    _store(A_at, A, C, M, M, M, M)
    return tl.dot((k + 0.0).to(dtype), p_far, input_precision=PRECISION)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    return tl.dot(a + 0.0, b, input_precision=PRECISION)


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


@triton.jit(do_not_specialize=["B", "T", "count", "HV", "G"])
def chunk_gradients(
    q_ptr,
    k_ptr,
    g_ptr,
    A_log_ptr,
    dt_bias_ptr,
    rows_ptr,
    states_ptr,
    e_ptr,
    d_states_ptr,
    dA_ptr,
    dP_ptr,
    d_self_ptr,
    d_v_ptr,
    d_o_ptr,
    d_q_ptr,
    d_k_ptr,
    d_g_ptr,
    d_betas_ptr,
    d_A_log_ptr,
    d_dt_bias_ptr,
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
    d_o_batch,
    d_o_time,
    d_o_head,
    scale,
    eps,
    lower_bound,
    most_beta,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    HAS_RATE: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """With a gate: d_q and d_k of the unit vectors, d_g and d_betas of the logits, and sums over the chunk.

    A gate's gradient is a sum over the pairs of tokens around it: all that come from it or after it, less
    those that go there and back, plus what leaves the chunk. It adds up from the last block to the first.
    """
    dtype = e_ptr.dtype.element_ty
    row = tl.arange(0, M)
    parts: tl.constexpr = (K + BK - 1) // BK
    for task in range(tl.program_id(0), B * count * HV * parts, tl.num_programs(0)):
        part = task % parts
        hv = (task // parts) % HV
        piece = (task // (parts * HV)) % count
        b = tl.cast(task // (parts * HV * count), tl.int64)
        _n, first, start, length = piece_at(table_ptr, piece, C, T, PACKED)
        h = hv // G
        token = start + first
        left = length - first
        c0 = part * BK
        channels = tl.arange(0, BK)
        place = (b * T + token) * HV + hv
        own = (b * HV + hv) * count + piece
        q_at = q_ptr + b * q_batch + token * q_time + h * q_head
        k_at = k_ptr + b * k_batch + token * k_time + h * k_head
        g_at = g_ptr + b * g_batch + token * g_time + hv * g_head
        d_o_at = d_o_ptr + b * d_o_batch + token * d_o_time + hv * d_o_head
        d_v_at = d_v_ptr + place * V
        e_at = e_ptr + own * C * V
        S_at = states_ptr + (own * K + c0) * V
        dS_at = d_states_ptr + (own * K + c0) * V
        dA_at, dP_at = dA_ptr + own * C * C, dP_ptr + own * C * C
        rows = rows_ptr + own * 3 * C
        bias = dt_bias_ptr
        rate = 1.0
        if GATE != "none":
            bias = dt_bias_ptr + hv * K
            rate = _rate(A_log_ptr + hv, HAS_RATE)

        # A gate lets through what the chunk hands on of its first state, and of all that was written before.
        # By a product: a sum over the last axis lies in memory as a column, and so would all that it meets.
        share = tl.full((M, BV), 1.0 / M, dtype=tl.float32)
        kept = tl.zeros((M, BK), dtype=tl.float32)
        for f in range(0, V, BV):
            S = _rows(S_at + f, V, 0, 0, K - c0, V - f, BK, BV)
            S *= _rows(dS_at + f, V, 0, 0, K - c0, V - f, BK, BV)
            kept += tl.dot(share + 0.0, tl.trans(S), input_precision="ieee")
        ending = tl.sum(kept, 0)
        through = tl.full((BK,), 1.0, dtype=tl.float32)
        # Row n: what the blocks before block n wrote.
        before = tl.zeros((M, BK), dtype=tl.float32)
        for back in range(0, C // M):
            n = C // M - 1 - back
            p, d_n = _leaving(
                k_at, k_time, g_at, g_time, bias, rows, n * M, c0, left, rate, lower_bound, GATE, K, C, M, BK
            )
            dp = _from_state(e_at, V, n * M, C, dS_at, K - c0, dtype, V, PRECISION, M, BK, BV)
            before += tl.where((row > n)[:, None], (through * tl.sum(p * dp, 0))[None, :], 0.0)
            through *= d_n
        # Tiles of equal rows: Ascend takes a row that a loop carries for one that is scattered over memory.
        dg_after = tl.zeros((M, BK), dtype=tl.float32) + (through * ending)[None, :]

        d_bias = tl.zeros((BK,), dtype=tl.float32)
        d_rate = tl.zeros((BK,), dtype=tl.float32)
        leaving = tl.full((M, BK), 1.0, dtype=tl.float32)
        for back in range(0, C // M):
            n = C // M - 1 - back
            at = n * M
            t = at + row
            g = _gates(g_at, g_time, bias, at, c0, left, rate, lower_bound, GATE, K, M, BK)
            q = _rows(q_at, q_time, at, c0, left, K, M, BK) * tl.load(rows + t)[:, None]
            k = _rows(k_at, k_time, at, c0, left, K, M, BK) * tl.load(rows + C + t)[:, None]
            beta = tl.load(rows + 2 * C + t)[:, None]

            # With the blocks before this one, from the nearest; then what enters the chunk.
            entering = tl.full((M, BK), 1.0, dtype=tl.float32)
            dq = tl.zeros((M, BK), dtype=tl.float32)
            dk = tl.zeros((M, BK), dtype=tl.float32)
            for between in range(0, n):
                m = n - 1 - between
                p_m, d_m = _leaving(
                    k_at,
                    k_time,
                    g_at,
                    g_time,
                    bias,
                    rows,
                    m * M,
                    c0,
                    left,
                    rate,
                    lower_bound,
                    GATE,
                    K,
                    C,
                    M,
                    BK,
                )
                p_m *= entering
                dq += tl.dot(_pairs(dA_at, n, m, C, M), p_m, input_precision="ieee")
                dk += tl.dot(_pairs(dP_at, n, m, C, M), p_m, input_precision="ieee")
                entering *= d_m[None, :]
            dq += (
                _from_state(d_o_at, d_o_time, at, left, S_at, K - c0, dtype, V, PRECISION, M, BK, BV)
                * entering
            )
            dk -= (
                _from_state(d_v_at, HV * V, at, left, S_at, K - c0, dtype, V, PRECISION, M, BK, BV) * entering
            )
            from_start = tl.exp2(tl.cumsum(g, 0))
            dq *= from_start
            dk *= from_start

            # With the blocks after it; and what leaves the chunk.
            dp_out = _from_state(e_at, V, at, C, dS_at, K - c0, dtype, V, PRECISION, M, BK, BV) * leaving
            dp = tl.zeros((M, BK), dtype=tl.float32)
            until = tl.full((M, BK), 1.0, dtype=tl.float32)
            for m in range(n + 1, C // M):
                g_m = _gates(g_at, g_time, bias, m * M, c0, left, rate, lower_bound, GATE, K, M, BK)
                q_m = _rows(q_at, q_time, m * M, c0, left, K, M, BK) * tl.load(rows + m * M + row)[:, None]
                k_m = (
                    _rows(k_at, k_time, m * M, c0, left, K, M, BK) * tl.load(rows + C + m * M + row)[:, None]
                )
                from_m = tl.exp2(tl.cumsum(g_m, 0))
                of_p = tl.dot(tl.trans(_pairs(dA_at, m, n, C, M)), q_m * from_m, input_precision="ieee")
                of_p += tl.dot(tl.trans(_pairs(dP_at, m, n, C, M)), k_m * from_m, input_precision="ieee")
                dp += of_p * until
                until *= tl.exp2(tl.sum(g_m, 0))[None, :]
            after = _after(g_at, g_time, bias, at, c0, left, rate, lower_bound, GATE, K, M, BK)
            dp_out *= after
            dp *= after
            leaving *= tl.exp2(tl.sum(g, 0))[None, :]

            # Its own pairs, column by column from the last.
            w = tl.exp2(g)
            p = k * beta
            dA = _pairs(dA_at, n, n, C, M)
            dP = _pairs(dP_at, n, n, C, M)
            decay = tl.full((M, BK), 1.0, dtype=tl.float32)
            for step in range(0, M):
                j = M - 1 - step
                here = row == j
                p_j = tl.sum(tl.where(here[:, None], p, 0.0), 0)
                w_j = tl.sum(tl.where(here[:, None], w, 0.0), 0)
                dA_j = tl.sum(tl.where(here[None, :], dA, 0.0), 1)[:, None]
                dP_j = tl.sum(tl.where(here[None, :], dP, 0.0), 1)[:, None]
                near = decay * p_j[None, :]
                dq += dA_j * near
                dk += dP_j * near
                of_p = tl.sum((dA_j * q + dP_j * k) * decay, 0)
                dp += tl.where(here[:, None], of_p[None, :], 0.0)
                decay = tl.where((row >= j)[:, None], decay * w_j[None, :], decay)

            dg = q * dq + k * dk - p * dp
            total = tl.sum(dg, 0)
            dg = tl.cumsum(dg, 0, reverse=True) + dg_after
            dg += tl.dot((row[:, None] > row[None, :]).to(tl.float32), p * dp_out, input_precision="ieee")
            dg += tl.sum(tl.where((row == n)[:, None], before, 0.0), 0)[None, :]
            dp += dp_out
            dg_after += total[None, :]
            # A token's own pair has no gate in it.
            d_self = tl.load(d_self_ptr + own * C + t)[:, None]
            dq += d_self * p
            dp += d_self * q
            d_beta = tl.sum(k * dp, 1)
            dk += beta * dp
            _store_rows(d_q_ptr + place * K, scale * dq, HV * K, at, c0, left, K, M, BK)
            _store_rows(d_k_ptr + place * K, dk, HV * K, at, c0, left, K, M, BK)
            if GATE != "none":
                x = _rows(g_at, g_time, at, c0, left, K, M, BK)
                x += tl.load(bias + c0 + channels, mask=channels < K - c0, other=0.0).to(tl.float32)[None, :]
                dg = tl.where((row < left - at)[:, None], dg, 0.0)
                if GATE == "bounded":
                    dx = dg * (LN_2 * g) * (1.0 - LN_2 * g / lower_bound) * rate
                    d_rate += tl.sum(dx * x, 0)
                else:
                    dx = -rate * dg / (1.0 + tl.exp(-x))
                    d_rate += tl.sum(dg * (LN_2 * g), 0)
                d_bias += tl.sum(dx, 0)
                dg = dx
                beta_n = tl.load(rows + 2 * C + t)
                d_beta *= beta_n * (1.0 - beta_n / most_beta)
            _store_rows(d_g_ptr + place * K, dg, HV * K, at, c0, left, K, M, BK)
            tl.store(d_betas_ptr + (place + t * HV) * parts + part, d_beta, mask=t < left)
        if GATE != "none":
            sums = own * K + c0 + channels
            tl.store(d_dt_bias_ptr + sums, d_bias, mask=channels < K - c0)
            tl.store(d_A_log_ptr + sums, d_rate, mask=channels < K - c0)


@triton.jit
def _after(
    g_at,
    g_time,
    bias_at,
    first,
    c0,
    left,
    rate,
    lower_bound,
    GATE: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
):
    """The decays of a block's rows to its end, of gates one later: a difference of sums loses digits."""
    end = tl.minimum(left, first + M)
    g = _gates(g_at, g_time, bias_at, first + 1, c0, end, rate, lower_bound, GATE, K, M, BK)
    return tl.exp2(tl.cumsum(g, 0, reverse=True))


@triton.jit
def _leaving(
    k_at,
    k_time,
    g_at,
    g_time,
    bias_at,
    rows_at,
    first,
    c0,
    left,
    rate,
    lower_bound,
    GATE: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
):
    """p = beta k of a block, decayed to its end, and the decay through it."""
    t = first + tl.arange(0, M)
    factors = tl.load(rows_at + C + t) * tl.load(rows_at + 2 * C + t)
    p = _rows(k_at, k_time, first, c0, left, K, M, BK) * factors[:, None]
    p *= _after(g_at, g_time, bias_at, first, c0, left, rate, lower_bound, GATE, K, M, BK)
    g = _gates(g_at, g_time, bias_at, first, c0, left, rate, lower_bound, GATE, K, M, BK)
    return p, tl.exp2(tl.sum(g, 0))


@triton.jit
def _from_state(
    at,
    stride,
    first,
    left,
    S_at,
    channels,
    dtype: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """x S^T of a block's rows x [M V] and S [BK V]."""
    r = tl.arange(0, M)
    c = tl.arange(0, BK)
    f = tl.arange(0, BV)
    y = tl.zeros((M, BK), dtype=tl.float32)
    for v in range(0, V, BV):
        mask = (r < left - first)[:, None] & (f < V - v)[None, :]
        x = tl.load(at + (first + r)[:, None] * stride + (v + f)[None, :], mask=mask, other=0.0).to(dtype)
        mask = (c < channels)[:, None] & (f < V - v)[None, :]
        S = tl.load(S_at + c[:, None] * V + (v + f)[None, :], mask=mask, other=0.0)
        y += tl.dot(x, tl.trans(S), input_precision=PRECISION)
    return y


@triton.jit
def _pairs(at, n, m, C: tl.constexpr, M: tl.constexpr):
    """Block (n, m) of [C C], in float32."""
    r = tl.arange(0, M)
    return tl.load(at + n * M * C + m * M + r[:, None] * C + r[None, :]).to(tl.float32)


@triton.jit
def _store_rows(at, x, stride, first, c0, left, K, M: tl.constexpr, BK: tl.constexpr):
    """Stores what `_rows` would read."""
    _store(at + first * stride + c0, x, stride, left - first, K - c0, M, BK)
