"""Run directories as tables: `load_runs` one row a run, `load_steps` one row a step, `load_stages` one row a stage.

    runs = load_runs("runs/sweep-20250101-120000")
    runs[runs.state == "completed"].groupby("environment").samples_per_s.median()

`path` is a run, a directory of runs, a Hydra multirun tree or a sweep; finished, failed, half-finished and unreadable
runs all have their row. Columns: holmes_hpc/results/columns.py. Where there are more than a few runs, what was read is
cached in `.holmes-cache/` under `path`, if that can be written, and read again when a run's files have changed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from holmes_hpc.errors import ConfigError, RecordError, nearest
from holmes_hpc.records.run import SKIPPED
from holmes_hpc.results.columns import PARTS, RUN_COLUMNS, STAGE_COLUMNS, STEP_COLUMNS
from holmes_hpc.results.loading.run_reader import plain_name
from holmes_hpc.results.loading.shards import RUNS_PER_SHARD, fingerprint, make_shards

CACHE = ".holmes-cache"
FEW = 10  # fewer runs are read again each time, so that no cache appears beside a single run
PathLike = str | os.PathLike[str]
T = TypeVar("T")


def load_runs(path: PathLike, cache: bool = True) -> pd.DataFrame:
    """One row per run below `path`, in order of path; the columns are RUN_COLUMNS. RecordError: no such directory."""
    return _with_shards(path, cache, lambda runs, folder, index: runs)


def load_steps(path: PathLike, columns: Sequence[str] | None = None, runs: Collection[str] | None = None,
               cache: bool = True) -> pd.DataFrame:
    """One row per step of every run below `path`, in order; the columns are STEP_COLUMNS and bytes per NIC kind.

    `columns`: only these, beside `run` and `step`; `runs`: only of these (values of the column `run`).
    """
    def read(table: pd.DataFrame, folder: Path, index: pd.DataFrame) -> pd.DataFrame:
        return _steps(table, folder, index, columns, runs)

    return _with_shards(path, cache, read)


def load_stages(path: PathLike, cache: bool = True) -> pd.DataFrame:
    """One row per pipeline stage of every run with steps: medians of the parts of its step; STAGE_COLUMNS."""
    runs = load_runs(path, cache)
    texts = zip(runs["run"], runs["stage_breakdown"], strict=True)
    rows = [{"run": run, "stage": stage, **parts} for run, text in texts
            if isinstance(text, str) for stage, parts in enumerate(json.loads(text))]
    frame = pd.DataFrame(rows, columns=list(STAGE_COLUMNS))
    return frame.astype({"run": pd.CategoricalDtype(list(runs["run"])), "stage": "int64",
                         **dict.fromkeys(PARTS, "float64")})


def _with_shards(path: PathLike, cache: bool, use: Callable[[pd.DataFrame, Path, pd.DataFrame], T]) -> T:
    """Call `use` with the table of runs, the folder of their shards, and where each run's steps are in them."""
    root = Path(path)
    found = _directories(root)
    if cache and len(found) >= FEW:
        folder = root / CACHE
        try:
            folder.mkdir(exist_ok=True)
            if os.access(folder, os.W_OK):
                return use(*_current(folder, found))
        except (OSError, pa.ArrowException):
            pass  # not ours to write, full, or another loader has tidied up
    with tempfile.TemporaryDirectory(prefix="holmes-cache-") as temporary:
        return use(*_current(Path(temporary), found))


def _directories(root: Path) -> list[tuple[str, str]]:
    """(key, directory) of everything below `root` that is, or was to become, a run."""
    if not root.is_dir():
        raise RecordError("no such directory", where=str(root), hint="give a run directory, or one that holds runs")
    found = []
    for directory, below, files in os.walk(root):
        recorded = "run.yaml" in files
        if recorded or (".hydra" in below and "multirun.yaml" not in files and os.fspath(root) != directory):
            key = plain_name(os.path.relpath(directory, root))
            found.append((plain_name(root.resolve().name) if key == "." else key.replace(os.sep, "/"), directory))
        if recorded:
            below.clear()
        below[:] = [name for name in below if name not in SKIPPED and name != CACHE]
    return sorted(found, key=lambda item: [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in item[0].split("/")])


def _current(folder: Path, found: Sequence[tuple[str, str]]) -> tuple[pd.DataFrame, Path, pd.DataFrame]:
    """Bring the shards in `folder` up to date. Back: the runs, `folder`, and per run its `shard` and `row` there."""
    wanted = {key: (directory, fingerprint(directory)) for key, directory in found}
    have = _read_index(folder, wanted)
    if len({shard for shard, _ in have.values()}) > 20 + 4 * len(have) // RUNS_PER_SHARD:
        have = {}  # runs came one by one and their shards are many: make them anew, well filled
    missing = [(key, directory) for key, (directory, _) in wanted.items() if key not in have]
    if missing:
        for shard in make_shards(folder, missing):
            table = pq.read_table(folder / f"runs-{shard}.parquet")
            for row, key in enumerate(table["run"].to_pylist()):
                have[key] = (shard, row)
    _tidy(folder, {shard for shard, _ in have.values()})
    index = pd.DataFrame([have[key] for key in wanted], columns=["shard", "row"], index=pd.Index(wanted, name="run"))
    parts = []
    for name, rows in index.groupby("shard", sort=False):
        parts.append(pq.read_table(folder / f"runs-{name}.parquet").take(pa.array(rows["row"].to_numpy())))
    table = pa.concat_tables(parts).drop(["fingerprint"]) if parts else None
    frame = _typed(table)
    frame = frame.set_index("run").reindex(list(wanted)).reset_index() if len(frame) else frame
    places = [plain_name(directory) for directory, _ in wanted.values()]  # they may have been moved
    frame["path"] = pd.array(places, dtype="string")
    return frame.astype({"run": "string"}), folder, index


