"""Several runs side by side: repeats of one setting make a cell, cells are compared by throughput, and three sentences
of answers.py say which placement wins, by how much, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from holmes_hpc.records.metrics import PARTS
from holmes_hpc.results.columns import FAMILIES, family, known
from holmes_hpc.results.statistics import (
    Estimate,
    fraction_of_homogeneous,
    mape,
    paired_ratios,
    repeats_interval,
    scaling_efficiency,
)
from holmes_hpc.results.tables import pace, word
from holmes_hpc.slurm.hostlist import compress

# What makes two runs repeats of one setting; `system`, `varied` and `sizes` are derived (see with_systems).
CELL = [
    "system",
    "varied",
    "environment",
    "placement",
    "strategy",
    "layers_per_stage",
    "schedule",
    "transport",
    "overlap",
    "partition",
    "model",
    "sizes",
    "sequence_length",
    "global_batch",
    "micro_batch",
    "nodes",
    "tp",
    "pp",
    "dp",
    "virtual_stages",
    "edge_dtype",
    "recompute",
    "pace_layer_ms",
    "device",
]
MEASURED = ("stage_breakdown", "tx_bytes_per_step", "planned_bytes_per_step")  # a cell has its median run's
LEARNED = ["loss", "validation_loss", "tokens_per_s"]  # medians over a cell's runs
SAME_WORK = ["model", "sizes", "sequence_length", "pace_layer_ms", "device", "nodes"]  # runs that may be compared
# Overrides that say what other columns say, or nothing about what was run.
REDUNDANT = (
    "name",
    "run_dir",
    "plan_file",
    "labels",
    "hydra",
    "model.name",
    "batch",
    "slurm.account",
    "slurm.qos",
    "slurm.reservation",
    "slurm.timeout_min",
    "slurm.nodelist",
    "slurm.exclude",
    "train.seed",
    "data.seed",
    "data.prefix",
    "data.split",
    "train.steps",
    "train.trace",
    "train.log_interval",
    "train.tensorboard",
    "train.wandb",
    "train.mlflow",
    "train.max_restarts",
    "train.watchdog_s",
    "train.net_timeout_s",
    "train.pace_layer_ms",
    "plan.nodes",
    "plan.strategy",
    "plan.transport",
    "plan.partition",
    "plan.schedule",
    "plan.layers_per_stage",
    "plan.tp",
    "plan.pp",
    "plan.dp",
    "plan.virtual_stages",
    "plan.edge_dtype",
    "plan.recompute",
)
# What makes cells different and is not in their tables' rows: it is told where rows would look alike (see _told_apart).
NOT_IN_ROWS = [name for name in CELL if name not in ("system", "varied", "environment", "placement", "nodes")]


@dataclass(frozen=True)
class Comparison:
    """`cells`: one row per setting, fastest first, with its repeats' medians, `baseline` (index of the cell it is
    compared with), `speedup`, `speedup_low`, `speedup_high`, `pairs`, `of_linear` and `of_mean` (see with_shares),
    `apart` (what else tells it from cells that are called alike).
    `runs`: all runs, with their `system` and `cell` (-1: no figures)."""

    cells: pd.DataFrame
    runs: pd.DataFrame


def with_systems(runs: pd.DataFrame) -> pd.DataFrame:
    """`runs` with three more columns. `system`: the label of that name, else what the configuration amounts to.
    `varied`: the overrides in which runs differ, as far as no other column tells them (`train.lr=0.01`). `sizes`: the
    model in one text (`layers=12 hidden=768 …`)."""
    given = [_overrides(row) for _, row in entries(runs)]
    values: dict[str, set[str | None]] = {key: set() for found in given for key in found}
    for key, seen in values.items():
        seen.update(found.get(key) for found in given)
    differ = sorted(key for key, seen in values.items() if len(seen) > 1)
    return runs.assign(
        system=[_system(row) for _, row in entries(runs)],
        varied=[" ".join(f"{key}={found[key]}" for key in differ if key in found) for found in given],
        sizes=[" ".join(_sizes(row)) for _, row in entries(runs)],
    )


def _overrides(run: Mapping[str, Any]) -> dict[str, str]:
    given = {key: value for key, _, value in (word.lstrip("+~").partition("=") for word in run["overrides"])}
    both = {given.get(f"train.overlap_{what}", "true").lower() for what in ("grad_reduce", "param_gather")}
    told = (*REDUNDANT, *(("train.overlap_grad_reduce", "train.overlap_param_gather") if len(both) == 1 else ()))
    return {
        key: value
        for key, value in given.items()
        if key != "model" and not any(key == name or key.startswith((f"{name}.", f"{name}/")) for name in told)
    }


def entries(frame: pd.DataFrame) -> list[tuple[int, dict[str, Any]]]:
    """(index, row as a mapping) of every row."""
    rows: list[dict[Any, Any]] = frame.to_dict("records")
    return list(zip(frame.index.tolist(), rows, strict=True))


def _system(run: Mapping[str, Any]) -> str:
    if known(label := run.get("labels.system")) and label:
        return str(label)
    words = ["one transport" if run["transport"] == "single" else "holmes"]
    if known(run["overlap"]) and not run["overlap"]:
        words.append("no overlap")
    if known(run["partition"]) and run["partition"] != "exact":
        words.append(f"{run['partition']} layers")
    return ", ".join(words)


def compare(runs: pd.DataFrame, by: str = "throughput") -> Comparison:
    """Group `runs` (of load_runs) into cells, fastest first, or `by` loss: lowest first, of validation where all have
    one. A cell of one run has the interval of that run's steps, one of several runs that of what varies between them
    (repeats_interval)."""
    runs = with_systems(runs)
    usable = runs[runs["step_time_s"].notna() & runs["samples_per_s"].notna()]
    groups = usable.groupby(CELL, dropna=False, sort=False, observed=True)
    runs = runs.assign(cell=-1)
    rows = []
    for index, (_, every) in enumerate(groups):
        complete = every[every["state"] == "completed"]
        group = complete if len(complete) else every  # half a run says something only where no whole one does
        runs.loc[group.index, "cell"] = index
        rows.append({**entries(group)[0][1], "cell": index, **_figures(group)})
    cells = pd.DataFrame(
        rows,
        columns=[
            *CELL,
            "cell",
            "repeats",
            "completed",
            "step_time_s",
            "step_time_low_s",
            "step_time_high_s",
            "samples_per_s",
            "samples_low",
            "samples_high",
            "predicted_samples_per_s",
            "predicted_step_time_s",
            "mape",
            *PARTS,
            *_columns(runs, "model_spec", *MEASURED),
            "names",
            *LEARNED,
        ],
    )
    key = "samples_per_s" if by == "throughput" else loss_of(cells)
    cells = cells.sort_values(key, ascending=by != "throughput", kind="stable").set_index("cell")
    return Comparison(_told_apart(with_shares(_with_speedups(cells, runs))), runs)


def loss_of(cells: pd.DataFrame) -> str:
    """The loss that cells are ranked by: that of validation where every one of them has it."""
    return "validation_loss" if len(cells) and cells["validation_loss"].notna().all() else "loss"


def named(names: Sequence[str]) -> str:
    """The runs of a cell, a few by name; repeats that are numbered in one word, as Slurm names hosts (`mine-[0-2]`)."""
    heads = {name.rstrip("0123456789") for name in names}
    if len(names) > 1 and len(heads) == 1 and re.fullmatch(r"[\w./-]+", min(heads)):
        return compress(names)
    return ", ".join(names if len(names) <= 3 else [*names[:2], f"+{len(names) - 2}"])


def _figures(group: pd.DataFrame) -> dict[str, Any]:
    time, rate = _step_time(group), repeats_interval(group["samples_per_s"])
    middle = group.iloc[(group["step_time_s"] - group["step_time_s"].median()).abs().argsort().iloc[0]]
    return {
        "repeats": len(group),
        "completed": int((group["state"] == "completed").sum()),
        "step_time_s": time.median,
        "step_time_low_s": time.low,
        "step_time_high_s": time.high,
        "samples_per_s": rate.median,
        "samples_low": rate.low,
        "samples_high": rate.high,
        "predicted_samples_per_s": float(group["predicted_samples_per_s"].median()),
        "predicted_step_time_s": float(group["predicted_step_time_s"].median()),
        "names": named([str(name) for name in group["run"]]),
        **{name: float(group[name].median()) for name in LEARNED},
        "mape": mape(group["predicted_step_time_s"], group["step_time_s"]),
        **{part: float(group[part].median()) for part in PARTS},
        **{name: middle[name] for name in _columns(group, *MEASURED)},
    }


def _columns(runs: pd.DataFrame, *families: str) -> list[str]:
    return [name for name in map(str, runs) if name.startswith(tuple(FAMILIES[one].prefix for one in families))]


def _step_time(group: pd.DataFrame) -> Estimate:
    if len(group) == 1:
        run = group.iloc[0]
        return Estimate(float(run["step_time_s"]), float(run["step_time_low_s"]), float(run["step_time_high_s"]), 1)
    return repeats_interval(group["step_time_s"])


def completed(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells with a run that completed; all of them where there is none."""
    return cells[cells["completed"] > 0] if (cells["completed"] > 0).any() else cells


