"""Drafts: verified in one call, accepted by picking a state, rejected by keeping another.

    states, y = verify(params, state, x)          the state after every token of a chain or a tree
    state     = accept(state, states, count)      that after the count-th token; 0: as if there had been none

Nothing is rolled back: the state before the drafts is a value, and is still there. In a pool the states of
the last drafts lie in the columns of a request's slots, and `plan_batch` starts from the accepted one, also
when their number comes late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch

from kda_fn.layers.kimi_linear import KimiLinearConfig, KimiLinearParams, KimiLinearState
from kda_fn.serving.plan import plan_batch
from kda_fn.serving.step import check_one, run_rows
from kda_fn.types import Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

__all__ = ["accept", "accepted_lengths", "verify"]


def verify(
    params: KDAParams | KimiLinearParams,
    state: KDAState | KimiLinearState,
    x: Float[Tensor, "T D"] | Tensor,
    *,
    config: KDAConfig | KimiLinearConfig,
    parents: Sequence[int] | None = None,
    impl: Impl | None = None,
) -> tuple[Any, Tensor]:
    """A KDA layer, or the hybrid model, over T tokens of one request, each from the state after another.

    Parameters
    ----------
    params, config, impl : as of `kimi_delta_attention`, or of `kimi_linear`.
    state : of one request, without batch axes. Batches are a `vmap`, or `step_batch`.
    x : [T D], or [T] token numbers, T >= 1.
    parents : the token before each, an earlier one, or -1 for the state; None for a chain.

    Returns
    -------
    states, y : the state after each token, leaves [T ..] in x's order, and [T D], or logits [T vocab].

    Raises ValueError or TypeError for an argument that does not fit, before any work; NotImplementedError for
    a tree where there is attention.

    >>> config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> params, x, state = init_kimi_delta_attention(config), torch.randn(3, 8), init_state(config)
    >>> states, y = verify(params, state, x, config=config, parents=(-1, 0, 0))  # two drafts after token 0
    >>> _, y_alone = kimi_delta_attention(params, state, x[[0, 2]], config=config)
    >>> torch.allclose(y[2], y_alone[1], atol=1e-5)
    True
    """
    if isinstance(x, Tensor) and x.ndim and not len(x):
        raise ValueError(f"verify: x has shape {tuple(x.shape)}, expected T >= 1 tokens")
    check_one("verify", params, state, x, config, impl)
    T = len(x)
    # The slots stand for nothing here but T columns.
    plan = plan_batch(
        [T],
        has_state=[True],
        slots=[list(range(T))],
        capacity=T,
        drafts=[T - 1],
        parents=None if parents is None else [list(parents)],
        device=x.device,
    )
    check_one("verify", params, state, x, config, impl, plan)
    tree: Any = state
    roots = optree.tree_map(lambda leaf: leaf.expand(T, *leaf.shape), tree)
    none = optree.tree_map(lambda leaf: leaf.new_zeros(0, *leaf.shape), tree)
    _, states, y = run_rows(params, none, roots, x.index_select(0, plan.order), plan, config, impl)
    back = plan.back
    return optree.tree_map(lambda leaf: leaf.index_select(0, back), states), y.index_select(0, back)


def accept(before: Any, states: Any, count: Tensor | int) -> Any:
    """The state after the count-th of T tokens; `before` for 0, and for a count that no token has.

    before : leaves [..]. states : leaves [T ..], of `verify`. count : a number, or a tensor of one.

    Any trees of tensors will do. Raises ValueError for trees that differ.

    >>> accept(torch.tensor(0), torch.tensor([10, 20, 30]), 2)  # after the second of three tokens
    tensor(20)
    >>> accept(torch.tensor(0), torch.tensor([10, 20, 30]), 0)
    tensor(0)
    """
    if optree.tree_structure(before) != optree.tree_structure(states):
        raise ValueError("accept: before and states must be trees of one structure")
    leaf = optree.tree_leaves(states)[0]
    index = torch.as_tensor(count, dtype=torch.int64, device=leaf.device).reshape(1)
    index = torch.where((index >= 0) & (index <= len(leaf)), index, 0)

    def pick(first: Tensor, rest: Tensor) -> Tensor:
        return torch.cat([first.unsqueeze(0), rest]).index_select(0, index).squeeze(0)

    return optree.tree_map(pick, before, states)


def accepted_lengths(lengths: Tensor, written: Tensor, accepted: Tensor) -> Tensor:
    """Of sequences counted with all their drafts, the lengths once those rejected are known.

        lengths - (written - accepted)        all [R], integers, on any device

    A new tensor: it is applied once, however many layers or replays share the old one.

    >>> accepted_lengths(torch.tensor([10, 7]), torch.tensor([3, 1]), torch.tensor([2, 1]))
    tensor([9, 7])
    """
    return lengths - (written - accepted)
