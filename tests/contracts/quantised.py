"""torch_npu's `npu_dynamic_quant` and `npu_quant_matmul` as documented, on the CPU: what W8A8 needs of them.

It refuses what the documentation does not allow. Sources: torch_npu 7.0's documentation of the two operators.
"""

from __future__ import annotations

import torch
from torch import Tensor


def npu_dynamic_quant(
    x: Tensor, /, *, smooth_scales: None = None, group_index: None = None, dst_type: None = None
) -> tuple[Tensor, Tensor]:
    """y = round(x / scale), scale = rowMax(|x|) / 127: int8 like x, and float32 without the last axis."""
    assert smooth_scales is None and group_index is None and dst_type is None
    assert x.dtype in (torch.float16, torch.bfloat16), "x: float16, bfloat16"
    assert x.ndim > 1, "x must have more than one axis"
    assert x.numel() > 0
    wide = x.double()
    scale = (wide.abs().max(-1).values / 127).float()
    steps = wide / scale.double().clamp(min=1e-300).unsqueeze(-1)
    return steps.round().to(torch.int8), scale


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: None = None,
    pertoken_scale: Tensor | None = None,
    bias: None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """(x1 @ x2) · scale · pertoken_scale; x1 [m k], x2 [k n], scale [n], pertoken_scale [m]."""
    assert offset is None and bias is None
    assert x1.dtype == x2.dtype == torch.int8, "x1, x2: int8"
    assert x1.ndim == x2.ndim == 2 and x1.shape[1] == x2.shape[0]
    assert x1.is_contiguous(), "x1 must be contiguous"
    assert x2.is_contiguous() or x2.T.is_contiguous(), "x2: contiguous, or the transpose of what is"
    assert max(*x1.shape[1:], *x2.shape) <= 65535
    assert all(x1.shape) and all(x2.shape)
    assert pertoken_scale is not None and pertoken_scale.dtype == torch.float32
    assert pertoken_scale.shape == x1.shape[:1] and pertoken_scale.is_contiguous()
    assert scale.shape == x2.shape[1:] and scale.is_contiguous()
    allowed = {torch.bfloat16: (torch.float32, torch.bfloat16), torch.float16: (torch.float32,)}
    assert output_dtype in allowed, "output_dtype with pertoken_scale: bfloat16, float16"
    assert scale.dtype in allowed[output_dtype]
    total = (x1.long().unsqueeze(1) * x2.T.long()).sum(-1)
    return (total.double() * scale.double() * pertoken_scale.double().unsqueeze(1)).to(output_dtype)
