"""Measure what copies of the training state in memory cost an elastic run, on the testbed.

    holmes testbed up; eval "$(holmes testbed env)"
    python benchmarks/copy_times.py [--pairs 5] [--root runs/copy-times]

Runs without copies and with copies every 10 steps alternate. Prints for each pair the mean step time after WARM_UP
steps, pauses included, and the ratio of the two; then the median ratio. A restart skips finished runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from holmes_hpc.records.run import RunDirectory

HOLMES = str(Path(sys.executable).with_name("holmes"))
WARM_UP, STEPS = 5, 65
OVERRIDES = (
    *("plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "plan.schedule=1f1b", f"train.steps={STEPS}"),
    *("elastic.enabled=true", "elastic.spares=0", "train.checkpoint_interval=0"),
)
MODEL = "model=gpt_tiny model.layers=2 model.hidden=64 model.ffn=128 batch.global_size=8 batch.sequence_length=32"


def mean_step_s(path: Path, copy_every: int, model: str) -> float:
    """Return the mean time from step to step of a run, which is started unless it is complete."""
    run = RunDirectory(path)
    if (run.read_result() or {}).get("state") != "completed":
        command = [HOLMES, "run", *OVERRIDES, *model.split(), f"elastic.copy_every={copy_every}", f"run_dir={path}"]
        if code := subprocess.run(command, capture_output=True).returncode:
            sys.exit(f"{' '.join(command)}: exit code {code}")
    times = [float(line["time"]) for line in run.metrics()]
    return (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default=f"{MODEL} train.pace_layer_ms=20", help="model, batch and pace")
    parser.add_argument("--root", type=Path, default=Path("runs/copy-times"))
    options = parser.parse_args()
    print("inputs:", *OVERRIDES, options.model, f"load {os.getloadavg()[0]:.1f}", flush=True)
    ratios = []
    for pair in range(options.pairs):
        seconds = {
            every: mean_step_s(options.root / f"{pair}-{every}", every, options.model)
            for every in ((0, 10), (10, 0))[pair % 2]
        }
        ratios.append(seconds[10] / seconds[0])
        print(f"pair {pair}: none {seconds[0]:.4f} s, every 10 steps {seconds[10]:.4f} s: {ratios[-1]:.4f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")


if __name__ == "__main__":
    main()
