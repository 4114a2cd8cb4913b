"""The library's main job end to end, on real text: `python -m kda_fn.demo`, about two minutes on two cores.

It trains a byte-level language model of KDA blocks on the English text that every CPython ships
(`pydoc_data.topics`). All that it does with the model is one function of an explicit state, `kda_lm`:

    train      its gradient, segment by segment; the state after one segment is the state before the next
    evaluate   the whole held-out text in one call
    prefill    a prompt in one call
    decode     one byte a call, in a scan; the same logits and states as prefill
    sample     a vmap of that scan over the noise; every continuation starts from the one prefilled state

It prints held-out bits per byte beside those of a unigram and a bigram model, and draws the training curve
and how long each channel of the memory lasts. The exit status is 1 if the model does not beat the bigram.
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
    KDALMConfig,
    KDALMParams,
    KDAState,
    init_kda_lm,
    init_kda_lm_state,
    kda_gate,
    kda_lm,
    kimi_delta_attention,
    scan,
    swiglu,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = KDALMConfig(
    vocab_size=256,
    num_layers=2,
    intermediate_size=256,
    kda=KDAConfig(hidden_size=128, num_heads=2, head_dim=32, output_gate="full_rank", chunk_size=32),
)
STEPS = 500
ROWS, SEGMENT = 8, 128  # bytes of a training step
LEARNING_RATE, WARMUP, WEIGHT_DECAY, MAX_NORM = 6e-3, 30, 0.1, 1.0
PROMPT, CONTINUATION, SAMPLES, TEMPERATURE = 512, 240, 3, 0.7

State = tuple[KDAState, ...]


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
    count: int


def init_adamw(params: Any) -> AdamW:
    """The state before the first update."""
    zeros = optree.tree_map(torch.zeros_like, params)
    return AdamW(zeros, zeros, 0)


def adamw(
    state: AdamW,
    params: Any,
    grads: Any,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> tuple[AdamW, Any]:
    """One update: the new state and the new parameters."""
    count = state.count + 1
    mean = optree.tree_map(lambda m, g: torch.lerp(g, m, betas[0]), state.mean, grads)
    square = optree.tree_map(lambda s, g: torch.lerp(g * g, s, betas[1]), state.square, grads)

    def update(p: Tensor, m: Tensor, s: Tensor) -> Tensor:
        direction = m / (1 - betas[0] ** count) / ((s / (1 - betas[1] ** count)).sqrt() + eps)
        return (1 - lr * decay) * p - lr * direction

    return AdamW(mean, square, count), optree.tree_map(update, params, mean, square)


def clip_by_global_norm(grads: Any, max_norm: float) -> Any:
    """Scales all gradients together so that their norm is at most `max_norm`."""
    norm = torch.stack([g.norm() for g in optree.tree_leaves(grads)]).norm()
    return optree.tree_map(lambda g: g * (max_norm / norm).clamp(max=1), grads)


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to zero."""
    return LEARNING_RATE * min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in bits per byte."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) / math.log(2)


def loss(params: KDALMParams, state: State, tokens: Tensor, *, config: KDALMConfig) -> tuple[Tensor, State]:
    """Of every byte given those before it, and the state to go on from."""
    state, logits = kda_lm(params, state, tokens[..., :-1], config=config)
    return bits(logits, tokens[..., 1:]), state


