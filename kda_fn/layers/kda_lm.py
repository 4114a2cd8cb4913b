"""A small language model of KDA blocks.

h      = embedding[tokens]
h      = h + kda_layer(rms_norm(h))           for each block,
h      = h + swiglu(rms_norm(h))              its two halves
logits = rms_norm(h) embedding^T              tied head

tokens [*B T]   logits [*B T vocab_size]      state: one KDAState for each block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kda_fn import _check, ragged
from kda_fn.layers.kimi_delta_attention import (
    check_params_and_state,
    check_shapes_and_dtypes,
    init_kimi_delta_attention,
    init_state,
    kimi_delta_attention,
)
from kda_fn.layers.mlp import SwiGLUParams, check_swiglu, init_swiglu, normal_weight, swiglu
from kda_fn.primitives._primitive import check_impl
from kda_fn.types import CuSeqlens, Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

__all__ = ["KDALMConfig", "KDALMParams", "init_kda_lm", "init_kda_lm_state", "kda_lm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KDALMConfig:
    """The sizes of the model; `kda` is the config of every block's KDA layer."""

    vocab_size: int
    num_layers: int
    intermediate_size: int
    kda: KDAConfig

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "intermediate_size"):
            _check.positive_integer("KDALMConfig", name, getattr(self, name))
        _check.instance("KDALMConfig", "kda", self.kda, KDAConfig)


class KDALMBlock(NamedTuple):
    """One block: norm, KDA, norm, SwiGLU."""

    kda_norm: Float[Tensor, " D"]
    kda: KDAParams
    mlp_norm: Float[Tensor, " D"]
    mlp: SwiGLUParams


class KDALMParams(NamedTuple):
    """The parameters of the model."""

    embedding: Float[Tensor, "vocab D"]
    blocks: tuple[KDALMBlock, ...]
    norm: Float[Tensor, " D"]


def kda_lm(
    params: KDALMParams,
    state: tuple[KDAState, ...],
    tokens: Tensor,
    *,
    config: KDALMConfig,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[tuple[KDAState, ...], Float[Tensor, "*B T vocab"]]:
    """Logits of the next token at each of T positions, T >= 0, and the state after them.

    Parameters
    ----------
    params : of `init_kda_lm`.
    state : one KDAState for each block, of `init_kda_lm_state` or an earlier call.
    tokens : [*B T], int32 or int64.
    config, cu_seqlens, impl : as in `kimi_delta_attention`.

    Raises ValueError or TypeError for an argument that does not fit, before any work.
    """
    cu_seqlens = _check_lm(params, state, tokens, config, cu_seqlens)
    check_impl("kda_lm", impl)
    h = F.embedding(tokens, params.embedding)
    new_state = []
    for block, block_state in zip(params.blocks, state, strict=True):
        block_state, y = kimi_delta_attention(
            block.kda,
            block_state,
            _rms_norm(h, block.kda_norm, config),
            config=config.kda,
            cu_seqlens=cu_seqlens,
            impl=impl,
        )
        h = h + y
        h = h + swiglu(block.mlp, _rms_norm(h, block.mlp_norm, config))
        new_state.append(block_state)
    return tuple(new_state), F.linear(_rms_norm(h, params.norm, config), params.embedding)


def init_kda_lm(
    config: KDALMConfig,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> KDALMParams:
    """Parameters for training from scratch: the projections back into the stream start at a scale of
    1/sqrt(2 num_layers), so that the stream's variance does not grow with depth."""
    where = {"generator": generator, "dtype": dtype, "device": device}
    D, depth_scale = config.kda.D, (2 * config.num_layers) ** -0.5

    def norm() -> Tensor:
        return torch.ones(D, dtype=dtype, device=device)

    blocks = []
    for _ in range(config.num_layers):
        kda = init_kimi_delta_attention(config.kda, **where)
        mlp = init_swiglu(D, config.intermediate_size, **where)
        kda = kda._replace(out=kda.out * depth_scale)
        blocks.append(KDALMBlock(norm(), kda, norm(), mlp._replace(down=mlp.down * depth_scale)))
    return KDALMParams(normal_weight(config.vocab_size, D, **where), tuple(blocks), norm())


def init_kda_lm_state(
    config: KDALMConfig,
    batch_shape: tuple[int, ...] = (),
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[KDAState, ...]:
    """The state before the first token, for each block."""
    return tuple(
        init_state(config.kda, batch_shape, dtype=dtype, device=device) for _ in range(config.num_layers)
    )


def _check_lm(
    params: KDALMParams,
    state: tuple[KDAState, ...],
    tokens: Tensor,
    config: KDALMConfig,
    cu_seqlens: CuSeqlens | None,
) -> tuple[int, ...] | None:
    """That all parts belong together, before any block runs; returns cu_seqlens read once for all blocks."""
    caller = "kda_lm"
    _check.instance(caller, "config", config, KDALMConfig)
    _check.instance(caller, "params", params, KDALMParams)
    if isinstance(state, KDAState) or not isinstance(state, tuple):
        raise TypeError(f"{caller}: state must be a tuple of KDAState, got {type(state).__name__}")
    _check.instance(caller, "params.blocks", params.blocks, tuple)
    if not len(state) == len(params.blocks) == config.num_layers:
        raise ValueError(
            f"{caller}: config.num_layers is {config.num_layers}, params hold {len(params.blocks)} blocks, "
            f"state {len(state)} layers"
        )
    names = [(f"params.blocks[{i}]", f"state[{i}]") for i in range(config.num_layers)]
    for block, block_state, (p, s) in zip(params.blocks, state, names, strict=True):
        _check.instance(caller, p, block, KDALMBlock)
        _check.instance(caller, f"{p}.mlp", block.mlp, SwiGLUParams)
        check_params_and_state(caller, block.kda, block_state, config.kda, (f"{p}.kda", s))
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{caller}: tokens must be a tensor, got {type(tokens).__name__}")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{caller}: tokens must be int32 or int64, got {tokens.dtype}")
    if tokens.ndim < 1:
        raise ValueError(f"{caller}: tokens has shape {tuple(tokens.shape)}, expected [*B T]")
    leaves = {**_check.leaves("params", params), **_check.leaves("state", state)}
    _check.floating(caller, leaves)
    _check.one_device(caller, {"tokens": tokens, **leaves})
    if cu_seqlens is not None:
        cu_seqlens = ragged.offsets(cu_seqlens, tokens.shape[-1])
    D, like = config.kda.D, ("params.embedding", params.embedding)
    norms = {"params.norm": params.norm}
    for block, (p, _) in zip(params.blocks, names, strict=True):
        norms |= {f"{p}.kda_norm": block.kda_norm, f"{p}.mlp_norm": block.mlp_norm}
    _check.exact_shapes(caller, {like[0]: (like[1], (config.vocab_size, D))})
    _check.exact_shapes(caller, {name: (norm, (D,)) for name, norm in norms.items()})
    _check.same_dtype(caller, {like[0]: like[1], **norms})
    for block, block_state, (p, s) in zip(params.blocks, state, names, strict=True):
        check_shapes_and_dtypes(
            caller, block.kda, block_state, config.kda, *like, tokens.shape, cu_seqlens, (f"{p}.kda", s)
        )
        check_swiglu(caller, block.mlp, *like, D, f"{p}.mlp")
    return cu_seqlens


def _rms_norm(x: Tensor, weight: Tensor, config: KDALMConfig) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, config.kda.norm_eps)


torch.serialization.add_safe_globals([KDALMBlock, KDALMParams])
