"""Commands that start, continue, remove and report runs: submit, run, resume, rm, report."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import Earliest, Json, Overrides, Run, app, check_output, is_file_argument, takes, with_keys
from holmes_hpc.cli.start import look_at_files, planned, start, submit_run
from holmes_hpc.config.composition import with_flags
from holmes_hpc.config.configuration import recorded
from holmes_hpc.config.learning_rate import describe_lr_change
from holmes_hpc.errors import ConfigError, HolmesError
from holmes_hpc.extras import missing
from holmes_hpc.planning.cost.predict import timeline
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import where_stages_lie
from holmes_hpc.planning.request import costs
from holmes_hpc.records.find import find_run, runs_root
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import NOT_SUBMITTED, UNKNOWN
from holmes_hpc.submission.executor.submit import SubmissionUnknown
from holmes_hpc.submission.lifecycle import progress, status
from holmes_hpc.submission.lifecycle.attempts import starting
from holmes_hpc.submission.lifecycle.create import continuation, new_run_path
from holmes_hpc.submission.sweeps.status_table import is_sweep
from holmes_hpc.submission.templates import script_for
from holmes_hpc.training.checkpoint import checkpoint_directory


@app.command()
@takes("--site")
def submit(
    *,
    plan_path: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="A file of `holmes plan -o`.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a batch script that sbatch can run as it is; submit nothing.")
    ] = False,
    template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write that script here; submit nothing.")
    ] = None,
    json: Json = False,
) -> None:
    """Submit a plan as one heterogeneous job. Example: holmes submit plan.yaml train.steps=100 slurm.account=ml"""
    if plan_path is None or not is_file_argument(plan_path):
        raise ConfigError(
            "no plan",
            where="submit",
            hint="make one with `holmes plan … -o plan.yaml`, then `holmes submit plan.yaml`; `holmes run` does both",
        )
    chosen, config = planned(with_flags(flags, overrides), plan_file=plan_path)
    tokens = config.train.steps * chosen.batch.global_size * chosen.batch.sequence_length
    console.note(f"train.steps is {config.train.steps:,}: {tokens:,} tokens")
    if dry_run or template:
        check_output(template)
        run_dir = str(new_run_path(config, chosen))
        script = script_for(chosen, Path(plan_path), run_dir, config.slurm, overrides or [], config.train.max_restarts)
        if template:
            Path(template).write_text(script, encoding="utf-8")
            console.note(f"written: {template}")
        if json:
            console.as_json({"run": run_dir, "plan": chosen.id, "components": chosen.layout, "script": script})
        elif dry_run:
            sys.stdout.write(script)
        return
    run, job = start(chosen, config, overrides)
    if json:
        console.as_json({"run": str(run.path), "job_id": job.id})
    else:
        console.text(f"job {job.id}: {run.path}")
        called = run.path.name if run.path == (runs_root() / run.path.name).absolute() else run.path
        console.note(f"next: `holmes status {called}`, `holmes logs {called} -f`")


@app.command(cls=with_keys("train", "data", "slurm"))
@takes("--site", "--steps")
def run(
    *, overrides: Overrides = None, flags: Mapping[str, Any], earliest: Earliest = False, json: Json = False
) -> None:
    """Plan, submit, follow, report. Example: holmes run model=gpt_tiny 'plan.nodes={ib-a: 2, roce-a: 2}'"""
    words = with_flags(flags, overrides)
    chosen, config = planned(words, earliest=earliest)
    console.note(f"plan {chosen.id}: {chosen.spread}, {where_stages_lie(chosen)}")
    record, job = start(chosen, config, words)
    console.note(f"job {job.id}: {record.path}")
    code = progress.follow(record, job, show=console.note if json else console.text)
    if json:
        result = record.read_result() or {}
        if "exit_code" in result:  # the job's; `exit_code` is this command's
            result["job_exit_code"] = result.pop("exit_code")
        console.as_json({"run": str(record.path), "job_id": job.id, "exit_code": code, "result": result})
    elif code == 0:
        _tell_figures(record)
    raise typer.Exit(code)


def _tell_figures(record: RunDirectory) -> None:
    """What came out of a run: its report, or without pandas the last step's figures."""
    try:
        report([str(record.path)])
    except ModuleNotFoundError as e:
        for figure, value in ((record.read_result() or {}).get("final") or {}).items():
            console.text(f"{figure}: {value}")
        console.note(f"for tables: {missing(e)}")


