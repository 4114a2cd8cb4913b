"""The notebooks run from top to bottom at small sizes, hold no output, and show what they say."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from subjects import SUBJECTS

from kda_fn.primitives._primitive import PRIMITIVES

SCRIPTS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))
SWITCH = re.compile(r'(?<=# %% tags=\["parameters"\]\nSMALL = )False\b')


def cells_of(script: str) -> list[tuple[str, str]]:
    """Kind and source of each cell of a script in jupytext's percent format."""
    cells = []
    for cell in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, source = cell.partition("\n")
        if head == " [markdown]":
            cells.append(("markdown", re.sub(r"^# ?", "", source.strip(), flags=re.MULTILINE)))
        else:
            cells.append(("code", source.strip()))
    return cells


def assert_is_its_script(notebook: dict[str, Any], script: str) -> None:
    """Cell for cell, and without output and times; `make notebooks` sees to both."""
    cells = notebook["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == cells_of(script), "make notebooks writes it from the script"
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    shown = [c for c in code if c["outputs"] or c["execution_count"] or "execution" in c["metadata"]]
    assert code and not shown, "make notebooks clears its output"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script(path: Path) -> None:
    assert_is_its_script(json.loads(path.with_suffix(".ipynb").read_text()), path.read_text())


@pytest.mark.parametrize(
    ("changed", "noticed"),
    [
        ({"outputs": [{"output_type": "stream", "name": "stdout", "text": ["1"]}]}, "clears its output"),
        ({"execution_count": 1}, "clears its output"),
        ({"metadata": {"execution": {"iopub.status.busy": "2026"}}}, "clears its output"),
        ({"source": ["1 + 1"]}, "writes it from the script"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_notebook_that_is_not_is_noticed(changed: dict[str, Any], noticed: str) -> None:
    """Output that was left in one, and an edit in the browser alone."""
    notebook = json.loads(SCRIPTS[0].with_suffix(".ipynb").read_text())
    next(cell for cell in notebook["cells"] if cell["cell_type"] == "code").update(changed)
    with pytest.raises(AssertionError, match=noticed):
        assert_is_its_script(notebook, SCRIPTS[0].read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_first_code_cell_says_what_to_install(path: Path) -> None:
    """Before it imports anything, and of extras that there are."""
    first = next(source for kind, source in cells_of(path.read_text()) if kind == "code")
    before, _, _ = first.partition("import ")
    installs = re.findall(r"\.\[([a-z,]+)\]", before)
    assert "%pip install" in before and "notebooks" in installs
    extras = re.findall(r"^([a-z-]+) = \[", (path.parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    assert {extra for some in installs for extra in some.split(",")} <= set(extras)


def test_every_notebook_has_a_script() -> None:
    """None is edited in the browser alone."""
    assert SCRIPTS
    assert {path.stem for path in SCRIPTS[0].parent.glob("*.ipynb")} == {path.stem for path in SCRIPTS}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Any:
    """Runs a notebook at its small sizes: the names that it leaves behind, its figures under `figures`."""
    matplotlib.use("agg")
    figures: list[Any] = []
    monkeypatch.setattr(plt, "show", lambda: figures.append(plt.gcf()))

    def run_one(number: str, *, size: str = "True") -> dict[str, Any]:
        (path,) = (path for path in SCRIPTS if path.stem.startswith(number))
        small, switches = SWITCH.subn(size, path.read_text())
        assert switches == 1, "one parameter cell"
        with torch.random.fork_rng():
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(small, str(path), "exec"), names)
        for figure in figures:
            assert any(ax.get_title() for ax in figure.axes)
            assert all(ax.get_ylabel() or ax.get_xlabel() for ax in figure.axes)
        plt.close("all")
        return {**names, "figures": figures}

    return run_one


def test_01_the_same_numbers_three_ways(run: Any) -> None:
    """And the obvious formula fails where the notebook says, the safe one nowhere."""
    names = run("01")
    assert len(names["figures"]) == 1
    assert len(names["errors"]) == 3 and max(names["errors"].values()) < 1e-12
    assert names["o_kda"].abs().mean() > 1e-3
    decays, errors = names["decays"], {k: torch.tensor(v) for k, v in names["forgetting"].items()}
    weak, strong = decays * names["C"] < 80, decays * names["C"] > 100
    factorised, clamped = errors["exp(G) exp(-G)"], errors["the same, clamped at 80"]
    assert weak.any() and factorised[weak].max() < 2e-6 and clamped[weak].max() < 2e-6
    assert strong.any() and not factorised[strong].isfinite().any()
    assert clamped[strong].isfinite().all() and clamped[strong].min() > 0.5
    assert max(errors["difference first"].max(), errors["kda_fn.kda"].max()) < 2e-6
    assert names["difference"](names["o_forgot"][names["fresh"]], names["o_fresh"]) < 1e-12


def test_02_state_is_a_value(run: Any) -> None:
    """Decode, pieces and forks are one call; an edit fades; recall falls with distance and with decay."""
    names = run("02")
    assert len(names["figures"]) == 2
    assert max(names["decode_error"], names["resume_error"], names["fork_error"]) < 1e-5
    assert names["edit_effect"][0] > 0.1 > names["edit_effect"][-1]
    assert names["dy"][0].norm() > 100 * names["dy"][-1].norm()
    assert names["slopes"].A_log.abs().min() > 0
    recall = names["recall"]
    assert all(hits[:2].min() > 0.9 for hits in recall.values())
    assert all(hits[100:].mean() < 0.1 for hits in recall.values())
    assert recall[4].sum() < recall[16].sum() < recall[math.inf].sum()


def test_03_many_from_one_state(run: Any) -> None:
    """Best-of-N, beams, trees and packed prompts score what each alone scores from scratch."""
    names = run("03")
    assert len(names["figures"]) == 1
    assert max(names[f"{kind}_error"] for kind in ("best", "beam", "tree", "ragged")) < 1e-3
    assert len(set(map(tuple, names["history"].tolist()))) == names["beams"]
    assert names["scores"][names["best"]] == names["scores"].max() > names["scores"].min()
    used = names["pool"][0].recurrent_state.flatten(1).any(1)
    assert used.nonzero().flatten().tolist() == [1, 3, 9, 10, 11]
    assert not torch.equal(names["pool"][0].recurrent_state[10], names["pool"][0].recurrent_state[11])


def test_04_models_are_trained(run: Any) -> None:
    """Losses fall, rows' gradients add up, and every model learns more than chance."""
    names = run("04")
    assert len(names["figures"]) == 2
    assert all(losses[-1] < losses[0] - 1 for losses in names["curves"].values())
    assert names["mean_error"] < 1e-6 and all(scale > 0 for scale in names["scales"].values())
    chance = 1 / names["vocabulary"]
    assert all(min(right) > 2 * chance for right in names["recall_accuracy"].values())
    assert all(min(right[4]) > 0.8 for right in names["parity_accuracy"].values())


@pytest.mark.slow
def test_04_what_each_memory_can_learn(run: Any) -> None:
    """At full size three seeds of KDA recall 99 of 100 values; parity takes negative eigenvalues."""
    names = run("04", size="False")
    assert len(names["recall_accuracy"]["KDA"]) == 3 and min(names["recall_accuracy"]["KDA"]) >= 0.99
    parity = {kind: right[16] for kind, right in names["parity_accuracy"].items()}
    assert min(parity.pop("KDA, 0 < β < 2")) > 0.98
    assert max(map(max, parity.values())) < 0.85


def test_05_derivatives_are_right(run: Any) -> None:
    """Against closed forms, other transforms and finite differences; and the pictures show what is said."""
    names = run("05")
    assert len(names["figures"]) == 3
    exact = "linear", "modes", "decay", "half_life", "hvp", "symmetry"
    assert max(names[f"{name}_error"] for name in exact) < 1e-12
    assert names["difference_error"] < 1e-6 and names["future"] == 0
    assert abs(names["first"]) < 1e-12 and names["second"] > 0.9
    assert names["curvature"] == pytest.approx(names["largest"], rel=1e-3)
    assert names["by_log_h"].min() < -1e-3 and names["by_log_h"].max() < 1e-3
    assert names["remains"][0.5][-1].max() < names["remains"][0.0][-1].max()


def test_06_what_is_known_of_ascend(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pictures are docs/ascend.md, nothing is claimed for a device, and the report is one of here."""
    monkeypatch.chdir(SCRIPTS[0].parent)
    monkeypatch.setattr("kda_fn.__main__.best_device", lambda: "cpu")
    names = run("06")
    assert len(names["figures"]) == 3
    for rows, launches, size in ((names["forward"], 2, 3_378), (names["backward"], 9, 11_667)):
        kernels = [int(row[2].replace(",", "")) for row in rows[:-3]]
        assert len(kernels) == launches and abs(sum(kernels) - size) <= len(kernels)
        assert f"| {launches} | {size:,} |" in names["document"]
    assert names["emulated"]["kda"] == [1.7e-7, 2.5e-3, 3.2e-4]
    check = names["check"]
    assert set(check) == {primitive.__name__ for primitive in PRIMITIVES}
    assert check["kda"] == [True, True, True, False] and check["mla_prolog"] == [False, False, True, False]
    emulated = {subject.name.split()[0] for subject in SUBJECTS if not subject.is_layer}
    assert emulated == {name for name, row in check.items() if row[1]} - {"linear", "quantize_tokens"}
    assert (
        set(names["errors_here"]) == {"fallback", "reference"}
        and 0 < max(names["errors_here"].values()) < 2e-6
    )
    assert sum(names["operators"].values()) > 0
    assert len(names["laws"]) == 22 and {e["outcome"] for e in names["laws"]} <= {"passed", "skipped"}
    assert all(part["ended"] is None for part in (names["report"]["laws"], names["report"]["benchmark"]))


def test_06_says_where_to_run_it(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of a checkout its tables are not to be found."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="run it in a checkout"):
        run("06")


def test_07_a_checkpoint_layer_by_layer(run: Any) -> None:
    """What separates it from transformers is rounding, in every layer; a mistake shows from its own on."""
    names = run("07")
    assert len(names["figures"]) == 2
    assert names["same_bits"] and names["loaded_config"] == names["config"]
    agreement, mistake = (torch.tensor(names[name]) for name in ("agreement", "mistake"))
    rounding = torch.tensor(list(names["rounding"].values()))
    assert len(agreement) == names["config"].num_layers
    assert 0 < agreement.max() < 1e-5 and bool((agreement <= rounding.sum(0)).all())
    assert rounding.max() < 1e-5 and names["logits_error"] < 1e-5
    at = names["at"]
    assert at > 0 and mistake[:at].max() < 1e-5 and mistake[at:].min() > 1e-2
    assert 1e-3 < names["bfloat16"][0] < 3e-2
    assert torch.equal(names["ours_greedy"], names["expected"]) and len(names["expected"].unique()) > 5
    assert names["whole"].state + 1_000_000 * names["whole"].per_token == 8_107_417_600


def test_07_says_what_is_missing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers it stops at once, with what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "transformers==5.24.0"'):
        run("07")
