"""benchmarks/gpu.py, without a GPU: what it compares, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import scripts
import torch
from laws import assert_close
from oracles import torch_oracles as oracles

import kda_fn

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
SIX = [(gate, regime) for gate in ("softplus", "bounded") for regime in ("init", "random", "long")]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return scripts.load(SCRIPT)


@pytest.fixture(scope="module")
def tiny(gpu: ModuleType) -> Any:
    """A plan of one case of each mode, but two of the forward."""
    return gpu.QUICK._replace(
        rows=((1, 33, 2),),
        few_heads=((2, 16, 1),),
        decode_batches=(3,),
        accuracy=(1, 20, 2),
        accuracy_gradients=(1, 12, 2),
        long_gradients=(1, 70, 1),
        gates=("bounded",),
        regimes=("init",),
    )


@pytest.fixture
def machine(gpu: ModuleType) -> Any:
    """A device on which every call takes two milliseconds, and a graph is what was called."""

    def sample(job: Any, _repeats: int) -> float:
        job()
        return 2e-3

    def capture(call: Any) -> Any:
        return call, call()

    def nothing() -> None:
        pass

    return gpu.Machine(torch.device("cpu"), nothing, sample, capture, lambda _: 10**9, nothing)


def oracle(x: Any, lower_bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final state from equations that share nothing with the library."""
    q, k = (oracles.l2_norm(y, eps=1e-6) for y in (x.q, x.k))
    g = oracles.kda_gate(x.raw, x.A_log, x.dt_bias, lower_bound=lower_bound)
    state, o = oracles.kda(x.state, q, k, x.v, g, torch.sigmoid(x.beta.double()))
    return o, state


def measured(
    gpu: ModuleType, plan: Any, machine: Any, field: Any, missing: Any = None, **options: Any
) -> Any:
    """The results, by way of JSON, and the state of the file after each writing."""
    written: list[Any] = []
    write = lambda results: written.append(json.loads(json.dumps(results)))  # noqa: E731
    gpu.measure(plan, machine, field, missing or {}, write, **options)
    return written[-1], written


# What is compared


def test_the_cases_and_their_order(gpu: ModuleType) -> None:
    """The first row with everything, then forwards, backwards, decode, and few heads: forward only."""
    plan = gpu.Plan()
    cases = gpu.cases(plan)
    assert len(cases) == len(set(cases))
    groups = list(dict.fromkeys((c.mode, c.shape) for c in cases))
    main, others = plan.rows[0], plan.rows[1:]
    assert main == (1, 8192, 32)
    assert set(others) == {(1, 8192, 96), (4, 4096, 32), (1, 32_768, 32), (32, 512, 32)}
    assert groups == [
        ("accuracy", (1, 1024, 8)),
        ("forward", main),
        ("backward", main),
        *(("forward", row) for row in others),
        ("gradients", (1, 32_768, 8)),
        *(("backward", row) for row in others),
        *(("decode", (B, 1, 32)) for B in (1, 16, 64, 256)),
        *(("forward", row) for row in ((1, 32_768, 4), (1, 131_072, 8))),
    ]
    for mode, shape in groups:
        found = [(c.gate, c.regime) for c in cases if (c.mode, c.shape) == (mode, shape)]
        assert found == ([x for x in SIX if x[1] == "init"] if mode == "decode" else SIX)


def test_options_choose_among_the_cases(gpu: ModuleType) -> None:
    chosen = "--rows 1,8192,96 1,32768,4 --regimes long --gates bounded --modes forward backward --rounds 7"
    plan = gpu.plan_of(gpu.parse(chosen.split()))
    assert plan.rounds == 7
    assert [(c.mode, c.shape) for c in gpu.cases(plan)] == [
        ("accuracy", (1, 1024, 8)),
        ("forward", (1, 8192, 96)),
        ("backward", (1, 8192, 96)),
        ("forward", (1, 32_768, 4)),
    ]
    assert {(c.gate, c.regime) for c in gpu.cases(plan)} == {("bounded", "long")}


@pytest.mark.parametrize(
    ("gate", "shortest", "longest"),
    [("softplus", 1e4, 3e4), ("bounded", 1e3, 1e4)],
    ids=["softplus", "bounded"],
)
def test_regimes_remember_what_they_say(gpu: ModuleType, gate: str, shortest: float, longest: float) -> None:
    """Half-lives in tokens, of the median channel, and the draws that make them."""
    half_life = {}
    for regime in gpu.REGIMES:
        x = gpu.make_inputs((1, 64, 16), 64, regime=regime, device="cpu")
        g = kda_fn.kda_gate(x.raw, x.A_log, x.dt_bias, lower_bound=gpu.GATES[gate])
        half_life[regime] = math.log(0.5) / g.mean((0, 1)).median().item()
        raw = x.raw.float()
        assert raw.mean().item() == pytest.approx(0, abs=0.02)
        assert raw.std().item() == pytest.approx(1 if regime == "random" else 0.3, rel=0.02)
        assert {y.dtype for y in x[1:6]} == {torch.bfloat16}
        assert {y.dtype for y in (x.state, x.A_log, x.dt_bias)} == {torch.float32}
        if regime == "random":
            for y in (x.A_log, x.dt_bias):
                assert y.min() >= 0 and y.max() < 1 and y.mean().item() == pytest.approx(0.5, abs=0.25)
        else:
            assert not x.A_log.any()
    # 23 halvings are the precision of a float32: some 16 tokens and all is forgotten.
    assert half_life["random"] * 23 < 16
    assert shortest < half_life["long"] < longest
    if gate == "softplus":
        assert 20 < half_life["init"] < 200
    rate = torch.nn.functional.softplus(gpu.make_inputs((1, 1, 64), 64, regime="init", device="cpu").dt_bias)
    assert 1e-3 <= rate.min() < 1.2e-3 and 0.08 < rate.max() <= 0.1001
    assert rate.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.1)


def test_inputs_are_seeded_and_not_normalised(gpu: ModuleType) -> None:
    first, second = (gpu.make_inputs((2, 8, 3), 16, regime="random", device="cpu") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert [tuple(x.shape) for x in first] == [
        (2, 3, 16, 16), *[(2, 8, 3, 16)] * 4, (2, 8, 3), (3,), (48,)
    ]  # fmt: skip
    assert first.q.float().norm(dim=-1).min() > 1.5
    assert (first.beta < 0).any()


def test_the_floors(gpu: ModuleType) -> None:
    """1,282 and 2,308 bytes and 140.6 kFLOP per token and head, and the states."""
    rates = {"copy_bytes_per_s": 1e12, "matmul_flop_per_s": 1e14}
    state = 4 * 128 * 128
    forward, backward = (
        gpu.floors_of(gpu.Case(mode, (3, 100, 7), "bounded", "init"), 128, rates)
        for mode in ("forward", "backward")
    )
    assert forward["least_bytes"] == 21 * (100 * 1282 + 2 * state)
    assert backward["least_bytes"] == 21 * (100 * (1282 + 2308) + 5 * state)
    assert forward["least_flop"] == pytest.approx(2100 * 140.6e3, rel=1e-3)
    assert backward["least_flop"] == 3 * forward["least_flop"]
    assert forward["copy_floor_ms"] == pytest.approx(forward["least_bytes"] / 1e9)
    assert forward["matmul_floor_ms"] == pytest.approx(forward["least_flop"] / 1e11)


# Accuracy


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("impl", ["reference", "fallback"])
def test_what_contenders_are_held_to_is_the_recurrence(gpu: ModuleType, gate: str, impl: str) -> None:
    """In float64, values to 1e-12 and gradients to 1e-10, against equations of their own."""
    x = gpu.make_inputs((2, 6, 2), 8, regime="random", device="cpu")
    bound = gpu.GATES[gate]
    assert_close(gpu.exact_values(x, gate, impl), oracle(x, bound), 1e-12)
    leaves = gpu.leaves_of(gpu.Inputs(*map(gpu.wide, x)))
    upstream = gpu.cotangents(x)
    expected = torch.autograd.grad(oracle(leaves, bound), leaves, [y.double() for y in upstream])
    assert_close(gpu.exact_gradients(x, gate, upstream, impl), expected, 1e-10)


@pytest.mark.parametrize("regime", ["init", "random", "long"])
def test_our_errors_are_those_of_bf16(gpu: ModuleType, regime: str) -> None:
    x = gpu.make_inputs((1, 96, 2), 16, regime=regime, device="cpu")
    ours, upstream = gpu.our_contender(), gpu.cotangents(x)
    exact = gpu.exact_values(x, "softplus", "reference")
    slopes = gpu.exact_gradients(x, "softplus", upstream, "reference")
    errors = gpu.value_errors(gpu.values(ours, x, "softplus"), exact)
    assert set(errors) == {"o", "state"} and 1e-4 < max(errors.values()) < 1e-2
    errors = gpu.gradient_errors(ours, x, "softplus", upstream, slopes)
    assert set(errors) == set(x._fields) and 1e-4 < max(errors.values()) < 2e-2
    with pytest.raises(NotImplementedError, match="forward only"):
        gpu.gradient_errors(ours._replace(backward=False), x, "softplus", upstream, slopes)


def test_an_error_is_refused_where_it_matters(gpu: ModuleType) -> None:
    fine = {"errors": {"o": 0.01, "state": 0.01}, "gradients": {"q": 0.01, "A_log": 0.2}}
    assert gpu.refusal(fine, 0.05, backward=False) is None
    reason = gpu.refusal(fine, 0.05, backward=True)
    assert reason is not None and "gradient of A_log 2.0e-01" in reason and " q " not in reason
    assert gpu.refusal(fine, 0.5, backward=True) is None
    broken = {"errors": {"o": math.nan, "state": 0.01}, "gradients": {"reason": "forward only"}}
    assert "o nan" in str(gpu.refusal(broken, 0.05, backward=False))
    assert gpu.refusal(broken, 0.05, backward=True) == "forward only"


# Measuring


def test_everything_is_measured(gpu: ModuleType, tiny: Any, machine: Any) -> None:
    """Every contender in every case: with a time, or with the reason."""

    def raises(_x: Any, _bound: Any) -> Any:
        raise NotImplementedError("bounded gate only\nand more")

    ours = gpu.our_contender()

    def late(x: Any, bound: Any) -> Any:
        call = ours.prepare(x, bound)
        return lambda: tuple(0.5 * y for y in call())

    field = {
        "kda_fn": ours,
        "FLA": gpu.Contender(raises, raises, True),
        "cuDNN": gpu.Contender(late, ours.prepare),
    }
    results, _ = measured(gpu, tiny, machine, field, {"FlashKDA": "ModuleNotFoundError: no"})
    by_mode = {e["mode"]: e["contenders"] for e in results["cases"]}
    assert set(by_mode) == {"accuracy", *gpu.MODES}
    assert all(set(rows) == {*field, "FlashKDA"} for rows in by_mode.values())
    for rows in by_mode.values():
        assert rows["FLA"] == {"reason": "NotImplementedError: bounded gate only"}
        assert rows["FlashKDA"] == {"reason": "ModuleNotFoundError: no"}
    for mode, kinds in {
        "forward": ["eager", "graph"],
        "backward": ["eager"],
        "decode": ["eager", "graph"],
    }.items():
        for kind in kinds:
            timed = by_mode[mode]["kda_fn"][kind]
            assert timed["ms"] == pytest.approx(2) and timed["times_ours"] == pytest.approx(1)
    assert by_mode["backward"]["kda_fn"]["peak_bytes"] == 10**9
    # Half of the result is another function, at a single token it is right.
    assert "relative error beyond 0.05: o 5.0e-01" in by_mode["forward"]["cuDNN"]["reason"]
    assert by_mode["decode"]["cuDNN"]["graph"]["ms"] == pytest.approx(2)
    assert max(by_mode["accuracy"]["kda_fn"]["gradients"].values()) < 0.02
    assert set(by_mode["gradients"]["kda_fn"]["gradients"]) == set(gpu.Inputs._fields)
    text = gpu.reasons(results)
    assert "   2 x FLA, forward: NotImplementedError: bounded gate only\n" in text
    assert "| bounded | init |" in gpu.errors_table(results)


def test_a_replay_that_computes_nothing_is_no_time(gpu: ModuleType, tiny: Any, machine: Any) -> None:
    def empty(call: Any) -> Any:
        return call, tuple(torch.zeros_like(y) for y in call())

    plan = tiny._replace(modes=("forward",), few_heads=())
    results, _ = measured(gpu, plan, machine._replace(capture=empty), {"kda_fn": gpu.our_contender()})
    (row,) = (e["contenders"]["kda_fn"] for e in results["cases"] if e["mode"] == "forward")
    assert "a replay differs" in row["graph"]["reason"]
    assert row["eager"]["ms"] == pytest.approx(2)
    assert "| 1, 33, 2 | bounded | – / 2* / – |" in gpu.report(results)
    # Nothing of the backward was asked for.
    assert results["cases"][0]["contenders"]["kda_fn"]["gradients"] == {"reason": "not asked for"}


def test_the_file_is_written_after_every_case(gpu: ModuleType, tiny: Any, machine: Any) -> None:
    _, written = measured(gpu, tiny, machine, {"kda_fn": gpu.our_contender()})
    total = len(gpu.cases(tiny))
    left = [sum(e.get("not_run") == "not reached" for e in results["cases"]) for results in written]
    assert left == [*range(total - 1, -1, -1), 0]
    assert all(len(results["cases"]) == total for results in written)
    assert {"ceilings", "ceilings_after"} < set(written[-1])


def test_a_budget_leaves_the_rest_as_not_run(gpu: ModuleType, tiny: Any, machine: Any) -> None:
    now = iter(range(0, 1000, 10))
    clock = partial(next, now)
    results, _ = measured(gpu, tiny, machine, {"kda_fn": gpu.our_contender()}, budget_s=60, clock=clock)
    reasons = [e.get("not_run") for e in results["cases"]]
    ran = reasons.index("the budget of 60 s ran out")
    assert 0 < ran < len(reasons)
    assert reasons == [None] * ran + ["the budget of 60 s ran out"] * (len(reasons) - ran)


def test_a_device_that_fails_ends_the_run_with_what_it_had(gpu: ModuleType, tiny: Any, machine: Any) -> None:
    calls = 0

    def fails(x: Any, bound: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("illegal memory access")
        return ours.prepare(x, bound)

    def lost() -> None:
        raise RuntimeError("the device is lost")

    ours = gpu.our_contender()
    written: list[Any] = []
    broken, field = machine._replace(synchronize=lost), {"kda_fn": ours._replace(prepare=fails)}
    with pytest.raises(RuntimeError, match="the device is lost"):
        gpu.measure(tiny, broken, field, {}, lambda results: written.append(json.dumps(results)))
    results = json.loads(written[-1])
    assert [e.get("not_run") for e in results["cases"]][:3] == [
        None,
        None,
        "RuntimeError: the device is lost",
    ]


def test_a_case_that_fails_is_one_case_and_nothing_unchecked_is_timed(
    gpu: ModuleType, tiny: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_run: Any, _case: Any) -> Any:
        raise MemoryError("out of memory")

    monkeypatch.setattr(gpu, "measure_accuracy", fails)
    results, _ = measured(gpu, tiny, machine, {"kda_fn": gpu.our_contender()})
    first, *others = results["cases"]
    assert first["not_run"] == "MemoryError: out of memory"
    assert not any("not_run" in e for e in others)
    rows = {e["mode"]: e["contenders"]["kda_fn"] for e in others}
    assert rows["forward"] == rows["backward"] == {"reason": "its accuracy is not known"}
    assert "ms" in rows["decode"]["eager"]


def test_a_contender_that_cannot_be_imported_is_named(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fla.ops.kda", "cudnn.linear_attention", "flash_kda"):
        monkeypatch.setitem(sys.modules, name, None)
    found, missing = gpu.contenders(gpu.LOADERS)
    assert set(found) == {"kda_fn"}
    assert set(missing) == {"FLA", "cuDNN", "FlashKDA"}
    assert "flash_kda" in missing["FlashKDA"]


# The peers' conventions, as their documentation has them


@pytest.mark.parametrize("peer", ["FLA", "cuDNN", "FlashKDA"])
def test_a_peer_gets_its_own_layout(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    """Stand-ins with the peers' signatures and layouts, computed by the oracle, agree with it in ours."""

    def fla(q: Any, k: Any, v: Any, g: Any, beta: Any, *, lower_bound: Any, **options: Any) -> Any:
        for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"):
            assert options.pop(name)
        assert options.pop("output_final_state")
        assert options.pop("safe_gate", False) == (lower_bound is not None and T > 1)
        state, A_log, dt_bias = (options.pop(name) for name in ("initial_state", "A_log", "dt_bias"))
        assert not options
        return oracle(gpu.Inputs(state, q, k, v, g, beta, A_log, dt_bias), lower_bound)

    def cudnn(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, **options: Any) -> Any:
        assert g.dtype == beta.dtype == torch.float32 and cu_seqlens.dtype == torch.int32
        assert cu_seqlens.tolist() == [0, T, 2 * T]
        names = "use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel safe_gate output_final_state"
        assert all(options.pop(name) for name in names.split())
        tensors = (y.unflatten(0, (2, T)) for y in (q, k, v, g, beta))
        state = options.pop("initial_state")
        assert state.is_contiguous()
        A_log, dt_bias = options.pop("a_log"), options.pop("dt_bias")
        assert dt_bias.shape == (H, K)
        x = gpu.Inputs(state.mT, *tensors, A_log, dt_bias.flatten())
        o, final_state = oracle(x, options.pop("gate_lower_bound"))
        assert not options
        return o.flatten(0, 1), final_state.mT

    def flash(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, out: Any, **options: Any) -> None:
        assert scale == K**-0.5
        A_log, dt_bias = options["A_log"], options["dt_bias"].flatten()
        x = gpu.Inputs(options["initial_state"].mT, q, k, v, g, beta, A_log, dt_bias)
        o, final_state = oracle(x, options["lower_bound"])
        out.copy_(o)
        options["final_state"].copy_(final_state.mT)

    modules = {
        "fla.ops.kda": SimpleNamespace(chunk_kda=fla, fused_recurrent_kda=fla),
        "cudnn.linear_attention": SimpleNamespace(kimi_delta_attention=cudnn),
        "flash_kda": SimpleNamespace(fwd=flash),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    found, missing = gpu.contenders([peer])
    assert not missing
    B, H, K = 2, 3, 8
    for T in (5, 1):
        x = gpu.make_inputs((B, T, H), K, regime="init", device="cpu")
        for gate in gpu.GATES:
            if peer != "FLA" and gate == "softplus":
                with pytest.raises(NotImplementedError, match="bounded gate only"):
                    gpu.values(found[peer], x, gate)
                continue
            errors = gpu.value_errors(
                gpu.values(found[peer], x, gate, step=T == 1), gpu.exact_values(x, gate, "reference")
            )
            assert max(errors.values()) < 5e-3
    assert found[peer].backward == (peer == "FLA")


# Compiling beforehand


def test_prewarming_runs_every_kind_of_call_once(gpu: ModuleType) -> None:
    calls = gpu.prewarm_calls(gpu.Plan())
    assert len(calls) == len(set(calls))
    timed = {(c.mode, c.shape, c.gate) for c in gpu.cases(gpu.Plan()) if c.mode in gpu.MODES[:3]}
    assert timed < {(c.mode, c.shape, c.gate) for c in calls}
    assert {c.mode for c in calls} == set(gpu.MODES[:3])
    assert ("backward", (1, 512, 8)) in {(c.mode, c.shape) for c in calls}
    forward = gpu.Plan(modes=("forward",))
    assert {c.mode for c in gpu.prewarm_calls(forward)} == {"forward"}


def test_prewarming_shares_out_the_autotuning(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Autotuner:
        def prune_configs(self, _keywords: Any) -> list[int]:
            return [0, 1, 2, 3, 4]

        def check_disk_cache(self, _key: Any, _configs: Any, _benchmark: Any) -> bool:
            raise AssertionError

    module = SimpleNamespace(Autotuner=Autotuner)
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", module)  # pyright: ignore[reportArgumentType]
    gpu.take_share_of_autotuning(1, 3)
    assert Autotuner().prune_configs({}) == [1, 4]
    gpu.take_share_of_autotuning(7, 13)
    assert Autotuner().prune_configs({}) == [1]
    ran: list[str] = []
    tuner: Any = Autotuner()
    assert not tuner.check_disk_cache("key", [], lambda: ran.append("benchmark"))
    assert tuner.do_bench(lambda: ran.append("kernel"), quantiles=(0.5, 0.2, 0.8)) == [0.0, 0.0, 0.0]
    assert ran == ["benchmark", "kernel"]


def test_a_share_goes_on_after_a_failure(
    gpu: ModuleType,
    tiny: Any,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[Any] = []

    def fails(x: Any, bound: Any) -> Any:
        seen.append(tuple(x.q.shape))
        raise RuntimeError("out of resource")

    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda _: None)
    peer = gpu.Contender(fails, fails, backward=True)
    calls = gpu.prewarm_calls(tiny)
    gpu.prewarm_share(0, 2, tiny, machine, {"FLA": peer._replace(autotuned=True)})
    assert len(seen) == len(calls) > 4
    seen.clear()
    for share in range(3):
        gpu.prewarm_share(share, 3, tiny, machine, {"FLA": peer})
    assert len(seen) == len(calls)
    assert "FLA: RuntimeError: out of resource" in capsys.readouterr().err


# Reports and the command line


def test_the_picture_and_the_block_of_the_readme(gpu: ModuleType, machine: Any, tmp_path: Path) -> None:
    """From the JSON alone."""
    plan = gpu.QUICK._replace(few_heads=(), accuracy=(1, 8, 1), accuracy_gradients=(1, 8, 1))

    def quick(x: Any, _bound: Any) -> Any:
        rest = sum(y.sum() for y in x)
        return lambda: (x.v + 0 * rest, x.state + 0 * rest)

    peer = gpu.Contender(quick, quick)
    field = {"kda_fn": peer._replace(backward=True), "FLA": peer._replace(backward=True), "cuDNN": peer}
    missing = {"FlashKDA": "ModuleNotFoundError: no"}
    results, _ = measured(gpu, plan, machine, field, missing, limit=math.inf)
    results["environment"] |= {"device": "Some GPU", "date": "2026-01-02T03:04:05+00:00", "l2_bytes": 10**9}

    gpu.plot(results, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000

    block = gpu.report(results)
    assert "One Some GPU, 2026-01-02 (torch" in block
    assert "Not measured: FlashKDA (ModuleNotFoundError: no)" in block
    assert "| B, T, H | gate | kda_fn | FLA | cuDNN |" in block
    assert "| 1, 128, 2 | bounded | 2 / 2 / 2 | 2 / 2 / 2 | 2 / 2 / 2 |" in block
    assert "| B, T, H | gate | kda_fn | FLA | kda_fn, GB | FLA, GB |" in block
    assert "| 1, 128, 2 | bounded | 2 / 2 / 2 | 2 / 2 / 2 | 1.00 | 1.00 |" in block
    assert "(of B = 1, 4 the states stay in the L2 cache)" in block
    assert "| 4 | bounded | 2000.0 | 2000.0 | 2000.0 |" in block

    text = "before\n<!-- gpu -->\nold\n<!-- /gpu -->\nafter\n"
    renewed = gpu.replace_table(text, block)
    assert renewed == f"before\n<!-- gpu -->\n{block}<!-- /gpu -->\nafter\n"
    assert gpu.replace_table(renewed, block) == renewed
    with pytest.raises(ValueError, match="0 places"):
        gpu.replace_table("before\nafter\n", block)


def test_nothing_timed_is_no_picture(gpu: ModuleType, tiny: Any, machine: Any, tmp_path: Path) -> None:
    results, _ = measured(gpu, tiny._replace(modes=()), machine, {"kda_fn": gpu.our_contender()})
    with pytest.raises(ValueError, match="nothing to draw"):
        gpu.plot(results, tmp_path / "gpu.png")


def test_the_whole_program_on_a_cpu(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = f"--quick --device cpu --peers --regimes init --gates bounded --output {tmp_path}".split()
    gpu.main([*options, "--rows", "1,128,2"])
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert not any("not_run" in e for e in results["cases"])
    assert {e["mode"] for e in results["cases"]} == {"accuracy", *gpu.MODES}
    timed = [e["contenders"]["kda_fn"]["eager"]["ms"] for e in results["cases"] if e["mode"] in gpu.MODES[:3]]
    assert len(timed) == 4 and min(timed) > 0
    assert "kda_fn, graph: NotImplementedError: graphs need a CUDA device" in capsys.readouterr().out
    gpu.main([*options, "--plot"])
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_a_profile_names_what_took_the_time(gpu: ModuleType) -> None:
    machine = gpu.machine_of("cpu")
    text = gpu.profile_job(lambda: torch.ones(8, 8) @ torch.ones(8, 8), machine)
    assert "| aten::mm | 1 |" in text
    assert "| all |" in text
