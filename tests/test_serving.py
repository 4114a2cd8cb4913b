"""Batches of requests: each row as the row alone, slots that nobody asked for untouched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optree
import pytest
import subjects
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import assert_close, assert_identical, error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kda_fn
from kda_fn import (
    KDAConfig,
    KDAParams,
    KDAState,
    KimiLinearConfig,
    KimiLinearParams,
    MLAConfig,
    MLAState,
    init_kimi_delta_attention,
    init_kimi_linear,
    init_kimi_linear_state,
    init_state,
    kimi_delta_attention,
    kimi_linear,
)
from kda_fn.layers.kimi_linear import KimiLinearState
from kda_fn.serving import (
    accept,
    accepted_lengths,
    chunk_indices,
    chunk_offsets,
    fork,
    free,
    gather,
    idle_plan,
    plan_batch,
    scatter,
    scatter_,
    step_batch,
    step_batch_,
    update_plan_,
    verify,
    why_idle,
)

CONFIG = KDAConfig(hidden_size=12, num_heads=1, head_dim=8, num_v_heads=2, head_v_dim=4)
POISON = (math.nan, 1e4)

_map: Any = optree.tree_map
_leaves: Any = optree.tree_leaves

pytestmark = pytest.mark.usefixtures("one_thread")


def _params(dtype: torch.dtype = torch.float64) -> KDAParams:
    return init_kimi_delta_attention(CONFIG, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _pool(slots: int, dtype: torch.dtype = torch.float64) -> KDAState:
    state = init_state(CONFIG, (slots,), dtype=dtype)
    return KDAState(*(_draw(*leaf.shape, seed=i).to(leaf.dtype) for i, leaf in enumerate(state)))


def _zeros(dtype: torch.dtype = torch.float64) -> KDAState:
    return init_state(CONFIG, dtype=dtype)


def _slot(pool: KDAState, slot: int) -> KDAState:
    return KDAState(*(leaf[slot] for leaf in pool))


def _alone(params: KDAParams, state: KDAState, x: Tensor) -> tuple[KDAState, Tensor]:
    return kimi_delta_attention(params, state, x, config=CONFIG)


# Slots


def test_gather_and_scatter() -> None:
    pool = _pool(5)
    states = gather(pool, [3, -1, 0, 7])
    assert_identical(_slot(states, 0), _slot(pool, 3))
    assert_identical(_slot(states, 2), _slot(pool, 0))
    for missing in (1, 3):
        assert all(not leaf[missing].any() for leaf in states)
    new = KDAState(*(leaf + 1 for leaf in gather(pool, [0, 1, 2, 3])))
    before = _map(torch.clone, pool)
    after = scatter(pool, [4, -1, 1, 5], new)
    assert_identical(pool, before)
    assert_identical(_slot(after, 4), _slot(new, 0))
    assert_identical(_slot(after, 1), _slot(new, 2))
    for kept in (0, 2, 3):
        assert_identical(_slot(after, kept), _slot(pool, kept))
    assert scatter_(pool, torch.tensor([4, -1, 1, 5]), new) is pool
    assert_identical(pool, after)


def test_no_slot_at_all_writes_nothing() -> None:
    pool = KDAState(*(torch.where(leaf > 1, math.nan, leaf) for leaf in _pool(3)))
    after = scatter(pool, [-1, 3, -7], gather(pool, [0, 1, 2]))
    for leaf, old in zip(after, pool, strict=True):
        torch.testing.assert_close(leaf, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("poison", POISON)
def test_poison_stays_in_its_slot(poison: float) -> None:
    pool = KDAState(*(leaf.clone() for leaf in _pool(4)))
    for leaf in pool:
        leaf[0] = poison
    states = gather(pool, [2, -1, 9])
    assert_identical(_slot(states, 0), _slot(pool, 2))
    assert all(not leaf[1:].any() for leaf in states)


def test_fork_and_free() -> None:
    pool = _pool(6)
    forked = fork(pool, 2, [0, 5])
    for slot, source in ((0, 2), (5, 2), (2, 2), (1, 1), (3, 3), (4, 4)):
        assert_identical(_slot(forked, slot), _slot(pool, source))
    freed = free(pool, [1, 4])
    assert all(not leaf[[1, 4]].any() for leaf in freed)
    assert_identical(_slot(freed, 3), _slot(pool, 3))


def test_slots_that_do_not_fit() -> None:
    pool = _pool(3)
    states = gather(pool, [0, 1])
    with pytest.raises(ValueError, match="two rows have slot 2"):
        scatter(pool, [2, 2], states)
    with pytest.raises(ValueError, match="two rows have slot 1"):
        scatter_(pool, torch.tensor([1, 1]), states)
    with pytest.raises(TypeError, match=r"slots must be int32 or int64, got torch\.float32"):
        gather(pool, torch.zeros(2))
    with pytest.raises(ValueError, match="expected"):
        scatter(pool, [0], states)
    with pytest.raises(TypeError, match="tree like the pool"):
        scatter(pool, [0, 1], tuple(states))
    with pytest.raises(ValueError, match="source must be a slot of the pool, 0 to 2, got 3"):
        fork(pool, 3, [0])
    with pytest.raises(RuntimeError, match="writes in place"):
        torch.func.vmap(lambda s: scatter_(pool, [0, 1], KDAState(*s)).conv_state)(
            tuple(leaf.unsqueeze(0) for leaf in states)
        )
    learned = KDAState(*(leaf.clone().requires_grad_() for leaf in states))
    with pytest.raises(RuntimeError, match="writes in place"):
        scatter_(pool, [0, 1], learned)


# Plans


def test_rows_are_what_they_are() -> None:
    """A vendor's list: one-token boundary, prefill tail, empty segments, drafts beside all of them."""
    plan = plan_batch(
        [1, 1, 5, 0, 3, 1, 2],
        #  decode, fresh, prefill, empty, verify, decode, a fresh prompt as long as drafts would be
        has_state=[True, False, True, True, True, True, False],
        slots=[[8, -1, -1], [7, -1, -1], [6, -1, -1], [5, -1, -1], [4, 3, 2], [1, -1, -1], [0, -1, -1]],
        capacity=9,
        drafts=[None, None, None, None, 2, None, 1],
    )
    assert plan.cu_seqlens == (0, 1, 6, 8)
    assert plan.load.tolist() == [-1, 6, -1] and plan.store.tolist() == [7, 6, 0]
    assert plan.order.tolist() == [1, 2, 3, 4, 5, 6, 11, 12, 0, 7, 10, 8, 9]
    assert plan.order[plan.back].tolist() == list(range(13))
    assert plan.levels == (0, 3, 4, 5) and plan.parent.tolist() == [-1, -1, -1, 1, 3]
    assert plan.chains == ((0,), (1, 3, 4), (2,))
    assert plan.token_load.tolist() == [8, 4, 1, 4, 4] and plan.token_store.tolist() == [8, 4, 1, 3, 2]
    assert bool(plan.live.all())


def test_chunks_carry_compacted_ranks() -> None:
    plan = plan_batch([128, 0, 130], has_state=[False] * 3, slots=[0, 1, 2], capacity=3)
    assert plan.cu_seqlens == (0, 128, 258)
    assert chunk_indices(plan.cu_seqlens) == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))
    assert chunk_offsets(plan.cu_seqlens) == (0, 2, 5)


def test_accepted_counts() -> None:
    """The state after the last accepted token; 0, or more than were written, is a row that does nothing."""
    plan = plan_batch(
        [1, 1, 1, 1],
        has_state=[True] * 4,
        slots=torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        capacity=16,
        accepted=torch.tensor([3, 0, 1, 3]),
        written=[4, 4, 1, 2],
    )
    assert plan.token_load.tolist() == [2, -1, 8, -1]
    assert plan.token_store.tolist() == [0, -1, 8, -1]
    assert plan.live.tolist() == [True, False, True, False]
    slots = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [-1] * 4]
    assert why_idle(slots, capacity=12, accepted=[3, 0, 1, 3], written=[4, 4, 1, 2]) == [
        None,
        "0 tokens accepted of 4 that were written",
        None,
        "slot -1 is none of the pool's 12",
    ]
    assert why_idle([2, 12], capacity=12) == [None, "slot 12 is none of the pool's 12"]


def test_counts_of_a_slots_last_owner() -> None:
    """A request without a state starts from zeros, whatever stands in the tensors of counts for its slot."""
    plan = plan_batch(
        [5, 2, 1],
        has_state=[False, False, True],
        slots=[[0, 1], [2, 3], [4, 5]],
        capacity=6,
        accepted=torch.tensor([0, 7, 2]),
        written=[0, 2, 2],
    )
    assert plan.load.tolist() == [-1, -1] and plan.store.tolist() == [0, 2]
    assert plan.token_load.tolist() == [5] and bool(plan.live.all())


def test_plans_that_do_not_fit() -> None:
    base: dict[str, Any] = {"has_state": [True, True], "slots": [0, 1], "capacity": 2}
    for change, message in (
        ({"has_state": [True]}, "has_state must have an entry for each of 2 requests, it has 1"),
        ({"drafts": [None, 5]}, r"request 1 has 5 drafts, its length must be 5 \+ 1, got 3"),
        (
            {"drafts": [None, 2]},
            "request 1 verifies 3 tokens, slots must have a column for each, they have 1",
        ),
        ({"slots": [1, 1]}, "two rows have slot 1"),
        ({"accepted": [1, 1]}, "accepted needs written"),
        ({"accepted": [1, 1], "written": [1, 2]}, "written must be 1 to 1"),
        ({"requests": 1}, "requests must be at least the batch's 2, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_batch([1, 3], **{**base, **change})
    slots = [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match=r"parents\[1\] must name an earlier token"):
        plan_batch(
            [1, 3],
            has_state=[True] * 2,
            slots=slots,
            capacity=6,
            drafts=[None, 2],
            parents=[None, [-1, 2, 0]],
        )


class _NoReadsBack(TorchDispatchMode):
    """What a device would have to be waited for."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.item,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
        ), f"{func} waits for a device"
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back() -> None:
    """Slots, counts and lengths that are on a device stay there: `meta` has no values to read."""
    slots = torch.zeros(3, 4, dtype=torch.int64, device="meta")
    counts = torch.zeros(3, dtype=torch.int64, device="meta")
    with _NoReadsBack():
        plan = plan_batch(
            [1, 4, 7],
            has_state=[True, True, False],
            slots=slots,
            capacity=16,
            drafts=[None, 3, None],
            accepted=counts,
            written=[1, 2, 1],
        )
        pool = KDAState(*(leaf.to("meta") for leaf in _pool(16)))
        params = _map(lambda leaf: leaf.to("meta"), _params())
        after, y = step_batch(
            params, pool, torch.zeros(12, 12, dtype=torch.float64, device="meta"), plan, config=CONFIG
        )
    assert y.shape == (12, 12) and [leaf.shape for leaf in after] == [leaf.shape for leaf in pool]


# Steps


def _expected(
    params: KDAParams, pool: KDAState, x: Tensor, lengths: Sequence[int], starts: Sequence[int | None]
) -> list[tuple[list[KDAState], Tensor]]:
    """Of each request by itself: the state after each token, and y. A start of None is zeros."""
    results, t = [], 0
    for length, start in zip(lengths, starts, strict=True):
        state = _zeros(x.dtype) if start is None else _slot(pool, start)
        states, ys = [], []
        for i in range(t, t + length):
            state, y = _alone(params, state, x[i : i + 1])
            states.append(state)
            ys.append(y)
        t += length
        results.append((states, torch.cat(ys) if ys else x[:0]))
    return results


@st.composite
def _batches(draw: st.DrawFn) -> dict[str, Any]:
    kinds = draw(
        st.lists(
            st.sampled_from("decode fresh prefill verify empty none late".split()), min_size=1, max_size=7
        )
    )
    lengths, has_state, drafts, accepted, written, slotless = [], [], [], [], [], []
    for kind in kinds:
        length = (
            {"decode": 1, "late": 1, "empty": 0}.get(kind) if kind in ("decode", "late", "empty") else None
        )
        if length is None:
            length = (
                draw(st.integers(2, 4))
                if kind == "verify"
                else draw(st.sampled_from([1, 2, 9, 63, 64, 65, 130, 200]))
            )
        lengths.append(length)
        has_state.append(kind not in ("fresh",))
        drafts.append(length - 1 if kind == "verify" else None)
        before = draw(st.integers(1, 4)) if kind == "late" else 1
        written.append(before)
        accepted.append(draw(st.integers(1, before)))
        slotless.append(kind == "none")
    slots = draw(st.permutations(range(4 * len(kinds) + 3)))
    return {
        "lengths": lengths,
        "has_state": has_state,
        "drafts": drafts,
        "accepted": accepted,
        "written": written,
        "slots": [[-1] * 4 if dead else list(slots[4 * r : 4 * r + 4]) for r, dead in enumerate(slotless)],
        "spare": len(kinds) + 3,
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(batch=_batches())
def test_each_row_as_alone(dtype: torch.dtype, tolerance: float, batch: dict[str, Any]) -> None:
    """Any rows in any order, over slots that hold what others left: NaN and 1e4."""
    params = _params(dtype)
    lengths, slots = batch["lengths"], batch["slots"]
    capacity = 4 * len(lengths) + 3
    pool = _pool(capacity, dtype)
    starts: list[int | None] = []
    for r, count in enumerate(batch["accepted"]):
        starts.append(slots[r][count - 1] if batch["has_state"][r] else None)
    used = {start for start in starts if start is not None}
    for slot in range(capacity):
        if slot not in used:
            for leaf in pool:
                leaf[slot] = POISON[slot % 2]
    x = _draw(sum(lengths), 12, dtype=dtype)
    options = {name: batch[name] for name in ("has_state", "drafts", "accepted", "written")}
    plan = plan_batch(lengths, slots=torch.tensor(slots), capacity=capacity, **options)
    after, y = step_batch(params, pool, x, plan, config=CONFIG)

    written, t = set(), 0
    safe = [None if slots[r][0] < 0 else start for r, start in enumerate(starts)]
    for r, (states, expected) in enumerate(_expected(params, pool, x, lengths, safe)):
        mine = y[t : t + lengths[r]]
        t += lengths[r]
        if slots[r][0] < 0:
            assert not mine.any()
            continue
        if not states:
            continue
        assert error(mine, expected) <= tolerance
        kept = states if batch["drafts"][r] is not None else states[-1:]
        for column, state in enumerate(kept):
            written.add(slots[r][column])
            for leaf, exact in zip(_slot(after, slots[r][column]), state, strict=True):
                assert error(leaf, exact) <= tolerance
    for slot in set(range(capacity)) - written:
        for leaf, old in zip(after, pool, strict=True):
            assert torch.equal(leaf[slot].nan_to_num(7.0), old[slot].nan_to_num(7.0))
    in_place = KDAState(*(leaf.clone() for leaf in pool))
    same, y_same = step_batch_(params, in_place, x, plan, config=CONFIG)
    assert same is in_place and torch.equal(y, y_same)
    for leaf, other in zip(in_place, after, strict=True):
        assert torch.equal(leaf.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_step_without_drafts_after_three_accepted() -> None:
    params, pool, x = _params(), _pool(4), _draw(5, 12)
    slots: list[list[int]] = [[0, 1, 2, 3]]
    options: dict[str, Any] = {"config": CONFIG}
    plan = plan_batch([4], has_state=[True], slots=slots, capacity=4, drafts=[3])
    after, _ = step_batch(params, pool, x[:4], plan, **options)
    plan = plan_batch([1], has_state=[True], slots=slots, capacity=4, accepted=[3], written=[4])
    after, y = step_batch(params, after, x[4:], plan, **options)
    expected, y_expected = _alone(params, _slot(pool, 0), torch.cat([x[:3], x[4:]]))
    assert_close((_slot(after, 0), y), (expected, y_expected[3:]), 1e-12)


def test_padding_and_replay() -> None:
    """Plans of decodes have one shape; padded rows are zeros and write nothing, whatever x holds there."""
    params, pool = _params(), _pool(6)
    plan = plan_batch([1, 1], has_state=[True] * 2, slots=[4, 2], capacity=6, requests=4)
    x = torch.cat([_draw(2, 12), torch.full((2, 12), math.nan, dtype=torch.float64)])
    after, y = step_batch(params, pool, x, plan, config=CONFIG)
    alone = plan_batch([1, 1], has_state=[True] * 2, slots=[4, 2], capacity=6)
    expected = step_batch(params, pool, x[:2], alone, config=CONFIG)
    assert_close((after, y[:2]), expected, 1e-12)
    assert not y[2:].any()
    for slot in (0, 1, 3, 5):
        assert_identical(_slot(after, slot), _slot(pool, slot))
    other = plan_batch([1, 1, 1], has_state=[True] * 3, slots=[5, 0, 3], capacity=6, requests=4)
    tensors = [leaf for leaf in plan if isinstance(leaf, Tensor)]
    assert update_plan_(plan, other) is plan
    assert all(
        a is b for a, b in zip(tensors, (leaf for leaf in plan if isinstance(leaf, Tensor)), strict=True)
    )
    assert_identical(plan.token_store, other.token_store)
    nothing, y = step_batch(params, pool, x.nan_to_num(3.0), idle_plan(plan), config=CONFIG)
    assert_identical(nothing, pool)
    assert not y.any()
    with pytest.raises(ValueError, match="differs in shape"):
        update_plan_(plan, alone)


CAPTURED: dict[str, dict[str, Any]] = {
    "decodes": {"lengths": [1] * 4, "slots": [3, 0, 7, 5]},
    "drafts": {"lengths": [3, 3], "slots": [[1, 0, 7], [8, 4, 2]], "drafts": [2, 2]},
}


@pytest.mark.device
@pytest.mark.parametrize(
    ("model", "kind"), [("layer", "decodes"), ("layer", "drafts"), ("hybrid", "decodes")]
)
def test_replay_of_a_captured_graph(model: str, kind: str) -> None:
    """Three steps by one CUDA graph, its plan and tokens written anew before each, equal three calls."""
    if subjects.DEVICE != "cuda":
        pytest.skip("a CUDA graph needs CUDA")
    case = CAPTURED[kind]
    T = sum(case["lengths"])
    config: Any = CONFIG if model == "layer" else HYBRID
    params, pool = (_params(), _pool(9)) if model == "layer" else (_model(), _model_pool(_model(), 9))
    params, pool, xs = _map(
        lambda leaf: leaf.cuda().float() if leaf.is_floating_point() else leaf.cuda(),
        (params, pool, [_draw(T, 12, seed=n) if model == "layer" else _tokens(T + n)[:T] for n in range(3)]),
    )
    slots = torch.tensor(case["slots"])
    plans = [
        plan_batch(
            **{**case, "slots": (slots + shift) % 9}, has_state=[True] * len(slots), capacity=9, device="cuda"
        )
        for shift in range(3)
    ]
    expected, after = [], pool
    for x, plan in zip(xs, plans, strict=True):
        after, y = step_batch(params, after, x, plan, config=config)
        expected.append(y)
    live, x, plan = _map(torch.clone, pool), xs[0].clone(), plans[0]
    first = {name: leaf.clone() for name, leaf in plan._asdict().items() if isinstance(leaf, Tensor)}
    step_batch_(params, _map(torch.clone, pool), x, plan, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, y = step_batch_(params, live, x, plan, config=config)
    for leaf, start in zip(_leaves(live), _leaves(pool), strict=True):
        leaf.copy_(start)
    for its_x, its_plan, its_y in zip(xs, [plan._replace(**first), *plans[1:]], expected, strict=True):
        x.copy_(its_x)
        update_plan_(plan, its_plan)
        graph.replay()
        assert_close(y, its_y, 1e-5)
    assert_close(live, after, 1e-5)


def test_a_step_of_nothing() -> None:
    params, pool = _params(), _pool(2)
    plan = plan_batch([0, 0], has_state=[True, False], slots=[0, 1], capacity=2)
    after, y = step_batch(params, pool, _draw(0, 12), plan, config=CONFIG)
    assert_identical(after, pool)
    assert y.shape == (0, 12)


def test_a_step_that_does_not_fit() -> None:
    params, pool = _params(), _pool(2)
    plan = plan_batch([1], has_state=[True], slots=[0], capacity=2)
    with pytest.raises(ValueError, match=r"step_batch: x has shape \(2, 12\), the plan is of 1 tokens"):
        step_batch(params, pool, _draw(2, 12), plan, config=CONFIG)
    with pytest.raises(TypeError, match="plan must be BatchPlan, got tuple"):
        step_batch(params, pool, _draw(1, 12), tuple(plan), config=CONFIG)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"x has shape \(1, 11\)"):
        step_batch(params, pool, _draw(1, 11), plan, config=CONFIG)


def test_transforms_of_a_step() -> None:
    """A step is a function like any other: of weights, under vmap, with derivatives."""
    params, pool, x = _params(), _pool(6), _draw(8, 12)
    plan = plan_batch(
        [3, 4, 1],
        has_state=[True] * 3,
        slots=[[0, 1, 2], [3, -1, -1], [4, -1, -1]],
        capacity=6,
        drafts=[2, None, None],
    )

    def y_of(x: Tensor) -> Tensor:
        return step_batch(params, pool, x, plan, config=CONFIG)[1]

    rows = torch.stack([x, 2 * x])
    assert_close(torch.func.vmap(y_of)(rows), torch.stack([y_of(row) for row in rows]), 1e-12)
    tangent = _draw(8, 12, seed=5)
    slope = torch.func.jvp(y_of, (x,), (tangent,))[1]
    back = torch.func.grad(lambda x: (y_of(x) * tangent).sum())(x)
    assert math.isclose((back * tangent).sum(), (slope * tangent).sum(), rel_tol=1e-9)


# Speculation


TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
"""Fifteen drafts: every token has two after it."""


@pytest.mark.parametrize("parents", [None, TREE, (-1, -1, -1), (-1,), (-1, 0, -1, 2, 0)], ids=str)
def test_verify(parents: tuple[int, ...] | None) -> None:
    """Each token as the last of its own path, run alone."""
    params, state = _params(), _slot(_pool(1), 0)
    x = _draw(6 if parents is None else len(parents), 12)
    states, y = verify(params, state, x, config=CONFIG, parents=parents)
    for t in range(len(x)):
        path, at = [], t
        while at >= 0:
            path.append(at)
            at = at - 1 if parents is None else parents[at]
        expected, y_expected = _alone(params, state, x[path[::-1]])
        assert_close((_slot(states, t), y[t]), (expected, y_expected[-1]), 1e-12)
    assert_identical(accept(state, states, 0), state)
    assert_identical(accept(state, states, torch.tensor(len(x))), _slot(states, len(x) - 1))
    assert_identical(accept(state, states, len(x) + 1), state)


def test_verify_refuses() -> None:
    params, state = _params(), _slot(_pool(1), 0)
    with pytest.raises(ValueError, match=r"expected T >= 1 tokens"):
        verify(params, state, _draw(0, 12), config=CONFIG)
    with pytest.raises(ValueError, match=r"parents\[0\] must name an earlier token"):
        verify(params, state, _draw(2, 12), config=CONFIG, parents=(0, -1))
    with pytest.raises(ValueError, match="one structure"):
        accept(state, tuple(state), 1)  # pyright: ignore[reportArgumentType]


def test_lengths_after_rejection() -> None:
    lengths, written = torch.tensor([20, 31, 7]), torch.tensor([4, 1, 3])
    assert accepted_lengths(lengths, written, torch.tensor([1, 1, 3])).tolist() == [17, 31, 7]
    assert lengths.tolist() == [20, 31, 7]


def test_a_prefix_resumes_at_any_length() -> None:
    """A state saved at 37 tokens is that of 37 tokens, whatever the chunk: resumed it gives one call's."""
    params, x = _params(), _draw(100, 12)
    pool = init_state(CONFIG, (3,), dtype=torch.float64)
    step: dict[str, Any] = {"config": CONFIG}
    pool, _ = step_batch(
        params, pool, x[:37], plan_batch([37], has_state=[False], slots=[0], capacity=3), **step
    )
    pool = fork(pool, 0, [2])
    pool, y = step_batch(
        params, pool, x[37:], plan_batch([63], has_state=[True], slots=[2], capacity=3), **step
    )
    expected, y_expected = kda_fn.kimi_delta_attention(params, _zeros(), x, config=CONFIG)
    assert_close((_slot(pool, 2), y), (expected, y_expected[37:]), 1e-12)


# The hybrid model


HYBRID = KimiLinearConfig(
    vocab_size=11,
    kda=CONFIG,
    layer_types=("kda", "mla", "kda"),
    intermediate_size=16,
    mla=MLAConfig(hidden_size=12, num_heads=2, head_dim=4, head_v_dim=4, latent_dim=6, shared_dim=2),
)
ROOM = 24


def _model() -> KimiLinearParams:
    return init_kimi_linear(HYBRID, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _tokens(T: int) -> Tensor:
    return torch.randint(11, (T,), generator=torch.Generator().manual_seed(T))


def _model_pool(params: KimiLinearParams, slots: int) -> KimiLinearState:
    """Each slot after as many tokens as its number, and garbage where a cache holds none."""
    pool = init_kimi_linear_state(HYBRID, (slots,), capacity=ROOM, dtype=torch.float64)
    for slot in range(slots):
        one = _map(lambda leaf: leaf[slot], pool)  # noqa: B023
        one, _ = kimi_linear(params, one, _tokens(slot), config=HYBRID)
        pool = scatter(pool, [slot], _map(lambda leaf: leaf.unsqueeze(0), one))
    return pool


def _visible(state: Any) -> list[Tensor]:
    """A state without what lies beyond a cache's length."""
    leaves = []
    for layer in state:
        if isinstance(layer, MLAState):
            kept = (torch.arange(ROOM) < layer.length).unsqueeze(-1)
            layer = layer._replace(latent=layer.latent * kept, shared=layer.shared * kept)
        leaves += [leaf.double() for leaf in layer]
    return leaves


def test_the_model_row_by_row() -> None:
    """Prefill, decode, drafts, an empty row and a dead one, over the slots of the hybrid model."""
    params = _model()
    pool = _model_pool(params, 12)
    lengths, drafts = [1, 5, 3, 0, 1, 2, 2], [None, None, 2, None, None, None, 1]
    has_state = [True, False, True, True, True, True, True]
    slots = [[4, -1, -1], [9, -1, -1], [2, 7, 0], [1, -1, -1], [-1] * 3, [3, -1, -1], [11, 10, -1]]
    x = _tokens(14)
    plan = plan_batch(lengths, has_state=has_state, slots=slots, capacity=12, drafts=drafts)
    after, y = step_batch(params, pool, x, plan, config=HYBRID)
    zeros = init_kimi_linear_state(HYBRID, capacity=ROOM, dtype=torch.float64)
    t, written = 0, set()
    for r, length in enumerate(lengths):
        ids, logits = x[t : t + length], y[t : t + length]
        t += length
        if slots[r][0] < 0:
            assert not logits.any()
            continue
        start = _map(lambda leaf: leaf[slots[r][0]], pool) if has_state[r] else zeros  # noqa: B023
        for n in range(1, length + 1) if drafts[r] is not None else [length] * bool(length):
            state, expected = kimi_linear(params, start, ids[:n], config=HYBRID)
            slot = slots[r][n - 1 if drafts[r] is not None else 0]
            written.add(slot)
            mine = _map(lambda leaf: leaf[slot], after)  # noqa: B023
            assert_close((_visible(mine), logits[:n]), (_visible(state), expected), 1e-11)
    for slot in set(range(12)) - written:
        for leaf, old in zip(_leaves(after), _leaves(pool), strict=True):
            assert torch.equal(leaf[slot], old[slot])


def test_the_models_decodes() -> None:
    """A batch of them alone."""
    params = _model()
    pool, x, slots = _model_pool(params, 12), _tokens(4), [4, 11, -1, 7]
    plan = plan_batch([1] * 4, has_state=[True] * 4, slots=slots, capacity=12)
    after, y = step_batch(params, pool, x, plan, config=HYBRID)
    for r, slot in enumerate(slots):
        if slot < 0:
            assert not y[r].any()
            continue
        start, mine = (_map(lambda leaf: leaf[slot], tree) for tree in (pool, after))  # noqa: B023
        state, expected = kimi_linear(params, start, x[r : r + 1], config=HYBRID)
        assert_close((_visible(mine), y[r : r + 1]), (_visible(state), expected), 1e-11)


def test_the_models_drafts() -> None:
    params = _model()
    state = _map(lambda leaf: leaf[5], _model_pool(params, 6))
    x = _tokens(4)
    states, y = verify(params, state, x, config=HYBRID)
    for n in range(1, 5):
        expected, logits = kimi_linear(params, state, x[:n], config=HYBRID)
        accepted = accept(state, states, n)
        assert_close((_visible(accepted), y[:n]), (_visible(expected), logits), 1e-11)
    with pytest.raises(NotImplementedError, match="attention over a tree of drafts is not built"):
        verify(params, state, x, config=HYBRID, parents=(-1, 0, 0, 1))
    growing = init_kimi_linear_state(HYBRID, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the cache of layer 1 must be preallocated"):
        verify(params, growing, x, config=HYBRID)


# Where public implementations went wrong (V: vLLM, A: vllm-ascend, S: SGLang)


def test_a_fresh_prompt_on_a_recycled_slot() -> None:
    """V 51483: one token, its slot full of 1e4; V 53051: as many tokens as drafts would be, and no state."""
    params, x = _params(), _draw(4, 12)
    pool = KDAState(*(torch.full_like(leaf, 1e4) for leaf in _pool(2)))
    plan = plan_batch(
        [1, 3], has_state=[False, False], slots=[[0, -1, -1], [1, -1, -1]], capacity=2, drafts=[None, 2]
    )
    after, y = step_batch(params, pool, x, plan, config=CONFIG)
    for slot, rows in ((0, x[:1]), (1, x[1:])):
        expected, y_expected = _alone(params, _zeros(), rows)
        assert_close((_slot(after, slot), y[slot : slot + len(rows)]), (expected, y_expected), 1e-12)


def test_padding_with_stale_slots_and_nan() -> None:
    """A 15510, V 37728: no live slot is written; S 30974: outputs are zeros, live rows are untouched."""
    params, pool = _params(), _pool(3)
    x = torch.cat([_draw(1, 12), torch.full((1, 12), math.nan, dtype=torch.float64)])
    stale = plan_batch([1, 1], has_state=[True] * 2, slots=[1, 2], capacity=3)
    idle = idle_plan(stale)
    live = torch.tensor([True, False])
    plan = stale._replace(
        live=live,
        token_load=torch.where(live, stale.token_load, idle.token_load),
        token_store=torch.where(live, stale.token_store, idle.token_store),
    )
    after, y = step_batch(params, pool, x, plan, config=CONFIG)
    expected = _alone(params, _slot(pool, 1), x[:1])
    assert_close((_slot(after, 1), y[:1]), expected, 1e-12)
    assert not y[1].any()
    for slot in (0, 2):
        assert_identical(_slot(after, slot), _slot(pool, slot))
