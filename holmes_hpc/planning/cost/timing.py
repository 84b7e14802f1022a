"""From a layout and its layers to seconds and bytes: what each pass, stage transfer and collective takes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from holmes_hpc.planning.cost.flops import embedding_parameters, head_parameters, layer_parameters
from holmes_hpc.planning.cost.layout import Layout, remembered
from holmes_hpc.planning.cost.traffic import Traffic, by_stage, edges, networks, tied_per_stage_s
from holmes_hpc.planning.schedule.simulation import WHOLE, Durations, RowDurations, least_seconds, step_seconds
from holmes_hpc.planning.schedule.simulation import ends as row_ends


def parameters(layout: Layout, layers: np.ndarray) -> np.ndarray:
    """Parameters on one rank of each stage and chunk, (plans, S, C), from layers of the same shape. A tied head on
    another stage than the embedding has a copy of its matrix."""
    if layout.is_per_stage:
        table = layout.by_stage("parameters", None, lambda view: parameters(view, view.all_layers).sum(axis=2))
        return _rows(table, layers)[:, :, None]
    model, tp = layout.model, layout.parallel.tp
    count = layers.astype(np.float64) * layer_parameters(model, tp)
    count[:, 0, 0] += embedding_parameters(model, tp)
    count[:, -1, -1] += head_parameters(model, tp, own_matrix=not (model.tied and layout.parallel.pp == 1))
    return count


def _rows(table: np.ndarray, layers: np.ndarray) -> np.ndarray:
    """Return, (plans, S), what a table by number of layers, (layers, S), has for each stage of layer splits."""
    return np.asarray(table[layers[:, :, 0] - 1, np.arange(table.shape[1])])


def recomputed(layout: Layout, layers: np.ndarray) -> np.ndarray:
    """How many layers of each chunk are computed again as a whole, shaped like `layers`."""
    most = layout.costs.software.recompute_layers
    if layout.recompute != "full":
        return np.zeros_like(layers)
    return layers if most is None else np.minimum(layers, most)


@dataclass(frozen=True)
class Computing:
    """What one pipeline replica computes: seconds of a layer's (forward, backward), (2, S), of the embedding's and the
    head's, (2,), and of every pass, (S,); `again`: of a layer that is computed again as a whole, (S,)."""

    layer: np.ndarray
    again: np.ndarray
    embedding: np.ndarray
    head: np.ndarray
    overhead: np.ndarray


@dataclass(frozen=True)
class Timing:
    """Seconds for each of several layer splits of one layout. `replicas`: of the pipeline(s); `tied`, `norm`,
    `optimizer`, `gather`, `other`: what follows when all gradients are reduced. `optimizer` is (plans,), `gather`,
    of updated parameters by all stages at once where not before their first passes, (plans, S). `edges`: of a layout
    that is per stage."""

    replicas: tuple[Durations, ...]
    shared: tuple[tuple[bool, ...], ...]
    tied: float
    norm: float
    optimizer: np.ndarray
    gather: np.ndarray
    other: float
    edges: RowDurations | None = None

    def after(self) -> np.ndarray:
        return self.tied + self.norm + self.other + self.optimizer + self.gather.max(axis=1)


def timing(layout: Layout, layers: np.ndarray, bucket_bytes: np.ndarray | None = None) -> Timing:
    """Everything that takes time, for layer splits of shape (plans, S, C), and if wanted a bucket size for each."""
    if layout.is_per_stage:
        return _timing_per_stage(layout, layers)
    known, p = networks(layout), layout.parallel
    sizes = np.full(len(layers), layout.bucket_bytes) if bucket_bytes is None else bucket_bytes
    count = parameters(layout, layers)
    made = [
        _replica(layout, traffic, computes, layers, count, sizes)
        for traffic, computes in zip(known.replicas, computing(layout), strict=True)
    ]
    updated = count.sum(axis=2) / (layout.run if p.distributed_optimizer else 1)
    return Timing(
        tuple(durations for durations, _ in made),
        _nics(layout),
        known.tied,
        norm=known.norm,
        optimizer=(updated * known.optimizer).max(axis=1),
        gather=np.max([gather for _, gather in made], axis=0),
        other=known.other,
    )


