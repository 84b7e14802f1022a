"""What is told of a sweep's jobs: from notes that their tasks left, without unpickling anything."""

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
from holmes_hpc.submission.sweeps import job_returns, jobs, status_table
from holmes_hpc.submission.sweeps.job_returns import Progress, in_a_line
from holmes_hpc.submission.sweeps.launcher_settings import (
    LocalLauncherConf,
    SlurmLauncherConf,
    executor_of,
    settings_of_plan,
)
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob, open_manifest
from holmes_hpc.submission.sweeps.status_table import SweepRow, collect, row_of, sweep_status


def made(folder: Path, *ids: str, where: str = "local") -> Manifest:
    manifest = open_manifest(folder)
    folder.mkdir(exist_ok=True)
    for num, job_id in enumerate(ids):
        manifest.put(
            SweepJob(num, (f"+x={num}",), str(num), "plain", where, job_id, ".", digest="d", submitted=time.time())
        )
    return manifest


@pytest.mark.parametrize(
    "value, status, noted",
    [
        (1.5, JobStatus.COMPLETED, {"state": "completed", "value": 1.5}),
        ({"loss": [1, None]}, JobStatus.COMPLETED, {"state": "completed", "value": {"loss": [1, None]}}),
        (object(), JobStatus.COMPLETED, {"state": "completed"}),
        (ValueError("not yet"), JobStatus.FAILED, {"state": "failed", "error": "ValueError: not yet"}),
    ],
)
def test_a_task_notes_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, status: JobStatus, noted: dict[str, Any]
) -> None:
    for key, text in {
        LEADER: "41",
        "SUBMITIT_EXECUTOR": "slurmhet",
        "SUBMITIT_FOLDER": str(tmp_path),
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
    }.items():
        monkeypatch.setenv(key, text)
    jobs.note_outcome(JobReturn(_return_value=value, status=status))
    assert json.loads((tmp_path / "41_outcome.json").read_text()) == noted
    monkeypatch.setenv("SLURM_PROCID", "1")
    (tmp_path / "41_outcome.json").unlink()
    jobs.note_outcome(JobReturn(_return_value=value, status=status))
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
def test_a_manifest_that_is_none_is_one_line(damage: Callable[[Any], None], tmp_path: Path) -> None:
    path = made(tmp_path, "41").path
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=r"not a manifest: .*restore the file"):
        open_manifest(tmp_path)


def test_a_status_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs._Lenient, "load", lambda _: pytest.fail("a result was unpickled"))
    made(tmp_path / "sweep", "41", "42", "43")
    for job_id, state in (("41", "completed"), ("42", "failed")):
        (tmp_path / "sweep" / f"{job_id}_0_result.pkl").write_bytes(b"whatever")
        (tmp_path / "sweep" / f"{job_id}_outcome.json").write_text(json.dumps({"state": state, "error": "of its own"}))
    rows = sweep_status(tmp_path / "sweep")
    assert [row.state for row in rows] == ["completed", "failed", "failed"] and rows[1].error == "of its own"
    (tmp_path / "sweep" / "41_outcome.json").write_text('{"state": "completed", "value": {"loss": 2}}')
    assert collect(tmp_path / "sweep")[0]["final"] == {"loss": 2}


@pytest.mark.parametrize("whole", [10**6, 0])
def test_a_rate_is_the_reports_and_not_the_last_steps(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last step, here a slow one, is no run's rate: after the warm-up, over all."""
    monkeypatch.setattr(status_table, "WHOLE", whole)
    run = make_run(tmp_path / "sweep" / "0", steps=12)
    last = run.metrics()[-1]
    run.append_metrics({**last, "step": 12, "step_time_s": 9.0, "tokens_per_s": last["tokens_per_s"] / 9})
    manifest = open_manifest(tmp_path / "sweep")
    manifest.put(SweepJob(0, (), "0", "plan", "local", "41", "0", digest="d", submitted=time.time()))
    (row,), (cell, _) = sweep_status(tmp_path / "sweep"), read_one(run, "0")
    assert row.tokens_per_s == pytest.approx(cell["tokens_per_s"]) != pytest.approx(last["tokens_per_s"] / 9, rel=0.5)
    final = collect(tmp_path / "sweep")[0]["final"]
    assert final["step_time_s"] == pytest.approx(cell["step_time_s"])
    assert final["tokens_per_s"] == row.tokens_per_s
    Progress(manifest, [SimpleNamespace(entry=manifest.jobs[0])]).conclude()  # type: ignore[list-item]
    assert f"`holmes report {tmp_path / 'sweep'} --by loss`" in capfd.readouterr().err
    run.result_path.unlink()  # as if it still ran
    growing = row_of(manifest, manifest.jobs[0], JobState("41", "RUNNING"))
    assert growing.tokens_per_s == pytest.approx(cell["tokens_per_s"]) and not growing.why
    run.metrics_path.unlink()
    assert row_of(manifest, manifest.jobs[0], JobState("RUNNING")).why == "the nodes start the ranks"


@pytest.mark.integration
def test_values_are_a_column_and_cancel_ends_what_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "sweep", "41", "42", where="slurm")
    (tmp_path / "sweep" / "41_0_result.pkl").touch()
    (tmp_path / "sweep" / "41_outcome.json").write_text('{"state": "completed", "value": 12.5}')
    line = squeue_line("42", "PENDING", name="", submit=time.time(), reason="Resources").strip()
    fake_slurm.answer("squeue", f"cat <<'E'\n{line}\nE")
    fake_slurm.answer("scancel", "exit 0")

    def holmes(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["holmes", *words, str(tmp_path / "sweep")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capfd.readouterr()
        assert not ended.value.code, said.err
        return said.out + said.err

    said = holmes("sweep", "collect")
    assert "value" in said and "12.5" in said
    for verb in (("sweep", "status"), ("status",)):
        assert "pending (Resources)" in holmes(*verb)
    assert "cancelled 1 of 2 jobs" in holmes("sweep", "cancel")
    assert fake_slurm.calls("scancel") == [["42"]]


def test_progress_says_states_steps_and_why_jobs_wait(
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
    assert in_a_line(rows) == "2 running, 1 completed, 1 pending: #1 step 5, loss 3.25; #2 step 4; #3 waits (Priority)"
    now = [100.0]
    monkeypatch.setattr(job_returns.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Progress, "rows", lambda _: rows)
    caplog.set_level("INFO")
    with Progress(made(tmp_path), []) as shown:
        for now[0] in (101.0, 103.0, 104.0, 106.0, 108.0):  # a change, then the same again
            shown.show()
        rows[3] = row(3, "running")
        now[0] = 111.0
        shown.show()
        for now[0] in (113.0, 116.0, 119.0, 122.0):  # no change: after ten seconds it says so
            shown.show()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "2 running, 1 completed, 1 pending",
        "3 running, 1 completed",
        "3 running, 1 completed",
    ]


@pytest.mark.parametrize(
    "given, where, exclusive",
    [(None, "slurm", True), (False, "slurm", False), ("user", "slurm", "user"), (None, "local", None)],
)
def test_training_jobs_of_a_sweep_share_no_nodes_unless_they_may(given: Any, where: str, exclusive: Any) -> None:
    conf = OmegaConf.structured(SlurmLauncherConf if where == "slurm" else LocalLauncherConf)
    config = OmegaConf.create({"hydra": {"launcher": conf, "sweep": {"dir": "x"}, "job": {"name": "y"}}})
    assert settings_of_plan(config, SlurmSettings(exclusive=given), where).exclusive == exclusive


@pytest.mark.parametrize(
    "timeout_min, delay, signal", [(60, 120, "USR2@120"), (1, 120, None), (1, 30, "USR2@30"), (2, 120, "USR2@30")]
)
def test_hydras_default_delay_is_no_wish_in_a_short_job(
    tmp_path: Path, fake_slurm: Any, timeout_min: int, delay: int, signal: str | None
) -> None:
    conf = OmegaConf.structured(SlurmLauncherConf(timeout_min=timeout_min, signal_delay_s=delay))
    config = OmegaConf.create({"hydra": {"launcher": conf, "sweep": {"dir": str(tmp_path)}, "job": {"name": "y"}}})
    made = executor_of(config, "slurmhet")._executor.request()
    assert dict(made.options()).get("signal") == signal


def test_a_waiting_row_has_its_reason(tmp_path: Path) -> None:
    manifest = made(tmp_path, "41")
    row = row_of(manifest, manifest.jobs[0], JobState("PENDING", "Resources", start=time.time() + 60))
    assert row.why.startswith("Resources, starts about ")
