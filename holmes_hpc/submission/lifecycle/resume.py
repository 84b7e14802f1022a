"""Going on with a run that ended: whether it may, with which configuration and plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holmes_hpc.config.composition import applied, check_overrides
from holmes_hpc.config.configuration import Configuration, recorded
from holmes_hpc.errors import ConfigError, RecordError
from holmes_hpc.planning.request import check_site, site
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import NOT_SUBMITTED
from holmes_hpc.submission.lifecycle.run_states import is_end


@dataclass(frozen=True)
class Continuation:
    """What a run goes on with. `before`: its recorded configuration. `missing`: keys of that one that an older version
    did not know."""

    plan: Plan
    config: Configuration
    before: Configuration
    missing: tuple[str, ...]


def continuation(record: RunDirectory, state: str, overrides: Sequence[str], plan_path: str | None) -> Continuation:
    """How the run `record`, whose job is in `state`, goes on. ConfigError where it may not: it runs, it has made all
    its steps, another model or batch; PlanError where the plan is for another site."""
    if state != NOT_SUBMITTED.lower() and not is_end(state):
        raise ConfigError(f"it is {state}", where=str(record.path), hint="wait for its end, or `holmes cancel` it")
    if not {"launcher", "train", "slurm"} <= record.config.keys():
        raise RecordError(
            "run.yaml has no whole configuration",
            where=str(record.path),
            hint="start a new run with its plan: `holmes submit`",
        )
    before, missing = recorded(record.config)
    config = before
    if overrides:
        check_overrides(overrides)
        config = replace(
            applied(before, overrides), run_dir=before.run_dir, plan_file=before.plan_file, site_file=before.site_file
        )
    if state == "completed" and config.train.steps <= before.train.steps:
        raise ConfigError(
            f"it has made all of its {before.train.steps} steps",
            where=str(record.path),
            hint=f"for more: holmes resume {record.name} train.steps=N",
        )
    chosen, own = Plan.read(plan_path or record.plan_path), Plan.read(record.plan_path)
    if chosen.model != own.model:
        raise ConfigError("the plan is for another model", where=plan_path or "", hint="plan for this run's model")
    size, length = own.batch.global_size, own.batch.sequence_length
    if (chosen.batch.global_size, chosen.batch.sequence_length) != (size, length):  # which data come next hangs on them
        raise ConfigError(
            "the plan has another batch",
            where=plan_path or "",
            hint=f"plan with batch.global_size={size} batch.sequence_length={length}",
        )
    if not config.local:
        check_site(chosen, site(config))
    elif plan_path:  # this machine starts as many ranks as are wanted
        ranks = chosen.components[0].gpus_per_node
        check_site(chosen, site(replace(config, plan=replace(config.plan, gpus_per_node=ranks))))
    return Continuation(chosen, config, before, tuple(missing))
