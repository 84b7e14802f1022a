"""The rank whose failure ended a run, and its error, from the ranks' exit records and srun's error messages.

A killed rank leaves no exit record. srun reports it (``srun: error: ib2: task 3: Killed``) before it kills the other
ranks. In a local job, the parent process of the ranks records their exit codes.
"""

import contextlib
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from holmes_hpc.errors import HolmesError, SiteError
from holmes_hpc.records.files import to_json, write_whole
from holmes_hpc.records.untrusted import read_object
from holmes_hpc.slurm.hostlist import expand, numbers
from holmes_hpc.slurm.job_states import out_of_memory
from holmes_hpc.submission.executor.environment import ComponentRanks

_TASK_ERROR = r"^(?:\d+: )?srun: error: ([^:\s]+): tasks? ([\d,\-\[\]]+): (.+?)\s*$"
_SRUN_ERROR = re.compile(rf"{_TASK_ERROR}|^srun: error: Node failure on (\S+)\s*$", re.MULTILINE)
MAX_TASKS = 10_000  # read from one message at most, because a rank can print one about any number of tasks
_NODE_FAILED = "node failure"
_BY_SIGNAL = "killed by signal"  # message for a local rank; the other messages in _SIGNALS are srun's most frequent
SIGKILL_CAUSES = "kill -9, or the kernel for lack of memory"
_SIGNALS = (
    *(_BY_SIGNAL, "Killed", "Segmentation fault", "Aborted", "Bus error", "Floating point", "Out Of Memory"),
    *("Illegal instruction", "Hangup", "Interrupt"),
)
# Errors that a rank has because another rank failed first.
_ABSENCE = ("did not join", "did not publish", "the store did not answer")
_PEER_ERRORS = (
    *("NetworkError", "Connection", "connection", "Broken pipe", "reset by peer", "timed out", "Timed out"),
    *_ABSENCE,
)


def signal_message(number: int) -> str:
    """Return the error message for a rank that signal `number` killed."""
    with contextlib.suppress(ValueError):
        causes = f": {SIGKILL_CAUSES}" if number == signal.SIGKILL else ""
        return f"{_BY_SIGNAL} {number:d} ({signal.Signals(number).name}{causes})"
    return f"{_BY_SIGNAL} {number}"


@dataclass(frozen=True)
class FailedRank:
    """A rank that failed, its node and its error message. None: unknown."""

    rank: int | None = None
    node: str | None = None
    error: str | None = None


def parse_srun_errors(text: str, components: Sequence[ComponentRanks] = ()) -> list[FailedRank]:
    """Return srun's errors about tasks in the order of `text`. There, tasks that srun itself terminated come last.

    In a step over several components, srun counts tasks from 0 in each component (measured on 22.05). `components`
    shows to which component a node belongs, so that task numbers can be converted to global ranks. If `text` reports
    a lack of memory, this report becomes the message of killed tasks."""
    errors, memory = [], out_of_memory(text)
    for match in _SRUN_ERROR.finditer(text):
        if node := match[4]:
            for c in [c for c in components if node in c.nodes][:1]:
                rank = c.first_rank + c.nodes.index(node) * c.tasks_per_node
                errors.append(FailedRank(rank, node, _NODE_FAILED))
            continue
        if tasks := numbers(match[2].strip("[]"), MAX_TASKS):
            killed = f"{_BY_SIGNAL} 9 (SIGKILL): out of memory ({memory})" if memory else signal_message(signal.SIGKILL)
            with contextlib.suppress(SiteError):  # a rank may print such a line about no host
                nodes, error = expand(match[1]), killed if match[3] == "Killed" else match[3]
                nodes = nodes if len(nodes) == len(tasks) else nodes[:1] * len(tasks)
                ranks = _global_ranks(nodes[0], tasks, components)
                errors += [FailedRank(rank, node, error) for rank, node in zip(ranks, nodes, strict=True)]
    return errors


def failed_nodes(text: str) -> list[str]:
    """Return the nodes whose failure srun reports in `text`, in its order."""
    return [match[4] for match in _SRUN_ERROR.finditer(text) if match[4]]


