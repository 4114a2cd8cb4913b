"""The same, by products that a processor is fast at and that are still exact."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from kda_fn.primitives._kernel import one_node, wants_torch_operations
from kda_fn.primitives.linear import reference
from kda_fn.primitives.linear.reference import dequantized, scaled
from kda_fn.types import W8A8, Float, Impl, Tensor

__all__ = ["integer_product", "linear", "linear_by_kernel"]


def linear(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, "O D"] | W8A8,
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*B O"]:
    return _linear(x, weight, bias, "fallback")


def linear_by_kernel(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, "O D"] | W8A8,
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*B O"]:
    """Tokens are quantised in one launch."""
    return _linear(x, weight, bias, "triton")


def _linear(x: Tensor, weight: Tensor | W8A8, bias: Tensor | None, impl: Impl) -> Tensor:
    if isinstance(weight, Tensor) or wants_torch_operations():
        return reference.linear(x, weight, bias)
    y = _apply(x, *weight, impl)
    return y if bias is None else y + bias


@one_node
def _apply(x: Tensor, weight: Tensor, scale: Tensor, impl: Impl) -> Tensor:
    return _StraightThrough.apply(x, weight, scale, impl)


class _StraightThrough(Function):
    """Rounds forward, and backward passes the floating weight's derivative."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, scale: Tensor, impl: Impl) -> Tensor:
        from kda_fn.primitives.linear import quantize_tokens

        tokens, s = quantize_tokens(x, impl=impl)
        return scaled(integer_product(tokens, weight), s, scale, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None, None]:
        (dy,) = cotangents
        weight, scale = ctx.saved_tensors
        return dy @ dequantized(weight, scale, dy.dtype), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        x, weight, scale, impl = args
        if in_dims[1] is None and in_dims[2] is None:
            # Another batch axis.
            return _StraightThrough.apply(x.movedim(in_dims[0], 0), weight, scale, impl), 0
        rows = [
            [a] * info.batch_size if dim is None else a.unbind(dim)
            for a, dim in zip((x, weight, scale), in_dims[:3], strict=True)
        ]
        return torch.stack([_StraightThrough.apply(*row, impl) for row in zip(*rows, strict=True)]), 0


EXACT = 2**24 // (127 * 128)
"""Products of a quantised number and an int8 whose sum float32 holds to the last digit."""
ROWS = 512
"""Of the weight on a CPU: that part of it stays in the cache as float32. D = 2304, O = 12288 on one thread of
an AMD EPYC (AVX2, without instructions for int8) take 14 ms at one row and 211 at 256, whole 99 and 400;
torch's `_int_mm` takes 21 and 6448."""


def integer_product(x: Tensor, weight: Tensor) -> Tensor:
    """[*B D] and [O D] of int8 to int32 [*B O], exact."""
    rows = x.reshape(-1, x.shape[-1])
    M, D, out = *rows.shape, weight.shape[0]
    if x.is_cuda and M and D and out and D % 8 == 0 and out % 8 == 0:
        # It wants more than 16 rows.
        padded = torch.cat([rows, rows.new_zeros(17 - M, D)]) if M < 17 else rows
        total = torch.ops.aten._int_mm(padded, weight.T)[:M]
    else:
        total = rows.new_zeros(M, out, dtype=torch.int32)
        parts = [part.float() for part in rows.split(EXACT, 1)]
        size = ROWS if x.device.type == "cpu" else max(out, 1)
        for sums, channels in zip(total.split(size, 1), weight.split(size), strict=True):
            for part, factor in zip(parts, channels.split(EXACT, 1), strict=True):
                sums += (part @ factor.float().T).to(torch.int32)
    return total.reshape(*x.shape[:-1], out)
