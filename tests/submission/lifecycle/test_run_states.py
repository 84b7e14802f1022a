from __future__ import annotations

from typing import get_args

import pytest

from holmes_hpc.records.schema import STATES, RunState
from holmes_hpc.slurm.job_states import ACTIVE, ENDED, SlurmState
from holmes_hpc.submission.lifecycle.outcome import RUN_STATES, SLURM_STATES, run_state


def test_the_table_has_every_final_state_of_jobs_and_runs() -> None:
    assert set(RUN_STATES) == set(ENDED)
    assert set(RUN_STATES.values()) == set(STATES) == set(get_args(RunState))


def test_a_slurm_state_is_either_active_or_final() -> None:
    assert sorted((*ACTIVE, *ENDED)) == sorted(get_args(SlurmState))
    assert not {state.lower() for state in ACTIVE} & set(STATES)


def test_states_of_jobs_and_runs_differ() -> None:
    """So a type checker distinguishes them."""
    assert not set(get_args(SlurmState)) & set(get_args(RunState))


@pytest.mark.parametrize("state", ENDED)
def test_every_final_state_of_a_job_maps_to_one_of_a_run(state: SlurmState) -> None:
    assert run_state(state) in STATES and run_state(SLURM_STATES[run_state(state)]) == run_state(state)


@pytest.mark.parametrize("state", STATES)
def test_every_state_of_a_run_maps_to_one_of_slurm(state: RunState) -> None:
    assert run_state(SLURM_STATES[state]) == state


def test_an_unknown_final_state_is_a_failure() -> None:
    assert run_state("SOMETHING_NEW") == "failed"  # type: ignore[arg-type]
