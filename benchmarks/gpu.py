"""KDA on one GPU: kda_fn beside its peers, each held to a float64 recurrence before it is timed.

    python benchmarks/gpu.py [--rows B,T,H ..] [--gates ..] [--regimes ..] [--modes ..] [--peers ..]
                             [--budget-s S] [--output DIR]
    python benchmarks/gpu.py --prewarm N    # N processes compile every kernel that the same options would run
    python benchmarks/gpu.py --plot --readme                        # from DIR/gpu.json alone
    python benchmarks/gpu.py --profile                              # where the first row's time goes
    python benchmarks/gpu.py --quick --device cpu                   # tiny shapes: does it run at all

All contenders get the same bf16 inputs: q and k before they are normalised, logits of gate and beta, float32
states in and out. gpu.json is written anew after every case, so that a run which is cut short leaves what it
had, and every case it did not reach. Columns: README.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
from gpu_report import errors_table, plot, reasons, replace_table, report
from measuring import (
    Job,
    Json,
    Samples,
    flop_per_token_and_head,
    interleave,
    relative_rmse,
    round_ratio,
    table,
    version_of,
    wall_seconds,
)
from torch import Tensor

from kda_fn import kda, kda_gate, l2_norm
from kda_fn.__main__ import npus
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.types import Impl

Pair: TypeAlias = tuple[Tensor, Tensor]
"""o and the final state."""
Shape: TypeAlias = tuple[int, int, int]
"""B, T, H."""

ROOT = Path(__file__).parents[1]
OURS = "kda_fn"
GATES: dict[str, float | None] = {"softplus": None, "bounded": -5.0}
"""The lower bound of each."""
REGIMES = "init", "random", "long"
MODES = "forward", "backward", "decode", "gradients"
LIMIT = 0.05
"""A relative error beyond it is another function, which must not be timed."""


class Plan(NamedTuple):
    """What one run measures; the first row with everything, then the others."""

    rows: tuple[Shape, ...] = ((1, 8192, 32), (1, 8192, 96), (4, 4096, 32), (1, 32768, 32), (32, 512, 32))
    few_heads: tuple[Shape, ...] = ((1, 32768, 4), (1, 131_072, 8))
    """Forward only: few programs, and what is parallel over time decides."""
    decode_batches: tuple[int, ...] = (1, 16, 64, 256)
    decode_heads: int = 32
    decode_repeats: int = 10
    head_dim: int = 128
    accuracy: Shape = (1, 1024, 8)
    accuracy_gradients: Shape = (1, 512, 8)
    # As many heads as above: a peer whose kernels depend on H would be compiled and tuned once more.
    long_gradients: Shape = (1, 32_768, 8)
    gates: tuple[str, ...] = tuple(GATES)
    regimes: tuple[str, ...] = REGIMES
    modes: tuple[str, ...] = MODES
    rounds: int = 30
    case_seconds: float = 1.0
    """Slow cases take fewer rounds, at least 3."""
    matmul: int = 8192
    copy_bytes: int = 2**30


QUICK = Plan(
    rows=((1, 128, 2), (2, 64, 2)),
    few_heads=((1, 128, 1),),
    decode_batches=(1, 4),
    decode_heads=2,
    decode_repeats=1,
    head_dim=16,
    accuracy=(1, 64, 2),
    accuracy_gradients=(1, 32, 2),
    long_gradients=(1, 256, 1),
    rounds=2,
    case_seconds=0.1,
    matmul=256,
    copy_bytes=2**20,
)


# Inputs


class Inputs(NamedTuple):
    """q, k [B T H K] not normalised, raw [B T H K] and beta [B T H] logits; state [B H K V] float32."""

    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    raw: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor


def make_inputs(shape: Shape, K: int, *, regime: str, device: torch.device | str) -> Inputs:
    """Seeded inputs; what the gates forget decides what a benchmark means.

    init     what an initialised layer gives: A_log = 0, dt_bias the inverse softplus of a log-uniform
             [1e-3, 0.1], raw gates 0.3 N(0, 1). Remembers for hundreds of tokens
    random   A_log, dt_bias U(0, 1), raw gates N(0, 1). Forgets within some 16 tokens
    long     as init with dt_bias = -10: forgets nothing to speak of
    """
    B, T, H = shape
    random = seeded(device)

    def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*sizes, generator=random, device=device, dtype=dtype)

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=random, device=device)

    q, k, v, raw, beta = *(normal(B, T, H, K) for _ in range(4)), normal(B, T, H)
    if regime == "random":
        A_log, dt_bias = uniform(H), uniform(H * K)
    else:
        raw *= 0.3
        rate = (math.log(1e-3) + uniform(H * K) * math.log(0.1 / 1e-3)).exp()
        A_log = torch.zeros(H, device=device)
        dt_bias = {"init": rate.expm1().log(), "long": torch.full_like(rate, -10.0)}[regime]
    state = normal(B, H, K, K, dtype=torch.float32)
    return Inputs(state, q, k, v, raw, beta, A_log, dt_bias)


def cotangents(inputs: Inputs) -> Pair:
    """Of o and of the final state."""
    random = seeded(inputs.v.device)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=random, device=x.device, dtype=x.dtype)

    return like(inputs.v), like(inputs.state)


def seeded(device: torch.device | str) -> torch.Generator:
    """A generator of its own: a graph whose capture failed leaves the default one unusable."""
    return torch.Generator(device).manual_seed(0)


# Contenders


Call: TypeAlias = Callable[[], Pair]
Prepare: TypeAlias = Callable[[Inputs, float | None], Call]


def _as_it_is(pair: Pair) -> Pair:
    return pair


class Contender(NamedTuple):
    """One way to compute a prefill.

    `prepare(inputs, lower_bound)` converts what must be converted, untimed, and gives the call to time, which
    returns o and the final state in a layout of its own; `unpack` brings them to [B T H V] and [B H K V].
    What a contender cannot do it raises, and the reason goes into the results.
    """

    prepare: Prepare
    step: Prepare
    """The same at T = 1."""
    backward: bool = False
    autotuned: bool = False
    """Compiling it beforehand is work for many processes, each with some of the configurations."""
    unpack: Callable[[Pair], Pair] = _as_it_is


def definition(x: Inputs, lower_bound: float | None, *, impl: Impl | None) -> Pair:
    """The primitives one after another."""
    q, k = l2_norm(x.q, impl=impl), l2_norm(x.k, impl=impl)
    g = kda_gate(x.raw, x.A_log, x.dt_bias, lower_bound=lower_bound, impl=impl)
    beta = torch.sigmoid(x.beta.to(x.state.dtype))
    state, o = kda(x.state, q, k, x.v, g, beta, lower_bound=lower_bound, impl=impl)
    return o, state


def our_contender() -> Contender:
    def prepare(x: Inputs, lower_bound: float | None) -> Call:
        def call() -> Pair:
            state, o = fused_kda(*x, lower_bound=lower_bound)
            return o, state

        return call

    return Contender(prepare, prepare, backward=True)


def fla_contender() -> Contender:
    """FLA's Triton kernels, with normalisation, gate and sigmoid left to them. Layouts are ours."""
    ops = importlib.import_module("fla.ops.kda")

    def prepare(function: Callable[..., Pair], x: Inputs, lower_bound: float | None, **options: Any) -> Call:
        return lambda: function(
            x.q,
            x.k,
            x.v,
            x.raw,
            x.beta,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            initial_state=x.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=lower_bound,
            **options,
        )

    def prefill(x: Inputs, lower_bound: float | None) -> Call:
        return prepare(ops.chunk_kda, x, lower_bound, safe_gate=lower_bound is not None)

    step = partial(prepare, ops.fused_recurrent_kda)
    return Contender(prefill, step, backward=True, autotuned=True)


