"""The placements worth a look: TP, DP, stages of each fabric, with a quick estimate of each one's step time.

Every stage is one block of TP x DP GPUs. For given TP and DP a fabric holds so many stages, and what counts about a
placement is the longest time tau that any stage needs for a micro-batch. So for each tau that a whole number of layers
can give, each choice of fabrics is filled in order until all layers are dealt out: fewer stages would not reach tau,
more would only lengthen the fill. Where there are few combinations all of them are listed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import gcd

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.fabric.site import Fabric, FabricLink, Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.memory import capacity
from holmes_hpc.planning.search.estimate import Estimate
from holmes_hpc.planning.search.limit import SMALL, Limit, required
from holmes_hpc.planning.search.offers import Offer, divisors, micro_sizes, offers
from holmes_hpc.planning.spec.transport import LOCAL, TCP, Transport, TransportRule

FEW = 512  # combinations up to which all are listed
KEPT = 32  # placements of one TP, DP and micro-batch size at most, and beside them
FIRST = 2  # of each fabric alone, each pair, and all
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
    """`estimate`: of its step, good enough to rank placements. `instances`: of the distributed optimizer."""

    strategy: str
    micro: int
    tp: int
    dp: int
    blocks: tuple[Block, ...]
    estimate: Estimate
    instances: int = 1

    @cached_property
    def least_s(self) -> float:
        """Seconds of the step, by the estimate."""
        return float(self.estimate.least())

    @property
    def fabrics(self) -> frozenset[str]:
        return frozenset(b.fabric.name for b in self.blocks)

    @property
    def pp(self) -> int:
        return self.blocks[0].stages if self.strategy == "hierarchical-dp" else sum(b.stages for b in self.blocks)

    @property
    def gpus(self) -> int:
        return sum(b.nodes * b.per_node for b in self.blocks)

    def key(self) -> tuple[float, int, int, tuple[tuple[str, int], ...]]:
        return self.least_s, self.gpus, self.tp, tuple((b.fabric.name, b.nodes) for b in self.blocks)


class Space:
    """All placements of one model and batch on one site under given options."""

    def __init__(self, model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> None:
        self.model, self.batch, self.site, self.options, self.costs = model, batch, site, options, costs
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
        limit = Limit(len(self.offers))
        found = [p for size in sizes for p in size.placements(limit)]
        self.small = limit.count <= SMALL
        return sorted((p for p in found if not limit.beyond(p.least_s, p.fabrics)), key=Placement.key)

    def _tensor_sizes(self) -> list[int]:
        m, most = self.model, max(o.per_node for o in self.offers)
        sizes = [self.options.tp] if self.options.tp else range(1, most + 1)
        return [t for t in sizes if m.heads % t == 0 and m.kv_heads % t == 0 and m.ffn % t == 0]


class _OneSize:
    """Placements for one micro-batch size and TP."""

    def __init__(self, space: Space, micro: int, tp: int, usable: list[Offer]) -> None:
        self.space, self.micro, self.tp, self.offers = space, micro, tp, usable
        model, options, costs = space.model, space.options, space.costs
        batch = Batch(space.batch.global_size, micro, space.batch.sequence_length)
        parallel = tp > 1 and options.sequence_parallel is not False
        recompute = "none" if options.recompute == "auto" else options.recompute
        gpus = [o.fabric.gpu for o in usable]
        self.each = np.array([sum(costs.layer_s(model, batch, tp, o.fabric, parallel, recompute)) for o in usable])
        self.head = min(sum(costs.head_s(model, batch, tp, o.fabric)) for o in usable)
        rule = TransportRule(space.site, "holmes", frozenset(), one_node=False)
        fabrics = [(o.fabric, rule.of({o.fabric.name}, one_node=False)) for o in usable]
        self.networks = {what: np.array([_gbps(f, t, costs, what) for f, t in fabrics])
                         for what in ("", "reduce_scatter", "all_gather")}
        self.between = np.array([self._between(f, costs) for f, _ in fabrics])
        self.latency = np.array([[costs.link(t, f).latency_s, costs.link(TCP, f).latency_s + self._delay_s(f)]
                                 for f, t in fabrics]).T
        self.shares = batch.global_size // micro
        self.layers = model.layers
        self.taus = np.unique(np.concatenate([e * np.arange(1, model.layers + 1) for e in self.each]))
        self.fit = np.floor(self.taus[:, None] / self.each + 1e-9).astype(int)  # layers of a stage in tau, (T, F)
        self.speed = sorted(range(len(usable)), key=lambda f: (self.each[f], -usable[f].fabric.data_gbps, f))
        self.fixed = any(o.fixed for o in usable)
        self.memory: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, np.ndarray]] = {}
        weight, gradient = (np.array([size(g) for g in gpus]) for size in (costs.weight_bytes, costs.gradient_size))
        self.held = layer_parameters(model, tp) * (weight + gradient)  # bytes of a layer, without its optimizer
        self.room = np.array([capacity(g, options.max_memory_gib) for g in gpus])

    def _between(self, fabric: Fabric, costs: Costs) -> float:
        """Gb/s of payload to the fabric that it has most to: which one follows on it is not known here."""
        own = [fabric.ethernet_gbps if link is None or link.gbps is None else link.gbps
               for link in self._links(fabric)]
        return max(own, default=fabric.ethernet_gbps) * costs.link(TCP, fabric).efficiency

    def _delay_s(self, fabric: Fabric) -> float:
        return min((0.0 if link is None else link.delay_ms / 1e3 for link in self._links(fabric)), default=0.0)

    def _links(self, fabric: Fabric) -> list[FabricLink | None]:
        return [self.space.site.link(fabric.name, o.fabric.name) for o in self.offers if o.fabric is not fabric]

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
        estimate = self._estimate(counts, tau, dp)
        seconds = estimate.least()
        for at in self._worth_a_look(counts, seconds):
            blocks = tuple(Block(o.fabric, int(k) * block // o.per_node, o.per_node, int(k))
                           for o, k in zip(self.offers, counts[at], strict=True) if k)
            if not limit.allows(float(seconds[at]), frozenset(b.fabric.name for b in blocks)):
                continue
            blocks = _ordered(blocks, options.fabric_order)
            yield Placement("one-fabric" if len(blocks) == 1 else "pipeline", self.micro, self.tp, dp, blocks,
                            estimate.at(at))

    def _worth_a_look(self, counts: np.ndarray, seconds: np.ndarray) -> list[int]:
        """The rows with the least `seconds`, and with them the best of each fabric, each pair and all."""
        order = np.argsort(seconds, kind="stable")
        kept, of = order[:KEPT].tolist(), dict[bytes, int]()
        used = counts > 0
        for at in order.tolist():
            if required(int(used[at].sum()), len(self.offers)):
                key = used[at].tobytes()
                of[key] = of.get(key, 0) + 1
                if of[key] <= FIRST:
                    kept.append(at)
        return sorted(dict.fromkeys(kept), key=lambda at: (seconds[at], at))

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

    def _estimate(self, counts: np.ndarray, tau: np.ndarray, dp: int) -> Estimate:
        """Of each row of stages of each fabric; infinite where the weights alone do not fit."""
        stages, micro_batches, used = counts.sum(axis=1), self.shares // dp, counts > 0
        reduce, gather = self._sync_s(dp)
        here = tau[:, None] / self.each * used  # layers of a stage in each fabric, of which not all are needed
        here *= np.minimum(1, self.layers / np.maximum((here * counts).sum(axis=1), 1e-9))[:, None]
        inside, across = self._transfers_s(dp)
        slowest, several = (across * used).max(axis=1), used.sum(axis=1) > 1
        transfers = 2 * ((counts * inside).sum(axis=1) + slowest * (used.sum(axis=1) - 1))
        alone = np.array([self.tp * dp >= o.per_node for o in self.offers])  # no two stages on a node
        inner = np.where((counts > 2) & alone, 2, counts > 1)  # one NIC then carries both ways of a stage between two
        wire = np.maximum((inside * inner).max(axis=1), slowest * several)
        shard = self.held + layer_parameters(self.space.model, self.tp) * 8 / (
            dp if self.space.options.distributed_optimizer else 1)
        most = np.where(used, np.floor(self.room / shard), 0)  # what no stage is in may have room without end
        fits = (counts * most).sum(axis=1) >= self.layers
        if self.space.costs.software.overlap_gather:  # behind the first forward pass
            gathering = np.maximum(0, gather * here - tau[:, None] / 3)
        else:
            gathering = gather * here
        after = np.where(fits, (gathering * counts).sum(axis=1), np.inf)
        reducing = (reduce * here).max(axis=1) - (tau * 2 / 3 if self.space.costs.software.overlap else 0)
        least = np.where(stages > 1, self.head + self.each.min(), 0)  # the last stage has a layer beside the head
        head = np.maximum(self.head / stages, least - tau)
        return Estimate(micro_batches, stages, tau, head, wire, transfers, reducing, after,
                        self._most_chunks(stages, micro_batches))

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
        return moved * ranks / self.networks[""] + self.latency[0], moved * ranks / self.between + self.latency[1]

    def _known(self, made: Callable[..., tuple[np.ndarray, np.ndarray]], *args: int) -> tuple[np.ndarray, np.ndarray]:
        """`made` of `args`, worked out once."""
        key = made.__name__, args
        if key not in self.memory:
            self.memory[key] = made(*args)
        return self.memory[key]

    def _sync_s(self, dp: int, apart: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to (reduce the gradients, gather the parameters) of one layer in each fabric, (F,) each; `apart`: how
        many blocks of TP ranks lie between two that share a gradient."""
        seconds, costs = [], self.space.costs
        for f, offer in enumerate(self.offers):
            gpu = offer.fabric.gpu
            how, count = costs.collectives(gpu), layer_parameters(self.space.model, self.tp)
            moved = count * (dp - 1) / dp * np.array([how.reduce_scatter * costs.gradient_size(gpu),
                                                      how.all_gather * costs.weight_bytes(gpu)])
            if self.tp * dp * apart <= offer.per_node:
                rate = np.full(2, gpu.intra_node_gbps * costs.link(LOCAL, offer.fabric).efficiency)
            else:
                rate = np.array([self.networks[what][f] for what in ("reduce_scatter", "all_gather")]) / self.tp
            seconds.append(moved / (rate * 1e9 / 8))
        reduce, gather = np.array(seconds).T
        return reduce, gather

    def _hierarchical(self, dp: int, limit: Limit) -> Iterator[Placement]:
        """Whole pipelines in each fabric, data parallel across: the largest optimizer instances that are equal."""
        options = self.space.options
        wanted = options.pp or (len(options.layers_per_stage) if options.layers_per_stage else None)
        quickest = float(min(self.each))
        for pp in [wanted] if wanted else range(1, min(self.layers, 64) + 1):
            if pp > self.layers or limit.beyond(float(self._replica(pp, dp, quickest).least()), frozenset()):
                continue
            units = [o.per_node // gcd(o.per_node, pp * self.tp) for o in self.offers]
            most = [o.nodes * o.per_node // (pp * self.tp) // u * u for o, u in zip(self.offers, units, strict=True)]
            per_stage = -(-self.layers // pp)
            if sum(most) < dp or per_stage * self.held.min() > self.room.max():
                continue
            for split, run in self._splits(dp, most, units):
                made = self._spread(dp, pp, split, run)
                if limit.allows(made.least_s, made.fabrics):
                    yield made

    def _replica(self, pp: int, dp: int, each: float, wire: float = 0.0, after: float = 0.0) -> Estimate:
        """Of the slowest pipeline; `wire`: of one of its stage transfers, `after`: what crosses fabrics."""
        tau, micro_batches = -(-self.layers // pp) * each, self.shares // dp
        head = max(self.head / pp, self.head + each - tau) if pp > 1 else self.head
        return Estimate(micro_batches, pp, tau, head, wire, 2 * wire * (pp - 1), 0.0, after,
                        self.most_chunks(pp, micro_batches))

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
                    step = [run * u // gcd(run, u) for u in units]
                    made = [step[f] if f in chosen else 0 for f in range(len(most))]  # each fabric has a part
                    left = dp - sum(made)
                    for f in sorted(chosen, key=lambda f: (-most[f], f)):
                        more = min(left, most[f] - made[f]) // step[f] * step[f]
                        made[f] += more
                        left -= more
                    if left == 0 and all(made[f] <= most[f] for f in chosen):
                        yield tuple(made), run
                        break

    def _spread(self, dp: int, pp: int, counts: tuple[int, ...], run: int) -> Placement:
        used = [(o, n, e) for o, n, e in zip(self.offers, counts, self.each, strict=True) if n]
        size = self.space.costs.gradient_size(used[0][0].fabric.gpu)
        moved = 2.0 * layer_parameters(self.space.model, self.tp) * size * -(-self.layers // pp)
        across = moved / run / min(float(gbps) * 1e9 / 8 / o.per_node for o, gbps, n in
                                   zip(self.offers, self.between, counts, strict=True) if n)
        reduce, gather = self._known(self._sync_s, run, pp)
        here = [n > 0 for n in counts]
        stages = min(pp, max(o.per_node for o, _, _ in used) // self.tp)  # of a node, which share its NIC
        per_stage = -(-self.layers // pp)
        backward = per_stage * 2 / 3 * max(e for _, _, e in used)  # hides that much of the gradients' traffic
        reducing = max(0.0, per_stage * stages * float(max(reduce[here])) + across - backward)
        after = reducing + per_stage * stages * pp * float(max(gather[here]))
        blocks = tuple(Block(o.fabric, n * pp * self.tp // o.per_node, o.per_node, pp, n) for o, n, _ in used)
        wire, _ = self._known(self._transfers_s, 1)  # of pipelines that are longer than a node
        slowest = max((w for w, o, n in zip(wire.tolist(), self.offers, counts, strict=True)
                       if n and pp * self.tp > o.per_node), default=0.0)
        return Placement("hierarchical-dp", self.micro, self.tp, dp, blocks,
                         self._replica(pp, dp, max(e for _, _, e in used), slowest, after), dp // run)


def _gbps(fabric: Fabric, transport: Transport, costs: Costs, collective: str) -> float:
    """What a node can send of payload to others of its fabric, in Gb/s."""
    return fabric.data_gbps * costs.link(transport, fabric, collective).efficiency


def _ordered(blocks: tuple[Block, ...], wanted: tuple[str, ...] | None) -> tuple[Block, ...]:
    if wanted is None:
        return blocks
    return tuple(sorted(blocks, key=lambda b: wanted.index(b.fabric.name) if b.fabric.name in wanted else len(wanted)))
