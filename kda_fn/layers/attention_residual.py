"""Attention residuals: a layer reads a learned mixture of earlier sums of the residual stream.

    score_i = w · (γ rms(v_i))                        v: the completed blocks' sums, then the current sum
    y       = Σ_i softmax_i(score) v_i                in float32 at least

With no completed block y is the current sum itself.   v_i, y [*B D]   γ, w [D]

Source: arXiv:2603.15031; Kimi K3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kda_fn import _check
from kda_fn.types import Float, Tensor

__all__ = ["AttentionResidualParams", "attention_residual", "init_attention_residual"]


class AttentionResidualParams(NamedTuple):
    """The parameters of one mixture."""

    norm: Float[Tensor, " D"]
    """γ"""
    query: Float[Tensor, " D"]
    """w"""


def attention_residual(
    params: AttentionResidualParams,
    blocks: tuple[Tensor, ...],
    x: Float[Tensor, "*B D"],
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "*B D"]:
    """The mixture that a layer reads.

    Parameters
    ----------
    params : of `init_attention_residual`, or loaded.
    blocks : the sums of the completed blocks, each [*B D], oldest first; none: the result is x.
    x : [*B D], the current sum.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> params = init_attention_residual(2)
    >>> attention_residual(params, (torch.tensor([1.0, 3]),), torch.tensor([3.0, 5]))  # untrained: the mean
    tensor([2., 4.])
    """
    caller = "attention_residual"
    _check.instance(caller, "params", params, AttentionResidualParams)
    _check.instance(caller, "blocks", blocks, tuple)
    sums = {"x": x, **_check.leaves("blocks", blocks)}
    tensors = {**sums, **_check.leaves("params", params)}
    _check.floating(caller, tensors)
    _check.same_dtype(caller, tensors)
    _check.epsilon(caller, "eps", eps)
    _check.exact_shapes(caller, {name: (v, tuple(x.shape)) for name, v in sums.items()})
    check_attention_residual(caller, params, x.shape[-1] if x.ndim else 0)
    return apply_attention_residual(params, blocks, x, eps) if blocks else x.clone()


def apply_attention_residual(
    params: AttentionResidualParams, blocks: tuple[Tensor, ...], x: Float[Tensor, "*B D"], eps: float
) -> Float[Tensor, "*B D"]:
    """`attention_residual` of what has been checked."""
    wide = torch.promote_types(x.dtype, torch.float32)
    v = torch.stack([*blocks, x]).to(wide)
    scores = F.rms_norm(v, v.shape[-1:], params.norm.to(wide), eps) @ params.query.to(wide)
    return (torch.softmax(scores, 0).unsqueeze(-1) * v).sum(0).to(x.dtype)


def check_attention_residual(
    caller: str, params: AttentionResidualParams, D: int, name: str = "params"
) -> None:
    """That both vectors have D channels."""
    _check.exact_shapes(caller, {n: (x, (D,)) for n, x in _check.leaves(name, params).items()})


def init_attention_residual(
    hidden_size: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> AttentionResidualParams:
    """γ of ones and w of zeros: every sum counts alike.

    >>> init_attention_residual(2)
    AttentionResidualParams(norm=tensor([1., 1.]), query=tensor([0., 0.]))
    """
    _check.positive_integer("init_attention_residual", "hidden_size", hidden_size)
    _check.float_dtype("init_attention_residual", dtype)
    ones = torch.ones(hidden_size, dtype=dtype, device=device)
    return AttentionResidualParams(ones, torch.zeros_like(ones))


torch.serialization.add_safe_globals([AttentionResidualParams])
