"""The library's main job end to end, on real text: `python -m kda_fn.demo`, about two minutes on two cores.

It trains a byte-level language model of KDA blocks on the English text that every CPython ships
(`pydoc_data.topics`). All that it does with the model is one function of an explicit state, `kimi_linear`:

    train      its gradient, segment by segment; the state after one segment is the state before the next
    evaluate   the whole held-out text in one call
    prefill    a prompt in one call
    decode     one byte a call, in a scan; the same logits and states as prefill
    sample     a vmap of that scan over the noise; every continuation starts from the one prefilled state

It prints held-out bits per byte beside those of a unigram and a bigram model, and draws the training curve
and how long each channel of the memory lasts. The exit status is 1 if the model is not clearly better.

Training can be shared by processes, to the same losses:

    torchrun --nproc-per-node 2 -m kda_fn.demo --context-parallel      each reads a slice of every segment
    torchrun --nproc-per-node 2 -m kda_fn.demo --head-parallel         each has half of the heads

With --checkpoint DIR training is saved on the way, and goes on from there, with any number of processes.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kda_fn import (
    KDAConfig,
    KDAParams,
    KDAState,
    KimiLinearConfig,
    KimiLinearParams,
    context_lengths,
    distributed_kimi_linear,
    gather_heads,
    init_kimi_linear,
    init_kimi_linear_state,
    kda_gate,
    kimi_linear,
    scan,
    shard_heads,
)
from kda_fn.layers.kimi_linear import KimiLinearState, kimi_linear_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = TypeVar("Result")

CONFIG = KimiLinearConfig(
    vocab_size=256,
    layer_types=("kda",) * 2,
    intermediate_size=256,
    tie_embeddings=True,
    kda=KDAConfig(
        hidden_size=128, num_heads=2, head_dim=32, head_v_dim=64, output_gate="full_rank", chunk_size=32
    ),
)
STEPS, ROWS, SEGMENT = 520, 8, 128  # a step reads ROWS segments of SEGMENT bytes
LEARNING_RATE, WARMUP, WEIGHT_DECAY, MAX_NORM = 5e-3, 30, 0.1, 1.0
PROMPT, CONTINUATION, SAMPLES, TEMPERATURE = 512, 240, 3, 0.7
MARGIN = 0.1  # by how many bits per byte the model must beat the simple ones


# The text, and what simple models make of it


def read_text() -> bytes:
    """Python's help topics in the order of their names. A paragraph that several topics share is kept once:
    none of the held-out text may have been trained on."""
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def unigram_bits(train: Tensor, test: Tensor, *, add: float = 0.1) -> float:
    """Bits per byte of test[1:] by the frequencies of bytes, `add` added to every count."""
    counts = torch.bincount(train, minlength=256) + add
    return -(counts / counts.sum()).log2()[test[1:]].mean().item()


def bigram_bits(train: Tensor, test: Tensor, *, add: float = 0.1) -> float:
    """Bits per byte of test[1:] by the frequencies of bytes after the byte before."""
    pairs = torch.bincount(train[:-1] * 256 + train[1:], minlength=256**2)
    counts = pairs.unflatten(0, (256, 256)) + add
    return -(counts / counts.sum(1, keepdim=True)).log2()[test[:-1], test[1:]].mean().item()


# Training


class AdamW(NamedTuple):
    """Running means of the gradients and of their squares, pytrees like the parameters."""

    mean: Any
    square: Any
    updates: int


def init_adamw(params: Any) -> AdamW:
    """The state before the first update."""
    zeros = optree.tree_map(torch.zeros_like, params)
    return AdamW(zeros, zeros, 0)


def adamw(
    state: AdamW, params: Any, grads: Any, *, lr: float, decay: float, b1: float = 0.9, b2: float = 0.95
) -> tuple[AdamW, Any]:
    """One update: the new state and the new parameters."""
    updates = state.updates + 1
    mean = optree.tree_map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
    square = optree.tree_map(lambda s, g: b2 * s + (1 - b2) * g * g, state.square, grads)

    def update(p: Tensor, m: Tensor, s: Tensor) -> Tensor:
        unbiased_m, unbiased_s = m / (1 - b1**updates), s / (1 - b2**updates)
        return (1 - lr * decay) * p - lr * unbiased_m / (unbiased_s.sqrt() + 1e-8)

    return AdamW(mean, square, updates), optree.tree_map(update, params, mean, square)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return optree.tree_leaves(tree)


def clip_by_global_norm(grads: Any, max_norm: float, *, whole: Any = None) -> Any:
    """Scales all gradients together so that their norm is at most `max_norm`; that of `whole` where they are
    one process's heads of it."""
    norm = torch.stack([g.norm() for g in leaves(grads if whole is None else whole)]).norm()
    return optree.tree_map(lambda g: g * (max_norm / norm).clamp(max=1), grads)


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to zero."""
    return LEARNING_RATE * min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


def loss(
    params: KimiLinearParams,
    state: KimiLinearState,
    text: Tensor,
    *,
    config: KimiLinearConfig,
    mesh: DeviceMesh | None = None,
) -> tuple[Tensor, KimiLinearState]:
    """Mean bits per byte of text[.., 1:], each byte given all before it, and the state to go on from. Over a
    mesh with an axis "context" it is this process's share of the mean, of its slice of the text."""
    rank, ranks = place(mesh, "context")
    lengths = context_lengths(text.shape[-1] - 1, ranks)
    given, asked = (x.split(lengths, -1)[rank] for x in (text[..., :-1], text[..., 1:]))
    state, logits = distributed_kimi_linear(params, state, given, config=config, mesh=mesh, lengths=lengths)
    nats = F.cross_entropy(logits.flatten(0, -2), asked.flatten(), reduction="sum")
    return nats / (math.log(2) * text[..., 1:].numel()), state


