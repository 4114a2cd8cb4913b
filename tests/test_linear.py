"""W8A8: exact against 64-bit integers, roundings, ends of the range, derivatives, the vendor's contract."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from contracts import quantised
from emulator import Emulator
from laws import assert_close
from subjects import IMPLS, WIDEST
from torch import Tensor
from torch.func import grad, jvp, vmap

from kda_fn import (
    W8A8,
    KDAConfig,
    KDAParams,
    SwiGLUParams,
    explain,
    init_kimi_delta_attention,
    init_state,
    kimi_delta_attention,
    linear,
    quantize,
    quantize_layer,
    swiglu,
)
from kda_fn.primitives import _targets
from kda_fn.primitives.linear import MOST, ascendc, dequantize, quantize_tokens
from kda_fn.primitives.linear.fallback import EXACT, ROWS, integer_product
from kda_fn.types import Impl


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bytes_of(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def exactly(x: Tensor, weight: Tensor) -> Tensor:
    """Sums of products in 64-bit integers."""
    return torch.stack([(row.long() * weight.long()).sum(-1) for row in x.reshape(-1, x.shape[-1])])


# Integers


@pytest.mark.parametrize("M", [1, 3, 4, 5, 20])
@pytest.mark.parametrize(("D", "out"), [(1, 1), (7, 5), (64, 16), (EXACT, 3), (EXACT + 1, 3), (5000, 8)])
def test_integer_products_are_exact(M: int, D: int, out: int) -> None:
    x, weight = bytes_of(M, D), bytes_of(out, D, seed=1)
    assert torch.equal(integer_product(x, weight).long(), exactly(x, weight))
    # All alike and as large as can be: float32 alone would lose digits. An odd number is the first it loses.
    for least in (-127, -128):
        x, weight = torch.full_like(x, 127), torch.full_like(weight, 127)
        weight[0] = least
        weight[0, 0] += 1
        assert torch.equal(integer_product(x, weight).long(), exactly(x, weight))


def test_integer_products_of_many_channels() -> None:
    """More than one part of the weight, the last of which is not full; and a weight that is a slice."""
    x, weight = bytes_of(3, 12), bytes_of(ROWS + 5, 24, seed=1)[:, 6:18]
    assert torch.equal(integer_product(x, weight).long(), exactly(x, weight))


def test_sums_fill_int32() -> None:
    """As long a sum as is taken, of the largest products."""
    x, weight = torch.full((1, MOST), 127, dtype=torch.int8), torch.full((2, MOST), -128, dtype=torch.int8)
    weight[1] = 127
    total = integer_product(x, weight)
    assert total.dtype == torch.int32
    assert total.tolist() == [[-128 * 127 * MOST, 127 * 127 * MOST]] and 128 * 127 * (MOST + 1) >= 2**31


@pytest.mark.parametrize("batch", [(), (0,), (2, 3), (2, 0)])
def test_batch_axes_of_integer_products(batch: tuple[int, ...]) -> None:
    x, weight = bytes_of(*batch, 9), bytes_of(4, 9, seed=1)
    y = integer_product(x, weight)
    assert y.shape == (*batch, 4)
    if x.numel():
        assert torch.equal(y.reshape(-1, 4).long(), exactly(x, weight))


# Tokens


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(33,), (4, 5), (2, 3, 70), (1, 300)])
def test_tokens(shape: tuple[int, ...], dtype: torch.dtype, impl: Impl) -> None:
    """The nearest step of max / 127, to the bit in every implementation."""
    x = rand(*shape, dtype=dtype)
    tokens, scale = quantize_tokens(x, impl=impl)
    assert tokens.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == shape[:-1]
    expected = x.float().abs().amax(-1) / 127
    assert torch.equal(scale, expected)
    assert torch.equal(tokens.long(), (x.float() / expected.unsqueeze(-1)).round().long())
    assert (tokens.abs().amax(-1) == 127).all()
    steps = (x.double() - tokens.double() * scale.double().unsqueeze(-1)).abs()
    assert (steps <= 0.5001 * scale.double().unsqueeze(-1)).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_halves_go_to_the_even_neighbour(impl: Impl) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5]])
    tokens, scale = quantize_tokens(x, impl=impl)
    assert scale.item() == 1
    assert tokens.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, 126]]


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_zeros_infinities_and_nan(impl: Impl) -> None:
    """Each stays in its row; zeros give zeros."""
    weight = quantize(rand(3, 5, seed=1))
    x = rand(6, 5)
    expected = linear(x[5:], weight, impl=impl)
    # Below the normal numbers a scale has few digits, or is 0: 190 of the smallest would be 127 of them.
    x[0], x[1, 2], x[2, 3], x[3], x[4] = 0, torch.nan, -torch.inf, 1e-45, 190 * 1.4e-45
    y = linear(x, weight, impl=impl)
    assert not y[[0, 3, 4]].any() and y[1:3].isnan().all()
    assert torch.equal(y[5:], expected) and expected.all()
    tokens, scale = quantize_tokens(x, impl=impl)
    assert not tokens[:5].any() and scale[1:3].isnan().all() and not scale[[0, 3, 4]].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_ends_of_the_range(impl: Impl) -> None:
    """Scales from the smallest normal number to the largest there is, and one step outside."""
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    x = torch.tensor([[127 * tiny, -tiny, 0], [126.9 * tiny, tiny, 0], [huge, -huge / 4, 1]])
    tokens, scale = quantize_tokens(x, impl=impl)
    assert tokens.tolist() == [[127, -1, 0], [0, 0, 0], [127, -32, 0]]
    assert scale[0] == tiny and scale[1] == 0 and scale[2] == torch.tensor(huge) / 127


@pytest.mark.parametrize("impl", IMPLS)
def test_tokens_are_constants(impl: Impl) -> None:
    """To reverse and to forward mode; and vmap is one more batch axis."""
    x = rand(3, 7).requires_grad_()
    tokens, scale = quantize_tokens(x, impl=impl)
    assert not tokens.requires_grad and not scale.requires_grad
    _, slope, *_ = jvp(lambda x: quantize_tokens(x, impl=impl)[1], (x.detach(),), (x.detach(),))
    assert not slope.any()
    mapped = vmap(lambda x: quantize_tokens(x, impl=impl))(x.detach())
    assert torch.equal(mapped[0], tokens) and torch.equal(mapped[1], scale) and tokens.any()


# The kernel


@pytest.mark.parametrize("impl", ["triton"])
def test_the_kernel_keeps_to_its_tensors(impl: Impl) -> None:
    """Fences around every argument; the emulator raises at the first access to one."""
    with Emulator(strict=True) as emulator:
        for shape in ((1, 1), (3, 5), (2, 3, 257), (20, 33)):
            quantize_tokens(rand(*shape), impl=impl)
            quantize_tokens(rand(*shape[:-1], 2 * shape[-1])[..., : shape[-1]], impl=impl)
        assert quantize_tokens(rand(0, 5), impl=impl)[1].shape == (0,)
    assert [launch.kernel for launch in emulator.launches] == ["_quantize_tokens"] * 8


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("D", [5, 300])
def test_the_tiles_of_cuda(D: int, impl: Impl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_targets.TARGETS, "cpu", lambda _device: _targets.CUDA)
    monkeypatch.setattr(_targets, "_launch", lambda *_args, **_kwargs: {})
    x = rand(9, D)
    for actual, expected in zip(
        quantize_tokens(x, impl=impl), quantize_tokens(x, impl="reference"), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("target", [_targets.ASCEND910B3, _targets.ASCEND910_9382], ids=lambda t: t.name)
def test_the_kernel_compiles_for_ascend(target: _targets.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest rows and long ones, without a value: memory is planned."""
    monkeypatch.setitem(_targets.TARGETS, "cpu", lambda _device: target)
    with Emulator(target=target.name, run=False, compile=True) as emulator:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for D in (1, 12288):
                quantize_tokens(torch.empty(4096, D, dtype=dtype), impl="triton")
    assert all(launch.compiled is not None for launch in emulator.launches) and len(emulator.launches) == 6


