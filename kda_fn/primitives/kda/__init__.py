"""Kimi Delta Attention: a linear-attention memory with a decay per channel and a delta-rule write.

    S_t = diag(exp(g_t)) S_{t-1} + k_t d_t^T          d_t = beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)
    o_t = scale S_t^T q_t

    q, k [*B T H K]   v [*B T HV V]   g [*B T HV K]   beta [*B T HV]   state [*B HV K V]   o [*B T HV V]

`reference.py` is this recurrence, `fallback.py` its chunked form.
Source: Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from functools import partial

from kda_fn import _check, ragged
from kda_fn.primitives import _targets
from kda_fn.primitives._kernel import kernel
from kda_fn.primitives._primitive import Implementation, Primitive
from kda_fn.primitives.kda import ascendc, fallback, reference
from kda_fn.types import CuSeqlens, Float, Impl, Tensor

__all__ = ["check_kda", "kda", "kda_step", "kernel_outputs", "kernel_unsupported"]


def check_kda(
    caller: str,
    gate: str,
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    lower_bound: float | None,
    chunk_size: int,
    cu_seqlens: CuSeqlens | None,
) -> None:
    """The check of `kda`, and of a caller that has another name for g."""
    specs = {
        "q": (q, "*B T H K"),
        "k": (k, "*B T H K"),
        "v": (v, "*B T HV V"),
        gate: (g, "*B T HV K"),
        "beta": (beta, "*B T HV"),
        "initial_state": (initial_state, "*B HV K V" if cu_seqlens is None else "*B N HV K V"),
    }
    _check_tensors(caller, specs)
    if cu_seqlens is not None:
        ragged.check_packing(
            caller, cu_seqlens, T=q.shape[-3], N=initial_state.shape[-4], state_name="initial_state"
        )
    _check_scale(caller, scale)
    _check.promised_bound(caller, lower_bound)
    _check.power_of_two(caller, "chunk_size", chunk_size)


def _check_step(
    state: Tensor,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    g_t: Tensor,
    beta_t: Tensor,
    *,
    scale: float | None,
) -> None:
    specs = {
        "q_t": (q_t, "*B H K"),
        "k_t": (k_t, "*B H K"),
        "v_t": (v_t, "*B HV V"),
        "g_t": (g_t, "*B HV K"),
        "beta_t": (beta_t, "*B HV"),
        "state": (state, "*B HV K V"),
    }
    _check_tensors("kda_step", specs)
    _check_scale("kda_step", scale)


def _check_scale(caller: str, scale: float | None) -> None:
    if scale is not None:
        _check.number(caller, "scale", scale)


def _check_tensors(caller: str, specs: dict[str, tuple[Tensor, str]]) -> None:
    """The order of `specs` is q, k, v, g, beta, state."""
    tensors = {name: x for name, (x, _) in specs.items()}
    _check.floating(caller, tensors)
    _check.same_dtype(caller, dict(list(tensors.items())[:3]))
    _check.state_dtype(caller, tensors)
    _check.multiple_heads(caller, _check.shapes(caller, specs))


def kernel_outputs(
    initial_state: Tensor, q: Tensor, k: Tensor, v: Tensor, *_inputs: Tensor, **_options: object
) -> tuple[Tensor, ...]:
    """The final state and o, for the kernels to fill; the inputs may be `fused_kda`'s."""
    return initial_state.new_empty(initial_state.shape), v.new_empty(v.shape)


def kernel_unsupported(initial_state: Tensor, *_inputs: Tensor, **_options: object) -> str | None:
    """The kernels' own reason, for `fused_kda` too."""
    return _targets.key_too_long(initial_state.shape[-2])


_KERNELS = "kda_fn.primitives.kda.kernels"
_TENSORS = "Tensor initial_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"

_KDA = Primitive(
    "kda",
    check=partial(check_kda, "kda", "g"),
    reference=reference.kda,
    fallback=fallback.kda,
    kernels={
        "ascendc": Implementation(ascendc.kda, ascendc.unsupported),
        "triton": kernel(
            f"kda({_TENSORS}, *, float? scale, float? lower_bound, int chunk_size, int[]? cu_seqlens) "
            "-> (Tensor, Tensor)",
            module=_KERNELS,
            outputs=kernel_outputs,
            fallback=fallback.kda,
            unsupported=kernel_unsupported,
            # The gates' gradients are sums that cancel, to 2e-5 in float32: the fallback has more digits.
            backward="half",
        ),
    },
)
_KDA_STEP = Primitive(
    "kda_step",
    check=_check_step,
    reference=reference.kda_step,
    fallback=fallback.kda_step,
    kernels={
        "triton": kernel(
            f"kda_step({_TENSORS}, *, float? scale) -> (Tensor, Tensor)",
            module=_KERNELS,
            outputs=kernel_outputs,
            fallback=fallback.kda_step,
            unsupported=kernel_unsupported,
            # The gates' gradients are sums that cancel, to 2e-5 in float32: the fallback has more digits.
            backward="half",
        )
    },
)


