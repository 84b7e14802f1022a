"""Network times of a layout that do not depend on its layers, schedule and recomputation.

They are the times of stage transfers, and of collectives per parameter and per call. All variants of a layout with the
same placement of ranks share these times. In array shapes, S is the number of stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from holmes_hpc.planning.cost.costs import BYTES
from holmes_hpc.planning.cost.layout import Layout, memoised
from holmes_hpc.planning.plan.plan import Component
from holmes_hpc.planning.plan.transport import LOCAL, Transport
from holmes_hpc.planning.schedule.simulation import RowDurations


@dataclass(frozen=True)
class ReplicaTimes:
    """Network times of one pipeline replica. `down`, `up`: seconds of a stage transfer from each stage to the next and
    to the previous one, (S,). `sync`: seconds of (reducing gradients, gathering parameters), each as (per parameter,
    per bucket), (2, 2, S). `fsdp`: seconds of (gathering parameters, reducing gradients) in every pass under FSDP, each
    as (per parameter, per call). `experts`: as `sync`, for the weights of experts. `shares_nic`: whether the gradients
    of a stage and its transfers up use the same NIC, (S,)."""

    down: np.ndarray
    up: np.ndarray
    sync: np.ndarray
    fsdp: np.ndarray
    experts: np.ndarray
    shares_nic: np.ndarray


@dataclass(frozen=True)
class NetworkTimes:
    """The network times of each kind of pipeline replica, and the times of the work after all gradients are reduced.
    `tied`, `norm`, `overhead`: as in :class:`Timing`. `optimizer`: seconds per parameter that a rank updates, (S,)."""

    replicas: tuple[ReplicaTimes, ...]
    tied: float
    norm: float
    overhead: float
    optimizer: np.ndarray


@memoised()
def network_times(layout: Layout) -> NetworkTimes:
    """Return the network times of a layout."""
    replicas = range(len(layout.replicas))
    updates = [
        by_stage(layout, replica, ("optimizer",), lambda c: layout.costs.optimizer_s(1.0, layout.pool(c)))
        for replica in replicas
    ]
    return NetworkTimes(
        tuple(_replica_times(layout, replica) for replica in replicas),
        tied=tied_embedding_s(layout),
        norm=layout.norm_s,
        overhead=max(layout.costs.step_overhead_s(layout.pool(c)) for c in layout.components),
        optimizer=np.max(updates, axis=0),
    )


def _replica_times(layout: Layout, replica: int) -> ReplicaTimes:
    p, stages = layout.parallel, layout.replicas[replica]
    down, up = transfers_s(layout, replica)
    seconds = {name: np.zeros((2, 2, p.pp)) for name in ("sync", "fsdp", "experts")}
    shares_nic = np.zeros(p.pp, dtype=bool)
    spans_job = p.optimizer_instances > 1 or layout.spans_pools
    job_pools = tuple(c.pool for c in layout.components) if spans_job else ()
    for first, end in layout.stage_ranges[replica]:
        reduction, nodes = layout.intra_dp_transport(replica, first), layout.intra_dp_nodes(replica, first)
        computed = {"sync": partial(_sync_times, layout, stages[first], reduction, nodes)}
        if layout.model.experts.count:
            group = _expert_group(layout, stages[first], nodes)
            computed["experts"] = partial(_sync_times, layout, stages[first], *group)
        if layout.costs.software.sharding in ("gradients", "full"):
            computed["fsdp"] = partial(_fsdp_times, layout, stages[first], reduction, nodes)
        for name, compute in computed.items():
            key = name, stages[first].pool, reduction.kind, nodes, job_pools
            seconds[name][:, :, first:end] = layout.pool_memo.of(*key, compute=compute)[:, :, None]
        if p.pp > 1 and layout.intra_dp_size > 1:
            shares_nic[first:end] = [layout.edges[replica][(s - 1) % p.pp] == reduction for s in range(first, end)]
    return ReplicaTimes(down, up, **seconds, shares_nic=shares_nic)


def activation_bytes(layout: Layout, transport: Transport, component: Component) -> float:
    """Return the bytes that one rank sends per stage transfer, whose tensor has tokens x hidden elements.
    With sequence parallelism or scattered transfers, each TP rank sends only its part."""
    gpu = layout.pool(component).gpu
    element = layout.costs.weight_bytes(gpu)
    if transport.kind == "tcp" and layout.edge_dtype != "same":
        element = BYTES[layout.edge_dtype]
    elements = layout.batch.micro_size * layout.batch.sequence_length * layout.model.hidden
    scatters = layout.costs.software.scatter_transfers and transport.kind != "local"
    return elements * element / (layout.parallel.tp if layout.parallel.sequence_parallel or scatters else 1)


def transfer_s(layout: Layout, transport: Transport, source: Component, target: Component) -> float:
    """Return the seconds of one stage transfer. The sending or receiving ranks of a node share the node's NIC.
    All nodes of a stage transfer at the same time, so they share the `total_gbps` of a link between fabrics."""
    p, sent_bytes = layout.parallel, activation_bytes(layout, transport, source)
    if transport.kind == "local":
        return layout.latency(transport, source) + sent_bytes / layout.rate(transport, source)
    slowest_rate = min(
        layout.rate(transport, c, peer=to, nodes=_nodes_at_edge(layout, c)) / _ranks_at_edge(layout, c)
        for c, to in ((source, target), (target, source))
    )
    seconds = layout.latency(transport, source, peer=target) + sent_bytes / slowest_rate
    if layout.costs.software.scatter_transfers and p.tp > 1 and not p.sequence_parallel:
        seconds += layout.latency(LOCAL, target) + sent_bytes * (p.tp - 1) / layout.rate(LOCAL, target)
    return seconds


def _ranks_at_edge(layout: Layout, component: Component) -> int:
    p = layout.parallel
    if layout.is_hierarchical:  # of every pipeline that has the stage on this node
        return p.tp * max(1, component.gpus_per_node // (p.tp * p.pp))
    return min(component.gpus_per_node, p.dp * p.tp)


def _nodes_at_edge(layout: Layout, component: Component) -> float:
    return layout.parallel.dp * layout.parallel.tp / _ranks_at_edge(layout, component)


def transfers_s(layout: Layout, replica: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of a stage transfer (down from each stage, up from each), (S,) each."""
    stages = layout.replicas[replica]
    if len(stages) == 1:
        return np.zeros(1), np.zeros(1)
    below = (*stages[1:], stages[0])

    def seconds(stage: int, source: Component, target: Component) -> float:
        transport = layout.edges[replica][stage]
        key = "transfer", source.pool, target.pool, transport.kind
        return layout.pool_memo.of(*key, compute=partial(transfer_s, layout, transport, source, target))

    down = np.array([seconds(s, *ends) for s, ends in enumerate(zip(stages, below, strict=True))])
    up = np.array([seconds(s, *ends) for s, ends in enumerate(zip(below, stages, strict=True))])
    return down, np.roll(up, 1)


