"""Commands that show and cancel submitted runs (status, logs, cancel) and sweeps (sweep status, collect, cancel)."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app
from holmes_hpc.cli.live_status import COLUMNS, cells
from holmes_hpc.cli.live_status import watch as watch_runs
from holmes_hpc.cli.options import Json, Run
from holmes_hpc.errors import ConfigError, HolmesError, counted
from holmes_hpc.records.find import find_run, last_change, recent_runs, runs_root
from holmes_hpc.records.logs import follow_logs, logged_warnings, tail
from holmes_hpc.records.rates import goodput, number
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm import scontrol
from holmes_hpc.slurm.job_states import UNKNOWN
from holmes_hpc.submission.lifecycle.outcome import quote_log, resume_advice
from holmes_hpc.submission.lifecycle.status import Status, cancel_run, end_detector, is_local, log_paths, run_statuses
from holmes_hpc.submission.sweeps import sweep_table
from holmes_hpc.submission.sweeps.jobs import cancel_sweep
from holmes_hpc.submission.sweeps.manifest import read_manifest
from holmes_hpc.training.checkpoint import checkpoint_directory

LISTED = 50  # number of latest runs that `holmes status` lists; earlier runs are listed only if they have not ended
MAX_LOGS = 64  # number of logs that `holmes logs` shows; of a failed run, the failed rank's comes first
RECENT_S = 86400.0  # `holmes status` shows the details of failures in the last RECENT_S seconds only
group = typer.Typer(
    no_args_is_help=True,
    help="Watch and cancel sweeps, also detached ones. To start one: holmes-train -m KEY=VALUE,VALUE (docs/howto.md).",
)
app.add_typer(group, name="sweep")
Directory = Annotated[str, typer.Argument(metavar="DIR", help="The sweep's directory.")]


@app.command()
def status(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", show_default=False)] = None,
    all_runs: Annotated[bool, typer.Option("--all", help=f"Show all runs, not only the {LISTED} latest.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show a live table, until q is pressed.")] = False,
    json: Json = False,
) -> None:
    """Show the state, step and loss of runs, and why they failed. Failed runs are shown with rank, node and log lines.

    Example: holmes status 20260101-120000-gpt_tiny"""
    if watch and json:
        raise ConfigError("--watch and --json are mutually exclusive", where="status", hint="leave one of them out")
    sweeps = [name for name in runs or [] if sweep_table.is_sweep(name)]
    if sweeps:
        if runs != sweeps[:1]:
            raise ConfigError("a sweep beside other names", where=sweeps[0], hint="name one sweep, or only runs")
        sweep_status(sweeps[0], json)
        return
    named = [find_run(name) for name in runs or []]

    def find_runs() -> tuple[list[RunDirectory], int]:
        return (named, 0) if named else recent_runs(runs_root(), sys.maxsize if all_runs or json else LISTED)

    if watch:
        watch_runs(find_runs)
        return
    chosen, hidden = find_runs()
    if not chosen and not json:
        console.note(f"no runs in {runs_root().absolute()}; `holmes run` creates one")
        return
    with console.waiting("asking Slurm"):
        statuses = run_statuses(chosen)
    if json:
        console.as_json(list(map(asdict, statuses)))
        return
    console.table("", [*COLUMNS], [cells(s) for s in statuses])
    if hidden:
        console.note(f"{counted(hidden, 'earlier run')}: `holmes status --all`")
    if any(s.state == UNKNOWN.lower() and s.source != "run record" for s in statuses):
        console.note("unknown: Slurm does not answer (`scontrol ping`), or does not know the job any more")
    for s in statuses if named else ():
        console.note(*_run_notes(s))
    failed = [s for s in statuses if s.error]
    if not runs:  # report only recent failures, unless runs are named
        recent = [s for s in failed if time.time() - last_change(RunDirectory(s.path)) < RECENT_S][:3]
        if earlier := len(failed) - len(recent):
            console.note(f"why {counted(earlier, 'earlier run')} failed: `holmes status RUN`")
        failed = recent
    for s in failed:
        rank = f"rank {s.failed_rank} on {s.failed_node}: " if s.failed_rank is not None else ""
        run = RunDirectory(s.path)
        saved = checkpoint_directory.complete_checkpoints(run.checkpoints) if s.ended else []
        log_lines = quote_log(s.log_tail, s.error or "", s.failed_rank)
        console.text(f"\n{s.name}: {rank}{s.error}", *log_lines, *resume_advice(run, [c.step for c in saved]))


def _run_notes(s: Status) -> Iterator[str]:
    """Yield how many warnings a run logged, and the latest lost node and the goodput of an elastic run."""
    run = RunDirectory(s.path)
    if s.state != "completed":
        lost_nodes = [line for line in tail(run.logs / "batch.txt", 200) if line.startswith("holmes: lost node")]
        yield from (f"{run.name}: {line.removeprefix('holmes: ')}" for line in lost_nodes[-1:])
    if warnings := logged_warnings(run):
        yield f"{run.name}: {warnings}"
    record, lines = (run.read_run(), run.metrics()) if s.step else ({}, [])
    if lines and ((record.get("config") or {}).get("elastic") or {}).get("enabled"):
        useful_s = sum(number(line.get("step_time_s")) for line in lines)
        share = goodput(useful_s, record["created"], number(lines[-1].get("time")))
        yield f"{run.name}: {share:.0%} of the time since its creation is in steps that were not repeated"


@app.command()
def logs(
    run: Run,
    rank: Annotated[int | None, typer.Option(help="Show only this rank's log.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Number of lines of each log.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until the run ends.")] = False,
    json: Json = False,
) -> None:
    """Show the last lines of a run's logs.

    Example: holmes logs my-run --rank 0 -n 50"""
    record = find_run(run)
    paths = [record.log_path(rank)] if rank is not None else log_paths(record)
    if len(paths) > MAX_LOGS and not (json or follow):
        console.note(f"{len(paths) - MAX_LOGS} more logs are not shown; `holmes logs {run} --rank N` shows one")
        paths = paths[:MAX_LOGS]
    if rank is not None and not paths[0].exists():
        raise ConfigError(f"no log of rank {rank}", where=str(record.path), hint="`holmes logs RUN` shows all")
    if not paths:
        console.note(f"no log in {record.logs}; `holmes status {run}` shows the run's state")
    if follow and json:
        raise ConfigError("--follow and --json are mutually exclusive", where="logs", hint="leave one of them out")
    if json:
        console.as_json({"run": str(record.path), "logs": {path.name: list(tail(path, lines)) for path in paths}})
        return
    if follow:
        for number, line in follow_logs(record, end_detector(record), rank):
            console.text(f"{number}: {line}")
        return
    for path in paths:
        console.text(f"== {path.name}", *tail(path, lines))


@app.command()
def cancel(run: Run, json: Json = False) -> None:
    """Cancel a run's job with all its components.

    Example: holmes cancel my-run"""
    record = find_run(run)
    is_local_run = is_local(record.read_run())
    with console.waiting("waiting for its ranks to save and exit" if is_local_run else "asking Slurm"):
        state = cancel_run(record)
    if state.state == UNKNOWN:
        problem = "Slurm does not answer, or does not know the job"
        hint = "check with `scontrol ping` and `squeue --me`"
        raise ConfigError(problem, where=str(record.path), hint=hint)
    if json:
        console.as_json({"run": str(record.path), "was": state.state.lower(), "cancelled": not state.ended})
        return
    console.text(f"{run}: was {state.state.lower()}" + (", nothing to cancel" if state.ended else ", cancelled"))
    if state.state == "RUNNING" and record.read_run().get("config"):
        checkpoints = checkpoint_directory.complete_checkpoints(record.checkpoints)
        nothing_saved = "no checkpoint" if record.metrics_bytes() else "no step and no checkpoint"
        saved = f"its last checkpoint is of step {checkpoints[0].step}" if checkpoints else f"it has {nothing_saved}"
        if not is_local_run:
            kill_wait = ""  # the time between SIGTERM and SIGKILL, such as "30 sec"
            with contextlib.suppress(HolmesError):
                kill_wait = scontrol.read_config().get("KillWait")
            condition = f"if Slurm's KillWait{f' ({kill_wait} here)' if kill_wait else ''} is long enough for both"
            saved = f"so far {saved}; its ranks finish a step or two and save, {condition}"
        console.note(saved)


@group.command("status")
def sweep_status(directory: Directory, json: Json = False) -> None:
    """Show a live table of a sweep's jobs.

    Example: holmes sweep status runs/sweep-20260101-120000"""
    if sys.stdout.isatty() and not json:
        sweep_table.show_live(directory)
    else:
        rows = sweep_table.sweep_status(directory)
        console.output(json, list(map(asdict, rows)), (directory, *sweep_table.table_cells(rows)))


@group.command("collect")
def sweep_collect(directory: Directory, json: Json = False) -> None:
    """Show the results of a sweep's jobs.

    Example: holmes sweep collect runs/sweep-20260101-120000 --json"""
    jobs = sweep_table.collect(directory)
    common = [o for o in jobs[0]["overrides"] if all(o in job["overrides"] for job in jobs)] if len(jobs) > 1 else []
    finals = [job["final"] for job in jobs]  # a run's final figures, or the value that a job's function returned
    results = [f if isinstance(f, dict) else {} if f is None or not _short(f) else {"value": f} for f in finals]
    figures = sorted({name for result in results for name in result}, key=lambda name: (name != "value", name))
    rows = []
    for job, result in zip(jobs, results, strict=True):
        texts = (_short(result[name]) if name in result else "" for name in figures)
        rows.append([job["num"], " ".join(o for o in job["overrides"] if o not in common), job["state"], *texts])
    caption = f"all with {' '.join(common)}" if common else ""
    console.output(json, jobs, (directory, ["job", "overrides", "state", *figures], rows, caption))


@group.command("cancel")
def sweep_cancel(directory: Directory) -> None:
    """Cancel the active jobs of a sweep.

    Example: holmes sweep cancel runs/sweep-20260101-120000"""
    manifest = read_manifest(directory)
    active = {row.num for row in sweep_table.sweep_status(directory) if not row.ended}
    jobs = [job for job in manifest.jobs if job.num in active]
    cancel_sweep(manifest, jobs)
    console.note(f"cancelled {len(jobs)} of {counted(len(manifest.jobs), 'job')}" if jobs else "all jobs have ended")


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
