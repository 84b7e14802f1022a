"""The planner's free choice against the same search told what to take: one fabric, or TP, PP and DP.

    python benchmarks/planner_regret.py OUT.jsonl [--sites 200] [--told 5] [--seed 0]

Sites drawn from a seed: 2 to 4 fabrics of 4 to 32 nodes, Ethernet of 1 to 100 Gb/s between them, one or two kinds of
GPU; models of 3.6B to 175B parameters. Regret is how much slower the free choice is than the best told one, by the
planner's own predictor: 0 where it is as fast or faster. One line a site is added to OUT.jsonl, and sites that are
there are not planned again. The first ten sites are told twenty times as many combinations.
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
from holmes_hpc.fabric.site import Fabric, Gpu, NicType, Site
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
THOROUGH, MORE = 10, 20  # sites that are told more combinations, and how many times as many
DRAWS = 400  # combinations drawn at most until enough have a plan


def drawn(seed: int) -> tuple[ModelSpec, Batch, Site]:
    """The model, batch and site of a seed."""
    dice = random.Random(seed)
    model, size, sequence = dice.choice(MODELS)
    kinds = dice.choice(((A100,), (H100,), (A100, H100)))
    ethernet = dice.choice(ETHERNET_GBPS)
    fabrics = []
    for i in range(dice.randint(2, 4)):
        nic = dice.choice((NicType.IB, NicType.ROCE, NicType.IB, NicType.ROCE, NicType.ETHERNET))
        fabrics.append(
            Fabric(
                f"{nic}-{i}",
                nic,
                f"p{i}",
                dice.choice((4, 5, 6, 8, 12, 16, 24, 32)),
                8,
                ethernet,
                dice.choice(kinds),
                rdma_gbps=dice.choice(RDMA_GBPS) if nic.rdma else None,
            )
        )
    return named(model), Batch(size, dice.choice((1, 2, 4)), sequence), Site(f"site-{seed}", tuple(fabrics))


def combinations(seed: int, model: ModelSpec, batch: Batch, site: Site) -> list[tuple[int, int, int]]:
    """(TP, PP, DP) of this site in an order drawn from the seed: TP and DP that divide, as many GPUs as there are."""
    gpus = sum(f.gpus for f in site.fabrics)
    tensor = [t for t in (1, 2, 4, 8) if model.heads % t == 0 and model.kv_heads % t == 0]
    every = [
        (tp, pp, dp)
        for tp in tensor
        for dp in divisors(batch.global_size // batch.micro_size)
        for pp in range(1, model.layers + 1)
        if gpus // 8 <= tp * pp * dp <= gpus
    ]
    return random.Random(seed).sample(every, len(every))


def seconds(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions) -> float | None:
    """Of the step of the best plan; None where there is none."""
    try:
        return search(model, batch, site, options, Costs(), Clock())[0].seconds
    except PlanError:
        return None


def measured(seed: int, told: int, draws: int = DRAWS) -> dict[str, Any]:
    """One site: what the search finds freely, told one fabric, and told `told` combinations of TP, PP and DP."""
    model, batch, site = drawn(seed)
    began = time.process_time()
    free = seconds(model, batch, site, PlanOptions())
    used = time.process_time() - began
    others: dict[str, float] = {}
    if (one := seconds(model, batch, site, PlanOptions(strategy="one-fabric"))) is not None:
        others["one-fabric"] = one
    for tp, pp, dp in combinations(seed, model, batch, site)[:draws]:
        if len(others) > told:
            break
        if (found := seconds(model, batch, site, PlanOptions(tp=tp, pp=pp, dp=dp))) is not None:
            others[f"TP{tp} PP{pp} DP{dp}"] = found
    best = min(others, key=lambda name: others[name], default=None)
    regret = 0.0 if best is None else float("inf") if free is None else max(0.0, free / others[best] - 1)
    return {
        "seed": seed,
        "model": model.name,
        "ethernet_gbps": site.fabrics[0].ethernet_gbps,
        "fabrics": [f"{f.nodes} x {f.gpus_per_node} {f.gpu.name} {f.nic} {f.data_gbps:g}" for f in site.fabrics],
        "free_s": free,
        "told": len(others),
        "best_told": best,
        "best_told_s": others[best] if best else None,
        "regret": regret,
        "search_cpu_s": used,
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The table for benchmarks/results/planner.md: by rate of Ethernet, and all."""
    lines = ["| Ethernet, Gb/s | sites | told plans | mean regret | worst | sites over 0.5% |", "|" + "---|" * 6]
    for rate in (*ETHERNET_GBPS, None):
        some = [r for r in rows if rate in (None, r["ethernet_gbps"])]
        if some:
            regrets = [r["regret"] for r in some]
            lines.append(
                f"| {'all' if rate is None else f'{rate:g}'} | {len(some)} | {sum(r['told'] for r in some)} |"
                f" {sum(regrets) / len(regrets):.2%} | {max(regrets):.1%} |"
                f" {sum(x > 0.005 for x in regrets)} |"
            )
    return lines


def resumed(out: Path, seeds: Iterable[int], measured: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows of `out`, a line each, to which those of `seeds` that it lacks are added as they are measured."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for seed in seeds:
        if any(row["seed"] == seed for row in rows):
            continue
        rows.append(measured(seed))
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--told", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    arguments = parser.parse_args()

    def of(seed: int) -> dict[str, Any]:
        r = measured(seed, arguments.told * (MORE if seed < THOROUGH else 1))
        print(
            f"{seed:4} {r['model']:11} {r['ethernet_gbps']:5g} Gb/s, {len(r['fabrics'])} fabrics:"
            f" {r['free_s'] or float('nan'):8.3f} s in {r['search_cpu_s']:5.1f} s, regret {r['regret']:6.2%}"
            f" against {r['told']} ({r['best_told']})",
            flush=True,
        )
        return r

    rows = resumed(arguments.out, range(arguments.seed, arguments.seed + arguments.sites), of)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
