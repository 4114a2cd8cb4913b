"""What is between a KDA layer's convolution and its output norm, in the launches of KDA alone.

KDA's kernels make unit vectors, gates and beta of what they read (`Gate`). Their backward gives the gradients
of the unit vectors, which the l2 normalisation's takes further, one launch for q and one for k; and those of
A_log and dt_bias by channel and chunk, which are summed over the chunks, and A_log's then over its channels.
"""

from __future__ import annotations

from math import prod

import torch

from kda_fn.primitives.kda.kernels import Call, Gate
from kda_fn.primitives.kernels import readable, sum_of_parts
from kda_fn.primitives.l2_norm.kernels import launch_l2_norm_backward
from kda_fn.types import Tensor

__all__ = ["launch_fused_kda", "launch_fused_kda_backward"]


def launch_fused_kda(
    outputs: tuple[Tensor, ...],
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    eps: float,
    scale: float | None,
    chunk_size: int,
    cu_seqlens: tuple[int, ...] | None,
) -> None:
    final_state, o = outputs
    if final_state.numel() or o.numel():
        gate = _gate(A_log, dt_bias, lower_bound, allow_neg_eigval, eps)
        Call(initial_state, q, k, v, raw, beta, scale, cu_seqlens, gate).forward(final_state, o)


def launch_fused_kda_backward(
    gradients: tuple[Tensor, ...],
    d_final_state: Tensor,
    d_o: Tensor,
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    eps: float,
    scale: float | None,
    chunk_size: int,
    cu_seqlens: tuple[int, ...] | None,
    rows: int,
) -> None:
    if not (d_final_state.numel() or d_o.numel()):
        for gradient in gradients:
            gradient.zero_()
        return
    *d_inputs, d_A_log, d_dt_bias = gradients
    gate = _gate(A_log, dt_bias, lower_bound, allow_neg_eigval, eps)
    call = Call(initial_state, q, k, v, raw, beta, scale, cu_seqlens, gate)
    sums = call.backward(d_final_state, d_o, tuple(d_inputs))
    # In place: a row is read before it is written. In half precision the unit vectors' gradients are rounded
    # once more for it, and need no memory of their own.
    for x, dx in ((q, d_inputs[1]), (k, d_inputs[2])):
        launch_l2_norm_backward((dx,), dx, x, eps=eps, rows=rows)
    assert sums is not None
    HV, K = raw.shape[-2:]
    parts = torch.stack([x.movedim(1, 2) for x in sums], 2)
    total = sum_of_parts(parts.view(prod(q.shape[:rows]), -1, 2 * HV * K))
    of_rate, of_bias = total.unflatten(-1, (2, HV, K)).unbind(1)
    d_dt_bias.copy_(of_bias.reshape(d_dt_bias.shape))
    if len(A_log):
        d_A_log.copy_(sum_of_parts(of_rate.mT.contiguous()).view(d_A_log.shape))


def _gate(
    A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, allow_neg_eigval: bool, eps: float
) -> Gate:
    return Gate(readable(A_log), readable(dt_bias), lower_bound, 2.0 if allow_neg_eigval else 1.0, eps)
