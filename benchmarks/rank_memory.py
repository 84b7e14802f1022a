"""Measure the memory of a rank beyond weights, gradients, optimizer and activations.

    python benchmarks/rank_memory.py [OVERRIDES]

Local ranks run on CPUs, one run per model size. The peak is the resident memory of a rank's process, with Python and
its libraries. The model's share is the planner's prediction, which planner_memory.py compares with all live tensors.
Prints the inputs, and both values and their difference for the rank with the largest difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory

SIZES = {
    "gpt_tiny": [],
    "12 layers x 512": ["model.layers=12", "model.hidden=512", "model.ffn=1376", "model.vocab=16000"],
}
COMMON = [
    "launcher=local",
    "plan.pp=2",
    "plan.dp=2",
    "plan.tp=1",
    "train.steps=3",
    "batch.sequence_length=128",
    "batch.global_size=8",
]
LIMIT_MIB = 500


def main() -> None:
    common = [*COMMON, *sys.argv[1:]]
    print(f"inputs: {' '.join(common)}, load {os.getloadavg()[0]:.2f}")
    for name, overrides in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="holmes-memory-") as folder:
            run = RunDirectory(Path(folder) / "run")
            subprocess.run(
                [str(Path(sys.executable).with_name("holmes")), "run", f"run_dir={run.path}", *common, *overrides],
                check=True,
                capture_output=True,
            )
            plan, peak_bytes = Plan.read(run.plan_path), run.metrics()[-1]["peak_memory_bytes"]
        assert plan.predicted is not None
        model_bytes = plan.predicted.memory_bytes_per_gpu
        difference, stage = max(
            (peak - model, stage) for stage, (peak, model) in enumerate(zip(peak_bytes, model_bytes, strict=True))
        )
        print(
            f"{name}: stage {stage} has {peak_bytes[stage] / 2**20:.0f} MiB, the model's share is "
            f"{model_bytes[stage] / 2**20:.0f} MiB; difference {difference / 2**20:.0f} MiB (at most {LIMIT_MIB})",
            flush=True,
        )


if __name__ == "__main__":
    main()
