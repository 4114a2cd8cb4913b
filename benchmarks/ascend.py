"""What the kernels are on Ascend, as far as a machine without an NPU can tell: writes docs/ascend.md.

    python benchmarks/ascend.py [--out FILE.md]

Every case is compiled for both targets, at its full size and without values; small ones are run, by the
emulator in `tests/emulator`. Some minutes the first time, on one core: what was compiled is kept in .cache.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
from measuring import table
from torch import Tensor

import kda_fn
from kda_fn.primitives import _targets
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.primitives.linear import quantize_tokens
from kda_fn.types import Activation

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import subjects  # noqa: E402  # pyright: ignore[reportMissingImports]
from emulator import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    CAPACITY,
    Emulator,
    Launch,
)
from laws import error  # noqa: E402  # pyright: ignore[reportMissingImports]

TARGETS = {target.name: target for target in (_targets.ASCEND910B3, _targets.ASCEND910_9382)}
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
NAMES = {BF16: "bf16", FP32: "fp32", FP16: "fp16"}
COMPILED = BF16, FP32
EMULATED = FP32, BF16, FP16

T, H, HV, K, V, W = 4096, 32, 32, 128, 128, 4
P = 2 * H * K + HV * V
HIDDEN = 7168
LENGTHS = 1300, 0, 1, 1599, 1196
LOWER_BOUND = -5.0
PEER = (12, 11_142), (17, 31_492)
"""Forward and backward: launches of FLA's Ascend backend for the yardstick, and bytes per token and head."""
LEAST = 1_282, 2_308
"""Bytes per token and head in bf16 of q, k, v, raw gate, beta and o; of the inputs and all gradients."""


@contextmanager
def offline(target: str, *, run: bool = False, compile: bool = False) -> Iterator[Emulator]:  # noqa: A002
    """Launches on CPU tensors go to the emulator, with the tiles of `target`."""
    served = mock.patch.dict(_targets.TARGETS, cpu=lambda _device: TARGETS[target])
    with served, Emulator(target=target, run=run, compile=compile) as emulator:
        yield emulator


# Compiled


class Case(NamedTuple):
    """One call at its full size: `run` makes its tensors, uninitialised, in a dtype, and calls."""

    name: str
    sizes: str
    run: Callable[[torch.dtype], object]
    rows: int
    """Tokens (when decoding: sequences) times heads."""


