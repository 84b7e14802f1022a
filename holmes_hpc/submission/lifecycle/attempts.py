"""The attempts of a run's job: the log, progress and recorded end of each. A requeue starts another attempt."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_hpc.records.logs import tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import from_json
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.environment import LEADER

START_MARK = "holmes: start of job"  # starts a line of the batch script's log at the start of every attempt


def latest_attempt_log(run: RunDirectory) -> list[str] | None:
    """Return the last lines that the latest attempt wrote into the batch script's log. Return None if the run's job has
    not started yet; the log is then that of an earlier job."""
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


def end_messages(run: RunDirectory) -> str:
    """Return slurmd's messages about the job's end, and srun's messages about its tasks; empty before the start."""
    batch_log = latest_attempt_log(run)
    return "" if batch_log is None else "\n".join([*batch_log, *tail(run.logs / "srun.txt", 200)])


def attempt_id(environ: Mapping[str, str]) -> str:
    """Return ``JOB_ID/RESTARTS`` for the attempt whose environment variables are `environ`."""
    return f"{environ.get(LEADER) or environ.get('SLURM_JOB_ID') or 'local'}/{environ.get('SLURM_RESTART_COUNT') or 0}"


def has_new_steps(run: RunDirectory, attempt: str) -> bool:
    """Return whether `attempt` made a step that no earlier one had made; False if rank 0 did not record it."""
    attempts = run.read_run()["attempts"]
    if not attempts or attempts[-1].get("start", attempt) != attempt:
        return False
    steps = [int(m["step"]) for m in run.metrics() if int(m.get("attempt") or 1) >= len(attempts)]
    earlier_steps = [int(a["last_step"]) for a in attempts[:-1] if str(a.get("last_step", "")).isdecimal()]
    return bool(steps) and max(steps) > max(earlier_steps, default=-1)


def count_failures(run: RunDirectory, attempt: str) -> int:
    """Return the number of failed attempts recorded for the job to which the attempt with the id `attempt` belongs."""
    job_id, failed = attempt.partition("/")[0], [a for a in run.read_run()["attempts"] if a.get("ended") == "failed"]
    return sum(str(a.get("start", "")).partition("/")[0] == job_id for a in failed)


def startup_phase(run: RunDirectory) -> str:
    """Return a text on what a running job does before its first step, according to the log of rank 0."""
    if not (log := run.log_path(0)).exists():
        return "the nodes start the ranks"
    return "ranks are setting up" if tail(log, 1) else "ranks load torch and Megatron-Core"


def state_detail(run: RunDirectory, state: JobState, step: int | None) -> str:
    """Return a text on why a job waits, or on what a running job does before its first step; empty for other jobs.
    `step`: number of the run's last step, None before the first."""
    return state.why or (startup_phase(run) if state.state == "RUNNING" and step is None else "")


def last_step(run: RunDirectory) -> int | None:
    """Return the number of the last recorded step; None before the first one."""
    return int(metrics[-1]["step"]) if (metrics := run.metrics()) else None


def last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield as mappings those of the last lines of metrics.jsonl that can be read, the last line first."""
    for line in reversed(tail(path, 160)):
        try:
            data = from_json(line)
        except ValueError:
            continue
        if isinstance(data, dict):
            yield data


def last_metrics(run: RunDirectory) -> dict[str, Any]:
    """Return the metrics of the last step, from the end of metrics.jsonl; empty before the first one."""
    last: dict[str, Any] = {}
    for line in last_lines(run.metrics_path):
        if last and line.get("step") != last.get("step"):
            break
        last = {**line, **last}
    return last or (run.metrics() or [last])[-1]  # the end of the file may be within one long line


def has_recorded_end(run: RunDirectory, attempt: str) -> bool:
    """Return whether the latest attempt has the id `attempt` and a recorded end. Only this sets its key `start`."""
    return any(a.get("start") == attempt for a in run.read_run()["attempts"][-1:])


def record_attempt_end(run: RunDirectory, attempt: str, state: str, lost: Sequence[str] = ()) -> None:
    """Record the last step of the latest attempt and the state in which it ended, before a requeue.
    :func:`has_new_steps` compares the next attempt with it. `lost`: the nodes that an elastic run lost."""
    attempts = run.read_run()["attempts"]
    if attempts and "start" not in attempts[-1]:
        values = {"start": attempt, "ended": state, "last_step": last_step(run), "lost": list(lost)}
        run.update_attempt(len(attempts), **{name: v for name, v in values.items() if v not in (None, [])})
