"""What computing costs on a CPU: a roofline (Williams et al. 2009) in two terms, matrix products at a share of the
peak, and everything else at a share of the memory's bandwidth. How much the second term moves is counted per layer from
Korthikanti et al. 2022 (arXiv 2205.05198): what their section 4 counts as stored was written once and is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.hardware import CPU_MEMORY_GBPS, FITTED
from holmes_hpc.planning.cost.kernels import kind


@dataclass(frozen=True)
class Cpu:
    """A CPU that stands for an accelerator, and the bytes of its weights and gradients; `flash`: fused attention."""

    gpu: Gpu
    weight_bytes: int
    gradient_bytes: int
    flash: bool

    def accumulate_s(self, weights: int) -> float:
        """Return the seconds of adding a micro-batch's weight gradients to the sum: written, read, and the sum read and
        written."""
        return self.memory_s(2.0 * weights * (self.weight_bytes + self.gradient_bytes))

    def matrix_s(self, flops: float) -> float:
        return flops / (self.gpu.peak_tflops * 1e12 * FITTED.matrix)

    def memory_s(self, moved: float) -> float:
        gbps = CPU_MEMORY_GBPS if self.gpu.is_cpu else kind(self.gpu).memory_gbps  # a GPU's layers may be paced
        return moved / (gbps * 1e9 * FITTED.memory)

    def rest_s(self, model: ModelSpec, tokens: int, sequence: int, tp: int, sequence_parallel: bool) -> float:
        """Return the seconds of a forward pass, all but matrix products. Per token and hidden unit, in elements: two
        norms (read, write), two residual additions with dropout (two read, one written), all on every rank unless
        sequence parallel; the FFN's activation (read f or 2f, write f) and rotary or bias on q, k, v."""
        whole = (
            model.hidden / (tp if sequence_parallel else 1) * (10.0 + (4 / self.weight_bytes if model.dropout else 0))
        )
        wide, keys = (3.0 if model.swiglu else 2.0) * model.ffn, 2 * model.key_width
        split = (wide + (4.0 if model.qk_norm else 2.0) * (model.query_width + keys)) / tp
        moved = tokens * (whole + split) * self.weight_bytes
        return self.memory_s(moved) + self.score_traffic_s(model, tokens, sequence, tp)

    def score_traffic_s(self, model: ModelSpec, tokens: int, sequence: int, tp: int) -> float:
        """Return the seconds of unfused attention's memory: it writes a x s scores a token, reads and writes them in
        the (masked) softmax, if need be in dropout, which writes a mask too, and reads them once more."""
        if self.flash:
            return 0.0
        passes = (6.0 * self.weight_bytes + 1) if model.dropout else 4.0 * self.weight_bytes
        return self.memory_s(tokens * sequence * model.heads / tp * passes)
