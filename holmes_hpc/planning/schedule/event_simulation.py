"""Going through a step of routed micro-batches pass by pass: when each replica computes what, and each transfer goes.

A pass starts when the one before it on its row is done and its input is there; the first passes of a stage, in which
parameters are gathered, when all its rows have come to them; a transfer when its tensor is made and
the NICs of its two nodes have done with those before it on that way, the earliest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from holmes_hpc.planning.schedule.order import Order


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
