"""One step of a batch: prefills, decodes and verified drafts in one call of a layer, or of the hybrid model.

What is projected is of all tokens at once; only the convolution, the memory and attention know which row is
which. Prefills are one packed call of each. Single tokens, decoded or verified, are taken by depth, each from
the state after the token before it, so that the state after every one of them is there to be picked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import optree
import torch

from kda_fn import _check, ragged
from kda_fn.layers.kimi_delta_attention import apply_kda_layer, check_layer
from kda_fn.layers.kimi_linear import (
    KimiLinearConfig,
    KimiLinearParams,
    KimiLinearState,
    apply_kimi_linear,
    check_kimi_linear,
)
from kda_fn.layers.mla import MLAConfig, MLAParams, MLAState, apply_mla
from kda_fn.primitives.causal_conv1d import causal_conv1d
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.serving.plan import BatchPlan
from kda_fn.serving.pool import gather, scatter, scatter_
from kda_fn.types import Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

__all__ = ["check_one", "run_rows", "step_batch", "step_batch_"]


def step_batch(
    params: KDAParams | KimiLinearParams,
    pool: KDAState | KimiLinearState,
    x: Float[Tensor, "T D"] | Tensor,
    plan: BatchPlan,
    *,
    config: KDAConfig | KimiLinearConfig,
    impl: Impl | None = None,
) -> tuple[Any, Tensor]:
    """A KDA layer, or the hybrid model, over a batch of requests.

    Parameters
    ----------
    params, config, impl : as of `kimi_delta_attention`, or of `kimi_linear`.
    pool : states whose leaves have a slot axis first: `init_state(config, (slots,))`, or
        `init_kimi_linear_state(config, (slots,), capacity=..)`.
    x : [T D], or [T] token numbers, of all requests in the batch's order.
    plan : of `plan_batch`.

    Returns
    -------
    pool, y : a new pool in which the plan's slots hold what came of them, every other bit as it was; and
    [T D], or logits [T vocab], in the batch's order: zeros for a request without a slot, whatever x holds.

    Raises ValueError or TypeError for an argument that does not fit, before any work; NotImplementedError for
    a tree of drafts where there is attention.

    >>> config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> params, pool, x = init_kimi_delta_attention(config), init_state(config, (16,)), torch.randn(6, 8)
    >>> plan = plan_batch([5, 1], has_state=[False, True], slots=[0, 7], capacity=16)
    >>> pool, y = step_batch(params, pool, x, plan, config=config)
    >>> _, alone = kimi_delta_attention(params, init_state(config), x[:5], config=config)
    >>> torch.allclose(y[:5], alone, atol=1e-5)
    True
    """
    return _step("step_batch", scatter, params, pool, x, plan, config, impl)


def step_batch_(
    params: KDAParams | KimiLinearParams,
    pool: KDAState | KimiLinearState,
    x: Float[Tensor, "T D"] | Tensor,
    plan: BatchPlan,
    *,
    config: KDAConfig | KimiLinearConfig,
    impl: Impl | None = None,
) -> tuple[Any, Tensor]:
    """`step_batch` that writes into the pool it is given, for a serving loop: into the plan's slots alone.

    Raises as `step_batch` does, and RuntimeError under a transform or where a derivative is recorded.

    >>> config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> params, pool, x = init_kimi_delta_attention(config), init_state(config, (16,)), torch.randn(6, 8)
    >>> plan = plan_batch([5, 1], has_state=[False, True], slots=[0, 7], capacity=16)
    >>> step_batch_(params, pool, x, plan, config=config)[0] is pool
    True
    >>> pool.recurrent_state.flatten(1).any(-1).nonzero().flatten()  # the slots that were written
    tensor([0, 7])
    """
    return _step("step_batch_", scatter_, params, pool, x, plan, config, impl)


def _step(
    caller: str,
    put: Callable[..., Any],
    params: KDAParams | KimiLinearParams,
    pool: KDAState | KimiLinearState,
    x: Tensor,
    plan: BatchPlan,
    config: KDAConfig | KimiLinearConfig,
    impl: Impl | None,
) -> tuple[Any, Tensor]:
    _check.instance(caller, "plan", plan, BatchPlan)
    # Slot by slot and token by token they are a call's state and input.
    check_one(
        caller, params, _first(pool), x[:1] if isinstance(x, Tensor) and x.ndim else x, config, impl, plan
    )
    if len(x) != len(plan.order):
        raise ValueError(f"{caller}: x has shape {tuple(x.shape)}, the plan is of {len(plan.order)} tokens")
    live = plan.live.view(-1, *[1] * (x.ndim - 1))
    # Before as well as after: a gate of NaN would be left of 0 times it.
    rows = torch.where(live, x, torch.zeros((), dtype=x.dtype, device=x.device)).index_select(0, plan.order)
    states, roots = gather(pool, plan.load), gather(pool, plan.token_load)
    packed, verified, y = run_rows(params, states, roots, rows, plan, config, impl)
    slots = torch.cat([plan.store, plan.token_store])
    pool = put(pool, slots, _joined(packed, verified))
    y = torch.where(
        plan.live.unsqueeze(1), y.index_select(0, plan.back), torch.zeros((), dtype=y.dtype, device=y.device)
    )
    return pool, y


def check_one(
    caller: str,
    params: KDAParams | KimiLinearParams,
    state: Any,
    x: Any,
    config: KDAConfig | KimiLinearConfig,
    impl: Impl | None,
    plan: BatchPlan | None = None,
) -> None:
    """That all fits for one state and x [T D] or [T], and that the model can do what the plan says."""
    if not isinstance(config, KimiLinearConfig):
        check_layer(caller, params, state, x, config, None, impl)  # pyright: ignore[reportArgumentType]
        if x.ndim != 2:
            raise ValueError(f"{caller}: x has shape {tuple(x.shape)}, expected [T D]")
        return
    check_kimi_linear(caller, params, state, x, config, None, impl)  # pyright: ignore[reportArgumentType]
    if x.ndim != 1:
        raise ValueError(f"{caller}: x has shape {tuple(x.shape)}, expected the numbers of tokens, [T]")
    for i, layer in enumerate(state):
        if isinstance(layer, MLAState) and not layer.length.numel():
            raise ValueError(f"{caller}: the cache of layer {i} must be preallocated (`capacity=`), it grows")
    if plan is not None and plan.chains is None and "mla" in config.layer_types:
        raise NotImplementedError(f"{caller}: attention over a tree of drafts is not built, only over chains")


def run_rows(
    params: Any,
    states: Any,
    roots: Any,
    x: Tensor,
    plan: BatchPlan,
    config: KDAConfig | KimiLinearConfig,
    impl: Impl | None,
) -> tuple[Any, Any, Tensor]:
    """Over x in the plan's order, from the states of the prefills [N ..] and from those that single tokens'
    requests start from [M ..].

    The results are the prefills' last states [N ..], the state after each single token [M ..], and y.
    """
    if isinstance(config, KimiLinearConfig):
        both = tuple(_both(a, b) for a, b in zip(states, roots, strict=True))
        layers = partial(_kda_rows, plan), partial(_mla_rows, plan)
        after, y = apply_kimi_linear(params, both, x, config, None, impl, *layers)
        packed, verified = zip(*(_halves(layer) for layer in after), strict=True)
        return packed, verified, y
    after, y = _kda_rows(plan, params, _both(states, roots), x, config, None, impl)
    return *_halves(after), y


def _both(packed: Any, verified: Any) -> Any:
    """One state of pairs: the layers hand its fields to what stands in for their functions, and back."""
    return type(packed)(*zip(packed, verified, strict=True))


def _halves(state: Any) -> tuple[Any, Any]:
    packed, verified = zip(*state, strict=True)
    return type(state)(*packed), type(state)(*verified)


def _joined(packed: Any, verified: Any) -> Any:
    return optree.tree_map(lambda a, b: torch.cat([a, b]), packed, verified)


def _first(pool: Any) -> Any:
    """The state in the first slot, of what may be no pool at all."""

    def first(leaf: Any) -> Any:
        return leaf[0] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) else leaf

    return optree.tree_map(first, pool)


def _kda_rows(
    plan: BatchPlan,
    params: KDAParams,
    state: Any,
    x: Float[Tensor, "T D"],
    config: KDAConfig,
    cu_seqlens: None,
    impl: Impl | None,
) -> tuple[Any, Float[Tensor, "T D"]]:
    conv: Any = partial(_conv, plan)
    memory: Any = partial(_memory, plan)
    return apply_kda_layer(params, state, x, config, cu_seqlens, impl, conv=conv, memory=memory)


def _mla_rows(
    plan: BatchPlan,
    params: MLAParams,
    state: Any,
    x: Float[Tensor, "T D"],
    config: MLAConfig,
    cu_seqlens: None,
    impl: Impl | None,
) -> tuple[Any, Float[Tensor, "T D"]]:
    """`mla` of the prefills, and of chains of tokens: the cache after each is the last one, cut."""
    packed, rest = x.tensor_split([plan.cu_seqlens[-1]])
    states, roots = _halves(state)
    if len(packed):
        states, packed = apply_mla(params, states, packed, config, plan.cu_seqlens, impl)
    assert plan.chains is not None
    if all(len(chain) == 1 for chain in plan.chains):
        # Decodes are a batch: nothing is made of numbers on the host, which no captured graph could take.
        if len(rest):
            roots, tokens = apply_mla(params, roots, rest.unsqueeze(1), config, None, impl)
            rest = tokens.squeeze(1)
    else:
        index = torch.tensor([i for chain in plan.chains for i in chain], device=x.device)
        firsts = torch.tensor([chain[0] for chain in plan.chains], device=x.device)
        counts = torch.tensor([j + 1 for chain in plan.chains for j in range(len(chain))], device=x.device)
        owners = torch.tensor([n for n, chain in enumerate(plan.chains) for _ in chain], device=x.device)
        lengths = ragged.cu_seqlens_of([len(chain) for chain in plan.chains])
        before = MLAState(*(leaf.index_select(0, firsts) for leaf in roots))
        after, tokens = apply_mla(params, before, rest.index_select(0, index), config, lengths, impl)
        back = index.argsort()
        latent, shared = (leaf.index_select(0, owners).index_select(0, back) for leaf in after[:2])
        roots = MLAState(latent, shared, roots.length + counts.index_select(0, back).unsqueeze(1))
        rest = tokens.index_select(0, back)
    return _both(states, roots), torch.cat([packed, rest])


def _conv(
    plan: BatchPlan,
    windows: tuple[Tensor, Tensor],
    x: Tensor,
    weight: Tensor,
    *,
    impl: Impl | None,
    **_options: Any,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`causal_conv1d` of the prefills, and of each single token with those before it."""
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
    """`fused_kda` of the prefills, and of single tokens depth by depth."""
    tokens, weights = inputs[:5], inputs[5:]
    n = plan.cu_seqlens[-1]
    packed, rest = (*(x[:n] for x in tokens), *weights), [x[n:].unsqueeze(1) for x in tokens]
    states, roots = memories
    step: Any = partial(fused_kda, impl=impl, **options)
    outputs: list[Tensor] = []
    if len(states):
        states, o = step(states, *packed, cu_seqlens=plan.cu_seqlens)
        outputs.append(o)
    after: list[Tensor] = []
    for depth, (a, b) in enumerate(pairwise(plan.levels)):
        start = roots[a:b]
        if depth:
            start = after[-1].index_select(0, plan.parent[a:b] - plan.levels[depth - 1])
        state, o = step(start, *(x[a:b] for x in rest), *weights)
        after.append(state)
        outputs.append(o.squeeze(1))
    o = torch.cat(outputs) if outputs else tokens[2]
    return (states, torch.cat(after) if after else roots), o
