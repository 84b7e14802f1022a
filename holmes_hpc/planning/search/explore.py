"""The search loop: which placements and candidates are tried, in which order, and when the search ends.

One queue holds placements with estimates of their step times, and candidates with lower bounds. The search always takes
the most promising entry. It replaces a placement by its candidates, and simulates a candidate. The search ends when no
remaining entry promises a shorter step than the best candidate. If time runs out, the plan notes what could be gained.
"""

import heapq
import itertools
import time
from collections.abc import Callable
from math import inf

from holmes_hpc.errors import ConfigError, rounded
from holmes_hpc.planning.schedule.simulation import ROUGH
from holmes_hpc.planning.search.candidate import Candidate, Evaluator
from holmes_hpc.planning.search.estimate import is_always_tried
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.space import MARGIN, Space

MAX_OVERESTIMATE = 1.1  # an estimate is too long by no more than this factor
MAX_MARGIN_GROWTH = 1.6  # the largest growth of the margin when further placements are listed
MAX_MARGIN = 4.0  # from this margin on, no further placements are listed
MIN_GAIN = 0.002  # smaller gains are not searched for
PROGRESS_INTERVAL_S = 2.0


class Clock:
    """The time limit in `seconds` (None: no limit) and the progress log of a search. `report`: a function that gets a
    line of progress, at most every PROGRESS_INTERVAL_S seconds and never the same line twice in a row."""

    def __init__(self, seconds: float | None = None, report: Callable[[str], None] | None = None) -> None:
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"time limit is {seconds:g} s", where="--seconds", hint="give a number above 0")
        self._start = self._last_report = time.monotonic()
        self._seconds, self._report, self._last_line = seconds, report, ""

    def is_over(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._start > self._seconds

    def report(self, line: str) -> None:
        now = time.monotonic()
        is_due = line != self._last_line and now - self._last_report > PROGRESS_INTERVAL_S
        if self._report is not None and is_due:
            self._last_report, self._last_line = now, line
            self._report(line)


def explore(
    evaluator: Evaluator, space: Space, placements: list[Placement], clock: Clock
) -> tuple[list[Candidate], float]:
    """Return (the simulated candidates of `space` from best to worst, a lower bound in seconds for everything not
    tried; infinite if everything was tried). `placements`: the placements of the space with the shortest estimates,
    sorted. If the space has few placements, lower bounds replace the estimates."""
    margin, simulated, placements = MARGIN, list[Candidate](), [*placements]
    waiting: list[Candidate] = []  # further candidates of the placements that are always tried
    # The best placements on each single pool, each pair of pools and all pools are always simulated.
    first = {p.pools: p for p in reversed(placements) if is_always_tried(len(p.pools), len(evaluator.site.pools))}
    for placement in [p for p in placements if first.get(p.pools) is p]:
        if candidates := sorted(evaluator.candidates(placement), key=lambda c: (c.bound, c.sort_key())):
            simulated.append(evaluator.simulate(candidates[0], ROUGH))
            waiting += candidates[1:]
    least_s, is_complete = min((c.seconds for c in simulated), default=inf), space.is_complete
    numbers = itertools.count()  # the order of entries with equal seconds
    queue: list[tuple[float, int, Placement | Candidate | None]] = [
        (evaluator.bound_s(p) if is_complete else p.estimate_s / MAX_OVERESTIMATE, next(numbers), p)
        for p in placements
        if first.get(p.pools) is not p
    ]
    queue += [(c.bound, next(numbers), c) for c in waiting]
    if placements and not is_complete:  # None stands for all placements that are not listed yet
        queue.append((margin * placements[0].estimate_s / MAX_OVERESTIMATE, -1, None))
    bound_s = inf
    heapq.heapify(queue)
    while queue:
        bound_s = queue[0][0]
        if bound_s >= least_s * (1 - MIN_GAIN) or (simulated and clock.is_over()):
            break
        entry = heapq.heappop(queue)[2]
        if entry is None:
            needed_margin = MAX_OVERESTIMATE * least_s / placements[0].estimate_s if simulated else inf
            listed, margin = set(placements), min(margin * MAX_MARGIN_GROWTH, max(needed_margin, margin * 1.01))
            added = [p for p in space.placements(margin) if p not in listed]
            placements += added
            for p in added:
                heapq.heappush(queue, (p.estimate_s / MAX_OVERESTIMATE, next(numbers), p))
            if margin < MAX_MARGIN:
                heapq.heappush(queue, (margin * placements[0].estimate_s / MAX_OVERESTIMATE, -1, None))
        elif isinstance(entry, Placement):
            for candidate in evaluator.candidates(entry, inf if is_complete else MAX_OVERESTIMATE * least_s):
                if candidate.bound < least_s:
                    heapq.heappush(queue, (candidate.bound, next(numbers), candidate))
        else:
            simulated.append(evaluator.simulate(entry, ROUGH))
            least_s = min(least_s, simulated[-1].seconds)
        clock.report(
            f"planning: {len(simulated)} candidates simulated, the best takes {rounded(least_s)} s a step, lower bound"
            f" of the others {rounded(bound_s)} s"
        )
    return sorted(simulated, key=Candidate.sort_key), bound_s if queue else inf
