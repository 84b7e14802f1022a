"""Run directories as tables: `load_runs` one row a run, `load_steps` one row a step, `load_stages` one row a stage.

    runs = load_runs("runs/sweep-20250101-120000")
    runs[runs.state == "completed"].groupby("environment").samples_per_s.median()

`path` is a run, a directory of runs, a Hydra multirun tree or a sweep; finished, failed, half-finished and unreadable
runs all have their row. Columns: holmes_hpc/results/columns.py. Where there are more than a few runs, what was read is
cached in `.holmes-cache/` under `path`, if that can be written, and read again when a run's files have changed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from holmes_hpc.errors import ConfigError, RecordError, nearest
from holmes_hpc.records.schema import SKIPPED
from holmes_hpc.results.columns import (
    FAMILIES,
    PARTS,
    RUN_COLUMNS,
    STAGE_COLUMNS,
    STEP_COLUMNS,
    family_columns,
    stage_breakdown,
)
from holmes_hpc.results.loading import cache as kept
from holmes_hpc.results.loading.run_row import plain_name

CACHE = ".holmes-cache"
FEW = 10  # fewer runs are read again each time, so that no cache appears beside a single run
PathLike = str | os.PathLike[str]


def load_runs(path: PathLike, cache: bool = True) -> pd.DataFrame:
    """One row per run below `path`, in order of path; the columns are RUN_COLUMNS, then those of
    FAMILIES. RecordError: no such directory."""
    found = _directories(Path(path))
    table = _load(Path(path), found, cache).runs
    frame = table.select(list(RUN_COLUMNS)).to_pandas(
        types_mapper={pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype(), pa.bool_(): pd.BooleanDtype()}.get
    )
    frame["path"] = pd.array([plain_name(directory) for _, directory in found], dtype="string")  # it may have moved
    frame["overrides"] = [[] if overrides is None else list(overrides) for overrides in frame["overrides"]]
    wide = frame.astype({name: kind for name, (kind, _) in RUN_COLUMNS.items()})
    families: dict[str, pd.Series[Any]] = {}
    for name in FAMILIES:
        families |= family_columns(name, [json.loads(text or "{}") for text in table[name].to_pylist()])
    return pd.concat([wide, pd.DataFrame(families, index=wide.index)], axis=1)


def load_steps(
    path: PathLike, columns: Sequence[str] | None = None, runs: Collection[str] | None = None, cache: bool = True
) -> pd.DataFrame:
    """One row per step of every run below `path`, in order; the columns are STEP_COLUMNS and bytes per NIC kind.

    `columns`: only these, beside `run` and `step`; `runs`: only of these (values of the column `run`).
    """
    found = _directories(Path(path))
    loaded = _load(Path(path), found, cache)
    keys = [key for key, _ in found]
    chosen = set(keys if runs is None else runs)
    if unknown := chosen - set(keys):
        raise ConfigError(f"no run {min(unknown)!r}", where="load_steps", hint=nearest(min(unknown), keys))
    rows = [row for row, key in enumerate(keys) if key in chosen]
    steps = loaded.steps_of(rows)
    frame = steps.select(_names(steps, columns)).to_pandas()
    codes = np.repeat(np.array(rows, dtype=np.int32), loaded.counts[rows])
    named = pd.Categorical.from_codes(codes, categories=pd.Index(keys, dtype="object"), ordered=False)
    frame.insert(0, "run", pd.Series(named, index=frame.index))
    return frame


def _names(steps: pa.Table, wanted: Sequence[str] | None) -> list[str]:
    """The columns of `steps` that are wanted: in documented order, or in the one asked for."""
    documented = [name for name in STEP_COLUMNS if name != "run"]
    names = [*documented, *sorted(set(steps.column_names) - set(documented), key=lambda name: (name[:1] != "t", name))]
    if wanted is None:
        return names
    for name in wanted:
        if name not in (*names, "run"):
            raise ConfigError(f"no column {name!r}", where="load_steps", hint=nearest(name, names))
    return ["step", *(name for name in dict.fromkeys(wanted) if name not in ("run", "step"))]


def load_stages(path: PathLike, cache: bool = True) -> pd.DataFrame:
    """One row per pipeline stage of every run with steps: medians of the parts of its step; STAGE_COLUMNS."""
    runs = load_runs(path, cache)
    records: list[dict[Any, Any]] = runs.to_dict("records")
    rows = [
        {"run": run["run"], "stage": stage, **parts}
        for run in records
        for stage, parts in enumerate(stage_breakdown(run))
    ]
    frame = pd.DataFrame(rows, columns=list(STAGE_COLUMNS))
    return frame.astype(
        {"run": pd.CategoricalDtype(list(runs["run"])), "stage": "int64", **dict.fromkeys(PARTS, "float64")}
    )


def _load(root: Path, found: Sequence[tuple[str, str]], cache: bool) -> kept.Loaded:
    if cache and len(found) >= FEW:
        folder = root / CACHE
        try:
            folder.mkdir(exist_ok=True)
            if os.access(folder, os.W_OK):
                return kept.load(folder, found)
        except (OSError, pa.ArrowException):
            pass  # not ours to write, full, or another loader has tidied up
    with tempfile.TemporaryDirectory(prefix="holmes-cache-") as temporary:
        return kept.load(Path(temporary), found)


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
