"""Batches of requests, as plain data and pure functions.

    plan = plan_batch(lengths, has_state=.., slots=.., capacity=..)     what each row is, and where its state
    pool, y = step_batch(params, pool, x, plan, config=config)          prefills, decodes, drafts: one call
    states, y = verify(params, state, x, config=config, parents=tree)   the state after every draft

`examples/server.py` is a whole serving loop.
"""

from kda_fn.serving.plan import (
    BatchPlan,
    chunk_indices,
    chunk_offsets,
    idle_plan,
    plan_batch,
    update_plan_,
    why_idle,
)
from kda_fn.serving.pool import fork, free, gather, scatter, scatter_
from kda_fn.serving.speculate import accept, accepted_lengths, verify
from kda_fn.serving.step import step_batch, step_batch_

__all__ = [
    "BatchPlan",
    "accept",
    "accepted_lengths",
    "chunk_indices",
    "chunk_offsets",
    "fork",
    "free",
    "gather",
    "idle_plan",
    "plan_batch",
    "scatter",
    "scatter_",
    "step_batch",
    "step_batch_",
    "update_plan_",
    "verify",
    "why_idle",
]
