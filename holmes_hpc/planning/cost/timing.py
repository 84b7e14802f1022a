"""Seconds of each pass, stage transfer and collective of a layout with given layers.

Array shapes: (plans, S, C) stands for layer splits, stages, and model chunks of a stage.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf

import numpy as np

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.planning.cost import experts
from holmes_hpc.planning.cost.flops import embedding_parameters, head_parameters, layer_parameters
from holmes_hpc.planning.cost.layout import Layout, memoised, schedule_of
from holmes_hpc.planning.cost.network_times import ReplicaTimes, by_stage, edge_times, network_times, tied_embedding_s
from holmes_hpc.planning.plan.parts import Schedule
from holmes_hpc.planning.schedule import simulation
from holmes_hpc.planning.schedule.graph import Durations

# Weight gradients' share of a layer's backward pass: 8.5 of 19.8 ms on A100 (the layers of the 3.6B model).
WEIGHT_SHARE = 8.5 / 19.8

# A step of an optimizer that also copies what it changes, for early steps: 24 more bytes than the 32 of Adam's.
UNDOABLE = 1.75


def parameters(layout: Layout, layers: np.ndarray) -> np.ndarray:
    """Return the number of parameters on one rank of each stage and chunk, shaped like `layers`.
    If a tied head is not on the embedding's stage, it has a copy of the embedding's matrix."""
    if layout.is_per_stage:
        parts = (layers[:, max(0, s - 1) : s + 2] for s in range(layout.parallel.pp))
        return np.stack([parameters(v.layout, n)[:, v.stage] for v, n in zip(layout.views, parts, strict=True)], axis=1)
    model, tp = layout.model, layout.parallel.tp
    layer_size = layer_parameters(model, tp, layout.parallel.expert_ranks)
    count = layers.astype(np.float64) * layer_size
    count[:, 0, 0] += embedding_parameters(model, tp)
    if dense := model.experts.first_dense:
        count[:, 0, 0] += dense * (layer_parameters(model.dense, tp) - layer_size)
    count[:, -1, -1] += head_parameters(model, tp, own_matrix=not (model.tied and layout.parallel.pp == 1))
    return count


def recomputed(layout: Layout, layers: np.ndarray) -> np.ndarray:
    """Return the number of fully recomputed layers of each chunk, shaped like `layers`."""
    limit = layout.costs.software.recompute_layers
    if layout.recompute != "full":
        return np.zeros_like(layers)
    return layers if limit is None else np.minimum(layers, limit)


@dataclass(frozen=True)
class ComputeTimes:
    """The compute times of one pipeline replica.
    `layer`: seconds of a layer's (forward, backward), (2, S). `recomputed`: extra seconds of a fully recomputed
    layer, (S,). `embedding`, with the difference that first dense layers make, and `head`: (2,). `overhead`: (S,)."""

    layer: np.ndarray
    recomputed: np.ndarray
    embedding: np.ndarray
    head: np.ndarray
    overhead: np.ndarray


@dataclass(frozen=True)
class Timing:
    """Seconds for each of several layer splits of one layout.
    `replicas`: for each kind of pipeline replica. `one_nic`: see :func:`_shared_nics`. The work after all gradients are
    reduced: `tied`: all-reduce of a tied embedding's gradient; `norm`: of the gradient norm; `optimizer`: update,
    (plans,); `gather`: of parameters, (plans, S), 0 if it is part of the passes; `overhead`: fixed, of a step."""

    replicas: tuple[Durations, ...]
    one_nic: tuple[tuple[bool, ...], ...]
    tied: float
    norm: float
    optimizer: np.ndarray
    gather: np.ndarray
    overhead: float

    def after_reduction_s(self) -> np.ndarray:
        return self.tied + self.norm + self.overhead + self.optimizer + self.gather.max(axis=1)


def timing(layout: Layout, layers: np.ndarray, bucket_bytes: np.ndarray | None = None) -> Timing:
    """Return all times for layer splits of shape (plans, S, C). `bucket_bytes`: of each split; None: the layout's."""
    if layout.is_per_stage:
        return _timing_per_stage(layout, layers)
    networks = network_times(layout)
    sizes = np.full(len(layers), layout.bucket_bytes) if bucket_bytes is None else bucket_bytes
    count = parameters(layout, layers)
    replica_times = [
        _replica(layout, network, compute, layers, count, sizes)
        for network, compute in zip(networks.replicas, compute_times(layout), strict=True)
    ]
    updated, is_early = experts.optimizer_share(layout, layers, count.sum(axis=2)), layout.costs.early_step == "stage"
    return Timing(
        tuple(durations for durations, _ in replica_times),
        _shared_nics(layout),
        networks.tied,
        norm=0.0 if is_early else networks.norm,
        optimizer=(updated * networks.optimizer).max(axis=1) * (UNDOABLE if is_early else 1),
        gather=np.max([gather for _, gather in replica_times], axis=0),
        overhead=networks.overhead,
    )


