"""Creation and continuation of a run: its directory and record, and the lock held while its job is submitted."""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmes_hpc import console
from holmes_hpc.commit import git_commit
from holmes_hpc.config.composition import check_overrides, with_overrides
from holmes_hpc.config.configuration import Configuration, recorded
from holmes_hpc.errors import ConfigError, HolmesError, RecordError
from holmes_hpc.fabric.software import installed_version
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.request import check_fp8, check_site, costs, fitting_machine, pace, site
from holmes_hpc.records.find import runs_root
from holmes_hpc.records.locks import TRAINING_LOCK, LockOwner, hold_lock, is_locked, refuse_replaced
from holmes_hpc.records.ownership import other_owners, refuse_other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import OWN_FILES, STATES
from holmes_hpc.slurm.job_states import NOT_SUBMITTED, UNKNOWN
from holmes_hpc.submission.lifecycle.requirements import check_training
from holmes_hpc.submission.lifecycle.status import run_status, submission_time

PACKAGES = ("holmes-hpc", "torch", "megatron-core", "submitit", "hydra-core", "numpy")
LOCK = ".starting"  # lock file in a run directory, held from the first look at the run until its job is recorded


@contextlib.contextmanager
def hold_submission_lock(path: Path, command: str) -> Iterator[int]:
    """Lock the run directory `path` while `command` submits its job. Create the directory if it does not exist.
    Yield the descriptor of the lock file.
    Raise RecordError if another process holds the lock, or if other users may write into the directory."""
    refuse_other_writers(path)
    is_new, hint = not path.exists(), "give a directory that you can create, on a file system all nodes share"
    with RecordError.instead_of(OSError, where=path, hint=hint):
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Check again, now with its files: in a folder open to all, another user may have created it first. The code of
    # pickles in `submission` and commands in run.yaml are run. A copy of another user's run keeps its owners and modes.
    for name in sorted(OWN_FILES - {"checkpoints", "data"}):  # these hold no code, and may be on a group's file system
        refuse_other_writers(path / name)
    try:
        with hold_lock(path / LOCK, LockOwner.current(command)) as handle:
            try:
                yield handle
            finally:
                if not RunDirectory(path).exists():  # no run was created
                    with contextlib.suppress(OSError):
                        os.unlink(path / LOCK)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def files_without_lock(path: Path) -> list[str]:
    """Return the sorted names of all files in `path` except the lock file; empty if `path` is not a directory."""
    return sorted(name for name in os.listdir(path) if name != LOCK) if path.is_dir() else []


def run_directory_path(config: Configuration, plan: Plan) -> Path:
    """Return the path of a new run: `run_dir` of the configuration, else its `name` in the directory of runs.
    The default name consists of time, model and plan id. Raise ConfigError for a name or path that cannot be used."""
    name = config.name
    name = str(name) if name is not None else f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.model.name}-{plan.id[:6]}"
    path = (Path(config.run_dir) if config.run_dir else runs_root() / name).absolute()
    _check_name(name)
    is_wrong_path = "%" in str(path) or not str(path).isprintable()
    path_hint = "leave out control characters and '%', which Slurm replaces in paths"
    ConfigError.refuse("configuration", (is_wrong_path, f"the run directory is {str(path)!r}", path_hint))
    return path


def _check_name(name: str) -> None:
    is_wrong = not name or "/" in name or name[:1] == "-" or name in (".", "..") or len(name.encode()) > 200
    hint = "use 1 to 200 bytes, no '/', no '-' in front, or give run_dir=PATH"
    ConfigError.refuse("configuration", (is_wrong, f"name is {name[:80]!r}", hint))


