"""The report as one self-contained HTML file, without scripts, readable on a phone."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from holmes_hpc.errors import RecordError
from holmes_hpc.results import compare, comparison_text, figures, tables
from holmes_hpc.results.columns import PARTS, stage_parts
from holmes_hpc.results.report import Report


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the HTML report to `path`, the answer first. Raise RecordError if the file cannot be written."""
    with RecordError.instead_of(OSError, where=path, hint="choose a writable path"):
        Path(path).write_text(render_html(report), encoding="utf-8")


def render_html(report: Report) -> str:
    """Return the text of the HTML report."""
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=jinja2.PackageLoader("holmes_hpc.results", "."), **options)
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
    """Return (value, meaning) of the few figures that the report shows in large type."""
    if report.by == "loss" and not report.single:
        return _facts_by_loss(report.comparison.cells)
    best, base = comparison_text.winner(report.comparison) or ({}, None)
    if not best:
        return []
    facts = [(tables.format_number(best["samples_per_s"]), "samples/s" if report.single else "samples/s, the fastest")]
    if tables.has_value(best["tokens_per_s"]):
        facts.append((tables.format_number(best["tokens_per_s"]), "tokens/s"))
    if report.single:
        facts += [(tables.format_number(best["loss"], 4), "loss of the last step"), (str(report.run["state"]), "state")]
    if base is not None:
        facts.append((f"{tables.format_number(best['ratio'])}x", f"as fast as {compare.label(base)}"))
    if tables.has_value(best["mape"]):
        error = 100 * (best["predicted_step_time_s"] / best["step_time_s"] - 1)
        facts.append((tables.format_percent(error), "predicted over measured step time"))
    return facts


def _facts_by_loss(cells: pd.DataFrame) -> list[tuple[str, str]]:
    """Return (value, meaning) of the lowest loss, the highest loss and the highest throughput."""
    key = compare.loss_of(cells)
    cells = cells[cells[key].notna()]
    if cells.empty:
        return []
    names, loss_name = compare.labels(cells), key.replace("_", " ")
    fastest = int(cells["samples_per_s"].to_numpy().argmax())
    return [
        (tables.format_number(cells[key].iloc[0], 4), f"lowest {loss_name}: {names[0]}"),
        (tables.format_number(cells[key].iloc[-1], 4), f"highest: {names[-1]}"),
        (tables.format_number(cells["samples_per_s"].iloc[fastest]), f"samples/s, the fastest: {names[fastest]}"),
    ]


def _figures(report: Report) -> Iterator[tuple[str, Any]]:
    """Yield (caption, figure) of all figures."""
    cells, runs = report.comparison.cells, report.comparison.runs
    if cells.empty:
        return
    if report.single:
        stages = stage_parts(report.run)
        traffic = tables.traffic(report.run, report.plan)
        if stages:
            names = [f"stage {i}" for i in range(len(stages))]
            yield tables.basis_note(report.run), figures.breakdown(names, stages)
        if traffic:
            yield tables.basis_note(report.run), figures.nic_bytes(traffic)
        if len(report.trace):
            caption = "one step of median length, first rank of each stage"
            yield caption, figures.timeline(report.trace, report.simulated)
        yield tables.pace_note(report.run), figures.step_times(report.steps)
    else:
        pace_notes = " / ".join(dict.fromkeys(tables.pace_note(c) for _, c in compare.entries(cells)))
        note = "; ".join(filter(None, [figures.omission_note(cells), pace_notes]))
        yield f"medians over runs, whiskers: 95% intervals; {note}", figures.throughput(cells)
        head = cells.head(figures.MAX_BARS)
        yield note, figures.breakdown(compare.labels(head), head[list(PARTS)].to_dict("records"))
        if compare.scaled(cells):
            yield pace_notes, figures.scaling(cells)
        if runs["predicted_step_time_s"].notna().any():
            yield pace_notes, figures.predicted_measured(runs[runs["cell"] >= 0])
    if report.steps["loss"].notna().any() and report.steps["run"].nunique() <= 8:
        known = runs.dropna(subset=["global_batch", "sequence_length"])
        tokens = (known["global_batch"] * known["sequence_length"]).astype(float)
        tokens_per_step = dict(zip(map(str, known["run"]), tokens, strict=True))
        by = "tokens" if len(set(tokens_per_step.values())) > 1 else "step"  # steps of different batches do not compare
        yield f"by {by}s", figures.loss(report.steps, by, tokens_per_step)
        if report.steps["time"].notna().any():
            yield "by time since the run's start, without waits", figures.loss(report.steps, "time")


def _notes(report: Report) -> list[str]:
    """Return lines with the commits, devices, sites and start times of runs, and the fields that their files lack."""
    runs = report.runs
    columns = {"commit": "git_commit", "device": "device", "site": "site"}
    values = {name: sorted(set(map(str, runs[column].dropna()))) for name, column in columns.items()}
    notes = [f"{name}: {', '.join(texts)}" for name, texts in values.items() if texts]
    started = runs["started"].dropna().sort_values().dt.strftime("%Y-%m-%d %H:%M UTC").tolist()
    if started:
        notes.append(f"started {started[0]}" + (f" to {started[-1]}" if len(started) > 1 else ""))
    return [*notes, *filter(None, [report.missing()])]
