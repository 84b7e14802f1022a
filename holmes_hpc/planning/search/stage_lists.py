"""Lists of stages, each stage as (index of its pool, nodes, TP): their orders, and lists one change away.

A table holds how many layers the stages on one pool can compute in a given time, by dynamic programming over nodes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, permutations, product
from math import inf
from typing import TypeVar

import numpy as np

from holmes_hpc.planning.search.problem import AvailablePool

FEW_POOLS = 3  # up to this number, all orders are tried
MAX_UNITS = 128  # a larger pool is divided into this many units of several nodes
T = TypeVar("T")
Stage = tuple[int, int, int]
Stages = tuple[Stage, ...]
Estimates = Callable[[list[Stages]], list[float]]  # seconds of a step with each of some lists of stages


def pools_of(stages: Stages) -> frozenset[int]:
    """Return the indices of the pools that hold the stages."""
    return frozenset(pool for pool, *_ in stages)


def taking_turns(items: Iterable[T], stages: Callable[[T], int]) -> list[T]:
    """Return the items so that their numbers of `stages` take turns: the first with each number, then the second."""
    seen = Counter[int]()

    def turn(item: T) -> int:
        seen[stages(item)] += 1
        return seen[stages(item)]

    return sorted(items, key=turn)


def stage_orders(stages: Sequence[Stage]) -> Iterator[Stages]:
    """Yield the stages with the pools in other orders, and with each pool's stages forward or reversed; with more than
    FEW_POOLS pools, only in the given order and its reverse, with all pools' stages alike."""
    parts = [tuple(part) for _, part in groupby(stages, key=lambda stage: stage[0])]  # the stages of each pool
    if len(parts) <= FEW_POOLS:
        orders = [choice for order in permutations(parts) for choice in product(*((p, p[::-1]) for p in order))]
    else:
        orders = [tuple(p[::step] for p in order) for order in (parts, parts[::-1]) for step in (1, -1)]
    yield from (sum(order, ()) for order in orders)


def in_best_orders(lists: Iterable[Sequence[Stage]], estimates: Estimates) -> Iterator[Stages]:
    """Yield `lists` with their pools in the order with the shortest estimate that moves of one pool reach. Lists with
    the same pools and the same TPs at the first stages of these have one order."""
    orders = dict[tuple[tuple[int, int], ...], tuple[int, ...]]()
    for stages in lists:
        parts = [tuple(part) for _, part in groupby(stages, key=lambda stage: stage[0])]
        key = tuple((pool, tp) for (pool, _, tp), *_ in parts)
        if key not in orders:
            orders[key] = _best_order(parts, estimates)
        yield sum((parts[i] for i in orders[key]), ())


def _best_order(parts: list[Stages], estimates: Estimates) -> tuple[int, ...]:
    order, seconds = tuple(range(len(parts))), inf
    while True:
        kept = [[i for i in order if i != moved] for moved in order]
        orders = [order, *((*k[:j], i, *k[j:]) for i, k in zip(order, kept, strict=True) for j in range(len(order)))]
        best_s, order = min(zip(estimates([sum((parts[i] for i in o), ()) for o in orders]), orders, strict=True))
        if best_s >= seconds:
            return order
        seconds = best_s


