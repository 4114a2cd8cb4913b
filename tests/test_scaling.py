"""docs/scaling.md says what benchmarks/scaling.py computes; its messages are those sent, its words true."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import scripts
import torch

from kda_fn import init_state, kda_transition

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return scripts.load(ROOT / "benchmarks" / "scaling.py")


def test_the_document_is_what_is_computed(scaling: ModuleType) -> None:
    """Else run benchmarks/scaling.py."""
    assert (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8") == scaling.document()


def test_messages_are_those_sent(scaling: ModuleType) -> None:
    """The bytes of a map in float32, as `kda_transition` makes it, and of a bf16 window."""
    for config in scaling.LAYERS.values():
        k = torch.zeros(0, config.H, config.K)
        v, g = torch.zeros(0, config.HV, config.V), torch.zeros(0, config.HV, config.K)
        transition = kda_transition(k, v, g, torch.zeros(0, config.HV))
        assert scaling.map_bytes(config) == sum(x.nbytes for x in transition)
        assert scaling.window_bytes(config) == init_state(config, dtype=torch.bfloat16).conv_state.nbytes


def test_break_even_is_where_the_times_cross(scaling: ModuleType) -> None:
    """A tenth below it one rank is the faster, a tenth above it so many are."""
    for machine in scaling.machines():
        for ranks in scaling.RANKS[1:]:
            T = scaling.break_even(machine, ranks)
            for factor, is_faster in ((0.9, False), (1.1, True)):
                tokens = int(factor * T / ranks) * ranks
                one, many = (scaling.layer_seconds(machine, n, 1, tokens) for n in (1, ranks))
                assert (many < one) == is_faster


def test_the_prose_is_true(scaling: ModuleType) -> None:
    """What the document says of its tables."""
    h200, ascend = scaling.machines()

    def seconds(machine: Any, context: int, heads: int) -> float:
        return scaling.layer_seconds(machine, context, heads, scaling.MILLION)

    assert all(seconds(h200, 1, n) < seconds(h200, n, 1) for n in (2, 4))
    assert seconds(h200, 8, 1) < seconds(h200, 1, 8)
    assert all(seconds(ascend, n, 1) < seconds(ascend, 1, n) for n in (2, 4, 8))
    assert all(seconds(machine, 8, 8) < seconds(machine, 64, 1) for machine in (h200, ascend))
