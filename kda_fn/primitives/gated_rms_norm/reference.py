"""The definition of the gated RMS norm, in float32 at least.

y = x · rsqrt(mean(x²) + eps) · weight · act(gate)
"""

from __future__ import annotations

import torch

from kda_fn.primitives._activations import sigmoid, silu
from kda_fn.types import Activation, Float, Tensor

__all__ = ["gated_rms_norm", "residual_gated_rms_norm"]


def gated_rms_norm(
    x: Float[Tensor, "*B F"],
    gate: Float[Tensor, "*B F"],
    weight: Float[Tensor, " F"] | None,
    *,
    eps: float,
    activation: Activation = "sigmoid",
) -> Float[Tensor, "*B F"]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
    return _normed_and_gated(x.to(dtype), gate.to(dtype), weight, eps, activation).to(x.dtype)


def residual_gated_rms_norm(
    residual: Float[Tensor, "*B F"],
    x: Float[Tensor, "*B F"],
    gate: Float[Tensor, "*B F"],
    weight: Float[Tensor, " F"] | None,
    *,
    eps: float,
    activation: Activation = "sigmoid",
) -> tuple[Float[Tensor, "*B F"], Float[Tensor, "*B F"]]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
    dtype = torch.promote_types(dtype, residual.dtype)
    total = residual.to(dtype) + x.to(dtype)
    y = _normed_and_gated(total, gate.to(dtype), weight, eps, activation)
    return total.to(residual.dtype), y.to(x.dtype)


def _normed_and_gated(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: Activation
) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y * (sigmoid(gate) if activation == "sigmoid" else silu(gate))