def create_run(
    config: Configuration, plan: Plan, overrides: Sequence[str], needs_empty_directory: bool = False
) -> RunDirectory:
    """Create the directory and the record of a new run.
    Raise ConfigError if the directory must be empty and is not, RecordError if it already holds a run."""
    path = run_directory_path(config, plan)
    if needs_empty_directory and not RunDirectory(path).exists() and files_without_lock(path):
        raise ConfigError("the directory is not empty", where=str(path), hint="give the run a new or empty directory")
    if RunDirectory(path).exists() and config.name is not None and path == (runs_root() / str(config.name)).absolute():
        raise _name_taken(path)
    settings = replace(config, run_dir=str(path), plan_file=str(path / "plan.yaml")).to_dict()
    ids = {"plan_id": plan.id, **record_fields(config, plan)}
    return RunDirectory.create(path, plan.to_yaml(), settings, overrides, **ids)


def refuse_taken_name(config: Configuration) -> None:
    """Raise RecordError if a run with this name has made a step, ConfigError for a name that cannot be used. A run
    without steps may be replaced. Called before planning."""
    if config.name is None:
        return
    _check_name(str(config.name))
    path = (runs_root() / str(config.name)).absolute()
    if not config.run_dir and RunDirectory(path).metrics_bytes():
        raise _name_taken(path)


def _name_taken(path: Path) -> RecordError:
    hint = "continue it with `holmes resume`, or give another name"
    return RecordError("it already holds a run", where=str(path), hint=hint)


def record_fields(config: Configuration, plan: Plan) -> dict[str, Any]:
    """Return the fields of run.yaml on plan and installation: components, emulated layer time, versions and commit.
    Raise ConfigError if the installed Megatron-Core cannot train the run."""
    check_training(config.train, plan)
    installation = {"versions": package_versions(), "git_commit": git_commit()}
    return {"components": plan.layout, "pace_layer_ms": pace(config, plan), **installation}


@functools.cache
def package_versions() -> dict[str, str]:
    """Return {package: version} of the installed packages that can influence a run's results."""
    return {name: version for name in PACKAGES if (version := installed_version(name)) is not None}


def _is_over(state: str) -> bool:
    """Return whether a run has ended or was never submitted. `state`: the run's state as tables show it."""
    return state in STATES or state == NOT_SUBMITTED.lower()


def remove_unused_run(run: RunDirectory) -> None:
    """Empty the directory of a run that has no steps and no active job, so that a new run can take its name.
    If the directory also has files that are not a run's, leave all files in it."""
    if not run.exists() or run.metrics_bytes() or any(run.checkpoints.glob("*")):
        return
    state, names = run_status(run).state, files_without_lock(run.path)
    if _is_over(state) and OWN_FILES.issuperset(names):
        console.note(f"{run.name} ended before its first step ({state}): it is replaced")
        for path in map(run.path.joinpath, names):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def refuse_unless_ended(run: RunDirectory, state: str) -> None:
    """Raise ConfigError if a run may be active: if a process holds its training lock, if its `state` (as tables show
    it) is not final, or if the state is unknown and a rank has no exit record."""
    is_unknown = state == UNKNOWN.lower()
    if not is_unknown and not _is_over(state):
        problem, hint = f"the run is {state}", "wait for its end, or `holmes cancel` it"
    elif is_locked(run.path / TRAINING_LOCK):
        problem, hint = "a process still trains into this directory", "wait until it ends"
    elif is_unknown and not _all_ranks_exited(run):
        problem = "whether the run has ended is not known"
        hint = "remove it on the machine that it ran on, or on one whose Slurm knows its job"
    else:
        return
    raise ConfigError(problem, where=str(run.path), hint=hint)


def _all_ranks_exited(run: RunDirectory) -> bool:
    """Return whether all ranks have exit records that are newer than the run's latest submission."""
    with contextlib.suppress(HolmesError, TypeError, ValueError, OverflowError):
        submitted = submission_time(run)
        exits = [e for e in run.read_exits() if float(e.get("time") or 0) >= submitted]  # not of an earlier attempt
        return len(exits) == Plan.read(run.plan_path).world_size
    return False


