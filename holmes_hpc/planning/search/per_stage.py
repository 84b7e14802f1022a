"""The best layout whose stages have TP, DP and nodes of their own.

The most promising shapes (shapes.py) are simulated; of the best, the order of the stages, their depth, layers and
buckets are changed one at a time as long as the simulated step gets shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil, inf
from typing import Any

import numpy as np

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.layout import Layout, memoised
from holmes_hpc.planning.cost.memory import fits
from holmes_hpc.planning.cost.timing import step_s, timing
from holmes_hpc.planning.cost.traffic import edge_times
from holmes_hpc.planning.plan.parallel import Parallel, StageParallel
from holmes_hpc.planning.plan.plan import Component, Schedule
from holmes_hpc.planning.schedule.kinds import PER_STAGE
from holmes_hpc.planning.schedule.order import least_in_flight
from holmes_hpc.planning.search.candidate import BUCKET_BYTES, BUCKETS
from holmes_hpc.planning.search.explore import OVER, Clock
from holmes_hpc.planning.search.layers import all_dealt
from holmes_hpc.planning.search.placement import component
from holmes_hpc.planning.search.problem import Offer, Question, offers
from holmes_hpc.planning.search.stage_shapes import Shape, shapes

SHAPES = 400  # whose memory is checked
NEAR = 1.04  # shapes a change away: to the best, at most
FAR = 1.12  # variants slower than the best by more than this are not made better
DEEPER = (1, 3, 8)  # passes in flight to try beyond those that hide the transfers


_FREE: dict[str, tuple[Any, ...]] = {  # values of the options that leave stages the choice of TP, DP and nodes
    "dp": (None,),
    "layers_per_stage": (None,),
    "fabric_order": (None,),
    "partition": ("exact",),
    "schedule": ("auto", PER_STAGE.name),
    "virtual_stages": (None, 1),
    "strategy": ("auto", "pipeline"),
    "transport": ("holmes",),
    "distributed_optimizer": (True,),
    "sequence_parallel": (None, True),
}


def obstacle(options: PlanOptions, costs: Costs) -> str | None:
    """Return what keeps stages from having TP, DP and nodes of their own; None: nothing."""
    for name, free in _FREE.items():
        if (value := getattr(options, name)) not in free:
            return f"plan.{name}={value}"
    return None if costs.software.sharding in ("none", "optimizer") else f"sharding {costs.software.sharding}"


@dataclass(frozen=True)
class Effort:
    """Passes to simulate at most: of shapes as they are, of shapes a change away, to make the best better, and of these
    for a single one."""

    passes: int
    near: int
    better: int
    each: int


QUICK = Effort(150_000, near=300_000, better=300_000, each=75_000)
THOROUGH = Effort(500_000, near=1_200_000, better=1_000_000, each=83_333)


@dataclass(frozen=True)
class Variant:
    """A shape with its layers, (1, S, 1), and depths, and once simulated the seconds of its step."""

    shape: Shape
    layout: Layout
    layers: np.ndarray
    seconds: float = inf
    notes: tuple[str, ...] = ()

    @property
    def strategy(self) -> str:
        return "one-fabric" if len(self.layout.components) == 1 else "pipeline"

    @property
    def passes(self) -> int:
        """How much there is to simulate."""
        return 2 * self.layout.parallel.pp * self.layout.order.micro_batches

    def simulated(self, layers: np.ndarray | None = None, **changes: Any) -> Variant:
        """Return the variant with other layers, depths or buckets, and its seconds."""
        layout = self.layout.with_settings(**changes) if changes else self.layout
        layers = self.layers if layers is None else layers
        return Variant(self.shape, layout, layers, float(step_s(layout, layers)[0]))


@dataclass
class _Simulated:
    """The variants simulated so far, and how many passes that took."""

    clock: Clock
    variants: list[Variant] = field(default_factory=list)
    shapes: set[Shape] = field(default_factory=set)
    passes: int = 0

    def least(self, seconds: float = inf) -> float:
        return min((v.seconds for v in self.variants), default=seconds)

    def is_over(self, passes: int) -> bool:
        return self.passes > passes or bool(self.variants and self.clock.is_over())


def variants(question: Question, clock: Clock, limit: float, effort: Effort = THOROUGH) -> list[Variant]:
    """Return the variants with the shortest steps, the shortest first; none where none promises less than `limit`
    seconds."""
    options, done = question.options, _Simulated(clock)
    chosen = offers(question.site, options)

    def simulate(shape: Shape) -> None:
        done.shapes.add(shape)
        first = _first_variant(question, chosen, shape)
        simulated = [v.simulated() for v in (first, first and _early(first, options)) if v is not None]
        done.passes += sum(v.passes for v in simulated)
        done.variants += simulated
        clock.tell(f"planning: {len(done.variants)} layouts with TP and DP by stage simulated")

    for shape in shapes(question, OVER * limit)[:SHAPES]:
        if done.is_over(effort.passes):
            break
        if shape.estimate <= OVER * done.least(limit):
            simulate(shape)
    most_passes, changed = done.passes + effort.near, set[Shape]()
    while left := [v for v in done.variants if v.shape not in changed]:
        best, least = min(left, key=lambda v: v.seconds), done.least()
        if done.is_over(most_passes) or best.seconds > NEAR * least:
            break
        changed.add(best.shape)
        for shape in best.shape.near():
            promises = shape.estimate * best.seconds / best.shape.estimate
            if shape not in done.shapes and promises < NEAR * least and not done.is_over(most_passes):
                simulate(shape)
    return _all_improved(sorted(done.variants, key=lambda v: v.seconds), options, clock, effort)


def _all_improved(candidates: list[Variant], options: PlanOptions, clock: Clock, effort: Effort) -> list[Variant]:
    """Return the candidates, and those near the best made better, the shortest first."""
    better, left = list[Variant](), effort.better
    for candidate in candidates:
        if left <= 0 or clock.is_over() or (better and candidate.seconds > FAR * better[0].seconds):
            break
        improved, passes = _improved(candidate, options, effort.each)
        left -= passes
        better = sorted([*better, improved], key=lambda v: v.seconds)
    if better and not clock.is_over():
        better[0] = _improved(better[0], options, effort.better // 2)[0]
    return sorted([*better, *candidates], key=lambda v: v.seconds)


def _first_variant(question: Question, chosen: list[Offer], shape: Shape) -> Variant | None:
    """Return a shape with its layers balanced and as many passes in flight as hide the transfers, as far as memory
    allows; None where it does not fit."""
    model, batch, site, options, costs = question
    components, sizes = list[Component](), list[StageParallel]()
    for fabric, part in groupby(shape.stages, key=lambda s: s[0]):
        offer, stages = chosen[fabric], list(part)
        nodes = sum(nodes for _, nodes, _ in stages)
        components.append(component(offer.fabric, nodes, offer.per_node, first=len(sizes), stages=len(stages)))
        sizes += [StageParallel(tp, nodes * offer.per_node // tp) for _, nodes, tp in stages]
    try:
        layout = Layout(
            model,
            replace(batch, micro_size=shape.micro),
            Parallel(tuple(sizes), sequence_parallel=any(s.tp > 1 for s in sizes)),
            recompute=shape.recompute,
            schedule=Schedule(PER_STAGE.name, least_in_flight(tuple(s.dp for s in sizes))),
            components=tuple(components),
            site=costs.with_measured_links(site),
            costs=costs,
            transport_mode=options.transport,
            edge_dtype=options.edge_dtype,
            edge_connections=options.edge_connections,
            bucket_bytes=options.bucket_bytes or BUCKET_BYTES,
        )
        layers = _balanced(layout)
    except PlanError:
        return None
    if not fits(layout, layers, options.max_memory_gib)[0]:
        return None
    deeper = _deeper(layout, layers, 0)
    return Variant(shape, deeper if fits(deeper, layers, options.max_memory_gib)[0] else layout, layers)


def _deeper(layout: Layout, layers: np.ndarray, more: int) -> Layout:
    """Return the layout with as many passes in flight as hide the transfers, and `more`, where a replica computes so
    many."""
    order, dps = layout.order, tuple(s.dp for s in layout.parallel.stages)
    pp = len(dps)
    extra = tuple(h + more * (s < pp - 1) for s, h in enumerate(_hiding_depths(layout, layers)))
    available = [len(order.own(order.row(s, 0))) for s in range(pp)]
    depths = tuple(min(d, a) for d, a in zip(least_in_flight(dps, extra), available, strict=True))
    return layout.with_settings(Schedule(PER_STAGE.name, depths))


def _hiding_depths(layout: Layout, layers: np.ndarray) -> tuple[int, ...]:
    """Return the passes more at each stage that hide the transfers to the stage below and back."""
    d, sizes = timing(layout, layers).replicas[0], layout.parallel.stages
    passes = (d.forward + d.backward)[0, :, 0].tolist()
    longest = max(seconds / s.dp for seconds, s in zip(passes, sizes, strict=True))  # of a micro-batch
    return (*(ceil(moved / (longest * sizes[s].dp) - 1e-3) for s, moved in enumerate(_moved_s(layout))), 0)


def _moved_s(layout: Layout) -> list[float]:
    """Return the seconds of a stage transfer down and one up over each edge."""
    e = edge_times(layout)
    return [sum(down) + sum(up) for down, up in zip(e.down, e.up, strict=True)]


@memoised("bucket_bytes")
def _busy(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return, by the number of its layers, (layers, S): seconds of a step that each stage is busy (its replicas'
    largest share of the micro-batches, its gradients' and parameters' traffic that nothing hides), and by how much it
    makes a micro-batch later."""
    order, d = layout.order, timing(layout, layout.all_layers).replicas[0]
    shares = np.array([len(order.own(order.row(s, 0))) for s in range(order.stages)])
    forward, backward, ready, tail = (x[:, :, 0] for x in (d.forward, d.backward, d.ready, d.tail))
    return shares * (forward + backward) + ready + tail, forward + backward + ready