def _bounded_only(lower_bound: float | None) -> float:
    if lower_bound is None:
        raise NotImplementedError("bounded gate only")
    return lower_bound


def cudnn_contender() -> Contender:
    """cuDNN frontend's kernel for Hopper: tokens of all sequences packed, states [B H V K].

    Its kernel reads gate and beta in float32 and would convert bf16 ones on every call; here that is done
    beforehand.
    """
    attention = importlib.import_module("cudnn.linear_attention").kimi_delta_attention

    def prepare(x: Inputs, lower_bound: float | None) -> Call:
        bound = _bounded_only(lower_bound)
        B, T, H, K = x.q.shape
        q, k, v, raw, beta = (t.flatten(0, 1) for t in x[1:6])
        raw, beta, state = raw.float(), beta.float(), x.state.mT.contiguous()
        starts = T * torch.arange(B + 1, dtype=torch.int32, device=q.device)

        def call() -> Pair:
            o, final_state = attention(
                q,
                k,
                v,
                raw,
                beta,
                starts,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=True,
                gate_lower_bound=bound,
                a_log=x.A_log,
                dt_bias=x.dt_bias.view(H, K),
            )
            return o.unflatten(0, (B, T)), final_state

        return call

    return Contender(prepare, prepare, unpack=_values_first)


