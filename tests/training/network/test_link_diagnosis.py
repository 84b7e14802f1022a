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
    audit,
    declared,
    grade,
    peers,
    rounds,
    skewed,
    slow,
    unreachable,
)


def info(
    node: str, fabric: str, ranks: tuple[int, ...], network: int, host: int, rdma: float | None = 0.4
) -> NodeInformation:
    nics = {"tcp": Endpoint("eth0", f"10.1.0.{host}", 1, 0.05)}
    if rdma is not None:
        nics["rdma"] = Endpoint(f"{fabric[:2]}0", f"10.{network}.0.{host}", 2, rdma)
    return NodeInformation(node, fabric, ranks, nics)


def job(ib: int = 4, roce: int = 4) -> tuple[list[NodeInformation], list[CommunicationGroup]]:
    """IB nodes hold stage 0, RoCE nodes stage 1; one rank a node, data parallel inside, edges between."""
    infos = [info(f"ib{i + 1}", "ib-a", (i,), 2, 11 + i) for i in range(ib)]
    infos += [info(f"roce{i + 1}", "ro-a", (ib + i,), 3, 31 + i, 0.25) for i in range(roce)]
    groups = [
        CommunicationGroup("dp 0", "rdma", tuple(range(ib))),
        CommunicationGroup("dp 1", "rdma", tuple(range(ib, ib + roce))),
    ]
    groups += [CommunicationGroup(f"edge {i}", "tcp", (i, ib + i)) for i in range(min(ib, roce))]
    return infos, [*groups, CommunicationGroup("world", "tcp", tuple(range(ib + roce)), sampled=False)]


def test_peers_are_the_other_nodes_of_its_groups_each_kind_once() -> None:
    infos, groups = job()
    links = peers(infos, groups, "ib1")
    assert {link.receiver for link in links if link.kind == "rdma"} == {"ib2", "ib3", "ib4"}
    assert {link.receiver for link in links if link.kind == "tcp"} == {c.node for c in infos} - {"ib1"}
    assert next(link for link in links if link.receiver == "roce1").label == "edge 0"


def test_several_ranks_of_a_node_need_no_link_and_local_groups_none() -> None:
    infos = [info("a", "ib-a", (0, 1), 2, 1), info("b", "ib-a", (2, 3), 2, 2)]
    same_node = [CommunicationGroup("tp", "local", (0, 1)), CommunicationGroup("tp", "rdma", (0, 1))]
    assert peers(infos, same_node, "a") == []
    both = [CommunicationGroup("dp", "rdma", (0, 2)), CommunicationGroup("dp", "rdma", (1, 3))]
    assert [link.receiver for link in peers(infos, both, "a")] == ["b"]


groups = st.lists(
    st.tuples(st.sampled_from(["rdma", "tcp"]), st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True)),
    max_size=8,
)


@given(groups)
def test_rounds_measure_every_ring_link_once_and_share_no_nic(groups_) -> None:
    infos = [info(f"n{i}", "ib-a", (2 * i, 2 * i + 1), 2, i + 1) for i in range(6)]
    groups = [CommunicationGroup(f"g{i}", kind, tuple(ranks)) for i, (kind, ranks) in enumerate(groups_)]
    found = rounds(infos, groups)
    for chosen in found:
        assert len({x.kind for x in chosen}) == 1
        assert len({x.sender for x in chosen}) == len({x.receiver for x in chosen}) == len(chosen)
    links = [(x.kind, x.sender, x.receiver) for r in found for x in r]
    assert len(links) == len(set(links))
    for group in groups:
        nodes = list(dict.fromkeys(f"n{r // 2}" for r in group.ranks))
        for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            assert a == b or (group.kind, a, b) in links


def test_a_chain_of_three_fabrics_needs_few_rounds() -> None:
    infos, groups = job()
    assert [len(r) for r in rounds(infos, groups)] == [8, 8]  # both RDMA rings at once, then all edges both ways


def test_a_measured_rate_is_graded() -> None:
    table = {0.4: "ok", 0.2: "ok", 0.19: "warning", 0.041: "warning", 0.039: "error", 0.0: "error", None: "error"}
    assert {rate: grade(rate, 0.4) for rate in table} == table


def test_declared_is_the_slower_nic_as_far_as_it_can_be_proven() -> None:
    infos = {c.node: c for c in job()[0]}
    infos["fast1"], infos["fast2"] = (info(n, "ib-b", (), 4, 1, 400.0) for n in ("fast1", "fast2"))
    assert declared(infos, NodeLink("tcp", "ib1", "roce1")) == 0.05
    assert declared(infos, NodeLink("rdma", "fast1", "fast2")) == 5.0


