# %% [markdown]
# # Beams, best-of-N and trees from one prefilled state
#
# **Questions:** how are many continuations of one prompt written, when the state is a value? What does
# `vmap` cost beside a loop, and beside a batch axis of one's own?
#
# The model is small and untrained: what is shown are the loops and their times. A CPU is enough.

# %%
# In a fresh environment, on Colab too: %cd to your checkout of the library, then
#     %pip install ".[notebooks]"            on an Ascend NPU ".[ascend,notebooks]"
import time
from functools import partial

import matplotlib.pyplot as plt
import optree
import torch
from torch.func import vmap

from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    cu_seqlens_of,
    init_kimi_linear,
    init_kimi_linear_state,
    kimi_linear,
    scan,
)
from kda_fn.serving import fork, gather, scatter

# Any accelerator that torch knows, an Ascend NPU through torch_npu too, or else the CPU.
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# %% tags=["parameters"]
SMALL = False  # True: sizes for a quick check

# %%
torch.manual_seed(0)
config = KimiLinearConfig(
    vocab_size=64,
    layer_types=("kda", "kda"),
    intermediate_size=128,
    kda=KDAConfig(hidden_size=64, num_heads=2, head_dim=32),
)
params = init_kimi_linear(config, device=device)
prompt = torch.randint(64, (200,), device=device)
empty = init_kimi_linear_state(config, device=device)
state, logits = kimi_linear(params, empty, prompt, config=config)  # the one prefill of this notebook
last = logits[-1]  # [64]: what may follow the prompt


def step(state, token):
    """One token, of one sequence: state, token [] -> state, log probabilities [vocab] of the next."""
    state, logits = kimi_linear(params, state, token[None], config=config)
    return state, logits[0].log_softmax(-1)


def log_likelihood(tokens):
    """Of a whole continuation [T], from scratch: what the loops below are held against."""
    _, logits = kimi_linear(params, empty, torch.cat([prompt, tokens]), config=config)
    steps = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return steps.gather(-1, tokens[:, None]).sum()


# %% [markdown]
# ## Best of N
#
# A scan is one continuation; `vmap` over its noise is N of them. The state is unmapped (`None`): it is
# shared until the continuations part.


# %%
def continuation(state, first, noise):
    def body(carry, noise_t):
        state, log_p = carry
        token = (log_p + noise_t).argmax(-1)  # Gumbel noise: a sample
        state, next_log_p = step(state, token)
        return (state, next_log_p), (token, log_p[token[None]][0])

    _, (tokens, log_ps) = scan(body, (state, first), noise)
    return tokens, log_ps.sum()


N, length = (4, 6) if SMALL else (16, 30)
noise = -(-torch.rand(N, length, 64, device=device).clamp(min=1e-9).log()).log()
tokens, scores = vmap(continuation, in_dims=(None, None, 0))(state, last.log_softmax(-1), noise)
best = scores.argmax()
best_error = (scores[best] - log_likelihood(tokens[best])).abs().item()
print(f"best of {N}: {scores[best]:.2f} nat, mean {scores.mean():.2f}; from scratch: off by {best_error:.0e}")

# %% [markdown]
# ## Beams
#
# A beam step is: score all, keep the best, and let each survivor take its parent's state. Taking is
# indexing, for states are tensors with a beam axis.

# %%
beams = 4
log_p = last.log_softmax(-1)
score, token = log_p.topk(beams)
states = optree.tree_map(lambda x: x.expand(beams, *x.shape), state)
history = token[:, None]
for _ in range(length - 1):
    states, log_p = vmap(step)(states, token)
    score, flat = (score[:, None] + log_p).flatten().topk(beams)
    parent, token = flat // 64, flat % 64
    states = optree.tree_map(lambda x, rows=parent: x.index_select(0, rows), states)
    history = torch.cat([history[parent], token[:, None]], 1)
beam_error = (score[0] - log_likelihood(history[0])).abs().item()
print(f"best of {beams} beams: {score[0]:.2f} nat; rescored from scratch: off by {beam_error:.0e}")

# %% [markdown]
# ## A tree of drafts
#
# A draft tree is given by each node's parent. One level is one `vmap`: all its nodes take their parents'
# states. The states of ALL nodes are kept, so whatever path is accepted, its state is there: nothing is
# rolled back. (`kda_fn.serving.verify` is such a tree in one call.)

# %%
parents = [-1, -1, 0, 0, 1, 2, 2, 4]  # -1 is the prompt
drafts = torch.randint(64, (len(parents),), device=device)
depth = [0] * len(parents)
for node, parent in enumerate(parents):
    depth[node] = depth[parent] + 1 if parent >= 0 else 0

