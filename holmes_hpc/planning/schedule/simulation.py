"""The time of a step: every pass and every stage transfer of a pipeline, each starting when what it waits for is done.

Where all replicas of a stage do the same, a schedule is turned into a graph once (schedule/graph.py), whose nodes are
passes, stage transfers and gradient reductions, and whose arcs say what waits for what: the order of a stage's passes,
the data, a waiting send's receiver, a full window of receives, one NIC that carries two directions. A step's time is
the longest path. Durations are not part of the graph, so one graph evaluates many candidate plans at once. Past a few
rounds a pipeline repeats itself with every micro-batch: :func:`step_seconds` goes through the first :func:`rounds`
micro-batches and extends the rest by the period it has reached.

Where micro-batches are routed, :func:`ends` goes through the step pass by pass: a pass starts when the one before it on
its row is done and its input is there; the first passes of a stage, in which parameters are gathered, when all its rows
have come to them; a transfer when its tensor is made and the NICs of its two nodes have done with those before it on
that way, the earliest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from holmes_hpc.planning.schedule.graph import PARTS, graph
from holmes_hpc.planning.schedule.order import Order


@dataclass(frozen=True)
class Durations:
    """Seconds, arrays of shape (plans, …): one row per candidate plan. S stages, C chunks of each.

    `forward`, `backward`: one pass, (plans, S, C). `down`: one stage transfer from stage s to s+1, `up`: from s to s-1
    (both around the ring), (plans, S). `last_up`: the same for the last micro-batch, beside the gradients' traffic,
    never shorter. `ready`: what the gathering of a chunk's parameters adds to its first pass. `reduce`: its gradients'
    reduction, `tail`: what of it comes after the chunk's last backward pass at least; all (plans, S, C).
    """

    forward: np.ndarray
    backward: np.ndarray
    down: np.ndarray
    up: np.ndarray
    last_up: np.ndarray
    ready: np.ndarray
    reduce: np.ndarray
    tail: np.ndarray

    def table(self) -> np.ndarray:
        """All of them side by side, as schedule/graph.py counts, and a column of zeros."""
        plans = len(self.forward)
        parts = (getattr(self, name).reshape(plans, -1) for name in PARTS)
        return np.concatenate([*parts, np.zeros((plans, 1))], axis=1)


WHOLE, ROUGH = 6000, 1000  # passes of all stages that are gone through before the rest is extended


def rounds(order: Order, passes: int) -> tuple[int, int]:
    """Micro-batches that are gone through one by one before the rest is extended, and over how many more the period is
    measured: `passes` passes of all stages, and a few times the pipeline's depth at least."""
    first = max(passes // (order.stages * order.chunks), order.settled)
    more = max(4, 2 * order.stages)
    return -(-first // order.group) * order.group, -(-more // order.group) * order.group


def step_seconds(order: Order, durations: Durations, shared: tuple[bool, ...] = (), passes: int = WHOLE) -> np.ndarray:
    """Seconds from the start of a step until all gradients are reduced, (plans,).

    A period can still grow late, by as little as the slack that it uses up: what is extended is off by 0.5% at most
    with WHOLE passes (tests/planning/schedule/test_simulation.py), by some percent with ROUGH ones.
    """
    first, more = rounds(order, passes)
    table = durations.table()
    if order.micro_batches <= first + more:
        return graph(order, shared).ends(table).max(axis=1)
    at = [graph(replace(order, micro_batches=m), shared).ends(table).max(axis=1) for m in (first, first + more)]
    return np.asarray(at[1] + (at[1] - at[0]) * ((order.micro_batches - first - more) / more))


def least_seconds(order: Order, durations: Durations, shared: tuple[bool, ...] = ()) -> np.ndarray:
    """Less than :func:`step_seconds` under any schedule of this project, (plans,).

    Each stage has all its passes to do, after the first micro-batch has come down to it (each stage gathers its
    parameters when it comes) and before the last one's gradients have gone up from it; stages that wait for their
    transfers (`waits`) also have those to do for every micro-batch of the steady state. Each edge has all transfers of
    its two directions to carry, one after the other, and where `shared` one NIC carries both.
    """
    d, stages, m = durations, order.stages, order.micro_batches
    work = m * (d.forward + d.backward).sum(axis=2)
    if order.schedule.waits and stages > 1:
        below = np.maximum(d.down[:, :-1], d.up[:, 1:])
        steady = np.maximum(0, m - (stages - 1 - np.arange(stages)) - 1)
        work[:, :-1] += steady[:-1] * below
        work[:, 1:] += steady[1:] * below
    fill = d.forward[:, :, 0] + d.backward[:, :, 0]
    fill[:, :-1] += d.down[:, :-1] + d.up[:, 1:]
    fill += d.ready[:, :, 0]
    before = np.cumsum(fill, axis=1) - fill
    through_all = (d.forward + d.backward + d.ready).sum(axis=(1, 2))  # of one micro-batch, chunk after chunk
    least = np.maximum((before + work + d.ready[:, :, 0]).max(axis=1), through_all)
    if stages > 1:
        least = np.maximum(least, _on_the_wire(order, d, shared).max(axis=1))
    return np.asarray(least + d.tail[:, :, 0].min(axis=1))


def _on_the_wire(order: Order, d: Durations, shared: tuple[bool, ...]) -> np.ndarray:
    """For each stage, (plans, S): the transfers that leave it, after the first one's way down to it, and before the
    last micro-batch's way on: down, round the last stage, and up."""
    m, chunks, stages = order.micro_batches, order.chunks, order.stages
    down, up = m * chunks * d.down, m * chunks * d.up
    down[:, -1] = m * (chunks - 1) * d.down[:, -1]  # over the edge that closes the ring: to the next chunk only
    up[:, 0] = m * (chunks - 1) * d.up[:, 0]
    edges = np.zeros_like(d.down)
    edges[:, 1:] = d.down[:, :-1]
    to_here = np.cumsum(d.forward[:, :, 0] + d.ready[:, :, 0] + edges, axis=1)  # the first micro-batch is computed here
    upward = d.backward[:, :, 0].copy()
    upward[:, 1:] += d.up[:, 1:]
    on_up = np.cumsum(upward, axis=1) - upward  # from where the gradients have left this stage
    first = d.backward[:, :, -1].copy()  # the first micro-batch comes back through the last chunk
    first[:, 1:] += d.up[:, 1:]
    turned = to_here[:, -1:] + np.cumsum(first[:, ::-1], axis=1)[:, ::-1] - first + d.backward[:, :, -1]
    last = d.forward[:, :, -1] + edges
    on_down = last.sum(axis=1, keepdims=True) - np.cumsum(last, axis=1)
    on_down[:, :-1] -= d.down[:, :-1]
    both = to_here + down + up + on_up
    ways = np.maximum(
        to_here + down + np.maximum(0, on_down) + d.backward[:, :, -1].sum(axis=1, keepdims=True), turned + up + on_up
    )
    return np.where(np.array(shared or (False,) * stages), both, ways)


@dataclass(frozen=True)
class RowDurations:
    """Seconds, per stage where nothing else is said. `forward`, `backward`: of a pass; `ready`: before the first one,
    when all rows of the stage have come to it; `last`: what the transfer up takes longer after a row's last pass;
    `down`, `up`: for each edge, from its upper stage, how long a transfer holds a NIC and how much later it arrives;
    `node`: of each row; `wire`: of each edge, the number of the network that it goes by (edges of one network share a
    node's NIC)."""

    forward: Sequence[float]
    backward: Sequence[float]
    ready: Sequence[float]
    last: Sequence[float]
    down: Sequence[tuple[float, float]]
    up: Sequence[tuple[float, float]]
    node: Sequence[int]
    wire: Sequence[int]


class Went(NamedTuple):
    """One pass of a row: when it began and ended, and when its result was sent and arrived (None: it goes nowhere)."""

    row: int
    forward: bool
    micro_batch: int
    start: float
    end: float
    sent: tuple[float, float] | None


def ends(order: Order, d: RowDurations, passes: list[Went] | None = None) -> list[float]:
    """Return when each row is done with its last pass; infinite for one that waits for ever (too little in flight).
    `passes`: gets every pass, in the order in which they begin.

    A search goes through millions of passes: each is a number here, twice its micro-batch, and one more if it is a
    backward pass.
    """
    stages, never = order.stages, float("inf")
    of_stage = [order.stage_of(row) for row in range(order.rows)]
    counts = [0] * (max(d.node) + 1)
    for node in d.node:
        counts[node] += 1
    sharing = [counts[node] for node in d.node]
    nics = [[d.node[row] * max(1, len(d.wire)) + wire for row in range(order.rows)] for wire in d.wire]  # by edge
    leaves, enters = ([0.0] * (len(counts) * max(1, len(d.wire))) for _ in "io")  # when a NIC is free to send, receive
    # when the input of each pass is at each stage: the first needs none, nor does the last for going back
    there = [[never if s else 0.0, never if s < stages - 1 else 0.0] * order.micro_batches for s in range(stages)]
    targets = [[order.row(s, replica) for replica in route] for s, route in enumerate(order.routes)]
    todo = [_numbers(order, row) for row in range(order.rows)]
    firsts, lasts = [row[0] for row in todo], [row[-1] for row in todo]
    at, now, in_turn = [0] * order.rows, [0.0] * order.rows, order.takes_turns
    begun: list[dict[int, float]] = [{} for _ in range(stages)]  # when each row of a stage has come to its first pass
    waiting: list[tuple[float, int]] = []

    def begin(row: int, come: float) -> None:
        """A row's first pass, whose input has come."""
        s = of_stage[row]
        begun[s][row] = come
        if not in_turn:
            heappush(waiting, (come + d.ready[s], row))
        elif len(begun[s]) == order.replicas[s]:
            start = max(begun[s].values()) + d.ready[s]
            for beside in begun[s]:
                heappush(waiting, (start, beside))

    for row in range(order.replicas[0]):
        begin(row, 0.0)
    while waiting:  # the earliest first, so that shared NICs are taken in turn
        start, row = heappop(waiting)
        s, own = of_stage[row], todo[row]
        number = own[at[row]]
        at[row] += 1
        back, m = number & 1, number >> 1
        end = now[row] = start + (d.backward[s] if back else d.forward[s])
        to, sent = s - 1 if back else s + 1, None
        if 0 <= to < stages:
            target, edge = targets[to][m], to if back else s
            busy, later = d.up[to] if back else d.down[s]
            if number == lasts[row]:
                busy += d.last[s]
            out, into = nics[edge][row], nics[edge][target]
            leaving = max(end, leaves[out], enters[into])
            arrived = there[to][number] = leaving + busy + later
            leaves[out] = leaving + busy + later / sharing[row]
            enters[into] = leaving + busy + later / sharing[target]
            sent = leaving, arrived
            if number == firsts[target]:
                begin(target, arrived)
            elif at[target] < len(todo[target]) and todo[target][at[target]] == number:
                heappush(waiting, (max(now[target], arrived), target))
        if passes is not None:
            passes.append(Went(row, not back, m, start, end, sent))
        if at[row] < len(own) and (come := there[s][own[at[row]]]) != never:
            heappush(waiting, (max(end, come), row))
    return [end if at[row] == len(todo[row]) else never for row, end in enumerate(now)]


def _numbers(order: Order, row: int) -> list[int]:
    """Return what `row` computes in order, each pass as twice its micro-batch, and one more if it is a backward one."""
    own, turns = np.array(order.own(row)), order.computing(row)
    numbers: list[int] = (2 * own[turns % len(own)] + turns // len(own)).tolist()
    return numbers
