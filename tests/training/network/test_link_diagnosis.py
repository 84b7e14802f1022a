import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.finding import raise_errors
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.training.network.link_diagnosis import (
    CommunicationGroup,
    Endpoint,
    LinkReport,
    NodeInformation,
    NodeLink,
    declared_gbps,
    find_clock_skew,
    find_node_faults,
    find_slow_links,
    find_unreachable,
    grade,
    measurement_rounds,
    peer_links,
)


def info(
    node: str, fabric: str, ranks: tuple[int, ...], network: int, host: int, rdma: float | None = 0.4
) -> NodeInformation:
    nics = {"tcp": Endpoint("eth0", f"10.1.0.{host}", 1, 0.05)}
    if rdma is not None:
        nics["rdma"] = Endpoint(f"{fabric[:2]}0", f"10.{network}.0.{host}", 2, rdma)
    return NodeInformation(node, fabric, ranks, nics)


def job(ib: int = 4, roce: int = 4) -> tuple[list[NodeInformation], list[CommunicationGroup]]:
    """Return IB nodes with stage 0 and RoCE nodes with stage 1: one rank a node, DP inside fabrics, edges between."""
    infos = [info(f"ib{i + 1}", "ib-a", (i,), 2, 11 + i) for i in range(ib)]
    infos += [info(f"roce{i + 1}", "ro-a", (ib + i,), 3, 31 + i, 0.25) for i in range(roce)]
    groups = [
        CommunicationGroup("dp 0", "rdma", tuple(range(ib))),
        CommunicationGroup("dp 1", "rdma", tuple(range(ib, ib + roce))),
    ]
    groups += [CommunicationGroup(f"edge {i}", "tcp", (i, ib + i)) for i in range(min(ib, roce))]
    return infos, [*groups, CommunicationGroup("world", "tcp", tuple(range(ib + roce)), sampled=False)]


def test_peers_are_the_other_nodes_of_a_nodes_groups_once_per_transport() -> None:
    infos, groups = job()
    links = peer_links(infos, groups, "ib1")
    assert {link.receiver for link in links if link.kind == "rdma"} == {"ib2", "ib3", "ib4"}
    assert {link.receiver for link in links if link.kind == "tcp"} == {info.node for info in infos} - {"ib1"}
    assert next(link for link in links if link.receiver == "roce1").label == "edge 0"


def test_ranks_of_one_node_need_no_link() -> None:
    infos = [info("a", "ib-a", (0, 1), 2, 1), info("b", "ib-a", (2, 3), 2, 2)]
    assert peer_links(infos, [CommunicationGroup("tp", "rdma", (0, 1))], "a") == []
    dp_groups = [CommunicationGroup("dp", "rdma", (0, 2)), CommunicationGroup("dp", "rdma", (1, 3))]
    assert [link.receiver for link in peer_links(infos, dp_groups, "a")] == ["b"]


groups_strategy = st.lists(
    st.tuples(st.sampled_from(["rdma", "tcp"]), st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True)),
    max_size=8,
)


@given(groups_strategy)
def test_rounds_measure_every_ring_link_once_and_share_no_nic(drawn) -> None:
    infos = [info(f"n{i}", "ib-a", (2 * i, 2 * i + 1), 2, i + 1) for i in range(6)]
    groups = [CommunicationGroup(f"g{i}", kind, tuple(ranks)) for i, (kind, ranks) in enumerate(drawn)]
    rounds = measurement_rounds(infos, groups)
    for links in rounds:
        assert len({x.kind for x in links}) == 1
        assert len({x.sender for x in links}) == len({x.receiver for x in links}) == len(links)
    ends = [(x.kind, x.sender, x.receiver) for links in rounds for x in links]
    assert len(ends) == len(set(ends))
    for group in groups:
        nodes = list(dict.fromkeys(f"n{r // 2}" for r in group.ranks))
        for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            assert a == b or (group.kind, a, b) in ends


def test_two_fabrics_need_two_rounds() -> None:
    infos, groups = job()
    assert [len(r) for r in measurement_rounds(infos, groups)] == [8, 8]  # both RDMA rings, then all edges both ways


def test_rates_below_50_and_10_percent_are_warnings_and_errors() -> None:
    grades = {0.4: "ok", 0.2: "ok", 0.19: "warning", 0.041: "warning", 0.039: "error", 0.0: "error", None: "error"}
    assert {rate: grade(rate, 0.4) for rate in grades} == grades


def test_the_declared_rate_is_the_slower_nics_up_to_a_provable_one() -> None:
    infos = {info.node: info for info in job()[0]}
    infos["fast1"], infos["fast2"] = (info(n, "ib-b", (), 4, 1, 400.0) for n in ("fast1", "fast2"))
    assert declared_gbps(infos, NodeLink("tcp", "ib1", "roce1")) == 0.05
    assert declared_gbps(infos, NodeLink("rdma", "fast1", "fast2")) == 5.0


