"""The states of submitted jobs, from sacct, squeue, scontrol or, if they fail, the batch script's exit record.

A reinstalled Slurm reuses job ids. The path of the batch script has a unique token, which shows whether a row of
Slurm's output belongs to a job. If the token is unknown, the job's name and its time of submission are compared.
"""

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit.core import core

from holmes_hpc.errors import SubmissionError
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.records.ownership import is_own
from holmes_hpc.records.untrusted import read_file
from holmes_hpc.slurm import job_queries
from holmes_hpc.slurm.commands import Answer, slurm
from holmes_hpc.slurm.job_states import CONTROLLER, REQUEUED, UNKNOWN, JobState, Row, SlurmState, join

_SLACK_S = 120  # clocks of client and controller may differ by this much
_PARTIAL_GRACE_S = 20  # from the end of a job until the database has the rows of all its components
_YOUNG_S = 15  # from a submission until the database has the job
_REQUEUED_GRACE_S = 15  # from a requeue until the queue shows the job again
_LOST_S = 60  # from a submission until the controller certainly knows the job


@dataclass(frozen=True)
class JobIdentity:
    """The properties that distinguish a job from others with its id. `submitted`: time in Unix seconds; `record`: path
    of its batch script's exit record; `token`: unique to its submission, and part of its batch script's path."""

    name: str | None = None
    submitted: float | None = None
    record: Path | None = None
    components: int = 1
    token: str | None = None

    def differs_from(self, other: "JobIdentity") -> bool:
        """Return whether the two are certainly different jobs."""
        if self.token and other.token:
            return self.token != other.token
        if None not in (self.name, other.name) and self.name != other.name:
            return True
        if self.submitted is None or other.submitted is None:
            return False
        return abs(self.submitted - other.submitted) > _SLACK_S

    def matches(self, row: Row) -> bool:
        """Return whether `row`, which has the same job id, may belong to this job."""
        if self.token and row.token:  # names can change while a job runs, and the database truncates them
            return self.token == row.token
        if self.name is not None and row.name and _database_name(row.name) != _database_name(self.name):
            return False
        # A requeued job's row may have a later time. Another job's row is much older or has another name.
        return self.submitted is None or row.submitted is None or row.submitted >= self.submitted - _SLACK_S


def _database_name(name: str) -> str:
    """Return a job's name as the accounting database stores it, with a backquote in place of every quote."""
    return re.sub(r"[\"'`\\]", "`", name).strip()


def read_exit_record(path: Path, since: float | None = None) -> JobState | None:
    """Return the state that a batch script's exit record (``STATUS EPOCH SIGNAL``) shows; None if the record is
    missing, unreadable or older than `since` (Unix seconds)."""
    try:
        fields = read_file(path).decode("utf-8", errors="replace").split()
        status, ended = int(fields[0]), float(fields[1])
    except (OSError, ValueError, IndexError):
        return None
    if since is not None and ended < since - _SLACK_S:
        return None
    state: SlurmState = "COMPLETED" if status == 0 else "CANCELLED" if fields[2:3] == ["TERM"] else "FAILED"
    return JobState(state, "", "", status, (state,), "exit record")


