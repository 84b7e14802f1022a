"""Seconds of a layer's kernels on one GPU: matrix products, attention, memory-bound operations, collectives.

A matrix product is computed in tiles of a fixed shape, which run on the GPU's multiprocessors in waves. The last wave
takes as long as a full one, and a tile at the edge as long as a full tile (NVIDIA, "Matrix Multiplication Background
User's Guide", 2023: tile and wave quantisation). As in cuBLAS, the quickest of several tile shapes is used. Smaller
tiles are slower, because they reuse less of the data that they load. kernel_figures.yaml has the shares of the peak.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated

from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import Gpu
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import Checked, key, make

# Peak FLOPs per byte of memory bandwidth of an unknown GPU. A100, H100, H200 and B200 have 153 to 295.
FLOPS_PER_BYTE = 200.0
FILL = 64  # filling a tile's pipeline takes as long as this many further elements of the inner dimension
# Rows and columns of each tile shape, and its speed relative to the best shape.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 128, 0.82), (64, 64, 0.65))


@dataclass(frozen=True)
class Kind(Checked, where="gpu kind {0.name}"):
    """The kernel efficiencies of one kind of GPU (kernel_figures.yaml). `known` False: assumed figures."""

    name: str
    sms: Annotated[int, key("streaming multiprocessors", ge=1)]
    memory_gbps: Annotated[float, key("memory bandwidth", unit="GB/s", gt=0)]
    fp32_tflops: Annotated[float, key("peak of fp32 products", unit="TFLOP/s", gt=0)]
    product: Annotated[float, key("share of the peak that large products reach", gt=0, le=1)]
    flash: Annotated[float, key("share of the peak that fused attention reaches", gt=0, le=1)]
    fp8_tflops: Annotated[float | None, key("peak of FP8 products; null: none", unit="TFLOP/s", gt=0)] = None
    generation: str = ""
    source: str = ""
    known: bool = True


@cache
def kinds() -> tuple[Kind, ...]:
    """Return all kinds of kernel_figures.yaml, the longest names first."""
    path = Path(__file__).with_name("kernel_figures.yaml")
    tables = [make(Kind, row, f"{path.name}: kinds") for row in read_yaml(path)["kinds"]]
    return tuple(sorted(tables, key=lambda k: -len(k.name)))


@cache
def kind(gpu: Gpu) -> Kind:
    """Return the kernel efficiencies of a GPU. Its name is the one in Slurm or in a site file.
    If kernel_figures.yaml has no such kind, derive the efficiencies from the GPU's peak."""
    gpu_kind = read_vocabulary().gpu(gpu.name)
    for name in (gpu_kind.name if gpu_kind is not None else gpu.name, gpu.name):
        for table in kinds():
            if name.lower().startswith(table.name):
                return table
    sms, memory_gbps = max(1, round(gpu.peak_tflops / 2.9)), gpu.peak_tflops * 1e3 / FLOPS_PER_BYTE
    return Kind(gpu.name, sms, memory_gbps, gpu.peak_tflops / 2, product=0.66, flash=0.4, known=False)


Share = Annotated[float, key("factor of a table's figure, a bandwidth or a count", gt=0)]
Time = Annotated[float, key("seconds", unit="s", ge=0)]


@dataclass(frozen=True)
class Stack(Checked, where="stack"):
    """The efficiency of current training programs, relative to the figures of each GPU kind (:class:`Kind`).

    All GPUs and programs have the same constants, fitted to published runs (benchmarks/published_fit.py).

    Compute: `product`: factor of `Kind.product`; `fp8`: further factor of FP8 products, whose peak is that of FP8.
    `flash`, `flash1`, `flash3`: factor of `Kind.flash` for FlashAttention 2, 1 and 3.

    Memory: `memory`: share of the bandwidth that kernels reach whose rows have the width of one token; `stream`: share
    that kernels over one large array reach (scores, gradients, optimizer, loss). `unfused_attention`,
    `unfused_elementwise`: ratio of moved to counted bytes in unfused attention and in other unfused operations.
    `loss_bytes`: bytes that the loss moves per logit in the forward pass.

    Overheads in seconds: `launch_s`: CPU time of a kernel launch; `wait_s`: additional CPU time if the CPU waits for
    the kernel; `gap_s`: gap between two kernels on the GPU. `pass_s`: overhead of a pass through all chunks of a stage;
    `chunk_s`: additional overhead of a chunk if there are several. `step_s`: overhead of a step. `ring_s`, `rank_s`:
    latency of a collective inside a node, constant part and part per rank (all-reduces of 2 to 8 A100,
    github.com/VIA-Research/vTrain, trace/a100, f8dda84).

    Shares of the nominal rate: `local`, `ib`, `roce`: of collectives inside a node, over InfiniBand, and over other
    RDMA; `transfer`: of stage transfers over RDMA."""

    product: Share = 0.9396
    memory: Share = 0.85
    stream: Share = 0.736
    fp8: Share = 0.8775
    flash: Share = 1
    flash1: Share = 0.5874
    flash3: Share = 1.569
    unfused_attention: Share = 0.9422
    unfused_elementwise: Share = 1.863
    loss_bytes: Share = 6.077
    launch_s: Time = 2.837e-05
    wait_s: Time = 4.482e-05
    gap_s: Time = 1.178e-06
    pass_s: Time = 0.001699
    chunk_s: Time = 0.00025
    step_s: Time = 0.006651
    ring_s: Time = 2e-05
    rank_s: Time = 7e-06
    local: Share = 0.77
    ib: Share = 0.92
    roce: Share = 0.5896
    transfer: Share = 0.9


