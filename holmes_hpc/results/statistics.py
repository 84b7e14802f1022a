"""Statistics of step times and throughput, without warm-up steps.

Step times get medians with intervals, rates harmonic means, speed-ups are paired within a session of the machine. All
functions take and return numbers; NaN is a missing value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from holmes_hpc.records.rates import finite

CONFIDENCE = 0.95
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5% of Student's t, by the number of values


@dataclass(frozen=True)
class Estimate:
    """A median and its confidence interval, in the unit of the values.

    `low` and `high` are NaN where `count` values are too few for an interval of that confidence."""

    median: float
    low: float
    high: float
    count: int


@lru_cache(maxsize=4096)
def interval_ranks(count: int, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Return the positions (from 0) of the sorted values that enclose the median; None if too few.

    The interval has at least this confidence. It is exact and free of assumptions on the distribution: P(X(k+1) <=
    median <= X(n-k)) = 1 - 2 P(Bin(n, 1/2) <= k) (order statistics; David and Nagaraja 2003, 7.1). Above 1000 values,
    the binomial is approximated by a normal distribution."""
    tail = (1 - confidence) / 2
    if count > 1000:
        k = math.floor(count / 2 - _normal_quantile(1 - tail) * math.sqrt(count) / 2) - 1
        return k, count - 1 - k
    k, below, term = -1, 0.0, 0.5**count
    for i in range(count):
        below += term
        if below > tail:
            break
        k = i
        term *= (count - i) / (i + 1)
    return (k, count - 1 - k) if k >= 0 else None


def _normal_quantile(p: float) -> float:
    """Return the z with Phi(z) = p, by bisection."""
    low, high = -10.0, 10.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < p else (low, middle)
    return (low + high) / 2


def median_interval(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Return the median and its order-statistics interval; fewer than 6 values have no interval of 95%."""
    ordered = np.sort(finite(values))
    if not len(ordered):
        return Estimate(math.nan, math.nan, math.nan, 0)
    ranks = interval_ranks(len(ordered), confidence)
    low, high = (ordered[ranks[0]], ordered[ranks[1]]) if ranks else (math.nan, math.nan)
    return Estimate(float(np.median(ordered)), float(low), float(high), len(ordered))


def repeats_interval(values: ArrayLike) -> Estimate:
    """Return the median of a positive figure (step time, rate) over repeated runs, with its interval.

    The interval is of the variation between runs. Six runs and more use order statistics; two to five use Student's t
    of the logarithms, assumed to be normal. One run has no interval: its steps do not show how runs vary."""
    estimate = median_interval(values)
    if estimate.count not in STUDENT:
        return estimate
    logs = np.log(finite(values))
    half_width = STUDENT[estimate.count] * logs.std(ddof=1) / math.sqrt(estimate.count)
    return replace(estimate, low=float(np.exp(logs.mean() - half_width)), high=float(np.exp(logs.mean() + half_width)))


def percentage_errors(predicted: ArrayLike, measured: ArrayLike) -> NDArray[np.float64]:
    """Return 100 * (predicted - measured) / measured, entry by entry."""
    p, m = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(m != 0, 100.0 * (p - m) / m, np.nan)


def mape(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return the mean absolute percentage error over pairs of known values; NaN if there are none."""
    errors = finite(percentage_errors(predicted, measured))
    return float(np.mean(np.abs(errors))) if len(errors) else math.nan


def fraction_of_homogeneous(hybrid: float, homogeneous: Iterable[float]) -> float:
    """Return a mixed run's throughput over the mean of homogeneous RDMA runs on as many nodes."""
    rates = list(homogeneous)
    return float(hybrid / np.mean(rates)) if rates else math.nan


def scaling_efficiency(throughput: ArrayLike, nodes: ArrayLike) -> NDArray[np.float64]:
    """Return throughput per node over that on the fewest nodes (mean of its runs); 1.0 is linear."""
    t, n = np.asarray(throughput, dtype=np.float64), np.asarray(nodes, dtype=np.float64)
    if not len(t):
        return t
    base = n == n.min()
    return (t / n) / np.mean(t[base] / n[base])


def paired_ratios(
    runs: pd.DataFrame, system: str, baseline: object, candidate: object, within: Sequence[str] = ()
) -> pd.DataFrame:
    """Return candidate / baseline ratios of samples/s, of runs that are neighbours in time.

    In each session (and each value of `within`), the k-th run of one system is paired with the k-th of the other, by
    start time. Drift between sessions cancels; unpaired runs are dropped.

    One row per pair: the `within` columns, `session`, `pair`, `baseline`, `candidate`, `ratio`."""
    keys, rate = [*within, "session"], "samples_per_s"
    usable = runs[runs[system].isin([baseline, candidate]) & runs[rate].notna()].sort_values("started", kind="stable")
    rows = []
    for key, group in usable.groupby(keys, dropna=False, sort=True):
        sides = [group[group[system] == side][rate].to_numpy(dtype=float) for side in (baseline, candidate)]
        for index, (b, c) in enumerate(zip(*sides, strict=False)):
            rows.append(
                {**dict(zip(keys, key, strict=True)), "pair": index, "baseline": b, "candidate": c, "ratio": c / b}
            )
    return pd.DataFrame(rows, columns=[*keys, "pair", "baseline", "candidate", "ratio"])
