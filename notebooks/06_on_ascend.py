# %% [markdown]
# # On Ascend: what serves, what is known, and what you can tell us
#
# **Questions:** which code runs for a call on an Ascend NPU? How can kernels be trusted that were written
# without one? And what does it take to find out on yours, and to send back what it said?
#
# It runs anywhere: on an NPU it shows that NPU, elsewhere it says what it could not see. **No kernel of this
# library has run on an Ascend NPU yet**, as far as this repository knows.

# %%
# In a fresh environment, on Colab too: %cd to your checkout of the library, then
#     %pip install ".[notebooks]"            on an Ascend NPU ".[ascend,notebooks]"
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap

import kda_fn
from kda_fn import explain, kda
from kda_fn.__main__ import best_device, devices, layer_dtype, sample_calls, versions
from kda_fn.primitives._primitive import PRIMITIVES

# %% tags=["parameters"]
SMALL = False  # True: sizes for a quick check

# %%
device = torch.device(best_device())  # an NPU before a GPU before the CPU
above = (Path.cwd(), *Path.cwd().parents)
ROOT = next((folder for folder in above if (folder / "docs" / "ascend.md").exists()), None)
if ROOT is None:
    raise FileNotFoundError(f"this notebook reads docs/ascend.md: run it in a checkout, not in {Path.cwd()}")
print("\n".join(f"{name:14} {number or 'not installed'}" for name, number in versions().items()))
print("\n".join(devices()))
if device.type != "npu":
    print(
        f"\nNo NPU here, so this ran on {device.type}. Not seen: whether the kernels become machine code,"
        "\nrun, are right and are fast on one; whether the vendor's operators do what their documents say."
    )

# %% [markdown]
# ## Which implementation serves
#
# A primitive has up to four: the vendor's operators (`ascendc`), our Triton kernels (`triton`), fast pure
# torch (`fallback`) and the definition (`reference`). `impl=None` takes the first of these that serves the
# very call: its device, dtypes and sizes. `explain` says for each why not. `python -m kda_fn` prints this for
# all of them; here is one typical call of each.

# %%
preference = ("ascendc", "triton", "fallback", "reference")
reasons = {}
for primitive in sorted(PRIMITIVES, key=lambda function: function.__name__):
    args, keywords = sample_calls(device.type)[primitive.__name__]
    reasons[primitive.__name__] = explain(primitive, *args, **keywords)
for name, told in reasons.items():
    taken = next(impl for impl in preference if told[impl] is None)
    print(f"{name:24} takes {taken:9}  no triton because: {told['triton'] or '-'}")

# %% [markdown]
# ## How the kernels were checked
#
# Every statement about Ascend in this repository rests on one of four things, and says on which:
#
# - **compiled**: triton-ascend and bishengir-compile took the kernel to HIVM, the last form of the public
#   compiler, for Ascend910B3 and Ascend910_9382, with every buffer placed in on-chip memory;
# - **emulated**: the IR that is handed to that compiler was lowered to x86 and run, bounds checked, and held
#   to the laws (`tests/laws.py`): values, gradients, bits;
# - **contract**: a vendor operator's documented signature and rules, by a strict stand-in
#   (`tests/contracts`);
# - **device**: it ran on one.
#
# `docs/ascend.md` is written by `make ascend` and held by the tests to what is measured. The pictures are
# drawn from it.


# %%
def tables(text):
    """The markdown tables of a text, each a list of rows of cells, its header first."""
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if lines:
            rows = [[cell.strip(" `*") for cell in line.strip("| ").split("|")] for line in lines]
            yield [rows[0], *rows[2:]]


document = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
found = list(tables(document))
forward, backward = (table[1:] for table in found if table[0][-1] == "bytes per token and head")
on_chip = [row for table in found if table[0][:2] == ["call", "kernel"] for row in table[1:]]
(emulated,) = ({row[0]: [float(x) for x in row[1:]] for row in t[1:]} for t in found if t[0][1] == "fp32")

levels = ["compiled", "emulated", "contract", "device"]
compiled = {row[0].split(",")[0].removesuffix(" and its gradients") for row in on_chip}
check = {}
for name, told in reasons.items():
    has = {impl: f"has no {impl}" not in (told[impl] or "") for impl in ("triton", "ascendc")}
    check[name] = [has["triton"] and name in compiled, has["triton"], has["ascendc"], False]

# %%
fig, ax = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
ax.imshow([[int(x) for x in row] for row in check.values()], cmap=ListedColormap(["#F2F2F2", "#0072B2"]))
for y, row in enumerate(check.values()):
    for x, yes in enumerate(row):
        text = "yes" if yes else "not yet" if levels[x] == "device" else "–"
        ax.text(x, y, text, ha="center", va="center", color="white" if yes else "0.35", fontsize=9)