STACK = Stack()


def _alignment_factor(width: int) -> float:
    """Return the slowdown of a matrix product with a dimension of `width` bytes. Multiples of 128 bytes are fastest. If
    `width` is not a multiple of 16 bytes, at most a third of the speed remains (see the guide above)."""
    return 1.0 if width % 128 == 0 else 1.15 if width % 16 == 0 else 3.0


@dataclass(frozen=True)
class Device:
    """One GPU and the data type of its kernels. `element`: bytes of one element of weights and activations."""

    gpu: Gpu
    element: int
    stack: Stack = STACK

    @cached_property
    def kind(self) -> Kind:
        return kind(self.gpu)

    @cached_property
    def peak(self) -> float:
        """Peak FLOP/s of matrix products in this data type."""
        return (self.kind.fp32_tflops if self.element == 4 else self.gpu.peak_tflops) * 1e12

    @cached_property
    def bandwidth(self) -> float:
        """Memory bandwidth in bytes per second."""
        return self.kind.memory_gbps * 1e9

    def moved_s(self, moved_bytes: float) -> float:
        """Return the seconds to move `moved_bytes` in kernels whose rows have the width of one token."""
        return moved_bytes / (self.bandwidth * self.stack.memory)

    def streamed_s(self, moved_bytes: float) -> float:
        """Return the seconds to move `moved_bytes` in kernels over one large array."""
        return moved_bytes / (self.bandwidth * self.stack.stream)

    def product_s(self, m: int, n: int, k: int, fp8: bool = False) -> float:
        """Return the seconds of the matrix product (m, k) x (k, n). If the tiles do not fill the GPU, several
        multiprocessors may share a tile (split-K): each sums over a part of k, and the parts are added in fp32."""
        sms, best = self.kind.sms, math.inf
        rate = self.peak * self.kind.product * self.stack.product
        if fp8:
            rate *= self.stack.fp8 * (self.kind.fp8_tflops or 0.0) / self.gpu.peak_tflops
        for rows, columns, speed in TILES:
            tiles = -(-m // rows) * -(-n // columns)
            for parts in (1, 2, 4) if tiles < 2 * sms else (1,):
                flops = 2.0 * -(-tiles * parts // sms) * sms * rows * columns * (k / parts + FILL) / speed
                best = min(best, flops / rate + (self.streamed_s(8.0 * parts * m * n) if parts > 1 else 0.0))
        alignment_factor = max(_alignment_factor(side * self.element) for side in (m, n, k))
        return max(alignment_factor * best, self.streamed_s(self.element * (m * k + k * n + m * n)))

    def scores_s(self, pairs: float, width: int) -> float:
        """Return the seconds of one of the two batched matrix products of attention.
        The memory traffic of the scores is not included. `pairs`: number of (query, key) pairs. `width`: width of a
        head; it counts as the next multiple of 64 (fitted to kernels.csv: widths 64, 80 and 128)."""
        slowdown = 12 if width * self.element % 16 else 1  # no tensor cores: 19.5 of A100's 312 TFLOP/s
        flops = 2.0 * pairs * -(-width // 64) * 64 * slowdown
        return flops / (self.peak * self.kind.product * self.stack.product)

    def flash_s(self, blocks: float, sequence: int, width: int, version: str) -> tuple[float, float]:
        """Return the seconds of (forward, backward) of fused causal attention.
        `blocks`: sequences x heads of this rank. The masked half of the scores is not computed. Backward makes five
        matrix products instead of two, at 0.85 of the speed. Short sequences are slower, because few tiles are off the
        diagonal. Narrow heads are slower, because they have fewer multiplications per exponential."""
        flops = 2.0 * blocks * sequence * sequence * width  # half of 4 * s * s * width
        stack = self.stack
        share = self.kind.flash * {"flash1": stack.flash1, "flash3": stack.flash3}.get(version, stack.flash)
        share *= sequence / (sequence + 384) * min(1.0, 0.7 + 0.3 * width / 128)
        tiles = blocks * -(-sequence // 128) / self.kind.sms
        forward = flops / (self.peak * share) * math.ceil(tiles) / tiles
        return forward, 2.5 * forward / 0.85

    def ring_s(self, sent_bytes: float, ranks: int, calls: float = 1.0) -> float:
        """Return the seconds of `calls` collectives inside a node, in which a rank sends `sent_bytes` in all."""
        latency_s = self.stack.ring_s + ranks * self.stack.rank_s
        return sent_bytes / (self.gpu.intra_node_gbps * 1e9 / 8 * self.stack.local) + calls * latency_s
