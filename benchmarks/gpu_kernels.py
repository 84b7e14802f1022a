"""Time kernels of a layer on one GPU and compare them with the planner's model (holmes_hpc/planning/cost/kernels.py).

    python benchmarks/gpu_kernels.py [--quick] [--device cuda]

Inputs are random, bf16 on a GPU. A time is the median of five batches of launches, by CUDA events. Prints JSON: rows of
[kernel, shape, measured µs, predicted µs], the mean error of each kind of kernel, and the rate of one large product
launched for three seconds, which a GPU's power may limit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from holmes_hpc.fabric.local_gpus import local_gpus
from holmes_hpc.fabric.site import CPU
from holmes_hpc.planning.cost.kernels import Device

BATCHES, BATCH_S = 5, 0.01
# (hidden, FFN) of layers: from a small GPT to 70B, a 70B over TP 8, and an expert of Qwen3-30B-A3B.
WIDTHS = ((1024, 4096), (2048, 8192), (4096, 14336), (8192, 28672), (8192, 3584), (2048, 768))
TOKENS = (256, 1024, 4096, 16384)
QUICK_WIDTHS, QUICK_TOKENS, QUICK_ATTENTION = ((64, 128),), (16, 64), ((64, 128),)
ATTENTION = ((64, 1024), (64, 4096), (128, 2048), (128, 4096), (128, 8192), (128, 32768))  # head width, sequence
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}  # a CPU may lack bf16
Row = tuple[str, str, float, float]
Kernel = Callable[[], Any]


def seconds(kernel: Kernel, cuda: bool) -> float:
    """Return the median seconds of a launch."""
    for _ in range(3):
        kernel()
    start = _synchronized(cuda)
    kernel()
    launches = max(1, min(100, int(BATCH_S / max(1e-6, _synchronized(cuda) - start))))
    times = []
    for _ in range(BATCHES):
        if not cuda:
            start = time.perf_counter()
            for _ in range(launches):
                kernel()
            times.append((time.perf_counter() - start) / launches)
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(launches):
            kernel()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3 / launches)
    return statistics.median(times)


def _synchronized(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def products(device: Device, where: str, quick: bool) -> Iterator[tuple[str, str, Kernel, float]]:
    """Yield (pass, shape, kernel, predicted seconds) of the products of a layer: forward, and both of backward."""
    for hidden, ffn in QUICK_WIDTHS if quick else WIDTHS:
        for tokens in QUICK_TOKENS if quick else TOKENS:
            for columns, rows in ((ffn, hidden), (hidden, ffn)):
                x, w, g = (
                    torch.randn(a, b, device=where, dtype=DTYPE[where])
                    for a, b in ((tokens, rows), (columns, rows), (tokens, columns))
                )
                shape = f"{tokens} x {rows} x {columns}"
                yield "forward", shape, lambda x=x, w=w: x @ w.T, device.product_s(tokens, columns, rows)
                yield "input", shape, lambda g=g, w=w: g @ w, device.product_s(tokens, rows, columns)
                yield "weight", shape, lambda g=g, x=x: g.T @ x, device.product_s(columns, rows, tokens)


def attention(device: Device, where: str, quick: bool) -> Iterator[tuple[str, str, Kernel, float]]:
    """Yield torch's fused causal attention, forward and backward, of 32,768 tokens of 16 heads (quick: 128)."""
    for width, sequence in QUICK_ATTENTION if quick else ATTENTION:
        count = max(1, (128 if quick else 32768) // sequence)
        q, k, v = (
            torch.randn(count, 16, sequence, width, device=where, dtype=DTYPE[where], requires_grad=True)
            for _ in range(3)
        )

        def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        gradient = torch.randn_like(out)

        def backward(out: Any = out, inputs: Any = (q, k, v), gradient: Any = gradient) -> Any:
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        shape = f"{count} x 16 x {sequence} x {width}"
        predicted = device.flash_s(count * 16, sequence, width, "sdpa")
        yield "attention forward", shape, forward, predicted[0]
        yield "attention backward", shape, backward, predicted[1]


def moved(device: Device, where: str, quick: bool) -> Iterator[tuple[str, str, Kernel, float]]:
    """Yield memory-bound kernels: a norm, an activation, a sum, and a copy of one large array."""
    for tokens, width in ((16, 64),) if quick else ((4096, 2048), (8192, 4096), (8192, 14336)):
        x, y = (torch.randn(tokens, width, device=where, dtype=DTYPE[where]) for _ in range(2))
        size, shape = x.numel() * 2.0, f"{tokens} x {width}"
        yield "norm", shape, lambda x=x, width=width: F.layer_norm(x, (width,)), device.moved_s(2 * size)
        yield "gelu", shape, lambda x=x: F.gelu(x), device.moved_s(2 * size)
        yield "add", shape, lambda x=x, y=y: x + y, device.moved_s(3 * size)
    large = torch.randn(2**12 if quick else 2**29, device=where)
    copy = torch.empty_like(large)
    yield "copy", f"{large.numel()}", lambda: copy.copy_(large), device.streamed_s(8.0 * large.numel())


def sustained_tflops(where: str, limit_s: float) -> float:
    """Return the TFLOP/s of a product of 8192 x 8192 x 8192, launched for `limit_s` seconds, in their second half."""
    size, cuda = 8192 if where == "cuda" else 256, where == "cuda"
    a, b = (torch.randn(size, size, device=where, dtype=DTYPE[where]) for _ in range(2))
    rates, start = [], _synchronized(cuda)
    while (before := _synchronized(cuda)) - start < limit_s:
        for _ in range(20):
            a @ b
        rates.append(20 * 2.0 * size**3 / (_synchronized(cuda) - before) / 1e12)
    return statistics.median(rates[len(rates) // 2 :])


def measure(where: str, quick: bool) -> dict[str, Any]:
    """Return the rows and the figures."""
    cuda = where == "cuda"
    gpu = local_gpus()[0] if cuda else CPU
    device = Device(gpu, 2)
    rows: list[Row] = []
    errors: dict[str, list[float]] = defaultdict(list)
    for part in (products, attention, moved):
        for kernel, shape, launch, predicted_s in part(device, where, quick):
            measured_s = seconds(launch, cuda)
            rows.append((kernel, shape, round(measured_s * 1e6, 2), round(predicted_s * 1e6, 2)))
            errors[f"{part.__name__}: {kernel}"].append(math.log(predicted_s / measured_s))
    tiny = torch.ones(1, device=where)
    start = _synchronized(cuda)
    for _ in range(1000):
        tiny.add_(1)
    launch_us = (time.perf_counter() - start) * 1e3
    return {
        "gpu": gpu.name,
        "torch": torch.__version__,
        "launch_us": round(launch_us, 2),
        "sustained_tflops": round(sustained_tflops(where, 0.1 if quick else 3.0), 1),
        "mean_error_percent": {k: round(100 * statistics.mean(map(abs, v)), 1) for k, v in errors.items()},
        "bias_percent": {k: round(100 * math.expm1(statistics.mean(v)), 1) for k, v in errors.items()},
        "rows": rows,
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a few small shapes, as a test of the program")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = options.parse_args()
    print(json.dumps(measure(arguments.device, arguments.quick)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
