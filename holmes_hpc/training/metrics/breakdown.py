"""Where the time of a training step goes: computing, waiting, communicating. The parts add up to the step.

:class:`Breakdown` is a stack of parts; the innermost one's clock runs. Megatron-Core's schedules and optimizers report
to it as to their timers; waits that hide inside other parts (a parameter gather before a layer's forward pass, the
norm's all-reduce between stages) are found by wrapping the methods that wait. On a CPU the clock is the host's; on CUDA
an event is recorded at every change and read once the step is over, so the parts are those of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holmes_hpc.records.metrics import PARTS

# The names of Megatron-Core's timers, by how they begin. forward-backward is the loop's own span.
_TIMERS = (
    ("forward-compute", "compute_s"),
    ("backward-compute", "compute_s"),
    ("params-all-gather", "param_sync_s"),
    ("optimizer", "optimizer_s"),
)
_GRADIENTS = ("all-grads-sync", "all-reduce")


class _Timer:
    """What Megatron-Core expects of one of its timers."""

    def __init__(self, breakdown: Breakdown, part: str | None) -> None:
        self._breakdown, self._part = breakdown, part

    def start(self, barrier: bool = False) -> None:
        if self._part is not None:
            self._breakdown.enter(self._part)

    def stop(self, barrier: bool = False) -> None:
        if self._part is not None:
            self._breakdown.leave()


class Breakdown:
    """The parts of one rank's steps. Outside of all parts time counts as ``other_s``."""

    def __init__(self, cuda: bool = False) -> None:
        self._cuda = cuda
        self._stack = ["other_s"]
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()
        self._events: list[tuple[Any, str]] = []
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Megatron-Core's interface: the timer called `name`."""
        timer = self._timers.get(name)
        if timer is None:
            part = next((p for start, p in _TIMERS if name.startswith(start)), None)
            if part is None and any(word in name for word in _GRADIENTS):
                part = "grad_sync_s"
            timer = self._timers[name] = _Timer(self, part)
        return timer

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
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, method, timed)

    def begin(self) -> None:
        """Start counting: what was before does not count."""
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._events.clear()
        self._switch(self._stack[-1])
        self._totals = dict.fromkeys(PARTS, 0.0)

    def take(self) -> dict[str, float]:
        """Seconds per part since the last call (or :meth:`begin`); they add up to the time between the two calls."""
        self._switch(self._stack[-1])
        if self._cuda:
            self._resolve()
        taken, self._totals = self._totals, dict.fromkeys(PARTS, 0.0)
        return taken

    def _resolve(self) -> None:
        self._events[-1][0].synchronize()
        for (before, _), (after, part) in zip(self._events, self._events[1:]):  # noqa: B905 (pairs of neighbours)
            self._totals[part] += before.elapsed_time(after) / 1000
        del self._events[:-1]
