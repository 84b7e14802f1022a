"""The search with per-stage TP/DP uses nodes that uniform layouts leave unused, and is as good as a full listing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import planner_per_stage
import planner_regret
import pytest

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import NicType, Pool, Site
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout, schedule_of
from holmes_hpc.planning.cost.memory import USABLE_SHARE, fits, memory
from holmes_hpc.planning.cost.predict import layer_array, predict
from holmes_hpc.planning.cost.timing import step_s
from holmes_hpc.planning.plan_text import explain, summary
from holmes_hpc.planning.schedule.launches import check_launches
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.search import per_stage
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.problem import Problem, available_pools, timed
from holmes_hpc.planning.search.stage_shapes import best_shapes

SMALL = ModelSpec("small", layers=6, hidden=1024, heads=8, vocab=32000, ffn=4096, kv_heads=8, max_positions=1024)
UNEVEN = Site(
    "site",
    tuple(
        Pool(f"{nic}-a", nic, str(nic), nodes, 2, 25, planner_per_stage.A100, rdma_gbps=200)
        for nic, nodes in ((NicType.IB, 2), (NicType.ROCE, 3))
    ),
)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_listed_plan_is_a_percent_faster(seed: int) -> None:
    regret = planner_per_stage.measure(seed)
    assert regret["regret"] <= 0.01, regret


def test_nodes_unused_by_uniform_layouts_are_used() -> None:
    unequal, uniform = (
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, PlanOptions(unequal=u), Costs()) for u in ("auto", "false")
    )
    assert unequal.is_per_stage and not unequal.unused
    assert any("shorter than the best uniform layout (" in line for line in explain(unequal, Costs(), width=200))
    assert not any("by stage" in line for line in explain(uniform, Costs(), width=200))
    assert unequal.predicted is not None and uniform.predicted is not None
    assert unequal.predicted.step_time_s < 0.99 * uniform.predicted.step_time_s
    assert unequal.alternatives[0]["parallel"]["dp"] == uniform.parallel.dp


def test_weight_passes_shorten_the_steps_of_per_stage_plans() -> None:
    plans = {
        name: best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, PlanOptions(unequal="true", schedule=name), Costs())
        for name in ("ahead", "zero_bubble")
    }
    assert all(plan.is_per_stage and plan.schedule.kind == name for name, plan in plans.items())
    eager, split = (plan.predicted for plan in plans.values())
    assert eager is not None and split is not None and split.step_time_s < 0.98 * eager.step_time_s
    assert split.step_time_s == pytest.approx(predict(plans["zero_bubble"], Costs()).step_time_s)
    assert sum(split.memory_bytes_per_gpu) > sum(eager.memory_bytes_per_gpu)  # of deferred weight passes
    check_launches(plans["zero_bubble"].order)


def test_a_plan_says_if_per_stage_layouts_were_not_tried() -> None:
    for unequal in ("auto", "false"):
        stopped = best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, PlanOptions(unequal=unequal), Costs(), Clock(1e-9))
        assert any("per-stage TP/DP were tried" in note for note in stopped.assumptions) is (unequal == "auto")
        assert any("per-stage TP/DP were tried" in line for line in summary(stopped, Costs())) is (unequal == "auto")
    full = best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, PlanOptions(), Costs())
    assert not any("stopped" in note for note in full.assumptions)


def test_as_many_passes_are_in_flight_as_fit_in_memory() -> None:
    plan = best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, PlanOptions(unequal="true"), Costs())
    layout, layers = Layout.of(plan, Costs()), layer_array(plan)
    (deep,) = per_stage._deepened(layout, layers, None, (8,))
    fewest = least_in_flight(tuple(stage.dp for stage in layout.parallel.stages))
    few = layout.with_settings(schedule_of(layout.schedule.kind, fewest))
    few_gib, deep_gib = (memory(x, layers).total().max() / 2**30 / USABLE_SHARE for x in (few, deep))
    max_gib = 0.6 * few_gib + 0.4 * deep_gib
    (cut,) = per_stage._deepened(layout, layers, max_gib, (8,))
    assert fits(cut, layers, max_gib)[0] and not fits(deep, layers, max_gib)[0]
    depths = (few.schedule.in_flight, cut.schedule.in_flight, deep.schedule.in_flight)
    assert all(a <= b <= c for a, b, c in zip(*depths, strict=True)) and len({*depths}) == 3
    assert step_s(cut, layers)[0] < step_s(few, layers)[0]
    assert not [*per_stage._deepened(layout, layers, 0.99 * few_gib)]


def test_one_fabric_gets_a_uniform_layout() -> None:
    alike = replace(UNEVEN, pools=UNEVEN.pools[:1])
    plan = best_plan(SMALL, Batch(12, 1, 1024), alike, PlanOptions(unequal="true"), Costs())
    assert not plan.is_per_stage


def test_virtual_stages_1_allows_per_stage_layouts() -> None:
    options = PlanOptions(virtual_stages=1)
    assert best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, options, Costs()).is_per_stage


def test_per_stage_layout_has_the_requested_stages_if_no_uniform_layout_can() -> None:
    options = PlanOptions(pp=2, nodes={"ib-a": 2, "roce-a": 3}, strategy="pipeline")
    with pytest.raises(PlanError, match="same TP and DP in all stages"):
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, replace(options, unequal="false"), Costs())
    plan = best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, options, Costs())
    assert plan.is_per_stage and plan.parallel.pp == 2 and not plan.unused
    with pytest.raises(PlanError, match="PP 7"):  # there are 6 layers; the error is that of uniform layouts
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, replace(options, pp=7), Costs())


@pytest.mark.parametrize(
    ("key", "value"), [("dp", 4), ("layers_per_stage", (3, 3)), ("transport", "single"), ("virtual_stages", 2)]
)
def test_unequal_true_conflicts_with_options_that_exclude_it(key: str, value: object) -> None:
    options = PlanOptions(unequal="true", **{key: value})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=rf"^plan.unequal: per-stage TP/DP cannot .* plan.{key}=") as error:
        best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, options, Costs())
    assert "\n" not in str(error.value)


def test_the_pools_of_good_plans_are_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[list[str]] = []
    search = per_stage._search

    def noted(problem: Any, *arguments: Any) -> Any:
        searched.append([*(pool.name for pool in problem.site.pools), arguments[-1]])
        return search(problem, *arguments)

    monkeypatch.setattr(per_stage, "_search", noted)
    for name, passes in {"SHAPES": 2_000, "NEIGHBOURS": 0, "REFINEMENT": 0}.items():
        monkeypatch.setattr(per_stage, name, passes)
    far = replace(UNEVEN.pools[0], name="far", nodes=1, ethernet_gbps=0.1)
    site = replace(UNEVEN, pools=(*UNEVEN.pools, far))
    best_plan(SMALL, Batch(60, 1, 1024), site, PlanOptions(), Costs())
    best_plan(SMALL, Batch(60, 1, 1024), UNEVEN, PlanOptions(), Costs())
    sites = (["ib-a", "roce-a", "far"], ["ib-a", "roce-a"], ["roce-a"])
    twice = [[*pools, order] for pools in sites for order in ("estimate", "turns")]
    assert searched == [*twice, *twice[2:]]
    searched.clear()
    farther = replace(far, name="farther")
    best_plan(SMALL, Batch(60, 1, 1024), replace(site, pools=(*site.pools, farther)), PlanOptions(), Costs())
    assert [order for *pools, order in searched if "farther" in pools] == ["estimate", "turns", "pools"]


def test_shapes_that_need_full_recomputation_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it these shapes hold so few passes in flight that they wait; estimates do not know this."""
    monkeypatch.setattr(per_stage, "MANY_GPUS", 0)  # one search is enough
    plan = best_plan(*planner_regret.draw_problem(45), PlanOptions(), Costs())
    assert plan.predicted is not None and plan.predicted.step_time_s < 31


