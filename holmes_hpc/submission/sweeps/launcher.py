"""Hydra launchers: a sweep whose every job is a heterogeneous job with its own components, or a plain one.

Made from hydra-submitit-launcher's. A task function that carries an attribute ``plan_job`` (the training application
does) is asked for each job's Plan: ``plan_job(cfg, "slurm" | "local") -> Planned | None``; other jobs run the task
function itself in a job of the launcher's own `components`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, filter_overrides
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import DictConfig, open_dict

from holmes_hpc import console
from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError, HolmesError, RunFailed, SubmissionError
from holmes_hpc.records.files import locked
from holmes_hpc.records.ownership import careful_umask, refuse_other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import ignore_interrupts, uninterrupted
from holmes_hpc.slurm.job_states import UNKNOWN
from holmes_hpc.submission.executor.throttle import Throttle
from holmes_hpc.submission.lifecycle.status import Job, OnSlurm
from holmes_hpc.submission.local import run_plan_here
from holmes_hpc.submission.plan_job import Planned, submit_plan
from holmes_hpc.submission.sweeps.job_returns import Launched, Progress, interrupted, reattach, save_hydra, wait
from holmes_hpc.submission.sweeps.jobs import cancel_sweep, note_outcome, states, unread
from holmes_hpc.submission.sweeps.launcher_settings import executor_of, settings_of_plan
from holmes_hpc.submission.sweeps.manifest import NAME, Manifest, key_of, open_manifest
from holmes_hpc.submission.sweeps.program import program_of
from holmes_hpc.submission.sweeps.reuse import (
    BEGAN,
    WAITING_SWEEPER,
    Candidate,
    Earlier,
    earlier_jobs,
    refuse_living,
    reuse_setting,
    take_over,
)

log = logging.getLogger(__name__)


class HolmesLauncher(BaseSubmititLauncher):
    """What both launchers do."""

    WHERE = "abstract"
    _shield: Callable[[], contextlib.AbstractContextManager[None]] = staticmethod(contextlib.nullcontext)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._seen = Counter[tuple[str, ...]]()  # of this process's jobs: a sweeper may ask about a point again
        self._throttle: Throttle | None = None  # of one launch, if its jobs exceed the limit

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        careful_umask()  # before Hydra makes the sweep's directory; the jobs, which write what is read here, inherit it
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        detach = bool(self.params.get("detach", False))
        sweeper = str(self.config.hydra.sweeper.get("_target_", ""))
        reuse = reuse_setting(self.params.get("reuse"), sweeper)
        if detach and sweeper != WAITING_SWEEPER:
            raise ConfigError(
                f"the sweeper {sweeper.rsplit('.', 1)[-1]} needs the jobs' results",
                where="hydra.launcher.detach",
                hint="leave detach out, or use Hydra's basic sweeper",
            )
        sweep_dir = Path(str(self.config.hydra.sweep.dir)).absolute()
        self._make(sweep_dir)
        log.info(f"{len(job_overrides)} jobs into {sweep_dir}")
        with console.waiting(f"planning {len(job_overrides)} jobs"):
            wanted = self._plan_all(job_overrides, initial_job_idx)
        if (
            self.WHERE == "slurm"
            and sum(w.planned is not None and w.planned.settings.exclusive is False for w in wanted) > 1
        ):
            log.warning(
                "slurm.exclusive=false: jobs may share nodes, and then a NIC's bytes and step times are those "
                "of all that run there"
            )
        launched: list[Launched] = []
        try:
            with locked(sweep_dir / ".sweep.lock", wait_s=5):  # two launches at once would submit the same jobs
                manifest = open_manifest(sweep_dir, time.time())
                with Progress(manifest, launched) as progress:
                    self._launch_all(manifest, wanted, launched, reuse, progress)
            if detach:
                log.info(f"detached; `holmes sweep status {sweep_dir}` shows the jobs, `collect` their results")
                return []
            with Progress(manifest, launched) as progress:
                returned = [wait(manifest, job, progress.show) for job in launched]
                if sweeper == WAITING_SWEEPER:
                    progress.conclude()
            return returned
        except KeyboardInterrupt:
            interrupted(open_manifest(sweep_dir), [job.entry for job in launched if not job.cached])
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> JobReturn:
        """What a plain job's task runs; how it ended is noted so that nobody needs its pickle to know."""
        returned: JobReturn = super().__call__(*args, **kwargs)
        note_outcome(returned)
        return returned

    def _make(self, sweep_dir: Path) -> None:
        """The sweep's directory. RecordError where others may write in it, for what lies there is run."""
        try:
            sweep_dir.mkdir(parents=True, exist_ok=True)
            if "mode" in self.config.hydra.sweep:
                os.chmod(sweep_dir, int(str(self.config.hydra.sweep.mode), 8))
        except OSError as e:
            raise SubmissionError(
                e.strerror or str(e), where=str(sweep_dir), hint="use a hydra.sweep.dir of your own"
            ) from e
        refuse_other_writers(sweep_dir / NAME)

    def _launch_all(
        self,
        manifest: Manifest,
        wanted: Sequence[Candidate],
        launched: list[Launched],
        reuse: bool | str,
        progress: Progress,
    ) -> None:
        """Submit what is to be submitted; all jobs are added to `launched`."""
        for job in manifest.jobs:
            if (why := unread(manifest, job)) is not None:
                raise SubmissionError(
                    f"job {job.num}: {why}", where=str(manifest.path), hint="use a hydra.sweep.dir of your own"
                )
        found = states(manifest, [job for job in manifest.jobs if job.submitted < BEGAN])
        for job, state in found.items():
            if state.state == UNKNOWN and not state.forgotten:  # it may still run
                what, hint = (
                    (f"job {job.num} {state.reason}", "launch again there, or use another hydra.sweep.dir")
                    if job.where == "local"
                    else (
                        "Slurm does not answer, and jobs of an earlier launch may still run",
                        "wait for it (`scontrol ping`), then launch again",
                    )
                )
                raise SubmissionError(what, where=str(manifest.path), hint=hint)
        programs = {each.program.digest: each.program for each in wanted if each.program is not None}
        if programs and reuse and manifest.jobs:
            log.info(f"jobs of earlier launches are compared by configuration, {next(iter(programs.values()))}")
        earlier = earlier_jobs(manifest, {each.key: (each.digest, each.program) for each in wanted}, found)
        taken = take_over(earlier, reuse)
        refuse_living(manifest, found, [each.key for each in wanted], [str(each.directory) for each in wanted], taken)
        self._refuse_other_runs(manifest, earlier, taken, wanted, go_on=bool(reuse))
        manifest.programs.update({digest: program.to_dict() for digest, program in programs.items()})
        most = int(self.params.get("array_parallelism") or 256)
        is_throttled = self.WHERE == "slurm" and len(wanted) - len(taken) > most
        self._throttle = (
            Throttle(manifest.path.with_name(f".throttle-{time.time():.6f}.json"), most) if is_throttled else None
        )
        for each in wanted:
            self._launch_one(manifest, taken.get(each.key), each, launched, progress)

    # -- one job ----------------------------------------------------------------------------------------------------

    def _plan_all(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[Candidate]:
        """Compose and plan every job before the first is submitted. ConfigError names the first impossible one."""
        hook: Callable[[DictConfig, str], Planned | None] | None = getattr(self.task_function, "plan_job", None)
        wanted, refused = [], []
        for num, overrides in enumerate(job_overrides, first):
            config = self._sweep_config(list(overrides), num)
            try:
                planned = hook(config, self.WHERE) if hook is not None else None
            except HolmesError as e:
                refused.append(f"#{num} ({' '.join(filter_overrides(overrides))}): {e}")
                continue
            program = program_of(self.task_function if planned is None else planned.function)
            same = key_of(overrides)
            wanted.append(Candidate(num, list(overrides), config, planned, self._seen[same], program))
            self._seen[same] += 1
            if planned is not None and "%" in str(wanted[-1].directory):
                raise ConfigError(
                    f"the run directory is {str(wanted[-1].directory)!r}",
                    where="hydra.sweep",
                    hint="leave out '%', which Slurm gives a meaning of its own",
                )
        if refused:
            raise ConfigError(
                f"{len(refused)} of {len(job_overrides)} jobs cannot be; {refused[0]}",
                where="sweep",
                hint="nothing was submitted",
            )
        return wanted

    def _refuse_other_runs(
        self,
        manifest: Manifest,
        earlier: dict[tuple[str, ...], Earlier],
        taken: dict[tuple[str, ...], Earlier],
        wanted: Sequence[Candidate],
        *,
        go_on: bool,
    ) -> None:
        """Nothing may go on in the directory of a run that another configuration or program made; a run of the same
        that failed does `go_on` from its last checkpoint."""
        for job in wanted:
            run, old = RunDirectory(job.directory), manifest.find(job.key, job.digest)
            same_place = old is not None and manifest.place(old.directory) == job.directory
            if job.key in taken or (go_on and same_place and job.key not in earlier):
                continue
            record = run.read_run() if job.planned is not None and run.exists() else {}
            if record.get("attempts") or record.get("slurm") or record.get("local"):
                why = (
                    f"({earlier[job.key].other})"
                    if job.key in earlier and earlier[job.key].other
                    else ("of another configuration" if go_on else "already, and hydra.launcher.reuse is false")
                )
                raise ConfigError(f"it holds a run {why}", where=str(run.path), hint="use another hydra.sweep.dir")

    def _launch_one(
        self, manifest: Manifest, old: Earlier | None, job: Candidate, launched: list[Launched], progress: Progress
    ) -> None:
        """Submit a job, unless `old`, an earlier launch's, counts as it; add it to those that were `launched`."""
        if old is not None:
            launched.append(
                Launched(old.job, job.config, cached=True)
                if old.finished
                else Launched(old.job, job.config, *reattach(manifest, old.job))
            )
            return
        self._make_room(launched, progress, planned=job.planned is not None)
        log.info(str(job))
        with uninterrupted():
            new = self._submit_plain(manifest, job) if job.planned is None else self._submit_planned(manifest, job)
            launched.append(new)
            try:
                manifest.put(new.entry, BEGAN)
            except RunFailed:  # nobody would know of it
                cancel_sweep(manifest, [new.entry])
                raise

    def _sweep_config(self, overrides: list[str], num: int) -> DictConfig:
        """The job's own configuration, composed as the job itself would."""
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config.hydra.job):
            config.hydra.job.id = f"job_id_for_{num}"
            config.hydra.job.num = num
        return config

    def _submit_plain(self, manifest: Manifest, job: Candidate) -> Launched:
        executor = executor_of(job.config, self._EXECUTOR)
        refuse_other_writers(executor.folder)
        executor._executor.throttle = self._throttle
        submitted = time.time()
        with self._shield():
            made = executor.submit(
                self, job.overrides, "hydra.sweep.dir", job.num, f"job_id_for_{job.num}", Singleton.get_state()
            )
        entry = job.entry(
            manifest,
            Path(made.paths.folder),
            where=self.WHERE,
            job_id=made.job_id,
            tasks=max(1, made.num_tasks),
            name=str(job.config.hydra.launcher.name),
            submitted=submitted,
            components=len(job.config.hydra.launcher.get("components") or [None]),
        )
        return Launched(entry, job.config, plain=made)

    def _submit_planned(self, manifest: Manifest, job: Candidate) -> Launched:
        assert job.planned is not None
        plan, run = job.planned.plan, RunDirectory(job.directory)
        settings = settings_of_plan(job.config, job.planned.settings, self.WHERE)
        config = {**job.planned.config, "run_dir": str(run.path), "plan_file": str(run.plan_path)}
        if run.exists():  # of an earlier launch: it goes on from its last checkpoint
            run.reopen(None if run.read_run().get("plan_id") == plan.id else plan.to_yaml())
            run.update_run(config=config, plan_id=plan.id, components=plan.layout)
        else:
            RunDirectory.create(
                run.path,
                plan_text=plan.to_yaml(),
                config=config,
                overrides=job.overrides,
                plan_id=plan.id,
                **job.planned.record,
            )
        save_hydra(job.config, run.path)
        submitted = time.time()
        name = f"holmes-{manifest.path.parent.name}-{run.path.name}"  # what squeue shows
        made = self._start(job.planned, run, config, settings, name)
        entry = job.entry(
            manifest,
            run.path / "submission",
            where=self.WHERE,
            job_id=made.id,
            tasks=plan.world_size,
            name=name,
            submitted=submitted,
            components=len(plan.components),
        )
        return Launched(entry, job.config, held=made)

    def _start(
        self, planned: Planned, run: RunDirectory, config: dict[str, Any], settings: SlurmSettings, name: str
    ) -> Job:
        raise TypeError("use SlurmLauncher or LocalLauncher")

    def _make_room(self, before: list[Launched], progress: Progress, *, planned: bool) -> None:
        """Wait until the next job may be started, where nobody else keeps at most `array_parallelism` running."""


class SlurmLauncher(HolmesLauncher):
    """One heterogeneous (or plain) Slurm job per job of the sweep."""

    _EXECUTOR, WHERE = "slurmhet", "slurm"

    def _start(
        self, planned: Planned, run: RunDirectory, config: dict[str, Any], settings: SlurmSettings, name: str
    ) -> Job:
        job = submit_plan(
            planned.plan, run.path, planned.function, config, settings, name=name, throttle=self._throttle
        )
        return OnSlurm(run.path / "submission", job.job_id)


class LocalLauncher(HolmesLauncher):
    """Processes of this machine."""

    _EXECUTOR, WHERE = "local", "local"
    _shield = staticmethod(ignore_interrupts)

    def _make_room(self, before: list[Launched], progress: Progress, *, planned: bool) -> None:
        most = int(self.params.get("array_parallelism") or 0) or (1 if planned else 0)
        while most and not self.params.get("detach"):
            if sum(not job.done() for job in before) < most:
                break
            progress.show()
            time.sleep(0.5)

    def _start(
        self, planned: Planned, run: RunDirectory, config: dict[str, Any], settings: SlurmSettings, name: str
    ) -> Job:
        return run_plan_here(planned.plan, run.path, planned.function, config, settings)
