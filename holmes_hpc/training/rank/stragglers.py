"""Finding slow nodes: how long ranks compute that do the same work, compared every few steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from holmes_hpc.planning.cost.flops import head_flops, layer_flops
from holmes_hpc.planning.plan.plan import Plan

SLOW = 1.3  # times the median of its stage
SLOW_STAGE = 1.5  # times what a layer takes elsewhere: a stage's share of the work is known less well


class Stragglers:
    """Compares how long ranks compute, over `every` steps: those of a stage, which do the same work; and, where nobody
    else has a stage's layers (DP 1), stages with GPUs alike, each by its `work` (see :func:`work_of_stages`).

    `stages`: their ranks; `nodes`: of every rank; `alike`: what the ranks of each stage compute with.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[int]],
        nodes: Sequence[str],
        work: Sequence[float] = (),
        alike: Sequence[Any] = (),
        every: int = 20,
    ) -> None:
        self._stages, self._nodes, self._work, self._alike, self._every = stages, nodes, work, alike, every
        self._seen: list[Sequence[float]] = []

    def step(self, compute_s: Sequence[float]) -> list[str]:
        """Take one step's computing seconds of every rank; lines about slow ones come back every so many steps."""
        self._seen.append(compute_s)
        if len(self._seen) < self._every:
            return []
        times = [statistics.median(step[rank] for step in self._seen) for rank in range(len(compute_s))]
        self._seen.clear()
        lines = []
        for number, ranks in enumerate(self._stages):
            middle = statistics.median_low([times[r] for r in ranks])
            slow = [r for r in ranks if len(ranks) > 1 and middle > 0 and times[r] > SLOW * middle]
            lines += [self._line(r, times, times[r] / middle, f"as the others of stage {number}") for r in slow]
        return lines + self._between_stages(times)

    def _between_stages(self, times: Sequence[float]) -> list[str]:
        pace = [statistics.median_low([times[r] for r in self._stages[s]]) / work for s, work in enumerate(self._work)]
        middles = [
            statistics.median_low([p for p, gpu in zip(pace, self._alike, strict=True) if gpu == own])
            for own in self._alike
        ]
        return [
            self._line(
                self._stages[number][0],
                times,
                own / middle,
                f"for a layer of stage {number} as the other stages' nodes",
            )
            for number, (own, middle) in enumerate(zip(pace, middles, strict=True))
            if middle > 0 and own > SLOW_STAGE * middle
        ]

    def _line(self, rank: int, times: Sequence[float], ratio: float, than: str) -> str:
        return (
            f"warning: node {self._nodes[rank]}: rank {rank} computes {ratio:.2f} times as long {than} "
            f"({times[rank] * 1000:.0f} ms a step); look for other processes, heat or a failing device there"
        )


def work_of_stages(plan: Plan, paced: Mapping[str, float] | None) -> tuple[list[float], list[Any]]:
    """For :class:`Stragglers`: every stage's work in layers (the last one's head as many as its FLOPs are worth; a pace
    is kept by layers alone, times its fabric's of `paced`), and its GPU. `paced`: None without one.
    Nothing where every stage has ranks to compare among themselves."""
    replicas = max(stage.dp for stage in plan.parallel.stages)
    if replicas > 1 or min(stage.layers for stage in plan.stages) < 1:
        return [], []
    length, fabrics = plan.batch.sequence_length, {f.name: f for f in plan.site.fabrics}
    work = [stage.layers * (paced or {}).get(stage.fabric, 1.0) for stage in plan.stages]
    if paced is None:
        work[-1] += head_flops(plan.model, length) / layer_flops(plan.model, length, length)
    return work, [fabrics[stage.fabric].gpu for stage in plan.stages]
