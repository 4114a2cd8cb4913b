"""What the GPU benchmark shows of its results: tables, the README's block, and a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from measuring import Json, table

__all__ = ["COLORS", "errors_table", "plot", "reasons", "replace_table", "report"]

Shape: TypeAlias = tuple[int, int, int]
"""B, T, H."""

COLORS = {"kda_fn": "#0072B2", "FLA": "#E69F00", "cuDNN": "#009E73", "FlashKDA": "#CC79A7"}
"""The contenders in the order in which they are shown."""
SHOWN = "random", "init", "long"


def entries(results: Json, mode: str, **wanted: Any) -> Iterator[Json]:
    """The measured cases of a mode, in order."""
    for entry in results["cases"]:
        measured = entry["mode"] == mode and "not_run" not in entry
        if measured and all(entry[key] == value for key, value in wanted.items()):
            yield entry


def best(row: Json, kind: str) -> Json | None:
    """The timing of a contender's row, eager where it was not captured, None where there is none."""
    for found in (row.get(kind, {}), row.get("eager", {})):
        if "ms" in found:
            return found
    return None


def mark(row: Json, kind: str) -> str:
    """A star at a time that is not of this kind."""
    return "" if "ms" in row.get(kind, {}) else "*"


def timed_names(found: Sequence[Json], kind: str) -> list[str]:
    """The contenders with a number in any of these cases, in the order of the colours."""
    return [name for name in COLORS if any(best(e["contenders"].get(name, {}), kind) for e in found)]


def by_shape_and_gate(results: Json, mode: str) -> dict[tuple[Shape, str], dict[str, Json]]:
    """The cases of a mode, for each shape and gate by regime."""
    groups: dict[tuple[Shape, str], dict[str, Json]] = {}
    for e in entries(results, mode):
        groups.setdefault(((e["B"], e["T"], e["H"]), e["gate"]), {})[e["regime"]] = e
    return groups


def regimes_cell(group: dict[str, Json], name: str, kind: str) -> str:
    """Milliseconds of a contender in the three regimes."""
    cells = []
    for regime in SHOWN:
        row = group[regime]["contenders"].get(name, {}) if regime in group else {}
        timed = best(row, kind)
        cells.append(f"{timed['ms']:.3g}{mark(row, kind)}" if timed else "–")
    return " / ".join(cells) if set(cells) != {"–"} else "–"


def times_table(results: Json, mode: str, kind: str) -> str:
    """Milliseconds by shape and gate; for the backward with the peak of memory."""
    groups = by_shape_and_gate(results, mode)
    names = timed_names([e for group in groups.values() for e in group.values()], kind)
    memory = [name for name in names if mode == "backward"]
    rows = []
    for (shape, gate), group in groups.items():
        row = [", ".join(map(str, shape)), gate, *(regimes_cell(group, name, kind) for name in names)]
        for name in memory:
            peaks = [e["contenders"].get(name, {}).get("peak_bytes") for e in group.values()]
            row.append(f"{max(x or 0 for x in peaks) / 1e9:.2f}" if any(peaks) else "–")
        rows.append(row)
    return table(["B, T, H", "gate", *names, *(f"{name}, GB" for name in memory)], rows, left=2)


def decode_table(results: Json, kind: str = "graph") -> str:
    """Microseconds of one token, beside the floor of moving the state."""
    found = list(entries(results, "decode"))
    names = timed_names(found, kind)
    rows = []
    for e in found:
        cells = []
        for name in names:
            row = e["contenders"].get(name, {})
            timed = best(row, kind)
            cells.append(f"{1e3 * timed['ms']:.1f}{mark(row, kind)}" if timed else "–")
        rows.append([str(e["B"]), e["gate"], *cells, f"{1e3 * e['copy_floor_ms']:.1f}"])
    return table(["B", "gate", *names, "floor"], rows, left=2)


