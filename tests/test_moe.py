"""The mixture of experts: against straight-line float64, token by token; routing; transforms."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import assert_close
from oracles import hybrid
from subjects import leaves, tree_map
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from kda_fn import MoEConfig, MoEParams, init_moe, moe
from kda_fn.layers.moe import expert_linear, route

module = sys.modules["kda_fn.layers.moe"]

PLAIN = MoEConfig(hidden_size=6, num_experts=8, experts_per_token=3, intermediate_size=5, shared_size=7)
CONFIGS = {
    "plain": PLAIN,
    "no shared expert, weights as they are": replace(PLAIN, shared_size=0, renormalize=False, scaling=2.4),
    "groups": replace(PLAIN, num_groups=4, topk_groups=2),
    "latent, normalised, SiTU": replace(PLAIN, latent_size=4, latent_norm=True, situ=(4.0, 25.0)),
    "latent": replace(PLAIN, latent_size=4),
    "all experts": replace(PLAIN, experts_per_token=8),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> MoEConfig:
    return CONFIGS[request.param]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def params_of(config: MoEConfig) -> MoEParams:
    params = init_moe(config, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return params._replace(bias=rand(8) / 2, latent_norm=params.latent_norm + 0.3)


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3), (0,), (2, 0)])
def test_the_equation(config: MoEConfig, batch: tuple[int, ...]) -> None:
    params, x = params_of(config), rand(*batch, 6)
    y = moe(params, x, config=config)
    assert y.shape == x.shape and y.dtype == x.dtype
    if x.numel():
        assert_close([y.reshape(-1, 6)], [hybrid.moe(params, x.reshape(-1, 6), config)], 1e-12)


def test_the_bias_steers_the_choice_alone() -> None:
    params, x = params_of(PLAIN), rand(50, 6)
    for favourite in (2, 5):
        bias = torch.zeros(8, dtype=torch.float64)
        bias[favourite] = 10
        steered = params._replace(bias=bias)
        experts, weights = route(steered, x, config=PLAIN)
        assert (experts == favourite).any(-1).all()
        scores = torch.sigmoid(x @ params.router.T).gather(-1, experts)
        assert_close([weights], [scores / scores.sum(-1, keepdim=True)], 1e-12)
    slopes = grad(lambda params: moe(params, x, config=PLAIN).square().sum())(params)
    assert slopes.router.any() and not slopes.bias.any()


def test_groups_bound_the_choice() -> None:
    """All experts of a token lie in the groups whose two best scores sum highest."""
    config = CONFIGS["groups"]
    params, x = params_of(config), rand(200, 6)
    experts, _ = route(params, x, config=config)
    assert max(len(set(row)) for row in (experts // 2).tolist()) == 2
    free, _ = route(params, x, config=PLAIN)
    assert any(set(a) != set(b) for a, b in zip(experts.tolist(), free.tolist(), strict=True))


def test_a_row_is_its_own(config: MoEConfig) -> None:
    params, x = params_of(config), rand(5, 6)
    y = moe(params, x, config=config)
    for n in range(5):
        assert_close([moe(params, x[n], config=config)], [y[n]], 1e-12)
    poisoned = x.clone()
    poisoned[2] = torch.nan
    kept = [0, 1, 3, 4]
    z = moe(params, poisoned, config=config)
    assert z[2].isnan().all()
    assert_close([z[kept]], [y[kept]], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(config: MoEConfig, dtype: torch.dtype) -> None:
    """The router stays float32; the result agrees where no rounding chooses another expert."""
    params = init_moe(replace(config, experts_per_token=8, num_groups=1, topk_groups=1), dtype=dtype)
    assert params.router.dtype == params.bias.dtype == torch.float32
    everything = replace(config, experts_per_token=8, num_groups=1, topk_groups=1)
    x = rand(9, 6).to(dtype)
    y = moe(params, x, config=everything)
    assert y.dtype == dtype
    wide = tree_map(torch.Tensor.double, params)
    bound = 2e-6 if dtype == torch.float32 else 8**0.5 * 5e-3
    assert_close([y], [hybrid.moe(wide, x, everything)], bound)


# Transforms


def test_per_sample_gradients(config: MoEConfig) -> None:
    params, rows = params_of(config), rand(3, 4, 6)

    def loss(params: MoEParams, x: Tensor) -> Tensor:
        return moe(params, x, config=config).square().sum()

    mapped = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(params, rows)
    for n, row in enumerate(rows):
        alone = grad(loss, argnums=(0, 1))(params, row)
        for a, e in zip(leaves(mapped), leaves(alone), strict=True):
            torch.testing.assert_close(a[n], e, rtol=1e-11, atol=1e-13)
    params_of_rows = tree_map(lambda a: torch.stack([a, 2 * a, -a]), params)
    ensemble = vmap(lambda params, x: moe(params, x, config=config))(params_of_rows, rows)
    for n, row in enumerate(rows):
        one = tree_map(lambda a, n=n: a[n], params_of_rows)
        assert_close([ensemble[n]], [moe(one, row, config=config)], 1e-12)


def test_the_product_of_experts() -> None:
    """y_m = W_e x_m and its derivatives of both orders, in both modes, mapped over either argument."""
    x, weight, expert = rand(5, 3), rand(4, 2, 3, seed=1), torch.tensor([3, 0, 3, 1, 3])
    expected = torch.stack([weight[e] @ row for e, row in zip(expert.tolist(), x, strict=True)])
    assert_close([expert_linear(x, weight, expert)], [expected], 1e-14)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("mod,md->mo", weight[expert], x).sin().sum()

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return expert_linear(x, weight, expert).sin().sum()

    for transform in (
        lambda f: grad(f, argnums=(0, 1))(x, weight),
        lambda f: jvp(f, (x, weight), (x.cos(), weight.cos()))[1],
        lambda f: hessian(f, argnums=1)(x, weight),
        lambda f: grad(lambda w: grad(f)(x, w).square().sum())(weight),
        lambda f: grad(lambda x: grad(f, argnums=1)(x, weight).square().sum())(x),
        lambda f: vmap(f, in_dims=(None, 0))(x, torch.stack([weight, -2 * weight])),
        lambda f: vmap(vmap(f, in_dims=(0, None)), in_dims=(None, 0))(
            torch.stack([x, x.exp(), -x]), torch.stack([weight, -2 * weight])
        ),
        lambda f: vmap(grad(f, argnums=(0, 1)), in_dims=(0, None))(torch.stack([x, x.exp()]), weight),
    ):
        assert_close(transform(ours), transform(plain), 1e-12)
    tracked = [a.clone().requires_grad_() for a in (x, weight)]
    assert torch.autograd.gradcheck(lambda x, w: expert_linear(x, w, expert), tracked)
    assert torch.autograd.gradgradcheck(lambda x, w: expert_linear(x, w, expert), tracked)


def test_torchs_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves bf16 on a GPU, here on the CPU: an expert without tokens, and all on one."""
    x, weight = rand(9, 16).bfloat16(), rand(4, 8, 16, seed=1).bfloat16()
    for expert in ([3, 0, 3, 1, 3, 0, 0, 1, 3], [2] * 9):
        chosen = torch.tensor(expert)
        expected = expert_linear(x, weight, chosen)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_grouped_mm_serves", lambda *_: True)
            assert_close([expert_linear(x, weight, chosen)], [expected.double()], 5e-3)


