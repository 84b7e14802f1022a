"""Diagnosis of links: which nodes must reach each other over which NIC, and which fault explains the measurements.

All functions are pure. Each node publishes a NodeInformation, tries to reach all its peers and measures some links.
From the LinkReports of all nodes every node derives the same findings.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holmes_hpc.fabric.finding import MAX_SKEW_S, Finding
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.slurm.hostlist import compress

WARN_BELOW, STOP_BELOW = 0.5, 0.1  # shares of the declared rate below which a link gives a warning, or an error
# One TCP stream of a Python process reaches this rate on any machine. Faster NICs are graded against this rate.
ONE_STREAM_GBPS = 5.0
_NAMES = {"rdma": "RDMA", "tcp": "Ethernet"}  # of a transport kind's NICs, for messages


@dataclass(frozen=True)
class Endpoint:
    """A node's NIC for one transport. `port`: the port of its link server; `gbps`: its declared rate; `gbps_to`:
    another fabric -> the declared rate to nodes of that fabric, if the site has a link between both fabrics."""

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
    """The data that a node publishes. `nics`: transport kind (``rdma``, ``tcp``) -> Endpoint; `ranks`: global ranks."""

    node: str
    fabric: str
    ranks: tuple[int, ...]
    nics: Mapping[str, Endpoint]


@dataclass(frozen=True)
class CommunicationGroup:
    """A process group between nodes. `kind`: its transport kind; `ranks`: its global ranks; `sampled`: it carries the
    model's traffic, so that the links of a ring over its nodes are measured."""

    label: str
    kind: str
    ranks: tuple[int, ...]
    sampled: bool = True


@dataclass(frozen=True)
class NodeLink:
    """One direction between two nodes over NICs of one `kind`; `label`: a group that uses it."""

    kind: str
    sender: str
    receiver: str
    label: str = ""


@dataclass(frozen=True)
class LinkReport:
    """One node's results. `failed`: (link, error) for each peer that the node could not reach; `measured`: (link, Gb/s
    that the receiver counted, or None if the sample failed); `skew_s`: peer -> the seconds by which the peer's clock is
    ahead of this node's (negative: behind), if more than one."""

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


def peer_links(infos: Sequence[NodeInformation], groups: Iterable[CommunicationGroup], node: str) -> list[NodeLink]:
    """Return the links from `node` that must work: to every other node of its groups, over the group's kind of NICs."""
    node_of = _node_of(infos)
    node_ranks = {rank for info in infos if info.node == node for rank in info.ranks}
    return _unique(
        NodeLink(group.kind, node, node_of[rank], group.label)
        for group in groups
        if not node_ranks.isdisjoint(group.ranks)
        for rank in group.ranks
        if node_of[rank] != node
    )


def measurement_rounds(infos: Sequence[NodeInformation], groups: Iterable[CommunicationGroup]) -> list[list[NodeLink]]:
    """Return the links to measure, in rounds. They form a ring over the nodes of each sampled group, in rank order.

    All links of a round are of one kind. A node sends on at most one of them and receives on at most one. So no two
    samples of a round share the same direction of a NIC."""
    node_of = _node_of(infos)
    rings = [(group, list(dict.fromkeys(node_of[r] for r in group.ranks))) for group in groups if group.sampled]
    links = _unique(
        NodeLink(group.kind, sender, receiver, group.label)
        for group, nodes in rings
        for sender, receiver in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        if sender != receiver
    )
    rounds: dict[int, list[NodeLink]] = {}
    busy: dict[int, set[tuple[str, str]]] = {}  # round -> its senders and receivers
    for link in links:
        ends = {("sends", link.sender), ("receives", link.receiver)}
        free_rounds = (i for i in rounds if rounds[i][0].kind == link.kind and busy[i].isdisjoint(ends))
        number = next(free_rounds, len(rounds))
        rounds.setdefault(number, []).append(link)
        busy.setdefault(number, set()).update(ends)
    return list(rounds.values())


