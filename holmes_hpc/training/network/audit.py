"""The audit of NICs during a run: counted bytes against planned bytes by node, and NICs that go down."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.group_bytes import sent_bytes
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.plan.parallel import abbreviated
from holmes_hpc.planning.plan.plan import GroupTransport, Plan
from holmes_hpc.training.network.interfaces import NodeTransports
from holmes_hpc.training.network.nic_bytes import Rows

EVERY_STEPS = 10  # steps that one comparison covers; a fault during them is reported by the next one at the latest
TOLERANCE = 0.10  # share of the planned bytes
FLOOR_BYTES = 1_000_000  # tolerated per step in addition, for rendezvous, heartbeats and name look-ups
PlannedBytes: TypeAlias = list[tuple[GroupTransport, int, float]]  # group, sending rank, payload bytes per step


@dataclass(frozen=True)
class Load:
    """The `bytes` per step that the process group `label` makes `node` send over its NIC of `kind` (ib, roce, …)."""

    node: str
    kind: str
    label: str
    bytes: float


def expected_bytes(loads: Iterable[Load]) -> dict[str, defaultdict[str, float]]:
    """Return the sums of `loads`: node -> kind of NIC -> bytes per step."""
    totals: dict[str, defaultdict[str, float]] = {}
    for load in loads:
        totals.setdefault(load.node, defaultdict(float))[load.kind] += load.bytes
    return totals


def audit_bytes(
    counted: Mapping[str, Mapping[str, float]],
    loads: Iterable[Load],
    names: Mapping[str, Mapping[str, str]] | None = None,
    own_bytes: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Finding]:
    """Return findings for NICs whose bytes per step differ from the plan.

    A NIC that sends more than planned gives an error if a group of this run probably sends the surplus: the group is
    planned on another NIC of the node, which sends less than planned. It gives a warning if another job or a service
    sends the surplus. If no NIC of a node sends more, each NIC that sends less than planned gives a warning. NICs of
    kind ``other`` (storage) count only if their surplus is at least half of the bytes that another kind lacks.

    `counted`: node -> kind -> bytes sent per step (the mean since the last check); `names`: node -> kind -> interface,
    for messages; `own_bytes`: node -> kind -> bytes on the wire per step that the ranks' own TCP connections sent from
    that NIC's address, 0 if the kernel does not count them (RDMA).
    """
    loads, names, own_bytes = list(loads), names or {}, own_bytes or {}
    planned_by_node: Mapping[str, Mapping[str, float]] = expected_bytes(loads)
    findings: list[Finding] = []
    for node, sent in counted.items():
        planned = planned_by_node.get(node, {})
        excess = {kind: sent.get(kind, 0.0) - planned.get(kind, 0.0) for kind in {**sent, **planned}}
        tolerated = {kind: TOLERANCE * planned.get(kind, 0.0) + FLOOR_BYTES for kind in excess}
        surplus = {kind: extra for kind, extra in excess.items() if extra > tolerated[kind]}
        missing = {kind: -extra for kind, extra in excess.items() if -extra > tolerated[kind]}
        if surplus.get("other", 0.0) < 0.5 * min(missing.values(), default=math.inf):
            surplus.pop("other", None)
        nics = {kind: names.get(node, {}).get(kind, kind) for kind in excess}
        own = own_bytes.get(node, {})
        for kind, extra in surplus.items():
            # The most bytes that this run's own connections can have sent over the NIC: those from its address, and
            # those from another NIC's address that the other NIC did not send: a route may lead over another NIC.
            rerouted = sum(max(0.0, own[k] - sent.get(k, 0.0)) for k in own if k != kind)
            run_bytes = own.get(kind, 0.0) + rerouted
            is_other_traffic = run_bytes > 0 and sent[kind] - run_bytes > extra / 2
            group = None if is_other_traffic else _misplaced_group(node, extra, missing, loads)
            if group is not None:
                level, cause = "error", f": probably group {group.label}, which belongs on {group.kind}"
                hint = (
                    f"check that the {group.kind} NIC of {node} is up and has its address (holmes "
                    "probe), that routes lead over it (ip route), and that no NCCL_ or GLOO_ variable overrides it"
                )
            else:
                level, cause = "warning", ", none of this run's groups sends less than planned"
                if run_bytes:
                    rest = ", the rest is another job's, or a service's" if is_other_traffic else cause
                    cause = f", this run's own connections sent {run_bytes / 1e6:.1f} MB of it{rest}"
                else:
                    cause += ": probably another job's, or a service's"
                hint = (
                    f"find the other senders on {node} (squeue -w {node}, ss -tnp); a separate NIC or "
                    "slurm.exclusive=true avoids them"
                )
            rates = f"{sent[kind] / 1e6:.1f} MB per step, the plan expects {planned.get(kind, 0.0) / 1e6:.1f} MB"
            problem = f"{kind} NIC {nics[kind]} sent {rates}{cause}"
            findings.append(Finding(level, f"node {node}", problem, hint, node, nics[kind]))
        hint = "see `holmes report`; the counters of this NIC may not count all its traffic"
        for kind, shortfall in missing.items() if not surplus else ():
            problem = f"{kind} NIC {nics[kind]} sent {shortfall / 1e6:.1f} MB per step less than the plan expects"
            findings.append(Finding("warning", f"node {node}", problem, hint, node, nics[kind]))
    return findings


def _misplaced_group(node: str, extra: float, missing: Mapping[str, float], loads: Iterable[Load]) -> Load | None:
    """Return the group that probably sends the surplus `extra` over the wrong NIC; None if there is no candidate.

    Candidates are the groups whose planned NIC sends less than planned. The one with planned bytes nearest to `extra`
    is chosen. `missing`: kind of NIC -> by how many bytes it sends less than planned."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for load in loads:
        if load.node == node and load.kind in missing:
            sums[load.kind, load.label] += load.bytes
    if not sums:
        return None
    (kind, label), size = min(sums.items(), key=lambda item: abs(item[1] - extra))
    return Load(node, kind, label, size)


