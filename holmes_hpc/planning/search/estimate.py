"""Quick estimates of a placement's step, and the limit that prunes placements by them.

An estimate is arithmetic on numbers, or on arrays of many placements at once.
"""

from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any

import numpy as np

FEW_PLACEMENTS = 300  # up to this number, no placement is pruned


@dataclass(frozen=True)
class Estimate:
    """The parts of a step in seconds (numbers, or arrays of shape (placements,)).

    `stages`: their number, less if some have fewer layers than fit in tau. `tau`: the slowest stage's layers, forward
    and backward, of one micro-batch. `head`: a stage's share of the output layer. `transfer`: one stage transfer over
    the slowest edge. `round_trip`: all transfers of one micro-batch, down and up the pipeline. `reduce`: a stage's
    gradient traffic. `exposed`: data-parallel traffic that nothing hides. `front_loaded_share`: without virtual stages,
    the share of `reduce` and `exposed` that remains if the first stages get more layers.
    `max_chunks`: the largest number of virtual stages.
    """

    micro_batches: Any
    stages: Any
    tau: Any
    head: Any
    transfer: Any
    round_trip: Any
    reduce: Any
    exposed: Any
    front_loaded_share: Any
    max_chunks: Any

    def seconds(self, chunks: Any) -> Any:
        """Return the step's seconds with `chunks` virtual stages.

        It is the sum of three times: all micro-batches through the slowest stage or edge; filling and draining the
        pipeline; gradient traffic that the fill of the other stages does not hide.
        """
        maximum = np.maximum if isinstance(self.tau, np.ndarray) else max  # on numbers, max is ten times faster
        fill = (self.stages - 1) * self.tau / chunks
        compute_bound = self.micro_batches * (self.tau + self.head) + self.round_trip * chunks
        other_edges = maximum(0, self.round_trip - 2 * self.transfer)  # to and from the slowest edge
        transfer_bound = self.micro_batches * self.transfer * chunks + other_edges
        hidden = (fill + self.round_trip * chunks) / 2
        remaining_share = 1 - (1 - self.front_loaded_share) * (chunks == 1)
        traffic = (maximum(0, self.reduce - hidden) + self.exposed) * remaining_share
        return maximum(compute_bound, transfer_bound) + fill + traffic

    def least_seconds(self) -> Any:
        """Return the step's seconds with the best number of virtual stages of three: 1, 3 and the maximum."""
        if not isinstance(self.tau, np.ndarray):
            return min(self.seconds(chunks) for chunks in {1, min(3, self.max_chunks), self.max_chunks})
        few = np.minimum(self.max_chunks, 3)
        return np.minimum(self.seconds(1), np.minimum(self.seconds(few), self.seconds(self.max_chunks)))

    def at(self, index: int) -> "Estimate":
        """Return the estimate of one placement from arrays of many."""
        return Estimate(
            *(float(v[index]) if isinstance(v := getattr(self, f.name), np.ndarray) else v for f in fields(self))
        )


class Limit:
    """The pruning limit. Up to FEW_PLACEMENTS placements, none is pruned. Of more, a placement is kept if its estimate
    is at most `margin` times the least so far.

    On one pool, on a pair and on all pools, the least is that of placements on the same pools; else that of all.
    """

    def __init__(self, pool_count: int, margin: float) -> None:
        self.pool_count, self.margin, self.count = pool_count, margin, 0
        self.least_s: dict[frozenset[str], float] = {}

    def max_s(self, pools: frozenset[str] = frozenset()) -> float:
        """Return the longest estimate at which a placement on these pools is kept."""
        return inf if self.count <= FEW_PLACEMENTS else self.margin * self.least_s.get(self._key(pools), inf)

    def admit(self, estimate_s: float, pools: frozenset[str]) -> bool:
        """Record an estimate; return whether its placement is kept so far."""
        self.count += isfinite(estimate_s)
        for key in (self._key(pools), frozenset[str]()):
            self.least_s[key] = min(self.least_s.get(key, inf), estimate_s)
        return isfinite(estimate_s) and estimate_s <= self.max_s(pools)

    def _key(self, pools: frozenset[str]) -> frozenset[str]:
        """Return the pools to which the least estimate applies; the empty set stands for all placements."""
        return pools if is_always_tried(len(pools), self.pool_count) else frozenset()


def is_always_tried(used: int, pool_count: int) -> bool:
    """Return whether the best placement on `used` of `pool_count` pools is always tried: on one, on two or on all."""
    return used in (1, 2, pool_count)
