"""The last thing a job's batch script runs: ``python -m holmes_hpc.submission.lifecycle.finish RUN_DIR STATUS SIGNAL``.

It judges how the ranks ended, requeues the job where that helps (at the leader: after preemption and time-outs, and
after at most train.max_restarts failures, whenever the start did steps that none before it did), and otherwise writes
result.json. Its exit code is the job's.
With ``--so-far`` the job was told to end and its ranks still run: what is known is written as a lesser word, in case
nobody lives to say the last one. ``--again`` comes first in a job that was requeued: see :func:`again`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.logs import tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import slurm
from holmes_hpc.slurm.job_queries import disable_requeue, ending_state, requeue
from holmes_hpc.slurm.job_states import read_cancellation
from holmes_hpc.submission.executor.environment import ranks_of_job
from holmes_hpc.submission.lifecycle.attempts import (
    failures,
    gained,
    is_starting,
    note_progress,
    noted,
    of_newest_start,
)
from holmes_hpc.submission.lifecycle.failed_rank import complaints
from holmes_hpc.submission.lifecycle.outcome import judge

RECORDED_WAIT_S = 30.0  # from sbatch's answer to the record


def notices(run: RunDirectory) -> str:
    """What slurmd wrote into the batch script's log about the job's end, and srun about its tasks'."""
    return "\n".join([*(of_newest_start(run) or ()), *tail(run.logs / "srun.txt", 200)])


def should_restart(run: RunDirectory, state: str, start: str, *, blameless: bool = False) -> str | None:
    """None when the job should go on after its start `start`, else why not; failures alone count against
    train.max_restarts. `blameless`: Slurm ended it for another job's sake, and queues it again itself."""
    if state in ("completed", "cancelled"):
        return state
    if state == "failed":
        most, before = int(run.config.get("train", {}).get("max_restarts") or 0), failures(run, start)
        if before >= most:
            return f"restarted after {before} failures already" if most else "train.max_restarts is 0"
    return None if blameless or gained(run, start) else "no step was gained since the last start"


def finish(run: RunDirectory, status: int, signalled: bool, job_id: str, restarts: int) -> int:
    """Requeue or write result.json; the exit code for the job comes back."""
    if stranger(run, job_id):
        return status or 1
    text = notices(run)
    state = (read_cancellation(text) or ending_state(job_id)) if status or signalled else None
    result = judge(run, status, signalled=signalled, slurm=state, srun=complaints(text, ranks_of_job(os.environ)))
    start, is_preempted = f"{job_id}/{restarts}", state is not None and state.state == "PREEMPTED"
    if result["state"] == "failed" and noted(run, start):  # rank 0 has asked for the requeue that ended the others
        result |= {"state": "preempted", "error": "preempted", "failed_rank": None, "failed_node": None}
    why_not = should_restart(run, result["state"], start, blameless=is_preempted) if job_id else "not in a job"
    if why_not is None:
        with contextlib.suppress(HolmesError, OSError):
            note_progress(run, start, result["state"])
        why_not, by_itself = requeue(job_id)
        if why_not is None:
            restart = f"requeued job {job_id} (restart {restarts + 1})"
            say(
                f"{result['state']}: {result['error']}; "
                + (f"Slurm requeued job {job_id} itself" if by_itself else restart)
            )
            return int(result["exit_code"])
    run.write_result(result, writer="batch")
    if state is not None and state.state == "NODE_FAIL":  # Slurm has queued it again by itself
        slurm("scancel", job_id, timeout_s=30)
    elif result["exit_code"] and job_id:
        disable_requeue(job_id)
    if result["state"] not in ("completed", "cancelled"):
        say(f"not restarted: {why_not}")
    where = f"rank {result['failed_rank']} on {result['failed_node']}: " if result["failed_rank"] is not None else ""
    say(f"{result['state']}{': ' + where + str(result['error']) if result['error'] else ''}")
    return int(result["exit_code"])


def say(message: str) -> None:
    """One line into the batch script's log; where that is full or gone, the rest goes on without it."""
    with contextlib.suppress(OSError):
        os.write(1, f"holmes: {message}\n".encode(errors="replace"))


def again(run: RunDirectory, job_id: str, restarts: int) -> int:
    """At the start of a requeued job: 0 when it may go on. Slurm requeues a job whose node failed by itself; when that
    was the batch script's node, nobody has judged the end of the start before, so it is judged here, as a failure."""
    attempts, result = run.read_run()["attempts"], run.read_result()
    if (
        not attempts
        or "start" in attempts[-1]
        or (result is not None and (result["writer"] == "batch" or result["state"] == "preempted"))
    ):
        return 0
    before = f"{job_id}/{restarts - 1}"
    why_not = should_restart(run, "failed", before)
    if why_not is None:
        note_progress(run, before, "failed")
        return 0
    error = "the batch script ended without a word, as when its node fails"
    run.write_result({**judge(run, 1), "state": "failed", "error": error, "failed_rank": None, "failed_node": None})
    say(f"failed: {error}")
    say(f"not restarted: {why_not}")
    disable_requeue(job_id)
    return 1


def stranger(run: RunDirectory, job_id: str) -> bool:
    """Whether the run is another job's, so that this one has nothing to say of its end; it says so. A job that ends as
    soon as it is submitted waits until it is recorded."""
    end = time.monotonic() + RECORDED_WAIT_S
    while True:
        recorded = (run.read_run()["slurm"] or {}).get("job_id")
        if str(recorded) == job_id or not is_starting(run.path) or time.monotonic() > end:
            break
        time.sleep(0.2)
    other = bool(job_id) and recorded is not None and str(recorded) != job_id
    if other:
        say(f"{run.path} belongs to job {recorded}; nothing is recorded of job {job_id}")
    return other


def so_far(run: RunDirectory, status: int, job_id: str) -> int:
    """Write what is known while the ranks are being ended; any later word replaces it."""
    if stranger(run, job_id):
        return 1
    state = read_cancellation(notices(run)) or ending_state(job_id)
    run.write_result(judge(run, status or 1, signalled=True, slurm=state), writer="follower")
    return 0


def main(arguments: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    run, status, job_id = RunDirectory(Path(words[0])), int(words[1]), os.environ.get("SLURM_JOB_ID", "")
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    try:
        if "--so-far" in words[3:]:
            return so_far(run, status, job_id)
        if "--again" in words[3:]:
            return again(run, job_id, restarts)
        return finish(run, status, bool(words[2]), job_id, restarts)
    except (HolmesError, OSError) as e:
        say(f"the run's end could not be recorded: {e}")
        return status or 1


if __name__ == "__main__":
    sys.exit(main())