def nic_faults(interfaces: Iterable[str], node: str, sysfs: Path = Path("/sys")) -> dict[str, NetworkError]:
    """Return an error for each NIC that is down or has vanished: name -> error. `interfaces`: the names of the NICs
    (kernel interfaces, or ``device:port`` for RDMA ports). One small file is read per NIC."""
    faults = {}
    for name in interfaces:
        device, _, port = name.partition(":")
        path = sysfs / (f"class/infiniband/{device}/ports/{port}/state" if port else f"class/net/{name}/operstate")
        try:
            state = path.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            state = "gone"
        if state not in ("up", "unknown", "dormant") and not state.endswith(": ACTIVE"):
            fix = "check its cable and switch port" if state == "lowerlayerdown" else "bring it up again"
            problem, hint = f"NIC {name} went down ({state})", f"{fix}, then `holmes resume`"
            faults[name] = NetworkError(problem, where=f"node {node}", hint=hint)
    return faults


def planned_bytes(plan: Plan, dtype: str | None = None) -> PlannedBytes:
    """Return the items of :func:`sent_bytes` for a plan. This is slow for thousands of ranks. `dtype`: the type of
    weights and activations; None for the device's usual type."""
    return [*sent_bytes(Layout.of(plan, Costs(dtype=dtype)), layer_array(plan))]


def planned_loads(planned: PlannedBytes, nodes: Sequence[str]) -> list[Load]:
    """Return the payload bytes per step of each group and sending rank, as loads on the group's NIC in the rank's node.

    `nodes`: the node of every rank. The sum over all nodes is what the plan predicts (planning/cost/predict.py).
    """
    return [
        Load(nodes[rank], str(nic), f"{group.kind} of ranks {abbreviated(group.ranks, ',')}", amount)
        for group, rank, amount in planned
        if (nic := group.transport.nic) is not None and (nic.verbs or not nic.rdma)  # EFA etc. have no counters
    ]


