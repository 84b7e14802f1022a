"""The order in which each rank launches its passes, sends and receives, and a check that it cannot deadlock a GPU.

NCCL sends and receives are kernels that spin until their peer runs. A launch may also block the host until all earlier
work of the GPU is done: a kernel is loaded at first use, memory returns to the driver, a communicator is set up late,
or two streams share a hardware queue. A receive that depends on a later launch of its own rank would then deadlock.

**The rule**: no launch depends on a later launch of the same rank.

**The model** for the check is the worst device. *Every* launch waits until all earlier launches of its rank are done.
A send and its receive are done at the same time, when both ranks have reached them (nothing is buffered). Each transfer
is then one event of two ranks. A step completes if and only if all passes and transfers have one total order that
contains every rank's launches in their order. Every wait of a real device, allocator or NCCL is also a wait of the
model, so a step that completes in the model cannot deadlock on a GPU.

Collectives add no deadlock. All ranks of a stage launch the same collectives in the same order, so a stage counts as
one rank. Collectives between stages follow all passes of a step. With per-stage TP/DP, however, replicas of a stage
compute different micro-batches. If these replicas take turns, they synchronize twice per step (:class:`_Step`): they
gather parameters in their first passes, and reduce gradients after their last passes. Only the first step of a run
gathers parameters in its passes. Later gathers are launched at the end of the previous step
(training/model/optimizer.py), where they wait for no pass.

Such a deadlock has not been observed on a GPU. Gloo transfers block no device, so the rule does not apply to them:
gloo receives are posted as early as possible (:func:`gloo_launches`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.schedule.kinds import Pass, StageTransfer, WeightPass, alternating
from holmes_hpc.planning.schedule.megatron_programs import program
from holmes_hpc.planning.schedule.order import Order


class Post(NamedTuple):
    """A send of a stage transfer, or a receive if `sends` is False, as a rank launches it on its device."""

    sends: bool
    transfer: StageTransfer

    @property
    def peer(self) -> int:
        """The row at the other end."""
        return self.transfer.target if self.sends else self.transfer.source


Launch = Pass | Post  # weight passes need no check: no launch waits for them
Launches = list[list[Launch]]  # per row of an Order


def passes(order: Order, stage: int, forward_only: bool = False) -> list[Pass]:
    """Return the passes of `stage` in a step. `forward_only`: only the forward passes, as in validation."""
    return [p for p in order.passes(stage) if p.forward or not forward_only]


@lru_cache(maxsize=8)
def launches(order: Order, stage: int, forward_only: bool, on_device: bool) -> tuple[Launch | WeightPass, ...]:
    """Return the launches of `stage` if it exchanges in the background. `on_device`: over NCCL, not gloo."""
    row = (nccl_launches if on_device else gloo_launches)(order, forward_only)[stage]
    return tuple(order.with_weight_passes(stage, row) if order.schedule.splits and not forward_only else row)


def nccl_launches(order: Order, forward_only: bool = False) -> Launches:
    """Return the launches of each row for exchanges over NCCL in the background. Each receive is posted before the pass
    during which the peer sends: each row launches its part of one total order, in which passes are sorted by their end
    in a simulated step, and each is followed by the transfer of its result. PlanError if a stage would wait forever."""
    ends = _pass_ends(order, forward_only)
    rows: Launches = [[] for _ in range(order.rows)]
    for _, stage, p in sorted((end, stage, p) for stage, row in enumerate(ends) for p, end in row.items()):
        rows[stage].append(p)
        if (transfer := order.transfer_from(stage, p)) is not None:
            rows[stage].append(Post(True, transfer))
            rows[transfer.target].append(Post(False, transfer))
    return rows


FORWARD, BACKWARD = 2, 4  # simulated time units of a pass
HALF = (FORWARD + BACKWARD) // 2  # half of a micro-batch's time on one stage


def _pass_ends(order: Order, forward_only: bool) -> list[dict[Pass, int]]:
    """Return, per row, the end time of each pass in a simulated step, in order."""
    step = _Step(order, [passes(order, row, forward_only) for row in range(order.rows)])
    ends: list[dict[Pass, int]] = [{} for _ in step.rows]
    now = [0] * order.rows

    def advance(row: int, launch: Any) -> bool:
        start = now[row]
        if (transfer := order.transfer_to(row, launch)) is not None:
            source_end = ends[transfer.source].get(transfer.source_pass)
            if source_end is None:
                return False
            start = max(start, source_end + HALF * order.extra_depth(transfer))
        if not launch.forward and launch._replace(forward=True) not in ends[row]:
            return False
        if (synchronized := step.synchronize(row, launch, after_last=not forward_only, start=start)) is None:
            return False
        replicas = order.replicas[order.stage_of(row)]  # so that a stage takes FORWARD + BACKWARD per micro-batch
        now[row] = ends[row][launch] = synchronized + replicas * (FORWARD if launch.forward else BACKWARD)
        step.complete(row, launch)
        return True

    step.run(advance)
    return ends


def gloo_launches(order: Order, forward_only: bool = False) -> Launches:
    """Return the launches of each row for exchanges over gloo in the background. At the start, each row posts a window
    of receives per edge and direction. Whenever a pass takes a received tensor, the next receive is posted."""
    rows: Launches = []
    for row in range(order.rows):
        row_passes = passes(order, row, forward_only)
        unposted: dict[tuple[bool, int], deque[StageTransfer]] = {}  # by direction and source, in order
        for forward in (True, False):
            for p in row_passes:
                if p.forward is forward and (transfer := order.transfer_to(row, p)) is not None:
                    unposted.setdefault((forward, transfer.source), deque()).append(transfer)
        launched: list[Launch] = []
        for queue in unposted.values():
            launched += [Post(False, queue.popleft()) for _ in range(min(order.window(queue[0]), len(queue)))]
        for p in row_passes:
            if (received := order.transfer_to(row, p)) is not None and (queue := unposted[p.forward, received.source]):
                launched.append(Post(False, queue.popleft()))
            launched.append(p)
            if (sent := order.transfer_from(row, p)) is not None:
                launched.append(Post(True, sent))
        rows.append(launched)
    return rows


def megatron_launches(order: Order) -> Launches:
    """Return the launches of Megatron-Core's schedules over this project's edges."""
    rows: Launches = []
    for stage in range(order.stages):
        row: list[Launch] = []
        for item in program(order, stage):
            if isinstance(item, Pass):
                row.append(item)
            else:
                posts = {
                    (t.source_pass.forward, sends): Post(sends, t)
                    for sends, transfers in ((True, item.sends), (False, item.receives))
                    for t in transfers
                }
                row += [posts[post] for post in exchange_order(stage) if post in posts]
        rows.append(row)
    return rows


def exchange_order(stage: int) -> tuple[tuple[bool, bool], ...]:
    """Return the order in which `stage` launches the posts of an exchange, each as (is an activation, is a send).
    Activations come first, so that both ends of an edge reach the same transfer. Every second stage receives first, so
    that the stages of a ring never all send first."""
    sends_first = stage % 2 == 0
    return (True, sends_first), (True, not sends_first), (False, sends_first), (False, not sends_first)


def check_launches(order: Order) -> None:
    """Raise PlanError if the stages could deadlock.
    A uniform layout is checked only until the pipeline is periodic (:attr:`Order.periodic_after`)."""
    if not order.routes:
        order = replace(order, micro_batches=min(order.micro_batches, order.periodic_after))
    _check(order)


@lru_cache(maxsize=256)
def _check(order: Order) -> None:
    if order.stages > 1:
        check_unbuffered(order, megatron_launches(order) if order.schedule.megatron else nccl_launches(order))
    if order.routes or order.schedule.turns is not alternating:
        check_windows(order, gloo_launches(order))


class _Step:
    """A step that is run launch by launch. `done`: the launches that each row has completed.
    If `order.synchronizes_rows`, the rows of a stage wait for each other in their first and in their last passes."""

    def __init__(self, order: Order, rows: Sequence[Sequence[Launch]]) -> None:
        self.order, self.rows = order, rows
        self.done: list[set[Launch]] = [set() for _ in rows]
        self._position = [0] * len(rows)
        # By (stage, True for the first passes of its rows or False for the last passes): when each row arrived there.
        self._arrivals: dict[tuple[int, bool], dict[int, int]] = {}
        computed = [[launch for launch in row if isinstance(launch, Pass)] for row in rows if order.synchronizes_rows]
        self._outer_passes = [(row_passes[0], row_passes[-1]) for row_passes in computed]

    def next(self, row: int) -> Launch | None:
        """Return the next launch of `row`; None after its last one."""
        return self.rows[row][self._position[row]] if self._position[row] < len(self.rows[row]) else None

    def complete(self, row: int, launch: Launch) -> None:
        """Record that `row` has completed `launch`, its next one."""
        self.done[row].add(launch)
        self._position[row] += 1

    def synchronize(self, row: int, launch: Pass, after_last: bool, start: int = 0) -> int | None:
        """Return the time at which `row` can run `launch`, which it reached at time `start`. None while `row` waits
        for other rows of its stage. `after_last`: whether rows also synchronize at their last passes."""
        if not self._outer_passes or launch not in self._outer_passes[row][: 1 + after_last]:
            return start
        stage = self.order.stage_of(row)
        arrivals = self._arrivals.setdefault((stage, launch == self._outer_passes[row][0]), {})
        arrivals[row] = start
        return max(arrivals.values()) if len(arrivals) == self.order.replicas[stage] else None

    def run(self, advance: Callable[[int, Launch], bool]) -> None:
        """Run all rows. `advance` completes a row's next launch, or returns False. PlanError if a row waits forever."""
        last_progress, progress = -1, 0
        while last_progress < progress:
            last_progress = progress
            for row in range(len(self.rows)):
                while (launch := self.next(row)) is not None and advance(row, launch):
                    pass
            progress = sum(self._position) + sum(map(len, self._arrivals.values()))
        order = self.order
        for row in range(len(self.rows)):
            if (launch := self.next(row)) is not None:
                blocked_pass = launch if isinstance(launch, Pass) else launch.transfer.source_pass
                in_flight, micro_batch = list(order.in_flight), blocked_pass.micro_batch
                stage = f"stage {order.stage_of(row)}"
                problem = f"with in_flight {in_flight} {stage} would wait forever for micro-batch {micro_batch}"
                virtual = "virtual stages need several for each chunk"
                reason = "replicas of a stage wait for each other" if order.routes else virtual
                hint = f"raise in_flight, to hold more passes in flight: {reason}"
                raise PlanError(problem, where="plan.schedule", hint=hint)


