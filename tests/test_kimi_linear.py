"""The hybrid model: against transformers token for token, against straight-line float64, split, mapped,
derived."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import assert_close, error
from oracles import hybrid
from safetensors.torch import save_file
from subjects import leaves, tree_map
from their_models import MODELS, VOCABULARY, saved, their_model
from torch import Tensor
from torch.func import grad, vmap

from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    KimiLinearParams,
    MLAConfig,
    MoEConfig,
    cu_seqlens_of,
    decode_step,
    init_kimi_linear,
    init_kimi_linear_state,
    kimi_linear,
    scan,
)
from kda_fn.layers.checkpoint import load_kimi_linear
from kda_fn.layers.kimi_linear import kimi_linear_blocks

D = 12
KIMI_LINEAR = KimiLinearConfig(
    vocab_size=30,
    kda=KDAConfig(hidden_size=D, num_heads=2, head_dim=4, num_v_heads=4, head_v_dim=3, chunk_size=8),
    mla=MLAConfig(hidden_size=D, num_heads=3, head_dim=4, shared_dim=2, head_v_dim=3, latent_dim=5),
    moe=MoEConfig(
        hidden_size=D,
        num_experts=6,
        experts_per_token=2,
        intermediate_size=5,
        shared_size=5,
        num_groups=3,
        topk_groups=2,
        scaling=2.4,
    ),
    layer_types=("kda", "mla", "kda"),
    mlp_types=("dense", "moe", "moe"),
    intermediate_size=10,
)
"""As Kimi-Linear, with more value heads than key heads."""
KIMI_K3 = replace(
    KIMI_LINEAR,
    kda=replace(KIMI_LINEAR.kda, lower_bound=-5.0, output_gate="full_rank"),
    mla=MLAConfig(
        hidden_size=D,
        num_heads=2,
        head_dim=4,
        shared_dim=2,
        head_v_dim=7,
        latent_dim=5,
        query_rank=6,
        output_gate=True,
    ),
    moe=MoEConfig(
        hidden_size=D,
        num_experts=6,
        experts_per_token=3,
        intermediate_size=5,
        shared_size=10,
        latent_size=8,
        latent_norm=True,
        situ=(4.0, 25.0),
    ),
    layer_types=("kda", "kda", "mla", "kda", "mla"),
    mlp_types=("dense", "moe", "moe", "moe", "moe"),
    residual_block=2,
    situ=(4.0, 25.0),
)
"""As Kimi K3: bounded decay, full-rank gates, attention residuals, latent experts, SiTU."""
CONFIGS = {"Kimi-Linear": KIMI_LINEAR, "Kimi K3": KIMI_K3}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_params(config: KimiLinearConfig, dtype: torch.dtype = torch.float64) -> KimiLinearParams:
    """Parameters none of which is at a neutral value."""
    generator = seeded()
    params = init_kimi_linear(config, generator=generator, dtype=dtype)
    return tree_map(lambda x: x + 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype), params)


def tokens_of(*shape: int, seed: int = 1, vocabulary: int = 30) -> Tensor:
    return torch.randint(vocabulary, shape, generator=seeded(seed))


def run(params: Any, config: KimiLinearConfig, tokens: Tensor, **options: Any) -> Tensor:
    state = init_kimi_linear_state(config, tokens.shape[:-1], dtype=params.embedding.dtype)
    return kimi_linear(params, state, tokens, config=config, **options)[1]


# Against transformers, whose arithmetic is float32 throughout: their norms, router and memory are


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(their model, our config and parameters, read from what they save)."""
    model = their_model(request.param)
    folder = saved(model, tmp_path_factory.mktemp("theirs"))
    return model, *load_kimi_linear(folder)


def theirs(model: Any, tokens: Tensor, **options: Any) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(tokens, **options)


@pytest.mark.parametrize("T", [1, 2, 63, 65, 200])
def test_logits_and_every_layer(pair: Any, T: int) -> None:
    """Layer by layer, so that a difference is located; then the logits."""
    model, config, params = pair
    # A draw in which no two experts tie to within rounding: either choice would be right.
    tokens = tokens_of(2, T, seed=2, vocabulary=VOCABULARY)
    expected = theirs(model, tokens, output_hidden_states=True)
    state = init_kimi_linear_state(config, (2,))
    embedded = torch.nn.functional.embedding(tokens, params.embedding)
    blocks = kimi_linear_blocks(params, state, embedded, config=config)
    # Their last one is after the final norm.
    for (_, actual), hidden in zip(blocks, expected.hidden_states[1:-1], strict=False):
        assert_close([actual], [hidden], 1e-5)
    assert_close([run(params, config, tokens)], [expected.logits], 1e-5)


