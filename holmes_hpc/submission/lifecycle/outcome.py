"""How a run ended, judged from what is left of it: exit status, the ranks' own records, srun's words, Slurm's state."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.logs import SPARSE_STEPS, tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.slurm.job_states import JobState
from holmes_hpc.submission.lifecycle.failed_rank import Complaint, Culprit, culprit
from holmes_hpc.submission.lifecycle.run_states import run_state
from holmes_hpc.submission.lifecycle.starts import of_newest_start

TAIL_LINES = 20
_STEP = re.compile(r" step \d+: ")


def last_words(path: Path) -> list[str]:
    """The last lines of a log that say something, fit for a terminal and for JSON, whatever is in it."""
    return _legible(tail(path, 2 * TAIL_LINES))


def _legible(lines: Iterable[str]) -> list[str]:
    shown = ("".join(c for c in line if c.isprintable() or c == "\t")[:500].rstrip() for line in lines)
    return [line for line in shown if line][-TAIL_LINES:]


def quoted(lines: Iterable[str], error: str, rank: int | None = None) -> list[str]:
    """A log's last lines as they are shown, without those that only say `error` once more. That a rank but 0 does not
    write every step is said, as it may have gone on after the last one there."""
    shown = [f"  | {line}" for line in lines if not error or error not in line]
    if rank and any(_STEP.search(line) for line in shown):
        shown.append(f"  (ranks but 0 write every {SPARSE_STEPS}th step: it may have made more)")
    return shown


def judge(
    run: RunDirectory,
    status: int | None,
    *,
    signalled: bool = False,
    slurm: JobState | None = None,
    srun: Iterable[Complaint] = (),
) -> dict[str, Any]:
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
        hosts = run.read_run().get("hosts")
        found = culprit(exits, list(srun), _world(run), [str(h) for h in hosts] if isinstance(hosts, list) else ())
        if (
            found.rank is None
            and slurm is not None
            and slurm.ended
            and (slurm.state != "FAILED" or slurm.source == "nobody")
        ):
            found = Culprit(
                None,
                None,
                f"Slurm says {slurm.state}{f' ({slurm.reason})' if slurm.reason else ''}"
                f"{f' on {slurm.nodes}' if slurm.nodes else ''}",
            )
    code = 0 if state == "completed" else status or 1
    return {
        "state": state,
        "exit_code": code,
        "error": found.error or _silence(run, state) or _error(state, status),
        "failed_rank": found.rank,
        "failed_node": found.node,
        "log_tail": _log_tail(run, found.rank, state),
        "final": final_figures(run),
    }


def _world(run: RunDirectory) -> int:
    """How many ranks have written a log, but no more than the plan has now: an earlier attempt may have had more."""
    logs = len(list(run.logs.glob("rank-*.txt")))
    with contextlib.suppress(HolmesError, OSError):
        return min(logs, Plan.read(run.plan_path).world_size)
    return logs


def _silence(run: RunDirectory, state: str) -> str | None:
    """Why nobody wrote anything: the usual reason is a run directory of this machine alone."""
    wrote = any(run.logs.glob("rank-*.txt")) or (run.logs / "batch.txt").exists()
    return (
        None
        if wrote or state != "failed"
        else (f"no node wrote anything into {run.path}: is it on a file system that all nodes share?")
    )


def _error(state: str, status: int | None) -> str | None:
    return {"completed": None, "cancelled": "cancelled", "timeout": "its time was over", "preempted": "preempted"}.get(
        state,
        f"the step ended with exit code {status}"
        if status is not None
        else "the job ended before its batch script could say why",
    )


def _log_tail(run: RunDirectory, rank: int | None, state: str) -> list[str]:
    if state == "completed":
        return []
    lines = last_words(run.log_path(rank)) if rank is not None else []
    if lines:
        return lines
    batch = of_newest_start(run)
    return [] if batch is None else _legible(batch) or last_words(run.logs / "srun.txt")


def final_figures(run: RunDirectory) -> dict[str, Any]:
    """The last step's figures."""
    try:
        metrics = run.metrics()
    except HolmesError:
        return {}
    keys = (
        "step",
        "loss",
        "step_time_s",
        "tokens_per_s",
        "samples_per_s",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
    )
    return {k: metrics[-1][k] for k in keys if k in metrics[-1]} if metrics else {}
