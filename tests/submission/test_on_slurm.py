"""The executor as submitit's users call it, and the jobs of plans, on a real Slurm."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plans
import pytest
import submitit
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from slurm_jobs import (  # noqa: F401 (fixtures)
    THREE,
    Counting,
    executor,
    folder,
    functions_travel_with_the_pickle,
    job_ids,
    skip_where_a_requeue_cancels,
    sleeper,
    slurm_release,
    start,
    until,
)

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.executor import preflight
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle.progress import report_progress
from holmes_hpc.submission.lifecycle.status import cancel_run, job_of, run_status
from holmes_hpc.submission.plan_job import PlannedJob, submit_plan

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("testbed")]


def where_am_i(word: str) -> dict[str, Any]:
    environment: Any = submitit.JobEnvironment()
    print("said", word, flush=True)
    return {
        "rank": environment.global_rank,
        "component": environment.component,
        "host": environment.hostname,
        "hosts": list(environment.hostnames),
        "job": environment.job_id,
        "size": environment.num_tasks,
        "nodes": environment.num_nodes,
        "word": word,
    }


NASTY = "a b 'c' \"d\" $(touch pwned) `touch pwned`; touch pwned\n#SBATCH --array=0-9 ü☃\\"


def test_ranks_components_and_arguments_arrive(folder: Path) -> None:
    name = 'n "it\'s" #1; $(touch pwned) ü'
    job = executor(folder / "log %j", THREE, name=name).submit(where_am_i, NASTY)
    found = job.results()
    assert [f["rank"] for f in found] == [0, 1, 2, 3, 4] and {f["size"] for f in found} == {5}
    assert [f["component"] for f in found] == [0, 0, 1, 1, 2]
    assert [f["host"] for f in found] == found[0]["hosts"] and {f["nodes"] for f in found} == {5}
    assert {f["job"] for f in found} == {job.job_id} and {f["word"] for f in found} == {NASTY}
    assert f"said {NASTY}" in job.task(4).stdout()
    until(lambda: job.done(force_check=True) and job.slurm_state().state == "COMPLETED")
    assert subprocess.run(["scontrol", "show", "job", job.job_id], capture_output=True, text=True).stdout.count(name)


def test_requested_cpus_and_memory_are_granted(folder: Path) -> None:
    """Component 0 requests all memory of its nodes, 1 a part of it. The testbed has no GPUs."""
    components = [{**THREE[0], "cpus_per_task": 4, "mem": "0"}, {**THREE[1], "cpus_per_task": 2, "mem": "4096M"}]
    job = executor(folder, components).submit(where_am_i, "x")
    assert [f["component"] for f in job.results()] == [0, 0, 1, 1]
    shown = subprocess.run(["scontrol", "show", "job", "-o", job.job_id], capture_output=True, text=True).stdout
    lines = sorted(shown.splitlines(), key=lambda line: line.partition(" HetJobOffset=")[2])  # one digit
    for line, cpus, memory in zip(lines, (4, 2), ("0", "4G"), strict=True):
        assert f" CPUs/Task={cpus} " in line and f" MinMemoryNode={memory} " in line, line


def echo(*words: str) -> tuple[str, ...]:
    print(*words, sep="\n", flush=True)
    return words


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


LINE = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30).map(lambda s: f"n{s}n")


@example(
    words=[NASTY, "", "\t", "-", "--x=$(touch pwned)"],
    name="n\\ \"'`$(touch pwned)`' #1 % ü☃ n",
    place="a %t b'; touch pwned; '\"☃ $(touch pwned)",
)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    words=st.lists(
        TEXT | st.sampled_from(["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", "%j%t", "#"]),
        min_size=20,
        max_size=20,
    ),
    name=LINE | TEXT,
    place=LINE,
)
def test_names_paths_and_arguments_arrive_unchanged_or_are_refused(
    folder: Path, words: list[str], name: str, place: str
) -> None:
    """No shell executes them, neither here nor in sbatch, the batch script or a task."""
    inner = folder / (place.replace("/", "").replace("\0", "").strip(".") or "x")
    control = any(ord(c) < 32 or ord(c) == 127 for c in name)
    try:
        job = executor(inner, THREE[2:], name=name or "x").submit(echo, *words)
    except SubmissionError as e:
        assert control or any(c in inner.name for c in "\\") or any(ord(c) < 32 or ord(c) == 127 for c in inner.name), e
        return
    assert not control
    assert job.results() == [tuple(words)]
    shown = subprocess.run(
        ["squeue", "--states=all", "-h", "-j", job.job_id, "-o", "%j"], capture_output=True, text=True
    )
    assert shown.stdout.rstrip("\n") == (name or "x")


def test_one_component_is_a_plain_job(folder: Path) -> None:
    job = executor(folder, [{"partition": "eth", "nodes": 2, "tasks_per_node": 2}]).submit(where_am_i, "x")
    assert [f["component"] for f in asyncio.run(job.awaitable().results())] == [0] * 4


SCRIPT = """
import asyncio, os, submitit

