"""KDA's terms, scans and gradients in bfloat16 on Hopper, in Gluon, where layouts are chosen by hand.

Results are those of `kernels.py` beside this, and of `_chunk_scan` and `_chunk_scan_back`, to rounding.

A chunk's terms: a warp holds the 16 tokens of a block and a thread all of them, in a few channels, so that
sums of gates and what is made of them need no other thread. Pairs of tokens are products of whole chunks, of
which each block of 16 by 16 is chosen afterwards by how far it is from the diagonal.

A chunk's gradients: tokens lie as for its terms. Cotangents of pairs of tokens are made by blocks of 16, and
are in registers the left side of their products with the block's keys and queries.

The scans: all is transposed, [V ..]. What one product gives is in registers the left side of the next, and
what a chunk needs comes through the bulk copy engine while the last one is computed.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kda_fn.primitives.kda import kernels as _kernels
from kda_fn.primitives.kernels import piece_at as _piece_at
from kda_fn.types import Tensor

__all__ = ["chunk_gradients", "chunk_scan", "chunk_scan_back", "chunk_terms", "described"]

LOG2_E = gl.constexpr(_kernels.LOG2_E.value)
LN_2 = gl.constexpr(_kernels.LN_2.value)
DESCRIBED = gl.NVMMASharedLayout(128, 16, 2)
FAR = gl.constexpr(118.0)
"""Of a block's start, in powers of two: the least gate that a lower bound of -5 allows is nearer."""

