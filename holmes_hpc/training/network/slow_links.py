"""Detection of links that become slow during a run: from the time of each stage's gradient synchronization, and from
the time for which TCP connections of pipeline edges send."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from holmes_hpc.fabric.finding import Finding
from holmes_hpc.planning.plan.parallel import abbreviated
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.training.network.audit import PlannedBytes, planned_loads
from holmes_hpc.training.network.destinations import edge_receivers
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.link_diagnosis import Endpoint, NodeLink, slow_link

SLOWDOWN = 3.0  # ratio to the planned and to the earlier duration above which a link is slow
MIN_S = 0.02  # per step; a shorter duration is never slow
WINDOW = 5  # steps whose median is compared
_DP = ("dp", "intra_dp", "inter_dp")
_SLOW_STAGE_HINT = (
    "a link there has become slow: check its speed, errors and cable (ethtool, ibstat), and its other users;"
    " `holmes resume` measures every link again"
)


class SlowLinkDetector:
    """A detector of links that are busy for too long per step.

    The time of a link is its median over a window of steps. A link is slow if its time exceeds MIN_S, and also exceeds
    SLOWDOWN times the planned seconds (`expected_s`) and SLOWDOWN times its fastest window so far. A slow link is
    reported once, and again if it recovers and slows down again. If both directions are slow, only the slower one is
    reported, because the acknowledgements of the other direction travel with it.

    `columns`: for each link, its columns in the values of a step; `reduce`: combines these columns into the link's
    seconds; `describe`: (number of the link, its median seconds, seconds of its fastest window) -> Finding; `slow`: the
    links that are slow now, `where` of the finding -> slowdown.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[int]],
        expected_s: Sequence[float],
        describe: Callable[[int, float, float], Finding],
        reduce: np.ufunc,
    ) -> None:
        self.expected_s, self.describe, self._reduce = expected_s, describe, reduce
        self._columns = np.array([column for of_link in columns for column in of_link], dtype=int)
        self._first_columns = np.cumsum([0, *map(len, columns)])[:-1]  # of each link, in `_columns`
        self._window: list[NDArray[np.float64]] = []
        self._baseline_s: NDArray[np.float64] | None = None
        self.slow: dict[str, float] = {}

    def add(self, seconds: Sequence[float] | NDArray[np.float64]) -> list[Finding]:
        """Add the values of a step. Return findings about slow links at the end of a window, else []."""
        self._window.append(np.array(seconds))  # a copy, because a view would keep the whole step
        if len(self._window) < WINDOW:
            return []
        link_s = self._reduce.reduceat(np.array(self._window)[:, self._columns], self._first_columns, axis=1)
        medians_s = np.median(link_s, axis=0)
        self._window.clear()
        baseline_s = medians_s if self._baseline_s is None else self._baseline_s
        slowdowns = medians_s / np.maximum(np.maximum(baseline_s, self.expected_s), MIN_S / SLOWDOWN)
        is_slow = slowdowns > SLOWDOWN
        self._baseline_s = np.where(is_slow, baseline_s, np.minimum(baseline_s, medians_s))
        findings, previous, self.slow = [], self.slow, {}
        for link in sorted(np.flatnonzero(is_slow), key=lambda link: slowdowns[link], reverse=True):
            finding = self.describe(int(link), float(medians_s[link]), float(baseline_s[link]))
            if finding.where not in {**previous, **self.slow}:
                findings.append(finding)
            self.slow.setdefault(finding.where, float(slowdowns[link]))
        return findings


