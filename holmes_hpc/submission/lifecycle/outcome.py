"""How a run ended, judged from what is left of it: exit status, the ranks' own words, srun's complaints, Slurm's state.

A rank that was killed says nothing itself; srun names it (``srun: error: ib2: task 3: Killed``) before it kills the
others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.logs import tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.hostlist import expand
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.executor.environment import LEADER, component_nodes
from holmes_hpc.submission.lifecycle.run_states import run_state

TAIL_LINES = 20
START_MARK = "holmes: start of job"  # in the batch script's log, at every start
_COMPLAINT = re.compile(r"^(?:\d+: )?srun: error: ([^:\s]+): tasks? ([\d,\-\[\]]+): (.+?)\s*$"
                        r"|^srun: error: Node failure on (\S+)\s*$", re.MULTILINE)
_NODE_FAILED = "node failure"
_SIGNALS = ("Killed", "Segmentation fault", "Aborted", "Bus error", "Floating point", "Out Of Memory",
            "Illegal instruction", "Hangup", "Interrupt")
_FOLLOWS = ("NetworkError", "Connection", "connection", "Broken pipe", "reset by peer", "timed out", "Timed out")


@dataclass(frozen=True)
class Complaint:
    """One line of srun's: these tasks (global ranks, see :func:`complaints`) on these nodes ended like this."""

    nodes: str
    tasks: tuple[int, ...]
    how: str

    @property
    def by_signal(self) -> bool:
        return self.how.startswith(_SIGNALS)

    @property
    def node_failed(self) -> bool:
        return self.how == _NODE_FAILED


@dataclass(frozen=True)
class Part:
    """A component as srun counts in it: its nodes, and the rank of its first task."""

    nodes: tuple[str, ...]
    first_rank: int
    tasks_per_node: int


def parts_of(environ: Mapping[str, str]) -> list[Part]:
    """The components of the job whose batch script has `environ`."""
    found, first = [], 0
    for index, nodes in enumerate(component_nodes(environ)):
        per_node = int(environ.get(f"HOLMES_TASKS_PER_NODE_{index}") or 1)
        found.append(Part(tuple(nodes), first, per_node))
        first += len(nodes) * per_node
    return found


def parts_of_plan(plan: Plan, nodes: Sequence[str]) -> list[Part]:
    """The components of a plan's job that ran on `nodes` (a host list per component)."""
    found, first = [], 0
    for component, names in zip(plan.components, nodes, strict=False):
        found.append(Part(tuple(expand(names)), first, component.gpus_per_node))
        first += component.ranks
    return found


def complaints(text: str, parts: Sequence[Part] = ()) -> list[Complaint]:
    """srun's complaints about tasks, in its order; those about its own killing of the rest come last.

    In a step over several components srun counts tasks from 0 in each (measured on 22.05); the node tells which one is
    meant, so with `parts` the tasks are global ranks.
    """
    found = []
    for match in _COMPLAINT.finditer(text):
        if match.group(4):
            on_node = [p.first_rank + p.nodes.index(match.group(4)) * p.tasks_per_node for p in parts
                       if match.group(4) in p.nodes]
            if on_node:
                found.append(Complaint(match.group(4), tuple(on_node[:1]), _NODE_FAILED))
            continue
        tasks: list[int] = []
        for part in match.group(2).strip("[]").split(","):
            low, _, high = part.partition("-")
            if low.isdigit():
                tasks += range(int(low), int(high if high.isdigit() else low) + 1)
        if tasks:
            found.append(Complaint(match.group(1), _ranks(match.group(1), tasks, parts), match.group(3)))
    return found


def _ranks(nodes: str, tasks: Sequence[int], parts: Sequence[Part]) -> tuple[int, ...]:
    first = expand(nodes)[0]
    for part in parts:
        if first in part.nodes:
            at = part.nodes.index(first) * part.tasks_per_node
            local = at <= tasks[0] < at + part.tasks_per_node  # else they are global ranks already
            return tuple(t + part.first_rank for t in tasks) if local else tuple(tasks)
    return tuple(tasks)


_DUE = re.compile(r"\*\*\* (JOB|STEP) [\d.+]+ ON \S+ CANCELLED AT \S+"
                  r"(?: DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE))?")
