"""Creation and submission of a run: one process at a time, one job per directory, no lost record."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import plans
import pytest
import typer

from holmes_hpc.cli import runs, submission_steps
from holmes_hpc.cli import status as status_commands
from holmes_hpc.config import composition
from holmes_hpc.config.composition import load
from holmes_hpc.errors import ConfigError, HolmesError, RecordError
from holmes_hpc.records.locks import has_owner
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.slurm.scontrol import Config
from holmes_hpc.submission.lifecycle import batch_end, batch_start, create, progress, status
from holmes_hpc.submission.lifecycle.create import LOCK, hold_submission_lock
from holmes_hpc.training.checkpoint import checkpoint_directory

PAIRS = 50


class Checkpoint(NamedTuple):
    step: int


class Jobs:
    """A stand-in for Slurm in this process: its jobs and their states."""

    def __init__(self, seed: int) -> None:
        self.states: dict[str, str] = {}
        self._random, self._lock = random.Random(seed), threading.Lock()

    def submit(self, plan: Any, record: RunDirectory, config: Any, test: bool = True) -> Any:
        time.sleep(self._random.random() * 0.01)  # as sbatch takes
        with self._lock:
            job_id = str(len(self.states) + 1)
            self.states[job_id] = "RUNNING"
        time.sleep(self._random.random() * 0.01)
        record.update_run(slurm={"job_id": int(job_id), "submitted": time.time()})
        return self.of(record)

    def of(self, record: RunDirectory) -> Any:
        job_id = str(record.read_run()["slurm"]["job_id"])

        class Job:
            id = job_id

            def state(inside, mode: str = "") -> JobState:
                return JobState(self.states[job_id], source="squeue")

            def cancel(inside) -> None:
                self.states[job_id] = "CANCELLED"

        return Job()

    @property
    def alive(self) -> list[str]:
        return [job_id for job_id, state in self.states.items() if state == "RUNNING"]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs, compose, lock = Jobs(1), composition.composed, threading.Lock()

    def composed(words: Any = ()) -> Any:
        with lock:  # Hydra is not thread-safe; outside tests these are processes
            return compose(words)

    monkeypatch.setattr(composition, "composed", composed)
    monkeypatch.setattr(create, "git_commit", lambda: None)
    monkeypatch.setattr(submission_steps, "submit_run", jobs.submit)
    monkeypatch.setattr(runs, "submit_run", jobs.submit)
    monkeypatch.setattr(status, "job_of", jobs.of)
    monkeypatch.setattr(batch_start, "job_of", jobs.of)
    monkeypatch.setattr(progress, "report_progress", lambda *_: 0)
    return jobs


def submit_to(path: Path) -> None:
    plan = plans.plan("ib-a", "roce-a")
    submission_steps.create_and_submit(plan, load([f"run_dir={path}", "launcher=local"]), [])


def resume(path: Path) -> None:
    with contextlib.suppress(typer.Exit):
        runs.resume(str(path), [])


def cancel(path: Path) -> None:
    status.cancel_run(RunDirectory(path))


def show_status(path: Path) -> None:
    status.run_status(RunDirectory(path))


def at_once(*actions: Callable[[], None]) -> list[Exception]:
    """Run the actions at the same time. Return their HolmesErrors; any other error fails the test."""
    barrier, refused, unexpected = threading.Barrier(len(actions)), [], []

    def run(action: Callable[[], None]) -> None:
        barrier.wait()
        try:
            action()
        except HolmesError as e:
            refused.append(e)
        except BaseException as e:
            unexpected.append(e)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected, unexpected
    return refused


@pytest.mark.parametrize("name", ["/abs", "../up"])
def test_a_wrong_name_is_refused_before_planning(name: str) -> None:
    with pytest.raises(ConfigError, match="name is"):
        create.refuse_taken_name(load([f"name={name}"]))


def test_two_submits_into_one_directory_make_one_job(jobs: Jobs, tmp_path: Path) -> None:
    refused = at_once(*[lambda: submit_to(tmp_path / "run")] * 2)
    assert len(jobs.states) == 1 and len(refused) == 1
    assert "in use by `holmes run` or `submit` of" in str(refused[0]) or "already holds a run" in str(refused[0])
    assert not has_owner(tmp_path / "run" / LOCK)


def test_two_resumes_make_one_job(jobs: Jobs, tmp_path: Path) -> None:
    submit_to(tmp_path / "run")
    cancel(tmp_path / "run")
    refused = at_once(*[lambda: resume(tmp_path / "run")] * 2)
    assert len(jobs.states) == 2 and jobs.alive == ["2"] and len(refused) == 1
    assert "in use by `holmes resume` of" in str(refused[0]) or "the run is running" in str(refused[0])


@pytest.mark.parametrize("command", ["resume", "rm"])
def test_a_run_that_takes_the_place_of_another_is_not_touched(
    command: str, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for path in (run, other):
        submit_to(path)
    cancel(run)
    record = (other / "run.yaml").read_bytes()

    def replace_meanwhile(*_: Any) -> None:
        run.rename(tmp_path / "moved")
        other.rename(run)

    monkeypatch.setattr(runs, "note_requeues", replace_meanwhile)
    monkeypatch.setattr(create, "refuse_unless_ended", replace_meanwhile)
    with pytest.raises(RecordError, match="it was moved meanwhile"):
        resume(run) if command == "resume" else create.remove_run(RunDirectory(run))
    assert (run / "run.yaml").read_bytes() == record and (tmp_path / "moved" / "run.yaml").exists()
    assert len(jobs.states) == 2


@pytest.mark.parametrize("seed", [1, 2])
def test_pairs_of_commands_on_one_run(seed: int, jobs: Jobs, tmp_path: Path) -> None:
    commands, draw = [submit_to, resume, cancel, show_status], random.Random(seed)
    print(f"seed {seed}")
    submit_to(tmp_path / "run")
    for pair in range(PAIRS // 2):
        one, other = draw.choices(commands, [1, 3, 2, 1], k=2)
        at_once(partial(one, tmp_path / "run"), partial(other, tmp_path / "run"))
        record = RunDirectory(tmp_path / "run").read_run()
        assert len(jobs.alive) <= 1, (seed, pair, one, other)
        assert str(record["slurm"]["job_id"]) == str(len(jobs.states)), (seed, pair, one, other)
        assert record["config"] and record["plan_id"] and record["overrides"] == []
    assert len(jobs.states) > 3 and not has_owner(tmp_path / "run" / LOCK)


@pytest.mark.parametrize("name", ["run.yaml", "plan.yaml", "logs", "submission"])
def test_a_run_whose_files_others_can_write_is_not_resumed(name: str, tmp_path: Path) -> None:
    """A recorded `slurm.setup` is run, and a link in logs/ would be appended to."""
    path = tmp_path / name
    path.mkdir() if "." not in name else path.touch()
    path.chmod(0o777)
    with (
        pytest.raises(RecordError, match=f"{name} can be written by everybody"),
        hold_submission_lock(tmp_path, "a test"),
    ):
        raise AssertionError("the lock was taken")


def test_a_refused_submission_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), hold_submission_lock(tmp_path / "runs" / "a", "a test"):
        raise RuntimeError
    assert not (tmp_path / "runs" / "a").exists()
    tmp_path.chmod(0o777)
    with (
        pytest.raises(RecordError, match="can be written by everybody"),
        hold_submission_lock(tmp_path / "b", "a test"),
    ):
        pass
    tmp_path.chmod(0o755)


def test_a_directory_that_another_user_creates_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_as_other_user(self: Path, *_: object, **__: object) -> None:
        os.mkdir(self)
        self.chmod(0o777)

    monkeypatch.setattr(Path, "mkdir", create_as_other_user)
    with (
        pytest.raises(RecordError, match=f"{tmp_path / 'run'} can be written by everybody"),
        hold_submission_lock(tmp_path / "run", "a test"),
    ):
        pass


def test_cancel_reports_the_last_checkpoint(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for checkpoints, message in (
        ([], "so far it has no step and no checkpoint"),
        ([Checkpoint(15)], "so far its last checkpoint is of step 15"),
    ):
        submit_to(tmp_path / f"run{len(checkpoints)}")
        monkeypatch.setattr(
            checkpoint_directory, "complete_checkpoints", lambda _, checkpoints=checkpoints: checkpoints
        )
        monkeypatch.setattr("holmes_hpc.slurm.scontrol.read_config", lambda: Config({"KillWait": "5 sec"}))
        status_commands.cancel(str(tmp_path / f"run{len(checkpoints)}"))
        expected = f"{message}; its ranks finish a step or two and save, if Slurm's KillWait (5 sec here) is"
        assert expected in " ".join(capfd.readouterr().err.split())


def test_a_batch_script_does_not_take_the_run_of_an_active_job(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_to(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(RecordError, match=r"job 1 of this run is still RUNNING"):
        batch_start.prepare_run(tmp_path / "run", tmp_path / "plan.yaml")
    cancel(tmp_path / "run")
    batch_start.prepare_run(tmp_path / "run", tmp_path / "plan.yaml")
    assert RunDirectory(tmp_path / "run").read_run()["slurm"]["job_id"] == 77


def test_a_job_does_not_record_the_end_of_another_jobs_run(
    jobs: Jobs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    submit_to(tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    assert batch_end.end_attempt(run, 1, False, "77", 0) == 1
    assert run.read_result() is None and "belongs to job 1; the end of job 77 is not recorded" in capfd.readouterr().out


def test_a_run_does_not_replace_another_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config: Any = SimpleNamespace(name="tb", run_dir=None)
    plan: Any = None
    RunDirectory.create(create.run_directory_path(config, plan))
    with pytest.raises(RecordError, match="or give another name"):
        create.create_run(config, plan, [])


@pytest.mark.integration
def test_batch_scripts_may_call_the_earlier_module_names(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    plans.plan("ib-a").write(tmp_path / "plan.yaml")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    for module, *arguments in (("begin", run.path, tmp_path / "plan.yaml", "0"), ("finish", run.path, "0", "")):
        command = [sys.executable, "-m", f"holmes_hpc.submission.lifecycle.{module}", *map(str, arguments)]
        subprocess.run(command, env=environment, check=True)
    assert (run.read_result() or {})["state"] == "completed"


def test_a_taken_name_is_found_before_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLMES_RUNS", str(tmp_path))
    monkeypatch.setattr(submission_steps, "make_plan", lambda *_: pytest.fail("it plans first"))
    monkeypatch.setattr(submission_steps, "check_inputs", lambda _: None)
    run = RunDirectory.create(tmp_path / "a")
    with pytest.raises(pytest.fail.Exception):  # a run without a step is replaced
        submission_steps.plan_run(["launcher=local", "name=a"])
    run.append_metrics({"step": 1})
    with pytest.raises(RecordError, match=r"it already holds a run; .* or give another name"):
        submission_steps.plan_run(["launcher=local", "name=a"])


def test_a_resumed_run_whose_job_has_not_started_is_active(tmp_path: Path) -> None:
    plan = plans.plan("ib-a", "roce-a")
    run = RunDirectory.create(tmp_path / "run", plan.to_yaml(), slurm={"job_id": 7, "submitted": time.time() - 100})
    run.start_attempt()
    for rank in range(plan.world_size):
        run.write_exit(rank, "completed")
    for state in ("completed", "unknown"):
        create.refuse_unless_ended(run, state)
    for submitted, state in ((time.time() - 100, "pending"), (time.time() + 100, "unknown")):
        run.update_run(slurm={"job_id": 8, "submitted": submitted})
        with pytest.raises(ConfigError, match=r"pending|not known"):
            create.refuse_unless_ended(run, state)
