"""Measure the cost of stage transfers between fabrics under Megatron's 1F1B and under eager 1F1B, on the testbed.

    holmes testbed up slurm/testbed/hop.yaml; eval "$(holmes testbed env)"
    holmes calibrate name=transfer-calibration model=gpt_tiny model.layers=2 model.hidden=128 model.heads=1 \\
        model.kv_heads=1 model.ffn=64 model.vocab=64 batch.sequence_length=8 batch.micro_size=64 \\
        train.pace_layer_ms=30 "plan.nodes={ib-a: 2, roce-a: 2}" -o runs/transfer.cal.yaml
    python benchmarks/stage_transfer_pairs.py --calibration runs/transfer.cal.yaml [--ratio 0.05 0.23 0.45 0.9] \\
        [--micro-batches 32] [--pairs 10] [--where hybrid ib roce] [--minutes 5]

Transfer ratio: the one-way transfer time of one micro-batch's activations over Ethernet, divided by a stage's emulated
compute time for it (forward and backward). TP, PP, DP and batch are the same everywhere. `hybrid` is two nodes of
either fabric, `ib` and `roce` four nodes of one; `three` is a row of IB, RoCE and IB nodes, `ib-3` and `roce-3` six
nodes of one. The planner chooses the depth and predicts the step time. In each job the schedules alternate step by
step. Pairs of steps are written to --out: the benchmark stops after --minutes, and a restart continues.

Prints medians, the ratio of the schedules with its 95% interval (bootstrap over pairs), the hybrid against the mean of
the homogeneous environments (each with its faster schedule), prediction errors, and the load of this machine's cores.
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
from holmes_hpc.fabric.listing import read_site
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.calibration import NO_CALIBRATION, Calibration
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.schedule.kinds import in_flight
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.records.run import RunDirectory

HIDDEN, SEQUENCE, VOCABULARY = 128, 8, 64  # little compute, and few bytes besides activations
SAMPLE_BYTES = 4 * HIDDEN * SEQUENCE
HEADERS = 1.046  # TCP/IP headers at MTU 1500
MIN_JOB_S = 30.0  # no job starts with less time left
HOMOGENEOUS = {"hybrid": ("ib", "roce"), "three": ("ib-3", "roce-3")}


def environments(site: Site, dp: int) -> dict[str, list[tuple[str, int]]]:
    """Return the (fabric, stages) of each environment that the site has nodes for, in pipeline order."""
    ib = [f.name for f in site.pools if str(f.nic) == "ib"]
    roce = [f.name for f in site.pools if str(f.nic) == "roce"]
    stages_by_fabric = {
        "hybrid": [(ib[0], 1), (roce[0], 1)],
        "ib": [(ib[0], 2)],
        "roce": [(roce[0], 2)],
        "three": [(ib[0], 1), (roce[0], 1), (ib[-1], 1)],
        "ib-3": [(ib[0], 3)],
        "roce-3": [(roce[0], 3)],
    }
    sizes = {f.name: f.nodes for f in site.pools}
    return {
        name: parts
        for name, parts in stages_by_fabric.items()
        if all(sizes[fabric] >= stages * dp for fabric, stages in parts)
        and len({fabric for fabric, _ in parts}) == len(parts)
    }


def make_plan(
    site: Site, parts: list[tuple[str, int]], dp: int, micro_batches: int, micro_size: int, costs: Costs
) -> Plan:
    """Plan one environment; the planner chooses the depth."""
    stages = sum(count for _, count in parts)
    model = ModelSpec(
        "transfer", layers=stages, hidden=HIDDEN, heads=1, vocab=VOCABULARY, ffn=64, kv_heads=1, max_positions=SEQUENCE
    )
    options = PlanOptions(
        nodes={fabric: count * dp for fabric, count in parts},
        gpus_per_node=1,
        tp=1,
        pp=stages,
        dp=dp,
        layers_per_stage=(1,) * stages,
        virtual_stages=1,
        recompute="none",
        schedule="ahead",
        pool_order=tuple(fabric for fabric, _ in parts),
        strategy="pipeline" if len(parts) > 1 else "one-fabric",
    )
    return best_plan(model, Batch(micro_batches * dp * micro_size, micro_size, SEQUENCE), site, options, costs)


def predicted_s(cell: dict[str, Any], costs: Costs) -> tuple[float, float]:
    """Predict the step time of a cell in seconds (under Megatron's 1F1B, under eager 1F1B)."""
    plan = Plan.read(cell["plan"])
    plan = replace(plan, batch=replace(plan.batch, global_size=cell["samples"]), predicted=None)
    depths = in_flight(plan.parallel.pp, cell["micro_batches"])
    return (
        predict(replace(plan, schedule=Schedule("1f1b", depths)), costs).step_time_s,
        predict(replace(plan, schedule=Schedule("ahead", cell["in_flight"])), costs).step_time_s,
    )


def run_job(folder: Path, plan: Plan, inputs: dict[str, Any]) -> None:
    """Run one job; each rank writes its step times into `folder`."""
    run = RunDirectory.create(folder, plan.to_yaml(), {"benchmark": "stage_transfer_pairs"})
    path = folder / "given.json"
    path.write_text(json.dumps({**inputs, "plan": str(run.plan_path), "run_dir": str(folder)}))
    program = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("stage_transfer_rank.py")),
        str(path),
        str(folder / "times"),
    ]
    command = ["srun"]
    for index, component in enumerate(plan.components):
        command += [":"] * bool(index) + [
            "-p",
            component.partition,
            f"-N{component.nodes}",
            f"-n{component.ranks}",
            "--ntasks-per-node=1",
        ]
        command += ["-t", "15", "-J", "transfer"] if not index else []
        command += program
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{process.stdout[-2000:]}\n{process.stderr[-2000:]}")


