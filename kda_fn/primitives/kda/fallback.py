"""The chunked form of KDA in pure torch: fast, exact at any decay, usable under every transform.

Inside a chunk let D(j -> i) be the decay from token j to token i, per channel: the product of exp(g_t) over
j < t <= i. With the chunk's inputs stacked as rows,

    L_ij = beta_i Σ_c k_ic k_jc D_c(j -> i)     for j < i, else 0
    A_ij = Σ_c q_ic k_jc D_c(j -> i)            for j <= i, else 0
    d    = (I + L)^-1 beta (v - (k · D(start -> .)) S)
    o    = scale ((q · D(start -> .)) S + A d)
    S'   = diag(D(start -> end)) S + (k · D(. -> end))^T d

which is the recurrence solved for all d of the chunk at once.

Two choices make it safe without a promise on g. Decays are products of exp(g), never exponentials of sums,
differences or quotients of them: nothing overflows unless the recurrence does, exp(-inf) is a plain zero,
and a token after a very strong decay loses no digits to it. And a chunk is halved again and again: every pair
(j, i) is split by exactly one boundary, D(j -> i) = D(j -> boundary) D(boundary -> i) is a product of two
factors that each depend on one side alone, and so each level is one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kda_fn import ragged
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["kda", "kda_step"]

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
    q, k = (_align(x).to(dtype).unsqueeze(-2) for x in (q_t, k_t))  # *B H 1 K
    v, g = (_align(x).to(dtype).unflatten(-2, (H, -1)) for x in (v_t, g_t))  # *B H G ..
    beta = beta_t.to(dtype).unflatten(-1, (H, -1)).unsqueeze(-1)
    S = _align(state, 2).unflatten(-3, (H, -1))
    decay = g.exp()
    recalled, seen = _matmul(torch.stack([k * decay, q * decay], -2), S).unbind(-2)
    d = beta * (v - recalled)
    o = (K**-0.5 if scale is None else scale) * (seen + (q * k).sum(-1, keepdim=True) * d)
    S = torch.addcmul(k.unsqueeze(-1) * d.unsqueeze(-2), decay.unsqueeze(-1), S)
    return _cut(S.flatten(-4, -3), K, V), _cut(o.flatten(-3, -2).to(v_t.dtype), V)


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
    (T, _, K), V = q.shape[-3:], v.shape[-1]
    if T == 0:
        return initial_state.clone(), v.clone()
    scale = float(K**-0.5) if scale is None else scale
    S = _align(initial_state, 2)
    inputs = _align(q), _align(k), _align(v), _align(g), beta.unsqueeze(-1)
    if cu_seqlens is not None:
        S, o = _kda_packed(S, inputs, ragged.offsets(cu_seqlens), chunk_size, scale)
    else:
        C = _chunk_length(T, chunk_size)
        S, o = _kda_chunks(S.unsqueeze(0), *inputs, active=[1] * -(-T // C), C=C, scale=scale)
        S = S.squeeze(0)
    return _cut(S, K, V), _cut(o, T, o.shape[-2], V)


def _kda_packed(
    S: Float[Tensor, "*B N HV K V"],
    inputs: tuple[Tensor, ...],
    bounds: tuple[int, ...],
    chunk_size: int,
    scale: float,
) -> tuple[Float[Tensor, "*B N HV K V"], Float[Tensor, "*B T HV V"]]:
    """Sequences of like length go together; each is computed as it would be alone."""
    S, T = S.movedim(-4, 0), bounds[-1]
    padded = [ragged.append_zero_row(x, -3) for x in inputs]
    empty = [n for n, (start, stop) in enumerate(pairwise(bounds)) if start == stop]
    states, outputs, sequences, tokens = [ragged.take(S, empty, 0)], [], [*empty], []
    for group in _groups(bounds, chunk_size, empty_row=T):
        state, o = _kda_chunks(
            ragged.take(S, group.sequences, 0),
            *(ragged.take(x, group.tokens, -3) for x in padded),
            active=group.active,
            C=group.C,
            scale=scale,
        )
        states.append(state)
        outputs.append(o)
        sequences += group.sequences
        tokens += group.tokens
    state_rows = {n: row for row, n in enumerate(sequences)}
    token_rows = {t: row for row, t in enumerate(tokens)}
    return (
        ragged.take(torch.cat(states).movedim(0, -4), [state_rows[n] for n in range(len(sequences))], -4),
        ragged.take(torch.cat(outputs, -3), [token_rows[t] for t in range(T)], -3),
    )


class _Group(NamedTuple):
    """Sequences that are chunked alike, and the order in which their chunks are visited."""

    C: int
    sequences: list[int]
    """Longest first, so that those still active at any step come first."""
    active: list[int]
    """How many sequences have a chunk at step 0, 1, .."""
    tokens: list[int]
    """The tokens of all chunks in the order of the visit, `empty_row` where a chunk is not full."""


def _groups(bounds: tuple[int, ...], chunk_size: int, empty_row: int) -> Iterator[_Group]:
    lengths = [stop - start for start, stop in pairwise(bounds)]
    by_chunk_length: dict[int, list[int]] = {}
    for n, length in enumerate(lengths):
        if length:
            by_chunk_length.setdefault(_chunk_length(length, chunk_size), []).append(n)
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
        yield _Group(C, sequences, active, tokens)


def _chunk_length(T: int, chunk_size: int) -> int:
    """A short sequence is one chunk of the next power of two."""
    return min(chunk_size, 1 << (T - 1).bit_length())


def _kda_chunks(
    S: Float[Tensor, "N *B HV K V"],
    q: Float[Tensor, "*B L H K"],
    k: Float[Tensor, "*B L H K"],
    v: Float[Tensor, "*B L HV V"],
    g: Float[Tensor, "*B L HV K"],
    beta: Float[Tensor, "*B L HV 1"],
    *,
    active: list[int],
    C: int,
    scale: float,
) -> tuple[Float[Tensor, "N *B HV K V"], Float[Tensor, "*B nC HV V"]]:
    """Scans over chunks; at step i the first `active[i]` sequences advance by one chunk each."""
    dtype, H = S.dtype, q.shape[-2]
    S = S.unflatten(-3, (H, -1))  # N *B H G K V
    finished, outputs = [], []
    portions = list(_portions(active, S[0].numel() // S.shape[-2] * C * S.element_size()))
    # Split, not sliced: its derivative is one concatenation, where every slice would write full-sized zeros.
    tokens = [sum(counts) * C for counts in portions]
    tokens[-1] -= sum(tokens) - q.shape[-3]
    for counts, *portion in zip(portions, *(x.split(tokens, -3) for x in (q, k, v, g, beta)), strict=True):
        chunks = _chunk_terms(*(_to_chunks(x, C, H).to(dtype) for x in portion), scale=scale)
        for count, chunk in zip(counts, zip(*(x.split(counts) for x in chunks), strict=True), strict=True):
            k_in, k_out, q_in, v_c, decay, solve, A = chunk
            if count < len(S):
                # Only where some end: a view, even an empty one, would keep this whole state alive.
                finished.append(S[count:])
                S = S[:count]
            d = _matmul(solve, v_c - _matmul(k_in, S))
            outputs.append((_matmul(q_in, S) + _matmul(A, d)).to(v.dtype))
            S = torch.addcmul(_matmul(k_out.mT, d), decay.mT, S)
    states = torch.cat([S, *reversed(finished)])
    return states.flatten(-4, -3), _from_chunks(torch.cat(outputs))


class _Chunks(NamedTuple):
    """What the scan needs of each chunk; the axes before the last two are n *B H G."""

    k_in: Tensor
    """k · D(start -> .)   [C K]"""
    k_out: Tensor
    """k · D(. -> end)     [C K]"""
    q_in: Tensor
    """scale q · D(start -> .)   [C K]"""
    v: Tensor
    """[C V]"""
    decay: Tensor
    """D(start -> end)     [1 K]"""
    solve: Tensor
    """(I + L)^-1 diag(beta)   [C C]"""
    A: Tensor
    """scale Σ_c q_ic k_jc D_c(j -> i)   [C C]"""


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float) -> _Chunks:
    """q, k [n *B H 1 C K], v, g, beta [n *B H G C ..]."""
    C = q.shape[-2]
    # Of blocks of m = 1, 2, .., C tokens: the decay through them, q and k decayed from their start, k decayed
    # to their end, their A and their (I + L)^-1.
    decay = g.exp()
    qk_in = torch.stack([q * scale, k]) * decay
    k_out = k.expand_as(decay)
    A = scale * (q * k).sum(-1, keepdim=True).expand_as(beta).unsqueeze(-1)
    solve = torch.ones_like(beta).unsqueeze(-1)
    m = 1
    while m < C:
        qk_first, qk_second = qk_in.unflatten(-2, (-1, 2, m)).unbind(-3)
        k_first, k_second = k_out.unflatten(-2, (-1, 2, m)).unbind(-3)
        q_row, k_row = qk_second.unbind(0)
        A = _lower_blocks(A, _inner_products(q_row, k_first))
        L = _inner_products(k_row, k_first) * beta.unflatten(-2, (-1, 2, m)).select(-3, 1)
        solve_first, solve_second = _halves(solve)
        solve = _lower_blocks(solve, -_matmul(_matmul(solve_second, L), solve_first))

        first, second = decay.unflatten(-2, (-1, 2)).unbind(-2)
        qk_in = torch.stack([qk_first, qk_second * first.unsqueeze(-2)], -3).flatten(-4, -2)
        k_out = torch.stack([k_first * second.unsqueeze(-2), k_second], -3).flatten(-4, -2)
        decay = first * second
        m *= 2
    q_in, k_in = qk_in.unbind(0)
    return _Chunks(k_in, k_out, q_in, v, decay, solve.squeeze(-3) * beta.mT, A.squeeze(-3))


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
    """rows columns^T; matrices of one or two rows are quicker by elementwise products."""
    if rows.shape[-2] > 2:
        return _matmul(rows, columns.mT)
    return (rows.unsqueeze(-2) * columns.unsqueeze(-3)).sum(-1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; no matrix's result depends, to the bit, on how many others it is batched with."""
    if a.shape[:-2].numel() == b.shape[:-2].numel() == 1:
        # BLAS takes another route for a single matrix than for a batch: make it two, of the same memory.
        return (a.expand(2, *a.shape) @ b.expand(2, *b.shape))[0]
    return a @ b


