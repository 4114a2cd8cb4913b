"""mla_prolog: against equations token by token, under transforms, and its vendor operator by contract."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contracts.mla_prolog import FRACTAL_NZ, PAGED, RefusedError, TorchNPU
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jacrev, jvp, vmap

from kda_fn import explain
from kda_fn.primitives.linear import linear
from kda_fn.primitives.mla_prolog import ascendc, mla_prolog, mla_queries
from kda_fn.types import W8A8, Impl

H, K, E, L, R, D = 3, 5, 4, 6, 7, 8
EPS = 0.1
BATCHES = [(), (2,), (2, 3)]
OPTIONS = [(low_rank, rotary) for low_rank in (True, False) for rotary in (True, False)]
Inputs = dict[str, Any]


def inputs(
    batch: tuple[int, ...] = (2,),
    T: int = 5,
    *,
    low_rank: bool = True,
    rotary: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Arguments of a call by name; norms of about one, angles of unit length in each half."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (x / math.sqrt(shape[-1])).to(dtype)

    drawn: Inputs = {
        "x": normal(*batch, T, D) * 3,
        "q_down": normal(R, D) if low_rank else None,
        "q_norm": 1 + normal(R) if low_rank else None,
        "q_up": normal(H * (K + E), R if low_rank else D),
        "k_up": normal(H, K, L),
        "kv_down": normal(L + E, D),
        "kv_norm": 1 + normal(L),
    }
    if rotary:
        angle = 3 * torch.randn(*batch, T, E // 2, generator=generator, dtype=torch.float64)
        drawn["cos"], drawn["sin"] = (torch.cat([f(angle)] * 2, -1).to(dtype) for f in (torch.cos, torch.sin))
    return drawn


def call(function: Callable[..., Any], given: Inputs, **options: Any) -> tuple[Tensor, ...]:
    return function(**given, **{"eps": EPS, **options})


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative root mean square error."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    scale = expected.double().square().mean().sqrt()
    assert scale > 0
    return float((actual.double() - expected.double()).square().mean().sqrt() / scale)


# The equations, one token and one head at a time


def normed(v: Tensor, weight: Tensor) -> Tensor:
    return v / (v.square().sum() / len(v) + EPS).sqrt() * weight


def turned(v: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Neighbours are a complex number; real parts come out before imaginary ones, of angles of their own."""
    if cos is None or sin is None:
        return v
    z, angles = torch.complex(v[0::2], v[1::2]), torch.complex(cos, sin).chunk(2)
    return torch.cat([(z * angles[0]).real, (z * angles[1]).imag])


def oracle(given: Inputs) -> tuple[Tensor, ...]:
    """Of one sequence of float64."""
    rows = []
    for t, x in enumerate(given["x"]):
        cos, sin = (given[name][t] if name in given else None for name in ("cos", "sin"))
        kv = torch.stack([w @ x for w in given["kv_down"]])
        latent, shared = normed(kv[:L], given["kv_norm"]), turned(kv[L:], cos, sin)
        c = x if given["q_down"] is None else normed(given["q_down"] @ x, given["q_norm"])
        heads = [given["q_up"][h * (K + E) : (h + 1) * (K + E)] @ c for h in range(H)]
        nope = torch.stack([q[:K] for q in heads])
        q_latent = torch.stack([given["k_up"][h].T @ nope[h] for h in range(H)])
        rows.append((q_latent, torch.stack([turned(q[K:], cos, sin) for q in heads]), latent, shared, nope))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def batched_oracle(given: Inputs) -> tuple[Tensor, ...]:
    batch, names = given["x"].shape[:-2], [name for name in ("x", "cos", "sin") if name in given]
    flat = {name: given[name].reshape(-1, *given[name].shape[-2:]) for name in names}
    rows = [oracle({**given, **{name: x[i] for name, x in flat.items()}}) for i in range(math.prod(batch))]
    return tuple(torch.stack(column).reshape(*batch, *column[0].shape) for column in zip(*rows, strict=True))