def run_environment(
    arguments: argparse.Namespace,
    site: Site,
    costs: Costs,
    where: str,
    ratio: float,
    micro_batches: list[int],
    rounds: int,
    deadline: float,
) -> None:
    """Plan one environment at one ratio, and run it until the time `deadline`."""
    parts = environments(site, arguments.dp)[where]
    stage_s = 3 * arguments.pace_ms / 1000
    bytes_per_s = site.pool(parts[0][0]).ethernet_gbps * 1e9 / 8 / HEADERS
    micro_size = max(1, round(ratio * stage_s * bytes_per_s / SAMPLE_BYTES))
    cells = []
    for count in micro_batches:
        plan = make_plan(site, parts, arguments.dp, count, micro_size, costs)
        cells.append({"micro_batches": count, "in_flight": plan.schedule.in_flight, "samples": plan.batch.global_size})
    plan = make_plan(site, parts, arguments.dp, max(micro_batches), micro_size, costs)
    rounded_ratio = SAMPLE_BYTES * micro_size / bytes_per_s / stage_s  # with a whole number of samples
    note(
        f"{where}, transfer ratio {rounded_ratio:.3f}: micro-batches of {micro_size} samples; "
        + ", ".join(f"{c['micro_batches']} with {c['in_flight']} in flight" for c in cells)
    )
    folder = arguments.out / f"{where}-{ratio}-{time.strftime('%H%M%S')}"
    run_job(
        folder,
        plan,
        {
            "where": where,
            "ratio": ratio,
            "own": rounded_ratio,
            "stage_s": stage_s,
            "dp": arguments.dp,
            "cells": cells,
            "stages": len(plan.stages),
            "edges_tcp": len(parts) - 1,
            "rounds": rounds,
            "until": deadline,
            "micro_size": micro_size,
            "load": os.getloadavg()[0],
            "train": {"pace_layer_ms": arguments.pace_ms, "device": "cpu", "steps": 10_000},
        },
    )


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def read_cells(out: Path) -> dict[tuple[str, float, int], dict[str, Any]]:
    """Return the measurements of each (where, ratio, micro-batches), over all jobs, stopped ones included.

    `pairs`: seconds (megatron, ahead); `megatron` and `ahead`: the lines of all ranks of those steps."""
    cells: dict[tuple[str, float, int], dict[str, Any]] = {}
    for path in sorted(out.glob("*/given.json"), key=lambda p: p.stat().st_mtime):
        inputs = json.loads(path.read_text())
        lines: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
        ranks = inputs["stages"] * inputs["dp"]
        for rank in range(ranks):
            times_path = path.with_name(f"times.{rank}")
            for text in times_path.read_text().splitlines() if times_path.exists() else ():
                line = json.loads(text)
                lines[line["round"], line["micro_batches"], line["kind"]].append(line)
        complete_steps = {key: steps for key, steps in lines.items() if len(steps) == ranks}
        for cell in inputs["cells"]:
            count = cell["micro_batches"]
            key = inputs["where"], inputs["ratio"], count
            rounds = [
                r
                for r, n, kind in complete_steps
                if n == count and kind == "ahead" and (r, n, "megatron") in complete_steps
            ]
            measurements = cells.setdefault(key, {"pairs": [], "ahead": [], "megatron": []})
            measurements.update({k: v for k, v in {**inputs, **cell}.items() if k != "cells"})
            measurements["pairs"] += [
                tuple(complete_steps[r, count, kind][0]["step_s"] for kind in ("megatron", "ahead")) for r in rounds
            ]
            for kind in ("megatron", "ahead"):
                measurements[kind] += [complete_steps[r, count, kind] for r in rounds]
    return {key: cell for key, cell in cells.items() if cell["pairs"]}


