"""The job of a plan: its components, the site's settings, its run directory and the function that ranks call."""

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

from holmes_hpc.config.slurm_settings import PoolSettings, SlurmSettings
from holmes_hpc.errors import HolmesError, SubmissionError, counted
from holmes_hpc.interpreter import module_arguments
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.commands import uninterrupted
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL, JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest, node_share, parse_component
from holmes_hpc.submission.executor.environment import LEADER, MEMBER
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.executor.preflight import check_components, check_each
from holmes_hpc.submission.executor.slurmhet import SlurmHetExecutor
from holmes_hpc.submission.executor.submit import cancel_on_error, errors_as_refused
from holmes_hpc.submission.executor.throttle import Throttle
from holmes_hpc.submission.lifecycle.attempts import START_MARK, attempt_id, has_new_steps, record_attempt_end

_SURVIVE = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")  # srun's options of a step that outlives its nodes
MAX_LINKS = 64  # more files than that would burden the file system, and nobody reads them
MAX_TIMEOUTS = 10**6  # no limit for submitit, because RankTask.checkpoint decides whether the job is requeued


@dataclass(frozen=True)
class PlannedJob:
    """A job that has a plan. Every rank calls ``function(config)``.
    `settings`: configuration group slurm; `record`: keys that a sweep adds to run.yaml."""

    plan: Plan
    config: dict[str, Any]
    function: Callable[[dict[str, Any]], Any]
    settings: SlurmSettings
    record: dict[str, Any] = field(default_factory=dict)


class RankTask:
    """The callable that submitit runs in each task. It calls ``function(config)`` once in each attempt of the job.
    A HolmesError becomes a line of the log, without submitit's stack trace."""

    def __init__(self, function: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]) -> None:
        self.function, self.config = function, dict(config)

    def __call__(self) -> Any:
        # submitit's tasks ignore SIGTERM until they are killed, which would delay the end of a job whose rank failed.
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            return self.function(self.config)
        except HolmesError as e:
            print(f"failed: {e}", flush=True)
            sys.exit(e.exit_code)

    def checkpoint(self) -> utils.DelayedSubmission | None:
        """Return submitit's request for a requeue after preemption or the time limit; None if this attempt made no new
        step. submitit calls this in rank 0, unless the function handled the signal."""
        run, attempt = RunDirectory(self.config["run_dir"]), attempt_id(os.environ)
        if not has_new_steps(run, attempt):
            return None
        record_attempt_end(run, attempt, "preempted")
        return utils.DelayedSubmission(self)


def plan_components(plan: Plan, settings: SlurmSettings) -> tuple[ComponentRequest, ...]:
    """Return the request of each component of `plan`, with the settings for the site and for the component's pool.
    Raise SubmissionError for settings of an unknown pool, for a wrong value, or if a pool's nodes cannot run this
    Python, because they have another CPU architecture."""
    pools, pool_names = settings.pools or {}, [f.name for f in plan.site.pools]
    SubmissionError.refuse_unknown("no pool", pools, pool_names, "slurm.pools")
    requests = []
    for index, part in enumerate(plan.components):
        pool_settings = pools.get(part.pool) or PoolSettings()
        image = settings.container if pool_settings.container is None else pool_settings.container
        architecture, _ = plan.other_architectures.get(part.pool, (os.uname().machine, ""))
        is_other = architecture != os.uname().machine and not (image or pool_settings.python)
        hint = f"set slurm.pools.{part.pool}.python to a Python for them, or give a container"
        problem = f"its nodes are {architecture}, and this Python is for {os.uname().machine}"
        SubmissionError.refuse(f"pool {part.pool}", (is_other, problem, hint))
        additional: dict[str, Any] = {**(settings.additional or {}), **(pool_settings.additional or {})}
        values: dict[str, Any] = {**settings.specified(), **pool_settings.specified(), "additional": additional}
        pool = plan.site.pool(part.pool)
        gpus: int | str | None = part.gpus_per_node if pool.gres and not values.get("gres") else None
        gpus = f"{pool.gres_type}:{gpus}" if gpus and pool.gres_type else gpus
        has_share = (settings.share if pool_settings.share is None else pool_settings.share) is not False
        if has_share and not pool.gres and not pool.gpu.is_cpu:  # Slurm cannot divide GPUs that it does not list
            values = {"exclusive": True, **values}
        if has_share and pool.gres:
            specified = {str(k).lstrip("-").replace("-", "_").partition("_per_")[0] for k in additional}
            node = (pool.node_gpus or pool.gpus_per_node, pool.node_cpus, pool.node_memory_gib)
            share = node_share(part.gpus_per_node, *node, exclusive=values.get("exclusive") is True)
            values = {**{k: v for k, v in share.items() if k.partition("_per_")[0] not in specified}, **values}
        if pool_settings.container is not None and pool_settings.python is None:  # the image's Python, or this one
            values["python"] = "python3" if pool_settings.container else shlex.quote(sys.executable)
        hosts = (pool.exclude, values.get("exclude"), values["additional"].pop("exclude", None))
        values |= {
            "partition": part.partition or None,
            "constraint": part.constraint or None,
            "exclude": ",".join(h if isinstance(h, str) else ",".join(h) for h in hosts if h) or None,
            "nodes": part.nodes,
            "tasks_per_node": part.gpus_per_node,
            "gpus_per_node": gpus,
        }
        requests.append(parse_component(values, index))
    return tuple(requests)


