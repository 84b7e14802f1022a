"""The jobs of a sweep: what each does or how it ended, what came back, and their cancellation."""

from __future__ import annotations

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
from holmes_hpc.records.ownership import other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import read_object
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle.status import Job, OnSlurm, OnThisMachine, job_of
from holmes_hpc.submission.sweeps.manifest import Manifest, SweepJob


def states(manifest: Manifest, jobs: Sequence[SweepJob], mode: str = "force") -> dict[SweepJob, JobState]:
    """Slurm's (or this machine's) word on `jobs` of a sweep."""
    going_on = {job: handle(manifest, job) for job in jobs if not finished(manifest, job)}
    found: dict[SweepJob, JobState] = {}
    for job in jobs:
        if job not in going_on:
            found[job] = JobState("COMPLETED", source="record")
            continue
        found[job] = going_on[job].state(mode)
        mode = "cache" if job.where == "slurm" else mode  # the first answer was about all
    return found


def handle(manifest: Manifest, job: SweepJob) -> Job:
    """A job of a sweep, to ask or to cancel; of a local one only the machine where it runs can tell."""
    if job.where == "slurm":
        return OnSlurm(manifest.place(job.folder), job.job_id)
    run = RunDirectory(manifest.place(job.directory))
    if job.kind == "plan" and run.exists():
        with contextlib.suppress(SubmissionError):
            return job_of(run)
    return OnThisMachine(
        run, int(job.job_id), job.host or os.uname().nodename, job.submitted, manifest.place(job.folder)
    )


def outcome_path(folder: Path, job_id: str) -> Path:
    """Where rank 0 of a plain job notes how it ended."""
    return folder / f"{job_id}_outcome.json"


def note_outcome(returned: Any) -> None:
    """In a plain job's task: `state` (completed, failed) with the `value`, where that is plain data, or the `error`."""
    own = submitit.JobEnvironment()
    if own.global_rank:
        return
    value = getattr(returned, "_return_value", None)
    good = getattr(getattr(returned, "status", None), "name", "COMPLETED") == "COMPLETED"
    error = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value)
    noted: dict[str, Any] = {"state": "completed"} if good else {"state": "failed", "error": error}
    if good:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # no plain data, nor a scalar of numpy or torch
            noted["value"] = json.loads(to_json(getattr(value, "item", lambda: value)()))
    with contextlib.suppress(RunFailed):  # a full disk: the pickle may fit all the same
        write_whole(outcome_path(own.paths.folder, own.job_id), to_json(noted) + "\n")


def noted_outcome(manifest: Manifest, job: SweepJob) -> dict[str, Any]:
    """What a plain job's task noted of its end; nothing as long as it goes on, or where it died."""
    return read_object(outcome_path(manifest.place(job.folder), job.job_id)) or {}


def finished(manifest: Manifest, job: SweepJob) -> bool:
    """Whether a record on disk says that the job completed; no need to ask Slurm then."""
    if job.kind == "plan":
        result = RunDirectory(manifest.place(job.directory)).read_result()
        return result is not None and result["state"] == "completed"
    return noted_outcome(manifest, job).get("state") == "completed" and result_pickle(manifest, job).exists()


def unread(manifest: Manifest, job: SweepJob) -> str | None:
    """Why the result of a plain job, which may not be there yet, is not read: others may write it, and reading a pickle
    runs what is in it."""
    who = other_writers(result_pickle(manifest, job)) if job.kind == "plain" else None
    return None if who is None else f"its result is not read: {who}"


def result_pickle(manifest: Manifest, job: SweepJob) -> Path:
    return JobPaths(manifest.place(job.folder), job_id=job.job_id, task_id=0).result_pickle


class _Lenient(pickle.Unpickler):
    """Reads results whose classes are in a program that cannot be imported here; those are only named."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (_Named,), {"__module__": module})


class _Named:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __repr__(self) -> str:
        return f"a {type(self).__module__}.{type(self).__name__}"


def plain_outcome(manifest: Manifest, job: SweepJob) -> tuple[str | None, Any]:
    """("completed" | "failed" | "unread" | None while there is no result, the value that came back or the error)."""
    noted = noted_outcome(manifest, job)
    if "value" in noted or "error" in noted:
        return noted["state"], noted.get("value", noted.get("error"))
    path = result_pickle(manifest, job)
    if not path.exists():
        return None, None
    if (why := unread(manifest, job)) is not None:
        return "unread", why
    try:
        with path.open("rb") as file:
            outcome, value = _Lenient(file).load()
    except Exception as e:
        return "failed", f"its result cannot be read: {type(e).__name__}: {e}"
    if outcome != "success":
        return "failed", str(value).strip().splitlines()[-1] if str(value).strip() else "failed"
    status = getattr(getattr(value, "status", None), "name", "COMPLETED")
    if status != "COMPLETED":
        return "failed", str(getattr(value, "_return_value", "failed"))
    return "completed", getattr(value, "_return_value", value)


def cancel_sweep(manifest: Manifest, jobs: Sequence[SweepJob]) -> None:
    """Cancel jobs that did not end, later ones first, so that a cancelled one does not let the next begin."""
    for job in reversed(jobs):
        if finished(manifest, job):
            continue
        if job.where == "slurm":
            SlurmHetJob(manifest.place(job.folder), job.job_id).cancel(check=False)
        else:
            handle(manifest, job).cancel()
