"""Compare predicted and measured step times of mixtures of experts on the testbed: twelve cells, one calibration.

    holmes testbed up; eval "$(holmes testbed env)"
    python benchmarks/expert_times.py [--steps 8] [--root runs/expert-times]

A cell has one of three sizes, top 1 or 2, and EP 1 or 2 inside each of two fabrics of two nodes, PP 2. `calibrate`
runs once, with a dense model. All plans and predictions are written before any run starts. Medians of the steps after
the first two. A restart skips finished runs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from pathlib import Path

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory

PACE = ("train.pace_layer_ms=40", "model=gpt_tiny", "model.bias=false", "data=synthetic")
NODES = ("plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "plan.dp=2", "plan.schedule=1f1b", "model.experts.count=4")
SIZES = {
    "hidden 256": (),
    "hidden 96": ("model.hidden=96", "model.ffn=256"),
    "hidden 144": ("model.hidden=144", "model.ffn=384"),
}
WARM_UP = 2  # steps that do not count


def run_holmes(*arguments: str) -> None:
    """Run a command of `holmes`. Exit if it fails."""
    command = [str(Path(sys.executable).with_name("holmes")), *arguments]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"{' '.join(command)}: exit code {code}")


def main() -> None:
    """Calibrate, plan and run all cells, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--root", type=Path, default=Path("runs/expert-times"))
    options = parser.parse_args()
    root: Path = options.root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    print("inputs:", *PACE, *NODES, f"train.steps={options.steps}", flush=True)
    calibration = root / "calibration.yaml"
    if not calibration.exists():
        run_holmes("calibrate", f"run_dir={root / 'calibration'}", *PACE, "-o", str(calibration))
    cells = {
        f"{size}, top {top_k}, EP {ep}": (*overrides, f"model.experts.top_k={top_k}", f"plan.ep={ep}")
        for (size, overrides), top_k, ep in itertools.product(SIZES.items(), (1, 2), (1, 2))
    }
    plans = {cell: root / f"{cell.replace(', ', '-').replace(' ', '')}.yaml" for cell in cells}
    for cell, overrides in cells.items():
        if not plans[cell].exists():
            run_holmes("plan", *PACE, *NODES, *overrides, f"calibration={calibration}", "-o", str(plans[cell]))
    print("| cell | measured | predicted | error |\n|---|---|---|---|", flush=True)
    for cell, path in plans.items():
        run = RunDirectory(path.with_suffix(""))
        if (run.read_result() or {}).get("state") != "completed":
            run_holmes(
                "run", f"plan_file={path}", f"train.steps={options.steps}", "data=synthetic", f"run_dir={run.path}"
            )
        measured_s = statistics.median(line["step_time_s"] for line in run.metrics()[WARM_UP:])
        predicted = Plan.read(path).predicted
        assert predicted is not None
        error = predicted.step_time_s / measured_s - 1
        print(f"| {cell} | {measured_s:.3f} s | {predicted.step_time_s:.3f} s | {error:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