def flash_kda_contender() -> Contender:
    """FlashKDA: states [B H V K], kept in bf16 inside."""
    forward = importlib.import_module("flash_kda").fwd

    def prepare(x: Inputs, lower_bound: float | None) -> Call:
        bound = _bounded_only(lower_bound)
        H, K = x.q.shape[2:]
        state = x.state.mT.contiguous()

        def call() -> Pair:
            o, final_state = torch.empty_like(x.v), torch.empty_like(state)
            forward(
                x.q,
                x.k,
                x.v,
                x.raw,
                x.beta,
                K**-0.5,
                o,
                A_log=x.A_log,
                dt_bias=x.dt_bias.view(H, K),
                lower_bound=bound,
                initial_state=state,
                final_state=final_state,
            )
            return o, final_state

        return call

    return Contender(prepare, prepare, unpack=_values_first)


def _values_first(pair: Pair) -> Pair:
    o, state = pair
    return o, state.mT


LOADERS: dict[str, Callable[[], Contender]] = {
    OURS: our_contender,
    "FLA": fla_contender,
    "cuDNN": cudnn_contender,
    "FlashKDA": flash_kda_contender,
}
DISTRIBUTIONS = "triton", "fla-core", "nvidia-cudnn-frontend", "flash-kda"


def contenders(names: Iterable[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders of these names that can be imported, and for each other one the reason."""
    found, missing = {}, {}
    for name in names:
        try:
            # What a peer warns about at its import is the peer's affair, and so is what it raises there.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = LOADERS[name]()
        except Exception as error:
            missing[name] = reason_of(error)
    return found, missing


def reason_of(error: BaseException) -> str:
    """One line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


# The machine


class Machine(NamedTuple):
    """How calls are timed on a device, and what it can do besides."""

    device: torch.device
    synchronize: Callable[[], None]
    sample: Callable[[Job, int], float]
    """Seconds per call, of as many calls one after another."""
    capture: Callable[[Call], tuple[Job, Pair]]
    """A call as a graph: its replay, and the tensors that a replay fills."""
    peak: Callable[[Job], int | None]
    """Bytes that a call allocates at most, beyond what was allocated before it."""
    release: Callable[[], None]
    """Gives back memory that nothing uses."""


def machine_of(device: str) -> Machine:
    if torch.device(device).type == "cuda":
        return Machine(
            torch.device(device),
            torch.cuda.synchronize,
            _event_seconds,
            _capture,
            _peak,
            torch.cuda.empty_cache,
        )
    if torch.device(device).type != "cpu":
        wait = torch.accelerator.synchronize
        return Machine(torch.device(device), wait, _synchronized_seconds, _no_graph, lambda _: None, _nothing)
    return Machine(torch.device(device), _nothing, wall_seconds, _no_graph, lambda _: None, _nothing)


def _nothing() -> None:
    pass


def _event_seconds(job: Job, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        job()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats / 1e3


def _synchronized_seconds(job: Job, repeats: int) -> float:
    """By the host's clock, from an idle device to an idle device."""

    def all_of_it() -> None:
        for _ in range(repeats):
            job()
        torch.accelerator.synchronize()

    torch.accelerator.synchronize()
    return wall_seconds(all_of_it, 1) / repeats


def _capture(call: Call) -> tuple[Job, Pair]:
    # What a library sets up on a stream's first call cannot be captured.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def _no_graph(_call: Call) -> tuple[Job, Pair]:
    raise NotImplementedError("graphs need a CUDA device")


def _peak(job: Job) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceilings(machine: Machine, plan: Plan) -> Json:
    """What the device does at this moment: a copy (reads plus writes) and a matrix product."""
    device = machine.device
    source = torch.zeros(plan.copy_bytes, dtype=torch.uint8, device=device)
    sizes = 2, plan.matmul, plan.matmul
    a, b = torch.randn(sizes, generator=seeded(device), device=device, dtype=torch.bfloat16)
    target, product = torch.empty_like(source), torch.empty_like(a)
    jobs: dict[str, Job] = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(a, b, out=product),
    }
    samples = interleave(jobs, plan.rounds, sample=machine.sample)
    return {
        "copy_bytes_per_s": 2 * plan.copy_bytes / median(samples["copy"]),
        "matmul_flop_per_s": 2 * plan.matmul**3 / median(samples["matmul"]),
    }


def describe(machine: Machine) -> Json:
    """Where and when the numbers were taken."""
    environment: Json = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "versions": {name: version_of(name) for name in DISTRIBUTIONS},
        "l2_bytes": None,
    }
    if machine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(machine.device)
        environment |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
    if machine.device.type == "npu":
        environment["device"] = npus()[machine.device.index or 0]
    return environment


# Cases


class Case(NamedTuple):
    """One entry of the results: every contender on the same inputs."""

    mode: str
    """accuracy, forward, backward (with its forward), decode (T = 1), or gradients (accuracy at length)."""
    shape: Shape
    gate: str
    regime: str


def cases(plan: Plan) -> list[Case]:
    """What is compared, most important first: a budget cuts off the end."""
    first, others = plan.rows[:1], plan.rows[1:]
    steps = tuple((B, 1, plan.decode_heads) for B in plan.decode_batches)
    order: list[tuple[str, tuple[Shape, ...]]] = [
        ("accuracy", (plan.accuracy,)),
        ("forward", first),
        ("backward", first),
        ("forward", others),
        ("gradients", (plan.long_gradients,)),
        ("backward", others),
        ("decode", steps),
        ("forward", plan.few_heads),
    ]
    return [
        Case(mode, shape, gate, regime)
        for mode, shapes in order
        if mode in ("accuracy", *plan.modes)
        for shape in shapes
        for gate in plan.gates
        # A single token takes the same time whatever it forgets.
        for regime in (plan.regimes[:1] if mode == "decode" else plan.regimes)
    ]


def name_of(case: Case) -> Json:
    """The case itself, as the results spell it."""
    B, T, H = case.shape
    return {"mode": case.mode, "B": B, "T": T, "H": H, "gate": case.gate, "regime": case.regime}


# Accuracy


def values(contender: Contender, inputs: Inputs, gate: str, *, step: bool = False) -> Pair:
    with torch.no_grad():
        prepare = contender.step if step else contender.prepare
        return contender.unpack(prepare(inputs, GATES[gate])())


def gradients(call: Call, leaves: Inputs, upstream: Pair) -> tuple[Tensor, ...]:
    """Of every input, the initial state among them, through both outputs."""
    with torch.enable_grad():
        return torch.autograd.grad(call(), leaves, upstream)


def leaves_of(inputs: Inputs) -> Inputs:
    """Inputs to differentiate by."""
    return Inputs(*(x.detach().requires_grad_() for x in inputs))


def wide(x: Tensor) -> Tensor:
    """In float64: of the devices GPUs have it, the others leave it to the CPU."""
    return x.to(x.device if x.device.type == "cuda" else "cpu", torch.float64)


def exact_values(inputs: Inputs, gate: str, impl: Impl) -> Pair:
    """The definition in float64 on the same rounded inputs."""
    with torch.no_grad():
        return definition(Inputs(*map(wide, inputs)), GATES[gate], impl=impl)


def exact_gradients(inputs: Inputs, gate: str, upstream: Pair, impl: Impl) -> tuple[Tensor, ...]:
    leaves = leaves_of(Inputs(*map(wide, inputs)))
    o, state = upstream
    call = partial(definition, leaves, GATES[gate], impl=impl)
    return gradients(call, leaves, (wide(o), wide(state)))


def value_errors(pair: Pair, exact: Pair) -> Json:
    return {name: relative_rmse(x, y) for name, x, y in zip(("o", "state"), pair, exact, strict=True)}


def gradient_errors(contender: Contender, inputs: Inputs, gate: str, upstream: Pair, exact: Any) -> Json:
    """Relative RMSE of the gradient of each input."""
    if not contender.backward:
        raise NotImplementedError("forward only")
    leaves = leaves_of(inputs)
    found = gradients(contender.prepare(leaves, GATES[gate]), leaves, upstream)
    return {name: relative_rmse(x, y) for name, x, y in zip(Inputs._fields, found, exact, strict=True)}


def beyond(errors: Json, limit: float) -> str | None:
    """Why results with these errors are refused, or None; a NaN is beyond any limit."""
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= limit]
    return f"relative error beyond {limit}: {', '.join(wrong)}" if wrong else None


