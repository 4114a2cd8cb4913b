"""Kimi Delta Attention as pure functions over explicit state.

A stateful function takes the state first and returns `(new_state, output)`. Prefill is the function over a
prompt, decode the same function over one token; the loop, and the state, are yours.
"""

from kda_fn.layers.kda_lm import KDALMConfig, KDALMParams, init_kda_lm, init_kda_lm_state, kda_lm
from kda_fn.layers.kimi_delta_attention import init_kimi_delta_attention, init_state, kimi_delta_attention
from kda_fn.layers.mlp import SwiGLUParams, init_swiglu, swiglu
from kda_fn.primitives._primitive import explain
from kda_fn.primitives.causal_conv1d import causal_conv1d
from kda_fn.primitives.gated_rms_norm import gated_rms_norm, residual_gated_rms_norm
from kda_fn.primitives.kda import kda, kda_step
from kda_fn.primitives.kda_gate import kda_gate
from kda_fn.primitives.l2_norm import l2_norm
from kda_fn.ragged import cu_seqlens_of, lengths_of, pack, pad
from kda_fn.scan import scan
from kda_fn.types import KDAConfig, KDAParams, KDAState, LowRank

__version__ = "0.1.0"

__all__ = [
    "KDAConfig",
    "KDALMConfig",
    "KDALMParams",
    "KDAParams",
    "KDAState",
    "LowRank",
    "SwiGLUParams",
    "causal_conv1d",
    "cu_seqlens_of",
    "explain",
    "gated_rms_norm",
    "init_kda_lm",
    "init_kda_lm_state",
    "init_kimi_delta_attention",
    "init_state",
    "init_swiglu",
    "kda",
    "kda_gate",
    "kda_lm",
    "kda_step",
    "kimi_delta_attention",
    "l2_norm",
    "lengths_of",
    "pack",
    "pad",
    "residual_gated_rms_norm",
    "scan",
    "swiglu",
]
