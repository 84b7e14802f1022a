"""Bytes of experts on the testbed: two fabrics of two nodes, PP 2, EP 2 or ETP 2 inside each; a dense twin.

    holmes testbed up; eval "$(holmes testbed env)"
    python benchmarks/expert_bytes.py [--steps 8] [--root runs/expert-bytes]

Prints, for each fabric and node, the planned and the counted bytes of the experts' exchanges per step: a node's bytes
on RDMA NICs, divided by the measured bytes on the wire per byte of payload, less the planned bytes of other groups.
Then the bytes on Ethernet of all runs. All are medians of the steps after the first two. A restart skips finished
runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.network.audit import planned_bytes, planned_loads

OVERRIDES = (
    *("model=gpt_tiny", "model.bias=false", "data=synthetic", "train.pace_layer_ms=10"),
    *("plan.nodes={ib-a: 2, roce-a: 2}", "plan.pp=2", "plan.dp=2", "plan.schedule=1f1b"),
)
EXPERTS = ("model.experts.count=4", "plan.ep=2")
SPLIT = ("model.experts.count=4", "plan.ep=1", "plan.etp=2", "plan.ep_comm=allgather")
RUNS = {"experts": EXPERTS, "all-gather": (*EXPERTS, "plan.ep_comm=allgather"), "ETP": SPLIT, "dense": ()}
WARM_UP = 2  # steps that do not count


def main() -> None:
    """Run all, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--root", type=Path, default=Path("runs/expert-bytes"))
    options = parser.parse_args()
    print("inputs:", " ".join(OVERRIDES), f"train.steps={options.steps}", flush=True)
    ethernet_mb = dict[str, float]()
    for name, overrides in RUNS.items():
        run = RunDirectory(options.root / name)
        if (run.read_result() or {}).get("state") != "completed":
            settings = (*OVERRIDES, *overrides, f"train.steps={options.steps}", f"run_dir={run.path}")
            command = [str(Path(sys.executable).with_name("holmes")), "run", *settings]
            if code := subprocess.run(command).returncode:
                sys.exit(f"{' '.join(command)}: exit code {code}")
        if name != "dense":
            print(f"{name}:")
            print_bytes(run)
        sent = [line["nic_bytes"]["ethernet"]["tx"] for line in run.metrics() if line["step"] > WARM_UP]
        ethernet_mb[name] = statistics.median(sent) / 1e6
    for name in list(RUNS)[:-1]:
        change = ethernet_mb[name] / ethernet_mb["dense"] - 1
        print(f"{name}, Ethernet: {ethernet_mb[name]:.3f} MB, dense {ethernet_mb['dense']:.3f} MB, {change:+.2%}")


def print_bytes(run: RunDirectory) -> None:
    """Print the planned and the counted bytes of the experts' exchanges, per fabric and node."""
    plan, record = Plan.read(run.plan_path), run.read_run()
    hosts, factors = record["hosts"], record["traffic"]["header_factors"]
    # Bytes of the experts, of a node or a fabric, and of other groups of a node.
    planned, others = defaultdict[str, float](float), defaultdict[str, float](float)
    counted = defaultdict[str, float](float)
    fabric_of = {host: plan.site.pool(place.pool).fabric_name for host, place in zip(hosts, plan.places, strict=True)}
    for load in planned_loads(planned_bytes(plan), hosts):
        if load.kind != "ethernet":
            is_expert = load.label.startswith("ep ")
            (planned if is_expert else others)[load.node] += load.bytes
            planned[fabric_of[load.node]] += load.bytes * is_expert
    for node, fabric in fabric_of.items():
        lines = map(json.loads, (run.nics / f"{node}.jsonl").read_text().splitlines())
        nics = [line["nics"] for line in lines if line["step"] > WARM_UP]
        sent = statistics.median(sum(nic["tx"] for name, nic in step.items() if name != "eth0") for step in nics)
        counted[node] = sent / factors[fabric] - others[node]
        counted[fabric] += counted[node]
    print("| | planned, MB | counted, MB | difference |\n|---|---|---|---|")
    for name in (*dict.fromkeys(fabric_of.values()), *fabric_of):
        difference = counted[name] / planned[name] - 1
        print(f"| {name} | {planned[name] / 1e6:.3f} | {counted[name] / 1e6:.3f} | {difference:+.2%} |")


if __name__ == "__main__":
    main()
