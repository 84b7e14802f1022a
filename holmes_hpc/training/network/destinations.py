"""The nodes to which ranks send by TCP, and what each rank has sent to them in a step."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.network.audit import PlannedBytes
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.nic_bytes import Rows, Traffic


def edge_receivers(plan: Plan, nodes: Sequence[NodeTransports]) -> list[dict[str, tuple[int, str]]]:
    """Return, for each rank, the nodes to which it sends over pipeline edges: address of the node -> (a rank on that
    node, transport kind). `nodes`: the node of every rank."""
    receivers: list[dict[str, tuple[int, str]]] = [{} for _ in nodes]
    for group in plan.transports():
        kind = group.transport.kind
        for sender, receiver in (group.ranks, group.ranks[::-1]) if group.kind == "edge" else ():
            if kind in nodes[receiver].interfaces:
                receivers[sender].setdefault(nodes[receiver].interfaces[kind][1], (receiver, kind))
    return receivers


def planned_fabric_bytes(plan: Plan, planned: PlannedBytes) -> dict[str, dict[str, float]]:
    """Return the payload bytes per step between fabrics: sending fabric -> receiving fabric -> bytes."""
    rings = grouped(((group.kind, group.ranks), (rank, amount)) for group, rank, amount in planned)
    sums: dict[str, dict[str, float]] = {}
    for _, ring in rings:
        for (rank, amount), (receiver, _) in zip(ring, [*ring[1:], ring[0]], strict=True):  # to the next rank
            a, b = (plan.site.pool(plan.places[r].pool).fabric_name for r in (rank, receiver))
            if a != b:
                sums.setdefault(a, {})[b] = sums.get(a, {}).get(b, 0.0) + amount
    return sums


class Destinations:
    """The nodes to which the ranks of a plan send: the nodes of each fabric, and the nodes at the other ends of each
    rank's pipeline edges. `nodes`: the node of every rank."""

    def __init__(self, plan: Plan, nodes: Sequence[NodeTransports]) -> None:
        self._edges = [list(receivers) for receivers in edge_receivers(plan, nodes)]
        self._fabric_of_rank, self._fabrics = np.array([n.fabric for n in nodes]), defaultdict[str, set[str]](set)
        for node in nodes:
            self._fabrics[node.fabric].update(address for _, address in node.interfaces.values())
        self.width = len(self._fabrics) + max(map(len, self._edges), default=0)  # of a row
        cells = [(rank, len(self._fabrics) + i) for rank, edges in enumerate(self._edges) for i in range(len(edges))]
        self._seconds_at = tuple(np.array(cells, dtype=int).reshape(-1, 2).T)  # ranks and columns of all edges

    def row(self, rank: int, traffic: Traffic) -> list[float]:
        """Return what `rank` sent between the last two calls of :meth:`Traffic.take`: the bytes to each fabric, then
        the seconds of sending to each node of :func:`edge_receivers`. Zeros make the rows of all ranks equally long."""
        seconds = [traffic.sent_to({address})[1] for address in self._edges[rank]]
        sent = [*(traffic.sent_to(addresses)[0] for addresses in self._fabrics.values()), *seconds]
        return sent + [0.0] * (self.width - len(sent))

    def edge_seconds(self, rows: Rows) -> Rows:
        """Return the seconds of sending over the edges of all ranks, (edges,). `rows`: :meth:`row` of every rank."""
        return rows[self._seconds_at]

    def fabric_bytes(self, rows: Rows) -> dict[str, dict[str, int]]:
        """Return the bytes sent between fabrics: sender -> receiver -> bytes; {} for one fabric. `rows`: as above."""
        sent = rows[:, : len(self._fabrics)]
        sums = {a: sent[self._fabric_of_rank == a].sum(axis=0) for a in self._fabrics if len(self._fabrics) > 1}
        return {
            a: {b: int(count) for b, count in zip(self._fabrics, of_sender, strict=True) if b != a}
            for a, of_sender in sums.items()
        }
