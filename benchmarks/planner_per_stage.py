"""Compare plans with per-stage TP/DP with an exhaustive listing, on small sites drawn from seeds.

    python benchmarks/planner_per_stage.py OUT.jsonl [--sites 100] [--seed 0]

Sites have two fabrics of 1 to 3 nodes (at most 4 together) of 1 or 2 GPUs, one or two kinds of GPU, and Ethernet of 2.5
to 100 Gb/s between them. Models have 4 or 5 layers. The listing, under the planner's own simulator, has every order of
every choice of fabrics, every distribution of their nodes over up to three stages, every TP and layer partition, two
bucket sizes, and depths up to two micro-batches above the minimum. Regret is the plan's slowdown against the best
listed one. Each site adds a line to OUT.jsonl; sites already in it are skipped.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
from planner_regret import resume

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import step_s
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel
from holmes_hpc.planning.plan.plan import Component, Schedule
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.search.best import best_plan

A100 = Gpu("a100-80gb", 312, 80, 2400)
H100 = Gpu("h100-80gb", 989, 80, 3600)
BUCKETS = (160_000_000, 10_000_000)
EXTRA_DEPTHS = range(3)  # micro-batches in flight above the minimum, at each stage but the last
MAX_STAGES = 3


def draw_problem(seed: int) -> tuple[ModelSpec, Batch, Site]:
    """Return the model, batch and site of a seed; all plans fit into memory."""
    rng = random.Random(seed)
    hidden = rng.choice((1024, 2048, 4096))
    model = ModelSpec(
        "small",
        layers=rng.randint(4, 5),
        hidden=hidden,
        heads=16,
        vocab=32000,
        ffn=4 * hidden,
        kv_heads=16,
        max_positions=2048,
    )
    nodes = rng.choice(((1, 2), (1, 3), (2, 1), (3, 1), (2, 2)))
    kinds = rng.choice(((A100, A100), (A100, H100)))
    ethernet_gbps = rng.choice((2.5, 10.0, 25.0, 100.0))
    fabrics = tuple(
        Pool(f"{nic}-{i}", nic, f"p{i}", count, rng.choice((1, 2)), ethernet_gbps, gpu, rdma_gbps=200.0)
        for i, (nic, count, gpu) in enumerate(zip((NicType.IB, NicType.ROCE), nodes, kinds, strict=True))
    )
    return model, Batch(rng.choice((12, 15, 18)), 1, rng.choice((512, 2048))), Site(f"small-{seed}", fabrics)


def best_listed_s(model: ModelSpec, batch: Batch, site: Site, costs: Costs) -> float:
    """Return the shortest listed step time in seconds."""
    best = float("inf")
    for fabrics, nodes in _stage_nodes(site):
        components = tuple(
            Component(
                f.partition,
                "",
                f.name,
                sum(n for g, n in zip(fabrics, nodes, strict=True) if g is f),
                f.gpus_per_node,
                tuple(s for s, g in enumerate(fabrics) if g is f),
            )
            for f in dict.fromkeys(fabrics)
        )
        for tps in product(*(_tp_choices(f) for f in fabrics)):
            sizes = zip(fabrics, nodes, tps, strict=True)
            stages = tuple(StageParallel(tp, n * f.gpus_per_node // tp) for f, n, tp in sizes)
            parallel = Parallel(stages, sequence_parallel=max(tps) > 1)
            dps = [stage.dp for stage in parallel.stages]
            if max(dps) > batch.micro_batches(1):
                continue
            base = Layout(model, batch, parallel, "none", Schedule("ahead", (1,) * len(dps)), components, site, costs)
            depths = {
                tuple(
                    min(d, -(-batch.micro_batches(1) // dp))
                    for d, dp in zip(least_in_flight(tuple(dps), (*(extra for _ in dps[1:]), 0)), dps, strict=True)
                )
                for extra in EXTRA_DEPTHS
            }
            for layers, depth, size in product(_splits(model.layers, len(dps)), depths, BUCKETS):
                layout = base.with_settings(Schedule("ahead", depth), bucket_bytes=size)
                best = min(best, float(step_s(layout, np.array(layers)[None, :, None])[0]))
    return best


def _stage_nodes(site: Site) -> Iterator[tuple[list[Pool], list[int]]]:
    """Yield the fabric and the number of nodes of each stage."""
    for count in range(1, len(site.pools) + 1):
        for chosen in permutations(site.pools, count):
            for parts in product(*(list(_node_splits(f.nodes)) for f in chosen)):
                if sum(map(len, parts)) <= MAX_STAGES:
                    fabrics = [f for f, part in zip(chosen, parts, strict=True) for _ in part]
                    yield fabrics, [n for part in parts for n in part]


def _node_splits(nodes: int) -> Iterator[tuple[int, ...]]:
    for used in range(1, nodes + 1):
        for count in range(1, used + 1):
            yield from _splits(used, count)


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def _tp_choices(fabric: Pool) -> list[int]:
    return [t for t in (1, 2) if fabric.gpus_per_node % t == 0]


def measure(seed: int) -> dict[str, Any]:
    """Compare the planner's step time with the shortest listed one on one site; return its row."""
    model, batch, site = draw_problem(seed)
    plan = best_plan(model, batch, site, PlanOptions(unequal="true"), Costs())
    assert plan.predicted is not None
    listed_s, plan_s = best_listed_s(model, batch, site, Costs()), plan.predicted.step_time_s
    return {
        "seed": seed,
        "fabrics": [f"{f.nodes} x {f.gpus_per_node} {f.gpu.name}" for f in site.pools],
        "found_s": plan_s,
        "least_s": listed_s,
        "regret": plan_s / listed_s - 1,
        "plan": str(plan.parallel),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()

    def measure_and_print(seed: int) -> dict[str, Any]:
        row = measure(seed)
        print(f"{seed:4} {row['regret']:+7.2%}  {' + '.join(row['fabrics'])}: {row['plan']}", flush=True)
        return row

    rows = resume(arguments.out, range(arguments.seed, arguments.seed + arguments.sites), measure_and_print)
    regrets = [max(0.0, row["regret"]) for row in rows]
    print(f"{len(rows)} sites: mean regret {sum(regrets) / len(regrets):.2%}, worst {max(regrets):.2%}")


if __name__ == "__main__":
    main()
