"""`scan`: a loop that threads a carry, with `jax.lax.scan`'s contract over optree pytrees.

    carry_0 = init
    carry_{t+1}, y_t = body(carry_t, x_t)          x_t = every leaf of xs at index t of its first axis
    scan(body, init, xs) = carry_T, stack_t(y_t)

It is a Python loop and a stack: it works under every torch transform, for any T (0 included), and
every stateful function of this library, partially applied, is a body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

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

    >>> scan(lambda total, x: (total + x, total + x), torch.tensor(0), torch.tensor([1, 2, 3]))
    (tensor(6), tensor([1, 3, 6]))
    """
    leaves, treedef = optree.tree_flatten(xs)
    steps = _length(leaves, optree.tree_paths(xs), length)
    carry_form = _form("the carry", init)

    def step(carry: Carry, row: Iterable[Tensor]) -> tuple[Carry, Any, _Form]:
        result = body(carry, optree.tree_unflatten(treedef, row))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"scan: body must return (carry, y), got {type(result).__name__}")
        carry, y = result
        _check_form("the carry", carry_form, _form("the carry", carry))
        return carry, y, _form("its output", y)

    if steps == 0:
        _, y, _ = step(init, (leaf.new_zeros(leaf.shape[1:]) for leaf in leaves))
        return init, optree.tree_map(lambda leaf: leaf.new_zeros((0, *leaf.shape)), y)

    # unbind, not indexing: its derivative is one stack, where T selects would write T full-sized zeros.
    rows = list(zip(*(leaf.unbind(0) for leaf in leaves), strict=True)) if leaves else [()] * steps
    carry, ys, y_form = init, [], None
    for row in reversed(rows) if reverse else rows:
        carry, y, form = step(carry, row)
        y_form = y_form or form
        _check_form("its output", y_form, form)
        ys.append(optree.tree_leaves(y))
    if reverse:
        ys.reverse()
    assert y_form is not None
    return carry, optree.tree_unflatten(
        y_form.treedef, [torch.stack(column) for column in zip(*ys, strict=True)]
    )


def _length(leaves: list[Any], paths: list[tuple[Any, ...]], length: int | None) -> int:
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        raise TypeError(f"scan: length must be an integer, got {length!r}")
    if length is not None and length < 0:
        raise ValueError(f"scan: length must not be negative, got {length}")
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


class _Form(NamedTuple):
    """What must not change from step to step of a pytree of tensors."""

    treedef: optree.PyTreeSpec
    leaves: list[tuple[torch.dtype, torch.Size]]


def _form(what: str, tree: Any) -> _Form:
    leaves, treedef = optree.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            where = optree.tree_paths(tree)[i]
            raise TypeError(f"scan: leaves of {what} must be tensors, got {type(leaf).__name__} at {where}")
    return _Form(treedef, [(leaf.dtype, leaf.shape) for leaf in leaves])


def _check_form(what: str, old: _Form, new: _Form) -> None:
    if old.treedef != new.treedef:
        raise TypeError(f"scan: body changed {what}'s structure: {old.treedef} to {new.treedef}")
    for i, ((dtype, shape), (new_dtype, new_shape)) in enumerate(zip(old.leaves, new.leaves, strict=True)):
        if (dtype, shape) != (new_dtype, new_shape):
            raise TypeError(
                f"scan: body changed {what} at {optree.treespec_paths(old.treedef)[i]}: "
                f"{dtype} {tuple(shape)} to {new_dtype} {tuple(new_shape)}"
            )