def test_meta_and_compile() -> None:
    params, x = params_of(PLAIN), rand(5, 6)
    shape_only = tree_map(lambda a: a.to("meta"), params)
    assert moe(shape_only, x.to("meta"), config=PLAIN).shape == (5, 6)
    compiled = torch.compile(lambda x: moe(params, x, config=PLAIN), fullgraph=True, backend="aot_eager")
    assert_close([compiled(x)], [moe(params, x, config=PLAIN)], 1e-12)


# What does not fit


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": rand(2, 5)}, ValueError, r"x has shape \(2, 5\), expected \[\*B D\] with D=6"),
        ({"x": rand(2, 6).float()}, TypeError, "dtypes must agree"),
        ({"params": None}, TypeError, "params must be MoEParams, got NoneType"),
        ({"config": None}, TypeError, "config must be MoEConfig, got NoneType"),
        (
            {"config": CONFIGS["latent"]},
            ValueError,
            r"params.gate_up has shape \(8, 10, 6\), expected \(8, 10, 4\)",
        ),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^moe: .*{says}"):
        moe(**{"params": params_of(PLAIN), "x": rand(2, 6), "config": PLAIN, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"num_groups": 3}, "num_experts must be num_groups times at least two, got 8 and 3"),
        ({"num_groups": 8}, "num_experts must be num_groups times at least two, got 8 and 8"),
        ({"num_groups": 2, "topk_groups": 3}, "topk_groups must be at most num_groups=2, got 3"),
        (
            {"num_groups": 4, "topk_groups": 1},
            "experts_per_token must be at most the 2 experts of the chosen groups, got 3",
        ),
        ({"situ": (0.0, 1.0)}, "situ must be positive"),
        ({"norm_eps": -1.0}, "norm_eps must not be negative"),
    ],
)
def test_config(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^MoEConfig: {says}"):
        replace(PLAIN, **change)
