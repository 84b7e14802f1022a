"""The features that Slurm should have for a node, by its NICs; how Slurm's differ; and the commands that set them."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.features import Vocabulary, read_features
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import NodeNics, candidates
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.slurm.commands import output
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.slurm.scontrol import Node

NOT_PERMANENT = (
    "scontrol's changes last until slurmctld restarts or reads slurm.conf again: put the NodeName lines "
    "into slurm.conf as well"
)
_FEATURE = re.compile(r"[A-Za-z0-9_.:+-]+\Z")  # no characters with a meaning in slurm.conf or in a constraint
_LABELS = (
    re.compile(r"nic_(ib|roce|ethernet)\Z"),
    re.compile(r"nic_[\d.]+g\Z"),
    re.compile(r"eth_[\d.]+g\Z"),
    re.compile(r"fabric_.+\Z"),
)
_Value = TypeVar("_Value", bound=Hashable)
_SAME_RATE = 0.02  # the kernel rounds FDR's 54.5 to 56


def spell_rate(gbps: float) -> str:
    """Format a rate: 200.0 is ``200g``, 0.05 is ``0.05g``."""
    return f"{gbps:.6f}".rstrip("0").rstrip(".") + "g"


def features_of(nics: NodeNics) -> tuple[str, ...]:
    """Return the features that `holmes label` sets for a node with these NICs.
    They lack rates that the kernel does not know, and the fabric's name, which no node can know."""
    nic = nics.type
    ethernet = ethernet_gbps(nics)
    rate = nics.rdma_gbps(nic) if nic.rdma else ethernet
    features = [f"nic_{nic}"]
    if rate:
        features.append(f"nic_{spell_rate(rate)}")
    if ethernet:
        features.append(f"eth_{spell_rate(ethernet)}")
    return tuple(features)


def ethernet_gbps(nics: NodeNics) -> float | None:
    """Return the rate of the interface for Ethernet traffic; None if unknown."""
    interfaces = candidates(nics, NicType.ETHERNET)
    return interfaces[0].gbps if interfaces else None


def differences(
    nics: NodeNics, features: Sequence[str], vocabulary: Vocabulary, node: str = "this node"
) -> list[Finding]:
    """Return the differences between Slurm's `features` of a node and its NICs.
    A finding of level ``info`` reports a rate that the kernel does not know, so that it cannot be compared."""
    reading = read_features(features, vocabulary)
    where, hint = f"node {node}", f"holmes label {node}"
    findings = [Finding("error", where, problem, hint, node) for problem in reading.problems]
    nic = nics.type
    if reading.nic is None or (reading.nic.rdma and not reading.nic.verbs):  # sysfs hardly shows a plugin's NIC
        return findings
    if reading.nic is not nic:
        nic_names = [f"{p.name} {p.kind} {p.state}" for p in nics.ports] or [n.name for n in nics.interfaces]
        nic_list = ", ".join(nic_names) or "no NIC"
        findings.append(
            Finding(
                "error",
                where,
                f"Slurm's features name {reading.nic}, the kernel reports {nic} ({nic_list})",
                f"{hint}, or bring the NIC back",
                node,
            )
        )
        return findings
    if not any(m.nic for m in reading.meanings) and nic.rdma:
        findings.append(Finding("error", where, f"no feature names its {nic} NIC", hint, node))
    if nic.rdma:
        findings += _compare_rates(nic, reading.rdma_gbps, nics.rdma_gbps(nic), where=where, hint=hint, node=node)
        port = next((m.port for m in reading.meanings if m.port), None)
        if port is not None and any(p.gbps == port for p in nics.usable_ports(nic)):
            findings = [replace(f, level="warning") if "rate" in f.what else f for f in findings]
    return findings + _compare_rates(
        NicType.ETHERNET, reading.ethernet_gbps, ethernet_gbps(nics), where=where, hint=hint, node=node
    )


def _compare_rates(
    nic: NicType, labelled: float | None, actual: float | None, where: str, hint: str, node: str
) -> list[Finding]:
    """Return a finding if the rate in a node's features differs from the kernel's, both in Gb/s; else none."""
    if actual is None:
        return [Finding("info", where, f"the kernel does not know the {nic} rate: not compared", "none needed", node)]
    problem = f"Slurm's features give {labelled or 0:g} Gb/s as the {nic} rate, the kernel {actual:g} Gb/s"
    if labelled is None:
        problem = f"no feature gives the {nic} rate, the kernel reports {actual:g} Gb/s"
    elif abs(labelled - actual) <= _SAME_RATE * max(labelled, actual):
        return []
    return [Finding("error", where, problem, hint, node)]


