"""MLA: against straight-line float64; both forms, both caches, packed, transformed; what overflows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from laws import assert_close
from oracles import hybrid
from subjects import leaves
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from kda_fn import MLAConfig, MLAParams, MLAState, cu_seqlens_of, init_mla, init_mla_state, mla

PLAIN = MLAConfig(hidden_size=10, num_heads=3, head_dim=6, shared_dim=4, head_v_dim=5, latent_dim=8)
GATED = replace(PLAIN, query_rank=7, output_gate=True, head_v_dim=13)
"""As Kimi K3's; more value channels than key channels, which published models do not have."""
CONFIGS = {"plain": PLAIN, "low rank, gated": GATED}
# For these sizes the absorbed form serves up to 17 new tokens, or at any number where it never costs more.
LENGTHS = [1, 2, 17, 18, 40]


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> MLAConfig:
    return CONFIGS[request.param]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def params_of(config: MLAConfig) -> MLAParams:
    params = init_mla(config, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return params._replace(q_norm=params.q_norm + 0.3, kv_norm=params.kv_norm + rand(config.latent_dim) / 4)


def empty(config: MLAConfig, *batch: int, capacity: int | None = None) -> MLAState:
    return init_mla_state(config, batch, capacity=capacity, dtype=torch.float64)


@pytest.mark.parametrize("capacity", [None, 43])
@pytest.mark.parametrize("T", LENGTHS)
def test_the_equation(config: MLAConfig, T: int, capacity: int | None) -> None:
    params, x = params_of(config), rand(2, T, 10)
    state, y = mla(params, empty(config, 2, capacity=capacity), x, config=config)
    assert_close([y], [torch.stack([hybrid.mla(params, row, config) for row in x])], 1e-12)
    if capacity is None:
        assert state.latent.shape == (2, T, 8) and state.length.shape == (2, 0)
    else:
        assert state.latent.shape == (2, 43, 8) and state.length.tolist() == [[T], [T]]
        assert not state.latent[:, T:].any() and not state.shared[:, T:].any()


@pytest.mark.parametrize("capacity", [None, 45])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_split_resumes(config: MLAConfig, batch: tuple[int, ...], capacity: int | None) -> None:
    """Prefill in long and short pieces, then decode: both forms read one cache."""
    params, x = params_of(config), rand(*batch, 45, 10)
    start = empty(config, *batch, capacity=capacity)
    _, whole = mla(params, start, x, config=config)
    for cuts in ([0, 0, 1, 3, 43, 44, 45], [0, 20, 45]):
        state, pieces = start, []
        for a, b in pairwise(cuts):
            state, y = mla(params, state, x[..., a:b, :], config=config)
            pieces.append(y)
        assert_close([torch.cat(pieces, -2)], [whole], 1e-12)


def test_no_token(config: MLAConfig) -> None:
    state = mla(params_of(config), empty(config, 2, capacity=5), rand(2, 3, 10), config=config)[0]
    same, y = mla(params_of(config), state, rand(2, 0, 10), config=config)
    assert y.shape == (2, 0, 10)
    for a, b in zip(same, state, strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("lengths", [[4, 0, 1, 25], [25, 3], [7], [0, 0, 2]])
def test_packed_is_one_by_one(config: MLAConfig, lengths: list[int]) -> None:
    """From caches that already differ in length."""
    params, first, second = params_of(config), rand(6, 10), rand(2, sum(lengths), 10, seed=1)
    N = len(lengths)
    held = [n % 3 for n in range(N)]
    state = empty(config, 2, N, capacity=30)
    start = torch.cat([first[:n] for n in held]).expand(2, -1, -1)
    state, _ = mla(params, state, start, config=config, cu_seqlens=cu_seqlens_of(held))
    state, y = mla(params, state, second, config=config, cu_seqlens=cu_seqlens_of(lengths))
    assert state.length.squeeze(-1).tolist() == [[h + n for h, n in zip(held, lengths, strict=True)]] * 2
    for b in range(2):
        alone = []
        for h, rows in zip(held, second[b].split(lengths), strict=True):
            before = mla(params, empty(config), first[:h], config=config)[0]
            alone.append(mla(params, before, rows, config=config)[1])
        assert_close([y[b]], [torch.cat(alone)], 1e-12)


def test_the_future_changes_nothing(config: MLAConfig) -> None:
    """Tokens that were taken back are forgotten; what they left behind the length, even NaN, is cleared."""
    params, x = params_of(config), rand(9, 10)
    state, y = mla(params, empty(config, capacity=12), x, config=config)
    taken_back = state._replace(length=torch.tensor([4]))
    taken_back.latent[4:], taken_back.shared[6] = torch.nan, torch.nan
    for T in (1, 2, 5):
        state, again = mla(params, taken_back, x[4 : 4 + T], config=config)
        assert_close([again], [y[4 : 4 + T]], 1e-12)
        assert not state.latent[4 + T :].any() and not state.shared[4 + T :].any()


# What does not fit


def test_overflow_is_an_error_or_nan(config: MLAConfig) -> None:
    params, x = params_of(config), rand(2, 3, 10)
    state = empty(config, 2, capacity=4)._replace(length=torch.tensor([[1], [2]]))
    with pytest.raises(ValueError, match=r"mla: state has room for S=4 .* holds \[1, 2\].* \[3\] more"):
        mla(params, state, x, config=config)
    _, y = vmap(lambda state, x: mla(params, state, x, config=config))(state, x)
    assert y[0].isfinite().all() and y[1].isnan().all()


def at(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (at(x=rand(2, 3, 9)), ValueError, r"x has shape \(2, 3, 9\), expected \[\*B T D\] with D=10"),
        (at(x=rand(2, 3, 10).float()), TypeError, "dtypes must agree, got x torch.float32, state.latent"),
        (at(state=empty(PLAIN, 3)), ValueError, r"state.latent has shape \(3, 0, 8\), expected \(2, 0, 8\)"),
        (at(state=tuple(empty(PLAIN, 2))), TypeError, "state must be MLAState, got tuple"),
        (at(params=tuple(params_of(PLAIN))), TypeError, "params must be MLAParams, got tuple"),
        (at(config=None), TypeError, "config must be MLAConfig, got NoneType"),
        (at(config=GATED), ValueError, r"params.q_down has shape \(0,\), expected \(7, 10\)"),
        (
            at(state=empty(PLAIN, 2)._replace(length=torch.zeros(2, 0))),
            TypeError,
            "state.length must be an int64 tensor, got torch.float32",
        ),
        (
            at(cu_seqlens=(0, 3)),
            ValueError,
            "with cu_seqlens state must be preallocated, got a cache that grows",
        ),
        (
            at(cu_seqlens=(0, 3), state=empty(PLAIN, 2, 2, capacity=3)),
            ValueError,
            "state.length holds N = 2 states, cu_seqlens describes 1 sequences",
        ),
        (at(impl="cuda"), ValueError, "impl must be None or one of"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments = {"params": params_of(PLAIN), "state": empty(PLAIN, 2), "x": rand(2, 3, 10), "config": PLAIN}
    with pytest.raises(error, match=f"^mla: .*{says}"):
        mla(**{**arguments, **change})


@pytest.mark.parametrize("field", MLAParams._fields)
def test_each_weight_is_checked(config: MLAConfig, field: str) -> None:
    params = params_of(config)
    wrong = params._replace(**{field: getattr(params, field).unsqueeze(0)})
    with pytest.raises(ValueError, match=rf"^mla: params.{field} has shape"):
        mla(wrong, empty(config), rand(3, 10), config=config)


@pytest.mark.parametrize("field", ["hidden_size", "num_heads", "head_dim", "shared_dim", "head_v_dim"])
def test_config(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^MLAConfig: {field} must be a positive integer, got 0"):
        replace(PLAIN, **{field: 0})


# Transforms


@pytest.mark.parametrize("T", [3, 25])
def test_per_sample_gradients(config: MLAConfig, T: int) -> None:
    params, rows = params_of(config), rand(3, T, 10)

    def loss(params: MLAParams, x: Tensor) -> Tensor:
        return mla(params, empty(config), x, config=config)[1].square().sum()

    mapped = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(params, rows)
    for n, row in enumerate(rows):
        alone = grad(loss, argnums=(0, 1))(params, row)
        for a, e in zip(leaves(mapped), leaves(alone), strict=True):
            torch.testing.assert_close(a[n], e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("T", [3, 25])
def test_forward_mode_and_second_derivatives(config: MLAConfig, T: int) -> None:
    params, x, v = params_of(config), rand(T, 10), rand(T, 10, seed=1)

    def loss(x: Tensor) -> Tensor:
        return mla(params, empty(config), x, config=config)[1].square().sum()

    slope = jvp(loss, (x,), (v,))[1]
    torch.testing.assert_close(slope, (grad(loss)(x) * v).sum(), rtol=1e-10, atol=0)
    forward = jvp(grad(loss), (x,), (v,))[1]
    backward = grad(lambda x: (grad(loss)(x) * v).sum())(x)
    assert_close([forward], [backward], 1e-10)
    tracked = x.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(loss(tracked), tracked, create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum(), tracked)
    assert_close([second], [backward], 1e-10)


def test_gradients_reach_the_cache(config: MLAConfig) -> None:
    """Of what was cached before, in a preallocated cache too."""
    params, x = params_of(config), rand(8, 10)
    for capacity in (None, 8):
        held = mla(params, empty(config, capacity=capacity), x[:5], config=config)[0]

        def loss(latent: Tensor, held: MLAState = held) -> Tensor:
            return mla(params, held._replace(latent=latent), x[5:], config=config)[1].square().sum()

        slopes = grad(loss)(held.latent)
        step = 1e-6 * rand(*held.latent.shape, seed=2)
        difference = (loss(held.latent + step) - loss(held.latent - step)) / 2
        assert math.isclose(difference, (slopes * step).sum(), rel_tol=1e-6)
        assert slopes[:5].any() and not slopes[5:].any()
