"""Quick estimates of a placement's step time, and the limit that prunes placements by these estimates.

An estimate is computed from numbers for one placement, or from arrays for many placements.
"""

from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any

import numpy as np

FEW_PLACEMENTS = 300  # up to this number, no placement is pruned


@dataclass(frozen=True)
class Estimate:
    """The parts of a step in seconds (numbers, or arrays of shape (placements,)).

    `stages`: the number of stages, reduced if some have fewer layers than they could compute in `tau`. `tau`: forward
    and backward time of one micro-batch in the layers of the slowest stage. `head`: the time that the output layer adds
    to `tau`. `transfer`: one stage transfer over the slowest edge. `round_trip`: all transfers of one micro-batch, down
    and up the pipeline. `reduce`: gradient reduction of a stage that filling the pipeline can still hide. `exposed`:
    data-parallel traffic that nothing hides. `front_loaded_share`: without virtual stages, the share of `reduce` and
    `exposed` that remains if the first stages get more layers. `max_chunks`: the largest number of virtual stages.
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
        """Return the step time in seconds with `chunks` virtual stages: all micro-batches through the slowest stage or
        edge; filling and draining the pipeline; data-parallel traffic that is not hidden meanwhile."""
        maximum = np.maximum if isinstance(self.tau, np.ndarray) else max  # on numbers, max is ten times faster
        fill = (self.stages - 1) * self.tau / chunks
        compute_bound = self.micro_batches * (self.tau + self.head) + self.round_trip * chunks
        other_edges = maximum(0, self.round_trip - 2 * self.transfer)  # all but the slowest
        transfer_bound = self.micro_batches * self.transfer * chunks + other_edges
        hidden = (fill + self.round_trip * chunks) / 2
        remaining_share = 1 - (1 - self.front_loaded_share) * (chunks == 1)
        traffic = (maximum(0, self.reduce - hidden) + self.exposed) * remaining_share
        return maximum(compute_bound, transfer_bound) + fill + traffic

    def least_seconds(self) -> Any:
        """Return the shortest step time, in seconds, of those with 1, 3 and `max_chunks` virtual stages."""
        if not isinstance(self.tau, np.ndarray):
            return min(self.seconds(chunks) for chunks in {1, min(3, self.max_chunks), self.max_chunks})
        few = np.minimum(self.max_chunks, 3)
        return np.minimum(self.seconds(1), np.minimum(self.seconds(few), self.seconds(self.max_chunks)))

    def at(self, index: int) -> "Estimate":
        """Return the estimate of the placement at `index` if this estimate has arrays for many placements."""
        return Estimate(
            *(float(v[index]) if isinstance(v := getattr(self, f.name), np.ndarray) else v for f in fields(self))
        )


class Limit:
    """The limit by which placements are pruned if there are more than FEW_PLACEMENTS. A placement is kept if its
    estimate is at most `margin` times the least estimate so far. A placement on one pool, two pools or all pools is
    compared with placements on the same pools; any other placement is compared with all placements."""

    def __init__(self, pool_count: int, margin: float) -> None:
        self.pool_count, self.margin, self.count = pool_count, margin, 0
        self.least_s: dict[frozenset[str], float] = {}

    def max_s(self, pools: frozenset[str] = frozenset()) -> float:
        """Return the longest estimate at which a placement on these pools is kept."""
        return inf if self.count <= FEW_PLACEMENTS else self.margin * self.least_s.get(self._key(pools), inf)

    def admit(self, estimate_s: float, pools: frozenset[str]) -> bool:
        """Record the estimate of a placement; return whether the placement is kept for now."""
        self.count += isfinite(estimate_s)
        for key in (self._key(pools), frozenset[str]()):
            self.least_s[key] = min(self.least_s.get(key, inf), estimate_s)
        return isfinite(estimate_s) and estimate_s <= self.max_s(pools)

    def _key(self, pools: frozenset[str]) -> frozenset[str]:
        """Return the key in `least_s` for placements on these pools; the empty set is the key for all placements."""
        return pools if is_always_tried(len(pools), self.pool_count) else frozenset()


def is_always_tried(used: int, pool_count: int) -> bool:
    """Return whether the best placement on `used` of `pool_count` pools is always tried: for one, two or all pools."""
    return used in (1, 2, pool_count)
