"""The best plan for a model, a batch and a site: search, refine, compare with the runners-up."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError, counted, rounded
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.assumptions import assumptions
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import PLAN_FIELDS, Layout
from holmes_hpc.planning.cost.memory import check_memory
from holmes_hpc.planning.cost.predict import layer_array, predict_layout, slowest_parts
from holmes_hpc.planning.plan.plan import MISFIT, Plan, Predicted, Stage
from holmes_hpc.planning.schedule.kinds import SPLIT, megatron_kind, schedule_kind
from holmes_hpc.planning.search.candidate import Candidate, Evaluator
from holmes_hpc.planning.search.explore import MIN_GAIN, Clock, explore
from holmes_hpc.planning.search.infeasible import OutOfMemory, raise_indivisible, raise_out_of_memory
from holmes_hpc.planning.search.layers import idle_share
from holmes_hpc.planning.search.micro_batch_shares import best_shared_steps
from holmes_hpc.planning.search.per_stage import MIN_GAIN_OF_OPTION, conflicting_option, variants
from holmes_hpc.planning.search.placement import Placement, sharded_in_nodes
from holmes_hpc.planning.search.problem import (
    BUCKET_BYTES,
    LONG_SEQUENCE,
    Problem,
    Solution,
    available_pools,
    cp_choices,
    searched_site,
    with_cp,
)
from holmes_hpc.planning.search.space import MIN_BATCH_GAIN, Space, nearby_batch
from holmes_hpc.records.metrics import PARTS

MAX_REFINED = 24
NEAR = 1.05  # candidates up to this many times as slow as the best are refined
# Candidates up to this factor are refined if their bound is below the best step, because refinement gains up to 10%.
FAR = 1.12
MAX_ORDERS_FAR = 3  # the most orders of pools tried for a candidate beyond NEAR
# After this many refinements of a kind (strategy and number of pools), a candidate of that kind is skipped if it would
# have to gain more than twice the kind's largest gain so far.
MIN_REFINED_OF_KIND = 6
MAX_NODE_CHOICES = 50  # the most placements tried for one user-fixed layout
MAX_RUNNERS_UP = 5
MIN_PER_STAGE_GAIN = 0.01  # per-stage TP/DP is less simple and must gain at least this share of the step
PREDICTED = tuple(part for part in PARTS if part != "other_s")  # parts of a step's time
MAX_PLACEMENTS = 4  # the most placements for which such an option, or a nearby batch, is tried
MIN_NOTED_GAP = 0.005  # smaller gaps to the lower bound are not noted


def best_plan(
    model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock | None = None
) -> Plan:
    """Return the plan with the shortest predicted step, with its prediction and runners-up. `clock`: the time limit and
    progress log; None: no limit. Raise PlanError if a size is not divisible as needed, or if no plan fits in memory."""
    site = costs.calibration.with_measured_links(searched_site(site, options))
    clock, problem, plans, failure = clock or Clock(), Problem(model, batch, site, options, costs), list[Plan](), None
    for cp, all_to_all in cp_choices(problem):
        if plans and (clock.is_over() or not (options.cp or batch.sequence_length >= LONG_SEQUENCE)):
            break
        try:
            plans.append(_best_plan(with_cp(problem, cp, all_to_all), clock))
        except PlanError as e:
            failure = failure or e
            if batch.sequence_length < LONG_SEQUENCE and not isinstance(failure, OutOfMemory):
                raise
    if failure and not plans:
        raise failure
    return min(plans, key=lambda plan: plan.predicted.step_time_s if plan.predicted else inf)


def _best_plan(problem: Problem, clock: Clock) -> Plan:
    """Return the best plan for the CP of the problem's batch."""
    options, costs = problem.options, problem.costs
    conflict = conflicting_option(options, costs) if options.unequal == "true" else None
    message, hint = f"per-stage TP/DP cannot be combined with {conflict}", f"remove plan.unequal=true or {conflict}"
    PlanError.refuse("plan.unequal", (conflict, message, hint))
    shared_steps = best_shared_steps(problem, clock)
    try:
        best, *slower = search(problem, clock)
    except PlanError:  # no uniform layout
        if plan := _per_stage_plan(problem, clock):
            return plan
        if shared_steps is None:
            raise
        return to_plan(shared_steps, problem.site, [])
    may_gain = _may_gain_per_stage(best, problem)
    per_stage_plan = _per_stage_plan(problem, clock, [best, *slower]) if may_gain and not clock.is_over() else None
    plan = per_stage_plan or to_plan(best, problem.site, slower)
    assert plan.predicted is not None
    if shared_steps and shared_steps.seconds < (1 - MIN_PER_STAGE_GAIN) * plan.predicted.step_time_s:
        plan = to_plan(shared_steps, problem.site, [best, *slower])
    if not clock.is_over():
        return _note_nearby_batch(plan, best, problem, clock)
    note = "the search was stopped before all layouts with per-stage TP/DP were tried, so a step may be shorter"
    return replace(plan, assumptions=(*plan.assumptions, *[note] * may_gain))