class Training(NamedTuple):
    """All that a training run goes on from; over an axis "heads" one process's heads of it."""

    params: KimiLinearParams
    mean: Any
    square: Any
    state: KimiLinearState
    losses: Tensor
    """Bits per byte of each step so far."""


def train(
    text: Tensor,
    steps: int,
    generator: Generator,
    *,
    config: KimiLinearConfig,
    mesh: DeviceMesh | None = None,
    checkpoint: Path | None = None,
    every: int = 50,
) -> tuple[KimiLinearParams, list[float]]:
    """Trained parameters, and the bits per byte of each step. Control-C ends it early, of one process.

    With a checkpoint folder it goes on from the last step saved there, and saves every so many steps."""
    from tqdm import tqdm

    rank, ranks = place(mesh, "heads")
    cut = partial(shard_heads, rank=rank, ranks=ranks, config=config.kda)
    whole = partial(gather_heads, config=config.kda, mesh=mesh)
    params = init_kimi_linear(config, generator=generator)
    mean, square, _ = init_adamw(params)
    state, losses = init_kimi_linear_state(config, (ROWS,)), torch.zeros(0, dtype=torch.float64)
    run = Training(params, mean, square, state, losses)
    run = cut(run if checkpoint is None else load_checkpoint(checkpoint, run))
    params, state, losses = run.params, run.state, run.losses.tolist()
    optimizer = AdamW(run.mean, run.square, len(losses))
    # The state comes out as auxiliary output, cut from the graph: backpropagation ends with the segment.
    gradient = torch.func.grad_and_value(partial(loss, config=config, mesh=mesh), has_aux=True)

    # Each row reads on from a place of its own, and from the end of the text to its start, as on a ring:
    # but for that one seam its state is of the text just before the segment.
    places = torch.arange(ROWS).unsqueeze(-1) * (len(text) // ROWS) + torch.arange(SEGMENT + 1)
    first = len(losses)
    with tqdm(total=steps, initial=first, unit="step", desc="training", disable=not is_first(mesh)) as bar:
        try:
            for step in range(first, steps):
                grads, (value, state) = gradient(params, state, text[(places + step * SEGMENT) % len(text)])
                grads, value = sum_of_shares((grads, value), mesh)
                grads = clip_by_global_norm(grads, MAX_NORM, whole=whole(grads))
                lr = learning_rate(step, steps)
                optimizer, params = adamw(optimizer, params, grads, lr=lr, decay=WEIGHT_DECAY)
                losses.append(value.item())
                if checkpoint is not None and (len(losses) % every == 0 or len(losses) == steps):
                    moments = optimizer.mean, optimizer.square
                    run = Training(params, *moments, state, torch.tensor(losses, dtype=torch.float64))
                    save_checkpoint(checkpoint, whole(run))
                recent = losses[-20:]
                bar.set_postfix_str(f"{sum(recent) / len(recent):.3f} bits per byte", refresh=False)
                bar.update()
        except KeyboardInterrupt:
            if mesh is not None:
                raise
            bar.write("interrupted: the report is of the model so far")
    return whole(params), losses


# Several processes


def join_processes(context: bool, heads: bool, config: KimiLinearConfig) -> DeviceMesh | None:
    """The mesh of the processes that torchrun started, this one among them; None where it is alone.

    With both, all heads are on processes of their own, and time is cut among what is left."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return None
    if not (context or heads):
        raise ValueError(f"{world} processes were started: give --context-parallel or --head-parallel")
    cut = (config.kda.H if context else world) if heads else 1
    if world % cut or config.kda.H % cut:
        raise ValueError(f"{world} processes do not divide the model's {config.kda.H} heads")
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    return init_device_mesh("cpu", (world // cut, cut), mesh_dim_names=("context", "heads"))


def place(mesh: DeviceMesh | None, axis: str) -> tuple[int, int]:
    """Which of how many this process is along an axis."""
    return (0, 1) if mesh is None else (mesh.get_local_rank(axis), mesh[axis].size())


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this process speaks for all."""
    return mesh is None or mesh.get_rank() == 0


def sum_of_shares(tree: Any, mesh: DeviceMesh | None) -> Any:
    """What the slices of time add up to, on every process."""
    if place(mesh, "context")[1] == 1:
        return tree
    assert mesh is not None
    tensors, treedef = optree.tree_flatten(tree)
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat, group=mesh.get_group("context"))
    pieces = flat.split([x.numel() for x in tensors])
    return treedef.unflatten(piece.view_as(x) for piece, x in zip(pieces, tensors, strict=True))


