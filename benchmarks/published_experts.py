"""Predict the published step times of Qwen3-235B-A22B on 256 H100: four layouts of yanring/Megatron-MoE-ModelZoo.

    python benchmarks/published_experts.py    # a table for benchmarks/results/experts.md

The program of all rows but one sends a token once to each node (`deduplicated`), as DeepEP does."""

from __future__ import annotations

import csv
from dataclasses import replace

from published_runs import DATA, Run, costs, layers, layout

from holmes_hpc.config.models import named
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import step_s

MODEL = named("qwen3_235b_a22b")
SIZES = {name: getattr(MODEL, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
COMMON = {"swiglu": True, "rmsnorm": True, "rope": True, "sequence_parallel": True, "attention": "flash3"}


def read() -> list[tuple[str, float, float]]:
    """Return (layout, measured seconds, predicted seconds) of each row."""
    with (DATA / "qwen3_moe.csv").open() as file:
        return [_predicted(row) for row in csv.DictReader(file)]


def _predicted(row: dict[str, str]) -> tuple[str, float, float]:
    texts = {name: row.pop(name) for name in ("recompute", "sharding")}
    seconds, ep, deduplicated = float(row.pop("seconds")), int(row.pop("ep")), row.pop("deduplicated") == "1"
    numbers = {name: int(value) for name, value in row.items()}
    sizes = {"global_size": 2048, "sequence": 4096, "gpu": "h100-80gb", "nic": "ib", "gbps": 3200.0}
    run = Run("qwen3_moe", "qwen3", seconds=seconds, **{**SIZES, **COMMON, **sizes, **texts, **numbers})
    run_costs = costs(run)
    run_costs = replace(run_costs, software=replace(run_costs.software, deduplicated=deduplicated))
    made: Layout = layout(run, run_costs)
    made = replace(made, model=MODEL, parallel=replace(made.parallel, ep=ep))
    name = f"TP {run.tp}, EP {ep}, PP {run.pp}, VPP {run.chunks}, {texts['sharding']} sharded"
    return name, seconds, float(step_s(made, layers(run, made))[0])


if __name__ == "__main__":
    for name, measured, predicted in read():
        print(f"| {name} | {measured:.1f} s | {predicted:.1f} s | {predicted / measured - 1:+.1%} |")