def _global_ranks(first_node: str, tasks: list[int], components: Sequence[ComponentRanks]) -> list[int]:
    """Return the global ranks for srun's numbers `tasks` of tasks, the first of which runs on `first_node`. Numbers
    that do not fit the position of that node in its component are global ranks already."""
    for component in components:
        if first_node in component.nodes:
            counts_in_component = tasks[0] // component.tasks_per_node == component.nodes.index(first_node)
            return [task + component.first_rank * counts_in_component for task in tasks]
    return tasks


def find_failed_rank(
    exits: Sequence[Mapping[str, Any]], srun_errors: Sequence[FailedRank], ranks: int = 0, hosts: Sequence[str] = ()
) -> FailedRank:
    """Return the rank that failed first, not a rank that failed because of it.

    `exits`: exit records in order of time; `ranks`: number of ranks; `hosts`: the host of each rank, if recorded.
    A rank killed by a signal leaves no exit record, and other ranks record lost connections. So return the first of:

    1. the earliest recorded failure that is not a lost connection
    2. a task without an exit record that srun reports but did not terminate, killed ones and failed nodes first
    3. a rank without an exit record, if other ranks have one; its error includes the earliest recorded failure
    4. the earliest recorded failure, or else srun's first error"""
    recorded_ranks = {int(e["rank"]) for e in exits if "rank" in e}
    failures = []
    for e in (e for e in exits if e.get("state") == "failed"):
        failures.append(FailedRank(int(e["rank"]), e.get("host"), str(e.get("error") or f"rank {e['rank']} failed")))
    for failure in failures:
        if not any(text in str(failure.error) for text in _PEER_ERRORS):
            return failure
    peer = "".join(f"; rank {failure.rank} on {failure.node}: {failure.error}" for failure in failures[:1])
    unrecorded = [e for e in srun_errors if e.error != "Terminated" and e.rank not in recorded_ranks]
    if unrecorded:
        first = next((e for e in unrecorded if str(e.error).startswith((*_SIGNALS, _NODE_FAILED))), unrecorded[0])
        has_node_failed = first.error == _NODE_FAILED
        cause = f"node {first.node} failed" if has_node_failed else f"rank {first.rank} died: {first.error}"
        return replace(first, error=cause + (peer if any(text in peer for text in _ABSENCE) else ""))
    silent_ranks = [rank for rank in range(ranks) if rank not in recorded_ranks]
    if silent_ranks and (failures or len(silent_ranks) < ranks):
        rank = silent_ranks[0]
        node = hosts[rank] if rank < len(hosts) else None
        return FailedRank(rank, node, f"rank {rank} exited without an exit record{peer}")
    if failures:
        return failures[0]
    return next((replace(e, error=f"rank {e.rank}: {e.error}") for e in srun_errors), FailedRank())


@dataclass(frozen=True)
class LocalExits:
    """The exits of a local job's ranks. `is_terminated`: whether the job received SIGTERM;
    `codes`: (rank, exit code) in the order of exits. The code -N stands for signal N."""

    is_terminated: bool = False
    codes: tuple[tuple[int, int], ...] = ()

    def srun_errors(self, node: str) -> list[FailedRank]:
        """Return the errors that srun would report about these ranks."""
        messages = {r: f"exited with exit code {c}" if c > 0 else signal_message(-c) for r, c in self.codes if c}
        return [FailedRank(rank, node, message) for rank, message in messages.items()]


def record_local_exits(folder: Path, job_id: str, terminated: bool, codes: Sequence[tuple[int, int]]) -> None:
    """Record how the ranks of a local job exited. Their parent process calls this after the last exit.
    `terminated`, `codes`: as `is_terminated` and `codes` of :class:`LocalExits`."""
    with contextlib.suppress(HolmesError):
        write_whole(_exits_path(folder, job_id), to_json({"is_terminated": terminated, "codes": codes}) + "\n")


def read_local_exits(folder: Path, job_id: str) -> LocalExits:
    """Return how the ranks of a local job exited; an empty LocalExits if no parent process recorded it."""
    record = read_object(_exits_path(folder, job_id)) or {}
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(record, LocalExits, strict=False)
    return LocalExits()


def _exits_path(folder: Path, job_id: str) -> Path:
    return folder / f"{job_id}_ends.json"
