"""vllm-ascend's KDA operators. Contract: they have never run on an NPU here.

    sequences of up to 8 tokens    recurrent_kda: bfloat16, K = 128, states [slots HV V K], V first, in place
    longer ones                    kda_gate_cumsum, chunk_kda_fwd: only with a promised bound of the decay,
                                   for they clamp exponents to 80 about the middle of 16 tokens

    here                           there
    g, natural                     recurrent_kda: as it is; chunk_kda_fwd: float32 sums per chunk, by log2(e)
    *B and N                       one packed sequence after the other, empty ones left out, B = 1

Source: vllm-ascend's csrc/attention/recurrent_kda and csrc/attention/chunk_kda_fwd, and their users.
"""

from __future__ import annotations

from typing import Any

import torch

from kda_fn import ragged
from kda_fn.primitives._kernel import eager_inference_only
from kda_fn.primitives._targets import vendor_operator
from kda_fn.types import CuSeqlens, Float, Tensor

__all__ = ["kda", "kda_", "unsupported"]

DEVICE = "npu"
RECURRENT = "recurrent_kda"
CHUNKED = ("kda_gate_cumsum", "chunk_kda_fwd")
STEPS = 8
"""The most tokens of a sequence for recurrent_kda."""
CHUNK = 64


def unsupported(
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: CuSeqlens | None = None,
) -> str | None:
    """Why the operators cannot serve this call, or None."""
    if q.device.type != DEVICE:
        return f"{RECURRENT} and {CHUNKED[1]} run on {DEVICE} devices, these tensors are on {q.device}"
    reason = eager_inference_only(RECURRENT, q, initial_state, k, v, g, beta)
    if reason is not None:
        return reason
    if initial_state.dtype != torch.float32:
        return f"{RECURRENT} and {CHUNKED[1]} keep states in float32, not in {initial_state.dtype}"
    if not v.numel():
        return f"{RECURRENT} takes at least one token"
    T, _, K = q.shape[-3:]
    HV, V = v.shape[-2:]
    longest = T if cu_seqlens is None else max(ragged.lengths_of(cu_seqlens))
    if _is_recurrent(q, v, longest):
        return vendor_operator(RECURRENT)[1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{CHUNKED[1]} takes bfloat16 and float16, not {q.dtype}"
    if lower_bound is None:
        return f"{CHUNKED[1]} clamps exponents, which is right under a promised lower_bound alone"
    if HV > 128 or K % 16 or V % 16 or V > 256 or max(16384, 64 * (K + V)) > K * V:
        return (
            f"{CHUNKED[1]} takes HV <= 128, K and V that are multiples of 16, V <= 256 and K V at least "
            f"16384 and 64 (K + V), not HV = {HV}, K = {K}, V = {V}"
        )
    return vendor_operator(*CHUNKED)[1]


def _is_recurrent(q: Tensor, v: Tensor, longest: int) -> bool:
    sizes = q.dtype == torch.bfloat16 and q.shape[-1] == 128 and v.shape[-1] in (128, 256)
    return sizes and longest <= STEPS


def kda(
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[Float[Tensor, "*S HV K V"], Float[Tensor, "*B T HV V"]]:
    bounds = ragged.batch_bounds(cu_seqlens, v.shape[:-2])
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    states = initial_state.reshape(-1, *initial_state.shape[-3:])
    tokens: Any = (*(x.flatten(0, -3).contiguous() for x in (q, k, v, g)), beta.flatten(0, -2).contiguous())
    if _is_recurrent(q, v, max(ragged.lengths_of(bounds))):
        pool = states.mT.clone(memory_format=torch.contiguous_format)
        slots = torch.arange(len(pool), device=q.device)
        o = kda_(pool, slots, *tokens, scale=factor, bounds=bounds)
        states = pool.mT.contiguous()
    else:
        states, o = _chunked(states, *tokens, scale=factor, bounds=bounds)
    return states.view(initial_state.shape), o.view(v.shape)


def kda_(
    pool: Float[Tensor, "slots HV V K"],
    slots: Tensor,
    q: Float[Tensor, "T H K"],
    k: Float[Tensor, "T H K"],
    v: Float[Tensor, "T HV V"],
    g: Float[Tensor, "T HV K"],
    beta: Float[Tensor, "T HV"],
    *,
    scale: float,
    bounds: tuple[int, ...],
    accepted: Tensor | None = None,
) -> Float[Tensor, "T HV V"]:
    """For a serving loop: N packed sequences of up to 8 tokens, from and into the given slots of a pool, V
    first, which it overwrites. Every slot must be one of the pool: a row with another ends all later ones.

    slots [N]: of each sequence. Or [N S], to verify drafts: the state after token j goes into column j, and a
    sequence starts from column accepted - 1, accepted [N] being how many of its last step's tokens count.
    """
    kept, offsets = ragged.without_empty(bounds)
    rows = torch.tensor(kept, device=q.device)
    index = slots.index_select(0, rows)
    if index.ndim == 1:
        lengths = torch.tensor(ragged.lengths_of(offsets), device=q.device)
        index = index.repeat_interleave(lengths, output_size=offsets[-1])
    HV, K = g.shape[-2:]
    return vendor_operator(RECURRENT)[0](
        q,
        k,
        v,
        g.float(),
        beta.float(),
        pool,
        torch.tensor(offsets, dtype=torch.int32, device=q.device),
        index.int(),
        # Of a gate that is not asked for.
        torch.zeros(HV, device=q.device),
        torch.zeros(HV * K, device=q.device),
        num_accepted_tokens=None if accepted is None else accepted.index_select(0, rows).int(),
        scale=scale,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        safe_gate=False,
    )


def _chunked(
    states: Float[Tensor, "N HV K V"],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    bounds: tuple[int, ...],
) -> tuple[Float[Tensor, "N HV K V"], Float[Tensor, "T HV V"]]:
    kept, offsets = ragged.without_empty(bounds)
    index = torch.tensor(kept, device=q.device)
    packed = {"layout": "BSND", "cu_seqlens": list(offsets)}
    sums = vendor_operator(CHUNKED[0])[0](g.float().unsqueeze(0), CHUNK, **packed)
    chunks = [
        number
        for n, length in enumerate(ragged.lengths_of(offsets))
        for i in range(-(-length // CHUNK))
        for number in (n, i)
    ]
    o, after, *_ = vendor_operator(CHUNKED[1])[0](
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        sums,
        beta.float().unsqueeze(0),
        scale,
        CHUNK,
        initial_state=states.index_select(0, index).contiguous(),
        output_final_state=True,
        chunk_indices=chunks,
        **packed,
    )
    return states.index_copy(0, index, after), o.squeeze(0)
