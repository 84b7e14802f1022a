"""A third party's layer profile as a calibration: rows of a CSV file, or Sailor's profile.json.

CSV: one row per part and shape. The columns are part (layer, embedding, head), tp, micro_size, forward_s and
backward_s. Optional columns are sequence (default: the batch's sequence length), gpu (the GPU kind as the site names
it; default: any), hidden (must be that of the model) and update_s (the part's optimizer time).

Sailor (github.com/eth-easl/sailor, docs/PROFILING.md): {micro-batch size: {TP: {index: [forward, backward, update]}}}
in seconds. Index 0 is the embedding, the last index the head. The profile names neither GPU nor model.

The times of small shapes are noisy. Therefore no time may exceed that of a larger micro-batch.
"""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from statistics import median
from typing import Annotated, Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.planning.cost.calibration import Calibration, MeasuredPart, MeasuredPool
from holmes_hpc.planning.cost.flops import layer_parameters, part_flops
from holmes_hpc.schema import REQUIRED, Checked, key, keys, make

_MODEL_HINT = "give this model's profile, or `holmes calibrate`"


@dataclass(frozen=True)
class Row(Checked, where="profile"):
    """The times of one part in one shape. `sequence` 0: the batch's sequence length. `hidden` 0: unknown."""

    part: Annotated[str, key("part of a model", one_of=("layer", "embedding", "head"))]
    tp: Annotated[int, key("tensor-parallel size", ge=1)]
    micro_size: Annotated[int, key("sequences of a micro-batch", ge=1)]
    forward_s: Annotated[float, key("time of a forward pass", unit="s", ge=0, le=1e4)]
    backward_s: Annotated[float, key("time of a backward pass", unit="s", ge=0, le=1e4)]
    update_s: Annotated[float | None, key("time of the optimizer", unit="s", ge=0, le=1e4)] = None
    sequence: Annotated[int, key("tokens of a sequence", ge=0)] = 0
    hidden: Annotated[int, key("width of the residual stream", ge=0)] = 0
    gpu: str = ""


def is_sailor_profile(data: Any) -> bool:
    """Return whether plain data can be Sailor's profile: all its keys are numbers."""
    return isinstance(data, Mapping) and bool(data) and all(str(k).isdecimal() for k in data)


def from_csv(text: str, model: ModelSpec, batch: Batch) -> Calibration:
    """Return the calibration in a CSV file's text. ConfigError with the line and the allowed values."""
    return _calibration(list(_csv_rows(text)), model, batch)


def from_sailor(data: Mapping[Any, Any], model: ModelSpec, batch: Batch) -> Calibration:
    """Return the calibration in Sailor's profile.json. ConfigError for other content or another number of layers."""
    rows = []
    for micro_size, by_tp in data.items():
        tps: Mapping[Any, Any] = by_tp if isinstance(by_tp, Mapping) else {"?": {}}
        for tp, parts in tps.items():
            where = f"profile: micro-batch {micro_size}, TP {tp}"
            errors = AttributeError, TypeError, ValueError
            hint = "give {MICRO: {TP: {INDEX: [forward, backward, update]}}} in seconds"
            with ConfigError.instead_of(*errors, where=where, hint=hint, what="not Sailor's profile"):
                times = {int(index): tuple(float(s) for s in seconds) for index, seconds in parts.items()}
            last = len(times) - 1
            is_other = last < 2 or set(times) != set(range(last + 1)) or any(len(t) != 3 for t in times.values())
            hint = "give three times (forward, backward, update) for each index, counted from 0"
            ConfigError.refuse(where, (is_other, "not Sailor's profile", hint))
            problem = f"profile has {last - 1} layers, {model.name} has {model.layers}"
            ConfigError.refuse(where, (last - 1 != model.layers, problem, _MODEL_HINT))
            layer_times = [median(times[i][column] for i in range(1, last)) for column in range(3)]
            seconds_of: dict[str, Any] = {"layer": layer_times, "embedding": times[0], "head": times[last]}
            rows += [Row(part, int(tp), int(micro_size), *seconds) for part, seconds in seconds_of.items()]
    return _calibration(rows, model, batch)


def _csv_rows(text: str) -> Iterator[Row]:
    declared = keys(Row)
    required = [name for name, k in declared.items() if k.default is REQUIRED]
    reader = csv.DictReader(StringIO(text))
    columns = reader.fieldnames or ()
    ConfigError.refuse(
        "profile",
        *((name not in declared, f"unknown column {name!r}", nearest(str(name), declared)) for name in columns),
        *((name not in columns, f"no column {name}", f"give at least {', '.join(required)}") for name in required),
    )
    for row in reader:
        where, is_uneven = f"profile: line {reader.line_num}", None in row or None in row.values()
        ConfigError.refuse(
            where,
            (is_uneven, "the number of values differs from the number of columns", "give one value per column"),
            ("" in map(row.get, required), "a value is missing", "complete the row"),
        )
        yield make(Row, {name: _parse_cell(name, value) for name, value in row.items() if value != ""}, where)


def _parse_cell(name: str, text: str) -> Any:
    """Return a cell in its column's type. Text that is not a number stays text, and Row refuses it."""
    if name in ("part", "gpu"):
        return text
    try:
        return float(text) if name.endswith("_s") else int(text)
    except ValueError:
        return text


def _calibration(rows: list[Row], model: ModelSpec, batch: Batch) -> Calibration:
    ConfigError.refuse("profile", (not rows, "no rows", "give a row for each part and shape"))
    other_widths = {row.hidden for row in rows} - {0, model.hidden}  # 0: unknown
    problem = f"profile has hidden={', '.join(map(str, sorted(other_widths)))}, {model.name} has hidden={model.hidden}"
    ConfigError.refuse("profile", (other_widths, problem, _MODEL_HINT))
    gpus = dict.fromkeys(row.gpu for row in rows)
    pools = (_measured_pool([r for r in rows if r.gpu == gpu], gpu, model, batch) for gpu in gpus)
    return Calibration(tuple(pools), made="a layer profile")


def _measured_pool(rows: list[Row], gpu: str, model: ModelSpec, batch: Batch) -> MeasuredPool:
    updates = [r.update_s / layer_parameters(model, r.tp) for r in rows if r.part == "layer" and r.update_s is not None]
    parts = tuple(_measured_part(row, rows, model, batch) for row in rows)
    return MeasuredPool(gpu=gpu, parts=parts, optimizer_s=median(updates) if updates else None)


def _measured_part(row: Row, rows: list[Row], model: ModelSpec, batch: Batch) -> MeasuredPart:
    """Return the measured part of `row`, with times up to those of larger micro-batches of the same shape."""
    alike = [r for r in rows if (r.part, r.tp, r.sequence) == (row.part, row.tp, row.sequence)]
    larger = [r for r in alike if r.micro_size >= row.micro_size]
    sequence = row.sequence or batch.sequence_length
    tokens = row.micro_size * sequence
    forward_s, backward_s = min(r.forward_s for r in larger), min(r.backward_s for r in larger)
    flops = part_flops(model, row.part, tokens, sequence, row.tp)
    return MeasuredPart(row.part, model.hidden, tokens, row.tp, flops, forward_s, backward_s, sequence)
