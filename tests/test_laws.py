"""Every law, for every implementation of every subject."""

from __future__ import annotations

import pytest
from laws import LAWS, Law
from subjects import IMPLS, SUBJECTS, Subject

from kda_fn.types import Impl

CASES = [
    pytest.param(law, subject, impl, id=f"{name}-{subject.name}-{impl}")
    for name, (law, applies) in LAWS.items()
    for subject in SUBJECTS
    if applies(subject)
    for impl in IMPLS
]


@pytest.mark.parametrize(("law", "subject", "impl"), CASES)
def test_law(law: Law, subject: Subject, impl: Impl) -> None:
    law(subject, impl)
