"""Evaluation of one placement: the schedule, virtual stages, recomputation, depth and layers of the shortest step."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import inf

import numpy as np

from holmes_hpc.errors import PlanError
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.flops import layer_parameters
from holmes_hpc.planning.cost.layer_times import LayerShape
from holmes_hpc.planning.cost.layout import Layout, schedule_of
from holmes_hpc.planning.cost.memory import fits, max_layers
from holmes_hpc.planning.cost.timing import least_s
from holmes_hpc.planning.plan.parallel import HIERARCHICAL_ORDER, PIPELINE_ORDER, Parallel
from holmes_hpc.planning.plan.parts import lacks_layers
from holmes_hpc.planning.plan.plan import RECOMPUTE
from holmes_hpc.planning.schedule.kinds import candidate_schedules, megatron_kind, schedule_kind
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.planning.schedule.simulation import ACCURATE
from holmes_hpc.planning.search.layers import (
    LayerSplitter,
    chunk_layers,
    deepen,
    exact_layers,
    extra_depth,
    may_front_load,
    proportional_layers,
    uniform_layers,
)
from holmes_hpc.planning.search.placement import Placement, component, other_orders
from holmes_hpc.planning.search.problem import BUCKET_BYTES, Problem, Solution, expert_sizes, timed

BUCKETS = tuple(BUCKET_BYTES // n for n in (4, 16, 64, 256))
MIN_GAIN = 0.003  # eager 1F1B and virtual stages must each shorten the step by at least this share
EXTRA_DEPTHS = (1, 2, 4, 8)  # passes in flight to try at every transfer, in addition to those that hide it
LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)  # numbers of backward passes to try by which weight passes lag behind
MIN_LAG_GAIN = 1e-3  # after a round of changes to weight passes that gains at least this share, another one follows
FEW_STAGES = 4  # up to this many, weight passes are chosen stage by stage, and for several splits of the layers


@dataclass(frozen=True, kw_only=True)
class Candidate(Solution):
    """A solution with one placement.

    `bound`: a lower bound of the step in seconds. `is_full`: layers were chosen, and as many as fit on some stage."""

    placement: Placement
    bound: float
    is_full: bool = False

    @property
    def score(self) -> float:
        """The step time plus a small penalty for virtual stages and for each GPU, so that ties go to simpler plans."""
        has_virtual_stages = self.layout.parallel.virtual_stages > 1
        return self.seconds * (1 + MIN_GAIN * has_virtual_stages + 1e-7 * self.placement.gpus)

    def sort_key(self) -> tuple[object, ...]:
        p = self.layout.parallel
        return self.score, self.bound, self.placement.sort_key(), p.virtual_stages, self.layout.recompute


class Evaluator:
    """Creates, simulates and refines the candidates of placements of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, options = problem, problem.options
        self.model, self.batch, self.site, self.options, self.costs = problem
        if options.schedule != "auto" and options.virtual_stages is not None:
            schedule_kind(options.schedule).check_chunks(options.virtual_stages)
        # One placement's candidates are created one after the other.
        self._last: tuple[Placement, tuple[int, int], Layout] | None = None
        self._memo = Memo()

    def candidates(self, placement: Placement, max_s: float = inf) -> Iterator[Candidate]:
        """Yield candidates that are not simulated yet, for each EP and each number of virtual stages with an estimated
        step of at most `max_s` seconds. A candidate has the least recomputation that fits in memory. If memory limits
        the layers of one of its stages, candidates with more recomputation follow."""
        recomputations = RECOMPUTE if self.options.recompute == "auto" else (self.options.recompute,)
        sizes = expert_sizes(self.model, self.options, placement.tp * placement.dp)
        for experts, chunks in product(sizes, self._chunks(placement)):
            if placement.estimate.seconds(chunks) > max_s:
                continue
            for recompute in recomputations:
                if not self._may_fit(placement, recompute, chunks, experts):
                    continue
                tries = (
                    self._candidate(placement, recompute, k, chunks, experts)
                    for k in self._schedules(placement, chunks)
                )
                candidate = next(filter(None, tries), None)
                if candidate is not None:
                    yield candidate
                    if not candidate.is_full:
                        break

    def bound_s(self, placement: Placement) -> float:
        """Return a lower bound of the step time of every candidate of a placement, in seconds.
        It is the compute time of the slowest stage plus the software overhead of the passes and the step."""
        estimate, pools = placement.estimate, [b.pool for b in placement.blocks]
        pass_s = min(map(self.costs.pass_overhead_s, pools))
        return float(estimate.micro_batches * (estimate.tau + 2 * pass_s)) + max(map(self.costs.step_overhead_s, pools))

    def _chunks(self, placement: Placement) -> Sequence[int]:
        """Return the numbers of virtual stages to try."""
        fixed, kind = self.options.virtual_stages, self.options.schedule
        least = 1 if kind == "auto" else schedule_kind(kind).chunks[0]
        return [fixed] if fixed else range(least, int(placement.estimate.max_chunks) + 1)

    def _may_fit(self, placement: Placement, recompute: str, chunks: int, experts: tuple[int, int]) -> bool:
        """Return False if the layers cannot all fit in memory.
        This quick check counts only the memory of the layers, so they may not fit even if it returns True."""
        batch = replace(self.batch, micro_size=placement.micro_size)
        kind = schedule_kind(candidate_schedules(self.options.schedule, chunks, background=False)[-1])
        depth = np.array(kind.in_flight(placement.pp, batch.micro_batches(placement.dp), chunks)) / chunks
        shards = placement.dp // placement.instances if self.options.distributed_optimizer is not False else 1
        shards *= placement.tp if self.model.experts.count else 1  # at least as many as the experts' optimizer has
        sequence_parallel = placement.tp > 1 and self.options.sequence_parallel is not False
        shape = LayerShape(self.model, batch, placement.tp, sequence_parallel, recompute, *experts)
        max_gib = self.options.max_memory_gib
        layer_limits = [max_layers(shape, self.costs, b.pool.gpu, shards, depth, max_gib) for b in placement.blocks]
        if placement.strategy != "hierarchical-dp":
            starts = np.cumsum([0, *(b.stages for b in placement.blocks)])
            layer_limits = [
                np.concatenate([n[a:z] for n, a, z in zip(layer_limits, starts[:-1], starts[1:], strict=True)])
            ]
        per_stage = np.min(layer_limits, axis=0)
        return bool(per_stage.min() >= chunks and per_stage.sum() >= self.model.layers - self.model.experts.first_dense)

    def _schedules(self, placement: Placement, chunks: int) -> tuple[str, ...]:
        """Return the names of the schedules to try, the preferred one first (:func:`candidate_schedules`)."""
        background = placement.pp > 1 and self.options.transport == "holmes"
        return candidate_schedules(self.options.schedule, chunks, background)

    def layout(
        self, placement: Placement, recompute: str, kind: str, chunks: int, experts: tuple[int, int] | None = None
    ) -> Layout:
        """Return the layout under the schedule `kind` with the fewest passes in flight.
        `experts`: EP and ETP; None means the largest possible ones."""
        experts = experts or expert_sizes(self.model, self.options, placement.tp * placement.dp)[-1]
        if self._last is None or self._last[:2] != (placement, experts):
            self._last = placement, experts, self._layout(placement, *experts)
        return self._last[2].with_schedule(schedule_kind(kind), chunks, recompute=recompute)

    def _layout(self, placement: Placement, ep: int, etp: int) -> Layout:
        o, is_hierarchical = self.options, placement.strategy == "hierarchical-dp"
        is_sharded = o.distributed_optimizer is not False
        first_stages = accumulate((0 if is_hierarchical else b.stages for b in placement.blocks), initial=0)
        batch = replace(self.batch, micro_size=placement.micro_size)
        divides = batch.sequence_length % placement.tp == 0
        problem = f"TP {placement.tp} does not divide a sequence of {batch.sequence_length}"
        PlanError.refuse("plan", (o.sequence_parallel and not divides, problem, "remove plan.sequence_parallel"))
        parallel = Parallel.uniform(
            placement.tp,
            placement.pp,
            placement.dp,
            order=HIERARCHICAL_ORDER if is_hierarchical else PIPELINE_ORDER,
            optimizer_instances=max(placement.instances * is_sharded, self.costs.software.instances),
            distributed_optimizer=is_sharded,
            sequence_parallel=placement.tp > 1 and divides and o.sequence_parallel is not False,
            ep=ep,
            etp=etp,
            cp=batch.cp,
            cp_comm="a2a" if batch.all_to_all else "ring",
            ep_comm=o.ep_comm if ep * etp > 1 else "alltoall",
        )
        sizes = placement.micro_size, placement.tp, placement.dp, placement.instances, ep, etp
        return self.problem.layout(
            parallel,
            batch=batch,
            recompute="none",
            schedule=schedule_of(megatron_kind(chunks=1).name, (1,) * placement.pp),  # :meth:`layout` replaces it
            components=tuple(map(component, placement.blocks, first_stages)),
            pool_memo=self._memo.of("common", is_hierarchical and placement.pp, *sizes, compute=Memo),
        )

    def _candidate(
        self, placement: Placement, recompute: str, kind: str, chunks: int, experts: tuple[int, int]
    ) -> Candidate | None:
        """Return a candidate with balanced or user-fixed layers, the best bucket size and the lower bound. Return None
        if it does not fit in memory, or if the schedule or the user-fixed layers are impossible."""
        try:
            layout = self.layout(placement, recompute, kind, chunks, experts)
            layout.order  # noqa: B018 (raises if virtual stages do not allow this number of micro-batches)
        except PlanError:
            return None
        if self._may_choose_layers:
            splitter = LayerSplitter(layout, self.options.max_memory_gib)
            if not splitter.can_fit:
                return None
            layers, is_full = splitter.balanced()
            other_layers = splitter.front_loaded() if may_front_load(layout) else layers
        else:
            other_layers = layers = self._fixed_layers(layout)
            is_full = False
            if layers.shape[1] != placement.pp or layers.sum() != self.model.layers or lacks_layers(layers[0]):
                return None
            if not fits(layout, layers, self.options.max_memory_gib)[0]:
                return None
        sizes = np.array(self._bucket_sizes(layout))
        layer_splits = np.concatenate([np.repeat(layers, len(sizes), axis=0), other_layers])
        bounds, with_traffic = least_s(layout, layer_splits, np.append(sizes, layout.bucket_bytes))
        best = int(np.argmin(with_traffic[:-1]))
        layout = layout.with_settings(bucket_bytes=int(sizes[best]))
        bound = float(min(bounds[best], bounds[-1]))
        return Candidate(layout, layers, placement=placement, bound=bound, is_full=is_full)

    def _fixed_layers(self, layout: Layout) -> np.ndarray:
        if self.options.layers_per_stage is not None:
            return chunk_layers(self.options.layers_per_stage, layout.parallel.virtual_stages)
        return uniform_layers(layout) if self.options.partition == "uniform" else proportional_layers(layout)

    def simulate(self, candidate: Candidate, passes: int = ACCURATE) -> Candidate:
        """Simulate the candidate and return it with its step time.
        If its schedule `deepens` (:class:`ScheduleKind`), also choose passes in flight. `passes`: as in `step_s`."""
        if not schedule_kind(candidate.layout.schedule.kind).deepens:
            return timed(candidate, passes)
        extra = extra_depth(candidate.layout, candidate.layers)
        return self._front_load(self._hide_transfers(candidate, extra, passes), extra, passes)

    def _hide_transfers(self, candidate: Candidate, extra: list[int], passes: int) -> Candidate:
        """Return the candidate with the passes in flight that hide the transfers, as far as memory allows.
        `extra`: the result of :func:`extra_depth`, in passes per stage."""
        for _, layout in self._depths(candidate, extra):
            try:
                return timed(candidate, passes, layout=layout)
            except PlanError:  # virtual stages that deadlock at this depth
                continue
        return candidate

    def _front_load(self, candidate: Candidate, extra: list[int], passes: int) -> Candidate:
        """Return the candidate, or a version with a shorter step whose first stages have more layers and more passes in
        flight. These compute while the pipeline fills and parameters are gathered. `extra`: as in _hide_transfers."""
        if not self._may_choose_layers or not may_front_load(candidate.layout):
            return candidate
        _, layout = next(self._depths(candidate, [e + EXTRA_DEPTHS[-1] for e in extra[:-1]] + [0]))
        splitter = LayerSplitter(layout, self.options.max_memory_gib)
        layers = splitter.front_loaded() if splitter.can_fit else candidate.layers
        if float(least_s(layout, layers)[0][0]) >= candidate.seconds:
            return candidate
        changed = timed(candidate, passes, layout=layout, layers=layers)
        return changed if changed.seconds < candidate.seconds else candidate

    @property
    def _may_choose_layers(self) -> bool:
        return self.options.layers_per_stage is None and self.options.partition == "exact"

    def _depths(self, candidate: Candidate, extra: list[int]) -> Iterator[tuple[int, Layout]]:
        """Yield (cap, layout) for each cap on the numbers in `extra` that lets the layout fit in memory.
        The highest cap comes first. The last one is 0, even if its layout does not fit."""
        for cap in sorted(set(extra) | {*range(min(max(extra), 8)), 0}, reverse=True):
            layout = deepen(candidate.layout, [min(e, cap) for e in extra])
            if cap == 0 or fits(layout, candidate.layers, self.options.max_memory_gib)[0]:
                yield cap, layout

    def note_missing_depth(self, candidate: Candidate) -> Candidate:
        """Return the candidate, with a note if memory is too small for the passes in flight that hide the transfers."""
        layout, chunks = candidate.layout, candidate.layout.parallel.virtual_stages
        eager = [kind for kind in self._schedules(candidate.placement, chunks) if schedule_kind(kind).deepens]
        if not eager:
            return candidate
        extra = extra_depth(layout, candidate.layers)
        eager_layout = layout.with_schedule(schedule_kind(eager[0]))
        schedule = replace(eager_layout.schedule, in_flight=layout.schedule.in_flight)
        deeper = replace(candidate, layout=eager_layout.with_settings(schedule))
        cap, _ = next(self._depths(deeper, extra))
        if cap == max(extra):
            return candidate
        needed = f"hiding its transfers takes {max(extra)}"
        note = f"memory allows {cap} extra micro-batches in flight over a slow link; {needed}"
        return replace(candidate, notes=tuple(dict.fromkeys((*candidate.notes, note))))

    def refine(self, candidate: Candidate, max_orders: int | None = None) -> Candidate:
        """Return the candidate with the best order of pools, layers, passes in flight, bucket size and schedule.
        `max_orders`: the most other orders of the pools to consider, by ascending bound; None: all."""
        simulated, layout, placement = [timed(candidate)], candidate.layout, candidate.placement
        p = layout.parallel
        settings = layout.recompute, layout.schedule.kind, p.virtual_stages, (p.ep, p.etp)
        reordered = (
            self._candidate(replace(placement, blocks=blocks), *settings)
            for blocks in (() if self.options.pool_order is not None else other_orders(placement))
        )
        for variant in sorted(filter(None, reordered), key=lambda c: c.bound)[:max_orders]:
            if variant.bound < min(c.seconds for c in simulated):
                simulated.append(self.simulate(variant))
        simulated.sort(key=lambda c: c.seconds)
        improved = [self._refine_layers_and_depth(c) for c in simulated[:2]]  # this can change which of the two wins
        if has_weight_passes := schedule_kind(layout.schedule.kind).splits:
            balanced = self._candidate(placement, *settings) if self._may_choose_layers else None
            deferring = sorted(self._deferring(balanced), key=lambda c: c.seconds) if balanced else []
            improved += deferring[:1]
            splits = {tuple(c.layers[0, :, 0].tolist()) for c in (*deferring, *improved)}
            improved = list(map(self._with_weight_passes, improved))
            for split in sorted(splits) if balanced and p.pp <= FEW_STAGES else ():
                options = replace(self.options, layers_per_stage=split)  # a better schedule may need this split
                fixed = Evaluator(self.problem._replace(options=options))
                if alike := fixed._candidate(placement, *settings):
                    extra = [e + EXTRA_DEPTHS[-2] for e in extra_depth(alike.layout, alike.layers)[:-1]] + [0]
                    starts = alike, replace(alike, layout=next(self._depths(alike, extra))[1])  # few passes, or many
                    improved += [fixed.refine(c, max_orders) for c in {c.layout.schedule: c for c in starts}.values()]
        best = min(improved, key=lambda c: float(f"{c.seconds:.6g}"))  # the first of equally fast ones
        if has_weight_passes:  # the buckets are chosen already
            return best
        for size in self._bucket_sizes(best.layout):
            best = self._better(best, best.layout.with_settings(bucket_bytes=size))
        simpler = self.simplify(best)
        return simpler if simpler.seconds < best.seconds else best

    def _deferring(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with 0, 1, 2, … deferred weight passes in all stages, and balanced layers that fit."""
        _, deep = next(self._depths(candidate, extra_depth(candidate.layout, candidate.layers)))
        for lag, final in weight_pass_numbers(candidate.layout.order):
            layout = with_weight_passes(deep, range(deep.parallel.pp), lag, final)
            splitter = LayerSplitter(layout, self.options.max_memory_gib)
            if splitter.can_fit:
                yield timed(candidate, layout=layout, layers=splitter.balanced()[0])

    def _with_weight_passes(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the best layers, passes in flight, bucket size and weight passes. Each round
        changes the weight passes of all stages alike, then of one stage (of many: one component) at a time."""
        order, start_s = candidate.layout.order, inf
        sizes, changes = self._bucket_sizes(candidate.layout), weight_pass_numbers(order)
        stages, are_few = range(order.stages), order.stages <= FEW_STAGES
        parts = [(s,) for s in stages] if are_few else [c.stages for c in candidate.layout.components]
        while candidate.seconds <= start_s * (1 - MIN_LAG_GAIN):
            start_s = candidate.seconds
            for part, (lag, final) in product((stages, *parts), changes):
                candidate = self._better(candidate, with_weight_passes(candidate.layout, part, lag, final))
            for size in sizes:
                candidate = self._better(candidate, candidate.layout.with_settings(bucket_bytes=size))
            candidate = self._refine_layers_and_depth(candidate)
        return candidate

    def _better(self, candidate: Candidate, layout: Layout) -> Candidate:
        """Return the candidate with `layout` if that fits in memory and makes the step shorter, unchanged otherwise."""
        if not fits(layout, candidate.layers, self.options.max_memory_gib)[0]:
            return candidate
        changed = timed(candidate, layout=layout)
        return changed if changed.seconds < candidate.seconds * (1 - 1e-4) else candidate

    def _bucket_sizes(self, layout: Layout) -> tuple[int, ...]:
        """Return the bucket sizes to try, in bytes: the user's size, or Megatron-Core's default and smaller sizes.
        If layers are smaller than all of these, the size of one layer is also tried."""
        if self.options.bucket_bytes:
            return (layout.bucket_bytes,)
        p = layout.parallel
        layer_bytes = int(layer_parameters(self.model, p.tp, p.expert_ranks) * self.costs.gradient_size)
        return (BUCKET_BYTES, *BUCKETS, *([layer_bytes] if layer_bytes < BUCKETS[-1] else []))

    def _refine_layers_and_depth(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the best layers and passes in flight. More passes than hide the transfers let
        earlier stages run ahead. A stage with long gradient traffic can then have fewer layers, and end early."""
        best = candidate = self._refine_layers(candidate)
        if not may_front_load(candidate.layout):
            return candidate
        extra = extra_depth(candidate.layout, candidate.layers)
        for passes in EXTRA_DEPTHS:
            layout = deepen(candidate.layout, [e + passes for e in extra[:-1]] + [0])
            if not fits(layout, candidate.layers, self.options.max_memory_gib)[0]:
                break
            deeper = self._refine_layers(timed(candidate, layout=layout))
            best = deeper if deeper.seconds < best.seconds * (1 - 1e-3) else best
        return best

    def _refine_layers(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the layers of the shortest step, unless the user fixed them."""
        if not self._may_choose_layers:
            return candidate
        layers = exact_layers(candidate.layout, candidate.layers, self.options.max_memory_gib)
        return candidate if np.array_equal(layers, candidate.layers) else timed(candidate, layers=layers)

    def simplify(self, candidate: Candidate) -> Candidate:
        """Return the candidate with Megatron-Core's schedule if its step is then longer by at most MIN_GAIN."""
        s = candidate.layout
        if self.options.schedule != "auto" or s.order.schedule.megatron:
            return candidate
        simpler = timed(candidate, layout=s.with_schedule(megatron_kind(s.parallel.virtual_stages)))
        return simpler if simpler.seconds <= candidate.seconds * (1 + MIN_GAIN) else candidate


def with_weight_passes(layout: Layout, stages: Container[int], deferred: int, final: int) -> Layout:
    """Return the layout with these numbers of weight passes (:class:`Schedule`) in `stages`."""
    s = layout.schedule
    lags = tuple(deferred if i in stages else n for i, n in enumerate(s.deferred))
    finals = tuple(final if i in stages else n for i, n in enumerate(s.final))
    return layout.with_settings(schedule_of(s.kind, s.in_flight, lags, finals))


def weight_pass_numbers(order: Order) -> list[tuple[int, int]]:
    """Return the pairs (deferred, final) of a stage's :class:`Schedule` to try."""
    lags = sorted({min(lag, order.micro_batches) for lag in LAGS})
    return [(lag, final) for lag in lags for final in sorted({1, max(1, lag)})]