def refusal(accuracy: Json, limit: float, *, backward: bool) -> str | None:
    """Why a contender with this entry of an accuracy case must not be timed, or None."""
    if "reason" in accuracy:
        return accuracy["reason"]
    found = accuracy["gradients"] if backward else {}
    if "reason" in found:
        return found["reason"]
    return beyond({**accuracy["errors"], **{f"gradient of {x}": e for x, e in found.items()}}, limit)


# Measuring


class Run(NamedTuple):
    """What all cases of a run share."""

    plan: Plan
    machine: Machine
    field: dict[str, Contender]
    missing: dict[str, str]
    ceilings: Json
    limit: float

    def inputs(self, shape: Shape, regime: str) -> Inputs:
        return make_inputs(shape, self.plan.head_dim, regime=regime, device=self.machine.device)

    def attempt(self, measure: Callable[[], Json]) -> Json:
        """What was measured, or the reason why not. Raises where the device itself no longer answers."""
        try:
            return measure()
        except Exception as error:
            reason = reason_of(error)
        self.machine.synchronize()
        self.machine.release()
        return {"reason": reason}

    def absent(self) -> Json:
        return {name: {"reason": reason} for name, reason in self.missing.items()}


def measure_accuracy(run: Run, case: Case) -> Json:
    """Errors of values and gradients, at the sizes of a loop over the tokens."""
    inputs = run.inputs(case.shape, case.regime)
    exact = exact_values(inputs, case.gate, "reference")
    backward = "backward" in run.plan.modes
    short = run.inputs(run.plan.accuracy_gradients, case.regime)
    upstream = cotangents(short)
    slopes = exact_gradients(short, case.gate, upstream, "reference") if backward else ()

    def errors(contender: Contender) -> Json:
        found = {"errors": value_errors(values(contender, inputs, case.gate), exact)}
        differentiate = partial(gradient_errors, contender, short, case.gate, upstream, slopes)
        return {**found, "gradients": run.attempt(differentiate) if backward else {"reason": "not asked for"}}

    return {
        "reference": "the recurrence in float64 (impl='reference')",
        "gradients_T": run.plan.accuracy_gradients[1],
        "contenders": {name: run.attempt(partial(errors, c)) for name, c in run.field.items()},
    }


