"""What stage transfers between fabrics cost under Megatron's schedule and under the one that runs ahead, on the
testbed.

    holmes testbed up slurm/testbed/hop.yaml; eval "$(holmes testbed env)"
    holmes calibrate name=transfer-calibration model=gpt_tiny model.layers=2 model.hidden=128 model.heads=1 \\
        model.kv_heads=1 model.ffn=64 model.vocab=64 batch.sequence_length=8 batch.micro_size=64 \\
        train.pace_layer_ms=30 "plan.nodes={ib-a: 2, roce-a: 2}" -o runs/transfer.cal.yaml
    python benchmarks/stage_transfer_pairs.py --calibration runs/transfer.cal.yaml [--ratio 0.05 0.23 0.45 0.9] \\
        [--micro-batches 32] [--pairs 10] [--where hybrid ib roce] [--minutes 5]

Transfer ratio: one-way transfer time of one micro-batch's activations over Ethernet, over a stage's forward and
backward computing time for it (paced). The same TP, PP, DP and batch everywhere; `hybrid` is two nodes of either
fabric, `ib` and `roce` four nodes of one; `three` IB, RoCE and IB nodes in a row, `ib-3` and `roce-3` six of one. The
planner chooses the depth, and says what a step should take. In each job the schedules alternate step by step; each pair
of steps is kept in --out, so the benchmark stops after --minutes, and goes on where it stopped. Printed: medians, the
ratio of the schedules with its 95% interval (bootstrap over pairs), the hybrid against the mean of the homogeneous
environments, each with its faster schedule, predictions' errors, and how busy this machine's cores were.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.console import note, table
from holmes_hpc.fabric.site import Site
from holmes_hpc.fabric.site_slurm import read_site
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.schedule.kinds import in_flight
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.records.run import RunDirectory

HIDDEN, SEQUENCE, VOCABULARY = 128, 8, 64  # the fewest bytes of other things than activations, and little to compute
SAMPLE_BYTES = 4 * HIDDEN * SEQUENCE
HEADERS = 1.046  # TCP/IP headers at MTU 1500
START_S = 30.0  # a job that would have less time is not begun
HOMOGENEOUS = {"hybrid": ("ib", "roce"), "three": ("ib-3", "roce-3")}


def environments(site: Site, dp: int) -> dict[str, list[tuple[str, int]]]:
    """Name -> (fabric, stages it holds), in order."""
    ib = [f.name for f in site.fabrics if str(f.nic) == "ib"]
    roce = [f.name for f in site.fabrics if str(f.nic) == "roce"]
    found = {
        "hybrid": [(ib[0], 1), (roce[0], 1)],
        "ib": [(ib[0], 2)],
        "roce": [(roce[0], 2)],
        "three": [(ib[0], 1), (roce[0], 1), (ib[-1], 1)],
        "ib-3": [(ib[0], 3)],
        "roce-3": [(roce[0], 3)],
    }
    sizes = {f.name: f.nodes for f in site.fabrics}
    return {
        name: parts
        for name, parts in found.items()
        if all(sizes[fabric] >= held * dp for fabric, held in parts)
        and len({fabric for fabric, _ in parts}) == len(parts)
    }


def make_plan(
    site: Site, parts: list[tuple[str, int]], dp: int, micro_batches: int, micro_size: int, costs: Costs
) -> Plan:
    """The planner's own: it chooses the depth."""
    stages = sum(held for _, held in parts)
    model = ModelSpec(
        "transfer", layers=stages, hidden=HIDDEN, heads=1, vocab=VOCABULARY, ffn=64, kv_heads=1, max_positions=SEQUENCE
    )
    options = PlanOptions(
        nodes={fabric: held * dp for fabric, held in parts},
        gpus_per_node=1,
        tp=1,
        pp=stages,
        dp=dp,
        layers_per_stage=(1,) * stages,
        virtual_stages=1,
        recompute="none",
        schedule="ahead",
        fabric_order=tuple(fabric for fabric, _ in parts),
        strategy="pipeline" if len(parts) > 1 else "one-fabric",
    )
    return best_plan(model, Batch(micro_batches * dp * micro_size, micro_size, SEQUENCE), site, options, costs)


def predicted_s(cell: dict[str, Any], costs: Costs) -> tuple[float, float]:
    """What the planner says of a cell: seconds of a step (under Megatron's 1F1B, running ahead)."""
    plan = Plan.read(cell["plan"])
    plan = replace(plan, batch=replace(plan.batch, global_size=cell["samples"]), predicted=None)
    depths = in_flight(plan.parallel.pp, cell["micro_batches"])
    return (
        predict(replace(plan, schedule=Schedule("1f1b", depths)), costs).step_time_s,
        predict(replace(plan, schedule=Schedule("ahead", cell["in_flight"])), costs).step_time_s,
    )