def test_a_missing_nic_and_a_shared_address_are_node_faults() -> None:
    infos, groups = job()
    assert find_node_faults(infos, groups) == []
    infos[1] = NodeInformation("ib2", "ib-a", (1,), {"tcp": infos[1].nics["tcp"]})
    (finding,) = find_node_faults(infos, groups)
    assert finding.node == "ib2" and "RDMA" in finding.what and "dp 0" in finding.what
    shared = Endpoint("docker0", "172.17.0.1", 1, 1)
    infos = [NodeInformation(c.node, c.fabric, c.ranks, {**c.nics, "tcp": shared}) for c in job()[0][:2]]
    (finding,) = find_node_faults(infos, [])
    assert "172.17.0.1" in finding.what and finding.where == "nodes ib[1-2]"


def test_one_unusual_interface_name_is_a_warning_and_another_naming_scheme_is_not() -> None:
    infos, groups = job()

    def renamed(info: NodeInformation, name: str) -> NodeInformation:
        nic = Endpoint(name, info.nics["tcp"].address, 1, 1)
        return NodeInformation(info.node, info.fabric, info.ranks, {**info.nics, "tcp": nic})

    unusual = [renamed(c, "ethx") if c.node == "roce2" else c for c in infos]
    assert [(f.level, f.node, f.nic) for f in find_node_faults(unusual, groups)] == [("warning", "roce2", "ethx")]
    scheme = [renamed(c, "ens3") if c.node.startswith("roce") else c for c in job(5, 4)[0]]
    assert find_node_faults(scheme, job(5, 4)[1]) == []


def reports_of(infos, groups, is_broken) -> list[LinkReport]:
    """Return reports in which the links fail for which `is_broken` is true."""
    return [
        LinkReport(c.node, tuple((x, "no answer in 3 s") for x in peer_links(infos, groups, c.node) if is_broken(x)))
        for c in infos
    ]


def test_reports_without_failures_give_no_finding() -> None:
    infos, groups = job()
    assert find_unreachable(infos, reports_of(infos, groups, lambda link: False)) == []


@pytest.mark.parametrize("bad", ["ib1", "ib3", "roce4"])
def test_a_dead_rdma_nic_is_one_finding_with_node_nic_and_peers(bad: str) -> None:
    infos, groups = job()
    reports = reports_of(infos, groups, lambda x: x.kind == "rdma" and bad in (x.sender, x.receiver))
    (finding,) = find_unreachable(infos, reports)
    assert finding.node == bad and finding.nic in ("ib0", "ro0")
    assert "does not reach" in finding.what
    with pytest.raises(NetworkError, match=f"node {bad}: RDMA NIC"):
        raise_errors([finding])


def test_a_firewall_between_two_nodes_is_one_finding_with_both() -> None:
    infos, groups = job()
    reports = reports_of(infos, groups, lambda x: {x.sender, x.receiver} == {"ib2", "roce1"})
    (finding,) = find_unreachable(infos, reports)
    assert finding.where in ("nodes ib2 and roce1", "nodes roce1 and ib2")
    assert "firewall" in finding.hint and "eth0" in str(finding)


def test_a_one_way_firewall_is_one_finding_with_sender_and_receiver() -> None:
    infos, groups = job()
    reports = reports_of(infos, groups, lambda x: x == NodeLink("rdma", "ib2", "ib3", "dp 0"))
    (finding,) = find_unreachable(infos, reports)
    assert "ib2 (ib0" in finding.what and "does not reach ib3" in finding.what


def test_two_fabrics_with_one_label_are_one_finding() -> None:
    infos, groups = job()
    island = {"ib1", "ib2"}
    reports = reports_of(
        infos,
        groups,
        lambda x: x.kind == "rdma" and x.sender.startswith("ib") and (x.sender in island) != (x.receiver in island),
    )
    (finding,) = find_unreachable(infos, reports)
    assert "ib[1-2]" in str(finding) and "ib[3-4]" in str(finding)
    assert "fabric ib-a" in finding.where and "fabric_ features" in finding.hint


def test_two_dead_nics_are_two_findings() -> None:
    infos, groups = job()
    dead = {"ib1", "roce2"}
    reports = reports_of(infos, groups, lambda x: x.kind == "rdma" and bool(dead & {x.sender, x.receiver}))
    assert sorted(f.node for f in find_unreachable(infos, reports)) == ["ib1", "roce2"]