def declared_gbps(infos: Mapping[str, NodeInformation], link: NodeLink) -> float:
    """Return the declared rate of a link's slower end in Gb/s, limited to ONE_STREAM_GBPS."""
    sender, receiver = infos[link.sender], infos[link.receiver]
    ends = ((sender.nics[link.kind], receiver.fabric), (receiver.nics[link.kind], sender.fabric))
    return min(ONE_STREAM_GBPS, *(nic.gbps_to.get(fabric, nic.gbps) for nic, fabric in ends))


def grade(measured_gbps: float | None, declared: float) -> str:
    """Return ``ok``, ``warning`` (below 50% of the `declared` rate) or ``error`` (below 10%, or the sample failed)."""
    if measured_gbps is None or measured_gbps < STOP_BELOW * declared:
        return "error"
    return "warning" if measured_gbps < WARN_BELOW * declared else "ok"


def find_node_faults(infos: Sequence[NodeInformation], groups: Iterable[CommunicationGroup]) -> list[Finding]:
    """Return the faults that are visible before any connection: a NIC that a group needs but a node lacks, an address
    that two nodes have, an unusual interface name."""
    by_node = {info.node: info for info in infos}
    node_of = _node_of(infos)
    missing: dict[tuple[str, str], str] = {}
    for group in groups:
        for rank in group.ranks:
            if group.kind not in by_node[node_of[rank]].nics:
                missing.setdefault((node_of[rank], group.kind), group.label)
    owners = grouped(((kind, nic.address), info.node) for info in infos for kind, nic in info.nics.items())
    findings, hint = list[Finding](), "bring it up, or correct the node's features (holmes label)"
    for (node, kind), label in missing.items():
        findings.append(Finding("error", f"node {node}", f"no {_NAMES[kind]} NIC for group {label}", hint, node))
    hint = "give each node its own address; a container bridge's address is not a node's"
    for (kind, address), (first, *others) in owners:
        if others:
            where, interface = f"nodes {compress([first, *others])}", by_node[first].nics[kind].interface
            problem = f"all have the address {address} on {interface}"
            findings.append(Finding("error", where, problem, hint, first, interface))
    return findings + _find_unusual_names(infos)


def _find_unusual_names(infos: Sequence[NodeInformation]) -> list[Finding]:
    """Return a warning for each node whose Ethernet interface has a different name from that of most nodes.
    There is no warning if another node of the same fabric uses this name too."""
    names = {info.node: info.nics["tcp"].interface for info in infos if "tcp" in info.nics}
    usual = max(set(names.values()), key=list(names.values()).count, default="")
    if 2 * list(names.values()).count(usual) <= len(names):
        return []
    in_fabric = [(info.fabric, names.get(info.node)) for info in infos]
    unusual = [
        info.node
        for info in infos
        if names.get(info.node, usual) != usual and in_fabric.count((info.fabric, names[info.node])) == 1
    ]
    hint = f"check that it is the right one (holmes probe); if its name has changed, rename it to {usual}"
    problems = {node: f"uses Ethernet NIC {names[node]}, while most nodes use {usual}" for node in unusual}
    return [Finding("warning", f"node {node}", text, hint, node, names[node]) for node, text in problems.items()]


def find_unreachable(infos: Sequence[NodeInformation], reports: Iterable[LinkReport]) -> list[Finding]:
    """Return findings that explain failed connections: a divided fabric, a node with several failures, or pairs."""
    by_node = {info.node: info for info in infos}
    failed: dict[str, dict[frozenset[str], tuple[NodeLink, str]]] = {}
    for report in reports:
        for link, error in report.failed:
            failed.setdefault(link.kind, {}).setdefault(frozenset((link.sender, link.receiver)), (link, error))
    return [finding for kind, pairs in failed.items() for finding in _explain_pairs(kind, pairs, by_node)]


_SPLIT_HINTS = {
    "rdma": "if they are two fabrics, give them different fabric_ features (holmes label); else connect their switches",
    "tcp": "connect their networks (routes, VLAN, firewall), or name the interface that the others reach: ethernet "
    "(docs/nics.md)",
}