class Audit:
    """Rank 0's comparison of the bytes that the NICs of every node sent with the planned bytes.

    `nodes`: the node of every rank; `factors`: fabric name or ``ethernet`` -> bytes on the wire per byte of payload.
    """

    def __init__(
        self, plan: Plan, nodes: Sequence[NodeTransports], factors: Mapping[str, float], planned: PlannedBytes
    ) -> None:
        by_name = {n.node: n for n in nodes}
        self._node_names, numbers = list(by_name), {name: number for number, name in enumerate(by_name)}
        self._node_of_rank = np.array([numbers[n.node] for n in nodes])
        self._kinds = {name: str(plan.site.fabrics[n.fabric][0].nic) for name, n in by_name.items()}
        self._factors = {
            name: {self._kinds[name]: factors.get(n.fabric, 1.0), "ethernet": factors.get("ethernet", 1.0)}
            for name, n in by_name.items()
        }
        self._loads = [
            replace(load, bytes=load.bytes * self._factors[load.node][load.kind])
            for load in planned_loads(planned, [n.node for n in nodes])
        ]
        self._names = {name: {"other": f"that the plan does not use (nics/{name}.jsonl names it)"} for name in by_name}
        for name, n in by_name.items():
            kinds = {"tcp": "ethernet", "rdma": self._kinds[name]}
            self._names[name] |= {kinds[transport]: nic[0] for transport, nic in n.interfaces.items()}
        self._planned = np.zeros((3, len(by_name)))  # bytes per step: rows Ethernet, RDMA, other; a column per node
        for load in self._loads:
            self._planned[int(load.kind != "ethernet"), numbers[load.node]] += load.bytes
        self._sums, self._steps = np.zeros((len(nodes), 7)), 0
        self._reported: set[tuple[str, str]] = set()

    def add(self, rows: Rows, is_step_only: bool = True) -> list[Finding]:
        """Add one step's byte counts of every rank (see :meth:`Traffic.take`). Return new findings at every tenth step,
        otherwise []. Each NIC is reported only once. `is_step_only`: the counts contain no traffic of a checkpoint or
        of validation; counts that do are ignored."""
        if not is_step_only:
            return []
        self._steps += 1
        self._sums += rows
        if self._steps < EVERY_STEPS:
            return []
        ethernet, _, rdma, _, unplanned, *own_sent = (
            np.bincount(self._node_of_rank, column) for column in (self._sums / self._steps).T
        )
        sent, counted, own_bytes = np.array([ethernet, rdma, unplanned]), {}, {}
        is_off = (np.abs(sent - self._planned) > TOLERANCE * self._planned + FLOOR_BYTES).any(axis=0)
        for number in np.flatnonzero(is_off):
            node = self._node_names[number]
            kinds = ("ethernet", self._kinds[node], "other")
            counted[node] = dict(zip(kinds, sent[:, number].tolist(), strict=True))
            own_bytes[node] = {
                kind: float(sent_by_node[number]) * self._factors[node][kind]
                for kind, sent_by_node in zip(kinds, own_sent, strict=False)
            }
        findings = audit_bytes(counted, self._loads, names=self._names, own_bytes=own_bytes) if counted else []
        self._sums, self._steps = np.zeros_like(self._sums), 0
        new_findings = [f for f in findings if (f.node, f.nic) not in self._reported]
        self._reported.update((f.node, f.nic) for f in new_findings)
        return new_findings


def nics_in_use(node: NodeTransports, sysfs: Path = Path("/sys")) -> list[str]:
    """Return the kernel interfaces and RDMA ports that carry this node's groups, for :func:`nic_faults`.
    RDMA ports are omitted if `sysfs` lists none, as in a container."""
    ports = node.environment.get("NCCL_IB_HCA", "").lstrip("=") if (sysfs / "class/infiniband").is_dir() else ""
    return [*(interface for interface, _ in node.interfaces.values()), *filter(None, ports.split(","))]


def nic_check(node: NodeTransports, sysfs: Path = Path("/sys")) -> Callable[[], NetworkError | None]:
    """Return a function that checks the NICs in use. It returns an error only if a NIC is down in two calls in a row,
    because a link that recovers within a second breaks no connection. Otherwise it returns None."""
    names, faults = nics_in_use(node, sysfs), dict[str, NetworkError]()

    def check() -> NetworkError | None:
        nonlocal faults
        previous, faults = faults, nic_faults(names, node.node)
        return next((fault for name, fault in faults.items() if name in previous), None)

    return check
