"""What documentation shows is what happens: every public function has an example, and every example runs."""

from __future__ import annotations

import doctest
import inspect
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import kda_fn
from kda_fn import distributed, serving, transition
from kda_fn.layers import checkpoint, moe

# What examples take for granted, as docs/api/index.md says.
SCOPE: dict[str, Any] = {"torch": torch, "TemporaryDirectory": TemporaryDirectory}
for module in (moe, distributed, transition, checkpoint, serving, kda_fn):
    SCOPE |= {name: getattr(module, name) for name in module.__all__}
FUNCTIONS = {name: value for name, value in SCOPE.items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_an_example_that_runs(name: str, one_thread: None) -> None:
    """The example calls the function, shows at least one result, and the results are those shown."""
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    example = doctest.DocTestParser().get_doctest(doc, dict(SCOPE), name, None, None)
    assert any(f"{name}(" in step.source for step in example.examples), "no example"
    assert any(step.want for step in example.examples), "nothing is shown"
    told: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert not told, "".join(told)
