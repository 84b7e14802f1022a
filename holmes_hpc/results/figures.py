"""Charts of runs and of their steps, narrow enough for a phone and a column of print: hatches and markers say what
colours say, every axis has its unit.

Each function takes tables of the loader or of `compare` and gives a matplotlib Figure; :func:`svg` makes text of it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import known
from holmes_hpc.results.compare import SAME_WORK, entries, labels, scaled
from holmes_hpc.results.tables import word

# Okabe and Ito's colours: told apart by the colour-blind; their order also differs in lightness, for black and white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", (0, (1, 1)))
WIDTH = 4.6  # inches
MOST_BARS = 12  # bars of a figure
LABEL = 52  # characters above a bar
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "holmes",
}


def _axes(height: float) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.add_subplot()


def svg(figure: Figure) -> str:
    """The figure as an <svg> element; equal figures give equal text."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _look(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[index % len(HATCHES)],
        "edgecolor": "black",
        "linewidth": 0.6,
    }


def _legend(axes: Axes, handles: Any = None, columns: int = 1) -> None:
    """Below the axes, where it hides nothing."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(
        handles=handles or axes.get_legend_handles_labels()[0], loc="outside lower center", ncols=columns, frameon=False
    )


def _bars(
    axes: Axes,
    labels: Sequence[str],
    rows: Sequence[Sequence[float]],
    names: Sequence[str],
    ends: Sequence[str],
    bounds: Sequence[tuple[float, float]] = (),
) -> None:
    """Horizontal bars from top to bottom, each under its label, so that long labels need no margin; `rows`: stacked
    parts."""
    labels = distinct(labels)
    reaches = [float(np.nansum(parts)) for parts in rows] + [high for _, high in bounds if known(high)]
    most = max(reaches, default=1.0) or 1.0
    for at, (text, parts, end) in enumerate(zip(labels, rows, ends, strict=True)):
        left = 0.0
        for index, value in enumerate(parts):
            if known(float(value)):
                axes.barh(at, value, 0.5, left=left, **_look(index))
                left += float(value)
        reach = left
        if bounds and all(map(known, bounds[at])):
            low, high = bounds[at]
            axes.errorbar(left, at, xerr=[[max(0, left - low)], [max(0, high - left)]], color="black", capsize=3)
            reach = max(left, high)
        axes.text(0, at - 0.32, _plain(text), va="bottom", ha="left", fontsize=10, in_layout=False)
        axes.text(reach + 0.02 * most, at, end, va="center", in_layout=False)
    axes.set(xlim=(0, 1.25 * most), ylim=(len(rows) - 0.5, -0.8), yticks=[])
    axes.spines["left"].set_visible(False)
    if len(names) > 1:
        patches = [
            Patch(facecolor=look["color"], hatch=look["hatch"], edgecolor="black", label=name)
            for look, name in ((_look(i), name) for i, name in enumerate(names))
        ]
        _legend(axes, patches, 2)


def distinct(labels: Sequence[str], width: int = LABEL) -> list[str]:
    """Labels of at most `width` characters, of which none was cut to what another one is: what all begin with goes
    first, then the middle."""
    long = [text for text in labels if len(text) > width]
    if not long:
        return list(labels)
    alike = takewhile(lambda at: len({text[at : at + 1] for text in labels}) == 1, range(min(map(len, labels))))
    shared = labels[0][: len(list(alike))] if len(labels) > 1 else ""
    shared = shared[: max(shared.rfind(" "), shared.rfind(",")) + 1]
    cut = [f"…{text[len(shared) :]}" if shared else text for text in labels]
    made = [text if len(text) <= width else f"{text[: width // 2]}…{text[-(width - width // 2 - 1) :]}" for text in cut]
    return [text if made.count(text) == 1 else f"{at + 1}: {text[: width - 5]}" for at, text in enumerate(made)]


def _plain(name: object) -> str:
    """A name as matplotlib prints it: `$` begins no formula, and a leading `_` hides nothing from a legend."""
    text = str(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def fastest(cells: pd.DataFrame, most: int = MOST_BARS) -> str:
    """What of `cells` a figure leaves out, in words; empty where it shows all."""
    return f"the fastest {most} of {len(cells)} settings" if len(cells) > most else ""


def throughput(cells: pd.DataFrame, most: int = MOST_BARS) -> Figure:
    """Samples/s by NIC environment and system (of `compare`'s cells), with the interval over their runs: of the fastest
    `most`, which the title says where there are more."""
    rows = [c for _, c in entries(cells.head(most))]
    figure, axes = _axes(0.9 + 0.62 * max(1, len(rows)))
    _bars(
        axes,
        labels(cells.head(most)),
        [[c["samples_per_s"]] for c in rows],
        ["samples/s"],
        [f"{c['samples_per_s']:.3g}" for c in rows],
        [(c["samples_low"], c["samples_high"]) for c in rows],
    )
    left_out = fastest(cells, most)
    axes.set(
        xlabel="throughput, samples/s", title="Throughput by NIC environment" + (f"\n{left_out}" if left_out else "")
    )
    return figure


def ablation(cells: pd.DataFrame, reference: Any) -> Figure:
    """Throughput of every cell in percent of the cell `reference` (a label of `cells`' index): what each part is
    worth."""
    base = float(cells.loc[reference, "samples_per_s"])
    rows = [c for _, c in entries(cells)]
    figure, axes = _axes(0.9 + 0.62 * max(1, len(rows)))
    shares = [100 * c["samples_per_s"] / base for c in rows]
    _bars(axes, [str(c["system"]) for c in rows], [[s] for s in shares], ["%"], [f"{s:.0f}%" for s in shares])
    axes.axvline(100, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="throughput, % of the complete system", title="What each part is worth")
    return figure


def scaling(cells: pd.DataFrame) -> Figure:
    """Samples/s over nodes, one line per setting that did the same work on several node counts, and what linear scaling
    from its smallest would give."""
    groups = scaled(cells)
    told = [
        key for key in SAME_WORK if key not in ("nodes", "sizes") and len({word(first[key]) for first, _ in groups}) > 1
    ]
    figure, axes = _axes(3.2 + 0.25 * len(groups))
    for index, (first, group) in enumerate(groups):
        name = [first[key] for key in ("environment", "system", "varied") if known(first[key]) and first[key]]
        name += [f"{key}={word(first[key])}" for key in told]
        line = group.groupby("nodes")["samples_per_s"].max()
        nodes = line.index.to_numpy(dtype=float)
        axes.plot(
            nodes,
            line.to_numpy(),
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=_plain(", ".join(map(str, name))),
        )
        axes.plot(
            nodes, line.iloc[0] * nodes / nodes[0], color=COLOURS[index % len(COLOURS)], linestyle=":", linewidth=1
        )
    axes.set(xlabel="nodes", ylabel="throughput, samples/s", title="Scaling (dotted: linear)", ylim=(0, None))
    if groups:
        axes.set_xticks(sorted({int(n) for _, group in groups for n in group["nodes"].dropna()}))
        _legend(axes)
    return figure


def breakdown(labels: Sequence[str], rows: Sequence[Mapping[str, float]]) -> Figure:
    """Stacked parts of a step: one bar per stage, or per setting."""
    figure, axes = _axes(1.9 + 0.62 * max(1, len(rows)))
    values = [[float(row[part]) if known(row.get(part)) else np.nan for part in PARTS] for row in rows]
    _bars(axes, labels, values, [PART_NAMES[p] for p in PARTS], [f"{np.nansum(v):.3g} s" for v in values])
    axes.set(xlabel="time in a step, s", title="Where a step goes")
    return figure


def nic_bytes(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """Bytes of a step by NIC kind: planned payload, and counted by the NICs (entries of `tables.traffic`)."""
    labels, values, ends = [], [], []
    for e in entries:
        for what, key in (("planned", "planned_bytes"), ("counted, with headers", "counted_bytes")):
            if key == "counted_bytes" and not known(e[key]):
                continue  # nobody counted
            labels.append(f"{e['kind']}: {what}")
            values.append([float(e[key] or 0) / 1e6])
            ends.append(f"{float(e[key] or 0) / 1e6:.3g}")
    figure, axes = _axes(0.9 + 0.62 * max(1, len(labels)))
    _bars(axes, labels, values, ["MB"], ends)
    axes.set(xlabel="sent in a step by all nodes, MB (1e6 bytes)", title="Bytes by NIC kind")
    return figure


def predicted_measured(runs: pd.DataFrame) -> Figure:
    """Predicted over measured step time, one point per run; the band is 10% on either side."""
    figure, axes = _axes(4.2)
    kept = runs[runs["predicted_step_time_s"].notna() & runs["step_time_s"].notna()]
    for index, (name, group) in enumerate(kept.groupby("environment", sort=False)):
        axes.scatter(
            group["step_time_s"],
            group["predicted_step_time_s"],
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            edgecolor="black",
            linewidth=0.5,
            zorder=3,
            label=_plain(name),
        )
    if len(kept):
        ends = np.array([0.0, 1.15 * max(kept["step_time_s"].max(), kept["predicted_step_time_s"].max())])
        axes.plot(ends, ends, color="black", linewidth=1)
        axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#dddddd", zorder=0)
        axes.set(xlim=ends, ylim=ends)
        _legend(axes, columns=2)
    axes.set(
        xlabel="measured step time, s", ylabel="predicted step time, s", title="Predicted against measured (band: 10%)"
    )
    return figure


def loss(steps: pd.DataFrame, by: str = "step", tokens: Mapping[str, float] | None = None) -> Figure:
    """Loss of every run in `steps`, and its validation loss as markers; a vertical line where a later attempt began.
    `by`: step, tokens (`tokens`: of a step, for each run) or time: each run's own since it began, waits between
    attempts left out."""
    figure, axes = _axes(3.2 + (0.25 * steps["run"].nunique() if steps["run"].nunique() <= 8 else 0))
    for index, (name, run) in enumerate(steps.groupby("run", observed=True, sort=False)):
        at, colour = _progress(run, by, (tokens or {}).get(str(name), 1.0)), COLOURS[index % len(COLOURS)]
        axes.plot(at, run["loss"], label=_plain(name), linewidth=1.4, color=colour, linestyle=LINES[index % 4])
        taken = run["validation_loss"].notna() if "validation_loss" in run else np.zeros(len(run), dtype=bool)
        if taken.any():
            axes.plot(
                at[taken],
                run["validation_loss"][taken],
                color=colour,
                linestyle="none",
                markersize=5,
                marker=MARKERS[index % len(MARKERS)],
                markerfacecolor="none",
                label="_validation",
            )
        for begun in at[run["attempt"].diff() > 0]:
            axes.axvline(begun, color=colour, linestyle=":", linewidth=1)
    axes.set(
        xlabel={"step": "step", "tokens": "tokens"}.get(by, "time of the run, minutes"),
        ylabel="loss, nats a token",
        title="Loss (markers: validation; dotted: restarts)",
    )
    if 1 < steps["run"].nunique() <= 8:
        _legend(axes)
    return figure


def _progress(run: pd.DataFrame, by: str, tokens: float) -> pd.Series:
    """Where a run's steps are on the axis."""
    if by != "time":
        return run["step"] * (tokens if by == "tokens" else 1.0)
    passed = run["time"].diff().clip(lower=0)
    waits = (run["attempt"].diff() > 0) & (passed > run["step_time_s"])  # in a queue, not in training
    return passed.mask(waits, run["step_time_s"]).fillna(run["step_time_s"]).cumsum() / 60


def step_times(steps: pd.DataFrame) -> Figure:
    """Step time over steps of one run; the steps left out as warm-up are hollow."""
    figure, axes = _axes(2.8)
    for warm, face in ((True, "none"), (False, COLOURS[0])):
        part = steps[steps["warmup"] == warm]
        axes.scatter(
            part["step"],
            part["step_time_s"],
            s=14,
            facecolor=face,
            edgecolor=COLOURS[0],
            label="warm-up" if warm else "counted",
        )
    most = steps["step_time_s"].max() if len(steps) else 1.0
    axes.set(xlabel="step", ylabel="step time, s", title="Step times", ylim=(0, 1.05 * most if known(most) else 1.0))
    axes.legend(frameon=False)
    return figure


def timeline(measured: pd.DataFrame, simulated: pd.DataFrame | None = None) -> Figure:
    """One step of the pipeline, a row per stage: measured above, simulated below, on one time axis. Forward passes are
    light, backward passes dark and hatched; gaps are waiting."""
    panels = [("measured", measured)] + ([("simulated", simulated)] if simulated is not None and len(simulated) else [])
    stages = int(max((frame["stage"].max() for _, frame in panels if len(frame)), default=0)) + 1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + len(panels) * (0.5 + 0.4 * stages)), layout="constrained")
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    looks = {"forward": {"facecolor": COLOURS[4], "hatch": ""}, "backward": {"facecolor": COLOURS[0], "hatch": "////"}}
    for axes, (name, frame) in zip(all_axes, panels, strict=True):
        for kind, look in looks.items():
            part = frame[frame["kind"] == kind]
            axes.barh(
                part["stage"],
                part["end_s"] - part["start_s"],
                0.7,
                left=part["start_s"],
                edgecolor="black",
                linewidth=0.4,
                label=kind,
                **look,
            )
        axes.set(ylim=(stages - 0.5, -0.5), yticks=range(stages), ylabel="stage", title=f"Pipeline, {name}")
    all_axes[-1].set_xlabel("time in the step, s")
    _legend(all_axes[0], columns=2)
    return figure