def test_half_precision(tmp_path: Path) -> None:
    """In bf16 no further from float32 than they are; dense, or a rounding would choose another expert."""
    model = their_model("MLA last, dense")
    config, params = load_kimi_linear(saved(model, tmp_path))
    tokens = tokens_of(4, 40, vocabulary=VOCABULARY)
    exact = theirs(model, tokens).logits
    half = model.to(torch.bfloat16)
    for name, x in half.named_parameters():
        if "A_log" in name or "dt_bias" in name:
            x.data = x.data.float()
    narrow = tree_map(lambda x: x.bfloat16(), params)
    actual = error(run(narrow, config, tokens), exact)
    assert 0 < actual <= 1.2 * error(theirs(half, tokens).logits, exact)


def test_greedy_continuation(pair: Any) -> None:
    """50 tokens, by a scan of decode steps after one prefill."""
    model, config, params = pair
    prompt = tokens_of(2, 9, vocabulary=VOCABULARY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=50,
            do_sample=False,
            eos_token_id=None,
        )[:, 9:]
    state = init_kimi_linear_state(config, (2,), capacity=60)
    state, logits = kimi_linear(params, state, prompt, config=config)
    first = logits[:, -1].argmax(-1)
    step = partial(decode_step, params, config=config, temperature=0.0)
    _, rest = scan(step, (state, first), torch.zeros(49, 2))
    assert torch.equal(torch.cat([first.unsqueeze(0), rest]).T, expected)
    assert len(expected.unique()) > 5


