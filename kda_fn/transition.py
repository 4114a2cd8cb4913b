"""A segment of tokens as what it is to the memory: an affine map, of any state that comes in.

    S_out = A S_in + B               A [*B HV K K]   B [*B HV K V]   S [*B HV K V]
    A     = Π_t (I - beta_t k_t k_t^T) diag(exp(g_t))       the last token on the left
    compose((A_2, B_2), (A_1, B_1)) = (A_2 A_1, A_2 B_1 + B_2)

Every column of the state is carried alone, so that KDA itself computes both: from [0 | I], with the values
[v | 0], it arrives at [B | A]. So the map is as exact as KDA, at any decay, and what serves `kda` serves it.

Maps compose in any grouping. Time can be cut into segments that are worked on at once (`parallel_kda`) or
laid out over devices (`kda_fn.distributed`); a prompt's map, computed once, can be applied to any state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda_fn import _check
from kda_fn.layers.kimi_delta_attention import (
    check_shapes_and_dtypes,
    heads_of,
    init_state,
    kimi_delta_attention,
    layer_inputs,
    memory_options,
)
from kda_fn.primitives.causal_conv1d import causal_conv1d
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.primitives.kda import check_kda, kda
from kda_fn.types import Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

__all__ = [
    "LayerTransition",
    "Transition",
    "apply_layer_transition",
    "apply_transition",
    "compose_transitions",
    "identity_transition",
    "kda_transition",
    "layer_transition",
    "parallel_kda",
    "transition_by",
    "with_state",
]


class Transition(NamedTuple):
    """S_out = transform S_in + offset, of each head: float32, or float64 for float64 inputs."""

    transform: Float[Tensor, "*B HV K K"]
    offset: Float[Tensor, "*B HV K V"]


def kda_transition(
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    *,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    impl: Impl | None = None,
) -> Transition:
    """The map of T tokens, T >= 0: `kda(S, q, k, v, g, beta)` ends at `apply_transition(.., S)`, for every S.

        A = Π_t (I - beta_t k_t k_t^T) diag(exp(g_t)),   B = kda(0, q, k, v, g, beta)[0]

    Arguments are those of `kda`; queries have no part in it. It costs as `kda` with K + V value channels.

    Raises ValueError, TypeError and NotImplementedError as `kda` does.

    >>> k, v = l2_norm(torch.randn(5, 1, 4)), torch.randn(5, 1, 2)
    >>> g, beta = -torch.rand(5, 1, 4), torch.rand(5, 1)
    >>> segment, S = kda_transition(k, v, g, beta), torch.randn(1, 4, 2)  # any state
    >>> torch.allclose(apply_transition(segment, S), kda(S, k, k, v, g, beta)[0], atol=1e-5)
    True
    """
    return transition_by(kda, k, v, g, beta, lower_bound=lower_bound, chunk_size=chunk_size, impl=impl)


def transition_by(
    memory: Callable[..., tuple[Tensor, Tensor]], k: Tensor, v: Tensor, *gates: Tensor, **options: Any
) -> Transition:
    """`kda_transition` by `kda`, or by a function that has its first arguments: `fused_kda`.

    >>> k, v = l2_norm(torch.randn(5, 1, 4)), torch.randn(5, 1, 2)
    >>> g, beta = -torch.rand(5, 1, 4), torch.rand(5, 1)
    >>> by_kda, usual = transition_by(kda, k, v, g, beta), kda_transition(k, v, g, beta)
    >>> torch.equal(by_kda.transform, usual.transform)
    True
    """
    _check.floating("kda_transition", {"k": k, "v": v})
    _check.shapes("kda_transition", {"k": (k, "*B T H K"), "v": (v, "*B T HV V")})
    # The outputs are not looked at, any queries do.
    return _from_nothing(memory, k, k, v, *gates, **options)[0]


def _from_nothing(
    memory: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    **options: Any,
) -> tuple[Transition, Tensor, Tensor]:
    """The map, the outputs from a state of zeros [*B T HV V], and those from the identity [*B T HV K]."""
    K, V = k.shape[-1], v.shape[-1]
    dtype = torch.promote_types(v.dtype, torch.float32)
    columns = torch.eye(K, V + K, dtype=dtype, device=v.device).roll(V, -1)
    start = columns.expand(*v.shape[:-3], v.shape[-2], K, V + K)
    values = torch.cat([v, v.new_zeros(*v.shape[:-1], K)], -1)
    end, outputs = memory(start, q, k, values, *gates, **options)
    offset, transform = end.split([V, K], -1)
    o, seen = outputs.split([V, K], -1)
    return Transition(transform.contiguous(), offset.contiguous()), o, seen


def with_state(
    o: Float[Tensor, "*B T HV V"], seen: Float[Tensor, "*B T HV K"], state: Float[Tensor, "*B HV K V"]
) -> Float[Tensor, "*B T HV V"]:
    """Outputs from a state: o, which is from zeros, and what queries see of the state through the map.

    >>> o, seen = torch.tensor([[[1.0]]]), torch.tensor([[[2.0, 3]]])  # T = HV = V = 1, K = 2
    >>> with_state(o, seen, torch.tensor([[[10.0], [100]]]))  # 1 + 2·10 + 3·100
    tensor([[[321.]]])
    """
    shown = seen.to(state.dtype).transpose(-3, -2) @ state
    return (o + shown.transpose(-3, -2)).to(o.dtype)


def identity_transition(state: Float[Tensor, "*B HV K V"]) -> Transition:
    """The map of no tokens, for states like this one: A = I, B = 0.

    Raises TypeError for what is no floating tensor, ValueError for one of fewer than three axes.

    >>> S = torch.randn(1, 4, 2)
    >>> torch.equal(apply_transition(identity_transition(S), S), S)
    True
    """
    _check.floating("identity_transition", {"state": state})
    _check.shapes("identity_transition", {"state": (state, "*B HV K V")})
    K = state.shape[-2]
    eye = torch.eye(K, dtype=state.dtype, device=state.device)
    return Transition(eye.expand(*state.shape[:-1], K).clone(), torch.zeros_like(state))


def apply_transition(transition: Transition, state: Float[Tensor, "*S HV K V"]) -> Float[Tensor, "*B HV K V"]:
    """The state after the segment: transform state + offset. Batch axes broadcast.

    Raises TypeError for what is no Transition, or for dtypes that differ.

    >>> twice_and_three = Transition(2 * torch.eye(2)[None], 3 * torch.ones(1, 2, 1))
    >>> apply_transition(twice_and_three, torch.ones(1, 2, 1)).flatten()
    tensor([5., 5.])
    """
    _check_transition("apply_transition", "transition", transition)
    _check.floating("apply_transition", {"state": state, **_check.leaves("transition", transition)})
    _check.same_dtype("apply_transition", {"state": state, **_check.leaves("transition", transition)})
    _check_inner("apply_transition", "state", state, transition)
    return transition.transform @ state + transition.offset


def compose_transitions(later: Transition, earlier: Transition) -> Transition:
    """The map of two segments one after the other: apply(compose(b, a), S) = apply(b, apply(a, S)).

    Raises TypeError for what is no Transition, or for dtypes that differ.

    >>> one = torch.ones(1, 1, 1)
    >>> twice, plus_three = Transition(2 * one, 0 * one), Transition(one, 3 * one)
    >>> compose_transitions(twice, plus_three).offset.item()  # 2 (S + 3)
    6.0
    """
    caller = "compose_transitions"
    _check_transition(caller, "later", later)
    _check_transition(caller, "earlier", earlier)
    tensors = {**_check.leaves("later", later), **_check.leaves("earlier", earlier)}
    _check.floating(caller, tensors)
    _check.same_dtype(caller, tensors)
    _check_inner(caller, "earlier.offset", earlier.offset, later)
    return _compose(later, earlier)


def _compose(later: Transition, earlier: Transition) -> Transition:
    return Transition(later.transform @ earlier.transform, later.transform @ earlier.offset + later.offset)


def parallel_kda(
    initial_state: Float[Tensor, "*B HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    *,
    segments: int,
    scale: float | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*B HV K V"], Float[Tensor, "*B T HV V"]]:
    """`kda` with time in parallel: all segments at once from nothing, the prefixes of their maps by an
    associative scan, and what the state that reaches a segment adds to its outputs.

        S_i = (T_{i-1} ∘ .. ∘ T_0)(S_0)      T_i = kda_transition(segment i)
        o_i = kda(0, segment i) + p_i S_i    p_i = kda(I, segment i with values of 0)

    What must wait for each other are T / segments tokens and log2(segments) products; the work is that of
    `kda` with K + V value channels. It pays where one sequence does not fill a device. In half precision both
    terms of o are rounded.

    Parameters
    ----------
    segments : how many, at least 1; the last ones may be short, or have no tokens.
    all others : as of `kda`. Packed sequences are parallel already: `kda` takes them.

    Raises ValueError, TypeError and NotImplementedError as `kda` does.

    >>> k, v = l2_norm(torch.randn(9, 1, 4)), torch.randn(9, 1, 2)
    >>> g, beta = -torch.rand(9, 1, 4), torch.rand(9, 1)
    >>> S = torch.randn(1, 4, 2)
    >>> S_parallel, o_parallel = parallel_kda(S, k, k, v, g, beta, segments=3)
    >>> torch.allclose(o_parallel, kda(S, k, k, v, g, beta)[1], atol=1e-5)
    True
    """
    _check.positive_integer("parallel_kda", "segments", segments)
    options: dict[str, Any] = {"lower_bound": lower_bound, "chunk_size": chunk_size}
    tensors = initial_state, q, k, v, g, beta
    check_kda("parallel_kda", "g", *tensors, scale=scale, cu_seqlens=None, **options)
    options["impl"] = impl
    T = q.shape[-3]
    if segments == 1 or T < 2:
        return kda(*tensors, scale=scale, **options)
    L = -(-T // segments)
    inputs = [*(_to_segments(x, -3, L) for x in (q, k, v, g)), _to_segments(beta, -2, L)]
    maps, o, seen = _from_nothing(kda, *inputs, scale=scale, **options)
    first = initial_state.unsqueeze(-4)
    reached = apply_transition(_prefixes(maps), first)
    count = reached.shape[-4]
    o = with_state(o, seen, torch.cat([first, reached.narrow(-4, 0, count - 1)], -4))
    return reached.select(-4, count - 1).clone(), o.flatten(-4, -3).narrow(-3, 0, T).clone()


def _to_segments(x: Tensor, axis: int, L: int) -> Tensor:
    """[*B T ..] -> [*B n L ..]; zeros at the end are tokens that change nothing."""
    short = -x.shape[axis] % L
    if short:
        shape = list(x.shape)
        shape[axis] = short
        x = torch.cat([x, x.new_zeros(shape)], axis)
    return x.unflatten(axis, (-1, L))


def _prefixes(steps: Transition) -> Transition:
    """Of n maps on axis -4 the n compositions of the first 1, 2, .., n: an associative scan, by doubling."""
    n, reach = steps.offset.shape[-4], 1
    while reach < n:
        earlier = Transition(*(x.narrow(-4, 0, n - reach) for x in steps))
        later = Transition(*(x.narrow(-4, reach, n - reach) for x in steps))
        joined = _compose(later, earlier)
        steps = Transition(
            *(torch.cat([x.narrow(-4, 0, reach), y], -4) for x, y in zip(steps, joined, strict=True))
        )
        reach *= 2
    return steps


class LayerTransition(NamedTuple):
    """A segment of a KDA layer's inputs, to be skipped over from any state.

    The convolution of the first W-1 tokens still reads what came before the segment, and they are run again;
    for all after them the window is known, and the memory's map.
    """

    head: Float[Tensor, "*B T D"]
    """The layer's inputs at the first min(T, W-1) tokens."""
    memory: Transition
    """Of the tokens after them."""
    conv_state: Float[Tensor, "*B W_1 P"]
    """The window after the segment, of T >= W-1 tokens; of fewer the head's own is taken."""


