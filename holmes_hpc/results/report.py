"""What `holmes report` says: of one run throughput, step breakdown and bytes; of several, which is fastest and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from holmes_hpc.errors import RecordError
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results import answers, compare, headline, tables
from holmes_hpc.results.columns import FAMILIES, STEP_COLUMNS, family, known, nested, stage_breakdown
from holmes_hpc.results.comparison_tables import comparison_tables
from holmes_hpc.results.loading.loader import load_runs, load_steps
from holmes_hpc.results.plans import read_plan
from holmes_hpc.results.tables import Table
from holmes_hpc.results.timeline import read_trace, typical_step, write_perfetto

Simulate = Callable[[Path], list[dict[str, Any]]]
HYPERPARAMETERS = ("lr", "min_lr", "warmup_steps", "weight_decay", "seed")
STEPS_OF = 8  # runs: of more no figure shows the steps


@dataclass(frozen=True)
class Report:
    """Runs as they were loaded; `steps` of a few only. Of the only run (empty for several): `plan`: the whole
    plan.yaml; `trace`: one step's events, measured (see timeline.typical_step); `simulated`: the same, simulated. `by`:
    what settings are ranked by, throughput or loss."""

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
        """The only run's row."""
        return compare.entries(self.comparison.runs)[0][1]

    def answer(self) -> list[str]:
        """Which placement, how much faster, why; for one run what it was and how it went. A few sentences."""
        if self.single:
            return _one_run_answer(self.run, self.plan)
        if self.by == "throughput":
            return [*headline.headline(self.comparison), *answers.answer(self.comparison)]
        return answers.ranking(self.comparison)

    def bars(self) -> list[tuple[str, float]]:
        """(what, samples/s) of several runs' cells, for a chart on a terminal; none for one, or by loss."""
        return [] if self.single or self.by != "throughput" else headline.bars(self.comparison)

    def tables(self) -> list[Table]:
        """All tables, the most wanted first; each is (title, columns, rows, caption)."""
        return tables.one_run(self.run, self.plan) if self.single else comparison_tables(self.comparison, self.by)

    def to_dict(self) -> dict[str, Any]:
        """The same for scripts: numbers in seconds and bytes, null where unknown."""
        data: dict[str, Any] = {"answer": self.answer(), "runs": _records(self.comparison.runs)}
        if self.single:
            data.update(
                traffic=tables.traffic(self.run, self.plan),
                transports=tables.transports(self.plan),
                stages=stage_breakdown(self.run),
                setup_tx_bytes=family(self.run, "setup_tx_bytes"),
            )
        else:
            data["cells"] = _records(self.comparison.cells.reset_index())
        return data

    def missing(self) -> str | None:
        """What files of older releases lack, of all runs in one line; None where nothing is missing."""
        counts = self.runs["missing"].dropna().value_counts(sort=False)
        lacking = "; ".join(f"{what} ({count} run{'s' if count > 1 else ''})" for what, count in counts.items())
        return f"read without what an older release did not record: {lacking}" if lacking else None

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """The only run's measured timeline, for Perfetto. RecordError without a trace."""
        if not self.single:
            raise RecordError(
                f"a timeline is of one run, these are {len(self.runs)}", where=str(path), hint="name one run"
            )
        write_perfetto(RunDirectory(self.run["path"]), path)


def load_report(
    paths: Sequence[str | os.PathLike[str]], simulate: Simulate | None = None, by: str = "throughput"
) -> Report:
    """The report of runs, or of all runs below directories (sweeps). RecordError when there is nothing to report.

    `simulate`: gives the simulated timeline of a run's plan.yaml (events with stage, kind, start_s, end_s); asked for
    where the only run has a trace to show beside it.
    """
    frames: list[pd.DataFrame] = []
    wanted: list[tuple[str | os.PathLike[str], set[str], dict[str, str]]] = []
    seen: set[str] = set()
    for index, path in enumerate(paths):
        prefix = "" if len(paths) == 1 else f"{Path(path).resolve().name}/"
        runs = load_runs(path)
        places = [os.path.realpath(place) for place in runs["path"]]
        new = pd.Series([place not in seen for place in places], index=runs.index, dtype=bool)
        runs = runs[new]  # the others were named twice, or lie below two of the directories
        seen.update(places)
        alone = RunDirectory(path).exists()
        names = {key: key if alone or not prefix else prefix + key for key in runs["run"]}
        if len(set(names.values()) & {name for frame in frames for name in frame["run"]}):
            names = {key: f"{index + 1}:{name}" for key, name in names.items()}
        frames.append(runs.assign(run=runs["run"].map(names).astype("string")))
        wanted.append((path, set(runs["run"]), names))
    if not frames or not sum(map(len, frames)):
        raise RecordError(
            "no runs there",
            where=", ".join(map(str, paths)) or "load_report",
            hint="give run directories, their names, or directories that hold runs",
        )
    runs = pd.concat(frames, ignore_index=True)
    whole = _concat_steps([_steps(*one) for one in wanted] if len(runs) <= STEPS_OF else [])
    comparison = compare.compare(runs, by)
    if len(runs) > 1:
        return Report(runs, whole, {}, comparison, pd.DataFrame(), by=by)
    run = RunDirectory(str(runs["path"].iloc[0]))
    trace = typical_step(read_trace(run))
    simulated = pd.DataFrame(simulate(run.plan_path)) if simulate and len(trace) else None
    return Report(runs, whole, read_plan(run), comparison, trace, simulated)


