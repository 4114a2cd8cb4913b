# %% [markdown]
# # Derivatives of a memory
#
# **Questions:** which past token does this output depend on? For how long does a change of the state matter?
# Which channel would a loss have remember longer? How curved is it there?
#
# Each is one transform of `torch.func`, for the memory is a function of its state. Each derivative below is
# held against a closed form, another transform or finite differences. In float64; a CPU is enough.

# %%
# In a fresh environment, on Colab too: %cd to your checkout of the library, then
#     %pip install ".[notebooks]"            on an Ascend NPU ".[ascend,notebooks]"
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from kda_fn import (
    KDAConfig,
    init_kimi_delta_attention,
    init_state,
    kda,
    kda_gate,
    kimi_delta_attention,
    l2_norm,
)

# %% tags=["parameters"]
SMALL = False  # True: sizes for a quick check

# %% [markdown]
# ## Which values does an output hold?
#
# The outputs are linear in the values: o = W v, where W depends on keys, decays and β alone. Values that are
# the rows of an identity give W itself: what attention would call its weights. Here ten keys are written,
# the third is written again with another value, and at the end each is asked for.

# %%
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


pairs, K = (4, 8) if SMALL else (10, 16)
keys = torch.linalg.qr(normal(K, K))[0][:pairs]  # orthogonal: nothing is confused
again = 2
written = [*range(pairs), again]
k = torch.cat([keys[written], normal(pairs, K)])[:, None]  # the queries write nothing: β = 0
q = torch.cat([torch.zeros(len(written), K, dtype=torch.float64), keys])[:, None]
T = len(k)
beta = (torch.arange(T) < len(written)).double()[:, None]
g = torch.full((T, 1, K), math.log(0.98), dtype=torch.float64)


def outputs(v, beta=beta):
    """o [T V] of values v [T V]."""
    return kda(torch.zeros(1, K, v.shape[-1], dtype=v.dtype), q, k, v[:, None], g, beta, scale=1.0)[1][:, 0]


W = outputs(torch.eye(T, dtype=torch.float64))
by_vjp = jacrev(outputs)(normal(T, 1))[:, 0, :, 0]
linear_error = (W - by_vjp).abs().max().item()
print(f"W by values of an identity, and by reverse mode: {linear_error:.0e} apart")
first, second = W[len(written) + again, again].item(), W[len(written) + again, pairs].item()
print(f"the query of the key written twice: {first:.3f} of its first value, {second:.3f} of its second")

# %% [markdown]
# ## Which tokens does a layer's output depend on?
#
# Through convolution, norms and gates nothing is linear, and every token also moves the decay of all before
# it. The Jacobian of the outputs in the inputs is the answer, its norm for each pair of tokens the picture.

