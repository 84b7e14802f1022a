"""The NIC features that nodes should have in Slurm: comparison with the present ones, and commands that set them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import Vocabulary, read_features
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import NodeNics, candidates
from holmes_hpc.fabric.nodes import K, grouped
from holmes_hpc.slurm.commands import output
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.scontrol import Node

_UNTIL = "slurmctld restarts or reads slurm.conf again"
NOT_PERMANENT = f"scontrol's changes last until {_UNTIL}: put the NodeName lines into slurm.conf as well"
_FEATURE = re.compile(r"[A-Za-z0-9_.:+-]+\Z")  # no characters with a meaning in slurm.conf or in a constraint
_LABELS = tuple(map(re.compile, (r"nic_(ib|roce|ethernet)\Z", r"nic_[\d.]+g\Z", r"eth_[\d.]+g\Z", r"fabric_.+\Z")))
_SAME_RATE = 0.02  # relative tolerance, because the kernel rounds FDR's 54.5 Gb/s to 56


def spell_rate(gbps: float) -> str:
    """Format a rate: 200.0 is ``200g``, 0.05 is ``0.05g``."""
    return f"{gbps:.6f}".rstrip("0").rstrip(".") + "g"


def features_of(nics: NodeNics) -> tuple[str, ...]:
    """Return the features that `holmes label` sets for a node with these NICs.
    Rates that the kernel does not know are missing. So is the name of the fabric, which no node can know."""
    nic = nics.type
    ethernet = ethernet_gbps(nics)
    rate = nics.rdma_gbps(nic) if nic.rdma else ethernet
    rates = (("nic", rate), ("eth", ethernet))
    return (f"nic_{nic}", *(f"{prefix}_{spell_rate(gbps)}" for prefix, gbps in rates if gbps))


def ethernet_gbps(nics: NodeNics) -> float | None:
    """Return the rate of the interface for Ethernet traffic; None if unknown."""
    interfaces = candidates(nics, NicType.ETHERNET)
    return interfaces[0].gbps if interfaces else None


def differences(
    nics: NodeNics, features: Sequence[str], vocabulary: Vocabulary, node: str = "this node"
) -> list[Finding]:
    """Return findings on the differences between a node's NICs and its `features` in Slurm.
    A finding of level ``info`` says that a rate was not compared, because the kernel does not know it."""
    reading = read_features(features, vocabulary)
    where, hint = f"node {node}", f"holmes label {node}"
    findings = [Finding("error", where, problem, hint, node) for problem in reading.problems]
    nic = nics.type
    if reading.nic is None or (reading.nic.rdma and not reading.nic.verbs):  # sysfs hardly shows a plugin's NIC
        return findings
    if reading.nic is not nic:
        nic_names = [f"{p.name} {p.kind} {p.state}" for p in nics.ports] or [n.name for n in nics.interfaces]
        nic_list = ", ".join(nic_names) or "no NIC"
        problem = f"Slurm's features name {reading.nic}, the kernel reports {nic} ({nic_list})"
        return [*findings, Finding("error", where, problem, f"{hint}, or bring the NIC back", node)]
    if not any(m.nic for m in reading.meanings) and nic.rdma:
        findings.append(Finding("error", where, f"no feature names its {nic} NIC", hint, node))
    if nic.rdma:
        findings += _compare_rates(nic, reading.rdma_gbps, nics.rdma_gbps(nic), node)
        port = next((m.port for m in reading.meanings if m.port), None)
        if port is not None and any(p.gbps == port for p in nics.usable_ports(nic)):  # the feature is a port's rate
            findings = [replace(f, level="warning") if "rate" in f.what else f for f in findings]
    return findings + _compare_rates(NicType.ETHERNET, reading.ethernet_gbps, ethernet_gbps(nics), node)


def _compare_rates(nic: NicType, labelled: float | None, actual: float | None, node: str) -> list[Finding]:
    """Return a finding if these rates in Gb/s (None: not known) differ, or if the kernel knows none."""
    if actual is None:
        problem = f"the kernel does not know the {nic} rate: not compared"
        return [Finding("info", f"node {node}", problem, "none needed", node)]
    problem = f"Slurm's features give {labelled or 0:g} Gb/s as the {nic} rate, the kernel {actual:g} Gb/s"
    if labelled is None:
        problem = f"no feature gives the {nic} rate, the kernel reports {actual:g} Gb/s"
    elif abs(labelled - actual) <= _SAME_RATE * max(labelled, actual):
        return []
    return [Finding("error", f"node {node}", problem, f"holmes label {node}", node)]


@dataclass(frozen=True)
class Change:
    """A change of a node's features. `present`, `target`: its available features before and after the change;
    `active`, `active_target`: its active features before and after. On a site with a node_features plugin, only some
    available features are active. The change activates labels only."""

    node: str
    present: tuple[str, ...]
    target: tuple[str, ...]
    active: tuple[str, ...]
    active_target: tuple[str, ...]

    @property
    def added(self) -> tuple[str, ...]:
        """The features that are new, or newly active."""
        return tuple(f for f in self.target if f not in self.present or f in set(self.active_target) - set(self.active))

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(f for f in self.present if f not in self.target)

    @property
    def needed(self) -> bool:
        """True if the node's available or active features differ from their targets."""
        return (self.present, self.active) != (self.target, self.active_target)


