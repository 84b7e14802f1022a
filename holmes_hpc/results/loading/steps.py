"""One run's metrics.jsonl as arrays: pyarrow reads it, or the record's own reader where a line is broken or odd."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
from holmes_hpc.records.untrusted import MOST_LEVELS, from_json, too_deep
from holmes_hpc.results.columns import STEP_COLUMNS, arrow_type
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
)  # and nic_bytes, whose fields are the run's own
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """One run's steps, in order, each once: columns as arrays. `scalars[name]`: [steps]; `breakdown`: [parts, stages,
    steps]; `tx`, `rx`: {fabric or ethernet: [steps]}; `peak`: the most memory of any rank. NaN: nothing recorded.
    `earlier`, `warmup`: how many of the first steps were made under an earlier plan, and then to warm up. `broken`:
    lines that could not be read. `missing`: fields that training writes in every line and that no line has."""

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
    means: Floats = field(init=False)  # of the breakdown over stages, [parts, steps]

    def __post_init__(self) -> None:
        object.__setattr__(self, "means", mean_over_stages(self.breakdown))

    def __len__(self) -> int:
        return len(self.step)

    @property
    def warmup(self) -> int:
        return warmup_steps(len(self) - self.earlier)

    @property
    def left_out(self) -> int:
        """How many of the first steps do not count."""
        return self.earlier + self.warmup

    def table(self) -> pa.Table:
        """The documented step columns but `run`."""
        columns: dict[str, Any] = {
            "step": self.step,
            "attempt": self.attempt,
            "warmup": np.arange(len(self)) < self.left_out,
            **self.scalars,
            **dict(zip(PARTS, self.means, strict=True)),
        }
        made = {
            name: pa.array(columns[name]).cast(arrow_type(kind))
            for name, (kind, _) in STEP_COLUMNS.items()
            if name != "run"
        }
        for way, values in (("tx", self.tx), ("rx", self.rx)):
            made |= {f"{way}_bytes_{name}": pa.array(values[name]) for name in sorted(values)}
        return pa.table(made)


def mean_over_stages(breakdown: Floats) -> Floats:
    """[parts, stages, steps] -> [parts, steps], of the stages that said something; NaN where none did."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(breakdown, axis=1) / (~np.isnan(breakdown)).sum(axis=1))


def read_steps(run: RunDirectory, first_attempt: int = 1) -> Steps:
    """A run's steps. Half lines, broken lines, missing keys and lines of earlier attempts are all right. Steps of
    attempts before `first_attempt` are `earlier` ones."""
    data = run.metrics_bytes()
    data = data[: data.rfind(b"\n") + 1]
    try:
        if any(len(line) > MOST_LEVELS and too_deep(line) for line in data.split(b"\n")):
            raise _OutOfOrder  # pyarrow would crash
        return _steps(data, first_attempt)
    except (pa.ArrowException, _OutOfOrder):  # the record's own reader knows what counts
        lines = b"".join(to_json(_regular(line)).encode() + b"\n" for line in run.metrics())
    return _steps(lines, first_attempt, broken=sum(not _readable(line) for line in data.splitlines()))


def no_steps() -> Steps:
    """Of a run that never did one."""
    return _steps(b"", 1)


class _OutOfOrder(Exception):
    """Not every line counts: a step was made twice, the lines are of several writers, or one is no line of ours."""


