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
to theirs (:class:`_Together`).

Nothing of this has been seen on a GPU. Gloo's transfers hold up no device: its receives are posted as early as there
is room for them (:func:`windowed`), which would break the rule.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

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
    """Per stage: when each of its passes ends, in order."""
    waiting = [passes(order, s, forward_only)[::-1] for s in range(order.rows)]
    ends: list[dict[Pass, int]] = [{} for _ in waiting]
    now = [0] * order.rows
    together = order.meets  # first and last passes: :class:`_Together`
    ahead = [own[-1] if own else None for own in waiting]
    came: dict[tuple[int, bool], dict[int, int]] = {}  # by stage and way: when its rows have come to those

    def meet(row: int, step: Pass, start: int) -> int | None:
        """When all rows of the stage have come to their first (last) pass; None: not yet."""
        found = came.setdefault((order.stage_of(row), step.forward), {})
        found[row] = start
        return max(found.values()) if len(found) == rows_of[order.stage_of(row)] else None

    rows_of = Counter(order.stage_of(row) for row in range(order.rows))

    def advance(stage: int) -> bool:
        left, before = waiting[stage], len(ends[stage]) + sum(map(len, came.values()))
        while left:
            step, start = left[-1], now[stage]
            if (transfer := order.transfer_to(stage, step)) is not None:
                made = ends[transfer.source].get(transfer.made)
                if made is None:
                    break
                start = max(start, made + HALF * order.hidden(transfer))
            if not step.forward and step._replace(forward=True) not in ends[stage]:
                break
            if together and (step == ahead[stage] if step.forward else len(left) == 1):
                met = meet(stage, step, start)
                if met is None:
                    break
                start = met
            now[stage] = ends[stage][left.pop()] = start + order.pace(stage) * (FORWARD if step.forward else BACKWARD)
        return len(ends[stage]) + sum(map(len, came.values())) > before

    while any([advance(stage) for stage in range(order.rows)]):
        pass
    for stage, left in enumerate(waiting):
        if left:
            raise stuck(order, stage, left[-1])
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
        if order.schedule.megatron:
            check_line(order, of_megatron(order))
        else:
            check_line(order, in_line(order))
    if order.routes or order.schedule.turns is not alternating:
        check_windows(order, windowed(order))


class _Together:
    """The passes in which the replicas of a stage wait for each other, where they are rows that take turns."""

    def __init__(self, order: Order, rows: Sequence[Sequence[Launch]]) -> None:
        self._came: set[tuple[int, bool]] = set()  # rows that have come to their first pass (True), and to the last
        self._ends: list[tuple[Launch, Launch]] = []
        self._beside: list[list[int]] = []
        if order.meets:
            computed = [[launch for launch in row if isinstance(launch, Pass)] for row in rows]
            self._ends = [(own[0], own[-1]) for own in computed]
            self._beside = [
                [b for b in range(len(rows)) if order.stage_of(b) == order.stage_of(a)] for a in range(len(rows))
            ]

    @property
    def count(self) -> int:
        return len(self._came)

    def waits(self, row: int, launch: Launch, after_last: bool) -> bool:
        """Whether `row`, which has come to `launch`, waits for the others. `after_last`: at its last pass too."""
        if not self._ends or launch not in self._ends[row][: 1 + after_last]:
            return False
        first = launch == self._ends[row][0]
        self._came.add((row, first))
        return any((other, first) not in self._came for other in self._beside[row])


def check_windows(order: Order, rows: Sequence[Sequence[Launch]]) -> None:
    """Go through a step of :func:`windowed` launches as gloo does them: a row computes once its input has been sent,
    and goes on after a send once the send a window before it has a receive to go to, posted by then. Raises PlanError
    where one would wait for ever. (In a pipeline of equal widths whose stages alternate forward and backward passes,
    two are never further apart than their window; where a row has several neighbours, one may hold up another.)"""
    at = [0] * len(rows)
    done: list[set[Launch]] = [set() for _ in rows]
    sent: dict[tuple[int, int], list[Post]] = {}
    together = _Together(order, rows)

    def blocked(row: int, launch: Launch) -> bool:
        if isinstance(launch, Pass):
            needed = order.transfer_to(row, launch)
            return needed is not None and Post(True, needed) not in done[needed.source]
        if not launch.sends:
            return False
        before = sent.setdefault((row, launch.other), [])
        behind = len(before) - order.window(launch.transfer)
        return behind >= 0 and Post(False, before[behind].transfer) not in done[launch.other]

    def advance(row: int) -> bool:
        began, came = at[row], together.count
        while at[row] < len(rows[row]) and not blocked(row, launch := rows[row][at[row]]):
            if together.waits(row, launch, after_last=False):
                break
            if isinstance(launch, Post) and launch.sends:
                sent.setdefault((row, launch.other), []).append(launch)
            done[row].add(launch)
            at[row] += 1
        return at[row] > began or together.count > came

    while any([advance(row) for row in range(len(rows))]):
        pass
    for row in range(len(rows)):
        if at[row] < len(rows[row]):
            launch = rows[row][at[row]]
            raise stuck(order, row, launch if isinstance(launch, Pass) else launch.transfer.made)


def check_line(order: Order, rows: Sequence[Sequence[Launch]]) -> None:
    """Go through a step in the model of this module. Raises PlanError where a stage would wait for ever, or computes
    on what it has not received."""
    at = [0] * len(rows)
    done: list[set[Launch]] = [set() for _ in rows]
    together = _Together(order, rows)

    def head(stage: int) -> Launch | None:
        return rows[stage][at[stage]] if at[stage] < len(rows[stage]) else None

    def advance(stage: int) -> bool:
        before, came = at[stage], together.count
        while (launch := head(stage)) is not None:
            if isinstance(launch, Pass):
                needed = order.transfer_to(stage, launch)
                if needed is not None and Post(False, needed) not in done[stage]:
                    break
                if not launch.forward and launch._replace(forward=True) not in done[stage]:
                    break
                if together.waits(stage, launch, after_last=True):
                    break
            else:
                if launch.sends and launch.transfer.made not in done[stage]:
                    break
                twin = Post(not launch.sends, launch.transfer)
                if head(launch.other) != twin:
                    break
                done[launch.other].add(twin)
                at[launch.other] += 1
            done[stage].add(launch)
            at[stage] += 1
        return at[stage] > before or together.count > came

    while any([advance(stage) for stage in range(len(rows))]):
        pass
    for stage in range(len(rows)):
        if (launch := head(stage)) is not None:
            raise stuck(order, stage, launch if isinstance(launch, Pass) else launch.transfer.made)


def stuck(order: Order, row: int, made: Pass) -> PlanError:
    """What is said of a stage (a row of a routed order) that would never get on."""
    stage = order.stage_of(row)
    why = "replicas of a stage wait for each other" if order.routes else "virtual stages need several for each chunk"
    return PlanError(
        f"with in_flight {list(order.in_flight)} stage {stage} would wait for ever for micro-batch {made.micro_batch}",
        where="plan.schedule",
        hint=f"hold more passes in flight: {why}",
    )
