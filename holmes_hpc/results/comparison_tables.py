"""Tables that compare several runs, as of a sweep: one row per setting, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from holmes_hpc.console import NONE, data_size
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import family_values, has_value
from holmes_hpc.results.compare import Comparison, entries
from holmes_hpc.results.tables import Table, as_text, format_interval, format_number, format_percent, pace_note

MAX_ROWS = 40  # rows of a table in a terminal


def comparison_tables(comparison: Comparison, by: str = "throughput") -> list[Table]:
    """Return all tables of a comparison, the most important first. `by`: throughput or loss."""
    tables = (
        [cell_table(comparison, by), breakdown_table(comparison), bytes_table(comparison)]
        if len(comparison.cells)
        else []
    )
    return [table for table in (*tables, incomplete_table(comparison)) if table]


def cell_table(comparison: Comparison, by: str = "throughput") -> Table:
    """Return the table of cells: throughput, speed-up, predicted step time, loss and, where known, `of_linear` and
    `of_mean`. Columns with the same text in all rows are in the caption instead."""
    cells = comparison.cells
    shares = {
        name: column
        for column, name in (("of_linear", "of linear"), ("of_mean", "of mean(IB, RoCE)"))
        if cells.head(MAX_ROWS)[column].notna().any()
    }
    numbers = {index: str(i + 1) for i, index in enumerate(cells.index)}
    rows = []
    for index, c in entries(cells.head(MAX_ROWS)):
        base = numbers.get(int(c["baseline"]), NONE) if has_value(c["baseline"]) and c["baseline"] != index else NONE
        error = 100 * (c["predicted_step_time_s"] / c["step_time_s"] - 1)
        bounds = (
            f" ({format_interval(c['step_time_low_s'], c['step_time_high_s'])})"
            if has_value(c["step_time_low_s"])
            else ""
        )
        system = ", ".join(
            filter(None, [str(c["system"]), c["varied"], c["apart"], "" if c["completed"] else "not completed"])
        )
        placed = f"{c['environment']}: {c['placement']}" if has_value(c["placement"]) else NONE
        rows.append(
            [
                numbers[index],
                str(c["names"]),
                system,
                placed,
                as_text(c["layers_per_stage"]),
                str(c["repeats"]),
                format_number(c["samples_per_s"]),
                format_number(c["tokens_per_s"]),
                format_number(c["step_time_s"]) + bounds,
                _speedup_text(c),
                base,
                format_percent(error),
                format_number(c["loss"], 4),
                format_number(c["validation_loss"], 4),
                *(f"{c[column]:.1%}" if has_value(c[column]) else NONE for column in shares.values()),
            ]
        )
    columns = [
        "#",
        "run",
        "system",
        "environment: nodes",
        "layers",
        "runs",
        "samples/s",
        "tokens/s",
        "step, s (95%)",
        "speed-up",
        "over",
        "predicted",
        "loss",
        "validation",
        *shares,
    ]
    columns, rows, constants = _without_constants(columns, rows)
    share_notes = {
        "of_linear": "; of linear: throughput per node over that on the fewest nodes",
        "of_mean": "; of mean: throughput over the mean of the fastest IB and RoCE settings on as many nodes",
    }
    return Table(
        f"Settings by {by}",
        columns,
        rows,
        f"{constants}after warm-up; samples/s: harmonic means (repeats: median); steps: medians; "
        f"{_pace_notes(cells)}; predicted: error of the predicted step time"
        f"{''.join(share_notes[column] for column in shares.values())}{_not_shown(cells)}",
    )


def _without_constants(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]], str]:
    """Return (columns, rows, start of a caption) without empty columns and without constant ones, which the caption
    names."""
    drop, constants = set(), []
    for index, name in enumerate(columns):
        values = {row[index] for row in rows}
        if values == {NONE} and name in ("speed-up", "over", "predicted", "loss", "validation"):
            drop.add(index)
        elif len(rows) > 1 and len(values) == 1 and name in ("system", "environment: nodes", "layers", "runs"):
            drop.add(index)
            constants.append(f"{name} {values.pop()}")
    return (
        [name for index, name in enumerate(columns) if index not in drop],
        [[cell for index, cell in enumerate(row) if index not in drop] for row in rows],
        f"all: {', '.join(constants)}; " if constants else "",
    )


def _not_shown(rows: pd.DataFrame) -> str:
    return f"; {len(rows) - MAX_ROWS} more not shown" if len(rows) > MAX_ROWS else ""


def _speedup_text(cell: Mapping[str, Any]) -> str:
    if not has_value(cell["speedup"]):
        return NONE
    bounds = (
        f" ({format_interval(cell['speedup_low'], cell['speedup_high'])})" if has_value(cell["speedup_low"]) else ""
    )
    return f"{format_number(cell['speedup'])}x{bounds}"


def _pace_notes(cells: pd.DataFrame) -> str:
    notes = dict.fromkeys(pace_note(c) for _, c in entries(cells))
    return " / ".join(notes) or "no runs"


def breakdown_table(comparison: Comparison) -> Table:
    """Return the table of the seconds that each part of a step takes, mean over stages."""
    cells = comparison.cells.head(MAX_ROWS)
    rows = [
        [
            str(i),
            str(c["names"]),
            str(c["system"]),
            as_text(c["placement"]),
            format_number(c["step_time_s"]),
            *(format_number(c[p]) for p in PARTS),
        ]
        for i, (_, c) in enumerate(entries(cells), 1)
    ]
    return Table(
        "Time per part of a step: seconds, mean over stages",
        ["#", "run", "system", "nodes", "step", *(PART_NAMES[p] for p in PARTS)],
        rows,
        f"medians; {_pace_notes(cells)}{_not_shown(comparison.cells)}",
    )


def bytes_table(comparison: Comparison) -> Table | None:
    """Return the table of the bytes that the NICs of all nodes sent per step; None if none were counted."""
    cells = comparison.cells.head(MAX_ROWS)
    sent = [family_values(c, "tx_bytes_per_step") for _, c in entries(cells)]
    kinds = sorted({kind for entry in sent for kind in entry}, key=lambda k: (k == "ethernet", k))
    if not kinds:
        return None
    rows = [
        [
            str(i),
            str(c["names"]),
            str(c["system"]),
            as_text(c["placement"]),
            *(data_size(entry.get(kind)) for kind in kinds),
        ]
        for i, ((_, c), entry) in enumerate(zip(entries(cells), sent, strict=True), 1)
    ]
    return Table(
        "Bytes sent per step, all nodes together, as counted",
        ["#", "run", "system", "nodes", *kinds],
        rows,
        f"medians, headers included; {_pace_notes(cells)}{_not_shown(comparison.cells)}",
    )


def incomplete_table(comparison: Comparison) -> Table | None:
    """Return the table of runs that did not complete or have damaged files, with their errors; None if there are
    none."""
    runs = comparison.runs
    incomplete = runs[(runs["state"] != "completed") | runs["error"].notna()]
    if incomplete.empty:
        return None
    rows = [
        [str(r["run"]), str(r["state"]), as_text(r["steps"]), str(r["error"]) if has_value(r["error"]) else ""]
        for _, r in entries(incomplete.head(MAX_ROWS))
    ]
    return Table(
        "Runs that did not complete, or are damaged",
        ["run", "state", "steps", "error"],
        rows,
        _not_shown(incomplete).removeprefix("; "),
    )
