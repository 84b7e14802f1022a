"""The best plan whose stages are not equally wide, where fabrics are unlike or a grid would leave nodes out.

The most promising shapes (unequal_shapes.py) are simulated; of the best, the order of the stages, their depth, layers
and buckets are changed one at a time as long as the simulated step gets shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, inf
from typing import Any

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.memory import capacity
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.cost.unequal import Unequal
from holmes_hpc.planning.schedule.orders import FOR_UNEQUAL
from holmes_hpc.planning.schedule.routed import least_in_flight
from holmes_hpc.planning.search.candidate import BUCKET_BYTES, BUCKETS
from holmes_hpc.planning.search.explore import OVER, Clock
from holmes_hpc.planning.search.layers import STEPS
from holmes_hpc.planning.search.offers import Offer, offers
from holmes_hpc.planning.search.unequal_shapes import Shape, shapes
from holmes_hpc.planning.spec.plan import Component, Plan, Schedule, Stage
from holmes_hpc.planning.spec.widths import Width, Widths

WORTH = 0.01  # what unequal widths must gain at least: they are less plain
LOOKED_AT = 400  # shapes whose memory is looked at
PASSES = 500_000  # simulated of shapes as they are
NEAR, NEAR_PASSES = 1.04, 1_200_000  # shapes a change away: to the best, at most; passes simulated of them
MORE, IMPROVED = 1_000_000, 12  # passes simulated to make the best of those better, and of one a share of them
FAR = 1.12  # ways slower than the best by more than this are not made better
DEEPER = (1, 3, 8)  # passes in flight to try beyond those that hide the transfers


def with_unequal(equal: Plan, site: Site, options: PlanOptions, costs: Costs, clock: Clock) -> Plan:
    """`equal`, the best plan of equal widths, or one of unequal widths that is clearly faster, which has `equal` among
    its runners-up."""
    assert equal.predicted is not None
    seconds = equal.predicted.step_time_s
    kinds = {(f.fabric.gpu, f.nodes, f.per_node) for f in offers(site, options)}
    may_gain = _allowed(options, costs) and (len(kinds) > 1 or bool(equal.unused))
    if not may_gain or clock.is_over():
        return equal
    made = next(_plans(found(equal.model, equal.batch, site, options, costs, clock, seconds * (1 - WORTH)), site), None)
    if made is None or made.predicted is None or made.predicted.step_time_s >= seconds * (1 - WORTH):
        return equal
    others = [
        {**a, "why_not": f"{a['predicted']['step_time_s'] / made.predicted.step_time_s - 1:.1%} slower"}
        for a in equal.alternatives
    ]
    return replace(made, alternatives=(_runner_up(equal, made.predicted.step_time_s), *others[:4]))


def only_unequal(
    model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock
) -> Plan | None:
    """The best plan of unequal widths where there is none of equal ones; None where they are not allowed either, or
    there is none."""
    if not _allowed(options, costs):
        return None
    return next(_plans(found(model, batch, site, options, costs, clock, inf), site), None)


def _allowed(o: PlanOptions, costs: Costs) -> bool:
    """Whether unequal widths are asked for, and possible with what is told."""
    told = (o.dp, o.layers_per_stage, o.fabric_order)
    schedules = ("auto", FOR_UNEQUAL.name)
    free = o.unequal and all(t is None for t in told) and o.partition == "exact" and o.schedule in schedules
    return (
        free
        and o.virtual_stages in (None, 1)
        and o.strategy in ("auto", "pipeline")
        and o.transport == "holmes"
        and o.distributed_optimizer
        and o.sequence_parallel is not False
        and costs.software.sharding in ("none", "optimizer")
    )


@dataclass(frozen=True)
class _Way:
    """A shape with its layers and depths, and once simulated the seconds of its step."""

    shape: Shape
    what: Unequal
    seconds: float = inf

    @property
    def passes(self) -> int:
        """How much there is to simulate."""
        return 2 * self.what.widths.pp * self.what.order.micro_batches

    def simulated(self, **changed: Any) -> _Way:
        what = self.what.varied(**changed)
        return _Way(self.shape, what, what.step_s)


def found(
    model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock, most: float
) -> list[_Way]:
    """The ways with the shortest steps, the shortest first; none where none promises less than `most` seconds."""
    chosen = offers(site, options)

    done, seen, passes = list[_Way](), set[Shape](), 0

    def simulate(shape: Shape) -> None:
        nonlocal passes
        seen.add(shape)
        way = _laid_out(model, batch, site, options, costs, chosen, shape)
        tried = [w.simulated() for w in (way, way and _early(way, options)) if w is not None]
        passes += sum(w.passes for w in tried)
        done.extend(tried)
        clock.tell(f"planning: {len(done)} ways with stages of unequal widths simulated")

    def is_over(most: int) -> bool:
        return passes > most or bool(done and clock.is_over())

    for shape in shapes(model, batch, site, options, costs)[:LOOKED_AT]:
        least = min((w.seconds for w in done), default=most)
        if is_over(PASSES):
            break
        if shape.estimate <= OVER * least:
            simulate(shape)
    most_passes, changed = passes + NEAR_PASSES, set[Shape]()
    while left := [w for w in done if w.shape not in changed]:  # the best first
        way, least = min(left, key=lambda w: w.seconds), min(w.seconds for w in done)
        if is_over(most_passes) or way.seconds > NEAR * least:
            break
        changed.add(way.shape)
        for shape in way.shape.near():
            promises = shape.estimate * way.seconds / way.shape.estimate
            if shape not in seen and promises < NEAR * least and not is_over(most_passes):
                simulate(shape)
    done.sort(key=lambda w: w.seconds)
    better, rest = list[_Way](), MORE
    for way in done:
        if rest <= 0 or clock.is_over() or (better and way.seconds > FAR * better[0].seconds):
            break
        other, used = _improved(way, options, MORE // IMPROVED)
        rest -= used
        better.append(other)
        better.sort(key=lambda w: w.seconds)
    if better and not clock.is_over():
        better[0] = _improved(better[0], options, MORE // 2)[0]
    return sorted([*better, *done], key=lambda w: w.seconds)


def _laid_out(
    model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, chosen: list[Offer], shape: Shape
) -> _Way | None:
    """A shape with its layers balanced and as many passes in flight as hide the transfers, as far as memory allows;
    None where it does not fit."""
    components, widths, first = list[Component](), list[Width](), 0
    for fabric, part in groupby(shape.stages, key=lambda s: s[0]):
        offer, stages = chosen[fabric], list(part)
        widths += [Width(nodes, tp, nodes * offer.per_node // tp) for _, nodes, tp in stages]
        components.append(
            Component(
                offer.fabric.partition,
                offer.fabric.constraint,
                offer.fabric.name,
                sum(nodes for _, nodes, _ in stages),
                offer.per_node,
                tuple(range(first, first + len(stages))),
            )
        )
        first += len(stages)
    pp = len(widths)
    depths = least_in_flight(tuple(w.dp for w in widths))
    layers = tuple(1 + (s < model.layers % pp) for s in range(pp))
    try:
        what = Unequal(
            model,
            replace(batch, micro_size=shape.micro),
            Widths(tuple(widths), sequence_parallel=any(w.tp > 1 for w in widths)),
            layers,
            depths,
            shape.recompute,
            tuple(components),
            costs.on(site),
            costs,
            options.transport,
            options.edge_dtype,
            options.edge_connections,
            options.bucket_bytes or BUCKET_BYTES,
        )
        what = what.varied(_balanced(what))
    except PlanError:
        return None
    if not _fits(what, options):
        return None
    deeper = _deeper(what, 0)
    return _Way(shape, deeper if _fits(deeper, options) else what)


def _deeper(what: Unequal, more: int) -> Unequal:
    """With as many passes in flight as hide the transfers, and `more`, where a replica computes so many."""
    order, pp = what.order, what.widths.pp
    depths = least_in_flight(
        tuple(w.dp for w in what.widths.stages), tuple(h + more * (s < pp - 1) for s, h in enumerate(_hidden(what)))
    )
    most = [len(order.own(order.row(s, 0))) for s in range(pp)]
    return what.varied(in_flight=tuple(min(d, m) for d, m in zip(depths, most, strict=True)))


def _fits(what: Unequal, options: PlanOptions) -> bool:
    rooms = [
        capacity(view.fabric(view.replicas[0][s]).gpu, options.max_memory_gib) for s, view in enumerate(what.views)
    ]
    if any(what.own_bytes(s) > room for s, room in enumerate(rooms)):  # quick, and often enough
        return False
    return all(need <= room for need, room in zip(what.memory_bytes, rooms, strict=True))


def _hidden(what: Unequal) -> tuple[int, ...]:
    """Passes more at each stage that hide the transfers to the stage below and back."""
    d, dps = what.durations, [w.dp for w in what.widths.stages]
    both = [sum(d.down[s]) + sum(d.up[s]) for s in range(what.widths.pp - 1)]
    longest = max((d.forward[s] + d.backward[s]) / dps[s] for s in range(what.widths.pp))  # of a micro-batch
    return (*(ceil(seconds / (longest * dps[s]) - 1e-3) for s, seconds in enumerate(both)), 0)


def _busy(what: Unequal) -> np.ndarray:
    """Seconds of a step that each stage is busy, by the number of its layers, (layers, S): its replicas' largest share
    of the micro-batches, its gradients' and parameters' traffic that nothing hides."""
    order = what.order
    most = np.array([len(order.own(order.row(s, 0))) for s in range(what.widths.pp)])
    return np.asarray(
        most * (what.by_layers("forward") + what.by_layers("backward"))
        + what.by_layers("ready")
        + what.by_layers("tail")
    )


def _balanced(what: Unequal) -> tuple[int, ...]:
    """The layers with the least of the longest that a stage is busy: one by one where that is least."""
    busy, made = _busy(what), [1] * what.widths.pp
    for _ in range(what.model.layers - len(made)):
        at = min(range(len(made)), key=lambda s: busy[made[s], s])
        made[at] += 1
    return tuple(made)


def _early(way: _Way, options: PlanOptions) -> _Way | None:
    """With layers for stages that run far ahead, as deep as memory allows; None where that is nothing else."""
    layers = _dealt(way.what)
    if layers == way.what.layers:
        return None
    deep = (_deeper(way.what, more).varied(layers=layers) for more in (*DEEPER[::-1], 0))
    return next((_Way(way.shape, what) for what in deep if _fits(what, options)), None)


def _dealt(what: Unequal) -> tuple[int, ...]:
    """Layers as :meth:`layers.Stages.early` deals them out in a grid: the later a micro-batch comes to a stage, the
    fewer it has. For a limit of the step, stage after stage gets as many as it can compute between the first
    micro-batch's coming and the last gradients' way up."""
    busy, pp, most = _busy(what), what.widths.pp, what.model.layers
    late = what.by_layers("forward") + what.by_layers("backward") + what.by_layers("ready")
    moved = [0.0, *(sum(down) + sum(up) for down, up in zip(what.durations.down, what.durations.up, strict=True))]

    def within(limit: float) -> list[int]:
        made, gone = list[int](), 0.0
        for s in range(pp):
            gone += moved[s]
            made.append(max(1, int(np.searchsorted(busy[:, s], limit - gone, side="right"))))
            gone += float(late[made[-1] - 1, s])
        return made

    low, high = 0.0, float(busy[-1].sum() + late[-1].sum() + sum(moved))
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= most else (middle, high)
    made = within(high)
    for s in reversed(range(pp)):  # where several stages had room for one more at the same limit
        made[s] -= min(made[s] - 1, sum(made) - most)
    return tuple(made)


def _improved(way: _Way, options: PlanOptions, passes: int) -> tuple[_Way, int]:
    """(The way with the bucket size, depth and layers that make its step shortest: a change at a time as long as one of
    them does, `passes` simulated at most; how many were.)"""
    most = left = passes // way.passes

    def shorter(changes: Iterator[dict[str, Any]], by: float) -> bool:
        """Take the first change that makes the step shorter."""
        nonlocal way, left
        for change in changes:
            if left <= 0:
                break
            other, left = way.simulated(**change), left - 1
            if other.seconds < way.seconds * (1 - by):
                way = other
                return True
        return False

    while (
        shorter(_buckets(way.what, options), 1e-4)
        or shorter(_depths(way.what, options), 1e-3)
        or shorter(_moves(way.what, options), 1e-5)
    ):
        pass
    return way, (most - left) * way.passes


def _buckets(what: Unequal, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Other sizes of buckets that leave less of the data-parallel traffic in the open."""
    for size in () if options.bucket_bytes else BUCKETS:
        if _open_s(what.varied(bucket_bytes=size)) < _open_s(what):
            yield {"bucket_bytes": size}