def test_left_padded_batches(pair: Any) -> None:
    """Prompts of unequal length: padded on the left there, packed here; then both decode the batch."""
    model, config, params = pair
    lengths = [5, 1, 9]
    padded, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padded[row, 9 - length :] = tokens_of(length, seed=row, vocabulary=VOCABULARY)
        mask[row, 9 - length :] = 1
    expected = theirs(model, padded, attention_mask=mask).logits
    state = init_kimi_linear_state(config, (3,), capacity=70)
    packed = padded[mask.bool()]
    state, logits = kimi_linear(params, state, packed, config=config, cu_seqlens=cu_seqlens_of(lengths))
    assert_close([logits], [expected[mask.bool()]], 1e-5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        continued = model.generate(
            padded, attention_mask=mask, max_new_tokens=50, do_sample=False, eos_token_id=None
        )[:, 9:]
    token = logits[torch.tensor(lengths).cumsum(0) - 1].argmax(-1)
    step = partial(decode_step, params, config=config, temperature=0.0)
    _, rest = scan(step, (state, token), torch.zeros(49, 3))
    assert torch.equal(torch.cat([token.unsqueeze(0), rest]).T, continued)


def test_gradients(pair: Any, tmp_path: Path) -> None:
    """Of all parameters, by torch.func.grad here and autograd there; theirs are read as a checkpoint is."""
    model, config, params = pair
    # Their embedding has no gradient for token 0, its padding.
    tokens = 1 + tokens_of(2, 21, vocabulary=VOCABULARY - 1)

    def loss(logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(model(tokens).logits).backward()
    slopes = {name: p.grad for name, p in model.named_parameters()}
    slopes |= {name: torch.zeros_like(b) for name, b in model.named_buffers() if "correction" in name}
    saved(model, tmp_path)
    save_file({name: x.contiguous() for name, x in slopes.items()}, tmp_path / "model.safetensors")
    _, expected = load_kimi_linear(tmp_path)
    actual = grad(lambda params: loss(run(params, config, tokens)))(params)
    for a, e in zip(leaves(actual), leaves(expected), strict=True):
        assert a.shape == e.shape
        assert error(a, e) <= 1e-4 if e.any() else not a.any()
    assert sum(bool(e.any()) for e in leaves(expected)) > 20


# Against straight-line float64


@pytest.mark.parametrize("name", CONFIGS)
def test_the_equations(name: str) -> None:
    config = CONFIGS[name]
    params, tokens = random_params(config), tokens_of(2, 11)
    empty = init_kimi_linear_state(config, dtype=torch.float64)
    expected = torch.stack([hybrid.kimi_linear(params, row, config, empty) for row in tokens])
    assert_close([run(params, config, tokens)], [expected], 1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_tied_embeddings(name: str) -> None:
    config = replace(CONFIGS[name], tie_embeddings=True)
    params, tokens = random_params(config), tokens_of(5)
    assert params.head.shape == (0,)
    untied = params._replace(head=params.embedding)
    assert torch.equal(run(params, config, tokens), run(untied, CONFIGS[name], tokens))


# One function


@pytest.mark.parametrize("capacity", [None, 25])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_split_is_one_prefill(name: str, capacity: int | None) -> None:
    config = CONFIGS[name]
    params, tokens = random_params(config), tokens_of(2, 25)
    empty = init_kimi_linear_state(config, (2,), capacity=capacity, dtype=torch.float64)
    whole_state, whole = kimi_linear(params, empty, tokens, config=config)
    for cuts in ([0, 0, 1, 14, 25], [0, 20, *range(21, 26)]):
        state, pieces = empty, []
        for start, stop in pairwise(cuts):
            state, logits = kimi_linear(params, state, tokens[:, start:stop], config=config)
            pieces.append(logits)
        assert_close([torch.cat(pieces, 1)], [whole], 1e-12)
        actual, expected = ([x for x in leaves(tree) if x.numel()] for tree in (state, whole_state))
        assert_close(actual, expected, 1e-12)
    assert all(not leaf.any() for leaf in leaves(empty))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_is_one_by_one(name: str) -> None:
    config = CONFIGS[name]
    params, lengths = random_params(config), [4, 0, 1, 20]
    tokens = tokens_of(sum(lengths))
    state = init_kimi_linear_state(config, (4,), capacity=20, dtype=torch.float64)
    state, logits = kimi_linear(params, state, tokens, config=config, cu_seqlens=cu_seqlens_of(lengths))
    alone = [run(params, config, row) for row in tokens.split(lengths)]
    assert_close([logits], [torch.cat(alone)], 1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_vmap_over_beams(name: str) -> None:
    """Eight continuations of one state are its rows: mapped, batched and one by one."""
    config = CONFIGS[name]
    params, tokens = random_params(config), tokens_of(8, 1)
    state = init_kimi_linear_state(config, capacity=12, dtype=torch.float64)
    state, _ = kimi_linear(params, state, tokens_of(9), config=config)
    step = partial(kimi_linear, params, config=config)
    states, logits = vmap(step, in_dims=(None, 0))(state, tokens)
    for row, token in enumerate(tokens):
        one_state, one = step(state, token)
        assert_close([logits[row]], [one], 1e-12)
        mapped = tree_map(lambda x, row=row: x[row], states)
        for a, e in zip(leaves(mapped), leaves(one_state), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-13)
    # The mapped states are a batch of states.
    batched, _ = kimi_linear(params, states, tokens, config=config)
    again, _ = vmap(step)(states, tokens)
    for a, e in zip(leaves(batched), leaves(again), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CONFIGS)
def test_per_sample_gradients(name: str) -> None:
    """Through KDA, MLA and the experts alike."""
    config = CONFIGS[name]
    params, rows = random_params(config), tokens_of(3, 7)

    def loss(params: KimiLinearParams, tokens: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(run(params, config, tokens[:-1]), tokens[1:])

    mapped = vmap(grad(loss), in_dims=(None, 0))(params, rows)
    for row, tokens in enumerate(rows):
        alone = leaves(grad(loss)(params, tokens))
        for a, e in zip(leaves(mapped), alone, strict=True):
            torch.testing.assert_close(a[row], e, rtol=1e-9, atol=1e-12)
    assert sum(bool(x.any()) for x in leaves(mapped)) > 30


def test_nothing_is_written() -> None:
    params, tokens = random_params(KIMI_K3), tokens_of(2, 5)
    state = init_kimi_linear_state(KIMI_K3, (2,), capacity=9, dtype=torch.float64)
    before = tree_map(torch.clone, (params, state))
    new_state, _ = kimi_linear(params, state, tokens, config=KIMI_K3)
    for x, kept in zip(leaves((params, state)), leaves(before), strict=True):
        assert torch.equal(x, kept)
    places = {x.data_ptr() for x in leaves((params, state)) if x.numel()}
    assert not places & {x.data_ptr() for x in leaves(new_state) if x.numel()}


def test_half_precision_keeps_its_dtypes() -> None:
    params = init_kimi_linear(KIMI_K3, generator=seeded(), dtype=torch.bfloat16)
    state = init_kimi_linear_state(KIMI_K3, (2,), dtype=torch.bfloat16)
    new_state, logits = kimi_linear(params, state, tokens_of(2, 5), config=KIMI_K3)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all() and logits.any()
    dtypes = [[leaf.dtype for leaf in leaves(s)] for s in (state, new_state)]
    assert dtypes[0] == dtypes[1]
