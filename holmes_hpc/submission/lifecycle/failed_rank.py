"""Which rank ended a run, and how: from the ranks' own words and srun's complaints.

A rank that was killed says nothing itself; srun names it (``srun: error: ib2: task 3: Killed``) before it kills the
others.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.job_states import out_of_memory
from holmes_hpc.submission.executor.environment import component_nodes

_COMPLAINT = re.compile(
    r"^(?:\d+: )?srun: error: ([^:\s]+): tasks? ([\d,\-\[\]]+): (.+?)\s*$"
    r"|^srun: error: Node failure on (\S+)\s*$",
    re.MULTILINE,
)
_NODE_FAILED = "node failure"
_BY_SIGNAL = "killed by signal"  # of a local rank, whose parent knows the number; of srun's words the commonest
_KILLED = "kill -9, or the kernel for lack of memory"
_SIGNALS = (
    _BY_SIGNAL,
    "Killed",
    "Segmentation fault",
    "Aborted",
    "Bus error",
    "Floating point",
    "Out Of Memory",
    "Illegal instruction",
    "Hangup",
    "Interrupt",
)
_FOLLOWS = ("NetworkError", "Connection", "connection", "Broken pipe", "reset by peer", "timed out", "Timed out")


def by_signal(number: int) -> str:
    """How a rank ended that signal `number` killed."""
    with contextlib.suppress(ValueError):
        why = f": {_KILLED}" if number == signal.SIGKILL else ""
        return f"{_BY_SIGNAL} {number:d} ({signal.Signals(number).name}{why})"
    return f"{_BY_SIGNAL} {number}"


@dataclass(frozen=True)
class Complaint:
    """One line of srun's: these tasks (global ranks, see :func:`complaints`) on these nodes ended like this."""

    nodes: str
    tasks: tuple[int, ...]
    how: str

    @property
    def by_signal(self) -> bool:
        return self.how.startswith(_SIGNALS)


@dataclass(frozen=True)
class ComponentRanks:
    """A component as srun counts in it: its nodes, and the rank of its first task."""

    nodes: tuple[str, ...]
    first_rank: int
    tasks_per_node: int


def ranks_of_job(environ: Mapping[str, str]) -> list[ComponentRanks]:
    """The components of the job whose batch script has `environ`."""
    found, first = [], 0
    for index, nodes in enumerate(component_nodes(environ)):
        per_node = int(environ.get(f"HOLMES_TASKS_PER_NODE_{index}") or 1)
        found.append(ComponentRanks(tuple(nodes), first, per_node))
        first += len(nodes) * per_node
    return found


def ranks_of_plan(plan: Plan, nodes: Sequence[str]) -> list[ComponentRanks]:
    """The components of a plan's job that ran on `nodes` (a host list per component)."""
    found, first = [], 0
    for component, names in zip(plan.components, nodes, strict=False):
        found.append(ComponentRanks(tuple(expand(names)), first, component.gpus_per_node))
        first += component.ranks
    return found


def complaints(text: str, parts: Sequence[ComponentRanks] = ()) -> list[Complaint]:
    """srun's complaints about tasks, in its order; those about its own killing of the rest come last.

    In a step over several components srun counts tasks from 0 in each (measured on 22.05); the node tells which one is
    meant, so with `parts` the tasks are global ranks. A task that was killed where `text` tells of too little memory
    was killed for that.
    """
    found, memory = [], out_of_memory(text)
    for match in _COMPLAINT.finditer(text):
        if match[4]:
            found += [
                Complaint(match[4], (p.first_rank + p.nodes.index(match[4]) * p.tasks_per_node,), _NODE_FAILED)
                for p in parts
                if match[4] in p.nodes
            ][:1]
            continue
        tasks: list[int] = []
        for part in match.group(2).strip("[]").split(","):
            low, _, high = part.partition("-")
            if low.isdecimal():
                tasks += range(int(low), int(high if high.isdecimal() else low) + 1)
        if tasks:
            how = match.group(3)
            if how == "Killed":
                how = by_signal(signal.SIGKILL)
                if memory:
                    how = how.replace(f": {_KILLED})", f"): out of memory ({memory})")
            found.append(Complaint(match[1], _ranks(match[1], tasks, parts), how))
    return found


def _ranks(nodes: str, tasks: Sequence[int], parts: Sequence[ComponentRanks]) -> tuple[int, ...]:
    first = expand(nodes)[0]
    for part in parts:
        if first in part.nodes:
            at = part.nodes.index(first) * part.tasks_per_node
            local = at <= tasks[0] < at + part.tasks_per_node  # else they are global ranks already
            return tuple(t + part.first_rank for t in tasks) if local else tuple(tasks)
    return tuple(tasks)


@dataclass(frozen=True)
class Culprit:
    """The rank that ended the run, and how."""

    rank: int | None = None
    node: str | None = None
    error: str | None = None


def culprit(
    exits: Sequence[Mapping[str, Any]], srun: Sequence[Complaint], ranks: int = 0, hosts: Sequence[str] = ()
) -> Culprit:
    """The rank whose end came first and is not the echo of another's.

    A rank killed by a signal leaves no exit record, and its peers' records are about lost connections. So, in this
    order: the earliest record of a failure that is no lost connection; a task that died by a signal; a node that
    failed; a task that srun complains about and that left no record; one of `ranks` without any record or complaint,
    with what the earliest record of a failure says of it; that record; srun's first complaint. What srun itself
    terminated is an echo. `hosts`: of every rank, as recorded.
    """
    spoke = {int(e["rank"]) for e in exits if "rank" in e}
    failed = [e for e in exits if e.get("state") == "failed"]
    for e in [e for e in failed if not any(word in str(e.get("error") or "") for word in _FOLLOWS)][:1]:
        return Culprit(int(e["rank"]), e.get("host"), e.get("error") or f"rank {e['rank']} failed")
    own = [(c, task) for c in srun if c.how != "Terminated" for task in c.tasks if task not in spoke]
    for complaint, task in sorted(own, key=lambda pair: not (pair[0].by_signal or pair[0].how == _NODE_FAILED))[:1]:
        died = f"rank {task} died: {complaint.how}"
        what = f"node {complaint.nodes} failed" if complaint.how == _NODE_FAILED else died
        return Culprit(task, _node(complaint, task), what)
    mute = [rank for rank in range(ranks) if rank not in spoke]
    if mute and (failed or len(mute) < ranks):
        told = f"; rank {failed[0]['rank']} on {failed[0].get('host')}: {failed[0].get('error')}" if failed else ""
        node = hosts[mute[0]] if mute[0] < len(hosts) else None
        return Culprit(mute[0], node, f"rank {mute[0]} ended without a word{told}")
    for e in failed[:1]:
        return Culprit(int(e["rank"]), e.get("host"), e.get("error") or f"rank {e['rank']} failed")
    for complaint in srun[:1]:
        task = complaint.tasks[0]
        return Culprit(task, _node(complaint, task), f"rank {task}: {complaint.how}")
    return Culprit()


def _node(complaint: Complaint, task: int) -> str:
    nodes = expand(complaint.nodes)
    return nodes[complaint.tasks.index(task)] if len(nodes) == len(complaint.tasks) else nodes[0]