@dataclass(frozen=True)
class Ring:
    """A ring for collectives of `ranks` ranks on `nodes` nodes of `component`. `sharing`: number of such rings that
    leave a node, each of them once. `pairs`: further (from, to) pairs of components that the ring connects. Each step
    of the ring waits for its slowest connection. `senders`: number of nodes of a component that send to the other
    component of a pair at the same time, each in a different ring. These nodes share the `total_gbps` of the link."""

    layout: Layout
    component: Component
    transport: Transport
    ranks: int
    nodes: int
    sharing: float
    pairs: Sequence[tuple[Component, Component]] = ()
    senders: float = 1

    def seconds(self, op: str, factor: float, size: float) -> np.ndarray:
        """Return the seconds of a collective: (per `size` bytes of the complete tensor, per call), (2,). Each of n
        ranks sends `factor` * (n-1)/n of the tensor, in `factor` * (n-1) steps. Each step has a latency. `op`: the
        collective's name among the links of a calibration."""
        layout, component, ranks = self.layout, self.component, self.ranks
        if ranks == 1:
            return np.zeros(2)
        fill = layout.costs.collectives(layout.pool(component).gpu).gather_fill if op == "all_gather" else 0.0
        sent_share, wire = factor * (ranks - 1 + fill) / ranks, self.transport
        inside = sent_share / layout.rate(LOCAL, component, op)
        latency_s = factor * ((ranks - self.nodes) * layout.latency(LOCAL, component, op))
        if wire.kind == "local":
            return np.array([size * inside, latency_s])
        pairs = self.pairs
        rates = [layout.rate(wire, component, op), *(layout.rate(wire, a, op, b, self.senders) for a, b in pairs)]
        delays = [layout.latency(wire, component, op), *(layout.latency(wire, a, op, b) for a, b in pairs)]
        outside = sent_share * self.sharing / min(rates)
        latency_s += factor * (self.nodes - 1) * max(delays)
        return np.array([size * max(inside if ranks > self.nodes else 0.0, outside), latency_s])


