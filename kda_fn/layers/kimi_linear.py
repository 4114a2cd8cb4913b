"""The hybrid language model: KDA and MLA layers, dense and mixture-of-experts MLPs.

h      = embedding[tokens]
h      = h + attention(rms_norm(h))           each block: KDA or MLA,
h      = h + mlp(rms_norm(h))                 then dense or a mixture of experts
logits = head rms_norm(h)                     or embedding^T of a tied head

With attention residuals (`residual_block`, Kimi K3) both halves of a block, and the final norm, read a
mixture of h and of earlier h's: at every residual_block-th layer h is kept for it and starts again from the
attention.

tokens [*B T]   logits [*B T vocab_size]   state: a KDAState or an MLAState for each block

Source: Kimi Linear, arXiv:2510.26692; attention residuals, arXiv:2603.15031.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from kda_fn import _check, ragged
from kda_fn.layers.attention_residual import (
    AttentionResidualParams,
    apply_attention_residual,
    check_attention_residual,
    init_attention_residual,
)
from kda_fn.layers.kimi_delta_attention import (
    apply_kda_layer,
    check_params_and_state,
    check_shapes_and_dtypes,
    init_kimi_delta_attention,
    init_state,
)
from kda_fn.layers.mla import (
    MLAConfig,
    MLAParams,
    MLAState,
    apply_mla,
    check_mla,
    check_mla_trees,
    init_mla,
    init_mla_state,
)
from kda_fn.layers.mlp import SwiGLUParams, apply_swiglu, check_situ, check_swiglu, init_swiglu, normal_weight
from kda_fn.layers.moe import MoEConfig, MoEParams, apply_moe, check_moe, init_moe
from kda_fn.primitives._primitive import check_impl
from kda_fn.primitives.linear import linear
from kda_fn.types import W8A8, CuSeqlens, Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

__all__ = [
    "KimiLinearBlock",
    "KimiLinearConfig",
    "KimiLinearParams",
    "KimiLinearState",
    "apply_kimi_linear",
    "check_kimi_linear",
    "init_kimi_linear",
    "init_kimi_linear_state",
    "kimi_linear",
    "kimi_linear_blocks",
]

KimiLinearState: TypeAlias = tuple[KDAState | MLAState, ...]
KDALayer: TypeAlias = Callable[..., tuple[KDAState, Tensor]]
MLALayer: TypeAlias = Callable[..., tuple[MLAState, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig:
    """The sizes and choices of the model.

    layer_types          "kda" or "mla" for each block
    mlp_types            "dense" or "moe" for each block; None becomes "dense" for all
    intermediate_size    of the dense MLPs
    tie_embeddings       whether the head is the embedding
    residual_block       layers between attention residuals (12 in Kimi K3), None: a plain residual stream
    situ                 of the dense MLPs, None: SwiGLU (`kda_fn.swiglu`)
    """

    vocab_size: int
    kda: KDAConfig
    layer_types: tuple[Literal["kda", "mla"], ...]
    intermediate_size: int
    mlp_types: tuple[Literal["dense", "moe"], ...] | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    residual_block: int | None = None
    situ: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        caller = "KimiLinearConfig"
        for name in ("vocab_size", "intermediate_size"):
            _check.positive_integer(caller, name, getattr(self, name))
        _check.instance(caller, "kda", self.kda, KDAConfig)
        _check.instance(caller, "layer_types", self.layer_types, tuple)
        if self.mlp_types is None:
            object.__setattr__(self, "mlp_types", ("dense",) * self.num_layers)
        _check.instance(caller, "mlp_types", self.mlp_types, tuple)
        for name, kinds in (("layer_types", ("kda", "mla")), ("mlp_types", ("dense", "moe"))):
            for i, kind in enumerate(getattr(self, name)):
                _check.one_of(caller, f"{name}[{i}]", kind, kinds)
        if len(self.mlps) != self.num_layers:
            raise ValueError(
                f"{caller}: mlp_types must name each of {self.num_layers} layers, it names {len(self.mlps)}"
            )
        for name, kind, used in (
            ("mla", MLAConfig, "mla" in self.layer_types),
            ("moe", MoEConfig, "moe" in self.mlps),
        ):
            config: Any = getattr(self, name)
            if config is None and not used:
                continue
            _check.instance(caller, name, config, kind)
            assert config is not None
            if config.hidden_size != self.kda.hidden_size:
                raise ValueError(
                    f"{caller}: hidden_size must agree, got kda.hidden_size={self.kda.hidden_size} and "
                    f"{name}.hidden_size={config.hidden_size}"
                )
        _check.epsilon(caller, "norm_eps", self.norm_eps)
        _check.one_of(caller, "tie_embeddings", self.tie_embeddings, (False, True))
        if self.residual_block is not None:
            _check.positive_integer(caller, "residual_block", self.residual_block)
        check_situ(caller, self.situ)

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def mlps(self) -> tuple[Literal["dense", "moe"], ...]:
        """`mlp_types` as they are once the config is made: never None."""
        assert self.mlp_types is not None
        return self.mlp_types


class KimiLinearBlock(NamedTuple):
    """One block. Without attention residuals their vectors are [0]."""

    attention_residual: AttentionResidualParams
    attention_norm: Float[Tensor, " D"]
    attention: KDAParams | MLAParams
    mlp_residual: AttentionResidualParams
    mlp_norm: Float[Tensor, " D"]
    mlp: SwiGLUParams | MoEParams


class KimiLinearParams(NamedTuple):
    """The parameters of the model."""

    embedding: Float[Tensor, "vocab D"]
    blocks: tuple[KimiLinearBlock, ...]
    residual: AttentionResidualParams
    norm: Float[Tensor, " D"]
    head: Float[Tensor, "vocab D"] | W8A8
    """[0] where it is the embedding."""


def kimi_linear(
    params: KimiLinearParams,
    state: KimiLinearState,
    tokens: Tensor,
    *,
    config: KimiLinearConfig,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[KimiLinearState, Float[Tensor, "*B T vocab"]]:
    """Logits of the next token at each of T positions, T >= 0, and the state after them.

    Parameters
    ----------
    params : of `init_kimi_linear`, or of `load_kimi_linear`.
    state : of `init_kimi_linear_state`, or returned by an earlier call.
    tokens : [*B T], int32 or int64.
    config : the sizes and choices.
    cu_seqlens : [N+1], T then holds N packed sequences (`kda_fn.ragged`), for prompts of unequal length.
    impl : for every primitive; None picks the best for each.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda", "kda"), intermediate_size=16, kda=layer)
    >>> params, state = init_kimi_linear(config), init_kimi_linear_state(config)
    >>> state, logits = kimi_linear(params, state, torch.tensor([3, 1, 4, 1, 5]), config=config)
    >>> logits.shape, [type(s).__name__ for s in state]
    (torch.Size([5, 11]), ['KDAState', 'KDAState'])
    """
    cu_seqlens = check_kimi_linear("kimi_linear", params, state, tokens, config, cu_seqlens, impl)
    return apply_kimi_linear(params, state, tokens, config, cu_seqlens, impl)


def check_kimi_linear(
    caller: str,
    params: KimiLinearParams,
    state: KimiLinearState,
    tokens: Tensor,
    config: KimiLinearConfig,
    cu_seqlens: CuSeqlens | None,
    impl: Impl | None,
) -> tuple[int, ...] | None:
    """That all arguments of the model belong together; returns cu_seqlens, read once for what follows."""
    _check_trees(caller, params, state, config)
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{caller}: tokens must be a tensor, got {type(tokens).__name__}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{caller}: tokens must be int32 or int64, got {tokens.dtype}")
    if tokens.ndim < 1:
        raise ValueError(f"{caller}: tokens has shape {tuple(tokens.shape)}, expected [*B T]")
    cu_seqlens = _check_tensors(caller, params, state, {"tokens": tokens}, config, cu_seqlens, tokens.shape)
    check_impl(caller, impl)
    return cu_seqlens


def apply_kimi_linear(
    params: KimiLinearParams,
    state: KimiLinearState,
    tokens: Tensor,
    config: KimiLinearConfig,
    cu_seqlens: tuple[int, ...] | None,
    impl: Impl | None,
    kda_layer: KDALayer = apply_kda_layer,
    mla_layer: MLALayer = apply_mla,
) -> tuple[KimiLinearState, Float[Tensor, "*B T vocab"]]:
    """`kimi_linear` of what has been checked; the layers stand in for `apply_kda_layer` and `apply_mla`."""
    new_state, h = [], F.embedding(tokens, params.embedding)
    for block_state, stream in _blocks(params, state, h, config, cu_seqlens, impl, kda_layer, mla_layer):
        new_state.append(block_state)
        h = stream
    head = params.embedding if config.tie_embeddings else params.head
    return tuple(new_state), linear(_norm(h, params.norm, config), head, impl=impl)


def kimi_linear_blocks(
    params: KimiLinearParams,
    state: KimiLinearState,
    h: Float[Tensor, "*B T D"],
    *,
    config: KimiLinearConfig,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> Iterator[tuple[KDAState | MLAState, Float[Tensor, "*B T D"]]]:
    """The blocks of `kimi_linear` one at a time: after each its new state and the residual stream, after the
    last what the final norm reads. For looking into the model; the arguments are `kimi_linear`'s."""
    caller = "kimi_linear_blocks"
    _check_trees(caller, params, state, config)
    if not isinstance(h, Tensor) or h.ndim < 2 or h.shape[-1] != config.kda.D:
        kind = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
        raise ValueError(f"{caller}: h must be a tensor [*B T D] with D={config.kda.D}, got {kind}")
    cu_seqlens = _check_tensors(caller, params, state, {"h": h}, config, cu_seqlens, h.shape[:-1])
    _check.same_dtype(caller, {"h": h, "params.embedding": params.embedding})
    check_impl(caller, impl)
    return _blocks(params, state, h, config, cu_seqlens, impl)


