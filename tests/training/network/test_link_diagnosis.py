import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.finding import raise_errors
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.training.network.link_diagnosis import (
    Card,
    Endpoint,
    Link,
    Report,
    Talk,
    audit,
    declared,
    judge,
    peers,
    rounds,
    skewed,
    slow,
    unreachable,
)


def card(node: str, fabric: str, ranks: tuple[int, ...], network: int, host: int, rdma: float | None = 0.4) -> Card:
    nics = {"tcp": Endpoint("eth0", f"10.1.0.{host}", 1, 0.05)}
    if rdma is not None:
        nics["rdma"] = Endpoint(f"{fabric[:2]}0", f"10.{network}.0.{host}", 2, rdma)
    return Card(node, fabric, ranks, nics)


def job(ib: int = 4, roce: int = 4) -> tuple[list[Card], list[Talk]]:
    """IB nodes hold stage 0, RoCE nodes stage 1; one rank a node, data parallel inside, edges between."""
    cards = [card(f"ib{i + 1}", "ib-a", (i,), 2, 11 + i) for i in range(ib)]
    cards += [card(f"roce{i + 1}", "ro-a", (ib + i,), 3, 31 + i, 0.25) for i in range(roce)]
    talks = [Talk("dp 0", "rdma", tuple(range(ib))), Talk("dp 1", "rdma", tuple(range(ib, ib + roce)))]
    talks += [Talk(f"edge {i}", "tcp", (i, ib + i)) for i in range(min(ib, roce))]
    return cards, [*talks, Talk("world", "tcp", tuple(range(ib + roce)), sampled=False)]


def test_peers_are_the_other_nodes_of_its_groups_each_kind_once() -> None:
    cards, talks = job()
    links = peers(cards, talks, "ib1")
    assert {link.receiver for link in links if link.kind == "rdma"} == {"ib2", "ib3", "ib4"}
    assert {link.receiver for link in links if link.kind == "tcp"} == {c.node for c in cards} - {"ib1"}
    assert next(link for link in links if link.receiver == "roce1").label == "edge 0"


def test_several_ranks_of_a_node_need_no_link_and_local_groups_none() -> None:
    cards = [card("a", "ib-a", (0, 1), 2, 1), card("b", "ib-a", (2, 3), 2, 2)]
    assert peers(cards, [Talk("tp", "local", (0, 1)), Talk("tp", "rdma", (0, 1))], "a") == []
    both = [Talk("dp", "rdma", (0, 2)), Talk("dp", "rdma", (1, 3))]
    assert [link.receiver for link in peers(cards, both, "a")] == ["b"]


groups = st.lists(st.tuples(st.sampled_from(["rdma", "tcp"]), st.lists(st.integers(0, 11), min_size=1, max_size=12,
                                                                      unique=True)), max_size=8)


@given(groups)
def test_rounds_measure_every_ring_link_once_and_share_no_nic(groups_) -> None:
    cards = [card(f"n{i}", "ib-a", (2 * i, 2 * i + 1), 2, i + 1) for i in range(6)]
    talks = [Talk(f"g{i}", kind, tuple(ranks)) for i, (kind, ranks) in enumerate(groups_)]
    found = rounds(cards, talks)
    for chosen in found:
        assert len({x.kind for x in chosen}) == 1
        assert len({x.sender for x in chosen}) == len({x.receiver for x in chosen}) == len(chosen)
    links = [(x.kind, x.sender, x.receiver) for r in found for x in r]
    assert len(links) == len(set(links))
    for talk in talks:
        nodes = list(dict.fromkeys(f"n{r // 2}" for r in talk.ranks))
        for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            assert a == b or (talk.kind, a, b) in links


def test_a_chain_of_three_fabrics_needs_few_rounds() -> None:
    cards, talks = job()
    assert [len(r) for r in rounds(cards, talks)] == [8, 8]  # both RDMA rings at once, then all edges both ways


def test_judge() -> None:
    table = {0.4: "ok", 0.2: "ok", 0.19: "warning", 0.041: "warning", 0.039: "error", 0.0: "error", None: "error"}
    assert {rate: judge(rate, 0.4) for rate in table} == table


def test_declared_is_the_slower_nic_as_far_as_it_can_be_proven() -> None:
    cards = {c.node: c for c in job()[0]}
    cards["fast1"], cards["fast2"] = (card(n, "ib-b", (), 4, 1, 400.0) for n in ("fast1", "fast2"))
    assert declared(cards, Link("tcp", "ib1", "roce1")) == 0.05
    assert declared(cards, Link("rdma", "fast1", "fast2")) == 5.0


