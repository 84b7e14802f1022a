"""Detection of slow nodes: compare, every few steps, the compute times of ranks that do the same work."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.cost.flops import head_flops, layer_flops, of_layers
from holmes_hpc.planning.plan.plan import Plan

SLOW = 1.3  # limit of a rank's time, relative to the median of its stage
SLOW_STAGE = 1.5  # the same for a stage's time per layer; higher, because its work is only estimated


class Stragglers:
    """A comparison of the ranks' compute times over `every` steps.

    Ranks of one stage do the same work and are compared directly. With DP 1, stages with equal GPUs are compared by
    time per layer. `stages`: each stage's ranks; `nodes`: each rank's node; `work`: each stage's work in layers;
    `gpus`: each stage's GPU. If `work` and `gpus` (:func:`work_of_stages`) are empty, stages are not compared.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[int]],
        nodes: Sequence[str],
        work: Sequence[float] = (),
        gpus: Sequence[Any] = (),
        every: int = 20,
    ) -> None:
        self._stages, self._nodes, self._work, self._gpus, self._every = stages, nodes, work, gpus, every
        self._steps: list[NDArray[np.float64]] = []

    def add(self, compute_s: Sequence[float] | NDArray[np.float64]) -> list[str]:
        """Add one step's compute seconds of every rank. Return warnings about slow ranks after `every` steps."""
        self._steps.append(np.array(compute_s))  # a copy, because a view would keep the whole step
        if len(self._steps) < self._every:
            return []
        times = np.median(self._steps, axis=0).tolist()
        self._steps.clear()
        warnings = []
        for number, ranks in enumerate(self._stages):
            median_s = statistics.median_low([times[r] for r in ranks])
            slow = [r for r in ranks if len(ranks) > 1 and median_s > 0 and times[r] > SLOW * median_s]
            warnings += [self._warning(r, times, times[r] / median_s, f"the others of stage {number}") for r in slow]
        return warnings + self._compare_stages(times)

    def _compare_stages(self, times: Sequence[float]) -> list[str]:
        stages_s = [statistics.median_low([times[r] for r in ranks]) for ranks in self._stages]
        layer_s = [stage_s / work for stage_s, work in zip(stages_s, self._work, strict=False)]
        median_s = {gpu: statistics.median_low(s) for gpu, s in grouped(zip(self._gpus, layer_s, strict=True))}
        warnings = []
        for number, (gpu, stage_s) in enumerate(zip(self._gpus, layer_s, strict=True)):
            if stage_s > SLOW_STAGE * median_s[gpu] > 0:
                reference = f"other stages for each layer of stage {number}"
                warnings.append(self._warning(self._stages[number][0], times, stage_s / median_s[gpu], reference))
        return warnings

    def _warning(self, rank: int, times: Sequence[float], ratio: float, reference: str) -> str:
        return (
            f"warning: node {self._nodes[rank]}: rank {rank} computes {ratio:.2f} times as long as {reference} "
            f"({times[rank] * 1000:.0f} ms a step); look for other processes, heat or a failing device there"
        )


def work_of_stages(plan: Plan, factors: Mapping[str, float] | None) -> tuple[list[float], list[Any]]:
    """Return each stage's work in layers and its GPU; empty lists if a stage has DP above 1 or no layers.

    The head and a first dense layer count as their FLOPs divided by those of another layer. With emulated compute,
    every layer counts one, and the last stage has no GPU in common with others, because its head is not emulated.
    `factors`: pool -> slow-down of emulated layers; None without emulated compute.
    """
    replicas = max(stage.copies for stage in plan.parallel.stages)
    if replicas > 1 or min(stage.layers for stage in plan.stages) < 1:
        return [], []
    length, pools = plan.batch.sequence_length, {p.name: p for p in plan.site.pools}
    work = [stage.layers * (factors or {}).get(stage.pool, 1.0) for stage in plan.stages]
    if factors is None:
        flops = partial(layer_flops, tokens=length, sequence=length)
        work[0] = of_layers(plan.model, flops, plan.stages[0].layers) / flops(plan.model)
        work[-1] += head_flops(plan.model, length) / flops(plan.model)
    gpus = [pools[stage.pool].gpu for stage in plan.stages]
    return work, gpus if factors is None else [*gpus[:-1], None]