def merge(present: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    """Return the features `present` with `labels` added. A new label replaces an old one of the same kind (``nic_roce``
    replaces ``nic_ib``, for example). All other features stay."""
    for feature in labels:
        if not _FEATURE.match(feature):
            raise SiteError(f"{feature!r} cannot be a feature", where="label", hint="use letters, digits and _ . : + -")
    replaced_kinds = [pattern for pattern in _LABELS if any(pattern.match(f) for f in labels)]
    remaining = [f for f in present if f in labels or not any(pattern.match(f) for pattern in replaced_kinds)]
    return tuple(dict.fromkeys([*remaining, *labels]))


def changes(nodes: Iterable[Node], expected: Mapping[str, Sequence[str]]) -> list[Change]:
    """Return a Change for each node in `expected` (node -> the labels that it should have)."""
    by_name = {n.name: n for n in nodes}
    node_changes = []
    for name, labels in expected.items():
        available, active = by_name[name].available, by_name[name].features
        node_changes.append(Change(name, available, merge(available, labels), active, merge(active, labels)))
    return node_changes


def _by_value(pairs: Iterable[tuple[str, K]]) -> list[tuple[str, K]]:
    """Group (node, value) pairs by value. Return (host list of the nodes, value) for each value."""
    return [(compress(nodes), value) for value, nodes in grouped((value, node) for node, value in pairs)]


def slurm_conf_lines(node_changes: Iterable[Change]) -> list[str]:
    """Return `NodeName=NODES Feature=…` lines. Copy their features into the existing NodeName lines of slurm.conf."""
    by_features = _by_value((c.node, c.target) for c in node_changes)
    return [f"NodeName={nodes} Feature={','.join(features)}" for nodes, features in by_features]


def update_commands(node_changes: Iterable[Change]) -> list[list[str]]:
    """Return `scontrol update` commands for changed nodes, with all features, because Slurm replaces the list."""
    pairs = ((c.node, (c.target, c.active_target)) for c in node_changes if c.needed)
    commands = []
    for nodes, (available, active) in _by_value(pairs):
        features = [f"AvailableFeatures={','.join(available)}", f"ActiveFeatures={','.join(active)}"]
        commands.append(["scontrol", "update", f"NodeName={nodes}", *features])
    return commands


def difference_lines(node_changes: Iterable[Change]) -> list[str]:
    """Return ``ib[1-4]: + nic_ib  - nic_roce`` for each group of changed nodes."""
    pairs = ((c.node, (*(f"+ {f}" for f in c.added), *(f"- {f}" for f in c.removed))) for c in node_changes)
    return [f"{nodes}: {'  '.join(signs)}" for nodes, signs in _by_value(pairs) if signs]


def apply(commands: Iterable[Sequence[str]]) -> None:
    """Run update commands, which only Slurm operators may do. The changes last until slurmctld restarts."""
    for command in commands:
        output(*command)


def helper_script() -> str:
    """Return a script for Slurm's node_features/helpers. Without an argument, it prints the expected features of its
    node, one per line. It needs only a POSIX shell and sysfs. /etc/holmes/fabric may have the fabric's name."""
    return Path(__file__).with_name("nic_features.sh").read_text(encoding="utf-8")
