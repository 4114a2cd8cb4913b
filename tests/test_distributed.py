"""One to four processes compute what one does: values, final states and every gradient, and send little.

The processes run this file as a program, over gloo and a file; each writes what came of each case, and the
tests read that. An error in one ends all, so that none waits for another.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from laws import GRADIENT, LAYER_ROUNDINGS, VALUE, assert_close, assert_identical, error
from oracles import torch_oracles as oracles
from subjects import leaves
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad, vmap

from kda_fn import (
    KDAConfig,
    KDAState,
    KimiLinearConfig,
    MLAConfig,
    context_lengths,
    distributed_kda,
    distributed_kimi_delta_attention,
    distributed_kimi_linear,
    gather_heads,
    gather_states,
    init_kimi_delta_attention,
    init_kimi_linear,
    init_kimi_linear_state,
    init_state,
    join_heads,
    kda,
    kimi_delta_attention,
    kimi_linear,
    l2_norm,
    quantize,
    shard_heads,
)

ROOT = Path(__file__).parents[1]
WORLD, SECONDS = 4, 150
T, H, HV, K, V, D = 13, 2, 4, 4, 3, 8
CONFIG = KDAConfig(
    hidden_size=D, num_heads=H, head_dim=K, num_v_heads=HV, head_v_dim=V, conv_size=4, chunk_size=4
)
FULL_RANK = KDAConfig(
    hidden_size=D, num_heads=2, head_dim=K, lower_bound=-5.0, output_gate="full_rank", allow_neg_eigval=True
)
MESHES: dict[str, DeviceMesh] = {}
CASES: dict[str, Callable[[], None]] = {}


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# What one process computes: the float64 recurrence


Tensors = tuple[Tensor, ...]


@cache
def kda_inputs(gate: Any, cu: tuple[int, ...] | None, dtype: torch.dtype) -> Tensors:
    """state, q, k, v, g, beta, of heads that decay very differently; "mixed" has -inf, 0 and -1000 too."""
    N = () if cu is None else (len(cu) - 1,)
    q, k = l2_norm(rand(0, T, H, K)), l2_norm(rand(1, T, H, K))
    g = -rand(3, T, HV, K).abs() * torch.tensor([1, 0.01, 0.3, 5.0]).double().unsqueeze(-1)
    if gate == "mixed":
        for every, value in ((7, -math.inf), (5, 0.0), (3, -1000.0)):
            g[::every, :, ::every] = value
    else:
        g = g * gate
    wide = torch.promote_types(dtype, torch.float32)
    tensors = q, k, rand(2, T, HV, V)
    gates = g.to(wide), rand(4, T, HV).sigmoid().to(wide)
    return rand(9, *N, HV, K, V).to(wide), *(x.to(dtype) for x in tensors), *gates


def weights(N: tuple[int, ...], *shape: int) -> tuple[Any, Tensor]:
    """Cotangents of the final state and of the outputs."""
    return rand(21, *N, HV, K, V), rand(22, *shape)


@cache
def kda_expected(gate: Any, cu: tuple[int, ...] | None, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """final state and o, and the gradients of all inputs."""
    inputs = [x.double().requires_grad_() for x in kda_inputs(gate, cu, dtype)]
    outputs = oracles.kda(*inputs, cu_seqlens=cu)
    N = () if cu is None else (len(cu) - 1,)
    gradients = torch.autograd.grad(outputs, inputs, weights(N, T, HV, V))
    return tuple(y.detach() for y in outputs), gradients


@cache
def layer_inputs(
    config: KDAConfig, cu: tuple[int, ...] | None, dtype: torch.dtype
) -> tuple[Any, Any, Tensor]:
    """params, state and x, the rates of the heads far apart."""
    generator = torch.Generator().manual_seed(0)
    params = init_kimi_delta_attention(config, generator=generator, dtype=dtype)
    N, wide = () if cu is None else (len(cu) - 1,), torch.promote_types(dtype, torch.float32)
    rates = torch.linspace(-3, 2, config.HV, dtype=wide)
    norm = rand(6, config.V, dtype=dtype)
    params = params._replace(A_log=rates, norm=norm, dt_bias=rand(7, config.HV * config.K, dtype=wide))
    state = KDAState(
        rand(8, *N, config.W - 1, config.P, dtype=dtype),
        rand(9, *N, config.HV, config.K, config.V, dtype=wide),
    )
    return params, state, rand(10, T, D, dtype=dtype)


@cache
def layer_expected(config: KDAConfig, cu: tuple[int, ...] | None, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """state and y; the cotangents; the gradients of params, state and x."""
    inputs: Any = layer_inputs(config, cu, dtype)
    tracked: Any = optree.tree_map(lambda x: x.double().requires_grad_(), inputs)
    outputs: Any = oracles.kimi_delta_attention(*tracked, config=config, cu_seqlens=cu)
    cotangents = optree.tree_map(lambda x: rand(x.numel(), *x.shape), outputs)
    present = [x for x in leaves(tracked) if x.numel()]
    slopes = iter(torch.autograd.grad(leaves(outputs), present, leaves(cotangents)))
    gradients = optree.tree_map(lambda x: next(slopes) if x.numel() else x.detach(), tracked)
    return optree.tree_map(Tensor.detach, outputs), cotangents, gradients


def dot(outputs: Any, cotangents: Any) -> Tensor:
    """The objective."""
    pairs = zip(leaves(outputs), leaves(cotangents), strict=True)
    return torch.stack([(y * w.to(y.dtype)).sum() for y, w in pairs]).sum()


def total(mesh: DeviceMesh, tree: Any) -> Any:
    """The sum over the ranks of "context": shares to gradients."""

    def add(x: Tensor) -> Tensor:
        x = x.clone()
        if "context" in (mesh.mesh_dim_names or ()):
            dist.all_reduce(x, group=mesh.get_group("context"))
        return x

    return optree.tree_map(add, tree)


# Context parallelism


SPLITS = {
    1: [(13,)],
    2: [(7, 6), (0, 13), (12, 1)],
    3: [(5, 4, 4), (6, 0, 7), (1, 1, 11)],
    4: [(4, 3, 3, 3), (0, 9, 0, 4), (13, 0, 0, 0), (1, 2, 1, 9)],
}
PACKS = [(0, 4, 4, 9, 13), (0, 13), (0, 7, 13), (0, 1, 2, 3, 13, 13), (0, 0, 5, 12, 13)]
"""Ends on ranks' borders and between them, on several ranks, of no tokens."""


def run_kda(
    n: int,
    lengths: tuple[int, ...],
    gate: Any,
    cu: tuple[int, ...] | None,
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Values, states and gradients; a head's own for each head."""
    mesh = MESHES[f"context {n}"]
    rank = mesh.get_local_rank("context")
    state, *tokens = kda_inputs(gate, cu, dtype)
    (final, o), gradients = kda_expected(gate, cu, dtype)
    own = [x.split(lengths)[rank] for x in tokens]
    inputs = [x.clone().requires_grad_() for x in (state, *own)]
    actual = distributed_kda(*inputs, mesh=mesh, lengths=lengths, cu_seqlens=cu, **options)  # pyright: ignore
    whole = gather_states(actual[0], mesh=mesh, cu_seqlens=cu)
    assert_close(whole.detach(), final, VALUE[dtype])
    close(actual[1], o.split(lengths)[rank], VALUE[dtype])

    w_state, w_o = weights(state.shape[:-3], T, HV, V)
    # Of one sequence every rank has the state: its weight is in parts. Packed, where it ends.
    share = (rank + 1) / sum(range(1, n + 1)) if cu is None else 1
    objective = dot(actual, [share * w_state, w_o.split(lengths)[rank]])
    slopes = torch.autograd.grad(objective, inputs, materialize_grads=True)
    assert_close(total(mesh, slopes[0]), gradients[0], GRADIENT[dtype])
    for slope, whole_slope in zip(slopes[1:], gradients[1:], strict=True):
        expected = whole_slope.split(lengths)[rank]
        if dtype == torch.bfloat16:
            # Roundings are held to the size of the whole, as the laws do.
            squares = torch.stack([(slope.double() - expected).square().sum(), expected.square().sum()])
            off, size = total(mesh, squares)
            assert 0 < off.sqrt() < GRADIENT[dtype] * size.sqrt()
            continue
        for mine, its in zip(slope.unbind(1), expected.unbind(1), strict=True):
            close(mine, its, GRADIENT[dtype])


def close(actual: Any, expected: Any, tolerance: float) -> None:
    """`assert_close` of what may have no numbers, or zeros where zeros belong (behind a gate of -inf)."""
    for mine, its in zip(leaves(actual), leaves(expected), strict=True):
        if its.any():
            assert_close(mine.detach(), its, tolerance)
        else:
            assert mine.shape == its.shape and not mine.any()


def run_layer(
    axes: str,
    lengths: tuple[int, ...],
    config: KDAConfig,
    cu: tuple[int, ...] | None,
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """The layer over the axes of a mesh: values, states, and the gradients of parameters, states and x."""
    mesh = MESHES[axes]
    context = mesh.get_local_rank("context") if "context" in axes else 0
    rank, ranks = (mesh.get_local_rank("heads"), mesh["heads"].size()) if "heads" in axes else (0, 1)
    cut = partial(shard_heads, rank=rank, ranks=ranks, config=config)
    params, state, x = layer_inputs(config, cu, dtype)
    (final, y), (w_state, w_y), (d_params, d_state, d_x) = layer_expected(config, cu, dtype)

    inputs: Any = cut(params), cut(state), x.split(lengths)[context]
    tracked: Any = optree.tree_map(lambda x: x.clone().requires_grad_(), inputs)
    call = partial(
        distributed_kimi_delta_attention, config=config, mesh=mesh, lengths=lengths, cu_seqlens=cu, **options
    )
    new_state, out = call(*tracked)
    whole: Any = gather_states(new_state, mesh=mesh, cu_seqlens=cu)
    close(whole, cut(final), VALUE[dtype])
    close(out, y.split(lengths)[context], VALUE[dtype])
    assert_close(gather_heads(whole, config=config, mesh=mesh), final, VALUE[dtype])

    n = len(lengths)
    share = (context + 1) / sum(range(1, n + 1)) if cu is None else 1
    cotangents = optree.tree_map(lambda w: share * w, cut(w_state)), w_y.split(lengths)[context]
    slopes = torch.autograd.grad(dot((new_state, out), cotangents), leaves(tracked), materialize_grads=True)
    g_params, g_state, g_x = optree.tree_unflatten(optree.tree_structure(tracked), slopes)
    close(g_x, d_x.split(lengths)[context], GRADIENT[dtype])
    for mine, its in zip(total(mesh, g_state), cut(d_state), strict=True):
        assert_close(mine, its, GRADIENT[dtype])
    for name, mine, its in zip(params._fields, total(mesh, g_params), cut(d_params), strict=True):
        assert mine.shape == its.shape
        if its.numel():
            assert error(mine, its) <= GRADIENT[dtype], f"{name}: {error(mine, its):.1e}"
    # Each head's rate has a gradient of its own.
    rates = total(mesh, g_params).A_log
    assert len({float(x) for x in rates}) == config.HV // ranks and bool((rates != 0).all())


def run_half(axes: str, lengths: tuple[int, ...]) -> None:
    """The layer in bf16 beside the float64 one: its values, and its gradients as one vector."""
    mesh = MESHES[axes]
    context, rank = mesh.get_local_rank("context"), mesh.get_local_rank("heads")
    cut = partial(shard_heads, rank=rank, ranks=2, config=CONFIG)
    params, state, x = layer_inputs(CONFIG, None, torch.bfloat16)
    (_, y), (w_state, w), (d_params, _, d_x) = layer_expected(CONFIG, None, torch.bfloat16)
    inputs: Any = cut(params), x.split(lengths)[context]
    tracked: Any = optree.tree_map(lambda x: x.clone().requires_grad_(), inputs)
    options: Any = {"config": CONFIG, "mesh": mesh, "lengths": lengths}
    new, out = distributed_kimi_delta_attention(tracked[0], cut(state), tracked[1], **options)
    assert_close(out.detach(), y.split(lengths)[context], VALUE[out.dtype] * LAYER_ROUNDINGS)
    # Every rank has the state: that of the first counts.
    cotangents = optree.tree_map(lambda w: w * (context == 0), cut(w_state)), w.split(lengths)[context]
    slopes = torch.autograd.grad(dot((new, out), cotangents), leaves(tracked), materialize_grads=True)
    flat = [torch.cat([x.double().flatten() for x in leaves(tree)]) for tree in (slopes[:-1], cut(d_params))]
    assert error(total(mesh, flat[0]), flat[1]) < GRADIENT[out.dtype] * LAYER_ROUNDINGS
    assert error(slopes[-1], d_x.split(lengths)[context]) < GRADIENT[out.dtype] * LAYER_ROUNDINGS


def run_transforms(n: int, lengths: tuple[int, ...]) -> None:
    """torch.func.grad; per-sample gradients; a second derivative: those of one process."""
    mesh = MESHES[f"context {n}"]
    rank = mesh.get_local_rank("context")
    state, *tokens = kda_inputs(0.5, None, torch.float64)
    own = [x.split(lengths)[rank] for x in tokens]
    w = rand(5, T, HV, V)

    def loss(S: Tensor, *inputs: Any) -> Tensor:
        o = distributed_kda(S, *inputs, mesh=mesh, lengths=lengths)[1]
        return (o * o * w.split(lengths)[rank]).sum()

    def expected(S: Tensor, *inputs: Any) -> Tensor:
        o = oracles.kda(S, *inputs)[1]
        return (o * o * w).sum()

    every = tuple(range(6))
    theirs = grad(expected, every)(state, *tokens)
    slopes = grad(loss, every)(state, *own)
    assert_close(total(mesh, slopes[0]), theirs[0], 1e-10)
    close(slopes[1:], [x.split(lengths)[rank] for x in theirs[1:]], 1e-10)

    rows = [torch.stack([x, 0.5 * x, 0.9 * x]) for x in (state, *own)]
    samples = vmap(grad(loss, every))(*rows)
    for i in range(3):
        alone = grad(loss, every)(*(x[i] for x in rows))
        close([x[i] for x in samples], alone, 1e-10)
    # Of one input alone: the messages of all ranks have the mapped axis, whoever holds what of it.
    for i in every:
        alone = [row if j == i else row[0] for j, row in enumerate(rows)]
        mapped = vmap(grad(loss, every), tuple(0 if j == i else None for j in every))(*alone)
        close([x[0] for x in mapped], slopes, 1e-10)

    def slope(function: Any, *inputs: Any) -> Any:
        return sum((d * d.detach().cos()).sum() for d in grad(function, (2, 3, 4))(*inputs))

    curvature = grad(partial(slope, loss), every)(state, *own)
    theirs = grad(partial(slope, expected), every)(state, *tokens)
    close(curvature[1:], [x.split(lengths)[rank] for x in theirs[1:]], 1e-9)


def run_head_transforms() -> None:
    """torch.func.grad, per-sample gradients and a second derivative over heads, of the layer."""
    mesh = MESHES["heads 2"]
    cut = partial(shard_heads, rank=mesh.get_local_rank("heads"), ranks=2, config=CONFIG)
    params, state, x = layer_inputs(CONFIG, None, torch.float64)
    call = partial(distributed_kimi_delta_attention, config=CONFIG, mesh=mesh)

    def loss(params: Any, x: Tensor) -> Tensor:
        return call(params, cut(state), x)[1].square().sum()

    def expected(params: Any, x: Tensor) -> Tensor:
        return oracles.kimi_delta_attention(params, state, x, config=CONFIG)[1].square().sum()

    ours, theirs = grad(loss, (0, 1))(cut(params), x), grad(expected, (0, 1))(params, x)
    close(ours, (cut(theirs[0]), theirs[1]), 1e-10)
    samples = vmap(grad(loss, (0, 1)), (None, 0))(cut(params), torch.stack([x, x.flip(0)]))
    close(optree.tree_map(lambda y: y[0], samples), ours, 1e-10)
    assert not torch.equal(samples[1][0], samples[1][1])

    def slope(function: Any, params: Any, x: Tensor) -> Tensor:
        return (grad(function, 1)(params, x) * rand(31, T, D)).sum()

    ours = grad(partial(slope, loss), (0, 1))(cut(params), x)
    theirs = grad(partial(slope, expected), (0, 1))(params, x)
    close(ours, (cut(theirs[0]), theirs[1]), 1e-9)


def run_isolation() -> None:
    """NaN in one sequence, begun and ended on other ranks, stays in it: the others' outputs to the bit."""
    mesh, lengths, cu = MESHES["context 4"], (4, 3, 3, 3), (0, 2, 8, 13)
    rank = mesh.get_local_rank("context")
    state, *tokens = kda_inputs(0.5, cu, torch.float64)
    spoiled = [x.clone() for x in tokens]
    for x in spoiled:
        x[2:8] = math.nan
    bad = state.clone()
    bad[1] = math.nan

    def run(state: Tensor, tokens: Any) -> tuple[Tensor, Tensor]:
        own = [x.split(lengths)[rank] for x in tokens]
        return distributed_kda(state, *own, mesh=mesh, lengths=lengths, cu_seqlens=cu)  # pyright: ignore

    clean, dirty = run(state, tokens), run(bad, spoiled)
    start = sum(lengths[:rank])
    outside = torch.tensor([not 2 <= t < 8 for t in range(start, start + lengths[rank])])
    assert_identical(dirty[1][outside], clean[1][outside]) if outside.any() else None
    assert bool(dirty[1][~outside].isnan().all())
    whole = [gather_states(final, mesh=mesh, cu_seqlens=cu) for final, _ in (clean, dirty)]
    assert_identical(whole[1][[0, 2]], whole[0][[0, 2]])


# What is sent


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """What this rank gives to each collective: name and numbers."""
    sent: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, given in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 0)):
            call = getattr(dist, name)

            def watched(
                *args: Any, name: str = name, given: int = given, call: Any = call, **kwargs: Any
            ) -> Any:
                sent.append((name, sum(x.numel() for x in leaves(args[given]))))
                return call(*args, **kwargs)

            patch.setattr(dist, name, watched)
        yield sent


