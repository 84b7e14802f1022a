"""The columns of the tables of runs, steps and stages: name -> (type, meaning), from columns.yaml.

The values come from results/loading: run_row.py sets those of runs, steps.py of steps, and loader.py of stages.

Missing texts are None, missing numbers NaN. The keys of a configuration, of labels and of NIC counters differ between
runs. So each of these mappings becomes a family of columns, named by a prefix and a key (`config.train.lr`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
from pandas.api.types import infer_dtype

from holmes_hpc.config.plan_options import SCHEDULE_NAMES
from holmes_hpc.records.metrics import BREAKDOWN, FIELDS, PARTS
from holmes_hpc.tables import read_table

_TABLES = read_table(__file__)


def _columns(table: str) -> dict[str, tuple[str, str]]:
    """Return {name: (type, meaning)} of the columns of a table in columns.yaml, in their order."""
    names = {"PART": PARTS, "FIELD": _TABLES["step_fields"]}
    texts = {"schedules": ", ".join(SCHEDULE_NAMES), "fields": FIELDS}
    return {
        name: (kind, text.format(field=FIELDS.get(name), part=BREAKDOWN.get(name), **texts).removeprefix(": "))
        for key, (kind, text) in _TABLES[table].items()
        for name in names.get(key, [key])
    }


RUN_COLUMNS, STEP_COLUMNS, STAGE_COLUMNS = map(_columns, ("runs", "steps", "stages"))


class Family(NamedTuple):
    """A family of columns of the table of runs, with one column for each key that any run has.
    `prefix`: start of the columns' names, before the key; `keys`: the key in the documentation; `kind`: pandas type."""

    prefix: str
    keys: str
    meaning: str
    kind: str | None = "float64"  # None: for each column the type that holds its values


FAMILIES = {  # the keys are those of `holmes report --json`
    "labels": Family("labels.", "NAME", "the runs' labels", None),
    "config": Family("config.", "GROUP.KEY", "the resolved configuration", None),
    "model_spec": Family("model.", "KEY", "the model and its sizes, from the plan", None),
    "planned_bytes_per_step": Family("planned_bytes_", "NIC", "planned payload bytes per step, sent by all nodes"),
    "stage_breakdown": Family("stage_", "N.PART", "seconds of a part: median over steps, mean over the stage's ranks"),
    "tx_bytes_per_step": Family("tx_bytes_", "NIC", "median bytes per step sent by all nodes, as counted"),
    "rx_bytes_per_step": Family("rx_bytes_", "NIC", "median bytes per step received by all nodes, as counted"),
    "setup_tx_bytes": Family("setup_tx_bytes_", "NIC", "bytes sent before the first step: rendezvous and control"),
    "header_factors": Family("header_factor_", "NIC", "`header_factor` of one fabric or ethernet"),
}
_TYPES = {"integer": "Int64", "floating": "float64", "mixed-integer-float": "float64"}
_TYPES |= {"boolean": "boolean", "string": "string"}
# The pandas type of a column -> the Arrow type that stores it.
ARROW = {"string": pa.string(), "Int64": pa.int64(), "int32": pa.int32(), "int16": pa.int16(), "float64": pa.float64()}
ARROW |= {"boolean": pa.bool_(), "bool": pa.bool_(), "datetime64[ns, UTC]": pa.timestamp("ns", tz="UTC")}
ARROW["object"] = pa.list_(pa.string())


def family_columns(name: str, entries: list[dict[str, Any]]) -> dict[str, pd.Series[Any]]:
    """Return {name: column} of the family `name`. `entries`: {key: value} of each run; missing keys are NaN or None."""
    family = FAMILIES[name]
    columns = {}
    for key in dict.fromkeys(key for entry in entries for key in entry):
        values = [entry.get(key) for entry in entries]
        values = [None if isinstance(v, int) and not -(2**63) <= v < 2**63 else v for v in values]  # int64 only
        kind = family.kind or _TYPES.get(infer_dtype(values, skipna=True), "object")
        columns[f"{family.prefix}{key}"] = pd.Series(values, dtype=kind)
    return columns


def family_values(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return {key: value} of the family `name` in a row of the table of runs, without missing values."""
    prefix = FAMILIES[name].prefix
    return {k.removeprefix(prefix): value for k, value in row.items() if k.startswith(prefix) and has_value(value)}


def stage_parts(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return a list with {part of a step: median seconds} of each pipeline stage, from a row of the table of runs."""
    parts = family_values(row, "stage_breakdown")
    stages = 1 + max((int(key.partition(".")[0]) for key in parts), default=-1)
    return [{part: parts.get(f"{stage}.{part}", math.nan) for part in PARTS} for stage in range(stages)]


def has_value(value: Any) -> bool:
    """Return whether `value` is known: not None, not pandas' NA or NaT, and not a NaN or infinite float."""
    is_missing = value is None or value is pd.NA or value is pd.NaT
    return not is_missing and (not isinstance(value, float) or math.isfinite(value))
