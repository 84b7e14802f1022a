"""Making the directory of a new run: where it lies, and what its record says before anything has run."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmes_hpc.commit import git_commit
from holmes_hpc.config.configuration import Configuration
from holmes_hpc.errors import ConfigError, RecordError
from holmes_hpc.planning.request import pace
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.find import runs_root
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.engine import check_engine, installed_version
from holmes_hpc.submission.lifecycle.starts import others

VERSIONS = ("holmes-hpc", "torch", "megatron-core", "submitit", "hydra-core", "numpy")


def new_run_path(config: Configuration, plan: Plan) -> Path:
    """Where a new run's directory will be: `run_dir`, or `name` (else time, model and plan) under the runs' root."""
    given = config.name
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.model.name}-{plan.id[:6]}" if given is None else str(given)
    if not name or "/" in name or name in (".", "..") or len(name.encode()) > 200:
        raise ConfigError(
            f"name is {name[:80]!r}",
            where="configuration",
            hint="use 1 to 200 characters without '/', or give run_dir=PATH",
        )
    path = (Path(config.run_dir) if config.run_dir else runs_root() / name).absolute()
    if "%" in str(path) or not str(path).isprintable():
        raise ConfigError(
            f"the run directory is {str(path)!r}",
            where="configuration",
            hint="leave out '%', which Slurm gives a meaning of its own, and control characters",
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
