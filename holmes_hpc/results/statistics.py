"""Statistics of step times and throughput: warm-up left out, medians with their intervals, rates averaged harmonically,
speed-ups paired within a session of the machine. Arrays of numbers in, numbers out; NaN is a missing value."""

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
    """A median and its confidence interval, in the unit of the values; `low`, `high` are NaN where `count` values
    are too few for an interval of the wanted confidence."""

    median: float
    low: float
    high: float
    count: int


@lru_cache(maxsize=4096)
def interval_ranks(count: int, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Positions (from 0) of the sorted values that enclose the median with at least this confidence; None: too few.

    Exact and free of assumptions on the distribution: P(X(k+1) <= median <= X(n-k)) = 1 - 2 P(Bin(n, 1/2) <= k)
    (order statistics; David and Nagaraja 2003, 7.1). Above 1000 values the normal approximation of the binomial.
    """
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
    """The z with Phi(z) = p, by bisection."""
    low, high = -10.0, 10.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < p else (low, middle)
    return (low + high) / 2


def median_interval(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Median and order-statistics interval. With fewer than 6 values there is none of 95%."""
    ordered = np.sort(finite(values))
    if not len(ordered):
        return Estimate(math.nan, math.nan, math.nan, 0)
    ranks = interval_ranks(len(ordered), confidence)
    low, high = (ordered[ranks[0]], ordered[ranks[1]]) if ranks else (math.nan, math.nan)
    return Estimate(float(np.median(ordered)), float(low), float(high), len(ordered))


def repeats_interval(values: ArrayLike) -> Estimate:
    """Median over repeated runs of a figure above 0 of each (median step time, rate), with an interval of what varies
    between runs: from six runs on by order statistics, of two to five by Student's t of the logarithms, which takes
    them as normally distributed. Of one run there is none: its steps say nothing about another run."""
    found = median_interval(values)
    if found.count not in STUDENT:
        return found
    logs = np.log(finite(values))
    half = STUDENT[found.count] * logs.std(ddof=1) / math.sqrt(found.count)
    return replace(found, low=float(np.exp(logs.mean() - half)), high=float(np.exp(logs.mean() + half)))


def percentage_errors(predicted: ArrayLike, measured: ArrayLike) -> NDArray[np.float64]:
    """100 * (predicted - measured) / measured, entry by entry."""
    p, m = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(m != 0, 100.0 * (p - m) / m, np.nan)


def mape(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Mean absolute percentage error over the pairs where both are known; NaN when there are none."""
    errors = finite(percentage_errors(predicted, measured))
    return float(np.mean(np.abs(errors))) if len(errors) else math.nan


def fraction_of_homogeneous(hybrid: float, homogeneous: Iterable[float]) -> float:
    """Throughput of a mixed run over the arithmetic mean of the homogeneous RDMA runs of the same node count."""
    kept = list(homogeneous)
    return float(hybrid / np.mean(kept)) if kept else math.nan


def scaling_efficiency(throughput: ArrayLike, nodes: ArrayLike) -> NDArray[np.float64]:
    """Throughput per node over that of the smallest node count (mean of its runs): 1.0 is linear scaling."""
    t, n = np.asarray(throughput, dtype=np.float64), np.asarray(nodes, dtype=np.float64)
    if not len(t):
        return t
    base = n == n.min()
    return (t / n) / np.mean(t[base] / n[base])


def paired_ratios(
    runs: pd.DataFrame, system: str, baseline: object, candidate: object, within: Sequence[str] = ()
) -> pd.DataFrame:
    """Ratios candidate / baseline of samples/s of runs that stood side by side in time: in each session (and cell,
    `within`) the k-th run of one system with the k-th of the other, by start time. What drifts between sessions
    cancels; unpaired runs drop out.

    One row per pair: the `within` columns, `session`, `pair`, `baseline`, `candidate`, `ratio`.
    """
    keys, rate = [*within, "session"], "samples_per_s"
    used = runs[runs[system].isin([baseline, candidate]) & runs[rate].notna()].sort_values("started", kind="stable")
    rows = []
    for key, group in used.groupby(keys, dropna=False, sort=True):
        sides = [group[group[system] == side][rate].to_numpy(dtype=float) for side in (baseline, candidate)]
        for index, (b, c) in enumerate(zip(*sides, strict=False)):
            rows.append(
                {**dict(zip(keys, key, strict=True)), "pair": index, "baseline": b, "candidate": c, "ratio": c / b}
            )
    return pd.DataFrame(rows, columns=[*keys, "pair", "baseline", "candidate", "ratio"])
