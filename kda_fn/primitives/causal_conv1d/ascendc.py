"""vllm-ascend's `npu_causal_conv1d_custom`. Contract: it has never run on an NPU here.

    here                       there
    conv_state [N W-1 P]       conv_state, lines that it overwrites: copies of ours
    weight [P W]               weight [W P], in x's dtype
    sequences                  query_start_loc, cache_indices; empty ones are left out

Source: vllm-ascend's csrc/torch_binding.cpp and its users.
"""

from __future__ import annotations

import torch

from kda_fn import ragged
from kda_fn.primitives._kernel import eager_inference_only
from kda_fn.primitives._targets import vendor_operator
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["causal_conv1d", "causal_conv1d_", "packed_weight", "unsupported"]

DEVICE = "npu"
OPERATOR = "npu_causal_conv1d_custom"
WIDTHS = (2, 3, 4)
NO_SLOT = -1
PREFILL = 0


def unsupported(
    conv_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: CuSeqlens | None = None,
) -> str | None:
    """Why the operator cannot serve this call, or None."""
    if x.device.type != DEVICE:
        return f"{OPERATOR} runs on {DEVICE} devices, these tensors are on {x.device}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"{OPERATOR} takes bfloat16 and float16, not {x.dtype}"
    if weight.shape[1] not in WIDTHS:
        return f"{OPERATOR} takes a width of 2, 3 or 4, not {weight.shape[1]}"
    if not x.numel():
        return f"{OPERATOR} takes at least one token"
    reason = eager_inference_only(OPERATOR, x, conv_state, weight, bias)
    return reason or vendor_operator(OPERATOR)[1]


def causal_conv1d(
    conv_state: Float[Tensor, "*S W_1 P"],
    x: Float[Tensor, "*B T P"],
    weight: Float[Tensor, "P W"],
    bias: Float[Tensor, " P"] | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[Float[Tensor, "*S W_1 P"], Float[Tensor, "*B T P"]]:
    bounds = ragged.batch_bounds(cu_seqlens, x.shape[:-1])
    lines = conv_state.reshape(-1, *conv_state.shape[-2:]).clone(memory_format=torch.contiguous_format)
    slots = torch.arange(len(lines), device=x.device)
    y = causal_conv1d_(
        lines, slots, x.flatten(0, -2), packed_weight(weight, x), bias, bounds=bounds, activation=activation
    )
    return lines.view(conv_state.shape), y.view(x.shape)


def packed_weight(weight: Float[Tensor, "P W"], x: Tensor) -> Float[Tensor, "W P"]:
    """The weight as the operator reads it: a serving loop makes it once."""
    return weight.T.to(x.dtype).contiguous()


def causal_conv1d_(
    lines: Float[Tensor, "slots W_1 P"],
    slots: Tensor,
    x: Float[Tensor, "T P"],
    packed: Float[Tensor, "W P"],
    bias: Float[Tensor, " P"] | None = None,
    *,
    bounds: tuple[int, ...],
    activation: str | None = "silu",
) -> Float[Tensor, "T P"]:
    """For a serving loop: N packed sequences from and into the given slots of a pool, which it overwrites.

    A sequence whose slot is -1 is skipped, and comes out as zeros.
    """
    operator = vendor_operator(OPERATOR)[0]
    kept, offsets = ragged.without_empty(bounds)
    index = slots.index_select(0, torch.tensor(kept, device=x.device)).int()
    # Zeros, for what is skipped is not written; and the result is what is returned, not what was passed.
    return operator(
        torch.zeros_like(x, memory_format=torch.contiguous_format),
        x.contiguous(),
        packed,
        conv_state=lines,
        bias_opt=None if bias is None else bias.to(x.dtype).contiguous(),
        query_start_loc_opt=torch.tensor(offsets, dtype=torch.int32, device=x.device),
        cache_indices_opt=index,
        initial_state_mode_opt=torch.ones(len(kept), dtype=torch.int32, device=x.device),
        num_accepted_tokens_opt=None,
        activation_mode=int(activation == "silu"),
        pad_slot_id=NO_SLOT,
        run_mode=PREFILL,
    )
