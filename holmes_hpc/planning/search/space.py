"""The placements worth a look: TP, DP, stages of each fabric, with a quick estimate of each one's step time.

Every stage is one block of TP x DP GPUs. For given TP and DP a fabric holds so many stages, and what counts about a
placement is the longest time tau that any stage needs for a micro-batch. So for each tau that a whole number of layers
can give, each choice of fabrics is filled in order until all layers are dealt out: fewer stages would not reach tau,
more would only lengthen the fill. Where there are few combinations all of them are listed instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import gcd

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Fabric, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.memory import capacity

FEW = 512  # combinations up to which all are listed
SMALL = 300  # placements up to which estimates drop none
KEPT = 32  # placements of one TP, DP and micro-batch size at most
MARGIN = 1.3  # placements estimated slower than the best by more than this are dropped
LARGEST_MICRO = 32
MOST_CHUNKS = 8


@dataclass(frozen=True)
class Block:
    """`nodes` nodes of a fabric with `per_node` ranks each; they hold `stages` pipeline stages, or, in a hierarchical
    placement, `pipelines` whole pipelines."""

    fabric: Fabric
    nodes: int
    per_node: int
    stages: int
    pipelines: int = 0


@dataclass(frozen=True)
class Placement:
    """`estimate`: seconds of a step, good enough to rank placements. `instances`: of the distributed optimizer."""

    strategy: str
    micro: int
    tp: int
    dp: int
    blocks: tuple[Block, ...]
    estimate: float
    instances: int = 1

    @property
    def pp(self) -> int:
        return self.blocks[0].stages if self.strategy == "hierarchical-dp" else sum(b.stages for b in self.blocks)

    @property
    def gpus(self) -> int:
        return sum(b.nodes * b.per_node for b in self.blocks)

    def key(self) -> tuple[float, int, int, tuple[tuple[str, int], ...]]:
        return self.estimate, self.gpus, self.tp, tuple((b.fabric.name, b.nodes) for b in self.blocks)


@dataclass(frozen=True)
class Offer:
    """What one fabric offers: `nodes` at most (just as many if `fixed`), `per_node` ranks on each."""

    fabric: Fabric
    nodes: int
    per_node: int
    fixed: bool


def offers(site: Site, options: PlanOptions) -> list[Offer]:
    """The fabrics to plan with. Raises PlanError for a fabric, nodes or GPUs that the site does not have."""
    chosen = []
    wanted: Mapping[str, int | None] = options.nodes or {f.name: None for f in site.fabrics}
    for name in wanted:
        site.fabric(name)
    for name in options.fabric_order or ():
        if name not in wanted:
            raise PlanError(f"fabric_order names {name!r}", where="plan.fabric_order",
                            hint=f"it is one of {', '.join(wanted)}")
    for fabric in site.fabrics:
        if fabric.name not in wanted:
            continue
        nodes = wanted[fabric.name]
        if nodes is not None and nodes > fabric.nodes:
            raise PlanError(f"{nodes} nodes wanted, the site has {fabric.nodes}", where=f"plan.nodes.{fabric.name}",
                            hint=f"use at most {fabric.nodes}")
        per_node = options.gpus_per_node or fabric.gpus_per_node
        if per_node > fabric.gpus_per_node:
            raise PlanError(f"{per_node} GPUs a node wanted, a node has {fabric.gpus_per_node}",
                            where=f"fabric {fabric.name}", hint=f"use at most {fabric.gpus_per_node}")
        chosen.append(Offer(fabric, nodes or fabric.nodes, per_node, nodes is not None))
    return chosen


@lru_cache(maxsize=512)
def divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def micro_sizes(batch: Batch, options: PlanOptions) -> list[int]:
    if not options.search_micro_size:
        return [batch.micro_size]
    return [m for m in divisors(batch.global_size) if m <= LARGEST_MICRO]


class Space:
    """All placements of one model and batch on one site under given options."""

    def __init__(self, model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> None:
        self.model, self.batch, self.options, self.costs = model, batch, options, costs
        self.offers = offers(site, options)
        self.small = True  # after placements(): none was dropped for its estimate

    def placements(self) -> list[Placement]:
        """Sorted by estimate; equal ones by fewer GPUs, smaller TP and names."""
        sizes = []
        for micro in micro_sizes(self.batch, self.options):
            for tp in self._tensor_sizes() if self.batch.global_size % micro == 0 else ():
                usable = [o for o in self.offers if o.per_node % tp == 0]
                if usable and (len(usable) == len(self.offers) or not any(o.fixed for o in self.offers)):
                    sizes.append(_OneSize(self, micro, tp, usable))
        limit = Limit()
        found = [p for size in sizes for p in size.placements(limit)]
        self.small = limit.count <= SMALL
        return sorted((p for p in found if not limit.beyond(p.estimate)), key=Placement.key)

    def _tensor_sizes(self) -> list[int]:
        m, most = self.model, max(o.per_node for o in self.offers)
        sizes = [self.options.tp] if self.options.tp else range(1, most + 1)
        return [t for t in sizes if m.heads % t == 0 and m.kv_heads % t == 0 and m.ffn % t == 0]


class Limit:
    """The least estimate so far. Up to SMALL placements all are allowed; then those that are not far beyond it."""

    def __init__(self) -> None:
        self.least, self.count = np.inf, 0

    def beyond(self, estimate: float) -> bool:
        return self.count > SMALL and estimate > MARGIN * self.least

    def allows(self, estimate: float) -> bool:
        self.count += np.isfinite(estimate)
        self.least = min(self.least, estimate)
        return bool(np.isfinite(estimate)) and not self.beyond(estimate)


class _OneSize:
    """Placements for one micro-batch size and TP."""

    def __init__(self, space: Space, micro: int, tp: int, usable: list[Offer]) -> None:
        self.space, self.micro, self.tp, self.offers = space, micro, tp, usable
        model, options, costs = space.model, space.options, space.costs
        batch = Batch(space.batch.global_size, micro, space.batch.sequence_length)
        parallel = tp > 1 and options.sequence_parallel is not False
        recompute = "none" if options.recompute == "auto" else options.recompute
        gpus = [o.fabric.gpu for o in usable]
        self.each = np.array([sum(costs.layer_s(model, batch, tp, g, parallel, recompute)) for g in gpus])
        self.head = min(sum(costs.head_s(model, batch, tp, g)) for g in gpus)
        self.shares = batch.global_size // micro
        self.layers = model.layers
        self.taus = np.unique(np.concatenate([e * np.arange(1, model.layers + 1) for e in self.each]))
        self.fit = np.floor(self.taus[:, None] / self.each + 1e-9).astype(int)  # layers of a stage in tau, (T, F)
        self.speed = sorted(range(len(usable)), key=lambda f: (self.each[f], -usable[f].fabric.data_gbps, f))
        self.fixed = any(o.fixed for o in usable)
        weight, gradient = (np.array([size(g) for g in gpus]) for size in (costs.weight_bytes, costs.gradient_size))
        self.held = layer_parameters(model, tp) * (weight + gradient)  # bytes of a layer, without its optimizer
        self.room = np.array([capacity(g, options.max_memory_gib) for g in gpus])

    def placements(self, limit: Limit) -> Iterator[Placement]:
        strategy = self.space.options.strategy
        for dp in divisors(self.shares):
            if self.space.options.dp not in (None, dp):
                continue
            if strategy != "hierarchical-dp":
                yield from self._pipelines(dp, limit)
            if strategy in ("auto", "hierarchical-dp") and len(self.offers) > 1:
                yield from self._hierarchical(dp, limit)

    def _pipelines(self, dp: int, limit: Limit) -> Iterator[Placement]:
        """Stages of each fabric: blocks of TP x DP GPUs that fill whole nodes."""
        block, options = self.tp * dp, self.space.options
        ranks = np.array([o.nodes * o.per_node for o in self.offers])
        units = np.array([o.per_node // gcd(o.per_node, block) for o in self.offers])
        most = np.minimum(ranks // block, self.layers) // units * units
        if self.fixed:
            if (ranks % block).any():
                return
            counts = (ranks // block)[None]
            tau = self._tau(counts)
        elif np.prod(most // units + 1.0) <= FEW:
            counts = np.stack(np.meshgrid(*(np.arange(0, m + 1, u) for m, u in zip(most, units, strict=True)),
                                          indexing="ij"), axis=-1).reshape(-1, len(most))
            tau = self._tau(counts)
        else:
            counts, tau = self._filled(most, units)
        stages, fabrics = counts.sum(axis=1), (counts > 0).sum(axis=1)
        kept = (stages >= 1) & (stages <= self.layers) & np.isfinite(tau)
        for wanted in (options.pp, len(options.layers_per_stage) if options.layers_per_stage else None):
            kept &= stages == wanted if wanted else True
        kept &= fabrics == 1 if options.strategy == "one-fabric" else True
        kept &= fabrics > 1 if options.strategy == "pipeline" and len(self.offers) > 1 else True
        counts, tau = counts[kept], tau[kept]
        if not len(counts):
            return
        estimates = self._estimate(counts, tau, dp)
        for at in np.argsort(estimates, kind="stable")[:KEPT].tolist():
            if not limit.allows(float(estimates[at])):
                continue
            blocks = tuple(Block(o.fabric, int(k) * block // o.per_node, o.per_node, int(k))
                           for o, k in zip(self.offers, counts[at], strict=True) if k)
            blocks = _ordered(blocks, options.fabric_order)
            yield Placement("one-fabric" if len(blocks) == 1 else "pipeline", self.micro, self.tp, dp, blocks,
                            float(estimates[at]))

    def _filled(self, most: np.ndarray, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(stages of each fabric, (rows, F); tau of each row): each choice of fabrics, filled up to each tau with each
        of its fabrics in turn as the last, which need not be full."""
        rows, taus = [], []
        for size in range(1, len(self.offers) + 1):
            for chosen in combinations(self.speed, size):
                for last in chosen:
                    left = np.full(len(self.taus), self.layers)
                    counts = np.zeros((len(self.taus), len(self.offers)), dtype=int)
                    for f in [f for f in chosen if f != last] + [last]:
                        fit = np.maximum(self.fit[:, f], 1)
                        need = -(-np.maximum(left, 0) // fit)
                        need = -(-need // units[f]) * units[f]
                        counts[:, f] = np.where(self.fit[:, f] > 0, np.minimum(need, most[f]), 0)
                        left -= counts[:, f] * self.fit[:, f]
                    rows.append(counts[left <= 0])
                    taus.append(self.taus[left <= 0])
        counts, tau = np.concatenate(rows), np.concatenate(taus)
        code = counts @ (self.layers + 1) ** np.arange(len(self.offers))  # the same stages again: keep the least tau
        best = np.lexsort((tau, code))
        first = best[np.concatenate([[True], np.diff(code[best]) != 0])] if len(best) else best
        return counts[first], tau[first]

    def _tau(self, counts: np.ndarray) -> np.ndarray:
        """Least time of the slowest stage with whole layers, (rows,)."""
        enough = np.minimum(self.fit, self.layers) @ counts.T >= self.layers  # (T, rows)
        return np.where(enough.any(axis=0), self.taus[np.argmax(enough, axis=0)], np.inf)

    def _estimate(self, counts: np.ndarray, tau: np.ndarray, dp: int) -> np.ndarray:
        """Seconds of a step: all micro-batches through the slowest stage, fill and drain, and the data-parallel traffic
        that the other stages' fill does not hide; infinite where the weights alone do not fit."""
        stages, micro_batches = counts.sum(axis=1), self.shares // dp
        most = self._most_chunks(stages, micro_batches)
        reduce, gather = self._sync_s(dp)
        here = tau[:, None] / self.each * (counts > 0)  # layers of a stage in each fabric
        inside, across = self._transfers_s(dp)
        used = counts > 0
        transfers = 2 * ((counts * inside).sum(axis=1) + (across * used).max(axis=1) * (used.sum(axis=1) - 1))
        wire = np.maximum((inside * (counts > 1)).max(axis=1), (across * used).max(axis=1) * (used.sum(axis=1) > 1))
        computing = tau + self.head / stages
        least = np.full(len(counts), np.inf)
        for chunks in (np.minimum(most, max(1, self.space.options.virtual_stages or 1)), np.minimum(most, 3), most):
            fill = (stages - 1) * tau / chunks + transfers * chunks
            exposed = np.maximum(0, (reduce * here).max(axis=1) - fill / 2)
            least = np.minimum(least, micro_batches * np.maximum(computing, wire * chunks) + fill + exposed)
        seconds = least + (gather * here * counts).sum(axis=1)
        shard = self.held + layer_parameters(self.space.model, self.tp) * 8 / (
            dp if self.space.options.distributed_optimizer else 1)
        most = np.where(counts > 0, np.floor(self.room / shard), 0)  # what no stage is in may have room without end
        fits = (counts * most).sum(axis=1) >= self.layers
        return np.where(fits, seconds, np.inf)

    def _most_chunks(self, stages: np.ndarray, micro_batches: int) -> np.ndarray:
        """Virtual stages that a placement could have."""
        return np.array([self.most_chunks(s, micro_batches) for s in range(self.layers + 1)])[stages]

    def most_chunks(self, stages: int, micro_batches: int) -> int:
        options = self.space.options
        if options.virtual_stages:
            return options.virtual_stages
        if options.schedule == "1f1b" or stages < 2 or micro_batches % stages:
            return 1
        return max(1, min(self.layers // stages, MOST_CHUNKS))

    def _transfers_s(self, dp: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a stage transfer by each fabric's own network, and by Ethernet, (F,) each."""
        s = self.space
        moved = self.micro * s.batch.sequence_length * s.model.hidden * max(
            s.costs.weight_bytes(o.fabric.gpu) for o in self.offers) * 8e-9
        if s.options.sequence_parallel is not False:
            moved /= self.tp
        ranks = np.array([min(o.per_node, self.tp * dp) for o in self.offers])
        inside, across = (np.array([getattr(o.fabric, rate) for o in self.offers])
                          for rate in ("data_gbps", "ethernet_gbps"))
        return moved * ranks / inside, moved * ranks / across

    def _sync_s(self, dp: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to (reduce the gradients, gather the parameters) of one layer in each fabric, (F,) each."""
        seconds, costs = [], self.space.costs
        for offer in self.offers:
            gpu = offer.fabric.gpu
            how, count = costs.collectives(gpu), layer_parameters(self.space.model, self.tp)
            moved = count * (dp - 1) / dp * np.array([how.reduce_scatter * costs.gradient_size(gpu),
                                                      how.all_gather * costs.weight_bytes(gpu)])
            inside = self.tp * dp <= offer.per_node
            rate = gpu.intra_node_gbps if inside else offer.fabric.data_gbps / self.tp
            seconds.append(moved / (rate * 1e9 / 8))
        reduce, gather = np.array(seconds).T
        return reduce, gather

    def _hierarchical(self, dp: int, limit: Limit) -> Iterator[Placement]:
        """Whole pipelines in each fabric, data parallel across: the largest optimizer instances that are equal."""
        options = self.space.options
        wanted = options.pp or (len(options.layers_per_stage) if options.layers_per_stage else None)
        quickest = float(min(self.each))
        for pp in [wanted] if wanted else range(1, min(self.layers, 64) + 1):
            if pp > self.layers or limit.beyond(self._replica_s(pp, dp, quickest)):
                continue
            units = [o.per_node // gcd(o.per_node, pp * self.tp) for o in self.offers]
            most = [o.nodes * o.per_node // (pp * self.tp) // u * u for o, u in zip(self.offers, units, strict=True)]
            per_stage = -(-self.layers // pp)
            if sum(most) < dp or per_stage * self.held.min() > self.room.max():
                continue
            for split, run in self._splits(dp, most, units):
                made = self._spread(dp, pp, split, run)
                if limit.allows(made.estimate):
                    yield made

    def _replica_s(self, pp: int, dp: int, each: float, wire: float = 0.0) -> float:
        """Seconds of the slowest pipeline, without what crosses fabrics; `wire`: of one of its stage transfers."""
        tau, micro_batches = -(-self.layers // pp) * each, self.shares // dp
        chunks = self.most_chunks(pp, micro_batches)
        return min(micro_batches * max(tau + self.head / pp, wire * c) + (pp - 1) * (tau / c + 2 * wire * c)
                   for c in {1, min(3, chunks), chunks})

    def _splits(self, dp: int, most: list[int], units: list[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Pipelines of each fabric, and the size of an optimizer instance, for each choice of two or more fabrics."""
        if self.fixed:
            if sum(most) == dp and all(most):
                yield tuple(most), gcd(*most)
            return
        for size in range(2, len(most) + 1):
            for chosen in combinations(range(len(most)), size):
                if sum(most[f] for f in chosen) < dp:
                    continue
                for run in reversed(divisors(dp)):
                    made, left = [0] * len(most), dp
                    for f in sorted(chosen, key=lambda f: (-most[f], f)):
                        step = run * units[f] // gcd(run, units[f])
                        made[f] = min(left, most[f]) // step * step
                        left -= made[f]
                    if left == 0 and all(made[f] for f in chosen):
                        yield tuple(made), run
                        break

    def _spread(self, dp: int, pp: int, counts: tuple[int, ...], run: int) -> Placement:
        used = [(o, n, e) for o, n, e in zip(self.offers, counts, self.each, strict=True) if n]
        size = self.space.costs.gradient_size(used[0][0].fabric.gpu)
        moved = 2.0 * layer_parameters(self.space.model, self.tp) * size * -(-self.layers // pp)
        across = moved / run / min(o.fabric.ethernet_gbps * 1e9 / 8 / o.per_node for o, _, _ in used)
        reduce, gather = self._sync_s(run)
        here = [n > 0 for n in counts]
        stages = min(pp, max(o.per_node for o, _, _ in used) // self.tp)  # of a node, which share its NIC
        per_stage = -(-self.layers // pp)
        backward = per_stage * 2 / 3 * max(e for _, _, e in used)  # hides that much of the gradients' traffic
        reducing = max(0.0, per_stage * stages * float(max(reduce[here])) + across - backward)
        after = reducing + per_stage * stages * pp * float(max(gather[here]))
        blocks = tuple(Block(o.fabric, n * pp * self.tp // o.per_node, o.per_node, pp, n) for o, n, _ in used)
        wire, _ = self._transfers_s(1)  # of pipelines that are longer than a node
        slowest = max((w for w, o, n in zip(wire.tolist(), self.offers, counts, strict=True)
                       if n and pp * self.tp > o.per_node), default=0.0)
        return Placement("hierarchical-dp", self.micro, self.tp, dp, blocks,
                         self._replica_s(pp, dp, max(e for _, _, e in used), slowest) + after, dp // run)


def _ordered(blocks: tuple[Block, ...], wanted: tuple[str, ...] | None) -> tuple[Block, ...]:
    if wanted is None:
        return blocks
    return tuple(sorted(blocks, key=lambda b: wanted.index(b.fabric.name) if b.fabric.name in wanted else len(wanted)))
