"""Comparison of runs: repeats of one setting form a cell, cells are ranked; answers.py has the sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from holmes_hpc.records.metrics import PARTS
from holmes_hpc.results.columns import FAMILIES, family, has_value
from holmes_hpc.results.statistics import (
    Estimate,
    fraction_of_homogeneous,
    mape,
    paired_ratios,
    repeats_interval,
    scaling_efficiency,
)
from holmes_hpc.results.tables import as_text, pace_note
from holmes_hpc.slurm.hostlist import compress

# Runs that agree in these columns are repeats of one setting; with_systems derives `system`, `varied` and `sizes`.
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
# Column families whose values a cell takes from its median run.
MEDIAN_RUN_FAMILIES = ("stage_breakdown", "tx_bytes_per_step", "planned_bytes_per_step")
RUN_MEDIANS = ["loss", "validation_loss", "tokens_per_s"]  # medians over a cell's runs
# Runs that agree in these columns can be compared.
SAME_WORK = ["model", "sizes", "sequence_length", "pace_layer_ms", "device", "nodes"]
# Overrides that other columns contain, or that do not change the setting.
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
# Cells may differ in these columns, which tables lack: `apart` names them where rows would look alike.
NOT_IN_ROWS = [name for name in CELL if name not in ("system", "varied", "environment", "placement", "nodes")]


@dataclass(frozen=True)
class Comparison:
    """`cells`: one row per setting, fastest first, with medians over its repeats.

    Columns of `cells`: `baseline` (index of the cell it is compared with), `speedup`, `speedup_low`, `speedup_high`,
    `pairs`, `of_linear` and `of_mean` (see with_shares), `apart` (differences from cells that would look alike).

    `runs`: all runs, with their `system` and `cell` (-1: no figures)."""

    cells: pd.DataFrame
    runs: pd.DataFrame


def with_systems(runs: pd.DataFrame) -> pd.DataFrame:
    """Add the columns `system`, `varied` and `sizes` to `runs`.

    `system`: the label of that name, else a description of the configuration. `varied`: the overrides in which runs
    differ and that no other column contains (`train.lr=0.01`). `sizes`: the model as text (`layers=12 hidden=768
    …`)."""
    per_run = [_overrides(row) for _, row in entries(runs)]
    values: dict[str, set[str | None]] = {key: set() for overrides in per_run for key in overrides}
    for key, variants in values.items():
        variants.update(overrides.get(key) for overrides in per_run)
    differ = sorted(key for key, variants in values.items() if len(variants) > 1)
    return runs.assign(
        system=[_system(row) for _, row in entries(runs)],
        varied=[" ".join(f"{key}={overrides[key]}" for key in differ if key in overrides) for overrides in per_run],
        sizes=[" ".join(_sizes(row)) for _, row in entries(runs)],
    )


def _overrides(run: Mapping[str, Any]) -> dict[str, str]:
    values = {key: value for key, _, value in (override.lstrip("+~").partition("=") for override in run["overrides"])}
    overlaps = {values.get(f"train.overlap_{kind}", "true").lower() for kind in ("grad_reduce", "param_gather")}
    ignored = (*REDUNDANT, *(("train.overlap_grad_reduce", "train.overlap_param_gather") if len(overlaps) == 1 else ()))
    return {
        key: value
        for key, value in values.items()
        if key != "model" and not any(key == name or key.startswith((f"{name}.", f"{name}/")) for name in ignored)
    }


def entries(frame: pd.DataFrame) -> list[tuple[int, dict[str, Any]]]:
    """Return (index, row as a mapping) of every row."""
    rows: list[dict[Any, Any]] = frame.to_dict("records")
    return list(zip(frame.index.tolist(), rows, strict=True))


def _system(run: Mapping[str, Any]) -> str:
    if has_value(label := run.get("labels.system")) and label:
        return str(label)
    parts = ["one transport" if run["transport"] == "single" else "holmes"]
    if has_value(run["overlap"]) and not run["overlap"]:
        parts.append("no overlap")
    if has_value(run["partition"]) and run["partition"] != "exact":
        parts.append(f"{run['partition']} layers")
    return ", ".join(parts)


def compare(runs: pd.DataFrame, by: str = "throughput") -> Comparison:
    """Group `runs` (of load_runs) into cells, fastest first, or lowest loss first if `by` is loss.

    The interval of one run is over its steps, that of several runs is between them (repeats_interval)."""
    runs = with_systems(runs)
    usable = runs[runs["step_time_s"].notna() & runs["samples_per_s"].notna()]
    groups = usable.groupby(CELL, dropna=False, sort=False, observed=True)
    runs = runs.assign(cell=-1)
    rows = []
    for index, (_, repeats) in enumerate(groups):
        complete = repeats[repeats["state"] == "completed"]
        group = complete if len(complete) else repeats  # incomplete runs count only if no run completed
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
            *_columns(runs, "model_spec", *MEDIAN_RUN_FAMILIES),
            "names",
            *RUN_MEDIANS,
        ],
    )
    key = "samples_per_s" if by == "throughput" else loss_of(cells)
    cells = cells.sort_values(key, ascending=by != "throughput", kind="stable").set_index("cell")
    return Comparison(_with_distinctions(with_shares(_with_speedups(cells, runs))), runs)


def loss_of(cells: pd.DataFrame) -> str:
    """Return the column that ranks cells by loss: validation loss if every cell has one, else training loss."""
    return "validation_loss" if len(cells) and cells["validation_loss"].notna().all() else "loss"


def named(names: Sequence[str]) -> str:
    """Return the runs of a cell: a few names, or one host list for numbered repeats (`mine-[0-2]`)."""
    heads = {name.rstrip("0123456789") for name in names}
    if len(names) > 1 and len(heads) == 1 and re.fullmatch(r"[\w./-]+", min(heads)):
        return compress(names)
    return ", ".join(names if len(names) <= 3 else [*names[:2], f"+{len(names) - 2}"])


def _figures(group: pd.DataFrame) -> dict[str, Any]:
    time, rate = _step_time(group), repeats_interval(group["samples_per_s"])
    median_run = group.iloc[(group["step_time_s"] - group["step_time_s"].median()).abs().argsort().iloc[0]]
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
        **{name: float(group[name].median()) for name in RUN_MEDIANS},
        "mape": mape(group["predicted_step_time_s"], group["step_time_s"]),
        **{part: float(group[part].median()) for part in PARTS},
        **{name: median_run[name] for name in _columns(group, *MEDIAN_RUN_FAMILIES)},
    }


def _columns(runs: pd.DataFrame, *families: str) -> list[str]:
    return [
        name
        for name in map(str, runs)
        if name.startswith(tuple(FAMILIES[family_name].prefix for family_name in families))
    ]


def _step_time(group: pd.DataFrame) -> Estimate:
    if len(group) == 1:
        run = group.iloc[0]
        return Estimate(float(run["step_time_s"]), float(run["step_time_low_s"]), float(run["step_time_high_s"]), 1)
    return repeats_interval(group["step_time_s"])


def completed(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells with a completed run, or all cells if there is none."""
    return cells[cells["completed"] > 0] if (cells["completed"] > 0).any() else cells


