"""A Plan as a job: components, settings of the site, run directory, and the function that every rank calls."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from submitit.core import utils

from holmes_hpc.config.slurm_settings import FabricSettings, SlurmSettings
from holmes_hpc.errors import HolmesError, SubmissionError, nearest
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import uninterrupted
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL, JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest, node_share, parse_component
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.executor.preflight import check_components
from holmes_hpc.submission.executor.slurmhet import SlurmHetExecutor
from holmes_hpc.submission.executor.submit import cancel_on_error, errors_as_refused
from holmes_hpc.submission.executor.throttle import Throttle
from holmes_hpc.submission.lifecycle.attempts import START_MARK, gained, note_progress, start_of

WHILE_IT_GAINS = 10**6  # time-outs that submitit allows: RankTask.checkpoint ends it sooner


@dataclass(frozen=True)
class Planned:
    """A job with a Plan: every rank calls ``function(config)``. `settings`: the site's (group slurm); `record`: more
    keys for run.yaml."""

    plan: Plan
    config: dict[str, Any]
    function: Callable[[dict[str, Any]], Any]
    settings: SlurmSettings
    record: dict[str, Any] = field(default_factory=dict)


class RankTask:
    """What each task runs: `function(config)`; submitit's checkpoint protocol goes on as long as steps are gained. An
    error of our own is a line of the log, without a stack, which submitit would add."""

    def __init__(self, function: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]) -> None:
        self.function, self.config = function, dict(config)

    def __call__(self) -> Any:
        # submitit lets tasks live through SIGTERM until they are killed; so would a whole job whose one rank died.
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            return self.function(self.config)
        except HolmesError as e:
            print(f"failed: {e}", flush=True)
            sys.exit(e.exit_code)

    def checkpoint(self) -> utils.DelayedSubmission | None:
        """Called in rank 0 when the job is preempted or out of time, if the function did not handle that itself."""
        run, start = RunDirectory(self.config["run_dir"]), start_of(os.environ)
        if not gained(run, start):
            return None
        note_progress(run, start, "preempted")
        return utils.DelayedSubmission(self)


def plan_components(plan: Plan, settings: SlurmSettings) -> tuple[ComponentRequest, ...]:
    """What each component of `plan` asks for, with the site's settings and those of its fabric."""
    fabrics, known = settings.fabrics or {}, [f.name for f in plan.site.fabrics]
    for name in fabrics:
        if name not in known:
            raise SubmissionError(f"no fabric {name!r}", where="slurm.fabrics", hint=nearest(name, known))
    made = []
    for index, part in enumerate(plan.components):
        own = fabrics.get(part.fabric) or FabricSettings()
        values = {
            **settings.specified(),
            **own.specified(),
            "additional": {**(settings.additional or {}), **(own.additional or {})},
        }
        fabric = plan.site.fabric(part.fabric)
        gpus = part.gpus_per_node if fabric.gres and not values.get("gres") else None
        if fabric.gres and (settings.share if own.share is None else own.share) is not False:
            said = {str(k).lstrip("-").replace("-", "_").partition("_per_")[0] for k in values["additional"]}
            share = node_share(
                part.gpus_per_node,
                fabric.node_gpus or fabric.gpus_per_node,
                fabric.node_cpus,
                fabric.node_memory_gib,
                part.gpus_per_node,
                values.get("exclusive") is True,
            )
            values = {**{k: v for k, v in share.items() if k.partition("_per_")[0] not in said}, **values}
        if own.container is not None and own.python is None:  # the image's own, or the one outside
            values["python"] = "python3" if own.container else shlex.quote(sys.executable)
        values |= {
            "partition": part.partition or None,
            "constraint": part.constraint or None,
            "nodes": part.nodes,
            "tasks_per_node": part.gpus_per_node,
            "gpus_per_node": gpus,
        }
        made.append(parse_component(values, index))
    return tuple(made)


