"""The table of a sweep's jobs, printed once or updated live on a terminal, and the collection of the jobs' results."""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from holmes_hpc import console
from holmes_hpc.errors import HolmesError, counted
from holmes_hpc.records.rates import first_attempt_of_plan, mean_rates
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.lifecycle import attempts
from holmes_hpc.submission.lifecycle.outcome import StateRow, run_state
from holmes_hpc.submission.lifecycle.status import record_end
from holmes_hpc.submission.sweeps.jobs import job_states, plain_outcome, read_outcome, untrusted_reason
from holmes_hpc.submission.sweeps.manifest import NAME, Manifest, SweepJob, read_manifest

MAX_GROWING_BYTES = 8_000_000  # only the end of a larger metrics.jsonl is read while it grows


@dataclass(frozen=True)
class SweepRow(StateRow):
    """The row of one job in the table of a sweep. `step`, `loss`: number and loss of the last step; `tokens_per_s`:
    mean rate of the run (:func:`run_rates`); `why`: why the job waits, or what it does before its first step."""

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
    why: str = ""


def sweep_status(directory: str | os.PathLike[str], mode: str = "force") -> list[SweepRow]:
    """Return the row of each job of a sweep, with one Slurm query for all of them. `mode`: see :func:`job_states`."""
    manifest = read_manifest(directory)
    return [row_of(manifest, job, state) for job, state in job_states(manifest, manifest.jobs, mode).items()]


def row_of(manifest: Manifest, job: SweepJob, state: JobState) -> SweepRow:
    """Return the row of a job. If the run of a plan ended without result.json, write that file."""
    step = loss = rate = error = None
    shown_state, why = state.state.lower(), state.why
    if job.kind == "plan":
        run = RunDirectory(manifest.resolve(job.directory))
        metrics = attempts.last_metrics(run)
        step, loss, rate = metrics.get("step"), metrics.get("loss"), run_rates(run).get("tokens_per_s")
        why = attempts.state_detail(run, state, step)
        result = run.read_result()
        if result is None and state.ended and run.exists():
            result = record_end(run, state)
        if result is not None and (state.ended or state.state == UNKNOWN):
            shown_state, error = result["state"], result["error"]
    else:
        outcome = read_outcome(manifest, job)
        if outcome:
            shown_state, error = outcome["state"], outcome.get("error")
        elif state.ended:
            shown_state, error = run_state(state.state), f"Slurm reports {state.state}"
            if shown_state == "completed":
                error = untrusted_reason(manifest, job) or "it recorded no outcome"
    return SweepRow(
        num=job.num,
        overrides=job.overrides,
        job_id=job.job_id,
        state=shown_state,
        reason=state.reason,
        step=step,
        loss=loss,
        tokens_per_s=rate,
        error=error,
        directory=str(manifest.resolve(job.directory)),
        why=why,
    )


def run_rates(run: RunDirectory) -> dict[str, float]:
    """Return the mean rates of a run as {name: rate}, as in `holmes report`; empty without metrics. While the run goes
    on and its metrics.jsonl exceeds MAX_GROWING_BYTES, only the last steps count."""
    with contextlib.suppress(OSError):
        status = run.metrics_path.stat()
        return _read_rates(run.path, status.st_size, status.st_mtime_ns, run.result_path.exists())
    return {}


@lru_cache(maxsize=1024)
def _read_rates(directory: Path, size: int, _: int, has_ended: bool) -> dict[str, float]:
    """Return the result of :func:`run_rates`, cached until the size or time (`_`) of metrics.jsonl changes."""
    run = RunDirectory(directory)
    with contextlib.suppress(HolmesError):
        if size > MAX_GROWING_BYTES and not has_ended:
            return mean_rates([*attempts.last_lines(run.metrics_path)][::-1])
        return mean_rates(run.metrics(), first_attempt_of_plan(run.read_run()))
    return {}


def collect(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return for each job of a sweep a mapping with `num, overrides, job_id, state, error, directory, final`. `final`:
    figures of the last step and mean rates by name for a job with a plan; the function's value for a plain job."""
    manifest, results = read_manifest(directory), []
    for job, state in job_states(manifest, manifest.jobs).items():
        row = row_of(manifest, job, state)
        fields = {name: getattr(row, name) for name in ("num", "job_id", "state", "error", "directory")}
        results.append({**fields, "overrides": list(row.overrides), "final": _final(manifest, job)})
    return results


def _final(manifest: Manifest, job: SweepJob) -> Any:
    """Return the value of the key `final` of :func:`collect`; None if the job has no result."""
    if job.kind == "plan":
        run = RunDirectory(manifest.resolve(job.directory))
        result = run.read_result()
        return {**(result.get("final") or {}), **run_rates(run)} if result else None
    outcome, value = plain_outcome(manifest, job)
    return value if outcome == "completed" else None


def table_cells(rows: Sequence[SweepRow]) -> tuple[list[str], list[list[Any]]]:
    """Return (columns, rows) of a sweep's table."""
    cells: list[list[Any]] = []
    for r in rows:
        loss = None if r.loss is None else f"{r.loss:.4f}"
        rate = None if r.tokens_per_s is None else f"{r.tokens_per_s:,.0f}"
        state = f"{r.state} ({r.why})" if r.why else r.state
        cells.append([r.num, " ".join(r.overrides), r.job_id, state, r.step, loss, rate, r.error])
    return ["job", "overrides", "id", "state", "step", "loss", "tokens/s", "error"], cells


def select_rows(rows: Sequence[SweepRow], limit: int) -> list[SweepRow]:
    """Return at most `limit` rows: all in order, or else first failed, then running, pending and completed jobs."""

    def position(row: SweepRow) -> int:
        is_failed = row.ended and row.state != "completed"
        return 0 if is_failed else {"pending": 2, "completed": 3}.get(row.state, 1)

    return list(rows) if len(rows) <= limit else sorted(rows, key=position)[:limit]


def live_table(title: str, rows: Sequence[SweepRow], height: int) -> Table:
    """Return the table of a sweep for a terminal of `height` lines."""
    selected = select_rows(rows, max(5, height - 4))
    counts = ", ".join(f"{count} {state}" for state, count in Counter(r.state for r in rows).most_common())
    num_hidden = len(rows) - len(selected)
    caption = f"{num_hidden} more: enlarge the terminal, or use --json" if num_hidden else ""
    return console.live_table(f"{title}: {counted(len(rows), 'job')}: {counts}", caption, *table_cells(selected))


def live_display() -> Live:
    """Return a display that redraws a table on the terminal. Use it as a context manager, or end it with ``stop()``."""
    return Live(console=Console(markup=False, highlight=False), auto_refresh=False)


def show_live(directory: str | os.PathLike[str]) -> None:
    """Show the table of a sweep on the terminal until all jobs have ended, or until Ctrl-C."""
    rows = sweep_status(directory)
    with live_display() as display, contextlib.suppress(KeyboardInterrupt):
        while True:
            display.update(live_table(str(directory), rows, display.console.height), refresh=True)
            if all(r.ended for r in rows):
                return
            time.sleep(console.REFRESH_S)
            rows = sweep_status(directory, mode="standard")


def is_sweep(directory: str | os.PathLike[str]) -> bool:
    return (Path(directory) / NAME).is_file()
