"""The kernels compile for Ascend at their full sizes, and docs/ascend.md says what they are now.

The largest kernel takes half a minute to compile: one test does all that a target and a dtype need, so that
none is compiled twice.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import scripts
import torch
from emulator import CAPACITY, TARGETS, CompileError
from laws import VALUE

ROOT = Path(__file__).parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

pytestmark = pytest.mark.usefixtures("emulation")


@pytest.fixture(scope="module")
def ascend() -> ModuleType:
    return scripts.load(ROOT / "benchmarks" / "ascend.py")


@pytest.fixture(scope="module")
def document() -> dict[str, list[list[str]]]:
    """The table rows of docs/ascend.md by the last line of text before them."""
    found: dict[str, list[list[str]]] = {}
    text = ""
    for line in (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            found.setdefault(text, []).append([cell.strip(" `*") for cell in line.strip("|").split("|")])
        elif line:
            text = line
    return {text: rows[2:] for text, rows in found.items()}


def rows_after(document: dict[str, list[list[str]]], text: str) -> list[list[str]]:
    (rows,) = (rows for before, rows in document.items() if before.startswith(text))
    return rows


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        # Each dtype, and each target's own numbers; the other two take as long again.
        ("bf16", "Ascend910B3"),
        ("fp32", "Ascend910_9382"),
        pytest.param("bf16", "Ascend910_9382", marks=pytest.mark.slow),
        pytest.param("fp32", "Ascend910B3", marks=pytest.mark.slow),
    ],
)
def test_every_case_compiles(
    ascend: ModuleType, document: dict[str, list[list[str]]], dtype: str, target: str
) -> None:
    """No on-chip memory overflows, and the document has each launch's programs and its share of each."""

    def of_target(cell: str) -> str:
        return cell.split(" / ")[list(TARGETS).index(target)] if " / " in cell else cell

    measured, wrong = [], []
    for case in ascend.CASES:
        try:
            launches = ascend.measure(case, DTYPES[dtype], target)
        except CompileError as error:
            wrong.append(f"{case.name}: {error}")
            continue
        for launch in launches:
            used = launch.compiled.used
            assert (launch.compiled.target, launch.compiled.kernel) == (target, launch.kernel)
            assert all(used[memory] <= size for memory, size in CAPACITY.items()), case.name
            shares = (f"{100 * used[memory] / size:.0f}" for memory, size in CAPACITY.items())
            measured.append([case.name, launch.kernel, str(math.prod(launch.grid)), *shares])
    assert not wrong, "\n".join(wrong)
    written = rows_after(document, f"In {dtype}:")
    assert [[*row[:2], *map(of_target, row[2:])] for row in written] == measured, "run `make ascend`"


def test_every_call_is_in_the_document(ascend: ModuleType, document: dict[str, list[list[str]]]) -> None:
    """With its launches and bytes of now."""
    measured = []
    for case in ascend.CASES:
        by_dtype = [ascend.measure(case, dtype, "Ascend910B3", compile=False) for dtype in DTYPES.values()]
        sizes = [sum(launch.bytes for launch in launches) for launches in by_dtype]
        counts = {len(launches) for launches in by_dtype}
        each = [f"{size / case.rows:,.0f}" for size in sizes]
        measured.append([case.name, *map(str, counts), *(f"{size / 1e6:,.1f}" for size in sizes), *each])
        if "decode" in case.name or "step" in case.name:
            assert counts == {1}, case.name
    written = rows_after(document, "the weights of convolution")
    assert [[row[0], *row[2:]] for row in written] == measured, "run `make ascend`"


def test_yardstick(ascend: ModuleType, document: dict[str, list[list[str]]]) -> None:
    """A layer's launches and bytes stay under half of what FLA's Ascend backend takes."""
    limits = (
        ("given, summed over", 3, 1282, 3500),
        ("Backward, which is given", 9, 2308, 14_000),
    )
    peers = ["12", "11,142", "1,282"], ["17", "31,492", "2,308"]
    for launches, (before, most, floor, bytes_), known in zip(ascend.yardstick(), limits, peers, strict=True):
        each = sum(launch.bytes for launch in launches) / (4096 * 32)
        assert len(launches) <= most
        assert floor < each <= bytes_
        *rows, ours, peer, least = rows_after(document, before)
        assert [row[0] for row in rows] == [launch.kernel for launch in launches]
        assert ours[1:] == [str(len(launches)), f"{each:,.0f}"]
        assert [*peer[1:], least[2]] == known


def test_emulated_errors_are_within_the_laws(
    ascend: ModuleType, document: dict[str, list[list[str]]]
) -> None:
    """Those written; `test_laws.py` emulates the kernels anew."""
    rows = rows_after(document, "and 129 tokens")
    assert [row[0] for row in rows] == [small.name for small in ascend.SMALL]
    for name, *errors in rows:
        for dtype, error in zip(ascend.EMULATED, errors, strict=True):
            assert 0 < float(error) <= VALUE[dtype], name


def test_strong_gates_are_strong(ascend: ModuleType) -> None:
    g = ascend._strong(torch.full((1, 200, 2, 64), -0.5))
    for value in (-20.0, -1000.0, -math.inf):
        assert 0.02 < (g == value).double().mean() < 0.05


def test_the_document_says_what_it_rests_on() -> None:
    text = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
    for words in (
        "has run on an Ascend NPU",
        "*Compiled* means",
        "*Emulated* means",
        "It is not machine code",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 120
