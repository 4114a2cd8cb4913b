"""KDA on a CPU: kda_fn beside its peers, each checked against a float64 recurrence before it is timed.

    python benchmarks/cpu.py [--quick] [--rounds N] [--out FILE.json] [--plot FILE.png]
    python benchmarks/cpu.py --memory [--out FILE.json]

Every round times every contender once, sgemm and a memory copy among them: a busy moment hits all alike,
and ratios are taken inside a round. "compiled" is `torch.compile` around the fallback. The floor of a
prefill is its least arithmetic at the rate of that sgemm, the floor of a decode step its least traffic at
the rate of that copy. Columns: README.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

import torch
from measuring import (
    Json,
    Samples,
    flop_per_token_and_head,
    interleave,
    progress,
    relative_rmse,
    round_ratio,
    table,
    version_of,
)
from torch import Tensor

from kda_fn import kda, kda_gate, kda_step, l2_norm

OURS = "kda_fn fallback"
LOOP = "kda_fn recurrence"
COMPILED = "kda_fn compiled"
TRAINED = OURS, COMPILED, "transformers chunk", "FLA naive chunk"
VMAPPED = "kda_fn fallback, vmapped"
SGEMM, COPY, STATE_COPY = "sgemm", "copy", "copy of the state"


class Plan(NamedTuple):
    """What one run measures."""

    shapes: tuple[tuple[int, int, int], ...] = ((1, 2048, 4), (1, 1024, 32))  # B, T, H
    head_dim: int = 128
    decode_batches: tuple[int, ...] = (1, 16, 64, 256)
    decode_heads: int = 32
    lengths: tuple[int, ...] = tuple(2**n for n in range(10, 18))
    heads: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    matmul: int = 2048
    copy_bytes: int = 2**28
    rounds: int = 9


QUICK = Plan(((1, 128, 2), (2, 64, 2)), 32, (1, 4), 4, (64, 128, 256), (1, 2), (1, 2), 256, 2**22, 2)
MEMORY_LENGTHS = {"forward": (12_500, 25_000, 50_000, 100_000), "forward + backward": (6_250, 12_500, 25_000)}
MEMORY_HEADS, MEMORY_HEAD_DIM, MEMORY_LIMIT = 4, 64, 2**32


# Inputs


class Inputs(NamedTuple):
    """The arguments of `kda`, in its order: state, q, k, v, g, beta."""

    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def gates(kind: str, B: int, T: int, H: int, K: int) -> Tensor:
    """Log decays of one regime, [B T H K]; what a prefill forgets decides what a benchmark means.

    init       what an initialised layer gives: A_log = 0, dt_bias the inverse softplus of a log-uniform
               [1e-3, 0.1], raw gates 0.3 N(0, 1). Remembers for hundreds of tokens
    medium     about -1 per token
    denormal   about -1.45: products of more than 60 exp(g) are denormal float32 numbers
    strong     about -20: a few tokens forget everything
    vanishing  about -95: exp(g) itself is a denormal float32 number
    -inf       init, with one gate in a hundred -inf
    """
    if kind in ("init", "-inf"):
        rate = torch.empty(H * K).uniform_(-6.9, -2.3).exp()  # 1e-3 to 0.1
        raw = 0.3 * torch.randn(B, T, H, K)
        g = kda_gate(raw, torch.zeros(H), rate.expm1().log())
        return g if kind == "init" else g.masked_fill(torch.rand_like(g) < 0.01, -torch.inf)
    low, high = {
        "medium": (-1.5, -0.5),
        "denormal": (-1.6, -1.3),
        "strong": (-25.0, -15.0),
        "vanishing": (-103.0, -88.0),
    }[kind]
    return torch.empty(B, T, H, K).uniform_(low, high)


REGIMES = "init", "medium", "denormal", "strong", "vanishing", "-inf"


def make_inputs(B: int, T: int, H: int, K: int, V: int, *, regime: str = "init") -> Inputs:
    """Seeded float32 inputs with l2-normalised q and k, as a layer makes them."""
    torch.manual_seed(0)
    return Inputs(
        state=torch.randn(B, H, K, V),
        q=l2_norm(torch.randn(B, T, H, K)),
        k=l2_norm(torch.randn(B, T, H, K)),
        v=torch.randn(B, T, H, V),
        g=gates(regime, B, T, H, K),
        beta=torch.rand(B, T, H),
    )


# Contenders


class Contender(NamedTuple):
    """One way to compute a prefill, `run(inputs) -> (final state, o)`, and by `step` a decode at T = 1."""

    run: Callable[[Inputs], tuple[Tensor, Tensor]]
    step: Callable[[Inputs], tuple[Tensor, Tensor]] | None = None


def contenders() -> tuple[dict[str, Contender], dict[str, str]]:
    """All contenders that are installed, and for each missing peer the reason."""
    found, missing = our_contenders(), {}
    for peer, load in {"transformers": transformers_contenders, "fla-core": fla_contenders}.items():
        try:
            # What a peer warns about at its import is the peer's affair.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found |= load()
        except ImportError as error:
            missing[peer] = str(error)
    return found, missing


def our_contenders() -> dict[str, Contender]:
    """The fallback, eager and compiled, and the reference of this library."""

    def contender(impl: Any) -> Contender:
        return Contender(lambda x: kda(*x, impl=impl), lambda x: kda_step(*_one_token(x), impl=impl))

    compiled = torch.compile(partial(kda, impl="fallback"), fullgraph=True)
    compiled_step = torch.compile(partial(kda_step, impl="fallback"), fullgraph=True)
    return {
        OURS: contender("fallback"),
        COMPILED: Contender(lambda x: compiled(*x), lambda x: compiled_step(*_one_token(x))),
        LOOP: contender("reference"),
    }


def transformers_contenders() -> dict[str, Contender]:
    """The torch functions of transformers' models with KDA; copies of one text count once."""
    found: dict[str, Contender] = {}
    texts = set()
    for model in ("kimi_linear", "glm5_next", "bailing_hybrid"):
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        for kind in ("chunk", "recurrent"):
            # Where FLA's kernels can be imported the name is bound to them; unwrapped it is the torch code.
            function = inspect.unwrap(getattr(module, f"{kind}_kimi_delta_attention"))
            text = inspect.getsource(function)
            name = f"transformers {kind}"
            if text not in texts:
                texts.add(text)
                found[f"{name} ({model})" if name in found else name] = _transformers_contender(
                    function, kind
                )
    return found


