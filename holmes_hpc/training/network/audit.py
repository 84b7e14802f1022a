"""Are the NICs used as planned? Bytes counted against bytes planned, node by node, and NICs that go down in mid-run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.group_bytes import sent_bytes
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.training.network.interfaces import NodeTransports, short_ranks

EVERY_STEPS = 10  # between comparisons: a NIC that goes wrong anywhere between two is seen within 20
TOLERANCE = 0.10
FLOOR_BYTES = 1_000_000  # per step: rendezvous, heartbeats, name look-ups


@dataclass(frozen=True)
class Load:
    """What one group makes a node send in one step: payload `bytes` over a `kind` of NIC (ib, roce, ethernet)."""

    node: str
    kind: str
    label: str
    bytes: float


def _sums() -> defaultdict[str, defaultdict[str, float]]:
    return defaultdict(lambda: defaultdict(float))


def expected(loads: Iterable[Load]) -> dict[str, defaultdict[str, float]]:
    """Return node -> kind of NIC -> bytes per step on the wire."""
    totals = _sums()
    for load in loads:
        totals[load.node][load.kind] += load.bytes
    return totals


def audit_bytes(
    counted: Mapping[str, Mapping[str, float]],
    loads: Iterable[Load],
    names: Mapping[str, Mapping[str, str]] | None = None,
    own: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Finding]:
    """Return an error for every NIC that sends more than it should, a warning where it is not this run's.

    An error names the group the surplus probably comes from: the one that sends about as much less on another kind of
    NIC of that node. A NIC that sends less than planned, with no other that sends more, is a warning. NICs of kind
    ``other`` (storage, management) have other users: they count only where another kind lacks as much.

    `counted`: node -> kind -> bytes sent per step (a mean over the steps since the last check); `names`: node -> kind
    -> interface, for messages; `own`: node -> kind -> bytes of the ranks' own TCP connections from its address, on the
    wire, 0 where the kernel does not tell (RDMA).
    """
    loads, names, own = list(loads), names or {}, own or {}
    planned: Mapping[str, Mapping[str, float]] = expected(loads)
    found: list[Finding] = []
    for node, kinds in counted.items():
        plan = planned.get(node, {})
        excess = {kind: kinds.get(kind, 0.0) - plan.get(kind, 0.0) for kind in {**kinds, **plan}}
        tolerated = {kind: TOLERANCE * plan.get(kind, 0.0) + FLOOR_BYTES for kind in excess}
        surplus = {kind: extra for kind, extra in excess.items() if extra > tolerated[kind]}
        lacking = {kind: -extra for kind, extra in excess.items() if -extra > tolerated[kind]}
        if surplus.get("other", 0.0) < 0.5 * min(lacking.values(), default=math.inf):
            surplus.pop("other", None)
        nics = {kind: names.get(node, {}).get(kind, kind) for kind in excess}
        for kind, extra in surplus.items():
            ours = _ours(kind, kinds, own.get(node, {}))
            is_anothers = ours > 0 and kinds[kind] - ours > extra / 2  # as the kernel tells
            group = None if is_anothers else _culprit(node, extra, lacking, loads)
            if group is not None:
                cause = f": probably group {group.label}, which belongs on {group.kind}"
                hint = (
                    f"see that the {group.kind} NIC of {node} is up and has its address (holmes "
                    "probe), that routes lead over it (ip route), and that no NCCL_ or GLOO_ variable overrides it"
                )
            else:  # all that this run sends is where it belongs
                cause = (
                    (f", this run's own connections sent {ours / 1e6:.1f} MB of it" if ours else "")
                    + (", the rest is" if is_anothers else ", none of this run's groups sends less than planned")
                    + (
                        ""
                        if ours and not is_anothers
                        else f"{'' if ours else ': probably'} another job's, or a service's"
                    )
                )
                hint = (
                    f"see who else sends on {node} (squeue -w {node}, ss -tnp); a NIC of its own, or "
                    "slurm.exclusive=true, keeps others away"
                )
            what = (
                f"{kind} NIC {nics[kind]} sent {kinds[kind] / 1e6:.1f} MB per step, the plan expects "
                f"{plan.get(kind, 0.0) / 1e6:.1f} MB{cause}"
            )
            found.append(Finding("warning" if group is None else "error", f"node {node}", what, hint, node, nics[kind]))
        found += [
            Finding(
                "warning",
                f"node {node}",
                f"{kind} NIC {nics[kind]} sent {missing / 1e6:.1f} MB per step less than the plan expects",
                "see `holmes report`; the counters of this NIC may not count all its traffic",
                node,
                nics[kind],
            )
            for kind, missing in lacking.items()
            if not surplus
        ]
    return found


def _ours(kind: str, counted: Mapping[str, float], own: Mapping[str, float]) -> float:
    """Return what this run's own connections may have sent over a kind of NIC: those from its address, and what the
    other kinds' NICs did not carry of theirs, for a route may lead elsewhere than an address says."""
    strayed = sum(max(0.0, sent - counted.get(other, 0.0)) for other, sent in own.items() if other != kind)
    return own.get(kind, 0.0) + strayed


