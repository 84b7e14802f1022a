"""The report of `holmes report`: throughput, step breakdown and bytes of one run, or a comparison of several."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from holmes_hpc.errors import RecordError, counted
from holmes_hpc.records.logs import logged_warnings
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import compare, comparison_text, tables
from holmes_hpc.results.attempts import attempts_tables
from holmes_hpc.results.columns import FAMILIES, STEP_COLUMNS, family_values, has_value, stage_parts
from holmes_hpc.results.comparison_tables import comparison_tables
from holmes_hpc.results.loading.loader import load_runs, load_steps
from holmes_hpc.results.plans import mapping, read_plan
from holmes_hpc.results.tables import Table
from holmes_hpc.results.timeline import read_trace, typical_step, write_perfetto

Simulate = Callable[[Path], list[dict[str, Any]]]
HYPERPARAMETERS = ("lr", "min_lr", "warmup_steps", "weight_decay", "seed")
MAX_RUNS_WITH_STEPS = 8  # no figure shows the steps of more runs
SLOW = 1.15  # above this ratio of measured to planned emulated compute time, the machine was overloaded


@dataclass(frozen=True)
class Report:
    """The report of one or several runs. `runs`: a row per run; `steps`: a row per step, empty for many runs; `by`: the
    figure that ranks settings, throughput or loss.

    These attributes are empty for several runs. `plan`: the content of plan.yaml; `trace`: the measured events of one
    step (see timeline.typical_step); `simulated`: the events of the simulated step."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    plan: dict[str, Any]
    comparison: compare.Comparison
    trace: pd.DataFrame
    simulated: pd.DataFrame | None = None
    by: str = "throughput"

    @property
    def single(self) -> bool:
        return len(self.runs) == 1

    @property
    def run(self) -> dict[str, Any]:
        """The row of the only run, as a mapping of columns."""
        return compare.entries(self.comparison.runs)[0][1]

    def answer(self) -> list[str]:
        """Return a few sentences: a summary of one run, or how several runs compare."""
        if self.single:
            warnings = logged_warnings(RunDirectory(self.run["path"]))
            return [*_one_run_answer(self.run, self.plan), *([f"Rank 0 logged {warnings}."] if warnings else [])]
        if self.by == "throughput":
            return [*comparison_text.headline(self.comparison), *comparison_text.answer(self.comparison)]
        return comparison_text.ranking(self.comparison)

    def bars(self) -> list[tuple[str, float]]:
        """Return (name, samples/s) of the settings in a bar chart; empty for one run, or if loss ranks the settings."""
        return [] if self.single or self.by != "throughput" else comparison_text.bars(self.comparison)

    def tables(self) -> list[Table]:
        """Return all tables, the most important first."""
        if not self.single:
            return comparison_tables(self.comparison, self.by)
        return [*tables.one_run(self.run, self.plan), *attempts_tables(RunDirectory(self.run["path"]))]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, in seconds and bytes; null if unknown."""
        data: dict[str, Any] = {"answer": self.answer(), "runs": _records(self.comparison.runs)}
        if self.single:
            data |= {"traffic": tables.traffic(self.run, self.plan), "transports": tables.transports(self.plan)}
            data["stages"] = stage_parts(self.run)
            data["setup_tx_bytes"] = family_values(self.run, "setup_tx_bytes")
        else:
            data["cells"] = _records(self.comparison.cells.reset_index(), ("model_spec", *compare.MEDIAN_RUN_FAMILIES))
        return data

    def missing(self) -> str | None:
        """Return a line with the fields that files of older releases lack; None if no file lacks any."""
        counts = self.runs["missing"].dropna().value_counts(sort=False)
        missing_fields = "; ".join(f"{fields} ({counted(count, 'run')})" for fields, count in counts.items())
        return f"fields not recorded by an older release: {missing_fields}" if missing_fields else None

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the measured timeline of the only run for Perfetto.
        Raise RecordError if there are several runs, or if no trace was recorded."""
        if not self.single:
            problem = f"a timeline shows one run, but {len(self.runs)} runs are given"
            raise RecordError(problem, where=str(path), hint="name one run")
        write_perfetto(RunDirectory(self.run["path"]), path)


