"""What a comparison says in sentences: which setting wins, by how much, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import known
from holmes_hpc.results.compare import SAME_WORK, Comparison, completed, entries, label, labels, loss_of, work
from holmes_hpc.results.tables import interval, number


def ranking(comparison: Comparison) -> list[str]:
    """Which setting has the lowest loss, and how far the next is."""
    cells = comparison.cells
    key = loss_of(cells)
    cells = cells[cells[key].notna()]
    if cells.empty:
        return ["No run has a loss yet."]
    names, values = labels(cells), cells[key].tolist()
    said = [f"Lowest {key.replace('_', ' ')}: {names[0]} with {number(values[0], 4)}."]
    if len(values) > 1:
        last = f"; last: {names[-1]} with {number(values[-1], 4)}" if len(values) > 2 else ""
        said.append(f"Next: {names[1]} with {number(values[1], 4)}{last}.")
    if comparison.runs.loc[comparison.runs[key].notna(), "steps"].nunique() > 1:
        said.append("They did not make equally many steps.")
    return said


def winner(comparison: Comparison) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """The fastest cell of the largest group that did the same work, and the cell it is compared with, if any; the
    former with `ratio`, how many times as fast it is. Runs that did not complete win only where none did."""
    cells = comparison.cells
    if cells.empty:
        return None
    cells = completed(cells)
    groups = cells.groupby(SAME_WORK, dropna=False, observed=True, sort=False)
    group = max((g for _, g in groups), key=lambda g: (len(g), g["samples_per_s"].max()))
    name, best = entries(group)[0]
    others = [index for index in group.index if index != name]
    if not others:
        return best, None
    paired = known(best["baseline"]) and best["baseline"] in others
    base = dict(entries(cells))[int(best["baseline"]) if paired else others[-1]]
    if not paired:  # what it has of pairs is of another one
        best |= {
            "speedup": best["samples_per_s"] / base["samples_per_s"],
            "pairs": 0,
            "speedup_low": math.nan,
            "speedup_high": math.nan,
        }
    return {**best, "ratio": float(best["speedup"])}, base


def answer(comparison: Comparison) -> list[str]:
    """Which placement, how much faster, why: three sentences at most (see :func:`winner`)."""
    found = winner(comparison)
    if found is None:
        return ["No run has figures yet."]
    best, base = found
    name = f" (run {best['names']})" if best["repeats"] == 1 and len(comparison.cells) > 1 else ""
    others = comparison.cells[comparison.cells["samples_per_s"] > best["samples_per_s"]]
    which = "Fastest" if others.empty else "Fastest of those that did the same work"
    said = [f"{which}: {label(best)}{name} with {number(best['samples_per_s'])} samples/s ({work(best)})."]
    if len(others):
        unlike = "other work (model, sequence length, pace or number of nodes)"
        said[0] += f" {len(others)} with more samples/s did {unlike}, or did not complete."
    if base is None:
        return said
    bounds = (
        f" (95% interval {interval(best['speedup_low'], best['speedup_high'])}, {best['pairs']} pairs)"
        if known(best["speedup_low"])
        else ""
    )
    plain = ", as plain Megatron-LM has" if base["system"] == "one transport" else ""
    times = f"That is {number(best['ratio'])} times {label(base)}{plain}{bounds}"
    if not differ(best, base):
        return [*said, f"{times}: no difference that these runs can tell."]
    return [*said, f"{times}.", why(best, base)]


def differ(best: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether `best` (of :func:`winner`) is faster beyond what repeats and steps vary: by the interval of its pairs,
    else by those of the step times; where there are none, by more than a twentieth."""
    if known(best["speedup_low"]):
        return bool(best["speedup_low"] > 1)
    if not all(
        map(known, (best["global_batch"], base["global_batch"], best["step_time_high_s"], base["step_time_low_s"]))
    ):
        return bool(best["ratio"] > 1.05)
    return bool(best["step_time_high_s"] / best["global_batch"] < base["step_time_low_s"] / base["global_batch"])


def why(best: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Where the slower one's time went, as seconds per sample so that different batches compare."""
    saved = {}
    for part in PARTS if known(best["global_batch"]) and known(base["global_batch"]) else ():
        pair = [float(c[part]) / float(c["global_batch"]) for c in (best, base) if known(c[part])]
        if len(pair) == 2:
            saved[part] = pair[1] - pair[0]
    top = max(saved, key=lambda part: saved[part], default=None)
    if top is None or saved[top] <= 0:
        return "Why: the recorded parts of a step do not say."
    total = base["step_time_s"] / base["global_batch"] - best["step_time_s"] / best["global_batch"]
    share = f", {saved[top] / total:.0%} of what it saves" if total > 0 and saved[top] <= total else ""
    return (
        f"Why: {PART_NAMES[top]} takes {number(best[top])} s of its step of {number(best['step_time_s'])} s, there "
        f"{number(base[top])} s of {number(base['step_time_s'])} s{share}."
    )
