"""Ctrl-C and errors during sbatch: every job that Slurm accepted is recorded or cancelled."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import plans
import pytest

from holmes_hpc.cli.submission_steps import create_and_submit
from holmes_hpc.config.composition import load
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import interrupt_here, slurm, uninterrupted
from holmes_hpc.submission.executor.slurmhet import SlurmHetExecutor
from holmes_hpc.submission.executor.submit import Refused, SubmissionUnknown, submit_file
from holmes_hpc.submission.plan_job import PlannedJob, submit_plan

INTERRUPTED = """
for a in "$@"; do [ "$a" = --test-only ] && exit 0; done
kill -INT $PPID; sleep 0.2; echo 41"""
REFUSED = 'echo "sbatch: error: Batch job submission failed: Invalid account" >&2; exit 1'
SILENT = 'echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1'


def test_interrupt_is_deferred_until_a_safe_point() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        reached = True
    assert reached
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        interrupt_here()
        raise AssertionError("not interrupted")
    interrupt_here()  # the interrupt was raised once
    with uninterrupted():
        pass


@pytest.mark.integration
def test_slurm_commands_are_shielded_from_ctrl_c(fake_slurm: Any) -> None:
    fake_slurm.answer("sbatch", "ps -o pgid= -p $$; echo $$")
    group, pid = slurm("sbatch").out.split()
    assert group == pid


@pytest.mark.integration
def test_interrupted_executor_submission_is_cancelled(fake_slurm: Any, tmp_path: Path) -> None:
    fake_slurm.answer("sbatch", INTERRUPTED)
    fake_slurm.answer("scancel", "exit 0")
    with pytest.raises(KeyboardInterrupt):
        SlurmHetExecutor(tmp_path / "log", components=[{"partition": "ib"}]).submit(print)
    assert fake_slurm.calls("scancel") == [["41"]]


@pytest.mark.integration
def test_interrupted_plan_submission_is_recorded(fake_slurm: Any, tmp_path: Path) -> None:
    fake_slurm.answer("sbatch", INTERRUPTED)
    run = RunDirectory.create(tmp_path / "run", plan_text=plans.plan("ib-a").to_yaml(), config=plans.CONFIG)
    with pytest.raises(KeyboardInterrupt):
        submit_plan(PlannedJob(plans.plan("ib-a"), plans.CONFIG, plans.quick, SlurmSettings()), run.path)
    assert run.read_run()["slurm"]["job_id"] == 41 and fake_slurm.calls("scancel") == []


@pytest.mark.integration
def test_job_that_cannot_be_recorded_is_cancelled(
    fake_slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    fake_slurm.answer("sbatch", "echo 41")
    run = RunDirectory.create(tmp_path / "run", plan_text=plans.plan("ib-a").to_yaml(), config=plans.CONFIG)
    monkeypatch.setattr(RunDirectory, "update_run", raise_disk_full)
    with pytest.raises(OSError, match="No space"):
        submit_plan(PlannedJob(plans.plan("ib-a"), plans.CONFIG, plans.quick, SlurmSettings()), run.path)
    assert fake_slurm.calls("scancel") == [["41"]]


@pytest.mark.integration
def test_retries_of_sbatch_can_be_interrupted(fake_slurm: Any, tmp_path: Path) -> None:
    fake_slurm.answer("sbatch", 'kill -INT $PPID; echo "Connection refused" >&2; exit 1')
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        submit_file(tmp_path / "x.sh", "holmes-1")
    assert len(fake_slurm.calls("sbatch")) == 1


@pytest.mark.integration
def test_unknown_outcome_differs_from_a_refusal(fake_slurm: Any, tmp_path: Path) -> None:
    fake_slurm.answer("sbatch", SILENT)
    fake_slurm.answer("squeue", SILENT)
    with pytest.raises(SubmissionUnknown, match="so the job may exist"):
        submit_file(tmp_path / "x.sh", "holmes-1", patience_s=0.1)
    fake_slurm.answer("sbatch", REFUSED)
    with pytest.raises(Refused, match="Invalid account") as refused:
        submit_file(tmp_path / "x.sh", "holmes-1")
    assert not isinstance(refused.value, SubmissionUnknown)


@pytest.mark.integration
@pytest.mark.parametrize("sbatch, is_kept", [(INTERRUPTED, True), (REFUSED, False)])
def test_run_is_kept_unless_slurm_refused_it(
    fake_slurm: Any, tmp_path: Path, sbatch: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.answer("sbatch", sbatch)
    plan = plans.plan("ib-a")
    run = RunDirectory.create(
        tmp_path / "run", plan_text=plan.to_yaml(), config={**plans.CONFIG, "launcher": {"kind": "slurm"}, "slurm": {}}
    )
    monkeypatch.setattr("holmes_hpc.cli.submission_steps.create.create_run", lambda *_, **__: run)
    with pytest.raises(KeyboardInterrupt if is_kept else SubmissionError):
        create_and_submit(plan, load(), [])
    assert run.exists() is is_kept
    assert not is_kept or run.read_run()["slurm"]["job_id"] == 41
