"""Which nodes must reach each other over which NIC, what was measured, and whose fault it is; pure functions.

Nodes publish what they are (NodeInformation); every node tries to reach all its peers and measures some links; from all
nodes' LinkReports every node derives the same findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holmes_hpc.fabric.finding import MAX_SKEW_S, Finding
from holmes_hpc.slurm.hostlist import compress

WARN_BELOW, STOP_BELOW = 0.5, 0.1  # of the declared rate
# What one TCP stream of a Python process proves on any machine; a faster NIC is judged as if it had this rate.
PROVABLE_GBPS = 5.0
_NAMES = {"rdma": "RDMA", "tcp": "Ethernet"}  # of a transport kind's NICs, for messages


@dataclass(frozen=True)
class Endpoint:
    """A node's NIC for one transport. `port`: where its link server listens; `gbps`: its declared rate; `gbps_to`: the
    declared rate to nodes of a fabric, where it differs."""

    interface: str
    address: str
    port: int = 0
    gbps: float = 0.0
    gbps_to: Mapping[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.interface} {self.address}"


@dataclass(frozen=True)
class NodeInformation:
    """What a node publishes. `nics`: transport kind (``rdma``, ``tcp``) -> Endpoint; `ranks`: its global ranks."""

    node: str
    fabric: str
    ranks: tuple[int, ...]
    nics: Mapping[str, Endpoint]


@dataclass(frozen=True)
class CommunicationGroup:
    """A process group: `kind` of its transport, its global ranks. `sampled`: it carries the model's traffic, so its
    links are measured (a ring over its nodes)."""

    label: str
    kind: str
    ranks: tuple[int, ...]
    sampled: bool = True


@dataclass(frozen=True)
class NodeLink:
    """One direction between two nodes over one kind of NIC; `label`: a group that uses it."""

    kind: str
    sender: str
    receiver: str
    label: str = ""


@dataclass(frozen=True)
class LinkReport:
    """One node's results. `failed`: peers it could not reach and why; `measured`: Gb/s received by the other side
    (None: the sample did not come through); `skew_s`: others' clocks less its own, where over a second."""

    node: str
    failed: tuple[tuple[NodeLink, str], ...] = ()
    measured: tuple[tuple[NodeLink, float | None], ...] = ()
    skew_s: Mapping[str, float] = field(default_factory=dict)


def _node_of(infos: Iterable[NodeInformation]) -> dict[int, str]:
    return {rank: info.node for info in infos for rank in info.ranks}


def _unique(links: Iterable[NodeLink]) -> list[NodeLink]:
    """Return each link once, with the label of the first group that uses it."""
    unique: dict[tuple[str, str, str], NodeLink] = {}
    for link in links:
        unique.setdefault((link.kind, link.sender, link.receiver), link)
    return list(unique.values())


def peers(infos: Sequence[NodeInformation], groups: Iterable[CommunicationGroup], node: str) -> list[NodeLink]:
    """Return the links from `node` that must work: to every other node of its groups, over the group's kind of NIC."""
    node_of = _node_of(infos)
    own = {rank for info in infos if info.node == node for rank in info.ranks}
    return _unique(
        NodeLink(group.kind, node, node_of[rank], group.label)
        for group in groups
        if group.kind != "local" and not own.isdisjoint(group.ranks)
        for rank in group.ranks
        if node_of[rank] != node
    )


def rounds(infos: Sequence[NodeInformation], groups: Iterable[CommunicationGroup]) -> list[list[NodeLink]]:
    """Return the links to measure, in rounds: in one round all are of one kind, and a node sends once and receives once
    at most, so that no two samples share a NIC's direction. Each sampled group's nodes form a ring, in rank order."""
    node_of = _node_of(infos)
    rings = [
        (group, list(dict.fromkeys(node_of[r] for r in group.ranks)))
        for group in groups
        if group.sampled and group.kind != "local"
    ]
    links = _unique(
        NodeLink(group.kind, sender, receiver, group.label)
        for group, nodes in rings
        for sender, receiver in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        if sender != receiver
    )
    found: dict[int, list[NodeLink]] = {}
    busy: dict[int, set[tuple[str, str]]] = {}  # of each round: who sends and who receives
    for link in links:
        ends = {("sends", link.sender), ("receives", link.receiver)}
        free = (i for i in found if found[i][0].kind == link.kind and busy[i].isdisjoint(ends))
        number = next(free, len(found))
        found.setdefault(number, []).append(link)
        busy.setdefault(number, set()).update(ends)
    return list(found.values())


