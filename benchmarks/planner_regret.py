"""Compare the planner's free choice with user-fixed plans: one fabric, or fixed TP, PP and DP.

    python benchmarks/planner_regret.py OUT.jsonl [--sites 200] [--told 5] [--seed 0]

Sites are drawn from seeds: 2 to 4 fabrics of 4 to 32 nodes, Ethernet of 1 to 100 Gb/s between them, one or two kinds
of GPU. Models have 3.6B to 175B parameters. Regret is the slowdown of the free choice against the best user-fixed plan,
by the planner's own predictor; it is 0 if the free choice is as fast or faster. Each site adds a line to OUT.jsonl;
sites already in it are skipped. The first ten sites have twenty times as many user-fixed plans.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.search.best import search
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.problem import divisors

A100 = Gpu("a100-80gb", 312, 80, 2400)
H100 = Gpu("h100-80gb", 989, 80, 3600)
RDMA_GBPS = (100.0, 200.0, 400.0, 800.0, 1600.0)
ETHERNET_GBPS = (1.0, 2.5, 10.0, 25.0, 100.0)
MODELS = (
    ("gpt_3_6b", 768, 2048),
    ("gpt_7_5b", 1536, 2048),
    ("llama2_7b", 1024, 4096),
    ("llama3_8b", 512, 8192),
    ("gpt_39b", 1536, 2048),
    ("llama2_70b", 1024, 4096),
    ("gpt3_175b", 1536, 2048),
)
THOROUGH_SITES, PLANS_FACTOR = 10, 20  # the first sites have that many times as many user-fixed plans
DRAWS = 400  # most combinations of TP, PP and DP to try per site


def draw_problem(seed: int) -> tuple[ModelSpec, Batch, Site]:
    """Return the model, batch and site of a seed."""
    rng = random.Random(seed)
    model, size, sequence = rng.choice(MODELS)
    kinds = rng.choice(((A100,), (H100,), (A100, H100)))
    ethernet_gbps = rng.choice(ETHERNET_GBPS)
    fabrics = []
    for i in range(rng.randint(2, 4)):
        nic = rng.choice((NicType.IB, NicType.ROCE, NicType.IB, NicType.ROCE, NicType.ETHERNET))
        fabrics.append(
            Pool(
                f"{nic}-{i}",
                nic,
                f"p{i}",
                rng.choice((4, 5, 6, 8, 12, 16, 24, 32)),
                8,
                ethernet_gbps,
                rng.choice(kinds),
                rdma_gbps=rng.choice(RDMA_GBPS) if nic.rdma else None,
            )
        )
    return named(model), Batch(size, rng.choice((1, 2, 4)), sequence), Site(f"site-{seed}", tuple(fabrics))


def combinations(seed: int, model: ModelSpec, batch: Batch, site: Site) -> list[tuple[int, int, int]]:
    """Return the (TP, PP, DP) that fit the model, batch and GPUs of a site, in an order drawn from the seed."""
    gpus = sum(f.gpus for f in site.pools)
    tensor = [t for t in (1, 2, 4, 8) if model.heads % t == 0 and model.kv_heads % t == 0]
    all_combinations = [
        (tp, pp, dp)
        for tp in tensor
        for dp in divisors(batch.global_size // batch.micro_size)
        for pp in range(1, model.layers + 1)
        if gpus // 8 <= tp * pp * dp <= gpus
    ]
    return random.Random(seed).sample(all_combinations, len(all_combinations))


def seconds(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions) -> float | None:
    """Return the step time of the best plan in seconds, None if no plan exists."""
    try:
        return search(model, batch, site, options, Costs(), Clock())[0].seconds
    except PlanError:
        return None


def measure(seed: int, fixed: int, draws: int = DRAWS) -> dict[str, Any]:
    """Plan one site freely, on one fabric, and for up to `fixed` combinations of TP, PP and DP; return its row."""
    model, batch, site = draw_problem(seed)
    start = time.process_time()
    free_s = seconds(model, batch, site, PlanOptions())
    cpu_s = time.process_time() - start
    fixed_s: dict[str, float] = {}
    if (one_fabric_s := seconds(model, batch, site, PlanOptions(strategy="one-fabric"))) is not None:
        fixed_s["one-fabric"] = one_fabric_s
    for tp, pp, dp in combinations(seed, model, batch, site)[:draws]:
        if len(fixed_s) > fixed:
            break
        if (plan_s := seconds(model, batch, site, PlanOptions(tp=tp, pp=pp, dp=dp))) is not None:
            fixed_s[f"TP{tp} PP{pp} DP{dp}"] = plan_s
    best = min(fixed_s, key=lambda name: fixed_s[name], default=None)
    regret = 0.0 if best is None else float("inf") if free_s is None else max(0.0, free_s / fixed_s[best] - 1)
    return {
        "seed": seed,
        "model": model.name,
        "ethernet_gbps": site.pools[0].ethernet_gbps,
        "fabrics": [f"{f.nodes} x {f.gpus_per_node} {f.gpu.name} {f.nic} {f.data_gbps:g}" for f in site.pools],
        "free_s": free_s,
        "told": len(fixed_s),
        "best_told": best,
        "best_told_s": fixed_s[best] if best else None,
        "regret": regret,
        "search_cpu_s": cpu_s,
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of benchmarks/results/planner.md: by Ethernet rate, and in total."""
    lines = ["| Ethernet, Gb/s | sites | user-fixed plans | mean regret | worst | sites over 0.5% |", "|" + "---|" * 6]
    for rate in (*ETHERNET_GBPS, None):
        selected = [r for r in rows if rate in (None, r["ethernet_gbps"])]
        if selected:
            regrets = [r["regret"] for r in selected]
            lines.append(
                f"| {'all' if rate is None else f'{rate:g}'} | {len(selected)} | {sum(r['told'] for r in selected)} |"
                f" {sum(regrets) / len(regrets):.2%} | {max(regrets):.1%} |"
                f" {sum(x > 0.005 for x in regrets)} |"
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
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--told", type=int, default=5, help="user-fixed plans per site")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()

    def measure_and_print(seed: int) -> dict[str, Any]:
        row = measure(seed, arguments.told * (PLANS_FACTOR if seed < THOROUGH_SITES else 1))
        print(
            f"{seed:4} {row['model']:11} {row['ethernet_gbps']:5g} Gb/s, {len(row['fabrics'])} fabrics:"
            f" {row['free_s'] or float('nan'):8.3f} s in {row['search_cpu_s']:5.1f} s, regret {row['regret']:6.2%}"
            f" against {row['told']} ({row['best_told']})",
            flush=True,
        )
        return row

    rows = resume(arguments.out, range(arguments.seed, arguments.seed + arguments.sites), measure_and_print)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
