"""Train on two pools of one fabric, of unlike speed, and on each pool alone: the sum of both speeds is the aim.

    holmes testbed up slurm/testbed/pools.yaml; eval "$(holmes testbed env)"
    python benchmarks/two_pools.py [--repeats 3] [--steps 14] [--root runs/two-pools]

Nodes of the pool `old` compute half as fast (`train.pace_factors`): compute is emulated, the NICs are shaped. `shares`
runs a pipeline of one stage on every node, and each step's micro-batches are shared by speed; `chosen` is the
planner's own choice. Prints medians of step times after the first three steps, and the bytes of RDMA beside the plan's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from holmes_hpc.records.run import RunDirectory

SITE = """name: pools
ethernet_gbps: 0.05
gpu: {name: cpu, peak_tflops: 0.05, memory_gib: 4, intra_node_gbps: 40}
fabrics:
  - {name: ib-a, nic: ib, rdma_gbps: 0.4, gres: false, gpus_per_node: 1, nodes: 2}
pools:
  - {name: new, fabric: ib-a, partition: new}
  - {name: old, fabric: ib-a, partition: old}
"""
BATCH = 24
OVERRIDES = (
    *("model=gpt_tiny", "model.layers=4", "model.hidden=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128"),
    *(f"batch.global_size={BATCH}", "batch.micro_size=1"),
    *("train.pace_layer_ms=20", "train.pace_factors={new: 1, old: 2}", "train.log_interval=10"),
)
SHARES = ("plan.strategy=hierarchical-dp", "plan.pp=1")
CASES = {
    "new": ("plan.nodes={new: 2}", "plan.pp=1"),
    "old": ("plan.nodes={old: 2}", "plan.pp=1"),
    "shares": SHARES,
    "chosen": (),
}
WARM_UP = 3  # steps that do not count


def holmes(*words: str) -> str:
    """Run a command of this environment's holmes; return what it prints. Exit with its messages if it fails."""
    command = [str(Path(sys.executable).with_name("holmes")), *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}: exit code {ended.returncode}")
    return ended.stdout


def main() -> None:
    """Run all cases `--repeats` times, alternating, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--root", type=Path, default=Path("runs/two-pools"))
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    site = options.root / "site.yaml"
    site.write_text(SITE)
    print("inputs:", " ".join(OVERRIDES), f"train.steps={options.steps}", flush=True)
    speeds: dict[str, list[float]] = {case: [] for case in CASES}
    for repeat in range(options.repeats):
        for case, plan in CASES.items():
            run = RunDirectory(options.root / f"{case}-{repeat}")
            steps = f"train.steps={options.steps}"
            holmes("run", "--site", str(site), *OVERRIDES, *plan, steps, f"run_dir={run.path}")
            times = [line["step_time_s"] for line in run.metrics() if line["step"] > WARM_UP]
            speeds[case].append(BATCH / statistics.median(times))
            report = json.loads(holmes("report", str(run.path), "--json"))
            traffic = report[0]["traffic"] if isinstance(report, list) else report["traffic"]
            rdma = next((row for row in traffic if row["kind"] == "ib-a"), None)
            bytes_text = f", RDMA {rdma['difference_percent']:+.1f}% of the planned bytes" if rdma else ""
            print(f"{case} {repeat}: {speeds[case][-1]:.1f} samples/s{bytes_text}", flush=True)
    medians = {case: statistics.median(values) for case, values in speeds.items()}
    total = medians["new"] + medians["old"]
    print("| case | samples/s | of the sum of both pools |\n|---|---|---|")
    for case, value in medians.items():
        print(f"| {case} | {value:.1f} | {value / total:.3f} |")


if __name__ == "__main__":
    main()
