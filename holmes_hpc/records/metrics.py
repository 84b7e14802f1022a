"""The fields of metrics.jsonl, a file with one line for each training step. metrics.yaml has their units and meanings.

training/metrics/metrics_line.py writes the fields, results/columns.py turns them into table columns, and
docs/records.md lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holmes_hpc.records.files import map_leaves
from holmes_hpc.tables import read_table

DIGITS = 7  # significant digits of recorded times and rates, more than the clocks can resolve

_TABLE: dict[str, Any] = read_table(__file__)
BREAKDOWN: dict[str, str] = _TABLE["breakdown"]  # part of a step's time: meaning
PARTS = tuple(BREAKDOWN)
_LONG = {"grad": "gradient", "param": "parameter", "fill": "fill and"}  # in display names
PART_NAMES = {part: " ".join(_LONG.get(word, word) for word in part[: -len("_s")].split("_")) for part in PARTS}
DIRECTIONS = ("tx", "rx")  # of traffic: sent, received


@dataclass(frozen=True)
class Field:
    """A field of metrics.jsonl. `unit`: empty if the field has none; `always`: whether every line has the field."""

    unit: str
    meaning: str
    always: bool


FIELDS = {
    name: Field(unit, text.replace("PARTS", ", ".join(PARTS)), always=name not in _TABLE["optional"])
    for name, (unit, text) in _TABLE["fields"].items()
}
_ROUNDED = frozenset(name for name, field in FIELDS.items() if field.unit in ("s", "tokens/s", "samples/s", "TFLOP/s"))


def rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return `line` as metrics.jsonl records it: rates and durations with DIGITS significant digits, `time` rounded to
    milliseconds, other values unchanged. Recorded values are rounded only here."""

    def convert(value: Any) -> Any:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    values = {name: map_leaves(value, convert) if name in _ROUNDED else value for name, value in line.items()}
    return values | ({"time": round(line["time"], 3)} if isinstance(line.get("time"), float) else {})
