"""A prediction's interval comes from its class of runs and is wider for unmeasured GPU kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import A100, small_testbed, two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import ASSUMED, UNLISTED, spread, spreads
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import explain
from holmes_hpc.planning.search.best import fixed_plan


def plan(gpu: Gpu, tp: int = 2) -> Plan:
    site = two_clusters(2)
    site = replace(site, pools=tuple(replace(f, gpu=gpu) for f in site.pools[:1]))
    return fixed_plan(named("gpt_3_6b"), Batch(64, 2, 2048), site, PlanOptions(tp=tp, pp=1, dp=16 // tp), Costs())


def test_the_interval_is_that_of_the_class() -> None:
    predicted = plan(A100).predicted
    assert predicted is not None and predicted.interval_s is not None
    row = spread(2, True)
    assert predicted.interval_s == pytest.approx((predicted.step_time_s * row.low, predicted.step_time_s * row.high))
    assert any("90% interval" in line for line in explain(plan(A100), Costs()))


@pytest.mark.parametrize(("name", "factor"), [("b200", ASSUMED), ("tpu-v9", UNLISTED)])
def test_assumed_and_unlisted_kinds_widen_the_interval(name: str, factor: float) -> None:
    predicted = plan(replace(A100, name=name)).predicted
    assert predicted is not None and predicted.interval_s is not None
    assert predicted.interval_s[1] / predicted.step_time_s == pytest.approx(spread(2, True).high * factor)


def test_a_plan_notes_a_kind_without_a_table() -> None:
    assert any("no kernel table for tpu-v9" in line for line in plan(replace(A100, name="tpu-v9")).assumptions)
    assert not any("no kernel table" in line for line in plan(A100).assumptions)


def test_cpus_have_no_interval() -> None:
    tiny = fixed_plan(
        named("gpt_tiny"),
        Batch(16, 2, 64),
        small_testbed(),
        PlanOptions(tp=1, pp=2, dp=2, nodes={"ib-a": 2, "roce-a": 2}),
        Costs(),
    )
    assert tiny.predicted is not None and tiny.predicted.interval_s is None
    assert Plan.from_dict(plan(A100).to_dict()) == plan(A100)


def test_every_class_contains_the_prediction() -> None:
    for s in spreads():
        assert s.low < 1 < s.high
    assert spread(64, True) == spread(8, True)
