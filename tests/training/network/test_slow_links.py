"""A link that becomes slow during a run is reported with its stage, nodes and NIC within ten steps."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import plans
import pytest

from holmes_hpc.config.model import Batch
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.site import FabricLink
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import fixed_plan
from holmes_hpc.training.network.audit import planned_bytes
from holmes_hpc.training.network.interfaces import NodeTransports, endpoints
from holmes_hpc.training.network.link_diagnosis import LinkReport, NodeInformation, NodeLink, find_slow_links
from holmes_hpc.training.network.slow_links import (
    MIN_S,
    WINDOW,
    SlowLinkDetector,
    slow_edge_detector,
    slow_link_detector,
)

FAST, SLOW = [0.1, 0.4, 0.05, 0.05], [2.0, 2.3, 0.05, 0.05]  # of ranks 0,1 (stage 0) and 2,3 (stage 1)


NODES = plans.node_transports()


def detector(expected_s: tuple[float, float] = (0.1, 0.05)) -> SlowLinkDetector:
    stages = slow_link_detector(plan := plans.plan("ib-a", "roce-a"), NODES, {}, planned_bytes(plan, "fp32"))
    stages.expected_s[:] = expected_s
    return stages


def findings_of(links: SlowLinkDetector, steps: int, sync_s: list[float]) -> list[tuple[int, Finding]]:
    return [(step, finding) for step in range(1, steps + 1) for finding in links.add(sync_s)]


def test_a_link_at_a_twentieth_of_its_rate_is_reported_once_within_ten_steps() -> None:
    links = detector()
    assert not findings_of(links, 1 + 4 * WINDOW, FAST)
    ((step, finding),) = findings_of(links, 30, SLOW)
    assert step <= 10 and finding.level == "warning"
    assert str(finding).startswith(
        "warning: nodes ib[1-2] (NIC ib0): gradient synchronization of stage 0 takes 2 s a "
        "step (before: 0.1 s, planned: 0.1 s); a link there has become slow"
    )
    assert not findings_of(links, 30, FAST)
    assert len(findings_of(links, 30, SLOW)) == 1  # it had recovered


def test_a_rank_that_computes_slowly_is_not_a_slow_link() -> None:
    links = detector()
    findings_of(links, 1 + 2 * WINDOW, FAST)
    assert not findings_of(links, 30, [0.1, 9.0, 0.05, 0.05])  # rank 1 waits for rank 0, which does not


def test_planned_and_short_synchronizations_are_not_reported() -> None:
    links = detector(expected_s=(1.0, 0.05))
    findings_of(links, 1 + 2 * WINDOW, FAST)
    assert not findings_of(links, 30, SLOW)
    links = detector((0.0, 0.0))
    findings_of(links, 1 + 2 * WINDOW, [MIN_S / 100] * 4)
    assert not findings_of(links, 30, [MIN_S / 2] * 4)


def test_the_detector_of_a_plan_knows_stages_nics_and_planned_times() -> None:
    links = slow_link_detector(plan := plans.plan("ib-a", "roce-a"), NODES, {}, planned_bytes(plan, "fp32"))
    names = [links.describe(stage, 1, 1).where for stage in (0, 1)]
    assert names == ["nodes ib[1-2] (NIC ib0)", "nodes roce[1-2] (NIC roce0)"]
    ib, roce = links.expected_s
    assert roce > ib > 0 and roce / ib == pytest.approx(0.4 / 0.25, rel=0.5)


def test_a_pipeline_edge_at_a_twentieth_of_its_rate_is_named_within_ten_steps() -> None:
    site = replace(plans.site(), links=(FabricLink(("ib-a", "roce-a"), gbps=0.02),))
    plan = plans.plan("ib-a", "roce-a", site=site)
    edges = slow_edge_detector(plan, NODES, planned_bytes(plan, "fp32"))
    planned = edges.expected_s  # of ib1 to roce1, ib2 to roce2, and back
    assert planned == pytest.approx([8 * 4 * 32 * 32 * 4 / 0.02e9] * 4)  # 4 micro-batches, 4 bytes an activation
    busy_s = [MIN_S] * 4
    assert not findings_of(edges, 1 + 2 * WINDOW, busy_s)
    assert not findings_of(edges, WINDOW, [2 * MIN_S, 2.9 * MIN_S, MIN_S, 0])
    ((step, finding),) = findings_of(edges, 30, [MIN_S, 20 * MIN_S, MIN_S, MIN_S])
    assert step <= 10 and (finding.level, finding.node, finding.nic) == ("warning", "ib2", "eth0")
    gbps = 8e-9 * 4 * 32 * 32 * 4 / (20 * MIN_S)
    assert str(finding).startswith(
        "warning: nodes ib2 and roce2: Ethernet from eth0 10.0.0.1 of ib2 to eth0 10.0.0.3 of roce2 carries "
        f"{gbps * 1000:.3g} Mb/s of 20 Mb/s ({gbps / 0.02:.0%}; group edge of stages 0,1); check its link speed"
    )
    assert edges.slow == {"nodes ib2 and roce2": pytest.approx(20)}
    assert not findings_of(edges, WINDOW, busy_s) and not edges.slow


def test_only_the_slower_direction_of_a_link_is_named() -> None:
    edges = slow_edge_detector(plan := plans.plan("ib-a", "roce-a"), NODES, planned_bytes(plan, "fp32"))
    findings_of(edges, WINDOW, [0.1] * 4)
    ((_, finding),) = findings_of(edges, WINDOW, [0.1, 0.5, 0.1, 2.0])
    assert finding.node == "roce2" and " of roce2 to eth0 10.0.0.1 of ib2 carries" in str(finding)


def test_rings_over_two_fabrics_share_the_total_of_their_link() -> None:
    def expected_s(**rates: float) -> float:
        site = replace(plans.site(), links=(FabricLink(("ib-a", "roce-a"), **rates),))  # type: ignore[arg-type]
        options = PlanOptions(strategy="hierarchical-dp", tp=1, pp=1, dp=4, nodes={"ib-a": 2, "roce-a": 2})
        plan = fixed_plan(plans.MODEL, Batch(8, 1, 32), site, options, Costs())
        nodes = [
            NodeTransports(f"n{i}", p.pool, {"tcp": ("eth0", "10.0.0.1")}, {}, False) for i, p in enumerate(plan.places)
        ]
        return max(slow_link_detector(plan, nodes, {}, planned_bytes(plan, "fp32")).expected_s)

    assert expected_s(total_gbps=0.002) == expected_s(gbps=0.001)  # two nodes of a fabric send to the other


@pytest.mark.parametrize("rates", [{"gbps": 0.4}, {"total_gbps": 0.8}], ids=["of a node", "of both nodes together"])
@pytest.mark.parametrize(("gbps", "levels"), [(0.38, []), (0.15, ["warning"]), (0.03, ["error"])])
def test_the_link_check_uses_the_sites_rate_between_two_fabrics(
    gbps: float, levels: list[str], rates: dict[str, float]
) -> None:
    site = plans.site()
    site = replace(
        site,
        pools=tuple(replace(f, ethernet_gbps=25.0) for f in site.pools),
        links=(FabricLink(("ib-a", "roce-a"), **rates),),  # type: ignore[arg-type]
    )
    plan = plans.plan("ib-a", "roce-a", site=site)
    infos = []
    for rank, fabric in enumerate(("ib-a", "ib-a", "roce-a", "roce-a")):
        node = NodeTransports(f"n{rank}", fabric, {"tcp": ("eth0", f"10.0.0.{rank}")}, {}, False)
        infos.append(NodeInformation(node.node, fabric, (rank,), endpoints(plan, rank, node)))
    infos = [msgspec.json.decode(msgspec.json.encode(info), type=NodeInformation) for info in infos]
    crossing, inside = NodeLink("tcp", "n0", "n2", "edge"), NodeLink("tcp", "n0", "n1", "dp")
    assert [f.level for f in find_slow_links(infos, [LinkReport("n0", measured=((crossing, gbps),))])] == levels
    assert [f.level for f in find_slow_links(infos, [LinkReport("n0", measured=((inside, 0.38),))])] == ["error"]
    assert site.slowest_gbps("tcp", ["ib-a", "roce-a", "eth-a"], 2) == 0.4
    assert site.slowest_gbps("tcp", ["ib-a", "eth-a"]) == site.slowest_gbps("tcp", ["ib-a", "ib-a"]) == 25.0