def measure_gradients(run: Run, case: Case) -> Json:
    """Errors of the gradients after many tokens."""
    inputs = run.inputs(case.shape, case.regime)
    upstream = cotangents(inputs)
    slopes = exact_gradients(inputs, case.gate, upstream, "fallback")

    def errors(contender: Contender) -> Json:
        return {"gradients": gradient_errors(contender, inputs, case.gate, upstream, slopes)}

    return {
        # A loop over so many tokens does not fit into memory; the two agree to 1e-10.
        "reference": "the chunked form in float64 (impl='fallback')",
        "contenders": {name: run.attempt(partial(errors, c)) for name, c in run.field.items()},
    }


def measure_forward(run: Run, case: Case, refused: dict[str, str]) -> Json:
    """No-grad calls, eager and as a CUDA graph."""
    step = case.mode == "decode"
    inputs = run.inputs(case.shape, case.regime)
    jobs: dict[str, Job] = {}

    def start(name: str) -> Json:
        contender = run.field[name]
        call = (contender.step if step else contender.prepare)(inputs, GATES[case.gate])
        result = contender.unpack(call())
        found = {}
        if step:
            found["errors"] = value_errors(result, exact_values(inputs, case.gate, "reference"))
            wrong = beyond(found["errors"], run.limit)
            if wrong is not None:
                return {**found, "reason": wrong}
        jobs[f"{name} eager"] = call
        return {**found, "graph": run.attempt(partial(graph, name, call, result))}

    def graph(name: str, call: Call, result: Pair) -> Json:
        replay, captured = run.machine.capture(call)
        replay()
        # Work that a library puts on a stream of its own would be missing in the graph.
        errors = value_errors(run.field[name].unpack(captured), (result[0].double(), result[1].double()))
        wrong = beyond(errors, run.limit)
        if wrong is not None:
            raise RuntimeError(f"a replay differs from the call, {wrong}")
        jobs[f"{name} graph"] = replay
        return {}

    with torch.no_grad():
        rows = {
            name: {"reason": refused[name]} if name in refused else run.attempt(partial(start, name))
            for name in run.field
        }
        result = timings(run, case, jobs, rows, ("eager", "graph"))
    cached = 2 * nbytes(inputs.state) if step else sum(nbytes(x) for x in inputs)
    return {**result, "bytes_touched": cached}