def run_counts() -> None:
    """Context: the window and the map, the same for any T, and as much for each rank back. Heads: y, and back
    x with what all ranks hold of the parameters."""
    window, two_states = 3 * CONFIG.P, HV * (K * K + K * V)
    for tokens in (3, 8, 200):
        for batch in ((), (2,)):
            mesh = MESHES["context 4"]
            params: Any = init_kimi_delta_attention(CONFIG, generator=torch.Generator().manual_seed(0))
            x = rand(0, *batch, tokens, D, dtype=torch.float32).requires_grad_()
            call = partial(distributed_kimi_delta_attention, params, config=CONFIG)
            with counted() as sent:
                y = call(init_state(CONFIG, batch), x, mesh=mesh)[1]
                rows = 2 if batch else 1
                assert sent == [("all_gather", rows * window), ("all_gather", rows * two_states)]
                sent.clear()
                y.sum().backward()
                assert sent == [
                    ("reduce_scatter", 4 * rows * two_states),
                    ("reduce_scatter", 4 * rows * window),
                ]

    mesh = MESHES["heads 2"]
    if mesh.get_coordinate() is not None:
        rank = mesh.get_local_rank("heads")
        params = shard_heads(init_kimi_delta_attention(CONFIG), rank, 2, config=CONFIG)
        state = shard_heads(init_state(CONFIG), rank, 2, config=CONFIG)
        x = rand(0, 7, D, dtype=torch.float32).requires_grad_()
        with counted() as sent:
            y = distributed_kimi_delta_attention(params, state, x, config=CONFIG, mesh=mesh)[1]
            assert sent == [("all_reduce", 7 * D)]
            sent.clear()
            y.sum().backward()
            assert sent == [("all_reduce", size) for size in (7 * D, V, K * D, V * D)]