def _explain_pairs(
    kind: str, pairs: dict[frozenset[str], tuple[NodeLink, str]], infos: Mapping[str, NodeInformation]
) -> list[Finding]:
    """Return findings that explain all failed `pairs` of one transport kind.

    If two sets of nodes do not reach each other, one finding explains all pairs. Otherwise a finding explains all
    pairs of the node with most failures, and the remaining pairs are explained in the same way. If each remaining node
    has only one failure, each pair has its own finding."""
    findings: list[Finding] = []
    unexplained = dict(pairs)
    while unexplained:
        failures = Counter(node for pair in unexplained for node in pair)
        worst = max(failures, key=lambda n: (failures[n], n))
        if failures[worst] == 1 or len(failures) == 2:
            findings += [_pair_finding(link, error, infos) for link, error in unexplained.values()]
            break
        if (islands := _islands(unexplained)) is not None:
            a, b = (infos[island[0]] for island in islands)
            where = f"fabric {', '.join(sorted({infos[n].fabric for island in islands for n in island}))}"
            problem = (
                f"nodes {compress(islands[0])} ({a.nics[kind].text}) and {compress(islands[1])} ({b.nics[kind].text})"
                f" do not reach each other over their {_NAMES[kind]} NICs"
            )
            findings.append(Finding("error", where, problem, _SPLIT_HINTS[kind], a.node, a.nics[kind].interface))
            break
        of_worst = {pair: failure for pair, failure in unexplained.items() if worst in pair}
        link, error = next(iter(of_worst.values()))
        peers = [n for pair in of_worst for n in pair if n != worst]
        nic = infos[worst].nics[kind]
        problem = f"{_NAMES[kind]} NIC {nic.text} does not reach {compress(peers)} (group {link.label}: {error})"
        place = f"{nic.interface} of {worst}"
        hint = f"check that {place} is up and in the fabric its features name: cable, subnet, firewall"
        findings.append(Finding("error", f"node {worst}", problem, hint, worst, nic.interface))
        unexplained = {pair: failure for pair, failure in unexplained.items() if worst not in pair}
    return findings


def _islands(pairs: Iterable[frozenset[str]]) -> tuple[list[str], list[str]] | None:
    """Return two sets of several nodes of which each fails to reach exactly the other set's; None if there are none."""
    failing: defaultdict[str, set[str]] = defaultdict(set)
    for a, b in map(sorted, pairs):
        failing[a].add(b)
        failing[b].add(a)
    first = min(failing)  # so that all nodes report the sets in the same order
    island = sorted(n for n in failing if failing[n] == failing[first])
    opposite = sorted(failing[first])
    is_split = all(failing[n] == set(island) for n in opposite) and set(island) | set(opposite) == set(failing)
    return (island, opposite) if is_split and min(len(island), len(opposite)) > 1 else None


def _pair_finding(link: NodeLink, error: str, infos: Mapping[str, NodeInformation]) -> Finding:
    a, b = infos[link.sender].nics[link.kind], infos[link.receiver].nics[link.kind]
    where = f"nodes {link.sender} and {link.receiver}"
    problem = (
        f"{link.sender} ({a.text}) does not reach {link.receiver} ({b.text}) over their {_NAMES[link.kind]} NICs, which"
        f" group {link.label} needs ({error})"
    )
    hint = f"look for a firewall between them, and check {b.interface} of {link.receiver}: up, right cable and subnet"
    return Finding("error", where, problem, hint, link.receiver, b.interface)


