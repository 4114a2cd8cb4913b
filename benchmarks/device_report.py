"""What a device does, in one file to send: which implementation serves, the laws, a benchmark.

    python benchmarks/device_report.py [--device npu] [--out FILE.json] [--quick] [-k EXPRESSION]
    python benchmarks/device_report.py --show FILE.json

Needs pytest beside the library, and a clone: the laws are in tests/. It runs in the environment at hand,
which is what is asked about. A device that is new to the kernels may end a process or never answer: laws and
primitives run in processes of their own, and whichever did so is an entry of the file. Fields: README.md.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gpu
import optree
import torch
import torch.nn.functional as F
from cpu import cpu_name
from gpu_report import report as benchmark_tables
from measuring import Json, interleave, relative_rmse, table

from kda_fn import W8A8, explain
from kda_fn.__main__ import best_device, devices, sample_calls, versions
from kda_fn.primitives._primitive import PRIMITIVES

ROOT = Path(__file__).parents[1]
LAWS = "tests/test_laws.py"
REAL_SIZES = "tests/test_real_sizes.py"
LOST = 75
"""A worker's exit status when its device no longer answers: the next one goes on."""
SILENCE_S = 900.0
"""After so long without a word a worker is ended. A first launch may compile for minutes."""
BEGUN, PASSED = "begun", "passed"


# The environment


def environment(device: str) -> Json:
    """Versions and devices, and of which state of the clone."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    found = gpu.describe(gpu.machine_of(device))
    if torch.device(device).type == "cpu":
        found["device"] = cpu_name()
    return {**found, "versions": versions() | {"CANN": cann()}, "devices": devices(), "commit": commit}


def cann() -> str | None:
    """The version of the Ascend toolkit whose environment is set."""
    home = Path(os.environ.get("ASCEND_TOOLKIT_HOME", "nowhere"))
    for path in sorted(home.glob("*/ascend_toolkit_install.info")):
        for line in path.read_text().splitlines():
            if line.startswith("version="):
                return line.removeprefix("version=")
    return None


# Units of work: each writes a line when it begins and one when it ends


def say(log: Path, entry: Json) -> None:
    """One more line of a worker's log."""
    with log.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def entries_of(log: Path) -> dict[str, Json]:
    """The last word on each unit."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def supervise(
    worker: Sequence[str], log: Path, silence_s: float = SILENCE_S
) -> tuple[list[Json], str | None]:
    """Runs a worker until it ends in order, anew whenever it did not; what its log says of every unit, and
    why it was given up, if it was.

    A worker skips the units of which the log speaks. One that had begun when the worker ended is "crashed",
    or "hung" if the worker was silent for too long.
    """
    while True:
        known = len(entries_of(log))
        log.touch()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen([*worker, str(log)], cwd=ROOT, stdout=output, stderr=output)
            hung = False
            while process.poll() is None and not hung:
                time.sleep(0.2)
                hung = time.time() - log.stat().st_mtime > silence_s
            if hung:
                process.kill()
            status = process.wait()
            output.seek(0)
            tail = output.read()[-2000:]
        for entry in entries_of(log).values():
            if entry["outcome"] == BEGUN:
                how = {"outcome": "hung"} if hung else {"outcome": "crashed", "status": status}
                say(log, {**entry, **how, "message": tail})
        found = list(entries_of(log).values())
        if status == 0:
            return found, None
        if len(found) == known:
            return found, f"ended with status {status} before its next unit: {tail}"
        print(f"  a process ended with status {status}, the next one goes on", file=sys.stderr, flush=True)


def alive(device: str) -> bool:
    """Whether the device still adds."""
    try:
        return torch.ones(1, device=device).add(1).item() == 2
    except RuntimeError:
        return False


# The laws


class Recorder:
    """A pytest plugin that writes every outcome to the log, with the error nearest to its bound."""

    def __init__(self, log: Path, device: str) -> None:
        self.log, self.device = log, device
        self.done = set(entries_of(log))
        self.entry: Json = {}
        self.lost = False

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_setup(self, item: Any) -> None:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        self.entry = {"name": item.nodeid, "outcome": BEGUN}
        if "law" in parameters:
            self.entry["law"] = parameters["law"].__name__.replace("_", " ")
        for name in ("subject", "impl"):
            if name in parameters:
                self.entry[name] = getattr(parameters[name], "name", parameters[name])
        self.entry["emulated"] = self.device == "cpu" and self.entry.get("impl") == "triton"
        measured().clear()
        say(self.log, self.entry)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and (report.when == "teardown" or report.passed):
            return
        self.entry |= {"outcome": report.outcome, "seconds": report.duration}
        if measured():
            error, bound = max(measured(), key=lambda pair: pair[0] / pair[1])
            self.entry |= {"error": error, "bound": bound}
        if report.skipped:
            self.entry["message"] = report.longrepr[-1]
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.entry["message"] = (crash.message if crash else str(report.longrepr))[:1000]
            self.lost = not alive(self.device)
        say(self.log, self.entry)
        if self.lost:
            self.session.shouldstop = "the device no longer answers"


def measured() -> list[tuple[float, float]]:
    """What tests/laws.py measured in this test."""
    return getattr(sys.modules.get("laws"), "MEASURED", [])


def run_tests(device: str, options: Sequence[str], log: Path) -> int:
    """The worker of the laws."""
    import pytest

    recorder = Recorder(log, device)
    # A warning of the device's own package is no law that does not hold.
    fixed = ["-q", "-W", "default", "-p", "no:cacheprovider", "--device", device]
    status = pytest.main([*fixed, *options], plugins=[recorder])
    if recorder.lost:
        return LOST
    ended = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED
    return 0 if status in ended else int(status)


# The primitives


def filled(primitive: Callable[..., Any], args: Sequence[Any], random: torch.Generator) -> list[Any]:
    """Arguments of the same shapes and dtypes that prove something: unit keys, decays, rates in (0, 1)."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return torch.randint(-127, 128, x.shape, generator=random)
        return torch.randn(x.shape, generator=random)

    def fill(name: str, x: Any) -> Any:
        if isinstance(x, W8A8):
            return W8A8(draw(x.weight).to(x.weight), (draw(x.scale).abs() / 127).to(x.scale))
        kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "q": partial(F.normalize, dim=-1),
            "k": partial(F.normalize, dim=-1),
            "g": lambda y: -F.softplus(y),
            "beta": torch.sigmoid,
        }
        return kinds.get(name, lambda y: y)(draw(x)).to(x)

    return [fill(name, x) for name, x in zip(inspect.signature(primitive).parameters, args, strict=False)]