def _steps(data: bytes, first_attempt: int, broken: int = 0) -> Steps:
    """Of whole lines in order. ArrowException where one is broken or has a value of another type, _OutOfOrder."""
    lines = (
        arrow_json.read_json(
            pa.BufferReader(data),
            arrow_json.ReadOptions(use_threads=False, block_size=max(len(data), 1)),
            arrow_json.ParseOptions(explicit_schema=LINE),
        ).combine_chunks()
        if data
        else LINE.empty_table()
    )
    step, attempt = lines["step"].to_numpy(), lines["attempt"].fill_null(1).to_numpy()
    if lines["step"].null_count or (np.diff(step) <= 0).any() or (np.diff(attempt) < 0).any():
        raise _OutOfOrder
    sent, breakdown = _nic_bytes(lines), _breakdown(lines)
    return Steps(
        step,
        attempt,
        scalars={name: lines[name].to_numpy() for name in SCALARS},
        breakdown=breakdown,
        tx=sent["tx"],
        rx=sent["rx"],
        peak=_most(lines["peak_memory_bytes"]),
        earlier=int((attempt < first_attempt).sum()),
        broken=broken,
        missing=tuple(_missing(lines, breakdown)),
    )


def _missing(lines: pa.Table, breakdown: Floats) -> Iterator[str]:
    """What training writes in every line and no line has: fields, and parts of the breakdown."""
    for name, one in FIELDS.items():
        if one.always and (name not in lines.column_names or lines[name].null_count == len(lines)):
            yield name
    if breakdown.shape[1]:
        yield from (f"breakdown.{part}" for part, found in zip(PARTS, breakdown, strict=True) if np.isnan(found).all())


def _breakdown(lines: pa.Table) -> Floats:
    """[parts, stages, steps]; NaN where a line does not say."""
    lists = lines["breakdown"].combine_chunks()
    stages = pc.max(pc.list_value_length(lists)).as_py() or 0
    made = np.full((len(PARTS), stages, len(lines)), math.nan)
    at = pc.list_parent_indices(lists).to_numpy()
    stage = np.arange(len(at)) - np.searchsorted(at, at)  # how many of the same line come before
    for index, part in enumerate(PARTS if len(at) else ()):  # a newer release's lines may have more
        made[index, stage, at] = pc.struct_field(lists.flatten(), part).to_numpy(zero_copy_only=False)
    return made


def _nic_bytes(lines: pa.Table) -> dict[str, dict[str, Floats]]:
    """{tx or rx: {fabric or ethernet: [steps]}}; a name that a line leaves out carried nothing in its step."""
    sent: dict[str, dict[str, Floats]] = {way: {} for way in DIRECTIONS}
    if "nic_bytes" not in lines.column_names or not pa.types.is_struct(lines["nic_bytes"].type):
        return sent
    nics = lines["nic_bytes"].combine_chunks()
    for name, pair in zip((one.name for one in nics.type), nics.flatten(), strict=True):
        nothing = pc.and_(nics.is_valid(), pair.is_null())
        ways = dict(zip((one.name for one in pair.type), pair.flatten(), strict=True)) if pair.type.num_fields else {}
        for way in DIRECTIONS:
            counted = ways.get(way, pa.nulls(len(pair))).cast(pa.float64())
            sent[way][name] = pc.if_else(nothing, 0.0, counted).to_numpy(zero_copy_only=False)
    return sent


def _most(ranks: pa.ChunkedArray) -> float:
    most = pc.max(pc.list_flatten(ranks)).as_py()
    return math.nan if most is None else float(most)


def _readable(line: bytes) -> bool:
    try:
        int(from_json(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    return True


def _regular(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line with a value of the right type, or null, for every field."""
    stages, nics, ranks = line.get("breakdown"), line.get("nic_bytes"), line.get("peak_memory_bytes")
    return {
        "step": int(line["step"]),
        "attempt": int(line.get("attempt") or 1),
        **{name: _number(line.get(name)) for name in SCALARS},
        "breakdown": [{part: _number(mapping(stage).get(part)) for part in PARTS} for stage in stages]
        if isinstance(stages, list)
        else None,
        "nic_bytes": {name: {way: _number(mapping(pair).get(way)) for way in DIRECTIONS} for name, pair in nics.items()}
        if isinstance(nics, dict)
        else None,
        "peak_memory_bytes": [_number(held) for held in (ranks if isinstance(ranks, list) else [ranks])],
    }


def _number(value: Any) -> float | None:
    found = number(value)
    return None if math.isnan(found) else found
