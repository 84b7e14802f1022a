"""Components as jobs of their own on the testbed: they join and leave, and every step is made once."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import interruptions
import pytest
from faults import until

from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.submission.lifecycle.status import run_status

pytestmark = [pytest.mark.slurm, pytest.mark.breaking]
STEPS = 120
MODEL = ("model.layers=4", "batch.global_size=16")
PACE = "train.pace_layer_ms=20"
OPTIONS = ("elastic.enabled=true", "elastic.members=true", "elastic.spares=0", f"train.steps={STEPS}")
FIRST_STEP_S, JOIN_S, GAP_S, TAKEOVER_S = 15.0, 20.0, 8.0, 25.0
BUSY_S = 40


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    """Return a folder with the plan of a model that two fabrics train faster than one."""
    path = root / "members"
    path.mkdir()
    interruptions.make_plan(path / "plan.yaml", *MODEL)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> interruptions.Figures:
    """Return the figures of one heterogeneous job."""
    run = interruptions.submit(folder / "heterogeneous", f"train.steps={STEPS}")
    interruptions.follow_to_end(run)
    return interruptions.figures(run)


@pytest.fixture(scope="module")
def slow_folder(folder: Path) -> Path:
    """Return a folder with a plan of twice as long steps, so that a fabric still pays when it joins late."""
    path = folder / "slow"
    path.mkdir()
    interruptions.make_plan(path / "plan.yaml", *MODEL, PACE)
    return path


def lines_of(run: RunDirectory) -> list[dict]:
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()] if run.metrics_path.exists() else []


def sbatch(*arguments: str) -> str:
    command = ["sbatch", "--parsable", "--output=/dev/null", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def scontrol(*arguments: str, command: str = "scontrol") -> None:
    subprocess.run([command, *arguments], check=True, capture_output=True)


def squeue(job: str, field: str = "%T") -> str:
    """Return a field of a job in the queue, after a moment, because tests ask again and again."""
    time.sleep(0.2)
    command = ["squeue", "-h", "-j", job, "-o", field]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def jobs_of(run: RunDirectory) -> list[str]:
    return [str(job) for job in run.read_run()["slurm"]["members"]]


def check_steps(run: RunDirectory, expected: interruptions.Figures, attempts: int) -> None:
    """Check that each step was made once and has the expected loss, and print the gaps between attempts."""
    lines, log = lines_of(run), (run.logs / "batch.txt").read_text()
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)], log
    changes = [(a, b) for a, b in pairwise(lines) if a["attempt"] != b["attempt"]]
    gaps = [round(b["time"] - a["time"], 1) for a, b in changes]
    differences = [abs(line["loss"] / expected[line["step"]][0] - 1) for line in lines]
    print(f"{run.name}: gaps {gaps} s, largest relative difference of losses {max(differences):.1e}")
    assert lines[-1]["attempt"] == attempts, log
    assert max(differences) < 1e-5 and max(gaps) < (TAKEOVER_S if "takes its place" in log else GAP_S)
    assert run_status(run).state == "completed"


def test_training_starts_on_what_is_free_and_the_other_fabric_joins(
    folder: Path, expected: interruptions.Figures
) -> None:
    busy = sbatch("-p", "roce", "-N4", "--exclusive", f"--wrap=sleep {BUSY_S}")
    until(lambda: squeue(busy) == "RUNNING", "the other job")
    submitted = time.time()
    run = interruptions.submit(folder / "joins", *OPTIONS)
    until(lambda: lines_of(run), "the first step")
    assert run_status(run).state == "running"
    scontrol(busy, command="scancel")
    freed = time.time()
    until(lambda: lines_of(run)[-1]["attempt"] == 2, "the second attempt")
    interruptions.follow_to_end(run)
    first, joined = lines_of(run)[0]["time"], next(line["time"] for line in lines_of(run) if line["attempt"] == 2)
    print(f"first step {first - submitted:.1f} s after submission, with RoCE {joined - freed:.1f} s after it was free")
    check_steps(run, expected, 2)
    assert first - submitted < FIRST_STEP_S and joined - freed < JOIN_S
    assert interruptions.figures(by_hand(run)) == interruptions.figures(run)


def by_hand(run: RunDirectory) -> RunDirectory:
    """Return a run of one heterogeneous job at a time, which changes plans by hand after the same step."""
    last = max(line["step"] for line in lines_of(run) if line["attempt"] == 1)
    folder = run.path.with_name("by-hand")
    folder.mkdir()
    shutil.copy(run.path / "plan-1.yaml", folder / "plan.yaml")
    changed = interruptions.submit(folder / "run", f"train.steps={last}", f"train.lr_decay_steps={STEPS}")
    interruptions.follow_to_end(changed)
    resume = [interruptions.HOLMES, "resume", str(changed.path), f"train.steps={STEPS}"]
    subprocess.run([*resume, "--plan", str(run.path / "plan.yaml")], check=True, capture_output=True)
    assert [line["attempt"] for line in lines_of(changed)] == [line["attempt"] for line in lines_of(run)]
    return changed


@pytest.mark.parametrize("member", [1, 0], ids=["RoCE", "InfiniBand"])
@pytest.mark.parametrize("how", ["scancel", "requeue"])
def test_a_fabric_leaves_without_a_lost_step(
    how: str, member: int, folder: Path, expected: interruptions.Figures
) -> None:
    """Check both jobs, because either may coordinate."""
    run = interruptions.submit(folder / f"{how}-{member}", *OPTIONS)
    until(lambda: len(lines_of(run)) > 10, "step 10")
    job = jobs_of(run)[member]
    scontrol(job, command="scancel") if how == "scancel" else scontrol("requeue", job)
    interruptions.follow_to_end(run)
    check_steps(run, expected, 3 if how == "requeue" else 2)


def member_of(run: RunDirectory, coordinates: bool) -> str:
    """Wait for some steps. Return the job whose batch script coordinates, or the other one."""
    until(lambda: len(lines_of(run)) > 4, "step 4")
    (published,) = run.path.glob("submission/*_coordinator.json")
    is_roce = json.loads(published.read_text())[2].startswith("roce")
    return jobs_of(run)[is_roce == coordinates]


@contextlib.contextmanager
def changed(kind: str, name: str, change: str, change_back: str) -> Iterator[None]:
    """Change a partition or a node for a while."""
    scontrol("update", f"{kind}={name}", *change.split())
    try:
        yield
    finally:
        scontrol("update", f"{kind}={name}", *change_back.split())


def preempt(run: RunDirectory, job: str) -> None:
    """Let a job of higher priority take all nodes of the job's partition, after 5 s of grace."""
    partition = squeue(job, "%P")
    with changed("PartitionName", partition, "PreemptMode=REQUEUE GraceTime=5", "PreemptMode=OFF GraceTime=0"):
        scontrol("create", "PartitionName=urgent", f"Nodes={partition}[1-4]", "PriorityTier=20")
        try:
            urgent = sbatch("-p", "urgent", "-N4", "--exclusive", "--wrap=sleep 3")
            until(lambda: not squeue(urgent), "the end of the urgent job")
        finally:
            scontrol("delete", "PartitionName=urgent")


