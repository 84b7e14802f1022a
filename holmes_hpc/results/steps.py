"""metrics.jsonl as a typed table: Arrow's JSON reader for what is whole and regular, the record's own for the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
from numpy.typing import NDArray

from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results.columns import PARTS, STEP_COLUMNS
from holmes_hpc.results.statistics import warmup_steps

SCALARS = ("time", "step_time_s", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_s",
           "samples_per_s", "model_tflops_per_gpu", "hardware_tflops_per_gpu")
_LINE = pa.schema([("step", pa.int64()), *((name, pa.float64()) for name in SCALARS),
                   ("breakdown", pa.list_(pa.struct([(part, pa.float64()) for part in PARTS]))),
                   ("attempt", pa.int64())])
_PAIR = pa.struct([("tx", pa.float64()), ("rx", pa.float64())])
_KINDS = {name: kind for name, (kind, _) in STEP_COLUMNS.items() if kind != "category"}
Floats = NDArray[np.float64]


class Steps:
    """One run's steps, in order, each once: columns as arrays. `scalars[name]`: [steps]; `breakdown`: [parts, stages,
    steps]; `tx`, `rx`: {fabric or ethernet: [steps]}; `peak`: the most memory of any rank. NaN: nothing recorded."""

    def __init__(self, step: NDArray[np.int64], attempt: NDArray[np.int64], scalars: dict[str, Floats],
                 breakdown: Floats, tx: dict[str, Floats], rx: dict[str, Floats], peak: float) -> None:
        if (step[1:] <= step[:-1]).any():
            kept = _counting(step, attempt)
            step, attempt, breakdown = step[kept], attempt[kept], breakdown[:, :, kept]
            scalars, tx, rx = ({name: values[kept] for name, values in group.items()} for group in (scalars, tx, rx))
        self.step, self.attempt, self.scalars, self.breakdown = step, attempt, scalars, breakdown
        self.tx, self.rx, self.peak = tx, rx, peak
        self.means = mean_over_stages(breakdown)  # [parts, steps]
        self.warmup = warmup_steps(len(step))

    def __len__(self) -> int:
        return len(self.step)

    def table(self, row: int) -> pa.Table:
        """The documented step columns, with `row` (the run's place in its table of runs) in front."""
        count = len(self)
        columns: dict[str, Any] = {
            "step": self.step, "attempt": self.attempt, "warmup": np.arange(count) < self.warmup, **self.scalars,
            **dict(zip(PARTS, self.means, strict=True))}
        arrays = [pa.array(columns[name].astype(kind, copy=False)) for name, kind in _KINDS.items()]
        names = list(_KINDS)
        for direction, values in (("tx", self.tx), ("rx", self.rx)):
            for name in sorted(values):
                names = [*names, f"{direction}_bytes_{name}"]
                arrays.append(pa.array(values[name]))
        return pa.table([pa.array(np.full(count, row, dtype=np.int32)), *arrays], names=["row", *names])


def _counting(step: NDArray[np.int64], attempt: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which lines count, in order of steps: of a step's lines the latest attempt's."""
    order = np.lexsort((attempt, step))
    again = step[order][1:] == step[order][:-1]
    if (again & (attempt[order][1:] == attempt[order][:-1])).any():
        raise ValueError("two lines of one step and attempt, which add up")
    return np.asarray(order[np.append(~again, True)])


def mean_over_stages(breakdown: Floats) -> Floats:
    """[parts, stages, steps] -> [parts, steps]; NaN where no stage said anything."""
    if breakdown.shape[1] == 0:
        return np.full((breakdown.shape[0], breakdown.shape[2]), math.nan)
    return np.asarray(breakdown.mean(axis=1))


def read_steps(run: RunDirectory) -> Steps:
    """A run's steps. Half lines, broken lines, missing keys and lines of earlier attempts are all right."""
    try:
        data = run.metrics_path.read_bytes()
    except OSError:
        data = b""
    if not data.endswith(b"\n"):
        data = data[:data.rfind(b"\n") + 1]
    if data:
        try:
            return _from_table(_parse(data), data)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, ValueError, TypeError, KeyError):
            pass  # a broken or an unusual line somewhere
    return _from_lines(run.metrics())


def no_steps() -> Steps:
    """A run that never did one."""
    return _from_lines([])


def _parse(data: bytes) -> pa.Table:
    """Lines as a table. The first line tells the NIC kinds, and what no column is made of is passed over: that takes
    two thirds of the time that finding out what is in all lines takes."""
    first = data[:data.index(b"\n") + 1]
    kinds = json.loads(first).get("nic_bytes") or {}
    table = _read(data, _LINE.append(pa.field("nic_bytes", pa.struct([(kind, _PAIR) for kind in kinds]))), "ignore")
    pairs = table["nic_bytes"].chunk(0).flatten()
    # Has every line these kinds, and none another? One would add a tx and an rx. (Counting letters is quick.)
    letters = int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) == ord("x")))
    if letters == first.count(b"x") * table.num_rows and not any(pair.field(0).null_count for pair in pairs):
        return table
    return _read(data, _LINE, "infer")


