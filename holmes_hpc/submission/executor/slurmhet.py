"""The submitit executor for heterogeneous jobs: ``submitit.AutoExecutor(folder, cluster="slurmhet")``.

A script written for submitit's SlurmExecutor runs here by naming the components:

    executor = submitit.AutoExecutor("log", cluster="slurmhet")
    executor.update_parameters(timeout_min=60, slurmhet_components=[
        {"partition": "ib", "constraint": "nic_ib", "nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8},
        {"partition": "eth", "nodes": 1, "tasks_per_node": 8, "gpus_per_node": 8}])
    job = executor.submit(train)
"""

from __future__ import annotations

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
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL, JobRequest, script_text, words
from holmes_hpc.submission.executor.component import COMPONENT_KEYS, OF_THE_JOB, component, memory, option
from holmes_hpc.submission.executor.environment import (
    LEADER,
    MAX_REQUEUES,
    PREEMPT_SIGNAL,
    preempt_signal,
    tasks_per_node,
)
from holmes_hpc.submission.executor.job import SlurmHetJob, batch_log
from holmes_hpc.submission.executor.preflight import preflight
from holmes_hpc.submission.executor.submit import Refused, cancelled_on_error, refusals, submit_file
from holmes_hpc.submission.executor.throttle import Line

# name here -> name in JobRequest, with submitit's default
_JOB_KEYS = {
    "job_name": "name",
    "time": "timeout_min",
    "setup": "setup",
    "teardown": "teardown",
    "comment": "comment",
    "signal_delay_s": "signal_delay_s",
    "dependency": "dependency",
    "mail_type": "mail_type",
    "mail_user": "mail_user",
    "wckey": "wckey",
    "srun_args": "srun_args",
    "use_srun": "use_srun",
    "distribution": "distribution",
    "container": "container",
    "requeue": "requeue",
    "additional_parameters": "additional",
}
_OWN_KEYS = ("components", "array_parallelism", "stderr_to_stdout", "preflight", "max_requeues")
_SLURM_ONLY = {"num_gpus": "gpus_per_node"}  # submitit's old name, which wins over the new one there too
_CANONICAL = {"ntasks_per_node": "tasks_per_node"}  # of two names of one parameter, a later call's wins
PARAMETERS = frozenset(
    {*_JOB_KEYS, *_OWN_KEYS, *(COMPONENT_KEYS - {"additional", "python"}), *_SLURM_ONLY, *_CANONICAL}
)


class _Parameters(set[str]):
    """Our parameters, which do not show the ones that SlurmExecutor has too when AutoExecutor makes its table of
    deprecated names: it would otherwise turn a user's ``partition`` into ours. When it lists them for somebody who
    mistyped one, all are shown."""

    def __iter__(self) -> Iterator[str]:
        listed = sys._getframe(1).f_code.co_name == "_internal_update_parameters"
        return iter(sorted(name for name in set.__iter__(self) if listed or name in _OWN_KEYS[:1]))


