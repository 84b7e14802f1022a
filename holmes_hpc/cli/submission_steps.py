"""Steps of planning and submitting a run that several commands share."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holmes_hpc import console
from holmes_hpc.cli.app import load_site
from holmes_hpc.config.composition import check_overrides, load
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.config.elastic import ElasticConfig
from holmes_hpc.config.hugging_face import folder_of
from holmes_hpc.errors import ConfigError, SubmissionError
from holmes_hpc.fabric.local_gpus import has_gpu
from holmes_hpc.fabric.software import NEEDED, software
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import check_site, fitting_machine, make_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.problem import searched_site
from holmes_hpc.rank import run_rank
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission import queue_estimate
from holmes_hpc.submission.executor.submit import SubmissionUnknown
from holmes_hpc.submission.lifecycle import create
from holmes_hpc.submission.lifecycle.requirements import allow_open_files, check_training
from holmes_hpc.submission.lifecycle.status import Job, job_of
from holmes_hpc.submission.local import run_plan_locally
from holmes_hpc.submission.plan_job import PlannedJob, submit_plan
from holmes_hpc.submission.queue_estimate import QueueEstimate
from holmes_hpc.submission.time_limit import START_UP_S, requeue_warning, steps_per_job


def plan_run(
    overrides: Sequence[str], *, earliest: bool = False, plan_file: str | None = None
) -> tuple[Plan, Configuration]:
    """Return the plan and the configuration of a run, checked against its site and data.
    `plan_file`: path of a plan to run instead of planning; `earliest`: choose the plan with the earliest estimated end,
    and set the job's time limit as in that estimate."""
    config = load(overrides)
    if plan_file is None:
        create.refuse_taken_name(config)
    config = replace(config, plan_file=plan_file or config.plan_file)
    if earliest:
        check_earliest(config)
    if config.plan_file:
        check_overrides(overrides)
        plan = make_plan(config)
        config = replace(config, model=plan.model, batch=plan.batch)
    config = config.with_data()
    check_inputs(config)
    if earliest:
        estimates = earliest_ends(config)
        show_estimates(estimates, config.train.steps, stderr=True)
        return estimates[0].plan, replace(config, slurm=replace(config.slurm, timeout_min=estimates[0].timeout_min))
    plan = make_plan(config, None if config.plan_file else load_site(config), Clock(report=console.note))
    if config.plan_file:
        check_site(plan, load_site(fitting_machine(config, plan)))
    check_training(config.train, plan)
    if not config.elastic.enabled and config.elastic != ElasticConfig():
        console.note("keys of the group elastic have no effect without --elastic")
    nodes, least = sum(part.nodes for part in plan.components), config.elastic.min_nodes
    is_too_large = config.elastic.enabled and least > nodes
    problem = f"{least} nodes are more than the {nodes} of the plan, so the run could not go on after a loss"
    ConfigError.refuse("elastic.min_nodes", (is_too_large, problem, f"use at most {nodes}"))
    has_members, pools = config.elastic.enabled and config.elastic.members, len(plan.components)
    problem = f"{config.elastic.min_fabrics} pools are more than the {pools} of the plan, so the run would never start"
    is_too_large = has_members and config.elastic.min_fabrics > pools
    ConfigError.refuse("elastic.min_fabrics", (is_too_large, problem, f"use at most {pools}"))
    if has_members and pools == 1:
        console.note("elastic.members has no effect: the plan has one pool, so it is one job anyway")
    elif has_members:
        is_short = steps_per_job(plan, config.slurm.timeout_min) < 1
        problem = f"{config.slurm.timeout_min} is too short for a job to start and train"
        ConfigError.refuse("slurm.timeout_min", (is_short, problem, "increase it, or leave out elastic.members"))
    note_requeues(plan, config)
    return plan, config


def note_requeues(plan: Plan, config: Configuration, done_steps: int = 0) -> None:
    """Warn on stderr if the job's time limit is too short for all remaining steps.
    `done_steps`: number of steps up to the last checkpoint."""
    if not config.local and (line := requeue_warning(plan, config.train.steps - done_steps, config.slurm.timeout_min)):
        console.note(line)


def check_inputs(config: Configuration) -> None:
    """Raise HolmesError if a job with this configuration would fail: local ranks lack packages or a GPU, a file is
    missing, or weights or data do not fit the model."""
    if config.local:
        allow_open_files(1)
    if config.local and (packages := missing_packages()):
        hint = "pip install 'holmes-hpc[train]' (without a GPU: docs/install.md, torch's CPU build)"
        raise ConfigError(f"this Python has no {packages}", where="launcher=local", hint=hint)
    lacks_gpu = config.local and config.train.device == "cuda" and not has_gpu()
    ConfigError.refuse("train.device", (lacks_gpu, "this machine has no GPU", "leave out launcher=local, or use cpu"))
    for key, path in (("checkpoint", config.checkpoint), ("data.tokenizer", config.data.tokenizer)):
        if path is not None and not path.startswith("hf:") and not Path(path).exists():
            raise ConfigError(f"{path!r} does not exist", where=key, hint="give the path of an existing file or folder")
    if (folder := folder_of(config.checkpoint)) is not None:
        from holmes_hpc.training.checkpoint.hugging_face_folder import Folder

        with console.waiting("checking the weights"):
            Folder(folder).check_model(config.model)
    if config.data.kind == "indexed":
        from holmes_hpc.training.data.prefix import check_data

        with console.waiting("checking the data"):
            check_data(config.data, config.model, config.batch, config.train.eval_interval > 0)


