"""Corrections of the planner's figures, fitted to measured runs.

The unknowns are the logarithms of the factors: one factor for each GPU kind and each network that the runs used. The
fit minimises the sum of squares of log(predicted / measured) over each run's step time and each stage's compute time.
If a run used several GPU kinds, the compute times of its stages tell their factors apart. A small weight on the
logarithms keeps a factor at 1 if no run identifies it, for example that of a network whose traffic overlaps with
computing (Levenberg, "A method for the solution of certain non-linear problems in least squares", 1944).
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

MAX_LOG_FACTOR = math.log(8.0)  # a larger factor means that the site is described wrongly
MIN_SLOPE = 0.03  # d residual / d log(factor); a factor with smaller slopes in all residuals is not fitted
DAMPING = 1e-3  # weight of a factor's logarithm
MAX_ITERATIONS = 12
STEP = 0.01  # change of a factor's logarithm to measure slopes


@dataclass(frozen=True)
class ObservedRun:
    """A measured run. `step_s`, `compute_s`: median seconds of a step, and of the computing of each stage in a step."""

    name: str
    plan: Plan
    costs: Costs
    step_s: float
    compute_s: tuple[float, ...]


@dataclass(frozen=True)
class CorrectionFit:
    """Fitted corrections and their quality.
    `runs`: number of runs. `error_before`, `error_after`: mean relative error of the predicted step times, without and
    with the corrections. `unidentified`: GPU kinds and networks whose factors the runs do not determine."""

    corrections: Corrections
    runs: int
    error_before: float
    error_after: float
    unidentified: tuple[str, ...]


def fit_corrections(runs: Sequence[ObservedRun]) -> CorrectionFit:
    """Fit corrections to `runs`, which must not be empty."""
    transports = {g.transport for r in runs for g in r.plan.transports()}
    gpus = {r.plan.site.pool(c.pool).gpu for r in runs if not r.costs.pace_layer_ms for c in r.plan.components}
    networks = {str(t.nic) for t in transports if t.nic is not None}
    names = sorted({*(("compute", gpu.name) for gpu in gpus), *(("rates", network) for network in networks)})
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
    errors = np.abs(np.expm1([first_residuals, _residuals(runs, names, logs)]))
    error_before, error_after = errors[:, : len(runs)].mean(axis=1).tolist()  # the residuals of steps come first
    corrections = _corrections(names, logs * is_identified)
    notes = tuple(_notes(corrections, runs, error_before, error_after))
    unidentified = tuple(name for (_, name), identified in zip(names, is_identified, strict=True) if not identified)
    return CorrectionFit(replace(corrections, notes=notes), len(runs), error_before, error_after, unidentified)


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
    """Return log(predicted / measured) of each run's step time, then of its stages, which weigh as much together."""
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
    """Return the seconds that each stage computes in a step. As in a run's metrics, it is the mean over its ranks."""
    replicas = timing(layout, layers).replicas
    weights = [layout.pipelines(stages[0]) for stages in layout.replicas]
    seconds = np.array([d.compute()[0].sum(axis=1) for d in replicas]) * layout.order.micro_batches
    return np.average(seconds, axis=0, weights=weights).tolist()
