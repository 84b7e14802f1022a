"""Last command of a job's batch script:
``python -m holmes_hpc.submission.lifecycle.batch_end RUN_DIR STATUS SIGNAL [--so-far|--again]``.

It determines how the ranks ended, and requeues the job or writes result.json. Its exit code becomes the job's. A job is
requeued after preemption, after its time limit, and after at most train.max_restarts failures. In each case, its last
attempt must have made a new step, unless Slurm itself requeues a preempted job.

``--so-far``: the job received a signal and its ranks still run. Write a provisional result, because the job may be
killed before the final one. ``--again``: the job was requeued and starts again, see :func:`check_requeued_job`.
"""

import contextlib
import os
import sys
from pathlib import Path

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.locks import has_owner
from holmes_hpc.records.logs import log_batch_line
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import slurm
from holmes_hpc.slurm.job_queries import disable_requeue, ending_state, requeue
from holmes_hpc.slurm.job_states import read_cancellation
from holmes_hpc.submission.executor.environment import ranks_of_job
from holmes_hpc.submission.lifecycle.attempts import attempt_id, end_messages, has_recorded_end, record_attempt_end
from holmes_hpc.submission.lifecycle.create import LOCK
from holmes_hpc.submission.lifecycle.failed_rank import parse_srun_errors
from holmes_hpc.submission.lifecycle.outcome import build_result
from holmes_hpc.submission.lifecycle.requeue_decision import check_requeued_job, reason_to_stop
from holmes_hpc.waiting import attempts

JOB_RECORD_WAIT_S = 30.0  # the longest time from sbatch's answer until run.yaml has the job id


def end_attempt(run: RunDirectory, status: int, signalled: bool, job_id: str, restarts: int) -> int:
    """Requeue the job or write result.json. Return the job's exit code. `status`: the exit status of the job's step;
    `signalled`: whether the job received a signal; `restarts`: number of its restarts so far."""
    if is_run_of_another_job(run, job_id):
        return status or 1
    messages = end_messages(run) if job_id else ""  # without an id, the logs are those of several jobs
    state = (read_cancellation(messages) or ending_state(job_id)) if status or signalled else None
    srun_errors = parse_srun_errors(messages, ranks_of_job(os.environ))
    result = build_result(run, status, signalled=signalled, slurm=state, srun_errors=srun_errors)
    attempt, is_preempted = f"{job_id}/{restarts}", state is not None and state.state == "PREEMPTED"
    if result["state"] == "failed" and has_recorded_end(run, attempt):  # rank 0 requested a requeue, which ended it
        result |= {"state": "preempted", "error": "preempted", "failed_rank": None, "failed_node": None}
    known_attempt = attempt if job_id else attempt_id(os.environ)
    stop_reason = reason_to_stop(run, result["state"], known_attempt, slurm_requeues=is_preempted)
    if stop_reason is None and not job_id:
        stop_reason = "its pools are jobs of their own"
    if stop_reason is None:
        with contextlib.suppress(HolmesError, OSError):
            record_attempt_end(run, attempt, result["state"])
        stop_reason, is_requeued_by_slurm = requeue(job_id)
        if stop_reason is None:
            who, restart = ("Slurm ", "") if is_requeued_by_slurm else ("", f" (restart {restarts + 1})")
            log_batch_line(f"{result['state']}: {result['error']}; {who}requeued job {job_id}{restart}")
            return int(result["exit_code"])
    if result["state"] not in ("completed", "cancelled"):
        log_batch_line(f"not restarted: {stop_reason}")
    where = f"rank {result['failed_rank']} on {result['failed_node']}: " if result["failed_rank"] is not None else ""
    log_batch_line(f"{result['state']}{': ' + where + str(result['error']) if result['error'] else ''}")
    run.write_result(result, writer="batch")  # after the log: whoever follows the run stops at the result
    if state is not None and state.state == "NODE_FAIL":  # Slurm has requeued it already
        slurm("scancel", job_id, timeout_s=30)
    elif result["exit_code"] and job_id:
        disable_requeue(job_id)
    elif job_id and run.is_elastic and "PENDING" in slurm("squeue", "-h", "-j", job_id, "-o", "%T", timeout_s=30).out:
        slurm("scancel", job_id, timeout_s=30)  # Slurm has requeued a component that lost all its nodes
    return int(result["exit_code"])


def is_run_of_another_job(run: RunDirectory, job_id: str) -> bool:
    """Return whether run.yaml names another job, so that this job must not record the run's end; if so, log it.
    If the job ends before its id is recorded, wait for that."""
    for _ in attempts(JOB_RECORD_WAIT_S, 0.2):
        recorded_id = (run.read_run()["slurm"] or {}).get("job_id")
        if str(recorded_id) == job_id or not has_owner(run.path / LOCK):
            break
    is_another = bool(job_id) and recorded_id is not None and str(recorded_id) != job_id
    if is_another:
        log_batch_line(f"{run.path} belongs to job {recorded_id}; the end of job {job_id} is not recorded")
    return is_another


def write_provisional_result(run: RunDirectory, status: int, job_id: str) -> int:
    """Write a result while the ranks are shutting down; a later one replaces it. Return the exit code of this command.
    `status`: the exit status of the job's step so far."""
    if is_run_of_another_job(run, job_id):
        return 1
    state = read_cancellation(end_messages(run)) or ending_state(job_id)
    run.write_result(build_result(run, status or 1, signalled=True, slurm=state), writer="follower")
    return 0


def main(arguments: list[str] | None = None) -> int:
    directory, step_status, signalled, *options = sys.argv[1:] if arguments is None else arguments
    run, status, job_id = RunDirectory(Path(directory)), int(step_status), os.environ.get("SLURM_JOB_ID", "")
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    try:
        if "--so-far" in options:
            return write_provisional_result(run, status, job_id)
        if "--again" in options:
            return check_requeued_job(run, job_id, restarts)
        return end_attempt(run, status, bool(signalled), job_id, restarts)
    except (HolmesError, OSError) as e:
        log_batch_line(f"cannot record the end of the run: {e}")
        return status or 1


if __name__ == "__main__":
    sys.exit(main())
