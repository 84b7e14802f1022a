"""The features a node deserves, whether Slurm's agree, and how they get there."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
_FEATURE = re.compile(r"[A-Za-z0-9_.:+-]+\Z")  # what neither slurm.conf nor a constraint gives a meaning of its own
_OWN = (
    re.compile(r"nic_(ib|roce|ethernet)\Z"),
    re.compile(r"nic_[\d.]+g\Z"),
    re.compile(r"eth_[\d.]+g\Z"),
    re.compile(r"fabric_.+\Z"),
)
_What = TypeVar("_What", bound=Hashable)
_SAME_RATE = 0.02  # the kernel rounds FDR's 54.5 to 56


def spell_rate(gbps: float) -> str:
    """200.0 is ``200g``, 0.05 is ``0.05g``."""
    return f"{gbps:.6f}".rstrip("0").rstrip(".") + "g"


def features_of(nics: NodeNics) -> tuple[str, ...]:
    """What `holmes label` writes for a node with these NICs. Rates the kernel does not know are left out; the fabric's
    name too, for no node can know it."""
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
    """The rate of the interface that Ethernet traffic would use."""
    found = candidates(nics, NicType.ETHERNET)
    return found[0].gbps if found else None


def differences(
    nics: NodeNics, features: Sequence[str], vocabulary: Vocabulary, node: str = "this node"
) -> list[Finding]:
    """Where Slurm's `features` of a node differ from its NICs; ``info`` where the kernel cannot tell."""
    reading = read_features(features, vocabulary)
    where, hint = f"node {node}", f"holmes label {node}"
    found = [Finding("error", where, problem, hint, node) for problem in reading.problems]
    nic = nics.type
    if reading.nic is None or (reading.nic.rdma and not reading.nic.verbs):  # a plugin's, of which sysfs says little
        return found
    if reading.nic is not nic:
        seen = [f"{p.name} {p.kind} {p.state}" for p in nics.ports] or [n.name for n in nics.interfaces]
        ports = ", ".join(seen) or "no NIC"
        found.append(
            Finding(
                "error",
                where,
                f"Slurm's features say {reading.nic}, the kernel says {nic} ({ports})",
                f"{hint}, or bring the NIC back",
                node,
            )
        )
        return found
    if not any(m.nic for m in reading.meanings) and nic.rdma:
        found.append(Finding("error", where, f"no feature names its {nic} NIC", hint, node))
    if nic.rdma:
        found += _compare(
            nic, reading.rdma_gbps, nics.rdma_gbps(nic), label=f"nic_{nic}", where=where, hint=hint, node=node
        )
        port = next((m.port for m in reading.meanings if m.port), None)
        if port is not None and any(p.gbps == port for p in nics.usable_ports(nic)):
            found = [Finding("warning", f.where, f.what, f.hint, f.node) if "rate" in f.what else f for f in found]
    found += _compare(
        NicType.ETHERNET, reading.ethernet_gbps, ethernet_gbps(nics), label="eth", where=where, hint=hint, node=node
    )
    return found


def _compare(
    nic: NicType, said: float | None, measured: float | None, label: str, where: str, hint: str, node: str
) -> list[Finding]:
    if measured is None:
        return [Finding("info", where, f"the kernel does not know the {nic} rate: not compared", "none needed", node)]
    if said is None:
        what = f"no feature gives the {nic} rate, the kernel says {measured:g} Gb/s"
        return [Finding("error", where, what, hint, node)]
    if abs(said - measured) > _SAME_RATE * max(said, measured):
        what = f"Slurm's features give {said:g} Gb/s as the {nic} rate, the kernel {measured:g} Gb/s"
        return [Finding("error", where, what, hint, node)]
    return []


@dataclass(frozen=True)
class Change:
    """A node's available features now, and as they should be; and the same of the active ones, of which a site that
    switches features (node_features plugins) has fewer. Nobody else's feature is switched on."""

    node: str
    present: tuple[str, ...]
    wanted: tuple[str, ...]
    active: tuple[str, ...]
    active_wanted: tuple[str, ...]

    @property
    def added(self) -> tuple[str, ...]:
        """New, or only now active."""
        return tuple(f for f in self.wanted if f not in self.present or f in set(self.active_wanted) - set(self.active))

    @property
    def removed(self) -> tuple[str, ...]:
        return tuple(f for f in self.present if f not in self.wanted)

    @property
    def needed(self) -> bool:
        return (self.present, self.active) != (self.wanted, self.active_wanted)