def _may_gain_per_stage(best: Candidate, problem: Problem) -> bool:
    """Return whether per-stage TP/DP is allowed, and asked for or possibly faster than the best uniform layout."""
    if problem.options.unequal != "auto" or conflicting_option(problem.options, problem.costs):
        return problem.options.unequal == "true"
    available = available_pools(problem.site, problem.options)
    kinds = {(a.pool.gpu, a.nodes, a.gpus_per_node) for a in available}
    used_nodes = sum(block.nodes for block in best.placement.blocks)
    return (
        len(kinds) > 1
        or used_nodes < sum(a.nodes for a in available)
        or idle_share(best.layout, best.layers, best.seconds) > MIN_PER_STAGE_GAIN
    )


def _per_stage_plan(problem: Problem, clock: Clock, uniform: Sequence[Candidate] = ()) -> Plan | None:
    """Return the best plan with per-stage TP/DP, or None if the options exclude it, or if its step is not shorter by
    MIN_PER_STAGE_GAIN. `uniform`: the candidates with uniform layouts, the best first."""
    options = problem.options
    if options.unequal == "false" or conflicting_option(options, problem.costs):
        return None
    max_s = uniform[0].seconds * (1 - MIN_PER_STAGE_GAIN) if uniform else inf
    if uniform and options.unequal == "auto":  # keep the micro-batch size of the best uniform layout
        options = replace(options, search_micro_size=False)
        problem = problem._replace(batch=uniform[0].layout.batch, options=options)
    for variant in variants(problem, clock, max_s):
        if variant.seconds >= max_s:
            return None
        try:
            plan = to_plan(variant, problem.site, uniform)
        except PlanError:  # its schedule could deadlock
            continue
        notes = [
            f"unused: {counted(nodes, 'node')} of {pool}; no layout found has a shorter step with them"
            for pool, nodes in plan.unused.items()
        ]
        return replace(plan, assumptions=(*plan.assumptions, *notes))
    return None


def _note_nearby_batch(plan: Plan, best: Candidate, problem: Problem, clock: Clock) -> Plan:
    """Return `plan`, with a note if a nearby global batch size gives MIN_BATCH_GAIN more samples per second on its best
    placements. `best`: the candidate with the best uniform layout."""
    assert plan.predicted is not None
    batch, step_s = problem.batch, plan.predicted.step_time_s
    if (choice := nearby_batch(problem, best.placement, step_s)) is None:
        return plan
    nearby, placements = choice
    evaluator = Evaluator(problem._replace(batch=nearby))
    candidates = [c for placement in placements[:MAX_PLACEMENTS] for c in evaluator.candidates(placement)]
    if not candidates:
        return plan
    fastest = evaluator.refine(min((evaluator.simulate(c) for c in candidates), key=Candidate.sort_key))
    fastest, *_ = _with_faster_options(evaluator, [fastest], clock)
    gain = nearby.global_size / fastest.seconds / (batch.global_size / step_s) - 1
    if gain < MIN_BATCH_GAIN:
        return plan
    note = (
        f"a global batch of {batch.global_size} has few divisors: batch.global_size={nearby.global_size} would give"
        f" at least {gain:.0%} more samples/s"
    )
    return replace(plan, assumptions=(*plan.assumptions, note))


