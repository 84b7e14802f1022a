"""States and outcomes of a sweep's jobs, read from records of their tasks without unpickling."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from made_runs import make_run
from omegaconf import OmegaConf
from slurm_text import squeue_line

from holmes_hpc import cli
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import RecordError
from holmes_hpc.results.loading.run_row import read_one
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.environment import LEADER
from holmes_hpc.submission.sweeps import job_waiting, jobs, sweep_table
from holmes_hpc.submission.sweeps.job_waiting import Progress, summary_line
from holmes_hpc.submission.sweeps.launcher_settings import (
    LocalLauncherConf,
    SlurmLauncherConf,
    create_executor,
    plan_job_settings,
)
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob, open_manifest
from holmes_hpc.submission.sweeps.sweep_table import SweepRow, collect, row_of, sweep_status


def make_manifest(folder: Path, *ids: str, where: str = "local") -> Manifest:
    manifest = open_manifest(folder)
    folder.mkdir(exist_ok=True)
    for num, job_id in enumerate(ids):
        manifest.put(
            SweepJob(num, (f"+x={num}",), str(num), "plain", where, job_id, ".", digest="d", submitted=time.time())
        )
    return manifest


@pytest.mark.parametrize(
    "value, status, outcome",
    [
        (1.5, JobStatus.COMPLETED, {"state": "completed", "value": 1.5}),
        ({"loss": [1, None]}, JobStatus.COMPLETED, {"state": "completed", "value": {"loss": [1, None]}}),
        (object(), JobStatus.COMPLETED, {"state": "completed"}),
        (ValueError("not yet"), JobStatus.FAILED, {"state": "failed", "error": "ValueError: not yet"}),
    ],
)
def test_task_records_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, status: JobStatus, outcome: dict[str, Any]
) -> None:
    for key, text in {
        LEADER: "41",
        "SUBMITIT_EXECUTOR": "slurmhet",
        "SUBMITIT_FOLDER": str(tmp_path),
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
    }.items():
        monkeypatch.setenv(key, text)
    jobs.write_outcome(JobReturn(_return_value=value, status=status))
    assert json.loads((tmp_path / "41_outcome.json").read_text()) == outcome
    monkeypatch.setenv("SLURM_PROCID", "1")
    (tmp_path / "41_outcome.json").unlink()
    jobs.write_outcome(JobReturn(_return_value=value, status=status))
    assert not (tmp_path / "41_outcome.json").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.update(jobs=5),
        lambda data: data.update(jobs=[5]),
        lambda data: data.update(jobs=[{"num": 0}]),
        lambda data: data.update(created="yesterday"),
        lambda data: data.update(programs=[1]),
        lambda data: data["jobs"][0].update(folder=None),
        lambda data: data["jobs"][0].update(job_id=[41]),
        lambda data: data["jobs"][0].update(overrides=[{}]),
        lambda data: data["jobs"][0].update(unknown=1),
    ],
)
def test_damaged_manifest_is_a_one_line_error(damage: Callable[[Any], None], tmp_path: Path) -> None:
    path = make_manifest(tmp_path, "41").path
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=r"not a sweep's manifest: .*restore the file"):
        open_manifest(tmp_path)


def test_status_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs._LenientUnpickler, "load", lambda _: pytest.fail("a result was unpickled"))
    make_manifest(tmp_path / "sweep", "41", "42", "43")
    for job_id, state in (("41", "completed"), ("42", "failed")):
        (tmp_path / "sweep" / f"{job_id}_0_result.pkl").write_bytes(b"whatever")
        (tmp_path / "sweep" / f"{job_id}_outcome.json").write_text(json.dumps({"state": state, "error": "of its own"}))
    rows = sweep_status(tmp_path / "sweep")
    assert [row.state for row in rows] == ["completed", "failed", "failed"] and rows[1].error == "of its own"
    (tmp_path / "sweep" / "41_outcome.json").write_text('{"state": "completed", "value": {"loss": 2}}')
    assert collect(tmp_path / "sweep")[0]["final"] == {"loss": 2}


@pytest.mark.parametrize(("losses", "is_by_loss"), [((2.5, 2.5), False), ((2.5, 2.4), True)])
def test_a_ranking_by_loss_is_offered_only_if_losses_differ(
    losses: tuple[float, ...], is_by_loss: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = open_manifest(tmp_path / "sweep")
    for num, loss in enumerate(losses):
        run = make_run(tmp_path / "sweep" / str(num), steps=2)
        run.append_metrics({**run.metrics()[-1], "step": 3, "loss": loss})
        manifest.put(SweepJob(num, (f"x={num}",), str(num), "plan", "local", "41", str(num)))
    Progress(manifest, [SimpleNamespace(entry=job) for job in manifest.jobs]).conclude()  # type: ignore[misc]
    assert ("--by loss" in capfd.readouterr().err) == is_by_loss


@pytest.mark.parametrize("max_bytes", [10**6, 0])
def test_rate_is_the_one_of_the_report(
    max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rate is the mean over all steps after the warm-up, not that of the last, slow step."""
    monkeypatch.setattr(sweep_table, "MAX_GROWING_BYTES", max_bytes)
    run = make_run(tmp_path / "sweep" / "0", steps=12)
    last_line = run.metrics()[-1]
    run.append_metrics({**last_line, "step": 12, "step_time_s": 9.0, "tokens_per_s": last_line["tokens_per_s"] / 9})
    manifest = open_manifest(tmp_path / "sweep")
    manifest.put(SweepJob(0, (), "0", "plan", "local", "41", "0", digest="d", submitted=time.time()))
    (row,), (cell, _) = sweep_status(tmp_path / "sweep"), read_one(run, "0")
    assert (
        row.tokens_per_s == pytest.approx(cell["tokens_per_s"]) != pytest.approx(last_line["tokens_per_s"] / 9, rel=0.5)
    )
    final = collect(tmp_path / "sweep")[0]["final"]
    assert final["step_time_s"] == pytest.approx(cell["step_time_s"])
    assert final["tokens_per_s"] == row.tokens_per_s
    Progress(manifest, [SimpleNamespace(entry=manifest.jobs[0])]).conclude()  # type: ignore[list-item]
    assert f"`holmes report {tmp_path / 'sweep'}` compares" in capfd.readouterr().err
    run.result_path.unlink()  # as if it still ran
    running_row = row_of(manifest, manifest.jobs[0], JobState("41", "RUNNING"))
    assert running_row.tokens_per_s == pytest.approx(cell["tokens_per_s"]) and not running_row.why
    run.metrics_path.unlink()
    assert row_of(manifest, manifest.jobs[0], JobState("RUNNING")).why == "the nodes start the ranks"


@pytest.mark.integration
def test_collect_shows_values_and_cancel_skips_ended_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    make_manifest(tmp_path / "sweep", "41", "42", where="slurm")
    (tmp_path / "sweep" / "41_0_result.pkl").touch()
    (tmp_path / "sweep" / "41_outcome.json").write_text('{"state": "completed", "value": 12.5}')
    line = squeue_line("42", "PENDING", name="", submit=time.time(), reason="Resources").strip()
    fake_slurm.answer("squeue", f"cat <<'E'\n{line}\nE")
    fake_slurm.answer("scancel", "exit 0")

    def holmes(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["holmes", *args, str(tmp_path / "sweep")])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        output = capfd.readouterr()
        assert not exit_info.value.code, output.err
        return output.out + output.err

    table = holmes("sweep", "collect")
    assert "value" in table and "12.5" in table
    for command in (("sweep", "status"), ("status",)):
        assert "pending (Resources)" in holmes(*command)
    assert "cancelled 1 of 2 jobs" in holmes("sweep", "cancel")
    assert fake_slurm.calls("scancel") == [["42"]]


def test_progress_logs_states_steps_and_pending_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def row(num: int, state: str, step: int | None = None, loss: float | None = None, why: str = "") -> SweepRow:
        return SweepRow(num, (f"x={num}",), str(num), state, "", step, loss, None, None, "", why)

    rows = [
        row(0, "completed", 9, 2.0),
        row(1, "running", 5, 3.25),
        row(2, "running", 4),
        row(3, "pending", why="Priority"),
    ]
    assert (
        summary_line(rows) == "2 running, 1 completed, 1 pending: #1 step 5, loss 3.25; #2 step 4; #3 waits (Priority)"
    )
    now = [100.0]
    monkeypatch.setattr(job_waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Progress, "rows", lambda _: rows)
    caplog.set_level("INFO")
    with Progress(make_manifest(tmp_path), []) as progress:
        for now[0] in (101.0, 103.0, 104.0, 106.0, 108.0):  # a change, then the same states again
            progress.show()
        rows[3] = row(3, "running")
        now[0] = 111.0
        progress.show()
        for now[0] in (113.0, 116.0, 119.0, 122.0):  # without changes it logs after ten seconds
            progress.show()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "2 running, 1 completed, 1 pending",
        "3 running, 1 completed",
        "3 running, 1 completed",
    ]


@pytest.mark.parametrize(
    "setting, where, exclusive",
    [(None, "slurm", True), (False, "slurm", False), ("user", "slurm", "user"), (None, "local", None)],
)
def test_training_jobs_are_exclusive_by_default(setting: Any, where: str, exclusive: Any) -> None:
    conf = OmegaConf.structured(SlurmLauncherConf if where == "slurm" else LocalLauncherConf)
    config = OmegaConf.create({"hydra": {"launcher": conf, "sweep": {"dir": "x"}, "job": {"name": "y"}}})
    assert plan_job_settings(config, SlurmSettings(exclusive=setting), where).exclusive == exclusive


@pytest.mark.parametrize(
    "timeout_min, delay, signal", [(60, 120, "USR2@120"), (1, 120, None), (1, 30, "USR2@30"), (2, 120, "USR2@30")]
)
def test_default_signal_delay_is_shortened_in_short_jobs(
    tmp_path: Path, fake_slurm: Any, timeout_min: int, delay: int, signal: str | None
) -> None:
    conf = OmegaConf.structured(SlurmLauncherConf(timeout_min=timeout_min, signal_delay_s=delay))
    config = OmegaConf.create({"hydra": {"launcher": conf, "sweep": {"dir": str(tmp_path)}, "job": {"name": "y"}}})
    request = create_executor(config, "slurmhet")._executor.request()
    assert dict(request.options()).get("signal") == signal


def test_waiting_row_has_its_reason(tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, "41")
    row = row_of(manifest, manifest.jobs[0], JobState("PENDING", "Resources", start=time.time() + 60))
    assert row.why.startswith("Resources, starts about ")
