"""What became of submitted jobs: from sacct, else squeue, else scontrol, else the record that the batch script left.

Rows of another job that got the same id are told apart by the name of the batch script, which no other job has; where
that is not known, by the job's name and its time of submission.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit.core import core

from holmes_hpc.errors import SubmissionError
from holmes_hpc.records.ownership import is_own
from holmes_hpc.slurm.commands import Answer, slurm
from holmes_hpc.slurm.job_queries import (
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    sacct_command,
    scontrol_command,
    squeue_command,
)
from holmes_hpc.slurm.job_states import CONTROLLER, REQUEUED, UNKNOWN, JobState, Row, SlurmState, join

_SLACK_S = 120  # clocks of client and controller may differ by this much
_PARTIAL_GRACE_S = 20
_YOUNG_S = 15
_REQUEUED_GRACE_S = 15  # until the queue has it again
_LOST_S = 60  # so long after its submission the controller knows every job that has not ended


@dataclass(frozen=True)
class Expected:
    """What tells a job from others of the same id. `token`: of its submission, in its batch script's name; `record`:
    the exit record of its batch script."""

    name: str | None = None
    submitted: float | None = None
    record: Path | None = None
    components: int = 1
    token: str | None = None

    def other_than(self, other: Expected) -> bool:
        """Whether the two are certainly not the same job."""
        if self.token and other.token:
            return self.token != other.token
        return (None not in (self.name, other.name) and self.name != other.name) or (
            self.submitted is not None
            and other.submitted is not None
            and abs(self.submitted - other.submitted) > _SLACK_S
        )

    def fits(self, row: Row) -> bool:
        if self.token and row.token:  # a name may be changed while the job runs, and the database keeps not all of it
            return self.token == row.token
        if self.name is not None and row.name and _plain(row.name) != _plain(self.name):
            return False
        # A requeued job's row may carry a later time; another job's is either much earlier or has another name.
        return self.submitted is None or row.submitted is None or row.submitted >= self.submitted - _SLACK_S


def _plain(name: str) -> str:
    """A job's name as far as slurmdbd keeps it: it writes every quote as a backquote."""
    return re.sub(r"[\"'`\\]", "`", name).strip()


def read_record(path: Path, since: float | None = None) -> JobState | None:
    """The state in a batch script's exit record (``STATUS EPOCH SIGNAL``), unless it is older than the job."""
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
        status, when = int(words[0]), float(words[1])
    except (OSError, ValueError, IndexError):
        return None
    if since is not None and when < since - _SLACK_S:
        return None
    state: SlurmState = "COMPLETED" if status == 0 else "CANCELLED" if words[2:3] == ["TERM"] else "FAILED"
    return JobState(state, "", "", status, (state,), "exit record")


