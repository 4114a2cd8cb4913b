"""Argument checks shared by the whole library: they read as the signatures do, and cost microseconds.

Every message names the argument, what it was, and what fits. Shapes, dtypes and devices are known under
every transform, so the messages are the same there.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "Sizes",
    "floating",
    "multiple_heads",
    "one_of",
    "power_of_two",
    "promised_bound",
    "same_dtype",
    "shapes",
    "state_dtype",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Sizes = dict[str, int | tuple[int, ...]]


def floating(caller: str, tensors: dict[str, Tensor]) -> None:
    """TypeError unless all are floating-point tensors, ValueError unless all are on one device."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{caller}: {name} must be a tensor, got {type(x).__name__}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{caller}: {name} must be a float of 16, 32 or 64 bits, got {x.dtype}")
    devices = {name: x.device for name, x in tensors.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{caller}: all tensors must be on one device, got {where}")


def same_dtype(caller: str, tensors: dict[str, Tensor]) -> None:
    """TypeError unless all have one dtype."""
    dtypes = {name: x.dtype for name, x in tensors.items()}
    if len(set(dtypes.values())) > 1:
        which = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"{caller}: dtypes must agree, got {which}")


def shapes(caller: str, specs: dict[str, tuple[Tensor, str]]) -> Sizes:
    """Binds the letters of each spec to sizes, in order; ValueError where a later shape disagrees.

    `shapes("l2_norm", {"x": (x, "*B T F")})` returns `{"*B": (2,), "T": 5, "F": 8}`. A letter may be followed
    by `-1`.
    """
    sizes: Sizes = {}
    for name, (x, spec) in specs.items():
        letters = spec.split()
        shape = tuple(x.shape)
        lead = len(shape) - (len(letters) - letters[0].startswith("*"))
        if lead < 0 or (lead and not letters[0].startswith("*")):
            raise ValueError(f"{caller}: {name} has shape {shape}, expected [{spec}]")
        if letters[0].startswith("*"):
            fits = sizes.setdefault(letters[0], shape[:lead]) == shape[:lead]
            letters = letters[1:]
        else:
            fits = True
        for letter, size in zip(letters, shape[lead:], strict=True):
            if letter.endswith("-1"):
                fits &= sizes.setdefault(letter[:-2], size + 1) == size + 1
            else:
                fits &= sizes.setdefault(letter, size) == size
        if not fits:
            known = " ".join(f"{letter}={sizes[letter]}" for letter in _letters(spec))
            raise ValueError(f"{caller}: {name} has shape {shape}, expected [{spec}] with {known}")
    return sizes


def _letters(spec: str) -> list[str]:
    return [letter.removesuffix("-1") for letter in spec.split()]


def state_dtype(caller: str, tensors: dict[str, Tensor]) -> None:
    """TypeError unless the last tensor, the state, is float32, or float64 as it must be beside float64."""
    *inputs, (name, state) = tensors.items()
    double = any(x.dtype == torch.float64 for _, x in inputs)
    if state.dtype != torch.float64 and (double or state.dtype != torch.float32):
        needed = "float64 beside float64 inputs" if double else "float32 or float64"
        raise TypeError(f"{caller}: {name} must be {needed}, got {state.dtype}")


def multiple_heads(caller: str, sizes: Sizes) -> None:
    """ValueError unless H divides HV."""
    H, HV = sizes["H"], sizes["HV"]
    assert isinstance(H, int) and isinstance(HV, int)
    if H == 0 or HV % H:
        raise ValueError(f"{caller}: value heads must be a multiple of key heads, got HV={HV} and H={H}")


def one_of(caller: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    """ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{caller}: {name} must be one of {allowed}, got {value!r}")


def promised_bound(caller: str, lower_bound: float | None) -> None:
    """ValueError unless the bound of the decay is None or in [-5, 0)."""
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"{caller}: lower_bound must be None or in [-5, 0), got {lower_bound}")


def power_of_two(caller: str, name: str, value: int) -> None:
    """ValueError unless the value is 1, 2, 4, .."""
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ValueError(f"{caller}: {name} must be a power of two, got {value!r}")