def _split(counts: list[int]) -> np.ndarray:
    return np.array(counts)[None, :, None]


def _balanced(layout: Layout) -> np.ndarray:
    """Return the layers with the least of the longest that a stage is busy: one by one where that is least."""
    busy, counts = _busy(layout)[0], [1] * layout.parallel.pp
    for _ in range(layout.model.layers - len(counts)):
        at = min(range(len(counts)), key=lambda s: busy[counts[s], s])
        counts[at] += 1
    return _split(counts)


def _early(first: Variant, options: PlanOptions) -> Variant | None:
    """Return the variant with layers for stages that run far ahead, as deep as memory allows; None where that is
    nothing else."""
    layers = _dealt(first.layout)
    if np.array_equal(layers, first.layers):
        return None
    deep = (_deeper(first.layout, first.layers, more) for more in (*DEEPER[::-1], 0))
    layout = next((layout for layout in deep if fits(layout, layers, options.max_memory_gib)[0]), None)
    return None if layout is None else Variant(first.shape, layout, layers)


def _dealt(layout: Layout) -> np.ndarray:
    """Return layers as :meth:`layers.Stages.early` deals them out in a grid: the later a micro-batch comes to a stage,
    the fewer it has. For a limit of the step, stage after stage gets as many as it can compute between the first
    micro-batch's coming and the last gradients' way up."""
    busy, late = _busy(layout)
    moved = [0.0, *_moved_s(layout)]

    def within(limit: float) -> list[int]:
        counts, gone = list[int](), 0.0
        for s, transfer in enumerate(moved):
            gone += transfer
            counts.append(max(1, int(np.searchsorted(busy[:, s], limit - gone, side="right"))))
            gone += float(late[counts[-1] - 1, s])
        return counts

    longest = float(busy[-1].sum() + late[-1].sum() + sum(moved))
    return _split(all_dealt(within, layout.model.layers, longest))


