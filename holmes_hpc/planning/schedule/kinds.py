"""The pipeline schedules (`SCHEDULES`), and the passes and exchanges of Megatron-Core's two.

Megatron-Core's two (read in megatron-core 0.16.1, pipeline_parallel/schedules.py) wait for what they send and receive;
this project's own (`ahead`) posts receives before they are needed and lets sends complete in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from holmes_hpc.errors import PlanError, nearest


class Pass(NamedTuple):
    """One pass of a stage: forward or backward, of model chunk `chunk`, for `micro_batch`."""

    forward: bool
    micro_batch: int
    chunk: int


class StageTransfer(NamedTuple):
    """One transfer over a pipeline edge: the result of pass `made` of stage `source`, which stage `target` needs."""

    source: int
    target: int
    made: Pass


@dataclass(frozen=True)
class Exchange:
    """Stage transfers that a stage posts together, and then those it waits for (None: just the ones it posted)."""

    sends: tuple[StageTransfer, ...] = ()
    receives: tuple[StageTransfer, ...] = ()
    waits: tuple[StageTransfer, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives or self.waits)


class Pipeline(Protocol):
    """What a schedule needs to know of an :class:`Order`, which says what each is."""

    @property
    def stages(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def overlap(self) -> bool: ...
    @property
    def paired(self) -> bool: ...
    @property
    def group(self) -> int: ...
    def turns(self) -> list[tuple[int, int]]: ...
    def sent(self, stage: int, made: Pass) -> tuple[StageTransfer, ...]: ...
    def received(self, stage: int, needed: Pass) -> tuple[StageTransfer, ...]: ...


def alternating(turns: int, depth: int) -> np.ndarray:
    """Forward passes up to the depth less one, then one forward and one backward in turn, (2 turns,)."""
    at, before, pairs = np.empty(2 * turns, dtype=int), depth - 1, turns - depth + 1
    turn = np.arange(turns)
    at[np.where(turn < before, turn, 2 * turn - before)] = turn
    at[np.where(turn < pairs, before + 2 * turn + 1, turn + turns)] = turn + turns
    return at


@dataclass(frozen=True)
class ScheduleKind:
    """A pipeline schedule: all by which the planner, the simulation and training tell it from others.

    `words`: what it is called in a sentence. `chunks`: the fewest and the most (None: any) virtual stages it has.
    `in_flight`: of (stages, micro-batches, chunks), the passes of which each stage holds activations at most, by which
    memory is reckoned; where `deepens`, the planner may have a stage hold more of them, as a plan's in_flight says.

    `megatron`: what Megatron-Core's own function, which then runs it, does on a stage: passes, and exchanges that are
    waited for. None: the executor of this project runs it, exchanging in the background. `turns`: of (T passes each
    way, passes that the stage holds), the order of computing: forward passes are 0 … T-1, the backward ones T … 2T-1,
    each way in the order in which micro-batches take turns (:meth:`Order.turns`). Only without virtual stages may it be
    another than alternating.

    `waits`: in the steady state a stage does nothing else while it exchanges, once below and once above it for every
    micro-batch; a bound of the step may count on that. `per_stage`: stages may have TP and DP of their own under it.
    """

    name: str
    words: str
    chunks: tuple[int, int | None]
    in_flight: Callable[[int, int, int], tuple[int, ...]]
    megatron: Callable[[Pipeline, int], list[Pass | Exchange]] | None = None
    turns: Callable[[int, int], np.ndarray] = alternating
    deepens: bool = False
    waits: bool = False
    per_stage: bool = False

    def __post_init__(self) -> None:
        least, most = self.chunks
        if least < 1 or (most is not None and most < least):
            raise ValueError(f"schedule {self.name}: chunks are {self.chunks}")
        if self.turns is not alternating and self.chunks != (1, 1):
            raise ValueError(
                f"schedule {self.name}: an order of its own with virtual stages, whose memory is not known"
            )

    def takes(self, chunks: int) -> bool:
        """Whether it has so many virtual stages."""
        return self.chunks[0] <= chunks and (self.chunks[1] is None or chunks <= self.chunks[1])

    def refuse(self, chunks: int) -> None:
        """PlanError where it has not so many virtual stages as `chunks`."""
        if self.takes(chunks):
            return
        least, most = self.chunks
        some = f"at least {least}" if chunks < least else "no" if most == 1 else f"at most {most}"
        others = " or ".join(kind.name for kind in SCHEDULES.values() if kind.takes(chunks))
        raise PlanError(f"{self.name} has {some} virtual stages", where="schedule", hint=f"use {others}")


def _one_forward_one_backward(order: Pipeline, stage: int) -> list[Pass | Exchange]:
    """Megatron-Core's: every pass waits for its input; in the steady state a send and the receive of the opposite
    direction are one exchange (`order.paired`)."""
    items: list[Pass | Exchange] = []
    m, warm = order.micro_batches, min(order.micro_batches, order.stages - stage - 1)
    f, b = (lambda i: Pass(True, i, 0)), (lambda i: Pass(False, i, 0))
    out, into = partial(order.sent, stage), partial(order.received, stage)
    for i in range(warm):
        items += [Exchange(receives=into(f(i))), f(i), Exchange(sends=out(f(i)))]
    if warm < m:
        items.append(Exchange(receives=into(f(warm))))
    for i in range(m - warm):
        below = Exchange(out(f(i + warm)), into(b(i)))
        above = Exchange(out(b(i)), into(f(i + warm + 1)) if i + warm + 1 < m else ())
        if order.paired:
            items += [f(i + warm), below, b(i), above]
        else:
            items += [f(i + warm), Exchange(receives=below.receives), Exchange(below.sends), b(i)]
            items += [Exchange(above.sends), Exchange(receives=above.receives)]
    for i in range(m - warm, m):
        items += [Exchange(receives=into(b(i))), b(i), Exchange(sends=out(b(i)))]
    return [item for item in items if item]


def _interleaved(order: Pipeline, stage: int) -> list[Pass | Exchange]:
    """Megatron-Core's with virtual stages and overlap_p2p_comm: exchanges are waited for in the warm-up and at the
    end; in the steady state a receive is waited for where it is needed, a send when the next one is posted."""
    forward = [Pass(True, m, c) for m, c in order.turns()]
    backward = [Pass(False, m, order.chunks - 1 - c) for m, c in order.turns()]
    total, last = len(forward), order.stages - 1
    warm = min(total, 2 * (last - stage) + (order.chunks - 1) * order.group)
    out, into = partial(order.sent, stage), partial(order.received, stage)

    def incoming(ways: Sequence[Pass], k: int) -> tuple[StageTransfer, ...]:
        """What is received after `ways[k]`: the next pass's input; over the ring's closing edge what the other
        end made `stages - 1` passes ago."""
        if k + 1 >= total:
            return ()
        if stage != (0 if ways[k].forward else last):
            return into(ways[k + 1])
        made = ways[k - last] if k >= last else None
        return order.sent(last if ways[k].forward else 0, made) if made else ()

    items: list[Pass | Exchange] = [Exchange(receives=into(forward[0]))]
    for k in range(warm):
        items += [forward[k], Exchange(out(forward[k]), incoming(forward, k))]
    early = into(backward[0])
    items.append(Exchange(receives=early, waits=early if warm == total else ()))
    sent: dict[bool, tuple[StageTransfer, ...]] = {True: (), False: ()}
    for k in range(total - warm):
        if not order.overlap:
            f, b = forward[k + warm], backward[k]
            items += [
                Exchange(waits=into(b)) if k == 0 else Exchange(),
                f,
                b,
                Exchange(out(f) + out(b), incoming(forward, k + warm) + incoming(backward, k)),
            ]
            continue
        for ways, at in ((forward, k + warm), (backward, k)):
            done, way = ways[at], ways[at].forward
            items += [Exchange(waits=into(done)), done, Exchange(out(done), incoming(ways, at), sent[way])]
            sent[way] = out(done)
    for k in range(total - warm, total):
        items += [Exchange(waits=into(backward[k])), backward[k], Exchange(out(backward[k]), incoming(backward, k))]
    return [item for item in items if item]


def in_flight(stages: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Passes that each stage holds under Megatron-Core's schedules: its warm-up and one."""
    if chunks == 1:
        return tuple(min(micro_batches, stages - s) for s in range(stages))
    return tuple(min(micro_batches * chunks, 2 * (stages - s - 1) + (chunks - 1) * stages + 1) for s in range(stages))


SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("1f1b", "1F1B", (1, 1), in_flight, megatron=_one_forward_one_backward, waits=True),
        ScheduleKind("interleaved", "interleaved schedule", (2, None), in_flight, megatron=_interleaved),
        ScheduleKind("ahead", "schedule that runs ahead", (1, None), in_flight, deepens=True, per_stage=True),
    )
}

PER_STAGE = next(kind for kind in SCHEDULES.values() if kind.per_stage)  # of stages with TP and DP of their own


def schedule_kind(name: str) -> ScheduleKind:
    """The schedule of that name; an unknown name is a PlanError."""
    if name not in SCHEDULES:
        raise PlanError(f"no schedule {name!r}", where="schedule.kind", hint=nearest(name, SCHEDULES))
    return SCHEDULES[name]


def megatrons_own(chunks: int) -> ScheduleKind:
    """Megatron-Core's own with so many virtual stages."""
    return next(kind for kind in SCHEDULES.values() if kind.megatron and kind.takes(chunks))


def in_question(wanted: str, chunks: int, background: bool) -> tuple[str, ...]:
    """The schedules to try for so many virtual stages, the one to be preferred first. `wanted`: a name (of one that
    must have more virtual stages: Megatron-Core's own for so many), or ``auto``: where stages may exchange in the
    `background` the one that runs as deep as memory allows, and Megatron-Core's own."""
    own = megatrons_own(chunks).name
    if wanted != "auto":
        return (wanted if chunks >= schedule_kind(wanted).chunks[0] else own,)
    deep = [kind.name for kind in SCHEDULES.values() if kind.deepens] if background else []
    return (*deep, own)