def declared(infos: Mapping[str, NodeInformation], link: NodeLink) -> float:
    """Return what a link should carry, in Gb/s: the slower of its two ends, as far as a sample can prove it."""
    one, other = infos[link.sender], infos[link.receiver]
    ends = ((one.nics[link.kind], other.fabric), (other.nics[link.kind], one.fabric))
    return min(PROVABLE_GBPS, *(nic.gbps_to.get(fabric, nic.gbps) for nic, fabric in ends))


def grade(measured_gbps: float | None, declared_gbps: float) -> str:
    """Return ``ok``, ``warning`` (below 50% of the declared rate) or ``error`` (below 10%, or nothing came through)."""
    if measured_gbps is None or measured_gbps < STOP_BELOW * declared_gbps:
        return "error"
    return "warning" if measured_gbps < WARN_BELOW * declared_gbps else "ok"


def audit(infos: Sequence[NodeInformation], groups: Iterable[CommunicationGroup]) -> list[Finding]:
    """Return what the nodes' own information alone shows: a NIC that a group needs and a node has not, one address on
    two nodes."""
    by_node = {info.node: info for info in infos}
    node_of = _node_of(infos)
    missing: dict[tuple[str, str], str] = {}
    for group in groups:
        for rank in group.ranks:
            if group.kind != "local" and group.kind not in by_node[node_of[rank]].nics:
                missing.setdefault((node_of[rank], group.kind), group.label)
    owners: dict[tuple[str, str], list[str]] = {}
    for info in infos:
        for kind, nic in info.nics.items():
            owners.setdefault((kind, nic.address), []).append(info.node)
    return [
        *(
            Finding(
                "error",
                f"node {node}",
                f"no {_NAMES[kind]} NIC for group {label}",
                "bring it up, or correct the node's features (holmes label)",
                node,
            )
            for (node, kind), label in missing.items()
        ),
        *(
            Finding(
                "error",
                f"nodes {compress(nodes)}",
                f"all have the address {address} on {by_node[nodes[0]].nics[kind].interface}",
                "give each its own; an address of a container bridge is no address of a node",
                nodes[0],
                by_node[nodes[0]].nics[kind].interface,
            )
            for (kind, address), nodes in owners.items()
            if len(nodes) > 1
        ),
        *_odd_names(infos),
    ]


def _odd_names(infos: Sequence[NodeInformation]) -> list[Finding]:
    """Return a node whose Ethernet interface has a name that nobody in its fabric shares, while most nodes have
    another."""
    names = {info.node: info.nics["tcp"].interface for info in infos if "tcp" in info.nics}
    usual = max(set(names.values()), key=list(names.values()).count, default="")
    if 2 * list(names.values()).count(usual) <= len(names):
        return []
    in_fabric = [(info.fabric, names.get(info.node)) for info in infos]
    odd = [
        c.node for c in infos if names.get(c.node, usual) != usual and in_fabric.count((c.fabric, names[c.node])) == 1
    ]
    return [
        Finding(
            "warning",
            f"node {node}",
            f"its Ethernet NIC is {names[node]}, most nodes' is {usual}: renamed? {names[node]} is used",
            f"rename it to {usual}, or see that it is the right one (holmes probe)",
            node,
            names[node],
        )
        for node in odd
    ]


