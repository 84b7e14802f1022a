"""The planner's cost model against published runs: the fit of its three constants, what it leaves over, leave-one-out.

    python benchmarks/planner_published.py

Ten runs of Narayanan et al. (SC'21, Table 1) and three of Yang et al. (arXiv 2312.03549), TFLOP/s per GPU by the
formula 96*B*s*l*h^2*(1 + s/(6h) + V/(16*l*h)) that both use. Fitted: the share of peak that matrix products reach,
the share of memory bandwidth that everything else reaches, the share of its nominal rate that RoCE reaches: one each
for all rows. Everything else is cited, and printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import Fabric, Gpu, NicType, Site
from holmes_hpc.planning.cost.costs import SC21, Costs
from holmes_hpc.planning.cost.hardware import FITTED, MEMORY_GBPS, Fitted, published_links
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import step_s
from holmes_hpc.planning.schedule.orders import in_flight
from holmes_hpc.planning.search.layers import uniform
from holmes_hpc.planning.spec.parallel import Parallel
from holmes_hpc.planning.spec.plan import Component, Schedule

A100 = Gpu("a100-80gb", peak_tflops=312, memory_gib=80, intra_node_gbps=2400)
SEQUENCE = 2048


@dataclass(frozen=True)
class Run:
    """One published run. `chunk`: layers per virtual stage, 0 without. `nic`, `gbps`: of a node, RDMA or Ethernet."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    tp: int
    pp: int
    micro_size: int
    chunk: int
    gpus: int
    global_size: int
    nic: str
    gbps: float
    tflops: float

    @property
    def is_2021(self) -> bool:
        return self.gbps == 1600


def _sc21(*row: float | str) -> Run:
    name, layers, hidden, heads, tp, pp, micro, chunk, gpus, batch, tflops = row
    return Run(name, layers, hidden, heads, 51200, tp, pp, micro, chunk, gpus, batch, "ib", 1600, tflops)  # type: ignore


RUNS: tuple[Run, ...] = (
    _sc21("1.7B", 24, 2304, 24, 1, 1, 16, 0, 32, 512, 137), _sc21("3.6B", 30, 3072, 32, 2, 1, 16, 0, 64, 512, 138),
    _sc21("7.5B", 36, 4096, 32, 4, 1, 16, 0, 128, 512, 142), _sc21("18.4B", 40, 6144, 48, 8, 1, 8, 0, 256, 1024, 135),
    _sc21("39.1B", 48, 8192, 64, 8, 2, 4, 0, 512, 1536, 138),
    _sc21("76.1B", 60, 10240, 80, 8, 4, 2, 5, 1024, 1792, 140),
    _sc21("145.6B", 80, 12288, 96, 8, 8, 2, 5, 1536, 2304, 148),
    _sc21("310.1B", 96, 16384, 128, 8, 16, 1, 3, 1920, 2160, 155),
    _sc21("529.6B", 105, 20480, 128, 8, 35, 1, 1, 2520, 2520, 163),
    _sc21("1008B", 128, 25600, 160, 8, 64, 1, 0, 3072, 3072, 163),
    *(Run(f"3.6B {nic}", 30, 3072, 32, 50304, 1, 2, 4, 0, 32, 768, nic, gbps, tflops)
      for nic, gbps, tflops in (("ib", 200.0, 197.0), ("roce", 200.0, 160.0), ("ethernet", 25.0, 122.0))))


def model(run: Run) -> ModelSpec:
    """SC'21: GPT with GELU, biases, dropout, a tied embedding. Yang et al.: SwiGLU and rotary positions, as tied."""
    old = run.is_2021
    return ModelSpec(run.name, run.layers, run.hidden, run.heads, run.vocab, kv_heads=run.heads, tied=True, bias=old,
                     ffn=4 * run.hidden if old else 8 * run.hidden // 3 // 64 * 64, swiglu=not old, rmsnorm=not old,
                     rope=not old, max_positions=SEQUENCE, dropout=0.1 if old else 0.0)


