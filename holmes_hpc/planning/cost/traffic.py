"""What the networks take of a layout, whatever its layers, schedule and recomputation: stage transfers, and collectives
by parameter and by call. Worked out once for all ways to run one placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from holmes_hpc.planning.cost.costs import BYTES
from holmes_hpc.planning.cost.layout import Layout, remembered
from holmes_hpc.planning.plan.plan import Component
from holmes_hpc.planning.plan.transport import Transport
from holmes_hpc.planning.schedule.simulation import RowDurations


@dataclass(frozen=True)
class Traffic:
    """What the networks take of one pipeline replica, whatever its layers, schedule and recomputation.

    `down`, `up`: seconds of a stage transfer from each stage, (S,). `reduce`, `gather`: of a gradients' reduction and
    of gathering parameters, for each parameter and for each bucket, (2, S); `passing`: the same for (gathering,
    reducing) that FSDP does in every pass, (2, 2, S). `beside`: whether gradients go by
    the NIC that the transfers up go by, (S,).
    """

    down: np.ndarray
    up: np.ndarray
    reduce: np.ndarray
    gather: np.ndarray
    passing: np.ndarray
    beside: np.ndarray


@dataclass(frozen=True)
class Networks:
    """Of all replicas, and what follows when all gradients are reduced, as :class:`Timing` has it; `optimizer`: of a
    parameter that a rank updates, (S,)."""

    replicas: tuple[Traffic, ...]
    tied: float
    norm: float
    other: float
    optimizer: np.ndarray


@remembered()
def networks(layout: Layout) -> Networks:
    """Return what the networks take of a layout."""
    replicas = range(len(layout.replicas))
    updates = [
        by_stage(layout, replica, ("optimizer",), lambda c: layout.costs.optimizer_s(1.0, layout.fabric(c)))
        for replica in replicas
    ]
    return Networks(
        tuple(_traffic(layout, replica) for replica in replicas),
        tied=_tied_s(layout),
        norm=_norm_s(layout),
        other=max(layout.costs.step_s(layout.fabric(c)) for c in layout.components),
        optimizer=np.max(updates, axis=0),
    )


def _traffic(layout: Layout, replica: int) -> Traffic:
    p, stages, costs = layout.parallel, layout.replicas[replica], layout.costs
    down, up = transfers_s(layout, replica)
    reduce, gather, passing = np.zeros((2, p.pp)), np.zeros((2, p.pp)), np.zeros((2, 2, p.pp))
    beside = np.zeros(p.pp, dtype=bool)
    in_passes = costs.software.sharding in ("gradients", "full")
    others = tuple(c.fabric for c in layout.components) if p.optimizer_instances > 1 else ()
    for first, end in layout.runs[replica]:
        reduction, nodes = layout.reduction(replica, first), layout.nodes_of_run(replica, first)
        key = stages[first].fabric, reduction.kind, nodes, others
        found = layout.common.of(
            "synchronise", *key, compute=partial(_synchronise, layout, stages[first], reduction, nodes)
        )
        reduce[:, first:end], gather[:, first:end] = found[0][:, None], found[1][:, None]
        if in_passes:
            each = layout.common.of("passing", *key, compute=partial(_passing, layout, stages[first], reduction, nodes))
            passing[:, :, first:end] = each[:, :, None]
        if p.pp > 1 and layout.run > 1:
            beside[first:end] = [layout.edges[replica][(s - 1) % p.pp] == reduction for s in range(first, end)]
    return Traffic(down, up, reduce, gather=gather, passing=passing, beside=beside)


def activation_bytes(layout: Layout, transport: Transport, component: Component) -> float:
    """Of one stage transfer of one rank: T x h elements; with sequence parallel each of the `tp` ranks sends its
    part."""
    gpu = layout.fabric(component).gpu
    element = layout.costs.weight_bytes(gpu)
    if transport.kind == "tcp" and layout.edge_dtype != "same":
        element = BYTES[layout.edge_dtype]
    elements = layout.batch.micro_size * layout.batch.sequence_length * layout.model.hidden
    parts = layout.parallel.sequence_parallel or (layout.costs.software.scatter_transfers and transport.kind != "local")
    return elements * element / (layout.parallel.tp if parts else 1)


def transfer_s(layout: Layout, transport: Transport, source: Component, target: Component) -> float:
    """Return the seconds of one stage transfer. The ranks of a node that sit at its edge share the node's NIC."""
    p, sent = layout.parallel, activation_bytes(layout, transport, source)
    if transport.kind == "local":
        return layout.latency(transport, source) + sent / layout.rate(transport, source)
    slowest = min(
        layout.rate(transport, c, peer=to) / _ranks_at_edge(layout, c) for c, to in ((source, target), (target, source))
    )
    seconds = layout.latency(transport, source, peer=target) + sent / slowest
    if layout.costs.software.scatter_transfers and p.tp > 1 and not p.sequence_parallel:
        local = Transport("local")
        seconds += layout.latency(local, target) + sent * (p.tp - 1) / layout.rate(local, target)
    return seconds


