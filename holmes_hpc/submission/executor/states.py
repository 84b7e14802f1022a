"""What became of a job: from sacct, else squeue, else scontrol, else the record that its batch script left.

A heterogeneous job is several rows (``12+0``, ``12+1``); they are joined: it runs while one of them does, and any
failed one fails it. Rows of another job that got the same id are told apart by name and time of submission.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from submitit.core import core

from holmes_hpc.errors import SubmissionError
from holmes_hpc.slurm.commands import Answer, slurm

SEPARATOR = "\x1f"
UNKNOWN = "UNKNOWN"
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING", "CONFIGURING",
          "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "PENDING", "READY",
          "NOT_SUBMITTED", UNKNOWN)
BLAME = ("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "PREEMPTED", "FAILED", "CANCELLED",
         "REVOKED", "COMPLETED")
_STALE = ("BeginTime", "Priority", "Resources", "Dependency")  # sacct keeps why a job once waited
_SLACK_S = 120  # clocks of client and controller may differ by this much
_PARTIAL_GRACE_S = 20
_YOUNG_S = 15
_REQUEUED = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # what sacct says of a job that Slurm queues again by itself
_REQUEUED_GRACE_S = 15  # until the queue has it again
_LOST_S = 60  # so long after its submission the controller knows every job that has not ended
CONTROLLER = ("squeue", "scontrol")  # sources that ask slurmctld; as the source of UNKNOWN: it does not know the job


@dataclass(frozen=True)
class Row:
    """One component as one of Slurm's commands shows it. `submitted`: epoch seconds, None when not said."""

    leader: str
    offset: int
    state: str
    name: str = ""
    submitted: float | None = None
    nodes: str = ""
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class JobState:
    """The joined state. `components`: each component's own; `source`: who said so; `unsettled`: it may still change,
    though it sounds final (a preempted job that is requeued, a leader whose components are not in the database yet);
    `component_nodes`: each component's host list."""

    state: str = UNKNOWN
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    components: tuple[str, ...] = ()
    source: str = "nobody"
    restarts: int = 0
    unsettled: bool = False
    component_nodes: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state not in ACTIVE and not self.unsettled

    @property
    def failed(self) -> bool:
        return self.ended and self.state != "COMPLETED"


@dataclass(frozen=True)
class Expected:
    """What tells a job from others of the same id. `record`: the exit record of its batch script."""

    name: str | None = None
    submitted: float | None = None
    record: Path | None = None
    components: int = 1

    def other_than(self, other: Expected) -> bool:
        """Whether the two are certainly not the same job."""
        return (None not in (self.name, other.name) and self.name != other.name) or (
            self.submitted is not None and other.submitted is not None
            and abs(self.submitted - other.submitted) > _SLACK_S)

    def fits(self, row: Row) -> bool:
        if self.name is not None and row.name and _plain(row.name) != _plain(self.name):
            return False
        # A requeued job's row may carry a later time; another job's is either much earlier or has another name.
        return self.submitted is None or row.submitted is None or row.submitted >= self.submitted - _SLACK_S


def _mine(record: Path | None) -> bool:
    """Whether the folder of an exit record is this user's: ``squeue --me`` shows only whose it is."""
    try:
        return record is not None and record.parent.stat().st_uid == os.getuid()
    except OSError:
        return False


def _plain(name: str) -> str:
    """A job's name as far as slurmdbd keeps it: it writes every quote as a backquote."""
    return re.sub(r"[\"'`\\]", "`", name).strip()


def _word(state: str) -> str:
    """``CANCELLED by 0`` and ``RUNNING+`` without their tails."""
    return (state.split() or [UNKNOWN])[0].rstrip("+").upper()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _identity(job_id: str) -> tuple[str, int] | None:
    """``12+1`` -> ("12", 1); steps, arrays' sub-jobs and the like: None."""
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", job_id.strip())
    return (match.group(1), int(match.group(2) or 0)) if match else None


SACCT_FIELDS = ("JobID", "State", "ExitCode", "Submit", "Reason", "NodeList", "JobName")


def sacct_command(ids: Iterable[str]) -> list[str]:
    return ["sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}",
            "--format=" + ",".join(SACCT_FIELDS), "--jobs=" + ",".join(sorted(ids))]


