"""The paper's evaluation, repeated on the testbed's shaped NICs with paced compute.

    holmes testbed up slurm/testbed/evaluation.yaml; eval "$(holmes testbed env)"
    python benchmarks/evaluation.py [--part headline|pairs|demo|four-nodes|full] [--runs DIR] [--minutes N]

Runs the cells of a part one job at a time, repeat by repeat and within a repeat system beside system, so that what
drifts in the machine meets all of them alike. Started again it goes on where it was; runs that did not complete are
run again.
Then (also with --minutes 0) the tables: throughput by NIC environment, hybrid against the mean of InfiniBand and RoCE,
speed-up over plain Megatron-LM with its 95% interval, each prediction beside what was measured.
What is run: evaluation_cells.py.
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
from pathlib import Path

import numpy as np
import pandas as pd
from evaluation_cells import (
    BOTH,
    COMMON,
    ENVIRONMENTS,
    FREE,
    LAYOUT,
    NOT_SLOWER,
    PACED,
    PAIRED,
    PAIRS,
    REGIMES,
    TARGETS,
    Cell,
    parts,
)
from matplotlib.figure import Figure

from holmes_hpc.console import note, table, waiting
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import load_runs
from holmes_hpc.results.compare import compare
from holmes_hpc.results.figures import ablation, predicted_measured, scaling, svg, throughput
from holmes_hpc.results.statistics import fraction_of_homogeneous, paired_ratios, percentage_errors, repeats_interval
from holmes_hpc.results.tables import Table, interval, number

HOLMES = str(Path(sys.executable).with_name("holmes"))

FOUR_NODES = """\
Plain Megatron-LM has one connection per direction here, as it has over NCCL. Predictions are the planner's for each
run's plan, from declared rates and the pace alone; nothing was fitted to these runs. Intervals are over repeats on one
machine. evaluation-tables.md has 6 and 8 nodes, ablations and the planner's free choice."""
READING = """\
Predictions are the planner's for each run's plan, from declared rates and the pace alone; nothing was fitted to these
runs.

- Plain Megatron-LM over gloo has one connection for both directions here, so activations and gradients wait for each
  other (benchmarks/one_connection.py). evaluation-four-nodes.md repeats the cells at 4 nodes with one connection per
  direction. *Proportional layers* is the same 1F1B with its own connections.
- Plain Megatron-LM is 8% faster without overlap of its traffic. The predictions here miss that; evaluation-notes.md
  explains it.
- Six and eight ranks fill this machine's two cores. Layers then take up to 6% longer than their pace, and up to 10%
  when the machine is slow. Differences of 2% at 8 nodes are of that kind. Ablations, two IB fabrics and the free choice
  at 8 nodes were run in slow hours.
- Light at 8 nodes, as a share of the mean of InfiniBand and RoCE, is 101.4%, 101.1% and 95.6% in three sessions. In the
  last, layers took 10% longer than their pace.
- The planner's free choice takes virtual stages in light at 6 and 8 nodes. So many short passes cost two cores more
  than they save. Only a calibration shows that.
- Unpaced, layers this small take as long as Python takes. No published figure gives that.
- Of systems on one fabric the table shows the faster schedule. The table of every cell has the free choice."""


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
    words = [
        HOLMES,
        "run",
        f"name={name}",
        *cell.overrides,
        f'+labels.system="{cell.system}"',
        f"+labels.session={repeat}",
    ]
    env = {**os.environ, "HOLMES_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    with waiting(f"{at} {name}", after_s=9.0):
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
            rows.append(
                {
                    **row.to_dict(),
                    "regime": cell.regime,
                    "where": cell.environment,
                    "nodes": cell.nodes,
                    "system": cell.system,
                    "session": row["session"],
                    "predicted_step_time_s": predicted.step_time_s,
                    "predicted_samples_per_s": predicted.samples_per_s,
                }
            )
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
        best = {
            where: max(at[where].get(system, 0) for system in BOTH) for where in ("IB", "RoCE") if where in at.index
        }
        for where in at.index.get_level_values("where").unique():
            ours, overlap = at[where].get("holmes"), at[where].get("Megatron-LM, overlap")
            pairs = paired_ratios(group[group["where"] == where], "system", "Megatron-LM, overlap", "holmes")
            ratio = repeats_interval(pairs["ratio"])
            whole = ours and len(best) == 2 and where == "hybrid"
            share = fraction_of_homogeneous(ours, best.values()) if whole else np.nan
            answers.append(
                [
                    f"{regime}, {nodes}",
                    where,
                    number(ours),
                    number(at[where].get("proportional layers")),
                    number(overlap),
                    number(ratio.median),
                    interval(ratio.low, ratio.high),
                    f"{share:.1%}" if whole else "",
                ]
            )
            goals += [
                _goal(what, f"{regime}, {nodes}, {where}", wanted, got)
                for what, wanted, got in (
                    ("of the mean of IB and RoCE", of_mean if where == "hybrid" else None, share),
                    ("over Megatron-LM, overlap", over if where == "hybrid" else None, ratio.median),
                    (
                        "over it, the lower end of 95%",
                        NOT_SLOWER if (regime, nodes) == PAIRED and where in ENVIRONMENTS else None,
                        ratio.low if ratio.count >= PAIRS else np.nan,
                    ),
                )
                if wanted
            ]
            if ours and "proportional layers" in at[where]:
                rule[f"{regime}, {nodes}, {where}"] = ours / at[where]["proportional layers"]
            if overlap and "Megatron-LM, overlap" in at.get("IB", {}):
                plain.append([f"{regime}, {nodes}", where, f"{overlap / at['IB']['Megatron-LM, overlap']:.2f}"])
        for (where, system), one in group.groupby(["where", "system"], sort=False):
            error = float(np.median(percentage_errors(one["predicted_samples_per_s"], one["samples_per_s"])))
            cell = [f"{regime}, {nodes}", where, system]
            cells.append(
                [
                    *cell,
                    one["layers_per_stage"].iloc[0],
                    str(len(one)),
                    number(one["samples_per_s"].median()),
                    number(one["predicted_samples_per_s"].median()),
                    f"{error:+.1f}%",
                ]
            )
            breakdowns.append([*cell, *(number(one[part].median()) for part in PARTS)])
    goals.sort(key=lambda row: row[0])
    if rule:
        least = min(rule, key=lambda at: rule[at])
        goals.append(_goal(f"over the paper's rule, the least of {len(rule)} cells", least, 1, rule[least]))
    return [
        Table(
            "Targets",
            ["what", "regime, nodes, where", "at least", "measured", ""],
            goals,
            "ratios of samples/s; the paper's rule: layers in proportion to speed, 1F1B",
        ),
        Table(
            "Samples/s by NIC environment",
            [
                "regime, nodes",
                "where",
                "holmes",
                "proportional layers",
                "Megatron-LM, overlap",
                "holmes over it",
                "95%",
                "of mean(IB, RoCE)",
            ],
            answers,
            f"medians; {PACED}; the mean is of the faster schedule of either fabric; 95%: of the pairs' "
            "ratios, by order statistics from six pairs on, of fewer by Student's t",
        ),
        Table(
            "What the environments are to plain Megatron-LM with overlap",
            ["regime, nodes", "where", "of IB"],
            plain,
            "throughput; the paper's at 4 nodes: Ethernet 0.62, RoCE 0.81",
        ),
        Table(
            "Every cell and its prediction",
            ["regime, nodes", "where", "system", "layers", "runs", "samples/s", "predicted", "error"],
            cells,
            f"medians; {PACED}",
        ),
        Table(
            "Where a step goes: seconds",
            ["regime, nodes", "where", "system", *(PART_NAMES[p] for p in PARTS)],
            breakdowns,
            f"medians, mean over stages; {PACED}",
        ),
    ]


def _goal(what: str, at: str, wanted: float, got: float) -> list[str]:
    return [
        what,
        at,
        f"{wanted:g}",
        *([f"{got:.3f}", "met" if got >= wanted else "missed"] if not np.isnan(got) else ["", "not measured"]),
    ]


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
            yield (
                f"ablation-{nodes}",
                f"What each part is worth, paper-like, hybrid, {nodes} nodes",
                ablation(parts_left, complete),
            )
    for (regime, nodes), group in found.groupby(["regime", "nodes"], sort=False):
        cells = compare(group.drop(columns=["regime", "where"])).cells
        yield f"{regime}-{nodes}", f"Throughput, {regime}, {nodes} nodes", throughput(cells)


def _section(t: Table) -> list[str]:
    return [
        "",
        f"## {t.title}",
        "",
        "| " + " | ".join(t.columns) + " |",
        "|---" * len(t.columns) + "|",
        *("| " + " | ".join(row) + " |" for row in t.rows),
        "",
        t.caption,
    ]


def write_page(found: pd.DataFrame, made: list[Table], part: str, path: Path) -> None:
    """The tables and a figure for each regime and number of nodes, as a page."""
    commits = ", ".join(sorted({str(c)[:12] for c in found["git_commit"].dropna()}))
    lines = [
        "# The paper's evaluation, on shaped NICs",
        "",
        "Made by `make evaluation` (`benchmarks/evaluation.py` says how); the numbers are of network namespaces "
        "and veth pairs on one machine, not of InfiniBand or RoCE hardware.",
        "",
        f"{machine()}; commit {commits}; part: {part}, their raw records in "
        f"[runs.tar.xz]({path.stem}/runs.tar.xz); `{' '.join((*COMMON, *LAYOUT))}`.",
        "",
    ]
    for regime in found["regime"].unique():
        hop = f"transfer ratio {Cell(regime, 'hybrid', 4, 'holmes').hop_ratio:.3f}; " if REGIMES[regime].pace_ms else ""
        lines.append(
            f"- *{regime}*: {hop}micro-batches of {REGIMES[regime].micro_size}; `{' '.join(REGIMES[regime].overrides)}`"
        )
    lines += ["", FOUR_NODES if part.startswith("four-nodes") else READING]
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
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.system()} {platform.release()}, {os.cpu_count()} cores of {cpu}, {gib:.0f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(parts()), default="headline")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "evaluation")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this long")
    parser.add_argument(
        "--page", type=Path, help="also write tables and figures: benchmarks/results/evaluation-tables.md"
    )
    given = parser.parse_args()
    planned = parts()[given.part]
    given.runs.mkdir(parents=True, exist_ok=True)
    print(f"{len({cell for _, cell in planned})} cells, {len(planned)} runs; {' '.join(COMMON)}")
    for name in dict.fromkeys(cell.regime for _, cell in planned):
        print(f"{name}: {' '.join(REGIMES[name].overrides)}")
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
    for t in made if given.part != "demo" else ():  # whose report is `holmes report`'s
        table(*t)
    if given.page:
        write_page(found, made, f"{given.part}, {len(found)} of its {len(planned)} runs", given.page)
        pack(found, given.runs, given.page.with_suffix("") / "runs.tar.xz")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
