"""Lookup of runs: by directory, name or Slurm job id, and all runs below a directory."""

import contextlib
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
    """Return the directory that holds runs: `root`, else $HOLMES_RUNS, else ``runs``."""
    return Path(root if root is not None else os.environ.get("HOLMES_RUNS") or "runs")


def run_directories(root: str | os.PathLike[str]) -> list[RunDirectory]:
    """Return every run at or below `root` (single runs, Hydra multirun trees, sweeps), in order of path."""
    return [RunDirectory(path) for path in sorted(Path(path) for _, path, _ in _changes(os.fspath(root)))]


def recent_runs(root: str | os.PathLike[str], count: int) -> tuple[list[RunDirectory], int]:
    """Return the runs at or below `root`, the most recently changed first, and the number of runs left out.
    The first `count` runs are always returned. A later run is returned only if it has not ended, or if Slurm may
    requeue its job. Raise RecordError if `root` exists, but cannot be read."""
    if os.path.exists(root):
        with RecordError.instead_of(OSError, where=os.fspath(root), hint="set HOLMES_RUNS to a readable folder"):
            os.scandir(root).close()
    runs = sorted(_changes(os.fspath(root)), reverse=True)
    paths = [path for i, (_, path, has_result) in enumerate(runs) if i < count or not has_result or _may_requeue(path)]
    return [RunDirectory(path) for path in paths], len(runs) - len(paths)


def _changes(directory: str) -> Iterator[tuple[float, str, bool]]:
    """Yield (time of the last change, path, whether result.json exists) for every run at or below `directory`.
    For speed, run directories are not listed, so a run inside another run's directory is not found."""
    if created := _modified(f"{directory}/run.yaml"):
        ended = _modified(f"{directory}/result.json")  # written last
        yield ended or max(created, _modified(f"{directory}/metrics.jsonl")), directory, ended > 0
        return
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name not in SKIPPED and entry.is_dir(follow_symlinks=False):
                yield from _changes(entry.path)


def _modified(path: str | os.PathLike[str]) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return 0.0


def _may_requeue(directory: str) -> bool:
    """Return whether Slurm may requeue the run's job, because preemption or the time limit ended the run."""
    with contextlib.suppress(OSError):
        handle = os.open(f"{directory}/result.json", os.O_RDONLY | os.O_NONBLOCK)  # a file object takes twice as long
        try:
            result = os.read(handle, 1 << 17)
        finally:
            os.close(handle)
        return b'"preempted"' in result or b'"timeout"' in result
    return False


def find_run(name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> RunDirectory:
    """Return the run that `name` refers to: a run directory, a run's name, or a Slurm job id of the run.

    If several runs have the job id (a reinstalled Slurm counts from 1 again), return the latest run. Warn if other
    users may have written the run's records. Raise RecordError if no run matches, or if several runs have the name."""
    run = _find_by_name(name, root)
    if (writers := other_writers(run.path)) is not None:
        console.note(f"warning: {run.path}: {writers}; others may have changed its records")
    return run


def _find_by_name(name: str | os.PathLike[str], root: str | os.PathLike[str] | None) -> RunDirectory:
    """Return the run that `name` refers to, as :func:`find_run` does, but without its warning."""
    reference, base = os.fspath(name), runs_root(root)
    for path in (Path(reference), base / reference):
        if RunDirectory(path).exists():
            return RunDirectory(path)
    runs = run_directories(base)
    creation_times: dict[RunDirectory, str] = {}
    for run in runs if reference.isdecimal() else ():
        with contextlib.suppress(HolmesError):
            if int(reference) in job_ids(record := run.read_run()):
                creation_times[run] = str(record["created"] or "")
    if creation_times:
        return max(creation_times, key=creation_times.__getitem__)
    same_name = [run for run in runs if run.name == reference]
    if len(same_name) > 1:
        paths = ", ".join(str(r.path) for r in same_name[:4])
        raise RecordError(f"{len(same_name)} runs have that name: {paths}", where=reference, hint="give the directory")
    if same_name:
        return same_name[0]
    for path in (base / reference, Path(reference)):
        if path.is_dir():
            raise RecordError("it has no run.yaml", where=str(path), hint="give the directory of a run")
    similar = difflib.get_close_matches(reference, [run.name for run in runs], n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else "give a run directory, its name, or its Slurm job id"
    raise RecordError(f"no such run under {base.absolute()}", where=reference, hint=hint)


def name_of(run: RunDirectory, root: str | os.PathLike[str] | None = None) -> str:
    """Return the path of a run relative to the directory of runs (``SWEEP/0`` for a job of a sweep). :func:`find_run`
    accepts this name. For a run outside the directory of runs, return only the last part of its path."""
    path, base = run.path.resolve(), runs_root(root).resolve()
    return str(path.relative_to(base)) if base in path.parents else run.name


def reference_to(run: RunDirectory) -> str:
    """Return the name of a run as an argument of commands; its path if it lies outside the directory of runs."""
    return name_of(run) if runs_root().resolve() in run.path.resolve().parents else str(run.path)


def last_change(run: RunDirectory) -> float:
    """Return the Unix time at which run.yaml, the metrics or the result was last written; 0 if none exists."""
    return max(map(_modified, (run.run_path, run.metrics_path, run.result_path)))


def job_ids(run: dict[str, Any]) -> set[int]:
    """Return all Slurm job ids in `run`, the content of run.yaml: ids of leaders and components in all attempts."""
    sections = [s for s in (run.get("slurm"), *(run.get("attempts") or [])) if isinstance(s, dict)]
    values = [section.get(key) for section in sections for key in ("job_id", "job_ids", "het_job_ids")]
    listed_ids = [job_id for value in values for job_id in (value if isinstance(value, list) else [value])]
    return {int(i) for i in listed_ids if isinstance(i, (int, str)) and str(i).isdecimal() and len(str(i)) < 20}
