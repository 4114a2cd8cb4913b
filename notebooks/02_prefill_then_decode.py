# %% [markdown]
# # Prefill, then decode: the state is a value
#
# **Questions:** is decoding really the same function as prefilling? What can be done with a state that is
# an ordinary value? And how long does a head remember?
#
# A KDA layer is `state, y = layer(state, x)`. Small sizes, a CPU is enough.

# %%
# In a fresh environment, on Colab too: %cd to your checkout of the library, then
#     %pip install ".[notebooks]"            on an Ascend NPU ".[ascend,notebooks]"
import math
from functools import partial

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from torch.func import grad, jvp, vmap

from kda_fn import (
    KDAConfig,
    KDAState,
    init_kimi_delta_attention,
    init_kimi_linear,
    init_state,
    kda,
    kimi_delta_attention,
    scan,
)
from kda_fn.demo import CONFIG, half_lives, read_text, train

# Any accelerator that torch knows, an Ascend NPU through torch_npu too, or else the CPU.
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# %% tags=["parameters"]
SMALL = False  # True: sizes for a quick check

# %% [markdown]
# ## Prefill, decode, resume

# %%
torch.manual_seed(0)
config = KDAConfig(hidden_size=64, num_heads=2, head_dim=32)
params = init_kimi_delta_attention(config, device=device)
layer = partial(kimi_delta_attention, params, config=config)  # layer(state, x) -> (state, y)
empty = init_state(config, device=device)
prompt, more = torch.randn(100, 64, device=device), torch.randn(300, 64, device=device)


def difference(a, b):
    """Relative RMSE."""
    return ((a - b).norm() / b.norm()).item()


prefilled, _ = layer(empty, prompt)
decoded, ys = scan(layer, prefilled, more[:, None])  # one token a call
whole, y_whole = layer(empty, torch.cat([prompt, more]))
resumed = empty
for piece in torch.cat([prompt, more]).split([7, 64, 0, 129, 200]):  # any pieces, an empty one too
    resumed, _ = layer(resumed, piece)
decode_error = difference(ys[:, 0], y_whole[100:])
resume_error = difference(resumed.recurrent_state, whole.recurrent_state)
print(f"300 decode steps against one call: {decode_error:.1e}")
print(f"state after five pieces against one call: {resume_error:.1e}")
print("the state:", {name: tuple(x.shape) for name, x in prefilled._asdict().items()})

# %% [markdown]
# ## Fork and edit
#
# Nothing is ever written into a state, so a fork is a second use of the variable. `vmap` leaves the state
# unmapped: eight continuations of one prefill. And a state can be edited like any tensor: here one head is
# made to forget all, and how much of the output that changes is read off.

# %%
branches = torch.randn(8, 20, 64, device=device)
branch_states, branch_ys = vmap(layer, in_dims=(None, 0))(prefilled, branches)
fork_error = difference(branch_ys[3], layer(prefilled, branches[3])[1])
print(f"fork 3 by vmap against a call of its own: {fork_error:.1e}")

keep = torch.tensor([0.0, 1.0], device=device)[:, None, None]
edited = prefilled._replace(recurrent_state=prefilled.recurrent_state * keep)
_, y_edited = layer(edited, more)
edit_effect = (y_edited - y_whole[100:]).norm(dim=-1) / y_whole[100:].norm(dim=-1)
print(f"without head 0 the next output is off by {edit_effect[0]:.0%}, the 300th by {edit_effect[-1]:.0e}")

# %% [markdown]
# ## Differentiate
#
# The state is an argument and a result like any other, so every transform of `torch.func` goes through it.
# A forward derivative asks of a small nudge of the memory what the edit above asked of a large one;
# parameters have gradients, of the batch or of each sample.

# %%
nudge = KDAState(torch.zeros_like(prefilled.conv_state), torch.randn_like(prefilled.recurrent_state))
_, (_, dy) = jvp(lambda state: layer(state, more), (prefilled,), (nudge,))
print(f"after 1, 30 and 300 tokens a nudge is worth {[f'{dy[i].norm():.2g}' for i in (0, 29, 299)]}")


def loss(params, x):
    _, y = kimi_delta_attention(params, empty, x, config=config)
    return y.square().mean()


