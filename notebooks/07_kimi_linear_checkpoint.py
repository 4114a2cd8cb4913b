# %% [markdown]
# # A Kimi-Linear checkpoint, layer by layer
#
# **Questions:** does a loaded checkpoint compute what transformers computes from the same files? If it did
# not, in which layer would it go wrong? And what changes for the real model of 48 billion parameters?
#
# The checkpoint is random and small, written here with the published names: nothing is downloaded, a CPU is
# enough. The calls are the same for a folder of the real one.

# %%
# In a fresh environment, on Colab too: %cd to your checkout of the library, then
#     %pip install ".[notebooks]"            on an Ascend NPU ".[ascend,notebooks]"
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import optree
import torch
from safetensors import safe_open

from kda_fn import (
    KDAConfig,
    KimiLinearConfig,
    MLAConfig,
    MoEConfig,
    decode_step,
    init_kimi_linear,
    init_kimi_linear_state,
    kimi_linear,
    scan,
)
from kda_fn.layers.checkpoint import describe, load_kimi_linear, read_config, save_kimi_linear, sizes
from kda_fn.layers.kimi_linear import kimi_linear_blocks

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns about at its import is its own affair
        from transformers import KimiLinearForCausalLM
        from transformers.utils import logging as their_logging
except ImportError as error:
    raise ImportError(
        "this notebook compares with transformers' Kimi-Linear, which is not installed here: "
        'pip install "transformers==5.24.0"'
    ) from error
their_logging.set_verbosity_error()
their_logging.disable_progress_bar()

# %% tags=["parameters"]
SMALL = False  # True: sizes for a quick check

# %% [markdown]
# ## A checkpoint
#
# Three KDA layers to one MLA layer, the first MLP dense and the others mixtures of experts, as published.
# One-dimensional parameters are moved off the neutral values that they start at: a norm of ones would hide
# a norm that was forgotten.

# %%
D, T = 64, (60 if SMALL else 200)
groups = 1 if SMALL else 3
config = KimiLinearConfig(
    vocab_size=96,
    layer_types=("kda", "kda", "kda", "mla") * groups,
    mlp_types=("dense",) + ("moe",) * (4 * groups - 1),
    intermediate_size=160,
    kda=KDAConfig(hidden_size=D, num_heads=4, head_dim=16),
    mla=MLAConfig(hidden_size=D, num_heads=4, head_dim=16, shared_dim=8, head_v_dim=16, latent_dim=24),
    moe=MoEConfig(hidden_size=D, num_experts=8, experts_per_token=2, intermediate_size=32, shared_size=32),
)
generator = torch.Generator().manual_seed(0)
written = optree.tree_map(
    lambda x: x + 0.1 * torch.randn(x.shape, generator=generator) if x.ndim == 1 else x,
    init_kimi_linear(config, generator=generator),
)
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
save_kimi_linear(folder, written, config=config, shard_bytes=500_000)
for file in sorted(folder.iterdir()):
    print(f"{file.stat().st_size:>9,} bytes  {file.name}")
with safe_open(next(iter(sorted(folder.glob("*.safetensors")))), "pt") as shard:
    for name in sorted(shard.keys())[:8]:
        print(f"{shard.get_slice(name).get_shape()!s:>15}  {name}")

# %% [markdown]
# Loading reads the headers first: a tensor that is missing, unexpected or misshapen is named before
# anything is read. `python -m kda_fn.layers.checkpoint FOLDER` prints this table, and whether all tensors
# fit.

# %%
loaded_config, params = load_kimi_linear(folder)
same_bits = all(
    torch.equal(a, b) for a, b in zip(optree.tree_leaves(params), optree.tree_leaves(written), strict=True)
)
print(f"the config is the one written: {loaded_config == config}; the tensors, to the bit: {same_bits}\n")
print(describe(config, torch.float32))

# %% [markdown]
# ## Layer by layer
#
# Logits that agree say that all is well; logits that do not say nothing about where. So the residual stream
# is compared after every layer: `kimi_linear_blocks` is `kimi_linear`, one block at a time.
#
# How far apart may two right answers be? Both run in float32, and round differently. The same blocks in
# float64 tell what each of the two is off by: if rounding is all, their difference is no larger than the two
# errors together.