def layer_transition(
    params: KDAParams, x: Float[Tensor, "*B T D"], *, config: KDAConfig, impl: Impl | None = None
) -> LayerTransition:
    """What T tokens do to a layer's state, whatever the state.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> params, x = init_kimi_delta_attention(config), torch.randn(20, 8)
    >>> segment = layer_transition(params, x, config=config)
    >>> segment.head.shape, segment.memory.transform.shape  # W-1 tokens, and a matrix a head for the rest
    (torch.Size([3, 8]), torch.Size([1, 4, 4]))
    """
    caller = "layer_transition"
    _check.instance(caller, "config", config, KDAConfig)
    _check.instance(caller, "params", params, KDAParams)
    _check.floating(caller, {"x": x, **_check.leaves("params", params)})
    if x.ndim < 2 or x.shape[-1] != config.D:
        raise ValueError(f"{caller}: x has shape {tuple(x.shape)}, expected [*B T D] with D={config.D}")
    window = init_state(config, tuple(x.shape[:-2]), dtype=x.dtype, device=x.device)
    check_shapes_and_dtypes(caller, params, window, config, "x", x, x.shape[:-1], None)

    T, head = x.shape[-2], min(config.W - 1, x.shape[-2])
    inputs = layer_inputs(params, x, config, impl)
    # Rows that see the zeros before the segment are the head's, which are cut off.
    conv_state, qkv = causal_conv1d(window.conv_state, inputs.qkv, params.conv, impl=impl)
    _, k, v = heads_of(qkv, config)
    tail = (y.narrow(-3, head, T - head) for y in (k, v, inputs.raw))
    memory = transition_by(
        fused_kda,
        *tail,
        inputs.beta.narrow(-2, head, T - head),
        params.A_log,
        params.dt_bias,
        **memory_options(config, impl),
    )
    return LayerTransition(x.narrow(-2, 0, head).clone(), memory, conv_state)