def _with_distinctions(cells: pd.DataFrame) -> pd.DataFrame:
    """Add the column `apart`: the differences between cells that would look alike."""
    distinctions = pd.Series("", index=cells.index, dtype="object")
    for _, group in cells.groupby(["system", "varied", "environment", "placement"], dropna=False, observed=True):
        differ = [name for name in NOT_IN_ROWS if group[name].nunique(dropna=False) > 1]
        for index, cell in entries(group):
            texts = (
                _other_sizes(cell, group) if name == "sizes" else f"{name}={as_text(cell[name])}" for name in differ
            )
            distinctions[index] = " ".join(filter(None, texts))
    return cells.assign(apart=distinctions)


def _sizes(run: Mapping[str, Any]) -> list[str]:
    """Return the model's sizes, `layers=12` and so on, without its name."""
    return [f"{key}={as_text(value)}" for key, value in family(run, "model_spec").items() if key != "name"]


def _other_sizes(cell: Mapping[str, Any], group: pd.DataFrame) -> str:
    """Return the model sizes in which this cell differs from others in `group`."""
    group_sizes = [_sizes(row) for _, row in entries(group)]
    return " ".join(size for size in _sizes(cell) if any(size not in row for row in group_sizes))


def _with_speedups(cells: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    rows, complete = [], completed(cells)
    for index, cell in entries(cells):
        baseline = _baseline(complete, index, cell)
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
        rows.append(row)
    columns = ["cell", "baseline", "pairs", "speedup", "speedup_low", "speedup_high"]
    return cells.join(pd.DataFrame(rows, columns=columns).set_index("cell").astype({"baseline": "Int64"}))


def _baseline(cells: pd.DataFrame, index: int, cell: Mapping[str, Any]) -> int | None:
    """Return the index of the cell to compare `cell` with; None if no cell did the same work.

    This is one transport on the same nodes (plain Megatron-LM), whatever its label, else the slowest cell."""
    same = cells[_equal(cells, cell, SAME_WORK)]
    plain = same[_equal(same, {**cell, "transport": "single"}, ["placement", "transport"])]
    if len(plain):
        return int(plain.index[plain["samples_per_s"].argmax()])
    return int(same.index[same["samples_per_s"].argmin()]) if len(same.index.difference([index])) else None


def with_shares(cells: pd.DataFrame) -> pd.DataFrame:
    """Add the columns `of_linear` and `of_mean`, NaN where they have no reference.

    `of_linear`: throughput per node over that of the same system and environment on the fewest nodes. `of_mean`: for a
    hybrid cell, throughput over the mean of the fastest IB and the fastest RoCE cell with the same work."""
    linear, mean = (pd.Series(math.nan, index=cells.index) for _ in range(2))
    complete = completed(cells)
    for _, group in scaled(complete):
        linear[group.index] = scaling_efficiency(group["samples_per_s"], group["nodes"])
    for index, cell in entries(complete):
        if not has_value(cell["environment"]) or cell["environment"] != "hybrid":
            continue
        rates = [
            float(
                complete["samples_per_s"][
                    _equal(complete, {**cell, "environment": kind}, ["environment", *SAME_WORK])
                ].max()
            )
            for kind in ("IB", "RoCE")
        ]
        if all(map(has_value, rates)):
            mean[index] = fraction_of_homogeneous(float(cell["samples_per_s"]), rates)
    return cells.assign(of_linear=linear, of_mean=mean)


def scaled(cells: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Return (first cell, cells) of every setting that did the same work on several numbers of nodes."""
    keys = ["system", "varied", "environment", *(name for name in SAME_WORK if name != "nodes")]
    groups = cells[cells["nodes"].notna()].groupby(keys, dropna=False, observed=True, sort=False)
    return [(entries(group)[0][1], group) for _, group in groups if group["nodes"].nunique() > 1]


def _equal(frame: pd.DataFrame, cell: Mapping[str, Any], columns: Iterable[str]) -> Any:
    equal = np.ones(len(frame), dtype=bool)
    for name in columns:
        equal &= (
            frame[name].isna().to_numpy()
            if not has_value(cell[name])
            else (frame[name] == cell[name]).fillna(False).to_numpy(dtype=bool)
        )
    return equal


def work(cell: Mapping[str, Any]) -> str:
    """Return the model, if known, and the emulated compute."""
    return f"{cell['model']}, {pace_note(cell)}" if has_value(cell["model"]) else pace_note(cell)


def label(cell: Mapping[str, Any]) -> str:
    """Return a cell's name: `hybrid, ib-a:2 roce-a:2, holmes`."""
    if not has_value(cell["placement"]):
        return "a run without a plan"
    return ", ".join(
        str(cell[name])
        for name in ("environment", "placement", "system", "varied", "apart")
        if has_value(cell.get(name)) and cell[name]
    )


def labels(cells: pd.DataFrame) -> list[str]:
    """Return a name for each of `cells`: its run, or the number of runs, and how it differs from the others."""
    parts = [
        name
        for name in ("environment", "placement", "system", "varied", "apart")
        if cells[name].nunique(dropna=False) > 1
    ]
    names = [
        ", ".join(
            [
                *([str(c["names"])] if c["repeats"] == 1 else []),
                *(str(c[name]) for name in parts if has_value(c[name]) and c[name]),
            ]
        )
        or str(c["names"])
        for _, c in entries(cells)
    ]
    return [
        text if names.count(text) == 1 else f"{text} ({c['names']})"
        for text, (_, c) in zip(names, entries(cells), strict=True)
    ]
