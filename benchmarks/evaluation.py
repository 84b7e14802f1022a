"""Repeat the paper's evaluation on the testbed's shaped NICs, with emulated compute.

    holmes testbed up slurm/testbed/evaluation.yaml; eval "$(holmes testbed env)"
    python benchmarks/evaluation.py [--part headline|pairs|demo|four-nodes|full] [--runs DIR] [KEY=VALUE ...]

Runs the experiments of a part one job at a time, repeat by repeat. Within a repeat the systems alternate, so that drift
of the machine affects all of them alike. A restart continues and repeats incomplete runs.
Then (also with --minutes 0) prints the tables: throughput by NIC environment, hybrid against the mean of InfiniBand and
RoCE, speed-up over plain Megatron-LM with its 95% interval, predicted and measured throughput.
The experiments are in evaluation_experiments.py.
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
from evaluation_experiments import (
    BASELINE,
    COMMON,
    COMPARED,
    EMULATED,
    ENVIRONMENTS,
    FREE,
    LAYOUT,
    NOT_SLOWER,
    PAIRED,
    PAIRS,
    REGIMES,
    TARGETS,
    Experiment,
    parts,
)
from matplotlib.figure import Figure

from holmes_hpc.config.train import TrainConfig
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
from holmes_hpc.results.tables import Table, format_interval, format_number

HOLMES = str(Path(sys.executable).with_name("holmes"))

FOUR_NODES = """\
Plain Megatron-LM has one connection per direction, as it has over NCCL. Each run's plan is predicted from the declared
network rates and the emulated layer time alone; no constant was fitted to these runs. Intervals are over repeats on one
machine. evaluation-tables.md has 6 and 8 nodes, ablations and the planner's free choice."""
READING = """\
Each run's plan is predicted from the declared network rates and the emulated layer time alone; no constant was fitted
to these runs.

- In these runs, plain Megatron-LM over gloo has one connection for both directions. So activations and gradients wait
  for each other (benchmarks/one_connection.py). evaluation-four-nodes.md repeats the experiments at 4 nodes with one
  connection per direction. *Proportional layers* is 1F1B with one connection per direction.
- Plain Megatron-LM is 8% faster without overlap. The predictions do not show this; evaluation-notes.md explains it.
- Six and eight ranks use both cores fully. Layers then take up to 6% longer than emulated, and up to 10% when the
  machine is slow. This explains differences of 2% at 8 nodes. Ablations, two IB fabrics and the free choice at 8 nodes
  ran while the machine was slow.
- In *light* at 8 nodes, throughput is 101.4%, 101.1% and 95.6% of the mean of InfiniBand and RoCE in three sessions. In
  the last session, layers took 10% longer than emulated.
- The planner's free choice uses virtual stages in *light* at 6 and 8 nodes. On two cores, so many short passes cost
  more than they save. Only a calibration would tell the planner.
- *Unpaced* has no emulated compute. Python's overhead then dominates layers this small, and the planner does not know
  it.
- For systems on one fabric, the table of throughput shows the faster schedule. *Every experiment* includes the free
  choice."""


