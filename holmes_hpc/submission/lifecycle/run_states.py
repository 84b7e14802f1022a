"""From the state of a Slurm job to the state of a run: the one table between the two vocabularies."""

from __future__ import annotations

from holmes_hpc.records.run import STATES

_RUN_STATES = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
}  # of a job that ended; any other end is a failure
_JOB_STATES = {run: job for job, run in reversed(_RUN_STATES.items())}


def run_state(job_state: str) -> str:
    """What a run is whose job ended in `job_state`."""
    return _RUN_STATES.get(job_state, "failed")


def job_state(run_state: str) -> str:
    """Slurm's word for how a run ended."""
    return _JOB_STATES.get(run_state, "FAILED")


def is_end(word: str) -> bool:
    """Whether a word of a table is how a run ended; else it is Slurm's, in lower case, for what the job does."""
    return word in STATES
