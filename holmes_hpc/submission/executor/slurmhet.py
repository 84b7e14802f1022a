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
from pathlib import Path
from typing import Any

from submitit.core import core, utils

from holmes_hpc.errors import SubmissionError, nearest
from holmes_hpc.slurm.commands import interrupt_here, slurm, uninterrupted
from holmes_hpc.submission.executor.batch_script import JobRequest, script_text, words
from holmes_hpc.submission.executor.component import (
    ALIASES,
    COMPONENT_KEYS,
    OF_THE_JOB,
    ComponentRequest,
    components,
    memory,
    option,
)
from holmes_hpc.submission.executor.environment import LEADER, MAX_REQUEUES
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.executor.preflight import preflight_aloud
from holmes_hpc.submission.executor.submit import cancelled_on_error, submit_file

# name here -> name in JobRequest, with submitit's default
_JOB_KEYS = {"job_name": "name", "time": "timeout_min", "setup": "setup", "teardown": "teardown", "comment": "comment",
             "signal_delay_s": "signal_delay_s", "dependency": "dependency", "mail_type": "mail_type",
             "mail_user": "mail_user", "wckey": "wckey", "srun_args": "srun_args", "use_srun": "use_srun",
             "distribution": "distribution", "container": "container", "requeue": "requeue",
             "additional_parameters": "additional"}
_OWN_KEYS = ("components", "array_parallelism", "stderr_to_stdout", "preflight", "max_requeues")
_SLURM_ONLY = {"num_gpus": "gpus_per_node", "ntasks_per_node": "tasks_per_node"}
PARAMETERS = frozenset({*_JOB_KEYS, *_OWN_KEYS, *(COMPONENT_KEYS - {"additional"}), *_SLURM_ONLY})


