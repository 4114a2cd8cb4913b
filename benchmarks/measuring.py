"""What the benchmarks share: interleaved rounds, errors, floors, tables."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

__all__ = [
    "Job",
    "Json",
    "Samples",
    "flop_per_token_and_head",
    "interleave",
    "progress",
    "relative_rmse",
    "round_ratio",
    "table",
    "version_of",
    "wall_seconds",
]

Json: TypeAlias = dict[str, Any]
Samples: TypeAlias = dict[str, list[float]]
Job: TypeAlias = Callable[[], object]
Case = TypeVar("Case")


def wall_seconds(job: Job, repeats: int) -> float:
    """Seconds per call, of `repeats` calls one after another."""
    start = time.perf_counter()
    for _ in range(repeats):
        job()
    return (time.perf_counter() - start) / repeats


def interleave(
    jobs: dict[str, Job],
    rounds: int,
    repeats: int = 1,
    *,
    sample: Callable[[Job, int], float] = wall_seconds,
) -> Samples:
    """Seconds per call of every job, one sample a round; the first job of a round changes with the round.

    An untimed call goes before each sample: the job before it left its own data in the caches, and a peer
    that frees gigabytes makes the allocator return memory which the next job would have to ask for again.
    """
    samples: Samples = {name: [] for name in jobs}
    names = list(jobs)
    for i in range(rounds):
        first = i % max(1, len(names))
        for name in names[first:] + names[:first]:
            jobs[name]()
            samples[name].append(sample(jobs[name], repeats))
    return samples


def round_ratio(samples: Samples, name: str, baseline: str) -> float:
    """How many times the baseline a job takes: the ratio inside each round, then the median."""
    return median(mine / its for mine, its in zip(samples[name], samples[baseline], strict=True))


def relative_rmse(x: Tensor, expected: Tensor) -> float:
    """Root mean square of the error over that of the expected values."""
    error = x.to(expected.device, torch.float64) - expected
    return float(error.norm() / expected.norm())


def flop_per_token_and_head(K: int, V: int, C: int = 64) -> float:
    """Least arithmetic of the chunked form, triangles counted as such: 140.6 kFLOP at K = V = 128, C = 64."""
    return 6 * K * V + 2 * C * K + C * (K + V) + C * V + C * C / 3


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def progress(what: str, cases: Iterable[Case]) -> Iterator[Case]:
    """The cases, announced on stderr one by one."""
    for case in cases:
        print(f"{what} {case}", file=sys.stderr, flush=True)
        yield case


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A markdown table, the first columns left, the others right."""
    rule = ["---"] * left + ["---:"] * (len(headers) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headers, rule, *rows)) + "\n"
