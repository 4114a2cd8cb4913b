"""Compiled and exported equal eager; states and parameters are pytrees that all tools of torch carry."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.utils import _pytree as pytree
from transforms import assert_same

from kda_fn import (
    W8A8,
    KDAConfig,
    KDAParams,
    KDAState,
    KimiLinearConfig,
    init_kimi_delta_attention,
    init_kimi_linear,
    init_kimi_linear_state,
    init_state,
    kda,
    kimi_delta_attention,
)
from kda_fn.primitives._kernel import _compiled

KIMI_LINEAR = KDAConfig(hidden_size=8, num_heads=2, head_dim=4, chunk_size=2)
KIMI_K3 = KDAConfig(
    hidden_size=8,
    num_heads=1,
    head_dim=4,
    num_v_heads=2,
    head_v_dim=3,
    lower_bound=-5.0,
    output_gate="full_rank",
    allow_neg_eigval=True,
    chunk_size=2,
)
RTOL = 1e-5
"""float32: a compiler may fuse and reorder."""

Layer = Callable[..., tuple[KDAState, Tensor]]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """No test sees another's compiled code or its count of recompilations."""
    torch.compiler.reset()


def _layer(config: KDAConfig) -> tuple[Layer, KDAParams]:
    params = init_kimi_delta_attention(config, generator=torch.Generator().manual_seed(0))
    return partial(kimi_delta_attention, config=config), params


def _inputs(config: KDAConfig, *lead: int, seed: int = 1) -> tuple[KDAState, Tensor]:
    """A state in the middle of a sequence, and `lead` vectors; the last axis of lead is time."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    zeros = init_state(config, lead[:-1])
    return KDAState(*(normal(*zero.shape) for zero in zeros)), normal(*lead, config.D)


def _compiled_once(function: Callable[..., Any], *first: Any, backend: str) -> Callable[..., Any]:
    """Compiles with `first`; any later compilation is an error."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    compiled(*first)

    def call(*args: Any) -> Any:
        with torch.compiler.set_stance("fail_on_recompile"):
            return compiled(*args)

    return call


CONFIGS = {"Kimi-Linear": KIMI_LINEAR, "Kimi K3": KIMI_K3}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("config", ["Kimi-Linear", pytest.param("Kimi K3", marks=SLOW)])
def test_prefill_with_inductor(config: str) -> None:
    """Two chunks, the second one not full."""
    layer, params = _layer(CONFIGS[config])
    prefill = _compiled_once(layer, params, *_inputs(CONFIGS[config], 2, 3, seed=2), backend="inductor")
    args = _inputs(CONFIGS[config], 2, 3)
    assert_same(prefill(params, *args), layer(params, *args), rtol=RTOL)


@pytest.mark.parametrize("config", [pytest.param("Kimi-Linear", marks=SLOW), "Kimi K3"])
def test_decode_with_inductor(config: str) -> None:
    """One compiled step, its own state threaded through it, equals an eager prefill."""
    layer, params = _layer(CONFIGS[config])
    decode = _compiled_once(layer, params, *_inputs(CONFIGS[config], 2, 1, seed=2), backend="inductor")
    first_state, x = _inputs(CONFIGS[config], 2, 4)
    state, outputs = first_state, []
    for x_t in x.split(1, 1):
        state, y = decode(params, state, x_t.contiguous())
        outputs.append(y)
    assert isinstance(state, KDAState)
    assert_same((state, torch.cat(outputs, 1)), layer(params, first_state, x), rtol=RTOL)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_vmapped_decode(backend: str) -> None:
    """Beams by vmap: one set of parameters, a state and a token for each of three."""
    layer, params = _layer(KIMI_LINEAR)
    beams = vmap(layer, in_dims=(None, 0, 0))
    decode = _compiled_once(beams, params, *_inputs(KIMI_LINEAR, 3, 1, seed=2), backend=backend)
    state, x = _inputs(KIMI_LINEAR, 3, 1)
    new_state, y = decode(params, state, x)
    assert isinstance(new_state, KDAState)
    rows = [layer(params, KDAState(*(leaf[n] for leaf in state)), x[n]) for n in range(3)]
    assert_same((new_state, y), pytree.tree_map(lambda *leaves: torch.stack(leaves), *rows), rtol=RTOL)


def test_packed_prefill() -> None:
    """Offsets as a tuple are constants of the graph."""
    layer, params = _layer(KIMI_K3)
    cu_seqlens = (0, 1, 1, 4)
    states, _ = _inputs(KIMI_K3, 3, 1)
    _, x = _inputs(KIMI_K3, 4)
    packed = partial(layer, cu_seqlens=cu_seqlens)
    prefill = _compiled_once(packed, params, states, -x, backend="aot_eager")
    assert_same(prefill(params, states, x), packed(params, states, x), rtol=RTOL)


def _loss(params: KDAParams, state: KDAState, x: Tensor, *, layer: Layer) -> Tensor:
    """Of the outputs and of the final state."""
    new_state, y = layer(params, state, x)
    return y.square().mean() + new_state.recurrent_state.sin().mean()


