"""The errors if no plan is possible. They name an indivisible size, or the missing memory and a change that helps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import Case, PlanError, counted
from holmes_hpc.planning.cost.memory import Shortage, shortage
from holmes_hpc.planning.plan.parallel import abbreviated, indivisible_sizes, tp_across_nodes
from holmes_hpc.planning.schedule.kinds import candidate_schedules
from holmes_hpc.planning.search.candidate import Evaluator
from holmes_hpc.planning.search.layers import chunk_layers, uniform_layers
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.problem import AvailablePool, Problem, available_pools, divisors, expert_sizes
from holmes_hpc.planning.search.space import Space

MAX_PLACEMENTS = 100  # the most placements whose memory is computed: those with the largest TP x PP


class OutOfMemory(PlanError):
    """No plan fits in memory."""


def raise_indivisible(problem: Problem) -> NoReturn:
    """Raise PlanError for the first size that is not divisible as needed. Call it if no placement is possible."""
    model, batch, site, options, _ = problem
    size, micro_size, available = batch.whole.global_size, batch.micro_size, available_pools(site, options)
    PlanError.refuse("batch", *_indivisible_mistakes(problem, available))
    micro_batches, is_shared = size // micro_size, batch.cp > 1
    dp = options.dp and options.dp // batch.cp  # options.dp includes CP
    sizes: dict[str, Any] = {"TP": options.tp, "PP": options.stages, "DP": dp, "CP": batch.cp if is_shared else None}
    experts = {"EP": options.ep, "ETP": options.etp} if model.experts.count else {}
    sizes |= {**experts, "strategy": options.strategy}
    fixed_options = ", ".join(f"{name} {value}" for name, value in sizes.items() if value not in (None, "auto"))
    nodes = ", ".join(f"{a.nodes} {a.pool.name}" for a in available)
    message = (
        f"no placement of {counted(model.layers, 'layer')} and {counted(micro_batches, 'micro-batch')} on"
        f" {nodes} nodes{fixed_options and ', with ' + fixed_options + ','} has the same TP and DP in all stages"
    )
    gpus = f"TP x DP{' x CP' * is_shared} GPUs per stage"
    hint = f"change nodes, gpus_per_node, tp, pp, dp or the batch, so that {gpus} fill whole nodes"
    raise PlanError(message, where="plan", hint=hint)


def _indivisible_mistakes(problem: Problem, available: Sequence[AvailablePool]) -> Iterator[Case]:
    model, batch, _, options, _ = problem
    size, micro_size = batch.whole.global_size, batch.micro_size
    ranks = Counter[str]()  # of each fabric
    for a in available:
        ranks[a.pool.fabric_name] += a.nodes * a.gpus_per_node
    cp, tp, pp = batch.cp, options.tp or 1, options.stages or 1
    dp, micro_batches = (options.dp or cp) // cp, size // micro_size
    is_fixed, cp_factor = not options.search_micro_size, f" x CP {cp}" * (cp > 1)
    message = f"global_size {size} is not a multiple of micro_size {micro_size}"
    yield is_fixed and size % micro_size, message, "choose a multiple, or plan.search_micro_size=true"
    yield from indivisible_sizes(model, tp)
    yield from (tp_across_nodes(tp, a.gpus_per_node, f"pool {a.pool.name}") for a in available)
    hint = f"use a DP that divides {micro_batches}: {abbreviated(divisors(micro_batches))}"
    yield is_fixed and micro_batches % dp, f"{message} x DP {dp}", hint
    has_no_ep = options.tp and options.dp and not expert_sizes(model, options, tp * dp * cp)
    etp = options.etp or 1
    ep_name = f"EP {options.ep or 1}" + f" x ETP {etp}" * (etp > 1)
    message = f"{ep_name} does not divide TP {tp} x DP {dp}{cp_factor}"
    yield has_no_ep, message, "choose a divisor of both TP x DP and the experts", "plan.ep"
    lacks_sequence_parallel = batch.sequence_length % tp or (tp > 1 and options.sequence_parallel is False)
    message = f"experts need sequence parallelism, but TP {tp} has none over {batch.sequence_length} tokens"
    hint = "use a TP that divides the sequence, with plan.sequence_parallel, or TP 1"
    yield model.experts.count and lacks_sequence_parallel, message, hint, "plan.tp"
    most = model.layers - model.experts.first_dense  # each stage needs a layer with experts
    message = f"{counted(most, 'layer')}{' with experts' * (most < model.layers)} cannot fill PP {pp}"
    yield pp > most, message, f"use at most {counted(most, 'stage')}", f"model {model.name}"
    needed, where, hint = tp * dp * cp, "plan.cp" if cp > 1 else "plan", "use smaller sizes or more nodes"
    message = f"TP {tp} x PP {pp} x DP {dp}{cp_factor} needs {needed * pp} GPUs, there are {ranks.total()}"
    yield needed * pp > ranks.total(), message, hint, where
    largest, ep = max(ranks.values(), default=0), (options.ep or 1) * etp if model.experts.count else 0
    stage = f"with {ep_name}" if ep > needed else f"of TP {tp} x DP {dp}{cp_factor}"
    message = f"a stage {stage} needs {max(needed, ep)} GPUs of one fabric, the largest has {largest}"
    yield cp > 1 and needed > largest, message, hint, where
    yield ep and max(needed, ep) > largest, message, hint, "plan.ep"


def raise_out_of_memory(evaluator: Evaluator, placements: list[Placement]) -> NoReturn:
    """Raise PlanError because none of `placements` fits in memory or suits the options. For memory, the hint is to
    remove options if the model fits without them, otherwise to change the GPUs, the batch or the number of nodes."""
    o, model = evaluator.options, evaluator.model
    least = _least_shortage(evaluator, placements)
    if least is None or least.fits:  # memory is not the cause: the options exclude every placement
        causes = [
            f"plan.{name}={list(value) if isinstance(value, tuple) else value}"
            for name in ("layers_per_stage", "virtual_stages", "partition", "schedule")
            if (value := getattr(o, name)) not in (None, "exact", "auto")
        ]
        hint = (
            "change one: each virtual stage but the first and the last needs a layer, and with virtual stages the"
            " number of micro-batches must be a multiple of PP"
        )
        raise PlanError(f"no placement can have {' and '.join(causes) or 'these options'}", where="plan", hint=hint)
    message = f"{model.name} does not fit: at best ({_sizes(least)}, recompute {_recompute(o)}) {least}"
    where, hint = "memory", ""
    limits = tuple(name for name, default in DEFAULTS.items() if getattr(o, name) != default)
    for names in [*((name,) for name in limits), *([limits] if len(limits) > 1 else [])]:
        relaxed = replace(o, **{name: DEFAULTS[name] for name in names})
        shortage_without = _search_shortage(evaluator.problem._replace(options=relaxed))
        if shortage_without is not None and shortage_without.fits:
            where = ", ".join(f"plan.{name}" for name in names)
            hint = f"remove {where}: {_sizes(shortage_without)}, recompute {_recompute(relaxed)} fits"
            break
    else:
        unrestricted = evaluator.problem._replace(options=replace(o, **DEFAULTS))
        unrestricted_shortage = _search_shortage(unrestricted) or least
        hint = f"{'remove plan.nodes and ' * bool(o.nodes)}use GPUs of {unrestricted_shortage.gpu_gib} GiB" + "".join(
            f", or {change}" for change in _fitting_changes(unrestricted, unrestricted_shortage)
        )
        if cpus := ", ".join(pool.name for pool in evaluator.site.pools if pool.gpu.is_cpu):
            hint += f"; {cpus} is planned without GPUs: if it has some, describe them in a site file (`gpu:`)"
    raise OutOfMemory(message, where=where, hint=hint)


# Keys of `plan` that can keep a model from fitting. Their defaults leave the choice to the planner.
_LIMITING: tuple[str, ...] = ("distributed_optimizer", "max_memory_gib", "recompute", "layers_per_stage")
_LIMITING += ("virtual_stages", "pp", "tp", "dp", "ep", "etp", "strategy", "nodes", "gpus_per_node")
DEFAULTS = {name: getattr(PlanOptions(), name) for name in _LIMITING}


def _fitting_changes(problem: Problem, missing: Shortage) -> Iterator[str]:
    """Yield changes of batch and site after which a search found a plan. `missing`: the shortage without a change."""
    batch, site = problem.batch, problem.site
    if batch.micro_size > 1:
        least = _search_shortage(problem._replace(batch=replace(batch, micro_size=1)))
        if least is not None and least.fits:
            yield "batch.micro_size=1"
    first_factor = int(-(-missing.needed_bytes // missing.usable_bytes))
    for factor in (first_factor, 2 * first_factor):
        pools = tuple(replace(pool, nodes=factor * pool.nodes, node_names=()) for pool in site.pools)
        least = _search_shortage(problem._replace(site=replace(site, pools=pools)))
        if least is not None and least.fits:
            yield f"{factor} times as many nodes"
            return


def _search_shortage(problem: Problem) -> Shortage | None:
    """Return the smallest memory shortage of all placements of a problem; None if no placement is possible."""
    unlimited = replace(problem.options, max_memory_gib=float("inf"), search_micro_size=False)
    try:
        placements = Space(problem._replace(options=unlimited)).placements()
        return _least_shortage(Evaluator(problem), placements)
    except PlanError:
        return None


def _least_shortage(evaluator: Evaluator, placements: list[Placement]) -> Shortage | None:
    """Return the smallest memory shortage of `placements`; None if no placement suits the user's layers per stage.
    Raise the last PlanError if no placement has a valid layout."""
    o, chunks = evaluator.options, evaluator.options.virtual_stages or 1
    shortages, error = list[Shortage](), None
    kind = candidate_schedules(o.schedule, chunks, background=False)[-1]
    for placement in sorted(placements, key=lambda p: (-p.tp * p.pp, p.sort_key()))[:MAX_PLACEMENTS]:
        try:
            layout = evaluator.layout(placement, _recompute(o), kind, chunks)
            layers = chunk_layers(o.layers_per_stage, chunks) if o.layers_per_stage else uniform_layers(layout)
            if layers.shape[1] == placement.pp:
                shortages.append(shortage(layout, layers, o.max_memory_gib))
        except PlanError as e:
            error = e
    if error and not shortages:
        raise error
    return min(shortages, key=lambda s: s.missing_bytes, default=None)


def _sizes(least: Shortage) -> str:
    p = least.parallel
    return f"TP {p.tp}, PP {p.pp}, DP {p.dp}"


def _recompute(o: PlanOptions) -> str:
    """Return the recomputation with the least memory that the options allow."""
    return "full" if o.recompute == "auto" else o.recompute