@dataclass(frozen=True)
class Change:
    """A change of a node's features. `present` -> `target`: its available features. `active` -> `active_target`: its
    active features, which are fewer on a site that switches features (node_features plugins). Only labels become
    active."""

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
        """Whether the node lacks one of its target features, or has others."""
        return (self.present, self.active) != (self.target, self.active_target)


def merge(present: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    """Return the features `present` with `labels` added. A label replaces one of its kind (``nic_ib`` by ``nic_roce``).
    All other features stay."""
    for feature in labels:
        if not _FEATURE.match(feature):
            raise SiteError(f"{feature!r} cannot be a feature", where="label", hint="use letters, digits and _ . : + -")
    replaced_kinds = [pattern for pattern in _LABELS if any(pattern.match(f) for f in labels)]
    remaining = [f for f in present if f in labels or not any(pattern.match(f) for pattern in replaced_kinds)]
    return tuple(dict.fromkeys([*remaining, *labels]))


def changes(
    nodes: Iterable[Node], expected: Mapping[str, Sequence[str]], fabrics: Mapping[str, str] | None = None
) -> list[Change]:
    """Return a Change for each node in `expected` (node -> features) and in `fabrics` (node -> its fabric's name)."""
    fabrics = fabrics or {}
    by_name = {n.name: n for n in nodes}
    for name in [*expected, *fabrics]:
        if name not in by_name:
            raise SiteError(f"no node {name!r}", where="label", hint=f"Slurm has {compress(by_name)}")
    node_changes = []
    for name in dict.fromkeys([*expected, *fabrics]):
        labels = [*expected.get(name, ()), *([f"fabric_{fabrics[name]}"] if name in fabrics else [])]
        available, active = by_name[name].available, by_name[name].features
        node_changes.append(Change(name, available, merge(available, labels), active, merge(active, labels)))
    return node_changes


def _by_value(pairs: Iterable[tuple[str, _Value]]) -> list[tuple[str, _Value]]:
    """Return (host list, value) for each value of (node, value) pairs."""
    return [(compress(nodes), value) for value, nodes in grouped((value, node) for node, value in pairs)]


def slurm_conf_lines(node_changes: Iterable[Change]) -> list[str]:
    """Return `NodeName=NODES Feature=…` lines. Their features belong into the NodeName lines that slurm.conf has."""
    by_features = _by_value((c.node, c.target) for c in node_changes)
    return [f"NodeName={nodes} Feature={','.join(features)}" for nodes, features in by_features]


def update_commands(node_changes: Iterable[Change]) -> list[list[str]]:
    """Return the `scontrol update` commands for changed nodes. Each lists all features, because it replaces them."""
    pairs = ((c.node, (c.target, c.active_target)) for c in node_changes if c.needed)
    return [
        [
            "scontrol",
            "update",
            f"NodeName={nodes}",
            f"AvailableFeatures={','.join(available)}",
            f"ActiveFeatures={','.join(active)}",
        ]
        for nodes, (available, active) in _by_value(pairs)
    ]


def difference_lines(node_changes: Iterable[Change]) -> list[str]:
    """Return ``ib[1-4]: + nic_ib  - nic_roce`` for each group of changed nodes."""
    pairs = ((c.node, (*(f"+ {f}" for f in c.added), *(f"- {f}" for f in c.removed))) for c in node_changes)
    return [f"{nodes}: {'  '.join(signs)}" for nodes, signs in _by_value(pairs) if signs]


def apply(node_changes: Iterable[Change]) -> list[list[str]]:
    """Run the update commands, which only Slurm operators may do, and return them. See NOT_PERMANENT."""
    commands = update_commands(node_changes)
    for command in commands:
        output(*command)
    return commands


def helper_script() -> str:
    """Return a node_features/helpers script. Without an argument it prints this node's expected features, a line each.
    It needs only a POSIX shell and sysfs. The node's fabric is the content of /etc/holmes/fabric, if that exists."""
    return _HELPER


_HELPER = r"""#!/bin/sh
# node_features/helpers: prints the NIC features of this node, one per line. It cannot change them.
# slurm.conf needs NodeFeaturesPlugins=node_features/helpers, and helpers.conf a line with all features that any node
# prints: Feature=nic_ib,nic_200g,eth_25g Helper=/etc/slurm/this-script. Constraints then take no counts and brackets.
[ $# -gt 0 ] && exit 0
SYS=${HOLMES_SYSFS:-/sys}
read_() { cat "$1" 2>/dev/null; }
ib_ports=0 roce_ports=0
# the rails are the ports of the highest rate: "best count" and a port's rate make the new "best count"
add() { echo "$1 $2" | awk '{ if ($3 > $1) print $3, 1; else if ($3 == $1) print $1, $2 + 1; else print $1, $2 }'; }
product() { echo "$1" | awk '{print $1 * $2}'; }
ib="0 0" roce="0 0"
for port in "$SYS"/class/infiniband/*/ports/[0-9]*; do
    [ -d "$port" ] || continue
    device=${port%/ports/*}
    [ -d "$device/device/physfn/infiniband" ] && continue                # a virtual function of a physical one here
    case "$(read_ "$port/state")" in *ACTIVE*) ;; *) continue ;; esac
    case "$(read_ "$device/node_type")" in 1:*) ;; *) continue ;; esac   # iWARP and others are not used
    case "${device##*/}" in hfi1*|opa*) continue ;; esac                 # Omni-Path
    rate=$(read_ "$port/rate" | awk '{print $1 + 0}')
    case "$(read_ "$port/link_layer")" in
    InfiniBand) ib=$(add "$ib" "$rate"); ib_ports=$((ib_ports + 1)) ;;
    Ethernet)
        owner=
        for type in "$port"/gid_attrs/types/*; do
            [ "$(read_ "$type")" = "RoCE v2" ] || continue
            case "$(read_ "$port/gids/${type##*/}")" in 0000:0000:0000:0000:0000:ffff:*) ;; *) continue ;; esac
            owner=$(read_ "$port/gid_attrs/ndevs/${type##*/}")
            [ -n "$owner" ] && break
        done
        if [ -z "$owner" ]; then
            for net in "$device"/device/net/*; do [ -d "$net" ] && owner=${net##*/} && break; done
        fi
        [ -n "$owner" ] || continue
        master=$(readlink "$SYS/class/net/$owner/master")
        [ -n "$master" ] && owner=${master##*/}
        if [ -d "$SYS/class/net/$owner/bonding" ]; then
            rate=$(echo "$rate $(read_ "$SYS/class/net/$owner/speed")" | awk '{b = $2 / 1000; print (b > $1) ? b : $1}')
        fi
        roce=$(add "$roce" "$rate"); roce_ports=$((roce_ports + 1)) ;;
    esac
done
ib=$(product "$ib") roce=$(product "$roce")
if [ $((ib_ports + roce_ports)) -gt 0 ]; then
    if [ "$(echo "$ib $roce" | awk '{print ($1 >= $2)}')" = 1 ]; then nic=ib rate=$ib; else nic=roce rate=$roce; fi
else
    nic=ethernet rate=0
fi
# the fastest interface that is up, plain Ethernet or RoCE; a VLAN or a bridge has the speed of its lower interfaces
speed=0
for net in "$SYS"/class/net/*; do
    name=${net##*/}
    case "$name" in lo|docker*|br-*|virbr*|veth*|ifb*|tun*|tap*|mgmt*|bmc*|ipmi*|idrac*|usb*) continue ;; esac
    [ "$(read_ "$net/type")" = 32 ] && continue
    [ -L "$net/master" ] && continue
    [ "$(read_ "$net/operstate")" = up ] || continue
    case "$(readlink -f "$net")" in
    */virtual/*) [ -d "$net/bonding" ] || for below in "$net"/lower_*; do net=$below; done ;;
    esac
    case "$(readlink -f "$net")" in */virtual/*) [ -d "$net/bonding" ] || continue ;; esac
    now=$(read_ "$net/speed"); now=${now:-0}
    [ "$now" -gt "$speed" ] && speed=$now
done
ethernet=$(echo "$speed" | awk '{print $1 / 1000}')
[ "$nic" = ethernet ] && rate=$ethernet
echo "nic_$nic"
[ "$rate" != 0 ] && echo "nic_${rate}g"
[ "$ethernet" != 0 ] && echo "eth_${ethernet}g"
[ -r /etc/holmes/fabric ] && echo "fabric_$(cat /etc/holmes/fabric)"
exit 0
"""
