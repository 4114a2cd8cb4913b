"""KDA over several devices, on torch.distributed: time cut among them, heads cut, or both.

Context parallel: rank r holds the tokens of one slice of time. What the others need of it is its map, two
matrices a head, and the last W-1 inputs of its convolution, however many tokens it has:

    B_r, o  = kda(0, q, k, v, g, beta)              of the slice alone; on the first rank from S_0
    A_r, p  = kda(I, q, k, 0, g, beta)              and what it makes of any state before it
    S       = A_{r-1} (.. (A_1 B_0 + B_1) ..) + B_{r-1}     all ranks' A and B are sent to all
    o_r     = o + p S                               what one device computes from S

Head parallel: rank r of n holds H/n key heads and HV/n value heads, its rows of the parameters and its part
of the states. All ranks hold all of x and of y, which is one sum over them, after the output product.

A `DeviceMesh` says who holds what: its axis "context" cuts time, its axis "heads" cuts heads, any other is
the caller's. Without a mesh, or where an axis has one rank, nothing is sent and nothing need be initialised.

Derivatives are sent too. All ranks must take that of some output of the same calls, those without tokens too.

    over "context"   the objective is the SUM of what the ranks differentiate, and each rank's gradient of a
                     parameter or state is its share: sum them over the ranks, as in data parallelism
    over "heads"     all ranks differentiate the SAME objective; each has the whole gradient of x and of all
                     that every rank holds, and that of its own heads of the rest

Reverse mode of any order goes through, by torch.func.grad too, and vmap. Forward mode and functionalize do
not: NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import optree
import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from kda_fn import _check, ragged
from kda_fn.layers.kimi_delta_attention import apply_kda_layer, check_layer
from kda_fn.layers.kimi_linear import (
    KimiLinearConfig,
    KimiLinearParams,
    KimiLinearState,
    apply_kimi_linear,
    check_kimi_linear,
)
from kda_fn.primitives._kernel import wants_torch_operations
from kda_fn.primitives.causal_conv1d import causal_conv1d
from kda_fn.primitives.fused_kda import fused_kda
from kda_fn.primitives.kda import check_kda, kda
from kda_fn.transition import Transition, apply_transition, with_state
from kda_fn.types import W8A8, CuSeqlens, Float, Impl, KDAConfig, KDAParams, KDAState, Tensor

Tree = TypeVar("Tree")

__all__ = [
    "context_lengths",
    "distributed_kda",
    "distributed_kimi_delta_attention",
    "distributed_kimi_linear",
    "gather_heads",
    "gather_states",
    "join_heads",
    "shard_heads",
]


# Collectives: pure functions, each the adjoint of its neighbour


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The calls on lists are those that every backend and every version has.
    gathered = x.new_empty((group.size(), *x.shape))
    dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=group)
    return gathered


def _mapped(info: Any, in_dim: int | None, x: Tensor, axis: int) -> Tensor:
    """x with the mapped axis at `axis`, also where it has none: other ranks' messages may have it."""
    if in_dim is None:
        return x.unsqueeze(axis).expand(*x.shape[:axis], info.batch_size, *x.shape[axis:])
    return x.movedim(in_dim, axis)


