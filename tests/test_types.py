"""Configs, parameters and states: their sizes, their first values, and where they may be kept."""

from __future__ import annotations

import copy
import io
import math
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from kda_fn import (
    KDAConfig,
    KDAParams,
    KDAState,
    KimiLinearConfig,
    init_kimi_delta_attention,
    init_kimi_linear,
    init_kimi_linear_state,
    init_state,
    init_swiglu,
    kimi_delta_attention,
)

PLAIN = KDAConfig(hidden_size=24, num_heads=3, head_dim=5)
UNEVEN = KDAConfig(
    hidden_size=24,
    num_heads=2,
    head_dim=5,
    num_v_heads=6,
    head_v_dim=7,
    conv_size=3,
    lower_bound=-5.0,
    output_gate="full_rank",
    allow_neg_eigval=True,
    norm_eps=1e-6,
    chunk_size=16,
)
LARGE = KDAConfig(hidden_size=400, num_heads=100, head_dim=8)
"""Large enough for statistics of the weights."""
MANY = KDAConfig(hidden_size=2, num_heads=100, head_dim=80, head_v_dim=1)
"""Large enough for statistics of the decay: 8000 channels."""
LM = KimiLinearConfig(
    vocab_size=50, layer_types=("kda",) * 3, intermediate_size=40, tie_embeddings=True, kda=PLAIN
)


def seeded(seed: int = 0) -> torch.Generator:
    """A generator at a known start."""
    return torch.Generator().manual_seed(seed)


def shapes(tree: Any) -> Any:
    """The tree's shapes in place of its tensors."""
    return optree.tree_map(lambda x: tuple(x.shape), tree)


def leaves(tree: Any) -> list[Tensor]:
    """The tree's tensors."""
    return optree.tree_leaves(tree)


# KDAConfig


@pytest.mark.parametrize(
    ("config", "letters"),
    [
        (PLAIN, {"D": 24, "H": 3, "HV": 3, "K": 5, "V": 5, "W": 4, "P": 45}),
        (UNEVEN, {"D": 24, "H": 2, "HV": 6, "K": 5, "V": 7, "W": 3, "P": 62}),
        (replace(PLAIN, num_v_heads=9), {"D": 24, "H": 3, "HV": 9, "K": 5, "V": 5, "W": 4, "P": 75}),
        (replace(PLAIN, head_v_dim=2), {"D": 24, "H": 3, "HV": 3, "K": 5, "V": 2, "W": 4, "P": 36}),
        (replace(PLAIN, conv_size=1), {"D": 24, "H": 3, "HV": 3, "K": 5, "V": 5, "W": 1, "P": 45}),
    ],
)
def test_letters(config: KDAConfig, letters: dict[str, int]) -> None:
    """Every size by its letter; P is q, k and v side by side."""
    assert {letter: getattr(config, letter) for letter in letters} == letters
    assert config.P == 2 * config.H * config.K + config.HV * config.V


def test_defaults() -> None:
    """The choices of Kimi-Linear."""
    assert asdict(PLAIN) == {
        "hidden_size": 24,
        "num_heads": 3,
        "head_dim": 5,
        "num_v_heads": None,
        "head_v_dim": None,
        "conv_size": 4,
        "lower_bound": None,
        "output_gate": "low_rank",
        "allow_neg_eigval": False,
        "norm_eps": 1e-5,
        "chunk_size": 64,
    }


@pytest.mark.parametrize(("config", "field"), [(PLAIN, "num_heads"), (LM, "vocab_size")])
def test_configs_are_values(config: Any, field: str) -> None:
    """Frozen, compared and hashed by what they hold: a dict's key, a static argument."""
    same = replace(config)
    other = replace(config, **{field: getattr(config, field) + 1})
    assert same is not config and same == config and hash(same) == hash(config)
    assert other != config
    assert len({config, same, other}) == 2
    with pytest.raises(FrozenInstanceError):
        setattr(config, field, 1)
    with pytest.raises((AttributeError, TypeError)):
        config.unheard_of = 1
    assert pickle.loads(pickle.dumps(config)) == config and copy.deepcopy(config) == config