def _blocks(
    params: KimiLinearParams,
    state: KimiLinearState,
    h: Float[Tensor, "*B T D"],
    config: KimiLinearConfig,
    cu_seqlens: tuple[int, ...] | None,
    impl: Impl | None,
    kda_layer: KDALayer = apply_kda_layer,
    mla_layer: MLALayer = apply_mla,
) -> Iterator[tuple[KDAState | MLAState, Float[Tensor, "*B T D"]]]:
    completed: tuple[Tensor, ...] = ()
    for i, (block, block_state) in enumerate(zip(params.blocks, state, strict=True)):
        x = _norm(_mixed(block.attention_residual, completed, h, config), block.attention_norm, config)
        if isinstance(block_state, KDAState):
            assert isinstance(block.attention, KDAParams)
            block_state, y = kda_layer(block.attention, block_state, x, config.kda, cu_seqlens, impl)
        else:
            assert isinstance(block.attention, MLAParams) and config.mla is not None
            block_state, y = mla_layer(block.attention, block_state, x, config.mla, cu_seqlens, impl)
        if config.residual_block is not None and i % config.residual_block == 0:
            completed, h = (*completed, h), y
        else:
            h = h + y
        x = _norm(_mixed(block.mlp_residual, completed, h, config), block.mlp_norm, config)
        if isinstance(block.mlp, SwiGLUParams):
            h = h + apply_swiglu(block.mlp, x, config.situ, impl)
        else:
            assert config.moe is not None
            h = h + apply_moe(block.mlp, x, config.moe, impl)
        if i == config.num_layers - 1:
            h = _mixed(params.residual, completed, h, config)
        yield block_state, h


