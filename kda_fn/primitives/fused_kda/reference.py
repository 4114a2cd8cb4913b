"""The definition: the definitions of the four, one after another."""

from __future__ import annotations

import torch

from kda_fn.primitives._activations import sigmoid
from kda_fn.primitives.kda.reference import kda
from kda_fn.primitives.kda_gate.reference import kda_gate
from kda_fn.primitives.l2_norm.reference import l2_norm
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["fused_kda", "units_and_beta"]


def fused_kda(
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    raw: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    A_log: Float[Tensor, " HV_or_0"],
    dt_bias: Float[Tensor, " HV*K"],
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    eps: float = 1e-6,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[Float[Tensor, "*S HV K V"], Float[Tensor, "*B T HV V"]]:
    g = kda_gate(raw, A_log, dt_bias, lower_bound=lower_bound)
    q, k, beta = units_and_beta(q, k, beta, eps, allow_neg_eigval)
    return kda(initial_state, q, k, v, g, beta, scale=scale, cu_seqlens=cu_seqlens)


def units_and_beta(
    q: Tensor, k: Tensor, beta: Tensor, eps: float, allow_neg_eigval: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of length one, beta past its sigmoid: what is left of KDA's inputs beside g."""
    beta = sigmoid(beta.to(torch.promote_types(beta.dtype, torch.float32)))
    return l2_norm(q, eps=eps), l2_norm(k, eps=eps), 2 * beta if allow_neg_eigval else beta
