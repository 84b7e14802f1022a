"""The simulated time of a step, from every pass and every stage transfer of a pipeline.

If all replicas of a stage do the same, a schedule is built as a graph (schedule/graph.py). Its nodes are passes, stage
transfers and collectives. Its arcs are dependencies. A node may depend on the previous pass of its stage, its data, the
receiver of a blocking send, a free place in a window of receives, or a NIC that carries both directions. The step time
is the longest path. Durations are not part of the graph, so one graph evaluates many candidate plans at once. After a
few rounds a pipeline is periodic. Therefore :func:`step_seconds` simulates only the first micro-batches
(:func:`rounds`) and extrapolates from their period.

With per-stage TP/DP, :func:`row_end_times` simulates the step pass by pass. A pass starts when the previous pass of its
row is done and its input has arrived. If the rows of a stage take turns, their first passes, in which parameters are
gathered, start when all of these rows have reached them. A transfer starts when its tensor is computed and both NICs
have completed earlier transfers in that direction. Transfers whose pass starts first go first.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from holmes_hpc.planning.schedule.graph import Durations, graph
from holmes_hpc.planning.schedule.kinds import COMPUTING
from holmes_hpc.planning.schedule.order import Order

EARLY_STEPS = 4  # steps to simulate if each stage starts a step by itself
ACCURATE, ROUGH = 6000, 1000  # forward passes of all stages to simulate before the extrapolation


def rounds(order: Order, passes: int) -> tuple[int, int]:
    """Return (micro-batches to simulate, further micro-batches to measure the period), both in whole groups. The first
    number corresponds to about `passes` forward passes over all stages, but is at least `periodic_after`."""
    first = max(passes // (order.stages * order.chunks), order.periodic_after)
    period = max(4, 2 * order.stages)
    return -(-first // order.group) * order.group, -(-period // order.group) * order.group


def step_seconds(
    order: Order, durations: Durations, shared: tuple[bool, ...] = (), passes: int = ACCURATE
) -> np.ndarray:
    """Return the seconds from the start of a step until all gradients are reduced, (plans,). `passes`: the passes to
    simulate before the extrapolation. Its error is at most 0.5% with ACCURATE
    (tests/planning/schedule/test_simulation.py), and a few percent with ROUGH: a step is not exactly periodic."""
    table = durations.table()
    return _extrapolated(order, passes, lambda short: graph(short, shared).end_times(table).max(axis=1))


def _extrapolated(order: Order, passes: int, end_times: Callable[[Order], np.ndarray]) -> np.ndarray:
    """Return `end_times` of `order`, extrapolated from orders of fewer micro-batches. See :func:`step_seconds`."""
    first, period = rounds(order, passes)
    if order.micro_batches <= first + period:
        return end_times(order)
    start, end = (end_times(replace(order, micro_batches=m)) for m in (first, first + period))
    return np.asarray(end + (end - start) * ((order.micro_batches - first - period) / period))


def early_step_seconds(
    replicas: Sequence[tuple[Order, Durations, tuple[bool, ...]]],
    update_s: np.ndarray,
    tied_s: float,
    passes: int,
    are_posted: bool = False,
) -> np.ndarray:
    """Return the seconds between two steps, (plans,), if a stage starts the next step after its own update.

    `replicas`: the order, durations and `shared` of each kind of pipeline; `update_s`: seconds from a stage's reduced
    gradients to its new weights, (plans, S); `tied_s`: the reduction of a tied embedding, for which the first and the
    last stage wait; `are_posted`: whether a step's first receives are posted in the step before. A few steps are
    simulated, each from the times at which the stages ended the one before."""
    late_s = growth = np.zeros_like(update_s)  # late_s: by which each stage can start later than the first
    for _ in range(EARLY_STEPS):
        all_ends = (
            _stage_ends(order, _delayed(d, late_s, are_posted), shared, passes) for order, d, shared in replicas
        )
        ends = np.max([*all_ends], axis=0) + update_s
        if tied_s:
            ends[:, [0, -1]] = ends[:, [0, -1]].max(axis=1, keepdims=True) + tied_s
        next_late_s = np.maximum(0.0, ends - ends[:, :1])
        growth, late_s = np.maximum(0.0, next_late_s - late_s), next_late_s
    return np.asarray(ends[:, 0] + growth.max(axis=1))


def _stage_ends(order: Order, durations: Durations, shared: tuple[bool, ...], passes: int) -> np.ndarray:
    """Return the time at which the gradients of each stage are reduced, (plans, S)."""
    table, size = durations.table(), order.stages * order.chunks

    def ends(short: Order) -> np.ndarray:
        step_graph, tails = graph(short, shared), 4 * size * short.micro_batches + size
        is_reduction = (step_graph.node >= tails) & (step_graph.node < tails + 2 * size)  # tail and reduce
        stages = (step_graph.node[is_reduction] - tails) % size // order.chunks
        ends = step_graph.end_times(table)[:, is_reduction]
        return np.stack([ends[:, stages == s].max(axis=1) for s in range(order.stages)], axis=1)

    return _extrapolated(order, passes, ends)


def _delayed(d: Durations, late_s: np.ndarray, are_posted: bool) -> Durations:
    """Return durations in which each stage starts `late_s` after the first. Its receives are posted then or before."""
    ready, start = d.ready.copy(), d.ready[:, 0, 0]
    for s in range(1, ready.shape[1]):
        sent, down = start + d.forward[:, s - 1, 0], d.down[:, s - 1]
        ready[:, s, 0] += np.maximum(0.0, late_s[:, s] - sent - are_posted * down)
        start = sent + down + ready[:, s, 0]
    return replace(d, ready=ready)


def least_seconds(order: Order, durations: Durations, shared: tuple[bool, ...] = ()) -> np.ndarray:
    """Return a lower bound of :func:`step_seconds`, (plans,), for an order of any schedule in SCHEDULES. A stage starts
    its passes when the first micro-batch has gone through the stages above, and ends them before the last gradients go
    back through these. If the schedule `waits` (:class:`ScheduleKind`), the exchanges of the steady state take time of
    the stage, too. If `shared`, one NIC carries both directions."""
    d, stages, m = durations, order.stages, order.micro_batches
    work = m * d.compute().sum(axis=2)
    if order.schedule.waits and stages > 1:
        exchange = np.maximum(d.down[:, :-1], d.up[:, 1:])
        steady_exchanges = np.maximum(0, m - (stages - 1 - np.arange(stages)) - 1)
        work[:, :-1] += steady_exchanges[:-1] * exchange
        work[:, 1:] += steady_exchanges[1:] * exchange
    fill = d.forward[:, :, 0] + d.ready[:, :, 0]
    fill[:, :-1] += d.down[:, :-1]
    if not order.schedule.splits:  # else the stage may compute weight gradients while its last gradients go up
        fill += d.backward[:, :, 0]
        fill[:, :-1] += d.up[:, 1:]
    fill_above = np.cumsum(fill, axis=1) - fill
    one_micro_batch = (d.forward + d.backward + d.ready).sum(axis=(1, 2))  # through all chunks of all stages
    bound = np.maximum((fill_above + work + d.ready[:, :, 0]).max(axis=1), one_micro_batch)
    if stages > 1:
        bound = np.maximum(bound, _transfer_bound(order, d, shared).max(axis=1))
    return np.asarray(bound + d.tail[:, :, 0].min(axis=1))


def _transfer_bound(order: Order, d: Durations, shared: tuple[bool, ...]) -> np.ndarray:
    """Return a lower bound of the step from the transfers that leave each stage, (plans, S).

    The transfers start after the stage's first forward pass. After the last transfer down, that micro-batch still goes
    to the last stage and back. After the last transfer up, those gradients still go to the first stage.
    """
    m, chunks, stages = order.micro_batches, order.chunks, order.stages
    all_down, all_up = m * chunks * d.down, m * chunks * d.up  # all transfers of a step
    all_down[:, -1] = m * (chunks - 1) * d.down[:, -1]  # the wrap-around edge leads only to the next chunk
    all_up[:, 0] = m * (chunks - 1) * d.up[:, 0]
    arrival = np.zeros_like(d.down)  # the transfer down to each stage
    arrival[:, 1:] = d.down[:, :-1]
    first_forward_end = np.cumsum(d.forward[:, :, 0] + d.ready[:, :, 0] + arrival, axis=1)
    backward_and_up = d.backward[:, :, 0].copy()
    backward_and_up[:, 1:] += d.up[:, 1:]
    drain_up = np.cumsum(backward_and_up, axis=1) - backward_and_up  # after the last gradients have left the stage
    first_return = d.backward[:, :, -1].copy()  # the first micro-batch returns through the last chunk
    first_return[:, 1:] += d.up[:, 1:]
    return_below = np.cumsum(first_return[:, ::-1], axis=1)[:, ::-1] - first_return  # over all stages below
    first_gradient = first_forward_end[:, -1:] + return_below  # its arrival at each stage
    last_forward = d.forward[:, :, -1] + arrival
    drain_down = last_forward.sum(axis=1, keepdims=True) - np.cumsum(last_forward, axis=1)
    drain_down[:, :-1] -= d.down[:, :-1]
    last_backward = d.backward[:, :, -1]
    one_nic = first_forward_end + all_down + all_up + drain_up
    down_nic = first_forward_end + all_down + np.maximum(0, drain_down) + last_backward.sum(axis=1, keepdims=True)
    up_nic = first_gradient + last_backward + all_up + drain_up
    return np.where(np.array(shared or (False,) * stages), one_nic, np.maximum(down_nic, up_nic))


@dataclass(frozen=True)
class RowDurations:
    """Durations in seconds of a layout with per-stage TP/DP.

    Per stage: `forward`, `backward`: one pass. `ready`: the parameter gather before the first pass, after all rows have
    reached it. `last`: additional time of the transfer up after a row's last pass. Per edge: `down`, `up`: (time that a
    transfer occupies a NIC, latency until it arrives). `wire`: the index of the edge's network; edges of one
    network share a node's NIC. Per row: `node`: the index of its node. Per stage: `weight`: one weight pass.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    ready: Sequence[float]
    last: Sequence[float]
    down: Sequence[tuple[float, float]]
    up: Sequence[tuple[float, float]]
    node: Sequence[int]
    wire: Sequence[int]
    weight: Sequence[float] = ()


