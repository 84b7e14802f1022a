"""What a batch script written by hand runs first:
``python -m holmes_hpc.submission.lifecycle.begin RUN_DIR PLAN RESTARTS [KEY=VALUE]...``.

It makes the run directory of a plan, with the configuration that the ranks will have, or leaves one alone that is there
(the job was requeued), and notes the job's id. RESTARTS: train.max_restarts, unless an override says otherwise.
A requeued job may be told here not to go on: see :func:`holmes_hpc.submission.lifecycle.finish.again`.
"""

from __future__ import annotations

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
from holmes_hpc.submission.lifecycle.attempts import starting
from holmes_hpc.submission.lifecycle.create import new_run
from holmes_hpc.submission.lifecycle.finish import again
from holmes_hpc.submission.lifecycle.status import job_of


def begin(directory: Path, plan_path: Path, restarts: int = 0, overrides: Sequence[str] = ()) -> RunDirectory:
    """The run directory, complete. Raises PlanError for a plan that cannot be run, ConfigError for a bad override,
    RecordError for a bad directory."""
    run, job_id = RunDirectory(directory), os.environ.get("SLURM_JOB_ID", "")
    with starting(directory, "the batch script"):
        if not run.exists():
            check_overrides(overrides)
            words, plan = [f"train.max_restarts={restarts}", *overrides], Plan.read(plan_path)
            _check_components(plan, str(plan_path))
            config = replace(load(words), model=plan.model, batch=plan.batch, run_dir=str(run.path))
            new_run(config.with_data(), plan, words)
        if job_id.isdecimal():
            _refuse_a_living_job(run, job_id)
            run.update_run(
                slurm={
                    "job_id": int(job_id),
                    "components": int(os.environ.get("SLURM_HET_SIZE") or 1),
                    "name": os.environ.get("SLURM_JOB_NAME", ""),
                }
            )
    return run


def _refuse_a_living_job(run: RunDirectory, job_id: str) -> None:
    recorded = run.read_run()
    if not recorded["slurm"] or str(recorded["slurm"].get("job_id")) == job_id:
        return
    before = job_of(run)
    state = before.state("force")
    if not state.ended and not state.forgotten:
        raise RecordError(
            f"job {before.id} has it ({state.state})",
            where=str(run.path),
            hint=f"wait for its end, or `scancel {before.id}`; or give RUN another directory",
        )


def _check_components(plan: Plan, where: str) -> None:
    """ConfigError where the job that this runs in is not the plan's: components, nodes, ranks a node."""
    found = int(os.environ.get("SLURM_HET_SIZE") or 1)
    if "SLURM_JOB_ID" not in os.environ:
        return
    hint = "write the script for this plan: `holmes submit PLAN --template FILE`"
    if found != len(plan.components):
        raise ConfigError(f"the plan has {len(plan.components)} components, this job {found}", where=where, hint=hint)
    for index, part in enumerate(plan.components):
        nodes = os.environ.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{index}") or (
            os.environ.get("SLURM_JOB_NUM_NODES") if found == 1 else None
        )
        ranks = os.environ.get(TASKS_PER_NODE.format(index))
        if (nodes or str(part.nodes), ranks or str(part.gpus_per_node)) != (str(part.nodes), str(part.gpus_per_node)):
            raise ConfigError(
                f"component {index} ({part.fabric}) of the plan is {part.nodes} nodes x"
                f" {part.gpus_per_node} ranks, this job's is {nodes} x {ranks}",
                where=where,
                hint=hint,
            )


def main(words: list[str]) -> int:
    try:
        run = begin(Path(words[0]), Path(words[1]), int(words[2]) if words[2:] else 0, words[3:])
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        return again(run, os.environ.get("SLURM_JOB_ID", ""), restarts) if restarts else 0
    except (HolmesError, OSError) as e:
        console.problem(e)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