def _read_index(folder: Path, wanted: dict[str, tuple[str, str]]) -> dict[str, tuple[str, int]]:
    """Where the runs are whose files are still as they were read: key -> (shard, row)."""
    have: dict[str, tuple[str, int]] = {}
    for path in sorted(folder.glob("runs-*.parquet")):
        try:
            table = pq.read_table(path, columns=["run", "fingerprint", "steps"])
        except (OSError, pa.ArrowException):
            continue  # broken or gone: its runs are read again
        shard = path.stem.removeprefix("runs-")
        if any(count for count in table["steps"].to_pylist()) and not (folder / f"steps-{shard}.parquet").exists():
            continue
        entries = zip(table["run"].to_pylist(), table["fingerprint"].to_pylist(), strict=True)
        for row, (key, seen) in enumerate(entries):
            if key in wanted and wanted[key][1] == seen:
                have[key] = (shard, row)
    return have


def _tidy(folder: Path, used: set[str]) -> None:
    """Drop shards that no run needs any more."""
    for path in folder.glob("*.parquet"):
        if path.stem.partition("-")[2] not in used:
            with suppress(OSError):
                path.unlink()


def _typed(table: pa.Table | None) -> pd.DataFrame:
    types = {name: kind for name, (kind, _) in RUN_COLUMNS.items()}
    if table is None:
        return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in types.items()})
    return table.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype(),
                                         pa.bool_(): pd.BooleanDtype()}.get).astype(types)


def _steps(table: pd.DataFrame, folder: Path, index: pd.DataFrame, columns: Sequence[str] | None,
           runs: Collection[str] | None) -> pd.DataFrame:
    keys, counts = list(table["run"]), table["steps"].fillna(0).to_numpy(dtype=np.int64)
    chosen = set(keys if runs is None else runs)
    if unknown := chosen - set(keys):
        raise ConfigError(f"no run {min(unknown)!r}", where="load_steps", hint=nearest(min(unknown), keys))
    counts = np.where([key in chosen for key in keys], counts, 0)
    ends = np.cumsum(counts)
    targets = {key: (int(end - count), int(end)) for key, end, count in zip(keys, ends, counts, strict=True) if count}
    places = [(str(name), {int(row): targets[key] for key, row in rows["row"].items() if key in targets})
              for name, rows in index.groupby("shard", sort=False)]
    shards = [_Shard(folder, name, rows) for name, rows in places if rows]
    data = _columns(shards, int(ends[-1]) if len(ends) else 0, columns)
    codes = np.repeat(np.arange(len(keys), dtype=np.int32), counts)
    named = pd.Categorical.from_codes(codes, categories=pd.Index(keys, dtype="object"), ordered=False)
    frame = pd.DataFrame(data, copy=False)
    frame.insert(0, "run", pd.Series(named, index=frame.index))
    return frame


class _Shard:
    """The steps of one shard: where each of its runs is in it, and where (`targets`: row -> begin, end) it belongs."""

    def __init__(self, folder: Path, name: str, targets: dict[int, tuple[int, int]]) -> None:
        self.path, self.targets = folder / f"steps-{name}.parquet", targets
        self.names: list[str] = pq.read_schema(self.path).names
        counts = pq.read_table(folder / f"runs-{name}.parquet", columns=["steps"])["steps"].fill_null(0).to_numpy()
        self._starts = np.concatenate([[0], np.cumsum(counts)])

    def read_into(self, data: dict[str, NDArray[Any]]) -> None:
        """Copy every run's steps to their place in the columns `data`."""
        file = pq.ParquetFile(self.path, memory_map=True, pre_buffer=False)
        pieces = sorted((int(self._starts[row]), *target) for row, target in self.targets.items())
        merged: list[list[int]] = []  # neighbours that stay neighbours are copied at once
        for start, begin, end in pieces:
            if merged and merged[-1][2] == begin and merged[-1][0] + merged[-1][2] - merged[-1][1] == start:
                merged[-1][2] = end
            else:
                merged.append([start, begin, end])
        for name, column in data.items():  # each at a time: it stays in the processor's cache, in half the time
            have = name in self.names
            values = file.read(columns=[name], use_threads=False)[name].to_numpy() if have else None
            for start, begin, end in merged:
                column[begin:end] = math.nan if values is None else values[start:start + end - begin]


def _columns(shards: list[_Shard], count: int, wanted: Sequence[str] | None) -> dict[str, NDArray[Any]]:
    """The columns in documented order, read shard by shard into their final memory."""
    types = {name: kind for name, (kind, _) in STEP_COLUMNS.items() if kind != "category"}
    bytes_of = sorted({name for shard in shards for name in shard.names} - {*types, "row"})
    names = [*types, *(name for name in bytes_of if name.startswith("tx")),
             *(name for name in bytes_of if name.startswith("rx"))]
    if wanted is not None:
        for name in wanted:
            if name not in (*names, "run"):
                raise ConfigError(f"no column {name!r}", where="load_steps", hint=nearest(name, names))
        names = ["step", *(name for name in dict.fromkeys(wanted) if name not in ("run", "step"))]
    data: dict[str, NDArray[Any]] = {name: np.empty(count, dtype=types.get(name, "float64")) for name in names}
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(lambda shard: shard.read_into(data), shards):
            pass
    return data
