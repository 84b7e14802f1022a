"""The table of `holmes sweep status`: its columns, one row a job, live on a terminal, or collected as data."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.logs import tail
from holmes_hpc.records.rates import first_attempt_of_plan, mean_rates
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import from_json
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.lifecycle import attempts
from holmes_hpc.submission.lifecycle.outcome import StateRow, run_state
from holmes_hpc.submission.lifecycle.status import record_end
from holmes_hpc.submission.sweeps.jobs import noted_outcome, plain_outcome, states, unread
from holmes_hpc.submission.sweeps.manifest import NAME, Manifest, SweepJob, read_manifest

WHOLE = 8_000_000  # bytes of a growing metrics.jsonl that are read at every look


@dataclass(frozen=True)
class SweepRow(StateRow):
    """One job of a sweep as a table shows it. `state`: completed, failed, … when it ended, else Slurm's word
    in lower case. `step`, `loss`: of the last step; `tokens_per_s`: of all that count (run_rates)."""

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
    """The state of every job of a sweep, with one Slurm query for all of them."""
    manifest = read_manifest(directory)
    return [row_of(manifest, job, state) for job, state in states(manifest, manifest.jobs, mode).items()]


def row_of(manifest: Manifest, job: SweepJob, state: JobState) -> SweepRow:
    step = loss = rate = error = None
    word, why = state.state.lower(), state.why
    if job.kind == "plan":
        run = RunDirectory(manifest.place(job.directory))
        last = next(_last_lines(run.metrics_path), {})
        step, loss, rate = last.get("step"), last.get("loss"), run_rates(run).get("tokens_per_s")
        why = attempts.why(run, state, step)
        result = run.read_result()
        if result is None and state.ended and run.exists():
            result = record_end(run, state)
        if result is not None and (state.ended or state.state == UNKNOWN):
            word, error = result["state"], result["error"]
    else:
        noted = noted_outcome(manifest, job)
        if noted:
            word, error = noted["state"], noted.get("error")
        elif state.ended:
            word, without_note = run_state(state.state), unread(manifest, job) or "its task left no note of its end"
            error = without_note if word == "completed" else f"Slurm says {state.state}"
    return SweepRow(
        num=job.num,
        overrides=job.overrides,
        job_id=job.job_id,
        state=word,
        reason=state.reason,
        step=step,
        loss=loss,
        tokens_per_s=rate,
        error=error,
        directory=str(manifest.place(job.directory)),
        why=why,
    )


def run_rates(run: RunDirectory) -> dict[str, float]:
    """A run's mean_rates, as `holmes report` has them; while it runs, of a file of more than WHOLE bytes those of its
    last steps alone."""
    with contextlib.suppress(OSError):
        seen = run.metrics_path.stat()
        return _rates(run.path, seen.st_size, seen.st_mtime_ns, run.result_path.exists())
    return {}


@lru_cache(maxsize=1024)
def _rates(directory: Path, size: int, _: int, ended: bool) -> dict[str, float]:
    run = RunDirectory(directory)
    try:
        if size > WHOLE and not ended:
            return mean_rates([*_last_lines(run.metrics_path)][::-1])
        return mean_rates(run.metrics(), first_attempt_of_plan(run.read_run()))
    except HolmesError:
        return {}


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The last whole lines of metrics.jsonl, the very last first."""
    for line in reversed(tail(path, 160)):
        try:
            data = from_json(line)
        except ValueError:
            continue
        if isinstance(data, dict):
            yield data


def collect(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """One mapping per job: `num, overrides, job_id, state, error, directory`, and `final` (of a plan's job: the last
    step's number and loss, and the run's rates; else the value that the function returned)."""
    manifest = read_manifest(directory)
    return [
        {
            "num": row.num,
            "overrides": list(row.overrides),
            "job_id": row.job_id,
            "state": row.state,
            "error": row.error,
            "directory": row.directory,
            "final": _final(manifest, job),
        }
        for job, state in states(manifest, manifest.jobs).items()
        for row in [row_of(manifest, job, state)]
    ]


def _final(manifest: Manifest, job: SweepJob) -> Any:
    """Return the figures of a plan's job that ended, or the value of another that completed; else None."""
    if job.kind == "plan":
        run = RunDirectory(manifest.place(job.directory))
        result = run.read_result()
        return {**(result.get("final") or {}), **run_rates(run)} if result else None
    outcome, value = plain_outcome(manifest, job)
    return value if outcome == "completed" else None


def sweep_rows(rows: Sequence[SweepRow]) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells for a table of a sweep."""
    cells = [
        [
            r.num,
            " ".join(r.overrides),
            r.job_id,
            r.state + (f" ({r.why})" if r.why else ""),
            r.step,
            None if r.loss is None else f"{r.loss:.4f}",
            None if r.tokens_per_s is None else f"{r.tokens_per_s:,.0f}",
            r.error,
        ]
        for r in rows
    ]
    return ["job", "overrides", "id", "state", "step", "loss", "tokens/s", "error"], cells


def worth_showing(rows: Sequence[SweepRow], most: int) -> list[SweepRow]:
    """At most `most` rows: of more, those that ended badly first, then what runs, waits, and completed."""
    if len(rows) <= most:
        return list(rows)

    def interest(row: SweepRow) -> int:
        return (row.ended and row.state != "completed") * 3 or {"pending": 1, "completed": 0}.get(row.state, 2)

    return sorted(rows, key=lambda row: -interest(row))[:most]


def live_table(title: str, rows: Sequence[SweepRow], height: int) -> Table:
    """What a terminal `height` lines high shows while jobs run."""
    shown = worth_showing(rows, max(5, height - 4))
    columns, cells = sweep_rows(shown)
    counts = ", ".join(f"{count} {state}" for state, count in Counter(r.state for r in rows).most_common())
    cut = f"{len(rows) - len(shown)} more: make the terminal higher, or --json" if len(shown) < len(rows) else None
    out = Table(
        title=f"{title}: {len(rows)} jobs: {counts}",
        title_justify="left",
        caption=cut,
        caption_justify="left",
        box=None,
    )
    for name in columns:
        out.add_column(name, overflow="fold")
    for row in cells:
        out.add_row(*("" if c is None else str(c) for c in row))
    return out


def on_terminal() -> Live:
    """A place on the terminal where a table is drawn again and again; `stop` ends it."""
    return Live(console=Console(markup=False, highlight=False), auto_refresh=False)


def live(directory: str | os.PathLike[str], *, every_s: float = 2.0) -> list[SweepRow]:
    """Show the table again and again on a terminal until all jobs ended or Ctrl-C; the last rows come back."""
    rows = sweep_status(directory)
    with on_terminal() as screen:
        try:
            while True:
                screen.update(live_table(str(directory), rows, screen.console.height), refresh=True)
                if all(r.ended for r in rows):
                    break
                time.sleep(every_s)
                rows = sweep_status(directory, mode="standard")
        except KeyboardInterrupt:
            pass
    return rows


def is_sweep(directory: str | os.PathLike[str]) -> bool:
    return (Path(directory) / NAME).is_file()
