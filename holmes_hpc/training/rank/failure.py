"""The end of a rank that fails or hangs: its exit record, its report to the other ranks, and the watchdog.

The other ranks exit with the same code, and their logs name the rank that failed or hung. A killed rank cannot report.
On Slurm, srun then ends the other ranks (`--kill-on-bad-exit`, submission/executor/batch_script.py).
"""

import atexit
import contextlib
import faulthandler
import json
import os
import re
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from holmes_hpc.errors import HolmesError, RunFailed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.rank.launch import Launch
from holmes_hpc.training.rank.log import log_line, one_line
from holmes_hpc.waiting import attempts

_FAILED = "holmes/failed"
POLL_S = 1.0
_ANSWER_S = 2.0  # limit of a wait for the store, which may be behind the network that failed
_TIMED_OUT = re.compile(r"timed out waiting \d+ ?ms|application timeout", re.IGNORECASE)  # gloo's messages
_NCCL_NETWORK = re.compile("ncclRemoteError|ncclSystemError|IBV_WC_")  # e.g. no answer to repeated RDMA packets
LOG_EVERY_S = 100.0  # without log lines for this long, the watchdog logs the phase: a line at least every two minutes
LOG_EVERY_S_OF_SET_UP = 8.0  # the same before the first step, so that a slow phase of set-up shows within 10 s
LONG_PHASE = 10.0  # a long phase (set-up, saving to a slow disk) may take this many times the limit of a step


def end_process(code: int) -> None:
    """End this process from any thread, because the main thread may be in a collective that never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_failed(code: int) -> NoReturn:
    """Exit from the main thread of a failed rank. With CUDA, skip all destructors.

    NCCL's destructor would never return: it waits for a thread that waits for the store, in use by a stopped thread."""
    if torch.cuda.is_initialized() and dist.is_initialized():
        atexit.register(end_process, code)
    sys.exit(code)


def _failure_line(failure: dict[str, Any]) -> str:
    """Return the log line of a rank that ends because of another rank's `failure`."""
    return f"Connection lost: rank {failure['rank']} on {failure['node']} failed: {failure['error']}"


def _rank_0_failure(error: Exception) -> dict[str, Any]:
    """Return a failure of rank 0, which hosts the store. Called after the store has raised `error`."""
    return {"rank": 0, "node": "its node", "error": f"its store is down ({one_line(error)[:120]})", "code": 1}


