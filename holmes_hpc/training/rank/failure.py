"""How a rank that fails ends: its exit record, what it tells the other ranks, and what they say when another one is
killed, hangs or loses its connection."""

from __future__ import annotations

import contextlib
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


def _exit(code: int) -> None:
    """End this process from a thread: the main one may be inside a collective that never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _echo(failure: dict[str, Any]) -> str:
    """What a rank says that ends because another one failed."""
    return f"Connection lost: rank {failure['rank']} on {failure['node']} failed: {failure['error']}"


def _store_gone(error: Exception) -> dict[str, Any]:
    """The failure of rank 0, which holds the store, where the store answers no more."""
    return {"rank": 0, "node": "its node", "error": f"its store is gone ({one_line(error)[:120]})", "code": 1}


def _broken(error: BaseException) -> RuntimeError | None:
    """What torch raised where `error` came from below: a connection that broke, a collective that timed out."""
    return next((e for e in (error, error.__cause__) if isinstance(e, RuntimeError)), None)


class RankExit:
    """How this rank ends, for the record and for the other ranks.

    A rank that fails tells the store; the others, who may be waiting for it in a collective, hear of it by a thread
    that looks there, and end with the same exit code instead of running into a time-out. A cause outside the ranks (a
    NIC) can be watched for in the same way.
    """

    def __init__(self, run: RunDirectory, launch: Launch) -> None:
        self._run, self._launch = run, launch
        self.rank, self.node = launch.rank, launch.node
        self.before_exit: Callable[[], None] | None = None  # what to show when another rank's hang ends this one
        self.attempt: int | None = None
        self._store: Any = None
        self._stop = threading.Event()
        self._once = threading.Lock()
        self._thread: threading.Thread | None = None
        self._look_for_cause: Callable[[], HolmesError | None] | None = None

    def watch(self, store: Any, every_s: float = POLL_S) -> None:
        """From now on hear of the others' failures. `store`: of this thread's own (a clone)."""
        self._store = store
        self._thread = threading.Thread(target=self._look, args=(every_s,), name="failures of other ranks", daemon=True)
        self._thread.start()

    def guard(self, look: Callable[[], HolmesError | None], every_s: float = 1.0) -> None:
        """From now on `look` for a cause to end, and end with it; it also explains errors that come from below."""
        self._look_for_cause = look
        threading.Thread(target=self._guard, args=(look, every_s), name="guard", daemon=True).start()

    def _guard(self, look: Callable[[], HolmesError | None], every_s: float) -> None:
        while not self._stop.wait(every_s):
            if (error := look()) is not None:
                self._end(error)

    def _look(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            try:
                failure = self._told()
            except Exception as e:
                if self._stop.is_set():
                    return
                failure = _store_gone(e)
            if failure is not None and failure["rank"] != self._launch.rank:
                self._follow(failure)

    def _told(self) -> dict[str, Any] | None:
        """What a rank has told the store of its failure."""
        told: dict[str, Any] | None = json.loads(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None
        return told

    def _follow(self, failure: dict[str, Any]) -> None:
        time.sleep(0.5)  # should this rank be failing by itself, let it say so
        if self._stop.is_set() or not self._once.acquire(blocking=False):
            return
        if failure.get("hung") and self.before_exit is not None:
            self.before_exit()
        say(_echo(failure))
        self._write("failed", _echo(failure))
        self._let_others_hear()
        _exit(int(failure["code"]))

    def _end(self, error: HolmesError) -> None:
        if self._stop.is_set() or not self._once.acquire(blocking=False):
            return
        say(f"failed: {one_line(error)}")
        self._write("failed", one_line(error))
        self._tell(error)
        self._let_others_hear()
        _exit(error.exit_code)

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
        failures: list[dict[str, Any]] = []
        end = time.monotonic() + _ANSWER_S

        def ask() -> None:
            try:
                while (failure := self._told()) is None and time.monotonic() < end:
                    time.sleep(0.1)
                failures.extend([failure] if failure is not None else [])
            except Exception as e:
                if isinstance(error, DistError):
                    failures.append(_store_gone(e))

        if self._store is not None:
            asker = threading.Thread(target=ask, name="failure of another rank", daemon=True)
            asker.start()
            asker.join(_ANSWER_S + 0.5)
        return next((failure for failure in failures if failure["rank"] != self._launch.rank), None)

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
        below = _broken(error)
        hang = self._as_hang(below) if below is not None else None
        if hang is not None:
            error, hung = hang, True
        failure = self._failure_of_another(below) if below is not None and hang is None else None
        if failure is not None and not failure.get("hung") and isinstance(error, HolmesError):
            failure = None  # this rank knows better
        if not self._once.acquire(blocking=False):
            time.sleep(5)  # the other thread is ending this process
        self._stop.set()
        if failure is not None:  # a connection that broke because the rank at its other end failed
            code, line = int(failure["code"]), _echo(failure)
            if failure.get("hung") and below is not None:
                self._show(below)
            say(line)
        else:
            code, line = error.exit_code if isinstance(error, HolmesError) else 1, one_line(error)
            self._tell(error, hung)
            say(f"failed: {line}")
            if not isinstance(error, HolmesError):
                traceback.print_exception(error)
        self._write("failed", line)
        self._let_others_hear(hung)
        return code

    def _as_hang(self, error: RuntimeError) -> RunFailed | None:
        """A collective that ran into its time-out, after this rank has shown where it stands; else None."""
        text = one_line(error)
        if not _TIMED_OUT.search(text):
            return None
        self._show(error)
        return RunFailed(
            f"another rank gave no answer within train.net_timeout_s ({text[:200]})",
            where=f"rank {self.rank} on {self.node}",
            hint="every rank's log holds its stacks: the one that is not in a collective is the cause; "
            "was it only slow, raise train.net_timeout_s",
        )

    def _show(self, error: RuntimeError) -> None:
        traceback.print_exception(error)
        if self.before_exit is not None:
            self.before_exit()

    def _let_others_hear(self, hung: bool = False) -> None:
        """Rank 0 holds the store: were it gone at once, the others would take its end for the cause. And of a hang all
        are to show where they stand before a connection breaks."""
        if (self.rank == 0 or hung) and self._store is not None and self._launch.world_size > 1:
            time.sleep(2 * POLL_S)

    def _write(self, state: str, error: str | None, **more: Any) -> None:
        if self.attempt is not None:
            more["attempt"] = self.attempt
        with contextlib.suppress(HolmesError, OSError):
            self._run.write_exit(self._launch.rank, state, error, self._launch.node, **more)