# Shapes and dtypes of parameters and states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_low_rank_parameters(dtype: torch.dtype) -> None:
    """Kimi-Linear's: both gates through as many channels as a head has."""
    params = init_kimi_delta_attention(replace(PLAIN, head_v_dim=7), generator=seeded(), dtype=dtype)
    assert shapes(params)._asdict() == {
        "qkv": (51, 24),
        "conv": (51, 4),
        "gates": (5 + 3 + 7, 24),
        "decay": (15, 5),
        "A_log": (3,),
        "dt_bias": (15,),
        "output_gate": (21, 7),
        "output_gate_bias": (0,),
        "norm": (7,),
        "out": (24, 21),
    }
    check_dtypes(params, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_full_rank_parameters(dtype: torch.dtype) -> None:
    """Kimi K3's: the output gate is one matrix."""
    params = init_kimi_delta_attention(UNEVEN, generator=seeded(), dtype=dtype)
    assert shapes(params)._asdict() == {
        "qkv": (62, 24),
        "conv": (62, 3),
        "gates": (5 + 6 + 42, 24),
        "decay": (30, 5),
        "A_log": (6,),
        "dt_bias": (30,),
        "output_gate": (0,),
        "output_gate_bias": (0,),
        "norm": (7,),
        "out": (24, 42),
    }
    check_dtypes(params, dtype)


def check_dtypes(params: KDAParams, dtype: torch.dtype) -> None:
    """The convolution and the gate's own parameters are float32 at least, all else is as asked."""
    wide = torch.promote_types(dtype, torch.float32)
    for name, part in params._asdict().items():
        for leaf in leaves(part):
            assert leaf.dtype == (wide if name in ("conv", "A_log", "dt_bias") else dtype), name
            assert leaf.isfinite().all(), name
            assert leaf.is_contiguous() and not leaf.requires_grad, name


@pytest.mark.parametrize("config", [PLAIN, UNEVEN])
@pytest.mark.parametrize("batch_shape", [(), (2,), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states(config: KDAConfig, batch_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The window in the layer's dtype, the memory in float32 at least; nothing remembered yet."""
    state = init_state(config, batch_shape, dtype=dtype)
    assert type(state) is KDAState
    assert state.conv_state.shape == (*batch_shape, config.W - 1, config.P)
    assert state.recurrent_state.shape == (*batch_shape, config.HV, config.K, config.V)
    assert state.conv_state.dtype == dtype
    assert state.recurrent_state.dtype == torch.promote_types(dtype, torch.float32)
    assert all(x.eq(0).all() for x in state)


@pytest.mark.parametrize("config", [PLAIN, UNEVEN, replace(PLAIN, conv_size=1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_init_and_apply_fit(config: KDAConfig, dtype: torch.dtype) -> None:
    """What init makes, the layer takes; the new state is like the old, and something comes out."""
    params = init_kimi_delta_attention(config, generator=seeded(), dtype=dtype)
    state = init_state(config, (2,), dtype=dtype)
    x = torch.randn(2, 3, config.D, generator=seeded(1), dtype=torch.float64).to(dtype)
    new_state, y = kimi_delta_attention(params, state, x, config=config)
    assert y.shape == x.shape and y.dtype == dtype and y.isfinite().all() and y.abs().max() > 0
    assert shapes(new_state) == shapes(state)
    assert [leaf.dtype for leaf in new_state] == [leaf.dtype for leaf in state]
    assert new_state.recurrent_state.abs().max() > 0


def test_no_leaf_is_missing() -> None:
    """None has no gradient and no shape: what is absent has shape [0]."""
    for config in (PLAIN, UNEVEN):
        params: Any = init_kimi_delta_attention(config, generator=seeded())
        assert all(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(params, none_is_leaf=True))


# First values


def check_uniform(values: Tensor, low: float, high: float) -> None:
    """All in [low, high], the whole range used, evenly."""
    unit = (values.double() - low) / (high - low)
    n = unit.numel()
    assert unit.min() >= -1e-5 and unit.max() <= 1 + 1e-5
    assert unit.min() < 10 / n and unit.max() > 1 - 10 / n
    # The mean of n draws from [0, 1] deviates by 1/sqrt(12 n); the share below 1/4 by sqrt(3/16 n).
    assert (unit.mean() - 0.5).abs() < 5 / math.sqrt(12 * n)
    assert ((unit < 0.25).double().mean() - 0.25).abs() < 5 * math.sqrt(3 / 16 / n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decay_of_the_softplus_gate(dtype: torch.dtype) -> None:
    """exp(A_log) is U(1, 16), softplus(dt_bias) log-uniform in [1e-3, 0.1]."""
    params = init_kimi_delta_attention(MANY, generator=seeded(), dtype=dtype)
    assert params.A_log.min() >= 0 and params.A_log.max() <= math.log(16)
    check_uniform(params.A_log.exp(), 1, 16)
    check_uniform(F.softplus(params.dt_bias.double()).log(), math.log(1e-3), math.log(0.1))


@pytest.mark.parametrize("output_gate", ["low_rank", "full_rank"])
def test_decay_of_the_bounded_gate(output_gate: Any) -> None:
    """A_log is 0, dt_bias as with the other gate."""
    config = replace(MANY, lower_bound=-5.0, output_gate=output_gate)
    params = init_kimi_delta_attention(config, generator=seeded())
    assert params.A_log.shape == (100,) and params.A_log.eq(0).all()
    check_uniform(F.softplus(params.dt_bias.double()).log(), math.log(1e-3), math.log(0.1))


def test_scale_of_the_weights() -> None:
    """N(0, 1/inputs), the convolution U(-1, 1)/sqrt(W), norms at 1."""
    for config in (LARGE, replace(LARGE, output_gate="full_rank")):
        params: Any = init_kimi_delta_attention(config, generator=seeded())
        matrices = [params.qkv, params.gates, params.decay, params.out]
        for weight in [*matrices, *([params.output_gate] if config.output_gate == "low_rank" else [])]:
            n = weight.numel()
            scaled = weight * weight.shape[1] ** 0.5
            assert (scaled.std() - 1).abs() < 5 / math.sqrt(2 * n)
            assert scaled.mean().abs() < 5 / math.sqrt(n)
            assert scaled.abs().max() > 3, "normal, not uniform"
        check_uniform(params.conv, -0.5, 0.5)
        assert params.norm.eq(1).all()


def test_scale_of_the_model() -> None:
    """Projections back into the stream are smaller by 1/sqrt(2 num_layers)."""
    config = KimiLinearConfig(
        vocab_size=300, layer_types=("kda",) * 3, intermediate_size=300, tie_embeddings=True, kda=LARGE
    )
    params: Any = init_kimi_linear(config, generator=seeded())
    assert params.embedding.shape == (300, 400) and len(params.blocks) == 3
    for block in params.blocks:
        for weight in (block.attention.out, block.mlp.down):
            scaled = weight * (6 * weight.shape[1]) ** 0.5
            assert (scaled.std() - 1).abs() < 5 / math.sqrt(2 * weight.numel())
        for weight in (block.attention.qkv, block.mlp.gate, block.mlp.up):
            scaled = weight * weight.shape[1] ** 0.5
            assert (scaled.std() - 1).abs() < 5 / math.sqrt(2 * weight.numel())
        assert block.attention_norm.eq(1).all() and block.mlp_norm.eq(1).all()
    assert params.norm.eq(1).all()
    assert not torch.equal(params.blocks[0].attention.qkv, params.blocks[1].attention.qkv)


INITS: dict[str, Any] = {
    "layer": lambda **keywords: init_kimi_delta_attention(PLAIN, **keywords),
    "uneven layer": lambda **keywords: init_kimi_delta_attention(UNEVEN, **keywords),
    "swiglu": lambda **keywords: init_swiglu(24, 40, **keywords),
    "lm": lambda **keywords: init_kimi_linear(LM, **keywords),
}


@pytest.mark.parametrize("init", INITS)
def test_draws_are_reproducible(init: str) -> None:
    """A generator at one start gives one set of parameters; it advances, and another gives another."""
    generator = seeded()
    first = leaves(INITS[init](generator=generator))
    second = leaves(INITS[init](generator=generator))
    again = leaves(INITS[init](generator=seeded()))
    other = leaves(INITS[init](generator=seeded(1)))
    assert all(map(torch.equal, first, again))
    for a, b, c in zip(first, second, other, strict=True):
        constant = a.numel() == 0 or bool(a.eq(a.flatten()[0]).all())
        assert constant or not (torch.equal(a, b) or torch.equal(a, c) or torch.equal(b, c))
    assert not all(map(torch.equal, first, second))


@pytest.mark.parametrize("init", INITS)
def test_draws_use_the_generator_alone(init: str) -> None:
    """With a generator the global one is left as it is; without one it is used."""
    before = torch.get_rng_state()
    INITS[init](generator=seeded())
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = leaves(INITS[init]())
        torch.manual_seed(0)
        again = leaves(INITS[init]())
        following = leaves(INITS[init]())
    assert all(map(torch.equal, first, again)) and not all(map(torch.equal, first, following))


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_do_not_depend_on_the_dtype(init: str, dtype: torch.dtype) -> None:
    """One seed is one model: drawn in float32, kept in the dtype."""
    narrow = leaves(INITS[init](generator=seeded(), dtype=dtype))
    full = leaves(INITS[init](generator=seeded()))
    for a, b in zip(narrow, full, strict=True):
        eps = max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(a.double(), b.double(), rtol=2 * eps, atol=0)


@pytest.mark.parametrize("init", INITS)
def test_no_memory_is_shared(init: str) -> None:
    """Training one weight moves no other."""
    places = [leaf.data_ptr() for leaf in leaves(INITS[init](generator=seeded())) if leaf.numel()]
    assert len(set(places)) == len(places)
    places = [leaf.data_ptr() for leaf in leaves(init_kimi_linear_state(LM, (2,)))]
    assert len(set(places)) == len(places) == 6


def test_devices() -> None:
    """Shapes without memory, where that is asked for."""
    for tree in (
        init_state(UNEVEN, (2,), device="meta"),
        init_kimi_linear_state(LM, (2,), device="meta"),
        init_kimi_delta_attention(UNEVEN, device="meta"),
        init_kimi_linear(LM, device="meta"),
    ):
        assert all(leaf.is_meta for leaf in leaves(tree))
    assert shapes(init_kimi_linear(LM, device="meta")) == shapes(init_kimi_linear(LM))


# Trees


def trees() -> dict[str, Any]:
    """Everything that may be kept or sent."""
    return {
        "state": optree.tree_map(lambda x: x + 1, init_state(PLAIN, (2,))),  # pyright: ignore[reportArgumentType]
        "low rank": init_kimi_delta_attention(PLAIN, generator=seeded()),
        "full rank": init_kimi_delta_attention(UNEVEN, generator=seeded()),
        "swiglu": init_swiglu(24, 40, generator=seeded()),
        "lm": init_kimi_linear(LM, generator=seeded()),
        "lm state": init_kimi_linear_state(LM, (2,)),
    }


def saved_and_loaded(tree: Any) -> Any:
    """Through a file that may hold nothing but weights."""
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", trees())
@pytest.mark.parametrize(
    "through", [saved_and_loaded, copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))]
)
def test_trees_can_be_kept(name: str, through: Any) -> None:
    """The same types and the same numbers come back, in memory of their own."""
    tree = trees()[name]
    back = through(tree)
    assert type(back) is type(tree)
    assert optree.tree_structure(back) == optree.tree_structure(tree)
    for a, b in zip(leaves(back), leaves(tree), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
        assert a.numel() == 0 or a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("name", trees())
def test_both_pytree_libraries_agree(name: str) -> None:
    """torch.func sees the leaves that optree sees, in their order."""
    tree = trees()[name]
    theirs = pytree.tree_leaves(tree)
    assert len(theirs) == len(leaves(tree)) > 0
    assert all(a is b for a, b in zip(theirs, leaves(tree), strict=True))
