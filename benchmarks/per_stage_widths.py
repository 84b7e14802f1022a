"""Compare per-stage with uniform layouts on the testbed, with shaped NICs and emulated compute.

    holmes testbed up unequal; eval "$(holmes testbed env)"
    python benchmarks/per_stage_widths.py [--cases 3+5,pace] [--repeats 5] [--steps 3] [--minutes N] [--runs DIR]

The figure of a case is the ratio of samples/s: the per-stage layout over uniform layouts with as many replicas, whose
rates are summed. Model, batch and emulated layer time are the same. The order of a case's runs reverses with each
repeat. A run's rate is from the median of its step times without the first.

Also prints the prediction; measured over emulated layer times (other work on the machine slows all runs) and the ratio
corrected by them; and the largest deviation of a node's NIC bytes from the planned bytes. A restart continues.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.listing import read_site
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel
from holmes_hpc.planning.plan.parts import Schedule
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.search.best import best_plan, to_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.per_stage import variants
from holmes_hpc.planning.search.problem import Problem
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.network.audit import planned_bytes, planned_loads

HOLMES = str(Path(sys.executable).with_name("holmes"))
SEQUENCE, HIDDEN = 16, 24
Nodes = dict[str, int]  # fabric -> how many


@dataclass(frozen=True)
class Case:
    """A per-stage layout and the uniform layouts to compare it with.

    `unequal`, `equal`: nodes of the per-stage layout and of the uniform ones; `micro_size`: sequences, which decide the
    transfer ratio; `factors`: of the layer time, on a fabric, or on nodes (per-stage layout only); `target`: the least
    ratio of rates; `weights`: of the last stage's replicas, fixed because the planner knows one speed per fabric;
    `tps`: TP of the stages if not 1, fixed because an emulated layer is not faster with TP 2."""

    name: str
    layers: int
    micro_size: int
    micro_batches: int
    pace_ms: float
    unequal: Nodes
    equal: tuple[Nodes, ...]
    target: float
    factors: Nodes | None = None
    weights: tuple[float, ...] = ()
    tps: tuple[int, ...] = ()

    @property
    def layouts(self) -> list[Nodes]:
        return [self.unequal, *self.equal]

    def plan(self, index: int, site: Site) -> Plan:
        """Plan a layout with one stage per fabric (two on a single fabric); the planner chooses the other settings."""
        nodes = self.layouts[index]
        model = ModelSpec(
            "gpt", self.layers, HIDDEN, 2, 128, ffn=4 * HIDDEN, kv_heads=2, swiglu=False, max_positions=SEQUENCE
        )
        batch = Batch(self.micro_batches * self.micro_size, self.micro_size, SEQUENCE)
        options = PlanOptions(
            nodes=nodes,
            tp=1,
            pp=max(2, len(nodes)),
            recompute="none",
            strategy="pipeline" if len(nodes) > 1 else "one-fabric",
            virtual_stages=1 if index else None,
            unequal="false" if index else "auto",
        )
        factors = {place: f for place, f in (self.factors or {}).items() if place in nodes or not index}
        costs = Costs(pace_layer_ms=self.pace_ms, pace_factors=None if index and self.weights else factors or None)
        if index:
            return best_plan(model, batch, site, options, costs)
        plan = to_plan(variants(Problem(model, batch, site, options, costs), Clock(), inf)[0], site, [])
        if self.weights:
            *front_stages, last_stage = plan.parallel.stages
            half = self.layers // 2
            return _replace_layout(plan, [*front_stages, replace(last_stage, weights=self.weights)], [half, half], 4)
        if self.tps:
            stages = [replace(w, tp=tp, dp=w.ranks // tp) for w, tp in zip(plan.parallel.stages, self.tps, strict=True)]
            first_layers = self.layers * stages[0].dp // sum(w.dp for w in stages)
            return _replace_layout(plan, stages, [first_layers, self.layers - first_layers], 4)
        return plan


def _replace_layout(plan: Plan, stage_layouts: list[StageParallel], layers: list[int], extra: int) -> Plan:
    """Return a plan of two stages with other TP/DP and layers, and `extra` micro-batches above the least depth."""
    depths = least_in_flight(tuple(w.dp for w in stage_layouts), (extra, 0))
    return replace(
        plan,
        parallel=Parallel(tuple(stage_layouts), sequence_parallel=max(w.tp for w in stage_layouts) > 1),
        stages=tuple(replace(s, layers=n, chunks=(n,)) for s, n in zip(plan.stages, layers, strict=True)),
        schedule=Schedule("ahead", depths),
        predicted=None,
    )


CASES = {
    case.name: case
    for case in (
        Case("3+5", 16, 40, 120, 24, {"ib-a": 3, "roce-a": 5}, ({"ib-a": 4, "roce-a": 4},), 0.97),
        Case("2+3", 20, 24, 120, 12, {"ib-a": 2, "roce-a": 3}, ({"ib-a": 2, "roce-a": 2},), 0.95),
        Case("1+4", 20, 48, 60, 24, {"ib-a": 1, "roce-a": 4}, ({"ib-a": 2, "roce-a": 2},), 0.95),
        Case(
            "3+2+4",
            18,
            30,
            120,
            24,
            {"ib-a": 3, "roce-a": 2, "eth-a": 4},
            ({"ib-a": 3, "roce-a": 3, "eth-a": 3},),
            0.95,
        ),
        Case("pace", 16, 60, 120, 24, {"ib-a": 4, "roce-a": 4}, ({"ib-a": 4}, {"roce-a": 4}), 0.95, {"roce-a": 3}),
        Case(
            "weights",
            16,
            40,
            120,
            24,
            {"ib-a": 3, "roce-a": 4},
            ({"ib-a": 3, "roce-a": 3},),
            0.95,
            {"roce[3-4]": 2},
            (2, 2, 1, 1),
        ),
        Case("tp", 20, 48, 30, 12, {"ib-b": 2, "roce-a": 3}, ({"ib-a": 2, "roce-a": 2},), 0.95, tps=(2, 1)),
        Case("ranks", 14, 40, 120, 24, {"ib-b": 2, "roce-a": 3}, ({"ib-b": 2, "roce-a": 4},), 0.95),
    )
}


def is_completed(record: RunDirectory) -> bool:
    return record.exists() and (record.read_result() or {}).get("state") == "completed"


def run(case: Case, index: int, repeat: int, runs: Path, plan: Plan, steps: int) -> None:
    """Run one job unless a complete run exists."""
    record = RunDirectory(runs / f"{case.name}-{index}-{repeat}")
    if is_completed(record):
        return
    if record.path.exists():
        subprocess.run([HOLMES, "cancel", str(record.path)], capture_output=True, check=False)
        shutil.rmtree(record.path)
    plan_path = runs / f"{case.name}-{index}.yaml"
    plan.write(plan_path)
    process = subprocess.run(
        [
            HOLMES,
            "run",
            f"plan_file={plan_path}",
            f"run_dir={record.path}",
            f"train.steps={steps}",
            "slurm.exclusive=true",
            "data=synthetic",
        ],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if process.returncode:
        print(f"{record.name}: exit {process.returncode}\n{process.stdout[-1500:]}", flush=True)


def byte_deviation(record: RunDirectory) -> tuple[float, str]:
    """Return the largest relative deviation of a NIC's bytes in the last step from the plan, and that NIC.

    Headers count; NICs without planned bytes do not."""
    plan, run = Plan.read(record.plan_path), record.read_run()
    factors, hosts = run["traffic"]["header_factors"], run["hosts"]
    fabrics = {host: place.pool for host, place in zip(hosts, plan.places, strict=True)}
    planned: dict[tuple[str, str], float] = {}
    for load in planned_loads(planned_bytes(plan), hosts):
        on_wire = load.bytes * factors["ethernet" if load.kind == "ethernet" else fabrics[load.node]]
        planned[load.node, load.kind] = planned.get((load.node, load.kind), 0.0) + on_wire
    deviations = [(0.0, "")]
    for (node, kind), amount in planned.items():
        line = json.loads((record.nics / f"{node}.jsonl").read_text().splitlines()[-1])
        sent = sum(nic["tx"] for name, nic in line["nics"].items() if name.startswith(kind[:3]))
        deviations.append((sent / amount - 1, f"{node}'s {kind}"))
    return max(deviations, key=lambda o: abs(o[0]))


def rate(record: RunDirectory) -> float:
    """Return the samples per second of a run."""
    plan = Plan.read(record.plan_path)
    return plan.batch.global_size / statistics.median(line["step_time_s"] for line in record.metrics()[1:])


def pace_ratio(record: RunDirectory) -> float:
    """Return measured over emulated layer time, for the slowest stage."""
    plan, steps = Plan.read(record.plan_path), record.metrics()[1:]
    assert plan.pace_layer_ms is not None
    ratios = []
    for s, stage in enumerate(plan.stages):
        weights = plan.parallel.stages[s].weights
        ranks = sum(weights) / max(weights) if weights else plan.parallel.stages[s].dp
        factor = (plan.pace_factors or {}).get(stage.fabric, 1.0)
        emulated_s = 3e-3 * plan.pace_layer_ms * factor * stage.layers * plan.batch.micro_batches(1) / ranks
        ratios.append(statistics.median(line["breakdown"][s]["compute_s"] for line in steps) / emulated_s)
    return max(ratios)


def print_case(case: Case, repeats: int, runs: Path) -> None:
    """Print the completed runs of a case and their median ratio."""
    ratios = []
    for repeat in range(repeats):
        records = [RunDirectory(runs / f"{case.name}-{index}-{repeat}") for index in range(len(case.layouts))]
        if not all(map(is_completed, records)):
            continue
        rates = [rate(r) for r in records]
        plans = [Plan.read(r.plan_path) for r in records]
        replicas = [sum(stage.dp for stage in p.parallel.stages) for p in plans]
        scale = (replicas[0] - sum(1 - w / max(case.weights) for w in case.weights)) / sum(replicas[1:])
        pace_ratios = [pace_ratio(r) for r in records]
        corrected = [r * o for r, o in zip(rates, pace_ratios, strict=True)]
        ratios.append([pair[0] / (sum(pair[1:]) * scale) for pair in (rates, corrected)])
        deviation, nic = byte_deviation(records[0])
        print(
            f"{case.name} {repeat}: {rates[0]:.3f} samples/s against {' + '.join(f'{r:.3f}' for r in rates[1:])}"
            f" x {scale:g}: {ratios[-1][0]:.4f}; "
            f"measured over emulated layer time {', '.join(f'{o:.3f}' for o in pace_ratios)}, "
            f"corrected {ratios[-1][1]:.4f}; bytes at most {deviation:+.1%} off ({nic})",
            flush=True,
        )
    if ratios:
        ratio, corrected_ratio = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(
            f"{case.name}: {ratio:.4f} of {len(ratios)} (target {case.target:g}: "
            f"{'met' if ratio >= case.target else 'missed'}); corrected {corrected_ratio:.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=inf, help="start no run after this time")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "unequal")
    arguments = parser.parse_args()
    chosen, site = [CASES[name] for name in arguments.cases.split(",")], read_site()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    plans = {}
    for case in chosen:
        print(f"{case}; hidden {HIDDEN}, sequences of {SEQUENCE}, {arguments.steps} steps", flush=True)
        for index in range(len(case.layouts)):
            plans[case.name, index] = plan = case.plan(index, site)
            prediction = (
                f"{plan.predicted.samples_per_s:.3f} samples/s predicted" if plan.predicted else "no prediction"
            )
            print(
                f"  {plan.parallel}: {', '.join(f'{s.layers} on {s.fabric}' for s in plan.stages)}, "
                f"{plan.schedule.in_flight} in flight, {prediction}"
            )
    deadline = time.monotonic() + 60 * arguments.minutes
    for repeat in range(arguments.repeats):
        for case in chosen:
            for index in list(range(len(case.layouts)))[:: 1 if repeat % 2 == 0 else -1]:
                if time.monotonic() < deadline:
                    run(case, index, repeat, arguments.runs, plans[case.name, index], arguments.steps)
    for case in chosen:
        print_case(case, arguments.repeats, arguments.runs)


if __name__ == "__main__":
    main()
