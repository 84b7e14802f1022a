"""A prediction's interval: from the class of runs like it, wider for kinds of GPU that nobody measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import A100, small_testbed, two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import SUPPOSED, UNKNOWN, spread, spreads
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import explain
from holmes_hpc.planning.search.best import given_plan


def plan(gpu: Gpu, tp: int = 2) -> Plan:
    site = two_clusters(2)
    site = replace(site, fabrics=tuple(replace(f, gpu=gpu) for f in site.fabrics[:1]))
    return given_plan(named("gpt_3_6b"), Batch(64, 2, 2048), site, PlanOptions(tp=tp, pp=1, dp=16 // tp), Costs())


def test_an_interval_is_that_of_like_runs() -> None:
    made = plan(A100).predicted
    assert made is not None and made.interval_s is not None
    found = spread(2, True)
    assert made.interval_s == pytest.approx((made.step_time_s * found.low, made.step_time_s * found.high))
    assert any("nine in ten" in line for line in explain(plan(A100), Costs()))


@pytest.mark.parametrize(("name", "wider"), [("b200", SUPPOSED), ("tpu-v9", UNKNOWN)])
def test_what_was_not_measured_widens_it(name: str, wider: float) -> None:
    made = plan(replace(A100, name=name)).predicted
    assert made is not None and made.interval_s is not None
    assert made.interval_s[1] / made.step_time_s == pytest.approx(spread(2, True).high * wider)


def test_a_kind_without_a_table_says_so() -> None:
    assert any("no table of kernels for tpu-v9" in line for line in plan(replace(A100, name="tpu-v9")).assumptions)
    assert not any("no table" in line for line in plan(A100).assumptions)


def test_cpus_and_paced_layers_have_none() -> None:
    tiny = given_plan(
        named("gpt_tiny"),
        Batch(16, 2, 64),
        small_testbed(),
        PlanOptions(tp=1, pp=2, dp=2, nodes={"ib-a": 2, "roce-a": 2}),
        Costs(),
    )
    assert tiny.predicted is not None and tiny.predicted.interval_s is None
    assert Plan.from_dict(plan(A100).to_dict()) == plan(A100)


def test_every_class_holds_what_was_predicted() -> None:
    for s in spreads():
        assert s.low < 1 < s.high
    assert spread(64, True) == spread(8, True)
