"""The order in which each rank launches its passes, sends and receives, and the proof that no GPU can lock up in it.

On NCCL a send and a receive are kernels that spin until the other end has come to theirs, and a launch may hold up the
host until all that this GPU was given before is done: a kernel that is loaded at its first use, memory given back to
the driver, a communicator set up late, two streams in one hardware queue. A receive that spins for what its own rank
launches later would then spin for ever.

**The rule**: what a launch waits for never depends on anything that the same rank launches after it.

**The model** that it is checked under is the worst that a device can do: *every* launch waits until all that was
launched before it on its rank is done; a send or a receive is done when the other end has reached its own, both at once
(nothing is buffered). Then each transfer is one event at two ranks, and a step goes through if and only if there is one
line of all events, passes and transfers, of which every rank's launches in order are a part. Whatever a real device,
allocator or NCCL waits for is also waited for in the model, so what goes through here cannot lock up there. Collectives
change nothing: the ranks of a stage launch the same in the same order, so that they count as one; those between stages
come after all of a step's passes. Only where stages have unequal widths do the replicas of a stage compute different
micro-batches: there, if they take turns, a replica's first pass (in which parameters are gathered) ends when all
replicas have come to theirs, and what follows its last pass (in which gradients are reduced) begins when all have come
to theirs (:class:`_Step`).

Nothing of this has been seen on a GPU. Gloo's transfers hold up no device: its receives are posted as early as there
is room for them (:func:`windowed`), which would break the rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.kinds import Pass, StageTransfer, alternating
from holmes_hpc.planning.schedule.order import Order


class Post(NamedTuple):
    """One end of a stage transfer is launched: its sending or its receiving one."""

    sends: bool
    transfer: StageTransfer

    @property
    def other(self) -> int:
        """The stage (row) at the other end."""
        return self.transfer.target if self.sends else self.transfer.source


Launch = Pass | Post
Launches = list[list[Launch]]  # per row of an Order


def passes(order: Order, stage: int, forward_only: bool = False) -> list[Pass]:
    """What `stage` computes in a step; for validation only the forward passes, and then as far ahead as they get."""
    return [p for p in order.passes(stage) if p.forward or not forward_only]


@lru_cache(maxsize=8)
def launches(order: Order, stage: int, forward_only: bool, on_device: bool) -> tuple[Launch, ...]:
    """What `stage` launches that exchanges in the background. `on_device`: are transfers kernels of a GPU (NCCL)?"""
    return tuple((in_line if on_device else windowed)(order, forward_only)[stage])


def in_line(order: Order, forward_only: bool = False) -> Launches:
    """In the background, with NCCL: every receive is posted before the pass during which its tensor leaves the other
    end.

    One line of all events is made, and each rank launches its part of it: a step is gone through with passes of equal
    length, as many held as `order` says, transfers taking half of what the depth hides (`in_flight[s]` is
    in_flight[s + 1] + 1 + 2h, docs/schedule.md); passes stand in line at their ends, each followed by the transfer of
    its result. Raises PlanError where a stage would wait for ever.
    """
    ends = _ends(order, forward_only)
    found: Launches = [[] for _ in range(order.rows)]
    for _, stage, done in sorted((end, stage, p) for stage, row in enumerate(ends) for p, end in row.items()):
        found[stage].append(done)
        if (transfer := order.transfer_from(stage, done)) is not None:
            found[stage].append(Post(True, transfer))
            found[transfer.target].append(Post(False, transfer))
    return found


FORWARD, BACKWARD, HALF = 2, 4, 3  # a pass takes that long, and half of both


def _ends(order: Order, forward_only: bool) -> list[dict[Pass, int]]:
    """Return, per row, when each of its passes ends, in order."""
    step = _Step(order, [passes(order, row, forward_only) for row in range(order.rows)])
    ends: list[dict[Pass, int]] = [{} for _ in step.rows]
    now = [0] * order.rows

    def advance(row: int, launch: Any) -> bool:
        start = now[row]
        if (transfer := order.transfer_to(row, launch)) is not None:
            made = ends[transfer.source].get(transfer.made)
            if made is None:
                return False
            start = max(start, made + HALF * order.hidden(transfer))
        if not launch.forward and launch._replace(forward=True) not in ends[row]:
            return False
        if (met := step.meet(row, launch, after_last=not forward_only, start=start)) is None:
            return False
        rows = order.replicas[order.stage_of(row)]  # a stage computes so many micro-batches in the time of one pass
        now[row] = ends[row][launch] = met + rows * (FORWARD if launch.forward else BACKWARD)
        step.take(row, launch)
        return True

    step.go_through(advance)
    return ends


def windowed(order: Order, forward_only: bool = False) -> Launches:
    """In the background, with gloo: on each edge a window of receives is posted before anything is computed, and one
    more whenever one is taken."""
    found: Launches = []
    for row in range(order.rows):
        steps = passes(order, row, forward_only)
        coming: dict[tuple[bool, int], deque[StageTransfer]] = {}  # by way and source, in their order
        for way in (True, False):
            for step in steps:
                if step.forward is way and (transfer := order.transfer_to(row, step)) is not None:
                    coming.setdefault((way, transfer.source), deque()).append(transfer)
        launched: list[Launch] = []
        for waiting in coming.values():
            launched += [Post(False, waiting.popleft()) for _ in range(min(order.window(waiting[0]), len(waiting)))]
        for step in steps:
            if (taken := order.transfer_to(row, step)) is not None and (left := coming[step.forward, taken.source]):
                launched.append(Post(False, left.popleft()))
            launched.append(step)
            if (leaves := order.transfer_from(row, step)) is not None:
                launched.append(Post(True, leaves))
        found.append(launched)
    return found


def of_megatron(order: Order) -> Launches:
    """Of Megatron-Core's schedules over this project's edges."""
    found: Launches = []
    for stage in range(order.stages):
        row: list[Launch] = []
        for item in order.program(stage):
            if isinstance(item, Pass):
                row.append(item)
            else:
                posts = {
                    (t.made.forward, sends): Post(sends, t)
                    for sends, transfers in ((True, item.sends), (False, item.receives))
                    for t in transfers
                }
                row += [posts[turn] for turn in exchange_order(stage) if turn in posts]
        found.append(row)
    return found


def exchange_order(stage: int) -> tuple[tuple[bool, bool], ...]:
    """The order in which what is exchanged at once is launched, as (forward, sends): activations before gradients, so
    that both ends of an edge come to the same transfer; and every other stage receives first, so that no ring of stages
    is all sending."""
    first = stage % 2 == 0
    return (True, first), (True, not first), (False, first), (False, not first)


def check_launches(order: Order) -> None:
    """Refuse a plan whose stages could wait for each other for ever. Raises PlanError. Of very many micro-batches those
    are gone through past which a pipeline of equal widths only repeats itself (:attr:`Order.settled`)."""
    if not order.routes:
        order = replace(order, micro_batches=min(order.micro_batches, order.settled))
    _check(order)


@lru_cache(maxsize=256)
def _check(order: Order) -> None:
    if order.stages > 1:
        check_line(order, of_megatron(order) if order.schedule.megatron else in_line(order))
    if order.routes or order.schedule.turns is not alternating:
        check_windows(order, windowed(order))


class _Step:
    """A step that is gone through launch by launch: what each row has done. Where replicas of a stage are rows that
    take turns, they wait for each other in their first passes, and in their last ones."""

    def __init__(self, order: Order, rows: Sequence[Sequence[Launch]]) -> None:
        self.order, self.rows = order, rows
        self.done: list[set[Launch]] = [set() for _ in rows]
        self._at = [0] * len(rows)
        self._came: dict[tuple[int, bool], dict[int, int]] = {}  # when rows of a stage came to their first (last) pass
        computed = [[launch for launch in row if isinstance(launch, Pass)] for row in rows if order.meets]
        self._ends = [(own[0], own[-1]) for own in computed]

    def next(self, row: int) -> Launch | None:
        return self.rows[row][self._at[row]] if self._at[row] < len(self.rows[row]) else None

    def take(self, row: int, launch: Launch) -> None:
        self.done[row].add(launch)
        self._at[row] += 1

    def meet(self, row: int, launch: Pass, after_last: bool, start: int = 0) -> int | None:
        """Return when `row`, which has come to `launch` at `start`, goes on with it; None: others of its stage have not
        come to theirs. `after_last`: rows wait for each other at their last passes too."""
        if not self._ends or launch not in self._ends[row][: 1 + after_last]:
            return start
        stage = self.order.stage_of(row)
        came = self._came.setdefault((stage, launch == self._ends[row][0]), {})
        came[row] = start
        return max(came.values()) if len(came) == self.order.replicas[stage] else None

    def go_through(self, advance: Callable[[int, Launch], bool]) -> None:
        """Take each row as far as it gets, by `advance`, which does a row's next launch if nothing is in its way.
        Raises PlanError where a row would wait for ever."""
        before, gone = -1, 0
        while before < gone:
            before = gone
            for row in range(len(self.rows)):
                while (launch := self.next(row)) is not None and advance(row, launch):
                    pass
            gone = sum(self._at) + sum(map(len, self._came.values()))
        order = self.order
        for row in range(len(self.rows)):
            if (launch := self.next(row)) is not None:
                made = launch if isinstance(launch, Pass) else launch.transfer.made
                why = "replicas of a stage wait for each other"
                raise PlanError(
                    f"with in_flight {list(order.in_flight)} stage {order.stage_of(row)} would wait for ever for"
                    f" micro-batch {made.micro_batch}",
                    where="plan.schedule",
                    hint="hold more passes in flight: "
                    + (why if order.routes else "virtual stages need several for each chunk"),
                )


def check_windows(order: Order, rows: Sequence[Sequence[Launch]]) -> None:
    """Go through a step of :func:`windowed` launches as gloo does them: a row computes once its input has been sent,
    and goes on after a send once the send a window before it has a receive to go to, posted by then. Raises PlanError
    where one would wait for ever. (In a pipeline of equal widths whose stages alternate forward and backward passes,
    two are never further apart than their window; where a row has several neighbours, one may hold up another.)"""
    step = _Step(order, rows)
    sent: dict[tuple[int, int], list[StageTransfer]] = {}

    def advance(row: int, launch: Launch) -> bool:
        if isinstance(launch, Pass):
            needed = order.transfer_to(row, launch)
            if needed is not None and Post(True, needed) not in step.done[needed.source]:
                return False
            if step.meet(row, launch, after_last=False) is None:
                return False
        elif launch.sends:
            before = sent.setdefault((row, launch.other), [])
            behind = len(before) - order.window(launch.transfer)
            if behind >= 0 and Post(False, before[behind]) not in step.done[launch.other]:
                return False
            before.append(launch.transfer)
        step.take(row, launch)
        return True

    step.go_through(advance)


def check_line(order: Order, rows: Sequence[Sequence[Launch]]) -> None:
    """Go through a step in the model of this module. Raises PlanError where a stage would wait for ever, or computes
    on what it has not received."""
    step = _Step(order, rows)

    def advance(row: int, launch: Launch) -> bool:
        if isinstance(launch, Pass):
            needed = order.transfer_to(row, launch)
            if needed is not None and Post(False, needed) not in step.done[row]:
                return False
            if not launch.forward and launch._replace(forward=True) not in step.done[row]:
                return False
            if step.meet(row, launch, after_last=True) is None:
                return False
        else:
            twin = Post(not launch.sends, launch.transfer)
            if (launch.sends and launch.transfer.made not in step.done[row]) or step.next(launch.other) != twin:
                return False
            step.take(launch.other, twin)
        step.take(row, launch)
        return True

    step.go_through(advance)
