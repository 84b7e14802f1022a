"""The best layout with per-stage TP/DP: each stage has its own nodes, TP and DP.

The most promising shapes (stage_shapes.py) are simulated. For the best shapes, bucket size, passes in flight and layers
then change one at a time, as long as the simulated step gets shorter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, permutations
from math import ceil
from typing import Any

import numpy as np

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import fits
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel
from holmes_hpc.planning.plan.plan import Component, Schedule
from holmes_hpc.planning.schedule.kinds import PER_STAGE
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.search.candidate import BUCKETS
from holmes_hpc.planning.search.explore import MAX_OVERESTIMATE, Clock
from holmes_hpc.planning.search.layers import (
    balanced_layers,
    busy_seconds,
    chunk_layers,
    front_loaded_layers,
    round_trips_s,
)
from holmes_hpc.planning.search.placement import Block, component
from holmes_hpc.planning.search.problem import AvailablePool, Problem, Solution, available_pools, timed
from holmes_hpc.planning.search.stage_lists import pools_of
from holmes_hpc.planning.search.stage_shapes import Shape, best_shapes

MAX_SHAPES = 400  # the most shapes whose memory is checked
MIN_SHAPES = 8  # the fewest shapes simulated before their neighbours
MAX_SEARCHED_AGAIN, SEARCHED_AGAIN = 3, 1.3  # sets of fabrics, up to this many times as slow as the best
MANY_GPUS = 512  # larger sites are searched only once, because a search takes long
MAX_UNFIT = 24  # shapes on one set of pools to check first, until one fits in memory
NEAR = 1.04  # neighbours of shapes up to this many times as slow as the best are tried
FAR = 1.12  # variants up to this many times as slow as the best are refined
EXTRA_DEPTHS = (1, 3, 8)  # passes in flight to try beyond those that hide the transfers

# Plan options with the values under which stages may differ in TP, DP and nodes.
FREE_VALUES: dict[str, tuple[Any, ...]] = {
    "dp": (None,),
    "layers_per_stage": (None,),
    "pool_order": (None,),
    "partition": ("exact",),
    "schedule": ("auto", PER_STAGE.name),
    "virtual_stages": (None, 1),
    "strategy": ("auto", "pipeline"),
    "transport": ("holmes",),
    "distributed_optimizer": (None, True),
    "sequence_parallel": (None, True),
}


def conflicting_option(
    options: PlanOptions, costs: Costs, free_values: Mapping[str, tuple[Any, ...]] = FREE_VALUES
) -> str | None:
    """Return the first option, as KEY=VALUE, whose value is not among its `free_values`; None if nothing conflicts.
    Sharding of more than the optimizer conflicts, too."""
    for name, values in free_values.items():
        if (value := getattr(options, name)) not in values:
            return f"plan.{name}={value}"
    return None if costs.software.sharding in ("none", "optimizer") else f"sharding {costs.software.sharding}"


@dataclass(frozen=True)
class Effort:
    """The most passes to simulate in each part of the search.

    `shapes`: for the shapes with the shortest estimates. `neighbours`: for neighbours of the best shapes. `refinement`:
    to refine all variants. `per_variant`: to refine one variant.
    """

    shapes: int
    neighbours: int
    refinement: int
    per_variant: int


QUICK = Effort(150_000, neighbours=300_000, refinement=300_000, per_variant=75_000)
THOROUGH = Effort(500_000, neighbours=1_200_000, refinement=1_000_000, per_variant=83_333)


@dataclass(frozen=True, kw_only=True)
class Variant(Solution):
    """A solution with one shape."""

    shape: Shape

    @property
    def passes(self) -> int:
        """The number of passes in one simulated step."""
        return 2 * self.layout.parallel.pp * self.layout.order.micro_batches


def variants(problem: Problem, clock: Clock, max_s: float, effort: Effort = THOROUGH) -> list[Variant]:
    """Return all simulated and refined variants, the shortest step first.

    If good ones use only some fabrics of a site of up to MANY_GPUS, these are searched again: the number of passes to
    simulate is limited, so a search on fewer fabrics tries more shapes. The list is empty if no shape that fits in
    memory promises a step below `max_s` seconds."""
    found, site = _search(problem, clock, max_s, effort), problem.site
    near = (v.layout for v in found if v.seconds < SEARCHED_AGAIN * found[0].seconds)
    fabrics = dict.fromkeys(frozenset(layout.pool(c).fabric_name for c in layout.components) for layout in near)
    is_large = sum(pool.gpus for pool in site.pools) > MANY_GPUS
    for used in [*fabrics][:MAX_SEARCHED_AGAIN] if not (problem.options.nodes or is_large) else ():
        pools = [pool for pool in site.pools if pool.fabric_name in used]
        if len(pools) < len(site.pools) and not clock.is_over():
            on_used = problem._replace(site=site.restricted_to(pools))
            found += _search(on_used, clock, min(max_s, min(v.seconds for v in found)), effort)
    return sorted(found, key=lambda variant: variant.seconds)


def _search(problem: Problem, clock: Clock, max_s: float, effort: Effort) -> list[Variant]:
    """Return the variants of one search."""
    options, available = problem.options, available_pools(problem.site, problem.options)
    simulated, tried, passes = list[Variant](), set[Shape](), 0

    def simulate(shape: Shape) -> bool:
        """Simulate the shape if it fits in memory; return whether it does."""
        nonlocal passes
        tried.add(shape)
        balanced = _balanced_variant(problem, available, shape)
        front_loaded = balanced and _front_loaded_variant(balanced, options)
        of_shape = [timed(v) for v in (balanced, front_loaded) if v is not None]
        passes += sum(v.passes for v in of_shape)
        simulated.extend(of_shape)
        clock.report(f"planning: layouts with per-stage TP/DP, {len(simulated)} simulated so far")
        return bool(of_shape)

    def is_over(max_passes: int) -> bool:
        return passes > max_passes or bool(simulated and clock.is_over())

    def may_win(shape: Shape) -> bool:
        is_fast = shape.estimate <= MAX_OVERESTIMATE * min((v.seconds for v in simulated), default=max_s)
        return is_fast and shape not in tried and not (is_over(effort.shapes) and len(tried) >= MIN_SHAPES)

    shapes = best_shapes(problem, MAX_OVERESTIMATE * max_s)
    for _, same_pools in grouped((pools_of(shape.stages), shape) for shape in shapes):
        next(filter(simulate, filter(may_win, same_pools[:MAX_UNFIT])), None)  # the first that fits
    for shape in filter(may_win, shapes[:MAX_SHAPES]):
        simulate(shape)
    max_passes, expanded = passes + effort.neighbours, set[Shape]()
    while unexpanded := [v for v in simulated if v.shape not in expanded]:
        best, least_s = min(unexpanded, key=lambda v: v.seconds), min(v.seconds for v in simulated)
        if is_over(max_passes) or best.seconds > NEAR * least_s:
            break
        expanded.add(best.shape)
        if best.seconds <= least_s:  # estimates do not tell whether a pool is worth its transfers
            for shape in best.shape.on_other_pools():
                if shape not in tried and not is_over(max_passes):
                    simulate(shape)
        for shape in best.shape.neighbours():
            expected_s = shape.estimate * best.seconds / best.shape.estimate
            if shape not in tried and expected_s < NEAR * least_s and not is_over(max_passes):
                simulate(shape)
    return _refine_all(sorted(simulated, key=lambda v: v.seconds), options, clock, effort)


def _refine_all(candidates: list[Variant], options: PlanOptions, clock: Clock, effort: Effort) -> list[Variant]:
    """Return the candidates and refined versions of the candidates near the best, the shortest step first.

    The best candidate on each set of pools is refined before all other candidates."""
    refined, passes_left = list[Variant](), effort.refinement
    first_on_pools = {pools_of(v.shape.stages): v for v in reversed(candidates)}
    for candidate in sorted(candidates, key=lambda v: first_on_pools[pools_of(v.shape.stages)] is not v):
        if passes_left <= 0 or clock.is_over():
            break
        if refined and candidate.seconds > FAR * refined[0].seconds:
            continue
        variant, passes = _refine(candidate, options, effort.per_variant)
        passes_left -= passes
        refined = sorted([*refined, variant], key=lambda v: v.seconds)
    if refined and not clock.is_over():
        refined[0] = _refine(refined[0], options, effort.refinement // 2)[0]
    return sorted([*refined, *candidates], key=lambda v: v.seconds)


def _balanced_variant(problem: Problem, available: list[AvailablePool], shape: Shape) -> Variant | None:
    """Return a variant with balanced layers and, if memory allows, the passes in flight that hide the transfers.

    Return None if the shape has no valid layout, or does not fit in memory even with the fewest passes in flight.
    """
    components, sizes, max_gib = list[Component](), list[StageParallel](), problem.options.max_memory_gib
    for index, stages_on_pool in groupby(shape.stages, key=lambda stage: stage[0]):
        pool, stages = available[index], list(stages_on_pool)
        gpus, all_nodes = pool.gpus_per_node, sum(nodes for _, nodes, _ in stages)
        components.append(component(Block(pool.pool, all_nodes, gpus, len(stages)), first_stage=len(sizes)))
        sizes += [StageParallel(tp, nodes * gpus // tp) for _, nodes, tp in stages]
    try:
        layout = problem.layout(
            Parallel(tuple(sizes), sequence_parallel=any(s.tp > 1 for s in sizes)),
            batch=replace(problem.batch, micro_size=shape.micro_size),
            recompute=shape.recompute,
            schedule=Schedule(PER_STAGE.name, least_in_flight(tuple(s.dp for s in sizes))),
            components=tuple(components),
        )
        layers = balanced_layers(layout)
    except PlanError:
        return None
    if not fits(layout, layers, max_gib)[0]:
        return None
    deeper = _deepen(layout, layers, 0)
    return Variant(deeper if fits(deeper, layers, max_gib)[0] else layout, layers, shape=shape)


def _deepen(layout: Layout, layers: np.ndarray, extra: int) -> Layout:
    """Return the layout with the passes in flight that hide the transfers, plus `extra` passes at each transfer."""
    order, pp, dps = layout.order, layout.parallel.pp, tuple(s.dp for s in layout.parallel.stages)
    extras = tuple(hiding + extra * (s < pp - 1) for s, hiding in enumerate(_hiding_depths(layout, layers)))
    micro_batches = [len(order.micro_batches_of(order.row(s, 0))) for s in range(pp)]
    in_flight = tuple(map(min, least_in_flight(dps, extras), micro_batches))
    return layout.with_settings(Schedule(PER_STAGE.name, in_flight))


def _hiding_depths(layout: Layout, layers: np.ndarray) -> tuple[int, ...]:
    """Return, per stage, the extra passes in flight that hide the transfers to the next stage and back."""
    d, sizes = timing(layout, layers).replicas[0], layout.parallel.stages
    compute_s = (d.forward + d.backward)[0, :, 0].tolist()
    slowest_s = max(seconds / stage.dp for seconds, stage in zip(compute_s, sizes, strict=True))  # per micro-batch
    transfers_s = round_trips_s(layout)
    return (*(ceil(s / (slowest_s * stage.dp) - 1e-3) for s, stage in zip(transfers_s, sizes, strict=False)), 0)


def _front_loaded_variant(balanced: Variant, options: PlanOptions) -> Variant | None:
    """Return the variant with front-loaded layers and as many passes in flight as memory allows.
    Return None if the layers stay the same, or if they do not fit in memory."""
    layers = front_loaded_layers(balanced.layout)
    if np.array_equal(layers, balanced.layers):
        return None
    layouts = (_deepen(balanced.layout, balanced.layers, extra) for extra in (*EXTRA_DEPTHS[::-1], 0))
    layout = next((layout for layout in layouts if fits(layout, layers, options.max_memory_gib)[0]), None)
    return None if layout is None else replace(balanced, layout=layout, layers=layers)


def _refine(first: Variant, options: PlanOptions, passes: int) -> tuple[Variant, int]:
    """Return (`first`, or a changed version of it with a shorter step; the number of passes simulated).

    Bucket size, passes in flight and layers change one at a time, as long as a change makes the step shorter. `passes`:
    the most passes to simulate.
    """
    best, simulations_left = first, passes // first.passes

    def apply_first(changes: Iterator[dict[str, Any]], min_gain: float) -> bool:
        """Apply the first change that makes the step shorter by the share `min_gain`; return whether there is one."""
        nonlocal best, simulations_left
        for change in changes:
            if simulations_left <= 0:
                break
            variant, simulations_left = timed(best, **change), simulations_left - 1
            if variant.seconds < best.seconds * (1 - min_gain):
                best = variant
                return True
        return False

    while (
        apply_first(_bucket_changes(best, options), 1e-4)
        or apply_first(_depth_changes(best, options), 1e-3)
        or apply_first(_layer_moves(best, options), 1e-5)
    ):
        pass
    return best, (passes // first.passes - simulations_left) * best.passes


def _bucket_changes(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield changes to bucket sizes that expose less of the data-parallel traffic."""
    exposed_s = _exposed_s(variant.layout, variant.layers)
    for size in () if options.bucket_bytes else BUCKETS:
        layout = variant.layout.with_settings(bucket_bytes=size)
        if _exposed_s(layout, variant.layers) < exposed_s:
            yield {"layout": layout}


