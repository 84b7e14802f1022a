"""The planning problem and its choices: available nodes and GPUs per pool, TP and micro-batch sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, inf
from typing import Any, NamedTuple, TypeVar

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Pool, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.timing import step_s
from holmes_hpc.planning.plan.parallel import Parallel, indivisible_sizes
from holmes_hpc.planning.plan.parts import experts_and_cp_cases
from holmes_hpc.planning.schedule.simulation import ACCURATE

S = TypeVar("S", bound="Solution")
BUCKET_BYTES = 160_000_000  # Megatron-Core's default of 40 million gradients of 4 bytes
MAX_MICRO_SIZE = 32
# From this many tokens on, all CPs are tried. For shorter sequences, CPs above 1 are tried only if CP 1 does not fit.
LONG_SEQUENCE = 32768
_EXCLUDED = (  # features that experts and CP do not support: (name in messages, key of the options, value)
    ("per-stage TP/DP", "unequal", "true"),
    ("hierarchical data parallelism", "strategy", "hierarchical-dp"),
    ("zero_bubble", "schedule", "zero_bubble"),
)
MAX_POOLS = 10  # a search tries sets of pools, and their number grows exponentially with the number of pools


class Problem(NamedTuple):
    """A model and a batch to train on a site, the user's plan options, and the cost model."""

    model: ModelSpec
    batch: Batch
    site: Site
    options: PlanOptions
    costs: Costs

    @property
    def tries_weight_passes(self) -> bool:
        """Whether the search tries weight passes although the user did not choose them. They have not been timed on
        GPUs yet, so it does so only with emulated compute."""
        o = self.options
        return bool(o.schedule == "auto" and o.transport == "holmes" and self.costs.pace_layer_ms and self.is_plain)

    @property
    def is_plain(self) -> bool:
        """Whether there are neither experts nor context parallelism, which exclude some features."""
        return self.batch.cp == 1 and not self.model.experts.count

    def layout(self, parallel: Parallel, **fields: Any) -> Layout:
        """Return a layout with `parallel`, other fields of :class:`Layout`, and the fields that the problem fixes."""
        o = self.options
        fields |= {"edge_dtype": o.edge_dtype, "edge_connections": o.edge_connections, "transport_mode": o.transport}
        fields |= {"bucket_bytes": o.bucket_bytes or BUCKET_BYTES}
        return Layout(self.model, parallel=parallel, site=self.site, costs=self.costs, **fields)


@dataclass(frozen=True)
class Solution:
    """A layout with its layers.

    `layers`: the layers of each chunk, (1, S, C): S stages of C chunks. `seconds`: the simulated step time; infinite
    before the simulation. `notes`: lines to add to the plan's assumptions."""

    layout: Layout
    layers: np.ndarray
    seconds: float = inf
    notes: tuple[str, ...] = ()


def timed(solution: S, passes: int = ACCURATE, max_s: float = inf, **changes: Any) -> S:
    """Return a solution with its `changes` and its simulated step time. `passes`, `max_s`: as in :func:`step_s`."""
    changed = replace(solution, **changes) if changes else solution
    return replace(changed, seconds=float(step_s(changed.layout, changed.layers, passes, max_s)[0]))


@dataclass(frozen=True)
class AvailablePool:
    """A pool that a plan may use: at most `nodes` nodes (exactly `nodes` if `is_fixed`) of `gpus_per_node` ranks."""

    pool: Pool
    nodes: int
    gpus_per_node: int
    is_fixed: bool


def available_pools(site: Site, options: PlanOptions) -> list[AvailablePool]:
    """Return the pools that the options allow. Raise PlanError for pools, nodes or GPUs that the site lacks."""
    node_limits: Mapping[str, int | None] = options.nodes or {pool.name: None for pool in site.pools}
    pools = sorted((site.pool(name) for name in node_limits), key=site.pools.index)
    available = [
        AvailablePool(
            pool,
            node_limits[pool.name] or pool.nodes,
            options.gpus_per_node or pool.gpus_per_node,
            is_fixed=node_limits[pool.name] is not None,
        )
        for pool in pools
    ]
    unknown_names = [name for name in options.pool_order or () if name not in node_limits]
    largest_gib = max(inf if pool.gpu.is_cpu else pool.gpu.memory_gib for pool in pools)
    limit_gib = options.max_memory_gib or 0
    problem = f"it is {limit_gib:g}, the GPUs have {largest_gib:g} GiB"
    hint = f"use at most {largest_gib:g}, or correct memory_gib in the site file"
    PlanError.refuse("plan.max_memory_gib", (largest_gib < limit_gib < inf, problem, hint))
    hint = f"choose from {', '.join(node_limits)}"
    PlanError.refuse("plan.pool_order", (unknown_names, f"no pool {', '.join(unknown_names)}", hint))
    for a in available:
        problem, hint = f"{a.nodes} nodes requested, the site has {a.pool.nodes}", f"use at most {a.pool.nodes}"
        PlanError.refuse(f"plan.nodes.{a.pool.name}", (a.nodes > a.pool.nodes, problem, hint))
    for a in available:
        limit = a.pool.gpus_per_node
        problem = f"{a.gpus_per_node} GPUs per node requested, a node of pool {a.pool.name} has {limit}"
        PlanError.refuse("plan.gpus_per_node", (a.gpus_per_node > limit, problem, f"use at most {limit}"))
    return available


