"""Which placements are kept, by their estimates: all where they are few, then those not far from the best."""

from __future__ import annotations

from math import inf, isfinite

SMALL = 300  # placements up to which estimates drop none
MARGIN = 1.6  # placements estimated slower than the best on the same fabrics by more than this are dropped


class Limit:
    """The least estimate so far, of all placements, and of those on each fabric, each pair and all fabrics: they are
    looked at whatever the others promise. Up to SMALL placements all are allowed; then those not far beyond."""

    def __init__(self, fabrics: int) -> None:
        self.fabrics, self.count = fabrics, 0
        self.least: dict[frozenset[str], float] = {}

    def beyond(self, estimate: float, on: frozenset[str]) -> bool:
        own = self.least.get(self._kind(on), inf)
        return self.count > SMALL and estimate > MARGIN * own

    def allows(self, estimate: float, on: frozenset[str]) -> bool:
        self.count += isfinite(estimate)
        kind = self._kind(on)
        for one in (kind, frozenset[str]()):
            self.least[one] = min(self.least.get(one, inf), estimate)
        return isfinite(estimate) and not self.beyond(estimate, on)

    def _kind(self, on: frozenset[str]) -> frozenset[str]:
        """Which of the least ones counts; the empty set: that of all."""
        return on if required(len(on), self.fabrics) else frozenset()


def required(used: int, fabrics: int) -> bool:
    """Whether the best placement on so many of a site's fabrics is always tried: one alone, a pair, all."""
    return used in (1, 2, fabrics)
