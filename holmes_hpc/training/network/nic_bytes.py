"""Byte counters of this node's NICs and of this process's TCP connections, and what a run makes of them.

One rank of each node counts, per NIC kind, between two moments.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.fabric.nics import NodeNics, candidates, role_of
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.files import append_line, to_json
from holmes_hpc.training.rank.launch import Launch

SAMPLE_BYTES = 1 << 20
Counters = dict[str, tuple[int, int]]
# port_xmit_data and port_rcv_data count 4-byte words (kernel: Documentation/ABI/stable/sysfs-class-infiniband)
WORD_BYTES = 4
_TCP_INFO_BYTES = 128
_BYTES_ACKED = 120  # its place in struct tcp_info of linux/tcp.h, from Linux 4.1 on


def read_counters(sysfs: Path = Path("/sys")) -> Counters:
    """Return bytes sent and received since boot: interface name, or ``device:port`` of an RDMA port -> (tx, rx).

    A NIC that vanished or cannot be read is left out. RDMA ports count RDMA traffic (and IPoIB, which its interface
    counts too); interfaces count what the kernel sends.
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


def difference(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Counters:
    """Return the bytes between two readings, for NICs in both. A counter that went back (a NIC was reset) counts from
    zero."""

    def since(old: int, new: int) -> int:
        return new - old if new >= old else new

    names = before.keys() & after.keys()
    return {n: (since(before[n][0], after[n][0]), since(before[n][1], after[n][1])) for n in names}


def by_kind(counters: Mapping[str, tuple[int, int]], nics: NodeNics) -> dict[str, tuple[int, int]]:
    """Sum counters into ``ib``, ``roce``, ``ethernet`` and ``other`` (management, containers, storage: RDMA ports that
    NCCL is not given).

    Nothing is counted twice: IPoIB is left to its port where ports are counted, members of a bond to the bond.
    """
    ports = [p for p in nics.ports if p.kind in ("ib", "roce")]
    compute = {p.name for nic in (NicType.IB, NicType.ROCE) for p in nics.compute_ports(nic)}
    owners = {p.interface for p in ports if p.name in compute}
    storage = {n.name for n in nics.interfaces if n.type is NicType.ROCE and ports and n.name not in owners}
    ib_ports_count = any(p.kind == "ib" and p.name in counters for p in ports)
    kinds = {
        nic.name: str(nic.type) if nic.role == "data" and nic.name not in storage else "other"
        for nic in nics.interfaces
        if nic.name != "lo" and nic.member_of is None and not (nic.type is NicType.IB and ib_ports_count)
    }
    best = candidates(nics, NicType.ETHERNET)  # sockets may go over a RoCE NIC, or a management port
    if best and (
        kinds.get(best[0].name) == "other" or any(p.name in counters for p in ports) or nics.sockets is not None
    ):
        kinds[best[0].name] = "ethernet"  # a RoCE port counts RDMA, its interface what the kernel sends
    kinds.update({p.name: p.kind if p.name in compute else "other" for p in ports})
    counted = [(kind, *counters[name]) for name, kind in kinds.items() if name in counters]
    return {
        kind: (sum(tx for k, tx, _ in counted if k == kind), sum(rx for k, _, rx in counted if k == kind))
        for kind, _, _ in counted
    }


def _number(path: Path) -> int:
    return int(path.read_bytes())


class OwnSockets:
    """`take`: local address -> bytes sent from it, and acknowledged, since the last call."""

    def __init__(self) -> None:
        self._last = _sent()

    def take(self) -> dict[str, int]:
        before, self._last = self._last, _sent()
        found: dict[str, int] = {}
        for inode, (address, sent) in self._last.items():
            found[address] = found.get(address, 0) + sent - before.get(inode, ("", 0))[1]
        return found


def _sent() -> dict[int, tuple[str, int]]:
    """Return inode of each TCP connection of this process -> (local address, bytes that the other side has
    acknowledged)."""
    found: dict[int, tuple[str, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, not connected, or not TCP
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as own:
                    tcp_info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    address = str(own.getsockname()[0]).removeprefix("::ffff:")
                    found[status.st_ino] = address, struct.unpack_from("=Q", tcp_info, _BYTES_ACKED)[0]
    return found


class Traffic:
    """Counters of this node. On every rank but the first of a node, and where all ranks share one host, NICs are not
    counted (zeros), so that sums over ranks are sums over nodes. `by_nic`: what the last call of `take` found."""

    def __init__(self, plan: Plan, launch: Launch, nics: NodeNics) -> None:
        self._nics, self._nic = nics, plan.site.fabric(plan.places[launch.rank].fabric).nic
        self.counts, self.one_host = launch.local_rank == 0 and not launch.one_host, launch.one_host
        self._last = read_counters() if self.counts else {}
        self._own = None if launch.one_host else OwnSockets()
        self.by_nic: Counters = {}

    def take(self) -> tuple[float, ...]:
        """Return bytes since the last call: Ethernet sent and received, RDMA sent and received; sent over NICs that the
        plan does not use; sent by this rank's own TCP connections over Ethernet and over RDMA NICs."""
        sent = {} if self._own is None else self._own.take()
        own = self._kinds({nic.name: (sent[nic.address], 0) for nic in self._nics.interfaces if nic.address in sent})
        if self.counts:
            now = read_counters()
            self.by_nic, self._last = difference(self._last, now), now
        return (*self._kinds(self.by_nic), own[0], own[2])

    def _kinds(self, counted: Counters) -> tuple[float, float, float, float, float]:
        """Return the bytes over Ethernet sent and received, over RDMA sent and received, over others sent."""
        kinds = by_kind(counted, self._nics)
        ethernet, rdma = kinds.pop("ethernet", (0, 0)), kinds.pop(str(self._nic), (0, 0))
        other = sum(sent for sent, _ in kinds.values())
        return float(ethernet[0]), float(ethernet[1]), float(rdma[0]), float(rdma[1]), float(other)


class NicLog:
    """``nics/NODE.jsonl`` of the run: what every NIC of this node carried, a line a step, by the node's first rank.

    Lines are written together, once a second at most: a shared file system has one small write a second and node.
    """

    def __init__(self, folder: Path, node: str, attempt: int) -> None:
        self._path, self._node, self._attempt = folder / f"{node}.jsonl", node, attempt
        self._lines: list[str] = []
        self._wrote = 0.0

    def add(self, step: int, counted: Counters) -> None:
        """Add one step's bytes of each NIC; those that carried nothing, and virtual ones, are left out."""
        nics = {
            name: {"tx": tx, "rx": rx}
            for name, (tx, rx) in sorted(counted.items())
            if (tx or rx) and role_of(name) != "virtual"
        }
        if nics:
            self._lines.append(to_json({"step": step, "attempt": self._attempt, "node": self._node, "nics": nics}))
        if time.monotonic() - self._wrote > 1:
            self.write()

    def write(self) -> None:
        """Write what was held back. RunFailed when the disk is full."""
        if self._lines:
            with contextlib.suppress(OSError):  # append_line says what is wrong
                self._path.parent.mkdir(exist_ok=True)
            append_line(self._path, "\n".join(self._lines))
        self._lines, self._wrote = [], time.monotonic()


def sum_by_kind(plan: Plan, rows: Any) -> dict[str, dict[str, int]]:
    """Return every rank's :meth:`Traffic.take` as sums over nodes: fabric name or ``ethernet`` -> {tx, rx}."""
    total: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"tx": 0, "rx": 0})
    for rank, (tx, rx, rdma_tx, rdma_rx, *_) in enumerate(rows):
        for kind, sent, received in (("ethernet", tx, rx), (plan.places[rank].fabric, rdma_tx, rdma_rx)):
            if sent or received:
                total[kind]["tx"] += int(sent)
                total[kind]["rx"] += int(received)
    return dict(total)


def sample_pairs(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return, for every NIC kind of the plan, two ranks on different nodes whose group uses it: the ends of a
    sample."""
    pairs: dict[str, tuple[int, int]] = {}
    for group in plan.transports():
        if group.kind in ("edge", "dp", "intra_dp", "inter_dp") and group.transport.kind != "local":
            kind = group.transport.fabric if group.transport.kind == "rdma" else "ethernet"
            other = next(r for r in group.ranks if plan.places[r] != plan.places[group.ranks[0]])
            pairs.setdefault(str(kind), (group.ranks[0], other))
    return pairs


def header_factors(
    plan: Plan, rank: int, traffic: Traffic, new_group: Any, gather: Any, cuda: bool = False
) -> dict[str, float]:
    """Bytes on the wire (headers, acknowledgements) per byte of payload, for every NIC kind, measured by sending a
    known amount between two nodes. All ranks call it; `new_group(ranks, kind)` makes the pair's group, `gather(row)`
    gives every rank's row to all (and is what keeps the ranks in step).

    With `cuda`, fabrics have 1: their traffic is RDMA, of which a sample over TCP says nothing, and whose ports count
    some 60 bytes of headers with each packet of 1 to 4 KiB, well within the audit's tolerance."""
    factors: dict[str, float] = {}
    for kind, ranks in () if traffic.one_host else sample_pairs(plan).items():
        if cuda and kind != "ethernet":
            factors[kind] = 1.0
            continue
        group = new_group(ranks, f"sample {kind}")
        data = torch.zeros(SAMPLE_BYTES // 4)
        _send(ranks, rank, group, data[:16])
        gather(traffic.take())
        traffic.take()
        _send(ranks, rank, group, data)
        rows = gather(traffic.take())
        total = sum_by_kind(plan, rows).get(kind, {"tx": 0})["tx"]
        if total:
            factors[kind] = total / SAMPLE_BYTES
    return factors


def _send(ranks: tuple[int, int], rank: int, group: Any, data: torch.Tensor) -> None:
    """Send from the first to the second, and a word back, so that both know that it has arrived."""
    if rank in ranks:
        dist.broadcast(data, ranks[0], group=group)
        dist.broadcast(torch.zeros(1), ranks[1], group=group)
