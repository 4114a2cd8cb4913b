"""jaxtyping's import hook checks every annotation of the library while every public function runs.

A hook must be installed before the library is imported. So the calls are made in an interpreter of their own,
which prints what came of each; the tests read that.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import kda_fn
from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    MLAConfig,
    MoEConfig,
    apply_layer_transition,
    apply_transition,
    attention_residual,
    causal_conv1d,
    compose_transitions,
    context_lengths,
    cu_seqlens_of,
    decode_step,
    distributed_kda,
    distributed_kimi_delta_attention,
    distributed_kimi_linear,
    explain,
    gated_rms_norm,
    gather_heads,
    gather_states,
    identity_transition,
    init_attention_residual,
    init_kimi_delta_attention,
    init_kimi_linear,
    init_kimi_linear_state,
    init_mla,
    init_mla_state,
    init_moe,
    init_state,
    init_swiglu,
    join_heads,
    kda,
    kda_gate,
    kda_step,
    kda_transition,
    kimi_delta_attention,
    kimi_linear,
    l2_norm,
    layer_transition,
    lengths_of,
    linear,
    mla,
    moe,
    pack,
    pad,
    parallel_kda,
    quantize,
    quantize_layer,
    quantize_tokens,
    residual_gated_rms_norm,
    sample,
    scan,
    shard_heads,
    swiglu,
)
from kda_fn.primitives.fused_kda import fused_kda

H, HV, K, V, W, P, F, D = 2, 4, 3, 5, 4, 6, 7, 8
CONFIG = KDAConfig(
    hidden_size=D, num_heads=H, head_dim=K, num_v_heads=HV, head_v_dim=V, conv_size=W, chunk_size=4
)
CONFIGS = {
    "plain": CONFIG,
    "bounded": KDAConfig(
        hidden_size=D,
        num_heads=H,
        head_dim=K,
        lower_bound=-5.0,
        output_gate="full_rank",
        allow_neg_eigval=True,
        chunk_size=2,
    ),
}
MLA = MLAConfig(
    hidden_size=D,
    num_heads=2,
    head_dim=3,
    shared_dim=2,
    head_v_dim=4,
    latent_dim=5,
    query_rank=6,
    output_gate=True,
)
MOE = MoEConfig(
    hidden_size=D,
    num_experts=6,
    experts_per_token=2,
    intermediate_size=4,
    shared_size=3,
    num_groups=3,
    topk_groups=2,
    latent_size=5,
    latent_norm=True,
    situ=(4.0, 25.0),
)
LM = KimiLinearConfig(
    vocab_size=11,
    layer_types=("kda", "mla", "kda"),
    mlp_types=("dense", "moe", "dense"),
    intermediate_size=9,
    kda=CONFIG,
    mla=MLA,
    moe=MOE,
    residual_block=2,
)

BATCHES: list[tuple[int, ...]] = [(), (2,), (3, 1)]
LENGTHS = [0, 1, 2, 9]
"""None, one token, half a chunk, more than two chunks."""
PACKINGS: dict[str, list[int]] = {
    "none": [],
    "one": [3],
    "some": [2, 0, 5, 1],
    "empty": [0, 0],
    "long": [1, 9, 9],
}
IMPLS: list[Any] = [None, "reference", "fallback"]

CASES: dict[str, Callable[[], Any]] = {}
"""Name of a call -> the call, which returns its results."""
CALLED: set[str] = set()
"""Public functions that some case has called."""


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a public function and takes note of it."""
    CALLED.add(function.__name__)
    return function(*args, **kwargs)


