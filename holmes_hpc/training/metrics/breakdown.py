"""Where the time of a training step goes: computing, waiting, communicating. The parts add up to the step.

:class:`Breakdown` is a stack of parts; the innermost one's clock runs. Megatron-Core's schedules and optimizers report
to it as to their timers; waits that hide inside other parts (a parameter gather before a layer's forward pass, the
norm's all-reduce between stages) are found by wrapping the methods that wait. On a CPU the clock is the host's; on CUDA
an event is recorded at every change and read once the step is over, so the parts are those of the device.

A :class:`Trace` writes trace/rank-N.jsonl: when this rank computed each micro-batch, when its tensors crossed, and what
it waited for. A line is one event, with step, stage, kind, micro_batch, chunk, start_s, end_s (seconds since the epoch)
and held (passes whose activations the stage held). The planner's simulated timeline has the same keys. Kinds: forward
and backward (computing); under the schedule that runs ahead also wait_forward and wait_backward (blocked by an edge),
and send_forward, receive_forward, send_backward, receive_backward (from being posted to having left or arrived).
"""

from __future__ import annotations

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
from holmes_hpc.training.pipeline.eager_1f1b import TraceEvent

# The names of Megatron-Core's timers, by how they begin. forward-backward is the loop's own span.
_TIMERS = (
    ("forward-compute", "compute_s"),
    ("backward-compute", "compute_s"),
    ("params-all-gather", "param_sync_s"),
    ("optimizer", "optimizer_s"),
)
_GRADIENTS = ("all-grads-sync", "all-reduce")


class Timer:
    """What Megatron-Core expects of one of its timers. `watch`, when set, is told when a span began that ends now."""

    def __init__(self, breakdown: Breakdown, part: str | None) -> None:
        self._breakdown, self._part, self._began = breakdown, part, 0.0
        self.watch: Callable[[float], None] | None = None

    def start(self, barrier: bool = False) -> None:
        if self._part is not None:
            self._breakdown.enter(self._part)
        self._began = time.time()

    def stop(self, barrier: bool = False) -> None:
        if self._part is not None:
            self._breakdown.leave()
        if self.watch is not None:
            self.watch(self._began)


class Breakdown:
    """The parts of one rank's steps. Outside of all parts time counts as ``other_s``."""

    def __init__(self, cuda: bool = False) -> None:
        self._cuda = cuda
        self._stack = ["other_s"]
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()
        self._events: list[tuple[Any, str]] = []
        self._timers: dict[str, Timer] = {}  # Megatron-Core's, by name

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Megatron-Core's interface: the timer called `name`."""
        reduces = "grad_sync_s" if any(word in name for word in _GRADIENTS) else None
        part = next((p for start, p in _TIMERS if name.startswith(start)), reduces)
        return self._timers.setdefault(name, Timer(self, part))

    def _switch(self, part: str) -> None:
        """The time since the last switch belongs to `part`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((event, part))
            return
        now = time.perf_counter()
        self._totals[part] += now - self._last
        self._last = now

    def enter(self, part: str) -> None:
        self._switch(self._stack[-1])
        self._stack.append(part)

    def leave(self) -> None:
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
        """Start counting: what was before does not count."""
        self._events.clear()
        self._switch(self._stack[-1])
        self._totals = dict.fromkeys(PARTS, 0.0)

    def take(self) -> dict[str, float]:
        """Seconds per part since the last call (or :meth:`begin`); they add up to the time between the two calls."""
        self._switch(self._stack[-1])
        if self._cuda:
            self._events[-1][0].synchronize()
            for (before, _), (after, part) in zip(self._events, self._events[1:]):  # noqa: B905 (pairs of neighbours)
                self._totals[part] += before.elapsed_time(after) / 1000
            del self._events[:-1]
        taken, self._totals = self._totals, dict.fromkeys(PARTS, 0.0)
        return taken


class Trace:
    """Collects one rank's events of a step, and writes them when it is over."""

    def __init__(self, path: Path, stage: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._stage = path, stage
        self._events: list[TraceEvent] = []
        self._lock = threading.Lock()  # transfers end on threads of their own

    def __call__(self, event: TraceEvent) -> None:
        with self._lock:
            self._events.append(event)

    def write(self, step: int) -> None:
        """Write what happened since the last call as step `step`. RunFailed when the disk is full."""
        lines = [
            json.dumps(
                {
                    "step": step,
                    "stage": self._stage,
                    "kind": event.kind,
                    "micro_batch": event.micro_batch,
                    "chunk": event.chunk,
                    "start_s": round(event.start, 6),
                    "end_s": round(event.end, 6),
                    "held": event.in_flight,
                }
            )
            for event in self._take()
        ]
        if lines:
            append_line(self._path, "\n".join(lines))

    def forget(self) -> None:
        """Drop what happened since the last call: it was no step."""
        self._take()

    def _take(self) -> list[TraceEvent]:
        with self._lock:
            taken, self._events = self._events, []
        return sorted(taken, key=lambda event: event.start)


def trace_timers(breakdown: Breakdown, trace: Trace, passes: Sequence[Pass]) -> None:
    """Make Megatron-Core's timers forward-compute and backward-compute of `breakdown` report to `trace` as well.

    For Megatron-Core's own schedules, which name no micro-batch: `passes` is what this stage computes in a step, in
    order.
    """
    number, held = count(), 0

    def computed(start: float) -> None:
        nonlocal held
        if not torch.is_grad_enabled():
            return  # validation
        done = passes[next(number) % len(passes)]
        held += done.forward
        kind = "forward" if done.forward else "backward"
        trace(TraceEvent(kind, done.micro_batch, done.chunk, start, time.time(), held))
        held -= not done.forward

    for name in ("forward-compute", "backward-compute"):
        breakdown(name).watch = computed
