"""Which placements and ways to run them are looked at, in which order, and when that is enough.

A queue holds placements, with their estimates, and ways to run them, with lower bounds of their steps. What promises
most is next: a placement is taken apart into its ways, a way is simulated. When what is left promises less than the
best has, the search is over; stopped before, it says how much there might still be to gain.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.schedule.simulation import ROUGH
from holmes_hpc.planning.search.candidate import Candidate, Evaluator
from holmes_hpc.planning.search.estimate import required
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.space import MARGIN, Space

OVER = 1.1  # an estimate is at most so much too long
WIDER = 1.6  # how the margin grows at most within which placements are listed, where the best is slow beside estimates
WIDEST = 4.0  # margin beyond which nothing is listed any more
GAP = 0.002  # what is gained less than this is not looked for
EVERY_S = 2.0  # between two lines of progress


class Clock:
    """When to stop, and when to say how far it is. `seconds`: to search at most, None: until nothing is to be gained;
    `say` is told a line of progress now and then."""

    def __init__(self, seconds: float | None = None, say: Callable[[str], None] | None = None) -> None:
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"{seconds:g} s to search", where="--seconds", hint="give a number above 0")
        self._begin = self._said = time.monotonic()
        self._seconds, self._say = seconds, say

    def is_over(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._begin > self._seconds

    def tell(self, line: str) -> None:
        now = time.monotonic()
        if self._say is not None and now - self._said > EVERY_S:
            self._said = now
            self._say(line)


@dataclass(frozen=True)
class Explored:
    """Simulated `candidates` from best to worst; `promised`: seconds that a step of what was not looked at takes at
    least, infinite where nothing is left."""

    candidates: list[Candidate]
    promised: float


def explored(evaluator: Evaluator, space: Space, placements: list[Placement], clock: Clock) -> Explored:
    """The best ways of all of `space`, of which the first `placements` are listed. Where they are few, estimates are
    not trusted: every placement is taken apart."""
    margin, done, placements = MARGIN, list[Candidate](), [*placements]
    ways: list[Candidate] = []  # of the first placements, that wait
    firsts = _firsts(placements, len(evaluator.site.fabrics))
    for at in firsts:
        if found := sorted(evaluator.ways(placements[at]), key=lambda w: (w.bound, w.key())):
            done.append(evaluator.simulated(found[0], ROUGH))
            ways += found[1:]
    least, whole = min((c.seconds for c in done), default=inf), space.small
    queue: list[tuple[float, int, Placement | Candidate | None]] = [
        (0.0 if whole else p.least_s / OVER, at, p) for at, p in enumerate(placements) if at not in firsts
    ]
    queue += [(way.bound, len(placements) + i, way) for i, way in enumerate(ways)]
    if placements and not whole:
        queue.append((margin * placements[0].least_s / OVER, -1, None))  # all that is not listed yet
    count = len(placements) + len(ways)
    heapq.heapify(queue)
    promised = inf
    while queue:
        promised = queue[0][0]
        if promised >= least * (1 - GAP) or (done and clock.is_over()):
            break
        item = heapq.heappop(queue)[2]
        if item is None:
            needed = OVER * least / placements[0].least_s if done else inf
            known, margin = set(placements), min(margin * WIDER, max(needed, margin * 1.01))
            more = [p for p in space.placements(margin) if p not in known]
            placements += more
            for p in more:
                count += 1
                heapq.heappush(queue, (p.least_s / OVER, count, p))
            if margin < WIDEST:
                heapq.heappush(queue, (margin * placements[0].least_s / OVER, -1, None))
        elif isinstance(item, Placement):
            for way in evaluator.ways(item, inf if whole else OVER * least):
                if way.bound < least:
                    count += 1
                    heapq.heappush(queue, (way.bound, count, way))
        else:
            done.append(evaluator.simulated(item, ROUGH))
            least = min(least, done[-1].seconds)
        clock.tell(
            f"planning: {len(done)} ways simulated, the best takes {least:.4g} s a step, of the others none less"
            f" than {promised:.4g} s"
        )
    return Explored(sorted(done, key=Candidate.key), promised if queue else inf)


def _firsts(placements: list[Placement], fabrics: int) -> tuple[int, ...]:
    """Where among `placements` the first is on each fabric alone, each pair, and all: they are always simulated."""
    places = {p.fabrics: at for at, p in reversed([*enumerate(placements)]) if required(len(p.fabrics), fabrics)}
    return tuple(sorted(places.values()))
