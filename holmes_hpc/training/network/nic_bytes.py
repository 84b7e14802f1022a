"""Byte counters of this node's NICs and of this process's TCP connections, read once per step."""

import contextlib
import os
import socket
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from holmes_hpc.fabric.nics import NodeNics, candidates, role_of
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import to_json
from holmes_hpc.records.line_file import LineFile
from holmes_hpc.training.rank.launch import Launch

SAMPLE_BYTES = 1 << 20
Rows = NDArray[np.float64]  # numbers of every rank in a step, (ranks, columns)
Counters = dict[str, tuple[int, int]]  # NIC -> bytes (sent, received)
# port_xmit_data and port_rcv_data count 4-byte words (kernel: Documentation/ABI/stable/sysfs-class-infiniband)
WORD_BYTES = 4
_TCP_INFO_BYTES = 192
_BYTES_ACKED, _BUSY_US = 120, 168  # offsets in struct tcp_info of linux/tcp.h, from Linux 4.1 and 4.10 on


class Connection(NamedTuple):
    """The addresses and send counters of a TCP connection. `bytes`: the bytes that the peer has acknowledged; `busy_s`:
    the seconds in which sent data was underway, without the time in which the receiver accepted no data."""

    local: str
    remote: str
    bytes: int
    busy_s: float


def read_counters(sysfs: Path = Path("/sys")) -> Counters:
    """Return the counters of all NICs since boot: interface, or ``device:port`` of RDMA -> bytes (sent, received).

    NICs that cannot be read are omitted. Interfaces count the kernel's traffic. RDMA ports count RDMA traffic and the
    traffic of IPoIB, which the IPoIB interface counts too.
    """
    counters: Counters = {}
    for interface in (sysfs / "class/net").glob("*/statistics"):
        with contextlib.suppress(OSError, ValueError):
            counters[interface.parent.name] = _number(interface / "tx_bytes"), _number(interface / "rx_bytes")
    for port in (sysfs / "class/infiniband").glob("*/ports/*/counters"):
        with contextlib.suppress(OSError, ValueError):
            tx, rx = _number(port / "port_xmit_data"), _number(port / "port_rcv_data")
            counters[f"{port.parents[2].name}:{port.parent.name}"] = (tx * WORD_BYTES, rx * WORD_BYTES)
    return counters


def counter_difference(old: Mapping[str, tuple[int, int]], new: Mapping[str, tuple[int, int]]) -> Counters:
    """Return the bytes between two readings, for NICs in both. A counter that decreased (NIC reset) counts from 0."""

    def increase(old_bytes: int, new_bytes: int) -> int:
        return new_bytes - old_bytes if new_bytes >= old_bytes else new_bytes

    names = old.keys() & new.keys()
    return {n: (increase(old[n][0], new[n][0]), increase(old[n][1], new[n][1])) for n in names}


def bytes_by_kind(counters: Mapping[str, tuple[int, int]], nics: NodeNics) -> dict[str, tuple[int, int]]:
    """Return the sums of `counters`: kind (``ib``, ``roce``, ``ethernet`` or ``other``) -> bytes (sent, received).

    ``other``: NICs for management, containers and storage (RDMA ports that NCCL does not use). No byte is counted
    twice: IPoIB interfaces are omitted if the IB ports have counters, and members of a bond are always omitted.
    """
    ports = [p for p in nics.ports if p.kind in ("ib", "roce")]
    compute = {p.name for nic in (NicType.IB, NicType.ROCE) for p in nics.compute_ports(nic)}
    compute_interfaces = {p.interface for p in ports if p.name in compute}
    storage = {n.name for n in nics.interfaces if n.type is NicType.ROCE and ports and n.name not in compute_interfaces}
    has_ib_counters = any(p.kind == "ib" and p.name in counters for p in ports)
    kinds = {
        nic.name: str(nic.type) if nic.role == "data" and nic.name not in storage else "other"
        for nic in nics.interfaces
        if nic.name != "lo" and nic.member_of is None and not (nic.type is NicType.IB and has_ib_counters)
    }
    # Sockets may use a RoCE NIC or a management port, whose bytes then count as Ethernet's. The exception is a RoCE NIC
    # whose port has no counters: its bytes may include RDMA's.
    best = candidates(nics, NicType.ETHERNET)
    has_port_counters = any(p.name in counters for p in ports)
    if best and (kinds.get(best[0].name) == "other" or has_port_counters or nics.sockets is not None):
        kinds[best[0].name] = "ethernet"
    kinds.update({p.name: p.kind if p.name in compute else "other" for p in ports})
    counted = grouped((kind, counters[name]) for name, kind in kinds.items() if name in counters)
    return {kind: (sum(tx for tx, _ in pairs), sum(rx for _, rx in pairs)) for kind, pairs in counted}


