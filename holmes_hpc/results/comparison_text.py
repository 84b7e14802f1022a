"""Sentences about a comparison of runs: which setting is best, by how much, and why; and the values of a bar chart."""

import math
from collections.abc import Mapping
from typing import Any

from holmes_hpc.errors import counted
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import has_value
from holmes_hpc.results.compare import SAME_WORK, Comparison, completed, entries, label, labels, loss_of, work_text
from holmes_hpc.results.tables import format_interval, format_number

MAX_BARS = 12  # bars in the bar chart; only the table shows further cells
OVERLOAD = 1.5  # with emulated compute, the machine was overloaded above this ratio of measured to predicted step time


def ranking(comparison: Comparison) -> list[str]:
    """Return sentences that name the settings with the lowest, the second lowest and the highest loss."""
    cells = comparison.cells
    key = loss_of(cells)
    cells = cells[cells[key].notna()]
    if cells.empty:
        return ["No run has a loss yet."]
    names, values = labels(cells), cells[key].tolist()
    sentences = [f"Lowest {key.replace('_', ' ')}: {names[0]} with {format_number(values[0], 4)}."]
    if len(values) > 1:
        last = f"; last: {names[-1]} with {format_number(values[-1], 4)}" if len(values) > 2 else ""
        sentences.append(f"Next: {names[1]} with {format_number(values[1], 4)}{last}.")
    if comparison.runs.loc[comparison.runs[key].notna(), "steps"].nunique() > 1:
        sentences.append("The runs did not make the same number of steps.")
    return sentences


def winner(comparison: Comparison) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Return (fastest cell, cell that it is compared with) among cells that did the same work, as {column: value}.

    If cells did different work, only the largest group with the same work is used. If this group has only one cell, the
    second cell is None. Otherwise the fastest cell gets a key `ratio`, its speed-up over the second cell. If any cell
    has a completed run, cells without one are ignored. Return None if there are no cells."""
    cells = comparison.cells
    if cells.empty:
        return None
    cells = completed(cells)
    groups = cells.groupby(SAME_WORK, dropna=False, observed=True, sort=False)
    group = max((g for _, g in groups), key=lambda g: (len(g), g["samples_per_s"].max()))
    index_of_best, best = entries(group)[0]
    slower = [index for index in group.index if index != index_of_best]
    if not slower:
        return best, None
    has_baseline = has_value(best["baseline"]) and best["baseline"] in slower
    base = dict(entries(cells))[int(best["baseline"]) if has_baseline else slower[-1]]
    if not has_baseline:  # the columns speedup and pairs compare it with another cell than `base`
        speedup = best["samples_per_s"] / base["samples_per_s"]
        best |= {"speedup": speedup, "pairs": 0, "speedup_low": math.nan, "speedup_high": math.nan}
    return {**best, "ratio": float(best["speedup"])}, base


def answer(comparison: Comparison) -> list[str]:
    """Return at most three sentences: which placement is fastest (see :func:`winner`), by how much, and why."""
    pair = winner(comparison)
    if pair is None:
        return ["No run has figures yet."]
    best, base = pair
    name = f" (run {best['names']})" if best["repeats"] == 1 and len(comparison.cells) > 1 else ""
    faster = comparison.cells[comparison.cells["samples_per_s"] > best["samples_per_s"]]
    title = "Fastest" if faster.empty else "Fastest for the same work"
    first = f"{title}: {label(best)}{name} with {format_number(best['samples_per_s'])} samples/s ({work_text(best)})."
    if len(faster):
        other_work = "other work (model, sequence length, emulated layer time or number of nodes)"
        first += f" {counted(len(faster), 'setting')} with more samples/s did {other_work} or did not complete."
    if base is None:
        return [first]
    interval = format_interval(best["speedup_low"], best["speedup_high"])
    bounds = f" (95% interval {interval}, {best['pairs']} pairs)" if has_value(best["speedup_low"]) else ""
    plain_note = " (as plain Megatron-LM)" if base["system"] == "one transport" else ""
    speedup = f"That is {format_number(best['ratio'])} times {label(base)}{plain_note}{bounds}"
    if not is_faster(best, base):
        return [first, f"{speedup}: no significant difference."]
    reason = explain(best, base) if has_intervals(best, base) else "There are too few steps to rule out chance."
    return [first, f"{speedup}.", _overload(base) or reason]


def _overload(cell: Mapping[str, Any]) -> str | None:
    """Return a warning if a cell with emulated compute is much slower than predicted."""
    if not all(map(has_value, (cell["pace_layer_ms"], cell["predicted_step_time_s"], cell["step_time_s"]))):
        return None
    ratio = cell["step_time_s"] / cell["predicted_step_time_s"]
    if ratio < OVERLOAD:
        return None
    cause = "the machine was busy, or too slow for train.pace_layer_ms, so this says little"
    return f"The slower setting takes {ratio:.1f} times its predicted step time: {cause}."


def is_faster(best: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether `best` is significantly faster than `base` (the two cells of :func:`winner`).

    If the cells have pairs of runs, the interval of the speed-up must be above 1. Otherwise the intervals of the two
    step times per sample must not overlap. Without intervals, the speed-up must be above 1.05."""
    if not has_intervals(best, base):
        return bool(best["ratio"] > 1.05)
    if has_value(best["speedup_low"]):
        return bool(best["speedup_low"] > 1)
    return bool(best["step_time_high_s"] / best["global_batch"] < base["step_time_low_s"] / base["global_batch"])