slopes = vmap(grad(loss), in_dims=(None, 0))(params, branches)  # a KDAParams, each leaf with a sample axis
print("per-sample gradients of A_log:", tuple(slopes.A_log.shape))

# %% [markdown]
# ## How long does a channel last?
#
# A channel with log decay $g$ halves in $\ln 2 / (-g)$ tokens. KDA has one for each channel of each head,
# computed from the token. Below is the demo's byte model before and after a short training on Python's help
# text.

# %%
text = torch.tensor(list(read_text()))
steps = 2 if SMALL else 60
before = init_kimi_linear(CONFIG, generator=torch.Generator().manual_seed(0))
after, losses = train(text, steps, torch.Generator().manual_seed(0), config=CONFIG)
half_life = {
    f"{n} steps": half_lives(p, text[:2000], config=CONFIG) for n, p in ((0, before), (steps, after))
}

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
every = torch.cat([x.flatten() for x in half_life.values()])
norm = LogNorm(every.min().item(), every.max().item())
for ax, (name, x) in zip(axes, half_life.items(), strict=True):
    rows = x.sort(-1, descending=True).values.flatten(0, 1)
    image = ax.imshow(rows.tolist(), norm=norm, cmap="cividis", aspect="auto")
    ax.set(title=f"after {name} of training", xlabel="channel of the head, longest first")
layers, heads, _ = x.shape
axes[0].set_yticks(
    range(layers * heads), [f"layer {n // heads + 1}, head {n % heads + 1}" for n in range(layers * heads)]
)
fig.colorbar(image, ax=axes, label="half-life (bytes)", format="%g")
plt.show()

# %% [markdown]
# ## What can still be retrieved?
#
# No training here, only the memory: random pairs of key and value are written one after the other with
# $\beta = 1$, then each key is asked for again. A value is recalled if, of all values written, its own has
# the largest inner product with what comes back. The memory has $K = 32$ channels, all of one half-life.
# Without decay it recalls half of the pairs that about $K$ others have followed: keys are not orthogonal,
# and each write corrects what is there. In this task, where every pair is asked for, decay can only shorten
# that.

# %%
K, V, pairs, trials = 32, 64, 128, (8 if SMALL else 100)
generator = torch.Generator().manual_seed(1)
keys = torch.nn.functional.normalize(torch.randn(trials, pairs, 1, K, generator=generator), dim=-1)
values = torch.nn.functional.normalize(torch.randn(trials, pairs, 1, V, generator=generator), dim=-1)
ones = torch.ones(trials, pairs, 1)
recall = {}
for life in (4, 16, 64, math.inf):
    g = torch.full_like(keys, -math.log(2) / life)
    S, _ = kda(torch.zeros(trials, 1, K, V), keys, keys, values, g, ones)
    recalled = torch.einsum("bhkv,bthk->btv", S, keys)
    nearest = torch.einsum("btv,bshv->bts", recalled, values).argmax(-1)
    recall[life] = (nearest == torch.arange(pairs)).float().mean(0).flip(0)  # by distance, nearest first

# %%
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
styles = [("#D55E00", ":"), ("#E69F00", "-."), ("#009E73", "--"), ("#0072B2", "-")]
distance = range(pairs)
window = 5
for (life, hits), (color, line) in zip(recall.items(), styles, strict=True):
    padded = torch.nn.functional.pad(hits[None, None], (window // 2, window // 2), mode="replicate")
    smooth = torch.nn.functional.avg_pool1d(padded, window, 1)[0, 0]
    name = "no decay" if life == math.inf else f"half-life {life}"
    ax.plot(distance, smooth, color=color, linestyle=line, label=name)
ax.axhline(1 / pairs, color="0.6", linewidth=0.8)
ax.text(pairs - 1, 1 / pairs + 0.02, "chance", color="0.35", ha="right")
ax.axvline(K, color="0.6", linewidth=0.8)
ax.text(K + 1, 1.0, f"K = {K}", color="0.35", va="top")
ax.set(
    title=f"Associative recall from one memory of {K} channels",
    xlabel="distance (pairs written since)",
    ylabel="recalled (share of trials)",
    ylim=(0, 1.05),
)
ax.legend(frameon=False, loc="upper right")
plt.show()
