"""trace/rank-N.jsonl: when this rank computed each micro-batch, when its tensors crossed, and what it waited for.

One line an event, with step, stage, kind, micro_batch, chunk, start_s, end_s (seconds since the epoch) and held (passes
whose activations the stage held). The planner's simulated timeline has the same keys. Kinds: forward and backward
(computing); under the schedule that runs ahead also wait_forward and wait_backward (blocked by an edge), and
send_forward, receive_forward, send_backward, receive_backward (from being posted to having left or arrived).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from holmes_hpc.planning.schedule.kinds import Pass
from holmes_hpc.records.files import append_line
from holmes_hpc.training.pipeline.run_ahead import TraceEvent


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
                    "held": event.held,
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


class TracedTimers:
    """Megatron-Core's timers, whose forward-compute and backward-compute also tell a trace. For its own schedules,
    which name no micro-batch: `passes` is what this stage computes in a step, in order."""

    def __init__(self, timers: Any, trace: Trace, passes: Iterable[Pass]) -> None:
        self._timers, self._trace, self._passes = timers, trace, list(passes)
        self._computing = {
            name: _TracedTimer(timers(name), self._computed) for name in ("forward-compute", "backward-compute")
        }
        self._at = self._held = 0

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return self._computing.get(name) or self._timers(name, log_level)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timers, name)

    def _computed(self, start: float) -> None:
        if not torch.is_grad_enabled():
            return  # validation
        done = self._passes[self._at % len(self._passes)]
        self._at += 1
        self._held += done.forward
        kind = "forward" if done.forward else "backward"
        self._trace(TraceEvent(kind, done.micro_batch, done.chunk, start, time.time(), self._held))
        self._held -= not done.forward


class _TracedTimer:
    def __init__(self, timer: Any, computed: Callable[[float], None]) -> None:
        self._timer, self._computed = timer, computed
        self._start = 0.0

    def start(self, barrier: bool = False) -> None:
        self._timer.start(barrier)
        self._start = time.time()

    def stop(self, barrier: bool = False) -> None:
        self._timer.stop(barrier)
        self._computed(self._start)