# The projection


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (6, 7), (2, 3, 7), (0, 7)])
def test_the_equation(shape: tuple[int, ...], dtype: torch.dtype, impl: Impl) -> None:
    if dtype == torch.float64 and impl == "triton":
        reason = explain(linear, rand(2, 7, dtype=dtype), quantize(rand(5, 7)))[impl]
        assert reason is not None and "float64" in reason
        return
    weight, bias = quantize(rand(5, 7, seed=1)), rand(5, seed=2, dtype=dtype)
    x = rand(*shape, dtype=dtype)
    tokens, s = quantize_tokens(x, impl="reference")
    total = exactly(tokens, weight.weight) if x.numel() else torch.zeros(0, 5)
    exact = total.double() * s.double().reshape(-1, 1) * weight.scale.double()
    y = linear(x, weight, impl=impl)
    assert y.shape == (*shape[:-1], 5) and y.dtype == dtype
    if x.numel():
        bound = 5e-3 if dtype in (torch.bfloat16, torch.float16) else 2e-7
        assert_close([y.reshape(-1, 5)], [exact], bound)
        assert torch.equal(linear(x, weight, bias, impl=impl), y + bias)


@pytest.mark.parametrize("impl", IMPLS)
def test_implementations_are_one_to_the_bit(impl: Impl) -> None:
    x, weight = rand(2, 9, 130, dtype=WIDEST[impl]), quantize(rand(17, 130, seed=1))
    expected = linear(x, weight, impl="reference")
    assert torch.equal(linear(x, weight, impl=impl), expected)
    wide = torch.zeros(2, 9, 260, dtype=x.dtype)
    wide[..., ::2] = x
    assert torch.equal(linear(wide[..., ::2], weight, impl=impl), expected)
    assert torch.equal(linear(x.mT.contiguous().mT, weight, impl=impl), expected)
    rows = [linear(row, weight, impl=impl) for row in x.unbind(0)]
    assert torch.equal(torch.stack(rows), expected)
    assert torch.equal(linear(x[0, :1].expand(6, 130), weight, impl=impl), expected[0, :1].expand(6, 17))