class StateWatcher(core.InfoWatcher):
    """A submitit watcher that queries the states of all jobs of this process together.

    While no command answers, pauses between queries grow up to `delay_s`, except with mode ``force``."""

    def __init__(self, delay_s: int = 20) -> None:
        super().__init__(delay_s)
        self._last_status_check: float = 0.0
        self._identities: dict[str, JobIdentity] = {}
        self._states: dict[str, JobState] = {}
        self._ended_at: dict[str, float] = {}
        self._registered_at: dict[str, float] = {}
        self._requeued_at: dict[str, float] = {}
        self._partial_since: dict[str, float] = {}
        self._down_until: dict[str, float] = {}
        self._failures = 0
        self._controller: str | None = None  # the first of the commands CONTROLLER that answered the last query

    def set_identity(self, job_id: str, identity: JobIdentity) -> bool:
        """Set the identity of the job with this id. If the id was another job's, forget that job and return True."""
        previous = self._identities.get(job_id)
        is_other_job = previous is not None and previous.differs_from(identity)
        if is_other_job:
            for cache in (*self._caches, self._info_dict):
                cache.pop(job_id, None)
            self._finished.discard(job_id)
            self._registered_at[job_id] = time.time()
        self._identities[job_id] = identity
        return is_other_job

    @property
    def _caches(self) -> tuple[dict[str, Any], ...]:
        """The dictionaries with facts about jobs, by job id."""
        return self._states, self._ended_at, self._requeued_at, self._partial_since

    def register_job(self, job_id: str) -> None:
        if job_id not in self._registered:  # else submitit would query again at once
            super().register_job(job_id)
            self._registered_at.setdefault(job_id, time.time())

    def state_of(self, job_id: str, mode: str = "standard") -> JobState:
        """Return the job's state. `mode`: as in submitit (``force``, ``standard``, ``cache``)."""
        self.get_info(job_id, mode=mode)
        return self._states.get(job_id, JobState())

    def ended_at(self, job_id: str) -> float | None:
        """Return when this process first saw the job's end, by :func:`time.monotonic`."""
        return self._ended_at.get(job_id)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.state_of(job_id, mode).state

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self._is_final(job_id, self.state_of(job_id, mode))

    def _is_final(self, job_id: str, state: JobState) -> bool:
        """Return whether `state` is the job's last one, which neither a requeue nor a late row can change."""
        if state.unsettled:
            return False
        num_components = self._identity(job_id).components
        if state.ended and state.source not in ("exit record", "") and len(state.components) < num_components:
            # Right after a job's end the database may have only its leader's row.
            return time.monotonic() - self._partial_since.setdefault(job_id, time.monotonic()) >= _PARTIAL_GRACE_S
        if state.state in REQUEUED:
            return time.monotonic() - self._requeued_at.setdefault(job_id, time.monotonic()) >= _REQUEUED_GRACE_S
        self._requeued_at.pop(job_id, None)
        return state.ended

    def clear(self) -> None:
        super().clear()
        for cache in (*self._caches, self._down_until):
            cache.clear()

    def update_if_long_enough(self, mode: str) -> None:
        if self._last_status_check > time.time():  # the clock was set back: submitit would not query until then
            self._last_status_check = 0.0
        pause = min(self._delay_s, 2 ** min(self._failures, 6)) if self._failures else 0
        if mode == "standard" and time.time() - self._last_status_check < pause:
            return  # no source answers: query less often
        super().update_if_long_enough(mode)

    def update(self) -> None:
        """Query Slurm once for all jobs that have not ended."""
        if job_ids := self._registered - self._finished:
            states = self._query_states(job_ids)
            for job_id in job_ids:
                self._store_state(job_id, states.get(job_id))
        self._last_status_check = time.time()

    def _store_state(self, job_id: str, state: JobState | None) -> None:
        """Store the state of a job for this class and for submitit. `state`: None if no command lists the job."""
        state = state or self._state_without_row(job_id)
        if state is None:  # keep the previous state
            return
        if not self._is_final(job_id, state) and state.ended:
            state = replace(state, unsettled=True)
        self._states[job_id] = state
        info = {"State": state.state, "Reason": state.reason, "NodeList": state.nodes, "Source": state.source}
        self._info_dict[job_id] = {**info, "JobID": job_id}
        if self._is_final(job_id, state):
            self._finished.add(job_id)
            self._ended_at.setdefault(job_id, time.monotonic())

    def _state_without_row(self, job_id: str) -> JobState | None:
        """Return the state of a job that no command lists; None to keep the previous state.

        The exit record gives the state. If the controller does not answer, the state is unsettled, because the job may
        have been requeued. Without a record, the job has failed if the controller answers and should know it."""
        identity = self._identity(job_id)
        state = read_exit_record(identity.record, identity.submitted) if identity.record else None
        if state is not None:
            return replace(state, unsettled=self._controller is None)
        if self._controller is None:
            return None
        # squeue --me lists only this user's jobs
        if self._age(job_id) >= _LOST_S and identity.record and is_own(identity.record.parent):
            return JobState("FAILED", "lost: Slurm no longer knows the job")
        return None if job_id in self._states else JobState(source=self._controller)

    def _query_states(self, job_ids: set[str]) -> dict[str, JobState]:
        """Return the states of the jobs that Slurm's commands list. Run each further command only for jobs that the
        earlier ones do not list, or whose state in the database is doubtful. squeue comes first if jobs wait (it has
        the reason) or are too new for the database. For such new jobs, one command that answers is enough."""
        sources = [
            ("sacct", job_queries.sacct_command, job_queries.parse_sacct),
            ("squeue", lambda _: job_queries.SQUEUE, job_queries.parse_squeue),
            ("scontrol", lambda _: job_queries.SCONTROL, job_queries.parse_scontrol),
        ]
        if any(self._is_young(j) or self._states.get(j, JobState()).waits for j in job_ids):
            sources.insert(0, sources.pop(1))
        states: dict[str, JobState] = {}
        doubtful: dict[str, JobState] = {}
        answered: list[str] = []
        for name, command, parse in sources:
            unknown_ids = {j for j in job_ids - states.keys() if not answered or j in doubtful or not self._is_young(j)}
            is_redundant = name == "scontrol" and "squeue" in answered  # both query the controller
            if not unknown_ids or is_redundant or self._down_until.get(name, 0) > time.monotonic():
                continue
            self._num_calls += 1
            answer = self._query(command(unknown_ids))
            if not answer.ok:
                self._down_until[name] = time.monotonic() + (60 if name == "sacct" else 5)
                continue
            answered.append(name)
            pending = job_ids - states.keys()
            own_rows = [r for r in parse(answer.out) if r.leader in pending and self._identity(r.leader).matches(r)]
            for job_id, rows in grouped((row.leader, row) for row in own_rows):
                state, previous = join(rows, name), self._states.get(job_id)
                if name != "sacct":
                    states[job_id] = state
                elif state.state == "PENDING" and previous and previous.state in ("RUNNING", "COMPLETING"):
                    doubtful[job_id] = previous  # requeued, or the database does not have the start yet
                elif state.state in REQUEUED or (state.waits and not state.reason):
                    doubtful[job_id] = state  # the queue may have it again, or the reason why it waits
                else:
                    states[job_id] = state
        self._controller = next((name for name in answered if name in CONTROLLER), None)
        for job_id, state in doubtful.items():
            states.setdefault(job_id, replace(state, unsettled=state.ended and self._controller is None))
        self._failures = 0 if answered else self._failures + 1
        return states

    def _is_young(self, job_id: str) -> bool:
        """Return whether the job may be too new for the database."""
        return self._states.get(job_id, JobState()).state == UNKNOWN and self._age(job_id) < _YOUNG_S

    def _age(self, job_id: str) -> float:
        """Return the seconds since the job was submitted; if that is unknown, since this process registered it."""
        return time.time() - (self._identity(job_id).submitted or self._registered_at.get(job_id, 0))

    def _identity(self, job_id: str) -> JobIdentity:
        return self._identities.get(job_id, JobIdentity())

    @staticmethod
    def _query(command: list[str]) -> Answer:
        try:
            return slurm(*command, timeout_s=15, seconds_as_epoch=True)
        except SubmissionError as e:  # the command is not installed: query the next source
            return Answer(127, "", str(e))


WATCHER = StateWatcher()  # one for all jobs of this process
