"""What the README shows is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import assert_close
from test_kimi_linear import KIMI_LINEAR, random_params, tokens_of

import kda_fn
from kda_fn.layers.checkpoint import save_kimi_linear

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


LISTINGS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def listing(what: str) -> str:
    """The code block that holds these words."""
    return next(code for code in LISTINGS if what in code)


def test_every_listing_is_run() -> None:
    """By the tests below, and that of a mesh by tests/test_distributed.py."""
    words = "slopes", "torch.export", "load_kimi_linear", "init_device_mesh", "plan_batch"
    assert {listing(what) for what in words} == set(LISTINGS)


def test_the_example_runs() -> None:
    """Decode and the vmapped branches are what one call on the whole gives; the gradient is one of params."""
    names: dict[str, Any] = {}
    exec(listing("slopes"), names)
    layer, params, start = names["layer"], names["params"], kda_fn.init_state(names["config"])
    seen = torch.cat([names["prompt"], names["token"]])
    assert_close(names["y_next"], layer(params, start, seen)[1][-1:], 1e-5)
    beam = layer(params, start, torch.cat([seen, names["beams"][3]]))
    assert_close([names["ys"][3], names["states"].recurrent_state[3]], [beam[1][-1:], beam[0][1]], 1e-5)
    assert type(names["slopes"]) is kda_fn.KDAParams
    slopes: Any = names["slopes"][:4]
    assert all(bool(slope.any()) for slope in slopes)


def test_a_checkpoint_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing of the loader, on a small model of that name and without a GPU."""
    code = listing("load_kimi_linear").replace('"cuda"', '"cpu"')
    params = random_params(KIMI_LINEAR, torch.bfloat16)
    save_kimi_linear(tmp_path / "Kimi-Linear-48B-A3B-Instruct", params, config=KIMI_LINEAR)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"prompt": tokens_of(5)}
    exec(code, names)
    assert names["text"].shape == (200,) and len(names["text"].unique()) > 5


def test_compiled_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled, and what was saved and loaded, equal the eager layer."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    code = listing("torch.export").replace("torch.randn(2, 30, 64)", "(x := torch.randn(2, 30, 64))")
    exec(code.replace("fullgraph=True", 'fullgraph=True, backend="aot_eager"'), names)
    params, config, state = names["params"], names["config"], names["state"]
    start = kda_fn.init_state(config, (2,))
    expected = kda_fn.kimi_delta_attention(params, start, names["x"], config=config)
    assert_close([*state, names["y"]], [*expected[0], expected[1]], 1e-5)
    x = torch.randn(2, 1, 64)
    state, y = kda_fn.kimi_delta_attention(params, expected[0], x, config=config)
    program = torch.export.load("step.pt2").module()
    assert_close([*program(*expected[0], x)], [*state, y], 1e-6)


def test_a_batch_of_requests() -> None:
    """The listing of `kda_fn.serving`: the prompt ends in its own state, and two tokens are accepted."""
    code = listing("plan_batch")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(code.replace("torch.randn(9, 64)", "(x := torch.randn(9, 64))"), names)
    params, config, start = names["params"], names["config"], kda_fn.init_state(names["config"])
    expected, _ = kda_fn.kimi_delta_attention(params, start, names["x"][:5], config=config)
    assert_close([leaf[0] for leaf in names["pool"]], tuple(expected), 1e-5)
    assert_close(names["state"].conv_state, names["states"].conv_state[1], 1e-6)


def test_its_commands_and_files_exist() -> None:
    """Every make target, linked file and picture is there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    assert all((ROOT / link).exists() for link in links)


def test_every_public_function_of_the_table_exists() -> None:
    """The table of functions names what the library exports."""
    table = README.split("## The functions")[1].split("##")[0]
    names = [
        name
        for row in table.splitlines()
        if row.startswith("|")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert len(names) > 10
    assert all(hasattr(kda_fn, name) for name in names)