def _timing_per_stage(layout: Layout, layers: np.ndarray) -> Timing:
    """Return :func:`timing` of a layout with per-stage TP/DP. The times of each stage come from its own view."""
    p, rows, stages = layout.parallel, layers[:, :, 0] - 1, np.arange(layout.parallel.pp)
    parts = {name: table[rows, stages] for name, table in _stage_tables(layout).items()}
    gather, update = parts.pop("gather"), parts.pop("update")
    return Timing(
        (Durations(**{k: v if k in ("down", "up", "last_up") else v[:, :, None] for k, v in parts.items()}),),
        ((False,) * p.pp,),
        tied=tied_embedding_s(layout),
        norm=layout.norm_s,
        optimizer=update.max(axis=1),
        gather=gather,
        overhead=max(layout.costs.step_overhead_s(layout.pool(c)) for c in layout.components),
    )


@memoised("recompute", "bucket_bytes", "split_schedule")
def _stage_tables(layout: Layout) -> dict[str, np.ndarray]:
    """Return tables of all durations, of `gather` and of `update` (the optimizer's), (layers, S) each.
    Row n - 1 has the values of each stage in its own view (:attr:`Layout.views`) if the stage has n layers."""

    def of_view(view: Layout, index: int, schedule: Schedule | None) -> dict[str, np.ndarray]:
        times = timing(view.with_settings(schedule, bucket_bytes=layout.bucket_bytes), view.all_layers)
        of_stages = {f.name: getattr(times.replicas[0], f.name) for f in fields(Durations)}
        update_s = view.costs.optimizer_s(1 / view.parallel.stages[index].copies, view.pool(view.replicas[0][index]))
        of_stages |= {"gather": times.gather, "update": update_s * parameters(view, view.all_layers)}
        return {name: table[:, index] for name, table in of_stages.items()}

    size, splits = layout.bucket_bytes, layout.split_schedule is not None
    views = ((view, layout.view_schedule(s, view) if splits else None) for s, view in enumerate(layout.views))
    tables = [
        v.layout.memo.of("tables", size, schedule, compute=partial(of_view, *v, schedule)) for v, schedule in views
    ]
    return {name: np.stack([table[name].ravel() for table in tables], axis=1) for name in tables[0]}


def row_durations(layout: Layout, times: Timing, split: int) -> simulation.RowDurations:
    """Return the durations to simulate, for one layer split of a layout with per-stage TP/DP."""
    d = times.replicas[0]
    return replace(
        edge_times(layout),
        forward=d.forward[split, :, 0].tolist(),
        backward=d.backward[split, :, 0].tolist(),
        ready=d.ready[split, :, 0].tolist(),
        last=np.maximum(0.0, d.last_up[split] - d.up[split]).tolist(),
        weight=d.weight[split, :, 0].tolist(),
    )


def _ends_per_stage(layout: Layout, times: Timing, max_s: float) -> np.ndarray:
    """Return the seconds until all gradients of each layer split are reduced, (plans,); infinite if over `max_s`."""
    order, tails = layout.order, times.replicas[0].tail[:, :, 0]
    stages = [order.stage_of(row) for row in range(order.rows)]
    durations = (row_durations(layout, times, split) for split in range(len(tails)))
    ends = np.array([simulation.row_end_times(order, d, max_s=max_s) for d in durations])
    return np.asarray((ends + tails[:, stages]).max(axis=1))