def unreachable(infos: Sequence[NodeInformation], reports: Iterable[LinkReport]) -> list[Finding]:
    """Return findings from failed connections: a fabric that falls apart, a node nobody reaches, or single pairs."""
    by_node = {info.node: info for info in infos}
    bad: dict[str, dict[frozenset[str], tuple[NodeLink, str]]] = {}
    for report in reports:
        for link, why in report.failed:
            bad.setdefault(link.kind, {}).setdefault(frozenset((link.sender, link.receiver)), (link, why))
    return [finding for kind, pairs in bad.items() for finding in _of_kind(kind, pairs, by_node)]


_PARTED_HINTS = {
    "rdma": "if they are two fabrics, give them different fabric_ features (holmes label); else connect their switches",
    "tcp": "connect their networks (routes, VLAN, firewall), or name the interface that the others reach: ethernet "
    "(docs/nics.md)",
}


def _of_kind(
    kind: str, pairs: dict[frozenset[str], tuple[NodeLink, str]], infos: Mapping[str, NodeInformation]
) -> list[Finding]:
    found: list[Finding] = []
    left = dict(pairs)
    while left:
        failures = Counter(node for pair in left for node in pair)
        worst = max(failures, key=lambda n: (failures[n], n))
        if failures[worst] == 1 or len(failures) == 2:
            found += [_pair(link, why, infos) for link, why in left.values()]
            break
        if (islands := _islands(left)) is not None:
            one, two = (infos[island[0]] for island in islands)
            found.append(
                Finding(
                    "error",
                    f"fabric {', '.join(sorted({infos[n].fabric for island in islands for n in island}))}",
                    f"nodes {compress(islands[0])} ({one.nics[kind].text}) and {compress(islands[1])} "
                    f"({two.nics[kind].text}) do not reach each other over their {_NAMES[kind]} NICs",
                    _PARTED_HINTS[kind],
                    one.node,
                    one.nics[kind].interface,
                )
            )
            break
        mine = {pair: v for pair, v in left.items() if worst in pair}
        link, why = next(iter(mine.values()))
        others = [n for pair in mine for n in pair if n != worst]
        nic = infos[worst].nics[kind]
        found.append(
            Finding(
                "error",
                f"node {worst}",
                f"{_NAMES[kind]} NIC {nic.text} does not reach {compress(others)} (group {link.label}: {why})",
                f"see that {nic.interface} of {worst} is up and in the fabric its features "
                "name: cable, subnet, firewall",
                worst,
                nic.interface,
            )
        )
        left = {pair: v for pair, v in left.items() if worst not in pair}
    return found


def _islands(pairs: Iterable[frozenset[str]]) -> tuple[list[str], list[str]] | None:
    """Return the nodes in two sets of several such that each fails to reach exactly the other, where there are such."""
    failing: defaultdict[str, set[str]] = defaultdict(set)
    for a, b in map(sorted, pairs):
        failing[a].add(b)
        failing[b].add(a)
    first = min(failing)  # all nodes say it in the same order
    one = sorted(n for n in failing if failing[n] == failing[first])
    two = sorted(failing[first])
    whole = all(failing[n] == set(one) for n in two) and set(one) | set(two) == set(failing)
    return (one, two) if whole and min(len(one), len(two)) > 1 else None


def _pair(link: NodeLink, why: str, infos: Mapping[str, NodeInformation]) -> Finding:
    a, b = infos[link.sender].nics[link.kind], infos[link.receiver].nics[link.kind]
    return Finding(
        "error",
        f"nodes {link.sender} and {link.receiver}",
        f"{link.sender} ({a.text}) does not reach {link.receiver} ({b.text}) over their {_NAMES[link.kind]} "
        f"NICs, which group {link.label} needs ({why})",
        f"look for a firewall between them, and for {b.interface} of {link.receiver}: up, right cable and subnet",
        link.receiver,
        b.interface,
    )


