"""The decay gates of KDA: from logits to the log decay g.

softplus gate (Kimi-Linear):   g = -exp(A_log) · softplus(raw + dt_bias)
bounded gate (Kimi K3):        g = lower_bound · sigmoid(exp(A_log) · (raw + dt_bias))

raw, g [*B HV K]   A_log [HV]   dt_bias [HV*K]      g in natural units of log decay, <= 0
"""

from __future__ import annotations

from functools import partial

import torch

from kda_fn import _check
from kda_fn.primitives import _targets
from kda_fn.primitives._kernel import kernel
from kda_fn.primitives._primitive import Primitive
from kda_fn.primitives.kda_gate import reference
from kda_fn.types import Float, Impl, Tensor

__all__ = ["check_kda_gate", "kda_gate"]


def check_kda_gate(
    caller: str, raw: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None
) -> None:
    """The check of `kda_gate`, and of a caller that has the gate inside."""
    _check.floating(caller, {"raw": raw, "A_log": A_log, "dt_bias": dt_bias})
    _check.shapes(caller, {"raw": (raw, "*B HV K")})
    _check.promised_bound(caller, lower_bound)
    HV, K = raw.shape[-2:]
    absent = lower_bound is not None and A_log.shape == (0,)
    if A_log.shape != (HV,) and not absent:
        fits = f"[HV] = ({HV},)" + ("" if lower_bound is None else ", or (0,) for a factor of 1")
        raise ValueError(f"{caller}: A_log has shape {tuple(A_log.shape)}, expected {fits}")
    if dt_bias.shape != (HV * K,):
        raise ValueError(f"{caller}: dt_bias has shape {tuple(dt_bias.shape)}, expected [HV*K] = ({HV * K},)")


def _outputs(raw: Tensor, *_weights: Tensor, **_options: object) -> tuple[Tensor, ...]:
    return (raw.new_empty(raw.shape, dtype=torch.float32),)


_KDA_GATE = Primitive(
    "kda_gate",
    check=partial(check_kda_gate, "kda_gate"),
    reference=reference.kda_gate,
    kernels={
        "triton": kernel(
            "kda_gate(Tensor raw, Tensor A_log, Tensor dt_bias, *, float? lower_bound) -> Tensor",
            module="kda_fn.primitives.kda_gate.kernels",
            outputs=_outputs,
            fallback=reference.kda_gate,
            backward=True,
            unsupported=lambda raw, *_weights, **_options: _targets.key_too_long(raw.shape[-1]),
            shared=(1, 2),
        )
    },
)


@_KDA_GATE.public
def kda_gate(
    raw: Float[Tensor, "*B HV K"],
    A_log: Float[Tensor, " HV_or_0"],
    dt_bias: Float[Tensor, " HV*K"],
    *,
    lower_bound: float | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "*B HV K"]:
    """The log decay g <= 0 of every channel.

        g = -exp(A_log) · softplus(raw + dt_bias)                     lower_bound is None
        g = lower_bound · sigmoid(exp(A_log) · (raw + dt_bias))       otherwise

    Parameters
    ----------
    raw : [*B HV K], logits in any floating dtype. Time is one of the batch axes.
    A_log : [HV], log of each head's rate. With the bounded gate it may have shape [0]: a factor of 1.
        Its exponential is capped where the dtype ends.
    dt_bias : [HV*K].
    lower_bound : in [-5, 0) for the bounded gate.

    Returns
    -------
    g : [*B HV K], float32 (float64 for float64 inputs), natural-log units per token.

    Raises ValueError or TypeError for an argument that does not fit, NotImplementedError for a named impl
    that cannot serve.
    Source: Kimi Linear, arXiv:2510.26692 (softplus).

    >>> logits, A_log, dt_bias = torch.zeros(1, 2), torch.zeros(1), torch.zeros(2)
    >>> kda_gate(logits, A_log, dt_bias)  # -log 2
    tensor([[-0.6931, -0.6931]])
    >>> kda_gate(logits, A_log, dt_bias, lower_bound=-5.0)
    tensor([[-2.5000, -2.5000]])
    """
    return _KDA_GATE(impl, raw, A_log, dt_bias, lower_bound=lower_bound)
