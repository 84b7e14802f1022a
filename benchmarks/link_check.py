"""What the checks at start and the byte counters cost a node: `python benchmarks/link_check.py`.

Allowed: 5 s at 10 nodes and 20 ms for each further node; counters 0.5% of a step. One node's own work is run for real:
reading what all nodes publish, choosing and reaching its peers (over loopback, so without their own delays), the rounds
of samples with their fixed time, and the verdict over all reports. The nodes are made up: three fabrics, eight GPUs
each."""

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


def job(count: int) -> tuple[list[NodeInformation], list[CommunicationGroup]]:
    """`count` nodes of three fabrics, data parallel inside, edges between."""
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
        for one, two in pairwise(parts)
        for a, b in zip(one, two, strict=False)
        for g in range(GPUS)
    ]
    return infos, [*groups, CommunicationGroup("world", "tcp", tuple(range(count * GPUS)), sampled=False)]


def cost(count: int) -> tuple[float, int]:
    """Seconds of one node of `count`, and how many peers it reached."""
    infos, groups = job(count)
    text = msgspec.json.encode({c.node: c for c in infos})
    start = time.perf_counter()
    infos = [*msgspec.json.decode(text, type=dict[str, NodeInformation]).values()]
    find_node_faults(infos, groups)
    own = infos[count // 2].node
    links = peer_links(infos, groups, own)
    order = measurement_rounds(infos, groups)
    with LinkServer("peer", "word", {"tcp": ("lo", "127.0.0.1")}) as server:
        targets = {f"{x.kind} {x.receiver}": Endpoint("lo", "127.0.0.1", server.ports["tcp"], 1.0) for x in links}
        reach(("lo", "127.0.0.1"), targets, "word", 10)
    reports = [LinkReport(c.node, (), tuple((x, 20.0) for r in order for x in r if x.sender == c.node)) for c in infos]
    find_unreachable(infos, reports)
    find_slow_links(infos, reports)
    find_clock_skew(reports)
    return time.perf_counter() - start + len(order) * Limits().sample_s, len(links)


def main() -> int:
    """Print the table; exit code 1 where the allowance is exceeded."""
    worst = 0.0
    print(f"{'nodes':>6} {'peers':>6} {'seconds':>8} {'allowed':>8}")
    for count in (10, 100, 300, 1000):
        seconds, reached = cost(count)
        allowed = 5 + 0.02 * (count - 10)
        worst = max(worst, seconds / allowed)
        print(f"{count:6d} {reached:6d} {seconds:8.2f} {allowed:8.2f}")
    tries = 200
    with tempfile.TemporaryDirectory() as folder:
        log = NicLog(Path(folder) / "nics", "n0", 1)
        start = time.perf_counter()
        for step in range(tries):
            counters = read_counters()
            log.add(step, {name: (step + 1, step + 1) for name in counters})
            log.write()  # in a run once a second at most
        each = (time.perf_counter() - start) / tries
    print(
        f"counters of {len(counters)} NICs, read and written: {each * 1e6:.0f} us, {each / STEP_S:.3%} of a step of "
        f"{STEP_S:g} s (allowed 0.5%)"
    )
    return int(worst > 1 or each / STEP_S > 0.005)


if __name__ == "__main__":
    sys.exit(main())
