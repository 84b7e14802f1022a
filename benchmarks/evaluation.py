"""The paper's evaluation, repeated on the testbed's shaped NICs with paced compute.

    holmes testbed up slurm/testbed/evaluation.yaml; eval "$(holmes testbed env)"
    python benchmarks/evaluation.py [--part headline|pairs|full] [--runs DIR] [--minutes N]

Runs the cells of a part one job at a time, repeat by repeat and within a repeat system beside system, so that what
drifts in the machine meets all of them alike. Started again it goes on where it was; runs that did not complete are
run again.
Then (also with --minutes 0) the tables: throughput by NIC environment, hybrid against the mean of InfiniBand and RoCE,
speed-up over plain Megatron-LM with its 95% interval, each prediction beside what was measured.

Three regimes with targets, fixed beforehand: paper-like, light, heavy. The hop ratio is the one-way transfer time of
one micro-batch's activations over Ethernet, over a stage's forward and backward computing for it. In each, every system
has the same TP 1, PP 2 (3 on three fabrics), DP, batch and pace on as many nodes; 32 micro-batches per pipeline. Beside
them, once and without a target: 12 and 6 micro-batches, and no pacing.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from holmes_hpc.console import note, table
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import load_runs
from holmes_hpc.results.columns import PARTS
from holmes_hpc.results.compare import compare
from holmes_hpc.results.figures import ablation, predicted_measured, scaling, svg, throughput
from holmes_hpc.results.statistics import fraction_of_homogeneous, paired_ratios, percentage_errors, repeats_interval
from holmes_hpc.results.tables import PART_NAMES, Table, interval, number, unpacked
from holmes_hpc.testbed.topology import read

HOLMES = str(Path(sys.executable).with_name("holmes"))
MICRO_BATCHES, STEPS, REPEATS, PAIRS, PACE_MS = 32, 3, 3, 10, 9.0
LAYERS, SEQUENCE, ETHERNET_MBIT = 18, 16, read("evaluation").ethernet_mbit
LAYOUT = ("plan.tp=1", "plan.virtual_stages=1", "plan.recompute=none")
COMMON = (f"batch.sequence_length={SEQUENCE}", f"model.max_positions={SEQUENCE}", f"model.layers={LAYERS}",
          "model.heads=2", "model.kv_heads=2", "model.swiglu=false", "model.vocab=128", f"train.steps={STEPS}",
          "slurm.exclusive=true")
PACED = f"paced compute (but where it says unpaced): {PACE_MS:g} ms a layer forward, twice that backward"

# Regime -> at least what hybrid is to be of the mean of InfiniBand and RoCE, and over Megatron-LM with overlap: 1.4
# times, 1.7 in heavy, where Ethernet stands at half of InfiniBand or less.
TARGETS = {"paper-like": (0.98, 1.4), "light": (0.99, None), "heavy": (None, 1.7)}
PAIRED = ("paper-like", 4)  # where there are ten pairs
NOT_SLOWER = 0.98  # in every environment: the lower end of the 95% interval of ten pairs' ratios

READING = """\
Predictions are the planner's for each run's plan, from declared rates and the pace alone: nothing was fitted to these
runs. Over gloo plain Megatron-LM's activations and gradients wait for each other: they share one connection
(benchmarks/one_connection.py). On connections of their own (proportional layers) the same 1F1B is faster; judge the
method by that row as well. Without overlap of its traffic it is 8% faster there still, which the predictions miss. Six
and eight ranks fill this machine's two cores: layers then take up to 6% longer than their pace, up to 10% in its slow
hours (most where ranks wait least), and differences of 2% at 8 nodes are of that kind; ablations, two IB fabrics and
the free choice at 8 nodes were run in such hours. Light at 8 nodes is of the mean of InfiniBand and RoCE, session by
session, 101.4%, 101.1% and 95.6%, the last with layers 10% longer than their pace (its runs were made twice: at first
97.6%, beside other work). The planner's free choice takes virtual stages in light at 6 and 8 nodes: that many short
passes cost two cores more than they save, which only a calibration knows; unpaced, layers this small take what Python
takes, which no published figure tells. Of systems on one fabric the table says which schedule is faster there; the free
choice is in the table of every cell."""


@dataclass(frozen=True)
class Regime:
    """How much communication there is: the model's width and the sequences of a micro-batch; micro-batches of a
    pipeline; milliseconds of a layer's forward pass, None where it takes what it takes."""

    name: str
    hidden: int
    micro_size: int
    micro_batches: int = MICRO_BATCHES
    pace_ms: float | None = PACE_MS

    @property
    def overrides(self) -> tuple[str, ...]:
        return (f"model.hidden={self.hidden}", f"model.ffn={4 * self.hidden}", f"model.name={self.name}",
                f"train.pace_layer_ms={self.pace_ms or 'null'}")


