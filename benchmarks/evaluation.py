"""The paper's evaluation, repeated on the testbed's shaped NICs with paced compute.

    holmes testbed up slurm/testbed/evaluation.yaml; eval "$(holmes testbed env)"
    python benchmarks/evaluation.py [--part headline|full] [--runs DIR] [--minutes N]

Runs the cells of PARTS one job at a time, repeat by repeat and within a repeat system beside system, so that what
drifts in the machine meets all of them alike. Started again it goes on where it was; runs that did not complete are
run again.
Then (also with --minutes 0) the tables: throughput by NIC environment, hybrid against the mean of InfiniBand and RoCE,
speed-up over plain Megatron-LM with its 95% interval, each prediction beside what was measured.

Two regimes, fixed beforehand. The hop ratio is the one-way transfer time of one micro-batch's activations over
Ethernet, over a stage's forward and backward computing for it. In each, every system has the same TP 1, PP 2, DP, batch
and pace on as many nodes; 32 micro-batches per pipeline.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from holmes_hpc.console import note, table
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import load_runs
from holmes_hpc.results.statistics import fraction_of_homogeneous, mape, median_interval, paired_ratios
from holmes_hpc.results.tables import interval, number, unpacked

MICRO_BATCHES, STEPS, REPEATS, PACE_MS = 32, 8, 3, 8.0
COMMON = ("plan.tp=1", "plan.pp=2", "plan.virtual_stages=1", "plan.recompute=none", "batch.sequence_length=16",
          "model.max_positions=16", "model.layers=20", "model.heads=4", "model.kv_heads=4", "model.swiglu=false",
          "model.vocab=128", f"train.steps={STEPS}", f"train.pace_layer_ms={PACE_MS}", "slurm.exclusive=true")


@dataclass(frozen=True)
class Regime:
    """How much communication there is: the model's width and the sequences of a micro-batch."""

    name: str
    hidden: int
    micro_size: int

    @property
    def overrides(self) -> tuple[str, ...]:
        return (f"model.hidden={self.hidden}", f"model.ffn={4 * self.hidden}", f"batch.micro_size={self.micro_size}",
                f"model.name={self.name}")


REGIMES = {r.name: r for r in (Regime("paper-like", 68, 15), Regime("light", 40, 6))}
SYSTEMS: dict[str, tuple[str, ...]] = {
    "holmes": (),
    "holmes, 1F1B": ("plan.schedule=1f1b",),
    "Megatron-LM": ("plan.transport=single", "plan.partition=uniform", "plan.schedule=1f1b",
                    "train.overlap_grad_reduce=false", "train.overlap_param_gather=false"),
    "Megatron-LM, overlap": ("plan.transport=single", "plan.partition=uniform", "plan.schedule=1f1b"),
    "proportional layers": ("plan.partition=proportional", "plan.schedule=1f1b"),
    "without uneven layers": ("plan.partition=uniform",),
    "without own transports": ("plan.transport=single",),
    "without overlap": ("train.overlap_grad_reduce=false", "train.overlap_param_gather=false"),
}


def nodes_of(environment: str, nodes: int) -> str:
    """`plan.nodes` of an environment."""
    if environment == "three":
        return f"{{ib-a: {nodes // 2}, roce-a: {nodes // 4}, eth-a: {nodes // 4}}}"
    fabrics = {"IB": ["ib-a"], "RoCE": ["roce-a"], "Ethernet": ["eth-a"], "hybrid": ["ib-a", "roce-a"],
               "two IB": ["ib-a", "ib-b"]}[environment]
    return "{" + ", ".join(f"{fabric}: {nodes // len(fabrics)}" for fabric in fabrics) + "}"


@dataclass(frozen=True)
class Cell:
    """One setting; a run of it is named after it and its repeat."""

    regime: str
    environment: str
    nodes: int
    system: str

    @property
    def overrides(self) -> list[str]:
        mixed = self.environment in ("hybrid", "two IB", "three")
        batch = MICRO_BATCHES * REGIMES[self.regime].micro_size * self.nodes // 2
        return [*COMMON, *REGIMES[self.regime].overrides, f"plan.nodes={nodes_of(self.environment, self.nodes)}",
                f"plan.strategy={'pipeline' if mixed else 'one-fabric'}", f"batch.global_size={batch}",
                *SYSTEMS[self.system]]

    def run_name(self, repeat: int) -> str:
        words = (self.regime, self.environment, str(self.nodes), self.system, str(repeat))
        return "-".join(words).lower().replace("'", "").replace(",", "").replace(" ", "-")


def _systems(environment: str, mixed: tuple[str, ...]) -> tuple[str, ...]:
    """Homogeneous runs take both schedules, so that the faster one can be compared with."""
    if environment in ("IB", "RoCE"):
        return ("holmes", "holmes, 1F1B", "Megatron-LM, overlap")
    return ("holmes", "Megatron-LM, overlap") if environment == "Ethernet" else mixed


def headline() -> Iterator[Cell]:
    """One model, 4 and 8 nodes, the four environments."""
    for nodes in (4, 8):
        for environment in ("hybrid", "IB", "RoCE", "Ethernet"):
            for system in _systems(environment, ("holmes", "proportional layers", "Megatron-LM, overlap")):
                yield Cell("paper-like", environment, nodes, system)


