"""A node's NICs as data, and the choice of NICs for each kind of traffic."""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.nic_types import NicType

_VIRTUAL_NAMES = "lo|docker|br-|virbr|veth|cni|flannel|cali|ifb|tun|tap|dummy|kube|vxlan|wg|lxc|podman|sit|gre|ip6"
_VIRTUAL = re.compile(rf"({_VIRTUAL_NAMES})[\w.@-]*\Z")
_MANAGEMENT = re.compile(r"(mgmt|bmc|ipmi|idrac|usb)[\w.@-]*\Z")


def role_of(name: str) -> str:
    """Return an interface's role by its name: ``data``, ``management`` or ``virtual`` (container, tunnel, loopback)."""
    if _VIRTUAL.match(name):
        return "virtual"
    return "management" if _MANAGEMENT.match(name) else "data"


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return the key of a natural sort order, in which eth2 comes before eth10."""
    return [(0, int(p)) if p.isdecimal() else (1, p) for p in re.split(r"(\d+)", name) if p]


@dataclass(frozen=True)
class Nic:
    """A kernel network interface. `type`: IB for an IPoIB interface, RoCE for the interface of a RoCE port, otherwise
    Ethernet; `address`, `prefix`: its IPv4 address and prefix length; `gbps`: its rate in Gb/s; None if the kernel does
    not know it; `rdma`: names of the RDMA ports behind it (``mlx5_0:1``); `member_of`: the bond or bridge that it
    belongs to; `carrier`: False if the interface is on but the other end of its cable is off."""

    name: str
    type: NicType
    up: bool = True
    address: str | None = None
    prefix: int | None = None
    gbps: float | None = None
    rdma: tuple[str, ...] = ()
    member_of: str | None = None
    driver: str = ""
    carrier: bool = True

    @property
    def role(self) -> str:
        return role_of(self.name)

    @property
    def network(self) -> ipaddress.IPv4Network | None:
        """The IPv4 subnet; None without an address."""
        if self.address is None:
            return None
        return ipaddress.IPv4Network(f"{self.address}/{32 if self.prefix is None else self.prefix}", strict=False)


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device. `kind`: ``ib``, ``roce``, or a kind that NCCL's IB transport does not use (``iwarp``,
    ``omnipath``, ``efa``, ``usnic``); `interface`: the network interface that owns the port, or its bond; `gid`: of a
    RoCE port, the first RoCE v2 GID with an IPv4 address; of an InfiniBand port, the first GID, whose upper half is the
    subnet prefix; `gid_index`: index of a RoCE port's `gid`, only for display, because NCCL finds it itself; `gpus`:
    indices of the nearest GPUs in PCI order; `pci`: the path, root first; `physical`: of a virtual function."""

    device: str
    port: int
    kind: str
    active: bool
    state: str
    gbps: float | None
    interface: str | None = None
    gid_index: int | None = None
    gid: str | None = None
    gpus: tuple[int, ...] = ()
    pci: tuple[str, ...] = ()
    physical: str | None = None

    @property
    def name(self) -> str:
        """The name in NCCL_IB_HCA."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True)
class NodeNics:
    """All NICs of one node. `gpus`: PCI addresses of its GPUs; `notes`: lines on NICs that are not used, and why.
    `addressed`: whether the probe could read addresses. In a copy of sysfs it cannot, so a missing address means
    nothing. `verbs`: whether RDMA devices can be opened (``/dev/infiniband/uverbs*``), even if sysfs shows none, as in
    some containers; `sockets`, `hcas`: the only interfaces for sockets and the only ports (``mlx5_0:1``) for RDMA that
    :func:`nccl.restrict_nics` allows; None: no limit."""

    interfaces: tuple[Nic, ...]
    ports: tuple[RdmaPort, ...] = ()
    gpus: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    addressed: bool = True
    verbs: bool = False
    sockets: tuple[str, ...] | None = None
    hcas: tuple[str, ...] | None = None

    @property
    def type(self) -> NicType:
        """The NIC type for fast traffic: the type whose compute ports have the highest total rate; InfiniBand if equal.
        Thus a slower storage card in Ethernet mode does not turn an IB node into a RoCE node."""
        # A port of unknown rate counts more than no port.
        rates = {t: self.rdma_gbps(t) or 0.001 * len(self.compute_ports(t)) for t in (NicType.IB, NicType.ROCE)}
        if any(rates.values()):
            return NicType.IB if rates[NicType.IB] >= rates[NicType.ROCE] else NicType.ROCE
        if not self.ports:  # a testbed: interfaces are named after the NIC type they emulate
            for nic in self.interfaces:
                if nic.type.rdma and nic.up:
                    return nic.type
        return NicType.ETHERNET

    def usable_ports(self, nic: NicType) -> tuple[RdmaPort, ...]:
        """Return the active RDMA ports of type `nic`, except RoCE ports without a network interface."""
        active = (p for p in self.ports if p.kind == nic.value and p.active)
        return tuple(p for p in active if nic is NicType.IB or p.interface is not None)

    def compute_ports(self, nic: NicType) -> tuple[RdmaPort, ...]:
        """Return the usable ports for collectives: the ports in `hcas` if it is set, else those with the highest rate.
        A slower port of the same type is a storage card or has a bad cable, and would slow NCCL down to its rate. A
        virtual function is left out if its physical function is present, because both share one wire."""
        usable = self.usable_ports(nic)
        if self.hcas is not None:
            return tuple(p for p in usable if p.name in self.hcas)
        pci_addresses = {p.pci[-1] for p in usable if p.pci}
        usable = tuple(p for p in usable if p.physical not in pci_addresses)
        best_gbps = max(map(self.port_gbps, usable), default=0.0)
        return tuple(p for p in usable if self.port_gbps(p) == best_gbps)

    def port_gbps(self, port: RdmaPort) -> float:
        """Return the rate of a port in Gb/s; 0 if unknown. For a port on a bond it is the rate of the bond, because the
        RDMA device may show the rate of one member only."""
        owner = self.interface(port.interface) if port.interface else None
        bond_gbps = owner.gbps if owner is not None and owner.driver == "bond" else None
        return max(port.gbps or 0.0, bond_gbps or 0.0)

    def rdma_gbps(self, nic: NicType) -> float | None:
        """Return the total rate of this node's compute ports of a type; None if it is unknown."""
        return sum(self.port_gbps(p) for p in self.compute_ports(nic)) or None

    @property
    def plugin_network(self) -> tuple[NicType, float] | None:
        """(Type, Gb/s) of the fastest network that NCCL uses through a plugin; None if none has a known rate."""
        ports = [(p.kind, p.gbps) for p in self.ports if p.active and p.kind in (NicType.EFA, NicType.OMNIPATH)]
        ports += [(NicType.SLINGSHOT, n.gbps) for n in self.interfaces if n.up and n.driver.startswith("cxi")]
        rates = {NicType(kind): sum(gbps or 0.0 for k, gbps in ports if k == kind) for kind, _ in ports}
        return max(rates.items(), key=lambda item: item[1]) if any(rates.values()) else None

    def interface(self, name: str) -> Nic | None:
        return next((n for n in self.interfaces if n.name == name), None)