def _transformers_contender(function: Callable[..., Any], kind: str) -> Contender:
    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        # Inputs are [B T H ..], g in natural log, beta past its sigmoid, scale K**-0.5, state [B H K V].
        o, state = function(x.q, x.k, x.v, g=x.g, beta=x.beta, initial_state=x.state, output_final_state=True)
        return state, o

    return Contender(run, run if kind == "recurrent" else None)


def fla_contenders() -> dict[str, Contender]:
    """FLA's torch definitions, loaded from their one file: the package around it imports Triton."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'fla'")
    path = Path(package.submodule_search_locations[0], "ops", "kda", "naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive_kda", path)
    if not path.exists() or spec is None or spec.loader is None:
        raise ModuleNotFoundError("fla has no ops/kda/naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        "FLA naive chunk": _fla_contender(module.naive_chunk_kda, "chunk"),
        "FLA naive recurrent": _fla_contender(module.naive_recurrent_kda, "recurrent"),
    }


def _fla_contender(function: Callable[..., Any], kind: str) -> Contender:
    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        # The conventions of transformers', and the chunked form takes multiples of 64 tokens only.
        o, state = function(x.q, x.k, x.v, x.g, x.beta, initial_state=x.state, output_final_state=True)
        return state, o

    return Contender(run, run if kind == "recurrent" else None)


def _one_token(x: Inputs) -> tuple[Tensor, ...]:
    """Inputs at T = 1 without their time axis."""
    return x.state, *(tensor.squeeze(1) for tensor in x[1:])


# Accuracy


def errors(inputs: Inputs, runs: dict[str, Callable[[], tuple[Tensor, Tensor]]]) -> dict[str, Json]:
    """Relative RMSE of each result against the recurrence in float64."""
    state, o = kda(*(x.double() for x in inputs), impl="reference")
    results: dict[str, Json] = {}
    for name, run in runs.items():
        its_state, its_o = run()
        results[name] = {
            "error_output": relative_rmse(its_o, o),
            "error_state": relative_rmse(its_state, state),
        }
    return results


def check(results: dict[str, Json], limit: float = 1e-4) -> None:
    """A contender that computes something else must not be timed."""
    for name, result in results.items():
        for what in ("error_output", "error_state"):
            if not result[what] <= limit:
                raise RuntimeError(f"{name}: {what} {result[what]:.1e} against the float64 recurrence")


# Timing


def calibration(plan: Plan) -> dict[str, Callable[[], object]]:
    """The two jobs that say what this machine can do at this moment."""
    a, b = torch.randn(2, plan.matmul, plan.matmul)
    product = torch.empty_like(a)
    source, target = torch.zeros(plan.copy_bytes // 4), torch.zeros(plan.copy_bytes // 4)
    jobs: dict[str, Callable[[], object]] = {
        SGEMM: lambda: torch.mm(a, b, out=product),
        COPY: lambda: target.copy_(source),
    }
    for job in jobs.values():
        job()  # touches all memory once
    return jobs


def rates(samples: Samples, plan: Plan) -> Json:
    """GFLOP/s of sgemm and GB/s of the copy (reads plus writes), at the median."""
    return {
        "sgemm_gflops": 2 * plan.matmul**3 / median(samples[SGEMM]) / 1e9,
        "copy_gbs": 2 * plan.copy_bytes / median(samples[COPY]) / 1e9,
    }


def step_bytes_per_head(K: int, V: int) -> int:
    """Least traffic of a decode step: the float32 state in and out, then q, k, g, v, o and beta."""
    return 4 * (2 * K * V + 3 * K + 2 * V + 1)


def timing(samples: Samples, name: str, floor: float, baseline: str = OURS) -> Json:
    """Median and best seconds of a job, and how they compare; the ratio is taken inside each round."""
    return {
        "median_s": median(samples[name]),
        "min_s": min(samples[name]),
        "ratio": round_ratio(samples, name, baseline),
        "share_of_floor": floor / median(samples[name]),
    }


def measure_prefill(plan: Plan, shape: tuple[int, int, int], field: dict[str, Contender]) -> Json:
    """Prefills of one shape, from a state to a state: no-grad, and forward + backward."""
    B, T, H = shape
    K = V = plan.head_dim
    inputs = make_inputs(B, T, H, K, V)
    runs = {name: (lambda run=contender.run: run(inputs)) for name, contender in field.items()}
    accuracy = errors(inputs, runs)
    check(accuracy)
    samples = interleave({**runs, **calibration(plan)}, plan.rounds)
    machine = rates(samples, plan)
    floor = B * T * H * flop_per_token_and_head(K, V) / machine["sgemm_gflops"] / 1e9

    trained = [name for name in TRAINED if name in field]
    expected = gradients(partial(kda, impl="reference"), Inputs(*(x.double() for x in inputs)))
    pulls = {
        name: partial(gradients, lambda *x, f=field[name]: f.run(Inputs(*x)), inputs) for name in trained
    }
    found = {name: {"error_gradients": gradient_error(pull(), expected)} for name, pull in pulls.items()}
    for name, result in found.items():
        if not result["error_gradients"] <= 1e-4:
            raise RuntimeError(
                f"{name}: gradients {result['error_gradients']:.1e} against the float64 recurrence"
            )
    forward = f"{OURS}, forward"
    both = interleave({forward: runs[OURS], **pulls}, plan.rounds)
    return {
        "shape": {"B": B, "T": T, "H": H, "K": K, "V": V},
        **machine,
        "floor_s": floor,
        "contenders": {name: {**timing(samples, name, floor), **accuracy[name]} for name in field},
        "forward_backward": {
            name: {
                **timing(both, name, floor),
                **found[name],
                "times_our_forward": round_ratio(both, name, forward),
            }
            for name in trained
        },
    }


def gradients(run: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs) -> tuple[Tensor, ...]:
    """Of a random projection of both results: forward and backward."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = run(*leaves)
        # The same numbers in each call: random, for the gradient of a plain sum hides errors that cancel.
        cotangents = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).sin().view_as(y) for y in results]
        return torch.autograd.grad(results, leaves, cotangents)


