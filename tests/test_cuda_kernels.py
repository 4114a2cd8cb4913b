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

LAWS_OF_CHUNKS = (
    "agrees in float32",
    "agrees in bfloat16",
    "agrees in float16",
    "any gate",
    "any heads and head dims",
    "any length",
    "batch invariance",
    "determinism",
    "prefix causality",
    "ragged equals one by one",
    "resume",
)


@pytest.fixture
def _cuda(emulation: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(_targets.TARGETS, "cpu", lambda _device: _targets.CUDA)
    monkeypatch.setattr(_targets, "_launch", lambda *_args, **_kwargs: {})
    for precision in ("_precision", "_single"):
        monkeypatch.setattr(_targets, precision, lambda *_args: "ieee")
    with Emulator(run=True):
        yield


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("name", LAWS_OF_CHUNKS)
@pytest.mark.parametrize("subject", [KDA, FUSED_KDA, FUSED_KDA_BOUNDED], ids=lambda subject: subject.name)
def test_law(subject: Subject, name: str) -> None:
    law, applies, impls = LAWS[name]
    if applies(subject):
        assert "triton" in impls
        law(subject, "triton")