def step_of(folder: Path) -> int:
    """The number of steps that a checkpoint was saved after."""
    return int(folder.name.removeprefix("step-"))


def last_checkpoint(folder: Path) -> Path | None:
    """The latest that is whole: its `.metadata` is written when all else is."""
    return max((found.parent for found in folder.glob("step-*/.metadata")), key=step_of, default=None)


def named(run: Training) -> dict[str, Tensor]:
    """The tensors by what Python calls them: `.params.blocks[0].attention.qkv`."""
    tree: Any = run
    names = (accessor.codify("") for accessor in optree.tree_accessors(tree))
    return dict(zip(names, leaves(tree), strict=True))


@contextmanager
def saving_alone() -> Iterator[None]:
    """torch warns when one process saves or loads; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def save_checkpoint(folder: Path, run: Training) -> None:
    """By all processes together; what is saved is whole, and knows nothing of them."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with saving_alone():
        save(named(run), checkpoint_id=folder / f"step-{len(run.losses):06}")


def load_checkpoint(folder: Path, start: Training) -> Training:
    """The last one saved; where there is none, the start."""
    from torch.distributed.checkpoint.state_dict_loader import load

    found = last_checkpoint(folder)
    if found is None:
        return start
    like: Any = start._replace(losses=torch.zeros(step_of(found), dtype=torch.float64))
    run: Any = optree.tree_map(torch.empty_like, like)
    with saving_alone():
        load(named(run), checkpoint_id=found)
    return run


