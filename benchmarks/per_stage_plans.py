"""Compare predicted plans with per-stage and with uniform TP/DP on sites of unlike fabrics, and the search times.

    python benchmarks/per_stage_plans.py [512 4096]

gpt_7_5b, 1,536 sequences of 2,048 tokens in micro-batches of 4; 8 GPUs a node, 200 Gb/s RDMA, 25 Gb/s Ethernet.
"""

from __future__ import annotations

import sys
import time

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan

A100, H100 = Gpu("a100-80gb", 312, 80, 2400), Gpu("h100-80gb", 989, 80, 3600)
LARGE = {"512": (12, 20, 14, 18), "4096": (96, 160, 112, 144)}  # nodes of each of four fabrics


def make_site(*fabrics: tuple[int, Gpu]) -> Site:
    """Return a site; `fabrics`: nodes and GPU of each fabric, InfiniBand and RoCE in turn."""
    kinds = [("ib", "roce")[i % 2] for i in range(len(fabrics))]
    return Site(
        "site",
        tuple(
            Pool(f"{kind}-{i}", NicType(kind), f"p{i}", nodes, 8, 25, gpu, rdma_gbps=200)
            for i, (kind, (nodes, gpu)) in enumerate(zip(kinds, fabrics, strict=True))
        ),
    )


def print_plan(name: str, target: Site, per_stage: bool = True) -> float:
    """Plan, print the plan and return its samples per second."""
    start = time.process_time()
    plan: Plan = best_plan(
        named("gpt_7_5b"), Batch(1536, 4, 2048), target, PlanOptions(unequal="auto" if per_stage else "false"), Costs()
    )
    assert plan.predicted is not None
    layout = "per-stage" if per_stage else "uniform"
    print(
        f"{name:24} {layout:9} {plan.predicted.samples_per_s:7.1f} samples/s  "
        f"unused nodes {sum(plan.unused.values())}  {time.process_time() - start:5.1f} s of CPU  {plan.parallel}"
    )
    return plan.predicted.samples_per_s


def main(sizes: list[str]) -> None:
    for uneven, even in (((5, 7), 6), ((7, 11), 9)):
        uniform_rate = print_plan(f"{even} + {even} A100", make_site((even, A100), (even, A100)), False)
        for per_stage in (False, True):
            rate = print_plan(f"{uneven[0]} + {uneven[1]} A100", make_site(*((n, A100) for n in uneven)), per_stage)
        print(f"  {rate / uniform_rate:.1%} of {even} + {even}")
    best_single = max(print_plan("3 H100", make_site((3, H100))), print_plan("5 A100", make_site((5, A100))))
    for per_stage in (False, True):
        rate = print_plan("3 H100 + 5 A100", make_site((3, H100), (5, A100)), per_stage)
    print(f"  {rate / best_single:.2f} times the best single fabric")
    for name in sizes:
        for per_stage in (False, True):
            print_plan(f"{name} GPUs", make_site(*((n, A100) for n in LARGE[name])), per_stage)


if __name__ == "__main__":
    main(sys.argv[1:])
