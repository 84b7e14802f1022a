"""From a layout and its layers to seconds and bytes: what each pass, stage transfer and collective takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from holmes_hpc.planning.cost.costs import BYTES
from holmes_hpc.planning.cost.flops import embedding_parameters, head_parameters, layer_parameters
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.schedule.simulation import WHOLE, Durations, least_seconds, step_seconds
from holmes_hpc.planning.spec.plan import Component
from holmes_hpc.planning.spec.transport import Transport


def parameters(layout: Layout, layers: np.ndarray) -> np.ndarray:
    """Parameters on one rank of each stage and chunk, (plans, S, C), from layers of the same shape. A tied head on
    another stage than the embedding has a copy of its matrix."""
    model, tp = layout.model, layout.parallel.tp
    count = layers.astype(np.float64) * layer_parameters(model, tp)
    count[:, 0, 0] += embedding_parameters(model, tp)
    count[:, -1, -1] += head_parameters(model, tp, own_matrix=not (model.tied and layout.parallel.pp == 1))
    return count


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


def transfer_s(layout: Layout, replica: int, stage: int, forward: bool) -> float:
    """One stage transfer over the edge below `stage`, down or up. The ranks of a node that sit at this edge share its
    NIC."""
    p, stages = layout.parallel, layout.replicas[replica]
    source, target = stages[stage], stages[(stage + 1) % p.pp]
    if not forward:
        source, target = target, source
    transport = layout.edge(replica, stage)
    sent = activation_bytes(layout, transport, source)
    if transport.kind == "local":
        return layout.latency(transport, source) + sent / layout.rate(transport, source)
    slowest = min(layout.rate(transport, c, peer=to) / _ranks_at_edge(layout, c)
                  for c, to in ((source, target), (target, source)))
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


def collective_s(layout: Layout, component: Component, transport: Transport, ranks: int, nodes: int, what: str,
                 factor: float, whole: np.ndarray, sharing: float, calls: np.ndarray | float = 1.0,
                 pairs: Sequence[tuple[Component, Component]] = ()) -> np.ndarray:
    """Seconds of a ring collective (`what` its link is called): each rank sends `factor` * (n-1)/n of `whole` bytes;
    `sharing` groups go out of one node, each once; a ring has as many steps as ranks, of which each has a latency,
    `calls` times. `pairs`: of components that it goes from and to, beside its way through this one; each step waits for
    the slowest."""
    if ranks == 1:
        return np.zeros_like(whole)
    fill = layout.costs.collectives(layout.fabric(component).gpu).gather_fill if what == "all_gather" else 0.0
    sent = factor * (ranks - 1 + fill) / ranks * whole
    local = Transport("local")
    inside = sent / layout.rate(local, component, what)
    steps = factor * ((ranks - nodes) * layout.latency(local, component, what))
    if transport.kind == "local":
        return inside + steps * calls
    rates = [layout.rate(transport, component, what), *(layout.rate(transport, a, what, b) for a, b in pairs)]
    latencies = [layout.latency(transport, component, what), *(layout.latency(transport, a, what, b) for a, b in pairs)]
    outside = sent * sharing / min(rates)
    steps += factor * (nodes - 1) * max(latencies)
    return np.maximum(inside if ranks > nodes else 0, outside) + steps * calls


@dataclass(frozen=True)
class Timing:
    """Seconds for each of several layer splits of one layout. `replicas`: of the pipeline(s); `tied`, `norm`,
    `optimizer`, `other`: what follows when all gradients are reduced; `optimizer` is (plans,)."""

    replicas: tuple[Durations, ...]
    shared: tuple[tuple[bool, ...], ...]
    tied: float
    norm: float
    optimizer: np.ndarray
    other: float

    def after(self) -> np.ndarray:
        return self.tied + self.norm + self.other + self.optimizer


def timing(layout: Layout, layers: np.ndarray, bucket_bytes: np.ndarray | None = None) -> Timing:
    """Everything that takes time, for layer splits of shape (plans, S, C), and if wanted a bucket size for each."""
    replicas, shared = [], []
    sizes = np.full(len(layers), layout.bucket_bytes) if bucket_bytes is None else bucket_bytes
    for replica in range(len(layout.replicas)):
        made, nic = _replica(layout, replica, layers, sizes)
        replicas.append(made)
        shared.append(nic)
    p = layout.parallel
    updated = parameters(layout, layers).sum(axis=2) / (layout.run if p.distributed_optimizer else 1)
    each = np.max([by_stage(replica, lambda c: layout.costs.optimizer_s(1.0, layout.fabric(c)))
                   for replica in layout.replicas], axis=0)
    other = max(layout.costs.step_s(layout.fabric(c)) for c in layout.components)
    return Timing(tuple(replicas), tuple(shared), _tied_s(layout), _norm_s(layout), (updated * each).max(axis=1), other)


def step_s(layout: Layout, layers: np.ndarray, passes: int = WHOLE) -> np.ndarray:
    """Seconds of a step for layer splits of shape (plans, S, C): the slowest pipeline, and what follows. `passes`: to
    simulate before the rest is extended."""
    times = timing(layout, layers)
    ends = [step_seconds(layout.order, d, nic, passes) for d, nic in zip(times.replicas, times.shared, strict=True)]
    return np.max(ends, axis=0) + times.after()


def least_s(layout: Layout, layers: np.ndarray, bucket_bytes: np.ndarray | None = None,
            ) -> tuple[np.ndarray, np.ndarray]:
    """(a lower bound of :func:`step_s`, much quicker; the bound and all data-parallel traffic that nothing hides)."""
    times = timing(layout, layers, bucket_bytes)
    least = np.max([least_seconds(layout.order, d, nic) for d, nic in zip(times.replicas, times.shared, strict=True)],
                   axis=0) + times.after()
    open_s = np.max([d.ready.sum(axis=(1, 2)) + d.tail.max(axis=(1, 2)) for d in times.replicas], axis=0)
    return least, least + open_s


def _replica(layout: Layout, replica: int, layers: np.ndarray, bucket_bytes: np.ndarray,
          ) -> tuple[Durations, tuple[bool, ...]]:
    p, stages = layout.parallel, layout.replicas[replica]
    plans = len(layers)
    forward, backward = compute_s(layout, replica, layers)
    down, up = transfers_s(layout, replica)
    count = parameters(layout, layers)
    reduce, gather = np.zeros_like(count), np.zeros_like(count)
    buckets = _buckets(layout, replica, count, bucket_bytes)
    for first, end in runs(stages):
        reduce[:, first:end], gather[:, first:end] = _synchronise_s(
            layout, replica, first, stages[first], count[:, first:end], buckets[:, first:end])
    if layout.costs.software.sharding in ("gradients", "full"):  # in every pass, and what the last layer leaves
        gather, reduce = np.zeros_like(gather), reduce / np.maximum(1, layers.sum(axis=2, keepdims=True))
    ready, tail = gather, reduce
    if _apart(layout):
        reduce = np.concatenate([reduce.sum(axis=2, keepdims=True), np.zeros_like(reduce[:, :, 1:])], axis=2)
        tail = reduce
    elif layout.costs.software.overlap:
        hidden, tail = _exposed(layout, layers, forward, backward, gather, reduce, buckets)
        ready = hidden if layout.costs.software.overlap_gather else gather
    last_up = np.tile(up, (plans, 1))
    for first, end in runs(stages) if p.pp > 1 and layout.run > 1 else ():
        reduction = layout.reduction(replica, first)
        for s in range(first, end):
            if layout.edge(replica, (s - 1) % p.pp) == reduction:
                last_up[:, s] = np.minimum(2 * up[s], up[s] + reduce[:, s, 0])  # both on one NIC, at the same moment
    nic = tuple(_one_nic(layout, replica, s) for s in range(p.pp))
    return Durations(forward, backward, np.tile(down, (plans, 1)), np.tile(up, (plans, 1)), last_up, ready, reduce,
                     tail), nic


def _apart(layout: Layout) -> bool:
    """Does all of the data-parallel traffic come after the last backward pass? Megatron-Core's overlap of several
    optimizer instances takes CUDA streams (training.model.optimizer.wrap)."""
    return layout.parallel.optimizer_instances > 1 and any(
        layout.fabric(c).gpu.is_cpu for c in layout.components)


def _exposed(layout: Layout, layers: np.ndarray, forward: np.ndarray, backward: np.ndarray, gather: np.ndarray,
             reduce: np.ndarray, buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is left of (gathering parameters, reducing gradients) beside a chunk's first and last pass: a bucket's
    traffic goes beside the others' computing, and a gather fetches one bucket ahead. A paced layer computes in no time
    and waits for the rest of its own: what it waits for its parameters is part of that, and gradients come at its end.
    """
    if layout.costs.pace_layer_ms is None:
        tail = np.maximum(reduce / buckets, reduce - backward * (1 - 1 / buckets))
        return gather / buckets + (buckets - 1) / buckets * np.maximum(0, gather - forward), tail
    pieces = np.minimum(buckets, np.maximum(1, layers))
    tail = np.maximum(reduce / pieces, reduce - backward * (1 - 1 / pieces))
    each, takes, layer = gather / pieces, forward / pieces, forward / np.maximum(1, layers)
    return np.maximum(0, each - layer) + (pieces - 1) * np.maximum(0, each - takes), tail


