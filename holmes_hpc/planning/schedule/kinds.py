"""The pipeline schedules (`SCHEDULES`), and the passes and transfers of their steps.

Megatron-Core's two schedules wait for their sends and receives (megatron_programs.py). This project's own schedules,
eager 1F1B (`ahead`) and zero bubble, post receives early and let sends complete in the background. Add each new
schedule to SCHEDULE_NAMES in config/plan_options.py, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from holmes_hpc.config.plan_options import OPTION_NAMES
from holmes_hpc.errors import PlanError, nearest

COMPUTING = ("forward", "backward", "weight")  # kinds of events in which a stage computes


class Pass(NamedTuple):
    """A forward pass, or a backward pass if `forward` is False, of one micro-batch through one of a stage's chunks."""

    forward: bool
    micro_batch: int
    chunk: int


class WeightPass(NamedTuple):
    """The weight gradients of one micro-batch in one chunk, computed after its backward pass."""

    micro_batch: int
    chunk: int


class StageTransfer(NamedTuple):
    """One transfer over a pipeline edge: stage `source` sends the result of `source_pass` to stage `target`."""

    source: int
    target: int
    source_pass: Pass


@dataclass(frozen=True)
class Exchange:
    """Stage transfers that a stage posts together. It then waits for the transfers `waits`; None: for all of these."""

    sends: tuple[StageTransfer, ...] = ()
    receives: tuple[StageTransfer, ...] = ()
    waits: tuple[StageTransfer, ...] | None = None

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives or self.waits)


@lru_cache(maxsize=256)
def alternating(turns: int, depth: int) -> np.ndarray:
    """Return the order of passes that starts with `depth` - 1 forward passes and then alternates, (2 * turns,),
    read-only. Forward passes are 0 … turns-1, backward passes turns … 2*turns-1."""
    warm_up, pairs = depth - 1, turns - depth + 1
    turn = np.arange(turns)
    forward_position = np.where(turn < warm_up, turn, 2 * turn - warm_up)
    backward_position = np.where(turn < pairs, warm_up + 2 * turn + 1, turns + turn)
    order = np.argsort(np.concatenate([forward_position, backward_position]))
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class ScheduleKind:
    """A pipeline schedule: all properties that the planner, the simulation and training depend on.

    `label`: its name in text. `chunks`: the smallest and largest (None: any) number of virtual stages. `in_flight`: for
    the memory estimate, function of (stages, micro-batches, chunks) that returns the most passes whose activations each
    stage holds. `deepens`: whether a plan may let its stages hold more passes. `megatron`: whether a function of
    Megatron-Core runs the schedule and waits for its exchanges (megatron_programs.py). Otherwise, this project's
    executor exchanges in the background. `turns`: function of (passes per direction, passes that the stage holds) that
    returns the order of passes in the format of :func:`alternating`, which a schedule with virtual stages must use.

    `waits`: whether a stage, in the steady state, has two exchanges per micro-batch, one with each neighbour, and does
    not compute during them. The lower bound of a step relies on this. `per_stage`: whether the schedule supports
    per-stage TP/DP. `splits`: whether backward passes compute only gradients of inputs, and weight passes follow."""

    name: str
    label: str
    chunks: tuple[int, int | None]
    in_flight: Callable[[int, int, int], tuple[int, ...]]
    megatron: bool = False
    turns: Callable[[int, int], np.ndarray] = alternating
    deepens: bool = False
    waits: bool = False
    per_stage: bool = False
    splits: bool = False

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
        smallest, largest = self.chunks
        limit = f"at least {smallest}" if chunks < smallest else "no" if largest == 1 else f"at most {largest}"
        alternatives = " or ".join(kind.option_name for kind in SCHEDULES.values() if kind.supports(chunks))
        raise PlanError(f"{self.option_name} has {limit} virtual stages", where="schedule", hint=f"use {alternatives}")


def in_flight(stages: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the most passes that each stage holds under Megatron-Core's schedules: those of its warm-up plus one."""
    if chunks == 1:
        return tuple(min(micro_batches, stages - s) for s in range(stages))
    return tuple(min(micro_batches * chunks, 2 * (stages - s - 1) + (chunks - 1) * stages + 1) for s in range(stages))


SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("1f1b", "1F1B", (1, 1), in_flight, megatron=True, waits=True),
        ScheduleKind("interleaved", "interleaved 1F1B", (2, None), in_flight, megatron=True),
        ScheduleKind("ahead", "eager 1F1B", (1, None), in_flight, deepens=True, per_stage=True),
        ScheduleKind("zero_bubble", "zero bubble", (1, 1), in_flight, deepens=True, per_stage=True, splits=True),
    )
}

PER_STAGE = next(kind for kind in SCHEDULES.values() if kind.per_stage)  # used with per-stage TP/DP

SPLIT = next(kind for kind in SCHEDULES.values() if kind.splits)  # computes weight gradients later


def schedule_kind(name: str) -> ScheduleKind:
    """Return the schedule of that name. PlanError if the name is unknown."""
    if name not in SCHEDULES:
        raise PlanError(f"no schedule {name!r}", where="schedule.kind", hint=nearest(name, SCHEDULES))
    return SCHEDULES[name]


def megatron_kind(chunks: int) -> ScheduleKind:
    """Return the schedule of Megatron-Core with `chunks` virtual stages."""
    return next(kind for kind in SCHEDULES.values() if kind.megatron and kind.supports(chunks))


def candidate_schedules(requested: str, chunks: int, background: bool) -> tuple[str, ...]:
    """Return the names of the schedules to try with `chunks` virtual stages, the preferred one first. `requested`: the
    name of a schedule, which Megatron-Core's schedule replaces if it needs more virtual stages; or ``auto``: eager 1F1B
    if stages may exchange in the `background`, followed by Megatron-Core's schedule."""
    megatron_name = megatron_kind(chunks).name
    if requested != "auto":
        return (requested if chunks >= schedule_kind(requested).chunks[0] else megatron_name,)
    eager = [kind.name for kind in SCHEDULES.values() if kind.deepens and not kind.splits] if background else []
    return (*eager, megatron_name)