def _culprit(node: str, extra: float, lacking: Mapping[str, float], loads: Iterable[Load]) -> Load | None:
    """Return the group of this node whose bytes, missing on their own kind of NIC, are nearest to the surplus."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for load in loads:
        if load.node == node and load.kind in lacking:
            sums[load.kind, load.label] += load.bytes
    if not sums:
        return None
    (kind, label), size = min(sums.items(), key=lambda item: abs(item[1] - extra))
    return Load(node, kind, label, size)


def nic_faults(interfaces: Iterable[str], node: str, sysfs: Path = Path("/sys")) -> dict[str, NetworkError]:
    """Return the errors of NICs in use that went down or vanished since the start; two small reads a NIC, for use in
    mid-run. `interfaces`: kernel names, or ``device:port`` of RDMA ports."""
    faults = {}
    for name in interfaces:
        device, _, port = name.partition(":")
        path = sysfs / (f"class/infiniband/{device}/ports/{port}/state" if port else f"class/net/{name}/operstate")
        try:
            state = path.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            state = "gone"
        if state not in ("up", "unknown", "dormant") and not state.endswith(": ACTIVE"):
            fix = "see its cable and switch port" if state == "lowerlayerdown" else "bring it up again"
            faults[name] = NetworkError(
                f"NIC {name} went down ({state})", where=f"node {node}", hint=f"{fix}, then `holmes resume`"
            )
    return faults


def loads(plan: Plan, nodes: Sequence[str], dtype: str | None = None) -> list[Load]:
    """Return what each group makes each node send in one step: payload bytes, over the NIC that the group belongs on.

    `nodes`: every rank's node; `dtype`: of weights and activations, None: the device's usual one. The sums over nodes
    are the plan's predicted bytes (planning/predict.py), of which this is the part that one node sends for one group.
    """
    layout = Layout.of(plan, Costs(dtype=dtype))
    return [
        Load(nodes[rank], str(nic), f"{group.kind} of ranks {short_ranks(group.ranks)}", amount)
        for group, rank, amount in sent_bytes(layout, layer_array(plan))
        if (nic := group.transport.nic) is not None and (nic.verbs or not nic.rdma)  # else no counters are read
    ]


class Audit:
    """Rank 0's comparison of what every node's NICs sent with what the plan expects of them.

    `factors`: fabric or ``ethernet`` -> bytes on the wire per byte of payload.
    """

    def __init__(
        self, plan: Plan, nodes: Sequence[NodeTransports], factors: Mapping[str, float], dtype: str | None = None
    ) -> None:
        self._nodes = [n.node for n in nodes]
        self._kinds = [str(plan.site.fabric(n.fabric).nic) for n in nodes]
        self._factors = {
            n.node: {rdma: factors.get(n.fabric, 1.0), "ethernet": factors.get("ethernet", 1.0)}
            for n, rdma in zip(nodes, self._kinds, strict=True)
        }
        self._loads = [
            replace(x, bytes=x.bytes * self._factors[x.node][x.kind]) for x in loads(plan, self._nodes, dtype)
        ]
        self._names = {
            n.node: {
                "other": f"that the plan does not use (nics/{n.node}.jsonl names it)",
                **{
                    kind: n.interfaces[of][0]
                    for kind, of in (("ethernet", "tcp"), (rdma, "rdma"))
                    if of in n.interfaces
                },
            }
            for n, rdma in zip(nodes, self._kinds, strict=True)
        }
        self._sums, self._own, self._steps = _sums(), _sums(), 0
        self._reported: set[tuple[str, str]] = set()

    def add(self, rows: Sequence[Sequence[float]], alone: bool = True) -> list[Finding]:
        """Take one step's counters of every rank (see :meth:`Traffic.take`); with every tenth return what is wrong,
        once for each NIC. `alone`: nothing but the step happened since the step before; other steps are not counted."""
        if not alone:
            return []
        self._steps += 1
        for rank, (ethernet, _, rdma, _, other, *by_own) in enumerate(rows):
            node, kinds = self._nodes[rank], ("ethernet", self._kinds[rank], "other")
            for kind, sent in zip(kinds, (ethernet, rdma, other), strict=True):
                self._sums[node][kind] += sent
            for kind, sent in zip(kinds[:2], by_own, strict=True):
                self._own[node][kind] += sent * self._factors[node][kind]
        if self._steps < EVERY_STEPS:
            return []
        counted, own = (
            {node: {kind: sent / self._steps for kind, sent in kinds.items()} for node, kinds in sums.items()}
            for sums in (self._sums, self._own)
        )
        found = audit_bytes(counted, self._loads, names=self._names, own=own)
        self._sums, self._own, self._steps = _sums(), _sums(), 0
        new = [f for f in found if (f.node, f.nic) not in self._reported]
        self._reported.update((f.node, f.nic) for f in new)
        return new


def nics_in_use(node: NodeTransports, sysfs: Path = Path("/sys")) -> list[str]:
    """Return the kernel interfaces and RDMA ports that carry this node's groups, as :func:`nic_faults` names them. RDMA
    ports are left out where `sysfs` shows none (a container)."""
    ports = node.environment.get("NCCL_IB_HCA", "").lstrip("=") if (sysfs / "class/infiniband").is_dir() else ""
    return [
        *(interface for kind, (interface, _, _) in node.interfaces.items() if kind != "local"),
        *filter(None, ports.split(",")),
    ]


def nic_check(node: NodeTransports, sysfs: Path = Path("/sys")) -> Callable[[], NetworkError | None]:
    """Return a cheap look at the NICs in use: it returns the error of the first that went down and is still down at the
    next look (links that come back within a second harm no connection)."""
    names, faults = nics_in_use(node, sysfs), dict[str, NetworkError]()

    def look() -> NetworkError | None:
        nonlocal faults
        before, faults = faults, nic_faults(names, node.node)
        return next((fault for name, fault in faults.items() if name in before), None)

    return look
