"""Kimi Delta Attention as pure functions over explicit state.

A stateful function takes the state first and returns `(new_state, output)`. Prefill is the function over a
prompt, decode the same function over one token; the loop, and the state, are yours.
"""

from kda_fn.distributed import (
    context_lengths,
    distributed_kda,
    distributed_kimi_delta_attention,
    distributed_kimi_linear,
    gather_heads,
    gather_states,
    join_heads,
    shard_heads,
)
from kda_fn.layers.attention_residual import (
    AttentionResidualParams,
    attention_residual,
    init_attention_residual,
)
from kda_fn.layers.kimi_delta_attention import init_kimi_delta_attention, init_state, kimi_delta_attention
from kda_fn.layers.kimi_linear import (
    KimiLinearBlock,
    KimiLinearConfig,
    KimiLinearParams,
    init_kimi_linear,
    init_kimi_linear_state,
    kimi_linear,
)
from kda_fn.layers.mla import MLAConfig, MLAParams, MLAState, init_mla, init_mla_state, mla
from kda_fn.layers.mlp import SwiGLUParams, init_swiglu, swiglu
from kda_fn.layers.moe import MoEConfig, MoEParams, init_moe, moe
from kda_fn.layers.sampling import decode_step, sample
from kda_fn.primitives._kernel import register_for_export as _register_for_export
from kda_fn.primitives._primitive import explain
from kda_fn.primitives.causal_conv1d import causal_conv1d
from kda_fn.primitives.gated_rms_norm import gated_rms_norm, residual_gated_rms_norm
from kda_fn.primitives.kda import kda, kda_step
from kda_fn.primitives.kda_gate import kda_gate
from kda_fn.primitives.l2_norm import l2_norm
from kda_fn.primitives.linear import linear, quantize, quantize_layer, quantize_tokens
from kda_fn.ragged import cu_seqlens_of, lengths_of, pack, pad
from kda_fn.scan import scan
from kda_fn.transition import (
    LayerTransition,
    Transition,
    apply_layer_transition,
    apply_transition,
    compose_transitions,
    identity_transition,
    kda_transition,
    layer_transition,
    parallel_kda,
)
from kda_fn.types import W8A8, KDAConfig, KDAParams, KDAState

__version__ = "0.1.0"

__all__ = [
    "W8A8",
    "AttentionResidualParams",
    "KDAConfig",
    "KDAParams",
    "KDAState",
    "KimiLinearBlock",
    "KimiLinearConfig",
    "KimiLinearParams",
    "LayerTransition",
    "MLAConfig",
    "MLAParams",
    "MLAState",
    "MoEConfig",
    "MoEParams",
    "SwiGLUParams",
    "Transition",
    "apply_layer_transition",
    "apply_transition",
    "attention_residual",
    "causal_conv1d",
    "compose_transitions",
    "context_lengths",
    "cu_seqlens_of",
    "decode_step",
    "distributed_kda",
    "distributed_kimi_delta_attention",
    "distributed_kimi_linear",
    "explain",
    "gated_rms_norm",
    "gather_heads",
    "gather_states",
    "identity_transition",
    "init_attention_residual",
    "init_kimi_delta_attention",
    "init_kimi_linear",
    "init_kimi_linear_state",
    "init_mla",
    "init_mla_state",
    "init_moe",
    "init_state",
    "init_swiglu",
    "join_heads",
    "kda",
    "kda_gate",
    "kda_step",
    "kda_transition",
    "kimi_delta_attention",
    "kimi_linear",
    "l2_norm",
    "layer_transition",
    "lengths_of",
    "linear",
    "mla",
    "moe",
    "pack",
    "pad",
    "parallel_kda",
    "quantize",
    "quantize_layer",
    "quantize_tokens",
    "residual_gated_rms_norm",
    "sample",
    "scan",
    "shard_heads",
    "swiglu",
]

_register_for_export(*(x for x in list(globals().values()) if isinstance(x, type) and hasattr(x, "_fields")))