def test_audit_of_a_healthy_job_is_empty_and_faults_are_named() -> None:
    cards, talks = job()
    assert audit(cards, talks) == []
    cards[1] = Card("ib2", "ib-a", (1,), {"tcp": cards[1].nics["tcp"]})
    found, = audit(cards, talks)
    assert found.node == "ib2" and "RDMA" in found.what and "dp 0" in found.what
    twice = Endpoint("docker0", "172.17.0.1", 1, 1)
    cards = [Card(c.node, c.fabric, c.ranks, {**c.nics, "tcp": twice}) for c in job()[0][:2]]
    found, = audit(cards, [])
    assert "172.17.0.1" in found.what and found.where == "nodes ib[1-2]"


def test_a_renamed_interface_is_a_warning_and_another_naming_scheme_none() -> None:
    cards, talks = job()

    def renamed(card: Card, name: str) -> Card:
        nic = Endpoint(name, card.nics["tcp"].address, 1, 1)
        return Card(card.node, card.fabric, card.ranks, {**card.nics, "tcp": nic})

    odd = [renamed(c, "ethx") if c.node == "roce2" else c for c in cards]
    assert [(f.level, f.node, f.nic) for f in audit(odd, talks)] == [("warning", "roce2", "ethx")]
    scheme = [renamed(c, "ens3") if c.node.startswith("roce") else c for c in job(5, 4)[0]]
    assert audit(scheme, job(5, 4)[1]) == []


def failing(cards, talks, broken) -> list[Report]:
    """Reports in which the links that `broken` names fail."""
    return [Report(c.node, tuple((link, "no answer in 3 s") for link in peers(cards, talks, c.node) if broken(link)))
            for c in cards]


def test_healthy_reports_give_no_finding() -> None:
    cards, talks = job()
    assert unreachable(cards, failing(cards, talks, lambda link: False)) == []


@pytest.mark.parametrize("bad", ["ib1", "ib3", "roce4"])
def test_a_dead_rdma_nic_is_one_line_that_names_node_nic_and_peers(bad: str) -> None:
    cards, talks = job()
    found = unreachable(cards, failing(cards, talks, lambda x: x.kind == "rdma" and bad in (x.sender, x.receiver)))
    assert len(found) == 1 and found[0].node == bad and found[0].nic in ("ib0", "ro0")
    assert "does not reach" in found[0].what
    with pytest.raises(NetworkError, match=f"node {bad}: RDMA NIC"):
        raise_errors(found)


def test_a_firewall_between_two_nodes_names_both() -> None:
    cards, talks = job()
    found = unreachable(cards, failing(cards, talks, lambda x: {x.sender, x.receiver} == {"ib2", "roce1"}))
    assert len(found) == 1 and found[0].where in ("nodes ib2 and roce1", "nodes roce1 and ib2")
    assert "firewall" in found[0].hint and "eth0" in str(found[0])


def test_a_one_way_firewall_too() -> None:
    cards, talks = job()
    found = unreachable(cards, failing(cards, talks, lambda x: x == Link("rdma", "ib2", "ib3", "dp 0")))
    assert len(found) == 1 and "ib2 (ib0" in found[0].what and "does not reach ib3" in found[0].what


def test_two_fabrics_with_one_label() -> None:
    cards, talks = job()
    left = {"ib1", "ib2"}
    found = unreachable(cards, failing(cards, talks, lambda x: x.kind == "rdma" and x.sender.startswith("ib")
                                       and (x.sender in left) != (x.receiver in left)))
    assert len(found) == 1 and "ib[1-2]" in str(found[0]) and "ib[3-4]" in str(found[0])
    assert "fabric ib-a" in found[0].where and "fabric_ features" in found[0].hint


def test_two_faults_are_two_lines() -> None:
    cards, talks = job()
    two = {"ib1", "roce2"}
    found = unreachable(cards, failing(cards, talks, lambda x: x.kind == "rdma" and bool(two & {x.sender, x.receiver})))
    assert sorted(f.node for f in found) == ["ib1", "roce2"]


def samples(cards, talks, share) -> list[Report]:
    """What `share(link)` of the declared rate each node would measure, with the third node's test for slow links."""
    by_node = {c.node: c for c in cards}
    reports = []
    for c in cards:
        measured = []
        for chosen in rounds(cards, talks):
            for link in (x for x in chosen if x.sender == c.node):
                rate = declared(by_node, link)
                measured.append((link, share(link) * rate))
                third = next((x.receiver for x in chosen if x.sender == link.receiver and x.receiver != c.node), None)
                if judge(share(link) * rate, rate) != "ok" and third:
                    extra = Link(link.kind, c.node, third, link.label)
                    measured.append((extra, share(extra) * rate))
        reports.append(Report(c.node, (), tuple(measured)))
    return reports


