"""How many layers some stages on one fabric can compute in a given time: dynamic programming over its nodes."""

from __future__ import annotations

import numpy as np

from holmes_hpc.planning.search.offers import Offer


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
        if not offer.fixed:
            self.reach[0] = 0.0

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
