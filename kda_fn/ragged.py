"""Packed sequences: N sequences of different lengths laid end to end on the T axis.

    cu_seqlens = [0, L_0, L_0 + L_1, .., T]        [N+1] integers, nondecreasing; empty sequences are fine

Sequence n occupies `x[.., cu_seqlens[n] : cu_seqlens[n+1], ..]`, and its state is row n of the N axis that
states have after their batch axes. `cu_seqlens` is an integer tensor, or a tuple of ints where the
lengths are static (then nothing is read back from a device, and torch.compile sees constants).

    pack    [*B N Tmax ..] -> [*B T ..]            pad    [*B T ..] -> [*B N Tmax ..]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from kda_fn.types import CuSeqlens, Tensor

__all__ = [
    "batch_bounds",
    "check_packing",
    "cu_seqlens_of",
    "lengths_of",
    "offsets",
    "pack",
    "pad",
    "without_empty",
]


def offsets(cu_seqlens: CuSeqlens, T: int | None = None) -> tuple[int, ...]:
    """`cu_seqlens` as checked Python ints; if T is given they must end there.

    Raises TypeError for what is not integer, ValueError for what is not a one-dimensional, nondecreasing
    run from 0 to T.
    """
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
        if cu_seqlens.ndim != 1:
            raise ValueError(f"cu_seqlens must have one axis, got shape {tuple(cu_seqlens.shape)}")
        if cu_seqlens.is_meta:
            raise ValueError("cu_seqlens must hold values, got a meta tensor")
        try:
            values = tuple(cu_seqlens.tolist())
        except RuntimeError as error:
            raise ValueError("cu_seqlens must not be mapped by vmap: every row shares one packing") from error
    elif not isinstance(cu_seqlens, Sequence):
        raise TypeError(f"cu_seqlens must be a tensor or a sequence of integers, got {type(cu_seqlens)}")
    else:
        values = tuple(cu_seqlens)
        _check_integers("cu_seqlens", values)
    if len(values) < 2:
        raise ValueError(f"cu_seqlens must hold N+1 offsets for N >= 1 sequences, got {list(values)}")
    if values[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, it starts at {values[0]}")
    for n, (start, stop) in enumerate(pairwise(values)):
        if stop < start:
            raise ValueError(f"cu_seqlens must not decrease, got {start}, {stop} at sequence {n}")
    if T is not None and values[-1] != T:
        raise ValueError(f"cu_seqlens must end at T = {T}, it ends at {values[-1]}")
    return values


def check_packing(caller: str, cu_seqlens: CuSeqlens, *, T: int, N: int, state_name: str) -> None:
    """ValueError unless cu_seqlens covers T tokens with as many sequences as there are states."""
    sequences = len(offsets(cu_seqlens, T)) - 1
    if sequences != N:
        raise ValueError(
            f"{caller}: {state_name} holds N = {N} states, cu_seqlens describes {sequences} sequences"
        )


def lengths_of(cu_seqlens: CuSeqlens) -> list[int]:
    """`[L_0, .., L_{N-1}]`.

    >>> lengths_of((0, 2, 2, 5))
    [2, 0, 3]
    """
    return [stop - start for start, stop in pairwise(offsets(cu_seqlens))]


def cu_seqlens_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `lengths_of`.

    >>> cu_seqlens_of([2, 0, 3])
    (0, 2, 2, 5)
    """
    _check_integers("lengths", lengths)
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must not be negative, got {list(lengths)}")
    return offsets(tuple(accumulate(lengths, initial=0)))


def batch_bounds(cu_seqlens: CuSeqlens | None, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Offsets of all sequences of rows (*B, T) laid end to end: each batch row's one after the other."""
    *batch, T = rows
    bounds = (0, T) if cu_seqlens is None else offsets(cu_seqlens, T)
    starts = [b * T + start for b in range(math.prod(batch)) for start in bounds[:-1]]
    return (*starts, math.prod(batch) * T)


def without_empty(bounds: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """The ranks of the sequences that have tokens, and the offsets of those alone."""
    kept = [n for n, (start, stop) in enumerate(pairwise(bounds)) if stop > start]
    return kept, (*(bounds[n] for n in kept), bounds[-1])


def pad(x: Tensor, cu_seqlens: CuSeqlens, *, axis: int = 0) -> Tensor:
    """Packed to padded: `[*B T ..] -> [*B N Tmax ..]`, T at `axis`, zeros after each sequence's end.

    Zeros are exact padding: `g = 0, beta = 0` is KDA's identity token.

    >>> pad(torch.arange(5), (0, 2, 2, 5))
    tensor([[0, 1, 0],
            [0, 0, 0],
            [2, 3, 4]])
    """
    axis = _check_axis("pad", x, axis, 1)
    bounds = offsets(cu_seqlens, x.shape[axis])
    longest = max(lengths_of(bounds))
    empty_row = x.shape[axis]
    rows = [
        start + t if start + t < stop else empty_row
        for start, stop in pairwise(bounds)
        for t in range(longest)
    ]
    return take(append_zero_row(x, axis), rows, axis).unflatten(axis, (len(bounds) - 1, longest))


def pack(x: Tensor, cu_seqlens: CuSeqlens, *, axis: int = 0) -> Tensor:
    """Padded to packed: `[*B N Tmax ..] -> [*B T ..]`, N at `axis`. The inverse of `pad`.

    >>> pack(torch.tensor([[1, 2, 0], [3, 4, 5]]), (0, 2, 5))
    tensor([1, 2, 3, 4, 5])
    """
    axis = _check_axis("pack", x, axis, 2)
    lengths = lengths_of(cu_seqlens)
    N, longest = x.shape[axis : axis + 2]
    if len(lengths) != N or max(lengths) > longest:
        raise ValueError(f"pack: x holds {N} sequences of up to {longest}, cu_seqlens says {lengths}")
    rows = [n * longest + t for n, length in enumerate(lengths) for t in range(length)]
    return take(x.flatten(axis, axis + 1), rows, axis)


def _check_integers(name: str, values: Sequence[int]) -> None:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise TypeError(f"{name} must hold integers, got {list(values)}")


def _check_axis(caller: str, x: Tensor, axis: int, axes: int) -> int:
    """`axis` counted from the start; `axes` axes from it on must be there."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}: x must be a tensor, got {type(x).__name__}")
    if not -x.ndim <= axis < x.ndim or axis % x.ndim + axes > x.ndim:
        raise ValueError(f"{caller}: axis must leave {axes} axes of x {tuple(x.shape)}, got {axis}")
    return axis % x.ndim


def take(x: Tensor, rows: Sequence[int], axis: int) -> Tensor:
    """`x` at `rows` of `axis`, a new tensor."""
    return x.index_select(axis, torch.tensor(rows, dtype=torch.int64, device=x.device))


def append_zero_row(x: Tensor, axis: int) -> Tensor:
    """`x` with one row of zeros at the end of `axis`: what padding gathers from."""
    return torch.cat([x, torch.zeros_like(x.narrow(axis, 0, 1))], axis) if x.shape[axis] else x