def _told_apart(cells: pd.DataFrame) -> pd.DataFrame:
    """`cells` with the column `apart`: where several would be called alike, what makes them different."""
    words = pd.Series("", index=cells.index, dtype="object")
    for _, group in cells.groupby(["system", "varied", "environment", "placement"], dropna=False, observed=True):
        differ = [name for name in NOT_IN_ROWS if group[name].nunique(dropna=False) > 1]
        for index, cell in entries(group):
            told = (_other_sizes(cell, group) if name == "sizes" else f"{name}={word(cell[name])}" for name in differ)
            words[index] = " ".join(filter(None, told))
    return cells.assign(apart=words)


def _sizes(run: Mapping[str, Any]) -> list[str]:
    """The model's sizes, `layers=12` and so on, without its name."""
    return [f"{key}={word(value)}" for key, value in family(run, "model_spec").items() if key != "name"]


def _other_sizes(cell: Mapping[str, Any], group: pd.DataFrame) -> str:
    """In what the model's sizes differ from those of others in `group`."""
    others = [_sizes(other) for _, other in entries(group)]
    return " ".join(size for size in _sizes(cell) if any(size not in other for other in others))


def _with_speedups(cells: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    found, whole = [], completed(cells)
    for index, cell in entries(cells):
        baseline = _baseline(whole, index, cell)
        row: dict[str, Any] = {
            "cell": index,
            "baseline": baseline,
            "pairs": 0,
            "speedup": math.nan,
            "speedup_low": math.nan,
            "speedup_high": math.nan,
        }
        if baseline is not None and baseline != index:
            row["speedup"] = cell["samples_per_s"] / cells.loc[baseline, "samples_per_s"]
            labelled = runs[runs["session"].notna()]
            pairs = paired_ratios(labelled, "cell", baseline, index)
            if len(pairs):
                ratio = repeats_interval(pairs["ratio"])
                row.update(pairs=len(pairs), speedup=ratio.median, speedup_low=ratio.low, speedup_high=ratio.high)
        found.append(row)
    columns = ["cell", "baseline", "pairs", "speedup", "speedup_low", "speedup_high"]
    return cells.join(pd.DataFrame(found, columns=columns).set_index("cell").astype({"baseline": "Int64"}))


def _baseline(cells: pd.DataFrame, index: int, cell: Mapping[str, Any]) -> int | None:
    """Of `cells` the one to compare `cell` with: one transport on the same nodes (plain Megatron-LM's behaviour),
    whatever its label; else the slowest on as many nodes. None when nothing did the same work."""
    same = cells[_equal(cells, cell, SAME_WORK)]
    plain = same[_equal(same, {**cell, "transport": "single"}, ["placement", "transport"])]
    if len(plain):
        return int(plain.index[plain["samples_per_s"].argmax()])
    return int(same.index[same["samples_per_s"].argmin()]) if len(same.index.difference([index])) else None


def with_shares(cells: pd.DataFrame) -> pd.DataFrame:
    """`cells` with two more columns, NaN where they cannot be told. `of_linear`: throughput per node over that of the
    same system in the same environment on the fewest nodes. `of_mean`: of a hybrid cell, throughput over the mean of
    the fastest IB and the fastest RoCE cell that did the same work on as many nodes."""
    linear, mean = (pd.Series(math.nan, index=cells.index) for _ in range(2))
    whole = completed(cells)
    for _, group in scaled(whole):
        linear[group.index] = scaling_efficiency(group["samples_per_s"], group["nodes"])
    for index, cell in entries(whole):
        if not known(cell["environment"]) or cell["environment"] != "hybrid":
            continue
        rates = [
            float(
                whole["samples_per_s"][_equal(whole, {**cell, "environment": kind}, ["environment", *SAME_WORK])].max()
            )
            for kind in ("IB", "RoCE")
        ]
        if all(map(known, rates)):
            mean[index] = fraction_of_homogeneous(float(cell["samples_per_s"]), rates)
    return cells.assign(of_linear=linear, of_mean=mean)


def scaled(cells: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """(its first cell, its cells) of every setting that did the same work on several numbers of nodes."""
    alike = ["system", "varied", "environment", *(name for name in SAME_WORK if name != "nodes")]
    groups = cells[cells["nodes"].notna()].groupby(alike, dropna=False, observed=True, sort=False)
    return [(entries(group)[0][1], group) for _, group in groups if group["nodes"].nunique() > 1]


def _equal(frame: pd.DataFrame, cell: Mapping[str, Any], columns: Iterable[str]) -> Any:
    equal = np.ones(len(frame), dtype=bool)
    for name in columns:
        equal &= (
            frame[name].isna().to_numpy()
            if not known(cell[name])
            else (frame[name] == cell[name]).fillna(False).to_numpy(dtype=bool)
        )
    return equal


def work(cell: Mapping[str, Any]) -> str:
    """What was computed and how: the model, where it is known, and the pace."""
    return f"{cell['model']}, {pace(cell)}" if known(cell["model"]) else pace(cell)


def label(cell: Mapping[str, Any]) -> str:
    """A cell in words: `hybrid, ib-a:2 roce-a:2, holmes`."""
    if not known(cell["placement"]):
        return "a run without a plan"
    return ", ".join(
        str(cell[name])
        for name in ("environment", "placement", "system", "varied", "apart")
        if known(cell.get(name)) and cell[name]
    )


def labels(cells: pd.DataFrame) -> list[str]:
    """What to call each of `cells` beside the others: its run, or how many, and in what it differs from them."""
    parts = [
        name
        for name in ("environment", "placement", "system", "varied", "apart")
        if cells[name].nunique(dropna=False) > 1
    ]
    made = [
        ", ".join(
            [
                *([str(c["names"])] if c["repeats"] == 1 else []),
                *(str(c[name]) for name in parts if known(c[name]) and c[name]),
            ]
        )
        or str(c["names"])
        for _, c in entries(cells)
    ]
    return [
        text if made.count(text) == 1 else f"{text} ({c['names']})"
        for text, (_, c) in zip(made, entries(cells), strict=True)
    ]
