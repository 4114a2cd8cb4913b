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
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import textwrap
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from kda_fn import (
    KDAConfig,
    KDAParams,
    KDAState,
    KimiLinearConfig,
    KimiLinearParams,
    init_kimi_linear,
    init_kimi_linear_state,
    kda_gate,
    kimi_linear,
    scan,
)
from kda_fn.layers.kimi_linear import KimiLinearState, kimi_linear_blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def clip_by_global_norm(grads: Any, max_norm: float) -> Any:
    """Scales all gradients together so that their norm is at most `max_norm`."""
    norm = torch.stack([g.norm() for g in leaves(grads)]).norm()
    return optree.tree_map(lambda g: g * (max_norm / norm).clamp(max=1), grads)


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to zero."""
    return LEARNING_RATE * min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


def loss(
    params: KimiLinearParams, state: KimiLinearState, text: Tensor, *, config: KimiLinearConfig
) -> tuple[Tensor, KimiLinearState]:
    """Mean bits per byte of text[.., 1:], each byte given all before it; and the state to go on from."""
    state, logits = kimi_linear(params, state, text[..., :-1], config=config)
    return F.cross_entropy(logits.flatten(0, -2), text[..., 1:].flatten()) / math.log(2), state


def train(
    text: Tensor, steps: int, generator: Generator, *, config: KimiLinearConfig
) -> tuple[KimiLinearParams, list[float]]:
    """Trained parameters, and the bits per byte of each step. Control-C ends it early."""
    from tqdm import tqdm

    params = init_kimi_linear(config, generator=generator)
    optimizer, state = init_adamw(params), init_kimi_linear_state(config, (ROWS,))
    # The state comes out as auxiliary output, cut from the graph: backpropagation ends with the segment.
    gradient = torch.func.grad_and_value(partial(loss, config=config), has_aux=True)

    # Each row reads on from a place of its own, and from the end of the text to its start, as on a ring:
    # but for that one seam its state is of the text just before the segment.
    places = torch.arange(ROWS).unsqueeze(-1) * (len(text) // ROWS) + torch.arange(SEGMENT + 1)
    losses = []
    with tqdm(total=steps, unit="step", desc="training") as bar:
        try:
            for step in range(steps):
                grads, (value, state) = gradient(params, state, text[(places + step * SEGMENT) % len(text)])
                grads = clip_by_global_norm(grads, MAX_NORM)
                lr = learning_rate(step, steps)
                optimizer, params = adamw(optimizer, params, grads, lr=lr, decay=WEIGHT_DECAY)
                losses.append(value.item())
                recent = losses[-20:]
                bar.set_postfix_str(f"{sum(recent) / len(recent):.3f} bits per byte", refresh=False)
                bar.update()
        except KeyboardInterrupt:
            bar.write("interrupted: the report is of the model so far")
    return params, losses


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
    parser.add_argument("--out", default="kda_demo.png", help="the figure (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    try:
        import matplotlib  # noqa: F401
        import tqdm  # noqa: F401
    except ModuleNotFoundError as missing:
        parser.error(f'{missing.name} is not installed: pip install "kda_fn[demo]"')
    config, generator = CONFIG, Generator().manual_seed(args.seed)

    text = torch.tensor(list(read_text()))
    training, heldout = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    print(f"text      the help topics of Python {platform.python_version()}, {len(text):,} bytes:")
    print(f"          the first {len(training):,} to train on, the last {len(heldout):,} held out")

    start = time.perf_counter()
    params, losses = train(training, args.steps, generator, config=config)
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
