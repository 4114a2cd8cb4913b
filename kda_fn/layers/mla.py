"""Multi-head latent attention, without rotary positions.

    c, e   = W_kv x                  c = rms_norm(c)       a latent, and a key part that all heads share
    q, q_e = W_q x                   per head; through rms_norm(W_qd x) where there is a q_down
    k, v   = W_k c, W_v c            per head
    o      = Σ_s softmax_s((q · k_s + q_e · e_s) / sqrt(K + E)) v_s           causal
    y      = W_o o, or W_o (o · sigmoid(W_g x)) with an output gate

The cache holds L + E numbers a token. Few new tokens read it as it is (the absorbed form, q · W_k c = (W_k^T
q) · c and W_v after the sum); many expand it first. Both are the same sum, to rounding.

    x, y [*B T D]   latent [*B S L]   shared [*B S E]   H heads of K + E key and V value channels

Source: DeepSeek-V2, arXiv:2405.04434; without rotary: Kimi Linear, arXiv:2510.26692.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kda_fn import _check, ragged
from kda_fn.layers.mlp import normal_weight
from kda_fn.primitives._kernel import can_be_read, fused_attention_serves
from kda_fn.primitives._primitive import check_impl
from kda_fn.primitives.linear import linear
from kda_fn.primitives.mla_prolog import mla_prolog, mla_queries
from kda_fn.types import W8A8, CuSeqlens, Float, Impl, Tensor

__all__ = ["MLAConfig", "MLAParams", "MLAState", "init_mla", "init_mla_state", "mla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """The sizes and choices of one MLA layer.

    head_dim      K, key channels of a head made from the latent
    shared_dim    E, key channels that all heads share ("rope" in checkpoints; not rotated here)
    head_v_dim    V
    latent_dim    L ("kv_lora_rank")
    query_rank    R of the queries' low rank ("q_lora_rank"), None: one full matrix
    output_gate   whether the output is gated by the layer's input (Kimi K3)
    norm_eps      of the norms of the latents: 1e-6 in every published model, whatever its other norms have
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    shared_dim: int
    head_v_dim: int
    latent_dim: int
    query_rank: int | None = None
    output_gate: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "head_dim", "shared_dim", "head_v_dim", "latent_dim"):
            _check.positive_integer("MLAConfig", name, getattr(self, name))
        if self.query_rank is not None:
            _check.positive_integer("MLAConfig", "query_rank", self.query_rank)
        _check.one_of("MLAConfig", "output_gate", self.output_gate, (False, True))
        _check.epsilon("MLAConfig", "norm_eps", self.norm_eps)

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int | None]:
        """D, H, K, E, V, L and R."""
        keys, values = (self.head_dim, self.shared_dim), (self.head_v_dim, self.latent_dim)
        return self.hidden_size, self.num_heads, *keys, *values, self.query_rank


class MLAParams(NamedTuple):
    """The parameters of one MLA layer. Weights are [out, in]; a tensor of shape [0] is absent."""

    q_down: Float[Tensor, "R D"] | W8A8
    q_norm: Float[Tensor, " R_or_0"]
    q_up: Float[Tensor, "H*(K+E) R_or_D"] | W8A8
    """Of each head, the K channels above the E."""
    kv_down: Float[Tensor, "L+E D"] | W8A8
    """The latent's rows above the shared key's."""
    kv_norm: Float[Tensor, " L"]
    k_up: Float[Tensor, "H K L"]
    v_up: Float[Tensor, "H V L"]
    gate: Float[Tensor, "H*V D"] | W8A8
    out: Float[Tensor, "D H*V"] | W8A8


class MLAState(NamedTuple):
    """The cache of one MLA layer.

    It grows, S being the tokens seen, or is preallocated: then S is its capacity, shapes never change
    (`scan`, graphs) and `length` says how many tokens it holds; to take tokens back is to lower `length`.
    With packed sequences it is preallocated and has one more axis, N, after the batch axes.
    """

    latent: Float[Tensor, "*B S L"]
    shared: Float[Tensor, "*B S E"]
    length: Tensor
    """int64, [*B 1] of a preallocated cache, [*B 0] of one that grows."""