class StateWatcher(core.InfoWatcher):
    """submitit's watcher, for (heterogeneous) jobs: all jobs of this process in one query, with backoff.

    `delay_s`: the longest pause between two queries that nobody forced.
    """

    def __init__(self, delay_s: int = 20) -> None:
        super().__init__(delay_s)
        self._last_status_check: float = 0.0
        self._expected: dict[str, Expected] = {}
        self._states: dict[str, JobState] = {}
        self._ended_at: dict[str, float] = {}
        self._registered_at: dict[str, float] = {}
        self._requeued_at: dict[str, float] = {}
        self._partial_since: dict[str, float] = {}
        self._down_until: dict[str, float] = {}
        self._failures = 0
        self._controller: str | None = None  # the source through which it answered the last query

    def expect(self, job_id: str, expected: Expected) -> bool:
        """Say what tells this job from another one of the same id. What was learnt of such another one is dropped; True
        then."""
        before = self._expected.get(job_id)
        another = before is not None and before.other_than(expected)
        if another:
            for known in (*self._known, self._info_dict):
                known.pop(job_id, None)
            self._finished.discard(job_id)
            self._registered_at[job_id] = time.time()
        self._expected[job_id] = expected
        return another

    @property
    def _known(self) -> tuple[dict[str, Any], ...]:
        """What was learnt of jobs."""
        return self._states, self._ended_at, self._requeued_at, self._partial_since

    def register_job(self, job_id: str) -> None:
        if job_id not in self._registered:  # else submitit would ask anew at once
            super().register_job(job_id)
            self._registered_at.setdefault(job_id, time.time())

    def state_of(self, job_id: str, mode: str = "standard") -> JobState:
        """The job's state; mode as submitit's (``force``, ``standard``, ``cache``)."""
        self.get_info(job_id, mode=mode)
        return self._states.get(job_id, JobState())

    def ended_at(self, job_id: str) -> float | None:
        """When this process first saw the job's end (by :func:`time.monotonic`: clocks are set back)."""
        return self._ended_at.get(job_id)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.state_of(job_id, mode).state

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self._is_final(job_id, self.state_of(job_id, mode))

    def _is_final(self, job_id: str, found: JobState) -> bool:
        if found.unsettled:
            return False
        expected = self._expected.get(job_id, Expected()).components
        if found.ended and found.source not in ("exit record", "nobody") and len(found.components) < expected:
            # right after a job's end the database may know its leader's row only
            return time.monotonic() - self._partial_since.setdefault(job_id, time.monotonic()) >= _PARTIAL_GRACE_S
        if found.state in REQUEUED:
            return time.monotonic() - self._requeued_at.setdefault(job_id, time.monotonic()) >= _REQUEUED_GRACE_S
        self._requeued_at.pop(job_id, None)
        return found.ended

    def clear(self) -> None:
        super().clear()
        for known in (*self._known, self._down_until):
            known.clear()

    def update_if_long_enough(self, mode: str) -> None:
        if self._last_status_check > time.time():  # the clock was set back: submitit would ask nobody until then
            self._last_status_check = 0.0
        pause = min(self._delay_s, 2 ** min(self._failures, 6)) if self._failures else 0
        if mode == "standard" and time.time() - self._last_status_check < pause:
            return  # nobody answers: ask more seldom, up to the longest pause
        super().update_if_long_enough(mode)

    def update(self) -> None:
        """Ask Slurm once for all jobs whose end is not known."""
        if wanted := self._registered - self._finished:
            found = self._ask(wanted)
            for job_id in wanted:
                self._note(job_id, found.get(job_id))
        self._last_status_check = time.time()

    def _note(self, job_id: str, state: JobState | None) -> None:
        state = state or self._without_a_row(job_id)
        if state is None:  # keep what was known
            return
        if not self._is_final(job_id, state) and state.ended:
            state = replace(state, unsettled=True)
        self._states[job_id] = state
        self._info_dict[job_id] = {
            "State": state.state,
            "Reason": state.reason,
            "NodeList": state.nodes,
            "JobID": job_id,
            "Source": state.source,
        }
        if self._is_final(job_id, state):
            self._finished.add(job_id)
            self._ended_at.setdefault(job_id, time.monotonic())

    def _without_a_row(self, job_id: str) -> JobState | None:
        """The state of a job that no source has: what its batch script left (it may have been requeued since, unless
        the controller says that it was not); lost, when the controller answers and should know it."""
        expected = self._expected.get(job_id, Expected())
        record = read_record(expected.record, expected.submitted) if expected.record else None
        if record is not None:
            return replace(record, unsettled=self._controller is None)
        if self._controller is None:
            return None
        # squeue --me shows only whose the job is
        if self._age(job_id) >= _LOST_S and expected.record and is_own(expected.record.parent):
            return JobState("FAILED", "lost: it no longer knows the job", source="nobody")
        return None if job_id in self._states else JobState(source=self._controller)

    def _ask(self, wanted: set[str]) -> dict[str, JobState]:
        """States of the jobs that somebody knows. The next source is asked only for what the one before lacks. Where
        jobs wait, or are so young that the database may not know them, squeue is asked first: it alone knows why."""
        sources = [
            ("sacct", sacct_command, parse_sacct),
            ("squeue", squeue_command, parse_squeue),
            ("scontrol", scontrol_command, parse_scontrol),
        ]
        if any(self._is_young(j) or self._states.get(j, JobState()).waits for j in wanted):
            sources.insert(0, sources.pop(1))
        found: dict[str, JobState] = {}
        doubtful: dict[str, JobState] = {}
        answered: list[str] = []
        for name, command, parse in sources:
            missing = {j for j in wanted - found.keys() if not answered or j in doubtful or not self._is_young(j)}
            is_answered = name == "scontrol" and "squeue" in answered  # they ask the same daemon
            if not missing or is_answered or self._down_until.get(name, 0) > time.monotonic():
                continue
            self._num_calls += 1
            answer = self._query(command(missing))
            if not answer.ok:
                self._down_until[name] = time.monotonic() + (60 if name == "sacct" else 5)
                continue
            answered.append(name)
            rows: dict[str, list[Row]] = {}
            for row in parse(answer.out):
                if row.leader in wanted - found.keys() and self._expected.get(row.leader, Expected()).fits(row):
                    rows.setdefault(row.leader, []).append(row)
            for job_id, own in rows.items():
                state, known = join(own, name), self._states.get(job_id)
                if name == "sacct" and state.state == "PENDING" and known and known.state in ("RUNNING", "COMPLETING"):
                    doubtful[job_id] = known  # requeued, or the database has not heard of the start yet: ask on
                elif name == "sacct" and (state.state in REQUEUED or (state.waits and not state.reason)):
                    doubtful[job_id] = state  # the queue may have it again, or knows why it waits
                else:
                    found[job_id] = state
        self._controller = next((name for name in answered if name in CONTROLLER), None)
        found |= {
            job_id: replace(state, unsettled=state.ended and self._controller is None)
            for job_id, state in doubtful.items()
            if job_id not in found
        }
        self._failures = 0 if answered else self._failures + 1
        return found

    def _is_young(self, job_id: str) -> bool:
        """Whether the job is so new that the database may not have heard of it."""
        return self._states.get(job_id, JobState()).state == UNKNOWN and self._age(job_id) < _YOUNG_S

    def _age(self, job_id: str) -> float:
        """Seconds since the job's submission; where that is not known, since this process heard of it."""
        return time.time() - (self._expected.get(job_id, Expected()).submitted or self._registered_at.get(job_id, 0))

    @staticmethod
    def _query(command: list[str]) -> Answer:
        try:
            return slurm(*command, timeout_s=15, seconds_as_epoch=True)
        except SubmissionError as e:  # no such command here: the next source is asked
            return Answer(127, "", str(e))


WATCHER = StateWatcher()  # one for all jobs of this process