def _timing_per_stage(layout: Layout, layers: np.ndarray) -> Timing:
    """:func:`timing` of a layout that is per stage: each stage's column of its own view."""
    bucket = layout.bucket_bytes

    def of_view(view: Layout) -> Timing:
        return view.memo.of("timing", bucket, compute=lambda: timing(view.varied(bucket_bytes=bucket), view.all_layers))

    def part(name: str) -> np.ndarray:
        def first_chunk(view: Layout) -> np.ndarray:
            values: np.ndarray = getattr(of_view(view).replicas[0], name)
            return values.reshape(*values.shape[:2], -1)[:, :, 0]

        return _rows(layout.by_stage(name, bucket, first_chunk), layers)

    durations = {f.name: part(f.name) for f in fields(Durations)}
    first, p = of_view(layout.views[0]), layout.parallel
    updates = np.array([layout.costs.optimizer_s(1.0, layout.fabric(component)) for component in layout.replicas[0]])
    shares = parameters(layout, layers)[:, :, 0] / np.array([stage.dp for stage in p.stages])
    return Timing(
        (Durations(**{k: v if k in ("down", "up", "last_up") else v[:, :, None] for k, v in durations.items()}),),
        ((False,) * p.pp,),
        tied=tied_per_stage_s(layout),
        norm=first.norm,
        optimizer=(shares * updates).max(axis=1),
        gather=_rows(layout.by_stage("gather", bucket, lambda view: of_view(view).gather), layers),
        other=first.other,
        edges=edges(layout),
    )


def row_durations(times: Timing, split: int) -> RowDurations:
    """Return what the simulation of single replicas takes, of one of the layer splits of a layout that is per stage."""
    d, e = times.replicas[0], times.edges
    assert e is not None
    return replace(
        e,
        forward=d.forward[split, :, 0].tolist(),
        backward=d.backward[split, :, 0].tolist(),
        ready=d.ready[split, :, 0].tolist(),
        last=np.maximum(0.0, d.last_up[split] - d.up[split]).tolist(),
    )


def _ends_per_stage(layout: Layout, times: Timing) -> np.ndarray:
    """Return when all gradients of each layer split are reduced, (plans,)."""
    stage = [layout.order.stage_of(row) for row in range(layout.order.rows)]
    tails = times.replicas[0].tail[:, :, 0].tolist()
    return np.array(
        [
            max(end + tail[stage[row]] for row, end in enumerate(row_ends(layout.order, row_durations(times, split))))
            for split, tail in enumerate(tails)
        ]
    )


def step_s(layout: Layout, layers: np.ndarray, passes: int = WHOLE) -> np.ndarray:
    """Seconds of a step for layer splits of shape (plans, S, C): the slowest pipeline, and what follows. `passes`: to
    simulate before the rest is extended."""
    times = timing(layout, layers)
    if layout.is_per_stage:
        return _ends_per_stage(layout, times) + times.after()
    ends = [step_seconds(layout.order, d, nic, passes) for d, nic in zip(times.replicas, times.shared, strict=True)]
    return np.max(ends, axis=0) + times.after()


