"""torch_npu's `npu_dynamic_quant` and `npu_quant_matmul`. Contract: they have never run on an NPU.

    tokens, s = npu_dynamic_quant(x)                                      x [m D] -> int8 [m D], float32 [m]
    y = npu_quant_matmul(tokens, weight^T, scale, pertoken_scale=s)       weight^T [D O] is a view

How the first rounds halves, and what it makes of infinities and NaN, is not documented: a row may differ from
`reference.py`'s by single steps. Sources: torch_npu's documentation of the two (7.0 and 7.3).
"""

from __future__ import annotations

import torch

from kda_fn.primitives._kernel import eager_inference_only
from kda_fn.primitives._targets import lacks
from kda_fn.types import W8A8, Float, Tensor

DEVICE = "npu"
OPERATORS = ("npu_dynamic_quant", "npu_quant_matmul")
LONGEST = 65535
"""Of the last axis of both factors of npu_quant_matmul."""


def unsupported(x: Tensor, weight: Tensor | W8A8, bias: Tensor | None = None) -> str | None:
    """Why the operators cannot serve this call, or None."""
    if isinstance(weight, Tensor):
        return "a floating weight is torch's own product"
    if x.device.type != DEVICE:
        return f"{' and '.join(OPERATORS)} run on npu devices, these tensors are on {x.device}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"npu_dynamic_quant takes bfloat16 and float16, not {x.dtype}"
    if weight.scale.dtype != torch.float32:
        return f"npu_quant_matmul takes a scale in float32, not in {weight.scale.dtype}"
    longest = max(weight.shape)
    if longest > LONGEST:
        return f"npu_quant_matmul takes axes of up to {LONGEST}, not {longest}"
    if not weight.weight.is_contiguous():
        return "npu_quant_matmul reads the weight as [in, out], the transpose of a contiguous [out, in]"
    return eager_inference_only(OPERATORS[0], x, weight.scale, bias) or lacks(*OPERATORS)


def linear(
    x: Float[Tensor, "*B D"],
    weight: Float[Tensor, "O D"] | W8A8,
    bias: Float[Tensor, " O"] | None = None,
) -> Float[Tensor, "*B O"]:
    import torch_npu  # pyright: ignore[reportMissingImports]

    assert isinstance(weight, W8A8)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.numel() or not weight.weight.numel():
        y = x.new_zeros(*x.shape[:-1], weight.shape[0])
    else:
        tokens, s = torch_npu.npu_dynamic_quant(rows)
        y = torch_npu.npu_quant_matmul(
            tokens, weight.weight.T, weight.scale.contiguous(), pertoken_scale=s, output_dtype=x.dtype
        )
        y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias
