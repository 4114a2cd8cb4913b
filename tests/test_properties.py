"""Properties over random shapes, splits, dtypes, layouts and gates (hypothesis).

Of the implementations in plain torch: a kernel would be compiled anew for nearly every example.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import VALUE, assert_close, assert_identical, at_times, in_pieces
from subjects import CONV, KDA, PURE, Inputs, Subject, cast
from torch import Tensor

import kda_fn
from kda_fn.types import Impl

settings.register_profile("gate", max_examples=30, deadline=None, derandomize=True)
settings.load_profile("gate")

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
BATCHES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
SEEDS = st.integers(0, 2**31)
STRONG = (0.0, -0.1, -5.0, -20.0, -90.0, -1000.0, -torch.inf)


@st.composite
def kda_inputs(draw: st.DrawFn, *, longest: int = 80, batch: tuple[int, ...] | None = None) -> Inputs:
    """Inputs of `kda` of any sizes; some of the decays replaced by special ones."""
    H, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    inputs = KDA.inputs(
        batch=draw(BATCHES) if batch is None else batch,
        T=draw(st.integers(0, longest)),
        seed=draw(SEEDS),
        H=H,
        HV=H * group,
        K=draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 40]))),
        V=draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 40]))),
    )
    share = draw(st.sampled_from([0.0, 0.05, 1.0]))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    picks = torch.rand(inputs["g"].shape, generator=generator)
    special = torch.tensor(STRONG, dtype=torch.float64)[
        torch.randint(len(STRONG), inputs["g"].shape, generator=generator)
    ]
    return {**inputs, "g": torch.where(picks < share, special, inputs["g"])}


def laid_out(x: Tensor, layout: int) -> Tensor:
    """The same values: contiguous, or with the first and last axes swapped in memory, or with gaps of NaN."""
    if layout == 1 and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2 and x.ndim:
        wide = x.new_full((*x.shape, 2), torch.nan)
        wide[..., 0] = x
        return wide[..., 0]
    return x


def is_trivial(outputs: tuple[Tensor, ...]) -> bool:
    """Nothing to compare by: empty, or forgotten to the last bit."""
    return any(y.numel() == 0 or not bool(y.any()) for y in outputs)


@pytest.mark.parametrize("impl", PURE)
@given(inputs=kda_inputs(), dtype=DTYPES, layout=st.integers(0, 2), chunk=st.sampled_from([4, 16, 64]))
def test_kda_agrees(impl: Impl, inputs: Inputs, dtype: torch.dtype, layout: int, chunk: int) -> None:
    """Any sizes, decays, dtype and layout: the oracle's result."""
    case = {name: laid_out(x, layout) for name, x in cast(KDA, inputs, dtype).items()}
    outputs = kda_fn.kda(*case.values(), chunk_size=chunk, impl=impl)
    expected = KDA.call({name: x.double() for name, x in case.items()}, None)
    for y, e in zip(outputs, expected, strict=True):
        if is_trivial((e,)):
            assert torch.equal(y.double(), e)
        else:
            assert_close([y], [e], VALUE[dtype])


@pytest.mark.parametrize("impl", PURE)
@pytest.mark.parametrize("subject", [KDA, CONV], ids=lambda subject: subject.name)
@given(seed=SEEDS, T=st.integers(1, 80), cuts=st.lists(st.integers(0, 80), max_size=4))
def test_any_split_resumes(subject: Subject, impl: Impl, seed: int, T: int, cuts: list[int]) -> None:
    """Cut anywhere, also nowhere and twice in one place: the whole."""
    inputs = subject.inputs(batch=(2,), T=T, seed=seed)
    places = [0, *sorted(min(cut, T) for cut in cuts), T]
    assert_close(in_pieces(subject, impl, inputs, places), subject.call(inputs, None), VALUE[torch.float64])


@pytest.mark.parametrize("impl", PURE)
@pytest.mark.parametrize("subject", [KDA, CONV], ids=lambda subject: subject.name)
@given(seed=SEEDS, lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), dtype=DTYPES)
def test_any_packing_is_one_by_one(
    subject: Subject, impl: Impl, seed: int, lengths: list[int], dtype: torch.dtype
) -> None:
    """Packed in any way, every sequence comes out as alone, to the bit."""
    cu_seqlens = kda_fn.cu_seqlens_of(lengths)
    T, N = cu_seqlens[-1], len(lengths)
    packed = cast(subject, subject.inputs(batch=(), T=T, N=N, seed=seed), dtype)
    outputs = subject.call(packed, impl, cu_seqlens)
    for n, length in enumerate(lengths):
        one = at_times(subject, packed, cu_seqlens[n], cu_seqlens[n + 1])
        alone = subject.call({**one, **{name: packed[name][n] for name in subject.states}}, impl)
        y = outputs[-1].narrow(subject.y_time, cu_seqlens[n], length)
        assert_identical((*(state[n] for state in outputs[:-1]), y), alone)


@pytest.mark.parametrize("impl", PURE)
@given(inputs=kda_inputs(batch=(3,)), pick=st.integers(0, 2))
def test_no_row_depends_on_another(impl: Impl, inputs: Inputs, pick: int) -> None:
    """A row of a batch comes out as alone, to the bit, whatever its neighbours hold."""
    case = cast(KDA, inputs, torch.float32)
    outputs = [y[pick] for y in KDA.call(case, impl)]
    alone = KDA.call({name: x[pick] for name, x in case.items()}, impl)
    assert all(torch.equal(y, a) for y, a in zip(outputs, alone, strict=True))