def remove_run(run: RunDirectory) -> None:
    """Remove a run with its checkpoints, including those in `train.checkpoint_dir`. Raise ConfigError if the run may be
    active. Raise RecordError if its job is being submitted, or if another user owns its folders."""
    if other_owners(run.path):  # their links could lead to files of this user
        raise RecordError("it belongs to another user", where=str(run.path), hint="only its owner can remove it")
    with hold_lock(run.path / LOCK, LockOwner.current("`holmes rm`")) as handle:
        refuse_unless_ended(run, run_status(run).state)
        checkpoints, config = run.checkpoints.resolve(), run.read_run()["config"]
        recorded_path = str(config.get("run_dir") or run.path) if isinstance(config, dict) else "\0"
        is_original = "\0" not in recorded_path and os.path.realpath(recorded_path) == os.path.realpath(run.path)
        path = run.path.resolve()
        removed = path.with_name(f".{path.name}.removed-{os.getpid()}")
        path.rename(removed)  # first, so that nobody resumes a part of the run, and no new run in its place is removed
        try:
            refuse_replaced(removed / LOCK, handle, path)
        except RecordError:
            removed.rename(path)
            raise
        shutil.rmtree(removed)
        if checkpoints.name != path.name or not checkpoints.is_dir():  # no folder of this run in train.checkpoint_dir
            return
        if not is_original:
            console.note(f"kept: {checkpoints}, because the removed directory was a copy, or was moved")
            return
        for checkpoint in checkpoints.glob("*step-*"):  # no other files: the link may lead to any folder
            shutil.rmtree(checkpoint, ignore_errors=True)
        with contextlib.suppress(OSError):  # it has other files
            checkpoints.rmdir()


def prepare_continuation(
    run: RunDirectory, state: str, overrides: Sequence[str], plan_path: str | None
) -> tuple[Plan, Configuration]:
    """Return the plan and configuration with which `run` continues. `state`: the run's state as tables show it;
    `plan_path`: file of another plan than the run's own, or None.

    Raise ConfigError if the run is active or has made all its steps, or if the plan is for another model or batch;
    PlanError if the plan is for another site; RecordError if run.yaml has no complete configuration."""
    if not _is_over(state):
        raise ConfigError(f"the run is {state}", where=str(run.path), hint="wait for its end, or `holmes cancel` it")
    if not {"launcher", "train", "slurm"} <= run.config.keys():
        hint = "submit a new run with its plan: `holmes submit`"
        raise RecordError("run.yaml has no complete configuration", where=str(run.path), hint=hint)
    recorded_config, _ = recorded(run.config)
    check_overrides(overrides)
    paths: dict[str, Any] = {key: getattr(recorded_config, key) for key in ("run_dir", "plan_file", "site_file")}
    config = replace(with_overrides(recorded_config, overrides), **paths) if overrides else recorded_config
    if state == "completed" and config.train.steps <= recorded_config.train.steps:
        problem = f"the run has made all of its {recorded_config.train.steps} steps"
        hint = f"to train further: holmes resume {run.name} train.steps=N"
        raise ConfigError(problem, where=str(run.path), hint=hint)
    plan, recorded_plan = Plan.read(plan_path or run.plan_path), Plan.read(run.plan_path)
    batch_size, length = recorded_plan.batch.global_size, recorded_plan.batch.sequence_length  # they order the data
    has_other_batch = (plan.batch.global_size, plan.batch.sequence_length) != (batch_size, length)
    batch_hint = f"plan with batch.global_size={batch_size} batch.sequence_length={length}"
    ConfigError.refuse(
        plan_path or "",
        (plan.model != recorded_plan.model, "the plan is for another model", "plan for this run's model"),
        (has_other_batch, "the plan has another batch", batch_hint),
    )
    check_training(config.train, plan)
    cost_model = costs(replace(config, calibration=None), plan)
    check_fp8(plan.site, {part.pool for part in plan.components}, cost_model, config.train.fp8)
    if plan_path or not config.local:
        check_site(plan, site(fitting_machine(config, plan)))
    return plan, config
