"""`python -m kda_fn`: every primitive and every implementation is named, with a reason or as serving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kda_fn
from kda_fn import __main__ as program
from kda_fn import kda
from kda_fn.primitives._primitive import PREFERENCE, PRIMITIVES, Implementation

ROOT = Path(__file__).parent.parent
NAMES = sorted(function.__name__ for function in PRIMITIVES)


def blocks(output: str) -> dict[str, list[str]]:
    """The lines under each primitive's name."""
    found = {}
    for block in output.split("\n\n"):
        name, *lines = block.strip().splitlines()
        if name in NAMES:
            found[name] = lines
    return found


@pytest.mark.parametrize("function", PRIMITIVES, ids=lambda function: function.__name__)
def test_every_primitive_has_a_sample_call(function: Any) -> None:
    """One that the primitive takes; whoever adds a primitive adds its call to `sample_calls`."""
    args, keywords = program.sample_calls("cpu")[function.__name__]
    results = function(*args, **keywords)
    dtypes = torch.float32, *([torch.int8] if function.__name__ == "quantize_tokens" else [])
    for result in results if isinstance(results, tuple) else (results,):
        assert result.numel() > 0 and result.dtype in dtypes


def test_no_sample_call_is_left_over() -> None:
    """Every sample is of a primitive."""
    assert sorted(program.sample_calls("cpu")) == NAMES


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    """For each primitive, each implementation in order of preference, and the one that is taken."""
    assert program.main() == 0
    output = capsys.readouterr().out
    assert kda_fn.__version__ in output and torch.__version__ in output
    told = blocks(output)
    assert sorted(told) == NAMES and len(NAMES) >= 7
    device = program.best_device()
    for function, primitive in PRIMITIVES.items():
        lines = told[function.__name__]
        assert [line.split()[0] for line in lines] == list(PREFERENCE)
        args, keywords = program.sample_calls(device)[function.__name__]
        reasons = kda_fn.explain(function, *args, **keywords)
        first = next(impl for impl in PREFERENCE if reasons[impl] is None)
        assert [line.split()[0] for line in lines if "impl=None takes it" in line] == [first]
        for line, impl in zip(lines, PREFERENCE, strict=True):
            reason = reasons[impl]
            assert (" serves" in line) if reason is None else (reason in line), primitive.name


def test_reasons_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's own words, and the next implementation in its place; or the kernel, where it serves."""
    args, keywords = program.sample_calls("cpu")["kda"]
    implementations = PRIMITIVES[kda].implementations
    refuses = Implementation(kda, lambda *_args, **_keywords: "it wants other tensors")
    monkeypatch.setitem(implementations, "triton", refuses)
    lines = program.served(kda, args, keywords)
    assert "no: it wants other tensors" in lines[1 + PREFERENCE.index("triton")]
    assert "impl=None takes it" in lines[1 + PREFERENCE.index("fallback")]

    monkeypatch.setitem(implementations, "triton", Implementation(kda))
    lines = program.served(kda, args, keywords)
    assert "impl=None takes it" in lines[1 + PREFERENCE.index("triton")]
    assert lines[1 + PREFERENCE.index("fallback")].split() == ["fallback", "serves"]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU always; NPUs by name where torch has them, or what it takes to have them."""
    monkeypatch.setattr(program, "version", lambda package: None)
    monkeypatch.setattr(program, "npus", list)
    assert f"{torch.get_num_threads()} threads" in program.devices()[0]
    assert "torch_npu" in program.devices()[-1] and "kda_fn[ascend]" in program.devices()[-1]
    monkeypatch.setattr(program, "version", lambda package: "2.11.0")
    assert "finds no device" in program.devices()[-1]
    monkeypatch.undo()

    monkeypatch.setattr(program, "version", lambda package: "2.11.0")
    fake = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda i: f"Ascend910B{i}"
    )
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    assert [line.split() for line in program.devices()[-2:]] == [
        ["npu:0", "Ascend910B0"],
        ["npu:1", "Ascend910B1"],
    ]
    assert program.best_device() == "npu"


def test_version() -> None:
    """Of what is installed, and None of what is not."""
    assert program.version("optree")
    assert program.version("no-package-has-this-name-1f3a") is None


def test_as_a_program() -> None:
    """In an interpreter of its own, with no warning."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "kda_fn"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(blocks(done.stdout)) == NAMES
    for package in ("kda_fn", "python", "torch", "optree", "triton", "torch_npu"):
        assert any(line.split()[:1] == [package] for line in done.stdout.splitlines()), package
    for impl in PREFERENCE:
        assert impl in done.stdout