def full() -> Iterator[Cell]:
    """The headline, then the other regime and node counts, two InfiniBand fabrics, and each part left out."""
    yield from headline()
    for regime, nodes in (("paper-like", 6), ("light", 4), ("light", 6), ("light", 8)):
        for environment in ("hybrid", "IB", "RoCE", "Ethernet"):
            for system in _systems(environment, ("holmes", "proportional layers", "Megatron-LM, overlap")):
                yield Cell(regime, environment, nodes, system)
    for nodes in (4, 8):
        for system in ("holmes", "proportional layers", "Megatron-LM, overlap"):
            yield Cell("paper-like", "two IB", nodes, system)
        for system in ("Megatron-LM", *(s for s in SYSTEMS if s.startswith("without"))):
            yield Cell("paper-like", "hybrid", nodes, system)


PARTS = {"headline": headline, "full": full}


def run(cell: Cell, repeat: int, runs: Path, session: str) -> None:
    """One job, unless it is there complete."""
    name = cell.run_name(repeat)
    there = RunDirectory(runs / name)
    if there.exists():
        if (there.read_result() or {}).get("state") == "completed":
            return
        shutil.rmtree(there.path)
    began = time.monotonic()
    words = [str(Path(sys.executable).with_name("holmes")), "run", f"name={name}", *cell.overrides,
             f"+labels.system='{cell.system}'", f"+labels.session={session}"]
    done = subprocess.run(words, env={**os.environ, "HOLMES_RUNS": str(runs)}, capture_output=True, text=True,
                          check=False)
    said = "" if done.returncode == 0 else f": exit {done.returncode}, {done.stderr.strip().splitlines()[-1:]}"
    note(f"{name}: {time.monotonic() - began:.0f} s{said}")


def measured(cells: list[Cell], runs: Path) -> pd.DataFrame:
    """One row per completed run of `cells`, with `regime`, `where`, `system` and `nodes` of its cell."""
    frame = load_runs(runs)
    frame = frame[frame["state"] == "completed"].set_index("name", drop=False)
    rows = []
    for cell in cells:
        for repeat in range(REPEATS):
            if cell.run_name(repeat) in frame.index:
                row = frame.loc[cell.run_name(repeat)]
                rows.append({**row.to_dict(), "regime": cell.regime, "where": cell.environment, "nodes": cell.nodes,
                             "system": cell.system, "session": unpacked(row.to_dict(), "labels").get("session")})
    return pd.DataFrame(rows)


def tables(found: pd.DataFrame) -> None:
    """What was measured, in the order of the questions."""
    rate = found.groupby(["regime", "nodes", "where", "system"], sort=False)["samples_per_s"].median()
    rows, all_rows = [], []
    for (regime, nodes), group in found.groupby(["regime", "nodes"], sort=False):
        at = rate[regime][nodes]
        best = {where: max(at[where].get("holmes", 0), at[where].get("holmes, 1F1B", 0))
                for where in ("IB", "RoCE") if where in at.index}
        for where in at.index.get_level_values("where").unique():
            ours = at[where].get("holmes")
            pairs = paired_ratios(group[group["where"] == where], "system", "Megatron-LM, overlap", "holmes")
            ratio = median_interval(pairs["ratio"])
            share = (fraction_of_homogeneous(ours, best.values())
                     if ours and len(best) == 2 and where == "hybrid" else None)
            rows.append([regime, nodes, where, number(ours), number(at[where].get("proportional layers")),
                         number(at[where].get("Megatron-LM, overlap")), number(ratio.median),
                         interval(ratio.low, ratio.high), f"{share:.1%}" if share else ""])
        for (where, system), one in group.groupby(["where", "system"], sort=False):
            error = mape(one["predicted_samples_per_s"], one["samples_per_s"])
            all_rows.append([regime, nodes, where, system, one["layers_per_stage"].iloc[0], len(one),
                             number(one["samples_per_s"].median()),
                             number(one["predicted_samples_per_s"].median()), f"{error:.1f}%"])
    table("samples/s, medians", ["regime", "nodes", "where", "holmes", "proportional", "Megatron-LM, overlap",
                                 "holmes over it", "95%", "of mean(IB, RoCE)"], rows,
          f"paced compute: {PACE_MS:g} ms a layer forward; mean of the faster schedule of either fabric")
    table("every cell", ["regime", "nodes", "where", "system", "layers", "runs", "samples/s", "predicted", "error"],
          all_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), default="headline")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "evaluation")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this long")
    given = parser.parse_args()
    cells = list(PARTS[given.part]())
    given.runs.mkdir(parents=True, exist_ok=True)
    print(f"{len(cells)} cells, {REPEATS} repeats; {' '.join(COMMON)}")
    for regime in REGIMES.values():
        print(f"{regime.name}: {' '.join(regime.overrides)}")
    print(f"{platform.node()}: {len(os.sched_getaffinity(0))} CPUs, load average {os.getloadavg()[0]:.1f}", flush=True)
    until = time.monotonic() + 60 * given.minutes
    for repeat in range(REPEATS):
        for cell in cells:
            if time.monotonic() < until:
                run(cell, repeat, given.runs, session=f"{repeat}")
    found = measured(cells, given.runs)
    if len(found):
        tables(found)


if __name__ == "__main__":
    main()
