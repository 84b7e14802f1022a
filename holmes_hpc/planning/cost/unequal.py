"""What a plan whose stages have unequal widths will do: its step time and parts, memory, bytes per NIC, its timeline.

A stage costs what it would in a grid as wide as itself (:func:`views`: one :class:`Layout` per stage, of which nothing
but that stage counts). What is not so is here: each micro-batch's own way through the replicas, gone through event by
event, edges between stages of unlike widths, and the tied embedding's sum over all ranks of two stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import hardware_flops_per_step, model_flops_per_step
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.timing import Timing, parameters, timing
from holmes_hpc.planning.cost.traffic import activation_bytes, collective
from holmes_hpc.planning.cost.uncertainty import interval_s
from holmes_hpc.planning.schedule.orders import FOR_UNEQUAL
from holmes_hpc.planning.schedule.routed import RoutedOrder
from holmes_hpc.planning.schedule.routed_simulation import RoutedDurations, ends, went
from holmes_hpc.planning.spec.parallel import Parallel
from holmes_hpc.planning.spec.plan import Component, GroupTransport, Plan, Predicted, Schedule
from holmes_hpc.planning.spec.widths import Widths

T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """Of the simulated step: `kind` forward, backward, send (listed at its sender), param_sync or grad_sync; `row` as
    :class:`RoutedOrder` counts; seconds."""

    row: int
    kind: str
    micro_batch: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Unequal:
    """All of a plan of unequal widths that is predicted, and the costs it is judged by; `layers` and `in_flight` of
    each stage. As :class:`Layout` it is not checked: a search makes hundreds."""

    model: ModelSpec
    batch: Batch
    widths: Widths
    layers: tuple[int, ...]
    in_flight: tuple[int, ...]
    recompute: str
    components: tuple[Component, ...]
    site: Site
    costs: Costs
    transport_mode: str = "holmes"
    edge_dtype: str = "same"
    edge_connections: int = 1
    bucket_bytes: int = 40_000_000
    _known: dict[tuple[object, ...], Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Unequal:
        assert isinstance(plan.parallel, Widths)
        return cls(
            plan.model,
            plan.batch,
            plan.parallel,
            tuple(s.layers for s in plan.stages),
            plan.schedule.in_flight,
            plan.recompute,
            plan.components,
            costs.on(plan.site),
            costs,
            plan.transport_mode,
            plan.edge_dtype,
            plan.edge_connections,
            plan.bucket_bytes,
        )

    def varied(
        self,
        layers: tuple[int, ...] | None = None,
        in_flight: tuple[int, ...] | None = None,
        bucket_bytes: int | None = None,
    ) -> Unequal:
        """With other layers, depths or buckets on the same ranks: what was worked out of these stays."""
        made = replace(
            self,
            layers=layers or self.layers,
            in_flight=in_flight or self.in_flight,
            bucket_bytes=bucket_bytes or self.bucket_bytes,
        )
        object.__setattr__(made, "_known", self._known)
        return made

    def _once(self, key: tuple[object, ...], made: Callable[[], T]) -> T:
        """What `made` gives, worked out once for all variants; `key` says all that it goes by beside the ranks."""
        if key not in self._known:
            self._known[key] = made()
        found: T = self._known[key]
        return found

    @cached_property
    def order(self) -> RoutedOrder:
        return self._once(
            ("order", self.in_flight),
            lambda: RoutedOrder(self.widths.routes(self.batch.micro_batches(1)), self.in_flight),
        )

    @cached_property
    def views(self) -> tuple[Layout, ...]:
        """For each stage a grid in which all stages are as wide as this one."""
        return tuple(self._view(stage) for stage in range(self.widths.pp))

    def _view(self, stage: int) -> Layout:
        width = self.widths.stages[stage]
        most = max(len(self.order.own(self.order.row(stage, r))) for r in range(width.dp))
        own = next(c for c in self.components if stage in c.stages)

        def made() -> Layout:
            batch = Batch(self.batch.micro_size * width.dp * most, self.batch.micro_size, self.batch.sequence_length)
            parallel = Parallel(
                width.tp, self.widths.pp, width.dp, sequence_parallel=self.widths.sequence_parallel and width.tp > 1
            )
            alike = tuple(replace(c, gpus_per_node=own.gpus_per_node) for c in self.components)
            wider = self.widths.vocabulary_parts // width.tp  # the vocabulary is padded for every stage's TP
            return Layout(
                replace(self.model, vocab_multiple=self.model.vocab_multiple * wider) if wider > 1 else self.model,
                batch,
                parallel,
                self.recompute,
                Schedule(FOR_UNEQUAL.name, (1,) * self.widths.pp),
                alike,
                self.site,
                self.costs,
                self.transport_mode,
                self.edge_dtype,
                self.edge_connections,
            )

        return self._once(("view", width.tp, width.dp, most, own.gpus_per_node), made)

    @cached_property
    def _rows(self) -> np.ndarray:
        """Layers as the cost model has them: from one on every stage to all on every stage, (plans, S, 1)."""
        counts = np.arange(1, self.model.layers + 1)
        return np.repeat(counts, self.widths.pp).reshape(-1, self.widths.pp, 1)

    def _timing(self, stage: int) -> Timing:
        view = self.views[stage]
        return self._once(
            ("timing", id(view), self.bucket_bytes),
            lambda: timing(view.varied(bucket_bytes=self.bucket_bytes), self._rows),
        )

    def by_layers(self, part: str) -> np.ndarray:
        """One part of :class:`Durations` for each stage, and each number of layers from one to all, (layers, S)."""

        def made() -> np.ndarray:
            parts = [getattr(self._timing(s).replicas[0], part) for s in range(self.widths.pp)]
            return np.stack([of[:, s].reshape(len(of), -1)[:, 0] for s, of in enumerate(parts)], axis=1)

        return self._once((part, self.bucket_bytes), made)

    def of_stages(self, part: str) -> list[float]:
        """One part of :class:`Durations`, for each stage."""
        found = self.by_layers(part)
        return [float(found[n - 1, s]) for s, n in enumerate(self.layers)]

    def edge_s(self, upper: int, forward: bool) -> tuple[float, float]:
        """One stage transfer of one replica over the edge below stage `upper`: seconds for which it takes its node's
        NIC at either end, and its latency."""
        ends = [(view, view.replicas[0][s]) for s, view in ((s, self.views[s]) for s in (upper, upper + 1))]
        transport = ends[0][0].edge(0, upper)
        busy = max(
            activation_bytes(view, transport, here) * view.parallel.tp / view.rate(transport, here, peer=there)
            for (view, here), (_, there) in (ends, ends[::-1])
        )
        (view, source), (_, target) = ends if forward else ends[::-1]
        return busy, view.latency(transport, source, peer=target)

    @cached_property
    def durations(self) -> RoutedDurations:
        edges = self._once(("edges",), self._edges)
        last = [max(0.0, a - b) for a, b in zip(self.of_stages("last_up"), self.of_stages("up"), strict=True)]
        return RoutedDurations(
            self.of_stages("forward"), self.of_stages("backward"), self.of_stages("ready"), last, *edges
        )

    def _edges(self) -> tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]], list[int], list[int]]:
        """`down`, `up`, `node` and `wire` of :class:`RoutedDurations`."""
        pp = self.widths.pp
        wires = [self.views[s].edge(0, s) for s in range(pp - 1)]
        known = list(dict.fromkeys(wires))
        nodes, first = list[int](), 0
        for component in self.components:
            for s in component.stages:
                width = self.widths.stages[s]
                nodes += [first + r * width.tp // component.gpus_per_node for r in range(width.dp)]
                first += width.nodes
        down, up = ([self.edge_s(s, way) for s in range(pp - 1)] for way in (True, False))
        return down, up, nodes, [known.index(wire) for wire in wires]

    def events(self) -> list[Event]:
        """The simulated step."""
        order, d, tail = self.order, self.durations, self.of_stages("tail")
        found, now = list[Event](), [0.0] * order.rows
        for w in went(order, d):
            if w.forward and w.micro_batch == order.own(w.row)[0]:
                found.append(Event(w.row, "param_sync", None, w.start - d.ready[order.stage_of(w.row)], w.start))
            found.append(Event(w.row, "forward" if w.forward else "backward", w.micro_batch, w.start, w.end))
            now[w.row] = w.end
            if w.sent is not None:
                found.append(Event(w.row, "send", w.micro_batch, *w.sent))
        return found + [
            Event(row, "grad_sync", None, end, end + tail[order.stage_of(row)]) for row, end in enumerate(now)
        ]

    @cached_property
    def after(self) -> float:
        """Seconds that follow when all gradients are reduced."""
        return self.tied_s + self.norm_s + self.other_s + self.optimizer_s + self.gather_s

    @cached_property
    def step_s(self) -> float:
        """Seconds of the simulated step."""
        tail = self.of_stages("tail")
        return (
            max(end + tail[self.order.stage_of(row)] for row, end in enumerate(ends(self.order, self.durations)))
            + self.after
        )

    @property
    def norm_s(self) -> float:
        return self._timing(0).norm

    @property
    def gather_s(self) -> float:
        """Of updated parameters, by all stages at once, where not before their first passes."""
        return max(float(self._timing(s).gather[n - 1, s]) for s, n in enumerate(self.layers))

    @property
    def other_s(self) -> float:
        """What a step takes beyond its passes and its traffic."""
        return self._timing(0).other

    @property
    def tied_s(self) -> float:
        """The tied embedding's gradient, summed over all ranks of the first and the last stage."""
        return self._once(("tied",), self._tied_s)

    def _tied_s(self) -> float:
        if not self.model.tied or self.widths.pp == 1:
            return 0.0
        ends = (0, self.widths.pp - 1)
        ranks = sum(self.widths.stages[s].ranks for s in ends)
        nodes = sum(self.widths.stages[s].nodes for s in ends)
        times = []
        for stage in ends:
            view = self.views[stage]
            component = view.replicas[0][stage]
            byte, call = collective(view, component, view.ends(), ranks, nodes, "reduce_scatter", 2.0, 1.0)
            times.append(float(self._embedding_bytes(stage) * byte + call))
        return max(times)

    def _embedding_bytes(self, stage: int) -> float:
        model, view = self.model, self.views[stage]
        gpu = view.fabric(view.replicas[0][stage]).gpu
        return float(model.padded_vocab(self.widths.vocabulary_parts) * model.hidden * self.costs.gradient_size(gpu))

    @cached_property
    def optimizer_s(self) -> float:
        """Of the stage whose ranks update longest: each has a share of its stage's parameters."""
        return max(
            self._parameters(s) / self.widths.dp_of(s) * self.costs.optimizer_s(1.0, view.fabric(view.replicas[0][s]))
            for s, view in enumerate(self.views)
        )

    def _parameters(self, stage: int) -> float:
        """On one rank of a stage."""
        view = self.views[stage]
        count = self._once(("parameters", id(view)), lambda: parameters(view, self._rows).sum(axis=2))
        return float(count[self.layers[stage] - 1, stage])

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of a rank of each stage; of its replicas the one with most neighbours."""
        found = []
        for s, view in enumerate(self.views):
            gpu = view.fabric(view.replicas[0][s]).gpu
            tensor = (
                self.batch.micro_size
                * self.batch.sequence_length
                * self.model.hidden
                * self.costs.weight_bytes(gpu)
                / self.widths.tp_of(s)
            )
            counted = 2 * ((s > 0) + (s < self.widths.pp - 1))  # windows of one, in the view
            found.append(int(self.own_bytes(s) + max(0, self.order.posted(s) - counted) * tensor))
        return tuple(found)

    def own_bytes(self, stage: int) -> float:
        """:attr:`memory_bytes` but the buffers of transfers beyond the first ones."""
        view, depth = self.views[stage], self.in_flight[stage]
        one, two = (self._memory(view, d)[self.layers[stage] - 1, stage] for d in (1, 2))
        return float(one + (depth - 1) * (two - one))

    def _memory(self, view: Layout, depth: int) -> np.ndarray:
        """Bytes of a rank by the layers on every stage, (layers, S), where all stages hold so many micro-batches."""
        return self._once(
            ("memory", id(view), depth),
            lambda: memory(view.varied(Schedule(FOR_UNEQUAL.name, (depth,) * self.widths.pp)), self._rows).total(),
        )

    def sent(self, plan: Plan) -> Iterator[tuple[GroupTransport, int, float]]:
        """Every group that leaves a node, each rank that sends for it over its node's NIC, and the bytes of payload
        that it sends in a step."""
        shared: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        for s in range(self.widths.pp - 1):
            for a, b in zip(self.order.routes[s], self.order.routes[s + 1], strict=True):
                shared[s, a, b] += 1
        for group in plan.transports():
            if group.transport.kind == "local":
                continue
            stage = group.stages[0]
            view = self.views[stage]
            component = view.replicas[0][stage]
            gpu = view.fabric(component).gpu
            how, n = self.costs.collectives(gpu), len(group.ranks)
            one_a_node = {plan.places[rank]: rank for rank in reversed(group.ranks)}  # a ring leaves each once
            if group.kind == "edge":
                (_, a, i), (_, b, j) = (self.widths.coordinates(rank) for rank in group.ranks)
                tensor = activation_bytes(view, group.transport, component)  # of one rank
                if (above := self.widths.tp_of(stage)) != (below := self.widths.tp_of(stage + 1)):
                    tensor *= max(0.0, min((i + 1) / above, (j + 1) / below) - max(i / above, j / below)) * above
                for rank in group.ranks:
                    yield group, rank, shared[stage, a, b] * tensor
            elif group.kind == "dp":
                count = self._parameters(stage)
                amount = (
                    how.reduce_scatter * self.costs.gradient_size(gpu) + how.all_gather * self.costs.weight_bytes(gpu)
                ) * count
                for rank in one_a_node.values():
                    yield group, rank, amount * (n - 1) / n
            elif group.kind == "embd":
                for rank in one_a_node.values():
                    yield group, rank, how.all_reduce * self._embedding_bytes(0) * (n - 1) / n


def predict_unequal(plan: Plan, costs: Costs) -> Predicted:
    """Predict one plan of unequal widths as it is."""
    of = Unequal.of(plan, costs)
    events = of.events()
    ends = max(e.end for e in events)
    seconds = ends + of.after
    work: defaultdict[int, float] = defaultdict(float)
    for e in events:
        work[e.row] += e.end - e.start if e.kind in ("forward", "backward") else 0.0
    row = max(work, key=lambda r: work[r])
    lasts = {e.kind: e for e in events if e.row == row}
    gather = lasts["param_sync"].end - lasts["param_sync"].start
    sync = max(0.0, ends - max(e.end for e in events if e.kind != "grad_sync"))
    nic: defaultdict[str, float] = defaultdict(float)
    for group, _, amount in of.sent(plan):
        transport = group.transport
        nic[transport.fabric if transport.kind == "rdma" and transport.fabric else "ethernet"] += amount
    per_gpu, parts = seconds * plan.world_size * 1e12, plan.parallel.vocabulary_parts
    return Predicted(
        step_time_s=seconds,
        samples_per_s=plan.batch.global_size / seconds,
        model_tflops_per_gpu=model_flops_per_step(plan.model, plan.batch, parts) / per_gpu,
        hardware_tflops_per_gpu=hardware_flops_per_step(plan.model, plan.batch, parts, plan.recompute) / per_gpu,
        memory_bytes_per_gpu=of.memory_bytes,
        nic_bytes_per_step=dict(sorted(nic.items())),
        breakdown={
            "compute_s": work[row],
            "pipeline_wait_s": ends - work[row] - gather - sync,
            "grad_sync_s": sync + of.tied_s + of.norm_s,
            "param_sync_s": gather + of.gather_s,
            "optimizer_s": of.optimizer_s + of.other_s,
        },
        interval_s=interval_s(of.views[0], seconds),
    )


def timeline_unequal(plan: Plan, costs: Costs) -> list[dict[str, Any]]:
    """The simulated step as events; `stage` counts replicas stage by stage."""
    found = [
        {"stage": e.row, "kind": e.kind, "chunk": 0, "micro_batch": e.micro_batch, "start_s": e.start, "end_s": e.end}
        for e in Unequal.of(plan, costs).events()
        if e.end > e.start
    ]
    return sorted(found, key=lambda e: (e["stage"], e["start_s"], e["end_s"], e["kind"]))
