"""Where kernels run, and the one table of their tile sizes.

Tiles follow from the target's capacities, the dtype and the head dims; each row of the table says why.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda_fn.types import Tensor

__all__ = [
    "ASCEND910B3",
    "ASCEND910_9382",
    "CUDA",
    "TARGETS",
    "Target",
    "Tile",
    "conv_backward_tile",
    "conv_tile",
    "in_gluon",
    "kda_gradients_tile",
    "kda_scan_tile",
    "kda_steps_tile",
    "kda_terms_tile",
    "key_too_long",
    "lacks",
    "parts_tile",
    "row_sum_tile",
    "row_tile",
    "row_too_long",
    "target_of",
    "unavailable",
    "vendor_operator",
]

HAS_TRITON = importlib.util.find_spec("triton") is not None


class Target(NamedTuple):
    """What tile sizes depend on."""

    name: str
    vector_programs: int
    """Programs of a launch without matrix products; each loops over its share of the tasks."""
    cube_programs: int
    """The same of a launch with matrix products."""

    def vector_grid(self, tasks: int) -> tuple[int]:
        return (min(tasks, self.vector_programs),)

    def cube_grid(self, tasks: int) -> tuple[int]:
        return (min(tasks, self.cube_programs),)


# An Ascend core is a program; a CUDA grid may have as many programs as there are tasks.
ASCEND910B3 = Target("Ascend910B3", vector_programs=40, cube_programs=20)
ASCEND910_9382 = Target("Ascend910_9382", vector_programs=48, cube_programs=24)
CUDA = Target("CUDA", vector_programs=65_535, cube_programs=2**31 - 1)


def _npu(device: torch.device) -> Target:
    import torch_npu  # pyright: ignore[reportMissingImports]

    name = torch_npu.npu.get_device_name(device.index)
    return ASCEND910_9382 if name.startswith("Ascend910_93") else ASCEND910B3


TARGETS: dict[str, Callable[[torch.device], Target]] = {"cuda": lambda _device: CUDA, "npu": _npu}
"""By device type."""


def target_of(x: Tensor) -> Target:
    """The target that kernels on x run on."""
    return TARGETS[x.device.type](x.device)


def unavailable(x: Tensor) -> str | None:
    """Why no Triton kernel can run on x here, or None."""
    if x.device.type not in TARGETS:
        return (
            f"Triton kernels run on {' and '.join(sorted(TARGETS))} devices, these tensors are on {x.device}"
        )
    return None if HAS_TRITON else "triton is not installed (on an NPU: the extra `ascend`)"


PROCESSORS = 132
"""Of a Hopper GPU."""


def in_gluon(K: int, V: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> bool:
    """Whether KDA's kernels in Gluon serve: in bfloat16 on Hopper, whole tiles, rows copied by 16 bytes."""
    if q.device.type != "cuda" or K not in (64, 128) or V not in (64, 128):
        return False
    if any(x.dtype != torch.bfloat16 for x in (q, k, v)):
        return False
    aligned = all(stride % 16 == 0 for x in (q, k, v, g) for stride in x.stride()[:-1])
    return aligned and _has_gluon() and torch.cuda.get_device_capability(q.device) == (9, 0)


@functools.cache
def _has_gluon() -> bool:
    # Its names still change: these are of the releases between.
    version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    return (3, 6) <= version < (3, 9)


def lacks(*operators: str) -> str | None:
    """Which of these the installed torch_npu is too old for, or None."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    missing = [name for name in operators if not hasattr(torch_npu, name)]
    return f"this torch_npu has no {missing[0]}" if missing else None


def vendor_operator(*names: str) -> tuple[Any, str | None]:
    """The last of these operators of vllm-ascend's compiled extension, or why one is missing."""
    for name in names:
        if not hasattr(torch.ops._C_ascend, name):
            return None, f"vllm-ascend's compiled extension, which registers {name}, is not loaded"
    return getattr(torch.ops._C_ascend, names[-1]), None


LONGEST_ROW = 8192
"""Of norms: five float32 tiles of it fill Ascend's UB."""
LONGEST_KEY = 128
"""K of KDA: a chunk's terms at K = 256 do not fit there."""


class Tile(NamedTuple):
    rows: int
    columns: int
    launch: dict[str, int | bool]
    """Options of the launch: warps and stages on CUDA, buffering on Ascend."""
    precision: str = "ieee"
    """Of products of float32 matrices."""


def row_too_long(F: int) -> str | None:
    """The reason of a kernel that keeps whole rows of F elements on the chip."""
    return f"its rows of {F} elements are longer than {LONGEST_ROW}" if F > LONGEST_ROW else None


def key_too_long(K: int) -> str | None:
    """The reason of KDA's own kernels."""
    return f"its K = {K} is larger than {LONGEST_KEY}" if K > LONGEST_KEY else None


