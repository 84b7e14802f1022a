"""Measure the planner's CPU and wall time: on sites with a limit (for two idle cores), and over nodes of a fabric.

    python benchmarks/planner_speed.py [--curve]

Prints per site both times, the peak memory and the plan.
"""

from __future__ import annotations

import argparse
import resource
import time

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan

A100 = Gpu("a100-80gb", 312, 80, 2400)
H100 = Gpu("h100-80gb", 989, 80, 3600)
KINDS = (("ib", A100, 1600.0), ("roce", A100, 800.0), ("ethernet", A100, None), ("ib", H100, 3200.0))


def site(nodes: list[int], gpus: int = 8, mixed: bool = True) -> Site:
    """Return a site with a fabric per number of nodes; with `mixed` the fourth has H100s, else all have A100s."""
    fabrics = []
    for i, count in enumerate(nodes):
        nic, gpu, gbps = KINDS[i % len(KINDS)]
        fabrics.append(
            Pool(f"{nic}-{i}", NicType(nic), f"p{i}", count, gpus, 100.0, gpu if mixed else A100, rdma_gbps=gbps)
        )
    return Site("speed", tuple(fabrics))


def measure(name: str, target: Site, model: ModelSpec, batch: Batch, limit_s: float | None = None) -> float:
    """Plan once, print the plan and its times, and return the wall time in seconds."""
    start, cpu_s = time.perf_counter(), time.process_time()
    plan = best_plan(model, batch, target, PlanOptions(search_micro_size=True), Costs())
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_s
    parallel = plan.parallel
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    limit = f" (limit {limit_s:g})" if limit_s else ""
    print(
        f"{name:22} CPU {cpu_s:6.2f} s, wall {seconds:6.2f} s{limit:12}  peak {peak:.2f} GiB so far  "
        f"{plan.strategy} {parallel} micro {plan.batch.micro_size}"
        f" {plan.schedule.kind} {plan.recompute}; step {plan.predicted.step_time_s if plan.predicted else 0:.2f} s",
        flush=True,
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", action="store_true", help="also plan for 16 to 1,024 nodes per fabric")
    arguments = parser.parse_args()
    measure("64 nodes in 3 fabrics", site([24, 24, 16]), named("gpt_7_5b"), Batch(1536, 4, 2048), 1)
    measure("512 GPUs, mixed", site([16, 16, 16, 16]), named("gpt_39b"), Batch(1536, 1, 2048), 10)
    gpt3 = named("gpt3_175b")
    measure("4,096 GPUs, 96 layers", site([128] * 4), gpt3, Batch(6144, 1, 2048), 20)
    measure("16,384 GPUs, 96 layers", site([512] * 4), gpt3, Batch(6144, 1, 2048), 40)
    if arguments.curve:
        print("nodes of each of 4 fabrics:")
        for nodes in (16, 32, 64, 128, 256, 512, 1024):
            measure(f"  {nodes}", site([nodes] * 4), gpt3, Batch(6144, 1, 2048))


if __name__ == "__main__":
    main()