def test_a_floating_weight_is_torchs_own() -> None:
    x, weight, bias = rand(3, 7), rand(5, 7, seed=1), rand(5, seed=2)
    for impl in (None, *IMPLS):
        assert torch.equal(linear(x, weight, bias, impl=impl), torch.nn.functional.linear(x, weight, bias))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, weight.bfloat16(), bias)
        assert torch.equal(y, torch.nn.functional.linear(x, weight.bfloat16(), bias))


def test_a_half_precision_row_near_its_end() -> None:
    """The floating product, which the derivative is that of, may overflow where y does not."""
    x, weight = torch.full((1, 64), 40.0).half(), quantize(torch.full((1, 64), 25.55))
    x[0, 60:] = -40
    for impl in IMPLS[:2]:
        assert linear(x, weight, impl=impl).item() == pytest.approx(40 * 25.55 * 56, rel=1e-3)


def test_quantised_weights() -> None:
    weight = rand(6, 40)
    weight[2] = 0
    quantized = quantize(weight)
    assert quantized.weight.dtype == torch.int8 and quantized.shape == (6, 40) and quantized.ndim == 2
    assert not quantized.weight[2].any() and quantized.scale[2] == 0
    steps = (dequantize(quantized, torch.float64) - weight.double()).abs()
    assert (steps <= 0.5001 * quantized.scale.double().unsqueeze(-1)).all()
    # Errors of both roundings, each uniform in a step: of the weight's and the token's largest.
    x = rand(2000, 40, seed=1)
    weight = rand(50, 40, seed=2)
    share = [(a.abs().amax(-1) / 127).square().mean() / 12 / a.square().mean() for a in (x, weight)]
    exact = x.double() @ weight.double().T
    error = (linear(x, quantize(weight)).double() - exact).norm() / exact.norm()
    assert abs(error / sum(share) ** 0.5 - 1) < 0.1


def test_quantised_layers() -> None:
    """The named projections and no other; the error is that of the output."""
    params = SwiGLUParams(rand(30, 40), rand(30, 40, seed=1), rand(40, 30, seed=2))
    x = rand(50, 40, seed=3)
    quantised, error = quantize_layer(params, lambda params: swiglu(params, x), "gate", "down")
    assert isinstance(quantised, SwiGLUParams) and quantised.up is params.up
    assert isinstance(quantised.gate, W8A8) and isinstance(quantised.down, W8A8)
    exact = swiglu(params, x).double()
    assert error == float((swiglu(quantised, x).double() - exact).norm() / exact.norm())
    assert 1e-3 < error < 3e-2

    config = KDAConfig(hidden_size=40, num_heads=2, head_dim=8)
    layer = init_kimi_delta_attention(config, generator=torch.Generator().manual_seed(0))

    def apply(params: KDAParams) -> Tensor:
        return kimi_delta_attention(params, init_state(config), x, config=config)[1]

    mixed, error = quantize_layer(layer, apply, "qkv")
    assert isinstance(mixed.qkv, W8A8) and mixed.gates is layer.gates
    assert 1e-3 < error < 5e-2
    for name, kind in (("conv1d", "NoneType"), ("dt_bias", r"\(16,\)")):
        with pytest.raises(ValueError, match=rf"^quantize_layer: params.{name} must be .*, got {kind}"):
            quantize_layer(layer, apply, name)


