"""Progress of a job on a terminal: its states, why it waits, its log and its end."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection

from holmes_hpc import console
from holmes_hpc.records.logs import GrowingFile
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.lifecycle.attempts import last_step, startup_phase
from holmes_hpc.submission.lifecycle.outcome import quote_log, resume_advice
from holmes_hpc.submission.lifecycle.status import Job, is_conclusive, is_outdated, record_end

# The longest silence on the terminal: in the first EARLY_S seconds after a change of state, and later.
EARLY_SILENCE_S, LATER_SILENCE_S, EARLY_S = 10.0, 30.0, 120.0
SETTLE_S = 20  # from the end of the job in Slurm until result.json is visible on this machine


class _Display:
    """The display of a job's progress. It remembers what it has shown. `show`: called with lines of rank 0's log."""

    def __init__(self, run: RunDirectory, job: Job, show: Callable[[str], None]) -> None:
        self._run, self._job, self._show = run, job, show
        self._log = GrowingFile(run.log_path(0), from_now=True)
        self._batch_log = GrowingFile(run.logs / "batch.txt", from_now=True)
        self._state = JobState()
        self.log_lines: deque[str] = deque(maxlen=200)
        self._silent_since = self._state_since = time.monotonic()

    def show_state(self, state: JobState) -> bool:
        """Show the job's state if it or its details (reason, nodes) changed. Return whether the state changed."""
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
        """Show the new lines of the rank's log and of the batch script's log."""
        for line in self._log.lines():
            self._show(line)
            self.log_lines.append(line)
            self._silent_since = time.monotonic()
        for line in self._batch_log.lines():
            console.note(line)

    def break_silence(self, state: JobState, poll_s: float) -> None:
        """If nothing was shown for long, show what the job does. `poll_s`: time until the next call."""
        is_starting = state.state == "RUNNING" and not self.log_lines  # later, the log of rank 0 shows more
        now = time.monotonic()
        in_state_s = now - self._state_since
        longest_s = EARLY_SILENCE_S if is_starting or in_state_s < EARLY_S else LATER_SILENCE_S
        if now - self._silent_since <= longest_s - poll_s:
            return
        if is_starting:
            console.note(f"{startup_phase(self._run)}: {in_state_s:.0f} s")
        else:
            why = f" ({state.why or state.reason})" if state.reason else ""
            console.note(f"job {self._job.id}: {state.state}{why}, {time.strftime('%H:%M:%S')}")
        self._silent_since = now


def report_progress(
    run: RunDirectory,
    job: Job,
    *,
    poll_s: float = 1.0,
    slurm_every_s: float = 10.0,
    ask_user: Callable[[], str] | None = None,
    show: Callable[[str], None] = console.text,
) -> int:
    """Show the job's progress until it ends. Return the exit code: 0 if it completed, 130 after detaching, else 1.

    Read the run directory every `poll_s`; query Slurm at growing intervals up to `slurm_every_s`. Ctrl-C calls
    `ask_user`, which returns ``cancel``, ``detach`` or ``go on``; by default it asks on the terminal, and detaches
    without one. `show`: called with each line of rank 0's log. If the job ends without result.json, write it."""
    display = _Display(run, job, show)
    queried_at, interval_s = 0.0, 1.0
    state = JobState()
    ended_at: float | None = None
    while True:
        try:
            if time.monotonic() - queried_at >= interval_s:
                state = job.state("force")
                queried_at = time.monotonic()
                interval_s = poll_s if state.source == "process" else min(interval_s * 1.5, slurm_every_s)
            if display.show_state(state):
                interval_s = 1.0
            display.show_new_lines()
            display.break_silence(state, poll_s)
            result = run.read_result()
            if result is not None and (state.ended or state.state == UNKNOWN or is_conclusive(result)):
                break
            ended_at = (ended_at or time.monotonic()) if state.ended else None
            if ended_at and time.monotonic() - ended_at > (SETTLE_S if state.source != "process" else 0):
                break
            time.sleep(poll_s)
        except KeyboardInterrupt:
            answer = (ask_user or _ask_for_action)()
            if answer == "cancel":
                console.note(f"cancelling job {job.id}")
                with console.waiting("waiting for its ranks to save and exit"):
                    job.cancel()
            elif answer == "detach":
                logs, cancel = f"`holmes logs {run.path} --follow` shows it", f"`holmes cancel {run.path}` ends it"
                console.note(f"job {job.id} continues; {logs}, {cancel}")
                return 130
    if result is None or (state.ended and is_outdated(result, last_step(run))):
        result = record_end(run, state)
    display.show_new_lines()
    return report_end(run, result, display.log_lines)


def report_end(run: RunDirectory, result: dict[str, object], shown_lines: Collection[str] = ()) -> int:
    """Show how the run ended, with the last log lines that are not in `shown_lines`.
    Return the exit code: 0 if the run completed, else 1."""
    if result["state"] == "completed":
        console.note(f"{run.name}: completed")
        return 0
    rank = result.get("failed_rank")
    where = f"rank {rank} on {result['failed_node']}: " if rank is not None else ""
    why = "" if result.get("error") == result["state"] else result.get("error") or ""
    console.note(f"{run.name}: {result['state']}" + (f": {where}{why}" if where or why else ""))
    tail = result.get("log_tail")
    new_lines = [line for line in tail if line not in shown_lines] if isinstance(tail, list) else []
    log = quote_log(new_lines, str(result.get("error") or ""), rank if isinstance(rank, int) else None)
    saved = [int(path.parent.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*/holmes.json")]
    for line in (*log, *resume_advice(run, saved)):
        console.note(line)
    return 1


def _ask_for_action() -> str:
    with contextlib.suppress(KeyboardInterrupt):
        answer = console.ask("\n[c]ancel the job, [d]etach and let it run, or Enter to continue watching: ")
        return "detach" if answer is None else {"c": "cancel", "d": "detach"}.get(answer[:1], "go on")
    return "detach"