class RankExit:
    """The end of this rank: its exit record, and its report to the other ranks.

    A rank that fails writes its failure to the store: rank, node, error, exit code, and whether it hung. On each other
    rank, a thread polls the store and ends the rank with the same exit code. The main thread cannot do this, because it
    may wait in a collective. A second thread can poll for a cause outside the ranks, such as a NIC that is down.
    """

    def __init__(self, run: RunDirectory, launch: Launch) -> None:
        self._run, self._world_size = run, launch.world_size
        self.rank, self.node = launch.rank, launch.node
        self.place = f"rank {launch.rank} on {launch.node}"
        self.attempt = 0  # unknown until rank 0 starts the attempt
        self._store: Any = None
        self._stop = threading.Event()
        self._ending = threading.Lock()  # held by the first thread that ends this process
        self._find_cause: Callable[[], HolmesError | None] | None = None
        self.describe_links: Callable[[], str] = str  # this rank's NICs and peers; "" before the groups exist

    def watch(self, store: Any) -> None:
        """Start a thread that polls the store for failures of other ranks. `store`: a client that nothing else uses."""
        self._store = store
        threading.Thread(target=self._poll_store, name="failures of other ranks", daemon=True).start()

    def poll_cause(self, find_cause: Callable[[], HolmesError | None]) -> None:
        """Start a thread that polls `find_cause` and ends this rank with the error it returns.
        If torch raises an error first, :meth:`record_failure` calls `find_cause` and reports its error instead."""
        self._find_cause = find_cause
        threading.Thread(target=self._poll_cause, args=(find_cause,), name="cause of failure", daemon=True).start()

    def _poll_cause(self, find_cause: Callable[[], HolmesError | None]) -> None:
        while not self._stop.wait(POLL_S):
            if (error := find_cause()) is not None:
                self._end(one_line(error), error.exit_code, cause=error)

    def _poll_store(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                failure = self._read_failure()
            except Exception as e:
                if self._stop.is_set():
                    return
                failure = _rank_0_failure(e)
            if failure is not None and failure["rank"] != self.rank:
                time.sleep(0.5)  # if this rank is failing by itself, let it report that
                self._end(_failure_line(failure), int(failure["code"]), hung=bool(failure.get("hung")))

    def _read_failure(self) -> dict[str, Any] | None:
        """Return the failure that a rank has written to the store, or None."""
        return json.loads(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None

    def _end(self, line: str, code: int, *, cause: HolmesError | None = None, hung: bool = False) -> None:
        """Log and record `line`, and exit with `code` from a thread, unless the process is ending already.
        `cause`: this rank's own error, None if another rank failed; `hung`: dump this rank's stack traces first."""
        if self._stop.is_set() or not self._ending.acquire(blocking=False):
            return
        if hung:
            self.dump_stacks()
        self._report(line, cause)
        end_process(code)

    def _report(self, line: str, error: BaseException | None, hung: bool = False) -> None:
        """Log and record a failure. `error`: this rank's own, published in the store; None if another rank failed."""
        if error is not None:
            self._publish(error, hung)
        log_line(line if error is None else f"failed: {line}")
        if error is not None and not isinstance(error, HolmesError):
            traceback.print_exception(error)
        self._write_exit("failed", line)
        if (self.rank == 0 or hung) and self._store is not None and self._world_size > 1:
            # Rank 0 hosts the store. If it exited at once, the other ranks would report its exit as the cause.
            # After a hang, all ranks need time to dump their stack traces before a connection breaks.
            time.sleep(2 * POLL_S)

    def _publish(self, error: BaseException, hung: bool) -> None:
        """Write this rank's failure to the store unless the store has one. Wait at most `_ANSWER_S` for the store."""
        code = error.exit_code if isinstance(error, HolmesError) else 1
        failure = {"rank": self.rank, "node": self.node, "error": one_line(error)[:400], "code": code, "hung": hung}

        def write() -> None:
            with contextlib.suppress(Exception):
                if not self._store.check([_FAILED]):
                    self._store.set(_FAILED, json.dumps(failure))
                    self._store.check([_FAILED])  # wait: `set` has no answer, and this process would end too early

        if self._store is not None:
            thread = threading.Thread(target=write, name="report of the failure", daemon=True)
            thread.start()
            thread.join(_ANSWER_S)

    def _failure_of_another_rank(self, error: RuntimeError) -> dict[str, Any] | None:
        """Wait at most `_ANSWER_S` until the store has another rank's failure. Return it, or None if there is none.
        If the store fails and `error` comes from torch's communication, return a failure of rank 0, the store's host.
        """
        failures: list[dict[str, Any] | None] = []

        def read() -> None:
            try:
                failure = next(filter(None, (self._read_failure() for _ in attempts(_ANSWER_S, 0.1))), None)
            except Exception as e:
                failure = _rank_0_failure(e) if isinstance(error, dist.DistError) else None
            failures.append(failure)

        if self._store is not None:
            thread = threading.Thread(target=read, name="failure of another rank", daemon=True)
            thread.start()
            thread.join(_ANSWER_S + 0.5)
        return next((failure for failure in failures if failure and failure["rank"] != self.rank), None)

    def _root_cause(self, error: BaseException) -> BaseException:
        """Return the cause of `error`: too many open files, or the error that `find_cause` returns; else `error`.

        The thread of :meth:`poll_cause` may be too late, because a NIC that goes down breaks connections immediately.
        For a HolmesError, `find_cause` is not called."""
        if "Too many open files" in str(error):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return RunFailed(f"more than {limit} open files", where=self.place, hint="raise `ulimit -n`")
        if self._find_cause is not None and not isinstance(error, HolmesError):
            for pause_s in (0.0, 1.0):
                time.sleep(pause_s)
                if (cause := self._find_cause()) is not None:
                    return cause
        return error

    def hang_hint(self) -> str:
        """Return a hint for a hang. It names the network, because one whose links are up may still drop packets."""
        links, tools = self.describe_links(), "(ibstat, perfquery, ethtool -S)"
        network_note = f"; if all are in one, a network drops packets: check {links} {tools}" if links else ""
        return f"every rank's log has its stack traces: the rank that is not in a collective is the cause{network_note}"

    def record_end(self, state: str, **fields: Any) -> None:
        """Record a regular end: `state` is completed or preempted."""
        self._stop.set()
        with self._ending:
            self._write_exit(state, None, **fields)

    def record_failure(self, error: BaseException, hung: bool = False) -> int:
        """Record a failure and report it to the other ranks. Return the exit code.

        If another rank's failure caused `error`, record that failure and return that rank's code. `hung`: this rank
        hung, so the other ranks also dump their stack traces."""
        error = self._root_cause(error)
        # torch's own error, if there is one: a broken connection, or a collective that timed out
        torch_error = next((e for e in (error, error.__cause__) if isinstance(e, RuntimeError)), None)
        other_failure = None
        if torch_error is not None and _TIMED_OUT.search(one_line(torch_error)):
            self.dump_stacks(torch_error)
            hung = True
            problem = f"another rank did not answer within train.net_timeout_s ({one_line(torch_error)[:200]})"
            hint = f"{self.hang_hint()}; if it was only slow, raise train.net_timeout_s"
            error = RunFailed(problem, where=self.place, hint=hint)
        elif torch_error is not None:
            other_failure = self._failure_of_another_rank(torch_error)
            if other_failure is None and _NCCL_NETWORK.search(one_line(torch_error)):
                problem = f"NCCL lost its connection ({one_line(torch_error)[:200]})"
                hint = f"check {self.describe_links() or 'the GPUs of this node'} for lost packets (perfquery)"
                error = RunFailed(problem, where=self.place, hint=hint)
        if other_failure is not None and not other_failure.get("hung") and isinstance(error, HolmesError):
            other_failure = None  # this rank's own error is more precise
        if not self._ending.acquire(blocking=False):
            time.sleep(5)  # another thread is ending this process
        self._stop.set()
        if other_failure is not None:  # the connection broke because the rank at its other end failed
            if other_failure.get("hung"):
                self.dump_stacks(torch_error)
            self._report(_failure_line(other_failure), None)
            return int(other_failure["code"])
        self._report(one_line(error), error, hung)
        return error.exit_code if isinstance(error, HolmesError) else 1

    def dump_stacks(self, error: BaseException | None = None) -> None:
        """Write `error`, the stacks of all threads, and NCCL's pending collectives to the log. Write the entries of
        NCCL's flight recorder to trace/, for ``torchfrtrace``."""
        if error is not None:
            traceback.print_exception(error)
        print("stacks of all threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        if collectives := _pending_collectives():
            print(f"pending collectives: {collectives}", file=sys.stderr, flush=True)
        with contextlib.suppress(ImportError, OSError, RuntimeError):
            from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined, unused-ignore]

            (self._run.trace / f"nccl_trace_rank_{self.rank}").write_bytes(_dump_nccl_trace())

    def _write_exit(self, state: str, error: str | None, **fields: Any) -> None:
        attempt = {"attempt": self.attempt} if self.attempt else {}
        with contextlib.suppress(HolmesError, OSError):
            self._run.write_exit(self.rank, state, error, self.node, **fields, **attempt)


def _pending_collectives() -> str:
    """Return the last 20 uncompleted entries of NCCL's flight recorder as text; "" if there are none."""
    try:
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined, unused-ignore]

        entries = json.loads(_dump_nccl_trace_json(includeCollectives=True, onlyActive=True)).get("entries", [])
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return ""
    return "; ".join(f"{e.get('profiling_name')} on {e.get('process_group')}, {e.get('state')}" for e in entries[-20:])


class Watchdog:
    """A thread that ends this rank if a step takes longer than `limit_s`.
    It first dumps this rank's stacks and makes the other ranks dump theirs.

    Call :meth:`start_phase` before each phase; some have a longer limit. `logs_progress`: log phases after a silence.
    """

    def __init__(
        self, rank_exit: RankExit, limit_s: float, logs_progress: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exit, self._limit_s, self._logs_progress, self._clock = rank_exit, limit_s, logs_progress, clock
        self._phase, self._since, self._logged_at = "set-up", clock(), clock()
        self._factor, self._silence_s = LONG_PHASE, LOG_EVERY_S_OF_SET_UP
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def start_phase(self, phase: str, factor: float = 1.0) -> None:
        """Restart the clock for `phase`, which may take `factor` times as long as a step."""
        self._phase, self._since, self._factor = phase, self._clock(), factor

    def start_set_up(self, phase: str) -> None:
        """Restart the clock for a phase of set-up, which may take ten times as long as a step."""
        self.start_phase(phase, LONG_PHASE)

    def note_step_logged(self) -> None:
        """Restart the clock of :meth:`log_if_silent` after a step was logged. From now on, its limit is LOG_EVERY_S."""
        self._logged_at, self._silence_s = self._clock(), LOG_EVERY_S

    def overdue(self) -> str | None:
        """Return a message if the current phase exceeds its limit, else None."""
        limit_s = self._limit_s * self._factor
        return f"{self._phase} takes longer than {limit_s:.0f} s" if self._clock() - self._since > limit_s else None

    def log_if_silent(self) -> None:
        """Log the current phase if nothing was logged for too long."""
        now = self._clock()
        if self._logs_progress and now - self._logged_at > self._silence_s:
            self._logged_at = now
            log_line(f"in progress for {now - self._since:.0f} s: {self._phase}")

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 4)):
            self.log_if_silent()
            message = self.overdue()
            if message is not None:
                self._exit.dump_stacks()
                error = RunFailed(message, where=self._exit.place, hint=self._exit.hang_hint())
                end_process(self._exit.record_failure(error, hung=True))
