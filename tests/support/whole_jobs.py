"""Runs from the command line on the testbed, followed and disturbed from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holmes_hpc.records.run import RunDirectory

HOLMES = str(Path(sys.executable).parent / "holmes")
LIMIT_S = 600  # for each command, enough for a busy machine


def holmes(*args: str, timeout: float = LIMIT_S, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HOLMES, *args], capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **environment}
    )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert process is None or process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < end, f"condition not true within {LIMIT_S} s"
        time.sleep(0.2)


def process_of(run: RunDirectory, rank: int) -> int:
    """Return the process id of a rank: its command names the run, its environment has the rank."""
    job = run.read_run()["slurm"]["job_id"]
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(e.partition("=")[::2] for e in (proc / "environ").read_text().split("\0"))
            arguments = (proc / "cmdline").read_text().split("\0")
        except OSError:
            continue
        leader = environment.get("SLURM_HET_JOB_ID") or environment.get("SLURM_JOB_ID")
        is_rank = (
            "python" in Path(arguments[0]).name
            and "holmes_hpc.submission.executor.task" in arguments[:6]
            and any(argument.startswith(str(run.path)) for argument in arguments)
        )  # jobs of other testbeds may have the same number
        if is_rank and leader == str(job) and environment.get("SLURM_PROCID") == str(rank):
            return int(proc.name)
    raise AssertionError(f"no process of rank {rank} of job {job}")