def case(name: str, function: Callable[[], Any]) -> None:
    """Adds a case."""
    assert name not in CASES
    CASES[name] = function


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positive numbers."""
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)


def run_kda(
    batch: tuple[int, ...],
    T: int,
    lengths: list[int],
    impl: Any,
    dtype: torch.dtype = torch.float32,
    **keywords: Any,
) -> Any:
    """kda on made-up inputs; with lengths, packed."""
    wide = torch.promote_types(dtype, torch.float32)
    N = (len(lengths),) if lengths else ()
    if lengths:
        keywords["cu_seqlens"] = cu_seqlens_of(lengths)
    return called(
        kda,
        rand(*batch, *N, HV, K, V, dtype=wide),
        rand(*batch, T, H, K, dtype=dtype),
        rand(*batch, T, H, K, dtype=dtype),
        rand(*batch, T, HV, V, dtype=dtype),
        -rand(*batch, T, HV, K, dtype=wide),
        rand(*batch, T, HV, dtype=wide) / 2,
        impl=impl,
        chunk_size=4,
        **keywords,
    )


def run_fused(batch: tuple[int, ...], T: int, lengths: list[int], impl: Any, **keywords: Any) -> Any:
    """fused_kda on made-up inputs; with lengths, packed."""
    N = (len(lengths),) if lengths else ()
    return fused_kda(
        rand(*batch, *N, HV, K, V),
        rand(*batch, T, H, K),
        rand(*batch, T, H, K),
        rand(*batch, T, HV, V),
        rand(*batch, T, HV, K),
        rand(*batch, T, HV),
        rand(HV),
        rand(HV * K),
        cu_seqlens=cu_seqlens_of(lengths) if lengths else None,
        impl=impl,
        chunk_size=4,
        **keywords,
    )


def run_step(batch: tuple[int, ...], impl: Any, **keywords: Any) -> Any:
    """kda_step on made-up inputs."""
    return called(
        kda_step,
        rand(*batch, HV, K, V),
        rand(*batch, H, K),
        rand(*batch, H, K),
        rand(*batch, HV, V),
        -rand(*batch, HV, K),
        rand(*batch, HV) / 2,
        impl=impl,
        **keywords,
    )


def run_conv(batch: tuple[int, ...], T: int, lengths: list[int], impl: Any, **keywords: Any) -> Any:
    """causal_conv1d on made-up inputs; with lengths, packed."""
    N = (len(lengths),) if lengths else ()
    cu_seqlens = cu_seqlens_of(lengths) if lengths else None
    return called(
        causal_conv1d,
        rand(*batch, *N, W - 1, P),
        rand(*batch, T, P),
        rand(P, W),
        cu_seqlens=cu_seqlens,
        impl=impl,
        **keywords,
    )


def run_layer(
    config: KDAConfig, batch: tuple[int, ...], T: int, lengths: list[int], impl: Any, dtype: Any
) -> Any:
    """The layer on made-up inputs; with lengths, packed."""
    params = called(
        init_kimi_delta_attention, config, dtype=dtype, generator=torch.Generator().manual_seed(0)
    )
    state: Any = called(init_state, config, (*batch, len(lengths)) if lengths else batch, dtype=dtype)
    # Some memory, so that T = 0 too has something to return.
    state = optree.tree_map(lambda x: x + 1, state)
    cu_seqlens = torch.tensor(cu_seqlens_of(lengths)) if lengths else None
    x = rand(*batch, T, config.D, dtype=dtype)
    return called(kimi_delta_attention, params, state, x, config=config, cu_seqlens=cu_seqlens, impl=impl)


def run_transitions(batch: tuple[int, ...], T: int) -> Any:
    """Segments as maps, of the memory and of the layer."""
    S, k = rand(*batch, HV, K, V), rand(*batch, T, H, K)
    v, g, beta = rand(*batch, T, HV, V), -rand(*batch, T, HV, K), rand(*batch, T, HV) / 2
    step = called(kda_transition, k, v, g, beta, chunk_size=4)
    whole = called(compose_transitions, step, called(identity_transition, S))
    params: Any = init_kimi_delta_attention(CONFIG, generator=torch.Generator().manual_seed(0))
    empty: Any = init_state(CONFIG, batch)
    state = optree.tree_map(lambda x: x + 1, empty)
    skipped = called(layer_transition, params, rand(*batch, T, D), config=CONFIG)
    return (
        called(apply_transition, whole, S),
        called(parallel_kda, S, k, k, v, g, beta, segments=3),
        called(apply_layer_transition, params, skipped, state, config=CONFIG),
    )


def run_alone(batch: tuple[int, ...], T: int) -> Any:
    """What is distributed, on one rank; cut in two and joined."""
    S, k, v = rand(*batch, HV, K, V), rand(*batch, T, H, K), rand(*batch, T, HV, V)
    layer: Any = init_kimi_delta_attention(CONFIG), init_state(CONFIG, batch)
    model: Any = init_kimi_linear(LM), init_kimi_linear_state(LM, batch)
    tokens = torch.arange(T).remainder(LM.vocab_size).expand(*batch, T)
    shards = [called(shard_heads, layer, rank, 2, config=CONFIG) for rank in (0, 1)]
    lengths = called(context_lengths, T, 1)
    return (
        called(distributed_kda, S, k, k, v, -rand(*batch, T, HV, K), rand(*batch, T, HV), lengths=lengths),
        called(distributed_kimi_delta_attention, *layer, rand(*batch, T, D), config=CONFIG, lengths=lengths),
        called(distributed_kimi_linear, *model, tokens, config=LM, lengths=lengths),
        called(gather_states, called(gather_heads, layer, config=CONFIG)),
        called(join_heads, shards, config=CONFIG),
    )


def run_lm(batch: tuple[int, ...], T: int, lengths: list[int], impl: Any) -> Any:
    """The language model on some tokens; with lengths, packed."""
    params = called(init_kimi_linear, LM, generator=torch.Generator().manual_seed(0))
    capacity = 12 if lengths else None
    rows = (*batch, len(lengths)) if lengths else batch
    state: Any = called(init_kimi_linear_state, LM, rows, capacity=capacity)
    state = optree.tree_map(lambda x: x + 1, state)
    tokens = torch.arange(T).remainder(LM.vocab_size).expand(*batch, T)
    cu_seqlens = cu_seqlens_of(lengths) if lengths else None
    return called(kimi_linear, params, state, tokens, config=LM, cu_seqlens=cu_seqlens, impl=impl)


def run_parts(batch: tuple[int, ...]) -> Any:
    """The layers around KDA, each alone, and one step of generation."""
    x = rand(*batch, 3, D)
    cache: Any = called(init_mla_state, MLA, batch, capacity=4)
    params = called(init_kimi_linear, LM)
    state = called(init_kimi_linear_state, LM, batch, capacity=4)
    step = (state, torch.ones(batch, dtype=torch.int64)), torch.full(batch, 0.4)
    return (
        called(mla, called(init_mla, MLA), cache, x, config=MLA),
        called(moe, called(init_moe, MOE), x, config=MOE),
        called(attention_residual, called(init_attention_residual, D), (x, x + 1), x),
        called(linear, x, called(quantize, rand(5, D)), rand(5)),
        called(quantize_tokens, x),
        called(quantize_layer, called(init_swiglu, D, 9), lambda params: swiglu(params, x), "down")[0],
        called(sample, rand(*batch, 7), torch.full(batch, 0.4), top_p=0.5) + 1,
        called(decode_step, params, *step, config=LM),
    )


def run_ragged() -> Any:
    """All that goes between packed and padded."""
    offsets = torch.tensor(called(cu_seqlens_of, called(lengths_of, (0, 2, 2, 5))), dtype=torch.int32)
    padded = called(pad, rand(2, 5, 3), offsets, axis=1)
    return called(pack, padded, [0, 2, 2, 5], axis=1)


def under_transforms(batch: tuple[int, ...]) -> Any:
    """Wrapped tensors satisfy the annotations too."""

    def loss(x: Tensor) -> Tensor:
        _, y = called(kimi_delta_attention, params, init_state(CONFIG, batch), x, config=CONFIG)
        return y.square().sum()

    params = init_kimi_delta_attention(CONFIG, generator=torch.Generator().manual_seed(0))
    return torch.vmap(torch.func.grad(loss))(rand(3, *batch, 5, D))


for b, t, i in product(BATCHES, LENGTHS, IMPLS):
    case(f"kda {b} T={t} {i}", partial(run_kda, b, t, [], i))
    case(f"causal_conv1d {b} T={t} {i}", partial(run_conv, b, t, [], i))
for b, (p, lengths), i in product(BATCHES, PACKINGS.items(), IMPLS):
    if lengths:
        case(f"kda {b} packed {p} {i}", partial(run_kda, b, sum(lengths), lengths, i))
        case(f"causal_conv1d {b} packed {p} {i}", partial(run_conv, b, sum(lengths), lengths, i))
for d in (torch.float64, torch.bfloat16, torch.float16):
    case(f"kda {d}", partial(run_kda, (2,), 9, [], None, d))
    case(f"kda packed {d}", partial(run_kda, (2,), 8, PACKINGS["some"], None, d))
for b, i in product(BATCHES, IMPLS):
    case(f"fused_kda {b} {i}", partial(run_fused, b, 9, [], i))
    case(f"fused_kda {b} packed {i}", partial(run_fused, b, 8, PACKINGS["some"], i, allow_neg_eigval=True))
case("kda options", partial(run_kda, (2,), 9, [], None, scale=1, lower_bound=-5.0))
for b, i in product(BATCHES, IMPLS):
    case(f"kda_step {b} {i}", partial(run_step, b, i))
    case(f"kda_gate {b} {i}", partial(called, kda_gate, rand(*b, HV, K), rand(HV), rand(HV * K), impl=i))
    case(
        f"kda_gate bounded {b} {i}",
        partial(called, kda_gate, rand(*b, HV, K), rand(0), rand(HV * K), lower_bound=-5.0, impl=i),
    )
    case(f"l2_norm {b} {i}", partial(called, l2_norm, rand(*b, F), eps=1e-5, impl=i))
    x = rand(*b, F)
    for act, weight in product(("sigmoid", "silu"), (rand(F), None)):
        options: dict[str, Any] = {"eps": 1e-5, "activation": act, "impl": i}
        name = f"{b} {act} {'no weight' if weight is None else 'weight'} {i}"
        case(f"gated_rms_norm {name}", partial(called, gated_rms_norm, x, x, weight, **options))
        residual = partial(called, residual_gated_rms_norm, x, x, x, weight, **options)
        case(f"residual_gated_rms_norm {name}", residual)
case("kda_step scale", partial(run_step, (), None, scale=1.0))
for i in IMPLS:
    case(f"causal_conv1d bias {i}", partial(run_conv, (2,), 5, [], i, bias=rand(P), activation=None))
for (n, config), i in product(CONFIGS.items(), IMPLS):
    for b, t in ((), 9), ((2,), 1), ((3, 2), 0), ((3, 2), 5):
        case(f"layer {n} {b} T={t} {i}", partial(run_layer, config, b, t, [], i, torch.float32))
    for d in (torch.float32, torch.bfloat16, torch.float64):
        case(f"layer {n} packed {d} {i}", partial(run_layer, config, (2,), 8, PACKINGS["some"], i, d))
for b, t in product(BATCHES, LENGTHS):
    case(f"transitions {b} T={t}", partial(run_transitions, b, t))
    case(f"alone {b} T={t}", partial(run_alone, b, t))
for b, t, i in product(BATCHES, (0, 1, 9), IMPLS):
    case(f"kimi_linear {b} T={t} {i}", partial(run_lm, b, t, [], i))
for i in IMPLS:
    case(f"kimi_linear packed {i}", partial(run_lm, (2,), 8, PACKINGS["some"], i))
for b in BATCHES:
    case(f"parts {b}", partial(run_parts, b))
case("ragged", run_ragged)
case("scan", partial(called, scan, lambda c, x: (c + x, c * x), rand(3), rand(4, 3), length=4, reverse=True))
case("swiglu", lambda: called(swiglu, called(init_swiglu, D, 9, dtype=torch.float64), rand(2, D).double()))
case("explain", lambda: called(explain, l2_norm, rand(2, F)) and rand(1))
for b in BATCHES:
    case(f"transforms {b}", partial(under_transforms, b))


def wrong_rank() -> Any:
    """A scalar has no last axis: private functions check nothing themselves."""
    from kda_fn.primitives.l2_norm import reference

    return reference.l2_norm(torch.tensor(1.0))


def wrong_size() -> Any:
    """A key of another width."""
    from kda_fn.primitives.kda import reference

    q, v = rand(H, K), rand(HV, V)
    return reference.kda_step(rand(HV, K, V), q, rand(H, K + 1), v, -rand(HV, K), rand(HV))


def wrong_dtype() -> Any:
    """Integers are no floats."""
    from kda_fn.primitives.kda_gate import reference

    return reference.kda_gate(torch.ones(HV, K, dtype=torch.int64), rand(HV), rand(HV * K))


def wrong_product() -> Any:
    """A size that is the product of two letters."""
    from kda_fn.primitives.kda_gate import reference

    return reference.kda_gate(rand(HV, K), rand(HV), rand(1))


def wrong_window() -> Any:
    """A state that is longer than the filter: there is an output too many."""
    from kda_fn.primitives.causal_conv1d import fallback

    return fallback.causal_conv1d(rand(W, P), rand(3, P), rand(P, W))


def wrong_type() -> Any:
    """A choice that is none."""
    from kda_fn.layers import kimi_delta_attention as module

    return module.init_state(CONFIG, [2, 3])  # pyright: ignore[reportArgumentType]


CONTROLS: dict[str, Callable[[], Any]] = {
    control.__name__: control
    for control in (wrong_rank, wrong_size, wrong_dtype, wrong_product, wrong_window, wrong_type)
}


def outcome(function: Callable[[], Any]) -> str:
    """`ok`, or the error."""
    try:
        result = function()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    leaves = optree.tree_leaves(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    if not all(x.isfinite().all() for x in tensors):
        return "not finite"
    return "ok" if not tensors or any(x.abs().max() > 0 for x in tensors) else "all zero"


def main() -> None:
    """Every call; the program."""
    outcomes = {name: outcome(function) for name, function in {**CASES, **CONTROLS}.items()}
    print(json.dumps({"outcomes": outcomes, "called": sorted(CALLED)}))


# The tests


ROOT = Path(__file__).parent.parent
PROGRAM = """
import runpy, sys, types
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# beartype, with an int where a float is asked for: type checkers allow it. The hook wants an importable name.
checker = sys.modules["checker"] = types.ModuleType("checker")
checker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))
install_import_hook("kda_fn", "checker.check")
runpy.run_path(sys.argv[1])["main"]()
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the program said."""
    if not all(importlib.util.find_spec(name) for name in ("jaxtyping", "beartype")):
        pytest.skip("jaxtyping and beartype are not installed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_annotations_hold(told: dict[str, Any], name: str) -> None:
    """No annotation on the way, public or private, is contradicted; something is computed."""
    assert told["outcomes"][name] == "ok"


@pytest.mark.parametrize("name", CONTROLS)
def test_the_hook_is_alive(told: dict[str, Any], name: str) -> None:
    """Calls that contradict an annotation are caught: the tests above could fail."""
    assert told["outcomes"][name].startswith("jaxtyping.TypeCheckError: ")


def test_every_public_function_is_called(told: dict[str, Any]) -> None:
    """None is left out."""
    public = {name for name in kda_fn.__all__ if not isinstance(getattr(kda_fn, name), type)}
    assert set(told["called"]) == public