def bound_s(cell: dict[str, Any]) -> float:
    """Return the lower bound of the step time in seconds: only filling and draining wait.

    It sums the slowest stage's measured compute time, one micro-batch of each other stage, and one round trip over the
    slow edges."""
    compute_s = [
        statistics.median(step[stage * cell["dp"]]["parts"]["compute_s"] for step in cell["ahead"])
        for stage in range(cell["stages"])
    ]
    others_s = (sum(compute_s) - max(compute_s)) / cell["micro_batches"]
    return max(compute_s) + others_s + 2 * cell["own"] * cell["stage_s"] * cell["edges_tcp"]


def print_tables(cells: dict[tuple[str, float, int], dict[str, Any]], costs: Costs) -> None:
    """Print the tables."""
    rows, details, best = [], [], {}
    for (where, ratio, count), cell in sorted(cells.items(), key=lambda item: (item[0][1], -item[0][2], item[0][0])):
        megatron_s, eager_s = (statistics.median(x) for x in zip(*cell["pairs"], strict=True))
        best[where, ratio, count] = cell["samples"] / min(megatron_s, eager_s)
        ratios = [x / y for x, y in cell["pairs"]]
        low, high = interval(ratios)
        errors = [
            predicted / measured - 1
            for predicted, measured in zip(predicted_s(cell, costs), (megatron_s, eager_s), strict=True)
        ]
        core_share = statistics.median(
            sum(r["cpu_s"] for r in step) / step[0]["step_s"] / (os.cpu_count() or 1) for step in cell["ahead"]
        )
        compute_s = statistics.median(step[-1]["parts"]["compute_s"] for step in cell["ahead"]) / count
        name = [where, f"{cell['own']:.3f}", count]
        rows.append(
            [
                *name,
                len(ratios),
                "+".join(map(str, cell["in_flight"])),
                f"{megatron_s:.3f}",
                f"{eager_s:.3f}",
                f"{statistics.median(ratios):.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        )
        details.append(
            [
                *name,
                f"{bound_s(cell) / eager_s:.1%}",
                f"{errors[0]:+.1%}",
                f"{errors[1]:+.1%}",
                f"{1000 * compute_s:.1f}",
                f"{core_share:.0%}",
            ]
        )
    table(
        "seconds of a step, medians",
        ["where", "transfer", "micro-batches", "pairs", "in flight", "megatron", "ahead", "faster by", "95% interval"],
        rows,
    )
    table(
        "eager 1F1B as a share of the bound; prediction errors; compute time of the last stage per micro-batch in ms; "
        "the ranks' share of the cores",
        ["where", "transfer", "micro-batches", "of the bound", "megatron", "ahead", "computing", "busy"],
        details,
    )
    rows = []
    for where, ratio, count in best:
        homogeneous = [(name, ratio, count) for name in HOMOGENEOUS.get(where, ("",))]
        if all(name in best for name in homogeneous):
            cell, stages = cells[where, ratio, count], cells[where, ratio, count]["stages"]
            fill = count + stages - 1
            eager_share = best[where, ratio, count] / statistics.mean(best[name] for name in homogeneous)
            megatron_share = (
                statistics.mean(best[name] for name in homogeneous)
                * statistics.median(x for x, _ in cell["pairs"])
                / cell["samples"]
            )
            rows.append(
                [
                    where,
                    f"{cell['own']:.3f}",
                    count,
                    f"{1 / megatron_share:.1%}",
                    f"{eager_share:.1%}",
                    f"{fill / (fill + 2 * cell['own'] * cell['edges_tcp']):.1%}",
                ]
            )
    if rows:
        table(
            "throughput over several fabrics, as a share of the mean of the homogeneous environments (faster schedule)",
            ["where", "transfer", "micro-batches", "megatron", "ahead", "fill and drain leave"],
            rows,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, nargs="*", default=[0.05, 0.23, 0.45, 0.9])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[32])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--where", nargs="+", default=["hybrid", "ib", "roce"])
    parser.add_argument(
        "--pace-ms", type=float, default=30.0, help="emulated forward time of a stage (one layer) in ms"
    )
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--calibration", type=Path, help="file of `holmes calibrate`; default: published figures")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--out", type=Path, default=Path("runs") / "stage-transfer")
    arguments = parser.parse_args()
    calibration = (
        Calibration.from_dict(yaml.safe_load(arguments.calibration.read_text()))
        if arguments.calibration
        else NO_CALIBRATION
    )
    site, costs = read_site(), Costs(calibration, arguments.pace_ms)
    deadline = time.time() + 60 * arguments.minutes
    for ratio, where in itertools.product(arguments.ratio, arguments.where):
        cells = read_cells(arguments.out)
        missing_pairs = {
            n: arguments.pairs - len(cells.get((where, ratio, n), {"pairs": ()})["pairs"])
            for n in arguments.micro_batches
        }
        unfinished = [n for n, pairs in missing_pairs.items() if pairs > 0]
        if unfinished and time.time() < deadline - MIN_JOB_S:
            run_environment(arguments, site, costs, where, ratio, unfinished, max(missing_pairs.values()), deadline)
    print_tables(read_cells(arguments.out), costs)


if __name__ == "__main__":
    main()