def test_audit_of_a_healthy_job_is_empty_and_faults_are_named() -> None:
    infos, groups = job()
    assert audit(infos, groups) == []
    infos[1] = NodeInformation("ib2", "ib-a", (1,), {"tcp": infos[1].nics["tcp"]})
    (found,) = audit(infos, groups)
    assert found.node == "ib2" and "RDMA" in found.what and "dp 0" in found.what
    twice = Endpoint("docker0", "172.17.0.1", 1, 1)
    infos = [NodeInformation(c.node, c.fabric, c.ranks, {**c.nics, "tcp": twice}) for c in job()[0][:2]]
    (found,) = audit(infos, [])
    assert "172.17.0.1" in found.what and found.where == "nodes ib[1-2]"


def test_a_renamed_interface_is_a_warning_and_another_naming_scheme_none() -> None:
    infos, groups = job()

    def renamed(info: NodeInformation, name: str) -> NodeInformation:
        nic = Endpoint(name, info.nics["tcp"].address, 1, 1)
        return NodeInformation(info.node, info.fabric, info.ranks, {**info.nics, "tcp": nic})

    odd = [renamed(c, "ethx") if c.node == "roce2" else c for c in infos]
    assert [(f.level, f.node, f.nic) for f in audit(odd, groups)] == [("warning", "roce2", "ethx")]
    scheme = [renamed(c, "ens3") if c.node.startswith("roce") else c for c in job(5, 4)[0]]
    assert audit(scheme, job(5, 4)[1]) == []


def failing(infos, groups, broken) -> list[LinkReport]:
    """Reports in which the links that `broken` names fail."""
    return [
        LinkReport(c.node, tuple((x, "no answer in 3 s") for x in peers(infos, groups, c.node) if broken(x)))
        for c in infos
    ]


def test_healthy_reports_give_no_finding() -> None:
    infos, groups = job()
    assert unreachable(infos, failing(infos, groups, lambda link: False)) == []


@pytest.mark.parametrize("bad", ["ib1", "ib3", "roce4"])
def test_a_dead_rdma_nic_is_one_line_that_names_node_nic_and_peers(bad: str) -> None:
    infos, groups = job()
    found = unreachable(infos, failing(infos, groups, lambda x: x.kind == "rdma" and bad in (x.sender, x.receiver)))
    assert len(found) == 1 and found[0].node == bad and found[0].nic in ("ib0", "ro0")
    assert "does not reach" in found[0].what
    with pytest.raises(NetworkError, match=f"node {bad}: RDMA NIC"):
        raise_errors(found)


def test_a_firewall_between_two_nodes_names_both() -> None:
    infos, groups = job()
    found = unreachable(infos, failing(infos, groups, lambda x: {x.sender, x.receiver} == {"ib2", "roce1"}))
    assert len(found) == 1 and found[0].where in ("nodes ib2 and roce1", "nodes roce1 and ib2")
    assert "firewall" in found[0].hint and "eth0" in str(found[0])


def test_a_one_way_firewall_too() -> None:
    infos, groups = job()
    found = unreachable(infos, failing(infos, groups, lambda x: x == NodeLink("rdma", "ib2", "ib3", "dp 0")))
    assert len(found) == 1 and "ib2 (ib0" in found[0].what and "does not reach ib3" in found[0].what


def test_two_fabrics_with_one_label() -> None:
    infos, groups = job()
    left = {"ib1", "ib2"}
    found = unreachable(
        infos,
        failing(
            infos,
            groups,
            lambda x: x.kind == "rdma" and x.sender.startswith("ib") and (x.sender in left) != (x.receiver in left),
        ),
    )
    assert len(found) == 1 and "ib[1-2]" in str(found[0]) and "ib[3-4]" in str(found[0])
    assert "fabric ib-a" in found[0].where and "fabric_ features" in found[0].hint


def test_two_faults_are_two_lines() -> None:
    infos, groups = job()
    two = {"ib1", "roce2"}
    reports = failing(infos, groups, lambda x: x.kind == "rdma" and bool(two & {x.sender, x.receiver}))
    found = unreachable(infos, reports)
    assert sorted(f.node for f in found) == ["ib1", "roce2"]


def samples(infos, groups, share) -> list[LinkReport]:
    """What `share(link)` of the declared rate each node would measure, with the third node's test for slow links."""
    by_node = {c.node: c for c in infos}
    reports = []
    for c in infos:
        measured = []
        for chosen in rounds(infos, groups):
            for link in (x for x in chosen if x.sender == c.node):
                rate = declared(by_node, link)
                measured.append((link, share(link) * rate))
                third = next((x.receiver for x in chosen if x.sender == link.receiver and x.receiver != c.node), None)
                if grade(share(link) * rate, rate) != "ok" and third:
                    extra = NodeLink(link.kind, c.node, third, link.label)
                    measured.append((extra, share(extra) * rate))
        reports.append(LinkReport(c.node, (), tuple(measured)))
    return reports