def gradient_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The worst relative RMSE of a gradient."""
    return max(relative_rmse(x, y) for x, y in zip(found, expected, strict=True))


DTYPES = torch.float32, torch.bfloat16, torch.float16


def measure_dtypes(plan: Plan, shape: tuple[int, int, int]) -> Json:
    """q, k, v and beta in half precision, beside float32; the gate and the states stay float32."""
    B, T, H = shape
    x = make_inputs(B, T, H, plan.head_dim, plan.head_dim)
    jobs: dict[str, Callable[[], object]] = {}
    for dtype in DTYPES:
        q, k, v, beta = (y.to(dtype) for y in (x.q, x.k, x.v, x.beta))
        inputs, name = Inputs(x.state, q, k, v, x.g, beta), str(dtype).removeprefix("torch.")
        run = partial(kda, impl="fallback")
        jobs[name] = partial(run, *inputs)
        jobs[f"{name}, forward + backward"] = partial(gradients, run, inputs)
    samples = interleave(jobs, plan.rounds)
    return {
        "shape": {"B": B, "T": T, "H": H, "K": plan.head_dim, "V": plan.head_dim},
        "times": {
            name: timing(samples, name, 0.0, baseline=name.replace(name.partition(",")[0], "float32"))
            for name in jobs
        },
    }


def measure_scaling(plan: Plan) -> list[Json]:
    """Times of no-grad prefills along one size, and the slope of their logarithms."""
    sweeps = {
        "T": [(1, T, 4) for T in plan.lengths],
        "H": [(1, 1024, H) for H in plan.heads],
        "B": [(B, 256, 4) for B in plan.batches],
    }
    results = []
    for axis, shapes in progress("scaling in", list(sweeps.items())):
        seconds = []
        for shape in shapes:
            inputs = make_inputs(*shape, plan.head_dim, plan.head_dim)
            samples = interleave({OURS: partial(kda, *inputs, impl="fallback")}, max(3, plan.rounds // 3))
            seconds.append(median(samples[OURS]))
        sizes = [shape["BTH".index(axis)] for shape in shapes]
        slope, _ = linear_regression([math.log(n) for n in sizes], [math.log(t) for t in seconds])
        results.append({"axis": axis, "shapes": shapes, "sizes": sizes, "seconds": seconds, "slope": slope})
    return results


def measure_gates(plan: Plan, shape: tuple[int, int, int]) -> Json:
    """The fallback under every regime of gates: its time must not depend on their values."""
    B, T, H = shape
    runs, accuracy = {}, {}
    for regime in REGIMES:
        inputs = make_inputs(B, T, H, plan.head_dim, plan.head_dim, regime=regime)
        runs[regime] = lambda inputs=inputs: kda(*inputs, impl="fallback")
        accuracy |= errors(inputs, {regime: runs[regime]})
    check(accuracy)
    samples = interleave({**runs, **calibration(plan)}, plan.rounds)
    floor = B * T * H * flop_per_token_and_head(plan.head_dim, plan.head_dim)
    floor /= rates(samples, plan)["sgemm_gflops"] * 1e9
    return {
        "shape": {"B": B, "T": T, "H": H, "K": plan.head_dim, "V": plan.head_dim},
        "regimes": {
            regime: {**timing(samples, regime, floor, baseline="init"), **accuracy[regime]}
            for regime in REGIMES
        },
    }


def measure_decode(plan: Plan, batch: int, field: dict[str, Contender]) -> Json:
    """One token for each of `batch` sequences, and a copy of the state, which has the same traffic."""
    H, K = plan.decode_heads, plan.head_dim
    inputs = make_inputs(batch, 1, H, K, K)
    steps = {name: c.step for name, c in field.items() if c.step is not None}
    runs = {name: (lambda step=step: step(inputs)) for name, step in steps.items()}
    # kda_step has no time axis in its output; a time axis of one changes no norm.
    accuracy = errors(inputs, {name: lambda run=run: _with_time(run()) for name, run in runs.items()})
    check(accuracy)

    by_vmap = torch.func.vmap(partial(kda_step, impl="fallback"))
    jobs = {**runs, VMAPPED: lambda: by_vmap(*_one_token(inputs)), STATE_COPY: inputs.state.clone}
    repeats = max(1, 64 // batch)
    samples = interleave(jobs, plan.rounds, repeats) | interleave(calibration(plan), plan.rounds)
    machine = rates(samples, plan)
    floor = batch * H * step_bytes_per_head(K, K) / machine["copy_gbs"] / 1e9
    return {
        "batch": batch,
        "heads": H,
        **machine,
        "floor_s": floor,
        "contenders": {name: {**timing(samples, name, floor), **accuracy.get(name, {})} for name in jobs},
    }


def _with_time(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    state, o = result
    return state, o.unsqueeze(1) if o.ndim == 3 else o


def measure(plan: Plan, field: dict[str, Contender], missing: dict[str, str]) -> Json:
    """All timings of a plan."""
    environment = describe_machine()
    with torch.no_grad():
        results = {
            "environment": environment,
            "missing": missing,
            "rounds": plan.rounds,
            "forward": [measure_prefill(plan, shape, field) for shape in progress("prefill", plan.shapes)],
            "dtypes": [measure_dtypes(plan, shape) for shape in progress("dtypes", plan.shapes)],
            "gates": [measure_gates(plan, shape) for shape in progress("gates", plan.shapes)],
            "decode": [measure_decode(plan, n, field) for n in progress("decode", plan.decode_batches)],
            "scaling": measure_scaling(plan),
        }
    environment["load_average_after"] = os.getloadavg()
    return results


def describe_machine() -> Json:
    """Where and when the numbers were taken."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peers": {name: version_of(name) for name in ("transformers", "fla-core")},
        "dtype": "float32",
        "load_average_before": os.getloadavg(),
    }


