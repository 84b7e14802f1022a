"""The best layout with per-stage TP/DP: each stage has its own nodes, TP and DP.

The most promising shapes (stage_shapes.py) are simulated. For the best shapes, bucket size, passes in flight and layers
then change one at a time, as long as the simulated step gets shorter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, permutations, product
from math import ceil, inf
from operator import truediv
from typing import Any

import numpy as np

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError, counted
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout, schedule_of
from holmes_hpc.planning.cost.memory import excess_passes, fits
from holmes_hpc.planning.cost.timing import timing
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel, stage_parallel
from holmes_hpc.planning.plan.plan import Component
from holmes_hpc.planning.schedule.kinds import PER_STAGE, SCHEDULES, SPLIT
from holmes_hpc.planning.schedule.order import least_in_flight, limited_in_flight
from holmes_hpc.planning.search.candidate import BUCKETS, weight_pass_numbers, with_weight_passes
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
from holmes_hpc.planning.search.stage_lists import FEW_POOLS, pools_of, taking_turns
from holmes_hpc.planning.search.stage_shapes import Shape, best_shapes

MAX_SHAPES = 400  # the most shapes whose memory is checked
MIN_SHAPES = 8  # the fewest shapes simulated before their neighbours
MAX_SEARCHED_AGAIN, SEARCHED_AGAIN = 4, 1.3  # sets of pools, up to this many times as slow as the best
MANY_GPUS = 500  # larger sites are searched only once, because a search takes long
MAX_UNFIT = 24  # shapes on one set of pools to check first, until one fits in memory
BUILT = 4  # ratio of the time to simulate a shape to that of building its layout
EXPANDED = 5000  # passes that could be simulated while the neighbours of a shape are estimated
MIN_STEP = 0.005  # a neighbour faster by this share is expanded before the other neighbours are tried
NEAR = 1.12  # neighbours of variants up to this many times as slow as the best are tried, and these variants refined
# The most passes to simulate: of shapes with short estimates, of neighbours of the best, in each round of refinement
SHAPES, NEIGHBOURS, REFINEMENT = 300_000, 600_000, 600_000
MORE_NEIGHBOURS, MORE_REFINEMENT = 4, 20  # ratios of these passes on small sites to those on large sites
ROUNDS = ((None, 6), (16, 40))  # (the best variants to refine, None: all near the best; the most simulations of each)
SPLIT_ROUNDS = ((16, 60), (4, 200))  # the same with weight passes
MIN_GAIN_OF_OPTION = 0.01  # the least gain of options that need more memory: weight passes, an unsharded optimizer
MAX_CUTS = 3  # of passes in flight, until they fit in memory
EXTRA_DEPTHS = (1, 3, 8)  # passes in flight to try beyond those that hide the transfers

# Plan options with the values under which stages may differ in TP, DP and nodes.
FREE_VALUES: dict[str, tuple[Any, ...]] = {
    "dp": (None,),
    "layers_per_stage": (None,),
    "pool_order": (None,),
    "partition": ("exact",),
    "schedule": ("auto", *(name for name, kind in SCHEDULES.items() if kind.per_stage)),
    "virtual_stages": (None, 1),
    "strategy": ("auto", "pipeline"),
    "transport": ("holmes",),
    "distributed_optimizer": (None, True),
    "sequence_parallel": (None, True),
}


def conflicting_option(
    options: PlanOptions, costs: Costs, free_values: Mapping[str, tuple[Any, ...]] = FREE_VALUES
) -> str | None:
    """Return the first option, as KEY=VALUE, not in its `free_values`, or sharding beyond the optimizer; else None."""
    for name, values in free_values.items():
        if (value := getattr(options, name)) not in values:
            return f"plan.{name}={value}"
    return None if costs.software.sharding in ("none", "optimizer") else f"sharding {costs.software.sharding}"


@dataclass(frozen=True, kw_only=True)
class Variant(Solution):
    """A solution with one shape."""

    shape: Shape

    @property
    def key(self) -> tuple[object, ...]:
        """The values that make the difference between variants of one search."""
        x = self.layout
        return x.components, x.parallel, x.recompute, x.batch, x.schedule, x.bucket_bytes, self.layers.tobytes()

    @property
    def pools(self) -> frozenset[str]:
        """The names of the pools it uses."""
        return frozenset(c.pool for c in self.layout.components)

    @cached_property
    def least_s(self) -> float:
        """A lower bound of the step time. Each replica computes its micro-batches one after the other, and waits until
        the gradients of one are back before it holds more than `in_flight` of them."""
        layout, order, times = self.layout, self.layout.order, timing(self.layout, self.layers)
        forward, backward, ready, tail = (
            getattr(times.replicas[0], name)[0, :, 0] for name in ("forward", "backward", "ready", "tail")
        )
        counts = np.array([-(-order.micro_batches // stage.dp) for stage in layout.parallel.stages])
        trips_s = forward + backward + [*round_trips_s(layout), 0.0]
        waits = -(-counts // np.minimum(counts, order.in_flight))
        work_s = np.maximum(counts * (forward + backward), waits * trips_s[::-1].cumsum()[::-1])
        return float((trips_s.cumsum() - trips_s + work_s + ready + tail).max() + times.after_reduction_s()[0])


def variants(problem: Problem, clock: Clock, max_s: float) -> list[Variant]:
    """Return all simulated and refined variants, the shortest step first.

    A site of up to MANY_GPUS is searched in each `order` of :func:`_search`, the last one only with more than FEW_POOLS
    pools. The pools of the best variant are then searched again, up to MAX_SEARCHED_AGAIN times: on fewer pools, the
    limit on passes allows more shapes. Weight passes come last. The list is empty if no step is below `max_s`."""
    memo, site, splits = Memo(), problem.site, problem.options.schedule == SPLIT.name or problem.tries_weight_passes
    max_s *= NEAR if splits else 1
    is_large = sum(pool.gpus for pool in site.pools) > MANY_GPUS
    neighbours = NEIGHBOURS * (1 if is_large else MORE_NEIGHBOURS)
    found, used, searched = list[Variant](), frozenset(pool.name for pool in site.pools), set[frozenset[str]]()
    for _ in range(1 if is_large or problem.options.nodes else 1 + MAX_SEARCHED_AGAIN):
        searched.add(used)
        on_used = problem._replace(site=site.restricted_to([pool for pool in site.pools if pool.name in used]))
        orders = ("estimate", "turns", "pools") if len(used) > FEW_POOLS else ("estimate", "turns")
        for order in orders[:1] if is_large else orders:
            if order == "estimate" or not clock.is_over():
                found += _search(on_used, clock, max_s, memo, neighbours, order)
        fastest_s = min((v.seconds for v in found), default=max_s)
        near = [v for v in found if v.pools not in searched and v.seconds <= SEARCHED_AGAIN * fastest_s]
        if not near or clock.is_over():
            break
        used = min(near, key=lambda v: v.seconds).pools
    found = [*{v.key: v for v in sorted(found, key=lambda v: v.seconds)}.values()]
    max_passes = REFINEMENT * (1 if is_large else MORE_REFINEMENT)
    refined = _refine_all(found, problem.options, clock, max_passes)
    if not splits:
        return refined
    split = _refine_all(
        [*map(_with_weight_passes, refined[: SPLIT_ROUNDS[0][0]])], problem.options, clock, max_passes, SPLIT_ROUNDS
    )
    if problem.options.schedule != "auto":
        return split
    return [v for v in split if v.seconds < refined[0].seconds * (1 - MIN_GAIN_OF_OPTION)] + refined


def _with_weight_passes(variant: Variant) -> Variant:
    """Return the variant with weight passes (zero_bubble), none of which is deferred."""
    in_flight = variant.layout.schedule.in_flight
    schedule = schedule_of(SPLIT.name, in_flight, (0,) * len(in_flight), (1,) * len(in_flight))
    return timed(replace(variant, layout=variant.layout.with_settings(schedule)))


def _search(problem: Problem, clock: Clock, max_s: float, memo: Memo, neighbours: int, order: str) -> list[Variant]:
    """Return the variants of one search. `memo`: the results that all searches share. `neighbours`: the most passes to
    simulate for neighbours. `order`: by "estimate"; "turns" of numbers of stages; "pools" in their best order."""
    options, available = problem.options, available_pools(problem.site, problem.options)
    simulated, tried, passes = list[Variant](), set[Shape](), 0

    def built(shape: Shape) -> Variant | None:
        """Return the balanced variant of the shape."""
        nonlocal passes
        key = "built", shape.micro_size, shape.recompute, *((available[f].pool, *sizes) for f, *sizes in shape.stages)
        passes += 0 if key in memo else shape.passes // BUILT
        variant = memo.of(*key, compute=lambda: _balanced_variant(problem, available, shape, memo))
        return variant and replace(variant, shape=shape)

    def simulate(balanced: Variant) -> None:
        """Simulate the balanced and the front-loaded variant, if they may be faster than all others."""
        nonlocal passes
        tried.add(balanced.shape)
        for variant in (balanced, _front_loaded_variant(balanced, options)):
            if variant and variant.least_s < least_s():
                passes += 0 if variant.key in memo else variant.shape.passes
                simulated.append(replace(memo.of(*variant.key, compute=partial(timed, variant)), shape=balanced.shape))
        clock.report(f"planning: layouts with per-stage TP/DP, {len(simulated)} simulated so far")

    def least_s() -> float:
        return min((v.seconds for v in simulated), default=max_s)

    def is_over(max_passes: float) -> bool:
        return passes > max_passes or bool(simulated and clock.is_over())

    def may_win(shape: Shape) -> bool:
        return shape.estimate <= MAX_OVERESTIMATE * least_s() and shape not in tried

    pools = tuple(a.pool.name for a in available)
    by_turns, choice = order == "turns", (MAX_OVERESTIMATE * max_s, order == "pools")
    shapes = memo.of("shapes", pools, *choice, compute=lambda: best_shapes(problem, *choice))
    for _, same_pools in grouped((pools_of(shape.stages), shape) for shape in shapes):
        if fitting := next(filter(None, map(built, filter(may_win, same_pools[:MAX_UNFIT]))), None):
            simulate(fitting)
    promising = list[Variant]()
    if by_turns:
        shapes = taking_turns(shapes, lambda shape: len(shape.stages))
    for shape in filter(may_win, shapes[:MAX_SHAPES]):
        if is_over(SHAPES / 2) and len(promising) >= MIN_SHAPES:
            break
        promising += filter(None, [built(shape)])
    promising.sort(key=lambda v: v.least_s * v.shape.estimate)
    for balanced in taking_turns(promising, lambda v: len(v.shape.stages)) if by_turns else promising:
        if is_over(SHAPES) and len(tried) >= MIN_SHAPES:
            break
        simulate(balanced)
    max_passes, expanded = passes + neighbours, set[Shape]()
    while unexpanded := [v for v in simulated if v.shape not in expanded]:
        best = min(unexpanded, key=lambda v: v.seconds)
        if is_over(max_passes) or best.seconds > NEAR * least_s():
            break
        expanded.add(best.shape)
        passes += EXPANDED
        others = best.shape.on_other_pools() if best.seconds <= least_s() else []  # estimates ignore costs of pools
        max_estimate = NEAR * least_s() * best.shape.estimate / best.seconds
        near = [shape for shape in best.shape.neighbours if shape.estimate < max_estimate]
        for shape in [*others, *near]:
            if shape not in tried and not is_over(max_passes) and (neighbour := built(shape)):
                simulate(neighbour)
                if least_s() < (1 - MIN_STEP) * best.seconds:  # expand the faster one first
                    expanded.discard(best.shape)
                    break
    return simulated


def _refine_all(
    candidates: list[Variant], options: PlanOptions, clock: Clock, max_passes: int, rounds: Sequence[Any] = ROUNDS
) -> list[Variant]:
    """Return the candidates and refined versions of the candidates near the best, the shortest step first.

    The best candidate on each set of pools is refined before all other candidates, and the best of all are refined
    again, with more simulations. `max_passes`: the most passes to simulate in each round."""
    first_on_pools = {v.layout.transport_rule.pools: v for v in reversed(candidates)}
    refined = sorted(candidates, key=lambda v: first_on_pools[v.layout.transport_rule.pools] is not v)
    for variants_of_round, simulations in rounds:
        passes_left, changed = max_passes, list[Variant]()
        for variant in refined[:variants_of_round]:
            if passes_left <= 0 or clock.is_over():
                break
            if variant.seconds <= NEAR * min((v.seconds for v in changed), default=inf):
                better, passes = _refine(variant, options, min(passes_left, simulations * variant.shape.passes))
                passes_left -= passes
                changed.append(better)
                clock.report(f"planning: {counted(len(changed), 'layout')} with per-stage TP/DP refined")
        refined = sorted({v.key: v for v in (*refined, *changed)}.values(), key=lambda v: v.seconds)
    return refined


def _balanced_variant(problem: Problem, available: list[AvailablePool], shape: Shape, memo: Memo) -> Variant | None:
    """Return a variant with balanced layers and, if memory allows, the passes in flight that hide the transfers.
    Return None if the shape has no valid layout, or does not fit in memory even with the fewest passes in flight."""
    components, sizes, max_gib = list[Component](), list[StageParallel](), problem.options.max_memory_gib
    for index, stages_on_pool in groupby(shape.stages, key=lambda stage: stage[0]):
        pool, stages = available[index], list(stages_on_pool)
        gpus, all_nodes = pool.gpus_per_node, sum(nodes for _, nodes, _ in stages)
        components.append(component(Block(pool.pool, all_nodes, gpus, len(stages)), first_stage=len(sizes)))
        sizes += [stage_parallel(tp, nodes * gpus // tp) for _, nodes, tp in stages]
    try:
        layout = problem.layout(
            Parallel(tuple(sizes), sequence_parallel=any(s.tp > 1 for s in sizes)),
            batch=replace(problem.batch, micro_size=shape.micro_size),
            recompute=shape.recompute,
            schedule=schedule_of(PER_STAGE.name, least_in_flight(tuple(s.dp for s in sizes))),
            components=tuple(components),
            pool_memo=memo if len(set(sizes)) > 1 else Memo(),  # only layouts with per-stage TP/DP may share it
        )
        layers = balanced_layers(layout, max_gib)
    except PlanError:
        return None
    if layers is None or (fitting := next(_deepened(layout, layers, max_gib), None)) is None:
        return None
    return Variant(fitting, layers, shape=shape)


def _deepened(
    layout: Layout, layers: np.ndarray, max_gib: float | None, extras: Sequence[int] = (0,)
) -> Iterator[Layout]:
    """Yield, for each of `extras`, the layout with the passes in flight that hide the transfers, plus that many, but at
    most as many as fit in memory, and as the stage above lets a stage hold."""
    order, s, dps = layout.order, layout.schedule, tuple(stage.dp for stage in layout.parallel.stages)
    micro_batches = [len(order.micro_batches_of(order.row(i, 0))) for i in range(len(dps))]
    d = timing(layout, layers).replicas[0]
    compute_s = (d.forward + d.backward + d.weight)[0, :, 0].tolist()
    slowest_s = max(map(truediv, compute_s, dps))  # per micro-batch
    hiding = [ceil(trip_s / (slowest_s * dp) - 1e-3) for trip_s, dp in zip(round_trips_s(layout), dps, strict=False)]
    fewest = [*map(min, least_in_flight(dps), micro_batches)]
    for extra in extras:
        depths = [*map(min, least_in_flight(dps, (*(n + extra for n in hiding), 0)), micro_batches)]
        for cut in range(MAX_CUTS + 1):
            deeper = layout.with_settings(schedule_of(s.kind, tuple(depths), s.deferred, s.final))
            excess = excess_passes(deeper, layers, max_gib)
            if depths == fewest or not excess.any():
                yield from () if excess.any() else (deeper,)
                break
            fewer = np.maximum(fewest, depths - excess).tolist()
            depths = limited_in_flight(fewer, dps, micro_batches) if cut < MAX_CUTS - 1 else fewest


def _front_loaded_variant(balanced: Variant, options: PlanOptions) -> Variant | None:
    """Return the variant with front-loaded layers and as many passes in flight as memory allows.
    Return None if the layers stay the same, or if they do not fit in memory."""
    layers = front_loaded_layers(balanced.layout)
    if np.array_equal(layers, balanced.layers):
        return None
    layout = next(_deepened(balanced.layout, layers, options.max_memory_gib, (*EXTRA_DEPTHS[::-1], 0)), None)
    return None if layout is None else replace(balanced, layout=layout, layers=layers)


def _refine(first: Variant, options: PlanOptions, passes: int) -> tuple[Variant, int]:
    """Return (`first`, or a changed version of it with a shorter step; the number of passes simulated).
    Settings and layers change one at a time, as long as a change gains. `passes`: the most passes to simulate."""
    best, simulations_left = first, passes // first.shape.passes

    def apply_first(changes: Iterator[dict[str, Any]], min_gain: float) -> bool:
        """Apply the first change that makes the step shorter by the share `min_gain`; return whether there is one."""
        nonlocal best, simulations_left
        for change in changes:
            if simulations_left <= 0:
                break
            enough_s = best.seconds * (1 - min_gain)
            changed = replace(best, **change)
            if changed.least_s >= enough_s:
                continue
            variant, simulations_left = timed(changed, max_s=enough_s), simulations_left - 1
            if variant.seconds < enough_s:
                best = variant
                return True
        return False

    while (
        apply_first(_bucket_changes(best, options), 1e-4)
        or apply_first(_depth_changes(best, options), 1e-3)
        or apply_first(_weight_changes(best, options), 1e-3)
        or apply_first(_layer_moves(best, options), 1e-5)
    ):
        pass
    return best, (passes // first.shape.passes - simulations_left) * best.shape.passes


def _bucket_changes(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield changes to bucket sizes that expose less of the data-parallel traffic."""
    exposed_s = _exposed_s(variant.layout, variant.layers)
    for size in () if options.bucket_bytes else BUCKETS:
        layout = variant.layout.with_settings(bucket_bytes=size)
        if _exposed_s(layout, variant.layers) < exposed_s:
            yield {"layout": layout}


def _depth_changes(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield changes to other numbers of passes in flight that fit in memory."""
    layouts = _deepened(variant.layout, variant.layers, options.max_memory_gib, (0, *EXTRA_DEPTHS))
    different = {layout.schedule: layout for layout in layouts if layout.schedule != variant.layout.schedule}
    yield from ({"layout": layout} for layout in different.values())


def _weight_changes(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield changes of deferred weight passes that fit in memory, most first: of single stages, then of all alike."""
    s, stages = variant.layout.schedule, range(variant.layout.parallel.pp)
    changes = weight_pass_numbers(variant.layout.order)[::-1] if s.deferred else []
    for part, (lag, final) in product((*((stage,) for stage in reversed(stages)), stages), changes):
        layout = with_weight_passes(variant.layout, part, lag, final)
        if layout.schedule != s and fits(layout, variant.layers, options.max_memory_gib)[0]:
            yield {"layout": layout}


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
        layers, layout, max_gib = chunk_layers(move, 1), variant.layout, options.max_memory_gib
        fitting = layout if fits(layout, layers, max_gib)[0] else next(_deepened(layout, layers, max_gib), None)
        if fitting is not None:
            yield {"layers": layers, "layout": fitting}
