"""A cache of run directories in Arrow files, so that only changed runs are read again.

The files come in pairs of at most RUNS_PER_PAIR runs: `runs-ID.arrow` has a row per run, `steps-ID.arrow` the steps of
these runs, in the same order. They are memory-mapped."""

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
from holmes_hpc.results.columns import ARROW, FAMILIES, RUN_COLUMNS
from holmes_hpc.results.loading.run_row import read_one
from holmes_hpc.results.loading.steps import NO_STEPS

FILES = ("run.yaml", "plan.yaml", "metrics.jsonl", "result.json")  # the files that a run's row and steps come from
RUNS_PER_PAIR = 500
# Each load of changed runs adds a pair of files. All pairs are merged when more than this number are not full.
MAX_PAIRS = 20
READER_VERSION = 8  # increment it to discard caches when this release reads the same files differently
SCHEMA = pa.schema(
    [
        *((name, ARROW[kind]) for name, (kind, _) in RUN_COLUMNS.items()),
        *((name, pa.string()) for name in FAMILIES),  # {key: value} as JSON, because keys differ between runs
        ("fingerprint", pa.string()),
    ]
)


@dataclass(frozen=True)
class _Pair:
    """The tables in one pair of files. `name`: the ID in the files' names."""

    name: str
    runs: pa.Table
    steps: pa.Table


@dataclass(frozen=True)
class Loaded:
    """The requested runs and their steps. `runs`: a row per requested run, in the order of the request; `steps`: a row
    per step of these and other runs. Run i has ``counts[i]`` steps; the first is row ``starts[i]`` of `steps`."""

    runs: pa.Table
    steps: pa.Table
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    def steps_of(self, rows: Sequence[int]) -> pa.Table:
        """Return the steps of the runs in these rows of `runs`, one run after the other."""
        pieces: list[list[int]] = []
        for start, end in ((int(self.starts[row]), int(self.starts[row] + self.counts[row])) for row in rows):
            if pieces and pieces[-1][1] == start:
                pieces[-1][1] = end
            else:
                pieces.append([start, end])
        return pa.concat_tables([self.steps.slice(0, 0), *(self.steps.slice(a, b - a) for a, b in pieces)])


def fingerprint(directory: str) -> str:
    """Return a text that changes with the run's files: READER_VERSION, and the sizes and times of the files."""
    parts = [str(READER_VERSION)]
    for name in FILES:
        try:
            status = os.stat(os.path.join(directory, name))
        except OSError:
            parts.append("-")
        else:
            parts.append(f"{status.st_size}:{status.st_mtime_ns}")
    return " ".join(parts)


def load(folder: Path, run_dirs: Sequence[tuple[str, str]]) -> Loaded:
    """Return the runs in `run_dirs` from the cache in `folder`. Read new and changed runs into the cache first.
    `run_dirs`: (key, directory) of each run. Raise OSError or ArrowException if files vanish, or the disk is full."""
    fingerprints = {key: fingerprint(directory) for key, directory in run_dirs}
    pairs = _cached_pairs(folder)
    cached = {(key, stamp) for pair in pairs for key, stamp in _fingerprints(pair.runs)}
    missing = [(key, directory) for key, directory in run_dirs if (key, fingerprints[key]) not in cached]
    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        for start in range(0, len(missing), RUNS_PER_PAIR):
            batch = missing[start : start + RUNS_PER_PAIR]
            rows, steps = zip(*pool.map(lambda run_dir: _read(*run_dir), batch), strict=True)
            steps_table = pa.concat_tables(steps, promote_options="default").combine_chunks()
            pairs.append(_write(folder, pa.Table.from_pylist(rows, SCHEMA), steps_table))
    loaded, used = _select(pairs, fingerprints, {key for key, _ in missing})
    if len(used) > MAX_PAIRS + 2 * len(run_dirs) // RUNS_PER_PAIR:
        pairs = used = [_write(folder, loaded.runs, loaded.steps_of(range(len(run_dirs))))]
        loaded, _ = _select(pairs, fingerprints, {key for key, _ in missing})
    _remove_unused(folder, {pair.name for pair in used})
    return loaded


def _read(key: str, directory: str) -> tuple[dict[str, Any], pa.Table]:
    stamp = fingerprint(directory)  # taken before reading, so that later writes are read next time
    row, steps = read_one(RunDirectory(directory), key)
    return {**row, "fingerprint": stamp}, steps.table()


def _select(pairs: list[_Pair], fingerprints: dict[str, str], new_keys: set[str]) -> tuple[Loaded, list[_Pair]]:
    """Return (runs in `fingerprints`, pairs that hold them). `fingerprints`: {key of a run: its current fingerprint}.

    A row is used if its fingerprint is the current one. `new_keys`: keys of runs that were just read. The last row of
    such a run is used even if its fingerprint differs, because the run may have changed while it was read."""
    if not fingerprints:
        return Loaded(SCHEMA.empty_table(), NO_STEPS.table(), *np.zeros((2, 0), dtype=np.int64)), []
    runs = pa.concat_tables([pair.runs for pair in pairs])
    steps = pa.concat_tables([pair.steps for pair in pairs], promote_options="default")
    stamps = enumerate(_fingerprints(runs))
    row_of = {key: row for row, (key, stamp) in stamps if key in new_keys or fingerprints.get(key) == stamp}
    rows = np.array([row_of[key] for key in fingerprints])
    ends = np.cumsum([len(pair.runs) for pair in pairs])
    used = [pairs[index] for index in np.unique(np.searchsorted(ends, rows, side="right"))]
    counts = np.asarray(runs["steps"].fill_null(0).to_numpy(), dtype=np.int64)
    starts = np.cumsum(counts) - counts
    return Loaded(runs.take(pa.array(rows)), steps, starts[rows], counts[rows]), used


def _fingerprints(runs: pa.Table) -> list[tuple[str, str]]:
    """Return (key of the run, its fingerprint) of each row."""
    return list(zip(runs["run"].to_pylist(), runs["fingerprint"].to_pylist(), strict=True))


def _cached_pairs(folder: Path) -> list[_Pair]:
    """Return the readable pairs of files in `folder`. The runs of unreadable pairs are read again later."""
    pairs = []
    for path in sorted(folder.glob("runs-*.arrow")):
        name = path.stem.removeprefix("runs-")
        with suppress(OSError, pa.ArrowException):
            pair = _Pair(name, _map_table(path), _map_table(folder / f"steps-{name}.arrow"))
            if pair.runs.schema == SCHEMA and pc.sum(pair.runs["steps"]).as_py() in (None, len(pair.steps)):
                pairs.append(pair)
    return pairs


def _map_table(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _write(folder: Path, runs: pa.Table, steps: pa.Table) -> _Pair:
    """Write the tables to a new pair of files and return it. Write `runs-*` last: readers see both files or neither."""
    name = uuid.uuid4().hex[:16]
    for kind, table in (("steps", steps), ("runs", runs)):
        temporary = folder / f".{kind}-{name}"
        with pa.ipc.new_file(str(temporary), table.schema) as file:
            file.write_table(table)
        os.replace(temporary, folder / f"{kind}-{name}.arrow")
    return _Pair(name, *(_map_table(folder / f"{kind}-{name}.arrow") for kind in ("runs", "steps")))


def _remove_unused(folder: Path, used: set[str]) -> None:
    """Remove the pairs of files whose names are not in `used`."""
    for path in folder.iterdir():
        if path.stem.partition("-")[2] not in used and path.suffix in (".arrow", ".parquet"):
            with suppress(OSError):
                path.unlink()
