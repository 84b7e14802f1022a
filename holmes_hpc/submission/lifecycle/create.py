"""Making a run: the directory and the record of a new one; whether one that ended may go on, with which configuration
and plan."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holmes_hpc.commit import git_commit
from holmes_hpc.config.composition import applied, check_overrides
from holmes_hpc.config.configuration import Configuration, recorded
from holmes_hpc.errors import ConfigError, RecordError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import check_site, pace, site
from holmes_hpc.records.find import runs_root
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.schema import refuse
from holmes_hpc.slurm.job_states import NOT_SUBMITTED
from holmes_hpc.submission.lifecycle.attempts import others
from holmes_hpc.submission.lifecycle.outcome import is_end
from holmes_hpc.submission.lifecycle.requirements import check_engine, installed_version

VERSIONS = ("holmes-hpc", "torch", "megatron-core", "submitit", "hydra-core", "numpy")


def new_run_path(config: Configuration, plan: Plan) -> Path:
    """Where a new run's directory will be: `run_dir`, or `name` (else time, model and plan) under the runs' root."""
    given = config.name
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.model.name}-{plan.id[:6]}" if given is None else str(given)
    path = (Path(config.run_dir) if config.run_dir else runs_root() / name).absolute()
    refuse(
        "configuration",
        (
            not name or "/" in name or name in (".", "..") or len(name.encode()) > 200,
            f"name is {name[:80]!r}",
            "use 1 to 200 characters without '/', or give run_dir=PATH",
        ),
        (
            "%" in str(path) or not str(path).isprintable(),
            f"the run directory is {str(path)!r}",
            "leave out '%', which Slurm gives a meaning of its own, and control characters",
        ),
    )
    return path


def new_run(config: Configuration, plan: Plan, overrides: Sequence[str], alone: bool = False) -> RunDirectory:
    """Make the run directory of a new run. `alone`: ConfigError where other files are in it."""
    path = new_run_path(config, plan)
    if alone and not RunDirectory(path).exists() and others(path):
        raise ConfigError("other files are there", where=str(path), hint="give the run a directory of its own")
    if RunDirectory(path).exists() and config.name is not None and path == (runs_root() / str(config.name)).absolute():
        raise RecordError(
            "it already holds a run", where=str(path), hint="`holmes resume` goes on with it; or give another name"
        )
    filled = replace(config, run_dir=str(path), plan_file=str(path / "plan.yaml"))
    return RunDirectory.create(
        path,
        plan_text=plan.to_yaml(),
        config=filled.to_dict(),
        overrides=list(overrides),
        plan_id=plan.id,
        **facts(config, plan),
    )


def facts(config: Configuration, plan: Plan) -> dict[str, Any]:
    """What a new run's record says besides configuration and plan: components, pace, versions, commit. ConfigError
    where it could not train with what is installed."""
    check_engine(config.train.optimizer)
    return {
        "components": plan.layout,
        "pace_layer_ms": pace(config, plan),
        "versions": versions(),
        "git_commit": git_commit(),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what a run's figures depend on."""
    return {package: found for package in VERSIONS if (found := installed_version(package)) is not None}


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
    check_overrides(overrides)
    places: dict[str, Any] = {"run_dir": before.run_dir, "plan_file": before.plan_file, "site_file": before.site_file}
    config = replace(applied(before, overrides), **places) if overrides else before
    if state == "completed" and config.train.steps <= before.train.steps:
        raise ConfigError(
            f"it has made all of its {before.train.steps} steps",
            where=str(record.path),
            hint=f"for more: holmes resume {record.name} train.steps=N",
        )
    chosen, own = Plan.read(plan_path or record.plan_path), Plan.read(record.plan_path)
    size, length = own.batch.global_size, own.batch.sequence_length  # which data come next hangs on them
    refuse(
        plan_path or "",
        (chosen.model != own.model, "the plan is for another model", "plan for this run's model"),
        (
            (chosen.batch.global_size, chosen.batch.sequence_length) != (size, length),
            "the plan has another batch",
            f"plan with batch.global_size={size} batch.sequence_length={length}",
        ),
    )
    if not config.local:
        check_site(chosen, site(config))
    elif plan_path:  # this machine starts as many ranks as are wanted
        ranks = chosen.components[0].gpus_per_node
        check_site(chosen, site(replace(config, plan=replace(config.plan, gpus_per_node=ranks))))
    return Continuation(chosen, config, before, tuple(missing))
