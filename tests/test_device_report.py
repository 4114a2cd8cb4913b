"""benchmarks/device_report.py, on the CPU: what its file holds, and that no device can keep it from being
written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scripts
import torch

from kda_fn import explain
from kda_fn.__main__ import sample_calls
from kda_fn.primitives._primitive import PREFERENCE, PRIMITIVES

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "device_report.py"


@pytest.fixture(scope="module")
def device_report() -> ModuleType:
    return scripts.load(SCRIPT)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers find the library where this process did."""
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_file_holds_all_of_it(
    device_report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every implementation of every primitive, the laws asked for with their errors, times; and it prints."""
    path = tmp_path / "new" / "report.json"
    chosen = "agrees and kda_step and not triton"
    assert device_report.main(["--device", "cpu", "--out", str(path), "-k", chosen]) == 0
    printed = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["environment"]["device"] and report["environment"]["devices"]
    assert [report[part]["ended"] for part in device_report.PARTS] == [None] * 3

    found = {(e["primitive"], e["impl"]): e for e in report["primitives"]["entries"]}
    assert set(found) == {(p.__name__, impl) for p in PRIMITIVES for impl in PREFERENCE}
    for primitive in PRIMITIVES:
        args, keywords = sample_calls("cpu")[primitive.__name__]
        reasons = explain(primitive, *args, **keywords)
        for impl, reason in reasons.items():
            entry = found[primitive.__name__, impl]
            if reason is not None:
                assert (entry["outcome"], entry["message"]) == ("refuses", reason)
            else:
                assert entry["outcome"] == "passed" and entry["ms"] >= entry["min_ms"] > 0
                assert entry["error"] < 1e-4 and (
                    entry["error"] > 0 or primitive.__name__ == "quantize_tokens"
                )
        taken = [impl for impl in reasons if found[primitive.__name__, impl].get("taken")]
        assert taken == [next(impl for impl, reason in reasons.items() if reason is None)]

    laws = report["laws"]["entries"]
    assert {(e["law"], e["impl"]) for e in laws} == {
        (f"agrees in {dtype}", impl)
        for dtype in ("float64", "float32", "bfloat16", "float16")
        for impl in ("reference", "fallback")
    }
    for entry in laws:
        assert entry["outcome"] == "passed" and 0 < entry["error"] <= entry["bound"] and entry["seconds"] > 0
        assert entry["subject"] == "kda_step" and not entry["emulated"]
    timed = [case for case in report["benchmark"]["cases"] if case["mode"] == "backward"]
    assert timed and all(case["contenders"]["kda_fn"]["eager"]["ms"] > 0 for case in timed)

    assert "| agrees in float64 | fallback | 1 of 1 |" in printed and "| kda | fallback | taken |" in printed
    assert device_report.main(["--show", str(path)]) == 0
    assert capsys.readouterr().out.strip() in printed


def test_a_device_that_is_not_here(device_report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused before any work, and those that are here are named."""
    with pytest.raises(SystemExit):
        device_report.main(["--device", "dsp"])
    said = capsys.readouterr().err
    assert "--device dsp is none of the devices here" in said and "threads" in said


MISBEHAVING = """
import __main__, os, time
import pytest

def test_a_holds(): pass
def test_b_ends_the_process(): os._exit(7)
def test_c_never_answers(): time.sleep(60)
def test_d_is_wrong(): assert 1 == 2, "not so"
def test_e_loses_the_device():
    __main__.alive = lambda device: False
    raise RuntimeError("device error")
def test_f_is_not_for_here(): pytest.skip("no such unit")
def test_g_holds_too(): assert __main__.alive("cpu")
"""


def supervised(device_report: ModuleType, folder: Path, source: str) -> tuple[dict[str, Any], str | None]:
    """What is found of a file of tests, by the names of these."""
    (folder / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')")
    (folder / "test_it.py").write_text(source)
    worker = [sys.executable, str(SCRIPT), "--device", "cpu", "--tests", str(folder / "test_it.py")]
    found, ended = device_report.supervise([*worker, "--worker", "laws"], folder / "log", 15.0)
    return {entry["name"].split("::")[1]: entry for entry in found}, ended


def test_a_law_that_ends_its_process_is_an_entry(device_report: ModuleType, tmp_path: Path) -> None:
    """So is one that hangs, fails, or loses the device; those after it still run, in another process."""
    found, ended = supervised(device_report, tmp_path, MISBEHAVING)
    outcomes = {name.split("_")[1]: entry["outcome"] for name, entry in found.items()}
    assert outcomes == {
        "a": "passed",
        "b": "crashed",
        "c": "hung",
        "d": "failed",
        "e": "failed",
        "f": "skipped",
        "g": "passed",
    }
    assert ended is None
    assert found["test_b_ends_the_process"]["status"] == 7
    assert "not so" in found["test_d_is_wrong"]["message"]
    assert found["test_e_loses_the_device"]["message"] == "RuntimeError: device error"
    assert "no such unit" in found["test_f_is_not_for_here"]["message"]
    broken = device_report.broken({"primitives": {"entries": []}, "laws": {"entries": list(found.values())}})
    assert [entry["name"].split("::test_")[1][0] for entry in broken] == ["b", "c", "d", "e"]


def test_a_worker_that_cannot_start_is_given_up(device_report: ModuleType, tmp_path: Path) -> None:
    """With its own words, and not started for ever."""
    found, ended = supervised(device_report, tmp_path, "import no_such_module_7c1e")
    assert not found
    assert ended is not None and "status 2" in ended and "no_such_module_7c1e" in ended


def test_time_of_a_device_is_from_idle_to_idle(device_report: ModuleType, monkeypatch: Any) -> None:
    """Where there are no events: what is queued before does not count, what is queued by the call does."""
    happened = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: happened.append("wait"))
    machine = device_report.gpu.machine_of("meta")
    assert machine.sample(lambda: happened.append("call"), 3) > 0
    assert happened == ["wait", "call", "call", "call", "wait"]
