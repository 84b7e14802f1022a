"""Compare the planner's free choice with plans that a user tells to use a part of the site.

    python benchmarks/planner_regret.py OUT.jsonl [--sites 60] [--seed 0] [--unequal false]

Each seed draws a site of up to 256 GPUs: 2 to 5 fabrics of 1 to 3 pools, odd numbers of nodes and of GPUs per node, GPU
kinds of 16 to 192 GB, links with delays and total rates. Models have 3.6B to 70B parameters; some batches are prime.
The free choice is compared with plans for each fabric alone, each pair of fabrics and 10 random sets of nodes
(`plan.nodes`), and with the free choice after one improvement of the site. Parts of the site on which compute alone
would take longer than the free choice are not planned. Regret is the slowdown of the free choice against the best told
plan, by the planner's own prediction; it is 0 if the free choice is as fast or faster. Each site adds a line to
OUT.jsonl; sites already in it are skipped.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.features import read_vocabulary
from holmes_hpc.fabric.site import FabricLink, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import best_plan
from holmes_hpc.planning.search.problem import Problem, available_pools, micro_sizes, searched_site
from holmes_hpc.planning.search.stage_shapes import _ShapeEstimator

GPU_NAMES = ("v100-16gb", "v100-32gb", "a100-40gb", "l40s", "a100-80gb", "h100", "h200", "mi300x")
GPUS = tuple(gpu for name in GPU_NAMES if (gpu := read_vocabulary().gpu(name)) is not None)
MODELS = (
    ("gpt_3_6b", 2048),
    ("gpt_7_5b", 2048),
    ("llama2_7b", 4096),
    ("llama3_8b", 8192),
    ("gpt_39b", 2048),
    ("llama2_70b", 4096),
)
BATCHES = (96, 192, 251, 257, 360, 509, 512, 768, 1021, 1024, 1536)
MAX_GPUS = 256
RANDOM_SUBSETS = 10


def draw_problem(seed: int) -> tuple[ModelSpec, Batch, Site]:
    """Return the model, batch and site of a seed."""
    rng = random.Random(seed)
    name, sequence = rng.choice(MODELS)
    size = rng.choice(BATCHES)
    batch = Batch(size, rng.choice([m for m in (1, 2, 4) if size % m == 0]), sequence)
    return named(name), batch, draw_site(rng, MAX_GPUS)


def draw_site(rng: random.Random, max_gpus: int) -> Site:
    """Return a site of 2 to 5 fabrics and at most `max_gpus` GPUs."""
    kinds, pools = rng.sample(GPUS, rng.randint(1, 3)), list[Pool]()
    ethernet_gbps = rng.choice((1.0, 10.0, 25.0, 100.0))
    for i in range(rng.randint(2, 5)):
        nic = rng.choice((NicType.IB, NicType.ROCE, NicType.IB, NicType.ROCE, NicType.ETHERNET))
        for j in range(rng.choice((1, 1, 1, 2, 3))):
            rdma_gbps = rng.choice((100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0)) if nic.rdma else None
            gpus = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8))
            nodes = min(rng.choice((1, 2, 3, 4, 5, 7, 8, 11, 13, 16)), (max_gpus - sum(p.gpus for p in pools)) // gpus)
            if nodes:
                pool = Pool(
                    *(f"f{i}-{j}", nic, f"p{i}-{j}", nodes, gpus, ethernet_gbps),
                    gpu=rng.choice(kinds),
                    rdma_gbps=rdma_gbps,
                    fabric=f"f{i}",
                )
                pools.append(pool)
    return Site("drawn", tuple(pools), links=tuple(_draw_links(rng, pools)))


def _draw_links(rng: random.Random, pools: list[Pool]) -> Iterable[FabricLink]:
    """Yield links between some pairs of fabrics, with delays, total rates or both."""
    for pair in combinations(dict.fromkeys(pool.fabric_name for pool in pools), 2):
        if rng.random() < 0.4:
            delay_ms, total_gbps = rng.choice((0.0, 0.5, 2.0, 10.0, 40.0)), rng.choice((None, 10.0, 40.0, 100.0, 400.0))
            if delay_ms or total_gbps:
                yield FabricLink(pair, delay_ms=delay_ms, total_gbps=total_gbps)


def told_subsets(seed: int, site: Site) -> list[tuple[str, Site, Mapping[str, int] | None]]:
    """Return the told subsets, each as (text, site, `plan.nodes`): each fabric, each pair, and random sets of nodes."""
    rng, fabrics = random.Random(-1 - seed), list(site.fabrics.values())
    told: list[tuple[str, Site, Mapping[str, int] | None]] = []
    for choice in [*((f,) for f in fabrics), *combinations(fabrics, 2)]:
        pools, names = tuple(p for fabric in choice for p in fabric), {fabric[0].fabric_name for fabric in choice}
        links = tuple(link for link in site.links if names >= set(link.between))
        told.append(("fabrics " + ", ".join(sorted(names)), replace(site, pools=pools, links=links), None))
    for _ in range(RANDOM_SUBSETS):
        nodes = {p.name: rng.randint(1, p.nodes) for p in rng.sample(site.pools, rng.randint(1, len(site.pools)))}
        told.append((f"nodes {nodes}", site, nodes))
    return told


def improved(seed: int, site: Site) -> tuple[str, Site]:
    """Return an improvement drawn from the seed, as text, and the site with it."""
    rng = random.Random(f"improved {seed}")
    pools = list(site.pools)
    index = rng.randrange(len(pools))
    pool = pools[index]
    changes: dict[str, dict[str, Any]] = {
        "a node more": {"nodes": pool.nodes + 1},
        "twice as many nodes": {"nodes": 2 * pool.nodes},
        "twice the memory": {"gpu": replace(pool.gpu, memory_gib=2 * pool.gpu.memory_gib)},
        "twice the Ethernet": {"ethernet_gbps": 2 * pool.ethernet_gbps},
    }
    if pool.rdma_gbps:
        changes["twice the RDMA rate"] = {"rdma_gbps": 2 * pool.rdma_gbps}
    if site.links:
        changes["no delays"] = {}
    name = rng.choice(list(changes))
    pools[index] = replace(pool, **changes[name])
    links = site.links
    if name == "no delays":
        links = tuple(replace(link, delay_ms=0.0) for link in links if link.total_gbps)
    return f"{pool.name}: {name}" if changes[name] else name, replace(site, pools=tuple(pools), links=links)


def planned(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions) -> tuple[float | None, str]:
    """Return the step time of the best plan in seconds, None if no plan exists, and the plan as text."""
    try:
        plan = best_plan(model, batch, site, options, Costs())
    except PlanError:
        return None, "none"
    assert plan.predicted is not None
    nodes = "+".join(f"{c.nodes} {c.pool}" for c in plan.components)
    return plan.predicted.step_time_s, f"{plan.strategy} {plan.parallel} on {nodes}"


def compute_s(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions) -> float:
    """Return a lower bound of a step in seconds: all GPUs of the site compute all the time, each at its best speed."""
    site = searched_site(site, options)
    problem, available = Problem(model, batch, site, options, Costs()), available_pools(site, options)
    estimators = [_ShapeEstimator(problem, available, m, "none", inf) for m in micro_sizes(batch, options)]
    return min((e._least_s(range(len(available))) for e in estimators if e.costs_by_tp), default=0.0)


def measure(seed: int, options: PlanOptions = PlanOptions()) -> dict[str, Any]:
    """Plan one site freely and on each told subset; return its row."""
    model, batch, site = draw_problem(seed)
    free_s, free = planned(model, batch, site, options)
    told_s, excluded = list[tuple[float, str]](), 0
    for name, part, nodes in told_subsets(seed, site):
        told = replace(options, nodes=nodes)
        if free_s is not None and compute_s(model, batch, part, told) > free_s:
            excluded += 1
            continue
        seconds, plan = planned(model, batch, part, told)
        if seconds is not None:
            told_s.append((seconds, f"{name}: {plan}"))
    best_s, best = min(told_s, default=(None, "none"))
    change, better_site = improved(seed, site)
    better_s, better = planned(model, batch, better_site, options)
    return {
        "seed": seed,
        "model": model.name,
        "batch": batch.global_size,
        "gpus": sum(p.gpus for p in site.pools),
        "pools": [f"{p.name} {p.nodes} x {p.gpus_per_node} {p.gpu.name} {p.nic} {p.data_gbps:g}" for p in site.pools],
        "free_s": free_s,
        "free": free,
        "told": len(told_s),
        "excluded": excluded,
        "best_told_s": best_s,
        "best_told": best,
        "regret": _slowdown(free_s, best_s),
        "change": change,
        "better_s": better_s,
        "better": better,
        "loss": _slowdown(better_s, free_s),
    }


def _slowdown(seconds: float | None, other_s: float | None) -> float:
    """Return by how much `seconds` exceeds `other_s`, as a share; 0 if it does not. None stands for no plan."""
    return 0.0 if other_s is None else float("inf") if seconds is None else max(0.0, seconds / other_s - 1)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of benchmarks/results/planner.md: by number of fabrics, and in total."""
    lines = [
        "| fabrics | sites | told plans, excluded | mean regret | worst | over 0.5% | improved: worst, over 0.5% |",
        "|" + "---|" * 7,
    ]
    counts = [len({p.split("-")[0] for p in row["pools"]}) for row in rows]
    for count in (*sorted(set(counts)), None):
        selected = [row for row, n in zip(rows, counts, strict=True) if count in (None, n)]
        regrets, losses = ([row[key] for row in selected] for key in ("regret", "loss"))
        lines.append(
            f"| {count or 'all'} | {len(selected)} | {sum(row['told'] for row in selected)},"
            f" {sum(row['excluded'] for row in selected)} |"
            f" {sum(regrets) / len(regrets):.2%} | {max(regrets):.1%} | {sum(r > 0.005 for r in regrets)} |"
            f" {max(losses):.1%}, {sum(loss > 0.005 for loss in losses)} |"
        )
    return lines


def resume(out: Path, seeds: Iterable[int], measure: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all rows of `out`, a JSON line each; measure and append the missing ones of `seeds`."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for seed in seeds:
        if any(row["seed"] == seed for row in rows):
            continue
        rows.append(measure(seed))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sites", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--unequal", default="auto", choices=("auto", "false"), help="plan.unequal of all plans")
    arguments = parser.parse_args()

    def measure_and_print(seed: int) -> dict[str, Any]:
        row = measure(seed, PlanOptions(unequal=arguments.unequal))
        print(
            f"{seed:4} {row['model']:11} {row['gpus']:3} GPUs, batch {row['batch']}: {row['free_s'] or 0:8.3f} s"
            f", regret {row['regret']:6.2%} against {row['told']} ({row['best_told']}),"
            f" {row['excluded']} excluded by their compute;"
            f" {row['loss']:.2%} with {row['change']}",
            flush=True,
        )
        return row

    rows = resume(arguments.out, range(arguments.seed, arguments.seed + arguments.sites), measure_and_print)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