# %%
def streams(params, tokens, config=config):
    """The residual stream [T D] after each block, from scratch."""
    empty = init_kimi_linear_state(config, dtype=params.embedding.dtype)
    h = torch.nn.functional.embedding(tokens, params.embedding)
    return [h for _, h in kimi_linear_blocks(params, empty, h, config=config)]


def differences(ours, theirs):
    """Relative RMSE of every layer."""
    pairs = zip(ours, theirs, strict=True)
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # Its default special tokens lie past this vocabulary.
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, **ids).eval()
_, half = load_kimi_linear(folder, dtype=torch.bfloat16)
scratch.cleanup()  # all that is read of it has been read

caught = []  # transformers' own list of hidden states ends with the normalised one
for layer in model.model.layers:
    layer.register_forward_hook(
        lambda _module, _args, out: caught.append((out[0] if isinstance(out, tuple) else out)[0])
    )

tokens = torch.randint(config.vocab_size, (T,), generator=generator)
with torch.no_grad():
    their_logits = model(tokens[None]).logits[0]
    theirs = caught[: config.num_layers]
    ours = streams(params, tokens)
    exact = streams(optree.tree_map(torch.Tensor.double, params), tokens)
    ours_half = streams(half, tokens)
    _, logits = kimi_linear(params, init_kimi_linear_state(config), tokens, config=config)

agreement = differences(ours, theirs)
rounding = {"kda_fn": differences(ours, exact), "transformers": differences(theirs, exact)}
bfloat16 = differences(ours_half, exact)
logits_error = differences([logits], [their_logits])[0]
print(f"the last layer's stream: {agreement[-1]:.1e} apart, the logits {logits_error:.1e}")

# %% [markdown]
# ## What a mistake looks like
#
# A comparison is worth what it would find. Here a loader's typical mistake is made on purpose, in one layer:
# q and k change places. The two are made alike and have one shape, so nothing complains.