def fixed_plan(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> Plan:
    """Return the plan of one user-fixed layout without a search; `options` must set tp, pp and dp. Other options
    default to layers as equal as possible, Megatron-Core's schedule and no recomputation, with pools in the order of
    the option `nodes`, or else of the site file. If the layout does not fit in memory, a note of the plan says so."""
    PlanError.refuse("layout", *((not getattr(options, n), f"{n} is missing", f"give {n}") for n in ("tp", "pp", "dp")))
    site = costs.calibration.with_measured_links(searched_site(site, options))
    problem = Problem(model, batch, site, options, costs)
    _, batch, _, options, _ = with_cp(problem, options.cp or 1, options.cp_comm == "a2a")
    chunks = options.virtual_stages or 1
    schedule = megatron_kind(chunks).name if options.schedule == "auto" else options.schedule
    fixed = replace(
        options,
        virtual_stages=chunks,
        schedule=schedule,
        search_micro_size=False,
        recompute="none" if options.recompute == "auto" else options.recompute,
        partition="uniform" if options.partition == "exact" else options.partition,
        ep=options.ep or 1,
        etp=options.etp or 1,
        sequence_parallel=model.experts.count > 0 if options.sequence_parallel is None else options.sequence_parallel,
        bucket_bytes=options.bucket_bytes or (None if schedule_kind(schedule).deepens else BUCKET_BYTES),
        pool_order=options.pool_order or tuple(options.nodes or (pool.name for pool in site.pools)),
    )
    problem = Problem(model, batch, site, fixed, costs)
    unlimited = problem._replace(options=replace(fixed, max_memory_gib=inf))
    best = _fixed_candidate(problem) or _fixed_candidate(unlimited)
    if best is None:
        placements = Space(unlimited).placements()
        if not placements:
            raise_indivisible(problem)
        raise_out_of_memory(Evaluator(unlimited), placements)  # its message names the conflicting options
    plan = to_plan(best, site, [])
    try:
        check_memory(Layout.of(plan, costs), layer_array(plan), options.max_memory_gib)
    except PlanError as e:
        return replace(plan, assumptions=(*plan.assumptions, f"{MISFIT}: {e.what}; {e.hint}"))
    return plan


def _fixed_candidate(problem: Problem) -> Candidate | None:
    """Return the best candidate for the layout that the options fix; None if no candidate is possible."""
    evaluator, placements = Evaluator(problem), Space(problem).placements()
    pipelines = [p for p in placements if p.strategy != "hierarchical-dp"]  # Megatron-Core's usual order of ranks
    candidates = [
        evaluator.simulate(candidate)
        for placement in (pipelines or placements)[:MAX_NODE_CHOICES]
        for candidate in evaluator.candidates(placement)
    ]
    candidates.sort(key=Candidate.sort_key)
    if candidates and candidates[0].layout.order.schedule.deepens:
        candidates = _refine(evaluator, candidates, Clock())
    return candidates[0] if candidates else None


def search(problem: Problem, clock: Clock) -> list[Candidate]:
    """Return the candidates with uniform layouts, from best to worst."""
    options = problem.options
    space, evaluator = Space(problem), Evaluator(problem)
    placements = space.placements()
    if not placements:
        if too_large := Space(problem._replace(options=replace(options, max_memory_gib=inf))).placements():
            raise_out_of_memory(evaluator, too_large)
        raise_indivisible(problem)
    simulated, bound_s = explore(evaluator, space, placements, clock)
    if not simulated:
        raise_out_of_memory(evaluator, placements)
    return _with_faster_options(evaluator, _refine(evaluator, simulated, clock, bound_s), clock)


def _with_faster_options(evaluator: Evaluator, candidates: list[Candidate], clock: Clock) -> list[Candidate]:
    """Return `candidates`, preceded by those that other kinds of sharding and weight passes make faster."""
    problem, options, costs = evaluator.problem, evaluator.problem.options, evaluator.problem.costs
    is_fsdp = costs.software.sharding in ("gradients", "full")
    choices = [options]  # one entry per choice of optimizer sharding
    if options.distributed_optimizer is None and not is_fsdp:
        choices.append(replace(options, distributed_optimizer=False))
        reason = "the optimizer is not sharded, so no parameters are gathered"
        candidates = _with_faster(evaluator, candidates, choices[-1], reason, clock)
    if options.distributed_optimizer is not False and not is_fsdp and problem.is_plain:
        reason = "each node shards a copy of the optimizer, so less traffic leaves the nodes"
        candidates = _with_faster(evaluator, candidates, options, reason, clock, sharded_in_nodes)
    if problem.tries_weight_passes:
        reason = f"weight gradients fill waits ({SPLIT.option_name})"
        for choice in choices:
            candidates = _with_faster(evaluator, candidates, replace(choice, schedule=SPLIT.name), reason, clock)
    return candidates


def _with_faster(
    evaluator: Evaluator,
    candidates: list[Candidate],
    options: PlanOptions,
    reason: str,
    clock: Clock,
    change: Callable[[Placement], Placement | None] = lambda placement: placement,
) -> list[Candidate]:
    """Return `candidates`, preceded by new candidates with `options` that are faster by MIN_GAIN_OF_OPTION, the fastest
    first. They have the placements of the best `candidates`, after the `change`. `reason`: of the gain, for a note."""
    changed = Evaluator(evaluator.problem._replace(options=options))
    max_s, faster = candidates[0].seconds * (1 - MIN_GAIN_OF_OPTION), list[Candidate]()
    adds_weight_passes = options.schedule != evaluator.options.schedule
    near = FAR if options.schedule == SPLIT.name else NEAR  # weight passes gain most when refined
    placements = filter(None, map(change, dict.fromkeys(c.placement for c in candidates)))
    for placement in islice(placements, MAX_PLACEMENTS):
        has_nothing_to_shard = options.distributed_optimizer is False and placement.dp == 1
        has_no_waits = adds_weight_passes and placement.pp == 1
        if has_nothing_to_shard or has_no_waits or placement.strategy == "hierarchical-dp" or clock.is_over():
            continue
        bounded = sorted(changed.candidates(placement), key=lambda c: c.bound)
        simulated = [changed.simulate(c) for c in bounded[:MAX_PLACEMENTS] if c.bound < max_s]
        refined = (changed.refine(c) for c in simulated if c.seconds < near * max_s)
        faster += [c for c in refined if c.seconds < max_s]
    faster.sort(key=Candidate.sort_key)
    if faster:
        gain = 1 - faster[0].seconds / candidates[0].seconds
        note = f"{reason}: a step is {gain:.1%} shorter"
        faster[0] = changed.note_missing_depth(replace(faster[0], notes=(*faster[0].notes, note)))
    return [*faster, *candidates]


def _refine(
    evaluator: Evaluator, candidates: Sequence[Candidate], clock: Clock, bound_s: float = inf
) -> list[Candidate]:
    """Return the candidates from best to worst, after a refinement of the candidates near the best.
    `bound_s`: the lower bound that :func:`explore` returned for all that it did not try."""
    refined, skipped, shortest_s = list[Candidate](), list[Candidate](), candidates[0].seconds
    gains: dict[object, list[float]] = {}  # by kind: strategy and number of pools
    for candidate in candidates:
        best_s = min((c.seconds for c in refined), default=inf)
        kind_gains = gains.setdefault((candidate.placement.strategy, len(candidate.placement.blocks)), [])
        is_near = candidate.seconds <= NEAR * shortest_s
        cannot_win = candidate.seconds > FAR * shortest_s or (not is_near and candidate.bound >= best_s)
        is_known = len(kind_gains) >= MIN_REFINED_OF_KIND and candidate.bound >= min(c.bound for c in refined)
        is_hopeless = is_known and candidate.seconds * (1 - 2 * max(kind_gains) - MIN_GAIN) > best_s
        if refined and (cannot_win or is_hopeless or clock.is_over() or len(refined) == MAX_REFINED):
            skipped.append(candidate)
            continue
        refined.append(evaluator.refine(candidate, None if is_near else MAX_ORDERS_FAR))
        kind_gains.append(1 - refined[-1].seconds / candidate.seconds)
        clock.report(
            f"planning: {counted(len(refined), 'candidate')} refined, the best takes"
            f" {rounded(min(c.seconds for c in refined))} s a step"
        )
    refined.sort(key=Candidate.sort_key)
    gap = 1 - bound_s / refined[0].seconds
    if gap > MIN_NOTED_GAP and clock.is_over():
        note = f"the search was stopped: by lower bounds, uniform layouts could be up to {gap:.1%} faster"
        refined[0] = replace(refined[0], notes=(*refined[0].notes, note))
    return [
        evaluator.simplify(evaluator.note_missing_depth(refined[0])),
        *sorted([*refined[1:], *skipped], key=Candidate.sort_key),
    ]


def to_plan(solution: Solution, site: Site, slower: Sequence[Candidate]) -> Plan:
    """Return a solution as a complete plan, with the best of the `slower` candidates as runners-up."""
    layout = solution.layout
    stages = tuple(
        Stage(c.pool, int(chunks.sum()), tuple(int(n) for n in chunks))
        for c, chunks in zip(layout.replicas[0], solution.layers[0], strict=True)
    )
    plan = Plan(
        strategy=layout.strategy,
        batch=layout.batch.whole,
        stages=stages,
        site=site,
        **{name: getattr(layout, name) for name in PLAN_FIELDS},
        pace_layer_ms=layout.costs.pace_layer_ms,
        grad_dtype=layout.costs.grad_dtype,
        early_step=layout.costs.early_step,
        predicted=predict_layout(layout, solution.layers),
        assumptions=(*site.assumptions, *assumptions(layout), *solution.notes),
        pace_factors=layout.costs.pace_factors,
    )
    assert plan.predicted is not None
    return replace(plan, alternatives=_alternatives(layout, plan.predicted, slower))


def _alternatives(best: Layout, predicted: Predicted, slower: Sequence[Candidate]) -> tuple[dict[str, Any], ...]:
    """Return the runners-up as plain data, the fastest first: the best of `slower` for each other :func:`_kind` of
    layout. `predicted`: the prediction of `best`."""
    kinds, runners_up = {_kind(best)}, list[dict[str, Any]]()
    for candidate in slower:
        if _kind(candidate.layout) not in kinds and len(runners_up) < MAX_RUNNERS_UP:
            kinds.add(_kind(candidate.layout))
            runners_up.append(alternative(predicted, candidate))
    return tuple(sorted(runners_up, key=lambda runner_up: runner_up["predicted"]["step_time_s"]))


def _kind(layout: Layout) -> tuple[object, ...]:
    """Return the strategy, parallel sizes and pools of a layout."""
    return layout.strategy, layout.parallel.stages, tuple(sorted(c.pool for c in layout.components))


def alternative(best: Predicted, runner_up: Candidate) -> dict[str, Any]:
    """Return a runner-up with a uniform layout as plain data.
    Its value `why_not` names the parts of a step that take longer than in the plan predicted by `best`."""
    layout, layers = runner_up.layout, runner_up.layers
    prediction = predict_layout(layout, layers)
    slowdown = prediction.step_time_s / best.step_time_s - 1
    extra_s = {name: prediction.breakdown[name] - best.breakdown[name] for name in PREDICTED}
    why = (
        f"{slowdown:.1%} slower: {slowest_parts(extra_s)}"
        if slowdown > 0.0005
        else "as fast, but less simple or on more GPUs"
    )
    p = layout.parallel
    return {
        "strategy": layout.strategy,
        "parallel": {"tp": p.tp, "pp": p.pp, "dp": p.replicas, "virtual_stages": p.virtual_stages}
        | {name: size for name in ("cp", "ep", "etp") if (size := getattr(p, name)) > 1},
        "micro_size": layout.batch.micro_size,
        "nodes": {c.pool: c.nodes for c in layout.components},
        "layers_per_stage": [int(n) for n in layers[0].sum(axis=1)],
        "recompute": layout.recompute,
        "schedule": layout.schedule.kind,
        "why_not": why,
        "predicted": {
            "step_time_s": prediction.step_time_s,
            "samples_per_s": prediction.samples_per_s,
            "memory_bytes_per_gpu": max(prediction.memory_bytes_per_gpu),
            "breakdown": prediction.breakdown,
        },
    }
