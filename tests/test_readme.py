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


def test_the_example_runs() -> None:
    """Decode and the vmapped branches are what one call on the whole gives; the gradient is one of params."""
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    layer, params, start = names["layer"], names["params"], kda_fn.init_state(names["config"])
    seen = torch.cat([names["prompt"], names["token"]])
    assert_close(names["y_next"], layer(params, start, seen)[1][-1:], 1e-5)
    beam = layer(params, start, torch.cat([seen, names["beams"][3]]))
    assert_close([names["ys"][3], names["states"].recurrent_state[3]], [beam[1][-1:], beam[0][1]], 1e-5)
    assert type(names["slopes"]) is kda_fn.KDAParams
    slopes: Any = names["slopes"][:4]
    assert all(bool(slope.any()) for slope in slopes)


def test_a_checkpoint_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second listing, on a small model of that name and without a GPU."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1].replace('"cuda"', '"cpu"')
    params = random_params(KIMI_LINEAR, torch.bfloat16)
    save_kimi_linear(tmp_path / "Kimi-Linear-48B-A3B-Instruct", params, config=KIMI_LINEAR)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"prompt": tokens_of(5)}
    exec(code, names)
    assert names["text"].shape == (200,) and len(names["text"].unique()) > 5


def test_a_batch_of_requests() -> None:
    """The listing of `kda_fn.serving`: the prompt ends in its own state, and two tokens are accepted."""
    code = next(c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "plan_batch" in c)
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