# Triton renamed it in 3.7.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_rate = gluon.jit(_kernels._rate.fn)
_reciprocal = gluon.jit(_kernels._reciprocal.fn)
piece_at = gluon.jit(_piece_at.fn)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit(do_not_specialize=["B", "T", "count", "HV", "G"])
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
    K: gl.constexpr,
    PACKED: gl.constexpr,
    KEEP: gl.constexpr,
    GATE: gl.constexpr,
    HAS_RATE: gl.constexpr,
    PRECISION: gl.constexpr,
    C: gl.constexpr,
    M: gl.constexpr,
    ROW: gl.constexpr,
    BK: gl.constexpr,
):
    """One program a chunk: a loop over chunks would keep addresses in registers that are needed elsewhere."""
    dtype: gl.constexpr = q_in_ptr.dtype.element_ty
    N: gl.constexpr = C // M
    PARTS: gl.constexpr = K // BK
    TOKENS: gl.constexpr = gl.BlockedLayout([1, M, BK // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    task = gl.program_id(0)
    hv = task % HV
    piece = (task // HV) % count
    b = gl.cast(task // (HV * count), gl.int64)
    _n, first, start, length = piece_at(table_ptr, piece, C, T, PACKED)
    h = hv // G
    token = start + first
    left = length - first
    own = (b * HV + hv) * count + piece
    q_at = q_ptr + b * q_batch + token * q_time + h * q_head
    k_at = k_ptr + b * k_batch + token * k_time + h * k_head
    g_at = g_ptr + b * g_batch + token * g_time + hv * g_head

    queries = gl.allocate_shared_memory(dtype, [PARTS, C, BK], OPERAND)
    keys = gl.allocate_shared_memory(dtype, [PARTS, C, BK], OPERAND)
    near = gl.allocate_shared_memory(dtype, [PARTS, C, BK], OPERAND)
    next_to = gl.allocate_shared_memory(dtype, [PARTS, C, BK], OPERAND)
    two_apart = gl.allocate_shared_memory(dtype, [PARTS, C, BK], OPERAND)
    three_apart = gl.allocate_shared_memory(dtype, [PARTS, C, BK], OPERAND)
    operands = queries, keys, near, next_to, two_apart, three_apart
    # What is read lies where its products will: a thread reads and writes the same elements.
    for part in gl.static_range(PARTS):
        _copy(queries.index(part), q_at + part * BK, q_time, left, C, BK)
        _copy(keys.index(part), k_at + part * BK, k_time, left, C, BK)
    async_copy.commit_group()
    if g_ptr.dtype.element_ty == dtype:
        for part in gl.static_range(PARTS):
            _copy(near.index(part), g_at + part * BK, g_time, left, C, BK)
    async_copy.commit_group()

    by_row = gl.allocate_shared_memory(gl.float32, [3, N, M], PLAIN)
    biases = gl.allocate_shared_memory(gl.float32, [PARTS, BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    t = gl.arange(0, C, LINE)
    beta_at = beta_ptr + b * beta_batch + token * beta_time + hv
    beta = gl.load(beta_at + t * beta_time, mask=t < left, other=0.0).to(gl.float32)
    rate = 1.0
    if GATE != "none":
        beta = gl.where(t < left, most_beta / (1.0 + gl.exp(-beta)), 0.0)
        rate = _rate(A_log_ptr + hv, HAS_RATE)
        c = gl.arange(0, BK, LINE)
        for part in gl.static_range(PARTS):
            biases.index(part).store(gl.load(dt_bias_ptr + hv * K + part * BK + c).to(gl.float32))
    by_row.index(2).store(gl.reshape(beta, [N, M]))
    async_copy.wait_group(1)
    barrier()
    if GATE == "none":
        q_scale = gl.full([N, M], 1.0, gl.float32, ROWS) * scale
        k_scale = gl.full([N, M], 1.0, gl.float32, ROWS)
    else:
        q_scale = _squares(queries.index(0), M, TOKENS)
        k_scale = _squares(keys.index(0), M, TOKENS)
        for part in gl.static_range(1, PARTS):
            q_scale += _squares(queries.index(part), M, TOKENS)
            k_scale += _squares(keys.index(part), M, TOKENS)
        q_scale = scale * gl.rsqrt(gl.sum(q_scale, 2) + eps)
        k_scale = gl.rsqrt(gl.sum(k_scale, 2) + eps)
    by_row.index(0).store(q_scale)
    by_row.index(1).store(k_scale)
    if KEEP:
        at = (
            gl.arange(0, N, gl.SliceLayout(1, ROWS))[:, None] * M
            + gl.arange(0, M, gl.SliceLayout(0, ROWS))[None, :]
        )
        gl.store(rows_ptr + own * 3 * C + at, q_scale)
        gl.store(rows_ptr + (own * 3 + 1) * C + at, k_scale)
        gl.store(rows_ptr + (own * 3 + 2) * C + t, beta)
    async_copy.wait_group(0)
    barrier()

    to = q_in_ptr + own * C * K, k_in_ptr + own * C * K, k_out_ptr + own * C * K, decay_ptr + own * K
    farthest = gl.zeros([N, BK], gl.float32, gl.SliceLayout(1, TOKENS))
    # No unrolled loop: two parts at a time do not fit into registers.
    for part in range(PARTS):
        if g_ptr.dtype.element_ty == dtype:
            x = _tokens(near.index(part), M, TOKENS)
        else:
            x = _load(g_at + part * BK, g_time, left, M, BK, TOKENS)
        reach = _part(
            to, operands, x, by_row, biases, rate, lower_bound, left, part, K, GATE, C, M, BK, TOKENS
        )
        farthest = gl.maximum(farthest, reach)
    is_far = gl.max(gl.max(farthest, 1), 0) > FAR
    q_far = gl.allocate_shared_memory(gl.float32, [C, M], PLAIN)
    k_far = gl.allocate_shared_memory(gl.float32, [C, M], PLAIN)
    beyond = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if is_far:
        inputs = q_at, q_time, k_at, k_time, g_at, g_time
        _far_pairs(
            (q_far, k_far, beyond), inputs, by_row, biases, rate, lower_bound, left, K, GATE, C, M, BK, TOKENS
        )
    fence_async_shared()
    barrier()

    i = gl.arange(0, C, gl.SliceLayout(1, PAIRS))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, PAIRS))[None, :]
    beta = gl.convert_layout(beta, gl.SliceLayout(0, PAIRS))[None, :]
    others = near, next_to, two_apart, three_apart
    A = _pairs(queries, others, i, j, M, PAIRS)
    if is_far:
        A = _chosen(A, q_far, beyond, i, j, M, PAIRS)
    gl.store(A_ptr + own * C * C + i * C + j, gl.where(i >= j, A * beta, 0.0).to(dtype))
    # Or both products' sums are kept at a time, and they run one by one for want of registers.
    barrier()
    L = _pairs(keys, others, i, j, M, PAIRS)
    if is_far:
        L = _chosen(L, k_far, beyond, i, j, M, PAIRS)
    Y = _inverse(gl.where(i > j, L * beta, 0.0), i, j, C, M, PAIRS)
    gl.store(Y_ptr + own * C * C + i * C + j, Y.to(dtype))


@gluon.jit
def _copy(to, at, stride, rows, C: gl.constexpr, F: gl.constexpr):
    """Begins to copy [C F], of which `rows` exist, to shared memory; zeros elsewhere."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // F, F // 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, C, gl.SliceLayout(1, LINES))[:, None]
    f = gl.arange(0, F, gl.SliceLayout(0, LINES))[None, :]
    async_copy.async_copy_global_to_shared(to, at + r * stride + f, mask=r < rows)


@gluon.jit
def _tokens(x, M: gl.constexpr, TOKENS: gl.constexpr):
    """[C BK] in shared memory -> [C / M, M, BK] in registers, in float32."""
    C: gl.constexpr = x.shape[0]
    BK: gl.constexpr = x.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([M, BK // 32], [1, 32], [4, 1], [1, 0])
    return gl.convert_layout(gl.reshape(x.load(FLAT), [C // M, M, BK]), TOKENS, assert_trivial=True).to(
        gl.float32
    )


@gluon.jit
def _squares(x, M: gl.constexpr, TOKENS: gl.constexpr):
    x = _tokens(x, M, TOKENS)
    return x * x


@gluon.jit
def _sums(x, biases, rate, lower_bound, left, GATE: gl.constexpr, M: gl.constexpr, TOKENS: gl.constexpr):
    """Of gates or their logits x [N M BK]: log2 of the decays since each block's start, by what exists."""
    N: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    if GATE == "none":
        g = x * LOG2_E
    else:
        bias = biases.load(gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))
        t = (
            gl.arange(0, N, gl.SliceLayout(1, ROWS))[:, None] * M
            + gl.arange(0, M, gl.SliceLayout(0, ROWS))[None, :]
        )
        g = _log2_decay(x + gl.expand_dims(bias[None, :], 1), rate, lower_bound, GATE)
        g = gl.where(gl.expand_dims(t, 2) < left, g, 0.0)
    # 2^-170 is 0 already, and sums stay finite and keep their digits.
    return gl.associative_scan(gl.where(g < -170.0, -170.0, g), 1, _add)


@gluon.jit
def _log2_decay(x, rate, lower_bound, GATE: gl.constexpr):
    """As in KDA's other kernels, but for a logarithm in one instruction."""
    if GATE == "bounded":
        g = (lower_bound * LOG2_E) * _reciprocal(1.0 + gl.exp2(-(rate * LOG2_E) * x))
    else:
        u = gl.exp2(-LOG2_E * gl.abs(x))
        series = u * (1.0 - u * (0.5 - u * (1.0 / 3.0 - u * (0.25 - u * 0.2))))
        log = gl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + u], dtype=gl.float32, is_pure=True, pack=1
        )
        g = -rate * (LOG2_E * gl.maximum(x, 0.0) + gl.where(u < 0.0625, LOG2_E * series, log))
    return g


@gluon.jit
def _part(
    to,
    operands,
    x,
    by_row,
    biases,
    rate,
    lower_bound,
    left,
    part,
    K: gl.constexpr,
    GATE: gl.constexpr,
    C: gl.constexpr,
    M: gl.constexpr,
    BK: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """What BK channels contribute; the result is how far they are from their blocks' starts."""
    N: gl.constexpr = C // M
    dtype: gl.constexpr = to[0].dtype.element_ty
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    CHANNELS: gl.constexpr = gl.SliceLayout(1, TOKENS)
    queries, keys, near, next_to, two_apart, three_apart = operands
    m = gl.arange(0, M, gl.SliceLayout(0, ROWS))[None, :]
    t = gl.arange(0, N, gl.SliceLayout(1, ROWS))[:, None] * M + m
    c = part * BK + gl.arange(0, BK, gl.SliceLayout(0, CHANNELS))[None, :]
    block = gl.arange(0, N, gl.SliceLayout(1, CHANNELS))[:, None]
    at = gl.expand_dims(t * K, 2) + gl.expand_dims(c, 1)

    since = _sums(x, biases.index(part), rate, lower_bound, left, GATE, M, TOKENS)
    through = gl.sum(gl.where(gl.expand_dims(m, 2) == M - 1, since, 0.0), 1)
    sums = gl.allocate_shared_memory(gl.float32, [N, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums.store(through)
    s0 = sums.slice(0, 1).load(CHANNELS)
    s1 = sums.slice(1, 1).load(CHANNELS)
    s2 = sums.slice(2, 1).load(CHANNELS)
    s3 = sums.slice(3, 1).load(CHANNELS)
    before = gl.where(block > 0, s0, 0.0) + gl.where(block > 1, s1, 0.0) + gl.where(block > 2, s2, 0.0)
    behind = gl.where(block < 3, s3, 0.0) + gl.where(block < 2, s2, 0.0) + gl.where(block < 1, s1, 0.0)
    entering = gl.expand_dims(gl.exp2(before), 1)
    leaving = gl.expand_dims(gl.exp2(behind), 1)
    one_more = gl.expand_dims(gl.exp2(gl.where(block < 1, s1, s2)), 1)
    two_more = gl.expand_dims(gl.exp2(s2), 1)
    gl.store(to[3] + c, gl.exp2((s0 + s1) + (s2 + s3)))

    from_block = gl.exp2(since)
    q = _tokens(queries.index(part), M, TOKENS) * gl.expand_dims(by_row.index(0).load(ROWS), 2) * from_block
    queries.index(part).store(gl.reshape(q.to(dtype), [C, BK]))
    gl.store(to[0] + at, (q * entering).to(dtype))
    k = _tokens(keys.index(part), M, TOKENS) * gl.expand_dims(by_row.index(1).load(ROWS), 2)
    from_block *= k
    keys.index(part).store(gl.reshape(from_block.to(dtype), [C, BK]))
    gl.store(to[1] + at, (from_block * entering).to(dtype))
    near.index(part).store(gl.reshape((k * gl.exp2(gl.minimum(-since, FAR))).to(dtype), [C, BK]))
    k *= gl.exp2(gl.expand_dims(through, 1) - since)
    next_to.index(part).store(gl.reshape(k.to(dtype), [C, BK]))
    gl.store(to[2] + at, (k * leaving * gl.expand_dims(by_row.index(2).load(ROWS), 2)).to(dtype))
    k *= one_more
    two_apart.index(part).store(gl.reshape(k.to(dtype), [C, BK]))
    three_apart.index(part).store(gl.reshape((k * two_more).to(dtype), [C, BK]))
    return gl.max(gl.abs(since), 1)


@gluon.jit
def _pairs(rows, others, i, j, M: gl.constexpr, PAIRS: gl.constexpr):
    """Sums over channels for all pairs of tokens [C C], right where i >= j."""
    apart = i // M - j // M
    a = _product_of_parts(rows, others[0], PAIRS)
    b = _product_of_parts(rows, others[1], PAIRS)
    a, b = warpgroup_mma_wait(0, deps=(a, b))
    a = gl.where(apart == 0, a, b)
    b = _product_of_parts(rows, others[2], PAIRS)
    c = _product_of_parts(rows, others[3], PAIRS)
    b, c = warpgroup_mma_wait(0, deps=(b, c))
    return gl.where(apart < 2, a, gl.where(apart == 2, b, c))


@gluon.jit
def _product_of_parts(rows, columns, PAIRS: gl.constexpr):
    PARTS: gl.constexpr = rows.shape[0]
    C: gl.constexpr = rows.shape[1]
    total = gl.zeros([C, C], gl.float32, PAIRS)
    for part in gl.static_range(PARTS):
        right = columns.index(part).permute((1, 0))
        total = warpgroup_mma(rows.index(part), right, total, use_acc=part > 0, is_async=True)
    return total


@gluon.jit
def _far_pairs(
    to,
    inputs,
    by_row,
    biases,
    rate,
    lower_bound,
    left,
    K: gl.constexpr,
    GATE: gl.constexpr,
    C: gl.constexpr,
    M: gl.constexpr,
    BK: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """A block's pairs by the decay between them, [C M], and which tokens are too far for a product."""
    N: gl.constexpr = C // M
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    q_far, k_far, beyond = to
    q_at, q_time, k_at, k_time, g_at, g_time = inputs
    m = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(0, ROWS))[None, :], 2)
    column = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))[None, :]
    of_q = gl.zeros([N, M, M], gl.float32, TOKENS)
    of_k = gl.zeros([N, M, M], gl.float32, TOKENS)
    farthest = gl.zeros([N, M], gl.float32, ROWS)
    for part in range(K // BK):
        x = _load(g_at + part * BK, g_time, left, M, BK, TOKENS)
        since = _sums(x, biases.index(part), rate, lower_bound, left, GATE, M, TOKENS)
        # Once too far, the rest of a block is: a choice by the tokens before, and by no later one.
        farthest = gl.maximum(farthest, gl.max(gl.associative_scan(gl.abs(since), 1, _larger), 2))
        q = _load(q_at + part * BK, q_time, left, M, BK, TOKENS) * gl.expand_dims(
            by_row.index(0).load(ROWS), 2
        )
        k = _load(k_at + part * BK, k_time, left, M, BK, TOKENS) * gl.expand_dims(
            by_row.index(1).load(ROWS), 2
        )
        for step in range(M):
            own = gl.expand_dims(gl.sum(gl.where(m == step, since, 0.0), 1), 1)
            there = gl.expand_dims(gl.sum(gl.where(m == step, k, 0.0), 1), 1)
            there *= gl.exp2(gl.where(m < step, 0.0, since - own))
            here = gl.expand_dims(column == step, 1)
            of_q = gl.where(here, of_q + gl.expand_dims(gl.sum(q * there, 2), 2), of_q)
            of_k = gl.where(here, of_k + gl.expand_dims(gl.sum(k * there, 2), 2), of_k)
    q_far.store(gl.reshape(of_q, [C, M]))
    k_far.store(gl.reshape(of_k, [C, M]))
    beyond.store(gl.reshape(gl.where(farthest > FAR, 1.0, 0.0), [C]))


@gluon.jit
def _load(at, stride, left, M: gl.constexpr, BK: gl.constexpr, TOKENS: gl.constexpr):
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    t = (
        gl.arange(0, 4, gl.SliceLayout(1, ROWS))[:, None] * M
        + gl.arange(0, M, gl.SliceLayout(0, ROWS))[None, :]
    )
    t = gl.expand_dims(t, 2)
    c = gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(0, gl.SliceLayout(1, TOKENS)))[None, :], 1)
    return gl.load(at + t * stride + c, mask=t < left, other=0.0).to(gl.float32)