# %%
at = 1 if SMALL else 6
q, k, v = params.blocks[at].attention.qkv.split([config.kda.H * config.kda.K] * 2 + [config.kda.P // 3])
swapped = params.blocks[at].attention._replace(qkv=torch.cat([k, q, v]))
blocks = [b._replace(attention=swapped) if i == at else b for i, b in enumerate(params.blocks)]
with torch.no_grad():
    mistake = differences(streams(params._replace(blocks=tuple(blocks)), tokens), theirs)

# %%
fig, ax = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
layers = range(config.num_layers)
lines = [
    (mistake, "#D55E00", "v", "-", f"q and k swapped in layer {at}, against transformers"),
    (bfloat16, "#E69F00", "D", "-", "kda_fn in bfloat16, against float64"),
    (agreement, "black", "o", "-", "kda_fn against transformers, both float32"),
    (rounding["transformers"], "#009E73", "s", "--", "transformers float32, against float64"),
    (rounding["kda_fn"], "#0072B2", "^", ":", "kda_fn float32, against float64"),
]
for values, color, marker, line, label in lines:
    ring = {"markersize": 9, "fillstyle": "none"} if marker == "s" else {"markersize": 5}  # around the dots
    ax.semilogy(layers, values, color=color, marker=marker, linestyle=line, label=label, **ring)
ax.set_xticks(layers, [f"{i}\n{kind.upper()}" for i, kind in enumerate(config.layer_types)])
ax.set(
    title="The residual stream of one checkpoint, loaded twice",
    xlabel="after layer (its attention)",
    ylabel="relative RMSE",
    ylim=(1e-8, 1e4),
)
ax.set_yticks([10.0**n for n in range(-8, 1, 2)])
ax.minorticks_off()
ax.grid(alpha=0.3)
ax.legend(frameon=False, loc="upper left", fontsize=9)
plt.show()

# %% [markdown]
# The black line lies where the rounding errors do, on transformers' own: nothing else separates the two
# programs. The mistake stands five powers of ten above it from its own layer on. In bfloat16 the first layer
# is off by a hundredth. It is the experts that carry this to a third: routers drawn at random tie often, and
# then a rounding takes the other expert, in any implementation. With dense MLPs (`mlp_types`) the last layer
# is off by some 6%.
#
# ## The same text
#
# Greedy decoding is the test that a user sees. One prefill, then a scan of decode steps; the MLA caches are
# preallocated (`capacity`), so the state keeps its shapes.

# %%
prompt, new = tokens[:9], (16 if SMALL else 50)
state = init_kimi_linear_state(config, capacity=len(prompt) + new)
step = partial(decode_step, params, config=config, temperature=0.0)
with torch.no_grad(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    state, logits = kimi_linear(params, state, prompt, config=config)
    first = logits[-1].argmax(-1)
    _, rest = scan(step, (state, first), torch.zeros(new - 1))
    expected = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
    )[0, len(prompt) :]
ours_greedy = torch.cat([first[None], rest])
print("kda_fn      ", ours_greedy.tolist())
print("transformers", expected.tolist())

# %% [markdown]
# ## What changes for the real one
#
# Nothing in the calls. Its `config.json` is below (what of it says something about the model); the numbers
# come from tensors without storage, so this too runs anywhere.

# %%
published = read_config(
    {
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "intermediate_size": 9216,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "first_k_dense_replace": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [i for i in range(1, 27) if i % 4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    }
)
print(describe(published))
_, whole = sizes(published)
_, all_mla = sizes(replace(published, layer_types=("mla",) * published.num_layers))
weight_bytes = 2 * whole.parameters
print(
    f"\nWeights in bfloat16: {weight_bytes / 1e9:.0f} GB, at least {-(-weight_bytes // 5_000_000_000)} shards"
    f" of 5 GB; a token is multiplied with {whole.active / whole.parameters:.1%} of them."
)
for length in (4_096, 131_072, 1_000_000):
    total = whole.state + length * whole.per_token
    print(f"A sequence of {length:>9,} tokens: {total / 1e9:6.3f} GB, of which {whole.state / 1e9:.3f} KDA's")

# %% [markdown]
# - **Sharding.** `load_kimi_linear` opens all shards of the index and reads one tensor at a time straight to
#   its device (`device="cuda"`, `"npu"`): host memory is not filled with a second model. Past one device,
#   `shard_heads` and `distributed_kimi_linear` split heads and context; experts are not split.
# - **Dtype.** `dtype=None` keeps what is stored, bfloat16. Convolutions, `A_log`, `dt_bias` and routers
#   become float32 whatever is asked, and so is the memory itself; `init_kimi_linear_state(dtype=..)` is the
#   dtype of windows and MLA caches.
# - **Memory for each token.** KDA layers have none: their state is of one size. What grows are the caches of
#   the MLA layers, one in four.

# %%
fig, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
lengths = torch.logspace(2, 6, 60)
curves = [
    (all_mla.state + lengths * all_mla.per_token, "#D55E00", "--", "MLA in all 27 layers"),
    (whole.state + lengths * whole.per_token, "black", "-", "the model: 20 KDA, 7 MLA"),
    (torch.full_like(lengths, whole.state), "#0072B2", ":", "of it, states of the KDA layers"),
]
for values, color, line, label in curves:
    ax.loglog(lengths, values / 1e9, color=color, linestyle=line, label=label)
ax.axhline(weight_bytes / 1e9, color="0.6", linewidth=0.8)
ax.text(lengths[0], weight_bytes / 1e9 * 1.2, "the weights, once for all sequences", color="0.35")
crossing = whole.state / (all_mla.per_token - whole.per_token)
ax.axvline(crossing, color="0.6", linewidth=0.8)
ax.text(crossing * 1.08, 4e-3, f"{crossing:,.0f} tokens", color="0.35")
ax.set(
    title="Kimi-Linear-48B-A3B, bfloat16: memory of one sequence",
    xlabel="length of the sequence (tokens)",
    ylabel="memory (GB)",
    ylim=(2e-3, 6e2),
)
ax.grid(alpha=0.3)
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.84))
plt.show()
