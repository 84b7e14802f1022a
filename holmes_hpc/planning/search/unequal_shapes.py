"""On how many nodes each stage is, and its TP, where stages need not be equally wide: what promises a short step.

What counts about such a *shape* is tau, the longest that any stage computes in a step: its share of the micro-batches
times its layers. For each tau of a row of them, dynamic programming over each fabric's nodes finds how many layers k
stages there can compute in that time; each choice of how many stages every fabric has takes the least tau at which
these are all layers of the model. Beside tau a step takes what fills and drains the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import RECOMPUTE, PlanOptions
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.memory import most_layers
from holmes_hpc.planning.search.offers import Offer, micro_sizes, offers
from holmes_hpc.planning.search.one_size import OneSize

FINE, WIDE = 1.006, 1.8  # taus: how much longer each is than the one before, and the last than the first
MOST_STAGES = 12  # of one fabric
COMBINATIONS = 8000  # of numbers of stages of all fabrics, at most
FIRST, FAR = 12, 1.3  # shapes of one TP that are looked at first, and how much longer than the best they may seem
KEPT = 24  # shapes of one micro-batch size, recomputation and choice of TPs


@dataclass(frozen=True)
class Shape:
    """`stages`: (fabric's place among the offers, nodes, TP) of each, fabric after fabric; `estimate`: seconds of the
    step, good enough to rank shapes."""

    micro: int
    recompute: str
    stages: tuple[tuple[int, int, int], ...]
    estimate: float


def shapes(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> list[Shape]:
    """From the most promising on; but the best few of each TP for all stages come first: unlike TPs look better in an
    estimate than they are."""
    found = list[Shape]()
    chosen = offers(site, options)
    modes = RECOMPUTE if options.recompute == "auto" else (options.recompute,)
    sizes = [m for m in micro_sizes(batch, options) if batch.global_size % m == 0]
    for micro, recompute in product(sizes, modes):
        found += _OneKind(model, batch, site, options, costs, chosen, micro, recompute).shapes()
    found.sort(key=lambda s: (s.estimate, len(s.stages), s.stages))
    firsts, seen = list[Shape](), Counter[int]()
    for shape in dict.fromkeys(found):
        tps = {tp for *_, tp in shape.stages}
        if len(tps) == 1 and shape.estimate < FAR * found[0].estimate:
            seen.update(tps)
            firsts += [shape] if seen[tps.pop()] <= FIRST else []
    return [*firsts, *(shape for shape in found if shape not in set(firsts))]


class _OneKind:
    """The shapes of one micro-batch size and one recomputation."""

    def __init__(
        self,
        model: ModelSpec,
        batch: Batch,
        site: Site,
        options: PlanOptions,
        costs: Costs,
        chosen: list[Offer],
        micro: int,
        recompute: str,
    ) -> None:
        self.model, self.options, self.costs, self.chosen = model, options, costs, chosen
        self.batch, self.recompute = replace(batch, micro_size=micro), recompute
        self.micro_batches = self.batch.micro_batches(1)
        told = replace(options, recompute=recompute)
        self.sizes = {
            tp: OneSize(model, batch, site, told, costs, micro, tp, [o for o in chosen if o.per_node % tp == 0])
            for tp in self._tensor_sizes()
        }

    def _tensor_sizes(self) -> list[int]:
        m, most = self.model, max(o.per_node for o in self.chosen)
        wanted = [self.options.tp] if self.options.tp else range(1, most + 1)
        return [
            t
            for t in wanted
            if not (m.heads % t or m.kv_heads % t or m.ffn % t or self.batch.sequence_length % t)
            and any(o.per_node % t == 0 for o in self.chosen)
        ]

    def _stage(self, fabric: int, tp: int) -> tuple[np.ndarray, np.ndarray, float] | None:
        """Of stages with `tp` on 1 to N nodes of a fabric: (seconds of a step for each layer, layers that fit), (N,)
        each, and seconds of a layer for one micro-batch; None where there are none such."""
        offer, size = self.chosen[fabric], self.sizes[tp]
        if offer.per_node % tp:
            return None
        at = self._at(fabric, tp)
        nodes = np.arange(1, offer.nodes + 1)
        dp = nodes * (offer.per_node // tp)
        each = size.seconds[at]
        reduce, gather = np.zeros(len(nodes)), np.zeros(len(nodes))
        for first, some in ((2, nodes > 1), (1, nodes == 1)):  # inside a node it goes by NVLink
            told = first * (offer.per_node // tp)
            whole = [float(part[at]) / max(1, told - 1) * told for part in size.sync_s(told)]
            reduce, gather = (
                np.where(some, w * (dp - 1) / dp, was) for w, was in zip(whole, (reduce, gather), strict=True)
            )
        shown = np.maximum(0, reduce - each * 2 / 3) + np.maximum(0, gather - each / 3)
        seconds = -(-self.micro_batches // dp) * each + shown
        parallel = tp > 1 and self.options.sequence_parallel is not False
        fit = np.array(
            [
                float(
                    most_layers(
                        self.model,
                        self.batch,
                        self.costs,
                        offer.fabric.gpu,
                        tp,
                        parallel,
                        self.recompute,
                        int(d),
                        np.ones(1),
                        self.options.max_memory_gib,
                    )[0]
                )
                for d in dp
            ]
        )
        return np.where(dp <= self.micro_batches, seconds, np.inf), fit, each

    @cached_property
    def _tables(self) -> dict[tuple[int, tuple[int, ...]], _Table]:
        found = {}
        for fabric, offer in enumerate(self.chosen):
            each = {tp: stage for tp in self.sizes if (stage := self._stage(fabric, tp)) is not None}
            sets = [(tp,) for tp in each] + ([tuple(each)] if len(each) > 1 else [])
            for tps in sets:
                found[fabric, tps] = _Table(tps, [each[tp] for tp in tps], offer, self._most_stages, self.taus)
        return found

    @property
    def _most_stages(self) -> int:
        return min(MOST_STAGES, self.model.layers, int(COMBINATIONS ** (1 / len(self.chosen))) - 1)

    @cached_property
    def _needed(self) -> int:
        """Layers that all stages have to compute, the output matrix's as many as it takes."""
        return self.model.layers + int(min(size.head / min(size.seconds) for size in self.sizes.values()))

    @cached_property
    def taus(self) -> np.ndarray:
        """From the time in which all nodes together would compute all layers if these could be cut at will."""
        rate = 0.0
        for offer in self.chosen:
            rate += max(
                (
                    offer.nodes * offer.per_node / tp / size.seconds[size.offers.index(offer)]
                    for tp, size in self.sizes.items()
                    if offer in size.offers
                ),
                default=0.0,
            )
        least = self._needed * self.micro_batches / rate
        return np.asarray(least * FINE ** np.arange(int(np.log(WIDE) / np.log(FINE))))

    def shapes(self) -> Iterator[Shape]:
        if not self.sizes:
            return
        for sets in self._choices():
            yield from self._of([self._tables[f, tps] for f, tps in enumerate(sets)])

    def _choices(self) -> list[tuple[tuple[int, ...], ...]]:
        """The TPs to choose from in each fabric: one for all, any, and of few fabrics each one for itself."""
        own = [[tps for f, tps in self._tables if f == fabric] for fabric in range(len(self.chosen))]
        if any(not tps for tps in own):
            return []
        every = [max(tps, key=len) for tps in own]
        if len(own) <= 2:
            return list(product(*own))
        return [tuple((tp,) if (tp,) in tps else every[f] for f, tps in enumerate(own)) for tp in self.sizes] + [
            tuple(every)
        ]

    def _of(self, tables: list[_Table]) -> Iterator[Shape]:
        counts = np.stack(np.meshgrid(*(np.arange(t.reach.shape[0]) for t in tables), indexing="ij"), axis=-1).reshape(
            -1, len(tables)
        )
        stages = counts.sum(axis=1)
        used = (counts > 0).sum(axis=1)
        kept = (stages > 0) & (stages <= self.model.layers)
        kept &= stages == self.options.pp if self.options.pp else True
        kept &= used > 1 if self.options.strategy == "pipeline" else True
        for f, offer in enumerate(self.chosen):
            kept &= counts[:, f] > 0 if offer.fixed else True
        counts, stages = counts[kept], stages[kept]
        layers = sum((t.reach[counts[:, f]] for f, t in enumerate(tables)), np.zeros(()))  # (rows, taus)
        enough = layers >= self._needed
        possible = enough.any(axis=1)
        counts, stages, first = counts[possible], stages[possible], np.argmax(enough[possible], axis=1)
        if not len(counts):
            return
        share = np.stack([t.reach[counts[:, f], first] for f, t in enumerate(tables)], axis=1)
        way = (share / share.sum(axis=1, keepdims=True)) @ np.array([t.each for t in tables]) * self.model.layers
        wire = np.zeros(len(counts))  # at least, of a fabric's stages that are as wide as can be beside each other
        for f, table in enumerate(tables if len(tables) > 1 else ()):
            least = min(self._moved(f, g, table.tps[0]) for g in range(len(tables)) if g != f)
            crossed = (counts[:, f] > 0) & (counts[:, f] < stages)
            wire = np.maximum(wire, np.where(crossed, least * counts[:, f] / table.offer.nodes, 0.0))
        seconds = np.maximum(tables[0].taus[first], wire) + way * (1 - 1 / stages)
        for at in np.argsort(seconds, kind="stable")[:KEPT].tolist():
            tau = int(first[at])
            made = [(f, *stage) for f, table in enumerate(tables) for stage in table.stages(int(counts[at, f]), tau)]
            estimate, order = min((self._estimate(one, tables, tau), one) for one in (made, made[::-1]))
            yield Shape(self.batch.micro_size, self.recompute, tuple(order), estimate)

    def _estimate(self, made: list[tuple[int, int, int]], tables: list[_Table], tau: int) -> float:
        """Seconds of the step: tau, or all transfers between two fabrics where those take longer; the way of a
        micro-batch through the other stages; and what a stage of more replicas than the one above waits until each of
        them has had its first micro-batch, and the one above for their last."""
        reach = [tables[f].own[tau, nodes - 1] for f, nodes, _ in made]
        way = [
            self.model.layers * r / sum(reach) * self.sizes[tp].seconds[self._at(f, tp)]
            for r, (f, _, tp) in zip(reach, made, strict=True)
        ]
        wire = 0.0
        for (a, here, tp), (b, there, other) in pairwise(made):
            if a != b:
                wire = max(wire, self._moved(a, b, tp) / here, self._moved(b, a, other) / there)
        late = sum(max(0.0, below - above) for above, below in pairwise(way))
        return float(max(tables[0].taus[tau], wire) + sum(way) * (1 - 1 / len(made)) + late)

    def _moved(self, source: int, target: int, tp: int) -> float:
        """Seconds for which one node of fabric `source` would send a step's activations to `target`."""
        size = self.sizes[tp]
        at = self._at(source, tp)
        to = next((i for i, o in enumerate(size.offers) if o is self.chosen[target]), None)
        gbps = size.ethernet[at] if to is None else size.between[at, to]
        element = self.costs.weight_bytes(self.chosen[source].fabric.gpu)
        return self.batch.tokens * self.model.hidden * element * 8e-9 / float(gbps)

    def _at(self, fabric: int, tp: int) -> int:
        return self.sizes[tp].offers.index(self.chosen[fabric])


class _Table:
    """Of one fabric and a choice of TPs: `reach`, the layers that k stages can compute in each tau, (K + 1, taus)."""

    def __init__(
        self,
        tps: tuple[int, ...],
        each: list[tuple[np.ndarray, np.ndarray, float]],
        offer: Offer,
        most: int,
        taus: np.ndarray,
    ) -> None:
        self.tps, self.taus, self.offer = tps, taus, offer
        layers = np.stack([np.minimum(np.floor(taus[:, None] / seconds + 1e-9), fit) for seconds, fit, _ in each])
        self.best = layers.argmax(axis=0)  # the TP, (taus, N)
        self.own = layers.max(axis=0)
        self.own[self.own < 1] = -np.inf  # no stage without a layer
        self.each = each[int(self.best[-1, -1])][2]
        n = offer.nodes
        none = np.full((len(taus), n + 1), -np.inf if offer.fixed else 0.0)
        none[:, 0] = 0.0
        self.filled = [none]  # layers of k stages on at most (fixed: exactly) so many nodes, (taus, N + 1) each
        for _ in range(min(most, n)):
            before, now = self.filled[-1], np.full((len(taus), n + 1), -np.inf)
            for nodes in range(1, n + 1):
                now[:, nodes:] = np.maximum(now[:, nodes:], before[:, : n + 1 - nodes] + self.own[:, nodes - 1, None])
            self.filled.append(now)
        self.reach = np.stack([table[:, n] for table in self.filled])
        if not offer.fixed:
            self.reach[0] = 0.0

    def stages(self, count: int, tau: int) -> list[tuple[int, int]]:
        """(nodes, TP) of each of `count` stages that reach most in that tau, the narrowest first."""
        found, left = [], self.offer.nodes
        for k in range(count, 0, -1):
            takes = [self.filled[k - 1][tau, left - n] + self.own[tau, n - 1] for n in range(1, left + 1)]
            best = np.flatnonzero(np.asarray(takes) == max(takes)) + 1
            nodes = int(best[np.argmin(np.abs(best - left / k))])  # the most even, of those that reach as much
            found.append((nodes, self.tps[int(self.best[tau, nodes - 1])]))
            left -= nodes
        return sorted(found)
