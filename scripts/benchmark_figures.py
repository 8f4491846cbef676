"""What do the numbers of scripts/benchmark.py look like? Figures, drawn from the JSON record alone.

<stem>.png: time against T and against H, ours, FLA's Triton kernels and the floor.
<stem>-rows.png: speed-up over FLA, and fraction of the floor, of every row that has a goal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator  # noqa: E402

# Okabe and Ito's palette, told apart without colour by marker and line, too.
OURS = dict(color="#0072B2", marker="o", linestyle="-", label="fla-kda-backend")
FLA = dict(color="#D55E00", marker="s", linestyle="--", label="FLA (Triton)")
FLOOR = dict(color="#555555", marker="", linestyle=":", label="memory floor")
GATES = {
    "short": dict(color="#0072B2", marker="o", label="short memory"),
    "long": dict(color="#E69F00", marker="s", label="long memory"),
    "softplus": dict(color="#009E73", marker="^", label="softplus gate"),
}
GATE_OFFSET = {"short": -0.2, "long": 0.0, "softplus": 0.2}
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "savefig.dpi": 150,
}


def draw(path: Path) -> list[Path]:
    """Draw the figures of the record at `path` beside it; returns where they are. Missing times are left out."""
    records = json.loads(path.read_text())
    written = []
    with plt.rc_context(STYLE):
        for suffix, figure in ((".png", draw_sweeps(records)), ("-rows.png", draw_rows(records))):
            if figure is None:
                continue
            target = path.with_name(path.stem + suffix)
            figure.savefig(target, bbox_inches="tight", facecolor="white")
            plt.close(figure)
            written.append(target)
    return written


def provenance(records: list[dict]) -> str:
    return ", ".join(sorted({f"{record['gpu']}, {record['date']}" for record in records}))


def compact(number: float, _=None) -> str:
    """1024 -> 1k, 1048576 -> 1M, others as they are."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if number >= unit and number % unit == 0:
            return f"{number / unit:.0f}{letter}"
    return f"{number:g}"


def plain(number: float, _=None) -> str:
    return f"{number:g}"


# --- Time against T and H ---------------------------------------------------------------------------------------------


def draw_sweeps(records: list[dict]):
    """None where no sweep has two points."""
    sweeps = [x for x in records if (x["B"], x["seqlens"], x["gate"], x["call"]) == (1, None, "short", "k3")]
    sweeps = [x for x in sweeps if x["ours_ms"] is not None]
    panels = [("T", "tokens T", f"H = {group[0]['H']}", group) for group in largest_groups(sweeps, "H", 2)]
    panels += [("H", "heads H", f"T = {group[0]['T']}", group) for group in largest_groups(sweeps, "T", 1)]
    if not panels:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.0), squeeze=False, layout="constrained")
    for axis, (variable, name, title, points) in zip(axes[0], panels, strict=True):
        points = sorted(points, key=lambda record: record[variable])
        for field, style in (("fla_ms", FLA), ("ours_ms", OURS), ("floor_ms", FLOOR)):
            timed = [record for record in points if record[field] is not None]
            axis.plot([x[variable] for x in timed], [x[field] for x in timed], **style)
        axis.set(xscale="log", yscale="log", xlabel=name, title=title)
        axis.xaxis.set_major_locator(FixedLocator([record[variable] for record in points]))
        axis.xaxis.set_major_formatter(FuncFormatter(compact))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(plain))
    axes[0][0].set_ylabel("time of a call (ms)")
    handles = [Line2D([], [], **style) for style in (FLA, OURS, FLOOR)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.suptitle(f"KDA forward, bf16, K = V = 128, states in and out ({provenance(records)})", fontsize=11)
    return figure


def largest_groups(records: list[dict], by: str, count: int) -> list[list[dict]]:
    """The `count` largest groups of two or more records that share `by`, in its order."""
    groups: dict[int, list[dict]] = {}
    for record in records:
        groups.setdefault(record[by], []).append(record)
    largest = sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)[:count]
    return sorted(largest, key=lambda group: group[0][by])


# --- Row by row -------------------------------------------------------------------------------------------------------


def row_label(record: dict) -> str:
    """"8 × 2k, H 32" for dense calls, "packed 256 × 32, H 32" for equal sequences, their number for uneven ones."""
    lengths = record["seqlens"]
    if lengths is None:
        shape = f"{record['B']} × {compact(record['T'])}"
    elif len(set(lengths)) == 1:
        shape = f"packed {len(lengths)} × {compact(lengths[0])}"
    else:
        shape = f"packed {len(lengths)} uneven, {compact(record['T'])}"
    return f"{shape}, H {record['H']}" + (", Kimi-Linear" if record["call"] == "kimi_linear" else "")


def draw_rows(records: list[dict]):
    """None where no row with a goal has been timed."""
    timed = [record for record in records if record["goal_ms"] is not None and record["ours_ms"] is not None]
    if not timed:
        return None
    rows: dict[str, list[dict]] = {}
    for record in timed:
        rows.setdefault(row_label(record), []).append(record)

    height = 1.6 + 0.42 * len(rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, height), sharey=True, layout="constrained")
    speedups = draw_dots(left, rows, lambda x: None if x["fla_ms"] is None else x["fla_ms"] / x["ours_ms"])
    left.axvline(1, color="#555555", linewidth=1)
    left.set(xscale="log", xlabel="speed-up over FLA's Triton kernels (right is faster)")
    low, high = min([*speedups, 1]), max([*speedups, 2])
    ticks = [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    left.xaxis.set_major_locator(FixedLocator(ticks))
    left.xaxis.set_minor_locator(NullLocator())
    left.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}×"))
    left.set_xlim(ticks[0] / 1.1, ticks[-1] * 1.1)
    for y, group in enumerate(rows.values()):
        if all(record["fla_ms"] is None for record in group):
            left.text(1.06, y, "FLA not timed", va="center", fontsize=8, color="#777777", style="italic")

    draw_dots(right, rows, lambda x: x["floor_ms"] / x["ours_ms"])
    for y, group in enumerate(rows.values()):
        goal = group[0]["floor_ms"] / group[0]["goal_ms"]
        right.plot([goal, goal], [y - 0.36, y + 0.36], color="black", linewidth=1.6, solid_capstyle="butt")
    right.set(xlabel="fraction of the memory floor (100% = memory traffic alone)", xlim=(0, 1.02))
    right.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:.0%}"))

    left.set_yticks(range(len(rows)), list(rows))
    left.set_ylim(len(rows) - 0.5, -0.5)
    for axis in (left, right):
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        for y in range(0, len(rows), 2):
            axis.axhspan(y - 0.5, y + 0.5, color="#f4f4f4", zorder=0)
    handles = [Line2D([], [], linestyle="", **style) for style in GATES.values()]
    goal_style = dict(color="black", marker="|", markersize=10, markeredgewidth=1.6, linestyle="", label="goal")
    handles.append(Line2D([], [], **goal_style))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(f"KDA forward, row by row ({provenance(records)})", fontsize=11)
    return figure


def draw_dots(axis, rows: dict[str, list[dict]], value: Callable[[dict], float | None]) -> list[float]:
    """A dot for each record whose value is known, by gate; returns the values."""
    values = []
    for y, group in enumerate(rows.values()):
        for record in group:
            x = value(record)
            if x is None:
                continue
            style = GATES[record["gate"]]
            axis.plot(x, y + GATE_OFFSET[record["gate"]], linestyle="", color=style["color"], marker=style["marker"])
            values.append(x)
    return values
