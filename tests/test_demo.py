"""The demo: each of its functions against an independent answer, and the whole of it on a small model."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    demo,
    init_kimi_linear,
    init_kimi_linear_state,
    kda_gate,
    kimi_linear,
)

SMALL = KimiLinearConfig(
    vocab_size=256,
    layer_types=("kda",) * 2,
    intermediate_size=32,
    tie_embeddings=True,
    kda=KDAConfig(hidden_size=32, num_heads=2, head_dim=8, output_gate="full_rank", chunk_size=32),
)
ROOT = Path(__file__).parents[1]
SIZES = {"CONFIG": SMALL, "ROWS": 4, "SEGMENT": 32, "PROMPT": 50, "CONTINUATION": 20}
DOUBLE = {
    name: partial(getattr(demo, name), dtype=torch.float64)
    for name in ("init_kimi_linear", "init_kimi_linear_state")
}
"""In float32 the last bits of a loss are other ones a few steps on."""


def tokens(text: bytes) -> torch.Tensor:
    """Byte values."""
    return torch.tensor(list(text))


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of a pytree."""
    return optree.tree_leaves(tree)


def seeded(seed: int = 0) -> torch.Generator:
    """A generator."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, batch and continuation that take no time."""
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    for name, value in SIZES.items():
        monkeypatch.setattr(demo, name, value)


