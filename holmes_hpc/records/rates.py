"""How fast a run was, over all its steps that count: its first ones warm up, and rates are averaged harmonically."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RATES = ("samples_per_s", "tokens_per_s", "model_tflops_per_gpu", "hardware_tflops_per_gpu")


def warmup_steps(count: int) -> int:
    """How many of a run's first `count` steps are left out: a tenth, at least 2 and at most 20, and never more than
    half. The first steps connect sockets, fill caches and allocate memory."""
    return min(max(2, min(20, count // 10)), count // 2)


def finite(values: ArrayLike) -> NDArray[np.float64]:
    """The values that are numbers, flat."""
    array = np.asarray(values, dtype=np.float64).ravel()
    return array[np.isfinite(array)]


def harmonic_mean(rates: ArrayLike) -> float:
    """The mean rate over equal amounts of work (steps): n / sum(1 / rate), which is all work over all time."""
    kept = finite(rates)
    if not len(kept) or (kept <= 0).any():
        return math.nan
    return float(len(kept) / np.sum(1.0 / kept))


def first_attempt_of_plan(record: Mapping[str, Any]) -> int:
    """The number of the attempt since when all have had the plan that the run (its run.yaml) has now."""
    now = record.get("plan_id")
    plans = [(a.get("plan_id") if isinstance(a, Mapping) else None) or now for a in record["attempts"]]
    return max((i + 2 for i, plan in enumerate(plans) if plan != now), default=1)


def mean_rates(lines: Sequence[Mapping[str, Any]], first_attempt: int = 1) -> dict[str, float]:
    """Of a run's lines of metrics, one a step and in order: step_time_s (the median) and RATES, as `holmes report` has
    them, over the steps after the warm-up of the attempts since `first_attempt`. What no line has is left out."""
    lines = [line for line in lines if not number(line.get("attempt")) < first_attempt]
    kept = lines[warmup_steps(len(lines)) :]
    times = finite([number(line.get("step_time_s")) for line in kept])
    found = {"step_time_s": float(np.median(times)) if len(times) else math.nan}
    found |= {name: harmonic_mean([number(line.get(name)) for line in kept]) for name in RATES}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def number(value: Any) -> float:
    """A float; NaN for anything else."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan
