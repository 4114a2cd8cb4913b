"""A projection: y = x W^T, with a floating weight or an int8 one (W8A8, dynamic).

    s        = max |x| / 127                    of each token
    x_int8   = round(x / s)                     half to even; zeros where s is 0 or NaN
    y        = (x_int8 W_int8^T) · s · scale    integers are summed exactly, the rest is float32 at least

    x [*B D]   W [O D]   scale [O]   y [*B O]

The derivative is straight-through: that of x (scale W_int8)^T, as if nothing had been rounded. An int8 weight
and its scale have none, and quantised tokens have none of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from kda_fn import _check
from kda_fn.primitives._kernel import kernel
from kda_fn.primitives._primitive import Implementation, Primitive, check_impl
from kda_fn.primitives.linear import ascendc, fallback, reference
from kda_fn.types import W8A8, Float, Impl, Tensor

__all__ = ["dequantize", "linear", "quantize", "quantize_layer", "quantize_tokens"]

Params = TypeVar("Params", bound=Any)

MOST = (2**31 - 1) // (127 * 128)
"""Products of a quantised number and an int8 whose sum int32 holds."""


def _check_tokens(x: Tensor) -> None:
    _check.floating("quantize_tokens", {"x": x})
    _check.shapes("quantize_tokens", {"x": (x, "*B D")})


def _outputs(x: Tensor) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


_QUANTIZE_TOKENS = Primitive(
    "quantize_tokens",
    check=_check_tokens,
    reference=reference.quantize_tokens,
    kernels={
        "triton": kernel(
            "quantize_tokens(Tensor x) -> (Tensor, Tensor)",
            module="kda_fn.primitives.linear.kernels",
            outputs=_outputs,
            fallback=reference.quantize_tokens,
        )
    },
)


@_QUANTIZE_TOKENS.public
def quantize_tokens(
    x: Float[Tensor, "*B D"], *, impl: Impl | None = None
) -> tuple[Tensor, Float[Tensor, "*B"]]:
    """Rounds each vector on the last axis to 8 bits: x = scale x_int8 to within scale / 2.

        scale = max |x| / 127,   x_int8 = round(x / scale)

    Halves go to the even neighbour. A vector of zeros, or of numbers so small (1e-36 in float32) that its
    scale would not be a normal number, has a scale of 0, and zeros; one with an infinity or NaN in it has a
    scale of NaN, and zeros.

    Returns
    -------
    x_int8, scale : [*B D] int8 in [-127, 127], and [*B] float32 (float64 for float64). They are constants to
        every derivative; `linear` is what passes one through.

    Raises ValueError or TypeError for an argument that does not fit, NotImplementedError for a named impl
    that cannot serve.

    >>> quantize_tokens(torch.tensor([254.0, -100]))
    (tensor([127, -50], dtype=torch.int8), tensor(2.))
    """
    return _QUANTIZE_TOKENS(impl, x.detach() if isinstance(x, Tensor) else x)


def _check_linear(x: Tensor, weight: Tensor | W8A8, bias: Tensor | None = None) -> None:
    with_bias = {} if bias is None else {"bias": bias}
    alike = {"x": x, **with_bias}
    if isinstance(weight, Tensor):
        alike = {"x": x, "weight": weight, **with_bias}
        _check.floating("linear", alike)
        specs = {"weight": (weight, "O D")}
    else:
        _check.instance("linear", "weight", weight, W8A8)
        _check.floating("linear", {"x": x, "weight.scale": weight.scale, **with_bias})
        _check_integers(x, weight)
        specs = {"weight.weight": (weight.weight, "O D"), "weight.scale": (weight.scale, "O")}
    _check.shapes("linear", {**specs, "x": (x, "*B D"), **{n: (b, "O") for n, b in with_bias.items()}})
    if isinstance(weight, W8A8) and weight.shape[1] > MOST:
        raise ValueError(f"linear: weight.weight has shape {tuple(weight.shape)}, int32 sums up to D={MOST}")
    if not (isinstance(weight, Tensor) and torch.is_autocast_enabled(x.device.type)):
        _check.same_dtype("linear", alike)


def _check_integers(x: Tensor, quantised: W8A8) -> None:
    weight, scale = quantised
    if not isinstance(weight, Tensor) or weight.dtype != torch.int8:
        kind = getattr(weight, "dtype", type(weight).__name__)
        raise TypeError(f"linear: weight.weight must be an int8 tensor, got {kind}")
    _check.one_device("linear", {"x": x, "weight.weight": weight})
    if scale.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"linear: weight.scale must be float32 or float64, got {scale.dtype}")
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError("linear: weight.scale must not require a gradient, a W8A8 has none: detach it")


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether torch takes a floating product as it is: `_check_linear` would cost as much as a small one."""
    fits = x.ndim > 0 and weight.ndim == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    return fits and (bias is None or bias.shape == weight.shape[:1])