def row_tile(target: Target, F: int, *, tensors: int) -> Tile:
    """Norms and gates: whole rows of F elements, of which a kernel keeps `tensors` tiles at a time."""
    columns = _power_of_two(F)
    # CUDA: sixteen elements a thread and tile, in registers.
    # Ascend: 16 KiB a float32 tile; two sets of tiles and their temporaries share 192 KiB of UB.
    elements = 2048 if target is CUDA or tensors > 3 else 4096
    launch: dict[str, int | bool] = _launch(target, warps=4)
    if target is not CUDA and columns * tensors > 16_384:
        # One set of tiles is all that fits: nothing is loaded ahead.
        launch = {"multibuffer": False}
    return Tile(max(1, elements // columns), columns, launch)


def row_sum_tile(target: Target, F: int) -> Tile:
    """Their backwards, which also sum over rows; of more than 256 columns they read each twice."""
    # A partial sum is as long as a row, and there is one for every few rows of a long one.
    columns = min(_power_of_two(F), 256)
    if target is CUDA and columns < F:
        # Eight columns a thread, all rows in it: a sum over rows needs no other thread.
        return Tile(4, columns, _launch(target, warps=1))
    # CUDA: eight elements a thread. Ascend: 8 KiB a float32 tile, for up to five inputs, slopes and sums.
    return Tile(2048 // columns, columns, _launch(target, warps=8))


def parts_tile(target: Target) -> Tile:
    """Partial sums by columns."""
    # CUDA: narrow, or a weight of a few columns would wait for one program.
    return Tile(128, 8, _launch(target, warps=4)) if target is CUDA else Tile(64, 64, {})


def conv_tile(target: Target, P: int) -> Tile:
    """The short convolution: tokens by channels, read W times."""
    columns = min(_power_of_two(P), 128)
    # CUDA: sixteen outputs a thread. Ascend: 16 KiB a tile, as above.
    return Tile(16 if target is CUDA else 32, columns, _launch(target, warps=4))


def conv_backward_tile(target: Target, P: int, W: int) -> Tile:
    """The same of its backward."""
    if target is CUDA:
        # The same for sums over tokens.
        return Tile(2, min(_power_of_two(P), 256), _launch(target, warps=1))
    # W tiles of the input stay at hand: 8 KiB each, or 4 KiB where they are many.
    return Tile(16 if W <= 4 else 8, min(_power_of_two(P), 128), {})


def kda_steps_tile(target: Target, K: int, V: int) -> Tile:
    """The recurrence: K by a part of V."""
    rows = _power_of_two(K)
    # CUDA: 64 elements of the state a thread, 256 bytes a row. Ascend: 32 KiB, and a temporary as large.
    return Tile(rows, max(1, min(_power_of_two(V), 8192 // rows)), _launch(target, warps=4))


def kda_terms_tile(target: Target, dtype: torch.dtype, K: int, *, gluon: bool = False) -> Tile:
    """A chunk's own terms: whole rows of K for their lengths, the rest by parts of K."""
    rows = max(16, _power_of_two(K))
    if gluon:
        # 32 elements a thread and tile; a row of a part is the 128 bytes that shared memory swizzles.
        return Tile(rows, 64, _launch(target, warps=4))
    # CUDA: 16 elements a thread and tile, some ten of which are alive beside two matrices of 32.
    return Tile(rows, min(rows, 32), _launch(target, warps=4), _single(target, dtype))


def kda_gradients_tile(target: Target, dtype: torch.dtype, K: int, V: int, *, gluon: bool = False) -> Tile:
    """A chunk's gradients: by parts of K, and within them by parts of V."""
    rows, columns = (max(16, _power_of_two(size)) for size in (V, K))
    if gluon:
        # 16 elements a thread and tile: ten tiles fit into registers, two programs on a processor.
        return Tile(rows, 32, _launch(target, warps=4))
    if target is not CUDA:
        # Blocks of tokens by 64 channels: some forty tiles of 4 KiB.
        return Tile(min(rows, 64), min(columns, 64), {})
    # CUDA: a state's part is read at once, in float32 by half.
    part = min(rows, 64 if dtype == torch.float32 else 128)
    return Tile(part, min(columns, 32), _launch(target, warps=4), _single(target, dtype))


def kda_scan_tile(target: Target, dtype: torch.dtype, K: int, V: int, *, heads: int | None = None) -> Tile:
    """The scan over chunks: K by a part of V. With the number of heads, of Gluon's kernels."""
    rows, columns = (max(16, _power_of_two(size)) for size in (K, V))
    if heads is not None:
        # Four warps hold 64 columns of V. Two such groups in a program load a head's terms once, and each
        # computes while the other waits; those of few heads take a processor each.
        part = 64 if columns == 64 or 2 * heads <= PROCESSORS else 128
        return Tile(rows, part, _launch(target, warps=part // 16))
    # CUDA: parts of 32 columns make 128 programs of 32 heads, for some 130 processors. At K = 128 a chunk's
    # matrices are 68 KiB of shared memory in half precision, 136 KiB in float32: three sets of the one, of
    # which two are loaded ahead, or one of the other.
    stages = 1 if dtype == torch.float32 else 3
    part = min(columns, 32 if target is CUDA else 64)
    return Tile(rows, part, _launch(target, warps=4, stages=stages), _precision(target, dtype))


def _launch(target: Target, *, warps: int, stages: int = 1) -> dict[str, int | bool]:
    return {"num_warps": warps, "num_stages": stages} if target is CUDA else {}


def _precision(target: Target, dtype: torch.dtype) -> str:
    # Three TF32 products are as good as float32, and run on tensor cores.
    return "tf32x3" if target is CUDA and dtype != torch.float32 else "ieee"


def _single(target: Target, dtype: torch.dtype) -> str:
    # One has three binary digits more than bfloat16, to which its matrices were rounded or will be.
    return "tf32" if target is CUDA and dtype != torch.float32 else "ieee"


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
