"""Runs lowered kernels on guarded copies of their arguments."""

from __future__ import annotations

import ctypes
import re
import signal
import struct
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .lowering import build_runtime, lower

Grid = tuple[int, int, int]

# The same bytes are a NaN as float32, bfloat16 and float16, and a huge number as an integer.
NAN = 0x7FA57FA5
HUGE = struct.unpack("<I", struct.pack("<f", 1e30))[0]

# Which end of a storage lies at a fence; the C file's numbers.
NO_FENCE, BEFORE, BEHIND = range(3)
NOWHERE = -(1 << 63)


class BoundsError(RuntimeError):
    """A kernel that touches memory none of its arguments own."""


class Buffer(ctypes.Structure):
    """A guarded copy of one storage; the C file's struct of this name."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("outside", ctypes.c_int64 * 2),
        ("fence", ctypes.c_int),
        ("mapping", ctypes.c_void_p),
        ("mapped", ctypes.c_size_t),
        ("next", ctypes.c_void_p),
    )
    data: int
    bytes: int
    outside: ctypes.Array[ctypes.c_int64]


_RUNTIME: list[ctypes.PyDLL] = []


def runtime(cache: Path) -> ctypes.PyDLL:
    """The C file, loaded once in a process whatever the cache: the kernels' libraries link to it."""
    if _RUNTIME:
        return _RUNTIME[0]
    # PyDLL keeps the GIL, for the library has global state.
    library = ctypes.PyDLL(str(build_runtime(cache)), mode=ctypes.RTLD_GLOBAL)
    library.emulator_guard.argtypes = [ctypes.POINTER(Buffer), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.emulator_fault_address.restype = ctypes.c_void_p
    _RUNTIME.append(library)
    return library


class Copies:
    """Guarded copies of every storage behind some tensors."""

    def __init__(self, library: ctypes.PyDLL, tensors: Mapping[str, Tensor], poison: int, fence: int) -> None:
        self.library = library
        self.buffers: dict[int, Buffer] = {}
        self.names: dict[int, list[str]] = {}
        library.emulator_poison(ctypes.c_uint32(poison))
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            self.names.setdefault(start, []).append(name)
            if start not in self.buffers:
                buffer = Buffer()
                if library.emulator_guard(ctypes.byref(buffer), start, storage.nbytes(), fence):
                    raise MemoryError(f"no room for a guarded copy of {name}")
                self.buffers[start] = buffer

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self.buffers.values():
            self.library.emulator_release(ctypes.byref(buffer))

    def pointer(self, tensor: Tensor) -> int:
        start = tensor.untyped_storage().data_ptr()
        # An empty tensor has no data, whatever its storage.
        return self.buffers[start].data + max(tensor.data_ptr() - start, 0)

    def arguments(self, start: int) -> str:
        return ", ".join(self.names[start])

    def nearest(self, address: int) -> int:
        return min(self.buffers, key=lambda start: abs(self.buffers[start].data - address))

    def strays(self) -> list[str]:
        """What met the fences."""
        return [
            f"{verb} outside of {self.arguments(start)}: {offset:+} bytes from the start of its storage"
            f" of {buffer.bytes:,}"
            for start, buffer in self.buffers.items()
            for verb, offset in zip(("reads", "writes"), buffer.outside, strict=True)
            if offset != NOWHERE
        ]

    def trespass(self) -> tuple[str, int] | None:
        """The arguments whose guards were written to, and where, in bytes from the start of their storage."""
        offset = ctypes.c_int64()
        for start, buffer in self.buffers.items():
            if self.library.emulator_trespass(ctypes.byref(buffer), ctypes.byref(offset)):
                return self.arguments(start), offset.value
        return None

    def contents(self) -> dict[int, bytes]:
        return {start: ctypes.string_at(buffer.data, buffer.bytes) for start, buffer in self.buffers.items()}

    def write_back(self) -> None:
        for start, buffer in self.buffers.items():
            ctypes.memmove(start, buffer.data, buffer.bytes)


class Program:
    """One lowered kernel, loaded. `names` are the arguments it was left with, in its order."""

    def __init__(self, kernel: str, ir: str, names: list[str], cache: Path) -> None:
        self.kernel = kernel
        self.names = names
        self.runtime = runtime(cache)
        self.library = ctypes.PyDLL(str(lower(ir, cache)))
        signature = re.findall(r"func\.func @\w+\((.*?)\) attributes", ir, re.S)[-1]
        # Two buffers of the compiler's own come before the arguments, the grid and the program ids behind.
        types = re.findall(r"%arg\d+: (\w+)", signature)[2:-6]
        assert len(types) == len(names), (kernel, types, names)
        self.types = types

    def __call__(self, grid: Grid, values: Mapping[str, object], strict: bool) -> None:
        tensors = {name: values[name] for name in self.names}
        tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{self.kernel}: {name} is on {tensor.device}, only CPU tensors can be run on"
                )
        # A fence stands at one end of a storage; in the second run at the other.
        with Copies(self.runtime, tensors, NAN, BEHIND if strict else NO_FENCE) as copies:
            self.run(grid, values, copies)
            if strict:
                with Copies(self.runtime, tensors, HUGE, BEFORE) as others:
                    self.run(grid, values, others)
                    first, second = copies.contents(), others.contents()
                differ = [copies.arguments(start) for start in first if first[start] != second[start]]
                if differ:
                    raise BoundsError(
                        f"{self.kernel} reads temporaries that it never wrote: {', '.join(differ)} came out"
                        " different when they held something else"
                    )
            copies.write_back()

    def run(self, grid: Grid, values: Mapping[str, object], copies: Copies) -> None:
        memref = [0] * 5
        slots = memref + memref
        for name, kind in zip(self.names, self.types, strict=True):
            value = values[name]
            if isinstance(value, Tensor):
                slots += [copies.pointer(value)] * 2 + [0, 0, 1]
            elif kind == "f32":
                slots += struct.unpack("<I", struct.pack("<f", value))
            else:
                assert isinstance(value, int) and kind != "memref", (name, kind, value)
                slots += [value]
        slots += grid
        packed = (ctypes.c_uint64 * len(slots))(*slots)
        status = self.runtime.emulator_run(self.library.emulator_program, packed, *grid)
        if strays := copies.strays():
            raise BoundsError(f"{self.kernel} {'; '.join(strays)}")
        if status == -1:
            raise MemoryError(f"{self.kernel} wants more than 1 GiB of temporaries in one program")
        if status == signal.SIGFPE:
            raise ZeroDivisionError(f"{self.kernel} divides an integer by zero")
        if status:
            address = self.runtime.emulator_fault_address()
            start = copies.nearest(address or 0)
            offset = (address or 0) - copies.buffers[start].data
            raise BoundsError(
                f"{self.kernel} writes or reads far outside of its arguments, nearest is"
                f" {copies.arguments(start)}: {offset:+} bytes from the start of its storage"
            )
        if found := copies.trespass():
            arguments, offset = found
            raise BoundsError(
                f"{self.kernel} writes outside of {arguments}: {offset:+} bytes from the start of its storage"
            )
