"""What a plan whose stages have unequal widths will do: its step time and parts, memory, bytes per NIC, its timeline.

A stage costs what it would in a grid as wide as itself (:func:`views`: one :class:`Layout` per stage, of which nothing
but that stage counts). What is not so is here: each micro-batch's own way through the replicas, gone through event by
event, edges between stages of unlike widths, and the tied embedding's sum over all ranks of two stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np

from holmes_hpc.config.model import Batch
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.flops import hardware_flops_per_step, model_flops_per_step
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.memory import memory
from holmes_hpc.planning.cost.timing import Timing, parameters, timing
from holmes_hpc.planning.cost.traffic import activation_bytes, collective
from holmes_hpc.planning.cost.uncertainty import interval_s
from holmes_hpc.planning.schedule.orders import Pass, StageTransfer
from holmes_hpc.planning.schedule.routed import RoutedOrder
from holmes_hpc.planning.spec.parallel import Parallel
from holmes_hpc.planning.spec.plan import GroupTransport, Plan, Predicted, Schedule
from holmes_hpc.planning.spec.transport import Place, Transport
from holmes_hpc.planning.spec.widths import Widths


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
    """A plan of unequal widths and the costs it is judged by."""

    plan: Plan
    costs: Costs

    @property
    def widths(self) -> Widths:
        assert isinstance(self.plan.parallel, Widths)
        return self.plan.parallel

    @property
    def order(self) -> RoutedOrder:
        assert isinstance(self.plan.order, RoutedOrder)
        return self.plan.order

    @cached_property
    def layers(self) -> np.ndarray:
        """Of each stage, (1, S, 1)."""
        return np.array([[s.chunks for s in self.plan.stages]])

    @cached_property
    def views(self) -> tuple[Layout, ...]:
        """For each stage a grid in which all stages are as wide and hold as much as this one."""
        return tuple(self._view(stage) for stage in range(self.widths.pp))

    def _view(self, stage: int) -> Layout:
        plan, width = self.plan, self.widths.stages[stage]
        replicas = [self.order.row(stage, r) for r in range(width.dp)]
        most = max(len(self.order.own(row)) for row in replicas)
        batch = Batch(plan.batch.micro_size * width.dp * most, plan.batch.micro_size, plan.batch.sequence_length)
        parallel = Parallel(width.tp, self.widths.pp, width.dp,
                            sequence_parallel=self.widths.sequence_parallel and width.tp > 1)
        return Layout(plan.model, batch, parallel, plan.recompute,
                      Schedule("ahead", (plan.schedule.in_flight[stage],) * self.widths.pp), plan.components,
                      self.costs.on(plan.site), self.costs, plan.transport_mode, plan.edge_dtype,
                      plan.edge_connections, plan.bucket_bytes)

    @cached_property
    def _timings(self) -> tuple[Timing, ...]:
        return tuple(timing(view, self.layers) for view in self.views)

    def _of(self, part: str) -> list[float]:
        """One part of :class:`Durations`, for each stage."""
        return [float(np.ravel(getattr(t.replicas[0], part)[0, s])[0]) for s, t in enumerate(self._timings)]

    def _edge_s(self, upper: int, forward: bool) -> tuple[float, float]:
        """One stage transfer of one replica over the edge below stage `upper`: seconds for which it takes its node's
        NIC at either end, and its latency."""
        ends = [(view, view.replicas[0][s]) for s, view in ((s, self.views[s]) for s in (upper, upper + 1))]
        transport = ends[0][0].edge(0, upper)
        busy = max(activation_bytes(view, transport, here) * view.parallel.tp / view.rate(transport, here, peer=there)
                   for (view, here), (_, there) in (ends, ends[::-1]))
        (view, source), (_, target) = ends if forward else ends[::-1]
        return busy, view.latency(transport, source, peer=target)

    def events(self) -> list[Event]:
        """The simulated step: a pass starts when the one before it on its row is done and its input is there, a
        transfer when its tensor is made and the NICs of its two nodes have done with those before it on that way."""
        order, pp = self.order, self.widths.pp
        seconds = {True: self._of("forward"), False: self._of("backward")}
        edge = {way: [self._edge_s(s, way) for s in range(pp - 1)] for way in (True, False)}
        ready, tail = self._of("ready"), self._of("tail")
        last_up, up = self._of("last_up"), self._of("up")
        found: list[Event] = []
        arrived: dict[StageTransfer, float] = {}
        nics = [self.views[s].edge(0, s) for s in range(pp - 1)]
        leaves: defaultdict[tuple[Place, Transport], float] = defaultdict(float)  # when a node's NIC is free to send
        enters: defaultdict[tuple[Place, Transport], float] = defaultdict(float)
        nodes = [self.plan.places[int(ranks[replica, 0])] for ranks in self.widths.grid()
                 for replica in range(len(ranks))]  # of each row
        beside = Counter(nodes)
        now = [ready[order.stage_of(row)] for row in range(order.rows)]
        found += [Event(row, "param_sync", None, 0.0, now[row]) for row in range(order.rows)]
        todo = [order.passes(row)[::-1] for row in range(order.rows)]

        waiting: list[tuple[float, int]] = []  # rows whose next pass can be computed, by when

        def push(row: int) -> None:
            if todo[row]:
                needed = order.transfer_to(row, todo[row][-1])
                if needed is None or needed in arrived:
                    heappush(waiting, (max(now[row], arrived.get(needed, 0.0)) if needed else now[row], row))

        for row in range(order.rows):
            push(row)
        while waiting:  # the earliest first, so that shared NICs are taken in turn
            start, row = heappop(waiting)
            stage, step = order.stage_of(row), todo[row].pop()
            now[row] = end = start + seconds[step.forward][stage]
            found.append(Event(row, "forward" if step.forward else "backward", step.micro_batch, start, end))
            if (transfer := order.transfer_from(row, step)) is not None:
                upper = stage if step.forward else stage - 1
                busy, latency = edge[step.forward][upper]
                if not step.forward and step.micro_batch == order.own(row)[-1]:
                    busy += last_up[stage] - up[stage]  # beside the gradients' traffic
                target = transfer.target
                out, into = (nodes[row], nics[upper]), (nodes[target], nics[upper])
                begun = max(end, leaves[out], enters[into])
                leaves[out] = begun + busy + latency / beside[nodes[row]]
                enters[into] = begun + busy + latency / beside[nodes[target]]
                arrived[transfer] = begun + busy + latency
                found.append(Event(row, "send", step.micro_batch, begun, arrived[transfer]))
                if todo[target] and order.transfer_to(target, todo[target][-1]) == transfer:
                    push(target)
            push(row)
        found += [Event(row, "grad_sync", None, now[row], now[row] + tail[order.stage_of(row)])
                  for row in range(order.rows)]
        return found

    @cached_property
    def tied_s(self) -> float:
        """The tied embedding's gradient, summed over all ranks of the first and the last stage."""
        found = [g for g in self.plan.transports() if g.kind == "embd"]
        if not found:
            return 0.0
        ranks, transport = found[0].ranks, found[0].transport
        nodes = len({self.plan.places[r] for r in ranks})
        times = []
        for stage in (0, self.widths.pp - 1):
            view = self.views[stage]
            component = view.replicas[0][stage]
            byte, call = collective(view, component, transport, len(ranks), nodes, "reduce_scatter", 2.0, 1.0)
            times.append(float(self._embedding_bytes(stage) * byte + call))
        return max(times)

    def _embedding_bytes(self, stage: int) -> float:
        model, view = self.plan.model, self.views[stage]
        gpu = view.fabric(view.replicas[0][stage]).gpu
        return float(model.padded_vocab(self.widths.vocabulary_parts) * model.hidden * self.costs.gradient_size(gpu))

    @cached_property
    def optimizer_s(self) -> float:
        """Of the stage whose ranks update longest: each has a share of its stage's parameters."""
        return max(float(parameters(view, self.layers)[0, s].sum()) / self.widths.dp_of(s)
                   * self.costs.optimizer_s(1.0, view.fabric(view.replicas[0][s])) for s, view in enumerate(self.views))

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of a rank of each stage; of its replicas the one with most neighbours."""
        found = []
        for s, view in enumerate(self.views):
            gpu = view.fabric(view.replicas[0][s]).gpu
            own = float(memory(view, self.layers).total()[0, s])
            tensor = (self.plan.batch.micro_size * self.plan.batch.sequence_length * self.plan.model.hidden
                      * self.costs.weight_bytes(gpu) / self.widths.tp_of(s))
            counted = 2 * ((s > 0) + (s < self.widths.pp - 1))  # windows of one, in the view
            found.append(int(own + max(0, self._posted(s) - counted) * tensor))
        return tuple(found)

    def _posted(self, stage: int) -> int:
        """Stage transfers that a replica has buffers for, received and sent."""
        order, most = self.order, 0
        for replica in range(self.widths.dp_of(stage)):
            row = order.row(stage, replica)
            passes = [Pass(forward, m, 0) for m in order.own(row) for forward in (True, False)]
            transfers = [of(row, p) for p in passes for of in (order.transfer_to, order.transfer_from)]
            ways = {(t.source, t.target): order.window(t) for t in transfers if t is not None}
            most = max(most, sum(ways.values()))
        return most

    def sent(self) -> Iterator[tuple[GroupTransport, int, float]]:
        """Every group that leaves a node, each rank that sends for it over its node's NIC, and the bytes of payload
        that it sends in a step."""
        shared: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        for s in range(self.widths.pp - 1):
            for a, b in zip(self.order.routes[s], self.order.routes[s + 1], strict=True):
                shared[s, a, b] += 1
        for group in self.plan.transports():
            if group.transport.kind == "local":
                continue
            stage = group.stages[0]
            view = self.views[stage]
            component = view.replicas[0][stage]
            gpu = view.fabric(component).gpu
            how, n = self.costs.collectives(gpu), len(group.ranks)
            one_a_node = {self.plan.places[rank]: rank for rank in reversed(group.ranks)}  # a ring leaves each once
            if group.kind == "edge":
                (_, a, i), (_, b, j) = (self.widths.coordinates(rank) for rank in group.ranks)
                tensor = activation_bytes(view, group.transport, component)  # of one rank
                if (above := self.widths.tp_of(stage)) != (below := self.widths.tp_of(stage + 1)):
                    tensor *= max(0.0, min((i + 1) / above, (j + 1) / below) - max(i / above, j / below)) * above
                for rank in group.ranks:
                    yield group, rank, shared[stage, a, b] * tensor
            elif group.kind == "dp":
                count = float(parameters(view, self.layers)[0, stage].sum())
                amount = (how.reduce_scatter * self.costs.gradient_size(gpu)
                          + how.all_gather * self.costs.weight_bytes(gpu)) * count
                for rank in one_a_node.values():
                    yield group, rank, amount * (n - 1) / n
            elif group.kind == "embd":
                for rank in one_a_node.values():
                    yield group, rank, how.all_reduce * self._embedding_bytes(0) * (n - 1) / n


def predict_unequal(plan: Plan, costs: Costs) -> Predicted:
    """Predict one plan of unequal widths as it is."""
    of = Unequal(plan, costs)
    events, first = of.events(), of._timings[0]
    norm, other = first.norm, first.other
    after = of.tied_s + norm + other + of.optimizer_s
    ends = max(e.end for e in events)
    seconds = ends + after
    work: defaultdict[int, float] = defaultdict(float)
    for e in events:
        work[e.row] += e.end - e.start if e.kind in ("forward", "backward") else 0.0
    row = max(work, key=lambda r: work[r])
    lasts = {e.kind: e for e in events if e.row == row}
    gather = lasts["param_sync"].end
    sync = max(0.0, ends - max(e.end for e in events if e.kind != "grad_sync"))
    nic: defaultdict[str, float] = defaultdict(float)
    for group, _, amount in of.sent():
        transport = group.transport
        nic[transport.fabric if transport.kind == "rdma" and transport.fabric else "ethernet"] += amount
    per_gpu, parts = seconds * plan.world_size * 1e12, plan.parallel.vocabulary_parts
    return Predicted(
        step_time_s=seconds, samples_per_s=plan.batch.global_size / seconds,
        model_tflops_per_gpu=model_flops_per_step(plan.model, plan.batch, parts) / per_gpu,
        hardware_tflops_per_gpu=hardware_flops_per_step(plan.model, plan.batch, parts, plan.recompute) / per_gpu,
        memory_bytes_per_gpu=of.memory_bytes, nic_bytes_per_step=dict(sorted(nic.items())),
        breakdown={"compute_s": work[row], "pipeline_wait_s": ends - work[row] - gather - sync,
                   "grad_sync_s": sync + of.tied_s + norm, "param_sync_s": gather,
                   "optimizer_s": of.optimizer_s + other},
        interval_s=interval_s(of.views[0], seconds))


def timeline_unequal(plan: Plan, costs: Costs) -> list[dict[str, Any]]:
    """The simulated step as events; `stage` counts replicas stage by stage."""
    found = [{"stage": e.row, "kind": e.kind, "chunk": 0, "micro_batch": e.micro_batch, "start_s": e.start,
              "end_s": e.end} for e in Unequal(plan, costs).events() if e.end > e.start]
    return sorted(found, key=lambda e: (e["stage"], e["start_s"], e["end_s"], e["kind"]))
