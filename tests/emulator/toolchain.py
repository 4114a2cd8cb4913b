"""The programs behind the emulator, the cache of what they make, and the compilation to HIVM."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LLVM = Path("/usr/lib/llvm-19/bin")
CACHE = HERE.parents[1] / ".cache" / "emulator"


class Cores(NamedTuple):
    cube: int
    vector: int


TARGETS = {"Ascend910B3": Cores(20, 40), "Ascend910_9382": Cores(24, 48)}
CAPACITY = {"ub": 192 << 10, "l1": 512 << 10, "l0c": 128 << 10}
"""Bytes of on-chip memory, the same for every target: unified buffer, L1, and the cube's accumulators."""


class CompileError(RuntimeError):
    """A kernel that doesn't compile for a target."""

    def __init__(self, kernel: str, target: str, reason: str) -> None:
        super().__init__(f"{kernel} does not compile for {target}: {reason}")
        self.kernel, self.target, self.reason = kernel, target, reason


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel: bytes planned of each on-chip memory (`CAPACITY`), seconds it took."""

    kernel: str
    target: str
    mix_mode: str
    used: dict[str, int]
    seconds: float


def missing() -> str | None:
    """Why kernels can't be emulated here and what to install; None when all is there."""
    triton = importlib.util.find_spec("triton")
    if triton is None or not (Path(str(triton.origin)).parent / "backends" / "ascend").is_dir():
        install = "pip install triton-ascend==3.2.0 pybind11"
        if triton is None:
            return f"needs triton-ascend's triton: {install}"
        # Either may have overwritten the other's files.
        removal = "pip uninstall -y triton triton-ascend"
        return f"needs triton-ascend's triton in place of another triton: {removal} && {install}"
    if importlib.util.find_spec("pybind11") is None:
        return "needs pybind11, which triton-ascend imports: pip install pybind11"
    if importlib.util.find_spec("ascendnpuir") is None:
        return "needs bishengir-compile: pip install ascendnpu-ir==1.2.0"
    if not all((LLVM / tool).exists() for tool in ("mlir-opt", "mlir-translate", "clang")):
        return (
            "needs mlir-19-tools and clang-19: apt-get install --no-install-recommends mlir-19-tools clang-19"
        )
    return None


def versions() -> str:
    return " ".join(
        f"{name}={importlib.metadata.version(name)}" for name in ("triton-ascend", "ascendnpu-ir")
    )


class ToolError(RuntimeError):
    """A program that failed; its text is the reason, without the stack dump."""

    def __init__(self, tool: str, status: int, output: str) -> None:
        lines = list(dict.fromkeys(re.findall(r"error: .*|\[NOTE\] .*|.*LLVM ERROR.*", output)))
        crash = f"{tool} stopped with status {status}"
        super().__init__("\n".join(lines) or f"{crash}: {output.split('Stack dump')[0].strip()[-500:]}")
        self.status = status


def execute(*command: str | Path, path: Path | None = None) -> str:
    """Runs a program, with `path` before the others in PATH, and returns what it wrote."""
    environment = os.environ if path is None else {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ToolError(Path(command[0]).name, done.returncode, output)
    return output


def cached(cache: Path, name: str, key: object, make: Callable[[Path, Path], None]) -> Path:
    """The file `name` made for `key`; `make(workspace, file)` makes it if nobody has.

    Several processes may make the same file at once: each writes its own, and the last to finish replaces
    the others' equal ones.
    """
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    file = cache / digest[:2] / f"{digest}.{name}"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / name
            make(Path(folder), made)
            os.replace(made, file)
    return file


# The compiler's options, by the launch options of triton-ascend that set them.
OPTIONS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "inject_barrier_all": "enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "enable-hivm-inject-block-all-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "limit-auto-multi-buffer-only-for-local-buffer",
    "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
    "disable_auto_inject_block_sync": "disable-auto-inject-block-sync",
}
BASE_OPTIONS = [
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-tuning-mode=true",  # no second try with less after an overflow; but see below
]


def compile_hivm(kernel: str, ir: str, options: Mapping[str, object], target: str, cache: Path) -> Compiled:
    """Compiles ttadapter IR as far as the public compiler goes: HIVM, with its memory planned."""
    set_options = {flag: options.get(name) for name, flag in OPTIONS.items()}
    flags = [f"--target={target}", *BASE_OPTIONS]
    flags += [f"--{flag}={value}" for flag, value in set_options.items() if value is not None]

    def make(workspace: Path, file: Path) -> None:
        source, stand_in = workspace / "kernel.mlir", workspace / "hivmc"
        mix_mode = re.search(r'mix_mode = "(\w+)"', ir)
        # triton-ascend takes the mode out before it calls the compiler, which finds it anew.
        source.write_text(re.sub(r', mix_mode = "\w+"', "", ir))
        stand_in.write_bytes((HERE / "hivmc.sh").read_bytes())
        stand_in.chmod(0o755)
        package = importlib.util.find_spec("ascendnpuir")
        assert package is not None and package.origin is not None
        start = time.perf_counter()
        command = [Path(package.origin).parent / "bin" / "bishengir-compile", source, *flags]
        try:
            output = execute(*command, "-o", workspace / "kernel.o", path=workspace)
            # Version 1.2.0 does try again, and succeeds with less than it was asked for: that isn't success.
            if "overflow detected" in output:
                raise ToolError("bishengir-compile", 1, output)
        except ToolError as error:
            if error.status < 0:
                raise CompileError(kernel, target, str(error)) from error
            result: dict[str, object] = {"reason": str(error)}
        else:
            seconds = round(time.perf_counter() - start, 3)
            used = planned_memory((workspace / "kernel.o").read_text())
            result = asdict(Compiled(kernel, target, mix_mode[1] if mix_mode else "", used, seconds))
        file.write_text(json.dumps(result))

    result = json.loads(cached(cache, "hivm.json", (versions(), flags, ir), make).read_text())
    if "reason" in result:
        raise CompileError(kernel, target, result["reason"])
    return Compiled(**result)


def planned_memory(hivm: str) -> dict[str, int]:
    """Bytes used of each on-chip memory: the furthest end of any buffer placed in it."""
    spaces = {"ub": "ub", "cbuf": "l1", "cc": "l0c"}
    used = dict.fromkeys(CAPACITY, 0)
    constants: dict[str, int] = {}
    pattern = re.compile(
        r"(%\S+) = arith\.constant (-?\d+) : i64"
        r"|pointer_cast\((%[^)]*)\).*?: memref<((?:\d+x)*)([a-z]+)(\d+).*?address_space<(\w+)>"
    )
    for name, value, places, shape, _, bits, space in pattern.findall(hivm):
        if name:
            constants[name] = int(value)
        elif space in spaces:
            size = -(-prod(map(int, shape.split("x")[:-1])) * max(int(bits), 1) // 8)
            last = max(constants.get(place.strip(), 0) for place in places.split(","))
            used[spaces[space]] = max(used[spaces[space]], last + size)
    return used
