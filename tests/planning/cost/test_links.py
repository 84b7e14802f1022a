"""A site file's links between two fabrics affect every prediction that crosses them."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import A100

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import FabricLink, NicType, Pool, Site
from holmes_hpc.planning.cost.assumptions import assumptions
from holmes_hpc.planning.cost.calibration import Calibration, MeasuredPool
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.network_times import (
    activation_bytes,
    edge_times,
    tied_embedding_s,
    transfer_s,
    transfers_s,
)
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel
from holmes_hpc.planning.plan.plan import Plan, Schedule
from holmes_hpc.planning.schedule.kinds import PER_STAGE
from holmes_hpc.planning.search.best import best_plan, fixed_plan
from holmes_hpc.planning.search.estimate import Limit
from holmes_hpc.planning.search.hierarchies import hierarchies
from holmes_hpc.planning.search.pool_costs import PoolCosts
from holmes_hpc.planning.search.problem import AvailablePool, Problem, available_pools
from holmes_hpc.planning.search.stage_shapes import _ShapeEstimator

MODEL, BATCH = named("gpt_7_5b"), Batch(768, 1, 2048)
SITE = Site("three", tuple(Pool(name, NicType.IB, name, 2, 8, 25.0, A100, rdma_gbps=400.0) for name in "abc"))


def with_links(*links: FabricLink) -> Site:
    return replace(SITE, links=links)


def pipeline(site: Site, **options: object) -> Plan:
    settings = {"tp": 2, "pp": 3, "dp": 8, "strategy": "pipeline", **options}
    return fixed_plan(MODEL, BATCH, site, PlanOptions(**settings), Costs())  # type: ignore[arg-type]


def down_s(site: Site, edge_connections: int = 1) -> list[float]:
    plan = replace(pipeline(site), edge_connections=edge_connections)
    return transfers_s(Layout.of(plan, Costs()), 0)[0].tolist()


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def test_rate_and_delay_apply_to_one_pair_of_fabrics() -> None:
    plain = down_s(SITE)
    slow = down_s(with_links(FabricLink(("b", "a"), gbps=5.0)))
    late = down_s(with_links(FabricLink(("b", "c"), delay_ms=7)))
    latency = Costs().link(Layout.of(pipeline(SITE), Costs()).edges[0][0], SITE.pools[0]).latency_s
    assert slow[0] - latency == pytest.approx(5 * (plain[0] - latency)) and slow[1] == plain[1]
    assert late[0] == plain[0] and late[1] > plain[1] + 7e-3  # also limited by TCP's windows
    striped = down_s(with_links(FabricLink(("b", "c"), delay_ms=7)), edge_connections=16)
    assert striped[1] == pytest.approx(down_s(SITE, edge_connections=16)[1] + 7e-3)


def test_tcp_windows_are_noted_unless_the_links_are_measured() -> None:
    layout = Layout.of(pipeline(with_links(FabricLink(("b", "c"), delay_ms=7))), Costs())
    assert any("TCP windows of 3 MiB" in note for note in assumptions(layout))
    measured = replace(layout, costs=Costs(Calibration((MeasuredPool(),))))
    assert not any("TCP windows" in note for note in assumptions(measured))


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
    assert Site.from_dict(linked.to_dict()) == linked
    assert "links" not in SITE.to_dict() and Site.from_dict(SITE.to_dict()) == SITE
    plan = pipeline(linked)
    assert Plan.from_dict(plan.to_dict()).site.links == linked.links


# -- a rate that all nodes share ---------------------------------------------------------------------------------------


@given(gbps=st.floats(0.1, 400), total=st.floats(0.1, 400), nodes=st.integers(1, 1000))
def test_nodes_share_the_total_and_never_exceed_their_own_rate(gbps: float, total: float, nodes: int) -> None:
    site = with_links(FabricLink(("a", "b"), gbps=gbps, total_gbps=total))
    rate = site.rate_gbps("tcp", site.pool("b"), site.pool("a"), nodes)
    assert rate <= gbps and rate * nodes <= total * (1 + 1e-9)
    assert rate == pytest.approx(min(gbps, total / nodes))
    assert site.rate_gbps("tcp", site.pool("a"), site.pool("c"), nodes) == 25.0
    assert site.rate_gbps("rdma", site.pool("a"), None, nodes) == 400.0


@pytest.mark.parametrize("options", [{}, {"strategy": "hierarchical-dp", "pp": 1, "tp": 8, "dp": 6}])
def test_two_nodes_that_share_a_line_get_half_of_it_each(options: dict[str, object]) -> None:
    # a stage has two nodes, and so has an optimizer instance
    shared, each = (
        pipeline(with_links(link), **options)
        for link in (FabricLink(("a", "b"), total_gbps=1.0), FabricLink(("a", "b"), gbps=0.5))
    )
    assert seconds(shared) == pytest.approx(seconds(each)) and seconds(shared) > 1.02 * seconds(
        pipeline(SITE, **options)
    )
    enough = FabricLink(("a", "b"), gbps=0.5, total_gbps=1.0)
    assert seconds(pipeline(with_links(enough), **options)) == seconds(each)


def test_a_transfer_sends_all_bytes_of_a_stage_over_a_shared_line() -> None:
    narrow = replace(SITE.pools[1], gpus_per_node=4, nodes=4)  # as many GPUs in twice the nodes
    site = replace(SITE, pools=(SITE.pools[0], narrow), links=(FabricLink(("a", "b"), total_gbps=1.0),))
    layout = replace(Layout.of(pipeline(SITE, pp=2), Costs()), site=site)
    a, b = (replace(c, gpus_per_node=f.gpus_per_node) for c, f in zip(layout.components, site.pools, strict=True))
    tcp = layout.edges[0][0]
    rate = 1e9 / 8 * Costs().link(tcp, site.pools[0]).efficiency
    stage_bytes = layout.parallel.dp * layout.parallel.tp * activation_bytes(layout, tcp, a)
    for ends in ((a, b), (b, a)):
        assert transfer_s(layout, tcp, *ends) - layout.latency(tcp, a) == pytest.approx(stage_bytes / rate)


def test_stages_of_unequal_width_share_a_line_among_the_nodes_of_the_narrower() -> None:
    parallel = Parallel((StageParallel(2, 8), StageParallel(2, 4)))

    def times(link: FabricLink) -> tuple[float, float]:
        fabrics, plan = SITE.pools[:2], pipeline(SITE, pp=2)
        components = tuple(replace(c, nodes=nodes) for c, nodes in zip(plan.components, (2, 1), strict=True))
        layout = replace(
            Layout.of(plan, Costs()),
            site=replace(SITE, pools=fabrics, links=(link,)),
            parallel=parallel,
            components=components,
            model=replace(MODEL, tied=True),
            schedule=Schedule(PER_STAGE.name, (2, 1)),
        )
        return edge_times(layout).down[0][0], tied_embedding_s(layout)

    one_node, two_nodes = times(FabricLink(("a", "b"), total_gbps=1.0)), times(FabricLink(("a", "b"), gbps=1.0))
    assert one_node == pytest.approx(two_nodes)
    assert one_node[1] > 2 * times(FabricLink(("a", "b"), delay_ms=1e-9))[1]  # its ring crosses the line once


def test_the_search_avoids_a_line_that_all_nodes_share() -> None:
    options = PlanOptions(tp=2, pp=3, dp=8)
    plan = best_plan(MODEL, BATCH, with_links(FabricLink(("a", "b"), gbps=25.0, total_gbps=0.5)), options, Costs())
    assert [c.fabric for c in plan.components] in (["a", "c", "b"], ["b", "c", "a"])


@pytest.mark.parametrize("limit", [{"total_gbps": 1.0}, {"delay_ms": 40.0}])  # 40 ms: TCP windows limit the rate
def test_the_searchs_rates_are_those_of_the_cost_model(limit: dict[str, float]) -> None:
    site = with_links(FabricLink(("a", "b"), **limit))
    options = PlanOptions(tp=2, sequence_parallel=False)
    available = [AvailablePool(f, 2, 8, is_fixed=False) for f in site.pools]
    costs = PoolCosts(Problem(MODEL, BATCH, site, options, Costs()), 1, 2, available)
    layout = Layout.of(pipeline(site, sequence_parallel=False), Costs())
    assert costs.transfers_s(8)[1][0, 1] == pytest.approx(transfers_s(layout, 0)[0][0])
    ratio = 2 if "total_gbps" in limit else 1
    assert costs.ring_s((0, 1), 16) == pytest.approx(ratio * costs.ring_s((0, 1), 8))


def test_estimates_of_the_search_count_a_shared_line_and_delays() -> None:
    # each fabric gives both of its nodes to one stage, or to one optimizer instance
    def estimates(link: FabricLink) -> tuple[float, float]:
        options = PlanOptions(tp=2, nodes={"a": 2, "b": 2})
        problem = Problem(MODEL, BATCH, with_links(link), options, Costs())
        estimator = _ShapeEstimator(problem, available_pools(problem.site, options), 1, "none", inf)
        placements = hierarchies(estimator.costs_by_tp[2], 16, Limit(2, margin=2.0))
        return estimator.estimates([((0, 2, 2), (1, 2, 2))])[0], min(p.estimate_s for p in placements)

    shared, each, far, none = (
        estimates(FabricLink(("a", "b"), **limit))
        for limit in ({"total_gbps": 0.2}, {"gbps": 0.1}, {"delay_ms": 40.0}, {"delay_ms": 1e-9})
    )
    assert shared == pytest.approx(each) and all(s > 1.02 * n for s, n in zip(shared, none, strict=True))
    micro_batches, replicas = BATCH.micro_batches(1), 8  # a replica sends one message after the other
    assert far[0] > none[0] + 0.04 * micro_batches / replicas
