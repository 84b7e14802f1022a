"""The pipeline schedules (`SCHEDULES`), and the passes and exchanges of Megatron-Core's two.

Megatron-Core's schedules (megatron-core 0.16.1, pipeline_parallel/schedules.py) wait for their sends and receives.
Eager 1F1B (`ahead`), this project's own, posts receives early and lets sends complete in the background.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

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
    """Stage transfers that a stage posts together. Then it waits for `waits`; None: for all that it has posted here."""

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


@lru_cache(maxsize=256)
def alternating(turns: int, depth: int) -> np.ndarray:
    """Return the order of passes that starts with `depth` - 1 forward passes and then alternates, (2 * turns,).

    Forward passes are 0 … turns-1, backward passes turns … 2*turns-1. The array is read-only.
    """
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

    `label`: its name in text. `chunks`: the smallest and largest (None: any) number of virtual stages.
    `in_flight`: (stages, micro-batches, chunks) -> the most passes whose activations each stage holds, for the memory
    estimate. `deepens`: a plan may let its stages hold more passes than that.

    `megatron`: (order, stage) -> the passes and blocking exchanges of the Megatron-Core function that runs the
    schedule. None: this project's executor runs it and exchanges in the background. `turns`: (T passes per direction,
    passes that the stage holds) -> the order of the passes, as :func:`alternating` returns it. Both directions are
    numbered in the order of :meth:`Order.turns`. With virtual stages it must be `alternating`.

    `waits`: in the steady state, a stage has two exchanges per micro-batch, one with each neighbour, and does not
    compute during them; the lower bound of a step relies on this. `per_stage`: the schedule supports per-stage TP/DP.
    `splits`: backward passes compute only the gradients of their inputs; weight passes follow (:class:`WeightPass`).
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


def _one_forward_one_backward(order: Pipeline, stage: int) -> list[Pass | Exchange]:
    """Return the program of Megatron-Core's 1F1B: every pass waits for its input.
    In the steady state, a send and the receive of the opposite direction are one exchange (`order.paired`)."""
    items: list[Pass | Exchange] = []
    count, warm_up = order.micro_batches, min(order.micro_batches, order.stages - stage - 1)
    forward, backward = ([Pass(is_forward, m, 0) for m in range(count)] for is_forward in (True, False))
    sends, receives = partial(order.sent, stage), partial(order.received, stage)
    for f in forward[:warm_up]:
        items += [Exchange(receives=receives(f)), f, Exchange(sends=sends(f))]
    if warm_up < count:
        items.append(Exchange(receives=receives(forward[warm_up])))
    for f, b in zip(forward[warm_up:], backward, strict=False):
        below = Exchange(sends(f), receives(b))
        above = Exchange(sends(b), receives(forward[f.micro_batch + 1]) if f.micro_batch + 1 < count else ())
        if order.paired:
            items += [f, below, b, above]
        else:
            items += [f, Exchange(receives=below.receives), Exchange(below.sends), b]
            items += [Exchange(above.sends), Exchange(receives=above.receives)]
    for b in backward[count - warm_up :]:
        items += [Exchange(receives=receives(b)), b, Exchange(sends=sends(b))]
    return [item for item in items if item]


def _interleaved(order: Pipeline, stage: int) -> list[Pass | Exchange]:
    """Return the program of Megatron-Core's interleaved 1F1B.

    In warm-up and cool-down, a stage waits for each exchange. In the steady state with overlap_p2p_comm
    (`order.overlap`), it waits for a receive when a pass needs it, and for a send when it posts the next one. Without
    overlap, it also waits for each exchange there.
    """
    forward = [Pass(True, m, c) for m, c in order.turns()]
    backward = [Pass(False, m, order.chunks - 1 - c) for m, c in order.turns()]
    total, last_stage = len(forward), order.stages - 1
    warm_up = min(total, 2 * (last_stage - stage) + (order.chunks - 1) * order.group)
    sends, receives = partial(order.sent, stage), partial(order.received, stage)

    def next_receives(passes: Sequence[Pass], k: int) -> tuple[StageTransfer, ...]:
        """Return the receive of the input of `passes[k + 1]`, which the stage posts after `passes[k]`.
        Empty if there is no such pass, or if no edge carries its input."""
        return receives(passes[k + 1]) if k + 1 < total else ()

    items: list[Pass | Exchange] = [Exchange(receives=receives(forward[0]))]
    for k in range(warm_up):
        items += [forward[k], Exchange(sends(forward[k]), next_receives(forward, k))]
    items.append(Exchange(receives=receives(backward[0]), waits=()))  # the stage waits for it before backward[0]
    previous_sends: dict[bool, tuple[StageTransfer, ...]] = {True: (), False: ()}  # by direction
    for k in range(total - warm_up):
        if not order.overlap:
            f, b = forward[k + warm_up], backward[k]
            items += [
                Exchange(waits=receives(b)),
                f,
                b,
                Exchange(sends(f) + sends(b), next_receives(forward, k + warm_up) + next_receives(backward, k)),
            ]
            continue
        for passes, index in ((forward, k + warm_up), (backward, k)):
            p = passes[index]
            posted = Exchange(sends(p), next_receives(passes, index), waits=previous_sends[p.forward])
            items += [Exchange(waits=receives(p)), p, posted]
            previous_sends[p.forward] = sends(p)
    for k in range(total - warm_up, total):
        b = backward[k]
        items += [Exchange(waits=receives(b)), b, Exchange(sends(b), next_receives(backward, k))]
    return [item for item in items if item]


def in_flight(stages: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Return, per stage, the most passes that it holds under Megatron-Core's schedules: its warm-up and one more."""
    if chunks == 1:
        return tuple(min(micro_batches, stages - s) for s in range(stages))
    return tuple(min(micro_batches * chunks, 2 * (stages - s - 1) + (chunks - 1) * stages + 1) for s in range(stages))


SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("1f1b", "1F1B", (1, 1), in_flight, megatron=_one_forward_one_backward, waits=True),
        ScheduleKind("interleaved", "interleaved 1F1B", (2, None), in_flight, megatron=_interleaved),
        ScheduleKind("ahead", "eager 1F1B", (1, None), in_flight, deepens=True, per_stage=True),
        ScheduleKind("zero_bubble", "zero bubble", (1, 1), in_flight, deepens=True, splits=True),
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

    `requested`: a name; if that schedule needs more virtual stages, Megatron-Core's schedule replaces it. Or ``auto``:
    eager 1F1B, if stages may exchange in the `background`, then Megatron-Core's schedule.
    """
    megatron_name = megatron_kind(chunks).name
    if requested != "auto":
        return (requested if chunks >= schedule_kind(requested).chunks[0] else megatron_name,)
    eager = [kind.name for kind in SCHEDULES.values() if kind.deepens and not kind.splits] if background else []
    return (*eager, megatron_name)
