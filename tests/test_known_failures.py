"""Situations in which public implementations of KDA and its kin went wrong, one test for each.

The source in each docstring is a public issue or pull request (FLA = flash-linear-attention, V = vLLM,
S = SGLang). The laws cover the whole kind of each; here is the very situation.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import subjects
import torch
import torch.nn.functional as F
from laws import EXACT, GRADIENT, SLOPE, VALUE, assert_close, assert_identical, draw, error, gradients, row
from oracles import torch_oracles as oracles
from subjects import CONV, DTYPES, IMPLS, KDA, LAYER, WIDEST, Inputs, cast, tree_map
from torch import Tensor

import kda_fn
from kda_fn import KDAConfig
from kda_fn.types import Impl

pytestmark = pytest.mark.parametrize("impl", IMPLS)


def here(tree: Any) -> Any:
    """The tensors, where the implementations under test run."""
    return tree_map(lambda x: x.to(subjects.DEVICE), tree)


def kda_inputs(impl: Impl, T: int, g: float | None = None, **sizes: int) -> Inputs:
    """One sequence without batch axes; `g` replaces the decay."""
    inputs = draw(KDA, impl, batch=(), T=T, **sizes)
    return inputs if g is None else {**inputs, "g": torch.full_like(inputs["g"], g)}


def check_kda(inputs: Inputs, impl: Impl, cu_seqlens: Any = None) -> None:
    """Values and gradients against the oracle, in every dtype above half precision."""
    for dtype in DTYPES[impl]:
        case = cast(KDA, inputs, dtype)
        assert_close(KDA.call(case, impl, cu_seqlens), KDA.call(case, None, cu_seqlens), VALUE[dtype])
        actual, expected = (gradients(KDA, case, i, cu_seqlens) for i in (impl, None))
        for a, e in zip(actual, expected, strict=True):
            assert torch.isfinite(a).all()
            assert (a == 0).all() if (e.abs() < 1e-30).all() else error(a, e) <= GRADIENT[dtype]


def test_01_memory_behind_the_rows(impl: Impl) -> None:
    """FLA 1134: K = 60, and 1e30 in memory behind each row of g."""
    inputs = kda_inputs(impl, T=70, K=60)
    wide = inputs["g"].new_full((*inputs["g"].shape[:-1], 64), 1e30)
    wide[..., :60] = inputs["g"]
    check_kda(inputs, impl)
    padded = {**inputs, "g": wide[..., :60]}
    assert_identical(KDA.call(padded, impl), KDA.call(inputs, impl))


def test_02_the_last_gate_reaches_no_earlier_token(impl: Impl) -> None:
    """FLA 1240: T = 22 with the bounded gate; only the last token's gate changes."""
    inputs = cast(KDA, kda_inputs(impl, T=22), torch.float32)
    inputs["g"] = here(-5 * torch.rand(inputs["g"].shape, generator=torch.Generator().manual_seed(0)))
    results = []
    for last in (-0.1, -5.0):
        g = inputs["g"].clone()
        g[-1] = last
        tracked = {name: x.clone().requires_grad_() for name, x in {**inputs, "g": g}.items()}
        _, o = kda_fn.kda(*tracked.values(), lower_bound=-5.0, impl=impl)
        slopes = torch.autograd.grad(o[:21].sum(), list(tracked.values()))
        assert all(bool((s[21:] == 0).all()) for s in slopes[1:])
        results.append((o[:21].detach(), slopes))
    assert_identical(results[0], results[1])


def test_03_saturated_bounded_gate(impl: Impl) -> None:
    """FLA 1007: A_log = 100 and raw = 1 give the bound itself and a gradient of zero."""
    for dtype in DTYPES[impl]:
        args = torch.ones(1, 2), torch.tensor([100.0]), torch.zeros(2)
        tracked = [here(x.to(dtype)).requires_grad_() for x in args]
        g = kda_fn.kda_gate(tracked[0], tracked[1], tracked[2], lower_bound=-5.0, impl=impl)
        assert (g == -5.0).all()
        assert all(bool((s == 0).all()) for s in torch.autograd.grad(g.sum(), tracked))


