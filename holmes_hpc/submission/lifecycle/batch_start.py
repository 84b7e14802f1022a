"""First command of a batch script that the user submits with sbatch:
``python -m holmes_hpc.submission.lifecycle.batch_start RUN_DIR PLAN MAX_RESTARTS [KEY=VALUE]...``.

It creates the run directory of a plan, with the configuration that the ranks will have, and records the job's id. After
a requeue the directory exists and stays as it is. MAX_RESTARTS is the value of train.max_restarts, unless an override
sets it. A requeued job may end here: see :func:`holmes_hpc.submission.lifecycle.requeue_decision.check_requeued_job`.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holmes_hpc import console
from holmes_hpc.config.composition import check_overrides, load
from holmes_hpc.errors import ConfigError, HolmesError, RecordError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.executor.environment import TASKS_PER_NODE
from holmes_hpc.submission.lifecycle.create import create_run, hold_submission_lock
from holmes_hpc.submission.lifecycle.requeue_decision import check_requeued_job
from holmes_hpc.submission.lifecycle.status import job_of


def prepare_run(directory: Path, plan_path: Path, max_restarts: int = 0, overrides: Sequence[str] = ()) -> RunDirectory:
    """Create the run directory unless it exists, record the job's id, and return the directory. Raise PlanError for an
    invalid plan, ConfigError for a bad override, RecordError for a directory that cannot be used."""
    run, job_id = RunDirectory(directory), os.environ.get("SLURM_JOB_ID", "")
    with hold_submission_lock(directory, "the batch script"):
        if not run.exists():
            check_overrides(overrides)
            all_overrides, plan = [f"train.max_restarts={max_restarts}", *overrides], Plan.read(plan_path)
            _check_components(plan, str(plan_path))
            config = replace(load(all_overrides), model=plan.model, batch=plan.batch, run_dir=str(run.path))
            create_run(config.with_data(), plan, all_overrides)
        if job_id.isdecimal():
            _check_earlier_job(run, job_id)
            count, name = int(os.environ.get("SLURM_HET_SIZE") or 1), os.environ.get("SLURM_JOB_NAME", "")
            run.update_run(slurm={"job_id": int(job_id), "components": count, "name": name})
    return run


def _check_earlier_job(run: RunDirectory, job_id: str) -> None:
    """Raise RecordError if another job of the run is still active."""
    slurm_record = run.read_run()["slurm"]
    if not slurm_record or str(slurm_record.get("job_id")) == job_id:
        return
    earlier_job = job_of(run)
    state = earlier_job.state("force")
    if not state.ended and not state.forgotten:
        problem = f"job {earlier_job.id} of this run is still {state.state}"
        hint = f"wait for its end, or `scancel {earlier_job.id}`; or set RUN to another directory"
        raise RecordError(problem, where=str(run.path), hint=hint)


def _check_components(plan: Plan, where: str) -> None:
    """Raise ConfigError if this job's components, nodes or ranks per node are not the plan's (path: `where`)."""
    count = int(os.environ.get("SLURM_HET_SIZE") or 1)
    if "SLURM_JOB_ID" not in os.environ:
        return
    hint = "write the script for this plan: `holmes submit PLAN --template FILE`"
    if count != len(plan.components):
        problem = f"the plan has {len(plan.components)} components, this job has {count}"
        raise ConfigError(problem, where=where, hint=hint)
    for index, part in enumerate(plan.components):
        plain_nodes = os.environ.get("SLURM_JOB_NUM_NODES") if count == 1 else None
        nodes = os.environ.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{index}") or plain_nodes
        ranks, planned = os.environ.get(TASKS_PER_NODE.format(index)), (str(part.nodes), str(part.gpus_per_node))
        if (nodes or planned[0], ranks or planned[1]) != planned:
            planned_text = f"component {index} ({part.pool}) of the plan has {planned[0]} nodes with {planned[1]} ranks"
            problem = f"{planned_text} each, that of this job has {nodes} with {ranks}"
            raise ConfigError(problem, where=where, hint=hint)


def main() -> int:
    directory, plan_path, *options = sys.argv[1:]
    try:
        run = prepare_run(Path(directory), Path(plan_path), int(options[0]) if options else 0, options[1:])
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        return check_requeued_job(run, os.environ.get("SLURM_JOB_ID", ""), restarts) if restarts else 0
    except (HolmesError, OSError) as e:
        console.problem(e)
        return 2


if __name__ == "__main__":
    sys.exit(main())