class SlurmHetExecutor(core.PicklingExecutor):
    """Submits functions as jobs of one or more components.

    Parameters
    ----------
    folder: where submissions, logs and results go; every node must see it. ``%j`` is the leader's job id.
    components: list of mappings (see :class:`ComponentRequest`); None: one component from the plain parameters.
    max_num_timeout: how often a checkpointable function goes on after a time-out.
    max_requeues: a job that was restarted so often asks for no requeue, and ends when Slurm itself requeues it once
        more; 0: only `max_num_timeout` counts.
    python: the command that starts Python on the nodes (shell, as in submitit).
    preflight: test each component alone before a heterogeneous job is submitted, and log what may keep it waiting.
    """

    job_class = SlurmHetJob

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
        given = _of_slurm(_locals_of_auto_executor("flexible_init"))
        max_num_timeout = given.pop("max_num_timeout", max_num_timeout)
        max_pickle_size_gb = given.pop("max_pickle_size_gb", max_pickle_size_gb)
        python = given.pop("python", python)
        if given:
            raise SubmissionError(
                f"slurm_{next(iter(given))} means nothing here", where="executor slurmhet", hint="use slurmhet_…"
            )
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = shlex.quote(sys.executable) if python is None else python
        self._throttling = 0.0  # jobs in line are throttled by their dependencies, not by waiting here
        self.line: Line | None = None
        self.parameters.update(max_requeues=max_requeues, preflight=preflight)
        if components is not None:
            self._internal_update_parameters(components=components)
        if not self.affinity() > 0:
            raise RuntimeError('Could not detect "sbatch", are you indeed on a slurm cluster?')

    @classmethod
    def affinity(cls) -> int:
        """Below SlurmExecutor's 2: a script that names no cluster keeps submitit's own executor."""
        return -1 if shutil.which("sbatch") is None else 1

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict:
        return {
            "name": "job_name",
            "timeout_min": "time",
            "mem_gb": "mem",
            "nodes": "nodes",
            "cpus_per_task": "cpus_per_task",
            "gpus_per_node": "gpus_per_node",
            "tasks_per_node": "tasks_per_node",
        }

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return _Parameters(PARAMETERS)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """Generic parameters under their names here. AutoExecutor drops slurm_* ones without a word under another
        cluster's name; here they count as there: a specific one (slurm_time) wins over a generic one (timeout_min), and
        a generic one for Slurm (slurm_timeout_min) over one for all. It sets those of slurmhet_* afterwards."""
        held = _locals_of_auto_executor("_internal_update_parameters")
        dropped, own = _of_slurm(held), [name for executor, name in held.get("specific", ()) if executor == self.name()]
        for name in held.get("generics", {}).keys() & dropped.keys():
            value = dropped.pop(name)
            params = params if name in own else {**params, name: value}
        params = super()._convert_parameters(params)
        if "mem" in params:
            params["mem"] = memory(params["mem"])
        return {**params, **dropped}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set parameters: SlurmExecutor's, and `components`. What a component does not say, the plain ones say."""
        unknown = sorted(k for k in kwargs if k not in PARAMETERS)
        if unknown:
            raise ValueError(
                f"Unavailable parameter(s): {unknown}; {nearest(unknown[0], PARAMETERS)}; valid are "
                + ", ".join(sorted(PARAMETERS))
            )
        kwargs = {_CANONICAL.get(k, k): v for k, v in kwargs.items()}
        self._request({**self.parameters, **kwargs})  # refuses what cannot be
        super()._internal_update_parameters(**kwargs)

    def request(self) -> JobRequest:
        """What the next submission asks for."""
        return self._request(self.parameters)

    def _request(self, parameters: Mapping[str, Any], token: str = "") -> JobRequest:
        given = {k: v for k, v in parameters.items() if v is not None}
        given |= {_SLURM_ONLY[k]: given.pop(k) for k in _SLURM_ONLY if k in given}
        defaults = {k: v for k, v in given.items() if k in COMPONENT_KEYS and k not in ("additional", *_JOB_KEYS)}
        whole = {_JOB_KEYS[k]: v for k, v in given.items() if k in _JOB_KEYS}
        options = {option(k, "job"): v for k, v in (whole.get("additional") or {}).items()}
        whole["additional"] = tuple((k, v) for k, v in options.items() if k in OF_THE_JOB)
        parts = [component(part, i, defaults).filled(options) for i, part in enumerate(given.get("components") or [{}])]
        paths = utils.JobPaths(folder=self.folder)
        apart = not given.get("stderr_to_stdout", False)
        separate = batch_log(self.folder)
        if token:
            whole["comment"] = " ".join(w for w in (whole.get("comment"), token) if w)
        most_requeues = int(given.get("max_requeues") or 0)
        return JobRequest(
            components=tuple(parts),
            output=str(separate or str(paths.stdout).replace("%t", "0")),
            error=str(paths.stderr).replace("%t", "0") if separate is None and apart else None,
            rank_output=str(paths.stdout),
            rank_error=str(paths.stderr) if apart else None,
            directories=(str(self.folder),),
            exit_record=str(self.folder / "%j_exit"),
            max_requeues=most_requeues,
            environment=(
                ("SUBMITIT_EXECUTOR", self.name()),
                (LEADER, "%j"),
                (MAX_REQUEUES, str(most_requeues)),
                *(((PREEMPT_SIGNAL, preempt_signal()),) if preempt_signal() != USER_SIGNAL else ()),
                *tasks_per_node(parts),
            ),
            signal=preempt_signal(),
            **{"name": "submitit", "timeout_min": 5, **whole},
        )

    def job_script(self) -> str:
        """The batch script as it would be submitted, without the token that makes a submission unique."""
        return self._text(self.request(), self._submitit_command_str)

    @property
    def _submitit_command_str(self) -> str:
        return self._command(self.python)

    def _command(self, python: str) -> str:
        return f"{python} -u -m submitit.core._submit {words([str(self.folder)])}"

    def _commands(self, request: JobRequest, command: str) -> list[str]:
        """What the tasks of each component run: `command`, or with a Python of the component's own."""
        return [command if part.python is None else self._command(part.python) for part in request.components]

    def _num_tasks(self) -> int:
        return self.request().ranks

    def _text(self, request: JobRequest, command: str) -> str:
        return script_text(request, self._commands(request, command))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text(self._request(self.parameters, token=f"holmes-{uid}"), command)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: str | bytes) -> str:
        text = string if isinstance(string, str) else string.decode()
        return text.strip().split(";")[0].split()[-1]

    def _submit_command(self, command: str) -> core.Job[Any]:
        """As submitit's, with preflight, without submitting twice when an answer gets lost, and with a ticket."""
        if self.line is None:
            return self._hand_over(command)[0]
        line = str(self.line.path)
        job: core.Job[Any] = self.line.enter(
            self.parameters.get("dependency"),
            lambda dependency: self._hand_over(command, dependency=dependency, line=line)[0],
        )
        return job

    def _hand_over(self, command: str, **changes: Any) -> list[core.Job[Any]]:
        """Submit the request with `changes`; the job, or those of an array."""
        uid = uuid.uuid4().hex
        with refusals():
            request = replace(self._request(self.parameters, token=f"holmes-{uid}"), **changes)
            if self.parameters.get("preflight", True) and len(request.components) > 1:
                preflight(request.components, timeout_min=request.timeout_min)
        interrupt_here()
        path = self._static_folder() / f".submission_file_{uid}.sh"
        submitted = time.time()
        try:
            with refusals():
                path.write_text(self._text(request, command), encoding="utf-8")
                leader = submit_file(path, f"holmes-{uid}")
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        ids = [leader] if request.array is None else [f"{leader}_{i}" for i in range(request.elements)]
        with cancelled_on_error(leader):
            jobs = [self.job_class(folder=self.folder, job_id=i, tasks=list(range(request.ranks))) for i in ids]
            jobs[0].paths.move_temporary_file(path, "submission_file")
            for job in jobs:
                logs = [t.replace("%j", job.job_id) for t in (request.output, request.error, request.step_errors) if t]
                job.write_ticket(
                    request.name, submitted, components=len(request.components), token=uid, batch_logs=logs
                )
        return list(jobs)

    def _static_folder(self) -> Path:
        """Make and return the folder of submissions that have no job id yet."""
        folder = Path(utils.JobPaths.get_first_id_independent_folder(self.folder))
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Submit all; of several at most array_parallelism run at a time: those of one component as an array, which
        heterogeneous jobs cannot be, so these wait in line."""
        most = int(self.parameters.get("array_parallelism") or 256)
        if most < 1:
            raise Refused(f"array_parallelism is {most}", where="executor slurmhet", hint="use 1 or more")
        with refusals():
            single = len(self.request().components) == 1
        line = self.line
        if len(delayed_submissions) > most and not single:
            self.line = Line(self._static_folder() / f".line_{uuid.uuid4().hex}.json", most)
        jobs: list[core.Job[Any]] = []
        try:
            for batch in [delayed_submissions] if single else [[delayed] for delayed in delayed_submissions]:
                with uninterrupted():
                    jobs += (
                        self._submit_array(batch, most)
                        if len(batch) > 1
                        else super()._internal_process_submissions(batch)
                    )
        except BaseException:
            for job in reversed(jobs):  # a batch is submitted as a whole or not at all
                slurm("scancel", job.job_id)
            raise
        finally:
            self.line = line
        return jobs

    def _submit_array(self, delayed_submissions: list[utils.DelayedSubmission], most: int) -> list[core.Job[Any]]:
        pickles = [self._static_folder() / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        try:
            for delayed, path in zip(delayed_submissions, pickles, strict=True):
                delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
                delayed.dump(path)
            array = f"0-{len(pickles) - 1}%{min(len(pickles), most)}"
            jobs = self._hand_over(self._submitit_command_str, array=array)
        except BaseException:
            for path in pickles:
                path.unlink(missing_ok=True)
            raise
        with cancelled_on_error(jobs[0].job_id.partition("_")[0]):
            for job, path in zip(jobs, pickles, strict=True):
                job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs


def _locals_of_auto_executor(function: str) -> Mapping[str, Any]:
    """The variables of submitit's AutoExecutor while its `function` calls us; outside it nothing is found.

    AutoExecutor hands on only what bears the executor's own name and has no hook for the rest, so this reads its frame.
    pyproject.toml bounds submitit's version for this, and tests/submission/executor/test_slurmhet.py fails where
    AutoExecutor is another.
    """
    frame = sys._getframe(2)
    ours = frame.f_code.co_name == function and frame.f_globals.get("__name__") == "submitit.auto.auto"
    return frame.f_locals if ours else {}


def _of_slurm(held: Mapping[str, Any]) -> dict[str, Any]:
    """The ``slurm_*`` parameters that AutoExecutor holds, and would drop."""
    return {
        k[len("slurm_") :]: v for k, v in held.get("kwargs", {}).items() if k.startswith("slurm_") and v is not None
    }
