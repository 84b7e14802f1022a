"""Which rank ended a run, and how: from the ranks' own words and srun's complaints.

A rank that was killed says nothing itself; srun names it (``srun: error: ib2: task 3: Killed``) before it kills the
others. Of a local job the ranks' parent process notes what srun would say.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from holmes_hpc.errors import HolmesError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import to_json, write_whole
from holmes_hpc.records.untrusted import read_object
from holmes_hpc.slurm.hostlist import expand, numbers
from holmes_hpc.slurm.job_states import out_of_memory
from holmes_hpc.submission.executor.environment import ComponentRanks

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


def ranks_of_plan(plan: Plan, nodes: Sequence[str]) -> list[ComponentRanks]:
    """The components of a plan's job that ran on `nodes` (a host list per component)."""
    first_ranks = accumulate((component.ranks for component in plan.components), initial=0)
    return [
        ComponentRanks(tuple(expand(names)), first, component.gpus_per_node)
        for component, names, first in zip(plan.components, nodes, first_ranks, strict=False)
    ]


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
        if tasks := numbers(match[2].strip("[]")):
            killed = f"{_BY_SIGNAL} 9 (SIGKILL): out of memory ({memory})" if memory else by_signal(signal.SIGKILL)
            ranks = _ranks(match[1], tasks, parts)
            found.append(Complaint(match[1], ranks, killed if match[3] == "Killed" else match[3]))
    return found


def _ranks(nodes: str, tasks: Sequence[int], parts: Sequence[ComponentRanks]) -> tuple[int, ...]:
    first = expand(nodes)[0]
    for part in parts:
        if first in part.nodes:
            is_local = tasks[0] // part.tasks_per_node == part.nodes.index(first)  # else they are global ranks already
            return tuple(t + part.first_rank * is_local for t in tasks)
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


@dataclass(frozen=True)
class LocalEnds:
    """`told`: the job was told to end, by SIGTERM; `codes`: (rank, exit code, below 0 of a signal), first end first."""

    told: bool = False
    codes: tuple[tuple[int, int], ...] = ()

    def complaints(self, node: str) -> list[Complaint]:
        """As of srun, about the ranks that did not end well."""
        return [
            Complaint(node, (rank,), f"exited with exit code {code}" if code > 0 else by_signal(-code))
            for rank, code in self.codes
            if code
        ]


def note_ends(folder: Path, job_id: str, told: bool, codes: Sequence[tuple[int, int]]) -> None:
    """In the ranks' parent, when all have ended."""
    with contextlib.suppress(HolmesError):
        write_whole(_ends_path(folder, job_id), to_json({"told": told, "codes": codes}) + "\n")


def noted_ends(folder: Path, job_id: str) -> LocalEnds:
    """What the parent of the ranks noted; nothing where it could not, or there was none (ranks with GPUs)."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(read_object(_ends_path(folder, job_id)), LocalEnds, strict=False)
    return LocalEnds()


def _ends_path(folder: Path, job_id: str) -> Path:
    return folder / f"{job_id}_ends.json"