@pytest.fixture
def double(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in float64, as the processes of `torchrun` compute."""
    for name, value in {**DOUBLE, "WARMUP": 5}.items():
        monkeypatch.setattr(demo, name, value)


# The text and the baselines


def test_text() -> None:
    """The same every time, of a size worth training on, and no paragraph twice."""
    text = demo.read_text()
    assert text == demo.read_text() and len(text) > 200_000
    paragraphs = text.decode().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 1000
    assert paragraphs[0].startswith('The "assert" statement')


def test_unigram() -> None:
    """Of "aab", with 1 added to each of 256 counts, b has 2 of 259; the first byte is not predicted."""
    assert demo.unigram_bits(tokens(b"aab"), tokens(b"ab"), add=1) == pytest.approx(-math.log2(2 / 259))
    expected = -(math.log2(2 / 259) + math.log2(3 / 259) + math.log2(1 / 259)) / 3
    assert demo.unigram_bits(tokens(b"aab"), tokens(b"zbaz"), add=1) == pytest.approx(expected)


def test_bigram() -> None:
    """In "aabac" an a is followed by an a, a b and a c: 2 of 259. A b by an a: 2 of 257. A z by nothing."""
    train = tokens(b"aabac")
    assert demo.bigram_bits(train, tokens(b"ab"), add=1) == pytest.approx(-math.log2(2 / 259))
    expected = -(math.log2(2 / 259) + math.log2(2 / 257) + math.log2(1 / 259) + math.log2(1 / 256)) / 4
    assert demo.bigram_bits(train, tokens(b"abazz"), add=1) == pytest.approx(expected)


# Training


def test_adamw_is_torchs() -> None:
    """torch.optim.AdamW, step for step, on a pytree and under a learning rate that changes."""
    generator = seeded()
    params: Any = {"a": torch.randn(3, 4, generator=generator).double(), "b": (torch.ones(5).double(),)}
    theirs = [p.clone().requires_grad_() for p in leaves(params)]
    optimizer = torch.optim.AdamW(theirs, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state, start = demo.init_adamw(params), params
    for step in range(8):
        lr = 0.01 * (step + 1)
        grads = optree.tree_map(lambda p: torch.randn(p.shape, generator=generator).double(), params)
        state, params = demo.adamw(state, params, grads, lr=lr, decay=0.1)
        for p, g in zip(theirs, leaves(grads), strict=True):
            p.grad = g
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for ours, p in zip(leaves(params), theirs, strict=True):
            torch.testing.assert_close(ours, p.detach(), rtol=1e-12, atol=1e-14)
    assert state.updates == 8
    moved = [(p - q).abs().min() for p, q in zip(*map(leaves, (params, start)), strict=True)]
    assert min(moved) > 1e-3


def test_clip() -> None:
    """A norm of 5 is scaled to 1 as a whole; a norm below the limit is left."""
    grads: Any = (torch.tensor([3.0]), {"x": torch.tensor([[4.0]])})
    assert [g.item() for g in leaves(demo.clip_by_global_norm(grads, 1.0))] == pytest.approx([0.6, 0.8])
    assert [g.item() for g in leaves(demo.clip_by_global_norm(grads, 6.0))] == [3.0, 4.0]


def test_learning_rate() -> None:
    """Up to the peak, and down to nothing."""
    rates = [demo.learning_rate(step, 1000) for step in range(1000)]
    peak = rates.index(max(rates))
    assert peak == demo.WARMUP - 1
    assert rates[peak] == pytest.approx(demo.LEARNING_RATE, rel=0.01)
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[0] == pytest.approx(demo.LEARNING_RATE / demo.WARMUP)
    assert 0 < rates[-1] < 1e-4 * demo.LEARNING_RATE


def test_loss_threads_the_state() -> None:
    """Two segments, the state carried over, give the loss of the whole; the empty state does not."""
    params, text = init_kimi_linear(SMALL, generator=seeded()), tokens(demo.read_text()[:101])
    empty = init_kimi_linear_state(SMALL)
    whole, _ = demo.loss(params, empty, text, config=SMALL)
    first, state = demo.loss(params, empty, text[:51], config=SMALL)
    second, _ = demo.loss(params, state, text[50:], config=SMALL)
    forgetful, _ = demo.loss(params, empty, text[50:], config=SMALL)
    assert ((first + second) / 2).item() == pytest.approx(whole.item(), rel=1e-5)
    assert abs(second - forgetful) > 1e-3


@pytest.mark.usefixtures("small")
def test_training_learns_and_is_reproducible() -> None:
    """One seed gives one run, to the bit, and another seed another."""
    text = tokens(demo.read_text()[:5000])
    params, losses = demo.train(text, 12, seeded(1), config=SMALL)
    again, same = demo.train(text, 12, seeded(1), config=SMALL)
    assert losses == same and len(losses) == 12
    assert all(map(torch.equal, leaves(params), leaves(again)))
    assert demo.train(text, 12, seeded(2), config=SMALL)[1] != losses
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.usefixtures("small")
def test_interrupted_training_returns_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C in the fourth step leaves the parameters and losses of three."""
    text = tokens(demo.read_text()[:5000])

    def rate(step: int, steps: int) -> float:
        if step == 3:
            raise KeyboardInterrupt
        return 0.01

    monkeypatch.setattr(demo, "learning_rate", rate)
    params, losses = demo.train(text, 100, seeded(), config=SMALL)
    shorter, expected = demo.train(text, 3, seeded(), config=SMALL)
    assert losses == expected and len(losses) == 3
    assert all(map(torch.equal, leaves(params), leaves(shorter)))


# Several processes


PROGRAM = """
import os, pathlib, sys
from kda_fn import demo
from test_demo import DOUBLE, SIZES

for name, value in {**SIZES, **DOUBLE, "WARMUP": 5}.items():
    setattr(demo, name, value)
demo.read_text = lambda: pathlib.Path("text").read_bytes()
pathlib.Path("process-" + os.environ["RANK"]).write_text(str(os.getpid()))
sys.exit(demo.main())
"""


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts so many processes of the small demo, in tmp_path; all are ended with the test."""
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    started = []
    (tmp_path / "program.py").write_text(PROGRAM)
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}

    def start(processes: int, *args: str) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc-per-node={processes}", "program.py", "--checkpoint=saved", *args]
        options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **options)
        started.append(run)
        return run

    yield start
    for run in started:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        for pipe in (run.stdout, run.stderr):
            pipe.close()


def losses_saved(folder: Path) -> list[float]:
    """Of the last checkpoint, read by torch itself."""
    found = demo.last_checkpoint(folder)
    assert found is not None
    losses = {".losses": torch.zeros(demo.step_of(found), dtype=torch.float64)}
    with pytest.warns(UserWarning, match="single process"):
        load(losses, checkpoint_id=found)
    return losses[".losses"].tolist()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (2, ["--context-parallel"]),
        (2, ["--head-parallel"]),
        (4, ["--context-parallel", "--head-parallel"]),
    ],
)
def test_processes_train_as_one(processes: int, flags: list[str], torchrun: Any, tmp_path: Path) -> None:
    """The losses of each step, and the report of the first process alone."""
    text = b"aabb" * 1500
    (tmp_path / "text").write_bytes(text)
    run = torchrun(processes, "--steps=50", *flags)
    output, errors = run.communicate(timeout=100)
    assert run.returncode == 0, output + errors
    assert output.count("\nheld out ") == output.count("\nfigure ") == 1 and "FAILED" not in output
    _, losses = demo.train(tokens(text[: len(text) * 9 // 10]), 50, seeded(), config=SMALL)
    assert losses[-1] < 0.5 < losses[0]
    assert losses_saved(tmp_path / "saved") == pytest.approx(losses, rel=1e-10)


@pytest.mark.usefixtures("double")
def test_a_lost_process_ends_the_run_which_goes_on(torchrun: Any, tmp_path: Path) -> None:
    """Killed, a process takes the others with it, which say so; the same command goes on from the checkpoint.
    So does one process alone."""
    text, saved, steps = demo.read_text()[:20_000], tmp_path / "saved", 80
    (tmp_path / "text").write_bytes(text)
    command = 2, f"--steps={steps}", "--checkpoint-every=10", "--context-parallel"
    run = torchrun(*command)
    deadline = time.monotonic() + 60
    while demo.last_checkpoint(saved) is None:
        assert time.monotonic() < deadline and run.poll() is None, run.communicate()
        time.sleep(0.01)
    os.kill(int((tmp_path / "process-1").read_text()), signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode != 0
    found = re.search(r"FAILED: process 0 has lost another and stops .*; the same .* of step (\d+)\n", errors)
    assert found is not None, errors
    last = demo.last_checkpoint(saved)
    assert last is not None and last.name == f"step-{int(found[1]):06}" and int(found[1]) < steps

    shutil.copytree(saved, tmp_path / "alone")
    output, errors = torchrun(*command).communicate(timeout=100)
    assert "held out" in output, output + errors
    assert f"| {found[1]}/{steps} [" in errors
    train = partial(demo.train, tokens(text[: len(text) * 9 // 10]), steps, config=SMALL)
    _, losses = train(seeded())
    assert len(losses_saved(saved)) == steps
    assert losses_saved(saved) == pytest.approx(losses, rel=1e-10)
    # The parameters come from the checkpoint, not from this seed.
    _, alone = train(seeded(5), checkpoint=tmp_path / "alone")
    assert alone == pytest.approx(losses, rel=1e-10)


@pytest.mark.usefixtures("small")
def test_a_checkpoint_is_exact(tmp_path: Path) -> None:
    """One process, stopped and resumed, ends where an uninterrupted one does, to the bit; half a checkpoint
    is none."""
    text = tokens(demo.read_text()[:5000])
    params, losses = demo.train(text, 12, seeded(), config=SMALL)
    rates = demo.learning_rate
    with pytest.MonkeyPatch.context() as patch:

        def stop(step: int, steps: int) -> float:
            if step == 9:
                raise KeyboardInterrupt
            return rates(step, steps)

        patch.setattr(demo, "learning_rate", stop)
        demo.train(text, 12, seeded(), config=SMALL, checkpoint=tmp_path, every=4)
    (tmp_path / "step-000011").mkdir()
    last = demo.last_checkpoint(tmp_path)
    assert last is not None and last.name == "step-000008"
    resumed, same = demo.train(text, 12, seeded(5), config=SMALL, checkpoint=tmp_path, every=4)
    assert same == losses and all(map(torch.equal, leaves(params), leaves(resumed)))


@pytest.mark.parametrize(
    ("world", "args", "words"),
    [
        ("2", [], "2 processes were started: give --context-parallel or --head-parallel"),
        ("3", ["--head-parallel"], "3 processes do not divide the model's 2 heads"),
        ("3", ["--head-parallel", "--context-parallel"], "3 processes do not divide the model's 2 heads"),
        ("1", ["--checkpoint-every", "0"], "--checkpoint-every must be at least 1, got 0"),
    ],
)
def test_processes_that_do_not_fit(
    world: str,
    args: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Said before they meet."""
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit):
        demo.main(args)
    assert words in capsys.readouterr().err


# Generation


def double_model() -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Parameters in float64, the state and logits after a prompt, and noise for five continuations."""
    params = init_kimi_linear(SMALL, generator=seeded(), dtype=torch.float64)
    empty = init_kimi_linear_state(SMALL, dtype=torch.float64)
    state, logits = kimi_linear(params, empty, tokens(b"The prompt."), config=SMALL)
    noise = torch.randn(5, 9, 256, generator=seeded(3)).double()
    return params, state, logits[-1], noise


def test_decode_is_prefill() -> None:
    """What `generate` returns is what one call over the prompt and the generated bytes returns."""
    params, state, logits, noise = double_model()
    end, (text, decoded) = demo.generate(params, state, logits, noise[0], config=SMALL)
    empty = init_kimi_linear_state(SMALL, dtype=torch.float64)
    whole_state, whole = kimi_linear(params, empty, torch.cat([tokens(b"The prompt."), text]), config=SMALL)
    torch.testing.assert_close(decoded, whole[-len(text) :], rtol=0, atol=1e-12)
    for a, b in zip(leaves(end), leaves(whole_state), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert decoded.std() > 0.1 and len(set(text.tolist())) > 1
    # Each byte is the noisy best of the logits before it.
    before = torch.cat([logits.unsqueeze(0), decoded[:-1]])
    assert torch.equal(text, (before / demo.TEMPERATURE + noise[0]).argmax(-1))


def test_vmap_over_noise_is_a_loop() -> None:
    """Continuations by vmap from one prefilled state are those decoded one by one."""
    params, state, logits, noise = double_model()
    kept = optree.tree_map(torch.clone, state)
    mapped = torch.func.vmap(partial(demo.generate, config=SMALL), in_dims=(None, None, None, 0))
    ends, (texts, decoded) = mapped(params, state, logits, noise)
    for n, row in enumerate(noise):
        end, (text, alone) = demo.generate(params, state, logits, row, config=SMALL)
        assert torch.equal(texts[n], text)
        torch.testing.assert_close(decoded[n], alone, rtol=0, atol=1e-12)
        for a, b in zip(leaves(ends), leaves(end), strict=True):
            torch.testing.assert_close(a[n], b, rtol=0, atol=1e-12)
    assert len({tuple(text.tolist()) for text in texts}) == 5
    assert all(map(torch.equal, leaves(state), leaves(kept)))


def test_relative_rmse() -> None:
    """|x - y| / |y|; nothing is close to zeros."""
    assert demo.relative_rmse(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert math.isnan(demo.relative_rmse(torch.zeros(2), torch.zeros(2)))


# The figure


def test_half_life_in_closed_form() -> None:
    """With no logits the decay is exp(A_log) softplus(dt_bias) at every byte."""
    params = init_kimi_linear(SMALL, generator=seeded())
    blocks = []
    for block in params.blocks:
        attention: Any = block.attention
        decay = torch.zeros_like(attention.decay)
        blocks.append(block._replace(attention=attention._replace(decay=decay)))
    measured = demo.half_lives(params._replace(blocks=tuple(blocks)), tokens(b"Some text."), config=SMALL)
    assert measured.shape == (2, 2, 8)
    for layer, block in zip(measured, blocks, strict=True):
        rate = block.attention.A_log.exp().unsqueeze(-1) * block.attention.dt_bias.exp().log1p().unflatten(
            0, (2, 8)
        )
        torch.testing.assert_close(layer, math.log(2) / rate, rtol=1e-5, atol=0)


def test_half_lives_are_of_the_models_own_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decays that `half_lives` averages are those inside `kimi_linear`."""
    layer, seen = sys.modules["kda_fn.layers.kimi_delta_attention"], []
    attention = layer.fused_kda

    def watched(
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        raw: torch.Tensor,
        beta: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(kda_gate(raw, A_log, dt_bias))
        return attention(state, q, k, v, raw, beta, A_log, dt_bias, **options)

    params, text = init_kimi_linear(SMALL, generator=seeded()), tokens(demo.read_text()[:300])
    measured = demo.half_lives(params, text, config=SMALL)
    monkeypatch.setattr(layer, "fused_kda", watched)
    kimi_linear(params, init_kimi_linear_state(SMALL), text, config=SMALL)
    assert len(seen) == 2 and not torch.equal(seen[0], seen[1])
    for half_life, g in zip(measured, seen, strict=True):
        torch.testing.assert_close(half_life, math.log(2) / -g.mean(0))


# The whole


def numbers(label: str, output: str) -> list[float]:
    """The numbers that follow a label."""
    return [float(found) for found in re.findall(rf"{label} ([\d.e+-]+\d)", output)]


@pytest.mark.usefixtures("small")
def test_a_run_that_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a text that a bigram model cannot tell and a memory can: status 0, a figure, a full report."""
    monkeypatch.setattr(demo, "read_text", lambda: b"aabb" * 1500)
    monkeypatch.setattr(demo, "WARMUP", 5)
    figure = tmp_path / "figure.png"
    status = demo.main(["--steps", "50", "--out", str(figure)])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "FAILED" not in output

    (unigram,), (bigram,), (model,) = (numbers(name, output) for name in ("unigram", "bigram", "KDA"))
    assert unigram == pytest.approx(1, abs=0.02) and bigram == pytest.approx(1, abs=0.02)
    assert 0 < model < 0.7
    # Of the logits and of both layers' states.
    assert len(numbers("relative RMSE", output)) == 3
    assert all(0 <= error < 1e-5 for error in numbers("relative RMSE", output))
    assert all(0 <= difference < 1e-3 for difference in numbers("largest difference", output))
    assert f"has {demo.CONTINUATION} of its {demo.CONTINUATION} bytes" in output
    assert re.search(r"continuation 3\n    \| [ab]+\n", output)

    data = figure.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and 30_000 < len(data) < 1_000_000
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1800 and 600 < height < 1200


@pytest.mark.usefixtures("small")
def test_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps on real text: all is reported, the model is worse than the bigram, and the status says so."""
    text = demo.read_text()[:50_000]
    monkeypatch.setattr(demo, "read_text", lambda: text)
    runs = []
    for _ in range(2):
        assert demo.main(["--steps", "2", "--out", str(tmp_path / "figure.png")]) == 1
        output = capsys.readouterr().out
        assert output.splitlines()[-1].startswith("FAILED")
        runs.append(re.sub(r"in \d+ s", "", output))
    assert runs[0] == runs[1]
    assert 4 < numbers("unigram", runs[0])[0] < 5.5
    assert 3 < numbers("bigram", runs[0])[0] < 4
    assert numbers("KDA", runs[0])[0] > 6
    assert all(0 <= error < 1e-5 for error in numbers("relative RMSE", runs[0]))
    assert (tmp_path / "figure.png").stat().st_size > 30_000


@pytest.mark.parametrize("package", ["matplotlib", "tqdm"])
def test_missing_extras_are_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work, with the way to install them."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stopped:
        demo.main([])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert package in error and 'pip install "kda_fn[demo]"' in error


def test_steps_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    """No step, no report."""
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


def test_a_figure_has_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else that would be found after minutes of training."""
    with pytest.raises(SystemExit):
        demo.main(["--out", str(tmp_path / "no" / "figure.png")])
    assert f"--out must lie in a folder that exists, got {tmp_path}/no/figure.png" in capsys.readouterr().err
