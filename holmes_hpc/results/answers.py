"""Sentences about a comparison: which setting wins, by how much, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import has_value
from holmes_hpc.results.compare import SAME_WORK, Comparison, completed, entries, label, labels, loss_of, work
from holmes_hpc.results.tables import interval, number


def ranking(comparison: Comparison) -> list[str]:
    """Name the settings with the lowest, second lowest and highest loss."""
    cells = comparison.cells
    key = loss_of(cells)
    cells = cells[cells[key].notna()]
    if cells.empty:
        return ["No run has a loss yet."]
    names, values = labels(cells), cells[key].tolist()
    sentences = [f"Lowest {key.replace('_', ' ')}: {names[0]} with {number(values[0], 4)}."]
    if len(values) > 1:
        last = f"; last: {names[-1]} with {number(values[-1], 4)}" if len(values) > 2 else ""
        sentences.append(f"Next: {names[1]} with {number(values[1], 4)}{last}.")
    if comparison.runs.loc[comparison.runs[key].notna(), "steps"].nunique() > 1:
        sentences.append("The runs did not make the same number of steps.")
    return sentences


def winner(comparison: Comparison) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Return the fastest cell among cells that did the same work, and the cell it is compared with, if any.

    The largest group of cells with the same work counts. The fastest cell has a `ratio`: its speed-up over the other
    cell. Incomplete runs win only if no run completed."""
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
    if not has_baseline:  # its recorded pairs are with another cell
        best |= {
            "speedup": best["samples_per_s"] / base["samples_per_s"],
            "pairs": 0,
            "speedup_low": math.nan,
            "speedup_high": math.nan,
        }
    return {**best, "ratio": float(best["speedup"])}, base


def answer(comparison: Comparison) -> list[str]:
    """Return which placement is fastest, by how much, and why: at most three sentences (see :func:`winner`)."""
    pair = winner(comparison)
    if pair is None:
        return ["No run has figures yet."]
    best, base = pair
    name = f" (run {best['names']})" if best["repeats"] == 1 and len(comparison.cells) > 1 else ""
    faster = comparison.cells[comparison.cells["samples_per_s"] > best["samples_per_s"]]
    title = "Fastest" if faster.empty else "Fastest for the same work"
    sentences = [f"{title}: {label(best)}{name} with {number(best['samples_per_s'])} samples/s ({work(best)})."]
    if len(faster):
        other_work = "other work (model, sequence length, emulated layer time or number of nodes)"
        sentences[0] += f" {len(faster)} with more samples/s did {other_work} or did not complete."
    if base is None:
        return sentences
    bounds = (
        f" (95% interval {interval(best['speedup_low'], best['speedup_high'])}, {best['pairs']} pairs)"
        if has_value(best["speedup_low"])
        else ""
    )
    plain_note = " (as plain Megatron-LM)" if base["system"] == "one transport" else ""
    speedup = f"That is {number(best['ratio'])} times {label(base)}{plain_note}{bounds}"
    if not is_faster(best, base):
        return [*sentences, f"{speedup}: no significant difference."]
    return [*sentences, f"{speedup}.", explain(best, base)]


def is_faster(best: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether `best` (of :func:`winner`) is faster than `base` beyond the noise of repeats and steps.

    The interval of its pairs decides, else the intervals of both step times. Without intervals, 5% is the threshold."""
    if has_value(best["speedup_low"]):
        return bool(best["speedup_low"] > 1)
    if not all(
        map(has_value, (best["global_batch"], base["global_batch"], best["step_time_high_s"], base["step_time_low_s"]))
    ):
        return bool(best["ratio"] > 1.05)
    return bool(best["step_time_high_s"] / best["global_batch"] < base["step_time_low_s"] / base["global_batch"])


def explain(best: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Name the part of a step that saves most time, in seconds per sample so that batch sizes compare."""
    saved = {}
    for part in PARTS if has_value(best["global_batch"]) and has_value(base["global_batch"]) else ():
        per_sample = [float(c[part]) / float(c["global_batch"]) for c in (best, base) if has_value(c[part])]
        if len(per_sample) == 2:
            saved[part] = per_sample[1] - per_sample[0]
    top = max(saved, key=lambda part: saved[part], default=None)
    if top is None or saved[top] <= 0:
        return "Why: the recorded parts of a step do not explain it."
    saved_s = base["step_time_s"] / base["global_batch"] - best["step_time_s"] / best["global_batch"]
    share = f", {saved[top] / saved_s:.0%} of the time saved" if saved_s > 0 and saved[top] <= saved_s else ""
    return (
        f"Why: {PART_NAMES[top]} takes {number(best[top])} s of a {number(best['step_time_s'])} s step, against "
        f"{number(base[top])} s of {number(base['step_time_s'])} s{share}."
    )
