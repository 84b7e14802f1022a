"""Which plan ends first? Slurm says when each could start, the Plan how long it takes; no job is submitted."""

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
START_UP_S = 60.0  # from a job's start to its first step: modules, imports, process groups


@dataclass(frozen=True)
class PlannedStart:
    """A plan with its start (epoch seconds), training time and end; or `reason`, why it cannot run at all.
    `timeout_min`: the time limit that Slurm was asked with, and that a submission needs to start then."""

    plan: Plan
    start: float | None
    duration_s: float
    timeout_min: int
    reason: str = ""

    @property
    def end(self) -> float | None:
        return None if self.start is None else self.start + self.duration_s

    def to_dict(self) -> dict[str, Any]:
        """Plain data; times as ISO 8601 with the offset of this machine's clock."""

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


def plans_to_try(plan_for: Callable[[dict[str, int] | None], Plan], site: Site, most: int = 16) -> list[Plan]:
    """The best plan, and the best ones for parts of the site: every choice of fabrics, with all, half and a quarter of
    their nodes, largest first. `plan_for` plans for the given nodes (fabric -> nodes; None: free); what it finds
    impossible is left out."""
    found = {(best := plan_for(None)).id: best}
    parts = {
        tuple((f.name, max(1, f.nodes // share)) for f in chosen)
        for share in (1, 2, 4)
        for size in range(1, len(site.fabrics) + 1)
        for chosen in combinations(site.fabrics, size)
    }
    for part in sorted(parts, key=lambda part: (-sum(nodes for _, nodes in part), part)):
        if len(found) >= most:
            break
        with contextlib.suppress(PlanError, ConfigError):
            plan = plan_for(dict(part))
            found.setdefault(plan.id, plan)
    return list(found.values())


def training_time_s(plan: Plan, steps: int) -> float:
    """Predicted seconds from start to the end of `steps` steps."""
    if plan.predicted is None:
        raise SubmissionError("the plan holds no prediction", where="plan", hint="make it again with `holmes plan`")
    return START_UP_S + steps * plan.predicted.step_time_s


def slurm_start(requests: Sequence[ComponentRequest], timeout_min: int) -> float:
    """When Slurm could start these components together (epoch seconds). Each is tested alone first: an infeasible one
    inside a heterogeneous job can crash an old controller."""
    check_components(requests, timeout_min=timeout_min)
    job = JobRequest(tuple(requests), timeout_min=timeout_min, output="/dev/null")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "job.sh"
        path.write_text(script_text(job, "true"), encoding="utf-8")
        answer = slurm_with_retries(["sbatch", "--test-only", str(path)])
    start, where = start_time(answer), "sbatch --test-only"
    if not start:
        raise SubmissionError(answer.reason, where=where, hint="ask for less")
    try:
        return max(datetime.fromisoformat(start).timestamp(), time.time())  # a moment that has passed means now
    except ValueError as e:
        raise SubmissionError(f"start time {start!r}", where=where, hint="unset SLURM_TIME_FORMAT") from e


def earliest(plans: Sequence[Plan], steps: int, settings: SlurmSettings) -> list[PlannedStart]:
    """Candidates by end of training, those that cannot run last. A plan's own time limit is its predicted time with
    half as much again, at least five minutes and at most the settings' `timeout_min`: a short job can start in a gap
    that a long one cannot."""
    found, most = [], minutes(settings.timeout_min)
    for plan in plans:
        duration = training_time_s(plan, steps)
        limit = max(SHORTEST_MIN, round(duration * 1.5 / 60 + 0.5))
        limit = limit if most is None else min(int(most), limit)
        try:
            if most is not None and duration > 60 * most:
                raise SubmissionError(f"needs {duration / 60:.0f} min", where="slurm.timeout_min", hint="raise it")
            found.append(PlannedStart(plan, slurm_start(plan_components(plan, settings), limit), duration, limit))
        except SubmissionError as e:
            found.append(PlannedStart(plan, None, duration, limit, str(e)))
    return sorted(found, key=lambda c: (c.end is None, c.end or 0.0))


def start_rows(starts: Sequence[PlannedStart]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of those that can run: what runs where, start, duration, end."""

    def clock(seconds: float) -> str:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")

    rows = [
        [
            nodes_of(start.plan),
            f"PP {p.pp} by stage" if start.plan.is_per_stage else f"TP {p.tp} PP {p.pp} DP {p.dp}",
            clock(start.start),
            f"{start.duration_s / 60:.1f} min",
            clock(start.end),
        ]
        for start in starts
        for p in [start.plan.parallel]
        if start.start is not None and start.end is not None
    ]
    return ["nodes", "layout", "start", "duration", "end"], rows


def nodes_of(plan: Plan) -> str:
    """``ib-a: 4, roce-a: 2``"""
    return ", ".join(f"{c.fabric}: {c.nodes}" for c in plan.components)
