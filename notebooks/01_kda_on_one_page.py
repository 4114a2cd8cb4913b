# %% [markdown]
# # KDA on one page
#
# **Question:** the recurrence is four lines; why is a fast implementation of it longer? Here the equations
# are written out three times, as a step, as a chunk and as a scan over chunks, and give the same numbers.
# Then the obvious way to write the chunk is pushed until it breaks.
#
# Everything is arithmetic on a few tensors and runs on a CPU in seconds.

# %%
# In a fresh environment, on Colab too: %cd to your checkout of the library, then
#     %pip install ".[notebooks]"            on an Ascend NPU ".[ascend,notebooks]"
import matplotlib.pyplot as plt
import torch

from kda_fn import kda, kda_step, scan

# %% tags=["parameters"]
SMALL = False  # True: sizes for a quick check

# %%
T, H, K, V, C = (96 if SMALL else 512), 2, 32, 32, 32
torch.manual_seed(0)
q, k = (torch.nn.functional.normalize(torch.randn(T, H, K, dtype=torch.float64), dim=-1) for _ in range(2))
v = torch.randn(T, H, V, dtype=torch.float64)
g = -torch.rand(T, H, K, dtype=torch.float64)  # log decay of each channel: natural logarithm, <= 0
beta = torch.rand(T, H, dtype=torch.float64)
S_0 = torch.randn(H, K, V, dtype=torch.float64)


def difference(a, b):
    """Relative RMSE."""
    return ((a - b).norm() / b.norm()).item()


# %% [markdown]
# ## 1. One token
#
# The memory $S \in \mathbb{R}^{K \times V}$ is an associative table. A token lets each channel decay, looks
# up what its key recalls, and writes the correction:
#
# $$S \leftarrow \mathrm{diag}(e^{g_t})\,S \qquad d = \beta_t\,(v_t - S^\top k_t) \qquad
#   S \leftarrow S + k_t d^\top \qquad o_t = K^{-1/2}\, S^\top q_t$$


# %%
def step(S, token):
    q, k, v, g, beta = token  # [H K] [H K] [H V] [H K] [H]
    S = g.exp()[..., None] * S
    d = beta[..., None] * (v - (S * k[..., None]).sum(-2))
    S = S + k[..., None] * d[..., None, :]
    return S, K**-0.5 * (S * q[..., None]).sum(-2)


S_steps, o_steps = scan(step, S_0, (q, k, v, g, beta))
S_library, o_library = scan(lambda S, token: kda_step(S, *token), S_0, (q, k, v, g, beta))
print(f"our step against kda_step: {difference(o_steps, o_library):.1e}")

# %% [markdown]
# ## 2. One chunk
#
# Inside a chunk of $C$ tokens let $G_i = \sum_{t \le i} g_t$. All corrections of the chunk solve one
# triangular system:
#
# $$L_{ij} = \beta_i \sum_c k_{ic} k_{jc}\, e^{G_{ic} - G_{jc}} \;\; (j < i) \qquad
#   (I + L)\,D = \beta\,(v - (k\, e^{G})\, S_0)$$
#
# $$O = K^{-1/2} \left[(q\,e^{G})\,S_0 + A D\right] \qquad
#   A_{ij} = \sum_c q_{ic} k_{jc}\, e^{G_{ic} - G_{jc}} \;\; (j \le i) \qquad
#   S_C = \mathrm{diag}(e^{G_C})\,S_0 + (k\, e^{G_C - G})^\top D$$
#
# The only question is how to compute $\sum_c a_{ic} b_{jc}\, e^{G_{ic} - G_{jc}}$. The differences are at
# most 0 where they are wanted: take them first, mask with $-\infty$, then exponentiate. This is safe, and
# costs $C^2 K$ exponentials. (The mask comes first because an exponential that overflowed has a NaN gradient
# even where its value is masked afterwards.)


# %%
def decayed_products(a, b, G):
    """[H C K] three times -> [H C C]: lower triangle, diagonal included."""
    D = G[:, :, None] - G[:, None]
    later = torch.ones(D.shape[1:3], dtype=torch.bool).triu(1)[None, :, :, None]
    return torch.einsum("hik,hjk,hijk->hij", a, b, D.masked_fill(later, -torch.inf).exp())


def chunk(S, tokens, products=decayed_products):
    q, k, v, g, beta = (x.movedim(1, 0) for x in tokens)  # [H C ..]
    G = g.cumsum(1)
    L = (beta[..., None] * products(k, k, G)).tril(-1)
    A = products(q, k, G).tril()
    right = beta[..., None] * (v - (k * G.exp()) @ S)
    D = torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
    o = K**-0.5 * ((q * G.exp()) @ S + A @ D)
    last = G[:, -1:]
    S = last.mT.exp() * S + (k * (last - G).exp()).mT @ D
    return S, o.movedim(0, 1)