# %%
config = KDAConfig(hidden_size=8, num_heads=2, head_dim=4)
params = init_kimi_delta_attention(config, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
length = 12 if SMALL else 40
x = normal(length, 8)


def layer(x):
    return kimi_delta_attention(params, init_state(config, dtype=torch.float64), x, config=config)[1]


J = jacrev(layer)(x)  # [T D T D]
modes_error = (J - jacfwd(layer)(x)).abs().max().item()
influence = J.square().sum((1, 3)).sqrt()
future = influence.triu(1).max().item()
print(f"reverse and forward mode: {modes_error:.0e} apart; influence of what comes later: {future}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4))
for ax, values, title in (
    (left, W, "o = W v: the weight of each value"),
    (right, influence, "|∂y / ∂x| of a layer"),
):
    shown = values.abs().clamp(min=1e-3).log10().numpy()
    image = ax.imshow(shown, cmap="viridis", aspect="auto", vmin=-3)
    ax.set(xlabel="token s", ylabel="output t", title=title)
    ax.locator_params(integer=True)
    figure.colorbar(image, ax=ax, label="magnitude, log10; at most -3 is dark")
left.annotate(
    "written twice:\nits second value",
    (pairs, len(written) + again),
    (0.5, 0.2),
    textcoords="axes fraction",
    color="white",
    arrowprops={"arrowstyle": "->", "color": "white"},
)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## For how long does a change of the state matter?
#
# `jvp` carries a tangent of the state through all tokens that follow, in one pass. Where nothing is written
# (β = 0) it must shrink as the product of the decays, exactly; writing takes more: each new token corrects
# its own direction of the memory, the change in it included.

# %%
steps, H, K = (20, 2, 8) if SMALL else (120, 2, 16)
k = l2_norm(normal(steps, H, K))
v = normal(steps, H, K)
half_life = torch.tensor([5.0, 60.0])[:, None]  # tokens, of each head
g = (-math.log(2) / half_life).expand(steps, H, K).double()
state, change = normal(H, K, K), normal(H, K, K)


def states_after(state, strength):
    """The states after every token [T H K V]: a scan would do; here one call for each length."""
    beta = torch.full((steps, H), strength, dtype=torch.float64)
    return torch.stack([kda(state, k[:t], k[:t], v[:t], g[:t], beta[:t])[0] for t in range(1, steps + 1)])


remains = {}
for strength in (0.0, 0.1, 0.5):
    _, tangent = jvp(lambda state, strength=strength: states_after(state, strength), (state,), (change,))
    remains[strength] = tangent.flatten(2).norm(dim=2) / change.flatten(1).norm(dim=1)
exact = (g.cumsum(0)[..., 0]).exp()
decay_error = (remains[0.0] - exact).abs().max().item()
print(f"without writing, against the product of the decays: {decay_error:.0e}")

figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True)
for head, ax in enumerate(panels):
    for (strength, values), color in zip(remains.items(), ["#000000", "#0072B2", "#E69F00"], strict=True):
        ax.semilogy(range(1, steps + 1), values[:, head], color=color, label=f"β = {strength:g}")
    ax.set(xlabel="tokens later", title=f"half-life {half_life[head].item():g} tokens", ylim=(1e-4, 1.5))
panels[0].set_ylabel("what remains of a change")
panels[0].legend(frameon=False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Which channel should remember longer?
#
# A channel's half-life without input is h = log 2 / (exp(A_log) softplus(dt_bias)): its own derivatives are
# known. A loss has one with respect to log h, by the chain rule: negative where longer memory lowers it. The
# task: give back values at a distance. What is far too short-lived is beyond help, what is long-lived needs
# none: the loss asks most of those in between, below the distance.

# %%
distance, channels = (10, 8) if SMALL else (40, 16)
wanted = torch.logspace(0, math.log10(30 * distance), channels, dtype=torch.float64)  # half-lives, in tokens
A_log = torch.zeros(1, dtype=torch.float64)
dt_bias = (math.log(2) / wanted).expm1().log()


def half_lives(A_log, dt_bias):
    return -math.log(2) / kda_gate(torch.zeros_like(dt_bias), A_log, dt_bias.flatten()).flatten()


dt_bias = dt_bias[None]  # [H K]
h = half_lives(A_log, dt_bias)
dh = grad(lambda b: half_lives(A_log, b).sum())(dt_bias)[0]
known = -h * dt_bias[0].sigmoid() / F.softplus(dt_bias[0])
half_life_error = ((dh - known) / known).abs().max().item()
print(f"∂h/∂dt_bias against its closed form: {half_life_error:.0e}; ∂h/∂A_log = -h:", end=" ")
print(bool(torch.allclose(jacrev(half_lives)(A_log, dt_bias)[:, 0], -h)))

many = 8 if SMALL else 32
key = torch.eye(channels, dtype=torch.float64)
value = normal(many, channels, 1)
filler = distance


def recall_loss(dt_bias):
    """Each channel stores a value at once, `distance` empty tokens follow, then all are asked for."""
    raw = torch.zeros(channels + filler + channels, 1, channels, dtype=torch.float64)
    g = kda_gate(raw, A_log, dt_bias.flatten())
    empty = torch.zeros(filler, channels, dtype=torch.float64)
    keys = torch.cat([key, empty, key])[:, None]
    beta = torch.cat([torch.ones(channels), torch.zeros(filler + channels)]).double()[:, None]

    def error(value):
        values = torch.cat([value, torch.zeros(filler + channels, 1, dtype=torch.float64)])[:, None]
        S = torch.zeros(1, channels, 1, dtype=torch.float64)
        o = kda(S, keys, keys, values, g, beta, scale=1.0)[1]
        return (o[-channels:, 0] - value).square().sum()

    return vmap(error)(value).mean()


by_bias, at = grad(recall_loss)(dt_bias), 1e-5
by_log_h = by_bias[0] * h / known
bumped = [dt_bias.clone() for _ in range(2)]
for bias, sign in zip(bumped, (1, -1), strict=True):
    bias[0, channels // 2] += sign * at
difference = (recall_loss(bumped[0]) - recall_loss(bumped[1])) / (2 * at)
difference_error = ((difference - by_bias[0, channels // 2]) / difference).abs().item()
print(f"one channel by finite differences: {difference_error:.0e} (relative)")

figure, ax = plt.subplots(figsize=(6, 3.6))
ax.semilogx(h, by_log_h, "o-", color="#0072B2")
ax.axvline(distance + channels, color="gray", linestyle=":", label="distance of the recall")
ax.axhline(0, color="black", linewidth=0.8)
ax.set(
    xlabel="half-life of the channel, tokens",
    ylabel="∂ loss / ∂ log half-life",
    title="Who should remember longer",
)
ax.legend(frameon=False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## How curved is the loss?
#
# A Hessian-vector product is the derivative of a gradient along a direction: forward over reverse mode, two
# passes whatever the size. Power iteration on it gives the largest curvature; the whole Hessian of these few
# biases says whether that is right.


# %%
def hvp(direction):
    return jvp(grad(recall_loss), (dt_bias,), (direction,))[1]


H_matrix = hessian(recall_loss)(dt_bias)[0, :, 0, :]
direction = normal(1, channels)
hvp_error = (hvp(direction)[0] - H_matrix @ direction[0]).abs().max().item()
along_gradient = vjp(grad(recall_loss), dt_bias)[1](direction)[0]
symmetry_error = (along_gradient - hvp(direction)).abs().max().item()
for _ in range(60 if SMALL else 200):
    direction = hvp(direction)
    direction = direction / direction.norm()
curvature = (direction * hvp(direction)).sum().item()
largest = torch.linalg.eigvalsh(H_matrix)
largest = largest[largest.abs().argmax()].item()
print(f"Hessian-vector product against the Hessian: {hvp_error:.0e} apart,", end=" ")
print(f"against reverse over reverse: {symmetry_error:.0e}")
print(f"largest curvature by power iteration {curvature:.4f}, by the eigenvalues {largest:.4f}")
