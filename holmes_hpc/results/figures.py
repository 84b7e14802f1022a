"""Charts of runs and of their steps, readable on phones and in print: hatches and markers repeat what colours show.

Each function takes tables of the loader or of `compare` and returns a matplotlib Figure, which :func:`svg` converts."""

import io
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import has_value
from holmes_hpc.results.compare import SAME_WORK, labels, scaled
from holmes_hpc.results.tables import as_text

# Okabe and Ito's colours are safe for colour-blind readers; their order also varies lightness, for black and white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", (0, (1, 1)))
WIDTH = 4.6  # inches
MAX_BARS = 12  # bars of a figure
MAX_LABEL = 52  # characters above a bar
STYLE = Path(__file__).with_suffix(".mplstyle")


def _axes(height: float) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.add_subplot()


def svg(figure: Figure) -> str:
    """Return the text of an <svg> element with the figure. Equal figures have equal texts."""
    buffer = io.StringIO()
    with matplotlib.rc_context(fname=STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _bar_style(index: int) -> dict[str, Any]:
    colour, hatch = COLOURS[index % len(COLOURS)], HATCHES[index % len(HATCHES)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}


def _point_style(index: int) -> dict[str, Any]:
    return {"marker": MARKERS[index % len(MARKERS)], "color": COLOURS[index % len(COLOURS)]}


def _legend(figure: Figure, handles: Any = None, columns: int = 1) -> None:
    """Draw the legend below the first axes, where it hides nothing."""
    handles = handles or figure.axes[0].get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)


def _bars(
    labels: Sequence[str],
    rows: Sequence[Sequence[float]],
    names: Sequence[str] = ("",),
    end: str = "{:.3g}",
    bounds: Sequence[tuple[float, float]] = (),
    *,
    xlabel: str,
    title: str,
) -> Figure:
    """Draw horizontal bars from top to bottom, each below its label, so that long labels need no margin.
    `rows`: lengths of the stacked parts of each bar; `names`: of the parts, for the legend; `end`: format of the length
    after a bar; `bounds`: interval (low, high) of each bar."""
    has_legend = len(names) > 1
    figure, axes = _axes((1.9 if has_legend else 0.9) + 0.62 * max(1, len(rows)))
    extents = [float(np.nansum(parts)) for parts in rows] + [high for _, high in bounds if has_value(high)]
    longest = max(extents, default=1.0) or 1.0
    for position, (text, parts) in enumerate(zip(distinct(labels), rows, strict=True)):
        offset = 0.0
        for part_index, value in enumerate(parts):
            if has_value(float(value)):
                axes.barh(position, value, 0.5, left=offset, **_bar_style(part_index))
                offset += float(value)
        extent = offset
        if bounds and all(map(has_value, bounds[position])):
            low, high = bounds[position]
            errors = [[max(0, offset - low)], [max(0, high - offset)]]
            axes.errorbar(offset, position, xerr=errors, color="black", capsize=3)
            extent = max(offset, high)
        axes.text(0, position - 0.32, _plain(text), va="bottom", ha="left", fontsize=10, in_layout=False)
        axes.text(extent + 0.02 * longest, position, end.format(offset), va="center", in_layout=False)
    axes.set(xlim=(0, 1.25 * longest), ylim=(len(rows) - 0.5, -0.8), yticks=[], xlabel=xlabel, title=title)
    axes.spines["left"].set_visible(False)
    if has_legend:
        _legend(figure, [Patch(**_bar_style(i), label=name) for i, name in enumerate(names)], 2)
    return figure


def distinct(labels: Sequence[str]) -> list[str]:
    """Return the labels shortened to at most MAX_LABEL characters, but still distinct.
    If any label is longer, the prefix that all share is cut. Labels that are still too long lose their middle."""
    if all(len(text) <= MAX_LABEL for text in labels):
        return list(labels)
    common = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    shared = "".join(letters[0] for letters in common) if len(labels) > 1 else ""
    shared = shared[: max(shared.rfind(" "), shared.rfind(",")) + 1]
    suffixes = [f"…{text[len(shared) :]}" if shared else text for text in labels]
    head, tail = MAX_LABEL // 2, MAX_LABEL // 2 + 1 - MAX_LABEL
    shortened = [text if len(text) <= MAX_LABEL else f"{text[:head]}…{text[tail:]}" for text in suffixes]
    numbered = [f"{number}: {text[: MAX_LABEL - 5]}" for number, text in enumerate(shortened, 1)]
    return [t if shortened.count(t) == 1 else unique for t, unique in zip(shortened, numbered, strict=True)]