S_chunk, o_chunk = chunk(S_0, (q[:C], k[:C], v[:C], g[:C], beta[:C]))
print(f"one chunk against {C} steps: {difference(o_chunk, o_steps[:C]):.1e}")

# %% [markdown]
# ## 3. A scan over chunks
#
# A chunk is a function of a state too, so the prompt is a scan with longer tokens. `kda` is that, and takes
# any length, state and number of batch axes.

# %%
chunks = tuple(x.unflatten(0, (-1, C)) for x in (q, k, v, g, beta))
S_scan, o_scan = scan(chunk, S_0, chunks)
S_kda, o_kda = kda(S_0, q, k, v, g, beta)
errors = {
    "steps": difference(o_steps, o_kda),
    "scan over chunks": difference(o_scan.flatten(0, 1), o_kda),
    "state after the scan": difference(S_scan, S_kda),
}
for name, error in errors.items():
    print(f"{name:21} against kda: {error:.1e}")

# %% [markdown]
# ## Where the obvious formula breaks
#
# $e^{G_i - G_j} = e^{G_i}\,e^{-G_j}$ turns the sum into one matrix product, which is why everyone writes it
# so first. But $e^{-G_j}$ grows without bound as the memory forgets: in float32 it is infinite once a
# channel has decayed by $e^{-88}$, within a chunk. Clamping the exponents hides the infinities and is wrong
# without a word. Each decay per token below is given to every channel; the error is that of the float32
# result against the float64 recurrence.


# %%
def factorised(a, b, G):
    return (a * G.exp()) @ (b * (-G).exp()).mT


def clamped(a, b, G):
    return (a * G.clamp(min=-80).exp()) @ (b * (-G).clamp(max=80).exp()).mT


forms = {
    "exp(G) exp(-G)": lambda S, x: chunk(S, x, factorised),
    "the same, clamped at 80": lambda S, x: chunk(S, x, clamped),
    "difference first": chunk,
    "kda_fn.kda": lambda S, x: kda(S, *x, chunk_size=C),
}
decays = torch.logspace(-2, 3, 8 if SMALL else 26)
forgetting = {name: [] for name in forms}
for decay in decays.tolist():
    tokens = (q[:C], k[:C], v[:C], torch.full_like(g[:C], -decay), beta[:C])
    _, exact = scan(step, S_0, tokens)
    for name, form in forms.items():
        _, o = form(S_0.float(), tuple(x.float() for x in tokens))
        forgetting[name].append(difference(o.double(), exact))

# %%
fig, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
styles = [("#D55E00", "o", "-"), ("#E69F00", "s", "-"), ("#0072B2", "^", "--"), ("black", "", ":")]
bad = 1e2
for (name, values), (color, marker, line) in zip(forgetting.items(), styles, strict=True):
    shown = torch.tensor(values).nan_to_num(nan=bad, posinf=bad).clamp(max=bad)
    ax.loglog(decays, shown, color=color, marker=marker, linestyle=line, markersize=5, label=name)
ax.axhline(bad, color="0.6", linewidth=0.8)
ax.text(decays[0], bad * 1.3, "not finite", color="0.35", va="bottom")
ax.set(
    title=f"Output of one chunk of {C} tokens in float32",
    xlabel="decay per token, $-g$ (nat)",
    ylabel="relative RMSE against float64",
    ylim=(1e-8, 3e3),
)
ax.legend(frameon=False, loc="center left", bbox_to_anchor=(0, 0.55))
plt.show()

# %% [markdown]
# The safe form above is for reading. The library's gets the same digits from matrix products alone: blocks
# of 1, 2, 4, .. tokens are joined in pairs, and each pair needs only decays *through* a block, which are
# never above 1 (`kda_fn/primitives/kda/fallback.py`). Not even $-\infty$, "forget everything here", is a
# special case:

# %%
gate = g.clone()
gate[T // 2] = -torch.inf
_, o_forgot = kda(S_0, q, k, v, gate, beta)
fresh = slice(T // 2, None)
_, o_fresh = kda(torch.zeros_like(S_0), q[fresh], k[fresh], v[fresh], g[fresh], beta[fresh])
print(f"after a gate of -inf, against a fresh start: {difference(o_forgot[fresh], o_fresh):.1e}")