def run(experiment: Experiment, repeat: int, runs: Path, overrides: list[str], progress: str) -> None:
    """Run one job unless a complete run exists; `progress` precedes its log lines.
    `overrides`: settings in place of those of the experiment."""
    name = experiment.run_name(repeat)
    record = RunDirectory(runs / name)
    if record.exists():
        if (record.read_result() or {}).get("state") == "completed":
            return
        subprocess.run([HOLMES, "cancel", str(record.path)], capture_output=True, check=False)
        shutil.rmtree(record.path)
    start = time.monotonic()
    command = [
        HOLMES,
        "run",
        f"name={name}",
        *{text.partition("=")[0]: text for text in (*experiment.overrides, *overrides)}.values(),
        f'+labels.system="{experiment.system}"',
        f"+labels.session={repeat}",
    ]
    env = {**os.environ, "HOLMES_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    with waiting(f"{progress} {name}", after_s=9.0):
        process = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    error = (
        "" if process.returncode == 0 else f": exit {process.returncode}, {process.stderr.strip().splitlines()[-1:]}"
    )
    note(f"{progress} {name}: {time.monotonic() - start:.0f} s{error}")


def load_measured(planned: list[tuple[int, Experiment]], runs: Path) -> pd.DataFrame:
    """Return one row per completed run of `planned`.

    A row adds `regime`, `where`, `system` and `nodes` of its experiment, and the prediction for the run's plan."""
    frame = load_runs(runs)
    frame = frame[frame["state"] == "completed"].set_index("name", drop=False)
    rows = []
    for repeat, experiment in planned:
        if experiment.run_name(repeat) in frame.index:
            row = frame.loc[experiment.run_name(repeat)]
            plan, has_overlap = Plan.read(runs / experiment.run_name(repeat) / "plan.yaml"), bool(row["overlap"])
            train = TrainConfig(overlap_grad_reduce=has_overlap, overlap_param_gather=has_overlap)
            software = Software(**Software.facts_of(train, plan.transport_mode))
            predicted = predict(plan, Costs(pace_layer_ms=plan.pace_layer_ms, software=software))
            rows.append(
                {
                    **row.to_dict(),
                    "regime": experiment.regime,
                    "where": experiment.environment,
                    "nodes": experiment.nodes,
                    "system": experiment.system,
                    "session": row["session"],
                    "predicted_step_time_s": predicted.step_time_s,
                    "predicted_samples_per_s": predicted.samples_per_s,
                }
            )
    return pd.DataFrame(rows)


def build_tables(runs: pd.DataFrame) -> list[Table]:
    """Build the tables: targets, throughput, Megatron-LM by environment, every experiment, step breakdown."""
    rate = runs.groupby(["regime", "nodes", "where", "system"], sort=False)["samples_per_s"].median()
    answers: list[list[str]] = []
    megatron, experiments, breakdowns = list(answers), list(answers), list(answers)
    goals, rule_ratios = list(answers), {}
    for (regime, nodes), group in runs.groupby(["regime", "nodes"], sort=False):
        rates = rate[regime][nodes]
        of_mean, of_megatron = TARGETS.get(regime, (None, None))
        best = {
            where: max(rates[where].get(system, 0) for system in COMPARED)
            for where in ("IB", "RoCE")
            if where in rates.index
        }
        for where in rates.index.get_level_values("where").unique():
            holmes_rate, megatron_rate = rates[where].get("holmes"), rates[where].get(BASELINE)
            pairs = paired_ratios(group[group["where"] == where], "system", BASELINE, "holmes")
            ratio = repeats_interval(pairs["ratio"])
            has_mean = holmes_rate and len(best) == 2 and where == "hybrid"
            share = fraction_of_homogeneous(holmes_rate, best.values()) if has_mean else np.nan
            answers.append(
                [
                    f"{regime}, {nodes}",
                    where,
                    format_number(holmes_rate),
                    format_number(rates[where].get("proportional layers")),
                    format_number(megatron_rate),
                    format_number(ratio.median),
                    format_interval(ratio.low, ratio.high),
                    f"{share:.1%}" if has_mean else "",
                ]
            )
            goals += [
                _target_row(quantity, f"{regime}, {nodes}, {where}", target, value)
                for quantity, target, value in (
                    ("holmes / mean(IB, RoCE)", of_mean if where == "hybrid" else None, share),
                    ("holmes / Megatron-LM", of_megatron if where == "hybrid" else None, ratio.median),
                    (
                        "holmes / Megatron-LM, lower bound of 95%",
                        NOT_SLOWER if (regime, nodes) == PAIRED and where in ENVIRONMENTS else None,
                        ratio.low if ratio.count >= PAIRS else np.nan,
                    ),
                )
                if target
            ]
            if holmes_rate and "proportional layers" in rates[where]:
                rule_ratios[f"{regime}, {nodes}, {where}"] = holmes_rate / rates[where]["proportional layers"]
            if megatron_rate and BASELINE in rates.get("IB", {}):
                megatron.append([f"{regime}, {nodes}", where, f"{megatron_rate / rates['IB'][BASELINE]:.2f}"])
        for (where, system), system_runs in group.groupby(["where", "system"], sort=False):
            error = float(
                np.median(percentage_errors(system_runs["predicted_samples_per_s"], system_runs["samples_per_s"]))
            )
            key = [f"{regime}, {nodes}", where, system]
            experiments.append(
                [
                    *key,
                    system_runs["layers_per_stage"].iloc[0],
                    str(len(system_runs)),
                    format_number(system_runs["samples_per_s"].median()),
                    format_number(system_runs["predicted_samples_per_s"].median()),
                    f"{error:+.1f}%",
                ]
            )
            breakdowns.append([*key, *(format_number(system_runs[part].median()) for part in PARTS)])
    goals.sort(key=lambda row: row[0])
    if rule_ratios:
        least = min(rule_ratios, key=lambda setting: rule_ratios[setting])
        goals.append(
            _target_row(f"holmes / proportional layers, minimum of {len(rule_ratios)}", least, 1, rule_ratios[least])
        )
    return [
        Table(
            "Targets",
            ["quantity", "regime, nodes, where", "at least", "measured", ""],
            goals,
            "ratios of samples/s; Megatron-LM: its best options; proportional layers: the paper's layer rule with 1F1B",
        ),
        Table(
            "Samples/s by NIC environment",
            [
                "regime, nodes",
                "where",
                "holmes",
                "proportional layers",
                BASELINE,
                "holmes / Megatron-LM",
                "95% interval",
                "holmes / mean(IB, RoCE)",
            ],
            answers,
            f"medians; {EMULATED}. The mean takes the faster schedule of each fabric. The 95% interval is of the "
            "ratios of paired runs: by order statistics from six pairs on, by Student's t for fewer.",
        ),
        Table(
            "Plain Megatron-LM with its best options, by environment",
            ["regime, nodes", "where", "throughput / IB"],
            megatron,
            "the paper has 0.62 for Ethernet and 0.81 for RoCE, at 4 nodes",
        ),
        Table(
            "Every experiment and its prediction",
            ["regime, nodes", "where", "system", "layers", "runs", "samples/s", "predicted", "error"],
            experiments,
            f"medians; {EMULATED}",
        ),
        Table(
            "Step breakdown in seconds",
            ["regime, nodes", "where", "system", *(PART_NAMES[p] for p in PARTS)],
            breakdowns,
            f"medians, mean over stages; {EMULATED}",
        ),
    ]


def _target_row(quantity: str, setting: str, target: float, value: float) -> list[str]:
    return [
        quantity,
        setting,
        f"{target:g}",
        *([f"{value:.3f}", "met" if value >= target else "missed"] if not np.isnan(value) else ["", "not measured"]),
    ]


def draw_figures(runs: pd.DataFrame) -> Iterator[tuple[str, str, Figure]]:
    """Yield file name, title and figure: predictions, scaling, ablations, and throughput by environment."""
    yield "predicted", "Predicted against measured, every run", predicted_measured(runs)
    paper = runs[runs["regime"] == "paper-like"]
    compared_cells = compare(paper[paper["system"].isin(COMPARED)].drop(columns=["regime", "where"])).cells
    if compared_cells["nodes"].nunique() > 1:
        yield "scaling", "Scaling, paper-like", scaling(compared_cells)
    for nodes, group in paper[paper["where"] == "hybrid"].groupby("nodes"):
        ablations = compare(group[group["system"] != FREE].drop(columns=["regime", "where"])).cells
        if ablations["system"].str.startswith("without").any() and (ablations["system"] == "holmes").any():
            complete = ablations.index[ablations["system"] == "holmes"][0]
            yield (f"ablation-{nodes}", f"Ablation, paper-like, hybrid, {nodes} nodes", ablation(ablations, complete))
    for (regime, nodes), group in runs.groupby(["regime", "nodes"], sort=False):
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


def write_page(runs: pd.DataFrame, page_tables: list[Table], part: str, path: Path) -> None:
    """Write the tables and figures as a Markdown page."""
    commits = ", ".join(sorted({str(c)[:12] for c in runs["git_commit"].dropna()}))
    lines = [
        "# The paper's evaluation, on shaped NICs",
        "",
        "Written by `make evaluation` (`benchmarks/evaluation.py`). The figures are from network namespaces and veth "
        "pairs on one machine, not from InfiniBand or RoCE hardware.",
        "",
        f"{describe_machine()}; commit {commits}; part: {part}; raw records: "
        f"[runs.tar.xz]({path.stem}/runs.tar.xz); `{' '.join((*COMMON, *LAYOUT))}`.",
        "",
    ]
    for regime in (REGIMES[name] for name in runs["regime"].unique()):
        hybrid = Experiment(regime.name, "hybrid", 4, "holmes")
        lines.append(
            f"- *{regime.name}*: {f'transfer ratio {hybrid.transfer_ratio:.3f}; ' if regime.pace_ms else ''}"
            f"micro-batches of {regime.micro_size}; `{' '.join(regime.overrides)}`"
        )
    lines += ["", FOUR_NODES if part.startswith("four-nodes") else READING]
    for t in page_tables[:2]:
        lines += _section(t)
    figure_folder = path.with_suffix("")
    figure_folder.mkdir(parents=True, exist_ok=True)
    for old in figure_folder.glob("*.svg"):
        old.unlink()
    for name, title, figure in draw_figures(runs):
        (figure_folder / f"{name}.svg").write_text(svg(figure), encoding="utf-8")
        lines += ["", f"![{title}]({figure_folder.name}/{name}.svg)"]
    for t in page_tables[2:]:
        lines += _section(t)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pack(frame: pd.DataFrame, runs: Path, path: Path) -> None:
    """Pack the raw records of the runs, without this machine's paths; `holmes report` reads them unpacked."""
    with tarfile.open(path, "w:xz") as packed:
        for name in sorted(frame["name"]):
            for file in ("run.yaml", "plan.yaml", "metrics.jsonl", "result.json"):
                text = (runs / name / file).read_text(encoding="utf-8").replace(str(runs.absolute()), runs.name)
                entry = tarfile.TarInfo(f"{runs.name}/{name}/{file}")
                entry.size = len(data := text.encode())
                packed.addfile(entry, io.BytesIO(data))


def describe_machine() -> str:
    """Describe the machine: kernel, cores, CPU, memory."""
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
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument(
        "--page", type=Path, help="also write tables and figures: benchmarks/results/evaluation-tables.md"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all runs")
    arguments = parser.parse_args()
    planned = parts()[arguments.part]
    arguments.runs.mkdir(parents=True, exist_ok=True)
    settings = " ".join((*COMMON, *arguments.overrides))
    print(f"{len({experiment for _, experiment in planned})} experiments, {len(planned)} runs; {settings}")
    for name in dict.fromkeys(experiment.regime for _, experiment in planned):
        print(f"{name}: {' '.join(REGIMES[name].overrides)}")
    print(f"{platform.node()}: {len(os.sched_getaffinity(0))} CPUs, load average {os.getloadavg()[0]:.1f}", flush=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    for nth, (repeat, experiment) in enumerate(planned, 1):
        if time.monotonic() < deadline:
            run(experiment, repeat, arguments.runs, arguments.overrides, f"[{nth}/{len(planned)}]")
    frame = load_measured(planned, arguments.runs)
    names = set(frame.get("name", ()))
    missing = [name for name in (experiment.run_name(repeat) for repeat, experiment in planned) if name not in names]
    if missing:
        note(f"{len(missing)} of {len(planned)} runs are missing: {', '.join(missing[:5])} ...; run this again")
    if len(frame) == 0:
        sys.exit(1)
    page_tables = build_tables(frame)
    for t in page_tables if arguments.part != "demo" else ():  # `holmes report` reports the demo
        table(*t)
    if arguments.page:
        write_page(frame, page_tables, f"{arguments.part}, {len(frame)} of its {len(planned)} runs", arguments.page)
        pack(frame, arguments.runs, arguments.page.with_suffix("") / "runs.tar.xz")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
