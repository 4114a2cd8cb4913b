"""Benchmarks and examples as modules: they are programs, and belong to no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load"]


def load(script: Path) -> ModuleType:
    """The module that a script makes, which finds its neighbours; `sys.path` stays as it was."""
    spec = importlib.util.spec_from_file_location(f"{script.parent.name}_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their modules up.
    sys.modules[spec.name] = module
    path = sys.path.copy()
    sys.path.insert(0, str(script.parent))
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module
