"""Is one checkout as fast as another? The demo's main job, or a cell of each regime of the evaluation, with both.

    holmes testbed up evaluation; eval "$(holmes testbed env)"
    python benchmarks/two_checkouts.py OLD/.venv/bin/holmes NEW/.venv/bin/holmes [--pairs 5] [--steps 8] [--jobs light]

Runs alternate: old, new, new, old, … The figure of a run is the median of its step times but the first's. Printed: each
pair, and the median ratio old/new of step times with its 95% interval (results.statistics.repeats_interval): above 1
the new one is faster. `demo` needs the testbed's default topology, the regimes its `evaluation`.
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

from evaluation_cells import REGIMES, Cell

from holmes_hpc.results.statistics import repeats_interval

DEMO = ("plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "plan.schedule=1f1b", "train.pace_layer_ms=10")


def overrides(job: str) -> list[str]:
    """Of the demo's first job, or of the hybrid environment on four nodes under a regime."""
    return [*DEMO] if job == "demo" else Cell(job, "hybrid", 4, "holmes").overrides


def step_s(holmes: str, job: str, steps: int, place: Path) -> float:
    """Run a job; the median of its step times but the first's, in seconds."""
    path = f"{Path(holmes).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "HOLMES_RUNS": str(place.parent), "PATH": path}
    done = subprocess.run(
        [holmes, "run", f"run_dir={place}", *overrides(job), f"train.steps={steps}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(holmes).parents[2],
    )
    if done.returncode:
        raise SystemExit(f"{holmes}: {job} failed:\n{done.stdout[-2000:]}")
    lines = (place / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["step_time_s"] for line in lines[1:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("old")
    options.add_argument("new")
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--jobs", default=",".join(REGIMES))
    options.add_argument("--steps", type=int, default=8)
    given = options.parse_args()
    print(
        f"inputs: old {given.old}, new {given.new}, {given.pairs} pairs, {given.steps} steps; hybrid, 4 nodes; "
        "shaped NICs, paced compute but in unpaced",
        flush=True,
    )
    for job in given.jobs.split(","):
        ratios = []
        for pair in range(given.pairs):
            found: dict[str, float] = {}
            for holmes in (given.old, given.new) if pair % 2 == 0 else (given.new, given.old):
                with tempfile.TemporaryDirectory(prefix="holmes-pair-") as made:
                    found[holmes] = step_s(str(Path(holmes).absolute()), job, given.steps, Path(made) / "run")
            ratios.append(found[given.old] / found[given.new])
            print(f"{job} pair {pair + 1}: old {found[given.old]:.4f} s, new {found[given.new]:.4f} s", flush=True)
        found_ratio = repeats_interval(ratios)
        print(
            f"{job}: old/new {found_ratio.median:.3f}, 95% interval {found_ratio.low:.3f} to {found_ratio.high:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    if shutil.which("squeue") is None:
        raise SystemExit("no Slurm here: bring the testbed up, and eval its environment")
    main()
