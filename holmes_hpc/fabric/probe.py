"""Probe of this node's NICs, read from the kernel's sysfs without root."""

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from operator import eq
from pathlib import Path

import psutil

from holmes_hpc.fabric.nic_types import NicType
from holmes_hpc.fabric.nics import Nic, NodeNics, RdmaPort, candidates, natural_key

Reader = Callable[[Path], str]
_IPOIB = "32"  # ARPHRD_INFINIBAND in /sys/class/net/<if>/type
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]\Z")
_EMULATED = re.compile(r"(ib|roce)\d+\Z")
_GPU_VENDORS = ("0x10de", "0x1002")  # NVIDIA, AMD
_GPU_CLASSES = ("0x0302", "0x0300", "0x0380", "0x1200")  # 3D, VGA, display, processing accelerator


def read_text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()


def addresses() -> dict[str, tuple[str, int]]:
    """Return {interface: (first IPv4 address, prefix length)} for this machine's interfaces with an IPv4 address."""
    ipv4 = [(name, a) for name, found in psutil.net_if_addrs().items() for a in found if a.family == socket.AF_INET]
    interfaces = {name: ipaddress.IPv4Interface(f"{a.address}/{a.netmask or 32}") for name, a in reversed(ipv4)}
    return {name: (str(interface.ip), interface.network.prefixlen) for name, interface in interfaces.items()}


def probe(
    sysfs: Path = Path("/sys"),
    ipv4: Mapping[str, tuple[str, int]] | None = None,
    read: Reader = read_text,
    dev: Path | None = None,
) -> NodeNics:
    """Return this node's NICs, or those in a copy of its sysfs (`cp -a /sys/class/net /sys/class/infiniband …`).
    `ipv4`: interface -> (address, prefix length). The default is this machine's addresses for ``/sys``. It is empty for
    a copy, which holds only the addresses in RoCE GIDs. `read`: the function that reads one file, so that tests can
    imitate read errors of the kernel. `dev`: the folder of device files; the default is ``/dev`` for ``/sys``."""
    notes: list[str] = []
    tree = _Tree(sysfs, read)
    if sysfs == Path("/sys"):
        ipv4 = addresses() if ipv4 is None else ipv4
        dev = dev or Path("/dev")
    verbs = dev is not None and any(dev.glob("infiniband/uverbs*"))
    gpus = tree.gpus()
    ports = [port for device in tree.names("class/infiniband") for port in _read_ports(tree, device, gpus, notes)]
    names = [name for name in tree.names("class/net") if tree.is_dir(f"class/net/{name}")]
    interfaces = [_read_interface(tree, name, ports, ipv4 or {}) for name in names]
    interfaces.sort(key=lambda n: natural_key(n.name))
    ports.sort(key=lambda p: (natural_key(p.device), p.port))
    nics = NodeNics(tuple(interfaces), tuple(ports), tuple(g[-1] for g in gpus), (), bool(ipv4), verbs)
    for nic in (NicType.IB, NicType.ROCE):
        compute_ports = nics.compute_ports(nic)
        for p in (port for port in nics.usable_ports(nic) if port not in compute_ports):
            gbps, best_gbps = nics.port_gbps(p), nics.port_gbps(compute_ports[0])
            virtual = f"is a virtual function of {p.physical}, which is also present"
            reason = virtual if gbps == best_gbps else f"runs at {gbps:g} Gb/s, others at {best_gbps:g}"
            notes.append(f"{p.name} {reason}: not used")
    usable = [n for n in candidates(nics, NicType.ETHERNET) if n.up and (n.address or not nics.addressed)]
    ethernet_only_nic = next((n for n in usable if n.type is NicType.ETHERNET and n.role == "data"), None)
    if ethernet_only_nic is not None and usable[0].type is NicType.ROCE:
        name = ethernet_only_nic.name
        advice = f"if other fabrics reach this node only over {name}, set ethernet: {name} (docs/nics.md)"
        notes.append(f"{usable[0].name} carries TCP, because {name} is slower: {advice}")
    if verbs and not ports:
        place = "no /sys/class/infiniband here, but devices in /dev/infiniband (a container)"
        notes.append(f"{place}: NCCL finds its ports itself")
    if not ports:
        reason = "without an RDMA device: expected on a testbed, otherwise load the driver"
        notes += [f"{n.name} counts as {n.type} by its name only, {reason}" for n in interfaces if n.type.rdma]
    return replace(nics, notes=tuple(notes))


class _Tree:
    """A reader of a sysfs tree. It returns None for a missing or unreadable file, and no names for such a folder."""

    def __init__(self, root: Path, read: Reader) -> None:
        self.root, self._read = root, read

    def text(self, path: str) -> str | None:
        with contextlib.suppress(OSError):  # EINVAL is common: the speed of a down link, the type of an empty GID
            return self._read(self.root / path).strip()
        return None

    def names(self, path: str) -> list[str]:
        with contextlib.suppress(OSError):
            return sorted(os.listdir(self.root / path), key=natural_key)
        return []

    def is_dir(self, path: str) -> bool:
        return (self.root / path).is_dir()

    def target(self, path: str) -> str | None:
        """Return the last name of a link's target; None if there is no such link."""
        with contextlib.suppress(OSError):
            return os.path.basename(os.readlink(self.root / path))
        return None

    def pci_path(self, path: str) -> tuple[str, ...]:
        """Return the PCI addresses from the root port down to the device behind `path`; empty for a virtual device."""
        with contextlib.suppress(OSError, RuntimeError):
            parts = (self.root / path).resolve(strict=True).parts
            return tuple(p for p in parts if _PCI.match(p) or p.startswith("pci"))
        return ()

    def gpus(self) -> list[tuple[str, ...]]:
        """Return the PCI paths of the GPUs, in PCI order (CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID)."""
        paths = []
        for address in self.names("bus/pci/devices"):
            base = f"bus/pci/devices/{address}"
            code = self.text(f"{base}/class") or ""
            if code.startswith(_GPU_CLASSES) and self.text(f"{base}/vendor") in _GPU_VENDORS:
                paths.append(self.pci_path(base) or (address,))
        return paths


def _read_ports(tree: _Tree, device: str, gpus: list[tuple[str, ...]], notes: list[str]) -> Iterator[RdmaPort]:
    base = f"class/infiniband/{device}"
    node_type = (tree.text(f"{base}/node_type") or "").partition(":")[0].strip()
    pci = tree.pci_path(f"{base}/device")
    physical = tree.target(f"{base}/device/physfn")
    nearest = _nearest_gpus(pci, gpus)
    for port in tree.names(f"{base}/ports"):
        where = f"{base}/ports/{port}"
        if not port.isdecimal():
            continue
        link_layer = tree.text(f"{where}/link_layer") or ""
        kind = _port_kind(device, node_type, link_layer)
        state = (tree.text(f"{where}/state") or "unknown").partition(":")[2].strip() or "unknown"
        rate = re.match(r"([\d.]+)\s*Gb/sec", tree.text(f"{where}/rate") or "")
        index, gid, owner = _find_gid(tree, where) if kind == "roce" else (None, None, None)
        if kind == "ib":
            gid = text if _ipv6(text := tree.text(f"{where}/gids/0")) else None
        active = state == "ACTIVE"
        if kind == "roce" and active and gid is None:
            notes.append(f"{device}:{port} has no readable RoCE v2 GID with an IPv4 address")
        if kind not in ("ib", "roce"):
            reason = "not used for RDMA, because NCCL's IB transport does not support it"
            notes.append(f"{device}:{port} is {kind}: {reason}")
        if not active:
            notes.append(f"{device}:{port} is {state}")
        if owner is None:
            owner = _find_owner(tree, device, pci)
        interface = (tree.target(f"class/net/{owner}/master") if owner else None) or owner  # or its bond
        gbps = float(rate[1]) if rate else None
        yield RdmaPort(device, int(port), kind, active, state, gbps, interface, index, gid, nearest, pci, physical)


def _port_kind(device: str, node_type: str, layer: str) -> str:
    # node_type 1 is a channel adapter (IB or RoCE), 4 an RNIC (iWARP, whose link layer is also Ethernet)
    if node_type == "4":
        return "iwarp"
    if node_type in ("5", "6"):
        return "usnic"
    if device.startswith(("hfi1", "opa")):  # opa: rdma-core's persistent names
        return "omnipath"
    if node_type not in ("1", ""):
        return "efa" if device.startswith(("efa", "rdmap")) else f"of node type {node_type}"
    return {"InfiniBand": "ib", "Ethernet": "roce"}.get(layer, f"of link layer {layer or 'unknown'}")


