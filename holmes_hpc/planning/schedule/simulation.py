"""The simulated time of a step, from every pass and every stage transfer of a pipeline.

If all replicas of a stage do the same, a schedule becomes a graph once (schedule/graph.py). Its nodes are passes, stage
transfers and gradient reductions. Its arcs are dependencies: the order of a stage's passes, the data, the receiver of a
blocking send, a full window of receives, one NIC for two directions. The step time is the longest path. Durations are
not part of the graph, so one graph evaluates many candidate plans at once. After a few rounds a pipeline is periodic:
:func:`step_seconds` simulates the first :func:`rounds` of micro-batches and extrapolates from their period.

With per-stage TP/DP, :func:`row_end_times` simulates the step pass by pass. A pass starts when the previous pass of its
row is done and its input has arrived. The first passes of a stage, in which parameters are gathered, start when all its
rows have reached them. A transfer starts when its tensor is computed and both NICs have completed earlier transfers in
that direction, the earliest first.
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
    """Durations in seconds, one row per candidate plan, for S stages of C chunks.

    `forward`, `backward`: one pass, (plans, S, C). `down`, `up`: one stage transfer from stage s to s+1 and to s-1,
    with wrap-around, (plans, S). `last_up`: `up` of the last micro-batch, which competes with gradient traffic; never
    shorter. `ready`: time that the parameter gather adds to a chunk's first pass. `reduce`: the reduction of a chunk's
    gradients. `tail`: its least part after the chunk's last backward pass. These three are (plans, S, C).
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
        """Return all durations side by side, in the columns of schedule/graph.py, and a column of zeros."""
        plans = len(self.forward)
        parts = (getattr(self, name).reshape(plans, -1) for name in PARTS)
        return np.concatenate([*parts, np.zeros((plans, 1))], axis=1)


ACCURATE, ROUGH = 6000, 1000  # passes of all stages to simulate before the extrapolation


