"""Measure the time of the start-up checks and byte counters of a node: `python benchmarks/link_check.py`.

Limits: 5 s at 10 nodes plus 20 ms per further node for the checks, 0.5% of a step for the counters. The work of one
node is real: it reads the information of all nodes, chooses and reaches its peers (over loopback, without network
delay), waits for the fixed time of the sample rounds, and evaluates all reports. The nodes are synthetic: three
fabrics, eight GPUs per node."""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import msgspec

from holmes_hpc.training.network.link_check import Limits
from holmes_hpc.training.network.link_diagnosis import (
    CommunicationGroup,
    Endpoint,
    LinkReport,
    NodeInformation,
    find_clock_skew,
    find_node_faults,
    find_slow_links,
    find_unreachable,
    measurement_rounds,
    peer_links,
)
from holmes_hpc.training.network.link_sockets import LinkServer, reach
from holmes_hpc.training.network.nic_bytes import NicLog, read_counters

GPUS = 8
STEP_S = 0.5


def make_nodes(count: int) -> tuple[list[NodeInformation], list[CommunicationGroup]]:
    """Return `count` nodes of three fabrics, with data parallelism inside fabrics and edges between them."""
    infos = []
    for i in range(count):
        fabric = ("ib-a", "roce-a", "eth-a")[3 * i // count]
        nics = {"tcp": Endpoint("eth0", f"10.{i // 250}.1.{i % 250}", 1, 25.0)}
        if fabric != "eth-a":
            nics["rdma"] = Endpoint("rdma0", f"10.{i // 250}.2.{i % 250}", 2, 200.0)
        infos.append(NodeInformation(f"n{i}", fabric, tuple(range(i * GPUS, (i + 1) * GPUS)), nics))
    parts = [[c for c in infos if c.fabric == f] for f in ("ib-a", "roce-a", "eth-a")]
    groups = [
        CommunicationGroup(f"dp {g}", kind, tuple(c.ranks[g] for c in part))
        for kind, part in zip(("rdma", "rdma", "tcp"), parts, strict=True)
        for g in range(GPUS)
    ]
    groups += [
        CommunicationGroup("edge", "tcp", (a.ranks[g], b.ranks[g]))
        for sources, targets in pairwise(parts)
        for a, b in zip(sources, targets, strict=False)
        for g in range(GPUS)
    ]
    return infos, [*groups, CommunicationGroup("world", "tcp", tuple(range(count * GPUS)), sampled=False)]


def check_s(count: int) -> tuple[float, int]:
    """Return the seconds of one node of `count`, and the number of its peers."""
    infos, groups = make_nodes(count)
    text = msgspec.json.encode({c.node: c for c in infos})
    start = time.perf_counter()
    infos = [*msgspec.json.decode(text, type=dict[str, NodeInformation]).values()]
    find_node_faults(infos, groups)
    node = infos[count // 2].node
    links = peer_links(infos, groups, node)
    order = measurement_rounds(infos, groups)
    with LinkServer("peer", "secret", {"tcp": Endpoint("lo", "127.0.0.1")}) as server:
        targets = {f"{x.kind} {x.receiver}": Endpoint("lo", "127.0.0.1", server.ports["tcp"], 1.0) for x in links}
        reach(Endpoint("lo", "127.0.0.1"), targets, "secret", 10)
    reports = [LinkReport(c.node, (), tuple((x, 20.0) for r in order for x in r if x.sender == c.node)) for c in infos]
    find_unreachable(infos, reports)
    find_slow_links(infos, reports)
    find_clock_skew(reports)
    return time.perf_counter() - start + len(order) * Limits().sample_s, len(links)


def main() -> int:
    """Print the table; return 1 if a limit is exceeded."""
    worst = 0.0
    print(f"{'nodes':>6} {'peers':>6} {'seconds':>8} {'limit':>8}")
    for count in (10, 100, 300, 1000):
        seconds, reached = check_s(count)
        limit_s = 5 + 0.02 * (count - 10)
        worst = max(worst, seconds / limit_s)
        print(f"{count:6d} {reached:6d} {seconds:8.2f} {limit_s:8.2f}")
    repeats = 200
    with tempfile.TemporaryDirectory() as folder:
        log = NicLog(Path(folder) / "nics", "n0", 1)
        start = time.perf_counter()
        for step in range(repeats):
            counters = read_counters()
            log.add(step, {name: (step + 1, step + 1) for name in counters})
            log.write()  # a run writes at most once per second
        counters_s = (time.perf_counter() - start) / repeats
    print(
        f"counters of {len(counters)} NICs, read and written: {counters_s * 1e6:.0f} us, {counters_s / STEP_S:.3%} of "
        f"a step of {STEP_S:g} s (limit 0.5%)"
    )
    return int(worst > 1 or counters_s / STEP_S > 0.005)


if __name__ == "__main__":
    sys.exit(main())