# Derivatives


@pytest.mark.parametrize("impl", IMPLS)
def test_straight_through(impl: Impl) -> None:
    dtype = WIDEST[impl]
    x, weight, dy = rand(4, 7, dtype=dtype), quantize(rand(5, 7, seed=1)), rand(4, 5, seed=2, dtype=dtype)
    floating = dequantize(weight, torch.float64)
    expected = dy.double() @ floating
    bound = 1e-12 if dtype == torch.float64 else 2e-6

    def loss(x: Tensor) -> Tensor:
        return (linear(x, weight, impl=impl) * dy).sum()

    assert_close([grad(loss)(x)], [expected], bound)
    tracked = x.clone().requires_grad_()
    assert_close(torch.autograd.grad(loss(tracked), [tracked]), [expected], bound)
    tangent = rand(4, 7, seed=3, dtype=dtype)
    y, slope, *_ = jvp(lambda x: linear(x, weight, impl=impl), (x,), (tangent,))
    assert_close([slope], [tangent.double() @ floating.T], bound)
    assert torch.equal(y, linear(x, weight, impl=impl))
    rows = vmap(grad(lambda x, dy: (linear(x, weight, impl=impl) * dy).sum()))(x, dy)
    assert_close([rows], [expected], bound)
    # Of second order: with a cotangent that depends on x.
    curved = grad(lambda x: grad(lambda x: linear(x, weight, impl=impl).square().sum())(x).square().sum())(x)
    product = floating.T @ floating
    rounded = linear(x, weight, impl=impl).double()
    assert_close([curved], [8 * rounded @ floating @ product], bound)


@pytest.mark.parametrize("impl", IMPLS)
def test_vmap_is_the_loop(impl: Impl) -> None:
    x = rand(3, 4, 7, dtype=WIDEST[impl])
    weights = [quantize(rand(5, 7, seed=n)) for n in range(3)]
    stacked = W8A8(*(torch.stack(parts) for parts in zip(*weights, strict=True)))

    def call(x: Tensor, weight: W8A8) -> Tensor:
        return linear(x, weight, impl=impl)

    assert torch.equal(vmap(call, in_dims=(0, None))(x, weights[0]), call(x, weights[0]))
    assert torch.equal(vmap(call, in_dims=(1, None))(x, weights[0]), call(x.transpose(0, 1), weights[0]))
    loop = torch.stack([call(row, weight) for row, weight in zip(x, weights, strict=True)])
    assert torch.equal(vmap(call)(x, stacked), loop)
    alone = torch.stack([call(x[0], weight) for weight in weights])
    assert torch.equal(vmap(call, in_dims=(None, 0))(x[0], stacked), alone)


def test_compiled() -> None:
    x, weight = rand(4, 7), quantize(rand(5, 7, seed=1))
    compiled = torch.compile(lambda x: linear(x, weight), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x, weight))


# What does not fit


GOOD: dict[str, Any] = {"x": rand(3, 7), "weight": quantize(rand(5, 7))}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": rand(3, 6)}, ValueError, r"x has shape \(3, 6\), expected \[\*B D\] with .*D=7"),
        ({"x": torch.ones(3, 7, dtype=torch.int8)}, TypeError, "x must be a float"),
        ({"weight": (1, 2)}, TypeError, "weight must be W8A8, got tuple"),
        (
            {"weight": W8A8(rand(5, 7), rand(5))},
            TypeError,
            "weight.weight must be an int8 tensor, got torch.float32",
        ),
        (
            {"weight": W8A8(bytes_of(5, 7), rand(4))},
            ValueError,
            r"weight.scale has shape \(4,\), expected \[O\] with O=5",
        ),
        (
            {"weight": W8A8(bytes_of(5, 7), rand(5).bfloat16())},
            TypeError,
            "weight.scale must be float32 or float64, got torch.bfloat16",
        ),
        ({"weight": W8A8(bytes_of(5, 7).to("meta"), rand(5))}, ValueError, "one device"),
        (
            {"weight": GOOD["weight"]._replace(scale=rand(5).requires_grad_())},
            ValueError,
            "weight.scale must not require a gradient",
        ),
        (
            {"x": rand(1, MOST + 1), "weight": W8A8(bytes_of(1, MOST + 1), rand(1))},
            ValueError,
            r"weight.weight has shape \(1, 132105\), int32 sums up to D=132104",
        ),
        ({"weight": rand(5, 6)}, ValueError, r"x has shape \(3, 7\), expected \[\*B D\] with .*D=6"),
        ({"weight": rand(7)}, ValueError, r"weight has shape \(7,\), expected \[O D\]"),
        ({"weight": rand(5, 7).half()}, TypeError, "dtypes must agree, got x .*, weight torch.float16"),
        ({"weight": rand(5, 7), "bias": rand(4)}, ValueError, r"bias has shape \(4,\)"),
        ({"x": [1.0], "weight": rand(5, 7)}, TypeError, "x must be a tensor, got list"),
        ({"bias": rand(4)}, ValueError, r"bias has shape \(4,\)"),
        ({"bias": rand(5).double()}, TypeError, "dtypes must agree"),
        ({"impl": "cuda"}, ValueError, "impl must be None or one of"),
        ({"impl": "ascendc"}, NotImplementedError, "run on npu devices, these tensors are on cpu"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^linear: .*{says}"):
        linear(**{**GOOD, **change})


def test_quantize_wants_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"^quantize: weight has shape \(5,\), expected \[O D\]"):
        quantize(rand(5))
    with pytest.raises(TypeError, match=r"^quantize: weight must be a float"):
        quantize(bytes_of(5, 7))


