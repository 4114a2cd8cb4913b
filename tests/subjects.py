"""What the laws are run on: every primitive, with its variants, and the layer.

A subject turns named inputs into outputs. It knows which inputs carry batch axes, which axis is time, and
which inputs are states, so that a law can be written once for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from oracles import torch_oracles as oracles
from torch import Tensor
from torch.utils import _pytree as pytree

import kda_fn
from kda_fn import KDAConfig, KDAState
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.types import Impl

PURE: tuple[Impl, ...] = ("reference", "fallback")
"""The implementations in plain torch, which serve every dtype."""

IMPLS: tuple[Impl, ...] = (*PURE, "triton")
"""All that the laws run for; `conftest.py` serves the kernels where there is no device for them."""

DTYPES: dict[Impl, tuple[torch.dtype, ...]] = {
    impl: (torch.float64, torch.float32) if impl in PURE else (torch.float32,) for impl in IMPLS
}
"""The dtypes above half precision that an implementation serves, the widest first."""

WIDEST: dict[Impl, torch.dtype] = {impl: dtypes[0] for impl, dtypes in DTYPES.items()}

DEVICE = "cpu"
"""Where the inputs of the laws are made (`pytest --device`)."""

Inputs = dict[str, Any]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Subject:
    """One function under the laws.

    make      sizes, batch shape, T, N -> inputs by name in float64; N is the state's extra axis, or None
    run       inputs, impl (None: the oracle), cu_seqlens -> outputs, states first
    time      the time axis, counted from the end, of every input that has one
    y_time    the same of y, the outputs after the states; 0 where there is no time
    shared    inputs without batch axes
    states    inputs that are states, in the order of the outputs
    keep_wide inputs that stay float32 when the others are cast to a half precision
    cancels   gradients of weights are sums that cancel and keep the roundings before them: in half precision
              all gradients are compared as one vector
    seed      of the inputs: a layer's gradients cancel in some draws, and lose there, in every
              implementation, up to five times what is rounded
    """

    name: str
    make: Callable[..., Inputs]
    run: Callable[..., tuple[Tensor, ...]]
    time: dict[str, int]
    y_time: int
    states: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    keep_wide: tuple[str, ...] = ()
    packs: bool = False
    sizes: Sizes = field(default_factory=dict)
    is_layer: bool = False
    cancels: bool = False
    seed: int = 0

    def inputs(
        self,
        batch: tuple[int, ...] = (2,),
        T: int = 21,
        N: int | None = None,
        seed: int | None = None,
        **sizes: int,
    ) -> Inputs:
        """Random float64 inputs; `batch` and T as asked, other sizes as the subject's or given."""
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        inputs = self.make(generator, {**self.sizes, **sizes}, batch, T, N)
        return tree_map(lambda x: x.to(DEVICE), inputs)

    def call(self, inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None) -> tuple[Tensor, ...]:
        """The implementation's outputs, or with None the oracle's, which runs in float64 on the CPU."""
        if impl is not None:
            return self.run(inputs, impl, cu_seqlens)
        outputs = self.run(tree_map(lambda x: x.to("cpu", torch.float64), inputs), None, cu_seqlens)
        return tuple(y.to(DEVICE) for y in outputs)


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def cast(subject: Subject, inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs in `dtype`; states of a memory, gates and the like stay float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)

    def convert(name: str, value: Any) -> Any:
        if name == "params":
            narrow = tree_map(lambda leaf: leaf.to(dtype), value)
            return narrow._replace(
                conv=value.conv.to(wide), A_log=value.A_log.to(wide), dt_bias=value.dt_bias.to(wide)
            )
        return value.to(wide if name in subject.keep_wide else dtype)

    return {name: convert(name, value) for name, value in inputs.items()}


# kda and kda_step


def _make_kda(
    generator: torch.Generator, sizes: Sizes, batch: tuple[int, ...], T: int, N: int | None
) -> Inputs:
    H, HV, K, V = (sizes[letter] for letter in ("H", "HV", "K", "V"))
    rows = batch if N is None else (*batch, N)
    q, k = (unit(rand(generator, *batch, T, H, K)) for _ in "qk")
    return {
        "initial_state": rand(generator, *rows, HV, K, V),
        "q": q,
        "k": k,
        "v": rand(generator, *batch, T, HV, V),
        "g": -torch.nn.functional.softplus(2 * rand(generator, *batch, T, HV, K) - 1),
        "beta": torch.sigmoid(rand(generator, *batch, T, HV)),
    }


def _call_kda(inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None, **kwargs: Any) -> tuple[Tensor, ...]:
    if impl is None:
        return oracles.kda(*inputs.values(), cu_seqlens=cu_seqlens)
    return kda_fn.kda(*inputs.values(), cu_seqlens=cu_seqlens, impl=impl, **kwargs)


def _make_step(
    generator: torch.Generator, sizes: Sizes, batch: tuple[int, ...], T: int, N: int | None
) -> Inputs:
    inputs = _make_kda(generator, sizes, batch, 1, None)
    return {
        name: value if name == "initial_state" else value.squeeze(-2 if name == "beta" else -3)
        for name, value in inputs.items()
    }


