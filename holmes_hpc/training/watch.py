"""Looking after a running rank: a line now and then, a hang found and shown, and the slow node named."""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from holmes_hpc.errors import RunFailed
from holmes_hpc.training.output import Exits, say

SILENCE_S = 100.0  # so that there is a line at least every two minutes
SLOW = 1.3  # times the median of its stage


def dump_stacks(file: Any = None) -> None:
    """Every thread's stack into the log, and on NCCL what the communicators were last doing (its flight recorder)."""
    target = file or sys.stderr
    print("stacks of all threads:", file=target, flush=True)
    faulthandler.dump_traceback(file=target, all_threads=True)
    recorder = _flight_recorder()
    if recorder:
        print(f"pending collectives: {recorder}", file=target, flush=True)


def _flight_recorder() -> str:
    """The entries of NCCL's flight recorder that have not completed."""
    try:
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined, unused-ignore]

        entries = json.loads(_dump_nccl_trace_json(includeCollectives=True, onlyActive=True)).get("entries", [])
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return ""
    return "; ".join(f"{e.get('profiling_name')} on {e.get('process_group')}, {e.get('state')}" for e in entries[-20:])


class Watchdog:
    """A thread that ends a rank whose step takes longer than `limit_s`, after every rank has shown where it stands.

    `speaks`: this rank says a line when nothing was said for a while. :meth:`alive` is called at every step's end, with
    what comes next; before that the limit is ten times as long, for set-up loads data and connects.
    """

    def __init__(self, exits: Exits, limit_s: float, speaks: bool,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._exits, self._limit_s, self._speaks, self._clock = exits, limit_s, speaks, clock
        self._doing, self._since, self._said = "set-up", clock(), clock()
        self._factor = 10.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def alive(self, doing: str) -> None:
        """This rank goes on: now it does `doing`."""
        self._doing, self._since, self._factor = doing, self._clock(), 1.0

    def said(self) -> None:
        """This rank has just written a line."""
        self._said = self._clock()

    def stop(self) -> None:
        self._stop.set()

    def hung(self) -> str | None:
        """What has been going on for too long, None when nothing has."""
        elapsed = self._clock() - self._since
        return f"{self._doing} takes longer than {self._limit_s * self._factor:.0f} s" \
            if elapsed > self._limit_s * self._factor else None

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            now = self._clock()
            if self._speaks and now - self._said > SILENCE_S:
                self._said = now
                say(f"still at {self._doing}, for {now - self._since:.0f} s")
            what = self.hung()
            if what is not None:
                dump_stacks()
                code = self._exits.failed(RunFailed(
                    what, where=f"rank {self._exits.rank} on {self._exits.node}",
                    cure="every rank's log holds its stacks: the one that is not in a collective is the cause"),
                    hung=True)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


class Stragglers:
    """Compares how long the ranks of a stage compute, over `every` steps; ranks of a stage do the same work."""

    def __init__(self, stages: Sequence[Sequence[int]], nodes: Sequence[str], every: int = 20) -> None:
        self._stages, self._nodes, self._every = stages, nodes, every
        self._seen: list[Sequence[float]] = []

    def step(self, compute_s: Sequence[float]) -> list[str]:
        """Take one step's computing seconds of every rank; lines about slow ones come back every so many steps."""
        self._seen.append(compute_s)
        if len(self._seen) < self._every:
            return []
        means = [statistics.median(step[rank] for step in self._seen) for rank in range(len(compute_s))]
        self._seen.clear()
        lines = []
        for number, ranks in enumerate(self._stages):
            middle = statistics.median_low([means[r] for r in ranks])
            for rank in ranks:
                if len(ranks) > 1 and middle > 0 and means[rank] > SLOW * middle:
                    lines.append(f"warning: node {self._nodes[rank]}: rank {rank} computes {means[rank] / middle:.2f} "
                                 f"times as long as the others of stage {number} ({means[rank] * 1000:.0f} ms a step); "
                                 "look for other processes, heat or a failing device there")
        return lines
