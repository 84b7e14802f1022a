"""Which placements are listed, by their estimates: all where they are few, then those not far from the best."""

from math import inf, isfinite

SMALL = 300  # placements up to which estimates drop none


class Limit:
    """The least estimate so far, of all placements, and of those on each fabric, each pair and all fabrics: they are
    looked at whatever the others promise. Up to SMALL placements all are allowed; then those whose estimate is at most
    `margin` times that."""

    def __init__(self, fabrics: int, margin: float) -> None:
        self.fabrics, self.margin, self.count = fabrics, margin, 0
        self.least: dict[frozenset[str], float] = {}

    def most(self, on: frozenset[str] = frozenset()) -> float:
        """Seconds up to which placements on these fabrics are allowed."""
        return inf if self.count <= SMALL else self.margin * self.least.get(self._kind(on), inf)

    def allows(self, estimate: float, on: frozenset[str]) -> bool:
        self.count += isfinite(estimate)
        kind = self._kind(on)
        for one in (kind, frozenset[str]()):
            self.least[one] = min(self.least.get(one, inf), estimate)
        return isfinite(estimate) and estimate <= self.most(on)

    def _kind(self, on: frozenset[str]) -> frozenset[str]:
        """Which of the least ones counts; the empty set: that of all."""
        return on if required(len(on), self.fabrics) else frozenset()


def required(used: int, fabrics: int) -> bool:
    """Whether the best placement on so many of a site's fabrics is always tried: one alone, a pair, all."""
    return used in (1, 2, fabrics)
