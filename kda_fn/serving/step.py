"""One step of a batch: prefills, decodes and verified drafts in one call of a layer.

What a layer projects is of all tokens at once; only the convolution and the memory know which row is which.
Packed rows are one packed call of each. Verified tokens are taken by depth, each from the state after the
token before it, so that the state after every one of them is there to be picked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from kda_fn import _check
from kda_fn.layers.kimi_delta_attention import apply_kda_layer, check_layer
from kda_fn.primitives.causal_conv1d import causal_conv1d
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.serving.plan import BatchPlan
from kda_fn.serving.pool import gather, scatter, scatter_
from kda_fn.types import Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

__all__ = ["run_rows", "step_batch", "step_batch_"]


def step_batch(
    params: KDAParams,
    pool: KDAState,
    x: Float[Tensor, "T D"],
    plan: BatchPlan,
    *,
    config: KDAConfig,
    impl: Impl | None = None,
) -> tuple[KDAState, Float[Tensor, "T D"]]:
    """A KDA layer over a batch of requests.

    Parameters
    ----------
    params, config, impl : as of `kimi_delta_attention`.
    pool : a KDAState whose leaves have a slot axis first, `init_state(config, (slots,))`.
    x : [T D], the tokens of all requests in the batch's order.
    plan : of `plan_batch`.

    Returns
    -------
    pool, y : a new pool in which the plan's slots hold what came of them, every other bit as it was; and [T D]
    in the batch's order. Tokens of a request without a slot are zeros there, whatever they hold in x.

    Raises ValueError or TypeError for an argument that does not fit, before any work.
    """
    return _step("step_batch", scatter, params, pool, x, plan, config, impl)


def step_batch_(
    params: KDAParams,
    pool: KDAState,
    x: Float[Tensor, "T D"],
    plan: BatchPlan,
    *,
    config: KDAConfig,
    impl: Impl | None = None,
) -> tuple[KDAState, Float[Tensor, "T D"]]:
    """`step_batch` that writes into the pool it is given, for a serving loop: only the plan's slots are touched.

    Raises as `step_batch` does, and RuntimeError under a transform or where a derivative is recorded.
    """
    return _step("step_batch_", scatter_, params, pool, x, plan, config, impl)


def _step(
    caller: str,
    put: Callable[..., KDAState],
    params: KDAParams,
    pool: KDAState,
    x: Tensor,
    plan: BatchPlan,
    config: KDAConfig,
    impl: Impl | None,
) -> tuple[KDAState, Tensor]:
    _check.instance(caller, "plan", plan, BatchPlan)
    _check.instance(caller, "pool", pool, KDAState)
    # Row by row x and the pool are a layer's input and state.
    one = (
        KDAState(*(leaf[:1] for leaf in pool))
        if all(isinstance(leaf, Tensor) and leaf.ndim for leaf in pool)
        else pool
    )
    token = x[:1] if isinstance(x, Tensor) and x.ndim == 2 else x
    check_layer(
        caller, params, one, token if token is x else x.new_zeros(1, 1, x.shape[1]), config, None, impl
    )
    if x.ndim != 2 or len(x) != len(plan.order):
        raise ValueError(f"{caller}: x has shape {tuple(x.shape)}, the plan is of {len(plan.order)} tokens")
    live = plan.live.unsqueeze(1)
    # Before as well as after: a gate of NaN would be left of 0 times it.
    rows = torch.where(live, x, 0.0).index_select(0, plan.order)
    packed, verified, y = run_rows(
        params, gather(pool, plan.load), gather(pool, plan.verify_load), rows, plan, config, impl
    )
    states = KDAState(*(torch.cat(leaves) for leaves in zip(packed, verified, strict=True)))
    pool = put(pool, torch.cat([plan.store, plan.verify_store]), states)
    return pool, torch.where(live, y.index_select(0, plan.back), 0.0)


def run_rows(
    params: KDAParams,
    states: KDAState,
    roots: KDAState,
    x: Float[Tensor, "T D"],
    plan: BatchPlan,
    config: KDAConfig,
    impl: Impl | None,
) -> tuple[KDAState, KDAState, Float[Tensor, "T D"]]:
    """A layer over x [T D] in the plan's order, from the packed rows' states [N ..] and from the state before
    each verified token's request [M ..].

    The results are the packed rows' last states [N ..], the state after each verified token [M ..], and y.
    """
    # `apply_kda_layer` hands a state's two halves to the two functions, and back.
    both: Any = KDAState(*zip(states, roots, strict=True))
    conv, memory = partial(_conv, plan), partial(_memory, plan)
    after, y = apply_kda_layer(params, both, x, config, None, impl, conv=conv, memory=memory)
    packed, verified = (KDAState(*halves) for halves in zip(*after, strict=True))
    return packed, verified, y


def _conv(
    plan: BatchPlan,
    windows: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    *,
    impl: Impl | None,
    **_options: Any,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`causal_conv1d` of the packed rows, and of each verified token with those before it in its tree."""
    packed, rest = x.tensor_split([plan.cu_seqlens[-1]])
    states, roots = windows
    if len(states):
        states, packed = causal_conv1d(states, packed, weight, cu_seqlens=plan.cu_seqlens, impl=impl)
    before, W_1 = plan.parent, roots.shape[1]
    seen: list[Tensor] = []
    for _ in range(W_1 if len(rest) else 0):
        # Below 0 it counts back from the end of the request's own window.
        inside = before >= 0
        of_root = roots.gather(
            1, (W_1 + before).clamp(0, W_1 - 1).view(-1, 1, 1).expand(-1, 1, roots.shape[2])
        )
        own = torch.where(inside, before, 0)
        seen.append(torch.where(inside.unsqueeze(1), rest.index_select(0, own), of_root.squeeze(1)))
        before = torch.where(inside, plan.parent.index_select(0, own), before - 1)
    if seen:
        roots = torch.stack(seen[::-1], 1)
    if len(rest):
        roots, tokens = causal_conv1d(roots, rest.unsqueeze(1), weight, impl=impl)
        rest = tokens.squeeze(1)
    return (states, roots), torch.cat([packed, rest])


def _memory(
    plan: BatchPlan,
    memories: tuple[Tensor, Tensor],
    *inputs: Tensor,
    cu_seqlens: None,
    impl: Impl | None,
    **options: Any,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`fused_kda` of the packed rows, and of verified tokens depth by depth."""
    *tokens, A_log, dt_bias = inputs
    weights = A_log, dt_bias
    n = plan.cu_seqlens[-1]
    packed, rest = ([x[:n] for x in tokens], [x[n:].unsqueeze(1) for x in tokens])
    states, roots = memories
    outputs: list[Tensor] = []
    if len(states):
        states, o = fused_kda(states, *packed, *weights, cu_seqlens=plan.cu_seqlens, impl=impl, **options)
        outputs.append(o)
    after: list[Tensor] = []
    for depth, (a, b) in enumerate(pairwise(plan.levels)):
        start = roots[a:b]
        if depth:
            start = after[-1].index_select(0, plan.parent[a:b] - plan.levels[depth - 1])
        state, o = fused_kda(start, *(x[a:b] for x in rest), *weights, impl=impl, **options)
        after.append(state)
        outputs.append(o.squeeze(1))
    o = torch.cat(outputs) if outputs else tokens[2]
    return (states, torch.cat(after) if after else roots), o
