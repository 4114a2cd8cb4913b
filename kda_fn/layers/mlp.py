"""The gated MLP: y = down (act(gate x) · up x), SwiGLU or SiTU-GLU.

SwiGLU       silu(g) · u                                                    (Kimi-Linear)
SiTU-GLU     a tanh(g / a) sigmoid(g) · b tanh(u / b)      situ = (a, b)    (Kimi K3): both halves are bounded

x, y [*B D]   gate, up [I D]   down [D I]       I is the intermediate size
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kda_fn import _check
from kda_fn.primitives._primitive import check_impl
from kda_fn.primitives.linear import linear
from kda_fn.types import W8A8, Float, Impl, Tensor

__all__ = ["SwiGLUParams", "init_swiglu", "swiglu"]


class SwiGLUParams(NamedTuple):
    """The weights of one gated MLP, [out, in]."""

    gate: Float[Tensor, "I D"] | W8A8
    up: Float[Tensor, "I D"] | W8A8
    down: Float[Tensor, "D I"] | W8A8


def swiglu(
    params: SwiGLUParams,
    x: Float[Tensor, "*B D"],
    *,
    situ: tuple[float, float] | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "*B D"]:
    """y = down (silu(gate x) · up x), on the last axis; with situ = (a, b) the bounded SiTU-GLU instead.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> one = torch.ones(1, 1)
    >>> swiglu(SwiGLUParams(gate=one, up=2 * one, down=3 * one), one)  # 3 (silu(1) 2)
    tensor([[4.3864]])
    """
    _check.instance("swiglu", "params", params, SwiGLUParams)
    _check.floating("swiglu", {"x": x, **_check.leaves("params", params)})
    check_situ("swiglu", situ)
    D = params.gate.shape[-1] if params.gate.ndim else 0
    check_swiglu("swiglu", params, "x", x, D)
    if x.ndim < 1 or x.shape[-1] != D:
        raise ValueError(f"swiglu: x has shape {tuple(x.shape)}, expected [*B D] with D={D}")
    check_impl("swiglu", impl)
    return apply_swiglu(params, x, situ, impl)


def apply_swiglu(
    params: SwiGLUParams, x: Float[Tensor, "*B D"], situ: tuple[float, float] | None, impl: Impl | None
) -> Float[Tensor, "*B D"]:
    """`swiglu` of what has been checked."""
    gate, up = linear(x, params.gate, impl=impl), linear(x, params.up, impl=impl)
    return linear(gated(gate, up, situ), params.down, impl=impl)


def gated(gate: Tensor, up: Tensor, situ: tuple[float, float] | None) -> Tensor:
    """The activation of the gated MLP."""
    if situ is None:
        return F.silu(gate) * up
    a, b = situ
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    return (a * torch.tanh(g / a) * torch.sigmoid(g) * (b * torch.tanh(u / b))).to(gate.dtype)


def check_situ(caller: str, situ: tuple[float, float] | None) -> None:
    """That situ is None or two positive numbers."""
    if situ is None:
        return
    if not (isinstance(situ, tuple) and len(situ) == 2):
        raise TypeError(f"{caller}: situ must be None or two numbers, got {situ!r}")
    for value in situ:
        _check.number(caller, "situ", value)
        if not value > 0:
            raise ValueError(f"{caller}: situ must be positive, got {situ}")


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
    """Normal weights with the standard deviation of 1/sqrt(inputs).

    >>> [tuple(weight.shape) for weight in init_swiglu(8, 16)]  # gate, up, down
    [(16, 8), (16, 8), (8, 16)]
    """
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
    return (weight * max(inputs, 1) ** -0.5).to(dtype)


torch.serialization.add_safe_globals([SwiGLUParams])
