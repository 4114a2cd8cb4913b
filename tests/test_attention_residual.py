"""Attention residuals: against straight-line float64, their limits, what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws import assert_close
from oracles import hybrid
from torch import Tensor
from torch.func import grad, vmap

from kda_fn import AttentionResidualParams, attention_residual, init_attention_residual


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PARAMS = AttentionResidualParams(1 + rand(6) / 3, rand(6, seed=1))


@pytest.mark.parametrize("batch", [(1,), (4,), (2, 3)])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_the_equation(blocks: int, batch: tuple[int, ...]) -> None:
    values = [rand(*batch, 6, seed=n) for n in range(blocks + 1)]
    y = attention_residual(PARAMS, tuple(values[:-1]), values[-1], eps=1e-3)
    rows = zip(*(v.reshape(-1, 6) for v in values), strict=True)
    expected = torch.stack([hybrid.attention_residual(PARAMS, list(row), 1e-3) for row in rows])
    assert_close([y.reshape(-1, 6)], [expected], 1e-12)


def test_no_block_is_the_identity() -> None:
    x = rand(3, 6)
    y = attention_residual(PARAMS, (), x)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()


def test_initial_values_are_the_mean() -> None:
    values = [rand(4, 6, seed=n) for n in range(3)]
    params = init_attention_residual(6, dtype=torch.float64)
    y = attention_residual(params, tuple(values[1:]), values[0])
    assert_close([y], [torch.stack(values).mean(0)], 1e-12)


def test_half_precision_mixes_in_float32() -> None:
    values = [rand(50, 6, seed=n).bfloat16() for n in range(4)]
    params = AttentionResidualParams(*(p.bfloat16() for p in PARAMS))
    y = attention_residual(params, tuple(values[1:]), values[0])
    assert y.dtype == torch.bfloat16
    wide = AttentionResidualParams(*(p.double() for p in params))
    exact = attention_residual(wide, tuple(v.double() for v in values[1:]), values[0].double())
    assert_close([y], [exact], 5e-3)


def test_per_sample_gradients() -> None:
    values = [rand(3, 4, 6, seed=n) for n in range(3)]

    def loss(params: AttentionResidualParams, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return attention_residual(params, (a, b), x).sin().sum()

    mapped = vmap(grad(loss), in_dims=(None, 0, 0, 0))(PARAMS, *values)
    for n in range(3):
        alone = grad(loss)(PARAMS, *(v[n] for v in values))
        assert_close([m[n] for m in mapped], alone, 1e-12)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"blocks": [rand(2, 6)]}, TypeError, "blocks must be tuple, got list"),
        ({"blocks": (rand(3, 6),)}, ValueError, r"blocks\[0\] has shape \(3, 6\), expected \(2, 6\)"),
        (
            {"blocks": (rand(2, 6).float(),)},
            TypeError,
            r"dtypes must agree, got x .*blocks\[0\] torch.float32",
        ),
        ({"params": None}, TypeError, "params must be AttentionResidualParams, got NoneType"),
        (
            {"params": PARAMS._replace(query=rand(5))},
            ValueError,
            r"params.query has shape \(5,\), expected \(6,\)",
        ),
        ({"eps": -1.0}, ValueError, "eps must not be negative"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments: dict[str, Any] = {"params": PARAMS, "blocks": (rand(2, 6),), "x": rand(2, 6), **change}
    with pytest.raises(error, match=f"^attention_residual: .*{says}"):
        attention_residual(**arguments)