class PlanExecutor(SlurmHetExecutor):
    """The executor, arranged around a run directory: logs/rank-N.txt, and result.json at the end."""

    def __init__(
        self, run: RunDirectory, parts: Sequence[ComponentRequest], name: str, settings: SlurmSettings
    ) -> None:
        self.run_path = Path(run.path).expanduser().absolute()
        super().__init__(
            self.run_path / "submission",
            components=list(parts),  # type: ignore[arg-type]
            python="python3" if settings.container else None,  # the image's own
            max_num_timeout=WHILE_IT_GAINS,
        )
        self._internal_update_parameters(
            job_name=name,
            time=settings.timeout_min,
            setup=list(settings.setup),
            container=settings.container,
            requeue=True,
            distribution=settings.distribution,
        )

    @classmethod
    def name(cls) -> str:
        return SlurmHetExecutor.name()

    @classmethod
    def affinity(cls) -> int:
        return 1  # a script can be printed without a Slurm; submitting says itself that there is none

    def _request(self, parameters: Mapping[str, Any], token: str = "") -> JobRequest:
        """With its logs in the run directory, and the signal that training listens for."""
        request, logs = super()._request(parameters, token), self.run_path / "logs"
        return replace(
            request,
            environment=(*request.environment, ("SUBMITIT_LOG_LEVEL", "ERROR")),
            signal=USER_SIGNAL,
            output=str(logs / "batch.txt"),
            error=None,
            rank_output=str(logs / "rank-%t.txt"),
            rank_error=None,
            step_errors=str(logs / "srun.txt"),
            directories=(*request.directories, str(logs)),
        )

    def _text(self, request: JobRequest, command: str) -> str:
        judge = finish_command(self.run_path)
        begin = [
            f"echo {shlex.quote(START_MARK)} $SLURM_JOB_ID, restart ${{SLURM_RESTART_COUNT:-0}}",
            f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || {finish_command(self.run_path, "1", "")} --again || exit',
        ]
        return script_text(
            request,
            self._commands(request, command),
            begin=begin,
            on_signal=[f"{judge} --so-far"],
            finish=[f"{judge}; status=$?"],
        )


def finish_command(run_path: Path, status: str = "$status", signalled: str = "$signalled") -> str:
    """Words of shell that judge the run's end; their exit status is what the job's should be."""
    python = shlex.quote(sys.executable)  # the batch script runs outside any container
    return f'{python} -m holmes_hpc.submission.lifecycle.finish {shlex.quote(str(run_path))} "{status}" "{signalled}"'


def plan_executor(plan: Plan, run_dir: str | Path, settings: SlurmSettings, name: str | None = None) -> PlanExecutor:
    """Return the executor that submits `plan`; its `job_script()` is what Slurm is handed."""
    run = RunDirectory(run_dir)
    return PlanExecutor(run, plan_components(plan, settings), name or f"holmes-{run.name}", settings)


def submit_plan(
    plan: Plan,
    run_dir: str | Path,
    function: Callable[[dict[str, Any]], Any],
    config: Mapping[str, Any],
    settings: SlurmSettings,
    *,
    name: str | None = None,
    throttle: Throttle | None = None,
) -> SlurmHetJob:
    """Submit `plan`: every rank calls ``function(config)``, with `config["plan_file"]` and `config["run_dir"]` set.

    `run_dir` must hold a run (RunDirectory.create); its run.yaml gets the job's ids. `name`: the job's, else made of
    the run's; `throttle`: its sweep's limit on running jobs. Raises SubmissionError when a component is impossible or
    Slurm refuses; nothing is submitted then.
    """
    run = RunDirectory(Path(run_dir).absolute())
    executor = plan_executor(plan, run.path, settings, name)
    executor.throttle = throttle
    with errors_as_refused():  # tested also if it is a single component: a refused sbatch leaves a failed job behind
        request = executor.request()
        check_components(request.components, timeout_min=request.timeout_min)
    task = RankTask(function, {**config, "plan_file": str(run.plan_path), "run_dir": str(run.path)})
    with uninterrupted():
        job: SlurmHetJob = executor.submit(task)
        with cancel_on_error(job.job_id):
            run.update_run(
                slurm={
                    "job_id": int(job.job_id),
                    "components": len(plan.components),
                    "name": request.name,
                    "submitted": time.time(),
                }
            )
        with contextlib.suppress(OSError):  # the job is Slurm's now: nothing may look like a failed submission
            for rank in range(plan.world_size):  # where submitit looks for a task's output
                link = job.paths.folder / f"{job.job_id}_{rank}_log.out"
                link.unlink(missing_ok=True)
                link.symlink_to(Path("..") / "logs" / f"rank-{rank}.txt")
    return job
