"""Measure submission and status of a sweep of 200 jobs, without the time of Slurm's own commands.

    python benchmarks/submission_sweep.py [JOBS]

Slurm's commands are replaced by stand-ins that answer at once. Limits (else exit code 1): 150 ms per submission, one
Slurm query per poll, 1 s for the status table of all jobs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Component, Plan, Schedule, Stage
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm import commands
from holmes_hpc.slurm.job_queries import SEPARATOR
from holmes_hpc.submission.executor import submit, watcher
from holmes_hpc.submission.plan_job import PlannedJob, submit_plan
from holmes_hpc.submission.sweeps import sweep_table as sweep
from holmes_hpc.submission.sweeps.manifest import SweepJob, open_manifest

SITE = Site(
    "bench",
    (
        Pool("ib-a", NicType.IB, "ib", 4, 8, 25, CPU, 200, "nic_ib"),
        Pool("roce-a", NicType.ROCE, "roce", 4, 8, 25, CPU, 200, "nic_roce"),
    ),
)
PLAN = Plan(
    "pipeline",
    ModelSpec("m", 8, 64, 8, 256, 128, 8),
    Batch(64, 1, 32),
    Parallel.uniform(pp=2, dp=32),
    "none",
    Schedule("1f1b", (2, 1)),
    (Component("ib", "nic_ib", "ib-a", 4, 8, (0,)), Component("roce", "nic_roce", "roce-a", 4, 8, (1,))),
    (Stage("ib-a", 4), Stage("roce-a", 4)),
    SITE,
)
SACCT = SEPARATOR.join(("{id}+{k}", "RUNNING", "0:0", "{now}", "None", "n1", "holmes-{name}"))


class StandIns:
    """Stand-ins for Slurm's commands that count the calls and their time."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.calls: list[str] = []
        self.seconds = 0.0

    def __call__(self, *arguments: str, **_: Any) -> commands.Answer:
        start = time.perf_counter()
        self.calls.append(arguments[0])
        out = err = ""
        if arguments[0] == "sbatch" and "--test-only" in arguments:
            err = "sbatch: Job 1 to start at 2030-01-01T00:00:00 using 4 processors on nodes n1 in partition p"
        elif arguments[0] == "sbatch":
            self.jobs.append(Path(arguments[-1]).parents[1].name)
            out = str(len(self.jobs))
        elif arguments[0] == "sacct":
            unix_s = int(time.time())
            out = (
                "\n".join(
                    SACCT.format(id=i, k=k, now=unix_s, name=name)
                    for i, name in enumerate(self.jobs, 1)
                    for k in (0, 1)
                )
                + "\n"
            )
        self.seconds += time.perf_counter() - start
        return commands.Answer(0, out, err)


def work(config: dict[str, Any]) -> dict[str, Any]:
    return config


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    stand_ins = StandIns()
    targets = (
        "holmes_hpc.slurm.commands.slurm",
        "holmes_hpc.submission.executor.submit.slurm",
        "holmes_hpc.submission.executor.watcher.slurm",
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch(targets[0], stand_ins),
        mock.patch(targets[1], stand_ins),
        mock.patch(targets[2], stand_ins),
        mock.patch("holmes_hpc.slurm.scontrol.output", lambda *_: ""),
    ):
        root = Path(folder)
        manifest = open_manifest(root, time.time())
        submission_s = []
        for number in range(count):
            start, slurm_s = time.perf_counter(), stand_ins.seconds
            config = {"train": {"steps": 100}, "run_dir": str(root / str(number))}
            run = RunDirectory.create(root / str(number), plan_text=PLAN.to_yaml(), config=config)
            job = submit_plan(PlannedJob(PLAN, config, work, SlurmSettings(timeout_min=60)), run.path)
            manifest.put(
                SweepJob(
                    number,
                    (f"seed={number}",),
                    str(number),
                    "plan",
                    "slurm",
                    job.job_id,
                    f"{number}/submission",
                    64,
                    f"holmes-{number}",
                    time.time(),
                )
            )
            submission_s.append(time.perf_counter() - start - (stand_ins.seconds - slurm_s))
            run.start_attempt({})
            for step in range(100):
                run.append_metrics({"step": step, "loss": 1.0, "tokens_per_s": 1.0, "attempt": 1})
        watcher.WATCHER.clear()
        watcher._YOUNG_S = 0  # as if the jobs were not new
        polls = []
        for _ in range(5):
            stand_ins.calls.clear()
            start = time.perf_counter()
            rows = sweep.sweep_status(root)
            sweep.table_cells(rows)
            polls.append((time.perf_counter() - start, len(stand_ins.calls)))
            assert len(rows) == count and all(r.state == "running" for r in rows), rows[0]
    submission_s.sort()
    status_s = sorted(seconds for seconds, _ in polls)[len(polls) // 2]
    queries = max(calls for _, calls in polls)
    print(f"{count} jobs of two components, 64 ranks each; {os.cpu_count()} cores")
    print(
        f"submission beyond Slurm's commands: median {1e3 * submission_s[len(submission_s) // 2]:.1f} ms, "
        f"slowest {1e3 * submission_s[-1]:.1f} ms (limit 150)"
    )
    print(f"Slurm queries per poll: {queries} (limit 1)")
    print(f"status of all jobs: {status_s:.3f} s (limit 1)")
    return 0 if submission_s[len(submission_s) // 2] < 0.15 and queries <= 1 and status_s < 1 else 1


if __name__ == "__main__":
    assert submit  # imported so that its name can be replaced
    sys.exit(main())
