"""How a rank that fails or hangs ends: its exit record, what it tells the other ranks, and what they report when
another one is killed, hangs or loses its connection."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError

from holmes_hpc.errors import HolmesError, RunFailed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.log import one_line, say

_FAILED = "holmes/failed"
POLL_S = 1.0
_ANSWER_S = 2.0  # to tell the store, which may be behind the very network that failed
_TIMED_OUT = re.compile(r"timed out waiting \d+ ?ms|application timeout", re.IGNORECASE)  # gloo's words
SILENCE_S = 100.0  # so that there is a line at least every two minutes
QUIET_SET_UP_S = 8.0  # and until the first step's within 10 s: of what is slow there nobody else knows
LONG = 10.0  # times the limit of a step: set-up, and saving to a slow disk


def end_process(code: int) -> None:
    """End this process from a thread: the main one may be inside a collective that never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _echo(failure: dict[str, Any]) -> str:
    """Return what a rank logs that ends because another one failed."""
    return f"Connection lost: rank {failure['rank']} on {failure['node']} failed: {failure['error']}"


def _store_gone(error: Exception) -> dict[str, Any]:
    """Return the failure of rank 0, which holds the store, where the store answers no more."""
    return {"rank": 0, "node": "its node", "error": f"its store is gone ({one_line(error)[:120]})", "code": 1}


class RankExit:
    """How this rank ends, for the record and for the other ranks.

    A rank that fails tells the store; the others, who may be waiting for it in a collective, hear of it by a thread
    that looks there, and end with the same exit code instead of running into a time-out. A cause outside the ranks (a
    NIC) can be watched for in the same way.
    """

    def __init__(self, run: RunDirectory, launch: Launch) -> None:
        self._run, self._launch = run, launch
        self.rank, self.node = launch.rank, launch.node
        self.attempt = 0  # until it is known
        self._store: Any = None
        self._stop = threading.Event()
        self._once = threading.Lock()
        self._look_for_cause: Callable[[], HolmesError | None] | None = None

    def watch(self, store: Any, every_s: float = POLL_S) -> None:
        """Listen for the others' failures from now on. `store`: of this thread's own (a clone)."""
        self._store = store
        threading.Thread(target=self._look, args=(every_s,), name="failures of other ranks", daemon=True).start()

    def guard(self, look: Callable[[], HolmesError | None], every_s: float = 1.0) -> None:
        """From now on `look` for a cause to end, and end with it; it also explains errors that come from below."""
        self._look_for_cause = look
        threading.Thread(target=self._guard, args=(look, every_s), name="guard", daemon=True).start()

    def _guard(self, look: Callable[[], HolmesError | None], every_s: float) -> None:
        while not self._stop.wait(every_s):
            if (error := look()) is not None:
                self._end(one_line(error), error.exit_code, cause=error)

    def _look(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                failure = self._told()
            except Exception as e:
                if self._stop.is_set():
                    return
                failure = _store_gone(e)
            if failure is not None and failure["rank"] != self._launch.rank:
                time.sleep(0.5)  # should this rank be failing by itself, let it report that
                self._end(_echo(failure), int(failure["code"]), hung=bool(failure.get("hung")))

    def _told(self) -> dict[str, Any] | None:
        """Return what a rank has told the store of its failure."""
        return json.loads(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None

    def _end(self, line: str, code: int, *, cause: HolmesError | None = None, hung: bool = False) -> None:
        """End this process from a thread, unless it is ending already. `cause`: what the other ranks are to hear."""
        if self._stop.is_set() or not self._once.acquire(blocking=False):
            return
        if hung:
            dump_stacks()
        self._report(line, cause)
        end_process(code)

    def _report(self, line: str, own: BaseException | None, hung: bool = False) -> None:
        """Log and record a failure, and tell the others where it is this rank's `own`."""
        if own is not None:
            self._tell(own, hung)
        say(line if own is None else f"failed: {line}")
        if own is not None and not isinstance(own, HolmesError):
            traceback.print_exception(own)
        self._write("failed", line)
        if (self.rank == 0 or hung) and self._store is not None and self._launch.world_size > 1:
            # Rank 0 holds the store: were it gone at once, the others would take its end for the cause. And of a hang
            # all are to show where they stand before a connection breaks.
            time.sleep(2 * POLL_S)

    def _tell(self, error: BaseException, hung: bool = False) -> None:
        """Tell the other ranks, where no failure has been told yet, if the store answers soon."""

        def tell() -> None:
            with contextlib.suppress(Exception):
                if not self._store.check([_FAILED]):
                    self._store.set(
                        _FAILED,
                        json.dumps(
                            {
                                "rank": self._launch.rank,
                                "node": self._launch.node,
                                "error": one_line(error)[:400],
                                "code": error.exit_code if isinstance(error, HolmesError) else 1,
                                "hung": hung,
                            }
                        ),
                    )

        if self._store is not None:
            teller = threading.Thread(target=tell, name="tell of the failure", daemon=True)
            teller.start()
            teller.join(_ANSWER_S)

    def _failure_of_another(self, error: RuntimeError) -> dict[str, Any] | None:
        """What another rank says of its failure, if it and the store do so soon; that rank 0 is gone, where `error` is
        of the store and it answers no more."""
        failures: list[dict[str, Any] | None] = []
        end = time.monotonic() + _ANSWER_S

        def ask() -> None:
            try:
                while (failure := self._told()) is None and time.monotonic() < end:
                    time.sleep(0.1)
            except Exception as e:
                failure = _store_gone(e) if isinstance(error, DistError) else None
            failures.append(failure)

        if self._store is not None:
            asker = threading.Thread(target=ask, name="failure of another rank", daemon=True)
            asker.start()
            asker.join(_ANSWER_S + 0.5)
        return next((failure for failure in failures if failure and failure["rank"] != self._launch.rank), None)

    def _explained(self, error: BaseException) -> BaseException:
        """What is behind an error from below: a NIC that is down breaks connections before the guard has seen it."""
        if self._look_for_cause is not None and not isinstance(error, HolmesError):
            for pause_s in (0.0, 1.0):
                time.sleep(pause_s)
                if (cause := self._look_for_cause()) is not None:
                    return cause
        return error

    def ended(self, state: str, **more: Any) -> None:
        """Record a good end: completed or preempted."""
        self._stop.set()
        with self._once:
            self._write(state, None, **more)

    def failed(self, error: BaseException, hung: bool = False) -> int:
        """Record a failure, tell the others (`hung`: they show their stacks too); the exit code comes back."""
        error = self._explained(error)
        # what torch raised where the error came from below: a connection that broke, a collective that timed out
        below = next((e for e in (error, error.__cause__) if isinstance(e, RuntimeError)), None)
        failure = None
        if below is not None and _TIMED_OUT.search(one_line(below)):
            self._show(below)
            hung = True
            error = RunFailed(
                f"another rank gave no answer within train.net_timeout_s ({one_line(below)[:200]})",
                where=f"rank {self.rank} on {self.node}",
                hint="every rank's log holds its stacks: the one that is not in a collective is the cause; "
                "was it only slow, raise train.net_timeout_s",
            )
        elif below is not None:
            failure = self._failure_of_another(below)
        if failure is not None and not failure.get("hung") and isinstance(error, HolmesError):
            failure = None  # this rank knows better
        if not self._once.acquire(blocking=False):
            time.sleep(5)  # the other thread is ending this process
        self._stop.set()
        if failure is not None:  # a connection that broke because the rank at its other end failed
            if failure.get("hung") and below is not None:
                self._show(below)
            self._report(_echo(failure), None)
            return int(failure["code"])
        self._report(one_line(error), error, hung)
        return error.exit_code if isinstance(error, HolmesError) else 1

    def _show(self, error: RuntimeError) -> None:
        traceback.print_exception(error)
        dump_stacks()

    def _write(self, state: str, error: str | None, **more: Any) -> None:
        attempt = {"attempt": self.attempt} if self.attempt else {}
        with contextlib.suppress(HolmesError, OSError):
            self._run.write_exit(self._launch.rank, state, error, self._launch.node, **more, **attempt)


def dump_stacks() -> None:
    """Write every thread's stack into the log, and on NCCL what the communicators were last doing (its flight
    recorder)."""
    print("stacks of all threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    if recorder := _flight_recorder():
        print(f"pending collectives: {recorder}", file=sys.stderr, flush=True)


def _flight_recorder() -> str:
    """Return the entries of NCCL's flight recorder that have not completed."""
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
        """Note that this rank goes on: now it does `doing`, which may take `factor` times as long as a step."""
        self._doing, self._since, self._factor = doing, self._clock(), factor

    def setting_up(self, phase: str) -> None:
        """Note that this rank goes on with a part of its set-up."""
        self.alive(phase, LONG)

    def said(self) -> None:
        """Note that this rank has just written a step's line."""
        self._said, self._silence_s = self._clock(), SILENCE_S

    def hung(self) -> str | None:
        """Return what has been going on for too long, None when nothing has."""
        limit_s = self._limit_s * self._factor
        return f"{self._doing} takes longer than {limit_s:.0f} s" if self._clock() - self._since > limit_s else None

    def tell(self) -> None:
        """Log what goes on, where nothing was logged for too long."""
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
                end_process(code)
