"""The letter table, and the types that the whole library speaks.

Letters in shapes, the same in every signature, docstring and comment:

    *B   batch axes, any number of them, also none
    T    time                              N    packed sequences (see `kda_fn.ragged`)
    C    chunk_size                        W    width of the short convolution
    H    query and key heads               HV   value heads, a multiple of H
    K    head dim of queries and keys      V    head dim of values
    D    hidden size                       R    rank of a low-rank projection
    I    intermediate size of an MLP       X    experts
    L    latent size of MLA's cache        E    the part of MLA's key that all heads share
    S    tokens that an MLA cache has room for
    P    channels of the merged q|k|v projection, 2*H*K + HV*V
    W_1  W - 1, the rows of the convolution's window that are carried on

Annotations such as `Float[Tensor, "*B T H K"]` are jaxtyping's. The library runs without jaxtyping;
where it is installed, its import hook can check every annotation (the tests do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kda_fn import _check

if TYPE_CHECKING:
    from jaxtyping import Float
else:
    try:
        from jaxtyping import Float
    except ModuleNotFoundError:

        class Float:
            """Stands in for jaxtyping's `Float`: the annotation is then documentation alone."""

            def __class_getitem__(cls, _):
                return Tensor


__all__ = [
    "W8A8",
    "Activation",
    "CuSeqlens",
    "Float",
    "Impl",
    "KDAConfig",
    "KDAParams",
    "KDAState",
    "Tensor",
]

Impl: TypeAlias = Literal["reference", "fallback", "triton", "ascendc"]
Activation: TypeAlias = Literal["sigmoid", "silu"]
CuSeqlens: TypeAlias = Tensor | Sequence[int]


class KDAState(NamedTuple):
    """Everything a KDA layer remembers of the tokens it has seen.

    With packed sequences each field has one more axis, N, after the batch axes.
    """

    conv_state: Float[Tensor, "*B W_1 P"]
    """The last W-1 inputs of the short convolution, oldest first, in the layer's dtype."""
    recurrent_state: Float[Tensor, "*B HV K V"]
    """The associative memory: float32, or float64 for float64 inputs."""


class W8A8(NamedTuple):
    """An int8 weight in the place of a floating one: y = (x_int8 weight^T) · s_token · scale.

    See `kda_fn.linear`; made by `kda_fn.quantize`, or loaded.
    """

    weight: Tensor
    """[O D], int8."""
    scale: Float[Tensor, " O"]
    """Of each output channel, float32."""

    @property
    def shape(self) -> torch.Size:
        """Of the weight, as a floating one's."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Of the weight, as a floating one's."""
        return self.weight.ndim


class KDAParams(NamedTuple):
    """The parameters of one KDA layer (`kda_fn.kimi_delta_attention`). Weights are [out, in].

    A tensor of shape [0] is absent: `torch.func.grad` returns one like it, `torch.autograd.grad` wants
    `materialize_grads=True` for it.
    """

    qkv: Float[Tensor, "P D"] | W8A8
    """The three projections merged, q above k above v."""
    conv: Float[Tensor, "P W"]
    """One filter for every channel of q|k|v, oldest tap first, float32."""
    gates: Float[Tensor, "R+HV+G D"] | W8A8
    """What else is made of x, merged: the decay's down-projection above beta's logits above the output gate,
    of which it is the G channels of a low rank (Kimi-Linear), or all G = HV*V of them (Kimi K3)."""
    decay: Float[Tensor, "HV*K R"] | W8A8
    """Logits of the decay, from their R channels."""
    A_log: Float[Tensor, " HV_or_0"]
    """float32. Shape [0] stands for a factor of 1, which only the bounded gate allows."""
    dt_bias: Float[Tensor, " HV*K"]
    """float32."""
    output_gate: Float[Tensor, "HV*V G"] | W8A8
    """Logits of a low-rank output gate, from its G channels; [0] where it is full rank."""
    output_gate_bias: Float[Tensor, " HV*V_or_0"]
    norm: Float[Tensor, " V"]
    """Weight of the gated RMS norm, shared by all heads."""
    out: Float[Tensor, "D HV*V"] | W8A8


@dataclass(frozen=True, slots=True, kw_only=True)
class KDAConfig:
    """The sizes and choices of one KDA layer: static, hashable, holds no tensor.

    num_v_heads, head_v_dim   default to num_heads and head_dim
    lower_bound               None: softplus gate (Kimi-Linear). In [-5, 0): bounded gate (Kimi K3)
    output_gate               "low_rank" (Kimi-Linear) or "full_rank" (Kimi K3)
    allow_neg_eigval          beta in (0, 2) instead of (0, 1): the state's transition may also reflect
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_v_heads: int | None = None
    head_v_dim: int | None = None
    conv_size: int = 4
    lower_bound: float | None = None
    output_gate: Literal["low_rank", "full_rank"] = "low_rank"
    allow_neg_eigval: bool = False
    norm_eps: float = 1e-5
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "num_v_heads", "head_v_dim", "conv_size"):
            size = getattr(self, name)
            optional = name in ("num_v_heads", "head_v_dim")
            if not (optional and size is None):
                _check.positive_integer("KDAConfig", name, size)
        if self.HV % self.H:
            raise ValueError(
                f"KDAConfig: num_v_heads must be a multiple of num_heads, got {self.HV} and {self.H}"
            )
        _check.promised_bound("KDAConfig", self.lower_bound)
        _check.one_of("KDAConfig", "output_gate", self.output_gate, ("low_rank", "full_rank"))
        _check.one_of("KDAConfig", "allow_neg_eigval", self.allow_neg_eigval, (False, True))
        _check.epsilon("KDAConfig", "norm_eps", self.norm_eps)
        _check.power_of_two("KDAConfig", "chunk_size", self.chunk_size)

    # The sizes by their letters.

    @property
    def D(self) -> int:
        return self.hidden_size

    @property
    def H(self) -> int:
        return self.num_heads

    @property
    def HV(self) -> int:
        return self.num_heads if self.num_v_heads is None else self.num_v_heads

    @property
    def K(self) -> int:
        return self.head_dim

    @property
    def V(self) -> int:
        return self.head_dim if self.head_v_dim is None else self.head_v_dim

    @property
    def W(self) -> int:
        return self.conv_size

    @property
    def P(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


torch.serialization.add_safe_globals([KDAState, KDAParams, W8A8])