class _Gather(Function):
    """x of all ranks, stacked on a new first axis; `through` as it is.

    Ranks differ in what they use of x, and a rank that used nothing would not come to the backward's
    communication: what its outputs are certainly made of goes through this node too.
    """

    @staticmethod
    def forward(x: Tensor, through: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        return _all_gather(x, group), through.view_as(through)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[2]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return *_Scatter.apply(*cotangents, ctx.group), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        x, through, group = args
        return _Gather.apply(_mapped(info, in_dims[0], x, 0), through, group), (1, in_dims[1])


class _Scatter(Function):
    """Row r of the sum of all ranks' x; `through` as it is."""

    @staticmethod
    def forward(x: Tensor, through: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        own = x.new_empty(x.shape[1:])
        dist.reduce_scatter(own, list(x.contiguous().unbind(0)), group=group)
        return own, through.view_as(through)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[2]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return *_Gather.apply(*cotangents, ctx.group), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        x, through, group = args
        return _Scatter.apply(_mapped(info, in_dims[0], x, 1), through, group), (0, in_dims[1])


class _Enter(Function):
    """What all ranks hold, where each goes on to use it for heads of its own: its gradient is their sum."""

    @staticmethod
    def forward(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, *_Leave.apply(ctx.group, *cotangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _Enter.apply(*args), in_dims[1:]


class _Leave(Function):
    """The sums over the ranks, of which each holds all."""

    @staticmethod
    def forward(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        sums = tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)
        for total in sums:
            dist.all_reduce(total, group=group)
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, *_Enter.apply(ctx.group, *cotangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _Leave.apply(*args), in_dims[1:]


# Who holds what


def context_lengths(T: int, ranks: int) -> tuple[int, ...]:
    """How many of T tokens each rank holds, as equal as can be; the first ranks hold the odd ones.

    Raises ValueError for a T below 0 or fewer ranks than one.

    >>> context_lengths(10, 4)
    (3, 3, 2, 2)
    """
    _check.positive_integer("context_lengths", "ranks", ranks)
    if not isinstance(T, int) or T < 0:
        raise ValueError(f"context_lengths: T must be an integer of at least 0, got {T!r}")
    return tuple(T // ranks + (rank < T % ranks) for rank in range(ranks))


def _axis(caller: str, mesh: DeviceMesh | None, name: str) -> dist.ProcessGroup | None:
    """The group of this rank along an axis of the mesh; None where it is alone."""
    if mesh is None:
        return None
    _check.instance(caller, "mesh", mesh, DeviceMesh)
    names = mesh.mesh_dim_names or ()
    if not {"context", "heads"} & set(names):
        raise ValueError(f'{caller}: mesh must have an axis "context" or "heads", its axes are {names}')
    if mesh.get_coordinate() is None:
        raise ValueError(f"{caller}: mesh must hold this rank, it holds {mesh.mesh.tolist()}")
    if name not in names or mesh.size(names.index(name)) == 1:
        return None
    if wants_torch_operations():
        raise NotImplementedError(f"{caller}: no forward mode or functionalize goes through a collective")
    return mesh.get_group(name)


def _tokens(caller: str, name: str, x: object, spec: str) -> int:
    """T of a tensor with those axes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}: {name} must be a tensor, got {type(x).__name__}")
    sizes = _check.shapes(caller, {name: (x, spec)})["T"]
    assert isinstance(sizes, int)
    return sizes


class _Context(NamedTuple):
    """Where this rank's slice lies among all tokens; every field is static."""

    group: dist.ProcessGroup
    rank: int
    edges: tuple[int, ...]
    """Rank r holds tokens [edges[r], edges[r+1])."""
    bounds: tuple[int, ...]
    """Of all sequences: [0, T] where there is no packing."""
    packed: bool

    @property
    def ranks(self) -> range:
        return range(len(self.edges) - 1)

    @property
    def slice(self) -> tuple[int, int]:
        return self.edges[self.rank], self.edges[self.rank + 1]

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """The packing of this slice: every sequence, most of them without tokens here."""
        start, stop = self.slice
        return tuple(min(max(b, start), stop) - start for b in self.bounds) if self.packed else None

    def open_at(self, position: int) -> int | None:
        """The sequence with tokens on both sides; a single one may go on at either end."""
        if not self.packed:
            return 0
        inside = (n for n, (start, stop) in enumerate(pairwise(self.bounds)) if start < position < stop)
        return next(inside, None)

    @property
    def entering(self) -> int | None:
        """The sequence that ranks before this one have begun."""
        return self.open_at(self.slice[0]) if self.rank else None

    def ranks_before(self, n: int) -> range:
        """The ranks that hold sequence n up to this slice."""
        first = sum(edge <= self.bounds[n] for edge in self.edges[1:]) if self.packed else 0
        return range(min(first, self.rank), self.rank)

    def tokens(self, n: int, rank: int) -> int:
        """How many tokens of sequence n a rank holds."""
        start, stop = self.edges[rank : rank + 2]
        return max(0, min(stop, self.bounds[n + 1]) - max(start, self.bounds[n]))

    def row(self, states: Tensor, axis: int, n: int) -> Tensor:
        """The state of sequence n."""
        return states.select(axis, n) if self.packed else states

    def with_row(self, states: Tensor, axis: int, n: int, row: Tensor) -> Tensor:
        """The states, that of sequence n another."""
        if not self.packed:
            return row
        after = states.shape[axis] - n - 1
        pieces = states.narrow(axis, 0, n), row.unsqueeze(axis), states.narrow(axis, n + 1, after)
        return torch.cat(pieces, axis)

    def mask(self, rows: list[bool], axis: int, device: torch.device) -> Tensor:
        """Of each sequence, to stand beside states."""
        axes = [1] * (-axis - 1)
        return torch.tensor(rows, device=device).reshape(*([-1] if self.packed else []), *axes)

    def ending(self, states: Tensor, axis: int) -> Tensor:
        """The states of the sequences whose last token is here, zeros for the others; one of no tokens ends
        on the first rank it can."""
        ends = [sum(edge < stop for edge in self.edges[1:]) == self.rank for stop in self.bounds[1:]]
        return torch.where(self.mask(ends, axis, states.device), states, 0)


def _context(
    caller: str,
    mesh: DeviceMesh | None,
    T: int,
    lengths: Sequence[int] | None,
    cu_seqlens: CuSeqlens | None,
) -> _Context | None:
    """Checked; None where one rank holds all of time."""
    group = _axis(caller, mesh, "context")
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    lengths = (T,) * ranks if lengths is None else tuple(lengths)
    if not all(isinstance(n, int) and n >= 0 for n in lengths) or len(lengths) != ranks:
        raise ValueError(f"{caller}: lengths must be the tokens of each of {ranks} ranks, got {lengths}")
    if lengths[rank] != T:
        raise ValueError(f"{caller}: lengths says {lengths[rank]} tokens of rank {rank}, it holds T = {T}")
    edges = tuple(accumulate(lengths, initial=0))
    bounds = (0, edges[-1]) if cu_seqlens is None else ragged.offsets(cu_seqlens, edges[-1])
    if group is None:
        return None
    return _Context(group, rank, edges, bounds, cu_seqlens is not None)


# Context parallelism


def _context_conv(
    context: _Context, conv_state: Tensor, x: Tensor, weight: Tensor, *, cu_seqlens: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """`causal_conv1d` of a slice; cu_seqlens is the slice's."""
    W_1, T = conv_state.shape[-2], x.shape[-2]
    if W_1 == 0:
        return causal_conv1d(conv_state, x, weight, cu_seqlens=cu_seqlens, **options)
    kept = min(W_1, T)
    last = x.narrow(-2, T - kept, kept)
    missing = last.new_zeros(*x.shape[:-2], W_1 - kept, x.shape[-1])
    gathered, x = _Gather.apply(torch.cat([missing, last], -2), x, context.group)
    rows = gathered.movedim(0, -3).flatten(-3, -2)

    def after(n: int, ranks: range) -> Tensor:
        """The window of sequence n after the tokens of those ranks."""
        order = list(range(W_1))
        for rank in ranks:
            stop = (rank + 2) * W_1
            order += range(stop - min(W_1, context.tokens(n, rank)), stop)
        return ragged.take(torch.cat([context.row(conv_state, -3, n), rows], -2), order[-W_1:], -2)

    n, windows = context.entering, conv_state
    if n is not None:
        windows = context.with_row(conv_state, -3, n, after(n, context.ranks_before(n)))
    final, y = causal_conv1d(windows, x, weight, cu_seqlens=cu_seqlens, **options)
    final = context.ending(final, -3) if context.packed else after(0, context.ranks)
    return final, _made_of(y, x, windows, weight)


def _made_of(y: Tensor, x: Tensor, *others: Tensor) -> Tensor:
    """y; of no tokens x, which is like it, and formally all others: its derivative reaches the collectives,
    and is mapped by vmap, as on ranks that have tokens."""
    return y if y.numel() else x + torch.stack([other.sum().to(x.dtype) for other in others]).sum()


def _context_memory(
    context: _Context,
    memory: Callable[..., tuple[Tensor, Tensor]],
    initial_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *weights: Tensor,
    cu_seqlens: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`kda` or `fused_kda` of a slice; cu_seqlens is the slice's."""
    K, V = k.shape[-1], v.shape[-1]
    n = context.entering
    length = 0 if n is None else context.tokens(n, context.rank)
    # That one is not begun from its state, which is formally there still: vmap and derivatives see on every
    # rank what they see on the first.
    came_in = [n is not None and row == n for row in range(len(context.bounds) - 1)]
    own = torch.where(context.mask(came_in, -4, v.device), 0, initial_state)
    final, o = memory(own, q, k, v, g, beta, *weights, cu_seqlens=cu_seqlens, **options)
    o = _made_of(o, v, own, q, k, g, beta, *weights)

    # The same of the sequence that came in, from the identity.
    head = [x.narrow(-3, 0, length) for x in (q, k, v.new_zeros(*v.shape[:-1], K), g)]
    head.append(beta.narrow(-2, 0, length))
    eye = torch.eye(K, dtype=final.dtype, device=v.device).expand(*v.shape[:-3], v.shape[-2], K, K)
    transform, seen = memory(eye, *head, *weights, **options)

    # Of a sequence begun here only the offset is read, as its state; where none goes on, nothing.
    offset = context.row(final, -4, context.open_at(context.slice[1]) or 0)
    sent = torch.cat([transform, offset], -1)
    gathered, o = _Gather.apply(sent, o, context.group)
    maps = [Transition(*x.split([K, V], -1)) for x in gathered.unbind(0)]

    def after(ranks: range) -> Tensor:
        """The state of a sequence that began on the first of those ranks, after the last."""
        state = maps[ranks[0]].offset
        for rank in ranks[1:]:
            state = apply_transition(maps[rank], state)
        return state

    if n is not None:
        state = after(context.ranks_before(n))
        first, rest = o.tensor_split([length], -3)
        o = torch.cat([with_state(first, seen, state), rest], -3)
        arrived = apply_transition(Transition(transform, context.row(final, -4, n)), state)
        final = context.with_row(final, -4, n, arrived)
    return context.ending(final, -4) if context.packed else after(context.ranks), o


def distributed_kda(
    initial_state: Float[Tensor, "*S HV K V"],
    q: Float[Tensor, "*B T H K"],
    k: Float[Tensor, "*B T H K"],
    v: Float[Tensor, "*B T HV V"],
    g: Float[Tensor, "*B T HV K"],
    beta: Float[Tensor, "*B T HV"],
    *,
    mesh: DeviceMesh | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    impl: Impl | None = None,
) -> tuple[Float[Tensor, "*S HV K V"], Float[Tensor, "*B T HV V"]]:
    """`kda` of this rank's slice of time, from the state that the ranks before it arrive at.

    Heads need no word: what is cut by heads is independent.

    Parameters
    ----------
    initial_state : before rank 0's first token. With cu_seqlens [*B N HV K V], all N, each before its own
        first token: only the rank that holds this reads it, to the others it is a shape.
    q, k, v, g, beta : of this rank's T tokens, T >= 0.
    mesh : with an axis "context"; None: this rank is alone.
    lengths : tokens of each rank of the axis (`context_lengths`); None: all hold as many as this one.
    cu_seqlens : [N+1], of all ranks' tokens together; sequences may begin and end anywhere.
    all others : as of `kda`.

    Returns
    -------
    final_state, o : o is of this rank's tokens. The state is that after the last rank's last token, on every
        rank; with cu_seqlens row n is the final state of sequence n on the rank where that ends, zeros on all
        others (`gather_states`).

    Raises
    ------
    ValueError, TypeError : as `kda`, and for a mesh or lengths that do not fit. Other ranks then wait for
        this one until their group's timeout.
    NotImplementedError : as `kda`; forward mode and functionalize.

    >>> k, v = l2_norm(torch.randn(5, 1, 4)), torch.randn(5, 1, 2)
    >>> g, beta = -torch.rand(5, 1, 4), torch.rand(5, 1)
    >>> S = torch.randn(1, 4, 2)
    >>> S_alone, o_alone = distributed_kda(S, k, k, v, g, beta)  # no mesh: this rank is alone
    >>> torch.allclose(o_alone, kda(S, k, k, v, g, beta)[1], atol=1e-5)
    True
    """
    caller = "distributed_kda"
    options: dict[str, Any] = {"scale": scale, "lower_bound": lower_bound, "chunk_size": chunk_size}
    tensors = initial_state, q, k, v, g, beta
    T = _tokens(caller, "q", q, "*B T H K")
    context = _context(caller, mesh, T, lengths, cu_seqlens)
    local = cu_seqlens if context is None else context.cu_seqlens
    check_kda(caller, "g", *tensors, cu_seqlens=local, **options)
    memory = kda if context is None else partial(_context_memory, context, kda)
    return memory(*tensors, cu_seqlens=local, impl=impl, **options)


def gather_states(
    state: Tree, *, mesh: DeviceMesh | None = None, cu_seqlens: CuSeqlens | None = None
) -> Tree:
    """All final states of packed sequences on every rank, from those that each returned: their sum.

    Any pytree of them; of a single sequence every rank has it already, and nothing is done. This message,
    alone of all, grows with the number of sequences.

    >>> gather_states(torch.tensor([1.0, 2]), cu_seqlens=(0, 3, 5))  # no mesh: both sequences ended here
    tensor([1., 2.])
    """
    group = _axis("gather_states", mesh, "context")
    if group is None or cu_seqlens is None:
        return state
    return optree.tree_map(lambda x: _Gather.apply(x, x, group)[0].sum(0), state)  # pyright: ignore


# Head parallelism


def _head_config(caller: str, config: KDAConfig, ranks: int) -> KDAConfig:
    """The config of one rank's heads."""
    _check.instance(caller, "config", config, KDAConfig)
    if config.H % ranks or config.HV % ranks:
        raise ValueError(
            f"{caller}: {ranks} ranks must divide the heads, got H={config.H} and HV={config.HV}"
        )
    return replace(config, num_heads=config.H // ranks, num_v_heads=config.HV // ranks, head_v_dim=config.V)


class _Cut(NamedTuple):
    """How a tensor is cut: its parts along an axis, their sizes and whether they are cut by heads."""

    axis: int
    parts: tuple[tuple[int, bool], ...]

    def shard(self, x: Tensor, rank: int, ranks: int) -> Tensor:
        pieces = x.split([size for size, _ in self.parts], self.axis)
        own = (
            piece.narrow(self.axis, rank * (size // ranks), size // ranks) if is_cut else piece
            for piece, (size, is_cut) in zip(pieces, self.parts, strict=True)
        )
        return torch.cat(list(own), self.axis)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        sizes = [size // len(shards) if is_cut else size for size, is_cut in self.parts]
        columns = zip(*(x.split(sizes, self.axis) for x in shards), strict=True)
        return torch.cat(
            [
                torch.cat(column, self.axis) if is_cut else column[0]
                for column, (_, is_cut) in zip(columns, self.parts, strict=True)
            ],
            self.axis,
        )


def _cuts(node: KDAParams | KDAState, config: KDAConfig) -> dict[str, _Cut]:
    """Of a layer's parameters or state, whole or one rank's of them; what is not named all ranks hold."""
    H, HV, K, V = config.H, config.HV, config.K, config.V
    qkv = ((H * K, True), (H * K, True), (HV * V, True))
    if isinstance(node, KDAState):
        return {"conv_state": _Cut(-1, qkv), "recurrent_state": _Cut(-3, ((HV, True),))}
    low_rank = config.output_gate == "low_rank"
    gate = (node.output_gate.shape[1], False) if low_rank else (HV * V, True)
    cuts = {
        "qkv": _Cut(0, qkv),
        "conv": _Cut(0, qkv),
        "gates": _Cut(0, ((node.decay.shape[1], False), (HV, True), gate)),
        "decay": _Cut(0, ((HV * K, True),)),
        "A_log": _Cut(0, ((HV, True),)),
        "dt_bias": _Cut(0, ((HV * K, True),)),
        "output_gate": _Cut(0, ((HV * V, True),)),
        "output_gate_bias": _Cut(0, ((HV * V, True),)),
        "out": _Cut(1, ((HV * V, True),)),
    }
    return {name: cut for name, cut in cuts.items() if getattr(node, name).shape != (0,)}


def _each_layer(function: Callable[..., Any], *trees: Any) -> Any:
    """`function` of the KDA layers' parameters and states in the trees; of all else the first tree's."""

    def convert(*nodes: Any) -> Any:
        return function(*nodes) if isinstance(nodes[0], KDAParams | KDAState) else nodes[0]

    return optree.tree_map(convert, *trees, is_leaf=lambda node: isinstance(node, KDAParams | KDAState))


def _recut(config: KDAConfig, function: Callable[..., Tensor], *nodes: Any) -> Any:
    """A layer's parameters or state of `function(cut, *tensors)`; what all ranks hold is the first's."""
    fields = {}
    for name, cut in _cuts(nodes[0], config).items():
        weights = [getattr(node, name) for node in nodes]
        if isinstance(weights[0], W8A8):
            # The scales of an int8 weight are of its rows.
            scale = weights[0].scale if cut.axis else function(cut, *(w.scale for w in weights))
            fields[name] = W8A8(function(cut, *(w.weight for w in weights)), scale)
        else:
            fields[name] = function(cut, *weights)
    return nodes[0]._replace(**fields)


def shard_heads(tree: Tree, rank: int, ranks: int, *, config: KDAConfig) -> Tree:
    """One rank's heads of a layer's parameters or state, or of all in a pytree (a model's, an optimizer's).

    Rank r of n has key heads [r H/n, (r+1) H/n) and their value heads: their rows of q|k|v, of the
    convolution, of beta and of the gates, and their columns of the output product. What makes the channels of
    a low rank, the norm, and all that is no KDA layer stays whole.

    Raises ValueError where the ranks do not divide the heads.

    >>> config = KDAConfig(hidden_size=8, num_heads=2, head_dim=4)
    >>> params = init_kimi_delta_attention(config)
    >>> params.qkv.shape, shard_heads(params, 0, 2, config=config).qkv.shape
    (torch.Size([24, 8]), torch.Size([12, 8]))
    """
    _check.positive_integer("shard_heads", "ranks", ranks)
    _head_config("shard_heads", config, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"shard_heads: rank must be in [0, {ranks}), got {rank}")
    return _each_layer(partial(_recut, config, lambda cut, x: cut.shard(x, rank, ranks)), tree)


def join_heads(trees: Sequence[Tree], *, config: KDAConfig) -> Tree:
    """The inverse of `shard_heads`: the whole of all ranks' trees, in their order.

    >>> config = KDAConfig(hidden_size=8, num_heads=2, head_dim=4)
    >>> params = init_kimi_delta_attention(config)
    >>> whole = join_heads([shard_heads(params, rank, 2, config=config) for rank in range(2)], config=config)
    >>> all(torch.equal(a, b) for a, b in zip(whole, params))
    True
    """
    _head_config("join_heads", config, len(trees))
    return _each_layer(partial(_recut, config, lambda cut, *xs: cut.join(xs)), *trees)


def gather_heads(tree: Tree, *, config: KDAConfig, mesh: DeviceMesh | None = None) -> Tree:
    """`join_heads` of the trees of all ranks, on every rank: to save, to evaluate, to take a norm.

    Not differentiable.

    >>> config = KDAConfig(hidden_size=8, num_heads=2, head_dim=4)
    >>> params = init_kimi_delta_attention(config)
    >>> whole = gather_heads(params, config=config)  # no mesh: this rank has all heads
    >>> all(torch.equal(a, b) for a, b in zip(whole, params))
    True
    """
    group = _axis("gather_heads", mesh, "heads")
    if group is None:
        return tree

    def whole(node: Any) -> Any:
        leaves, treedef = optree.tree_flatten(node)
        rows = (_all_gather(leaf.detach(), group).unbind(0) for leaf in leaves)
        return join_heads([treedef.unflatten(row) for row in zip(*rows, strict=True)], config=config)

    return _each_layer(whole, tree)


# The layer and the model


def _apply_layer(
    context: _Context | None,
    heads: dist.ProcessGroup | None,
    params: KDAParams,
    state: KDAState,
    x: Tensor,
    config: KDAConfig,
    cu_seqlens: tuple[int, ...] | None,
    impl: Impl | None,
) -> tuple[KDAState, Tensor]:
    """`apply_kda_layer` on one rank; config and cu_seqlens are the rank's."""
    options: dict[str, Any] = {}
    if context is not None:
        options["conv"] = partial(_context_conv, context)
        options["memory"] = partial(_context_memory, context, fused_kda)
    if heads is not None:
        params, x = _enter_heads(params, x, config, heads)
    state, y = apply_kda_layer(params, state, x, config, cu_seqlens, impl, **options)
    return state, y if heads is None else _Leave.apply(heads, y)[0]


def _enter_heads(
    params: KDAParams, x: Tensor, config: KDAConfig, group: dist.ProcessGroup
) -> tuple[KDAParams, Tensor]:
    """x and what all ranks hold of the parameters, so that their gradients are summed, all at once."""
    if not isinstance(params.gates, Tensor):
        x, norm = _Enter.apply(group, x, params.norm)
        return params._replace(norm=norm), x
    R = params.decay.shape[1]
    decay, beta, gate = params.gates.tensor_split([R, R + config.HV])
    if config.output_gate == "low_rank":
        x, norm, decay, gate = _Enter.apply(group, x, params.norm, decay, gate)
    else:
        x, norm, decay = _Enter.apply(group, x, params.norm, decay)
    return params._replace(norm=norm, gates=torch.cat([decay, beta, gate])), x


def distributed_kimi_delta_attention(
    params: KDAParams,
    state: KDAState,
    x: Float[Tensor, "*B T D"],
    *,
    config: KDAConfig,
    mesh: DeviceMesh | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[KDAState, Float[Tensor, "*B T D"]]:
    """`kimi_delta_attention` of this rank's tokens and heads.

    Parameters
    ----------
    params, state : of `shard_heads` where the mesh has an axis "heads"; the same on all ranks of "context".
    x : [*B T D], this rank's tokens; the same on all ranks of "heads".
    config : of the whole layer.
    mesh : with axes "context", "heads" or both; None: this rank is alone.
    lengths, cu_seqlens : as of `distributed_kda`.

    Returns
    -------
    state, y : as of `distributed_kda`, of this rank's heads; y [*B T D], the sum over all heads.

    Raises ValueError or TypeError for an argument that does not fit, before any work; NotImplementedError for
    a named impl that cannot serve, forward mode and functionalize.

    >>> config = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> params, x, state = init_kimi_delta_attention(config), torch.randn(5, 8), init_state(config)
    >>> _, alone = distributed_kimi_delta_attention(params, state, x, config=config)  # no mesh
    >>> torch.allclose(alone, kimi_delta_attention(params, state, x, config=config)[1], atol=1e-5)
    True
    """
    caller = "distributed_kimi_delta_attention"
    _check.instance(caller, "config", config, KDAConfig)
    T = _tokens(caller, "x", x, "*B T D")
    context = _context(caller, mesh, T, lengths, cu_seqlens)
    heads = _axis(caller, mesh, "heads")
    local = config if heads is None else _head_config(caller, config, heads.size())
    packing = check_layer(
        caller, params, state, x, local, cu_seqlens if context is None else context.cu_seqlens, impl
    )
    return _apply_layer(context, heads, params, state, x, local, packing, impl)


def distributed_kimi_linear(
    params: KimiLinearParams,
    state: KimiLinearState,
    tokens: Tensor,
    *,
    config: KimiLinearConfig,
    mesh: DeviceMesh | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    impl: Impl | None = None,
) -> tuple[KimiLinearState, Float[Tensor, "*B T vocab"]]:
    """`kimi_linear` of this rank's tokens [*B T], its KDA layers as `distributed_kimi_delta_attention`.

    All other layers work token by token, and every rank of "heads" does all of their work; but MLA, which
    attends over all of time, is not built for an axis "context".

    Raises ValueError or TypeError for an argument that does not fit, before any work; NotImplementedError for
    MLA layers over an axis "context", and as `distributed_kimi_delta_attention`.

    >>> layer = KDAConfig(hidden_size=8, num_heads=1, head_dim=4)
    >>> config = KimiLinearConfig(vocab_size=11, layer_types=("kda",), intermediate_size=16, kda=layer)
    >>> params, state = init_kimi_linear(config), init_kimi_linear_state(config)
    >>> tokens = torch.tensor([3, 1, 4])
    >>> _, alone = distributed_kimi_linear(params, state, tokens, config=config)  # no mesh
    >>> torch.allclose(alone, kimi_linear(params, state, tokens, config=config)[1], atol=1e-5)
    True
    """
    caller = "distributed_kimi_linear"
    _check.instance(caller, "config", config, KimiLinearConfig)
    T = _tokens(caller, "tokens", tokens, "*B T")
    context = _context(caller, mesh, T, lengths, cu_seqlens)
    heads = _axis(caller, mesh, "heads")
    if context is not None and "mla" in config.layer_types:
        raise NotImplementedError(f'{caller}: MLA layers are not built for an axis "context"')
    local = config if heads is None else replace(config, kda=_head_config(caller, config.kda, heads.size()))
    packing = check_kimi_linear(
        caller, params, state, tokens, local, cu_seqlens if context is None else context.cu_seqlens, impl
    )
    layer = partial(_apply_layer, context, heads)
    return apply_kimi_linear(params, state, tokens, local, packing, impl, kda_layer=layer)
