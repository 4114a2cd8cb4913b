"""The notebooks run from top to bottom, hold no output, and show what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "clear the output"
    return "\n".join("".join(cell["source"]) for cell in code)


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the notebook leaves behind."""
    matplotlib.use("agg")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    names: dict[str, Any] = {}
    exec(compile(code_of(path), str(path), "exec"), names)
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(path, monkeypatch)


def test_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode equals one call, the scan is the loop, and the effect of a nudge fades."""
    path = next(path for path in NOTEBOOKS if path.stem == "first_steps")
    names = run(path, monkeypatch)
    assert names["difference"] < 1e-5
    assert torch.equal(names["scan_ys"], torch.stack(names["ys"]))
    effect = names["dy"].norm(dim=-1)
    assert effect[-5:].max() < effect[0]
