"""Sampling: frequencies against the closed form, what top_p keeps, one step in a scan, mapped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_kimi_linear import KIMI_LINEAR, random_params, run, tokens_of
from torch import Tensor
from torch.func import vmap

from kda_fn import decode_step, init_kimi_linear_state, kimi_linear, sample, scan

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.1, -torch.inf, 0.9], dtype=torch.float64)
EVENLY = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
"""Uniform numbers that hit every probability to 1/20,000."""


def frequencies(**options: Any) -> Tensor:
    drawn = sample(LOGITS.expand(len(EVENLY), -1), EVENLY, **options)
    return torch.bincount(drawn, minlength=6) / len(EVENLY)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_the_distribution(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, 0)
    assert (frequencies(temperature=temperature) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, [1]), (0.5, [1]), (0.6, [1, 3]), (0.9, [1, 3, 5, 0])])
def test_top_p(top_p: float, kept: list[int]) -> None:
    """The fewest most likely tokens that sum to top_p, in their proportions."""
    p = torch.softmax(LOGITS, 0)
    expected = torch.zeros(6, dtype=torch.float64)
    expected[kept] = p[kept] / p[kept].sum()
    assert (frequencies(top_p=top_p) - expected).abs().max() <= 1e-4
    assert p[kept].sum() >= top_p > p[kept[:-1]].sum()


def test_greedy() -> None:
    rows = torch.stack([LOGITS, LOGITS.flip(0)])
    uniform = torch.tensor([0.9, 0.1], dtype=torch.float64)
    assert sample(rows).tolist() == sample(rows, uniform, temperature=0.0).tolist() == [1, 4]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_ends_of_the_interval(uniform: float, dtype: torch.dtype) -> None:
    """No rounding draws an impossible token, or none."""
    for top_p in (1.0, 0.6):
        token = sample(LOGITS.to(dtype), torch.tensor(uniform, dtype=torch.float64).to(dtype), top_p=top_p)
        assert token.shape == () and token.item() in (0, 1, 2, 3, 5)


def test_nan_draws_some_token() -> None:
    logits = torch.stack([torch.full_like(LOGITS, torch.nan), LOGITS])
    drawn = sample(logits, torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert 0 <= drawn[0] < 6 and drawn[1] == 1


def test_vmap_is_the_batch() -> None:
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(7, generator=torch.Generator().manual_seed(1))
    draw = partial(sample, temperature=0.7, top_p=0.8)
    assert torch.equal(vmap(draw)(logits, uniform), draw(logits, uniform))


def test_a_scan_of_steps_is_generation() -> None:
    """Each token is the one that its number draws from the logits of all before it; beams by vmap."""
    params = random_params(KIMI_LINEAR)
    prompt = tokens_of(6)
    uniforms = torch.rand(3, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state = init_kimi_linear_state(KIMI_LINEAR, capacity=16, dtype=torch.float64)
    state, _ = kimi_linear(params, state, prompt[:-1], config=KIMI_LINEAR)
    step = partial(decode_step, params, config=KIMI_LINEAR, temperature=0.8, top_p=0.9)

    def generate(uniforms: Tensor) -> Tensor:
        return scan(step, (state, prompt[-1]), uniforms)[1]

    drawn = vmap(generate)(uniforms)
    assert len({tuple(row) for row in drawn.tolist()}) == 3
    for row, us in zip(drawn, uniforms, strict=True):
        logits = run(params, KIMI_LINEAR, torch.cat([prompt, row[:-1]]))[5:]
        assert torch.equal(row, sample(logits, us, temperature=0.8, top_p=0.9))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"logits": torch.zeros(())}, ValueError, r"logits has shape \(\)"),
        ({"logits": torch.zeros(3, dtype=torch.int64)}, TypeError, "logits must be a float"),
        ({"uniform": torch.zeros(2)}, ValueError, r"uniform has shape \(2,\), expected \(\)"),
        ({"temperature": -1.0}, ValueError, "temperature must not be negative"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, ValueError, r"top_p must be in \(0, 1\], got 1.5"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    arguments: dict[str, Any] = {"logits": LOGITS, "uniform": torch.tensor(0.5), **change}
    with pytest.raises(error, match=f"^sample: {says}"):
        sample(**arguments)
