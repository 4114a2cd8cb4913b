"""The definition: y = x · rsqrt(Σ x² + eps)."""

from __future__ import annotations

import torch

from kda_fn.types import Float, Tensor

__all__ = ["l2_norm"]


def l2_norm(x: Float[Tensor, "*B F"], *, eps: float = 1e-6) -> Float[Tensor, "*B F"]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
