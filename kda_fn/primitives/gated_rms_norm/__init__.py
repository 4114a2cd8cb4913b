"""RMS norm with an output gate, over the last axis: y = x · rsqrt(mean(x²) + eps) · weight · act(gate).

x, gate, y [*B F]   weight [F]      act: sigmoid (KDA) or SiLU
"""

from __future__ import annotations

from kda_fn import _check
from kda_fn.primitives import _targets
from kda_fn.primitives._kernel import kernel
from kda_fn.primitives._primitive import Primitive
from kda_fn.primitives.gated_rms_norm import reference
from kda_fn.types import Activation, Float, Impl, Tensor

__all__ = ["gated_rms_norm", "residual_gated_rms_norm"]


def _check_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, *, eps: float, activation: Activation
) -> None:
    _check_inputs("gated_rms_norm", {"x": x, "gate": gate}, weight, eps, activation)


def _check_residual_norm(
    residual: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    activation: Activation,
) -> None:
    inputs = {"residual": residual, "x": x, "gate": gate}
    _check_inputs("residual_gated_rms_norm", inputs, weight, eps, activation)


def _check_inputs(
    caller: str, inputs: dict[str, Tensor], weight: Tensor | None, eps: float, activation: Activation
) -> None:
    weights = {} if weight is None else {"weight": weight}
    _check.floating(caller, {**inputs, **weights})
    _check.shapes(
        caller,
        {
            **{name: (x, "*B F") for name, x in inputs.items()},
            **{name: (x, "F") for name, x in weights.items()},
        },
    )
    _check.epsilon(caller, "eps", eps)
    _check.one_of(caller, "activation", activation, ("sigmoid", "silu"))


def _output(x: Tensor, *_others: Tensor | None, **_options: object) -> tuple[Tensor, ...]:
    return (x.new_empty(x.shape),)


def _outputs(residual: Tensor, x: Tensor, *_others: Tensor | None, **_options: object) -> tuple[Tensor, ...]:
    return residual.new_empty(residual.shape), x.new_empty(x.shape)


def _unsupported(x: Tensor, *_others: Tensor | None, **_options: object) -> str | None:
    return _targets.row_too_long(x.shape[-1])


_KERNELS = "kda_fn.primitives.gated_rms_norm.kernels"

_NORM = Primitive(
    "gated_rms_norm",
    check=_check_norm,
    reference=reference.gated_rms_norm,
    kernels={
        "triton": kernel(
            "gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, *, float eps, str activation) -> Tensor",
            module=_KERNELS,
            outputs=_output,
            fallback=reference.gated_rms_norm,
            backward=True,
            unsupported=_unsupported,
            shared=(2,),
        )
    },
)
_RESIDUAL_NORM = Primitive(
    "residual_gated_rms_norm",
    check=_check_residual_norm,
    reference=reference.residual_gated_rms_norm,
    kernels={
        "triton": kernel(
            "residual_gated_rms_norm(Tensor residual, Tensor x, Tensor gate, Tensor? weight, *, float eps, "
            "str activation) -> (Tensor, Tensor)",
            module=_KERNELS,
            outputs=_outputs,
            fallback=reference.residual_gated_rms_norm,
            backward=True,
            unsupported=_unsupported,
            shared=(3,),
        )
    },
)


@_NORM.public
def gated_rms_norm(
    x: Float[Tensor, "*B F"],
    gate: Float[Tensor, "*B F"],
    weight: Float[Tensor, " F"] | None,
    *,
    eps: float,
    activation: Activation = "sigmoid",
    impl: Impl | None = None,
) -> Float[Tensor, "*B F"]:
    """y = x · rsqrt(mean(x²) + eps) · weight · act(gate), over the last axis.

    Parameters
    ----------
    x : [*B F]; its dtype is y's. The arithmetic is float32 at least.
    gate : [*B F], logits, of any floating dtype and any strides (a slice of a packed projection, say).
    weight : [F], or None for a norm without one.
    eps : added to the MEAN of squares.
    activation : "sigmoid" (KDA) or "silu".

    Raises ValueError or TypeError for an argument that does not fit, NotImplementedError for a named impl
    that cannot serve.

    >>> gated_rms_norm(torch.tensor([3.0, -3]), torch.zeros(2), None, eps=1e-5)  # sigmoid(0) = 1/2
    tensor([ 0.5000, -0.5000])
    """
    return _NORM(impl, x, gate, weight, eps=eps, activation=activation)


@_RESIDUAL_NORM.public
def residual_gated_rms_norm(
    residual: Float[Tensor, "*B F"],
    x: Float[Tensor, "*B F"],
    gate: Float[Tensor, "*B F"],
    weight: Float[Tensor, " F"] | None,
    *,
    eps: float,
    activation: Activation = "sigmoid",
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*B F"], Float[Tensor, "*B F"]]:
    """`gated_rms_norm` of a residual stream: both the new stream and its gated norm (prenorm).

        residual' = residual + x
        y = residual' · rsqrt(mean(residual'²) + eps) · weight · act(gate)

    Returns
    -------
    residual', y : the sum in residual's dtype, and [*B F] in x's dtype. y is normed from the sum before it is
        rounded. Parameters and errors are those of `gated_rms_norm`.

    >>> stream, x = torch.tensor([1.0, -1]), torch.tensor([2.0, -2])
    >>> residual_gated_rms_norm(stream, x, torch.zeros(2), None, eps=1e-5)
    (tensor([ 3., -3.]), tensor([ 0.5000, -0.5000]))
    """
    return _RESIDUAL_NORM(impl, residual, x, gate, weight, eps=eps, activation=activation)