def cpu_name() -> str:
    """The processor's model name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found.group(1) if found else platform.processor()


# Memory


def memory_of(T: int, kind: str) -> Json:
    """Peak memory of a prefill of T tokens in this process, which must be a fresh one."""
    H, K, V = MEMORY_HEADS, MEMORY_HEAD_DIM, MEMORY_HEAD_DIM
    run = partial(kda, impl="fallback")
    with torch.no_grad():
        inputs, few = lean_inputs(T, H, K, V), lean_inputs(64, H, K, V)
        # Libraries set up their buffers once.
        _ = run(*few) if kind == "forward" else gradients(run, few)
        before = resident_bytes("VmRSS")
        results = run(*inputs) if kind == "forward" else gradients(run, inputs)
        peak = resident_bytes("VmHWM")
    state, *outputs = results
    owned = {x.untyped_storage().data_ptr() for x in results}
    return {
        "T": T,
        "peak_bytes": peak,
        "extra_bytes": peak - before,
        "state_bytes": state.numel() * state.element_size(),
        "state_storage_bytes": state.untyped_storage().nbytes(),
        "output_bytes": sum(x.numel() * x.element_size() for x in outputs),
        "output_storage_bytes": sum(x.untyped_storage().nbytes() for x in outputs),
        "shares_memory": len(owned) < len(results)
        or any(x.untyped_storage().data_ptr() in owned for x in inputs),
    }


def lean_inputs(T: int, H: int, K: int, V: int) -> Inputs:
    """Inputs made in place: a temporary here would hide in the peak that is measured afterwards."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, T, H, K), torch.randn(1, T, H, K), torch.randn(1, T, H, V)
    for x in (q, k):
        x /= x.norm(dim=-1, keepdim=True)
    g, beta = torch.empty(1, T, H, K).uniform_(-0.1, 0), torch.rand(1, T, H)
    return Inputs(torch.randn(1, H, K, V), q, k, v, g, beta)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process.

    Not getrusage's ru_maxrss: a child process starts with its parent's peak there.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise OSError("peak memory is read from /proc/self/status, which this system does not have")
    found = re.search(rf"{field}:\s*(\d+) kB", status.read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def memory_in_fresh_process(T: int, kind: str) -> Json:
    """`memory_of` in a process of its own, on one thread: threads cost time on a busy machine only."""
    command = [sys.executable, __file__, "--memory-of", str(T), kind]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def measure_memory(lengths: dict[str, Sequence[int]]) -> Json:
    """Peak memory at each length, and its growth per token and head."""
    kinds = {}
    for kind, sizes in lengths.items():
        runs = [memory_in_fresh_process(T, kind) for T in sizes]
        slope, _ = linear_regression([p["T"] for p in runs], [p["extra_bytes"] for p in runs])
        kinds[kind] = {
            "runs": runs,
            "bytes_per_token_and_head": slope / MEMORY_HEADS,
            "output_bytes_per_token_and_head": runs[-1]["output_bytes"] / runs[-1]["T"] / MEMORY_HEADS,
            "within_limit": all(p["peak_bytes"] <= MEMORY_LIMIT for p in runs),
            "state_owns_its_memory_alone": all(
                p["state_storage_bytes"] == p["state_bytes"] and not p["shares_memory"] for p in runs
            ),
        }
    return {
        "environment": describe_machine(),
        "H": MEMORY_HEADS,
        "K": MEMORY_HEAD_DIM,
        "V": MEMORY_HEAD_DIM,
        "kinds": kinds,
    }


# Reports


def report(results: Json) -> str:
    """All timings as markdown."""
    where = results["environment"]
    parts = [
        f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}, {where['date']}, "
        f"load average {where['load_average_before'][0]:.1f} to {where['load_average_after'][0]:.1f}\n"
    ]
    parts += [f"missing: {peer} ({reason}); extra `peers`\n" for peer, reason in results["missing"].items()]
    parts += [report_prefill(section) for section in results["forward"]]
    parts += [report_dtypes(section) for section in results["dtypes"]]
    parts += [report_gates(section) for section in results["gates"]]
    parts += [report_decode(section) for section in results["decode"]]
    parts += [report_scaling(sweep) for sweep in results["scaling"]]
    return "\n".join(parts)