def is_of_a_collective(error: BaseException) -> bool:
    """Whether it was raised while this process waited for the others."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals["__name__"] == dist.distributed_c10d.__name__ for frame, _ in frames)


def together(run: Callable[[], Result], checkpoint: Path | None) -> Result:
    """`run`, and the processes take leave of each other; one that has lost another says how to go on."""
    rank = dist.get_rank()

    def stop(why: str) -> NoReturn:
        found = None if checkpoint is None else last_checkpoint(checkpoint)
        again = "there is no checkpoint to go on from"
        if found is not None:
            again = f"the same command goes on from the checkpoint of step {step_of(found)}"
        sys.exit(f"FAILED: process {rank} has lost another and stops ({why}); {again}")

    # When one process is lost torchrun ends the others, which may be told so before they see it.
    before = signal.signal(signal.SIGTERM, lambda *_: stop("terminated"))
    try:
        result = run()
        dist.destroy_process_group()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not is_of_a_collective(error):
            raise
        stop(str(error).partition("\n")[0])
    finally:
        signal.signal(signal.SIGTERM, before)
    return result


# Generation


Generated = tuple[Tensor, Tensor]


def generate(
    params: KimiLinearParams,
    state: KimiLinearState,
    logits: Tensor,
    noise: Tensor,
    *,
    config: KimiLinearConfig,
) -> tuple[KimiLinearState, Generated]:
    """Decodes a byte for each row of Gumbel noise [n 256], from the state and logits [256] after a prefix.

    Returns the state after the last byte, the bytes [n], and the logits after each [n 256]."""

    def step(
        carry: tuple[KimiLinearState, Tensor], noise_t: Tensor
    ) -> tuple[tuple[KimiLinearState, Tensor], Generated]:
        state, logits = carry
        byte = (logits / TEMPERATURE + noise_t).argmax(-1)
        state, logits = kimi_linear(params, state, byte.unsqueeze(-1), config=config)
        return (state, logits[0]), (byte, logits[0])

    (state, _), generated = scan(step, (state, logits), noise)
    return state, generated


def show_generation(
    params: KimiLinearParams, prompt: Tensor, generator: Generator, *, config: KimiLinearConfig
) -> None:
    """Prefills once, decodes, holds that against a prefill of everything, and samples from the same state."""
    uniform = torch.rand(SAMPLES, CONTINUATION, config.vocab_size, generator=generator)
    noise = -(-uniform.clamp(min=1e-9).log()).log()
    empty = init_kimi_linear_state(config)

    state, logits = kimi_linear(params, empty, prompt, config=config)
    decoded_state, (text, decoded) = generate(params, state, logits[-1], noise[0], config=config)
    whole_state, whole = kimi_linear(params, empty, torch.cat([prompt, text]), config=config)
    prefilled = whole[len(prompt) :]
    difference, error = (decoded - prefilled).abs().max().item(), relative_rmse(decoded, prefilled)
    print(f"decode    a prefill of {len(prompt)} bytes, then {len(text)} calls at T = 1; against one prefill")
    print(f"          logits: largest difference {difference:.1e}, relative RMSE {error:.1e}")
    for layer, (a, b) in enumerate(zip(decoded_state, whole_state, strict=True), 1):
        assert isinstance(a, KDAState) and isinstance(b, KDAState)
        error = relative_rmse(a.recurrent_state, b.recurrent_state)
        print(f"          recurrent state of layer {layer}: relative RMSE {error:.1e}")

    from_one_state = torch.func.vmap(partial(generate, config=config), in_dims=(None, None, None, 0))
    _, (samples, _) = from_one_state(params, state, logits[-1], noise)
    same = (samples[0] == text).sum().item()
    print(f"sample    {SAMPLES} continuations by vmap from that prefilled state, temperature {TEMPERATURE}")
    print(f"          the first, given the noise of the decoded one, has {same} of its {len(text)} bytes")
    titles = ["prompt, its end", *(f"continuation {i + 1}" for i in range(SAMPLES))]
    for title, shown in zip(titles, [prompt[-160:], *samples], strict=True):
        lines = bytes(shown.tolist()).decode(errors="replace")
        print(title, textwrap.indent(lines, "    | ", lambda line: True), sep="\n")


def relative_rmse(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|"""
    return ((x - y).norm() / y.norm()).item()


# The figure


def half_lives(params: KimiLinearParams, text: Tensor, *, config: KimiLinearConfig) -> Tensor:
    """In how many bytes a channel of the memory decays by half, [layer head channel].

    It is ln 2 over the mean of -g, the log decay, which each layer's gate computes from the layer's input."""
    h, decays, empty = F.embedding(text, params.embedding), [], init_kimi_linear_state(config)
    streams = kimi_linear_blocks(params, empty, h, config=config)
    for block, (_, stream) in zip(params.blocks, streams, strict=True):
        layer = block.attention
        x = F.rms_norm(h, block.attention_norm.shape, block.attention_norm, config.norm_eps)
        assert isinstance(layer, KDAParams) and isinstance(layer.gates, Tensor)
        assert isinstance(layer.decay, Tensor)
        logits = F.linear(F.linear(x, layer.gates[: layer.decay.shape[1]]), layer.decay)
        raw = logits.unflatten(-1, (config.kda.HV, -1))
        decays.append(-kda_gate(raw, layer.A_log, layer.dt_bias, lower_bound=config.kda.lower_bound).mean(0))
        h = stream
    return math.log(2) / torch.stack(decays)


