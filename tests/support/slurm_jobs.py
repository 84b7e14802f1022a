"""Helpers for tests on a real Slurm: a folder with a difficult name, jobs that wait and count, an executor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import plans
import pytest
import submitit

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.plan_job import PlannedJob, submit_plan
from holmes_hpc.testbed.slurm_prefix import parse_release

THREE = [
    {"partition": "ib", "constraint": "nic_ib", "nodes": 2},
    {"partition": "roce", "constraint": "nic_roce", "nodes": 2},
    {"partition": "eth", "constraint": "nic_ethernet", "nodes": 1},
]


@pytest.fixture(scope="module", autouse=True)
def functions_travel_with_the_pickle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pickle functions by value, because the tests' folders are not on the nodes' path."""
    modules = (plans, sys.modules[__name__], request.module)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory whose name is difficult for shells; cancel the jobs that a test left."""
    directory = tmp_path / "it's $(touch pwned) ü"
    directory.mkdir()
    earlier_jobs = set(job_ids())
    yield directory
    for job in {j.partition("+")[0] for j in set(job_ids()) - earlier_jobs}:
        subprocess.run(["scancel", job], check=False)
    assert not list(tmp_path.rglob("pwned"))


def job_ids() -> list[str]:
    return subprocess.run(["squeue", "--me", "-h", "-o", "%i"], capture_output=True, text=True).stdout.split()


def slurm_release() -> tuple[int, int]:
    """Return the release of the Slurm that the tests run on."""
    return parse_release(subprocess.run(["sinfo", "-V"], capture_output=True, text=True).stdout)


def skip_where_a_requeue_cancels() -> None:
    """Skip where Slurm has a bug: 25.11 and later may cancel a requeued heterogeneous job with a running step."""
    if slurm_release() >= (25, 11):
        pytest.skip("Slurm cancels a heterogeneous job that is requeued while its step runs: docs/versions.md")


LIMIT_S = 300  # for each wait, enough for a busy machine


def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition()` is true and return its value."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.3)
    raise AssertionError(f"condition not true within {LIMIT_S} s")


def executor(folder: Path, components: list[dict[str, Any]], **parameters: Any) -> submitit.AutoExecutor:
    slurm_executor = submitit.AutoExecutor(folder, cluster="slurmhet")
    slurm_executor.update_parameters(timeout_min=3, slurmhet_components=components, **parameters)
    return slurm_executor


def sleeper(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


class Counting:
    """A checkpointable function that counts its starts in a file and continues after the first."""

    def __init__(self, path: str) -> None:
        self.path, self.round = path, 0

    def __call__(self) -> str:
        Path(self.path + f"-{self.round}-{os.environ['SLURM_PROCID']}").touch()
        if self.round == 0:
            time.sleep(120)
        return f"round {self.round}"

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        resumed = Counting(self.path)
        resumed.round = self.round + 1
        return DelayedSubmission(resumed)


def start(folder: Path, function: Any, settings: dict[str, Any] | None = None, **config: Any) -> RunDirectory:
    plan = plans.plan("ib-a", "roce-a")
    config = {**plans.CONFIG, **config}
    run = RunDirectory.create(folder / "run 'x'", plan_text=plan.to_yaml(), config=config)
    submit_plan(PlannedJob(plan, config, function, SlurmSettings(**{"timeout_min": 3, **(settings or {})})), run.path)
    return run