def report_prefill(section: Json) -> str:
    """One shape of the prefill, and its derivative."""
    rows = [
        [name, *_times(r, 1e3), f"{r['share_of_floor']:.1%}", *_errors(r)]
        for name, r in section["contenders"].items()
    ]
    both = [
        [name, *_times(r, 1e3), f"{r['times_our_forward']:.2f}", f"{r['error_gradients']:.1e}"]
        for name, r in section["forward_backward"].items()
    ]
    return (
        f"Prefill {_shape(section)}: sgemm {section['sgemm_gflops']:.0f} GFLOP/s, "
        f"copy {section['copy_gbs']:.1f} GB/s, floor {1e3 * section['floor_s']:.1f} ms\n\n"
        + table(["", "ms", "best ms", "times ours", "floor/ms", "error o", "error state"], rows)
        + "\nForward + backward\n\n"
        + table(["", "ms", "best ms", "times ours", "times our forward", "error of gradients"], both)
    )


def report_dtypes(section: Json) -> str:
    """Half precision beside float32."""
    rows = [[name, *_times(r, 1e3)] for name, r in section["times"].items()]
    return f"Fallback by dtype, {_shape(section)}\n\n" + table(["", "ms", "best ms", "times float32"], rows)


def report_scaling(sweep: Json) -> str:
    """Times along one size."""
    rows = [
        [str(tuple(shape)), f"{1e3 * t:.1f}"]
        for shape, t in zip(sweep["shapes"], sweep["seconds"], strict=True)
    ]
    return f"Scaling in {sweep['axis']}: slope {sweep['slope']:.3f} in log-log\n\n" + table(
        ["B, T, H", "ms"], rows
    )