def samples(infos, groups, share) -> list[LinkReport]:
    """Return reports with `share(link)` of the declared rates, and of slow links the sample to a third node too."""
    by_node = {c.node: c for c in infos}
    reports = []
    for c in infos:
        measured = []
        for links in measurement_rounds(infos, groups):
            for link in (x for x in links if x.sender == c.node):
                rate = declared_gbps(by_node, link)
                measured.append((link, share(link) * rate))
                third = next((x.receiver for x in links if x.sender == link.receiver and x.receiver != c.node), None)
                if grade(share(link) * rate, rate) != "ok" and third:
                    third_link = NodeLink(link.kind, c.node, third, link.label)
                    measured.append((third_link, share(third_link) * rate))
        reports.append(LinkReport(c.node, (), tuple(measured)))
    return reports


@pytest.mark.parametrize(("share", "level"), [(0.3, "warning"), (0.05, "error"), (0.0, "error")])
@pytest.mark.parametrize(
    ("node", "kind", "nic"), [("ib2", "rdma", "ib0"), ("roce4", "rdma", "ro0"), ("roce1", "rdma", "ro0")]
)
@pytest.mark.parametrize("direction", ["sends", "receives", "both"])
def test_a_shaped_nic_is_one_finding(share: float, level: str, node: str, kind: str, nic: str, direction: str) -> None:
    def rate(link: NodeLink) -> float:
        is_shaped = link.kind == kind and (
            (node == link.sender and direction != "receives") or (node == link.receiver and direction != "sends")
        )
        return share if is_shaped else 0.97

    infos, groups = job()
    (finding,) = find_slow_links(infos, samples(infos, groups, rate))
    assert (finding.level, finding.node, finding.nic) == (level, node, nic)
    assert f"node {node}: RDMA NIC {nic}" in str(finding) and f"({share:.0%}" in str(finding)


def test_a_slow_link_in_a_fabric_of_two_nodes_names_both() -> None:
    infos, groups = job(2, 2)
    reports = samples(infos, groups, lambda x: 0.05 if x.kind == "rdma" and x.sender == "ib1" else 1.0)
    (finding,) = find_slow_links(infos, reports)
    assert "ib1" in finding.where and "ib2" in finding.where


def test_samples_above_half_of_the_declared_rate_give_no_finding() -> None:
    infos, groups = job()
    assert find_slow_links(infos, samples(infos, groups, lambda x: 0.51)) == []


@given(st.sampled_from([f"ib{i}" for i in range(1, 5)]), st.sampled_from([f"roce{i}" for i in range(1, 5)]))
def test_two_shaped_nics_of_two_fabrics_are_two_findings(ib: str, roce: str) -> None:
    infos, groups = job()
    reports = samples(infos, groups, lambda x: 0.2 if x.kind == "rdma" and {ib, roce} & {x.sender, x.receiver} else 1)
    assert sorted(f.node for f in find_slow_links(infos, reports)) == [ib, roce]


def test_reports_and_node_information_can_be_stored_as_json() -> None:
    infos, _ = job()
    report = LinkReport(
        "a", ((NodeLink("tcp", "a", "b", "g"), "refused"),), ((NodeLink("rdma", "a", "b"), None),), {"b": 2.5}
    )
    assert msgspec.json.decode(msgspec.json.encode(report), type=LinkReport) == report
    assert msgspec.json.decode(msgspec.json.encode(infos), type=list[NodeInformation]) == infos


def test_clock_skew_is_reported_for_the_node_whose_clock_is_off() -> None:
    nodes = ["a", "b", "c", "d"]
    reports = [LinkReport(n, skew_s={m: 90.0 for m in nodes if m == "c" != n}) for n in nodes]
    reports[2] = LinkReport("c", skew_s={m: -90.0 for m in nodes if m != "c"})
    assert [(f.node, f.level) for f in find_clock_skew(reports)] == [("c", "warning")]
    assert find_clock_skew([LinkReport("a", skew_s={"b": 5.0})]) == []


def test_links_of_a_node_grow_with_the_number_of_nodes_not_of_pairs() -> None:
    count = 500
    infos, groups = job(count, count)
    assert len(peer_links(infos, groups, "ib7")) == (2 * count - 1) + (count - 1)
    assert len(measurement_rounds(infos, groups)) == 2
    down = [LinkReport("ib9", tuple((x, "no answer") for x in peer_links(infos, groups, "ib9")))]
    assert [f.node for f in find_unreachable(infos, down)] == ["ib9", "ib9"]


@pytest.mark.parametrize("first", range(12))  # string hashes, and so the order of sets, differ between processes
def test_all_nodes_report_two_islands_in_the_same_order(first: int) -> None:
    names = [f"n{first + i}" for i in range(4)]
    infos = [info(name, "ib-a", (i,), 2, 11 + i) for i, name in enumerate(names)]
    pairs = [(a, b) for a in names[:2] for b in names[2:]]
    reports = [LinkReport(a, ((NodeLink("rdma", a, b, "dp"), "timed out"),)) for a, b in pairs]
    (finding,) = find_unreachable(infos, reports)
    first_island = names[:2] if min(names) in names[:2] else names[2:]
    assert finding.what.startswith(f"nodes {compress(first_island)} (ib0")
