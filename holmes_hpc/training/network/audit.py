"""Are the NICs used as planned? Bytes counted against bytes planned, node by node, and NICs that go down in mid-run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_hpc.errors import NetworkError
from holmes_hpc.fabric.finding import Finding
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.per_stage import sent_bytes
from holmes_hpc.planning.cost.predict import layer_array
from holmes_hpc.planning.cost.timing import parameters
from holmes_hpc.planning.cost.traffic import activation_bytes
from holmes_hpc.planning.spec.plan import GroupTransport, Plan
from holmes_hpc.training.network.accounting import Load, audit_bytes, nic_faults
from holmes_hpc.training.network.interfaces import NodeTransports, short

EVERY_STEPS = 10  # between comparisons: a NIC that goes wrong anywhere between two is seen within 20


def loads(plan: Plan, nodes: Sequence[str], dtype: str | None = None) -> list[Load]:
    """What each group makes each node send in one step: payload bytes, over the NIC that the group belongs on.

    `nodes`: every rank's node; `dtype`: of weights and activations, None: the device's usual one. The sums over nodes
    are the plan's predicted bytes (planning/predict.py), of which this is the part that one node sends for one group.
    """
    layout = Layout.of(plan, Costs(dtype=dtype))
    if plan.is_per_stage:
        return [
            Load(nodes[rank], str(group.transport.nic), f"{group.kind} of ranks {short(group.ranks)}", amount)
            for group, rank, amount in sent_bytes(layout, layer_array(plan))
            if group.transport.nic is not None and (group.transport.nic.verbs or not group.transport.nic.rdma)
        ]
    count = parameters(layout, layer_array(plan))[0].sum(axis=1)
    found = []
    for group in plan.transports():
        if group.transport.nic is None or (group.transport.nic.rdma and not group.transport.nic.verbs):
            continue  # the node itself, or what has no counters that are read
        kind = str(group.transport.nic)
        label = f"{group.kind} of ranks {short(group.ranks)}"
        for rank, amount in _sent(layout, plan, group, count, nodes):
            found.append(Load(nodes[rank], kind, label, amount))
    return found


def _sent(
    layout: Layout, plan: Plan, group: GroupTransport, count: Any, nodes: Sequence[str]
) -> Iterator[tuple[int, float]]:
    """Ranks whose node sends for this group, and how many bytes."""
    p, ranks = layout.parallel, group.ranks
    component = plan.components[plan.component_of(ranks[0])]
    gpu = layout.fabric(component).gpu
    how = layout.costs.collectives(gpu)
    if group.kind == "edge":
        chunks, micro_batches = p.virtual_stages, plan.micro_batches
        transfers = micro_batches * (chunks if group.stages[0] < group.stages[1] else chunks - 1)
        if p.pp == 2:  # the way back to the first stage is between the same two ranks
            transfers += micro_batches * (chunks - 1)
        for rank in ranks:
            yield rank, transfers * activation_bytes(layout, group.transport, component)
    elif group.kind == "embd" and plan.model.tied:
        whole = plan.model.padded_vocab(p.tp) / p.tp * plan.model.hidden * layout.costs.gradient_size(gpu)
        for rank in ranks:
            yield rank, how.all_reduce / 2 * whole
    elif group.kind == ("intra_dp" if p.optimizer_instances > 1 else "dp"):
        n, parameters_here = len(ranks), float(count[group.stages[0]])
        gradients = parameters_here * layout.costs.gradient_size(gpu)
        weights = parameters_here * layout.costs.weight_bytes(gpu)
        amount = (
            how.reduce_scatter * gradients + how.all_gather * weights
            if p.distributed_optimizer
            else how.all_reduce * gradients
        )
        first_ranks = {nodes[rank]: rank for rank in reversed(ranks)}  # a ring leaves each of its nodes once
        for rank in first_ranks.values():
            yield rank, amount * (n - 1) / n
    elif group.kind == "inter_dp":
        k = p.optimizer_instances
        gradients = float(count[group.stages[0]]) * layout.costs.gradient_size(gpu)
        for rank in ranks:
            yield rank, how.all_reduce * (k - 1) / k * gradients / layout.run


class Audit:
    """Rank 0's comparison of what every node's NICs sent with what the plan expects of them.

    `factors`: fabric or ``ethernet`` -> bytes on the wire per byte of payload.
    """

    def __init__(
        self, plan: Plan, nodes: Sequence[NodeTransports], factors: Mapping[str, float], dtype: str | None = None
    ) -> None:
        self._nodes = [n.node for n in nodes]
        self._kinds = [str(plan.site.fabric(n.fabric).nic) for n in nodes]
        fabrics = dict(zip(self._nodes, (n.fabric for n in nodes), strict=True))
        self._factors = {
            n.node: {"ethernet": factors.get("ethernet", 1.0), rdma: factors.get(n.fabric, 1.0)}
            for n, rdma in zip(nodes, self._kinds, strict=True)
        }
        self._loads = [
            Load(
                x.node,
                x.kind,
                x.label,
                x.bytes * factors.get("ethernet" if x.kind == "ethernet" else fabrics[x.node], 1.0),
            )
            for x in loads(plan, self._nodes, dtype)
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
        self._sums: dict[str, dict[str, float]] = {}
        self._own: dict[str, dict[str, float]] = {}
        self._warm, self._steps = False, 0
        self._said: set[tuple[str, str]] = set()

    def add(self, rows: Sequence[Sequence[float]], alone: bool = True) -> list[Finding]:
        """One step's counters of every rank (see :meth:`Traffic.take`). What is wrong comes back with every tenth step,
        once for each NIC. `alone`: nothing but the step happened since the step before; other steps are not counted."""
        if not self._warm or not alone:
            self._warm = True  # connections are made in the first step
            return []
        self._steps += 1
        for rank, (ethernet, _, rdma, _, other, *by_own) in enumerate(rows):
            node = self._nodes[rank]
            sums, owns = self._sums.setdefault(node, {}), self._own.setdefault(node, {})
            for kind, sent in (("ethernet", ethernet), (self._kinds[rank], rdma), ("other", other)):
                sums[kind] = sums.get(kind, 0.0) + sent
            for kind, sent in zip(("ethernet", self._kinds[rank]), by_own, strict=True):
                owns[kind] = owns.get(kind, 0.0) + sent * self._factors[node][kind]
        if self._steps < EVERY_STEPS:
            return []
        counted, own = (
            {node: {kind: sent / self._steps for kind, sent in kinds.items()} for node, kinds in sums.items()}
            for sums in (self._sums, self._own)
        )
        found = audit_bytes(counted, self._loads, names=self._names, own=own)
        self._sums, self._own, self._steps = {}, {}, 0
        new = [f for f in found if (f.node, f.nic) not in self._said]
        self._said.update((f.node, f.nic) for f in new)
        return new


def nics_in_use(node: NodeTransports) -> list[str]:
    """Kernel interfaces and RDMA ports that carry this node's groups, as :func:`nic_faults` names them."""
    ports = node.environment.get("NCCL_IB_HCA", "").lstrip("=")
    return [
        *(interface for kind, (interface, _, _) in node.interfaces.items() if kind != "local"),
        *(ports.split(",") if ports else []),
    ]


def nic_check(node: NodeTransports, sysfs: Path = Path("/sys")) -> Callable[[], NetworkError | None]:
    """A cheap look at the NICs in use: the error of the first that went down and is still down at the next look (links
    that come back within a second harm no connection). RDMA ports are left out where `sysfs` shows none (a container).
    """
    names, before = nics_in_use(node), set[str]()
    if not (sysfs / "class/infiniband").is_dir():
        names = [name for name in names if any(name == interface for interface, _, _ in node.interfaces.values())]

    def look() -> NetworkError | None:
        nonlocal before
        faults = nic_faults(names, node.node)
        again = next((f for f in faults if f.nic in before), None)
        before = {f.nic for f in faults}
        return NetworkError(again.what, where=again.where, hint=again.hint) if again else None

    return look
