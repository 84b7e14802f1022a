"""What a rank holds in memory beyond weights, gradients, optimizer and activations.

    python benchmarks/rank_memory.py [OVERRIDES]

Local ranks on CPUs, one run for each size of model. Held: the most memory that the operating system gave a rank's
process (Python and its libraries included); the model's share is what the planner foretells, which
benchmarks/planner_memory.py compares with every live tensor. Printed: the inputs, and the two and their difference for
the rank that holds most beyond.
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
        with tempfile.TemporaryDirectory(prefix="holmes-memory-") as made:
            run = RunDirectory(Path(made) / "run")
            subprocess.run(
                [str(Path(sys.executable).with_name("holmes")), "run", f"run_dir={run.path}", *common, *overrides],
                check=True,
                capture_output=True,
            )
            plan, held = Plan.read(run.plan_path), run.metrics()[-1]["peak_memory_bytes"]
        assert plan.predicted is not None
        own = [
            plan.predicted.memory_bytes_per_gpu[stage]
            for stage in range(plan.parallel.pp)
            for _ in range(plan.world_size // plan.parallel.pp)
        ]
        beyond, rank = max((h - o, r) for r, (h, o) in enumerate(zip(held, own, strict=True)))
        print(
            f"{name}: rank {rank} holds {held[rank] / 2**20:.0f} MiB, the model's share is "
            f"{own[rank] / 2**20:.0f} MiB; beyond it {beyond / 2**20:.0f} MiB (at most {LIMIT_MIB})",
            flush=True,
        )


if __name__ == "__main__":
    main()
