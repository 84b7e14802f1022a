"""What computing costs in seconds and what data weighs in bytes: from a calibration, from paced compute, from the
kernels' tables of a GPU kind (layer.py), or, on CPUs, from published figures.

Where a CPU computes, it is a roofline (Williams et al. 2009) in two terms: matrix products at a share of the peak, and
everything else at a share of the memory's bandwidth. How much the second term moves is counted per layer from
Korthikanti et al. 2022 (arXiv 2205.05198): what their section 4 counts as stored was written once and is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import ConfigError
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.calibration import Calibration, Measured
from holmes_hpc.planning.cost.flops import (
    head_flops,
    head_parameters,
    layer_flops,
    layer_parameters,
    layer_score_flops,
)
from holmes_hpc.planning.cost.hardware import (
    FITTED,
    GLOO_LINKS,
    NCCL_LINKS,
    Collectives,
    Link,
    collectives,
    memory_gbps,
)
from holmes_hpc.planning.cost.kernels import STACK, Device, Stack
from holmes_hpc.planning.cost.layer import Seconds, times
from holmes_hpc.planning.cost.software import CURRENT, Software
from holmes_hpc.planning.spec.transport import Transport

__all__ = ["BYTES", "CURRENT", "Costs", "Software"]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Costs:
    """Where times come from, best first: `calibration`, `pace_layer_ms` (layers wait that long), published figures. A
    calibration must have been made at the same pace and, if `dtype` says one, with the same type.

    `dtype`: of weights and activations; None: fp32 on CPUs, bf16 on GPUs. `gradient_bytes`: of a gradient element in
    the buffers and on the wire; None: 4 (grad_reduce_in_fp32). `software`: what the training program does. `stack`:
    what kernels and links reach on GPUs that nobody measured.
    """

    calibration: Calibration | None = None
    pace_layer_ms: float | None = None
    dtype: str | None = None
    gradient_bytes: int | None = None
    software: Software = CURRENT
    stack: Stack = STACK

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"unknown dtype {self.dtype!r}", where="costs", hint="use fp32, bf16 or fp16")
        if self.pace_layer_ms is not None and not self.pace_layer_ms > 0:
            raise ConfigError(f"pace_layer_ms is {self.pace_layer_ms}", where="costs", hint="use milliseconds above 0")
        if self.calibration is not None and self.calibration.parts:
            was, now = self.calibration.pace_layer_ms, self.pace_layer_ms
            if was != now:
                raise ConfigError(f"measured with {_pace(was)}, used for {_pace(now)}", where="calibration",
                                  hint=f"set train.pace_layer_ms={was or 'null'} (predict: --pace-layer-ms), or"
                                       f" calibrate again with {_pace(now)}")
            if self.dtype and self.calibration.dtype and self.dtype != self.calibration.dtype:
                raise ConfigError(f"measured with {self.calibration.dtype}, used for {self.dtype}", where="calibration",
                                  hint=f"set train.dtype={self.calibration.dtype}, or calibrate again")

    def dtype_of(self, gpu: Gpu) -> str:
        return self.dtype or (self.calibration.dtype if self.calibration else None) or (
            "fp32" if gpu.is_cpu else "bf16")

    def weight_bytes(self, gpu: Gpu) -> int:
        """Of one weight, and of one element of an activation."""
        return BYTES[self.dtype_of(gpu)]

    def gradient_size(self, gpu: Gpu) -> int:
        """Bytes of one gradient element in its buffer."""
        return self.gradient_bytes or 4

    def wire_size(self, gpu: Gpu) -> int:
        """Bytes of one gradient element on the wire."""
        return self.software.wire_bytes or self.gradient_size(gpu)

    def collectives(self, gpu: Gpu) -> Collectives:
        return collectives(gpu)

    def link(self, transport: Transport, gpu: Gpu, collective: str = "") -> Link:
        """Latency and efficiency of a transport, for messages or for a `collective` (reduce_scatter or all_gather)."""
        name = "local" if transport.kind == "local" else str(transport.nic)
        key = name, gpu, collective
        if key not in self._known_links:  # a search asks a hundred thousand times
            self._known_links[key] = self._link(name, gpu, collective)
        return self._known_links[key]

    @cached_property
    def _known_links(self) -> dict[tuple[str, Gpu, str], Link]:
        return {}

    def _link(self, name: str, gpu: Gpu, collective: str) -> Link:
        measured = self.calibration.links if self.calibration is not None else {}
        found = measured.get(f"{name}.{collective}") or measured.get(name) or self._links(gpu)[name]
        if name == "ib" and not measured and self.modelled(gpu):
            return replace(found, efficiency=self.stack.ib if collective else self.stack.transfer)
        return found

    def _links(self, gpu: Gpu) -> Mapping[str, Link]:
        return GLOO_LINKS if gpu.is_cpu else NCCL_LINKS

    def layer_s(self, model: ModelSpec, batch: Batch, tp: int, gpu: Gpu, sequence_parallel: bool = False,
                recompute: str = "none") -> tuple[float, float]:
        """Seconds of one layer's (forward, backward) for one micro-batch on one of `tp` ranks.

        Recomputation counts as backward: `full` the whole forward again, its collectives too, `selective` the
        attention scores. Paced layers wait in a recomputed forward as well.
        """
        tokens, sequence = batch.micro_size * batch.sequence_length, batch.sequence_length
        if self.modelled(gpu):
            return self._modelled(model, batch, tp, gpu, sequence_parallel, recompute)[0]
        measured = self._measured("layer", model, tokens, tp)
        if self.pace_layer_ms:  # waiting does not grow with the layer
            forward, backward = self.pace_layer_ms / 1e3, 2 * self.pace_layer_ms / 1e3
            if measured is not None:
                forward, backward = measured.forward_s, measured.backward_s
            return forward, backward + (forward if recompute == "full" else 0.0)
        flops = layer_flops(model, tokens, sequence)
        if measured is not None:
            forward, backward = _scaled(measured, flops, tp)
            scores = forward * layer_score_flops(model, tokens, sequence) / flops
        else:
            rest = self._rest_s(model, tokens, sequence, tp, gpu, sequence_parallel)
            matrix = self._matrix_s(flops / tp, gpu)
            forward, backward = matrix + rest, 2 * (matrix + rest)
            scores = self._matrix_s(layer_score_flops(model, tokens, sequence) / tp, gpu)
            scores += self._score_traffic_s(model, tokens, sequence, tp, gpu)
            talk = self._tensor_parallel_s(model, tokens, tp, gpu)
            forward, backward = forward + talk, backward + talk + self._accumulate_s(layer_parameters(model, tp), gpu)
        again = {"none": 0.0, "selective": scores, "full": forward}[recompute]
        return forward, backward + again

    def embedding_s(self, model: ModelSpec, batch: Batch, tp: int, gpu: Gpu) -> tuple[float, float]:
        """Seconds of the embedding's (forward, backward): rows of T x h read and written."""
        tokens = batch.micro_size * batch.sequence_length
        if self.modelled(gpu):
            return self._modelled(model, batch, tp, gpu)[1]
        measured = self._measured("embedding", model, tokens, tp)
        if measured is not None:
            return _scaled(measured, float(tokens * model.hidden), measured.tp)
        moved = self._memory_s(2.0 * tokens * model.hidden * self.weight_bytes(gpu), gpu)
        return moved, 2 * moved

    def head_s(self, model: ModelSpec, batch: Batch, tp: int, gpu: Gpu) -> tuple[float, float]:
        """Seconds of the (forward, backward) of final norm, output matrix and loss: logits in the weights' type, and
        once in fp32 for the loss."""
        tokens = batch.micro_size * batch.sequence_length
        if self.modelled(gpu):
            return self._modelled(model, batch, tp, gpu)[2]
        flops = head_flops(model, tokens, tp)
        measured = self._measured("head", model, tokens, tp)
        if measured is not None:
            return _scaled(measured, flops, tp)
        moved = self._memory_s(tokens * model.padded_vocab(tp) / tp * (2.0 * self.weight_bytes(gpu) + 8), gpu)
        forward = self._matrix_s(flops / tp, gpu) + moved
        return forward, 2 * forward + self._accumulate_s(head_parameters(model, tp), gpu)

    def optimizer_s(self, updated: float, gpu: Gpu) -> float:
        """Seconds of Adam for `updated` parameters: gradient, weight and two moments read, the last three written."""
        if self.calibration is not None and self.calibration.optimizer_s is not None:
            return updated * self.calibration.optimizer_s
        if self.modelled(gpu):
            return self._device(gpu).streamed_s(updated * (self.gradient_size(gpu) + 6 * 4 + self.weight_bytes(gpu)))
        return self._memory_s(updated * (self.gradient_size(gpu) + 6 * 4 + self.weight_bytes(gpu)), gpu)

    def pass_s(self, gpu: Gpu) -> float:
        """Seconds of every pass that belong to none of its parts."""
        if self.calibration is not None:
            return self.calibration.pass_s
        return self.stack.pass_s if self.modelled(gpu) else 0.0

    def step_s(self, gpu: Gpu) -> float:
        """Seconds of every step that belong to none of its passes and none of its traffic."""
        if self.calibration is not None:
            return self.calibration.step_s
        return self.stack.step_s if self.modelled(gpu) else 0.0

    def modelled(self, gpu: Gpu) -> bool:
        """Whether the times of computing are those of the kernels' tables: a GPU on which no layer was measured."""
        measured = self.calibration is not None and self.calibration.parts
        return not (gpu.is_cpu or measured or self.pace_layer_ms)

    def _modelled(self, model: ModelSpec, batch: Batch, tp: int, gpu: Gpu, sequence_parallel: bool = False,
                  recompute: str = "none") -> tuple[Seconds, Seconds, Seconds]:
        return times(self._device(gpu), self.software, model, batch, tp, sequence_parallel, self.gradient_size(gpu),
                     recompute)

    def _device(self, gpu: Gpu) -> Device:
        return Device(gpu, self.weight_bytes(gpu), self.stack)

    def _measured(self, part: str, model: ModelSpec, tokens: int, tp: int) -> Measured | None:
        return self.calibration.part(part, model.hidden, tokens, tp) if self.calibration else None

    def _accumulate_s(self, weights: int, gpu: Gpu) -> float:
        """Adding a micro-batch's weight gradients to the sum: written, read, and the sum read and written."""
        return self._memory_s(2.0 * weights * (self.weight_bytes(gpu) + self.gradient_size(gpu)), gpu)

    def _matrix_s(self, flops: float, gpu: Gpu) -> float:
        return flops / (gpu.peak_tflops * 1e12 * FITTED.matrix)

    def _memory_s(self, moved: float, gpu: Gpu) -> float:
        return moved / (memory_gbps(gpu) * 1e9 * FITTED.memory)

    def _rest_s(self, model: ModelSpec, tokens: int, sequence: int, tp: int, gpu: Gpu, sequence_parallel: bool,
                ) -> float:
        """Forward, all but matrix products. Per token and hidden unit, in elements: two norms (read, write), two
        residual additions with dropout (two read, one written), all on every rank unless sequence parallel; the FFN's
        activation (read f or 2f, write f) and rotary or bias on q, k, v."""
        whole = model.hidden / (tp if sequence_parallel else 1) * (10.0 + (4 / self.weight_bytes(gpu) if model.dropout
                                                                           else 0))
        wide, keys = (3.0 if model.swiglu else 2.0) * model.ffn, 2 * model.kv_heads * model.head_dim
        split = (wide + 2.0 * (model.hidden + keys)) / tp
        return (self._memory_s(tokens * (whole + split) * self.weight_bytes(gpu), gpu)
                + self._score_traffic_s(model, tokens, sequence, tp, gpu))

    def _score_traffic_s(self, model: ModelSpec, tokens: int, sequence: int, tp: int, gpu: Gpu) -> float:
        """Unfused attention writes a x s scores a token, reads and writes them in the (masked) softmax, if need be in
        dropout, which writes a mask too, and reads them once more."""
        if self.software.flash:
            return 0.0
        passes = (6.0 * self.weight_bytes(gpu) + 1) if model.dropout else 4.0 * self.weight_bytes(gpu)
        return self._memory_s(tokens * sequence * model.heads / tp * passes, gpu)

    def _tensor_parallel_s(self, model: ModelSpec, tokens: int, tp: int, gpu: Gpu) -> float:
        """Two all-reduces of T x h a pass (with sequence parallel as many bytes: reduce-scatters and all-gathers)."""
        if tp == 1:
            return 0.0
        link, factor = self._links(gpu)["local"], collectives(gpu).all_reduce
        if self.calibration is not None:
            link = self.calibration.links.get("local.reduce_scatter") or self.calibration.links.get("local", link)
        sent = factor * (tp - 1) / tp * tokens * model.hidden * self.weight_bytes(gpu)
        return 2 * (sent / (gpu.intra_node_gbps * 1e9 / 8 * link.efficiency) + factor * (tp - 1) * link.latency_s)


def _pace(layer_ms: float | None) -> str:
    return f"layers paced to {layer_ms:g} ms" if layer_ms else "layers not paced"


def _scaled(measured: Measured, flops: float, tp: int) -> tuple[float, float]:
    ratio = flops / measured.flops * measured.tp / tp
    return measured.forward_s * ratio, measured.backward_s * ratio
