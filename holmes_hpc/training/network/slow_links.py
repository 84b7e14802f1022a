"""Detection of links that become slow during a run, from the time of each stage's gradient synchronization."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from holmes_hpc.fabric.finding import Finding
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.training.network.audit import planned_loads
from holmes_hpc.training.network.interfaces import NodeTransports, short_ranks

SLOWDOWN = 3.0  # ratio to the planned and to the earlier duration above which a link is slow
MIN_SYNC_S = 0.02  # per step; a shorter synchronization is never slow
WINDOW = 5  # steps whose median is compared
_DP = ("dp", "intra_dp", "inter_dp")


class SlowLinkDetector:
    """A comparison of every stage's gradient synchronization, over windows of steps, with its fastest window so far and
    with `expected_s`, the planned seconds of each stage.

    The fastest rank of a stage counts: the others may wait for a slow computation. `stages`: each stage's ranks;
    `names`: each stage's nodes and NICs, for messages. A slow stage is reported once, and again after it has recovered.
    """

    def __init__(self, stages: Sequence[Sequence[int]], names: Sequence[str], expected_s: Sequence[float]) -> None:
        self._stages, self._names, self._expected_s = stages, names, expected_s
        self._window: list[Sequence[float]] = []
        self._baseline_s: list[float] = []
        self._reported: set[int] = set()

    def add(self, sync_s: Sequence[float]) -> list[Finding]:
        """Add one step's synchronization seconds of every rank. Return slow stages at the end of a window, else []."""
        self._window.append(sync_s)
        if len(self._window) < WINDOW:
            return []
        medians_s = [
            statistics.median(min(step[rank] for rank in ranks) for step in self._window) for ranks in self._stages
        ]
        self._window.clear()
        self._baseline_s = self._baseline_s or medians_s
        findings = []
        for stage, (median_s, baseline_s, planned_s) in enumerate(
            zip(medians_s, self._baseline_s, self._expected_s, strict=True)
        ):
            is_slow = median_s > max(SLOWDOWN * baseline_s, SLOWDOWN * planned_s, MIN_SYNC_S)
            if is_slow and stage not in self._reported:
                self._reported.add(stage)
                findings.append(
                    Finding(
                        "warning",
                        self._names[stage],
                        f"gradient synchronization of stage {stage} takes {median_s:.3g} s a step, {baseline_s:.3g} s "
                        f"before, {planned_s:.3g} s as planned",
                        "a link there has become slow: check its speed, errors and cable "
                        "(ethtool, ibstat), and its other users; `holmes resume` measures every link again",
                    )
                )
            elif not is_slow:
                self._reported.discard(stage)
                self._baseline_s[stage] = min(baseline_s, median_s)
        return findings


def slow_link_detector(
    plan: Plan, nodes: Sequence[NodeTransports], factors: Mapping[str, float], dtype: str | None
) -> SlowLinkDetector:
    """Return the detector of a plan whose ranks run on `nodes`. `factors`, `dtype`: see
    :class:`holmes_hpc.training.network.audit.Audit`."""
    stages = plan.parallel.stage_ranks
    groups = {f"{g.kind} of ranks {short_ranks(g.ranks)}": g for g in plan.transports() if g.kind in _DP}
    expected_s, names = [0.0] * len(stages), []
    for load in planned_loads(plan, [n.node for n in nodes], dtype):
        if (group := groups.get(load.label)) is not None:
            ring = [plan.places[rank].pool for rank in group.ranks]
            senders = {plan.places[g.ranks[0]] for g in groups.values() if g.kind == group.kind}  # to the next fabric
            gbps = plan.site.slowest_gbps(group.transport.kind, ring, len(senders))
            factor = factors.get("ethernet" if group.transport.kind == "tcp" else ring[0], 1.0)
            for stage in group.stages:
                expected_s[stage] = max(expected_s[stage], 8 * load.bytes * factor / (gbps * 1e9))
    for ranks in stages:
        kinds = sorted({g.transport.kind for g in groups.values() if set(g.ranks) <= set(ranks)} - {"local"})
        interfaces = [nodes[r].interfaces[kind][0] for r in ranks for kind in kinds if kind in nodes[r].interfaces]
        hosts = list(dict.fromkeys(nodes[r].node for r in ranks))
        nics = f" (NIC {', '.join(dict.fromkeys(interfaces))})" if interfaces else ""
        names.append(f"{'node' if len(hosts) == 1 else 'nodes'} {compress(hosts)}{nics}")
    return SlowLinkDetector(stages, names, expected_s)
