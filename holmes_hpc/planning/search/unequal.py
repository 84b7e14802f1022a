"""The best plan whose stages are not equally wide, where fabrics are unlike or a grid would leave nodes out.

The most promising shapes (unequal_shapes.py) are simulated; of the best, the order of the stages, their depth, layers
and buckets are changed one at a time as long as the simulated step gets shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice, permutations
from math import ceil, inf
from typing import Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.memory import capacity
from holmes_hpc.planning.cost.predict import predict
from holmes_hpc.planning.cost.unequal import Unequal
from holmes_hpc.planning.schedule.routed import least_in_flight
from holmes_hpc.planning.search.candidate import BUCKET_BYTES, BUCKETS, FEW_FABRICS
from holmes_hpc.planning.search.explore import OVER, Clock
from holmes_hpc.planning.search.offers import Offer, offers
from holmes_hpc.planning.search.unequal_shapes import Shape, shapes
from holmes_hpc.planning.spec.plan import Component, Plan, Schedule, Stage
from holmes_hpc.planning.spec.widths import Width, Widths

WORTH = 0.01  # what unequal widths must gain at least: they are less plain
LOOKED_AT = 400  # shapes whose memory is looked at
PASSES = 250_000  # simulated of shapes as they are
IMPROVED = 6  # of those at most, made better
MORE = 250_000  # passes simulated of those, about
TRIES = 16  # that it takes to make one better, about
MOVES = 3  # of a layer, simulated at a time
DEEPER = (1, 3, 8)  # passes in flight to try beyond those that hide the transfers


def with_unequal(equal: Plan, site: Site, options: PlanOptions, costs: Costs, clock: Clock) -> Plan:
    """`equal`, the best plan of equal widths, or one of unequal widths that is clearly faster, which has `equal` among
    its runners-up."""
    assert equal.predicted is not None
    seconds = equal.predicted.step_time_s
    if not _may_gain(equal, site, options, costs) or clock.is_over():
        return equal
    made = next(_plans(found(equal.model, equal.batch, site, options, costs, clock, seconds * (1 - WORTH)), site), None)
    if made is None or made.predicted is None or made.predicted.step_time_s >= seconds * (1 - WORTH):
        return equal
    others = [{**a, "why_not": f"{a['predicted']['step_time_s'] / made.predicted.step_time_s - 1:.1%} slower"}
              for a in equal.alternatives]
    return replace(made, alternatives=(_runner_up(equal, made.predicted.step_time_s), *others[:4]))


def _may_gain(equal: Plan, site: Site, options: PlanOptions, costs: Costs) -> bool:
    """Whether unequal widths are allowed by what is told, and fabrics are unlike or nodes left out."""
    o = options
    told = (o.dp, o.virtual_stages, o.layers_per_stage, o.fabric_order)
    free = o.unequal and all(t is None for t in told) and o.partition == "exact" and o.schedule in ("auto", "ahead")
    kinds = {(f.fabric.gpu, f.nodes, f.per_node) for f in offers(site, options)}
    return (free and o.strategy in ("auto", "pipeline") and o.transport == "holmes" and o.distributed_optimizer
            and o.sequence_parallel is not False and costs.software.sharding in ("none", "optimizer")
            and (len(kinds) > 1 or bool(equal.unused)))


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
        what = replace(self.what, **changed) if "bucket_bytes" in changed else self.what.varied(
            changed.get("layers", self.what.layers), changed.get("in_flight", self.what.in_flight))
        return _Way(self.shape, what, what.step_s)


def found(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, clock: Clock, most: float,
          ) -> list[_Way]:
    """The ways with the shortest steps, the shortest first; none where none promises less than `most` seconds."""
    chosen = offers(site, options)

    def ways(shape: Shape, orders: bool) -> Iterator[_Way]:
        for stages in _orders(shape) if orders else [shape.stages]:
            made = _laid_out(model, batch, site, options, costs, chosen, replace(shape, stages=stages))
            if made is not None:
                yield made

    seen, done, passes = set[object](), list[_Way](), 0
    for shape in shapes(model, batch, site, options, costs)[:LOOKED_AT]:
        least = min((w.seconds for w in done), default=most)
        if passes > PASSES or (done and clock.is_over()):
            break
        if shape.estimate > OVER * least:
            continue
        key = shape.micro, shape.recompute, shape.stages
        if key in seen:
            continue
        seen.add(key)
        done += [way.simulated() for way in islice(ways(shape, orders=False), 1)]
        passes = sum(way.passes for way in done)
        clock.tell(f"planning: {len(done)} ways with stages of unequal widths simulated")
    done.sort(key=lambda w: w.seconds)
    better = list[_Way]()
    for way in done[:max(1, min(IMPROVED, MORE // (TRIES * max((w.passes for w in done), default=1))))]:
        if clock.is_over() or (better and way.seconds * 0.95 > better[0].seconds):
            break
        tried = [way, *(w.simulated() for w in ways(way.shape, orders=True) if w.shape.stages != way.shape.stages)]
        better.append(_improved(min(tried, key=lambda w: w.seconds), options))
        better.sort(key=lambda w: w.seconds)
    return sorted([*better, *done], key=lambda w: w.seconds)


def _orders(shape: Shape) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """The shape's stages with the fabrics in other orders, and each fabric's wider stages first or last."""
    parts = [list(part) for _, part in groupby(shape.stages, key=lambda s: s[0])]
    for order in permutations(parts) if len(parts) <= FEW_FABRICS - 1 else [tuple(parts), tuple(parts[::-1])]:
        yield tuple(stage for part in order for stage in part)
        if len(parts) < FEW_FABRICS and any(len(set(part)) > 1 for part in order):
            yield tuple(stage for part in order for stage in part[::-1])


def _laid_out(model: ModelSpec, batch: Batch, site: Site, options: PlanOptions, costs: Costs, chosen: list[Offer],
              shape: Shape) -> _Way | None:
    """A shape with its layers balanced and as many passes in flight as hide the transfers, as far as memory allows;
    None where it does not fit."""
    components, widths, first = list[Component](), list[Width](), 0
    for fabric, part in groupby(shape.stages, key=lambda s: s[0]):
        offer, stages = chosen[fabric], list(part)
        widths += [Width(nodes, tp, nodes * offer.per_node // tp) for _, nodes, tp in stages]
        components.append(Component(offer.fabric.partition, offer.fabric.constraint, offer.fabric.name,
                                    sum(nodes for _, nodes, _ in stages), offer.per_node,
                                    tuple(range(first, first + len(stages)))))
        first += len(stages)
    pp = len(widths)
    depths = least_in_flight(tuple(w.dp for w in widths))
    layers = tuple(1 + (s < model.layers % pp) for s in range(pp))
    try:
        what = Unequal(model, replace(batch, micro_size=shape.micro),
                       Widths(tuple(widths), sequence_parallel=any(w.tp > 1 for w in widths)), layers, depths,
                       shape.recompute, tuple(components), costs.on(site), costs, options.transport,
                       options.edge_dtype, options.edge_connections, options.bucket_bytes or BUCKET_BYTES)
        what = what.varied(_balanced(what), depths)
    except PlanError:
        return None
    if not _fits(what, options):
        return None
    deep = least_in_flight(tuple(w.dp for w in widths), _hidden(what))
    deeper = what.varied(what.layers, _possible(what, deep))
    return _Way(shape, deeper if _fits(deeper, options) else what)


def _possible(what: Unequal, depths: tuple[int, ...]) -> tuple[int, ...]:
    """`depths`, where a replica computes so many micro-batches."""
    order = what.order
    most = [len(order.own(order.row(s, 0))) for s in range(what.widths.pp)]
    return tuple(min(d, m) for d, m in zip(depths, most, strict=True))


def _fits(what: Unequal, options: PlanOptions) -> bool:
    rooms = [capacity(view.fabric(view.replicas[0][s]).gpu, options.max_memory_gib)
             for s, view in enumerate(what.views)]
    return all(need <= room for need, room in zip(what.memory_bytes, rooms, strict=True))


def _hidden(what: Unequal) -> tuple[int, ...]:
    """Passes more at each stage that hide the transfers to the stage below and back."""
    d, dps = what.durations, [w.dp for w in what.widths.stages]
    both = [sum(d.down[s]) + sum(d.up[s]) for s in range(what.widths.pp - 1)]
    longest = max((d.forward[s] + d.backward[s]) / dps[s] for s in range(what.widths.pp))  # of a micro-batch
    return (*(ceil(seconds / (longest * dps[s]) - 1e-3) for s, seconds in enumerate(both)), 0)


def _shares(what: Unequal) -> list[tuple[float, float]]:
    """(seconds of a step that are there without a layer, that each layer adds) of every stage: its replicas' largest
    share of the micro-batches, its gradients' and parameters' traffic that nothing hides."""
    order, pp = what.order, what.widths.pp
    most = [len(order.own(order.row(s, 0))) for s in range(pp)]

    def busy(layers: int) -> list[float]:
        of = what.varied((layers,) * pp, what.in_flight)
        parts = {name: of.of_stages(name) for name in ("forward", "backward", "ready", "tail")}
        return [m * (parts["forward"][s] + parts["backward"][s]) + parts["ready"][s] + parts["tail"][s]
                for s, m in enumerate(most)]

    one, two = busy(2), busy(4)
    each = [(b - a) / 2 for a, b in zip(one, two, strict=True)]
    return [(a - 2 * e, e) for a, e in zip(one, each, strict=True)]


def _balanced(what: Unequal) -> tuple[int, ...]:
    """The layers with the least of the longest that a stage is busy: one by one where that is least."""
    shares, made = _shares(what), [1] * what.widths.pp
    for _ in range(what.model.layers - len(made)):
        at = min(range(len(made)), key=lambda s: shares[s][0] + shares[s][1] * (made[s] + 1))
        made[at] += 1
    return tuple(made)


def _improved(way: _Way, options: PlanOptions) -> _Way:
    """With the depth, the layers and the bucket size that make its step shortest."""
    for more in DEEPER:
        pp = way.what.widths.pp
        depths = least_in_flight(tuple(w.dp for w in way.what.widths.stages),
                                 tuple(h + more * (s < pp - 1) for s, h in enumerate(_hidden(way.what))))
        deep = way.what.varied(way.what.layers, _possible(way.what, depths))
        if deep.in_flight != way.what.in_flight and _fits(deep, options):
            other = _Way(way.shape, deep, deep.step_s)
            way = other if other.seconds < way.seconds * (1 - 1e-3) else way
    shares = _shares(way.what)
    for _ in range(way.what.model.layers):
        tried = [way.simulated(layers=moved) for moved in islice(_moves(way.what, shares, options), MOVES)]
        best = min(tried, key=lambda w: w.seconds, default=way)
        if best.seconds >= way.seconds * (1 - 1e-6):
            break
        way = best
    for size in () if options.bucket_bytes else BUCKETS:
        what = replace(way.what, bucket_bytes=size)
        if _open_s(what) < _open_s(way.what):
            other = _Way(way.shape, what, what.step_s)
            way = other if other.seconds < way.seconds * (1 - 1e-4) else way
    return way


def _open_s(what: Unequal) -> float:
    """About how much of the data-parallel traffic nothing hides."""
    return sum(what.of_stages("ready")) + max(what.of_stages("tail"))


def _moves(what: Unequal, shares: list[tuple[float, float]], options: PlanOptions) -> Iterator[tuple[int, ...]]:
    """Ways to move one layer, those first after which the stages are busy for the least time at most."""
    def longest(layers: tuple[int, ...]) -> list[float]:
        return sorted((a + b * n for (a, b), n in zip(shares, layers, strict=True)), reverse=True)

    pp = what.widths.pp
    moved = [tuple(n - (s == a) + (s == b) for s, n in enumerate(what.layers))
             for a in range(pp) for b in range(pp) if a != b and what.layers[a] > 1]
    for layers in sorted(moved, key=longest):
        if _fits(what.varied(layers, what.in_flight), options):
            yield layers


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
    plan = Plan("one-fabric" if len(used) == 1 else "pipeline", what.model, what.batch, what.widths, what.recompute,
                Schedule("ahead", what.in_flight), what.components,
                tuple(Stage(at[s], n) for s, n in enumerate(what.layers)), site, what.bucket_bytes, what.edge_dtype,
                what.edge_connections, what.transport_mode, what.costs.pace_layer_ms, unused=unused,
                pace_factors=what.costs.pace_factors)
    notes = [f"{n} nodes of {name} are left out: no way to use them was found that makes a step shorter"
             for name, n in unused.items()]
    said = dict.fromkeys(a for view in what.views for a in view.assumptions)
    return replace(plan, predicted=predict(plan, what.costs), assumptions=(*site.assumptions, *said, *notes))


def _runner_up(equal: Plan, seconds: float) -> dict[str, Any]:
    """The best plan of equal widths as plain data."""
    p, predicted = equal.parallel, equal.predicted
    assert predicted is not None
    return {"strategy": equal.strategy,
            "parallel": {"tp": p.tp, "pp": p.pp, "dp": p.dp, "virtual_stages": p.virtual_stages},
            "micro_size": equal.batch.micro_size, "nodes": {c.fabric: c.nodes for c in equal.components},
            "layers_per_stage": [s.layers for s in equal.stages], "recompute": equal.recompute,
            "schedule": equal.schedule.kind,
            "why_not": f"{predicted.step_time_s / seconds - 1:.1%} slower: the best with stages of equal widths",
            "predicted": {"step_time_s": predicted.step_time_s, "samples_per_s": predicted.samples_per_s,
                          "memory_bytes_per_gpu": max(predicted.memory_bytes_per_gpu),
                          "breakdown": predicted.breakdown}}