def cached_batches(results: Json) -> list[int]:
    """Batches whose states stay in the L2 cache from token to token."""
    l2 = results["environment"]["l2_bytes"] or 0
    return sorted({e["B"] for e in entries(results, "decode") if e["bytes_touched"] <= l2})


def errors_table(results: Json) -> str:
    """Relative RMSE of o, the final state and the worst gradient, by gate and regime."""
    found = list(entries(results, "accuracy"))
    names = [name for name in COLORS if any("errors" in e["contenders"].get(name, {}) for e in found)]
    rows = []
    for e in found:
        cells = []
        for name in names:
            row = e["contenders"].get(name, {})
            slopes = [x for x in row.get("gradients", {}).values() if isinstance(x, float)]
            numbers = [*row.get("errors", {}).values(), *([max(slopes)] if slopes else [])]
            cells.append(" / ".join(f"{x:.1e}" for x in numbers) or "–")
        rows.append([e["gate"], e["regime"], *cells])
    return table(["gate", "regime", *names], rows, left=2)


def reasons(results: Json) -> str:
    """Every reason for which a number is missing, with the number of cases."""
    counts: dict[str, int] = {}

    def note(name: str, row: Json) -> None:
        if "reason" in row:
            line = f"{name}: {row['reason']}"
            counts[line] = counts.get(line, 0) + 1

    for e in results["cases"]:
        note(e["mode"], {"reason": e["not_run"]} if "not_run" in e else {})
        for name, row in e.get("contenders", {}).items():
            note(f"{name}, {e['mode']}", row)
            note(f"{name}, graph", row.get("graph", {}))
            note(f"{name}, gradients", row.get("gradients", {}))
    return "".join(f"{count:4} x {line}\n" for line, count in counts.items())


def report(results: Json) -> str:
    """What the README shows: three tables, with date and device."""
    where, rates = results["environment"], results["ceilings"]
    versions = [f"{name} {version}" for name, version in where["versions"].items() if version]
    versions = [f"torch {where['torch']}", *versions]
    head = (
        f"One {where['device']}, {where['date'][:10]} ({', '.join(versions)}): "
        f"copy {rates['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"bf16 matmul {rates['matmul_flop_per_s'] / 1e12:.0f} TFLOP/s.\n"
        f"bf16, K = V = {results['K']}, float32 states in and out, l2 norm, gate and sigmoid included. "
        f"Milliseconds with gates {' / '.join(SHOWN)}; * is eager.\n"
    )
    absent = "".join(f"Not measured: {name} ({reason}).\n" for name, reason in results["missing"].items())
    parts = [head + absent]
    if any(entries(results, "forward")):
        parts.append("Forward, in a CUDA graph:\n\n" + times_table(results, "forward", "graph"))
    if any(entries(results, "backward")):
        parts.append(
            "Forward and backward, eager, and the peak memory:\n\n"
            + times_table(results, "backward", "eager")
        )
    if any(entries(results, "decode")):
        cached = ", ".join(str(B) for B in cached_batches(results))
        note = f" (of B = {cached} the states stay in the L2 cache)" if cached else ""
        parts.append(f"One token, in a CUDA graph, microseconds{note}:\n\n" + decode_table(results))
    return "\n".join(parts)


MARKERS = "<!-- gpu -->\n", "<!-- /gpu -->"


def replace_table(text: str, block: str) -> str:
    """The text with this block between its markers."""
    start, end = MARKERS
    found = re.findall(re.escape(start) + ".*?" + re.escape(end), text, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"the text has {len(found)} places between {start.strip()} and {end}, not one")
    return text.replace(found[0], f"{start}{block}{end}")


PANELS = (
    ("Forward, bounded gate", "forward", "graph", "bounded"),
    ("Forward, softplus gate", "forward", "graph", "softplus"),
    ("Forward and backward, softplus gate", "backward", "eager", "softplus"),
    ("One token, softplus gate", "decode", "graph", "softplus"),
)