def load_report(
    paths: Sequence[str | os.PathLike[str]], simulate: Simulate | None = None, by: str = "throughput"
) -> Report:
    """Return the report of all runs at or below `paths`, which are run directories or directories of runs (sweeps).

    `simulate`: a function that returns the simulated events (stage, kind, start_s, end_s) of the plan.yaml at a given
    path; it is called only for a single run with a trace. Raise RecordError if there are no runs."""
    frames: list[pd.DataFrame] = []
    selections: list[tuple[str | os.PathLike[str], dict[str, str]]] = []
    loaded_paths: set[str] = set()
    for index, path in enumerate(paths):
        runs = load_runs(path)
        real_paths = runs["path"].map(os.path.realpath)
        runs = runs[~real_paths.isin(loaded_paths)]  # a run may be named twice, or be below two of the directories
        loaded_paths.update(real_paths)
        prefix = "" if len(paths) == 1 or RunDirectory(path).exists() else f"{Path(path).resolve().name}/"
        names = {key: prefix + key for key in runs["run"]}
        if set(names.values()) & {name for frame in frames for name in frame["run"]}:
            names = {key: f"{index + 1}:{name}" for key, name in names.items()}
        frames.append(runs.assign(run=runs["run"].map(names).astype("string")))
        selections.append((path, names))
    if not frames or not sum(map(len, frames)):
        hint = "give run directories, their names, or directories that hold runs"
        raise RecordError("no runs found", where=", ".join(map(str, paths)) or "runs", hint=hint)
    runs = pd.concat(frames, ignore_index=True)
    steps = _steps(selections if len(runs) <= MAX_RUNS_WITH_STEPS else [])
    comparison = compare.compare(runs, by)
    if len(runs) > 1:
        return Report(runs, steps, {}, comparison, pd.DataFrame(), by=by)
    run = RunDirectory(str(runs["path"].iloc[0]))
    trace = typical_step(read_trace(run))
    simulated = pd.DataFrame(simulate(run.plan_path)) if simulate and len(trace) else None
    return Report(runs, steps, read_plan(run), comparison, trace, simulated)


def _steps(selections: Sequence[tuple[str | os.PathLike[str], dict[str, str]]]) -> pd.DataFrame:
    """Return the steps of the selected runs as one table. `selections`: (path, {run below it: name in the report})."""
    frames = [pd.DataFrame(columns=list(STEP_COLUMNS))] if not selections else []
    for path, names in selections:
        steps = load_steps(path, runs=names)
        frames.append(steps.assign(run=steps["run"].astype("object").map(names)))
    frame = pd.concat(frames, ignore_index=True)
    return frame.assign(run=pd.Categorical(frame["run"], categories=frame["run"].unique()))