@pytest.mark.parametrize("g", [-5.0, -1.5, -6.0, 0.0, -20.0])
def test_04_05_16_32_one_decay_for_a_whole_chunk(g: float, impl: Impl) -> None:
    """TIRx 214 (-5), FLA's naive chunk (-1.5), FLA 924 (0), attention-gym 394 (-6): T = C = 64."""
    check_kda(kda_inputs(impl, T=64, g=g), impl)


def test_06_forgetting_everything(impl: Impl) -> None:
    """g = -inf, then ordinary decays: the state is exactly that of the tokens from there on."""
    for at in (0, 1, 40, 63, 64, 69):
        inputs = kda_inputs(impl, T=70)
        inputs["g"][at] = -torch.inf
        check_kda(inputs, impl)
        fresh = {name: x if name == "initial_state" else x[at:] for name, x in inputs.items()}
        fresh["initial_state"] = torch.zeros_like(inputs["initial_state"])
        assert_close(KDA.call(inputs, impl)[0], KDA.call(fresh, None)[0], EXACT[impl])


@pytest.mark.parametrize(("K", "V"), [(16, 16), (16, 24)])
def test_07_the_state_is_not_transposed(K: int, V: int, impl: Impl) -> None:
    """V 41292: an asymmetric initial state; two calls equal one."""
    inputs = kda_inputs(impl, T=30, K=K, V=V)
    state = torch.arange(1.0, 1 + 4 * K * V, dtype=torch.float64).reshape(4, K, V) / 100
    inputs["initial_state"] = state.to(inputs["initial_state"])
    whole = KDA.call(inputs, None)
    first = {name: x if name == "initial_state" else x[:11] for name, x in inputs.items()}
    second = {name: x[11:] for name, x in inputs.items() if name != "initial_state"}
    state, o_first = KDA.call(first, impl)
    state, o_second = KDA.call({"initial_state": state, **second}, impl)
    assert_close((state, torch.cat([o_first, o_second])), whole, EXACT[impl])


def test_08_grouped_value_heads(impl: Impl) -> None:
    """FLA 624: H = 16 and HV = 32 equal q and k repeated."""
    inputs = kda_inputs(impl, T=20, H=16, HV=32, K=4, V=3)
    repeated = {n: x.repeat_interleave(2, -2) if n in ("q", "k") else x for n, x in inputs.items()}
    assert_close(KDA.call(inputs, impl), KDA.call(repeated, None), EXACT[impl])


@pytest.mark.parametrize("cu_seqlens", [(0, 0, 1), (0, 0), (0, 5, 5, 9)])
def test_09_empty_sequences(cu_seqlens: tuple[int, ...], impl: Impl) -> None:
    """FlashKDA 29 and 32: an empty sequence returns its initial state."""
    inputs = draw(KDA, impl, batch=(), T=cu_seqlens[-1], N=len(cu_seqlens) - 1)
    state, o = KDA.call(inputs, impl, cu_seqlens)
    assert_close((state, o), KDA.call(inputs, None, cu_seqlens), EXACT[impl])
    for n in range(len(cu_seqlens) - 1):
        if cu_seqlens[n] == cu_seqlens[n + 1]:
            assert_identical(state[n], inputs["initial_state"][n])


def test_10_offsets_that_end_early(impl: Impl) -> None:
    """FLA 892: the error names both numbers."""
    inputs = draw(KDA, impl, batch=(), T=9, N=2)
    with pytest.raises(ValueError, match=r"9.*7"):
        KDA.call(inputs, impl, (0, 4, 7))


def test_11_a_strong_gate_at_a_boundary(impl: Impl) -> None:
    """sglang-jax 1587: packed lengths 63 and 65, a strong gate on both sides of the border."""
    inputs = draw(KDA, impl, batch=(), T=128, N=2)
    inputs["g"][61:65] = -30.0
    check_kda(inputs, impl, (0, 63, 128))


