"""A fused kernel as an implementation that every transform of torch can pass through.

Three layers. A raw operator, opaque to torch, with a rule for its outputs' shapes. Around it an
`autograd.Function` without a jvp rule (one would be silently wrong under jvp of jvp): its vmap rule is one
more batch axis; its backward is a kernel of the same three layers, or else the fallback's. And the call,
which takes the fallback itself where torch offers no sound hook: in forward mode and under `functionalize`.

A backward kernel's fallback is the pullback of the forward's, in pure torch, and its own backward is that
function's: every higher order follows.

All private names of torch that this needs are in this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import _add_batch_dim, _remove_batch_dim  # pyright: ignore[reportPrivateImportUsage]
from torch._C import (
    _AutoDispatchBelowADInplaceOrView,
    _dispatch_keys,
    _functorch,  # pyright: ignore[reportAttributeAccessIssue]
    _parse_dispatch_key,
    _vmapmode_decrement_nesting,
    _vmapmode_increment_nesting,
)
from torch.autograd import forward_ad
from torch.utils._pytree import _register_namedtuple, tree_map

from kda_fn import ragged
from kda_fn.primitives import _targets
from kda_fn.primitives._primitive import Function, Implementation
from kda_fn.types import Tensor

__all__ = [
    "can_be_read",
    "eager_inference_only",
    "fused",
    "fused_attention_serves",
    "kernel",
    "nothing_is_recorded",
    "one_node",
    "operator",
    "register_for_export",
    "wants_torch_operations",
    "with_gradients",
]

Options = tuple[tuple[str, Any], ...]
Tensors = tuple[Tensor, ...]

LIBRARY = torch.library.Library("kda_fn", "FRAGMENT")
HALVES = torch.bfloat16, torch.float16
DTYPES = (torch.float32, *HALVES)
_BATCHED: Any = _parse_dispatch_key("Batched")
_KERNELS: dict[str, _Kernel] = {}


def kernel(
    schema: str,
    *,
    module: str,
    outputs: Callable[..., Tensors],
    fallback: Callable[..., Any],
    shared: tuple[int, ...] = (),
    backward: bool | Literal["half"] = False,
    unsupported: Callable[..., str | None] = lambda *_args, **_kwargs: None,
) -> Implementation:
    """The Triton implementation of a primitive.

    schema        of the operator: "name(Tensor x, *, float eps) -> Tensor", arguments as the primitive's
    module        where `launch_name(outputs, *tensors, **options)` fills them; imported at the first launch
    outputs       new, uninitialised tensors for the results, from the primitive's arguments
    fallback      pure torch, the same function: what is differentiated
    shared        positions of the tensors that carry no batch axes
    backward      "half": where nothing is in half precision, the fallback's derivative serves. Otherwise
                  there is `launch_name_backward(gradients, *cotangents, *tensors, **options, rows=..)` too:
                  it fills a gradient for each tensor that is not None; that of a shared one, a sum over all
                  batch axes but the first `rows`, is [*B[:rows], *shape]
    unsupported   this kernel's own reasons, besides device and dtype
    """
    pullback = _pullback_kernel(schema, module, fallback, shared) if backward else None
    built = _Kernel(schema, module, outputs, fallback, shared, pullback, halves_only=backward == "half")

    def reason(*tensors: Tensor | None, **options: Any) -> str | None:
        present = [x for x in tensors if x is not None]
        for x in present:
            if x.dtype not in DTYPES:
                return f"Triton kernels compute in float32, bfloat16 and float16, not in {x.dtype}"
        return _targets.unavailable(present[0]) or unsupported(*tensors, **options)

    return Implementation(wraps(fallback)(built), reason)


def with_gradients(
    schema: str,
    *,
    forward: Callable[..., Tensors],
    gradients: str,
    outputs: Callable[..., Tensors],
    recorded: int,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function of pure torch whose first derivative is code of its own, in pure torch too.

    schema        of an operator: the function's tensors and options, then `bool record, bool compiled`; with
                  `compiled` the call comes from a compiled graph
    forward       the operator
    gradients     module of `<name>_backward(*cotangents, *tensors, *recorded, **options, rows=0)`: a list of
                  gradients, one for each tensor
    outputs       new, uninitialised tensors for the results, from the operator's arguments
    recorded      how many of its last results are for its derivative alone; they are empty unless `record`

    Where nothing is recorded, in forward mode and for higher orders the function itself serves; so it does
    in exported programs, which then need no operator of ours.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def without_flags(*tensors: Tensor, record: bool, compiled: bool, **options: Any) -> Any:
            return function(*tensors, **options)

        def backward(*tensors: Tensor, **options: Any) -> list[Tensor]:
            return getattr(importlib.import_module(gradients), f"{name}_backward")(*tensors, **options)

        name = schema.partition("(")[0]
        pullback = _pullback_kernel(
            schema, gradients, without_flags, (), recorded=recorded, function=backward
        )
        _Kernel(schema, gradients, outputs, without_flags, (), pullback, recorded=recorded, function=forward)

        @wraps(function)
        def call(*tensors: Tensor, **options: Any) -> Any:
            options = {**defaults, **options}
            compiled = torch.compiler.is_compiling()
            if options.get("cu_seqlens") is not None:
                options["cu_seqlens"] = ragged.offsets(options["cu_seqlens"])
            if wants_torch_operations() or nothing_is_recorded(tensors) or torch.compiler.is_exporting():
                return function(*tensors, **options)
            flags = {"record": torch.is_grad_enabled(), "compiled": compiled}
            return _apply(name, tuple({**options, **flags}.items()), *tensors)[:-recorded]

        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return call

    return decorate


def fused(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """A part of an operator as it is, or as Inductor makes it.

    There is a version for all sizes of the tensors' second axis beyond one, and for each of all the others.
    """
    if not compiled:
        return function

    def call(*tensors: Tensor, **options: Any) -> Any:
        inputs = [x.detach() for x in tensors]
        for x in inputs:
            if x.shape[1] > 1:
                torch._dynamo.mark_dynamic(x, 1)
        sizes = [(x.dtype, len(x), min(x.shape[1], 2), *x.shape[2:]) for x in inputs]
        # An operator is called from above and from below autograd: without this a version for each.
        with _AutoDispatchBelowADInplaceOrView():
            return _compiled(function, repr((sizes, options)))(*inputs, **options)

    return call


@cache
def _compiled(function: Any, key: str) -> Callable[..., Any]:
    # Code of its own: Dynamo limits the versions of one. With symbols for all sizes Inductor 2.13 leaves
    # parts of its results unwritten.
    own = FunctionType(function.__code__.replace(), function.__globals__)
    own.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(own, dynamic=False, fullgraph=True)


def operator(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """`function` as an operator that is opaque to torch; `fake` makes outputs of its outputs' shapes."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for key in ("CPU", "CUDA", "PrivateUse1"):
        LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"kda_fn::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.kda_fn, name).default


