"""Placements whose stages lie in one fabric after the other.

Every stage is one block of TP x DP GPUs. For given TP and DP a fabric holds so many stages, and what counts about a
placement is the longest time tau that any stage needs for a micro-batch. So for each tau that a whole number of layers
can give, each choice of fabrics is filled in order until all layers are dealt out: fewer stages would not reach tau,
more would only lengthen the fill. Where there are few combinations all of them are listed instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import numpy as np

from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.schedule.kinds import schedule_kind
from holmes_hpc.planning.search.estimate import Estimate, Limit, required
from holmes_hpc.planning.search.placement import Placement, least_edges
from holmes_hpc.planning.search.problem import allowed
from holmes_hpc.planning.search.uniform import OneSize

FEW = 512  # combinations up to which all are listed
KEPT = 32  # placements of one TP, DP and micro-batch size at most, and beside them
EARLY = 0.5  # of the traffic between data-parallel ranks is left at least where layers move to the first stages
FIRST = 2  # of each fabric alone, each pair, and all


def pipelines(size: OneSize, dp: int, limit: Limit) -> Iterator[Placement]:
    """Those of `size` with blocks that fill whole nodes, as far as `limit` allows them."""
    block, options, layers = size.tp * dp, size.options, size.layers
    if all(size.least_on(dp, chosen) > limit.most(names) for chosen, names in size.choices):
        return
    units = np.array([per // gcd(per, block) for per in size.per_node.tolist()])
    most = np.minimum(size.ranks // block, layers) // units * units
    if size.fixed:
        if (size.ranks % block).any():
            return
        counts = (size.ranks // block)[None]
        tau = _tau(size, counts)
    elif np.prod(most // units + 1.0) <= FEW:
        counts = np.stack(
            np.meshgrid(*(np.arange(0, m + 1, u) for m, u in zip(most, units, strict=True)), indexing="ij"), axis=-1
        ).reshape(-1, len(most))
        tau = _tau(size, counts)
    else:
        counts, tau = _filled(size, dp, most, units, limit)
    kept = allowed(options, layers, counts.sum(axis=1), (counts > 0).sum(axis=1)) & np.isfinite(tau)
    counts, tau = counts[kept], tau[kept]
    if not len(counts):
        return
    estimate = _estimate(size, counts, tau, dp)
    seconds = estimate.least()
    for at in _worth_a_look(counts, seconds):
        chosen = np.flatnonzero(counts[at]).tolist()
        names = frozenset(size.offers[f].fabric.name for f in chosen)
        if not limit.allows(float(seconds[at]), names):
            continue
        chosen = size.in_order(chosen, size.known(size.transfers_s, dp)[1])
        held = {f: (int(counts[at, f]) * block, int(counts[at, f])) for f in chosen}
        yield size.placement("one-fabric" if len(held) == 1 else "pipeline", dp, held, estimate.at(at))


def _worth_a_look(counts: np.ndarray, seconds: np.ndarray) -> list[int]:
    """The rows with the least `seconds`, and with them the best of each fabric, each pair and all."""
    order, used = np.argsort(seconds, kind="stable"), counts > 0
    kept = [order[:KEPT]]
    code = (used @ (1 << np.arange(counts.shape[1])))[order]
    for one, first in zip(*np.unique(code, return_index=True), strict=True):
        if required(int(used[order[first]].sum()), counts.shape[1]):
            kept.append(order[np.flatnonzero(code == one)[:FIRST]])
    rows = np.unique(np.concatenate(kept))
    return [int(at) for at in rows[np.lexsort((rows, seconds[rows]))]]


def _filled(size: OneSize, dp: int, most: np.ndarray, units: np.ndarray, limit: Limit) -> tuple[np.ndarray, np.ndarray]:
    """(stages of each fabric, (rows, F); tau of each row): each choice of fabrics, filled up to each tau with each of
    its fabrics in turn as the last, which need not be full. Taus that `limit` does not allow are left out."""
    rows, taus, f_count = [np.zeros((0, len(most)), dtype=int)], [np.zeros(0)], len(most)
    speed = sorted(range(f_count), key=lambda f: (size.each[f], -size.offers[f].fabric.data_gbps, f))
    place = {f: at for at, f in enumerate(speed)}
    rate, micro_batches = (most / size.each).tolist(), size.shares // dp
    for choice, names in size.choices:
        together = sum(rate[f] for f in choice)
        if not together:
            continue
        first, end = np.searchsorted(
            size.taus, (size.layers / together * (1 - 1e-9), limit.most(names) / micro_batches)
        )
        tau, fits = size.taus[first:end], size.fit[first:end]
        if not len(tau):
            continue
        in_order = sorted(choice, key=lambda f: place[f])
        for last in in_order:
            left = np.full(len(tau), size.layers)
            counts = np.zeros((len(tau), f_count), dtype=int)
            for f in [f for f in in_order if f != last] + [last]:
                fit = np.maximum(fits[:, f], 1)
                need = -(-np.maximum(left, 0) // fit)
                need = -(-need // units[f]) * units[f]
                counts[:, f] = np.where(fits[:, f] > 0, np.minimum(need, most[f]), 0)
                left -= counts[:, f] * fits[:, f]
            rows.append(counts[left <= 0])
            taus.append(tau[left <= 0])
    counts, tau = np.concatenate(rows), np.concatenate(taus)
    code = counts @ (size.layers + 1.0) ** np.arange(f_count)  # the same stages again: keep the least tau
    best = np.lexsort((tau, code))
    first_of = best[np.concatenate([[True], np.diff(code[best]) != 0])] if len(best) else best
    return counts[first_of], tau[first_of]


def _tau(size: OneSize, counts: np.ndarray) -> np.ndarray:
    """Least time of the slowest stage with whole layers, (rows,)."""
    enough = np.minimum(size.fit, size.layers) @ counts.T >= size.layers  # (T, rows)
    return np.where(enough.any(axis=0), size.taus[np.argmax(enough, axis=0)], np.inf)


def _estimate(size: OneSize, counts: np.ndarray, tau: np.ndarray, dp: int) -> Estimate:
    """Of each row of stages of each fabric; infinite where the weights alone do not fit."""
    stages, micro_batches, used = counts.sum(axis=1), size.shares // dp, counts > 0
    reduce, gather = size.sync_s(dp)
    here = tau[:, None] / size.each * used  # layers of a stage in each fabric, of which not all are needed
    here *= np.minimum(1, size.layers / np.maximum((here * counts).sum(axis=1), 1e-9))[:, None]
    inside, across = size.known(size.transfers_s, dp)
    slowest, between = least_edges(across, used)
    transfers = 2 * ((counts * inside).sum(axis=1) + between)
    alone = size.tp * dp >= size.per_node  # no two stages on a node
    inner = np.where((counts > 2) & alone, 2, counts > 1)  # one NIC then carries both ways of a stage between two
    wire = np.maximum((inside * inner).max(axis=1), slowest)
    shard = size.held + layer_parameters(size.model, size.tp) * 8 / (dp if size.options.distributed_optimizer else 1)
    most = np.where(used, np.floor(size.room / shard), 0)  # what no stage is in may have room without end
    fits = (counts * most).sum(axis=1) >= size.layers
    behind = tau[:, None] / 3 if size.costs.software.overlap_gather else 0.0  # the first forward pass
    gathering = np.maximum(0, gather * here - behind)
    after = np.where(fits, (gathering * counts).sum(axis=1), np.inf)
    reducing = (reduce * here).max(axis=1) - (tau * 2 / 3 if size.costs.software.overlap else 0)
    least = np.where(stages > 1, size.head + size.each.min(), 0)  # the last stage has a layer beside the head
    head = np.maximum(size.head / stages, least - tau)
    wanted = size.options.schedule
    may_be_early = wanted == "auto" or schedule_kind(wanted).deepens
    early = EARLY if may_be_early and size.options.transport == "holmes" else 1.0
    return Estimate(
        micro_batches,
        stages,
        tau,
        head=head,
        wire=wire,
        transfers=transfers,
        reduce=reducing,
        after=after,
        early=early,
        most_chunks=size.all_chunks(stages, micro_batches),
    )
