"""Tables that compare several runs, for example the runs of a sweep: one row per setting, the best first."""

import pandas as pd

from holmes_hpc.console import NONE, data_size
from holmes_hpc.records.metrics import PART_NAMES, PARTS
from holmes_hpc.results.columns import family_values, has_value
from holmes_hpc.results.compare import Comparison, entries
from holmes_hpc.results.tables import Table, as_text, format_number, format_percent, interval_note, pace_note

MAX_ROWS = 40  # rows of a table in a terminal
_OF_MEAN = "of mean: throughput over the mean of the fastest IB and RoCE settings on as many nodes"
SHARES = {  # name in tables: (column, meaning)
    "of linear": ("of_linear", "of linear: throughput per node over that on the fewest nodes"),
    "of mean(IB, RoCE)": ("of_mean", _OF_MEAN),
}


def comparison_tables(comparison: Comparison, by: str = "throughput") -> list[Table]:
    """Return all tables of a comparison, the most important first. `by`: throughput or loss."""
    tables: list[Table | None] = [incomplete_table(comparison)]
    if len(comparison.cells):
        tables = [cell_table(comparison, by), breakdown_table(comparison), bytes_table(comparison), *tables]
    return [table for table in tables if table]


def cell_table(comparison: Comparison, by: str = "throughput") -> Table:
    """Return the table of cells: throughput, speed-up, error of the predicted step time, loss and, where known,
    `of_linear` and `of_mean`. A setting that is the same in all rows moves to the caption."""
    cells = comparison.cells
    shown = cells.head(MAX_ROWS)
    numbers = {index: str(i) for i, index in enumerate(cells.index, 1)}
    shares = {name: column for name, (column, _) in SHARES.items() if shown[column].notna().any()}
    rows = []
    for index, c in entries(shown):
        place = f"{c['environment']}: {c['placement']}" if has_value(c["placement"]) else NONE
        system = [str(c["system"]), c["varied"], c["apart"], "" if c["completed"] else "not completed"]
        row = {"#": numbers[index], "run": str(c["names"]), "system": ", ".join(filter(None, system))}
        row["environment: nodes"] = place
        row |= {"layers": as_text(c["layers_per_stage"]), "runs": str(c["repeats"])}
        row |= {"samples/s": format_number(c["samples_per_s"]), "tokens/s": format_number(c["tokens_per_s"])}
        interval = interval_note(c["step_time_low_s"], c["step_time_high_s"])
        speedup = f"{format_number(c['speedup'])}x{interval_note(c['speedup_low'], c['speedup_high'])}"
        row |= {"step, s (95%)": format_number(c["step_time_s"]) + interval}
        row["speed-up"] = speedup if has_value(c["speedup"]) else NONE
        has_baseline = has_value(c["baseline"]) and c["baseline"] != index
        row["over"] = numbers.get(c["baseline"], NONE) if has_baseline else NONE
        row["predicted"] = format_percent(100 * (c["predicted_step_time_s"] / c["step_time_s"] - 1))
        row |= {"loss": format_number(c["loss"], 4), "validation": format_number(c["validation_loss"], 4)}
        row |= {name: f"{c[column]:.1%}" if has_value(c[column]) else NONE for name, column in shares.items()}
        rows.append(row)
    table = pd.DataFrame(rows)
    is_empty = (table == NONE).all() & table.columns.isin(["speed-up", "over", "predicted", "loss", "validation"])
    names = ("system", "environment: nodes", "layers", "runs")
    constants = [name for name in names if len(table) > 1 and table[name].nunique() == 1]
    common = ", ".join(f"{name} {table[name].iloc[0]}" for name in constants)
    caption = f"all: {common}; " if constants else ""
    caption += f"after warm-up; samples/s: harmonic means, median over repeats; steps: medians; {_pace_notes(cells)}"
    notes = ["predicted: error of the predicted step time", *(SHARES[name][1] for name in shares)]
    caption = "; ".join([caption, *notes]) + _not_shown(cells)
    return Table.of(f"Settings by {by}", table.loc[:, ~is_empty].drop(columns=constants, errors="ignore"), caption)


def _not_shown(rows: pd.DataFrame) -> str:
    return f"; {len(rows) - MAX_ROWS} more not shown" if len(rows) > MAX_ROWS else ""


def _pace_notes(cells: pd.DataFrame) -> str:
    notes = dict.fromkeys(pace_note(c) for _, c in entries(cells))
    return " / ".join(notes) or "no runs"


def breakdown_table(comparison: Comparison) -> Table:
    """Return the table of the seconds that each part of a step takes, mean over stages."""
    parts = comparison.cells[["step_time_s", *PARTS]].rename(columns={"step_time_s": "step", **PART_NAMES})
    title = "Time per part of a step: seconds, mean over stages"
    return _with_names(title, comparison.cells, parts.map(format_number), "medians")


def bytes_table(comparison: Comparison) -> Table | None:
    """Return the table of the bytes that the NICs of all nodes sent per step; None if none were counted."""
    sent = pd.DataFrame([family_values(c, "tx_bytes_per_step") for _, c in entries(comparison.cells.head(MAX_ROWS))])
    if sent.columns.empty:
        return None
    sent = sent[sorted(sent, key=lambda kind: (kind == "ethernet", kind))]
    title = "Bytes sent per step, all nodes together, as counted"
    return _with_names(title, comparison.cells, sent.map(data_size), "medians, headers included")


def _with_names(title: str, cells: pd.DataFrame, texts: pd.DataFrame, note: str) -> Table:
    """Return a table of the first `cells`: number, run, system and nodes of each cell, followed by its `texts`."""
    shown = cells.head(MAX_ROWS)
    names = {"#": range(1, len(shown) + 1), "run": shown["names"], "system": shown["system"]}
    names_table = pd.DataFrame({**names, "nodes": shown["placement"].map(as_text)}).reset_index(drop=True)
    table = names_table.join(texts.head(MAX_ROWS).reset_index(drop=True))
    return Table.of(title, table, f"{note}; {_pace_notes(shown)}{_not_shown(cells)}")


def incomplete_table(comparison: Comparison) -> Table | None:
    """Return the table of runs that did not complete or have damaged files, with their errors; None without any."""
    runs = comparison.runs
    incomplete = runs[(runs["state"] != "completed") | runs["error"].notna()]
    if incomplete.empty:
        return None
    shown = incomplete.head(MAX_ROWS)[["run", "state", "steps", "error"]]
    texts = shown.assign(steps=shown["steps"].map(as_text), error=shown["error"].fillna(""))
    return Table.of("Runs that did not complete, or are damaged", texts, _not_shown(incomplete).removeprefix("; "))
