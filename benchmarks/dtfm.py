"""Compare the planner's placements by DT-FM's cost (Yuan et al., NeurIPS 2022, arXiv 2206.01288), on DT-FM's scenarios.

    python benchmarks/dtfm.py [--tries 5]

64 GPUs train GPT-3 XL with PP 8 and DP 8. Delays, rates and sizes of messages are those of the published program's
scenarios 0 to 4 (github.com/DS3Lab/DT-FM, scheduler/heuristic_evolutionary_solver/config.py). DT-FM's cost is the
time of a step's messages in sequence. It has two terms: the gradients of the slowest rank of the slowest stage, over
all pairs of its data-parallel group; and twice a batch's activations over each edge, for its slowest pipeline. A site
file has no delay within a region, but the cost includes it. The table also shows the predicted step time.

DT-FM's own search is not run. `searched cost` is the least cost of a local search in this file, which swaps pairs of
GPUs while that lowers the cost, from random and from regular placements.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import FabricLink, Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.planning.search.best import best_plan

PP, DP = 8, 8
V100 = Gpu("v100-16gb", 125, 16, 1200)
XL = ModelSpec(
    "gpt3_xl",
    24,
    2048,
    16,
    50257,
    ffn=8192,
    kv_heads=16,
    swiglu=False,
    rmsnorm=False,
    rope=False,
    bias=True,
    max_positions=2048,
)
SEQUENCE_BYTES = 2048 * 2048 * 2  # activations of a sequence in half precision
CITIES = ("oregon", "virginia", "ohio", "tokyo", "seoul", "london", "frankfurt", "ireland")
# (one-way delay in ms, Gb/s) of pairs of CITIES: a row per city, with the cities after it
WORLD = (
    ((67, 0.79), (49, 1.10), (96, 0.523), (124, 0.46), (136, 0.42), (143, 0.404), (124, 0.482)),
    ((11, 1.12), (143, 0.524), (172, 0.500), (76, 1.16), (90, 1.02), (67, 1.05)),
    ((130, 0.694), (159, 0.529), (86, 1.05), (99, 0.799), (77, 1.14)),
    ((34, 1.10), (210, 0.366), (223, 0.36), (199, 0.465)),
    ((238, 0.342), (235, 0.358), (228, 0.335)),
    ((14, 1.14), (12, 1.09)),
    ((24, 1.08),),
)


@dataclass(frozen=True)
class Scenario:
    """A site of 64 GPUs, its network and its message sizes.

    `place`: (fabric, node) of each GPU; `delay_s`, `gbps`: between any two GPUs, (64, 64); `activations`: gigabytes a
    pipeline sends over an edge per step; `gradients`: gigabytes a rank reduces per step."""

    name: str
    site: Site
    place: tuple[tuple[str, int], ...]
    delay_s: np.ndarray
    gbps: np.ndarray
    activations: float
    gradients: float

    def cost(self, grid: np.ndarray) -> float:
        """Return DT-FM's cost in seconds; `grid`: the GPU of each stage and pipeline, (PP, DP)."""
        send = self.delay_s + self.gradients * 8 / self.gbps / DP
        pairs = grid[:, :, None], grid[:, None, :]
        reducing = 2 * (send[pairs] * (1 - np.eye(DP))).sum(axis=2).max()
        edge = (self.delay_s + self.activations * 8 / self.gbps)[grid[:-1], grid[1:]]
        return float(reducing + 2 * edge.max(axis=1).sum())

    @property
    def batch(self) -> Batch:
        return Batch(DP * round(self.activations * 2**30 / SEQUENCE_BYTES), 1, 2048)

    def grid(self, plan: Plan) -> np.ndarray:
        """Return the GPU of each stage and pipeline of a plan, (PP, DP)."""
        gpus_at = {place: [i for i, p in enumerate(self.place) if p == place] for place in set(self.place)}
        gpus = [gpus_at[c.pool, n][g] for c in plan.components for n in range(c.nodes) for g in range(c.gpus_per_node)]
        return np.array(gpus)[np.stack(plan.parallel.grid())[:, :, 0]]


