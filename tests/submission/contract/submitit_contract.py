"""What submitit's own tests expect of an executor, expected of ``slurm`` and of ``slurmhet`` with one and with two
components, on a real Slurm: the same assertions for all. What differs stands at the end, and in docs/submission.md.

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
    """An executor as a user would make it, of jobs with so many `tasks`."""

    name: str
    cluster: str
    tasks: int
    parameters: dict[str, Any] = field(default_factory=dict)

    def executor(self, folder: Path, **more: Any) -> submitit.AutoExecutor:
        made = submitit.AutoExecutor(folder, cluster=self.cluster)
        made.update_parameters(**{"timeout_min": 3, **self.parameters, **more})
        return made


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
    found: Kind = request.param
    return found


def three_times(x: int) -> int:
    if not isinstance(x, int):
        raise TypeError("no whole number")
    return 3 * x


def naps(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def dies() -> None:
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


# --- core -------------------------------------------------------------------------------------------------------------


def test_a_job_from_submission_to_result(kind: Kind, tmp_path: Path) -> None:
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


def test_an_error_in_the_function(kind: Kind, tmp_path: Path) -> None:
    job = kind.executor(tmp_path).submit(three_times, "x")
    job.wait()
    found = job.exception()
    assert isinstance(found, utils.FailedJobError) and "no whole number" in str(found)
    with pytest.raises(utils.FailedJobError, match="TypeError: no whole number"):
        job.results()
    assert "no whole number" in (job.task(0).stderr() or "")


def test_a_job_that_dies_tells_its_last_words(kind: Kind, tmp_path: Path) -> None:
    job = kind.executor(tmp_path).submit(dies)
    with pytest.raises(utils.UncompletedJobError, match="last words"):
        job.results()


def test_what_it_prints(kind: Kind, tmp_path: Path) -> None:
    def speak() -> None:
        print("hello")
        print("world", file=sys.stderr)

    apart, together = (kind.executor(tmp_path, stderr_to_stdout=one).submit(speak) for one in (False, True))
    for job in (apart, together):
        job.wait()
    assert "hello" in (apart.task(0).stdout() or "") and "world" in (apart.task(0).stderr() or "")
    assert "hello" in (together.task(0).stdout() or "") and "world" in (together.task(0).stdout() or "")
    assert not together.paths.stderr.exists()


def test_a_cancelled_job(kind: Kind, tmp_path: Path) -> None:
    made = kind.executor(tmp_path)
    one, other = made.submit(naps, 300), made.submit(naps, 300).cancel_at_deletion()
    left = other.job_id
    until(lambda: one.watcher.get_state(one.job_id, mode="force") == "RUNNING")
    one.cancel()
    until(lambda: one.watcher.get_state(one.job_id, mode="force").startswith("CANCELLED"))
    assert one.done(force_check=True)
    del other
    until(lambda: left not in subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True).stdout)


def test_batches(kind: Kind, tmp_path: Path) -> None:
    made = kind.executor(tmp_path)
    with made.batch():
        first = made.submit(three_times, 1)
        assert isinstance(first, core.DelayedJob)
        second = made.submit(three_times, 2)
    with made.batch(allow_implicit_submissions=True):
        third = made.submit(three_times, 3)
        assert third.job_id
    with pytest.raises(RuntimeError), made.batch():
        made.update_parameters(timeout_min=4)
    with pytest.raises(RuntimeError), made.batch(), made.batch():
        pass
    with pytest.raises(AttributeError), made.batch():
        made.submit(three_times, 4).job_id  # noqa: B018
    with pytest.warns(RuntimeWarning), made.batch():
        pass
    jobs = [first, second, third, *made.map_array(three_times, [4, 5])]
    assert [job.results() for job in jobs] == [[3 * i] * kind.tasks for i in range(1, 6)]
    assert len({job.job_id for job in jobs}) == 5


def test_a_pickle_that_is_too_large(kind: Kind, tmp_path: Path) -> None:
    key = "slurm_max_pickle_size_gb" if kind.cluster == "slurm" else "slurmhet_max_pickle_size_gb"
    made = submitit.AutoExecutor(tmp_path, cluster=kind.cluster, **{key: 0})
    made.update_parameters(**kind.parameters)
    with pytest.raises(RuntimeError, match="through pickle"):
        made.submit(three_times, 1)


def test_the_environment_of_a_task(kind: Kind, tmp_path: Path) -> None:
    def look() -> tuple[Any, ...]:
        own = submitit.JobEnvironment()
        return own.activated(), own.num_tasks, own.global_rank, own.hostname in own.hostnames, own.cluster

    job = kind.executor(tmp_path).submit(look)
    assert job.results() == [(True, kind.tasks, rank, True, kind.cluster) for rank in range(kind.tasks)]


# --- auto -------------------------------------------------------------------------------------------------------------


def test_parameters_that_do_not_exist(kind: Kind, tmp_path: Path) -> None:
    made = kind.executor(tmp_path)
    with pytest.raises(NameError):
        made.update_parameters(blublu=1)
    with pytest.raises(NameError):
        made.update_parameters(**{f"{kind.cluster}_blublu": 1})
    with pytest.raises(NameError, match="unknown"):
        made.update_parameters(unknown_time=1)


def test_a_refusal(kind: Kind, tmp_path: Path) -> None:
    made = kind.executor(tmp_path)
    made.update_parameters(slurm_additional_parameters={"reservation": "no-such"})
    with pytest.raises(utils.FailedJobError if kind.cluster == "slurm" else utils.FailedSubmissionError):
        made.submit(three_times, 1)  # each says what sbatch said


def test_set_up_and_teardown(kind: Kind, tmp_path: Path) -> None:
    made = kind.executor(tmp_path, slurm_setup=["export FOUND='a word'"], slurm_teardown=[f"touch {tmp_path}/down"])

    def found() -> str | None:
        return os.environ.get("FOUND")

    job = made.submit(found)
    assert job.results() == ["a word"] * kind.tasks
    until((tmp_path / "down").exists)


@pytest.mark.parametrize("name", ["it's two $(touch b) ü", "%j/deeper"])
def test_folders_with_hard_names(kind: Kind, tmp_path: Path, name: str) -> None:
    job = kind.executor(tmp_path / name).submit(three_times, 2)
    assert job.results() == [6] * kind.tasks
    assert job.task(0).stdout() is not None and not (tmp_path / "b").exists()


# --- helpers ----------------------------------------------------------------------------------------------------------


def test_jobs_as_they_end(kind: Kind, tmp_path: Path) -> None:
    jobs = kind.executor(tmp_path).map_array(naps, [20, 0.1, 0.1])
    ended = [job for job in as_completed(jobs, poll_frequency=0.5)]
    assert ended[-1] is jobs[0] and {id(job) for job in ended[:2]} == {id(job) for job in jobs[1:]}


def test_monitored_jobs(kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = kind.executor(tmp_path)
    good, bad = made.submit(three_times, 2), made.submit(three_times, "x")
    monitor_jobs([good, bad], poll_frequency=1, test_mode=True)
    assert good.done() and bad.done()
    until(lambda: bad.watcher.get_state(bad.job_id, mode="force") == "FAILED")
    assert good.state == "COMPLETED"


def test_functions_of_the_helpers(kind: Kind, tmp_path: Path) -> None:
    several = FunctionSequence()
    several.add(three_times, 4)
    several.add(three_times, 5)
    much = "for i in range(2000): print('-' * 1024)\nprint('all of it')"
    made = kind.executor(tmp_path)
    jobs = [
        made.submit(several),
        made.submit(CommandFunction([sys.executable, "-c", much])),
        made.submit(CommandFunction([sys.executable, "-c", "raise SystemExit('too bad')"])),
    ]
    assert jobs[0].results() == [[12, 15]] * kind.tasks
    assert all("all of it" in text for text in jobs[1].results())
    with pytest.raises(utils.FailedJobError, match="too bad"):
        jobs[2].results()


@pytest.mark.skipif(shutil.which("rsync") is None, reason="no rsync")
def test_a_snapshot(kind: Kind, tmp_path: Path) -> None:
    made = kind.executor(tmp_path / "log")
    with RsyncSnapshot(snapshot_dir=tmp_path / "snap"):
        job = made.submit(os.getcwd)
    assert set(job.results()) == {str(tmp_path / "snap")}


def test_a_job_that_submits_in_a_clean_environment(kind: Kind, tmp_path: Path) -> None:
    def inside() -> Any:
        if submitit.JobEnvironment().global_rank:
            return 6
        with clean_env():
            return submitit.AutoExecutor(tmp_path / "inner", cluster="debug").submit(three_times, 2).result()

    assert kind.executor(tmp_path / "outer").submit(inside).results() == [6] * kind.tasks


def test_what_torch_is_told(kind: Kind, tmp_path: Path) -> None:
    def look() -> tuple[Any, ...]:
        found = TorchDistributedEnvironment()
        return found.world_size, found.rank, found.local_rank, found.local_world_size, found.master_addr

    seen = kind.executor(tmp_path).submit(look).results()
    assert [(world, rank) for world, rank, *_ in seen] == [(kind.tasks, rank) for rank in range(kind.tasks)]
    assert len({where for *_, where in seen}) == 1
    together = kind.tasks if kind.cluster == "slurm" else 1  # tasks of two components are on two nodes
    assert {own for *_, own, _ in seen} == {together}


# --- async ------------------------------------------------------------------------------------------------------------


def test_awaited_jobs(kind: Kind, tmp_path: Path) -> None:
    async def wait(job: core.Job[Any]) -> tuple[list[Any], list[Any]]:
        every = await job.awaitable().results(poll_interval=0.5)
        ended = itertools.islice(job.awaitable().results_as_completed(poll_interval=0.5), kind.tasks)
        each = [await one for one in ended]  # of several tasks submitit awaits once too often
        if kind.tasks == 1:
            assert await job.awaitable().result(poll_interval=0.5) == every[0]
        return every, each

    job = kind.executor(tmp_path).submit(three_times, 8)
    assert asyncio.run(wait(job)) == ([24] * kind.tasks, [24] * kind.tasks)


# --- what differs, each with its reason in docs/submission.md ---------------------------------------------------------


def _differs(name: str, seen: dict[str, Any], slurm: Any, ours: Any) -> None:
    for kind, found in seen.items():
        assert found == (slurm if kind.startswith("slurm,") or kind == "slurm" else ours), (name, kind, found)


def _of_each(tmp_path: Path, look: Callable[[Kind, Path], Any], kinds: list[Kind]) -> dict[str, Any]:
    return {kind.name: look(kind, tmp_path / str(index)) for index, kind in enumerate(kinds)}


def test_differs_when_one_task_fails(tmp_path: Path) -> None:
    def one_of_two() -> str:
        if submitit.JobEnvironment().global_rank:
            raise ValueError("the second")
        time.sleep(20)
        return "the first"

    def look(kind: Kind, folder: Path) -> Any:
        job = kind.executor(folder).submit(one_of_two)
        with pytest.raises(utils.FailedJobError, match="the second"):
            raise job.exception()
        return job.task(0).exception() is None

    seen = _of_each(tmp_path, look, [kind for kind in KINDS if kind.tasks == 2])
    _differs("whether the others go on", seen, slurm=True, ours=False)


def test_differs_what_sbatch_is_asked_for(tmp_path: Path) -> None:
    def look(kind: Kind, folder: Path) -> Any:
        text = kind.executor(folder, gpus_per_node=0).submit(three_times, 1).paths.submission_file.read_text()
        return "--wckey=submitit" in text, "--gpus-per-node=0" in text, "--comment=" in text

    _differs("wckey, no GPUs, a comment", _of_each(tmp_path, look, KINDS), (True, True, False), (False, False, True))


def test_differs_ids_of_several_jobs(tmp_path: Path) -> None:
    def look(kind: Kind, folder: Path) -> Any:
        jobs = kind.executor(folder).map_array(three_times, [1, 2])
        assert [job.results()[0] for job in jobs] == [3, 6]
        return {"_" in job.job_id for job in jobs}

    seen = _of_each(tmp_path, look, KINDS)
    assert seen.pop("slurmhet, two components") == {False}  # Slurm has no arrays of heterogeneous jobs
    assert all(found == {True} for found in seen.values()), seen


# --- slurmhet alone ---------------------------------------------------------------------------------------------------

OURS = [kind for kind in KINDS if kind.cluster == "slurmhet"]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name, indirect=True)
def test_names_that_slurm_stores_otherwise(kind: Kind, tmp_path: Path) -> None:
    names = ["☃🚀", "", "n" * 255, "a \"b\" 'c' `d` \\e", "renamed"]
    jobs = [kind.executor(tmp_path, name=name).submit(naps, 10) for name in names]
    subprocess.run(["scontrol", "update", f"JobId={jobs[-1].job_id}", "name=x"], check=True)
    for job in jobs:
        job.watcher._registered_at[job.job_id] -= 120  # as if it had been known for two minutes
    assert all(job.slurm_state().source != "nobody" for job in jobs)  # type: ignore[attr-defined]
    assert [job.results() for job in jobs] == [[10] * kind.tasks] * len(jobs)
    until(lambda: {job.slurm_state().state for job in jobs} == {"COMPLETED"})  # type: ignore[attr-defined]


class Noting:
    """A checkpointable function that notes that it was asked for its checkpoint."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> None:
        Path(self.path + ".began").touch()
        time.sleep(600)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        Path(self.path).touch()
        return submitit.helpers.DelayedSubmission(self)


def test_the_signal_before_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = []
    for kind in OURS:
        for signal in ("USR1", "USR2"):
            monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", signal)
            note = tmp_path / f"{kind.tasks}-{signal}"
            job = kind.executor(tmp_path / "log", timeout_min=2, slurm_signal_delay_s=20).submit(Noting(str(note)))
            assert f"--signal={signal}@20" in job.paths.submission_file.read_text()
            notes.append((job, note))
    until(lambda: all(note.exists() for _, note in notes))
    for job, _ in notes:
        job.cancel()
