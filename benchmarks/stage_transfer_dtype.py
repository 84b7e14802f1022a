"""What rounding activations and their gradients on a TCP edge (`plan.edge_dtype`) does to the loss, and saves in bytes.

    python benchmarks/stage_transfer_dtype.py [--steps 200] [--seeds 3] [--data runs/demo-data/stdlib]

Local processes: a small GPT in fp32 over two stages in two fabrics. `--data`: made by `holmes data prepare --stdlib -o
PREFIX`. The differences to the exact run are shown beside the differences that another seed makes.
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
    ended = spawn.begin(folder, plan, {"train": train, "data": {**data, "seed": seed}}).finish(timeout_s=600)
    if any(ended.codes):
        raise SystemExit(ended.log(0))
    return ended.column("loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data")
    a = parser.parse_args()
    rows, last = [], max(1, a.steps // 10)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            (name, seed): losses(Path(folder, f"{name}-{seed}"), name, seed, a.steps, a.data)
            for seed in range(a.seeds)
            for name in ("same", "bf16", "fp16", "fp8")
        }
    size = BATCH.micro_size * BATCH.sequence_length * MODEL.hidden
    for name, nbytes in (("same", 4.0), ("bf16", 2.0), ("fp16", 2 + 4 / MODEL.hidden), ("fp8", 1 + 4 / MODEL.hidden)):
        ends = [statistics.mean(runs[name, seed][-last:]) for seed in range(a.seeds)]
        off = [
            statistics.mean(runs[name, seed][-last:]) - statistics.mean(runs["same", seed][-last:])
            for seed in range(a.seeds)
        ]
        most = max(
            abs(x - y) for seed in range(a.seeds) for x, y in zip(runs[name, seed], runs["same", seed], strict=True)
        )
        rows.append(
            [
                name,
                f"{size * nbytes / 1000:.1f} kB",
                f"{statistics.mean(ends):.4f}",
                f"{min(ends):.4f} to {max(ends):.4f}",
                f"{statistics.mean(off):+.5f}",
                f"{most:.5f}",
            ]
        )
    table(
        f"mean loss of the last {last} of {a.steps} steps, {a.seeds} seeds",
        ["edge_dtype", "a transfer", "mean", "seeds", "off exact", "furthest off in any step"],
        rows,
    )


if __name__ == "__main__":
    main()
