"""The law "the 32 transforms": every function, under every transform, equals its oracle under the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import subjects
import torch
from oracles import torch_oracles as oracles
from subjects import IMPLS, PURE, WIDEST
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils import _pytree as pytree
from transforms import EXPECTED, HIGHER, TRANSFORMS, VALUES, Problem, Tensors, assert_same, problem_of

import kda_fn
from kda_fn import KDAConfig
from kda_fn.primitives._primitive import PRIMITIVES
from kda_fn.types import Impl

# Torch's own: linearize folds constants into the graph that it traced.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

Lead = tuple[int, ...]


class Subject(NamedTuple):
    """A public function with its static arguments bound, the oracle of it, and arguments to draw."""

    impls: tuple[Impl, ...]
    function: Callable[..., Any]
    oracle: Callable[..., Any]
    draw: Callable[[torch.Generator, Lead], Tensors]
    few: tuple[int, ...]


class Draw(NamedTuple):
    """Draws float64 tensors with `lead` before each shape."""

    generator: torch.Generator
    lead: Lead

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*self.lead, *shape, generator=self.generator, dtype=torch.float64)

    def log_decay(self, *shape: int) -> Tensor:
        return -self.normal(*shape).abs()

    def unit_interval(self, *shape: int) -> Tensor:
        return torch.sigmoid(self.normal(*shape))


def _kda_inputs(generator: torch.Generator, lead: Lead, *, tokens: Lead, states: Lead = ()) -> Tensors:
    """H = 1, HV = 2, K = 2, V = 3."""
    d = Draw(generator, lead)
    return (
        d.normal(*states, 2, 2, 3),
        d.normal(*tokens, 1, 2),
        d.normal(*tokens, 1, 2),
        d.normal(*tokens, 2, 3),
        d.log_decay(*tokens, 2, 2),
        d.unit_interval(*tokens, 2),
    )


def _fused_inputs(generator: torch.Generator, lead: Lead, *, tokens: int, states: Lead = ()) -> Tensors:
    """The same before its gates."""
    d = Draw(generator, lead)
    return (
        *_kda_inputs(generator, lead, tokens=(tokens,), states=states)[:4],
        d.normal(tokens, 2, 2),
        d.normal(tokens, 2),
        d.normal(2, scale=0.3),
        d.normal(4),
    )


def _conv_inputs(generator: torch.Generator, lead: Lead, *, T: int, states: Lead = (), bias: bool) -> Tensors:
    """P = 2, W = 3."""
    d = Draw(generator, lead)
    inputs = d.normal(*states, 2, 2), d.normal(T, 2), d.normal(2, 3)
    return (*inputs, d.normal(2)) if bias else inputs


def _gate_inputs(generator: torch.Generator, lead: Lead) -> Tensors:
    """T = 2, HV = 2, K = 3."""
    d = Draw(generator, lead)
    return d.normal(2, 2, 3), d.normal(2, scale=0.3), d.normal(6)


def _norm_inputs(generator: torch.Generator, lead: Lead, *, streams: int, weight: bool) -> Tensors:
    """`streams` tensors [2 3], and a weight [3]."""
    d = Draw(generator, lead)
    inputs = tuple(d.normal(2, 3) for _ in range(streams))
    return (*inputs, d.normal(3)) if weight else inputs


def _without_weight(norm: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs, **options: norm(*inputs, None, **options)


def _subject(
    name: str,
    draw: Callable[..., Tensors],
    few: tuple[int, ...],
    *,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    chunk_size: int | None = None,
    **options: Any,
) -> Subject:
    """The public function and the oracle of one name, with the same options.

    Where a primitive's fallback is its definition, one of the two is tested.
    """
    public = next(function for function in PRIMITIVES if function.__name__ == name)
    calls = {impl: PRIMITIVES[public].implementations[impl].call for impl in PURE}
    same = calls["fallback"] is calls["reference"]
    impls: tuple[Impl, ...] = ("reference", "triton") if same else IMPLS
    function = partial(wrap(public), **options)
    function = function if chunk_size is None else partial(function, chunk_size=chunk_size)
    return Subject(impls, function, partial(wrap(getattr(oracles, name)), **options), draw, few)


def _layer(config: KDAConfig) -> Subject:
    """The layer as a function of the leaves of (params, state, x); T = 2 in one chunk."""
    params = kda_fn.init_kimi_delta_attention(config, dtype=torch.float64)
    # An absent tensor, of shape [0], beside one that is there: the biases here, A_log there.
    if config.output_gate == "low_rank":
        params = params._replace(output_gate_bias=torch.zeros(config.HV * config.V, dtype=torch.float64))
    if config.lower_bound is not None:
        params = params._replace(A_log=torch.zeros(0, dtype=torch.float64))
    like = (params, kda_fn.init_state(config, dtype=torch.float64), torch.zeros(2, config.D))
    leaves, structure = pytree.tree_flatten(like)

    def draw(generator: torch.Generator, lead: Lead) -> Tensors:
        d = Draw(generator, lead)
        return tuple(d.normal(*leaf.shape, scale=0.7) for leaf in leaves)

    def of_leaves(layer: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Tensor, **options: Any) -> Tensors:
            (conv_state, recurrent_state), y = layer(*pytree.tree_unflatten(args, structure), **options)
            return conv_state, recurrent_state, y

        return partial(function, config=config)

    # The state, which comes before x, and the smallest of the parameters.
    few = (len(leaves) - 2, len(leaves) - 1, _index(leaves, params.norm))
    layer, oracle = of_leaves(kda_fn.kimi_delta_attention), of_leaves(oracles.kimi_delta_attention)
    return Subject(IMPLS, layer, oracle, draw, few)


def _index(leaves: list[Tensor], tensor: Tensor) -> int:
    return next(n for n, leaf in enumerate(leaves) if leaf is tensor)


PACKED = (0, 2, 2, 5)

SUBJECTS: dict[str, Subject] = {
    "kda": _subject("kda", partial(_kda_inputs, tokens=(5,)), (2, 4, 5), chunk_size=4),
    "kda, packed": _subject(
        "kda", partial(_kda_inputs, tokens=(5,), states=(3,)), (2, 4, 5), chunk_size=2, cu_seqlens=PACKED
    ),
    "fused_kda, softplus": _subject("fused_kda", partial(_fused_inputs, tokens=3), (4, 6, 7), chunk_size=2),
    "fused_kda, bounded, packed": _subject(
        "fused_kda",
        partial(_fused_inputs, tokens=5, states=(3,)),
        (4, 5, 7),
        chunk_size=2,
        cu_seqlens=PACKED,
        lower_bound=-5.0,
        allow_neg_eigval=True,
    ),
    "kda_step": _subject("kda_step", partial(_kda_inputs, tokens=()), (2, 4, 5, 0)),
    "causal_conv1d": _subject("causal_conv1d", partial(_conv_inputs, T=3, bias=True), (0, 2, 1)),
    "causal_conv1d, packed": _subject(
        "causal_conv1d",
        partial(_conv_inputs, T=5, states=(3,), bias=False),
        (2, 1, 0),
        cu_seqlens=PACKED,
        activation=None,
    ),
    "kda_gate, softplus": _subject("kda_gate", _gate_inputs, (0, 1, 2)),
    "kda_gate, bounded": _subject("kda_gate", _gate_inputs, (0, 1, 2), lower_bound=-5.0),
    "l2_norm": _subject("l2_norm", partial(_norm_inputs, streams=1, weight=False), (0,)),
    "gated_rms_norm, sigmoid": _subject(
        "gated_rms_norm", partial(_norm_inputs, streams=2, weight=True), (0, 1, 2), eps=1e-5
    ),
    "gated_rms_norm, silu": _subject(
        "gated_rms_norm",
        partial(_norm_inputs, streams=2, weight=False),
        (0, 1),
        wrap=_without_weight,
        eps=1e-5,
        activation="silu",
    ),
    "residual_gated_rms_norm": _subject(
        "residual_gated_rms_norm",
        partial(_norm_inputs, streams=3, weight=True),
        (0, 1, 2, 3),
        eps=1e-5,
        activation="silu",
    ),
    "layer, Kimi-Linear": _layer(
        KDAConfig(hidden_size=3, num_heads=1, head_dim=2, conv_size=2, chunk_size=2)
    ),
    "layer, Kimi K3": _layer(
        KDAConfig(
            hidden_size=3,
            num_heads=1,
            head_dim=2,
            num_v_heads=2,
            head_v_dim=1,
            conv_size=2,
            lower_bound=-5.0,
            output_gate="full_rank",
            allow_neg_eigval=True,
            chunk_size=2,
        )
    ),
}


CASES = [(name, impl) for name, subject in SUBJECTS.items() for impl in subject.impls]


def _flat(function: Callable[..., Any], *args: Tensor) -> Tensors:
    """Functions of one output return it alone; a problem's returns a tuple."""
    result = function(*args)
    return (result,) if isinstance(result, Tensor) else tuple(result)


