"""Corrections of the planner's figures from runs that it predicted: those under which the steps come out as measured.

Unknown are the logarithms of one factor for each kind of GPU and each network that the runs used. What is made small is
the sum of squares of log(predicted / measured): of each run's step, and of the time that each of its stages computes,
which tells apart GPUs of several kinds in one run. A small weight on the logarithms themselves keeps at 1 what no run
shows, such as a network whose traffic computing hides (Levenberg, "A method for the solution of certain non-linear
problems in least squares", 1944, with a fixed damping).
"""

from __future__ import annotations

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

MOST = math.log(8.0)  # a factor further from 1 would be a wrong site, not a correction
SHOWS = 0.03  # slope of a step's logarithm over a factor's: what has less in every run is not learned
SMALL = 1e-3  # weight of a factor's own logarithm
ROUNDS = 12
DELTA = 0.01


@dataclass(frozen=True)
class Observed:
    """One run: its plan, what the planner says that things cost there, the median seconds of a step, and those that
    each of its stages computed in it."""

    name: str
    plan: Plan
    costs: Costs
    step_s: float
    compute_s: tuple[float, ...]


@dataclass(frozen=True)
class Learned:
    """`before`, `after`: mean error of the runs' steps, without the corrections and with them; `hidden`: what the runs
    used and did not show."""

    corrections: Corrections
    runs: int
    before: float
    after: float
    hidden: tuple[str, ...]


def learn(runs: Sequence[Observed]) -> Learned:
    """The corrections that `runs`, one at least, ask for."""
    used = {g.transport for r in runs for g in r.plan.transports()}
    gpus = {r.plan.site.fabric(c.fabric).gpu for r in runs if not r.costs.pace_layer_ms for c in r.plan.components}
    names = sorted(
        {*(("compute", gpu.name) for gpu in gpus), *(("rates", str(t.nic)) for t in used if t.nic is not None)}
    )
    at = np.zeros(len(names))
    start = _residuals(runs, names, at)
    slopes = _slopes(runs, names, at, start)
    seen = (np.abs(slopes) > SHOWS).any(axis=0)
    for _ in range(ROUNDS):
        now = _residuals(runs, names, at)
        slopes = _slopes(runs, names, at, now) * seen
        system = np.vstack([slopes, SMALL * np.eye(len(names))])
        change = np.linalg.lstsq(system, -np.concatenate([now, SMALL * at]), rcond=None)[0]
        at = np.clip(at + np.clip(change, -1, 1), -MOST, MOST)
        if np.abs(change).max(initial=0.0) < 1e-4:
            break
    steps = len(runs)  # residuals of steps come first
    before, after = (float(np.mean(np.abs(np.expm1(r[:steps])))) for r in (start, _residuals(runs, names, at)))
    made = _corrections(names, at * seen)
    return Learned(
        replace(made, notes=tuple(_notes(made, runs, before, after))),
        len(runs),
        before,
        after,
        tuple(name for (_, name), shown in zip(names, seen, strict=True) if not shown),
    )


def _notes(made: Corrections, runs: Sequence[Observed], before: float, after: float) -> list[str]:
    said = [f"{name} computes {factor:.2f} times as long" for name, factor in made.compute.items()]
    said += [f"{name} reaches {factor:.2f} times the rate" for name, factor in made.rates.items()]
    said = [text for text in said if " 1.00 " not in text]
    named = ", ".join(r.name for r in runs[:4]) + (", …" if len(runs) > 4 else "")
    return [
        f"learned from {len(runs)} run{'s' * (len(runs) != 1)} ({named}): {'; '.join(said) or 'nothing'}; their"
        f" steps were {before:.1%} off without it, {after:.1%} with it"
    ]


def _corrections(names: Sequence[tuple[str, str]], at: np.ndarray) -> Corrections:
    found: dict[str, dict[str, float]] = {"compute": {}, "rates": {}}
    for (what, name), value in zip(names, at.tolist(), strict=True):
        if value:
            found[what][name] = math.exp(value)
    return Corrections(found["compute"], found["rates"])


def _residuals(runs: Sequence[Observed], names: Sequence[tuple[str, str]], at: np.ndarray) -> np.ndarray:
    """log(predicted / measured): of all steps, then of what each stage computes, which weighs as much as one step in
    each run."""
    made = _corrections(names, at)
    steps, stages = [], []
    for run in runs:
        layout = Layout.of(run.plan, replace(run.costs, corrections=made))
        layers = layer_array(run.plan)
        steps.append(math.log(float(step_s(layout, layers)[0]) / run.step_s))
        for predicted, measured in zip(computing_s(layout, layers), run.compute_s, strict=False):
            if measured > 0 and run.costs.pace_layer_ms is None:
                stages.append(math.log(predicted / measured) / math.sqrt(len(run.compute_s)))
    return np.array(steps + stages)


def _slopes(runs: Sequence[Observed], names: Sequence[tuple[str, str]], at: np.ndarray, now: np.ndarray) -> np.ndarray:
    columns = []
    for i in range(len(names)):
        moved = at.copy()
        moved[i] += DELTA
        columns.append((_residuals(runs, names, moved) - now) / DELTA)
    return np.array(columns).T.reshape(len(now), len(names))


def computing_s(layout: Layout, layers: np.ndarray) -> list[float]:
    """Seconds of a step that each stage computes, as metrics have it: the mean over its ranks."""
    replicas = timing(layout, layers).replicas
    weights = [layout.pipelines(stages[0]) for stages in layout.replicas]
    each = np.array([(d.forward + d.backward)[0].sum(axis=1) for d in replicas]) * layout.order.micro_batches
    return np.average(each, axis=0, weights=weights).tolist()
