"""The assertions of submitit's tests, for ``slurm`` and for ``slurmhet`` with one and two components, on a real Slurm.
The differences are at the end, and in docs/submission.md.

    make submission-contract
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import submitit
from slurm_jobs import functions_travel_with_the_pickle, until  # noqa: F401 (a fixture)
from submitit.core import core, utils
from submitit.helpers import (
    CommandFunction,
    FunctionSequence,
    RsyncSnapshot,
    TorchDistributedEnvironment,
    as_completed,
    clean_env,
    monitor_jobs,
)

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("testbed")]


@dataclass(frozen=True)
class Kind:
    """An executor as a user would create it. `tasks`: tasks per job."""

    name: str
    cluster: str
    tasks: int
    parameters: dict[str, Any] = field(default_factory=dict)

    def executor(self, folder: Path, **parameters: Any) -> submitit.AutoExecutor:
        executor = submitit.AutoExecutor(folder, cluster=self.cluster)
        executor.update_parameters(**{"timeout_min": 3, **self.parameters, **parameters})
        return executor


KINDS = [
    Kind("slurm", "slurm", 1, {"slurm_partition": "ib"}),
    Kind("slurm, two tasks", "slurm", 2, {"slurm_partition": "ib", "tasks_per_node": 2}),
    Kind("slurmhet, one component", "slurmhet", 1, {"slurm_partition": "ib"}),
    Kind(
        "slurmhet, two components",
        "slurmhet",
        2,
        {
            "slurmhet_components": [
                {"partition": "ib", "constraint": "nic_ib"},
                {"partition": "roce", "constraint": "nic_roce"},
            ]
        },
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    executor_kind: Kind = request.param
    return executor_kind


def three_times(x: int) -> int:
    if not isinstance(x, int):
        raise TypeError("no whole number")
    return 3 * x


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def exit_abruptly() -> None:
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


# --- core -------------------------------------------------------------------------------------------------------------


def test_job_from_submission_to_result(kind: Kind, tmp_path: Path) -> None:
    job = kind.executor(tmp_path / "%j").submit(three_times, x=4)
    assert job.num_tasks == kind.tasks and repr(job) and job.job_id in repr(job)
    assert job.paths.submission_file.exists() and job.paths.submitted_pickle.exists()
    assert job.results() == [12] * kind.tasks and job.exception() is None
    assert job.done() and (kind.tasks > 1 or job.result() == 12)
    assert job.task(0).result() == 12
    assert not job.paths.submitted_pickle.with_suffix(".tmp").exists()
    until(lambda: job.watcher.get_state(job.job_id, mode="force") == "COMPLETED")
    assert job.state == "COMPLETED" and job.get_info(mode="force")["State"] == "COMPLETED"
    copied = pickle.loads(pickle.dumps(job))  # noqa: S301
    assert copied.job_id == job.job_id and copied.job_id in copied.watcher._registered
    assert copied.results() == [12] * kind.tasks


def test_error_in_the_function(kind: Kind, tmp_path: Path) -> None:
    job = kind.executor(tmp_path).submit(three_times, "x")
    job.wait()
    error = job.exception()
    assert isinstance(error, utils.FailedJobError) and "no whole number" in str(error)
    with pytest.raises(utils.FailedJobError, match="TypeError: no whole number"):
        job.results()
    assert "no whole number" in (job.task(0).stderr() or "")


def test_error_of_a_dead_job_contains_its_stderr(kind: Kind, tmp_path: Path) -> None:
    job = kind.executor(tmp_path).submit(exit_abruptly)
    with pytest.raises(utils.UncompletedJobError, match="last words"):
        job.results()


def test_output_of_a_job(kind: Kind, tmp_path: Path) -> None:
    def speak() -> None:
        print("hello")
        print("world", file=sys.stderr)

    separate, combined = (kind.executor(tmp_path, stderr_to_stdout=flag).submit(speak) for flag in (False, True))
    for job in (separate, combined):
        job.wait()
    assert "hello" in (separate.task(0).stdout() or "") and "world" in (separate.task(0).stderr() or "")
    assert "hello" in (combined.task(0).stdout() or "") and "world" in (combined.task(0).stdout() or "")
    assert not combined.paths.stderr.exists()


def test_cancelled_job(kind: Kind, tmp_path: Path) -> None:
    executor = kind.executor(tmp_path)
    cancelled, deleted = executor.submit(nap, 300), executor.submit(nap, 300).cancel_at_deletion()
    deleted_id = deleted.job_id
    until(lambda: cancelled.watcher.get_state(cancelled.job_id, mode="force") == "RUNNING")
    cancelled.cancel()
    until(lambda: cancelled.watcher.get_state(cancelled.job_id, mode="force").startswith("CANCELLED"))
    assert cancelled.done(force_check=True)
    del deleted
    until(lambda: deleted_id not in subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True).stdout)


def test_batches(kind: Kind, tmp_path: Path) -> None:
    executor = kind.executor(tmp_path)
    with executor.batch():
        first = executor.submit(three_times, 1)
        assert isinstance(first, core.DelayedJob)
        second = executor.submit(three_times, 2)
    with executor.batch(allow_implicit_submissions=True):
        third = executor.submit(three_times, 3)
        assert third.job_id
    with pytest.raises(RuntimeError), executor.batch():
        executor.update_parameters(timeout_min=4)
    with pytest.raises(RuntimeError), executor.batch(), executor.batch():
        pass
    with pytest.raises(AttributeError), executor.batch():
        executor.submit(three_times, 4).job_id  # noqa: B018
    with pytest.warns(RuntimeWarning), executor.batch():
        pass
    jobs = [first, second, third, *executor.map_array(three_times, [4, 5])]
    assert [job.results() for job in jobs] == [[3 * i] * kind.tasks for i in range(1, 6)]
    assert len({job.job_id for job in jobs}) == 5


def test_pickle_above_the_size_limit_is_refused(kind: Kind, tmp_path: Path) -> None:
    key = "slurm_max_pickle_size_gb" if kind.cluster == "slurm" else "slurmhet_max_pickle_size_gb"
    executor = submitit.AutoExecutor(tmp_path, cluster=kind.cluster, **{key: 0})
    executor.update_parameters(**kind.parameters)
    with pytest.raises(RuntimeError, match="through pickle"):
        executor.submit(three_times, 1)


def test_environment_of_a_task(kind: Kind, tmp_path: Path) -> None:
    def describe_task() -> tuple[Any, ...]:
        env = submitit.JobEnvironment()
        return env.activated(), env.num_tasks, env.global_rank, env.hostname in env.hostnames, env.cluster

    job = kind.executor(tmp_path).submit(describe_task)
    assert job.results() == [(True, kind.tasks, rank, True, kind.cluster) for rank in range(kind.tasks)]


# --- auto -------------------------------------------------------------------------------------------------------------


def test_unknown_parameters_are_refused(kind: Kind, tmp_path: Path) -> None:
    executor = kind.executor(tmp_path)
    with pytest.raises(NameError):
        executor.update_parameters(blublu=1)
    with pytest.raises(NameError):
        executor.update_parameters(**{f"{kind.cluster}_blublu": 1})
    with pytest.raises(NameError, match="unknown"):
        executor.update_parameters(unknown_time=1)


def test_job_refused_by_sbatch_is_an_error(kind: Kind, tmp_path: Path) -> None:
    executor = kind.executor(tmp_path)
    executor.update_parameters(slurm_additional_parameters={"reservation": "no-such"})
    with pytest.raises(utils.FailedJobError if kind.cluster == "slurm" else utils.FailedSubmissionError):
        executor.submit(three_times, 1)


def test_setup_and_teardown(kind: Kind, tmp_path: Path) -> None:
    executor = kind.executor(tmp_path, slurm_setup=["export FOUND='a word'"], slurm_teardown=[f"touch {tmp_path}/down"])

    def found() -> str | None:
        return os.environ.get("FOUND")

    job = executor.submit(found)
    assert job.results() == ["a word"] * kind.tasks
    until((tmp_path / "down").exists)


@pytest.mark.parametrize("name", ["it's two $(touch b) ü", "%j/deeper"])
def test_folders_with_special_characters(kind: Kind, tmp_path: Path, name: str) -> None:
    job = kind.executor(tmp_path / name).submit(three_times, 2)
    assert job.results() == [6] * kind.tasks
    assert job.task(0).stdout() is not None and not (tmp_path / "b").exists()


# --- helpers ----------------------------------------------------------------------------------------------------------


def test_as_completed_yields_jobs_in_order_of_their_ends(kind: Kind, tmp_path: Path) -> None:
    jobs = kind.executor(tmp_path).map_array(nap, [20, 0.1, 0.1])
    ended = [job for job in as_completed(jobs, poll_frequency=0.5)]
    assert ended[-1] is jobs[0] and {id(job) for job in ended[:2]} == {id(job) for job in jobs[1:]}


def test_monitor_jobs(kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executor = kind.executor(tmp_path)
    good, failing = executor.submit(three_times, 2), executor.submit(three_times, "x")
    monitor_jobs([good, failing], poll_frequency=1, test_mode=True)
    assert good.done() and failing.done()
    until(lambda: failing.watcher.get_state(failing.job_id, mode="force") == "FAILED")
    assert good.state == "COMPLETED"


def test_helper_functions(kind: Kind, tmp_path: Path) -> None:
    sequence = FunctionSequence()
    sequence.add(three_times, 4)
    sequence.add(three_times, 5)
    long_output = "for i in range(2000): print('-' * 1024)\nprint('all of it')"
    executor = kind.executor(tmp_path)
    jobs = [
        executor.submit(sequence),
        executor.submit(CommandFunction([sys.executable, "-c", long_output])),
        executor.submit(CommandFunction([sys.executable, "-c", "raise SystemExit('too bad')"])),
    ]
    assert jobs[0].results() == [[12, 15]] * kind.tasks
    assert all("all of it" in text for text in jobs[1].results())
    with pytest.raises(utils.FailedJobError, match="too bad"):
        jobs[2].results()


@pytest.mark.skipif(shutil.which("rsync") is None, reason="no rsync")
def test_snapshot(kind: Kind, tmp_path: Path) -> None:
    executor = kind.executor(tmp_path / "log")
    with RsyncSnapshot(snapshot_dir=tmp_path / "snap"):
        job = executor.submit(os.getcwd)
    assert set(job.results()) == {str(tmp_path / "snap")}


def test_job_submits_in_a_clean_environment(kind: Kind, tmp_path: Path) -> None:
    def submit_inner() -> Any:
        if submitit.JobEnvironment().global_rank:
            return 6
        with clean_env():
            return submitit.AutoExecutor(tmp_path / "inner", cluster="debug").submit(three_times, 2).result()

    assert kind.executor(tmp_path / "outer").submit(submit_inner).results() == [6] * kind.tasks


def test_torch_distributed_environment(kind: Kind, tmp_path: Path) -> None:
    def describe_task() -> tuple[Any, ...]:
        env = TorchDistributedEnvironment()
        return env.world_size, env.rank, env.local_rank, env.local_world_size, env.master_addr

    results = kind.executor(tmp_path).submit(describe_task).results()
    assert [(world, rank) for world, rank, *_ in results] == [(kind.tasks, rank) for rank in range(kind.tasks)]
    assert len({address for *_, address in results}) == 1
    local_world = kind.tasks if kind.cluster == "slurm" else 1  # tasks of two components are on two nodes
    assert {local_size for *_, local_size, _ in results} == {local_world}


# --- async ------------------------------------------------------------------------------------------------------------


def test_awaitable_jobs(kind: Kind, tmp_path: Path) -> None:
    async def wait(job: core.Job[Any]) -> tuple[list[Any], list[Any]]:
        results = await job.awaitable().results(poll_interval=0.5)
        tasks = itertools.islice(job.awaitable().results_as_completed(poll_interval=0.5), kind.tasks)
        in_order = [await task for task in tasks]  # with several tasks, submitit awaits once too often
        if kind.tasks == 1:
            assert await job.awaitable().result(poll_interval=0.5) == results[0]
        return results, in_order

    job = kind.executor(tmp_path).submit(three_times, 8)
    assert asyncio.run(wait(job)) == ([24] * kind.tasks, [24] * kind.tasks)


# --- differences, explained in docs/submission.md ---------------------------------------------------------------------


def _assert_difference(name: str, values: dict[str, Any], slurm: Any, slurmhet: Any) -> None:
    for kind, value in values.items():
        assert value == (slurm if kind.startswith("slurm,") or kind == "slurm" else slurmhet), (name, kind, value)


def _for_each_kind(tmp_path: Path, measure: Callable[[Kind, Path], Any], kinds: list[Kind]) -> dict[str, Any]:
    return {kind.name: measure(kind, tmp_path / str(index)) for index, kind in enumerate(kinds)}


def test_differs_when_one_task_fails(tmp_path: Path) -> None:
    def fail_in_second_task() -> str:
        if submitit.JobEnvironment().global_rank:
            raise ValueError("the second")
        time.sleep(20)
        return "the first"

    def other_task_continues(kind: Kind, folder: Path) -> Any:
        job = kind.executor(folder).submit(fail_in_second_task)
        with pytest.raises(utils.FailedJobError, match="the second"):
            raise job.exception()
        return job.task(0).exception() is None

    values = _for_each_kind(tmp_path, other_task_continues, [kind for kind in KINDS if kind.tasks == 2])
    _assert_difference("whether the other tasks continue", values, slurm=True, slurmhet=False)


def test_differs_in_sbatch_options(tmp_path: Path) -> None:
    def has_options(kind: Kind, folder: Path) -> Any:
        text = kind.executor(folder, gpus_per_node=0).submit(three_times, 1).paths.submission_file.read_text()
        return "--wckey=submitit" in text, "--gpus-per-node=0" in text, "--comment=" in text

    values = _for_each_kind(tmp_path, has_options, KINDS)
    _assert_difference("wckey, no GPUs, a comment", values, (True, True, False), (False, False, True))


def test_differs_in_ids_of_several_jobs(tmp_path: Path) -> None:
    def has_array_ids(kind: Kind, folder: Path) -> Any:
        jobs = kind.executor(folder).map_array(three_times, [1, 2])
        assert [job.results()[0] for job in jobs] == [3, 6]
        return {"_" in job.job_id for job in jobs}

    values = _for_each_kind(tmp_path, has_array_ids, KINDS)
    assert values.pop("slurmhet, two components") == {False}  # Slurm has no arrays of heterogeneous jobs
    assert all(value == {True} for value in values.values()), values


# --- slurmhet alone ---------------------------------------------------------------------------------------------------

SLURMHET_KINDS = [kind for kind in KINDS if kind.cluster == "slurmhet"]


@pytest.mark.parametrize("kind", SLURMHET_KINDS, ids=lambda kind: kind.name, indirect=True)
def test_jobs_whose_names_slurm_changes(kind: Kind, tmp_path: Path) -> None:
    names = ["☃🚀", "", "n" * 255, "a \"b\" 'c' `d` \\e", "renamed"]
    jobs = [kind.executor(tmp_path, name=name).submit(nap, 10) for name in names]
    subprocess.run(["scontrol", "update", f"JobId={jobs[-1].job_id}", "name=x"], check=True)
    for job in jobs:
        job.watcher._registered_at[job.job_id] -= 120  # as if registered two minutes ago
    assert all(job.slurm_state().source != "" for job in jobs)  # type: ignore[attr-defined]
    assert [job.results() for job in jobs] == [[10] * kind.tasks] * len(jobs)
    until(lambda: {job.slurm_state().state for job in jobs} == {"COMPLETED"})  # type: ignore[attr-defined]


class MarkingFunction:
    """A checkpointable function that creates a file when its checkpoint is requested."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> None:
        Path(self.path + ".began").touch()
        time.sleep(600)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        Path(self.path).touch()
        return submitit.helpers.DelayedSubmission(self)


def test_signal_before_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    for kind in SLURMHET_KINDS:
        for signal in ("USR1", "USR2"):
            monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", signal)
            marker = tmp_path / f"{kind.tasks}-{signal}"
            executor = kind.executor(tmp_path / "log", timeout_min=2, slurm_signal_delay_s=20)
            job = executor.submit(MarkingFunction(str(marker)))
            assert f"--signal={signal}@20" in job.paths.submission_file.read_text()
            jobs.append((job, marker))
    until(lambda: all(marker.exists() for _, marker in jobs))
    for job, _ in jobs:
        job.cancel()
