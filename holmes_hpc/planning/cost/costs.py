"""What computing costs in seconds and what data weighs in bytes: from a calibration, from paced compute, from the
kernels' tables of a GPU kind (layer.py), or, on CPUs, from published figures.

A calibration gives the times of the shapes that it measured. To others they go as what is reckoned of both does: by the
kernels' tables, on CPUs by FLOPs. A layer measured at the TP that is asked for holds its collectives; from another TP
what is reckoned of them is taken away, and what is reckoned of those at the TP asked for is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Fabric, Gpu, Site
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.calibration import NONE, Calibration, Corrections, Measured, MeasuredFabric, interpolated
from holmes_hpc.planning.cost.flops import ffn_matrix, layer_flops, layer_parameters, layer_score_flops, part_flops
from holmes_hpc.planning.cost.hardware import GLOO_LINKS, NCCL_LINKS, Collectives, Link, collectives
from holmes_hpc.planning.cost.kernels import STACK, Device, Stack
from holmes_hpc.planning.cost.layer import PARTS, Cpu, Seconds, reduction_s, times
from holmes_hpc.planning.cost.software import CURRENT, Software
from holmes_hpc.planning.plan.transport import Transport
from holmes_hpc.schema import refuse

__all__ = ["BYTES", "CURRENT", "Costs", "Software"]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
COMPUTED = 0.2  # at least this share of what was measured under TP is not its collectives


@dataclass(frozen=True)
class Costs:
    """Where times come from, best first: `calibration`, `pace_layer_ms` (layers wait that long), published figures. A
    calibration must have been made at the same pace and, if `dtype` says one, with the same type.

    `dtype`: of weights and activations; None: fp32 on CPUs, bf16 on GPUs. `gradient_bytes`: of a gradient element in
    the buffers and on the wire; None: 4 (grad_reduce_in_fp32). `software`: what the training program does, where a GPU
    kind does not say otherwise itself. `stack`: what kernels and links reach on GPUs that nobody measured.
    `corrections`: of all that, by what a site's own runs took.
    """

    calibration: Calibration | None = None
    pace_layer_ms: float | None = None
    pace_factors: Mapping[str, float] | None = field(default=None, hash=False, kw_only=True)  # of a fabric's layers
    dtype: str | None = None
    gradient_bytes: int | None = None
    software: Software = CURRENT
    stack: Stack = STACK
    corrections: Corrections = NONE

    def __post_init__(self) -> None:
        pace, dtype = self.pace_layer_ms, self.dtype
        refuse(
            "costs",
            (dtype not in (None, "fp32", "bf16", "fp16"), f"unknown dtype {dtype!r}", "use fp32, bf16 or fp16"),
            (pace is not None and not pace > 0, f"pace_layer_ms is {pace}", "use milliseconds above 0"),
        )
        if self.calibration is not None:
            self.calibration.refuse_other_settings(self.pace_layer_ms, self.dtype)

    def on(self, site: Site) -> Site:
        """`site`, with what was measured between its fabrics."""
        return self.calibration.on(site) if self.calibration is not None else site

    def software_on(self, gpu: Gpu) -> Software:
        """What the training program does on a kind of GPU. ConfigError where that cannot be."""
        if gpu.attention is None and gpu.fused_norm is None:
            return self.software
        return self._memo.of("software", gpu, compute=lambda: self._software_on(gpu))

    @cached_property
    def _memo(self) -> Memo:
        return Memo()

    def _software_on(self, gpu: Gpu) -> Software:
        if gpu.attention in ("flash", "flash1") and not gpu.is_cpu and self.dtype_of(gpu) == "fp32":
            raise ConfigError(
                f"attention is {gpu.attention}, which computes in fp16 or bf16 alone, and the weights are fp32",
                where=f"gpu {gpu.name}",
                hint="use attention: sdpa, or dtype bf16",
            )
        fused_norm = self.software.fused_norm if gpu.fused_norm is None else gpu.fused_norm
        return replace(self.software, attention=gpu.attention or self.software.attention, fused_norm=fused_norm)

    def dtype_of(self, gpu: Gpu) -> str:
        return (
            self.dtype or (self.calibration.dtype if self.calibration else None) or ("fp32" if gpu.is_cpu else "bf16")
        )

    def weight_bytes(self, gpu: Gpu) -> int:
        """Of one weight, and of one element of an activation."""
        return BYTES[self.dtype_of(gpu)]

    @property
    def gradient_size(self) -> int:
        """Bytes of one gradient element in its buffer."""
        return self.gradient_bytes or 4

    @property
    def wire_size(self) -> int:
        """Bytes of one gradient element on the wire."""
        return self.software.wire_bytes or self.gradient_size

    def collectives(self, gpu: Gpu) -> Collectives:
        return collectives(gpu)

    def link(self, transport: Transport, fabric: Fabric, collective: str = "") -> Link:
        """Latency and efficiency of a transport on `fabric`, for messages or for a `collective` (reduce_scatter or
        all_gather)."""
        name = "local" if transport.kind == "local" else str(transport.nic)
        return self._memo.of(
            *(name, fabric.name, fabric.gpu, collective), compute=lambda: self._link(name, fabric, collective)
        )  # a search asks a hundred thousand times

    def _link(self, name: str, fabric: Fabric, collective: str) -> Link:
        link = self.calibration.link(fabric, name, collective) if self.calibration is not None else None
        if link is None:
            link = self._links(fabric.gpu)[name]
            if name == "ib" and not (fabric.gpu.is_cpu or self.pace_layer_ms):
                link = replace(link, efficiency=self.stack.ib if collective else self.stack.transfer)
        return replace(link, efficiency=link.efficiency * self.corrections.rates.get(name, 1.0))

    def _links(self, gpu: Gpu) -> Mapping[str, Link]:
        return GLOO_LINKS if gpu.is_cpu else NCCL_LINKS

    def layer_s(
        self,
        model: ModelSpec,
        batch: Batch,
        tp: int,
        fabric: Fabric,
        sequence_parallel: bool = False,
        recompute: str = "none",
    ) -> Seconds:
        """Seconds of one layer's (forward, backward) for one micro-batch on one of `tp` ranks of `fabric`.

        Recomputation counts as backward: `full` the whole forward again, its collectives too, `selective` the
        attention scores. Paced layers wait in a recomputed forward as well.
        """
        gpu, tokens, sequence = fabric.gpu, batch.micro_size * batch.sequence_length, batch.sequence_length
        if self.pace_layer_ms:
            forward, backward = self._paced_s(model, tokens, tp, fabric)
            return forward, backward + (forward if recompute == "full" else 0.0)
        measured = self._measured_s("layer", model, batch, tp, fabric, sequence_parallel)
        if measured is None and not gpu.is_cpu:
            return self._corrected(self._modelled(model, batch, tp, gpu, sequence_parallel, recompute)[0], gpu)
        flops, software = layer_flops(model, tokens, sequence), self.software_on(gpu)
        if "norms" in software.recompute_parts and recompute == "selective":
            raise ConfigError(
                "norms are computed again, and what they take is not known where layers were measured, or on CPUs",
                where="software.recompute_parts",
                hint="leave norms out",
            )
        if measured is not None:
            forward, backward = measured
            scores = forward * layer_score_flops(model, tokens, sequence) / flops
        else:
            cpu = self._cpu(gpu)
            rest = cpu.rest_s(model, tokens, sequence, tp, sequence_parallel)
            matrix = cpu.matrix_s(flops / tp)
            forward, backward = matrix + rest, 2 * (matrix + rest)
            scores = cpu.matrix_s(layer_score_flops(model, tokens, sequence) / tp)
            scores += cpu.score_traffic_s(model, tokens, sequence, tp)
            talk = self._talk_s("layer", model, tokens, tp, fabric, sequence_parallel)
            forward += talk[0]
            backward += talk[1] + cpu.accumulate_s(layer_parameters(model, tp))
        parts = {"scores": scores, "ffn": forward * 2.0 * tokens * ffn_matrix(model) / flops}
        selected = sum(parts.get(part, 0.0) for part in software.recompute_parts)
        again = {"none": 0.0, "selective": selected, "full": forward}[recompute]
        return self._corrected((forward, backward + again), gpu)

    def part_s(self, part: str, model: ModelSpec, batch: Batch, tp: int, fabric: Fabric) -> Seconds:
        """Return the seconds of the (forward, backward) of the embedding or of the head: final norm, output matrix and
        loss."""
        gpu, tokens = fabric.gpu, batch.micro_size * batch.sequence_length
        found = self._measured_s(part, model, batch, tp, fabric)
        if found is None and (gpu.is_cpu or self.pace_layer_ms):
            cpu = self._cpu(gpu)
            found = cpu.embedding_s(model, tokens) if part == "embedding" else cpu.head_s(model, tokens, tp)
        return self._corrected(found or self._modelled(model, batch, tp, gpu)[PARTS.index(part)], gpu)

    def optimizer_s(self, updated: float, fabric: Fabric) -> float:
        """Seconds of Adam for `updated` parameters: gradient, weight and two moments read, the last three written."""
        gpu, measured = fabric.gpu, self._of(fabric)
        if measured is not None and measured.optimizer_s is not None:
            return updated * measured.optimizer_s
        moved = updated * (self.gradient_size + 6 * 4 + self.weight_bytes(gpu))
        return (
            self._cpu(gpu).memory_s(moved) if gpu.is_cpu or self.pace_layer_ms else self._device(gpu).streamed_s(moved)
        )

    def pass_s(self, fabric: Fabric) -> float:
        """Seconds of every pass that belong to none of its parts."""
        measured = self._of(fabric)
        if measured is not None and measured.pass_s is not None:
            return measured.pass_s
        return self.stack.pass_s if self.modelled(fabric) else 0.0

    def step_s(self, fabric: Fabric) -> float:
        """Seconds of every step that belong to none of its passes and none of its traffic."""
        if self.calibration is not None and self.calibration.step_s is not None:
            return self.calibration.step_s
        return self.stack.step_s if self.modelled(fabric) else 0.0

    def modelled(self, fabric: Fabric) -> bool:
        """Whether the times of computing are those of the kernels' tables: a GPU kind of which no layer was
        measured."""
        return not (fabric.gpu.is_cpu or self.pace_layer_ms or self.measured(fabric))

    def measured(self, fabric: Fabric) -> bool:
        """Whether layers were measured on GPUs of the fabric's kind."""
        return self.calibration is not None and bool(self.calibration.parts(fabric, "layer", 1))

    def _corrected(self, found: Seconds, gpu: Gpu) -> Seconds:
        factor = 1.0 if self.pace_layer_ms else self.corrections.compute.get(gpu.name, 1.0)
        return found if factor == 1.0 else (factor * found[0], factor * found[1])

    def _of(self, fabric: Fabric) -> MeasuredFabric | None:
        return self.calibration.of(fabric) if self.calibration is not None else None

    def _modelled(
        self,
        model: ModelSpec,
        batch: Batch,
        tp: int,
        gpu: Gpu,
        sequence_parallel: bool = False,
        recompute: str = "none",
    ) -> tuple[Seconds, Seconds, Seconds]:
        return times(
            self._device(gpu),
            self.software_on(gpu),
            model,
            batch,
            tp=tp,
            sequence_parallel=sequence_parallel,
            gradient_bytes=self.gradient_size,
            recompute=recompute,
        )

    def _device(self, gpu: Gpu) -> Device:
        return Device(gpu, self.weight_bytes(gpu), self.stack)

    def _cpu(self, gpu: Gpu) -> Cpu:
        return Cpu(gpu, self.weight_bytes(gpu), self.gradient_size, self.software_on(gpu).flash)

    # -- from what was measured ---------------------------------------------------------------------------------------

    def _paced_s(self, model: ModelSpec, tokens: int, tp: int, fabric: Fabric) -> Seconds:
        """Of a paced layer, which waits and does not grow: as measured, else its pace."""
        rows = self.calibration.parts(fabric, "layer", model.hidden) if self.calibration is not None else []
        if rows:
            near = min(rows, key=lambda p: (abs(math.log(p.tokens / tokens)), abs(math.log(p.tp / tp))))
            return near.forward_s, near.backward_s
        assert self.pace_layer_ms is not None
        forward = self.pace_layer_ms / 1e3 * (self.pace_factors or {}).get(fabric.name, 1.0)
        return forward, 2 * forward

    def _measured_s(
        self, part: str, model: ModelSpec, batch: Batch, tp: int, fabric: Fabric, sequence_parallel: bool = False
    ) -> Seconds | None:
        """Seconds of a part's (forward, backward) by what was measured; None: nothing was."""
        if self.calibration is None or not (rows := self.calibration.parts(fabric, part, model.hidden)):
            return None
        return self._memo.of(
            *(part, model, batch, tp, fabric.name, fabric.gpu, sequence_parallel),
            compute=lambda: self._between(rows, model, batch, tp, fabric, sequence_parallel),
        )

    def _between(
        self, rows: list[Measured], model: ModelSpec, batch: Batch, tp: int, fabric: Fabric, sequence_parallel: bool
    ) -> Seconds:
        """Of a part that `rows` measure, at the TP nearest to `tp`: how long each shape took beside what is reckoned of
        it, between the shapes; times what is reckoned here."""
        part, sequence, tokens = rows[0].part, batch.sequence_length, batch.micro_size * batch.sequence_length
        near = min({p.tp for p in rows}, key=lambda t: (abs(math.log(t / tp)), t))
        ratios: list[tuple[tuple[float, ...], Seconds]] = []
        for p in (p for p in rows if p.tp == near):
            long = p.sequence or sequence
            talk = (0.0, 0.0) if near == tp else self._talk_s(part, model, p.tokens, near, fabric, p.sequence_parallel)
            whole = self._reckoned_s(
                part,
                model,
                p.tokens,
                sequence=long,
                tp=near,
                fabric=fabric,
                sequence_parallel=p.sequence_parallel,
                collectives=near == tp,
                flops=p.flops,
            )
            took = tuple(max(s - t, COMPUTED * s) for s, t in zip((p.forward_s, p.backward_s), talk, strict=True))
            ratios.append(((long, p.tokens), (took[0] / whole[0], took[1] / whole[1])))
        talk = (0.0, 0.0) if near == tp else self._talk_s(part, model, tokens, tp, fabric, sequence_parallel)
        whole = self._reckoned_s(
            part,
            model,
            tokens,
            sequence=sequence,
            tp=tp,
            fabric=fabric,
            sequence_parallel=sequence_parallel,
            collectives=near == tp,
        )
        forward, backward = (
            interpolated([(at, r[way]) for at, r in ratios], (sequence, tokens)) * whole[way] + talk[way]
            for way in (0, 1)
        )
        return forward, backward

    def _reckoned_s(
        self,
        part: str,
        model: ModelSpec,
        tokens: int,
        sequence: int,
        tp: int,
        fabric: Fabric,
        sequence_parallel: bool,
        collectives: bool,
        flops: float | None = None,
    ) -> Seconds:
        """What a shape takes beside others: seconds by the kernels' tables, with or without TP's collectives; on CPUs
        FLOPs of a rank (`flops`: of the whole part, where they are known)."""
        gpu = fabric.gpu
        if gpu.is_cpu or self.pace_layer_ms:
            each = (flops or part_flops(model, part, tokens, sequence, tp)) / (1 if part == "embedding" else tp)
            return each, each
        size = max(1, round(tokens / sequence))
        whole = self._modelled(model, Batch(size, size, sequence), tp, gpu, sequence_parallel)[PARTS.index(part)]
        talk = (0.0, 0.0)
        if not collectives:  # those that the tables have in it
            one = reduction_s(self._device(gpu), model, size * sequence, tp, sequence_parallel)
            talk = self._collectives_s(part, one, gpu)
        share = tokens / (size * sequence)
        forward, backward = (max(s - t, COMPUTED * s) * share for s, t in zip(whole, talk, strict=True))
        return forward, backward

    def _talk_s(
        self, part: str, model: ModelSpec, tokens: int, tp: int, fabric: Fabric, sequence_parallel: bool
    ) -> Seconds:
        """TP's collectives in a part's (forward, backward)."""
        return self._collectives_s(part, self._reduction_s(model, tokens, tp, fabric, sequence_parallel), fabric.gpu)

    def _collectives_s(self, part: str, one: float, gpu: Gpu) -> Seconds:
        """Those of a part's (forward, backward), of which each takes `one`."""
        return {
            "layer": (2 * one, self.software_on(gpu).backward_reductions * one),
            "embedding": (one, 0.0),
            "head": (0.0, one),
        }[part]

    def _reduction_s(self, model: ModelSpec, tokens: int, tp: int, fabric: Fabric, sequence_parallel: bool) -> float:
        """An all-reduce of T x h over the TP ranks (with sequence parallel as many bytes: a reduce-scatter and an
        all-gather): over the link that was measured, else as the kernels' tables or published figures have it."""
        gpu = fabric.gpu
        if tp == 1:
            return 0.0
        link = self.calibration.link(fabric, "local", "reduce_scatter") if self.calibration is not None else None
        if link is None and not gpu.is_cpu:
            return reduction_s(self._device(gpu), model, tokens, tp, sequence_parallel)
        link, factor = link or self._links(gpu)["local"], collectives(gpu).all_reduce
        sent = factor * (tp - 1) / tp * tokens * model.hidden * self.weight_bytes(gpu)
        return sent / (gpu.intra_node_gbps * 1e9 / 8 * link.efficiency) + factor * (tp - 1) * link.latency_s
