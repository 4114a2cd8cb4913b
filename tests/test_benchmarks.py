"""benchmarks/cpu.py and serving.py run, peers compute what the recurrence does, memory follows its law."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scripts
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import kda_fn

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "cpu.py"


@pytest.fixture(scope="module")
def cpu() -> ModuleType:
    return scripts.load(SCRIPT)


def has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def agrees_with_float64(cpu: ModuleType, contenders: dict, *, steps: int) -> None:
    """Every contender's prefill, and its decode step where it has one, at 2e-6 as for the library's own."""
    prompt, token = cpu.make_inputs(2, 128, 3, 32, 16), cpu.make_inputs(2, 1, 3, 32, 16)
    runs = {name: (lambda c=c: c.run(prompt)) for name, c in contenders.items()}
    cpu.check(cpu.errors(prompt, runs), limit=2e-6)
    decodes = {name: (lambda c=c: cpu._with_time(c.step(token))) for name, c in contenders.items() if c.step}
    assert len(decodes) == steps
    cpu.check(cpu.errors(token, decodes), limit=2e-6)


def test_everything_is_measured_and_reported(cpu: ModuleType, tmp_path: Path) -> None:
    plan = cpu.QUICK._replace(shapes=((1, 64, 1),), decode_batches=(1,), rounds=1)
    ours = {name: c for name, c in cpu.our_contenders().items() if name != cpu.COMPILED}
    missing = {"absent-peer": "No module named 'absent_peer'"}
    results = json.loads(json.dumps(cpu.measure(plan, ours, missing)))

    text = cpu.report(results)
    assert "missing: absent-peer (No module named 'absent_peer')" in text
    names = {cpu.OURS, cpu.LOOP}
    assert set(results["forward"][0]["contenders"]) == names
    assert set(results["decode"][0]["contenders"]) == names | {cpu.VMAPPED, cpu.STATE_COPY}
    assert set(results["forward"][0]["forward_backward"]) == {cpu.OURS}
    assert set(results["gates"][0]["regimes"]) == set(cpu.REGIMES)
    for name in (*names, cpu.VMAPPED, *cpu.REGIMES, "bfloat16, forward + backward"):
        assert f"| {name} |" in text

    cpu.plot(results, tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").stat().st_size > 10_000


def test_a_contender_that_computes_something_else_is_refused(cpu: ModuleType) -> None:
    inputs = cpu.make_inputs(1, 64, 1, 16, 16)
    ours = cpu.our_contenders()[cpu.OURS]
    wrong = {"no scale": lambda: ours.run(inputs._replace(q=inputs.q * 16**0.5))}
    with pytest.raises(RuntimeError, match="no scale: error_output"):
        cpu.check(cpu.errors(inputs, wrong))


def test_a_missing_peer_is_named(cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found, missing = cpu.contenders()
    assert set(found) == {cpu.OURS, cpu.COMPILED, cpu.LOOP}
    assert set(missing) == {"transformers", "fla-core"}


def test_our_contenders_agree_with_float64(cpu: ModuleType) -> None:
    agrees_with_float64(cpu, cpu.our_contenders(), steps=3)


def test_transformers_agrees_with_float64(cpu: ModuleType) -> None:
    contenders, missing = cpu.contenders()
    assert "transformers" not in missing
    found = {name: c for name, c in contenders.items() if name.startswith("transformers")}
    assert {"transformers chunk", "transformers recurrent"} <= set(found)
    agrees_with_float64(cpu, found, steps=len(found) // 2)


@pytest.mark.skipif(not has("fla-core"), reason="fla-core is not installed (extra `peers`)")
def test_fla_agrees_with_float64(cpu: ModuleType) -> None:
    contenders = cpu.fla_contenders()
    assert set(contenders) == {"FLA naive chunk", "FLA naive recurrent"}
    agrees_with_float64(cpu, contenders, steps=1)


def test_least_arithmetic_and_traffic_are_the_published_ones(cpu: ModuleType) -> None:
    assert cpu.flop_per_token_and_head(128, 128) == pytest.approx(140.6e3, rel=1e-3)
    bf16_vectors = 1282  # per token and head; here they are float32
    assert cpu.step_bytes_per_head(128, 128) == 2 * 4 * 128 * 128 + 2 * bf16_vectors


@pytest.mark.parametrize("regime", ["init", "medium", "denormal", "strong", "vanishing", "-inf"])
def test_regimes_of_gates_are_what_they_say(cpu: ModuleType, regime: str) -> None:
    torch.manual_seed(0)
    g = cpu.gates(regime, 1, 64, 2, 32)
    smallest_normal = torch.finfo(torch.float32).tiny
    typical = g.median().item()
    assert (g <= 0).all()
    assert regime in cpu.REGIMES
    if regime == "init":
        assert g.isfinite().all() and -0.1 < typical < -1e-3
    if regime == "-inf":
        assert 0 < g.isinf().float().mean() < 0.02
    if regime == "denormal":
        assert 0 < g.double().sum(1).exp().max() < smallest_normal
    if regime == "vanishing":
        assert 0 < g.double().exp().max() < smallest_normal
    if regime in ("medium", "strong"):
        assert typical == pytest.approx({"medium": -1, "strong": -20}[regime], rel=0.1)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_prefill_keeps_its_outputs_and_nothing_else(cpu: ModuleType) -> None:
    prefill = cpu.memory_in_fresh_process(10_000, "forward")
    assert prefill["extra_bytes"] >= prefill["output_bytes"]
    assert prefill["state_storage_bytes"] == prefill["state_bytes"]
    assert prefill["output_storage_bytes"] == prefill["output_bytes"]
    assert not prefill["shares_memory"]


class _LiveBytes(TorchDispatchMode):
    """The most bytes, inputs among them, that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        storages = [x.untyped_storage() for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._alive |= {StorageWeakRef(storage): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def test_memory_grows_with_the_tokens_alone(cpu: ModuleType) -> None:
    """Counted, not read from the operating system: beyond the working set, peak memory is linear in T."""

    def peak(T: int) -> int:
        inputs = cpu.lean_inputs(T, 4, 64, 64)
        with torch.no_grad(), _LiveBytes() as live:
            kda_fn.kda(*inputs, impl="fallback")
        return live.peak

    first, second, third = (peak(T) for T in (6144, 8192, 10240))
    assert first > 6144 * 4 * 64 * 4
    assert third - second == pytest.approx(second - first, rel=0.01)


def test_batches_of_requests_are_timed() -> None:
    """Every pair of benchmarks/serving.py runs."""
    serving = scripts.load(SCRIPT.with_name("serving.py"))
    with torch.no_grad():
        jobs = serving.jobs(kda_fn.KDAConfig(hidden_size=16, num_heads=1, head_dim=8))
        assert len(jobs) == 4
        for together, alone in jobs.values():
            together()
            alone()