REGIMES = {r.name: r for r in (
    Regime("paper-like", 48, 11), Regime("light", 24, 5), Regime("heavy", 60, 18),
    Regime("paper-like-12", 48, 11, micro_batches=12), Regime("paper-like-6", 48, 11, micro_batches=6),
    Regime("unpaced", 48, 11, pace_ms=None))}
SYSTEMS: dict[str, tuple[str, ...]] = {
    "holmes": (),
    "Megatron-LM": ("plan.transport=single", "plan.partition=uniform", "plan.schedule=1f1b",
                    "train.overlap_grad_reduce=false", "train.overlap_param_gather=false"),
    "Megatron-LM, overlap": ("plan.transport=single", "plan.partition=uniform", "plan.schedule=1f1b"),
    "proportional layers": ("plan.partition=proportional", "plan.schedule=1f1b"),
    "without running ahead": ("plan.schedule=1f1b",),
    "without uneven layers": ("plan.partition=uniform",),
    "without own transports": ("plan.transport=single",),
    "without overlap": ("train.overlap_grad_reduce=false", "train.overlap_param_gather=false"),
}


def nodes_of(environment: str, nodes: int) -> str:
    """`plan.nodes` of an environment."""
    if environment == "three":
        return f"{{ib-a: {nodes // 3}, roce-a: {nodes // 3}, eth-a: {nodes // 3}}}"
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
    def stages(self) -> int:
        return 3 if self.environment == "three" else 2

    @property
    def micro_size(self) -> int:
        """The same hop ratio with a third stage, which computes less."""
        return round(REGIMES[self.regime].micro_size * 2 / self.stages)

    @property
    def overrides(self) -> list[str]:
        mixed = self.environment in ("hybrid", "two IB", "three")
        regime = REGIMES[self.regime]
        batch = regime.micro_batches * self.micro_size * self.nodes // self.stages
        layout = (f"plan.pp={self.stages}", f"plan.strategy={'pipeline' if mixed else 'one-fabric'}", *LAYOUT)
        return [*COMMON, *regime.overrides, f"batch.micro_size={self.micro_size}", f"batch.global_size={batch}",
                f"plan.nodes={nodes_of(self.environment, self.nodes)}", *(layout if self.system != FREE else ()),
                *SYSTEMS.get(self.system, ())]

    @property
    def hop_ratio(self) -> float:
        """Of even stages; 4% of headers."""
        regime = REGIMES[self.regime]
        sent = 1.044 * 4 * regime.hidden * SEQUENCE * self.micro_size
        return sent * 8 / (ETHERNET_MBIT * 1e6) / (3 * (regime.pace_ms or np.nan) / 1000 * LAYERS / self.stages)

    def run_name(self, repeat: int) -> str:
        words = (self.regime, self.environment, str(self.nodes), self.system, str(repeat))
        return "-".join(words).lower().replace("'", "").replace(",", "").replace(" ", "-")


FREE = "the planner's free choice"  # of all but nodes, batch and pace
ENVIRONMENTS = ("hybrid", "IB", "RoCE", "Ethernet")
BOTH = ("holmes", "Megatron-LM, overlap")  # on one fabric they differ by the schedule: the faster one is compared with
MIXED = ("holmes", "proportional layers", "Megatron-LM, overlap")  # where stages can differ


def grid(regime: str, nodes: int) -> Iterator[Cell]:
    """The environments at one regime and number of nodes. The paper's rule is beside us where stages can differ."""
    for environment in ENVIRONMENTS:
        for system in BOTH if environment != "hybrid" else MIXED:
            yield Cell(regime, environment, nodes, system)


