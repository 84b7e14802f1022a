"""Commands that submit, continue, remove and report runs: submit, run, resume, rm, report."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from holmes_hpc import console
from holmes_hpc.cli.app import app, check_output, is_file_argument, note_partition_limits
from holmes_hpc.cli.options import Earliest, Elastic, Json, Overrides, Run, command_with_keys, with_options
from holmes_hpc.cli.submission_steps import check_inputs, create_and_submit, note_requeues, plan_run, submit_run
from holmes_hpc.config.composition import with_flags
from holmes_hpc.config.configuration import recorded
from holmes_hpc.config.learning_rate import describe_lr_change
from holmes_hpc.errors import ConfigError, HolmesError, counted
from holmes_hpc.extras import missing
from holmes_hpc.planning.cost.predict import timeline
from holmes_hpc.planning.layout_text import placements, plan_changes
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import costs
from holmes_hpc.records.find import find_run, runs_root
from holmes_hpc.records.locks import refuse_replaced
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.executor.preflight import shortages
from holmes_hpc.submission.executor.submit import SubmissionUnknown
from holmes_hpc.submission.lifecycle import create, progress, status
from holmes_hpc.submission.plan_job import plan_components
from holmes_hpc.submission.queue_estimate import iso
from holmes_hpc.submission.sweeps.sweep_table import is_sweep
from holmes_hpc.submission.templates import plan_script
from holmes_hpc.training.checkpoint import checkpoint_directory

_PLAN = "A file of `holmes plan -o`."
_DRY_RUN = "Print a batch script for sbatch; submit nothing."
_TEMPLATE = "Write that script here; submit nothing."
_TRACE = "Also write a run's timeline here, for Perfetto."
_TEST = "Ask Slurm when the job could start, and check limits. Else check only that each component fits."


@app.command()
@with_options("--site")
def submit(
    *,
    plan_path: Annotated[str | None, typer.Argument(metavar="PLAN", help=_PLAN, show_default=False)] = None,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    dry_run: Annotated[bool, typer.Option("--dry-run", help=_DRY_RUN)] = False,
    template: Annotated[str | None, typer.Option(metavar="FILE", help=_TEMPLATE)] = None,
    test: Annotated[bool, typer.Option("--test/--no-test", help=_TEST)] = True,
    elastic: Elastic = False,
    json: Json = False,
) -> None:
    """Submit a plan as one heterogeneous job.

    Example: holmes submit plan.yaml train.steps=100 slurm.account=ml"""
    if plan_path is None or not is_file_argument(plan_path):
        hint = "create one with `holmes plan … -o plan.yaml`, then `holmes submit plan.yaml`; `holmes run` does both"
        raise ConfigError("no plan", where="submit", hint=hint)
    plan, config = plan_run([*with_flags(flags, overrides), *["elastic.enabled=true"] * elastic], plan_file=plan_path)
    tokens = config.train.steps * plan.batch.global_size * plan.batch.sequence_length
    console.note(f"train.steps is {config.train.steps:,}: {tokens:,} tokens")
    if dry_run or template:
        hint = "submit the plan without --dry-run and --template"
        ConfigError.refuse("submit", (config.elastic.enabled, "an elastic run has no script for sbatch yet", hint))
        note_partition_limits(plan, config)
        console.note(*shortages(plan_components(plan, config.slurm)))
        check_output(template)
        run_dir = str(create.run_directory_path(config, plan))
        script = plan_script(plan, Path(plan_path), run_dir, config.slurm, overrides or [], config.train.max_restarts)
        if template:
            Path(template).write_text(script, encoding="utf-8")
            console.note(f"written: {template}")
        if json:
            console.as_json({"run": run_dir, "plan": plan.id, "components": plan.layout, "script": script})
        elif dry_run:
            sys.stdout.write(script)
        return
    run, job = create_and_submit(plan, config, overrides, test)
    if json:
        console.as_json({"run": str(run.path), "job_id": job.id, "expected_start": iso(job.expected_start)})
    else:
        console.text(f"job {job.id}: {run.path}")
        name = run.path.name if run.path == (runs_root() / run.path.name).absolute() else run.path
        console.note(f"next: `holmes status {name}`, `holmes logs {name} -f`")


@app.command(cls=command_with_keys("train", "data", "slurm", "elastic"))
@with_options("--site", "--steps")
def run(
    *,
    overrides: Overrides = None,
    flags: Mapping[str, Any],
    earliest: Earliest = False,
    elastic: Elastic = False,
    json: Json = False,
) -> None:
    """Plan, submit, watch and report a run.

    Example: holmes run model=gpt_tiny 'plan.nodes={ib-a: 2, roce-a: 2}'"""
    overrides = [*with_flags(flags, overrides), *["elastic.enabled=true"] * elastic]
    plan, config = plan_run(overrides, earliest=earliest)
    console.note(f"plan {plan.id}: {plan.strategy_label}; {'; '.join(placements(plan))}")
    record, job = create_and_submit(plan, config, overrides)
    console.note(f"job {job.id}: {record.path}")
    code = progress.report_progress(record, job, show=console.note if json else console.text)
    if json:
        result = record.read_result() or {}
        if "exit_code" in result:  # the job's exit code; `exit_code` below is this command's
            result["job_exit_code"] = result.pop("exit_code")
        console.as_json({"run": str(record.path), "job_id": job.id, "exit_code": code, "result": result})
    elif code == 0:
        _show_figures(record)
    raise typer.Exit(code)


def _show_figures(record: RunDirectory) -> None:
    """Print the report of a run; if pandas is missing, print the final figures in result.json instead."""
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
    plan_path: Annotated[str | None, typer.Option("--plan", metavar="FILE", help="Continue with this plan.")] = None,
) -> None:
    """Continue a run from its last good checkpoint. The plan may be another one for the same model and batch.

    Example: holmes resume my-run train.steps=200 --plan four-ib.yaml"""
    record = find_run(run)
    with create.hold_submission_lock(record.path, "`holmes resume`") as lock:
        state = status.run_status(record).state
        checkpoints = checkpoint_directory.complete_checkpoints(record.checkpoints)
        if state == "completed" and not checkpoints:
            if checkpoint_directory.incomplete_checkpoints(record.checkpoints):
                checkpoint_directory.require_checkpoints(record.checkpoints)  # its error names what is incomplete
            problem = "it made all its steps and has no checkpoint to continue from"
            hint = "submit a new run, with train.checkpoint_interval=N"
            raise ConfigError(problem, where=str(record.path), hint=hint)
        plan, config = create.prepare_continuation(record, state, overrides or [], plan_path)
        old_record, (old_config, missing_keys) = record.read_run(), recorded(record.config)
        if missing_keys:
            console.note(f"an older version recorded no {', '.join(missing_keys)}: defaults are used")
        for path, why in checkpoint_directory.incomplete_checkpoints(record.checkpoints):
            console.note(f"warning: checkpoint {path} is incomplete ({why}); skipping it")
        check_inputs(config)
        last_step = checkpoints[0].step if checkpoints else 0
        problem, hint = f"the run's last checkpoint is of step {last_step}", f"give more than {last_step}"
        ConfigError.refuse("train.steps", (config.train.steps < last_step, problem, hint))
        if checkpoints:
            console.note(f"the run continues after step {last_step}, from {checkpoints[0].path}")
            if lr_change := describe_lr_change(old_config.train, config.train, last_step + 1):
                console.note(lr_change)
        else:
            console.note("no complete checkpoint: the run starts again with step 1")
        if plan_path and (changes := plan_changes(Plan.read(record.plan_path), plan)):
            console.note(f"the plan changes: {changes}")
        note_requeues(plan, config, last_step)
        refuse_replaced(record.path / create.LOCK, lock, record.path)
        reopened = record.reopen(plan.to_yaml() if plan_path else None)
        all_overrides = [*old_record["overrides"], *(overrides or [])]
        layout = {"plan_id": plan.id, "components": plan.layout}
        record.update_run(config=config.to_dict(), overrides=all_overrides, **layout)
        try:
            job = submit_run(plan, record, config)
        except SubmissionUnknown:
            raise
        except BaseException:
            new_record = record.read_run()
            if all(new_record.get(key) == old_record.get(key) for key in ("slurm", "local")):  # there is no new job
                record.close_again(reopened, old_record)
            raise
    console.note(f"job {job.id}: {record.path}")
    steps = len(record.metrics_bytes())
    code = progress.report_progress(record, job)
    if code == 1 and overrides and not plan_path and len(record.metrics_bytes()) == steps:
        record.update_run(config=old_record["config"], overrides=old_record["overrides"])
        console.note("no new step was made: the run's earlier configuration is restored")
    if code == 0:
        _show_figures(record)
    raise typer.Exit(code)


@app.command("rm")
def remove(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories, names or job ids.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove runs and their checkpoints, after a confirmation.

    Example: holmes rm my-run"""
    for name in runs:
        if is_sweep(name):
            raise ConfigError("it is a sweep, not a run", where=name, hint=f"name its runs: {name}/0 …")
    with console.waiting("asking Slurm"):
        statuses = status.run_statuses([find_run(name) for name in runs])
    for s in statuses:
        create.refuse_unless_ended(RunDirectory(s.path), s.state)
    if not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask for confirmation", where="rm", hint="add --yes")
    removed = []
    for s in statuses:
        steps = counted(s.step, "step") if s.step else "no step"
        if yes or typer.confirm(f"{s.path}: {s.state}, {steps}: remove it?", err=True):
            create.remove_run(RunDirectory(s.path))
            removed.append(s.path)
    if json:
        console.as_json({"removed": removed})
    else:
        console.text(*(f"removed: {path}" for path in removed))


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...")],
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write an HTML report here.")] = None,
    trace: Annotated[str | None, typer.Option(metavar="FILE", help=_TRACE)] = None,
    by: Annotated[str, typer.Option(help="Rank several runs by throughput or by loss.")] = "throughput",
    json: Json = False,
) -> None:
    """Report throughput, step time and bytes per network. Several runs are compared.

    Example: holmes report a b"""
    if by not in ("throughput", "loss"):
        raise ConfigError(f"--by is {by!r}", where="report", hint="use throughput or loss")
    for file in (html, trace):
        check_output(file)
    paths = [name if Path(name).is_dir() else find_run(name).path for name in runs]
    from holmes_hpc.results.html_report import write_html  # imported late, because pandas takes long
    from holmes_hpc.results.report import load_report

    run_report = load_report(paths, _planned_timeline, by)
    for file, write in ((html, partial(write_html, run_report)), (trace, run_report.write_trace)):
        if file:
            write(file)
            console.note(f"written: {file}")
    if missing_records := run_report.missing():
        console.note(missing_records)
    if json:
        console.as_json(run_report.to_dict())
        return
    for sentence in run_report.answer():
        console.paragraph(sentence)
    console.bars("samples/s", run_report.bars())
    for title, columns, rows, caption in run_report.tables():
        console.text("")
        console.table(title, columns, rows, caption)


def _planned_timeline(plan_path: Path) -> list[dict[str, Any]]:
    """Return the simulated timeline of the plan at `plan_path` in a run directory; empty if the simulation fails."""
    try:
        plan = Plan.read(plan_path)
        return timeline(plan, costs(recorded(RunDirectory(plan_path.parent).config)[0], plan))
    except (HolmesError, KeyError):
        return []