def check_windows(order: Order, rows: Sequence[Sequence[Launch]]) -> None:
    """Raise PlanError if a step of :func:`gloo_launches` would deadlock: after a send, a row continues only when the
    receive of the send one window earlier is posted. While it waits for one neighbour, it can block another."""
    step = _Step(order, rows)
    sent: dict[tuple[int, int], list[StageTransfer]] = {}

    def advance(row: int, launch: Launch) -> bool:
        if isinstance(launch, Pass):
            transfer = order.transfer_to(row, launch)
            if transfer is not None and Post(sends=True, transfer=transfer) not in step.done[transfer.source]:
                return False
            if step.synchronize(row, launch, after_last=False) is None:
                return False
        elif launch.sends:
            sent_transfers = sent.setdefault((row, launch.peer), [])
            index = len(sent_transfers) - order.window(launch.transfer)
            if index >= 0 and Post(sends=False, transfer=sent_transfers[index]) not in step.done[launch.peer]:
                return False
            sent_transfers.append(launch.transfer)
        step.complete(row, launch)
        return True

    step.run(advance)


def check_unbuffered(order: Order, rows: Sequence[Sequence[Launch]]) -> None:
    """Raise PlanError if a step deadlocks in the model of this module, or a pass runs before its input arrives."""
    step = _Step(order, rows)

    def advance(row: int, launch: Launch) -> bool:
        if isinstance(launch, Pass):
            transfer = order.transfer_to(row, launch)
            if transfer is not None and Post(sends=False, transfer=transfer) not in step.done[row]:
                return False
            if not launch.forward and launch._replace(forward=True) not in step.done[row]:
                return False
            if step.synchronize(row, launch, after_last=True) is None:
                return False
        else:
            other_end = Post(not launch.sends, launch.transfer)
            if launch.sends and launch.transfer.source_pass not in step.done[row]:
                return False
            if step.next(launch.peer) != other_end:
                return False
            step.complete(launch.peer, other_end)
        step.complete(row, launch)
        return True

    step.run(advance)