@pytest.mark.parametrize("lengths", [(65,), (65, 66, 71, 79)])
def test_12_fifty_runs(lengths: tuple[int, ...], impl: Impl) -> None:
    """npu 281: the same bits fifty times."""
    runs = 50 if impl == "fallback" else 3
    cu_seqlens = kda_fn.cu_seqlens_of(lengths)
    inputs = cast(KDA, draw(KDA, impl, batch=(), T=cu_seqlens[-1], N=len(lengths)), torch.float32)
    first = KDA.call(inputs, impl, cu_seqlens)
    for _ in range(runs - 1):
        assert_identical(KDA.call(inputs, impl, cu_seqlens), first)


def test_13_packed_inputs_and_expanded_cotangents(impl: Impl) -> None:
    """FLA 1138, 871: q, k, v split from one tensor; the cotangent of a sum has stride 0."""
    inputs = kda_inputs(impl, T=20, H=2, HV=2, K=4, V=4)
    packed = torch.cat([inputs[n] for n in "qkv"], -1).requires_grad_()
    rest = inputs["initial_state"], inputs["g"], inputs["beta"]

    def slope(function: Any, **kwargs: Any) -> Tensor:
        q, k, v = packed.split(4, -1)
        return torch.autograd.grad(function(rest[0], q, k, v, *rest[1:], **kwargs)[1].sum(), packed)[0]

    assert_close(slope(kda_fn.kda, impl=impl), slope(oracles.kda), SLOPE[impl])


@pytest.mark.parametrize("T", [1, 2])
def test_14_short_convolution_of_few_tokens(T: int, impl: Impl) -> None:
    """FLA 1140: W = 4, T = 1 and 2, and a cotangent for the final state (`gradients` weighs all outputs)."""
    inputs = draw(CONV, impl, batch=(2,), T=T)
    assert_close(CONV.call(inputs, impl), CONV.call(inputs, None), EXACT[impl])
    assert_close(gradients(CONV, inputs, impl), gradients(CONV, inputs, None), SLOPE[impl])


def test_15_a_closed_gate_passes_no_gradient(impl: Impl) -> None:
    """FLA 1071: SiLU(0) = 0, so x gets no gradient, and the gate gets norm/2."""
    x, gate = (here(x).requires_grad_() for x in (torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)))
    y = kda_fn.gated_rms_norm(x, gate, None, eps=0.0, activation="silu", impl=impl)
    dx, dgate = torch.autograd.grad(y.sum(), (x, gate))
    assert (y == 0).all()
    assert (dx == 0).all()
    assert torch.allclose(dgate, x.detach() / 12.5**0.5 / 2)


def test_17_one_row_four_times(impl: Impl) -> None:
    """FLA 671: four copies in a batch are identical, and identical to the row alone."""
    inputs = cast(KDA, kda_inputs(impl, T=66), torch.float32)
    copies = {name: x.expand(4, *x.shape).clone() for name, x in inputs.items()}
    alone = KDA.call(inputs, impl)
    for i in range(4):
        assert_identical([y[i] for y in KDA.call(copies, impl)], alone)


def test_18_slow_decay_over_a_long_sequence(impl: Impl) -> None:
    """vmlx-swift 433: 0.99992 per step for 4096 steps, bf16 inputs: they leave S_0 · e^-0.328."""
    T, g = 4096, -8e-5
    inputs = cast(KDA, kda_inputs(impl, T=T, g=g, H=1, HV=1, K=4, V=4), torch.bfloat16)
    inputs["g"] = torch.full_like(inputs["g"], g)
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    state, o = KDA.call(inputs, impl)
    assert error(state, inputs["initial_state"] * math.exp(T * g)) < 5e-4
    decay = torch.exp(g * here(torch.arange(1.0, T + 1)))
    expected = decay[:, None] * torch.einsum(
        "tk,kv->tv", inputs["q"][:, 0].float() / 2, inputs["initial_state"][0]
    )
    assert error(o[:, 0], expected) < 5e-3


