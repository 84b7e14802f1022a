"""The best layout that shares the micro-batches of a step among different pools of one fabric.

Each pool runs whole pipelines, and each pipeline gets micro-batches in proportion to its speed. The pools exchange
gradients and parameters by RDMA, and no pipeline crosses pools.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf

from holmes_hpc.config.plan_options import RECOMPUTE
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.nodes import grouped
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import fits
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, Parallel, StageParallel
from holmes_hpc.planning.plan.parts import Component, Schedule
from holmes_hpc.planning.schedule.kinds import PER_STAGE
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.search.candidate import BUCKETS
from holmes_hpc.planning.search.explore import Clock
from holmes_hpc.planning.search.layers import uniform_layers
from holmes_hpc.planning.search.per_stage import FREE_VALUES, conflicting_option
from holmes_hpc.planning.search.placement import Block, component
from holmes_hpc.planning.search.problem import (
    BUCKET_BYTES,
    AvailablePool,
    Problem,
    Solution,
    available_pools,
    micro_sizes,
    timed,
    tp_sizes,
)

MAX_STAGES = 16  # the most stages of a pipeline

# Plan options with the values under which pools may share the micro-batches of a step.
_FREE_VALUES = {name: values for name, values in FREE_VALUES.items() if name not in ("dp", "pool_order", "partition")}
_FREE_VALUES |= {"strategy": ("auto", "hierarchical-dp"), "unequal": ("auto", "true")}
_FREE_VALUES["schedule"] = ("auto", PER_STAGE.name)


def best_shared_steps(problem: Problem, clock: Clock | None = None) -> Solution | None:
    """Return the layout with the shortest step on several pools of one fabric; None if no such layout is possible or
    allowed. The time limit of `clock` applies only after a first layout is found."""
    clock = clock or Clock()
    options = problem.options
    if conflicting_option(options, problem.costs, _FREE_VALUES):
        return None
    available = (a for a in available_pools(problem.site, options) if a.pool.nic.rdma)
    choices = [
        pools
        for _, fabric_pools in grouped((a.pool.fabric_name, a) for a in available)
        for count in range(len(fabric_pools), 1, -1)
        if not (options.nodes and count < len(options.nodes))
        for pools in combinations(fabric_pools, count)
    ]
    best: Solution | None = None
    for pools in choices:
        if best is not None and clock.is_over():
            break
        limit_s = best.seconds if best else inf
        shorter = (c for c in _candidates(problem, pools, limit_s) if c.seconds < limit_s)
        best = min(shorter, key=lambda c: c.seconds, default=best)
    if best is None or options.bucket_bytes:
        return best
    layouts = (best.layout.with_settings(bucket_bytes=size) for size in (BUCKET_BYTES, *BUCKETS))
    return min((timed(best, layout=layout) for layout in layouts), key=lambda solution: solution.seconds)


def _candidates(problem: Problem, pools: Sequence[AvailablePool], limit_s: float) -> Iterator[Solution]:
    """Yield, for each micro-batch size, TP and PP, the layout with the least recomputation that fits in memory.
    Sizes at which the layers alone take `limit_s` seconds or more are left out."""
    model, batch, _, options, costs = problem
    recomputations = RECOMPUTE if options.recompute == "auto" else (options.recompute,)
    for micro_size in micro_sizes(batch, options) if not batch.global_size % batch.micro_size else ():
        for tp in tp_sizes(model, options, pools):
            micro_batch = replace(batch, micro_size=micro_size)
            layer_s = (sum(costs.layer_s(model, micro_batch, tp, a.pool, tp > 1, "none")) for a in pools)
            layers_per_s = sum(a.nodes * a.gpus_per_node / tp / s for a, s in zip(pools, layer_s, strict=True))
            if batch.global_size / micro_size * model.layers / layers_per_s >= limit_s:
                continue
            for pp in range(1, min(MAX_STAGES, model.layers) + 1):
                if any(a.gpus_per_node % tp for a in pools) or options.stages not in (None, pp):
                    continue
                for recompute in recomputations:
                    layout = _layout(problem, pools, micro_size, tp=tp, pp=pp, recompute=recompute)
                    if layout is None or options.dp not in (None, layout.parallel.dp):
                        break
                    layers = uniform_layers(layout)
                    if fits(layout, layers, options.max_memory_gib)[0]:
                        yield timed(Solution(layout, layers))
                        break


def _layout(
    problem: Problem, pools: Sequence[AvailablePool], micro_size: int, tp: int, pp: int, recompute: str
) -> Layout | None:
    """Return the layout with the most pipelines of `pp` stages that fill whole nodes in each pool. Return None if a
    pool or a user-fixed node gets no pipeline, or if a pipeline gets no micro-batch."""
    model, batch, _, _, costs = problem
    components, speeds = list[Component](), list[float]()
    batch = replace(batch, micro_size=micro_size)
    for available in pools:
        nodes = next((n for n in range(available.nodes, 0, -1) if n * available.gpus_per_node % (tp * pp) == 0), 0)
        if not nodes or (available.is_fixed and nodes < available.nodes):
            return None
        pipelines = nodes * available.gpus_per_node // (tp * pp)
        layer_s = sum(costs.layer_s(model, batch, tp, available.pool, tp > 1, recompute))
        components.append(component(Block(available.pool, nodes, available.gpus_per_node, pp), first_stage=0))
        speeds += [1 / layer_s] * pipelines
    stage = StageParallel(tp, len(speeds), tuple(speed / min(speeds) for speed in speeds))
    try:
        parallel = Parallel((stage,) * pp, order=HIERARCHICAL_ORDER, sequence_parallel=tp > 1)
        fewest_micro_batches = min(Counter(parallel.routes(batch.micro_batches(1))[0]).values())
    except PlanError:  # more pipelines than micro-batches
        return None
    return problem.layout(
        parallel,
        batch=batch,
        recompute=recompute,
        schedule=Schedule(PER_STAGE.name, tuple(min(n, fewest_micro_batches) for n in least_in_flight((1,) * pp))),
        components=tuple(components),
    )
