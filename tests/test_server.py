"""examples/server.py as a soak test: hundreds of requests through one pool, each as if it had been alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import optree
import pytest
import scripts
import torch
from laws import error
from torch import Tensor

from kda_fn import KimiLinearParams, MLAState

server = scripts.load(Path(__file__).parents[1] / "examples" / "server.py")

_map: Any = optree.tree_map
_leaves: Any = optree.tree_leaves

pytestmark = pytest.mark.usefixtures("one_thread")


def _finish(running: Any, params: KimiLinearParams, until: int = 10**6) -> Any:
    with torch.no_grad():
        while not all(request.done for request in running.requests) and running.step < until:
            running.advance(params)
    return running


def _visible(state: Any) -> Tensor:
    """A state as one vector, without what lies in a cache beyond its length."""
    leaves = []
    for layer in state:
        if isinstance(layer, MLAState):
            kept = torch.arange(layer.latent.shape[-2]).unsqueeze(-1) < layer.length.unsqueeze(-1)
            layer = layer._replace(latent=layer.latent.where(kept, 0.0), shared=layer.shared.where(kept, 0.0))
        leaves += [leaf.double().flatten() for leaf in layer]
    return torch.cat(leaves)


def test_every_request_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens identical, final states within 1e-6, over slots that hold NaN when they are given."""
    release = server.Server._release

    def poison(self: Any, request: Any) -> None:
        for leaf in _leaves(self.pool):
            leaf[request.slots] = torch.nan if leaf.is_floating_point() else 7
        release(self, request)

    monkeypatch.setattr(server.Server, "_release", poison)
    params = server.make_params(0)
    done = _finish(server.make_server(300, 0), params)
    assert done.counts["finished"] == 300
    for what in ("preempted", "resumed", "prefixes reused", "drafts accepted"):
        assert done.counts[what] >= 20, what
    with torch.no_grad():
        for request in done.requests:
            tokens, state = server.alone(params, request)
            assert request.tokens == tokens, request.number
            mine = _map(lambda leaf: leaf[0], request.saved)
            assert error(_visible(mine), _visible(state)) <= 1e-6, request.number


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_when_it_dies(seed: int, tmp_path: Path) -> None:
    """Killed at any step, and gone on from the last snapshot: the tokens of a server that never died."""
    params, path = server.make_params(seed), tmp_path / "snapshot"
    expected = _finish(server.make_server(60, seed), params)
    dying = server.make_server(60, seed)
    server.save(dying, path)
    death = random.Random(seed).randint(20, expected.step - 5)
    while dying.step < death:
        dying = _finish(dying, params, until=dying.step + 7)
        server.save(dying, path)
    _finish(dying, params, until=death + 3)
    risen = _finish(server.load(path), params)
    assert [request.tokens for request in risen.requests] == [request.tokens for request in expected.requests]
    assert risen.counts == expected.counts