@_KDA.public
def kda(
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*S HV K V"], Float[Tensor, "*B T HV V"]]:
    """Kimi Delta Attention over T tokens, T >= 0, from an explicit state to the next.

        S_t = diag(exp(g_t)) S_{t-1} + k_t d_t^T      d_t = beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)
        o_t = scale S_t^T q_t

    Splitting the sequence anywhere and threading the state gives the result of the whole.

    Parameters
    ----------
    initial_state : S_0 [*B HV K V], float32, or float64 as it must be beside float64 inputs. With
        cu_seqlens [*B N HV K V].
    q, k : [*B T H K], one dtype with v; usually l2-normalised (`l2_norm`).
    v : [*B T HV V]. HV is a multiple of H: query and key head h serves the HV/H value heads that follow
        h*HV/H.
    g : [*B T HV K], log decay in natural units, usually <= 0 (`kda_gate`). -inf forgets exactly; growth
        (g > 0) is served as far as the arithmetic's range.
    beta : [*B T HV], after its sigmoid: in [0, 1], or [0, 2] with negative eigenvalues.
    scale : K**-0.5 unless given.
    lower_bound : a promise that lower_bound <= g <= 0, in [-5, 0), for an implementation that could use a
        faster form under it. Those of today are exact at any decay and do not need it.
    chunk_size : tokens per chunk of the fallback, a power of two; the kernels' is 64. It changes speed
        and rounding only.
    cu_seqlens : [N+1], T then holds N packed sequences (`kda_fn.ragged`), independent of each other.
    impl : None picks the best implementation that serves the call; a name insists (`explain`).

    Returns
    -------
    final_state, o : the state after the last token, a new tensor in initial_state's dtype, and
        [*B T HV V] in v's dtype. The arithmetic is in the state's dtype.

    Raises
    ------
    ValueError, TypeError : shapes, dtypes, devices or offsets that do not fit, before any work.
    NotImplementedError : a named impl that cannot serve the call.

    Source: Kimi Linear, arXiv:2510.26692.

    >>> S, k = torch.zeros(1, 4, 2), torch.eye(4)[:3, None]  # orthogonal keys
    >>> v, g, beta = torch.tensor([[[1.0, 2]], [[3, 4]], [[5, 6]]]), torch.zeros(3, 1, 4), torch.ones(3, 1)
    >>> S, o = kda(S, k, k, v, g, beta, scale=1.0)
    >>> torch.equal(o, v) and torch.equal(S[0, :3], v[:, 0])  # each key recalls its value
    True
    >>> kda(S, k, k, v, g[..., :3], beta)
    Traceback (most recent call last):
    ValueError: kda: g has shape (3, 1, 3), expected [*B T HV K] with *B=() T=3 HV=1 K=4
    """
    return _KDA(
        impl,
        initial_state,
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        lower_bound=lower_bound,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )


@_KDA_STEP.public
def kda_step(
    state: Float[Tensor, "*B HV K V"],
    q_t: Float[Tensor, "*B H K"],
    k_t: Float[Tensor, "*B H K"],
    v_t: Float[Tensor, "*B HV V"],
    g_t: Float[Tensor, "*B HV K"],
    beta_t: Float[Tensor, "*B HV"],
    *,
    scale: float | None = None,
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*B HV K V"], Float[Tensor, "*B HV V"]]:
    """One token of Kimi Delta Attention: `kda` at T = 1, without the time axis.

        S' = diag(exp(g_t)) S + k_t d_t^T             d_t = beta_t (v_t - (diag(exp(g_t)) S)^T k_t)
        o_t = scale S'^T q_t

    Parameters, dtypes and errors are those of `kda`.

    Returns
    -------
    state, o_t : S', a new tensor, and [*B HV V] in v_t's dtype.

    Source: Kimi Linear, arXiv:2510.26692.

    >>> S, k, v = torch.zeros(1, 2, 2), torch.tensor([[1.0, 0]]), torch.tensor([[3.0, 4]])
    >>> S, o = kda_step(S, k, k, v, torch.zeros(1, 2), torch.ones(1), scale=1.0)
    >>> o  # the key recalls its value
    tensor([[3., 4.]])
    """
    return _KDA_STEP(impl, state, q_t, k_t, v_t, g_t, beta_t, scale=scale)