def slow_link_detector(
    plan: Plan, nodes: Sequence[NodeTransports], factors: Mapping[str, float], planned: PlannedBytes
) -> SlowLinkDetector:
    """Return the detector of stages whose gradient synchronization is slow, for a plan whose ranks run on `nodes`.

    The values of a step are the seconds of every rank. A stage's time is that of its fastest rank, because its other
    ranks may be waiting for a slow computation. `factors`: see :class:`holmes_hpc.training.network.audit.Audit`."""
    stages = plan.parallel.stage_ranks
    groups = {f"{g.kind} of ranks {abbreviated(g.ranks, ',')}": g for g in plan.transports() if g.kind in _DP}
    senders = {kind: len({plan.places[g.ranks[0]] for g in groups.values() if g.kind == kind}) for kind in _DP}
    expected_s, names = [0.0] * len(stages), []
    for load in planned_loads(planned, [n.node for n in nodes]):
        if (group := groups.get(load.label)) is not None:
            ring = [plan.places[rank].pool for rank in group.ranks]
            gbps = plan.site.slowest_gbps(group.transport.kind, ring, senders[group.kind])  # senders share links
            factor = factors.get("ethernet" if group.transport.kind == "tcp" else ring[0], 1.0)
            for stage in group.stages:
                expected_s[stage] = max(expected_s[stage], 8 * load.bytes * factor / (gbps * 1e9))
    kinds_of_stage = defaultdict[int, set[str]](set)
    for group in groups.values():
        kinds_of_stage[group.stages[0]].add(group.transport.kind)
    for stage, ranks in enumerate(stages):
        kinds = sorted(kinds_of_stage[stage])
        interfaces = [nodes[r].interfaces[kind][0] for r in ranks for kind in kinds if kind in nodes[r].interfaces]
        hosts = list(dict.fromkeys(nodes[r].node for r in ranks))
        nics = f" (NIC {', '.join(dict.fromkeys(interfaces))})" if interfaces else ""
        names.append(f"{'node' if len(hosts) == 1 else 'nodes'} {compress(hosts)}{nics}")

    def describe(stage: int, median_s: float, baseline_s: float) -> Finding:
        seconds = f"{median_s:.3g} s a step (before: {baseline_s:.3g} s, planned: {expected_s[stage]:.3g} s)"
        problem = f"gradient synchronization of stage {stage} takes {seconds}"
        return Finding("warning", names[stage], problem, _SLOW_STAGE_HINT)

    return SlowLinkDetector(stages, expected_s, describe, np.minimum)


def slow_edge_detector(plan: Plan, nodes: Sequence[NodeTransports], planned: PlannedBytes) -> SlowLinkDetector:
    """Return the detector of pipeline edges over slow TCP connections, for a plan whose ranks run on `nodes`.

    The values of a step are those of :meth:`Destinations.edge_seconds`. A link is a pair of NICs of two nodes. Its time
    is that of its busiest connection. Edges over RDMA carry no TCP traffic, so they are not monitored.
    """

    def addresses(sender: int, receiver: int, kind: str) -> tuple[str, str]:
        return nodes[sender].interfaces[kind][1], nodes[receiver].interfaces[kind][1]

    edges = [(s, r, kind) for s, peers in enumerate(edge_receivers(plan, nodes)) for r, kind in peers.values()]
    columns, sent = defaultdict[tuple[str, str], list[int]](list), defaultdict[tuple[str, str], float](float)
    for column, edge in enumerate(edges):
        columns[addresses(*edge)].append(column)
    for group, sender, amount in planned:
        kind, receiver = group.transport.kind, sum(group.ranks) - sender  # an edge has two ranks
        if group.kind == "edge" and kind in nodes[receiver].interfaces:
            sent[addresses(sender, receiver, kind)] += amount
    ends = [edges[first] for first, *_ in columns.values()]  # by link
    pools = [(plan.site.pool(plan.places[s].pool), plan.site.pool(plan.places[r].pool)) for s, r, _ in ends]
    senders = Counter(pools)
    gbps = [plan.site.rate_gbps(kind, *pair, senders[pair]) for pair, (_, _, kind) in zip(pools, ends, strict=True)]
    expected_s = [8e-9 * sent[link] / rate for link, rate in zip(columns, gbps, strict=True)]

    def describe(number: int, median_s: float, baseline_s: float) -> Finding:
        sender, receiver, kind = ends[number]
        stages = [plan.parallel.coordinates(rank)[0] for rank in (sender, receiver)]
        link = NodeLink(kind, nodes[sender].node, nodes[receiver].node, f"edge of stages {min(stages)},{max(stages)}")
        nics = [Endpoint(*nodes[rank].interfaces[kind]) for rank in (sender, receiver)]
        return slow_link(link, gbps[number] * expected_s[number] / median_s, gbps[number], "warning", nics)

    return SlowLinkDetector(list(columns.values()), expected_s, describe, np.maximum)
