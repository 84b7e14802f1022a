"""The backward passes by which each stage's weight passes lag behind, and the weight passes left for the end of the
step, for the schedule zero_bubble."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from holmes_hpc.planning.cost.layout import Layout, schedule_of

LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)  # to try
MIN_GAIN = 1e-3  # of a round of changes, to try another


class Timed(Protocol):
    """A candidate: a layout with the seconds of its step."""

    @property
    def layout(self) -> Layout: ...
    @property
    def seconds(self) -> float: ...


C = TypeVar("C", bound=Timed)


def defer(candidate: C, sizes: Sequence[int], try_layout: Callable[[C, Layout], C], refine: Callable[[C], C]) -> C:
    """Return the candidate with the lags, buckets, layers and depth of the shortest step.

    Lags and final passes change for all stages alike, then for one stage at a time. `sizes`: of buckets, in bytes.
    `try_layout`: returns the candidate under a layout that fits and is faster, else the candidate. `refine`: changes
    layers and depth.
    """
    pp, lags = candidate.layout.parallel.pp, {min(n, candidate.layout.order.micro_batches) for n in LAGS}
    changes = [(lag, final) for lag in sorted(lags) for final in sorted({1, max(1, lag)})]
    while True:
        start_s = candidate.seconds
        for stage in (None, *range(pp)):
            for lag, final in changes:
                s = candidate.layout.schedule
                deferred = tuple(lag if stage in (None, i) else n for i, n in enumerate(s.deferred))
                last = tuple(final if stage in (None, i) else n for i, n in enumerate(s.final))
                layout = candidate.layout.with_settings(schedule_of(s.kind, s.in_flight, deferred, last))
                candidate = try_layout(candidate, layout)
        for size in sizes:
            candidate = try_layout(candidate, candidate.layout.with_settings(bucket_bytes=size))
        candidate = refine(candidate)
        if candidate.seconds > start_s * (1 - MIN_GAIN):
            return candidate
