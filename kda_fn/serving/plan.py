"""What a batch of requests asks of a step: which rows are what, where their states are, and in which order.

    one token with a state            decode
    one token without, or any tokens  prefill; without a state it starts from zeros, whatever its slot holds
    1 + n tokens, n of them drafts    verify: the state after every token is kept, until one is accepted
    no tokens                         nothing: its slot is untouched

Lengths are the host's: a scheduler knows them. Slots and the numbers of accepted drafts may be on the device,
where the last step has left them, and are never read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from kda_fn.serving.pool import Slots, as_slots, check_distinct
from kda_fn.types import Tensor

__all__ = [
    "BatchPlan",
    "chunk_indices",
    "chunk_offsets",
    "idle_plan",
    "plan_batch",
    "update_plan_",
    "why_idle",
]


class BatchPlan(NamedTuple):
    """A step's tokens in the order that it takes them: prefills, packed end to end; then single tokens,
    decoded or verified, by depth. Requests without tokens are in none of it."""

    order: Tensor
    """[T] the batch's tokens in that order."""
    back: Tensor
    """[T] its inverse."""
    live: Tensor
    """[T] of the batch's tokens, whether their request has a slot to start from. Others come out as zeros."""
    load: Tensor
    """[N] the slots that prefills start from; -1 for zeros."""
    store: Tensor
    """[N] the slots of their states after the step; -1 for none."""
    token_load: Tensor
    """[M] of each single token, the slot that its request starts from."""
    token_store: Tensor
    """[M] the slot for the state after it."""
    parent: Tensor
    """[M] the single token before it, -1 for the request's start."""
    cu_seqlens: tuple[int, ...]
    """[N+1] of the prefills, none of them empty."""
    levels: tuple[int, ...]
    """Where single tokens of depth 0, 1, .. begin, and M. Decodes are of depth 0."""
    chains: tuple[tuple[int, ...], ...] | None
    """The single tokens of each request, one after the other; None where one's are a tree."""


