"""Commands that watch and end runs: status, logs, cancel; and those of a sweep: sweep status, collect, cancel."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Json, Run, app
from holmes_hpc.errors import ConfigError, HolmesError
from holmes_hpc.records.find import find_run, last_change, run_directories, runs_root
from holmes_hpc.records.logs import follow_logs, tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm import scontrol
from holmes_hpc.slurm.job_states import UNKNOWN
from holmes_hpc.submission.lifecycle.outcome import quoted
from holmes_hpc.submission.lifecycle.status import cancel_run, ended, is_local, log_paths, run_statuses
from holmes_hpc.submission.sweeps import status_table
from holmes_hpc.submission.sweeps.jobs import cancel_sweep
from holmes_hpc.submission.sweeps.manifest import read_manifest
from holmes_hpc.training.checkpoint import checkpoint_directory

RECENT_S = 86400.0  # failures of this last period are reported in full
group = typer.Typer(no_args_is_help=True, help="Sweeps, detached ones too.")
app.add_typer(group, name="sweep")
Directory = Annotated[str, typer.Argument(metavar="DIR", help="The sweep's directory.")]


@app.command()
def status(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", show_default=False)] = None, json: Json = False
) -> None:
    """How runs stand: state, step, loss; of a failed one the rank, node and last lines of its log.

    Example: holmes status 20260101-120000-gpt_tiny
    """
    sweeps = [name for name in runs or [] if status_table.is_sweep(name)]
    if sweeps:
        if runs != sweeps[:1]:
            raise ConfigError("a sweep beside others", where=sweeps[0], hint="give one sweep, or runs")
        sweep_status(sweeps[0], json)
        return
    found = [find_run(name) for name in runs] if runs else sorted(run_directories(runs_root()), key=last_change)[::-1]
    if not found and not json:
        console.note(f"no runs in {runs_root()}; `holmes run` makes one")
        return
    with console.waiting("asking Slurm"):
        all_of_them = run_statuses(found)
    if json:
        console.as_json([s.to_dict() for s in all_of_them])
        return
    console.table(
        "",
        ("run", "last change", "job", "state", "step", "loss", "step time", "attempt"),
        [
            (
                s.name,
                time.strftime("%m-%d %H:%M", time.localtime(last_change(RunDirectory(s.path)))),
                s.job_id,
                f"{s.state} ({s.why})" if s.why else s.state,
                f"{s.step}/{s.steps}" if s.step else "",
                f"{s.loss:.4f}" if s.loss else "",
                f"{s.step_time_s:.3f} s" if s.step_time_s else "",
                s.attempt,
            )
            for s in all_of_them
        ],
    )
    if any(s.state == UNKNOWN.lower() and s.source != "run record" for s in all_of_them):
        console.note("unknown: Slurm gave no answer (`scontrol ping`), or no longer knows the job")
    failed = [s for s in all_of_them if s.error]
    if not runs:  # nobody asked about those of long ago
        recent = [s for s in failed if time.time() - last_change(RunDirectory(s.path)) < RECENT_S][:3]
        if others := len(failed) - len(recent):
            console.note(f"why {others} earlier run{'s' * (others > 1)} failed: `holmes status RUN`")
        failed = recent
    for s in failed:
        rank = f"rank {s.failed_rank} on {s.failed_node}: " if s.failed_rank is not None else ""
        for line in (f"\n{s.name}: {rank}{s.error}", *quoted(s.log_tail, s.error or "", s.failed_rank)):
            console.text(line)
        if s.ended and (kept := checkpoint_directory.complete_checkpoints(RunDirectory(s.path).checkpoints)):
            console.text(f"go on with `holmes resume {s.name}`, after step {kept[0].step}")


@app.command()
def logs(
    run: Run,
    rank: Annotated[int | None, typer.Option(help="Only this rank's.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", help="How many of each log's last lines.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    json: Json = False,
) -> None:
    """The last lines of a run's logs. Example: holmes logs my-run --rank 0 -n 50"""
    record = find_run(run)
    paths = [record.log_path(rank)] if rank is not None else log_paths(record)
    if rank is not None and not paths[0].exists():
        raise ConfigError(f"no log of rank {rank}", where=str(record.path), hint="`holmes logs RUN` shows all")
    if not paths:
        console.note("no log yet; `holmes status` tells what the run waits for")
    if follow and json:
        raise ConfigError("--follow and --json", where="logs", hint="leave one of them out")
    if json:
        console.as_json({"run": str(record.path), "logs": {path.name: list(tail(path, lines)) for path in paths}})
        return
    if follow:
        for number, line in follow_logs(record, ended(record), None if rank is None else [rank]):
            console.text(f"{number}: {line}")
        return
    for path in paths:
        console.text(f"== {path.name}")
        for line in tail(path, lines):
            console.text(line)


