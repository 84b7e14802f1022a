"""A prediction's interval comes from published runs left out of the fit. It is wider for what no run had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import A100, small_testbed, two_clusters

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.uncertainty import ASSUMED_KIND, OTHER_SOFTWARE, UNLISTED_KIND, Spread, measured
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import fixed_plan


def plan(gpu: Gpu, tp: int = 2) -> Plan:
    site = two_clusters(2)
    site = replace(site, pools=tuple(replace(f, gpu=gpu) for f in site.pools[:1]))
    return fixed_plan(named("gpt_3_6b"), Batch(64, 2, 2048), site, PlanOptions(tp=tp, pp=1, dp=16 // tp), Costs())


def interval(made: Plan) -> tuple[float, float]:
    """Return the interval's ends over the predicted step time."""
    predicted = made.predicted
    assert predicted is not None and predicted.interval_s is not None
    low, high = predicted.interval_s
    return low / predicted.step_time_s, high / predicted.step_time_s


def test_the_interval_of_a_measured_generation_is_that_of_left_out_sets() -> None:
    assert interval(plan(A100)) == pytest.approx((measured().sets.low, measured().sets.high))
    assert not any("interval is wider" in note for note in plan(A100).assumptions)


@pytest.mark.parametrize(
    ("gpu", "spread", "factor", "cause"),
    [
        (Gpu("b200", 2250, 180, 7200), measured().generations, ASSUMED_KIND, "no published run on blackwell"),
        (replace(A100, name="tpu-v9"), measured().generations, UNLISTED_KIND, "tpu-v9 has no kernel table"),
        (replace(A100, attention="flash3"), measured().sets, OTHER_SOFTWARE, "ampere with attention flash3"),
    ],
)
def test_what_no_run_had_widens_the_interval_and_is_named(gpu: Gpu, spread: Spread, factor: float, cause: str) -> None:
    made = plan(gpu)
    assert interval(made) == pytest.approx((spread.low / factor, spread.high * factor))
    (note,) = (note for note in made.assumptions if "interval is wider" in note)
    assert cause in note


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
