"""What placements of one micro-batch size and TP take: seconds of a layer, rates, delays and memory of each fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from holmes_hpc.config.model import Batch
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.memory import capacity
from holmes_hpc.planning.plan.transport import LOCAL, TCP, TransportRule
from holmes_hpc.planning.schedule.kinds import schedule_kind
from holmes_hpc.planning.search.estimate import Estimate
from holmes_hpc.planning.search.placement import Block, Placement, along
from holmes_hpc.planning.search.problem import Offer, Question

T = TypeVar("T")
MOST_CHUNKS = 8


class OneSize:
    """Arrays have an entry for each fabric of `offers`, (F,). `each`: seconds of a layer for one micro-batch, forward
    and backward; `shares`: micro-batches of all data-parallel ranks."""

    def __init__(self, question: Question, micro: int, tp: int, usable: list[Offer]) -> None:
        model, batch, site, options, costs = question
        self.model, self.batch, self.options, self.costs = model, batch, options, costs
        self.micro, self.tp, self.offers = micro, tp, usable
        one = Batch(batch.global_size, micro, batch.sequence_length)
        parallel = tp > 1 and options.sequence_parallel is not False
        recompute = "none" if options.recompute == "auto" else options.recompute
        gpus = [o.fabric.gpu for o in usable]
        self.each = np.array([sum(costs.layer_s(model, one, tp, o.fabric, parallel, recompute)) for o in usable])
        self.seconds = [float(s) for s in self.each]  # a number by itself is quicker than an array's
        self.head = min(sum(costs.part_s("head", model, one, tp, o.fabric)) for o in usable)
        rule = TransportRule(site, "holmes", frozenset(), one_node=False)
        fabrics = [(o.fabric, rule.of({o.fabric.name}, one_node=False)) for o in usable]
        self.networks = {
            what: np.array([site.rate_gbps(t.kind, f) * costs.link(t, f, what).efficiency for f, t in fabrics])
            for what in ("", "reduce_scatter", "all_gather")
        }
        self.latency = np.array([costs.link(t, f).latency_s for f, t in fabrics])
        self.ethernet, self.between, self.delay = _between(site, usable, costs)
        self.linked = bool(site.links)
        self.shares, self.layers = batch.global_size // micro, model.layers
        self.per_node = np.array([o.per_node for o in usable])
        self.ranks = np.array([o.nodes * o.per_node for o in usable])
        self.fixed = any(o.fixed for o in usable)
        weight = np.array([costs.weight_bytes(gpu) for gpu in gpus])
        self.held = layer_parameters(model, tp) * (
            weight + costs.gradient_size
        )  # bytes of a layer, without its optimizer
        self.room = np.array([capacity(g, options.max_memory_gib) for g in gpus])
        self.taus = np.unique(np.concatenate([e * np.arange(1, model.layers + 1) for e in self.each]))
        self.fit = np.floor(self.taus[:, None] / self.each + 1e-9).astype(int)  # layers of a stage in tau, (T, F)
        chosen = range(1, 1 + (1 if options.strategy == "one-fabric" else len(usable)))
        self.choices = [
            (c, frozenset(usable[f].fabric.name for f in c))
            for size in chosen
            for c in combinations(range(len(usable)), size)
        ]  # of fabrics, and their names
        self.whole_node = int(self.per_node.max()) // tp + 1  # blocks apart of which no two are on one node
        self._speed = [float(ranks) / each for ranks, each in zip(self.ranks, self.seconds, strict=True)]
        self._memo = Memo()

    def in_order(self, fabrics: list[int], across: np.ndarray, ring: bool = False) -> list[int]:
        """Return fabrics in the order of :func:`along` where the site says how far apart they are."""
        return along(across, fabrics, ring) if self.linked and self.options.fabric_order is None else fabrics

    def placement(
        self, strategy: str, dp: int, held: Mapping[int, tuple[int, int]], estimate: Estimate, instances: int = 1
    ) -> Placement:
        """Return the placement on fabrics that hold (ranks, stages) each: in the order of ``plan.fabric_order``, those
        that it does not name last, as they are."""
        order = self.options.fabric_order or ()
        blocks = [
            Block(o.fabric, ranks // o.per_node, o.per_node, stages)
            for f, (ranks, stages) in held.items()
            for o in [self.offers[f]]
        ]
        if order:
            blocks.sort(key=lambda b: order.index(b.fabric.name) if b.fabric.name in order else len(order))
        return Placement(
            strategy, self.micro, self.tp, dp, blocks=tuple(blocks), estimate=estimate, instances=instances
        )

    def least_s(self, dp: int) -> float:
        """Less than any step with so many data-parallel ranks."""
        return self.least_on(dp, tuple(range(len(self.offers))))

    def least_on(self, dp: int, chosen: tuple[int, ...]) -> float:
        """Less than any step with so many data-parallel ranks on the fabrics `chosen`: by the layers a second of their
        blocks of TP x DP GPUs, of which each has one at least."""
        together = sum(self._speed[f] for f in chosen) / (self.tp * dp)
        return self.shares / dp * max(min(self.seconds[f] for f in chosen), self.layers / together)

    def around_s(self, used: tuple[int, ...]) -> float:
        """Seconds to all-reduce the gradients of one layer, held by one rank, round the fabrics `used`."""
        moved = 2.0 * layer_parameters(self.model, self.tp) * self.costs.gradient_size
        return moved / min(
            min(self.ethernet[a], self.between[a, b]) * 1e9 / 8 / self.offers[a].per_node
            for a, b in zip(used, used[1:] + used[:1], strict=True)
        )

    def most_chunks(self, stages: int, micro_batches: int) -> int:
        """Return the virtual stages that pipelines of so many stages could have. Megatron-Core deals micro-batches out
        to them in groups of PP."""
        kind = self.options.schedule
        most = None if kind == "auto" else schedule_kind(kind).chunks[1]
        if self.options.virtual_stages or stages < 2 or micro_batches % stages:
            return self.options.virtual_stages or 1
        return max(1, min(self.layers // stages, most or MOST_CHUNKS, MOST_CHUNKS))

    def all_chunks(self, stages: np.ndarray, micro_batches: int) -> np.ndarray:
        """:meth:`most_chunks` of many."""
        return np.array([self.most_chunks(s, micro_batches) for s in range(self.layers + 1)])[stages]

    def known(self, compute: Callable[..., T], *args: Any) -> T:
        """Return what a method gives of `args`, which is computed once."""
        return self._memo.of(compute.__name__, *args, compute=partial(compute, *args))

    def transfers_s(self, dp: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a stage transfer inside each fabric, (F,), and between two, which the slower end keeps, (F, F)."""
        moved = (
            self.micro
            * self.batch.sequence_length
            * self.model.hidden
            * max(self.costs.weight_bytes(o.fabric.gpu) for o in self.offers)
            * 8e-9
        )
        if self.options.sequence_parallel is not False:
            moved /= self.tp
        ranks = np.minimum(self.per_node, self.tp * dp)
        out = moved * ranks[:, None] / self.between + self.delay
        return moved * ranks / self.networks[""] + self.latency, np.maximum(out, out.T)

    def sync_s(self, dp: int, apart: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to (reduce the gradients, gather the parameters) of one layer in each fabric; `apart`: how many
        blocks of TP ranks lie between two that share a gradient."""
        seconds, costs = [], self.costs
        for f, offer in enumerate(self.offers):
            gpu = offer.fabric.gpu
            how, count = costs.collectives(gpu), layer_parameters(self.model, self.tp)
            moved = (
                count
                * (dp - 1)
                / dp
                * np.array([how.reduce_scatter * costs.gradient_size, how.all_gather * costs.weight_bytes(gpu)])
            )
            if self.tp * dp * apart <= offer.per_node:
                rate = np.full(2, gpu.intra_node_gbps * costs.link(LOCAL, offer.fabric).efficiency)
            else:
                rate = np.array([self.networks[what][f] for what in ("reduce_scatter", "all_gather")]) / self.tp
            seconds.append(moved / (rate * 1e9 / 8))
        reduce, gather = np.array(seconds).T
        return reduce, gather


def _between(site: Site, usable: list[Offer], costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gb/s of payload that a node sends over its Ethernet, (F,); what it sends to each other fabric, and the seconds
    before a message's first byte, (F, F)."""
    fabrics = [o.fabric for o in usable]
    links = [costs.link(TCP, f) for f in fabrics]
    share = np.array([link.efficiency for link in links])
    ethernet = np.array([site.rate_gbps("tcp", f) for f in fabrics]) * share
    rate = np.array([[site.rate_gbps("tcp", a, b) for b in fabrics] for a in fabrics]) * share[:, None]
    delay = [
        [link.latency_s + site.delay_s("tcp", a, b) for b in fabrics] for a, link in zip(fabrics, links, strict=True)
    ]
    return ethernet, rate, np.array(delay)
