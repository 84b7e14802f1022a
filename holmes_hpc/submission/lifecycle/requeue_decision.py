"""The decisions whether a job is requeued at its end, and whether a requeued job continues."""

import contextlib
import os
import signal
import threading

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.logs import log_batch_line
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_queries import disable_requeue, has_script_failed, requeue
from holmes_hpc.slurm.job_states import read_cancellation
from holmes_hpc.submission.executor.environment import LEADER
from holmes_hpc.submission.lifecycle import attempts
from holmes_hpc.submission.lifecycle.failed_rank import failed_nodes
from holmes_hpc.submission.lifecycle.outcome import build_result


def reason_to_stop(run: RunDirectory, state: str, attempt: str, *, slurm_requeues: bool = False) -> str | None:
    """Return why a job is not requeued after the attempt with the id `attempt` ended in `state`; None if it is.

    Only failures count towards train.max_restarts. `slurm_requeues`: Slurm preempted the job and requeues it itself."""
    if state in ("completed", "cancelled"):
        return state
    if state == "failed":
        max_restarts = int(run.config.get("train", {}).get("max_restarts") or 0)
        failures = attempts.count_failures(run, attempt)
        if failures >= max_restarts:
            return f"already restarted after {failures} failures" if max_restarts else "train.max_restarts is 0"
    return None if slurm_requeues or attempts.has_new_steps(run, attempt) else "no new step since the last start"


def check_requeued_job(run: RunDirectory, job_id: str, restarts: int) -> int:
    """Return the exit code for the batch script of a requeued job: 0 if it may continue, else 1. `restarts`: so far.

    Slurm itself requeues a job that it preempted or whose node failed. If nobody recorded the end of the last attempt
    in time, this function records it: as preempted if Slurm's messages say so, otherwise as failed."""
    recorded, result = run.read_run()["attempts"], run.read_result()
    has_recorded_end = result is not None and (result["writer"] == "batch" or result["state"] == "preempted")
    if not recorded or "start" in recorded[-1] or has_recorded_end:
        return 0
    last_attempt, messages = f"{job_id}/{restarts - 1}", attempts.end_messages(run)
    cancellation = read_cancellation(messages)
    is_preempted = cancellation is not None and cancellation.state == "PREEMPTED"
    state = "preempted" if is_preempted else "failed"
    stop_reason = reason_to_stop(run, state, last_attempt, slurm_requeues=is_preempted)
    if stop_reason is None:
        attempts.record_attempt_end(run, last_attempt, state)
        return 0
    nodes, error = failed_nodes(messages), "the batch script exited without a record, as when its node fails"
    error = f"node {nodes[0]} failed" if nodes else error
    cause = {"state": "failed", "error": error, "failed_rank": None, "failed_node": nodes[0] if nodes else None}
    run.write_result({**build_result(run, 1), **cause})
    log_batch_line(f"failed: {error}")
    log_batch_line(f"not restarted: {stop_reason}")
    disable_requeue(job_id)
    return 1


def watch_batch_script(run: RunDirectory) -> None:
    """Start a thread that requeues this job if its batch script is killed, unless :func:`reason_to_stop` has a reason.

    Rank 0 calls this. When the script is killed, Slurm also sends SIGTERM to rank 0, and SIGKILL after KillWait. The
    thread requeues at once, because rank 0 may be killed before it has saved its checkpoint."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)  # gets a byte for each signal that has a handler
    threading.Thread(target=_requeue_after_signal, args=(run, reader), daemon=True).start()


def _requeue_after_signal(run: RunDirectory, signal_pipe: int) -> None:
    while os.read(signal_pipe, 1):
        attempt = attempts.attempt_id(os.environ)
        with contextlib.suppress(HolmesError, OSError):
            if has_script_failed(os.environ[LEADER]) and reason_to_stop(run, "failed", attempt) is None:
                attempts.record_attempt_end(run, attempt, "failed")
                requeue(os.environ[LEADER])
