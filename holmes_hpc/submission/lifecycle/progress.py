"""Following a job in a terminal: its states, why it waits, its log, its end. The exit code says how it ended."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection

from holmes_hpc import console
from holmes_hpc.records.logs import GrowingFile
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.lifecycle.attempts import before_step_1, last_step
from holmes_hpc.submission.lifecycle.outcome import quoted
from holmes_hpc.submission.lifecycle.status import Job, lags, last_word, record_end

QUIET_S, LATER_S, SOON_S = 10.0, 30.0, 120.0  # silence at most: so long after a change of state, and later
SETTLE_S = 20  # after Slurm says that the job is over: time for result.json to become visible on this machine


class _Screen:
    """The state and the log lines of a run that the user has seen."""

    def __init__(self, run: RunDirectory, job: Job, rank: int, show: Callable[[str], None]) -> None:
        self._run, self._job, self._rank, self._show = run, job, rank, show
        self._log = GrowingFile(run.log_path(rank), from_now=True)
        self._batch = GrowingFile(run.logs / "batch.txt", from_now=True)
        self._state = JobState()
        self.log_lines: deque[str] = deque(maxlen=200)
        self._silent_since = self._state_since = time.monotonic()

    def show_state(self, state: JobState) -> bool:
        """Show `state` if it differs from the last one; return whether the job's own word changed."""
        last = self._state
        if (state.state, state.why, state.nodes) == (last.state, last.why, last.nodes):
            return False
        why = f": {state.why}" if state.why else ""
        where = f" on {state.nodes}" if state.nodes else ""
        console.note(f"{time.strftime('%H:%M:%S')} job {self._job.id} {state.state}{why}{where}")
        self._state, self._silent_since = state, time.monotonic()
        if state.state != last.state:
            self._state_since = time.monotonic()
        return state.state != last.state

    def show_new_lines(self) -> None:
        """Show what the rank's log and the batch script's have gained."""
        for line in self._log.lines():
            self._show(line)
            self.log_lines.append(line)
            self._silent_since = time.monotonic()
        for line in self._batch.lines():
            console.note(line)

    def break_silence(self, state: JobState, poll_s: float) -> None:
        """After a long silence, show that the job still waits, starts or runs."""
        starts = state.state == "RUNNING" and not self.log_lines  # from its first line on rank 0 reports its set-up
        now = time.monotonic()
        in_state_s = now - self._state_since
        if now - self._silent_since <= (QUIET_S if starts or in_state_s < SOON_S else LATER_S) - poll_s:
            return
        if starts:
            console.note(f"{before_step_1(self._run, self._rank)}: {in_state_s:.0f} s")
        else:
            why = f" ({state.why or state.reason})" if state.reason else ""
            console.note(f"job {self._job.id}: {state.state}{why}, {time.strftime('%H:%M:%S')}")
        self._silent_since = now


def follow(
    run: RunDirectory,
    job: Job,
    *,
    rank: int = 0,
    poll_s: float = 1.0,
    slurm_every_s: float = 10.0,
    ask: Callable[[], str] | None = None,
    show: Callable[[str], None] = console.text,
) -> int:
    """Show the job's progress until it ends: 0 when it completed, else 1 (130 after Ctrl-C without an end).

    Looks at the run directory every `poll_s` and asks Slurm at growing intervals up to `slurm_every_s`. On Ctrl-C
    `ask` decides: ``cancel``, ``detach`` or ``go on``; by default a question on the terminal, and detaching where
    there is none. When the batch script could not write result.json, this does. `show` gets the lines of the rank's
    log.
    """
    screen = _Screen(run, job, rank, show)
    asked, pause = 0.0, 1.0
    state = JobState()
    ended_at: float | None = None
    while True:
        try:
            if time.monotonic() - asked >= pause:
                state = job.state("force")
                asked = time.monotonic()  # a process of this machine costs nothing to ask for
                pause = poll_s if state.source == "process" else min(pause * 1.5, slurm_every_s)
            if screen.show_state(state):
                pause = 1.0
            screen.show_new_lines()
            screen.break_silence(state, poll_s)
            result = run.read_result()
            if result is not None and (state.ended or state.state == UNKNOWN or last_word(result)):
                break
            ended_at = (ended_at or time.monotonic()) if state.ended else None
            if ended_at and time.monotonic() - ended_at > (SETTLE_S if state.source != "process" else 0):
                break
            time.sleep(poll_s)
        except KeyboardInterrupt:
            answer = (ask or _ask)()
            if answer == "cancel":
                console.note(f"cancelling job {job.id}")
                job.cancel()
            elif answer == "detach":
                console.note(
                    f"job {job.id} goes on; `holmes logs {run.path} --follow` shows it, "
                    f"`holmes cancel {run.path}` ends it"
                )
                return 130
    if result is None or (state.ended and lags(result, last_step(run))):
        result = record_end(run, state)
    screen.show_new_lines()
    return tell_end(run, result, screen.log_lines)


def tell_end(run: RunDirectory, result: dict[str, object], told: Collection[str] = ()) -> int:
    """Say how the run ended, and of its log's last lines those that were not `told` yet; the exit code comes back."""
    if result["state"] == "completed":
        console.note(f"{run.name}: completed")
        return 0
    rank = result.get("failed_rank")
    blamed = f"rank {rank} on {result['failed_node']}: " if rank is not None else ""
    why = "" if result.get("error") == result["state"] else result.get("error") or ""
    console.note(f"{run.name}: {result['state']}" + (f": {blamed}{why}" if blamed or why else ""))
    tail = result.get("log_tail")
    new = [line for line in tail if line not in told] if isinstance(tail, list) else []
    for line in quoted(new, str(result.get("error") or ""), rank if isinstance(rank, int) else None):
        console.note(line)
    if run.metrics_bytes():
        console.note(f"go on with `holmes resume {run.name}`")
    return 1


def _ask() -> str:
    with contextlib.suppress(KeyboardInterrupt):
        word = console.ask("\n[c]ancel the job, [d]etach and let it run, or Enter to go on following: ")
        return "detach" if word is None else {"c": "cancel", "d": "detach"}.get(word[:1], "go on")
    return "detach"