def parts() -> dict[str, list[tuple[int, Cell]]]:
    """Part -> its (repeat, cell), in the order in which they are run: repeat by repeat."""
    headline = [*grid("paper-like", 4), *grid("paper-like", 8)]
    pairs = [Cell(PAIRED[0], environment, PAIRED[1], system) for environment in ENVIRONMENTS for system in BOTH]
    settings = (("heavy", 4), ("light", 4), ("light", 8), ("paper-like", 6), ("light", 6))
    wanted = [c for at in settings for c in grid(*at)]
    targets = [c for c in wanted if c.environment != "Ethernet" or c.regime == "heavy"]  # what a target speaks of
    targets += [Cell(regime, "hybrid", nodes, FREE) for regime in ("paper-like", "light") for nodes in (4, 6, 8)]
    others = [Cell("paper-like", where, nodes, system) for where, nodes in (("two IB", 4), ("two IB", 8), ("three", 6))
              for system in MIXED]
    others += [c for c in wanted if c not in targets]
    others += [Cell("paper-like", where, 4, "proportional layers") for where in ENVIRONMENTS[1:]]
    for nodes in (4, 8):
        others += [Cell("paper-like", "hybrid", nodes, system)
                   for system in ("Megatron-LM", *(s for s in SYSTEMS if s.startswith("without")))]
    beside = [c for regime in ("paper-like-12", "paper-like-6", "unpaced") for c in grid(regime, 4)]
    made = {"headline": _repeated(headline, REPEATS), "pairs": _repeated(pairs, PAIRS)}
    rest = [*_repeated(targets, REPEATS), *made["pairs"], *_repeated(others, REPEATS), *_repeated(beside, 1)]
    return {**made, "full": list(dict.fromkeys([*made["headline"], *rest]))}


def _repeated(cells: list[Cell], repeats: int) -> list[tuple[int, Cell]]:
    return [(repeat, cell) for repeat in range(repeats) for cell in cells]


