"""Bytes that this node's NICs carry: counted by one rank of each node, per NIC kind, between two moments."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holmes_hpc.fabric.nics import NodeNics, role_of
from holmes_hpc.fabric.site import NicType
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.files import append_line, to_json
from holmes_hpc.training.network.counters import Counters, by_kind, difference, read_counters
from holmes_hpc.training.network.own_sockets import OwnSockets
from holmes_hpc.training.rank.launch import Launch

SAMPLE_BYTES = 1 << 20


class Traffic:
    """Counters of this node. On every rank but the first of a node, and where all ranks share one host, NICs are not
    counted (zeros), so that sums over ranks are sums over nodes. `by_nic`: what the last call of `take` found."""

    def __init__(self, plan: Plan, launch: Launch, nics: NodeNics) -> None:
        self.fabric = plan.site.fabric(plan.places[min(launch.rank, plan.world_size - 1)].fabric)
        first = launch.local_rank == 0
        self.counts = first and not launch.one_host
        self._nics = nics
        self._last = read_counters() if self.counts else {}
        self._own = None if launch.one_host else OwnSockets()
        self.by_nic: Counters = {}

    def take(self) -> tuple[float, ...]:
        """Bytes since the last call: Ethernet sent and received, RDMA sent and received; sent over NICs that the plan
        does not use; sent by this rank's own TCP connections over Ethernet and over RDMA NICs."""
        own = self._kinds(self._own_sent())
        sent_here = own[0], own[2]
        if not self.counts:
            return (*[0.0] * 5, *sent_here)
        now = read_counters()
        self.by_nic, self._last = difference(self._last, now), now
        return (*self._kinds(self.by_nic), *sent_here)

    def _own_sent(self) -> Counters:
        sent = {} if self._own is None else self._own.take()
        return {nic.name: (sent[nic.address], 0) for nic in self._nics.interfaces if nic.address in sent}

    def _kinds(self, counted: Counters) -> tuple[float, float, float, float, float]:
        """Ethernet sent and received, RDMA sent and received, others sent."""
        kinds = by_kind(counted, self._nics)
        ethernet = kinds.pop("ethernet", (0, 0))
        rdma = kinds.pop(str(self.fabric.nic), (0, 0)) if self.fabric.nic is not NicType.ETHERNET else (0, 0)
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
        """One step's bytes of each NIC; those that carried nothing, and virtual ones, are left out."""
        nics = {
            name: {"tx": tx, "rx": rx}
            for name, (tx, rx) in sorted(counted.items())
            if (tx or rx) and role_of(name) != "virtual"
        }
        if not nics:
            return
        self._lines.append(to_json({"step": step, "attempt": self._attempt, "node": self._node, "nics": nics}))
        if time.monotonic() - self._wrote > 1:
            self.write()

    def write(self) -> None:
        """What was held back. RunFailed when the disk is full."""
        if self._lines:
            with contextlib.suppress(OSError):  # append_line says what is wrong
                self._path.parent.mkdir(exist_ok=True)
            append_line(self._path, "\n".join(self._lines))
        self._lines, self._wrote = [], time.monotonic()


def sum_by_kind(plan: Plan, rows: Any) -> dict[str, dict[str, int]]:
    """Every rank's :meth:`Traffic.take` as sums over nodes: fabric name or ``ethernet`` -> {tx, rx}."""
    total: dict[str, dict[str, int]] = {}
    for rank, (tx, rx, rdma_tx, rdma_rx, *_) in enumerate(rows):
        for kind, sent, received in (("ethernet", tx, rx), (plan.places[rank].fabric, rdma_tx, rdma_rx)):
            if sent or received:
                entry = total.setdefault(kind, {"tx": 0, "rx": 0})
                entry["tx"] += int(sent)
                entry["rx"] += int(received)
    return total


def sample_pairs(plan: Plan) -> dict[str, tuple[int, int]]:
    """For every NIC kind that the plan uses, two ranks on different nodes whose group uses it: the ends of a sample."""
    pairs: dict[str, tuple[int, int]] = {}
    for group in plan.transports():
        if group.kind not in ("edge", "dp", "intra_dp", "inter_dp") or group.transport.kind == "local":
            continue
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
    for kind, ranks in sample_pairs(plan).items():
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
    """From the first to the second, and a word back, so that both know that it has arrived."""
    if rank not in ranks:
        return
    word = torch.zeros(1)
    if rank == ranks[0]:
        dist.send(data, ranks[1], group=group)
        dist.recv(word, ranks[1], group=group)
    else:
        dist.recv(data, ranks[0], group=group)
        dist.send(word, ranks[0], group=group)