def parse_sacct(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        cells = line.split(SEPARATOR)
        identity = _identity(cells[0])
        if identity is None or len(cells) < len(SACCT_FIELDS):
            continue
        code, _, signal = cells[2].partition(":")
        status = (int(code) or 128 * bool(int(signal or 0)) + int(signal or 0)) if code.isdigit() else None
        rows.append(Row(*identity, _word(cells[1]), cells[6], _number(cells[3]), _none(cells[5]), _none(cells[4]),
                        status))
    return rows


SQUEUE_FORMAT = SEPARATOR.join(("%i", "%T", "%V", "%r", "%N", "%j"))


def squeue_command(ids: Iterable[str] = ()) -> list[str]:
    return ["squeue", "--me", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}"]


def parse_squeue(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        cells = line.split(SEPARATOR)
        identity = _identity(cells[0])
        if identity is not None and len(cells) >= 6:
            rows.append(Row(*identity, _word(cells[1]), cells[5], _number(cells[2]), _none(cells[4]), _none(cells[3])))
    return rows


def scontrol_command(ids: Iterable[str] = ()) -> list[str]:
    return ["scontrol", "--oneliner", "show", "job"]


def parse_scontrol(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        job = re.search(r"\bJobId=(\d+)", line)
        state = re.search(r"\bJobState=(\S+)", line)
        if job is None or state is None:
            continue
        leader, offset = re.search(r"\bHetJobId=(\d+)", line), re.search(r"\bHetJobOffset=(\d+)", line)
        name = re.search(r"\bJobName=(.*?)(?:\s+HetJobIdSet=\S*)?\s+UserId=", line)
        exit_code = re.search(r"\bExitCode=(\d+):(\d+)", line)
        reason, restarts = re.search(r"\bReason=(.*?)\s+Dependency=", line), re.search(r"\bRestarts=(\d+)", line)
        nodes, submitted = re.search(r"\sNodeList=(\S+)", line), re.search(r"\bSubmitTime=(\S+)", line)
        rows.append(Row(
            leader.group(1) if leader else job.group(1), int(offset.group(1)) if offset else 0, _word(state.group(1)),
            name.group(1) if name else "", _number(submitted.group(1)) if submitted else None,
            _none(nodes.group(1)) if nodes else "", _none(reason.group(1)) if reason else "",
            int(exit_code.group(1)) or int(exit_code.group(2)) if exit_code else None,
            int(restarts.group(1)) if restarts else 0))
    return rows


def _none(text: str) -> str:
    return "" if text in ("None", "(null)", "None assigned", "N/A") else text


def join(rows: Iterable[Row], source: str = "sacct") -> JobState:
    """One state for the components of one job."""
    ordered = sorted(rows, key=lambda r: r.offset)
    if not ordered:
        return JobState()
    states = [r.state for r in ordered]
    active = [s for s in ACTIVE if s in states]
    state = active[0] if active else next((s for s in BLAME if s in states), states[0])
    codes = [r.exit_code for r in ordered if r.exit_code]
    nodes = ",".join(r.nodes for r in ordered if r.nodes)
    reason = next((r.reason for r in ordered if r.reason and r.state == state 
                   and (active or r.reason not in _STALE)), "")
    code = None if active else (codes[0] if codes else (0 if state == "COMPLETED" else 1))
    return JobState(state, reason, nodes, code, tuple(states), source, max(r.restarts for r in ordered),
                    component_nodes=tuple(r.nodes for r in ordered))


def read_record(path: Path, since: float | None = None) -> JobState | None:
    """The state in a batch script's exit record (``STATUS EPOCH SIGNAL``), unless it is older than the job."""
    try:
        words = path.read_text(encoding="utf-8", errors="replace").split()
        status, when = int(words[0]), float(words[1])
    except (OSError, ValueError, IndexError):
        return None
    if since is not None and when < since - _SLACK_S:
        return None
    state = "COMPLETED" if status == 0 else "CANCELLED" if words[2:3] == ["TERM"] else "FAILED"
    return JobState(state, "", "", status, (state,), "exit record")


class StateWatcher(core.InfoWatcher):
    """submitit's watcher, for (heterogeneous) jobs: all jobs of this process in one query, with backoff.

    `delay_s`: the longest pause between two queries that nobody forced.
    """

    def __init__(self, delay_s: int = 20) -> None:
        super().__init__(delay_s)
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
            self._states.pop(job_id, None)
            self._info_dict.pop(job_id, None)
            for times in self._times:
                times.pop(job_id, None)
            self._finished.discard(job_id)
            self._registered_at[job_id] = time.time()
        self._expected[job_id] = expected
        return another

    @property
    def _times(self) -> tuple[dict[str, float], ...]:
        return self._ended_at, self._requeued_at, self._partial_since

    def register_job(self, job_id: str) -> None:
        super().register_job(job_id)
        self._registered_at.setdefault(job_id, time.time())

    def state_of(self, job_id: str, mode: str = "standard") -> JobState:
        """The job's state; mode as submitit's (``force``, ``standard``, ``cache``)."""
        self.get_info(job_id, mode=mode)
        return self._states.get(job_id, JobState())

    def ended_at(self, job_id: str) -> float | None:
        """When this process first saw the job's end (epoch seconds)."""
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
            return time.time() - self._partial_since.setdefault(job_id, time.time()) >= _PARTIAL_GRACE_S
        if found.state in _REQUEUED:
            first = self._requeued_at.setdefault(job_id, time.time())
            return time.time() - first >= _REQUEUED_GRACE_S
        self._requeued_at.pop(job_id, None)
        return found.ended

    def clear(self) -> None:
        super().clear()
        self._states.clear()
        for times in (*self._times, self._down_until):
            times.clear()

    def update_if_long_enough(self, mode: str) -> None:
        pause = min(self._delay_s, 2 ** min(self._failures, 6)) if self._failures else 0
        if mode == "standard" and time.time() - self._last_status_check < pause:
            return  # nobody answers: ask more seldom, up to the longest pause
        super().update_if_long_enough(mode)

    def update(self) -> None:
        """Ask Slurm once for all jobs whose end is not known."""
        wanted = self._registered - self._finished
        if wanted:
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
        self._info_dict[job_id] = {"State": state.state, "Reason": state.reason, "NodeList": state.nodes,
                                   "JobID": job_id, "Source": state.source}
        if self._is_final(job_id, state):
            self._finished.add(job_id)
            self._ended_at.setdefault(job_id, time.time())

    def _without_a_row(self, job_id: str) -> JobState | None:
        """The state of a job that no source has: what its batch script left (it may have been requeued since, unless
        the controller says that it was not); lost, when the controller answers and should know it."""
        expected = self._expected.get(job_id, Expected())
        record = read_record(expected.record, expected.submitted) if expected.record else None
        if record is not None:
            return replace(record, unsettled=self._controller is None)
        if self._controller is None:
            return None
        if self._age(job_id) >= _LOST_S and _mine(expected.record):
            return JobState("FAILED", "lost: it no longer knows the job", source="nobody")
        return None if job_id in self._states else JobState(source=self._controller)

    def _ask(self, wanted: set[str]) -> dict[str, JobState]:
        """States of the jobs that somebody knows. The next source is asked only for what the one before lacks; of jobs
        so young that the database may not know them, squeue is asked first."""
        sources = [("sacct", sacct_command, parse_sacct), ("squeue", squeue_command, parse_squeue),
                   ("scontrol", scontrol_command, parse_scontrol)]
        if all(self._is_young(job_id) for job_id in wanted):
            sources.insert(0, sources.pop(1))
        found: dict[str, JobState] = {}
        doubtful: dict[str, JobState] = {}
        answered: list[str] = []
        for name, command, parse in sources:
            missing = {j for j in wanted - found.keys() if not answered or j in doubtful or not self._is_young(j)}
            if not missing or self._down_until.get(name, 0) > time.time():
                continue
            if name == "scontrol" and "squeue" in answered:
                continue  # they ask the same daemon
            self._num_calls += 1
            answer = self._query(command(missing))
            if not answer.ok:
                self._down_until[name] = time.time() + (60 if name == "sacct" else 5)
                continue
            self._down_until.pop(name, None)
            answered.append(name)
            rows: dict[str, list[Row]] = {}
            for row in parse(answer.out):
                if row.leader in wanted - found.keys() and self._expected.get(row.leader, Expected()).fits(row):
                    rows.setdefault(row.leader, []).append(row)
            for job_id, own in rows.items():
                state, known = join(own, name), self._states.get(job_id)
                if name == "sacct" and state.state == "PENDING" and known and known.state in ("RUNNING", "COMPLETING"):
                    doubtful[job_id] = known  # requeued, or the database has not heard of the start yet: ask on
                elif name == "sacct" and state.state in _REQUEUED:
                    doubtful[job_id] = state  # the queue may have it again
                else:
                    found[job_id] = state
        self._controller = next((name for name in answered if name in CONTROLLER), None)
        for job_id in doubtful.keys() - found.keys():
            state = doubtful[job_id]
            found[job_id] = replace(state, unsettled=state.ended and self._controller is None)
        self._failures = 0 if answered else self._failures + 1
        return found

    def _is_young(self, job_id: str) -> bool:
        """Whether the job is so new that the database may not have heard of it."""
        return self._states.get(job_id, JobState()).state == UNKNOWN and self._age(job_id) < _YOUNG_S

    def _age(self, job_id: str) -> float:
        """Seconds since the job's submission; where that is not known, since this process heard of it."""
        since = self._expected.get(job_id, Expected()).submitted or self._registered_at.get(job_id, 0)
        return time.time() - since

    @staticmethod
    def _query(command: list[str]) -> Answer:
        try:
            return slurm(*command, timeout_s=15, seconds_as_epoch=True)
        except SubmissionError as e:  # no such command here: the next source is asked
            return Answer(127, "", str(e))


WATCHER = StateWatcher()  # one for all jobs of this process
