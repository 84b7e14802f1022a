"""A plan without its layers, as the cost model sees it.

It knows which component runs each stage and which network carries each kind of traffic. It never lists the process
groups of all ranks, because a plan may have tens of thousands of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial, wraps
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import Pool, Site
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.calibration import NO_CALIBRATION
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Component, Plan, Schedule
from holmes_hpc.planning.plan.transport import Transport, TransportRule
from holmes_hpc.planning.schedule.kinds import PER_STAGE, ScheduleKind
from holmes_hpc.planning.schedule.order import Order

T = TypeVar("T")


class StageView(NamedTuple):
    """A uniform layout of a stage with its own TP/DP and of the stages next to it, and the stage's number there. Only
    that stage's costs are used. Each replica computes as many micro-batches as the stage's busiest replica."""

    layout: Layout
    stage: int


PLAN_FIELDS = (  # fields that Plan and Layout share
    *("model", "parallel", "recompute", "schedule", "components"),
    *("transport_mode", "edge_dtype", "edge_connections", "bucket_bytes"),
)
WINDOW_BYTES = 3 << 20  # unacknowledged bytes of a TCP connection: half of the 6 MiB that Linux allows by default
_order = lru_cache(maxsize=4096)(Order)  # a search repeats the same arguments
schedule_of = lru_cache(maxsize=4096)(Schedule)


def window_rate(gpus: int, delay_s: float, costs: Costs) -> float:
    """Return the bytes per second that `gpus` of a node can send over a link with a delay, by a TCP connection each.
    Measured rates include this limit: it is then infinite, as without a delay."""
    return gpus * WINDOW_BYTES / (2 * delay_s) if delay_s and costs.calibration == NO_CALIBRATION else math.inf


def memoised(*settings: str) -> Callable[[Callable[[Layout], T]], Callable[[Layout], T]]:
    """Compute a function of a layout only once for all variants of the layout with equal `settings` (attributes)."""
    values = [attrgetter(name) for name in settings]

    def decorate(compute: Callable[[Layout], T]) -> Callable[[Layout], T]:
        @wraps(compute)
        def memoised_compute(layout: Layout) -> T:
            return layout.memo.of(compute, *(value(layout) for value in values), compute=partial(compute, layout))

        return memoised_compute

    return decorate


@dataclass(frozen=True)
class Layout:
    """A :class:`Plan` without its layers per stage, and the costs that apply. `memo`: cached results that depend on the
    placement of ranks; all variants of a layout (:meth:`with_settings`) share it. `pool_memo`: cached results that
    depend only on pools; layouts that differ only in components, schedule, recomputation, virtual stages and buckets
    may share it. With per-stage TP/DP, the costs of each stage come from its :class:`StageView`, and layouts that
    differ only in their sizes, micro-batch size and these things may share `pool_memo`."""

    model: ModelSpec
    batch: Batch
    parallel: Parallel
    recompute: str
    schedule: Schedule
    components: tuple[Component, ...]
    site: Site
    costs: Costs
    transport_mode: str = "holmes"
    edge_dtype: str = "same"
    edge_connections: int = 1
    bucket_bytes: int = 40_000_000
    pool_memo: Memo = field(repr=False, compare=False, default_factory=Memo)
    pools: dict[str, Pool] = field(init=False, repr=False, compare=False)
    memo: Memo = field(init=False, repr=False, compare=False, default_factory=Memo)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pools", {f.name: f for f in self.site.pools})

    def with_settings(
        self,
        schedule: Schedule | None = None,
        bucket_bytes: int | None = None,
        recompute: str | None = None,
        virtual_stages: int | None = None,
    ) -> Layout:
        """Return a copy with these settings (None: unchanged). Ranks keep their places, so the copy shares `memo`."""
        layout = copy(self)  # quicker than replace(), because a search makes thousands of copies
        if virtual_stages is not None and virtual_stages != self.parallel.virtual_stages:
            object.__setattr__(layout, "parallel", replace(self.parallel, virtual_stages=virtual_stages))
        for name, value in (("schedule", schedule), ("bucket_bytes", bucket_bytes), ("recompute", recompute)):
            if value is not None:
                object.__setattr__(layout, name, value)
        for name in ("order", "orders"):  # the only cached properties that these settings change
            layout.__dict__.pop(name, None)
        return layout

    def with_schedule(self, kind: ScheduleKind, chunks: int | None = None, recompute: str | None = None) -> Layout:
        """Return the layout with schedule `kind` and without extra passes in flight (`ScheduleKind.in_flight`)."""
        p, chunks = self.parallel, chunks or self.parallel.virtual_stages
        depths = kind.in_flight(p.pp, self.batch.micro_batches(p.dp), chunks)
        schedule = schedule_of(kind.name, depths, *([(0,) * p.pp, (1,) * p.pp] if kind.splits else []))
        return self.with_settings(schedule, recompute=recompute, virtual_stages=chunks)

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Layout:
        grad_dtype, early_step = costs.grad_dtype or plan.grad_dtype, costs.early_step or plan.early_step
        costs = replace(costs, grad_dtype=grad_dtype, early_step=early_step)
        fields = {name: getattr(plan, name) for name in PLAN_FIELDS}
        return cls(site=costs.calibration.with_measured_links(plan.site), costs=costs, batch=plan.parts, **fields)

    @cached_property
    def is_per_stage(self) -> bool:
        """True if stages differ in TP or DP, or replicas in their micro-batches; never if hierarchical."""
        return not self.is_hierarchical and not self.parallel.is_grid(self.batch.micro_batches(1))

    @cached_property
    def is_weighted(self) -> bool:
        """Return whether the layout is hierarchical and its pipelines differ in their number of micro-batches."""
        return self.is_hierarchical and not self.parallel.is_grid(self.batch.micro_batches(1))

    @cached_property
    def spans_pools(self) -> bool:
        """Return whether one data-parallel group spans all components."""
        return self.is_hierarchical and len(self.components) > 1 and self.parallel.optimizer_instances == 1

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """The :class:`Order` of each kind of pipeline replica: that of its pipeline with the most micro-batches."""
        if not self.is_weighted:
            return (self.order,) * len(self.replicas)
        shares = self.parallel.pipeline_shares([c.ranks for c in self.components], self.batch.micro_batches(1))
        return tuple(self._uniform_order(max(counts)) for counts in shares)

    @cached_property
    def order(self) -> Order:
        p = self.parallel
        if self.is_weighted:
            return max(self.orders, key=lambda order: order.micro_batches)
        if self.is_per_stage:
            total, s = self.batch.micro_batches(1), self.schedule
            return self.memo.of("order", s, compute=lambda: Order.per_stage(p.routes(total), **vars(s)))
        return self._uniform_order(self.batch.micro_batches(p.dp))

    def _uniform_order(self, micro_batches: int) -> Order:
        """Return the order of a pipeline of `micro_batches`, whose stages all have the same TP and DP."""
        p, s, software = self.parallel, self.schedule, self.costs.software
        passes = {"in_flight": s.in_flight, "deferred": s.deferred, "final": s.final}
        transfers = {"overlap": software.overlap_transfers, "paired": software.paired_transfers}
        return _order(s.kind, p.pp, micro_batches, chunks=p.virtual_stages, **passes, **transfers)

    @property
    @memoised("recompute")
    def views(self) -> tuple[StageView, ...]:
        """The view of each stage of a layout with per-stage TP/DP."""
        return tuple(self._view(stage) for stage in range(self.parallel.pp))

    def _view(self, stage: int) -> StageView:
        sizes, p, batch = self.parallel.stages[stage], self.parallel, self.batch
        gpus, micro_size = self.replicas[0][stage].gpus_per_node, batch.micro_size
        count = max(len(self.order.micro_batches_of(self.order.row(stage, r))) for r in range(sizes.dp))
        padding = p.vocabulary_parts // sizes.tp  # the vocabulary is padded for the TP of every stage
        near = range(max(0, stage - 1), min(p.pp, stage + 2))
        held = [(c, tuple(s - near[0] for s in c.stages if s in near)) for c in self.components]
        sequence_parallel, rule = p.sequence_parallel and sizes.tp > 1, self.transport_rule

        def uniform() -> Layout:
            view = replace(
                self,
                model=replace(self.model, vocab_multiple=self.model.vocab_multiple * padding),
                batch=Batch(micro_size * sizes.dp * count, micro_size, batch.sequence_length).split(sizes.cp),
                parallel=Parallel.uniform(
                    *(sizes.tp, len(near), sizes.copies), cp=sizes.cp, sequence_parallel=sequence_parallel
                ),
                schedule=Schedule(PER_STAGE.name, (1,) * len(near)),
                components=tuple(replace(c, gpus_per_node=gpus, stages=stages) for c, stages in held if stages),
                pool_memo=Memo(),
            )
            object.__setattr__(view, "transport_rule", rule)  # of the whole job
            return view

        places = *((c.pool, c.nodes, stages) for c, stages in held if stages), rule.mode == "holmes" or rule.pools
        key = micro_size, self.recompute, sizes, gpus, count, padding, sequence_parallel, stage - near[0], places
        return StageView(self.pool_memo.of("view", *key, compute=uniform), stage - near[0])

    def view_schedule(self, stage: int, view: StageView) -> Schedule:
        """Return a schedule for the `view` of `stage` in which all stages have this stage's numbers."""
        s, count = self.schedule, view.layout.parallel.pp
        return schedule_of(
            s.kind, *((numbers[stage],) * count for numbers in (s.in_flight, s.deferred, s.final) if numbers)
        )

    @property
    def split_schedule(self) -> Schedule | None:
        """The schedule if it has weight passes, on which the times of passes and reductions then depend."""
        return self.schedule if self.schedule.deferred else None

    @property
    def all_layers(self) -> np.ndarray:
        """Layer splits that give every stage 1, 2, …, or all layers of the model, (layers, stages, 1)."""
        counts = np.arange(1, self.model.layers + 1)
        return np.repeat(counts, self.parallel.pp).reshape(-1, self.parallel.pp, 1)

    @property
    def is_hierarchical(self) -> bool:
        return self.parallel.is_hierarchical

    @property
    def strategy(self) -> str:
        """The plan's strategy."""
        return "hierarchical-dp" if self.is_hierarchical else "one-fabric" if len(self.components) == 1 else "pipeline"

    @cached_property
    def replicas(self) -> tuple[tuple[Component, ...], ...]:
        """The component of each stage, for each kind of pipeline replica.
        Pipelines on the same components are of one kind. A hierarchical layout has one kind per component."""
        components = [self._in_domains(c) for c in self.components]
        if self.is_hierarchical:
            return tuple((c,) * self.parallel.pp for c in components)
        component_of = {s: c for c in components for s in c.stages}
        return (tuple(component_of[s] for s in range(self.parallel.pp)),)

    def _in_domains(self, component: Component) -> Component:
        """Return the component with each multi-node NVLink domain counted as one node."""
        nodes = self._nodes_of_domain(component.pool)
        if nodes == 1:
            return component
        return replace(component, nodes=component.nodes // nodes, gpus_per_node=component.gpus_per_node * nodes)

    def _nodes_of_domain(self, pool: str) -> int:
        """Return the number of nodes of an NVLink domain, for the component in `pool`."""
        component = next(c for c in self.components if c.pool == pool)
        nvlink_gpus = self.pools[pool].gpu.nvlink_gpus or component.gpus_per_node
        return math.gcd(component.nodes, max(1, nvlink_gpus // component.gpus_per_node))

    @cached_property
    def stage_ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(first, end) of each range of stages on one component, for each kind of pipeline replica."""
        ranges = []
        for stages in self.replicas:
            starts = [s for s in range(len(stages)) if s == 0 or stages[s] is not stages[s - 1]]
            ranges.append(tuple(zip(starts, [*starts[1:], len(stages)], strict=True)))
        return tuple(ranges)

    def pipelines(self, component: Component) -> int:
        """Return the number of pipelines through `component`: all pipelines, unless the layout is hierarchical."""
        return component.ranks // (self.parallel.pp * self.parallel.tp) if self.is_hierarchical else self.parallel.dp

    @property
    def intra_dp_size(self) -> int:
        """The number of ranks of an intra-DP group: a data-parallel group within one optimizer instance."""
        return self.parallel.dp // self.parallel.optimizer_instances

    def pool(self, component: Component) -> Pool:
        return self.pools[component.pool]

    @cached_property
    def transport_rule(self) -> TransportRule:
        """The plan's :class:`TransportRule`. Here, a group's nodes are computed without listing the group's members."""
        return TransportRule.of_job(self.site, self.transport_mode, self.components)

    @cached_property
    def edges(self) -> tuple[tuple[Transport, ...], ...]:
        """The transport of the stage transfer from each stage to the next, for each kind of pipeline replica.
        The last stage sends to the first. The transport is local if the transfer never leaves a node."""
        if self.is_per_stage:
            return (tuple(view.edges[0][s] for view, s in self.views),)
        transport = cache(lambda source, target, is_local: self.transport_rule.of({source, target}, is_local))
        return tuple(
            tuple(
                transport(source.pool, target.pool, self._is_local(stage, source, target))
                for stage, (source, target) in enumerate(zip(stages, (*stages[1:], stages[0]), strict=True))
            )
            for stages in self.replicas
        )

    def _is_local(self, stage: int, source: Component, target: Component) -> bool:
        """Return whether the transfer from `stage`, on `source`, to the next stage, on `target`, stays in a node."""
        p = self.parallel
        if self.is_hierarchical:
            per_node = source.gpus_per_node // p.tp
            # If a node holds whole pipelines, even the edge back to the first stage stays inside it.
            stays_inside = stage + 1 < p.pp and (stage + 1) % math.gcd(p.pp, per_node) != 0
            return source.nodes == 1 or per_node % p.pp == 0 or stays_inside
        ranks, position = p.dp * p.tp, stage - source.stages[0]  # of the stage, inside its component
        distance = (stage + 1) % p.pp - stage
        next_end = position * ranks % source.gpus_per_node + (abs(distance) + 1) * ranks  # from the node's first rank
        return source is target and (source.nodes == 1 or (distance > 0 and next_end <= source.gpus_per_node))

    def intra_dp_nodes(self, replica: int, stage: int) -> int:
        """Return the number of nodes that one intra-DP group of `stage` spans."""
        p, component = self.parallel, self.replicas[replica][stage]
        if self.spans_pools:
            per_pool = ((self.pipelines(c), max(1, c.gpus_per_node // (p.tp * p.pp))) for c in self.components)
            return sum(-(-pipelines // per_node) for pipelines, per_node in per_pool)
        per_node = component.gpus_per_node // p.tp
        if self.is_hierarchical:
            per_node = max(1, per_node // p.pp)
        elif component.gpus_per_node % (p.dp * p.tp) and component.nodes > 1 and p.dp * p.tp < component.gpus_per_node:
            return 2  # the stage straddles two nodes
        return max(1, -(-self.intra_dp_size // per_node))

    def intra_dp_transport(self, replica: int, stage: int) -> Transport:
        """Return the transport of the intra-DP groups of `stage`."""
        one_node = self.intra_dp_size == 1 or self.intra_dp_nodes(replica, stage) == 1
        pools = self.transport_rule.pools if self.spans_pools else {self.replicas[replica][stage].pool}
        return self.transport_rule.of(pools, one_node)

    def inter_dp_transport(self) -> Transport:
        """Return the transport between optimizer instances."""
        return self.transport_rule.of(self.transport_rule.pools, self.transport_rule.one_node)

    def embedding_transport(self, replica: int = 0) -> Transport:
        """Return the transport between the first and the last stage, for a tied embedding's gradients."""
        first, last = self.replicas[replica][0], self.replicas[replica][-1]
        has_whole_pipelines = self.is_hierarchical and first.gpus_per_node // self.parallel.tp % self.parallel.pp == 0
        is_local = self.parallel.pp == 1 or (first is last and (first.nodes == 1 or has_whole_pipelines))
        return self.transport_rule.of({first.pool, last.pool}, is_local)

    def rate(
        self,
        transport: Transport,
        component: Component,
        collective: str = "",
        peer: Component | None = None,
        nodes: float = 1,
    ) -> float:
        """Return the payload bytes per second of one node, or of one rank if local, for messages or `collective`.
        `peer`: the receiver, if it may be on another pool. `nodes`: as in :meth:`Site.rate_gbps`."""
        key = "rate", transport.kind, component.pool, component.gpus_per_node, collective, peer and peer.pool, nodes
        return self.pool_memo.of(*key, compute=partial(self._rate, transport, component, collective, peer, nodes))

    def _rate(
        self, transport: Transport, component: Component, collective: str, peer: Component | None, nodes: float
    ) -> float:
        pool = self.pool(component)
        gbps = self.site.rate_gbps(transport.kind, pool, self.pool(peer) if peer else None, nodes)
        if transport.kind != "local":
            gbps *= self._nodes_of_domain(component.pool)
        rate = gbps * 1e9 / 8 * self.costs.link(transport, pool, collective).efficiency
        delay_s = self.site.delay_s(transport.kind, pool, self.pool(peer) if peer else None)
        connections = 1 if collective else self.edge_connections
        return min(rate, window_rate(component.gpus_per_node, delay_s, self.costs) * connections)

    def latency(
        self, transport: Transport, component: Component, collective: str = "", peer: Component | None = None
    ) -> float:
        """Return the seconds until the first byte of a message arrives."""
        pool = self.pool(component)
        delay_s = self.site.delay_s(transport.kind, pool, self.pool(peer) if peer else None)
        return self.costs.link(transport, pool, collective).latency_s + delay_s

    @property
    @memoised()
    def norm_s(self) -> float:
        """Seconds of all-reducing the gradient norm up and down a tree; 0 if a measured `step_s` includes it."""
        if self.costs.calibration.step_s:
            return 0.0
        steps, shared = 2 * math.ceil(math.log2(max(1, self.parallel.world_size))), self.transport_rule.shared
        pairs = (*((c, c) for c in self.components), *self.ring_links)
        return steps * max(self.latency(shared, c, "reduce_scatter", to) for c, to in pairs)

    @property
    def ring(self) -> tuple[tuple[Component, Component], ...]:
        """The (from, to) pairs of a ring over all components."""
        return tuple(zip(self.components, (*self.components[1:], self.components[0]), strict=True))

    @property
    def ring_links(self) -> tuple[tuple[Component, Component], ...]:
        """The pairs of :attr:`ring` for which the site has a link."""
        names = {name: pool.fabric_name for name, pool in self.pools.items()}
        return tuple((a, b) for a, b in self.ring if self.site.link(names[a.pool], names[b.pool]))