def _packing(B: int, lengths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    return ((B, len(lengths)), kda_fn.cu_seqlens_of(lengths)) if lengths else ((B,), None)


def _kda(
    dtype: torch.dtype,
    B: int = 1,
    T: int = T,
    H: int = H,
    V: int = V,
    lengths: tuple[int, ...] = (),
    lower_bound: float | None = None,
) -> object:
    rows, cu_seqlens = _packing(B, lengths)
    q, k, v = (torch.empty(B, T, *sizes, dtype=dtype) for sizes in ((H, K), (H, K), (HV, V)))
    inputs = torch.empty(*rows, HV, K, V), q, k, v, torch.empty(B, T, HV, K), torch.empty(B, T, HV)
    return kda_fn.kda(*inputs, lower_bound=lower_bound, cu_seqlens=cu_seqlens, impl="triton")


def _kda_gradients(dtype: torch.dtype) -> object:
    """Launched as they are: in float32 the fallback's derivative would serve."""
    from kda_fn.primitives.kda.kernels import Call

    q, k, v = (torch.empty(1, T, *sizes, dtype=dtype) for sizes in ((H, K), (H, K), (HV, V)))
    inputs = torch.empty(1, HV, K, V), q, k, v, torch.empty(1, T, HV, K), torch.empty(1, T, HV)
    call = Call(*inputs, None, None)
    outputs = torch.empty(1, HV, K, V), torch.empty_like(v)
    call.forward(*outputs)
    return call.backward(*outputs, tuple(torch.empty_like(x) for x in inputs))


def _step(dtype: torch.dtype, B: int, H: int = H) -> object:
    q, k, v = (torch.empty(B, H, size, dtype=dtype) for size in (K, K, V))
    inputs = torch.empty(B, H, K, V), q, k, v, torch.empty(B, H, K), torch.empty(B, H)
    return kda_fn.kda_step(*inputs, impl="triton")


def _conv(dtype: torch.dtype, B: int = 1, T: int = T, lengths: tuple[int, ...] = ()) -> object:
    rows, cu_seqlens = _packing(B, lengths)
    state, x = torch.empty(*rows, W - 1, P, dtype=dtype), torch.empty(B, T, P, dtype=dtype)
    return kda_fn.causal_conv1d(state, x, torch.empty(P, W), cu_seqlens=cu_seqlens, impl="triton")


def _gate(dtype: torch.dtype, lower_bound: float | None = None) -> Tensor:
    inputs = torch.empty(1, T, HV, K, dtype=dtype), torch.empty(HV), torch.empty(HV * K)
    return kda_fn.kda_gate(*inputs, lower_bound=lower_bound, impl="triton")


def _l2_norm(dtype: torch.dtype) -> Tensor:
    qk = torch.empty(1, T, P, dtype=dtype)[..., : 2 * H * K]
    return kda_fn.l2_norm(qk.unflatten(-1, (2 * H, K)), impl="triton")


def _tokens(dtype: torch.dtype) -> object:
    return quantize_tokens(torch.empty(1, T, HIDDEN, dtype=dtype), impl="triton")


def _norm(dtype: torch.dtype, activation: Activation = "sigmoid", weighted: bool = True) -> Tensor:
    x, gate = torch.empty(1, T, HV, V, dtype=dtype), torch.empty(1, T, HV, 2 * V, dtype=dtype)[..., V:]
    weight = torch.empty(V, dtype=dtype) if weighted else None
    return kda_fn.gated_rms_norm(x, gate, weight, eps=1e-5, activation=activation, impl="triton")


def _residual_norm(dtype: torch.dtype) -> object:
    residual, x, gate = (torch.empty(1, T, HIDDEN, dtype=dtype) for _ in range(3))
    weight = torch.empty(HIDDEN, dtype=dtype)
    return kda_fn.residual_gated_rms_norm(residual, x, gate, weight, eps=1e-5, impl="triton")


CASES = (
    Case("kda", "T 4096, H 32, K = V 128", _kda, T * H),
    Case("kda and its gradients", "T 4096, H 32, K = V 128", _kda_gradients, T * H),
    Case("kda, wide values", "T 4096, H 32, K 128, V 256", partial(_kda, V=256), T * H),
    Case("kda, shared keys", "T 4096, H 16, HV 32, K = V 128", partial(_kda, H=16), T * H),
    Case("kda, packed", "as above, in 5 sequences", partial(_kda, H=16, lengths=LENGTHS), T * H),
    Case("kda, decode", "B 64, T 1, H 32, K = V 128", partial(_kda, B=64, T=1), 64 * H),
    *(Case(f"kda_step, B {B}", "T 1, H 32, K = V 128", partial(_step, B=B), B * H) for B in (1, 64)),
    # Few heads, or its states alone would reserve as much memory as many a machine has.
    Case("kda_step, B 4096", "T 1, H 4, K = V 128", partial(_step, B=4096, H=4), 4096 * 4),
    Case("causal_conv1d", "T 4096, P 3 x 32 x 128, W 4", _conv, T * H),
    Case("causal_conv1d, packed", "as above, in 5 sequences", partial(_conv, lengths=LENGTHS), T * H),
    Case("causal_conv1d, decode", "B 64, T 1, P 3 x 32 x 128, W 4", partial(_conv, B=64, T=1), 64 * H),
    Case("kda_gate, softplus", "T 4096, HV 32, K 128", _gate, T * H),
    Case("kda_gate, bounded", "T 4096, HV 32, K 128", partial(_gate, lower_bound=LOWER_BOUND), T * H),
    Case("l2_norm, q and k", "T 4096, 64 heads of 128, a slice of q, k, v", _l2_norm, T * H),
    Case("gated_rms_norm", "T 4096, HV 32, V 128, the gate a slice", _norm, T * H),
    Case(
        "gated_rms_norm, SiLU",
        "as above, no weight",
        partial(_norm, activation="silu", weighted=False),
        T * H,
    ),
    Case("residual_gated_rms_norm", f"T 4096, {HIDDEN} = 56 x 128", _residual_norm, T * HIDDEN // 128),
    Case("quantize_tokens", f"T 4096, {HIDDEN} = 56 x 128", _tokens, T * HIDDEN // 128),
)


def measure(case: Case, dtype: torch.dtype, target: str, *, compile: bool = True) -> list[Launch]:  # noqa: A002
    """The launches of a case on a target, compiled for it or only counted; else a `CompileError`."""
    with offline(target, compile=compile) as emulator:
        case.run(dtype)
    return emulator.launches


Measured: TypeAlias = dict[tuple[str, torch.dtype], list[list[Launch]]]
"""By case and dtype, the launches for each target."""


def total(launches: Iterable[Launch]) -> int:
    """Bytes of the distinct tensors of each launch."""
    return sum(launch.bytes for launch in launches)


def yardstick() -> tuple[Sequence[Launch], Sequence[Launch]]:
    """What a layer launches between its convolution and its output norm, forward and backward."""
    with offline(_targets.ASCEND910B3.name) as emulator:
        qkv = torch.empty(1, T, P, dtype=BF16).split([H * K, H * K, H * V], -1)
        heads = (x.unflatten(-1, (H, -1)) for x in qkv)
        logits = torch.empty(1, T, H, K, dtype=BF16), torch.empty(1, T, H, dtype=BF16)
        inputs = torch.empty(1, H, K, V), *heads, *logits, torch.empty(H), torch.empty(H * K)
        inputs = [x.requires_grad_() for x in inputs]
        outputs = fused_kda(*inputs, lower_bound=LOWER_BOUND, impl="triton")
        forward = list(emulator.launches)
        torch.autograd.grad(outputs, inputs, [torch.empty_like(y) for y in outputs])
    return forward, emulator.launches[len(forward) :]


# Emulated


class Small(NamedTuple):
    """A subject of the laws at a small size."""

    name: str
    subject: subjects.Subject
    sizes: dict[str, int]
    batch: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = ()
    gates: Callable[[Tensor], Tensor] | None = None
    lower_bound: float | None = None


def _bounded(g: Tensor) -> Tensor:
    return LOWER_BOUND * torch.sigmoid(g)


def _strong(g: Tensor) -> Tensor:
    """One gate in ten -20, -1000 or -inf."""
    draw = torch.rand(g.shape, generator=torch.Generator().manual_seed(1))
    choices = torch.tensor([-20.0, -1000.0, -math.inf], dtype=g.dtype)
    return torch.where(draw < 0.1, choices[(draw * 3e5).long() % 3], g)


HEADS = {"H": 2, "HV": 2, "K": 64, "V": 48}
PIECES = 70, 0, 1, 129
SMALL = (
    Small("kda", subjects.KDA, HEADS),
    Small("kda, packed", subjects.KDA, HEADS, lengths=PIECES),
    Small("kda, strong gates", subjects.KDA, HEADS, gates=_strong),
    Small("kda, bounded gate", subjects.KDA, HEADS, gates=_bounded, lower_bound=LOWER_BOUND),
    Small("kda_step", subjects.KDA_STEP, HEADS, batch=(5,)),
    Small("causal_conv1d", subjects.CONV, {"P": 200, "W": 4}),
    Small("causal_conv1d, packed", subjects.CONV, {"P": 200, "W": 4}, lengths=PIECES),
    Small("kda_gate, softplus", subjects.SOFTPLUS_GATE, HEADS),
    Small("kda_gate, bounded", subjects.BOUNDED_GATE, HEADS),
    Small("l2_norm", subjects.L2_NORM, {"F": 48}),
    Small("gated_rms_norm", subjects.NORM, {"F": 48}),
    Small("gated_rms_norm, SiLU", subjects.SILU_NORM, {"F": 48}),
    Small("residual_gated_rms_norm", subjects.RESIDUAL_NORM, {"F": 48}),
)


def emulated_error(small: Small, dtype: torch.dtype) -> float:
    """Relative RMSE of the worst output against the float64 reference on the same rounded inputs."""
    N, cu_seqlens = len(small.lengths) or None, _packing(1, small.lengths)[1]
    inputs = small.subject.inputs(small.batch, 200, N, **small.sizes)
    if small.gates is not None:
        inputs["g"] = small.gates(inputs["g"])
    inputs = subjects.cast(small.subject, inputs, dtype)
    promise = {} if small.lower_bound is None else {"lower_bound": small.lower_bound}
    with offline(_targets.ASCEND910B3.name, run=True):
        outputs = small.subject.run(inputs, "triton", cu_seqlens, **promise)
    wide = {name: x.double() for name, x in inputs.items()}
    expected = small.subject.run(wide, "reference", cu_seqlens)
    errors = [error(y, z) for y, z in zip(outputs, expected, strict=True)]
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)


# The report


def either(values: Iterable[str]) -> str:
    """What both targets say, once where it is the same."""
    return " / ".join(dict.fromkeys(values))


def share(launch: Launch, memory: str) -> str:
    """Used of an on-chip memory, in percent."""
    assert launch.compiled is not None
    return f"{100 * launch.compiled.used[memory] / CAPACITY[memory]:.0f}"


def report_yardstick(launches: Sequence[Launch], peer: tuple[int, int], least: int) -> str:
    rows = [[f"`{x.kernel}`", "1", f"{x.bytes / (T * H):,.0f}"] for x in launches]
    rows.append(["**all of it**", str(len(launches)), f"{total(launches) / (T * H):,.0f}"])
    rows.append(["FLA's Ascend backend", str(peer[0]), f"{peer[1]:,}"])
    rows.append(["the least possible", "", f"{least:,}"])
    return table(["", "launches", "bytes per token and head"], rows)


def report_calls(measured: Measured) -> str:
    rows = []
    for case in CASES:
        by_dtype = [total(measured[case.name, dtype][0]) for dtype in COMPILED]
        count = str(len(measured[case.name, BF16][0]))
        per_row = (f"{size / case.rows:,.0f}" for size in by_dtype)
        rows.append([case.name, case.sizes, count, *(f"{size / 1e6:,.1f}" for size in by_dtype), *per_row])
    names = [NAMES[dtype] for dtype in COMPILED]
    headers = ["call", "sizes", "launches", *(f"MB {x}" for x in names), *(f"B each {x}" for x in names)]
    return table(headers, rows, left=2)


def report_memory(measured: Measured, dtype: torch.dtype) -> str:
    rows = []
    for case in CASES:
        for launches in zip(*measured[case.name, dtype], strict=True):
            shares = (either(share(x, memory) for x in launches) for memory in CAPACITY)
            programs = either(str(math.prod(x.grid)) for x in launches)
            rows.append([case.name, f"`{launches[0].kernel}`", programs, *shares])
    headers = ["call", "kernel", "programs", *(f"{x.upper()} %" for x in CAPACITY)]
    return table(headers, rows, left=2)


def report_errors(errors: dict[str, list[float]]) -> str:
    rows = [[name, *(f"{e:.1e}" for e in found)] for name, found in errors.items()]
    return table(["call", *(NAMES[dtype] for dtype in EMULATED)], rows)


def report() -> str:
    """The whole document."""
    forward, backward = yardstick()
    measured = {
        (case.name, dtype): [measure(case, dtype, target) for target in TARGETS]
        for dtype in COMPILED
        for case in progress("compile", CASES)
    }
    errors = {x.name: [emulated_error(x, dtype) for dtype in EMULATED] for x in progress("emulate", SMALL)}
    tools = "triton-ascend", "ascendnpu-ir", "torch"
    return PAGE.format(
        date=datetime.now(timezone.utc).date(),
        versions=", ".join(f"{tool} {importlib.metadata.version(tool)}" for tool in tools),
        forward=report_yardstick(forward, PEER[0], LEAST[0]),
        backward=report_yardstick(backward, PEER[1], LEAST[1]),
        calls=report_calls(measured),
        bf16=report_memory(measured, BF16),
        fp32=report_memory(measured, FP32),
        errors=report_errors(errors),
    )


def progress(what: str, cases: Sequence[Any]) -> Iterator[Any]:
    """The cases, announced on stderr one by one."""
    for case in cases:
        print(what, case.name, file=sys.stderr, flush=True)
        yield case


PAGE = """\
# The kernels on Ascend, without an NPU

Written by `make ascend` on {date}, with {versions}.
Do not edit it: `tests/test_ascend.py` compares it to what is measured.

**Nothing here has run on an Ascend NPU.** The kernels were *compiled* for two of them, Ascend910B3 (20 cube
and 40 vector cores) and Ascend910_9382 (24 and 48), and *emulated* on x86. The end says what that proves.

## A layer's traffic

One layer in bf16 with the bounded gate, B 1, T 4096, H 32, K = V = 128: what it launches to normalise q and
k, for gate and sigmoid, and for the recurrence. Bytes are those of the distinct tensors that a launch is
given, summed over the launches. Forward:

{forward}
Backward, which is given the inputs alone and has the rest again:

{backward}
Projections, convolution and output norm are in none of these counts; nor are, backward, torch's sums of small
tensors. The least possible is to read q, k, v, raw gate and beta once, and to write o once; backward to read
them and the gradient of o, and to write theirs.

## Every call

Bytes as above, in MB for the call and "each": per token (when decoding: per sequence) and head, where the
convolution has 32 heads of 3 x 128 channels and the hidden size is 56 heads of 128. Packed are sequences of
1300, 0, 1, 1599 and 1196 tokens, and a launch counts its tensors whole. g, beta, states of the memory, and
the weights of convolution and gate are float32 beside any dtype.

{calls}
## On-chip memory

Every launch, compiled for both targets: its programs, and how much of a core's unified buffer (UB, 192 KiB),
L1 (512 KiB) and accumulators (L0C, 128 KiB) the compiler planned, in percent, to the end of the last buffer.
`a / b` is Ascend910B3 / Ascend910_9382, one number is both. A plan that does not fit is an error, and so is
one that fits only without the second buffers by which a core loads ahead, unless the launch asks for none.

In bf16:

{bf16}
In fp32:

{fp32}
## Emulated error

Relative RMSE of the worst output against the float64 reference on the same rounded inputs: 200 tokens,
2 heads, K = 64, V = 48. Rounding an output makes 1.7e-3 of it in bf16 and 2.1e-4 in fp16. Packed are 70, 0, 1
and 129 tokens. Of the strong gates one in ten is -20, -1000 or -inf.

{errors}
## What this proves, and what it does not

*Compiled* means that triton-ascend and bishengir-compile took a kernel to HIVM, the last form of the public
compiler, with every buffer placed in on-chip memory and an overflow an error. It is not machine code: that is
made from HIVM by a program which is not public. *Emulated* means that the IR which triton-ascend hands to
that compiler was lowered to x86 by upstream MLIR and run, one program after another. This checks the
arithmetic, the rounding and the addresses that stand in the IR. It says nothing about time; it does not check
the synchronisation in the HIVM, nor the device's own exponential, nor what its compiler may get wrong.
Nothing has run on a device.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "ascend.md", help="where the document goes"
    )
    out = parser.parse_args().out
    text = report()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
