"""What the hop between fabrics costs under Megatron's schedule and under the one that runs ahead, on the testbed.

    eval "$(holmes testbed env)"
    python benchmarks/hop_pairs.py [--ratio 0.05 0.23 0.45 0.9] [--micro-batches 32] [--rounds 10]
                                   [--where hybrid ib roce]

Hop ratio: one-way transfer time of one micro-batch's activations over Ethernet, over a stage's forward and backward
computing time for it (paced). The same TP, PP, DP and batch everywhere; `hybrid` is two nodes of either fabric,
`ib` and `roce` four nodes of one, `three` IB, RoCE and IB nodes in a row. In each job the schedules alternate step by
step. Printed: medians, the ratio of the schedules with its 95% interval (bootstrap over pairs), and the hybrid against
the mean of the homogeneous environments, each with its faster schedule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from holmes_hpc.console import note, table
from holmes_hpc.fabric.site import Site
from holmes_hpc.fabric.slurm import read_site
from holmes_hpc.planning.grid import Parallel
from holmes_hpc.planning.model import Batch, ModelSpec
from holmes_hpc.planning.plan import Component, Plan, Schedule, Stage
from holmes_hpc.records.run import RunDirectory

HIDDEN, SEQUENCE, VOCABULARY, HEADERS = 16, 32, 64, 1.046  # TCP/IP headers at MTU 1500


def environments(site: Site, stages: int, dp: int) -> dict[str, list[tuple[str, int]]]:
    """Name -> (fabric, stages it holds), in order."""
    ib = [f.name for f in site.fabrics if str(f.nic) == "ib"]
    roce = [f.name for f in site.fabrics if str(f.nic) == "roce"]
    found = {"hybrid": [(ib[0], stages // 2), (roce[0], stages - stages // 2)], "ib": [(ib[0], stages)],
             "roce": [(roce[0], stages)], "three": [(ib[0], 1), (roce[0], 1), (ib[-1], 1)]}
    sizes = {f.name: f.nodes for f in site.fabrics}
    return {name: parts for name, parts in found.items()
            if all(sizes[fabric] >= held * dp for fabric, held in parts)
            and len({fabric for fabric, _ in parts}) == len(parts)}


def make_plan(site: Site, parts: list[tuple[str, int]], layers: int, dp: int, micro_batches: int, micro_size: int,
              in_flight: tuple[int, ...]) -> Plan:
    stages = sum(held for _, held in parts)
    model = ModelSpec("hop", layers=layers * stages, hidden=HIDDEN, heads=2, vocab=VOCABULARY, ffn=4 * HIDDEN,
                      kv_heads=2, max_positions=SEQUENCE)
    first = itertools.accumulate([0, *(held for _, held in parts)])
    components = [Component(site.fabric(fabric).partition, "", fabric, held * dp, 1, tuple(range(at, at + held)))
                  for (fabric, held), at in zip(parts, first)]  # noqa: B905 (first has one more)
    return Plan("pipeline" if len(parts) > 1 else "one-fabric", model,
                Batch(micro_batches * dp * micro_size, micro_size, SEQUENCE), Parallel(pp=stages, dp=dp), "none",
                Schedule("ahead", in_flight), tuple(components),
                tuple(Stage(fabric, layers) for fabric, held in parts for _ in range(held)), site, bucket_bytes=100_000)


def play(folder: Path, plan: Plan, variants: list[str], rounds: int, pace_ms: float) -> dict[str, Any]:
    """One job; what rank 0 measured."""
    run = RunDirectory.create(folder, plan.to_yaml(), {"benchmark": "hop_pairs"})
    given, results = folder / "given.json", folder / "times.json"
    given.write_text(json.dumps({
        "plan": str(run.plan_path), "run_dir": str(folder), "variants": variants, "rounds": rounds,
        "train": {"pace_layer_ms": pace_ms, "device": "cpu", "steps": 10_000}}))
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("hop_rank.py")), str(given), str(results)]
    words = ["srun"]
    for index, c in enumerate(plan.components):
        words += [":"] * bool(index) + ["-p", c.partition, f"-N{c.nodes}", f"-n{c.ranks}", "--ntasks-per-node=1"]
        words += ["-t", "15", "-J", "hop"] if not index else []
        words += program
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {"ranks": [json.loads(Path(f"{results}.{r}").read_text()) for r in range(plan.world_size)]}


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def bound(ranks: list[dict[str, Any]], variant: str, dp: int, micro_batches: int, hops_s: float) -> float:
    """Seconds of a step in which nothing is waited for but filling and draining: the slowest stage's computing, as it
    was measured, one micro-batch of each other stage, and one round trip over the slow hops."""
    computing = [statistics.median(p["compute_s"] for p in rank["parts"][variant]) for rank in ranks[::dp]]
    return max(computing) + (sum(computing) - max(computing)) / micro_batches + 2 * hops_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.05, 0.23, 0.45, 0.9])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[32])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--where", nargs="+", default=["hybrid", "ib", "roce"])
    parser.add_argument("--pace-ms", type=float, default=40.0, help="forward time of one layer")
    parser.add_argument("--layers", type=int, default=1, help="per stage")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="also Megatron's own communicator, where it is one fabric")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"hop-{time.strftime('%m%d-%H%M%S')}")
    a = parser.parse_args()
    site = read_site()
    rows, everything = [], []
    for ratio, micro_batches in itertools.product(a.ratio, a.micro_batches):
        best: dict[str, float] = {}
        for where in a.where:
            stages = 3 if where == "three" else 2
            parts = environments(site, stages, a.dp)[where]
            slowest = site.fabric(parts[0][0]).ethernet_gbps
            stage_s = 3 * a.layers * a.pace_ms / 1000
            micro_size = max(1, round(ratio * stage_s * slowest * 1e9 / 8 / HEADERS / (4 * HIDDEN * SEQUENCE)))
            own = 4 * HIDDEN * SEQUENCE * micro_size * HEADERS * 8 / slowest / 1e9 / stage_s  # after rounding
            hop = own if len(parts) > 1 else 0.2 * own
            depth = math.ceil(2 + 2 * hop + 0.2)  # 0.2 of a stage's time of slack for what is not ideal
            in_flight = tuple((stages - s - 1) * (depth - 1) + 1 for s in range(stages))
            plan = make_plan(site, parts, a.layers, a.dp, micro_batches, micro_size, in_flight)
            ours = "ahead:" + ",".join(map(str, in_flight))
            variants = ["megatron", ours] + ["plain"] * (a.plain and len(parts) == 1)
            name = f"{where}-{ratio}-{micro_batches}"
            note(f"{name}: micro-batches of {micro_size} samples, hop {own:.2f}, in flight {in_flight}")
            ranks = play(a.out / name, plan, variants, a.rounds, a.pace_ms)["ranks"]
            times = ranks[0]["times"]
            rate = {v: plan.batch.global_size / statistics.median(t) for v, t in times.items()}
            pairs = [x / y for x, y in zip(times["megatron"], times[ours], strict=True)]
            low, high = interval(pairs)
            best[where] = max(rate.values())
            bound_s = bound(ranks, ours, a.dp, micro_batches, own * stage_s * (len(parts) - 1))
            rows.append([where, ratio, micro_batches, in_flight[0], f"{rate['megatron']:.2f}", f"{rate[ours]:.2f}",
                         f"{statistics.median(pairs):.3f}", f"{low:.3f} to {high:.3f}",
                         f"{100 * bound_s / statistics.median(times[ours]):.1f}%"])
            everything.append({"where": where, "ratio": own, "micro_batches": micro_batches, "in_flight": in_flight,
                               "times": times, "parts": [r["parts"] for r in ranks], "samples_per_s": rate})
            (a.out / "results.json").write_text(json.dumps(everything))
        if {"hybrid", "ib", "roce"} <= best.keys():
            share = 100 * best["hybrid"] / statistics.mean([best["ib"], best["roce"]])
            rows.append(["hybrid of mean(ib, roce)", ratio, micro_batches, "", "", "", "", "", f"{share:.1f}%"])
    table("samples/s, medians", ["where", "hop", "micro-batches", "depth", "megatron", "ahead", "ahead is faster by",
                                 "95% interval", "of the bound"], rows)


if __name__ == "__main__":
    main()
