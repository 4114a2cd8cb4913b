"""Every primitive and the layer once more, in float64 torch, from the equations alone.

Written to share nothing with the library: Python loops over batch rows, heads and tokens, explicit [K, K]
transition matrices, windows by index. Signatures are the library's, without `impl` and `chunk_size`; all
arguments are taken to float64 and all results are float64. Nothing is written in place, so that each oracle
can be differentiated to any order and stands under every transform.

    KDA          S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T   o_t = scale S_t^T q_t
    convolution  y_t = act(Σ_i weight[:, i] (state, x)[t + i] + bias)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kda_fn.types import KDAConfig, KDAParams, KDAState

__all__ = [
    "causal_conv1d",
    "fused_kda",
    "gated_rms_norm",
    "kda",
    "kda_gate",
    "kda_step",
    "kimi_delta_attention",
    "l2_norm",
    "residual_gated_rms_norm",
]

Pair = tuple[Tensor, Tensor]


def kda(
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Pair:
    """(final_state, o) of the recurrence, one head and one token at a time."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def sequence(state: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, v: Tensor) -> Pair:
        group = state.shape[0] // q.shape[1]
        heads = [
            _kda_head(state[h], q[:, h // group], k[:, h // group], v[:, h], g[:, h], beta[:, h], factor)
            for h in range(state.shape[0])
        ]
        states, outputs = zip(*heads, strict=True)
        return torch.stack(states), torch.stack(outputs, 1)

    # The values come last: they have the shape of the output.
    inputs = ((q, 3), (k, 3), (g, 3), (beta, 2), (v, 3))
    return _each_sequence(sequence, (initial_state, 3), inputs, cu_seqlens)


def kda_step(
    state: Tensor,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    g_t: Tensor,
    beta_t: Tensor,
    *,
    scale: float | None = None,
) -> Pair:
    """(state, o_t) of one token."""
    q, k, v, g = (x.unsqueeze(-3) for x in (q_t, k_t, v_t, g_t))
    state, o = kda(state, q, k, v, g, beta_t.unsqueeze(-2), scale=scale)
    return state, o.squeeze(-3)


def _kda_head(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Pair:
    """One head of one sequence: S [K V], q, k, g [T K], v [T V], beta [T]."""
    eye = torch.eye(k.shape[-1], dtype=torch.float64, device=k.device)
    outputs = []
    for t in range(k.shape[0]):
        write = beta[t] * torch.outer(k[t], v[t])
        S = (eye - beta[t] * torch.outer(k[t], k[t])) @ torch.diag(g[t].exp()) @ S + write
        outputs.append(scale * (S.T @ q[t]))
    return S, torch.stack(outputs) if outputs else v.new_zeros(v.shape)


def causal_conv1d(
    conv_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: Sequence[int] | None = None,
) -> Pair:
    """(conv_state, y): each output the explicit dot of the taps with its window."""
    taps, W = weight.double(), weight.shape[-1]

    def sequence(state: Tensor, x: Tensor) -> Pair:
        T = x.shape[0]
        rows = [*state.unbind(0), *x.unbind(0)]
        outputs = []
        for t in range(T):
            y = sum((taps[:, i] * rows[t + i] for i in range(W)), torch.zeros_like(taps[:, 0]))
            y = y if bias is None else y + bias.double()
            outputs.append(y * _sigmoid(y) if activation == "silu" else y)
        last = rows[len(rows) - (W - 1) :]
        return (
            torch.stack(last) if last else state.new_zeros(state.shape),
            torch.stack(outputs) if outputs else x.new_zeros(x.shape),
        )

    return _each_sequence(sequence, (conv_state, 2), ((x, 2),), cu_seqlens)


def kda_gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None = None) -> Tensor:
    """The log decay, head by head; softplus(x) is x above 20."""
    HV, K = raw.shape[-2:]
    bias = dt_bias.double().reshape(HV, K)
    heads = []
    for h in range(HV):
        logits = raw.double()[..., h, :] + bias[h]
        rate = A_log.double()[h].exp() if A_log.shape[-1] else torch.ones_like(bias[h, 0])
        if lower_bound is None:
            softplus = torch.log1p(logits.clamp(max=20.0).exp())
            heads.append(-rate * torch.where(logits > 20, logits, softplus))
        else:
            heads.append(lower_bound * _sigmoid(rate * logits))
    return torch.stack(heads, -2)


def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps)."""
    x = x.double()
    return x / (torch.einsum("...f,...f->...", x, x) + eps).sqrt().unsqueeze(-1)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, *, eps: float, activation: str = "sigmoid"
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight · act(gate)."""
    x, gate = x.double(), gate.double()
    mean = torch.einsum("...f,...f->...", x, x) / x.shape[-1]
    y = x / (mean + eps).sqrt().unsqueeze(-1)
    y = y if weight is None else y * weight.double()
    return y * _sigmoid(gate) * (gate if activation == "silu" else 1)


def residual_gated_rms_norm(
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    activation: str = "sigmoid",
) -> Pair:
    """(residual + x, its gated norm)."""
    total = residual.double() + x.double()
    return total, gated_rms_norm(total, gate, weight, eps=eps, activation=activation)


def fused_kda(
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    eps: float = 1e-6,
    scale: float | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Pair:
    """(final_state, o): unit vectors, gates and betas, then KDA."""
    q, k = l2_norm(q, eps=eps), l2_norm(k, eps=eps)
    g = kda_gate(raw, A_log, dt_bias, lower_bound=lower_bound)
    beta = (2 if allow_neg_eigval else 1) * _sigmoid(beta.double())
    return kda(initial_state, q, k, v, g, beta, scale=scale, cu_seqlens=cu_seqlens)


def kimi_delta_attention(
    params: KDAParams,
    state: KDAState,
    x: Tensor,
    *,
    config: KDAConfig,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[KDAState, Tensor]:
    """The layer, assembled from the oracles above."""
    H, HV, K, V = config.H, config.HV, config.K, config.V
    x = x.double()
    channels = _linear(params.qkv, x)
    conv_state, channels = causal_conv1d(state.conv_state, channels, params.conv, cu_seqlens=cu_seqlens)
    q, k = (channels[..., n * H * K : (n + 1) * H * K].reshape(*x.shape[:-1], H, K) for n in range(2))
    v = channels[..., 2 * H * K :].reshape(*x.shape[:-1], HV, V)

    R = params.decay.shape[1]
    others = _linear(params.gates, x)
    raw = _linear(params.decay, others[..., :R]).reshape(*x.shape[:-1], HV, K)
    recurrent_state, o = fused_kda(
        state.recurrent_state,
        q,
        k,
        v,
        raw,
        others[..., R : R + HV],
        params.A_log,
        params.dt_bias,
        lower_bound=config.lower_bound,
        allow_neg_eigval=config.allow_neg_eigval,
        cu_seqlens=cu_seqlens,
    )
    gate = others[..., R + HV :]
    if config.output_gate == "low_rank":
        gate = _linear(params.output_gate, gate)
        if params.output_gate_bias.numel():
            gate = gate + params.output_gate_bias.double()
    gate = gate.reshape(*x.shape[:-1], HV, V)
    o = gated_rms_norm(o, gate, params.norm, eps=config.norm_eps)
    return KDAState(conv_state, recurrent_state), _linear(params.out, o.reshape(*x.shape[:-1], HV * V))


def _each_sequence(
    function: Callable[..., Pair],
    state: tuple[Tensor, int],
    inputs: tuple[tuple[Tensor, int], ...],
    cu_seqlens: Sequence[int] | None,
) -> Pair:
    """`function(state, *inputs)` for every batch row, and there for every packed sequence.

    Each tensor comes with the number of axes that one sequence has; what comes before them is batch. The last
    input has the shape of the output, which is what an empty batch returns.
    """
    packing = 0 if cu_seqlens is None else 1
    batch = inputs[0][0].shape[: inputs[0][0].ndim - inputs[0][1]]
    states = _rows(state[0], state[1] + packing)
    rows = [_rows(x, axes) for x, axes in inputs]
    new_states, outputs = [], []
    for b in range(len(states)):
        row = [x[b] for x in rows]
        if cu_seqlens is None:
            new_state, output = function(states[b], *row)
        else:
            pieces = [
                function(states[b][n], *(x[start:stop] for x in row))
                for n, (start, stop) in enumerate(pairwise(cu_seqlens))
            ]
            new_state = torch.stack([piece[0] for piece in pieces])
            output = torch.cat([piece[1] for piece in pieces])
        new_states.append(new_state)
        outputs.append(output)
    if not outputs:
        return state[0].double(), inputs[-1][0].double()
    return (
        torch.stack(new_states).reshape(*batch, *new_states[0].shape),
        torch.stack(outputs).reshape(*batch, *outputs[0].shape),
    )


def _rows(x: Tensor, axes: int) -> list[Tensor]:
    """The batch axes, all before the last `axes`, flattened into a list."""
    batch = x.shape[: x.ndim - axes]
    return list(x.double().reshape(batch.numel(), *x.shape[x.ndim - axes :]).unbind(0))


def _linear(weight: Any, x: Tensor) -> Tensor:
    return torch.einsum("oi,...i->...o", weight.double(), x)


def _sigmoid(x: Tensor) -> Tensor:
    return (1 + torch.tanh(x / 2)) / 2
