"""The order of passes and stage transfers in a step, per stage or per replica.

A *row* is one sequence of passes. In a uniform layout all replicas of a stage do the same, and each stage is one row.
With per-stage TP/DP, `routes` assign each micro-batch to one replica of every stage. Then each replica is a row, and
rows are numbered stage by stage.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.kinds import PER_STAGE, Pass, ScheduleKind, StageTransfer, WeightPass, schedule_kind

L = TypeVar("L")  # a launch: a pass, or a post of a transfer


@dataclass(frozen=True)
class Order:
    """A pipeline's shape: all properties of its schedule except durations.

    `kind`: a name in SCHEDULES. `micro_batches`: number per row; with `routes`, number per step. `in_flight`: for each
    stage, the most passes whose activations a row holds (replaced by the schedule's own numbers unless it `deepens`).
    `overlap`: whether interleaved stages compute while they exchange (overlap_p2p_comm; always on in training, off in
    Megatron-LM of 2021). `paired`: whether a send and the receive of the opposite direction are one exchange under 1F1B
    (DeepSpeed makes two, the gradient first). `routes`: for each stage, the replica of each micro-batch; empty if all
    replicas of a stage do the same. For each stage, if the schedule `splits` backward passes: `deferred`: number of
    backward passes by which weight passes lag behind (empty: 0); `final`: weight passes left for the end (empty: 1).
    """

    kind: str
    stages: int
    micro_batches: int
    chunks: int = 1
    in_flight: tuple[int, ...] = ()
    overlap: bool = True
    paired: bool = True
    routes: tuple[tuple[int, ...], ...] = ()
    deferred: tuple[int, ...] = ()
    final: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kind = self.schedule
        kind.check_chunks(self.chunks)
        problem = f"{self.micro_batches} micro-batches are no multiple of PP, {self.stages}"
        hint = f"with virtual stages, use a multiple of {self.stages} micro-batches"
        PlanError.refuse("schedule", (self.chunks > 1 and self.micro_batches % self.stages, problem, hint))
        if not kind.deepens:
            in_flight = kind.in_flight(self.stages, self.micro_batches, self.chunks)
            object.__setattr__(self, "in_flight", in_flight)

    @classmethod
    def per_stage(
        cls, routes: tuple[tuple[int, ...], ...], in_flight: tuple[int, ...], kind: str = PER_STAGE.name, **weights: Any
    ) -> "Order":
        """Return the order of a layout with per-stage TP/DP: each replica is a row. `weights`: `deferred`, `final`."""
        return cls(kind, len(routes), len(routes[0]), in_flight=in_flight, routes=routes, **weights)

    @property
    def schedule(self) -> ScheduleKind:
        return schedule_kind(self.kind)

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The number of rows of each stage."""
        return tuple(max(route) + 1 for route in self.routes) or (1,) * self.stages

    @cached_property
    def is_round_robin(self) -> bool:
        """True if the rows of every stage compute its micro-batches in turn."""
        turns = ((s, first, count) for s, count in enumerate(self.replicas) for first in range(count))
        return all([*self.micro_batches_of(self.row(s, i))] == [*range(i, self.micro_batches, n)] for s, i, n in turns)

    @property
    def synchronizes_rows(self) -> bool:
        """True if the replicas of a stage wait for each other in their first and last passes, where collectives run."""
        return bool(self.routes) and self.is_round_robin

    @cached_property
    def _first_rows(self) -> list[int]:
        return [0, *accumulate(self.replicas)]

    @property
    def rows(self) -> int:
        return self._first_rows[-1]

    def row(self, stage: int, replica: int) -> int:
        """Return the row of a replica of `stage`."""
        return self._first_rows[stage] + replica

    def stage_of(self, row: int) -> int:
        return bisect_right(self._first_rows, row) - 1 if self.routes else row

    def micro_batches_of(self, row: int) -> Sequence[int]:
        """Return the micro-batches that `row` computes, in order."""
        return self._micro_batches_of_rows[row] if self.routes else range(self.micro_batches)

    @cached_property
    def _micro_batches_of_rows(self) -> list[Sequence[int]]:
        return [row for route in self.routes for row in _micro_batches_of_replicas(route)]

    @property
    def group(self) -> int:
        """The number of micro-batches that a row computes for one chunk before it turns to the next chunk."""
        return self.stages if self.chunks > 1 else 1

    @property
    def periodic_after(self) -> int:
        """The number of micro-batches after which the pipeline is periodic until it drains, in whole groups."""
        deepest = max(self.depths) // self.chunks + 1
        return -(-(2 * self.stages + 4 * deepest + 8) // self.group) * self.group

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The most passes that each row can hold: at most the `in_flight` of its stage. Without `routes`, a stage never
        holds more passes than the stages above it. With virtual stages, the wrap-around edge also limits every stage to
        the `in_flight` of the last stage plus two groups."""
        if self.routes:
            return tuple(
                min(self.in_flight[self.stage_of(row)], len(micro_batches))
                for row, micro_batches in enumerate(self._micro_batches_of_rows)
            )
        ring_limit = self.in_flight[-1] + 2 * self.group if self.chunks > 1 else self.in_flight[0]
        deepest = min(ring_limit, self.micro_batches * self.chunks)
        return tuple(accumulate((min(deepest, count) for count in self.in_flight), min))

    def turns(self, row: int = 0) -> list[tuple[int, int]]:
        """Return (micro-batch, chunk) of a row's forward passes in order; backward passes reverse the chunks."""
        micro_batches = self.micro_batches_of(row)
        return [
            (m, c)
            for first in range(0, len(micro_batches), self.group)
            for c in range(self.chunks)
            for m in micro_batches[first : first + self.group]
        ]

    def turn_sequence(self, row: int) -> np.ndarray:
        """Return the turns of `row` in the order of its schedule (kinds.py), (2T,).
        Forward passes are 0 … T-1, backward passes T … 2T-1."""
        return self.schedule.turns(len(self.micro_batches_of(row)) * self.chunks, self.depths[row])

    def passes(self, row: int) -> list[Pass]:
        """Return the passes of `row` in order."""
        turns = self.turns(row)
        by_turn = [Pass(True, m, c) for m, c in turns] + [Pass(False, m, self.chunks - 1 - c) for m, c in turns]
        return [by_turn[turn] for turn in self.turn_sequence(row).tolist()]

    @cached_property
    def pass_numbers(self) -> list[list[int]]:
        """The passes of each row in order, each as twice its micro-batch, plus 1 if backward; for one chunk. A weight
        pass is twice the number of micro-batches plus its own micro-batch."""

        def numbers(row: int) -> list[int]:
            micro_batches = np.array(self.micro_batches_of(row))
            is_backward, turn = np.divmod(self.turn_sequence(row), len(micro_batches))
            row_numbers = 2 * micro_batches[turn] + is_backward
            if self.schedule.splits:
                before = [*self.weight_passes_before(row), self.last_weight_passes[row]]
                places = np.repeat(np.arange(len(before)), before)
                row_numbers = np.insert(row_numbers, places, 2 * self.micro_batches + micro_batches)
            return row_numbers.tolist()

        return [numbers(row) for row in range(self.rows)]

    def weight_passes_before(self, row: int) -> Sequence[int]:
        """Return the number of weight passes that `row` runs just before each of its passes; the rest follow the last
        pass. Up to `deferred` of them stay pending. When only backward passes are left, which may have to wait for
        their inputs, weight passes are spread over these waits, except that `final` of them are left for the end."""
        turns, stage = len(self.micro_batches_of(row)) * self.chunks, self.stage_of(row)
        lag, final = self.deferred[stage] if self.deferred else 0, self.final[stage] if self.final else 1
        return _weight_passes_before(self.kind, turns, self.depths[row], lag, final)

    @cached_property
    def last_weight_passes(self) -> tuple[int, ...]:
        """The number of weight passes after the last pass of each row."""
        return tuple(len(self.micro_batches_of(row)) - sum(self.weight_passes_before(row)) for row in range(self.rows))

    def with_weight_passes(self, row: int, launches: Sequence[L]) -> list[L | WeightPass]:
        """Return `launches` of `row` with its weight passes inserted (:meth:`weight_passes_before`), the oldest first.

        schedule/graph.py repeats this rule on arrays."""
        counts, pending, items = iter(self.weight_passes_before(row)), deque[WeightPass](), list[L | WeightPass]()
        for launch in launches:
            if isinstance(launch, Pass):
                items += [pending.popleft() for _ in range(next(counts))]
                if not launch.forward:
                    pending.append(WeightPass(launch.micro_batch, launch.chunk))
            items.append(launch)
        return [*items, *pending]

    def _row_of(self, stage: int, micro_batch: int) -> int:
        return self.row(stage, self.routes[stage][micro_batch]) if self.routes else stage

    def transfer_to(self, row: int, needed: Pass) -> StageTransfer | None:
        """Return the transfer that brings the input of pass `needed` to `row`; None if no edge carries this input."""
        stage, back = self.stage_of(row), -1 if needed.forward else 1
        if stage != (0 if needed.forward else self.stages - 1):
            return StageTransfer(self._row_of(stage + back, needed.micro_batch), row, needed)
        if needed.chunk == (0 if needed.forward else self.chunks - 1) or self.stages == 1:
            return None
        return StageTransfer((stage + back) % self.stages, row, needed._replace(chunk=needed.chunk + back))

    def transfer_from(self, row: int, source_pass: Pass) -> StageTransfer | None:
        """Return the transfer that `row` sends after `source_pass`; None if no edge carries the result of this pass."""
        stage, step = self.stage_of(row), 1 if source_pass.forward else -1
        if self.stages == 1:
            return None
        if stage != (self.stages - 1 if source_pass.forward else 0):
            return StageTransfer(row, self._row_of(stage + step, source_pass.micro_batch), source_pass)
        if source_pass.chunk == (self.chunks - 1 if source_pass.forward else 0):
            return None
        return StageTransfer(row, (stage + step) % self.stages, source_pass)

    def window(self, transfer: StageTransfer) -> int:
        """Return the window of background exchanges on the edge of `transfer`, for each direction. This many receives
        are posted, and at most this many sends are in progress. The two rows are never further apart."""
        if self.routes:
            return self._windows[transfer.source, transfer.target]
        return self.window_below(transfer.source if transfer.source_pass.forward else transfer.target)

    def window_below(self, upstream: int) -> int:
        """Return :meth:`window` of the edge from stage `upstream` to the next, for an order without `routes`."""
        if upstream == self.stages - 1:
            return self.group
        return self.depths[upstream] - self.depths[upstream + 1] + 1

    @cached_property
    def _windows(self) -> dict[tuple[int, int], int]:
        windows = dict[tuple[int, int], int]()
        for s, routes in enumerate(pairwise(self.routes)):
            for (above, below), window in _edge_windows(*routes, self.in_flight[s], self.in_flight[s + 1]).items():
                up, down = self.row(s, above), self.row(s + 1, below)
                windows[up, down] = windows[down, up] = window
        return windows

    def buffers(self, stage: int) -> int:
        """Return the most stage transfers, received and sent, that a replica of `stage` buffers (`routes` only)."""
        return max(self._buffers[self.row(stage, 0) : self.row(stage, self.replicas[stage])])

    @cached_property
    def _buffers(self) -> list[int]:
        buffers = [0] * self.rows
        for ends, window in self._windows.items():
            for row in ends:
                buffers[row] += window
        return buffers

    def extra_depth(self, transfer: StageTransfer) -> int:
        """Return how many more micro-batches are held above the edge of `transfer` than under 1F1B.
        Two more micro-batches hide a transfer that takes as long as a stage computes one micro-batch."""
        source, target = self.stage_of(transfer.source), self.stage_of(transfer.target)
        if abs(source - target) != 1:  # the wrap-around edge
            return 0
        depths = self.in_flight if self.routes else tuple(accumulate(self.in_flight, min))
        above, below = ((depths[s], self.replicas[s]) for s in sorted((source, target)))
        return max(0, (above[0] - 1) * above[1] - below[0] * below[1])


def least_in_flight(replicas: tuple[int, ...], extra: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the fewest micro-batches that a replica of each stage must hold so that no stage waits, (S,).

    `extra`: further micro-batches held above each edge, which hide its transfers; without them, transfers are assumed
    to take no time. Replicas take turns. Before its backward pass of micro-batch k, a stage runs the forward pass of
    micro-batch j = k + (depth - 1) * replicas. The stage above must have computed j before it waits for the gradient
    of k. It computes one more micro-batch, so that it can take the gradient in turn.
    """
    depths = [1]
    for stage in reversed(range(len(replicas) - 1)):
        depths.insert(0, 1 + -(-(depths[0] * replicas[stage + 1]) // replicas[stage]) + (extra[stage] if extra else 0))
    return tuple(depths)


def limited_in_flight(depths: Sequence[int], replicas: Sequence[int], micro_batches: Sequence[int]) -> list[int]:
    """Return `depths`, (S,), limited to what the stage above lets a replica of each stage hold: no more than it sends
    before it waits for a gradient. A replica that holds all of its `micro_batches`, (S,), does not wait."""
    limited = list(depths)
    for stage, (above, below) in enumerate(pairwise(replicas)):
        if limited[stage] < micro_batches[stage]:
            limited[stage + 1] = min(limited[stage + 1], (limited[stage] - 1) * above // below)
    return limited


@lru_cache(maxsize=1024)
def _micro_batches_of_replicas(route: tuple[int, ...]) -> list[Sequence[int]]:
    """Return the micro-batches that each replica of a stage computes, in order."""
    replica_of = np.array(route)
    return [np.flatnonzero(replica_of == replica).tolist() for replica in range(max(route) + 1)]


@lru_cache(maxsize=1024)
def _positions(above: tuple[int, ...], below: tuple[int, ...]) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Return, for each pair of replicas that exchange over an edge, the positions of its micro-batches in both."""
    counts, positions = (Counter[int](), Counter[int]()), dict[tuple[int, int], tuple[list[int], list[int]]]()
    for pair in zip(above, below, strict=True):
        for count, replica, list_of_pair in zip(counts, pair, positions.setdefault(pair, ([], [])), strict=True):
            list_of_pair.append(count[replica])
            count[replica] += 1
    return positions


@lru_cache(maxsize=4096)
def _edge_windows(
    above: tuple[int, ...], below: tuple[int, ...], depth_above: int, depth_below: int
) -> dict[tuple[int, int], int]:
    """Return :meth:`Order.window` of each pair of replicas that exchange over an edge. `above`, `below`: the replica of
    each micro-batch, and `depth_above`, `depth_below`: the most passes that a replica holds, on each side."""
    positions = _positions(above, below)
    return {pair: _distance(*lists, depth_above, depth_below) for pair, lists in positions.items()}


def _distance(above: list[int], below: list[int], depth_above: int, depth_below: int) -> int:
    """Return the most micro-batches that the upper row can have sent before the lower row received them. `above`,
    `below`: the positions, in the order of each row, of the micro-batches that both rows compute. After a forward pass
    of the upper row, both rows have finished the backward pass `depth_above` positions earlier. Before that, the lower
    row has run as many forward passes as its depth allows."""
    largest, received, backward_done = 1, 0, 0
    for sent, position in enumerate(above, 1):
        while above[backward_done] <= position - depth_above:
            backward_done += 1
        newest = below[backward_done - 1] if backward_done else -1
        while received < sent and below[received] <= newest + depth_below - 1:
            received += 1
        largest = max(largest, sent - received)
    return largest


@lru_cache(maxsize=1024)
def _weight_passes_before(kind: str, turns: int, depth: int, lag: int, final: int) -> tuple[int, ...]:
    """Return :meth:`Order.weight_passes_before` of a row that makes `turns` turns and holds `depth` passes."""
    is_backward = (schedule_kind(kind).turns(turns, depth) >= turns).tolist()
    trailing = is_backward[::-1].index(False)  # backward passes after the last forward pass; the first does not wait
    counts, pending = list[int](), 0
    for left, backward in zip(range(len(is_backward), 0, -1), is_backward, strict=True):
        spread = min(pending, -(-max(0, pending + left - final) // left))
        counts.append(spread if left < trailing else max(0, pending - lag))
        pending += backward - counts[-1]
    return tuple(counts)
