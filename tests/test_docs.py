"""What documentation shows is what happens: examples and pages run, the site is built, its links lead on."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import kda_fn
from kda_fn import distributed, serving, transition
from kda_fn.layers import checkpoint, moe

ROOT = Path(__file__).parents[1]
# README has its own tests.
PAGES = sorted((*ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLIC = (moe, distributed, transition, checkpoint, serving, kda_fn)

# What examples take for granted, as docs/api/index.md says.
SCOPE: dict[str, Any] = {"torch": torch, "TemporaryDirectory": TemporaryDirectory}
for module in PUBLIC:
    SCOPE |= {name: getattr(module, name) for name in module.__all__}
FUNCTIONS = {name: value for name, value in SCOPE.items() if inspect.isfunction(value)}


def run_examples(text: str, names: dict[str, Any], title: str) -> list[doctest.Example]:
    """Runs what follows `>>>` and holds it to what the text shows: of an error, its type and message."""
    test = doctest.DocTestParser().get_doctest(text, names, title, None, None)
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append, clear_globs=False)
    names |= test.globs
    assert not told, "".join(told)
    return test.examples


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_an_example_that_runs(name: str, one_thread: None) -> None:
    """The example calls the function, shows at least one result, and the results are those shown."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        examples = run_examples(inspect.getdoc(FUNCTIONS[name]) or "", dict(SCOPE), name)
    assert any(f"{name}(" in step.source for step in examples), "no example"
    assert any(step.want for step in examples), "nothing is shown"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """From top to bottom in one namespace; a `text` block is what the block before it printed."""
    monkeypatch.chdir(tmp_path)
    text, names, printed = page.read_text(), {"__name__": "page"}, ""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for language, code in BLOCK.findall(text):
            if language == "text":
                assert code == printed
            elif language == "pycon":
                run_examples(code, names, page.name)
            else:
                assert language == "python", f"a block in {language} is not tested"
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(code, str(page), "exec"), names)
                printed = out.getvalue()
    # An error is shown by what raises it.
    assert not re.search(r"^\w+Error: ", BLOCK.sub("", text), re.MULTILINE)


def test_there_is_code_on_the_pages() -> None:
    """The test above tests something, errors too."""
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    assert len([code for language, code in blocks if language == "python"]) > 15
    assert len([code for _, code in blocks if "Traceback" in code]) >= 3


def test_every_public_name_has_its_entry() -> None:
    """The API's pages name what is public, each once."""
    pages = "".join(page.read_text() for page in PAGES if page.parent.name == "api")
    entries = [entry.rsplit(".", 1)[1] for entry in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)]
    public = {name for name in SCOPE if name not in ("torch", "TemporaryDirectory")}
    assert sorted(entries) == sorted(public)


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="needs the docs extra")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every link between pages, to a heading too, leads somewhere; the notebooks and README are in it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr  # a warning is an error
    for notebook in ROOT.glob("notebooks/*.py"):
        assert (tmp_path / "notebooks" / notebook.stem / "index.html").exists()
    assert "beta_t (v_t - " in (tmp_path / "docs" / "api" / "primitives" / "index.html").read_text()
    # All files that a page asks for are there.
    for page in tmp_path.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#:?]+)(?:#[^"]*)?"', page.read_text()):
            start = tmp_path if target.startswith("/") else page.parent
            assert page.name == "404.html" or (start / target.lstrip("/")).exists(), f"{page}: {target}"
