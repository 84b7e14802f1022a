"""The job of a run, on Slurm or on this machine: its state, its cancellation and the record of its end."""

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import psutil

from holmes_hpc.errors import HolmesError, RecordError, SubmissionError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.find import name_of
from holmes_hpc.records.logs import rank_logs
from holmes_hpc.records.ownership import other_owners, other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_queries import job_field
from holmes_hpc.slurm.job_states import NOT_SUBMITTED, UNKNOWN, JobState, SlurmState, joined_members
from holmes_hpc.submission.executor.environment import component_ranks
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle import failed_rank
from holmes_hpc.submission.lifecycle.attempts import end_messages, last_metrics, state_detail
from holmes_hpc.submission.lifecycle.failed_rank import FailedRank, LocalExits
from holmes_hpc.submission.lifecycle.outcome import SLURM_STATES, StateRow, build_result

T = TypeVar("T", int, float)
LOCAL_GRACE_S = 30  # from SIGTERM to SIGKILL for local processes, as KillWait on most Slurms
# Errors that a damaged record, or a file of another program, can cause.
_BAD_RECORD_ERRORS = (RecordError, TypeError, ValueError, AttributeError, KeyError, OverflowError)


class SlurmJob:
    """A run's job on Slurm. `folder`: submitit's folder, ``submission/`` in the run directory; `members`: ids of all
    jobs of the run, if its components are separate jobs. `expected_start`: Slurm's estimate of the start before the
    submission, in Unix seconds; None without an estimate."""

    expected_start: float | None = None

    def __init__(self, folder: Path, job_id: str, members: Sequence[int] = ()) -> None:
        self.id = job_id
        self._jobs = [SlurmHetJob(folder.absolute(), i, (0,)) for i in dict.fromkeys((job_id, *map(str, members)))]
        self._job = self._jobs[0]

    def state(self, mode: str = "standard") -> JobState:
        is_other_job = any([job.register_identity() for job in self._jobs])  # a reinstalled Slurm counts from 1 again
        mode = "force" if is_other_job and mode == "cache" else mode
        modes = [mode, *["cache" if mode == "force" else mode] * (len(self._jobs) - 1)]  # one query covers all jobs
        return joined_members([job.slurm_state(m) for job, m in zip(self._jobs, modes, strict=True)])

    def uid(self) -> int | None:
        """Return the user id of the job's owner; None if Slurm does not know the job."""
        uid = job_field(self.id, "%U")
        return int(uid) if uid and uid.isdecimal() else None

    def cancel(self) -> None:
        folder = self._job.paths.folder
        # A run that the user's own batch script started has no script in its directory.
        script = job_field(self.id, "%o") if any(folder.glob("*.sh")) else None  # its path, as given to sbatch
        if script is not None and os.path.realpath(os.path.dirname(script)) != os.path.realpath(folder):
            problem = f"the batch script of job {self.id} is not in this run's directory: it may be of another run"
            hint = f"if the directory was moved meanwhile, use `scancel {self.id}`"
            raise SubmissionError(problem, where=str(folder.parent), hint=hint)
        for job in self._jobs:
            job.cancel()


