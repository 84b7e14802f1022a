"""The time limit of a run's job, compared with its predicted training time and the limits of its partitions."""

import math
from collections.abc import Iterator, Sequence

from holmes_hpc.config.slurm_settings import PoolSettings, SlurmSettings
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import duration
from holmes_hpc.slurm.scontrol import Partition, minutes
from holmes_hpc.submission.executor.batch_script import SIGNAL_DELAY_S
from holmes_hpc.submission.executor.component import ComponentRequest
from holmes_hpc.submission.executor.preflight import TIME_LIMIT_HINT, time_limit_error

START_UP_S = 60.0  # from a job's start to its first step: environment modules, imports, process groups


def steps_per_job(plan: Plan, timeout_min: int | str) -> float:
    """Return how many steps a job makes until its time limit is near; inf if the limit or the step time is unknown."""
    limit_min, step_s = minutes(timeout_min), plan.predicted.step_time_s if plan.predicted else None
    if limit_min is None or not step_s:
        return math.inf
    signal_delay_s = max(0, min(SIGNAL_DELAY_S, 60 * limit_min - 90))
    return math.floor((60 * limit_min - START_UP_S - signal_delay_s) / step_s)


def requeue_warning(plan: Plan, steps: int, timeout_min: int | str) -> str | None:
    """Return a warning, with the number of requeues, if the time limit ends the job before `steps` steps; else None."""
    steps_per_attempt = steps_per_job(plan, timeout_min)
    if plan.predicted is None or steps <= steps_per_attempt:
        return None
    end = "ends before its first step"
    if steps_per_attempt >= 1:
        requeues = math.ceil(steps / steps_per_attempt) - 1
        end = f"is requeued about {requeues:,} time{'s' * (requeues > 1)}"
    need = f"{steps:,} steps take {duration(steps * plan.predicted.step_time_s / 86400)}"
    return f"slurm.timeout_min is {timeout_min}, and {need}: the job {end}; increase the time limit"


def partition_warnings(plan: Plan, settings: SlurmSettings, partitions: Sequence[Partition]) -> Iterator[str]:
    """Yield a warning for each component of `plan` whose partition has a lower time limit than the job."""
    for part in plan.components:
        pool_settings = (settings.pools or {}).get(part.pool) or PoolSettings()
        request = ComponentRequest(partition=part.partition, qos=pool_settings.qos or settings.qos)
        if error := time_limit_error(request, settings.timeout_min, partitions):
            yield f"slurm.timeout_min: pool {part.pool}: {error}; {TIME_LIMIT_HINT}"
