"""Local ranks forked from a process that imported their modules."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import plans
import psutil
import pytest

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import uninterrupted
from holmes_hpc.submission.lifecycle.status import run_status
from holmes_hpc.submission.local import run_plan_locally
from holmes_hpc.submission.plan_job import PlannedJob

pytestmark = pytest.mark.integration


def load(config: dict[str, Any]) -> None:
    with (Path(config["run_dir"]) / "loaded").open("a") as file:
        file.write(f"{os.getpid()}\n")


def rank_here(config: dict[str, Any]) -> None:
    run = Path(config["run_dir"])
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    (run / f"pids-{os.environ['RANK']}").write_text(f"{os.getpid()} {os.getppid()}")
    while not (run / "go").exists():
        time.sleep(0.05)


rank_here.load = load  # type: ignore[attr-defined]


def start_job(tmp_path: Path, has_gpus: bool = False) -> tuple[Any, RunDirectory, dict[int, int]]:
    """Return the job, its run and the parent of each rank's process, when all ranks run."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    plan = plans.local_plan(has_gpus)
    run = RunDirectory.create(tmp_path / "run", plan_text=plan.to_yaml(), config=plans.CONFIG)
    job = run_plan_locally(PlannedJob(plan, run.config, rank_here, SlurmSettings(timeout_min=1)), run.path)
    while True:
        words = [text.split() for path in run.path.glob("pids-*") if (text := path.read_text())]
        if len(words) == 2:
            return job, run, {int(pid): int(parent) for pid, parent in words}
        time.sleep(0.05)


def test_modules_are_loaded_once_and_each_rank_has_its_log(tmp_path: Path) -> None:
    job, run, ranks = start_job(tmp_path)
    (run.path / "go").touch()
    while not job.state().ended:
        time.sleep(0.05)
    assert set(ranks.values()) == {int((run.path / "loaded").read_text())}  # one process, once
    assert job.state().state == "COMPLETED"
    assert [run.log_path(rank).read_text() for rank in range(2)] == ["rank 0 of 2\n", "rank 1 of 2\n"]


@pytest.mark.parametrize("is_controller", [False, True], ids=["their parent", "the controller"])
def test_ranks_end_with_the_processes_that_started_them(tmp_path: Path, is_controller: bool) -> None:
    job, run, ranks = start_job(tmp_path)
    processes = [psutil.Process(pid) for pid in ranks]
    os.kill(int(job.id) if is_controller else next(iter(ranks.values())), signal.SIGKILL)
    assert not psutil.wait_procs(processes, 10)[1]
    while not job.state().ended:
        time.sleep(0.05)
    status = run_status(run)
    assert status.state == "failed" and "the process that started the ranks ended without a record" in status.error


def test_a_closed_terminal_ends_no_process_of_the_job(tmp_path: Path) -> None:
    job, run, ranks = start_job(tmp_path)
    for pid in {int(job.id), *ranks, *ranks.values()}:
        os.kill(pid, signal.SIGHUP)  # as the kernel does when the terminal closes
    time.sleep(0.5)
    assert job.state().state == "RUNNING" and all(map(psutil.pid_exists, ranks))
    (run.path / "go").touch()
    while not job.state().ended:
        time.sleep(0.05)
    assert job.state().state == "COMPLETED"


def test_a_terminal_that_closes_during_the_submission_interrupts_only_after_it() -> None:
    steps, previous = [], signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            os.kill(os.getpid(), signal.SIGHUP)
            steps.append("recorded")
        assert steps == ["recorded"] and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("has_gpus", [False, True], ids=["CPU", "GPU"])
def test_the_status_names_the_signal_that_killed_a_rank(tmp_path: Path, has_gpus: bool) -> None:
    job, run, ranks = start_job(tmp_path, has_gpus)
    assert (run.path / "loaded").exists() == (not has_gpus)  # a fork cannot use GPUs that its parent has opened
    for pid in ranks:
        os.kill(pid, signal.SIGSEGV)
    while not job.state().ended:
        time.sleep(0.05)
    assert "killed by signal 11 (SIGSEGV)" in str(run_status(run).error)