@gluon.jit
def _chosen(A, far, beyond, i, j, M: gl.constexpr, PAIRS: gl.constexpr):
    """A [C C], in the rows beyond with the pairs of their own block as they are in far [C M]."""
    C: gl.constexpr = A.shape[0]
    wide = gl.reshape(A, [C, C // M, M])
    WIDE: gl.constexpr = wide.type.layout
    own = gl.expand_dims(far.load(gl.SliceLayout(1, WIDE)), 1) + gl.zeros([C, C // M, M], gl.float32, WIDE)
    own = gl.convert_layout(gl.reshape(own, [C, C]), PAIRS)
    chosen = (beyond.load(gl.SliceLayout(1, PAIRS))[:, None] > 0.0) & (i // M == j // M)
    return gl.where(chosen, own, A)


@gluon.jit
def _inverse(L, i, j, C: gl.constexpr, M: gl.constexpr, PAIRS: gl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [C C], by halves.

    That of [[P, 0], [Q, R]] is [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]. With X of the blocks on the diagonal, X L X
    has R^-1 Q P^-1 in their corners.
    """
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    of_l = (
        gl.allocate_shared_memory(gl.bfloat16, [C, C], OPERAND),
        gl.allocate_shared_memory(gl.bfloat16, [C, C], OPERAND),
    )
    of_x = (
        gl.allocate_shared_memory(gl.bfloat16, [C, C], OPERAND),
        gl.allocate_shared_memory(gl.bfloat16, [C, C], OPERAND),
    )
    high, low = _halves(L)
    of_l[0].store(high)
    of_l[1].store(low)
    X = _inverse_of_blocks(L, C, M, PAIRS)
    X -= gl.where((i // M % 2 == 1) & (i // M - 1 == j // M), _around(X, of_l, of_x, PAIRS), 0.0)
    X -= gl.where((i >= C // 2) & (j < C // 2), _around(X, of_l, of_x, PAIRS), 0.0)
    return X


@gluon.jit
def _halves(x):
    """x as the sum of two numbers in half precision, the first by truncation."""
    top = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return top.to(gl.bfloat16), (x - top).to(gl.bfloat16)


@gluon.jit
def _around(X, of_l, of_x, PAIRS: gl.constexpr):
    """X L X, of which shared memory holds L in two halves, and X from now on."""
    high, low = _halves(X)
    of_x[0].store(high)
    of_x[1].store(low)
    fence_async_shared()
    barrier()
    return _product_of_halves(_product_of_halves(X, of_l, PAIRS), of_x, PAIRS)


@gluon.jit
def _product_of_halves(left, right, PAIRS: gl.constexpr):
    high, low = _left_halves(left, PAIRS)
    total = gl.zeros(left.shape, gl.float32, PAIRS)
    total = warpgroup_mma(low, right[0], total, use_acc=False, is_async=True)
    total = warpgroup_mma(high, right[1], total, is_async=True)
    total = warpgroup_mma(high, right[0], total, is_async=True)
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def _left_halves(x, LAYOUT: gl.constexpr):
    """The two as left sides of a product that is laid out so."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    high, low = _halves(x)
    return gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)


@gluon.jit
def _inverse_of_blocks(L, C: gl.constexpr, M: gl.constexpr, PAIRS: gl.constexpr):
    """The inverse of the blocks of M on the diagonal alone, row by row."""
    N: gl.constexpr = C // M
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, M // 2, 1], [1, 2, M], [4, 1, 1], [2, 1, 0])
    wide = gl.reshape(L, [C, N, M])
    WIDE: gl.constexpr = wide.type.layout
    row = gl.arange(0, C, gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))[:, None]
    column = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, WIDE)))[None, :]
    own = gl.expand_dims(row // M == column, 2)
    blocks = gl.allocate_shared_memory(gl.float32, [N, M, M], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    blocks.store(gl.reshape(gl.sum(gl.where(own, wide, 0.0), 1), [N, M, M]))
    X = gl.zeros([N, M, M], gl.float32, COLUMNS)
    r = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :], 2)
    f = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, :]
    for m in gl.static_range(M):
        # The rows of X before row m are known, the others zero.
        l_m = blocks.slice(m, 1, dim=1).permute((0, 2, 1)).load(COLUMNS)
        x_m = gl.where(f == m, 1.0, 0.0) - gl.sum(X * l_m, 1)
        X = gl.where(r == m, gl.expand_dims(x_m, 1), X)
    flat = gl.convert_layout(gl.reshape(X, [C, M]), gl.SliceLayout(1, WIDE))
    return gl.convert_layout(gl.reshape(gl.where(own, gl.expand_dims(flat, 1), 0.0), [C, C]), PAIRS)


