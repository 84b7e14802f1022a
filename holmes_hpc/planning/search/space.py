"""The search space: all promising placements, each with a quick estimate of its step time.

The estimates also help to find a nearby global batch size with more divisors, for example 512 instead of 511.
"""

from dataclasses import replace
from math import ceil, floor, gcd

from holmes_hpc.config.model import Batch
from holmes_hpc.errors import PlanError
from holmes_hpc.planning.search.estimate import FEW_PLACEMENTS, Limit
from holmes_hpc.planning.search.hierarchies import hierarchies
from holmes_hpc.planning.search.pipelines import pipelines
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.pool_costs import PoolCosts
from holmes_hpc.planning.search.problem import Problem, available_pools, divisors, expert_sizes, micro_sizes, tp_sizes

EVEN_MICRO_BATCHES = 16  # a batch with a multiple of this many micro-batches divides well
MAX_BATCH_CHANGE = 0.03  # a nearby batch size differs by at most this share
MAX_BATCHES_TRIED = 3
MIN_BATCH_GAIN = 0.05  # a nearby batch size is noted if it gains at least this share in samples per second

MARGIN = 1.3  # if there are many placements, those estimated up to this many times the least are listed first


class Space:
    """The placements of one problem."""

    def __init__(self, problem: Problem) -> None:
        model, batch, site, options, _ = problem
        self.model, self.batch, self.options = model, batch, options
        layers, self.available = options.layers_per_stage or (model.layers,), available_pools(site, options)
        message = f"layers_per_stage {list(layers)} are {sum(layers)} layers, {model.name} has {model.layers}"
        is_wrong = sum(layers) != model.layers
        PlanError.refuse("plan.layers_per_stage", (is_wrong, message, f"give numbers that sum to {model.layers}"))
        self._check_strategy()
        self._has_hierarchies = batch.cp == 1 and not model.experts.count
        self.is_complete = True  # set by placements(): no placement was pruned
        self._pool_costs: list[PoolCosts] = []
        for micro_size in micro_sizes(batch, options):
            for tp in tp_sizes(model, options, self.available) if batch.global_size % micro_size == 0 else ():
                usable = [a for a in self.available if a.gpus_per_node % tp == 0]
                lacks_sequence_parallel = batch.sequence_length % tp or (tp > 1 and options.sequence_parallel is False)
                if model.experts.count and lacks_sequence_parallel:
                    continue
                if batch.all_to_all and model.kv_heads % (tp * batch.cp):
                    continue
                if usable and (len(usable) == len(self.available) or not any(a.is_fixed for a in self.available)):
                    self._pool_costs.append(PoolCosts(problem, micro_size, tp, usable))

    def _check_strategy(self) -> None:
        """Raise PlanError if the user's strategy is impossible on the available pools."""
        o, pool, gpus = self.options, self.available[0].pool.name, self.available[0].gpus_per_node
        is_lone, tp, hint = len(self.available) == 1, o.tp or 1, "use one-fabric or auto, or add nodes of a second one"
        problem = f"a pipeline needs two pools or more, there is only {pool}"
        PlanError.refuse("plan.strategy", (o.strategy == "pipeline" and is_lone, problem, hint))
        if o.strategy == "hierarchical-dp":
            problem = f"hierarchical-dp in pool {pool} needs {2 * tp} GPUs per node for two stages; it has {gpus}"
            PlanError.refuse("plan.strategy", (is_lone and gpus < 2 * tp, problem, hint))
            is_unsharded, hint = o.distributed_optimizer is False, "use true or auto, or another plan.strategy"
            problem = "hierarchical-dp over several pools needs a sharded optimizer"
            PlanError.refuse("plan.distributed_optimizer", (is_unsharded and not is_lone, problem, hint))

    def placements(self, margin: float = MARGIN) -> list[Placement]:
        """Return all placements if few, else those that a Limit with `margin` keeps; by :meth:`Placement.sort_key`."""
        limit, placements = Limit(len(self.available), margin), list[Placement]()
        for _, index, dp in sorted(
            (costs.bound_s(dp, range(len(costs.available))), index, dp)
            for index, costs in enumerate(self._pool_costs)
            for dp in divisors(costs.micro_batches)
            if dp % self.batch.cp == 0
            and self.options.dp in (None, dp)
            and expert_sizes(self.model, self.options, self._pool_costs[index].tp * dp)
        ):
            if self.options.strategy != "hierarchical-dp":
                placements += pipelines(self._pool_costs[index], dp, limit)
            if self.options.strategy in ("auto", "hierarchical-dp") and self._has_hierarchies:
                placements += hierarchies(self._pool_costs[index], dp, limit)
        self.is_complete = limit.count <= FEW_PLACEMENTS
        return sorted((p for p in placements if p.estimate_s <= limit.max_s(p.pools)), key=Placement.sort_key)


def nearby_batch(problem: Problem, best: Placement, step_s: float) -> tuple[Batch, list[Placement]] | None:
    """Return (a nearby global batch that may give more samples per second, its placements). Return None if no nearby
    batch is estimated to gain MIN_BATCH_GAIN over `best` with `step_s` seconds, or if the batch should not change."""
    batch, options = problem.batch, problem.options
    if batch.cp > 1 or options.dp is not None or batch.global_size // best.micro_size % EVEN_MICRO_BATCHES == 0:
        return None
    unit, size = EVEN_MICRO_BATCHES * best.micro_size, batch.global_size
    smallest, largest = ceil(size * (1 - MAX_BATCH_CHANGE) / unit), floor(size * (1 + MAX_BATCH_CHANGE) / unit)
    sizes = [n * unit for n in range(max(1, smallest), largest + 1)]
    sizes.sort(
        key=lambda n: (-gcd(n // best.micro_size, best.gpus), -len(divisors(n // best.micro_size)), abs(n - size))
    )
    batches = [replace(batch, global_size=n, micro_size=best.micro_size) for n in sizes[:MAX_BATCHES_TRIED]]
    fixed = problem._replace(options=replace(options, search_micro_size=False))
    placements = {b: Space(fixed._replace(batch=b)).placements() for b in batches}  # sorted by estimate
    rates = {b: b.global_size / fastest.estimate_s for b in batches for fastest in placements[b][:1]}
    least_rate = max((1 + MIN_BATCH_GAIN) * (size / step_s), max(rates.values(), default=0) / (1 + MIN_BATCH_GAIN))
    return next(((b, placements[b]) for b in batches if rates.get(b, 0) > least_rate), None)
