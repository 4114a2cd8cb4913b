"""The layer against transformers' two independent KDA layers, prefill, decode and gradients.

Their arithmetic is float32 throughout, so 1e-5 is what can be asked.
"""

from __future__ import annotations

import importlib
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from laws import assert_close
from subjects import IMPLS
from torch import Tensor

import kda_fn
from kda_fn import KDAConfig, KDAParams
from kda_fn.types import Impl

D, H, K = 24, 3, 8


def their_layer(family: str) -> tuple[Any, Any]:
    """A layer of theirs with random parameters, and a cache for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache_utils = importlib.import_module("transformers.cache_utils")
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        sizes = {
            "hidden_size": D,
            "linear_num_heads": H,
            "linear_head_dim": K,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        }
        if family == "kimi_linear":
            config = modeling.KimiLinearConfig(**sizes)
            layer = modeling.KimiLinearDeltaAttention(config, 0)
        else:
            config = modeling.Glm5NextTextConfig(**sizes, linear_lower_bound=-5.0)
            layer = modeling.Glm5NextTextLinearAttention(config, 0)
        cache = cache_utils.DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        scale = 0.3 if "A_log" in name or "dt_bias" in name else D**-0.5
        offset = 1.0 if "o_norm" in name else 0.0
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    return layer, cache


def our_params(layer: torch.nn.Module) -> KDAParams:
    """Their parameters in our layout."""
    p = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    return KDAParams(
        qkv=torch.cat([p[f"{n}_proj.weight"] for n in "qkv"]),
        conv=p["conv1d.weight"].squeeze(1),
        gates=torch.cat([p[f"{n}_proj.weight"] for n in ("forget_gate.f_a", "b", "g_a")]),
        decay=p["forget_gate.f_b_proj.weight"],
        A_log=p["forget_gate.A_log"].reshape(H),
        dt_bias=p["forget_gate.dt_bias"],
        output_gate=p["g_b_proj.weight"],
        output_gate_bias=torch.zeros(0),
        norm=p["o_norm.weight"],
        out=p["o_proj.weight"],
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("family", "lower_bound"), [("kimi_linear", None), ("glm5_next", -5.0)])
def test_prefill_decode_and_gradients(family: str, lower_bound: float | None, impl: Impl) -> None:
    layer, cache = their_layer(family)
    config = KDAConfig(
        hidden_size=D, num_heads=H, head_dim=K, lower_bound=lower_bound, norm_eps=layer.layer_norm_epsilon
    )
    params = our_params(layer)
    x = torch.randn(2, 75, D, generator=torch.Generator().manual_seed(1))

    def ours(x: Tensor) -> Tensor:
        return kda_fn.kimi_delta_attention(
            params, kda_fn.init_state(config, (2,)), x, config=config, impl=impl
        )[1]

    slopes = []
    for function in (ours, layer):
        tracked = x.clone().requires_grad_()
        y = function(tracked)
        slopes.append([y.detach(), *torch.autograd.grad(y.square().sum(), [tracked])])
    assert_close(slopes[0], slopes[1], 1e-5)

    state = kda_fn.init_state(config, (2,))
    cuts = [0, 70, *range(71, 76)]
    with torch.no_grad():
        for start, stop in pairwise(cuts):
            expected = layer(x[:, start:stop], cache=cache)
            state, y = kda_fn.kimi_delta_attention(params, state, x[:, start:stop], config=config, impl=impl)
            assert_close([y], [expected], 1e-5)