def _number(path: Path) -> int:
    return int(path.read_bytes())


def _connections() -> dict[int, Connection]:
    """Return the TCP connections of this process by their inodes, with their counters since they were opened."""
    connections: dict[int, Connection] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # just closed, not connected, or not TCP
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    tcp_info = tcp_info.ljust(_TCP_INFO_BYTES, b"\0")  # older kernels return fewer fields
                    busy_us, receiver_full_us = struct.unpack_from("=2Q", tcp_info, _BUSY_US)
                    connections[status.st_ino] = Connection(
                        str(connection.getsockname()[0]).removeprefix("::ffff:"),
                        str(connection.getpeername()[0]).removeprefix("::ffff:"),
                        struct.unpack_from("=Q", tcp_info, _BYTES_ACKED)[0],
                        (busy_us - receiver_full_us) / 1e6,
                    )
    return connections


class Traffic:
    """The traffic counters of a rank and its node. The last :meth:`take` sets `by_nic`, the bytes on each NIC of the
    node, and `connections`, the counters of this rank's TCP connections.

    Only the first rank of a node counts NICs, so that a sum over ranks is a sum over nodes. On other ranks, the counts
    of NICs are zero. If all ranks share one host, all counts are zero.
    """

    def __init__(self, plan: Plan, launch: Launch, nics: NodeNics) -> None:
        self._nics, self._nic = nics, plan.site.pool(plan.places[launch.rank].pool).nic
        self.counts_nics, self.one_host = launch.local_rank == 0 and not launch.one_host, launch.one_host
        self._last = read_counters() if self.counts_nics else {}
        self._tcp = {} if launch.one_host else _connections()
        self.by_nic: Counters = {}
        self.connections: list[Connection] = []

    def take(self) -> tuple[float, ...]:
        """Return seven byte counts since the last call: Ethernet sent and received; RDMA sent and received; sent over
        NICs outside the plan; sent by this rank's own TCP connections from addresses of Ethernet NICs, of RDMA NICs."""
        previous, self._tcp = self._tcp, {} if self.one_host else _connections()
        self.connections = [
            c._replace(bytes=c.bytes - old.bytes, busy_s=c.busy_s - old.busy_s)
            for inode, c in self._tcp.items()
            for old in (previous.get(inode, Connection("", "", 0, 0.0)),)
        ]
        sent: defaultdict[str | None, int] = defaultdict(int)
        for connection in self.connections:
            sent[connection.local] += connection.bytes
        tcp = self._sums({nic.name: (sent[nic.address], 0) for nic in self._nics.interfaces if nic.address in sent})
        if self.counts_nics:
            counters = read_counters()
            self.by_nic, self._last = counter_difference(self._last, counters), counters
        return (*self._sums(self.by_nic), tcp[0], tcp[2])

    def sent_to(self, addresses: Collection[str]) -> tuple[float, float]:
        """Return the bytes that this rank's TCP connections to `addresses` sent between the last two calls of
        :meth:`take`, and the seconds in which the busiest connection sent."""
        connections = [c for c in self.connections if c.remote in addresses]
        return float(sum(c.bytes for c in connections)), max((c.busy_s for c in connections), default=0.0)

    def _sums(self, counters: Counters) -> tuple[float, float, float, float, float]:
        """Return five byte counts: Ethernet sent and received, RDMA sent and received, sent over other NICs."""
        kinds = bytes_by_kind(counters, self._nics)
        ethernet, rdma = kinds.pop("ethernet", (0, 0)), kinds.pop(str(self._nic), (0, 0))
        unplanned = sum(sent for sent, _ in kinds.values())
        return float(ethernet[0]), float(ethernet[1]), float(rdma[0]), float(rdma[1]), float(unplanned)


