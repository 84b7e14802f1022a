"""The states of a Slurm job: Slurm's words for them, which of them mean that it goes on, and one state for all the
components of a heterogeneous job.

A heterogeneous job is several rows (``12+0``, ``12+1``); they are joined: it runs while one of them does, and any
failed one fails it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

UNKNOWN = "UNKNOWN"  # ours: nobody could say, or the controller does not know the job
NOT_SUBMITTED = "NOT_SUBMITTED"  # ours too
# Of several components' states the first of these is the job's; then the first of those that end a job.
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING", "CONFIGURING",
          "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "PENDING", "READY",
          NOT_SUBMITTED, UNKNOWN)
ENDED = ("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "PREEMPTED", "FAILED", "CANCELLED",
         "REVOKED", "COMPLETED")
REQUEUED = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")  # what sacct says of a job that Slurm queues again by itself
CONTROLLER = ("squeue", "scontrol")  # sources that ask slurmctld
_DUE = re.compile(r"\*\*\* (JOB|STEP) [\d.+]+ ON \S+ CANCELLED AT \S+"
                  r"(?: DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE))?")
_DUE_STATES = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL",
               "JOB REQUEUE": "PREEMPTED", "": "CANCELLED"}
_STALE = ("BeginTime", "Priority", "Resources", "Dependency")  # sacct keeps why a job once waited


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
    def forgotten(self) -> bool:
        """Whether the controller answers and does not know the job."""
        return self.state == UNKNOWN and self.source in CONTROLLER


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
    reason = next((r.reason for r in ordered if r.reason and r.state == state
                   and (active or r.reason not in _STALE)), "")
    code = None if active else (codes[0] if codes else (0 if state == "COMPLETED" else 1))
    return JobState(state, reason, nodes, code, tuple(states), source, max(r.restarts for r in ordered),
                    component_nodes=tuple(r.nodes for r in ordered))


def told_to_end(text: str) -> JobState | None:
    """Why slurmd says that the job is being ended, in the batch script's log. (A step alone is cancelled by srun too,
    when one of its tasks ended badly, and then without a reason.)"""
    found = [_DUE_STATES[why] for what, why in _DUE.findall(text) if why or what == "JOB"]
    return JobState(found[-1], components=(found[-1],), source="slurmd") if found else None