@pytest.mark.parametrize(("low_rank", "rotary"), OPTIONS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("T", [1, 5])
def test_equations(low_rank: bool, rotary: bool, batch: tuple[int, ...], T: int) -> None:
    given = inputs(batch, T, low_rank=low_rank, rotary=rotary)
    *expected, nope = batched_oracle(given)
    for actual, wanted in zip(call(mla_prolog, given), expected, strict=True):
        assert error(actual, wanted) < 1e-13
    k_up = given.pop("k_up")
    q, latent, shared = call(mla_queries, given, num_heads=H)
    for actual, wanted in zip((q[..., :K], q[..., K:], latent, shared), (nope, *expected[1:]), strict=True):
        assert error(actual, wanted) < 1e-13
    # Absorbed is plain: the same scores, on either side of W_UK.
    absorbed = torch.einsum("...thl,...sl->...hts", expected[0], latent)
    plain = torch.einsum("...thk,...shk->...hts", q[..., :K], torch.einsum("hkl,...sl->...shk", k_up, latent))
    assert error(absorbed, plain) < 1e-13


@pytest.mark.parametrize(("low_rank", "rotary"), OPTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_no_tokens(low_rank: bool, rotary: bool, batch: tuple[int, ...]) -> None:
    given = inputs(batch, 0, low_rank=low_rank, rotary=rotary)
    shapes = [tuple(y.shape) for y in call(mla_prolog, given)]
    assert shapes == [(*batch, 0, H, L), (*batch, 0, H, E), (*batch, 0, L), (*batch, 0, E)]


def test_rotary_order() -> None:
    """Angles of zero still part the pairs, None leaves all as it is; the scores are the same."""
    given = inputs(rotary=False)
    ones = torch.ones(5, E, dtype=torch.float64)
    _, q, _, k = call(mla_prolog, given)
    _, q_parted, _, k_parted = call(mla_prolog, {**given, "cos": ones, "sin": 0 * ones})
    order = [*range(0, E, 2), *range(1, E, 2)]
    assert torch.equal(q_parted, q[..., order]) and torch.equal(k_parted, k[..., order])
    assert not torch.equal(q_parted, q)


def test_scores_depend_on_distance() -> None:
    """Equal tokens turned by t·f: their scores are a function of t - s."""
    given = inputs((), 1, rotary=False)
    given["x"] = given["x"].expand(4, D)
    angle = torch.arange(4.0, dtype=torch.float64).unsqueeze(-1) * torch.tensor([0.3, 1.1]).double()
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    _, q, _, k = call(mla_prolog, {**given, "cos": cos, "sin": sin})
    scores = torch.einsum("the,se->hts", q, k)
    assert error(scores[:, 1:, 1:], scores[:, :-1, :-1]) < 1e-13
    assert error(scores[:, 1:, 0], scores[:, :-1, 0]) > 1e-2


def test_angles_broadcast() -> None:
    """[T E] and [.. 1 E] are the same as their expansions."""
    given = inputs((2, 3))
    for index in [(0, 0), (slice(None), slice(0, 1)), (slice(None), slice(None), slice(0, 1))]:
        few = {name: given[name][index] for name in ("cos", "sin")}
        full = {name: x.expand_as(given["cos"]).contiguous() for name, x in few.items()}
        for a, b in zip(call(mla_prolog, {**given, **few}), call(mla_prolog, {**given, **full}), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("low_rank", "rotary"), OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)]
)
def test_dtypes(low_rank: bool, rotary: bool, dtype: torch.dtype, bound: float) -> None:
    """Against float64 on the same numbers; a result has the inputs' dtype."""
    given = inputs(low_rank=low_rank, rotary=rotary, dtype=dtype)
    wide = {name: x if x is None else x.double() for name, x in given.items()}
    for actual, expected in zip(call(mla_prolog, given), batched_oracle(wide)[:4], strict=True):
        assert actual.dtype == dtype
        assert error(actual, expected) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_round_once(dtype: torch.dtype) -> None:
    """In half precision the rotation is float32's, rounded."""
    given = inputs((), 50, dtype=dtype)
    plain = call(mla_prolog, {name: x for name, x in given.items() if name not in ("cos", "sin")})[3]
    rows = zip(plain.double(), given["cos"].double(), given["sin"].double(), strict=True)
    expected = torch.stack([turned(*row) for row in rows]).to(dtype)
    assert error(call(mla_prolog, given)[3], expected) < 1e-4


@pytest.mark.parametrize(("low_rank", "rotary"), OPTIONS)
def test_results_are_new_and_inputs_stay(low_rank: bool, rotary: bool) -> None:
    """Also of inputs that are views and expansions."""
    given = inputs(low_rank=low_rank, rotary=rotary)
    expected = call(mla_prolog, given)
    spread = {
        name: x if x is None else x.repeat_interleave(2, -1).contiguous()[..., ::2]
        for name, x in given.items()
    }
    copies = {name: x if x is None else x.clone() for name, x in spread.items()}
    results = call(mla_prolog, spread)
    storages = [y.untyped_storage() for y in results]
    assert len({s.data_ptr() for s in storages}) == 4
    for y, storage, wanted in zip(results, storages, expected, strict=True):
        assert error(y, wanted) < 1e-14
        assert storage.nbytes() == y.numel() * y.element_size()
    for x, copy in zip(tensors_of(spread), tensors_of(copies), strict=True):
        assert torch.equal(x, copy)


@pytest.mark.parametrize("low_rank", [True, False])
@pytest.mark.parametrize("impl", ["reference", "fallback"])
def test_quantised_projections(low_rank: bool, impl: Impl) -> None:
    """They go through `linear`; the rest is as it was."""
    given = inputs(low_rank=low_rank, rotary=False, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    names = [name for name in ("q_down", "q_up", "kv_down") if given[name] is not None]
    for name in names:
        rows, columns = given[name].shape
        weight = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
        given[name] = W8A8(weight, torch.rand(rows, generator=generator) / 100)
    q_latent, q_shared, latent, shared = call(mla_prolog, given, impl=impl)

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, given[name], impl="reference")

    kv = project(given["x"], "kv_down")
    c = F.rms_norm(project(given["x"], "q_down"), (R,), given["q_norm"], EPS) if low_rank else given["x"]
    q = project(c, "q_up").unflatten(-1, (H, K + E))
    expected = F.rms_norm(kv[..., :L], (L,), given["kv_norm"], EPS), kv[..., L:], q[..., K:]
    for y, wanted in zip((latent, shared, q_shared), expected, strict=True):
        assert error(y, wanted) < 1e-6
    assert error(q_latent, torch.einsum("bthk,hkl->bthl", q[..., :K], given["k_up"])) < 1e-6
    given["kv_down"] = W8A8(given["kv_down"].weight[:, 1:], given["kv_down"].scale)
    with pytest.raises(ValueError, match=r"mla_prolog: kv_down has shape \(10, 7\), expected \[L\+E D\]"):
        call(mla_prolog, given)


# Transforms


def loss_of(function: Callable[[Inputs], tuple[Tensor, ...]], given: Inputs) -> Callable[..., Tensor]:
    """A scalar of all results, as a function of the tensors in `given` by position."""
    present = [name for name, x in given.items() if x is not None]

    def loss(*tensors: Tensor) -> Tensor:
        results = function({**given, **dict(zip(present, tensors, strict=True))})
        return sum(((y + i).sin().sum() for i, y in enumerate(results[:4])), torch.zeros(()))

    return loss


def tensors_of(given: Inputs) -> list[Tensor]:
    return [x for x in given.values() if x is not None]


def prolog(given: Inputs) -> tuple[Tensor, ...]:
    return call(mla_prolog, given)