def report_gates(section: Json) -> str:
    """One shape of the fallback under every regime of gates."""
    rows = [[name, *_times(r, 1e3), *_errors(r)] for name, r in section["regimes"].items()]
    headers = ["gates", "ms", "best ms", "times init", "error o", "error state"]
    return f"Fallback by gates, {_shape(section)}\n\n" + table(headers, rows)


def report_decode(section: Json) -> str:
    """One batch of the decode step."""
    rows = [
        [name, *_times(r, 1e6), f"{r['share_of_floor']:.1%}", *_errors(r)]
        for name, r in section["contenders"].items()
    ]
    return (
        f"Decode step, batch {section['batch']}, H = {section['heads']}: "
        f"copy {section['copy_gbs']:.1f} GB/s, floor {1e6 * section['floor_s']:.0f} µs\n\n"
        + table(["", "µs", "best µs", "times ours", "floor/µs", "error o", "error state"], rows)
    )


def _shape(section: Json) -> str:
    return ", ".join(f"{letter} = {size}" for letter, size in section["shape"].items())


def _times(result: Json, unit: float) -> list[str]:
    return [f"{unit * result['median_s']:.1f}", f"{unit * result['min_s']:.1f}", f"{result['ratio']:.2f}"]


def _errors(result: Json) -> list[str]:
    return [f"{result[key]:.1e}" if key in result else "" for key in ("error_output", "error_state")]