def _depths(what: Unequal, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Other numbers of passes in flight, with the layers as they are."""
    for more in (0, *DEEPER):
        deep = _deeper(what, more)
        if deep.in_flight != what.in_flight and _fits(deep, options):
            yield {"in_flight": deep.in_flight}


def _open_s(what: Unequal) -> float:
    """About how much of the data-parallel traffic nothing hides."""
    return sum(what.of_stages("ready")) + max(what.of_stages("tail"))


def _moves(what: Unequal, options: PlanOptions) -> Iterator[dict[str, Any]]:
    """Ways to move one layer, those first after which the stages are busy for the least time at most."""
    busy, pp = _busy(what), what.widths.pp

    def longest(layers: tuple[int, ...]) -> list[float]:
        return sorted((float(busy[n - 1, s]) for s, n in enumerate(layers)), reverse=True)

    moved = [
        tuple(n - (s == a) + (s == b) for s, n in enumerate(what.layers))
        for a in range(pp)
        for b in range(pp)
        if a != b and what.layers[a] > 1
    ]
    for layers in sorted(moved, key=longest):
        if _fits(what.varied(layers=layers), options):
            yield {"layers": layers}


def _plans(ways: list[_Way], site: Site) -> Iterator[Plan]:
    """Those that cannot lock up, as plans."""
    for way in ways:
        try:
            yield to_plan(way, site)
        except PlanError:
            continue


def to_plan(way: _Way, site: Site) -> Plan:
    """A way as the Plan that a run can be started from, with its prediction."""
    what, used = way.what, {c.fabric: c.nodes for c in way.what.components}
    at = {s: c.fabric for c in what.components for s in c.stages}
    unused = {f.name: f.nodes - used.get(f.name, 0) for f in site.fabrics if f.nodes > used.get(f.name, 0)}
    plan = Plan(
        "one-fabric" if len(used) == 1 else "pipeline",
        what.model,
        what.batch,
        what.widths,
        what.recompute,
        Schedule(FOR_UNEQUAL.name, what.in_flight),
        what.components,
        tuple(Stage(at[s], n) for s, n in enumerate(what.layers)),
        site,
        what.bucket_bytes,
        what.edge_dtype,
        what.edge_connections,
        what.transport_mode,
        what.costs.pace_layer_ms,
        unused=unused,
        pace_factors=what.costs.pace_factors,
    )
    notes = [
        f"{n} nodes of {name} are left out: no way to use them was found that makes a step shorter"
        for name, n in unused.items()
    ]
    said = dict.fromkeys(a for view in what.views for a in view.assumptions)
    return replace(plan, predicted=predict(plan, what.costs), assumptions=(*site.assumptions, *said, *notes))


def _runner_up(equal: Plan, seconds: float) -> dict[str, Any]:
    """The best plan of equal widths as plain data."""
    p, predicted = equal.parallel, equal.predicted
    assert predicted is not None
    return {
        "strategy": equal.strategy,
        "parallel": {"tp": p.tp, "pp": p.pp, "dp": p.dp, "virtual_stages": p.virtual_stages},
        "micro_size": equal.batch.micro_size,
        "nodes": {c.fabric: c.nodes for c in equal.components},
        "layers_per_stage": [s.layers for s in equal.stages],
        "recompute": equal.recompute,
        "schedule": equal.schedule.kind,
        "why_not": f"{predicted.step_time_s / seconds - 1:.1%} slower: the best with stages of equal widths",
        "predicted": {
            "step_time_s": predicted.step_time_s,
            "samples_per_s": predicted.samples_per_s,
            "memory_bytes_per_gpu": max(predicted.memory_bytes_per_gpu),
            "breakdown": predicted.breakdown,
        },
    }