def mla(
    params: MLAParams,
    state: MLAState,
    x: Float[Tensor, "*B T D"],
    *,
    config: MLAConfig,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[MLAState, Float[Tensor, "*B T D"]]:
    """One MLA layer over T tokens, T >= 0: prefill and decode are this call.

    Parameters
    ----------
    params : of `init_mla`, or loaded in its layout.
    state : of `init_mla_state`, or returned by an earlier call.
    x : [*B T D], in the dtype of the weights and of the cache.
    cu_seqlens : [N+1], T then holds N packed sequences; the cache must be preallocated.
    impl : of the projections, "ascendc" of `mla_prolog` too; the attention itself is torch's, and so is what
        has no implementation of that name.

    Returns
    -------
    state, y : the cache with the new tokens, new tensors, and [*B T D].

    A preallocated cache that the tokens do not fit in is a ValueError where its length can be read (eagerly,
    on a CPU), and NaN in the outputs of its row elsewhere. Second derivatives by plain autograd need torch's
    own `sdpa_kernel(SDPBackend.MATH)` around the call.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> config = MLAConfig(hidden_size=8, num_heads=2, head_dim=4, shared_dim=2, head_v_dim=4, latent_dim=6)
    >>> params, x = init_mla(config), torch.randn(5, 8)
    >>> state, _ = mla(params, init_mla_state(config), x[:4], config=config)  # prefill
    >>> state, y = mla(params, state, x[4:], config=config)  # decode
    >>> torch.allclose(y[0], mla(params, init_mla_state(config), x, config=config)[1][4], atol=1e-5)
    True
    """
    cu_seqlens = _check_mla(params, state, x, config, cu_seqlens)
    check_impl("mla", impl)
    return apply_mla(params, state, x, config, cu_seqlens, impl)


def apply_mla(
    params: MLAParams,
    state: MLAState,
    x: Float[Tensor, "*B T D"],
    config: MLAConfig,
    cu_seqlens: tuple[int, ...] | None,
    impl: Impl | None,
) -> tuple[MLAState, Float[Tensor, "*B T D"]]:
    """`mla` of what has been checked."""
    T = x.shape[-2]
    if T == 0:
        return MLAState(*(leaf.clone() for leaf in state)), x.clone()
    H, K, L = config.num_heads, config.head_dim, config.latent_dim
    absorbed = _break_even(config) >= T
    q_down, q_norm = (params.q_down, params.q_norm) if config.query_rank else (None, None)
    weights = (x, q_down, q_norm, params.q_up)
    # Neither has a Triton kernel, and the queries no vendor's operator.
    if absorbed:
        q, q_shared, latent, shared = mla_prolog(
            *weights,
            params.k_up,
            params.kv_down,
            params.kv_norm,
            eps=config.norm_eps,
            impl=None if impl == "triton" else impl,
        )
        q = torch.cat([q, q_shared], -1)
    else:
        q, latent, shared = mla_queries(
            *weights,
            params.kv_down,
            params.kv_norm,
            num_heads=H,
            eps=config.norm_eps,
            impl="reference" if impl == "reference" else None,
        )
    counts = None
    if cu_seqlens is not None:
        axis = x.ndim - 2
        q, latent, shared = (ragged.pad(a, cu_seqlens, axis=axis) for a in (q, latent, shared))
        counts = torch.tensor(ragged.lengths_of(cu_seqlens), device=x.device).unsqueeze(-1)
        T = latent.shape[-2]
    new_state, visible, fits = _append(state, latent, shared, counts)
    scale = (K + config.shared_dim) ** -0.5
    if absorbed:
        # All heads read one key: they are rows of one attention, its values the keys' first L channels.
        cache = torch.cat([new_state.latent, new_state.shared], -1).unsqueeze(-3)
        rows = q.transpose(-2, -3).flatten(-3, -2).unsqueeze(-3)
        if visible is None and T > 1:
            visible = _past(T, cache)
        if visible is not None:
            visible = visible.unsqueeze(-3).expand(*visible.shape[:-2], H, -1, -1).flatten(-3, -2)
        o = _attention(rows, cache, cache, visible, scale, causal=False)[..., :L]
        o = torch.einsum("...htl,hvl->...thv", o.squeeze(-3).unflatten(-2, (H, T)), params.v_up)
    else:
        k = torch.einsum("...sl,hkl->...hsk", new_state.latent, params.k_up)
        v = torch.einsum("...sl,hvl->...hsv", new_state.latent, params.v_up)
        k = torch.cat([k, new_state.shared.unsqueeze(-3).expand(*k.shape[:-1], -1)], -1)
        causal = visible is None and k.shape[-2] == T
        if visible is None and not causal:
            visible = _past(T, k)
        o = _attention(q.transpose(-2, -3), k, v, visible, scale, causal=causal).transpose(-2, -3)
    if fits is not None:
        o = torch.where(fits.unsqueeze(-1).unsqueeze(-1), o, torch.nan)
    if cu_seqlens is not None:
        o = ragged.pack(o, cu_seqlens, axis=x.ndim - 2)
    o = o.flatten(-2)
    if config.output_gate:
        o = o * torch.sigmoid(linear(x, params.gate, impl=impl))
    return new_state, linear(o, params.out, impl=impl).to(x.dtype)


def _break_even(config: MLAConfig) -> int:
    """The most new tokens for which the absorbed form takes fewer products over a long cache."""
    K, V, L = config.head_dim, config.head_v_dim, config.latent_dim
    more = 2 * L - K - V
    return L * (K + V) // more if more > 0 else 2**62


def _append(
    state: MLAState, latent: Tensor, shared: Tensor, counts: Tensor | None
) -> tuple[MLAState, Tensor | None, Tensor | None]:
    """The cache with the new tokens; of a preallocated one, which slots each of them sees, [*B T S], and
    which rows' tokens fit, [*B 1]. `counts` are the tokens of each row, None: T."""
    if not state.length.shape[-1]:
        latent, shared = torch.cat([state.latent, latent], -2), torch.cat([state.shared, shared], -2)
        return MLAState(latent, shared, state.length.clone()), None, None
    S, T, length = state.latent.shape[-2], latent.shape[-2], state.length
    counts = torch.full_like(length, T) if counts is None else counts
    slot, token = torch.arange(S, device=latent.device), torch.arange(T, device=latent.device)
    # Each slot looks its token up, and behind the last it is a zero: what an earlier sequence left there, NaN
    # say, would else reach the sums with a weight of zero.
    source = torch.where(slot - length < counts, slot - length, T).clamp(min=0).unsqueeze(-1)
    is_old = (slot < length).unsqueeze(-1)

    def written(cache: Tensor, new: Tensor) -> Tensor:
        if T == 1:
            return torch.where(is_old, cache, torch.where(source == 0, new, 0))
        new = ragged.append_zero_row(new, new.ndim - 2)
        return torch.where(is_old, cache, new.gather(-2, source.expand(*source.shape[:-1], new.shape[-1])))

    new_state = MLAState(written(state.latent, latent), written(state.shared, shared), length + counts)
    visible = slot <= (length + token).unsqueeze(-1)
    return new_state, visible, new_state.length <= S


def _past(T: int, keys: Tensor) -> Tensor:
    """What the last T of S tokens see, [T S]."""
    S = keys.shape[-2]
    return torch.ones(T, S, dtype=torch.bool, device=keys.device).tril(S - T)


def _attention(
    q: Float[Tensor, "*B h T F"],
    k: Float[Tensor, "*B h S F"],
    v: Float[Tensor, "*B h S G"],
    visible: Tensor | None,
    scale: float,
    *,
    causal: bool,
) -> Float[Tensor, "*B h T G"]:
    """softmax(scale q k^T) v over the visible slots, [*B T S] or [T S]; None: all, or if causal the past."""
    if not fused_attention_serves(q):
        scores, visible = q @ k.transpose(-1, -2) * scale, _past(q.shape[-2], k) if causal else visible
        if visible is not None:
            scores = scores.masked_fill(~visible.unsqueeze(-3), -torch.inf)
        return torch.softmax(scores, -1) @ v
    # torch's fused attention wants four axes, and as many value channels as key channels.
    G, spare = v.shape[-1], q.shape[-1] - v.shape[-1]
    if spare > 0:
        v = torch.cat([v, v.new_zeros(*v.shape[:-1], spare)], -1)
    elif spare < 0:
        q, k = (torch.cat([a, a.new_zeros(*a.shape[:-1], -spare)], -1) for a in (q, k))
    if visible is not None:
        visible = visible.reshape(-1, 1, *visible.shape[-2:])
    flat = (a.reshape(-1, *a.shape[-3:]) for a in (q, k, v))
    o = F.scaled_dot_product_attention(*flat, attn_mask=visible, is_causal=causal, scale=scale)
    return o[..., :G].reshape(*q.shape[:-1], G)


def _check_mla(
    params: MLAParams, state: MLAState, x: Tensor, config: MLAConfig, cu_seqlens: CuSeqlens | None
) -> tuple[int, ...] | None:
    """That params, state, x and config belong together; returns cu_seqlens, read once."""
    _check.instance("mla", "config", config, MLAConfig)
    check_mla_trees("mla", params, state)
    floats = {n: leaf for n, leaf in _check.leaves("state", state).items() if n != "state.length"}
    _check.floating("mla", {"x": x, **_check.leaves("params", params), **floats})
    if x.ndim < 2 or x.shape[-1] != config.hidden_size:
        raise ValueError(f"mla: x has shape {tuple(x.shape)}, expected [*B T D] with D={config.hidden_size}")
    if cu_seqlens is not None:
        cu_seqlens = ragged.offsets(cu_seqlens, x.shape[-2])
    check_mla("mla", params, state, config, "x", x, x.shape[:-1], cu_seqlens)
    return cu_seqlens


def check_mla_trees(
    caller: str, params: object, state: object, names: tuple[str, str] = ("params", "state")
) -> None:
    """That the two are trees of the right kind, and the length an integer tensor."""
    _check.instance(caller, names[0], params, MLAParams)
    _check.instance(caller, names[1], state, MLAState)
    length = getattr(state, "length", None)
    if not isinstance(length, Tensor) or length.dtype != torch.int64:
        kind = length.dtype if isinstance(length, Tensor) else type(length).__name__
        raise TypeError(f"{caller}: {names[1]}.length must be an int64 tensor, got {kind}")


def check_mla(
    caller: str,
    params: MLAParams,
    state: MLAState,
    config: MLAConfig,
    input_name: str,
    input_like: Tensor,
    rows: tuple[int, ...],
    cu_seqlens: CuSeqlens | None,
    names: tuple[str, str] = ("params", "state"),
) -> None:
    """That shapes and dtypes fit the config and an input of `rows` = (*B, T) that is like `input_like`, and
    that the tokens fit in a preallocated cache whose length can be read."""
    p, s = names
    *B, T = rows
    D, H, K, E, V, L, R = config.sizes
    lengths = [T] if cu_seqlens is None else ragged.lengths_of(cu_seqlens)
    if cu_seqlens is not None:
        if not state.length.ndim or not state.length.shape[-1]:
            raise ValueError(
                f"{caller}: with cu_seqlens {s} must be preallocated, got a cache that grows "
                "(init_mla_state(.., capacity=..))"
            )
        ragged.check_packing(caller, cu_seqlens, T=T, N=state.length.shape[-2], state_name=f"{s}.length")
        B.append(len(lengths))
    S = state.latent.shape[-2] if state.latent.ndim > 1 else 0
    one = 1 if state.length.ndim and state.length.shape[-1] else 0
    _check.exact_shapes(
        caller,
        {
            f"{s}.latent": (state.latent, (*B, S, L)),
            f"{s}.shared": (state.shared, (*B, S, E)),
            f"{s}.length": (state.length, (*B, one)),
            f"{p}.q_down": (params.q_down, (R, D) if R else (0,)),
            f"{p}.q_norm": (params.q_norm, (R or 0,)),
            f"{p}.q_up": (params.q_up, (H * (K + E), R or D)),
            f"{p}.kv_down": (params.kv_down, (L + E, D)),
            f"{p}.kv_norm": (params.kv_norm, (L,)),
            f"{p}.k_up": (params.k_up, (H, K, L)),
            f"{p}.v_up": (params.v_up, (H, V, L)),
            f"{p}.gate": (params.gate, (H * V, D) if config.output_gate else (0,)),
            f"{p}.out": (params.out, (D, H * V)),
        },
    )
    caches = {f"{s}.latent": state.latent, f"{s}.shared": state.shared}
    _check.same_dtype(caller, {input_name: input_like, **caches, **_check.leaves(p, params)})
    if one and state.length.device.type == "cpu" and can_be_read(state.length):
        added = torch.tensor(lengths).unsqueeze(-1)
        if bool((state.length + added > S).any()):
            raise ValueError(
                f"{caller}: {s} has room for S={S} tokens and holds {state.length.flatten().tolist()}, it "
                f"cannot take {lengths} more"
            )


def init_mla(
    config: MLAConfig,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> MLAParams:
    """Normal weights with the standard deviation of 1/sqrt(inputs), norms of ones.

    >>> config = MLAConfig(hidden_size=8, num_heads=2, head_dim=4, shared_dim=2, head_v_dim=4, latent_dim=6)
    >>> init_mla(config).out.shape
    torch.Size([8, 8])
    """
    _check.float_dtype("init_mla", dtype)
    where: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
    D, H, K, E, V, L, R = config.sizes
    none = torch.zeros(0, dtype=dtype, device=device)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    return MLAParams(
        q_down=normal_weight(R, D, **where) if R else none,
        q_norm=ones(R) if R else none,
        q_up=normal_weight(H * (K + E), R or D, **where),
        kv_down=normal_weight(L + E, D, **where),
        kv_norm=ones(L),
        k_up=normal_weight(H * K, L, **where).unflatten(0, (H, K)),
        v_up=normal_weight(H * V, L, **where).unflatten(0, (H, V)),
        gate=normal_weight(H * V, D, **where) if config.output_gate else none,
        out=normal_weight(D, H * V, **where),
    )


def init_mla_state(
    config: MLAConfig,
    batch_shape: tuple[int, ...] = (),
    *,
    capacity: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> MLAState:
    """The cache before the first token: one that grows, or with a capacity one preallocated for that many.

    >>> config = MLAConfig(hidden_size=8, num_heads=2, head_dim=4, shared_dim=2, head_v_dim=4, latent_dim=6)
    >>> init_mla_state(config).latent.shape, init_mla_state(config, capacity=32).latent.shape
    (torch.Size([0, 6]), torch.Size([32, 6]))
    """
    _check.float_dtype("init_mla_state", dtype)
    _check.batch_shape("init_mla_state", batch_shape)
    if capacity is not None:
        _check.positive_integer("init_mla_state", "capacity", capacity)
    S = capacity or 0
    return MLAState(
        torch.zeros(*batch_shape, S, config.latent_dim, dtype=dtype, device=device),
        torch.zeros(*batch_shape, S, config.shared_dim, dtype=dtype, device=device),
        torch.zeros(*batch_shape, 1 if capacity else 0, dtype=torch.int64, device=device),
    )


torch.serialization.add_safe_globals([MLAParams, MLAState])
