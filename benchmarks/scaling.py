"""What context and head parallelism should cost, on paper: writes docs/scaling.md.

    python benchmarks/scaling.py [--out FILE.md]

The pieces are measured (results/gpu.json), counted (the messages, as by tests/test_distributed.py) or taken
from specifications, and the document says which is which.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from measuring import table

from kda_fn import KDAConfig

ROOT = Path(__file__).parents[1]
LAYERS = {
    "Kimi-Linear-48B": KDAConfig(hidden_size=2304, num_heads=32, head_dim=128),
    "Kimi K3": KDAConfig(
        hidden_size=7168, num_heads=96, head_dim=128, lower_bound=-5.0, output_gate="full_rank"
    ),
}
LAYER = LAYERS["Kimi-Linear-48B"]
MILLION = 2**20
RANKS = 1, 2, 4, 8, 16, 32, 64
NODE = 8
BETWEEN_BYTES = 1_539 + 768
"""Per token and head in bf16 of convolution and output norm, the launches of docs/ascend.md."""
ASCEND_KDA_BYTES = 3_378
"""Per token and head in bf16 of KDA forward, the launches of docs/ascend.md."""
ADDED_BYTES = 3 * 256
"""Per token and head in bf16 of what the state adds to the outputs: two tensors read and one written."""


class Machine(NamedTuple):
    """Times of one rank's work in seconds, and its links one way in bytes a second."""

    name: str
    kda: tuple[float, float]
    """Of LAYER's KDA forward: a call, and each token."""
    matmul: float
    memory: float
    inside: float
    """To the other ranks of a node: to all of them together, or to each where `mesh`."""
    mesh: bool
    outside: float
    """To other nodes, for each rank."""
    latency: float = 20e-6
    """Of a collective."""


def measured_kda(mode: str, sample: str) -> tuple[float, float]:
    """Seconds of a call and of a token: the line through T 8192 and 32768, H 32, the softplus gate."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["cases"]
    wanted = {"mode": mode, "B": 1, "H": 32, "gate": "softplus", "regime": "init"}
    seconds = {
        case["T"]: case["contenders"]["kda_fn"][sample]["ms"] / 1000
        for case in cases
        if wanted.items() <= case.items()
    }
    slope = (seconds[32768] - seconds[8192]) / (32768 - 8192)
    return seconds[8192] - 8192 * slope, slope


def machines() -> tuple[Machine, Machine]:
    """The H200 as measured, and a 910B3 by its specification."""
    ceilings = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["ceilings"]
    memory, matmul = ceilings["copy_bytes_per_s"], ceilings["matmul_flop_per_s"]
    h200 = Machine("H200", measured_kda("forward", "graph"), matmul, memory, 450e9, False, 50e9)
    token = ASCEND_KDA_BYTES * LAYER.H / 1.6e12
    return h200, Machine("910B3", (0.0, token), 313e12, 1.6e12, 28e9, True, 25e9)


# What is sent


def map_bytes(config: KDAConfig, heads: int = 1) -> int:
    """Of one rank's map, in float32, with so many ranks for the heads."""
    return config.HV * config.K * (config.K + config.V) * 4 // heads


def window_bytes(config: KDAConfig, heads: int = 1) -> int:
    """Of one rank's last inputs of the convolution, in bf16."""
    return (config.W - 1) * config.P * 2 // heads


def sum_bytes(config: KDAConfig, tokens: int) -> int:
    """Of y in bf16, which head parallelism sums."""
    return tokens * config.D * 2


def gather_seconds(machine: Machine, size: int, ranks: int, *, across: bool) -> float:
    """Every rank has every other's message of that size; `across` nodes or inside of one."""
    if ranks == 1:
        return 0.0
    if across:
        return machine.latency + (ranks - 1) * size / machine.outside
    return machine.latency + (1 if machine.mesh else ranks - 1) * size / machine.inside