@app.command()
def cancel(run: Run, json: Json = False) -> None:
    """Cancel a run's job, all its components. Example: holmes cancel my-run"""
    record = find_run(run)
    here = is_local(record.read_run())
    with console.waiting("waiting for its ranks to save and end" if here else "asking Slurm"):
        before = cancel_run(record)
    if before.state == UNKNOWN:
        raise ConfigError(
            "Slurm gives no answer, or knows no such job",
            where=str(record.path),
            hint="look with `scontrol ping` and `squeue --me`",
        )
    if json:
        console.as_json({"run": str(record.path), "was": before.state.lower(), "cancelled": not before.ended})
        return
    console.text(f"{run}: was {before.state.lower()}" + (", nothing to cancel" if before.ended else ", cancelled"))
    if before.state == "RUNNING" and record.read_run().get("config"):
        kept = checkpoint_directory.complete_checkpoints(record.checkpoints)
        made = "no checkpoint" if record.metrics_bytes() else "made no step and no checkpoint"
        last = f"its last checkpoint is of step {kept[0].step}" if kept else f"it has {made}"
        if not here:
            last = (
                f"so far {last}; its ranks finish a step or two and save,"
                f" if Slurm's KillWait{_kill_wait()} is long enough for both"
            )
        console.note(last)


def _kill_wait() -> str:
    """How long Slurm leaves a cancelled job, in words; nothing where it does not say."""
    with contextlib.suppress(HolmesError):
        if said := scontrol.read_config().get("KillWait"):
            return f" ({said} here)"
    return ""


@group.command("status")
def sweep_status(directory: Directory, json: Json = False) -> None:
    """A live table on a terminal, else one table. Example: holmes sweep status runs/sweep-20260101-120000"""
    if sys.stdout.isatty() and not json:
        status_table.show_live(directory)
    else:
        rows = status_table.sweep_status(directory)
        console.output(json, [r.to_dict() for r in rows], (directory, *status_table.table_cells(rows)))


@group.command("collect")
def sweep_collect(directory: Directory, json: Json = False) -> None:
    """The results of a sweep's jobs. Example: holmes sweep collect runs/sweep-20260101-120000 --json"""
    found = status_table.collect(directory)
    if json:
        console.as_json(found)
        return
    figures = sorted({k for f in found if isinstance(f["final"], dict) for k in f["final"]})
    same = [o for o in found[0]["overrides"] if all(o in f["overrides"] for f in found)] if len(found) > 1 else []
    finals: list[dict[str | None, Any]] = [  # None: the name of a value that is no mapping
        f["final"] if isinstance(f["final"], dict) else {} if f["final"] is None else {None: f["final"]} for f in found
    ]
    columns = [None] * any(_short(final.get(None, "")) for final in finals) + figures
    rows = [
        [
            f["num"],
            " ".join(o for o in f["overrides"] if o not in same),
            f["state"],
            *(_short(final[k]) if k in final else "" for k in columns),
        ]
        for f, final in zip(found, finals, strict=True)
    ]
    caption = f"all with {' '.join(same)}" if same else ""
    console.table(directory, ["job", "overrides", "state", *(k or "value" for k in columns)], rows, caption)


@group.command("cancel")
def sweep_cancel(directory: Directory) -> None:
    """Cancel the jobs of a sweep that have not ended. Example: holmes sweep cancel runs/sweep-20260101-120000"""
    manifest = read_manifest(directory)
    alive = {row.num for row in status_table.sweep_status(directory) if not row.ended}
    jobs = [job for job in manifest.jobs if job.num in alive]
    cancel_sweep(manifest, jobs)
    console.note(f"cancelled {len(jobs)} of {len(manifest.jobs)} jobs" if jobs else "all jobs have ended")


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
