"""How a run ended, judged from what is left of it: exit status, the ranks' own records, srun's words, Slurm's state.

One table lies between the states of a Slurm job and those of a run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.logs import SPARSE_STEPS, tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import STATES, RunState
from holmes_hpc.slurm.job_states import JobState, SlurmState
from holmes_hpc.submission.lifecycle.attempts import of_newest_start
from holmes_hpc.submission.lifecycle.failed_rank import Complaint, Culprit, culprit

TAIL_LINES = 20
FINAL_FIGURES = (
    "step",
    "loss",
    "step_time_s",
    "tokens_per_s",
    "samples_per_s",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
)
_STEP = re.compile(r" step \d+: ")
# Every end of a job; of several for one end of a run, the first is the run's.
TABLE: dict[SlurmState, RunState] = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "PREEMPTED": "preempted",
    "FAILED": "failed",
    "REVOKED": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
}
_SLURM_STATES: dict[RunState, SlurmState] = {run: job for job, run in reversed(TABLE.items())}


def run_state(slurm_state: SlurmState) -> RunState:
    """Return the state of a run whose job ended in `slurm_state`; an end that the table lacks is a failure."""
    return TABLE.get(slurm_state, "failed")


def job_state(run_state: RunState) -> SlurmState:
    """Return Slurm's word for how a run ended."""
    return _SLURM_STATES[run_state]


def is_end(word: str) -> bool:
    """Return whether a word of a table is how a run ended; else it is Slurm's, in lower case, for what the job does."""
    return word in STATES


class StateRow:
    """A row of a table whose `state` is the run's (completed, failed, …) when it ended, else Slurm's in lower case."""

    state: str

    @property
    def ended(self) -> bool:
        return is_end(self.state)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]


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
    state: RunState | None = run_state(slurm.state) if slurm is not None and slurm.ended else None
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
                error=f"Slurm says {slurm.state}{f' ({slurm.reason})' if slurm.reason else ''}"
                f"{f' on {slurm.nodes}' if slurm.nodes else ''}"
            )
    return {
        "state": state,
        "exit_code": 0 if state == "completed" else status or 1,
        "error": found.error or _error(run, state, status),
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


def _error(run: RunDirectory, state: RunState, status: int | None) -> str | None:
    """Return why a run ended of which no rank says why. Nobody writes where the directory is this machine's alone."""
    if state == "failed" and not any(run.logs.glob("rank-*.txt")) and not (run.logs / "batch.txt").exists():
        return f"no node wrote anything into {run.path}: is it on a file system that all nodes share?"
    unseen = "the job ended before its batch script could say why"
    return {
        "completed": None,
        "failed": unseen if status is None else f"the step ended with exit code {status}",
        "timeout": "its time was over",
    }.get(state, state)


def _log_tail(run: RunDirectory, rank: int | None, state: str) -> list[str]:
    if state == "completed":
        return []
    if rank is not None and (lines := last_words(run.log_path(rank))):
        return lines
    batch = of_newest_start(run)
    return [] if batch is None else _legible(batch) or last_words(run.logs / "srun.txt")


def final_figures(run: RunDirectory) -> dict[str, Any]:
    """The last step's figures."""
    last: dict[str, Any] = {}
    with contextlib.suppress(HolmesError):
        last = (run.metrics() or [last])[-1]
    return {figure: last[figure] for figure in FINAL_FIGURES if figure in last}
