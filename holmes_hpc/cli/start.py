"""What the verbs that start a run share: its plan, when it could start, its directory and its job."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holmes_hpc import console
from holmes_hpc.cli.app import asked_site
from holmes_hpc.config.composition import check_overrides, load
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.hugging_face import folder_of
from holmes_hpc.errors import ConfigError, SubmissionError
from holmes_hpc.fabric.software import NEEDED, software
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import check_site, make_plan, site
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.rank import run_rank
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import OWN_FILES
from holmes_hpc.schema import refuse
from holmes_hpc.slurm.job_states import NOT_SUBMITTED
from holmes_hpc.submission import queue_estimate as queue
from holmes_hpc.submission.executor.submit import SubmissionUnknown
from holmes_hpc.submission.lifecycle.attempts import others, starting
from holmes_hpc.submission.lifecycle.create import new_run, new_run_path
from holmes_hpc.submission.lifecycle.outcome import is_end
from holmes_hpc.submission.lifecycle.status import Job, job_of, run_status
from holmes_hpc.submission.local import run_plan_here
from holmes_hpc.submission.plan_job import submit_plan


def planned(
    overrides: Sequence[str], *, earliest: bool = False, plan_file: str | None = None
) -> tuple[Plan, Configuration]:
    """The plan of a configuration, checked against the site and the data that it will run on; and the configuration.
    `earliest`: the plan that ends first, and the time limit with which it starts that soon."""
    config = load(overrides)
    config = replace(config, plan_file=plan_file or config.plan_file)
    if earliest:
        check_choice(config)
    if config.plan_file:
        check_overrides(overrides)
        given = make_plan(config)
        config = replace(config, model=given.model, batch=given.batch)
    config = config.with_data()
    look_at_files(config)
    if earliest:
        ends = earliest_ends(config)
        show_ends(ends, config.train.steps, stderr=True)
        return ends[0].plan, replace(config, slurm=replace(config.slurm, timeout_min=ends[0].timeout_min))
    chosen = make_plan(config, None if config.plan_file else asked_site(config), Clock(say=console.note))
    if config.plan_file:
        check_site(chosen, asked_site(config))
    return chosen, config


def look_at_files(config: Configuration) -> None:
    """Refuse, before anything is planned or queued, files that are not there, data that do not fit the model, and ranks
    on this machine without what they need."""
    if config.local and (packages := lacking()):
        raise ConfigError(
            f"this Python has no {packages}",
            where="launcher=local",
            hint="pip install 'holmes-hpc[train]' (without a GPU: docs/install.md, torch's CPU build)",
        )
    for key, path in (("checkpoint", config.checkpoint), ("data.tokenizer", config.data.tokenizer)):
        if path is not None and not path.startswith("hf:") and not Path(path).exists():
            raise ConfigError(f"{key} is {path!r}, which is not there", hint="give the path of one that exists")
    if (folder := folder_of(config.checkpoint)) is not None:
        from holmes_hpc.training.checkpoint.hugging_face_folder import Folder

        with console.waiting("looking at the weights"):
            Folder(folder).check_model(config.model)
    if config.data.kind == "indexed":
        from holmes_hpc.training.data.prefix import check_data

        with console.waiting("looking at the data"):
            check_data(config.data, config.model, config.batch, config.train.eval_interval > 0)


def lacking() -> str | None:
    """The packages that ranks need and this Python lacks, in words; None where it has them all."""
    has = software()
    return " and ".join(name for name in NEEDED if name not in has) or None


def start(chosen: Plan, config: Configuration, overrides: list[str] | None) -> tuple[RunDirectory, Job]:
    """Make the run directory and submit; the run and its job come back. A refused run leaves nothing behind; one that
    has a job, or may have one, is kept, whatever happens here."""
    path = new_run_path(config, chosen)
    with starting(path, "`holmes submit`"):
        if config.name is not None or config.run_dir:
            _make_room(RunDirectory(path))
        config = replace(config, run_dir=str(path))
        record = new_run(config, chosen, overrides or [], True)
        try:
            job = submit_run(chosen, record, config)
        except SubmissionUnknown:
            raise
        except BaseException:
            made = record.read_run()
            if made["slurm"] or made.get("local"):
                console.note(f"{record.path} goes on; `holmes cancel {record.path}` ends it")
            else:
                shutil.rmtree(record.path, ignore_errors=True)  # on NFS the lock is in it until it is closed
            raise
    if not config.train.checkpoint_interval:
        console.note("train.checkpoint_interval is 0: only a run that is interrupted leaves a checkpoint")
    return record, job


def _make_room(record: RunDirectory) -> None:
    """Take away a run that ended, or was never submitted, without having made a step: its name may be used again. Its
    directory stays, with the lock of who starts it."""
    if not record.exists() or record.metrics_bytes() or any(record.checkpoints.glob("*")):
        return
    state = run_status(record).state
    found = others(record.path)
    if (is_end(state) or state == NOT_SUBMITTED.lower()) and OWN_FILES.issuperset(found):
        console.note(f"{record.name} made no step ({state}): it begins anew")
        for path in map(record.path.joinpath, found):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def submit_run(chosen: Plan, record: RunDirectory, config: Configuration) -> Job:
    """Submit a run as its launcher says; its job comes back."""
    if config.local:
        return run_plan_here(chosen, record.path, run_rank, config.to_dict(), config.slurm)
    if not config.slurm.container and not config.slurm.setup and (packages := lacking()):
        console.note(
            f"this Python has no {packages}, and the nodes start the same one: `holmes doctor` tells what they"
            " have; pip install 'holmes-hpc[train]' where they lack it"
        )
    submit_plan(chosen, record.path, run_rank, config.to_dict(), config.slurm)
    return job_of(record)


def check_choice(config: Configuration) -> None:
    """ConfigError where there is nothing for --earliest to choose from."""
    fixed = ((config.site_file, "a site file"), (config.plan_file, "one plan only"), (config.local, "launcher=local"))
    refuse("--earliest", *((given, f"{what} leaves Slurm no choice", "leave one of them out") for given, what in fixed))


def earliest_ends(
    config: Configuration, clock: Clock | None = None, known: Costs | None = None
) -> list[queue.PlannedStart]:
    """The plans for this site and its parts, the one that ends first at the head; `clock`: of all searches together;
    `known`: costs in place of the configuration's.
    ConfigError where Slurm cannot be asked; SubmissionError when none of them can run."""
    check_choice(config)
    here = site(config)

    def plan_for(nodes: dict[str, int] | None) -> Plan:
        wanted = config if nodes is None else replace(config, plan=replace(config.plan, nodes=nodes))
        return make_plan(wanted, here, clock, known)

    with console.waiting("planning for the site and its parts"):
        plans = queue.plans_to_try(plan_for, here) if config.plan.nodes is None else [plan_for(None)]
    with console.waiting("asking Slurm when each could start"):
        found = queue.earliest(plans, config.train.steps, config.slurm)
    if found[0].end is None:
        raise SubmissionError(
            f"none of {len(found)} plans can run; the best: {found[0].reason}",
            where="--earliest",
            hint="see `holmes nodes` and `holmes doctor`",
        )
    return found


def show_ends(ends: Sequence[queue.PlannedStart], steps: int, *, stderr: bool = False) -> None:
    """The table of --earliest."""
    console.table(
        f"{steps} steps, {queue.START_UP_S:.0f} s to start up included", *queue.start_rows(ends), stderr=stderr
    )
    for end in ends:
        if end.reason:
            console.note(f"cannot run on {queue.nodes_of(end.plan)}: {end.reason}")
    console.note(f"that start holds for slurm.timeout_min={ends[0].timeout_min}")
