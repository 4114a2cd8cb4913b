"""Lowers ttadapter IR (linalg on tensors) to an x86 library."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from .toolchain import HERE, LLVM, cached, execute, versions

PASSES = [
    "--lower-affine",  # the scans of `with_scans`, which would not be inlined into other loops
    "--inline",
    "--symbol-dce",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--canonicalize",
    "--buffer-loop-hoisting",  # else every turn of a loop takes new memory
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--arith-expand=include-bf16=true",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm=use-generic-functions=true",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-index-to-llvm",
    "--reconcile-unrealized-casts",
]
# A fixed instruction set, so that a cache may move between machines and no rounding depends on where it ran.
MACHINE = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
CLANG = [*MACHINE, "-fPIC", "-shared", "-w"]
# At the tests' sizes a kernel runs for milliseconds; optimising it would take most of the tests' time.
OF_KERNELS = ["-O0", *CLANG]
OF_RUNTIME = ["-O2", *CLANG]

# Whatever a kernel is called: its own name may be one that libc or libm has taken.
KERNEL = "emulator_kernel"


def build_runtime(cache: Path) -> Path:
    source = HERE / "runtime.c"

    def make(_: Path, file: Path) -> None:
        execute(LLVM / "clang", *OF_RUNTIME, source, "-o", file)

    return cached(cache, "runtime.so", (OF_RUNTIME, source.read_text()), make)


def lower(ir: str, cache: Path) -> Path:
    """The library for one kernel; its entry is `emulator_program(arguments, x, y, z)`.

    `arguments` is an array of 64-bit slots, one for each argument of the LLVM function but the program ids.
    """

    def make(workspace: Path, file: Path) -> None:
        source, lowered, llvm = (workspace / name for name in ("kernel.mlir", "lowered.mlir", "kernel.ll"))
        source.write_text(upstream(ir))
        execute(LLVM / "mlir-opt", source, *PASSES, "-o", lowered)
        execute(LLVM / "mlir-translate", "--mlir-to-llvmir", lowered, "-o", llvm)
        llvm.write_text(with_entry(llvm.read_text()))
        execute(LLVM / "clang", *OF_KERNELS, llvm, "-o", file)

    return cached(cache, "kernel.so", (versions(), PASSES, OF_KERNELS, upstream(ir)), make)


def upstream(ir: str) -> str:
    """The IR in upstream MLIR's own dialects."""
    ir = re.sub(r"^ *(annotation\.mark|gpu\.barrier)\b.*\n", "", ir, flags=re.M)
    ir = re.sub(r"func\.func @\w+\(", f"func.func @{KERNEL}(", ir)
    # A mark that survives until `with_entry`: these read the arguments.
    ir = re.sub(r"(memref\.load %\w+\[[^]]*\]) :", r"\1 {nontemporal = true} :", ir)
    return with_scans(ir)


def with_scans(ir: str) -> str:
    """Gives tl.cumsum and tl.cumprod a body: triton-ascend calls functions that it only declares."""
    constants = dict(re.findall(r"(%\w+) = arith\.constant (\w+)(?: : i32)?\n", ir))
    bodies: dict[str, str] = {}

    def call(match: re.Match[str]) -> str:
        operation, source, axis, reverse, kind = match.groups()
        name = f"{operation}_{kind}_{constants[axis]}_{constants[reverse]}"
        bodies[name] = scan(name, operation, kind, int(constants[axis]), constants[reverse] == "true")
        return f"call @{name}({source}) : (tensor<{kind}>)"

    ir = re.sub(r" *func\.func private @triton_cum(?:sum|prod)_\d+\(.*\n", "", ir)
    ir = re.sub(
        r"call @triton_(cumsum|cumprod)_\d+\((%[\w#]+), (%\w+), (%\w+)\) : \(tensor<(\w+)>, i32, i1\)",
        call,
        ir,
    )
    end = ir.rindex("}")
    return ir[:end] + "".join(bodies.values()) + ir[end:]


def scan(name: str, operation: str, kind: str, axis: int, reverse: bool) -> str:
    *sizes, element = kind.split("x")
    suffix = "f" if "f" in element else "i"
    operator = ("arith.add" if operation == "cumsum" else "arith.mul") + suffix
    start = ("0" if operation == "cumsum" else "1") + (".0" if suffix == "f" else "")
    others = [i for i in range(len(sizes)) if i != axis]
    place = [f"%i{i}" for i in range(len(sizes))]
    if reverse:
        place[axis] = f"{int(sizes[axis]) - 1} - {place[axis]}"
    at = ", ".join(place)
    return f"""
func.func private @{name}(%source: tensor<{kind}>) -> tensor<{kind}> {{
  %start = arith.constant {start} : {element}
  %from = bufferization.to_memref %source : memref<{kind}>
  %to = memref.alloc() : memref<{kind}>
  {" ".join(f"affine.for %i{i} = 0 to {sizes[i]} {{" for i in others)}
    affine.for %i{axis} = 0 to {sizes[axis]} iter_args(%sum = %start) -> ({element}) {{
      %value = affine.load %from[{at}] : memref<{kind}>
      %next = {operator} %sum, %value : {element}
      affine.store %next, %to[{at}] : memref<{kind}>
      affine.yield %next : {element}
    }}
  {"}" * len(others)}
  %result = bufferization.to_tensor %to restrict writable : memref<{kind}>
  return %result : tensor<{kind}>
}}
"""


def with_entry(llvm: str) -> str:
    """Adds the entry, and has every argument read where the kernel reads it.

    The entry unpacks the slots; the kernel's last three arguments are the program ids.
    """
    found = re.search(rf"^define void @{KERNEL}\((.*?)\) ", llvm, re.M)
    assert found is not None
    types = [parameter.split()[0] for parameter in found[1].split(", ")]
    unpack = [
        f"  %s{i} = getelementptr i64, ptr %slots, i64 {i}\n  %a{i} = load {kind}, ptr %s{i}\n"
        for i, kind in enumerate(types[:-3])
    ]
    ids = [f"i32 %{axis}" for axis in "xyz"]
    arguments = ", ".join([f"{kind} %a{i}" for i, kind in enumerate(types[:-3])] + ids)
    llvm = llvm.replace("define void", "define internal void")
    # Else clang moves a load to where its value is used, and one outside of an argument may go unseen.
    llvm = re.sub(r"= load (.*), !nontemporal !\d+$", r"= load volatile \1", llvm, flags=re.M)
    return f"""{llvm}
define void @emulator_program(ptr %slots, {", ".join(ids)}) {{
{"".join(unpack)}  call void @{KERNEL}({arguments})
  ret void
}}
"""
