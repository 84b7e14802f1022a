"""Watching over a running rank: it says a line now and then, and ends with the stacks of its threads when it hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from holmes_hpc.errors import RunFailed
from holmes_hpc.training.rank.failure import RankExit
from holmes_hpc.training.rank.log import say

SILENCE_S = 100.0  # so that there is a line at least every two minutes
QUIET_SET_UP_S = 8.0  # and until the first step's within 10 s: of what is slow there nobody else knows
LONG = 10.0  # times the limit of a step: set-up, and saving to a slow disk


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
    next; in set-up, which loads data and connects, the limit is ten times as long.
    """

    def __init__(
        self, rank_exit: RankExit, limit_s: float, speaks: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exit, self._limit_s, self._speaks, self._clock = rank_exit, limit_s, speaks, clock
        self._doing, self._since, self._said = "set-up", clock(), clock()
        self._factor, self._silence_s = LONG, QUIET_SET_UP_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def alive(self, doing: str, factor: float = 1.0) -> None:
        """This rank goes on: now it does `doing`, which may take `factor` times as long as a step."""
        self._doing, self._since, self._factor = doing, self._clock(), factor

    def setting_up(self, phase: str) -> None:
        """This rank goes on with a part of its set-up."""
        self.alive(phase, LONG)

    def said(self) -> None:
        """This rank has just written a step's line."""
        self._said, self._silence_s = self._clock(), SILENCE_S

    def hung(self) -> str | None:
        """What has been going on for too long, None when nothing has."""
        limit_s = self._limit_s * self._factor
        return f"{self._doing} takes longer than {limit_s:.0f} s" if self._clock() - self._since > limit_s else None

    def tell(self) -> None:
        """Say what goes on, where nothing was said for too long."""
        now = self._clock()
        if self._speaks and now - self._said > self._silence_s:
            self._said = now
            since = f"{now - self._since:.0f}"
            say(f"still at {self._doing}, for {since} s" if since != "0" else f"now at {self._doing}")

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            self.tell()
            what = self.hung()
            if what is not None:
                dump_stacks()
                code = self._exit.failed(
                    RunFailed(
                        what,
                        where=f"rank {self._exit.rank} on {self._exit.node}",
                        hint="every rank's log holds its stacks: the one that is not in a collective is the cause",
                    ),
                    hung=True,
                )
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
