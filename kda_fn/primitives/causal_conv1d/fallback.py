"""The short convolution as W shifted multiply-adds over the whole sequence."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from kda_fn import ragged
from kda_fn.primitives._activations import silu
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["causal_conv1d"]


def causal_conv1d(
    conv_state: Float[Tensor, "*S W_1 P"],
    x: Float[Tensor, "*B T P"],
    weight: Float[Tensor, "P W"],
    bias: Float[Tensor, " P"] | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[Float[Tensor, "*S W_1 P"], Float[Tensor, "*B T P"]]:
    W = weight.shape[-1]
    if cu_seqlens is None:
        padded = _join(conv_state, x)
        y = _convolve(padded, weight, bias, activation)
        return padded.narrow(-2, x.shape[-2], W - 1).clone(), y

    # Every sequence behind its own state; the W-1 outputs that straddle two sequences are not kept.
    bounds = ragged.offsets(cu_seqlens)
    N = len(bounds) - 1
    source = torch.cat([conv_state.flatten(-3, -2), x], -2)
    order, kept, last = [], [], []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        order += range(n * (W - 1), (n + 1) * (W - 1))
        kept += range(len(order) - W + 1, len(order) - W + 1 + stop - start)
        order += range(N * (W - 1) + start, N * (W - 1) + stop)
        last += range(len(order) - W + 1, len(order))
    padded = ragged.take(source, order, -2)
    y = ragged.take(_convolve(padded, weight, bias, activation), kept, -2)
    return ragged.take(padded, last, -2).unflatten(-2, (N, W - 1)), y


def _join(a: Tensor, b: Tensor) -> Tensor:
    """torch.cat([a, b], -2). In a graph the size of a batch under vmap would become a constant by that."""
    if not torch.compiler.is_compiling():
        return torch.cat([a, b], -2)
    m, n = a.shape[-2], b.shape[-2]
    of_a = torch.arange(m + n, device=a.device).unsqueeze(-1) < m
    return torch.where(of_a, F.pad(a, (0, 0, 0, n)), F.pad(b, (0, 0, m, 0)))


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """[.. L+W-1 P] -> [.. L P]; tap i of output t is row t+i."""
    dtype = torch.promote_types(torch.promote_types(padded.dtype, weight.dtype), torch.float32)
    W = weight.shape[-1]
    L = padded.shape[-2] - W + 1
    wide, taps = padded.to(dtype), weight.to(dtype).unbind(-1)
    y = wide.narrow(-2, 0, L) * taps[0]
    for i in range(1, W):
        y = torch.addcmul(y, wide.narrow(-2, i, L), taps[i])
    if bias is not None:
        y = y + bias.to(dtype)
    return (silu(y) if activation == "silu" else y).to(padded.dtype)
