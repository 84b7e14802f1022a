"""Pipeline placements: each pool holds consecutive stages.

Every stage is a block of TP x DP GPUs, so a pool holds at most a fixed number of stages. The quality of a placement
depends on tau, the longest time that any stage computes for one micro-batch. For each tau that a whole number of layers
can take, each choice of pools is filled with stages until all layers are assigned. Fewer stages would lengthen tau.
More stages would only take longer to fill the pipeline. If a choice of pools has at most FEW_COMBINATIONS combinations
of stage counts, all combinations are tried instead.
"""

from collections.abc import Iterator
from math import gcd

import numpy as np

from holmes_hpc.planning.schedule.kinds import schedule_kind
from holmes_hpc.planning.search.estimate import Estimate, Limit, is_always_tried
from holmes_hpc.planning.search.placement import Placement, spanning_tree_edges
from holmes_hpc.planning.search.pool_costs import PoolCosts
from holmes_hpc.planning.search.problem import is_allowed

FEW_COMBINATIONS = 512  # up to this number of combinations of stage counts on a choice of pools, all are listed
MAX_PLACEMENTS = 32  # the most placements of one TP, DP and micro-batch size
PLACEMENTS_PER_CHOICE = 2  # the best placements on each single pool, each pair and all pools are always added
FRONT_LOADED_SHARE = 0.5  # the least share of data-parallel traffic that remains if the first stages have more layers


