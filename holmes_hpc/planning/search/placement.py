"""A placement: what runs where, before layers, schedule and recomputation are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from holmes_hpc.fabric.site import Fabric
from holmes_hpc.planning.search.estimate import Estimate
from holmes_hpc.planning.spec.parts import Component


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
