"""The definition of the short convolution: a window that slides by one token.

window_t = [window_{t-1}[1:], x_t]          [W P]
y_t      = act(Σ_i weight[:, i] window_t[i] + bias)
"""

from __future__ import annotations

import torch

from kda_fn import ragged
from kda_fn.primitives._activations import silu
from kda_fn.scan import scan
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
    if cu_seqlens is not None:
        pieces = x.split(ragged.lengths_of(cu_seqlens), -2)
        states, outputs = zip(
            *(
                causal_conv1d(state, piece, weight, bias, activation=activation)
                for state, piece in zip(conv_state.unbind(-3), pieces, strict=True)
            ),
            strict=True,
        )
        return torch.stack(states, -3), torch.cat(outputs, -2)

    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)

    b = weight.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)

    def step(state: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([state, x_t.unsqueeze(-2)], -2)
        y = sum((window[..., i, :].to(dtype) * weight[:, i].to(dtype) for i in range(weight.shape[-1])), b)
        y = silu(y) if activation == "silu" else y
        return window[..., 1:, :], y.to(x.dtype)

    state, y = scan(step, conv_state, x.movedim(-2, 0))
    return state.clone(), y.movedim(0, -2)