def _find_gid(tree: _Tree, port: str) -> tuple[int | None, str | None, str | None]:
    """Return (index, GID, interface) of a port's first RoCE v2 GID with an IPv4 address; all None if it has none."""
    for index in tree.names(f"{port}/gids"):
        if not index.isdecimal() or tree.text(f"{port}/gid_attrs/types/{index}") != "RoCE v2":
            continue  # an empty slot, RoCE v1, or EINVAL in a container
        gid = tree.text(f"{port}/gids/{index}") or ""
        if gid_address(gid) is not None:
            return int(index), gid, tree.text(f"{port}/gid_attrs/ndevs/{index}")
    return None, None, None


def _ipv6(text: str | None) -> ipaddress.IPv6Address | None:
    """Return the address in the file of a GID; None if it is zero (no subnet manager yet) or unreadable."""
    with contextlib.suppress(ValueError):
        return ipaddress.IPv6Address(text) if text and int(ipaddress.IPv6Address(text)) else None
    return None


def gid_address(gid: str) -> str | None:
    """Return the IPv4 address of an IPv4-mapped GID (0000:…:ffff:0a00:0001); None for another GID."""
    address = _ipv6(gid)
    return str(address.ipv4_mapped) if address and address.ipv4_mapped else None


def _find_owner(tree: _Tree, device: str, pci: tuple[str, ...]) -> str | None:
    """Return the network interface on the PCI function of an RDMA device, for a port whose GIDs name no interface."""
    names = tree.names(f"class/infiniband/{device}/device/net")
    if not names and pci:
        names = [name for name in tree.names("class/net") if tree.pci_path(f"class/net/{name}/device") == pci]
    return names[0] if names else None


def _nearest_gpus(pci: tuple[str, ...], gpus: list[tuple[str, ...]]) -> tuple[int, ...]:
    """Return the indices of the GPUs that share the longest PCI path with a NIC; none if no path is shared."""
    depths = [sum(takewhile(bool, map(eq, pci, gpu))) for gpu in gpus]  # equal elements from the root on
    max_depth = max(depths, default=0)
    return tuple(i for i, depth in enumerate(depths) if depth == max_depth and max_depth > 0)


def _read_interface(tree: _Tree, name: str, ports: list[RdmaPort], ipv4: Mapping[str, tuple[str, int]]) -> Nic:
    base = f"class/net/{name}"
    own_ports = [p for p in ports if p.interface == name]
    emulated = _EMULATED.match(name) if not ports else None
    if tree.text(f"{base}/type") == _IPOIB:
        nic = NicType.IB
    elif any(p.kind == "roce" for p in own_ports):
        nic = NicType.ROCE
    else:
        nic = NicType(emulated[1]) if emulated else NicType.ETHERNET
    address, prefix = ipv4.get(name, (None, None))
    if address is None:
        mapped = [gid_address(p.gid) for p in own_ports if p.gid]
        address = mapped[0] if mapped else None
    state = tree.text(f"{base}/operstate") or "unknown"
    has_flag = state == "unknown" and int(tree.text(f"{base}/flags") or "0x1", 16) & 1  # IFF_UP
    is_bond = tree.is_dir(f"{base}/bonding")
    driver = tree.target(f"{base}/device/driver") or ("bond" if is_bond else "")
    return Nic(
        name,
        type=nic,
        up=state in ("up", "dormant") or bool(has_flag),  # drivers without carrier detection have only the flag
        address=address,
        prefix=prefix,
        gbps=_read_speed(tree, base, is_bond, own_ports),
        rdma=tuple(p.name for p in own_ports),
        member_of=tree.target(f"{base}/master"),
        driver=driver,
        # The kernel knows the carrier only while the interface is on.
        carrier=tree.text(f"{base}/carrier") != "0" and state != "lowerlayerdown",
    )


def _read_speed(tree: _Tree, base: str, is_bond: bool, ports: list[RdmaPort]) -> float | None:
    """Return the rate of an interface in Gb/s: the total of its RDMA `ports` if known (except on a bond), otherwise the
    speed that the kernel reports; None if unknown."""
    if ports and ports[0].gbps and not is_bond:
        return sum(p.gbps or 0 for p in ports)
    if not is_bond and "virtual" in (tree.root / base).resolve().parts:
        # veth and tun always report 10 Gb/s; a VLAN or a bridge has the speed of its lower interfaces
        lower = [f"class/net/{n.removeprefix('lower_')}" for n in tree.names(base) if n.startswith("lower_")]
        rates = [_read_speed(tree, path, tree.is_dir(f"{path}/bonding"), []) for path in lower]
        return max((rate for rate in rates if rate is not None), default=None)
    try:
        megabits = int(tree.text(f"{base}/speed") or "-1")
    except ValueError:
        return None
    return megabits / 1000 if megabits > 0 else None
