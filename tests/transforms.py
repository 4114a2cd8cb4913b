"""The 32 transforms: everything torch can do to a function, each once, over any function of tensors.

A `Problem` is a function of a flat tuple of floating-point tensors, which returns a tuple of tensors, and the
data to transform it with. A transform takes a problem to a pytree of tensors; two functions agree when
every transform of both gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

__all__ = [
    "EXPECTED",
    "HIGHER",
    "TRANSFORMS",
    "VALUES",
    "Function",
    "Problem",
    "Tensors",
    "Transform",
    "assert_same",
    "problem_of",
]

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


class Problem(NamedTuple):
    """A function and what it is transformed with.

    args, tangents          one point and one direction
    rows, row_tangents      several of each, stacked on a first axis
    few                     indices of some small arguments, for the orders whose cost is a product of sizes
    """

    function: Function
    args: Tensors
    tangents: Tensors
    rows: Tensors
    row_tangents: Tensors
    few: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """Indices of every argument."""
        return tuple(range(len(self.args)))

    @property
    def other(self) -> Tensors:
        """A second point, of the shapes of `args`: what a trace must not have baked in."""
        return tuple(row[0].clone() for row in self.rows)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Problem:
        """The same problem with its numbers in `dtype`, there."""
        groups = self.args, self.tangents, self.rows, self.row_tangents
        args, tangents, rows, row_tangents = (tuple(x.to(device, dtype) for x in group) for group in groups)
        return self._replace(args=args, tangents=tangents, rows=rows, row_tangents=row_tangents)

    def loss(self, *args: Tensor) -> Tensor:
        """A scalar whose derivatives of every order involve every output."""
        return torch.stack([(y.sin() + y.square()).sum() for y in self.function(*args)]).sum()


Transform = Callable[[Problem], Any]


def problem_of(
    function: Function,
    draw: Callable[[torch.Generator, tuple[int, ...]], Tensors],
    *,
    few: tuple[int, ...],
    rows: int = 3,
    seed: int = 0,
) -> Problem:
    """Draws the data; `draw(generator, lead)` returns the arguments with `lead` before each one's shape."""
    generator = torch.Generator().manual_seed(seed)
    args, stacked = draw(generator, ()), draw(generator, (rows,))

    def direction(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    return Problem(function, args, tuple(map(direction, args)), stacked, tuple(map(direction, stacked)), few)


def assert_same(actual: Any, expected: Any, *, rtol: float, floor: float = 1e-4) -> None:
    """As many leaves and, leaf by leaf, a relative RMSE of at most `rtol`; expected must not be all zeros.

    A leaf that cancels to (nearly) nothing, to less than `floor` of the largest, is measured against that.
    """
    leaves, expected_leaves = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(leaves) == len(expected_leaves), f"{len(leaves)} leaves, expected {len(expected_leaves)}"
    scale = max((_rms(leaf) for leaf in expected_leaves), default=0.0)
    assert scale > 0, "an all-zero output would pass this test"
    for n, (a, e) in enumerate(zip(leaves, expected_leaves, strict=True)):
        assert a.shape == e.shape, f"leaf {n} has shape {tuple(a.shape)}, expected {tuple(e.shape)}"
        error, size = _rms(a.detach().to(e.device) - e.detach()), _rms(e)
        bound = rtol * max(size, floor * scale)
        assert error <= bound, f"leaf {n} of {len(leaves)}: RMSE {error:.3g} of {size:.3g}"


def _rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item() if x.numel() else 0.0


def _leaves_of(args: Tensors) -> Tensors:
    """Copies that autograd records."""
    return tuple(x.detach().clone().requires_grad_() for x in args)


def _gradients(scalar: Tensor, args: Tensors, *, create_graph: bool = False) -> Tensors:
    """Zeros, not an error, for an argument that the function may leave out: an absent bias, of shape [0]."""
    return torch.autograd.grad(scalar, args, create_graph=create_graph, materialize_grads=True)


def _backward(p: Problem) -> Tensors:
    args = _leaves_of(p.args)
    return _gradients(p.loss(*args), args)


def _double_backward(p: Problem) -> Tensors:
    args = _leaves_of(p.args)
    gradients = _gradients(p.loss(*args), args, create_graph=True)
    return _gradients(torch.stack([g.square().sum() for g in gradients]).sum(), args)


def _pullback(p: Problem, *args: Tensor) -> Tensors:
    # The types of vjp and jvp allow for a third result, an auxiliary one.
    outputs, pull = cast("tuple[Tensors, Callable[[Tensors], Tensors]]", vjp(p.function, *args))
    return pull(tuple(y.cos() for y in outputs))


def _vmap_other_axes(p: Problem) -> Tensors:
    """Mapped axes at 1 and at -1, of the inputs and of the outputs."""
    in_dims = tuple((1, -1)[i % 2] for i in range(len(p.rows)))
    out_dims = tuple((-1, 1)[i % 2] for i in range(len(p.function(*p.args))))
    moved = (rows.movedim(0, axis) for rows, axis in zip(p.rows, in_dims, strict=True))
    return vmap(p.function, in_dims=in_dims, out_dims=out_dims)(*moved)


def _some(p: Problem) -> tuple[int | None, ...]:
    """in_dims that map every other argument, among them the last."""
    return tuple(None if (len(p.args) - 1 - i) % 2 else 0 for i in range(len(p.args)))


def _rows_of_some(p: Problem) -> Tensors:
    return tuple(p.args[i] if axis is None else p.rows[i] for i, axis in enumerate(_some(p)))


def _vmap_none(p: Problem) -> Tensors:
    return vmap(p.function, in_dims=_some(p))(*_rows_of_some(p))


def _vmap_vmap(p: Problem) -> Tensors:
    """The inner map over every argument, the outer one over some; each adds an axis to every output."""
    outer = _some(p)
    grids = (torch.stack([rows, rows.flip(0)]) for rows in p.rows)
    args = (rows if axis is None else grid for rows, grid, axis in zip(p.rows, grids, outer, strict=True))
    return vmap(vmap(p.function), in_dims=outer)(*args)


def _grad_vmap(p: Problem) -> list[Tensors]:
    """Over rows of everything, and over rows of some: the gradient of what is shared is a sum."""

    def total(in_dims: tuple[int | None, ...]) -> Callable[..., Tensor]:
        return lambda *args: vmap(p.loss, in_dims=in_dims)(*args).sum()

    everything = (0,) * len(p.args)
    return [grad(total(everything), p.all)(*p.rows), grad(total(_some(p)), p.all)(*_rows_of_some(p))]


def _vmap_grad(p: Problem) -> list[Tensors]:
    """Per-sample gradients: everything mapped, and some of the arguments shared."""
    per_sample = grad(p.loss, p.all)
    return [vmap(per_sample)(*p.rows), vmap(per_sample, in_dims=_some(p))(*_rows_of_some(p))]


def _vmap_jvp(p: Problem) -> Any:
    return vmap(lambda args, tangents: jvp(p.function, args, tangents))(p.rows, p.row_tangents)


def _jvp_jvp(p: Problem) -> Any:
    """Along two directions, one after the other."""
    inner = tuple(rows[0] for rows in p.row_tangents)
    return jvp(lambda *args: jvp(p.function, args, inner), p.args, p.tangents)


def _third_order(p: Problem) -> Any:
    a, b, c = (p.few[i % len(p.few)] for i in range(3))
    return jacfwd(jacfwd(jacrev(p.loss, a), b), c)(*p.args)


def _linearize(p: Problem) -> tuple[Tensors, Tensors]:
    outputs, push = linearize(p.function, *p.args)
    return outputs, push(*p.tangents)


def _checkpoint(p: Problem) -> Tensors:
    return _backward(p._replace(function=lambda *args: checkpoint(p.function, *args, use_reentrant=False)))


def _compiled(function: Callable[..., Any], p: Problem, *, backend: str) -> Any:
    """Compiled at one point, called at another."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    compiled(*p.other)
    with torch.compiler.set_stance("fail_on_recompile"):
        return compiled(*p.args)


def _export(p: Problem) -> Tensors:
    class Module(torch.nn.Module):
        def forward(self, *args: Tensor) -> Tensors:
            return p.function(*args)

    return torch.export.export(Module(), p.other).module()(*p.args)


TRANSFORMS: dict[str, Transform] = {
    "plain": lambda p: p.function(*p.args),
    "backward": _backward,
    "double backward": _double_backward,
    "grad": lambda p: grad(p.loss, p.all)(*p.args),
    "vjp": lambda p: _pullback(p, *p.args),
    "vmap": lambda p: vmap(p.function)(*p.rows),
    "vmap, other axes": _vmap_other_axes,
    "vmap, None for some": _vmap_none,
    "vmap(vmap)": _vmap_vmap,
    "grad(vmap)": _grad_vmap,
    "vmap(grad)": _vmap_grad,
    "jvp": lambda p: jvp(p.function, p.args, p.tangents),
    "jvp(vmap)": lambda p: jvp(vmap(p.function), p.rows, p.row_tangents),
    "vmap(jvp)": _vmap_jvp,
    "jacrev": lambda p: jacrev(p.function, p.all)(*p.args),
    "jacfwd": lambda p: jacfwd(p.function, p.all)(*p.args),
    "hessian": lambda p: hessian(p.loss, p.all)(*p.args),
    "jacrev(jacfwd)": lambda p: jacrev(jacfwd(p.loss, p.few[:2]), p.few)(*p.args),
    "jacrev(jacrev)": lambda p: jacrev(jacrev(p.loss, p.all), p.few)(*p.args),
    "jacfwd(jacfwd)": lambda p: jacfwd(jacfwd(p.loss, p.few[:2]), p.few)(*p.args),
    "jvp(jvp)": _jvp_jvp,
    "third order": _third_order,
    "vmap(hessian)": lambda p: vmap(hessian(p.loss, p.few))(*p.rows),
    "functionalize": lambda p: functionalize(p.function)(*p.args),
    "functionalize(grad)": lambda p: functionalize(grad(p.loss, p.all))(*p.args),
    "linearize": _linearize,
    "vmap(vjp), chunk_size": lambda p: vmap(partial(_pullback, p), chunk_size=2)(*p.rows),
    "checkpoint": _checkpoint,
    "make_fx": lambda p: make_fx(p.function)(*p.other)(*p.args),
    "compile": lambda p: _compiled(p.function, p, backend="aot_eager"),
    "compile(grad)": lambda p: _compiled(grad(p.loss, p.all), p, backend="eager"),
    "export": _export,
}
"""By name; outermost first. The hessian is jacfwd(jacrev)."""

EXPECTED: dict[str, str] = {
    "functionalize": "plain",
    "functionalize(grad)": "grad",
    "linearize": "jvp",
    "checkpoint": "backward",
    "make_fx": "plain",
    "compile": "plain",
    "compile(grad)": "grad",
    "export": "plain",
}
"""Transforms that change how a function runs, not what it computes: what each must equal."""

VALUES = {"plain", "vmap", "vmap, other axes", "vmap, None for some", "vmap(vmap)"} | {
    name for name, same in EXPECTED.items() if same == "plain"
}
"""Transforms that take no derivative."""

HIGHER = {
    "double backward",
    "hessian",
    "jacrev(jacfwd)",
    "jacrev(jacrev)",
    "jacfwd(jacfwd)",
    "jvp(jvp)",
    "third order",
    "vmap(hessian)",
}
"""Transforms that take a derivative of a derivative."""
