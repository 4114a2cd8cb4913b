"""State slots: many sequences' states in one tree with a leading slot axis, as a serving loop keeps them.

    gather(pool, slots)            -> states         [N ..] of leaves [slots ..]
    scatter(pool, slots, states)   -> pool           a new one; `scatter_` writes into the one it is given

A slot of -1, or outside the pool, is none: what is gathered there is zeros, what is scattered there is
dropped. It is never clamped, nor wrapped to the last slot. Slots may be a tensor on the pool's device:
nothing is read back from it then, and that no two rows share a slot is for the caller to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import optree
import torch

from kda_fn.primitives._kernel import can_be_read
from kda_fn.types import Tensor

__all__ = ["Slots", "as_slots", "fork", "free", "gather", "scatter", "scatter_"]

Tree: TypeAlias = Any
"""A pool, or states: any pytree of tensors."""
Slots: TypeAlias = Tensor | Sequence[int]


def gather(pool: Tree, slots: Slots) -> Tree:
    """The states in the given slots, new tensors: leaves [*R ..] for slots [*R]; zeros where there is none.

    Raises TypeError for slots that are not integers, ValueError for a pool without a slot axis.

    >>> gather(torch.tensor([10, 20, 30]), [2, -1])  # -1 is no slot
    tensor([30,  0])
    """
    size, device = _size("gather", pool)
    index = as_slots("gather", slots, device)
    valid = (index >= 0) & (index < size)
    safe = torch.where(valid, index, 0)

    def take(leaf: Tensor) -> Tensor:
        rows = leaf.index_select(0, safe.reshape(-1)).unflatten(0, index.shape)
        return torch.where(_beside(valid, rows), rows, torch.zeros((), dtype=leaf.dtype, device=device))

    return optree.tree_map(take, pool)


def scatter(pool: Tree, slots: Slots, states: Tree) -> Tree:
    """A pool with states [N ..] in the given slots [N]; the others keep every bit.

    Raises TypeError for slots that are not integers or states of another structure; ValueError for shapes
    that do not fit, or for two rows with one slot, which it names, where slots can be read without a device.

    >>> scatter(torch.tensor([10, 20, 30]), [2, 0], torch.tensor([1, 2]))
    tensor([ 2, 20,  1])
    """
    return optree.tree_map(
        lambda leaf, rows, index: leaf.index_copy(0, index, rows), *_placed("scatter", pool, slots, states)
    )


def scatter_(pool: Tree, slots: Slots, states: Tree) -> Tree:
    """`scatter` into the pool that is given, for a serving loop; returns it.

    Raises as `scatter` does, and RuntimeError under a transform or where a derivative is recorded.

    >>> pool = torch.tensor([10, 20, 30])
    >>> scatter_(pool, [2, 0], torch.tensor([1, 2])) is pool, pool
    (True, tensor([ 2, 20,  1]))
    """
    tensors = [*optree.tree_leaves(pool), *optree.tree_leaves(states)]
    recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    if recorded or not all(isinstance(x, Tensor) and can_be_read(x) for x in tensors):
        raise RuntimeError("scatter_: writes in place; under a transform or a derivative use scatter")
    optree.tree_map_(
        lambda leaf, rows, index: leaf.index_copy_(0, index, rows), *_placed("scatter_", pool, slots, states)
    )
    return pool


def fork(pool: Tree, source: int, targets: Slots) -> Tree:
    """A pool in which the targets hold what the source holds: beams, best-of-N, a shared prefix.

    >>> fork(torch.tensor([10, 20, 30]), 0, [1, 2])
    tensor([10, 10, 10])
    """
    size, device = _size("fork", pool)
    if not 0 <= source < size:
        raise ValueError(f"fork: source must be a slot of the pool, 0 to {size - 1}, got {source}")
    targets = as_slots("fork", targets, device)
    return scatter(pool, targets, gather(pool, torch.full_like(targets, source)))


def free(pool: Tree, slots: Slots) -> Tree:
    """A pool with zeros in the given slots: nothing of a request is left behind.

    >>> free(torch.tensor([10, 20, 30]), [1])
    tensor([10,  0, 30])
    """
    _, device = _size("free", pool)
    nothing = torch.full_like(as_slots("free", slots, device), -1)
    return scatter(pool, slots, gather(pool, nothing))


def as_slots(caller: str, slots: Slots, device: torch.device) -> Tensor:
    """Slots as int64 on the device. Those on the host are checked: no slot twice."""
    if isinstance(slots, Tensor):
        if slots.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{caller}: slots must be int32 or int64, got {slots.dtype}")
        if slots.device == device and device.type != "cpu":
            return slots.long()
        on_host = slots
    else:
        on_host = torch.tensor(slots, dtype=torch.int64) if len(slots) else torch.zeros(0, dtype=torch.int64)
    return on_host.to(device, torch.int64)


def check_distinct(caller: str, slots: Slots) -> None:
    """ValueError, with its number, for a slot that two rows share; nothing is read from a device."""
    if isinstance(slots, Tensor):
        if slots.device.type != "cpu" or not can_be_read(slots):
            return
        slots = slots.reshape(-1).tolist()
    seen: set[int] = set()
    for slot in slots:
        if slot >= 0 and slot in seen:
            raise ValueError(f"{caller}: two rows have slot {slot}")
        seen.add(slot)


def _placed(caller: str, pool: Tree, slots: Slots, states: Tree) -> tuple[Tree, Tree, Tree]:
    """pool; states and slots of which rows without a slot repeat one that has: written twice, to the same."""
    size, device = _size(caller, pool)
    check_distinct(caller, slots)
    index = as_slots(caller, slots, device)
    leaves, treedef = optree.tree_flatten(pool)
    rows, rows_treedef = optree.tree_flatten(states)
    if treedef != rows_treedef:
        raise TypeError(f"{caller}: states must be a tree like the pool, {treedef}, got {rows_treedef}")
    for leaf, row in zip(leaves, rows, strict=True):
        if row.shape != (*index.shape, *leaf.shape[1:]) or row.dtype != leaf.dtype:
            raise ValueError(
                f"{caller}: states hold a {row.dtype} of shape {tuple(row.shape)}, expected {leaf.dtype} "
                f"{(*index.shape, *leaf.shape[1:])}"
            )
    index, rows = index.reshape(-1), [row.flatten(0, index.ndim - 1) for row in rows]
    if not len(index):
        return pool, optree.tree_unflatten(treedef, rows), optree.tree_unflatten(treedef, [index] * len(rows))
    valid = (index >= 0) & (index < size)
    first = valid.int().argmax().reshape(1)
    any_valid = valid.any()
    # With no row at all slot 0 is given what it holds.
    stand_in = torch.where(any_valid, index.index_select(0, first), 0)
    placed = [
        torch.where(
            _beside(valid, row),
            row,
            torch.where(any_valid, row.index_select(0, first), leaf.narrow(0, 0, 1)),
        )
        for leaf, row in zip(leaves, rows, strict=True)
    ]
    index = torch.where(valid, index, stand_in)
    return pool, optree.tree_unflatten(treedef, placed), optree.tree_unflatten(treedef, [index] * len(rows))


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    """The mask of x's leading axes, with axes for the rest."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


def _size(caller: str, pool: Tree) -> tuple[int, torch.device]:
    leaves = optree.tree_leaves(pool)
    sizes = {leaf.shape[:1] for leaf in leaves if isinstance(leaf, Tensor)}
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves) or len(sizes) != 1 or () in sizes:
        raise ValueError(f"{caller}: the pool must hold tensors that share a leading slot axis")
    if not leaves[0].shape[0]:
        raise ValueError(f"{caller}: the pool has no slots")
    return leaves[0].shape[0], leaves[0].device
