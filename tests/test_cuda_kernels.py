"""KDA's kernels as CUDA has them, on the emulator: the other tests of "triton" run those of Ascend there.

What they compute is the same on x86, but for TF32 products: those are float32 ones here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulator import Emulator
from laws import LAWS
from subjects import FUSED_KDA, FUSED_KDA_BOUNDED, KDA, Subject

from kda_fn.primitives import _targets

CASES = [
    *(
        (KDA, name)
        for name in (
            "agrees in float32",
            "agrees in bfloat16",
            "agrees in float16",
            "any gate",
            "any heads and head dims",
            "any length",
            "batch invariance",
            "prefix causality",
            "ragged equals one by one",
        )
    ),
    (FUSED_KDA, "agrees in float32"),
    (FUSED_KDA, "agrees in bfloat16"),
    (FUSED_KDA_BOUNDED, "agrees in float32"),
]


@pytest.fixture
def _cuda(emulation: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(_targets.TARGETS, "cpu", lambda _device: _targets.CUDA)
    monkeypatch.setattr(_targets, "_launch", lambda *_args, **_kwargs: {})
    for precision in ("_precision", "_single"):
        monkeypatch.setattr(_targets, precision, lambda *_args: "ieee")
    with Emulator(run=True):
        yield


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize(("subject", "name"), CASES, ids=lambda value: getattr(value, "name", value))
def test_law(subject: Subject, name: str) -> None:
    law, applies, impls = LAWS[name]
    assert applies(subject) and "triton" in impls
    law(subject, "triton")
