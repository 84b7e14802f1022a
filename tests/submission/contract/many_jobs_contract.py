"""Many jobs of one process on a real Slurm: a throttle without its client, and status queries for 300 jobs.

make submission-contract
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import submitit
from rich.console import Console
from slurm_jobs import folder, functions_travel_with_the_pickle, until  # noqa: F401 (fixtures)

from holmes_hpc.slurm.commands import Answer
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.executor.watcher import WATCHER
from holmes_hpc.submission.sweeps.manifest import SweepJob, open_manifest
from holmes_hpc.submission.sweeps.sweep_table import live_table, sweep_status

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("testbed")]
JOBS = int(os.environ.get("JOBS", 300))
ONE, TWO = [{"partition": "ib"}], [{"partition": "ib"}, {"partition": "eth"}]
CLIENT = """
import os, sys, submitit
sys.path.insert(0, {here!r})
import cloudpickle, slurm_jobs
cloudpickle.register_pickle_by_value(slurm_jobs)
made = slurm_jobs.executor({folder!r}, {parts!r}, slurmhet_array_parallelism=2)
print(*(job.job_id for job in made.map_array(slurm_jobs.sleeper, [10, 1] * 4)), flush=True)
os.kill(os.getpid(), 9)
"""


def sixth(x: int) -> int:
    return 6 * x


@pytest.mark.parametrize("parts", [ONE, TWO], ids=["an array", "heterogeneous jobs"])
def test_throttle_works_without_its_client(folder: Path, parts: list[dict[str, Any]]) -> None:
    text = CLIENT.format(here=str(Path(__file__).parents[2] / "support"), folder=str(folder), parts=parts)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    jobs = [SlurmHetJob(folder, job_id) for job_id in done.stdout.split()]
    assert len(jobs) == 8, done.stderr
    until(lambda: all(job.slurm_state("standard").ended for job in jobs))
    assert [job.results() for job in jobs] == [["slept"] * len(parts)] * 8
    times = _times({job.job_id.partition("_")[0] for job in jobs})
    assert len(times) == 8 * len(parts), times
    total_s = max(end for _, end in times) - min(start for start, _ in times)
    running = max(sum(start <= moment < end for start, end in times) for moment, _ in times) / len(parts)
    print(f"{len(parts)} components: {total_s} s from the first start to the last end, at most {running:g} at a time")
    assert total_s <= 30 and running <= 2


def _times(ids: set[str]) -> list[tuple[int, int]]:
    """Return (start, end) of every component in epoch seconds, once the database has all of them."""

    def read() -> list[tuple[int, int]]:
        rows = subprocess.run(
            ["sacct", "-X", "-n", "-P", "-o", "Start,End", "-j", ",".join(ids)],
            capture_output=True,
            text=True,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        ).stdout.split()
        times = [row.split("|") for row in rows]
        return [(int(a), int(b)) for a, b in times] if all(b.isdigit() for _, b in times) else []

    component_times: list[tuple[int, int]] = until(read)
    return component_times


@pytest.mark.parametrize("parts", [ONE, TWO], ids=["an array", "heterogeneous jobs"])
def test_one_query_per_poll_for_many_jobs(
    folder: Path, parts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = submitit.AutoExecutor(folder / "log", cluster="slurmhet")
    executor.update_parameters(timeout_min=30, slurmhet_components=parts)
    start = time.monotonic()
    jobs = executor.map_array(sixth, range(JOBS))
    submitted = time.monotonic() - start
    manifest = open_manifest(folder, time.time())
    for num, job in enumerate(jobs):
        manifest.jobs.append(
            SweepJob(
                num,
                (f"x={num}",),
                str(num),
                "plain",
                "slurm",
                job.job_id,
                "log",
                len(parts),
                "submitit",
                time.time(),
                components=len(parts),
            )
        )
    manifest.put(manifest.jobs.pop())
    queries: list[str] = []

    def count_query(command: list[str]) -> Answer:
        queries.append(command[0])
        return type(WATCHER)._query(command)

    monkeypatch.setattr(WATCHER, "_query", count_query)
    screen = Console(file=io.StringIO(), width=120, height=40)
    polls, max_queries, max_draw_s = 0, 0, 0.0
    while True:
        queries.clear()
        poll_start = time.monotonic()
        rows = sweep_status(folder)
        screen.print(live_table(str(folder), rows, 40))
        max_draw_s = max(max_draw_s, time.monotonic() - poll_start)
        polls, max_queries = polls + 1, max(max_queries, len(queries))
        if all(job.done() for job in jobs):
            break
        time.sleep(2)
    print(
        f"{JOBS} jobs of {len(parts)} components: submitted in {submitted:.0f} s, ended after "
        f"{time.monotonic() - start:.0f} s; {polls} polls, at most {max_queries} queries in one, "
        f"at most {max_draw_s:.2f} s until the table is drawn"
    )
    assert [job.results() for job in jobs] == [[6 * x] * len(parts) for x in range(JOBS)]
    until(lambda: {job.slurm_state().state for job in jobs} == {"COMPLETED"})
    assert max_queries <= 1 and f"{JOBS} jobs" in screen.file.getvalue()  # type: ignore[attr-defined]
