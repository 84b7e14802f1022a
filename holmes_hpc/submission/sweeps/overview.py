"""What became of a sweep: a table of its jobs, and their results collected."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from submitit.core.job_environment import JobPaths

from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.logs import tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.executor.watcher import WATCHER, Expected
from holmes_hpc.submission.lifecycle.run_states import is_end, run_state
from holmes_hpc.submission.lifecycle.status import Job, OnThisMachine, job_of, record_end
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob, read_manifest

UNREAD = "its result is another user's file, which is not read"


@dataclass(frozen=True)
class SweepRow:
    """One job of a sweep as a table shows it. `state`: completed, failed, … when it ended, else Slurm's word
    in lower case."""

    num: int
    overrides: tuple[str, ...]
    job_id: str
    state: str
    reason: str
    step: int | None
    loss: float | None
    tokens_per_s: float | None
    error: str | None
    directory: str

    @property
    def ended(self) -> bool:
        return is_end(self.state)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep_status(directory: str | os.PathLike[str], mode: str = "force") -> list[SweepRow]:
    """The state of every job of a sweep, with one Slurm query for all of them."""
    manifest = read_manifest(directory)
    return [row_of(manifest, job, state) for job, state in states(manifest, mode).items()]


def states(manifest: Manifest, mode: str = "force") -> dict[SweepJob, JobState]:
    """Slurm's (or this machine's) word on every job of a sweep."""
    on_slurm = [job for job in manifest.jobs if job.where == "slurm" and not finished(manifest, job)]
    for job in on_slurm:
        record = manifest.place(job.folder) / f"{job.job_id}_exit"
        WATCHER.expect(job.job_id, Expected(job.name or None, job.submitted or None, record, job.components))
        if job.job_id not in WATCHER._registered:
            WATCHER.register_job(job.job_id)
    found: dict[SweepJob, JobState] = {}
    for job in manifest.jobs:
        if job in on_slurm:
            found[job] = WATCHER.state_of(job.job_id, mode)
            mode = "cache"  # the first answer was about all
        elif job.where == "local" and not finished(manifest, job):
            found[job] = on_this_machine(manifest, job).state()
        else:
            found[job] = JobState("COMPLETED", source="record")
    return found


def on_this_machine(manifest: Manifest, job: SweepJob) -> Job:
    """A sweep's local job, to ask or to cancel; only the machine where it runs can tell."""
    run = RunDirectory(manifest.place(job.directory))
    if job.kind == "plan" and run.exists():
        with contextlib.suppress(SubmissionError):
            return job_of(run)
    return OnThisMachine(run, int(job.job_id), job.host or os.uname().nodename, job.submitted,
                         manifest.place(job.folder))


def finished(manifest: Manifest, job: SweepJob) -> bool:
    """Whether a record on disk says that the job completed; no need to ask Slurm then."""
    if job.kind == "plan":
        result = RunDirectory(manifest.place(job.directory)).read_result()
        return result is not None and result["state"] == "completed"
    return _plain_outcome(manifest, job)[0] == "completed"


def unread(manifest: Manifest) -> list[SweepJob]:
    """The jobs whose results are another user's."""
    return [job for job in manifest.jobs if job.kind != "plan" and _foreign(_pickle(manifest, job))]


def _pickle(manifest: Manifest, job: SweepJob) -> Path:
    return JobPaths(manifest.place(job.folder), job_id=job.job_id, task_id=0).result_pickle


def _foreign(pickle: Path) -> bool:
    """Whether it is there and another user's: reading a pickle runs what is in it."""
    return pickle.exists() and pickle.stat().st_uid != os.getuid()


