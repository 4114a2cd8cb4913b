"""SwiGLU: y = down (silu(gate x) · up x)

x, y [*B D]   gate, up [I D]   down [D I]       I is the intermediate size
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kda_fn import _check
from kda_fn.types import Float, Tensor

__all__ = ["SwiGLUParams", "init_swiglu", "swiglu"]


class SwiGLUParams(NamedTuple):
    """The weights of one SwiGLU, [out, in]."""

    gate: Float[Tensor, "I D"]
    up: Float[Tensor, "I D"]
    down: Float[Tensor, "D I"]


def swiglu(params: SwiGLUParams, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """y = down (silu(gate x) · up x), on the last axis.

    Raises ValueError or TypeError for an argument that does not fit, before any work.
    """
    _check.instance("swiglu", "params", params, SwiGLUParams)
    _check.floating("swiglu", {"x": x, **_check.leaves("params", params)})
    D = params.gate.shape[-1] if params.gate.ndim else 0
    check_swiglu("swiglu", params, "x", x, D)
    if x.ndim < 1 or x.shape[-1] != D:
        raise ValueError(f"swiglu: x has shape {tuple(x.shape)}, expected [*B D] with D={D}")
    return F.linear(F.silu(F.linear(x, params.gate)) * F.linear(x, params.up), params.down)


def check_swiglu(
    caller: str, params: SwiGLUParams, input_name: str, input_like: Tensor, D: int, name: str = "params"
) -> None:
    """That the shapes belong together and the dtypes are the input's."""
    inner = params.gate.shape[0] if params.gate.ndim else 0
    shapes = {"gate": (inner, D), "up": (inner, D), "down": (D, inner)}
    _check.exact_shapes(caller, {f"{name}.{f}": (getattr(params, f), shape) for f, shape in shapes.items()})
    _check.same_dtype(caller, {input_name: input_like, **_check.leaves(name, params)})


def init_swiglu(
    hidden_size: int,
    intermediate_size: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> SwiGLUParams:
    """Normal weights with the standard deviation of 1/sqrt(inputs)."""
    _check.float_dtype("init_swiglu", dtype)
    return SwiGLUParams(
        *(
            normal_weight(out, inputs, generator=generator, dtype=dtype, device=device)
            for out, inputs in (
                (intermediate_size, hidden_size),
                (intermediate_size, hidden_size),
                (hidden_size, intermediate_size),
            )
        )
    )


def normal_weight(
    outputs: int,
    inputs: int,
    *,
    generator: torch.Generator | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Float[Tensor, "outputs inputs"]:
    """A weight [out, in] that keeps the scale of its inputs: N(0, 1/inputs), drawn in float32."""
    weight = torch.randn(outputs, inputs, generator=generator, device=device, dtype=torch.float32)
    return (weight * inputs**-0.5).to(dtype)


torch.serialization.add_safe_globals([SwiGLUParams])
