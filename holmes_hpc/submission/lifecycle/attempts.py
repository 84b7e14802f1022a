"""The attempts of a run's job: the log, progress and recorded end of each. A requeue starts another attempt."""

from __future__ import annotations

from collections.abc import Mapping

from holmes_hpc.records.logs import tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.environment import LEADER

START_MARK = "holmes: start of job"  # the batch script logs it at the start of every attempt


def latest_attempt_log(run: RunDirectory) -> list[str] | None:
    """Return the last lines that the latest attempt wrote into the batch script's log.
    None if the run's job has not started yet, so that the log is of an earlier job."""
    lines = tail(run.logs / "batch.txt", 200)
    starts = [number for number, line in enumerate(lines) if line.startswith(START_MARK)]
    if not starts:
        return lines
    slurm_record = run.read_run().get("slurm")
    job_id = slurm_record.get("job_id") if isinstance(slurm_record, dict) else None
    logged_id = lines[starts[-1]].removeprefix(START_MARK).partition(",")[0].strip()
    if job_id is not None and logged_id and logged_id != str(job_id):
        return None
    return lines[starts[-1] + 1 :]


def attempt_id(environ: Mapping[str, str]) -> str:
    """Return the id of this attempt: ``JOB_ID/RESTARTS``."""
    return f"{environ.get(LEADER) or environ.get('SLURM_JOB_ID') or 'local'}/{environ.get('SLURM_RESTART_COUNT') or 0}"


def has_new_steps(run: RunDirectory, attempt: str) -> bool:
    """Return whether the attempt with this id got further than every earlier one.
    An attempt that rank 0 did not record made no step."""
    attempts = run.read_run()["attempts"]
    if not attempts or attempts[-1].get("start", attempt) != attempt:
        return False
    steps = [int(m["step"]) for m in run.metrics() if int(m.get("attempt") or 1) >= len(attempts)]
    earlier_steps = [int(a["last_step"]) for a in attempts[:-1] if str(a.get("last_step", "")).isdecimal()]
    return bool(steps) and max(steps) > max(earlier_steps, default=-1)


def count_failures(run: RunDirectory, attempt: str) -> int:
    """Return how many earlier attempts of the same job failed."""
    job_id = attempt.partition("/")[0]
    return sum(
        a.get("ended") == "failed" and str(a.get("start", "")).partition("/")[0] == job_id
        for a in run.read_run()["attempts"]
    )


def startup_phase(run: RunDirectory, rank: int = 0) -> str:
    """Describe what a running job does before its first step, judging by the log of `rank`."""
    if not (log := run.log_path(rank)).exists():
        return "the nodes start the ranks"
    return "ranks set up" if tail(log, 1) else "ranks load torch and Megatron-Core"


def state_detail(run: RunDirectory, state: JobState, step: int | None) -> str:
    """Return why a job waits, or what a running job does if `step` is None: it has not made a step yet."""
    return state.why or (startup_phase(run) if state.state == "RUNNING" and step is None else "")


def last_step(run: RunDirectory) -> int | None:
    """Return the number of the last recorded step; None before the first one."""
    return int(metrics[-1]["step"]) if (metrics := run.metrics()) else None


def has_recorded_end(run: RunDirectory, attempt: str) -> bool:
    """Return whether the end of the attempt is recorded, so that the job will be requeued."""
    return any(a.get("start") == attempt for a in run.read_run()["attempts"][-1:])


def record_attempt_end(run: RunDirectory, attempt: str, state: str) -> None:
    """Record an attempt's last step and how it ended, before a requeue. The next attempt is compared with them."""
    attempts = run.read_run()["attempts"]
    if attempts and "start" not in attempts[-1]:
        step = last_step(run)
        attempts[-1] |= {"start": attempt, "ended": state, **({} if step is None else {"last_step": step})}
        run.update_run(attempts=attempts)