def measure_backward(run: Run, case: Case, refused: dict[str, str]) -> Json:
    """Forward and backward, and the memory both take."""
    inputs = run.inputs(case.shape, case.regime)
    leaves, upstream = leaves_of(inputs), cotangents(inputs)
    jobs: dict[str, Job] = {}

    def start(name: str) -> Json:
        call = run.field[name].prepare(leaves, GATES[case.gate])
        job = partial(gradients, call, leaves, upstream)
        job()
        peak = run.machine.peak(job)
        jobs[f"{name} eager"] = job
        return {"peak_bytes": peak}

    rows = {
        name: {"reason": refused[name]} if name in refused else run.attempt(partial(start, name))
        for name in run.field
    }
    return timings(run, case, jobs, rows, ("eager",))


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def timings(run: Run, case: Case, jobs: dict[str, Job], rows: dict[str, Json], kinds: Sequence[str]) -> Json:
    """Interleaved rounds of all jobs, sorted into the rows of their contenders."""
    repeats = run.plan.decode_repeats if case.mode == "decode" else 1
    # Twice: before every sample goes a call that is not timed.
    one_round = 2 * repeats * sum(run.machine.sample(job, 1) for job in jobs.values())
    rounds = max(3, min(run.plan.rounds, int(run.plan.case_seconds / max(one_round, 1e-9))))
    samples = interleave(jobs, rounds, repeats, sample=run.machine.sample)
    floors = floors_of(case, run.plan.head_dim, run.ceilings)
    for name, row in rows.items():
        for kind in kinds:
            if f"{name} {kind}" in samples:
                row[kind] = timing(samples, name, kind, floors)
    return {"rounds": rounds, "repeats": repeats, **floors, "contenders": rows}


def timing(samples: Samples, name: str, kind: str, floors: Json) -> Json:
    """Milliseconds of a job, how many times ours it takes, and what it achieves of the ceilings."""
    mine, ours = f"{name} {kind}", f"{OURS} {kind}"
    ms = 1e3 * median(samples[mine])
    return {
        "ms": ms,
        "min_ms": 1e3 * min(samples[mine]),
        "times_ours": round_ratio(samples, mine, ours) if ours in samples else None,
        "share_of_copy": floors["copy_floor_ms"] / ms,
        "share_of_matmul": floors["matmul_floor_ms"] / ms,
    }


def floors_of(case: Case, K: int, rates: Json) -> Json:
    """Milliseconds of the least traffic at the rate of the copy, of the least arithmetic at the matmul's.

    Forward reads q, k, v, raw and beta, writes o, and reads and writes a state: 1,282 bytes per token and
    head at K = V = 128. Backward reads these inputs again and the cotangent of o, and writes five gradients:
    2,308, beside the initial state, its gradient and the cotangent of the final state. Its arithmetic is
    twice the forward's.
    """
    B, T, H = case.shape
    backward = case.mode == "backward"
    row = 2 * K
    inputs = 4 * row + 2
    traffic = inputs + row + (2 * inputs + row if backward else 0)
    states = 5 if backward else 2
    least_bytes = B * H * (T * traffic + states * 4 * K * K)
    least_flop = B * H * T * flop_per_token_and_head(K, K) * (3 if backward else 1)
    return {
        "least_bytes": least_bytes,
        "least_flop": least_flop,
        "copy_floor_ms": 1e3 * least_bytes / rates["copy_bytes_per_s"],
        "matmul_floor_ms": 1e3 * least_flop / rates["matmul_flop_per_s"],
    }


def measure_case(run: Run, case: Case, accuracy: Json) -> Json:
    """The results of a case, given those of the accuracy case with its gates."""
    if case.mode == "accuracy":
        result = measure_accuracy(run, case)
    elif case.mode == "gradients":
        result = measure_gradients(run, case)
    else:
        backward = case.mode == "backward"
        # A decode step has kernels of its own, and is held to the recurrence when it is measured.
        checked = {} if case.mode == "decode" else run.field
        unknown = {"reason": "its accuracy is not known"}
        reasons = {
            name: refusal(accuracy.get(name, unknown), run.limit, backward=backward) for name in checked
        }
        refused = {name: reason for name, reason in reasons.items() if reason is not None}
        result = (measure_backward if backward else measure_forward)(run, case, refused)
    run.machine.release()
    result["contenders"] |= run.absent()
    return {**name_of(case), **result}