def test_training_step_with_grad() -> None:
    """One step of gradient descent, `grad` inside the compiled function."""
    layer, params = _layer(KIMI_LINEAR)

    def step(params: KDAParams, state: KDAState, x: Tensor) -> tuple[KDAParams, KDAParams]:
        gradients = grad(partial(_loss, layer=layer))(params, state, x)
        return gradients, pytree.tree_map(lambda p, g: p - 0.1 * g, params, gradients)

    first = _inputs(KIMI_LINEAR, 2, 2, seed=2)
    compiled = _compiled_once(step, params, *first, backend="aot_eager")
    state, x = _inputs(KIMI_LINEAR, 2, 2)
    actual = compiled(params, state, x)
    assert all(isinstance(part, KDAParams) for part in actual)
    assert_same(actual, step(params, state, x), rtol=RTOL)


def test_training_step_with_backward() -> None:
    """A compiled loss, `backward` through it, and gradients on the leaves of the parameters."""
    layer, params = _layer(KIMI_K3)
    state, x = _inputs(KIMI_K3, 2, 2)

    def gradients(loss: Callable[..., Tensor]) -> list[Tensor]:
        leaves = pytree.tree_map(lambda p: p.clone().requires_grad_(), params)
        loss(leaves, state, x).backward()
        return [leaf.grad for leaf in pytree.tree_leaves(leaves) if leaf.numel()]

    loss = partial(_loss, layer=layer)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled), gradients(loss), rtol=RTOL)


SIZES = (2, 5), (3, 9), (7, 4), (4, 12), (5, 3)
"""Batch and length, of two chunks at least. A graph for the first, one for all others: torch's own rule."""


def _training_step(layer: Layer, params: KDAParams, state: KDAState, x: Tensor) -> KDAParams:
    return grad(partial(_loss, layer=layer))(params, state, x)


