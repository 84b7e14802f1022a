from __future__ import annotations

import pytest

from holmes_hpc.records.run import STATES
from holmes_hpc.slurm.job_states import ACTIVE, ENDED
from holmes_hpc.submission.lifecycle.run_states import is_end, job_state, run_state


@pytest.mark.parametrize("state", ENDED)
def test_every_end_of_a_job_is_one_of_a_run(state: str) -> None:
    assert is_end(run_state(state)) and run_state(job_state(run_state(state))) == run_state(state)


def test_every_end_of_a_run_has_a_word_of_slurms() -> None:
    assert {run_state(job_state(state)) for state in STATES} == set(STATES)
    assert {job_state(state) for state in STATES} <= set(ENDED)


def test_a_job_that_goes_on_has_no_runs_end() -> None:
    assert not any(is_end(state.lower()) for state in ACTIVE) and not set(ACTIVE) & set(ENDED)


def test_an_end_that_nobody_has_heard_of_is_a_failure() -> None:
    assert run_state("SOMETHING_NEW") == "failed"