def test_19_beta_is_not_rounded(impl: Impl) -> None:
    """S 38975: over a long decode in bf16, beta's arithmetic is float32.

    x is constant, so that the layer's beta is one number; the memory's fixed point would show its rounding.
    """
    config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    generator = torch.Generator().manual_seed(0)
    params = here(kda_fn.init_kimi_delta_attention(config, generator=generator, dtype=torch.bfloat16))
    x = here(torch.randn(8, generator=generator).bfloat16())
    state = here(kda_fn.init_state(config, dtype=torch.bfloat16))
    wide, y = state, x[None]
    for _ in range(64):
        state, y = kda_fn.kimi_delta_attention(params, state, x[None], config=config, impl=impl)
    wide, wide_y = oracles.kimi_delta_attention(params, wide, x.expand(64, 8), config=config)
    assert error(state.recurrent_state, wide.recurrent_state) < 1e-2
    assert error(y, wide_y[-1:]) < 2e-2


def test_20_initialisation_in_bf16(impl: Impl) -> None:
    """transformers 47842: A_log is drawn in float32 and never -inf; the layer's output is finite."""
    config = KDAConfig(hidden_size=8, num_heads=64, head_dim=2)
    generator = torch.Generator().manual_seed(0)
    draws = [
        kda_fn.init_kimi_delta_attention(config, generator=generator, dtype=torch.bfloat16) for _ in range(20)
    ]
    for params in draws:
        assert params.A_log.dtype == torch.float32
        assert (params.A_log >= 0).all()
        assert (params.A_log.exp() <= 16.001).all()
    x = here(torch.randn(5, 8, generator=generator).bfloat16())
    state = here(kda_fn.init_state(config, dtype=torch.bfloat16))
    _, y = kda_fn.kimi_delta_attention(here(draws[0]), state, x, config=config, impl=impl)
    assert y.isfinite().all()
    assert y.abs().max() > 0


def test_21_strided_queries_and_state(impl: Impl) -> None:
    """cudnn-frontend 1056: q is a slice of something larger, the state is transposed memory."""
    inputs = kda_inputs(impl, T=20, K=8, V=6)
    big = inputs["q"].new_full((*inputs["q"].shape[:-1], 24), 1e30)
    big[..., :8] = inputs["q"]
    strided = {**inputs, "q": big[..., :8]}
    strided["initial_state"] = inputs["initial_state"].mT.contiguous().mT
    assert_close(KDA.call(strided, impl), KDA.call(inputs, None), EXACT[impl])


@pytest.mark.parametrize("with_grad", [False, True])
def test_22_negative_eigenvalues_with_and_without_grad(with_grad: bool, impl: Impl) -> None:
    """FLA flash_kda: a beta logit of 3 gives 2 · sigmoid(3), under no_grad and under grad."""
    config = KDAConfig(hidden_size=1, num_heads=1, head_dim=1, allow_neg_eigval=True)
    drawn = kda_fn.init_kimi_delta_attention(config, dtype=WIDEST[impl])
    one, zero = torch.ones(1, 1, dtype=WIDEST[impl]), torch.zeros(1, 1, dtype=WIDEST[impl])
    params = here(
        drawn._replace(
            qkv=one.expand(3, 1),
            conv=F.pad(one.expand(3, 1), (3, 0)),
            gates=torch.tensor([[0.0], [3.0], [0.0]], dtype=WIDEST[impl]),
            decay=zero,
            A_log=-50 * one[0],
        )
    )
    state, one = here((kda_fn.init_state(config, dtype=WIDEST[impl]), one))
    with torch.set_grad_enabled(with_grad):
        state, _ = kda_fn.kimi_delta_attention(
            params._replace(gates=params.gates.requires_grad_(with_grad)),
            state,
            one,
            config=config,
            impl=impl,
        )
    silu = 1 / (1 + math.exp(-1))
    expected = 2 / (1 + math.exp(-3)) * silu / math.sqrt(silu**2 + 1e-6) * silu
    memory = state.recurrent_state.detach()
    assert_close(memory, torch.full_like(memory, expected, dtype=torch.float64), EXACT[impl])


