"""Whoever starts a run's job does so alone: never two jobs in one directory, never a lost record."""

from __future__ import annotations

import contextlib
import os
import random
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

from holmes_hpc.cli import runs, start, watch
from holmes_hpc.config import composition
from holmes_hpc.config.composition import load
from holmes_hpc.errors import HolmesError, RecordError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.slurm.scontrol import Config
from holmes_hpc.submission.lifecycle import begin, create, finish, progress, status
from holmes_hpc.submission.lifecycle.attempts import is_starting, starting
from holmes_hpc.training.checkpoint import checkpoint_directory

PAIRS = 50


class Checkpoint(NamedTuple):
    step: int


class Jobs:
    """A Slurm of one process: which jobs there are, and in which state."""

    def __init__(self, seed: int) -> None:
        self.states: dict[str, str] = {}
        self._random, self._lock = random.Random(seed), threading.Lock()

    def submit(self, plan: Any, record: RunDirectory, config: Any) -> Any:
        time.sleep(self._random.random() * 0.01)  # sbatch takes its time
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
    made, compose, alone = Jobs(1), composition.composed, threading.Lock()

    def composed(words: Any = ()) -> Any:
        with alone:  # Hydra composes once at a time in a process; in life these are processes
            return compose(words)

    monkeypatch.setattr(composition, "composed", composed)
    monkeypatch.setattr(create, "git_commit", lambda: None)
    monkeypatch.setattr(start, "submit_run", made.submit)
    monkeypatch.setattr(runs, "submit_run", made.submit)
    monkeypatch.setattr(status, "job_of", made.of)
    monkeypatch.setattr(begin, "job_of", made.of)
    monkeypatch.setattr(progress, "follow", lambda *_: 0)
    return made


def submitted(path: Path) -> None:
    plan = plans.plan("ib-a", "roce-a")
    start.start(plan, load([f"run_dir={path}", "launcher=local"]), [])


def resumed(path: Path) -> None:
    with contextlib.suppress(typer.Exit):
        runs.resume(str(path), [])


def cancelled(path: Path) -> None:
    status.cancel_run(RunDirectory(path))


def asked(path: Path) -> None:
    status.run_status(RunDirectory(path))


def at_once(*deeds: Callable[[], None]) -> list[Exception]:
    """Do these at the same time; what they refused comes back. Anything but a line of ours is an error."""
    barrier, refused, broken = threading.Barrier(len(deeds)), [], []

    def do(deed: Callable[[], None]) -> None:
        barrier.wait()
        try:
            deed()
        except HolmesError as e:
            refused.append(e)
        except BaseException as e:
            broken.append(e)

    threads = [threading.Thread(target=do, args=(deed,)) for deed in deeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not broken, broken
    return refused


def test_two_submits_into_one_directory_make_one_job(jobs: Jobs, tmp_path: Path) -> None:
    refused = at_once(*[lambda: submitted(tmp_path / "run")] * 2)
    assert len(jobs.states) == 1 and len(refused) == 1
    assert "in use by `holmes submit` of" in str(refused[0]) or "already holds a run" in str(refused[0])
    assert not is_starting(tmp_path / "run")


def test_two_resumes_make_one_job(jobs: Jobs, tmp_path: Path) -> None:
    submitted(tmp_path / "run")
    cancelled(tmp_path / "run")
    refused = at_once(*[lambda: resumed(tmp_path / "run")] * 2)
    assert len(jobs.states) == 2 and jobs.alive == ["2"] and len(refused) == 1
    assert "in use by `holmes resume` of" in str(refused[0]) or "it is running" in str(refused[0])


@pytest.mark.parametrize("seed", [1, 2])
def test_pairs_of_verbs_on_one_run(seed: int, jobs: Jobs, tmp_path: Path) -> None:
    verbs, draw = [submitted, resumed, cancelled, asked], random.Random(seed)
    print(f"seed {seed}")
    submitted(tmp_path / "run")
    for pair in range(PAIRS // 2):
        one, other = draw.choices(verbs, [1, 3, 2, 1], k=2)
        at_once(partial(one, tmp_path / "run"), partial(other, tmp_path / "run"))
        record = RunDirectory(tmp_path / "run").read_run()
        assert len(jobs.alive) <= 1, (seed, pair, one, other)
        assert str(record["slurm"]["job_id"]) == str(len(jobs.states)), (seed, pair, one, other)
        assert record["config"] and record["plan_id"] and record["overrides"] == []
    assert len(jobs.states) > 3 and not is_starting(tmp_path / "run")


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), starting(tmp_path / "runs" / "a", "a test"):
        raise RuntimeError
    assert not (tmp_path / "runs" / "a").exists()
    tmp_path.chmod(0o777)
    with pytest.raises(RecordError, match="can be written by everybody"), starting(tmp_path / "b", "a test"):
        pass
    tmp_path.chmod(0o755)


def test_somebody_who_is_quicker_in_a_folder_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made_by_another(self: Path, *_: object, **__: object) -> None:
        os.mkdir(self)
        self.chmod(0o777)

    monkeypatch.setattr(Path, "mkdir", made_by_another)
    with (
        pytest.raises(RecordError, match=f"{tmp_path / 'run'} can be written by everybody"),
        starting(tmp_path / "run", "a test"),
    ):
        pass


def test_cancelling_says_what_is_kept(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for kept, says in (
        ([], "so far it has made no step and no checkpoint"),
        ([Checkpoint(15)], "so far its last checkpoint is of step 15"),
    ):
        submitted(tmp_path / f"run{len(kept)}")
        monkeypatch.setattr(checkpoint_directory, "complete_checkpoints", lambda _, kept=kept: kept)
        monkeypatch.setattr("holmes_hpc.slurm.scontrol.read_config", lambda: Config({"KillWait": "5 sec"}))
        watch.cancel(str(tmp_path / f"run{len(kept)}"))
        wanted = f"{says}; its ranks finish a step or two and save, if Slurm's KillWait (5 sec here) is long enough"
        assert wanted in " ".join(capfd.readouterr().err.split())


def test_a_batch_script_takes_no_run_from_a_living_job(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with pytest.raises(RecordError, match=r"job 1 has it \(RUNNING\)"):
        begin.begin(tmp_path / "run", tmp_path / "plan.yaml")
    cancelled(tmp_path / "run")
    begin.begin(tmp_path / "run", tmp_path / "plan.yaml")
    assert RunDirectory(tmp_path / "run").read_run()["slurm"]["job_id"] == 77


def test_a_job_says_nothing_of_another_jobs_run(jobs: Jobs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    submitted(tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    assert finish.finish(run, 1, False, "77", 0) == 1
    assert run.read_result() is None and "belongs to job 1; nothing is recorded of job 77" in capfd.readouterr().out


def test_a_name_that_is_taken_asks_for_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config: Any = SimpleNamespace(name="tb", run_dir=None)
    plan: Any = None
    RunDirectory.create(create.new_run_path(config, plan))
    with pytest.raises(RecordError, match="or give another name"):
        create.new_run(config, plan, [])