def transfers_s(layout: Layout, replica: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a stage transfer (down from each stage, up from each), (S,) each; equal neighbours have equal ones."""
    p, stages = layout.parallel, layout.replicas[replica]
    known: dict[tuple[object, ...], float] = {}

    def transfer(stage: int, forward: bool) -> float:
        here, there = stages[stage], stages[(stage + 1) % p.pp]
        key = here.fabric, there.fabric, layout.edge(replica, stage).kind, forward
        if key not in known:
            known[key] = transfer_s(layout, replica, stage, forward)
        return known[key]

    if p.pp == 1:
        return np.zeros(1), np.zeros(1)
    return (np.array([transfer(s, True) for s in range(p.pp)]),
            np.array([transfer((s - 1) % p.pp, False) for s in range(p.pp)]))


def runs(stages: Sequence[Component]) -> list[tuple[int, int]]:
    """(first, end) of each run of stages of one component."""
    starts = [s for s in range(len(stages)) if s == 0 or stages[s] is not stages[s - 1]]
    return list(zip(starts, [*starts[1:], len(stages)], strict=True))


def by_stage(stages: Sequence[Component], of: Callable[[Component], float | tuple[float, ...]]) -> np.ndarray:
    """`of` each stage's component, (S,) or (S, numbers): asked once for each run."""
    pieces = runs(stages)
    asked = np.array([of(stages[first]) for first, _ in pieces])
    return np.repeat(asked, [end - first for first, end in pieces], axis=0)


def _one_nic(layout: Layout, replica: int, stage: int) -> bool:
    """Do the transfers of `stage` up and down leave by the same NIC?"""
    p = layout.parallel
    if p.pp < 3 and p.virtual_stages == 1:
        return False
    down, up = layout.edge(replica, stage), layout.edge(replica, (stage - 1) % p.pp)
    inner = 0 < stage < p.pp - 1 or p.virtual_stages > 1
    return inner and down == up and down.kind != "local"


def compute_s(layout: Layout, replica: int, layers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of one (forward, backward) pass of each stage and chunk, (plans, S, C)."""
    m, p, costs = layout.model, layout.parallel, layout.costs
    stages = layout.replicas[replica]
    per = by_stage(stages, lambda c: costs.layer_s(m, layout.batch, p.tp, layout.fabric(c), p.sequence_parallel,
                                                   layout.recompute))
    ends = layout.fabric(stages[0]), layout.fabric(stages[-1])
    forward, backward = layers * per[:, 0, None], layers * per[:, 1, None]
    for at, (f, b) in (((0, 0), costs.embedding_s(m, layout.batch, p.tp, ends[0])),
                       ((-1, -1), costs.head_s(m, layout.batch, p.tp, ends[1]))):
        forward[:, at[0], at[1]] += f
        backward[:, at[0], at[1]] += b
    overhead = by_stage(stages, lambda c: costs.pass_s(layout.fabric(c)))[:, None]
    if costs.software.sharding in ("gradients", "full"):
        gather, reduce = _sharded_s(layout, replica, layers)
        forward = np.maximum(forward, gather)
        backward = np.maximum(backward, reduce + (gather if costs.software.sharding == "full" else 0))
    return forward + overhead, backward + overhead


def _sharded_s(layout: Layout, replica: int, layers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds to (gather the parameters, reduce the gradients) of each stage and chunk, (plans, S, C), as FSDP does in
    every pass, one layer ahead of computing and one behind it."""
    count, costs = parameters(layout, layers), layout.costs
    gather, reduce = np.zeros_like(count), np.zeros_like(count)
    for first, end in runs(layout.replicas[replica]):
        component = layout.replicas[replica][first]
        gpu, calls = layout.fabric(component).gpu, layers[:, first:end] + 2.0
        for made, what, size in ((gather, "all_gather", costs.weight_bytes(gpu)),
                                 (reduce, "reduce_scatter", costs.gradient_size(gpu))):
            made[:, first:end] = collective_s(
                layout, component, layout.reduction(replica, first), layout.run, layout.nodes_of_run(replica, first),
                what, 1.0, count[:, first:end] * size, layout.parallel.tp, calls)
    return gather, reduce


def _buckets(layout: Layout, replica: int, count: np.ndarray, bucket_bytes: np.ndarray) -> np.ndarray:
    """Gradient buckets of each stage and chunk: a stage's later chunks have one each (training/model/optimizer.py)."""
    buckets = np.ones_like(count)
    sizes = by_stage(layout.replicas[replica], lambda c: layout.costs.gradient_size(layout.fabric(c).gpu))
    buckets[:, :, 0] = np.maximum(1, np.ceil(count[:, :, 0] * sizes / bucket_bytes[:, None]))
    return buckets


def _synchronise_s(layout: Layout, replica: int, stage: int, component: Component, count: np.ndarray,
                   buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds to (reduce the gradients, gather the parameters) of stages of one component, of which `stage` is the
    first; shaped like `count`, their parameters."""
    p, gpu = layout.parallel, layout.fabric(component).gpu
    how, transport = layout.costs.collectives(gpu), layout.reduction(replica, stage)
    nodes = layout.nodes_of_run(replica, stage)
    sharing = p.tp * (min(p.pp, component.gpus_per_node // p.tp) if layout.hierarchical else 1)
    gradients, weights = count * layout.costs.wire_size(gpu), count * layout.costs.weight_bytes(gpu)

    def ring(what: str, factor: float, whole: np.ndarray) -> np.ndarray:
        return collective_s(layout, component, transport, layout.run, nodes, what, factor, whole, sharing, buckets)

    if not p.distributed_optimizer:
        return ring("reduce_scatter", how.all_reduce, gradients), np.zeros_like(count)
    both = layout.costs.software.all_reduced
    reduce = ring("reduce_scatter", how.all_reduce if both else how.reduce_scatter, gradients)
    if p.optimizer_instances > 1:  # each rank all-reduces its shard with its peers of the other instances
        reduce = reduce + collective_s(layout, component, layout.across(), p.optimizer_instances,
                                       p.optimizer_instances, "reduce_scatter", how.all_reduce,
                                       gradients / layout.run, component.gpus_per_node, buckets, layout.linked)
    return reduce, ring("all_gather", how.all_gather, weights)


def _tied_s(layout: Layout) -> float:
    """A tied embedding's gradient, all-reduced between the first and the last stage."""
    p, model = layout.parallel, layout.model
    if not model.tied or p.pp == 1:
        return 0.0
    times = []
    for replica, stages in enumerate(layout.replicas):
        transport = layout.ends(replica)
        pair = stages[0], stages[-1]
        for component in pair:
            gpu = layout.fabric(component).gpu
            whole = np.array(model.padded_vocab(p.tp) / p.tp * model.hidden * layout.costs.gradient_size(gpu))
            sharing = 1 if transport.kind == "local" else _ranks_at_edge(layout, component)
            ring = collective_s(layout, component, transport, 2, 2, "reduce_scatter", 2.0, whole, sharing, pairs=[pair])
            times.append(float(ring))
    return max(times)


def _norm_s(layout: Layout) -> float:
    """The gradient norm: one number, all-reduced by everyone, up and down a tree; a calibration has it in its step."""
    if layout.costs.calibration is not None and layout.costs.calibration.step_s:
        return 0.0
    steps = 2 * math.ceil(math.log2(max(1, layout.parallel.world_size)))
    pairs = *((c, c) for c in layout.components), *layout.linked
    return steps * max(layout.latency(layout.rule.shared, c, "reduce_scatter", to) for c, to in pairs)
