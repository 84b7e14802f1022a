"""The submitit executor for heterogeneous jobs: ``submitit.AutoExecutor(folder, cluster="slurmhet")``.

A script for submitit's SlurmExecutor works with this executor if it also names the components:

    executor = submitit.AutoExecutor("log", cluster="slurmhet")
    executor.update_parameters(timeout_min=60, slurmhet_components=[
        {"partition": "ib", "constraint": "nic_ib", "nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8},
        {"partition": "eth", "nodes": 1, "tasks_per_node": 8, "gpus_per_node": 8}])
    job = executor.submit(train)
"""

import contextlib
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from holmes_hpc.errors import SubmissionError, nearest
from holmes_hpc.slurm.commands import interrupt_here, slurm, uninterrupted
from holmes_hpc.submission.executor import component, environment
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL, JobRequest, script_text
from holmes_hpc.submission.executor.environment import LEADER, MAX_REQUEUES, PREEMPT_SIGNAL
from holmes_hpc.submission.executor.job import SlurmHetJob, batch_log
from holmes_hpc.submission.executor.preflight import preflight
from holmes_hpc.submission.executor.submit import Refused, cancel_on_error, errors_as_refused, on_error, submit_file
from holmes_hpc.submission.executor.task import task_arguments
from holmes_hpc.submission.executor.throttle import Throttle

# parameter of the executor -> field of JobRequest
_SAME_NAMES = (
    *("setup", "teardown", "comment", "signal_delay_s", "dependency", "mail_type", "mail_user", "wckey", "srun_args"),
    *("use_srun", "distribution", "container", "requeue"),
)
_JOB_KEYS = {"job_name": "name", "time": "timeout_min", "additional_parameters": "additional"}
_JOB_KEYS |= {name: name for name in _SAME_NAMES}
_EXECUTOR_KEYS = ("components", "array_parallelism", "stderr_to_stdout", "preflight", "max_requeues")
_OLD_NAMES = {"num_gpus": "gpus_per_node"}  # as in submitit, a value under the old name wins
_CANONICAL = {"ntasks_per_node": "tasks_per_node"}  # other name -> name of a parameter; the value set last wins
PARAMETERS = frozenset(
    {*_JOB_KEYS, *_EXECUTOR_KEYS, *(component.COMPONENT_KEYS - {"additional", "python"}), *_OLD_NAMES, *_CANONICAL}
)


class _Parameters(set[str]):
    """The names of the executor's parameters, for AutoExecutor, which iterates over them in two functions.
    `_internal_update_parameters` gets all names, to list them in an error about a mistyped one. The other function gets
    only `components`; otherwise AutoExecutor would give a user's ``partition`` to this executor, not SlurmExecutor."""

    def __iter__(self) -> Iterator[str]:
        shows_all = sys._getframe(1).f_code.co_name == "_internal_update_parameters"
        return iter(sorted(name for name in set.__iter__(self) if shows_all or name in _EXECUTOR_KEYS[:1]))