@gluon.jit(do_not_specialize=["B", "T", "count", "HV", "G"])
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
    K: gl.constexpr,
    V: gl.constexpr,
    PACKED: gl.constexpr,
    GATE: gl.constexpr,
    HAS_RATE: gl.constexpr,
    PRECISION: gl.constexpr,
    C: gl.constexpr,
    M: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
):
    """As in `kernels.py`, but dA and dP are made here: their pointers are None.

    Blocks are visited in order. What a block's rows were given by those before is multiplied by each decay on
    the way to them, so that all blocks but a row's own are one operand.
    """
    dtype: gl.constexpr = e_ptr.dtype.element_ty
    N: gl.constexpr = C // M
    PARTS: gl.constexpr = K // BK
    TOKENS: gl.constexpr = gl.BlockedLayout([1, M, BK // 32], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    CHANNELS: gl.constexpr = gl.SliceLayout(1, TOKENS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PART: gl.constexpr = gl.NVMMASharedLayout(2 * BK, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    task = gl.program_id(0)
    part = task % PARTS
    hv = (task // PARTS) % HV
    piece = (task // (PARTS * HV)) % count
    b = gl.cast(task // (PARTS * HV * count), gl.int64)
    _n, first, start, length = piece_at(table_ptr, piece, C, T, PACKED)
    h = hv // G
    token = start + first
    left = length - first
    at = part * BK
    place = (b * T + token) * HV + hv
    own = (b * HV + hv) * count + piece
    q_at = q_ptr + b * q_batch + token * q_time + h * q_head + at
    k_at = k_ptr + b * k_batch + token * k_time + h * k_head + at
    g_at = g_ptr + b * g_batch + token * g_time + hv * g_head + at

    queries = gl.allocate_shared_memory(dtype, [C, BK], PART)
    keys = gl.allocate_shared_memory(dtype, [C, BK], PART)
    far_keys = gl.allocate_shared_memory(dtype, [C, BK], PART)
    near_keys = gl.allocate_shared_memory(dtype, [C, BK], PART)
    _copy(queries, q_at, q_time, left, C, BK)
    _copy(keys, k_at, k_time, left, C, BK)
    if g_ptr.dtype.element_ty == dtype:
        _copy(near_keys, g_at, g_time, left, C, BK)
    async_copy.commit_group()
    d_o = gl.allocate_shared_memory(dtype, [C, V], OPERAND)
    d_v = gl.allocate_shared_memory(dtype, [C, V], OPERAND)
    e = gl.allocate_shared_memory(dtype, [C, V], OPERAND)
    S = gl.allocate_shared_memory(dtype, [BK, V], OPERAND)
    dS = gl.allocate_shared_memory(dtype, [BK, V], OPERAND)
    _copy(d_o, d_o_ptr + b * d_o_batch + token * d_o_time + hv * d_o_head, d_o_time, left, C, V)
    _copy(d_v, d_v_ptr + place * V, HV * V, left, C, V)
    _copy(e, e_ptr + own * C * V, V, C, C, V)
    _copy(S, states_ptr + (own * K + at) * V, V, BK, BK, V)
    _copy(dS, d_states_ptr + (own * K + at) * V, V, BK, BK, V)
    async_copy.commit_group()

    m = gl.arange(0, M, gl.SliceLayout(0, ROWS))[None, :]
    t = gl.arange(0, N, gl.SliceLayout(1, ROWS))[:, None] * M + m
    block = gl.arange(0, N, gl.SliceLayout(1, CHANNELS))[:, None]
    biases = gl.allocate_shared_memory(gl.float32, [BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rate = 1.0
    if GATE != "none":
        rate = _rate(A_log_ptr + hv, HAS_RATE)
        c = gl.arange(0, BK, gl.BlockedLayout([1], [32], [4], [0]))
        biases.store(gl.load(dt_bias_ptr + hv * K + at + c).to(gl.float32))
    rows_at = rows_ptr + own * 3 * C + t
    q_scale = gl.expand_dims(gl.load(rows_at), 2)
    k_scale = gl.expand_dims(gl.load(rows_at + C), 2)
    beta = gl.expand_dims(gl.load(rows_at + 2 * C), 2)
    async_copy.wait_group(1)
    barrier()
    if g_ptr.dtype.element_ty == dtype:
        x = _tokens(near_keys, M, TOKENS)
    else:
        x = _load(g_at, g_time, left, M, BK, TOKENS)
    since = _sums(x, biases, rate, lower_bound, left, GATE, M, TOKENS)
    through = gl.sum(gl.where(gl.expand_dims(m, 2) == M - 1, since, 0.0), 1)
    sums = gl.allocate_shared_memory(gl.float32, [N, BK], PLAIN)
    decays = gl.allocate_shared_memory(gl.float32, [N, BK], PLAIN)
    sums.store(through)
    decays.store(gl.exp2(through))
    reach = gl.max(gl.abs(since), 1)
    # 110: the reciprocal of a decay times a key is still far from overflow.
    distant = gl.max(gl.max(reach, 1), 0) > 110.0
    nearest = gl.where(distant, -1000.0, 110.0)
    from_block = gl.exp2(since)
    q = _tokens(queries, M, TOKENS) * q_scale
    queries.store(gl.reshape((q * from_block).to(dtype), [C, BK]))
    k = _tokens(keys, M, TOKENS) * k_scale
    keys.store(gl.reshape((k * from_block).to(dtype), [C, BK]))
    k *= beta
    far_keys.store(gl.reshape((k * gl.exp2(gl.expand_dims(through, 1) - since)).to(dtype), [C, BK]))
    near_keys.store(gl.reshape((k * gl.exp2(gl.minimum(-since, nearest))).to(dtype), [C, BK]))
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()

    zero = gl.zeros([C, BK], gl.float32, SUMS)
    dp = warpgroup_mma(e, dS.permute((1, 0)), zero, use_acc=False, is_async=True)
    dq = warpgroup_mma(d_o, S.permute((1, 0)), zero, use_acc=False, is_async=True)
    dk = warpgroup_mma(d_v, S.permute((1, 0)), zero, use_acc=False, is_async=True)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    held = gl.allocate_shared_memory(gl.float32, [BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    held.store(gl.sum(S.load(LINES).to(gl.float32) * dS.load(LINES).to(gl.float32), 1))
    dp, dq, dk = warpgroup_mma_wait(0, deps=(dp, dq, dk))
    dk = -dk
    THROUGH: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    of_ends = gl.allocate_shared_memory(gl.float32, [C, BK], THROUGH)
    barrier()
    of_ends.store(dp)

    i = gl.arange(0, C, gl.SliceLayout(1, SUMS))[:, None]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    own_q = gl.allocate_shared_memory(gl.float32, [M, N, M], FLAT)
    own_k = gl.allocate_shared_memory(gl.float32, [M, N, M], FLAT)
    d_self = gl.allocate_shared_memory(gl.float32, [N, M], PLAIN)
    BLOCK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    r = gl.arange(0, C, gl.SliceLayout(1, BLOCK))[:, None]
    s = gl.arange(0, M, gl.SliceLayout(0, BLOCK))[None, :]
    own_dA = gl.zeros([C, M], gl.float32, BLOCK)
    own_dP = gl.zeros([C, M], gl.float32, BLOCK)
    for n in gl.static_range(N):
        # Columns of dA and dP, of block n.
        dA, dP = _columns(d_o, d_v, e.slice(n * M, M), BLOCK, False)
        own_dA = gl.where(r // M == n, dA, own_dA)
        own_dP = gl.where(r // M == n, dP, own_dP)
        decay = gl.where(i // M > n, decays.slice(n, 1).load(SUMS), 1.0)
        dq *= decay
        dk *= decay
        later = r // M > n
        same = (r // M == n) & (r % M > s)
        dq = _added(dq, gl.where(later, dA, 0.0), far_keys.slice(n * M, M), SUMS)
        dk = _added(dk, gl.where(later, dP, 0.0), far_keys.slice(n * M, M), SUMS)
        dq = _added(dq, gl.where(same, dA, 0.0), near_keys.slice(n * M, M), SUMS)
        dk = _added(dk, gl.where(same, dP, 0.0), near_keys.slice(n * M, M), SUMS)
        dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    d_self.store(gl.reshape(gl.sum(gl.where(r % M == s, own_dA, 0.0), 1), [N, M]))
    if distant:
        own_q.store(gl.reshape(gl.permute(gl.where(r % M > s, own_dA, 0.0), (1, 0)), [M, N, M]))
        own_k.store(gl.reshape(gl.permute(gl.where(r % M > s, own_dP, 0.0), (1, 0)), [M, N, M]))
    barrier()
    of_q = gl.allocate_shared_memory(gl.float32, [C, BK], THROUGH)
    of_k = gl.allocate_shared_memory(gl.float32, [C, BK], THROUGH)
    of_q.store(dq)
    of_k.store(dk)
    barrier()
    # A pair that comes and goes must cancel in dg: both times its products are of the same roundings.
    dq = _tokens(of_q, M, TOKENS)
    dk = _tokens(of_k, M, TOKENS)
    dg = _tokens(queries, M, TOKENS) * dq + _tokens(keys, M, TOKENS) * dk
    from_block = gl.exp2(since)
    dq *= from_block
    dk *= from_block

    dp = zero
    own_p = zero
    for n in gl.static_range(N - 1, -1, -1):
        # Rows of dA and dP of block n, transposed.
        dA, dP = _columns(d_o.slice(n * M, M), d_v.slice(n * M, M), e, BLOCK, True)
        dp *= gl.where(i // M < n, decays.slice(n, 1).load(SUMS), 1.0)
        earlier = r // M < n
        same = (r // M == n) & (r % M < s)
        dp = _added(dp, gl.where(earlier, dA, 0.0), queries.slice(n * M, M), SUMS)
        own_p = _added(own_p, gl.where(same, dA, 0.0), queries.slice(n * M, M), SUMS)
        dp = _added(dp, gl.where(earlier, dP, 0.0), keys.slice(n * M, M), SUMS)
        own_p = _added(own_p, gl.where(same, dP, 0.0), keys.slice(n * M, M), SUMS)
        dp, own_p = warpgroup_mma_wait(0, deps=(dp, own_p))
    barrier()
    of_far = gl.allocate_shared_memory(gl.float32, [C, BK], THROUGH)
    of_near = gl.allocate_shared_memory(gl.float32, [C, BK], THROUGH)
    of_far.store(dp)
    of_near.store(own_p)
    barrier()

    dp = _tokens(of_far, M, TOKENS)
    dg -= _tokens(far_keys, M, TOKENS) * dp
    far = gl.exp2(gl.expand_dims(through, 1) - since)
    dp *= far
    near = _tokens(of_near, M, TOKENS)
    dg -= _tokens(near_keys, M, TOKENS) * near
    dp += near * gl.exp2(gl.minimum(-since, nearest))
    if distant:
        dq, dk, dp, dg = _far_gradients(
            (dq, dk, dp, dg),
            (
                own_q._reinterpret(gl.float32, [M, N, M], PLAIN),
                own_k._reinterpret(gl.float32, [M, N, M], PLAIN),
            ),
            (q_at, q_time, k_at, k_time),
            (q_scale, k_scale, beta),
            since,
            left,
            M,
            BK,
            TOKENS,
        )
    s0 = sums.slice(0, 1).load(CHANNELS)
    s1 = sums.slice(1, 1).load(CHANNELS)
    s2 = sums.slice(2, 1).load(CHANNELS)
    s3 = sums.slice(3, 1).load(CHANNELS)
    behind = gl.where(block < 3, s3, 0.0) + gl.where(block < 2, s2, 0.0) + gl.where(block < 1, s1, 0.0)
    passed = gl.exp2((s0 + s1) + (s2 + s3))
    of_end = _tokens(of_ends, M, TOKENS) * far * gl.expand_dims(gl.exp2(behind), 1)
    dp += of_end
    k = _load(k_at, k_time, left, M, BK, TOKENS) * k_scale
    # A gate lets through what the chunk hands on of its first state, and of all that was written before.
    written = of_end * k * beta
    totals = gl.allocate_shared_memory(gl.float32, [2, N, BK], PLAIN)
    totals.index(0).store(gl.sum(dg, 1))
    totals.index(1).store(gl.sum(written, 1))
    barrier()
    # A token's own is taken out again: what that rounds is far below half precision.
    written = gl.associative_scan(written, 1, _add) - written
    dg = gl.associative_scan(dg, 1, _add, reverse=True) + written
    around = passed * held.load(gl.SliceLayout(0, CHANNELS))[None, :]
    for n in gl.static_range(N):
        around += gl.where(block < n, totals.index(0).slice(n, 1).load(CHANNELS), 0.0)
        around += gl.where(block > n, totals.index(1).slice(n, 1).load(CHANNELS), 0.0)
    dg += gl.expand_dims(around, 1)

    # A token's own pair has no gate in it: kept out of dg, where it would be a large part that cancels.
    selves = gl.expand_dims(d_self.load(ROWS), 2)
    q = _load(q_at, q_time, left, M, BK, TOKENS) * q_scale
    dq += selves * k * beta
    dp += selves * q
    d_beta = gl.sum(k * dp, 2)
    dk += dp * beta
    c = at + gl.arange(0, BK, gl.SliceLayout(0, CHANNELS))[None, :]
    to = place * K + gl.expand_dims(t * (HV * K), 2) + gl.expand_dims(c, 1)
    exists = gl.expand_dims(t, 2) < left
    gl.store(d_q_ptr + to, (scale * dq).to(d_q_ptr.dtype.element_ty), mask=exists)
    gl.store(d_k_ptr + to, dk.to(d_k_ptr.dtype.element_ty), mask=exists)
    if GATE != "none":
        bias = biases.load(gl.SliceLayout(0, CHANNELS))
        x = _load(g_at, g_time, left, M, BK, TOKENS) + gl.expand_dims(bias[None, :], 1)
        g = gl.maximum(_log2_decay(x, rate, lower_bound, GATE), -170.0)
        dg = gl.where(exists, dg, 0.0)
        if GATE == "bounded":
            dx = dg * (LN_2 * g) * (1.0 - LN_2 * g / lower_bound) * rate
            dA_log = dx * x
        else:
            dx = -rate * dg / (1.0 + gl.exp(-x))
            dA_log = dg * (LN_2 * g)
        barrier()
        totals.index(0).store(gl.sum(dx, 1))
        totals.index(1).store(gl.sum(dA_log, 1))
        barrier()
        _store_totals(d_dt_bias_ptr + own * K + at, totals.index(0), BK)
        _store_totals(d_A_log_ptr + own * K + at, totals.index(1), BK)
        dg = dx
        beta = gl.load(rows_at + 2 * C)
        d_beta *= beta * (1.0 - beta / most_beta)
    gl.store(d_g_ptr + to, dg.to(d_g_ptr.dtype.element_ty), mask=exists)
    gl.store(d_betas_ptr + (place + t * HV) * PARTS + part, d_beta, mask=t < left)


@gluon.jit
def _columns(d_o, d_v, e, BLOCK: gl.constexpr, BACK: gl.constexpr):
    """Some columns of dA and dP, or with BACK of their transposes."""
    C: gl.constexpr = e.shape[0] if BACK else d_o.shape[0]
    M: gl.constexpr = d_o.shape[0] if BACK else e.shape[0]
    zero = gl.zeros([C, M], gl.float32, BLOCK)
    if BACK:
        dA = warpgroup_mma(e, d_o.permute((1, 0)), zero, use_acc=False, is_async=True)
        dP = warpgroup_mma(e, d_v.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        dA = warpgroup_mma(d_o, e.permute((1, 0)), zero, use_acc=False, is_async=True)
        dP = warpgroup_mma(d_v, e.permute((1, 0)), zero, use_acc=False, is_async=True)
    dA, dP = warpgroup_mma_wait(0, deps=(dA, dP))
    return dA, -dP


@gluon.jit
def _added(total, left, right, SUMS: gl.constexpr):
    """total + left right, on its way."""
    operand = gl.convert_layout(left.to(right.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return warpgroup_mma(operand, right, total, is_async=True)


@gluon.jit
def _store_totals(at, totals, BK: gl.constexpr):
    N: gl.constexpr = totals.shape[0]
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([N, 1], [1, 32], [1, 4], [1, 0])
    total = gl.convert_layout(gl.sum(totals.load(WIDE), 0), LINE)
    gl.store(at + gl.arange(0, BK, LINE), total)


@gluon.jit
def _far_gradients(
    gradients,
    own,
    inputs,
    scales,
    since,
    left,
    M: gl.constexpr,
    BK: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """With the pairs of each block by the decay between them."""
    ROWS: gl.constexpr = gl.SliceLayout(2, TOKENS)
    dq, dk, dp, dg = gradients
    q_at, q_time, k_at, k_time = inputs
    q_scale, k_scale, beta = scales
    m = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(0, ROWS))[None, :], 2)
    q = _load(q_at, q_time, left, M, BK, TOKENS) * q_scale
    k = _load(k_at, k_time, left, M, BK, TOKENS) * k_scale
    for step in range(M):
        there = gl.expand_dims(gl.sum(gl.where(m == step, k * beta, 0.0), 1), 1)
        start = gl.expand_dims(gl.sum(gl.where(m == step, since, 0.0), 1), 1)
        dA = gl.expand_dims(own[0].index(step).load(ROWS), 2)
        dP = gl.expand_dims(own[1].index(step).load(ROWS), 2)
        # Rows before step have no such pair.
        decay = gl.exp2(gl.minimum(since - start, 0.0))
        dq += dA * there * decay
        dk += dP * there * decay
        pairs = (dA * q + dP * k) * decay
        of_p = gl.expand_dims(gl.sum(pairs, 1), 1)
        dp += gl.where(m == step, of_p, 0.0)
        dg += pairs * there - gl.where(m == step, there * of_p, 0.0)
    return dq, dk, dp, dg


@gluon.jit(do_not_specialize=["B", "T", "N", "count", "chunks", "HV"])
def chunk_scan(
    initial_state_ptr,
    rows,
    squares,
    decay_ptr,
    v_ptr,
    final_state_ptr,
    o_ptr,
    states_ptr,
    e_ptr,
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
    K: gl.constexpr,
    V: gl.constexpr,
    PACKED: gl.constexpr,
    KEEP: gl.constexpr,
    PRECISION: gl.constexpr,
    C: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
):
    """o and the final state; or with KEEP every chunk's first state and its e, for the gradients."""
    dtype: gl.constexpr = rows.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C, 16])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    columns = V // BV
    task = gl.program_id(0)
    x = (task % columns) * BV
    hv = (task // columns) % HV
    b = gl.cast(task // (columns * HV * count), gl.int64)
    n, chunk, start, length = piece_at(table_ptr, (task // (columns * HV)) % count, 0, T, PACKED)
    own = (b * HV + hv) * chunks + chunk
    steps = (length + C - 1) // C
    buffers, ready = _buffers(dtype, C, K, BV)
    sources = rows, squares, v_ptr + b * v_batch + start * v_time + hv * v_head + x, decay_ptr
    _fetch(buffers, ready, sources, own, 0, 0, steps, length, v_time, not KEEP, C, K, BV)
    queries, keys, writes, pairs, solved, values, decays = buffers
    out = gl.allocate_shared_memory(dtype, [C, BV], OPERAND)

    state_at = ((b * N + n) * HV + hv) * K * V + x
    S = gl.load(initial_state_ptr + state_at + _transposed(K, V, BV, STATE)).to(gl.float32)
    zero = gl.zeros([BV, C], gl.float32, VALUES)
    o = zero
    if KEEP:
        kept = gl.allocate_shared_memory(dtype, [K, BV], OPERAND)
    else:
        o_at = o_ptr + ((b * T + start) * HV + hv) * V + x
    for step in range(0, steps):
        slot = step % 2
        _arrive(ready, step)
        narrow = S.to(dtype)
        if KEEP:
            kept.permute((1, 0)).store(narrow)
        narrow = gl.convert_layout(narrow, gl.DotOperandLayout(0, VALUES, 2))
        read = warpgroup_mma(narrow, keys.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        if KEEP:
            barrier()
            _store_lines(kept, states_ptr + (own + step) * (K * V) + x, V, K)
        else:
            # The last chunk's o is stored while this one's is on its way.
            o_next = warpgroup_mma(
                narrow, queries.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            _store_values(
                o,
                out,
                o_at + gl.cast((step - 1) * C, gl.int64) * (HV * V),
                HV * V,
                length - (step - 1) * C,
                step > 0,
            )
        _fetch(buffers, ready, sources, own, step + 1, 1 - slot, steps, length, v_time, not KEEP, C, K, BV)
        v = values.index(slot).permute((1, 0)).load(VALUES).to(gl.float32)
        read = warpgroup_mma_wait(0 if KEEP else 1, deps=(read,))
        # What the memory lacks and what fills it keep more digits than the inputs: they add up in S.
        high, low = _left_halves(v - read, VALUES)
        e = warpgroup_mma(low, solved.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        e = warpgroup_mma(high, solved.index(slot).permute((1, 0)), e, is_async=True)
        decay = decays.index(slot).load(gl.SliceLayout(0, STATE))[None, :]
        if KEEP:
            e = warpgroup_mma_wait(0, deps=(e,))
        else:
            e, o_next = warpgroup_mma_wait(0, deps=(e, o_next))
        # Not while products are on their way: all of them would be waited for.
        S = S * decay
        high, low = _left_halves(e, STATE)
        S = warpgroup_mma(low, writes.index(slot), S, is_async=True)
        S = warpgroup_mma(high, writes.index(slot), S, is_async=True)
        if KEEP:
            _store_values(e, out, e_ptr + (own + step) * (C * V) + x, V, C, True)
            S = warpgroup_mma_wait(0, deps=(S,))
        else:
            high, low = _left_halves(e, VALUES)
            o = warpgroup_mma(low, pairs.index(slot).permute((1, 0)), o_next, is_async=True)
            o = warpgroup_mma(high, pairs.index(slot).permute((1, 0)), o, is_async=True)
            S, o = warpgroup_mma_wait(0, deps=(S, o))
    if not KEEP:
        _store_values(
            o,
            out,
            o_at + gl.cast((steps - 1) * C, gl.int64) * (HV * V),
            HV * V,
            length - (steps - 1) * C,
            True,
        )
        at = final_state_ptr + state_at + _transposed(K, V, BV, STATE)
        gl.store(at, S.to(final_state_ptr.dtype.element_ty))


@gluon.jit(do_not_specialize=["B", "T", "N", "count", "chunks", "HV"])
def chunk_scan_back(
    d_final_state_ptr,
    rows,
    squares,
    decay_ptr,
    d_o_ptr,
    d_initial_state_ptr,
    d_states_ptr,
    d_v_ptr,
    table_ptr,
    B,
    T,
    N,
    count,
    chunks,
    HV,
    d_o_batch,
    d_o_time,
    d_o_head,
    K: gl.constexpr,
    V: gl.constexpr,
    PACKED: gl.constexpr,
    PRECISION: gl.constexpr,
    C: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
):
    """The same in reverse, linear in the cotangents: those of every chunk's last state, and dv."""
    dtype: gl.constexpr = rows.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C, 16])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    columns = V // BV
    task = gl.program_id(0)
    x = (task % columns) * BV
    hv = (task // columns) % HV
    b = gl.cast(task // (columns * HV * count), gl.int64)
    n, chunk, start, length = piece_at(table_ptr, (task // (columns * HV)) % count, 0, T, PACKED)
    own = (b * HV + hv) * chunks + chunk
    steps = (length + C - 1) // C
    buffers, ready = _buffers(dtype, C, K, BV)
    sources = rows, squares, d_o_ptr + b * d_o_batch + start * d_o_time + hv * d_o_head + x, decay_ptr
    _fetch(buffers, ready, sources, own, steps - 1, 0, steps, length, d_o_time, True, C, K, BV)
    queries, keys, writes, pairs, solved, d_outputs, decays = buffers
    out = gl.allocate_shared_memory(dtype, [C, BV], OPERAND)
    kept = gl.allocate_shared_memory(dtype, [K, BV], OPERAND)
    d_v_at = d_v_ptr + ((b * T + start) * HV + hv) * V + x

    state_at = ((b * N + n) * HV + hv) * K * V + x
    dS = gl.load(d_final_state_ptr + state_at + _transposed(K, V, BV, STATE)).to(gl.float32)
    zero = gl.zeros([BV, C], gl.float32, VALUES)
    for back in range(0, steps):
        step = steps - 1 - back
        slot = back % 2
        _arrive(ready, back)
        narrow = dS.to(dtype)
        kept.permute((1, 0)).store(narrow)
        narrow = gl.convert_layout(narrow, gl.DotOperandLayout(0, VALUES, 2))
        d_o = d_outputs.index(slot).permute((1, 0))
        d_e = warpgroup_mma(d_o, pairs.index(slot), zero, use_acc=False, is_async=True)
        d_e = warpgroup_mma(narrow, writes.index(slot).permute((1, 0)), d_e, is_async=True)
        barrier()
        _store_lines(kept, d_states_ptr + (own + step) * (K * V) + x, V, K)
        _fetch(buffers, ready, sources, own, step - 1, 1 - slot, steps, length, d_o_time, True, C, K, BV)
        d_e = warpgroup_mma_wait(0, deps=(d_e,))
        high, low = _left_halves(d_e, VALUES)
        d_v = warpgroup_mma(low, solved.index(slot), zero, use_acc=False, is_async=True)
        d_v = warpgroup_mma(high, solved.index(slot), d_v, is_async=True)
        decay = decays.index(slot).load(gl.SliceLayout(0, STATE))[None, :]
        d_v = warpgroup_mma_wait(0, deps=(d_v,))
        dS = dS * decay
        high, low = _left_halves(-d_v, STATE)
        dS = warpgroup_mma(d_o, queries.index(slot), dS, is_async=True)
        dS = warpgroup_mma(low, keys.index(slot), dS, is_async=True)
        dS = warpgroup_mma(high, keys.index(slot), dS, is_async=True)
        at = d_v_at + gl.cast(step * C, gl.int64) * (HV * V)
        _store_values(d_v, out, at, HV * V, length - step * C, True)
        dS = warpgroup_mma_wait(0, deps=(dS,))
    at = d_initial_state_ptr + state_at + _transposed(K, V, BV, STATE)
    gl.store(at, dS.to(d_initial_state_ptr.dtype.element_ty))


@gluon.jit
def _transposed(K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STATE: gl.constexpr):
    """Where the elements of a state [K V] are that are [BV K] in registers."""
    return (
        gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :] * V
        + gl.arange(0, BV, gl.SliceLayout(1, STATE))[:, None]
    )


@gluon.jit
def _buffers(dtype: gl.constexpr, C: gl.constexpr, K: gl.constexpr, BV: gl.constexpr):
    """Two sets of what a chunk needs: one is read while the other is filled."""
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [2, C, K], OPERAND)
    keys = gl.allocate_shared_memory(dtype, [2, C, K], OPERAND)
    writes = gl.allocate_shared_memory(dtype, [2, C, K], OPERAND)
    pairs = gl.allocate_shared_memory(dtype, [2, C, C], OPERAND)
    solved = gl.allocate_shared_memory(dtype, [2, C, C], OPERAND)
    values = gl.allocate_shared_memory(dtype, [2, C, BV], OPERAND)
    decays = gl.allocate_shared_memory(gl.float32, [2, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    return (queries, keys, writes, pairs, solved, values, decays), ready


@gluon.jit
def _fetch(
    buffers,
    ready,
    sources,
    own,
    step,
    slot,
    steps,
    length,
    stride,
    ALL: gl.constexpr,
    C: gl.constexpr,
    K: gl.constexpr,
    BV: gl.constexpr,
):
    """Begins to load a chunk, if there is one; its queries and their pairs with ALL.

    Without a branch, around which products would not be asynchronous.
    """
    queries, keys, writes, pairs, solved, values, decays = buffers
    rows, squares, values_ptr, decay_ptr = sources
    exists = (step >= 0) & (step < steps)
    own += step
    row = gl.cast(own * C, gl.int32)
    all_rows = rows.shape[0] // 3
    bar = ready.index(slot)
    PARTS: gl.constexpr = 3 if ALL else 2
    mbarrier.expect(
        bar, PARTS * rows.block_type.nbytes + (PARTS - 1) * squares.block_type.nbytes, pred=exists
    )
    if ALL:
        tma.async_copy_global_to_shared(rows, [row, 0], bar, queries.index(slot), pred=exists)
        tma.async_copy_global_to_shared(squares, [row, 0], bar, pairs.index(slot), pred=exists)
    tma.async_copy_global_to_shared(rows, [all_rows + row, 0], bar, keys.index(slot), pred=exists)
    tma.async_copy_global_to_shared(rows, [2 * all_rows + row, 0], bar, writes.index(slot), pred=exists)
    tma.async_copy_global_to_shared(squares, [all_rows + row, 0], bar, solved.index(slot), pred=exists)
    # Addresses of a long sequence pass 2^31: those of a chunk's first token are of 64 bits.
    at = values_ptr + gl.cast(step * C, gl.int64) * stride
    _copy(values.index(slot), at, stride, gl.where(exists, length - step * C, 0), C, BV)
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    c = gl.arange(0, K, LINE)
    async_copy.async_copy_global_to_shared(
        decays.index(slot), decay_ptr + own * K + c, mask=c < gl.where(exists, K, 0)
    )
    async_copy.commit_group()


@gluon.jit
def _arrive(ready, step):
    """Waits for the chunk of the given step."""
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.wait(ready.index(step % 2), step // 2 % 2)
    barrier()


@gluon.jit
def _store_values(x, through, at, stride, rows, exists):
    """x [BV C] as [C BV] of which `rows` exist, by way of shared memory."""
    through.permute((1, 0)).store(x.to(through.dtype))
    barrier()
    _store_lines(through, at, stride, gl.where(exists, rows, 0))


@gluon.jit
def _store_lines(x, at, stride, rows):
    R: gl.constexpr = x.shape[0]
    F: gl.constexpr = x.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // F, F // 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, R, gl.SliceLayout(1, LINES))[:, None]
    f = gl.arange(0, F, gl.SliceLayout(0, LINES))[None, :]
    gl.store(at + r * stride + f, x.load(LINES), mask=r < rows)


# What the launches of KDA take of these kernels


def described(terms: tuple[Tensor, ...]) -> tuple[TensorDescriptor, TensorDescriptor, Tensor]:
    """Terms that lie one after another in memory, as the scans take them."""
    q_in, _k_in, _k_out, A, _Y, decay = terms
    return _stacked(q_in, 3), _stacked(A, 2), decay


def _stacked(x: Tensor, count: int) -> TensorDescriptor:
    """`count` tensors of x's shape from x on, as rows, by chunks."""
    C, F = x.shape[-2:]
    rows = torch.as_strided(x, (count * x.numel() // F, F), (F, 1))
    return TensorDescriptor.from_tensor(rows, [C, F], DESCRIBED)