# The model


MODEL = KimiLinearConfig(vocab_size=11, layer_types=("kda",) * 2, intermediate_size=9, kda=CONFIG)


def run_model(axes: str, lengths: tuple[int, ...], cu: tuple[int, ...] | None) -> None:
    """The language model over a mesh, on two segments, the state carried: logits, states and gradients."""
    mesh = MESHES[axes]
    context = mesh.get_local_rank("context") if "context" in axes else 0
    rank, ranks = (mesh.get_local_rank("heads"), mesh["heads"].size()) if "heads" in axes else (0, 1)
    cut = partial(shard_heads, rank=rank, ranks=ranks, config=CONFIG)
    params: Any = init_kimi_linear(MODEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    N = () if cu is None else (len(cu) - 1,)
    state: Any = init_kimi_linear_state(MODEL, N, dtype=torch.float64)
    tokens = torch.arange(T).square() % 11
    w = rand(3, T, 11)

    def whole(params: Any) -> Any:
        first, logits = kimi_linear(params, state, tokens, config=MODEL, cu_seqlens=cu)
        last, more = kimi_linear(params, first, tokens.flip(0), config=MODEL, cu_seqlens=cu)
        return ((logits * w).sum() + (more * w).sum()), (last, logits, more)

    def ours(params: Any) -> Any:
        call = partial(distributed_kimi_linear, config=MODEL, mesh=mesh, lengths=lengths, cu_seqlens=cu)
        own = w.split(lengths)[context]
        first, logits = call(params, cut(state), tokens.split(lengths)[context])
        first = gather_states(first, mesh=mesh, cu_seqlens=cu)
        last, more = call(params, first, tokens.flip(0).split(lengths)[context])
        last = gather_states(last, mesh=mesh, cu_seqlens=cu)
        return (logits * own).sum() + (more * own).sum(), (last, logits, more)

    theirs, (last, logits, more) = grad(whole, has_aux=True)(params)
    slopes, outputs = grad(ours, has_aux=True)(cut(params))
    close(outputs[0], cut(last), 1e-10)
    close(outputs[1:], [x.split(lengths)[context] for x in (logits, more)], 1e-10)
    shares = total(mesh, slopes)
    close(shares, cut(theirs), 1e-10)
    close(gather_heads(shares, config=CONFIG, mesh=mesh), theirs, 1e-10)


def run_quantised() -> None:
    """int8 projections: as whole, but that the last one's inputs are rounded by heads."""
    mesh = MESHES["heads 2"]
    params, state, x = layer_inputs(CONFIG, None, torch.float32)
    params = params._replace(**{name: quantize(getattr(params, name)) for name in ("qkv", "gates", "out")})
    rank = mesh.get_local_rank("heads")
    cut = partial(shard_heads, rank=rank, ranks=2, config=CONFIG)
    _, expected = kimi_delta_attention(params, state, x, config=CONFIG)
    _, y = distributed_kimi_delta_attention(cut(params), cut(state), x, config=CONFIG, mesh=mesh)
    assert error(y, expected.double()) < 0.03
    assert_identical(
        leaves(gather_heads(cut(params), config=CONFIG, mesh=mesh)),
        leaves(params),  # to the bit, and back
    )


def run_readme() -> None:
    """Its listing, on half of the processes it speaks of."""
    mesh, lengths = MESHES["context 2 heads 2"], context_lengths(T, 2)
    listings = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = next(listing for listing in listings if "init_device_mesh" in listing)
    params, state, x = layer_inputs(CONFIG, None, torch.float64)
    own = x.split(lengths)[mesh.get_local_rank("context")]
    names = {"params": params, "state": state, "x": own, "config": CONFIG, "lengths": lengths}
    names |= {"init_device_mesh": lambda *_, **__: mesh, "shard_heads": shard_heads}
    names["distributed_kimi_delta_attention"] = distributed_kimi_delta_attention
    exec(code, names)
    (_, y), *_ = layer_expected(CONFIG, None, torch.float64)
    assert_close(names["y"], y.split(lengths)[mesh.get_local_rank("context")], 1e-12)


# Errors, which every rank raises before any communication


def run_errors() -> None:
    mesh = MESHES["context 4"]
    rank = mesh.get_local_rank("context")
    state, *tokens = kda_inputs(0.5, None, torch.float64)
    own: Any = [x[:3] for x in tokens]
    call = partial(distributed_kda, state, *own)

    def raises(kind: type[Exception], words: str, function: Callable[[], Any]) -> None:
        with pytest.raises(kind, match=words):
            function()

    raises(ValueError, "lengths must be the tokens of each of 4", lambda: call(mesh=mesh, lengths=(3, 3)))
    other = tuple(4 if r == rank else 3 for r in range(4))
    raises(ValueError, f"says 4 tokens of rank {rank}", lambda: call(mesh=mesh, lengths=other))
    raises(ValueError, "cu_seqlens must end at T = 12", lambda: call(mesh=mesh, cu_seqlens=(0, 3)))
    raises(ValueError, "initial_state has shape", lambda: call(mesh=mesh, cu_seqlens=(0, 12)))
    nameless = DeviceMesh("cpu", [0, 1, 2, 3])
    raises(ValueError, 'axis "context" or "heads"', lambda: call(mesh=nameless))
    raises(TypeError, "mesh must be DeviceMesh", lambda: call(mesh=mesh.get_group("context")))  # pyright: ignore
    if rank:
        raises(ValueError, "mesh must hold this rank", lambda: call(mesh=MESHES["context 1"]))
    heads = MESHES["heads 4"]
    params, layer_state, x = layer_inputs(CONFIG, None, torch.float64)
    layer = partial(distributed_kimi_delta_attention, params, layer_state, x, config=CONFIG)
    raises(ValueError, "4 ranks must divide the heads, got H=2", lambda: layer(mesh=heads))
    two = MESHES["context 2 heads 2"]
    raises(ValueError, "state.conv_state has shape", lambda: layer(mesh=two, lengths=(T, T)))
    tangents = state, *own
    raises(
        NotImplementedError,
        "no forward mode",
        lambda: torch.func.jvp(partial(distributed_kda, mesh=mesh), tangents, tangents),
    )

    def by_heads(x: Tensor) -> Any:
        one = partial(shard_heads, rank=rank, ranks=4, config=heads_config)
        return distributed_kimi_delta_attention(
            one(params), one(layer_state), x, config=heads_config, mesh=heads
        )

    heads_config = KDAConfig(hidden_size=D, num_heads=4, head_dim=K)
    params, layer_state, x = layer_inputs(heads_config, None, torch.float64)
    raises(NotImplementedError, "no forward mode", lambda: torch.func.jvp(by_heads, (x,), (x,)))
    mla = MLAConfig(hidden_size=D, num_heads=2, head_dim=3, shared_dim=2, head_v_dim=4, latent_dim=5)
    hybrid = KimiLinearConfig(
        vocab_size=11, layer_types=("kda", "mla"), intermediate_size=9, kda=CONFIG, mla=mla
    )
    raises(
        NotImplementedError,
        "MLA layers are not built",
        lambda: distributed_kimi_linear(
            init_kimi_linear(hybrid),
            init_kimi_linear_state(hybrid),
            torch.arange(5),
            config=hybrid,
            mesh=mesh,
        ),
    )


def add(name: str, ranks: int, function: Callable[[], None]) -> None:
    """A case of the first so many ranks; the others have nothing to do."""
    assert name not in CASES
    CASES[name] = lambda: function() if dist.get_rank() < ranks else None


F64, F32 = torch.float64, torch.float32
for n, splits in SPLITS.items():
    for lengths in splits:
        for gate in (0.1, 20.0, "mixed"):
            add(f"kda {lengths} gate {gate}", n, partial(run_kda, n, lengths, gate, None, F64))
        add(f"kda {lengths} float32", n, partial(run_kda, n, lengths, 0.1, None, F32))
        add(f"kda {lengths} bfloat16", n, partial(run_kda, n, lengths, 0.1, None, torch.bfloat16))
        add(f"kda {lengths} reference", n, partial(run_kda, n, lengths, 0.1, None, F64, impl="reference"))
        for cu in PACKS:
            add(f"kda {lengths} packed {cu}", n, partial(run_kda, n, lengths, "mixed", cu, F64))
        axes = f"context {n}"
        add(f"layer {axes} {lengths}", n, partial(run_layer, axes, lengths, CONFIG, None, F64))
        add(f"layer {axes} {lengths} packed", n, partial(run_layer, axes, lengths, CONFIG, PACKS[n % 4], F64))
        add(f"layer {axes} {lengths} bounded", n, partial(run_layer, axes, lengths, FULL_RANK, PACKS[4], F64))
        add(f"layer {axes} {lengths} float32", n, partial(run_layer, axes, lengths, CONFIG, None, F32))
    for lengths in splits[:2]:
        add(f"transforms {lengths}", n, partial(run_transforms, n, lengths))
    heads = KDAConfig(hidden_size=D, num_heads=n, head_dim=K, num_v_heads=2 * n, head_v_dim=V, chunk_size=4)
    add(f"layer heads {n}", n, partial(run_layer, f"heads {n}", (T,), heads, None, F64))
    add(f"layer heads {n} packed", n, partial(run_layer, f"heads {n}", (T,), heads, PACKS[0], F64))
    add(f"layer heads {n} float32", n, partial(run_layer, f"heads {n}", (T,), heads, None, F32))
    add(f"model context {n}", n, partial(run_model, f"context {n}", SPLITS[n][-1], None))
add("layer heads 2 bounded", 2, partial(run_layer, "heads 2", (T,), FULL_RANK, None, F64))
for lengths in SPLITS[2]:
    both = "context 2 heads 2"
    add(f"layer {both} {lengths}", 4, partial(run_layer, both, lengths, CONFIG, None, F64))
    add(f"layer {both} {lengths} packed", 4, partial(run_layer, both, lengths, CONFIG, PACKS[0], F64))
    add(f"layer {both} {lengths} bounded", 4, partial(run_layer, both, lengths, FULL_RANK, PACKS[3], F64))
    add(f"layer {both} {lengths} float32", 4, partial(run_layer, both, lengths, CONFIG, PACKS[3], F32))
    add(f"model {both} {lengths}", 4, partial(run_model, both, lengths, None))
add("model context 4 packed", 4, partial(run_model, "context 4", SPLITS[4][0], PACKS[0]))
add("model heads 2", 2, partial(run_model, "heads 2", (T,), None))
add("transforms over heads", 2, run_head_transforms)
add("layer bfloat16", 4, partial(run_half, "context 2 heads 2", (7, 6)))
add("NaN stays", 4, run_isolation)
add("messages", 4, run_counts)
add("int8", 2, run_quantised)
add("README", 4, run_readme)
add("errors", 4, run_errors)


def main(folder: Path, rank: int) -> None:
    """Every case on one rank; the program."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=SECONDS / 3),
    )
    for n in range(1, WORLD + 1):
        for axis in ("context", "heads"):
            MESHES[f"{axis} {n}"] = DeviceMesh("cpu", list(range(n)), mesh_dim_names=(axis,))
    MESHES["context 2 heads 2"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("context", "heads"))
    with (folder / f"{rank}.jsonl").open("w", buffering=1) as file:
        for name, run in CASES.items():
            try:
                run()
                outcome = "ok"
            except Exception:
                outcome = traceback.format_exc()
            file.write(json.dumps([name, outcome]) + "\n")
            if outcome != "ok":
                return
        dist.barrier()
        dist.destroy_process_group()


# The tests


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process said. Of the workers of a parallel test run one starts them, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder, done = folder / "ranks", folder / "ranks-done"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 2 * SECONDS
        while not done.exists():
            assert time.monotonic() < deadline, "the processes did not end"
            time.sleep(0.2)
    else:
        run_ranks(folder)
        done.touch()
    files = [folder / f"{rank}.jsonl" for rank in range(WORLD)]
    return [dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {} for file in files]


def run_ranks(folder: Path) -> None:
    """Starts the processes, and sees them end."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, __file__, str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(WORLD)]
    deadline = time.monotonic() + SECONDS
    try:
        for rank in ranks:
            rank.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"the processes were stopped after {SECONDS} seconds", file=sys.stderr)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_one_process(told: list[dict[str, str]], name: str) -> None:
    """What every rank says of the case."""
    outcomes = [outcomes.get(name, "it or an earlier case did not end") for outcomes in told]
    assert outcomes == ["ok"] * WORLD, "\n".join(outcomes)


