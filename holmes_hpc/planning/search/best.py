"""The best Plan for a model, a batch and a site: rank all placements by estimate, try the best ones, keep the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from holmes_hpc.planning.plan.plan import Plan, Stage
from holmes_hpc.planning.schedule.kinds import megatrons_own, schedule_kind
from holmes_hpc.planning.search import infeasible
from holmes_hpc.planning.search import layers as split
from holmes_hpc.planning.search.candidate import BUCKET_BYTES, Candidate, Evaluator
from holmes_hpc.planning.search.explore import GAP, Clock, Explored, explored
from holmes_hpc.planning.search.per_stage import QUICK, THOROUGH, Variant, obstacle, variants
from holmes_hpc.planning.search.problem import Question, offers
from holmes_hpc.planning.search.space import WORTH, Space, near_batch
from holmes_hpc.records.metrics import PART_NAMES, PARTS

BETTER = 24  # candidates made better at most
NEAR = 1.05  # candidates slower than the best by no more than this are made better
FAR = 1.12  # and up to this those that a lower bound lets become the best: order, layers and depth gained up to 10%
FEW_ORDERS = 3  # of the fabrics, tried of those
ALIKE = 6  # of one kind that were made better, after which those that would have to gain twice as much are not
GIVEN = 50  # choices of nodes for one given layout that are tried
RUNNERS_UP = 5
GAINED = 0.01  # what TP and DP by stage must gain at least: they are less plain
PREDICTED = tuple(part for part in PARTS if part != "other_s")  # of a step's time
SAID = 0.005  # a gap to the lower bound that a plan tells of


def best_plan(
    model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock | None = None
) -> Plan:
    """The Plan with the shortest predicted step, with its prediction and runners-up. `clock`: when to stop searching,
    and who is told how far it is; without one it goes on until nothing is to be gained.

    Raises PlanError, one line: what cannot be divided, or how much memory is short and on what it would fit.
    """
    clock, question = clock or Clock(), Question(model, batch, costs.with_measured_links(site), options, costs)
    reason = obstacle(options, costs) if options.unequal == "true" else None
    what, hint = f"stages cannot have TP and DP of their own with {reason}", f"plan.unequal=true or {reason}"
    PlanError.refuse((reason, what, "plan.unequal", f"leave one of the two out: {hint}"))
    try:
        best, *others = search(*question, clock=clock)
    except PlanError:  # of uniform layouts
        plan = _per_stage_plan(question, clock)
        if plan is None:
            raise
        return plan
    plan = None
    if not clock.is_over() and (options.unequal == "true" or _may_gain(best, question)):
        plan = _per_stage_plan(question, clock, [best, *others])
    plan = plan or to_plan(best, question.site, others)
    return plan if clock.is_over() else _beside_a_near_batch(plan, best, question, clock)


def _may_gain(best: Candidate, question: Question) -> bool:
    """Return whether a layout with TP and DP by stage may be faster than the best uniform one: where that leaves nodes
    out, fabrics are unlike, or its ranks wait for more than that may gain at least."""
    usable = offers(question.site, question.options)
    kinds = {(o.fabric.gpu, o.nodes, o.per_node) for o in usable}
    used = sum(block.nodes for block in best.placement.blocks)
    return (
        len(kinds) > 1
        or used < sum(o.nodes for o in usable)
        or split.idle_share(best.layout, best.layers, best.seconds) > GAINED
    )


def _per_stage_plan(question: Question, clock: Clock, uniform: Sequence[Candidate] = ()) -> Plan | None:
    """Return the best plan with TP and DP by stage that is clearly faster than the best of the `uniform` ones; None
    where there is none, or options forbid it."""
    options = question.options
    if options.unequal == "false" or obstacle(options, question.costs):
        return None
    limit, effort = uniform[0].seconds * (1 - GAINED) if uniform else inf, THOROUGH
    if uniform and options.unequal == "auto":  # with the micro-batches of the best uniform layout
        effort = QUICK
        options = replace(options, search_micro_size=False)
        question = question._replace(batch=uniform[0].layout.batch, options=options)
    for variant in variants(question, clock, limit, effort):
        if variant.seconds >= limit:
            return None
        try:
            plan = to_plan(variant, question.site, uniform)
        except PlanError:  # one that could lock up
            continue
        notes = [
            f"{nodes} nodes of {fabric} are left out: no layout found has a shorter step with them"
            for fabric, nodes in plan.unused.items()
        ]
        return replace(plan, assumptions=(*plan.assumptions, *notes))
    return None


def _beside_a_near_batch(plan: Plan, best: Candidate, question: Question, clock: Clock) -> Plan:
    """Return `plan`, with a note where a global batch near the one asked for is much better. `best`: its best uniform
    layout."""
    assert plan.predicted is not None
    batch, seconds = question.batch, plan.predicted.step_time_s
    near = near_batch(question, best.placement, seconds)
    if near is None:
        return plan
    try:
        other = search(*question._replace(batch=near), clock=clock)[0]
    except PlanError:
        return plan
    more = near.global_size / other.seconds / (batch.global_size / seconds) - 1
    if more < WORTH:
        return plan
    note = (
        f"a global batch of {batch.global_size} leaves few ways to share it out: batch.global_size="
        f"{near.global_size} would give {more:.0%} more samples/s"
    )
    return replace(plan, assumptions=(*plan.assumptions, note))


def given_plan(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> Plan:
    """The Plan of one layout that `options` give (tp, pp and dp at least), nothing searched for: layers as equal as can
    be unless layers_per_stage says otherwise, Megatron-Core's schedule and no recomputation unless asked for, fabrics
    in the order of `nodes` or of the site. Asked to run ahead, it is as deep and has the buckets that a search would
    choose. What does not fit in memory is predicted all the same, and said."""
    sizes = ("tp", "pp", "dp")
    PlanError.refuse(*((not getattr(options, n), f"{n} is not given", "layout", f"give {n}") for n in sizes))
    site, chunks = costs.with_measured_links(site), options.virtual_stages or 1
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
            infeasible.nothing_divides(model, batch, site, fixed)
        infeasible.nothing_fits(Evaluator(model, batch, site, unlimited, costs), placements)
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
            infeasible.nothing_fits(evaluator, too_large)
        infeasible.nothing_divides(model, batch, site, options)
    found = explored(evaluator, space, placements, clock)
    if not found.candidates:
        infeasible.nothing_fits(evaluator, placements)
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


def to_plan(candidate: Candidate | Variant, site: Site, others: Sequence[Candidate]) -> Plan:
    """A candidate as the Plan that a run can be started from."""
    layout = candidate.layout
    stages = tuple(
        Stage(c.fabric, int(chunks.sum()), tuple(int(n) for n in chunks))
        for c, chunks in zip(layout.replicas[0], candidate.layers[0], strict=True)
    )
    plan = Plan(
        candidate.strategy,
        layout.model,
        layout.batch,
        parallel=layout.parallel,
        recompute=layout.recompute,
        schedule=layout.schedule,
        components=layout.components,
        stages=stages,
        site=site,
        bucket_bytes=layout.bucket_bytes,
        edge_dtype=layout.edge_dtype,
        edge_connections=layout.edge_connections,
        transport_mode=layout.transport_mode,
        pace_layer_ms=layout.costs.pace_layer_ms,
        predicted=predict_layout(layout, candidate.layers),
        assumptions=(*site.assumptions, *layout.assumptions, *candidate.notes),
        pace_factors=layout.costs.pace_factors,
    )
    return replace(plan, alternatives=_alternatives(candidate, others))


def _alternatives(best: Candidate | Variant, others: Sequence[Candidate]) -> tuple[dict[str, Any], ...]:
    """The best of each other kind of placement (strategy, fabrics, and parallel sizes), the fastest first."""
    seen = {_kind(best)}
    kept: list[dict[str, Any]] = []
    for candidate in others:
        if _kind(candidate) not in seen and len(kept) < RUNNERS_UP:
            seen.add(_kind(candidate))
            kept.append(alternative(best, candidate))
    return tuple(sorted(kept, key=_step_time_s))


def _step_time_s(runner_up: dict[str, Any]) -> float:
    return float(runner_up["predicted"]["step_time_s"])


def _kind(candidate: Candidate | Variant) -> tuple[object, ...]:
    layout = candidate.layout
    return candidate.strategy, layout.parallel.stages, tuple(sorted(c.fabric for c in layout.components))


def alternative(best: Candidate | Variant, runner_up: Candidate) -> dict[str, Any]:
    """Return a runner-up, whose layout is uniform, as plain data, with what it loses against the best."""
    other, layers = runner_up.layout, runner_up.layers
    first, second = predict_layout(best.layout, best.layers), predict_layout(other, layers)
    slower = second.step_time_s / first.step_time_s - 1
    more = {name: second.breakdown[name] - first.breakdown[name] for name in PREDICTED}
    why = f"{slower:.1%} slower: {grown(more)}" if slower > 0.0005 else ("as fast, and less plain or with more GPUs")
    p = other.parallel
    return {
        "strategy": runner_up.strategy,
        "parallel": {"tp": p.tp, "pp": p.pp, "dp": p.dp, "virtual_stages": p.virtual_stages},
        "micro_size": other.batch.micro_size,
        "nodes": {c.fabric: c.nodes for c in other.components},
        "layers_per_stage": [int(n) for n in layers[0].sum(axis=1)],
        "recompute": other.recompute,
        "schedule": other.schedule.kind,
        "why_not": why,
        "predicted": {
            "step_time_s": second.step_time_s,
            "samples_per_s": second.samples_per_s,
            "memory_bytes_per_gpu": max(second.memory_bytes_per_gpu),
            "breakdown": second.breakdown,
        },
    }


def grown(more: Mapping[str, float]) -> str:
    """In words the part of a step that takes longest beyond the best plan's, and the next where that is a third of it
    or more. `more`: seconds of each, less where negative."""
    first, second = sorted(more, key=lambda name: -more[name])[:2]
    text = f"{PART_NAMES[first]} takes {more[first]:.3g} s longer"
    return text + (f", {PART_NAMES[second]} {more[second]:.3g} s" if more[second] >= more[first] / 3 > 0 else "")
