"""Following a job in a terminal: its states, why it waits, its log, its end. The exit code says how it ended."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection

from holmes_hpc import console
from holmes_hpc.records.logs import GrowingFile
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.lifecycle.outcome import quoted
from holmes_hpc.submission.lifecycle.starts import before_step_1, last_step
from holmes_hpc.submission.lifecycle.status import Job, lags, last_word, record_end

QUIET_S, LATER_S, SOON_S = 10.0, 30.0, 120.0  # silence at most: so long after a change of state, and later
SETTLE_S = 20  # after Slurm says that the job is over: time for result.json to become visible on this machine


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
    told: deque[str] = deque(maxlen=200)
    log = GrowingFile(run.log_path(rank), from_now=True)
    batch = GrowingFile(run.logs / "batch.txt", from_now=True)
    shown = JobState("")
    asked, pause = 0.0, 1.0
    state = JobState()
    ended_at: float | None = None
    silent = since = time.monotonic()
    while True:
        try:
            if time.monotonic() - asked >= pause:
                state = job.state("force")
                asked, pause = time.monotonic(), min(pause * 1.5, slurm_every_s)
                if state.source == "process":  # of this machine: asking costs nothing
                    pause = poll_s
            if _told(state) != _told(shown):
                _tell(job, state, shown)
                if state.state != shown.state:
                    pause, since = 1.0, time.monotonic()
                shown, silent = state, time.monotonic()
            lines = list(log.lines())
            for line in lines:
                show(line)
            told.extend(lines)
            for line in batch.lines():
                console.note(line)
            if lines:
                silent = time.monotonic()
            starts = state.state == "RUNNING" and not told  # from rank 0's first line on it tells its set-up itself
            now = time.monotonic()
            if not lines and now - silent > (QUIET_S if starts or now - since < SOON_S else LATER_S) - poll_s:
                if starts:
                    console.note(f"{before_step_1(run, rank)}: {now - since:.0f} s")
                else:
                    why = f" ({state.why or state.reason})" if state.reason else ""
                    console.note(f"job {job.id}: {state.state}{why}, {time.strftime('%H:%M:%S')}")
                silent = now
            result = run.read_result()
            if result is not None and (state.ended or state.state == UNKNOWN or last_word(result)):
                break
            if state.ended:
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > (SETTLE_S if state.source != "process" else 0):
                    result = record_end(run, state)
                    break
            else:
                ended_at = None
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
    if state.ended and lags(result, last_step(run)):
        result = record_end(run, state)
    for line in log.lines():
        show(line)
        told.append(line)
    for line in batch.lines():
        console.note(line)
    return tell_end(run, result, told)


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


def _told(state: JobState) -> tuple[str, str, str]:
    return state.state, state.why, state.nodes


def _tell(job: Job, state: JobState, before: JobState) -> None:
    if state.state == UNKNOWN and not before.state:
        return
    why = f": {state.why}" if state.why else ""
    where = f" on {state.nodes}" if state.nodes else ""
    console.note(f"{time.strftime('%H:%M:%S')} job {job.id} {state.state}{why}{where}")


def _ask() -> str:
    if not sys.stdin.isatty():
        return "detach"
    try:
        word = input("\n[c]ancel the job, [d]etach and let it run, or Enter to go on following: ").strip().lower()
    except (EOFError, KeyboardInterrupt):
        return "detach"
    return {"c": "cancel", "d": "detach"}.get(word[:1], "go on")
