"""Tables that compare several runs, as of a sweep: one row per setting, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from holmes_hpc.console import NONE, data_size
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import family, has_value
from holmes_hpc.results.compare import Comparison, entries
from holmes_hpc.results.tables import Table, as_text, interval, number, pace_note, percent

MAX_ROWS = 40  # rows of a table in a terminal


def comparison_tables(comparison: Comparison, by: str = "throughput") -> list[Table]:
    """Return all tables, the most important first."""
    tables = (
        [cell_table(comparison, by), breakdown_table(comparison), bytes_table(comparison)]
        if len(comparison.cells)
        else []
    )
    return [table for table in (*tables, incomplete_table(comparison)) if table]


def cell_table(comparison: Comparison, by: str = "throughput") -> Table:
    """Return each cell's throughput, speed-up, predicted step time, loss and, where known, shares.

    Columns with one value for all cells are in the caption."""
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
            f" ({interval(c['step_time_low_s'], c['step_time_high_s'])})" if has_value(c["step_time_low_s"]) else ""
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
                number(c["samples_per_s"]),
                number(c["tokens_per_s"]),
                number(c["step_time_s"]) + bounds,
                _times(c),
                base,
                percent(error),
                number(c["loss"], 4),
                number(c["validation_loss"], 4),
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
    """Return the table without empty and constant columns, and the constants as text."""
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


def _not_shown(cells: pd.DataFrame) -> str:
    return f"; {len(cells) - MAX_ROWS} more not shown" if len(cells) > MAX_ROWS else ""


def _times(cell: Mapping[str, Any]) -> str:
    if not has_value(cell["speedup"]):
        return NONE
    bounds = f" ({interval(cell['speedup_low'], cell['speedup_high'])})" if has_value(cell["speedup_low"]) else ""
    return f"{number(cell['speedup'])}x{bounds}"


def _pace_notes(cells: pd.DataFrame) -> str:
    notes = dict.fromkeys(pace_note(c) for _, c in entries(cells))
    return " / ".join(notes) or "no runs"


def breakdown_table(comparison: Comparison) -> Table:
    """Return the parts of a step for every cell, mean over stages."""
    all_cells = comparison.cells
    cells = all_cells.head(MAX_ROWS)
    rows = [
        [
            str(i),
            str(c["names"]),
            str(c["system"]),
            as_text(c["placement"]),
            number(c["step_time_s"]),
            *(number(c[p]) for p in PARTS),
        ]
        for i, (_, c) in enumerate(entries(cells), 1)
    ]
    return Table(
        "Time per part of a step: seconds, mean over stages",
        ["#", "run", "system", "nodes", "step", *(PART_NAMES[p] for p in PARTS)],
        rows,
        f"medians; {_pace_notes(cells)}{_not_shown(all_cells)}",
    )


def bytes_table(comparison: Comparison) -> Table | None:
    """Return the bytes that the NICs of all nodes sent per step; None if they sent none."""
    all_cells = comparison.cells
    cells = all_cells.head(MAX_ROWS)
    sent = [family(c, "tx_bytes_per_step") for _, c in entries(cells)]
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
        f"medians, headers included; {_pace_notes(cells)}{_not_shown(all_cells)}",
    )


def incomplete_table(comparison: Comparison) -> Table | None:
    """Return the runs that did not complete or have damaged files, with errors; None if there are none."""
    runs = comparison.runs
    incomplete = runs[(runs["state"] != "completed") | runs["error"].notna()]
    if incomplete.empty:
        return None
    rows = [
        [str(r["run"]), str(r["state"]), as_text(r["steps"]), str(r["error"]) if has_value(r["error"]) else ""]
        for _, r in entries(incomplete.head(MAX_ROWS))
    ]
    omitted_note = f"{len(incomplete) - MAX_ROWS} more not shown" if len(incomplete) > MAX_ROWS else ""
    return Table("Runs that did not complete, or are damaged", ["run", "state", "steps", "error"], rows, omitted_note)
