"""Rows of stages, each (fabric's place among the offers, nodes, TP): other orders of a row, rows a change away, and
how many layers some stages on one fabric can compute in a given time, by dynamic programming over its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, permutations, product

import numpy as np

from holmes_hpc.planning.search.problem import Offer

FEW_FABRICS = 3  # of which every order is looked at, and each one's wider stages first or last by themselves
Stages = tuple[tuple[int, int, int], ...]


def orders(row: list[tuple[int, int, int]]) -> Iterator[Stages]:
    """The stages with the fabrics in other orders, and each fabric's wider stages first or last."""
    parts = [tuple(part) for _, part in groupby(row, key=lambda stage: stage[0])]
    few = len(parts) <= FEW_FABRICS
    for order in permutations(parts) if few else [parts, parts[::-1]]:
        ways = product(*((part, part[::-1]) for part in order)) if few else [order, [part[::-1] for part in order]]
        yield from (sum(way, ()) for way in ways)


def changed(stages: Stages) -> Iterator[Stages]:
    """The stages with one of them cut in two, or two that follow each other made one or in each other's place, or a
    node of one given to another: all within a fabric."""
    for i, (f, nodes, tp) in enumerate(stages):
        before, after = stages[:i], stages[i + 1 :]
        for some in {1, nodes // 2, nodes - 1} - {0, nodes}:
            yield (*before, (f, some, tp), (f, nodes - some, tp), *after)
        if after and after[0][0] == f:
            yield (*before, (f, nodes + after[0][1], tp), *after[1:])
            yield (*before, after[0], stages[i], *after[1:])
        for j, (g, more, other) in enumerate(stages if nodes > 1 else ()):
            if g == f and i != j:
                moved = {i: (f, nodes - 1, tp), j: (g, more + 1, other)}
                yield tuple(moved.get(at, stage) for at, stage in enumerate(stages))


class StageTable:
    """Of one fabric and a choice of TPs: `reach`, the layers that k stages can compute in each tau, (K + 1, taus)."""

    def __init__(
        self,
        tps: tuple[int, ...],
        each: list[tuple[np.ndarray, np.ndarray, float]],
        offer: Offer,
        most: int,
        taus: np.ndarray,
    ) -> None:
        self.tps, self.taus, self.offer = tps, taus, offer
        layers = np.stack([np.minimum(np.floor(taus[:, None] / seconds + 1e-9), fit) for seconds, fit, _ in each])
        self.best = layers.argmax(axis=0)  # the TP, (taus, N)
        self.own = layers.max(axis=0)
        self.own[self.own < 1] = -np.inf  # no stage without a layer
        self.each = each[int(self.best[-1, -1])][2]
        n = offer.nodes
        none = np.full((len(taus), n + 1), -np.inf if offer.fixed else 0.0)
        none[:, 0] = 0.0
        self.filled = [none]  # layers of k stages on at most (fixed: exactly) so many nodes, (taus, N + 1) each
        for _ in range(min(most, n)):
            before, now = self.filled[-1], np.full((len(taus), n + 1), -np.inf)
            for nodes in range(1, n + 1):
                now[:, nodes:] = np.maximum(now[:, nodes:], before[:, : n + 1 - nodes] + self.own[:, nodes - 1, None])
            self.filled.append(now)
        self.reach = np.stack([table[:, n] for table in self.filled])

    def stages(self, count: int, tau: int) -> list[tuple[int, int]]:
        """(nodes, TP) of each of `count` stages that reach most in that tau, the narrowest first."""
        found, left = [], self.offer.nodes
        for k in range(count, 0, -1):
            takes = [self.filled[k - 1][tau, left - n] + self.own[tau, n - 1] for n in range(1, left + 1)]
            best = np.flatnonzero(np.asarray(takes) == max(takes)) + 1
            nodes = int(best[np.argmin(np.abs(best - left / k))])  # the most even, of those that reach as much
            found.append((nodes, self.tps[int(self.best[tau, nodes - 1])]))
            left -= nodes
        return sorted(found)
