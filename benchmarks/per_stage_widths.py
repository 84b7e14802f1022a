"""Stages of unequal widths against equal ones, on the testbed: shaped NICs, paced compute.

    holmes testbed up unequal; eval "$(holmes testbed env)"
    python benchmarks/per_stage_widths.py [--cases 3+5,pace] [--repeats 5] [--steps 3] [--minutes N] [--runs DIR]

Of every case: the rate (samples/s) of the unequal layout over that of as many replicas (of the usual pace) in equal
layouts, whose rates are added up; the model, batch and pace are the same. Runs alternate: the order of a case's runs is
turned round with each repeat. A run's rate is of the median of its step times but the first's. Printed too: what the
planner said; layers' times over their pace (other work on the machine takes them: it is in every rate) and the ratio of
the rates times that; and how far the bytes that a node's NICs counted are from those planned for it. Started again it
goes on where it was.
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
from holmes_hpc.fabric.site import Site
from holmes_hpc.fabric.site_slurm import read_site
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
from holmes_hpc.training.network.audit import planned_loads

HOLMES = str(Path(sys.executable).with_name("holmes"))
SEQUENCE, HIDDEN = 16, 24
Nodes = dict[str, int]  # fabric -> how many


@dataclass(frozen=True)
class Case:
    """`unequal` and `equal`: the nodes of the one layout and of the others; `micro_size`: sequences, for the stage
    transfer's share of a stage's time; `factors`: of the pace, on a fabric or, in the unequal layout alone, on nodes;
    `wanted`: the ratio of rates at least; `weights`: of the last stage's replicas (the planner knows one speed a
    fabric, so this rule is told); `tps`: of the stages, where that is not 1 (a paced layer takes as long with TP 2, so
    this is told too)."""

    name: str
    layers: int
    micro_size: int
    micro_batches: int
    pace_ms: float
    unequal: Nodes
    equal: tuple[Nodes, ...]
    wanted: float
    factors: Nodes | None = None
    weights: tuple[float, ...] = ()
    tps: tuple[int, ...] = ()

    @property
    def sides(self) -> list[Nodes]:
        return [self.unequal, *self.equal]

    def plan(self, side: int, site: Site) -> Plan:
        """The planner's choice of layers, depth and order of fabrics, for one stage a fabric (two on one alone)."""
        nodes = self.sides[side]
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
            virtual_stages=1 if side else None,
            unequal="false" if side else "auto",
        )
        factors = {at: f for at, f in (self.factors or {}).items() if at in nodes or not side}
        costs = Costs(pace_layer_ms=self.pace_ms, pace_factors=None if side and self.weights else factors or None)
        if side:
            return best_plan(model, batch, site, options, costs)
        made = to_plan(variants(Problem(model, batch, site, options, costs), Clock(), inf)[0], site, [])
        if self.weights:
            *others, last = made.parallel.stages
            half = self.layers // 2
            return _told(made, [*others, replace(last, weights=self.weights)], [half, half], 4)
        if self.tps:
            widths = [replace(w, tp=tp, dp=w.ranks // tp) for w, tp in zip(made.parallel.stages, self.tps, strict=True)]
            first = self.layers * widths[0].dp // sum(w.dp for w in widths)
            return _told(made, widths, [first, self.layers - first], 4)
        return made


def _told(plan: Plan, widths: list[StageParallel], layers: list[int], more: int) -> Plan:
    """A plan of two stages with other widths and layers, and `more` in flight than hide nothing but computing."""
    depths = least_in_flight(tuple(w.dp for w in widths), (more, 0))
    return replace(
        plan,
        parallel=Parallel(tuple(widths), sequence_parallel=max(w.tp for w in widths) > 1),
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


def completed(record: RunDirectory) -> bool:
    return record.exists() and (record.read_result() or {}).get("state") == "completed"


def run(case: Case, side: int, repeat: int, runs: Path, plan: Plan, steps: int) -> None:
    """One job, unless it is there complete."""
    there = RunDirectory(runs / f"{case.name}-{side}-{repeat}")
    if completed(there):
        return
    if there.path.exists():
        subprocess.run([HOLMES, "cancel", str(there.path)], capture_output=True, check=False)
        shutil.rmtree(there.path)
    file = runs / f"{case.name}-{side}.yaml"
    plan.write(file)
    done = subprocess.run(
        [
            HOLMES,
            "run",
            f"plan_file={file}",
            f"run_dir={there.path}",
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
    if done.returncode:
        print(f"{there.name}: exit {done.returncode}\n{done.stdout[-1500:]}", flush=True)


def bytes_off(record: RunDirectory) -> tuple[float, str]:
    """The farthest that a node's NIC is, in the run's last step, from what was planned for it and its headers; and
    which NIC that is. Of those that are planned to carry something."""
    plan, run = Plan.read(record.plan_path), record.read_run()
    factors, hosts = run["traffic"]["header_factors"], run["hosts"]
    fabrics = {host: place.fabric for host, place in zip(hosts, plan.places, strict=True)}
    planned: dict[tuple[str, str], float] = {}
    for load in planned_loads(plan, hosts):
        on_wire = load.bytes * factors["ethernet" if load.kind == "ethernet" else fabrics[load.node]]
        planned[load.node, load.kind] = planned.get((load.node, load.kind), 0.0) + on_wire
    off = [(0.0, "")]
    for (node, kind), wanted in planned.items():
        line = json.loads((record.nics / f"{node}.jsonl").read_text().splitlines()[-1])
        sent = sum(nic["tx"] for name, nic in line["nics"].items() if name.startswith(kind[:3]))
        off.append((sent / wanted - 1, f"{node}'s {kind}"))
    return max(off, key=lambda o: abs(o[0]))


def rate(record: RunDirectory) -> float:
    """Samples a second."""
    plan = Plan.read(record.plan_path)
    return plan.batch.global_size / statistics.median(line["step_time_s"] for line in record.metrics()[1:])


def over_pace(record: RunDirectory) -> float:
    """How many times their pace layers took, of the stage where that is most."""
    plan, steps = Plan.read(record.plan_path), record.metrics()[1:]
    assert plan.pace_layer_ms is not None
    found = []
    for s, stage in enumerate(plan.stages):
        weights = plan.parallel.stages[s].weights
        ranks = sum(weights) / max(weights) if weights else plan.parallel.stages[s].dp
        factor = (plan.pace_factors or {}).get(stage.fabric, 1.0)
        each = 3e-3 * plan.pace_layer_ms * factor * stage.layers * plan.batch.micro_batches(1) / ranks
        found.append(statistics.median(line["breakdown"][s]["compute_s"] for line in steps) / each)
    return max(found)


def shown(case: Case, repeats: int, runs: Path) -> None:
    """Print what there is of a case."""
    ratios = []
    for repeat in range(repeats):
        records = [RunDirectory(runs / f"{case.name}-{side}-{repeat}") for side in range(len(case.sides))]
        if not all(map(completed, records)):
            continue
        rates = [rate(r) for r in records]
        plans = [Plan.read(r.plan_path) for r in records]
        replicas = [sum(stage.dp for stage in p.parallel.stages) for p in plans]
        scale = (replicas[0] - sum(1 - w / max(case.weights) for w in case.weights)) / sum(replicas[1:])
        over = [over_pace(r) for r in records]
        at_pace = [r * o for r, o in zip(rates, over, strict=True)]
        ratios.append([one[0] / (sum(one[1:]) * scale) for one in (rates, at_pace)])
        off, nic = bytes_off(records[0])
        print(
            f"{case.name} {repeat}: {rates[0]:.3f} samples/s against {' + '.join(f'{r:.3f}' for r in rates[1:])}"
            f" x {scale:g}: {ratios[-1][0]:.4f}; layers over their pace {', '.join(f'{o:.3f}' for o in over)}, "
            f"without that {ratios[-1][1]:.4f}; bytes at most {off:+.1%} off ({nic})",
            flush=True,
        )
    if ratios:
        raw, at_pace_ratio = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(
            f"{case.name}: {raw:.4f} of {len(ratios)} (wanted {case.wanted:g}: "
            f"{'met' if raw >= case.wanted else 'missed'}); at their pace {at_pace_ratio:.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=inf, help="start no run after this long")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "unequal")
    given = parser.parse_args()
    chosen, site = [CASES[name] for name in given.cases.split(",")], read_site()
    given.runs.mkdir(parents=True, exist_ok=True)
    plans = {}
    for case in chosen:
        print(f"{case}; hidden {HIDDEN}, sequences of {SEQUENCE}, {given.steps} steps", flush=True)
        for side in range(len(case.sides)):
            plans[case.name, side] = plan = case.plan(side, site)
            says = f"{plan.predicted.samples_per_s:.3f} samples/s" if plan.predicted else "nothing"
            print(
                f"  {plan.parallel}: {', '.join(f'{s.layers} on {s.fabric}' for s in plan.stages)}, "
                f"{plan.schedule.in_flight} in flight, {says} predicted"
            )
    until = time.monotonic() + 60 * given.minutes
    for repeat in range(given.repeats):
        for case in chosen:
            for side in list(range(len(case.sides)))[:: 1 if repeat % 2 == 0 else -1]:
                if time.monotonic() < until:
                    run(case, side, repeat, given.runs, plans[case.name, side], given.steps)
    for case in chosen:
        shown(case, given.repeats, given.runs)


if __name__ == "__main__":
    main()
