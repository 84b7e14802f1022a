"""Hydra launchers for sweeps, which extend hydra-submitit-launcher. A job of a sweep has a plan or is plain.

A task function may have an attribute ``plan_job``: ``plan_job(cfg, "slurm" | "local") -> PlannedJob | None`` returns
the plan of a job, which also determines the job's components. A job without a plan is plain: it runs the task function
itself, with the launcher's `components`.
"""

import contextlib
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, filter_overrides
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import DictConfig, open_dict

from holmes_hpc import console
from holmes_hpc.errors import ConfigError, HolmesError, RunFailed, SubmissionError, counted
from holmes_hpc.records.files import locked
from holmes_hpc.records.ownership import careful_umask, refuse_other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import ignore_interrupts, uninterrupted
from holmes_hpc.slurm.job_states import UNKNOWN
from holmes_hpc.submission.executor.submit import on_error
from holmes_hpc.submission.executor.throttle import Throttle
from holmes_hpc.submission.lifecycle.status import Job, SlurmJob
from holmes_hpc.submission.local import run_plan_locally
from holmes_hpc.submission.plan_job import PlannedJob, submit_plan
from holmes_hpc.submission.sweeps import job_waiting, reuse
from holmes_hpc.submission.sweeps.job_waiting import LaunchedJob, Progress
from holmes_hpc.submission.sweeps.jobs import cancel_sweep, job_states, untrusted_reason, write_outcome
from holmes_hpc.submission.sweeps.launcher_settings import create_executor, plan_job_settings
from holmes_hpc.submission.sweeps.manifest import NAME, Manifest, job_key, open_manifest
from holmes_hpc.submission.sweeps.program import program_of

log = logging.getLogger(__name__)


def _remove_unused(sweep_dir: Path) -> None:
    """Remove the sweep directory unless it has more than multirun.yaml and the lock file."""
    if {*os.listdir(sweep_dir)} <= {"multirun.yaml", ".sweep.lock"}:
        shutil.rmtree(sweep_dir, ignore_errors=True)


