"""Corrections of the planner's figures, fitted to measured runs.

The unknowns are the logarithms of one factor per GPU kind and network of the runs. The fit minimises the sum of squares
of log(predicted / measured) over each run's step time and each stage's compute time. The stages' times tell apart
several GPU kinds of one run. A small weight on the logarithms keeps factors at 1 that no run identifies, such as that
of a network whose traffic overlaps with computing (Levenberg, "A method for the solution of certain non-linear problems
in least squares", 1944, with a fixed damping).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holmes_hpc.planning.cost.calibration import Corrections
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.timing import step_s, timing
from holmes_hpc.planning.plan.plan import Plan

MAX_LOG_FACTOR = math.log(8.0)  # a larger factor means a wrong site
MIN_SLOPE = 0.03  # d log(step) / d log(factor): a factor with less in every run is not fitted
DAMPING = 1e-3  # weight of a factor's logarithm
MAX_ITERATIONS = 12
STEP = 0.01  # of a logarithm, for numerical slopes


@dataclass(frozen=True)
class ObservedRun:
    """A measured run: its plan, its costs, the median seconds of a step and of each stage's computing."""

    name: str
    plan: Plan
    costs: Costs
    step_s: float
    compute_s: tuple[float, ...]


@dataclass(frozen=True)
class CorrectionFit:
    """Fitted corrections and their quality.
    `error_before`, `error_after`: mean error of the runs' step times without and with the corrections.
    `unidentified`: factors of GPU kinds and networks that the runs used but do not determine."""

    corrections: Corrections
    runs: int
    error_before: float
    error_after: float
    unidentified: tuple[str, ...]


def fit_corrections(runs: Sequence[ObservedRun]) -> CorrectionFit:
    """Fit corrections to `runs`, at least one."""
    transports = {g.transport for r in runs for g in r.plan.transports()}
    gpus = {r.plan.site.pool(c.pool).gpu for r in runs if not r.costs.pace_layer_ms for c in r.plan.components}
    names = sorted(
        {*(("compute", gpu.name) for gpu in gpus), *(("rates", str(t.nic)) for t in transports if t.nic is not None)}
    )
    logs = np.zeros(len(names))
    first_residuals = _residuals(runs, names, logs)
    slopes = _slopes(runs, names, logs, first_residuals)
    is_identified = (np.abs(slopes) > MIN_SLOPE).any(axis=0)
    for _ in range(MAX_ITERATIONS):
        residuals = _residuals(runs, names, logs)
        slopes = _slopes(runs, names, logs, residuals) * is_identified
        system = np.vstack([slopes, DAMPING * np.eye(len(names))])
        change = np.linalg.lstsq(system, -np.concatenate([residuals, DAMPING * logs]), rcond=None)[0]
        logs = np.clip(logs + np.clip(change, -1, 1), -MAX_LOG_FACTOR, MAX_LOG_FACTOR)
        if np.abs(change).max(initial=0.0) < 1e-4:
            break
    steps = len(runs)  # the residuals of steps come first
    error_before, error_after = (
        float(np.mean(np.abs(np.expm1(r[:steps])))) for r in (first_residuals, _residuals(runs, names, logs))
    )
    corrections = _corrections(names, logs * is_identified)
    return CorrectionFit(
        replace(corrections, notes=tuple(_notes(corrections, runs, error_before, error_after))),
        len(runs),
        error_before,
        error_after,
        tuple(name for (_, name), identified in zip(names, is_identified, strict=True) if not identified),
    )


def _notes(corrections: Corrections, runs: Sequence[ObservedRun], error_before: float, error_after: float) -> list[str]:
    changes = [f"compute time on {name} x{factor:.2f}" for name, factor in corrections.compute.items()]
    changes += [f"rate of {name} x{factor:.2f}" for name, factor in corrections.rates.items()]
    changes = [text for text in changes if not text.endswith("x1.00")]
    run_names = ", ".join(r.name for r in runs[:4]) + (", …" if len(runs) > 4 else "")
    return [
        f"corrections from {len(runs)} run{'s' * (len(runs) != 1)} ({run_names}): {'; '.join(changes) or 'none'}; error"
        f" of their step times: {error_before:.1%} without, {error_after:.1%} with them"
    ]


def _corrections(names: Sequence[tuple[str, str]], logs: np.ndarray) -> Corrections:
    factors: dict[str, dict[str, float]] = {"compute": {}, "rates": {}}
    for (group, name), value in zip(names, logs.tolist(), strict=True):
        if value:
            factors[group][name] = math.exp(value)
    return Corrections(factors["compute"], factors["rates"])


def _residuals(runs: Sequence[ObservedRun], names: Sequence[tuple[str, str]], logs: np.ndarray) -> np.ndarray:
    """Return log(predicted / measured) of all steps, then of each stage's compute time.
    The stages of a run weigh as much as its step."""
    corrections = _corrections(names, logs)
    steps, stages = [], []
    for run in runs:
        layout = Layout.of(run.plan, replace(run.costs, corrections=corrections))
        layers = layer_array(run.plan)
        steps.append(math.log(float(step_s(layout, layers)[0]) / run.step_s))
        for predicted, measured in zip(stage_compute_s(layout, layers), run.compute_s, strict=False):
            if measured > 0 and run.costs.pace_layer_ms is None:
                stages.append(math.log(predicted / measured) / math.sqrt(len(run.compute_s)))
    return np.array(steps + stages)


def _slopes(
    runs: Sequence[ObservedRun], names: Sequence[tuple[str, str]], logs: np.ndarray, residuals: np.ndarray
) -> np.ndarray:
    columns = []
    for i in range(len(names)):
        changed = logs.copy()
        changed[i] += STEP
        columns.append((_residuals(runs, names, changed) - residuals) / STEP)
    return np.array(columns).T.reshape(len(residuals), len(names))


def stage_compute_s(layout: Layout, layers: np.ndarray) -> list[float]:
    """Return the seconds that each stage computes in a step, as in the metrics: the mean over its ranks."""
    replicas = timing(layout, layers).replicas
    weights = [layout.pipelines(stages[0]) for stages in layout.replicas]
    seconds = np.array([d.compute()[0].sum(axis=1) for d in replicas]) * layout.order.micro_batches
    return np.average(seconds, axis=0, weights=weights).tolist()