def slow(infos: Sequence[NodeInformation], reports: Iterable[LinkReport]) -> list[Finding]:
    """Return findings from samples: one line for each NIC that explains slow links, or for a link whose two NICs
    explain it equally well.

    The best of several measurements of a link counts. A NIC with many slow and few good links is the explanation of all
    its slow links; then the next is looked for among the rest.
    """
    by_node = {info.node: info for info in infos}
    best: dict[NodeLink, float] = {}
    for report in reports:
        for link, gbps in report.measured:
            best[link] = max(best.get(link, 0.0), gbps or 0.0)
    level = {link: grade(gbps, declared(by_node, link)) for link, gbps in best.items()}
    found: list[Finding] = []
    bad = {link for link in best if level[link] != "ok"}
    while bad:
        score = {nic: _score(nic, best, bad, level) for link in bad for nic in _ends(link)}
        chosen = max(score, key=lambda nic: (score[nic], nic))
        mine = sorted((link for link in bad if chosen in _ends(link)), key=lambda link: best[link])
        partners = {nic for link in mine for nic in _ends(link)} - {chosen}
        equal = next((nic for nic in sorted(partners) if score[nic] == score[chosen]), None)
        if equal is None:
            gravest = max((level[link] for link in mine), key=("warning", "error").index)
            found.append(_own(chosen[1], mine[0], best[mine[0]], gravest, by_node))
        else:
            mine = [link for link in mine if equal in _ends(link)]
            found.append(_between(mine[0], best[mine[0]], level[mine[0]], by_node))
        bad -= set(mine)
    return found


def _ends(link: NodeLink) -> tuple[tuple[str, str], tuple[str, str]]:
    return (link.kind, link.sender), (link.kind, link.receiver)


def _score(nic: tuple[str, str], best: Iterable[NodeLink], bad: set[NodeLink], level: Mapping[NodeLink, str]) -> int:
    """Return how well a NIC explains the slow links: two for each of its own, less one for each of its good ones."""
    return sum(2 if link in bad else -(level[link] == "ok") for link in best if nic in _ends(link))


def _rate(gbps: float) -> str:
    return f"{gbps:.3g} Gb/s" if gbps >= 1 else f"{gbps * 1000:.3g} Mb/s"


_SLOW_HINT = "see its link speed, shaping (tc) and cable (ethtool, ibstat), or lower the declared rate (holmes label)"


def _own(node: str, worst: NodeLink, gbps: float, level: str, infos: Mapping[str, NodeInformation]) -> Finding:
    nic, should = infos[node].nics[worst.kind], declared(infos, worst)
    does, peer = ("sends", f"to {worst.receiver}") if node == worst.sender else ("receives", f"from {worst.sender}")
    return Finding(
        level,
        f"node {node}",
        f"{_NAMES[worst.kind]} NIC {nic.text} {does} {_rate(gbps)} of {_rate(should)} ({gbps / should:.0%}; {peer}, "
        f"group {worst.label})",
        _SLOW_HINT,
        node,
        nic.interface,
    )


def _between(link: NodeLink, gbps: float, level: str, infos: Mapping[str, NodeInformation]) -> Finding:
    a, b = infos[link.sender].nics[link.kind], infos[link.receiver].nics[link.kind]
    should = declared(infos, link)
    return Finding(
        level,
        f"nodes {link.sender} and {link.receiver}",
        f"{_NAMES[link.kind]} NICs {a.text} of {link.sender} to {b.text} of {link.receiver} carry {_rate(gbps)} of "
        f"{_rate(should)} ({gbps / should:.0%}; group {link.label})",
        _SLOW_HINT,
        link.sender,
        a.interface,
    )


def skewed(reports: Iterable[LinkReport]) -> list[Finding]:
    """Return clocks more than a minute apart: one line per node that half of the nodes find to be off."""
    offsets: dict[str, list[float]] = {}
    reports = list(reports)
    for report in reports:
        for node, seconds in report.skew_s.items():
            offsets.setdefault(node, []).append(seconds)
    skew_s = {node: sorted(s)[len(s) // 2] for node, s in sorted(offsets.items()) if 2 * len(s) >= len(reports)}
    return [
        Finding(
            "warning",
            f"node {node}",
            f"its clock is {seconds:+.0f} s off the others'",
            "start a time service there (chrony); munge refuses credentials at 300 s",
            node,
        )
        for node, seconds in skew_s.items()
        if abs(seconds) > MAX_SKEW_S
    ]
