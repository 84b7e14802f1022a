"""Network namespaces, bridges and shaped NICs.

Each node has a network namespace. One more namespace, the switch, has all bridges, so that the machine itself gets only
one new interface, to the management bridge. Every NIC is a veth pair from a node to a bridge in the switch::

    node ib1:    mgmt0 --- ib1-mgmt0 (br-mgmt) --- the machine, where slurmctld listens
                 eth0  --- ib1-eth0  (br-eth)      shaped at both ends
                 ib0   --- ib1-ib0   (br-fabric0)  shaped at both ends
"""

import contextlib
import ipaddress
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holmes_hpc.errors import TestbedError
from holmes_hpc.ports import free_port
from holmes_hpc.testbed.commands import run, succeeds
from holmes_hpc.testbed.topology import NodeSpec, Topology

RUN_NETNS = Path("/run/netns")
SHARED = Path("/run")  # locked while a testbed chooses names and a subnet, never written
MTU = 1500
FIRST_HOST = 11  # the last octet of a node's addresses is this plus the node's index; the machine has .1
# Segmentation offload (GSO) passes packets in bundles of up to 16 kB, at a fraction of the CPU time of single packets.
# The token bucket counts the bytes on the wire. It must hold one bundle with its headers; otherwise it would split the
# bundle. A bucket for larger bundles would let small messages pass unshaped, so bundles are small on a slow NIC.
GSO_BYTES = 16_384  # the largest bundle of a fast NIC
GSO_S = 0.003  # time in which a slow NIC sends a bundle
BUCKET_PER_GSO = 1.22  # size of the token bucket, divided by the payload of a bundle
BURST_S = 0.001  # minimum size of the token bucket, as time at the NIC's rate
QUEUE_S = 0.05  # size of the queue, as time at the NIC's rate


@dataclass(frozen=True)
class NicSpec:
    """A NIC, a veth pair. `name`, `port`: its ends in the node and the switch; `mbit`: Mbit/s, None if unshaped."""

    name: str
    port: str
    bridge: str
    address: str  # with prefix length
    mbit: float | None


@dataclass(frozen=True)
class Wiring:
    """The names and addresses of a testbed's network. They follow from the topology, `prefix` and `subnet` (a /16)."""

    topology: Topology
    prefix: str
    subnet: str

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    @property
    def uplink(self) -> str:
        """The machine's interface to the management bridge."""
        return self.prefix

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *(self.namespace(node.name) for node in self.topology.nodes))

    def namespace(self, node: str) -> str:
        return f"{self.prefix}-{node}"

    def _address(self, network: int, host: int) -> str:
        base = ipaddress.ip_network(self.subnet).network_address
        return str(base + 256 * network + host)

    @property
    def gateway(self) -> str:
        """The machine's address on the management bridge."""
        return self._address(0, 1)

    def management(self, node: NodeSpec) -> str:
        return self._address(0, FIRST_HOST + node.index)

    def ethernet(self, node: NodeSpec) -> str:
        return self._address(1, FIRST_HOST + node.index)

    @property
    def bridges(self) -> tuple[str, ...]:
        fabrics = [f"br-fabric{i}" for i, f in enumerate(self.topology.fabrics) if f.interface]
        return ("br-mgmt", "br-eth", *fabrics)

    def nics(self, node: NodeSpec) -> tuple[NicSpec, ...]:
        """Return the node's NICs, the management NIC first."""

        def nic(name: str, bridge: str, address: str, mbit: float | None) -> NicSpec:
            return NicSpec(name, f"{node.name}-{name}", bridge, f"{address}/24", mbit)

        fabric, address = node.fabric, self._address(2 + node.fabric_index, FIRST_HOST + node.index)
        management = nic("mgmt0", "br-mgmt", self.management(node), None)
        ethernet = nic("eth0", "br-eth", self.ethernet(node), self.topology.ethernet_mbit)
        if not fabric.interface:
            return management, ethernet
        return management, ethernet, nic(fabric.interface, f"br-fabric{node.fabric_index}", address, fabric.rdma_mbit)

    def hosts(self) -> str:
        """Return the text of the nodes' /etc/hosts. A node's name resolves to its Ethernet address, as at most sites.
        Traffic to a host name is therefore shaped and counted as Ethernet traffic."""
        lines = [f"{self.ethernet(node)} {node.name}" for node in self.topology.nodes]
        return "\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost", *lines, ""])


