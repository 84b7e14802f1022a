"""Trying out one placement: which schedule, virtual stages, recomputation, depth and layers make its step shortest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, permutations
from math import inf

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout, schedule_of
from holmes_hpc.planning.cost.memory import fits, max_layers
from holmes_hpc.planning.cost.timing import least_s, step_s
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, PIPELINE_ORDER, Parallel
from holmes_hpc.planning.plan.plan import RECOMPUTE, Component
from holmes_hpc.planning.schedule.kinds import in_question, megatrons_own, schedule_kind
from holmes_hpc.planning.schedule.simulation import WHOLE
from holmes_hpc.planning.search import layers as split
from holmes_hpc.planning.search.layers import deepened, extra_depth, may_be_early
from holmes_hpc.planning.search.placement import Block, Placement, component

BUCKET_BYTES = 160_000_000  # Megatron-Core's default of 40 million gradients of 4 bytes
BUCKETS = tuple(BUCKET_BYTES // n for n in (4, 16, 64, 256))
PLAINER = 0.003  # what the schedule that runs ahead, and virtual stages, must each gain at least to be worth it
FEW_FABRICS = 4  # up to which every order of them is tried
DEEPER = (1, 2, 4, 8)  # passes in flight to try at every transfer beyond those that hide it


@dataclass(frozen=True)
class Candidate:
    """One way to run a placement: its layout, layers of shape (1, S, C), a lower bound of its step's seconds and, once
    simulated, the seconds. `full`: the planner divided the layers, and a stage has as many as fit on it."""

    placement: Placement
    layout: Layout
    layers: np.ndarray
    bound: float
    seconds: float = inf
    full: bool = False
    notes: tuple[str, ...] = ()

    @property
    def strategy(self) -> str:
        return self.placement.strategy

    @property
    def score(self) -> float:
        """Seconds, a little longer for virtual stages and for more GPUs: ties go to the simpler plan."""
        virtual = self.layout.parallel.virtual_stages > 1
        return self.seconds * (1 + PLAINER * virtual + 1e-7 * self.placement.gpus)

    def key(self) -> tuple[object, ...]:
        p = self.layout.parallel
        return self.score, self.bound, self.placement.key(), p.virtual_stages, self.layout.recompute


class Evaluator:
    """Tries placements of one model, batch and site under given options."""

    def __init__(self, model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs) -> None:
        self.model, self.batch, self.site, self.options, self.costs = model, batch, site, options, costs
        if options.schedule != "auto" and options.virtual_stages is not None:
            schedule_kind(options.schedule).refuse(options.virtual_stages)
        self._last: tuple[Placement, Layout] | None = None  # many ways of one placement are asked for in turn
        self._memo = Memo()

    def ways(self, placement: Placement, most_s: float = inf) -> Iterator[Candidate]:
        """Every number of virtual stages that is estimated to take `most_s` seconds a step at most, each with the least
        recomputation that fits in memory, and with more as long as memory keeps a stage from having more layers. Not
        yet simulated."""
        recomputations = RECOMPUTE if self.options.recompute == "auto" else (self.options.recompute,)
        for chunks in self._chunks(placement):
            if placement.estimate.seconds(chunks) > most_s:
                continue
            for recompute in recomputations:
                if not self._could_fit(placement, recompute, chunks):
                    continue
                made = next(
                    filter(
                        None, (self._way(placement, recompute, kind, chunks) for kind in self._kinds(placement, chunks))
                    ),
                    None,
                )
                if made is not None:
                    yield made
                    if not made.full:
                        break

    def _chunks(self, placement: Placement) -> Sequence[int]:
        """Return the numbers of virtual stages to try."""
        wanted, kind = self.options.virtual_stages, self.options.schedule
        least = 1 if kind == "auto" else schedule_kind(kind).chunks[0]
        return [wanted] if wanted else range(least, int(placement.estimate.most_chunks) + 1)

    def _could_fit(self, placement: Placement, recompute: str, chunks: int) -> bool:
        """Whether the stages could hold all layers, by what these keep themselves: quick, and never wrongly false."""
        batch = self._batch(placement.micro)
        kind = schedule_kind(in_question(self.options.schedule, chunks, background=False)[-1])
        depth = np.array(kind.in_flight(placement.pp, batch.micro_batches(placement.dp), chunks)) / chunks
        run = placement.dp // placement.instances if self.options.distributed_optimizer else 1
        parallel = placement.tp > 1 and self.options.sequence_parallel is not False
        most = [
            max_layers(
                self.model,
                batch,
                self.costs,
                gpu=b.fabric.gpu,
                tp=placement.tp,
                sequence_parallel=parallel,
                recompute=recompute,
                shards=run,
                depth=depth,
                max_gib=self.options.max_memory_gib,
            )
            for b in placement.blocks
        ]
        if placement.strategy != "hierarchical-dp":
            first = np.cumsum([0, *(b.stages for b in placement.blocks)])
            most = [np.concatenate([m[a:z] for m, a, z in zip(most, first[:-1], first[1:], strict=True)])]
        least = np.min(most, axis=0)
        return bool(least.min() >= chunks and least.sum() >= self.model.layers)

    def _kinds(self, placement: Placement, chunks: int) -> tuple[str, ...]:
        """The schedules to try: the one asked for; else the one that runs ahead, which no other is faster than, and if
        there is no memory for its buffers Megatron-Core's own."""
        background = placement.pp > 1 and self.options.transport == "holmes"
        return in_question(self.options.schedule, chunks, background)

    def layout(self, placement: Placement, recompute: str, kind: str, chunks: int) -> Layout:
        """The layout under the schedule `kind`, with as many passes in flight as it has at least."""
        if self._last is None or self._last[0] is not placement:
            self._last = placement, self._layout(placement)
        return self._last[1].with_schedule(schedule_kind(kind), chunks, recompute=recompute)

    def _layout(self, placement: Placement) -> Layout:
        o, hierarchical = self.options, placement.strategy == "hierarchical-dp"
        firsts = accumulate((0 if hierarchical else b.stages for b in placement.blocks), initial=0)
        batch = self._batch(placement.micro)
        divides = batch.sequence_length % placement.tp == 0
        if o.sequence_parallel and not divides:
            raise PlanError(
                f"TP {placement.tp} does not divide a sequence of {batch.sequence_length}",
                where="plan",
                hint="leave plan.sequence_parallel out",
            )
        parallel = Parallel.uniform(
            placement.tp,
            placement.pp,
            placement.dp,
            order=HIERARCHICAL_ORDER if hierarchical else PIPELINE_ORDER,
            optimizer_instances=placement.instances,
            distributed_optimizer=o.distributed_optimizer,
            sequence_parallel=placement.tp > 1 and divides and o.sequence_parallel is not False,
        )
        alike = hierarchical and placement.pp, placement.micro, placement.tp, placement.dp, placement.instances
        return Layout(
            self.model,
            batch,
            parallel,
            recompute="none",
            schedule=schedule_of(megatrons_own(chunks=1).name, (1,) * placement.pp),  # :meth:`layout` sets another
            components=tuple(map(self._component, placement.blocks, firsts)),
            site=self.site,
            costs=self.costs,
            transport_mode=o.transport,
            edge_dtype=o.edge_dtype,
            edge_connections=o.edge_connections,
            bucket_bytes=o.bucket_bytes or BUCKET_BYTES,
            fabric_memo=self._memo.of("common", *alike, compute=Memo),
        )

    def _component(self, b: Block, first: int) -> Component:
        """Return the component of a block whose stages begin with `first`."""
        return self._memo.of(
            *("component", b.fabric.name, b.nodes, first, b.stages),
            compute=lambda: component(b.fabric, b.nodes, b.per_node, first, b.stages),
        )

    def _batch(self, micro: int) -> Batch:
        return self._memo.of("batch", micro, compute=lambda: replace(self.batch, micro_size=micro))

    def _way(self, placement: Placement, recompute: str, kind: str, chunks: int) -> Candidate | None:
        try:
            layout = self.layout(placement, recompute, kind, chunks)
            layout.order  # noqa: B018 (micro-batches that virtual stages cannot have are found out here)
        except PlanError:
            return None
        if self._free_layers:
            stages = split.Stages(layout, self.options.max_memory_gib)
            if not stages.fit:
                return None
            layers, full = stages.balanced()
            others = stages.early() if may_be_early(layout) else layers
        else:
            others = layers = self._told_layers(layout)
            full = False
            if layers.shape[1] != placement.pp or layers.sum() != self.model.layers or layers.min() < 1:
                return None
            if not fits(layout, layers, self.options.max_memory_gib)[0]:
                return None
        sizes = np.array([layout.bucket_bytes] if self.options.bucket_bytes else [BUCKET_BYTES, *BUCKETS])
        both = np.concatenate([np.repeat(layers, len(sizes), axis=0), others])
        bounds, whole = least_s(layout, both, np.append(sizes, layout.bucket_bytes))
        at = int(np.argmin(whole[:-1]))
        return Candidate(
            placement,
            layout.with_settings(bucket_bytes=int(sizes[at])),
            layers,
            float(min(bounds[at], bounds[-1])),
            full=full,
        )

    def _told_layers(self, layout: Layout) -> np.ndarray:
        if self.options.layers_per_stage is not None:
            return split.chunked(self.options.layers_per_stage, layout.parallel.virtual_stages)
        return split.uniform(layout) if self.options.partition == "uniform" else split.proportional(layout)

    def simulated(self, candidate: Candidate, passes: int = WHOLE) -> Candidate:
        """The candidate with its seconds; a schedule that may run deeper gets its depth."""
        if not schedule_kind(candidate.layout.schedule.kind).deepens:
            return self._timed(candidate, passes)
        extra = extra_depth(candidate.layout, candidate.layers)
        return self._early(self._deepest(candidate, extra, passes), extra, passes)

    @staticmethod
    def _timed(candidate: Candidate, passes: int = WHOLE) -> Candidate:
        return replace(candidate, seconds=float(step_s(candidate.layout, candidate.layers, passes)[0]))

    def _deepest(self, candidate: Candidate, extra: list[int], passes: int) -> Candidate:
        """Deep enough to hide the transfers, as far as memory allows: `extra` more passes than the stage below, twice a
        transfer's time in passes of the slowest stage."""
        for _, layout in self._depths(candidate, extra):
            try:
                return self._timed(replace(candidate, layout=layout), passes)
            except PlanError:  # virtual stages that would lock up at this depth
                continue
        return candidate

    def _early(self, candidate: Candidate, extra: list[int], passes: int) -> Candidate:
        """The candidate, or if its step is shorter the one whose first stages have more layers and run far ahead: they
        compute while the pipeline fills and parameters are gathered."""
        if not self._free_layers or not may_be_early(candidate.layout):
            return candidate
        wanted = [e + DEEPER[-1] for e in extra[:-1]] + [0]
        _, layout = next(self._depths(candidate, wanted))
        stages = split.Stages(layout, self.options.max_memory_gib)
        layers = stages.early() if stages.fit else candidate.layers
        if float(least_s(layout, layers)[0][0]) >= candidate.seconds:
            return candidate
        other = self._timed(replace(candidate, layout=layout, layers=layers), passes)
        return other if other.seconds < candidate.seconds else candidate

    @property
    def _free_layers(self) -> bool:
        """Whether the planner may choose the layers of each stage."""
        return self.options.layers_per_stage is None and self.options.partition == "exact"

    def _depths(self, candidate: Candidate, wanted: list[int]) -> Iterator[tuple[int, Layout]]:
        """(most passes more than at the stage below, the layout) for which there is memory, down from `wanted`."""
        for most in sorted(set(wanted) | {*range(min(max(wanted), 8)), 0}, reverse=True):
            layout = deepened(candidate.layout, [min(e, most) for e in wanted])
            if not most or fits(layout, candidate.layers, self.options.max_memory_gib)[0]:
                yield most, layout

    def noted(self, candidate: Candidate) -> Candidate:
        """The candidate, saying which depth it lacks the memory for with the layers it has now."""
        s = candidate.layout
        deep = [k for k in self._kinds(candidate.placement, s.parallel.virtual_stages) if schedule_kind(k).deepens]
        if not deep:
            return candidate
        wanted = extra_depth(s, candidate.layers)
        ahead = replace(candidate, layout=s.with_settings(schedule_of(deep[0], s.schedule.in_flight)))
        most, _ = next(self._depths(ahead, wanted))
        return (
            candidate
            if most == max(wanted)
            else replace(
                candidate,
                notes=(
                    f"memory allows {most} more micro-batches in flight at a slow hop, {max(wanted)} would hide it",
                ),
            )
        )

    def better(self, candidate: Candidate, orders_tried: int | None = None) -> Candidate:
        """The order of the fabrics, then layers and depth together, then buckets: what makes the step shortest. Of
        other orders those with the least bounds are simulated, `orders_tried` of them (None: all that could be
        better)."""
        orders, s = [self._timed(candidate)], candidate.layout
        ways = (
            self._way(
                replace(candidate.placement, blocks=blocks), s.recompute, s.schedule.kind, s.parallel.virtual_stages
            )
            for blocks in self._orders(candidate.placement)
        )
        for other in sorted(filter(None, ways), key=lambda o: o.bound)[:orders_tried]:
            if other.bound < min(o.seconds for o in orders):
                orders.append(self.simulated(other))
        orders.sort(key=lambda o: o.seconds)
        best = self._together(orders[0])
        for order in orders[1:2]:  # which of the two best wins can turn with layers and depth
            other = self._together(order)
            best = other if other.seconds < best.seconds * (1 - 1e-6) else best
        for size in () if self.options.bucket_bytes else (BUCKET_BYTES, *BUCKETS):
            other = self._timed(replace(best, layout=best.layout.with_settings(bucket_bytes=size)))
            best = other if other.seconds < best.seconds * (1 - 1e-4) else best
        return best

    def _together(self, candidate: Candidate) -> Candidate:
        """Layers, and passes in flight beyond those that hide the transfers: a stage whose gradients take long gets
        fewer layers, starts late and ends early, while the stages above it run ahead."""
        best = candidate = self._split(candidate)
        if not may_be_early(candidate.layout):
            return candidate
        wanted = extra_depth(candidate.layout, candidate.layers)
        for more in DEEPER:
            layout = deepened(candidate.layout, [e + more for e in wanted[:-1]] + [0])
            if not fits(layout, candidate.layers, self.options.max_memory_gib)[0]:
                break
            other = self._split(self._timed(replace(candidate, layout=layout)))
            best = other if other.seconds < best.seconds * (1 - 1e-3) else best
        return best

    def _split(self, candidate: Candidate) -> Candidate:
        """The candidate with the layers that make its step shortest, if they may be chosen."""
        if not self._free_layers:
            return candidate
        layers = split.exact(candidate.layout, candidate.layers, self.options.max_memory_gib)
        return candidate if np.array_equal(layers, candidate.layers) else self._timed(replace(candidate, layers=layers))

    def plainer(self, candidate: Candidate) -> Candidate:
        """Megatron-Core's own schedule in place of the one that runs ahead, if that is hardly slower; what memory
        lacks for running ahead is still said."""
        s = candidate.layout
        if self.options.schedule != "auto" or s.order.schedule.megatron:
            return candidate
        other = self._timed(replace(candidate, layout=s.with_schedule(megatrons_own(s.parallel.virtual_stages))))
        return other if other.seconds <= candidate.seconds * (1 + PLAINER) else candidate

    def _orders(self, placement: Placement) -> Iterator[tuple[Block, ...]]:
        """Other orders of the fabrics along the pipeline: all where they are few, else those with two changed over."""
        wanted, blocks = self.options.fabric_order, placement.blocks
        if placement.strategy == "hierarchical-dp" or wanted is not None:
            return
        if len(blocks) <= FEW_FABRICS:
            yield from (order for order in permutations(blocks) if order != blocks)
            return
        for a, b in combinations(range(len(blocks)), 2):
            order = list(blocks)
            order[a], order[b] = order[b], order[a]
            yield tuple(order)
