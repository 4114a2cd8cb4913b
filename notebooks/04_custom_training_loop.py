# %% [markdown]
# # A training loop of your own
#
# **Questions:** what does training look like when model, optimiser and memory are all values? Does a state
# that is carried from segment to segment help? How noisy is a gradient? And what can this memory learn,
# beside a simpler gate and attention?
#
# Everything is trained here, on a CPU within two minutes.

# %%
# In a fresh environment, on Colab too: %cd to your checkout of the library, then
#     %pip install ".[notebooks]"            on an Ascend NPU ".[ascend,notebooks]"
import math
from functools import partial
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import optree
import torch
import torch.nn.functional as F
from torch.func import grad, grad_and_value, vmap

from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    causal_conv1d,
    gated_rms_norm,
    init_kimi_linear,
    init_kimi_linear_state,
    kda,
    kda_gate,
    kimi_linear,
    l2_norm,
    linear,
)

# Any accelerator that torch knows, an Ascend NPU through torch_npu too, or else the CPU.
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# %% tags=["parameters"]
SMALL = False  # True: sizes for a quick check

# %% [markdown]
# ## An optimiser is a function
#
# Adam of any pytree: state, parameters and gradients in, state and parameters out. Nothing is registered,
# nothing is written to, and so it maps over models as everything else does.


# %%
def init_adam(params):
    zeros = optree.tree_map(torch.zeros_like, params)
    return zeros, zeros


def adam(state, params, grads, step, lr, b1=0.9, b2=0.95):
    mean = optree.tree_map(lambda m, g: b1 * m + (1 - b1) * g, state[0], grads)
    square = optree.tree_map(lambda s, g: b2 * s + (1 - b2) * g * g, state[1], grads)
    m_scale, s_scale = 1 / (1 - b1 ** (step + 1)), 1 / (1 - b2 ** (step + 1))
    params = optree.tree_map(
        lambda p, m, s: p - lr * m * m_scale / ((s * s_scale).sqrt() + 1e-8), params, mean, square
    )
    return (mean, square), params


def clipped(grads):
    """At most of norm 1."""
    norm = torch.stack([g.norm() for g in optree.tree_leaves(grads)]).norm()
    return optree.tree_map(lambda g: g / norm.clamp(min=1), grads)


def rate(step, steps, peak):
    """A warm-up, then half a cosine."""
    return peak * min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / steps)) / 2


# %% [markdown]
# ## Real text, and a state that is carried
#
# Each of 8 rows reads on from a place of its own in the text of Python's help, a short segment a step.
# Backpropagation ends with the segment (it is *truncated*): the state comes out of the loss as auxiliary
# output, which no derivative reaches, and goes into the next. A model that starts every segment from zeros
# sees 32 bytes at most; the carried one has seen everything.

# %%
text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
text, held_out = torch.tensor(list(text), device=device).tensor_split([-20_000])
rows, segment, steps = (4, 8, 40) if SMALL else (8, 32, 200)
config = KimiLinearConfig(
    vocab_size=256,
    layer_types=("kda",),
    intermediate_size=128,
    tie_embeddings=True,
    kda=KDAConfig(hidden_size=64, num_heads=2, head_dim=32, chunk_size=32),
)


def untrained_model():
    params = init_kimi_linear(config, generator=torch.Generator().manual_seed(0))
    return optree.tree_map(lambda x: x.to(device), params)


def bits(params, state, text):
    """Bits per byte of text[1:], each given all before it, and the state after them."""
    state, logits = kimi_linear(params, state, text[..., :-1], config=config)
    nats = F.cross_entropy(logits.flatten(0, -2), text[..., 1:].flatten())
    return nats / math.log(2), state


