"""Hydra launchers: a sweep whose every job is a heterogeneous job with its own components, or a plain one.

Made from hydra-submitit-launcher's. A task function that carries an attribute ``plan_job`` (the training application
does) is asked for each job's Plan: ``plan_job(cfg, "slurm" | "local") -> Planned | None``; other jobs run the task
function itself in a job of the launcher's own `components`.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, filter_overrides
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import DictConfig, OmegaConf, open_dict

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError, HolmesError, RunFailed, SubmissionError
from holmes_hpc.records.files import locked
from holmes_hpc.submission.sweeps.launcher_settings import OWN, settings_of_plan
from holmes_hpc.submission.sweeps.returns import Launched, interrupted, reattach, task_config, wait

if TYPE_CHECKING:
    from holmes_hpc.planning.spec.plan import Plan
    from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob

log = logging.getLogger(__name__)
WAITING_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class Planned:
    """A job with a Plan: every rank calls ``function(config)``. `settings`: the site's (group slurm); `record`: more
    keys for run.yaml."""

    plan: Plan
    config: dict[str, Any]
    function: Callable[[dict[str, Any]], Any]
    settings: SlurmSettings
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Wanted:
    """A job of this launch before it is submitted."""

    num: int
    overrides: list[str]
    config: DictConfig
    planned: Planned | None
    digest: str
    copy: int

    @property
    def key(self) -> tuple[str, ...]:
        """What finds it again in the manifest."""
        from holmes_hpc.submission.sweeps.manifest import key_of

        return key_of(self.overrides, self.copy)

    @property
    def directory(self) -> Path:
        return Path(str(self.config.hydra.sweep.dir)).absolute() / str(self.config.hydra.sweep.subdir)

    def __str__(self) -> str:
        return f"\t#{self.num} : {' '.join(filter_overrides(self.overrides))}"


class HolmesLauncher(BaseSubmititLauncher):
    """What both launchers do."""

    WHERE = "abstract"

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from holmes_hpc.submission.sweeps.manifest import open_manifest

        assert self.config is not None
        detach = bool(self.params.get("detach", False))
        sweeper = str(self.config.hydra.sweeper.get("_target_", ""))
        if detach and sweeper != WAITING_SWEEPER:
            raise ConfigError(f"the sweeper {sweeper.rsplit('.', 1)[-1]} needs the jobs' results",
                              where="hydra.launcher.detach", hint="leave detach out, or use Hydra's basic sweeper")
        sweep_dir = Path(str(self.config.hydra.sweep.dir)).absolute()
        sweep_dir.mkdir(parents=True, exist_ok=True)
        if "mode" in self.config.hydra.sweep:
            os.chmod(sweep_dir, int(str(self.config.hydra.sweep.mode), 8))
        log.info(f"{len(job_overrides)} jobs into {sweep_dir}")
        wanted = self._plan_all(job_overrides, initial_job_idx)
        launched: list[Launched] = []
        try:
            with locked(sweep_dir / ".sweep.lock", wait_s=5):  # two launches at once would submit the same jobs
                manifest = open_manifest(sweep_dir, time.time())
                self._launch_all(manifest, wanted, launched)
            if detach:
                log.info(f"detached; `holmes sweep status {sweep_dir}` shows the jobs, `collect` their results")
                return []
            return [wait(manifest, job) for job in launched]
        except KeyboardInterrupt:
            interrupted(open_manifest(sweep_dir), [job.entry for job in launched if not job.cached])
            raise

    def _launch_all(self, manifest: Manifest, wanted: Sequence[_Wanted], launched: list[Launched]) -> None:
        """Submit what is to be submitted; all jobs are added to `launched`."""
        from holmes_hpc.slurm.job_states import UNKNOWN
        from holmes_hpc.submission.sweeps.jobs import UNREAD, states, unread

        if others := unread(manifest):
            raise SubmissionError(f"job {others[0].num}: {UNREAD}", where=str(manifest.path),
                                  hint="use a hydra.sweep.dir of your own")
        found = states(manifest) if manifest.jobs else {}
        for job, state in found.items():
            if job.where == "local" and state.state == UNKNOWN:  # it may still run
                raise SubmissionError(f"job {job.num} {state.reason}", where=str(manifest.path),
                                      hint="launch again there, or use another hydra.sweep.dir")
        if any(j.where == "slurm" and s.state == UNKNOWN and not s.forgotten for j, s in found.items()):
            raise SubmissionError("Slurm does not answer, and jobs of an earlier launch may still run",
                                  where=str(manifest.path), hint="wait for it (`scontrol ping`), then launch again")
        known = {j.key: s for j, s in found.items()}
        self._refuse_other_runs(manifest, known, wanted)
        for each in wanted:
            self._launch_one(manifest, known, each, launched)

    # -- one job ----------------------------------------------------------------------------------------------------

    def _plan_all(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[_Wanted]:
        """Compose and plan every job before the first is submitted. ConfigError names the first impossible one."""
        from holmes_hpc.submission.sweeps.manifest import key_of

        hook: Callable[[DictConfig, str], Planned | None] | None = getattr(self.task_function, "plan_job", None)
        wanted, refused, seen = [], [], Counter[tuple[str, ...]]()
        for num, overrides in enumerate(job_overrides, first):
            config = self._sweep_config(list(overrides), num)
            try:
                planned = hook(config, self.WHERE) if hook is not None else None
            except HolmesError as e:
                refused.append(f"#{num} ({' '.join(filter_overrides(overrides))}): {e}")
                continue
            same = key_of(overrides)
            wanted.append(_Wanted(num, list(overrides), config, planned, self._digest(config, planned), seen[same]))
            seen[same] += 1
            if planned is not None and "%" in str(wanted[-1].directory):
                raise ConfigError(f"the run directory is {str(wanted[-1].directory)!r}", where="hydra.sweep",
                                  hint="leave out '%', which Slurm gives a meaning of its own")
        if refused:
            raise ConfigError(f"{len(refused)} of {len(job_overrides)} jobs cannot be; {refused[0]}", where="sweep",
                              hint="nothing was submitted")
        return wanted

    def _refuse_other_runs(self, manifest: Manifest, known: dict[tuple[str, ...], Any],
                           wanted: Sequence[_Wanted]) -> None:
        """Nothing may go on in the directory of a run that another configuration made."""
        from holmes_hpc.records.run import RunDirectory
        from holmes_hpc.submission.sweeps.jobs import finished

        for job in wanted:
            run, old = RunDirectory(job.directory), manifest.find(job.key, job.digest)
            if old is not None and (manifest.place(old.directory) == job.directory or finished(manifest, old)
                                    or _goes_on(known.get(old.key))):
                continue
            if job.planned is not None and run.exists():
                record = run.read_run()
                if record["attempts"] or record.get("slurm") or record.get("local"):
                    raise ConfigError("it holds a run of another configuration", where=str(run.path),
                                      hint="use another hydra.sweep.dir")

    def _launch_one(self, manifest: Manifest, known: dict[tuple[str, ...], Any], job: _Wanted,
                    launched: list[Launched]) -> None:
        """Submit a job, unless an earlier launch into this directory did and it runs or completed; add it to those
        that were `launched`."""
        from holmes_hpc.slurm.commands import uninterrupted
        from holmes_hpc.submission.sweeps.jobs import cancel_sweep, finished

        old = manifest.find(job.key, job.digest)
        if old is not None:
            state = known.get(old.key)
            if finished(manifest, old):
                log.info(f"{job} (completed as job {old.job_id})")
                launched.append(Launched(old, job.config, cached=True))
                return
            if _goes_on(state):
                log.info(f"{job} (still job {old.job_id})")
                launched.append(Launched(old, job.config, *reattach(manifest, old)))
                return
        log.info(str(job))
        dependency = self._make_room(launched, planned=job.planned is not None)
        with uninterrupted():
            if job.planned is None:
                entry, plain = self._submit_plain(manifest, job, dependency)
                launched.append(Launched(entry, job.config, plain=plain))
            else:
                entry, held = self._submit_planned(manifest, job, job.planned, dependency)
                launched.append(Launched(entry, job.config, held=held))
            try:
                manifest.put(entry)
            except RunFailed:  # nobody would know of it
                cancel_sweep(manifest, [entry])
                raise

    def _digest(self, config: DictConfig, planned: Planned | None) -> str:
        """What must be equal for a repeated sweep to take a job as the same one: the configuration, and the program
        (of a job with a Plan only the Plan: the program is then this package)."""
        data = OmegaConf.to_yaml(task_config(config)).encode()
        if planned is not None:
            data += planned.plan.id.encode()
        else:
            with contextlib.suppress(TypeError, OSError):
                data += Path(inspect.getfile(self.task_function)).read_bytes()
        return hashlib.sha256(data).hexdigest()[:16]

    def _sweep_config(self, overrides: list[str], num: int) -> DictConfig:
        """The job's own configuration, composed as the job itself would."""
        assert self.config is not None and self.hydra_context is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config.hydra.job):
            config.hydra.job.id = f"job_id_for_{num}"
            config.hydra.job.num = num
        return config

    def _executor(self, config: DictConfig) -> Any:
        """A submitit executor with the launcher's parameters, those of this job's own configuration."""
        import submitit

        conf = config.hydra.launcher
        params = {str(k): OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v
                  for k, v in ((k, conf[k]) for k in conf if k != "_target_")}
        prefix = self._EXECUTOR
        init = {f"{prefix}_max_num_timeout": params["max_num_timeout"]} if "max_num_timeout" in params else {}
        executor = submitit.AutoExecutor(folder=params["submitit_folder"], cluster=prefix, **init)
        shared = set(OmegaConf.structured(BaseQueueConf).keys())
        given = {k: v for k, v in params.items() if k not in OWN}
        executor.update_parameters(**{k if k in shared else f"{prefix}_{k}": v for k, v in given.items()})
        return executor

    def _submit_plain(self, manifest: Manifest, job: _Wanted, dependency: str | None) -> tuple[SweepJob, Any]:
        from holmes_hpc.submission.sweeps.manifest import SweepJob

        executor = self._executor(job.config)
        if dependency:
            own = job.config.hydra.launcher.get("dependency")
            executor.update_parameters(**{f"{self._EXECUTOR}_dependency": f"{own},{dependency}" if own else dependency})
        submitted = time.time()
        with self._shield():
            made = executor.submit(self, job.overrides, "hydra.sweep.dir", job.num, f"job_id_for_{job.num}",
                                   Singleton.get_state())
        entry = SweepJob(
            job.num, tuple(job.overrides), _relative(job.directory, manifest), "plain", self.WHERE, made.job_id,
            _relative(Path(made.paths.folder), manifest), max(1, made.num_tasks),
            str(job.config.hydra.launcher.name), submitted, job.digest,
            len(job.config.hydra.launcher.get("components") or [None]), job.copy, os.uname().nodename)
        return entry, made

    def _submit_planned(self, manifest: Manifest, job: _Wanted, planned: Planned,
                        dependency: str | None) -> tuple[SweepJob, Any]:
        from holmes_hpc.records.run import RunDirectory
        from holmes_hpc.submission.sweeps.manifest import SweepJob

        plan, directory = planned.plan, job.directory
        settings = settings_of_plan(job.config, planned.settings, self.WHERE)
        run = RunDirectory(directory)
        config = {**planned.config, "run_dir": str(directory), "plan_file": str(run.plan_path)}
        if run.exists():  # of an earlier launch: it goes on from its last checkpoint
            run.reopen(None if run.read_run().get("plan_id") == plan.id else plan.to_yaml())
            run.update_run(config=config, plan_id=plan.id, components=plan.layout)
        else:
            RunDirectory.create(directory, plan_text=plan.to_yaml(), config=config, overrides=job.overrides,
                                plan_id=plan.id, **planned.record)
        self._save_hydra(job.config, directory)
        submitted = time.time()
        made = self._start(plan, run, planned.function, config, settings, dependency)
        entry = SweepJob(
            job.num, tuple(job.overrides), _relative(directory, manifest), "plan", self.WHERE, made.id,
            _relative(directory / "submission", manifest), plan.world_size, f"holmes-{run.name}", submitted, job.digest,
            len(plan.components), job.copy, os.uname().nodename)
        return entry, made

    def _shield(self) -> contextlib.AbstractContextManager[None]:
        """What a submission happens in."""
        return contextlib.nullcontext()

    def _start(self, plan: Any, run: Any, function: Any, values: Any, settings: Any, dependency: str | None) -> Any:
        raise TypeError("use SlurmLauncher or LocalLauncher")

    def _make_room(self, before: list[Launched], *, planned: bool) -> str | None:
        """Keep at most `array_parallelism` jobs running: a dependency for the next one, or (locally) waiting."""
        raise TypeError("use SlurmLauncher or LocalLauncher")

    def _save_hydra(self, config: DictConfig, directory: Path) -> None:
        """Hydra's own files of a job, which Hydra writes in a task; here the ranks are not Hydra's tasks."""
        if config.hydra.output_subdir is None:
            return
        target = directory / str(config.hydra.output_subdir)
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.yaml").write_text(OmegaConf.to_yaml(task_config(config)), encoding="utf-8")
        (target / "hydra.yaml").write_text(
            OmegaConf.to_yaml(OmegaConf.masked_copy(config, "hydra")), encoding="utf-8")
        (target / "overrides.yaml").write_text(OmegaConf.to_yaml(config.hydra.overrides.task), encoding="utf-8")