def _depth_changes(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield changes to other numbers of passes in flight that fit in memory."""
    for extra in (0, *EXTRA_DEPTHS):
        deeper = _deepen(variant.layout, variant.layers, extra)
        if deeper.schedule != variant.layout.schedule and fits(deeper, variant.layers, options.max_memory_gib)[0]:
            yield {"layout": deeper}


def _exposed_s(layout: Layout, layers: np.ndarray) -> float:
    """Return an estimate of the seconds of data-parallel traffic that nothing hides."""
    d = timing(layout, layers).replicas[0]
    return sum(d.ready[0, :, 0].tolist()) + max(d.tail[0, :, 0].tolist())


def _layer_moves(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield changes that move one layer to another stage, ordered by the time of the busiest stage after the move.

    If a move does not fit in memory, it is tried with only the passes in flight that hide the transfers."""
    busy_s, counts = busy_seconds(variant.layout)[0], variant.layers[0, :, 0].tolist()

    def busiest_first(layers: list[int]) -> list[float]:
        return sorted((float(busy_s[n - 1, s]) for s, n in enumerate(layers)), reverse=True)

    moves = [
        [n - (s == source) + (s == target) for s, n in enumerate(counts)]
        for source, target in permutations(range(len(counts)), 2)
        if counts[source] > 1
    ]
    for move in sorted(moves, key=busiest_first):
        layers = chunk_layers(move, 1)
        for layout in (variant.layout, _deepen(variant.layout, layers, 0)):
            if fits(layout, layers, options.max_memory_gib)[0]:
                yield {"layers": layers, "layout": layout}
                break