class _Lenient(pickle.Unpickler):
    """Reads results whose classes are in a program that cannot be imported here; those are only named."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (_Named,), {"__module__": module})


class _Named:
    def __new__(cls, *_: Any, **__: Any) -> _Named:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __repr__(self) -> str:
        return f"a {type(self).__module__}.{type(self).__name__}"


def _plain_outcome(manifest: Manifest, job: SweepJob) -> tuple[str | None, Any]:
    """("completed" | "failed" | "unread" | None while there is no result, the value that came back or the error)."""
    path = _pickle(manifest, job)
    if not path.exists():
        return None, None
    if _foreign(path):
        return "unread", UNREAD
    try:
        with path.open("rb") as file:
            outcome, value = _Lenient(file).load()
    except Exception as e:
        return "failed", f"its result cannot be read: {type(e).__name__}: {e}"
    if outcome != "success":
        return "failed", str(value).strip().splitlines()[-1] if str(value).strip() else "failed"
    status = getattr(getattr(value, "status", None), "name", "COMPLETED")
    if status != "COMPLETED":
        return "failed", str(getattr(value, "_return_value", "failed"))
    return "completed", getattr(value, "_return_value", value)


def row_of(manifest: Manifest, job: SweepJob, state: JobState) -> SweepRow:
    step = loss = rate = error = None
    word = state.state.lower()
    if job.kind == "plan":
        run = RunDirectory(manifest.place(job.directory))
        last = _last_metrics(run.metrics_path)
        step, loss, rate = last.get("step"), last.get("loss"), last.get("tokens_per_s")
        result = run.read_result()
        if result is None and state.ended and run.exists():
            result = record_end(run, state)
        if result is not None and (state.ended or state.state == UNKNOWN):
            word, error = result["state"], result["error"]
    else:
        found, value = _plain_outcome(manifest, job)
        if found == "unread":
            error = value
        elif found is not None:
            word, error = found, value if found == "failed" else None
        elif state.ended:
            word, error = run_state(state.state), f"Slurm says {state.state}"
    return SweepRow(job.num, job.overrides, job.job_id, word, state.reason, step, loss, rate, error,
                    str(manifest.place(job.directory)))


def _last_metrics(path: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl, without reading all of it."""
    for line in reversed(tail(path, 160)):
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if isinstance(data, dict):
            return data
    return {}


def collect(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """One mapping per job: `num, overrides, job_id, state, error, directory`, and `final` (of a plan's job: the last
    step's figures; else the value that the function returned)."""
    manifest = read_manifest(directory)
    found = []
    for job, state in states(manifest).items():
        row = row_of(manifest, job, state)
        final: Any = None
        if job.kind == "plan":
            result = RunDirectory(manifest.place(job.directory)).read_result()
            final = result.get("final") if result else None
        else:
            outcome, value = _plain_outcome(manifest, job)
            final = value if outcome == "completed" else None
        found.append({"num": row.num, "overrides": list(row.overrides), "job_id": row.job_id, "state": row.state,
                      "error": row.error, "directory": row.directory, "final": final})
    return found


def cancel_sweep(manifest: Manifest, jobs: Sequence[SweepJob]) -> None:
    """Cancel jobs that did not end, later ones first, so that a cancelled one does not let the next begin."""
    for job in reversed(jobs):
        if finished(manifest, job):
            continue
        if job.where == "slurm":
            SlurmHetJob(manifest.place(job.folder), job.job_id).cancel(check=False)
        else:
            on_this_machine(manifest, job).cancel()


def table_rows(rows: Sequence[SweepRow]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells for a table of a sweep."""
    cells = [[r.num, " ".join(r.overrides), r.job_id, r.state + (f" ({r.reason})" if r.state == "pending" else ""),
              r.step, None if r.loss is None else f"{r.loss:.4f}",
              None if r.tokens_per_s is None else f"{r.tokens_per_s:,.0f}", r.error] for r in rows]
    return ["job", "overrides", "id", "state", "step", "loss", "tokens/s", "error"], cells


def worth_showing(rows: Sequence[SweepRow], most: int) -> list[SweepRow]:
    """At most `most` rows: of more, those that ended badly first, then what runs, waits, and completed."""
    if len(rows) <= most:
        return list(rows)

    def interest(row: SweepRow) -> int:
        return (row.ended and row.state != "completed") * 3 or {"pending": 1, "completed": 0}.get(row.state, 2)

    return sorted(rows, key=lambda row: -interest(row))[:most]


def live(directory: str | os.PathLike[str], *, every_s: float = 2.0) -> list[SweepRow]:
    """Show the table again and again on a terminal until all jobs ended or Ctrl-C; the last rows come back."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    console = Console(markup=False, highlight=False)

    def drawn(rows: Sequence[SweepRow]) -> Table:
        shown = worth_showing(rows, max(5, console.height - 4))
        columns, cells = table_rows(shown)
        counts = ", ".join(f"{count} {state}" for state, count in Counter(r.state for r in rows).most_common())
        cut = f"{len(rows) - len(shown)} more: make the terminal higher, or --json" if len(shown) < len(rows) else None
        out = Table(title=f"{directory}: {len(rows)} jobs: {counts}", title_justify="left", caption=cut,
                    caption_justify="left", box=None)
        for name in columns:
            out.add_column(name, overflow="fold")
        for row in cells:
            out.add_row(*("" if c is None else str(c) for c in row))
        return out

    rows = sweep_status(directory)
    with Live(drawn(rows), console=console, auto_refresh=False) as screen:
        try:
            while not all(r.ended for r in rows):
                time.sleep(every_s)
                rows = sweep_status(directory, mode="standard")
                screen.update(drawn(rows), refresh=True)
        except KeyboardInterrupt:
            pass
    return rows
