"""The starts of a run's job: one at a time; which one this is, whether it gained steps, how many failed before it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from holmes_hpc.errors import RecordError
from holmes_hpc.records.logs import tail
from holmes_hpc.records.owner import LockOwner, has_owner, hold_lock
from holmes_hpc.records.ownership import refuse_other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.environment import LEADER

START_MARK = "holmes: start of job"  # in the batch script's log, at every start
LOCK = ".starting"  # held by who looks at a run in order to submit it, until its job is recorded


@contextlib.contextmanager
def starting(path: Path, what: str) -> Iterator[None]:
    """Hold the run directory `path`, which is made where there is none, while `what` (a verb) starts its job.
    RecordError where somebody else is starting it, or where others than its owner may write."""
    refuse_other_writers(path)
    made = not path.exists()
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as e:
        raise RecordError(
            e.strerror or str(e),
            where=str(path),
            hint="give a directory that can be made, on a file system all nodes share",
        ) from e
    refuse_other_writers(path)  # again: in a sticky folder somebody else may have been quicker
    try:
        with hold_lock(path / LOCK, LockOwner.current(what)):
            try:
                yield
            finally:
                if not RunDirectory(path).exists():  # nothing came of it
                    with contextlib.suppress(OSError):
                        os.unlink(path / LOCK)
    finally:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def is_starting(path: Path) -> bool:
    """Whether somebody starts the job of the run in `path`, or was killed at it."""
    return has_owner(path / LOCK)


def others(path: Path) -> list[str]:
    """What lies in `path` besides the lock."""
    return sorted(name for name in os.listdir(path) if name != LOCK) if path.is_dir() else []


def of_newest_start(run: RunDirectory) -> list[str] | None:
    """The last lines that the batch script's log has of the newest start of the run's job; None where that job's batch
    script has not begun, so that all there is is of an older job."""
    lines = tail(run.logs / "batch.txt", 200)
    begun = [number for number, line in enumerate(lines) if line.startswith(START_MARK)]
    if not begun:
        return lines
    held = run.read_run().get("slurm")
    job_id = held.get("job_id") if isinstance(held, dict) else None
    words = lines[begun[-1]].removeprefix(START_MARK).split()
    if job_id is not None and words and words[0].rstrip(",") != str(job_id):
        return None
    return lines[begun[-1] + 1 :]


def start_of(environ: Mapping[str, str]) -> str:
    """Which start of which job this is: ``JOB_ID/RESTARTS``."""
    return f"{environ.get(LEADER) or environ.get('SLURM_JOB_ID') or 'local'}/{environ.get('SLURM_RESTART_COUNT') or 0}"


def gained(run: RunDirectory, start: str) -> bool:
    """Whether the start `start` did a step that none before it did; one that made no attempt did none."""
    attempts = run.read_run()["attempts"]
    if not attempts or attempts[-1].get("start", start) != start:
        return False
    steps = [int(m["step"]) for m in run.metrics() if int(m.get("attempt") or 1) >= len(attempts)]
    before = [int(a["last_step"]) for a in attempts[:-1] if str(a.get("last_step", "")).isdecimal()]
    return bool(steps) and max(steps) > max(before, default=-1)


def failures(run: RunDirectory, start: str) -> int:
    """How many earlier starts of the same job failed."""
    job_id = start.partition("/")[0]
    return sum(
        a.get("ended") == "failed" and str(a.get("start", "")).partition("/")[0] == job_id
        for a in run.read_run()["attempts"]
    )


def before_step_1(run: RunDirectory, rank: int = 0) -> str:
    """What a running job does before its first step, by what `rank` has left."""
    if not (log := run.log_path(rank)).exists():
        return "the nodes start the ranks"
    return "ranks set up" if tail(log, 1) else "ranks load torch and Megatron-Core"


def why(run: RunDirectory, state: JobState, step: int | None) -> str:
    """Why a job waits, or what one that runs does while it has made no `step`."""
    return state.why or (before_step_1(run) if state.state == "RUNNING" and step is None else "")


def last_step(run: RunDirectory) -> int | None:
    metrics = run.metrics()
    return int(metrics[-1]["step"]) if metrics else None


def noted(run: RunDirectory, start: str) -> bool:
    """Whether `start` was noted to have ended, and so is to be requeued."""
    return any(a.get("start") == start for a in run.read_run()["attempts"][-1:])


def note_progress(run: RunDirectory, start: str, ended: str) -> None:
    """Before a requeue: write into the attempt its last step, so that the next one's gain can be told, and its end."""
    attempts = run.read_run()["attempts"]
    if attempts and "start" not in attempts[-1]:
        step = last_step(run)
        attempts[-1] |= {"start": start, "ended": ended, **({} if step is None else {"last_step": step})}
        run.update_run(attempts=attempts)
