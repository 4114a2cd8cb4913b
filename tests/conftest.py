"""`pytest --device cuda` runs the laws there; the oracles always run on the CPU."""

from __future__ import annotations

import pytest
import subjects


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the laws run: cpu, cuda, npu")


def pytest_configure(config: pytest.Config) -> None:
    subjects.DEVICE = config.getoption("--device")
