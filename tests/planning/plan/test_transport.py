"""The transport rule: a table of cases, and its properties over random groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.fabric.site import CPU, NicType, Pool, Site
from holmes_hpc.planning.plan.transport import LOCAL, TCP, Place, Transport, TransportRule


def fabric(name: str, nic: str) -> Pool:
    return Pool(name, NicType(nic), name, 4, 2, 10, CPU, None if nic == "ethernet" else 100)


SITE = Site("s", (fabric("ib-a", "ib"), fabric("ib-b", "ib"), fabric("roce-a", "roce"), fabric("eth-a", "ethernet")))
EACH = TransportRule(SITE, "holmes", frozenset(f.name for f in SITE.pools), False)
IB, ROCE = Transport("rdma", NicType.IB, "ib-a"), Transport("rdma", NicType.ROCE, "roce-a")


def places(text: str) -> list[Place]:
    return [Place(*word.split("/")) for word in text.split()]


@pytest.mark.parametrize(
    ("members", "transport"),
    [
        ("ib-a/1", LOCAL),
        ("ib-a/1 ib-a/1", LOCAL),
        ("eth-a/1 eth-a/1", LOCAL),
        ("ib-a/1 ib-a/2", IB),
        ("ib-a/1 ib-a/1 ib-a/2", IB),
        ("roce-a/1 roce-a/2", ROCE),
        ("eth-a/1 eth-a/2", TCP),
        ("ib-a/1 ib-b/1", TCP),  # two InfiniBand fabrics without a link
        ("ib-a/1 roce-a/1", TCP),
        ("ib-a/1 ib-a/2 eth-a/1", TCP),
        ("ib-a/1 ib-b/2", TCP),
    ],
)
def test_transport_of_members(members: str, transport: Transport) -> None:
    assert EACH.of_members(places(members)) == transport


@pytest.mark.parametrize(
    ("members", "job", "transport"),
    [
        ("ib-a/1 ib-a/1", ["ib-a", "roce-a"], LOCAL),  # a group inside a node needs no network
        ("ib-a/1 ib-a/2", ["ib-a", "roce-a"], TCP),
        ("ib-a/1 ib-a/2", ["ib-a"], IB),
        ("eth-a/1 eth-a/2", ["eth-a"], TCP),
    ],
)
def test_plain_megatron_uses_the_transport_that_all_ranks_share(
    members: str, job: list[str], transport: Transport
) -> None:
    rule = TransportRule(SITE, "single", frozenset(job), False)
    assert rule.of_members(places(members)) == transport
    assert rule.shared == (TCP if len(job) > 1 else rule.of(job, False))


@pytest.mark.parametrize("mode", ["holmes", "single"])
@pytest.mark.parametrize(
    ("members", "transport"),
    [("ib-a/1 ib-a/1", LOCAL), ("ib-a/1 ib-a/2", TCP), ("roce-a/1 roce-a/2", TCP), ("eth-a/1 eth-a/2", TCP)],
)
def test_groups_in_host_memory_never_use_rdma(members: str, transport: Transport, mode: str) -> None:
    member_places = places(members)
    rule = TransportRule(SITE, mode, frozenset([member_places[0].pool]), False)
    assert rule.of_members(member_places, host_memory=True) == transport


groups = st.lists(
    st.builds(Place, st.sampled_from([f.name for f in SITE.pools]), st.sampled_from(["1", "2", "3"])),
    min_size=1,
    max_size=8,
)


@given(groups)
def test_a_transport_is_possible_and_independent_of_member_order(members: list[Place]) -> None:
    chosen = EACH.of_members(members)
    fabrics = {SITE.pool(m.pool) for m in members}
    assert chosen.kind != "local" or len(set(members)) == 1
    assert chosen.kind != "rdma" or {(f.name, f.nic) for f in fabrics} == {(chosen.fabric, chosen.nic)}
    assert EACH.of_members(members[::-1]) == chosen


@given(groups, groups)
def test_more_members_never_get_a_faster_transport(members: list[Place], more: list[Place]) -> None:
    speed = {"local": 0, "rdma": 1, "tcp": 2}
    assert speed[EACH.of_members(members + more).kind] >= speed[EACH.of_members(members).kind]


@given(groups)
def test_rdma_only_between_nodes_of_one_rdma_fabric(members: list[Place]) -> None:
    fabrics, nodes = {m.pool for m in members}, {(m.pool, m.node) for m in members}
    rdma = len(nodes) > 1 and len(fabrics) == 1 and SITE.pool(members[0].pool).nic.rdma
    assert (EACH.of_members(members).kind == "rdma") is rdma
