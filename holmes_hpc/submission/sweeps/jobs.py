"""The jobs of a sweep: their states, recorded outcomes and results, and their cancellation."""

import contextlib
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.job_environment import JobPaths

from holmes_hpc.errors import RunFailed, SubmissionError
from holmes_hpc.records.files import to_json, write_whole
from holmes_hpc.records.ownership import open_own_file, other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import read_object
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle.status import Job, LocalJob, SlurmJob, job_of, refuse_other_owner
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob


def job_states(manifest: Manifest, jobs: Sequence[SweepJob], mode: str = "force") -> dict[SweepJob, JobState]:
    """Return the state of each of `jobs`. It is COMPLETED if records say so; otherwise query Slurm or this machine.
    `mode`: mode of the queries, as in submitit's watchers (``force``, ``standard``, ``cache``)."""
    incomplete = {job: job_handle(manifest, job) for job in jobs if not is_completed(manifest, job)}
    states: dict[SweepJob, JobState] = {}
    for job in jobs:
        if job not in incomplete:
            states[job] = JobState("COMPLETED", source="record")
            continue
        states[job] = incomplete[job].state(mode)
        mode = "cache" if job.where == "slurm" else mode  # the first query covered all Slurm jobs
    return states


def job_handle(manifest: Manifest, job: SweepJob) -> Job:
    """Return an object that queries and cancels the job. The object for a local job works only on the job's machine."""
    if job.where == "slurm":
        return SlurmJob(manifest.resolve(job.folder), job.job_id)
    run = RunDirectory(manifest.resolve(job.directory))
    if job.kind == "plan" and run.exists():
        with contextlib.suppress(SubmissionError):
            return job_of(run)
    return LocalJob(run, int(job.job_id), job.host or os.uname().nodename, job.submitted, manifest.resolve(job.folder))


def outcome_path(folder: Path, job_id: str) -> Path:
    """Return the path at which rank 0 of a plain job records its outcome."""
    return folder / f"{job_id}_outcome.json"


def write_outcome(job_return: Any) -> None:
    """Record the outcome of a plain job: `state` (completed or failed), `error`, and `value` if JSON can represent it.
    Only the task of rank 0 records it. `job_return`: Hydra's JobReturn."""
    environment = submitit.JobEnvironment()
    if environment.global_rank:
        return
    value = getattr(job_return, "_return_value", None)
    has_completed = getattr(getattr(job_return, "status", None), "name", "COMPLETED") == "COMPLETED"
    error = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value)
    outcome: dict[str, Any] = {"state": "completed"} if has_completed else {"state": "failed", "error": error}
    if has_completed:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # neither JSON data nor a numpy or torch scalar
            outcome["value"] = json.loads(to_json(getattr(value, "item", lambda: value)()))
    with contextlib.suppress(RunFailed):  # on a full disk the pickle may still fit
        write_whole(outcome_path(environment.paths.folder, environment.job_id), to_json(outcome) + "\n")


def read_outcome(manifest: Manifest, job: SweepJob) -> dict[str, Any]:
    """Return the outcome that :func:`write_outcome` recorded; empty if the job still runs or was killed."""
    return read_object(outcome_path(manifest.resolve(job.folder), job.job_id)) or {}


def is_completed(manifest: Manifest, job: SweepJob) -> bool:
    """Return whether a record on disk shows that the job completed, so that Slurm need not be queried."""
    if job.kind == "plan":
        result = RunDirectory(manifest.resolve(job.directory)).read_result()
        return result is not None and result["state"] == "completed"
    return read_outcome(manifest, job).get("state") == "completed" and result_pickle(manifest, job).exists()


def untrusted_reason(manifest: Manifest, job: SweepJob) -> str | None:
    """Return why the result of a plain job is not read; None if it can be read.
    If other users may write the file, unpickling it could run their code."""
    writers = other_writers(result_pickle(manifest, job)) if job.kind == "plain" else None
    return None if writers is None else f"its result is not read: {writers}"


def result_pickle(manifest: Manifest, job: SweepJob) -> Path:
    return JobPaths(manifest.resolve(job.folder), job_id=job.job_id, task_id=0).result_pickle


class _LenientUnpickler(pickle.Unpickler):
    """An unpickler that replaces each class that cannot be imported here by a stand-in with its name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (_MissingClass,), {"__module__": module})


class _MissingClass:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __repr__(self) -> str:
        return f"a {type(self).__module__}.{type(self).__name__}"


def plain_outcome(manifest: Manifest, job: SweepJob) -> tuple[str | None, Any]:
    """Return (state, the function's value or the error message) of a plain job; (None, None) without a result.
    The state is "completed", "failed", or "unread" if other users may write the result."""
    outcome = read_outcome(manifest, job)
    if "value" in outcome or "error" in outcome:
        return outcome["state"], outcome.get("value", outcome.get("error"))
    path = result_pickle(manifest, job)
    if not path.exists():
        return None, None
    if (reason := untrusted_reason(manifest, job)) is not None:
        return "unread", reason
    try:
        with open_own_file(path) as file:
            kind, value = _LenientUnpickler(file).load()
    except Exception as e:
        return "failed", f"its result cannot be read: {type(e).__name__}: {e}"
    if kind != "success":
        return "failed", str(value).strip().splitlines()[-1] if str(value).strip() else "failed"
    status = getattr(getattr(value, "status", None), "name", "COMPLETED")
    if status != "COMPLETED":
        return "failed", str(getattr(value, "_return_value", "failed"))
    return "completed", getattr(value, "_return_value", value)


def cancel_sweep(manifest: Manifest, jobs: Sequence[SweepJob]) -> None:
    """Cancel the jobs that have not completed, the last one first, because a job's end may start a later one."""
    for job in reversed(jobs):
        if is_completed(manifest, job):
            continue
        handle = job_handle(manifest, job)
        refuse_other_owner(manifest.path, handle)
        if job.where == "slurm":
            SlurmHetJob(manifest.resolve(job.folder), job.job_id).cancel(check=False)
        else:
            handle.cancel()