def report_memory(results: Json) -> str:
    """Peak memory by length as markdown."""
    mib, parts = 2**20, []
    for kind, found in results["kinds"].items():
        rows = [
            [f"{p['T']:,}", *(f"{p[key] / mib:.0f}" for key in ("extra_bytes", "output_bytes", "peak_bytes"))]
            for p in found["runs"]
        ]
        parts.append(
            f"{kind}\n\n"
            + table(["T", "extra MiB", "of it results", "peak of the process"], rows)
            + f"\n{found['bytes_per_token_and_head']:.0f} bytes per token and head, "
            f"{found['output_bytes_per_token_and_head']:.0f} of them results\n"
            f"peak within {MEMORY_LIMIT / 2**30:.0f} GiB: {found['within_limit']}; "
            f"state owns its memory, and no more: {found['state_owns_its_memory_alone']}\n"
        )
    return "\n".join(parts)


def plot(results: Json, path: Path) -> None:
    """Bars of milliseconds on a log scale, one panel a shape, with the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sections = results["forward"]
    figure, panels = plt.subplots(len(sections) + 1, 2, figsize=(13, 3.3 * len(sections) + 3), squeeze=False)
    for section, (left, right) in zip(sections, panels, strict=False):
        _plot_times(left, section, "contenders", "forward")
        _plot_times(right, section, "forward_backward", "forward + backward")
    for axes, sweep in zip(panels[-1], results["scaling"], strict=False):
        _plot_scaling(axes, sweep)
    where = results["environment"]
    K, V = (sections[0]["shape"][letter] for letter in "KV")
    title = f"KDA prefill on a CPU, float32, K = {K}, V = {V}"
    figure.suptitle(title, x=0.02, ha="left", fontsize=15, weight="bold")
    versions = ", ".join(f"{name} {version}" for name, version in where["peers"].items() if version)
    figure.text(
        0.02,
        0.01,
        f"Medians of {results['rounds']} interleaved rounds. {where['cpu']}, {where['threads']} threads; "
        f"torch {where['torch']}, {versions}.",
        fontsize=9,
        color="#444444",
    )
    figure.tight_layout(rect=(0, 0.025, 1, 0.985), h_pad=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_times(axes: Any, section: Json, which: str, title: str) -> None:
    """One panel; ours and the peers' differ in lightness as well as in hue."""
    slowest_first = sorted(section[which].items(), key=lambda item: -item[1]["median_s"])
    names = [name for name, _ in slowest_first]
    ms = [1e3 * result["median_s"] for _, result in slowest_first]
    floor = 1e3 * section["floor_s"]
    colors = ["#0072B2" if name.startswith("kda_fn") else "#E6B566" for name in names]
    bars = axes.barh(names, ms, color=colors, height=0.68)
    axes.bar_label(bars, labels=[f"{x:,.0f} ms" for x in ms], padding=4, fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(floor / 2, max(ms) * 4)
    if which == "contenders":
        axes.axvline(floor, color="black", linestyle="--", linewidth=1.2)
        axes.text(floor, len(names) - 0.45, f" floor {floor:.1f} ms (arithmetic at sgemm's rate)", fontsize=9)
    axes.set_ylim(-0.6, len(names) + 0.2)
    sizes = ", ".join(f"{letter} = {section['shape'][letter]}" for letter in "BTH")
    axes.set_title(f"{sizes}: {title}", loc="left", fontsize=11)
    axes.set_xlabel("milliseconds, log scale", fontsize=9)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _plot_scaling(axes: Any, sweep: Json) -> None:
    ms = [1e3 * t for t in sweep["seconds"]]
    axes.loglog(sweep["sizes"], ms, "o-", color="#0072B2", linewidth=1.8)
    linear = [ms[-1] * n / sweep["sizes"][-1] for n in sweep["sizes"]]
    axes.loglog(sweep["sizes"], linear, "--", color="black", linewidth=1, label="proportional")
    B, T, H = sweep["shapes"][0]
    others = {"T": f"B = {B}, H = {H}", "H": f"B = {B}, T = {T}", "B": f"T = {T}, H = {H}"}
    axes.set_title(
        f"{OURS} by {sweep['axis']} ({others[sweep['axis']]}): slope {sweep['slope']:.2f}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel({"T": "tokens", "H": "heads", "B": "batch"}[sweep["axis"]], fontsize=9)
    axes.set_ylabel("milliseconds", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


# Command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the two modes."""
    parser = argparse.ArgumentParser(description="KDA on a CPU, beside its peers.")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does it run at all")
    parser.add_argument("--rounds", type=int, help=f"rounds, each runs everything once ({Plan().rounds})")
    parser.add_argument("--memory", action="store_true", help="peak memory of long prefills instead of times")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the prefill times to this PNG file")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints tables, writes what was asked for."""
    options = parse(arguments)
    if options.memory_of is not None:
        T, kind = options.memory_of
        print(json.dumps(memory_of(int(T), kind)))
        return
    if options.memory:
        results = measure_memory(MEMORY_LENGTHS)
        print(report_memory(results))
    else:
        plan = QUICK if options.quick else Plan()
        results = measure(plan._replace(rounds=options.rounds or plan.rounds), *contenders())
        print(report(results))
        if options.plot:
            plot(results, options.plot)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    if options.memory:
        for kind, found in results["kinds"].items():
            if not (found["within_limit"] and found["state_owns_its_memory_alone"]):
                raise SystemExit(f"the memory law does not hold: {kind}")


if __name__ == "__main__":
    main()
