"""Seconds of computing and bytes of data on a site's GPUs.

A calibration holds the times of the measured shapes. Times of other shapes are scaled by a model: the kernel tables on
GPUs, FLOPs on CPUs. If a layer was measured at the requested TP, its time includes the TP collectives. If it was
measured at another TP, the modelled collectives of that TP are subtracted and those of the requested TP are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import FLASH_ATTENTION, Gpu, Pool, auto_dtype
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.calibration import NO_CALIBRATION, Calibration, Corrections, MeasuredPart, interpolate
from holmes_hpc.planning.cost.flops import ffn_matrix, layer_flops, layer_parameters, layer_score_flops, part_flops
from holmes_hpc.planning.cost.kernels import STACK, Device, Stack
from holmes_hpc.planning.cost.layer_times import PARTS, Cpu, LayerShape, Seconds, all_reduce_s, part_times
from holmes_hpc.planning.cost.network_figures import GLOO_LINKS, NCCL_LINKS, Collectives, Link, collectives
from holmes_hpc.planning.cost.software import CURRENT, Software
from holmes_hpc.planning.plan.transport import Transport

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
MIN_COMPUTE_SHARE = 0.2  # least share of computing in a time under TP; the collectives take at most the remainder
# An emulated pass takes this long in addition to its layers, for messages and for ranks that wake up late on shared
# cores. Fitted to the *light* runs of the evaluation, on two cores (benchmarks/results/limit.md).
EMULATED_PASS_S = 1.9e-3


@dataclass(frozen=True)
class Costs:
    """The sources of all times: `calibration` if available, else `pace_layer_ms` (emulated), else published figures.

    A calibration must have the same `pace_layer_ms` and, if both name one, the same `dtype`. `dtype`: type of weights
    and activations; None: that of the calibration, otherwise that of :func:`auto_dtype`. `grad_dtype`: type of
    gradients in the buffers and on the wire; None: fp32. `early_step`: "stage" for optimizer steps before the gradient
    norm is known. `software`: the training program's behaviour; a GPU kind may
    override its attention and norms. `stack`: the efficiencies of kernels and links on unmeasured GPUs. `corrections`:
    factors of compute times and link rates, fitted to a site's own runs."""

    calibration: Calibration = NO_CALIBRATION
    pace_layer_ms: float | None = None
    pace_factors: Mapping[str, float] | None = field(default=None, hash=False, kw_only=True)  # of the pace, by pool
    dtype: str | None = None
    grad_dtype: str | None = None
    early_step: str | None = None
    software: Software = CURRENT
    stack: Stack = STACK
    corrections: Corrections = field(default_factory=Corrections)

    def __post_init__(self) -> None:
        self.calibration.refuse_other_settings(self.pace_layer_ms, self.dtype)

    def software_on(self, gpu: Gpu) -> Software:
        """Return the training program's behaviour on a GPU kind. ConfigError for FlashAttention with fp32 weights."""
        if gpu.attention is None and gpu.fused_norm is None and gpu.has_bf16:
            return self.software
        return self._memo.of("software", gpu, compute=lambda: self._software_on(gpu))

    @cached_property
    def _memo(self) -> Memo:
        return Memo()

    def _software_on(self, gpu: Gpu) -> Software:
        is_fp32_flash = gpu.attention in FLASH_ATTENTION and not gpu.is_cpu and self.dtype_of(gpu) == "fp32"
        problem = f"attention {gpu.attention} supports only fp16 and bf16, but the weights are fp32"
        ConfigError.refuse(f"gpu {gpu.name}", (is_fp32_flash, problem, "use attention sdpa, or dtype bf16"))
        fused_norm = self.software.fused_norm if gpu.fused_norm is None else gpu.fused_norm
        attention = gpu.attention or self.software.attention
        if gpu.attention is None and attention in FLASH_ATTENTION and not gpu.has_bf16:
            attention = "sdpa"
        return replace(self.software, attention=attention, fused_norm=fused_norm)

    def dtype_of(self, gpu: Gpu) -> str:
        return self.dtype or self.calibration.dtype or auto_dtype([gpu])

    def weight_bytes(self, gpu: Gpu) -> int:
        """Return the bytes of one weight. One element of an activation has the same size."""
        return BYTES[self.dtype_of(gpu)]

    @property
    def gradient_size(self) -> int:
        """Return the bytes of one gradient element in its buffer."""
        return BYTES[self.grad_dtype or "fp32"]

    @property
    def wire_size(self) -> int:
        """Return the bytes of one gradient element on the wire."""
        return self.software.wire_bytes or self.gradient_size

    def collectives(self, gpu: Gpu) -> Collectives:
        return collectives(gpu)

    def link(self, transport: Transport, pool: Pool, collective: str = "") -> Link:
        """Return the :class:`Link` of a transport on `pool`, for messages or `collective` (a name in COLLECTIVES)."""
        name = "local" if transport.kind == "local" else str(transport.nic)
        key = (name, pool.name, pool.gpu, pool.rdma_efficiency, collective)
        return self._memo.of(*key, compute=lambda: self._link(name, pool, collective))  # 100,000 calls in a search

    def _link(self, name: str, pool: Pool, collective: str) -> Link:
        link = self.calibration.link(pool, name, collective)
        if link is None:
            link = self._links(pool.gpu)[name]
            if pool.nic.rdma and name == str(pool.nic) and not (pool.gpu.is_cpu or self.pace_layer_ms):
                share = self.stack.ib if name == "ib" else self.stack.roce
                link = replace(link, efficiency=share if collective else self.stack.transfer)
            if pool.rdma_efficiency is not None and name == str(pool.nic):
                link = replace(link, efficiency=pool.rdma_efficiency)
        return replace(link, efficiency=link.efficiency * self.corrections.rates.get(name, 1.0))

    def _links(self, gpu: Gpu) -> Mapping[str, Link]:
        return GLOO_LINKS if gpu.is_cpu else NCCL_LINKS

    def layer_s(
        self,
        model: ModelSpec,
        batch: Batch,
        tp: int,
        pool: Pool,
        sequence_parallel: bool = False,
        recompute: str = "none",
        ep: int = 1,
        etp: int = 1,
    ) -> Seconds:
        """Return the seconds of (forward, backward) of a layer, without the all-to-alls of experts, for one micro-batch
        on one of `tp` ranks of `pool`. Recomputation counts as backward; in emulated compute, only `full` does."""
        gpu, shape = pool.gpu, LayerShape(model, batch, tp, sequence_parallel, recompute, ep, etp)
        if self.pace_layer_ms:
            forward, backward = self._paced_s(shape, pool)
            return forward, backward + (forward if recompute == "full" else 0.0)
        measured = self._measured_s("layer", shape, pool)
        if measured is None and not gpu.is_cpu:
            # An exchange of CP ranks between nodes shares a node's NIC with the exchanges of the other TP ranks.
            nic_gbps = pool.data_gbps / tp if tp * batch.cp > pool.gpus_per_node else None
            if nic_gbps and batch.all_to_all:  # each rank sends to each CP peer outside its node
                nic_gbps *= (batch.cp - 1) / ((inside := max(1, pool.gpus_per_node // tp)) * (batch.cp - inside))
            return self._correct(self._times(shape, gpu, nic_gbps)[0], gpu)
        tokens, sequence = shape.tokens, batch.context
        flops, software = layer_flops(model, tokens, sequence), self.software_on(gpu)
        recomputes_norms = "norms" in software.recompute_parts and recompute == "selective"
        problem = "recomputing norms is not supported: their time is unknown for measured layers and on CPUs"
        ConfigError.refuse("software.recompute_parts", (recomputes_norms, problem, "remove norms"))
        if measured is not None:
            forward, backward = measured
            scores_s = forward * layer_score_flops(model, tokens, sequence) / flops
        else:
            cpu = self._cpu(gpu)
            non_matrix_s, matrix_s = cpu.non_matrix_s(shape), cpu.matrix_s(flops / tp)
            forward, backward = matrix_s + non_matrix_s, 2 * (matrix_s + non_matrix_s)
            scores_s = cpu.matrix_s(layer_score_flops(model, tokens, sequence) / tp) + cpu.score_traffic_s(shape)
            comm_s = self._comm_s("layer", shape, pool)
            forward += comm_s[0]
            backward += comm_s[1] + cpu.accumulate_s(layer_parameters(model, tp, ep * etp))
        part_seconds = {"scores": scores_s, "ffn": forward * 2.0 * tokens * ffn_matrix(model) / flops}
        selective_s = sum(part_seconds.get(part, 0.0) for part in software.recompute_parts)
        recomputed_s = {"none": 0.0, "selective": selective_s, "full": forward}[recompute]
        return self._correct((forward, backward + recomputed_s), gpu)

    def part_s(self, part: str, model: ModelSpec, batch: Batch, tp: int, pool: Pool) -> Seconds:
        """Return the seconds of (forward, backward) of the embedding, or of the head with its norm and loss.
        With emulated compute, they take no time of their own, because the time of the layers includes them."""
        if self.pace_layer_ms:
            return 0.0, 0.0
        gpu, shape = pool.gpu, LayerShape(model, batch, tp)
        seconds = self._measured_s(part, shape, pool)
        if seconds is None and gpu.is_cpu:
            seconds = self._cpu(gpu).embedding_s(shape) if part == "embedding" else self._cpu(gpu).head_s(shape)
        return self._correct(seconds or self._times(shape, gpu)[PARTS.index(part)], gpu)

    def optimizer_s(self, parameters: float, pool: Pool) -> float:
        """Return the seconds in which Adam updates `parameters` parameters. It reads the gradient, the fp32 weight and
        two moments. It writes the fp32 weight, the two moments, and the weight in the model's dtype."""
        gpu, measured = pool.gpu, self.calibration.best_match(pool)
        if measured is not None and measured.optimizer_s is not None:
            return parameters * measured.optimizer_s
        moved_bytes = parameters * (self.gradient_size + 6 * 4 + self.weight_bytes(gpu))
        if gpu.is_cpu or self.pace_layer_ms:
            return self._cpu(gpu).memory_s(moved_bytes)
        return self._device(gpu).streamed_s(moved_bytes)

    def pass_overhead_s(self, pool: Pool, chunks: int = 1) -> float:
        """Return the fixed seconds of a pass through one of a stage's `chunks` model chunks.
        They come in addition to the times of layers, embedding and head."""
        measured = self.calibration.best_match(pool)
        if self.pace_layer_ms:
            return 0.0 if self.is_measured(pool) else EMULATED_PASS_S
        if measured is not None and measured.pass_s is not None:
            return measured.pass_s / chunks
        if not self.is_modelled(pool):
            return 0.0
        return self.stack.pass_s / chunks + (self.stack.chunk_s if chunks > 1 else 0.0)

    def step_overhead_s(self, pool: Pool) -> float:
        """Return the fixed seconds of a step, in addition to its passes and its traffic."""
        if self.calibration.step_s is not None:
            return self.calibration.step_s
        return self.stack.step_s if self.is_modelled(pool) else 0.0

    def is_modelled(self, pool: Pool) -> bool:
        """Return whether compute times come from the kernel tables: on GPUs, if neither measured nor emulated."""
        return not (pool.gpu.is_cpu or self.pace_layer_ms or self.is_measured(pool))

    def is_measured(self, pool: Pool) -> bool:
        """Return whether layers were measured on GPUs of the pool's kind."""
        return bool(self.calibration.parts(pool, "layer", 1))

    def _correct(self, seconds: Seconds, gpu: Gpu) -> Seconds:
        factor = 1.0 if self.pace_layer_ms else self.corrections.compute.get(gpu.name, 1.0)
        return seconds if factor == 1.0 else (factor * seconds[0], factor * seconds[1])

    def _times(self, shape: LayerShape, gpu: Gpu, cp_gbps: float | None = None) -> tuple[Seconds, Seconds, Seconds]:
        return part_times(self._device(gpu), self.software_on(gpu), shape, self.gradient_size, cp_gbps)

    def _device(self, gpu: Gpu) -> Device:
        return Device(gpu, self.weight_bytes(gpu), self.stack)

    def _cpu(self, gpu: Gpu) -> Cpu:
        return Cpu(gpu, self.weight_bytes(gpu), self.gradient_size, self.software_on(gpu).flash)

    def _paced_s(self, shape: LayerShape, pool: Pool) -> Seconds:
        """Return the measured, else the emulated seconds of a layer's (forward, backward) of any size."""
        if rows := self.calibration.parts(pool, "layer", shape.model.hidden):
            tokens, tp = shape.tokens, shape.tp
            nearest = min(rows, key=lambda p: (abs(math.log(p.tokens / tokens)), abs(math.log(p.tp / tp))))
            return nearest.forward_s, nearest.backward_s
        assert self.pace_layer_ms is not None
        forward = self.pace_layer_ms / 1e3 * (self.pace_factors or {}).get(pool.name, 1.0)
        return forward, 2 * forward

    def _measured_s(self, part: str, shape: LayerShape, pool: Pool) -> Seconds | None:
        """Return the seconds of (forward, backward) of a part, from its measurements; None if there are none."""
        if not (rows := self.calibration.parts(pool, part, shape.model.hidden)):
            return None
        return self._memo.of(part, shape, pool.name, pool.gpu, compute=lambda: self._interpolate_s(rows, shape, pool))

    def _interpolate_s(self, rows: list[MeasuredPart], shape: LayerShape, pool: Pool) -> Seconds:
        """Interpolate the measured/modelled ratio between shapes and scale the modelled time by it.
        `rows`: the measurements of one part. Only rows whose TP is nearest to `shape.tp` are used."""
        part, sequence = rows[0].part, shape.batch.sequence_length
        nearest_tp = min({p.tp for p in rows}, key=lambda tp: (abs(math.log(tp / shape.tp)), tp))
        is_same_tp = nearest_tp == shape.tp
        ratios = list[tuple[tuple[float, ...], Seconds]]()

        def modelled_part(
            tokens: int, sequence: int, tp: int, sequence_parallel: bool, flops: float | None = None
        ) -> tuple[Seconds, Seconds]:
            """Return (modelled cost of a shape, seconds of its TP collectives: 0 if the cost includes them)."""
            size = max(1, round(tokens / sequence))
            compute_shape = LayerShape(shape.model, Batch(size, size, sequence), tp, sequence_parallel)
            modelled_s = self._modelled_shape_s(part, compute_shape, tokens, pool, collectives=is_same_tp, flops=flops)
            # Collectives depend only on the number of tokens, so their shape need not have whole sequences.
            comm_shape = replace(compute_shape, batch=Batch(1, 1, tokens))
            return modelled_s, (0.0, 0.0) if is_same_tp else self._comm_s(part, comm_shape, pool)

        for p in (p for p in rows if p.tp == nearest_tp):
            row_sequence = p.sequence or sequence
            modelled_s, comm_s = modelled_part(p.tokens, row_sequence, nearest_tp, p.sequence_parallel, p.flops)
            passes = zip((p.forward_s, p.backward_s), comm_s, modelled_s, strict=True)
            forward, backward = (max(s - t, MIN_COMPUTE_SHARE * s) / modelled for s, t, modelled in passes)
            ratios.append(((row_sequence, p.tokens), (forward, backward)))
        modelled_s, comm_s = modelled_part(shape.tokens, sequence, shape.tp, shape.sequence_parallel)
        forward, backward = (
            interpolate([(row, r[i]) for row, r in ratios], (sequence, shape.tokens)) * modelled_s[i] + comm_s[i]
            for i in (0, 1)
        )
        return forward, backward

    def _modelled_shape_s(
        self, part: str, shape: LayerShape, tokens: int, pool: Pool, collectives: bool, flops: float | None
    ) -> Seconds:
        """Return the modelled cost of `tokens` tokens of a shape, in a unit that allows comparison between shapes.
        On GPUs, the cost is the seconds from the kernel tables, including TP's collectives if `collectives`. On CPUs,
        it is the FLOPs of one rank. `flops`: FLOPs of the part on all TP ranks; None: derived from the shape."""
        gpu, model, tp = pool.gpu, shape.model, shape.tp
        if gpu.is_cpu or self.pace_layer_ms:
            part_count = flops or part_flops(model, part, tokens, shape.batch.sequence_length, tp)
            rank_flops = part_count / (1 if part == "embedding" else tp)
            return rank_flops, rank_flops
        modelled_s, comm_s = self._times(shape, gpu)[PARTS.index(part)], (0.0, 0.0)
        if not collectives:  # the tables include them
            comm_s = self._part_comm_s(part, all_reduce_s(self._device(gpu), shape), model, gpu)
        share = tokens / shape.tokens
        forward, backward = (max(s - t, MIN_COMPUTE_SHARE * s) * share for s, t in zip(modelled_s, comm_s, strict=True))
        return forward, backward

    def _comm_s(self, part: str, shape: LayerShape, pool: Pool) -> Seconds:
        """Return the seconds of TP's collectives in a part's (forward, backward)."""
        return self._part_comm_s(part, self._all_reduce_s(shape, pool), shape.model, pool.gpu)

    def _part_comm_s(self, part: str, all_reduce_s: float, model: ModelSpec, gpu: Gpu) -> Seconds:
        """Return the seconds of a part's TP collectives in (forward, backward), from the seconds of one all-reduce."""
        backward, expert_only = self.software_on(gpu).backward_reductions, not model.tp_ffn  # TP never splits experts
        return {
            "layer": ((2 - expert_only) * all_reduce_s, (backward - expert_only) * all_reduce_s),
            "embedding": (all_reduce_s, 0.0),
            "head": (0.0, all_reduce_s),
        }[part]

    def _all_reduce_s(self, shape: LayerShape, pool: Pool) -> float:
        """Return the seconds of an all-reduce of tokens x hidden elements over the TP ranks. Sequence parallelism sends
        as many bytes. If the link is not measured, GPUs use the figures of :class:`Stack` and CPUs use GLOO_LINKS."""
        gpu, tp = pool.gpu, shape.tp
        if tp == 1:
            return 0.0
        link = self.calibration.link(pool, "local", "reduce_scatter")
        if link is None and not gpu.is_cpu:
            return all_reduce_s(self._device(gpu), shape)
        link, factor = link or self._links(gpu)["local"], collectives(gpu).all_reduce
        sent_bytes = factor * (tp - 1) / tp * shape.tokens * shape.model.hidden * self.weight_bytes(gpu)
        return sent_bytes / (gpu.intra_node_gbps * 1e9 / 8 * link.efficiency) + factor * (tp - 1) * link.latency_s
