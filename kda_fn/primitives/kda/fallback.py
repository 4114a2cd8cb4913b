"""The chunked form of KDA in pure torch: fast, exact at any decay, usable under every transform.

Inside a chunk let D(j -> i) be the decay from token j to token i, per channel: the product of exp(g_t) over
j < t <= i. With the chunk's inputs stacked as rows,

    P_ij = Σ_c k_ic k_jc D_c(j -> i)     for j < i, else 0
    A_ij = Σ_c q_ic k_jc D_c(j -> i)     for j <= i, else 0
    e    = (I + P diag(beta))^-1 (v - (k · D(start -> .)) S)          d = beta e
    o    = scale ((q · D(start -> .)) S + A d)
    S'   = diag(D(start -> end)) S + (k · D(. -> end))^T d

which is the recurrence solved at once for all errors e of the chunk: v less what the memory recalls.

Two choices make it safe without a promise on g. Decays are products of exp(g), never exponentials of sums,
differences or quotients of them: nothing overflows unless the recurrence does, exp(-inf) is a plain zero,
and a token after a very strong decay loses no digits to it. And a chunk is halved again and again: every pair
(j, i) is split by exactly one boundary, D(j -> i) = D(j -> boundary) D(boundary -> i) is a product of two
factors that each depend on one side alone, and so each level is one matrix product.

The first derivative is in `gradients.py`; those of higher order and forward mode are torch's, of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kda_fn import ragged
from kda_fn.primitives._kernel import fused, nothing_is_recorded, with_gradients
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["kda", "kda_step"]

Tokens = tuple[Tensor, ...]
"""Of all tokens, [*B L heads channels]."""

WORKING_SET = 2**19
"""Bytes of one tensor of the chunks that are worked on together: what stays in a processor's cache."""


def kda_step(
    state: Float[Tensor, "*B HV K V"],
    q_t: Float[Tensor, "*B H K"],
    k_t: Float[Tensor, "*B H K"],
    v_t: Float[Tensor, "*B HV V"],
    g_t: Float[Tensor, "*B HV K"],
    beta_t: Float[Tensor, "*B HV"],
    *,
    scale: float | None = None,
) -> tuple[Float[Tensor, "*B HV K V"], Float[Tensor, "*B HV V"]]:
    # The chunked form at C = 1: it passes over the state twice, once to read and once to write.
    H, K, V = *q_t.shape[-2:], v_t.shape[-1]
    dtype = state.dtype
    q, k = (align(x).to(dtype).unsqueeze(-2) for x in (q_t, k_t))  # *B H 1 K
    v, g = (align(x).to(dtype).unflatten(-2, (H, -1)) for x in (v_t, g_t))  # *B H G ..
    beta = beta_t.to(dtype).unflatten(-1, (H, -1)).unsqueeze(-1)
    S = align(state, 2).unflatten(-3, (H, -1))
    decay = g.exp()
    recalled, seen = matmul(torch.stack([k * decay, q * decay], -2), S).unbind(-2)
    d = beta * (v - recalled)
    o = (K**-0.5 if scale is None else scale) * (seen + (q * k).sum(-1, keepdim=True) * d)
    written = k.unsqueeze(-1) * d.unsqueeze(-2)
    # Fresh memory for a large state takes longer than the arithmetic: one piece of it where torch allows.
    add = Tensor.addcmul_ if nothing_is_recorded((written, S)) else torch.addcmul
    S = add(written, decay.unsqueeze(-1), S)
    return cut(S.flatten(-4, -3), K, V), cut(o.flatten(-3, -2).to(v_t.dtype), V)


