"""What the kernels share: how they are given their tensors, pieces of packed sequences, and sums over rows.

Tensors come with few axes, a last axis of stride one, and memory aligned alike. A sum over rows is taken in
two launches: partial sums of rows whose number the shapes decide, and the sum of those.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import triton
import triton.language as tl

from kda_fn.primitives import _targets
from kda_fn.types import Tensor

__all__ = [
    "TILES",
    "as_batch",
    "as_rows",
    "on_device",
    "piece_at",
    "pieces",
    "readable",
    "rows_at",
    "sum_of_parts",
]

ALIGNMENT = 16
TILES = 8
"""Tiles of rows that share a partial sum: fewer sums to write, and still tasks enough."""


def readable(x: Tensor) -> Tensor:
    """x itself where a kernel can read it through its strides, else a copy.

    A compiler arranges a tile by how its memory is aligned, and sums it in that order: for a result that
    depends, to the bit, on the values alone, every tensor is aligned alike.
    """
    if x.numel() and (x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def as_batch(x: Tensor, axes: int) -> Tensor:
    """[*B ..] -> [B ..] with `axes` axes after B: a view where strides allow."""
    batch, rest = x.shape[: x.ndim - axes], x.shape[x.ndim - axes :]
    return readable(x.reshape(batch.numel(), *rest))


def as_rows(*tensors: Tensor, kept: int = 0) -> tuple[Tensor, ...]:
    """[*B F] -> [outer inner F], split alike, behind the first `kept` axes; views where strides allow."""
    if all(x.is_contiguous() for x in tensors):
        return tuple(readable(x.view(-1, 1, x.shape[-1])) for x in tensors)
    inner = tensors[0].shape[-2] if tensors[0].ndim > 1 + kept else 1
    return tuple(readable(x.reshape(-1, inner, x.shape[-1])) for x in tensors)


def pieces(
    bounds: tuple[int, ...],
    size: int,
    *,
    skip: int = 0,
    wanted: Callable[[int], bool] = lambda _length: True,
) -> list[tuple[int, int, int, int]]:
    """Packed sequences of wanted lengths, less their first `skip` tokens, in pieces of up to `size` tokens.

    A row holds the sequence, the piece's first token counted from the sequence's first that is not skipped,
    the sequence's start and its length. A sequence without tokens to cut is one piece.
    """
    return [
        (n, first, start, stop - start)
        for n, (start, stop) in enumerate(pairwise(bounds))
        if wanted(stop - start)
        for first in range(0, max(stop - start - skip, 1), size)
    ]


def sum_of_parts(parts: Tensor) -> Tensor:
    """[groups parts F] -> [groups F], in an order that the number of parts alone decides."""
    groups, count, F = parts.shape
    total = parts.new_empty(groups, F)
    target = _targets.target_of(parts)
    tile = _targets.parts_tile(target)
    programs = target.vector_grid(groups * triton.cdiv(F, tile.columns))
    _sum_of_parts[programs](parts, total, groups, count, F, tile.rows, tile.columns, **tile.launch)
    return total


def on_device(table: list[tuple[int, int, int, int]], like: Tensor) -> Tensor:
    """[pieces 4] of int32, where `like` is."""
    return torch.tensor(table, dtype=torch.int32, device=like.device)


@triton.jit
def piece_at(table_ptr, row, size, T, PACKED: tl.constexpr):
    """A row of the table of pieces; without one, a piece of the only sequence. The start is an int64."""
    if PACKED:
        n = tl.load(table_ptr + 4 * row)
        first = tl.load(table_ptr + 4 * row + 1)
        start = tl.cast(tl.load(table_ptr + 4 * row + 2), tl.int64)
        length = tl.load(table_ptr + 4 * row + 3)
    else:
        n = 0
        first = row * size
        start = tl.cast(0, tl.int64)
        length = T
    return n, first, start, length


@triton.jit
def rows_at(task, outer, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of outer rows: the rows as int64, their one index of `inner`, the columns, the mask."""
    blocks = tl.cdiv(outer, ROWS)
    row = (task % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    f = tl.arange(0, COLUMNS)[None, :]
    return tl.cast(row, tl.int64), task // blocks, f, (row < outer) & (f < F)


@triton.jit(do_not_specialize=["groups", "count", "F"])
def _sum_of_parts(parts_ptr, total_ptr, groups, count, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.cdiv(F, COLUMNS)
    for task in range(tl.program_id(0), groups * columns, tl.num_programs(0)):
        f = (task % columns) * COLUMNS + tl.arange(0, COLUMNS)
        group = tl.cast(task // columns, tl.int64)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(0, count, ROWS):
            row = first + tl.arange(0, ROWS)[:, None]
            at = (group * count + row) * F + f[None, :]
            total += tl.load(parts_ptr + at, mask=(row < count) & (f < F)[None, :], other=0.0)
        tl.store(total_ptr + group * F + f, tl.sum(total, 0), mask=f < F)