def test_33_small_queries_keep_their_direction(impl: Impl) -> None:
    """mlx-lm 1624: eps is added to the sum of squares: 1e-3 · (0.6, 0.8) comes out with norm sqrt(1/2)."""
    direction = here(torch.tensor([0.6, 0.8], dtype=torch.float64))
    y = kda_fn.l2_norm((1e-3 * direction).to(WIDEST[impl]), impl=impl)
    assert_close(y, direction / 2**0.5, EXACT[impl])


def test_34_nan_in_one_packed_sequence(impl: Impl) -> None:
    """V 51039: offsets 0, 2048, 2049, 2561; NaN in the one token of the second."""
    cu_seqlens = (0, 2048, 2049, 2561)
    inputs = cast(KDA, draw(KDA, impl, batch=(), T=2561, N=3, H=1, HV=1, K=4, V=4), torch.float32)
    expected = KDA.call(inputs, impl, cu_seqlens)
    poisoned = {name: x.clone() for name, x in inputs.items()}
    for name in ("q", "k", "v", "g", "beta"):
        poisoned[name][2048] = torch.nan
    state, o = KDA.call(poisoned, impl, cu_seqlens)
    assert state[1].isnan().all()
    assert_identical(
        (state[[0, 2]], o[:2048], o[2049:]), (expected[0][[0, 2]], expected[1][:2048], expected[1][2049:])
    )


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_35_identical_keys(beta: float, impl: Impl) -> None:
    """A chunk of one key: the inverse of I + L is far from its Neumann series."""
    inputs = kda_inputs(impl, T=64, g=0.0)
    inputs["k"] = inputs["k"][:1].expand(inputs["k"].shape).clone()
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    for dtype in DTYPES[impl]:
        case = cast(KDA, inputs, dtype)
        # At beta = 2 every write reflects the state: rounding is carried on, not forgotten.
        reflected = beta == 2 and dtype == torch.float32
        assert_close(KDA.call(case, impl), KDA.call(case, None), 5e-5 if reflected else VALUE[dtype])


def test_36_the_returned_state_is_only_the_state(impl: Impl) -> None:
    """After a long prompt the state's storage holds the state, not the prompt."""
    T = 100_000 if impl == "fallback" else 500
    generator = torch.Generator().manual_seed(0)
    config = KDAConfig(hidden_size=4, num_heads=1, head_dim=4)
    params = kda_fn.init_kimi_delta_attention(config, generator=generator)
    inputs = here((params, kda_fn.init_state(config), torch.randn(T, 4, generator=generator)))
    with torch.no_grad():
        state, _ = kda_fn.kimi_delta_attention(*inputs, config=config, impl=impl)
    for x in state:
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
        assert x.abs().max() > 0


def test_37_growth_is_legal(impl: Impl) -> None:
    """cuLA 89: g = +5 for 16 tokens, and growth and decay in turn for 128."""
    # The derivative of a chunk holds products of two growths: in float32 its range ends at half the exponent.
    check_kda(kda_inputs(impl, T=8, g=5.0), impl)
    grown = cast(KDA, kda_inputs(impl, T=16, g=5.0), torch.float32)
    assert_close(KDA.call(grown, impl), KDA.call(grown, None), max(VALUE[torch.float32], EXACT[impl]))
    swing = kda_inputs(impl, T=128)
    swing["g"][::2] += 5
    swing["g"][1::2] -= 5
    check_kda(swing, impl)
    with pytest.raises(ValueError, match="lower_bound"):
        kda_fn.kda(*kda_inputs(impl, T=4).values(), lower_bound=-6.0, impl=impl)


def test_rows_of_a_layer_start_from_their_own_state(impl: Impl) -> None:
    """V 51503's kind: a fresh row beside one with a long history starts from zeros."""
    inputs = draw(LAYER, impl, batch=(2,), T=1)
    for name in LAYER.states:
        inputs[name][0] = 1e4
        inputs[name][1] = 0
    alone = LAYER.call(row(LAYER, inputs, 1), None)
    assert_close([y[1] for y in LAYER.call(inputs, impl)], alone, EXACT[impl])