def rounds(order: Order, passes: int) -> tuple[int, int]:
    """Return the number of micro-batches to simulate, and of further ones over which the period is measured.
    The first has about `passes` passes of all stages, and at least those until the pipeline is periodic."""
    first = max(passes // (order.stages * order.chunks), order.periodic_after)
    period = max(4, 2 * order.stages)
    return -(-first // order.group) * order.group, -(-period // order.group) * order.group


def step_seconds(
    order: Order, durations: Durations, shared: tuple[bool, ...] = (), passes: int = ACCURATE
) -> np.ndarray:
    """Return the seconds from the start of a step until all gradients are reduced, (plans,).

    A period can still grow late, while it uses up slack. The extrapolation error is at most 0.5% with ACCURATE passes
    (tests/planning/schedule/test_simulation.py), and a few percent with ROUGH ones.
    """
    first, period = rounds(order, passes)
    table = durations.table()
    if order.micro_batches <= first + period:
        return graph(order, shared).end_times(table).max(axis=1)
    start, end = (
        graph(replace(order, micro_batches=m), shared).end_times(table).max(axis=1) for m in (first, first + period)
    )
    return np.asarray(end + (end - start) * ((order.micro_batches - first - period) / period))


def least_seconds(order: Order, durations: Durations, shared: tuple[bool, ...] = ()) -> np.ndarray:
    """Return a lower bound of :func:`step_seconds` under any schedule of this project, (plans,).

    Each stage computes all its passes after the first micro-batch has reached it, through the parameter gathers of the
    stages above, and before the last gradients have left it. If the schedule `waits`, a stage also spends the transfers
    of the steady state. Each edge carries the transfers of each direction one after the other; if `shared`, one NIC
    carries both directions.
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
    fill_above = np.cumsum(fill, axis=1) - fill
    one_micro_batch = (d.forward + d.backward + d.ready).sum(axis=(1, 2))  # through all chunks of all stages
    bound = np.maximum((fill_above + work + d.ready[:, :, 0]).max(axis=1), one_micro_batch)
    if stages > 1:
        bound = np.maximum(bound, _transfer_bound(order, d, shared).max(axis=1))
    return np.asarray(bound + d.tail[:, :, 0].min(axis=1))


def _transfer_bound(order: Order, d: Durations, shared: tuple[bool, ...]) -> np.ndarray:
    """Return a lower bound of the step from the transfers that leave each stage, (plans, S).
    They start when the first micro-batch has passed the stage; the last one still goes down, turns, and goes up."""
    m, chunks, stages = order.micro_batches, order.chunks, order.stages
    down, up = m * chunks * d.down, m * chunks * d.up
    down[:, -1] = m * (chunks - 1) * d.down[:, -1]  # the wrap-around edge leads only to the next chunk
    up[:, 0] = m * (chunks - 1) * d.up[:, 0]
    edges = np.zeros_like(d.down)
    edges[:, 1:] = d.down[:, :-1]
    first_forward = np.cumsum(d.forward[:, :, 0] + d.ready[:, :, 0] + edges, axis=1)  # end of the first forward pass
    upward = d.backward[:, :, 0].copy()
    upward[:, 1:] += d.up[:, 1:]
    drain_up = np.cumsum(upward, axis=1) - upward  # after the last gradients have left the stage
    first_back = d.backward[:, :, -1].copy()  # the first micro-batch returns through the last chunk
    first_back[:, 1:] += d.up[:, 1:]
    down_and_back = first_forward[:, -1:] + np.cumsum(first_back[:, ::-1], axis=1)[:, ::-1] - first_back
    last = d.forward[:, :, -1] + edges
    drain_down = last.sum(axis=1, keepdims=True) - np.cumsum(last, axis=1)
    drain_down[:, :-1] -= d.down[:, :-1]
    one_nic = first_forward + down + up + drain_up
    down_bound = first_forward + down + np.maximum(0, drain_down) + d.backward[:, :, -1].sum(axis=1, keepdims=True)
    two_nics = np.maximum(down_bound, down_and_back + d.backward[:, :, -1] + up + drain_up)
    return np.where(np.array(shared or (False,) * stages), one_nic, two_nics)


@dataclass(frozen=True)
class RowDurations:
    """Durations in seconds of a layout with per-stage TP/DP.

    Per stage: `forward`, `backward`: one pass. `ready`: the gather before the first pass, after all rows have reached
    it. `last`: additional time of the transfer up after a row's last pass. Per edge: `down`, `up`: (time that a
    transfer occupies a NIC, further delay until it arrives). `wire`: the number of its network; edges of one network
    share a node's NIC. Per row: `node`: the number of its node.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    ready: Sequence[float]
    last: Sequence[float]
    down: Sequence[tuple[float, float]]
    up: Sequence[tuple[float, float]]
    node: Sequence[int]
    wire: Sequence[int]


class TimedPass(NamedTuple):
    """One simulated pass of a row, with start and end. `sent`: send and arrival time of its result, if it has one."""

    row: int
    forward: bool
    micro_batch: int
    start: float
    end: float
    sent: tuple[float, float] | None


def row_end_times(order: Order, d: RowDurations, passes: list[TimedPass] | None = None) -> list[float]:
    """Return the end of each row's last pass; infinite if the row waits forever (too little in flight).

    `passes`: a list that receives every pass, in order of their start. A search simulates millions of passes, so a pass
    is a number here: twice its micro-batch, plus 1 if backward.
    """
    stages, never = order.stages, float("inf")
    stage_of = [order.stage_of(row) for row in range(order.rows)]
    rows_on_node = [0] * (max(d.node) + 1)
    for node in d.node:
        rows_on_node[node] += 1
    sharing = [rows_on_node[node] for node in d.node]
    nics = [[d.node[row] * max(1, len(d.wire)) + wire for row in range(order.rows)] for wire in d.wire]  # by edge
    send_free, receive_free = ([0.0] * (len(rows_on_node) * max(1, len(d.wire))) for _ in range(2))  # times, by NIC
    # Arrival times of the input of each pass: the first stage forward and the last stage backward need none.
    arrival = [[never if s else 0.0, never if s < stages - 1 else 0.0] * order.micro_batches for s in range(stages)]
    targets = [[order.row(s, replica) for replica in route] for s, route in enumerate(order.routes)]
    sequences = [_pass_numbers(order, row) for row in range(order.rows)]
    firsts, lasts = [row[0] for row in sequences], [row[-1] for row in sequences]
    position, now, is_round_robin = [0] * order.rows, [0.0] * order.rows, order.is_round_robin
    first_inputs: list[dict[int, float]] = [{} for _ in range(stages)]  # arrival at each row's first pass, by stage
    queue: list[tuple[float, int]] = []

    def start_row(row: int, arrived: float) -> None:
        """Queue a row's first pass, whose input has arrived."""
        s = stage_of[row]
        first_inputs[s][row] = arrived
        if not is_round_robin:
            heappush(queue, (arrived + d.ready[s], row))
        elif len(first_inputs[s]) == order.replicas[s]:
            start = max(first_inputs[s].values()) + d.ready[s]
            for replica_row in first_inputs[s]:
                heappush(queue, (start, replica_row))

    for row in range(order.replicas[0]):
        start_row(row, 0.0)
    while queue:  # the earliest first, so that rows take turns on a shared NIC
        start, row = heappop(queue)
        s, sequence = stage_of[row], sequences[row]
        number = sequence[position[row]]
        position[row] += 1
        back, m = number & 1, number >> 1
        end = now[row] = start + (d.backward[s] if back else d.forward[s])
        to, sent = s - 1 if back else s + 1, None
        if 0 <= to < stages:
            target, edge = targets[to][m], to if back else s
            busy, delay = d.up[to] if back else d.down[s]
            if number == lasts[row]:
                busy += d.last[s]
            out, into = nics[edge][row], nics[edge][target]
            leaving = max(end, send_free[out], receive_free[into])
            arrived = arrival[to][number] = leaving + busy + delay
            send_free[out] = leaving + busy + delay / sharing[row]
            receive_free[into] = leaving + busy + delay / sharing[target]
            sent = leaving, arrived
            if number == firsts[target]:
                start_row(target, arrived)
            elif position[target] < len(sequences[target]) and sequences[target][position[target]] == number:
                heappush(queue, (max(now[target], arrived), target))
        if passes is not None:
            passes.append(TimedPass(row, not back, m, start, end, sent))
        if position[row] < len(sequence) and (arrived := arrival[s][sequence[position[row]]]) != never:
            heappush(queue, (max(end, arrived), row))
    return [end if position[row] == len(sequences[row]) else never for row, end in enumerate(now)]


def _pass_numbers(order: Order, row: int) -> list[int]:
    """Return the passes of `row` in order, each as twice its micro-batch, plus 1 if backward."""
    micro_batches, turns = np.array(order.micro_batches_of(row)), order.turn_sequence(row)
    numbers: list[int] = (2 * micro_batches[turns % len(micro_batches)] + turns // len(micro_batches)).tolist()
    return numbers
