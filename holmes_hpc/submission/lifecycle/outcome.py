"""The outcome of a run, from its exit status, the ranks' exit records, srun's errors and Slurm's state."""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import is_full
from holmes_hpc.records.find import reference_to
from holmes_hpc.records.logs import SPARSE_STEPS, tail
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.schema import STATES, RunState
from holmes_hpc.slurm.job_states import JobState, SlurmState
from holmes_hpc.submission.executor.batch_script import USER_SIGNAL
from holmes_hpc.submission.lifecycle.attempts import last_metrics, latest_attempt_log
from holmes_hpc.submission.lifecycle.failed_rank import SIGKILL_CAUSES, FailedRank, find_failed_rank

TAIL_LINES = 20
FINAL_FIGURES = (
    *("step", "loss", "step_time_s", "tokens_per_s", "samples_per_s"),
    *("model_tflops_per_gpu", "hardware_tflops_per_gpu"),
)
_STEP = re.compile(r" step \d+: ")
# Every final state of a Slurm job. If several map to one run state, SLURM_STATES maps that state to the first.
RUN_STATES: dict[SlurmState, RunState] = {
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
SLURM_STATES: dict[RunState, SlurmState] = {run: job for job, run in reversed(RUN_STATES.items())}


def run_state(slurm_state: SlurmState) -> RunState:
    """Return the state of a run whose job ended in `slurm_state`; a state missing from the table is a failure."""
    return RUN_STATES.get(slurm_state, "failed")


class StateRow:
    """A row of a table. `state`: the run's state (completed, failed, …) if it has ended, else Slurm's in lower case."""

    state: str

    @property
    def ended(self) -> bool:
        return self.state in STATES


def last_log_lines(path: Path) -> list[str]:
    """Return at most TAIL_LINES last lines of a log, without blank ones and without control characters."""
    return _printable(tail(path, 2 * TAIL_LINES))


def _printable(lines: Iterable[str]) -> list[str]:
    printable = ("".join(c for c in line if c.isprintable() or c == "\t")[:500].rstrip() for line in lines)
    return [line for line in printable if line][-TAIL_LINES:]


def quote_log(lines: Iterable[str], error: str, rank: int | None = None) -> list[str]:
    """Return the lines of a log marked as a quotation, without those that only repeat `error`.
    `rank`: whose log it is. Ranks other than 0 do not log every step, so a note on that is added to their lines."""
    quotation = [f"  | {line}" for line in lines if not error or error not in line]
    if rank and any(_STEP.search(line) for line in quotation):
        quotation.append(f"  (ranks other than 0 log every {SPARSE_STEPS}th step: it may have made more)")
    return quotation


def resume_advice(run: RunDirectory, steps: Iterable[int]) -> list[str]:
    """Return a line with the command that continues an ended run after the last of the saved `steps`, if any."""
    last = last_metrics(run).get("step")
    return [
        f"continue after step {step} with `holmes resume {reference_to(run)}`"
        + (f" (steps {step + 1} to {last} were not saved)" if isinstance(last, int) and last > step else "")
        for step in sorted(steps)[-1:]
    ]


def build_result(
    run: RunDirectory,
    status: int | None,
    *,
    signalled: bool = False,
    slurm: JobState | None = None,
    srun_errors: Iterable[FailedRank] = (),
) -> dict[str, Any]:
    """Return the content of result.json for the latest attempt. `status`: exit status of the job's step; `signalled`:
    whether the job received a signal; `slurm`: the job's state, without a `source` if Slurm lost it. None: unknown."""
    exits = run.read_exits()
    rank_states = [e.get("state") for e in exits]
    if status and set(rank_states) == {"completed"} and len(exits) >= _count_ranks(run):
        status = 0  # a step that Slurm lost, or an error after training
    is_preempted = "preempted" in rank_states
    state: RunState | None = run_state(slurm.state) if slurm is not None and slurm.ended else None
    if state is None or state == "completed" or (state == "failed" and slurm is not None and slurm.state == "FAILED"):
        if status == 0 or (status is None and state == "completed"):  # Slurm names no cause: ranks decide
            state = "completed" if not is_preempted else "cancelled" if signalled else "preempted"
        elif is_preempted and not signalled:
            state = "preempted"
        else:
            state = "cancelled" if signalled and "failed" not in rank_states else "failed"
    failure, is_local = FailedRank(), slurm is not None and slurm.source == "process"
    if state == "failed":
        hosts = run.read_run().get("hosts")
        rank_hosts = [str(host) for host in hosts] if isinstance(hosts, list) else []
        failure = find_failed_rank(exits, list(srun_errors), _count_ranks(run), rank_hosts)
        has_slurm_cause = slurm is not None and slurm.ended and (slurm.state != "FAILED" or not slurm.source)
        if is_full(run.path) and "failed" not in rank_states:  # no rank could record its error
            failure = FailedRank(error=f"{run.path}: {os.strerror(errno.ENOSPC)}; free some space and try again")
        elif failure.rank is None and slurm is not None and has_slurm_cause:
            details = (f" ({slurm.reason})" if slurm.reason else "") + (f" on {slurm.nodes}" if slurm.nodes else "")
            failure = FailedRank(error=f"Slurm reports {slurm.state}{details}")
    error = failure.error or _error_without_rank(run, state, status, exits, is_local)
    result = {"state": state, "exit_code": 0 if state == "completed" else status or 1, "error": error}
    result |= {"failed_rank": failure.rank, "failed_node": failure.node}
    return {**result, "log_tail": _log_tail(run, failure.rank, state), "final": final_figures(run)}


def _count_ranks(run: RunDirectory) -> int:
    """Return the number of ranks with a log, limited to the plan's number: an earlier attempt may have had more."""
    logs = len(list(run.logs.glob("rank-*.txt")))
    with contextlib.suppress(HolmesError, OSError):
        return min(logs, Plan.read(run.plan_path).world_size)
    return logs


def _error_without_rank(
    run: RunDirectory, state: RunState, status: int | None, exits: Sequence[Mapping[str, Any]], is_local: bool
) -> str | None:
    """Return why a run ended in `state` if no rank has an error; None if it completed. If there is no log at all, the
    nodes probably do not share the run directory. `exits`: the ranks' exit records, which may name a signal."""
    if state == "failed" and not any(run.logs.glob("rank-*.txt")) and not (run.logs / "batch.txt").exists():
        return f"no node wrote anything into {run.path}: is it on a file system that all nodes share?"
    unknown_cause = "the job ended before its batch script recorded the cause"
    if is_local and not exits:
        status, unknown_cause = None, f"the process that started the ranks ended without a record ({SIGKILL_CAUSES}?)"
    signals = [str(e["signal"]) for e in exits if e.get("signal")]
    is_at_limit = is_local and f"SIG{USER_SIGNAL}" in signals  # submitit sends it to local jobs only at the limit
    received = f"its ranks received {signals[0]}" if signals else state
    return {
        "completed": None,
        "failed": unknown_cause if status is None else f"the step ended with exit code {status}",
        "timeout": "time limit reached",
    }.get(state, "time limit reached (slurm.timeout_min)" if is_at_limit else received)


def _log_tail(run: RunDirectory, rank: int | None, state: str) -> list[str]:
    """Return the last log lines of the failed rank, or else of the batch script or srun; empty for a completed run."""
    if state == "completed":
        return []
    if rank is not None and (lines := last_log_lines(run.log_path(rank))):
        return lines
    batch_log = latest_attempt_log(run)
    return [] if batch_log is None else _printable(batch_log) or last_log_lines(run.logs / "srun.txt")


def final_figures(run: RunDirectory) -> dict[str, Any]:
    """Return {figure: value} of the last step; empty if there is no step or the metrics cannot be read."""
    last: dict[str, Any] = {}
    with contextlib.suppress(HolmesError):
        last = (run.metrics() or [last])[-1]
    return {figure: last[figure] for figure in FINAL_FIGURES if figure in last}
