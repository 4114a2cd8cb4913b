"""The definition of both decay gates, in float32 at least.

softplus gate:   g = -exp(A_log) · softplus(raw + dt_bias)
bounded gate:    g = lower_bound · sigmoid(exp(A_log) · (raw + dt_bias))
"""

from __future__ import annotations

import math

import torch

from kda_fn.primitives._activations import sigmoid, softplus
from kda_fn.types import Float, Tensor

__all__ = ["kda_gate"]


def kda_gate(
    raw: Float[Tensor, "*B HV K"],
    A_log: Float[Tensor, " HV_or_0"],
    dt_bias: Float[Tensor, " HV*K"],
    *,
    lower_bound: float | None = None,
) -> Float[Tensor, "*B HV K"]:
    dtype = torch.promote_types(torch.promote_types(raw.dtype, dt_bias.dtype), torch.float32)
    shifted = raw.to(dtype) + dt_bias.to(dtype).unflatten(0, raw.shape[-2:])
    # A finite factor: inf · 0 would be NaN, in the value of one gate and in the gradient of the other.
    factor = A_log.to(dtype).clamp(max=math.log(torch.finfo(dtype).max) - 1).exp().unsqueeze(-1)
    if lower_bound is None:
        return -factor * softplus(shifted)
    return lower_bound * sigmoid(factor * shifted if A_log.numel() else shifted)
