"""The simulated step of a layout that is per stage, replica by replica: its events, parts and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import parameters, row_durations, timing
from holmes_hpc.planning.cost.traffic import activation_bytes, embedding_bytes
from holmes_hpc.planning.schedule.event_simulation import went
from holmes_hpc.planning.spec.parallel import groups
from holmes_hpc.planning.spec.parts import GroupTransport
from holmes_hpc.planning.spec.transport import places as places_of


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
    made, now = list[Event](), [0.0] * order.rows
    for w in went(order, durations):
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
    ends = max(e.end for e in simulated)
    work: defaultdict[int, float] = defaultdict(float)
    for e in simulated:
        work[e.row] += e.end - e.start if e.kind in ("forward", "backward") else 0.0
    row = max(work, key=lambda r: work[r])
    gather = next(e.end - e.start for e in simulated if e.row == row and e.kind == "param_sync")
    sync = max(0.0, ends - max(e.end for e in simulated if e.kind != "grad_sync"))
    return {
        "compute_s": work[row],
        "pipeline_wait_s": ends - work[row] - gather - sync,
        "grad_sync_s": sync + times.tied + times.norm,
        "param_sync_s": gather + float(times.gather[0].max()),
        "optimizer_s": float(times.optimizer[0]) + times.other,
    }


def sent_bytes(layout: Layout, layers: np.ndarray) -> Iterator[tuple[GroupTransport, int, float]]:
    """Yield every group that leaves a node, each rank that sends for it over its node's NIC, and the bytes of payload
    that it sends in a step."""
    p, costs, shared = layout.parallel, layout.costs, defaultdict[tuple[int, int, int], int](int)
    count, places = parameters(layout, layers)[0, :, 0], places_of(layout.components)
    for s in range(p.pp - 1):
        for a, b in zip(layout.order.routes[s], layout.order.routes[s + 1], strict=True):
            shared[s, a, b] += 1
    for g in groups(p, layout.batch.micro_batches(1), layout.model.tied):
        transport = layout.rule.of_members([places[rank] for rank in g.ranks])
        if transport.kind == "local":
            continue
        group = GroupTransport(g.kind, g.ranks, transport, g.stages)
        stage = group.stages[0]
        component = layout.replicas[0][stage]
        gpu = layout.fabric(component).gpu
        how, n = costs.collectives(gpu), len(group.ranks)
        one_a_node = {places[rank]: rank for rank in reversed(group.ranks)}  # a ring leaves each once
        if group.kind == "edge":
            (_, a, i), (_, b, j) = (p.coordinates(rank) for rank in group.ranks)
            tensor = activation_bytes(layout.views[stage], transport, component)  # of one rank
            if (above := p.tp_of(stage)) != (below := p.tp_of(stage + 1)):
                tensor *= max(0.0, min((i + 1) / above, (j + 1) / below) - max(i / above, j / below)) * above
            for rank in group.ranks:
                yield group, rank, shared[stage, a, b] * tensor
        elif group.kind in ("dp", "embd"):
            amount = how.all_reduce * embedding_bytes(layout, 0)
            if group.kind == "dp":
                each = how.reduce_scatter * costs.gradient_size(gpu) + how.all_gather * costs.weight_bytes(gpu)
                amount = each * float(count[stage])
            for rank in one_a_node.values():
                yield group, rank, amount * (n - 1) / n
