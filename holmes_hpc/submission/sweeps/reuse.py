"""The jobs of a launch before they are submitted, and which jobs of earlier launches into a sweep directory count as
them, by configuration, program and time.

An old value is no measurement of this launch's program, nor of a point that a sweeper asks about once more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf

from holmes_hpc import console
from holmes_hpc.errors import ConfigError, SubmissionError
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.plan_job import Planned
from holmes_hpc.submission.sweeps.job_returns import task_config
from holmes_hpc.submission.sweeps.jobs import finished
from holmes_hpc.submission.sweeps.launcher_settings import ENVIRONMENT
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob, key_of
from holmes_hpc.submission.sweeps.program import Program, changes

BEGAN = time.time()  # before this process's first launch: its own jobs were submitted later
WAITING_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A job of this launch. `copy`: how many jobs with the same overrides came before it; `program`: None without a
    source file."""

    num: int
    overrides: list[str]
    config: DictConfig
    planned: Planned | None
    copy: int
    program: Program | None

    @property
    def key(self) -> tuple[str, ...]:
        """What finds it again in the manifest."""
        return key_of(self.overrides, self.copy)

    @property
    def digest(self) -> str:
        """What makes it the same job in a repeated sweep, beside its overrides: the configuration, and the Plan or what
        the launcher's settings say of the environment. (The program is compared by itself: see program.py.)"""
        data = OmegaConf.to_yaml(task_config(self.config))
        launcher = self.config.hydra.launcher
        data += self.planned.plan.id if self.planned else repr([(key, launcher.get(key)) for key in ENVIRONMENT])
        return hashlib.sha256(data.encode()).hexdigest()[:16]

    @property
    def directory(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir)).absolute() / str(self.config.hydra.sweep.subdir)

    def entry(self, manifest: Manifest, folder: Path, **submitted: Any) -> SweepJob:
        """Return its entry in `manifest`; `submitted`: the fields of SweepJob that the submission decided."""
        return SweepJob(
            num=self.num,
            overrides=tuple(self.overrides),
            directory=manifest.relative(self.directory),
            kind="plain" if self.planned is None else "plan",
            folder=manifest.relative(folder),
            digest=self.digest,
            copy=self.copy,
            host=os.uname().nodename,
            program=self.program.digest if self.program else "",
            **submitted,
        )

    def __str__(self) -> str:
        return f"\t#{self.num} : {' '.join(filter_overrides(self.overrides))}"


@dataclass(frozen=True)
class Earlier:
    """A job of the same overrides and configuration that another process submitted; `other`: what its program differs
    in, empty where it is the same."""

    job: SweepJob
    state: JobState
    finished: bool
    other: str

    def __str__(self) -> str:
        does = "completed as" if self.finished else "still"
        return (
            f"#{self.job.num} : {' '.join(self.job.overrides)} ({does} job {self.job.job_id}"
            f"{', ' + self.other if self.other else ''})"
        )


def reuse_setting(value: Any, sweeper: str) -> bool | str:
    """``hydra.launcher.reuse`` as True, False or "ask". ConfigError: no such value, or a sweeper that means to have
    every point measured."""
    waiting = sweeper == WAITING_SWEEPER
    if value is None:
        return waiting
    if value not in (True, False, "ask"):
        raise ConfigError(
            f"{value!r} is none of true, false, ask", where="hydra.launcher.reuse", hint="give one of them"
        )
    if value and not waiting:
        raise ConfigError(
            f"the sweeper {sweeper.rsplit('.', 1)[-1]} measures every point anew",
            where="hydra.launcher.reuse",
            hint="leave reuse out, or use Hydra's basic sweeper",
        )
    return "ask" if value == "ask" else bool(value)


def earlier_jobs(
    manifest: Manifest,
    wanted: Mapping[tuple[str, ...], tuple[str, Program | None]],
    states: Mapping[SweepJob, JobState],
) -> dict[tuple[str, ...], Earlier]:
    """For each wanted job (key -> digest of its configuration, its program) the earlier one that completed or goes on,
    if there is one."""
    found = {}
    for key, (digest, program) in wanted.items():
        job = manifest.find(key, digest)
        if job is None or job.submitted >= BEGAN:
            continue
        state, done = states.get(job, JobState()), finished(manifest, job)
        if not done and not goes_on(state):
            continue
        if program is None:
            other = "by a program without a source file"
        else:
            other = "" if job.program == program.digest else changes(manifest.programs.get(job.program), program)
        found[key] = Earlier(job, state, done, other)
    return found


def take_over(found: Mapping[tuple[str, ...], Earlier], reuse: bool | str) -> dict[tuple[str, ...], Earlier]:
    """Those of `found` that count as this launch's; what is taken over, and what is not, is listed."""
    if reuse == "ask":
        listed = "\n".join(f"  {earlier}" for earlier in found.values())
        answer = console.ask(f"{listed}\ntake these jobs of earlier launches over? [y/N] ") if found else None
        taken = dict(found) if answer and answer.startswith("y") else {}
    else:
        taken = {key: earlier for key, earlier in found.items() if reuse and not earlier.other}
    for key, earlier in found.items():
        log.info(f"{'taken over' if key in taken else 'not taken over'}: {earlier}")
    return taken


def refuse_living(
    manifest: Manifest,
    states: Mapping[SweepJob, JobState],
    wanted: Iterable[tuple[str, ...]],
    directories: Iterable[str],
    taken: Mapping[tuple[str, ...], Earlier],
) -> None:
    """Nothing may be started in the place of an earlier launch's job that still waits or runs."""
    keys, places = set(wanted), set(directories)
    for job, state in states.items():
        if not goes_on(state) or (job.key in taken and taken[job.key].job == job):
            continue
        if job.key in keys or str(manifest.place(job.directory)) in places:
            raise SubmissionError(
                f"job {job.job_id} of an earlier launch is {state.state.lower()} (#{job.num})",
                where=str(manifest.path),
                hint=f"`holmes sweep cancel {manifest.path.parent}`, or use another hydra.sweep.dir",
            )


def goes_on(state: JobState | None) -> bool:
    """Whether a job that was submitted has not ended."""
    return state is not None and not state.ended and state.state != UNKNOWN
