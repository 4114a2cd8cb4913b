"""The l2 normalisation of queries and keys: y = x · rsqrt(Σ x² + eps), over the last axis."""

from __future__ import annotations

from kda_fn import _check
from kda_fn.primitives import _targets
from kda_fn.primitives._kernel import kernel
from kda_fn.primitives._primitive import Primitive
from kda_fn.primitives.l2_norm import reference
from kda_fn.types import Float, Impl, Tensor

__all__ = ["l2_norm"]


def _check_l2_norm(x: Tensor, *, eps: float) -> None:
    _check.floating("l2_norm", {"x": x})
    _check.shapes("l2_norm", {"x": (x, "*B F")})
    _check.epsilon("l2_norm", "eps", eps)


def _outputs(x: Tensor, **_options: object) -> tuple[Tensor, ...]:
    return (x.new_empty(x.shape),)


_L2_NORM = Primitive(
    "l2_norm",
    check=_check_l2_norm,
    reference=reference.l2_norm,
    kernels={
        "triton": kernel(
            "l2_norm(Tensor x, *, float eps) -> Tensor",
            module="kda_fn.primitives.l2_norm.kernels",
            outputs=_outputs,
            fallback=reference.l2_norm,
            backward=True,
            unsupported=lambda x, **_options: _targets.row_too_long(x.shape[-1]),
        )
    },
)


@_L2_NORM.public
def l2_norm(
    x: Float[Tensor, "*B F"], *, eps: float = 1e-6, impl: Impl | None = None
) -> Float[Tensor, "*B F"]:
    """Scales each vector on the last axis to length one: y = x · rsqrt(Σ x² + eps).

    eps is added to the SUM of squares: a vector of norm 1e-3 keeps its direction and comes out with norm 0.7.
    The arithmetic is float32 at least, y has x's dtype.

    Raises ValueError or TypeError for an argument that does not fit, NotImplementedError for a named impl
    that cannot serve.

    >>> l2_norm(torch.tensor([3.0, 4]))
    tensor([0.6000, 0.8000])
    """
    return _L2_NORM(impl, x, eps=eps)