under = ["Triton kernel", "Triton kernel", "vendor's operator", "any of them"]
ax.set_xticks(range(4), [f"{level}\n{what}" for level, what in zip(levels, under, strict=True)], fontsize=9)
ax.set_yticks(range(len(check)), list(check))
ax.set_aspect("auto")
ax.set(title="What has been checked for Ascend, and how", ylabel="primitive")
plt.show()

# %% [markdown]
# `fused_kda` is the layer's: the kernels of `kda` with normalisation and gates inside. It is emulated under
# every law; the document compiles its kernels without these. `linear` in int8 is the kernel of
# `quantize_tokens` and torch's own product.
#
# What the first two columns prove is arithmetic, rounding, addresses and room on the chip. What they do not:
# the step from HIVM to machine code, the synchronisation in it, the device's own exponential, and time.
#
# ## A yardstick without a device
#
# Launches, and the bytes of the tensors that each is given, can be counted anywhere. A recurrence like this
# one is bound by traffic, so they are the least it costs. And the emulator gives errors to hold against the
# laws.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
colors = ["#0072B2", "#56B4E9", "#009E73", "#F0E442", "#CC79A7"]
bars = []
for direction, rows in (("forward", forward), ("backward", backward)):
    *kernels, ours, peer, least = [
        (name, launches, int(size.replace(",", ""))) for name, launches, size in rows
    ]
    bars += [
        (f"{direction}\nkda_fn, {ours[1]} launches", [size for *_, size in kernels]),
        (f"{direction}\nFLA's Ascend backend, {peer[1]}", [peer[2]]),
        (f"{direction}\nleast possible", [least[2]]),
    ]
for y, (label, sizes) in enumerate(bars):
    start = 0
    for i, size in enumerate(sizes):
        color = colors[i % len(colors)] if len(sizes) > 1 else "0.6" if "least" in label else "#E69F00"
        left.barh(y, size / 1000, left=start / 1000, color=color, edgecolor="white")
        start += size
    left.text(start / 1000 + 0.4, y, f"{start / 1000:.1f}", va="center", fontsize=9)
left.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=9)
left.invert_yaxis()
left.set(
    title="Traffic of a layer's memory, bf16,\nT 4096, H 32, K = V = 128",
    xlabel="kB for each token and head (colours: launches)",
    xlim=(0, 36),
)
styles = [("fp32", "#0072B2", "o"), ("bf16", "#E69F00", "s"), ("fp16", "#009E73", "^")]
for i, (dtype, color, marker) in enumerate(styles):
    values = [errors[i] for errors in emulated.values()]
    right.semilogx(values, range(len(values)), color=color, marker=marker, linestyle="", label=dtype)
for bound, color in ((2e-6, "#0072B2"), (5e-3, "#E69F00")):
    right.axvline(bound, color=color, linestyle="--", linewidth=1)
    text = "law, fp32 " if bound < 1e-3 else "law, bf16 and fp16 "
    right.text(bound, -0.9, text, ha="right", va="bottom", fontsize=9)
right.set_yticks(range(len(emulated)), list(emulated), fontsize=9)
right.set_ylim(len(emulated) - 0.5, -2)
right.set(title="Emulated kernels against float64", xlabel="relative RMSE of the worst output")
right.legend(frameon=False, loc="center")
plt.show()

# %% [markdown]
# ## On a real NPU
#
# 1. CANN, with its environment set (`source set_env.sh`); torch_npu does not import without it.
# 2. `pip install ".[ascend]"`: torch_npu and triton-ascend. The latter installs a package called `triton`:
#    never beside upstream's. For the vendor's operators for KDA and its convolution, import vllm-ascend's
#    extension before the call.
# 3. `python -m kda_fn`: the NPUs by name, and `triton` or `ascendc` as what is taken.
#
# Nothing in a call changes but the device of its tensors. Below every implementation that serves here is
# held against the definition in float64 on the CPU.

