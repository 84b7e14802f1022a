"""Modelled seconds of a transformer layer, the embedding and the head, for use without measurements.

On a GPU, the model adds up the kernels of a layer: matrix products with weights, attention, memory-bound operations,
TP's collectives, and a gap after each kernel. In backward, each matrix product with weights becomes two, for the
gradients of the input and of the weight. A pass takes at least the time in which the CPU launches its kernels. If the
CPU waits for each kernel (CUDA_LAUNCH_BLOCKING=1), the launch times are added to the pass.

On a CPU, the model is a roofline (Williams et al. 2009) with two terms: matrix products at a share of the peak, and
other work at a share of the memory bandwidth. The elements that other work moves follow Korthikanti et al. 2022
(arXiv 2205.05198), section 4: each stored element is written once and read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.planning.cost.flops import head_flops, head_parameters, layer_parameters, permuted_elements
from holmes_hpc.planning.cost.kernels import Device, kind
from holmes_hpc.planning.cost.software import Software

Seconds = tuple[float, float]  # forward, backward
PARTS = ("layer", "embedding", "head")
# Number of kernels in a layer's forward pass: four matrix products with their casts and views, two norms, residuals,
# attention. Each unfused operation adds one kernel. Backward has about twice as many. TP adds two collectives. Their
# cost grows with the number of ranks, because they wait for the slowest rank.
KERNELS, KERNELS_NORM, KERNELS_UNFUSED, KERNELS_TP = 16, 5, 6, 3
# Not measured: kernels of the router with its permutations, and kernels for each expert of a rank.
KERNELS_ROUTER, KERNELS_EXPERT = 24, 4
KERNELS_ATTENTION = {"flash": 4, "flash1": 4, "flash3": 4, "sdpa": 4, "softmax": 8, "unfused": 14}
# For class Cpu: the share of the peak that matrix products reach, and the share of the memory bandwidth that other work
# reaches. Fitted to the 13 runs of Narayanan et al. (SC'21) and Yang et al. (arXiv 2312.03549).
MATRIX_SHARE, MEMORY_SHARE = 0.762, 0.825
CPU_MEMORY_GBPS = 10.0  # memory bandwidth of one rank: a core's share of a server's DDR4


@dataclass(frozen=True)
class LayerShape:
    """The part of a layer that one of `tp` ranks computes for one micro-batch. `ep`, `etp`: as in Parallel."""

    model: ModelSpec
    batch: Batch
    tp: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    ep: int = 1
    etp: int = 1

    @cached_property
    def tokens(self) -> int:
        return self.batch.micro_size * self.batch.sequence_length

    @property
    def norm_split(self) -> int:
        """The number of ranks over which norms and residuals are split."""
        return self.tp if self.sequence_parallel else 1

    def expert_load(self, imbalance: float) -> float:
        """Return the experts' tokens on the busiest rank over the mean: at most EP, the capacity and `imbalance`."""
        return min(imbalance, self.ep, max(1.0, self.model.experts.capacity or imbalance))


def key_value_bytes(model: ModelSpec, tokens: int, tp: int, element: float) -> float:
    """Return the bytes of a layer's keys and values of `tokens` on one of `tp` ranks."""
    return 2.0 * tokens * model.key_width / tp * element


def exchanged_bytes(model: ModelSpec, tokens: int, tp: int, element: float) -> float:
    """Return the bytes that a layer's all-to-all attention exchanges: queries, keys, values and, later, its output."""
    return 2.0 * tokens * (model.query_width + model.key_width) / tp * element


def all_reduce_s(device: Device, shape: LayerShape) -> float:
    """Return the seconds of an all-reduce of tokens x hidden elements over the TP ranks.
    With sequence parallelism, a reduce-scatter and an all-gather take its place."""
    tp = shape.tp
    if tp == 1:
        return 0.0
    sent_bytes = 2.0 * (tp - 1) / tp * shape.tokens * shape.model.hidden * device.element
    return device.ring_s(sent_bytes, tp, 2.0 if shape.sequence_parallel else 1.0)


