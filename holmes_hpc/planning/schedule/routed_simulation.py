"""Going through a step of routed micro-batches pass by pass: when each replica computes what, and each transfer goes.

A pass starts when the one before it on its row is done and its input is there; the first passes of a stage, in which
parameters are gathered, when all its rows have come to them; a transfer when its tensor is made and
the NICs of its two nodes have done with those before it on that way, the earliest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from holmes_hpc.planning.schedule.routed import RoutedOrder


@dataclass(frozen=True)
class RoutedDurations:
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


@dataclass(frozen=True)
class Went:
    """One pass of a row: when it began and ended, and when its result was sent and had arrived (None: it goes nowhere).
    """

    row: int
    forward: bool
    micro_batch: int
    start: float
    end: float
    sent: tuple[float, float] | None


def went(order: RoutedOrder, d: RoutedDurations) -> Iterator[Went]:
    """All passes of a step, in the order in which they begin."""
    routes, stages = order.routes, order.stages
    first = [order.row(s, 0) for s in range(stages)]
    stage_of = [order.stage_of(row) for row in range(order.rows)]
    sharing = {n: d.node.count(n) for n in set(d.node)}
    leaves: dict[tuple[int, int], float] = {}  # when a node's NIC is free to send, and to receive
    enters: dict[tuple[int, int], float] = {}
    never = float("inf")
    # when the input of each micro-batch is at each stage: the first needs none, nor does the last for going back
    ahead = [[never if s else 0.0] * order.micro_batches for s in range(stages)]
    back = [[never if s < stages - 1 else 0.0] * order.micro_batches for s in range(stages)]
    now = [0.0] * order.rows
    begun: list[dict[int, float]] = [{} for _ in range(stages)]  # when each row of a stage has come to its first pass
    todo = [[(p.forward, p.micro_batch) for p in reversed(order.passes(row))] for row in range(order.rows)]
    firsts, lasts = ([order.own(row)[at] for row in range(order.rows)] for at in (0, -1))
    waiting: list[tuple[float, int]] = []

    def push(row: int) -> None:
        if todo[row]:
            forward, m = todo[row][-1]
            s = stage_of[row]
            there = (ahead if forward else back)[s][m]
            if there == never:
                return
            if forward and m == firsts[row] and not order.in_turn:
                heappush(waiting, (there + d.ready[s], row))
            elif forward and m == firsts[row]:
                begun[s][row] = there
                if len(begun[s]) == order.replicas[s]:
                    start = max(begun[s].values()) + d.ready[s]
                    for beside in begun[s]:
                        heappush(waiting, (start, beside))
            else:
                heappush(waiting, (max(now[row], there), row))

    for row in range(order.rows):
        push(row)
    while waiting:  # the earliest first, so that shared NICs are taken in turn
        start, row = heappop(waiting)
        s = stage_of[row]
        forward, m = todo[row].pop()
        now[row] = end = start + (d.forward if forward else d.backward)[s]
        to, sent = s + 1 if forward else s - 1, None
        if 0 <= to < stages:
            target = first[to] + routes[to][m]
            busy, later = d.down[s] if forward else d.up[to]
            if not forward and m == lasts[row]:
                busy += d.last[s]
            wire = d.wire[min(s, to)]
            out, into = (d.node[row], wire), (d.node[target], wire)
            went_at = max(end, leaves.get(out, 0.0), enters.get(into, 0.0))
            leaves[out] = went_at + busy + later / sharing[out[0]]
            enters[into] = went_at + busy + later / sharing[into[0]]
            arrived = (ahead if forward else back)[to][m] = went_at + busy + later
            sent = went_at, arrived
            if todo[target] and todo[target][-1] == (forward, m):
                push(target)
        yield Went(row, forward, m, start, end, sent)
        push(row)
