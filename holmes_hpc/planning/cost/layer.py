"""Seconds of a transformer layer, the embedding and the head for which nothing was measured.

On a GPU kernel by kernel: counted are the layer's products with weights (forward; backward the gradients of input and
weight of each), attention by what computes it, bytes of what only moves memory, tensor parallel's collectives, and for
each kernel a gap. A CPU that cannot launch as quickly as the GPU computes is waited for: a pass takes no less than its
kernels take to launch, and where each is waited for before the next (CUDA_LAUNCH_BLOCKING=1) as much longer.

On a CPU a roofline (Williams et al. 2009) in two terms: matrix products at a share of the peak, and everything else at
a share of the memory's bandwidth. Elements moved are counted from Korthikanti et al. 2022 (arXiv 2205.05198), section
4: what is counted there as stored was written once and is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.flops import head_flops, head_parameters, layer_parameters
from holmes_hpc.planning.cost.hardware import CPU_MEMORY_GBPS, FITTED
from holmes_hpc.planning.cost.kernels import Device, kind
from holmes_hpc.planning.cost.software import Software

Seconds = tuple[float, float]  # forward, backward
PARTS = ("layer", "embedding", "head")
# Kernels of a layer's forward pass: four products with their casts and views, two norms, residuals and what attention
# is made of; each operation that is not fused is one more. Backward has about twice as many. Under TP there are two
# collectives, which wait for the slowest rank too: the more ranks, the longer.
KERNELS, KERNELS_NORM, KERNELS_LOOSE, KERNELS_TP = 16, 5, 6, 3
KERNELS_ATTENTION = {"flash": 4, "flash1": 4, "sdpa": 4, "softmax": 8, "unfused": 14}


def reduction_s(device: Device, model: ModelSpec, tokens: int, tp: int, sequence_parallel: bool) -> float:
    """Seconds of an all-reduce of T x h over the TP ranks; sequence parallel: a reduce-scatter and an all-gather."""
    if tp == 1:
        return 0.0
    sent = 2.0 * (tp - 1) / tp * tokens * model.hidden * device.element
    return device.ring_s(sent, tp, 2.0 if sequence_parallel else 1.0)


@dataclass(frozen=True)
class Work:
    """One part of a model on one of `tp` ranks, for one micro-batch. `gradient_bytes`: of an element that is added
    up."""

    device: Device
    software: Software
    model: ModelSpec
    micro_size: int
    sequence: int
    tp: int
    sequence_parallel: bool
    gradient_bytes: int

    @cached_property
    def tokens(self) -> int:
        return self.micro_size * self.sequence

    @cached_property
    def attention(self) -> str:
        return self.software.attention_of(self.model.heads // self.tp or 1, self.sequence, self.micro_size)

    def product(self, columns: int, rows: int) -> Seconds:
        """A product of all tokens with a matrix of `rows` inputs and `columns` outputs on this rank."""
        t, d = self.tokens, self.device
        return d.product_s(t, columns, rows), d.product_s(t, rows, columns) + d.product_s(columns, rows, t)

    def products(self) -> Seconds:
        """The layer's: query, key and value in one, output, up (with the gate), down."""
        m, tp = self.model, self.tp
        shapes = (
            ((m.query_width + 2 * m.key_width) // tp, m.hidden),
            (m.hidden, m.query_width // tp),
            ((2 if m.swiglu else 1) * m.ffn // tp, m.hidden),
            (m.hidden, m.ffn // tp),
        )
        each = [self.product(*shape) for shape in shapes]
        return sum(f for f, _ in each), sum(b for _, b in each)

    def scores(self) -> Seconds:
        """Attention between its two products with weights: scores, softmax, dropout, product with the values."""
        m, d, heads = self.model, self.device, self.model.heads / self.tp
        blocks = self.micro_size * heads
        if self.software.flash:
            return d.flash_s(blocks, self.sequence, m.head_width, self.attention == "flash1")
        pairs = blocks * self.sequence * self.sequence
        passes = 4.0 * d.element + (2.0 * d.element + 1 if m.dropout else 0)  # written, softmax in and out, read
        if self.attention == "unfused":
            passes = d.stack.unfused * (passes + 4.0 * d.element + 12)  # scaled, masked; softmax in fp32
        moved = d.streamed_s(pairs * passes)
        computed = 2 * d.scores_s(pairs, m.head_width)
        return computed + moved, 2 * (computed + moved)

    def moved(self) -> Seconds:
        """What only moves memory: norms, residuals with dropout, the activation, rotary positions or biases. In
        elements per token: of the hidden width, on every rank unless sequence parallel; of the FFN's width; of queries
        and keys."""
        m, d, s = self.model, self.device, self.software
        loose = not s.fused_elementwise
        residual = 3 + (1 / d.element + (2 if loose else 0) if m.dropout else 0) + (2 if loose and m.bias else 0)
        whole = 2 * m.hidden * (self.norm_bytes + residual * d.element) / (self.tp if self.sequence_parallel else 1)
        wide = (5.0 if loose else 3.0) if m.swiglu else 2.0 + (2 if loose and m.bias else 0)
        turned = m.query_width + m.key_width
        split = wide * m.ffn + turned * ((5.0 if loose else 2.0) if m.rope else 2.0)
        split += turned * self.norm_bytes / d.element if m.qk_norm else 0
        bytes_each = (whole + split * d.element / self.tp) * (d.stack.loose if loose else 1)
        forward = d.moved_s(self.tokens * bytes_each)
        return forward, 2 * forward

    def again(self) -> float:
        """Forward, of the parts that selective recomputation computes again: scores; norms; the FFN with its activation
        and, under TP, its collective."""
        m, d, s, seconds = self.model, self.device, self.software, 0.0
        if "scores" in s.recompute_parts:
            seconds += self.scores()[0]
        if "norms" in s.recompute_parts:
            seconds += d.moved_s(
                self.tokens * 2 * m.hidden * self.norm_bytes / (self.tp if self.sequence_parallel else 1)
            )
        if "ffn" in s.recompute_parts:
            up, down = ((2 if m.swiglu else 1) * m.ffn // self.tp, m.hidden), (m.hidden, m.ffn // self.tp)
            seconds += self.product(*up)[0] + self.product(*down)[0] + self.reduction()
            seconds += d.moved_s(self.tokens * (3.0 if m.swiglu else 2.0) * m.ffn * d.element / self.tp)
        return seconds

    @property
    def norm_bytes(self) -> float:
        """Moved by a norm, for each token and hidden unit; not fused: half a dozen passes in fp32."""
        return 2.0 * self.device.element + (0 if self.software.fused_norm else 32)

    def reduction(self) -> float:
        return reduction_s(self.device, self.model, self.tokens, self.tp, self.sequence_parallel)

    def kernels(self) -> int:
        """Launched in a layer's forward pass."""
        s, loose = self.software, 0 if self.software.fused_elementwise else KERNELS_LOOSE
        return (
            KERNELS
            + KERNELS_ATTENTION[self.attention]
            + loose
            + (0 if s.fused_norm else 2 * KERNELS_NORM)
            + (KERNELS_TP + self.tp // 2 if self.tp > 1 else 0)
        )

    def accumulated(self, weights: int) -> float:
        """Adding a micro-batch's weight gradients to the sum: written, read, and the sum read and written."""
        return self.device.streamed_s(2.0 * weights * (self.device.element + self.gradient_bytes))

    def layer(self, recompute: str) -> Seconds:
        """(forward, backward) of one layer; what is computed again counts as backward."""
        stack = self.device.stack
        talk = self.reduction()
        parts = (self.products(), self.scores(), self.moved(), (2 * talk, self.software.backward_reductions * talk))
        count = self.kernels()
        forward = sum(f for f, _ in parts) + count * stack.gap_s
        backward = sum(b for _, b in parts) + 2 * count * stack.gap_s
        backward += self.accumulated(layer_parameters(self.model, self.tp))
        again = {"none": 0.0, "selective": self.again(), "full": forward}[recompute]
        launched = count * stack.launch_s
        more = {"none": 2, "selective": 2, "full": 3}[recompute]
        if self.software.awaited_launches:
            launched += count * stack.wait_s
            return forward + launched, backward + again + more * launched
        return max(forward, launched), max(backward + again, more * launched)

    def embedding(self) -> Seconds:
        """Rows of T x h read and written; under TP their sum over the ranks."""
        rows = self.device.moved_s(2.0 * self.tokens * self.model.hidden * self.device.element)
        return rows + self.reduction(), 2 * rows

    def head(self) -> Seconds:
        """Final norm, output matrix and loss: logits in the weights' type, and in fp32 for the loss."""
        m, d = self.model, self.device
        width = m.padded_vocab(self.tp) // self.tp
        forward, backward = self.product(width, m.hidden)
        logits, gather = self.tokens * width, 0.0
        if self.software.gathered_logits and self.tp > 1:
            logits *= self.tp
            gather = d.ring_s((self.tp - 1) / self.tp * logits * d.element, self.tp) + d.streamed_s(
                2.0 * logits * d.element
            )
        loss = d.streamed_s(logits * d.stack.loss_bytes)
        return forward + loss + gather, backward + loss + self.reduction() + self.accumulated(
            head_parameters(m, self.tp)
        )


@lru_cache(maxsize=16384)
def times(
    device: Device,
    software: Software,
    model: ModelSpec,
    batch: Batch,
    tp: int,
    sequence_parallel: bool,
    gradient_bytes: int,
    recompute: str,
) -> tuple[Seconds, Seconds, Seconds]:
    """((forward, backward) of a layer, of the embedding, of the head), as PARTS has them."""
    work = Work(
        device,
        software,
        model,
        micro_size=batch.micro_size,
        sequence=batch.sequence_length,
        tp=tp,
        sequence_parallel=sequence_parallel,
        gradient_bytes=gradient_bytes,
    )
    return work.layer(recompute), work.embedding(), work.head()


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

    def embedding_s(self, model: ModelSpec, tokens: int) -> Seconds:
        """Return the seconds of (forward, backward): rows of T x h read and written."""
        moved = self.memory_s(2.0 * tokens * model.hidden * self.weight_bytes)
        return moved, 2 * moved

    def head_s(self, model: ModelSpec, tokens: int, tp: int) -> Seconds:
        """Return the seconds of (forward, backward): logits in the weights' type, and once in fp32 for the loss."""
        moved = self.memory_s(tokens * model.padded_vocab(tp) / tp * (2.0 * self.weight_bytes + 8))
        forward = self.matrix_s(head_flops(model, tokens, tp) / tp) + moved
        return forward, 2 * forward + self.accumulate_s(head_parameters(model, tp))

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
