"""Segments as affine maps of the state, against the float64 recurrence, and what they are for."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from laws import GRADIENT, VALUE, assert_close, assert_identical
from oracles import torch_oracles as oracles
from torch import Tensor
from torch.func import grad, vmap

from kda_fn import (
    KDAConfig,
    KDAState,
    Transition,
    apply_layer_transition,
    apply_transition,
    compose_transitions,
    identity_transition,
    init_kimi_delta_attention,
    kda,
    kda_transition,
    kimi_delta_attention,
    l2_norm,
    layer_transition,
    parallel_kda,
)

pytestmark = pytest.mark.usefixtures("one_thread")

H, HV, K, V = 2, 4, 6, 5
DTYPES = [torch.float64, torch.float32]
GATES = [-0.05, -1.0, -20.0, -1000.0, -math.inf, "mixed"]


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def segment(
    T: int, gate: Any = -0.5, dtype: torch.dtype = torch.float64, batch: tuple[int, ...] = (2,)
) -> tuple[Tensor, ...]:
    """q, k, v, g, beta; "mixed" has gates of -inf, 0 and -1000 among others."""
    q, k = (l2_norm(rand(i, *batch, T, H, K)) for i in (0, 1))
    v, g = rand(2, *batch, T, HV, V), rand(3, *batch, T, HV, K).abs()
    if gate == "mixed":
        g = -g
        for every, value in ((7, -math.inf), (5, 0.0), (3, -1000.0)):
            g[..., ::every, :, ::every] = value
    else:
        g = g * gate
    return tuple(x.to(dtype) for x in (q, k, v, g, rand(4, *batch, T, HV).sigmoid()))


def state(dtype: torch.dtype = torch.float64, seed: int = 9, batch: tuple[int, ...] = (2,)) -> Tensor:
    return rand(seed, *batch, HV, K, V, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("T", [0, 1, 65])
def test_a_segment_is_its_transition(T: int, gate: Any, dtype: torch.dtype) -> None:
    """Applied to two states it gives the recurrence's two final states."""
    q, k, v, g, beta = segment(T, gate, dtype)
    transition = kda_transition(k, v, g, beta)
    for seed in (1, 2):
        expected, _ = oracles.kda(state(dtype, seed), q, k, v, g, beta)
        assert_close(apply_transition(transition, state(dtype, seed)), expected, VALUE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [-0.5, -20.0, "mixed"])