def play(folder: Path, plan: Plan, given: dict[str, Any]) -> None:
    """One job; each rank leaves its steps' times in `folder`."""
    run = RunDirectory.create(folder, plan.to_yaml(), {"benchmark": "stage_transfer_pairs"})
    path = folder / "given.json"
    path.write_text(json.dumps({**given, "plan": str(run.plan_path), "run_dir": str(folder)}))
    program = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("stage_transfer_rank.py")),
        str(path),
        str(folder / "times"),
    ]
    words = ["srun"]
    for index, c in enumerate(plan.components):
        words += [":"] * bool(index) + ["-p", c.partition, f"-N{c.nodes}", f"-n{c.ranks}", "--ntasks-per-node=1"]
        words += ["-t", "15", "-J", "transfer"] if not index else []
        words += program
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def begin(
    a: argparse.Namespace,
    site: Site,
    costs: Costs,
    where: str,
    ratio: float,
    micro_batches: list[int],
    rounds: int,
    until: float,
) -> None:
    """Plan one environment at one ratio, and run it up to the time `until`."""
    parts = environments(site, a.dp)[where]
    stage_s = 3 * a.pace_ms / 1000
    rate = site.fabric(parts[0][0]).ethernet_gbps * 1e9 / 8 / HEADERS
    micro_size = max(1, round(ratio * stage_s * rate / SAMPLE_BYTES))
    cells = []
    for count in micro_batches:
        plan = make_plan(site, parts, a.dp, count, micro_size, costs)
        cells.append({"micro_batches": count, "in_flight": plan.schedule.in_flight, "samples": plan.batch.global_size})
    plan = make_plan(site, parts, a.dp, max(micro_batches), micro_size, costs)
    own = SAMPLE_BYTES * micro_size / rate / stage_s  # after rounding
    note(
        f"{where}, transfer ratio {own:.3f}: micro-batches of {micro_size} samples; "
        + ", ".join(f"{c['micro_batches']} with {c['in_flight']} in flight" for c in cells)
    )
    folder = a.out / f"{where}-{ratio}-{time.strftime('%H%M%S')}"
    play(
        folder,
        plan,
        {
            "where": where,
            "ratio": ratio,
            "own": own,
            "stage_s": stage_s,
            "dp": a.dp,
            "cells": cells,
            "stages": len(plan.stages),
            "edges_tcp": len(parts) - 1,
            "rounds": rounds,
            "until": until,
            "micro_size": micro_size,
            "load": os.getloadavg()[0],
            "train": {"pace_layer_ms": a.pace_ms, "device": "cpu", "steps": 10_000},
        },
    )


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def cells_of(out: Path) -> dict[tuple[str, float, int], dict[str, Any]]:
    """(where, ratio, micro-batches) -> what is known of it: `pairs` of seconds (megatron, ahead), and so on, over all
    jobs that were run, also those that were stopped."""
    cells: dict[tuple[str, float, int], dict[str, Any]] = {}
    for path in sorted(out.glob("*/given.json"), key=lambda p: p.stat().st_mtime):
        given = json.loads(path.read_text())
        lines: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
        ranks = given["stages"] * given["dp"]
        for rank in range(ranks):
            of = path.with_name(f"times.{rank}")
            for text in of.read_text().splitlines() if of.exists() else ():
                line = json.loads(text)
                lines[line["round"], line["micro_batches"], line["kind"]].append(line)
        whole = {key: steps for key, steps in lines.items() if len(steps) == ranks}
        for cell in given["cells"]:
            count = cell["micro_batches"]
            key = given["where"], given["ratio"], count
            rounds = [r for r, n, kind in whole if n == count and kind == "ahead" and (r, n, "megatron") in whole]
            known = cells.setdefault(key, {"pairs": [], "ahead": [], "megatron": []})
            known.update({k: v for k, v in {**given, **cell}.items() if k != "cells"})
            known["pairs"] += [
                tuple(whole[r, count, kind][0]["step_s"] for kind in ("megatron", "ahead")) for r in rounds
            ]
            for kind in ("megatron", "ahead"):
                known[kind] += [whole[r, count, kind] for r in rounds]
    return {key: cell for key, cell in cells.items() if cell["pairs"]}