def init_kimi_linear(
    config: KimiLinearConfig,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> KimiLinearParams:
    """Parameters for training from scratch: the projections back into the stream start at a scale of
    1/sqrt(2 num_layers), so that the stream's variance does not grow with depth.

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda", "kda"), intermediate_size=16, kda=layer)
    >>> params = init_kimi_linear(config, generator=torch.Generator().manual_seed(0))
    >>> params.embedding.shape, len(params.blocks)
    (torch.Size([11, 8]), 2)
    """
    _check.float_dtype("init_kimi_linear", dtype)
    where: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
    D, depth_scale = config.kda.D, (2 * config.num_layers) ** -0.5
    none = torch.zeros(0, dtype=dtype, device=device)

    def norm() -> Tensor:
        return torch.ones(D, dtype=dtype, device=device)

    def residual() -> AttentionResidualParams:
        if config.residual_block is None:
            return AttentionResidualParams(none, none)
        return init_attention_residual(D, dtype=dtype, device=device)

    def attention(kind: str) -> KDAParams | MLAParams:
        if kind == "kda":
            params = init_kimi_delta_attention(config.kda, **where)
        else:
            assert config.mla is not None
            params = init_mla(config.mla, **where)
        return params._replace(out=params.out * depth_scale)

    def mlp(kind: str) -> SwiGLUParams | MoEParams:
        if kind == "dense":
            dense = init_swiglu(D, config.intermediate_size, **where)
            return dense._replace(down=dense.down * depth_scale)
        assert config.moe is not None
        experts = init_moe(config.moe, **where)
        if config.moe.latent_size is not None:
            experts = experts._replace(latent_up=experts.latent_up * depth_scale)
        else:
            experts = experts._replace(down=experts.down * depth_scale)
        return experts._replace(shared=experts.shared._replace(down=experts.shared.down * depth_scale))

    blocks = tuple(
        KimiLinearBlock(residual(), norm(), attention(kind), residual(), norm(), mlp(mlp_kind))
        for kind, mlp_kind in zip(config.layer_types, config.mlps, strict=True)
    )
    embedding = normal_weight(config.vocab_size, D, **where)
    head = none if config.tie_embeddings else normal_weight(config.vocab_size, D, **where)
    return KimiLinearParams(embedding, blocks, residual(), norm(), head)


def init_kimi_linear_state(
    config: KimiLinearConfig,
    batch_shape: tuple[int, ...] = (),
    *,
    capacity: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> KimiLinearState:
    """The state before the first token, for each block. With a capacity the MLA caches are preallocated for
    that many tokens: the state then keeps its shapes.

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda", "kda"), intermediate_size=16, kda=layer)
    >>> [tuple(s.recurrent_state.shape) for s in init_kimi_linear_state(config, (3,))]  # three sequences
    [(3, 1, 4, 4), (3, 1, 4, 4)]
    """
    _check.batch_shape("init_kimi_linear_state", batch_shape)

    def empty(kind: str) -> KDAState | MLAState:
        if kind == "kda":
            return init_state(config.kda, batch_shape, dtype=dtype, device=device)
        assert config.mla is not None
        return init_mla_state(config.mla, batch_shape, capacity=capacity, dtype=dtype, device=device)

    return tuple(empty(kind) for kind in config.layer_types)


def _norm(x: Tensor, weight: Tensor, config: KimiLinearConfig) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, config.norm_eps)


def _mixed(
    params: AttentionResidualParams, completed: tuple[Tensor, ...], h: Tensor, config: KimiLinearConfig
) -> Tensor:
    return apply_attention_residual(params, completed, h, config.norm_eps) if completed else h


def _check_trees(
    caller: str, params: KimiLinearParams, state: KimiLinearState, config: KimiLinearConfig
) -> None:
    """That params and state are trees of the kinds that the config names."""
    _check.instance(caller, "config", config, KimiLinearConfig)
    _check.instance(caller, "params", params, KimiLinearParams)
    if isinstance(state, KDAState | MLAState) or not isinstance(state, tuple):
        raise TypeError(f"{caller}: state must be a tuple of states, got {type(state).__name__}")
    _check.instance(caller, "params.blocks", params.blocks, tuple)
    if not len(state) == len(params.blocks) == config.num_layers:
        raise ValueError(
            f"{caller}: config names {config.num_layers} layers, params hold {len(params.blocks)} blocks, "
            f"state {len(state)} layers"
        )
    kinds = zip(params.blocks, state, config.layer_types, config.mlps, strict=True)
    for i, (block, block_state, kind, mlp_kind) in enumerate(kinds):
        p, s = f"params.blocks[{i}]", f"state[{i}]"
        _check.instance(caller, p, block, KimiLinearBlock)
        check = check_params_and_state if kind == "kda" else check_mla_trees
        check(caller, block.attention, block_state, (f"{p}.attention", s))
        _check.instance(caller, f"{p}.mlp", block.mlp, SwiGLUParams if mlp_kind == "dense" else MoEParams)
        for field in ("attention_residual", "mlp_residual"):
            _check.instance(caller, f"{p}.{field}", getattr(block, field), AttentionResidualParams)
    _check.instance(caller, "params.residual", params.residual, AttentionResidualParams)


def _check_tensors(
    caller: str,
    params: KimiLinearParams,
    state: KimiLinearState,
    inputs: dict[str, Tensor],
    config: KimiLinearConfig,
    cu_seqlens: CuSeqlens | None,
    rows: tuple[int, ...],
) -> tuple[int, ...] | None:
    """That all tensors fit the config, each other and inputs of `rows` = (*B, T); returns cu_seqlens read."""
    names = [(f"params.blocks[{i}]", f"state[{i}]") for i in range(config.num_layers)]
    lengths = {f"{s}.length" for _, s in names}
    leaves = {**_check.leaves("params", params), **_check.leaves("state", state)}
    _check.floating(caller, {name: leaf for name, leaf in leaves.items() if name not in lengths})
    _check.one_device(caller, {**inputs, **leaves})
    if cu_seqlens is not None:
        cu_seqlens = ragged.offsets(cu_seqlens, rows[-1])
    _check_shapes(caller, params, state, rows, config, cu_seqlens, names)
    return cu_seqlens


def _check_shapes(
    caller: str,
    params: KimiLinearParams,
    state: KimiLinearState,
    rows: tuple[int, ...],
    config: KimiLinearConfig,
    cu_seqlens: tuple[int, ...] | None,
    names: list[tuple[str, str]],
) -> None:
    """That all shapes and dtypes fit the config and each other."""
    D, like = config.kda.D, ("params.embedding", params.embedding)
    E = D if config.residual_block is not None else 0
    norms, residuals = {"params.norm": params.norm}, {"params.residual": params.residual}
    for block, (p, _) in zip(params.blocks, names, strict=True):
        norms |= {f"{p}.attention_norm": block.attention_norm, f"{p}.mlp_norm": block.mlp_norm}
        for field in ("attention_residual", "mlp_residual"):
            residuals[f"{p}.{field}"] = getattr(block, field)
    for name, residual in residuals.items():
        check_attention_residual(caller, residual, E, name)
        _check.same_dtype(caller, {like[0]: like[1], **_check.leaves(name, residual)})
    head = (0,) if config.tie_embeddings else (config.vocab_size, D)
    _check.exact_shapes(
        caller, {like[0]: (like[1], (config.vocab_size, D)), "params.head": (params.head, head)}
    )
    _check.exact_shapes(caller, {name: (norm, (D,)) for name, norm in norms.items()})
    _check.same_dtype(caller, {like[0]: like[1], **norms, **_check.leaves("params.head", params.head)})
    for block, block_state, (p, s) in zip(params.blocks, state, names, strict=True):
        pair = (f"{p}.attention", s)
        if isinstance(block_state, KDAState):
            assert isinstance(block.attention, KDAParams)
            check_shapes_and_dtypes(
                caller, block.attention, block_state, config.kda, *like, rows, cu_seqlens, pair
            )
        else:
            assert isinstance(block.attention, MLAParams) and config.mla is not None
            check_mla(caller, block.attention, block_state, config.mla, *like, rows, cu_seqlens, pair)
        if isinstance(block.mlp, SwiGLUParams):
            check_swiglu(caller, block.mlp, *like, D, f"{p}.mlp")
        else:
            assert config.moe is not None
            check_moe(caller, block.mlp, config.moe, *like, f"{p}.mlp")


torch.serialization.add_safe_globals([KimiLinearBlock, KimiLinearParams])