def _plain(name: object) -> str:
    """Return `name` as a text that matplotlib shows unchanged.

    matplotlib would parse `$` as a formula, and would leave a name that starts with `_` out of the legend."""
    text = str(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def omission_note(cells: pd.DataFrame, max_bars: int = MAX_BARS) -> str:
    """Return a text that names which of `cells` a figure shows; empty if it shows all."""
    return f"the fastest {max_bars} of {len(cells)} settings" if len(cells) > max_bars else ""


def throughput(cells: pd.DataFrame, max_bars: int = MAX_BARS) -> Figure:
    """Draw the samples/s of `cells` (of `compare`), with their intervals; only the first `max_bars` are drawn."""
    head, omitted = cells.head(max_bars), omission_note(cells, max_bars)
    bounds = list(zip(head["samples_low"], head["samples_high"], strict=True))
    title = "Throughput by NIC environment" + (f"\n{omitted}" if omitted else "")
    rates = head[["samples_per_s"]].to_numpy().tolist()
    return _bars(labels(head), rates, bounds=bounds, xlabel="throughput, samples/s", title=title)


def ablation(cells: pd.DataFrame, reference: Any) -> Figure:
    """Draw every cell's throughput in percent of the complete system's, which is the cell with index `reference`."""
    shares = (100 * cells[["samples_per_s"]] / float(cells.loc[reference, "samples_per_s"])).to_numpy().tolist()
    xlabel, title = "throughput, % of the complete system", "Contribution of each part"
    figure = _bars(list(map(str, cells["system"])), shares, end="{:.0f}%", xlabel=xlabel, title=title)
    figure.axes[0].axvline(100, color="black", linestyle=":", linewidth=1)
    return figure


def scaling(cells: pd.DataFrame) -> Figure:
    """Draw samples/s over the number of nodes, one line for each group of :func:`scaled`.

    Dotted lines show linear scaling from the smallest number of nodes."""
    groups = scaled(cells)
    keys = [key for key in SAME_WORK if key not in ("nodes", "sizes")]
    differing_keys = [key for key in keys if len({as_text(first_cell[key]) for first_cell, _ in groups}) > 1]
    figure, axes = _axes(3.2 + 0.25 * len(groups))
    for index, (first_cell, group) in enumerate(groups):
        names = [first_cell[key] for key in ("environment", "system", "varied")]
        parts = [str(name) for name in names if has_value(name) and name]
        parts += [f"{key}={as_text(first_cell[key])}" for key in differing_keys]
        samples_per_s = group.groupby("nodes")["samples_per_s"].max()
        nodes, style = samples_per_s.index.to_numpy(dtype=float), _point_style(index)
        axes.plot(nodes, samples_per_s.to_numpy(), label=_plain(", ".join(parts)), **style)
        axes.plot(nodes, samples_per_s.iloc[0] * nodes / nodes[0], color=style["color"], linestyle=":", linewidth=1)
    axes.set(xlabel="nodes", ylabel="throughput, samples/s", title="Scaling (dotted: linear)", ylim=(0, None))
    if groups:
        axes.set_xticks(sorted({int(n) for _, group in groups for n in group["nodes"].dropna()}))
        _legend(figure)
    return figure


def breakdown(labels: Sequence[str], rows: Sequence[Mapping[Any, float]]) -> Figure:
    """Draw the parts of a step as one stacked bar for each of `rows` ({part: seconds}), a stage or a setting."""
    values = [[float(row[part]) if has_value(row.get(part)) else np.nan for part in PARTS] for row in rows]
    names = [PART_NAMES[p] for p in PARTS]
    return _bars(labels, values, names, "{:.3g} s", xlabel="time in a step, s", title="Time per part of a step")


def nic_bytes(traffic: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the bytes sent per step by network: planned payload, and NIC counters if there are any.

    `traffic`: the result of :func:`holmes_hpc.results.tables.traffic`."""
    megabytes = {}
    for row in traffic:
        megabytes[f"{row['kind']}: planned"] = float(row["planned_bytes"] or 0) / 1e6
        if has_value(row["counted_bytes"]):
            megabytes[f"{row['kind']}: counted, with headers"] = float(row["counted_bytes"]) / 1e6
    rows, xlabel = [[value] for value in megabytes.values()], "sent in a step by all nodes, MB (1e6 bytes)"
    return _bars(list(megabytes), rows, xlabel=xlabel, title="Bytes by network")


def predicted_measured(runs: pd.DataFrame) -> Figure:
    """Draw predicted against measured step time, one point per run, and a band of 10% around equality."""
    figure, axes = _axes(4.2)
    usable = runs[runs["predicted_step_time_s"].notna() & runs["step_time_s"].notna()]
    for index, (name, group) in enumerate(usable.groupby("environment", sort=False)):
        style = {**_point_style(index), "edgecolor": "black", "linewidth": 0.5, "zorder": 3}
        axes.scatter(group["step_time_s"], group["predicted_step_time_s"], label=_plain(name), **style)
    if len(usable):
        ends = np.array([0.0, 1.15 * max(usable["step_time_s"].max(), usable["predicted_step_time_s"].max())])
        axes.plot(ends, ends, color="black", linewidth=1)
        axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#dddddd", zorder=0)
        axes.set(xlim=ends, ylim=ends)
        _legend(figure, columns=2)
    title = "Predicted against measured (band: 10%)"
    axes.set(xlabel="measured step time, s", ylabel="predicted step time, s", title=title)
    return figure


def loss(steps: pd.DataFrame, by: str = "step", tokens: Mapping[str, float] | None = None) -> Figure:
    """Draw the loss of every run in `steps`, with validation losses as markers and restarts as vertical lines.

    `by`: the axis: step, tokens, or time (without waits between attempts); `tokens`: {run: tokens per step}."""
    figure, axes = _axes(3.2 + (0.25 * steps["run"].nunique() if steps["run"].nunique() <= 8 else 0))
    for index, (name, run) in enumerate(steps.groupby("run", observed=True, sort=False)):
        progress, style = _progress(run, by, (tokens or {}).get(str(name), 1.0)), _point_style(index)
        colour = style["color"]
        axes.plot(progress, run["loss"], label=_plain(name), linewidth=1.4, color=colour, linestyle=LINES[index % 4])
        validated = run["validation_loss"].notna() if "validation_loss" in run else np.zeros(len(run), dtype=bool)
        if validated.any():
            hollow = {**style, "linestyle": "none", "markersize": 5, "markerfacecolor": "none", "label": "_validation"}
            axes.plot(progress[validated], run["validation_loss"][validated], **hollow)
        for restart in progress[run["attempt"].diff() > 0]:
            axes.axvline(restart, color=colour, linestyle=":", linewidth=1)
    xlabel, title = "time of the run, minutes" if by == "time" else by, "Loss (markers: validation; dotted: restarts)"
    axes.set(xlabel=xlabel, ylabel="loss, nats a token", title=title)
    if 1 < steps["run"].nunique() <= 8:
        _legend(figure)
    return figure


def _progress(run: pd.DataFrame, by: str, tokens: float) -> pd.Series:
    """Return the position of each of a run's steps on the horizontal axis. `tokens`: tokens per step."""
    if by != "time":
        return run["step"] * (tokens if by == "tokens" else 1.0)
    elapsed_s = run["time"].diff().clip(lower=0)
    is_wait = (run["attempt"].diff() > 0) & (elapsed_s > run["step_time_s"])  # time in the queue, not in training
    return elapsed_s.mask(is_wait, run["step_time_s"]).fillna(run["step_time_s"]).cumsum() / 60


def step_times(steps: pd.DataFrame) -> Figure:
    """Draw the step times of one run, with hollow markers for warm-up steps."""
    figure, axes = _axes(2.8)
    for is_warmup, face, label in ((True, "none", "warm-up"), (False, COLOURS[0], "counted")):
        part = steps[steps["warmup"] == is_warmup]
        axes.scatter(part["step"], part["step_time_s"], s=14, facecolor=face, edgecolor=COLOURS[0], label=label)
    longest = steps["step_time_s"].max() if len(steps) else 1.0
    ylim = (0, 1.05 * longest if has_value(longest) else 1.0)
    axes.set(xlabel="step", ylabel="step time, s", title="Step times", ylim=ylim)
    axes.legend(frameon=False)
    return figure


def timeline(measured: pd.DataFrame, simulated: pd.DataFrame | None = None) -> Figure:
    """Draw one step of the pipeline, a row per stage: measured above, simulated below, on the same time axis.

    Forward passes are light, backward passes dark and hatched; in the gaps, a stage waits. `measured`: the result of
    :func:`holmes_hpc.results.timeline.typical_step`; `simulated`: a table with the same columns."""
    panels = [("measured", measured)] + ([("simulated", simulated)] if simulated is not None and len(simulated) else [])
    stages = int(max((frame["stage"].max() for _, frame in panels if len(frame)), default=0)) + 1
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + len(panels) * (0.5 + 0.4 * stages)), layout="constrained")
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    styles = {"forward": {"facecolor": COLOURS[4], "hatch": ""}, "backward": {"facecolor": COLOURS[0], "hatch": "////"}}
    if any((frame["kind"] == "weight").any() for _, frame in panels):
        styles["weight"] = {"facecolor": COLOURS[2], "hatch": ""}
    for axes, (name, frame) in zip(all_axes, panels, strict=True):
        for kind, style in styles.items():
            part = frame[frame["kind"] == kind]
            spans, start = part["end_s"] - part["start_s"], part["start_s"]
            edge = {"edgecolor": "black", "linewidth": 0.4}
            axes.barh(part["stage"], spans, 0.7, left=start, label=kind, **edge, **style)
        axes.set(ylim=(stages - 0.5, -0.5), yticks=range(stages), ylabel="stage", title=f"Pipeline, {name}")
    all_axes[-1].set_xlabel("time in the step, s")
    _legend(figure, columns=len(styles))
    return figure
