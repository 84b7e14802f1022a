"""metrics.jsonl as arrays: msgspec reads what is whole and regular, the record's own reader the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
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
_Line = defstruct("_Line", [("step", int), *((name, float, math.nan) for name in SCALARS), ("attempt", int, 1),
                            ("breakdown", list[_Part], []),  # type: ignore[valid-type]
                            ("nic_bytes", dict[str, _Pair], {})], gc=False)  # type: ignore[valid-type]
_LINES = msgspec.json.Decoder(_Line)
_COLUMNS = attrgetter("step", "attempt", *SCALARS)
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
        if (step[1:] <= step[:-1]).any():
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
            return _from_data(data)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError):
            pass  # a broken or an unusual line somewhere
    steps = _from_lines(run.metrics())
    steps.broken = sum(not _readable(line) for line in data.splitlines())
    return steps


def _readable(line: bytes) -> bool:
    try:
        int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return False
    return True


def no_steps() -> Steps:
    """A run that never did one."""
    return _from_lines([])


def _from_data(data: bytes) -> Steps:
    """Whole lines that all have the same NIC kinds and number of stages; ValueError, TypeError or MsgspecError if they
    have not, or say null. What is missing is NaN."""
    pieces = [_piece(piece) for piece in _pieces(data)]
    if any(piece[0] != pieces[0][0] for piece in pieces):
        raise ValueError("the NIC kinds or the number of stages change")
    kinds, stages = pieces[0][0]
    columns, parts, pairs = (np.concatenate(arrays, axis=1) for arrays in list(zip(*pieces, strict=True))[1:])
    step, attempt = columns[:2].astype(np.int64)
    tx, rx = (dict(zip(kinds, way.reshape(len(step), len(kinds)).T, strict=True)) for way in pairs)
    return Steps(step, attempt, dict(zip(SCALARS, columns[2:], strict=True)),
                 parts.reshape(len(PARTS), len(step), stages).transpose(0, 2, 1), tx, rx, _peak(data, attempt))


def _pieces(data: bytes) -> Iterator[bytes]:
    """Of some whole lines each: what is made of a piece stays in the processor's cache, which halves the time."""
    at = 0
    while at < len(data):
        end = data.index(b"\n", min(at + PIECE, len(data) - 1)) + 1
        yield data[at:end]
        at = end


def _piece(data: bytes) -> tuple[tuple[tuple[str, ...], int], Floats, Floats, Floats]:
    """((NIC kinds, stages), [step, attempt and scalars, lines], [parts, lines x stages], [tx and rx, lines x kinds])"""
    lines: Sequence[Any] = _LINES.decode_lines(data)
    breakdowns, nics = ([*map(attrgetter(name), lines)] for name in ("breakdown", "nic_bytes"))
    kinds, stages = {*map(tuple, nics)}, {*map(len, breakdowns)}
    if len(kinds) > 1 or len(stages) > 1:
        raise ValueError("the NIC kinds or the number of stages change")
    columns = _numbers(map(_COLUMNS, lines), 2 + len(SCALARS))
    parts = _numbers(map(astuple, chain.from_iterable(breakdowns)), len(PARTS))
    pairs = _numbers(map(astuple, chain.from_iterable(map(dict.values, nics))), 2)
    return (kinds.pop(), stages.pop()), columns, parts, pairs


def _numbers(rows: Iterable[tuple[Any, ...]], width: int) -> Floats:
    """Rows of `width` numbers as columns, [width, rows]."""
    return np.ascontiguousarray(np.fromiter(chain.from_iterable(rows), dtype=np.float64).reshape(-1, width).T)


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
        for name, pair in (entry["nic_bytes"].items() if isinstance(entry.get("nic_bytes"), dict) else ()):
            for direction in ("tx", "rx"):
                sent[direction][name][i] = _number(pair.get(direction)) if isinstance(pair, dict) else math.nan
    return Steps(np.array([int(e["step"]) for e in lines], dtype=np.int64),
                 np.array([int(e.get("attempt") or 1) for e in lines], dtype=np.int64),
                 {name: np.array([_number(e.get(name)) for e in lines], dtype=np.float64) for name in SCALARS},
                 breakdown, sent["tx"], sent["rx"], _most(lines))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
