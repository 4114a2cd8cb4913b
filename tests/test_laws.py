"""Every law, for every implementation of every subject."""

from __future__ import annotations

import pytest
import torch
from laws import LAWS, Law, assert_identical, row
from subjects import PURE, SUBJECTS, Subject, cast

from kda_fn.primitives._primitive import PRIMITIVES
from kda_fn.types import Impl

CASES = [
    pytest.param(law, subject, impl, id=f"{name}-{subject.name}-{impl}")
    for name, (law, applies, impls) in LAWS.items()
    for subject in SUBJECTS
    if applies(subject)
    for impl in impls
]


@pytest.mark.parametrize(("law", "subject", "impl"), CASES)
def test_law(law: Law, subject: Subject, impl: Impl) -> None:
    law(subject, impl)


OWN_TESTS = {"linear", "quantize_tokens", "mla_prolog"}
"""Their oracles are products of integers, and attention."""


def test_every_primitive_is_under_the_laws() -> None:
    """A subject's name begins with its function's."""
    subjects = {subject.name.split()[0].rstrip(",") for subject in SUBJECTS if not subject.is_layer}
    assert {function.__name__ for function in PRIMITIVES} == subjects | OWN_TESTS


# Torch's threads: a kernel's programs never run on them.
@pytest.mark.parametrize("impl", PURE)
@pytest.mark.parametrize("subject", [s for s in SUBJECTS if not s.is_layer], ids=lambda subject: subject.name)
def test_threads_change_no_bit(subject: Subject, impl: Impl) -> None:
    """One thread or several, a row of a batch comes out as alone."""
    sizes = {"H": 2, "HV": 2, "K": 64, "V": 48, "P": 99, "F": 101}
    inputs = cast(subject, subject.inputs(batch=(5,), T=130, **sizes), torch.float32)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together = subject.call(inputs, impl)
            results.append([y[3] for y in together])
            results.append(list(subject.call(row(subject, inputs, 3), impl)))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert_identical(result, results[0])
