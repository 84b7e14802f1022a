"""The state of a run whose components are jobs of their own."""

from holmes_hpc.slurm.job_states import JobState, joined_members


def test_a_run_of_several_jobs_runs_while_one_of_them_runs() -> None:
    running, waits = JobState("RUNNING", nodes="ib[1-2]"), JobState("PENDING", reason="Resources")
    state = joined_members([waits, running])
    assert (state.state, state.nodes, state.why) == ("RUNNING", "ib[1-2]", "1 of 2 jobs wait: Resources")
    assert joined_members([waits, JobState("COMPLETED")]).why == "Resources"
    assert joined_members([JobState("COMPLETED"), JobState("CANCELLED")]).ended
