"""Comparison of runs. Runs with the same setting (repeats) form a cell, which is one row of the ranked result.

comparison_text.py describes the result in sentences, comparison_tables.py in tables."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from holmes_hpc.records.metrics import PARTS
from holmes_hpc.results import statistics
from holmes_hpc.results.columns import FAMILIES, family_values, has_value
from holmes_hpc.results.tables import as_text, pace_note
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.tables import read_table

_TABLE: dict[str, list[str]] = read_table(__file__)
CELL, SAME_WORK = _TABLE["cell"], _TABLE["same_work"]
# Column families whose values a cell takes from its median run.
MEDIAN_RUN_FAMILIES = ("stage_breakdown", "tx_bytes_per_step", "planned_bytes_per_step")
RUN_MEDIANS = ["loss", "validation_loss", "tokens_per_s", "predicted_samples_per_s", "predicted_step_time_s", *PARTS]
NAMING = ("environment", "placement", "system", "varied", "apart")  # columns that name a cell in texts
# Columns that tables do not show. If cells differ only in these columns, the column `apart` shows the differences.
NOT_IN_ROWS = [name for name in CELL if name not in ("system", "varied", "environment", "placement", "nodes")]


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs. `cells`: one row per setting, the best first, with medians over its repeats; `runs`: all
    runs, with the columns `system` and `cell` (index of the run's cell; -1 if the run has no figures).

    Columns of `cells`: `baseline` (index of the cell with which a cell is compared), `speedup` over the baseline with
    the interval `speedup_low` to `speedup_high`, `pairs` (number of pairs of runs behind it), `of_linear` and `of_mean`
    (see with_shares), `apart` (differences from cells that would look the same in a table)."""

    cells: pd.DataFrame
    runs: pd.DataFrame