class SlurmHetExecutor(core.PicklingExecutor):
    """The executor that submits functions as jobs of one or more components.

    `folder`: for submissions, logs and results, on a file system that all nodes share; ``%j`` is the leader's job id.
    `components`: list of mappings (see :class:`ComponentRequest`); None: one component from the plain parameters.
    `max_num_timeout`: maximum number of requeues of a checkpointable function after its time limit.
    `max_requeues`: maximum number of restarts of any kind, after which a job ends; 0: only `max_num_timeout` applies.
    `python`: the command that starts Python on the nodes (shell, as in submitit).
    `preflight`: test each component by itself before a heterogeneous job is submitted, and log warnings."""

    job_class = SlurmHetJob
    task_module = "holmes_hpc.submission.executor.task"
    # Abstract in submitit, which calls them only in the method that `_submit_command` replaces.
    _num_tasks: Any = None
    _make_submission_file_text: Any = None
    _make_submission_command: Any = None
    _get_job_id_from_submission_command: Any = None

    def __init__(
        self,
        folder: str | Path,
        components: list[Mapping[str, Any]] | None = None,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        max_requeues: int = 0,
        preflight: bool = True,
    ) -> None:
        parameters = _slurm_parameters(_locals_of_auto_executor("flexible_init"))
        max_num_timeout = parameters.pop("max_num_timeout", max_num_timeout)
        max_pickle_size_gb = parameters.pop("max_pickle_size_gb", max_pickle_size_gb)
        python = parameters.pop("python", python)
        if parameters:
            problem = f"slurm_{next(iter(parameters))} has no effect"
            raise SubmissionError(problem, where="executor slurmhet", hint="use slurmhet_…")
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = shlex.quote(sys.executable) if python is None else python
        self._throttling = 0.0  # submitit's pause between submissions; dependencies throttle the jobs
        self.throttle: Throttle | None = None
        self.parameters.update(max_requeues=max_requeues, preflight=preflight)
        if components is not None:
            self._internal_update_parameters(components=components)
        if not self.affinity() > 0:
            raise RuntimeError('Could not detect "sbatch", are you indeed on a slurm cluster?')

    @classmethod
    def affinity(cls) -> int:
        """Return 1 if sbatch is installed, else -1. AutoExecutor takes the highest number; SlurmExecutor has 2."""
        return -1 if shutil.which("sbatch") is None else 1

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        same_names = ("nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")
        return {"name": "job_name", "timeout_min": "time", "mem_gb": "mem", **{name: name for name in same_names}}

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return _Parameters(PARAMETERS)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters under this executor's names, including the slurm_* ones, which AutoExecutor drops. A
        parameter may be set under several names. The last of these wins: NAME (timeout_min), slurm_NAME, Slurm's own
        name with this prefix (slurm_time), slurmhet_NAME, which AutoExecutor adds later."""
        frame_locals = _locals_of_auto_executor("_internal_update_parameters")
        slurm_params, specific = _slurm_parameters(frame_locals), frame_locals.get("specific", ())
        for name in frame_locals.get("generics", {}).keys() & slurm_params.keys():
            value = slurm_params.pop(name)
            params = params if [self.name(), name] in specific else {**params, name: value}
        params = super()._convert_parameters(params)
        if "mem" in params:
            params["mem"] = component.format_memory(params["mem"])
        return {**params, **slurm_params}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set parameters: `components`, and those of SlurmExecutor, which are defaults for the components.
        Raise ValueError for an unknown name, SubmissionError for an impossible request."""
        unknown = sorted(k for k in kwargs if k not in PARAMETERS)
        if unknown:
            valid, hint = ", ".join(sorted(PARAMETERS)), nearest(unknown[0], PARAMETERS)
            raise ValueError(f"Unavailable parameter(s): {unknown}; {hint}; valid are {valid}")
        kwargs = {_CANONICAL.get(k, k): v for k, v in kwargs.items()}
        self._request({**self.parameters, **kwargs})  # only for its checks
        super()._internal_update_parameters(**kwargs)

    def request(self) -> JobRequest:
        """Return the job that the next call of `submit` requests."""
        return self._request(self.parameters)

    def _request(self, parameters: Mapping[str, Any]) -> JobRequest:
        """Return the job that `parameters` request."""
        settings = {k: v for k, v in parameters.items() if v is not None}
        settings |= {_OLD_NAMES[k]: settings.pop(k) for k in _OLD_NAMES if k in settings}
        defaults = {k: v for k, v in settings.items() if k in component.COMPONENT_KEYS - {"additional", *_JOB_KEYS}}
        job_fields = {_JOB_KEYS[k]: v for k, v in settings.items() if k in _JOB_KEYS}
        options = {component.option_name(k, "job"): v for k, v in (job_fields.get("additional") or {}).items()}
        job_fields["additional"] = tuple((k, v) for k, v in options.items() if k in component.JOB_OPTIONS)
        components = enumerate(settings.get("components") or [{}])
        parts = [component.parse_component(part, i, defaults).with_defaults(options) for i, part in components]
        paths, batch_output = utils.JobPaths(folder=self.folder), batch_log(self.folder)
        stdout, stderr = str(paths.stdout), None if settings.get("stderr_to_stdout") else str(paths.stderr)
        max_requeues = int(settings.get("max_requeues") or 0)
        variables, signal = {"SUBMITIT_EXECUTOR": self.name(), LEADER: "%j"}, environment.preempt_signal()
        variables |= {MAX_REQUEUES: str(max_requeues), **({PREEMPT_SIGNAL: signal} if signal != USER_SIGNAL else {})}
        return JobRequest(
            components=tuple(parts),
            output=str(batch_output or stdout.replace("%t", "0")),
            error=stderr.replace("%t", "0") if batch_output is None and stderr else None,
            rank_output=stdout,
            rank_error=stderr,
            directories=(str(self.folder),),
            exit_record=str(self.folder / "%j_exit"),
            max_requeues=max_requeues,
            environment=(*variables.items(), *environment.tasks_per_node(parts)),
            signal=signal,
            **{"name": "submitit", "timeout_min": 5, **job_fields},
        )

    def job_script(self) -> str:
        """Return the batch script of the next submission, without its token."""
        return self._text(self.request())

    def _command(self, python: str) -> str:
        is_other_python = python != shlex.quote(sys.executable)
        return f"{python} {shlex.join(task_arguments(self.folder, self.task_module, any_version=is_other_python))}"

    def _commands(self, request: JobRequest) -> list[str]:
        """Return the command of each component's tasks, with the component's own Python if it has one."""
        return [self._command(self.python if part.python is None else part.python) for part in request.components]

    def _text(self, request: JobRequest) -> str:
        return script_text(request, self._commands(request))

    def _submit_command(self, command: str) -> core.Job[Any]:
        """Submit a job as submitit does, but after preflight, only once even if Slurm's answer is lost, and with a
        ticket. `command` is not used, because components may have different commands."""
        if self.throttle is None:
            return self._submit_request()[0]
        throttle_file = str(self.throttle.path)
        job: core.Job[Any] = self.throttle.submit(
            self.parameters.get("dependency"),
            lambda dependency: self._submit_request(dependency=dependency, throttle_file=throttle_file)[0],
        )
        return job

    def _submit_request(self, array_size: int = 0, **changes: Any) -> list[core.Job[Any]]:
        """Submit the requested job with the changed fields `changes`. Return it in a list, or the `array_size` jobs of
        an array. A unique token in the job's comment identifies this submission."""
        uid = uuid.uuid4().hex
        with errors_as_refused():
            request = replace(self.request(), **changes)
            request = replace(request, comment=" ".join(filter(None, (request.comment, f"holmes-{uid}"))))
            if self.parameters.get("preflight", True) and len(request.components) > 1:
                preflight(request.components, timeout_min=request.timeout_min)
        interrupt_here()
        path = self._static_folder() / f".submission_file_{uid}.sh"
        submitted = time.time()
        with on_error(path.unlink, missing_ok=True), errors_as_refused():
            path.write_text(self._text(request), encoding="utf-8")
            leader = submit_file(path, f"holmes-{uid}")
        ids = [f"{leader}_{i}" for i in range(array_size)] or [leader]
        with cancel_on_error(leader):
            jobs = [self.job_class(folder=self.folder, job_id=i, tasks=list(range(request.ranks))) for i in ids]
            jobs[0].paths.move_temporary_file(path, "submission_file")
            for job in jobs:
                logs = [t.replace("%j", job.job_id) for t in (request.output, request.error, request.step_errors) if t]
                count = len(request.components)
                job.write_ticket(request.name, submitted, components=count, token=uid, batch_logs=logs)
        return list(jobs)

    def _static_folder(self) -> Path:
        """Create the folder for files that have no job id yet, and return it."""
        folder = Path(utils.JobPaths.get_first_id_independent_folder(self.folder))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Submit all functions and return their jobs, of which at most array_parallelism run at a time.
        Jobs of one component form an array. Heterogeneous jobs cannot form one, so a :class:`Throttle` limits them."""
        limit = int(self.parameters.get("array_parallelism") or 256)
        if limit < 1:
            raise Refused(f"array_parallelism is {limit}", where="executor slurmhet", hint="use 1 or more")
        with errors_as_refused():
            is_single = len(self.request().components) == 1
        previous = self.throttle
        if len(delayed_submissions) > limit and not is_single:
            self.throttle = Throttle(self._static_folder() / f".throttle_{uuid.uuid4().hex}.json", limit)
        jobs: list[core.Job[Any]] = []
        try:
            for batch in [delayed_submissions] if is_single else [[delayed] for delayed in delayed_submissions]:
                with uninterrupted():
                    is_array, submit_one = len(batch) > 1, super()._internal_process_submissions
                    jobs += self._submit_array(batch, limit) if is_array else submit_one(batch)
        except BaseException:
            for job in reversed(jobs):  # submit all functions or none
                slurm("scancel", job.job_id)
            raise
        finally:
            self.throttle = previous
        return jobs

    def _submit_array(self, delayed_submissions: list[utils.DelayedSubmission], limit: int) -> list[core.Job[Any]]:
        """Submit the functions as an array of which `limit` jobs run at a time. Pickle them before a job can start."""
        pickles = [self._static_folder() / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        with contextlib.ExitStack() as undo:
            for delayed, path in zip(delayed_submissions, pickles, strict=True):
                undo.enter_context(on_error(path.unlink, missing_ok=True))
                delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
                delayed.dump(path)
            array = f"0-{len(pickles) - 1}%{min(len(pickles), limit)}"
            jobs = self._submit_request(len(pickles), array=array)
        with cancel_on_error(jobs[0].job_id.partition("_")[0]):
            for job, path in zip(jobs, pickles, strict=True):
                job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs


def _locals_of_auto_executor(function: str) -> Mapping[str, Any]:
    """Return the local variables of AutoExecutor's method `function` if it called this function's caller; else nothing.
    AutoExecutor passes on only parameters with the executor's prefix and has no hook for others, so this reads its
    frame. pyproject.toml limits submitit's version for this, and test_slurmhet.py fails if AutoExecutor changes."""
    frame = sys._getframe(2)
    is_auto_executor = frame.f_code.co_name == function and frame.f_globals.get("__name__") == "submitit.auto.auto"
    return frame.f_locals if is_auto_executor else {}


def _slurm_parameters(frame_locals: Mapping[str, Any]) -> dict[str, Any]:
    """Return {NAME: value} of the parameters ``slurm_NAME`` in AutoExecutor's local variables, which it would drop."""
    values = {k: v for k, v in frame_locals.get("kwargs", {}).items() if v is not None}
    return {k.removeprefix("slurm_"): v for k, v in values.items() if k.startswith("slurm_")}
