"""The definition: projections, norms and the rotation, then W_UK absorbed into the queries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kda_fn.primitives.linear import linear
from kda_fn.types import W8A8, Float, Tensor

__all__ = ["absorbed", "mla_prolog", "mla_queries", "queries", "rotate"]


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
    return *absorbed(q, k_up), latent, shared


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
    project = partial(linear, impl="reference")
    return queries(project, x, q_down, q_norm, q_up, kv_down, kv_norm, num_heads, cos, sin, eps)


def queries(
    project: Callable[..., Tensor],
    x: Tensor,
    q_down: Tensor | W8A8 | None,
    q_norm: Tensor | None,
    q_up: Tensor | W8A8,
    kv_down: Tensor | W8A8,
    kv_norm: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mla_queries` with its projections, `project(x, weight)`, left open."""
    L = kv_norm.shape[0]
    E = kv_down.shape[0] - L
    c = x
    if q_down is not None:
        c = F.rms_norm(project(x, q_down), q_down.shape[:1], q_norm, eps)
    q = project(c, q_up).unflatten(-1, (num_heads, -1))
    kv = project(x, kv_down)
    latent, shared = F.rms_norm(kv[..., :L], (L,), kv_norm, eps), kv[..., L:]
    if cos is None or sin is None:
        return q, latent, shared.clone()
    q_nope, q_shared = q[..., :-E], rotate(q[..., -E:], cos.unsqueeze(-2), sin.unsqueeze(-2))
    return torch.cat([q_nope, q_shared], -1), latent, rotate(shared, cos, sin)


def absorbed(q: Tensor, k_up: Tensor) -> tuple[Tensor, Tensor]:
    """(q_latent, q_shared) of plain queries."""
    K = k_up.shape[1]
    return torch.einsum("...thk,hkl->...thl", q[..., :K], k_up), q[..., K:].clone()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs of neighbouring channels; first the firsts of all pairs come out, then the seconds."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide[..., 0::2], wide[..., 1::2]
    return (torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
