"""metrics.jsonl as arrays: msgspec reads what is whole and regular, the record's own reader the rest."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, starmap
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import defstruct
from msgspec.structs import astuple
from numpy.typing import NDArray

from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results.columns import PARTS, STEP_COLUMNS
from holmes_hpc.results.statistics import warmup_steps

SCALARS = ("time", "step_time_s", "loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_s",
           "samples_per_s", "model_tflops_per_gpu", "hardware_tflops_per_gpu")
_Part = defstruct("_Part", [(part, float, math.nan) for part in PARTS], gc=False)
_Pair = defstruct("_Pair", [(way, float, math.nan) for way in ("tx", "rx")], gc=False)
PIECE = 48 << 10
_KINDS = {name: kind for name, (kind, _) in STEP_COLUMNS.items() if kind != "category"}
Floats = NDArray[np.float64]


class Steps:
    """One run's steps, in order, each once: columns as arrays. `scalars[name]`: [steps]; `breakdown`: [parts, stages,
    steps]; `tx`, `rx`: {fabric or ethernet: [steps]}; `peak`: the most memory of any rank. NaN: nothing recorded.
    `earlier`, `warmup`: how many of the first steps were made under an earlier plan, and then to warm up. `broken`:
    lines that could not be read."""

    def __init__(self, step: NDArray[np.int64], attempt: NDArray[np.int64], scalars: dict[str, Floats],
                 breakdown: Floats, tx: dict[str, Floats], rx: dict[str, Floats], peak: float) -> None:
        if (step[1:] <= step[:-1]).any() or (attempt[1:] < attempt[:-1]).any():
            kept = _counting(step, attempt)
            step, attempt, breakdown = step[kept], attempt[kept], breakdown[:, :, kept]
            scalars, tx, rx = ({name: values[kept] for name, values in group.items()} for group in (scalars, tx, rx))
        self.step, self.attempt, self.scalars, self.breakdown = step, attempt, scalars, breakdown
        self.tx, self.rx, self.peak, self.broken = tx, rx, peak, 0
        self.means = mean_over_stages(breakdown)  # [parts, steps]
        self.earlier, self.warmup = 0, warmup_steps(len(step))

    def __len__(self) -> int:
        return len(self.step)

    def count_from(self, attempt: int) -> None:
        """Leave out the steps of attempts before this one, as well as the warm-up of those that follow."""
        self.earlier = int((self.attempt < attempt).sum())
        self.warmup = warmup_steps(len(self) - self.earlier)

    @property
    def left_out(self) -> int:
        """How many of the first steps do not count."""
        return self.earlier + self.warmup

    def table(self, row: int) -> pa.Table:
        """The documented step columns, with `row` (the run's place in its table of runs) in front."""
        count = len(self)
        columns: dict[str, Any] = {
            "step": self.step, "attempt": self.attempt, "warmup": np.arange(count) < self.left_out, **self.scalars,
            **dict(zip(PARTS, self.means, strict=True))}
        arrays = [pa.array(columns[name].astype(kind, copy=False)) for name, kind in _KINDS.items()]
        names = list(_KINDS)
        for direction, values in (("tx", self.tx), ("rx", self.rx)):
            for name in sorted(values):
                names = [*names, f"{direction}_bytes_{name}"]
                arrays.append(pa.array(values[name]))
        return pa.table([pa.array(np.full(count, row, dtype=np.int32)), *arrays], names=["row", *names])


def _counting(step: NDArray[np.int64], attempt: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which lines count, in order of steps: of a step's lines the latest attempt's, and none of an attempt beyond where
    a later one has gone on from a checkpoint."""
    order = np.lexsort((attempt, step))
    again = step[order][1:] == step[order][:-1]
    if (again & (attempt[order][1:] == attempt[order][:-1])).any():
        raise ValueError("two lines of one step and attempt, which add up")
    order = order[np.append(~again, True)]
    return np.asarray(order[attempt[order] >= np.maximum.accumulate(attempt[order])])


def mean_over_stages(breakdown: Floats) -> Floats:
    """[parts, stages, steps] -> [parts, steps], of the stages that said something; NaN where none did."""
    if breakdown.shape[1] == 0:
        return np.full((breakdown.shape[0], breakdown.shape[2]), math.nan)
    means = breakdown.mean(axis=1)
    if np.isnan(means).any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of no stage at all
            means = np.nanmean(breakdown, axis=1)
    return np.asarray(means)


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
            return _from_data(data)
        except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, OverflowError,
                struct.error):
            pass  # a broken or an unusual line somewhere
    steps = _from_lines(run.metrics())
    steps.broken = sum(not _readable(line) for line in data.splitlines())
    return steps


def _readable(line: bytes) -> bool:
    try:
        int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return False
    return True


def no_steps() -> Steps:
    """A run that never did one."""
    return _from_lines([])


def _from_data(data: bytes) -> Steps:
    """Whole lines that have the NIC kinds and the number of stages of the first; ValueError, TypeError or MsgspecError
    if one has not, or says null. What is missing is NaN."""
    first = json.loads(data[:data.index(b"\n")])
    kinds, stages = tuple(first.get("nic_bytes") or ()), len(first.get("breakdown") or ())
    lines, columns = _reader(kinds, stages)
    width, read, parts = 2 + len(SCALARS) + 2 * len(kinds), [], []
    for piece in _pieces(data):
        found = lines.decode_lines(piece)
        read.append(_doubles(width, map(columns, found)))
        parts.append(_doubles(len(PARTS), map(astuple, chain.from_iterable(map(_BREAKDOWN, found)))))
    table = np.frombuffer(b"".join(read)).reshape(-1, width).T
    step, attempt = table[:2].astype(np.int64)
    scalars, pairs = np.ascontiguousarray(table[2:2 + len(SCALARS)]), np.ascontiguousarray(table[2 + len(SCALARS):])
    breakdown = np.frombuffer(b"".join(parts)).reshape(len(step), stages, len(PARTS)).transpose(2, 1, 0)
    return Steps(step, attempt, dict(zip(SCALARS, scalars, strict=True)), np.ascontiguousarray(breakdown),
                 dict(zip(kinds, pairs[::2], strict=True)), dict(zip(kinds, pairs[1::2], strict=True)),
                 _peak(data, attempt))


_BREAKDOWN = attrgetter("breakdown")


@lru_cache(maxsize=100)
def _reader(kinds: tuple[str, ...], stages: int) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """(decoder of lines with just these NIC kinds, what gives a line's step, attempt, scalars, and tx and rx of each
    kind)."""
    fields = [f"kind_{i}" for i in range(len(kinds))]
    nics = defstruct("_Nics", [(field, _Pair) for field in fields], gc=False, forbid_unknown_fields=True,
                     rename=dict(zip(fields, kinds, strict=True)))
    line = defstruct("_Line", [("step", int), *((name, float, math.nan) for name in SCALARS), ("attempt", int, 1),
                               ("breakdown", tuple[(_Part,) * stages], ()),  # type: ignore[misc]
                               ("nic_bytes", nics, msgspec.field(default_factory=nics))], gc=False)
    pairs = [f"nic_bytes.{field}.{way}" for field in fields for way in ("tx", "rx")]
    return msgspec.json.Decoder(line), attrgetter("step", "attempt", *SCALARS, *pairs)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Of some whole lines each: what is made of a piece stays in the processor's cache, which halves the time."""
    at = 0
    while at < len(data):
        end = data.index(b"\n", min(at + PIECE, len(data) - 1)) + 1
        yield data[at:end]
        at = end


def _doubles(width: int, rows: Iterable[tuple[Any, ...]]) -> bytes:
    """Rows of `width` numbers as float64, a fifth quicker than through numpy."""
    return b"".join(starmap(struct.Struct(f"{width}d").pack, rows))


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


def _from_lines(lines: Sequence[dict[str, Any]]) -> Steps:
    """The same, entry by entry, from what the record's own reader gives: anything that is not a number is NaN."""
    stages = max([len(entry["breakdown"]) for entry in lines if isinstance(entry.get("breakdown"), list)], default=0)
    breakdown = np.full((len(PARTS), stages, len(lines)), math.nan)
    names = sorted({name for entry in lines if isinstance(entry.get("nic_bytes"), dict) for name in entry["nic_bytes"]})
    sent = {direction: {name: np.full(len(lines), math.nan) for name in names} for direction in ("tx", "rx")}
    for i, entry in enumerate(lines):
        for s, stage in enumerate(entry["breakdown"] if isinstance(entry.get("breakdown"), list) else []):
            breakdown[:, s, i] = [_number(stage.get(part)) if isinstance(stage, dict) else math.nan for part in PARTS]
        if isinstance(entry.get("nic_bytes"), dict):
            for name in names:  # a kind that is not named carried nothing
                pair = entry["nic_bytes"].get(name, {"tx": 0, "rx": 0})
                for direction in ("tx", "rx"):
                    sent[direction][name][i] = _number(pair.get(direction)) if isinstance(pair, dict) else math.nan
    return Steps(np.array([int(e["step"]) for e in lines], dtype=np.int64),
                 np.array([int(e.get("attempt") or 1) for e in lines], dtype=np.int64),
                 {name: np.array([_number(e.get(name)) for e in lines], dtype=np.float64) for name in SCALARS},
                 breakdown, sent["tx"], sent["rx"], _most(lines))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