def apply_layer_transition(
    params: KDAParams,
    transition: LayerTransition,
    state: KDAState,
    *,
    config: KDAConfig,
    impl: Impl | None = None,
) -> KDAState:
    """The layer's state after the segment: that of `kimi_delta_attention`, in the time of W-1 tokens.

    Raises ValueError or TypeError for an argument that does not fit, before any work.

    >>> config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> params, x, state = init_kimi_delta_attention(config), torch.randn(20, 8), init_state(config)
    >>> segment = layer_transition(params, x, config=config)
    >>> skipped = apply_layer_transition(params, segment, state, config=config)
    >>> walked, _ = kimi_delta_attention(params, state, x, config=config)
    >>> torch.allclose(skipped.recurrent_state, walked.recurrent_state, atol=1e-5)
    True
    """
    _check.instance("apply_layer_transition", "transition", transition, LayerTransition)
    after, _ = kimi_delta_attention(params, state, transition.head, config=config, impl=impl)
    whole_window = transition.head.shape[-2] == config.W - 1
    return KDAState(
        transition.conv_state.clone() if whole_window else after.conv_state,
        apply_transition(transition.memory, after.recurrent_state),
    )


def _check_transition(caller: str, name: str, transition: object) -> None:
    _check.instance(caller, name, transition, Transition)


def _check_inner(caller: str, name: str, state: Tensor, transition: Transition) -> None:
    """That the map's matrices fit the state's."""
    heads, K, V = transition.offset.shape[-3:] if transition.offset.ndim > 2 else (0, 0, 0)
    if transition.transform.shape[-3:] != (heads, K, K) or state.shape[-3:] != (heads, K, V):
        raise ValueError(
            f"{caller}: {name} has shape {tuple(state.shape)}, the transition's transform "
            f"{tuple(transition.transform.shape)} and offset {tuple(transition.offset.shape)}: "
            "expected [*B HV K V], [*B HV K K], [*B HV K V]"
        )


torch.serialization.add_safe_globals([Transition, LayerTransition])