class _Kernel:
    def __init__(
        self,
        schema: str,
        module: str,
        outputs: Callable[..., Tensors],
        fallback: Callable[..., Any],
        shared: tuple[int, ...],
        backward: _Kernel | None = None,
        *,
        halves_only: bool = False,
        recorded: int = 0,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.module = module
        self.outputs = outputs
        self.fallback = fallback
        self.shared = shared
        self.backward = backward
        self.halves_only = halves_only
        self.recorded = recorded
        self.results: Callable[[Tensors], Any] = list if schema.endswith("Tensor[]") else _one_or_all
        _KERNELS[self.name] = self
        self.operator = operator(schema, function or self._launch, self._allocate)

    def __call__(self, *tensors: Tensor | None, **options: Any) -> Any:
        if options.get("cu_seqlens") is not None:
            options["cu_seqlens"] = ragged.offsets(options["cu_seqlens"])
        if wants_torch_operations():
            return self.fallback(*tensors, **options)
        if nothing_is_recorded(tensors):
            return self.raw(*tensors, **options)
        return _apply(self.name, tuple(options.items()), *tensors)

    def raw(self, *tensors: Tensor | None, **options: Any) -> Any:
        """The operator alone. A list of results is a tuple here, or its only one."""
        results = self.operator(*tensors, **options)
        return _one_or_all(tuple(results)) if isinstance(results, list) else results

    def _allocate(self, *tensors: Tensor | None, **options: Any) -> Any:
        return self.results(self.outputs(*tensors, **options))

    def _launch(self, *tensors: Tensor | None, **options: Any) -> Any:
        outputs = self.outputs(*tensors, **options)
        launch = getattr(importlib.import_module(self.module), f"launch_{self.name}")
        with _on_device_of(outputs[0]):
            launch(outputs, *tensors, **options)
        return self.results(outputs)


def _pullback_kernel(
    schema: str,
    module: str,
    forward: Callable[..., Any],
    shared: tuple[int, ...],
    *,
    recorded: int = 0,
    function: Callable[..., Any] | None = None,
) -> _Kernel:
    """name_backward(cotangents .., tensors .., recorded .., *, options .., int rows) -> Tensor[]

    The last `recorded` results of the forward are inputs in the place of their cotangents.
    """
    name, _, rest = schema.partition("(")
    arguments, _, returns = rest.rpartition(") -> ")
    tensors, _, options = arguments.partition(", *")
    count = returns.count("Tensor") - recorded
    cotangents = "".join(f"Tensor cotangent_{n}, " for n in range(count))
    extra = "".join(f", Tensor recorded_{n}" for n in range(recorded))
    without_axes = tuple(count + i for i in shared)

    def of(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return inputs[count : len(inputs) - recorded]

    def gradients(*inputs: Tensor | None, rows: int, **_options: Any) -> Tensors:
        assert inputs[0] is not None
        kept = inputs[0].shape[:rows]
        return tuple(
            x.new_empty((*kept, *x.shape) if i in shared else x.shape)
            for i, x in enumerate(of(inputs))
            if x is not None
        )

    def fallback(*inputs: Tensor | None, rows: int, **options: Any) -> Any:
        present = [i for i, x in enumerate(of(inputs)) if x is not None]

        def pull(*inputs: Tensor | None) -> Tensors:
            return _pullback(forward, of(inputs), options, present, inputs[:count])

        axes = tuple(None if x is None or i in without_axes else 0 for i, x in enumerate(inputs))
        for _ in range(rows):
            pull = torch.func.vmap(pull, in_dims=axes)
        return _one_or_all(pull(*inputs))

    backward = f"{name}_backward({cotangents}{tensors}{extra}, *{options}, int rows) -> Tensor[]"
    return _Kernel(backward, module, gradients, fallback, without_axes, function=function)


def _pullback(
    function: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    options: dict[str, Any],
    wanted: list[int],
    cotangents: Any,
) -> Tensors:
    """Gradients of the tensors at the wanted positions, by torch."""

    def of_wanted(*chosen: Tensor) -> Any:
        arguments = dict(enumerate(tensors)) | dict(zip(wanted, chosen, strict=True))
        return function(*arguments.values(), **options)

    pull: Any = torch.func.vjp(of_wanted, *(tensors[i] for i in wanted))[1]
    return pull(_one_or_all(cotangents))


class _Function(torch.autograd.Function):
    """Takes the kernel's name and options, then its tensors, some of which may be None."""

    @staticmethod
    def forward(name: str, options: Options, *tensors: Tensor | None) -> Any:
        return _KERNELS[name].raw(*tensors, **dict(options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, ctx.options, *tensors = inputs
        recorded = output[len(output) - _KERNELS[ctx.name].recorded :] if isinstance(output, tuple) else ()
        ctx.mark_non_differentiable(*recorded)
        ctx.save_for_backward(*tensors, *recorded)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        kernel, options, needed = _KERNELS[ctx.name], dict(ctx.options), ctx.needs_input_grad[2:]
        # What was saved under a level that has ended is still wrapped in it.
        saved = [x if x is None else _functorch.unwrap_if_dead(x) for x in ctx.saved_tensors]
        tensors, recorded = saved[: len(needed)], saved[len(needed) :]
        halves = any(x.dtype in HALVES for x in tensors if x is not None)
        if kernel.backward is None or (kernel.halves_only and not halves):
            wanted = [i for i, needs in enumerate(needed) if needs]
            gradients = _pullback(kernel.fallback, tensors, options, wanted, cotangents)
        else:
            wanted = [i for i, x in enumerate(tensors) if x is not None]
            of_results = cotangents[: len(cotangents) - kernel.recorded]
            gradients = _of_each_row(kernel.backward, *of_results, *tensors, *recorded, **options, rows=0)
            gradients = (gradients,) if isinstance(gradients, Tensor) else gradients
        found = dict(zip(wanted, gradients, strict=True))
        return None, None, *(found.get(i) if needs else None for i, needs in enumerate(needed))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        name, options, *tensors = args
        shared = _KERNELS[name].shared
        mapped = [axis is not None for axis in in_dims[2:]]
        front = [x if a is None else x.movedim(a, 0) for x, a in zip(tensors, in_dims[2:], strict=True)]
        if any(mapped[i] for i in shared):
            # A weight of each row's own: one launch for each.
            rows = (
                [x[n] if m else x for x, m in zip(front, mapped, strict=True)] for n in range(info.batch_size)
            )
            results = [_Function.apply(name, options, *row) for row in rows]
            if isinstance(results[0], Tensor):
                return torch.stack(results), 0
            stacked = tuple(torch.stack(ys) for ys in zip(*results, strict=True))
            return stacked, (0,) * len(stacked)
        batch = [
            x if m or x is None or i in shared else x.expand(info.batch_size, *x.shape)
            for i, (x, m) in enumerate(zip(front, mapped, strict=True))
        ]
        # A gradient that a backward sums is each row's own.
        options = tuple((key, value + 1 if key == "rows" else value) for key, value in options)
        result: Any = _Function.apply(name, options, *batch)
        return result, (0 if isinstance(result, Tensor) else (0,) * len(result))


def _of_each_row(kernel: _Kernel, *tensors: Tensor | None, **options: Any) -> Any:
    """The kernel, also inside `autograd.grad(is_grads_batched=True)`, whose vmap is not torch.func's."""
    mapped = [i for i, x in enumerate(tensors) if x is not None and _dispatch_keys(x).has(_BATCHED)]
    if not mapped:
        return kernel(*tensors, **options)
    level = _vmapmode_increment_nesting() - 1
    _vmapmode_decrement_nesting()
    # The size is for tensors that are not mapped.
    inside: dict[int, Any] = dict(enumerate(tensors))
    inside |= {i: _remove_batch_dim(inside[i], level, 1, 0) for i in mapped}
    (size,) = {len(inside[i]) for i in mapped}
    in_dims = None, None, *(0 if i in mapped else None for i in inside)
    rule: Any = _Function.vmap
    info = SimpleNamespace(batch_size=size)
    results, _ = rule(info, in_dims, kernel.name, tuple(options.items()), *inside.values())
    return tree_map(lambda y: _add_batch_dim(y, 0, level), results)


def _one_or_all(tensors: Tensors) -> Tensor | Tensors:
    """A function of one result returns it alone."""
    (first, *others) = tensors
    return tensors if others else first


_NODES: list[Callable[..., Any]] = []


def one_node(function: Function) -> Function:
    """A function that compiled graphs take as it is: torch.func inside them still reaches its rules."""
    _NODES.append(function)
    if "torch._dynamo" in sys.modules:
        torch.compiler.allow_in_graph(function)
    return function


@one_node
def _apply(name: str, options: Options, *tensors: Tensor | None) -> Any:
    return _Function.apply(name, options, *tensors)


class _WhenDynamoComes(MetaPathFinder):
    """Allows the nodes in graphs as soon as somebody imports Dynamo, which takes seconds to import."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: Any) -> None:
                load(module)
                for function in _NODES:
                    module.allow_in_graph(function)

            spec.loader.exec_module = load_and_tell
        return spec


if "torch._dynamo" not in sys.modules:
    sys.meta_path.insert(0, _WhenDynamoComes())


def register_for_export(*classes: type) -> None:
    """Lets `torch.export.save` write programs that take or return these named tuples."""
    for cls in classes:
        _register_namedtuple(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")


def wants_torch_operations() -> bool:
    """Whether a transform is active that cannot be told about a kernel."""
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():
        return False
    return _functorch.TransformType.Functionalize in _transforms()


def fused_attention_serves(x: Tensor) -> bool:
    """Whether torch's fused attention goes through the active transforms: it has no forward mode and no
    second derivative, and on a CPU no batching rule."""
    if wants_torch_operations():
        return False
    if torch.compiler.is_compiling():
        return True
    kinds = _transforms()
    is_mapped = _functorch.TransformType.Vmap in kinds
    return kinds.count(_functorch.TransformType.Grad) < 2 and not (is_mapped and x.device.type == "cpu")


def _transforms() -> list[Any]:
    """The kinds of the active transforms of torch.func, the outermost first."""
    return [level.key() for level in _functorch.get_interpreter_stack() or ()]


def can_be_read(x: Tensor) -> bool:
    """Whether a tensor's values are at hand: no transform, no tracing."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return type(x) is Tensor and _functorch.peek_interpreter_stack() is None


def eager_inference_only(name: str, x: Tensor, *others: Tensor | None) -> str | None:
    """Why `name`, an operator with no rule for derivatives or transforms, cannot serve here, or None."""
    if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in (x, *others)):
        return f"{name} is for inference, and a tensor here requires a gradient"
    if wants_torch_operations() or not can_be_read(x):
        return f"{name} is called eagerly, under no transform and no tracing"
    return None


def nothing_is_recorded(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the raw operator can be called as it is: that saves half of a small call's time."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    if _functorch.peek_interpreter_stack() is not None:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


def _on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever its arguments are."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