def step_s(layout: Layout, layers: np.ndarray, passes: int = simulation.ACCURATE, max_s: float = inf) -> np.ndarray:
    """Return the seconds of a step for layer splits of shape (plans, S, C). A step lasts as long as its slowest
    pipeline plus the work after it. `passes`: number of passes to simulate before the extrapolation. `max_s`: with
    per-stage TP/DP, the seconds of a step that is clearly longer are infinite, and soon found."""
    times = timing(layout, layers)
    if layout.is_per_stage:
        return _ends_per_stage(layout, times, max_s) + times.after_reduction_s()
    replicas = [*zip(layout.orders, times.replicas, times.one_nic, strict=True)]
    if layout.costs.early_step == "stage":
        update_s = times.gather + (times.optimizer + times.overhead)[:, None]
        are_posted = all(layout.pool(c).gpu.is_cpu for c in layout.components)  # over gloo
        return simulation.early_step_seconds(replicas, update_s, times.tied, passes, are_posted)
    ends = [simulation.step_seconds(order, d, nic, passes) for order, d, nic in replicas]
    return np.max(ends, axis=0) + times.after_reduction_s()


def least_s(
    layout: Layout, layers: np.ndarray, bucket_bytes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (a lower bound of :func:`step_s`, quickly; the bound plus all exposed data-parallel traffic)."""
    if layout.order.schedule.splits:  # bound: all weight passes overlap with the last reduction
        s, most = layout.schedule, (layout.order.micro_batches,) * layout.parallel.pp
        layout = layout.with_settings(schedule_of(s.kind, s.in_flight, most, most))
    times = timing(layout, layers, bucket_bytes)
    replicas = zip(layout.orders, times.replicas, times.one_nic, strict=True)
    if layout.costs.early_step == "stage" and not layout.is_per_stage:  # bound: no stage ever waits
        bounds = [(order.micro_batches * d.compute().sum(axis=2)).max(axis=1) for order, d, _ in replicas]
    else:
        bounds = [simulation.least_seconds(order, d, nic) for order, d, nic in replicas]
    bound = np.max(bounds, axis=0) + times.after_reduction_s()
    unhidden_s = np.max([d.ready.sum(axis=(1, 2)) + d.tail.max(axis=(1, 2)) for d in times.replicas], axis=0)
    return bound, bound + unhidden_s


@memoised("recompute", "parallel.virtual_stages")
def compute_times(layout: Layout) -> tuple[ComputeTimes, ...]:
    """Return the compute times of each replica."""
    return tuple(_compute_times(layout, replica) for replica in range(len(layout.replicas)))


@memoised("parallel.virtual_stages")
def _shared_nics(layout: Layout) -> tuple[tuple[bool, ...], ...]:
    """Return, for each replica and stage, whether transfers up and down leave through one NIC."""
    pp, is_ring = layout.parallel.pp, layout.parallel.virtual_stages > 1
    return tuple(
        tuple((is_ring or 0 < s < pp - 1) and edges[s - 1] == edges[s] and edges[s].kind != "local" for s in range(pp))
        for edges in layout.edges
    )


def _compute_times(layout: Layout, replica: int) -> ComputeTimes:
    m, p, costs, stages = layout.model, layout.parallel, layout.costs, layout.replicas[replica]
    batch, chunks, exchange_s = layout.batch, p.virtual_stages, experts.exchange_s(layout, replica)

    def layer(recompute: str, model: ModelSpec = m) -> np.ndarray:
        key, settings = ("layer", recompute, model is m), (p.sequence_parallel, recompute, p.ep, p.etp)
        layer_s = partial(costs.layer_s, model, batch, p.tp)
        seconds = by_stage(layout, replica, key, lambda c: layer_s(layout.pool(c), *settings)).T
        return seconds + (model is m) * np.stack([exchange_s, exchange_s * (2 if recompute == "full" else 1)])

    seconds = layer("none" if layout.recompute == "full" else layout.recompute)
    recomputed_s = layer("full")[1] - seconds[1] if layout.recompute == "full" else np.zeros(p.pp)
    embedding, head = (
        np.array(layout.pool_memo.of(part, pool.name, compute=partial(costs.part_s, part, m, batch, p.tp, pool)))
        for part, pool in (("embedding", layout.pool(stages[0])), ("head", layout.pool(stages[-1])))
    )
    if first_dense := m.experts.first_dense:  # they precede all other layers
        embedding += first_dense * (layer(layout.recompute, m.dense) - layer(layout.recompute))[:, 0]
    return ComputeTimes(
        seconds,
        recomputed_s,
        embedding,
        head,
        by_stage(layout, replica, ("pass", chunks), lambda c: costs.pass_overhead_s(layout.pool(c), chunks)),
    )


def _replica(
    layout: Layout,
    network: ReplicaTimes,
    compute: ComputeTimes,
    layers: np.ndarray,
    count: np.ndarray,
    bucket_bytes: np.ndarray,
) -> tuple[Durations, np.ndarray]:
    """Return (durations of a replica's passes and transfers, seconds of gathering parameters after the update).
    `count`: parameters of each stage and chunk, shaped like `layers`."""
    plans, software, sparse = len(layers), layout.costs.software, experts.weights(layout, layers)
    forward, backward = _pass_times(layout, network, compute, layers, count)
    weight, overlap_s = np.zeros_like(backward), backward  # overlap_s: computing that overlaps with reductions
    if layout.order.schedule.splits:  # the last weight passes, layer by layer
        weight = WEIGHT_SHARE * layers * compute.layer[1][:, None]
        backward = backward - weight
        overlap_s = weight * np.array(layout.order.last_weight_passes)[:, None]
    buckets = np.ones_like(count)  # a stage's later chunks have one bucket each (training/model/optimizer.py)
    buckets[:, :, 0] = np.maximum(1, np.ceil(count[:, :, 0] * layout.costs.gradient_size / bucket_bytes[:, None]))
    reduce, gather = (costs[0, :, None] * (count - sparse) + costs[1, :, None] * buckets for costs in network.sync)
    if layout.model.experts.count:
        calls = np.maximum(1, np.ceil(buckets * sparse / np.maximum(1, count)))
        reduce, gather = (
            dense + costs[0, :, None] * sparse + costs[1, :, None] * calls
            for dense, costs in zip((reduce, gather), network.experts, strict=True)
        )
    if software.sharding in ("gradients", "full"):
        # FSDP: passes include all traffic but the last layer's reduction, or that of all layers across instances.
        divisor = np.maximum(1, layers.sum(axis=2, keepdims=True)) if layout.parallel.optimizer_instances == 1 else 1
        gather, reduce = np.zeros_like(gather), reduce / divisor
    if _syncs_after_backward(layout):
        tail = reduce = np.concatenate([reduce.sum(axis=2, keepdims=True), np.zeros_like(reduce[:, :, 1:])], axis=2)
    else:
        ready, tail = _exposed_sync(
            layout, layers, forward, backward=overlap_s, gather=gather, reduce=reduce, buckets=buckets
        )
        reduce, tail = (seconds + _beside_transfers(layout, network, seconds, backward) for seconds in (reduce, tail))
    gather_after = np.zeros((plans, gather.shape[1]))
    # Without overlap, the gather follows the optimizer, for all chunks.
    if _syncs_after_backward(layout) or not software.overlap_gather:
        ready, gather_after = np.zeros_like(gather), gather.sum(axis=2)
    down, up = np.tile(network.down, (plans, 1)), np.tile(network.up, (plans, 1))
    ready[:, :, 0] += _nic_contention(layout, network, ready[:, :, 0], forward[:, :, 0])
    shared_up = np.minimum(2 * up, up + reduce[:, :, 0])  # transfers and gradients share one NIC
    return Durations(
        forward,
        backward,
        down,
        up=up,
        last_up=np.where(network.shares_nic, shared_up, up),
        ready=ready,
        reduce=reduce,
        tail=tail,
        weight=weight,
    ), gather_after


def _syncs_after_backward(layout: Layout) -> bool:
    """Return whether all data-parallel traffic follows the last backward pass.
    This is so without overlap, without :attr:`Parallel.can_overlap`, and with several optimizer instances on CPUs:
    Megatron-Core's overlap for several instances needs CUDA streams (training.model.optimizer.wrap)."""
    has_instances = layout.parallel.optimizer_instances > 1
    on_cpus = any(layout.pool(c).gpu.is_cpu for c in layout.components)
    return not (layout.costs.software.overlap and layout.parallel.can_overlap) or (has_instances and on_cpus)


def _exposed_sync(
    layout: Layout,
    layers: np.ndarray,
    forward: np.ndarray,
    backward: np.ndarray,
    gather: np.ndarray,
    reduce: np.ndarray,
    buckets: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the exposed seconds of (gathering parameters at a chunk's first pass, reducing gradients at its last).
    The traffic of a bucket overlaps with the computing of other buckets, and one bucket is gathered ahead. An emulated
    layer computes in no time and then sleeps until its emulated time has passed. Therefore a wait for parameters is
    part of the emulated time, and gradients are ready only at its end."""
    layer = np.zeros_like(forward)
    if layout.costs.pace_layer_ms is not None:
        buckets, layer = np.minimum(buckets, np.maximum(1, layers)), forward / np.maximum(1, layers)
    tail = np.maximum(reduce / buckets, reduce - backward * (1 - 1 / buckets))
    if layout.costs.software.aligned_gather:
        return _aligned_gather(gather, buckets, forward, layer), tail
    late = (buckets - 1) / buckets * np.maximum(0, gather - forward)
    return np.maximum(0, gather / buckets - layer) + late, tail


def _aligned_gather(gather: np.ndarray, buckets: np.ndarray, forward: np.ndarray, layer: np.ndarray) -> np.ndarray:
    """Return the exposed seconds before each chunk's first pass if all stages gather from the start of the step.
    A stage gathers its chunks one after the other. The first passes run from stage to stage, then through the next
    chunk. If one of them is delayed, the later gathers have more time. `layer`: seconds by which a pass can start
    before its first bucket has arrived. All arrays are (plans, S, C)."""
    needed = np.cumsum(gather, axis=2) - np.minimum(gather, forward) * (1 - 1 / buckets) - layer
    in_turn, shape = (0, 2, 1), gather.transpose(0, 2, 1).shape
    passes, needed = (a.transpose(in_turn).reshape(len(a), -1) for a in (forward, needed))
    late = np.maximum.accumulate(np.maximum(0.0, needed - np.cumsum(passes, axis=1) + passes), axis=1)
    return np.diff(late, axis=1, prepend=0.0).reshape(shape).transpose(in_turn)


def _beside_transfers(layout: Layout, network: ReplicaTimes, reduce: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the extra seconds of reductions that share a NIC with transfers, shaped like `reduce`.
    While a stage reduces the gradients of a chunk, it makes the last passes of the chunk before: one for each
    micro-batch of a group. The reduction and the transfers of these passes share the NIC evenly."""
    transfers_s = np.where(network.shares_nic, network.up, 0.0)[:, None]
    extra = np.zeros_like(reduce)
    extra[:, :, 1:] = layout.order.group * np.minimum(transfers_s, backward[:, :, :-1])
    return np.minimum(reduce, extra)


def _nic_contention(layout: Layout, network: ReplicaTimes, ready: np.ndarray, forward: np.ndarray) -> np.ndarray:
    """Return the extra seconds of gathering parameters while micro-batches arrive through the same NIC.
    `ready`: exposed seconds of the gather without contention. All arrays are (plans, S). A stage gathers after its
    first micro-batch has arrived. Meanwhile the stage above continues to send until the window of receives is full.
    The gather and the transfers share the NIC evenly."""
    extra, order = np.zeros_like(ready), layout.order
    if order.stages == 1 or order.schedule.megatron:  # Megatron-Core receives only after its computing
        return extra
    down = network.down[:-1]
    used_share = down / np.maximum(forward[:, :-1], down)  # share of the NIC that received micro-batches use
    window = np.array([order.window_below(s) for s in range(order.stages - 1)])
    delay = np.minimum(ready[:, 1:] * used_share / np.maximum(used_share, 1 - used_share), window * down)
    extra[:, 1:] = np.where(network.shares_nic[1:], delay, 0)
    return extra


def _pass_times(
    layout: Layout, network: ReplicaTimes, compute: ComputeTimes, layers: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of one (forward, backward) pass of each stage and chunk, (plans, S, C)."""
    passes = []
    for direction in (0, 1):
        seconds = layers * compute.layer[direction][:, None]
        if direction == 1:
            seconds += recomputed(layout, layers) * compute.recomputed[:, None]
        seconds[:, 0, 0] += compute.embedding[direction]
        seconds[:, -1, -1] += compute.head[direction]
        passes.append(seconds)
    sharding = layout.costs.software.sharding
    if sharding in ("gradients", "full"):  # FSDP gathers one layer ahead and reduces one behind
        gather, reduce = (
            seconds[0, :, None] * count + seconds[1, :, None] * (layers + 2.0) for seconds in network.fsdp
        )
        passes = [np.maximum(passes[0], gather), np.maximum(passes[1], reduce + (gather if sharding == "full" else 0))]
    overhead = compute.overhead[:, None]
    return passes[0] + overhead, passes[1] + overhead