def measure(
    plan: Plan,
    machine: Machine,
    field: dict[str, Contender],
    missing: dict[str, str],
    write: Callable[[Json], None],
    *,
    budget_s: float = math.inf,
    limit: float = LIMIT,
    clock: Callable[[], float] = time.monotonic,
) -> Json:
    """All cases of a plan, written after each one; those not reached stay in the results as such."""
    start = clock()
    rates = ceilings(machine, plan)
    run = Run(plan, machine, field, missing, rates, limit)
    todo = cases(plan)
    results: Json = {
        "environment": describe(machine),
        "ceilings": rates,
        "missing": missing,
        "limit": limit,
        "K": plan.head_dim,
        "V": plan.head_dim,
        "dtype": "bfloat16, states float32",
        "cases": [{**name_of(case), "not_run": "not reached"} for case in todo],
    }
    accuracy: dict[tuple[str, str], Json] = {}
    for i, case in enumerate(todo):
        if clock() - start > budget_s:
            not_run(results, i, f"the budget of {budget_s:g} s ran out")
            break
        print(f"{clock() - start:6.1f} s  {' '.join(map(str, case))}", file=sys.stderr, flush=True)
        try:
            result = measure_case(run, case, accuracy.get((case.gate, case.regime), {}))
            if case.mode == "accuracy":
                accuracy[case.gate, case.regime] = result["contenders"]
        except Exception as error:
            # Of no single contender, those are kept in its row.
            result = {**name_of(case), "not_run": reason_of(error)}
            if lost := failure_of(machine.synchronize):
                not_run(results, i, lost)
                write(results)
                raise
        results["cases"][i] = {**result, "seconds": clock() - start}
        write(results)
    results["ceilings_after"] = ceilings(machine, plan)
    write(results)
    return results


def failure_of(job: Job) -> str | None:
    """The reason why a job failed, None if it did not."""
    try:
        job()
    except Exception as error:
        return reason_of(error)
    return None


def not_run(results: Json, first: int, reason: str) -> None:
    """Marks the cases from the first on."""
    for entry in results["cases"][first:]:
        entry["not_run"] = reason


def write_json(path: Path, results: Json) -> None:
    """Never half a file: a run may be killed while it writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(beside, path)


# Compiling beforehand


def prewarm(count: int, arguments: Sequence[str]) -> None:
    """Starts the processes that compile, each its share, into Triton's cache, and waits for them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, __file__, *arguments, "--prewarm-share", str(i)] for i in range(count)]
    workers = [subprocess.Popen(command, env=environment) for command in commands]
    failed = sum(worker.wait() != 0 for worker in workers)
    if failed:
        raise SystemExit(f"{failed} of {count} compiling processes failed")


def prewarm_share(share: int, count: int, plan: Plan, machine: Machine, field: dict[str, Contender]) -> None:
    """Runs all that a plan will run, with every autotuner seeing one in `count` of its choices."""
    if importlib.util.find_spec("triton") is not None:
        take_share_of_autotuning(share, count)
    calls = prewarm_calls(plan)
    # Each starts elsewhere, and finds in the cache what another one has compiled meanwhile.
    first = share * len(calls) // count
    reasons = set()
    for name, contender in field.items():
        for case in calls[first:] + calls[:first] if contender.autotuned else calls[share::count]:
            reason = failure_of(partial(prewarm_call, case, contender, plan, machine))
            if reason is not None:
                reasons.add(f"{name}: {reason}")
            # The processes share the device's memory.
            machine.release()
    print(f"compiled share {share}", *sorted(reasons), sep="\n  ", file=sys.stderr, flush=True)


def prewarm_calls(plan: Plan) -> list[Case]:
    """Each call once, whatever its regime; at full length, by which a peer may tune its kernels."""
    kinds: dict[Case, None] = {}
    for mode, shape, gate, _ in cases(plan):
        if mode == "accuracy":
            kinds[Case("forward", shape, gate, "init")] = None
            if "backward" in plan.modes:
                kinds[Case("backward", plan.accuracy_gradients, gate, "init")] = None
        else:
            kinds[Case("backward" if mode == "gradients" else mode, shape, gate, "init")] = None
    return list(kinds)


def prewarm_call(case: Case, contender: Contender, plan: Plan, machine: Machine) -> None:
    inputs = make_inputs(case.shape, plan.head_dim, regime=case.regime, device=machine.device)
    if case.mode != "backward":
        values(contender, inputs, case.gate, step=case.mode == "decode")
    elif contender.backward:
        leaves = leaves_of(inputs)
        gradients(contender.prepare(leaves, GATES[case.gate]), leaves, cotangents(inputs))
    machine.synchronize()