class SlurmLauncher(HolmesLauncher):
    """One heterogeneous (or plain) Slurm job per job of the sweep."""

    _EXECUTOR, WHERE = "slurmhet", "slurm"

    def _make_room(self, before: list[Launched], *, planned: bool) -> str | None:
        most = int(self.params.get("array_parallelism") or 256)
        own = [job.entry.job_id for job in before if not job.cached]
        return f"afterany:{own[-most]}" if len(own) >= most else None

    def _start(self, plan: Any, run: Any, function: Any, values: Any, settings: Any, dependency: str | None) -> Any:
        from holmes_hpc.submission.lifecycle.status import OnSlurm
        from holmes_hpc.submission.plan_job import submit_plan

        return OnSlurm(run, submit_plan(plan, run.path, function, values, settings, dependency=dependency).job_id)


class LocalLauncher(HolmesLauncher):
    """Processes of this machine."""

    _EXECUTOR, WHERE = "local", "local"

    def _shield(self) -> contextlib.AbstractContextManager[None]:
        from holmes_hpc.submission.local import deaf_to_ctrl_c

        return deaf_to_ctrl_c()

    def _make_room(self, before: list[Launched], *, planned: bool) -> str | None:
        most = int(self.params.get("array_parallelism") or 0) or (1 if planned else 0)
        while most and not self.params.get("detach"):
            running = [j for j in before if not j.cached and not (
                j.plain.done() if j.plain is not None else j.held.state("standard").ended)]
            if len(running) < most:
                break
            time.sleep(0.5)
        return None

    def _start(self, plan: Any, run: Any, function: Any, values: Any, settings: Any, dependency: str | None) -> Any:
        from holmes_hpc.submission.local import run_plan_here

        return run_plan_here(plan, run.path, function, values, settings)


def _goes_on(state: Any) -> bool:
    """Whether a job that was submitted has not ended."""
    from holmes_hpc.slurm.job_states import UNKNOWN

    return state is not None and not state.ended and state.state != UNKNOWN


def _relative(path: Path, manifest: Manifest) -> str:
    path = path.absolute()
    root = manifest.path.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