class _Parameters(set[str]):
    """Our parameters, which do not show the ones that SlurmExecutor has too when somebody iterates: AutoExecutor makes
    its table of deprecated names by iterating, and would otherwise turn a user's ``partition`` into ours."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for name in set.__iter__(self) if name in _OWN_KEYS[:1]))


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

    def __init__(self, folder: str | Path, components: list[Mapping[str, Any]] | None = None, max_num_timeout: int = 3,
                 max_pickle_size_gb: float = 1.0, python: str | None = None, max_requeues: int = 0,
                 preflight: bool = True) -> None:
        given = _dropped_by_auto_executor("flexible_init")
        max_num_timeout = given.pop("max_num_timeout", max_num_timeout)
        max_pickle_size_gb = given.pop("max_pickle_size_gb", max_pickle_size_gb)
        python = given.pop("python", python)
        if given:
            raise SubmissionError(f"slurm_{next(iter(given))} means nothing here", where="executor slurmhet",
                                  hint="use slurmhet_…")
        super().__init__(folder, max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.python = shlex.quote(sys.executable) if python is None else python
        self._throttling = 0.0  # a chain of jobs is throttled by its dependencies, not by waiting here
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
        return {"name": "job_name", "timeout_min": "time", "mem_gb": "mem", "nodes": "nodes",
                "cpus_per_task": "cpus_per_task", "gpus_per_node": "gpus_per_node", "tasks_per_node": "tasks_per_node"}

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return _Parameters(PARAMETERS)

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        params = super()._convert_parameters(params)
        if "mem" in params:
            params["mem"] = memory(params["mem"])
        # AutoExecutor drops slurm_* parameters without a word under another cluster's name; here they count.
        return {**_dropped_by_auto_executor("_internal_update_parameters"), **params}

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Set parameters: SlurmExecutor's, and `components`. What a component does not say, the plain ones say."""
        unknown = sorted(k for k in kwargs if k not in PARAMETERS)
        if unknown:
            raise ValueError(f"Unavailable parameter(s): {unknown}; {nearest(unknown[0], PARAMETERS)}")
        changed = {**self.parameters, **kwargs}
        self._request(changed)  # refuses what cannot be
        super()._internal_update_parameters(**kwargs)

    def request(self) -> JobRequest:
        """What the next submission asks for."""
        return self._request(self.parameters)

    def _request(self, parameters: Mapping[str, Any], token: str = "") -> JobRequest:
        given = {_SLURM_ONLY.get(k, k): v for k, v in parameters.items() if v is not None}
        defaults = {k: v for k, v in given.items() if k in COMPONENT_KEYS and k != "additional"}
        parts = components(given.get("components") or [{}], defaults)
        whole = {_JOB_KEYS[k]: v for k, v in given.items() if k in _JOB_KEYS}
        options = {option(k, "job"): v for k, v in (whole.get("additional") or {}).items()}
        whole["additional"] = tuple((k, v) for k, v in options.items() if k in OF_THE_JOB)
        parts = tuple(part.filled(options) for part in parts)
        if isinstance(whole.get("srun_args"), str):
            raise SubmissionError("srun_args is a text, must be a list", where="executor slurmhet", hint="split it")
        whole["srun_args"] = tuple(str(a) for a in whole.get("srun_args") or ())
        paths = utils.JobPaths(folder=self.folder)
        apart = not given.get("stderr_to_stdout", False)
        static = utils.JobPaths.get_first_id_independent_folder(self.folder)
        # The batch script's own output must lie where a directory exists before the job has its id.
        batch = Path(str(paths.stdout).replace("%t", "0")) if static == self.folder else static / ".%j_batch.out"
        if token:
            whole["comment"] = " ".join(w for w in (whole.get("comment"), token) if w)
        whole.setdefault("name", "submitit")
        environment = [("SUBMITIT_EXECUTOR", self.name()), (LEADER, "%j"),
                       (MAX_REQUEUES, str(given.get("max_requeues") or 0))]
        environment += [(f"HOLMES_TASKS_PER_NODE_{i}", str(c.tasks_per_node)) for i, c in enumerate(parts)]
        error = Path(str(paths.stderr).replace("%t", "0")) if static == self.folder and apart else None
        return JobRequest(
            components=parts, output=str(batch), error=None if error is None else str(error),
            rank_output=str(paths.stdout), rank_error=str(paths.stderr) if apart else None,
            directories=(str(self.folder),), exit_record=str(self.folder / "%j_exit"),
            max_requeues=int(given.get("max_requeues") or 0), environment=tuple(environment),
            **{"timeout_min": 5, "requeue": None, **whole})

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m submitit.core._submit {words([str(self.folder)])}"

    def _num_tasks(self) -> int:
        return self.request().ranks

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return script_text(self._request(self.parameters, token=f"holmes-{uid}"), command)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: str | bytes) -> str:
        text = string if isinstance(string, str) else string.decode()
        return text.strip().split(";")[0].split()[-1]

    def _submit_command(self, command: str) -> core.Job[Any]:
        """As submitit's, with preflight, without submitting twice when an answer gets lost, and with a ticket."""
        request = self.request()
        if self.parameters.get("preflight", True) and len(request.components) > 1:
            preflight_aloud(request.components, timeout_min=request.timeout_min)
        interrupt_here()
        uid = uuid.uuid4().hex
        static = utils.JobPaths.get_first_id_independent_folder(self.folder)
        static.mkdir(parents=True, exist_ok=True)
        path = static / f".submission_file_{uid}.sh"
        path.write_text(self._make_submission_file_text(command, uid), encoding="utf-8")
        submitted = time.time()
        try:
            job_id = submit_file(path, f"holmes-{uid}")
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        with cancelled_on_error(job_id):
            job = self.job_class(folder=self.folder, job_id=job_id, tasks=list(range(request.ranks)))
            job.paths.move_temporary_file(path, "submission_file")
            job.write_ticket(request.name, submitted, components=len(request.components))
        return job

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """Submit all; of several, job i waits for job i - array_parallelism: heterogeneous jobs are no arrays."""
        most = int(self.parameters.get("array_parallelism") or 256)
        if most < 1:
            raise SubmissionError(f"array_parallelism is {most}", where="executor slurmhet", hint="use 1 or more")
        own = self.parameters.get("dependency")
        jobs: list[core.Job[Any]] = []
        try:
            for index, delayed in enumerate(delayed_submissions):
                if index >= most:
                    chain = f"afterany:{jobs[index - most].job_id}"
                    self.parameters["dependency"] = f"{own},{chain}" if own else chain
                with uninterrupted():
                    jobs += super()._internal_process_submissions([delayed])
        except BaseException:
            for job in reversed(jobs):  # a batch is submitted as a whole or not at all
                slurm("scancel", job.job_id)
            raise
        finally:
            self.parameters["dependency"] = own
        return jobs


def _dropped_by_auto_executor(function: str) -> dict[str, Any]:
    """The ``slurm_*`` parameters that submitit's AutoExecutor holds while it calls us, and would drop.

    AutoExecutor hands on only what bears the executor's own name and has no hook for the rest, so this reads its
    ``kwargs``; outside AutoExecutor nothing is found. pyproject.toml bounds submitit's version for this, and
    tests/submission/executor/test_slurmhet.py fails where AutoExecutor is another.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != function or frame.f_globals.get("__name__") != "submitit.auto.auto":
        return {}
    kwargs = frame.f_locals.get("kwargs", {})
    return {k[len("slurm_"):]: v for k, v in kwargs.items() if k.startswith("slurm_") and v is not None}


__all__ = ["ALIASES", "ComponentRequest", "SlurmHetExecutor"]