def least_s(
    layout: Layout, layers: np.ndarray, bucket_bytes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(a lower bound of :func:`step_s`, much quicker; the bound and all data-parallel traffic that nothing hides)."""
    times = timing(layout, layers, bucket_bytes)
    least = (
        np.max(
            [least_seconds(layout.order, d, nic) for d, nic in zip(times.replicas, times.shared, strict=True)], axis=0
        )
        + times.after()
    )
    open_s = np.max([d.ready.sum(axis=(1, 2)) + d.tail.max(axis=(1, 2)) for d in times.replicas], axis=0)
    return least, least + open_s


@remembered("recompute")
def computing(layout: Layout) -> tuple[Computing, ...]:
    """Return what each replica computes."""
    return tuple(_computing(layout, replica) for replica in range(len(layout.replicas)))


@remembered("parallel.virtual_stages")
def _nics(layout: Layout) -> tuple[tuple[bool, ...], ...]:
    """Return whether each stage's transfers up and down leave by one NIC, for each replica."""
    stages = range(layout.parallel.pp)
    return tuple(tuple(_one_nic(layout, replica, s) for s in stages) for replica in range(len(layout.replicas)))


def _computing(layout: Layout, replica: int) -> Computing:
    m, p, costs, stages = layout.model, layout.parallel, layout.costs, layout.replicas[replica]

    def layer(recompute: str) -> np.ndarray:
        return by_stage(
            layout,
            replica,
            ("layer", recompute),
            lambda c: costs.layer_s(m, layout.batch, p.tp, layout.fabric(c), p.sequence_parallel, recompute),
        ).T

    once = layer("none" if layout.recompute == "full" else layout.recompute)
    again = layer("full")[1] - once[1] if layout.recompute == "full" else np.zeros(p.pp)
    ends = layout.fabric(stages[0]), layout.fabric(stages[-1])
    embedding = layout.common.of(
        "embedding", ends[0].name, compute=lambda: costs.part_s("embedding", m, layout.batch, p.tp, ends[0])
    )
    head = layout.common.of("head", ends[1].name, compute=lambda: costs.part_s("head", m, layout.batch, p.tp, ends[1]))
    return Computing(
        once,
        again,
        np.array(embedding),
        np.array(head),
        by_stage(layout, replica, ("pass",), lambda c: costs.pass_s(layout.fabric(c))),
    )


def _replica(
    layout: Layout,
    traffic: Traffic,
    computes: Computing,
    layers: np.ndarray,
    count: np.ndarray,
    bucket_bytes: np.ndarray,
) -> tuple[Durations, np.ndarray]:
    """(What its passes and transfers take, what gathering parameters takes after the update); `count`: parameters,
    shaped like `layers`."""
    plans, software = len(layers), layout.costs.software
    forward, backward = _passes(layout, traffic, computes, layers, count)
    buckets = np.ones_like(count)  # a stage's later chunks have one each (training/model/optimizer.py)
    buckets[:, :, 0] = np.maximum(1, np.ceil(count[:, :, 0] * layout.costs.gradient_size / bucket_bytes[:, None]))
    reduce, gather = (
        each[0, :, None] * count + each[1, :, None] * buckets for each in (traffic.reduce, traffic.gather)
    )
    if software.sharding in ("gradients", "full"):  # in every pass, and what the last layer leaves
        gather, reduce = np.zeros_like(gather), reduce / np.maximum(1, layers.sum(axis=2, keepdims=True))
    ready, tail = gather, reduce
    if _apart(layout):
        reduce = np.concatenate([reduce.sum(axis=2, keepdims=True), np.zeros_like(reduce[:, :, 1:])], axis=2)
        tail = reduce
    elif software.overlap:
        ready, tail = _exposed(
            layout, layers, forward, backward=backward, gather=gather, reduce=reduce, buckets=buckets
        )
    after = np.zeros((plans, gather.shape[1]))
    if _apart(layout) or not (software.overlap and software.overlap_gather):  # by the optimizer, of all chunks
        ready, after = np.zeros_like(gather), gather.sum(axis=2)
    down, up = np.tile(traffic.down, (plans, 1)), np.tile(traffic.up, (plans, 1))
    ready[:, :, 0] += _arriving(layout, traffic, ready[:, :, 0], forward[:, :, 0])
    both = np.minimum(2 * up, up + reduce[:, :, 0])  # on one NIC, at the same moment
    return Durations(
        forward,
        backward,
        down,
        up=up,
        last_up=np.where(traffic.beside, both, up),
        ready=ready,
        reduce=reduce,
        tail=tail,
    ), after


def _apart(layout: Layout) -> bool:
    """Does all of the data-parallel traffic come after the last backward pass? Megatron-Core's overlap of several
    optimizer instances takes CUDA streams (training.model.optimizer.wrap)."""
    return layout.parallel.optimizer_instances > 1 and any(layout.fabric(c).gpu.is_cpu for c in layout.components)


def _exposed(
    layout: Layout,
    layers: np.ndarray,
    forward: np.ndarray,
    backward: np.ndarray,
    gather: np.ndarray,
    reduce: np.ndarray,
    buckets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
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


def _arriving(layout: Layout, traffic: Traffic, ready: np.ndarray, forward: np.ndarray) -> np.ndarray:
    """How much longer stages gather their parameters, `ready` seconds alone, because of the micro-batches that come in
    meanwhile by the same NIC; all arrays (plans, S). A stage gathers when its first micro-batch has come, and the stage
    above runs ahead: it sends what it computes until the window of receives is full. Two flows share a NIC evenly."""
    longer, order = np.zeros_like(ready), layout.order
    if order.stages == 1 or order.schedule.megatron:  # which receives nothing until it has computed
        return longer
    down = traffic.down[:-1]
    used = down / np.maximum(forward[:, :-1], down)  # of the NIC, by what comes in
    window = np.array([order.window_below(s) for s in range(order.stages - 1)])
    shared = np.minimum(ready[:, 1:] * used / np.maximum(used, 1 - used), window * down)
    longer[:, 1:] = np.where(traffic.beside[1:], shared, 0)
    return longer


def _one_nic(layout: Layout, replica: int, stage: int) -> bool:
    """Do the transfers of `stage` up and down leave by the same NIC?"""
    p = layout.parallel
    down, up = layout.edges[replica][stage], layout.edges[replica][(stage - 1) % p.pp]
    inner = 0 < stage < p.pp - 1 or p.virtual_stages > 1
    return inner and down == up and down.kind != "local"


def _passes(
    layout: Layout, traffic: Traffic, computes: Computing, layers: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of one (forward, backward) pass of each stage and chunk, (plans, S, C)."""
    made = []
    for way in (0, 1):
        each = layers * computes.layer[way][:, None]
        if way == 1:
            each += recomputed(layout, layers) * computes.again[:, None]
        each[:, 0, 0] += computes.embedding[way]
        each[:, -1, -1] += computes.head[way]
        made.append(each)
    sharding = layout.costs.software.sharding
    if sharding in ("gradients", "full"):  # one layer ahead of computing, and one behind it
        gather, reduce = (each[0, :, None] * count + each[1, :, None] * (layers + 2.0) for each in traffic.passing)
        made = [np.maximum(made[0], gather), np.maximum(made[1], reduce + (gather if sharding == "full" else 0))]
    overhead = computes.overhead[:, None]
    return made[0] + overhead, made[1] + overhead