def draw(losses: list[float], heldout: dict[str, float], half_life: Tensor) -> Figure:
    """The training curve beside the held-out results, and the half-lives."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)

    kilobytes = [(step + 1) * ROWS * SEGMENT / 1000 for step in range(len(losses))]
    windows = [losses[max(0, step - 10) : step + 11] for step in range(len(losses))]
    means = [sum(window) / len(window) for window in windows]
    left.plot(kilobytes, losses, color="0.8", linewidth=0.8)
    left.plot(kilobytes, means, color="black", label="training, mean of 21 steps")
    for (name, value), color in zip(heldout.items(), ("#CC79A7", "#E69F00", "#0072B2"), strict=True):
        left.axhline(value, color=color, linestyle="--", label=f"{name}, held out: {value:.2f}")
    left.set(title="Compression of Python's help text", xlabel="text read (kB)", ylabel="bits per byte")
    left.legend(frameon=False)

    layers, heads, channels = half_life.shape
    rows = half_life.sort(-1, descending=True).values.flatten(0, 1)
    image = right.imshow(rows.tolist(), norm=LogNorm(), cmap="cividis", aspect="auto")
    names = [f"layer {row // heads + 1}\nhead {row % heads + 1}" for row in range(layers * heads)]
    right.set_yticks(range(len(names)), names)
    for row in range(1, layers * heads):
        right.axhline(row - 0.5, color="white", linewidth=1 if row % heads else 5)
    right.set(title="How long the memory lasts", xlabel=f"the {channels} channels of a head, longest first")
    figure.colorbar(image, label="half-life (bytes)", format="%g")
    return figure


# The whole of it


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns its exit status."""
    parser = argparse.ArgumentParser("python -m kda_fn.demo", description="Trains and runs a KDA model.")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    parser.add_argument("--out", type=Path, default="kda_demo.png", help="the figure (default: %(default)s)")
    parser.add_argument("--context-parallel", action="store_true", help="torchrun's processes share time")
    parser.add_argument("--head-parallel", action="store_true", help="torchrun's processes share heads")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="where to save, and to go on from")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("steps", "checkpoint_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not args.out.parent.is_dir():
        parser.error(f"--out must lie in a folder that exists, got {args.out}")
    try:
        import matplotlib  # noqa: F401
        import tqdm  # noqa: F401
    except ModuleNotFoundError as missing:
        parser.error(f'{missing.name} is not installed: pip install "kda_fn[demo]"')
    config, generator = CONFIG, Generator().manual_seed(args.seed)
    try:
        mesh = join_processes(args.context_parallel, args.head_parallel, config)
    except ValueError as wrong:
        parser.error(str(wrong))

    text = torch.tensor(list(read_text()))
    training, heldout = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    first = is_first(mesh)
    if first:
        print(f"text      the help topics of Python {platform.python_version()}, {len(text):,} bytes:")
        print(f"          the first {len(training):,} to train on, the last {len(heldout):,} held out")

    start = time.perf_counter()
    saving: dict[str, Any] = {"checkpoint": args.checkpoint, "every": args.checkpoint_every}
    run = partial(train, training, args.steps, generator, config=config, mesh=mesh, **saving)
    params, losses = run() if mesh is None else together(run, args.checkpoint)
    if not first:
        return 0
    seconds = time.perf_counter() - start
    count = sum(p.numel() for p in leaves(params))
    memory = sum(x.nbytes for x in leaves(init_kimi_linear_state(config)))
    print(f"model     {config.num_layers} KDA blocks, {count:,} parameters; a state of {memory:,} bytes")
    print(f"training  {len(losses)} steps of {ROWS} x {SEGMENT} bytes in {seconds:.0f} s")

    bits = {
        "unigram": unigram_bits(training, heldout),
        "bigram": bigram_bits(training, heldout),
        "KDA": loss(params, init_kimi_linear_state(config), heldout, config=config)[0].item(),
    }
    print("held out ", ", ".join(f"{name} {value:.3f}" for name, value in bits.items()), "bits per byte")
    show_generation(params, heldout[:PROMPT], generator, config=config)

    draw(losses, bits, half_lives(params, heldout, config=config)).savefig(args.out, dpi=200)
    print(f"figure    {args.out}")
    if bits["KDA"] < min(bits["unigram"], bits["bigram"]) - MARGIN:
        return 0
    print(f"FAILED: the KDA model does not beat the unigram and bigram models by {MARGIN} bits per byte")
    return 1


if __name__ == "__main__":
    sys.exit(main())