def _with_columns(runs: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """Return `runs` with these columns. `DataFrame.assign` would print a warning if there are many columns."""
    others = runs.drop(columns=list(columns), errors="ignore")
    return pd.concat([others, pd.DataFrame(columns, index=runs.index)], axis=1)


def with_systems(runs: pd.DataFrame) -> pd.DataFrame:
    """Return `runs` with the columns `system`, `varied` and `sizes`.

    `system`: the run's label `system` if set, else a description of its configuration. `varied`: the overrides that
    differ between runs and that no other column shows (`train.lr=0.01`). `sizes`: of the model (`layers=12 …`)."""
    per_run = [_overrides(row) for _, row in entries(runs)]
    all_keys = {key for overrides in per_run for key in overrides}
    differ = sorted(key for key in all_keys if len({overrides.get(key) for overrides in per_run}) > 1)
    return _with_columns(
        runs,
        system=[_system(row) for _, row in entries(runs)],
        varied=[" ".join(f"{key}={overrides[key]}" for key in differ if key in overrides) for overrides in per_run],
        sizes=[" ".join(_sizes(row)) for _, row in entries(runs)],
    )


def _overrides(run: Mapping[str, Any]) -> dict[str, str]:
    """Return {key: value} of the overrides of a run that the column `varied` may show."""
    values = {key: value for key, _, value in (override.lstrip("+~").partition("=") for override in run["overrides"])}
    overlap_keys = ["train.overlap_grad_reduce", "train.overlap_param_gather"]
    is_shown_by_overlap = len({values.get(key, "true").lower() for key in overlap_keys}) == 1  # the column `overlap`
    ignored = [*_TABLE["redundant"], *(overlap_keys if is_shown_by_overlap else [])]
    ignored_groups = tuple(f"{name}{separator}" for name in ignored for separator in "./")
    return {k: v for k, v in values.items() if k not in ("model", *ignored) and not k.startswith(ignored_groups)}


def entries(frame: pd.DataFrame) -> list[tuple[int, dict[str, Any]]]:
    """Return (index, {column: value}) of every row of `frame`."""
    rows: list[dict[Any, Any]] = frame.to_dict("records")
    return list(zip(frame.index.tolist(), rows, strict=True))


def _system(run: Mapping[str, Any]) -> str:
    """Return the run's label `system` if set, otherwise a text such as "one transport, no overlap"."""
    if has_value(label := run.get("labels.system")) and label:
        return str(label)
    parts = ["one transport" if run["transport"] == "single" else "holmes"]
    if has_value(run["overlap"]) and not run["overlap"]:
        parts.append("no overlap")
    if has_value(run["partition"]) and run["partition"] != "exact":
        parts.append(f"{run['partition']} layers")
    return ", ".join(parts)


def compare(runs: pd.DataFrame, by: str = "throughput") -> Comparison:
    """Group `runs` (the result of load_runs) into cells. Rank them by throughput or, if `by` is "loss", by loss.
    The interval of a cell with one run shows the variation between steps; other intervals, that between runs."""
    runs = with_systems(runs)
    usable = runs[runs["step_time_s"].notna() & runs["samples_per_s"].notna()]
    groups = usable.groupby(CELL, dropna=False, sort=False, observed=True)
    runs = _with_columns(runs, cell=-1)
    rows = []
    for index, (_, repeats) in enumerate(groups):
        complete = repeats[repeats["state"] == "completed"]
        group = complete if len(complete) else repeats
        runs.loc[group.index, "cell"] = index
        rows.append({**entries(group)[0][1], "cell": index, **_figures(group)})
    families = _columns(runs, "model_spec", *MEDIAN_RUN_FAMILIES)
    cells = pd.DataFrame(rows, columns=[*CELL, "cell", *_TABLE["figures"], *PARTS, *families])
    key = "samples_per_s" if by == "throughput" else loss_of(cells)
    cells = cells.sort_values(key, ascending=by != "throughput", kind="stable").set_index("cell")
    return Comparison(_with_distinctions(with_shares(_with_speedups(cells, runs))), runs)


def loss_of(cells: pd.DataFrame) -> str:
    """Return the column that ranks cells by loss: validation loss if every cell has one, else training loss."""
    return "validation_loss" if len(cells) and cells["validation_loss"].notna().all() else "loss"


def names_text(names: Sequence[str]) -> str:
    """Return the names of a cell's runs as text: a few names, or one list for numbered repeats (`mine-[0-2]`)."""
    heads = {name.rstrip("0123456789") for name in names}
    if len(names) > 1 and len(heads) == 1 and re.fullmatch(r"[\w./-]+", min(heads)):
        return compress(names)
    return ", ".join(names if len(names) <= 3 else [*names[:2], f"+{len(names) - 2}"])


def _figures(group: pd.DataFrame) -> dict[str, Any]:
    """Return the columns of a cell that are computed from its runs, `group`."""
    time, rate = (statistics.repeats_interval(group[name]) for name in ("step_time_s", "samples_per_s"))
    if len(group) == 1:  # its interval is over steps, not over runs
        run = group.iloc[0]
        time = replace(time, low=float(run["step_time_low_s"]), high=float(run["step_time_high_s"]))
    median_run = group.iloc[(group["step_time_s"] - group["step_time_s"].median()).abs().argsort().iloc[0]]
    figures: dict[str, Any] = {"repeats": len(group), "completed": int((group["state"] == "completed").sum())}
    figures |= {"step_time_s": time.median, "step_time_low_s": time.low, "step_time_high_s": time.high}
    figures |= {"samples_per_s": rate.median, "samples_low": rate.low, "samples_high": rate.high}
    figures |= {name: float(group[name].median()) for name in RUN_MEDIANS}
    figures["names"] = names_text([str(name) for name in group["run"]])
    figures["mape"] = statistics.mape(group["predicted_step_time_s"], group["step_time_s"])
    return figures | {name: median_run[name] for name in _columns(group, *MEDIAN_RUN_FAMILIES)}


def _columns(runs: pd.DataFrame, *families: str) -> list[str]:
    return [name for name in map(str, runs) if name.startswith(tuple(FAMILIES[key].prefix for key in families))]


def completed(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells with a completed run, or all cells if there is none."""
    return cells[cells["completed"] > 0] if (cells["completed"] > 0).any() else cells


def _with_distinctions(cells: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` with the column `apart`: how a cell differs from cells that would look the same in a table."""
    distinctions = pd.Series("", index=cells.index, dtype="object")
    for _, group in cells.groupby(["system", "varied", "environment", "placement"], dropna=False, observed=True):
        differ = [name for name in NOT_IN_ROWS if group[name].nunique(dropna=False) > 1]
        group_sizes = [_sizes(row) for _, row in entries(group)]
        for index, cell in entries(group):
            sizes = (size for size in _sizes(cell) if any(size not in row for row in group_sizes))
            texts = {name: f"{name}={as_text(cell[name])}" for name in differ} | {"sizes": " ".join(sizes)}
            distinctions[index] = " ".join(filter(None, (texts[name] for name in differ)))
    return cells.assign(apart=distinctions)


def _sizes(run: Mapping[str, Any]) -> list[str]:
    """Return the sizes of the model as texts: ["layers=12", "hidden=768", …]."""
    return [f"{key}={as_text(value)}" for key, value in family_values(run, "model_spec").items() if key != "name"]


def _with_speedups(cells: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` with the speed-up of each cell over its baseline, by pairs of runs if there are any."""
    rows, complete, labelled = [], completed(cells), runs[runs["session"].notna()]
    for index, cell in entries(cells):
        baseline, speedup = _baseline(complete, index, cell), statistics.repeats_interval([])
        if baseline is not None and baseline != index:
            speedup = statistics.repeats_interval(statistics.paired_ratios(labelled, "cell", baseline, index)["ratio"])
            if not speedup.count:
                speedup = replace(speedup, median=cell["samples_per_s"] / cells.loc[baseline, "samples_per_s"])
        rows.append((index, baseline, speedup.count, speedup.median, speedup.low, speedup.high))
    columns = ["cell", "baseline", "pairs", "speedup", "speedup_low", "speedup_high"]
    return cells.join(pd.DataFrame(rows, columns=columns).set_index("cell").astype({"baseline": "Int64"}))


def _baseline(cells: pd.DataFrame, index: int, cell: Mapping[str, Any]) -> int | None:
    """Return the index of the cell to compare `cell` with; None if no other cell did the same work.
    It is the fastest one with one transport (plain Megatron-LM) on the same nodes, or else the slowest one."""
    same = cells[_matches(cells, cell, SAME_WORK)]
    plain = same[_matches(same, {**cell, "transport": "single"}, ["placement", "transport"])]
    if len(plain):
        return int(plain.index[plain["samples_per_s"].argmax()])
    return int(same.index[same["samples_per_s"].argmin()]) if len(same.index.difference([index])) else None


def with_shares(cells: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` with the columns `of_linear` and `of_mean`, which are NaN without cells to compare with.

    `of_linear`: throughput per node, divided by the throughput per node of the same system and environment on the
    fewest nodes. `of_mean`: the throughput of a hybrid cell, divided by the mean throughput of two cells with the same
    work, the fastest IB cell and the fastest RoCE cell."""
    linear, mean = (pd.Series(math.nan, index=cells.index) for _ in range(2))
    complete = completed(cells)
    for _, group in scaled(complete):
        linear[group.index] = statistics.scaling_efficiency(group["samples_per_s"], group["nodes"])
    for index, cell in entries(complete):
        kinds = [{**cell, "environment": kind} for kind in ("IB", "RoCE")]
        alike = [_matches(complete, kind, ["environment", *SAME_WORK]) for kind in kinds]
        rates = [float(complete["samples_per_s"][rows].max()) for rows in alike]
        if str(cell["environment"]) == "hybrid" and all(map(has_value, rates)):
            mean[index] = statistics.fraction_of_homogeneous(float(cell["samples_per_s"]), rates)
    return cells.assign(of_linear=linear, of_mean=mean)


def scaled(cells: pd.DataFrame) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Return (first cell, all cells) of each system and environment that did the same work on several node counts."""
    keys = ["system", "varied", "environment", *(name for name in SAME_WORK if name != "nodes")]
    groups = cells[cells["nodes"].notna()].groupby(keys, dropna=False, observed=True, sort=False)
    return [(entries(group)[0][1], group) for _, group in groups if group["nodes"].nunique() > 1]


def _matches(frame: pd.DataFrame, cell: Mapping[str, Any], columns: Iterable[str]) -> Any:
    """Return a boolean array: which rows of `frame` equal `cell` in `columns`. Missing values equal each other."""
    equal = np.ones(len(frame), dtype=bool)
    for name in columns:
        is_same = (frame[name] == cell[name]).fillna(False) if has_value(cell[name]) else frame[name].isna()
        equal &= is_same.to_numpy(dtype=bool)
    return equal


def work_text(cell: Mapping[str, Any]) -> str:
    """Return as text the model, if known, and whether compute was real or emulated."""
    return f"{cell['model']}, {pace_note(cell)}" if has_value(cell["model"]) else pace_note(cell)


def label(cell: Mapping[str, Any]) -> str:
    """Return a text that names a cell: `hybrid, ib-a:2 roce-a:2, holmes`."""
    return _text_of(cell, NAMING) if has_value(cell["placement"]) else "a run without a plan"


def _text_of(cell: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(str(cell[name]) for name in names if has_value(cell.get(name)) and cell[name])


def labels(cells: pd.DataFrame) -> list[str]:
    """Return a distinct text for each of `cells`: the run of a cell with one run, and NAMING columns that differ."""
    differing = [name for name in NAMING if cells[name].nunique(dropna=False) > 1]
    rows = [cell for _, cell in entries(cells)]
    parts = [(str(c["names"]) * (c["repeats"] == 1), _text_of(c, differing)) for c in rows]
    texts = [", ".join(filter(None, p)) or str(c["names"]) for p, c in zip(parts, rows, strict=True)]
    return [t if texts.count(t) == 1 else f"{t} ({c['names']})" for t, c in zip(texts, rows, strict=True)]
