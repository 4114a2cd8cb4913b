"""Multi-head latent attention before its attention: queries, and the latent and shared key that are cached.

    c        = rms_norm(W_kv x [:L]) · kv_norm           shared = the other E channels of W_kv x
    q        = W_q (rms_norm(W_qd x) · q_norm)           or W_q x, without a q_down
    q_latent = W_UK^T q_nope                             absorbed: q_latent · c = q_nope · (W_UK c)

    x [*B T D]   q_down [R D]   q_norm [R]   q_up [H*(K+E) R]   k_up [H K L]   kv_down [L+E D]   kv_norm [L]
    q_latent [*B T H L]   q_shared [*B T H E]   latent [*B T L]   shared [*B T E]   cos, sin [*B T E]

`mla_queries` is the same without the last line, for attention over expanded keys.
"""

from __future__ import annotations

from typing import Any

from kda_fn import _check
from kda_fn.primitives._primitive import Implementation, Primitive
from kda_fn.primitives.mla_prolog import ascendc, fallback, reference
from kda_fn.types import W8A8, Float, Impl, Tensor

__all__ = ["mla_prolog", "mla_queries"]


def _check_prolog(
    x: Tensor,
    q_down: Tensor | W8A8 | None,
    q_norm: Tensor | None,
    q_up: Tensor | W8A8,
    k_up: Tensor,
    kv_down: Tensor | W8A8,
    kv_norm: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    weights = {"q_up": q_up, "k_up": k_up, "kv_down": kv_down, "kv_norm": kv_norm}
    sizes = _check_inputs("mla_prolog", x, {"q_down": q_down, "q_norm": q_norm}, weights, cos, sin)
    _check_q_up("mla_prolog", q_up, sizes)
    _check.epsilon("mla_prolog", "eps", eps)


def _check_queries(
    x: Tensor,
    q_down: Tensor | W8A8 | None,
    q_norm: Tensor | None,
    q_up: Tensor | W8A8,
    kv_down: Tensor | W8A8,
    kv_norm: Tensor,
    *,
    num_heads: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    _check.positive_integer("mla_queries", "num_heads", num_heads)
    weights = {"q_up": q_up, "kv_down": kv_down, "kv_norm": kv_norm}
    sizes = _check_inputs("mla_queries", x, {"q_down": q_down, "q_norm": q_norm}, weights, cos, sin)
    # Whatever a head has besides E is K.
    K = q_up.shape[0] // num_heads - sizes["E"] if q_up.ndim else 0
    _check_q_up("mla_queries", q_up, {**sizes, "H": num_heads, "K": max(K, 1)})
    _check.epsilon("mla_queries", "eps", eps)


def _check_inputs(
    caller: str,
    x: Tensor,
    low_rank: dict[str, Any],
    weights: dict[str, Any],
    cos: Tensor | None,
    sin: Tensor | None,
) -> dict[str, int]:
    """Everything but the shape of q_up; returns the sizes by their letters."""
    tensors = {"x": x, **_both_or_none(caller, low_rank), **weights}
    angles = _both_or_none(caller, {"cos": cos, "sin": sin})
    # Quantised weights have a shape, and `linear` checks the rest of them.
    floats = {name: w for name, w in {**tensors, **angles}.items() if not _check.is_quantised(w)}
    _check.floating(caller, floats)
    _check.same_dtype(caller, floats)
    letters = {"x": "*B T D", "q_down": "R D", "q_norm": "R", "k_up": "H K L", "kv_norm": "L"}
    specs = {name: (tensors[name], spec) for name, spec in letters.items() if name in tensors}
    sizes = {letter: n for letter, n in _check.shapes(caller, specs).items() if isinstance(n, int)}
    rows, *columns = tensors["kv_down"].shape or (0,)
    if columns != [sizes["D"]] or rows <= sizes["L"]:
        known = f"L={sizes['L']} E>=1 D={sizes['D']}"
        raise ValueError(
            f"{caller}: kv_down has shape {tuple(tensors['kv_down'].shape)}, expected [L+E D] with {known}"
        )
    sizes["E"] = rows - sizes["L"]
    for name, angle in angles.items():
        _check_angle(caller, name, angle, (*x.shape[:-1], sizes["E"]))
    return sizes


def _both_or_none(caller: str, pair: dict[str, Any]) -> dict[str, Any]:
    """The pair, or nothing if both are None."""
    present = {name: x for name, x in pair.items() if x is not None}
    if len(present) == 1:
        (missing,) = pair.keys() - present
        raise ValueError(
            f"{caller}: {' and '.join(pair)} must be tensors or None together, got {missing}=None alone"
        )
    return present


def _check_angle(caller: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    given, E = tuple(x.shape), shape[-1]
    if E % 2:
        raise ValueError(f"{caller}: {name} turns pairs of channels, and kv_down leaves E={E}, an odd number")
    # The last axis must be there in full, those before it broadcast.
    fits = given[-1:] == (E,) and len(given) <= len(shape)
    if not fits or any(a not in (1, b) for a, b in zip(given[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{caller}: {name} has shape {given}, expected [*B T E] = {shape} or [T E]")


def _check_q_up(caller: str, q_up: Tensor | W8A8, sizes: dict[str, int]) -> None:
    rank = "R" if "R" in sizes else "D"
    given, expected = tuple(q_up.shape), (sizes["H"] * (sizes["K"] + sizes["E"]), sizes[rank])
    if given != expected:
        known = " ".join(f"{letter}={sizes[letter]}" for letter in ("H", "K", "E", rank))
        raise ValueError(
            f"{caller}: q_up has shape {given}, expected [H*(K+E) {rank}] = {expected} with {known}"
        )


_MLA_PROLOG = Primitive(
    "mla_prolog",
    check=_check_prolog,
    reference=reference.mla_prolog,
    fallback=fallback.mla_prolog,
    kernels={"ascendc": Implementation(ascendc.mla_prolog, ascendc.unsupported)},
)
_MLA_QUERIES = Primitive(
    "mla_queries",
    check=_check_queries,
    reference=reference.mla_queries,
    fallback=fallback.mla_queries,
)


@_MLA_PROLOG.public
def mla_prolog(
    x: Float[Tensor, "*B T D"],
    q_down: Float[Tensor, "R D"] | W8A8 | None,
    q_norm: Float[Tensor, " R"] | None,
    q_up: Float[Tensor, "H_K_E R_or_D"] | W8A8,
    k_up: Float[Tensor, "H K L"],
    kv_down: Float[Tensor, "L_E D"] | W8A8,
    kv_norm: Float[Tensor, " L"],
    *,
    cos: Float[Tensor, "*#B #T E"] | None = None,
    sin: Float[Tensor, "*#B #T E"] | None = None,
    eps: float = 1e-6,
    impl: Impl | None = None,
) -> tuple[
    Float[Tensor, "*B T H L"], Float[Tensor, "*B T H E"], Float[Tensor, "*B T L"], Float[Tensor, "*B T E"]
]:
    """Queries in the latent's space, and what the cache keeps of each token.

        c        = rms_norm(W_kv x [:L]) · kv_norm,   shared = the other E channels
        q        = W_q (rms_norm(W_qd x) · q_norm)
        q_latent = W_UK^T q_nope,   q_shared = the other E channels of each head

    so that `q_latent · c_s + q_shared · shared_s` is the score of a past token s.

    Parameters
    ----------
    x : [*B T D], T >= 0.
    q_down, q_norm : [R D] and [R], or None and None: q_up is then applied to x itself.
    q_up : [H*(K+E) R], or [.. D]; of each head the K channels ("nope") above the E.
    k_up : [H K L], W_UK.
    kv_down, kv_norm : [L+E D], the latent's rows above the shared key's, and [L].
    cos, sin : [*B T E], or [T E] for the whole batch. Where given, q_shared and shared are turned by their
        angles: y = (a, b) · cos + (-b, a) · sin, with a the channels 0, 2, .. and b = 1, 3, .. (DeepSeek's
        order: pairs are neighbours before, E/2 apart after). None turns nothing and leaves the order.
    eps : added to the mean of squares.

    All tensors have one dtype, but q_down, q_up and kv_down may be quantised (`kda_fn.linear`). Norms and
    angles are computed in float32 at least.

    Returns
    -------
    q_latent, q_shared, latent, shared : [*B T H L], [*B T H E], [*B T L] (this is c), [*B T E].

    "ascendc" is torch_npu's `npu_mla_prolog_v3`, a contract that has not met an NPU; `explain` says which
    sizes it takes and how its weights must be kept.

    Raises ValueError or TypeError for an argument that does not fit, NotImplementedError for a named impl
    that cannot serve.

    Source: DeepSeek-V2, arXiv:2405.04434.
    """
    return _MLA_PROLOG(impl, x, q_down, q_norm, q_up, k_up, kv_down, kv_norm, cos=cos, sin=sin, eps=eps)


def mla_queries(
    x: Float[Tensor, "*B T D"],
    q_down: Float[Tensor, "R D"] | W8A8 | None,
    q_norm: Float[Tensor, " R"] | None,
    q_up: Float[Tensor, "H_K_E R_or_D"] | W8A8,
    kv_down: Float[Tensor, "L_E D"] | W8A8,
    kv_norm: Float[Tensor, " L"],
    *,
    num_heads: int,
    cos: Float[Tensor, "*#B #T E"] | None = None,
    sin: Float[Tensor, "*#B #T E"] | None = None,
    eps: float = 1e-6,
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*B T H K_E"], Float[Tensor, "*B T L"], Float[Tensor, "*B T E"]]:
    """`mla_prolog` before its last line: plain queries [*B T H K+E] (q_nope, then q_shared), latent, shared.

    Its errors are those of `mla_prolog`.
    """
    return _MLA_QUERIES(
        impl, x, q_down, q_norm, q_up, kv_down, kv_norm, num_heads=num_heads, cos=cos, sin=sin, eps=eps
    )