def merge(present: Sequence[str], deserved: Sequence[str]) -> tuple[str, ...]:
    """`present` with `deserved` added. Nobody else's feature is touched; only a label of ours gives way to a new one of
    its kind (``nic_ib`` to ``nic_roce``), for a node has one of each."""
    for feature in deserved:
        if not _FEATURE.match(feature):
            raise SiteError(f"{feature!r} cannot be a feature", where="label", hint="use letters, digits and _ . : + -")
    renewed = [pattern for pattern in _OWN if any(pattern.match(f) for f in deserved)]
    kept = [f for f in present if f in deserved or not any(pattern.match(f) for pattern in renewed)]
    return tuple(dict.fromkeys([*kept, *deserved]))


def changes(
    nodes: Iterable[Node], deserved: Mapping[str, Sequence[str]], fabrics: Mapping[str, str] | None = None
) -> list[Change]:
    """A Change for every node that `deserved` (node -> features) names; `fabrics`: node -> the name of its fabric."""
    fabrics = fabrics or {}
    known = {n.name: n for n in nodes}
    for name in [*deserved, *fabrics]:
        if name not in known:
            raise SiteError(f"no node {name!r}", where="label", hint=f"Slurm has {compress(known)}")
    result = []
    for name in dict.fromkeys([*deserved, *fabrics]):
        labels = [*deserved.get(name, ()), *([f"fabric_{fabrics[name]}"] if name in fabrics else [])]
        available, active = known[name].available, known[name].features
        result.append(Change(name, available, merge(available, labels), active, merge(active, labels)))
    return result


def _alike(pairs: Iterable[tuple[str, _What]]) -> list[tuple[str, _What]]:
    return [(compress(nodes), what) for what, nodes in grouped((what, node) for node, what in pairs)]


def slurm_conf_lines(wanted: Iterable[Change]) -> list[str]:
    """`Feature=` for the nodes' own NodeName lines (slurm.conf takes one line per node: extend it, add none)."""
    alike = _alike((c.node, c.wanted) for c in wanted)
    return [f"NodeName={nodes} Feature={','.join(features)}" for nodes, features in alike]


def update_commands(wanted: Iterable[Change]) -> list[list[str]]:
    """`scontrol update` for the nodes that change. It replaces all features of a node, so all are given."""
    pairs = ((c.node, (c.wanted, c.active_wanted)) for c in wanted if c.needed)
    return [
        [
            "scontrol",
            "update",
            f"NodeName={nodes}",
            f"AvailableFeatures={','.join(available)}",
            f"ActiveFeatures={','.join(active)}",
        ]
        for nodes, (available, active) in _alike(pairs)
    ]


def difference_lines(wanted: Iterable[Change]) -> list[str]:
    """``ib[1-4]: + nic_ib  - nic_roce`` for the nodes that change."""
    pairs = ((c.node, (*(f"+ {f}" for f in c.added), *(f"- {f}" for f in c.removed))) for c in wanted)
    return [f"{nodes}: {'  '.join(signs)}" for nodes, signs in _alike(pairs) if signs]


def apply(wanted: Iterable[Change]) -> list[list[str]]:
    """Run the commands, which Slurm allows to its operators only. Returns what was run; see NOT_PERMANENT."""
    commands = update_commands(wanted)
    for words in commands:
        output(*words)
    return commands


def helper_script() -> str:
    """A node_features/helpers script: without an argument it prints the features this node deserves (a line each), read
    from sysfs by a POSIX shell alone. A node's fabric is the content of /etc/holmes/fabric, where there is one."""
    return _HELPER


_HELPER = r"""#!/bin/sh
# node_features/helpers: prints the NIC features of this node, one a line. It cannot change them.
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
    [ -d "$device/device/physfn/infiniband" ] && continue                # a virtual function beside its physical one
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
# the fastest interface that is up, be it plain Ethernet or RoCE; a VLAN or a bridge is as fast as what lies below it
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