def pipelines(costs: PoolCosts, dp: int, limit: Limit) -> Iterator[Placement]:
    """Yield the pipeline placements that fill whole nodes and that `limit` admits."""
    block, options, layers = costs.tp * dp, costs.options, costs.layers
    if all(costs.bound_s(dp, choice) > limit.max_s(names) for choice, names in costs.pool_choices):
        return
    # Per pool: the fewest stages that fill whole nodes, and the most stages.
    units = np.array([gpus // gcd(gpus, block) for gpus in costs.gpus_per_node.tolist()])
    maxima = np.minimum(costs.ranks // block, layers) // units * units
    if costs.is_fixed:
        if (costs.ranks % block).any():
            return
        counts = (costs.ranks // block)[None]
        is_enough = np.minimum(costs.layers_in_tau, costs.layers) @ counts.T >= layers  # (T, placements)
        tau = np.where(is_enough.any(axis=0), costs.taus[np.argmax(is_enough, axis=0)], np.inf)  # infinite: none
    else:
        counts, tau = _filled(costs, dp, maxima, units, limit)
    is_valid = is_allowed(options, layers, counts.sum(axis=1), (counts > 0).sum(axis=1)) & np.isfinite(tau)
    counts, tau = counts[is_valid], tau[is_valid]
    if not len(counts):
        return
    estimate = _estimate(costs, counts, tau, dp)
    seconds = estimate.least_seconds()
    for index in _shortest(counts, seconds):
        choice = np.flatnonzero(counts[index]).tolist()
        names = frozenset(costs.available[f].pool.name for f in choice)
        if not limit.admit(float(seconds[index]), names):
            continue
        choice = costs.order_pools(choice, costs.cached(costs.transfers_s, dp)[1])
        ranks_and_stages = {f: (int(counts[index, f]) * block, int(counts[index, f])) for f in choice}
        yield costs.placement(
            "one-fabric" if len(choice) == 1 else "pipeline", dp, ranks_and_stages, estimate.at(index)
        )


def _shortest(counts: np.ndarray, seconds: np.ndarray) -> list[int]:
    """Return the indices of the placements to keep, the shortest estimate first: the best of all, and the best on each
    single pool, each pair of pools and all pools. `counts`: the stages of each pool, (placements, P)."""
    order, used, pool_count = np.argsort(seconds, kind="stable"), counts > 0, counts.shape[1]
    selected = [order[:MAX_PLACEMENTS]]
    choices = (used @ (1 << np.arange(pool_count)))[order]  # the pools of each placement, one bit per pool
    for choice in np.unique(choices):
        with_choice = order[choices == choice]
        if is_always_tried(int(used[with_choice[0]].sum()), pool_count):
            selected.append(with_choice[:PLACEMENTS_PER_CHOICE])
    indices: list[int] = order[np.isin(order, np.concatenate(selected))].tolist()
    return indices


def _filled(
    costs: PoolCosts, dp: int, maxima: np.ndarray, units: np.ndarray, limit: Limit
) -> tuple[np.ndarray, np.ndarray]:
    """Return the placements within `limit` as (stages of each pool, (placements, P); tau, (placements,)). If a choice
    of pools has few combinations of stage counts, all are tried. Otherwise, for each tau, the pools are filled with
    stages that take at most tau, the fastest pool first. This is repeated with each pool of the choice as the last one,
    which need not be full. `maxima`: the most stages of each pool. `units`: the fewest that fill whole nodes."""
    all_counts, all_taus, pool_count = [np.zeros((0, len(maxima)), dtype=int)], [np.zeros(0)], len(maxima)
    layers_per_s, micro_batches = (maxima / costs.layer_s).tolist(), costs.micro_batches // dp
    for choice, names in costs.pool_choices:
        total_rate = sum(layers_per_s[f] for f in choice)
        if not total_rate:
            continue
        start, end = np.searchsorted(
            costs.taus, (costs.layers / total_rate * (1 - 1e-9), limit.max_s(names) / micro_batches)
        )
        tau, max_layers = costs.taus[start:end], costs.layers_in_tau[start:end]
        if not len(tau):
            continue
        if np.prod(maxima[list(choice)] // units[list(choice)] + 0.0) <= FEW_COMBINATIONS:
            numbers = [np.arange(units[f], maxima[f] + 1, units[f]) if f in choice else [0] for f in range(pool_count)]
            listed = np.stack(np.meshgrid(*numbers, indexing="ij"), axis=-1).reshape(-1, pool_count)
            is_enough = np.minimum(max_layers, costs.layers) @ listed.T >= costs.layers  # (T, placements)
            is_possible = is_enough.any(axis=0)
            all_counts.append(listed[is_possible])
            all_taus.append(tau[np.argmax(is_enough, axis=0)[is_possible]])
            continue
        fastest_first = sorted(choice, key=lambda f: (costs.layer_s_list[f], -costs.available[f].pool.data_gbps, f))
        for last in fastest_first:
            unassigned = np.full(len(tau), costs.layers)
            counts = np.zeros((len(tau), pool_count), dtype=int)
            for f in [f for f in fastest_first if f != last] + [last]:
                per_stage = np.maximum(max_layers[:, f], 1)
                stages = -(-np.maximum(unassigned, 0) // per_stage)
                stages = -(-stages // units[f]) * units[f]
                counts[:, f] = np.where(max_layers[:, f] > 0, np.minimum(stages, maxima[f]), 0)
                unassigned -= counts[:, f] * max_layers[:, f]
            all_counts.append(counts[unassigned <= 0])
            all_taus.append(tau[unassigned <= 0])
    counts, tau = np.concatenate(all_counts), np.concatenate(all_taus)
    by_tau = np.argsort(tau, kind="stable")
    codes = counts @ (costs.layers + 1.0) ** np.arange(pool_count)  # equal for equal stage counts
    unique = by_tau[np.unique(codes[by_tau], return_index=True)[1]]  # the least tau of equal stage counts
    return counts[unique], tau[unique]


def _estimate(costs: PoolCosts, counts: np.ndarray, tau: np.ndarray, dp: int) -> Estimate:
    """Estimate the step time of each placement; infinite if layers do not fit in memory even without activations."""
    stages, micro_batches, used = counts.sum(axis=1), costs.micro_batches // dp, counts > 0
    reduce, gather = costs.sync_s(dp)
    layers = tau[:, None] / costs.layer_s * used  # that a stage of each pool can compute in tau
    layers *= np.minimum(1, costs.layers / np.maximum((layers * counts).sum(axis=1), 1e-9))[:, None]  # no more than all
    inside, between = costs.cached(costs.transfers_s, dp)
    slowest_edge, all_edges = spanning_tree_edges(between, used)
    round_trip = 2 * ((counts * inside).sum(axis=1) + all_edges)
    fills_node = costs.tp * dp >= costs.gpus_per_node  # no two stages share a node
    directions = np.where((counts > 2) & fills_node, 2, counts > 1)  # a middle stage's NIC carries two edges
    transfer = np.maximum((inside * directions).max(axis=1), slowest_edge)
    optimizer_shards = 1 if costs.options.distributed_optimizer is False else dp
    layer_bytes = costs.layer_bytes + costs.layer_size * 8 / optimizer_shards
    max_layers = np.where(used, np.floor(costs.capacity_bytes / layer_bytes), 0)  # capacity may be infinite
    fits = (counts * max_layers).sum(axis=1) >= costs.layers
    software = costs.cost_model.software
    first_forward = tau[:, None] / 3 if software.overlap_gather else 0.0
    exposed_gather = np.maximum(0, gather * layers - first_forward)
    waits = exposed_gather.max(axis=1) if software.aligned_gather else (exposed_gather * counts).sum(axis=1)
    exposed = np.where(fits, waits, np.inf)
    exposed_reduce = (reduce * layers).max(axis=1) - (tau * 2 / 3 if software.overlap else 0)
    last_stage_s = np.where(stages > 1, costs.head_s + costs.layer_s.min(), 0)  # with one layer and the head
    head = np.maximum(costs.head_s / stages, last_stage_s - tau)
    schedule = costs.options.schedule
    may_front_load = (schedule == "auto" or schedule_kind(schedule).deepens) and costs.options.transport == "holmes"
    return Estimate(
        micro_batches,
        (layers * costs.layer_s * counts).sum(axis=1) / tau,
        tau,
        head=head,
        transfer=transfer,
        round_trip=round_trip,
        reduce=exposed_reduce,
        exposed=exposed,
        front_loaded_share=FRONT_LOADED_SHARE if may_front_load else 1.0,
        max_chunks=costs.max_chunks_array(stages, micro_batches),
    )
