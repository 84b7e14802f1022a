"""Properties of the executor that submitit's users expect, on a real Slurm, with few and short jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import submitit
from slurm_jobs import THREE, executor, folder, functions_travel_with_the_pickle, sleeper, until  # noqa: F401 (fixtures)
from submitit.helpers import TorchDistributedEnvironment

from holmes_hpc.submission.executor.job import SlurmHetJob

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("testbed")]
UNEQUAL = [
    {
        "partition": "ib",
        "tasks_per_node": 2,
        "environment": {"WHERE": "an ib 'node'"},
        "setup": ["tool() { echo tool $1; }", "export TOOL=$(tool b)"],
    },
    {"partition": "eth"},
]


def own_view() -> tuple[int, str | None, str | None]:
    return TorchDistributedEnvironment().local_world_size, os.environ.get("WHERE"), os.environ.get("TOOL")


def test_components_have_their_own_settings_and_a_job_may_be_renamed(folder: Path) -> None:
    job = executor(folder, UNEQUAL, name="☃").submit(own_view)
    subprocess.run(["scontrol", "update", f"JobId={job.job_id}", "name=x"], check=True)
    assert job.results() == [(2, "an ib 'node'", "tool b")] * 2 + [(1, None, None)]
    until(lambda: job.slurm_state().state == "COMPLETED")
    assert job.watcher._identities[job.job_id].name == "☃"


LINE = """
import os, sys, submitit
sys.path.insert(0, {here!r})
import cloudpickle, slurm_jobs
cloudpickle.register_pickle_by_value(slurm_jobs)
made = slurm_jobs.executor({folder!r}, [{{"partition": "ib"}}, {{"partition": "eth"}}], slurmhet_array_parallelism=2)
print(*(job.job_id for job in made.map_array(slurm_jobs.sleeper, [100, 0, 0, 0])), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_long_throttled_job_delays_no_other_after_the_client_died(folder: Path) -> None:
    script = LINE.format(here=str(Path(__file__).parents[1] / "support"), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    jobs = [SlurmHetJob(folder, job_id) for job_id in done.stdout.split()]
    assert len(jobs) == 4 and all(job.num_tasks == 2 for job in jobs), done.stderr
    until(lambda: all(job.done() for job in jobs[1:]))
    assert not jobs[0].done()  # the third would have waited for it
    assert [job.results() for job in jobs[1:]] == [["slept"] * 2] * 3
    jobs[0].cancel()


def test_an_array_and_the_output_of_a_failed_set_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = submitit.AutoExecutor(folder / "%j", cluster="slurmhet")
    made.update_parameters(
        timeout_min=2,
        slurm_partition="eth",
        slurm_setup=['if [ "$SLURM_ARRAY_TASK_ID" = 1 ]; then nosuchtool; exit 3; fi'],
    )
    good, bad = made.map_array(sleeper, [0, 0])
    assert good.result() == "slept" and good.job_id.endswith("_0")
    until(lambda: bad.slurm_state().ended)
    monkeypatch.setattr(SlurmHetJob, "_results_timeout_s", 0)
    assert "nosuchtool: command not found" in str(bad.exception())
    assert "nosuchtool: command not found" in (bad.stderr() or "")


def test_the_reason_of_a_waiting_job_is_known_at_once_and_later(folder: Path) -> None:
    def waiting(**more: object) -> SlurmHetJob:
        made = executor(folder, [{"partition": "eth"}])
        made.update_parameters(slurm_additional_parameters=more)
        return made.submit(sleeper, 0)  # type: ignore[return-value]

    held, later = waiting(hold=True), waiting(begin="now+1hour")
    after = waiting(dependency=f"afterany:{later.job_id}")
    expected = {held: "JobHeldUser", later: "BeginTime", after: "Dependency"}
    until(lambda: {job: job.slurm_state().reason for job in expected} == expected)
    assert later.slurm_state("cache").why.startswith("BeginTime, starts about ")
    for job in expected:  # as if they had waited for a while and the database knew them
        job.watcher._registered_at[job.job_id] -= 60
    time.sleep(0.01)
    assert {job: job.slurm_state().reason for job in expected} == expected