def candidates(nics: NodeNics, nic: NicType) -> list[Nic]:
    """Return the interfaces that could carry `nic` traffic, the best first. The criteria, in order of importance: the
    interface is up, has an address, is not for management, has a high rate, has exactly the type `nic`; then its name.
    Loopback, container bridges and members of a bond are left out, and IPoIB for Ethernet traffic. For Ethernet
    traffic, `sockets` overrides this choice if it is set."""
    if nics.sockets is not None and not nic.rdma:
        possible = [n for n in nics.interfaces if n.name in nics.sockets]
    else:
        free = [n for n in nics.interfaces if n.member_of is None and n.role != "virtual"]
        possible = [n for n in free if (n.type is nic if nic.rdma else n.type is not NicType.IB)]

    def rank(n: Nic) -> tuple[Any, ...]:
        has_no_address = nics.addressed and n.address is None
        quality = (not n.up, has_no_address, n.role == "management", -(n.gbps or 0), n.type is not nic)
        return (*quality, natural_key(n.name))

    return sorted(possible, key=rank)


def data_interface(nics: NodeNics, nic: NicType, node: str = "") -> Nic:
    """Return the best interface for `nic` traffic. Raise SiteError unless it is up and has an IPv4 address."""
    where, ports = f"node {node}" if node else "this node", ", ".join(p.name for p in nics.usable_ports(nic))
    interfaces = candidates(nics, nic)
    if not interfaces:
        problem = f"no {nic} interface among {', '.join(n.name for n in nics.interfaces) or 'none'}"
        hint = "correct the node's features (holmes label), or bring the interface back under its name"
        if ports:
            problem = f"{nic} ports {ports} have no kernel interface"
            hint = "give them one with an IPv4 address (IPoIB for InfiniBand)"
        raise SiteError(problem, where=where, hint=hint)
    best = interfaces[0]
    name = f"{nic} interface {best.name}"
    SiteError.refuse(
        where,
        (not best.up and not best.carrier, f"{name} has no carrier", "check its cable and switch port"),
        (not best.up, f"{name} is down", f"ip link set {best.name} up"),
        (best.address is None, f"{name} has no IPv4 address", f"ip addr add ADDRESS/PREFIX dev {best.name}"),
    )
    return best