# %%
T, H, K = (64, 2, 32) if SMALL else (512, 4, 128)
generator = torch.Generator().manual_seed(0)
dtype = layer_dtype(device.type)
q, k = (torch.nn.functional.normalize(torch.randn(T, H, K, generator=generator), dim=-1) for _ in range(2))
v, g = torch.randn(T, H, K, generator=generator), -torch.rand(T, H, K, generator=generator)
S, beta = torch.randn(H, K, K, generator=generator), torch.rand(T, H, generator=generator)
rounded = [S, q.to(dtype), k.to(dtype), v.to(dtype), g, beta]
here = [x.to(device) for x in rounded]
_, exact = kda(*(x.double() for x in rounded), impl="reference")
errors_here = {}
for impl, reason in explain(kda, *here).items():
    if reason is None:
        _, o = kda(*here, impl=impl)
        errors_here[impl] = ((o.cpu().double() - exact).norm() / exact.norm()).item()
    print(f"{impl:10}", reason or f"relative RMSE {errors_here[impl]:.1e} in {dtype} on {device.type}")

# %% [markdown]
# ## Profile
#
# On an NPU torch_npu's profiler writes a folder; `kernel_details.csv` in it has every kernel with its time,
# and `trace_view.json` opens in a trace viewer. Compilation comes first, so warm up. What to look for: the
# launches of the picture above and no others, and a time near bytes over the memory's rate. Elsewhere
# torch's own profiler shows the operators of the fallback. (The lines for the NPU are written from its
# documentation.)


# %%
def profile(call, folder, calls=5):
    """Profiles warm calls; on an NPU into the folder, elsewhere returns microseconds a call by operator."""
    for _ in range(3):
        call()
    if device.type == "npu":
        import torch_npu

        kinds = torch_npu.profiler.ProfilerActivity
        profiler = torch_npu.profiler.profile(
            activities=[kinds.CPU, kinds.NPU],
            on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(str(folder)),
        )
    else:
        kinds = torch.profiler.ProfilerActivity
        profiler = torch.profiler.profile(activities=[kinds.CUDA if device.type == "cuda" else kinds.CPU])
    with profiler:
        for _ in range(calls):
            call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
    if device.type == "npu":
        return {}
    own = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    times = {event.key: getattr(event, own) / calls for event in profiler.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


operators = profile(lambda: kda(*here), ROOT / "build" / "npu_profile")
for name, microseconds in list(operators.items())[:6]:
    print(f"{microseconds:9.1f} µs  {name}")

# %% [markdown]
# ## Report back
#
#     make report                 # or: python benchmarks/device_report.py
#
# runs the laws and a benchmark on the device here and writes one file, `build/report.json`: versions and
# devices, what serves and why the rest does not, each law's outcome with its error and its bound, times. A
# kernel that crashes its process or never answers is an entry, and the rest goes on. Read it, then send it
# to whoever keeps the repository that you have this from: nothing of the machine is in it but what messages
# of errors say. Where an NPU has no float64, the laws of pure torch in float64 fail there, and say so.
#
# Here it runs for a few laws. `emulated` in the legend means that a kernel ran on the emulator, not on a
# device.

# %%
chosen = "agrees and (l2_norm or kda_step)" if SMALL else "agrees and not layer"
library = str(Path(kda_fn.__file__).parents[1])
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "report.json")
    command = [sys.executable, "benchmarks/device_report.py", "--device", device.type, "--quick"]
    subprocess.run(
        [*command, "--out", str(path), "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([library, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        check=True,
    )
    report = json.loads(path.read_text())
laws = report["laws"]["entries"]
outcomes = sorted({entry["outcome"] for entry in laws})
print({outcome: sum(entry["outcome"] == outcome for entry in laws) for outcome in outcomes})
print("ended early:", {part: report[part]["ended"] for part in ("primitives", "laws", "benchmark")})

# %%
fig, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
names = list(dict.fromkeys(entry["law"] for entry in laws))
styles = {
    "reference": ("#0072B2", "o", -0.2),
    "fallback": ("#E69F00", "s", 0),
    "triton": ("#009E73", "^", 0.2),
}
for impl, (color, marker, shift) in styles.items():
    ran = [entry for entry in laws if entry["impl"] == impl and "error" in entry]
    where = "emulated" if any(entry["emulated"] for entry in ran) else device.type
    ax.semilogx(
        [entry["error"] / entry["bound"] for entry in ran],
        [names.index(entry["law"]) + shift for entry in ran],
        color=color,
        marker=marker,
        linestyle="",
        markersize=5,
        label=f"{impl}, {where}" if ran else f"{impl}: did not run",
    )
ax.axvline(1, color="#D55E00", linestyle="--")
ax.text(0.9, -0.62, "the law", color="#D55E00", ha="right", va="center")
ax.set_yticks(range(len(names)), names)
ax.set_ylim(len(names) - 0.5, -0.9)
ax.set(
    title="A report's laws: each dot a primitive, its worst result",
    xlabel="error over what it may be",
)
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
plt.show()
