"""The KDA layer.

    q|k|v = silu(conv(W_qkv x))                         one projection, one convolution, split once
    f|b|z = W_gates x                                   a second projection for all else
    q, k  = q / |q|, k / |k|                            per head
    g     = gate(W_f f)                                 [HV K], log decay
    beta  = sigmoid(b), or 2 sigmoid(b)                 [HV]
    S, o  = kda(S, q, k, v, g, beta)
    y     = W_o (rms_norm(o) · sigmoid(W_z z))          per head; a full-rank gate is z itself

    x, y [*B T D]   conv_state [*B W-1 P]   recurrent_state [*B HV K V]

Source: Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda_fn import _check, ragged
from kda_fn.layers.mlp import normal_weight
from kda_fn.primitives._primitive import check_impl
from kda_fn.primitives.causal_conv1d import causal_conv1d
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.primitives.gated_rms_norm import gated_rms_norm
from kda_fn.primitives.linear import linear
from kda_fn.types import CuSeqlens, Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

__all__ = [
    "LayerInputs",
    "apply_kda_layer",
    "check_layer",
    "check_params_and_state",
    "check_shapes_and_dtypes",
    "heads_of",
    "init_kimi_delta_attention",
    "init_state",
    "kimi_delta_attention",
    "layer_inputs",
    "memory_options",
]


def kimi_delta_attention(
    params: KDAParams,
    state: KDAState,
    x: Float[Tensor, "*B T D"],
    *,
    config: KDAConfig,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[KDAState, Float[Tensor, "*B T D"]]:
    """One KDA layer over T tokens, T >= 0: prefill, training, verification and decode are all this call.

    Parameters
    ----------
    params : of `init_kimi_delta_attention`, or loaded in its layout.
    state : of `init_state`, or returned by an earlier call. With cu_seqlens its fields carry N.
    x : [*B T D], in the dtype of the weights.
    config : the sizes and choices.
    cu_seqlens : [N+1], T then holds N packed sequences (`kda_fn.ragged`).
    impl : for every primitive of the layer; None picks the best for each.

    Returns
    -------
    state, y : the state after the last token, new tensors, and [*B T D] in x's dtype.

    Raises ValueError or TypeError for an argument that does not fit, before any work; NotImplementedError for
    a named impl that cannot serve.

    >>> config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> params, x = init_kimi_delta_attention(config), torch.randn(5, 8)
    >>> state, _ = kimi_delta_attention(params, init_state(config), x[:4], config=config)  # prefill
    >>> state, y = kimi_delta_attention(params, state, x[4:], config=config)  # decode
    >>> _, whole = kimi_delta_attention(params, init_state(config), x, config=config)
    >>> torch.allclose(y[0], whole[4], atol=1e-5)
    True
    """
    cu_seqlens = check_layer("kimi_delta_attention", params, state, x, config, cu_seqlens, impl)
    return apply_kda_layer(params, state, x, config, cu_seqlens, impl)


def apply_kda_layer(
    params: KDAParams,
    state: KDAState,
    x: Float[Tensor, "*B T D"],
    config: KDAConfig,
    cu_seqlens: tuple[int, ...] | None,
    impl: Impl | None,
    *,
    conv: Callable[..., tuple[Tensor, Tensor]] | None = None,
    memory: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[KDAState, Float[Tensor, "*B T D"]]:
    """`kimi_delta_attention` of what has been checked; `conv` and `memory` stand in for `causal_conv1d` and
    `fused_kda`, the two that reach from token to token."""
    inputs = layer_inputs(params, x, config, impl)
    conv = conv or causal_conv1d
    conv_state, qkv = conv(state.conv_state, inputs.qkv, params.conv, cu_seqlens=cu_seqlens, impl=impl)
    q, k, v = heads_of(qkv, config)
    memory = memory or fused_kda
    recurrent_state, o = memory(
        state.recurrent_state,
        q,
        k,
        v,
        inputs.raw,
        inputs.beta,
        params.A_log,
        params.dt_bias,
        cu_seqlens=cu_seqlens,
        **memory_options(config, impl),
    )
    gate = inputs.gate
    if config.output_gate == "low_rank":
        bias = params.output_gate_bias if params.output_gate_bias.numel() else None
        gate = linear(gate, params.output_gate, bias, impl=impl)
    gate = gate.unflatten(-1, (config.HV, config.V))
    o = gated_rms_norm(o, gate, params.norm, eps=config.norm_eps, impl=impl)
    y = linear(o.flatten(-2), params.out, impl=impl)
    return KDAState(conv_state, recurrent_state), y.to(x.dtype)


class LayerInputs(NamedTuple):
    """What a layer projects from x, token by token."""

    qkv: Float[Tensor, "*B T P"]
    """Before the convolution."""
    raw: Float[Tensor, "*B T HV K"]
    """Logits of the decay."""
    beta: Float[Tensor, "*B T HV"]
    """Before its sigmoid."""
    gate: Float[Tensor, "*B T G"]
    """Logits of the output gate, or the channels of its low rank."""


def layer_inputs(
    params: KDAParams, x: Float[Tensor, "*B T D"], config: KDAConfig, impl: Impl | None
) -> LayerInputs:
    """The projections of x: all of the layer's but those of what these make."""
    # Under autocast a projection leaves x's dtype; the state must not.
    qkv = linear(x, params.qkv, impl=impl).to(x.dtype)
    R = params.decay.shape[1]
    decay, beta, gate = linear(x, params.gates, impl=impl).tensor_split([R, R + config.HV], -1)
    raw = linear(decay, params.decay, impl=impl).unflatten(-1, (config.HV, config.K))
    return LayerInputs(qkv, raw, beta, gate)


