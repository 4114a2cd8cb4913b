"""The part of a KDA layer between its convolution and its output norm.

    q, k  = q / |q|, k / |k|                             per head
    g     = gate(raw)                                    log decay
    beta  = sigmoid(beta), or 2 sigmoid(beta)
    S, o  = kda(S, q, k, v, g, beta)

    q, k [*B T H K]   v [*B T HV V]   raw [*B T HV K]   beta [*B T HV]   state [*B HV K V]   o [*B T HV V]
    A_log [HV]   dt_bias [HV*K]

It is `l2_norm`, `kda_gate`, a sigmoid and `kda`, which a kernel has all in the launches of the last.
"""

from __future__ import annotations

from kda_fn import _check
from kda_fn.primitives._kernel import kernel
from kda_fn.primitives._primitive import Primitive
from kda_fn.primitives.fused_kda import fallback, reference
from kda_fn.primitives.kda import check_kda, kernel_outputs, kernel_unsupported
from kda_fn.primitives.kda_gate import check_kda_gate
from kda_fn.types import CuSeqlens, Float, Impl, Tensor

__all__ = ["fused_kda"]


def _check_fused_kda(
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    eps: float,
    scale: float | None,
    chunk_size: int,
    cu_seqlens: CuSeqlens | None,
) -> None:
    caller = "fused_kda"
    check_kda(
        caller,
        "raw",
        initial_state,
        q,
        k,
        v,
        raw,
        beta,
        scale=scale,
        lower_bound=lower_bound,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )
    check_kda_gate(caller, raw, A_log, dt_bias, lower_bound=lower_bound)
    _check.state_dtype(caller, {"dt_bias": dt_bias, "initial_state": initial_state})
    _check.one_of(caller, "allow_neg_eigval", allow_neg_eigval, (True, False))
    _check.epsilon(caller, "eps", eps)


_FUSED_KDA = Primitive(
    "fused_kda",
    check=_check_fused_kda,
    reference=reference.fused_kda,
    fallback=fallback.fused_kda,
    kernels={
        "triton": kernel(
            "fused_kda(Tensor initial_state, Tensor q, Tensor k, Tensor v, Tensor raw, Tensor beta, "
            "Tensor A_log, Tensor dt_bias, *, float? lower_bound, bool allow_neg_eigval, float eps, "
            "float? scale, int chunk_size, int[]? cu_seqlens) -> (Tensor, Tensor)",
            module="kda_fn.primitives.fused_kda.kernels",
            outputs=kernel_outputs,
            fallback=fallback.fused_kda,
            shared=(6, 7),
            # The gates' gradients are sums that cancel, to 2e-5 in float32: the fallback has more digits.
            backward="half",
            unsupported=kernel_unsupported,
        )
    },
)


@_FUSED_KDA.public
def fused_kda(
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    raw: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    A_log: Float[Tensor, " HV_or_0"],
    dt_bias: Float[Tensor, " HV*K"],
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    eps: float = 1e-6,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*S HV K V"], Float[Tensor, "*B T HV V"]]:
    """KDA of queries, keys and logits as a layer's projections give them.

        g = kda_gate(raw, A_log, dt_bias)
        S, o = kda(S, l2_norm(q), l2_norm(k), v, g, sigmoid(beta))

    Parameters
    ----------
    initial_state, v, scale, chunk_size, cu_seqlens : as of `kda`.
    q, k : [*B T H K], of any length, one dtype with v.
    raw, A_log, dt_bias, lower_bound : as of `kda_gate`; lower_bound is the gate's own promise too.
    beta : [*B T HV], before its sigmoid, which is taken in float32 at least.
    allow_neg_eigval : beta is twice the sigmoid, in [0, 2].
    eps : of `l2_norm`, added to the sum of squares.
    impl : None picks the best implementation that serves the call; a name insists (`explain`).

    Returns
    -------
    final_state, o : as of `kda`.

    Raises
    ------
    ValueError, TypeError : shapes, dtypes, devices or offsets that do not fit, before any work.
    NotImplementedError : a named impl that cannot serve the call.

    Source: Kimi Linear, arXiv:2510.26692.
    """
    return _FUSED_KDA(
        impl,
        initial_state,
        q,
        k,
        v,
        raw,
        beta,
        A_log,
        dt_bias,
        lower_bound=lower_bound,
        allow_neg_eigval=allow_neg_eigval,
        eps=eps,
        scale=scale,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )
