"""A serving loop, simulated: requests arrive, are prefilled in pieces, decoded, speculated, put off, resumed.

    python examples/server.py [--requests 300] [--seed 0] [--snapshot FILE]

Everything that a server remembers is data: a pool of states, and each request's tokens and slots. A step
is `plan_batch` and one call of `step_batch_`. So a request is preempted by moving its state out of the pool,
a prompt that begins as an earlier one starts from a saved state, a snapshot is `torch.save`, and a server
that died goes on from its last one.

The model is a small random one; drafts are what followed the last token when it last occurred.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    KimiLinearParams,
    MLAConfig,
    init_kimi_linear,
    init_kimi_linear_state,
    kimi_linear,
)
from kda_fn.serving import gather, plan_batch, scatter_, step_batch_

CONFIG = KimiLinearConfig(
    vocab_size=48,
    kda=KDAConfig(hidden_size=32, num_heads=2, head_dim=16),
    layer_types=("kda", "mla", "kda"),
    intermediate_size=48,
    mla=MLAConfig(hidden_size=32, num_heads=2, head_dim=16, head_v_dim=16, latent_dim=16, shared_dim=8),
)
CAPACITY = 192
"""Tokens that a request may have, for the attention's caches."""
COLUMNS = 4
"""Slots of a request: one token and three drafts."""
PIECE = 24
"""Tokens of a prompt that are taken in one step."""


@dataclass
class Request:
    number: int
    arrival: int
    prompt: list[int]
    wanted: int
    """New tokens."""
    tokens: list[int] = field(default_factory=list)
    """The prompt and what was generated."""
    computed: int = 0
    """Tokens that its state has seen."""
    slots: list[int] = field(default_factory=list)
    """None while it waits."""
    accepted: int = 1
    written: int = 1
    """Of the last step's tokens, and the states that it left in the slots' columns."""
    saved: Any = None
    """Its state, while it waits for slots again, and when it is done."""

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.wanted


@dataclass
class Server:
    """What a server remembers: all of it goes into a snapshot."""

    pool: Any
    requests: list[Request]
    rng: random.Random
    unused: list[int]
    step: int = 0
    prefixes: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """States of prompts' first pieces, by their tokens."""
    counts: Counter[str] = field(default_factory=Counter)

    def advance(self, params: KimiLinearParams) -> None:
        """One step of all that run, after letting in whom there is room for."""
        arrived = [r for r in self.requests if r.arrival <= self.step and not r.done]
        for request in arrived:
            if not request.slots and len(self.unused) >= COLUMNS:
                self._admit(request)
        running = [r for r in arrived if r.slots]
        if running and self.rng.random() < 0.1:
            self._preempt(running.pop(self.rng.randrange(len(running))))
        # In any order, and not always all: a real scheduler has its reasons.
        running = self.rng.sample(running, k=self.rng.randint(min(1, len(running)), len(running)))
        if running:
            self._run(params, running)
        self.step += 1

    def _admit(self, request: Request) -> None:
        request.slots = [self.unused.pop() for _ in range(COLUMNS)]
        prefix = tuple(request.prompt[:PIECE])
        if request.saved is not None:
            scatter_(self.pool, request.slots[:1], request.saved)
            request.saved = None
            self.counts["resumed"] += 1
        elif prefix in self.prefixes and len(request.prompt) > PIECE:
            scatter_(self.pool, request.slots[:1], self.prefixes[prefix])
            request.computed = PIECE
            self.counts["prefixes reused"] += 1

    def _preempt(self, request: Request) -> None:
        if request.computed:
            request.saved = self._state(request)
        self._release(request)
        self.counts["preempted"] += 1

    def _release(self, request: Request) -> None:
        self.unused += request.slots
        self.rng.shuffle(self.unused)
        request.slots, request.accepted, request.written = [], 1, 1

    def _state(self, request: Request) -> Any:
        return gather(self.pool, [request.slots[request.accepted - 1]])

    def _run(self, params: KimiLinearParams, running: list[Request]) -> None:
        inputs = [_next_tokens(request) for request in running]
        drafts = [
            None if request.computed < len(request.prompt) else len(tokens) - 1
            for request, tokens in zip(running, inputs, strict=True)
        ]
        plan = plan_batch(
            [len(tokens) for tokens in inputs],
            has_state=[request.computed > 0 for request in running],
            slots=torch.tensor([request.slots for request in running]),
            capacity=len(self.pool[0].conv_state),
            drafts=drafts,
            accepted=[request.accepted for request in running],
            written=[request.written for request in running],
        )
        x = torch.tensor([token for tokens in inputs for token in tokens])
        self.pool, logits = step_batch_(params, self.pool, x, plan, config=CONFIG)
        best = logits.argmax(-1).split([len(tokens) for tokens in inputs])
        for request, tokens, choices, draft in zip(running, inputs, best, drafts, strict=True):
            self._take(request, tokens, choices.tolist(), draft)

    def _take(self, request: Request, tokens: list[int], choices: list[int], draft: int | None) -> None:
        """What a request makes of the likeliest token after each of its own."""
        right = 0
        while draft is not None and right < draft and choices[right] == tokens[right + 1]:
            right += 1
        request.written = 1 if draft is None else len(tokens)
        request.accepted = 1 if draft is None else 1 + right
        request.computed += len(tokens) if draft is None else 1 + right
        self.counts["drafts accepted"] += right
        self.counts["tokens"] += len(tokens)
        if request.computed == PIECE < len(request.prompt):
            self.prefixes[tuple(request.prompt[:PIECE])] = self._state(request)
        if request.computed < len(request.prompt):
            return
        request.tokens += choices[-1:] if draft is None else choices[: right + 1]
        if request.done:
            request.saved = self._state(request)
            self._release(request)
            self.counts["finished"] += 1


def _next_tokens(request: Request) -> list[int]:
    """A piece of the prompt; then the last token, and up to three that followed it before."""
    if request.computed < len(request.prompt):
        return request.prompt[request.computed : request.computed + PIECE]
    tokens = request.tokens
    last = tokens[request.computed]
    before = [i for i in range(request.computed) if tokens[i] == last]
    # The last token that is wanted needs no state after it.
    room = len(request.prompt) + request.wanted - len(tokens)
    return [last, *(tokens[before[-1] + 1 : before[-1] + min(COLUMNS, room)] if before else [])]


def make_server(count: int, seed: int, slots: int = 40) -> Server:
    """Requests of a few families of prompts, that arrive over time; a pool with room for some of them."""
    rng = random.Random(seed)
    families = [[rng.randrange(CONFIG.vocab_size) for _ in range(60)] for _ in range(6)]
    requests = []
    for number in range(count):
        prompt = rng.choice(families)[: rng.randint(1, 60)] + [
            rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, 30))
        ]
        requests.append(Request(number, rng.randint(0, count), prompt, rng.randint(1, 24), list(prompt)))
    pool = init_kimi_linear_state(CONFIG, (slots,), capacity=CAPACITY)
    return Server(pool, requests, rng, list(range(slots)))


def make_params(seed: int) -> KimiLinearParams:
    return init_kimi_linear(CONFIG, generator=torch.Generator().manual_seed(seed))


def save(server: Server, path: Path) -> None:
    """A snapshot, whole or not at all."""
    part = path.with_suffix(".part")
    torch.save(vars(server), part)
    os.replace(part, path)


def load(path: Path) -> Server:
    """The server of a snapshot. It holds this module's own classes: read none that you did not write."""
    return Server(**torch.load(path, weights_only=False))


def alone(params: KimiLinearParams, request: Request) -> tuple[list[int], Any]:
    """The same request by itself: its tokens, and the state after all of them but the last."""
    state = init_kimi_linear_state(CONFIG, capacity=CAPACITY)
    tokens = torch.tensor(request.prompt)
    generated: list[int] = []
    while True:
        state, logits = kimi_linear(params, state, tokens, config=CONFIG)
        generated.append(int(logits[-1].argmax()))
        if len(generated) == request.wanted:
            return request.prompt + generated, state
        tokens = torch.tensor(generated[-1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--snapshot", type=Path, help="written every 50 steps, and gone on from if it is there"
    )
    options = parser.parse_args()
    params = make_params(options.seed)
    path: Path | None = options.snapshot
    server = load(path) if path and path.exists() else make_server(options.requests, options.seed)
    with torch.no_grad():
        while not all(request.done for request in server.requests):
            server.advance(params)
            if path and server.step % 50 == 0:
                save(server, path)
    print(f"{server.step} steps: " + ", ".join(f"{n} {what}" for what, n in sorted(server.counts.items())))


if __name__ == "__main__":
    main()
