"""The best Plan for a model, a batch and a site: rank all placements by estimate, try the best ones, keep the best."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import refuse
from holmes_hpc.planning.cost.predict import layer_array, predict_layout
from holmes_hpc.planning.schedule.orders import megatrons_own, schedule_kind
from holmes_hpc.planning.search import refusal
from holmes_hpc.planning.search.alternatives import alternative
from holmes_hpc.planning.search.candidate import BUCKET_BYTES, Candidate, Evaluator
from holmes_hpc.planning.search.explore import GAP, Clock, Explored, explored
from holmes_hpc.planning.search.near_batch import WORTH, near_batch
from holmes_hpc.planning.search.space import Space
from holmes_hpc.planning.search.unequal import only_unequal, with_unequal
from holmes_hpc.planning.spec.plan import Plan, Stage

BETTER = 24  # candidates made better at most
NEAR = 1.05  # candidates slower than the best by no more than this are made better
FAR = 1.12  # and up to this those that a lower bound lets become the best: order, layers and depth gained up to 10%
FEW_ORDERS = 3  # of the fabrics, tried of those
ALIKE = 6  # of one kind that were made better, after which those that would have to gain twice as much are not
GIVEN = 50  # choices of nodes for one given layout that are tried
RUNNERS_UP = 5
SAID = 0.005  # a gap to the lower bound that a plan tells of


def best_plan(
    model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock | None = None
) -> Plan:
    """The Plan with the shortest predicted step, with its prediction and runners-up. `clock`: when to stop searching,
    and who is told how far it is; without one it goes on until nothing is to be gained.

    Raises PlanError, one line: what cannot be divided, or how much memory is short and on what it would fit.
    """
    site, clock = costs.on(site), clock or Clock()
    try:
        best, *others = search(model, batch, site, options, costs, clock)
    except PlanError:  # of equal widths
        made = only_unequal(model, batch, site, options, costs, clock)
        if made is None:
            raise
        return made
    if not clock.is_over():
        best = _beside_a_near_batch(best, model, batch, site, options, costs, clock)
    return with_unequal(to_plan(best, site, others), site, options, costs, clock)


def _beside_a_near_batch(
    best: Candidate, model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock
) -> Candidate:
    """`best`, which says so where a global batch near the one asked for is much better."""
    near = near_batch(model, batch, site, options, costs, best.placement, best.seconds)
    if near is None:
        return best
    try:
        other = search(model, near, site, options, costs, clock)[0]
    except PlanError:
        return best
    more = near.global_size / other.seconds / (batch.global_size / best.seconds) - 1
    return (
        best
        if more < WORTH
        else replace(
            best,
            notes=(
                *best.notes,
                f"a global batch of {batch.global_size} leaves few ways to share it out: batch.global_size="
                f"{near.global_size} would give {more:.0%} more samples/s",
            ),
        )
    )


def given_plan(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> Plan:
    """The Plan of one layout that `options` give (tp, pp and dp at least), nothing searched for: layers as equal as can
    be unless layers_per_stage says otherwise, Megatron-Core's schedule and no recomputation unless asked for, fabrics
    in the order of `nodes` or of the site. Asked to run ahead, it is as deep and has the buckets that a search would
    choose. What does not fit in memory is predicted all the same, and said."""
    for name in ("tp", "pp", "dp"):
        if getattr(options, name) is None:
            raise PlanError(f"{name} is not given", where="layout", hint=f"give {name}")
    site, chunks = costs.on(site), options.virtual_stages or 1
    schedule = megatrons_own(chunks).name if options.schedule == "auto" else options.schedule
    fixed = replace(
        options,
        virtual_stages=chunks,
        schedule=schedule,
        search_micro_size=False,
        recompute="none" if options.recompute == "auto" else options.recompute,
        partition="uniform" if options.partition == "exact" else options.partition,
        sequence_parallel=bool(options.sequence_parallel),
        bucket_bytes=options.bucket_bytes or (None if schedule_kind(schedule).deepens else BUCKET_BYTES),
        fabric_order=options.fabric_order or tuple(options.nodes or (f.name for f in site.fabrics)),
    )
    unlimited = replace(fixed, max_memory_gib=inf)
    best = _given(model, batch, site, fixed, costs) or _given(model, batch, site, unlimited, costs)
    if best is None:
        placements = Space(model, batch, site, unlimited, costs).placements()
        if not placements:
            refusal.nothing_divides(model, batch, site, fixed)
        refusal.nothing_fits(Evaluator(model, batch, site, unlimited, costs), placements)
    made = to_plan(best, site, [])
    try:
        refuse(Layout.of(made, costs), layer_array(made))
    except PlanError as e:
        return replace(made, assumptions=(*made.assumptions, f"it does not fit: {e.what}"))
    return made


def _given(model: ModelSpec, batch: Batch, site: Site, fixed: PlanOptions, costs: Costs) -> Candidate | None:
    """The best way of the one layout that `fixed` gives, as deep as a search makes it; None where there is none."""
    evaluator = Evaluator(model, batch, site, fixed, costs)
    placements = Space(model, batch, site, fixed, costs).placements()
    pipelines = [p for p in placements if p.strategy != "hierarchical-dp"]  # Megatron-Core's usual order of ranks
    ways = [evaluator.simulated(way) for p in (pipelines or placements)[:GIVEN] for way in evaluator.ways(p)]
    ways.sort(key=Candidate.key)
    if ways and ways[0].layout.order.schedule.deepens:
        ways = _improved(evaluator, Explored(ways, inf), Clock())
    return ways[0] if ways else None


def search(
    model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock
) -> list[Candidate]:
    """The best candidate, and others from best to worst."""
    space = Space(model, batch, site, options, costs)
    placements = space.placements()
    evaluator = Evaluator(model, batch, site, options, costs)
    if not placements:
        unlimited = replace(options, max_memory_gib=float("inf"))
        too_large = Space(model, batch, site, unlimited, costs).placements()
        if too_large:
            refusal.nothing_fits(evaluator, too_large)
        refusal.nothing_divides(model, batch, site, options)
    found = explored(evaluator, space, placements, clock)
    if not found.candidates:
        refusal.nothing_fits(evaluator, placements)
    return _improved(evaluator, found, clock)


def _improved(evaluator: Evaluator, found: Explored, clock: Clock) -> list[Candidate]:
    """The candidates with those near the best made better, from best to worst."""
    improved, rest, first = list[Candidate](), list[Candidate](), found.candidates[0].seconds
    gains: dict[object, list[float]] = {}  # by strategy and number of fabrics: how much shorter steps became
    for candidate in found.candidates:
        least = min((c.seconds for c in improved), default=inf)
        known = gains.setdefault((candidate.placement.strategy, len(candidate.placement.blocks)), [])
        far = candidate.seconds > FAR * first or (candidate.seconds > NEAR * first and candidate.bound >= least)
        hopeless = len(known) >= ALIKE and candidate.seconds * (1 - 2 * max(known) - GAP) > least
        if improved and (far or hopeless or clock.is_over() or len(improved) == BETTER):
            rest.append(candidate)
            continue
        improved.append(evaluator.better(candidate, None if candidate.seconds <= NEAR * first else FEW_ORDERS))
        known.append(1 - improved[-1].seconds / candidate.seconds)
        clock.tell(
            f"planning: layers and depth of {len(improved)} ways chosen, the best takes"
            f" {min(c.seconds for c in improved):.4g} s a step"
        )
    improved.sort(key=Candidate.key)
    gap = 1 - found.promised / improved[0].seconds
    if gap > SAID and clock.is_over():
        improved[0] = replace(
            improved[0],
            notes=(
                *improved[0].notes,
                f"the search was stopped: a step could be up to {gap:.1%} shorter, by lower bounds",
            ),
        )
    return [evaluator.plainer(evaluator.noted(improved[0])), *sorted([*improved[1:], *rest], key=Candidate.key)]


def to_plan(candidate: Candidate, site: Site, others: list[Candidate]) -> Plan:
    """A candidate as the Plan that a run can be started from."""
    layout = candidate.layout
    stages = tuple(
        Stage(c.fabric, int(chunks.sum()), tuple(int(n) for n in chunks))
        for c, chunks in zip(layout.replicas[0], candidate.layers[0], strict=True)
    )
    used = {c.fabric: c.nodes for c in layout.components}
    plan = Plan(
        candidate.placement.strategy,
        layout.model,
        layout.batch,
        layout.parallel,
        layout.recompute,
        layout.schedule,
        layout.components,
        stages,
        site,
        layout.bucket_bytes,
        layout.edge_dtype,
        layout.edge_connections,
        layout.transport_mode,
        layout.costs.pace_layer_ms,
        predict_layout(layout, candidate.layers),
        (*site.assumptions, *layout.assumptions, *candidate.notes),
        unused={f.name: f.nodes - used.get(f.name, 0) for f in site.fabrics if f.nodes > used.get(f.name, 0)},
        pace_factors=layout.costs.pace_factors,
    )
    return replace(plan, alternatives=_alternatives(candidate, others))


def _alternatives(best: Candidate, others: list[Candidate]) -> tuple[dict[str, Any], ...]:
    """The best of each other kind of placement (strategy, fabrics, and parallel sizes), the fastest first."""
    seen = {_kind(best)}
    kept: list[dict[str, Any]] = []
    for candidate in others:
        if _kind(candidate) not in seen and len(kept) < RUNNERS_UP:
            seen.add(_kind(candidate))
            kept.append(
                alternative(best.layout, best.layers, candidate.placement.strategy, candidate.layout, candidate.layers)
            )
    return tuple(sorted(kept, key=_step_time_s))


def _step_time_s(runner_up: dict[str, Any]) -> float:
    return float(runner_up["predicted"]["step_time_s"])


def _kind(candidate: Candidate) -> tuple[object, ...]:
    p = candidate.placement
    return p.strategy, p.tp, p.pp, p.dp, tuple(sorted(b.fabric.name for b in p.blocks))