def _by_kernel_unsupported(
    x: Tensor, weight: Tensor | W8A8 | None = None, *_bias: Tensor | None
) -> str | None:
    if isinstance(weight, Tensor):
        return "a floating weight is torch's own product"
    return _QUANTIZE_TOKENS.unsupported("triton", x)


_LINEAR = Primitive(
    "linear",
    check=_check_linear,
    reference=reference.linear,
    fallback=fallback.linear,
    kernels={
        "ascendc": Implementation(ascendc.linear, ascendc.unsupported),
        "triton": Implementation(fallback.linear_by_kernel, _by_kernel_unsupported),
    },
)


@_LINEAR.public
def linear(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, "O D"] | W8A8,
    bias: Float[Tensor, " O"] | None = None,
    *,
    impl: Impl | None = None,
) -> Float[Tensor, "*B O"]:
    """A projection: y = x W^T + bias.

    Parameters
    ----------
    x : [*B D].
    weight : [O D] in x's dtype: torch's own product, whatever impl is named. Or a `W8A8`, int8 [O D] and
        float32 [O]: x is quantised token by token (`quantize_tokens`), the integers are summed exactly, and
        y = (x_int8 W_int8^T) · s · scale. D is at most 132,104 then, and scale requires no gradient.
    bias : [O] in x's dtype.

    Returns
    -------
    y : [*B O] in x's dtype. Through a W8A8 the derivative is straight-through, dx = dy (scale W_int8).

    "ascendc" is torch_npu's npu_dynamic_quant and npu_quant_matmul: a contract that has not met an NPU.

    Raises ValueError or TypeError for an argument that does not fit, NotImplementedError for a named impl
    that cannot serve.

    >>> linear(torch.tensor([1.0, 2]), torch.tensor([[1.0, 1], [1, -1]]))
    tensor([ 3., -1.])
    """
    if isinstance(weight, Tensor):
        check_impl("linear", impl)
        if not (isinstance(x, Tensor) and _is_plain(x, weight, bias)):
            _check_linear(x, weight, bias)
        return F.linear(x, weight, bias)
    return _LINEAR(impl, x, weight, bias)


def quantize(weight: Float[Tensor, "O D"]) -> W8A8:
    """The nearest int8 weight: of each output channel scale = max |w| / 127, w = scale w_int8.

    Raises ValueError or TypeError for what is no floating matrix.

    >>> quantize(torch.tensor([[254.0, -100]]))
    W8A8(weight=tensor([[127, -50]], dtype=torch.int8), scale=tensor([2.]))
    """
    _check.floating("quantize", {"weight": weight})
    _check.shapes("quantize", {"weight": (weight, "O D")})
    return W8A8(*reference.quantize_tokens(weight))


def dequantize(weight: W8A8, dtype: torch.dtype = torch.float32) -> Float[Tensor, "O D"]:
    """The floating weight that a W8A8 stands for: scale · w_int8, in `dtype`."""
    _check.instance("dequantize", "weight", weight, W8A8)
    return reference.dequantized(*weight, dtype)


def quantize_layer(params: Params, apply: Callable[[Params], Tensor], *names: str) -> tuple[Params, float]:
    """A layer with the named projections in int8, and what that costs on inputs of yours:

        error = |apply(quantised) - apply(params)| / |apply(params)|

    The vendor's mixed layout of a KDA layer, in which its gates stay floating:

        layer = lambda params: kimi_delta_attention(params, state, x, config=config)[1]
        params, error = quantize_layer(params, layer, "qkv")

    Raises ValueError for names that are no projections of the layer.

    >>> params, x = init_swiglu(8, 16), torch.randn(5, 8)
    >>> quantised, error = quantize_layer(params, lambda params: swiglu(params, x), "up", "down")
    >>> type(quantised.up).__name__, 0 < error < 0.05
    ('W8A8', True)
    """
    fields: dict[str, Any] = {name: getattr(params, name, None) for name in names}
    for name, weight in fields.items():
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            kind = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"quantize_layer: params.{name} must be a floating matrix [O D], got {kind}")
    quantised = params._replace(**{name: quantize(weight) for name, weight in fields.items()})
    exact = apply(params).double()
    return quantised, float((apply(quantised).double() - exact).norm() / exact.norm())