def missing_packages() -> str | None:
    """Return a text with the names of packages that ranks need and this Python lacks; None if it lacks none."""
    installed = software()
    return " and ".join(name for name in NEEDED if name not in installed) or None


def create_and_submit(
    plan: Plan, config: Configuration, overrides: list[str] | None, test: bool = True
) -> tuple[RunDirectory, Job]:
    """Create the run directory and submit the run. Return the run and its job. `test`: as in :func:`submit_run`.
    If the submission fails, remove the directory, unless a job exists or may exist."""
    path = create.run_directory_path(config, plan)
    with create.hold_submission_lock(path, "`holmes run` or `submit`"):
        if config.name is not None or config.run_dir:
            create.remove_unused_run(RunDirectory(path))
        config = replace(config, run_dir=str(path))
        run = create.create_run(config, plan, overrides or [], needs_empty_directory=True)
        try:
            job = submit_run(plan, run, config, test)
        except SubmissionUnknown:
            raise
        except BaseException:
            record = run.read_run()
            if record["slurm"] or record.get("local"):
                console.note(f"the job of {run.path} continues; `holmes cancel {run.path}` ends it")
            else:
                shutil.rmtree(run.path, ignore_errors=True)  # on NFS the open lock file stays until it is closed
            raise
    if not config.train.checkpoint_interval:
        console.note("train.checkpoint_interval is 0: only an interrupted run saves a checkpoint")
    return run, job


def submit_run(plan: Plan, run: RunDirectory, config: Configuration, test: bool = True) -> Job:
    """Submit a run to Slurm, or start its ranks on this machine with the local launcher. Return the run's job.
    `test`: note when the job could start, and check Slurm's limits; if False, check only that each component fits."""
    planned = PlannedJob(plan, config.to_dict(), run_rank, config.slurm)
    if config.local:
        return run_plan_locally(planned, run.path)
    if not config.slurm.container and not config.slurm.setup and (packages := missing_packages()):
        advice = "`holmes doctor` shows what the nodes have; pip install 'holmes-hpc[train]' if they have none either"
        console.note(f"this Python has no {packages}, and the ranks use it too: {advice}")
    start = None
    if test:
        with console.waiting("asking Slurm when the job could start"):
            start, text = queue_estimate.expected_start(plan, config.slurm)
        console.note(text)
    submit_plan(planned, run.path, test=test)
    job = job_of(run)
    job.expected_start = start
    return job


def check_earliest(config: Configuration) -> None:
    """Raise ConfigError if --earliest has no choice, because of a plan file or the local launcher, or has no sbatch."""
    fixed = ((config.plan_file, "one plan only"), (config.local, "launcher=local"))
    hint, missing = "leave one of them out", "there is no sbatch on this machine"
    ConfigError.refuse(
        "--earliest",
        *((value, f"{reason} leaves Slurm no choice", hint) for value, reason in fixed),
        (config.site_file and shutil.which("sbatch") is None, missing, "leave it out, or load Slurm's commands"),
    )


def earliest_ends(config: Configuration, clock: Clock | None = None, costs: Costs | None = None) -> list[QueueEstimate]:
    """Return queue estimates of plans for the whole site and for parts of the site, in order of their estimated ends.

    Plans that cannot run come last. `clock`: time limit of all searches together; `costs`: cost model to use instead
    of the configuration's. Call :func:`check_earliest` first. Raise SubmissionError if no plan can run."""
    whole_site = searched_site(load_site(config), config.plan)

    def plan_for(nodes: dict[str, int] | None) -> Plan:
        part_config = config if nodes is None else replace(config, plan=replace(config.plan, nodes=nodes))
        return make_plan(part_config, whole_site, clock, costs)

    with console.waiting("planning for the site and its parts"):
        plans = queue_estimate.candidate_plans(plan_for, whole_site) if config.plan.nodes is None else [plan_for(None)]
    with console.waiting("asking Slurm when each could start"):
        estimates = queue_estimate.estimate_ends(plans, config.train.steps, config.slurm)
    if estimates[0].end is None:
        problem = f"none of {len(estimates)} plans can run; the best of them: {estimates[0].reason}"
        raise SubmissionError(problem, where="--earliest", hint="see `holmes nodes` and `holmes doctor`")
    return estimates


def show_estimates(estimates: Sequence[QueueEstimate], steps: int, *, stderr: bool = False) -> None:
    """Print the table of --earliest, then the plans that cannot run."""
    title = f"{steps} steps, including {START_UP_S:.0f} s to start up"
    console.table(title, *queue_estimate.estimate_rows(estimates), stderr=stderr)
    for estimate in estimates:
        if estimate.reason:
            console.note(f"cannot run on {queue_estimate.nodes_text(estimate.plan)}: {estimate.reason}")
    if (members := queue_estimate.member_starts(estimates, steps)) is not None:
        starts = ", ".join(f"{pool} at {queue_estimate.clock(start)}" for pool, start in members[0].items())
        console.note(f"with --elastic elastic.members=true: {starts}; end {queue_estimate.clock(members[1])}")
    console.note(f"the first start assumes slurm.timeout_min={estimates[0].timeout_min}")
