"""The simulated step of a layout that is per stage, replica by replica: its events and parts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import row_durations, timing
from holmes_hpc.planning.schedule.event_simulation import Went, ends


@dataclass(frozen=True)
class Event:
    """Of the simulated step: `kind` forward, backward, send (listed at its sender), param_sync or grad_sync; `row` as
    :class:`Order` counts; seconds."""

    row: int
    kind: str
    micro_batch: int | None
    start: float
    end: float


def events(layout: Layout, layers: np.ndarray) -> list[Event]:
    """Return the simulated step of one layer split."""
    order, durations = layout.order, row_durations(times := timing(layout, layers), 0)
    tail = times.replicas[0].tail[0, :, 0].tolist()
    passes, made, now = list[Went](), list[Event](), [0.0] * order.rows
    ends(order, durations, passes)
    for w in passes:
        if w.forward and w.micro_batch == order.own(w.row)[0]:
            gathering = durations.ready[order.stage_of(w.row)]
            made.append(Event(w.row, "param_sync", None, w.start - gathering, w.start))
        made.append(Event(w.row, "forward" if w.forward else "backward", w.micro_batch, w.start, w.end))
        now[w.row] = w.end
        if w.sent is not None:
            made.append(Event(w.row, "send", w.micro_batch, *w.sent))
    return made + [Event(row, "grad_sync", None, end, end + tail[order.stage_of(row)]) for row, end in enumerate(now)]


def breakdown_per_stage(layout: Layout, layers: np.ndarray) -> dict[str, float]:
    """Return seconds of the step of the replica that computes longest, by part, as `predict.breakdown` has them."""
    times, simulated = timing(layout, layers), events(layout, layers)
    end = max(e.end for e in simulated)
    work: defaultdict[int, float] = defaultdict(float)
    for e in simulated:
        work[e.row] += e.end - e.start if e.kind in ("forward", "backward") else 0.0
    row = max(work, key=lambda r: work[r])
    gather = next(e.end - e.start for e in simulated if e.row == row and e.kind == "param_sync")
    sync = max(0.0, end - max(e.end for e in simulated if e.kind != "grad_sync"))
    return {
        "compute_s": work[row],
        "pipeline_wait_s": end - work[row] - gather - sync,
        "grad_sync_s": sync + times.tied + times.norm,
        "param_sync_s": gather + float(times.gather[0].max()),
        "optimizer_s": float(times.optimizer[0]) + times.other,
    }
