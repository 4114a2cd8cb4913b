"""The short convolution of KDA: depthwise, causal, over the merged q|k|v channels, then SiLU.

y_t = act(Σ_i weight[:, i] x_{t-W+1+i} + bias)

x, y [*B T P]   weight [P W]   bias [P]   conv_state [*B W-1 P], the W-1 inputs before x, oldest first
"""

from __future__ import annotations

from typing import Literal

from kda_fn import _check, ragged
from kda_fn.primitives._kernel import kernel
from kda_fn.primitives._primitive import Implementation, Primitive
from kda_fn.primitives.causal_conv1d import ascendc, fallback, reference
from kda_fn.types import CuSeqlens, Float, Impl, Tensor

__all__ = ["causal_conv1d"]


def _check_causal_conv1d(
    conv_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None,
    cu_seqlens: CuSeqlens | None,
) -> None:
    caller = "causal_conv1d"
    biases = {} if bias is None else {"bias": bias}
    _check.floating(caller, {"conv_state": conv_state, "x": x, "weight": weight, **biases})
    _check.same_dtype(caller, {"conv_state": conv_state, "x": x})
    state_spec = "*B W-1 P" if cu_seqlens is None else "*B N W-1 P"
    _check.shapes(
        caller,
        {
            "x": (x, "*B T P"),
            "weight": (weight, "P W"),
            **{name: (b, "P") for name, b in biases.items()},
            "conv_state": (conv_state, state_spec),
        },
    )
    if cu_seqlens is not None:
        ragged.check_packing(
            caller, cu_seqlens, T=x.shape[-2], N=conv_state.shape[-3], state_name="conv_state"
        )
    _check.one_of(caller, "activation", activation, ("silu", None))


def _outputs(
    conv_state: Tensor, x: Tensor, *_weights: Tensor | None, **_options: object
) -> tuple[Tensor, ...]:
    return conv_state.new_empty(conv_state.shape), x.new_empty(x.shape)


_CAUSAL_CONV1D = Primitive(
    "causal_conv1d",
    check=_check_causal_conv1d,
    reference=reference.causal_conv1d,
    fallback=fallback.causal_conv1d,
    kernels={
        "ascendc": Implementation(ascendc.causal_conv1d, ascendc.unsupported),
        "triton": kernel(
            "causal_conv1d(Tensor conv_state, Tensor x, Tensor weight, Tensor? bias, *, str? activation, "
            "int[]? cu_seqlens) -> (Tensor, Tensor)",
            module="kda_fn.primitives.causal_conv1d.kernels",
            outputs=_outputs,
            fallback=fallback.causal_conv1d,
            shared=(2, 3),
            backward=True,
        ),
    },
)


@_CAUSAL_CONV1D.public
def causal_conv1d(
    conv_state: Float[Tensor, "*S W_1 P"],
    x: Float[Tensor, "*B T P"],
    weight: Float[Tensor, "P W"],
    bias: Float[Tensor, " P"] | None = None,
    *,
    activation: Literal["silu"] | None = "silu",
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*S W_1 P"], Float[Tensor, "*B T P"]]:
    """Depthwise causal convolution over T tokens, T >= 0, from an explicit window to the next.

        y_t = act(Σ_i weight[:, i] x_{t-W+1+i} + bias)        inputs before x_0 are conv_state's rows

    Parameters
    ----------
    conv_state : [*B W-1 P], the last W-1 inputs, oldest first, in x's dtype; zeros at the start of a
        sequence. With cu_seqlens [*B N W-1 P].
    x : [*B T P].
    weight : [P W], oldest tap first.
    bias : [P] or None.
    activation : "silu" or None.
    cu_seqlens : [N+1], T then holds N packed sequences (`kda_fn.ragged`).

    Returns
    -------
    conv_state, y : the last W-1 rows of conv_state followed by x, a new tensor, and [*B T P] in x's
        dtype. The arithmetic is float32 at least.

    Raises ValueError or TypeError for an argument that does not fit, before any work; NotImplementedError for
    a named impl that cannot serve.

    >>> window, x, weight = torch.zeros(2, 1), torch.tensor([[1.0], [2], [3]]), torch.tensor([[100.0, 10, 1]])
    >>> window, y = causal_conv1d(window, x, weight, activation=None)
    >>> y[:, 0], window[:, 0]
    (tensor([  1.,  12., 123.]), tensor([2., 3.]))
    """
    return _CAUSAL_CONV1D(impl, conv_state, x, weight, bias, activation=activation, cu_seqlens=cu_seqlens)