# Without processes


def test_alone_nothing_is_needed() -> None:
    """Without a mesh it is the plain function, to the bit, and torch.distributed stays uninitialised."""
    for cu in (None, PACKS[0]):
        inputs = kda_inputs("mixed", cu, F64)
        assert_identical(distributed_kda(*inputs, cu_seqlens=cu), kda(*inputs, cu_seqlens=cu))
        params, state, x = layer_inputs(CONFIG, cu, F64)
        options: Any = {"config": CONFIG, "cu_seqlens": cu}
        assert_identical(
            distributed_kimi_delta_attention(params, state, x, **options),
            kimi_delta_attention(params, state, x, **options),
        )
        assert gather_states(state, cu_seqlens=cu) is state
    model, empty = init_kimi_linear(MODEL), init_kimi_linear_state(MODEL)
    tokens = torch.arange(7)
    assert_identical(
        distributed_kimi_linear(model, empty, tokens, config=MODEL),
        kimi_linear(model, empty, tokens, config=MODEL),
    )
    assert gather_heads(model, config=CONFIG) is model
    assert not dist.is_initialized()


def test_importing_leaves_torch_distributed_alone() -> None:
    """Nothing of it is loaded that torch had not, and nothing is initialised."""
    program = (
        "import sys, torch, optree, torch.distributed as dist; before = set(sys.modules); import kda_fn; "
        "new = [m for m in set(sys.modules) - before if m.startswith('torch.distributed')]; "
        "assert 'kda_fn.distributed' in sys.modules and not new and not dist.is_initialized(), new"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=100)


