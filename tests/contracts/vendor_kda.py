"""vllm-ascend's operators for KDA as documented, on the CPU, token by token in float64.

They refuse what the documentation does not allow, leave what they skip as it was or as NaN, and end as the
vendor's do: a row with a wrong slot ends all later ones. Sources: csrc/torch_binding.cpp of vllm-ascend, the
READMEs of its csrc/attention/recurrent_kda and chunk_kda_fwd, and their public users.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
STRONGEST = 6.9
"""Nat per token beyond which chunk_kda_fwd's clamp at 80, about the middle of 16 tokens, is felt."""


class RefusedError(AssertionError):
    """What the documentation does not allow."""


def demand(fits: bool, what: str) -> None:
    if not fits:
        raise RefusedError(what)


def _plain(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        demand(x.is_contiguous(), f"{name} must be contiguous")


def npu_causal_conv1d_custom(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    bias_opt: Tensor | None,
    query_start_loc_opt: Tensor | None,
    cache_indices_opt: Tensor | None,
    initial_state_mode_opt: Tensor | None,
    num_accepted_tokens_opt: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """x [T P], weight [W P], conv_state [lines W-1 P], overwritten; run_mode 0: prefill."""
    demand(x.ndim == 2 and x.dtype in HALVES, "x: [T channels], float16 or bfloat16")
    W, P = weight.shape
    demand(weight.dtype == x.dtype and x.shape[1] == P and 2 <= W <= 4, "weight: [2..4 channels], x's dtype")
    demand(conv_state.dtype == x.dtype and conv_state.shape[1:] == (W - 1, P), "conv_state: [lines W-1 P]")
    demand(output.shape == x.shape and output.dtype == x.dtype, "output: like x")
    _plain(x=x, weight=weight, conv_state=conv_state, output=output)
    demand(run_mode == 0 and activation_mode in (0, 1) and pad_slot_id == -1, "modes")
    demand(num_accepted_tokens_opt is None, "num_accepted_tokens belongs to run_mode 1")
    assert query_start_loc_opt is not None and cache_indices_opt is not None
    assert initial_state_mode_opt is not None
    for index in (query_start_loc_opt, cache_indices_opt, initial_state_mode_opt):
        demand(index.dtype == torch.int32 and index.ndim == 1, "indices: int32")
    offsets, slots = query_start_loc_opt.tolist(), cache_indices_opt.tolist()
    demand(len(offsets) == len(slots) + 1 == len(initial_state_mode_opt) + 1, "one index a sequence")
    demand(offsets[0] == 0 and offsets[-1] == len(x), "query_start_loc: from 0 to T")
    demand(all(a < b for a, b in pairwise(offsets)), "query_start_loc: no empty sequence")
    result = output.clone()
    # What was passed may be functionalised away.
    output.fill_(math.nan)
    for (start, stop), slot, mode in zip(
        pairwise(offsets), slots, initial_state_mode_opt.tolist(), strict=True
    ):
        if slot == pad_slot_id:
            continue
        demand(0 <= slot < len(conv_state), "cache_indices: a line of conv_state")
        before = conv_state[slot] if mode else torch.zeros_like(conv_state[slot])
        rows = torch.cat([before, x[start:stop]])
        for t in range(start, stop):
            y = (rows[t - start : t - start + W].double() * weight.double()).sum(0)
            if bias_opt is not None:
                y = y + bias_opt.double()
            result[t] = (y / (1 + (-y).exp()) if activation_mode else y).to(x.dtype)
        conv_state[slot] = rows[-(W - 1) :]
    return result


def kda_gate_cumsum(
    g: Tensor,
    chunk_size: int,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: list[int] | None = None,
    use_gate_in_kernel: bool | None = False,
    safe_gate: bool | None = False,
    lower_bound: float | None = -5.0,
    layout: str = "BSND",
) -> Tensor:
    """Of gates [1 T HV K] the sums from each chunk's start in its sequence, times log2(e)."""
    demand(g.dtype == torch.float32 and g.ndim == 4 and len(g) == 1, "g: float32 [1 T HV K]")
    demand(chunk_size == 64 and layout == "BSND" and not use_gate_in_kernel and not safe_gate, "modes")
    demand(A_log is None and dt_bias is None, "A_log and dt_bias belong to the gate in the kernel")
    _plain(g=g)
    sums = torch.full_like(g, math.nan)
    for start, stop in pairwise(cu_seqlens or [0, g.shape[1]]):
        for at in range(start, stop, chunk_size):
            piece = slice(at, min(at + chunk_size, stop))
            sums[:, piece] = (g[:, piece].double().cumsum(1) / math.log(2)).float()
    return sums


def chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    beta: Tensor,
    scale: float,
    chunk_size: int,
    layout: str = "BSND",
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    cu_seqlens: list[int] | None = None,
    chunk_indices: list[int] | None = None,
    return_intermediate: bool | None = False,
    safe_gate: bool | None = False,
    transpose_state_layout: bool | None = False,
) -> tuple[Tensor, ...]:
    """gk: of `kda_gate_cumsum`. The first two results are o and the final states."""
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    demand(q.dtype == k.dtype == v.dtype and q.dtype in HALVES, "q, k, v: float16 or bfloat16")
    demand(gk.dtype == beta.dtype == torch.float32, "gk, beta: float32")
    demand(k.shape == q.shape and v.shape[:2] == (B, T), "q, k [B T H K], v [B T HV V]")
    demand(gk.shape == (B, T, HV, K) and beta.shape == (B, T, HV), "gk [B T HV K], beta [B T HV]")
    demand(HV % H == 0 and HV <= 128, "H divides HV <= 128")
    demand(K % 16 == V % 16 == 0 and V <= 256 and max(16384, 64 * (K + V)) <= K * V, "K and V")
    demand(chunk_size == 64 and layout == "BSND" and not safe_gate and not transpose_state_layout, "modes")
    demand(not return_intermediate and bool(output_final_state), "modes")
    assert cu_seqlens is not None and chunk_indices is not None and initial_state is not None
    demand(B == 1 and cu_seqlens[0] == 0 and cu_seqlens[-1] == T, "packed: B = 1, cu_seqlens from 0 to T")
    demand(all(a < b for a, b in pairwise(cu_seqlens)), "empty sequences are to be compacted away")
    pairs = list(zip(chunk_indices[::2], chunk_indices[1::2], strict=True))
    lengths = [b - a for a, b in pairwise(cu_seqlens)]
    demand(pairs == [(n, i) for n, length in enumerate(lengths) for i in range(-(-length // 64))], "chunks")
    N = len(lengths)
    demand(initial_state.shape == (N, HV, K, V) and initial_state.dtype == torch.float32, "initial_state")
    _plain(q=q, k=k, v=v, gk=gk, beta=beta, initial_state=initial_state)
    o, final = torch.full_like(v, math.nan), torch.empty_like(initial_state)
    for n, (start, stop) in enumerate(pairwise(cu_seqlens)):
        S = initial_state[n].double()
        for t in range(start, stop):
            first = (t - start) % 64 == 0
            g = gk[0, t].double() - (0 if first else gk[0, t - 1].double())
            demand(bool((g * math.log(2) >= -STRONGEST).all()), "a decay that the clamp would change")
            S = _token(S, q[0, t], k[0, t], v[0, t], torch.exp2(g), beta[0, t])
            o[0, t] = _read(S, q[0, t], scale).to(v.dtype)
        final[n] = S.float()
    return (o, final, *(q.new_empty(0) for _ in range(10)))


def recurrent_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_accepted_tokens: Tensor | None = None,
    scale: float = 128**-0.5,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = True,
    lower_bound: float = -5.0,
) -> Tensor:
    """Packed sequences [T ..], states [slots HV V K] in place; an index for every token [T], or by sequence
    [N steps]: then token t of it leaves its state in column t, and it starts from column accepted - 1."""
    (T, H, K), (HV, V) = query.shape, value.shape[1:]
    demand(query.dtype == key.dtype == value.dtype == torch.bfloat16, "query, key, value: bfloat16")
    demand(K == 128 and V in (128, 256) and HV % H == 0, "K = 128, V = 128 or 256")
    demand(gate.shape == (T, HV, K) and beta.shape == (T, HV), "gate [T HV K], beta [T HV]")
    demand(initial_state.dtype in (torch.float32, torch.bfloat16), "state: float32 or bfloat16")
    demand(initial_state.shape[1:] == (HV, V, K), "state: [slots HV V K], V first")
    demand(cu_seqlens.dtype == ssm_state_indices.dtype == torch.int32, "indices: int32")
    by_row = ssm_state_indices.ndim == 2
    demand(by_row or ssm_state_indices.shape == (T,), "indices: one a token, or [N steps]")
    demand(by_row == (num_accepted_tokens is not None), "num_accepted_tokens goes with [N steps]")
    demand(A_log.shape == (HV,) and A_log.dtype == torch.float32, "A_log: float32 [HV]")
    demand(dt_bias.shape == (HV * K,) and dt_bias.dtype == torch.float32, "dt_bias: float32 [HV K]")
    demand(not (use_qk_l2norm_in_kernel or use_gate_in_kernel or use_beta_sigmoid_in_kernel), "modes")
    demand(not allow_neg_eigval and not safe_gate, "modes")
    _plain(query=query, key=key, value=value, gate=gate, beta=beta, initial_state=initial_state)
    offsets, slots = cu_seqlens.tolist(), ssm_state_indices.tolist()
    demand(offsets[0] == 0 and offsets[-1] == T, "cu_seqlens: from 0 to T")
    o = torch.full_like(value, math.nan)
    accepted = None
    if num_accepted_tokens is not None:
        demand(num_accepted_tokens.dtype == torch.int32, "num_accepted_tokens: int32")
        accepted = num_accepted_tokens.tolist()
    for n, (start, stop) in enumerate(pairwise(offsets)):
        demand(stop - start <= 8, "at most 8 tokens a sequence")
        if stop == start:
            continue
        of_row = slots[n][: stop - start] if by_row else slots[start:stop]
        if accepted is not None and not 1 <= accepted[n] <= len(slots[n]):
            break
        first = of_row[0] if accepted is None else slots[n][accepted[n] - 1]
        if not all(0 <= slot < len(initial_state) for slot in (first, *of_row)) or len(of_row) < stop - start:
            break
        S = initial_state[first].double().mT
        for t, slot in zip(range(start, stop), of_row, strict=True):
            S = _token(S, query[t], key[t], value[t], gate[t].double().exp(), beta[t])
            o[t] = _read(S, query[t], scale).to(value.dtype)
            initial_state[slot] = S.mT.to(initial_state.dtype)
    return o


def _token(S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    heads = len(decay) // len(k)
    k = k.double().repeat_interleave(heads, 0)
    S = S * decay.unsqueeze(-1)
    d = beta.double().unsqueeze(-1) * (v.double() - torch.einsum("hk,hkv->hv", k, S))
    return S + k.unsqueeze(-1) * d.unsqueeze(-2)


def _read(S: Tensor, q: Tensor, scale: float) -> Tensor:
    q = q.double().repeat_interleave(len(S) // len(q), 0)
    return scale * torch.einsum("hk,hkv->hv", q, S)


SCHEMAS = {
    npu_causal_conv1d_custom: "(Tensor(a!) output, Tensor x, Tensor weight, Tensor(b!) conv_state, "
    "Tensor? bias_opt, Tensor? query_start_loc_opt, Tensor? cache_indices_opt, "
    "Tensor? initial_state_mode_opt, Tensor? num_accepted_tokens_opt, int activation_mode, int pad_slot_id, "
    "int run_mode) -> Tensor",
    kda_gate_cumsum: "(Tensor g, int chunk_size, *, Tensor? A_log=None, Tensor? dt_bias=None, "
    "int[]? cu_seqlens=None, bool? use_gate_in_kernel=False, bool? safe_gate=False, float? lower_bound=-5.0, "
    'str layout="BSND") -> Tensor',
    chunk_kda_fwd: "(Tensor q, Tensor k, Tensor v, Tensor gk, Tensor beta, float scale, int chunk_size, "
    'str layout="BSND", *, Tensor? initial_state=None, bool? output_final_state=False, '
    "int[]? cu_seqlens=None, int[]? chunk_indices=None, bool? return_intermediate=False, "
    "bool? safe_gate=False, bool? transpose_state_layout=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor)",
    recurrent_kda: "(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, "
    "Tensor(a!) initial_state, Tensor cu_seqlens, Tensor ssm_state_indices, Tensor A_log, Tensor dt_bias, *, "
    "Tensor? num_accepted_tokens=None, float scale, bool use_qk_l2norm_in_kernel=True, "
    "bool use_gate_in_kernel=True, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "bool safe_gate=True, float lower_bound=-5.0) -> Tensor",
}


def register() -> Any:
    """The operators under their names, for as long as the result is kept."""
    library = torch.library.Library("_C_ascend", "FRAGMENT")
    for operator, schema in SCHEMAS.items():
        library.define(operator.__name__ + schema)
        library.impl(operator.__name__, operator, "CPU")
    return library