# The vendor's operators, by their documentation


@pytest.fixture
def _npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strict stand-in for torch_npu, and CPU tensors that pass for an NPU's."""
    module = ModuleType("torch_npu")
    vars(module).update(
        npu_dynamic_quant=quantised.npu_dynamic_quant, npu_quant_matmul=quantised.npu_quant_matmul
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(ascendc, "DEVICE", "cpu")


@pytest.mark.usefixtures("_npu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (6, 7), (2, 3, 7), (0, 7)])
def test_the_contract(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, bias = quantize(rand(5, 7, seed=1)), rand(5, seed=2, dtype=dtype)
    x = rand(*shape, dtype=dtype)
    before = x.clone()
    y = linear(x, weight, bias, impl="ascendc")
    assert y.shape == (*shape[:-1], 5) and y.dtype == dtype
    if x.numel():
        assert_close([y], [linear(x.double(), weight, bias.double(), impl="reference")], 5e-3)
    assert torch.equal(x, before)
    wide = torch.zeros(*shape[:-1], 14, dtype=dtype)
    wide[..., ::2] = x
    assert torch.equal(linear(wide[..., ::2], weight, bias, impl="ascendc"), y)


@pytest.mark.usefixtures("_npu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_contract_to_the_bit(dtype: torch.dtype) -> None:
    """With scales that are powers of two no order of the factors rounds."""
    x = bytes_of(9, 70).to(dtype)
    x[:, 0] = 127
    weight = W8A8(bytes_of(6, 70, seed=1), 2.0 ** -torch.arange(7, 13))
    y = linear(x, weight, impl="ascendc")
    assert torch.equal(y, linear(x, weight, impl="reference"))
    assert torch.equal(y, (exactly(x.to(torch.int8), weight.weight) * weight.scale).to(dtype))


@pytest.mark.usefixtures("_npu")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "takes bfloat16 and float16, not torch.float32"),
        ({"weight": rand(5, 7)}, "torch's own product"),
        (
            {"x": rand(3, 7).bfloat16(), "weight": GOOD["weight"]._replace(scale=rand(5).double())},
            "a scale in float32, not in torch.float64",
        ),
        (
            {"x": rand(3, 7).bfloat16(), "weight": GOOD["weight"]._replace(weight=bytes_of(7, 5).T)},
            "the transpose of a contiguous",
        ),
        (
            {"x": rand(3, 65536).bfloat16(), "weight": W8A8(bytes_of(1, 65536), rand(1))},
            "axes of up to 65535, not 65536",
        ),
        ({"x": rand(3, 7).bfloat16().requires_grad_()}, "for inference"),
    ],
)
def test_the_contracts_limits(change: dict[str, Any], says: str) -> None:
    reason = explain(linear, **{**GOOD, **change})["ascendc"]
    assert reason is not None and says in reason


@pytest.mark.usefixtures("_npu")
def test_an_older_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rand(3, 7).bfloat16()
    assert explain(linear, x, GOOD["weight"])["ascendc"] is None
    assert vmap(lambda x: linear(x, GOOD["weight"]))(x).shape == (3, 5)
    with pytest.raises(NotImplementedError, match="no transform"):
        vmap(lambda x: linear(x, GOOD["weight"], impl="ascendc"))(x)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_dynamic_quant=None))
    reason = explain(linear, x, GOOD["weight"])["ascendc"]
    assert reason is not None and "has no npu_quant_matmul" in reason
