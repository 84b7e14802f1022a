"""A placement: what runs where, before layers, schedule and recomputation are chosen; and in which order its fabrics
follow on each other, where some are farther apart than others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from holmes_hpc.fabric.site import Fabric
from holmes_hpc.planning.plan.parts import Component
from holmes_hpc.planning.search.estimate import Estimate


@dataclass(frozen=True)
class Block:
    """`nodes` nodes of a fabric with `per_node` ranks each; they hold `stages` pipeline stages, all of them in a
    hierarchical placement."""

    fabric: Fabric
    nodes: int
    per_node: int
    stages: int


def component(fabric: Fabric, nodes: int, per_node: int, first: int, stages: int) -> Component:
    """Return `nodes` of a fabric as the component that holds `stages` stages from `first` on."""
    held = tuple(range(first, first + stages))
    return Component(fabric.partition, fabric.constraint, fabric.name, nodes, per_node, held)


@dataclass(frozen=True)
class Placement:
    """`estimate`: of its step, good enough to rank placements. `instances`: of the distributed optimizer."""

    strategy: str
    micro: int
    tp: int
    dp: int
    blocks: tuple[Block, ...]
    estimate: Estimate
    instances: int = 1

    @cached_property
    def least_s(self) -> float:
        """Seconds of the step, by the estimate."""
        return float(self.estimate.least())

    @property
    def fabrics(self) -> frozenset[str]:
        return frozenset(b.fabric.name for b in self.blocks)

    @property
    def pp(self) -> int:
        return self.blocks[0].stages if self.strategy == "hierarchical-dp" else sum(b.stages for b in self.blocks)

    @property
    def gpus(self) -> int:
        return sum(b.nodes * b.per_node for b in self.blocks)

    def key(self) -> tuple[float, int, int, tuple[tuple[str, int], ...]]:
        return self.least_s, self.gpus, self.tp, tuple((b.fabric.name, b.nodes) for b in self.blocks)


def least_edges(across: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the longest, all) of the edges between the `used` fabrics, (rows, F), from the seconds between any two,
    (F, F): those of the spanning tree with the least edges (Prim 1957), which no order can better; (rows,) each."""
    rows, fabrics = np.arange(len(used)), used.shape[1]
    inside = np.zeros_like(used)
    inside[rows, used.argmax(axis=1)] = True
    near = np.where(used, across[used.argmax(axis=1)], np.inf)
    longest, total = np.zeros(len(used)), np.zeros(len(used))
    for _ in range(fabrics - 1):
        near[inside] = np.inf
        at = near.argmin(axis=1)
        edge = near[rows, at]
        edge = np.where(np.isfinite(edge), edge, 0)
        longest, total = np.maximum(longest, edge), total + edge
        inside[rows, at] = True
        near = np.where(used, np.minimum(near, across[at]), np.inf)
    return longest, total


def along(across: np.ndarray, fabrics: list[int], ring: bool = False) -> list[int]:
    """The `fabrics` in an order with short edges: from each in turn on to the nearest that is left; as they are where
    no other is better. `ring`: the last is joined to the first too."""

    def edges(order: list[int]) -> tuple[float, float]:
        steps = [float(across[a, b]) for a, b in pairwise(order)]
        steps += [float(across[order[-1], order[0]])] if ring else []
        return max(steps), sum(steps)

    if len(fabrics) < 3:
        return fabrics
    best, least = fabrics, edges(fabrics)
    for first in fabrics:
        order, left = [first], [f for f in fabrics if f != first]
        while left:
            order.append(min(left, key=lambda f: across[order[-1], f]))
            left.remove(order[-1])
        if edges(order) < least:
            best, least = order, edges(order)
    return best
