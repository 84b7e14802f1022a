"""Slurm's answers about jobs as rows, and the rows of a heterogeneous job as one state."""

from __future__ import annotations

import pytest
from slurm_text import sacct_line, squeue_line

from holmes_hpc.slurm.job_queries import parse_sacct, parse_scontrol, parse_squeue, sacct_command
from holmes_hpc.slurm.job_states import join, out_of_memory


@pytest.mark.parametrize(
    "states, joined",
    [
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
        (["COMPLETED", "FAILED"], "FAILED"),
        (["FAILED", "CANCELLED"], "FAILED"),
        (["COMPLETED", "CANCELLED by 0"], "CANCELLED"),
        (["RUNNING", "CANCELLED by 0"], "RUNNING"),
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["PENDING", "PENDING"], "PENDING"),
        (["NODE_FAIL", "FAILED"], "NODE_FAIL"),
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["TIMEOUT", "TIMEOUT"], "TIMEOUT"),
        (["OUT_OF_MEMORY", "FAILED"], "OUT_OF_MEMORY"),
    ],
)
def test_components_are_joined(states: list[str], joined: str) -> None:
    text = "".join(sacct_line(f"12+{i}", s) for i, s in enumerate(states))
    found = join(parse_sacct(text))
    assert found.state == joined and len(found.components) == len(states)


def test_a_job_that_went_on_without_a_node_has_its_latest_state() -> None:
    states = {"12+0": "RESIZING", "12+1": "CANCELLED by 0"}
    text = "".join(sacct_line(*item) for item in states.items())
    assert join(parse_sacct(text)).state == "RESIZING"
    assert join(parse_sacct(text + sacct_line("12+0", "RUNNING"))).components == ("RUNNING", "CANCELLED")
    assert join(parse_sacct(text + sacct_line("12+0", "CANCELLED by 0"))).ended


@pytest.mark.parametrize("state", ["REQUEUED", "EXPEDITING", "REQUEUE_HOLD"])
def test_a_job_that_slurm_starts_again_waits_and_has_not_ended(state: str) -> None:
    found = join(parse_squeue(squeue_line("12", state)))
    assert found.waits and not found.ended


def test_steps_and_arrays_are_no_components() -> None:
    text = sacct_line("12+0", "COMPLETED") + sacct_line("12+0.0", "FAILED") + sacct_line("12.batch", "FAILED")
    assert [r.offset for r in parse_sacct(text)] == [0]


def test_names_with_odd_letters_survive() -> None:
    assert parse_sacct(sacct_line("3", "RUNNING", name="a|b c'☃"))[0].name == "a|b c'☃"
    assert parse_squeue(squeue_line("3", "PENDING", reason="(Resources) x", name="a|b"))[0].name == "a|b"


SCONTROL = """\
JobId=23 HetJobId=23 HetJobOffset=0 JobName=a b c HetJobIdSet=23-24 UserId=root(0) Nice=0 \
Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 \
ExitCode=0:0 RunTime=00:00:02 SubmitTime=1700000000 NodeList=ib[1-2] BatchHost=ib1
JobId=24 HetJobId=23 HetJobOffset=1 JobName=a b c UserId=root(0) JobState=FAILED Reason=NonZeroExitCode \
Dependency=(null) Restarts=2 ExitCode=0:9 SubmitTime=1700000000 NodeList=(null)
"""


def test_scontrol_is_read() -> None:
    rows = parse_scontrol(SCONTROL)
    assert [(r.leader, r.offset, r.state) for r in rows] == [("23", 0, "RUNNING"), ("23", 1, "FAILED")]
    assert rows[0].name == "a b c" and rows[0].nodes == "ib[1-2]" and rows[0].submitted == 1700000000
    assert rows[1].exit_code == 137


def test_elements_of_an_array_are_jobs_of_their_own() -> None:
    assert [row.leader for row in parse_squeue(squeue_line("41_7", "RUNNING"))] == ["41_7"]
    assert [row.leader for row in parse_sacct(sacct_line("41_[2-3,7%2]", "PENDING"))] == ["41_2", "41_3", "41_7"]
    assert sacct_command(["41_2", "41_3", "9"])[-1] == "--jobs=41,9"
    line = "JobId=43 ArrayJobId=41 ArrayTaskId={} JobName=a UserId=r JobState=PENDING Reason=Resources Dependency="
    assert [row.leader for row in parse_scontrol(line.format("1-2%2"))] == ["41_1", "41_2"]
    assert [row.leader for row in parse_scontrol(line.format("5"))] == ["41_5"]
    assert parse_sacct(sacct_line("41_2.0", "RUNNING")) == []


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Step 5.0 exceeded memory limit (1532 > 1024), being killed",
        "slurmstepd: error: Exceeded job memory limit",
        "srun: error: ib1: task 0: Out Of Memory",
    ],
)
def test_too_little_memory_is_read_from_slurms_words(line: str) -> None:
    assert out_of_memory(f"step 1\n{line}\nsrun: error: ib1: task 0: Killed\n") == line
    assert out_of_memory("rank 3: the memory of node ib1 is 16 GiB\nsrun: error: ib1: task 0: Killed\n") is None