def searched_site(site: Site, options: PlanOptions) -> Site:
    """Return the site, reduced to the MAX_POOLS pools with most TFLOP/s unless ``plan.nodes`` names pools."""
    names, hint = list(options.nodes or ()), f"name at most {MAX_POOLS}"
    PlanError.refuse("plan.nodes", (len(names) > MAX_POOLS, f"it names {len(names)} pools", hint))
    if names or len(site.pools) <= MAX_POOLS:
        return site
    largest = sorted(site.pools, key=lambda pool: -pool.gpus * pool.gpu.peak_tflops)[:MAX_POOLS]
    restricted = site.restricted_to([pool for pool in site.pools if pool in largest])
    note = f"of {len(site.pools)} pools, only the {MAX_POOLS} with most TFLOP/s were tried: plan.nodes chooses others"
    return replace(restricted, assumptions=(*site.assumptions, note))


def with_cp(problem: Problem, cp: int, all_to_all: bool = False) -> Problem:
    """Return the problem in which `cp` ranks share each sequence: it becomes `cp` shorter sequences on `cp` replicas.
    Raise PlanError if the user set an option that experts or CP do not support."""
    model, options, sharding = problem.model, problem.options, problem.costs.software.sharding
    sizes = replace(options, cp=cp, cp_comm="a2a" if all_to_all else "ring")
    used = {name: getattr(options, k) == v for name, k, v in _EXCLUDED}
    PlanError.refuse("plan.ep", *experts_and_cp_cases(model, sizes, used))
    count = model.experts.count
    message = f"experts do not support sharding of {sharding}"
    is_refused = count and sharding in ("gradients", "full")
    PlanError.refuse("--sharding", (is_refused, message, "use none or optimizer"))
    return problem._replace(
        batch=problem.batch.split(cp, all_to_all),
        options=replace(
            options,
            dp=options.dp and options.dp * cp,
            ep=options.ep if count else 1,
            etp=options.etp if count else 1,
            unequal="false" if count or cp > 1 else options.unequal,
        ),
    )


def cp_choices(problem: Problem) -> list[tuple[int, bool]]:
    """Return the pairs (CP, whether ranks exchange by all-to-all) to try, in ascending order. `cp_comm=auto` tries
    all-to-all only for the user's CP, because attention mostly hides the ring exchange."""
    batch, options, heads = problem.batch, problem.options, problem.model.kv_heads
    is_a2a, is_excluded = options.cp_comm == "a2a", any(getattr(options, k) == v for _, k, v in _EXCLUDED)
    if options.cp or problem.model.dropout or is_excluded:
        cp = options.cp or 1
        tries_both = options.cp_comm == "auto" and cp > 1 and heads % (cp * (options.tp or 1)) == 0
        return [(cp, False), (cp, True)] if tries_both else [(cp, is_a2a)]
    node_gpus = max(a.gpus_per_node for a in available_pools(problem.site, options))
    sizes = [cp for cp in divisors(node_gpus) if batch.sequence_length % (2 * cp) == 0 and not (is_a2a and heads % cp)]
    return [(1, False), *((cp, is_a2a) for cp in sizes if cp > 1)]


def expert_sizes(model: ModelSpec, options: PlanOptions, ranks: int) -> list[tuple[int, int]]:
    """Return the pairs (EP, ETP) to try in stages of `ranks` ranks, by ascending product: the user's, or all. Of equal
    products, only that with the largest EP is tried: it needs as much memory, and its matrix products are larger."""
    if not model.experts.count:
        return [(1, 1)]
    etps = divisors(gcd(ranks, model.ffn_width)) if options.ep_comm == "allgather" else [1]
    sizes = [
        (ep * etp, ep, etp)
        for etp in ([options.etp] if options.etp else etps)
        for ep in divisors(gcd(ranks, etp * model.experts.count) // etp if ranks % etp == 0 else 0)
        if options.ep in (None, ep)
    ]
    return list({product: (ep, etp) for product, ep, etp in sorted(sizes)}.values())


def tp_sizes(model: ModelSpec, options: PlanOptions, available: Sequence[AvailablePool]) -> list[int]:
    """Return the TPs to try that divide the sizes of a layer: the user's TP, or all TPs up to the GPUs of a node."""
    sizes = [options.tp] if options.tp else range(1, max(a.gpus_per_node for a in available) + 1)
    return [tp for tp in sizes if not indivisible_sizes(model, tp)]


def is_allowed(options: PlanOptions, layers: int, stages: Any, pools: Any) -> Any:
    """Return whether a placement may have `stages` stages on `pools` pools (counts, or arrays of counts)."""
    has_valid_stages = (stages >= 1) & (stages <= layers) & (stages == (options.stages or stages))
    return has_valid_stages & {"one-fabric": pools == 1, "pipeline": pools > 1}.get(options.strategy, pools >= 1)


@lru_cache(maxsize=512)
def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def micro_sizes(batch: Batch, options: PlanOptions) -> list[int]:
    """Return the micro-batch sizes to try. That of `batch` comes first if it divides the global batch size."""
    if not options.search_micro_size:
        return [batch.micro_size]
    alternatives = [m for m in divisors(batch.global_size) if m <= MAX_MICRO_SIZE and m != batch.micro_size]
    return [*([] if batch.global_size % batch.micro_size else [batch.micro_size]), *alternatives]
