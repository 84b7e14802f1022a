"""Tables of run directories: one row per run (`load_runs`), per step (`load_steps`) or per stage (`load_stages`).

    runs = load_runs("runs/sweep-20250101-120000")
    runs[runs.state == "completed"].groupby("environment").samples_per_s.median()

`path` is a run, a directory of runs, a Hydra multirun tree or a sweep. Completed, failed, active and unreadable runs
all have a row. holmes_hpc/results/columns.yaml describes the columns. MIN_CACHED_RUNS or more runs are cached in the
directory `.holmes-cache/` below `path`, if it is writable. A cached run is read again when its files have changed."""

import json
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from holmes_hpc.errors import ConfigError, RecordError
from holmes_hpc.records.ownership import other_writers
from holmes_hpc.records.schema import SKIPPED
from holmes_hpc.results.columns import FAMILIES, RUN_COLUMNS, STAGE_COLUMNS, STEP_COLUMNS, family_columns, stage_parts
from holmes_hpc.results.loading import cache as run_cache
from holmes_hpc.results.loading.run_row import plain_name

CACHE = ".holmes-cache"
MIN_CACHED_RUNS = 10  # fewer runs are read each time, so that no cache appears beside a single run
PathLike = str | os.PathLike[str]


def load_runs(path: PathLike, cache: bool = True) -> pd.DataFrame:
    """Return one row per run at or below `path`, sorted by path, with RUN_COLUMNS and the columns of FAMILIES.

    `path`: a run, a directory of runs or a sweep, else RecordError; `cache`: whether to use its `.holmes-cache/`."""
    run_dirs = _directories(Path(path))
    table = _load(Path(path), run_dirs, cache).runs
    frame = table.select(list(RUN_COLUMNS)).to_pandas(
        types_mapper={pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype(), pa.bool_(): pd.BooleanDtype()}.get
    )
    # The runs may have moved since they were cached.
    frame["path"] = pd.array([plain_name(directory) for _, directory in run_dirs], dtype="string")
    frame["overrides"] = [[] if overrides is None else list(overrides) for overrides in frame["overrides"]]
    wide = frame.astype({name: kind for name, (kind, _) in RUN_COLUMNS.items()})
    families: dict[str, pd.Series[Any]] = {}
    for name in FAMILIES:
        families |= family_columns(name, [json.loads(text or "{}") for text in table[name].to_pylist()])
    return pd.concat([wide, pd.DataFrame(families, index=wide.index)], axis=1)


def load_steps(
    path: PathLike, columns: Sequence[str] | None = None, runs: Collection[str] | None = None, cache: bool = True
) -> pd.DataFrame:
    """Return one row per step of every run at or below `path`, in order, with STEP_COLUMNS and bytes per network.

    `columns`: the columns to return besides `run` and `step`; `runs`: the runs, as values of the column `run`; None:
    all. `path`, `cache`: see :func:`load_runs`. Raise ConfigError for an unknown run or column."""
    run_dirs = _directories(Path(path))
    loaded = _load(Path(path), run_dirs, cache)
    keys = [key for key, _ in run_dirs]
    selected = set(keys if runs is None else runs)
    ConfigError.refuse_unknown("no run", sorted(selected.difference(keys)), keys, "load_steps")
    rows = [row for row, key in enumerate(keys) if key in selected]
    steps = loaded.steps_of(rows)
    frame = steps.select(_names(steps, columns)).to_pandas()
    codes = np.repeat(np.array(rows, dtype=np.int32), loaded.counts[rows])
    run_column = pd.Categorical.from_codes(codes, categories=pd.Index(keys, dtype="object"), ordered=False)
    frame.insert(0, "run", pd.Series(run_column, index=frame.index))
    return frame


def _names(steps: pa.Table, requested: Sequence[str] | None) -> list[str]:
    """Return the names of the `requested` columns of `steps`, in this order. If `requested` is None, return
    STEP_COLUMNS, followed by the columns tx_* and rx_*. Raise ConfigError for an unknown name."""
    documented = [name for name in STEP_COLUMNS if name != "run"]
    names = [*documented, *sorted(set(steps.column_names) - set(documented), key=lambda name: (name[:1] != "t", name))]
    if requested is None:
        return names
    ConfigError.refuse_unknown("no column", [name for name in requested if name != "run"], names, "load_steps")
    return ["step", *(name for name in dict.fromkeys(requested) if name not in ("run", "step"))]


def load_stages(path: PathLike, cache: bool = True) -> pd.DataFrame:
    """Return one row per pipeline stage of every run that recorded steps, with STAGE_COLUMNS.

    The values are medians over steps, in seconds, of each part of a step. `path`, `cache`: see :func:`load_runs`."""
    runs = load_runs(path, cache).filter(regex=f"^(run$|{FAMILIES['stage_breakdown'].prefix})")
    records: list[dict[Any, Any]] = runs.to_dict("records")
    stages = [(run["run"], stage, parts) for run in records for stage, parts in enumerate(stage_parts(run))]
    rows = [{"run": name, "stage": stage, **parts} for name, stage, parts in stages]
    frame = pd.DataFrame(rows, columns=list(STAGE_COLUMNS))
    kinds = {name: kind for name, (kind, _) in STAGE_COLUMNS.items()}
    return frame.astype({**kinds, "run": pd.CategoricalDtype(list(runs["run"]))})


def _load(root: Path, run_dirs: Sequence[tuple[str, str]], cache: bool) -> run_cache.Loaded:
    """Return the runs in `run_dirs`. Use the cache below `root` if `cache` is true and the cache is usable."""
    if cache and len(run_dirs) >= MIN_CACHED_RUNS:
        folder = root / CACHE
        try:
            # Another user's link could lead to files of this user, and a crafted Arrow file could crash the reader.
            if other_writers(folder) is None:
                folder.mkdir(exist_ok=True)
                if os.access(folder, os.W_OK):
                    return run_cache.load(folder, run_dirs)
        except (OSError, pa.ArrowException):
            pass  # no write permission, disk full, or another loader removed files
    with tempfile.TemporaryDirectory(prefix="holmes-cache-") as temporary:
        return run_cache.load(Path(temporary), run_dirs)


def _directories(root: Path) -> list[tuple[str, str]]:
    """Return (value of the column `run`, directory) of every run at or below `root`, including runs that never started.
    Raise RecordError if `root` is no directory."""
    if not root.is_dir():
        raise RecordError("no such directory", where=str(root), hint="give a run directory, or one that holds runs")
    run_dirs = []
    for directory, subdirectories, files in os.walk(root):
        has_record = "run.yaml" in files
        if has_record or (".hydra" in subdirectories and "multirun.yaml" not in files and os.fspath(root) != directory):
            key = plain_name(os.path.relpath(directory, root))
            run_dirs.append((plain_name(root.resolve().name) if key == "." else key.replace(os.sep, "/"), directory))
        subdirectories[:] = [name for name in subdirectories if name not in {*SKIPPED, CACHE} and not has_record]
    return sorted(run_dirs, key=lambda r: [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in r[0].split("/")])
