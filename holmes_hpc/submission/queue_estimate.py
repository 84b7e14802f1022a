"""Queue estimates: the plan that would end first, from Slurm's estimated start and the predicted training time.

No job is submitted.
"""

from __future__ import annotations

import contextlib
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
from holmes_hpc.slurm.commands import slurm_with_retries
from holmes_hpc.slurm.scontrol import minutes
from holmes_hpc.submission.executor.batch_script import JobRequest, script_text
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.preflight import check_components, start_time
from holmes_hpc.submission.plan_job import plan_components

SHORTEST_MIN = 5
START_UP_S = 60.0  # from a job's start to its first step: environment modules, imports, process groups


@dataclass(frozen=True)
class QueueEstimate:
    """A plan with its estimated start and end (epoch seconds) and training time; or the `reason` why it cannot run.
    `timeout_min`: the time limit that Slurm assumed, which the submission needs too."""

    plan: Plan
    start: float | None
    duration_s: float
    timeout_min: int
    reason: str = ""

    @property
    def end(self) -> float | None:
        return None if self.start is None else self.start + self.duration_s

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with times as ISO 8601 in this machine's time zone."""

        def iso(seconds: float | None) -> str | None:
            return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat("T", "seconds")

        return {
            "plan_id": self.plan.id,
            "nodes": {c.fabric: c.nodes for c in self.plan.components},
            "start": iso(self.start),
            "duration_s": self.duration_s,
            "end": iso(self.end),
            "timeout_min": self.timeout_min,
            "why_not": self.reason or None,
        }


def candidate_plans(plan_for: Callable[[dict[str, int] | None], Plan], site: Site, max_plans: int = 16) -> list[Plan]:
    """Return the best plan, and the best ones for parts of the site, largest part first.

    The parts are all sets of fabrics, with all, half and a quarter of their nodes. `plan_for` plans for a mapping of
    fabric to nodes (None: any). Parts for which it raises an error are skipped."""
    plans = {(best := plan_for(None)).id: best}
    parts = {
        tuple((f.name, max(1, f.nodes // share)) for f in fabrics)
        for share in (1, 2, 4)
        for size in range(1, len(site.fabrics) + 1)
        for fabrics in combinations(site.fabrics, size)
    }
    for part in sorted(parts, key=lambda part: (-sum(nodes for _, nodes in part), part)):
        if len(plans) >= max_plans:
            break
        with contextlib.suppress(PlanError, ConfigError):
            plan = plan_for(dict(part))
            plans.setdefault(plan.id, plan)
    return list(plans.values())


def training_time_s(plan: Plan, steps: int) -> float:
    """Return the predicted seconds from the job's start to the end of `steps` steps."""
    if plan.predicted is None:
        raise SubmissionError("the plan has no prediction", where="plan", hint="create it again with `holmes plan`")
    return START_UP_S + steps * plan.predicted.step_time_s


def slurm_start_time(requests: Sequence[ComponentRequest], timeout_min: int) -> float:
    """Return when Slurm could start these components together (epoch seconds).
    Test each alone first, because an infeasible one in a heterogeneous job can crash an old controller."""
    check_components(requests, timeout_min=timeout_min)
    job = JobRequest(tuple(requests), timeout_min=timeout_min, output="/dev/null")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "job.sh"
        path.write_text(script_text(job, "true"), encoding="utf-8")
        answer = slurm_with_retries(["sbatch", "--test-only", str(path)])
    start, where = start_time(answer), "sbatch --test-only"
    if not start:
        raise SubmissionError(answer.reason, where=where, hint="request fewer resources")
    try:
        return max(datetime.fromisoformat(start).timestamp(), time.time())  # a time in the past means now
    except ValueError as e:
        raise SubmissionError(f"start time {start!r}", where=where, hint="unset SLURM_TIME_FORMAT") from e


def estimate_ends(plans: Sequence[Plan], steps: int, settings: SlurmSettings) -> list[QueueEstimate]:
    """Return the plans' estimates by end of training, those that cannot run last.

    A plan's time limit is 1.5 times its predicted time, at least five minutes and at most the settings' `timeout_min`.
    A short job can start in a gap that is too short for a long one."""
    estimates, max_minutes = [], minutes(settings.timeout_min)
    for plan in plans:
        duration = training_time_s(plan, steps)
        limit = max(SHORTEST_MIN, round(duration * 1.5 / 60 + 0.5))
        limit = limit if max_minutes is None else min(int(max_minutes), limit)
        try:
            if max_minutes is not None and duration > 60 * max_minutes:
                raise SubmissionError(
                    f"training needs {duration / 60:.0f} min", where="slurm.timeout_min", hint="raise it"
                )
            estimates.append(
                QueueEstimate(plan, slurm_start_time(plan_components(plan, settings), limit), duration, limit)
            )
        except SubmissionError as e:
            estimates.append(QueueEstimate(plan, None, duration, limit, str(e)))
    return sorted(estimates, key=lambda e: (e.end is None, e.end or 0.0))


def estimate_rows(estimates: Sequence[QueueEstimate]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and cells of a table of the plans that can run."""

    def clock(seconds: float) -> str:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")

    rows = [
        [
            nodes_text(e.plan),
            f"PP {p.pp} by stage" if e.plan.is_per_stage else f"TP {p.tp} PP {p.pp} DP {p.dp}",
            clock(e.start),
            f"{e.duration_s / 60:.1f} min",
            clock(e.end),
        ]
        for e in estimates
        for p in [e.plan.parallel]
        if e.start is not None and e.end is not None
    ]
    return ["nodes", "layout", "start", "duration", "end"], rows


def nodes_text(plan: Plan) -> str:
    """Return the plan's nodes by fabric: ``ib-a: 4, roce-a: 2``."""
    return ", ".join(f"{c.fabric}: {c.nodes}" for c in plan.components)