class HolmesLauncher(BaseSubmititLauncher):
    """The common part of both launchers. `WHERE`: slurm or local; `_EXECUTOR`: submitit's name of the executor;
    `_shield`: returns a context manager that surrounds the submission of a plain job."""

    WHERE = "abstract"
    _shield: Callable[[], contextlib.AbstractContextManager[None]] = staticmethod(contextlib.nullcontext)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._copies = Counter[tuple[str, ...]]()  # number of this process's jobs by key: a sweeper may repeat a point
        self._throttle: Throttle | None = None  # set during a launch with more jobs than may run at a time

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        careful_umask()  # before Hydra creates the sweep directory; inherited by jobs, whose files are read here
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submit the jobs with these overrides, and wait for their results unless `detach` is set. Called by Hydra.
        `initial_job_idx`: the number of the first job."""
        detach = bool(self.params.get("detach", False))
        sweeper = str(self.config.hydra.sweeper.get("_target_", ""))
        may_reuse = reuse.parse_reuse(self.params.get("reuse"), sweeper)
        if detach and sweeper != reuse.BASIC_SWEEPER:
            problem = f"the sweeper {sweeper.rsplit('.', 1)[-1]} needs the jobs' results"
            hint = "remove detach, or use Hydra's basic sweeper"
            raise ConfigError(problem, where="hydra.launcher.detach", hint=hint)
        sweep_dir = Path(str(self.config.hydra.sweep.dir)).absolute()
        self._create_directory(sweep_dir)
        log.info(f"{counted(len(job_overrides), 'job')} into {sweep_dir}")
        with console.waiting(f"planning {counted(len(job_overrides), 'job')}"), on_error(_remove_unused, sweep_dir):
            candidates = self._plan_all(job_overrides, initial_job_idx)
        sharing_jobs = [c for c in candidates if c.planned is not None and c.planned.settings.exclusive is False]
        if self.WHERE == "slurm" and len(sharing_jobs) > 1:
            effect = "NIC bytes and step times then include those of all jobs on a node"
            log.warning(f"slurm.exclusive=false: jobs may share nodes; {effect}")
        launched: list[LaunchedJob] = []
        try:
            # Without the lock, concurrent launches could submit the same jobs.
            with locked(sweep_dir / ".sweep.lock", wait_s=5), on_error(_remove_unused, sweep_dir):
                manifest = open_manifest(sweep_dir, time.time())
                with Progress(manifest, launched) as progress:
                    self._launch_all(candidates, may_reuse, progress)
            if detach:
                log.info(f"detached; `holmes sweep status {sweep_dir}` shows the jobs, `collect` their results")
                return []
            with Progress(manifest, launched) as progress:
                job_returns = [job_waiting.wait(manifest, job, progress.show) for job in launched]
                if sweeper == reuse.BASIC_SWEEPER:
                    progress.conclude()
            return job_returns
        except KeyboardInterrupt:
            new_jobs = [job.entry for job in launched if not job.is_cached]
            unsubmitted = len(candidates) - len(launched)
            job_waiting.handle_interrupt(open_manifest(sweep_dir), new_jobs, unsubmitted)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> JobReturn:
        """Run the task of a plain job, and record its outcome as JSON, which can be read without unpickling."""
        job_return: JobReturn = super().__call__(*args, **kwargs)
        write_outcome(job_return)
        return job_return

    def _create_directory(self, sweep_dir: Path) -> None:
        """Create the sweep directory. Raise SubmissionError if that fails. Raise RecordError if other users may write
        into the directory, because they could replace its pickles by pickles that run their code."""
        hint = "set hydra.sweep.dir to a directory of your own"
        with SubmissionError.instead_of(OSError, where=sweep_dir, hint=hint):
            sweep_dir.mkdir(parents=True, exist_ok=True)
            if "mode" in self.config.hydra.sweep:
                os.chmod(sweep_dir, int(str(self.config.hydra.sweep.mode), 8))
        refuse_other_writers(sweep_dir / NAME)

    def _launch_all(self, candidates: Sequence[reuse.Candidate], may_reuse: bool | str, progress: Progress) -> None:
        """Submit each candidate, or reuse an earlier job for it, and add the job to `progress.launched`.
        Raise SubmissionError or ConfigError if earlier jobs in this directory forbid the launch."""
        manifest = progress.manifest
        for job in manifest.jobs:
            if (reason := untrusted_reason(manifest, job)) is not None:
                hint = "set hydra.sweep.dir to a directory of your own"
                raise SubmissionError(f"job {job.num}: {reason}", where=str(manifest.path), hint=hint)
        states = job_states(manifest, [job for job in manifest.jobs if job.submitted < reuse.PROCESS_START])
        for job, state in states.items():
            if state.state == UNKNOWN and not state.forgotten:  # it may still run
                problem = "Slurm does not answer, and jobs of an earlier launch may still run"
                hint = "wait for it (`scontrol ping`), then launch again"
                if job.where == "local":
                    problem = f"job {job.num} {state.reason}"
                    hint = "launch again there, or use another hydra.sweep.dir"
                raise SubmissionError(problem, where=str(manifest.path), hint=hint)
        programs = {c.program.digest: c.program for c in candidates if c.program is not None}
        if programs and may_reuse and manifest.jobs:
            log.info(f"comparing jobs of earlier launches by configuration, {next(iter(programs.values()))}")
        earlier = reuse.find_earlier_jobs(manifest, candidates, states)
        reused = reuse.select_reused(earlier, may_reuse)
        reuse.refuse_active_jobs(manifest, states, candidates, reused)
        new = [c for c in candidates if c.key not in reused]
        self._refuse_other_runs(manifest, earlier, new, can_resume=bool(may_reuse))
        manifest.programs.update({digest: asdict(program) for digest, program in programs.items()})
        limit = int(self.params.get("array_parallelism") or 256)
        is_throttled = self.WHERE == "slurm" and len(candidates) - len(reused) > limit
        throttle_path = manifest.path.with_name(f".throttle-{time.time():.6f}.json")
        self._throttle = Throttle(throttle_path, limit) if is_throttled else None
        for candidate in candidates:
            self._launch_one(reused.get(candidate.key), candidate, progress)

    # -- one job ----------------------------------------------------------------------------------------------------

    def _plan_all(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[reuse.Candidate]:
        """Compose and plan all jobs before the first one is submitted. `first`: the number of the first job.
        If some jobs cannot be planned, raise ConfigError with the error of the first of these jobs."""
        hook: Callable[[DictConfig, str], PlannedJob | None] | None = getattr(self.task_function, "plan_job", None)
        candidates, errors = [], []
        for num, overrides in enumerate(job_overrides, first):
            config = self._sweep_config(list(overrides), num)
            try:
                planned = hook(config, self.WHERE) if hook is not None else None
            except HolmesError as e:
                errors.append(f"#{num} ({' '.join(filter_overrides(overrides))}): {e}")
                continue
            program = program_of(self.task_function if planned is None else planned.function)
            key = job_key(overrides)
            candidates.append(reuse.Candidate(num, list(overrides), config, planned, self._copies[key], program))
            self._copies[key] += 1
            if planned is not None and "%" in str(candidates[-1].directory):
                problem = f"the run directory {str(candidates[-1].directory)!r} contains '%'"
                raise ConfigError(problem, where="hydra.sweep", hint="remove '%', which Slurm replaces in paths")
        if errors:
            problem = f"{len(errors)} of {len(job_overrides)} jobs cannot be planned; the first: {errors[0]}"
            raise ConfigError(problem, where="sweep", hint="correct this job or leave it out; nothing was submitted")
        return candidates

    def _refuse_other_runs(
        self, manifest: Manifest, earlier: reuse.EarlierJobs, candidates: Sequence[reuse.Candidate], *, can_resume: bool
    ) -> None:
        """Raise ConfigError if a job's directory has a run that the job may not continue. `earlier`: the result of
        :func:`reuse.find_earlier_jobs`; `can_resume`: whether a job may continue the unfinished run of an earlier job
        with the same configuration, from its last checkpoint."""
        for job in candidates:
            run, old = RunDirectory(job.directory), manifest.find(job.key, job.digest)
            is_same_directory = old is not None and manifest.resolve(old.directory) == job.directory
            if can_resume and is_same_directory and job.key not in earlier:
                continue
            record = run.read_run() if job.planned is not None and run.exists() else {}
            if record.get("attempts") or record.get("slurm") or record.get("local"):
                change = earlier[job.key].program_change if job.key in earlier else ""
                reason = "of another configuration" if can_resume else "already, and hydra.launcher.reuse is false"
                reason = f"({change})" if change else reason
                raise ConfigError(f"it holds a run {reason}", where=str(run.path), hint="use another hydra.sweep.dir")

    def _launch_one(self, old: reuse.EarlierJob | None, job: reuse.Candidate, progress: Progress) -> None:
        """Reuse the earlier job `old`, or submit `job` if `old` is None. Add the job to `progress.launched`."""
        manifest, launched = progress.manifest, progress.launched
        if old is not None:
            handles: tuple[Any, Any] = (None, None) if old.is_completed else job_waiting.reattach(manifest, old.job)
            launched.append(LaunchedJob(old.job, job.config, *handles, is_cached=old.is_completed))
            return
        self._wait_for_slot(progress, planned=job.planned is not None)
        log.info(f"\t#{job.num} : {' '.join(filter_overrides(job.overrides))}")
        with uninterrupted():
            new = self._submit_plain(manifest, job) if job.planned is None else self._submit_planned(manifest, job)
            launched.append(new)
            try:
                manifest.put(new.entry, reuse.PROCESS_START)
            except RunFailed:  # without an entry, nobody would know of the job
                cancel_sweep(manifest, [new.entry])
                raise

    def _sweep_config(self, overrides: list[str], num: int) -> DictConfig:
        """Return the configuration of job `num`, composed as Hydra would in the job itself."""
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config.hydra.job):
            config.hydra.job.id = f"job_id_for_{num}"
            config.hydra.job.num = num
        return config

    def _submit_plain(self, manifest: Manifest, job: reuse.Candidate) -> LaunchedJob:
        """Submit a plain job. submitit pickles this launcher; in the job, :meth:`__call__` runs the task function."""
        executor = create_executor(job.config, self._EXECUTOR)
        refuse_other_writers(executor.folder)
        executor._executor.throttle, settings = self._throttle, job.config.hydra.launcher
        details = {"submitted": time.time(), "where": self.WHERE, "name": str(settings.name)}
        with self._shield():
            arguments = (job.overrides, "hydra.sweep.dir", job.num, f"job_id_for_{job.num}", Singleton.get_state())
            submitit_job = executor.submit(self, *arguments)
        details |= {"tasks": max(1, submitit_job.num_tasks), "components": len(settings.get("components") or [None])}
        folder = Path(submitit_job.paths.folder)
        entry = job.entry(manifest, folder, job_id=submitit_job.job_id, **details)
        return LaunchedJob(entry, job.config, submitit_job=submitit_job)

    def _submit_planned(self, manifest: Manifest, job: reuse.Candidate) -> LaunchedJob:
        """Submit a job with a plan as a run in the job's directory. If the directory has a run, continue that run."""
        assert job.planned is not None
        plan, run = job.planned.plan, RunDirectory(job.directory)
        config = {**job.planned.config, "run_dir": str(run.path), "plan_file": str(run.plan_path)}
        settings = plan_job_settings(job.config, job.planned.settings, self.WHERE)
        planned = replace(job.planned, config=config, settings=settings)
        if run.exists():  # a run of an earlier launch continues from its last checkpoint
            run.reopen(None if run.read_run().get("plan_id") == plan.id else plan.to_yaml())
            run.update_run(config=config, plan_id=plan.id, components=plan.layout)
        else:
            ids = {"plan_id": plan.id, **job.planned.record}
            RunDirectory.create(run.path, plan.to_yaml(), config, job.overrides, **ids)
        job_waiting.write_hydra_files(job.config, run.path)
        name = f"holmes-{manifest.path.parent.name}-{run.path.name}"  # the job name in squeue
        details = {"submitted": time.time(), "where": self.WHERE, "name": name}
        handle = self._start(planned, run, name)
        details |= {"tasks": plan.world_size, "components": len(plan.components)}
        entry = job.entry(manifest, run.path / "submission", job_id=handle.id, **details)
        return LaunchedJob(entry, job.config, handle=handle)

    def _start(self, planned: PlannedJob, run: RunDirectory, name: str) -> Job:
        raise TypeError("use SlurmLauncher or LocalLauncher")

    def _wait_for_slot(self, progress: Progress, *, planned: bool) -> None:
        """Wait until another job may start (`planned`: with a plan). By default do nothing: Slurm limits its jobs."""


class SlurmLauncher(HolmesLauncher):
    """The launcher that submits each job of a sweep to Slurm."""

    _EXECUTOR, WHERE = "slurmhet", "slurm"

    def _start(self, planned: PlannedJob, run: RunDirectory, name: str) -> Job:
        return SlurmJob(run.path / "submission", submit_plan(planned, run.path, name, self._throttle).job_id)


class LocalLauncher(HolmesLauncher):
    """The launcher that runs the jobs as processes of this machine."""

    _EXECUTOR, WHERE = "local", "local"
    _shield = staticmethod(ignore_interrupts)

    def _wait_for_slot(self, progress: Progress, *, planned: bool) -> None:
        limit = int(self.params.get("array_parallelism") or 0) or (1 if planned else 0)
        while limit and not self.params.get("detach"):
            if sum(not job.done() for job in progress.launched) < limit:
                break
            progress.show()
            time.sleep(job_waiting.PAUSE_S)

    def _start(self, planned: PlannedJob, run: RunDirectory, name: str) -> Job:
        return run_plan_locally(planned, run.path)