def gso_bytes(mbit: float | None) -> int:
    """Return the size of the largest GSO bundle for a NIC: what it sends in 3 ms, but two packets to 16 kB."""
    return GSO_BYTES if mbit is None else min(GSO_BYTES, max(2 * MTU, int(mbit * 1e6 / 8 * GSO_S)))


def tbf_line(device: str, mbit: float) -> str:
    """Return the line of ``tc -batch`` that limits `device` to `mbit` by a token bucket. The bucket holds the traffic
    of 1 ms, but at least one GSO bundle. The queue holds the traffic of 50 ms or more."""
    bytes_per_s = mbit * 1e6 / 8
    burst = max(int(BUCKET_PER_GSO * gso_bytes(mbit)), int(bytes_per_s * BURST_S))
    limit = burst + max(4 * GSO_BYTES, int(bytes_per_s * QUEUE_S))
    return f"qdisc replace dev {device} root tbf rate {int(mbit * 1e6)}bit burst {burst} limit {limit}"


def free_subnet(prefix: str) -> str:
    """Return a /16 that overlaps no address or route of this machine. Different prefixes start the search at different
    networks. Raise TestbedError if every private /16 is in use."""
    used_networks = list(_networks_in_use())
    candidates = [f"10.{n}.0.0/16" for n in range(64, 255)] + [f"172.{n}.0.0/16" for n in range(16, 32)]
    start = int(prefix[-4:], 16) % 191  # of the 191 networks in 10.0.0.0/8
    for text in candidates[start:191] + candidates[:start] + candidates[191:] + ["198.18.0.0/16", "198.19.0.0/16"]:
        if not any(ipaddress.ip_network(text).overlaps(used) for used in used_networks):
            return text
    raise TestbedError("every private /16 is in use", where="ip route", hint="free one, e.g. leave the VPN")


def free_ports(subnet: str) -> Iterator[int]:
    """Yield free TCP ports below the ephemeral range. The first one depends on the subnet, so that testbeds do not
    collide. Raise TestbedError if none is left."""
    start = ipaddress.ip_network(subnet).network_address.packed[1] * 40
    ports = iter([*range(20001 + start, 32001), *range(20000, 20001 + start)])
    while (port := free_port(ports, "0.0.0.0")) is not None:
        yield port
    problem = "no TCP port between 20000 and 32000 is free"
    raise TestbedError(problem, where="testbed", hint="end the processes that use them")


def _networks_in_use() -> Iterator[ipaddress.IPv4Network]:
    for row in json.loads(run(["ip", "-4", "-j", "route", "show", "table", "all"]) or "[]"):
        if row.get("dst") not in (None, "default"):
            yield ipaddress.IPv4Network(row["dst"], strict=False)
    for row in json.loads(run(["ip", "-4", "-j", "addr"]) or "[]"):
        for address in row.get("addr_info", []):
            yield ipaddress.IPv4Network(f"{address['local']}/{address['prefixlen']}", strict=False)


def names_in_use() -> list[str]:
    """Return the names of this machine's namespaces and interfaces."""
    links = [str(row["ifname"]) for row in json.loads(run(["ip", "-j", "link"]) or "[]")]
    return links + ([path.name for path in RUN_NETNS.iterdir()] if RUN_NETNS.is_dir() else [])


_REFUSED = "run on a machine, or in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN, that allows network namespaces"
_NO_TBF = "this kernel lacks the token bucket (sch_tbf); run on one that has it"
_NO_BRIDGE = "this kernel lacks bridges; run on one that has them"


def _batch(tool: str, namespace: str | None, lines: Iterable[str], hint: str = "") -> None:
    """Run `lines` with ``ip -batch`` or ``tc -batch`` (`tool`). `hint`: for errors other than a missing permission."""
    namespace_options = ["-n", namespace] if namespace else []
    try:
        run([tool, *namespace_options, "-batch", "-"], stdin="\n".join(lines) + "\n")
    except TestbedError as error:
        is_refused = "permitted" in error.what or not hint
        raise TestbedError(error.what, where=error.where, hint=_REFUSED if is_refused else hint) from None


def _set_sysctls(namespace: str, values: dict[str, str]) -> None:
    """Set sysctls (path below /proc/sys -> value) in a namespace. Skip those that this kernel lacks."""
    script = 'while [ $# -gt 0 ]; do if [ -w "/proc/sys/$1" ]; then echo "$2" > "/proc/sys/$1"; fi; shift 2; done'
    arguments = [argument for pair in values.items() for argument in pair]
    run(["ip", "netns", "exec", namespace, "sh", "-c", script, "sh", *arguments])