def bound_s(cell: dict[str, Any]) -> float:
    """Seconds of a step in which nothing is waited for but filling and draining: the slowest stage's computing, as it
    was measured, one micro-batch of each other stage, and one round trip over the slow edges."""
    computing = [
        statistics.median(step[stage * cell["dp"]]["parts"]["compute_s"] for step in cell["ahead"])
        for stage in range(cell["stages"])
    ]
    rest = (sum(computing) - max(computing)) / cell["micro_batches"]
    return max(computing) + rest + 2 * cell["own"] * cell["stage_s"] * cell["edges_tcp"]


def report(cells: dict[tuple[str, float, int], dict[str, Any]], costs: Costs) -> None:
    """The tables."""
    rows, how, best = [], [], {}
    for (where, ratio, count), cell in sorted(cells.items(), key=lambda item: (item[0][1], -item[0][2], item[0][0])):
        waits, ahead = (statistics.median(x) for x in zip(*cell["pairs"], strict=True))
        best[where, ratio, count] = cell["samples"] / min(waits, ahead)
        ratios = [x / y for x, y in cell["pairs"]]
        low, high = interval(ratios)
        wrong = [said / took - 1 for said, took in zip(predicted_s(cell, costs), (waits, ahead), strict=True)]
        busy = statistics.median(
            sum(r["cpu_s"] for r in step) / step[0]["step_s"] / (os.cpu_count() or 1) for step in cell["ahead"]
        )
        computing = statistics.median(step[-1]["parts"]["compute_s"] for step in cell["ahead"]) / count
        name = [where, f"{cell['own']:.3f}", count]
        rows.append(
            [
                *name,
                len(ratios),
                "+".join(map(str, cell["in_flight"])),
                f"{waits:.3f}",
                f"{ahead:.3f}",
                f"{statistics.median(ratios):.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        )
        how.append(
            [
                *name,
                f"{bound_s(cell) / ahead:.1%}",
                f"{wrong[0]:+.1%}",
                f"{wrong[1]:+.1%}",
                f"{1000 * computing:.1f}",
                f"{busy:.0%}",
            ]
        )
    table(
        "seconds of a step, medians",
        ["where", "transfer", "micro-batches", "pairs", "in flight", "megatron", "ahead", "faster by", "95% interval"],
        rows,
    )
    table(
        "running ahead, of the bound; the predictions' errors; ms that the last stage computes for a micro-batch; "
        "these ranks' share of the cores",
        ["where", "transfer", "micro-batches", "of the bound", "megatron", "ahead", "computing", "busy"],
        how,
    )
    rows = []
    for where, ratio, count in best:
        others = [(name, ratio, count) for name in HOMOGENEOUS.get(where, ("",))]
        if all(name in best for name in others):
            cell, stages = cells[where, ratio, count], cells[where, ratio, count]["stages"]
            fill = count + stages - 1
            share = best[where, ratio, count] / statistics.mean(best[name] for name in others)
            without = (
                statistics.mean(best[name] for name in others)
                * statistics.median(x for x, _ in cell["pairs"])
                / cell["samples"]
            )
            rows.append(
                [
                    where,
                    f"{cell['own']:.3f}",
                    count,
                    f"{1 / without:.1%}",
                    f"{share:.1%}",
                    f"{fill / (fill + 2 * cell['own'] * cell['edges_tcp']):.1%}",
                ]
            )
    if rows:
        table(
            "throughput over several fabrics, of the mean of the homogeneous environments with their faster schedule",
            ["where", "transfer", "micro-batches", "megatron", "ahead", "fill and drain leave"],
            rows,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, nargs="*", default=[0.05, 0.23, 0.45, 0.9])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[32])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--where", nargs="+", default=["hybrid", "ib", "roce"])
    parser.add_argument("--pace-ms", type=float, default=30.0, help="forward time of a stage, which is one layer")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--calibration", type=Path, help="what `holmes calibrate` measured; else published figures")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--out", type=Path, default=Path("runs") / "stage-transfer")
    a = parser.parse_args()
    calibration = Calibration.from_dict(yaml.safe_load(a.calibration.read_text())) if a.calibration else None
    site, costs = read_site(), Costs(calibration, a.pace_ms)
    until = time.time() + 60 * a.minutes
    for ratio, where in itertools.product(a.ratio, a.where):
        done = cells_of(a.out)
        left = {n: a.pairs - len(done.get((where, ratio, n), {"pairs": ()})["pairs"]) for n in a.micro_batches}
        wanted = [n for n, pairs in left.items() if pairs > 0]
        if wanted and time.time() < until - START_S:
            begin(a, site, costs, where, ratio, wanted, max(left.values()), until)
    report(cells_of(a.out), costs)


if __name__ == "__main__":
    main()
