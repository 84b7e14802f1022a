"""The pipeline schedules (`SCHEDULES`), and the passes and exchanges of Megatron-Core's two.

Megatron-Core's schedules (megatron-core 0.16.1, pipeline_parallel/schedules.py) wait for their sends and receives.
Eager 1F1B (`ahead`), this project's own, posts receives early and lets sends complete in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from holmes_hpc.config.plan_options import OPTION_NAMES
from holmes_hpc.errors import PlanError, nearest


class Pass(NamedTuple):
    """One pass of a stage, forward or backward, of model chunk `chunk`, for `micro_batch`."""

    forward: bool
    micro_batch: int
    chunk: int


class StageTransfer(NamedTuple):
    """One transfer over a pipeline edge: stage `source` sends the result of `source_pass` to stage `target`."""

    source: int
    target: int
    source_pass: Pass


@dataclass(frozen=True)
class Exchange:
    """Stage transfers that a stage posts together, and those that it then waits for (None: the posted ones)."""

    sends: tuple[StageTransfer, ...] = ()
    receives: tuple[StageTransfer, ...] = ()
    waits: tuple[StageTransfer, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives or self.waits)


class Pipeline(Protocol):
    """The part of :class:`Order` that schedules use; see there for the meaning of each attribute."""

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
    def sent(self, stage: int, source_pass: Pass) -> tuple[StageTransfer, ...]: ...
    def received(self, stage: int, needed: Pass) -> tuple[StageTransfer, ...]: ...


def alternating(turns: int, depth: int) -> np.ndarray:
    """Return `depth` - 1 forward passes, then one forward and one backward pass in turn, (2 turns,)."""
    sequence, warm_up, pairs = np.empty(2 * turns, dtype=int), depth - 1, turns - depth + 1
    turn = np.arange(turns)
    sequence[np.where(turn < warm_up, turn, 2 * turn - warm_up)] = turn
    sequence[np.where(turn < pairs, warm_up + 2 * turn + 1, turn + turns)] = turn + turns
    return sequence


@dataclass(frozen=True)
class ScheduleKind:
    """A pipeline schedule: all properties that the planner, the simulation and training depend on.

    `label`: its name in text. `chunks`: the smallest and largest (None: any) number of virtual stages.
    `in_flight`: (stages, micro-batches, chunks) -> the most passes whose activations each stage holds, for the memory
    estimate. `deepens`: the planner may let a stage hold more, as the plan's in_flight states.

    `megatron`: (order, stage) -> the passes and blocking exchanges of Megatron-Core's function, which runs the
    schedule. None: this project's executor runs it and exchanges in the background. `turns`: (T passes per direction,
    passes that the stage holds) -> the order of the passes. Forward passes are 0 … T-1 and backward passes T … 2T-1,
    each in the order of :meth:`Order.turns`. With virtual stages it must be `alternating`.

    `waits`: in the steady state a stage does nothing else during its two exchanges per micro-batch, one with each
    neighbour; the lower bound of a step relies on it. `per_stage`: it supports per-stage TP/DP.
    """

    name: str
    label: str
    chunks: tuple[int, int | None]
    in_flight: Callable[[int, int, int], tuple[int, ...]]
    megatron: Callable[[Pipeline, int], list[Pass | Exchange]] | None = None
    turns: Callable[[int, int], np.ndarray] = alternating
    deepens: bool = False
    waits: bool = False
    per_stage: bool = False

    def __post_init__(self) -> None:
        fewest, largest = self.chunks
        if fewest < 1 or (largest is not None and largest < fewest):
            raise ValueError(f"schedule {self.name}: chunks are {self.chunks}")
        if self.turns is not alternating and self.chunks != (1, 1):
            raise ValueError(f"schedule {self.name}: with virtual stages only `alternating` turns are supported")

    @property
    def option_name(self) -> str:
        """The name that `plan.schedule` takes."""
        return OPTION_NAMES.get(self.name, self.name)

    def supports(self, chunks: int) -> bool:
        """Return whether the schedule supports `chunks` virtual stages."""
        return self.chunks[0] <= chunks and (self.chunks[1] is None or chunks <= self.chunks[1])

    def check_chunks(self, chunks: int) -> None:
        """Raise PlanError if the schedule does not support `chunks` virtual stages."""
        if self.supports(chunks):
            return
        fewest, largest = self.chunks
        limit = f"at least {fewest}" if chunks < fewest else "no" if largest == 1 else f"at most {largest}"
        alternatives = " or ".join(kind.option_name for kind in SCHEDULES.values() if kind.supports(chunks))
        raise PlanError(f"{self.option_name} has {limit} virtual stages", where="schedule", hint=f"use {alternatives}")


def _one_forward_one_backward(order: Pipeline, stage: int) -> list[Pass | Exchange]:
    """Return the program of Megatron-Core's 1F1B: every pass waits for its input.
    In the steady state, a send and the receive of the opposite direction are one exchange (`order.paired`)."""
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
    """Return the program of Megatron-Core's interleaved 1F1B with overlap_p2p_comm.

    In warm-up and cool-down, a stage waits for each exchange. In the steady state, it waits for a receive when a pass
    needs it, and for a send when it posts the next one.
    """
    forward = [Pass(True, m, c) for m, c in order.turns()]
    backward = [Pass(False, m, order.chunks - 1 - c) for m, c in order.turns()]
    total, last = len(forward), order.stages - 1
    warm = min(total, 2 * (last - stage) + (order.chunks - 1) * order.group)
    out, into = partial(order.sent, stage), partial(order.received, stage)

    def incoming(passes: Sequence[Pass], k: int) -> tuple[StageTransfer, ...]:
        """Return the receive after `passes[k]`: the input of the next pass.
        Over the wrap-around edge it is the result that the other end computed `stages - 1` passes ago."""
        if k + 1 >= total:
            return ()
        if stage != (0 if passes[k].forward else last):
            return into(passes[k + 1])
        source_pass = passes[k - last] if k >= last else None
        return order.sent(last if passes[k].forward else 0, source_pass) if source_pass else ()

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
        for passes, index in ((forward, k + warm), (backward, k)):
            p = passes[index]
            items += [Exchange(waits=into(p)), p, Exchange(out(p), incoming(passes, index), sent[p.forward])]
            sent[p.forward] = out(p)
    for k in range(total - warm, total):
        items += [Exchange(waits=into(backward[k])), backward[k], Exchange(out(backward[k]), incoming(backward, k))]
    return [item for item in items if item]


def in_flight(stages: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the most passes that each stage holds under Megatron-Core's schedules: its warm-up and one more."""
    if chunks == 1:
        return tuple(min(micro_batches, stages - s) for s in range(stages))
    return tuple(min(micro_batches * chunks, 2 * (stages - s - 1) + (chunks - 1) * stages + 1) for s in range(stages))


SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("1f1b", "1F1B", (1, 1), in_flight, megatron=_one_forward_one_backward, waits=True),
        ScheduleKind("interleaved", "interleaved 1F1B", (2, None), in_flight, megatron=_interleaved),
        ScheduleKind("ahead", "eager 1F1B", (1, None), in_flight, deepens=True, per_stage=True),
    )
}

PER_STAGE = next(kind for kind in SCHEDULES.values() if kind.per_stage)  # with per-stage TP/DP


def schedule_kind(name: str) -> ScheduleKind:
    """Return the schedule of that name. PlanError if the name is unknown."""
    if name not in SCHEDULES:
        raise PlanError(f"no schedule {name!r}", where="schedule.kind", hint=nearest(name, SCHEDULES))
    return SCHEDULES[name]


def megatron_kind(chunks: int) -> ScheduleKind:
    """Return the schedule of Megatron-Core with `chunks` virtual stages."""
    return next(kind for kind in SCHEDULES.values() if kind.megatron and kind.supports(chunks))


def candidate_schedules(requested: str, chunks: int, background: bool) -> tuple[str, ...]:
    """Return the names of the schedules to try with `chunks` virtual stages, the preferred one first.

    `requested`: a name, which Megatron-Core's schedule replaces if it needs more virtual stages; or ``auto``:
    Megatron-Core's schedule, and before it, if stages may exchange in the `background`, eager 1F1B.
    """
    megatron_name = megatron_kind(chunks).name
    if requested != "auto":
        return (requested if chunks >= schedule_kind(requested).chunks[0] else megatron_name,)
    eager = [kind.name for kind in SCHEDULES.values() if kind.deepens] if background else []
    return (*eager, megatron_name)
