from __future__ import annotations

from typing import get_args

import pytest

from holmes_hpc.records.schema import STATES, RunState
from holmes_hpc.slurm.job_states import ACTIVE, ENDED, SlurmState
from holmes_hpc.submission.lifecycle.outcome import TABLE, is_end, job_state, run_state


def test_the_table_has_every_end_of_a_job_and_of_a_run() -> None:
    assert set(TABLE) == set(ENDED)
    assert set(TABLE.values()) == set(STATES) == set(get_args(RunState))


def test_a_slurm_state_either_goes_on_or_ends() -> None:
    assert sorted((*ACTIVE, *ENDED)) == sorted(get_args(SlurmState))
    assert not {state.lower() for state in ACTIVE} & set(STATES)


def test_the_two_types_share_no_word() -> None:
    """Else a type checker could not tell them apart."""
    assert not set(get_args(SlurmState)) & set(get_args(RunState))


@pytest.mark.parametrize("state", ENDED)
def test_every_end_of_a_job_is_one_of_a_run(state: SlurmState) -> None:
    assert is_end(run_state(state)) and run_state(job_state(run_state(state))) == run_state(state)


@pytest.mark.parametrize("state", STATES)
def test_every_end_of_a_run_has_a_word_of_slurms(state: RunState) -> None:
    assert run_state(job_state(state)) == state


def test_an_end_that_nobody_has_heard_of_is_a_failure() -> None:
    assert run_state("SOMETHING_NEW") == "failed"  # type: ignore[arg-type]
