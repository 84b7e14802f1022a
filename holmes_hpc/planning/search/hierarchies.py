"""Hierarchical placements: every pipeline is inside one pool, and data parallelism crosses the pools.

On a single pool, every pipeline is inside one node. The data-parallel ranks are divided into optimizer instances of
equal size, each inside one pool. In this module, tau is the forward and backward time of one micro-batch in the layers
of the slowest stage, in seconds.
"""

from collections.abc import Iterator, Sequence
from math import gcd, isinf, lcm
from typing import Any

import numpy as np

from holmes_hpc.planning.search.estimate import Estimate, Limit
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.pool_costs import PoolCosts
from holmes_hpc.planning.search.problem import divisors

MAX_STAGES = 64


def hierarchies(costs: PoolCosts, dp: int, limit: Limit) -> Iterator[Placement]:
    """Yield the hierarchical placements of `dp` pipelines that `limit` admits, with the largest optimizer instances."""
    fixed_pp, edge_s = costs.options.stages, 1 / costs.between_gbps(1)  # seconds to send 1 Gb between two pools
    pp_sizes = np.array([fixed_pp] if fixed_pp else range(1, min(costs.layers, MAX_STAGES) + 1))
    pp_sizes = pp_sizes[(pp_sizes <= costs.layers) & (pp_sizes * costs.tp * dp <= costs.ranks.sum())]
    per_stage, chunks = -(-costs.layers // pp_sizes), costs.max_chunks_array(pp_sizes, costs.micro_batches // dp)
    bounds = _slowest_pipeline(costs, pp_sizes, chunks, dp, float(costs.layer_s.min())).least_seconds()
    bounds = np.where(per_stage * costs.layer_bytes.min() <= costs.capacity_bytes.max(), bounds, np.inf)
    for index in np.argsort(bounds, kind="stable").tolist():
        if bounds[index] > limit.max_s() or np.isinf(bounds[index]):
            return
        pp = int(pp_sizes[index])
        units = [gpus // gcd(gpus, pp * costs.tp) for gpus in costs.gpus_per_node.tolist()]
        maxima = [ranks // (pp * costs.tp) // u * u for ranks, u in zip(costs.ranks.tolist(), units, strict=True)]
        for counts, instance_dp in _splits(costs, dp, pp, limit, maxima, units):
            used = costs.order_pools([f for f, n in enumerate(counts) if n], edge_s, is_ring=True)
            estimate = _estimate(costs, dp, pp, used, instance_dp)
            if limit.admit(float(estimate.least_seconds()), frozenset(costs.available[f].pool.name for f in used)):
                ranks_and_stages = {f: (counts[f] * pp * costs.tp, pp) for f in used}
                yield costs.placement("hierarchical-dp", dp, ranks_and_stages, estimate, instances=dp // instance_dp)


def _slowest_pipeline(
    costs: PoolCosts, pp: Any, chunks: Any, dp: int, layer_s: float, transfer: float = 0.0, exposed: float = 0.0
) -> Estimate:
    """Estimate the step of the slowest pipeline. `pp`: the number of stages, or an array of numbers. `chunks`: the most
    virtual stages for each `pp`. In seconds, `layer_s`: one layer for one micro-batch; `transfer`: one stage transfer;
    `exposed`: traffic that nothing hides."""
    maximum = np.maximum if isinstance(pp, np.ndarray) else max
    tau = -(-costs.layers // pp) * layer_s
    head = maximum(costs.head_s / pp, (pp > 1) * (costs.head_s + layer_s - tau))  # the last stage has a layer, too
    return Estimate(
        costs.micro_batches // dp,
        pp,
        tau,
        head=head,
        transfer=transfer,
        round_trip=2 * transfer * (pp - 1),
        reduce=0.0,
        exposed=exposed,
        front_loaded_share=1.0,
        max_chunks=chunks,
    )


def _is_too_slow(
    costs: PoolCosts, dp: int, pp: int, limit: Limit, choice: Sequence[int], names: frozenset[str]
) -> bool:
    """Return whether the compute time of pipelines of `pp` stages in the pools `choice` exceeds the limit."""
    max_s = limit.max_s(names)
    if isinf(max_s):
        return False
    layer_s, micro_batches = max(costs.layer_s_list[f] for f in choice), costs.micro_batches // dp
    tau = -(-costs.layers // pp) * layer_s
    return micro_batches * (tau + costs.head_s / pp) + (pp - 1) * tau / costs.max_chunks(pp, micro_batches) > max_s


def _splits(
    costs: PoolCosts, dp: int, pp: int, limit: Limit, maxima: Sequence[int], units: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (pipelines of each pool, DP of an optimizer instance) for each choice of pools that `limit` may admit: two
    or more pools, or one whose nodes each hold whole pipelines of several stages. `maxima`: the most pipelines in each
    pool. `units`: the fewest pipelines that fill whole nodes of each pool."""
    may_be_single = pp > 1 and (costs.options.strategy == "auto" or len(costs.available) == 1)
    single_pools = np.flatnonzero(may_be_single & (costs.gpus_per_node % (pp * costs.tp) == 0)).tolist()
    if costs.is_fixed:
        if sum(maxima) == dp and all(maxima) and (len(maxima) > 1 or single_pools):
            yield tuple(maxima), gcd(*maxima)
        return
    for choice, names in costs.pool_choices:
        can_fit = sum(maxima[f] for f in choice) >= dp and (len(choice) > 1 or choice[0] in single_pools)
        if not can_fit or _is_too_slow(costs, dp, pp, limit, choice, names):
            continue
        largest_first = sorted(choice, key=lambda f: (-maxima[f], f))
        for instance_dp in (dp,) if len(choice) == 1 else reversed(divisors(dp)):
            increments = {f: lcm(instance_dp, units[f]) for f in choice}
            counts = [increments.get(f, 0) for f in range(len(maxima))]  # every pool gets a share
            unassigned = dp - sum(counts)
            if unassigned < 0 or any(counts[f] > maxima[f] for f in choice):
                continue
            for f in largest_first:
                extra = min(unassigned, maxima[f] - counts[f]) // increments[f] * increments[f]
                counts[f] += extra
                unassigned -= extra
            if unassigned == 0:
                yield tuple(counts), instance_dp
                break


def _estimate(costs: PoolCosts, dp: int, pp: int, used: list[int], instance_dp: int) -> Estimate:
    """Estimate the step time of pipelines in the pools `used`, with optimizer instances of `instance_dp` ranks."""
    per_stage, chunks = -(-costs.layers // pp), costs.max_chunks(pp, costs.micro_batches // dp)
    across = (
        costs.cached(costs.ring_s, tuple(used), instance_dp * pp * costs.tp) * per_stage / instance_dp
        if instance_dp < dp
        else 0.0
    )
    reduce, gather = costs.cached(costs.sync_s, instance_dp, min(pp, costs.node_stride))
    layer_s = max(costs.layer_s_list[f] for f in used)
    sharing = min(pp, max(costs.available[f].gpus_per_node for f in used) // costs.tp)  # stages that share a node's NIC
    backward = per_stage * 2 / 3 * layer_s  # hides gradient traffic
    exposed_reduce = max(0.0, per_stage * sharing * max(float(reduce[f]) for f in used) + across - backward)
    gathers = 1 if costs.cost_model.software.aligned_gather else pp  # stages gather one after another unless aligned
    exposed = exposed_reduce + per_stage * sharing * gathers * max(float(gather[f]) for f in used)
    inside, _ = costs.cached(costs.transfers_s, 1)  # needed by pipelines that are longer than a node
    transfer = max((float(inside[f]) for f in used if pp * costs.tp > costs.available[f].gpus_per_node), default=0.0)
    return _slowest_pipeline(costs, pp, chunks, dp, layer_s=layer_s, transfer=transfer, exposed=exposed)
