"""Jobs whose slurmstepd or batch script was killed: they end, or are requeued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_queries import has_script_failed
from holmes_hpc.submission.executor.batch_script import JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.lifecycle import lost_step, requeue_decision
from holmes_hpc.submission.lifecycle.outcome import build_result


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    created = RunDirectory.create(tmp_path / "run", config={"train": {"max_restarts": 1}})
    created.start_attempt({})
    for rank in range(2):
        created.log_path(rank).write_text("step\n")
    return created


def record_ends(run: RunDirectory, *states: str) -> None:
    for rank, state in enumerate(states):
        run.write_exit(rank, state)


@pytest.mark.integration
def test_srun_is_killed_after_all_ranks_of_this_attempt_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_ends(run, "failed", "failed")  # of an earlier attempt
    monkeypatch.setattr(lost_step, "INTERVAL_S", 0.05)
    monkeypatch.setattr(lost_step, "GRACE_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as srun:
        monkeypatch.setattr(sys, "argv", ["lost_step", str(run.path), "2", str(srun.pid)])
        watch = threading.Thread(target=lost_step.main, daemon=True)
        watch.start()
        time.sleep(0.3)
        run.write_exit(0, "completed")
        time.sleep(0.3)
        assert srun.poll() is None  # rank 1 has not ended
        run.write_exit(1, "completed")
        watch.join(10)
        assert srun.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize(
    "states, state, code",
    [
        (("completed", "completed"), "completed", 0),
        (("completed",), "failed", 137),
        (("completed", "failed"), "failed", 137),
    ],
)
def test_a_lost_step_is_complete_if_every_rank_is(
    run: RunDirectory, states: tuple[str, ...], state: str, code: int
) -> None:
    record_ends(run, *states)
    result = build_result(run, 137)
    assert (result["state"], result["exit_code"]) == (state, code)


@pytest.mark.integration
def test_a_monitor_of_the_step_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\nwhile [ ! -e {tmp_path}/monitor ]; do sleep 0.05; done\nexit 3\n")
    (tmp_path / "srun").chmod(0o755)
    monitor = f"bash -c 'echo $0 > {tmp_path}/monitor; exec sleep 61.7' \"$step\""
    request = JobRequest((ComponentRequest(1, 1, "ib"),))
    process = subprocess.run(
        ["bash", "-c", script_text(request, "true", monitor=monitor)],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9"},
    )
    assert (process.returncode, process.stderr) == (3, "")
    assert (tmp_path / "monitor").read_text().strip().isdecimal()
    deadline = time.monotonic() + 5
    while subprocess.run(["pgrep", "-f", "sleep 61.7"], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.integration
@pytest.mark.parametrize(
    "state, code, failed",
    [
        ("COMPLETING", "0:9", True),  # killed
        ("FAILED", "2:0", True),
        ("COMPLETING", "0:0", False),  # cancelled
        ("RUNNING", "0:0", False),
    ],
)
def test_a_killed_batch_script_is_told_from_a_cancelled_job(
    fake_slurm: Any, state: str, code: str, failed: bool
) -> None:
    job = f"JobId=51 HetJobId=51 HetJobOffset=0 UserId=u(1) JobState={state} Reason=None Dependency=(null)"
    fake_slurm.answer("scontrol", f"echo '{job} Restarts=0 ExitCode={code} NodeList=ib1'")
    assert has_script_failed("51") is failed


@pytest.fixture
def handled_signal() -> Iterator[signal.Signals]:
    earlier = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    yield signal.SIGUSR2
    os.close(signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGUSR2, earlier)


@pytest.mark.parametrize("failures, requeued", [(0, ["51"]), (1, [])])
def test_rank_0_requeues_the_job_of_a_killed_batch_script(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    handled_signal: signal.Signals,
    failures: int,
    requeued: list[str],
) -> None:
    jobs: list[str] = []
    checked = threading.Event()
    monkeypatch.setenv("HOLMES_LEADER_JOB_ID", "51")
    monkeypatch.setattr(requeue_decision, "has_script_failed", lambda job: True)
    monkeypatch.setattr(requeue_decision, "requeue", jobs.append)
    monkeypatch.setattr(requeue_decision.attempts, "has_new_steps", lambda run, attempt: True)
    monkeypatch.setattr(requeue_decision.attempts, "count_failures", lambda run, attempt: checked.set() or failures)
    requeue_decision.watch_batch_script(run)
    os.kill(os.getpid(), handled_signal)
    assert checked.wait(5)
    deadline = time.monotonic() + (5 if requeued else 0.2)
    while not jobs and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = run.read_run()["attempts"][-1].get("ended")
    assert (jobs, ended) == (requeued, "failed" if requeued else None)