def _read(data: bytes, schema: pa.Schema, unexpected: str) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(data),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(data), 1 << 16)),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected))


def _from_table(table: pa.Table, data: bytes) -> Steps:
    step, attempts, breakdown = (table[name].chunk(0) for name in ("step", "attempt", "breakdown"))
    if step.null_count:
        raise ValueError("a line without a step")
    count = table.num_rows
    attempt = (attempts.fill_null(1) if attempts.null_count else attempts).to_numpy()
    scalars = {name: _floats(table[name].chunk(0)) for name in SCALARS}
    tx: dict[str, Floats] = {}
    rx: dict[str, Floats] = {}
    if "nic_bytes" in table.column_names and not pa.types.is_null(table["nic_bytes"].type):
        nic = table["nic_bytes"].chunk(0)
        if (len(nic.type) and nic.null_count) or not all(pa.types.is_struct(field.type) for field in nic.type):
            raise ValueError("nic_bytes are not maps")
        for field, pair in zip(nic.type, nic.flatten(), strict=True):
            for direction, into in (("tx", tx), ("rx", rx)):
                at = field.type.get_field_index(direction)
                into[field.name] = _floats(pair.field(at)) if at >= 0 else np.full(count, math.nan)
    return Steps(step.to_numpy(), attempt, scalars, _stages(breakdown, count), tx, rx, _peak(data, attempt))


def _peak(data: bytes, attempt: NDArray[np.int64]) -> float:
    """The most memory of any rank. A rank tells the most it has held so far, so an attempt's last line has it."""
    if (attempt == attempt[0]).all():
        last = [data[data.rfind(b"\n", 0, -1) + 1:]]
    else:
        lines = data.splitlines()
        last = [lines[at] for at in (*np.flatnonzero(np.diff(attempt)), len(lines) - 1)]
    return _most(json.loads(line) for line in last)


def _most(lines: Iterable[dict[str, Any]]) -> float:
    ranks = [line.get("peak_memory_bytes") for line in lines]
    values = [_number(value) for held in ranks for value in (held if isinstance(held, list) else [held])]
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _floats(values: pa.Array) -> Floats:
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def _stages(lists: pa.Array, count: int) -> Floats:
    """list<struct> -> [parts, stages, steps]; all lines must have the same number of stages."""
    if lists.null_count == count:
        return np.empty((len(PARTS), 0, count))
    flat = lists.flatten()
    lengths = np.diff(lists.offsets.to_numpy())
    if lists.null_count or (lengths != lengths[0]).any():
        raise ValueError("the number of stages changes")
    parts = np.stack([_floats(flat.field(i)) for i in range(len(PARTS))])
    return np.ascontiguousarray(parts.reshape(len(PARTS), count, lengths[0]).transpose(0, 2, 1))


def _from_lines(lines: Sequence[dict[str, Any]]) -> Steps:
    """The same, entry by entry, from what the record's own reader gives: anything that is not a number is NaN."""
    stages = max([len(entry["breakdown"]) for entry in lines if isinstance(entry.get("breakdown"), list)], default=0)
    breakdown = np.full((len(PARTS), stages, len(lines)), math.nan)
    names = sorted({name for entry in lines if isinstance(entry.get("nic_bytes"), dict) for name in entry["nic_bytes"]})
    sent = {direction: {name: np.full(len(lines), math.nan) for name in names} for direction in ("tx", "rx")}
    for i, entry in enumerate(lines):
        for s, stage in enumerate(entry["breakdown"] if isinstance(entry.get("breakdown"), list) else []):
            breakdown[:, s, i] = [_number(stage.get(part)) if isinstance(stage, dict) else math.nan for part in PARTS]
        for name, pair in (entry["nic_bytes"].items() if isinstance(entry.get("nic_bytes"), dict) else ()):
            for direction in ("tx", "rx"):
                sent[direction][name][i] = _number(pair.get(direction)) if isinstance(pair, dict) else math.nan
    return Steps(np.array([int(e["step"]) for e in lines], dtype=np.int64),
                 np.array([int(e.get("attempt") or 1) for e in lines], dtype=np.int64),
                 {name: np.array([_number(e.get(name)) for e in lines], dtype=np.float64) for name in SCALARS},
                 breakdown, sent["tx"], sent["rx"], _most(lines))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
