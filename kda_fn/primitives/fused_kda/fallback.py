"""The same of fast forms: only KDA has one besides its definition."""

from __future__ import annotations

from kda_fn.primitives.fused_kda.reference import units_and_beta
from kda_fn.primitives.kda.fallback import kda
from kda_fn.primitives.kda_gate.reference import kda_gate
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["fused_kda"]


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
    return kda(initial_state, q, k, v, g, beta, scale=scale, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
