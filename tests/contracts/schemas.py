"""The schemas of torch_npu's operators as its wheel has them, beside the stand-ins of this folder.

    python tests/contracts/schemas.py [VERSION]

The wheel is fetched into a temporary folder and searched, not installed: importing it needs a device's
libraries. A parameter that a stand-in knows and the schema does not is an error. vllm-ascend is in no wheel.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from contracts import mla_prolog, quantised

STAND_INS: tuple[Callable[..., Any], ...] = (
    quantised.npu_dynamic_quant,
    quantised.npu_quant_matmul,
    mla_prolog.TorchNPU.npu_mla_prolog_v3,
)


def wheel(version: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    platform = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.11"]
    subprocess.run([*command, *platform, "--dest", folder, f"torch_npu=={version}"], check=True)
    return next(Path(folder).glob("*.whl"))


def schemas(path: Path, names: set[str]) -> dict[str, str]:
    """The longest of each operator: the newest of its overloads."""
    pattern = re.compile(
        rb"(?<![\w:.])(" + "|".join(sorted(names)).encode() + rb")\([\x20-\x7e]+?\) -> [\x20-\x7e]+"
    )
    found: dict[str, str] = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.endswith(".so"):
                for match in pattern.finditer(archive.read(member)):
                    name, schema = match[1].decode(), match[0].decode()
                    found[name] = max(found.get(name, ""), schema, key=len)
    return found


def main(version: str) -> int:
    by_name = {function.__name__: function for function in STAND_INS}
    with tempfile.TemporaryDirectory() as folder:
        found = schemas(wheel(version, folder), set(by_name))
    wrong = 0
    for name, function in by_name.items():
        if name not in found:
            print(f"{name}: not in torch_npu {version}")
            wrong += 1
            continue
        print(found[name])
        known = {argument.name for argument in torch._C.parse_schema(f"npu::{found[name]}").arguments}
        parameters = inspect.signature(function).parameters.values()
        unknown = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in known]
        if unknown:
            print(f"    the stand-in knows {', '.join(unknown)} besides")
            wrong += 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or ["2.13.0"]))
