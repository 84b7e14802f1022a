"""Mean rates of a run: warm-up steps are left out, and rates are averaged harmonically."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RATES = ("samples_per_s", "tokens_per_s", "model_tflops_per_gpu", "hardware_tflops_per_gpu", "share_of_limit")


def warmup_steps(count: int) -> int:
    """Return the number of warm-up steps in a run of `count` steps: a tenth of all steps, but at least 2, at most 20,
    and never more than half. Warm-up steps connect sockets, fill caches and allocate memory."""
    return min(max(2, min(20, count // 10)), count // 2)


def finite(values: ArrayLike) -> NDArray[np.float64]:
    """Return the finite numbers among `values` as a flat array."""
    array = np.asarray(values, dtype=np.float64).ravel()
    return array[np.isfinite(array)]


def harmonic_mean(rates: ArrayLike) -> float:
    """Return the mean rate of steps that do equal work: n / sum(1 / rate), which is total work divided by total time.
    Return NaN if there are no finite rates, or if one is not positive."""
    values = finite(rates)
    if not len(values) or (values <= 0).any():
        return math.nan
    return float(len(values) / np.sum(1.0 / values))


def first_attempt_of_plan(record: Mapping[str, Any]) -> int:
    """Return the number of the attempt with which the run's present plan began. `record`: the content of run.yaml."""
    plan_id = record.get("plan_id")
    plan_ids = [(a.get("plan_id") if isinstance(a, Mapping) else None) or plan_id for a in record["attempts"]]
    return max((i + 2 for i, attempt_plan in enumerate(plan_ids) if attempt_plan != plan_id), default=1)


def mean_rates(lines: Sequence[Mapping[str, Any]], first_attempt: int = 1) -> dict[str, float]:
    """Return the median step_time_s and the harmonic mean of each of RATES, as `holmes report` shows them.

    `lines`: the run's metrics, one line per step, in order. Steps of attempts before `first_attempt` and warm-up steps
    do not count. A figure that no line contains is left out of the result."""
    lines = [line for line in lines if not number(line.get("attempt")) < first_attempt]
    counted = lines[warmup_steps(len(lines)) :]
    times = finite([number(line.get("step_time_s")) for line in counted])
    figures = {"step_time_s": float(np.median(times)) if len(times) else math.nan}
    figures |= {name: harmonic_mean([number(line.get(name)) for line in counted]) for name in RATES}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def goodput(useful_s: float, created: str, time_s: float) -> float:
    """Return `useful_s`, the seconds in steps not repeated, divided by those from `created` (run.yaml) to `time_s`."""
    return useful_s / max(time_s - datetime.fromisoformat(created).timestamp(), useful_s)


def number(value: Any) -> float:
    """Return `value` as a float; NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan
