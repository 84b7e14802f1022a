"""Status, resume and sweeps with damaged records, and with records of other users or machines."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import psutil
import pytest

from holmes_hpc.config.composition import load, with_overrides
from holmes_hpc.config.configuration import recorded as read_back
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError, RecordError, SubmissionError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.schema import make
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.executor.watcher import JobIdentity, StateWatcher
from holmes_hpc.submission.lifecycle import status as track
from holmes_hpc.submission.lifecycle.outcome import build_result
from holmes_hpc.submission.plan_job import plan_executor
from holmes_hpc.submission.sweeps import jobs as sweep
from holmes_hpc.submission.sweeps.job_waiting import Progress
from holmes_hpc.submission.sweeps.launcher import HolmesLauncher
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob
from holmes_hpc.submission.sweeps.sweep_table import row_of

PLAN = plans.plan("ib-a", "roce-a")


def run_with(path: Path, result: dict[str, Any] | str | None = None, **record: Any) -> RunDirectory:
    run = RunDirectory.create(path, plan_text=PLAN.to_yaml(), config={"train": {"steps": 9}}, plan_id=PLAN.id, **record)
    run.start_attempt({})
    if result is not None:
        run.result_path.write_text(result if isinstance(result, str) else json.dumps(result))
    return run


def test_a_run_without_a_job_has_the_state_of_its_result(tmp_path: Path) -> None:
    """It was started with python -m holmes_hpc.train or torchrun, which record no job."""
    run = run_with(tmp_path / "a")
    assert track.run_status(run).state == "not_submitted"
    run.write_result({"state": "failed", "error": "rank 0: no"}, writer="follower")
    found = track.run_status(run)
    assert (found.state, found.error, found.ended) == ("failed", "rank 0: no", True)


def test_the_status_shows_what_a_job_does_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path / "a", slurm={"job_id": "7"})
    state = JobState("RUNNING")
    monkeypatch.setattr(track, "job_of", lambda run: SimpleNamespace(id="7", state=lambda mode: state))
    assert track.run_status(run).why == "the nodes start the ranks"
    run.log_path(0).touch()
    assert track.run_status(run).why == "ranks load torch and Megatron-Core"
    run.log_path(0).write_text("4 ranks met\n")
    assert track.run_status(run).why == "ranks are setting up"
    run.append_metrics({"step": 1, "loss": 5.0, "step_time_s": 1.0, "attempt": 1})
    assert track.run_status(run).why == ""


def test_nothing_is_written_into_a_run_that_other_users_may_write(tmp_path: Path) -> None:
    """Their links could redirect it."""
    ended = JobState("FAILED", exit_code=1)
    run = run_with(tmp_path / "run")
    run.path.chmod(0o777)
    assert track.record_end(run, ended)["state"] == "failed" and not run.result_path.exists()
    run.path.chmod(0o755)
    assert track.record_end(run, ended)["state"] == "failed" and run.result_path.exists()


@pytest.mark.parametrize(
    ("result", "record", "state"),
    [
        ({"state": "completed", "attempt": 1}, {}, "completed"),
        ({"attempt": 1}, {}, "not_submitted"),
        ("{}", {"slurm": 41}, "not_submitted"),
        (None, {"local": {"started": 5}}, "not_submitted"),
        (None, {"local": {"pid": 5}}, "unknown"),
        ({"state": "later", "version": 99}, {}, "unreadable"),
    ],
)
def test_a_damaged_record_among_others_becomes_a_row(
    tmp_path: Path, result: Any, record: dict[str, Any], state: str
) -> None:
    odd, good = run_with(tmp_path / "odd", result, **record), run_with(tmp_path / "good")
    good.write_result({"state": "completed"})
    assert [s.state for s in track.run_statuses([odd, good])] == [state, "completed"]
    if state == "unreadable":
        with pytest.raises(RecordError, match="99"):
            track.run_status(odd)


def test_slurm_is_not_asked_about_an_ended_job_whose_id_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reinstalled Slurm counts from 1: the record of an old run must not end the new one."""
    old, new = (run_with(tmp_path / name, slurm={"job_id": 7, "submitted": 5.0}) for name in ("old", "new"))
    old.write_result({"state": "completed"})
    asked: list[RunDirectory] = []
    monkeypatch.setattr(track, "job_of", lambda run: asked.append(run))
    monkeypatch.setattr(track, "_status", lambda run, record, job, state, _: (run, state.state, track._job_id(record)))
    assert track.run_statuses([new, old]) == [(new, "NOT_SUBMITTED", "7"), (old, "COMPLETED", "7")]
    assert asked == [new]


def test_the_watcher_reports_that_it_dropped_another_jobs_state() -> None:
    watcher = StateWatcher()
    assert [watcher.set_identity("7", JobIdentity(name)) for name in ("a", "a", "b", "a")] == [False, False, True, True]


def test_following_logs_ends_with_the_job_even_without_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track, "run_status", lambda run, mode: track.Status("a", "a", "7", states.pop(0)))
    states = ["pending", "cancelled"]
    has_ended = track.end_detector(run_with(tmp_path / "a"), slurm_every_s=0)
    assert [has_ended(), has_ended()] == [False, True] and states == []


def test_following_logs_continues_after_a_preemption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(tmp_path / "a")
    run.write_result({"state": "preempted"}, writer="follower")
    monkeypatch.setattr(track, "run_status", lambda run, mode: track.Status("a", "a", "7", "pending"))
    assert not track.end_detector(run, slurm_every_s=0)()
    run.write_result({"state": "failed"}, writer="batch")
    assert track.end_detector(run)()


def test_ranks_of_an_earlier_larger_plan_are_not_the_failed_ones(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a")
    for rank in range(PLAN.world_size + 4):
        run.log_path(rank).write_text("")
    for rank in range(PLAN.world_size):
        run.write_exit(rank, "failed", "Connection closed by peer")
    assert build_result(run, 1)["failed_rank"] in range(PLAN.world_size)


def test_setup_must_be_a_list() -> None:
    with pytest.raises(ConfigError, match="setup is 'module load cuda'; use a list of texts"):
        make(SlurmSettings, {"setup": "module load cuda"}, "slurm")


def test_ranks_get_the_environment_whatever_the_shell_sets() -> None:
    assert "srun --het-group=0,1 --export=ALL " in plan_executor(PLAN, "/somewhere/run", SlurmSettings()).job_script()


# -- sweeps -----------------------------------------------------------------------------------------------------------


def manifest(tmp_path: Path, **job: Any) -> tuple[Manifest, SweepJob]:
    made = Manifest(tmp_path / "sweep.json")
    entry = SweepJob(0, ("a=1",), "0", "plain", "local", "41", "folder", submitted=time.time(), **job)
    made.put(entry)
    return made, entry


def test_a_result_that_other_users_may_write_is_not_unpickled(tmp_path: Path) -> None:
    made, entry = manifest(tmp_path)
    path = sweep.result_pickle(made, entry)
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(("success", 5)))
    assert sweep.plain_outcome(made, entry) == ("completed", 5)
    path.parent.chmod(0o777)
    why = f"its result is not read: {path.parent} can be written by everybody"
    assert sweep.plain_outcome(made, entry) == ("unread", why)
    row = row_of(made, entry, JobState("COMPLETED", source="sacct"))
    assert (row.state, row.error) == ("completed", why)
    path.unlink()  # another user could replace it
    with pytest.raises(SubmissionError, match=f"job 0: {why}"):
        HolmesLauncher._launch_all(SimpleNamespace(), [], True, Progress(made, []))  # type: ignore[arg-type]


def test_the_state_of_a_local_job_is_known_only_on_its_machine(tmp_path: Path) -> None:
    made, entry = manifest(tmp_path, host="elsewhere")
    assert sweep.job_handle(made, entry).state().state == "UNKNOWN"
    with pytest.raises(SubmissionError, match="elsewhere"):
        sweep.job_handle(made, entry).cancel()
    made.put(replace(entry, submitted=1.0))  # by an earlier launch
    with pytest.raises(SubmissionError, match="runs on elsewhere"):
        HolmesLauncher._launch_all(SimpleNamespace(), [], True, Progress(made, []))  # type: ignore[arg-type]


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_overrides_change_the_recorded_configuration(tmp_path: Path) -> None:
    recorded = load(["train.steps=7", "train.lr=0.5", "launcher=local"])
    made = with_overrides(recorded, ["train.steps=9", "slurm.account=ml", "+labels.note='a b'"])
    assert made == replace(
        recorded,
        train=replace(recorded.train, steps=9),
        labels={"note": "a b"},
        slurm=replace(recorded.slurm, account="ml"),
    )
    other = with_overrides(recorded, ["data=indexed", "data.prefix=/x/y"])
    assert other.data.kind == "indexed" and other.data.prefix == "/x/y" and other.train.lr == 0.5
    odd = replace(recorded, slurm=replace(recorded.slurm, setup=("source ${HOME}/env.sh", "echo ${")))
    assert with_overrides(odd, ["train.steps=9"]).slurm.setup == ("source ${HOME}/env.sh", "echo ${")
    for word, message in (
        ("train.stps=1", "train.stps"),
        ("~train.lr", "KEY=VALUE"),
        ("train.lr=1,2", "KEY=VALUE"),
        ("train.steps=0", "train.steps is 0"),
        ("data=nope", "nope"),
        ("train.lr=[", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_overrides(recorded, [word])


def test_missing_keys_of_an_older_record_are_named() -> None:
    current = load(["train.steps=7"]).to_dict()
    older = {**current, "train": {k: v for k, v in current["train"].items() if k != "watchdog_s"}, "extra": {"of": "x"}}
    del older["checkpoint"]
    config, missing = read_back(older)
    assert config == load(["train.steps=7"]) and missing == ["train.watchdog_s", "checkpoint"]


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", slurm={"job_id": 7})
    run.write_result({"state": "completed"})
    before = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    record = run.read_run()
    kept = run.reopen(plans.plan("ib-a").to_yaml())
    run.update_run(plan_id="other")
    assert run.read_result() is None and run.plan_path.read_text() != PLAN.to_yaml()
    run.close_again(kept, record)
    assert {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()} == before


@pytest.mark.integration
def test_a_local_run_is_alive_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = RunDirectory.create(tmp_path / "r"), time.time()
    words = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen([*words, str(run.path / "submission")]) as process_of_run, subprocess.Popen(words) as other:
        try:
            jobs = [track.LocalJob(run, process.pid, socket.gethostname(), now) for process in (process_of_run, other)]
            assert [job.state().state for job in jobs] == ["RUNNING"] * 2
            monkeypatch.setattr(psutil.Process, "create_time", lambda _: now - 3600)  # creation times follow the clock
            assert [job.state().state for job in jobs] == ["RUNNING", "FAILED"]
        finally:
            process_of_run.kill()
            other.kill()


@pytest.mark.parametrize("ticket", [{"components": "x"}, {"tasks": [1]}, {"submitted": {}, "name": 5, "token": []}])
def test_a_damaged_ticket_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ticket: Any) -> None:
    run = run_with(tmp_path / "run", slurm={"job_id": 7, "submitted": 5.0})
    (run.path / "submission").mkdir()
    (run.path / "submission" / "7_job.json").write_text(json.dumps(ticket))
    monkeypatch.setattr(SlurmHetJob.watcher, "state_of", lambda *_: JobState("PENDING"))
    assert track.run_status(run).state == "pending"
    assert SlurmHetJob(run.path / "submission", "7").num_tasks == 1
