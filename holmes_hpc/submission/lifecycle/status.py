"""A run's job, whoever started it and wherever it runs: its state, its cancellation, what to tell about it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import psutil

from holmes_hpc.errors import HolmesError, RecordError, SubmissionError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.find import name_of
from holmes_hpc.records.logs import tail
from holmes_hpc.records.ownership import other_writers
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import NOT_SUBMITTED, UNKNOWN, JobState, SlurmState
from holmes_hpc.submission.executor.job import SlurmHetJob
from holmes_hpc.submission.lifecycle.attempts import of_newest_start, why
from holmes_hpc.submission.lifecycle.failed_rank import Complaint, LocalEnds, complaints, noted_ends, ranks_of_plan
from holmes_hpc.submission.lifecycle.outcome import StateRow, job_state, judge

T = TypeVar("T", int, float)
LOCAL_GRACE_S = 5  # between telling local processes to end and killing them
# what a record that no version of ours wrote may lead to
_ODD = (RecordError, TypeError, ValueError, AttributeError, KeyError, OverflowError)


class OnSlurm:
    """A run's job in Slurm. `folder`: submitit's, ``submission/`` of the run directory."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self.id = job_id
        self._job = SlurmHetJob(folder.absolute(), job_id, (0,))

    def state(self, mode: str = "standard") -> JobState:
        is_other_job = self._job.register_identity()  # a reinstalled Slurm counts its job ids from 1 again
        return self._job.slurm_state("force" if is_other_job and mode == "cache" else mode)

    def cancel(self) -> None:
        self._job.cancel()


