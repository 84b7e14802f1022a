"""Time breakdown of a training step into compute, waits and communication, and its timeline.

:class:`Breakdown` keeps a stack of nested parts, and counts time for the innermost part. Megatron-Core's schedules and
optimizers use it as their timers. Some waits occur inside other parts: a parameter gather before a layer's forward
pass, or the all-reduce of the gradient norm between stages. They are measured by wrapping the methods that wait. A CPU
run uses the host's clock. A CUDA run records a CUDA event whenever the part changes, and reads the events after the
step. Its times are therefore those of the device.

A :class:`Trace` writes trace/rank-N.jsonl. A line has step, stage and the fields of :class:`TraceEvent`, with
times in seconds since the epoch, and the keys of the simulated timeline. Only eager 1F1B has waits and transfers.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from holmes_hpc.planning.schedule.kinds import Pass
from holmes_hpc.records.files import append_line
from holmes_hpc.records.metrics import PARTS
from holmes_hpc.training.metrics.profiler import Ranges
from holmes_hpc.training.pipeline.eager_1f1b import TraceEvent

# Prefix of a Megatron-Core timer's name -> part of a step. The training loop measures forward-backward itself.
_TIMERS = (
    ("forward-compute", "compute_s"),
    ("backward-compute", "compute_s"),
    ("params-all-gather", "param_sync_s"),
    ("optimizer", "optimizer_s"),
)
_GRADIENTS = ("all-grads-sync", "all-reduce")


class Timer:
    """A timer with Megatron-Core's interface. If `on_stop` is set, it is called at each stop, with the start time."""

    def __init__(self, breakdown: "Breakdown", part: str | None, name: str) -> None:
        self._breakdown, self._part, self._name, self._start = breakdown, part, name, 0.0
        self.on_stop: Callable[[float], None] | None = None

    def start(self, barrier: bool = False) -> None:
        if self._part is not None:
            self._breakdown.enter(self._part, self._name)
        self._start = time.time()

    def stop(self, barrier: bool = False) -> None:
        if self._part is not None:
            self._breakdown.leave()
        if self.on_stop is not None:
            self.on_stop(self._start)


class Breakdown:
    """The time breakdown of one rank's steps. Time outside all parts counts as ``other_s``."""

    def __init__(self, cuda: bool = False) -> None:
        self._cuda, self._ranges = cuda, Ranges(cuda)
        self._stack = ["other_s"]
        self._last = time.perf_counter()
        self._spans: list[tuple[str, float]] = []  # (part, seconds) since the last step
        self._events: list[tuple[Any, str]] = []
        self._timers: dict[str, Timer] = {}  # Megatron-Core's, by name

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer called `name`, as Megatron-Core's interface requires."""
        default = "grad_sync_s" if any(pattern in name for pattern in _GRADIENTS) else None
        part = next((p for start, p in _TIMERS if name.startswith(start)), default)
        return self._timers.setdefault(name, Timer(self, part, name))

    def _switch(self, part: str) -> None:
        """Count the time since the last switch as `part`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((event, part))
            return
        now = time.perf_counter()
        self._spans.append((part, now - self._last))
        self._last = now

    def enter(self, part: str, name: str = "") -> None:
        """Start a part. `name`: its name in profiles; by default `part`."""
        self._switch(self._stack[-1])
        self._stack.append(part)
        self._ranges.push(name or part)

    def leave(self) -> None:
        self._ranges.pop()
        self._switch(self._stack.pop())

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def wrap(self, owner: Any, method: str, part: str) -> None:
        """Count the time in `owner.method` as `part`."""
        setattr(owner, method, self.part(part)(getattr(owner, method)))

    def begin(self) -> None:
        """Start measuring. Discard the time before this call."""
        self._events.clear()
        self._switch(self._stack[-1])
        self._spans.clear()

    def take(self) -> dict[str, float]:
        """Return part -> seconds since the last call or :meth:`begin`. They add up to the time that has passed.
        Exchanges of experts count as compute_s, and also as expert_s."""
        self._switch(self._stack[-1])
        if self._cuda:
            self._events[-1][0].synchronize()
            for (start, _), (end, part) in zip(self._events, self._events[1:]):  # noqa: B905 (pairs of neighbours)
                self._spans.append((part, start.elapsed_time(end) / 1000))
            del self._events[:-1]
        spans, self._spans = self._spans, []
        computing = [i for i, (part, _) in enumerate(spans) if part == "compute_s"] or [0]
        totals = dict.fromkeys(PARTS, 0.0)
        for i, (part, seconds) in enumerate(spans):
            is_fill_or_drain = part == "pipeline_wait_s" and not computing[0] < i < computing[-1]
            if part == "expert_s":
                totals[part] = totals.get(part, 0.0) + seconds
                part = "compute_s"
            totals["fill_drain_s" if is_fill_or_drain else part] += seconds
        return totals


class Trace:
    """The events of one rank's step, written to trace/rank-N.jsonl after the step."""

    def __init__(self, path: Path, stage: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._stage = path, stage
        self._events: list[TraceEvent] = []
        self._lock = threading.Lock()  # transfers end on threads of their own

    def __call__(self, event: TraceEvent) -> None:
        with self._lock:
            self._events.append(event)

    def write(self, step: int) -> None:
        """Write the events since the last call as those of `step`. Raise RunFailed if the disk is full."""
        rounded = (e._replace(start_s=round(e.start_s, 6), end_s=round(e.end_s, 6)) for e in self._take())
        lines = [json.dumps({"step": step, "stage": self._stage, **event._asdict()}) for event in rounded]
        if lines:
            append_line(self._path, "\n".join(lines))

    def discard(self) -> None:
        """Drop the events since the last call, because they belong to no step."""
        self._take()

    def _take(self) -> list[TraceEvent]:
        with self._lock:
            events, self._events = self._events, []
        return sorted(events, key=lambda event: event.start_s)


def trace_timers(breakdown: Breakdown, trace: Trace, passes: Sequence[Pass]) -> None:
    """Add an event to `trace` whenever a forward-compute or backward-compute timer of `breakdown` stops. `passes`: the
    passes of this stage in a step, in order, because Megatron-Core's schedules do not name a timer's micro-batch."""
    numbers, held_passes = count(), 0

    def add_event(start: float) -> None:
        nonlocal held_passes
        if not torch.is_grad_enabled():
            return  # validation
        current = passes[next(numbers) % len(passes)]
        held_passes += current.forward
        kind = "forward" if current.forward else "backward"
        trace(TraceEvent(kind, current.micro_batch, current.chunk, start, time.time(), held_passes))
        held_passes -= not current.forward

    for name in ("forward-compute", "backward-compute"):
        breakdown(name).on_stop = add_event
