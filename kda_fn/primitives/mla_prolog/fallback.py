"""The definition, its projections by whichever implementation of `linear` serves."""

from __future__ import annotations

from kda_fn.primitives.linear import linear
from kda_fn.primitives.mla_prolog import reference
from kda_fn.types import W8A8, Float, Tensor

__all__ = ["mla_prolog", "mla_queries"]


def mla_prolog(
    x: Float[Tensor, "*B T D"],
    q_down: Float[Tensor, "R D"] | W8A8 | None,
    q_norm: Float[Tensor, " R"] | None,
    q_up: Float[Tensor, "H_K_E R_or_D"] | W8A8,
    k_up: Float[Tensor, "H K L"],
    kv_down: Float[Tensor, "L_E D"] | W8A8,
    kv_norm: Float[Tensor, " L"],
    *,
    cos: Float[Tensor, "*#B #T E"] | None = None,
    sin: Float[Tensor, "*#B #T E"] | None = None,
    eps: float = 1e-6,
) -> tuple[
    Float[Tensor, "*B T H L"], Float[Tensor, "*B T H E"], Float[Tensor, "*B T L"], Float[Tensor, "*B T E"]
]:
    q, latent, shared = mla_queries(
        x, q_down, q_norm, q_up, kv_down, kv_norm, num_heads=k_up.shape[0], cos=cos, sin=sin, eps=eps
    )
    return *reference.absorbed(q, k_up), latent, shared


def mla_queries(
    x: Float[Tensor, "*B T D"],
    q_down: Float[Tensor, "R D"] | W8A8 | None,
    q_norm: Float[Tensor, " R"] | None,
    q_up: Float[Tensor, "H_K_E R_or_D"] | W8A8,
    kv_down: Float[Tensor, "L_E D"] | W8A8,
    kv_norm: Float[Tensor, " L"],
    *,
    num_heads: int,
    cos: Float[Tensor, "*#B #T E"] | None = None,
    sin: Float[Tensor, "*#B #T E"] | None = None,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "*B T H K_E"], Float[Tensor, "*B T L"], Float[Tensor, "*B T E"]]:
    return reference.queries(linear, x, q_down, q_norm, q_up, kv_down, kv_norm, num_heads, cos, sin, eps)