def run(cell: Cell, repeat: int, runs: Path, at: str) -> None:
    """One job, unless it is there complete. `at`: how far we are."""
    name = cell.run_name(repeat)
    there = RunDirectory(runs / name)
    if there.exists():
        if (there.read_result() or {}).get("state") == "completed":
            return
        subprocess.run([HOLMES, "cancel", str(there.path)], capture_output=True, check=False)
        shutil.rmtree(there.path)
    began = time.monotonic()
    words = [HOLMES, "run", f"name={name}", *cell.overrides, f'+labels.system="{cell.system}"',
             f"+labels.session={repeat}"]
    env = {**os.environ, "HOLMES_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    said = "" if done.returncode == 0 else f": exit {done.returncode}, {done.stderr.strip().splitlines()[-1:]}"
    note(f"{at} {name}: {time.monotonic() - began:.0f} s{said}")


def measured(planned: list[tuple[int, Cell]], runs: Path) -> pd.DataFrame:
    """One row per completed run of those `planned`, with `regime`, `where`, `system` and `nodes` of its cell, and what
    the planner says of the run's plan."""
    frame = load_runs(runs)
    frame = frame[frame["state"] == "completed"].set_index("name", drop=False)
    rows = []
    for repeat, cell in planned:
        if cell.run_name(repeat) in frame.index:
            row = frame.loc[cell.run_name(repeat)]
            plan, hidden = Plan.read(runs / cell.run_name(repeat) / "plan.yaml"), bool(row["overlap"])
            predicted = predict(plan, Costs(pace_layer_ms=plan.pace_layer_ms, software=Software(overlap=hidden)))
            rows.append({**row.to_dict(), "regime": cell.regime, "where": cell.environment, "nodes": cell.nodes,
                         "system": cell.system, "session": unpacked(row.to_dict(), "labels").get("session"),
                         "predicted_step_time_s": predicted.step_time_s,
                         "predicted_samples_per_s": predicted.samples_per_s})
    return pd.DataFrame(rows)


def tables(found: pd.DataFrame) -> list[Table]:
    """What was measured, in the order of the questions."""
    rate = found.groupby(["regime", "nodes", "where", "system"], sort=False)["samples_per_s"].median()
    answers: list[list[str]] = []
    plain, cells, breakdowns = list(answers), list(answers), list(answers)
    goals, rule = list(answers), {}
    for (regime, nodes), group in found.groupby(["regime", "nodes"], sort=False):
        at = rate[regime][nodes]
        of_mean, over = TARGETS.get(regime, (None, None))
        best = {where: max(at[where].get(system, 0) for system in BOTH)
                for where in ("IB", "RoCE") if where in at.index}
        for where in at.index.get_level_values("where").unique():
            ours, overlap = at[where].get("holmes"), at[where].get("Megatron-LM, overlap")
            pairs = paired_ratios(group[group["where"] == where], "system", "Megatron-LM, overlap", "holmes")
            ratio = repeats_interval(pairs["ratio"])
            whole = ours and len(best) == 2 and where == "hybrid"
            share = fraction_of_homogeneous(ours, best.values()) if whole else np.nan
            answers.append([f"{regime}, {nodes}", where, number(ours), number(at[where].get("proportional layers")),
                            number(overlap), number(ratio.median), interval(ratio.low, ratio.high),
                            f"{share:.1%}" if whole else ""])
            goals += [_goal(what, f"{regime}, {nodes}, {where}", wanted, got) for what, wanted, got in (
                ("of the mean of IB and RoCE", of_mean if where == "hybrid" else None, share),
                ("over Megatron-LM, overlap", over if where == "hybrid" else None, ratio.median),
                ("over it, the lower end of 95%",
                 NOT_SLOWER if (regime, nodes) == PAIRED and where in ENVIRONMENTS else None,
                 ratio.low if ratio.count >= PAIRS else np.nan),
            ) if wanted]
            if ours and "proportional layers" in at[where]:
                rule[f"{regime}, {nodes}, {where}"] = ours / at[where]["proportional layers"]
            if overlap and "Megatron-LM, overlap" in at.get("IB", {}):
                plain.append([f"{regime}, {nodes}", where, f"{overlap / at['IB']['Megatron-LM, overlap']:.2f}"])
        for (where, system), one in group.groupby(["where", "system"], sort=False):
            error = float(np.median(percentage_errors(one["predicted_samples_per_s"], one["samples_per_s"])))
            cell = [f"{regime}, {nodes}", where, system]
            cells.append([*cell, one["layers_per_stage"].iloc[0], str(len(one)), number(one["samples_per_s"].median()),
                          number(one["predicted_samples_per_s"].median()), f"{error:+.1f}%"])
            breakdowns.append([*cell, *(number(one[part].median()) for part in PARTS)])
    goals.sort(key=lambda row: row[0])
    if rule:
        least = min(rule, key=lambda at: rule[at])
        goals.append(_goal(f"over the paper's rule, the least of {len(rule)} cells", least, 1, rule[least]))
    return [
        Table("What is to be shown", ["what", "regime, nodes, where", "at least", "measured", ""], goals,
              "ratios of samples/s; the paper's rule: layers in proportion to speed, 1F1B"),
        Table("Samples/s by NIC environment", ["regime, nodes", "where", "holmes", "proportional layers",
                                               "Megatron-LM, overlap", "holmes over it", "95%", "of mean(IB, RoCE)"],
              answers, f"medians; {PACED}; the mean is of the faster schedule of either fabric; 95%: of the pairs' "
                       "ratios, by order statistics from six pairs on, of fewer by Student's t"),
        Table("What the environments are to plain Megatron-LM with overlap", ["regime, nodes", "where", "of IB"],
              plain, "throughput; the paper's at 4 nodes: Ethernet 0.62, RoCE 0.81"),
        Table("Every cell and its prediction", ["regime, nodes", "where", "system", "layers", "runs", "samples/s",
                                                "predicted", "error"], cells, f"medians; {PACED}"),
        Table("Where a step goes: seconds", ["regime, nodes", "where", "system", *(PART_NAMES[p] for p in PARTS)],
              breakdowns, f"medians, mean over stages; {PACED}")]


def _goal(what: str, at: str, wanted: float, got: float) -> list[str]:
    return [what, at, f"{wanted:g}", *([f"{got:.3f}", "met" if got >= wanted else "missed"] if not np.isnan(got)
                                       else ["", "not measured"])]


def drawn(found: pd.DataFrame) -> Iterator[tuple[str, str, Figure]]:
    """File name, title and figure: predictions, scaling, what each part is worth, and throughput by environment."""
    yield "predicted", "Predicted against measured, every run", predicted_measured(found)
    paper = found[found["regime"] == "paper-like"]
    several = compare(paper[paper["system"].isin(BOTH)].drop(columns=["regime", "where"])).cells
    if several["nodes"].nunique() > 1:
        yield "scaling", "Scaling, paper-like", scaling(several)
    for nodes, group in paper[paper["where"] == "hybrid"].groupby("nodes"):
        parts_left = compare(group[group["system"] != FREE].drop(columns=["regime", "where"])).cells
        if parts_left["system"].str.startswith("without").any() and (parts_left["system"] == "holmes").any():
            complete = parts_left.index[parts_left["system"] == "holmes"][0]
            yield f"ablation-{nodes}", f"What each part is worth, paper-like, hybrid, {nodes} nodes", \
                ablation(parts_left, complete)
    for (regime, nodes), group in found.groupby(["regime", "nodes"], sort=False):
        cells = compare(group.drop(columns=["regime", "where"])).cells
        yield f"{regime}-{nodes}", f"Throughput, {regime}, {nodes} nodes", throughput(cells)


def _section(t: Table) -> list[str]:
    return ["", f"## {t.title}", "", "| " + " | ".join(t.columns) + " |", "|---" * len(t.columns) + "|",
            *("| " + " | ".join(row) + " |" for row in t.rows), "", t.caption]


def write_page(found: pd.DataFrame, made: list[Table], part: str, path: Path) -> None:
    """The tables and a figure for each regime and number of nodes, as a page."""
    commits = ", ".join(sorted({str(c)[:12] for c in found["git_commit"].dropna()}))
    lines = ["# The paper's evaluation, on shaped NICs", "",
             "Made by `make evaluation` (`benchmarks/evaluation.py` says how); the numbers are of network namespaces "
             "and veth pairs on one machine, not of InfiniBand or RoCE hardware.", "",
             f"{machine()}; commit {commits}; part: {part}, their raw records in "
             f"[runs.tar.xz]({path.stem}/runs.tar.xz); `{' '.join((*COMMON, *LAYOUT))}`.", ""]
    for regime in found["regime"].unique():
        hop = f"hop ratio {Cell(regime, 'hybrid', 4, 'holmes').hop_ratio:.3f}; " if REGIMES[regime].pace_ms else ""
        lines.append(f"- *{regime}*: {hop}micro-batches of {REGIMES[regime].micro_size}; "
                     f"`{' '.join(REGIMES[regime].overrides)}`")
    lines += ["", READING]
    for t in made[:2]:
        lines += _section(t)
    figures_at = path.with_suffix("")
    figures_at.mkdir(parents=True, exist_ok=True)
    for old in figures_at.glob("*.svg"):
        old.unlink()
    for name, title, figure in drawn(found):
        (figures_at / f"{name}.svg").write_text(svg(figure), encoding="utf-8")
        lines += ["", f"![{title}]({figures_at.name}/{name}.svg)"]
    for t in made[2:]:
        lines += _section(t)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pack(found: pd.DataFrame, runs: Path, path: Path) -> None:
    """The raw records of the runs found, without this machine's paths; unpacked, `holmes report` reads them."""
    with tarfile.open(path, "w:xz") as packed:
        for name in sorted(found["name"]):
            for file in ("run.yaml", "plan.yaml", "metrics.jsonl", "result.json"):
                text = (runs / name / file).read_text(encoding="utf-8").replace(str(runs.absolute()), runs.name)
                entry = tarfile.TarInfo(f"{runs.name}/{name}/{file}")
                entry.size = len(data := text.encode())
                packed.addfile(entry, io.BytesIO(data))


def machine() -> str:
    """What the runs were made on."""
    cpu = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.system()} {platform.release()}, {os.cpu_count()} cores of {cpu}, {gib:.0f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(parts()), default="headline")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "evaluation")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this long")
    parser.add_argument("--page", type=Path, help="also write the tables and figures here: docs/evaluation-tables.md")
    given = parser.parse_args()
    planned = parts()[given.part]
    given.runs.mkdir(parents=True, exist_ok=True)
    print(f"{len({cell for _, cell in planned})} cells, {len(planned)} runs; {' '.join(COMMON)}")
    for regime in REGIMES.values():
        print(f"{regime.name}: {' '.join(regime.overrides)}")
    print(f"{platform.node()}: {len(os.sched_getaffinity(0))} CPUs, load average {os.getloadavg()[0]:.1f}", flush=True)
    until = time.monotonic() + 60 * given.minutes
    for nth, (repeat, cell) in enumerate(planned, 1):
        if time.monotonic() < until:
            run(cell, repeat, given.runs, f"[{nth}/{len(planned)}]")
    found = measured(planned, given.runs)
    there = set(found.get("name", ()))
    missing = [name for name in (cell.run_name(repeat) for repeat, cell in planned) if name not in there]
    if missing:
        note(f"{len(missing)} of {len(planned)} runs are missing: {', '.join(missing[:5])} ...; start it again")
    if len(found) == 0:
        sys.exit(1)
    made = tables(found)
    for t in made:
        table(*t)
    if given.page:
        write_page(found, made, f"{given.part}, {len(found)} of its {len(planned)} runs", given.page)
        pack(found, given.runs, given.page.with_suffix("") / "runs.tar.xz")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
