"""The definition of KDA: the recurrence, one token at a time.

S  <- diag(exp(g)) S
d   = beta (v - S^T k)
S  <- S + k d^T
o   = scale S^T q
"""

from __future__ import annotations

from functools import partial

import torch

from kda_fn import ragged
from kda_fn.scan import scan
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["kda", "kda_step"]


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
    heads = state.shape[-3] // q_t.shape[-2]
    q = q_t.to(state.dtype).repeat_interleave(heads, -2)
    k = k_t.to(state.dtype).repeat_interleave(heads, -2)
    v, g, beta = (x.to(state.dtype) for x in (v_t, g_t, beta_t))

    S = g.exp().unsqueeze(-1) * state
    d = beta.unsqueeze(-1) * (v - (S * k.unsqueeze(-1)).sum(-2))
    S = S + k.unsqueeze(-1) * d.unsqueeze(-2)
    o = (q.shape[-1] ** -0.5 if scale is None else scale) * (S * q.unsqueeze(-1)).sum(-2)
    return S, o.to(v_t.dtype)


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
    if cu_seqlens is not None:
        lengths = ragged.lengths_of(cu_seqlens)
        sequences = zip(
            initial_state.unbind(-4),
            *(x.split(lengths, -3) for x in (q, k, v, g)),
            beta.split(lengths, -2),
            strict=True,
        )
        states, outputs = zip(*(kda(*sequence, scale=scale) for sequence in sequences), strict=True)
        return torch.stack(states, -4), torch.cat(outputs, -3)

    step = partial(kda_step, scale=scale)
    xs = (*(x.movedim(-3, 0) for x in (q, k, v, g)), beta.movedim(-2, 0))
    state, o = scan(lambda S, x: step(S, *x), initial_state, xs)
    return (state if q.shape[-3] else state.clone()), o.movedim(0, -3)
