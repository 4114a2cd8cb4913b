"""One signature, several implementations, and the choice among them.

A primitive's package keeps each implementation in a module of its own, all with the signature of
`reference.py`, and its `__init__.py` declares the public function:

    _KDA = Primitive("kda", check=_check, reference=reference.kda, fallback=fallback.kda)

    @_KDA.public
    def kda(initial_state, q, ..., impl=None):
        return _KDA(impl, initial_state, q, ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, get_args

import torch

from kda_fn.types import Impl, Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = ["PRIMITIVES", "Implementation", "Primitive", "check_impl", "explain"]

PREFERENCE: tuple[Impl, ...] = ("ascendc", "triton", "fallback", "reference")
PRIMITIVES: dict[Callable[..., Any], Primitive[..., Any]] = {}
"""Every public function that has a choice of implementations."""


def _always_serves(*_args: Any, **_kwargs: Any) -> None:
    return None


class Implementation(NamedTuple):
    """A function with the primitive's signature, and its reason for not serving a call (None: it can)."""

    call: Callable[..., Any]
    unsupported: Callable[..., str | None] = _always_serves


class Primitive(Generic[Arguments, Result]):
    """Checks the arguments, picks an implementation, calls it.

    name            of the public function
    check           raises ValueError or TypeError for arguments that no implementation may see
    reference       the definition: pure torch, as close to the equation as code can be
    fallback        pure torch and fast; leave it out where the definition already is
    kernels         further implementations by name ("triton", "ascendc")
    """

    def __init__(
        self,
        name: str,
        *,
        check: Callable[Arguments, None],
        reference: Callable[Arguments, Result],
        fallback: Callable[Arguments, Result] | None = None,
        kernels: dict[Impl, Implementation] | None = None,
    ) -> None:
        self.name = name
        self.check = check
        self.implementations: dict[Impl, Implementation] = {
            **(kernels or {}),
            "fallback": Implementation(fallback or reference),
            "reference": Implementation(reference),
        }

    def public(self, function: Function) -> Function:
        """Registers the public function, so that `explain` and `python -m kda_fn` find its primitive."""
        PRIMITIVES[function] = self
        return function

    def unsupported(self, impl: Impl, *args: Arguments.args, **kwargs: Arguments.kwargs) -> str | None:
        """Why `impl` cannot serve this call, or None."""
        if impl not in self.implementations:
            return f"{self.name} has no {impl} implementation yet"
        return self.implementations[impl].unsupported(*args, **kwargs)

    def __call__(self, impl: Impl | None, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        self.check(*args, **kwargs)
        implementation = self.implementations[self._choose(impl, *args, **kwargs)]
        device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        if device != "meta" and torch.is_autocast_enabled(device):
            # Autocast would put the state's arithmetic into half precision.
            with torch.autocast(device, enabled=False):
                return implementation.call(*args, **kwargs)
        return implementation.call(*args, **kwargs)

    def _choose(self, impl: Impl | None, *args: Any, **kwargs: Any) -> Impl:
        if impl is None:
            return next(name for name in PREFERENCE if self.unsupported(name, *args, **kwargs) is None)
        check_impl(self.name, impl)
        reason = self.unsupported(impl, *args, **kwargs)
        if reason is not None:
            raise NotImplementedError(f"{self.name}: impl={impl!r} cannot serve this call: {reason}")
        return impl


def check_impl(caller: str, impl: Impl | None) -> None:
    """ValueError unless impl is None or the name of an implementation."""
    if impl is not None and impl not in PREFERENCE:
        raise ValueError(f"{caller}: impl must be None or one of {get_args(Impl)}, got {impl!r}")


def explain(primitive: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[Impl, str | None]:
    """For each implementation, in order of preference: None if it serves this very call, else why not.

    `explain(kda, state, q, k, v, g, beta)` takes the arguments of the call it explains, and raises what
    that call would raise for wrong ones.

    >>> S, k, v, beta = torch.zeros(1, 4, 2), torch.ones(3, 1, 4), torch.ones(3, 1, 2), torch.ones(3, 1)
    >>> explain(kda, S, k, k, v, -k, beta)["reference"] is None  # nothing speaks against it
    True
    """
    if primitive not in PRIMITIVES:
        names = sorted(function.__name__ for function in PRIMITIVES)
        raise ValueError(f"explain: {primitive!r} is not one of the primitives {names}")
    bound = inspect.signature(primitive).bind(*args, **kwargs)
    bound.apply_defaults()
    keywords = {name: value for name, value in bound.kwargs.items() if name != "impl"}
    chosen = PRIMITIVES[primitive]
    chosen.check(*bound.args, **keywords)
    return {impl: chosen.unsupported(impl, *bound.args, **keywords) for impl in PREFERENCE}