def _portions(active: Iterable[int], chunk_bytes: int) -> Iterator[list[int]]:
    """Cuts the steps into runs whose chunks fit the working set, at least one step each."""
    portion: list[int] = []
    for count in active:
        if portion and (sum(portion) + count) * chunk_bytes > WORKING_SET:
            yield portion
            portion = []
        portion.append(count)
    if portion:
        yield portion


def _to_chunks(x: Tensor, C: int, H: int) -> Tensor:
    """[*B L h F] -> [n *B H G C F], zeros at the end of the last chunk."""
    short = -x.shape[-3] % C
    if short:
        x = F.pad(x, (0, 0, 0, 0, 0, short))
    x = x.unflatten(-3, (-1, C)).movedim(-4, 0).transpose(-3, -2)
    return x.unflatten(-3, (H, -1)).contiguous()


def _align(x: Tensor, axes: int = 1) -> Tensor:
    """Zeros up to multiples of 16 on the last axes; such channels leave no trace in KDA.

    BLAS rounds a product by where its matrices start in memory: all of a batch must start alike.
    """
    short = [-size % 16 for size in x.shape[-axes:]]
    return F.pad(x, [end for size in reversed(short) for end in (0, size)]) if any(short) else x


def _cut(x: Tensor, *sizes: int) -> Tensor:
    """The first `sizes` of the last axes, without keeping alive what is cut off."""
    if x.shape[-len(sizes) :] == sizes:
        return x
    for axis, size in enumerate(sizes, -len(sizes)):
        x = x.narrow(axis, 0, size)
    return x.clone(memory_format=torch.contiguous_format)


def _from_chunks(x: Tensor) -> Tensor:
    """[n *B H G C F] -> [*B nC HG F], the inverse."""
    return x.flatten(-4, -3).transpose(-3, -2).movedim(0, -4).flatten(-4, -3)