KINDS: dict[str, tuple[Callable[..., Any], Callable[[int, int], tuple[int, ...]]]] = {
    "prefill": (lambda layer, *args: layer(*args), lambda B, T: (B, T)),
    "decode": (lambda layer, *args: layer(*args), lambda B, T: (B, 1)),
    "vmapped decode": (
        lambda layer, *args: vmap(layer, in_dims=(None, 0, 0))(*args),
        lambda B, T: (B, 1),
    ),
    "training step": (_training_step, lambda B, T: (B, T)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batch_and_length_are_dynamic(kind: str) -> None:
    """Five sizes, two graphs, however many chunks there are."""
    layer, params = _layer(KIMI_LINEAR)
    function, sizes = KINDS[kind]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(function, layer), fullgraph=True, backend=counter)
    for B, T in SIZES:
        args = params, *_inputs(KIMI_LINEAR, *sizes(B, T))
        assert_same(compiled(*args), function(layer, *args), rtol=RTOL)
    assert counter.frame_count == 2


def test_parts_are_compiled_once() -> None:
    """Inductor sees portions of chunks: a graph for each number of them and each axis of one, for any T."""
    compiled = []
    for B, T in (2, 5), (3, 6), (5, 36), (4, 21), (1, 16), (1, 62):
        torch.manual_seed(B)
        q, k, v, g = (0.3 * torch.randn(B, T, 1, 16) for _ in range(4))
        args = torch.randn(B, 1, 16, 16), q, k, v, -g.abs(), torch.rand(B, T, 1)
        before = _compiled.cache_info().currsize
        function = partial(kda, chunk_size=4)
        actual = torch.compile(function, fullgraph=True, backend="eager")(*args)
        assert_same(actual, function(*args), rtol=RTOL)
        compiled.append(_compiled.cache_info().currsize - before)
    assert compiled == [1, 0, 1, 0, 1, 0]


EXPORTED = """
import sys
import torch

file, compiled, (args, expected) = sys.argv[1], sys.argv[2], torch.load(sys.argv[3])
program = torch._inductor.aoti_load_package(file) if compiled == "True" else torch.export.load(file).module()
for actual, y in zip(program(*args), expected, strict=True):
    torch.testing.assert_close(actual, y, rtol=1e-5, atol=1e-6)
assert "kda_fn" not in sys.modules
"""


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, of its own code
@pytest.mark.parametrize(
    ("T", "ahead_of_time"), [(1, False), (1, True), (5, False), pytest.param(5, True, marks=SLOW)]
)
def test_export(T: int, ahead_of_time: bool, tmp_path: Path) -> None:
    """Decode and a prefill of fixed length, state in and out, run in a process without this library."""
    layer, params = _layer(KIMI_LINEAR)

    class Program(torch.nn.Module):
        def forward(self, conv_state: Tensor, recurrent_state: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            state, y = layer(params, KDAState(conv_state, recurrent_state), x)
            return *state, y

    state, x = _inputs(KIMI_LINEAR, 2, T, seed=2)
    program = torch.export.export(Program(), (*state, x))
    if ahead_of_time:
        file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    else:
        file = tmp_path / "layer.pt2"
        torch.export.save(program, file)
    state, x = _inputs(KIMI_LINEAR, 2, T)
    new_state, y = layer(params, state, x)
    torch.save(((*state, x), (*new_state, y)), tmp_path / "values.pt")
    script = [sys.executable, "-c", EXPORTED, file, str(ahead_of_time), tmp_path / "values.pt"]
    subprocess.run(script, check=True, cwd=tmp_path)


def test_export_of_pytrees(tmp_path: Path) -> None:
    """States are named tuples on both sides of a program that was saved and loaded."""
    layer, params = _layer(KIMI_LINEAR)

    class Program(torch.nn.Module):
        def forward(self, state: KDAState, x: Tensor) -> tuple[KDAState, Tensor]:
            return layer(params, state, x)

    args = _inputs(KIMI_LINEAR, 2, 3)
    torch.export.save(torch.export.export(Program(), args), tmp_path / "layer.pt2")
    new_state, y = torch.export.load(tmp_path / "layer.pt2").module()(*args)
    assert isinstance(new_state, KDAState)
    assert_same((new_state, y), layer(params, *args), rtol=RTOL)


LM = KimiLinearConfig(
    vocab_size=11, layer_types=("kda",) * 2, intermediate_size=12, tie_embeddings=True, kda=KIMI_LINEAR
)

TREES: dict[str, Any] = {
    "KDAState": _inputs(KIMI_LINEAR, 2, 1)[0],
    "KDAParams, low rank": _layer(KIMI_LINEAR)[1],
    "KDAParams, full rank": _layer(KIMI_K3)[1]._replace(A_log=torch.zeros(0)),
    "W8A8": W8A8(torch.ones(2, 3, dtype=torch.int8), torch.arange(2.0)),
    "KimiLinearParams": init_kimi_linear(
        LM, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16
    ),
    "states of the language model": init_kimi_linear_state(LM, (2,)),
}


def _through_optree(tree: Any) -> Any:
    leaves, structure = optree.tree_flatten(tree)
    return optree.tree_unflatten(structure, leaves)


def _through_torch_pytree(tree: Any) -> Any:
    leaves, structure = pytree.tree_flatten(tree)
    return pytree.tree_unflatten(leaves, structure)


def _through_torch_save(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


TRIPS: dict[str, Callable[[Any], Any]] = {
    "optree": _through_optree,
    "torch pytree": _through_torch_pytree,
    "deepcopy": copy.deepcopy,
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "torch.save": _through_torch_save,
}


def _assert_identical(actual: Any, expected: Any) -> None:
    """The same types at every node, the same dtypes and bits at every leaf."""
    assert optree.tree_structure(actual) == optree.tree_structure(expected)
    leaves, expected_leaves = optree.tree_leaves(actual), optree.tree_leaves(expected)
    assert len(leaves) > 1
    for a, e in zip(leaves, expected_leaves, strict=True):
        assert isinstance(a, Tensor) and isinstance(e, Tensor)
        assert a.dtype == e.dtype
        assert torch.equal(a, e)


@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("tree", TREES)
def test_round_trip(tree: str, trip: str) -> None:
    _assert_identical(TRIPS[trip](TREES[tree]), TREES[tree])


@pytest.mark.parametrize("trip", ["deepcopy", "pickle", "torch.save"])
def test_copies_share_no_memory(trip: str) -> None:
    """What comes back from a copy or a file may be written without touching the original."""
    tree = TREES["KimiLinearParams"]
    pointers = [
        {leaf.data_ptr() for leaf in optree.tree_leaves(t) if leaf.numel()} for t in (tree, TRIPS[trip](tree))
    ]
    assert not pointers[0] & pointers[1]


@pytest.mark.parametrize("tree", TREES)
def test_both_pytrees_agree(tree: str) -> None:
    """torch's pytrees and optree see the same leaves in the same order, and every one is a tensor."""
    leaves, torch_leaves = optree.tree_leaves(TREES[tree]), pytree.tree_leaves(TREES[tree])
    assert all(a is b for a, b in zip(leaves, torch_leaves, strict=True))
    assert all(isinstance(leaf, Tensor) for leaf in leaves)


def test_transforms_keep_the_types() -> None:
    """Gradients of parameters are parameters, per-sample ones too; a mapped state is a state."""
    layer, params = _layer(KIMI_LINEAR)
    state, x = _inputs(KIMI_LINEAR, 3, 2)
    gradients = grad(partial(_loss, layer=layer))(params, state, x)
    _assert_same_shapes(gradients, params)
    per_sample = vmap(grad(partial(_loss, layer=layer)), in_dims=(None, 0, 0))(params, state, x)
    _assert_same_shapes(optree.tree_map(lambda leaf: leaf[0], per_sample), params)
    new_state, _ = vmap(layer, in_dims=(None, 0, 0))(params, state, x)
    _assert_same_shapes(new_state, state)


def _assert_same_shapes(actual: Any, expected: Any) -> None:
    assert optree.tree_structure(actual) == optree.tree_structure(expected)
    shapes = [[(leaf.shape, leaf.dtype) for leaf in optree.tree_leaves(t)] for t in (actual, expected)]
    assert shapes[0] == shapes[1]
