"""Memory of one GPU of each stage: weights, gradients, optimizer shards, activations in flight, buffers.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4. They cover any element size, rotary positions,
grouped-query attention, SwiGLU, and fused or unfused modules. Weights and optimizer follow Megatron-Core's buffers.
Weights and gradients are complete on each rank. The optimizer holds Adam's two moments in fp32 and, for half-precision
weights, fp32 master weights. The distributed optimizer shards this state over an intra-DP group (Rajbhandari et al.
2020, arXiv 1910.02054, stage 1). Array shapes: (plans, S, C) stands for layer splits, stages, and chunks of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost import experts
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.layer_times import LayerShape
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.network_times import by_stage
from holmes_hpc.planning.cost.timing import parameters, recomputed
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.parts import Schedule
from holmes_hpc.planning.plan.plan import Component
from holmes_hpc.planning.schedule.order import Order

# A CUDA process holds more than tensors: context, NCCL's channels, cuBLAS workspaces, and the allocator's slack.
CUDA_BYTES = 2 * 2**30
# Share of a micro-batch's activations that a weight pass needs after the backward pass: what matrix products need.
DEFERRED_SHARE = 0.89
USABLE_SHARE = 0.96  # of a GPU's memory; fragmentation takes the remainder


@dataclass(frozen=True)
class StageMemory:
    """The bytes on one rank of each stage, by use. All arrays are (plans, S)."""

    weights: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    activations: np.ndarray
    buffers: np.ndarray

    def total(self) -> np.ndarray:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def layer_activation_bytes(shape: LayerShape, costs: Costs, gpu: Gpu) -> tuple[float, float]:
    """Return the activation bytes of one layer and micro-batch on one rank: (held from forward to backward pass, in
    addition during the layer's backward pass).

    On a CPU, Megatron-Core's own modules keep each tensor that autograd saves (benchmarks/planner_memory.py). On a GPU,
    Transformer Engine's modules are fused, and fused attention keeps one number per row of scores. Unfused operations
    on a GPU also keep tensors: norms and the softmax in fp32, and those of separate rotary and gate operations.
    Selective recomputation keeps only the inputs of the parts that it repeats. Buffers of CP's ring do not count,
    because they exist only after the FFN's larger tensors are freed."""
    software, batch, tp = costs.software_on(gpu), shape.batch, shape.tp
    tokens, sequence, element = shape.tokens, batch.sequence_length, costs.weight_bytes(gpu)
    fused = software.flash and not gpu.is_cpu
    flash = software.flash and not (gpu.is_cpu and shape.model.dropout)
    unfused_norm = not (software.fused_norm or gpu.is_cpu)
    has_fp32_scores = software.attention == "unfused" and not gpu.is_cpu and element < 4
    m, h = shape.model, shape.model.hidden
    queries, keys = m.query_width, 2 * m.key_width
    norm = 3 if m.rmsnorm and not fused else 2  # input, (normalised input,) output
    mask = 1 if fused else element  # bytes of a dropout mask's element
    hidden_bytes = 2 * norm * h * element + (2 * h * mask if m.dropout else 0)
    if flash:
        # q, k, v and rotated q, k; the ring of CP joins rotated k and v, so no others are held
        attention = queries + keys + (queries + keys // 2 if m.rope and batch.cp == 1 else 0)
        attention += queries if batch.all_to_all else 0  # attention's output for all tokens
    elif m.kv_heads < m.heads:
        attention = 3 * queries + (0 if m.rope else queries + keys)  # rotated q; k and v repeated for every head
    else:
        attention = 3 * queries + (2 * queries if m.rope else 0)
    attention += (norm - 1) * (queries + keys // 2) if m.qk_norm else 0
    held = (3 if fused else 5) if m.swiglu else 2  # of the FFN's width: before, in and after the FFN's activation
    if unfused_norm:
        hidden_bytes += 2 * 8 * h  # input and normalised input in fp32
    if fused and not software.fused_elementwise:
        held += m.swiglu
        attention += 2 * (queries + keys // 2) if m.rope else 0  # both halves of the rotation's products
    ffn: float = held * m.tp_ffn
    if m.experts.count:  # of each of top_k: the token, its permutations; of all: scores, probabilities and map
        load = shape.expert_load(software.expert_imbalance)
        expert = shape.etp * (h + 4) + (held + m.swiglu) * m.ffn_width
        ffn += load * m.active_ffns * expert + h + 9 * m.experts.count // 4
    dropout_bytes = element + mask if m.dropout else 0
    fp32_extra = 4 if has_fp32_scores else 0  # softmax in fp32 keeps its output beside the half-precision one
    scores = m.heads * (4 if flash else sequence * (element + dropout_bytes + fp32_extra))  # fused: one number per row
    total = tokens * (hidden_bytes / shape.norm_split + ((attention + queries + ffn) * element + scores) / tp)
    total += 0 if flash else sequence * sequence  # the causal mask, one for all heads and sequences
    score_gradients = 0 if flash else m.heads * sequence * (element + fp32_extra)
    gradients = tokens * (3 * m.active_width * element + score_gradients) / tp
    if shape.recompute == "full":
        return tokens * h * element / shape.norm_split, total + gradients  # only the input is held
    if shape.recompute == "selective":
        norms = 2 * ((norm - 1) * h * element + (8 * h if unfused_norm else 0)) / shape.norm_split
        part_bytes = {"scores": scores / tp, "norms": norms, "ffn": ffn * element / tp}
        recomputed = tokens * sum(part_bytes[part] for part in software.recompute_parts)
        return total - recomputed, max(recomputed, gradients)
    return total, gradients


def memory(layout: Layout, layers: np.ndarray) -> StageMemory:
    """Return the peak memory of a rank of each stage over all replicas, for layer splits of shape (plans, S, C)."""
    if layout.is_per_stage:
        return _memory_per_stage(layout, layers)
    parts = [_replica_memory(layout, replica, layers) for replica in range(len(layout.replicas))]
    return StageMemory(*(np.max([getattr(p, f.name) for p in parts], axis=0) for f in fields(StageMemory)))


def _memory_per_stage(layout: Layout, layers: np.ndarray) -> StageMemory:
    """Return :func:`memory` of a layout with per-stage TP/DP.
    The replicas of a stage differ in transfer buffers; the replica with the most counts."""
    p, batch = layout.parallel, layout.batch
    base = _base_memory(layout, layers)
    buffers = np.zeros(p.pp)
    for s, component in enumerate(layout.replicas[0]):
        element = layout.costs.weight_bytes(layout.pool(component).gpu)
        tensor = batch.micro_size * batch.sequence_length * layout.model.hidden * element / p.tp_of(s) / p.cp_of(s)
        in_base = 2 * ((s > 0) + (s < p.pp - 1))  # _base_memory counts one buffer for each direction of each edge
        buffers[s] = max(0, layout.order.buffers(s) - in_base) * tensor
    return replace(base, buffers=base.buffers + buffers)


def _base_memory(layout: Layout, layers: np.ndarray) -> StageMemory:
    """Return :func:`memory` of a layout with per-stage TP/DP, as if every transfer window held one transfer."""

    def of_view(view: Layout, index: int, schedule: Schedule) -> np.ndarray:
        """Return the parts of the stage's memory, a row for each, with 1, 2, … or all layers."""
        held = memory(view.with_settings(schedule), view.all_layers)
        return np.stack([getattr(held, f.name)[:, index] for f in fields(StageMemory)])

    views = ((view, layout.view_schedule(s, view)) for s, view in enumerate(layout.views))
    tables = [v.layout.memo.of("memory at", schedule, compute=partial(of_view, *v, schedule)) for v, schedule in views]
    return StageMemory(*np.stack(tables, axis=2)[:, layers[:, :, 0] - 1, np.arange(layout.parallel.pp)])


def _replica_memory(layout: Layout, replica: int, layers: np.ndarray) -> StageMemory:
    p, m, costs = layout.parallel, layout.model, layout.costs
    shape = LayerShape(m, layout.batch, p.tp, p.sequence_parallel, layout.recompute, p.ep, p.etp)
    tokens, count = shape.tokens, parameters(layout, layers).sum(axis=2)

    def component_bytes(component: Component) -> tuple[float, ...]:
        gpu = layout.pool(component).gpu
        return (
            costs.weight_bytes(gpu),
            costs.gradient_size,
            moment_bytes(costs, gpu),
            0 if gpu.is_cpu else CUDA_BYTES + experts.joined_bytes(m, p, costs.weight_bytes(gpu)),
            costs.gradient_size * _is_received(layout, replica, component),
            *layer_activation_bytes(shape, costs, gpu),
            layer_activation_bytes(replace(shape, recompute="none"), costs, gpu)[0],
        )

    element, gradient, moments, cuda_bytes, received, held_bytes, backward_bytes, full_bytes = layout.memo.of(
        *("memory", replica, layout.recompute),
        compute=lambda: by_stage(layout, replica, ("memory", layout.recompute), component_bytes).T,
    )
    weights, gradients = count * element, count * gradient
    copy_bytes = 12 if costs.early_step == "stage" else 0  # of weights and moments, to undo an early step
    optimizer = experts.optimizer_share(layout, layers, count) * (moments + copy_bytes)
    gathered = np.zeros_like(count)
    if costs.software.sharding in ("gradients", "full"):  # FSDP: shards; two complete layers at a time
        two_layers = 2 * layer_parameters(m, p.tp, p.expert_ranks) * element
        gradients = gradients / layout.intra_dp_size
        if costs.software.sharding == "full":
            weights, gathered = weights / layout.intra_dp_size, np.minimum(weights, two_layers) + np.zeros_like(count)

    recomputed_layers = recomputed(layout, layers) if layout.recompute == "full" else layers
    # Bytes that one pass through each chunk holds, (plans, S, C).
    activations = recomputed_layers * held_bytes[:, None] + (layers - recomputed_layers) * full_bytes[:, None]
    transient = np.zeros_like(count) + backward_bytes
    if p.ep_comm == "allgather":  # tokens of all ranks, and gradients of their results in fp32
        transient += p.expert_ranks * tokens / p.tp * m.hidden * (element + 4)
    if first_dense := m.experts.first_dense:
        gpu = layout.pool(layout.replicas[replica][0]).gpu
        dense_bytes, dense_backward = layer_activation_bytes(replace(shape, model=m.dense), costs, gpu)
        activations[:, 0, 0] += first_dense * (dense_bytes - held_bytes[0])
        transient[:, 0] = np.maximum(transient[:, 0], dense_backward)
    if not first_dense and (layers == layers[:, :, :1]).all():  # equal chunks: any chunk's passes may be held
        held = np.array([layout.order.depths[s] for s in range(p.pp)], dtype=float)
        if layout.order.schedule.splits:
            held += DEFERRED_SHARE * np.minimum(layout.order.deferred, layout.order.micro_batches)
        activations = activations[:, :, 0] * held
    else:
        of_stages = [(activations[:, s] @ held_passes(layout.order, s).T).max(axis=1) for s in range(p.pp)]
        activations = np.stack(of_stages, axis=1)
    transfer = tokens * m.hidden / shape.norm_split * element
    activations[:, 0] += transfer[0] * layout.order.depths[0] * (1 if m.dropout else 0)  # the embedding's
    logits = tokens * m.padded_vocab(p.tp) / (1 if costs.software.gathered_logits else p.tp)
    activations[:, -1] += 3 * transfer[-1]  # the final norm
    copy_bytes = element[-1] if element[-1] < 4 else 0  # a half-precision copy of the logits
    matrix = m.padded_vocab(p.tp) / p.tp * m.hidden * element[-1]  # the head's gradient until it is accumulated
    # torch's loss holds parts of the logits, log-probabilities and a cast gradient.
    loss_bytes = 12 if costs.software.gathered_logits else 0
    # The softmax turns into its gradient in place.
    transient[:, -1] = np.maximum(transient[:, -1], logits * (4 + copy_bytes + loss_bytes) + matrix)
    buffers = gathered + transient + np.array(_transfer_buffers(layout.order)) * transfer
    # Received gradients are held until all have arrived. By then the passes have ended and freed their activations.
    buffers += cuda_bytes + np.maximum(0.0, count * received - activations)
    return StageMemory(weights, gradients, optimizer, activations, buffers)


def _is_received(layout: Layout, replica: int, component: Component) -> bool:
    """Return whether gradients are reduced by an all-to-all: a rank receives all parts before it sums them."""
    p, ranks = layout.parallel, layout.intra_dp_size
    nodes = layout.intra_dp_nodes(replica, component.stages[0])
    library = layout.costs.collectives(layout.pool(component).gpu)
    return p.distributed_optimizer and library.is_all_to_all(ranks, nodes, p.optimizer_instances)


def moment_bytes(costs: Costs, gpu: Gpu) -> float:
    """Return the optimizer's bytes per parameter: Adam's two moments and, in half precision, the master weight."""
    return 12.0 if costs.weight_bytes(gpu) < 4 else 8.0


def max_layers(
    shape: LayerShape, costs: Costs, gpu: Gpu, shards: int, depth: np.ndarray, max_gib: float | None = None
) -> np.ndarray:
    """Return an upper bound of the number of layers that fit on each stage, (S,).
    It counts only weights, gradients, activations, and optimizer state (sharded over `shards` ranks) of layers.
    `depth`: passes in flight per chunk of each stage, (S,). `max_gib`: see :func:`capacity`."""
    held_bytes, _ = layer_activation_bytes(shape, costs, gpu)
    parameter_bytes = costs.weight_bytes(gpu) + costs.gradient_size + moment_bytes(costs, gpu) / shards
    layer_bytes = layer_parameters(shape.model, shape.tp, shape.ep * shape.etp) * parameter_bytes
    if costs.software.sharding in ("gradients", "full"):
        layer_bytes = 0.0
    free_bytes = capacity(gpu, max_gib) - (0 if gpu.is_cpu else CUDA_BYTES)
    return np.asarray(np.floor(np.maximum(0, free_bytes) / (layer_bytes + depth * held_bytes)))


@lru_cache(maxsize=1024)
def held_passes(order: Order, stage: int) -> np.ndarray:
    """Return how many passes of each chunk `stage` holds when it holds the most passes, (moments, C).
    This is in the steady state, in which the stage alternates one backward and one forward pass."""
    if order.chunks == 1:
        return np.array([[order.depths[stage]]])
    depth = order.depths[stage]
    chunks = np.array([c for _, c in replace(order, micro_batches=min(order.micro_batches, 4 * order.group)).turns()])
    done = [
        np.concatenate([np.zeros((1, order.chunks), int), np.cumsum(np.eye(order.chunks, dtype=int)[c], axis=0)])
        for c in (chunks, order.chunks - 1 - chunks)
    ]
    moments = range(max(1, len(chunks) - depth + 1))
    return np.unique([done[0][min(depth + k, len(chunks))] - done[1][k] for k in moments], axis=0)


@lru_cache(maxsize=1024)
def _transfer_buffers(order: Order) -> tuple[int, ...]:
    """Return the number of stage transfers, received and sent, for which each stage holds buffers.
    A stage that exchanges in the background posts a window of transfers early."""
    if order.stages == 1:
        return (0,)
    if order.schedule.megatron:
        return (2,) * order.stages
    windows = [0, *(order.window_below(s) for s in range(order.stages - 1)), 0]
    return tuple(2 * (above + below) for above, below in pairwise(windows))


def capacity(gpu: Gpu, max_gib: float | None = None) -> float:
    """Return the bytes of a GPU's memory that a plan may use. The remainder is lost to fragmentation.
    `max_gib`: limit on the memory; None: the GPU's memory; infinity: no limit."""
    gib = max_gib or gpu.memory_gib
    return (gib if gpu.is_cpu or gib == inf else min(gib, gpu.memory_gib)) * 2**30 * USABLE_SHARE


def fits(layout: Layout, layers: np.ndarray, max_gib: float | None = None) -> np.ndarray:
    """Return whether each layer split fits in memory on every stage, (plans,)."""
    if layout.is_per_stage and not (_base_memory(layout, layers).total() <= stage_capacity(layout, max_gib)).all():
        return np.zeros(len(layers), dtype=bool)  # a quick check that often suffices
    return np.asarray((memory(layout, layers).total() <= stage_capacity(layout, max_gib)).all(axis=1))


def excess_passes(layout: Layout, layers: np.ndarray, max_gib: float | None = None) -> np.ndarray:
    """Return by how many passes in flight each stage exceeds its memory, (S,), with per-stage TP/DP and one split."""
    for count in (_base_memory, memory):  # the first is quick, and often suffices
        held = count(layout, layers)
        excess_bytes = np.maximum(0.0, held.total()[0] - stage_capacity(layout, max_gib))
        if excess_bytes.any():
            break
    return np.ceil(excess_bytes * layout.schedule.in_flight / held.activations[0]).astype(int)


def stage_capacity(layout: Layout, max_gib: float | None = None) -> np.ndarray:
    """Return the usable bytes of a GPU of each stage, the minimum over pipeline replicas, (S,)."""
    name, replicas = ("capacity", max_gib), range(len(layout.replicas))
    usable = [by_stage(layout, r, name, lambda c: capacity(layout.pool(c).gpu, max_gib)) for r in replicas]
    return np.asarray(np.min(usable, axis=0))


class Shortage(NamedTuple):
    """The stage of a layout that lacks the most memory, with the bytes per GPU that it needs and that it can use."""

    stage: int
    needed_bytes: float
    usable_bytes: float
    parallel: Parallel

    @property
    def missing_bytes(self) -> float:
        return self.needed_bytes - self.usable_bytes

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0

    @property
    def gpu_gib(self) -> int:
        """The least memory in GiB of a GPU on which the stage fits."""
        return ceil(self.needed_bytes / 2**30 / USABLE_SHARE)

    def __str__(self) -> str:
        needed_gib, usable_gib = self.needed_bytes / 2**30, self.usable_bytes / 2**30
        return f"stage {self.stage} needs {needed_gib:.1f} GiB per GPU, but can use only {usable_gib:.1f} GiB"


def shortage(layout: Layout, layers: np.ndarray, max_gib: float | None = None) -> Shortage:
    """Return the largest shortage of one layer split, (1, S, C)."""
    needed, usable = memory(layout, layers).total()[0], stage_capacity(layout, max_gib)
    stage = int((needed - usable).argmax())
    return Shortage(stage, float(needed[stage]), float(usable[stage]), layout.parallel)


def check_memory(layout: Layout, layers: np.ndarray, max_gib: float | None = None) -> None:
    """Raise PlanError with the stage and the shortage if one layer split, (1, S, C), does not fit."""
    missing = shortage(layout, layers, max_gib)
    if not missing.fits:
        gpus = [layout.pool(replica[missing.stage]).gpu for replica in layout.replicas]
        smallest = min(gpus, key=lambda gpu: gpu.memory_gib)
        problem = f"{missing} of the {smallest.memory_gib:g} GiB on {smallest.name}"
        changes = ["more stages, TP or CP", *["recompute=full"] * (layout.recompute != "full")]
        changes += ["a smaller micro-batch"] * (layout.batch.micro_size > 1)
        hint = f"use {', '.join(changes)}, or GPUs of {missing.gpu_gib} GiB"
        raise PlanError(problem, where="memory", hint=hint)