def chunked_kda(
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    *,
    scale: float | None,
    lower_bound: float | None = None,
    chunk_size: int,
    cu_seqlens: CuSeqlens | None,
    record: bool = False,
    compiled: bool = False,
) -> tuple[
    Float[Tensor, "*S HV K V"],
    Float[Tensor, "*B T HV V"],
    Float[Tensor, "*B n HV Ka Va"],
    Float[Tensor, "*B L HV Va"],
]:
    """`kda`, the states before all n chunks in the order of the visit, and the errors e of all L = T tokens.

    Their K and V are multiples of 16; unless `record`, n = L = 0. `compiled` has Inductor fuse what is done
    to each portion of chunks.
    """
    (T, H, K), V = q.shape[-3:], v.shape[-1]
    scale = float(K**-0.5) if scale is None else scale
    B, starts = q.shape[:-3], []

    def run(group: Group, S: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        S = in_rows(S, H)
        finished, outputs, errors = [], [], []
        for counts, portion, usual in portions(group, S, tokens, alike=compiled):
            chunks = (to_chunks(x, group.C, H, S.dtype) for x in portion)
            S, ended, o, before, e = fused(advance, usual)(
                S, *chunks, counts=counts, scale=scale, record=record
            )
            finished += ended
            outputs += (from_chunks(x.to(v.dtype), B, H) for x in o)
            errors += (from_chunks(x, B, H) for x in e)
            starts.extend(before)
        of_tokens = (outputs, errors) if record else (outputs,)
        S = from_rows(torch.cat([S, *reversed(finished)]), B, H)
        return S, tuple(join(x, tokens[0].shape[-3]) for x in of_tokens)

    if T == 0:
        return initial_state.clone(), v.clone(), *_recorded(initial_state, q, chunk_size, cu_seqlens)
    tokens = align(q), align(k), align(v), align(g), beta.unsqueeze(-1)
    S, results = in_groups(run, align(initial_state, 2), tokens, chunk_size, cu_seqlens)
    S, o = cut(S, K, V), cut(results[0], V)
    if not record:
        return S, o, *_recorded(initial_state, q, chunk_size, cu_seqlens)
    return S, o, from_rows(torch.cat(starts), B, H).movedim(0, -4).contiguous(), results[1]


def _recorded(
    initial_state: Tensor,
    q: Tensor,
    chunk_size: int,
    cu_seqlens: CuSeqlens | None,
    *,
    record: bool = False,
) -> tuple[Tensor, Tensor]:
    """New tensors for the last two results of `chunked_kda`."""
    (*B, T, _, _), (*_, HV, K, V) = q.shape, initial_state.shape
    lengths = [T] if cu_seqlens is None else ragged.lengths_of(cu_seqlens)
    n = sum(-(-length // chunk_size) for length in lengths)  # of a short chunk too
    K, V = K + -K % 16, V + -V % 16
    n, L = (n, T) if record else (0, 0)
    return initial_state.new_empty(*B, n, HV, K, V), initial_state.new_empty(*B, L, HV, V)


class Group(NamedTuple):
    """Sequences that are chunked alike, and the order in which their chunks are visited."""

    C: int
    sequences: list[int]
    """Longest first, so that those still active at any step come first."""
    active: list[int]
    """How many sequences have a chunk at step 0, 1, .."""
    tokens: list[int]
    """The tokens of all chunks in the order of the visit, `empty_row` where a chunk is not full."""


def in_groups(
    run: Callable[[Group, Tensor, Tokens], tuple[Tensor, Tokens]],
    S: Float[Tensor, "*S HV K V"],
    tokens: Tokens,
    chunk_size: int,
    cu_seqlens: CuSeqlens | None,
) -> tuple[Float[Tensor, "*S HV K V"], Tokens]:
    """What `run(group, states [N *B HV K V], tokens)` gives of each group, in the order of S and the tokens.

    Sequences of like length go together; each is computed as it would be alone.
    """
    T = tokens[0].shape[-3]
    if cu_seqlens is None:
        C = chunk_length(T, chunk_size)
        S, results = run(Group(C, [0], [1] * -(-T // C), []), S.unsqueeze(0), tokens)
        return S.squeeze(0), results
    bounds = ragged.offsets(cu_seqlens)
    S = S.movedim(-4, 0)
    padded = [ragged.append_zero_row(x, -3) for x in tokens]
    empty = [n for n, (start, stop) in enumerate(pairwise(bounds)) if start == stop]
    states, outputs, sequences, rows = [ragged.take(S, empty, 0)], [], [*empty], []
    for group in _groups(bounds, chunk_size, empty_row=T):
        state, results = run(
            group, ragged.take(S, group.sequences, 0), tuple(ragged.take(x, group.tokens, -3) for x in padded)
        )
        states.append(state)
        outputs.append(results)
        sequences += group.sequences
        rows += group.tokens
    state_rows = {n: row for row, n in enumerate(sequences)}
    token_rows = {t: row for row, t in enumerate(rows)}
    return (
        ragged.take(torch.cat(states).movedim(0, -4), [state_rows[n] for n in range(len(sequences))], -4),
        tuple(
            ragged.take(torch.cat(results, -3), [token_rows[t] for t in range(T)], -3)
            for results in zip(*outputs, strict=True)
        ),
    )


def _groups(bounds: tuple[int, ...], chunk_size: int, empty_row: int) -> Iterator[Group]:
    lengths = [stop - start for start, stop in pairwise(bounds)]
    by_chunk_length: dict[int, list[int]] = {}
    for n, length in enumerate(lengths):
        if length:
            by_chunk_length.setdefault(chunk_length(length, chunk_size), []).append(n)
    for C, members in by_chunk_length.items():
        sequences = sorted(members, key=lambda n: -lengths[n])
        steps = -(-lengths[sequences[0]] // C)
        active = [sum(lengths[n] > step * C for n in sequences) for step in range(steps)]
        tokens = [
            t if t < bounds[n + 1] else empty_row
            for step, count in enumerate(active)
            for n in sequences[:count]
            for t in range(bounds[n] + step * C, bounds[n] + (step + 1) * C)
        ]
        yield Group(C, sequences, active, tokens)


def chunk_length(T: int, chunk_size: int) -> int:
    """A short sequence is one chunk of the next power of two."""
    C = 1
    while T > C and chunk_size > C:  # in comparisons alone, for a T that is a symbol
        C *= 2
    return C


def portions(
    group: Group, S: Tensor, tokens: Tokens, *, alike: bool = False
) -> Iterator[tuple[list[int], Tokens, bool]]:
    """Runs of steps whose chunks fit the working set, at least one step each: their counts and tokens.

    `alike`: all that can be of one of few sizes, which the last result says of each.
    """
    portion: list[int] = []
    runs = [portion]
    most = WORKING_SET // max(1, S[0].numel() // S.shape[-2] * group.C * S.element_size())
    if alike:
        # Few, for Inductor unrolls the steps.
        most = max(1, min(most, 4))
        most = most if most <= len(group.active) else 1
    for count in group.active:
        if portion and sum(portion) + count > most:
            portion = []
            runs.append(portion)
        portion.append(count)
    # Split, not sliced: its derivative is one concatenation, where every slice would write full-sized zeros.
    sizes = [sum(counts) * group.C for counts in runs]
    sizes[-1] -= sum(sizes) - tokens[0].shape[-3]
    usual = [alike and part == ([1] * most, most * group.C) for part in zip(runs, sizes, strict=True)]
    yield from zip(runs, zip(*(x.split(sizes, -3) for x in tokens), strict=True), usual, strict=True)


def advance(
    S: Float[Tensor, "N R G K V"],
    q: Float[Tensor, "n R 1 C K"],
    k: Float[Tensor, "n R 1 C K"],
    v: Float[Tensor, "n R G C V"],
    g: Float[Tensor, "n R G C K"],
    beta: Float[Tensor, "n R G C 1"],
    *,
    counts: list[int],
    scale: float,
    record: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """At step i the first `counts[i]` sequences advance by one chunk each; the rows R are batch and heads.

    Returns the states of those that went to the end, of those that ended before, the outputs of each step
    [.. R G C V], and, to `record`, the states before it and the errors [.. R G C V].
    """
    C = q.shape[-2]
    terms = chunk_terms(q, k, g.exp(), beta.mT, scale=scale)
    finished, outputs, before, errors = [], [], [], []
    chunks = *terms, v, beta
    for count, chunk in zip(counts, zip(*(x.split(counts) for x in chunks), strict=True), strict=True):
        qk_in, k_out, decay, inverse, A, v_c, beta_c = chunk
        if count < len(S):
            # Only where some end: a view, even an empty one, would keep this whole state alive.
            finished.append(S[count:])
            S = S[:count]
        seen, recalled = matmul(qk_in, S).unflatten(-2, (C, 2)).unbind(-2)
        e = matmul(inverse, v_c - recalled)
        d = beta_c * e
        if record:
            before.append(S)
            errors.append(e)
        outputs.append(matmul(A, d) + seen)
        S = torch.addcmul(matmul(k_out.mT, d), decay.mT, S)
    return S, finished, outputs, before, errors


class Terms(NamedTuple):
    """What a scan needs of each chunk; the axes before the last two are n R G."""

    qk_in: Tensor
    """scale q · D(start -> .) and k · D(start -> .), in turn   [2C K]"""
    k_out: Tensor
    """k · D(. -> end)     [C K]"""
    decay: Tensor
    """D(start -> end)     [1 K]"""
    inverse: Tensor
    """(I + P diag(beta))^-1, or of (I + diag(beta) P)   [C C]"""
    A: Tensor
    """scale Σ_c q_ic k_jc D_c(j -> i)   [C C]"""


class Level(NamedTuple):
    """The blocks of m tokens that are joined in pairs, as they were before."""

    qk_second: Tensor
    """scale q and k of each second block, decayed from its start   [.. n m 2 K]"""
    k_first: Tensor
    """k of each first block, decayed to its end   [.. n m K]"""
    decay: Tensor
    """D(start -> end) of all blocks   [.. 2n K]"""


def chunk_terms(
    q: Tensor, k: Tensor, decay: Tensor, beta: Tensor, *, scale: float, levels: list[Level] | None = None
) -> Terms:
    """q, k [n R 1 C K], decay = exp(g) [n R G C K], beta [n R G 1 C], or [.. C 1] for diag(beta) P.

    `levels`, if given, collects what there was to join.
    """
    C = q.shape[-2]
    # Of blocks of m = 1, 2, .., C tokens: the decay through them, q and k decayed from their start, k decayed
    # to their end, their A and their inverse.
    qk_in = torch.stack([q * scale, k], -2) * decay.unsqueeze(-2)
    k_out = torch.ones_like(decay) * k
    A = scale * (q * k).sum(-1).expand(*beta.shape[:-2], C).unflatten(-1, (C, 1, 1))
    inverse = torch.ones_like(A)
    m = 1
    while m < C:
        qk_first, qk_second = qk_in.unflatten(-3, (-1, 2, m)).unbind(-4)
        k_first, k_second = k_out.unflatten(-2, (-1, 2, m)).unbind(-3)
        products = _inner_products(qk_second.flatten(-3, -2), k_first).unflatten(-2, (m, 2))
        q_products, k_products = products.unbind(-2)
        A = _lower_blocks(A, q_products)
        if beta.shape[-2] == 1:
            L = k_products * beta.unflatten(-1, (-1, 2, m)).select(-2, 0).transpose(-3, -2)
        else:
            L = k_products * beta.unflatten(-2, (-1, 2, m)).select(-3, 1)
        inverse_first, inverse_second = _halves(inverse)
        inverse = _lower_blocks(inverse, -matmul(matmul(inverse_second, L), inverse_first))
        if levels is not None:
            levels.append(Level(qk_second.clone(), k_first.clone(), decay))
        first, second = decay.unflatten(-2, (-1, 2)).unbind(-2)
        to_second, to_first = first.unsqueeze(-2).unsqueeze(-2), second.unsqueeze(-2)
        if nothing_is_recorded((qk_in, k_out)):
            # In place: half of the memory is not touched.
            qk_second.mul_(to_second)
            k_first.mul_(to_first)
        else:
            qk_in = torch.stack([qk_first, qk_second * to_second], -4).flatten(-5, -3)
            k_out = torch.stack([k_first * to_first, k_second], -3).flatten(-4, -2)
        decay = first * second
        m *= 2
    return Terms(qk_in.flatten(-3, -2), k_out, decay, inverse.squeeze(-3), A.squeeze(-3))


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[.. 2n m ..] -> the first and the second block of each pair, [.. n m ..]."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return first, second


def _lower_blocks(blocks: Tensor, corner: Tensor) -> Tensor:
    """Joins the blocks [.. 2n m m] in pairs: [[first, 0], [corner, second]] [.. n 2m 2m]."""
    first, second = _halves(blocks)
    top = F.pad(first, (0, corner.shape[-1]))
    return torch.cat([top, torch.cat([corner, second], -1)], -2)


def _inner_products(rows: Tensor, columns: Tensor) -> Tensor:
    """rows columns^T; with a single column elementwise products are quicker."""
    if columns.shape[-2] > 1:
        return matmul(rows, columns.mT)
    return (rows * columns).sum(-1, keepdim=True)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; no matrix's result depends, to the bit, on how many others it is batched with."""
    if a.shape[:-2].numel() == b.shape[:-2].numel() == 1:
        # BLAS takes another route for a single matrix than for a batch: make it two, of the same memory.
        return (a.expand(2, *a.shape) @ b.expand(2, *b.shape))[0]
    return a @ b


def to_chunks(x: Tensor, C: int, H: int, dtype: torch.dtype) -> Tensor:
    """[*B L HG F] -> [n R G C F] in dtype, zeros at the end of the last chunk."""
    short = -x.shape[-3] % C
    if short:
        x = F.pad(x, (0, 0, 0, 0, 0, short))
    x = x.unflatten(-3, (-1, C)).movedim(-4, 0).transpose(-3, -2)
    return in_rows(x.to(dtype, memory_format=torch.contiguous_format).contiguous(), H)


def from_chunks(x: Tensor, B: Sequence[int], H: int) -> Tensor:
    """[n R G C F] -> [*B nC HG F], the inverse."""
    return from_rows(x, B, H).transpose(-3, -2).movedim(0, -4).flatten(-4, -3)


def join(parts: list[Tensor], T: int) -> Tensor:
    """The first T tokens of them all."""
    *before, last = parts
    return torch.cat([*before, last.narrow(-3, 0, T - sum(x.shape[-3] for x in before))], -3)


def in_rows(x: Tensor, H: int) -> Tensor:
    """[n *B HG .. ..] -> [n R G .. ..], R = B H."""
    return x.unflatten(-3, (H, -1)).flatten(1, -4)


def from_rows(x: Tensor, B: Sequence[int], H: int) -> Tensor:
    """[n R G .. ..] -> [n *B HG .. ..], the inverse."""
    return x.unflatten(1, (*B, H)).flatten(-4, -3)


def align(x: Tensor, axes: int = 1) -> Tensor:
    """Zeros up to multiples of 16 on the last axes; such channels leave no trace in KDA.

    BLAS rounds a product by where its matrices start in memory: all of a batch must start alike.
    """
    short = [-size % 16 for size in x.shape[-axes:]]
    return F.pad(x, [end for size in reversed(short) for end in (0, size)]) if any(short) else x


def cut(x: Tensor, *sizes: int) -> Tensor:
    """The first `sizes` of the last axes, without keeping alive what is cut off."""
    if x.shape[-len(sizes) :] == sizes:
        return x
    for axis, size in enumerate(sizes, -len(sizes)):
        x = x.narrow(axis, 0, size)
    return x.clone(memory_format=torch.contiguous_format)


def _outputs(
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int,
    cu_seqlens: CuSeqlens | None,
    record: bool,
    **_options: object,
) -> tuple[Tensor, ...]:
    recorded = _recorded(initial_state, q, chunk_size, cu_seqlens, record=record)
    return initial_state.new_empty(initial_state.shape), v.new_empty(v.shape), *recorded


@with_gradients(
    "kda_chunked(Tensor initial_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, *, float? scale, "
    "float? lower_bound, int chunk_size, int[]? cu_seqlens, bool record, bool compiled) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    recorded=2,
    forward=chunked_kda,
    gradients="kda_fn.primitives.kda.gradients",
    outputs=_outputs,
)
def kda(
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[Float[Tensor, "*S HV K V"], Float[Tensor, "*B T HV V"]]:
    options = {"scale": scale, "chunk_size": chunk_size, "cu_seqlens": cu_seqlens}
    return chunked_kda(initial_state, q, k, v, g, beta, **options)[:2]