def layout(run: Run, fitted: Fitted) -> Layout:
    """The run as the planner sees it. SC'21: no FlashAttention, no distributed optimizer, transfers waited for."""
    nodes, dp = run.gpus // 8, run.gpus // run.tp // run.pp
    chunks = run.layers // run.pp // run.chunk if run.chunk else 1
    rdma = None if run.nic == "ethernet" else run.gbps
    fabric = Fabric("published", NicType(run.nic), "p", nodes, 8, 25.0, A100, rdma_gbps=rdma)
    batch = Batch(run.global_size, run.micro_size, SEQUENCE)
    schedule = Schedule("interleaved" if chunks > 1 else "1f1b", in_flight(run.pp, batch.micro_batches(dp), chunks))
    costs = Costs(dtype="fp16", gradient_bytes=2, fitted=fitted, **({"software": SC21} if run.is_2021 else {}))
    parallel = Parallel(run.tp, run.pp, dp, virtual_stages=chunks, distributed_optimizer=not run.is_2021)
    component = Component("p", "", "published", nodes, 8, tuple(range(run.pp)))
    return Layout(model(run), batch, parallel, "full", schedule, (component,), Site("published", (fabric,)), costs)


def predicted_tflops(run: Run, fitted: Fitted) -> float:
    """TFLOP/s per GPU by the formula of both papers."""
    made = layout(run, fitted)
    seconds = float(step_s(made, uniform(made))[0])
    s, h, layers = SEQUENCE, run.hidden, run.layers
    flops = 96 * run.global_size * s * layers * h * h * (1 + s / (6 * h) + run.vocab / (16 * layers * h))
    return flops / seconds / run.gpus / 1e12


def errors(runs: Sequence[Run], fitted: Fitted) -> np.ndarray:
    """Predicted over published, less one."""
    return np.array([predicted_tflops(r, fitted) / r.tflops - 1 for r in runs])


def fit(runs: Sequence[Run], rounds: int = 8) -> Fitted:
    """Least squares of log(predicted / published) by Gauss-Newton. It starts with RoCE as good as InfiniBand, and where
    no run says otherwise that is what it stays."""
    at = np.log([0.7, 0.8, published_links()["ib"].efficiency])

    def left(x: np.ndarray) -> np.ndarray:
        return np.log1p(errors(runs, Fitted(*np.exp(x))))

    for _ in range(rounds):
        base = left(at)
        slope = np.stack([(left(at + step) - base) / 1e-3 for step in 1e-3 * np.eye(len(at))], axis=1)
        damped = np.vstack([slope, 1e-4 * np.eye(len(at))])
        step_to = np.linalg.lstsq(damped, np.concatenate([-base, np.zeros(len(at))]), rcond=None)[0]
        at = at + np.clip(step_to, -0.4, 0.4)
    return Fitted(*(float(x) for x in np.exp(at)))


def main() -> None:
    print("cited:")
    print(f"  A100 80 GB: {A100.peak_tflops:g} TFLOP/s (fp16, dense), {MEMORY_GBPS['a100']:g} GB/s memory (data sheet)")
    for name, link in published_links().items():
        if name != "roce":
            print(f"  {name}: {link.efficiency:g} of the nominal rate, {link.latency_s * 1e6:g} us a message"
                  " (hardware.py says whose figures)")
    print(f"  NVLink {A100.intra_node_gbps:g} Gb/s a GPU and direction; 8 x 200 Gb/s HDR a node (SC'21), or 200"
          " Gb/s RDMA and 25 Gb/s Ethernet (Yang et al.)")
    found = fit(RUNS)
    print(f"fitted to all 13 runs: {_text(found)}")
    print(f"in hardware.py:        {_text(FITTED)}")
    print(f"\n{'run':14} {'TP':>2} {'PP':>2} {'GPUs':>5} {'published':>9} {'model':>7} {'error':>7}   left out")
    residuals = errors(RUNS, FITTED)
    alone = []
    for i, run in enumerate(RUNS):
        alone.append(float(errors([run], fit([r for r in RUNS if r is not run]))[0]))
        print(f"{run.name:14} {run.tp:2} {run.pp:2} {run.gpus:5} {run.tflops:9.0f}"
              f" {run.tflops * (1 + residuals[i]):7.1f} {residuals[i]:+7.1%}   {alone[-1]:+7.1%}")
    print(f"\nmean absolute error {abs(residuals).mean():.1%} (at most 5%), largest {abs(residuals).max():.1%} (10%),"
          f" leave-one-out mean {np.abs(alone).mean():.1%} (7%)")


def _text(constants: Fitted) -> str:
    return ", ".join(f"{f.name} {v:.3f}" for f, v in zip(fields(constants), astuple(constants), strict=True))


if __name__ == "__main__":
    main()
