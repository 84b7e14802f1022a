"""The states of a Slurm job: Slurm's words for them, which of them mean that it goes on, and one state for all the
components of a heterogeneous job.

A heterogeneous job is several rows (``12+0``, ``12+1``); they are joined: it runs while one of them does, and any
failed one fails it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

# A newer Slurm may report a state that is not listed here: it counts as the end of a job.
SlurmState = Literal[
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "COMPLETING",
    "CONFIGURING",
    "DEADLINE",
    "EXPEDITING",
    "FAILED",
    "NODE_FAIL",
    "NOT_SUBMITTED",
    "OUT_OF_MEMORY",
    "PENDING",
    "PREEMPTED",
    "READY",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "RESV_DEL_HOLD",
    "REVOKED",
    "RUNNING",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "TIMEOUT",
    "UNKNOWN",
]
UNKNOWN: Final = "UNKNOWN"  # ours: nobody could say, or the controller does not know the job
NOT_SUBMITTED: Final = "NOT_SUBMITTED"  # ours too
# Of several components' states the first of these is the job's; then the first of those that end a job.
ACTIVE: tuple[SlurmState, ...] = (
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "STAGE_OUT",
    "SIGNALING",
    "RESIZING",
    "CONFIGURING",
    "REQUEUED",
    "EXPEDITING",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
    "PENDING",
    "READY",
    NOT_SUBMITTED,
    UNKNOWN,
)
ENDED: tuple[SlurmState, ...] = (
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "DEADLINE",
    "PREEMPTED",
    "FAILED",
    "CANCELLED",
    "REVOKED",
    "COMPLETED",
)
REQUEUED = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # what sacct says of a job that Slurm queues again by itself
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "EXPEDITING", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
CONTROLLER = ("squeue", "scontrol")  # sources that ask slurmctld
_DUE = re.compile(
    r"\*\*\* (JOB|STEP) [\d.+]+ ON \S+ CANCELLED AT \S+"
    r"(?: DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE))?"
)
_DUE_STATES: dict[str, SlurmState] = {
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
    "JOB REQUEUE": "PREEMPTED",
    "": "CANCELLED",
}
_NO_MEMORY = re.compile(r"exceeded (?:job |step )?memory limit|oom[-_ ]kill|Out Of Memory", re.IGNORECASE)
_STALE = ("BeginTime", "Priority", "Resources", "Dependency", "JobArrayTaskLimit")  # sacct keeps why a job once waited


@dataclass(frozen=True)
class Row:
    """One component as one of Slurm's commands shows it. `submitted`, `start` (when it started, or is thought to):
    epoch seconds, None when not said; `token`: of the executor's submission, empty where another made it."""

    leader: str
    offset: int
    state: SlurmState
    name: str = ""
    submitted: float | None = None
    nodes: str = ""
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    start: float | None = None
    token: str = ""


@dataclass(frozen=True)
class JobState:
    """The joined state. `components`: each component's own; `source`: who said so; `unsettled`: it may still change,
    though it sounds final (a preempted job that is requeued, a leader whose components are not in the database yet);
    `component_nodes`: each component's host list; `start`: when a waiting job is thought to start (epoch seconds)."""

    state: SlurmState = UNKNOWN
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    components: tuple[SlurmState, ...] = ()
    source: str = "nobody"
    restarts: int = 0
    unsettled: bool = False
    component_nodes: tuple[str, ...] = ()
    start: float | None = None

    @property
    def waits(self) -> bool:
        """Whether it is in the queue, or is held there."""
        return self.state in WAITING

    @property
    def why(self) -> str:
        """Why it waits, and about when it will start, as far as Slurm tells."""
        held = "held" in self.reason.lower()  # then Slurm's estimate holds only once somebody releases it
        at = "" if held or (self.start or 0) < time.time() else f"starts about {when(self.start or 0)}"
        return ", ".join(text for text in (self.reason, at) if text) if self.waits else ""

    @property
    def ended(self) -> bool:
        return self.state not in ACTIVE and not self.unsettled

    @property
    def forgotten(self) -> bool:
        """Whether the controller answers and does not know the job."""
        return self.state == UNKNOWN and self.source in CONTROLLER


def when(epoch: float) -> str:
    """A moment as a clock shows it, with the date where that is another day."""
    at = datetime.fromtimestamp(epoch)
    return at.strftime("%H:%M" if at.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def join(rows: Iterable[Row], source: str = "sacct") -> JobState:
    """One state for the components of one job."""
    ordered = sorted(rows, key=lambda r: r.offset)
    if not ordered:
        return JobState()
    states = [r.state for r in ordered]
    active = [s for s in ACTIVE if s in states]
    state = active[0] if active else next((s for s in ENDED if s in states), states[0])
    codes = [r.exit_code for r in ordered if r.exit_code]
    nodes = ",".join(r.nodes for r in ordered if r.nodes)
    reason = next(
        (r.reason for r in ordered if r.reason and r.state == state and (active or r.reason not in _STALE)), ""
    )
    code = None if active else (codes[0] if codes else (0 if state == "COMPLETED" else 1))
    return JobState(
        state,
        reason=reason,
        nodes=nodes,
        exit_code=code,
        components=tuple(states),
        source=source,
        restarts=max(r.restarts for r in ordered),
        component_nodes=tuple(r.nodes for r in ordered),
        start=max((r.start for r in ordered if r.start), default=None) if state in WAITING else None,
    )


def out_of_memory(text: str) -> str | None:
    """The line of a log in which slurmd, slurmstepd or srun says that memory was too little."""
    return next((line.strip() for line in text.splitlines() if _NO_MEMORY.search(line)), None)


def told_to_end(text: str) -> JobState | None:
    """Why slurmd says that the job is being ended, in the batch script's log. (A step alone is cancelled by srun too,
    when one of its tasks ended badly, and then without a reason.)"""
    found = [_DUE_STATES[why] for what, why in _DUE.findall(text) if why or what == "JOB"]
    return JobState(found[-1], components=(found[-1],), source="slurmd") if found else None
