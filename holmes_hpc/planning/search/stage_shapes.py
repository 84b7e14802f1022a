"""On how many nodes each stage is, and its TP, where stages need not be equally wide: what promises a short step.

What counts about such a *shape* is tau, the longest that any stage computes in a step: its share of the micro-batches
times its layers. For each tau of a row of them, dynamic programming over each fabric's nodes finds how many layers k
stages there can compute in that time; each choice of how many stages every fabric has takes the least tau at which
these are all layers of the model. Beside tau a step takes what fills and drains the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from math import factorial, inf

import numpy as np

from holmes_hpc.config.plan_options import RECOMPUTE
from holmes_hpc.planning.cost.memory import max_layers
from holmes_hpc.planning.search.problem import Offer, Question, allowed, micro_sizes, offers, tensor_sizes
from holmes_hpc.planning.search.stage_rows import Stages, StageTable, changed, orders
from holmes_hpc.planning.search.uniform import OneSize

FINE, WIDE = 1.006, 1.8  # taus: how much longer each is than the one before, and the last than the first
MOST_STAGES = 12  # of one fabric
COMBINATIONS = 8000  # of numbers of stages of all fabrics, at most
FIRST, FAR = 12, 1.3  # shapes of one TP that are looked at first, and how much longer than the best they may seem
KEPT = 24  # shapes of one micro-batch size, recomputation and choice of TPs

LISTED = 3000  # rows of stages, in every order, up to which all are looked at
FORWARD = 1 / 3  # of a layer's seconds
CROWDED = 1.3  # what a NIC takes that is never idle, to the bytes it sends: it waits for those of other nodes
LONGEST, STEPS = 64, 14  # a step to the least one there could be, at most; of a bisection


@dataclass(frozen=True)
class Shape:
    """`stages`: (fabric's place among the offers, nodes, TP) of each, fabric after fabric; `estimate`: seconds of the
    step, good enough to rank shapes."""

    micro: int
    recompute: str
    stages: Stages
    estimate: float
    kind: _OneKind = field(repr=False, compare=False)

    def near(self) -> list[Shape]:
        """Those a change away, the most promising first."""
        rows = (row for row in dict.fromkeys(changed(self.stages)) if self.kind.wanted(row))
        found = (replace(self, stages=row, estimate=self.kind.estimate(row)) for row in rows)
        return sorted((s for s in found if s.estimate < inf), key=lambda s: (s.estimate, s.stages))


def shapes(question: Question, limit: float = inf) -> list[Shape]:
    """Return shapes whose step is estimated to take at most `limit` seconds, from the most promising on; but the best
    few of each TP for all stages come first: unlike TPs look better in an estimate than they are."""
    found = list[Shape]()
    options, batch = question.options, question.batch
    chosen = offers(question.site, options)
    modes = RECOMPUTE if options.recompute == "auto" else (options.recompute,)
    sizes = [m for m in micro_sizes(batch, options) if batch.global_size % m == 0]
    for micro, recompute in product(sizes, modes):
        found += _OneKind(question, chosen, micro, recompute, limit).shapes()
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

    def __init__(self, question: Question, chosen: list[Offer], micro: int, recompute: str, limit: float) -> None:
        self.model, self.options, self.costs = question.model, question.options, question.costs
        self.chosen, self.limit = chosen, limit
        self.batch, self.recompute = replace(question.batch, micro_size=micro), recompute
        self.micro_batches = self.batch.micro_batches(1)
        own = question._replace(options=replace(self.options, recompute=recompute))
        self.sizes = {
            tp: OneSize(own, micro, tp, usable)
            for tp in tensor_sizes(self.model, self.options, chosen)
            if (usable := [o for o in chosen if o.per_node % tp == 0]) and self.batch.sequence_length % tp == 0
        }

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
                    max_layers(
                        self.model,
                        self.batch,
                        self.costs,
                        gpu=offer.fabric.gpu,
                        tp=tp,
                        sequence_parallel=parallel,
                        recompute=self.recompute,
                        shards=int(d),
                        depth=np.ones(1),
                        max_gib=self.options.max_memory_gib,
                    )[0]
                )
                for d in dp
            ]
        )
        return np.where(dp <= self.micro_batches, seconds, np.inf), fit, each

    @cached_property
    def _kinds(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, float]]:
        """:meth:`_stage` of each fabric and TP where there is one."""
        found = ((f, tp, self._stage(f, tp)) for f in range(len(self.chosen)) for tp in self.sizes)
        return {(f, tp): stage for f, tp, stage in found if stage is not None}

    @cached_property
    def _tables(self) -> dict[tuple[int, tuple[int, ...]], StageTable]:
        found = {}
        for fabric, offer in enumerate(self.chosen):
            each = {tp: self._kinds[fabric, tp] for tp in self.sizes if (fabric, tp) in self._kinds}
            sets = [(tp,) for tp in each] + ([tuple(each)] if len(each) > 1 else [])
            for tps in sets:
                found[fabric, tps] = StageTable(tps, [each[tp] for tp in tps], offer, self._most_stages, self.taus)
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

    def shapes(self) -> list[Shape]:
        """In every order that is looked at; all there are, where these are few."""
        if not self.sizes:
            return []
        rows = self._listed()
        if rows is None:
            made = (
                row for sets in self._choices() for row in self._of([self._tables[f, t] for f, t in enumerate(sets)])
            )
            rows = list(dict.fromkeys(order for row in made for order in orders(row)))
        found = (Shape(self.batch.micro_size, self.recompute, row, self.estimate(row), self) for row in rows)
        return [shape for shape in found if shape.estimate < inf]

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

    def _of(self, tables: list[StageTable]) -> Iterator[list[tuple[int, int, int]]]:
        """Of the numbers of stages on each fabric that promise most, the stages."""
        counts = np.stack(np.meshgrid(*(np.arange(t.reach.shape[0]) for t in tables), indexing="ij"), axis=-1).reshape(
            -1, len(tables)
        )
        stages = counts.sum(axis=1)
        kept = allowed(self.options, self.model.layers, stages, (counts > 0).sum(axis=1))
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
            least = min(self._moved[f, g, table.tps[0]] for g in range(len(tables)) if g != f)
            crossed = (counts[:, f] > 0) & (counts[:, f] < stages)
            wire = np.maximum(wire, np.where(crossed, least * counts[:, f] / table.offer.nodes, 0.0))
        seconds = np.maximum(tables[0].taus[first], wire) + way * (1 - 1 / stages)
        for at in np.argsort(seconds, kind="stable")[:KEPT].tolist():
            tau = int(first[at])
            yield [(f, *stage) for f, table in enumerate(tables) for stage in table.stages(int(counts[at, f]), tau)]

    def _listed(self) -> list[Stages] | None:
        """Every row of stages there can be, in every order; None where these are too many to look at each."""
        count, of_fabrics = factorial(len(self.chosen)), list[list[Stages]]()
        for f, offer in enumerate(self.chosen):
            tps = sum(offer.per_node % tp == 0 for tp in self.sizes)
            count *= tps * (tps + 1) ** (offer.nodes - 1) if offer.fixed else (tps + 1) ** offer.nodes
            if count > LISTED:
                return None
            of_fabrics.append(self._on(f))
        found = list[Stages]()
        for order in permutations(range(len(self.chosen))):
            found += [sum(parts, ()) for parts in product(*(of_fabrics[f] for f in order))]
        return [stages for stages in dict.fromkeys(found) if self.wanted(stages)]

    def _on(self, fabric: int) -> list[Stages]:
        """Every row of stages on one fabric, that of none included."""
        offer = self.chosen[fabric]
        ends: list[list[Stages]] = [[()]]  # by the number of nodes
        for nodes in range(1, offer.nodes + 1):
            ends.append(
                [
                    (*before, (fabric, n, tp))
                    for n in range(1, nodes + 1)
                    for before in ends[nodes - n]
                    for tp in self.sizes
                    if (fabric, tp) in self._kinds
                ]
            )
        return ends[-1] if offer.fixed else [stages for some in ends for stages in some]

    def wanted(self, stages: Stages) -> bool:
        """Return whether there may be such stages."""
        return bool(allowed(self.options, self.model.layers, len(stages), len({f for f, *_ in stages})))

    def estimate(self, stages: Stages) -> float:
        """Seconds of the step, infinite where the layers do not fit, or not within `limit`. For a limit of the step,
        stage after stage gets as
        many layers as it can compute between the first micro-batch's coming and the last gradients' way up; the least
        limit counts that deals out all. A stage of more replicas than one above waits for that one to have computed a
        micro-batch for each of them; and all transfers of one node may take longer."""
        m, rows, moved = self.micro_batches, [], 0.0
        sent = [[0.0, 0.0] for _ in stages]  # seconds for which a node of each sends in its fabric, to another one
        for at, (f, nodes, tp) in enumerate(stages):
            seconds, fit, each = self._kinds[f, tp]
            dp = nodes * (self.chosen[f].per_node // tp)
            if dp > m:
                return inf
            if at:
                above, wide, other = stages[at - 1]
                down, up = self._moved[above, f, other], self._moved[f, above, tp]
                per_wave = (self.chosen[g].per_node / t / m for g, t in ((above, other), (f, tp)))
                moved = sum(s * w for s, w in zip((down, up), per_wave, strict=True))
                sent[at - 1][f != above] += down / wide
                sent[at][f != above] += up / nodes
            head = self.sizes[tp].head * -(-m // dp) if at == len(stages) - 1 else 0.0
            rows.append((each, float(seconds[nodes - 1]), float(fit[nodes - 1]), dp, moved, head))

        def dealt(limit: float) -> tuple[float, float]:
            """(Layers dealt out, seconds of one micro-batch's way through all stages but the last.)"""
            count = gone = way = slow = 0.0
            wave = 1  # replicas of the stage above that takes longest for as many micro-batches, `slow` for each wave
            for each, whole, fit, dp, moved, head in rows:
                way = gone = gone + moved
                room = min(
                    limit - gone - head - (m - 1) % dp // wave * slow,  # the last replica with the larger share
                    (limit - gone - head - (dp - 1) // wave * slow) * -(-m // dp) / (m // dp),  # the last one
                )
                made = min(fit, room / whole + 1e-9) // 1
                if made < 1:
                    return 0.0, way
                count, gone = count + made, gone + made * each
                if made * each * FORWARD * wave >= slow * dp:
                    wave, slow = dp, made * each * FORWARD
            return count, way

        low, high = self.taus[0] / 2, min(self.taus[0] * LONGEST, self.limit)
        if dealt(high)[0] < self.model.layers:
            return inf
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if dealt(middle)[0] >= self.model.layers else (middle, high)
        busiest = max(map(max, sent))
        return max(high, CROWDED * busiest, busiest + dealt(high)[1])

    @cached_property
    def _moved(self) -> dict[tuple[int, int, int], float]:
        """The seconds for which one node of a fabric would send a step's activations to another, by (the one, the
        other, TP)."""
        return {(f, g, tp): self._moved_s(f, g, tp) for f, tp in self._kinds for g in range(len(self.chosen))}

    def _moved_s(self, source: int, target: int, tp: int) -> float:
        size = self.sizes[tp]
        at = self._at(source, tp)
        to = next((i for i, o in enumerate(size.offers) if o is self.chosen[target]), None)
        gbps = size.ethernet[at] if to is None else size.between[at, to]
        if source == target:
            gbps = size.networks[""][at]
        element = self.costs.weight_bytes(self.chosen[source].fabric.gpu)
        return self.batch.tokens * self.model.hidden * element * 8e-9 / float(gbps)

    def _at(self, fabric: int, tp: int) -> int:
        return self.sizes[tp].offers.index(self.chosen[fabric])
