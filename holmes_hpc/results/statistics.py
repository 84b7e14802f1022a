"""Statistics of step times and throughput, without warm-up steps.

Step times are summarised by their median and an interval, rates by their harmonic mean. Speed-ups are computed from
pairs of runs with the same label `session`. NaN stands for a missing value."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from holmes_hpc.records.rates import finite

CONFIDENCE = 0.95
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5% quantile of Student's t, by the number of values


@dataclass(frozen=True)
class Estimate:
    """The median of `count` values and its interval with confidence CONFIDENCE, in the unit of the values.
    `low`, `high`: NaN if there are too few values for such an interval."""

    median: float
    low: float
    high: float
    count: int


@lru_cache(maxsize=4096)
def interval_positions(count: int) -> tuple[int, int] | None:
    """Return the positions (from 0), among `count` sorted values, of the two ends of the median's confidence interval.

    The interval contains the median with a probability of at least CONFIDENCE, whatever the distribution (order
    statistics, David and Nagaraja 2003, 7.1): P(X(k+1) <= median <= X(n-k)) = 1 - 2 P(Bin(n, 1/2) <= k). Return None if
    there are too few values. Above 1000 values, a normal distribution approximates the binomial."""
    tail = (1 - CONFIDENCE) / 2
    if count > 1000:
        k = math.floor(count / 2 - NormalDist().inv_cdf(1 - tail) * math.sqrt(count) / 2) - 1
        return k, count - 1 - k
    ways = accumulate(math.comb(count, i) for i in range(count))  # 2**count * P(Bin(count, 1/2) <= i)
    k = sum(ways_to_i <= tail * 2**count for ways_to_i in ways) - 1
    return (k, count - 1 - k) if k >= 0 else None


def median_interval(values: ArrayLike) -> Estimate:
    """Return the median and its interval by order statistics (:func:`interval_positions`)."""
    ordered = np.sort(finite(values))
    if not len(ordered):
        return Estimate(math.nan, math.nan, math.nan, 0)
    positions = interval_positions(len(ordered))
    low, high = (ordered[positions[0]], ordered[positions[1]]) if positions else (math.nan, math.nan)
    return Estimate(float(np.median(ordered)), float(low), float(high), len(ordered))


def repeats_interval(values: ArrayLike) -> Estimate:
    """Return the median of positive values (a step time or a rate, one per repeated run), with its interval.

    The interval shows the variation between runs, so one run has none. For six runs or more it comes from order
    statistics; for two to five runs from Student's t, as if the logarithms of the values were normally distributed."""
    estimate = median_interval(values)
    if estimate.count not in STUDENT:
        return estimate
    logs = np.log(finite(values))
    half_width = STUDENT[estimate.count] * logs.std(ddof=1) / math.sqrt(estimate.count)
    return replace(estimate, low=float(np.exp(logs.mean() - half_width)), high=float(np.exp(logs.mean() + half_width)))


def percentage_errors(predicted: ArrayLike, measured: ArrayLike) -> NDArray[np.float64]:
    """Return 100 * (predicted - measured) / measured of each pair of values; NaN if the measured one is 0."""
    p, m = np.asarray(predicted, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(m != 0, 100.0 * (p - m) / m, np.nan)


def mape(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Return the mean absolute percentage error over pairs of known values; NaN if there are none."""
    errors = finite(percentage_errors(predicted, measured))
    return float(np.mean(np.abs(errors))) if len(errors) else math.nan


def fraction_of_homogeneous(hybrid: float, homogeneous: Iterable[float]) -> float:
    """Return the throughput `hybrid` over the mean of the throughputs `homogeneous`."""
    return float(hybrid / np.mean(list(homogeneous)))


def scaling_efficiency(throughput: ArrayLike, nodes: ArrayLike) -> NDArray[np.float64]:
    """Return each run's throughput per node, divided by its mean over the runs on the fewest nodes."""
    t, n = np.asarray(throughput, dtype=np.float64), np.asarray(nodes, dtype=np.float64)
    base = n == n.min()
    return (t / n) / np.mean(t[base] / n[base])


def paired_ratios(
    runs: pd.DataFrame, system: str, baseline: object, candidate: object, within: Sequence[str] = ()
) -> pd.DataFrame:
    """Return the ratios of samples/s of two systems in pairs of runs that are neighbours in time.

    `system`: the column that names systems; `baseline`, `candidate`: two of its values. In each session (and each value
    of the columns `within`), the k-th run of one system is paired with the k-th run of the other, in order of start.
    Drift between sessions cancels; runs without a partner are dropped. The table has one row per pair: the columns
    `within`, `session`, `pair` (k), `baseline` and `candidate` (samples/s), and `ratio`, candidate over baseline."""
    keys, rate = [*within, "session"], "samples_per_s"
    usable = runs[runs[system].isin([baseline, candidate]) & runs[rate].notna()].sort_values("started", kind="stable")
    rows = []
    for key, group in usable.groupby(keys, dropna=False, sort=True):
        sides = [group[group[system] == side][rate].to_numpy(dtype=float) for side in (baseline, candidate)]
        for index, (b, c) in enumerate(zip(*sides, strict=False)):
            rows.append((*key, index, b, c, c / b))
    return pd.DataFrame(rows, columns=[*keys, "pair", "baseline", "candidate", "ratio"])