def _call_step(inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None) -> tuple[Tensor, ...]:
    if impl is None:
        return oracles.kda_step(*inputs.values())
    return kda_fn.kda_step(*inputs.values(), impl=impl)


KDA = Subject(
    "kda",
    _make_kda,
    _call_kda,
    time={"q": -3, "k": -3, "v": -3, "g": -3, "beta": -2},
    y_time=-3,
    states=("initial_state",),
    keep_wide=("initial_state", "g", "beta"),
    packs=True,
    sizes={"H": 2, "HV": 4, "K": 5, "V": 3},
)
KDA_STEP = replace(KDA, name="kda_step", make=_make_step, run=_call_step, time={}, y_time=0, packs=False)


# fused_kda


def _make_fused(
    generator: torch.Generator, sizes: Sizes, batch: tuple[int, ...], T: int, N: int | None
) -> Inputs:
    """As `_make_kda`, before the gates."""
    H, HV, K, V = (sizes[letter] for letter in ("H", "HV", "K", "V"))
    rows = batch if N is None else (*batch, N)
    return {
        "initial_state": rand(generator, *rows, HV, K, V),
        "q": rand(generator, *batch, T, H, K),
        "k": rand(generator, *batch, T, H, K),
        "v": rand(generator, *batch, T, HV, V),
        "raw": 2 * rand(generator, *batch, T, HV, K),
        "beta": rand(generator, *batch, T, HV),
        "A_log": 0.5 * rand(generator, HV),
        "dt_bias": 0.5 * rand(generator, HV * K) - 1,
    }


def _fused(lower_bound: float | None, allow_neg_eigval: bool) -> Callable[..., tuple[Tensor, ...]]:
    options: dict[str, Any] = {"lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}

    def call(inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None, **kwargs: Any) -> tuple[Tensor, ...]:
        if impl is None:
            return oracles.fused_kda(*inputs.values(), cu_seqlens=cu_seqlens, **options)
        return fused_kda(*inputs.values(), cu_seqlens=cu_seqlens, impl=impl, **options, **kwargs)

    return call


FUSED_KDA = Subject(
    "fused_kda softplus",
    _make_fused,
    _fused(None, allow_neg_eigval=False),
    time={"q": -3, "k": -3, "v": -3, "raw": -3, "beta": -2},
    y_time=-3,
    states=("initial_state",),
    shared=("A_log", "dt_bias"),
    keep_wide=("initial_state", "A_log", "dt_bias"),
    packs=True,
    cancels=True,
    sizes={"H": 2, "HV": 2, "K": 5, "V": 3},
)
FUSED_KDA_BOUNDED = replace(
    FUSED_KDA,
    name="fused_kda bounded, HV > H, reflections",
    run=_fused(-5.0, allow_neg_eigval=True),
    sizes={"H": 1, "HV": 2, "K": 5, "V": 3},
)


# causal_conv1d


def _make_conv(
    generator: torch.Generator, sizes: Sizes, batch: tuple[int, ...], T: int, N: int | None
) -> Inputs:
    W, P = sizes["W"], sizes["P"]
    rows = batch if N is None else (*batch, N)
    inputs = {
        "conv_state": rand(generator, *rows, W - 1, P),
        "x": rand(generator, *batch, T, P),
        "weight": rand(generator, P, W),
    }
    return {**inputs, "bias": rand(generator, P)} if sizes["bias"] else inputs


def _conv(activation: str | None) -> Callable[..., tuple[Tensor, ...]]:
    def call(inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None) -> tuple[Tensor, ...]:
        kwargs: dict[str, Any] = {"activation": activation, "cu_seqlens": cu_seqlens}
        if impl is None:
            return oracles.causal_conv1d(*inputs.values(), **kwargs)
        return kda_fn.causal_conv1d(*inputs.values(), impl=impl, **kwargs)

    return call


CONV = Subject(
    "causal_conv1d",
    _make_conv,
    _conv("silu"),
    time={"x": -2},
    y_time=-2,
    states=("conv_state",),
    shared=("weight", "bias"),
    keep_wide=("weight", "bias"),
    packs=True,
    sizes={"W": 4, "P": 6, "bias": 0},
)
CONV_BIAS = replace(CONV, name="causal_conv1d bias", run=_conv(None), sizes={"W": 3, "P": 5, "bias": 1})


# gates and norms: time is one of their batch axes


def _make_gate(
    generator: torch.Generator, sizes: Sizes, batch: tuple[int, ...], T: int, N: int | None
) -> Inputs:
    HV, K = sizes["HV"], sizes["K"]
    return {
        "raw": 2 * rand(generator, *batch, T, HV, K),
        "A_log": rand(generator, HV),
        "dt_bias": rand(generator, HV * K),
    }


def _gate(lower_bound: float | None) -> Callable[..., tuple[Tensor, ...]]:
    def call(inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None) -> tuple[Tensor, ...]:
        if impl is None:
            return (oracles.kda_gate(*inputs.values(), lower_bound=lower_bound),)
        return (kda_fn.kda_gate(*inputs.values(), lower_bound=lower_bound, impl=impl),)

    return call


SOFTPLUS_GATE = Subject(
    "kda_gate softplus",
    _make_gate,
    _gate(None),
    time={"raw": -3},
    y_time=-3,
    shared=("A_log", "dt_bias"),
    keep_wide=("A_log", "dt_bias"),
    sizes={"HV": 3, "K": 5},
)
BOUNDED_GATE = replace(SOFTPLUS_GATE, name="kda_gate bounded", run=_gate(-5.0))


def _make_norm(*names: str) -> Callable[..., Inputs]:
    def make(
        generator: torch.Generator, sizes: Sizes, batch: tuple[int, ...], T: int, N: int | None
    ) -> Inputs:
        F = sizes["F"]
        return {
            name: rand(generator, F) if name == "weight" else rand(generator, *batch, T, F) for name in names
        }

    return make


def _norm(function: str, **kwargs: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Calls the library's or the oracle's function of that name; a missing weight is None."""

    def call(inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None) -> tuple[Tensor, ...]:
        args = dict(inputs) if function == "l2_norm" else {"weight": None, **inputs}
        if impl is None:
            outputs = getattr(oracles, function)(**args, **kwargs)
        else:
            outputs = getattr(kda_fn, function)(**args, impl=impl, **kwargs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return call


L2_NORM = Subject("l2_norm", _make_norm("x"), _norm("l2_norm"), time={"x": -2}, y_time=-2, sizes={"F": 7})
NORM = Subject(
    "gated_rms_norm",
    _make_norm("x", "gate", "weight"),
    _norm("gated_rms_norm", eps=1e-5),
    time={"x": -2, "gate": -2},
    y_time=-2,
    shared=("weight",),
    sizes={"F": 7},
)
SILU_NORM = replace(
    NORM,
    name="gated_rms_norm silu, no weight",
    make=_make_norm("x", "gate"),
    run=_norm("gated_rms_norm", eps=1e-5, activation="silu"),
)
RESIDUAL_NORM = replace(
    NORM,
    name="residual_gated_rms_norm",
    make=_make_norm("residual", "x", "gate", "weight"),
    run=_norm("residual_gated_rms_norm", eps=1e-5, activation="silu"),
    time={"residual": -2, "x": -2, "gate": -2},
)


# the layer


def _layer_subject(name: str, config: KDAConfig, seed: int) -> Subject:
    def make(
        generator: torch.Generator, sizes: Sizes, batch: tuple[int, ...], T: int, N: int | None
    ) -> Inputs:
        rows = batch if N is None else (*batch, N)
        params = kda_fn.init_kimi_delta_attention(config, generator=generator, dtype=torch.float64)
        if config.output_gate == "low_rank":
            params = params._replace(output_gate_bias=rand(generator, config.HV * config.V))
        state = kda_fn.init_state(config, rows, dtype=torch.float64)
        return {
            "params": params,
            "conv_state": rand(generator, *state.conv_state.shape),
            "recurrent_state": rand(generator, *state.recurrent_state.shape),
            "x": rand(generator, *batch, T, config.D),
        }

    def call(inputs: Inputs, impl: Impl | None, cu_seqlens: Any = None) -> tuple[Tensor, ...]:
        state = KDAState(inputs["conv_state"], inputs["recurrent_state"])
        kwargs: dict[str, Any] = {"config": config, "cu_seqlens": cu_seqlens}
        if impl is None:
            state, y = oracles.kimi_delta_attention(inputs["params"], state, inputs["x"], **kwargs)
        else:
            state, y = kda_fn.kimi_delta_attention(inputs["params"], state, inputs["x"], impl=impl, **kwargs)
        return *state, y

    return Subject(
        name,
        make,
        call,
        time={"x": -2},
        y_time=-2,
        states=("conv_state", "recurrent_state"),
        shared=("params",),
        keep_wide=("recurrent_state",),
        packs=True,
        is_layer=True,
        cancels=True,
        seed=seed,
    )


LAYER = _layer_subject("layer softplus, low rank", KDAConfig(hidden_size=9, num_heads=2, head_dim=4), seed=34)
BOUNDED_LAYER = _layer_subject(
    "layer bounded, full rank, HV > H, reflections",
    KDAConfig(
        hidden_size=9,
        num_heads=1,
        head_dim=5,
        num_v_heads=2,
        head_v_dim=3,
        conv_size=3,
        lower_bound=-5.0,
        output_gate="full_rank",
        allow_neg_eigval=True,
    ),
    seed=38,
)

SUBJECTS = (
    KDA,
    KDA_STEP,
    FUSED_KDA,
    FUSED_KDA_BOUNDED,
    CONV,
    CONV_BIAS,
    SOFTPLUS_GATE,
    BOUNDED_GATE,
    L2_NORM,
    NORM,
    SILU_NORM,
    RESIDUAL_NORM,
    LAYER,
    BOUNDED_LAYER,
)


def tree_map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`optree.tree_map`, for trees whose type says no more than that they hold tensors."""
    return optree.tree_map(function, tree)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a pytree in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
