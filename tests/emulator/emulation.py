"""The context in which Triton launches compile and run without a device."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from .execution import Grid, Program
from .toolchain import CACHE, TARGETS, Compiled, CompileError, ToolError, compile_hivm, missing

MOST_PROGRAMS = 65_535


@dataclass(frozen=True)
class Launch:
    """One launch: bytes of the distinct tensors by the (first) argument that is it."""

    kernel: str
    grid: Grid
    tensors: dict[str, int]
    compiled: Compiled | None

    @property
    def bytes(self) -> int:
        return sum(self.tensors.values())


class Emulator:
    """Takes the place of Triton's driver: launches on CPU tensors are compiled, run on x86, and recorded.

    run      run them, from the IR that triton-ascend made
    compile  compile them for `target` (`TARGETS`) with on-chip memory planned; alone it reads no tensor
    strict   run everything twice, and refuse any access outside of the arguments' storages, whether or not
             its result is used: behind them, then in front of them; and compare the results, which
             must not depend on what the kernel never wrote
    cache    where everything generated is kept
    """

    def __init__(
        self,
        target: str = "Ascend910B3",
        run: bool = True,
        compile: bool = False,  # noqa: A002
        strict: bool = False,
        cache: Path | str = CACHE,
    ) -> None:
        if reason := missing():
            raise RuntimeError(f"no emulation here: {reason}")
        if target not in TARGETS:
            raise ValueError(f"target {target!r} is not one of {', '.join(TARGETS)}")
        self.target, self.run, self.compile, self.strict = target, run, compile, strict
        self.cache = Path(cache).resolve()
        self.launches: list[Launch] = []
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> Emulator:
        from triton import backends
        from triton.compiler import compiler
        from triton.runtime import driver

        self.cache.mkdir(parents=True, exist_ok=True)
        (self.cache / ".gitignore").write_text("*\n")
        stack = ExitStack()
        ascend = backends.backends["ascend"]
        backend = type(ascend)(compiler=_backend(), driver=ascend.driver)
        stack.enter_context(mock.patch.dict(backends.backends, ascend=backend))
        stack.enter_context(mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(self.cache / "triton")))
        # What Triton raises in place of any error of a stage.
        stack.enter_context(mock.patch.object(compiler, "MLIRCompilationError", _original_error))
        stack.enter_context(mock.patch.object(driver, "active", _Driver(self)))
        self._stacks.append(stack)
        return self

    def __exit__(self, *_: object) -> None:
        self._stacks.pop().close()

    def launch(self, kernel: _Kernel, grid: Grid, values: Mapping[str, object]) -> None:
        if grid[0] * grid[1] * grid[2] > MOST_PROGRAMS:
            raise ValueError(f"{kernel.name}: a grid of {grid} has more than {MOST_PROGRAMS:,} programs")
        compiled = kernel.compiled(self.target, self.cache) if self.compile else None
        self.launches.append(Launch(kernel.name, grid, _distinct(values), compiled))
        if self.run:
            kernel.program(self.cache)(grid, values, self.strict)


def _distinct(values: Mapping[str, object]) -> dict[str, int]:
    """Bytes of the distinct tensors among the arguments."""
    sizes: dict[tuple[int, int], tuple[str, int]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            size = value.numel() * value.element_size()
            # Meta tensors have no address; their storage does.
            place = value.data_ptr() or value.untyped_storage()._cdata
            sizes.setdefault((place, size), (name, size))
    return dict(sizes.values())


class _Kernel:
    """What Triton makes of one compiled kernel, and calls to launch it."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name: str = source.fn.__name__
        self.arguments = list(source.signature)
        # Constants are compiled in, and vanish from the kernel's arguments.
        self.left = [name for name in self.arguments if name not in source.constants]
        self.options: dict[str, object] = metadata._asdict()
        self.ir = ""
        self._program: Program | None = None
        self._compiled: dict[str, Compiled] = {}

    def compiled(self, target: str, cache: Path) -> Compiled:
        if target not in self._compiled:
            self._compiled[target] = compile_hivm(self.name, self.ir, self.options, target, cache)
        return self._compiled[target]

    def program(self, cache: Path) -> Program:
        if self._program is None:
            try:
                self._program = Program(self.name, self.ir, self.left, cache)
            except ToolError as error:
                raise CompileError(self.name, "x86", str(error)) from error
        return self._program

    def __call__(self, x: int, y: int, z: int, stream: object, ir: str, *rest: Any) -> None:
        from triton.runtime import driver

        # The packed metadata, the launch metadata and two hooks come before the arguments.
        values = dict(zip(self.arguments, rest[4:], strict=True))
        self.ir = ir
        active: Any = driver.active
        active.emulator.launch(self, (x, y, z), values)


class _Utilities:
    """What Triton and its users ask of a device."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_arch(self) -> str:
        return self.target

    def get_aicore_num(self) -> int:
        return TARGETS[self.target].cube

    def get_aivector_core_num(self) -> int:
        return TARGETS[self.target].vector

    def get_device_properties(self, device: object) -> dict[str, int]:
        cores = TARGETS[self.target]
        return {"max_shared_mem": 1, "num_aicore": cores.cube, "num_vectorcore": cores.vector}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: object
    ) -> tuple[bool, str, int, int]:
        # The second is what the launch is handed as its function.
        return True, kernel.decode(), 0, 0


class _Driver:
    launcher_cls = _Kernel

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.utils = _Utilities(emulator.target)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("npu", self.emulator.target, 0)

    def get_current_device(self) -> str:
        """What a JIT function keeps its kernels by: they know their target and their cache."""
        return f"{self.emulator.target} {self.emulator.cache}"

    def set_current_device(self, device: object) -> None:
        pass

    def get_current_stream(self, device: object = None) -> int:
        return 0


def _original_error(stage: str, detail: str) -> BaseException:
    return sys.exc_info()[1] or RuntimeError(f"{stage}: {detail}")


@functools.cache
def _backend() -> type:
    """triton-ascend's backend, cut short behind the ttadapter IR."""
    from triton.backends import backends

    base: Any = backends["ascend"].compiler

    class Backend(base):
        def __init__(self, target: Any) -> None:
            super().__init__(target)
            self.binary_ext = "ttadapter"

        def hash(self) -> str:
            return f"emulator {self.target}"

        def pack_metadata(self, metadata: object) -> dict[str, object]:
            return {}

        def add_stages(self, stages: dict[str, Callable[..., Any]], options: Any) -> None:
            super().add_stages(stages, options)
            del stages["npubin"]
            adapt = stages["ttadapter"]

            def adapted(module: object, metadata: dict[str, object]) -> str:
                name = str(metadata.setdefault("name", _name(module)))
                metadata["shared"] = 0
                try:
                    return adapt(module, metadata)
                except subprocess.CalledProcessError as error:
                    reason = ToolError("triton-adapter-opt", error.returncode, error.stderr.decode())
                    raise CompileError(name, self.target.arch, str(reason)) from error

            stages["ttadapter"] = adapted

    return Backend


def _name(module: object) -> str:
    found = re.search(r"tt\.func public @(\w+)", str(module))
    return found[1] if found else "kernel"
