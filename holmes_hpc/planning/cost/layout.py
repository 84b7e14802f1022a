"""A plan without its layers, as the cost model sees it: what runs where, and which network each kind of traffic takes,
found without listing every rank's groups (a plan may have tens of thousands of ranks)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial, wraps
from operator import attrgetter
from typing import TypeVar

import numpy as np

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.errors import PlanError
from holmes_hpc.fabric.site import Fabric, Site
from holmes_hpc.planning.cache import Memo
from holmes_hpc.planning.cost.costs import Costs
from holmes_hpc.planning.cost.hardware import UNMEASURED
from holmes_hpc.planning.cost.kernels import kind, kinds
from holmes_hpc.planning.plan.parallel import PIPELINE_ORDER, Parallel
from holmes_hpc.planning.plan.plan import Component, Plan, Schedule
from holmes_hpc.planning.plan.transport import Transport, TransportRule
from holmes_hpc.planning.schedule.kinds import PER_STAGE, ScheduleKind
from holmes_hpc.planning.schedule.order import Order

T = TypeVar("T")
_OF_THE_PLAN = (  # fields that a layout has of its plan
    *("model", "batch", "parallel", "recompute", "schedule", "components"),
    *("transport_mode", "edge_dtype", "edge_connections", "bucket_bytes"),
)
_order = lru_cache(maxsize=4096)(Order)  # a search asks for the same ones over and over
schedule_of = lru_cache(maxsize=4096)(Schedule)


def remembered(*settings: str) -> Callable[[Callable[[Layout], T]], Callable[[Layout], T]]:
    """Have a function of a layout computed once for all its variants in which these `settings` are equal."""
    values = [attrgetter(name) for name in settings]

    def decorate(compute: Callable[[Layout], T]) -> Callable[[Layout], T]:
        @wraps(compute)
        def once(layout: Layout) -> T:
            return layout.memo.of(compute, *(value(layout) for value in values), compute=partial(compute, layout))

        return once

    return decorate


@dataclass(frozen=True)
class Layout:
    """All of a Plan but its layers per stage, and the costs it is judged by.

    `memo`: what was computed of where the ranks are; variants of a layout share it. `common`: what does not even depend
    on that, but on fabrics alone (by name); layouts that differ in nothing but their components, schedule,
    recomputation, virtual stages and buckets may share one. A stage of a layout that is per stage costs what it would
    in a uniform one with its TP and DP: :attr:`views`.
    """

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
    common: Memo = field(repr=False, compare=False, default_factory=Memo)
    fabrics: dict[str, Fabric] = field(init=False, repr=False, compare=False)
    memo: Memo = field(init=False, repr=False, compare=False, default_factory=Memo)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fabrics", {f.name: f for f in self.site.fabrics})

    def varied(
        self,
        schedule: Schedule | None = None,
        bucket_bytes: int | None = None,
        recompute: str | None = None,
        virtual_stages: int | None = None,
    ) -> Layout:
        """With another schedule, bucket size, recomputation or number of virtual stages: where the ranks are stays, so
        that what was worked out of their networks does too (`memo`)."""
        made = copy(self)  # nothing to check: a search makes thousands
        if virtual_stages is not None and virtual_stages != self.parallel.virtual_stages:
            object.__setattr__(made, "parallel", replace(self.parallel, virtual_stages=virtual_stages))
        for name, value in (("schedule", schedule), ("bucket_bytes", bucket_bytes), ("recompute", recompute)):
            if value is not None:
                object.__setattr__(made, name, value)
        made.__dict__.pop("order", None)  # the only thing computed that these change
        return made

    def scheduled(self, kind: ScheduleKind, chunks: int | None = None, recompute: str | None = None) -> Layout:
        """Return the layout under a schedule, with as few passes in flight as that has at least."""
        p, chunks = self.parallel, chunks or self.parallel.virtual_stages
        depths = kind.in_flight(p.pp, self.batch.micro_batches(p.dp), chunks)
        return self.varied(schedule_of(kind.name, depths), recompute=recompute, virtual_stages=chunks)

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Layout:
        return cls(site=costs.on(plan.site), costs=costs, **{name: getattr(plan, name) for name in _OF_THE_PLAN})

    @cached_property
    def is_per_stage(self) -> bool:
        """As :attr:`Plan.is_per_stage`."""
        return not self.parallel.is_grid(self.batch.micro_batches(1))

    @cached_property
    def order(self) -> Order:
        p = self.parallel
        if self.is_per_stage:
            depths = self.schedule.in_flight
            total = self.batch.micro_batches(1)
            return self.memo.of("order", depths, compute=lambda: Order.routed(p.routes(total), depths))
        micro_batches = self.batch.micro_batches(p.dp)
        return _order(
            self.schedule.kind,
            p.pp,
            micro_batches,
            chunks=p.virtual_stages,
            in_flight=self.schedule.in_flight,
            overlap=self.costs.software.overlap_transfers,
            paired=self.costs.software.paired_transfers,
        )

    @property
    @remembered("recompute")
    def views(self) -> tuple[Layout, ...]:
        """Where the layout is per stage: for each stage the uniform layout of its TP and DP, of which nothing but that
        stage counts. Its replicas compute as many micro-batches as the one that has most."""
        return tuple(self._view(stage) for stage in range(self.parallel.pp))

    def _view(self, stage: int) -> Layout:
        sizes, p = self.parallel.stages[stage], self.parallel
        count = max(len(self.order.own(self.order.row(stage, r))) for r in range(sizes.dp))
        own = self.replicas[0][stage]
        micro = self.batch.micro_size
        padding = p.vocabulary_parts // sizes.tp  # the vocabulary is padded for every stage's TP
        return self.memo.of(
            *("view", self.recompute, sizes.tp, sizes.dp, count, own.gpus_per_node),
            compute=lambda: Layout(
                replace(self.model, vocab_multiple=self.model.vocab_multiple * padding) if padding > 1 else self.model,
                Batch(micro * sizes.dp * count, micro, self.batch.sequence_length),
                Parallel.uniform(sizes.tp, p.pp, sizes.dp, sequence_parallel=p.sequence_parallel and sizes.tp > 1),
                recompute=self.recompute,
                schedule=Schedule(PER_STAGE.name, (1,) * p.pp),
                components=tuple(replace(c, gpus_per_node=own.gpus_per_node) for c in self.components),
                site=self.site,
                costs=self.costs,
                transport_mode=self.transport_mode,
                edge_dtype=self.edge_dtype,
                edge_connections=self.edge_connections,
            ),
        )

    def by_stage(self, name: str, setting: object, compute: Callable[[Layout], np.ndarray]) -> np.ndarray:
        """Return, for each stage and each number of layers from one to all, what `compute` gives of its view, (layers,
        S). It is computed once for all variants of this layout with an equal `setting`."""

        def columns() -> np.ndarray:
            tables = [view.memo.of(name, setting, compute=partial(compute, view)) for view in self.views]
            return np.stack([table[:, stage] for stage, table in enumerate(tables)], axis=1)

        return self.memo.of("by stage", name, self.recompute, setting, compute=columns)

    @property
    def all_layers(self) -> np.ndarray:
        """From one layer on every stage to all on every stage, (layers, S, 1)."""
        counts = np.arange(1, self.model.layers + 1)
        return np.repeat(counts, self.parallel.pp).reshape(-1, self.parallel.pp, 1)

    @property
    def hierarchical(self) -> bool:
        return self.parallel.order != PIPELINE_ORDER

    @cached_property
    def replicas(self) -> tuple[tuple[Component, ...], ...]:
        """Per kind of pipeline replica, the component of each of its stages: there is one kind, or one per component if
        hierarchical."""
        if self.hierarchical:
            return tuple((c,) * self.parallel.pp for c in self.components)
        at: dict[int, Component] = {s: c for c in self.components for s in c.stages}
        if sorted(at) != list(range(self.parallel.pp)):
            raise PlanError(
                f"components hold stages {sorted(at)} of PP {self.parallel.pp}",
                where="components",
                hint="give every stage to one component",
            )
        return (tuple(at[s] for s in range(self.parallel.pp)),)

    @cached_property
    def runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(first, end) of each run of stages of one component, for each kind of pipeline replica."""
        found = []
        for stages in self.replicas:
            starts = [s for s in range(len(stages)) if s == 0 or stages[s] is not stages[s - 1]]
            found.append(tuple(zip(starts, [*starts[1:], len(stages)], strict=True)))
        return tuple(found)

    def pipelines(self, component: Component) -> int:
        """Pipelines that run in `component`, if hierarchical; else all of them go through it."""
        return component.ranks // (self.parallel.pp * self.parallel.tp) if self.hierarchical else self.parallel.dp

    @property
    def run(self) -> int:
        """Ranks of a data-parallel group that reduce-scatter among themselves (all, or one optimizer instance's)."""
        return self.parallel.dp // self.parallel.optimizer_instances

    def fabric(self, component: Component) -> Fabric:
        return self.fabrics[component.fabric]

    @cached_property
    def rule(self) -> TransportRule:
        """As the Plan has it; here, where a group's members run is found out without listing them."""
        return TransportRule.of_job(self.site, self.transport_mode, self.components)

    @cached_property
    def edges(self) -> tuple[tuple[Transport, ...], ...]:
        """For each kind of pipeline replica, the transport of the stage transfer from each stage to the next (the
        last's: back to the first). Local if it never leaves a node."""
        known: dict[tuple[str, str, bool], Transport] = {}
        found = []
        for replica, stages in enumerate(self.replicas):
            ends = [(here.fabric, there.fabric) for here, there in zip(stages, (*stages[1:], stages[0]), strict=True)]
            keys = [(*end, self._local(replica, s)) for s, end in enumerate(ends)]
            for here, there, local in keys:
                if (here, there, local) not in known:
                    known[here, there, local] = self.rule.of({here, there}, local)
            found.append(tuple(known[key] for key in keys))
        return tuple(found)

    def _local(self, replica: int, stage: int) -> bool:
        """Whether the stage transfer from `stage` to the next never leaves a node."""
        p, stages = self.parallel, self.replicas[replica]
        here, there = stages[stage], stages[(stage + 1) % p.pp]
        if self.hierarchical:
            per_node = here.gpus_per_node // p.tp
            whole = per_node % p.pp == 0  # pipelines that never leave their node, nor does their way back
            return here.nodes == 1 or whole or (stage + 1 < p.pp and (stage + 1) % math.gcd(p.pp, per_node) != 0)
        block, first = p.dp * p.tp, stage - here.stages[0]
        ahead = (stage + 1) % p.pp - stage
        span = first * block % here.gpus_per_node + (abs(ahead) + 1) * block
        return here is there and (here.nodes == 1 or (ahead > 0 and span <= here.gpus_per_node))

    def nodes_of_run(self, replica: int, stage: int) -> int:
        """Nodes that the ranks of one data-parallel run are spread over."""
        p, here = self.parallel, self.replicas[replica][stage]
        per_node = here.gpus_per_node // p.tp
        if self.hierarchical:
            per_node = max(1, per_node // p.pp)
        elif here.gpus_per_node % (p.dp * p.tp) and here.nodes > 1 and p.dp * p.tp < here.gpus_per_node:
            return 2  # a stage that straddles two nodes
        return max(1, -(-self.run // per_node))

    def reduction(self, replica: int, stage: int) -> Transport:
        """Of one data-parallel run of `stage`."""
        one_node = self.run == 1 or self.nodes_of_run(replica, stage) == 1
        return self.rule.of({self.replicas[replica][stage].fabric}, one_node)

    def across(self) -> Transport:
        """Between optimizer instances."""
        return self.rule.of(self.rule.fabrics, self.rule.one_node)

    def ends(self, replica: int = 0) -> Transport:
        """Between the first and the last stage: a tied embedding's gradients."""
        first, last = self.replicas[replica][0], self.replicas[replica][-1]
        whole = self.hierarchical and first.gpus_per_node // self.parallel.tp % self.parallel.pp == 0
        local = self.parallel.pp == 1 or (first is last and (first.nodes == 1 or whole))
        return self.rule.of({first.fabric, last.fabric}, local)

    def rate(
        self, transport: Transport, component: Component, collective: str = "", peer: Component | None = None
    ) -> float:
        """Payload bytes a second that one node (locally: one rank) can send, in messages or in a collective; `peer`: to
        whom, if that may be another fabric."""
        return self.common.of(
            *("rate", transport.kind, component.fabric, collective, peer.fabric if peer else ""),
            compute=lambda: self._rate(transport, component, collective, peer),
        )

    def _rate(self, transport: Transport, component: Component, collective: str, peer: Component | None) -> float:
        fabric = self.fabric(component)
        gbps = self.site.rate_gbps(transport.kind, fabric, self.fabric(peer) if peer else None)
        return gbps * 1e9 / 8 * self.costs.link(transport, fabric, collective).efficiency

    def latency(
        self, transport: Transport, component: Component, collective: str = "", peer: Component | None = None
    ) -> float:
        """Seconds before a message's first byte."""
        fabric = self.fabric(component)
        delay_s = self.site.delay_s(transport.kind, fabric, self.fabric(peer) if peer else None)
        return self.costs.link(transport, fabric, collective).latency_s + delay_s

    @property
    def linked(self) -> tuple[tuple[Component, Component], ...]:
        """Who sends to whom in a ring over all components, (from, to), where the site says what lies between them."""
        ring = zip(self.components, (*self.components[1:], self.components[0]), strict=True)
        return tuple((a, b) for a, b in ring if self.site.link(a.fabric, b.fabric))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was not measured and therefore supposed."""
        if self.is_per_stage:
            return tuple(dict.fromkeys(note for view in self.views for note in view.assumptions))
        calibration, said = self.costs.calibration, list[str]()
        for fabric in dict.fromkeys(self.fabric(c) for c in self.components):
            gpu = fabric.gpu
            if self.costs.pace_layer_ms:
                said.append(f"layers are paced: {self.costs.pace_layer_ms:g} ms forward, twice that backward")
            elif self.costs.measured(fabric):
                said += self._of_the_calibration(fabric)
            else:
                others = (
                    ": the calibration has other GPUs"
                    if calibration and any(f.parts for f in calibration.fabrics)
                    else ""
                )
                said.append(
                    f"compute times of {gpu.name} from published figures ({gpu.peak_tflops:g} TFLOP/s peak,"
                    f" fitted efficiency), not measured{others}"
                )
                if not gpu.is_cpu and not kind(gpu).known:
                    said.append(
                        f"no table of kernels for {gpu.name}: its shares of the peak are guessed; known are "
                        + ", ".join(sorted(k.name for k in kinds()))
                    )
            if not gpu.is_cpu and gpu.attention is None and self.costs.software.flash:
                said.append("attention is fused, by Transformer Engine or torch: where it is not, a run stops at once")
            if str(fabric.nic) in UNMEASURED and not self.costs.measured(fabric):
                said.append(f"{fabric.nic} ({fabric.name}) carries what RoCE of its rate does: no figures are known")
            if calibration is None or not any(f.links for f in calibration.fabrics):
                said.append("link latencies and efficiencies from published figures, not measured")
        return tuple(dict.fromkeys([*said, *self.costs.corrections.notes]))

    def _of_the_calibration(self, fabric: Fabric) -> Iterator[str]:
        """What of a fabric's layers the calibration does not say itself."""
        found = self.costs.calibration.of(fabric) if self.costs.calibration is not None else None
        assert found is not None
        if found.fabric and found.fabric != fabric.name:
            yield f"layers on {fabric.name} take what they took on {found.fabric}, with the same GPUs"
        kinds_here = {f.gpu.name for f in self.fabrics.values()}
        if not found.fabric and not found.gpu and len(kinds_here) > 1:
            yield (
                f"the calibration does not tell {' and '.join(sorted(kinds_here))} apart (earlier releases measured"
                " all GPUs together; a profile need not name its own): calibrate again"
            )
        measured = {p.tp for p in found.parts if p.part == "layer"}
        if measured and self.parallel.tp not in measured:
            yield (
                f"layers at TP {self.parallel.tp} reckoned from TP {', '.join(map(str, sorted(measured)))}, with"
                " collectives added: measure it with `holmes calibrate plan.tp="
                f"{self.parallel.tp}`"
            )
