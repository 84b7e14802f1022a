"""The metrics of one run as arrays.

pyarrow reads metrics.jsonl. If a line is broken or unusual, the slower reader in `records` reads the file instead."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from holmes_hpc.records.files import to_json
from holmes_hpc.records.metrics import DIRECTIONS, FIELDS, PARTS
from holmes_hpc.records.rates import warmup_steps
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import MAX_LEVELS, from_json, too_deep
from holmes_hpc.results.columns import ARROW, STEP_COLUMNS
from holmes_hpc.results.plans import mapping, number

SCALARS = tuple(name for name in STEP_COLUMNS if name in FIELDS and name not in ("step", "attempt"))
LINE = pa.schema(
    [
        ("step", pa.int64()),
        ("attempt", pa.int64()),
        *((name, pa.float64()) for name in SCALARS),
        ("breakdown", pa.list_(pa.struct([(part, pa.float64()) for part in PARTS]))),
        ("peak_memory_bytes", pa.list_(pa.float64())),
    ]
)  # without nic_bytes, whose fields differ between runs
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """The metrics of one run's steps, in order and without repeated steps. NaN stands for a value not recorded.

    Shapes: `scalars`: {field: [steps]}; `breakdown`: [parts, stages, steps], in seconds; `tx`, `rx`: {fabric or
    ethernet: [steps]}, in bytes. `peak`: the maximum memory over ranks and steps, in bytes. `earlier`: how many steps
    at the start ran under an earlier plan (the `warmup` steps follow them). `broken`: the number of unreadable lines.
    `missing`: fields that every line should have and no line has."""

    step: NDArray[np.int64]
    attempt: NDArray[np.int64]
    scalars: dict[str, Floats]
    breakdown: Floats
    tx: dict[str, Floats]
    rx: dict[str, Floats]
    peak: float
    earlier: int
    broken: int = 0
    missing: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def means(self) -> Floats:
        """The mean of `breakdown` over stages, ignoring NaN values, as an array [parts, steps]."""
        known = ~np.isnan(self.breakdown)
        with np.errstate(invalid="ignore"):
            return np.asarray(self.breakdown.sum(axis=1, where=known) / known.sum(axis=1))

    @property
    def warmup(self) -> int:
        """The number of warm-up steps."""
        return warmup_steps(len(self) - self.earlier)

    @property
    def left_out(self) -> int:
        """The number of steps at the start that figures exclude: steps under an earlier plan, and warm-up steps."""
        return self.earlier + self.warmup

    def table(self) -> pa.Table:
        """Return the steps as a table with STEP_COLUMNS (without `run`), followed by the bytes per network."""
        columns: dict[str, Any] = {**self.scalars, **dict(zip(PARTS, self.means, strict=True))}
        columns |= {"step": self.step, "attempt": self.attempt, "warmup": np.arange(len(self)) < self.left_out}
        kinds = {name: ARROW[kind] for name, (kind, _) in STEP_COLUMNS.items() if name != "run"}
        arrays = {name: pa.array(columns[name]).cast(kind) for name, kind in kinds.items()}
        for direction, values in (("tx", self.tx), ("rx", self.rx)):
            arrays |= {f"{direction}_bytes_{name}": pa.array(values[name]) for name in sorted(values)}
        return pa.table(arrays)


def read_steps(run: RunDirectory, first_attempt: int = 1) -> Steps:
    """Return the steps of a run. Steps of attempts before `first_attempt` belong to an earlier plan.

    Broken lines are counted, missing values are NaN. Of a step that several attempts ran, the last one counts."""
    try:
        return _steps(run.metrics_blocks(), first_attempt)
    except (pa.ArrowException, _UnusualLines):  # the slower reader selects the valid lines
        lines = b"".join(to_json(_regular(line)).encode() + b"\n" for line in run.metrics())
    broken = sum(not _readable(line) for block in run.metrics_blocks() for line in block.splitlines())
    return _steps([lines], first_attempt, broken)


class _UnusualLines(Exception):
    """The file has lines that only the slower reader handles: nested deeply, or with repeated or missing steps."""


def _steps(blocks: Iterable[bytes], first_attempt: int, broken: int = 0) -> Steps:
    """Return the steps in `blocks` of complete lines of metrics.jsonl. `broken`: see :class:`Steps`. Raise
    ArrowException for a broken line or a value of the wrong type, _UnusualLines for a repeated or missing step."""
    tables = LINE.empty_table(), *(_lines(block) for block in blocks if block)
    lines = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    step, attempt = lines["step"].to_numpy(), lines["attempt"].fill_null(1).to_numpy()
    if lines["step"].null_count or (np.diff(step) <= 0).any() or (np.diff(attempt) < 0).any():
        raise _UnusualLines
    scalars, breakdown = {name: lines[name].to_numpy() for name in SCALARS}, _breakdown(lines)
    peak, missing = pc.max(pc.list_flatten(lines["peak_memory_bytes"])).as_py(), tuple(_missing(lines, breakdown))
    earlier = int((attempt < first_attempt).sum())
    tx, rx = _nic_bytes(lines).values()
    peak = math.nan if peak is None else peak
    return Steps(step, attempt, scalars, breakdown, tx, rx, peak, earlier, broken, missing)


def _lines(block: bytes) -> pa.Table:
    """Return a block of lines of metrics.jsonl as a table. Raise as :func:`_steps`."""
    if any(len(line) > MAX_LEVELS and too_deep(line) for line in block.split(b"\n")):
        raise _UnusualLines  # deep nesting crashes pyarrow
    options = arrow_json.ReadOptions(use_threads=False, block_size=len(block))
    return arrow_json.read_json(pa.BufferReader(block), options, arrow_json.ParseOptions(explicit_schema=LINE))


def _missing(lines: pa.Table, breakdown: Floats) -> Iterator[str]:
    """Yield the names of fields, and of parts of the breakdown, that every line should have and no line has."""
    for name, definition in FIELDS.items():
        if definition.always and (name not in lines.column_names or lines[name].null_count == len(lines)):
            yield name
    if breakdown.shape[1]:
        is_missing = np.asarray(np.isnan(breakdown).all(axis=(1, 2)))
        yield from (f"breakdown.{part}" for part, missing in zip(PARTS, is_missing, strict=True) if missing)


def _breakdown(lines: pa.Table) -> Floats:
    """Return the seconds of each part as an array [parts, stages, steps]; NaN where a line has no value."""
    lists = lines["breakdown"].combine_chunks()
    stages = pc.max(pc.list_value_length(lists)).as_py() or 0
    values = np.full((len(PARTS), stages, len(lines)), math.nan)
    line_index = pc.list_parent_indices(lists).to_numpy()
    stage_index = np.arange(len(line_index)) - np.searchsorted(line_index, line_index)  # the position within its line
    for index, part in enumerate(PARTS if len(line_index) else ()):  # newer releases may record more parts
        values[index, stage_index, line_index] = pc.struct_field(lists.flatten(), part).to_numpy(zero_copy_only=False)
    return values


def _nic_bytes(lines: pa.Table) -> dict[str, dict[str, Floats]]:
    """Return {tx or rx: {fabric or ethernet: bytes of each step}}.

    If a line's `nic_bytes` omits a network, that network sent and received 0 bytes in the step."""
    counts: dict[str, dict[str, Floats]] = {direction: {} for direction in DIRECTIONS}
    if "nic_bytes" not in lines.column_names or not pa.types.is_struct(lines["nic_bytes"].type):
        return counts
    nics = lines["nic_bytes"].combine_chunks()
    for name, network in zip((f.name for f in nics.type), nics.flatten(), strict=True):
        is_idle = pc.and_(nics.is_valid(), network.is_null())
        directions = [f.name for f in network.type] if network.type.num_fields else []
        by_direction = dict(zip(directions, network.flatten() if directions else [], strict=True))
        for direction in DIRECTIONS:
            counted = by_direction.get(direction, pa.nulls(len(network))).cast(pa.float64())
            counts[direction][name] = pc.if_else(is_idle, 0.0, counted).to_numpy(zero_copy_only=False)
    return counts


def _readable(line: bytes) -> bool:
    try:
        int(from_json(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    return True


def _regular(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl in which every field has a value of the right type, or None."""
    stages, nics, peaks = line.get("breakdown"), line.get("nic_bytes"), line.get("peak_memory_bytes")
    regular: dict[str, Any] = {"step": int(line["step"]), "attempt": int(line.get("attempt") or 1)}
    regular |= {name: _number(line.get(name)) for name in SCALARS}
    regular["peak_memory_bytes"] = [_number(peak) for peak in (peaks if isinstance(peaks, list) else [peaks])]
    if isinstance(stages, list):
        regular["breakdown"] = [_numbers(stage, PARTS) for stage in stages]
    if isinstance(nics, dict):
        regular["nic_bytes"] = {name: _numbers(pair, DIRECTIONS) for name, pair in nics.items()}
    return regular


def _numbers(values: Any, keys: Sequence[str]) -> dict[str, float | None]:
    return {key: _number(mapping(values).get(key)) for key in keys}


def _number(value: Any) -> float | None:
    converted = number(value)
    return None if math.isnan(converted) else converted


NO_STEPS = _steps([], 1)  # the result for a run without steps
