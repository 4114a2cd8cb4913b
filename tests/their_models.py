"""Small random `KimiLinearForCausalLM` of transformers, saved as they save them: the oracle of the hybrid
model."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
K, M = "linear_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    # Their cache does not serve a model of KDA layers alone.
    "MLA last, dense": {"layer_types": [K, K, M], "mlp_layer_types": ["dense"] * 3},
    "MLA alone, experts": {"layer_types": [M, M], "mlp_layer_types": ["sparse"] * 2},
    "three to one": {
        "layer_types": [K, K, K, M],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "MLA first, queries of low rank": {
        "layer_types": [M, K],
        "mlp_layer_types": ["sparse", "dense"],
        "q_lora_rank": 7,
    },
    "groups of experts": {
        "layer_types": [K, M],
        "mlp_layer_types": ["sparse", "sparse"],
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.3,
    },
    "two shared experts, weights as they are": {
        "layer_types": [K, M, K],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "linear_conv_kernel_dim": 3,
        "rms_norm_eps": 1e-3,
    },
}


def their_model(name: str) -> Any:
    """The model, its parameters far enough from their initial values that each of them matters.

    The decays stay about as initialised: at T = 200 theirs lose digits of stronger ones, 3e-5 from float64.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modeling = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
        layers = len(MODELS[name]["layer_types"])
        config = modeling.KimiLinearConfig(**{**SIZES, "num_hidden_layers": layers, **MODELS[name]})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = modeling.KimiLinearForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for key, x in tensors.items():
        noise = torch.randn(x.shape, generator=generator)
        if "A_log" in key or "dt_bias" in key:
            x.data += 0.1 * noise
        else:
            x.data = float("norm" in key) + (0.3 if x.ndim == 1 else x.shape[-1] ** -0.5) * noise
    return model


def saved(model: Any, folder: Path) -> Path:
    """The folder, with the model saved by transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder
