"""`scan`: a loop that threads a carry, with `jax.lax.scan`'s contract over optree pytrees.

    carry_0 = init
    carry_{t+1}, y_t = body(carry_t, x_t)          x_t = every leaf of xs at index t of its first axis
    scan(body, init, xs) = carry_T, stack_t(y_t)

It is a Python loop and a stack: it works under every torch transform, for any T (0 included), and
every stateful function of this library, partially applied, is a body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import optree
import torch

from kda_fn.types import Tensor

Carry = TypeVar("Carry")

__all__ = ["scan"]


def scan(
    body: Callable[[Carry, Any], tuple[Carry, Any]],
    init: Carry,
    xs: Any,
    *,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[Carry, Any]:
    """Scan `body` over the first axis of `xs`, threading a carry.

    Parameters
    ----------
    body : `body(carry, x) -> (carry, y)`; the carry keeps its structure, shapes and dtypes.
    init : the first carry, any pytree of tensors (and of None).
    xs : any pytree of tensors that share the length T of their first axis; None where `length` says T.
    length : T, needed only if `xs` has no leaves.
    reverse : run from the last index to the first; `ys` stay in the order of `xs`.

    Returns
    -------
    carry, ys : the last carry, and the stacked outputs: each leaf `[T, ...]`, a new tensor. With T = 0 the
    carry is `init`, and `body` is called once on zeros to learn the shapes of `ys`.

    Raises
    ------
    ValueError : lengths that differ, no length at all.
    TypeError : a carry that changes structure, shape or dtype; leaves that are not tensors.

    Source: `jax.lax.scan`.
    """
    leaves, treedef = optree.tree_flatten(xs)
    steps = _length(leaves, optree.tree_paths(xs), length)

    if steps == 0:
        zeros = optree.tree_unflatten(treedef, [leaf.new_zeros(leaf.shape[1:]) for leaf in leaves])
        carry, y = body(init, zeros)
        _check_carry(init, carry)
        return init, optree.tree_map(lambda leaf: leaf.new_zeros((0, *leaf.shape)), y)

    # unbind, not indexing: its derivative is one stack, where T selects would write T full-sized zeros.
    rows = zip(*(leaf.unbind(0) for leaf in leaves), strict=True) if leaves else [()] * steps
    carry, columns, structure = init, [], None
    for row in reversed(list(rows)) if reverse else rows:
        new_carry, y = body(carry, optree.tree_unflatten(treedef, row))
        _check_carry(carry, new_carry)
        carry = new_carry
        column, y_structure = optree.tree_flatten(y)
        if structure not in (None, y_structure):
            raise TypeError(f"scan: body changed its output's structure: {structure} to {y_structure}")
        structure = y_structure
        columns.append(column)
    if reverse:
        columns.reverse()
    assert structure is not None
    ys = [torch.stack(leaf) for leaf in zip(*columns, strict=True)]
    return carry, optree.tree_unflatten(structure, ys)


def _length(leaves: list[Any], paths: list[tuple[Any, ...]], length: int | None) -> int:
    lengths: dict[str, int] = {} if length is None else {"length": length}
    for path, leaf in zip(paths, leaves, strict=True):
        where = "xs" + "".join(f"[{key!r}]" for key in path)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"scan: leaves of xs must be tensors, {where} is {type(leaf).__name__}")
        if leaf.ndim == 0:
            raise ValueError(f"scan: {where} has no axis to scan over")
        lengths[where] = leaf.shape[0]
    if not lengths:
        raise ValueError("scan: xs has no leaves; give length=")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"scan: lengths differ: {lengths}")
    return next(iter(lengths.values()))


def _check_carry(old: Any, new: Any) -> None:
    """The carry out of a step must be interchangeable with the carry into it."""
    old_leaves, old_treedef = optree.tree_flatten(old)
    new_leaves, new_treedef = optree.tree_flatten(new)
    if old_treedef != new_treedef:
        raise TypeError(f"scan: body changed the carry's structure: {old_treedef} to {new_treedef}")
    for path, a, b in zip(optree.tree_paths(old), old_leaves, new_leaves, strict=True):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            raise TypeError(f"scan: leaves of the carry must be tensors, got {type(b).__name__} at {path}")
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TypeError(
                f"scan: body changed the carry at {path}: "
                f"{a.dtype} {tuple(a.shape)} to {b.dtype} {tuple(b.shape)}"
            )