_DUE_STATES = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL",
               "JOB REQUEUE": "PREEMPTED", "": "CANCELLED"}


def told_to_end(text: str) -> JobState | None:
    """Why slurmd says that the job is being ended, in the batch script's log. (A step alone is cancelled by srun too,
    when one of its tasks ended badly, and then without a reason.)"""
    found = [_DUE_STATES[why] for what, why in _DUE.findall(text) if why or what == "JOB"]
    return JobState(found[-1], components=(found[-1],), source="slurmd") if found else None


@dataclass(frozen=True)
class Culprit:
    """The rank that ended the run, and how."""

    rank: int | None = None
    node: str | None = None
    error: str | None = None


def culprit(exits: Sequence[Mapping[str, Any]], srun: Sequence[Complaint], ranks: int = 0) -> Culprit:
    """The rank whose end came first and is not the echo of another's.

    A rank killed by a signal leaves no exit record, and its peers' records are about lost connections. So, in this
    order: the earliest record of a failure that is no lost connection; a task that died by a signal; a node that
    failed; a task that srun complains about and that left no record; one of `ranks` without any record or complaint;
    the earliest record of a failure; srun's first complaint. What srun itself terminated is an echo.
    """
    spoke = {int(e["rank"]) for e in exits if "rank" in e}
    failed = [e for e in exits if e.get("state") == "failed"]
    for e in [e for e in failed if not _is_echo(e)][:1]:
        return Culprit(int(e["rank"]), e.get("host"), e.get("error") or f"rank {e['rank']} failed")
    own = [(c, task) for c in srun if c.how != "Terminated" for task in c.tasks if task not in spoke]
    for complaint, task in sorted(own, key=lambda pair: not (pair[0].by_signal or pair[0].node_failed))[:1]:
        what = f"node {complaint.nodes} failed" if complaint.node_failed else f"rank {task} died: {complaint.how}"
        return Culprit(task, _node(complaint, task), what)
    mute = [rank for rank in range(ranks) if rank not in spoke]
    if mute and (failed or len(mute) < ranks):
        return Culprit(mute[0], None, f"rank {mute[0]} ended without a word")
    for e in failed[:1]:
        return Culprit(int(e["rank"]), e.get("host"), e.get("error") or f"rank {e['rank']} failed")
    for complaint in srun[:1]:
        task = complaint.tasks[0]
        return Culprit(task, _node(complaint, task), f"rank {task}: {complaint.how}")
    return Culprit()


def _is_echo(exit_record: Mapping[str, Any]) -> bool:
    return any(word in str(exit_record.get("error") or "") for word in _FOLLOWS)


def _node(complaint: Complaint, task: int) -> str:
    nodes = expand(complaint.nodes)
    return nodes[complaint.tasks.index(task)] if len(nodes) == len(complaint.tasks) else nodes[0]


def last_words(path: Path) -> list[str]:
    """The last lines of a log that say something, fit for a terminal and for JSON, whatever is in it."""
    shown = ("".join(c for c in line if c.isprintable() or c == "\t")[:500].rstrip()
             for line in tail(path, 2 * TAIL_LINES))
    return [line for line in shown if line][-TAIL_LINES:]


def judge(run: RunDirectory, status: int | None, *, signalled: bool = False, slurm: JobState | None = None,
          srun: Iterable[Complaint] = ()) -> dict[str, Any]:
    """The content of result.json. `status`: the step's exit status, None when nobody saw it."""
    exits = run.read_exits()
    preempted = any(e.get("state") == "preempted" for e in exits)
    state = run_state(slurm.state) if slurm is not None and slurm.ended else None
    if state is None or state == "completed" or (state == "failed" and slurm is not None and slurm.state == "FAILED"):
        if status == 0 or (status is None and state == "completed"):
            state = "completed" if not preempted else "cancelled" if signalled else "preempted"
        elif preempted and not signalled:
            state = "preempted"
        else:
            state = "cancelled" if signalled and not any(e.get("state") == "failed" for e in exits) else "failed"
    found = Culprit()
    if state == "failed":
        found = culprit(exits, list(srun), _world(run))
        if found.rank is None and slurm is not None and slurm.ended and (
                slurm.state != "FAILED" or slurm.source == "nobody"):
            found = Culprit(None, None, f"Slurm says {slurm.state}{f' ({slurm.reason})' if slurm.reason else ''}"
                                        f"{f' on {slurm.nodes}' if slurm.nodes else ''}")
    code = 0 if state == "completed" else status or 1
    return {"state": state, "exit_code": code, "error": found.error or _silence(run, state) or _error(state, status),
            "failed_rank": found.rank, "failed_node": found.node, "log_tail": _log_tail(run, found.rank, state),
            "final": final_figures(run)}