def test_shards_are_the_heads() -> None:
    """Rows and columns by index, in the closed form of the layout; whole again to the bit; in any pytree."""
    params, state, _ = layer_inputs(CONFIG, PACKS[0], F64)
    shards = [shard_heads((params, {"s": state}), rank, 2, config=CONFIG) for rank in (0, 1)]
    ours, state_1 = shards[1][0], shards[1][1]["s"]
    channels = [*range(4, 8), *range(8 + 4, 8 + 8), *range(16 + 6, 16 + 12)]
    assert_identical(ours.qkv, params.qkv[channels])
    assert_identical(ours.conv, params.conv[channels])
    assert_identical(state_1.conv_state, state.conv_state[..., channels])
    assert_identical(state_1.recurrent_state, state.recurrent_state[..., 2:, :, :])
    assert_identical(ours.gates, params.gates[[*range(K), K + 2, K + 3, *range(K + HV, K + HV + V)]])
    assert_identical(ours.decay, params.decay[2 * K :])
    assert_identical((ours.A_log, ours.dt_bias), (params.A_log[2:], params.dt_bias[2 * K :]))
    assert_identical(ours.output_gate, params.output_gate[2 * V :])
    assert_identical(ours.out, params.out[:, 2 * V :])
    assert_identical(ours.norm, params.norm)
    assert_identical(join_heads(shards, config=CONFIG), (params, {"s": state}))


