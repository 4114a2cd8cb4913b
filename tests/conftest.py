"""`pytest --device cuda` runs the laws there; the oracles always run on the CPU.

On the CPU an emulator stands in for the device of the Triton kernels. Where it cannot work their tests are
skipped, and with REQUIRE_EMULATOR=1 in the environment they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import subjects
import torch
from emulator import Emulator, missing

from kda_fn.primitives import _targets


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the laws run: cpu, cuda, npu")


def pytest_configure(config: pytest.Config) -> None:
    subjects.DEVICE = config.getoption("--device")
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        # The workers share the cores; more threads than cores make all of them wait.
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operations gain nothing from threads, and lose much to them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def emulation() -> None:
    """For a test that needs the emulator."""
    reason = missing()
    if reason is not None and os.environ.get("REQUIRE_EMULATOR") == "1":
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _serve_triton(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels run on CPU tensors during the tests of "triton" only: no other test may be served by one."""
    callspec = getattr(request.node, "callspec", None)
    if subjects.DEVICE != "cpu" or callspec is None or callspec.params.get("impl") != "triton":
        yield
        return
    request.getfixturevalue("emulation")
    with pytest.MonkeyPatch.context() as patch, Emulator(run=True):
        patch.setitem(_targets.TARGETS, "cpu", lambda _device: _targets.ASCEND910B3)
        yield