def plan_batch(
    lengths: Sequence[int],
    *,
    has_state: Sequence[bool],
    slots: Slots | Sequence[Sequence[int]],
    capacity: int,
    drafts: Sequence[int | None] | None = None,
    parents: Sequence[Sequence[int] | None] | None = None,
    accepted: Slots | None = None,
    written: Sequence[int] | None = None,
    requests: int | None = None,
    device: torch.device | str | None = None,
) -> BatchPlan:
    """The plan of one step.

    Parameters
    ----------
    lengths : tokens of each request, in the batch's order; 0 is fine.
    has_state : whether tokens of it were computed before.
    slots : [R], each request's slot; or [R, S], as many as tokens of it may be verified at once, the state
        after token j in column j. -1, or a slot outside the pool, is none: the row comes out as zeros, and no
        slot is written.
    capacity : how many slots the pool has.
    drafts : of each request to verify, how many of its tokens are drafts, its length less 1; else None. A
        request without a state is a prefill all the same.
    parents : of each request with drafts, the token before each of its tokens, -1 for the state that it
        starts from; None for a chain.
    accepted : [R], of the `written` tokens of each request's last step, how many count: it starts from the
        state after that token, in column accepted - 1. Without it from column 0. 0, or more than were
        written, is a row that does nothing, as with no slot. Of no meaning where there is no state.
    written : states that each request's last step left, 1 where nothing was verified. Needed with `accepted`.
    requests : with fewer, rows of one token without a slot are added, so that every plan of decodes has one
        shape and a captured graph can be replayed with another (`update_plan_`).
    device : of the plan; that of `slots` where it is a tensor.

    Raises ValueError or TypeError for an argument that does not fit.

    >>> plan = plan_batch([5, 1], has_state=[False, True], slots=[0, 7], capacity=16)
    >>> plan.cu_seqlens, plan.store, plan.token_store  # a prefill into slot 0, a decode in slot 7
    ((0, 5), tensor([0]), tensor([7]))
    """
    caller = "plan_batch"
    R = len(lengths)
    if device is None:
        device = slots.device if isinstance(slots, Tensor) else "cpu"
    device = torch.device(device)
    drafts = [None] * R if drafts is None else list(drafts)
    parents = [None] * R if parents is None else list(parents)
    _check_rows(caller, lengths, R, has_state=has_state, drafts=drafts, parents=parents)
    flat = slots if isinstance(slots, Tensor) else _flat(slots)
    check_distinct(caller, flat)
    table = as_slots(caller, flat, device).reshape(R, -1)
    table = torch.where((table >= 0) & (table < capacity), table, -1)
    S = table.shape[1]
    start, usable = _starts(caller, table, has_state, accepted, written, device)

    lengths, has_state = list(lengths), list(has_state)
    if requests is not None:
        if requests < R:
            raise ValueError(f"{caller}: requests must be at least the batch's {R}, got {requests}")
        extra = requests - R
        lengths, has_state = lengths + [1] * extra, has_state + [True] * extra
        drafts, parents = drafts + [None] * extra, parents + [None] * extra
        start = torch.cat([start, start.new_full((extra,), -1)])
        table = torch.cat([table, table.new_full((extra, S), -1)])
        usable = torch.cat([usable, usable.new_zeros(extra)])
    first = [0, *accumulate(lengths)]
    rows = [r for r, length in enumerate(lengths) if length]
    stepped = [r for r in rows if has_state[r] and (lengths[r] == 1 or drafts[r] is not None)]
    packed = [r for r in rows if r not in set(stepped)]
    order = [t for r in packed for t in range(first[r], first[r + 1])]

    # Single tokens, by depth; within a depth by request, and as they come.
    trees: list[tuple[int, int, int, int]] = []
    for r in stepped:
        depth: list[int] = []
        for j, parent in enumerate(_tree(caller, r, lengths[r], parents[r])):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            trees.append((depth[j], r, j, parent))
        if lengths[r] > S:
            raise ValueError(
                f"{caller}: request {r} verifies {lengths[r]} tokens, slots must have a column for each, "
                f"they have {S}"
            )
    trees.sort(key=lambda token: token[:3])
    is_chain = all(parent == j - 1 for _depth, _r, j, parent in trees)
    place = {(r, j): i for i, (_depth, r, j, _parent) in enumerate(trees)}
    order += [first[r] + j for _depth, r, j, _parent in trees]
    depths = [depth for depth, *_rest in trees]
    levels = [depths.index(d) for d in range(depths[-1] + 1)] if depths else []

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    index = on_device(order)
    of_packed, of_stepped = on_device(packed), on_device([r for _depth, r, *_rest in trees])
    fresh = on_device([int(not has_state[r]) for r in packed]).bool()
    # A fresh row needs a slot to end in, and none to begin from.
    ends = torch.where(usable, table.select(1, 0), -1).index_select(0, of_packed)
    columns = on_device([j for _depth, _r, j, _parent in trees])
    begins = torch.where(usable, start, -1)
    owner = on_device([r for r, length in enumerate(lengths) for _ in range(length)])
    return BatchPlan(
        order=index,
        back=index.argsort(),
        live=usable.index_select(0, owner),
        load=torch.where(fresh, -1, begins.index_select(0, of_packed)),
        store=ends,
        token_load=begins.index_select(0, of_stepped),
        token_store=torch.where(usable.unsqueeze(1), table, -1)[of_stepped, columns],
        parent=on_device([-1 if parent < 0 else place[r, parent] for _depth, r, _j, parent in trees]),
        cu_seqlens=(0, *accumulate(lengths[r] for r in packed)),
        levels=(*levels, len(trees)),
        chains=tuple(tuple(place[r, j] for j in range(lengths[r])) for r in stepped) if is_chain else None,
    )


def idle_plan(plan: BatchPlan) -> BatchPlan:
    """A plan of that shape with no live row: a replay of it gives zeros, and writes to no slot.

    >>> plan = idle_plan(plan_batch([1, 1], has_state=[True, True], slots=[0, 7], capacity=16))
    >>> plan.live, plan.token_store
    (tensor([False, False]), tensor([-1, -1]))
    """
    slots = {name: torch.full_like(getattr(plan, name), -1) for name in _SLOTS}
    return plan._replace(live=torch.zeros_like(plan.live), **slots)


def why_idle(
    slots: Sequence[Sequence[int]] | Sequence[int],
    *,
    capacity: int,
    accepted: Sequence[int] | None = None,
    written: Sequence[int] | None = None,
) -> list[str | None]:
    """Of each request, why a plan of these numbers gives it nothing to do, or None. Of numbers on the host: a
    plan itself never reads those of a device.

    >>> why_idle([3, -1], capacity=16)
    [None, "slot -1 is none of the pool's 16"]
    """
    reasons: list[str | None] = []
    for r, row in enumerate(slots):
        slot = row[0] if isinstance(row, Sequence) else row
        reason = None if 0 <= slot < capacity else f"slot {slot} is none of the pool's {capacity}"
        if reason is None and accepted is not None and written is not None:
            count, most = accepted[r], written[r]
            reason = None if 1 <= count <= most else f"{count} tokens accepted of {most} that were written"
        reasons.append(reason)
    return reasons


def update_plan_(plan: BatchPlan, other: BatchPlan) -> BatchPlan:
    """Writes another plan's numbers into the tensors of this one, which a captured graph reads; returns it.

    Raises ValueError where the two are not of one shape: nothing is written then.

    >>> plan, other = (plan_batch([1], has_state=[True], slots=[slot], capacity=16) for slot in (0, 7))
    >>> update_plan_(plan, other).token_store, plan.token_store
    (tensor([7]), tensor([7]))
    """
    pairs: list[tuple[Any, Any]] = list(zip(plan, other, strict=True))
    for name, (mine, theirs) in zip(plan._fields, pairs, strict=True):
        if mine.shape != theirs.shape if isinstance(mine, Tensor) else mine != theirs:
            shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in (mine, theirs)]
            raise ValueError(f"update_plan_: {name} differs in shape, {shapes[0]} and {shapes[1]}")
    for mine, theirs in pairs:
        if isinstance(mine, Tensor):
            mine.copy_(theirs)
    return plan


def chunk_offsets(cu_seqlens: Sequence[int], chunk_size: int = 64) -> tuple[int, ...]:
    """[N+1], how many chunks come before each sequence: ceil(length / chunk_size) are its own.

    >>> chunk_offsets((0, 100, 130))
    (0, 2, 3)
    """
    counts = (-(-(b - a) // chunk_size) for a, b in pairwise(cu_seqlens))
    return (0, *accumulate(counts))


def chunk_indices(cu_seqlens: Sequence[int], chunk_size: int = 64) -> tuple[tuple[int, int], ...]:
    """Of each chunk its sequence's rank and its number in it. Of a plan, ranks are of rows with tokens.

    >>> chunk_indices((0, 100, 130))
    ((0, 0), (0, 1), (1, 0))
    """
    offsets = chunk_offsets(cu_seqlens, chunk_size)
    return tuple((n, i) for n, (a, b) in enumerate(pairwise(offsets)) for i in range(b - a))


_SLOTS = ("load", "store", "token_load", "token_store")


def _flat(slots: Sequence[Any]) -> list[int]:
    return [slot for row in slots for slot in (row if isinstance(row, Sequence) else (row,))]


def _starts(
    caller: str,
    table: Tensor,
    has_state: Sequence[bool],
    accepted: Slots | None,
    written: Sequence[int] | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The slot that each request starts from, and whether it does anything: it has one, and a valid count.

    A request without a state has no last step to count of: whatever a slot's last owner left is not its own.
    """
    R = len(has_state)
    usable = table.select(1, 0) >= 0
    if accepted is None:
        return table.select(1, 0), usable
    if written is None:
        raise ValueError(f"{caller}: accepted needs written, the states that each request's last step left")
    count = as_slots(caller, accepted, device)
    if count.shape != (R,) or len(written) != R:
        raise ValueError(
            f"{caller}: accepted and written must hold a number for each of {R} requests, got "
            f"{tuple(count.shape)} and {len(written)}"
        )
    if any(has and not 1 <= n <= table.shape[1] for n, has in zip(written, has_state, strict=True)):
        raise ValueError(
            f"{caller}: written must be 1 to {table.shape[1]}, the slots' columns, got {list(written)}"
        )
    most = torch.tensor(list(written), dtype=torch.int64).to(device)
    fresh = ~torch.tensor(list(has_state), dtype=torch.bool).to(device)
    counts = fresh | ((count >= 1) & (count <= most))
    column = torch.where(counts & ~fresh, count - 1, 0)
    return table.gather(1, column.unsqueeze(1)).squeeze(1), usable & counts


def _tree(caller: str, r: int, length: int, parents: Sequence[int] | None) -> Sequence[int]:
    """The token before each; a chain without parents."""
    if parents is None:
        return range(-1, length - 1)
    if len(parents) != length or any(not -1 <= p < j for j, p in enumerate(parents)):
        raise ValueError(
            f"{caller}: parents[{r}] must name an earlier token, or -1, for each of {length}, "
            f"got {list(parents)}"
        )
    return parents


def _check_rows(caller: str, lengths: Sequence[int], R: int, **others: Sequence[object]) -> None:
    for name, values in others.items():
        if len(values) != R:
            raise ValueError(
                f"{caller}: {name} must have an entry for each of {R} requests, it has {len(values)}"
            )
    if any(not isinstance(n, int) or n < 0 for n in lengths):
        raise ValueError(f"{caller}: lengths must be integers from 0, got {list(lengths)}")
    for r, (length, draft) in enumerate(zip(lengths, others["drafts"], strict=True)):
        if draft is not None and others["has_state"][r] and draft != length - 1:
            raise ValueError(
                f"{caller}: request {r} has {draft} drafts, its length must be {draft} + 1, got {length}"
            )
