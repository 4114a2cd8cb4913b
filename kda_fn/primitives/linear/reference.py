"""The definition, in 64-bit integers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kda_fn.types import W8A8, Float, Tensor

__all__ = ["dequantized", "linear", "quantize_tokens", "scaled"]


def quantize_tokens(x: Float[Tensor, "*B D"]) -> tuple[Tensor, Float[Tensor, "*B"]]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax(-1) if x.shape[-1] else wide.new_zeros(x.shape[:-1])
    scale = largest / 127
    # Below the normal numbers a scale has few digits, and some processors have none.
    scale = torch.where(scale < torch.finfo(scale.dtype).tiny, 0, scale)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    steps = torch.round(wide / scale.unsqueeze(-1)).clamp(-127, 127)
    return torch.where((scale > 0).unsqueeze(-1), steps, 0).to(torch.int8), scale


def linear(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, "O D"] | W8A8,
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*B O"]:
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    tokens, s = quantize_tokens(x.detach())
    total = (tokens.to(torch.int64).unsqueeze(-2) * weight.weight.to(torch.int64)).sum(-1)
    # Zero, with the derivative of the floating product.
    straight = (x - x.detach()) @ dequantized(*weight, x.dtype).T
    y = scaled(total, s, weight.scale, x.dtype) + straight
    return y if bias is None else y + bias


def scaled(total: Tensor, s: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of integers as numbers: total · s · scale, in this order."""
    return (total.to(s.dtype) * s.unsqueeze(-1) * scale.to(s.dtype)).to(dtype)


def dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.to(scale.dtype) * scale.unsqueeze(-1)).to(dtype)