def neighbours(stages: Stages, single_stages: Iterable[Stage]) -> Iterator[Stages]:
    """Yield the stages with one change on a pool: one split, two merged or swapped, a node moved between two, added or
    left out, or half or twice the TP. `single_stages`: the stages that hold all nodes of a pool."""
    used, all_nodes = Counter[int](), {(f, tp): nodes for f, nodes, tp in single_stages}
    for f, nodes, _ in stages:
        used[f] += nodes
    for i, (f, nodes, tp) in enumerate(stages):
        above, below = stages[:i], stages[i + 1 :]
        changed = [(f, nodes, other_tp) for other_tp in (tp // 2, 2 * tp)]
        changed += [(f, nodes - 1, tp)] * (nodes > 1) + [(f, nodes + 1, tp)] * (used[f] < all_nodes[f, tp])
        yield from ((*above, stage, *below) for stage in changed if (f, stage[2]) in all_nodes)
        for first in {1, nodes // 2, nodes - 1} - {0, nodes}:
            yield (*above, (f, first, tp), (f, nodes - first, tp), *below)
        if below and below[0][0] == f:
            yield (*above, (f, nodes + below[0][1], tp), *below[1:])
            yield (*above, below[0], stages[i], *below[1:])
        for j, (target, target_nodes, target_tp) in enumerate(stages if nodes > 1 else ()):
            if target == f and i != j:
                moved = {i: (f, nodes - 1, tp), j: (target, target_nodes + 1, target_tp)}
                yield tuple(moved.get(s, stage) for s, stage in enumerate(stages))


def other_pools(stages: Stages, single_stages: Iterable[Stage]) -> Iterator[Stages]:
    """Yield the stages without one of their pools, with two neighbouring pools swapped, and with one node or all nodes
    of another pool anywhere between pools. `single_stages`: the stages that hold all nodes of a pool."""
    parts = [tuple(part) for _, part in groupby(stages, key=lambda stage: stage[0])]
    used = pools_of(stages)
    for i in range(len(parts)) if len(parts) > 1 else ():
        yield sum((*parts[:i], *parts[i + 1 :]), ())
        yield sum((*parts[:i], *parts[i : i + 2][::-1], *parts[i + 2 :]), ())
    for f, all_nodes, tp in single_stages:
        for nodes, i in product({1, all_nodes}, range(len(parts) + 1)) if f not in used else ():
            yield sum((*parts[:i], ((f, nodes, tp),), *parts[i:]), ())


def lists_on(pool: int, available: AvailablePool, tps: Sequence[int]) -> list[Stages]:
    """Return every list of stages on one pool, including the empty one. `tps`: the TPs that a stage may have."""
    by_nodes: list[list[Stages]] = [[()]]  # by the number of nodes
    for nodes in range(1, available.nodes + 1):
        by_nodes.append(
            [(*above, (pool, n, tp)) for n in range(1, nodes + 1) for above in by_nodes[nodes - n] for tp in tps]
        )
    return by_nodes[-1] if available.is_fixed else [stages for lists in by_nodes for stages in lists]


class StageTable:
    """The layers that stages on one pool can compute within each limit on a stage's time.

    `reach`: the most layers of k stages, (K + 1, limits). `tps`: the TPs that a stage may have. `per_tp`: for each TP,
    (seconds of a step per layer on 1 to N nodes, layers that fit there, seconds of a layer for one micro-batch).
    The nodes of a stage are a multiple of `unit`, which is 1 unless the pool is large.
    """

    def __init__(
        self,
        tps: tuple[int, ...],
        per_tp: list[tuple[np.ndarray, np.ndarray, float]],
        available: AvailablePool,
        max_stages: int,
        stage_time_limits: np.ndarray,
    ) -> None:
        self.tps, self.stage_time_limits, self.available = tps, stage_time_limits, available
        self.unit = unit = 1 if available.is_fixed else -(-available.nodes // MAX_UNITS)
        self.units = unit_count = available.nodes // unit
        layers = np.stack(
            [
                np.minimum(np.floor(stage_time_limits[:, None] / step_s + 1e-9), fit)[:, unit - 1 :: unit]
                for step_s, fit, _ in per_tp
            ]
        )
        self.best_tp = layers.argmax(axis=0)  # index, (limits, N)
        self.stage_layers = layers.max(axis=0)  # of one stage on 1 to N units, (limits, N)
        self.stage_layers[self.stage_layers < 1] = -np.inf  # every stage has a layer
        self.layer_s = per_tp[int(self.best_tp[-1, -1])][2]  # with the best TP on all nodes
        no_stage = np.full((len(stage_time_limits), unit_count + 1), -np.inf if available.is_fixed else 0.0)
        no_stage[:, 0] = 0.0
        # For each k, the most layers of k stages on at most (if fixed: exactly) n units of nodes, (limits, N + 1).
        self.filled = [no_stage]
        for _ in range(min(max_stages, unit_count)):
            fewer, table = self.filled[-1], np.full_like(no_stage, -np.inf)
            for n in range(1, unit_count + 1):  # units of the last stage
                with_stage = fewer[:, : unit_count + 1 - n] + self.stage_layers[:, n - 1, None]
                table[:, n:] = np.maximum(table[:, n:], with_stage)
            self.filled.append(table)
        self.reach = np.stack([table[:, unit_count] for table in self.filled])
        self.stages = cache(self._stages)

    def _stages(self, count: int, limit_index: int) -> list[tuple[int, int]]:
        """Return (nodes, TP) of each of the `count` stages with the most layers within a limit, small stages first."""
        stages, free_units = [], self.units
        for k in range(count, 0, -1):
            n = np.arange(1, free_units + 1)  # units of the last stage
            layers = self.filled[k - 1][limit_index, free_units - n] + self.stage_layers[limit_index, n - 1]
            best = n[layers == layers.max()]
            units = int(best[np.argmin(np.abs(best - free_units / k))])  # the most even split
            stages.append((units * self.unit, self.tps[int(self.best_tp[limit_index, units - 1])]))
            free_units -= units
        return sorted(stages)
