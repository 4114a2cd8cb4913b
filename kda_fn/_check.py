"""Argument checks shared by the whole library: they read as the signatures do, and cost microseconds.

Every message names the argument, what it was, and what fits. Shapes, dtypes and devices are known under
every transform, so the messages are the same there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Sizes",
    "batch_shape",
    "epsilon",
    "exact_shapes",
    "float_dtype",
    "floating",
    "instance",
    "is_quantised",
    "leaves",
    "multiple_heads",
    "number",
    "one_device",
    "one_of",
    "positive_integer",
    "power_of_two",
    "promised_bound",
    "same_dtype",
    "shapes",
    "state_dtype",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Sizes = dict[str, int | tuple[int, ...]]


def instance(caller: str, name: str, value: object, kind: type) -> None:
    """TypeError unless the value is of that type."""
    if not isinstance(value, kind):
        raise TypeError(f"{caller}: {name} must be {kind.__name__}, got {type(value).__name__}")


def leaves(name: str, tree: Any) -> dict[str, Any]:
    """The leaves of nested NamedTuples and tuples, by what Python would call them: `params.decay.up`.

    Quantised weights are left out: `kda_fn.linear` checks them.
    """
    if not isinstance(tree, tuple):
        return {name: tree}
    if is_quantised(tree):
        return {}
    fields = getattr(tree, "_fields", None)
    children = [f".{field}" for field in fields] if fields else [f"[{i}]" for i in range(len(tree))]
    return {
        path: leaf
        for child, value in zip(children, tree, strict=True)
        for path, leaf in leaves(name + child, value).items()
    }


def is_quantised(weight: Any) -> bool:
    """Whether a weight is a W8A8: a tuple with the shape of a tensor."""
    return isinstance(weight, tuple) and hasattr(weight, "shape")


def floating(caller: str, tensors: dict[str, Any]) -> None:
    """TypeError unless all are floating-point tensors, ValueError unless all are on one device."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{caller}: {name} must be a tensor, got {type(x).__name__}")
        if x.dtype not in FLOATS:
            raise TypeError(f"{caller}: {name} must be a float of 16, 32 or 64 bits, got {x.dtype}")
    one_device(caller, tensors)


def one_device(caller: str, tensors: dict[str, Tensor]) -> None:
    """ValueError unless all are on one device."""
    odd = _odd_ones({name: x.device for name, x in tensors.items()}, "on ")
    if odd:
        raise ValueError(f"{caller}: all tensors must be on one device, got {odd}")


def same_dtype(caller: str, tensors: dict[str, Tensor]) -> None:
    """TypeError unless all have one dtype."""
    odd = _odd_ones({name: x.dtype for name, x in tensors.items()})
    if odd:
        raise TypeError(f"{caller}: dtypes must agree, got {odd}")


def _odd_ones(values: dict[str, Any], word: str = "") -> str:
    """The first and those that differ from it, in words; empty where none does."""
    first = next(iter(values.values()))
    differing = [f"{name} {word}{value}" for name, value in values.items() if value != first]
    return ", ".join([f"{next(iter(values))} {word}{first}", *differing]) if differing else ""


def exact_shapes(caller: str, expected: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """ValueError unless every tensor has the shape beside it."""
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"{caller}: {name} has shape {tuple(x.shape)}, expected {shape}")


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
    fits = f"{caller}: lower_bound must be None or in [-5, 0), got {lower_bound!r}"
    if not isinstance(lower_bound, int | float | None):
        raise TypeError(fits)
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(fits)


def number(caller: str, name: str, value: object) -> None:
    """TypeError unless the value is a number."""
    if not isinstance(value, int | float):
        raise TypeError(f"{caller}: {name} must be a number, got {value!r}")


def epsilon(caller: str, name: str, value: float) -> None:
    """TypeError unless the value is a number, ValueError if it is negative or NaN."""
    number(caller, name, value)
    if not value >= 0:
        raise ValueError(f"{caller}: {name} must not be negative, got {value}")


def float_dtype(caller: str, dtype: torch.dtype) -> None:
    """TypeError unless parameters and states may have that dtype."""
    if dtype not in FLOATS:
        raise TypeError(f"{caller}: dtype must be a float of 16, 32 or 64 bits, got {dtype}")


def batch_shape(caller: str, value: object) -> None:
    """TypeError unless the value is a tuple, or a list, of what may be sizes."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{caller}: batch_shape must be a tuple of sizes, got {value!r}: one axis is (3,)")


def positive_integer(caller: str, name: str, value: object) -> None:
    """ValueError unless the value is 1, 2, 3, .."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{caller}: {name} must be a positive integer, got {value!r}")


def power_of_two(caller: str, name: str, value: object) -> None:
    """ValueError unless the value is 1, 2, 4, .."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise ValueError(f"{caller}: {name} must be a power of two, got {value!r}")
