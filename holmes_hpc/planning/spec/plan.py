"""The Plan: what runs where."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import EDGE_DTYPES, RECOMPUTE, STRATEGIES, TRANSPORT_MODES, edges_ignored
from holmes_hpc.errors import PlanError, RunFailed
from holmes_hpc.fabric.site import Site
from holmes_hpc.planning.schedule.kinds import PER_STAGE
from holmes_hpc.planning.schedule.launches import check_launches
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.planning.spec import plan_file
from holmes_hpc.planning.spec.parallel import HIERARCHICAL_ORDER, Parallel, groups
from holmes_hpc.planning.spec.parts import Component, Predicted, Schedule, Stage
from holmes_hpc.planning.spec.transport import GroupTransport, Place, Transport, TransportRule, places
from holmes_hpc.records.files import write_whole
from holmes_hpc.schema import check, key

CONTROL = "control"  # the kind of the one entry of transports that is no group of Megatron-Core's


@dataclass(frozen=True)
class Plan:
    """Everything a run needs. Made by the planner, or by hand; checked here, so that inside no code asks again.

    A component's partition, constraint and stages, and a stage's fabric, follow from the rest: they are filled in.
    """

    strategy: Annotated[str, key("how fabrics are used", one_of=STRATEGIES)]
    model: ModelSpec
    batch: Batch
    parallel: Parallel
    recompute: Annotated[str, key("what a backward pass computes again", one_of=RECOMPUTE)]
    schedule: Schedule
    components: tuple[Component, ...]
    stages: tuple[Stage, ...]
    site: Site
    bucket_bytes: Annotated[int, key("of a gradient bucket", unit="bytes", ge=1)] = 40_000_000
    edge_dtype: Annotated[str, key("of activations on TCP edges", one_of=EDGE_DTYPES)] = "same"
    # a tensor is spread over them
    edge_connections: Annotated[int, key("of each direction of an edge on TCP", ge=1)] = 1
    transport_mode: Annotated[str, key("which network groups use", one_of=TRANSPORT_MODES)] = "holmes"
    # what was predicted, and what runs
    pace_layer_ms: Annotated[float | None, key("layers take that long forward by waiting", unit="ms", gt=0)] = None
    predicted: Predicted | None = None
    assumptions: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()
    pace_factors: Annotated[Mapping[str, float] | None, key("so many times the pace there", gt=0)] = None

    def __post_init__(self) -> None:
        check(self, "plan", PlanError)
        if ignored := edges_ignored(self.transport_mode, self.schedule.kind, self.edge_dtype, self.edge_connections):
            raise PlanError(ignored, where="plan", hint="leave it out, or use transport_mode holmes or schedule ahead")
        self._check_nodes()
        self._check_model()
        if self.is_per_stage:
            self._check_per_stage()
        self._place()
        check_launches(self.order)
        self._check_fabrics()

    def _check_nodes(self) -> None:
        p, fabrics = self.parallel, [c.fabric for c in self.components]
        if len(set(fabrics)) < len(fabrics):
            raise PlanError(
                f"fabrics {', '.join(fabrics)}: one is there twice",
                where="components",
                hint="make one component of a fabric",
            )
        for c in self.components:
            fabric = self.site.fabric(c.fabric)
            for count, available, unit in (
                (c.nodes, fabric.nodes, "nodes"),
                (c.gpus_per_node, fabric.gpus_per_node, "GPUs of a node"),
            ):
                if count > available:
                    raise PlanError(
                        f"{count} {unit} needed, the site has {available}",
                        where=f"component {c.fabric}",
                        hint=f"use at most {available}",
                    )
        if sum(c.ranks for c in self.components) != p.world_size:
            raise PlanError(
                f"components hold {sum(c.ranks for c in self.components)} ranks, {p} needs {p.world_size}",
                where="components",
                hint="make them equal",
            )

    def _check_model(self) -> None:
        m, p, where = self.model, self.parallel, f"model {self.model.name}"
        for tp in p.tps:
            for name, value in (("heads", m.heads), ("kv_heads", m.kv_heads), ("ffn", m.ffn)):
                if value % tp:
                    raise PlanError(
                        f"{value} {name} cannot be divided by TP {tp}",
                        where=where,
                        hint=f"use a TP that divides {value}",
                    )
            if p.sequence_parallel and self.batch.sequence_length % tp:
                raise PlanError(
                    f"TP {tp} does not divide a sequence of {self.batch.sequence_length}",
                    where="parallel.sequence_parallel",
                    hint="switch it off, or use a TP that divides it",
                )
        for values, count, name in (
            (self.stages, p.pp, "stages"),
            (self.schedule.in_flight, p.pp, "schedule.in_flight"),
            *((stage.chunks, p.virtual_stages, f"stages[{s}].chunks") for s, stage in enumerate(self.stages)),
        ):
            if len(values) != count:
                raise PlanError(f"{len(values)} values for {p}", where=name, hint=f"give {count}")
        if sum(s.layers for s in self.stages) != m.layers:
            raise PlanError(
                f"stages hold {sum(s.layers for s in self.stages)} layers, the model has {m.layers}",
                where="stages",
                hint="make them equal",
            )
        for i, stage in enumerate(self.stages):
            if min(stage.chunks) < 1:
                raise PlanError(f"stage {i} has a chunk without a layer", where="stages", hint="use fewer stages")
        if self.batch.sequence_length > m.max_positions:
            raise PlanError(
                f"sequence_length {self.batch.sequence_length} is above the model's {m.max_positions}",
                where="batch",
                hint="shorten the sequence or raise model.max_positions",
            )

    def _check_per_stage(self) -> None:
        p = self.parallel
        if p.is_uniform:
            plain = Parallel(p.stages, sequence_parallel=p.sequence_parallel)
            if self.schedule.kind != PER_STAGE.name or p != plain:
                self.batch.micro_batches(p.dp)  # says what does not divide
        for name, value, only in (
            ("schedule.kind", self.schedule.kind, PER_STAGE.name),
            ("strategy", "pipeline" if self.strategy == "one-fabric" else self.strategy, "pipeline"),
            ("transport_mode", self.transport_mode, "holmes"),
        ):
            if value != only:
                raise PlanError(
                    f"{name} is {value}, and replicas of its stages have unequal shares of a step",
                    where=name,
                    hint=f"use {only}, or the same TP and DP in every stage and a batch that these divide",
                )

    def _place(self) -> None:
        """Fill in what follows from the order of ranks: each component's stages, each stage's fabric."""
        p, first = self.parallel, 0
        components, fabrics = list[Component](), dict[int, str]()
        for c in self.components:
            fabric = self.site.fabric(c.fabric)
            last = first + c.ranks - 1
            held = (
                range(p.pp)
                if p.order == HIERARCHICAL_ORDER
                else range(p.coordinates(first)[0], p.coordinates(last)[0] + 1)
            )
            for stage in held:
                if c.gpus_per_node % p.tp_of(stage):
                    raise PlanError(
                        f"TP {p.tp_of(stage)} does not divide {c.gpus_per_node} GPUs of a node",
                        where=f"component {c.fabric}",
                        hint="keep tensor parallel inside a node",
                    )
                if self.is_per_stage and p.stages[stage].ranks % c.gpus_per_node:
                    raise PlanError(
                        f"stage {stage}: TP {p.tp_of(stage)} x DP {p.dp_of(stage)} on nodes of {c.gpus_per_node} ranks",
                        where="stages",
                        hint="give a stage whole nodes: a multiple of the ranks of a node",
                    )
                if stage in fabrics and self.strategy != "hierarchical-dp":
                    raise PlanError(
                        f"stage {stage} lies on {fabrics[stage]} and {c.fabric}",
                        where=f"component {c.fabric}",
                        hint="put stage boundaries on fabric boundaries, or plan again",
                    )
                fabrics.setdefault(stage, c.fabric)
            components.append(replace(c, partition=fabric.partition, constraint=fabric.constraint, stages=tuple(held)))
            first += c.ranks
        object.__setattr__(self, "components", tuple(components))
        object.__setattr__(self, "stages", tuple(replace(s, fabric=fabrics[i]) for i, s in enumerate(self.stages)))

    def _check_fabrics(self) -> None:
        inside = ("tp", "intra_dp") if self.strategy == "hierarchical-dp" else ("tp", "intra_dp", "dp")
        for g in self.transports() if self.transport_mode != "single" else ():
            names = {self.places[r].fabric for r in g.ranks}
            if len(names) > 1 and g.kind in inside:
                raise PlanError(
                    f"{g.kind} group of ranks {plan_file.short(g.ranks)} spans fabrics {', '.join(sorted(names))}",
                    where="plan",
                    hint="put stage boundaries on fabric boundaries, or plan again",
                )

    @property
    def layout(self) -> list[dict[str, Any]]:
        """The components of the job, as a run's record has them."""
        names = ("partition", "constraint", "fabric", "nodes", "gpus_per_node")
        return [{name: getattr(c, name) for name in names} for c in self.components]

    @property
    def spread(self) -> str:
        """How the plan lies on the nodes, for people: its strategy, or that one node has all of it."""
        return "one node" if sum(c.nodes for c in self.components) == 1 else self.strategy

    @property
    def unused(self) -> dict[str, int]:
        """Fabric -> nodes that the plan leaves idle."""
        used = {c.fabric: c.nodes for c in self.components}
        idle = {f.name: f.nodes - used.get(f.name, 0) for f in self.site.fabrics}
        return {name: nodes for name, nodes in idle.items() if nodes}

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def is_per_stage(self) -> bool:
        """Whether replicas of a stage compute unlike micro-batches: TP or DP differ by stage, or shares by replica."""
        return not self.parallel.is_grid(self.batch.micro_batches(1))

    @property
    def micro_batches(self) -> int:
        """Micro-batches per pipeline and step; of the whole step where a plan is per stage, for there are no
        pipelines."""
        return self.batch.micro_batches(1 if self.is_per_stage else self.parallel.dp)

    @cached_property
    def order(self) -> Order:
        """What each stage (where a plan is per stage: each replica of it) computes in a step, one after the other."""
        p = self.parallel
        if self.is_per_stage:
            return Order.routed(p.routes(self.micro_batches), self.schedule.in_flight)
        return Order(self.schedule.kind, p.pp, self.micro_batches, p.virtual_stages, self.schedule.in_flight)

    @cached_property
    def places(self) -> list[Place]:
        """Where each global rank runs."""
        return places(self.components)

    def component_of(self, rank: int) -> int:
        for index, c in enumerate(self.components):
            if rank < c.ranks:
                return index
            rank -= c.ranks
        raise PlanError(f"rank {rank} is beyond the plan's {self.world_size}", where="plan", hint="use the plan's size")

    @cached_property
    def transport_rule(self) -> TransportRule:
        return TransportRule.of_job(self.site, self.transport_mode, self.components)

    def transport_of(self, ranks: Sequence[int], host_memory: bool = False) -> Transport:
        """Return the transport of whatever group these ranks form; `host_memory` as :meth:`TransportRule.of` has it."""
        return self.transport_rule.of_members([self.places[r] for r in ranks], host_memory)

    def transports(self) -> Iterator[GroupTransport]:
        """Yield one entry per concrete group and per pair of an edge, in a fixed order."""
        if self.world_size > 1 and not all(self.site.fabric(c.fabric).gpu.is_cpu for c in self.components):
            everyone = tuple(range(self.world_size))
            yield GroupTransport(
                CONTROL, everyone, self.transport_of(everyone, host_memory=True), tuple(range(self.parallel.pp))
            )
        for g in groups(self.parallel, self.batch.micro_batches(1), self.model.tied):
            yield GroupTransport(g.kind, g.ranks, self.transport_of(g.ranks), g.stages)

    @property
    def id(self) -> str:
        """Twelve hex digits of what the plan does (not of what was predicted or considered)."""
        return plan_file.digest(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with what follows from other fields beside these (`holmes plan --json`)."""
        return plan_file.to_dict(self)

    @classmethod
    def from_dict(cls, data: Any, where: str = "plan") -> Plan:
        """Make a plan of what :meth:`to_dict` or a plan.yaml has. PlanError or SiteError names the key, its value and
        what is allowed."""
        return plan_file.from_dict(cls, data, where)

    def to_yaml(self) -> str:
        return plan_file.to_yaml(self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write plan.yaml, atomically; equal plans give equal bytes."""
        try:
            write_whole(Path(path), self.to_yaml())
        except RunFailed as e:
            raise PlanError(e.what, where=str(path), hint="give a file in a directory that exists") from e

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and check a plan.yaml."""
        return cls.from_dict(plan_file.read(path), where=str(path))