def exactly(x: Any) -> Any:
    """An argument on the CPU, in float64 unless it is quantised."""
    if isinstance(x, W8A8):
        return W8A8(x.weight.cpu(), x.scale.cpu())
    return x.to("cpu", torch.float64)


def run_primitives(device: str, log: Path) -> int:
    """The worker of the primitives: for each implementation of each, whether it serves a typical call, and
    if it does its error against the definition in float64 and its time."""
    done, machine = set(entries_of(log)), gpu.machine_of(device)
    for primitive in sorted(PRIMITIVES, key=lambda function: function.__name__):
        args, keywords = sample_calls(device)[primitive.__name__]
        args = filled(primitive, args, torch.Generator().manual_seed(0))
        exact = primitive(*map(exactly, args), **keywords, impl="reference")
        exact = [y.double() for y in optree.tree_leaves(exact)]
        reasons = explain(primitive, *args, **keywords)
        taken = next(impl for impl, reason in reasons.items() if reason is None)
        for impl, reason in reasons.items():
            entry: Json = {
                "name": f"{primitive.__name__}-{impl}",
                "primitive": primitive.__name__,
                "impl": impl,
            }
            if entry["name"] in done:
                continue
            if reason is not None:
                say(log, {**entry, "outcome": "refuses", "message": reason})
                continue
            entry["taken"] = impl == taken
            say(log, {**entry, "outcome": BEGUN})
            call = partial(primitive, *args, **keywords, impl=impl)
            try:
                with torch.no_grad():
                    pairs = zip(optree.tree_leaves(call()), exact, strict=True)
                    entry["error"] = max(relative_rmse(x, y) for x, y in pairs)
                    wrong = gpu.beyond({"result": entry["error"]}, gpu.LIMIT)
                    if wrong is not None:
                        raise RuntimeError(wrong)
                    repeats = max(1, min(10, int(0.05 / machine.sample(call, 1))))
                    samples = interleave({impl: call}, 5, repeats, sample=machine.sample)[impl]
            except Exception as error:
                say(log, {**entry, "outcome": "failed", "message": gpu.reason_of(error)})
                if not alive(device):
                    return LOST
            else:
                times = {"ms": 1e3 * median(samples), "min_ms": 1e3 * min(samples)}
                say(log, {**entry, "outcome": PASSED, **times})
    return 0


# The benchmark


