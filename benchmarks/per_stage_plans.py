"""What unequal widths gain: plans for sites of unlike fabrics, with them and without, and how long the search takes.

    python benchmarks/per_stage_plans.py [512 4096]

gpt_7_5b, 1,536 sequences of 2,048 tokens in micro-batches of 4; 8 GPUs a node, 200 Gb/s RDMA, 25 Gb/s Ethernet.
"""

from __future__ import annotations

import sys
import time

from holmes_hpc.config.model import Batch
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Fabric, Gpu, NicType, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan

A100, H100 = Gpu("a100-80gb", 312, 80, 2400), Gpu("h100-80gb", 989, 80, 3600)
LARGE = {"512": (12, 20, 14, 18), "4096": (96, 160, 112, 144)}  # nodes of each of four fabrics


def site(*fabrics: tuple[int, Gpu]) -> Site:
    """Nodes and GPUs of each fabric, InfiniBand and RoCE in turn."""
    kinds = [("ib", "roce")[i % 2] for i in range(len(fabrics))]
    return Site(
        "site",
        tuple(
            Fabric(f"{kind}-{i}", NicType(kind), f"p{i}", nodes, 8, 25, gpu, rdma_gbps=200)
            for i, (kind, (nodes, gpu)) in enumerate(zip(kinds, fabrics, strict=True))
        ),
    )


def shown(name: str, at: Site, unequal: bool = True) -> float:
    """Print one plan; its samples a second."""
    began = time.process_time()
    plan: Plan = best_plan(
        named("gpt_7_5b"), Batch(1536, 4, 2048), at, PlanOptions(unequal="auto" if unequal else "false"), Costs()
    )
    assert plan.predicted is not None
    widths = "unequal" if unequal else "equal"
    print(
        f"{name:24} {widths:8} {plan.predicted.samples_per_s:7.1f} samples/s  left out {sum(plan.unused.values())}  "
        f"{time.process_time() - began:5.1f} s of CPU  {plan.parallel}"
    )
    return plan.predicted.samples_per_s


def main(wanted: list[str]) -> None:
    for uneven, even in (((5, 7), 6), ((7, 11), 9)):
        alike = shown(f"{even} + {even} A100", site((even, A100), (even, A100)), False)
        for unequal in (False, True):
            rate = shown(f"{uneven[0]} + {uneven[1]} A100", site(*((n, A100) for n in uneven)), unequal)
        print(f"  {rate / alike:.1%} of {even} + {even}")
    alone = max(shown("3 H100", site((3, H100))), shown("5 A100", site((5, A100))))
    for unequal in (False, True):
        rate = shown("3 H100 + 5 A100", site((3, H100), (5, A100)), unequal)
    print(f"  {rate / alone:.2f} times the best of one fabric")
    for name in wanted:
        for unequal in (False, True):
            shown(f"{name} GPUs", site(*((n, A100) for n in LARGE[name])), unequal)


if __name__ == "__main__":
    main(sys.argv[1:])