def _one_run_answer(run: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    damage = [f"Damaged records: {run['error']}."] if run["state"] == "completed" and has_value(run["error"]) else []
    if not has_value(run["steps"]) or not run["steps"]:
        return [f"{run['name']} is {run['state']}: no steps are recorded.", *damage]
    sentences = [
        f"{compare.label(run)}: {tables.format_number(run['samples_per_s'])} samples/s, "
        f"{tables.format_number(run['tokens_per_s'])} tokens/s,"
        f" a step takes {tables.format_number(run['step_time_s'])} s ({compare.work_text(run)}).",
        _run_summary(run),
        *damage,
    ]
    if has_value(run["predicted_step_time_s"]):
        error = 100 * (run["predicted_step_time_s"] / run["step_time_s"] - 1)
        comparison = f"{abs(error):.1f}% {'less' if error < 0 else 'more'} than measured"
        predicted = tables.format_number(run["predicted_step_time_s"])
        sentences.append(f"Its plan predicted a step of {predicted} s ({comparison}).")
    parts = {part: float(run[part]) for part in PARTS if has_value(run[part])}
    planned_s = mapping(mapping(plan.get("predicted")).get("breakdown")).get("compute_s")
    if planned_s and has_value(run.get("pace_layer_ms")) and parts.get("compute_s", 0.0) > SLOW * planned_s:
        cause = "this machine is busy, or slower than train.pace_layer_ms, so the step time says little"
        if any(mapping(plan.get("parallel")).get(size, 1) > 1 for size in ("cp", "ep")):
            cause = f"exchanges of tokens take longer than planned, or {cause}"
        sentences.append(f"Emulated compute took {parts['compute_s'] / planned_s:.2f} times the planned time: {cause}.")
    if parts and run["step_time_s"]:
        largest = sorted(parts, key=lambda part: -parts[part])[:2]
        shares = " and ".join(f"{parts[p] / run['step_time_s']:.0%} {PART_NAMES[p]}" for p in largest)
        sentences.append(f"A step is {shares}.")
    sent_bytes = [(r["kind"], r["counted_bytes"] or 0) for r in tables.traffic(run, plan)]
    total = sum(count for _, count in sent_bytes)
    if total:
        shares = ", ".join(f"{count / total:.0%} went over {kind}" for kind, count in sent_bytes)
        sentences.append(f"Of all bytes sent, {shares}.")
    return sentences


def _run_summary(run: dict[str, Any]) -> str:
    """Return a sentence with the state, steps, loss, nodes, batch and hyperparameters of a run."""
    steps = f" of {run['config.train.steps']}" if has_value(run.get("config.train.steps")) else ""
    loss = tables.format_number(run["loss"], 4)
    parts = [f"{run['state']}, {tables.as_text(run['steps'])}{steps} steps, loss {loss}"]
    if has_value(run["validation_loss"]):
        parts.append(f"validation loss {tables.format_number(run['validation_loss'], 4)}")
    if has_value(run["nodes"]):
        parts.append(", ".join(f"{run[name]} {name if run[name] != 1 else name[:-1]}" for name in ("nodes", "ranks")))
    if has_value(run["global_batch"]):
        parts.append(f"batch {run['global_batch']} x {run['sequence_length']} tokens")
    values = {name: run.get(f"config.train.{name}") for name in HYPERPARAMETERS}
    parts += [f"{name.replace('_', ' ')} {v:g}" for name, v in values.items() if isinstance(v, int | float)]
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _records(frame: pd.DataFrame, families: Iterable[str] = FAMILIES) -> list[dict[str, Any]]:
    """Return the rows of `frame` as JSON values. The columns of each family in `families` become one mapping."""
    prefixes = tuple(column_family.prefix for column_family in FAMILIES.values())
    rows = []
    for _, row in compare.entries(frame):
        record: dict[str, Any] = {}
        for key, value in row.items():
            if isinstance(value, pd.Timestamp):
                record[key] = value.isoformat()
            elif not key.startswith(prefixes):
                record[key] = value.item() if hasattr(value, "item") else value
        record |= {name: family_values(row, name) for name in families} | {"stage_breakdown": stage_parts(row)}
        if "config" in families:
            record["config"] = _config(row)
        rows.append({k: v if has_value(v) else None for k, v in record.items()})
    return rows


def _config(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a row of the table of runs as {group: {key: value}}. Missing values are None."""
    config: dict[str, Any] = {}
    values = family_values(row, "config")
    names = [key.removeprefix("config.") for key in row if key.startswith("config.")]
    for name in sorted(names, key=values.__contains__):  # missing values first, so that known ones replace them
        group, _, key = name.partition(".")
        config[group] = {**(config.get(group) or {}), key: values.get(name)} if key else values.get(name)
    return config
