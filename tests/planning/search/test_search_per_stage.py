"""The search of stages of unequal widths: nodes that a grid leaves out are used, and nothing listed is faster."""

from __future__ import annotations

from dataclasses import replace

import planner_unequal
import pytest

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Fabric, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan_text import explain
from holmes_hpc.planning.search.best import best_plan

SMALL = ModelSpec("small", layers=6, hidden=1024, heads=8, vocab=32000, ffn=4096, kv_heads=8, max_positions=1024)
UNEVEN = Site(
    "site",
    tuple(
        Fabric(f"{nic}-a", nic, str(nic), nodes, 2, 25, planner_unequal.A100, rdma_gbps=200)
        for nic, nodes in ((NicType.IB, 2), (NicType.ROCE, 3))
    ),
)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_listed_plan_is_a_percent_faster(seed: int) -> None:
    found = planner_unequal.measured(seed)
    assert found["regret"] <= 0.01, found


def test_nodes_that_a_grid_leaves_out_are_used() -> None:
    wide, grid = (
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, PlanOptions(unequal=u), Costs()) for u in ("auto", "false")
    )
    assert wide.is_per_stage and not wide.unused
    assert any("shorter than the best uniform layout's" in line for line in explain(wide, Costs(), width=200))
    assert not any("by stage" in line for line in explain(grid, Costs(), width=200))
    assert wide.predicted is not None and grid.predicted is not None
    assert wide.predicted.step_time_s < 0.99 * grid.predicted.step_time_s
    assert wide.alternatives[0]["parallel"]["dp"] == grid.parallel.dp


def test_equal_widths_where_fabrics_are_alike() -> None:
    alike = replace(UNEVEN, fabrics=UNEVEN.fabrics[:1])
    plan = best_plan(SMALL, Batch(12, 1, 1024), alike, PlanOptions(unequal="true"), Costs())
    assert not plan.is_per_stage


def test_no_virtual_stages_are_no_equal_widths() -> None:
    options = PlanOptions(virtual_stages=1)
    assert best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, options, Costs()).is_per_stage


def test_where_no_grid_has_the_stages_asked_for() -> None:
    options = PlanOptions(pp=2, nodes={"ib-a": 2, "roce-a": 3}, strategy="pipeline")
    with pytest.raises(PlanError, match="equal stages"):
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, replace(options, unequal="false"), Costs())
    wide = best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, options, Costs())
    assert wide.is_per_stage and wide.parallel.pp == 2 and not wide.unused
    with pytest.raises(PlanError, match="PP 7"):  # there are 6 layers: what is said of a grid
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, replace(options, pp=7), Costs())


@pytest.mark.parametrize(
    ("key", "value"), [("dp", 4), ("layers_per_stage", (3, 3)), ("transport", "single"), ("virtual_stages", 2)]
)
def test_asked_for_beside_what_excludes_it_is_refused_in_one_line(key: str, value: object) -> None:
    options = PlanOptions(unequal="true", **{key: value})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=rf"^plan.unequal: stages cannot have TP and DP .* plan.{key}=") as refused:
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, options, Costs())
    assert "\n" not in str(refused.value)
