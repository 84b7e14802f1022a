"""Links that become slow in mid-run: how long a stage's gradient synchronisation takes, against the plan and against
what it took before."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from holmes_hpc.fabric.finding import Finding
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.slurm.hostlist import compress
from holmes_hpc.training.network.audit import loads
from holmes_hpc.training.network.interfaces import NodeTransports, short_ranks

TIMES = 3.0  # as long as planned, and as long as before
LEAST_S = 0.02  # a step: less than that is no loss
WINDOW = 5  # steps whose median is compared
_DP = ("dp", "intra_dp", "inter_dp")


class SlowLinks:
    """Compares the gradient synchronisation of every stage, over windows of steps, with the first window's and with
    `expected_s`, a stage's seconds as planned. Of a stage's ranks the quickest counts: the others may wait for one that
    computes. `names`: of every stage, for messages: its nodes and NICs. A stage is named once, until it recovers."""

    def __init__(self, stages: Sequence[Sequence[int]], names: Sequence[str], expected_s: Sequence[float]) -> None:
        self._stages, self._names, self._expected_s = stages, names, expected_s
        self._seen: list[Sequence[float]] = []
        self._before: list[float] = []
        self._reported: set[int] = set()

    def step(self, sync_s: Sequence[float]) -> list[Finding]:
        """Take one step's seconds of every rank; return what is slow with every window."""
        self._seen.append(sync_s)
        if len(self._seen) < WINDOW:
            return []
        now = [statistics.median(min(step[rank] for rank in ranks) for step in self._seen) for ranks in self._stages]
        self._seen.clear()
        self._before = self._before or now
        found = []
        for stage, (own, before, planned) in enumerate(zip(now, self._before, self._expected_s, strict=True)):
            slow = own > max(TIMES * before, TIMES * planned, LEAST_S)
            if slow and stage not in self._reported:
                self._reported.add(stage)
                found.append(
                    Finding(
                        "warning",
                        self._names[stage],
                        f"gradient synchronisation of stage {stage} takes {own:.3g} s a step, {before:.3g} s before, "
                        f"{planned:.3g} s as planned",
                        "a link there has become slow: see its speed, errors and cable "
                        "(ethtool, ibstat), and who else uses it; `holmes resume` measures every link anew",
                    )
                )
            elif not slow:
                self._reported.discard(stage)
                self._before[stage] = min(before, own)
        return found


def of_plan(plan: Plan, nodes: Sequence[NodeTransports], factors: Mapping[str, float], dtype: str | None) -> SlowLinks:
    """Make one for a plan whose ranks run on `nodes`; see :class:`holmes_hpc.training.network.audit.Audit` for the
    rest."""
    stages = plan.parallel.stage_ranks
    groups = {f"{g.kind} of ranks {short_ranks(g.ranks)}": g for g in plan.transports() if g.kind in _DP}
    expected, names = [0.0] * len(stages), []
    for load in loads(plan, [n.node for n in nodes], dtype):
        if (group := groups.get(load.label)) is not None:
            ring = [plan.places[rank].fabric for rank in group.ranks]
            gbps = plan.site.slowest_gbps(group.transport.kind, ring)
            factor = factors.get("ethernet" if group.transport.kind == "tcp" else ring[0], 1.0)
            for stage in group.stages:
                expected[stage] = max(expected[stage], 8 * load.bytes * factor / (gbps * 1e9))
    for ranks in stages:
        kinds = sorted({g.transport.kind for g in groups.values() if set(g.ranks) <= set(ranks)} - {"local"})
        interfaces = [nodes[r].interfaces[kind][0] for r in ranks for kind in kinds if kind in nodes[r].interfaces]
        hosts = list(dict.fromkeys(nodes[r].node for r in ranks))
        nics = f" (NIC {', '.join(dict.fromkeys(interfaces))})" if interfaces else ""
        names.append(f"{'node' if len(hosts) == 1 else 'nodes'} {compress(hosts)}{nics}")
    return SlowLinks(stages, names, expected)