# IPv6 neighbour discovery would count as traffic of the data NICs. TCP must not use slow start after a pause for
# emulated compute, nor cached metrics of earlier connections. BBR is the default on some machines, but it pauses for
# 0.2 s every 10 s to probe the network.
_NODE_SYSCTLS = {
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_congestion_control": "reno",
}


def create(wiring: Wiring) -> None:
    """Create all namespaces, bridges and NICs. The caller has already recorded their names.
    Raise TestbedError if the kernel or the container does not allow it."""
    _batch("ip", None, (f"netns add {name}" for name in wiring.namespaces))
    _set_sysctls(wiring.switch, {"net/ipv6/conf/default/disable_ipv6": "1"})
    settings = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
    _batch("ip", wiring.switch, (f"link add {bridge} {settings}" for bridge in wiring.bridges), _NO_BRIDGE)
    uplink = wiring.uplink
    add_uplink = f"link add {uplink} type veth peer name uplink netns {wiring.switch}"
    _batch("ip", None, [add_uplink, f"addr add {wiring.gateway}/24 dev {uplink}", f"link set {uplink} up"])
    bridges_up = [f"link set {bridge} up" for bridge in wiring.bridges]
    _batch("ip", wiring.switch, ["link set lo up", "link set uplink master br-mgmt up", *bridges_up])
    for node in wiring.topology.nodes:
        _create_node(wiring, node)
    ports = [nic for node in wiring.topology.nodes for nic in wiring.nics(node) if nic.mbit is not None]
    _batch("tc", wiring.switch, (tbf_line(nic.port, nic.mbit) for nic in ports if nic.mbit is not None), _NO_TBF)


def _create_node(wiring: Wiring, node: NodeSpec) -> None:
    namespace = wiring.namespace(node.name)
    nics = wiring.nics(node)
    _set_sysctls(namespace, _NODE_SYSCTLS)
    lines = ["link set lo up"]
    for nic in nics:
        lines.append(f"link add {nic.name} mtu {MTU} type veth peer name {nic.port} mtu {MTU} netns {wiring.switch}")
        lines.append(f"addr add {nic.address} dev {nic.name}")
        lines.append(f"link set {nic.name} gso_max_size {gso_bytes(nic.mbit)} up")
    _batch("ip", namespace, lines)
    ports = (f"link set {nic.port} gso_max_size {gso_bytes(nic.mbit)} master {nic.bridge} up" for nic in nics)
    _batch("ip", wiring.switch, ports)
    _batch("tc", namespace, (tbf_line(nic.name, nic.mbit) for nic in nics if nic.mbit is not None), _NO_TBF)


def is_complete(wiring: Wiring) -> bool:
    """Return whether all namespaces and the uplink still exist. A reboot removes them."""
    return {*wiring.namespaces, wiring.uplink} <= set(names_in_use())


def netns_folder_state() -> str:
    """Return the state of /run/netns: ``absent``, ``plain`` (a directory) or ``mounted`` (by `ip`, on itself)."""
    if not RUN_NETNS.is_dir():
        return "absent"
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return "mounted" if any(line.split()[4] == str(RUN_NETNS) for line in mounts) else "plain"


def remove(namespaces: Iterable[str], uplink: str, run_netns: str) -> None:
    """Delete the namespaces, with their bridges and NICs, and the uplink, if they exist. `run_netns`:
    :func:`netns_folder_state` before `create`, which is restored if /run/netns has no other namespaces."""
    for name in namespaces:
        if (RUN_NETNS / name).exists():
            run(["ip", "netns", "del", name])
    succeeds(["ip", "link", "del", uplink])
    if run_netns != "mounted" and netns_folder_state() == "mounted" and not os.listdir(RUN_NETNS):
        succeeds(["umount", "--lazy", str(RUN_NETNS)])
        if run_netns == "absent":
            RUN_NETNS.rmdir()


def inodes(namespaces: Iterable[str]) -> dict[int, str]:
    """Return {inode: name} of those namespaces that exist. /proc/PID/ns/net of their processes has the same inode."""
    names = {}
    for name in namespaces:
        with contextlib.suppress(OSError):
            names[(RUN_NETNS / name).stat().st_ino] = name
    return names
