"""A node's NICs as data, and which of them carries which traffic."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from holmes_hpc.errors import SiteError
from holmes_hpc.fabric.nic_types import NicType

_VIRTUAL = re.compile(
    r"(lo|docker|br-|virbr|veth|cni|flannel|cali|ifb|tun|tap|dummy|kube|vxlan|wg|lxc|podman|sit|gre"
    r"|ip6)[\w.@-]*\Z"
)
_MANAGEMENT = re.compile(r"(mgmt|bmc|ipmi|idrac|usb)[\w.@-]*\Z")


def role_of(name: str) -> str:
    """What an interface is for, by its name: ``data``, ``management``, ``virtual`` (containers, tunnels, loopback)."""
    if _VIRTUAL.match(name):
        return "virtual"
    return "management" if _MANAGEMENT.match(name) else "data"


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key in which eth2 comes before eth10."""
    return [(0, int(p)) if p.isdecimal() else (1, p) for p in re.split(r"(\d+)", name) if p]


@dataclass(frozen=True)
class Nic:
    """A kernel network interface. `address`: its IPv4 address; `gbps`: None where the kernel does not know it.

    `type`: what traffic on it counts as: IB for IPoIB, RoCE where a RoCE port belongs to it, else Ethernet.
    `rdma`: the RDMA ports behind it, as ``mlx5_0:1``. `member_of`: the bond or bridge that owns it. `carrier`: False
    where it is switched on and the other end of its cable is not.
    """

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", NicType(self.type))
        object.__setattr__(self, "rdma", tuple(self.rdma))

    @property
    def role(self) -> str:
        return role_of(self.name)

    @property
    def network(self) -> ipaddress.IPv4Network | None:
        """Its IPv4 subnet, None without an address."""
        if self.address is None:
            return None
        return ipaddress.IPv4Network(f"{self.address}/{32 if self.prefix is None else self.prefix}", strict=False)


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device. `kind`: ``ib``, ``roce`` or ``iwarp``, or what else the kernel calls it (``omnipath``,
    ``efa``, ``usnic``), which NCCL's IB transport does not use.

    `gid_index`/`gid`: RoCE v2's IPv4-mapped GID on the owning interface (shown, never set: NCCL finds it itself); of an
    InfiniBand port its first GID, whose upper half names its subnet. `gpus`: indices, in PCI order, of the GPUs nearest
    to it; `pci`: its PCI path, root first; `physical`: of a virtual function, the PCI address of its physical one.
    """

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
        """As NCCL_IB_HCA writes it."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True)
class NodeNics:
    """All NICs of one node. `gpus`: PCI addresses of its GPUs; `notes`: what could not be read, one line each.

    `addressed`: False where addresses are not known at all (a copied tree), so that none of them means nothing.
    `verbs`: whether RDMA devices can be opened (``/dev/infiniband/uverbs*``), also where sysfs shows none, as in some
    containers. `sockets`, `hcas`: the interfaces and ports (``mlx5_0:1``) to which site and environment limit sockets
    and RDMA (nccl.narrowed); None: not limited.
    """

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
        """The type that this node's fast traffic should use: the one whose usable ports are fastest together
        (InfiniBand when equal), so that one storage card in Ethernet mode does not make an IB node a RoCE node."""
        # ports of unknown rate still count for more than none
        rates = {t: self.rdma_gbps(t) or 0.001 * len(self.compute_ports(t)) for t in (NicType.IB, NicType.ROCE)}
        if any(rates.values()):
            return NicType.IB if rates[NicType.IB] >= rates[NicType.ROCE] else NicType.ROCE
        if not self.ports:  # a testbed: interfaces named after the NIC they stand for
            for nic in self.interfaces:
                if nic.type.rdma and nic.up:
                    return nic.type
        return NicType.ETHERNET

    def usable_ports(self, nic: NicType) -> tuple[RdmaPort, ...]:
        """The active RDMA ports of that type; a RoCE port needs an owning interface."""
        return tuple(
            p for p in self.ports if p.kind == nic.value and p.active and (nic is NicType.IB or p.interface is not None)
        )

    def compute_ports(self, nic: NicType) -> tuple[RdmaPort, ...]:
        """The usable ports of the highest rate: the rails of a node. A slower port of the same type beside them is a
        storage card or a bad cable; with it in a communicator NCCL would run at its pace. A virtual function beside its
        physical one shares its wire. Where `hcas` names ports, those."""
        usable = self.usable_ports(nic)
        if self.hcas is not None:
            return tuple(p for p in usable if p.name in self.hcas)
        here = {p.pci[-1] for p in usable if p.pci}
        usable = tuple(p for p in usable if p.physical not in here)
        best = max((self.port_gbps(p) for p in usable), default=0.0)
        return tuple(p for p in usable if self.port_gbps(p) == best)

    def port_gbps(self, port: RdmaPort) -> float:
        """A port's rate, 0 where unknown. A bond's RDMA device shows the rate of one of its ports, so a bond counts
        with its interface's speed."""
        owner = self.interface(port.interface) if port.interface else None
        bond = owner.gbps if owner is not None and owner.driver == "bond" else None
        return max(port.gbps or 0.0, bond or 0.0)

    def rdma_gbps(self, nic: NicType) -> float | None:
        """What this node can send over its compute ports of that type; None where the kernel does not know it."""
        return sum(self.port_gbps(p) for p in self.compute_ports(nic)) or None

    def interface(self, name: str) -> Nic | None:
        return next((n for n in self.interfaces if n.name == name), None)


def candidates(nics: NodeNics, nic: NicType) -> list[Nic]:
    """The interfaces that could carry `nic` traffic, best first: up, with an address, fast, then by name.

    For Ethernet the fastest comes first, be it a plain or a RoCE NIC (plain ones where their rates are equal or not
    known), then management ports; loopback, bridges of containers, IPoIB and members of a bond never, unless `sockets`
    names them.
    """
    if nics.sockets is not None and not nic.rdma:
        chosen = [n for n in nics.interfaces if n.name in nics.sockets]
    else:
        free = [n for n in nics.interfaces if n.member_of is None and n.role != "virtual"]
        chosen = [n for n in free if (n.type is nic if nic.rdma else n.type is not NicType.IB)]

    def rank(n: Nic) -> tuple[bool, bool, bool, float, bool, list[tuple[int, int | str]]]:
        return (
            not n.up,
            nics.addressed and n.address is None,
            n.role == "management",
            -(n.gbps or 0),
            n.type is not nic,
            natural(n.name),
        )

    return sorted(chosen, key=rank)


def data_interface(nics: NodeNics, nic: NicType, node: str = "") -> Nic:
    """The kernel interface that `nic` traffic of this node uses, up and with an IPv4 address.

    `node` is only for messages. Raises SiteError, which names the interface and the hint.
    """
    where = f"node {node}" if node else "this node"
    found = candidates(nics, nic)
    if not found:
        ports = ", ".join(p.name for p in nics.usable_ports(nic))
        if ports:
            raise SiteError(
                f"{nic} ports {ports} have no kernel interface",
                where=where,
                hint="give them one with an IPv4 address (IPoIB for InfiniBand)",
            )
        raise SiteError(
            f"no {nic} interface among {', '.join(n.name for n in nics.interfaces) or 'none'}",
            where=where,
            hint="correct the node's features (holmes label), or bring the interface back under its name",
        )
    best = found[0]
    if not best.up and not best.carrier:
        raise SiteError(
            f"{nic} interface {best.name} has no carrier", where=where, hint="see its cable and switch port"
        )
    if not best.up:
        raise SiteError(f"{nic} interface {best.name} is down", where=where, hint=f"ip link set {best.name} up")
    if best.address is None:
        raise SiteError(
            f"{nic} interface {best.name} has no IPv4 address",
            where=where,
            hint=f"ip addr add ADDRESS/PREFIX dev {best.name}",
        )
    return best