def heads_of(qkv: Float[Tensor, "*B T P"], config: KDAConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v by heads."""
    H, HV, K, V = config.H, config.HV, config.K, config.V
    q, k, v = qkv.split([H * K, H * K, HV * V], -1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def memory_options(config: KDAConfig, impl: Impl | None) -> dict[str, Any]:
    """The options of the layer's `fused_kda`, but its packing."""
    return {
        "lower_bound": config.lower_bound,
        "allow_neg_eigval": config.allow_neg_eigval,
        "chunk_size": config.chunk_size,
        "impl": impl,
    }


def init_kimi_delta_attention(
    config: KDAConfig,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> KDAParams:
    """Parameters of one layer, drawn in float32 whatever `dtype` they are kept in.

    Weights are N(0, 1/inputs), the convolution U(-1, 1)/sqrt(W). A_log is log U(1, 16), or 0 with the bounded
    gate; dt_bias the inverse softplus of a log-uniform draw from [1e-3, 0.1], at least 1e-4. The convolution,
    A_log and dt_bias stay float32 (float64 where dtype is).

    >>> params = init_kimi_delta_attention(KDAConfig(hidden_size=8, num_heads=1, head_dim=4))
    >>> params.qkv.shape, params.conv.shape  # q, k and v are merged
    (torch.Size([12, 8]), torch.Size([12, 4]))
    """
    _check.float_dtype("init_kimi_delta_attention", dtype)
    D, HV, K, V, W, P = (getattr(config, letter) for letter in "D HV K V W P".split())
    wide = torch.promote_types(dtype, torch.float32)

    def weight(outputs: int, inputs: int) -> Tensor:
        return normal_weight(outputs, inputs, generator=generator, dtype=dtype, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float32, device=device)

    none = torch.zeros(0, dtype=dtype, device=device)
    low_rank = config.output_gate == "low_rank"
    dt = torch.exp(math.log(1e-3) + uniform(HV * K) * math.log(0.1 / 1e-3)).clamp(min=1e-4)
    A = 1 + 15 * uniform(HV)
    return KDAParams(
        qkv=weight(P, D),
        conv=((2 * uniform(P, W) - 1) * W**-0.5).to(wide),
        gates=weight(K + HV + (V if low_rank else HV * V), D),
        decay=weight(HV * K, K),
        A_log=(A.log() if config.lower_bound is None else torch.zeros_like(A)).to(wide),
        dt_bias=(dt + torch.log(-torch.expm1(-dt))).to(wide),
        output_gate=weight(HV * V, V) if low_rank else none,
        output_gate_bias=none,
        norm=torch.ones(V, dtype=dtype, device=device),
        out=weight(D, HV * V),
    )


def init_state(
    config: KDAConfig,
    batch_shape: tuple[int, ...] = (),
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> KDAState:
    """The state before the first token: zeros. `dtype` is the layer's; the memory is float32 at least.

    >>> state = init_state(KDAConfig(hidden_size=8, num_heads=1, head_dim=4), (3,), dtype=torch.bfloat16)
    >>> state.conv_state.shape, state.recurrent_state.shape, state.recurrent_state.dtype
    (torch.Size([3, 3, 12]), torch.Size([3, 1, 4, 4]), torch.float32)
    """
    _check.float_dtype("init_state", dtype)
    _check.batch_shape("init_state", batch_shape)
    wide = torch.promote_types(dtype, torch.float32)
    return KDAState(
        torch.zeros(*batch_shape, config.W - 1, config.P, dtype=dtype, device=device),
        torch.zeros(*batch_shape, config.HV, config.K, config.V, dtype=wide, device=device),
    )


def check_layer(
    caller: str,
    params: KDAParams,
    state: KDAState,
    x: Tensor,
    config: KDAConfig,
    cu_seqlens: CuSeqlens | None,
    impl: Impl | None,
) -> tuple[int, ...] | None:
    """That all arguments of the layer belong together; returns cu_seqlens, read once for what follows."""
    _check.instance(caller, "config", config, KDAConfig)
    check_params_and_state(caller, params, state)
    _check.floating(caller, {"x": x, **_check.leaves("params", params), **_check.leaves("state", state)})
    if x.ndim < 2 or x.shape[-1] != config.D:
        raise ValueError(f"{caller}: x has shape {tuple(x.shape)}, expected [*B T D] with D={config.D}")
    if cu_seqlens is not None:
        cu_seqlens = ragged.offsets(cu_seqlens, x.shape[-2])
    check_shapes_and_dtypes(caller, params, state, config, "x", x, x.shape[:-1], cu_seqlens)
    check_impl(caller, impl)
    return cu_seqlens


def check_params_and_state(
    caller: str, params: object, state: object, names: tuple[str, str] = ("params", "state")
) -> None:
    """That the two are trees of the right kind; what their leaves are is for `_check.floating`."""
    _check.instance(caller, names[0], params, KDAParams)
    _check.instance(caller, names[1], state, KDAState)


def check_shapes_and_dtypes(
    caller: str,
    params: KDAParams,
    state: KDAState,
    config: KDAConfig,
    input_name: str,
    input_like: Tensor,
    rows: tuple[int, ...],
    cu_seqlens: CuSeqlens | None,
    names: tuple[str, str] = ("params", "state"),
) -> None:
    """That shapes and dtypes fit the config and an input of `rows` = (*B, T) that is like `input_like`."""
    p, s = names
    D, HV, K, V, W, P = (getattr(config, letter) for letter in "D HV K V W P".split())
    *B, T = rows
    N = () if cu_seqlens is None else (len(ragged.offsets(cu_seqlens, T)) - 1,)
    if cu_seqlens is not None and state.conv_state.shape == (*B, *state.conv_state.shape[-3:-2], W - 1, P):
        n = state.conv_state.shape[-3]
        ragged.check_packing(caller, cu_seqlens, T=T, N=n, state_name=f"{s}.conv_state")
    if state.conv_state.shape[:-2] != (*B, *N):
        raise ValueError(
            f"{caller}: {s}.conv_state has shape {tuple(state.conv_state.shape)}, expected "
            f"{(*B, *N, W - 1, P)}: for this {input_name} the state's batch_shape is {(*B, *N)}"
        )
    low_rank = config.output_gate == "low_rank"
    R, G = (w.shape[1] if w.ndim == 2 else 0 for w in (params.decay, params.output_gate))
    G = G if low_rank else HV * V
    biased = low_rank and params.output_gate_bias.numel() > 0
    no_A_log = config.lower_bound is not None and params.A_log.shape == (0,)
    _check.exact_shapes(
        caller,
        {
            f"{s}.conv_state": (state.conv_state, (*B, *N, W - 1, P)),
            f"{s}.recurrent_state": (state.recurrent_state, (*B, *N, HV, K, V)),
            f"{p}.qkv": (params.qkv, (P, D)),
            f"{p}.decay": (params.decay, (HV * K, R)),
            f"{p}.output_gate": (params.output_gate, (HV * V, G) if low_rank else (0,)),
            f"{p}.output_gate_bias": (params.output_gate_bias, (HV * V if biased else 0,)),
            f"{p}.gates": (params.gates, (R + HV + G, D)),
            f"{p}.conv": (params.conv, (P, W)),
            f"{p}.A_log": (params.A_log, (0 if no_A_log else HV,)),
            f"{p}.dt_bias": (params.dt_bias, (HV * K,)),
            f"{p}.norm": (params.norm, (V,)),
            f"{p}.out": (params.out, (D, HV * V)),
        },
    )
    own_dtype = f"{p}.conv", f"{p}.A_log", f"{p}.dt_bias", f"{p}.norm"
    alike = {name: x for name, x in _check.leaves(p, params).items() if name not in own_dtype}
    _check.same_dtype(caller, {input_name: input_like, f"{s}.conv_state": state.conv_state, **alike})
    _check.state_dtype(
        caller,
        {
            input_name: input_like,
            f"{p}.dt_bias": params.dt_bias,
            f"{s}.recurrent_state": state.recurrent_state,
        },
    )
