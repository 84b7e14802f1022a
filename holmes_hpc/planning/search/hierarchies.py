"""Placements with whole pipelines in each fabric, or in each node of one, and data parallel across them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import gcd, isinf, lcm
from typing import Any

import numpy as np

from holmes_hpc.planning.search.estimate import Estimate, Limit
from holmes_hpc.planning.search.placement import Placement
from holmes_hpc.planning.search.problem import divisors
from holmes_hpc.planning.search.uniform import OneSize

DEEPEST = 64  # stages at most


def hierarchies(size: OneSize, dp: int, limit: Limit) -> Iterator[Placement]:
    """Those of `size` with the largest optimizer instances that are equal, as far as `limit` allows them."""
    wanted, slowness = size.options.stages, 1 / size.between
    depths = np.array([wanted] if wanted else range(1, min(size.layers, DEEPEST) + 1))
    depths = depths[(depths <= size.layers) & (depths * size.tp * dp <= size.ranks.sum())]
    per_stage = -(-size.layers // depths)
    least = _replica(size, depths, size.all_chunks(depths, size.shares // dp), dp, float(size.each.min())).least()
    least = np.where(per_stage * size.held.min() <= size.room.max(), least, np.inf)
    for at in np.argsort(least, kind="stable").tolist():
        if least[at] > limit.most() or np.isinf(least[at]):
            return
        pp = int(depths[at])
        units = [per // gcd(per, pp * size.tp) for per in size.per_node.tolist()]
        most = [ranks // (pp * size.tp) // u * u for ranks, u in zip(size.ranks.tolist(), units, strict=True)]
        for counts, run in _splits(size, dp, most, units, _alone(size, pp), partial(_too_slow, size, dp, pp, limit)):
            used = size.in_order([f for f, n in enumerate(counts) if n], slowness, ring=True)
            estimate = _estimate(size, dp, pp, used, run)
            if limit.allows(float(estimate.least()), frozenset(size.offers[f].fabric.name for f in used)):
                held = {f: (counts[f] * pp * size.tp, pp) for f in used}
                yield size.placement("hierarchical-dp", dp, held, estimate, instances=dp // run)


def _replica(
    size: OneSize, pp: Any, chunks: Any, dp: int, each: float, wire: float = 0.0, after: float = 0.0
) -> Estimate:
    """Of the slowest pipeline, of `pp` stages (a number or an array) and at most `chunks` virtual ones; `wire`: of one
    of its stage transfers, `after`: what crosses fabrics."""
    most = np.maximum if isinstance(pp, np.ndarray) else max
    tau = -(-size.layers // pp) * each
    head = most(size.head / pp, (pp > 1) * (size.head + each - tau))  # the last stage has a layer beside the head
    return Estimate(
        size.shares // dp,
        pp,
        tau,
        head=head,
        wire=wire,
        transfers=2 * wire * (pp - 1),
        reduce=0.0,
        after=after,
        early=1.0,
        most_chunks=chunks,
    )


def _too_slow(size: OneSize, dp: int, pp: int, limit: Limit, chosen: Sequence[int], names: frozenset[str]) -> bool:
    """Whether computing alone makes pipelines of `pp` stages in the fabrics `chosen` longer than is allowed."""
    most = limit.most(names)
    if isinf(most):
        return False
    each, micro_batches = max(size.seconds[f] for f in chosen), size.shares // dp
    tau = -(-size.layers // pp) * each
    return micro_batches * (tau + size.head / pp) + (pp - 1) * tau / size.most_chunks(pp, micro_batches) > most


def _alone(size: OneSize, pp: int) -> frozenset[int]:
    """The fabrics that pipelines of `pp` stages may have to themselves: where each lies in a node. Longer ones in one
    fabric are :mod:`.pipelines`'. Told a hierarchy, several fabrics are all meant."""
    if pp == 1 or (size.options.strategy != "auto" and len(size.offers) > 1):
        return frozenset()
    return frozenset(f for f, per in enumerate(size.per_node.tolist()) if per % (pp * size.tp) == 0)


def _splits(
    size: OneSize,
    dp: int,
    most: Sequence[int],
    units: Sequence[int],
    alone: frozenset[int],
    left_out: Callable[[Sequence[int], frozenset[str]], bool],
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Pipelines of each fabric, and the size of an optimizer instance, for each choice of two or more fabrics, or one
    `alone`, that is not `left_out`."""
    if size.fixed:
        if sum(most) == dp and all(most) and (len(most) > 1 or alone):
            yield tuple(most), gcd(*most)
        return
    for chosen, names in size.choices:
        is_alone = len(chosen) == 1
        if (is_alone and chosen[0] not in alone) or sum(most[f] for f in chosen) < dp or left_out(chosen, names):
            continue
        by_room = sorted(chosen, key=lambda f: (-most[f], f))
        for run in (dp,) if is_alone else reversed(divisors(dp)):
            steps = {f: lcm(run, units[f]) for f in chosen}
            made = [steps.get(f, 0) for f in range(len(most))]  # each fabric has a part
            left = dp - sum(made)
            if left < 0 or any(made[f] > most[f] for f in chosen):
                continue
            for f in by_room:
                more = min(left, most[f] - made[f]) // steps[f] * steps[f]
                made[f] += more
                left -= more
            if left == 0:
                yield tuple(made), run
                break


def _estimate(size: OneSize, dp: int, pp: int, used: list[int], run: int) -> Estimate:
    """Of pipelines in the fabrics `used`, with optimizer instances of `run` ranks."""
    per_stage = -(-size.layers // pp)
    across = size.known(size.around_s, tuple(used)) * per_stage / run if run < dp else 0.0
    reduce, gather = size.known(size.sync_s, run, min(pp, size.whole_node))
    each = max(size.seconds[f] for f in used)
    stages = min(pp, max(size.offers[f].per_node for f in used) // size.tp)  # of a node, which share its NIC
    backward = per_stage * 2 / 3 * each  # hides that much of the gradients' traffic
    reducing = max(0.0, per_stage * stages * max(float(reduce[f]) for f in used) + across - backward)
    after = reducing + per_stage * stages * pp * max(float(gather[f]) for f in used)
    inside, _ = size.known(size.transfers_s, 1)  # of pipelines that are longer than a node
    wire = max((float(inside[f]) for f in used if pp * size.tp > size.offers[f].per_node), default=0.0)
    return _replica(size, pp, size.most_chunks(pp, size.shares // dp), dp=dp, each=each, wire=wire, after=after)