def has_intervals(best: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether the two cells of :func:`winner` have intervals by which they can be compared."""
    needed = (best["global_batch"], base["global_batch"], best["step_time_high_s"], base["step_time_low_s"])
    return has_value(best["speedup_low"]) or all(map(has_value, needed))


def explain(best: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return a sentence on the part of a step in which `best` saves the most time, compared with `base`.

    Times are compared per sample, because batch sizes may differ."""
    saved = {}
    for part in PARTS if has_value(best["global_batch"]) and has_value(base["global_batch"]) else ():
        sample_s = [float(c[part]) / float(c["global_batch"]) for c in (best, base) if has_value(c[part])]
        if len(sample_s) == 2:
            saved[part] = sample_s[1] - sample_s[0]
    top = max(saved, key=lambda part: saved[part], default=None)
    if top is None or saved[top] <= 0:
        return "Why: the recorded parts of a step do not explain it."
    saved_s = base["step_time_s"] / base["global_batch"] - best["step_time_s"] / best["global_batch"]
    share = f", {saved[top] / saved_s:.0%} of the time saved" if saved_s > 0 and saved[top] <= saved_s else ""
    return (
        f"Why: {PART_NAMES[top]} takes {format_number(best[top])} s of a {format_number(best['step_time_s'])} s step,"
        f" against {format_number(base[top])} s of {format_number(base['step_time_s'])} s{share}."
    )


def headline(comparison: Comparison) -> list[str]:
    """Return a text that compares the fastest hybrid cell with the mean of an InfiniBand cell and a RoCE cell.
    Return an empty list unless three cells of these kinds did the same work."""
    cells = dict(entries(comparison.cells))
    hybrid = next((cell for cell in cells.values() if has_value(cell["of_mean"])), None)
    if hybrid is None:
        return []
    claims = [f"{hybrid['of_mean']:.0%} of the mean of InfiniBand and RoCE alone"]
    base = cells.get(int(hybrid["baseline"])) if has_value(hybrid["baseline"]) else None
    if base is not None and base["transport"] == "single" and has_value(hybrid["speedup"]):
        plain = "plain Megatron-LM (one transport for all groups) on the same nodes"
        claims.append(f"{format_number(hybrid['speedup'])} times {plain}")
    errors = [float(cell["mape"]) for cell in cells.values() if has_value(cell["mape"])]
    accuracy = f" Step times were predicted within {max(errors):.1f}%." if errors else ""
    return [f"Hybrid ({hybrid['placement']}) is {' and '.join(claims)}.{accuracy}"]


def bars(comparison: Comparison) -> list[tuple[str, float]]:
    """Return (name, samples/s) of the first cells for a bar chart; empty if there are fewer than two cells."""
    cells = comparison.cells.head(MAX_BARS)
    return list(zip(labels(cells), cells["samples_per_s"].astype(float), strict=True)) if len(cells) > 1 else []
