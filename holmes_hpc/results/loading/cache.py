"""What was read of many run directories, kept in Arrow files, so that only changed runs are read again.

The files come in pairs, of some hundred runs each: `runs-ID.arrow` (a row per run) and `steps-ID.arrow` (the steps of
these runs, in the same order). They are mapped into memory, not copied.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from holmes_hpc.records.run import RunDirectory
from holmes_hpc.results.columns import FAMILIES, RUN_COLUMNS, arrow_type
from holmes_hpc.results.loading.run_row import read_one
from holmes_hpc.results.loading.steps import no_steps

FILES = ("run.yaml", "plan.yaml", "metrics.jsonl", "result.json")  # what a run's row and steps are made from
RUNS_PER_PAIR = 500
MOST_PAIRS = 20  # and as many as runs fill; more are merged, for runs that change one by one each leave a pair
READER = 8  # raise it when this release reads the same files differently: what is kept is then made again
SCHEMA = pa.schema(
    [
        *((name, arrow_type(kind)) for name, (kind, _) in RUN_COLUMNS.items()),
        *((name, pa.string()) for name in FAMILIES),  # JSON: {key: value}, for each run has keys of its own
        ("fingerprint", pa.string()),
    ]
)


@dataclass(frozen=True)
class _Pair:
    """One pair of files, as tables."""

    name: str
    runs: pa.Table
    steps: pa.Table


@dataclass(frozen=True)
class Loaded:
    """`runs`: a row per run, in the order asked for. `steps`: of these runs and of others, in any order; those of row
    i begin at `begins[i]` and are as many as the row's `steps` says (:attr:`counts`)."""

    runs: pa.Table
    steps: pa.Table
    begins: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        return _counts(self.runs)

    def steps_of(self, rows: Sequence[int]) -> pa.Table:
        """The steps of these runs, one after the other."""
        pieces: list[list[int]] = []
        counts = self.counts
        for begin, end in ((int(self.begins[row]), int(self.begins[row] + counts[row])) for row in rows):
            if pieces and pieces[-1][1] == begin:
                pieces[-1][1] = end
            else:
                pieces.append([begin, end])
        return pa.concat_tables([self.steps.slice(0, 0), *(self.steps.slice(a, b - a) for a, b in pieces)])


def fingerprint(directory: str) -> str:
    """Changes when the run does: size and time of its files, and the version of this reader."""
    found = [str(READER)]
    for name in FILES:
        try:
            status = os.stat(os.path.join(directory, name))
        except OSError:
            found.append("-")
        else:
            found.append(f"{status.st_size}:{status.st_mtime_ns}")
    return " ".join(found)


def load(folder: Path, found: Sequence[tuple[str, str]]) -> Loaded:
    """The runs `found` (key, directory), of the files in `folder` where these are up to date; the others are read and
    kept there. OSError or ArrowException when another process tidied up meanwhile, or the disk is full."""
    wanted = {key: fingerprint(directory) for key, directory in found}
    pairs = _kept(folder)
    there = {key for pair in pairs for key, seen in _fingerprints(pair.runs) if wanted.get(key) == seen}
    missing = [(key, directory) for key, directory in found if key not in there]
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        for at in range(0, len(missing), RUNS_PER_PAIR):
            several = missing[at : at + RUNS_PER_PAIR]
            rows, steps = zip(*pool.map(lambda one: _read(*one), several), strict=True)
            pairs.append(
                _write(
                    folder,
                    pa.Table.from_pylist(rows, SCHEMA),
                    pa.concat_tables(steps, promote_options="default").combine_chunks(),
                )
            )
    loaded, used = _choose(pairs, wanted, {key for key, _ in missing})
    if len(used) > MOST_PAIRS + 2 * len(found) // RUNS_PER_PAIR:
        pairs = used = [_write(folder, loaded.runs, loaded.steps_of(range(len(found))))]
        loaded, _ = _choose(pairs, wanted, {key for key, _ in missing})
    _tidy(folder, {pair.name for pair in used})
    return loaded


def _read(key: str, directory: str) -> tuple[dict[str, Any], pa.Table]:
    seen = fingerprint(directory)  # before reading: what is written meanwhile is read again next time
    row, steps = read_one(RunDirectory(directory), key)
    return {**row, "fingerprint": seen}, steps.table()


def _choose(pairs: list[_Pair], wanted: dict[str, str], new: set[str]) -> tuple[Loaded, list[_Pair]]:
    """Of `pairs` the rows that are `wanted` (key -> fingerprint; the latest row of a `new` key whatever it has), and
    the pairs that hold them."""
    if not wanted:
        return Loaded(SCHEMA.empty_table(), no_steps().table(), np.zeros(0, dtype=np.int64)), []
    runs = pa.concat_tables([pair.runs for pair in pairs])
    steps = pa.concat_tables([pair.steps for pair in pairs], promote_options="default")
    row_of = {key: row for row, (key, seen) in enumerate(_fingerprints(runs)) if key in new or wanted.get(key) == seen}
    rows = np.array([row_of[key] for key in wanted])
    ends = np.cumsum([len(pair.runs) for pair in pairs])
    used = [pairs[number] for number in np.unique(np.searchsorted(ends, rows, side="right"))]
    begins = np.concatenate([[0], np.cumsum(_counts(runs))])
    return Loaded(runs.take(pa.array(rows)), steps, begins[rows]), used


def _fingerprints(runs: pa.Table) -> list[tuple[str, str]]:
    return list(zip(runs["run"].to_pylist(), runs["fingerprint"].to_pylist(), strict=True))


def _counts(runs: pa.Table) -> NDArray[np.int64]:
    return np.asarray(runs["steps"].fill_null(0).to_numpy(), dtype=np.int64)


def _kept(folder: Path) -> list[_Pair]:
    """The pairs in `folder` that can be read; the runs of others are read again."""
    pairs = []
    for path in sorted(folder.glob("runs-*.arrow")):
        name = path.stem.removeprefix("runs-")
        with suppress(OSError, pa.ArrowException):
            pair = _Pair(name, _mapped(path), _mapped(folder / f"steps-{name}.arrow"))
            if pair.runs.schema == SCHEMA and pc.sum(pair.runs["steps"]).as_py() in (None, len(pair.steps)):
                pairs.append(pair)
    return pairs


def _mapped(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _write(folder: Path, runs: pa.Table, steps: pa.Table) -> _Pair:
    """Write a pair, `runs-*` last: readers see all of it or nothing."""
    name = uuid.uuid4().hex[:16]
    for kind, table in (("steps", steps), ("runs", runs)):
        temporary = folder / f".{kind}-{name}"
        with pa.ipc.new_file(str(temporary), table.schema) as file:
            file.write_table(table)
        os.replace(temporary, folder / f"{kind}-{name}.arrow")
    return _Pair(name, *(_mapped(folder / f"{kind}-{name}.arrow") for kind in ("runs", "steps")))


def _tidy(folder: Path, used: set[str]) -> None:
    """Drop the files that no run needs any more."""
    for path in folder.iterdir():
        if path.stem.partition("-")[2] not in used and path.suffix in (".arrow", ".parquet"):
            with suppress(OSError):
                path.unlink()
