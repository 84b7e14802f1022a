"""A layer profile that somebody else measured, in a calibration's place: rows of a CSV file, or Sailor's profile.json.

CSV: a row for each part and shape, with the columns part (layer, embedding, head), tp, micro_size, forward_s and
backward_s, and if known sequence (else the batch's), gpu (the kind, as the site names it; else any), hidden (refused
where it is another model's) and update_s (of the optimizer, for that part). Sailor (github.com/eth-easl/sailor,
docs/PROFILING.md): {micro-batch size: {TP: {index: [forward, backward, update]}}} in seconds, index 0 the embedding,
the last one the head; it names neither GPU nor model. Of two micro-batches the smaller one takes no longer, whatever a
profile says: small shapes are measured with the most noise.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from io import StringIO
from statistics import median
from typing import Annotated, Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.planning.cost.calibration import Calibration, Measured, MeasuredFabric
from holmes_hpc.planning.cost.flops import layer_parameters, part_flops
from holmes_hpc.schema import REQUIRED, Checked, key, keys, refuse


@dataclass(frozen=True)
class Row(Checked, where="profile"):
    """One part in one shape. `sequence` 0: the batch's; `hidden` 0: not known."""

    part: Annotated[str, key("of a model", one_of=("layer", "embedding", "head"))]
    tp: Annotated[int, key("tensor parallel", ge=1)]
    micro_size: Annotated[int, key("sequences of a micro-batch", ge=1)]
    forward_s: Annotated[float, key("of a forward pass", unit="s", ge=0, le=1e4)]
    backward_s: Annotated[float, key("of a backward pass", unit="s", ge=0, le=1e4)]
    update_s: Annotated[float | None, key("of the optimizer", unit="s", ge=0, le=1e4)] = None
    sequence: Annotated[int, key("tokens of a sequence", ge=0)] = 0
    hidden: Annotated[int, key("width of the residual stream", ge=0)] = 0
    gpu: str = ""


def is_sailors(data: Any) -> bool:
    """Whether plain data can be Sailor's profile: all its keys are numbers."""
    return isinstance(data, Mapping) and bool(data) and all(str(k).isdecimal() for k in data)


def from_csv(text: str, model: ModelSpec, batch: Batch) -> Calibration:
    """From a CSV file's text. ConfigError with the line and what is allowed."""
    return _calibration(list(_csv_rows(text)), model, batch)


def from_sailor(data: Mapping[Any, Any], model: ModelSpec, batch: Batch) -> Calibration:
    """From the content of Sailor's profile.json. ConfigError where it is none, or has another number of layers."""
    rows = []
    for micro, by_tp in data.items():
        tps: Mapping[Any, Any] = by_tp if isinstance(by_tp, Mapping) else {"?": {}}
        for tp, parts in tps.items():
            where = f"profile: micro-batch {micro}, TP {tp}"
            try:
                times = {int(index): tuple(float(s) for s in each) for index, each in parts.items()}
            except (AttributeError, TypeError, ValueError):
                raise ConfigError(
                    "not Sailor's profile",
                    where=where,
                    hint="give {MICRO: {TP: {INDEX: [forward, backward, update]}}} in seconds",
                ) from None
            last = len(times) - 1
            refuse(
                where,
                (
                    last < 2 or set(times) != set(range(last + 1)) or any(len(t) != 3 for t in times.values()),
                    "not Sailor's profile",
                    "give three times for each index from 0",
                ),
                (
                    last - 1 != model.layers,
                    f"it is of a model of {last - 1} layers, {model.name} has {model.layers}",
                    "give this model's profile, or `holmes calibrate`",
                ),
            )
            inner = [median(times[i][way] for i in range(1, last)) for way in range(3)]
            rows += [
                Row(part, int(tp), int(micro), *each)
                for part, each in (("layer", inner), ("embedding", times[0]), ("head", times[last]))
            ]
    return _calibration(rows, model, batch)


def _csv_rows(text: str) -> Iterator[Row]:
    declared = keys(Row)
    reader = csv.DictReader(StringIO(text))
    columns = reader.fieldnames or ()
    unknown = [name for name in columns if name not in declared]
    missing = [name for name, k in declared.items() if k.default is REQUIRED and name not in columns]
    refuse(
        "profile",
        *((True, f"unknown column {name!r}", nearest(str(name), declared)) for name in unknown),
        *((True, f"no column {name}", f"give {', '.join(declared)}") for name in missing),
    )
    for row in reader:
        where = f"profile: line {reader.line_num}"
        if None in row or None in row.values():
            raise ConfigError("another number of values than columns", where=where, hint="write one for each column")
        try:
            yield Row(**{name: _value(name, value) for name, value in row.items() if value != ""})
        except (TypeError, ConfigError) as e:
            what, hint = (e.what, e.hint) if isinstance(e, ConfigError) else ("a value is missing", "fill the row")
            raise ConfigError(what, where=where, hint=hint) from None


def _value(name: str, text: str) -> Any:
    """A cell as its column has it; what is no number stays text, which the row refuses."""
    if name in ("part", "gpu"):
        return text
    try:
        return float(text) if name.endswith("_s") else int(text)
    except ValueError:
        return text


def _calibration(rows: list[Row], model: ModelSpec, batch: Batch) -> Calibration:
    widths = {row.hidden for row in rows} - {0, model.hidden}
    refuse(
        "profile",
        (not rows, "no rows", "give a row for each part and shape"),
        (
            widths,
            f"it is of a model of width {', '.join(map(str, sorted(widths)))}, {model.name} is {model.hidden} wide",
            "give this model's profile, or `holmes calibrate`",
        ),
    )
    return Calibration(
        tuple(
            _of_one_kind([r for r in rows if r.gpu == gpu], gpu, model, batch)
            for gpu in dict.fromkeys(r.gpu for r in rows)
        ),
        made="a layer profile",
    )


def _of_one_kind(rows: list[Row], gpu: str, model: ModelSpec, batch: Batch) -> MeasuredFabric:
    updates = [r.update_s / layer_parameters(model, r.tp) for r in rows if r.part == "layer" and r.update_s is not None]
    return MeasuredFabric(
        gpu=gpu,
        parts=tuple(_measured(r, model, batch) for r in _rising(rows)),
        optimizer_s=median(updates) if updates else None,
    )


def _rising(rows: list[Row]) -> Iterator[Row]:
    """The rows, with no time longer than that of a larger micro-batch of the same part, TP and sequence."""
    for row in rows:
        larger = [
            r
            for r in rows
            if (r.part, r.tp, r.sequence) == (row.part, row.tp, row.sequence) and r.micro_size >= row.micro_size
        ]
        yield replace(row, forward_s=min(r.forward_s for r in larger), backward_s=min(r.backward_s for r in larger))


def _measured(row: Row, model: ModelSpec, batch: Batch) -> Measured:
    sequence = row.sequence or batch.sequence_length
    tokens = row.micro_size * sequence
    flops = part_flops(model, row.part, tokens, sequence, row.tp)
    return Measured(
        row.part,
        model.hidden,
        tokens,
        tp=row.tp,
        flops=flops,
        forward_s=row.forward_s,
        backward_s=row.backward_s,
        sequence=sequence,
    )