@cache
def _problem(name: str, impl: Impl) -> Problem:
    subject = SUBJECTS[name]
    function = partial(subject.function, impl=impl)
    problem = problem_of(partial(_flat, function), subject.draw, few=subject.few)
    # Plain torch is the same everywhere, and on the CPU these sizes are fastest.
    return problem.to(WIDEST[impl], "cpu" if impl in PURE else subjects.DEVICE)


@cache
def _expected(name: str, transform: str, dtype: torch.dtype) -> Any:
    """The oracle's, in float64 on the numbers rounded to `dtype`."""
    subject = SUBJECTS[name]
    problem = problem_of(partial(_flat, subject.oracle), subject.draw, few=subject.few)
    return TRANSFORMS[transform](problem.to(dtype).to(torch.float64))


def _tolerances(transform: str, dtype: torch.dtype) -> dict[str, float]:
    """In float32 some three times the error of the plain torch implementations, by order of derivative.

    The sizes are tiny, and so badly conditioned: one rounding of the layer's inputs alone moves some of its
    gradients by 5e-6. And the norm of a single value is a sign, up to eps: the smallest leaves are what
    cancellation left of it.
    """
    if dtype == torch.float64:
        return {"rtol": 1e-10}
    return {"rtol": 5e-6 if transform in VALUES else 1e-4 if transform in HIGHER else 5e-5, "floor": 1e-2}


def test_there_are_32() -> None:
    assert len(TRANSFORMS) == 32
    assert EXPECTED.keys() | VALUES | HIGHER <= TRANSFORMS.keys()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("subject", "impl"), CASES)
def test_transform(subject: str, impl: Impl, transform: str) -> None:
    actual = TRANSFORMS[transform](_problem(subject, impl))
    expected = _expected(subject, EXPECTED.get(transform, transform), WIDEST[impl])
    assert_same(actual, expected, **_tolerances(transform, WIDEST[impl]))


# Finite differences need float64.
@pytest.mark.parametrize(("subject", "impl"), [case for case in CASES if case[1] in PURE])
def test_gradcheck(subject: str, impl: Impl) -> None:
    """Both modes and their batched forms against finite differences, and the derivatives of the backward."""
    problem = _problem(subject, impl)
    args = tuple(x.clone().requires_grad_() for x in problem.args)
    # Of many arguments, random projections of the Jacobian instead of all of it.
    fast = sum(x.numel() for x in args) > 50
    assert gradcheck(
        problem.function,
        args,
        fast_mode=fast,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )
    assert gradgradcheck(
        problem.function,
        args,
        fast_mode=fast,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        check_batched_grad=True,
    )
