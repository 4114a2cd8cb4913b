"""`pytest --device cuda` runs the laws there; the oracles always run on the CPU."""

from __future__ import annotations

import os

import pytest
import subjects
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the laws run: cpu, cuda, npu")


def pytest_configure(config: pytest.Config) -> None:
    subjects.DEVICE = config.getoption("--device")
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        # The workers share the cores; more threads than cores make all of them wait.
        torch.set_num_threads(1)