def _steps(path: str | os.PathLike[str], runs: set[str], names: dict[str, str]) -> pd.DataFrame:
    """The steps of `runs` below `path`, under their `names` in the report."""
    found = load_steps(path, runs=runs)
    found = found.assign(run=found["run"].cat.remove_unused_categories())
    return found.assign(run=found["run"].cat.rename_categories(names))


def _concat_steps(steps: list[pd.DataFrame]) -> pd.DataFrame:
    """One table; the runs stay a category."""
    if not steps:
        return pd.DataFrame(columns=list(STEP_COLUMNS))
    kinds = [str(name) for frame in steps for name in frame["run"].cat.categories]
    made = pd.concat([frame.assign(run=frame["run"].astype("object")) for frame in steps], ignore_index=True)
    return made.assign(run=pd.Categorical(made["run"], categories=list(dict.fromkeys(kinds))))


def _one_run_answer(run: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    if not known(run["steps"]) or not run["steps"]:
        return [f"{run['name']} is {run['state']}: no steps are recorded."]
    said = [
        f"{compare.label(run)}: {tables.number(run['samples_per_s'])} samples/s, "
        f"{tables.number(run['tokens_per_s'])} tokens/s, a step takes {tables.number(run['step_time_s'])} s "
        f"({compare.work(run)}).",
        _what_it_was(run),
    ]
    if known(run["predicted_step_time_s"]):
        error = 100 * (run["predicted_step_time_s"] / run["step_time_s"] - 1)
        said.append(
            f"Its plan predicted a step of {tables.number(run['predicted_step_time_s'])} s "
            f"({abs(error):.1f}% {'less' if error < 0 else 'more'} than measured)."
        )
    parts = {part: float(run[part]) for part in PARTS if known(run[part])}
    if parts and run["step_time_s"]:
        top = sorted(parts, key=lambda part: -parts[part])[:2]
        said.append(
            "Of a step " + " and ".join(f"{parts[p] / run['step_time_s']:.0%} is {PART_NAMES[p]}" for p in top) + "."
        )
    sent = [(r["kind"], r["counted_bytes"] or 0) for r in tables.traffic(run, plan)]
    total = sum(count for _, count in sent)
    if total:
        shares = ", ".join(f"{count / total:.0%} went over {kind}" for kind, count in sent)
        said.append(f"Of the bytes sent, {shares}.")
    return said


def _what_it_was(run: dict[str, Any]) -> str:
    """State, steps, loss, nodes, batch and hyperparameters of a run, in a sentence."""
    steps = f" of {run['config.train.steps']}" if known(run.get("config.train.steps")) else ""
    said = [f"{run['state']}, {tables.word(run['steps'])}{steps} steps, loss {tables.number(run['loss'], 4)}"]
    if known(run["validation_loss"]):
        said.append(f"validation loss {tables.number(run['validation_loss'], 4)}")
    if known(run["nodes"]):
        said.append(", ".join(f"{run[name]} {name if run[name] != 1 else name[:-1]}" for name in ("nodes", "ranks")))
    if known(run["global_batch"]):
        said.append(f"batch {run['global_batch']} x {run['sequence_length']} tokens")
    said += [
        f"{name.replace('_', ' ')} {run[f'config.train.{name}']:g}"
        for name in HYPERPARAMETERS
        if isinstance(run.get(f"config.train.{name}"), int | float)
    ]
    text = ", ".join(said)
    return f"{text[0].upper()}{text[1:]}."


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON knows them; the columns of a family under one key."""
    prefixes = tuple(one.prefix for one in FAMILIES.values())
    rows = []
    for _, row in compare.entries(frame):
        plain: dict[str, Any] = {}
        for key, value in row.items():
            if key.startswith(prefixes):
                continue
            if isinstance(value, pd.Timestamp):
                plain[key] = value.isoformat()
            else:
                plain[key] = value.item() if hasattr(value, "item") else value
        plain |= {name: family(row, name) for name in FAMILIES}
        plain |= {"config": nested(plain["config"]), "stage_breakdown": stage_breakdown(row)}
        rows.append({k: v if known(v) else None for k, v in plain.items()})
    return rows
