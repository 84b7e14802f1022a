"""A runner-up of the search as plain data: its sizes, its prediction, and what it loses against the best plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import predict_layout
from holmes_hpc.records.metrics import PART_NAMES, PARTS

PREDICTED = tuple(part for part in PARTS if part != "other_s")  # of a step's time


def alternative(
    best: Layout, best_layers: np.ndarray, strategy: str, other: Layout, layers: np.ndarray
) -> dict[str, Any]:
    """A runner-up as plain data, with what it loses against the best."""
    first, second = predict_layout(best, best_layers), predict_layout(other, layers)
    slower = second.step_time_s / first.step_time_s - 1
    more = {name: second.breakdown[name] - first.breakdown[name] for name in PREDICTED}
    worst = max(PREDICTED, key=lambda n: more[n])
    why = (
        f"{slower:.1%} slower: {PART_NAMES[worst]} takes {more[worst]:.3g} s longer"
        if slower > 0.0005
        else ("as fast, and less plain or with more GPUs")
    )
    p = other.parallel
    return {
        "strategy": strategy,
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