class TimedPass(NamedTuple):
    """One simulated pass of a row, with start and end in seconds. `kind`: one of COMPUTING.
    `sent`: (start, arrival) of the transfer of its result; None if no edge carries it."""

    row: int
    kind: str
    micro_batch: int
    start: float
    end: float
    sent: tuple[float, float] | None


def row_end_times(
    order: Order, d: RowDurations, passes: list[TimedPass] | None = None, max_s: float = inf
) -> list[float]:
    """Return the time in seconds at which each row's last pass ends; infinite if the row waits forever, because too few
    passes are in flight, or if some row has waited so long that its passes cannot end within `max_s`. `passes`: a list
    that receives a TimedPass for every pass, in order of their start. Inside, a pass is one of `pass_numbers`."""
    stages, never = order.stages, inf
    stage_of = [order.stage_of(row) for row in range(order.rows)]
    rows_on_node = Counter(d.node)
    rows_sharing = [rows_on_node[node] for node in d.node]  # by row: the rows of its node, which share its NICs
    networks = max(1, len(d.wire))
    nics = [[d.node[row] * networks + wire for row in range(order.rows)] for wire in d.wire]  # by edge, then row
    send_free, receive_free = ([0.0] * ((max(d.node) + 1) * networks) for _ in range(2))  # times, by NIC
    # Arrival times of the input of each pass: the first stage forward and the last stage backward need none.
    count, weights = order.micro_batches, 2 * order.micro_batches  # weights: the number of the first weight pass
    arrival = [[never if s else 0.0, never if s < stages - 1 else 0.0] * count + [0.0] * count for s in range(stages)]
    first_rows = [order.row(s, 0) for s in range(stages)]
    row_of = [[first + replica for replica in route] for first, route in zip(first_rows, order.routes, strict=True)]
    sequences = order.pass_numbers
    first_passes = [row[0] for row in sequences]
    last_passes = [next(number for number in reversed(row) if number < weights) for row in sequences]
    remaining, now, is_round_robin = [iter(row) for row in sequences], [0.0] * order.rows, order.is_round_robin
    next_number = [next(row) for row in remaining]
    forward, backward, down, up = d.forward, d.backward, d.down, d.up
    weight = d.weight or (0.0,) * stages
    pass_s = [sum(times) for times in zip(forward, backward, weight, strict=True)]
    may_wait_s = [max_s - len(order.micro_batches_of(row)) * pass_s[s] for row, s in enumerate(stage_of)]
    first_inputs: list[dict[int, float]] = [{} for _ in range(stages)]  # arrival at each row's first pass, by stage
    queue: list[tuple[float, int]] = []  # (start of the row's next pass, row)

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
    while queue:  # the earliest row first, so that rows take turns on a shared NIC
        start, row = heappop(queue)
        may_wait_s[row] -= start - now[row]
        if may_wait_s[row] < 0:
            return [never] * order.rows
        s, number = stage_of[row], next_number[row]
        next_number[row] = following = next(remaining[row], -1)
        is_backward, micro_batch = number & 1, number >> 1
        end = now[row] = start + (backward[s] if is_backward else forward[s])
        target_stage, sent = s - 1 if is_backward else s + 1, None
        if number >= weights:
            end, target_stage = start + weight[s], stages
            now[row] = end
        if 0 <= target_stage < stages:
            target, edge = row_of[target_stage][micro_batch], target_stage if is_backward else s
            busy, delay = up[edge] if is_backward else down[edge]
            if number == last_passes[row]:
                busy += d.last[s]
            out_nic, in_nic = nics[edge][row], nics[edge][target]
            free = send_free[out_nic]
            if receive_free[in_nic] > free:
                free = receive_free[in_nic]
            sending = free if free > end else end
            arrived = arrival[target_stage][number] = sending + busy + delay
            send_free[out_nic] = sending + busy + delay / rows_sharing[row]
            receive_free[in_nic] = sending + busy + delay / rows_sharing[target]
            sent = sending, arrived
            if number == first_passes[target]:
                start_row(target, arrived)
            elif next_number[target] == number:
                heappush(queue, (arrived if arrived > now[target] else now[target], target))
        if passes is not None:
            kind, micro_batch = (2, number - weights) if number >= weights else (is_backward, micro_batch)
            passes.append(TimedPass(row, COMPUTING[kind], micro_batch, start, end, sent))
        if following >= 0 and (arrived := arrival[s][following]) != never:
            heappush(queue, (arrived if arrived > end else end, row))
    return [end if number < 0 else never for number, end in zip(next_number, now, strict=True)]
