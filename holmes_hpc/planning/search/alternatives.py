"""A runner-up of the search as plain data: its sizes, its prediction, and what it loses against the best plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holmes_hpc.planning.cost.predict import predict_layout
from holmes_hpc.planning.search.candidate import Candidate
from holmes_hpc.planning.search.per_stage import Variant
from holmes_hpc.records.metrics import PART_NAMES, PARTS

PREDICTED = tuple(part for part in PARTS if part != "other_s")  # of a step's time


def alternative(best: Candidate | Variant, runner_up: Candidate) -> dict[str, Any]:
    """Return a runner-up, whose layout is uniform, as plain data, with what it loses against the best."""
    other, layers = runner_up.layout, runner_up.layers
    first, second = predict_layout(best.layout, best.layers), predict_layout(other, layers)
    slower = second.step_time_s / first.step_time_s - 1
    more = {name: second.breakdown[name] - first.breakdown[name] for name in PREDICTED}
    why = f"{slower:.1%} slower: {grown(more)}" if slower > 0.0005 else ("as fast, and less plain or with more GPUs")
    p = other.parallel
    return {
        "strategy": runner_up.strategy,
        "parallel": {"tp": p.tp, "pp": p.pp, "dp": p.dp, "virtual_stages": p.virtual_stages},
        "micro_size": other.batch.micro_size,
        "nodes": {c.fabric: c.nodes for c in other.components},
        "layers_per_stage": [int(n) for n in layers[0].sum(axis=1)],
        "recompute": other.recompute,
        "schedule": other.schedule.kind,
        "why_not": why,
        "predicted": {
            "step_time_s": second.step_time_s,
            "samples_per_s": second.samples_per_s,
            "memory_bytes_per_gpu": max(second.memory_bytes_per_gpu),
            "breakdown": second.breakdown,
        },
    }


def grown(more: Mapping[str, float]) -> str:
    """In words the part of a step that takes longest beyond the best plan's, and the next where that is a third of it
    or more. `more`: seconds of each, less where negative."""
    first, second = sorted(more, key=lambda name: -more[name])[:2]
    text = f"{PART_NAMES[first]} takes {more[first]:.3g} s longer"
    return text + (f", {PART_NAMES[second]} {more[second]:.3g} s" if more[second] >= more[first] / 3 > 0 else "")
