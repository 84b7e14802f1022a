"""Memory of one GPU of each stage: weights, gradients, optimizer shards, activations in flight, buffers.

Activations: Korthikanti et al. 2022 (arXiv 2205.05198), section 4, for any element size, with rotary positions,
grouped-query attention, SwiGLU, with and without fused modules. Weights and optimizer: Megatron-Core's buffers, that
is weights and gradients whole, Adam's two moments and, beside half-precision weights, fp32 master weights, in fp32,
sharded over a data-parallel run by the distributed optimizer (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import parameters, recomputed
from holmes_hpc.planning.cost.traffic import by_stage
from holmes_hpc.planning.plan.plan import Component, Schedule
from holmes_hpc.planning.schedule.kinds import PER_STAGE
from holmes_hpc.planning.schedule.order import Order

# What a CUDA process holds beside tensors: context, NCCL's channels, cuBLAS workspaces, and the allocator's slack.
CUDA_BYTES = 2 * 2**30
SLACK = 0.96


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one rank, arrays of shape (plans, S)."""

    weights: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    activations: np.ndarray
    buffers: np.ndarray

    def total(self) -> np.ndarray:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def layer_activation_bytes(
    model: ModelSpec,
    tokens: int,
    sequence: int,
    tp: int,
    element: int,
    sequence_parallel: bool,
    recompute: str,
    fused: bool,
    flash: bool,
    loose_norm: bool = False,
    loose: bool = False,
    fp32_scores: bool = False,
    parts: Sequence[str] = ("scores",),
) -> tuple[float, float]:
    """(held from forward to backward, needed beside it while the layer's backward pass runs) of one layer and
    micro-batch, on one of `tp` ranks. `element`: bytes of an activation.

    Not `fused` is what Megatron-Core's own modules keep on a CPU, tensor by tensor as autograd saves them
    (benchmarks/planner_memory.py); fused is what Transformer Engine's keep. `flash`: of scores only a number a row is
    kept. `loose_norm`, `loose`, `fp32_scores`: on a GPU, what autograd saves of norms computed in fp32, of
    rotary positions and gates, operation by operation, and of a softmax in fp32. `parts`: what selective recomputation
    computes again, which keeps what goes into them: of the FFN and norms all but their input.
    """
    m, h, queries, keys = model, model.hidden, model.query_width, 2 * model.key_width
    norm = 3 if m.rmsnorm and not fused else 2  # input, (normalised input,) output
    mask = 1 if fused else element  # a dropout mask's element
    whole = 2 * norm * h * element + (2 * h * mask if m.dropout else 0)
    if flash:
        attention = queries + keys + (queries + keys // 2 if m.rope else 0)  # q, k, v and rotated q, k
    elif m.kv_heads < m.heads:
        attention = 3 * queries + (0 if m.rope else queries + keys)  # rotated q; k and v repeated for every head
    else:
        attention = 3 * queries + (2 * queries if m.rope else 0)
    attention += (norm - 1) * (queries + keys // 2) if m.qk_norm else 0
    wide = ((3 if fused else 5) if m.swiglu else 2) * m.ffn  # before, in and after the FFN's activation
    if loose_norm:
        whole += 2 * 8 * h  # input and normalised input in fp32
    if loose and fused:
        wide += m.ffn if m.swiglu else 0
        attention += 2 * (queries + keys // 2) if m.rope else 0  # both halves of a rotation's products
    dropped = element + mask if m.dropout else 0
    wider = 4 if fp32_scores else 0  # softmax in fp32 keeps its output beside the half-precision one
    scores = m.heads * (4 if flash else sequence * (element + dropped + wider))  # fused: a number for each row
    everything = tokens * (
        whole / (tp if sequence_parallel else 1) + ((attention + queries + wide) * element + scores) / tp
    )
    everything += 0 if flash else sequence * sequence  # the causal mask, one for all heads and sequences
    gradients = tokens * (3 * m.ffn * element + (0 if flash else m.heads * sequence * (element + wider))) / tp
    kept = tokens * h * element / (tp if sequence_parallel else 1)
    if recompute == "full":
        return kept, everything + gradients
    if recompute == "selective":
        norms = 2 * ((norm - 1) * h * element + (8 * h if loose_norm else 0)) / (tp if sequence_parallel else 1)
        again = tokens * sum({"scores": scores / tp, "norms": norms, "ffn": wide * element / tp}[p] for p in parts)
        return everything - again, max(again, gradients)
    return everything, gradients


def memory(layout: Layout, layers: np.ndarray) -> StageMemory:
    """Peak memory of a rank of each stage for layer splits of shape (plans, S, C), the most of all pipeline
    replicas."""
    if layout.is_per_stage:
        return _memory_per_stage(layout, layers)
    parts = [_replica(layout, replica, layers) for replica in range(len(layout.replicas))]
    return StageMemory(*(np.max([getattr(p, f.name) for p in parts], axis=0) for f in fields(StageMemory)))


def _memory_per_stage(layout: Layout, layers: np.ndarray) -> StageMemory:
    """:func:`memory` of a layout that is per stage, of each stage the replica with most neighbours."""
    p, batch = layout.parallel, layout.batch
    own = _own_memory(layout, layers)
    posted = np.zeros(p.pp)
    for s, component in enumerate(layout.replicas[0]):
        element = layout.costs.weight_bytes(layout.fabric(component).gpu)
        tensor = batch.micro_size * batch.sequence_length * layout.model.hidden * element / p.tp_of(s)
        counted = 2 * ((s > 0) + (s < p.pp - 1))  # windows of one, in the view
        posted[s] = max(0, layout.order.buffers(s) - counted) * tensor
    return replace(own, buffers=own.buffers + posted)


def _own_memory(layout: Layout, layers: np.ndarray) -> StageMemory:
    """Return :func:`memory` of a layout that is per stage, without its buffers of transfers beyond the first ones."""
    pp, stages = layout.parallel.pp, np.arange(layout.parallel.pp)

    def of_view(view: Layout, depth: int) -> StageMemory:
        schedule = Schedule(PER_STAGE.name, (depth,) * pp)
        return view.memo.of("memory at", depth, compute=lambda: memory(view.varied(schedule), view.all_layers))

    tables = [of_view(view, depth) for view, depth in zip(layout.views, layout.schedule.in_flight, strict=True)]
    rows = layers[:, :, 0] - 1
    return StageMemory(
        *(np.stack([getattr(tables[s], f.name)[rows[:, s], s] for s in stages], axis=1) for f in fields(StageMemory))
    )


def _replica(layout: Layout, replica: int, layers: np.ndarray) -> StageMemory:
    p, m, costs = layout.parallel, layout.model, layout.costs
    tokens = layout.batch.micro_size * layout.batch.sequence_length
    count = parameters(layout, layers).sum(axis=2)

    def of(component: Component) -> tuple[float, ...]:
        gpu = layout.fabric(component).gpu
        return (
            costs.weight_bytes(gpu),
            costs.gradient_size,
            moment_bytes(costs, gpu),
            0 if gpu.is_cpu else CUDA_BYTES,
            *_activation_bytes(
                m,
                layout.batch,
                costs,
                gpu=gpu,
                tp=p.tp,
                sequence_parallel=p.sequence_parallel,
                recompute=layout.recompute,
            ),
            _activation_bytes(
                m, layout.batch, costs, gpu=gpu, tp=p.tp, sequence_parallel=p.sequence_parallel, recompute="none"
            )[0],
        )

    element, gradient, moments, outside, kept, more, whole = layout.memo.of(
        *("memory", replica, layout.recompute),
        compute=lambda: by_stage(layout, replica, ("memory", layout.recompute), of).T,
    )
    weights, gradients = count * element, count * gradient
    optimizer = count * moments / (layout.run if p.distributed_optimizer else 1)
    gathered = np.zeros_like(count)
    if costs.software.sharding in ("gradients", "full"):  # FSDP: shards, and two layers' whole at a time
        two = 2 * layer_parameters(m, p.tp) * element
        gradients = gradients / layout.run
        if costs.software.sharding == "full":
            weights, gathered = weights / layout.run, np.minimum(weights, two) + np.zeros_like(count)

    again = recomputed(layout, layers) if layout.recompute == "full" else layers
    held = again * kept[:, None] + (layers - again) * whole[:, None]  # of a pass of each chunk
    if (layers == layers[:, :, :1]).all():  # as many in every chunk: it does not matter which chunk's passes are held
        held = held[:, :, 0] * np.array([layout.order.depths[s] for s in range(p.pp)])
    else:
        held = np.stack([(held[:, s] @ held_passes(layout.order, s).T).max(axis=1) for s in range(p.pp)], axis=1)
    beside = np.zeros_like(count) + more
    transfer = tokens * m.hidden / (p.tp if p.sequence_parallel else 1) * element
    held[:, 0] += transfer[0] * layout.order.depths[0] * (1 if m.dropout else 0)
    logits = tokens * m.padded_vocab(p.tp) / (1 if costs.software.gathered_logits else p.tp)
    held[:, -1] += 3 * transfer[-1]  # the final norm
    copy = element[-1] if element[-1] < 4 else 0  # of the logits, in half precision
    matrix = m.padded_vocab(p.tp) / p.tp * m.hidden * element[-1]  # the head's gradient, until it is added to the sum
    # torch's own loss: their parts, log-probabilities, a cast gradient
    lost = 12 if costs.software.gathered_logits else 0
    beside[:, -1] = np.maximum(beside[:, -1], logits * (4 + copy + lost) + matrix)  # softmax becomes its gradient
    buffers = gathered + beside + np.array(_posted(layout.order)) * transfer
    buffers += outside
    return StageMemory(weights, gradients, optimizer, held, buffers)


def moment_bytes(costs: Costs, gpu: Gpu) -> float:
    """Of the optimizer, for each parameter: Adam's two moments, and master weights beside half-precision ones."""
    return 12.0 if costs.weight_bytes(gpu) < 4 else 8.0


def _activation_bytes(
    model: ModelSpec, batch: Batch, costs: Costs, gpu: Gpu, tp: int, sequence_parallel: bool, recompute: str
) -> tuple[float, float]:
    """:func:`layer_activation_bytes` as the training program keeps them."""
    does = costs.software_on(gpu)
    return layer_activation_bytes(
        model,
        batch.micro_size * batch.sequence_length,
        batch.sequence_length,
        tp=tp,
        element=costs.weight_bytes(gpu),
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        fused=does.flash and not gpu.is_cpu,
        flash=does.flash and not (gpu.is_cpu and model.dropout),
        loose_norm=not (does.fused_norm or gpu.is_cpu),
        loose=not (does.fused_elementwise or gpu.is_cpu),
        fp32_scores=does.attention == "unfused" and not gpu.is_cpu and costs.weight_bytes(gpu) < 4,
        parts=does.recompute_parts,
    )


def most_layers(
    model: ModelSpec,
    batch: Batch,
    costs: Costs,
    gpu: Gpu,
    tp: int,
    sequence_parallel: bool,
    recompute: str,
    run: int,
    depth: np.ndarray,
    most_gib: float | None = None,
) -> np.ndarray:
    """Layers that a stage holds at most, of their own weights, gradients, share of the optimizer (`run` ranks have one)
    and activations alone; `depth`: passes in flight per chunk of each stage, (S,). No stage holds more; most hold
    less."""
    kept, _ = _activation_bytes(
        model, batch, costs, gpu=gpu, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute
    )
    held = layer_parameters(model, tp) * (
        costs.weight_bytes(gpu) + costs.gradient_size + moment_bytes(costs, gpu) / run
    )
    if costs.software.sharding in ("gradients", "full"):
        held = 0.0
    left = capacity(gpu, most_gib) - (0 if gpu.is_cpu else CUDA_BYTES)
    return np.asarray(np.floor(np.maximum(0, left) / (held + depth * kept)))


@lru_cache(maxsize=1024)
def held_passes(order: Order, stage: int) -> np.ndarray:
    """Passes of each chunk that `stage` holds at its fullest moments, (moments, C): it has done its depth of forward
    passes, and goes on with one backward and one forward pass in turn."""
    if order.chunks == 1:
        return np.array([[order.depths[stage]]])
    depth = order.depths[stage]
    chunk = np.array([c for _, c in replace(order, micro_batches=min(order.micro_batches, 4 * order.group)).turns()])
    gone = [
        np.concatenate([np.zeros((1, order.chunks), int), np.cumsum(np.eye(order.chunks, dtype=int)[c], axis=0)])
        for c in (chunk, order.chunks - 1 - chunk)
    ]
    moments = range(max(1, len(chunk) - depth + 1))
    return np.unique([gone[0][min(depth + k, len(chunk))] - gone[1][k] for k in moments], axis=0)


@lru_cache(maxsize=1024)
def _posted(order: Order) -> tuple[int, ...]:
    """Stage transfers that each stage holds buffers for: received and sent, ahead of need where it exchanges in the
    background."""
    if order.stages == 1:
        return (0,)
    if order.schedule.megatron:
        return (2,) * order.stages
    windows = [0, *(order.window_below(s) for s in range(order.stages - 1)), 0]
    return tuple(2 * (above + below) for above, below in pairwise(windows))


def capacity(gpu: Gpu, most_gib: float | None = None) -> float:
    """Bytes of a GPU that a plan may use: all but what fragmentation takes."""
    return (most_gib or gpu.memory_gib) * 2**30 * SLACK


def fits(layout: Layout, layers: np.ndarray, most_gib: float | None = None) -> np.ndarray:
    """Which layer splits fit on every stage, (plans,)."""
    if layout.is_per_stage and not (_own_memory(layout, layers).total() <= room(layout, most_gib)).all():
        return np.zeros(len(layers), dtype=bool)  # much quicker than with all buffers, and often enough
    return np.asarray((memory(layout, layers).total() <= room(layout, most_gib)).all(axis=1))


def room(layout: Layout, most_gib: float | None = None) -> np.ndarray:
    """Bytes of a GPU of each stage that a plan may use, the least of all pipeline replicas, (S,)."""
    return np.asarray(
        np.min(
            [
                by_stage(layout, replica, ("room", most_gib), lambda c: capacity(layout.fabric(c).gpu, most_gib))
                for replica in range(len(layout.replicas))
            ],
            axis=0,
        )
    )


class Shortage(NamedTuple):
    """The stage whose GPUs lack most memory for what they `need`, in bytes; at most 0 is enough."""

    bytes: float
    need: float
    stage: int

    def __str__(self) -> str:
        gib = 2.0**30
        return f"stage {self.stage} needs {self.need / gib:.1f} GiB a GPU, {self.bytes / gib:.1f} GiB more"


def shortage(layout: Layout, layers: np.ndarray, most_gib: float | None = None) -> Shortage:
    """Return what one layer split, (1, S, C), lacks most."""
    need = memory(layout, layers).total()[0]
    short = need - room(layout, most_gib)
    stage = int(short.argmax())
    return Shortage(float(short[stage]), float(need[stage]), stage)


def refuse(layout: Layout, layers: np.ndarray, most_gib: float | None = None) -> None:
    """Raise PlanError that names the stage and the shortfall if one layer split, (1, S, C), does not fit."""
    short = shortage(layout, layers, most_gib)
    if short.bytes > 0:
        gpus = [layout.fabric(replica[short.stage]).gpu for replica in layout.replicas]
        raise PlanError(
            f"{short} than {min(gpus, key=lambda gpu: gpu.memory_gib).name} has to give",
            where="memory",
            hint=f"use more stages or TP, recompute=full, a smaller micro-batch, or GPUs of"
            f" {short.need / 2**30 / SLACK:.0f} GiB",
        )
