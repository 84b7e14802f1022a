"""The jobs that a launch is to submit, and the reuse of jobs of earlier launches into the same sweep directory.

By default, an earlier job is reused only if its configuration and program are the same. Repeated jobs all run.
"""

import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from holmes_hpc import console
from holmes_hpc.errors import ConfigError, SubmissionError
from holmes_hpc.slurm.job_states import UNKNOWN, JobState
from holmes_hpc.submission.plan_job import PlannedJob
from holmes_hpc.submission.sweeps.job_waiting import task_config
from holmes_hpc.submission.sweeps.jobs import is_completed
from holmes_hpc.submission.sweeps.launcher_settings import ENVIRONMENT
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob, job_key
from holmes_hpc.submission.sweeps.program import Program, describe_changes

PROCESS_START = time.time()  # jobs submitted before this are of earlier launches
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A job that this launch submits or replaces by an earlier one. `planned`: its plan, None for a plain job; `copy`:
    number of earlier jobs with the same overrides in this launch; `program`: None if it has no source file."""

    num: int
    overrides: list[str]
    config: DictConfig
    planned: PlannedJob | None
    copy: int
    program: Program | None

    @property
    def key(self) -> tuple[str, ...]:
        """The job's key in the manifest."""
        return job_key(self.overrides, self.copy)

    @property
    def digest(self) -> str:
        """A hash that, together with the key, identifies the job in a repeated sweep. It covers the configuration and,
        for a job with a plan, the plan; for a plain job, the launcher's environment settings."""
        data = OmegaConf.to_yaml(task_config(self.config))
        launcher = self.config.hydra.launcher
        data += self.planned.plan.id if self.planned else repr([(key, launcher.get(key)) for key in ENVIRONMENT])
        return hashlib.sha256(data.encode()).hexdigest()[:16]

    @property
    def directory(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir)).absolute() / str(self.config.hydra.sweep.subdir)

    def entry(self, manifest: Manifest, folder: Path, **submission_fields: Any) -> SweepJob:
        """Return the job's entry in `manifest`. `submission_fields`: fields of SweepJob known after its submission."""
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
            **submission_fields,
        )


@dataclass(frozen=True)
class EarlierJob:
    """A job of an earlier launch with the same overrides and configuration as a candidate.
    `program_change`: text on how its program differs from the candidate's; empty if they are the same."""

    job: SweepJob
    is_completed: bool
    program_change: str

    def __str__(self) -> str:
        status = f"{'completed as' if self.is_completed else 'still'} job {self.job.job_id}"
        change = f", {self.program_change}" if self.program_change else ""
        return f"#{self.job.num} : {' '.join(self.job.overrides)} ({status}{change})"


EarlierJobs = dict[tuple[str, ...], EarlierJob]  # by key


def parse_reuse(value: Any, sweeper: str) -> bool | str:
    """Return True, False or "ask" for `value`, the setting hydra.launcher.reuse. `sweeper`: path of the sweeper's
    class. Raise ConfigError for another value, or for reuse with a sweeper that needs new measurements."""
    is_basic = sweeper == BASIC_SWEEPER
    if value is None:
        return is_basic
    if value not in (True, False, "ask"):
        raise ConfigError(f"{value!r} is not true, false or ask", where="hydra.launcher.reuse", hint="use one of these")
    if value and not is_basic:
        problem = f"the sweeper {sweeper.rsplit('.', 1)[-1]} needs a new measurement of every point"
        hint = "remove reuse, or use Hydra's basic sweeper"
        raise ConfigError(problem, where="hydra.launcher.reuse", hint=hint)
    return "ask" if value == "ask" else bool(value)


def find_earlier_jobs(
    manifest: Manifest, candidates: Sequence[Candidate], states: Mapping[SweepJob, JobState]
) -> EarlierJobs:
    """Return {key: earlier job} for each candidate whose earlier job has completed or is active, by job `states`."""
    earlier_jobs = {}
    for key, digest, program in ((c.key, c.digest, c.program) for c in candidates):
        job = manifest.find(key, digest)
        if job is None or job.submitted >= PROCESS_START:
            continue
        state, has_completed = states.get(job, JobState()), is_completed(manifest, job)
        if not has_completed and not is_active(state):
            continue
        change = "by a program without a source file"
        if program is not None:
            old = manifest.programs.get(job.program)
            change = "" if job.program == program.digest else describe_changes(old, program)
        earlier_jobs[key] = EarlierJob(job, has_completed, change)
    return earlier_jobs


def select_reused(earlier_jobs: EarlierJobs, reuse: bool | str) -> EarlierJobs:
    """Return those of `earlier_jobs` that this launch reuses. Log for each whether it is reused."""
    if reuse == "ask":
        lines = "\n".join(f"  {earlier}" for earlier in earlier_jobs.values())
        answer = console.ask(f"{lines}\nreuse these jobs of earlier launches? [y/N] ") if earlier_jobs else None
        reused = dict(earlier_jobs) if answer and answer.startswith("y") else {}
    else:
        reused = {key: earlier for key, earlier in earlier_jobs.items() if reuse and not earlier.program_change}
    for key, earlier in earlier_jobs.items():
        log.info(f"{'reused' if key in reused else 'not reused'}: {earlier}")
    return reused


def refuse_active_jobs(
    manifest: Manifest, states: Mapping[SweepJob, JobState], candidates: Sequence[Candidate], reused: EarlierJobs
) -> None:
    """Raise SubmissionError if an active job of an earlier launch has the key or the directory of a job of this launch,
    unless the active job itself is in `reused`."""
    new_keys, new_directories = {c.key for c in candidates}, {str(c.directory) for c in candidates}
    for job, state in states.items():
        if not is_active(state) or (job.key in reused and reused[job.key].job == job):
            continue
        if job.key in new_keys or str(manifest.resolve(job.directory)) in new_directories:
            problem = f"job {job.job_id} of an earlier launch is {state.state.lower()} (#{job.num})"
            hint = f"`holmes sweep cancel {manifest.path.parent}`, or use another hydra.sweep.dir"
            raise SubmissionError(problem, where=str(manifest.path), hint=hint)


def is_active(state: JobState | None) -> bool:
    """Return whether a submitted job waits or runs."""
    return state is not None and not state.ended and state.state != UNKNOWN
