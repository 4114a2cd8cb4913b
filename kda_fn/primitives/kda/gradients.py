"""The first derivative of the chunked form, for cotangents dS of the final state and do of the outputs.

With the letters of `fallback.py`, and dS of the state after a chunk:

    dd  = A^T do + (k · D(. -> end)) dS          w = (I + P^T diag(beta))^-1 dd          dv = beta w
    dS' = diag(D(start -> end)) dS + (q · D(start -> .))^T do - (k · D(start -> .))^T dv
    dA  = do d^T          dP = -dv d^T           dbeta_i = w_i e_i

and the rest is the chain rule through the joined blocks, from the largest back to single tokens. Every term
of a gate's gradient is a product: none is the difference of two sums. The states before each chunk and the
errors e are what the forward kept; all else is made again, a portion of chunks at a time.
"""

from __future__ import annotations

import torch

from kda_fn.primitives._kernel import fused, nothing_is_recorded
from kda_fn.primitives.kda.fallback import (
    Group,
    Level,
    Tokens,
    align,
    chunk_terms,
    cut,
    from_chunks,
    from_rows,
    in_groups,
    in_rows,
    join,
    matmul,
    portions,
    to_chunks,
)
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["kda_chunked_backward"]


def kda_chunked_backward(
    dS: Float[Tensor, "*S HV K V"],
    do: Float[Tensor, "*B T HV V"],
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    starts: Float[Tensor, "*B n HV Ka Va"],
    errors: Float[Tensor, "*B L HV Va"],
    *,
    scale: float | None,
    chunk_size: int,
    cu_seqlens: CuSeqlens | None,
    compiled: bool,
    **_options: object,
) -> list[Tensor]:
    """The gradients of initial_state, q, k, v, g and beta; the last two tensors are `chunked_kda`'s."""
    (*B, T, H, K), V = q.shape, v.shape[-1]
    if T == 0:
        return [dS.clone(), *(torch.zeros_like(x) for x in (q, k, v, g, beta))]
    scale = float(K**-0.5) if scale is None else scale
    starts, visited = starts.movedim(-4, 0), 0

    def run(group: Group, dS: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        nonlocal visited
        visited = n = visited + sum(group.active)
        final = in_rows(dS, H)
        dS, gradients = final[: group.active[-1]], []
        for counts, portion, usual in reversed(list(portions(group, final, tokens, alike=compiled))):
            n -= sum(counts)
            before = in_rows(starts[n : n + sum(counts)], H)
            chunks = (to_chunks(x, group.C, H, final.dtype) for x in portion)
            dS, *of_chunks = fused(retreat, usual)(
                dS, final[len(dS) :], before, *chunks, counts=counts, scale=scale
            )
            gradients.append([from_chunks(x, B, H) for x in of_chunks])
        L = tokens[0].shape[-3]
        return from_rows(dS, B, H), tuple(join(list(x[::-1]), L) for x in zip(*gradients, strict=True))

    tokens = errors, align(do), align(q), align(k), align(g), beta.unsqueeze(-1)
    dS, gradients = in_groups(run, align(dS, 2), tokens, chunk_size, cu_seqlens)
    sizes = {"q": K, "k": K, "v": V, "g": K, "beta": 1}
    of_tokens = [cut(x, size) for x, size in zip(gradients, sizes.values(), strict=True)]
    *of_tokens, dbeta = (x.to(y.dtype) for x, y in zip(of_tokens, (q, k, v, g, beta), strict=True))
    return [cut(dS, K, V), *of_tokens, dbeta.squeeze(-1)]


def retreat(
    dS: Float[Tensor, "M R G K V"],
    dS_ended: Float[Tensor, "E R G K V"],
    S: Float[Tensor, "n R G K V"],
    e: Float[Tensor, "n R G C V"],
    do: Float[Tensor, "n R G C V"],
    q: Float[Tensor, "n R 1 C K"],
    k: Float[Tensor, "n R 1 C K"],
    g: Float[Tensor, "n R G C K"],
    beta: Float[Tensor, "n R G C 1"],
    *,
    counts: list[int],
    scale: float,
) -> tuple[Tensor, ...]:
    """Back through `advance`: to the cotangents of the states before it and of its chunks.

    dS is of the states after it, of the first M sequences; dS_ended of the final states of all others, which
    end in it or have ended before.
    """
    C = q.shape[-2]
    levels: list[Level] = []
    decay_1 = g.exp()
    qk_in, k_out, decay, inverse, A = chunk_terms(q, k, decay_1, beta, scale=scale, levels=levels)

    chunks = matmul(A.mT, do), do, qk_in, k_out, decay, inverse, beta
    steps = list(zip(*(x.split(counts) for x in chunks), strict=True))
    ends, ws, rows = [], [], []
    for dd, do_c, qk_in_c, k_out_c, decay_c, inverse_c, beta_c in reversed(steps):
        ending = len(dd) - len(dS)
        if ending:
            dS, dS_ended = torch.cat([dS, dS_ended[:ending]]), dS_ended[ending:]
        ends.append(dS)
        ws.append(matmul(inverse_c.mT, dd + matmul(k_out_c, dS)))
        # do and -dv in turn, as the rows of qk_in.
        rows.append(torch.stack([do_c, -beta_c * ws[-1]], -2))
        dS = torch.addcmul(matmul(qk_in_c.mT, rows[-1].flatten(-3, -2)), decay_c.mT, dS)
    dS_end, w, of_rows = (x[0] if len(x) == 1 else torch.cat(x[::-1]) for x in (ends, ws, rows))

    d = beta * e
    dqk = matmul(of_rows.flatten(-3, -2), S.mT).unflatten(-2, (C, 2))
    dk_out = matmul(d, dS_end.mT)
    ddecay = (dS_end * S).sum(-1).unsqueeze(-2)
    for level in reversed(levels):
        qk, k_first, m = level.qk_second.flatten(-3, -2), level.k_first, level.k_first.shape[-2]
        first, second = level.decay.unflatten(-2, (-1, 2)).unbind(-2)
        of_qk_first, of_qk = dqk.unflatten(-3, (-1, 2, m)).unbind(-4)
        of_k, of_k_second = dk_out.unflatten(-2, (-1, 2, m)).unbind(-3)
        of_first = ddecay * second + (level.qk_second * of_qk).sum((-3, -2))
        of_second = ddecay * first + (k_first * of_k).sum(-2)
        ddecay = torch.stack([of_first, of_second], -2).flatten(-3, -2)
        # Of the products of second and first blocks, [2m m]: dA and dP.
        rows_second = of_rows.unflatten(-3, (-1, 2, m)).select(-4, 1).flatten(-3, -2)
        of_products = matmul(rows_second, d.unflatten(-2, (-1, 2, m)).select(-3, 0).mT)
        to_second, to_first = first.unsqueeze(-2).unsqueeze(-2), second.unsqueeze(-2)
        if m > 1:
            qk_part, k_part = matmul(of_products, k_first), matmul(of_products.mT, qk)
        else:
            qk_part, k_part = of_products * k_first, (of_products * qk).sum(-2, keepdim=True)
        qk_part = qk_part.view_as(of_qk)
        if nothing_is_recorded((dqk, dk_out)):
            of_qk.mul_(to_second).add_(qk_part)
            of_k.mul_(to_first).add_(k_part)
        else:
            dqk = torch.stack([of_qk_first, of_qk * to_second + qk_part], -4).flatten(-5, -3)
            dk_out = torch.stack([of_k * to_first + k_part, of_k_second], -3).flatten(-4, -2)

    ddecay = ddecay + (torch.stack([q * scale, k], -2) * dqk).sum(-2)
    dq, dk = (dqk * decay_1.unsqueeze(-2)).unbind(-2)
    of_same = scale * (do * d).sum(-1, keepdim=True)  # A_ii = scale q_i k_i
    dq = torch.add(of_same * k, dq, alpha=scale)
    dk = torch.addcmul(dk + dk_out, of_same, q)
    if dq.shape[-3] > 1:  # heads that share q and k
        dq, dk = dq.sum(-3, keepdim=True), dk.sum(-3, keepdim=True)
    gradients = dq, dk, beta * w, ddecay * decay_1, (w * e).sum(-1, keepdim=True)
    return dS, *gradients