def where(word):
    return word, os.environ["SLURMD_NODENAME"]

if __name__ == "__main__":
    executor = submitit.SlurmExecutor(folder="log")
    executor.update_parameters(job_name="mine", time=3, partition="ib", ntasks_per_node=1, cpus_per_task=1,
                               setup=["export SAID=1"], array_parallelism=2, comment="a b")
    jobs = executor.map_array(where, ["a", "b c", "d"])
    print([job.results()[0][0] for job in jobs])
    with executor.batch():
        jobs = [executor.submit(os.getenv, name) for name in ("SAID", "NOTHING")]
    print([job.results()[0] for job in jobs], [job.done() for job in jobs])
    job = executor.submit(submitit.helpers.CommandFunction(["hostname"]))
    print(asyncio.run(job.awaitable().results())[0] in os.popen("sinfo -hN -o %N").read())
"""
NEEDS = [
    ("submitit.SlurmExecutor", "SlurmHetExecutor"),
    ('folder="log"', f'folder="log", components={THREE[:2]!r}'),
    ("import asyncio", "from holmes_hpc.submission.executor.slurmhet import SlurmHetExecutor\nimport asyncio"),
]


@pytest.mark.parametrize("changes", [[], NEEDS], ids=["SlurmExecutor", "hetjobs"])
def test_a_script_for_submitits_executor_runs_after_three_changes(
    tmp_path: Path, changes: list[tuple[str, str]]
) -> None:
    text = SCRIPT
    for old, new in changes:
        text = text.replace(old, new)
    (tmp_path / "script.py").write_text(text)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.stdout.splitlines() == ["['a', 'b c', 'd']", "['1', None] [True, True]", "True"], done.stderr


def test_different_cpus_per_task_still_make_one_step(folder: Path) -> None:
    parts = [{**THREE[0], "cpus_per_task": 2}, {**THREE[2], "cpus_per_task": 3, "tasks_per_node": 2}]
    found = executor(folder, parts).submit(where_am_i, "x").results()
    assert [f["rank"] for f in found] == [0, 1, 2, 3] and [f["component"] for f in found] == [0, 0, 1, 1]


def fail_on_rank_3(where: str) -> None:
    if os.environ["SLURM_PROCID"] == "3":
        raise ValueError("rank 3 on purpose")
    time.sleep(60)


def test_a_failed_component_fails_the_job_with_its_own_error(folder: Path) -> None:
    job = executor(folder, THREE).submit(fail_on_rank_3, "x")
    until(lambda: job.slurm_state().state == "FAILED")
    assert job.done()
    assert "rank 3 on purpose" in str(job.exception())


@pytest.mark.parametrize("which", ["leader", "component"])
def test_cancelled(folder: Path, which: str) -> None:
    job = executor(folder, THREE[:2]).submit(sleeper, 60)
    until(lambda: job.slurm_state().state == "RUNNING")
    if which == "leader":
        job.cancel()
        until(lambda: job.slurm_state().state == "CANCELLED")
    else:  # cancelling one component must not leave the others running; srun heeds it once all ranks have started
        until(lambda: all(job.task(i).paths.stdout.exists() for i in range(job.num_tasks)))
        subprocess.run(["scancel", f"{job.job_id}+1"], check=True)
        until(lambda: job.slurm_state().ended)
        assert job.slurm_state().state != "COMPLETED"
    assert job.done(force_check=True)
    until(lambda: not any(j.startswith(job.job_id) for j in job_ids()))


def test_a_throttled_batch_never_runs_more_jobs_than_allowed(folder: Path) -> None:
    made = executor(folder, [THREE[2], {**THREE[0], "nodes": 1}], slurmhet_array_parallelism=1)
    jobs = made.map_array(sleeper, [1.0, 0.5, 0.5])
    assert [job.results() for job in jobs] == [["slept"] * 2] * 3

    def times() -> list[str]:
        ids = ",".join(job.job_id for job in jobs)
        rows = subprocess.run(
            ["sacct", "-X", "-n", "-P", "-o", "Start,End", "-j", ids],
            capture_output=True,
            text=True,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        ).stdout.split()
        return rows if len(rows) == 6 and not any("Unknown" in row for row in rows) else []

    rows = until(times)
    leaders = [tuple(int(x) for x in row.split("|")) for row in rows[::2]]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(leaders))


def test_submitits_checkpoint_protocol_requeues_at_the_leader(folder: Path) -> None:
    skip_where_a_requeue_cancels()
    job = executor(folder, THREE[:2]).submit(Counting(str(folder / "mark")))
    until(lambda: len(list(folder.glob("mark-0-*"))) == 4)
    job._interrupt(timeout=False)
    until(lambda: all(job.task(i).paths.result_pickle.exists() for i in range(4)))
    assert job.results() == ["round 1"] * 4
    assert len(list(folder.glob("mark-*"))) == 8
    until(lambda: job.slurm_state().state == "COMPLETED")


def test_an_infeasible_component_is_named_with_a_hint(folder: Path) -> None:
    preflight.clear_cache()
    before = subprocess.run(["squeue", "--states=all", "-h", "-o", "%i"], capture_output=True, text=True).stdout
    with pytest.raises(SubmissionError, match=r"component 1 \(5 nodes of roce \[nic_roce\]\): .*at most 4 nodes"):
        executor(folder, [THREE[0], {**THREE[1], "nodes": 5}]).submit(sleeper, 0)
    with pytest.raises(SubmissionError, match=r"component 1 .*without constraint=nic_nonsense"):
        executor(folder, [THREE[0], {**THREE[1], "constraint": "nic_nonsense"}]).submit(sleeper, 0)
    with pytest.raises(SubmissionError, match=r"component 0 .*did you mean 'roce'"):
        executor(folder, [{**THREE[0], "partition": "rocce"}, THREE[1]]).submit(sleeper, 0)
    with pytest.raises(SubmissionError, match=r"components 0 and 1: they need 6 nodes together, but only 4"):
        executor(folder, [{**THREE[0], "nodes": 3}, {**THREE[0], "nodes": 3}]).submit(sleeper, 0)
    after = subprocess.run(["squeue", "--states=all", "-h", "-o", "%i"], capture_output=True, text=True).stdout
    assert set(after.split()) <= set(before.split())
    assert subprocess.run(["scontrol", "ping"], capture_output=True, text=True).stdout.count("UP") == 1


def test_a_time_limit_above_the_partitions_is_refused(folder: Path) -> None:
    """Slurm would accept it, and the job would wait for ever."""
    subprocess.run(["scontrol", "create", "PartitionName=short", "Nodes=eth[1-2]", "MaxTime=2"], check=True)
    preflight.clear_cache()
    try:
        with pytest.raises(SubmissionError, match=r"component 1 .*3 min exceeds the partition's time limit of 2 min"):
            executor(folder, [THREE[0], {"partition": "short"}]).submit(sleeper, 0)
    finally:
        subprocess.run(["scontrol", "delete", "PartitionName=short"], check=True)


# -- a plan's job ----------------------------------------------------------------------------------------------------


def test_a_plans_job_completes(folder: Path) -> None:
    run = start(folder, plans.quick, note=NASTY)
    assert report_progress(run, job_of(run)) == 0
    result = run.read_result()
    assert result is not None and (result["state"], result["writer"]) == ("completed", "batch")
    assert result["final"]["loss"] == 2
    logs = [run.log_path(rank).read_text() for rank in range(4)]
    assert [re.search(r"rank (\d) on (\w+)", log).groups() for log in logs] == [  # type: ignore[union-attr]
        ("0", "ib1"),
        ("1", "ib2"),
        ("2", "roce1"),
        ("3", "roce2"),
    ] or len({log.split()[3] for log in logs}) == 4
    assert all(NASTY in log for log in logs)
    assert run_status(run).state == "completed"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_job_and_is_reported(folder: Path, rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    run = start(folder, plans.waiting_rank, die={str(rank): "kill"})
    assert report_progress(run, job_of(run)) == 1
    result = run.read_result()
    assert result is not None and (result["state"], result["writer"]) == ("failed", "batch")
    assert result["failed_rank"] == rank
    assert result["failed_node"].startswith("ib" if rank == 0 else "roce") and "SIGKILL" in result["error"]
    assert result["log_tail"][-1] == f"rank {rank} waits"
    assert f"rank {rank} on {result['failed_node']}" in capfd.readouterr().err


def test_a_raised_error_is_reported_not_those_it_caused(folder: Path) -> None:
    run = start(folder, plans.waiting_rank, die={"3": "raise"})
    assert report_progress(run, job_of(run)) == 1
    result = run.read_result()
    assert result is not None and (result["failed_rank"], result["error"]) == (3, "ValueError: on purpose")


def test_a_cancelled_run_has_that_state(folder: Path) -> None:
    run = start(folder, plans.waiting_rank)
    until(lambda: len(list((run.path / "here").glob("*"))) == 4)
    assert cancel_run(run).state == "RUNNING"
    until(lambda: (run.read_result() or {}).get("state") == "cancelled")
    until(lambda: run_status(run).state == "cancelled")


def test_restarts_continue_while_attempts_make_new_steps(folder: Path) -> None:
    run = start(
        folder, plans.waiting_rank, die={"1": "kill"}, steps_per_attempt=2, train={"steps": 9, "max_restarts": 2}
    )
    assert report_progress(run, job_of(run)) == 1
    assert run.attempt == 3 and run_status(run).failed_rank == 1
    assert [m["step"] for m in run.metrics()] == [2, 4, 6]


def test_restarts_stop_without_a_new_step(folder: Path) -> None:
    run = start(folder, plans.waiting_rank, die={"1": "kill"}, train={"steps": 9, "max_restarts": 5})
    assert report_progress(run, job_of(run)) == 1
    assert run.attempt == 1 and "no new step" in (run.logs / "batch.txt").read_text()


@pytest.mark.parametrize("fabrics", [("ib-a",), ("ib-a", "roce-a")], ids=["plain", "heterogeneous"])
def test_an_expedited_job_without_restarts_ends_as_failed(folder: Path, fabrics: tuple[str, ...]) -> None:
    """Otherwise Slurm would requeue it, and hold it."""
    if slurm_release() < (25, 11):
        pytest.skip("sbatch --requeue=expedite needs Slurm 25.11")
    plan, config = plans.plan(*fabrics), {**plans.CONFIG, "die": {"1": "kill"}}
    run = RunDirectory.create(folder / "run", plan_text=plan.to_yaml(), config=config)
    site = SlurmSettings(timeout_min=3, additional={"requeue": "expedite"})
    submit_plan(PlannedJob(plan, config, plans.waiting_rank, site), run.path)
    assert report_progress(run, job_of(run)) == 1
    until(lambda: job_of(run).id not in {job.partition("+")[0] for job in job_ids()})
    assert (run_status(run).state, job_of(run).state("force").state, run.attempt) == ("failed", "FAILED", 1)


def test_the_follower_writes_the_result_after_the_batch_script_died(folder: Path) -> None:
    run = start(folder, plans.waiting_rank)
    until(lambda: len(list((run.path / "here").glob("*"))) == 4)
    subprocess.run(["scancel", "--batch", "--signal=KILL", job_of(run).id], check=True)
    assert report_progress(run, job_of(run)) == 1
    result = run.read_result()
    assert result is not None and result["writer"] == "follower" and result["state"] in ("failed", "cancelled")


def test_a_job_is_restored_from_its_run_directory(folder: Path) -> None:
    run = start(folder, plans.quick)
    job = SlurmHetJob(run.path / "submission", job_of(run).id, tasks=range(4))
    assert job.results() == [{"loss": 2.0}] * 4
    assert "rank 3 on" in job.task(3).stdout()
