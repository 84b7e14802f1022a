"""The limit of a plan: a step in which every rank computes all the time and no rank waits."""

from collections.abc import Sequence

import numpy as np

from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import compute_times


def stage_speeds(layout: Layout) -> list[float]:
    """Return the layers of one micro-batch that all replicas of each stage together compute in a second."""
    p, stages = layout.parallel, range(layout.parallel.pp)
    if layout.is_per_stage:
        layer_s = [compute_times(layout.views[s])[0].layer[:, s].sum() for s in stages]
        return [float(p.stages[s].dp / layer_s[s]) for s in stages]
    pipelines = [layout.pipelines(replica[0]) for replica in layout.replicas]
    replica_speeds = [count / c.layer.sum(axis=0) for count, c in zip(pipelines, compute_times(layout), strict=True)]
    return [float(speed) for speed in np.sum(replica_speeds, axis=0)]


def limit_s(compute_s: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the seconds of a step if work moved freely between stages, in parts of a layer, and no rank waited.

    `compute_s`: the mean seconds that a stage's ranks compute in a step; `speeds`: of :func:`stage_speeds`.
    """
    return float(np.average(compute_s, weights=speeds))
