"""What runs here: `python -m kda_fn`.

Prints the versions, the devices, and for one typical call of each primitive, on the best device there is:
which implementations serve it, which one `impl=None` takes, and why each other one does not serve.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kda_fn
from kda_fn import W8A8, explain
from kda_fn.primitives._primitive import PRIMITIVES

B, T, H, K, W = 1, 128, 8, 128, 4
P = 3 * H * K


def version(package: str) -> str | None:
    """The installed version of a package, which is not imported for it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Of the library and of what decides which implementation serves."""
    found = {"kda_fn": kda_fn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**found, **{name: version(name) for name in ("optree", "triton", "triton-ascend", "torch_npu")}}


def npus() -> list[str]:
    """The names of Ascend NPUs. torch_npu, where it is installed, adds `torch.npu` when torch is imported."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return []
    return [npu.get_device_name(i) for i in range(npu.device_count())]


def devices() -> list[str]:
    """One line for each device."""
    lines = [f"{'cpu':<14} {torch.get_num_threads()} threads"]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        lines.append(f"{f'cuda:{i}':<14} {torch.cuda.get_device_name(i)}")
    lines += [f"{f'npu:{i}':<14} {name}" for i, name in enumerate(npus())]
    if version("torch_npu") is None:
        lines.append('npu            needs torch_npu: pip install "kda_fn[ascend]"')
    elif not npus():
        lines.append("npu            torch_npu is installed and finds no device")
    return lines


def best_device() -> str:
    """An NPU before a GPU before the CPU."""
    if npus():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def layer_dtype(device: str) -> torch.dtype:
    """What a layer would be run in."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def sample_calls(device: str) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments and keywords of one typical call of each primitive, by its name."""

    def wide(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def x(*shape: int) -> Tensor:
        return wide(*shape).to(layer_dtype(device))

    state, heads, head_step = wide(B, H, K, K), x(B, T, H, K), x(B, H, K)
    layer = (state, heads, heads, heads, heads, x(B, T, H), wide(H), wide(H * K))
    return {
        "causal_conv1d": ((x(B, W - 1, P), x(B, T, P), wide(P, W)), {}),
        "fused_kda": (layer, {}),
        "gated_rms_norm": ((heads, heads, x(K)), {"eps": 1e-5}),
        "kda": ((state, heads, heads, heads, wide(B, T, H, K), wide(B, T, H)), {}),
        "kda_gate": ((heads, wide(H), wide(H * K)), {}),
        "kda_step": ((state, head_step, head_step, head_step, wide(B, H, K), wide(B, H)), {}),
        "l2_norm": ((heads,), {}),
        "linear": ((x(B, T, P), W8A8(wide(K, P).to(torch.int8), wide(K))), {}),
        "mla_prolog": ((x(B, T, K), x(K, K), x(K), x(H * 2 * K, K), x(H, K, K), x(2 * K, K), x(K)), {}),
        "quantize_tokens": ((x(B, T, P),), {}),
        "residual_gated_rms_norm": ((heads, heads, heads, x(K)), {"eps": 1e-5}),
    }


def served(primitive: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> list[str]:
    """What each implementation says to this call, in the order of preference."""
    lines, taken = [primitive.__name__], False
    for impl, reason in explain(primitive, *args, **keywords).items():
        says = f"no: {reason}" if reason else "serves" if taken else "serves, and impl=None takes it"
        taken = taken or reason is None
        lines.append(f"    {impl:<10} {says}")
    return lines


def main() -> int:
    """Prints all of it."""
    for name, number in versions().items():
        print(f"{name:<14} {number or 'not installed'}")
    print("", *devices(), sep="\n")

    device = best_device()
    calls = sample_calls(device)
    sizes = f"B={B} T={T} H=HV={H} K=V={K} W={W}"
    print("", f"A call of each primitive, {sizes}, {layer_dtype(device)} on {device}", sep="\n")
    for primitive in sorted(PRIMITIVES, key=lambda function: function.__name__):
        call = calls.get(primitive.__name__)
        lines = served(primitive, *call) if call else [f"{primitive.__name__}: no sample call"]
        print("", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