known = optree.tree_map(lambda x: x[None], state)  # row 0 is the prompt's state, row i + 1 node i's
row_of = {-1: 0}
scores_of = {}
for level in range(max(depth) + 1):
    nodes = [node for node in range(len(parents)) if depth[node] == level]
    rows = torch.tensor([row_of[parents[node]] for node in nodes], device=device)
    taken = optree.tree_map(lambda x, rows=rows: x.index_select(0, rows), known)
    reached, log_p = vmap(step)(taken, drafts[nodes])
    for i, node in enumerate(nodes):
        row_of[node] = known[0].recurrent_state.shape[0] + i
        scores_of[node] = log_p[i]
    known = optree.tree_map(lambda old, new: torch.cat([old, new]), known, reached)

path = [0, 2, 5]
_, alone = kimi_linear(params, state, drafts[path], config=config)
tree_error = (scores_of[path[-1]] - alone[-1].log_softmax(-1)).abs().max().item()
print(f"the last node of path {path} in the tree against the path alone: off by {tree_error:.0e}")

# %% [markdown]
# ## Slots and ragged batches
#
# A server keeps the states of all requests in one pool with a slot axis. And prompts of unequal length need
# no padding: they are laid end to end, and `cu_seqlens` says where each begins.

# %%
lengths = [37, 0, 5, 120]
packed = torch.randint(64, (sum(lengths),), device=device)
starts = init_kimi_linear_state(config, (len(lengths),), device=device)
ragged_states, ragged_logits = kimi_linear(
    params, starts, packed, config=config, cu_seqlens=cu_seqlens_of(lengths)
)
_, one = kimi_linear(params, empty, packed[37:42], config=config)
ragged_error = (ragged_logits[37:42] - one).abs().max().item()
print(f"the third prompt, packed, against alone: off by {ragged_error:.0e}")

pool = init_kimi_linear_state(config, (16,), device=device)
pool = scatter(pool, [3, 4, 9, 1], ragged_states)  # each request in a slot of its own
pool = fork(pool, 9, [10, 11])  # two more continuations of the third
rows = gather(pool, [9, 10, 11])
rows, log_p = vmap(step)(rows, torch.tensor([5, 6, 7], device=device))
pool = scatter(pool, [9, 10, 11], rows)
print("slots in use:", pool[0].recurrent_state.flatten(1).any(1).nonzero().flatten().tolist())

# %% [markdown]
# ## What does vmap cost?
#
# One decode step of B continuations: a loop of B calls, `vmap` over a function of one sequence, and a batch
# axis given to the library itself. The medians of repeated runs, warm.


# %%
def milliseconds(call, repeats=3 if SMALL else 15):
    def run():
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()

    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1000 * sorted(seconds)[len(seconds) // 2]


def loop(states, tokens):
    rows = [step(optree.tree_map(lambda x, i=i: x[i], states), tokens[i]) for i in range(len(tokens))]
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *rows)


def native(states, tokens):
    states, logits = kimi_linear(params, states, tokens[:, None], config=config)
    return states, logits[:, 0].log_softmax(-1)


ways = {"a loop": loop, "vmap": vmap(step), "a batch axis": native}
batches = [1, 4] if SMALL else [1, 2, 4, 8, 16, 32, 64]
times = {name: [] for name in ways}
with torch.no_grad():
    for B in batches:
        states = optree.tree_map(lambda x, B=B: x.expand(B, *x.shape).clone(), state)
        tokens = torch.randint(64, (B,), device=device)
        results = {name: way(states, tokens)[1] for name, way in ways.items()}
        for name, way in ways.items():
            torch.testing.assert_close(results[name], results["a loop"], rtol=1e-4, atol=1e-5)
            times[name].append(milliseconds(partial(way, states, tokens)))

# %%
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
styles = [("#D55E00", "o"), ("#0072B2", "s"), ("black", "^")]
for (name, values), (color, marker) in zip(times.items(), styles, strict=True):
    ax.loglog(batches, values, color=color, marker=marker, label=name)
ax.set_xticks(batches, [str(B) for B in batches])
ax.minorticks_off()
ax.set_yticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
ax.set(
    title=f"One decode step of {config.num_layers} layers, D = 64, on {device.type}",
    xlabel="continuations, B",
    ylabel="time (ms)",
)
ax.grid(alpha=0.3)
ax.legend(frameon=False)
plt.show()
