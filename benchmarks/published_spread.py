"""Compute the prediction intervals of planning/cost/uncertainty.yaml from the errors of left-out runs.

    python benchmarks/published_spread.py > holmes_hpc/planning/cost/uncertainty.yaml

Reads benchmarks/published/left_out.csv, which published_fit.py --left-out writes. Sets have equal weight. Prints on
stderr the share of runs of each left-out set inside the interval of the other sets, and the interval's half width.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from published_fit import FULL_WEIGHT
from published_runs import generation, read, read_left_out, software

Ratios = Mapping[str, Sequence[float]]  # of measured over predicted seconds, by set


def quantiles(ratios: Ratios) -> tuple[float, float]:
    """Return the 5th and 95th percentile of all runs. A set of at least FULL_WEIGHT runs has weight 1."""
    values = np.concatenate([np.array(r) for r in ratios.values()])
    weights = np.concatenate([np.full(len(r), 1 / max(FULL_WEIGHT, len(r))) for r in ratios.values()])
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) - weights[order] / 2
    low, high = np.interp(np.array([0.05, 0.95]) * weights.sum(), shares, values[order])
    return min(float(low), 1.0), max(float(high), 1.0)


def by_set(kind: str) -> dict[str, list[float]]:
    ratios = defaultdict(list)
    for row in read_left_out():
        if row.left == kind:
            ratios[row.set].append(1 / row.ratio)
    return dict(ratios)


def inside(ratios: Iterable[float], interval: tuple[float, float]) -> float:
    return float(np.mean([interval[0] <= ratio <= interval[1] for ratio in ratios]))


def main() -> None:
    runs, ratios = [r for r in read() if r.seconds], {kind: by_set(kind) for kind in ("set", "generation")}
    print("# Written by benchmarks/published_spread.py: measured over predicted seconds of left-out runs, 5th and 95th")
    print("# percentile; the GPUs of the largest run; the attention kernels of the runs of each generation.")
    for kind, values in ratios.items():
        low, high = quantiles(values)
        print(f"{kind}s: {{low: {low:.3f}, high: {high:.3f}, runs: {sum(map(len, values.values()))}}}")
    print(f"gpus: {max(r.gpus for r in runs)}")
    print("attention:")
    counts = Counter(generation(r) for r in runs)
    for name in sorted(n for n, count in counts.items() if count >= FULL_WEIGHT):
        print(f"  {name}: [{', '.join(sorted({software(r).attention for r in runs if generation(r) == name}))}]")
    shares, widths = [], []
    for name, values in ratios["set"].items():
        interval = quantiles({other: r for other, r in ratios["set"].items() if other != name})
        shares.append((inside(values, interval), len(values)))
        widths.append((interval[1] - interval[0]) / 2)
        print(f"{name:14} {shares[-1][0]:6.1%} of {len(values)} inside", file=sys.stderr)
    rows = sum(share * count for share, count in shares) / sum(count for _, count in shares)
    large = np.mean([share for share, count in shares if count >= FULL_WEIGHT])
    print(
        f"{rows:.1%} of left-out rows inside, {large:.1%} on average over sets of at least {FULL_WEIGHT};"
        f" median half width {np.median(widths):.1%}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
