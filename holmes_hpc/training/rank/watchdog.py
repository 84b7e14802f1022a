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
from holmes_hpc.planning.cost.flops import head_flops, layer_flops
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.training.rank.failure import Exits, say

SILENCE_S = 100.0  # so that there is a line at least every two minutes
LONG = 10.0  # times the limit of a step: set-up, and saving to a slow disk
SLOW = 1.3  # times the median of its stage
SLOW_STAGE = 1.5  # times what a layer takes elsewhere: a stage's share of the work is known less well


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

    `speaks`: this rank says a line when nothing was said for a while. :meth:`alive` is called before whatever comes
    next; until it is, the limit is ten times as long, for set-up loads data and connects.
    """

    def __init__(self, exits: Exits, limit_s: float, speaks: bool,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._exits, self._limit_s, self._speaks, self._clock = exits, limit_s, speaks, clock
        self._doing, self._since, self._said = "set-up", clock(), clock()
        self._factor = LONG
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def alive(self, doing: str, factor: float = 1.0) -> None:
        """This rank goes on: now it does `doing`, which may take `factor` times as long as a step."""
        self._doing, self._since, self._factor = doing, self._clock(), factor

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
                    hint="every rank's log holds its stacks: the one that is not in a collective is the cause"),
                    hung=True)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


class Stragglers:
    """Compares how long ranks compute, over `every` steps: those of a stage, which do the same work; and, where nobody
    else has a stage's layers (DP 1), stages with GPUs alike, each by its `work` (see :func:`work_of_stages`).

    `stages`: their ranks; `nodes`: of every rank; `alike`: what the ranks of each stage compute with.
    """

    def __init__(self, stages: Sequence[Sequence[int]], nodes: Sequence[str], work: Sequence[float] = (),
                 alike: Sequence[Any] = (), every: int = 20) -> None:
        self._stages, self._nodes, self._work, self._alike, self._every = stages, nodes, work, alike, every
        self._seen: list[Sequence[float]] = []

    def step(self, compute_s: Sequence[float]) -> list[str]:
        """Take one step's computing seconds of every rank; lines about slow ones come back every so many steps."""
        self._seen.append(compute_s)
        if len(self._seen) < self._every:
            return []
        times = [statistics.median(step[rank] for step in self._seen) for rank in range(len(compute_s))]
        self._seen.clear()
        lines = []
        for number, ranks in enumerate(self._stages):
            middle = statistics.median_low([times[r] for r in ranks])
            for rank in ranks:
                if len(ranks) > 1 and middle > 0 and times[rank] > SLOW * middle:
                    lines.append(self._line(rank, times, times[rank] / middle, f"as the others of stage {number}"))
        return lines + self._between_stages(times)

    def _between_stages(self, times: Sequence[float]) -> list[str]:
        lines = []
        pace = [statistics.median_low([times[r] for r in self._stages[s]]) / work for s, work in enumerate(self._work)]
        for number, own in enumerate(pace):
            middle = statistics.median_low([p for p, gpu in zip(pace, self._alike, strict=True)
                                            if gpu == self._alike[number]])
            if middle > 0 and own > SLOW_STAGE * middle:
                lines.append(self._line(self._stages[number][0], times, own / middle,
                                        f"for a layer of stage {number} as the other stages' nodes"))
        return lines

    def _line(self, rank: int, times: Sequence[float], ratio: float, than: str) -> str:
        return (f"warning: node {self._nodes[rank]}: rank {rank} computes {ratio:.2f} times as long {than} "
                f"({times[rank] * 1000:.0f} ms a step); look for other processes, heat or a failing device there")


def work_of_stages(plan: Plan, paced: bool) -> tuple[list[float], list[Any]]:
    """For :class:`Stragglers`: every stage's work in layers (the last one's head as many as its FLOPs are worth; a pace
    is kept by layers alone), and its GPU. Nothing where every stage has ranks to compare among themselves."""
    if plan.parallel.dp > 1 or min(stage.layers for stage in plan.stages) < 1:
        return [], []
    length, fabrics = plan.batch.sequence_length, {f.name: f for f in plan.site.fabrics}
    work = [float(stage.layers) for stage in plan.stages]
    if not paced:
        work[-1] += head_flops(plan.model, length) / layer_flops(plan.model, length, length)
    return work, [fabrics[stage.fabric].gpu for stage in plan.stages]