def sum_seconds(machine: Machine, size: int, ranks: int) -> float:
    """A reduce-scatter and a gather of pieces, inside a node."""
    return 2 * gather_seconds(machine, size // ranks, ranks, across=False)


# What is computed


def flop_per_token(config: KDAConfig) -> float:
    """Of the layer's projections."""
    D, HV, K, V, P = config.D, config.HV, config.K, config.V, config.P
    return 2 * (P * D + (K + HV + V) * D + HV * K * K + HV * V * V + D * HV * V)


def token_seconds(machine: Machine, *, cut: bool) -> float:
    """Of one token in a layer, forward; where time is cut KDA runs once more, for the map."""
    config = LAYER
    flop, touched = flop_per_token(config), BETWEEN_BYTES
    if cut:
        flop += 2 * config.HV * config.K * config.V
        touched += ADDED_BYTES
    return flop / machine.matmul + touched * config.HV / machine.memory + machine.kda[1] * (1 + cut)


def sent_seconds(machine: Machine, context: int, heads: int, tokens: int) -> float:
    """What a layer waits for on its links, forward: maps and windows, and the sum over heads."""
    across = context * heads > NODE
    message = map_bytes(LAYER, heads), window_bytes(LAYER, heads)
    seconds = sum(gather_seconds(machine, size, context, across=across) for size in message)
    return seconds + (sum_seconds(machine, sum_bytes(LAYER, tokens), heads) if heads > 1 else 0.0)


def layer_seconds(machine: Machine, context: int, heads: int, T: int) -> float:
    """One layer forward over T tokens, on context x heads ranks."""
    tokens, cut = T // context, context > 1
    calls = machine.kda[0] * (1 + cut)
    computed = calls + tokens * token_seconds(machine, cut=cut) / heads
    return computed + sent_seconds(machine, context, heads, tokens)


def break_even(machine: Machine, ranks: int) -> float:
    """From which T on context parallelism is faster than one rank; infinite if it never is."""
    saved = token_seconds(machine, cut=False) - token_seconds(machine, cut=True) / ranks
    return (machine.kda[0] + sent_seconds(machine, ranks, 1, 0)) / saved if saved > 0 else float("inf")


# The document


def of_messages() -> Iterator[list[str]]:
    for name, config in LAYERS.items():
        whole = map_bytes(config), window_bytes(config), map_bytes(config, NODE)
        tokens = sum_bytes(config, 16384), 16384 * config.P * 2
        yield [name, *(f"{size / 1e6:,.2f}" for size in (*whole, *tokens))]


def of_ranks(machine: Machine, T: int) -> Iterator[list[str]]:
    one = layer_seconds(machine, 1, 1, T)
    for ranks in RANKS:
        flat = layer_seconds(machine, ranks, 1, T)
        heads = min(ranks, NODE)
        both = layer_seconds(machine, ranks // heads, heads, T)
        sent_flat = sent_seconds(machine, ranks, 1, T // ranks)
        sent_both = sent_seconds(machine, ranks // heads, heads, T * heads // ranks)
        halves = ([flat, sent_flat, one / flat / 1e3], [both, sent_both, one / both / 1e3])
        yield [f"{ranks}", *(f"{x * 1e3:,.2f}" for half in halves for x in half)]


def training(h200: Machine) -> Machine:
    """A step forward and backward: KDA as measured, all else three times forward, messages twice."""
    return h200._replace(
        name="H200, training",
        kda=measured_kda("backward", "eager"),
        matmul=h200.matmul / 3,
        memory=h200.memory / 3,
        inside=h200.inside / 2,
        outside=h200.outside / 2,
        latency=h200.latency * 2,
    )


def of_break_even() -> Iterator[list[str]]:
    h200, ascend = machines()
    for machine in (h200, training(h200), ascend):
        yield [machine.name, *(f"{break_even(machine, ranks):,.0f}" for ranks in RANKS[1:])]


def document() -> str:
    """docs/scaling.md."""
    h200, ascend = machines()
    columns = "ranks|context, ms|of it sent|speed-up|heads, then context, ms|of it sent|speed-up".split("|")
    kda = h200.kda[1] * 1e6
    specified = (
        f"H200 {h200.inside / 1e9:.0f} GB/s of NVLink, {h200.outside / 1e9:.0f} GB/s of network a device; "
        f"910B3-class {ascend.inside / 1e9:.0f} GB/s\n"
        f"  to each other of a node, {ascend.outside / 1e9:.0f} GB/s "
        f"of network, {ascend.memory / 1e12:.1f} TB/s of memory, {ascend.matmul / 1e12:.0f} TFLOP/s"
    )
    added, network = f"{training(h200).kda[0] * 1e3:.1f}", f"{waiting(h200, 64, 1):.0%}"
    rest = token_seconds(h200, cut=False) * 1e6 - kda
    return f"""# Past one device, on paper

Written by `python benchmarks/scaling.py`; `tests/test_scaling.py` compares it to what that computes. **No run
over several devices is behind it.** What it is made of:

- *counted*: the messages. `tests/test_distributed.py` counts the same on one to four processes.
- *measured* on one H200 (`benchmarks/results/gpu.json`): KDA at T 8192 and 32768, forward {kda:.3f} µs a
  token at 32 heads; the rates of matmul and copy, which give {rest:.3f} µs for what is around it.
- *computed*: a slice runs KDA twice, for its outputs and for its map, and a product adds the state's part.
- *specified*, one way: {specified}.
  Its kernels' bytes (docs/ascend.md) and matmuls are timed at these. Nothing has run there: a floor.
- *seen* on two CPU cores, a process of one thread on each: a layer of D 1024, 8 heads of 128, over 16,384
  tokens in float32 takes 3.4 s in one process and 2.2 s in two that share time.
- *assumed*: {h200.latency * 1e6:.0f} µs for a collective, nothing overlapped, nodes of {NODE}.

## What is sent

MB for each layer and rank, forward; backward sends as much again. Map and window do not grow with tokens.
Beside them what does, for 16,384 tokens: y, which head parallelism sums, and q, k and v.

{table(["", "map", "window", "map, heads on 8", "y", "q, k, v"], of_messages())}
## A million tokens

One layer of Kimi-Linear-48B, forward, over 2^20 tokens. "Heads, then context": the ranks of a node have
heads of their own, nodes share time. On H200:

{table(columns, of_ranks(h200, MILLION))}
On 910B3-class devices:

{table(columns, of_ranks(ascend, MILLION))}
Two things hold context parallelism back. The map is a second run of KDA. And every rank has every map, so
that what it receives grows with the ranks: on 64 of H200 {network} of the time is the network's. Heads need
no map, and divide it by {NODE}; but their sum of y grows with the tokens. So up to four ranks of H200 are
best given heads, and eight context; inside a node of 910B3-class devices, with its links, context is always
the faster; and 64 ranks of either are best given both.

## Where context parallelism starts to pay

The T from which so many ranks are faster than one:

{table(["ranks", *map(str, RANKS[1:])], of_break_even())}
Below 8192 tokens a rank the measured line is drawn on. Forward is in a CUDA graph, training is not: {added}
ms of each call there are the host's, and all but KDA is taken as three times its forward. Memory is the other
reason to cut time, and needs no break-even: a rank holds its own tokens' activations alone.
"""


def waiting(machine: Machine, context: int, heads: int) -> float:
    """The share of a layer's time at a million tokens that is spent on the links."""
    tokens = MILLION // context
    return sent_seconds(machine, context, heads, tokens) / layer_seconds(machine, context, heads, MILLION)


def main() -> None:
    """Writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "scaling.md", help="where it goes")
    parser.parse_args().out.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