@pytest.mark.parametrize(("low_rank", "rotary"), OPTIONS)
def test_gradients(low_rank: bool, rotary: bool) -> None:
    """torch.func.grad of the function is autograd through the oracle, for every argument."""
    given = inputs((2,), 3, low_rank=low_rank, rotary=rotary)
    tensors = tensors_of(given)
    actual = grad(loss_of(prolog, given), tuple(range(len(tensors))))(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(loss_of(batched_oracle, given)(*leaves), leaves)
    for a, b in zip(actual, expected, strict=True):
        assert error(a, b) < 1e-11
    own = [x.clone().requires_grad_() for x in tensors]
    for a, b in zip(torch.autograd.grad(loss_of(prolog, given)(*own), own), expected, strict=True):
        assert error(a, b) < 1e-11


def test_forward_mode_and_second_derivatives() -> None:
    given = inputs((), 2)
    tensors = tensors_of(given)
    tangents = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double() for x in tensors]

    def derivatives(function: Callable[[Inputs], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        loss: Any = loss_of(function, given)
        return *jvp(loss, tuple(tensors), tuple(tangents)), jacrev(grad(loss))(*tensors)

    for actual, expected in zip(derivatives(prolog), derivatives(oracle), strict=True):
        assert error(actual, expected) < 1e-11


@pytest.mark.parametrize(("low_rank", "rotary"), OPTIONS)
@pytest.mark.parametrize("mapped", ["x", "weights", "all"])
def test_vmap_is_a_loop(low_rank: bool, rotary: bool, mapped: str) -> None:
    rows = [inputs(low_rank=low_rank, rotary=rotary, seed=seed) for seed in range(3)]
    names = [name for name, x in rows[0].items() if x is not None]
    of_tokens = {"x", "cos", "sin"}
    over = [mapped == "all" or (name in of_tokens) == (mapped == "x") for name in names]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return prolog({**rows[0], **dict(zip(names, tensors, strict=True))})

    stacked = [
        torch.stack([row[name] for row in rows]) if m else rows[0][name]
        for name, m in zip(names, over, strict=True)
    ]
    results = vmap(function, tuple(0 if m else None for m in over))(*stacked)
    for i, row in enumerate(rows):
        wanted = function(*(row[name] if m else rows[0][name] for name, m in zip(names, over, strict=True)))
        assert all(error(y[i], w) < 1e-14 for y, w in zip(results, wanted, strict=True))


def test_per_sample_gradients() -> None:
    given = inputs((3,), 4)
    samples = ("x", "cos", "sin")
    names = [name for name in given if name not in samples]

    def loss(weights: tuple[Tensor, ...], *tokens: Tensor) -> Tensor:
        arguments = dict(zip(names, weights, strict=True)) | dict(zip(samples, tokens, strict=True))
        return loss_of(prolog, arguments)(*arguments.values())

    weights = tuple(given[name] for name in names)
    tokens = tuple(given[name] for name in samples)
    each = vmap(grad(loss), (None, 0, 0, 0))(weights, *tokens)
    for i in range(3):
        alone = grad(loss)(weights, *(x[i] for x in tokens))
        assert all(error(a[i], b) < 1e-12 for a, b in zip(each, alone, strict=True))


# Errors


def without(*names: str) -> Callable[[Inputs], Inputs]:
    return lambda given: {**given, **dict.fromkeys(names)}


def changed(name: str, change: Callable[[Tensor], Any]) -> Callable[[Inputs], Inputs]:
    return lambda given: {**given, name: change(given[name])}


WRONG = [
    (
        without("q_norm"),
        ValueError,
        "q_down and q_norm must be tensors or None together, got q_norm=None alone",
    ),
    (without("q_down"), ValueError, "q_down and q_norm must be .* got q_down=None alone"),
    (without("sin"), ValueError, "cos and sin must be tensors or None together, got sin=None alone"),
    (without("kv_norm"), TypeError, "kv_norm must be a tensor, got NoneType"),
    (
        changed("k_up", lambda x: x.long()),
        TypeError,
        "k_up must be a float of 16, 32 or 64 bits, got torch.int64",
    ),
    (
        changed("q_up", lambda x: x.float()),
        TypeError,
        "dtypes must agree, got x torch.float64, q_up torch.float32",
    ),
    (
        changed("cos", lambda x: x.float()),
        TypeError,
        "dtypes must agree, got x torch.float64, cos torch.float32",
    ),
    (changed("kv_down", lambda x: x.to("meta")), ValueError, "one device, got x on cpu, kv_down on meta"),
    (changed("x", lambda x: x[0, 0]), ValueError, r"x has shape \(8,\), expected \[\*B T D\]"),
    (
        changed("q_down", lambda x: x[:, 1:]),
        ValueError,
        r"q_down has shape \(7, 7\), expected \[R D\] with R=7 D=8",
    ),
    (changed("q_norm", lambda x: x[1:]), ValueError, r"q_norm has shape \(6,\), expected \[R\] with R=7"),
    (changed("k_up", lambda x: x[0]), ValueError, r"k_up has shape \(5, 6\), expected \[H K L\]"),
    (changed("kv_norm", lambda x: x[1:]), ValueError, r"kv_norm has shape \(5,\), expected \[L\] with L=6"),
    (
        changed("kv_down", lambda x: x[:6]),
        ValueError,
        r"kv_down has shape \(6, 8\), .*\[L\+E D\] with L=6 E>=1 D=8",
    ),
    (
        changed("kv_down", lambda x: x[:, 1:]),
        ValueError,
        r"kv_down has shape \(10, 7\), expected \[L\+E D\] with",
    ),
    (changed("kv_down", lambda x: x[0, 0]), ValueError, r"kv_down has shape \(\), expected \[L\+E D\] with"),
    (
        changed("q_up", lambda x: x[1:]),
        ValueError,
        r"q_up has shape \(26, 7\), expected \[H\*\(K\+E\) R\] = \(27, 7\) with H=3 K=5 E=4 R=7",
    ),
    (changed("q_up", lambda x: x[:, 1:]), ValueError, r"q_up has shape \(27, 6\), expected .* = \(27, 7\)"),
    (changed("kv_down", lambda x: x[1:]), ValueError, "cos turns pairs of channels, and kv_down leaves E=3"),
    (
        changed("cos", lambda x: x[..., 1:]),
        ValueError,
        r"cos has shape \(2, 5, 3\), expected \[\*B T E\] = \(2, 5, 4\)",
    ),
    (changed("cos", lambda x: x[..., :1]), ValueError, r"cos has shape \(2, 5, 1\)"),
    (changed("sin", lambda x: x[:, 1:]), ValueError, r"sin has shape \(2, 4, 4\)"),
    (changed("sin", lambda x: x[None]), ValueError, r"sin has shape \(1, 2, 5, 4\)"),
    (changed("sin", lambda x: x[0, 0, 0]), ValueError, r"sin has shape \(\)"),
    (lambda given: {**given, "eps": -1.0}, ValueError, "eps must not be negative, got -1.0"),
    (lambda given: {**given, "eps": "1"}, TypeError, "eps must be a number, got '1'"),
    (lambda given: {**given, "impl": "cuda"}, ValueError, "impl must be None or one of"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG)
def test_errors(wrong: Callable[[Inputs], Inputs], kind: type[Exception], message: str) -> None:
    given = inputs()
    with pytest.raises(kind, match=f"^mla_prolog: .*{message}"):
        mla_prolog(**wrong(given))


def test_errors_without_low_rank_and_of_queries() -> None:
    given = inputs(low_rank=False)
    with pytest.raises(ValueError, match=r"q_up has shape \(27, 7\), expected \[H\*\(K\+E\) D\] = \(27, 8\)"):
        mla_prolog(**{**given, "q_up": given["q_up"][:, 1:]})
    del given["k_up"]
    with pytest.raises(ValueError, match="mla_queries: num_heads must be a positive integer, got 0"):
        mla_queries(**given, num_heads=0)
    for q_up in (given["q_up"][1:], given["q_up"][:9], given["q_up"][:, 1:], given["q_up"][0, 0]):
        with pytest.raises(ValueError, match=r"mla_queries: q_up has shape .* with H=3 K=\d E=4 D=8"):
            mla_queries(**{**given, "q_up": q_up}, num_heads=3)
    with pytest.raises(ValueError, match="mla_queries: eps must not be negative"):
        mla_queries(**given, num_heads=3, eps=-1.0)


def test_errors_under_a_transform() -> None:
    given = inputs()
    given["q_up"] = given["q_up"][1:]
    with pytest.raises(ValueError, match=r"^mla_prolog: q_up has shape \(26, 7\), expected"):
        vmap(lambda x, cos, sin: mla_prolog(**{**given, "x": x, "cos": cos, "sin": sin}))(
            given["x"], given["cos"], given["sin"]
        )


# The vendor operator, by contract


@pytest.fixture(scope="module")
def torch_npu() -> TorchNPU:
    return TorchNPU()


@pytest.fixture
def npu(torch_npu: TorchNPU, monkeypatch: pytest.MonkeyPatch) -> TorchNPU:
    """torch_npu's documented part, for tensors on the CPU."""
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    monkeypatch.setattr(ascendc, "DEVICE", "cpu")
    torch_npu.calls.clear()
    return torch_npu


@pytest.fixture(scope="module")
def weights(torch_npu: TorchNPU) -> Inputs:
    """Of the operator's sizes, kept as `explain` says."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).bfloat16()

    def kept(weight: Tensor) -> Tensor:
        return torch_npu.npu_format_cast(weight.T.contiguous(), FRACTAL_NZ).T

    return {
        "q_down": kept(normal(1536, 7168)),
        "q_norm": (1 + 0.3 * torch.randn(1536, generator=generator)).bfloat16(),
        "q_up": kept(normal(2 * (128 + 64), 1536)),
        "k_up": normal(2, 128, 512),
        "kv_down": kept(normal(512 + 64, 7168)),
        "kv_norm": (1 + 0.3 * torch.randn(512, generator=generator)).bfloat16(),
    }


def tokens(*lead: int, rotary: bool) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    drawn: Inputs = {"x": torch.randn(*lead, 7168, generator=generator).bfloat16()}
    if rotary:
        angle = 3 * torch.randn(*lead, 32, generator=generator)
        drawn["cos"], drawn["sin"] = (
            torch.cat([f(angle)] * 2, -1).bfloat16() for f in (torch.cos, torch.sin)
        )
    return drawn


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("lead", [(1,), (5,), (2, 3), (2, 1, 2)])
def test_operator_agrees(npu: TorchNPU, weights: Inputs, lead: tuple[int, ...], rotary: bool) -> None:
    """impl=None takes it, it fits the contract, and it is the reference to within bfloat16."""
    given = {**weights, **tokens(*lead, rotary=rotary)}
    assert explain(mla_prolog, **given)["ascendc"] is None
    copies = {name: x.clone() for name, x in given.items()}
    versions = {name: x._version for name, x in given.items()}
    results = call(mla_prolog, given)
    (seen,) = npu.calls
    assert seen["cache_mode"] == PAGED
    for name, x in given.items():
        assert x._version == versions[name] and torch.equal(x, copies[name])
    ours = {x.untyped_storage().data_ptr() for x in given.values()}
    assert not ours & {seen[cache].untyped_storage().data_ptr() for cache in ("kv_cache", "kr_cache")}
    assert len({y.untyped_storage().data_ptr() for y in results} | ours) == 4 + len(ours)
    reference = call(mla_prolog, given, impl="reference")
    assert len(npu.calls) == 1
    for y, wanted in zip(results, reference, strict=True):
        assert y.dtype == torch.bfloat16 and y.is_contiguous()
        assert y.untyped_storage().nbytes() == y.numel() * y.element_size()
        assert error(y, wanted) < 5e-3
    if rotary:
        # A wrong order or sign would be an error of about one.
        assert error(results[3], reference[3].flip(-1)) > 0.5


def test_operator_over_blocks(npu: TorchNPU, weights: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a block of the caches has."""
    monkeypatch.setattr(ascendc, "BLOCK", 16)
    given = {**weights, **tokens(17, rotary=False)}
    results = call(mla_prolog, given, impl="ascendc")
    assert npu.calls[0]["kv_cache"].shape == (2, 16, 1, 512)
    for y, wanted in zip(results, call(mla_prolog, given, impl="reference"), strict=True):
        assert error(y, wanted) < 5e-3


def test_operator_is_as_good_as_the_reference(npu: TorchNPU, weights: Inputs) -> None:
    """Against float64, each."""
    given = {**weights, **tokens(3, rotary=True)}
    exact = call(mla_prolog, {name: x.double() for name, x in given.items()}, impl="reference")
    for impl in ("ascendc", "reference"):
        for y, wanted in zip(call(mla_prolog, given, impl=impl), exact, strict=True):
            assert error(y, wanted) < 7e-3, impl


def test_operator_takes_views(npu: TorchNPU, weights: Inputs) -> None:
    """Tokens, norms and angles that are not contiguous, and angles of [T E]."""
    given = {**weights, **tokens(2, 3, rotary=True)}
    expected = call(mla_prolog, given, impl="ascendc")
    others = ("x", "q_norm", "kv_norm", "k_up", "cos", "sin")
    spread = {name: given[name].repeat_interleave(2, -1)[..., ::2] for name in others}
    for a, b in zip(call(mla_prolog, {**given, **spread}, impl="ascendc"), expected, strict=True):
        assert torch.equal(a, b)
    once = {name: given[name][0] for name in ("cos", "sin")}
    full = {name: x.expand(2, 3, 64).contiguous() for name, x in once.items()}
    expected = call(mla_prolog, {**given, **full}, impl="ascendc")
    for a, b in zip(call(mla_prolog, {**given, **once}, impl="ascendc"), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rotary", [True, False])
def test_operator_without_tokens(npu: TorchNPU, weights: Inputs, rotary: bool) -> None:
    """It is not called: some of its cache modes know no empty tensors."""
    results = call(mla_prolog, {**weights, **tokens(2, 0, rotary=rotary)}, impl="ascendc")
    assert [tuple(y.shape) for y in results] == [(2, 0, 2, 512), (2, 0, 2, 64), (2, 0, 512), (2, 0, 64)]
    assert not npu.calls


SMALLER = [
    ("D", "7168 or 7680", {"x": (3, 16), "q_down": (1536, 16), "kv_down": (576, 16)}),
    ("R", "1536", {"q_down": (8, 7168), "q_norm": (8,), "q_up": (384, 8)}),
    ("H", "1 or 2 or 4 or 8 or 16 or 32 or 64 or 128", {"k_up": (96, 128, 512), "q_up": (18432, 1536)}),
    ("K", "128", {"k_up": (2, 64, 512), "q_up": (256, 1536)}),
    ("L", "512", {"k_up": (2, 128, 256), "kv_down": (320, 7168), "kv_norm": (256,)}),
    ("E", "64", {"q_up": (320, 1536), "kv_down": (544, 7168)}),
]


@pytest.mark.parametrize(("letter", "fits", "shapes"), SMALLER)
def test_operator_sizes(
    npu: TorchNPU, weights: Inputs, letter: str, fits: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Each size that the operator does not take is named, with those that it takes."""
    given = {**weights, **tokens(3, rotary=False)}
    # Expanded: of the sizes without their memory.
    given |= {name: torch.zeros((), dtype=torch.bfloat16).expand(shape) for name, shape in shapes.items()}
    reason = explain(mla_prolog, **given)["ascendc"]
    assert reason is not None and f"{letter} = {fits}, not " in reason
    with pytest.raises(NotImplementedError, match=f"impl='ascendc' cannot serve .* {letter} = "):
        call(mla_prolog, given, impl="ascendc")


def test_operator_reasons(npu: TorchNPU, weights: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**weights, **tokens(3, rotary=True)}

    def reason(**changes: Any) -> str:
        found = explain(mla_prolog, **{**given, **changes})["ascendc"]
        assert found is not None
        return found

    q_up = torch.zeros((), dtype=torch.bfloat16).expand(384, 7168)
    assert "queries of low rank, and q_down and q_norm are None" in reason(
        q_down=None, q_norm=None, q_up=q_up
    )
    eight = W8A8(torch.zeros((), dtype=torch.int8).expand(576, 7168), torch.ones(576))
    assert "floating weights only" in reason(kv_down=eight)
    assert "bfloat16, not in torch.float16" in reason(**{name: x.half() for name, x in given.items()})
    assert "requires a gradient" in reason(x=given["x"].clone().requires_grad_())
    with torch.no_grad():
        assert explain(mla_prolog, **{**given, "x": given["x"].clone().requires_grad_()})["ascendc"] is None
    for name in ("q_down", "q_up", "kv_down"):
        as_loaded = given[name].clone(memory_format=torch.contiguous_format)
        assert f"keep torch_npu.npu_format_cast({name}.T.contiguous(), 29).T" in reason(**{name: as_loaded})
        for other in (as_loaded.T.contiguous().T, npu.npu_format_cast(as_loaded, FRACTAL_NZ)):
            assert f"reads {name} as [in, out]" in reason(**{name: other})
    under: list[str] = []

    def told(x: Tensor) -> Tensor:
        under.append(reason(x=x))
        return x

    x = given["x"]
    vmap(told)(x.unsqueeze(0))
    functionalize(told)(x)
    with forward_ad.dual_level():
        told(forward_ad.make_dual(x, x))
    assert len(under) == 3 and all("under no transform" in found for found in under)

    old = TorchNPU(device_name="Ascend310P3")
    monkeypatch.setitem(sys.modules, "torch_npu", old)
    assert "Ascend910B, Ascend910_93, Ascend950, this is an Ascend310P3" in reason()
    monkeypatch.delattr(TorchNPU, "npu_mla_prolog_v3")
    assert reason() == "this torch_npu has no npu_mla_prolog_v3"
    monkeypatch.setattr(ascendc, "DEVICE", "npu")
    assert "runs on npu devices, these tensors are on cpu" in reason()


def test_formats_must_be_allowed(weights: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are not, the cast gives a base format, and the operator would refuse it."""
    forbidding = TorchNPU(allow_internal_format=False)
    monkeypatch.setitem(sys.modules, "torch_npu", forbidding)
    monkeypatch.setattr(ascendc, "DEVICE", "cpu")
    names = ("q_down", "q_up", "kv_down")
    kept = {name: forbidding.npu_format_cast(weights[name].T, FRACTAL_NZ).T for name in names}
    reason = explain(mla_prolog, **{**weights, **kept, **tokens(3, rotary=False)})["ascendc"]
    assert reason is not None and "allow_internal_format = True" in reason


def test_transforms_still_work_where_the_operator_is(npu: TorchNPU, weights: Inputs) -> None:
    """They take the reference; so does a gradient."""
    given = {**weights, **tokens(2, 2, rotary=False)}
    mapped = vmap(lambda x: call(mla_prolog, {**weights, "x": x}))(given["x"])
    for y, wanted in zip(mapped, call(mla_prolog, given, impl="reference"), strict=True):
        assert error(y, wanted) < 5e-3
    slope = grad(lambda x: call(mla_prolog, {**weights, "x": x})[2].float().square().sum())(given["x"])
    assert slope.abs().sum() > 0
    assert not npu.calls


# The contract itself refuses what the documentation does


def documented_call(npu: TorchNPU, weights: Inputs) -> dict[str, Any]:
    """A call as documented, by the operator's names."""
    x = tokens(3, rotary=True)
    return {
        "token_x": x["x"],
        "weight_dq": weights["q_down"].T,
        "weight_uq_qr": weights["q_up"].T,
        "weight_uk": weights["k_up"],
        "weight_dkv_kr": weights["kv_down"].T,
        "rmsnorm_gamma_cq": weights["q_norm"],
        "rmsnorm_gamma_ckv": weights["kv_norm"],
        "rope_sin": x["sin"],
        "rope_cos": x["cos"],
        "kv_cache": torch.zeros(2, 16, 1, 512, dtype=torch.bfloat16),
        "kr_cache": torch.zeros(2, 16, 1, 64, dtype=torch.bfloat16),
        "cache_index": torch.tensor([31, 0, 17]),
    }


def test_contract_writes_where_it_is_told(npu: TorchNPU, weights: Inputs) -> None:
    given = documented_call(npu, weights)
    q, q_rope, *_ = npu.npu_mla_prolog_v3(**given)
    assert q.shape == (3, 2, 512) and q_rope.shape == (3, 2, 64)
    written = given["kv_cache"].view(32, 512).abs().sum(-1).nonzero().flatten()
    assert written.tolist() == [0, 17, 31]
    packed = {
        **given,
        "kv_cache": torch.zeros(3, 1, 512, dtype=torch.bfloat16),
        "kr_cache": torch.zeros(3, 1, 64, dtype=torch.bfloat16),
        "cache_index": None,
    }
    assert torch.equal(npu.npu_mla_prolog_v3(**packed, cache_mode="TND")[0], q)
    assert torch.equal(packed["kv_cache"][:, 0], given["kv_cache"].view(32, 512)[given["cache_index"]])
    assert torch.equal(packed["kr_cache"][:, 0], given["kr_cache"].view(32, 64)[given["cache_index"]])


BREACHES = [
    ("token_x", lambda x: x.float(), "token_x is torch.float32"),
    ("token_x", lambda x: x[:, :1024].contiguous(), "He 1024"),
    ("weight_dq", lambda x: x.T, "weight_dq is not contiguous"),
    ("weight_uq_qr", lambda x: x.clone(), "the format of weight_uq_qr"),
    ("weight_uk", lambda x: x.repeat(2, 1, 1)[:3], "N 3"),
    ("weight_uk", lambda x: x[:, :64].contiguous(), r"weight_uk is \(2, 64, 512\)"),
    ("rmsnorm_gamma_ckv", lambda x: x.float(), "rmsnorm_gamma_ckv is torch.float32"),
    ("rope_sin", lambda x: x[:1], r"rope_sin is \(1, 64\), not \(3, 64\)"),
    ("rope_cos", lambda x: x[:0], r"rope_cos is \(0, 64\), not \(3, 64\)"),
    ("kv_cache", lambda x: x[:, :8].contiguous(), "BlockSize 8"),
    ("kv_cache", lambda x: x[:, :, 0], "kv_cache has 3 axes"),
    ("kr_cache", lambda x: x[:1], "kr_cache is"),
    ("cache_index", lambda x: x + 1, "cache_index out of range"),
    ("cache_index", lambda x: x * 0, "two tokens in one slot"),
    ("cache_index", lambda x: x.int(), "cache_index is not contiguous int64"),
    ("cache_index", lambda x: x[:2], r"cache_index is \(2,\)"),
    ("cache_index", lambda x: None, "no cache_index"),
    ("cache_mode", lambda _: "BNSD", "cache_mode 'BNSD'"),
    ("cache_mode", lambda _: "TND", "cache_index in mode TND"),
    ("rmsnorm_epsilon_cq", lambda _: 1, "rmsnorm_epsilon_cq is 1, not a float"),
    ("dequant_scale_x", lambda _: torch.ones(3), "a scale where nothing is quantised"),
    ("weight_quant_mode", lambda _: 1, "quantised modes"),
]


@pytest.mark.parametrize(("name", "change", "message"), BREACHES)
def test_contract_refuses(
    npu: TorchNPU, weights: Inputs, name: str, change: Callable[[Any], Any], message: str
) -> None:
    given = documented_call(npu, weights)
    given[name] = change(given.get(name))
    with pytest.raises(RefusedError, match=message):
        npu.npu_mla_prolog_v3(**given)


def test_contract_refuses_shared_memory(npu: TorchNPU, weights: Inputs) -> None:
    given = documented_call(npu, weights)
    given["kr_cache"] = given["kv_cache"].flatten()[: 2 * 16 * 64].view(2, 16, 1, 64)
    with pytest.raises(RefusedError, match="a cache shares its memory"):
        npu.npu_mla_prolog_v3(**given)


# Where there is no NPU


def test_without_an_npu() -> None:
    given = inputs()
    reasons = explain(mla_prolog, **given)
    assert reasons["ascendc"] == "npu_mla_prolog_v3 runs on npu devices, these tensors are on cpu"
    assert reasons["fallback"] is None and reasons["reference"] is None
    with pytest.raises(NotImplementedError, match=r"impl='ascendc' cannot serve this call: .* on cpu"):
        mla_prolog(**given, impl="ascendc")
    assert "torch_npu" not in sys.modules