def benchmark(device: str, quick: bool, folder: Path, seconds: float = 1800.0) -> Json:
    """gpu.py's results on this device, without peers; as far as it came."""
    command = [sys.executable, "benchmarks/gpu.py", "--device", device, "--peers", "--regimes", "init"]
    command += ["--modes", "forward", "backward", "decode", "--budget-s", "600", "--output", str(folder)]
    command += ["--quick"] if quick else ["--rows", "1,8192,32", "4,4096,32"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
        ended = None if done.returncode == 0 else f"status {done.returncode}: {done.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        ended = f"no end after {seconds:g} s"
    path = folder / "gpu.json"
    return {**(json.loads(path.read_text()) if path.exists() else {}), "ended": ended}


# What the file says


def summary(report: Json) -> str:
    """The report as tables: what serves, the laws, what did not hold, times."""
    where = report["environment"]
    lines = [f"{name}: {number or 'not installed'}" for name, number in where["versions"].items()]
    parts = [", ".join(lines), "\n".join(where["devices"]), f"On {report['device']}: {where['device']}."]
    headers = ["primitive", "implementation", "outcome", "error", "ms"]
    parts.append(table(headers, map(primitive_row, report["primitives"]["entries"]), left=3))
    parts.append(table(["law", "implementation", "held", "worst error", "may be"], law_rows(report), left=2))
    parts += [f"{entry['name']}: {entry['outcome']}: {brief(entry)}" for entry in broken(report)]
    parts += [f"{name}: {report[name]['ended']}" for name in PARTS if report[name]["ended"]]
    if "ceilings" in report["benchmark"]:
        parts.append(benchmark_tables(report["benchmark"]))
    return "\n\n".join(parts)


PARTS = "primitives", "laws", "benchmark"


def primitive_row(entry: Json) -> list[str]:
    """A line of the table of primitives."""
    outcome: str = entry["outcome"]
    said = {"refuses": brief(entry), PASSED: "taken" if entry.get("taken") else "serves"}
    error, ms = (
        format(entry[key], style) if key in entry else "" for key, style in (("error", ".1e"), ("ms", ".3g"))
    )
    return [entry["primitive"], entry["impl"], said.get(outcome, outcome), error, ms]


def law_rows(report: Json) -> Iterator[list[str]]:
    """Of each law and implementation how many subjects it held for, and the error nearest to its bound."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for entry in report["laws"]["entries"]:
        impl = entry.get("impl", "") + (", emulated" if entry["emulated"] else "")
        groups.setdefault((entry.get("law", "other tests"), impl), []).append(entry)
    for (law, impl), group in groups.items():
        ran = [entry for entry in group if entry["outcome"] != "skipped"]
        held = f"{sum(entry['outcome'] == PASSED for entry in ran)} of {len(ran)}" if ran else "skipped"
        worst = max((e for e in ran if "error" in e), key=lambda e: e["error"] / e["bound"], default=None)
        yield [law, impl, held, *([f"{worst['error']:.1e}", f"{worst['bound']:.1e}"] if worst else ["", ""])]


def broken(report: Json) -> Iterable[Json]:
    """What neither held nor was refused or skipped."""
    entries = report["primitives"]["entries"] + report["laws"]["entries"]
    return [entry for entry in entries if entry["outcome"] not in (PASSED, "skipped", "refuses")]


def brief(entry: Json) -> str:
    """The first line of a message."""
    message: str = entry.get("message", "")
    return (message.strip().splitlines() or [""])[0]


# Command line


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a device does, in one file to send.")
    parser.add_argument("--device", default=best_device(), help="npu, cuda or cpu; the best one here")
    parser.add_argument("--out", type=Path, default=Path("build", "report.json"))
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes in the benchmark, as on a CPU always"
    )
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only these laws, as pytest's -k")
    parser.add_argument("--tests", nargs="+", help="files of tests in the place of the laws")
    parser.add_argument("--silence-s", type=float, default=SILENCE_S, help="when a law is taken for hung")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a report, run nothing")
    parser.add_argument("--worker", nargs=2, metavar=("PART", "LOG"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    kind, found = options.device.partition(":")[0], devices()
    if not (kind == "cpu" or options.show or options.worker or any(d.startswith(f"{kind}:") for d in found)):
        parser.error(f"--device {options.device} is none of the devices here:\n" + "\n".join(found))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report, anew after each part, and prints it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    device, on_cpu = options.device, torch.device(options.device).type == "cpu"
    if options.show:
        print(summary(json.loads(options.show.read_text())))
        return 0
    if options.worker:
        part, log = options.worker[0], Path(options.worker[1])
        if part == "primitives":
            return run_primitives(device, log)
        files = options.tests or ([LAWS] if on_cpu else [LAWS, REAL_SIZES])
        return run_tests(device, [*files, "-m", "not slow", "-k", options.k], log)

    report: Json = {"device": device, "environment": environment(device)}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            print(f"{part} on {device}", file=sys.stderr, flush=True)
            if part == "benchmark":
                report[part] = benchmark(device, options.quick or on_cpu, Path(folder))
            else:
                worker = [sys.executable, __file__, "--device", device, "-k", options.k]
                worker += ["--tests", *options.tests] if options.tests else []
                worker += ["--worker", part]
                found, ended = supervise(worker, Path(folder, part), options.silence_s)
                report[part] = {"entries": found, "ended": ended}
            gpu.write_json(options.out, report)
    print(summary(report))
    print(f"{options.out} is the file to send")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
