"""Queue estimates: when each of several plans would end, from Slurm's estimated start and the predicted training time.

No job is submitted.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holmes_hpc.config.slurm_settings import SlurmSettings
from holmes_hpc.errors import ConfigError, PlanError, SubmissionError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import duration
from holmes_hpc.slurm.commands import slurm_with_retries
from holmes_hpc.slurm.scontrol import minutes
from holmes_hpc.submission.elastic.members import CHANGE_S
from holmes_hpc.submission.executor.batch_script import JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.preflight import check_components, start_time, try_component
from holmes_hpc.submission.plan_job import plan_components
from holmes_hpc.submission.time_limit import START_UP_S

MIN_TIMEOUT_MIN = 5  # the least time limit of an estimate


@dataclass(frozen=True)
class QueueEstimate:
    """The estimate for one plan. `start`, `end`: of its job in Unix seconds, None if the job cannot run; `reason`: why
    it cannot; `duration_s`: seconds from start to end; `timeout_min`: assumed time limit of the job in minutes."""

    plan: Plan
    start: float | None
    duration_s: float
    timeout_min: int
    reason: str = ""

    @property
    def end(self) -> float | None:
        return None if self.start is None else self.start + self.duration_s

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON values, with times as ISO 8601 in this machine's time zone."""
        times = {"start": iso(self.start), "duration_s": self.duration_s, "end": iso(self.end)}
        reason = {"reason": self.reason or None, "why_not": self.reason or None}  # the second one is deprecated
        nodes = {c.pool: c.nodes for c in self.plan.components}
        return {"plan_id": self.plan.id, "nodes": nodes, **times, "timeout_min": self.timeout_min, **reason}


def iso(seconds: float | None) -> str | None:
    """Return a time, in Unix seconds, as ISO 8601 in this machine's time zone."""
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat("T", "seconds")


