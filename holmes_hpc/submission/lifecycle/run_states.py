"""The table between the states of a Slurm job and the states of a run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from holmes_hpc.records.schema import STATES, RunState
from holmes_hpc.slurm.job_states import SlurmState

# Every end of a job; of several for one end of a run, the first is the run's.
TABLE: dict[SlurmState, RunState] = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "FAILED": "failed",
    "REVOKED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
}
_SLURM_STATES: dict[RunState, SlurmState] = {run: job for job, run in reversed(TABLE.items())}


def run_state(slurm_state: SlurmState) -> RunState:
    """Return the state of a run whose job ended in `slurm_state`; an end that the table lacks is a failure."""
    return TABLE.get(slurm_state, "failed")


def job_state(run_state: RunState) -> SlurmState:
    """Return Slurm's word for how a run ended."""
    return _SLURM_STATES[run_state]


def is_end(word: str) -> bool:
    """Return whether a word of a table is how a run ended; else it is Slurm's, in lower case, for what the job does."""
    return word in STATES


class StateRow:
    """A row of a table whose `state` is the run's (completed, failed, …) when it ended, else Slurm's in lower case."""

    state: str

    @property
    def ended(self) -> bool:
        return is_end(self.state)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]
