"""A real Slurm whose daemons and nodes fail: the state is right within 30 s, no job is lost or run twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest
import submitit
from slurm_jobs import (  # noqa: F401 (fixtures)
    THREE,
    Counting,
    executor,
    folder,
    functions_travel_with_the_pickle,
    skip_where_a_requeue_cancels,
    sleeper,
    start,
    until,
)

from holmes_hpc import testbed as beds
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.submission.executor.watcher import WATCHER
from holmes_hpc.submission.lifecycle.progress import report_progress
from holmes_hpc.submission.lifecycle.status import cancel_run, job_of, run_status
from holmes_hpc.submission.plan_job import PlannedJob, submit_plan

pytestmark = [pytest.mark.slurm, pytest.mark.breaking, pytest.mark.usefixtures("testbed", "whole_again")]


@pytest.fixture
def whole_again() -> Iterator[None]:
    """Repair the testbed after each test."""
    yield
    drained = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "drain,drained,draining", "-o", "%N"], capture_output=True, text=True
    ).stdout.split()
    for node in drained:
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
    beds.up()
    WATCHER._down_until.clear()


def pid_of(daemon: str) -> int:
    return int((Path(os.environ["HOLMES_TESTBED"]) / "run" / f"{daemon}.pid").read_text())


def kill(daemon: str, how: int = signal.SIGKILL) -> None:
    os.kill(pid_of(daemon), how)


def all_here(run: RunDirectory, ranks: int = 4) -> bool:
    return len(list((run.path / "here").glob("*"))) == ranks


def test_slurmctld_restarts_during_a_run(folder: Path) -> None:
    run = start(folder, plans.waiting_rank, wait_s=12)
    until(lambda: all_here(run) and run_status(run).state == "running")
    kill("slurmctld", signal.SIGTERM)  # as a service is stopped: it saves its state
    threading.Timer(5, beds.up).start()
    seen = set()
    for _ in range(4):
        seen.add(run_status(run).state)
        time.sleep(0.5)
    assert seen == {"running"}
    assert report_progress(run, job_of(run)) == 0
    assert run.attempt == 1 and run_status(run).state == "completed"


def test_a_submission_waits_for_the_controller_and_happens_once(folder: Path) -> None:
    kill("slurmctld", signal.SIGTERM)  # as a service is stopped: it saves its state
    threading.Timer(4, beds.up).start()
    job = executor(folder, THREE[2:], name="once").submit(sleeper, 0)
    assert job.results() == ["slept"]
    listed = subprocess.run(["squeue", "--states=all", "-h", "-n", "once", "-o", "%i"], capture_output=True, text=True)
    assert listed.stdout.split() == [job.job_id]


def test_without_slurmdbd_the_controller_is_asked(folder: Path) -> None:
    kill("slurmdbd")
    try:
        run = start(folder, plans.waiting_rank, die={"2": "kill"})
        assert report_progress(run, job_of(run)) == 1
        assert job_of(run).state().source == "squeue"
        found = run_status(run)
        assert (found.state, found.failed_rank) == ("failed", 2)
        job = executor(folder, THREE[:2]).submit(sleeper, 0)
        assert job.results() == ["slept"] * 4
        until(lambda: job.slurm_state().state == "COMPLETED")
    finally:
        beds.up()


def test_a_node_that_dies_fails_the_job(folder: Path) -> None:
    run = start(folder, plans.waiting_rank, wait_s=120)
    until(lambda: all_here(run))
    node = run.log_path(3).resolve()  # rank 3's node, as its environment said
    name = re.search(r"roce\d", job_of(run).state("force").nodes.replace("roce[1-2]", "roce2"))
    assert node and name
    began = time.monotonic()
    beds.kill_node(name.group())
    assert report_progress(run, job_of(run)) == 1
    assert time.monotonic() - began < 60
    result = run.read_result()
    assert result is not None and result["state"] == "failed"
    assert name.group() in result["error"] and result["failed_node"] == name.group()
    until(lambda: not _queued(job_of(run).id))  # Slurm requeues such a job by itself


def test_the_batch_scripts_node_dies(folder: Path) -> None:
    """Slurm itself requeues the job. The next attempt finds the failure, and that no restart is allowed."""
    run = start(folder, plans.waiting_rank, wait_s=120, steps_per_attempt=1)
    until(lambda: all_here(run))
    beds.kill_node(expand(job_of(run).state("force").component_nodes[0])[0])
    assert report_progress(run, job_of(run)) == 1
    result = run.read_result()
    assert result is not None and (result["state"], result["writer"], run.attempt) == ("failed", "batch", 1)
    assert "exited without a record" in result["error"]
    until(lambda: not _queued(job_of(run).id))


def _queued(job_id: str) -> bool:
    listed = subprocess.run(["squeue", "-h", "--me", "-o", "%i"], capture_output=True, text=True).stdout.split()
    return any(job.partition("+")[0] == job_id for job in listed)


@pytest.fixture
def low() -> Iterator[str]:
    """Create a partition whose jobs are preempted by others."""
    subprocess.run(
        ["scontrol", "create", "PartitionName=low", "Nodes=ib[1-4],roce[1-4]", "PriorityTier=1", "PreemptMode=REQUEUE"],
        check=True,
    )
    yield "low"
    subprocess.run(["scancel", "-p", "low"], check=False)
    until(lambda: subprocess.run(["scontrol", "delete", "PartitionName=low"], capture_output=True).returncode == 0)


def test_preempted(folder: Path, low: str) -> None:
    """Slurm requeues all components, and the run continues, though no failure is allowed."""
    site = replace(plans.site(), pools=tuple(replace(f, partition=low) for f in plans.site().pools[:2]))
    plan = plans.plan("ib-a", "roce-a", site=site)
    config = {**plans.CONFIG, "wait_s": 5, "steps_per_attempt": 2}
    run = RunDirectory.create(folder / "run", plan_text=plan.to_yaml(), config=config)
    submit_plan(PlannedJob(plan, config, plans.waiting_rank, SlurmSettings(timeout_min=3)), run.path)
    until(lambda: all_here(run))
    urgent = subprocess.run(
        ["sbatch", "--parsable", "-p", "roce", "-N4", "--exclusive", "-t1", "-o/dev/null", "--wrap", "sleep 2"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    code = report_progress(run, job_of(run))
    assert urgent
    result = run.read_result()
    assert result is not None and (code, result["state"], run.attempt) == (0, "completed", 2)


def test_timed_out_and_requeued_by_submitits_protocol(folder: Path) -> None:
    skip_where_a_requeue_cancels()
    job = executor(folder, THREE[:2]).submit(Counting(str(folder / "mark")))
    until(lambda: len(list(folder.glob("mark-0-*"))) == 4)
    job._interrupt(timeout=True)  # USR2, the signal before the time limit
    until(lambda: all(job.task(i).paths.result_pickle.exists() for i in range(4)))
    assert job.results() == ["round 1"] * 4


def test_slurms_own_requeues_count_too(folder: Path) -> None:
    """As after preemption: the function is not called."""
    skip_where_a_requeue_cancels()
    job = executor(folder, THREE[:2], slurmhet_max_requeues=1).submit(Counting(str(folder / "mark")))
    for _ in range(2):
        until(lambda: len(list(folder.glob("mark-0-*"))) == 4)
        for mark in folder.glob("mark-0-*"):
            mark.unlink()
        subprocess.run(["scontrol", "requeue", job.job_id], check=True)
    until(lambda: job.slurm_state().state == "FAILED")
    assert not list(folder.glob("mark-0-*"))
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="requeued 2 times, max_requeues is 1"):
        job.result()


def test_a_plans_job_restarts_after_its_time_limit_while_it_makes_new_steps(folder: Path) -> None:
    run = start(folder, plans.waiting_rank, steps_per_attempt=3, gaining_attempts=2, wait_s=60)
    for attempt in (1, 2, 3):
        until(lambda attempt=attempt: run.attempt == attempt and all_here(run, 4 * attempt))
        subprocess.run(["scancel", "--signal=USR2", job_of(run).id], check=True)
    assert report_progress(run, job_of(run)) == 1
    assert run.attempt == 3 and [m["step"] for m in run.metrics()] == [3, 6]


def test_slurms_time_limit_itself_requeues_a_plans_job(folder: Path) -> None:
    """Slurm sends the signal, some time before two minutes have passed."""
    run = start(folder, plans.waiting_rank, {"timeout_min": 2}, steps_per_attempt=3, wait_s=200)
    began = time.monotonic()
    until(lambda: run.attempt == 2 and run_status(run).state == "running")
    assert time.monotonic() - began > 20
    assert [m["step"] for m in run.metrics()] == [3, 6]
    cancel_run(run)
    assert report_progress(run, job_of(run)) == 1
    until(lambda: run_status(run).state == "cancelled")


def test_a_full_log_disk_is_reported(folder: Path) -> None:
    plan = plans.plan("ib-a", "roce-a")
    run = RunDirectory.create(folder / "run", plan_text=plan.to_yaml(), config=plans.CONFIG)
    run.log_path(2).symlink_to("/dev/full")
    (run.logs / "batch.txt").symlink_to("/dev/full")
    submit_plan(PlannedJob(plan, plans.CONFIG, plans.quick, SlurmSettings(timeout_min=3)), run.path)
    assert report_progress(run, job_of(run)) == 1
    found: Any = run.read_result()
    assert (found["state"], found["failed_rank"], found["failed_node"][:4]) == ("failed", 2, "roce")
    until(lambda: run_status(run).state == "failed")