def find_slow_links(infos: Sequence[NodeInformation], reports: Iterable[LinkReport]) -> list[Finding]:
    """Return findings that explain the slow links: one per slow NIC, or one for a link if either NIC may be slow.

    If a link was measured several times, the highest rate counts. The NIC with the highest :func:`_score` explains all
    its slow links. The remaining slow links are then explained in the same way.
    """
    by_node = {info.node: info for info in infos}
    best: dict[NodeLink, float] = {}
    for report in reports:
        for link, gbps in report.measured:
            best[link] = max(best.get(link, 0.0), gbps or 0.0)
    grades = {link: grade(gbps, declared_gbps(by_node, link)) for link, gbps in best.items()}
    findings: list[Finding] = []
    slow = {link for link in best if grades[link] != "ok"}
    while slow:
        scores = {nic: _score(nic, best, slow, grades) for link in slow for nic in _ends(link)}
        worst = max(scores, key=lambda nic: (scores[nic], nic))
        explained = sorted((link for link in slow if worst in _ends(link)), key=lambda link: best[link])
        partners = {nic for link in explained for nic in _ends(link)} - {worst}
        equal = next((nic for nic in sorted(partners) if scores[nic] == scores[worst]), None)
        if equal is None:
            level = max((grades[link] for link in explained), key=("warning", "error").index)
            findings.append(_slow_nic(worst[1], explained[0], best[explained[0]], level, by_node))
        else:
            explained = [link for link in explained if equal in _ends(link)]
            link = explained[0]
            nics = [by_node[node].nics[link.kind] for node in (link.sender, link.receiver)]
            findings.append(slow_link(link, best[link], declared_gbps(by_node, link), grades[link], nics))
        slow -= set(explained)
    return findings


def _ends(link: NodeLink) -> tuple[tuple[str, str], tuple[str, str]]:
    return (link.kind, link.sender), (link.kind, link.receiver)


def _score(nic: tuple[str, str], links: Iterable[NodeLink], slow: set[NodeLink], grades: Mapping[NodeLink, str]) -> int:
    """Return how well a NIC explains slow links: two points for each of these, minus one for each good link."""
    return sum(2 if link in slow else -(grades[link] == "ok") for link in links if nic in _ends(link))


def _rate(gbps: float) -> str:
    return f"{gbps:.3g} Gb/s" if gbps >= 1 else f"{gbps * 1000:.3g} Mb/s"


_SLOW_HINT = "check its link speed, shaping (tc) and cable (ethtool, ibstat), or lower the declared rate (holmes label)"


def _slow_nic(node: str, worst: NodeLink, gbps: float, level: str, infos: Mapping[str, NodeInformation]) -> Finding:
    nic, declared = infos[node].nics[worst.kind], declared_gbps(infos, worst)
    verb, peer = ("sends", f"to {worst.receiver}") if node == worst.sender else ("receives", f"from {worst.sender}")
    share = f"{gbps / declared:.0%}; {peer}, group {worst.label}"
    problem = f"{_NAMES[worst.kind]} NIC {nic.text} {verb} {_rate(gbps)} of {_rate(declared)} ({share})"
    return Finding(level, f"node {node}", problem, _SLOW_HINT, node, nic.interface)


def slow_link(link: NodeLink, gbps: float, declared: float, level: str, nics: Sequence[Endpoint]) -> Finding:
    """Return the finding for a link that carries `gbps` of the `declared` rate. `nics`: sender's, receiver's."""
    a, b = nics
    where = f"nodes {' and '.join(sorted((link.sender, link.receiver)))}"
    ends = f"{a.text} of {link.sender} to {b.text} of {link.receiver}"
    share = f"{gbps / declared:.0%}; group {link.label}"
    problem = f"{_NAMES[link.kind]} from {ends} carries {_rate(gbps)} of {_rate(declared)} ({share})"
    return Finding(level, where, problem, _SLOW_HINT, link.sender, a.interface)


def find_clock_skew(reports: Sequence[LinkReport]) -> list[Finding]:
    """Return a warning for each node whose clock is over a minute off. A node's skew is the median of the skews that
    other nodes report for it. It counts only if at least half of the nodes report one."""
    offsets = grouped(pair for report in reports for pair in report.skew_s.items())
    skew_s = {node: sorted(s)[len(s) // 2] for node, s in sorted(offsets) if 2 * len(s) >= len(reports)}
    hint = "start a time service there (chrony); munge refuses credentials at 300 s"
    return [
        Finding("warning", f"node {node}", f"its clock is {seconds:+.0f} s off the others'", hint, node)
        for node, seconds in skew_s.items()
        if abs(seconds) > MAX_SKEW_S
    ]
