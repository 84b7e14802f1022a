"""The free search is as good as the same search with user-fixed choices, on sites of realistic sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import inf

import planner_regret
import pytest
from sites import A100, H100

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.models import named
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.search.best import search
from holmes_hpc.planning.search.candidate import Evaluator
from holmes_hpc.planning.search.explore import MAX_OVERESTIMATE, Clock
from holmes_hpc.planning.search.micro_batch_shares import best_shared_steps
from holmes_hpc.planning.search.pool_costs import PoolCosts
from holmes_hpc.planning.search.problem import Problem, available_pools
from holmes_hpc.planning.search.space import Space
from holmes_hpc.planning.search.stage_lists import (
    Stage,
    Stages,
    in_best_orders,
    neighbours,
    other_pools,
    pools_of,
    taking_turns,
)
from holmes_hpc.planning.search.stage_shapes import _ShapeEstimator, best_shapes

pytestmark = pytest.mark.integration


def step_s(model: str, batch: Batch, site: Site, **options: object) -> float:
    problem = Problem(named(model), batch, site, PlanOptions(**options), Costs())  # type: ignore[arg-type]
    return search(problem, Clock())[0].seconds


def make_site(ethernet_gbps: float, *fabrics: tuple[str, int, float | None, Gpu]) -> Site:
    """Return a site of fabrics, each given as (NIC type, nodes of 8 GPUs, RDMA rate, GPU)."""
    return Site(
        "site",
        tuple(
            Pool(f"{nic}-{i}", NicType(nic), f"p{i}", nodes, 8, ethernet_gbps, gpu, rdma_gbps=gbps)
            for i, (nic, nodes, gbps, gpu) in enumerate(fabrics)
        ),
    )


THREE_FABRICS = (
    named("gpt_7_5b"),
    Batch(1536, 2, 2048),
    make_site(25, ("roce", 8, 800.0, A100), ("roce", 32, 800.0, A100), ("ib", 8, 100.0, A100)),
)
FOUR_FABRICS = (
    named("llama3_8b"),
    Batch(512, 2, 8192),
    make_site(
        100, ("ib", 6, 100.0, H100), ("ib", 32, 800.0, H100), ("ethernet", 8, None, H100), ("ethernet", 6, None, H100)
    ),
)


def draw_small(seed: int) -> tuple[ModelSpec, Batch, Site]:
    """Return a small model, its batch and a site of up to 32 GPUs, of all kinds of the benchmark."""
    rng = random.Random(seed)
    site, hidden = planner_regret.draw_site(rng, max_gpus=32), rng.choice((1024, 4096))
    model = ModelSpec("small", rng.choice((6, 8, 12)), hidden, 16, 32000, 4 * hidden, 16, max_positions=4096)
    return model, Batch(rng.choice((12, 17, 24, 31)), 1, 2048), site


@pytest.mark.parametrize("seed", [3, 8])
def test_no_told_subset_is_half_a_percent_faster(seed: int) -> None:
    """With seed 3, a fabric alone was 1.4% faster: only the best candidate was tried with Megatron-Core's schedule.
    The benchmark leaves subsets out by a lower bound of their steps."""
    model, batch, site = draw_small(seed)
    free_s, _ = planner_regret.planned(model, batch, site, PlanOptions(unequal="false"))
    for name, part, nodes in planner_regret.told_subsets(seed, site):
        options = PlanOptions(nodes=nodes, unequal="false")
        told_s, plan = planner_regret.planned(model, batch, part, options)
        assert told_s is None or planner_regret.compute_s(model, batch, part, options) < told_s
        assert told_s is None or (free_s is not None and free_s <= 1.005 * told_s), (name, plan)


@pytest.mark.thorough
def test_all_node_counts_of_a_pool_are_listed_on_a_site_of_many() -> None:
    """The best plan has 25 stages of one or two layers on one of ten pools; 20 stages of two take 1.9% longer."""
    model, batch, site = planner_regret.draw_problem(22)
    (alone,) = (part for name, part, _ in planner_regret.told_subsets(22, site) if name == "fabrics f3")
    free_s, told_s = (planner_regret.planned(model, batch, s, PlanOptions(unequal="false"))[0] for s in (site, alone))
    assert free_s is not None and told_s is not None and free_s <= 1.005 * told_s


def test_per_stage_shapes_of_two_fabrics_are_among_those_of_many() -> None:
    """Otherwise, the free choice takes 10% longer than a plan that is told to use two of the five fabrics."""
    model, batch, site = planner_regret.draw_problem(18)

    def least_s(part: Site) -> float:
        problem = Problem(model, batch, part, PlanOptions(recompute="none"), Costs())
        return min(shape.estimate for shape in best_shapes(problem))

    told = {name: part for name, part, _ in planner_regret.told_subsets(18, site)}
    assert least_s(site) <= 1.005 * least_s(told["fabrics f1, f2"])


@pytest.mark.parametrize(("micro_size", "fits"), [(16, True), (32, False)])
def test_estimates_of_shapes_count_the_memory_of_passes_in_flight(micro_size: int, fits: bool) -> None:
    """The first of eight stages holds eight passes. The layers with one pass fit in both cases."""
    site, options = make_site(25, ("ib", 8, 200.0, A100)), PlanOptions()
    problem = Problem(named("llama2_70b"), Batch(256, micro_size, 2048), site, options, Costs())
    estimator = _ShapeEstimator(problem, available_pools(site, options), micro_size, "none", inf)
    assert (estimator.estimates([((0, 1, 8),) * 8])[0] < inf) == fits


def test_estimates_of_shapes_use_the_fast_network_between_pools_of_a_fabric() -> None:
    site = make_site(25, ("ib", 8, 800.0, A100), ("ib", 4, 400.0, H100), ("roce", 4, 800.0, A100))
    first, second, other = site.pools
    site = Site("site", (replace(first, fabric="f"), replace(second, fabric="f"), other))
    problem = Problem(named("llama2_70b"), Batch(256, 1, 2048), site, PlanOptions(), Costs())
    available = available_pools(site, PlanOptions())
    estimator = _ShapeEstimator(problem, available, 1, "none", inf)
    assert estimator._transfers_s(0, 0, 1) < estimator._transfers_s(0, 1, 1) < 0.1 * estimator._transfers_s(0, 2, 1)
    inside, between = PoolCosts(problem, 1, 8, available).transfers_s(1)
    assert inside[0] < between[0, 1] < 0.1 * between[0, 2]


def test_of_shapes_that_keep_a_nic_equally_busy_the_faster_one_comes_first() -> None:
    """Otherwise their order would be arbitrary, and only the first few are simulated."""
    site = make_site(25, ("ethernet", 8, None, H100))
    problem = Problem(named("gpt_3_6b"), Batch(512, 1, 2048), site, PlanOptions(), Costs())
    estimator = _ShapeEstimator(problem, available_pools(site, PlanOptions()), 1, "none", inf)
    slow, fast = (estimator.estimates([((0, 1, 1),) * stages])[0] for stages in (3, 6))
    assert slow * 0.99 < fast < slow


def test_numbers_of_stages_take_turns() -> None:
    assert taking_turns(["a", "b", "cc", "d", "ee", "fff"], len) == ["a", "cc", "fff", "b", "ee", "d"]


def test_pools_move_while_the_estimate_gets_shorter() -> None:
    lists: list[list[Stage]] = [[(0, 2, 1), (0, 1, 1), (1, 4, 2), (2, 1, 1), (3, 3, 1)], [(0, 1, 1), (1, 1, 1)]]
    calls = list[int]()

    def inversions(orders: Sequence[Stages]) -> list[float]:
        """Count the pairs of pools in ascending order."""
        calls.append(len(orders))
        pools = [list(dict.fromkeys(pool for pool, *_ in stages)) for stages in orders]
        return [sum(a < b for a, b in combinations(order, 2)) for order in pools]

    first, second, again = in_best_orders([*lists, lists[0]], inversions)
    assert first == again == ((3, 3, 1), (2, 1, 1), (1, 4, 2), (0, 2, 1), (0, 1, 1))  # a pool's stages stay in order
    assert second == ((1, 1, 1), (0, 1, 1))
    assert len(calls) == 6  # three moves and a last try for the first list, one move and a last try for the second


def test_the_best_order_of_pools_has_a_shorter_estimate_than_the_order_of_the_site() -> None:
    """On this site, the order of the site file once made the plan of a better site 3.9% slower."""
    model, batch, site = planner_regret.draw_problem(58)
    problem = Problem(model, batch, site, PlanOptions(), Costs())
    estimator = _ShapeEstimator(problem, available_pools(site, PlanOptions()), 1, "none", 20.0)
    ordered_s, given_s = (
        min(shape.estimate for shape in estimator.shapes(orders_pools=orders) if len(pools_of(shape.stages)) >= 5)
        for orders in (True, False)
    )
    assert ordered_s < 0.98 * given_s


def test_neighbours_differ_by_a_node_a_tp_or_a_pool() -> None:
    stages, whole = ((0, 2, 2), (1, 4, 2)), [(0, 3, 2), (0, 3, 4), (1, 4, 2), (2, 5, 1)]
    near = {*neighbours(stages, whole)}
    assert {((0, 3, 2), (1, 4, 2)), ((0, 1, 2), (1, 4, 2)), ((0, 2, 4), (1, 4, 2))} <= near
    assert not any(nodes > 4 or (f, tp) not in {(g, t) for g, _, t in whole} for s in near for f, nodes, tp in s)
    others = {*other_pools(stages, whole)}
    assert {((1, 4, 2), (0, 2, 2)), ((0, 2, 2), (2, 1, 1), (1, 4, 2)), ((2, 5, 1), *stages), ((0, 2, 2),)} <= others


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "subset"),
    [(5, "fabrics f1, f2"), (11, "fabrics f0, f2"), (14, "fabrics f0, f1"), (33, "fabrics f2, f3"), (46, "fabrics f1")],
)
def test_per_stage_plans_of_parts_of_a_site_are_found(seed: int, subset: str) -> None:
    """They were 0.6, 6.7, 0.7, 9.1 and 0.6% faster: variants behind until they are refined (first and last), a pool
    less or more, a move that needs fewer passes in flight, and a pair of fabrics that computes more slowly than eight
    other choices of pools."""
    model, batch, site = planner_regret.draw_problem(seed)
    (part,) = (part for name, part, _ in planner_regret.told_subsets(seed, site) if name == subset)
    free_s, told_s = (planner_regret.planned(model, batch, s, PlanOptions())[0] for s in (site, part))
    assert free_s is not None and told_s is not None and free_s <= 1.001 * told_s


def test_steps_are_shared_among_some_pools_of_a_fabric() -> None:
    """A pool with a slow NIC would slow the gradients of all pools."""
    pools = tuple(
        Pool(name, NicType.IB, "p", 4, 8, 10.0, A100, rdma_gbps=gbps, fabric="f")
        for name, gbps in (("a", 800.0), ("b", 800.0), ("slow", 5.0))
    )
    problem = Problem(named("gpt_3_6b"), Batch(509, 1, 2048), Site("site", pools), PlanOptions(), Costs())
    shared = best_shared_steps(problem)
    assert shared is not None and {c.pool for c in shared.layout.components} == {"a", "b"}


@pytest.mark.thorough
def test_interleaving_is_chosen_for_gpt3_on_128_h100() -> None:
    model = ModelSpec("gpt3", 96, 12288, 96, 51200, 49152, 96, False, False, False, tied=True, bias=True)
    site = make_site(100, ("ib", 16, 3200.0, H100))
    for software in (Software(), Software(aligned_gather=True, overlap_tp=True)):
        options = PlanOptions(search_micro_size=True, unequal="false")
        found = search(Problem(model, Batch(256, 1, 2048), site, options, Costs(software=software)), Clock())
        near = [c.layout.parallel.virtual_stages for c in found if c.seconds < 1.005 * found[0].seconds]
        assert near[0] >= 5 and max(near) >= 6, near


def test_estimates_count_one_nic_per_node_not_per_stage() -> None:
    """The best plan, on one fabric, has two stages per node; only one edge of each node leaves it.

    If both stages counted the NIC, the search would choose a plan that is 17.7% slower.
    """
    site, batch = make_site(1, ("roce", 4, 200.0, H100), ("roce", 6, 100.0, H100)), Batch(512, 1, 8192)
    assert step_s("llama3_8b", batch, site) <= 1.005 * step_s("llama3_8b", batch, site, strategy="one-fabric")


@pytest.mark.thorough
def test_pruning_considers_front_loaded_layers() -> None:
    """The best plan over two fabrics has more layers in its first stages, which compute while others gather parameters.

    With balanced layers its estimate would be 16% too long, and it would be pruned.
    """
    site, batch = make_site(100, ("roce", 8, 800.0, H100), ("ethernet", 32, None, H100)), Batch(1536, 4, 2048)
    assert step_s("gpt_7_5b", batch, site) <= 1.005 * step_s("gpt_7_5b", batch, site, tp=4, pp=10, dp=8)


@pytest.mark.parametrize(
    ("ethernet_gbps", "model", "batch", "fabrics"),
    [
        (1, "gpt_3_6b", Batch(768, 4, 2048), (("ib", 4, 200.0, A100), ("roce", 4, 200.0, A100))),
        (2.5, "llama2_7b", Batch(1024, 1, 4096), (("ib", 8, 200.0, A100), ("roce", 8, 200.0, A100))),
        (
            10,
            "llama2_7b",
            Batch(1024, 1, 4096),
            (("ib", 12, 800.0, A100), ("roce", 8, 200.0, A100), ("ethernet", 5, None, H100)),
        ),
    ],
)
def test_slow_ethernet_is_avoided(
    ethernet_gbps: float, model: str, batch: Batch, fabrics: tuple[tuple[str, int, float | None, Gpu], ...]
) -> None:
    """A pipeline over slow Ethernet is up to 36 times slower than the best fabric alone."""
    site = make_site(ethernet_gbps, *fabrics)
    assert step_s(model, batch, site) <= 1.005 * step_s(model, batch, site, strategy="one-fabric")


@pytest.mark.thorough
def test_refinement_includes_candidates_that_are_behind() -> None:
    """The best plan, a pipeline over three fabrics, is 7% behind before its fabrics are ordered and then wins by 2%."""
    fabrics = [("ib", 6, 100.0, A100), ("ib", 6, 200.0, A100), ("ib", 16, 400.0, A100), ("ib", 24, 400.0, A100)]
    site, batch = make_site(100, *fabrics), Batch(1536, 1, 2048)
    fixed_s, free_s = (step_s("gpt_7_5b", batch, site, tp=1, search_micro_size=any_size) for any_size in (False, True))
    assert free_s <= fixed_s * (1 + 1e-9)


def test_the_candidate_with_the_lowest_bound_is_refined() -> None:
    """With the A100 first, a plan of 6 nodes each is 2.9% faster than the best plan before orders are tried. Six
    candidates that gain nothing came first."""
    site = make_site(100, ("ib", 7, 3200.0, H100), ("ib", 7, 800.0, A100))
    fixed = {"tp": 2, "pp": 6, "dp": 8, "pool_order": ("ib-1", "ib-0"), "nodes": {"ib-0": 6, "ib-1": 6}}
    free_s, told_s = (step_s("mixtral_8x7b", Batch(512, 1, 8192), site, **options) for options in ({}, fixed))
    assert free_s <= 1.005 * told_s


def test_free_micro_batch_size_gives_no_slower_plan() -> None:
    site = make_site(25, ("ib", 6, 200.0, A100), ("roce", 6, 200.0, A100))
    batch = Batch(1536, 4, 2048)
    fixed_s = step_s("gpt_7_5b", batch, site)
    assert step_s("gpt_7_5b", batch, site, search_micro_size=True) <= fixed_s * (1 + 1e-9)


@pytest.mark.parametrize("problem", [FOUR_FABRICS, THREE_FABRICS])
def test_estimates_are_hardly_too_long(problem: tuple[ModelSpec, Batch, Site]) -> None:
    """The search relies on this when it prunes a placement."""
    model, batch, site = problem
    problem = Problem(model, batch, site, PlanOptions(), Costs())
    placements, evaluator = Space(problem).placements(), Evaluator(problem)
    sample = placements[:: max(1, len(placements) // 20)]
    candidates = [candidate for placement in sample for candidate in evaluator.candidates(placement)]
    assert len(candidates) >= 10
    for candidate in candidates:
        estimate_s = candidate.placement.estimate.seconds(candidate.layout.parallel.virtual_stages)
        assert estimate_s <= MAX_OVERESTIMATE * evaluator.simulate(candidate).seconds, candidate


def test_search_stopped_by_the_time_limit_has_a_plan_and_notes_its_gap() -> None:
    model, batch, site = THREE_FABRICS
    full = search(Problem(model, batch, site, PlanOptions(), Costs()), Clock())
    stopped = search(Problem(model, batch, site, PlanOptions(), Costs()), Clock(seconds=1e-9))
    assert 1 < len(stopped) < len(full)  # each fabric, each pair and all of them are always tried
    assert stopped[0].seconds <= 1.3 * full[0].seconds
    assert [note for note in stopped[0].notes if "the search was stopped" in note]
    assert not [note for note in full[0].notes if "the search was stopped" in note]


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holmes_hpc.planning.search.explore.PROGRESS_INTERVAL_S", 0)
    lines: list[str] = []
    model, batch, site = FOUR_FABRICS
    best = search(Problem(model, batch, site, PlanOptions(), Costs()), Clock(report=lines.append))[0]
    assert len(lines) > 2 and all(line.startswith("planning: ") for line in lines)
    assert f"{best.seconds:.3g} s a step" in lines[-1]


def test_progress_does_not_repeat_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holmes_hpc.planning.search.explore.PROGRESS_INTERVAL_S", 0)
    lines: list[str] = []
    clock = Clock(report=lines.append)
    for line in ("0 simulated", "0 simulated", "1 simulated"):
        clock.report(line)
    assert lines == ["0 simulated", "1 simulated"]