def _world(run: RunDirectory) -> int:
    """How many ranks have written a log, but no more than the plan has now: an earlier attempt may have had more."""
    logs = len(list(run.logs.glob("rank-*.txt")))
    with contextlib.suppress(HolmesError, OSError):
        return min(logs, Plan.read(run.plan_path).world_size)
    return logs


def _silence(run: RunDirectory, state: str) -> str | None:
    """Why nobody wrote anything: the usual reason is a run directory of this machine alone."""
    wrote = any(run.logs.glob("rank-*.txt")) or (run.logs / "batch.txt").exists()
    return None if wrote or state != "failed" else (
        f"no node wrote anything into {run.path}: is it on a file system that all nodes share?")


def _error(state: str, status: int | None) -> str | None:
    return {"completed": None, "cancelled": "cancelled", "timeout": "its time was over",
            "preempted": "preempted"}.get(state, f"the step ended with exit code {status}" if status is not None
                                          else "the job ended before its batch script could say why")


def _log_tail(run: RunDirectory, rank: int | None, state: str) -> list[str]:
    if state == "completed":
        return []
    lines = last_words(run.log_path(rank)) if rank is not None else []
    return lines or last_words(run.logs / "batch.txt") or last_words(run.logs / "srun.txt")


def final_figures(run: RunDirectory) -> dict[str, Any]:
    """The last step's figures."""
    try:
        metrics = run.metrics()
    except HolmesError:
        return {}
    keys = ("step", "loss", "step_time_s", "tokens_per_s", "samples_per_s", "model_tflops_per_gpu",
            "hardware_tflops_per_gpu")
    return {k: metrics[-1][k] for k in keys if k in metrics[-1]} if metrics else {}


def start_of(environ: Mapping[str, str]) -> str:
    """Which start of which job this is: ``JOB_ID/RESTARTS``."""
    return f"{environ.get(LEADER) or environ.get('SLURM_JOB_ID') or 'local'}/{environ.get('SLURM_RESTART_COUNT') or 0}"


def gained(run: RunDirectory, start: str) -> bool:
    """Whether the start `start` did a step that none before it did; one that made no attempt did none."""
    attempts = run.read_run()["attempts"]
    if not attempts or attempts[-1].get("start", start) != start:
        return False
    steps = [int(m["step"]) for m in run.metrics() if int(m.get("attempt") or 1) >= len(attempts)]
    before = [int(a["last_step"]) for a in attempts[:-1] if str(a.get("last_step", "")).isdigit()]
    return bool(steps) and max(steps) > max(before, default=-1)


def failures(run: RunDirectory, start: str) -> int:
    """How many earlier starts of the same job failed."""
    job_id = start.partition("/")[0]
    return sum(a.get("ended") == "failed" and str(a.get("start", "")).partition("/")[0] == job_id
               for a in run.read_run()["attempts"])


def last_step(run: RunDirectory) -> int | None:
    metrics = run.metrics()
    return int(metrics[-1]["step"]) if metrics else None


def noted(run: RunDirectory, start: str) -> bool:
    """Whether `start` was noted to have ended, and so is to be requeued."""
    return any(a.get("start") == start for a in run.read_run()["attempts"][-1:])


def note_progress(run: RunDirectory, start: str, ended: str) -> None:
    """Before a requeue: write into the attempt its last step, so that the next one's gain can be told, and its end."""
    attempts = run.read_run()["attempts"]
    if attempts and "start" not in attempts[-1]:
        step = last_step(run)
        attempts[-1] |= {"start": start, "ended": ended, **({} if step is None else {"last_step": step})}
        run.update_run(attempts=attempts)
