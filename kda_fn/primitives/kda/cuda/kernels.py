"""KDA's terms and gradients as CUDA runs them: the same arguments and results as in `kda/ascend/kernels.py`.

A tile is a whole chunk by some channels: matrix units are fed with products of 64 tokens, and registers hold
some ten tiles. The sums and inverses that blocks of 16 have of their own are reshaped tiles, for which Ascend
has no room.

A block's pairs are one product, referenced to the block's first token: right while the decay since then is
above 2^-FAR. Rows beyond that take products of the decays instead: a choice by the tokens before them alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kda_fn.primitives.kda.kernels import LN_2, LOG2_E, _load, _log2_decay, _rate, _store
from kda_fn.primitives.kernels import piece_at

__all__ = ["chunk_gradients", "chunk_terms"]

FAR = tl.constexpr(110.0)
"""Of a block's start, in powers of two: a decay's reciprocal is still far from overflow."""


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
    ROW: tl.constexpr,
    BK: tl.constexpr,
):
    """With KEEP also what each row of q and of k was multiplied by, and each beta, for the gradients."""
    dtype: tl.constexpr = q_in_ptr.dtype.element_ty
    # float16 has no range for them.
    operand: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float32
    t = tl.arange(0, C)
    i = t[:, None]
    j = t[None, :]
    block = i // M
    zero = tl.zeros((C, BK), dtype=operand)
    for task in range(tl.program_id(0), B * count * HV, tl.num_programs(0)):
        hv = task % HV
        piece = (task // HV) % count
        b = tl.cast(task // (HV * count), tl.int64)
        _n, first, start, length = piece_at(table_ptr, piece, C, T, PACKED)
        h = hv // G
        token = start + first
        left = length - first
        own = (b * HV + hv) * count + piece
        q_at = q_ptr + b * q_batch + token * q_time + h * q_head
        k_at = k_ptr + b * k_batch + token * k_time + h * k_head
        g_at = g_ptr + b * g_batch + token * g_time + hv * g_head
        bias_at = dt_bias_ptr
        rate = 1.0
        if GATE != "none":
            bias_at = dt_bias_ptr + hv * K
            rate = _rate(A_log_ptr + hv, HAS_RATE)
        beta = _betas(beta_ptr + b * beta_batch + token * beta_time + hv, beta_time, left, most_beta, GATE, C)
        q_scale = scale * _lengths(q_at, q_time, left, K, eps, GATE, C, ROW)
        k_scale = _lengths(k_at, k_time, left, K, eps, GATE, C, ROW)
        if KEEP:
            tl.store(rows_ptr + own * 3 * C + t, q_scale)
            tl.store(rows_ptr + (own * 3 + 1) * C + t, k_scale)
            tl.store(rows_ptr + (own * 3 + 2) * C + t, beta)

        A = tl.zeros((C, C), dtype=tl.float32)
        L = tl.zeros((C, C), dtype=tl.float32)
        farthest = tl.zeros((C,), dtype=tl.float32)
        for at in range(0, K, BK):
            c = at + tl.arange(0, BK)
            g = _gates(g_at, g_time, bias_at, at, left, K, rate, lower_bound, GATE, C, BK)
            q = _load(q_at + at, q_time, left, K - at, C, BK) * q_scale[:, None]
            k = _load(k_at + at, k_time, left, K - at, C, BK) * k_scale[:, None]
            since, after = _sums(g, C, M, BK)
            farthest = tl.maximum(farthest, tl.max(tl.abs(since), 1))
            entering, leaving, d1, d2, passed = _around(g, block)
            near = k * tl.exp2(tl.minimum(-since, FAR))
            far = k * tl.exp2(after)
            from_block = tl.exp2(since)
            q *= from_block
            k *= from_block
            _store(k_out_ptr + own * C * K + at, far * leaving * beta[:, None], K, C, K - at, C, BK)
            _store(q_in_ptr + own * C * K + at, q * entering, K, C, K - at, C, BK)
            _store(k_in_ptr + own * C * K + at, k * entering, K, C, K - at, C, BK)
            tl.store(decay_ptr + own * K + c, passed, mask=c < K)

            # Row by row of blocks. Two meet at the later one's start, where k gets through those between.
            q = q.to(operand)
            k = k.to(operand)
            for n in tl.static_range(C // M):
                if n == 2:
                    far *= tl.where(block < 1, d1[None, :], 1.0)
                if n == 3:
                    far *= tl.where(block < 2, d2[None, :], 1.0)
                there = tl.trans(tl.where(block == n, near, far).to(operand))
                A = tl.dot(tl.where(block == n, q, zero), there, A, input_precision=PRECISION)
                L = tl.dot(tl.where(block == n, k, zero), there, L, input_precision=PRECISION)

        if tl.max(farthest, 0) > FAR:
            A_near = tl.zeros((C, C), dtype=tl.float32)
            L_near = tl.zeros((C, C), dtype=tl.float32)
            for at in range(0, K, BK):
                g = _gates(g_at, g_time, bias_at, at, left, K, rate, lower_bound, GATE, C, BK)
                q = _load(q_at + at, q_time, left, K - at, C, BK) * q_scale[:, None]
                k = _load(k_at + at, k_time, left, K - at, C, BK) * k_scale[:, None]
                decay = tl.full((C, BK), 1.0, dtype=tl.float32)
                for step in range(0, M):
                    # Column m of every block, from the last.
                    m = M - 1 - step
                    column = j == block * M + m
                    there = decay * _row_of_block(k, m, C, M, BK)
                    A_near = tl.where(column, A_near + tl.sum(q * there, 1)[:, None], A_near)
                    L_near = tl.where(column, L_near + tl.sum(k * there, 1)[:, None], L_near)
                    farther = decay * _row_of_block(tl.exp2(g), m, C, M, BK)
                    decay = tl.where(i % M >= m, farther, decay)
            # Once too far, the rest of a block is: a choice by the tokens before, and by no later one.
            beyond = (block == j // M) & _so_far(farthest > FAR, C, M)[:, None]
            A = tl.where(beyond, A_near, A)
            L = tl.where(beyond, L_near, L)

        A = tl.where(i >= j, A * beta[None, :], 0.0)
        L = tl.where(i > j, L * beta[None, :], 0.0)
        _store(A_ptr + own * C * C, A, C, C, C, C, C)
        _store(Y_ptr + own * C * C, _inverse(L, PRECISION, C, M), C, C, C, C, C)


@triton.jit
def _gates(
    g_at,
    g_time,
    bias_at,
    at,
    left,
    K,
    rate,
    lower_bound,
    GATE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
):
    """log2 of the decays [C BK] from channel `at` on; 0 for tokens that do not exist."""
    g = _load(g_at + at, g_time, left, K - at, C, BK)
    if GATE == "none":
        g *= LOG2_E
    else:
        c = at + tl.arange(0, BK)
        g += tl.load(bias_at + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
        exists = (tl.arange(0, C) < left)[:, None] & (c < K)[None, :]
        g = tl.where(exists, _log2_decay(g, rate, lower_bound, GATE), 0.0)
    # 2^-170 is 0 already, and sums stay finite and keep their digits.
    return tl.where(g < -170.0, -170.0, g)


@triton.jit
def _betas(at, stride, left, most_beta, GATE: tl.constexpr, C: tl.constexpr):
    t = tl.arange(0, C)
    beta = tl.load(at + t * stride, mask=t < left, other=0.0).to(tl.float32)
    if GATE != "none":
        beta = tl.where(t < left, most_beta / (1.0 + tl.exp(-beta)), 0.0)
    return beta


@triton.jit
def _lengths(at, stride, left, K, eps, GATE: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr):
    """What makes unit vectors of the rows [C], or 1."""
    if GATE == "none":
        lengths = tl.full((C,), 1.0, dtype=tl.float32)
    else:
        x = _load(at, stride, left, K, C, ROW)
        lengths = tl.rsqrt(tl.sum(x * x, 1) + eps)
    return lengths


@triton.jit
def _sums(g, C: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """Of gates [C BK]: from each block's start through a token, and after a token to its block's end."""
    blocks = tl.reshape(g, [C // M, M, BK])
    since = tl.reshape(tl.cumsum(blocks, 1), [C, BK])
    after = tl.reshape(tl.cumsum(blocks, 1, reverse=True), [C, BK]) - g
    return since, after


@triton.jit
def _around(g, block):
    """The decays through the blocks before a row's own, through those after it, through 1 and 2, and all."""
    d0 = _through(g, block, 0)
    d1 = _through(g, block, 1)
    d2 = _through(g, block, 2)
    d3 = _through(g, block, 3)
    late = tl.where(block == 2, (d0 * d1)[None, :], (d0 * d1 * d2)[None, :])
    before = tl.where(block == 0, 1.0, tl.where(block == 1, d0[None, :], late))
    late = tl.where(block == 2, d3[None, :], 1.0)
    after = tl.where(block == 0, (d1 * d2 * d3)[None, :], tl.where(block == 1, (d2 * d3)[None, :], late))
    return before, after, d1, d2, d0 * d1 * d2 * d3


