"""A placement: the nodes that hold each stage, before layers, schedule and recomputation are chosen.

The order of its pools along the pipeline matters if some pairs of pools have slower links than other pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, permutations
from math import gcd

import numpy as np

from holmes_hpc.fabric.site import Pool
from holmes_hpc.planning.plan.parts import Component
from holmes_hpc.planning.search.estimate import Estimate

FEW_POOLS = 4  # up to this number, all orders are tried


@dataclass(frozen=True)
class Block:
    """Nodes of one pool and the number of pipeline stages on them (all stages in a hierarchical placement)."""

    pool: Pool
    nodes: int
    gpus_per_node: int
    stages: int


def component(block: Block, first_stage: int) -> Component:
    """Return the component that holds the stages of `block`, beginning with `first_stage`."""
    pool, stages = block.pool, range(first_stage, first_stage + block.stages)
    return Component(pool.partition, pool.constraint, pool.name, block.nodes, block.gpus_per_node, tuple(stages))


@dataclass(frozen=True)
class Placement:
    """Blocks of nodes with one TP, DP and micro-batch size. `estimate`: of the step time, accurate enough to rank
    placements. `instances`: the number of optimizer instances into which the data-parallel ranks are divided."""

    strategy: str
    micro_size: int
    tp: int
    dp: int
    blocks: tuple[Block, ...]
    estimate: Estimate
    instances: int = 1

    @cached_property
    def estimate_s(self) -> float:
        """The estimated seconds of the step."""
        return float(self.estimate.least_seconds())

    @property
    def pools(self) -> frozenset[str]:
        return frozenset(b.pool.name for b in self.blocks)

    @property
    def pp(self) -> int:
        return self.blocks[0].stages if self.strategy == "hierarchical-dp" else sum(b.stages for b in self.blocks)

    @property
    def gpus(self) -> int:
        return sum(b.nodes * b.gpus_per_node for b in self.blocks)

    def sort_key(self) -> tuple[float, int, int, tuple[tuple[str, int], ...]]:
        return self.estimate_s, self.gpus, self.tp, tuple((b.pool.name, b.nodes) for b in self.blocks)


def sharded_in_nodes(placement: Placement) -> Placement | None:
    """Return the placement with an optimizer instance in each node of a stage; None if it has one replica, or all."""
    replicas = gcd(*(b.gpus_per_node // placement.tp for b in placement.blocks))
    can_change = placement.strategy != "hierarchical-dp" and 1 < replicas < placement.dp and not placement.dp % replicas
    return replace(placement, instances=placement.dp // replicas) if can_change else None


def other_orders(placement: Placement) -> Iterator[tuple[Block, ...]]:
    """Yield other orders of the pools along the pipeline: every order of few pools, or every swap of two pools."""
    blocks = placement.blocks
    if placement.strategy == "hierarchical-dp":
        return
    if len(blocks) <= FEW_POOLS:
        yield from (order for order in permutations(blocks) if order != blocks)
        return
    for a, b in combinations(range(len(blocks)), 2):
        order = list(blocks)
        order[a], order[b] = order[b], order[a]
        yield tuple(order)


def spanning_tree_edges(edge_s: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the longest edge, the sum of all edges) of the minimum spanning tree (Prim 1957) of each placement's
    pools, (placements,) each. They are lower bounds for every order of the pools. `edge_s`: seconds between any two
    pools, (P, P). `used`: the pools of each placement, (placements, P)."""
    indices, pool_count = np.arange(len(used)), used.shape[1]
    in_tree = np.zeros_like(used)
    in_tree[indices, used.argmax(axis=1)] = True
    nearest_s = np.where(used, edge_s[used.argmax(axis=1)], np.inf)
    longest, total = np.zeros(len(used)), np.zeros(len(used))
    for _ in range(pool_count - 1):
        nearest_s[in_tree] = np.inf
        nearest = nearest_s.argmin(axis=1)
        edge = nearest_s[indices, nearest]
        edge = np.where(np.isfinite(edge), edge, 0)
        longest, total = np.maximum(longest, edge), total + edge
        in_tree[indices, nearest] = True
        nearest_s = np.where(used, np.minimum(nearest_s, edge_s[nearest]), np.inf)
    return longest, total


def shortest_order(edge_s: np.ndarray, pools: list[int], is_ring: bool = False) -> list[int]:
    """Return the pools in an order with short edges, in which each pool is followed by the nearest unvisited pool.
    Return `pools` if no such order is better. `is_ring`: the last pool also has an edge to the first."""

    def edge_lengths(order: list[int]) -> tuple[float, float]:
        edges = [float(edge_s[a, b]) for a, b in pairwise(order)]
        edges += [float(edge_s[order[-1], order[0]])] if is_ring else []
        return max(edges), sum(edges)

    if len(pools) < 3:
        return pools
    best_order, best_lengths = pools, edge_lengths(pools)
    for first in pools:
        order, unvisited = [first], [f for f in pools if f != first]
        while unvisited:
            order.append(min(unvisited, key=lambda f: edge_s[order[-1], f]))
            unvisited.remove(order[-1])
        if edge_lengths(order) < best_lengths:
            best_order, best_lengths = order, edge_lengths(order)
    return best_order