def _fsdp_times(layout: Layout, component: Component, reduction: Transport, nodes: int) -> np.ndarray:
    """Return the seconds to (gather parameters, reduce gradients) per (parameter, call) in a pass of FSDP, (2, 2)."""
    costs, ring = layout.costs, Ring(layout, component, reduction, layout.intra_dp_size, nodes, layout.parallel.tp)
    weight_bytes = costs.weight_bytes(layout.pool(component).gpu)
    gather_s = ring.seconds("all_gather", 1.0, weight_bytes)
    return np.array([gather_s, ring.seconds("reduce_scatter", 1.0, costs.gradient_size)])


def _across_instances(layout: Layout, component: Component) -> np.ndarray:
    """Return the seconds in which each rank all-reduces its shard of the gradients with its peers in other optimizer
    instances, in the last backward pass: (per parameter of a stage, per bucket), (2,)."""
    p, costs, per_node = layout.parallel, layout.costs, component.gpus_per_node
    count = p.optimizer_instances
    if layout.is_hierarchical:
        senders = max(1, p.world_size / count / per_node)
        transport, links, nodes = layout.inter_dp_transport(), layout.ring_links, count
    else:
        nodes = min(count, max(1, p.dp * p.tp // per_node))
        per_node = min(per_node, layout.intra_dp_size * p.tp)  # groups with ranks on one node
        transport, links, senders = layout.transport_rule.of({component.pool}, nodes == 1), (), 1
    ring = Ring(layout, component, transport, count, nodes, per_node, links, senders)
    factor = costs.collectives(layout.pool(component).gpu).all_reduce
    return ring.seconds("reduce_scatter", factor, costs.wire_size / layout.intra_dp_size)


def _sync_times(
    layout: Layout, component: Component, transport: Transport, nodes: int, group: tuple[int, int] | None = None
) -> np.ndarray:
    """Return the seconds to (reduce gradients, gather parameters) of a stage on `component`, (2, 2).
    The columns are per parameter and per bucket. Each group of ranks spans `nodes` nodes. `group`: (ranks of a group,
    groups that leave a node); None: those of the intra-DP groups."""
    p, gpu, costs = layout.parallel, layout.pool(component).gpu, layout.costs
    library = costs.collectives(gpu)
    sharing = p.tp * (min(p.pp, component.gpus_per_node // p.tp) if layout.is_hierarchical else 1)
    ranks, sharing = group or (layout.intra_dp_size, sharing)
    ring = Ring(layout, component, transport, ranks, nodes, sharing, layout.ring if layout.spans_pools else ())
    factor = library.reduce_scatter(ranks, nodes, p.optimizer_instances)
    if costs.software.all_reduced or not p.distributed_optimizer:
        factor = library.all_reduce
    reduce = ring.seconds("reduce_scatter", factor, costs.wire_size)
    if not p.distributed_optimizer:
        return np.array([reduce, np.zeros(2)])
    if p.optimizer_instances > 1:
        across = _across_instances(layout, component)
        is_fsdp = costs.software.sharding in ("gradients", "full")  # its passes include the reduction inside
        reduce = across if is_fsdp else reduce + across
    return np.array([reduce, ring.seconds("all_gather", library.all_gather, costs.weight_bytes(gpu))])


def _expert_group(layout: Layout, component: Component, nodes: int) -> tuple[Transport, int, tuple[int, int]]:
    """Return (transport, nodes, (ranks, groups that leave a node)) of a group of ranks with the same experts.
    `nodes`: the number of nodes that an intra-DP group spans."""
    p = layout.parallel
    ranks = p.stages[0].ranks // p.expert_ranks
    nodes = min(ranks, nodes)
    senders = min(p.expert_ranks, component.gpus_per_node)
    return layout.transport_rule.of({component.pool}, nodes == 1), nodes, (ranks, senders)


@memoised()
def tied_embedding_s(layout: Layout) -> float:
    """Return the seconds of the all-reduce of a tied embedding's gradient between the first and the last stage.
    Pairs of ranks reduce one part each. With per-stage TP/DP, all ranks of both stages reduce the whole gradient."""
    p, rings = layout.parallel, list[Ring]()
    if not layout.model.tied or p.pp == 1:
        return 0.0
    size = embedding_bytes(layout) / (1 if layout.is_per_stage else p.tp)
    for replica, stages in enumerate(layout.replicas):
        pair = stages[0], stages[-1]
        for component in pair:
            wire = layout.embedding_transport(replica)
            if layout.is_per_stage:
                sizes = p.stages[0].ranks, p.stages[-1].ranks
                nodes = sum(ranks // c.gpus_per_node for ranks, c in zip(sizes, pair, strict=True))
                rings.append(Ring(layout, component, wire, sum(sizes), nodes, 1.0, [pair]))
            else:
                sharing = 1 if wire.kind == "local" else _ranks_at_edge(layout, component)
                rings.append(Ring(layout, component, wire, 2, 2, sharing, [pair], _nodes_at_edge(layout, component)))
    return max(float(ring.seconds("reduce_scatter", 2.0, size).sum()) for ring in rings)


def by_stage(
    layout: Layout, replica: int, name: tuple[object, ...], compute: Callable[[Component], float | tuple[float, ...]]
) -> np.ndarray:
    """Return the value of `compute` for the component of each stage, (S,) or (S, values).
    It must depend only on the component's pool, because it is cached by `name` and pool."""
    ranges = layout.stage_ranges[replica]
    components = [layout.replicas[replica][first] for first, _ in ranges]
    values = [layout.pool_memo.of(*name, c.pool, compute=partial(compute, c)) for c in components]
    return np.repeat(np.array(values), [end - first for first, end in ranges], axis=0)


@memoised()
def edge_times(layout: Layout) -> RowDurations:
    """Return the stage transfer times of a layout with per-stage TP/DP, as `RowDurations` without passes.
    A transfer occupies the NIC of its sender's node and of its receiver's node."""
    pp = layout.parallel.pp
    edge_transports = layout.edges[0][:-1]
    transports = list(dict.fromkeys(edge_transports))
    nodes, first_node = list[int](), 0
    for component in layout.components:
        for s in component.stages:
            sizes = layout.parallel.stages[s]
            nodes += [first_node + r * sizes.tp * sizes.cp // component.gpus_per_node for r in range(sizes.dp)]
            first_node += sizes.ranks // component.gpus_per_node
    down, up = ([_edge_times(layout, s, forward) for s in range(pp - 1)] for forward in (True, False))
    indices = [transports.index(wire) for wire in edge_transports]
    return RowDurations((), (), (), (), down=down, up=up, node=nodes, wire=indices)


def _edge_times(layout: Layout, upper: int, forward: bool) -> tuple[float, float]:
    """Return (seconds that a transfer occupies both nodes, seconds of latency) for the edge below stage `upper`.
    A node has one transfer at a time. Therefore, if one side of a link between fabrics has fewer nodes, the number of
    these nodes is the number of transfers that share the link."""
    ends = [(layout.views[s].layout, layout.replicas[0][s]) for s in (upper, upper + 1)]
    transport = layout.edges[0][upper]
    nodes = min(_nodes_at_edge(view, end) for view, end in ends)
    busy_s = max(
        activation_bytes(view, transport, end)
        * min(view.parallel.tp * view.parallel.cp, end.gpus_per_node)
        / view.rate(transport, end, peer=peer, nodes=nodes)
        for (view, end), (_, peer) in (ends, ends[::-1])
    )
    (view, source), (_, target) = ends if forward else ends[::-1]
    return busy_s, view.latency(transport, source, peer=target)


def embedding_bytes(layout: Layout) -> float:
    """Return the bytes of a tied embedding's gradient, on all TP ranks together."""
    vocabulary = layout.model.padded_vocab(layout.parallel.vocabulary_parts)
    return float(vocabulary * layout.model.hidden * layout.costs.gradient_size)