def plot(results: Json, path: Path, regime: str = "init") -> None:
    """Bars of milliseconds on a log scale, a group for each shape, with a line at the floor of each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = [
        (title, kind, found)
        for title, mode, kind, gate in PANELS
        if (found := list(entries(results, mode, gate=gate, regime=regime))) and timed_names(found, kind)
    ]
    if not drawn:
        raise ValueError(f"there is nothing to draw: no case with gates {regime!r} was timed")
    pairs = [drawn[i : i + 2] for i in range(0, len(drawn), 2)]
    # As high as the bars of the fuller panel need.
    heights = [
        2 + 0.27 * max(len(found) * len(timed_names(found, kind)) for _, kind, found in x) for x in pairs
    ]
    figure, axes = plt.subplots(
        len(pairs), 2, figsize=(13, sum(heights) + 1), height_ratios=heights, squeeze=False
    )
    panels = list(axes.flat)
    for panel, (title, kind, found) in zip(panels, drawn, strict=False):
        _plot_panel(panel, title, kind, found)
    for panel in panels[len(drawn) :]:
        panel.axis("off")
    shown = [name for name in COLORS if any(name in timed_names(found, kind) for _, kind, found in drawn)]
    handles = [Patch(color=COLORS[name]) for name in shown]
    floor = Line2D([], [], color="black", linestyle="--", linewidth=1.5)
    where = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    figure.suptitle(f"KDA on one {where['device']}, bf16", x=0.01, ha="left", fontsize=17, weight="bold")
    inches = figure.get_figheight()
    figure.legend(
        [*handles, floor],
        [*shown, "floor: least bytes or arithmetic"],
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.4 / inches),
        ncols=len(shown) + 1,
        fontsize=13,
        frameon=False,
    )
    figure.text(
        0.01,
        0.1 / inches,
        f"Medians; forward and one token in CUDA graphs (* eager), gates as initialised, "
        f"K = V = {results['K']}.\n{where['date'][:10]}, torch {where['torch']}, {versions}.",
        fontsize=12,
        color="#444444",
    )
    figure.tight_layout(rect=(0, 0.6 / inches, 1, 1 - 0.7 / inches), h_pad=2, w_pad=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_panel(axes: Any, title: str, kind: str, found: Sequence[Json]) -> None:
    """One group of bars for each case, the first one on top, ours first in each."""
    names = timed_names(found, kind)
    height = 0.8 / len(names)
    longest = 0.0
    floors = []
    for i, e in enumerate(found):
        for j, name in enumerate(names):
            timed = best(e["contenders"].get(name, {}), kind)
            y = i - 0.4 + (j + 0.5) * height
            if timed is None:
                axes.text(0.01, y, " –", transform=axes.get_yaxis_transform(), va="center", fontsize=10)
                continue
            bar = axes.barh(y, timed["ms"], height=0.92 * height, color=COLORS[name])
            star = mark(e["contenders"][name], kind)
            axes.bar_label(bar, labels=[f"{timed['ms']:.3g}{star}"], padding=3, fontsize=11)
            longest = max(longest, timed["ms"])
        floors.append(max(e["copy_floor_ms"], e["matmul_floor_ms"]))
        axes.plot([floors[-1]] * 2, [i - 0.45, i + 0.45], color="black", linestyle="--", linewidth=1.5)
    axes.set_xscale("log")
    axes.set_xlim(min(floors) / 2, 3 * max(longest, *floors))
    axes.set_yticks(range(len(found)), [_group_label(e) for e in found])
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=14)
    axes.set_xlabel("milliseconds, log scale", fontsize=12)
    axes.tick_params(labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)


def _group_label(entry: Json) -> str:
    B, T, H = (entry[letter] for letter in "BTH")
    return f"B {B}" if entry["mode"] == "decode" else f"B {B}, T {T:,}\nH {H}"