def _ranks_at_edge(layout: Layout, component: Component) -> int:
    p = layout.parallel
    if layout.hierarchical:  # as many pipelines as a node holds a stage of at once
        return p.tp * max(1, component.gpus_per_node // (p.tp * p.pp))
    return min(component.gpus_per_node, p.dp * p.tp)


def transfers_s(layout: Layout, replica: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of a stage transfer (down from each stage, up from each), (S,) each; equal neighbours have
    equal ones."""
    stages = layout.replicas[replica]
    if len(stages) == 1:
        return np.zeros(1), np.zeros(1)
    below = (*stages[1:], stages[0])

    def seconds(stage: int, source: Component, target: Component) -> float:
        transport = layout.edges[replica][stage]
        return layout.common.of(
            *("transfer", source.fabric, target.fabric, transport.kind),
            compute=partial(transfer_s, layout, transport, source, target),
        )

    down = np.array([seconds(s, *ends) for s, ends in enumerate(zip(stages, below, strict=True))])
    up = np.array([seconds(s, *ends) for s, ends in enumerate(zip(below, stages, strict=True))])
    return down, np.roll(up, 1)


def collective(
    layout: Layout,
    component: Component,
    transport: Transport,
    ranks: int,
    nodes: int,
    what: str,
    factor: float,
    sharing: float,
    pairs: Sequence[tuple[Component, Component]] = (),
) -> np.ndarray:
    """Seconds of a ring collective (`what` its link is called) for each byte of the whole tensor and for each call,
    (2,): each rank sends `factor` * (n-1)/n of it; `sharing` groups go out of one node, each once; a ring has as many
    steps as ranks, of which each has a latency. `pairs`: of components that it goes from and to, beside its way through
    this one; each step waits for the slowest."""
    if ranks == 1:
        return np.zeros(2)
    fill = layout.costs.collectives(layout.fabric(component).gpu).gather_fill if what == "all_gather" else 0.0
    sent = factor * (ranks - 1 + fill) / ranks
    local = Transport("local")
    inside = sent / layout.rate(local, component, what)
    steps = factor * ((ranks - nodes) * layout.latency(local, component, what))
    if transport.kind == "local":
        return np.array([inside, steps])
    rates = [layout.rate(transport, component, what), *(layout.rate(transport, a, what, b) for a, b in pairs)]
    latencies = [layout.latency(transport, component, what), *(layout.latency(transport, a, what, b) for a, b in pairs)]
    outside = sent * sharing / min(rates)
    steps += factor * (nodes - 1) * max(latencies)
    return np.array([max(inside if ranks > nodes else 0.0, outside), steps])


def _passing(layout: Layout, component: Component, reduction: Transport, nodes: int) -> np.ndarray:
    """Seconds to (gather the parameters, reduce the gradients) in every pass, for each parameter and each call, (2, 2),
    as FSDP does."""
    gpu, costs, tp = layout.fabric(component).gpu, layout.costs, layout.parallel.tp
    return np.array(
        [
            np.array([size, 1.0])
            * collective(layout, component, reduction, ranks=layout.run, nodes=nodes, what=what, factor=1.0, sharing=tp)
            for what, size in (("all_gather", costs.weight_bytes(gpu)), ("reduce_scatter", costs.gradient_size))
        ]
    )


def _synchronise(
    layout: Layout, component: Component, transport: Transport, nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds to (reduce the gradients, gather the parameters) of a stage of one component, by runs over `nodes` of its
    nodes: for each parameter, and for each bucket, (2,) each."""
    p, gpu, costs = layout.parallel, layout.fabric(component).gpu, layout.costs
    how = costs.collectives(gpu)
    sharing = p.tp * (min(p.pp, component.gpus_per_node // p.tp) if layout.hierarchical else 1)

    def ring(what: str, factor: float, size: float) -> np.ndarray:
        return np.array([size, 1.0]) * collective(
            layout, component, transport, ranks=layout.run, nodes=nodes, what=what, factor=factor, sharing=sharing
        )

    if not p.distributed_optimizer:
        return ring("reduce_scatter", how.all_reduce, costs.wire_size), np.zeros(2)
    factor = how.all_reduce if costs.software.all_reduced else how.reduce_scatter
    reduce = ring("reduce_scatter", factor, costs.wire_size)
    if p.optimizer_instances > 1:  # each rank all-reduces its shard with its peers of the other instances
        reduce = reduce + np.array([costs.wire_size / layout.run, 1.0]) * collective(
            layout,
            component,
            layout.across(),
            ranks=p.optimizer_instances,
            nodes=p.optimizer_instances,
            what="reduce_scatter",
            factor=how.all_reduce,
            sharing=component.gpus_per_node,
            pairs=layout.linked,
        )
    return reduce, ring("all_gather", how.all_gather, costs.weight_bytes(gpu))


def _tied_s(layout: Layout) -> float:
    """A tied embedding's gradient, all-reduced between the first and the last stage."""
    p = layout.parallel
    if not layout.model.tied or p.pp == 1:
        return 0.0
    times = []
    for replica, stages in enumerate(layout.replicas):
        transport = layout.ends(replica)
        pair = stages[0], stages[-1]
        for component in pair:
            sharing = 1 if transport.kind == "local" else _ranks_at_edge(layout, component)
            byte, call = collective(
                layout,
                component,
                transport,
                ranks=2,
                nodes=2,
                what="reduce_scatter",
                factor=2.0,
                sharing=sharing,
                pairs=[pair],
            )
            times.append(float(embedding_bytes(layout) / p.tp * byte + call))
    return max(times)


def _norm_s(layout: Layout) -> float:
    """The gradient norm: one number, all-reduced by everyone, up and down a tree; a calibration has it in its step."""
    if layout.costs.calibration is not None and layout.costs.calibration.step_s:
        return 0.0
    steps = 2 * math.ceil(math.log2(max(1, layout.parallel.world_size)))
    shared, pairs = layout.rule.shared, (*((c, c) for c in layout.components), *layout.linked)
    return steps * layout.common.of(
        *("norm", shared.kind, *(c.fabric for c in layout.components)),
        compute=lambda: max(layout.latency(shared, c, "reduce_scatter", to) for c, to in pairs),
    )


def by_stage(
    layout: Layout, replica: int, what: tuple[object, ...], of: Callable[[Component], float | tuple[float, ...]]
) -> np.ndarray:
    """`of` each stage's component, (S,) or (S, numbers), which must go by its fabric alone: asked once for each under
    the name `what`."""
    stages, pieces = layout.replicas[replica], layout.runs[replica]
    asked = np.array(
        [layout.common.of(*what, stages[first].fabric, compute=partial(of, stages[first])) for first, _ in pieces]
    )
    return np.repeat(asked, [end - first for first, end in pieces], axis=0)


@remembered()
def edges(layout: Layout) -> RowDurations:
    """Return what the stage transfers of a layout that is per stage take: `RowDurations` whose passes are not filled
    in. Over each edge a transfer of one replica takes its node's NIC at either end."""
    pp = layout.parallel.pp
    wires = [layout.views[s].edges[0][s] for s in range(pp - 1)]
    networks = list(dict.fromkeys(wires))
    nodes, first = list[int](), 0
    for component in layout.components:
        for s in component.stages:
            sizes = layout.parallel.stages[s]
            nodes += [first + r * sizes.tp // component.gpus_per_node for r in range(sizes.dp)]
            first += sizes.ranks // component.gpus_per_node
    down, up = ([_edge_s(layout, s, forward) for s in range(pp - 1)] for forward in (True, False))
    indices = [networks.index(wire) for wire in wires]
    return RowDurations((), (), (), (), down=down, up=up, node=nodes, wire=indices)


def _edge_s(layout: Layout, upper: int, forward: bool) -> tuple[float, float]:
    ends = [(layout.views[s], layout.replicas[0][s]) for s in (upper, upper + 1)]
    transport = ends[0][0].edges[0][upper]
    busy = max(
        activation_bytes(view, transport, here) * view.parallel.tp / view.rate(transport, here, peer=there)
        for (view, here), (_, there) in (ends, ends[::-1])
    )
    (view, source), (_, target) = ends if forward else ends[::-1]
    return busy, view.latency(transport, source, peer=target)


def embedding_bytes(layout: Layout) -> float:
    """Return the bytes of a tied embedding's gradient, on all TP ranks together."""
    vocabulary = layout.model.padded_vocab(layout.parallel.vocabulary_parts)
    return float(vocabulary * layout.model.hidden * layout.costs.gradient_size)


@remembered()
def tied_per_stage_s(layout: Layout) -> float:
    """Return the seconds in which the tied embedding's gradient is summed over all ranks of the first and the last
    stage."""
    if not layout.model.tied or layout.parallel.pp == 1:
        return 0.0
    ends = (0, layout.parallel.pp - 1)
    sizes = [layout.parallel.stages[s].ranks for s in ends]
    components = [layout.replicas[0][s] for s in ends]
    nodes = sum(ranks // c.gpus_per_node for ranks, c in zip(sizes, components, strict=True))
    times = []
    for stage, component in zip(ends, components, strict=True):
        view = layout.views[stage]
        byte, call = collective(
            view, component, view.ends(), ranks=sum(sizes), nodes=nodes, what="reduce_scatter", factor=2.0, sharing=1.0
        )
        times.append(float(embedding_bytes(layout) * byte + call))
    return max(times)
