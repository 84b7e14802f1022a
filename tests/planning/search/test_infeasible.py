"""What is said where nothing fits or divides: who forbids it, and advice that works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from sites import A100

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Fabric, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan

pytestmark = pytest.mark.integration

MODEL, BATCH = named("gpt_7_5b"), Batch(64, 1, 2048)


def site(nodes: int = 2, **gpu: Any) -> Site:
    return Site("one", (Fabric("ib", NicType.IB, "ib", nodes, 8, 25.0, replace(A100, **gpu), rdma_gbps=200.0),))


def refused(at: Site, batch: Batch = BATCH, **told: Any) -> PlanError:
    with pytest.raises(PlanError) as error:
        best_plan(MODEL, batch, at, PlanOptions(**told), Costs())
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("told", "keys"),
    [
        ({"tp": 1, "dp": 8, "pp": 1}, "plan.pp"),
        ({"max_memory_gib": 4.0}, "plan.max_memory_gib"),
        ({"tp": 1, "pp": 1, "recompute": "none"}, "plan.pp"),
    ],
)
def test_what_the_user_forbids_is_not_the_sites_fault(told: dict[str, Any], keys: str) -> None:
    """The key is named, and without it there is a plan."""
    at = site(memory_gib=40)
    said = refused(at, **told)
    assert "fits nowhere" in said.what and said.where == keys and said.hint is not None
    assert f"leave {keys} out" in said.hint
    left = {name: value for name, value in told.items() if f"plan.{name}" not in keys}
    assert best_plan(MODEL, BATCH, at, PlanOptions(**left), Costs()).predicted is not None


def test_one_fabric_is_no_pipeline_across_fabrics() -> None:
    said = refused(site(), strategy="pipeline")
    assert "ib alone" in said.what and said.where == "plan.strategy"


def test_what_no_key_forbids_comes_with_changes_that_were_tried() -> None:
    said = refused(site(1, memory_gib=12))
    assert said.where == "memory" and said.hint is not None and "leave" not in said.hint
    times = re.search(r"(\d+) times as many nodes", said.hint)
    gib = re.search(r"GPUs of (\d+) GiB", said.hint)
    assert times is not None and gib is not None, said.hint
    for at in (site(int(times[1]), memory_gib=12), site(1, memory_gib=float(gib[1]) + 1)):
        assert best_plan(MODEL, BATCH, at, PlanOptions(), Costs()).predicted is not None


def test_layers_that_do_not_sum_up_are_said_with_both_numbers() -> None:
    said = refused(site(), layers_per_stage=(10, 10))
    assert "[10, 10] are 20 layers, gpt_7_5b has 36" in said.what and said.where == "plan.layers_per_stage"


def test_a_batch_that_shares_out_badly_is_said_with_a_better_one() -> None:
    """511 = 7 x 73 sequences leave GPUs idle, or stages and TP that nobody would want."""
    model = replace(named("gpt_3_6b"), layers=4)
    plan = best_plan(model, Batch(511, 1, 2048), site(2), PlanOptions(unequal="false"), Costs())
    found = [re.search(r"batch\.global_size=(\d+) would give (\d+)% more", a) for a in plan.assumptions]
    size, more = next((int(m[1]), int(m[2])) for m in found if m)
    other = best_plan(model, Batch(size, 1, 2048), site(2), PlanOptions(unequal="false"), Costs())
    assert plan.predicted is not None and other.predicted is not None and abs(size - 511) <= 0.03 * 511
    assert other.predicted.samples_per_s / plan.predicted.samples_per_s - 1 == pytest.approx(more / 100, abs=0.006)
    assert not any("global_size" in a for a in other.assumptions)
