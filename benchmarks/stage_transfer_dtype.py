"""Measure the loss and the bytes per transfer with rounded activations on a TCP edge (`plan.edge_dtype`).

    python benchmarks/stage_transfer_dtype.py [--steps 200] [--seeds 3] [--data runs/demo-data/stdlib]

Local processes train a small GPT in fp32 on two stages in two fabrics. `--data`: the output of `holmes data prepare
--stdlib -o PREFIX`. The table has the differences from the exact run and the differences between seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import spawn

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.console import table

MODEL = ModelSpec("small", layers=4, hidden=64, heads=4, vocab=257, ffn=256, kv_heads=4, max_positions=64)
BATCH = Batch(global_size=16, micro_size=4, sequence_length=64)


def losses(folder: Path, edge_dtype: str, seed: int, steps: int, prefix: str | None) -> list[float]:
    plan = spawn.plan(pp=2, model=MODEL, batch=BATCH, schedule="ahead", in_flight=(3, 1), edge_dtype=edge_dtype)
    train = {"steps": steps, "seed": seed, "lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 10}
    data = {"kind": "indexed", "prefix": str(Path(prefix).resolve()), "cache": None} if prefix else {}
    run = spawn.begin(folder, plan, {"train": train, "data": {**data, "seed": seed}}).finish(timeout_s=600)
    if any(run.codes):
        raise SystemExit(run.log(0))
    return run.column("loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data")
    arguments = parser.parse_args()
    rows, last_steps = [], max(1, arguments.steps // 10)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            (name, seed): losses(Path(folder, f"{name}-{seed}"), name, seed, arguments.steps, arguments.data)
            for seed in range(arguments.seeds)
            for name in ("same", "bf16", "fp16", "fp8")
        }
    values = BATCH.micro_size * BATCH.sequence_length * MODEL.hidden
    for name, nbytes in (("same", 4.0), ("bf16", 2.0), ("fp16", 2 + 4 / MODEL.hidden), ("fp8", 1 + 4 / MODEL.hidden)):
        final_losses = [statistics.mean(runs[name, seed][-last_steps:]) for seed in range(arguments.seeds)]
        differences = [
            statistics.mean(runs[name, seed][-last_steps:]) - statistics.mean(runs["same", seed][-last_steps:])
            for seed in range(arguments.seeds)
        ]
        largest = max(
            abs(x - y)
            for seed in range(arguments.seeds)
            for x, y in zip(runs[name, seed], runs["same", seed], strict=True)
        )
        rows.append(
            [
                name,
                f"{values * nbytes / 1000:.1f} kB",
                f"{statistics.mean(final_losses):.4f}",
                f"{min(final_losses):.4f} to {max(final_losses):.4f}",
                f"{statistics.mean(differences):+.5f}",
                f"{largest:.5f}",
            ]
        )
    table(
        f"mean loss of the last {last_steps} of {arguments.steps} steps, {arguments.seeds} seeds",
        ["edge_dtype", "a transfer", "mean", "seeds", "difference from exact", "largest in any step"],
        rows,
    )


if __name__ == "__main__":
    main()