def build_scenario(
    name: str,
    fabrics: list[Pool],
    activations: float,
    gradients: float,
    within: tuple[float, float],
    between_fabrics: dict[tuple[str, str], tuple[float, float]] | None = None,
    node_gbps: float = 100.0,
) -> Scenario:
    """Build a scenario; `within`: (ms, Gb/s) between two nodes of one fabric, `between_fabrics`: of two fabrics."""
    place = tuple((f.name, n) for f in fabrics for n in range(f.nodes) for _ in range(f.gpus_per_node))
    rates = {frozenset(pair): value for pair, value in (between_fabrics or {}).items()}
    pairs = np.array(
        [
            [
                (0.0, node_gbps) if a == b else within if a[0] == b[0] or not rates else rates[frozenset((a[0], b[0]))]
                for b in place
            ]
            for a in place
        ]
    )
    links = tuple(
        FabricLink(pair, gbps=rate, delay_ms=max(0.0, ms - within[0]))
        for pair, (ms, rate) in (between_fabrics or {}).items()
    )
    return Scenario(
        name,
        Site(name, tuple(fabrics), links=links),
        place,
        pairs[:, :, 0] / 1e3,
        pairs[:, :, 1],
        activations,
        gradients,
    )


def ethernet(name: str, nodes: int, gbps: float, gpus: int = 1) -> Pool:
    return Pool(name, NicType.ETHERNET, name, nodes, gpus, gbps, V100)


def scenarios() -> list[Scenario]:
    four = ("virginia", "oregon", "california", "ohio")
    region = {
        ("virginia", "oregon"): (67, 1.15),
        ("virginia", "california"): (59, 1.05),
        ("virginia", "ohio"): (11, 1.12),
        ("oregon", "california"): (12, 1.25),
        ("oregon", "ohio"): (49, 1.10),
        ("california", "ohio"): (52, 1.02),
    }
    world = {(CITIES[i], CITIES[i + 1 + j]): pair for i, row in enumerate(WORLD) for j, pair in enumerate(row)}
    return [
        build_scenario("0 datacenter", [ethernet("dc", 8, 8 * 3.125, 8)], 288 / 1024, 1, (0, 3.125)),
        build_scenario(
            "1 spot", [ethernet("spot", 8, 4 * 1.25, 4), ethernet("single", 32, 1.25)], 288 / 1024, 1, (0, 1.25)
        ),
        build_scenario(
            "2 universities",
            [ethernet("ohio", 32, 5), ethernet("virginia", 32, 5)],
            288 / 1024,
            1,
            (1, 5),
            {("ohio", "virginia"): (11, 1.12)},
        ),
        build_scenario("3 regions", [ethernet(n, 16, 2) for n in four], 0.4, 0.7, (5, 2), region),
        build_scenario("4 world", [ethernet(n, 8, 2) for n in CITIES], 0.5, 0.9, (5, 2), world),
    ]


def least_cost(scenario: Scenario, tries: int) -> float:
    """Return the least cost of a local search that swaps two GPUs at a time."""
    rng, least = random.Random(0), np.inf
    regular = np.arange(PP * DP).reshape(PP, DP)
    for attempt in range(tries + 2):
        grid = (
            [regular, regular.T][attempt].copy()
            if attempt < 2
            else np.array(rng.sample(range(PP * DP), PP * DP)).reshape(PP, DP)
        )
        cost, is_improving = scenario.cost(grid), True
        while is_improving:
            is_improving = False
            for a in range(PP * DP):
                for b in range(a):
                    if scenario.place[grid.flat[a]] == scenario.place[grid.flat[b]]:
                        continue
                    grid.flat[a], grid.flat[b] = grid.flat[b], grid.flat[a]
                    if (new_cost := scenario.cost(grid)) < cost - 1e-9:
                        cost, is_improving = new_cost, True
                    else:
                        grid.flat[a], grid.flat[b] = grid.flat[b], grid.flat[a]
        least = min(least, cost)
    return float(least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=5, help="random placements to search from")
    arguments = parser.parse_args()
    print("| scenario | free choice: cost, step | pipeline across | hierarchical | searched cost |")
    print("|" + "---|" * 5)
    for scenario in scenarios():
        cells = [scenario.name]
        for strategy in ("auto", "pipeline", "hierarchical-dp"):
            if strategy == "pipeline" and len(scenario.site.pools) == 1:
                cells.append("–")
                continue
            try:
                plan = best_plan(
                    XL, scenario.batch, scenario.site, PlanOptions(tp=1, pp=PP, dp=DP, strategy=strategy), Costs()
                )
            except PlanError as e:
                cells.append(f"none: {e.what}")
                continue
            assert plan.predicted is not None
            cells.append(
                f"{scenario.cost(scenario.grid(plan)):.2f}, {plan.predicted.step_time_s:.2f} s"
                + (f" ({plan.strategy})" if strategy == "auto" else "")
            )
        print("| " + " | ".join([*cells, f"{least_cost(scenario, arguments.tries):.2f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
