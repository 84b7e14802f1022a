"""Byte counters of every NIC of this node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holmes_hpc.fabric.nics import NodeNics, candidates
from holmes_hpc.fabric.site import NicType

Counters = dict[str, tuple[int, int]]
# port_xmit_data and port_rcv_data count 4-byte words (kernel: Documentation/ABI/stable/sysfs-class-infiniband)
WORD_BYTES = 4


def read_counters(sysfs: Path = Path("/sys")) -> Counters:
    """Bytes sent and received since boot: interface name, or ``device:port`` of an RDMA port -> (tx, rx).

    A NIC that vanished or cannot be read is left out. RDMA ports count RDMA traffic (and IPoIB, which its interface
    counts too); interfaces count what the kernel sends.
    """
    counters: Counters = {}
    for name in _names(sysfs / "class/net"):
        statistics = sysfs / "class/net" / name / "statistics"
        tx, rx = _number(statistics / "tx_bytes"), _number(statistics / "rx_bytes")
        if tx is not None and rx is not None:
            counters[name] = (tx, rx)
    for device in _names(sysfs / "class/infiniband"):
        ports = sysfs / "class/infiniband" / device / "ports"
        for port in _names(ports):
            tx = _number(ports / port / "counters/port_xmit_data")
            rx = _number(ports / port / "counters/port_rcv_data")
            if tx is not None and rx is not None:
                counters[f"{device}:{port}"] = (tx * WORD_BYTES, rx * WORD_BYTES)
    return counters


def difference(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Counters:
    """Bytes between two readings, for NICs in both. A counter that went back (a NIC was reset) counts from zero."""
    result: Counters = {}
    for name in before.keys() & after.keys():
        (tx0, rx0), (tx1, rx1) = before[name], after[name]
        result[name] = (tx1 - tx0 if tx1 >= tx0 else tx1, rx1 - rx0 if rx1 >= rx0 else rx1)
    return result


def by_kind(counters: Mapping[str, tuple[int, int]], nics: NodeNics) -> dict[str, tuple[int, int]]:
    """Sum counters into ``ib``, ``roce``, ``ethernet`` and ``other`` (management, containers, storage: RDMA ports that
    NCCL is not given).

    Nothing is counted twice: IPoIB is left to its port where ports are counted, members of a bond to the bond.
    """
    ports = [p for p in nics.ports if p.kind in ("ib", "roce")]
    compute = {p.name for nic in (NicType.IB, NicType.ROCE) for p in nics.compute_ports(nic)}
    owners = {p.interface for p in ports if p.name in compute}
    kinds: dict[str, str] = {}
    for nic in nics.interfaces:
        if nic.name == "lo" or nic.member_of is not None:
            continue
        if nic.type is NicType.IB and any(p.kind == "ib" and p.name in counters for p in ports):
            continue
        storage = nic.type is NicType.ROCE and bool(ports) and nic.name not in owners
        kinds[nic.name] = str(nic.type) if nic.role == "data" and not storage else "other"
    best = candidates(nics, NicType.ETHERNET)  # sockets may go over a RoCE NIC, or a management port
    if best and (
        kinds.get(best[0].name) == "other" or any(p.name in counters for p in ports) or nics.sockets is not None
    ):
        kinds[best[0].name] = "ethernet"  # a RoCE port counts RDMA, its interface what the kernel sends
    kinds.update({p.name: p.kind if p.name in compute else "other" for p in ports})
    totals: dict[str, tuple[int, int]] = {}
    for name, kind in kinds.items():
        if name in counters:
            tx, rx = totals.get(kind, (0, 0))
            totals[kind] = (tx + counters[name][0], rx + counters[name][1])
    return totals


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return int(file.read(64))
    except (OSError, ValueError):
        return None