@pytest.mark.parametrize(("share", "level"), [(0.3, "warning"), (0.05, "error"), (0.0, "error")])
@pytest.mark.parametrize(
    ("node", "kind", "nic"), [("ib2", "rdma", "ib0"), ("roce4", "rdma", "ro0"), ("roce1", "rdma", "ro0")]
)
@pytest.mark.parametrize("direction", ["sends", "receives", "both"])
def test_a_shaped_nic_is_one_line(share: float, level: str, node: str, kind: str, nic: str, direction: str) -> None:
    def rate(link: NodeLink) -> float:
        hit = link.kind == kind and (
            (node == link.sender and direction != "receives") or (node == link.receiver and direction != "sends")
        )
        return share if hit else 0.97

    infos, groups = job()
    found = slow(infos, samples(infos, groups, rate))
    assert [(f.level, f.node, f.nic) for f in found] == [(level, node, nic)]
    assert f"node {node}: RDMA NIC {nic}" in str(found[0]) and f"({share:.0%}" in str(found[0])


def test_two_nodes_alone_are_both_named() -> None:
    infos, groups = job(2, 2)
    found = slow(infos, samples(infos, groups, lambda x: 0.05 if x.kind == "rdma" and x.sender == "ib1" else 1.0))
    assert len(found) == 1 and "ib1" in found[0].where and "ib2" in found[0].where


def test_healthy_samples_give_no_finding() -> None:
    infos, groups = job()
    assert slow(infos, samples(infos, groups, lambda x: 0.51)) == []


@given(st.sampled_from([f"ib{i}" for i in range(1, 5)]), st.sampled_from([f"roce{i}" for i in range(1, 5)]))
def test_two_shaped_nics_of_two_fabrics_are_two_lines(one: str, two: str) -> None:
    infos, groups = job()
    hit = {one, two}
    shares = samples(infos, groups, lambda x: 0.2 if x.kind == "rdma" and hit & {x.sender, x.receiver} else 1)
    found = slow(infos, shares)
    assert {f.node for f in found} == {one, two} and len(found) == 2


def test_reports_and_cards_survive_the_store() -> None:
    infos, _ = job()
    report = LinkReport(
        "a", ((NodeLink("tcp", "a", "b", "g"), "refused"),), ((NodeLink("rdma", "a", "b"), None),), {"b": 2.5}
    )
    assert msgspec.json.decode(msgspec.json.encode(report), type=LinkReport) == report
    assert msgspec.json.decode(msgspec.json.encode(infos), type=list[NodeInformation]) == infos


def test_clock_skew_names_the_node_that_is_off() -> None:
    nodes = ["a", "b", "c", "d"]
    reports = [LinkReport(n, skew_s={m: 90.0 for m in nodes if m == "c" != n}) for n in nodes]
    reports[2] = LinkReport("c", skew_s={m: -90.0 for m in nodes if m != "c"})
    found = skewed(reports)
    assert [(f.node, f.level) for f in found] == [("c", "warning")]
    assert skewed([LinkReport("a", skew_s={"b": 5.0})]) == []


def test_work_at_a_thousand_nodes_grows_with_nodes_not_with_pairs() -> None:
    count = 500
    infos, groups = job(count, count)
    assert len(peers(infos, groups, "ib7")) == (2 * count - 1) + (count - 1)
    assert len(rounds(infos, groups)) == 2
    down = [LinkReport("ib9", tuple((x, "no answer") for x in peers(infos, groups, "ib9")))]
    assert [f.node for f in unreachable(infos, down)] == ["ib9", "ib9"]


@pytest.mark.parametrize("first", range(12))  # string hashes, and so the order of sets, differ between processes
def test_two_islands_are_told_in_the_same_order_by_all_nodes(first: int) -> None:
    names = [f"n{first + i}" for i in range(4)]
    infos = [info(name, "ib-a", (i,), 2, 11 + i) for i, name in enumerate(names)]
    pairs = [(a, b) for a in names[:2] for b in names[2:]]
    reports = [LinkReport(a, ((NodeLink("rdma", a, b, "dp"), "timed out"),)) for a, b in pairs]
    (found,) = unreachable(infos, reports)
    part = names[:2] if min(names) in names[:2] else names[2:]
    assert found.what.startswith(f"nodes {compress(part)} (ib0")