class OnThisMachine:
    """A run's local processes; their controller's process id is the job id. `folder`: submitit's, ``submission/`` of
    the run directory unless said."""

    def __init__(self, run: RunDirectory, pid: int, host: str, started: float, folder: Path | None = None) -> None:
        self.id, self._run, self._pid, self._host, self._started = str(pid), run, pid, host, started
        self._folder = folder or Path(run.path).absolute() / "submission"
        self._cancelled = self._folder / f"{self.id}_cancelled"  # the mark of a job that was cancelled

    def _alive(self) -> bool:
        try:
            process = psutil.Process(self._pid)
            # else the number is another process's now; the age says nothing where the clock was set back
            is_of_that_time = abs(process.create_time() - self._started) < 60
            return (
                is_of_that_time or str(self._folder) in process.cmdline()
            ) and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ValueError, OverflowError):
            return False

    def state(self, mode: str = "standard") -> JobState:
        if self._host != socket.gethostname():
            return JobState(UNKNOWN, f"runs on {self._host}", source="run record")
        if self._alive():
            return JobState("RUNNING", nodes=self._host, source="process")
        word = self._end()
        return JobState(word, "", self._host, 0 if word == "COMPLETED" else 1, source="process")

    def _end(self) -> SlurmState:
        """Slurm's word for how it ended."""
        folder = self._folder
        done = list(folder.glob(f"{self._pid}_*_result.pkl"))
        exits = self._run.read_exits() if self._run.exists() else []  # a plain job of a sweep has no run directory
        if (
            done
            and len(done) == len(list(folder.glob(f"{self._pid}_*_log.out")))
            and all(e.get("state") == "completed" for e in exits)
        ):
            return "COMPLETED"
        stopped = [e for e in exits if e.get("state") == "preempted"]
        failed = any(e.get("state") == "failed" for e in exits)
        told = noted_ends(folder, self.id).told or any(e.get("signal") == signal.SIGTERM.name for e in stopped)
        if self._cancelled.exists() or (told and not failed):
            return "CANCELLED"
        return "PREEMPTED" if stopped and not told else "FAILED"

    def cancel(self) -> None:
        if self._host != socket.gethostname():
            raise SubmissionError(f"it runs on {self._host}", where=str(self._run.path), hint="cancel it there")
        if not self._alive():
            return
        self._cancelled.touch()
        children = psutil.Process(self._pid).children(recursive=True)
        os.kill(self._pid, signal.SIGTERM)  # its controller tells the ranks
        for child in psutil.wait_procs(children, timeout=LOCAL_GRACE_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


Job: TypeAlias = OnSlurm | OnThisMachine  # what following needs: `id`, `state`, `cancel`


def job_of(run: RunDirectory) -> Job:
    """The job that `run` was last submitted as."""
    local, slurm = _submitted(run.read_run())
    if local:
        return OnThisMachine(run, int(local["pid"]), str(local.get("host")), float(local.get("started") or 0))
    if slurm:
        return OnSlurm(run.path / "submission", str(slurm["job_id"]))
    raise SubmissionError("it was never submitted", where=str(run.path), hint="`holmes submit`, or `holmes run`")


def is_local(record: Mapping[str, Any]) -> bool:
    """Whether the run's latest submission was to this machine, without Slurm."""
    return bool(_submitted(record)[0])


def _submitted(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(its local processes, its job in Slurm): what `record` says of the latest submission; at least one is empty."""
    local, slurm = (
        held if isinstance(held, dict) and held.get(key) else {}
        for held, key in ((record.get("local"), "pid"), (record.get("slurm"), "job_id"))
    )
    here = local and float(local.get("started") or 0) >= float(slurm.get("submitted") or 0)
    return (local, {}) if here else ({}, slurm)


def _job_id(record: Mapping[str, Any]) -> str | None:
    local, slurm = _submitted(record)
    found = local.get("pid") or slurm.get("job_id")
    return None if found is None else str(found)


@dataclass(frozen=True)
class Status(StateRow):
    """What `holmes status` tells. `state`: the run's (completed, failed, …) when it ended, else Slurm's word in lower
    case (pending, running, …). `why`: why it waits, and about when it will start; or what it does before
    its first step."""

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
    log_tail: tuple[str, ...] = field(default=())
    why: str = ""


def run_status(run: RunDirectory, mode: str = "force") -> Status:
    """The state of a run, from its job and its records. A run that ended without a result gets one."""
    return run_statuses([run], mode)[0]


def run_statuses(runs: Sequence[RunDirectory], mode: str = "force") -> list[Status]:
    """The states of runs, with one Slurm query for all of them, and none for those whose end is recorded."""
    found: list[tuple[RunDirectory, dict[str, Any], dict[str, Any] | None, Job | None]] = []
    made: dict[RunDirectory, Status] = {}
    for run in runs:
        with _odd_records(run, made, len(runs) == 1):
            record, result = run.read_run(), run.read_result()
            known = _job_id(record) is not None and not (result is not None and last_word(result))
            found.append((run, record, result, job_of(run) if known else None))
    for run, record, result, job in found:
        state = JobState(NOT_SUBMITTED)
        if job is not None:
            state = job.state(mode)
            mode = "cache" if isinstance(job, OnSlurm) and mode == "force" else mode  # that query was about all
        elif result is not None:
            state = JobState(job_state(result["state"]), source="result.json")
        with _odd_records(run, made, len(runs) == 1):
            made[run] = _status(run, record, job, state, result)
    return [made[run] for run in runs]


@contextlib.contextmanager
def _odd_records(run: RunDirectory, made: dict[RunDirectory, Status], alone: bool) -> Iterator[None]:
    """Inside a run's records are read: a bad one among several becomes a row of `made`; alone it is an error."""
    try:
        yield
    except _ODD as e:
        error = RecordError(f"{type(e).__name__}: {e}", where=str(run.path), hint="restore its files")
        error = e if isinstance(e, RecordError) else error
        if alone:
            raise error from None
        made[run] = Status(name_of(run), str(run.path), None, "unreadable", source="run record", error=str(error))


def last_word(result: Mapping[str, Any]) -> bool:
    """Whether the batch script said so and nobody will requeue the job: then its end need not be awaited."""
    return result["writer"] == "batch" and result["state"] in ("completed", "failed", "cancelled")


def lags(result: Mapping[str, Any] | None, last_step: int | None) -> bool:
    """Whether nobody recorded the end, or only somebody who had not seen the last step: a job that is told to end makes
    one more step, and may be killed before its batch script has said so."""
    return result is None or (result["writer"] == "follower" and (result["final"].get("step") or 0) < (last_step or 0))


def _status(
    run: RunDirectory, record: dict[str, Any], job: Job | None, state: JobState, result: dict[str, Any] | None
) -> Status:
    steps = ((record.get("config") or {}).get("train") or {}).get("steps")
    last = (run.metrics() or [{}])[-1]
    step = _number(last.get("step"), int)
    if state.ended and job is not None and lags(result, step):
        result = record_end(run, state)
    blamed = result if result is not None and (state.ended or state.state == UNKNOWN) else {}
    return Status(
        name=name_of(run),
        path=str(run.path),
        job_id=_job_id(record),
        state=str(blamed.get("state") or state.state.lower()),
        reason=state.reason,
        nodes=state.nodes,
        components=state.components,
        source=state.source,
        attempt=len(record["attempts"]),
        step=step,
        steps=_number(steps, int),
        loss=_number(last.get("loss"), float),
        step_time_s=_number(last.get("step_time_s"), float),
        error=None if blamed.get("error") is None else str(blamed["error"]),
        failed_rank=_number(blamed.get("failed_rank"), int),
        failed_node=None if blamed.get("failed_node") is None else str(blamed["failed_node"]),
        log_tail=tuple(map(str, blamed.get("log_tail") or ())),
        why=why(run, state, step),
    )


def _number(value: Any, kind: type[T]) -> T | None:
    """Return a number of a record as `kind`; None for what is none, as others may have written it."""
    return kind(value) if isinstance(value, (int, kind)) and not isinstance(value, bool) else None


def record_end(run: RunDirectory, state: JobState) -> dict[str, Any]:
    """Write result.json as the follower, for a job whose batch script could not; what is recorded comes back, or where
    the disk is full, or the run may be somebody else's, what would have been."""
    code = state.exit_code if state.exit_code is not None else (0 if state.state == "COMPLETED" else None)
    said, local = list[Complaint](), LocalEnds()
    with contextlib.suppress(HolmesError, OSError):
        batch = of_newest_start(run)
        text = [] if batch is None else [*batch, *tail(run.logs / "srun.txt", 200)]
        said = complaints("\n".join(text), ranks_of_plan(Plan.read(run.plan_path), state.component_nodes))
        if state.source == "process" and (job_id := _job_id(run.read_run())) is not None:
            local = noted_ends(run.path / "submission", job_id)
    result = judge(run, code, signalled=local.told, slurm=state, srun=said + local.complaints(state.nodes))
    with contextlib.suppress(HolmesError):
        if other_writers(run.path) is None:  # else a link of theirs may lead what is written anywhere
            run.write_result(result, writer="follower")
    return run.read_result() or {**result, "writer": "follower"}


def cancel_run(run: RunDirectory) -> JobState:
    """Cancel the run's job, all components; its state just before comes back. A run whose end is recorded is let be:
    its job id may be another job's by now. So is one that the controller does not know. SubmissionError: Slurm
    refused."""
    result = run.read_result()
    if result is not None and last_word(result):
        return JobState(job_state(result["state"]), source="result.json")
    job = job_of(run)
    before = job.state("force")
    if not before.ended and not before.forgotten:
        job.cancel()
    return before


def log_paths(run: RunDirectory) -> list[Path]:
    """The run's logs: ranks in order, then the batch script's."""
    ranks = sorted(run.logs.glob("rank-*.txt"), key=lambda path: (len(path.name), path.name))
    return ranks + [p for p in (run.logs / "batch.txt",) if p.exists()]


def ended(run: RunDirectory, slurm_every_s: float = 10.0) -> Callable[[], bool]:
    """What tells, as often as it is called, whether a run has ended: by its result, or by what its job's state says,
    asked for every `slurm_every_s`; a run that is to be requeued has not."""
    asked = -math.inf

    def over() -> bool:
        nonlocal asked
        result = run.read_result()
        if result is not None and last_word(result):
            return True
        if time.monotonic() - asked < slurm_every_s:
            return False
        asked = time.monotonic()
        return run_status(run, "standard").ended

    return over