@pytest.mark.parametrize(("share", "level"), [(0.3, "warning"), (0.05, "error"), (0.0, "error")])
@pytest.mark.parametrize(("node", "kind", "nic"), [("ib2", "rdma", "ib0"), ("roce4", "rdma", "ro0"),
                                                   ("roce1", "rdma", "ro0")])
@pytest.mark.parametrize("direction", ["sends", "receives", "both"])
def test_a_shaped_nic_is_one_line(share: float, level: str, node: str, kind: str, nic: str, direction: str) -> None:
    def rate(link: Link) -> float:
        hit = link.kind == kind and ((node == link.sender and direction != "receives")
                                     or (node == link.receiver and direction != "sends"))
        return share if hit else 0.97

    cards, talks = job()
    found = slow(cards, samples(cards, talks, rate))
    assert [(f.level, f.node, f.nic) for f in found] == [(level, node, nic)]
    assert f"node {node}: RDMA NIC {nic}" in str(found[0]) and f"({share:.0%}" in str(found[0])


def test_two_nodes_alone_are_both_named() -> None:
    cards, talks = job(2, 2)
    found = slow(cards, samples(cards, talks, lambda x: 0.05 if x.kind == "rdma" and x.sender == "ib1" else 1.0))
    assert len(found) == 1 and "ib1" in found[0].where and "ib2" in found[0].where


def test_healthy_samples_give_no_finding() -> None:
    cards, talks = job()
    assert slow(cards, samples(cards, talks, lambda x: 0.51)) == []


@given(st.sampled_from([f"ib{i}" for i in range(1, 5)]), st.sampled_from([f"roce{i}" for i in range(1, 5)]))
def test_two_shaped_nics_of_two_fabrics_are_two_lines(one: str, two: str) -> None:
    cards, talks = job()
    hit = {one, two}
    shares = samples(cards, talks, lambda x: 0.2 if x.kind == "rdma" and hit & {x.sender, x.receiver} else 1)
    found = slow(cards, shares)
    assert {f.node for f in found} == {one, two} and len(found) == 2


def test_reports_and_cards_survive_the_store() -> None:
    cards, _ = job()
    report = Report("a", ((Link("tcp", "a", "b", "g"), "refused"),), ((Link("rdma", "a", "b"), None),), {"b": 2.5})
    assert Report.from_dict(report.to_dict()) == report
    assert [Card.from_dict(c.to_dict()) for c in cards] == cards


def test_clock_skew_names_the_node_that_is_off() -> None:
    nodes = ["a", "b", "c", "d"]
    reports = [Report(n, skew_s={m: 90.0 for m in nodes if m == "c" != n}) for n in nodes]
    reports[2] = Report("c", skew_s={m: -90.0 for m in nodes if m != "c"})
    found = skewed(reports)
    assert [(f.node, f.level) for f in found] == [("c", "warning")]
    assert skewed([Report("a", skew_s={"b": 5.0})]) == []


def test_work_at_a_thousand_nodes_grows_with_nodes_not_with_pairs() -> None:
    count = 500
    cards, talks = job(count, count)
    assert len(peers(cards, talks, "ib7")) == (2 * count - 1) + (count - 1)
    assert len(rounds(cards, talks)) == 2
    down = [Report("ib9", tuple((x, "no answer") for x in peers(cards, talks, "ib9")))]
    assert [f.node for f in unreachable(cards, down)] == ["ib9", "ib9"]


@pytest.mark.parametrize("first", range(12))  # string hashes, and so the order of sets, differ between processes
def test_two_islands_are_told_in_the_same_order_by_all_nodes(first: int) -> None:
    names = [f"n{first + i}" for i in range(4)]
    cards = [card(name, "ib-a", (i,), 2, 11 + i) for i, name in enumerate(names)]
    pairs = [(a, b) for a in names[:2] for b in names[2:]]
    reports = [Report(a, ((Link("rdma", a, b, "dp"), "timed out"),)) for a, b in pairs]
    found, = unreachable(cards, reports)
    part = names[:2] if min(names) in names[:2] else names[2:]
    assert found.what.startswith(f"nodes {compress(part)} (ib0")
