"""Synthetic sysfs trees, with the kernel's links, of nodes unlike the development machines."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

ROOT = "pci0000:00"
ACTIVE, DOWN, INIT = "4: ACTIVE", "1: DOWN", "2: INIT"


def mapped(address: str) -> str:
    a, b, c, d = (int(x) for x in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


class Tree:
    """A tree: `root` is the sysfs to probe, `read` a reader that fails for files made unreadable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refused: dict[Path, int] = {}
        for folder in ("class/net", "class/infiniband", "bus/pci/devices", "devices/virtual/net"):
            (root / folder).mkdir(parents=True)
        self.net("lo", operstate="unknown", kind="772")

    def read(self, path: Path) -> str:
        if path in self.refused:
            raise OSError(self.refused[path], os.strerror(self.refused[path]), str(path))
        return path.read_text()

    def refuse(self, path: str, code: int = errno.EINVAL) -> None:
        self.refused[self.root / path] = code

    def write(self, path: Path, **files: object) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(f"{text}\n")

    def link(self, link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def pci(self, *addresses: str) -> Path:
        """Create a PCI function below bridges and return its folder under devices/."""
        path = self.root / "devices" / ROOT
        for address in addresses:
            path = path / address
        path.mkdir(parents=True, exist_ok=True)
        bus_link = self.root / "bus/pci/devices" / addresses[-1]
        if not bus_link.is_symlink():
            self.link(bus_link, path)
        return path

    def gpu(self, *addresses: str, vendor: str = "0x10de") -> None:
        self.write(self.pci(*addresses), **{"class": "0x030200", "vendor": vendor})

    def net(
        self,
        name: str,
        pci: Path | None = None,
        speed: object = None,
        operstate: str = "up",
        kind: str = "1",
        driver: str = "",
        master: str | None = None,
        bond: bool = False,
        tx: int = 0,
        rx: int = 0,
    ) -> None:
        folder = (pci / "net" if pci else self.root / "devices/virtual/net") / name
        self.write(folder, operstate=operstate, type=kind, flags="0x1003", carrier=int(operstate == "up"))
        self.write(folder / "statistics", tx_bytes=tx, rx_bytes=rx)
        if speed is not None:
            self.write(folder, speed=speed)
        if bond:
            (folder / "bonding").mkdir()
        if pci:
            self.link(folder / "device", pci)
            if driver:
                (self.root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
                if not (pci / "driver").is_symlink():
                    self.link(pci / "driver", self.root / "bus/pci/drivers" / driver)
        self.link(self.root / "class/net" / name, folder)
        if master:
            (folder / "master").symlink_to(f"../../../../virtual/net/{master}")

    def rdma(
        self,
        device: str,
        pci: Path,
        layer: str = "InfiniBand",
        rate: str = "200 Gb/sec (4X HDR)",
        state: str = ACTIVE,
        node_type: str = "1: CA",
        port: int = 1,
        gids: tuple[tuple[str, str, str], ...] = (),
        xmit: int = 0,
        rcv: int = 0,
    ) -> None:
        """Create an RDMA device. `gids`: (gid, type, interface) for indices 0, 1, …; empty slots follow."""
        folder = pci / "infiniband" / device
        port_folder = folder / "ports" / str(port)
        self.write(folder, node_type=node_type)
        self.write(port_folder, link_layer=layer, state=state, rate=rate)
        self.write(port_folder / "counters", port_xmit_data=xmit, port_rcv_data=rcv)
        empty = "0000:0000:0000:0000:0000:0000:0000:0000"
        for index in range(len(gids) + 2):
            gid, kind, ndev = gids[index] if index < len(gids) else (empty, "", "")
            self.write(port_folder / "gids", **{str(index): gid})
            self.write(port_folder / "gid_attrs/types", **{str(index): kind})
            self.write(port_folder / "gid_attrs/ndevs", **{str(index): ndev})
            if not kind:
                base = f"class/infiniband/{device}/ports/{port}/gid_attrs"
                self.refuse(f"{base}/types/{index}")
                self.refuse(f"{base}/ndevs/{index}")
        if not (folder / "device").is_symlink():
            self.link(folder / "device", pci)
            self.link(self.root / "class/infiniband" / device, folder)


def ethernet_card(tree: Tree, name: str = "eth0", speed: object = 25000, address: str = "0000:00:1f.0") -> None:
    tree.net(name, tree.pci(address), speed=speed, driver="ice")


def hdr_4_hcas(tree: Tree) -> None:
    """Create four HDR HCAs, each behind a switch with two GPUs."""
    ethernet_card(tree)
    for i in range(4):
        bridge = f"0000:0{i}:01.0"
        card = tree.pci(bridge, f"0000:{i}1:00.0")
        tree.rdma(f"mlx5_{i}", card)
        tree.net(f"ib{i}", card, kind="32", driver="mlx5_core")
        for g in (0, 1):
            tree.gpu(bridge, f"0000:{i}2:0{g}.0")


def roce_on_a_bond(tree: Tree) -> None:
    card = tree.pci("0000:00:02.0", "0000:21:00.0")
    second_card = tree.pci("0000:00:02.0", "0000:21:00.1")
    tree.net("bond0", bond=True, speed=200000)
    tree.net("eth2", card, speed=100000, master="bond0")
    tree.net("eth3", second_card, speed=100000, master="bond0")
    link_local = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
    tree.rdma(
        "mlx5_bond_0",
        card,
        "Ethernet",
        "100 Gb/sec (4X EDR)",
        gids=(
            (link_local, "IB/RoCE v1", "bond0"),
            (link_local, "RoCE v2", "bond0"),
            (mapped("10.7.0.3"), "IB/RoCE v1", "bond0"),
            (mapped("10.7.0.3"), "RoCE v2", "bond0"),
        ),
    )
    ethernet_card(tree)


def one_port_down(tree: Tree) -> None:
    ethernet_card(tree)
    for i, state in enumerate((ACTIVE, DOWN)):
        tree.rdma(f"mlx5_{i}", tree.pci(f"0000:0{i}:01.0", f"0000:{i}1:00.0"), state=state)


def ib_and_a_storage_card(tree: Tree) -> None:
    ethernet_card(tree)
    for i in range(2):
        tree.rdma(f"mlx5_{i}", tree.pci(f"0000:0{i}:01.0", f"0000:{i}1:00.0"))
    card = tree.pci("0000:08:01.0", "0000:81:00.0")
    tree.net("ens8", card, speed=100000)
    tree.rdma("mlx5_2", card, "Ethernet", "100 Gb/sec (4X EDR)", gids=((mapped("10.9.0.3"), "RoCE v2", "ens8"),))


def iwarp(tree: Tree) -> None:
    card = tree.pci("0000:00:03.0", "0000:31:00.0")
    tree.net("eth4", card, speed=40000)
    tree.rdma("cxgb4_0", card, "Ethernet", "40 Gb/sec (4X QDR)", node_type="4: RNIC")


def gid_unreadable(tree: Tree) -> None:
    """Create a container's view: no GID type is readable, but there is a device."""
    card = tree.pci("0000:00:02.0", "0000:21:00.0")
    tree.net("eth2", card, speed=100000)
    tree.rdma("mlx5_0", card, "Ethernet", "100 Gb/sec (4X EDR)", gids=((mapped("10.7.0.3"), "RoCE v2", "eth2"),))
    tree.refuse("class/infiniband/mlx5_0/ports/1/gid_attrs/types/0")
    ethernet_card(tree)


def some_gids_unreadable(tree: Tree) -> None:
    card = tree.pci("0000:00:02.0", "0000:21:00.0")
    tree.net("eth2", card, speed=100000)
    tree.rdma(
        "mlx5_0",
        card,
        "Ethernet",
        "100 Gb/sec (4X EDR)",
        gids=((mapped("10.7.0.2"), "RoCE v2", "eth2"), (mapped("10.7.0.3"), "RoCE v2", "eth2")),
    )
    tree.refuse("class/infiniband/mlx5_0/ports/1/gid_attrs/types/0")
    ethernet_card(tree)


def virtio_only(tree: Tree) -> None:
    tree.net("eth0", tree.pci("0000:00:03.0"), speed=-1, driver="virtio_net")


def speed_unknown(tree: Tree) -> None:
    ethernet_card(tree, "eno1", speed=-1, address="0000:00:1e.0")
    ethernet_card(tree, "eno2", speed=0, address="0000:00:1f.0")
    tree.refuse("class/net/eno2/speed")


def eight_rails(tree: Tree) -> None:
    ethernet_card(tree, speed=100000)
    for i in range(8):
        bridge = f"0000:{i}0:01.0"
        tree.rdma(f"mlx5_{i}", tree.pci(bridge, f"0000:{i}1:00.0"), rate="400 Gb/sec (4X NDR)")
        tree.gpu(bridge, f"0000:{i}2:00.0")


def converged_roce(tree: Tree) -> None:
    """Create a node whose RoCE NIC is its only Ethernet."""
    card = tree.pci("0000:00:02.0", "0000:21:00.0")
    tree.net("eth0", card, speed=100000)
    tree.rdma("mlx5_0", card, "Ethernet", "100 Gb/sec (4X EDR)", gids=((mapped("10.7.0.3"), "RoCE v2", "eth0"),))


def omnipath(tree: Tree) -> None:
    ethernet_card(tree)
    tree.rdma("hfi1_0", tree.pci("0000:01:01.0", "0000:11:00.0"), rate="100 Gb/sec (4X EDR)")
    tree.rdma("opap18s0", tree.pci("0000:01:02.0", "0000:12:00.0"), rate="100 Gb/sec (4X EDR)")  # by rdma-core's rules


def a_slow_cable(tree: Tree) -> None:
    """Create four HCAs, one at half its rate."""
    ethernet_card(tree)
    for i in range(4):
        rate = "100 Gb/sec (2X HDR)" if i == 2 else "200 Gb/sec (4X HDR)"
        tree.rdma(f"mlx5_{i}", tree.pci(f"0000:0{i}:01.0", f"0000:{i}1:00.0"), rate=rate)


def a_fast_bond_beside_a_slow_port(tree: Tree) -> None:
    """Create a 1 Gb/s management port, and a bond of two RoCE-capable ports as the node's network."""
    ethernet_card(tree, "eno1", 1000, "0000:00:1e.0")
    card, second_card = (tree.pci("0000:00:02.0", f"0000:21:00.{i}") for i in (0, 1))
    tree.net("bond0", bond=True, speed=200000)
    tree.net("ens1f0", card, speed=100000, master="bond0")
    tree.net("ens1f1", second_card, speed=100000, master="bond0")
    tree.rdma("mlx5_bond_0", card, "Ethernet", "100 Gb/sec (4X EDR)", gids=((mapped("10.1.0.3"), "RoCE v2", "bond0"),))


def a_vlan(tree: Tree) -> None:
    """Create a VLAN on the fast port; only the VLAN has the address and RoCE's GID."""
    ethernet_card(tree, "eno1", 1000, "0000:00:1e.0")
    card = tree.pci("0000:00:02.0", "0000:21:00.0")
    tree.net("ens1", card, speed=100000)
    tree.net("ens1.100", speed=100000)
    (tree.root / "devices/virtual/net/ens1.100/lower_ens1").symlink_to(tree.root / "class/net/ens1")
    tree.rdma("mlx5_0", card, "Ethernet", "100 Gb/sec (4X EDR)", gids=((mapped("10.7.0.3"), "RoCE v2", "ens1.100"),))


def a_vlan_on_a_bond(tree: Tree) -> None:
    """Create a node without RDMA, with a VLAN of unknown speed on a bond."""
    ethernet_card(tree, "eno1", 1000, "0000:00:1e.0")
    tree.net("bond0", bond=True, speed=50000)
    for i in (0, 1):
        tree.net(f"ens1f{i}", tree.pci("0000:00:02.0", f"0000:21:00.{i}"), speed=25000, master="bond0")
    tree.net("bond0.100", speed=-1)
    (tree.root / "devices/virtual/net/bond0.100/lower_bond0").symlink_to(tree.root / "class/net/bond0")


def virtual_functions(tree: Tree) -> None:
    """Create an IB card with two virtual functions that the host shows, too."""
    ethernet_card(tree)
    card = tree.pci("0000:01:01.0", "0000:11:00.0")
    tree.rdma("mlx5_0", card)
    tree.net("ib0", card, kind="32", driver="mlx5_core")
    for i in (1, 2):
        function = tree.pci("0000:01:01.0", f"0000:11:00.{i}")
        tree.link(function / "physfn", card)
        tree.rdma(f"mlx5_{i}", function)


def a_virtual_function_alone(tree: Tree) -> None:
    """Create a virtual machine's card: a virtual function without its physical function."""
    ethernet_card(tree)
    function = tree.pci("0000:00:06.0")
    (function / "physfn").symlink_to("../0000:11:00.0")
    tree.rdma("mlx5_0", function)


def a_dual_port_card(tree: Tree) -> None:
    """Create one device with two ports, and a card with a device per port.

    One of the card's ports has no cable."""
    ethernet_card(tree)
    card = tree.pci("0000:01:01.0", "0000:11:00.0")
    for port in (1, 2):
        tree.rdma("mlx4_0", card, rate="56 Gb/sec (4X FDR)", port=port)
    for i, state in enumerate((ACTIVE, DOWN)):
        tree.rdma(f"mlx5_{i}", tree.pci("0000:02:01.0", f"0000:21:00.{i}"), rate="56 Gb/sec (4X FDR)", state=state)


def eight_hcas_and_two_for_storage(tree: Tree) -> None:
    """Create ten equal ports: mlx5_8 is for storage by subnet prefix, mlx5_9 by address."""
    ethernet_card(tree, speed=100000)
    for i in range(10):
        card = tree.pci(f"0000:{i}0:01.0", f"0000:{i}1:00.0")
        prefix = "fec0:0000:0000:0001" if i == 8 else "fe80:0000:0000:0000"
        tree.rdma(f"mlx5_{i}", card, rate="400 Gb/sec (4X NDR)", gids=((f"{prefix}:0002:c903:0000:000{i}", "IB", ""),))
        tree.net(f"ib{i}", card, kind="32")


def rails_and_a_frontend(tree: Tree) -> None:
    """Create four RoCE rails, and an Ethernet card for other traffic."""
    ethernet_card(tree, speed=100000)
    for i in range(4):
        card = tree.pci(f"0000:{i}0:01.0", f"0000:{i}1:00.0")
        tree.net(f"rail{i}", card, speed=400000)
        gid = (mapped(f"10.7.{i}.3"), "RoCE v2", f"rail{i}")
        tree.rdma(f"mlx5_{i}", card, "Ethernet", "400 Gb/sec (4X NDR)", gids=(gid,))


def a_container(tree: Tree) -> None:
    """Create a container without /sys/class/infiniband."""
    ethernet_card(tree)
    (tree.root / "class/infiniband").rmdir()


ALL: dict[str, Callable[[Tree], None]] = {
    f.__name__: f
    for f in (
        hdr_4_hcas,
        roce_on_a_bond,
        one_port_down,
        ib_and_a_storage_card,
        iwarp,
        gid_unreadable,
        some_gids_unreadable,
        virtio_only,
        speed_unknown,
        eight_rails,
        converged_roce,
        omnipath,
        a_slow_cable,
        a_fast_bond_beside_a_slow_port,
        a_vlan,
        a_vlan_on_a_bond,
        virtual_functions,
        a_virtual_function_alone,
        a_dual_port_card,
        eight_hcas_and_two_for_storage,
        rails_and_a_frontend,
        a_container,
    )
}
