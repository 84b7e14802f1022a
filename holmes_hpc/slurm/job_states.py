"""The states of Slurm jobs: their names, which of them are final, and the joint state of several components.

A heterogeneous job has a row per component (``12+0``, ``12+1``). It runs while one runs, and fails if one fails."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal, get_args

# A job has the first state in ACTIVE that any of its components has; otherwise, the first such state in ENDED. A state
# that only a newer Slurm reports is in neither list and counts as final.
_OnNodes = Literal["RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING", "CONFIGURING"]
_Requeued = Literal["REQUEUED", "EXPEDITING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"]
ActiveState = Literal[_OnNodes, _Requeued, "PENDING", "READY", "NOT_SUBMITTED", "UNKNOWN"]
_Stopped = Literal["NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "PREEMPTED"]
EndedState = Literal[_Stopped, "FAILED", "CANCELLED", "REVOKED", "COMPLETED"]
SlurmState = Literal[ActiveState, EndedState]
ACTIVE: tuple[ActiveState, ...] = get_args(ActiveState)
ENDED: tuple[EndedState, ...] = get_args(EndedState)
UNKNOWN: Final = "UNKNOWN"  # not Slurm's: no command answered, or the controller does not know the job
NOT_SUBMITTED: Final = "NOT_SUBMITTED"  # not Slurm's either
REQUEUED = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # sacct's states of a job that Slurm requeues by itself
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "EXPEDITING", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
CONTROLLER = ("squeue", "scontrol")  # commands that ask slurmctld
# The reason in slurmd's message about a cancelled job or step -> the state that it stands for.
_DUE_STATES: dict[str, SlurmState] = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}
_DUE_STATES |= {"JOB REQUEUE": "PREEMPTED", "": "CANCELLED"}
_REASONS = "|".join(filter(None, _DUE_STATES))
_DUE = re.compile(rf"\*\*\* (JOB|STEP) [\d.+]+ ON \S+ CANCELLED AT \S+(?: DUE TO ({_REASONS}))?")
_NO_MEMORY = re.compile(r"exceeded (?:job |step )?memory limit|oom[-_ ]kill|Out Of Memory", re.IGNORECASE)
# Reasons of an earlier wait in the queue, which sacct still shows after the job has ended.
_STALE = ("BeginTime", "Priority", "Resources", "Dependency", "JobArrayTaskLimit")


@dataclass(frozen=True)
class Row:
    """One component of a job, as a Slurm command reports it. `leader`: job id of the leader; `offset`: index of the
    component; `submitted`, `start` (actual or estimated): Unix seconds, None if unknown; `nodes`: host list; `token`:
    id of the executor's submission; empty for other jobs."""

    leader: str
    offset: int
    state: SlurmState
    name: str = ""
    submitted: float | None = None
    nodes: str = ""
    reason: str = ""
    exit_code: int | None = None
    start: float | None = None
    token: str = ""


@dataclass(frozen=True)
class JobState:
    """The state of a job, joined from the states of its components. `components`: each component's state; `source`: the
    command or file that reported it, empty if none did; `unsettled`: whether a final state may still change, because a
    preempted job is requeued or some components are not in the database yet; `nodes`, `component_nodes`: host lists;
    `start`: estimated start of a waiting job, in Unix seconds; `waiting`: a text on jobs of the same run that still
    wait while another job of the run has started."""

    state: SlurmState = UNKNOWN
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    components: tuple[SlurmState, ...] = ()
    source: str = ""
    unsettled: bool = False
    component_nodes: tuple[str, ...] = ()
    start: float | None = None
    waiting: str = ""

    @property
    def waits(self) -> bool:
        """True if the job is in the queue, or is held there."""
        return self.state in WAITING

    @property
    def why(self) -> str:
        """The reason of a waiting job and its estimated start, as far as Slurm reports them; empty for other jobs."""
        if self.waiting:
            return self.waiting
        is_held = "held" in self.reason.lower()  # Slurm's estimate is valid only after a release
        start_text = "" if is_held or (self.start or 0) < time.time() else f"starts about {when(self.start or 0)}"
        return ", ".join(text for text in (self.reason, start_text) if text) if self.waits else ""

    @property
    def ended(self) -> bool:
        """True if the job is over for good."""
        return self.state not in ACTIVE and not self.unsettled

    @property
    def forgotten(self) -> bool:
        """True if the controller answers and does not know the job."""
        return self.state == UNKNOWN and self.source in CONTROLLER


def when(epoch: float) -> str:
    """Return a time in Unix seconds as HH:MM, with the date unless it is today."""
    moment = datetime.fromtimestamp(epoch)
    return moment.strftime("%H:%M" if moment.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def _common_state(states: Sequence[SlurmState]) -> SlurmState:
    """Return the state of a job whose components have `states`; the first of them if all are unknown to this module."""
    return next((s for s in (*ACTIVE, *ENDED) if s in states), states[0])


def join(rows: Iterable[Row], source: str = "sacct") -> JobState:
    """Return the state of one job from the rows of its components. `source`: the command that reported them. If a job
    goes on after it lost a node, sacct also has a row in state RESIZING for the time before. It is skipped."""
    latest = {row.offset: row for row in sorted(rows, key=lambda r: r.state != "RESIZING")}
    ordered = [latest[offset] for offset in sorted(latest)]
    states = [r.state for r in ordered]
    state = _common_state(states)
    active = state in ACTIVE
    codes = [r.exit_code for r in ordered if r.exit_code]
    reasons = [r.reason for r in ordered if r.state == state and (state in WAITING or r.reason not in _STALE)]
    reason = next(filter(None, reasons), "")
    code = None if active else (codes[0] if codes else (0 if state == "COMPLETED" else 1))
    return JobState(
        state,
        reason=reason,
        nodes=",".join(r.nodes for r in ordered if r.nodes),
        exit_code=code,
        components=tuple(states),
        source=source,
        component_nodes=tuple(r.nodes for r in ordered),
        start=max((r.start for r in ordered if r.start), default=None) if state in WAITING else None,
    )


def out_of_memory(text: str) -> str | None:
    """Return the first line of a log in which slurmd, slurmstepd or srun reports a lack of memory; None without one."""
    return next((line.strip() for line in text.splitlines() if _NO_MEMORY.search(line)), None)


def read_cancellation(text: str) -> JobState | None:
    """Return the state of a cancelled job, from slurmd's message in the log of its batch script; None without one. A
    message without a reason counts only for a job, because srun cancels a step whenever a task fails."""
    states = [_DUE_STATES[reason] for entity, reason in _DUE.findall(text) if reason or entity == "JOB"]
    return JobState(states[-1], components=(states[-1],), source="slurmd") if states else None


def joined_members(states: Sequence[JobState]) -> JobState:
    """Return the joint state of a run whose components are separate jobs. The run is running while any job runs."""
    if len(states) == 1:
        return states[0]
    names = tuple(s.state for s in states)
    first = states[names.index(_common_state(names))]
    nodes = ",".join(s.nodes for s in states if s.nodes)
    waiting = [] if first.waits else [s for s in states if s.waits]
    text = f"{len(waiting)} of {len(states)} jobs wait: {waiting[0].why or waiting[0].state}" if waiting else ""
    return replace(first, nodes=nodes, components=names, waiting=text)
