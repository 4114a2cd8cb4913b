"""What batching requests is worth: drafts verified in one call beside one step each, a batch beside its rows.

    python benchmarks/serving.py [--hidden 512] [--heads 8] [--head-dim 64] [--rounds 20]

A KDA layer in float32 on the CPU; milliseconds, medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import Any

import torch
from measuring import Job, interleave, round_ratio, table

from kda_fn import KDAConfig, init_kimi_delta_attention, init_state, kimi_delta_attention
from kda_fn.serving import plan_batch, scatter_, step_batch_, verify

TREE = (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
"""Fifteen drafts: every token has two after it."""
BATCHES = 8, 64


def jobs(config: KDAConfig) -> dict[str, tuple[Job, Job]]:
    """By what is compared: in one call, and one by one."""
    params, state = init_kimi_delta_attention(config), init_state(config)
    layer: Any = partial(kimi_delta_attention, params, config=config)
    x = torch.randn(len(TREE), config.D)

    def one_by_one(parents: tuple[int, ...]) -> None:
        states = [state]
        for t, parent in enumerate(parents):
            states.append(layer(states[parent + 1], x[t : t + 1])[0])

    chain = tuple(range(-1, len(TREE) - 1))
    found: dict[str, tuple[Job, Job]] = {
        f"a {name} of {len(TREE)} drafts": (
            partial(verify, params, state, x, config=config, parents=parents),
            partial(one_by_one, parents),
        )
        for name, parents in (("tree", TREE), ("chain", chain))
    }
    for B in BATCHES:
        pool, rows = init_state(config, (B,)), torch.randn(B, config.D)
        plan = plan_batch([1] * B, has_state=[True] * B, slots=list(range(B)), capacity=B)

        def alone(B: int = B, pool: Any = pool, rows: torch.Tensor = rows) -> None:
            for b in range(B):
                after, _ = layer(type(pool)(*(leaf[b] for leaf in pool)), rows[b : b + 1])
                scatter_(pool, [b], type(pool)(*(leaf.unsqueeze(0) for leaf in after)))

        step = partial(step_batch_, params, pool, rows, plan, config=config)
        found[f"{B} decodes"] = step, alone
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("hidden", 512), ("heads", 8), ("head-dim", 64), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = KDAConfig(hidden_size=options.hidden, num_heads=options.heads, head_dim=options.head_dim)
    rows = []
    with torch.no_grad():
        for name, (together, alone) in jobs(config).items():
            samples = interleave({"one call": together, "one by one": alone}, options.rounds)
            times = (f"{1e3 * median(samples[job]):.2f}" for job in samples)
            rows.append((name, *times, f"{round_ratio(samples, 'one by one', 'one call'):.1f}x"))
    print(table(("KDA layer", "one call, ms", "one by one, ms", "times"), rows))


if __name__ == "__main__":
    main()
