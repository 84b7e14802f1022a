"""What runs say of the planner's figures: made with known factors, they give the factors back."""

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
from holmes_hpc.planning.cost.corrections import Observed, computing_s, learn
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array, predict
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import given_plan
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
PLANS = [given_plan(MODEL, BATCH, SITE, options, Costs()) for options in LAYOUTS]


def simulated(plan: Plan, true: Corrections, costs: Costs = Costs()) -> Observed:
    """A run as the predictor would have it, if the factors were these."""
    known = replace(costs, corrections=true)
    layout, layers = Layout.of(plan, known), layer_array(plan)
    return Observed("made up", plan, costs, predict(plan, known).step_time_s, tuple(computing_s(layout, layers)))


@settings(max_examples=12, deadline=None)
@given(st.floats(0.5, 2.5), st.floats(0.5, 2.5), st.floats(0.4, 1.5), st.floats(0.4, 1.5))
def test_runs_made_with_known_factors_give_them_back(a100: float, h100: float, ethernet: float, ib: float) -> None:
    true = Corrections({A100.name: a100, H100.name: h100}, {"ethernet": ethernet, "ib": ib})
    found = learn([simulated(plan, true) for plan in PLANS])
    made = found.corrections
    assert made.compute == {A100.name: pytest.approx(a100, rel=0.02), H100.name: pytest.approx(h100, rel=0.02)}
    for name, factor in {"ethernet": ethernet, "ib": ib}.items():
        assert name in found.hidden or made.rates[name] == pytest.approx(factor, rel=0.05), name
    assert found.after < 0.005 and found.after <= found.before
    assert "ethernet" not in found.hidden  # a pipeline over 5 Gb/s does not hide its transfers


def test_what_runs_do_not_show_stays_as_it_was() -> None:
    alone = given_plan(
        MODEL,
        BATCH,
        Site("fast", (replace(one_fabric(A100, "a", 2), rdma_gbps=3200),)),
        PlanOptions(tp=1, pp=1, dp=16),
        Costs(),
    )
    found = learn([simulated(alone, Corrections({A100.name: 1.3}))])
    assert found.corrections.compute == {A100.name: pytest.approx(1.3, rel=0.01)}
    assert "ib" in found.hidden and not found.corrections.rates


def test_paced_layers_teach_networks_alone() -> None:
    true = Corrections(rates={"ethernet": 0.5})
    paced = Costs(pace_layer_ms=5)
    plans = [given_plan(MODEL, BATCH, SITE, options, paced) for options in LAYOUTS[:2]]
    found = learn([simulated(plan, true, paced) for plan in plans])
    assert not found.corrections.compute and found.corrections.rates["ethernet"] == pytest.approx(0.5, rel=0.05)


def test_a_plan_says_what_was_learned_and_how_far_off_it_was() -> None:
    found = learn([simulated(plan, Corrections({A100.name: 1.5})) for plan in PLANS])
    again = given_plan(MODEL, BATCH, SITE, LAYOUTS[0], Costs(corrections=found.corrections))
    (said,) = (a for a in again.assumptions if a.startswith("learned from 3 runs"))
    assert f"{A100.name} computes 1.50 times as long" in said and "off without it" in said
    assert again.predicted and PLANS[0].predicted
    assert again.predicted.step_time_s > 1.01 * PLANS[0].predicted.step_time_s


def recorded(root: Path, plan: Plan, true: Corrections, steps: int = 8) -> RunDirectory:
    """A run directory of a simulated run; its first steps are slow, as first steps are."""
    run = simulated(plan, true)
    record = RunDirectory.create(root, plan_text=plan.to_yaml(), plan_id=plan.id, config=load([]).to_dict())
    record.update_run(attempts=[{"attempt": 1, "plan_id": plan.id}])
    for step in range(steps):
        slow = 5.0 if step < 2 else 1.0
        record.append_metrics(
            {
                "step": step,
                "attempt": 1,
                "step_time_s": slow * run.step_s,
                "breakdown": [{"compute_s": slow * s} for s in run.compute_s],
            }
        )
    return record


def test_run_records_are_learned_from(tmp_path: Path) -> None:
    true = Corrections({A100.name: 1.4, H100.name: 0.8}, {"ethernet": 0.6})
    for number, plan in enumerate(PLANS):
        recorded(tmp_path / f"run-{number}", plan, true)
    recorded(tmp_path / "short", PLANS[0], true, steps=3)
    RunDirectory.create(tmp_path / "broken", plan_text="3", config=load([]).to_dict())
    found, others = request.learned(load([]), str(tmp_path))
    assert found.runs == 3 and sorted(o.split(":")[0] for o in others) == ["broken", "short"]
    assert found.corrections.compute == {
        A100.name: pytest.approx(1.4, rel=0.02),
        H100.name: pytest.approx(0.8, rel=0.02),
    }
    assert found.corrections.rates["ethernet"] == pytest.approx(0.6, rel=0.05)
    assert found.before > 0.05 > found.after


def test_nothing_to_learn_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to learn from"):
        request.learned(load([]), str(tmp_path))
    recorded(tmp_path / "short", PLANS[0], Corrections(), steps=3)
    with pytest.raises(ConfigError, match="fewer than 5 steps"):
        request.learned(load([]), str(tmp_path))
