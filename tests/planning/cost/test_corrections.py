"""Runs simulated with known factors give these factors back as corrections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import A100, H100, one_fabric

from holmes_hpc.config.composition import load
from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning import request
from holmes_hpc.planning.cost.calibration import Corrections
from holmes_hpc.planning.cost.corrections import ObservedRun, fit_corrections, stage_compute_s
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array, predict
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.records.run import RunDirectory

pytestmark = pytest.mark.integration

MODEL, BATCH = named("gpt_3_6b"), Batch(128, 2, 2048)
SITE = Site(
    "two",
    tuple(
        replace(one_fabric(gpu, name, 2), ethernet_gbps=5, rdma_gbps=100) for name, gpu in (("a", A100), ("h", H100))
    ),
)
LAYOUTS = (
    PlanOptions(tp=1, pp=2, dp=16, schedule="1f1b"),
    PlanOptions(tp=2, pp=1, dp=8, nodes={"a": 2}),
    PlanOptions(tp=1, pp=1, dp=16, nodes={"h": 2}),
)
PLANS = [fixed_plan(MODEL, BATCH, SITE, options, Costs()) for options in LAYOUTS]


def simulated(plan: Plan, corrections: Corrections, costs: Costs = Costs()) -> ObservedRun:
    """Return a run with the predictor's times under the given factors."""
    corrected = replace(costs, corrections=corrections)
    layout, layers = Layout.of(plan, corrected), layer_array(plan)
    return ObservedRun(
        "made up", plan, costs, predict(plan, corrected).step_time_s, tuple(stage_compute_s(layout, layers))
    )


@settings(max_examples=12, deadline=None)
@given(st.floats(0.5, 2.5), st.floats(0.5, 2.5), st.floats(0.4, 1.5), st.floats(0.4, 1.5))
def test_the_fit_recovers_the_factors_of_simulated_runs(a100: float, h100: float, ethernet: float, ib: float) -> None:
    true = Corrections({A100.name: a100, H100.name: h100}, {"ethernet": ethernet, "ib": ib})
    fit = fit_corrections([simulated(plan, true) for plan in PLANS])
    corrections = fit.corrections
    assert corrections.compute == {A100.name: pytest.approx(a100, rel=0.02), H100.name: pytest.approx(h100, rel=0.02)}
    for name, factor in {"ethernet": ethernet, "ib": ib}.items():
        assert name in fit.unidentified or corrections.rates[name] == pytest.approx(factor, rel=0.05), name
    assert fit.error_after < 0.005 and fit.error_after <= fit.error_before
    assert "ethernet" not in fit.unidentified  # transfers over 5 Gb/s are exposed


def test_unidentified_factors_stay_at_one() -> None:
    plan = fixed_plan(
        MODEL,
        BATCH,
        Site("fast", (replace(one_fabric(A100, "a", 2), rdma_gbps=3200),)),
        PlanOptions(tp=1, pp=1, dp=16),
        Costs(),
    )
    fit = fit_corrections([simulated(plan, Corrections({A100.name: 1.3}))])
    assert fit.corrections.compute == {A100.name: pytest.approx(1.3, rel=0.01)}
    assert "ib" in fit.unidentified and not fit.corrections.rates


def test_runs_with_emulated_compute_correct_only_networks() -> None:
    true = Corrections(rates={"ethernet": 0.5})
    paced = Costs(pace_layer_ms=5)
    plans = [fixed_plan(MODEL, BATCH, SITE, options, paced) for options in LAYOUTS[:2]]
    fit = fit_corrections([simulated(plan, true, paced) for plan in plans])
    assert not fit.corrections.compute and fit.corrections.rates["ethernet"] == pytest.approx(0.5, rel=0.05)


def test_a_plan_notes_its_corrections_and_their_error() -> None:
    fit = fit_corrections([simulated(plan, Corrections({A100.name: 1.5})) for plan in PLANS])
    corrected_plan = fixed_plan(MODEL, BATCH, SITE, LAYOUTS[0], Costs(corrections=fit.corrections))
    (note,) = (a for a in corrected_plan.assumptions if a.startswith("corrections from 3 runs"))
    assert f"compute time on {A100.name} x1.50" in note and "error of their step times" in note
    assert corrected_plan.predicted and PLANS[0].predicted
    assert corrected_plan.predicted.step_time_s > 1.01 * PLANS[0].predicted.step_time_s


def recorded(root: Path, plan: Plan, corrections: Corrections, steps: int = 8) -> RunDirectory:
    """Return the run directory of a simulated run with slow first steps."""
    run = simulated(plan, corrections, request.costs(load([])))
    record = RunDirectory.create(root, plan_text=plan.to_yaml(), plan_id=plan.id, config=load([]).to_dict())
    record.update_run(attempts=[{"attempt": 1, "plan_id": plan.id}])
    for step in range(steps):
        slowdown = 5.0 if step < 2 else 1.0
        record.append_metrics(
            {
                "step": step,
                "attempt": 1,
                "step_time_s": slowdown * run.step_s,
                "breakdown": [{"compute_s": slowdown * s} for s in run.compute_s],
            }
        )
    return record


def test_corrections_are_fitted_to_run_records(tmp_path: Path) -> None:
    true = Corrections({A100.name: 1.4, H100.name: 0.8}, {"ethernet": 0.6})
    for number, plan in enumerate(PLANS):
        recorded(tmp_path / f"run-{number}", plan, true)
    recorded(tmp_path / "short", PLANS[0], true, steps=3)
    RunDirectory.create(tmp_path / "broken", plan_text="3", config=load([]).to_dict())
    fit, skipped = request.learn_from_runs(load([]), str(tmp_path))
    assert fit.runs == 3 and sorted(o.split(":")[0] for o in skipped) == ["broken", "short"]
    assert fit.corrections.compute == {A100.name: pytest.approx(1.4, rel=0.02), H100.name: pytest.approx(0.8, rel=0.02)}
    assert fit.corrections.rates["ethernet"] == pytest.approx(0.6, rel=0.05)
    assert fit.error_before > 0.05 > fit.error_after


def test_a_directory_without_usable_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to learn from"):
        request.learn_from_runs(load([]), str(tmp_path))
    recorded(tmp_path / "short", PLANS[0], Corrections(), steps=3)
    with pytest.raises(ConfigError, match="fewer than 5 steps"):
        request.learn_from_runs(load([]), str(tmp_path))