@app.command()
def resume(
    run: Run,
    overrides: Overrides = None,
    plan_path: Annotated[str | None, typer.Option("--plan", help="Go on under another plan.")] = None,
) -> None:
    """Go on from the last good checkpoint, also under another plan.

    Example: holmes resume my-run train.steps=200 --plan four-ib.yaml
    """

    record = find_run(run)
    with starting(record.path, "`holmes resume`"):
        state = status.run_status(record).state
        to_go_on = continuation(record, state, overrides or [], plan_path)
        chosen, before = to_go_on.plan, record.read_run()
        if to_go_on.missing:
            console.note(f"an older version recorded it without {', '.join(to_go_on.missing)}: defaults are used")
        for path, why in checkpoint_directory.incomplete_checkpoints(record.checkpoints):
            console.note(f"warning: checkpoint {path} is incomplete ({why}); skipping it")
        look_at_files(to_go_on.config)
        found = checkpoint_directory.complete_checkpoints(record.checkpoints)
        if state == "completed" and not found:
            raise ConfigError(
                "it made all its steps and kept no checkpoint to go on from",
                where=str(record.path),
                hint="start a new run, with train.checkpoint_interval=N",
            )
        if found:
            console.note(f"it goes on after step {found[0].step}, from {found[0].path}")
            if said := describe_lr_change(to_go_on.before.train, to_go_on.config.train, found[0].step + 1):
                console.note(said)
        else:
            console.note("no complete checkpoint: it begins again with step 1")
        kept = record.reopen(chosen.to_yaml() if plan_path else None)
        record.update_run(
            config=to_go_on.config.to_dict(),
            plan_id=chosen.id,
            components=chosen.layout,
            overrides=[*before["overrides"], *(overrides or [])],
        )
        try:
            job = submit_run(chosen, record, to_go_on.config)
        except SubmissionUnknown:
            raise
        except BaseException:
            made = record.read_run()
            if (made["slurm"], made.get("local")) == (before["slurm"], before.get("local")):  # no job was made
                record.close_again(kept, before)
            raise
    console.note(f"job {job.id}: {record.path}")
    steps = len(record.metrics_bytes())
    code = progress.follow(record, job)
    if code == 1 and overrides and not plan_path and len(record.metrics_bytes()) == steps:
        record.update_run(config=before["config"], overrides=before["overrides"])
        console.note("it made no step: the run's record has its configuration of before")
    if code == 0:
        _tell_figures(record)
    raise typer.Exit(code)


@app.command("rm")
def remove(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories, names or job ids.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove runs with all that they recorded, checkpoints too, after a question. Example: holmes rm my-run"""

    for name in runs:
        if is_sweep(name):
            raise ConfigError("a sweep is not removed as a whole", where=name, hint=f"name its runs: {name}/0 …")
    with console.waiting("asking Slurm"):
        found = status.run_statuses([find_run(name) for name in runs])
    for one in found:
        if not one.ended and one.state not in (NOT_SUBMITTED.lower(), UNKNOWN.lower(), "unreadable"):
            raise ConfigError(f"it is {one.state}", where=one.path, hint="wait for its end, or `holmes cancel` it")
    if not yes and not sys.stdin.isatty():
        raise ConfigError("no terminal to ask on", where="rm", hint="--yes answers")
    removed = []
    for one in found:
        made = f"{one.step} steps" if one.step else "no step"
        if yes or typer.confirm(f"{one.path}: {one.state}, {made}: remove it?", err=True):
            shutil.rmtree(Path(one.path).resolve())
            removed.append(one.path)
    if json:
        console.as_json({"removed": removed})
    else:
        for path in removed:
            console.text(f"removed: {path}")


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...")],
    html: Annotated[str | None, typer.Option(help="Also write one self-contained page here.")] = None,
    trace: Annotated[str | None, typer.Option(help="Also write a run's timeline here, for Perfetto.")] = None,
    by: Annotated[
        str, typer.Option(help="Rank several by throughput, or by loss: as a sweep of learning rates asks for.")
    ] = "throughput",
    json: Json = False,
) -> None:
    """Throughput, step time and bytes by NIC kind of one run; several side by side. Example: holmes report a b"""

    if by not in ("throughput", "loss"):
        raise ConfigError(f"--by is {by!r}", where="report", hint="use throughput or loss")
    for file in (html, trace):
        check_output(file)
    paths = [name if Path(name).is_dir() else find_run(name).path for name in runs]
    from holmes_hpc.results.html_report import write_html  # after what a mistyped name needs: pandas takes long
    from holmes_hpc.results.report import load_report

    made = load_report(paths, _simulated, by)
    for file, write in ((html, partial(write_html, made)), (trace, made.write_trace)):
        if file:
            write(file)
            console.note(f"written: {file}")
    if absent := made.missing():
        console.note(absent)
    if json:
        console.as_json(made.to_dict())
        return
    for sentence in made.answer():
        console.paragraph(sentence)
    console.bars("samples/s", made.bars())
    for title, columns, rows, caption in made.tables():
        console.text()
        console.table(title, columns, rows, caption)


def _simulated(plan_path: Path) -> list[dict[str, Any]]:
    """The timeline that a run's plan should have had, to show beside the measured one; none if it cannot be told."""

    try:
        plan = Plan.read(plan_path)
        return timeline(plan, costs(recorded(RunDirectory(plan_path.parent).config)[0], plan))
    except (HolmesError, KeyError):
        return []
