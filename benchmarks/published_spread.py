"""Compute the prediction intervals of planning/cost/uncertainty.yaml from published runs.

    python benchmarks/published_spread.py > holmes_hpc/planning/cost/uncertainty.yaml

A class is a TP size with fused or unfused attention; its interval contains 90% of its runs. Prints on stderr the share
of runs inside the interval of the other four fifths of the rows (five folds from a fixed seed), and the median half
width of the intervals.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from published_fit import sample
from published_runs import Run, predicted_s, read

Class = tuple[int, bool]
MAX_ROWS = 400  # per set, so that no set dominates a class


def class_of(run: Run) -> Class:
    return min(8, 1 << (run.tp - 1).bit_length()), run.attention.startswith("flash")


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 5th and 95th percentile, slightly wider for few rows."""
    edge = 0.05 * len(ratios) / (len(ratios) + 10)
    low, high = np.quantile(ratios, (edge, 1 - edge))
    return min(float(low), 0.97), max(float(high), 1.03)


def main() -> None:
    runs = sample([r for r in read() if r.seconds and r.expressible], MAX_ROWS)
    ratios = {r: (r.seconds or 0) / predicted_s(r) for r in runs}
    classes = defaultdict(list)
    for run in runs:
        classes[class_of(run)].append(run)
    print("# Written by benchmarks/published_spread.py: measured over predicted seconds, 5th and 95th percentile.")
    print("classes:")
    for (tp, flash), members in sorted(classes.items()):
        low, high = spread([ratios[r] for r in members])
        print(f"  - {{tp: {tp}, flash: {str(flash).lower()}, low: {low:.3f}, high: {high:.3f}, rows: {len(members)}}}")
    fold = dict(zip(runs, np.random.default_rng(0).integers(5, size=len(runs)), strict=True))
    is_inside, widths = [], []
    for run in runs:
        low, high = spread([ratios[r] for r in classes[class_of(run)] if fold[r] != fold[run]])
        is_inside.append(low <= ratios[run] <= high)
        widths.append((high - low) / 2)
    print(
        f"{np.mean(is_inside):.1%} of {len(runs)} left-out rows inside their interval, "
        f"median half width {np.median(widths):.1%}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
