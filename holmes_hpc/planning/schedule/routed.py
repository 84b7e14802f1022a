"""The order of a pipeline whose stages have unequal numbers of replicas: every micro-batch goes its own way.

A *row* is one replica of one stage, counted stage by stage: what a stage is to :class:`Order`. Each row computes its
own micro-batches in their order, `in_flight[stage]` - 1 forward passes ahead and then one forward and one backward in
turn, and exchanges tensors with every row above and below it that has a micro-batch in common with it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.orders import FOR_UNEQUAL, Pass, ScheduleKind, StageTransfer


@dataclass(frozen=True)
class RoutedOrder:
    """`routes`: per stage, the replica that computes each of a step's micro-batches. `in_flight`: per stage, the most
    micro-batches whose activations one of its replicas holds."""

    routes: tuple[tuple[int, ...], ...]
    in_flight: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.in_flight) != self.stages:
            raise PlanError(
                f"in_flight is {self.in_flight} for {self.stages} stages",
                where="schedule",
                hint="give one number per stage",
            )

    @property
    def schedule(self) -> ScheduleKind:
        return FOR_UNEQUAL

    @property
    def stages(self) -> int:
        return len(self.routes)

    @property
    def micro_batches(self) -> int:
        """Of a step, in all rows of a stage together."""
        return len(self.routes[0])

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(max(route) + 1 for route in self.routes)

    @cached_property
    def in_turn(self) -> bool:
        """Whether the replicas of every stage take turns."""
        return all(
            replica == k % n
            for n, route in zip(self.replicas, self.routes, strict=True)
            for k, replica in enumerate(route)
        )

    @cached_property
    def _first(self) -> list[int]:
        return [0, *accumulate(self.replicas)]

    @property
    def rows(self) -> int:
        return self._first[-1]

    def row(self, stage: int, replica: int) -> int:
        return self._first[stage] + replica

    def stage_of(self, row: int) -> int:
        return bisect_right(self._first, row) - 1

    @cached_property
    def _own(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.rows)]
        for stage, route in enumerate(self.routes):
            for micro_batch, replica in enumerate(route):
                found[self.row(stage, replica)].append(micro_batch)
        return found

    def own(self, row: int) -> list[int]:
        """The micro-batches that `row` computes, in order."""
        return self._own[row]

    def depth(self, row: int) -> int:
        """Passes that `row` holds at most."""
        return min(self.in_flight[self.stage_of(row)], len(self.own(row)))

    def passes(self, row: int) -> list[Pass]:
        """What `row` computes: forward passes up to its depth less one, then one forward and one backward in turn."""
        return [Pass(not number & 1, number >> 1, 0) for number in self.numbers(row)]

    def numbers(self, row: int) -> list[int]:
        """:meth:`passes`, each as a number: twice its micro-batch, and one more if it is a backward pass."""
        own, ahead = self.own(row), self.depth(row) - 1
        forward, backward = [2 * m for m in own], [2 * m + 1 for m in own]
        paired = forward[ahead:] + backward[: len(own) - ahead]
        paired[::2], paired[1::2] = forward[ahead:], backward[: len(own) - ahead]
        return [*forward[:ahead], *paired, *backward[len(own) - ahead :]]

    def _neighbour(self, row: int, micro_batch: int, on: int) -> int | None:
        stage = self.stage_of(row) + on
        return self.row(stage, self.routes[stage][micro_batch]) if 0 <= stage < self.stages else None

    def transfer_to(self, row: int, needed: Pass) -> StageTransfer | None:
        """The transfer that brings `row` what its pass `needed` works on; None: nothing comes over an edge."""
        source = self._neighbour(row, needed.micro_batch, -1 if needed.forward else 1)
        return None if source is None else StageTransfer(source, row, needed)

    def transfer_from(self, row: int, made: Pass) -> StageTransfer | None:
        """The transfer that takes away what pass `made` of `row` gives; None: nothing goes over an edge."""
        target = self._neighbour(row, made.micro_batch, 1 if made.forward else -1)
        return None if target is None else StageTransfer(row, target, made)

    def window(self, transfer: StageTransfer) -> int:
        """Receives posted ahead of need on a direction of the edge that `transfer` goes over, and sends that may be
        under way there: the two rows are no further apart (:func:`_apart`)."""
        return self._windows[transfer.source, transfer.target]

    def posted(self, stage: int) -> int:
        """Stage transfers that a replica of `stage` has buffers for at most, received and sent."""
        return max(self._buffers[self._first[stage] : self._first[stage + 1]])

    @cached_property
    def _buffers(self) -> list[int]:
        found = [0] * self.rows
        for ends, window in self._windows.items():
            for row in ends:
                found[row] += window
        return found

    @cached_property
    def _windows(self) -> dict[tuple[int, int], int]:
        found, own = {}, [[0] * self.micro_batches for _ in range(self.stages)]  # each micro-batch's place in its row
        for row in range(self.rows):
            stage = self.stage_of(row)
            for place, m in enumerate(self.own(row)):
                own[stage][m] = place
        for s in range(self.stages - 1):
            shared: dict[tuple[int, int], list[int]] = {}
            for m, ends in enumerate(zip(self.routes[s], self.routes[s + 1], strict=True)):
                shared.setdefault(ends, []).append(m)
            for (a, b), both in shared.items():
                up, down = self.row(s, a), self.row(s + 1, b)
                found[up, down] = found[down, up] = _apart(
                    [own[s][m] for m in both], [own[s + 1][m] for m in both], self.depth(up), self.depth(down)
                )
        return found

    def pace(self, row: int) -> int:
        """How many micro-batches a stage computes in the time of one pass of `row`, all its rows together."""
        return self.replicas[self.stage_of(row)]

    def hidden(self, transfer: StageTransfer) -> int:
        """Twice what the depth hides of `transfer`, in the time in which a stage computes a micro-batch."""
        upper = min(self.stage_of(transfer.source), self.stage_of(transfer.target))
        above, below = ((self.in_flight[s], self.replicas[s]) for s in (upper, upper + 1))
        return max(0, (above[0] - 1) * above[1] - below[0] * below[1])


def least_in_flight(replicas: tuple[int, ...], more: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Per stage, how many micro-batches a replica has to hold for no stage to wait where transfers take no time, of
    replicas that take turns. `more`: held beyond that above each edge, to hide its transfers.

    A stage's last forward pass before its backward pass of micro-batch k is that of k + (held - 1) * replicas, which
    the stage above must have computed before it waits for k, and a micro-batch more to take the result up in turn.
    """
    found = [1]
    for stage in reversed(range(len(replicas) - 1)):
        here, below = replicas[stage], replicas[stage + 1]
        found.insert(0, 1 + -(-(found[0] * below) // here) + (more[stage] if more else 0))
    return tuple(found)


def _apart(above: list[int], below: list[int], depth_above: int, depth_below: int) -> int:
    """How many of the micro-batches that two rows share can have left the upper one and not been taken by the lower
    one; `above`, `below`: their places in the order of each. When the upper row has done a forward pass, it has done
    the backward pass of a micro-batch its depth before: so the lower one has, and before that its own next forward
    passes up to its depth. (Of the first ones as of the others, as in a grid.)"""
    most, taken, back = 1, 0, 0
    for sent, place in enumerate(above, 1):
        while above[back] <= place - depth_above:
            back += 1
        newest = below[back - 1] if back else -1
        while taken < sent and below[taken] <= newest + depth_below - 1:
            taken += 1
        most = max(most, sent - taken)
    return most