def near_limit(run: RunDirectory, job: str) -> None:
    """Shorten the limit to two minutes. Slurm signals within 30 s, and the job asks for its requeue."""
    scontrol("update", f"JobId={job}", "TimeLimit=2")
    until(lambda: squeue(job) == "PENDING", "the requeue")
    scontrol("update", f"JobId={job}", "TimeLimit=60")


def close_partition(run: RunDirectory, job: str) -> None:
    """Requeue the job while its partition is down."""
    with changed("PartitionName", squeue(job, "%P"), "State=DOWN", "State=UP"):
        scontrol("requeue", job)
        until(lambda: "1 of 2 jobs wait: PartitionDown" in run_status(run).why, "the wait for the partition")


def drain(run: RunDirectory, job: str) -> None:
    """Drain a node of the job, which goes on. Requeued, the job gets another node."""
    node = expand(squeue(job, "%N"))[-1]
    with changed("NodeName", node, "State=DRAIN Reason=test", "State=RESUME"):
        until(lambda: len(lines_of(run)) > 10, "step 10")
        assert lines_of(run)[-1]["attempt"] == 1
        scontrol("requeue", job)
        until(lambda: squeue(job) == "RUNNING" and node not in expand(squeue(job, "%N")), "the other node")


@pytest.mark.parametrize(
    ("event", "coordinates"),
    [(preempt, False), (preempt, True), (near_limit, True), (close_partition, False), (drain, False)],
)
def test_a_fabric_that_slurm_takes_joins_again(
    event: Callable[[RunDirectory, str], None], coordinates: bool, slow_folder: Path, expected: interruptions.Figures
) -> None:
    run = interruptions.submit(slow_folder / f"{event.__name__}-{coordinates}", *OPTIONS, PACE)
    event(run, member_of(run, coordinates))
    interruptions.follow_to_end(run)
    check_steps(run, expected, 3)


def test_cancelling_the_run_ends_all_members(folder: Path) -> None:
    run = interruptions.submit(folder / "cancelled", *OPTIONS)
    until(lambda: lines_of(run), "the first step")
    subprocess.run([interruptions.HOLMES, "cancel", str(run.path)], check=True, capture_output=True)
    until(lambda: run_status(run).ended, "the end")
    assert run_status(run).state == "cancelled"
    jobs = ",".join(jobs_of(run))
    until(lambda: not squeue(jobs), "the end of all jobs")
