"""Compare the speed of two checkouts: the demo's main job, or an experiment of each regime of the evaluation.

    holmes testbed up evaluation; eval "$(holmes testbed env)"
    python benchmarks/two_checkouts.py OLD/.venv/bin/holmes NEW/.venv/bin/holmes [--pairs 5] [--steps 8] [--jobs light]

Runs alternate: old, new, new, old, … A run's figure is the median of its step times without the first. Prints each
pair, and the median ratio old/new with its 95% interval (results.statistics.repeats_interval); above 1 the new checkout
is faster. The job `demo` needs the testbed's default topology, the regimes need `evaluation`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from evaluation_experiments import REGIMES, Experiment

from holmes_hpc.results.statistics import repeats_interval

DEMO = ("plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "plan.schedule=1f1b", "train.pace_layer_ms=10")


def overrides(job: str) -> list[str]:
    """Return the overrides of the demo's first job, or of a regime's hybrid environment on four nodes."""
    return [*DEMO] if job == "demo" else Experiment(job, "hybrid", 4, "holmes").overrides


def step_s(holmes: str, job: str, steps: int, run_dir: Path) -> float:
    """Run a job; return the median of its step times without the first, in seconds."""
    path = f"{Path(holmes).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOLMES_RUNS": str(run_dir.parent), "PATH": path}
    process = subprocess.run(
        [holmes, "run", f"run_dir={run_dir}", *overrides(job), f"train.steps={steps}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(holmes).parents[2],
    )
    if process.returncode:
        raise SystemExit(f"{holmes}: {job} failed:\n{process.stdout[-2000:]}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["step_time_s"] for line in lines[1:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("old")
    options.add_argument("new")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--jobs", default=",".join(REGIMES))
    options.add_argument("--steps", type=int, default=8)
    arguments = options.parse_args()
    print(
        f"inputs: old {arguments.old}, new {arguments.new}, {arguments.pairs} pairs, {arguments.steps} steps; "
        "hybrid, 4 nodes; shaped NICs, emulated compute except in unpaced",
        flush=True,
    )
    for job in arguments.jobs.split(","):
        ratios = []
        for pair in range(arguments.pairs):
            step_times: dict[str, float] = {}
            for holmes in (arguments.old, arguments.new) if pair % 2 == 0 else (arguments.new, arguments.old):
                with tempfile.TemporaryDirectory(prefix="holmes-pair-") as folder:
                    step_times[holmes] = step_s(
                        str(Path(holmes).absolute()), job, arguments.steps, Path(folder) / "run"
                    )
            ratios.append(step_times[arguments.old] / step_times[arguments.new])
            print(
                f"{job} pair {pair + 1}: old {step_times[arguments.old]:.4f} s, new {step_times[arguments.new]:.4f} s",
                flush=True,
            )
        ratio = repeats_interval(ratios)
        print(f"{job}: old/new {ratio.median:.3f}, 95% interval {ratio.low:.3f} to {ratio.high:.3f}", flush=True)


if __name__ == "__main__":
    if shutil.which("squeue") is None:
        raise SystemExit('squeue not found; start the testbed and run: eval "$(holmes testbed env)"')
    main()
