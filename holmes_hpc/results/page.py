"""The report as one self-contained HTML page: no network, no scripts; readable on a phone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from holmes_hpc.errors import RecordError
from holmes_hpc.results import answers, compare, figures, tables
from holmes_hpc.results.columns import PARTS, stage_breakdown
from holmes_hpc.results.report import Report


def write_page(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`: the answer first, then figures and tables. RecordError when it cannot be written."""
    try:
        Path(path).write_text(page(report), encoding="utf-8")
    except OSError as e:
        raise RecordError(e.strerror or str(e), where=str(path), hint="give a file that can be written") from e


def page(report: Report) -> str:
    """The page's text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("holmes_hpc.results", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    title = f"Run {report.run['name']}" if report.single else f"{len(report.runs)} runs"
    return environment.get_template("report.html").render(
        title=title,
        answer=report.answer(),
        facts=_facts(report),
        tables=report.tables(),
        figures=[(caption, figures.svg(figure)) for caption, figure in _figures(report)],
        notes=_notes(report),
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """A few (figure, what it is), shown large."""
    if report.by == "loss" and not report.single:
        return _facts_by_loss(report.comparison.cells)
    found = answers.winner(report.comparison)
    if found is None:
        return []
    best, base = found
    facts = [(tables.number(best["samples_per_s"]), "samples/s" if report.single else "samples/s, the fastest")]
    if tables.known(best["tokens_per_s"]):
        facts.append((tables.number(best["tokens_per_s"]), "tokens/s"))
    if report.single:
        facts += [(tables.number(best["loss"], 4), "loss of the last step"), (str(report.run["state"]), "state")]
    if base is not None:
        facts.append((f"{tables.number(best['ratio'])}x", f"as fast as {compare.label(base)}"))
    if tables.known(best["mape"]):
        facts.append(
            (
                tables.percent(100 * (best["predicted_step_time_s"] / best["step_time_s"] - 1)),
                "predicted over measured step time",
            )
        )
    return facts


def _facts_by_loss(cells: pd.DataFrame) -> list[tuple[str, str]]:
    """Of a ranking by loss: the lowest and the highest, and the fastest setting's rate."""
    key = compare.loss_of(cells)
    cells = cells[cells[key].notna()]
    if cells.empty:
        return []
    names, said = compare.labels(cells), key.replace("_", " ")
    fastest = int(cells["samples_per_s"].to_numpy().argmax())
    return [
        (tables.number(cells[key].iloc[0], 4), f"lowest {said}: {names[0]}"),
        (tables.number(cells[key].iloc[-1], 4), f"highest: {names[-1]}"),
        (tables.number(cells["samples_per_s"].iloc[fastest]), f"samples/s, the fastest: {names[fastest]}"),
    ]


def _figures(report: Report) -> list[tuple[str, Any]]:
    cells, runs = report.comparison.cells, report.comparison.runs
    made: list[tuple[str, Any]] = []
    if cells.empty:
        return made
    if report.single:
        stages = stage_breakdown(report.run)
        traffic = tables.traffic(report.run, report.plan)
        if stages:
            names = [f"stage {i}" for i in range(len(stages))]
            made.append((tables.basis(report.run), figures.breakdown(names, stages)))
        if traffic:
            made.append((tables.basis(report.run), figures.nic_bytes(traffic)))
        if len(report.trace):
            made.append(
                (
                    "one step of median length, first rank of each stage",
                    figures.timeline(report.trace, report.simulated),
                )
            )
        made.append((tables.pace(report.run), figures.step_times(report.steps)))
    else:
        pace = " / ".join(dict.fromkeys(tables.pace(c) for _, c in compare.entries(cells)))
        left_out = "; ".join(filter(None, [figures.fastest(cells), pace]))
        made.append((f"medians over runs, whiskers: 95% intervals; {left_out}", figures.throughput(cells)))
        head = cells.head(figures.MOST_BARS)
        made.append(
            (
                left_out,
                figures.breakdown(
                    compare.labels(head), [{part: c[part] for part in PARTS} for _, c in compare.entries(head)]
                ),
            )
        )
        if compare.scaled(cells):
            made.append((pace, figures.scaling(cells)))
        if runs["predicted_step_time_s"].notna().any():
            made.append((pace, figures.predicted_measured(runs[runs["cell"] >= 0])))
    if report.steps["loss"].notna().any() and report.steps["run"].nunique() <= 8:
        a_step = {
            str(row["run"]): float(row["global_batch"]) * float(row["sequence_length"])
            for _, row in compare.entries(runs)
            if tables.known(row["global_batch"]) and tables.known(row["sequence_length"])
        }
        by = "tokens" if len(set(a_step.values())) > 1 else "step"  # steps of different batches do not compare
        made.append((f"by {by}s", figures.loss(report.steps, by, a_step)))
        if report.steps["time"].notna().any():
            made.append(("by each run's own time, without waits", figures.loss(report.steps, "time")))
    return made


def _notes(report: Report) -> list[str]:
    """Where it comes from: commits, devices, when; what is missing."""
    runs = report.runs
    notes = [
        f"{name}: {', '.join(found)}"
        for name, column in (("commit", "git_commit"), ("device", "device"), ("site", "site"))
        if (found := sorted({str(value) for value in runs[column].dropna()}))
    ]
    started = runs["started"].dropna()
    if len(started):
        notes.append(
            f"started {_day(started.min())} to {_day(started.max())}"
            if len(started) > 1
            else f"started {_day(started.min())}"
        )
    return [*notes, *filter(None, [report.missing()])]


def _day(when: pd.Timestamp) -> str:
    return when.strftime("%Y-%m-%d %H:%M UTC")