@triton.jit
def _through(g, block, n):
    """The decay through block n."""
    return tl.exp2(tl.sum(tl.where(block == n, g, 0.0), 0))


@triton.jit
def _row_of_block(x, m, C: tl.constexpr, M: tl.constexpr, F: tl.constexpr):
    """Row m of every block of x [C F], in all rows of the block."""
    return _sum_of_block(tl.where((tl.arange(0, C) % M == m)[:, None], x, 0.0), C, M, F)


@triton.jit
def _sum_of_block(x, C: tl.constexpr, M: tl.constexpr, F: tl.constexpr):
    """The sum over every block of x [C F], in all rows of the block."""
    sums = tl.sum(tl.reshape(x, [C // M, M, F]), 1)
    return tl.reshape(tl.broadcast_to(sums[:, None, :], [C // M, M, F]), [C, F])


@triton.jit
def _so_far(flags, C: tl.constexpr, M: tl.constexpr):
    """Whether a flag is set, for each token, between its block's start and itself."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return tl.sum(tl.where((i // M == j // M) & (i >= j), flags.to(tl.float32)[None, :], 0.0), 1) > 0.0


@triton.jit
def _inverse(L, PRECISION: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [C C], by halves.

    That of [[P, 0], [Q, R]] is [[P^-1, 0], [-R^-1 Q P^-1, R^-1]].
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    X = _inverse_of_blocks(L, C, M)
    corner = tl.where((i // M % 2 == 1) & (i // M - 1 == j // M), L, 0.0)
    X -= tl.dot(tl.dot(X, corner, input_precision=PRECISION), X, input_precision=PRECISION)
    corner = tl.where((i >= C // 2) & (j < C // 2), L, 0.0)
    X -= tl.dot(tl.dot(X, corner, input_precision=PRECISION), X, input_precision=PRECISION)
    return X


@triton.jit
def _inverse_of_blocks(L, C: tl.constexpr, M: tl.constexpr):
    """The same of the blocks of M on the diagonal alone, column by column from the last."""
    own = tl.arange(0, C)[:, None, None] // M == tl.arange(0, C // M)[None, :, None]
    blocks = tl.reshape(tl.sum(tl.where(own, tl.reshape(L, [C, C // M, M]), 0.0), 1), [C // M, M, M])
    r = tl.arange(0, M)
    X = tl.zeros((C // M, M, M), dtype=tl.float32)
    for step in range(0, M):
        m = M - 1 - step
        here = (r == m)[None, None, :]
        # The columns of X after column m are known, and L's rows up to it are zero.
        l_m = tl.sum(tl.where(here, blocks, 0.0), 2)
        x_m = tl.where(r == m, 1.0, 0.0)[None, :] - tl.sum(X * l_m[:, None, :], 2)
        X = tl.where(here, x_m[:, :, None], X)
    rows = tl.broadcast_to(tl.reshape(X, [C, M])[:, None, :], [C, C // M, M])
    return tl.reshape(tl.where(own, rows, 0.0), [C, C])


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

    Every use of k_j that beta_j multiplies is a use of e_j: d_beta_j is k_j times the gradient of beta_j k_j.
    A gate's gradient is a sum over the pairs of tokens around it: over all that end there or later, less all
    that begin there or later, plus what leaves the chunk.
    """
    dtype = e_ptr.dtype.element_ty
    operand = dA_ptr.dtype.element_ty
    t = tl.arange(0, C)
    i = t[:, None]
    j = t[None, :]
    block = i // M
    zero = tl.zeros((C, C), dtype=operand)
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
        at = part * BK
        c = at + tl.arange(0, BK)
        place = (b * T + token) * HV + hv
        own = (b * HV + hv) * count + piece
        d_o_at = d_o_ptr + b * d_o_batch + token * d_o_time + hv * d_o_head

        dq = tl.zeros((C, BK), dtype=tl.float32)
        dk = tl.zeros((C, BK), dtype=tl.float32)
        dp = tl.zeros((C, BK), dtype=tl.float32)
        kept = tl.zeros((BK,), dtype=tl.float32)
        for v_at in range(0, V, BV):
            S = _load(states_ptr + (own * K + at) * V + v_at, V, K - at, V - v_at, BK, BV)
            dS = _load(d_states_ptr + (own * K + at) * V + v_at, V, K - at, V - v_at, BK, BV)
            kept += tl.sum(S * dS, 1)
            e = _load(e_ptr + own * C * V + v_at, V, C, V - v_at, C, BV).to(dtype)
            dp += tl.dot(e, tl.trans(dS.to(dtype)), input_precision=PRECISION)
            S = tl.trans(S.to(dtype))
            d_o = _load(d_o_at + v_at, d_o_time, left, V - v_at, C, BV).to(dtype)
            dq += tl.dot(d_o, S, input_precision=PRECISION)
            d_v = _load(d_v_ptr + place * V + v_at, HV * V, left, V - v_at, C, BV).to(dtype)
            dk -= tl.dot(d_v, S, input_precision=PRECISION)

        rate = 1.0
        bias_at = dt_bias_ptr
        if GATE != "none":
            bias_at = dt_bias_ptr + hv * K
            rate = _rate(A_log_ptr + hv, HAS_RATE)
        q_at = q_ptr + b * q_batch + token * q_time + h * q_head + at
        k_at = k_ptr + b * k_batch + token * k_time + h * k_head + at
        g_at = g_ptr + b * g_batch + token * g_time + hv * g_head
        beta = tl.load(rows_ptr + (own * 3 + 2) * C + t)[:, None]
        g = _gates(g_at, g_time, bias_at, at, left, K, rate, lower_bound, GATE, C, BK)
        q = _load(q_at, q_time, left, K - at, C, BK) * tl.load(rows_ptr + own * 3 * C + t)[:, None]
        k = _load(k_at, k_time, left, K - at, C, BK) * tl.load(rows_ptr + (own * 3 + 1) * C + t)[:, None]
        since, after = _sums(g, C, M, BK)
        entering, leaving, d1, d2, passed = _around(g, block)
        from_block = tl.exp2(since)
        far = tl.exp2(after)
        dq *= from_block * entering
        dk *= from_block * entering
        dp *= far * leaving
        p = k * beta
        # A gate lets through what the chunk hands on of its first state, and of all that was written before.
        written = p * dp
        if dtype == tl.float32:
            dg_out = tl.dot((i > j).to(tl.float32), written, input_precision="ieee")
        else:
            # A token's own is taken out again: what that rounds is far below half precision.
            dg_out = tl.cumsum(written, 0) - written
        dg_out += (passed * kept)[None, :]

        dA = tl.load(dA_ptr + own * C * C + i * C + j)
        dP = tl.load(dP_ptr + own * C * C + i * C + j)
        distant = tl.max(tl.max(tl.abs(since), 1), 0) > FAR
        near = tl.exp2(tl.minimum(-since, tl.where(distant, -1000.0, FAR)))
        dg = q * dq + k * dk
        for n in range(0, C // M):
            far *= tl.where(block < n - 1, tl.where(n == 2, d1, d2)[None, :], 1.0)
            here = block == n
            row = tl.where(here, from_block, 0.0)
            there = tl.where(here, near, tl.where(block < n, far, 0.0))
            # A pair that comes and goes must cancel in dg: both times its products are of the same roundings.
            q_n = (q * row).to(operand)
            k_n = (k * row).to(operand)
            p_n = (p * there).to(operand)
            of_q = tl.dot(dA + zero, p_n, input_precision=PRECISION)
            of_k = tl.dot(dP + zero, p_n, input_precision=PRECISION)
            of_p = tl.dot(tl.trans(dA), q_n, input_precision=PRECISION)
            of_p += tl.dot(tl.trans(dP), k_n, input_precision=PRECISION)
            dq += row * of_q
            dk += row * of_k
            dp += there * of_p
            dg += q_n.to(tl.float32) * of_q + k_n.to(tl.float32) * of_k - p_n.to(tl.float32) * of_p
        if distant:
            # Had again rather than kept: every other chunk's registers are spared.
            beta = tl.load(rows_ptr + (own * 3 + 2) * C + t)[:, None]
            g = _gates(g_at, g_time, bias_at, at, left, K, rate, lower_bound, GATE, C, BK)
            q = _load(q_at, q_time, left, K - at, C, BK) * tl.load(rows_ptr + own * 3 * C + t)[:, None]
            k = _load(k_at, k_time, left, K - at, C, BK) * tl.load(rows_ptr + (own * 3 + 1) * C + t)[:, None]
            decay = tl.full((C, BK), 1.0, dtype=tl.float32)
            for step in range(0, M):
                m = M - 1 - step
                column = j == block * M + m
                there = decay * _row_of_block(k * beta, m, C, M, BK)
                dA_m = tl.sum(tl.where(column, dA.to(tl.float32), 0.0), 1)[:, None]
                dP_m = tl.sum(tl.where(column, dP.to(tl.float32), 0.0), 1)[:, None]
                dq += dA_m * there
                dk += dP_m * there
                of_p = _sum_of_block((dA_m * q + dP_m * k) * decay, C, M, BK)
                of_p = tl.where(i % M == m, of_p, 0.0)
                dp += of_p
                dg += (dA_m * q + dP_m * k) * there - k * beta * of_p
                farther = decay * _row_of_block(tl.exp2(g), m, C, M, BK)
                decay = tl.where(i % M >= m, farther, decay)

        # A token's own pair has no gate in it: kept out of dg, where it would be a large part that cancels.
        d_self = tl.load(d_self_ptr + own * C + t)[:, None]
        dq += d_self * k * beta
        dp += d_self * q
        d_beta = tl.sum(k * dp, 1)
        dp *= beta
        dg = tl.cumsum(dg, 0, reverse=True) + dg_out
        _store(d_q_ptr + place * K + at, scale * dq, HV * K, left, K - at, C, BK)
        _store(d_k_ptr + place * K + at, dk + dp, HV * K, left, K - at, C, BK)
        if GATE != "none":
            x = _load(g_at + at, g_time, left, K - at, C, BK)
            x += tl.load(bias_at + c, mask=c < K, other=0.0).to(tl.float32)[None, :]
            dg = tl.where((t < left)[:, None], dg, 0.0)
            if GATE == "bounded":
                dx = dg * (LN_2 * g) * (1.0 - LN_2 * g / lower_bound) * rate
                dA_log = dx * x
            else:
                dx = -rate * dg / (1.0 + tl.exp(-x))
                dA_log = dg * (LN_2 * g)
            tl.store(d_dt_bias_ptr + own * K + c, tl.sum(dx, 0), mask=c < K)
            tl.store(d_A_log_ptr + own * K + c, tl.sum(dA_log, 0), mask=c < K)
            dg = dx
            d_beta *= tl.load(rows_ptr + (own * 3 + 2) * C + t)
            d_beta *= 1.0 - tl.load(rows_ptr + (own * 3 + 2) * C + t) / most_beta
        _store(d_g_ptr + place * K + at, dg, HV * K, left, K - at, C, BK)
        tl.store(d_betas_ptr + (place + t * HV) * parts + part, d_beta, mask=t < left)