def candidate_plans(plan_for: Callable[[dict[str, int] | None], Plan], site: Site, max_plans: int = 16) -> list[Plan]:
    """Return the best plan for the whole site, then the best plans for parts of it, the largest part first.

    A part is any set of pools with all, half or a quarter of their nodes. `plan_for`: returns the best plan for
    {pool: number of nodes}, or for the whole site (None). Parts for which it raises an error are skipped."""
    plans = {(best := plan_for(None)).id: best}
    sets = [pools for size in range(1, len(site.pools) + 1) for pools in combinations(site.pools, size)]
    parts = {tuple((pool.name, max(1, pool.nodes // share)) for pool in pools) for pools in sets for share in (1, 2, 4)}
    for part in sorted(parts, key=lambda part: (-sum(nodes for _, nodes in part), part)):
        if len(plans) >= max_plans:
            break
        with contextlib.suppress(PlanError, ConfigError):
            plan = plan_for(dict(part))
            plans.setdefault(plan.id, plan)
    return list(plans.values())


def training_time_s(plan: Plan, steps: int) -> float:
    """Return the predicted seconds from the start of the job to the end of `steps` steps."""
    if plan.predicted is None:
        raise SubmissionError("the plan has no prediction", where="plan", hint="create it again with `holmes plan`")
    return START_UP_S + steps * plan.predicted.step_time_s


def slurm_start_time(requests: Sequence[ComponentRequest], timeout_min: int | str) -> float:
    """Return when Slurm could start a job of these components, in Unix seconds. Raise SubmissionError if it cannot.
    Call :func:`check_components` first, because an infeasible component can crash old controllers."""
    if len(requests) == 1:
        answer = try_component(requests[0], timeout_min=timeout_min)
    else:
        job = JobRequest(tuple(requests), timeout_min=timeout_min, output="/dev/null")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "job.sh"
            path.write_text(script_text(job, "true"), encoding="utf-8")
            answer = slurm_with_retries(["sbatch", "--test-only", str(path)])
    start, where = start_time(answer), "sbatch --test-only"
    if not start:
        raise SubmissionError(answer.reason, where=where, hint="request fewer resources")
    problem, hint = f"the start time {start!r} is not in ISO 8601", "unset SLURM_TIME_FORMAT"
    with SubmissionError.instead_of(ValueError, where=where, hint=hint, what=problem):
        return max(datetime.fromisoformat(start).timestamp(), time.time())  # a time in the past means now


def expected_start(plan: Plan, settings: SlurmSettings) -> tuple[float | None, str]:
    """Return (expected start of the job of `plan` in Unix seconds, None if Slurm estimates none; a text on the start).
    Raise SubmissionError as :func:`check_components` does."""
    requests = plan_components(plan, settings)
    check_components(requests, timeout_min=settings.timeout_min)
    try:
        start = slurm_start_time(requests, settings.timeout_min)
    except SubmissionError as e:
        return None, f"Slurm estimates no start: {e.what}"
    wait_s = start - time.time()
    return start, f"expected start: {'now' if wait_s < 60 else f'{clock(start)}, in {duration(wait_s / 86400)}'}"


def estimate_ends(plans: Sequence[Plan], steps: int, settings: SlurmSettings) -> list[QueueEstimate]:
    """Return the estimates of the plans in order of their end. Plans that cannot run come last.

    A plan's time limit is 1.5 times its predicted duration, at least MIN_TIMEOUT_MIN and at most the settings'
    `timeout_min`. With a short time limit, Slurm may start the job in a gap between others."""
    estimates, max_minutes = [], minutes(settings.timeout_min)
    for plan in plans:
        start: float | None = None
        duration_s, reason = training_time_s(plan, steps), ""
        timeout_min = max(MIN_TIMEOUT_MIN, round(duration_s * 1.5 / 60 + 0.5))
        timeout_min = timeout_min if max_minutes is None else min(int(max_minutes), timeout_min)
        try:
            if max_minutes is not None and duration_s > 60 * max_minutes:
                problem = f"training needs {duration_s / 60:.0f} min"
                raise SubmissionError(problem, where="slurm.timeout_min", hint="increase it")
            requests = plan_components(plan, settings)
            check_components(requests, timeout_min=timeout_min)
            start = slurm_start_time(requests, timeout_min)
        except SubmissionError as e:
            reason = str(e)
        estimates.append(QueueEstimate(plan, start, duration_s, timeout_min, reason))
    return sorted(estimates, key=lambda estimate: (estimate.end is None, estimate.end or 0.0))


def member_starts(estimates: Sequence[QueueEstimate], steps: int) -> tuple[dict[str, float], float] | None:
    """Return ({pool: its start}, the end of `steps` steps), in Unix seconds, if each pool of the largest plan is a
    separate job (elastic.members). None if a plan or a start is missing for a set of pools that would train."""
    by_nodes = {frozenset((c.pool, c.nodes) for c in e.plan.components): e for e in estimates}
    largest = max(by_nodes, key=lambda nodes: (len(nodes), sum(count for _, count in nodes)))
    single = {part: by_nodes.get(frozenset([part])) for part in largest}
    starts = {part: e.start for part, e in single.items() if e is not None and e.start is not None}
    if len(starts) < max(2, len(largest)):
        return None
    order = sorted(starts, key=lambda part: (starts[part], part))
    now, left = starts[order[0]] + START_UP_S, float(steps)
    for count in range(1, len(order) + 1):
        estimate = by_nodes.get(frozenset(order[:count]))
        if estimate is None or estimate.plan.predicted is None:
            return None
        step_s = estimate.plan.predicted.step_time_s
        joins_at = starts[order[count]] if count < len(order) else math.inf
        if now + left * step_s <= joins_at:
            return {pool: starts[pool, n] for pool, n in order[:count]}, now + left * step_s
        left -= max(0.0, joins_at - now) / step_s
        now = max(now, joins_at) + CHANGE_S
    return None


def clock(seconds: float) -> str:
    """Return a time, in Unix seconds, as text in this machine's time zone."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def estimate_rows(estimates: Sequence[QueueEstimate]) -> tuple[list[str], list[list[str]]]:
    """Return (columns, rows) of a table of the plans that can run."""
    rows = []
    for e in estimates:
        p = e.plan.parallel
        layout = f"TP {p.tp} PP {p.pp} DP {p.replicas}" if p.is_even else f"PP {p.pp}, TP and DP per stage"
        if e.start is not None and e.end is not None:
            times = [clock(e.start), f"{e.duration_s / 60:.1f} min", clock(e.end)]
            rows.append([nodes_text(e.plan), layout, *times])
    return ["nodes", "layout", "start", "duration", "end"], rows


def nodes_text(plan: Plan) -> str:
    """Return the plan's number of nodes of each pool as text: ``ib-a: 4, roce-a: 2``."""
    return ", ".join(f"{c.pool}: {c.nodes}" for c in plan.components)