def take_share_of_autotuning(share: int, count: int) -> None:
    """Makes Triton's autotuners run every count-th configuration once, untimed, and keep no choice."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune = autotuner.prune_configs

    def pruned(self: Any, *arguments: Any, **keywords: Any) -> list[Any]:
        configs = prune(self, *arguments, **keywords)
        return configs[share::count] or configs[:1]

    def run_once(kernel_call: Job, quantiles: Any = None) -> list[float]:
        kernel_call()
        return [0.0, 0.0, 0.0]

    def uncached(_self: Any, _key: Any, _configs: Any, benchmark: Job) -> bool:
        benchmark()
        return False

    autotuner.prune_configs = pruned
    autotuner.do_bench = staticmethod(run_once)
    autotuner.check_disk_cache = uncached


# Where the time goes


def profile(plan: Plan, machine: Machine, contender: Contender) -> str:
    """Time of each kernel (on a CPU: operator) of the first row, forward and with the backward."""
    gate, regime = plan.gates[0], plan.regimes[0]
    shape = (plan.rows + plan.few_heads)[0]
    inputs = make_inputs(shape, plan.head_dim, regime=regime, device=machine.device)
    leaves, upstream = leaves_of(inputs), cotangents(inputs)
    jobs: dict[str, Job] = {
        "forward": partial(values, contender, inputs, gate),
        "forward + backward": partial(gradients, contender.prepare(leaves, GATES[gate]), leaves, upstream),
    }
    title = f"{OURS}, B, T, H = {shape}, {gate} gate, {regime}\n"
    return "\n".join([title, *(f"{name}\n\n{profile_job(job, machine)}" for name, job in jobs.items())])


def profile_job(job: Job, machine: Machine, calls: int = 5) -> str:
    """A table of kernels, longest first, per call."""
    on_gpu = machine.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    for _ in range(3):
        job()
    machine.synchronize()
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(calls):
            job()
        machine.synchronize()
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [(getattr(event, time_of) / calls, event) for event in profiler.key_averages()]
    found = sorted((x for x in found if x[0] > 0), key=lambda x: -x[0])
    total = sum(us for us, _ in found)
    rows = [
        [event.key[:90], f"{event.count / calls:g}", f"{us:.1f}", f"{us / total:.1%}"]
        for us, event in found[:40]
    ]
    return table(["", "calls", "µs", "share"], [*rows, ["all", "", f"{total:.1f}", ""]])


# Command line


def parse_shape(text: str) -> Shape:
    B, T, H = (int(size) for size in text.split(","))
    return B, T, H


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="KDA on one GPU, beside its peers.")
    parser.add_argument("--rows", nargs="+", type=parse_shape, help="shapes B,T,H instead of all")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--gates", nargs="+", choices=list(GATES), default=list(GATES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--peers", nargs="*", choices=list(LOADERS)[1:], default=list(LOADERS)[1:])
    parser.add_argument("--rounds", type=int, help=f"rounds of a case at most ({Plan().rounds})")
    parser.add_argument("--limit", type=float, default=LIMIT, help="relative error that is still timed")
    parser.add_argument(
        "--budget-s", type=float, default=math.inf, help="start no case after so many seconds"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does it run at all")
    parser.add_argument("--device", default="cuda", help="cuda, npu, or cpu together with --quick")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="a folder")
    parser.add_argument("--prewarm", type=int, metavar="N", help="only compile, in N processes")
    parser.add_argument("--prewarm-share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="only print the time of each of our kernels")
    parser.add_argument("--plot", action="store_true", help="draw gpu.png from gpu.json, measure nothing")
    parser.add_argument(
        "--readme", action="store_true", help="renew README.md from gpu.json, measure nothing"
    )
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the options leave."""
    plan = QUICK if options.quick else Plan()
    if options.rows:
        few = tuple(row for row in plan.few_heads if row in options.rows)
        plan = plan._replace(rows=tuple(row for row in options.rows if row not in few), few_heads=few)
    return plan._replace(
        gates=tuple(options.gates),
        regimes=tuple(options.regimes),
        modes=tuple(options.modes),
        rounds=options.rounds or plan.rounds,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, or makes of what was measured what was asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    results = options.output / "gpu.json"
    if options.plot or options.readme:
        found = json.loads(results.read_text())
        if options.plot:
            plot(found, options.output / "gpu.png")
        if options.readme:
            readme = ROOT / "README.md"
            readme.write_text(replace_table(readme.read_text(), report(found)))
        return
    plan = plan_of(options)
    if options.prewarm and options.prewarm_share is None:
        prewarm(options.prewarm, arguments)
        return
    machine = machine_of(options.device)
    field, missing = contenders([OURS] if options.profile else [OURS, *options.peers])
    if options.prewarm_share is not None:
        prewarm_share(options.prewarm_share, options.prewarm, plan, machine, field)
    elif options.profile:
        print(profile(plan, machine, field[OURS]))
    else:
        write = partial(write_json, results)
        found = measure(plan, machine, field, missing, write, budget_s=options.budget_s, limit=options.limit)
        print(report(found), errors_table(found), reasons(found), sep="\n")


if __name__ == "__main__":
    main()
