"""What every stage of a pipeline, or every replica of it, computes in a step, and what it exchanges with which other.

A *row* does the same things in the same order throughout. Where all replicas of a stage do the same, one row stands for
all of them, and rows are stages. Where stages have different numbers of replicas, every micro-batch takes its own way
(`routes`), and each replica is a row, counted stage by stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.kinds import PER_STAGE, Exchange, Pass, ScheduleKind, StageTransfer, schedule_kind


@dataclass(frozen=True)
class Order:
    """A pipeline's shape: everything about its schedule that is not a duration.

    `kind`: a name of SCHEDULES. `micro_batches`: of each row; with `routes`, of the whole step. `in_flight`: per stage,
    passes whose activations a row holds at most (read only of a schedule that `deepens`). `overlap`: whether
    interleaved stages compute while they exchange (overlap_p2p_comm, here always so; Megatron-LM of 2021 waited).
    `paired`: whether a send and the receive of the opposite direction are one exchange under 1F1B (DeepSpeed's pipeline
    makes them one after the other, the gradient's first). `routes`: per stage, the replica that computes each of a
    step's micro-batches; empty where all replicas of a stage do the same.
    """

    kind: str
    stages: int
    micro_batches: int
    chunks: int = 1
    in_flight: tuple[int, ...] = ()
    overlap: bool = True
    paired: bool = True
    routes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        kind = self.schedule
        kind.refuse(self.chunks)
        PlanError.refuse(
            (
                self.chunks > 1 and self.micro_batches % self.stages,
                f"{self.micro_batches} micro-batches cannot be dealt out in groups of PP {self.stages}",
                "schedule",
                "with virtual stages use a multiple of PP micro-batches",
            ),
            (
                kind.deepens and len(self.in_flight) != self.stages,
                f"in_flight is {self.in_flight} for {self.stages} stages",
                "schedule",
                "give one number per stage",
            ),
        )
        if not kind.deepens:
            held = kind.in_flight(self.stages, self.micro_batches, self.chunks)
            object.__setattr__(self, "in_flight", held)

    @classmethod
    def routed(cls, routes: tuple[tuple[int, ...], ...], in_flight: tuple[int, ...]) -> Order:
        """Return the order in which each micro-batch takes its own way through the replicas of the stages."""
        return cls(PER_STAGE.name, len(routes), len(routes[0]), in_flight=in_flight, routes=routes)

    @property
    def schedule(self) -> ScheduleKind:
        return schedule_kind(self.kind)

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The rows of each stage."""
        return tuple(max(route) + 1 for route in self.routes) or (1,) * self.stages

    @cached_property
    def takes_turns(self) -> bool:
        """Whether the rows of every stage compute its micro-batches in turn."""
        return all(
            replica == k % count
            for count, route in zip(self.replicas, self.routes, strict=False)
            for k, replica in enumerate(route)
        )

    @property
    def meets(self) -> bool:
        """Whether a stage has several rows, which gather parameters and reduce gradients beside computing."""
        return bool(self.routes) and self.takes_turns

    @cached_property
    def _first_rows(self) -> list[int]:
        return [0, *accumulate(self.replicas)]

    @property
    def rows(self) -> int:
        return self._first_rows[-1]

    def row(self, stage: int, replica: int) -> int:
        return self._first_rows[stage] + replica

    def stage_of(self, row: int) -> int:
        return bisect_right(self._first_rows, row) - 1 if self.routes else row

    def own(self, row: int) -> Sequence[int]:
        """Return the micro-batches that `row` computes, in order."""
        return self._own[row] if self.routes else range(self.micro_batches)

    @cached_property
    def _own(self) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in range(self.rows)]
        for first, route in zip(self._first_rows, self.routes, strict=False):
            for micro_batch, replica in enumerate(route):
                rows[first + replica].append(micro_batch)
        return rows

    @property
    def group(self) -> int:
        """Micro-batches that pass one chunk before the next chunk has its turn."""
        return self.stages if self.chunks > 1 else 1

    @property
    def settled(self) -> int:
        """Micro-batches, whole groups of them, past which a pipeline only repeats itself until it drains: a few times
        its depth."""
        deepest = max(self.depths) // self.chunks + 1
        return -(-(2 * self.stages + 4 * deepest + 8) // self.group) * self.group

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The passes that each row holds at most. Where all replicas do the same: no more than a stage above lets
        through, and no more than there are; where virtual stages close the ring, the last stage lets the others through
        no more than two groups further."""
        if self.routes:
            return tuple(min(self.in_flight[self.stage_of(row)], len(own)) for row, own in enumerate(self._own))
        ring = self.in_flight[-1] + 2 * self.group if self.chunks > 1 else self.in_flight[0]
        deepest = min(ring, self.micro_batches * self.chunks)
        return tuple(accumulate((min(deepest, held) for held in self.in_flight), min))

    def turns(self, row: int = 0) -> list[tuple[int, int]]:
        """Return (micro-batch, chunk) of a row's forward passes in order; backward passes go through the chunks in
        reverse."""
        own = self.own(row)
        return [
            (m, c)
            for first in range(0, len(own), self.group)
            for c in range(self.chunks)
            for m in own[first : first + self.group]
        ]

    def computing(self, row: int) -> np.ndarray:
        """Return the turns that `row` computes, one after the other, (2T,): forward ones 0 … T-1, backward ones T …
        2T-1."""
        return self.schedule.turns(len(self.own(row)) * self.chunks, self.depths[row])

    def passes(self, row: int) -> list[Pass]:
        """Return what `row` computes, one after the other."""
        turns = self.turns(row)
        both = [Pass(True, m, c) for m, c in turns] + [Pass(False, m, self.chunks - 1 - c) for m, c in turns]
        return [both[turn] for turn in self.computing(row).tolist()]

    def _row_of(self, stage: int, micro_batch: int) -> int:
        return self.row(stage, self.routes[stage][micro_batch]) if self.routes else stage

    def transfer_to(self, row: int, needed: Pass) -> StageTransfer | None:
        """Return the transfer that brings `row` the input of its pass `needed`; None: nothing comes over an edge."""
        stage, back = self.stage_of(row), -1 if needed.forward else 1
        if stage != (0 if needed.forward else self.stages - 1):
            return StageTransfer(self._row_of(stage + back, needed.micro_batch), row, needed)
        if needed.chunk == (0 if needed.forward else self.chunks - 1) or self.stages == 1:
            return None
        return StageTransfer((stage + back) % self.stages, row, needed._replace(chunk=needed.chunk + back))

    def transfer_from(self, row: int, made: Pass) -> StageTransfer | None:
        """Return the transfer that takes away the result of pass `made` of `row`; None: nothing goes over an edge."""
        stage, step = self.stage_of(row), 1 if made.forward else -1
        if self.stages == 1:
            return None
        if stage != (self.stages - 1 if made.forward else 0):
            return StageTransfer(row, self._row_of(stage + step, made.micro_batch), made)
        if made.chunk == (self.chunks - 1 if made.forward else 0):
            return None
        return StageTransfer(row, (stage + step) % self.stages, made)

    def window(self, transfer: StageTransfer) -> int:
        """Return how many receives are posted ahead of need (`ahead` only), and sends may be under way, on the edge
        that `transfer` goes over, in either direction: the two rows are no further apart."""
        if self.routes:
            return self._windows[transfer.source, transfer.target]
        return self.window_below(transfer.source if transfer.made.forward else transfer.target)

    def window_below(self, upstream: int) -> int:
        """Return :meth:`window` of the edge below stage `upstream`, where rows are stages."""
        if upstream == self.stages - 1:
            return self.group
        return self.depths[upstream] - self.depths[upstream + 1] + 1

    @cached_property
    def _windows(self) -> dict[tuple[int, int], int]:
        windows = dict[tuple[int, int], int]()
        places = [{m: place for place, m in enumerate(own)} for own in self._own]
        for (up_to, route), (down_to, below) in pairwise(zip(self._first_rows, self.routes, strict=False)):
            shared: dict[tuple[int, int], list[int]] = {}
            for m, (a, b) in enumerate(zip(route, below, strict=True)):
                shared.setdefault((up_to + a, down_to + b), []).append(m)
            for (up, down), both in shared.items():
                windows[up, down] = windows[down, up] = _distance(
                    [places[up][m] for m in both], [places[down][m] for m in both], self.depths[up], self.depths[down]
                )
        return windows

    def buffers(self, stage: int) -> int:
        """Return the stage transfers that a replica of `stage` has buffers for at most, received and sent (`routes`
        only)."""
        return max(self._buffers[self.row(stage, 0) : self.row(stage, self.replicas[stage])])

    @cached_property
    def _buffers(self) -> list[int]:
        buffers = [0] * self.rows
        for ends, window in self._windows.items():
            for row in ends:
                buffers[row] += window
        return buffers

    def hidden(self, transfer: StageTransfer) -> int:
        """Return twice what the depth hides of `transfer`, in the time in which a stage computes a micro-batch
        (`ahead`)."""
        source, target = self.stage_of(transfer.source), self.stage_of(transfer.target)
        if abs(source - target) != 1:  # over the edge that closes the ring
            return 0
        depths = self.in_flight if self.routes else tuple(accumulate(self.in_flight, min))
        above, below = ((depths[s], self.replicas[s]) for s in sorted((source, target)))
        return max(0, (above[0] - 1) * above[1] - below[0] * below[1])

    def program(self, stage: int) -> list[Pass | Exchange]:
        """Return the passes and exchanges of `stage` in order, for the schedules that wait."""
        assert self.schedule.megatron is not None, f"{self.kind} exchanges in the background"
        return self.schedule.megatron(self, stage)

    def sent(self, stage: int, made: Pass) -> tuple[StageTransfer, ...]:
        """Return the transfers that leave `stage` after pass `made`: one or none."""
        return tuple(t for t in [self.transfer_from(stage, made)] if t)

    def received(self, stage: int, needed: Pass) -> tuple[StageTransfer, ...]:
        """Return the transfers that come to `stage` for pass `needed`: one or none."""
        return tuple(t for t in [self.transfer_to(stage, needed)] if t)


def least_in_flight(replicas: tuple[int, ...], more: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return, per stage, how many micro-batches a replica has to hold for no stage to wait where transfers take no
    time, of replicas that take turns. `more`: held beyond that above each edge, to hide its transfers.

    A stage's last forward pass before its backward pass of micro-batch k is that of k + (held - 1) * replicas, which
    the stage above must have computed before it waits for k, and a micro-batch more to take the result up in turn.
    """
    depths = [1]
    for stage in reversed(range(len(replicas) - 1)):
        depths.insert(0, 1 + -(-(depths[0] * replicas[stage + 1]) // replicas[stage]) + (more[stage] if more else 0))
    return tuple(depths)


def _distance(above: list[int], below: list[int], depth_above: int, depth_below: int) -> int:
    """Return how many of the micro-batches that two rows share can have left the upper one and not been taken by the
    lower one; `above`, `below`: their places in the order of each. When the upper row has done a forward pass, it has
    done the backward pass of a micro-batch its depth before: so the lower one has, and before that its own next forward
    passes up to its depth. (Of the first ones as of the others, as where rows are stages.)"""
    largest, taken, back = 1, 0, 0
    for sent, place in enumerate(above, 1):
        while above[back] <= place - depth_above:
            back += 1
        newest = below[back - 1] if back else -1
        while taken < sent and below[taken] <= newest + depth_below - 1:
            taken += 1
        largest = max(largest, sent - taken)
    return largest