def _improved(first: Variant, options: PlanOptions, passes: int) -> tuple[Variant, int]:
    """Return (the variant with the bucket size, depth and layers that make its step shortest: a change at a time as
    long as one of them does, `passes` simulated at most; how many were)."""
    best, most = first, passes // first.passes
    left = most

    def shorten(changes: Iterator[dict[str, Any]], by: float) -> bool:
        """Take the first change that makes the step shorter."""
        nonlocal best, left
        for change in changes:
            if left <= 0:
                break
            variant, left = best.simulated(**change), left - 1
            if variant.seconds < best.seconds * (1 - by):
                best = variant
                return True
        return False

    while (
        shorten(_buckets(best, options), 1e-4)
        or shorten(_depths(best, options), 1e-3)
        or shorten(_moves(best, options), 1e-5)
    ):
        pass
    return best, (most - left) * best.passes


def _buckets(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield other sizes of buckets that leave less of the data-parallel traffic in the open."""
    for size in () if options.bucket_bytes else BUCKETS:
        if _open_s(variant.layout.with_settings(bucket_bytes=size), variant.layers) < _open_s(
            variant.layout, variant.layers
        ):
            yield {"bucket_bytes": size}


def _depths(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield other numbers of passes in flight, with the layers as they are."""
    for more in (0, *DEEPER):
        deep = _deeper(variant.layout, variant.layers, more)
        if deep.schedule != variant.layout.schedule and fits(deep, variant.layers, options.max_memory_gib)[0]:
            yield {"schedule": deep.schedule}


def _open_s(layout: Layout, layers: np.ndarray) -> float:
    """Return about how much of the data-parallel traffic nothing hides."""
    d = timing(layout, layers).replicas[0]
    return sum(d.ready[0, :, 0].tolist()) + max(d.tail[0, :, 0].tolist())


def _moves(variant: Variant, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Yield ways to move one layer, those first after which the stages are busy for the least time at most."""
    busy, counts = _busy(variant.layout)[0], variant.layers[0, :, 0].tolist()
    pp = len(counts)

    def longest(layers: list[int]) -> list[float]:
        return sorted((float(busy[n - 1, s]) for s, n in enumerate(layers)), reverse=True)

    moved = [
        [n - (s == a) + (s == b) for s, n in enumerate(counts)]
        for a in range(pp)
        for b in range(pp)
        if a != b and counts[a] > 1
    ]
    for layers in sorted(moved, key=longest):
        if fits(variant.layout, _split(layers), options.max_memory_gib)[0]:
            yield {"layers": _split(layers)}
