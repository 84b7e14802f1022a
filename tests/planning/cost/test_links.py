"""A site file's links between two fabrics affect every prediction that crosses them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import A100

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import FabricLink, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.traffic import transfers_s
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan, fixed_plan

MODEL, BATCH = named("gpt_7_5b"), Batch(768, 1, 2048)
SITE = Site("three", tuple(Pool(name, NicType.IB, name, 2, 8, 25.0, A100, rdma_gbps=400.0) for name in "abc"))


def with_links(*links: FabricLink) -> Site:
    return replace(SITE, links=links)


def pipeline(site: Site, **options: object) -> Plan:
    settings = {"tp": 2, "pp": 3, "dp": 8, "strategy": "pipeline", **options}
    return fixed_plan(MODEL, BATCH, site, PlanOptions(**settings), Costs())  # type: ignore[arg-type]


def down_s(site: Site) -> list[float]:
    return transfers_s(Layout.of(pipeline(site), Costs()), 0)[0].tolist()


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def test_rate_and_delay_apply_to_one_pair_of_fabrics() -> None:
    plain = down_s(SITE)
    slow = down_s(with_links(FabricLink(("b", "a"), gbps=5.0)))
    late = down_s(with_links(FabricLink(("b", "c"), delay_ms=7)))
    latency = Costs().link(Layout.of(pipeline(SITE), Costs()).edges[0][0], SITE.pools[0]).latency_s
    assert slow[0] - latency == pytest.approx(5 * (plain[0] - latency)) and slow[1] == plain[1]
    assert late[0] == plain[0] and late[1] == pytest.approx(plain[1] + 7e-3)


@pytest.mark.parametrize("link", [FabricLink(("a", "b"), gbps=1.0), FabricLink(("a", "b"), delay_ms=50)])
def test_data_parallel_across_fabrics_waits_for_the_slowest_pair(link: FabricLink) -> None:
    options = {"strategy": "hierarchical-dp", "pp": 1, "tp": 8, "dp": 6}
    assert seconds(pipeline(with_links(link), **options)) > 1.02 * seconds(pipeline(SITE, **options))


def test_fabrics_with_a_slow_link_do_not_become_neighbours() -> None:
    options = PlanOptions(tp=2, pp=3, dp=8)
    plan = best_plan(MODEL, BATCH, with_links(FabricLink(("a", "b"), gbps=0.5)), options, Costs())
    assert [c.pool for c in plan.components] in (["a", "c", "b"], ["b", "c", "a"])
    assert seconds(plan) == pytest.approx(seconds(best_plan(MODEL, BATCH, SITE, options, Costs())))


def test_a_plan_keeps_links_and_a_site_without_links_writes_none() -> None:
    linked = with_links(FabricLink(("a", "b"), gbps=5, delay_ms=1.5))
    assert Site.from_dict(linked.to_dict()) == linked and linked.digest() != SITE.digest()
    assert "links" not in SITE.to_dict() and Site.from_dict(SITE.to_dict()) == SITE
    plan = pipeline(linked)
    assert Plan.from_dict(plan.to_dict()).site.links == linked.links