@pytest.mark.parametrize(
    ("tokens", "ranks", "lengths"), [(13, 4, (4, 3, 3, 3)), (2, 3, (1, 1, 0)), (0, 1, (0,))]
)
def test_context_lengths(tokens: int, ranks: int, lengths: tuple[int, ...]) -> None:
    """As equal as can be."""
    assert context_lengths(tokens, ranks) == lengths


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: context_lengths(3, 0), "ranks must be a positive integer"),
        (lambda: context_lengths(-1, 2), "T must be an integer of at least 0, got -1"),
        (
            lambda: shard_heads(init_state(CONFIG), 0, 3, config=CONFIG),
            "3 ranks must divide the heads, got H=2",
        ),
        (lambda: shard_heads(init_state(CONFIG), 0, 0, config=CONFIG), "ranks must be a positive integer"),
        (lambda: join_heads([init_state(CONFIG)] * 3, config=CONFIG), "join_heads: 3 ranks must divide"),
        (lambda: shard_heads(init_state(CONFIG), 2, 2, config=CONFIG), r"rank must be in \[0, 2\), got 2"),
    ],
)
def test_errors_of_sizes(call: Callable[[], Any], words: str) -> None:
    """Named, with what fits."""
    with pytest.raises(ValueError, match=words):
        call()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
