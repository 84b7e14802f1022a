"""How far predictions of published runs are off, by class: the table planning/cost/uncertainty.yaml.

    python benchmarks/published_spread.py > holmes_hpc/planning/cost/uncertainty.yaml

A class is a width of tensor parallelism, with attention fused or not; its interval holds nine of ten of its runs. On
stderr: how many runs fall inside the interval that the other four fifths of the rows give (five folds, drawn from a
fixed seed), and the median half width of the intervals.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from published_fit import sample
from published_runs import Run, predicted_s, read

Class = tuple[int, bool]
MOST = 400  # rows of a set, lest one set be all of a class


def class_of(run: Run) -> Class:
    return min(8, 1 << (run.tp - 1).bit_length()), run.attention.startswith("flash")


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """(5th, 95th percentile), a little outside for few rows."""
    edge = 0.05 * len(ratios) / (len(ratios) + 10)
    low, high = np.quantile(ratios, (edge, 1 - edge))
    return min(float(low), 0.97), max(float(high), 1.03)


def main() -> None:
    runs = sample([r for r in read() if r.seconds and r.expressible], MOST)
    ratios = {r: (r.seconds or 0) / predicted_s(r) for r in runs}
    classes = defaultdict(list)
    for run in runs:
        classes[class_of(run)].append(run)
    print("# Written by benchmarks/published_spread.py: measured over predicted seconds, 5th and 95th percentile.")
    print("classes:")
    for (tp, flash), like in sorted(classes.items()):
        low, high = spread([ratios[r] for r in like])
        print(f"  - {{tp: {tp}, flash: {str(flash).lower()}, low: {low:.3f}, high: {high:.3f}, rows: {len(like)}}}")
    fold = dict(zip(runs, np.random.default_rng(0).integers(5, size=len(runs)), strict=True))
    inside, widths = [], []
    for run in runs:
        low, high = spread([ratios[r] for r in classes[class_of(run)] if fold[r] != fold[run]])
        inside.append(low <= ratios[run] <= high)
        widths.append((high - low) / 2)
    print(
        f"{np.mean(inside):.1%} of {len(runs)} left-out rows inside, median half width {np.median(widths):.1%}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
