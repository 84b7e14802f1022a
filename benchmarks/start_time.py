"""Measure the time from a job's start to the end of its first step, beyond importing torch, on the testbed.

    eval "$(holmes testbed env)"; python benchmarks/start_time.py [--runs 5]

The import is timed with as many simultaneous Python processes as the job has ranks (the testbed's nodes are this
machine). Slurm rounds job starts to seconds, so a figure may be up to a second too long. Prints the inputs, each pair
and the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from holmes_hpc.records.run import RunDirectory

LAYOUT, RANKS = ["plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "train.steps=1"], 4
IMPORT = "import time; b = time.time(); import torch; print(time.time() - b)"


def import_s() -> float:
    """Return the longest import time of torch among simultaneous processes, one per rank, in seconds."""
    ranks = [subprocess.Popen([sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, text=True) for _ in range(RANKS)]
    return max(float(rank.communicate()[0]) for rank in ranks)


def first_step_s() -> float:
    """Return the seconds from Slurm's start of a job to the end of its first step."""
    name = f"start-{time.time_ns()}"
    subprocess.run(
        [str(Path(sys.executable).with_name("holmes")), "run", f"name={name}", *LAYOUT], check=True, capture_output=True
    )
    run = RunDirectory(Path(os.environ.get("HOLMES_RUNS", "runs")) / name)
    job = str(run.read_run()["slurm"]["job_id"])
    start = subprocess.run(["sacct", "-nXPj", job, "-o", "Start"], capture_output=True, text=True, check=True).stdout
    return float(run.metrics()[0]["time"]) - datetime.fromisoformat(start.split()[0]).timestamp()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=5)
    arguments = options.parse_args()
    print(f"inputs: {' '.join(LAYOUT)}, {arguments.runs} runs, load {os.getloadavg()[0]:.2f}")
    starts, imports = [], []
    for number in range(arguments.runs):
        imports.append(import_s())
        starts.append(first_step_s())
        print(f"run {number + 1}: first step after {starts[-1]:.1f} s, importing torch {imports[-1]:.1f} s", flush=True)
    step, torch = statistics.median(starts), statistics.median(imports)
    print(f"medians: first step after {step:.1f} s, importing torch {torch:.1f} s; difference {step - torch:.1f} s")


if __name__ == "__main__":
    main()
