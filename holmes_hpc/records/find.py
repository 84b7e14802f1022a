"""Finding runs: the one that a directory, a name or a Slurm job id means, and all runs below a directory."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holmes_hpc import console
from holmes_hpc.errors import HolmesError, RecordError
from holmes_hpc.records.ownership import other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import SKIPPED


def runs_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Where runs are kept: `root`, else $HOLMES_RUNS, else ``runs``."""
    return Path(root if root is not None else os.environ.get("HOLMES_RUNS") or "runs")


def run_directories(root: str | os.PathLike[str]) -> Iterator[RunDirectory]:
    """Every run at or below `root` (single runs, Hydra multirun trees, sweeps), in order of path."""
    for directory, below, files in os.walk(root, followlinks=False):
        if "run.yaml" in files:
            below.clear()  # a run does not hold runs
            yield RunDirectory(directory)
        below[:] = sorted(name for name in below if name not in SKIPPED)


def find_run(name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> RunDirectory:
    """The run that `name` means, see :func:`_find`; a warning where others than this user may have written what it
    says."""
    found = _find(name, root)
    if (who := other_writers(found.path)) is not None:
        console.note(f"warning: {found.path}: {who}; what the run says may be theirs")
    return found


def _find(name: str | os.PathLike[str], root: str | os.PathLike[str] | None) -> RunDirectory:
    """The run that `name` means: a run directory, the name of one, or the Slurm job id of its leader.

    Of several runs with one job id (a Slurm that was set up again counts from 1) the latest is meant; several runs of
    one name are an error. RecordError when there is none.
    """
    word, base = os.fspath(name), runs_root(root)
    for path in (Path(word), base / word):
        if RunDirectory(path).exists():
            return RunDirectory(path)
    runs = list(run_directories(base)) if base.is_dir() else []
    if word.isdecimal() and (
        held := [
            (str(data["created"] or ""), run) for run in runs if (data := _readable(run)) and int(word) in job_ids(data)
        ]
    ):
        return max(held, key=lambda pair: pair[0])[1]
    named = [run for run in runs if run.name == word]
    if len(named) > 1:
        raise RecordError(
            f"{len(named)} runs have that name: {', '.join(str(r.path) for r in named[:4])}",
            where=word,
            hint="give the directory",
        )
    if named:
        return named[0]
    close = difflib.get_close_matches(word, [run.name for run in runs], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "give a run directory, its name, or its Slurm job id"
    raise RecordError(f"no such run under {base}", where=word, hint=hint)


def name_of(run: RunDirectory, root: str | os.PathLike[str] | None = None) -> str:
    """The name that :func:`find_run` knows a run by: its path below the runs' root (a sweep's job is ``SWEEP/0``), else
    its directory's name."""
    path, base = run.path.resolve(), runs_root(root).resolve()
    return str(path.relative_to(base)) if base in path.parents else run.name


def last_change(run: RunDirectory) -> float:
    """Unix seconds of the last that is recorded of a run: its start, a step, its end."""
    found = [run.run_path, run.metrics_path, run.result_path]
    return max((path.stat().st_mtime for path in found if path.exists()), default=0.0)


def job_ids(run: dict[str, Any]) -> set[int]:
    """All Slurm job ids that a run record names: its leader's, its components', its attempts'."""
    ids: set[int] = set()
    for holder in (run.get("slurm"), *(run.get("attempts") or [])):
        if isinstance(holder, dict):
            for key in ("job_id", "job_ids", "het_job_ids"):
                value = holder.get(key)
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, (int, str)) and str(item).isdecimal() and len(str(item)) < 20:
                        ids.add(int(item))
    return ids


def _readable(run: RunDirectory) -> dict[str, Any] | None:
    try:
        return run.read_run()
    except HolmesError:
        return None