def test_gradients(gate: Any, dtype: torch.dtype) -> None:
    """Of k, v, the gates of every head, beta and the state, through apply."""
    inputs = [state(dtype), *segment(19, gate, dtype)[1:]]
    weight = rand(5, 2, HV, K, V)

    def loss(run: Any, *inputs: Tensor) -> Tensor:
        return (run(*inputs) * weight.to(inputs[0].dtype)).sum()

    def expected(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return oracles.kda(S, k, k, v, g, beta)[0]

    def ours(S: Tensor, *segment: Tensor) -> Tensor:
        return apply_transition(kda_transition(*segment), S)

    theirs = grad(partial(loss, expected), tuple(range(5)))(*(x.double() for x in inputs))
    slopes = grad(partial(loss, ours), tuple(range(5)))(*inputs)
    assert_close(slopes, theirs, GRADIENT[dtype])
    assert all(bool(slopes[3][:, :, head].any()) for head in range(HV))


def test_compose_is_one_after_another_and_associative() -> None:
    """Three segments in either grouping are the map of all; the identity changes nothing."""
    parts = [tuple(x[:, a:b] for x in segment(50, "mixed")[1:]) for a, b in ((0, 17), (17, 18), (18, 50))]
    a, b, c = (kda_transition(*part) for part in parts)
    whole = kda_transition(*segment(50, "mixed")[1:])
    assert_close(compose_transitions(c, compose_transitions(b, a)), whole, 1e-12)
    assert_close(compose_transitions(compose_transitions(c, b), a), whole, 1e-12)
    identity = identity_transition(state())
    assert_identical(compose_transitions(identity, whole), whole)
    assert_identical(compose_transitions(whole, identity), whole)
    assert_identical(apply_transition(identity, state()), state())
    assert_identical(identity.transform, kda_transition(*segment(0)[1:]).transform)


def test_identity_tokens_change_nothing() -> None:
    """g = 0 and beta = 0, after other tokens: the same map, to the bit."""
    _, k, v, g, beta = segment(16)
    longer = [torch.cat([x, rand(7, *x.shape) * keep], 1) for x, keep in ((k, 1), (v, 1), (g, 0), (beta, 0))]
    assert_close(kda_transition(*longer), kda_transition(k, v, g, beta), 1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [-0.05, -20.0, "mixed"])
@pytest.mark.parametrize(("T", "segments"), [(0, 4), (1, 3), (7, 16), (65, 4), (64, 1), (50, 7)])
def test_time_in_parallel_is_sequential(T: int, segments: int, gate: Any, dtype: torch.dtype) -> None:
    """Outputs and final state; T that segments do not divide, and more segments than tokens."""
    inputs = segment(T, gate, dtype)
    expected = oracles.kda(state(dtype), *inputs, scale=0.3)
    actual = parallel_kda(state(dtype), *inputs, segments=segments, scale=0.3)
    assert_close(actual[0], expected[0], VALUE[dtype])
    if T:
        assert_close(actual[1], expected[1], VALUE[dtype])
    assert actual[1].shape == expected[1].shape and actual[1].dtype == dtype


@pytest.mark.parametrize("gate", [-0.5, "mixed"])
def test_time_in_parallel_has_the_gradients_of_sequential(gate: Any) -> None:
    """All inputs, from both outputs."""
    inputs = state(), *segment(21, gate)
    weights = rand(5, 2, HV, K, V), rand(6, 2, 21, HV, V)

    def loss(run: Any, *inputs: Any) -> Any:
        return sum((y * w).sum() for y, w in zip(run(*inputs), weights, strict=True))

    every = tuple(range(6))
    expected = grad(partial(loss, oracles.kda), every)(*inputs)
    assert_close(grad(partial(loss, partial(parallel_kda, segments=4)), every)(*inputs), expected, 1e-10)


def test_time_in_parallel_in_half_precision() -> None:
    """Outputs are kda's own, from states that are rounded in float32 only."""
    inputs = segment(50, -0.5, torch.bfloat16)
    expected = oracles.kda(state(torch.float32), *inputs)
    wide: Any = [*inputs[:3], *(x.float() for x in inputs[3:])]
    final, o = parallel_kda(state(torch.float32), *wide, segments=4)
    assert final.dtype == torch.float32 and o.dtype == torch.bfloat16
    assert_close(final, expected[0], 5e-3)
    assert_close(o, expected[1], 5e-3)


def test_transforms() -> None:
    """vmap over segments is a loop; per-sample gradients are those of each alone."""
    inputs = segment(9, batch=(3, 2))
    mapped = vmap(kda_transition)(*inputs[1:])
    assert_close(mapped, kda_transition(*inputs[1:]), 1e-12)

    def loss(S: Tensor, *inputs: Any) -> Tensor:
        return parallel_kda(S, *inputs, segments=3)[1].square().sum()

    states = state(batch=(3, 2))
    samples = vmap(grad(loss))(states, *inputs)
    alone = torch.stack([grad(loss)(states[i], *(x[i] for x in inputs)) for i in range(3)])
    assert_close(samples, alone, 1e-10)
    torch.func.jvp(loss, (states[0], *(x[0] for x in inputs)), (states[0], *(x[0] for x in inputs)))


# What it is for


def test_a_prompts_map_serves_every_state() -> None:
    """A prompt in 3 segments, each computed once; then applied to states that were not known."""
    q, k, v, g, beta = segment(60)
    maps = [kda_transition(*(x[:, i : i + 20] for x in (k, v, g, beta))) for i in (0, 20, 40)]
    for seed in (11, 12):
        S = state(seed=seed)
        for transition in maps:
            S = apply_transition(transition, S)
        assert_close(S, oracles.kda(state(seed=seed), q, k, v, g, beta)[0], 1e-12)


def test_a_segment_in_the_middle_is_replaced() -> None:
    """Of a long context only the new segment is read again."""
    context = segment(300, -0.005)
    before, old, after = (tuple(x[:, a:b] for x in context) for a, b in ((0, 240), (240, 280), (280, 300)))
    new = tuple(x.flip(1) for x in old)
    first, last = kda_transition(*before[1:]), kda_transition(*after[1:])
    S = apply_transition(first, state())
    S = apply_transition(last, apply_transition(kda_transition(*new[1:]), S))
    whole = [torch.cat(pieces, 1) for pieces in zip(before, new, after, strict=True)]
    expected, _ = oracles.kda(state(), *whole)
    assert_close(S, expected, 1e-12)
    unchanged, _ = kda(state(), *context)
    assert (unchanged - expected).norm() > 1e-3 * expected.norm()


LAYERS = {
    "plain": KDAConfig(
        hidden_size=8, num_heads=2, head_dim=4, num_v_heads=4, head_v_dim=3, conv_size=4, chunk_size=4
    ),
    "bounded": KDAConfig(
        hidden_size=8,
        num_heads=2,
        head_dim=4,
        lower_bound=-5.0,
        output_gate="full_rank",
        allow_neg_eigval=True,
    ),
    "no window": KDAConfig(hidden_size=8, num_heads=2, head_dim=4, conv_size=1),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 30])