@dataclass(frozen=True)
class LayerTimes:
    """The times of a model's parts on one rank of a GPU, for one micro-batch.
    `gradient_bytes`: bytes of one gradient element in its accumulation buffer. `cp_gbps`: rate in Gb/s of one rank in
    CP's exchange between nodes; None if the exchange stays inside a node."""

    device: Device
    software: Software
    shape: LayerShape
    gradient_bytes: int
    cp_gbps: float | None = None

    @cached_property
    def attention(self) -> str:
        shape, batch = self.shape, self.shape.batch
        return self.software.attention_of(shape.model.heads // shape.tp or 1, batch.context, batch.micro_size)

    def product(self, columns: int, rows: int, fp8: bool = False, tokens: int | None = None) -> Seconds:
        """Return the seconds of (forward, backward) of `tokens` tokens (None: all) times a matrix of weights.
        The matrix has `rows` inputs and `columns` outputs. For FP8, inputs and gradients are scaled and cast. Each is
        read once and written twice: as it is, and transposed."""
        t, d = tokens or self.shape.tokens, self.device
        forward = d.product_s(t, columns, rows, fp8)
        backward = d.product_s(t, rows, columns, fp8) + d.product_s(columns, rows, t, fp8)
        if not fp8:
            return forward, backward
        return forward + d.moved_s(t * rows * (d.element + 2.0)), backward + d.moved_s(t * columns * (d.element + 2.0))

    def products(self) -> Seconds:
        """Return the seconds of (forward, backward) of all matrix products of the layer with weights.
        Query, key and value are one product. The others are the output and the :meth:`ffn_products`."""
        m, tp = self.shape.model, self.shape.tp
        fp8 = self.software.fp8
        shapes = (((m.query_width + 2 * m.key_width) // tp, m.hidden), (m.hidden, m.query_width // tp))
        products = [*(self.product(*shape, fp8) for shape in shapes), *self.ffn_products(fp8)]
        return sum(f for f, _ in products), sum(b for _, b in products)

    def ffn_products(self, fp8: bool = False) -> list[Seconds]:
        """Return the seconds of (forward, backward) of each matrix product of the FFN. They are up (with the gate) and
        down: of a dense FFN or the shared experts first, then of the routed experts. A rank holds 1/`etp` of the width
        of 1/`ep` of the routed experts, each of which gets equally many tokens."""
        shape, m, experts = self.shape, self.shape.model, self.shape.model.experts
        products = self._up_and_down(m.tp_ffn // shape.tp, shape.tokens, fp8) if m.tp_ffn else []
        if experts.count:
            count = experts.count // shape.ep
            load = shape.expert_load(self.software.expert_imbalance)
            share = shape.tokens / shape.tp * m.active_ffns * shape.etp / count * load
            tokens = 64 * round(share / 64) or max(1, round(share))  # aligned: the kernels pad what experts get
            expert_products = self._up_and_down(m.ffn_width // shape.etp, tokens, fp8)
            products += [(count * forward, count * backward) for forward, backward in expert_products]
        return products

    def _up_and_down(self, width: int, tokens: int, fp8: bool) -> list[Seconds]:
        """Return the seconds of the two matrix products of an FFN with inner width `width`, for `tokens` tokens."""
        model = self.shape.model
        columns, hidden = (2 if model.swiglu else 1) * width, model.hidden
        return [self.product(columns, hidden, fp8, tokens), self.product(hidden, width, fp8, tokens)]

    def scores(self) -> Seconds:
        """Return the seconds of attention's core: scores, softmax, dropout, product with values."""
        m, d, batch = self.shape.model, self.device, self.shape.batch
        blocks = batch.micro_size * (m.heads / self.shape.tp)
        if self.software.flash:
            share = batch.sequence_length / batch.context
            return self._with_exchange(d.flash_s(share * blocks, batch.context, m.head_width, self.attention))
        pairs = blocks * batch.sequence_length * batch.context
        passes = 4.0 * d.element + (2.0 * d.element + 1 if m.dropout else 0)  # write, softmax in and out, read
        if self.attention == "unfused":
            passes = d.stack.unfused_attention * (passes + 4.0 * d.element + 12)  # scale, mask; softmax in fp32
        moved_s = d.streamed_s(pairs * passes)
        compute_s = 2 * d.scores_s(pairs, m.head_width)
        return compute_s + moved_s, 2 * (compute_s + moved_s)

    def _with_exchange(self, compute_s: Seconds) -> Seconds:
        """Return the seconds of (forward, backward) of attention with CP's exchange. A ring exchange of keys and values
        (in backward, also of their gradients) overlaps with attention. All-to-alls do not overlap."""
        shape, cp = self.shape, self.shape.batch.cp
        sizes = shape.model, shape.tokens, shape.tp, self.device.element
        if cp == 1:
            return compute_s
        sent_bytes = exchanged_bytes(*sizes) / cp if shape.batch.all_to_all else key_value_bytes(*sizes)

        def sent_s(count: int) -> float:
            peers_bytes = count * (cp - 1) * sent_bytes
            return max(self.device.ring_s(peers_bytes, cp), peers_bytes * 8e-9 / self.cp_gbps if self.cp_gbps else 0.0)

        if shape.batch.all_to_all:
            return compute_s[0] + sent_s(1), compute_s[1] + sent_s(1)
        forward, backward = sent_s(1), sent_s(2)
        return max(compute_s[0], forward), max(compute_s[1], backward)

    def moved(self) -> Seconds:
        """Return the seconds of memory-bound operations. These are norms, residuals with dropout, the activation,
        rotary positions or biases. The elements per token scale with the hidden width, the FFN's width, and the widths
        of queries and keys. TP splits all but those of the hidden width, which only sequence parallelism splits."""
        shape, m, d, s = self.shape, self.shape.model, self.device, self.software
        unfused = not s.fused_elementwise
        residual = 3 + (1 / d.element + (2 if unfused else 0) if m.dropout else 0) + (2 if unfused and m.bias else 0)
        hidden_bytes = 2 * m.hidden * (self.norm_bytes + residual * d.element) / shape.norm_split
        ffn_passes = (5.0 if unfused else 3.0) if m.swiglu else 2.0 + (2 if unfused and m.bias else 0)
        rotary_elements = m.query_width + m.key_width
        split_elements = ffn_passes * m.active_width + rotary_elements * ((5.0 if unfused else 2.0) if m.rope else 2.0)
        split_elements += rotary_elements * self.norm_bytes / d.element if m.qk_norm else 0
        split_elements += permuted_elements(m) * shape.etp
        token_bytes = hidden_bytes + split_elements * d.element / shape.tp
        forward = d.moved_s(shape.tokens * token_bytes * (d.stack.unfused_elementwise if unfused else 1))
        return forward, 2 * forward

    def selective_s(self) -> float:
        """Return the forward seconds of the parts that selective recomputation repeats.
        These are the scores, the norms, and the FFN with its activation and its TP collective."""
        shape, m, d, s, seconds = self.shape, self.shape.model, self.device, self.software, 0.0
        if "scores" in s.recompute_parts:
            seconds += self.scores()[0]
        if "norms" in s.recompute_parts:
            seconds += d.moved_s(shape.tokens * 2 * m.hidden * self.norm_bytes / shape.norm_split)
        if "ffn" in s.recompute_parts:
            seconds += sum(forward for forward, _ in self.ffn_products()) + (all_reduce_s(d, shape) if m.tp_ffn else 0)
            seconds += d.moved_s(shape.tokens * (3.0 if m.swiglu else 2.0) * m.active_width * d.element / shape.tp)
        return seconds

    @property
    def norm_bytes(self) -> float:
        """Bytes that a norm moves per token and hidden unit. An unfused norm makes half a dozen passes in fp32."""
        return 2.0 * self.device.element + (0 if self.software.fused_norm else 32)

    def exposed(self, products: Seconds) -> Seconds:
        """Return the seconds of a layer's TP collectives that do not overlap with matrix products. With overlap, a
        collective is split into one piece per rank. Each piece overlaps with the product of the previous piece."""
        comm_s = all_reduce_s(self.device, self.shape)
        expert_only = not self.shape.model.tp_ffn  # TP never splits routed experts
        seconds = (2 - expert_only) * comm_s, (self.software.backward_reductions - expert_only) * comm_s
        if not (self.software.overlap_tp and self.shape.sequence_parallel):
            return seconds
        forward, backward = (max(t / self.shape.tp, t - p) for t, p in zip(seconds, products, strict=True))
        return forward, backward

    def kernels(self) -> int:
        """Return the number of kernels in a layer's forward pass."""
        software, tp, experts = self.software, self.shape.tp, self.shape.model.experts.count
        count = KERNELS + KERNELS_ATTENTION[self.attention] + (KERNELS_TP + tp // 2 if tp > 1 else 0)
        count += 0 if software.fused_elementwise else KERNELS_UNFUSED
        count += 0 if software.fused_norm else 2 * KERNELS_NORM
        return count + (KERNELS_ROUTER + experts // self.shape.ep * KERNELS_EXPERT if experts else 0)

    def accumulated(self, weights: int) -> float:
        """Return the seconds of accumulating weight gradients: write and read them, read and write their sum.
        Fused products add to the sum directly, without this traffic."""
        if self.software.fused_wgrad and self.device.element < 4:
            return 0.0
        return self.device.streamed_s(2.0 * weights * (self.device.element + self.gradient_bytes))

    def layer(self) -> Seconds:
        """Return the seconds of one layer's (forward, backward). Recomputation counts as backward."""
        stack, shape = self.device.stack, self.shape
        parts = (products := self.products(), self.scores(), self.moved(), self.exposed(products))
        count = self.kernels()
        forward = sum(f for f, _ in parts) + count * stack.gap_s
        backward = sum(b for _, b in parts) + 2 * count * stack.gap_s
        backward += self.accumulated(layer_parameters(shape.model, shape.tp, shape.ep * shape.etp))
        recomputed_s = {"none": 0.0, "selective": self.selective_s(), "full": forward}[shape.recompute]
        launch_s = count * stack.launch_s
        launches = {"none": 2, "selective": 2, "full": 3}[shape.recompute]
        if self.software.awaited_launches:
            launch_s += count * stack.wait_s
            return forward + launch_s, backward + recomputed_s + launches * launch_s
        return max(forward, launch_s), max(backward + recomputed_s, launches * launch_s)

    def embedding(self) -> Seconds:
        """Return the seconds of (forward, backward) of the embedding, which reads and writes tokens x hidden elements.
        Under TP, forward also sums these elements over the ranks."""
        rows_s = self.device.moved_s(2.0 * self.shape.tokens * self.shape.model.hidden * self.device.element)
        return rows_s + all_reduce_s(self.device, self.shape), 2 * rows_s

    def head(self) -> Seconds:
        """Return the seconds of (forward, backward) of the output matrix and the loss. The final norm is neglected."""
        m, d, tp = self.shape.model, self.device, self.shape.tp
        columns = m.padded_vocab(tp) // tp
        forward, backward = self.product(columns, m.hidden)
        logits, gather_s = self.shape.tokens * columns, 0.0
        if self.software.gathered_logits and tp > 1:
            logits *= tp
            gather_s = d.ring_s((tp - 1) / tp * logits * d.element, tp) + d.streamed_s(2.0 * logits * d.element)
        loss_s = d.streamed_s(logits * d.stack.loss_bytes)
        backward += all_reduce_s(self.device, self.shape) + self.accumulated(head_parameters(m, tp))
        return forward + loss_s + gather_s, backward + loss_s


@lru_cache(maxsize=16384)
def part_times(
    device: Device, software: Software, shape: LayerShape, gradient_bytes: int, cp_gbps: float | None
) -> tuple[Seconds, Seconds, Seconds]:
    """Return ((forward, backward) of a layer, of the embedding, of the head), in the order of PARTS."""
    layer_times = LayerTimes(device, software, shape, gradient_bytes, cp_gbps)
    return layer_times.layer(), layer_times.embedding(), layer_times.head()


@dataclass(frozen=True)
class Cpu:
    """A CPU that emulates a GPU.
    `weight_bytes`, `gradient_bytes`: bytes of one element. `flash`: whether attention is fused."""

    gpu: Gpu
    weight_bytes: int
    gradient_bytes: int
    flash: bool

    def accumulate_s(self, weights: int) -> float:
        """Return the seconds of accumulating weight gradients: write and read them, read and write their sum."""
        return self.memory_s(2.0 * weights * (self.weight_bytes + self.gradient_bytes))

    def matrix_s(self, flops: float) -> float:
        return flops / (self.gpu.peak_tflops * 1e12 * MATRIX_SHARE)

    def memory_s(self, moved_bytes: float) -> float:
        # With emulated compute, `gpu` may be a GPU. Its table then gives the bandwidth.
        gbps = CPU_MEMORY_GBPS if self.gpu.is_cpu else kind(self.gpu).memory_gbps
        return moved_bytes / (gbps * 1e9 * MEMORY_SHARE)

    def embedding_s(self, shape: LayerShape) -> Seconds:
        """Return the seconds of (forward, backward) of the embedding: read and write tokens x hidden elements."""
        moved_s = self.memory_s(2.0 * shape.tokens * shape.model.hidden * self.weight_bytes)
        return moved_s, 2 * moved_s

    def head_s(self, shape: LayerShape) -> Seconds:
        """Return the seconds of (forward, backward) of the head. Logits exist in the weights' type and in fp32."""
        model, tokens, tp = shape.model, shape.tokens, shape.tp
        moved_s = self.memory_s(tokens * model.padded_vocab(tp) / tp * (2.0 * self.weight_bytes + 8))
        forward = self.matrix_s(head_flops(model, tokens, tp) / tp) + moved_s
        return forward, 2 * forward + self.accumulate_s(head_parameters(model, tp))

    def non_matrix_s(self, shape: LayerShape) -> float:
        """Return the seconds of a layer's forward pass without its matrix products.
        Per token and hidden unit, each of two norms reads and writes one element, and each of two residual additions
        (with dropout) reads two elements and writes one. Every TP rank does all of this, unless sequence parallelism
        splits it. The activation of the FFN, of width f, reads f elements (with SwiGLU 2f) and writes f. Rotary
        positions or biases read and write queries, keys and values."""
        model = shape.model
        hidden_elements = model.hidden / shape.norm_split * (10.0 + (4 / self.weight_bytes if model.dropout else 0))
        ffn_elements = (3.0 if model.swiglu else 2.0) * model.active_width + permuted_elements(model) * shape.etp
        keys = 2 * model.key_width
        split_elements = (ffn_elements + (4.0 if model.qk_norm else 2.0) * (model.query_width + keys)) / shape.tp
        moved_bytes = shape.tokens * (hidden_elements + split_elements) * self.weight_bytes
        return self.memory_s(moved_bytes) + self.score_traffic_s(shape)

    def score_traffic_s(self, shape: LayerShape) -> float:
        """Return the seconds of unfused attention's memory traffic.
        Attention writes heads x sequence length scores per token. The masked softmax reads and writes the scores.
        Dropout reads and writes them, and writes a mask. The product with the values reads them."""
        if self.flash:
            return 0.0
        passes = (6.0 * self.weight_bytes + 1) if shape.model.dropout else 4.0 * self.weight_bytes
        return self.memory_s(shape.tokens * shape.batch.context * shape.model.heads / shape.tp * passes)