def train(
    text: Tensor, steps: int, generator: Generator, *, config: KDALMConfig
) -> tuple[KDALMParams, list[float]]:
    """Trained parameters, and the bits per byte of each step. Control-C ends it early."""
    from tqdm import tqdm

    params = init_kda_lm(config, generator=generator)
    optimizer, state = init_adamw(params), init_kda_lm_state(config, (ROWS,))
    # The state comes out as auxiliary output, cut from the graph: backpropagation ends with the segment.
    gradient = torch.func.grad_and_value(partial(loss, config=config), has_aux=True)

    # Each row reads on from a place of its own, on the text as a ring: its state always fits what it reads.
    places = torch.arange(ROWS).unsqueeze(-1) * (len(text) // ROWS) + torch.arange(SEGMENT + 1)
    losses = []
    with tqdm(total=steps, unit="step", desc="training") as bar:
        try:
            for step in range(steps):
                tokens = text[(places + step * SEGMENT) % len(text)]
                grads, (value, state) = gradient(params, state, tokens)
                grads = clip_by_global_norm(grads, MAX_NORM)
                lr = learning_rate(step, steps)
                optimizer, params = adamw(optimizer, params, grads, lr=lr, decay=WEIGHT_DECAY)
                losses.append(value.item())
                bar.set_postfix_str(f"{sum(losses[-20:]) / len(losses[-20:]):.3f} bits per byte")
                bar.update()
        except KeyboardInterrupt:
            bar.write("interrupted: the report is of the model so far", file=sys.stdout)
    return params, losses


# Evaluation and generation


def evaluate(params: KDALMParams, text: Tensor, *, config: KDALMConfig) -> float:
    """Bits per byte of text[1:], from an empty state, in one call."""
    return loss(params, init_kda_lm_state(config), text, config=config)[0].item()


def generate(
    params: KDALMParams, state: State, logits: Tensor, noise: Tensor, *, config: KDALMConfig
) -> tuple[State, tuple[Tensor, Tensor]]:
    """Decodes one byte for each row of Gumbel noise [n 256]: the state after them, the bytes [n], and the
    logits [n 256] that follow each. `state` and `logits` [256] are those after the prompt."""

    def step(
        carry: tuple[State, Tensor], noise_t: Tensor
    ) -> tuple[tuple[State, Tensor], tuple[Tensor, Tensor]]:
        state, logits = carry
        token = (logits / TEMPERATURE + noise_t).argmax(-1)
        state, logits = kda_lm(params, state, token.unsqueeze(-1), config=config)
        return (state, logits.squeeze(-2)), (token, logits.squeeze(-2))

    (state, _), generated = scan(step, (state, logits), noise)
    return state, generated


def relative_rmse(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|"""
    return ((x - y).norm() / y.norm()).item()


def half_lives(params: KDALMParams, text: Tensor, *, config: KDALMConfig) -> Tensor:
    """How many bytes until a channel of the memory has decayed by half, [layer head channel].

    It is ln 2 over the mean of -g, of the gates that the layers see on this text."""
    h, decays = F.embedding(text, params.embedding), []
    for block, state in zip(params.blocks, init_kda_lm_state(config), strict=True):
        x = F.rms_norm(h, block.kda_norm.shape, block.kda_norm, config.kda.norm_eps)
        raw = F.linear(F.linear(x, block.kda.decay.down), block.kda.decay.up)
        raw = raw.unflatten(-1, (config.kda.HV, config.kda.K))
        g = kda_gate(raw, block.kda.A_log, block.kda.dt_bias, lower_bound=config.kda.lower_bound)
        decays.append(-g.mean(0))
        _, y = kimi_delta_attention(block.kda, state, x, config=config.kda)
        h = h + y
        x = F.rms_norm(h, block.mlp_norm.shape, block.mlp_norm, config.kda.norm_eps)
        h = h + swiglu(block.mlp, x)
    return math.log(2) / torch.stack(decays)


# The report


def draw(losses: list[float], heldout: dict[str, float], half_life: Tensor) -> Figure:
    """The training curve beside the held-out results, and the half-lives of the memory."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)

    kilobytes = [(i + 1) * ROWS * SEGMENT / 1e3 for i in range(len(losses))]
    left.plot(kilobytes, losses, color="0.75", linewidth=0.8)
    smooth = [sum(losses[max(0, i - 19) : i + 1]) / min(i + 1, 20) for i in range(len(losses))]
    left.plot(kilobytes, smooth, color="black", label="training, mean of 20 steps")
    for (name, value), color in zip(heldout.items(), ("#CC79A7", "#E69F00", "#0072B2"), strict=True):
        left.axhline(value, color=color, linestyle="--", label=f"{name}, held out: {value:.2f}")
    left.set(title="Bits per byte", xlabel="training text read (kB)", ylabel="bits per byte")
    left.set_ylim(1, 8)
    left.legend(frameon=False)

    layers, heads, channels = half_life.shape
    rows = half_life.sort(-1, descending=True).values.flatten(0, 1)
    image = right.imshow(rows.tolist(), norm=LogNorm(), cmap="cividis", aspect="auto")
    names = [f"layer {layer + 1}, head {head + 1}" for layer in range(layers) for head in range(heads)]
    right.set_yticks(range(len(names)), names)
    for row in range(1, layers * heads):
        right.axhline(row - 0.5, color="white", linewidth=4 if row % heads == 0 else 1)
    right.set(title="How long the memory lasts", xlabel=f"the {channels} channels of a head, longest first")
    figure.colorbar(image, label="half-life (bytes)")
    return figure


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kda_fn.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    parser.add_argument("--out", default="kda_demo.png", help="the figure (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


def show_generation(
    params: KDALMParams, prompt: Tensor, generator: Generator, *, config: KDALMConfig
) -> None:
    """Prefill once, decode byte by byte, check one against the other, then sample from the same state."""
    uniform = torch.rand(SAMPLES, CONTINUATION, config.vocab_size, generator=generator)
    noise = -uniform.clamp(min=1e-9).log().neg().log()

    state, logits = kda_lm(params, init_kda_lm_state(config), prompt, config=config)
    decoded_state, (tokens, decoded) = generate(params, state, logits[-1], noise[0], config=config)
    whole = torch.cat([prompt, tokens])
    whole_state, logits_of_whole = kda_lm(params, init_kda_lm_state(config), whole, config=config)
    prefilled = logits_of_whole[len(prompt) :]
    difference = (decoded - prefilled).abs().max().item()
    print(
        f"decode    {CONTINUATION} calls at T = 1 after a prefill of {PROMPT} bytes, against one prefill of all:"
    )
    print(
        f"          logits differ by at most {difference:.1e}, relative RMSE {relative_rmse(decoded, prefilled):.1e}"
    )
    for i, (x, y) in enumerate(zip(decoded_state, whole_state, strict=True), 1):
        error = relative_rmse(x.recurrent_state, y.recurrent_state)
        print(f"          state of layer {i}: relative RMSE {error:.1e}")

    sampled = torch.func.vmap(partial(generate, config=config), in_dims=(None, None, None, 0))
    _, (samples, _) = sampled(params, state, logits[-1], noise)
    print(
        f"sample    {SAMPLES} continuations by vmap from the one prefilled state, temperature {TEMPERATURE}"
    )
    print(f"          the first is the decoded one: {torch.equal(samples[0], tokens)}")
    print_text("prompt ..", prompt[-160:])
    for i, sample in enumerate(samples, 1):
        print_text(f"continuation {i}", sample)


def print_text(title: str, tokens: Tensor) -> None:
    text = bytes(tokens.tolist()).decode(errors="replace")
    print(title, textwrap.indent(text, "  | ", lambda _: True), sep="\n")


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns its exit status."""
    args = parse(argv)
    try:
        import matplotlib  # noqa: F401
        import tqdm  # noqa: F401
    except ModuleNotFoundError as missing:
        raise SystemExit(f'the demo needs {missing.name}: pip install "kda_fn[demo]"') from None
    generator, config = Generator().manual_seed(args.seed), CONFIG

    text = torch.tensor(list(read_text()))
    training, heldout = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    print(f"text      the help topics of Python {platform.python_version()}, {len(text):,} bytes")
    print(f"          the first {len(training):,} to train on, the last {len(heldout):,} held out")

    start = time.perf_counter()
    params, losses = train(training, args.steps, generator, config=config)
    seconds = time.perf_counter() - start
    count = sum(p.numel() for p in optree.tree_leaves(params))
    size = sum(s.nbytes for s in optree.tree_leaves(init_kda_lm_state(config)))
    print(f"model     {config.num_layers} KDA blocks, {count:,} parameters, a state of {size:,} bytes")
    print(f"training  {len(losses)} steps of {ROWS} x {SEGMENT} bytes in {seconds:.0f} s")

    results = {
        "unigram": unigram_bits(training, heldout),
        "bigram": bigram_bits(training, heldout),
        "KDA": evaluate(params, heldout, config=config),
    }
    print("held out  " + ", ".join(f"{name} {value:.3f}" for name, value in results.items()), "bits per byte")
    show_generation(params, heldout[:PROMPT], generator, config=config)

    draw(losses, results, half_lives(params, heldout, config=config)).savefig(args.out, dpi=200)
    print(f"figure    {args.out}")
    if results["KDA"] < min(results["unigram"], results["bigram"]):
        return 0
    print("FAILED: the KDA model does not beat the bigram model on the held-out text")
    return 1


if __name__ == "__main__":
    sys.exit(main())