def test_shared_stage_costs_and_bounds_change_no_step_time() -> None:
    model, batch, site = planner_regret.draw_problem(36)
    problem = Problem(model, replace(batch, micro_size=1), site, PlanOptions(search_micro_size=False), Costs())
    available, memo = available_pools(site, problem.options), Memo()
    for shape in best_shapes(problem)[:40:5]:
        alone, shared = (per_stage._balanced_variant(problem, available, shape, m) for m in (Memo(), memo))
        assert alone and shared and np.array_equal(alone.layers, shared.layers)
        seconds = timed(shared).seconds
        assert timed(alone).seconds == seconds and shared.least_s <= seconds


def test_a_plan_computed_anew_has_the_step_time_of_the_search() -> None:
    """Shapes whose stages are all alike shared costs with others, and promised steps of half the time."""
    plan = best_plan(*planner_regret.draw_problem(21), PlanOptions(), Costs())
    layers = np.array([stage.layers for stage in plan.stages])[None, :, None]
    assert plan.predicted is not None
    assert plan.predicted.step_time_s == step_s(Layout.of(plan, Costs()), layers)[0]


def test_named_nodes_are_all_used_even_if_fewer_are_faster() -> None:
    model, batch, site = planner_regret.draw_problem(35)
    nodes = {"f0-2": 1, "f3-0": 2}
    plan = best_plan(model, batch, site, PlanOptions(nodes=nodes), Costs())
    assert {c.pool: c.nodes for c in plan.components} == nodes
