"""Tables of several runs side by side, as of a sweep: one row per setting, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from holmes_hpc.console import NONE, data_size
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import family, known
from holmes_hpc.results.compare import Comparison, entries
from holmes_hpc.results.tables import Table, interval, number, pace, percent, word

SHOWN = 40  # rows of a table in a terminal


def comparison_tables(comparison: Comparison, by: str = "throughput") -> list[Table]:
    """All of them, the most wanted first."""
    made = (
        [cell_table(comparison, by), breakdown_table(comparison), bytes_table(comparison)]
        if len(comparison.cells)
        else []
    )
    return [table for table in (*made, ended_table(comparison)) if table]


def cell_table(comparison: Comparison, by: str = "throughput") -> Table:
    """Throughput of every cell, its speed-up, the prediction beside it, its loss, and its shares where one can be told.
    What is the same in all rows stands below."""
    cells = comparison.cells
    shares = {
        name: column
        for column, name in (("of_linear", "of linear"), ("of_mean", "of mean(IB, RoCE)"))
        if cells.head(SHOWN)[column].notna().any()
    }
    numbers = {index: str(i + 1) for i, index in enumerate(cells.index)}
    rows = []
    for index, c in entries(cells.head(SHOWN)):
        base = numbers.get(int(c["baseline"]), NONE) if known(c["baseline"]) and c["baseline"] != index else NONE
        error = 100 * (c["predicted_step_time_s"] / c["step_time_s"] - 1)
        bounds = f" ({interval(c['step_time_low_s'], c['step_time_high_s'])})" if known(c["step_time_low_s"]) else ""
        system = ", ".join(
            filter(None, [str(c["system"]), c["varied"], c["apart"], "" if c["completed"] else "not completed"])
        )
        placed = f"{c['environment']}: {c['placement']}" if known(c["placement"]) else NONE
        rows.append(
            [
                numbers[index],
                str(c["names"]),
                system,
                placed,
                word(c["layers_per_stage"]),
                str(c["repeats"]),
                number(c["samples_per_s"]),
                number(c["tokens_per_s"]),
                number(c["step_time_s"]) + bounds,
                _times(c),
                base,
                percent(error),
                number(c["loss"], 4),
                number(c["validation_loss"], 4),
                *(f"{c[column]:.1%}" if known(c[column]) else NONE for column in shares.values()),
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
    columns, rows, alike = _without_constants(columns, rows)
    said = {
        "of_linear": "; of linear: per node, of that on the fewest nodes",
        "of_mean": "; of mean: of the fastest IB and RoCE settings on as many nodes",
    }
    return Table(
        f"Settings by {by}",
        columns,
        rows,
        f"{alike}after warm-up; samples/s: harmonic means, of repeats the median; steps: medians; "
        f"{_paces(cells)}; predicted: predicted over measured step time, less 1"
        f"{''.join(said[column] for column in shares.values())}{_not_shown(cells)}",
    )


def _without_constants(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]], str]:
    """The table without columns that say nothing, or the same of each setting; and the latter in words."""
    drop, said = set(), []
    for at, name in enumerate(columns):
        values = {row[at] for row in rows}
        if values == {NONE} and name in ("speed-up", "over", "predicted", "loss", "validation"):
            drop.add(at)
        elif len(rows) > 1 and len(values) == 1 and name in ("system", "environment: nodes", "layers", "runs"):
            drop.add(at)
            said.append(f"{name} {values.pop()}")
    return (
        [name for at, name in enumerate(columns) if at not in drop],
        [[cell for at, cell in enumerate(row) if at not in drop] for row in rows],
        f"all: {', '.join(said)}; " if said else "",
    )


def _not_shown(cells: pd.DataFrame) -> str:
    return f"; {len(cells) - SHOWN} more not shown" if len(cells) > SHOWN else ""


def _times(cell: Mapping[str, Any]) -> str:
    if not known(cell["speedup"]):
        return NONE
    bounds = f" ({interval(cell['speedup_low'], cell['speedup_high'])})" if known(cell["speedup_low"]) else ""
    return f"{number(cell['speedup'])}x{bounds}"


def _paces(cells: pd.DataFrame) -> str:
    found = dict.fromkeys(pace(c) for _, c in entries(cells))
    return " / ".join(found) or "no runs"


def breakdown_table(comparison: Comparison) -> Table:
    """Where a step goes in every cell, mean over stages."""
    whole = comparison.cells
    cells = whole.head(SHOWN)
    rows = [
        [
            str(i),
            str(c["names"]),
            str(c["system"]),
            word(c["placement"]),
            number(c["step_time_s"]),
            *(number(c[p]) for p in PARTS),
        ]
        for i, (_, c) in enumerate(entries(cells), 1)
    ]
    return Table(
        "Where a step goes: seconds, mean over stages",
        ["#", "run", "system", "nodes", "step", *(PART_NAMES[p] for p in PARTS)],
        rows,
        f"medians; {_paces(cells)}{_not_shown(whole)}",
    )


def bytes_table(comparison: Comparison) -> Table | None:
    """Bytes that the NICs of all nodes sent in a step; None where they sent none."""
    whole = comparison.cells
    cells = whole.head(SHOWN)
    sent = [family(c, "tx_bytes_per_step") for _, c in entries(cells)]
    kinds = sorted({kind for entry in sent for kind in entry}, key=lambda k: (k == "ethernet", k))
    if not kinds:
        return None
    rows = [
        [
            str(i),
            str(c["names"]),
            str(c["system"]),
            word(c["placement"]),
            *(data_size(entry.get(kind)) for kind in kinds),
        ]
        for i, ((_, c), entry) in enumerate(zip(entries(cells), sent, strict=True), 1)
    ]
    return Table(
        "Bytes sent per step, all nodes together, as counted",
        ["#", "run", "system", "nodes", *kinds],
        rows,
        f"medians, headers included; {_paces(cells)}{_not_shown(whole)}",
    )


def ended_table(comparison: Comparison) -> Table | None:
    """The runs that did not complete or whose files are damaged, with their errors; None when all are well."""
    runs = comparison.runs
    bad = runs[(runs["state"] != "completed") | runs["error"].notna()]
    if bad.empty:
        return None
    rows = [
        [str(r["run"]), str(r["state"]), word(r["steps"]), str(r["error"]) if known(r["error"]) else ""]
        for _, r in entries(bad.head(SHOWN))
    ]
    more = f"{len(bad) - SHOWN} more not shown" if len(bad) > SHOWN else ""
    return Table("Runs that did not complete, or are damaged", ["run", "state", "steps", "error"], rows, more)
