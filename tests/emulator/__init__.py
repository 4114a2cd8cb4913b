"""Ascend without an NPU: what triton-ascend makes of a kernel, compiled, planned, and run on x86.

    with Emulator(target="Ascend910B3", compile=True) as emulator:
        kernel[grid](...)
    emulator.launches

A launch on CPU tensors goes through triton-ascend to its ttadapter IR. From there it is compiled by
bishengir-compile to HIVM, with on-chip memory planned, where an overflow is an error; and it is lowered by
upstream MLIR to x86, run, and its accesses to memory are checked. Nothing here knows the device's timing, the
rounding of its exponential, or whether the synchronisation in the HIVM is right; programs run one by one.
"""

from __future__ import annotations

from .emulation import Emulator, Launch
from .execution import BoundsError
from .toolchain import CAPACITY, TARGETS, Compiled, CompileError, missing

__all__ = [
    "CAPACITY",
    "TARGETS",
    "BoundsError",
    "CompileError",
    "Compiled",
    "Emulator",
    "Launch",
    "missing",
]