class LocalJob:
    """A run's job on a machine without Slurm. Its id is the process id of submitit's controller, the ranks' parent.
    `started`: Unix seconds; `folder`: submitit's folder, by default ``submission/`` in the run directory; `child`:
    submitit's job, if this process started it. Only this object reaps the controller, which else stays a zombie."""

    expected_start: float | None = None

    def __init__(
        self, run: RunDirectory, pid: int, host: str, started: float, folder: Path | None = None, *, child: Any = None
    ) -> None:
        self.id, self._run, self._pid, self._host, self._started = str(pid), run, pid, host, started
        self._child = child
        self._folder = folder or Path(run.path).absolute() / "submission"
        self._cancelled = self._folder / f"{self.id}_cancelled"  # exists if the job was cancelled

    def _is_alive(self) -> bool:
        if self._child is not None:
            return not self._child.done()
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            process = psutil.Process(self._pid)
            # Another process may have the id now. After the clock was set back, the age does not tell them apart.
            has_same_age = abs(process.create_time() - self._started) < 60
            return (has_same_age or str(self._folder) in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
        return False

    def uid(self) -> int | None:
        """Return the user id of the job's owner; None if the controller has ended."""
        return psutil.Process(self._pid).uids().real if self._is_alive() else None

    def state(self, mode: str = "standard") -> JobState:
        if self._host != socket.gethostname():
            return JobState(UNKNOWN, f"runs on {self._host}", source="run record")
        if self._is_alive():
            return JobState("RUNNING", nodes=self._host, source="process")
        state = self._final_state()
        return JobState(state, "", self._host, 0 if state == "COMPLETED" else 1, source="process")

    def _final_state(self) -> SlurmState:
        """Return the Slurm state that corresponds to how the job ended."""
        results, logs = (len([*self._folder.glob(f"{self._pid}_*_{end}")]) for end in ("result.pkl", "log.out"))
        exits = self._run.read_exits() if self._run.exists() else []  # a plain job of a sweep has no run directory
        if results and results == logs and all(e.get("state") == "completed" for e in exits):
            return "COMPLETED"
        preempted = [e for e in exits if e.get("state") == "preempted"]
        has_failed = any(e.get("state") == "failed" for e in exits)
        has_sigterm = any(e.get("signal") == signal.SIGTERM.name for e in preempted)
        is_terminated = has_sigterm or failed_rank.read_local_exits(self._folder, self.id).is_terminated
        if self._cancelled.exists() or (is_terminated and not has_failed):
            return "CANCELLED"
        return "PREEMPTED" if preempted and not is_terminated else "FAILED"

    def cancel(self) -> None:
        if self._host != socket.gethostname():
            raise SubmissionError(f"the job runs on {self._host}", where=str(self._run.path), hint="cancel it there")
        if not self._is_alive():
            return
        if str(self._folder) not in psutil.Process(self._pid).cmdline():
            problem = f"process {self._pid} may be another program: its command line does not name this run"
            hint = f"if the directory was moved meanwhile, end the process with `kill {self._pid}`"
            raise SubmissionError(problem, where=str(self._run.path), hint=hint)
        if other_writers(self._folder) is None:  # otherwise their links could redirect what root writes
            self._cancelled.touch()
        children = psutil.Process(self._pid).children(recursive=True)
        os.kill(self._pid, signal.SIGTERM)  # the controller passes it on to the ranks
        for child in psutil.wait_procs(children, timeout=LOCAL_GRACE_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


Job: TypeAlias = SlurmJob | LocalJob


def job_of(run: RunDirectory) -> Job:
    """Return the job of the latest submission of `run`. Raise SubmissionError if it was never submitted."""
    local, slurm = _latest_submission(run.read_run())
    if local:
        return LocalJob(run, int(local["pid"]), str(local.get("host")), float(local.get("started") or 0))
    if slurm:
        return SlurmJob(run.path / "submission", str(slurm["job_id"]), slurm.get("members") or ())
    raise SubmissionError("the run was never submitted", where=str(run.path), hint="start one with `holmes submit`")


def submission_time(run: RunDirectory) -> float:
    """Return the Unix time of the run's latest submission; 0 if it is unknown."""
    local, slurm = _latest_submission(run.read_run())
    return float(local.get("started") or slurm.get("submitted") or 0)


def is_local(record: Mapping[str, Any]) -> bool:
    """Return whether the run with this record (content of run.yaml) was last started without Slurm."""
    return bool(_latest_submission(record)[0])


def _latest_submission(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (section `local`, section `slurm`) of run.yaml. Only the section of the latest submission is not empty."""
    local, slurm = (
        section if isinstance(section, dict) and section.get(key) else {}
        for section, key in ((record.get("local"), "pid"), (record.get("slurm"), "job_id"))
    )
    errors, what = (TypeError, ValueError, OverflowError), "section `local` or `slurm` is damaged"
    with RecordError.instead_of(*errors, where="run.yaml", hint="restore the file", what=what):
        if local and int(local["pid"]) and float(local.get("started") or 0) >= float(slurm.get("submitted") or 0):
            return local, {}
    return {}, slurm


def _job_id(record: Mapping[str, Any]) -> str | None:
    local, slurm = _latest_submission(record)
    job_id = local.get("pid") or slurm.get("job_id")
    return None if job_id is None else str(job_id)


@dataclass(frozen=True)
class Status(StateRow):
    """A row of `holmes status`. `reason`: Slurm's; `why`: the reason and the estimated start if the job waits, or what
    the job does before its first step; `source`: as in JobState; `step`, `loss`, `step_time_s`: of the last step."""

    name: str
    path: str
    job_id: str | None
    state: str
    reason: str = ""
    nodes: str = ""
    components: tuple[str, ...] = ()
    source: str = ""
    attempt: int = 0
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    step_time_s: float | None = None
    error: str | None = None
    failed_rank: int | None = None
    failed_node: str | None = None
    log_tail: tuple[str, ...] = ()
    why: str = ""


def run_status(run: RunDirectory, mode: str = "force") -> Status:
    """Return the status of a run, from its job and its records. If it ended without result.json, write that file.
    `mode`: as of submitit's watchers (``force``, ``standard``, ``cache``)."""
    return run_statuses([run], mode)[0]


def run_statuses(runs: Sequence[RunDirectory], mode: str = "force") -> list[Status]:
    """Return the status of each run, with one Slurm query for all runs whose end is not recorded."""
    readable: list[tuple[RunDirectory, dict[str, Any], dict[str, Any] | None, Job | None]] = []
    rows: dict[RunDirectory, Status] = {}
    for run in runs:
        with _bad_records_as_rows(run, rows, is_only_run=len(runs) == 1):
            record = run.read_run()
            result = run.read_result(len(record["attempts"]))
            has_ended = result is not None and (is_conclusive(result) or is_local(record))
            has_open_job = _job_id(record) is not None and not has_ended
            readable.append((run, record, result, job_of(run) if has_open_job else None))
    for run, record, result, job in readable:
        state = JobState(NOT_SUBMITTED)
        if job is not None:
            state = job.state(mode)
            mode = "cache" if isinstance(job, SlurmJob) and mode == "force" else mode  # one query covers all jobs
        elif result is not None:
            state = JobState(SLURM_STATES[result["state"]], source="result.json")
        with _bad_records_as_rows(run, rows, is_only_run=len(runs) == 1):
            rows[run] = _status(run, record, job, state, result)
    return [rows[run] for run in runs]


@contextlib.contextmanager
def _bad_records_as_rows(run: RunDirectory, rows: dict[RunDirectory, Status], is_only_run: bool) -> Iterator[None]:
    """Turn an error that the run's record causes in the block into a row "unreadable" in `rows`.
    Raise RecordError instead if `is_only_run`."""
    try:
        yield
    except _BAD_RECORD_ERRORS as e:
        message = f"the run's record is damaged: {type(e).__name__}: {e}"
        error = e if isinstance(e, RecordError) else RecordError(message, where=str(run.path), hint="restore its files")
        if is_only_run:
            raise error from None
        rows[run] = Status(name_of(run), str(run.path), None, "unreadable", source="run record", error=str(error))


def is_conclusive(result: Mapping[str, Any]) -> bool:
    """Return whether the batch script wrote this result and the job will not be requeued."""
    return result["writer"] == "batch" and result["state"] in ("completed", "failed", "cancelled")


def is_outdated(result: Mapping[str, Any] | None, last_step: int | None) -> bool:
    """Return whether a result is missing, or a follower (not the batch script) wrote it before the run's last step.
    A signalled job makes one more step, and may be killed before its batch script writes the result."""
    return result is None or (result["writer"] == "follower" and (result["final"].get("step") or 0) < (last_step or 0))


def _status(
    run: RunDirectory, record: dict[str, Any], job: Job | None, state: JobState, result: dict[str, Any] | None
) -> Status:
    steps = ((record.get("config") or {}).get("train") or {}).get("steps")
    last = last_metrics(run)
    step = _number(last.get("step"), int)
    if state.ended and job is not None and is_outdated(result, step):
        result = record_end(run, state)
    final_result = result if result is not None and (state.ended or state.state == UNKNOWN) else {}
    return Status(
        name=name_of(run),
        path=str(run.path),
        job_id=_job_id(record),
        state=str(final_result.get("state") or state.state.lower()),
        reason=state.reason,
        nodes=state.nodes,
        components=state.components,
        source=state.source,
        attempt=len(record["attempts"]),
        step=step,
        steps=_number(steps, int),
        loss=_number(last.get("loss"), float),
        step_time_s=_number(last.get("step_time_s"), float),
        error=None if final_result.get("error") is None else str(final_result["error"]),
        failed_rank=_number(final_result.get("failed_rank"), int),
        failed_node=None if final_result.get("failed_node") is None else str(final_result["failed_node"]),
        log_tail=tuple(map(str, final_result.get("log_tail") or ())),
        why=state_detail(run, state, step),
    )


def _number(value: Any, kind: type[T]) -> T | None:
    """Return a recorded number converted to `kind`; None for another value, which other programs may have written."""
    return kind(value) if isinstance(value, (int, kind)) and not isinstance(value, bool) else None


def record_end(run: RunDirectory, state: JobState) -> dict[str, Any]:
    """Write result.json for a job whose batch script did not, and return its content. `state`: the job's state.
    If the disk is full, or if other users may write into the run directory, only return the content."""
    code = state.exit_code if state.exit_code is not None else (0 if state.state == "COMPLETED" else None)
    srun_errors, local = list[FailedRank](), LocalExits()
    with contextlib.suppress(HolmesError, OSError):
        ranks_per_node = [part.gpus_per_node for part in Plan.read(run.plan_path).components]
        components = component_ranks(state.component_nodes, ranks_per_node)
        if not run.is_elastic:  # there, srun's tasks are agents
            srun_errors = failed_rank.parse_srun_errors(end_messages(run), components)
        if state.source == "process" and (job_id := _job_id(run.read_run())) is not None:
            local = failed_rank.read_local_exits(run.path / "submission", job_id)
    srun_errors += local.srun_errors(state.nodes)
    result = build_result(run, code, signalled=local.is_terminated, slurm=state, srun_errors=srun_errors)
    with contextlib.suppress(HolmesError):
        if other_writers(run.path) is None:  # otherwise their links could redirect what is written
            run.write_result(result, writer="follower")
    return run.read_result() or {**result, "writer": "follower"}


def cancel_run(run: RunDirectory) -> JobState:
    """Cancel the run's job with all components. Return the job's state before that.

    Cancel nothing if the run's end is recorded (another job may have the id by now), if the job has ended, or if Slurm
    does not know it. Raise SubmissionError if Slurm refuses."""
    result = run.read_result()
    if result is not None and is_conclusive(result):
        return JobState(SLURM_STATES[result["state"]], source="result.json")
    job = job_of(run)
    state_before = job.state("force")
    if not state_before.ended and not state_before.forgotten:
        refuse_other_owner(run.run_path, job)
        job.cancel()
    return state_before


def refuse_other_owner(record: Path, job: Job) -> None:
    """Raise SubmissionError if another user owns `record` (the file that names `job`), a folder above it or a link to
    it, since that user may have chosen any job. Root may cancel a job of the user who owns the record."""
    if (owners := other_owners(record)) and (os.getuid() or owners != {job.uid()}):
        problem = "this run directory belongs to another user, so the job that it names may be anybody's"
        raise SubmissionError(problem, where=str(record.parent), hint="the directory's owner can cancel it")


def log_paths(run: RunDirectory) -> list[Path]:
    """Return the paths of the run's logs: of the rank that failed, of the other ranks in order, of the batch script."""
    failed = (run.read_result() or {}).get("failed_rank")
    ranks = sorted(rank_logs(run), key=lambda log: log[0] != failed)
    return [path for _, path in ranks] + [p for p in (run.logs / "batch.txt",) if p.exists()]


def end_detector(run: RunDirectory, slurm_every_s: float = 10.0) -> Callable[[], bool]:
    """Return a function that tells whether the run has ended for good; it asks Slurm at most every `slurm_every_s`."""
    queried_at = -math.inf

    def has_ended() -> bool:
        nonlocal queried_at
        result = run.read_result()
        if result is not None and is_conclusive(result):
            return True
        if time.monotonic() - queried_at < slurm_every_s:
            return False
        queried_at = time.monotonic()
        return run_status(run, "standard").ended

    return has_ended