def test_a_layers_segment_is_skipped(T: int, name: str) -> None:
    """From any state, window included, and in any order of segments; shorter than the window too."""
    config = LAYERS[name]
    params = init_kimi_delta_attention(
        config, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    pieces = rand(1, 2, T, 8), rand(2, 2, 5, 8), rand(3, 2, T, 8)
    maps = [layer_transition(params, x, config=config) for x in pieces]
    for seed in (5, 6):
        start = KDAState(
            rand(seed, 2, config.W - 1, config.P), rand(seed + 2, 2, config.HV, config.K, config.V)
        )
        skipped = start
        for transition in maps:
            skipped = apply_layer_transition(params, transition, skipped, config=config)
        expected, _ = oracles.kimi_delta_attention(params, start, torch.cat(pieces, 1), config=config)
        assert_close(skipped.recurrent_state, expected.recurrent_state, 1e-12)
        if config.W > 1:
            assert_close(skipped.conv_state, expected.conv_state, 1e-12)
        x = rand(7, 2, 2, 8)
        following = kimi_delta_attention(params, skipped, x, config=config)[1]
        whole = oracles.kimi_delta_attention(params, expected, x, config=config)[1]
        assert_close(following, whole, 1e-11)


# Errors


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t, S: apply_transition(S, S), TypeError, "transition must be Transition"),
        (lambda t, S: apply_transition(t, S.float()), TypeError, "dtypes must agree"),
        (
            lambda t, S: apply_transition(t, S[..., :2]),
            ValueError,
            r"state has shape .* expected \[\*B HV K V\]",
        ),
        (lambda t, S: compose_transitions(t, S), TypeError, "earlier must be Transition"),
        (lambda t, S: compose_transitions(t, Transition(S, S[..., :2])), ValueError, "earlier.offset"),
        (lambda t, S: identity_transition(S[0, 0, 0]), ValueError, "state has shape"),
        (lambda t, S: kda_transition(S, S.int(), S, S), TypeError, "v must be a float"),
        (lambda t, S: parallel_kda(S, *segment(5), segments=0), ValueError, "segments must be a positive"),
        (lambda t, S: parallel_kda(S[..., :2], *segment(5), segments=2), ValueError, "parallel_kda: initial"),
    ],
)
def test_errors(call: Any, error: type[Exception], words: str) -> None:
    """Before any work, naming what was wrong."""
    with pytest.raises(error, match=words):
        call(kda_transition(*segment(5)[1:]), state())


def test_layer_errors() -> None:
    """The layer's own checks, under this function's name."""
    config = LAYERS["plain"]
    params: Any = init_kimi_delta_attention(config)
    with pytest.raises(ValueError, match=r"layer_transition: x has shape .* D=8"):
        layer_transition(params, torch.ones(5, 7), config=config)
    with pytest.raises(TypeError, match="layer_transition: params must be KDAParams"):
        layer_transition(tuple(params), torch.ones(5, 8), config=config)  # pyright: ignore
    with pytest.raises(TypeError, match="transition must be LayerTransition"):
        apply_layer_transition(params, params, params, config=config)