def train_on_text(carried):
    params = untrained_model()
    optimizer, zeros = init_adam(params), init_kimi_linear_state(config, (rows,), device=device)
    state, losses = zeros, []
    places = torch.arange(rows)[:, None] * (len(text) // rows) + torch.arange(segment + 1)
    for step in range(steps):
        batch = text[(places + step * segment) % len(text)]
        grads, (loss, state) = grad_and_value(bits, has_aux=True)(params, state, batch)
        optimizer, params = adam(optimizer, params, clipped(grads), step, rate(step, steps, 1e-2))
        losses.append(loss.item())
        state = state if carried else zeros
    return params, torch.tensor(losses)


curves, models = {}, {}
for name, carried in (("carried from segment to segment", True), ("zeros before each segment", False)):
    models[name], curves[name] = train_on_text(carried)
params = models["carried from segment to segment"]

# The held-out text in one call, the state carried through all of it.
unseen = {
    name: bits(p, init_kimi_linear_state(config, device=device), held_out)[0].item()
    for name, p in models.items()
}
print(
    "bits per byte of unseen text, read from end to end:",
    {name: f"{loss:.2f}" for name, loss in unseen.items()},
)

figure, ax = plt.subplots(figsize=(6, 3.6))
width = max(1, steps // 10)
for (name, losses), color in zip(curves.items(), ["#0072B2", "#E69F00"], strict=True):
    ax.plot(losses, color=color, alpha=0.25)
    smooth = losses.unfold(0, width, 1).mean(-1)
    ax.plot(range(width - 1, steps), smooth, color=color, linewidth=2, label=f"{name}: {smooth[-1]:.2f}")
ax.set(xlabel="step", ylabel="bits per byte", title=f"Segments of {segment} bytes, the state before them")
ax.legend(frameon=False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Every row's own gradient, and how noisy they are
#
# `vmap(grad(..))` is the gradient of each row by itself. Their spread against their mean is the *simple
# noise scale* tr(Σ) / |G|² (McCandlish et al., 2018): the batch size beyond which more rows stop paying.


# %%
def per_row_gradients(params, batch):
    state = init_kimi_linear_state(config, device=device)
    return vmap(grad(lambda params, row: bits(params, state, row)[0]), in_dims=(None, 0))(params, batch)


def squares(tree):
    """Of the norm of all leaves together, for each row."""
    return sum(g.flatten(1).square().sum(1) for g in optree.tree_leaves(tree))


def noise_scale(params, batch):
    """Unbiased estimates of tr(Σ) and |G|² from single rows and from their mean."""
    B, grads = len(batch), per_row_gradients(params, batch)
    of_one = squares(grads).mean()
    of_mean = squares(optree.tree_map(lambda g: g.mean(0, keepdim=True), grads))[0]
    trace, signal = (of_one - of_mean) * B / (B - 1), (B * of_mean - of_one) / (B - 1)
    return (trace / signal).item()


starts = torch.randint(len(text) - 129, (8 if SMALL else 64,), generator=torch.Generator().manual_seed(1))
batch = text[starts[:, None] + torch.arange(129)]
whole = grad(
    lambda params: bits(params, init_kimi_linear_state(config, (len(batch),), device=device), batch)[0]
)
mean = optree.tree_map(lambda g: g.mean(0), per_row_gradients(params, batch))
pairs_of_gradients = zip(optree.tree_leaves(mean), optree.tree_leaves(whole(params)), strict=True)
mean_error = max((a - b).abs().max().item() for a, b in pairs_of_gradients if a.numel())
print(f"the mean of all rows' gradients against the batch's: off by {mean_error:.0e}")

untrained = untrained_model()
scales = {name: noise_scale(p, batch) for name, p in (("untrained", untrained), ("trained", params))}
print("noise scale, in rows of 128 bytes:", {name: f"{scale:.1f}" for name, scale in scales.items()})

# %% [markdown]
# ## What can this memory learn?
#
# A layer written out in primitives, with its memory as an argument; all else is the same:
#
# - **KDA**: the delta rule, a decay for every channel of the key
# - **scalar gate**: the delta rule, one decay a head (a *gated delta rule*)
# - **scalar gate, no delta rule**: each value is added, nothing is corrected
# - **softmax attention**: keeps all tokens, and so has no state of a fixed size
#
# Widths are equal, weights nearly: the decays of channels are a projection of their own, an eighth of KDA's
# 31,714 weights at full size on recall, where one decay a head needs 130 and attention none.
#
# Three seeds train at once: `vmap` over models, their optimisers and their data.

# %%
D, H, K = (32, 2, 16) if SMALL else (64, 2, 32)


def init_layer(kind, generator, tokens, answers):
    normal = partial(torch.randn, generator=generator)
    decays = H * K if kind.startswith("KDA") else H
    dt = 10 ** -(1 + 2 * torch.rand(decays, generator=generator))
    return {
        "embedding": normal(tokens, D),
        "qkv": normal(3 * H * K, D) / D**0.5,
        "conv": torch.rand(3 * H * K, 4, generator=generator) - 0.5,
        "decay": normal(decays, D) / D**0.5,
        "A_log": torch.zeros(H),
        "dt_bias": dt.expm1().log(),
        "beta": normal(H, D) / D**0.5,
        "gate": normal(H * K, D) / D**0.5,
        "norm": torch.ones(K),
        "out": normal(D, H * K) / (H * K) ** 0.5,
        "head": normal(answers, D) / D**0.5,
    }


def remember(kind, q, k, v, g, beta):
    """o [T H K] of q, k, v [T H K], g [T H K] or [T H 1] and beta [T H]."""
    if kind.startswith(("KDA", "scalar gate")) and not kind.endswith("no delta rule"):
        return kda(q.new_zeros(H, K, K), q, k, v, g.expand_as(k), beta, chunk_size=16)[1]
    q, k, v, decayed = (x.transpose(0, 1) for x in (q, k, v, g.cumsum(0)))  # H T ..
    scores = q @ k.mT
    if kind == "softmax attention":
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = (10 * scores).masked_fill(future, -torch.inf).softmax(-1)  # of unit vectors, sharpened
    else:
        scores = scores * (decayed - decayed.mT).clamp(max=0).exp().tril()
    return (scores @ v).transpose(0, 1)


def layer_model(kind, p, tokens):
    """Logits [T answers] of tokens [T]."""
    x = p["embedding"][tokens]
    unit = l2_norm(x) * D**0.5
    qkv = linear(unit, p["qkv"])
    _, qkv = causal_conv1d(qkv.new_zeros(3, 3 * H * K), qkv, p["conv"])
    q, k, v = qkv.unflatten(-1, (3, H, K)).unbind(-3)
    g = kda_gate(linear(unit, p["decay"]).unflatten(-1, (H, -1)), p["A_log"], p["dt_bias"])
    beta = linear(unit, p["beta"]).sigmoid() * (2 if kind.endswith("0 < β < 2") else 1)
    o = remember(kind, l2_norm(q), l2_norm(k), v, g, beta)
    o = gated_rms_norm(o, linear(unit, p["gate"]).unflatten(-1, (H, K)), p["norm"], eps=1e-5)
    x = x + linear(o.flatten(-2), p["out"])
    return linear(l2_norm(x) * D**0.5, p["head"])


def task_loss(kind, p, tokens, answers):
    """Of the places that ask (answer >= 0): mean cross entropy, and the share that is right."""
    logits = vmap(partial(layer_model, kind, p))(tokens)
    asked = answers >= 0
    log_p = logits.log_softmax(-1).gather(-1, answers.clamp(min=0)[..., None])[..., 0]
    right = (logits.argmax(-1) == answers) & asked
    return -(log_p * asked).sum() / asked.sum(), right.sum() / asked.sum()


def train_on_task(kind, task, tokens, answers, steps, seeds=3):
    """Parameters of all seeds, and their accuracies on fresh data [steps, seeds]."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    models = [init_layer(kind, generator, tokens, answers) for generator in generators]
    params = optree.tree_map(lambda *leaves: torch.stack(leaves).to(device), *models)
    optimizer, right = init_adam(params), []
    gradient = vmap(grad_and_value(partial(task_loss, kind), has_aux=True))
    for step in range(steps):
        batch = (torch.stack(x).to(device) for x in zip(*map(task, generators), strict=True))
        grads, (_, accuracy) = gradient(params, *batch)
        lr = rate(step, steps, 1e-2)
        optimizer, params = adam(optimizer, params, vmap(clipped)(grads), step, lr)
        right.append(accuracy)
    return params, torch.stack(right).cpu()


# %% [markdown]
# ### Associative recall
#
# Pairs of a key and a value, then every key again in another order: what was its value? (*Multi-query
# associative recall*, Arora et al., 2023.) Chance is one in 32.

# %%
vocabulary, pairs, recall_steps = (8, 3, 60) if SMALL else (32, 12, 240)


def recall(generator, rows=32, pairs=pairs):
    random = partial(torch.rand, generator=generator)
    keys = random(rows, vocabulary).argsort(-1)[:, :pairs]
    values = torch.randint(vocabulary, (rows, pairs), generator=generator)
    order = random(rows, pairs).argsort(-1)
    shown = torch.stack([keys, vocabulary + values], -1).flatten(1)
    tokens = torch.cat([shown, keys.gather(1, order)], 1)
    return tokens, torch.cat([torch.full_like(shown, -1), values.gather(1, order)], 1)


def accuracies(kind, params, task, rows):
    """Of every seed, on one large fresh batch."""
    tokens, answers = (x.to(device) for x in task(torch.Generator().manual_seed(99), rows))
    return vmap(lambda p: task_loss(kind, p, tokens, answers)[1])(params).tolist()


KINDS = ["KDA", "scalar gate", "scalar gate, no delta rule", "softmax attention"]
COLORS = dict(
    zip([*KINDS, "KDA, 0 < β < 2"], ["#0072B2", "#E69F00", "#CC79A7", "#000000", "#009E73"], strict=True)
)
recall_curves, recall_accuracy, more_pairs = {}, {}, {}
for kind in KINDS:
    trained, recall_curves[kind] = train_on_task(kind, recall, 2 * vocabulary, vocabulary, recall_steps)
    recall_accuracy[kind] = accuracies(kind, trained, recall, 64 if SMALL else 512)
    more_pairs[kind] = {
        n: accuracies(kind, trained, partial(recall, pairs=n), 64)
        for n in ([2, 4] if SMALL else [4, 8, 12, 16, 20, 24, 28, 32])
    }
    shown = ", ".join(f"{x:.1%}" for x in recall_accuracy[kind])
    print(f"{kind}: {shown} of {pairs} pairs recalled by three seeds")
if not SMALL:
    assert min(recall_accuracy["KDA"]) >= 0.99

# %% [markdown]
# ### Parity: a state that must flip
#
# Is the number of ones so far even? One bit must be remembered, and flipped by every one. With β in (0, 1)
# the transition I - β k kᵀ has no negative eigenvalue and nothing flips; with β in (0, 2) something can
# (`allow_neg_eigval` in `KDAConfig`; Grazzi et al., 2024). Trained at 16 bits, asked at more.

# %%
parity_steps, bits_trained = (40, 4) if SMALL else (250, 16)


def parity(generator, rows=32, length=bits_trained):
    ones = torch.randint(2, (rows, length), generator=generator)
    return ones, ones.cumsum(1) % 2


parity_accuracy, longer = {}, [1, 2] if SMALL else [1, 2, 3, 4, 6, 8]
for kind in ["KDA", "KDA, 0 < β < 2", "scalar gate", "softmax attention"]:
    trained, _ = train_on_task(kind, parity, 2, 2, parity_steps)
    parity_accuracy[kind] = {
        n * bits_trained: accuracies(kind, trained, partial(parity, length=n * bits_trained), 64)
        for n in longer
    }
    print(f"{kind}: {parity_accuracy[kind][bits_trained]} of the parities right, of {bits_trained} bits")

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True)
for kind, curve in recall_curves.items():
    left.plot(curve.median(1).values, color=COLORS[kind], label=kind, linewidth=2)
    left.fill_between(range(len(curve)), curve.amin(1), curve.amax(1), color=COLORS[kind], alpha=0.15)
left.set(xlabel="step", ylabel="share that is right", title=f"Recall of {pairs} pairs")
for ax, found in ((middle, more_pairs), (right, parity_accuracy)):
    for kind, by_size in found.items():
        middles = [sorted(seeds)[1] for seeds in by_size.values()]
        spread = [[m - min(s), max(s) - m] for m, s in zip(middles, by_size.values(), strict=True)]
        bars = torch.tensor(spread).T.tolist()
        ax.errorbar(list(by_size), middles, bars, color=COLORS[kind], marker="o", capsize=3, label=kind)
middle.axvline(pairs, color="gray", linestyle=":")
middle.set(xlabel="pairs", title="Asked of more pairs than trained")
right.axvline(bits_trained, color="gray", linestyle=":")
right.axhline(0.5, color="gray", linestyle=":")
right.set(xlabel="bits", title="Parity")
for ax in (left, right):
    ax.legend(frameon=False, fontsize=8)
figure.suptitle(
    "Three seeds each: their median and range; dotted: what was trained on, and chance", fontsize=10
)
figure.tight_layout()
plt.show()

# %% [markdown]
# **What it says.** A carried state lowers the loss of short segments a little while training; a state that is
# carried through unseen text serves both models alike.
#
# At this size recall is no contest: every memory learns it, attention soonest, and asked of 32 pairs, as many
# as a head has key channels, the delta rule's two begin to miss some. A decay for each channel takes nothing
# from recall, and gives nothing to it here. Parity is what β decides: with negative eigenvalues it is learnt,
# and lasts beyond the length that was trained on; without them by none, attention included.