def agent_components(parts: Sequence[ComponentRequest], spares: int) -> tuple[ComponentRequest, ...]:
    """Return `parts` for an elastic run: with `spares` more nodes and one task per node, which has its ranks' CPUs."""
    return tuple(
        replace(
            part,
            nodes=part.nodes + spares,
            tasks_per_node=1,
            cpus_per_task=part.cpus_per_task and part.cpus_per_task * part.tasks_per_node,
            additional=(*part.additional, ("no-kill", True)),
            srun_args=(*part.srun_args, *_SURVIVE),
        )
        for part in parts
    )


class PlanExecutor(SlurmHetExecutor):
    """The executor for the job of a run: its ranks log to logs/rank-N.txt, and its batch script writes result.json."""

    is_elastic = False  # True: agents and a coordinator start the ranks
    member: int | None = None  # index of the next job's component, if each component is a separate job
    leader = "%j"  # the id of the first of these separate jobs

    def __init__(self, run_dir: Path, parts: Sequence[ComponentRequest], name: str, settings: SlurmSettings) -> None:
        self.run_path = run_dir.expanduser().absolute()
        super().__init__(
            self.run_path / "submission",
            components=list(parts),  # type: ignore[arg-type]
            python="python3" if settings.container else None,  # the image's
            max_num_timeout=MAX_TIMEOUTS,
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
        return 1  # printing a script needs no Slurm; submitting reports a missing one

    def _request(self, parameters: Mapping[str, Any]) -> JobRequest:
        """Return the job that `parameters` request, with logs in the run directory and training's signal."""
        request, logs = super()._request(parameters), self.run_path / "logs"
        suffix = ""
        if self.member is not None:
            suffix, variables = f"-{self.member}", {MEMBER: str(self.member), LEADER: self.leader}
            variables = {**dict(request.environment), **variables}
            components = (request.components[self.member],)
            request = replace(request, components=components, environment=tuple(variables.items()))
        return replace(
            request,
            environment=(*request.environment, ("SUBMITIT_LOG_LEVEL", "ERROR")),
            signal=USER_SIGNAL,
            output=str(logs / "batch.txt"),
            error=None,
            rank_output=str(logs / (f"agent{suffix}-%t.txt" if self.is_elastic else "rank-%t.txt")),
            rank_error=None,
            step_errors=str(logs / f"srun{suffix}.txt"),
            directories=(*request.directories, str(logs)),
        )

    def _text(self, request: JobRequest) -> str:
        end, lost = end_command(self.run_path), run_command("lifecycle.lost_step", self.run_path)
        again = f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || {end_command(self.run_path, "1", "")} --again || exit'
        mark = f"echo {shlex.quote(START_MARK)} $SLURM_JOB_ID, restart ${{SLURM_RESTART_COUNT:-0}}"
        if self.member is not None:  # all jobs of the run are one attempt, whose end the coordinator records
            again = "export SLURM_RESTART_COUNT=0"
            if self.member:
                who = f"job {self.leader} decides whether they join"
                mark = f'echo "holmes: the nodes of job $SLURM_JOB_ID are there; {who}"'
        return script_text(
            request,
            self._commands(request),
            mark=mark,
            begin=[again],
            monitor="" if self.is_elastic else f'{lost} {request.ranks} "$step"',
            coordinator=run_command("elastic.coordinator", self.run_path) if self.is_elastic else "",
            on_signal=[f"{end} --so-far"] if self.member is None else [],
            finish=[f"{end}; status=$?"] if self.member is None else [],
        )

    def submit_others(self, leader: str) -> list[str]:
        """Submit the jobs of all components but the first, whose job is `leader`. Return their ids."""
        self.leader, ids = leader, list[str]()
        with contextlib.ExitStack() as on_error:
            for index in range(1, len(self.parameters["components"])):
                self.member = index
                ids.append(self._submit_request()[0].job_id)
                on_error.enter_context(cancel_on_error(ids[-1]))
        return ids


def end_command(run_path: Path, status: str = "$status", signalled: str = "$signalled") -> str:
    """Return the shell command that requeues the job or records the run's end. Its exit status is the job's."""
    return f'{run_command("lifecycle.batch_end", run_path)} "{status}" "{signalled}"'


def run_command(module: str, run_path: Path) -> str:
    """Return the shell command of a module of `submission`, run outside any container."""
    arguments = module_arguments(f"holmes_hpc.submission.{module}")
    return shlex.join([sys.executable, *arguments, str(run_path)])


def plan_executor(
    plan: Plan, run_dir: str | Path, settings: SlurmSettings, name: str | None = None, spares: int | None = None
) -> PlanExecutor:
    """Return the executor that submits `plan` as the run in `run_dir`. Its `job_script()` returns the batch script.
    `spares`: number of spare nodes of each component of an elastic run; None: the run is not elastic."""
    run, parts = RunDirectory(run_dir), plan_components(plan, settings)
    parts = parts if spares is None else agent_components(parts, spares)
    executor = PlanExecutor(run.path, parts, name or f"holmes-{run.name}", settings)
    if spares is not None:
        executor.is_elastic, executor.task_module = True, "holmes_hpc.submission.elastic.agent"
    return executor


def submit_plan(
    planned: PlannedJob, run_dir: Path, name: str | None = None, throttle: Throttle | None = None, test: bool = True
) -> SlurmHetJob:
    """Submit a job to Slurm and return it.

    `run_dir`: directory of an existing run (RunDirectory.create), whose run.yaml gets the job's id; the configuration
    gets the keys `plan_file` and `run_dir`; `name`: the job's name, by default made from the run's; `throttle`: the
    limit on running jobs of the job's sweep; `test`: False checks each component only by itself. If a component is
    infeasible or Slurm refuses the job, raise SubmissionError, without a job."""
    plan, run, elastic = planned.plan, RunDirectory(run_dir.absolute()), planned.config.get("elastic", {})
    spares = elastic["spares"] if elastic.get("enabled") else None
    executor = plan_executor(plan, run.path, planned.settings, name, spares)
    executor.throttle, executor.parameters["preflight"] = throttle, test
    advice = f"its nodes include {counted(spares, 'spare')}: elastic.spares=0 requests none" if spares else ""
    with errors_as_refused(advice):  # test a single component too, because a refused sbatch leaves a failed job behind
        request = executor.request()
        (check_components if test else check_each)(request.components, timeout_min=request.timeout_min)
    config = {**planned.config, "plan_file": str(run.plan_path), "run_dir": str(run.path)}
    has_members = elastic.get("enabled") and elastic.get("members") and len(plan.components) > 1
    executor.member = 0 if has_members else None
    with uninterrupted():
        job: SlurmHetJob = executor.submit(RankTask(planned.function, config))
        with cancel_on_error(job.job_id):
            record = {"job_id": int(job.job_id), "components": len(plan.components), "name": request.name}
            if executor.member is not None:
                others = executor.submit_others(job.job_id)
                record |= {"components": 1, "members": list(map(int, [job.job_id, *others]))}
            run.update_run(slurm={**record, "submitted": time.time()})
        with contextlib.suppress(OSError):  # the job is submitted: an error here must not look like a refusal
            for rank in range(min(plan.world_size, MAX_LINKS)):  # links where submitit looks for a task's output
                link = job.paths.folder / f"{job.job_id}_{rank}_log.out"
                link.unlink(missing_ok=True)
                link.symlink_to(Path("..") / "logs" / f"rank-{rank}.txt")
    return job