class NicLog:
    """The file ``nics/NODE.jsonl`` of the run: the bytes of every NIC of this node, one line per step.

    The node's first rank writes the lines at most once a second, so that a shared file system gets few small writes.
    """

    def __init__(self, folder: Path, node: str, attempt: int) -> None:
        self._file, self._node, self._attempt = LineFile(folder / f"{node}.jsonl"), node, attempt
        self._folder, self._lines = folder, list[str]()
        self._last_write = 0.0

    def add(self, step: int, counted: Counters) -> None:
        """Add a line with one step's bytes of each NIC. Idle and virtual NICs are omitted."""
        nics = {
            name: {"tx": tx, "rx": rx}
            for name, (tx, rx) in sorted(counted.items())
            if (tx or rx) and role_of(name) != "virtual"
        }
        if nics:
            self._lines.append(to_json({"step": step, "attempt": self._attempt, "node": self._node, "nics": nics}))
        if time.monotonic() - self._last_write > 1:
            self.write()

    def write(self) -> None:
        """Write the collected lines, or keep them while the disk is full. Raise RunFailed as a LineFile does."""
        if self._lines:
            with contextlib.suppress(OSError):  # the file's error is reported
                self._folder.mkdir(exist_ok=True)
            self._file.append(*self._lines)
        self._lines, self._last_write = [], time.monotonic()

    def finish(self) -> None:
        """Write all lines, as soon as the disk has space."""
        self.write()
        self._file.finish()


def sum_by_kind(plan: Plan, rows: Rows) -> dict[str, dict[str, int]]:
    """Return {fabric or ``ethernet``: {tx, rx}}, bytes of all nodes. `rows`: of :meth:`Traffic.take`, every rank's."""
    total: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"tx": 0, "rx": 0})
    ends = list(accumulate(c.ranks for c in plan.components))
    for component, ranks in zip(plan.components, np.split(rows, ends[:-1]), strict=True):
        tx, rx, rdma_tx, rdma_rx = map(int, ranks[:, :4].sum(axis=0))
        fabric = plan.site.pool(component.pool).fabric_name
        for kind, sent, received in (("ethernet", tx, rx), (fabric, rdma_tx, rdma_rx)):
            if sent or received:
                total[kind]["tx"] += sent
                total[kind]["rx"] += received
    return dict(total)


def sample_pairs(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return for each network of the plan, a fabric name or ``ethernet``, two ranks on different nodes of it."""
    pairs: dict[str, tuple[int, int]] = {}
    for group in plan.transports():
        if group.kind in ("edge", "dp", "intra_dp", "inter_dp") and group.transport.kind != "local":
            kind, sender = group.transport.fabric if group.transport.kind == "rdma" else "ethernet", group.ranks[0]
            # Within a group over Ethernet, ranks of one fabric have a faster network.
            receivers = [r for r in group.ranks if plan.transport_of((sender, r)) == group.transport]
            if receivers:
                pairs.setdefault(str(kind), (sender, receivers[0]))
    return pairs


def header_factors(
    plan: Plan, rank: int, traffic: Traffic, new_group: Any, gather: Any, cuda: bool = False
) -> dict[str, float]:
    """Return fabric name or ``ethernet`` -> bytes on the wire (with headers and acknowledgements) per byte of payload.

    For each network, a known amount of data is sent between two nodes. All ranks call this function.
    `new_group(ranks, kind)`: creates the process group of the two ranks; `gather(row)`: synchronizes the ranks and
    returns the rows of all ranks on each rank.

    With `cuda`, fabrics have the factor 1, because a sample over TCP cannot measure RDMA. RDMA ports count some 60
    bytes of headers with each packet of 1 to 4 KiB, which is well within the audit's tolerance.
    """
    factors: dict[str, float] = {}
    for kind, ranks in ({} if traffic.one_host else sample_pairs(plan)).items():
        if cuda and kind != "ethernet":
            factors[kind] = 1.0
            continue
        group = new_group(ranks, f"sample {kind}")
        data = torch.zeros(SAMPLE_BYTES // 4)
        _send(ranks, rank, group, data[:16])  # connects the two ranks
        gather(traffic.take())
        traffic.take()  # drops the bytes of the connection and of the gather
        _send(ranks, rank, group, data)
        total = sum_by_kind(plan, gather(traffic.take())).get(kind, {"tx": 0})["tx"]
        if total:
            factors[kind] = total / SAMPLE_BYTES
    return factors


def _send(ranks: tuple[int, int], rank: int, group: Any, data: torch.Tensor) -> None:
    """Send `data` from the first rank to the second, and one number back, so that both know that it has arrived."""
    if rank in ranks:
        dist.broadcast(data, ranks[0], group=group)
        dist.broadcast(torch.zeros(1), ranks[1], group=group)
