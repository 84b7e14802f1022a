"""Shares of a step in pools of unlike speed on one fabric."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import A100, H100

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import FabricLink, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.plan_text import explain
from holmes_hpc.planning.search import micro_batch_shares
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.micro_batch_shares import best_shared_steps
from holmes_hpc.planning.search.problem import Problem, searched_site

FAST, SLOW = (
    Pool(gpu.name, NicType.IB, gpu.name, 2, 8, 25, gpu, rdma_gbps=gbps, fabric="ib")
    for gpu, gbps in ((H100, 400.0), (A100, 200.0))
)
SITE = Site("mixed", (FAST, SLOW))
MODEL, BATCH = named("gpt_3_6b"), Batch(512, 1, 2048)


def plan(site: Site, **options: object) -> Plan:
    return best_plan(MODEL, BATCH, site, PlanOptions(search_micro_size=False, **options), Costs())


def test_each_pool_has_a_share_by_its_speed_and_gradients_go_by_rdma() -> None:
    shared = plan(SITE, strategy="hierarchical-dp")
    assert Plan.from_dict(shared.to_dict()) == shared and shared.strategy == "hierarchical-dp"
    assert [c.pool for c in shared.components] == [FAST.name, SLOW.name] and shared.is_per_stage
    counts = [len(shared.order.micro_batches_of(row)) for row in range(shared.parallel.dp)]
    fast, slow = counts[0], counts[-1]
    speed = Costs().layer_s(MODEL, shared.batch, 1, SLOW)[0] / Costs().layer_s(MODEL, shared.batch, 1, FAST)[0]
    assert fast / slow == pytest.approx(speed, rel=0.15) and sum(counts) == 512
    assert {str(g.transport) for g in shared.transports() if g.kind == "dp"} == {"rdma over ib (ib)"}
    assert set(shared.predicted.nic_bytes_per_step) == {"ib"}
    alone = [plan(replace(SITE, pools=(pool,))).predicted.samples_per_s for pool in SITE.pools]
    assert max(alone) < 0.7 * sum(alone) < shared.predicted.samples_per_s  # gradients are exposed: no overlap


def test_the_planner_may_use_both_pools_of_a_fabric_as_one_pipeline_by_rdma() -> None:
    best = plan(SITE)
    assert best.predicted.samples_per_s >= plan(SITE, strategy="hierarchical-dp").predicted.samples_per_s
    assert set(best.predicted.nic_bytes_per_step) <= {"ib"} and not best.unused


def test_the_parts_of_a_step_are_those_of_the_pool_that_computes_longest() -> None:
    pools = (replace(FAST, nodes=2), replace(SLOW, nodes=4))
    site, batch = replace(SITE, pools=pools), Batch(768, 4, 2048)
    best = best_plan(MODEL, batch, site, PlanOptions(strategy="hierarchical-dp", pp=1), Costs())
    parts = best.predicted.breakdown
    counts = [len(best.order.micro_batches_of(row)) for row in range(best.parallel.dp)]
    assert sum(parts.values()) == pytest.approx(best.predicted.step_time_s)
    compute_s = [
        max(share) * sum(Costs().layer_s(MODEL, best.batch, 1, pool)) * MODEL.layers
        for share, pool in zip((counts[:16], counts[16:]), pools, strict=True)
    ]
    assert max(compute_s) < parts["compute_s"] < 1.1 * max(compute_s)
    fast_network = replace(site, pools=tuple(replace(p, rdma_gbps=1e5) for p in pools))
    gain_s = best.predicted.step_time_s - predict(replace(best, site=fast_network), Costs()).step_time_s
    assert gain_s == pytest.approx(parts["grad_sync_s"] + parts["param_sync_s"], rel=0.05)
    text = " ".join(explain(best, Costs(), width=999))
    assert "samples/s  twice the nodes of every pool in use" in text
    assert "GiB per GPU, on stage 0 " in text and "uniform layout" not in text
    smaller = replace(site, pools=(pools[0], replace(pools[1], gpu=replace(A100, memory_gib=64))))
    text = " ".join(explain(replace(best, site=smaller), Costs(), width=999))
    assert f"of 64 GiB per GPU, on stage 0 of pool {SLOW.name} " in text


def test_of_many_pools_the_largest_are_searched() -> None:
    pools = tuple(replace(FAST, name=f"p{i}", nodes=1 + i % 3, gpus_per_node=1) for i in range(40))
    links = (FabricLink(("ib", "other"), gbps=1),)
    site = Site("many", (*pools, replace(SLOW, name="other", fabric="", nodes=1, gpus_per_node=1)), links=links)
    batch = Batch(64, 1, 2048)
    many = best_plan(MODEL, batch, site, PlanOptions(search_micro_size=False, pp=1, tp=1, unequal="false"), Costs())
    assert {p.nodes for p in many.site.pools} == {3} and len(many.site.pools) == 10 and not many.site.links
    assert any("of 41 pools, only the 10 with most TFLOP/s were tried" in a for a in many.assumptions)
    options = PlanOptions(search_micro_size=False, nodes={"p0": 1, "other": 1})
    assert searched_site(site, options) is site
    with pytest.raises(PlanError, match=r"plan\.nodes: it names 40 pools; name at most 10"):
        best_plan(MODEL, batch, site, PlanOptions(nodes={p.name: 1 for p in pools}), Costs())


def test_of_ten_alike_pools_few_sets_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set whose layers alone take as long as the step on all pools cannot be better."""
    tried = []
    candidates = micro_batch_shares._layout
    monkeypatch.setattr(
        micro_batch_shares, "_layout", lambda _, pools, *a, **k: tried.append(pools) or candidates(_, pools, *a, **k)
    )
    pools = tuple(replace(FAST, name=f"p{i}", nodes=1) for i in range(10))
    problem = Problem(MODEL, Batch(640, 1, 2048), Site("ten", pools), PlanOptions(pp=1, tp=1), Costs())
    best = best_shared_steps(problem)
    assert best is not None and len(best.layout.components) == 10 and min(map(len, tried)) > 5
    over = Clock(1e-9)
    tried.clear()
    assert best_shared_steps(problem, over) is not None and {len(p) for p in tried} == {10}


@pytest.mark.parametrize(
    ("site", "options"),
    [
        (replace(SITE, pools=(replace(FAST, fabric=""), replace(SLOW, fabric=""))), {}),
        (SITE, {"unequal": "false"}),
        (SITE, {"strategy": "pipeline"}),
        (SITE, {"transport": "single"}),
        (SITE, {"nodes": {FAST.name: 2}}),
    ],
)
def test_steps_are_shared_only_in_one_fabric_and_if_the_options_allow_it(
    site: Site, options: dict[str, object]
) -> None:
    assert best_shared_steps(Problem(MODEL, BATCH, site, PlanOptions(**options), Costs())) is None
