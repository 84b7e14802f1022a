"""Slurm's answers about jobs as rows, and the rows of a heterogeneous job as one state."""

from __future__ import annotations

import pytest
from slurm_text import sacct_line, squeue_line

from holmes_hpc.slurm.job_queries import parse_sacct, parse_scontrol, parse_squeue
from holmes_hpc.slurm.job_states import join


@pytest.mark.parametrize("states, joined", [
    (["COMPLETED", "COMPLETED"], "COMPLETED"), (["COMPLETED", "FAILED"], "FAILED"), (["FAILED", "CANCELLED"], "FAILED"),
    (["COMPLETED", "CANCELLED by 0"], "CANCELLED"), (["RUNNING", "CANCELLED by 0"], "RUNNING"),
    (["COMPLETED", "RUNNING"], "RUNNING"), (["PENDING", "PENDING"], "PENDING"), (["NODE_FAIL", "FAILED"], "NODE_FAIL"),
    (["COMPLETED", "COMPLETING"], "COMPLETING"), (["TIMEOUT", "TIMEOUT"], "TIMEOUT"),
    (["OUT_OF_MEMORY", "FAILED"], "OUT_OF_MEMORY")])
def test_components_are_joined(states: list[str], joined: str) -> None:
    text = "".join(sacct_line(f"12+{i}", s) for i, s in enumerate(states))
    found = join(parse_sacct(text))
    assert found.state == joined and len(found.components) == len(states)


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
    assert join(rows).restarts == 2 and rows[1].exit_code == 9
