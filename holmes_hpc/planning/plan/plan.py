"""The Plan: the complete description of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import EDGE_DTYPES, RECOMPUTE, STRATEGIES, TRANSPORT_MODES, edges_ignored
from holmes_hpc.config.train import EARLY_STEPS, GRAD_DTYPES, TrainConfig
from holmes_hpc.errors import Case, ConfigError, PlanError, RunFailed
from holmes_hpc.fabric.grouping import OTHER_ARCHITECTURE
from holmes_hpc.fabric.site import Pool, Site
from holmes_hpc.planning.plan import plan_file
from holmes_hpc.planning.plan.parallel import Parallel, abbreviated, groups, indivisible_sizes, tp_across_nodes
from holmes_hpc.planning.plan.parts import Component, Predicted, Schedule, Stage, experts_and_cp_cases, lacks_layers
from holmes_hpc.planning.plan.transport import GroupTransport, Place, Transport, TransportRule, places
from holmes_hpc.planning.schedule.kinds import PER_STAGE, schedule_kind
from holmes_hpc.planning.schedule.launches import check_launches
from holmes_hpc.planning.schedule.order import Order
from holmes_hpc.records.files import write_whole
from holmes_hpc.schema import check, key
from holmes_hpc.slurm.hostlist import expand

CONTROL = "control"  # kind of the transport entry for traffic of all ranks in host memory
MISFIT = "it does not fit"  # first words of the assumption that a layout needs more memory than its GPUs have


@dataclass(frozen=True)
class Plan:
    """The complete description of a run, made by the planner or by hand, and checked on creation."""

    strategy: Annotated[str, key("how fabrics are used", one_of=STRATEGIES)]
    model: ModelSpec
    batch: Batch
    parallel: Parallel
    recompute: Annotated[str, key("activations recomputed in the backward pass", one_of=RECOMPUTE)]
    schedule: Schedule
    components: tuple[Component, ...]
    stages: tuple[Stage, ...]
    site: Site
    bucket_bytes: Annotated[int, key("size of a gradient bucket", unit="bytes", ge=1)] = 40_000_000
    edge_dtype: Annotated[str, key("type of activations on TCP edges", one_of=EDGE_DTYPES)] = "same"
    edge_connections: Annotated[int, key("TCP connections for each activation", ge=1)] = 1
    transport_mode: Annotated[str, key("rule for the network of each group", one_of=TRANSPORT_MODES)] = "holmes"
    # Emulated compute applies to the prediction and to the run.
    pace_layer_ms: Annotated[float | None, key("emulated forward time of a layer", unit="ms", gt=0)] = None
    grad_dtype: Annotated[str | None, key("type of gradient sums; null: fp32", one_of=GRAD_DTYPES)] = None
    early_step: Annotated[str | None, key("optimizer steps before the norm; null: off", one_of=EARLY_STEPS)] = None
    predicted: Predicted | None = None
    assumptions: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()
    pace_factors: Annotated[Mapping[str, float] | None, key("{POOL: multiple of the emulated time}", gt=0)] = None

    def __post_init__(self) -> None:
        check(self, "plan", PlanError)
        ignored = edges_ignored(self.transport_mode, self.schedule.kind, self.edge_dtype, self.edge_connections)
        hint = "remove it, or use transport_mode holmes or schedule ahead"
        PlanError.refuse("plan", (ignored, str(ignored), hint))
        self._check_nodes()
        PlanError.refuse("stages", *self._model_mistakes())
        self.model.check_sequence(self.batch.sequence_length)
        self._check_experts_and_cp()
        if self.is_per_stage:
            self._check_per_stage()
        self._place()
        check_launches(self.order)
        self._check_fabrics()

    def _check_nodes(self) -> None:
        pools, ranks = [c.pool for c in self.components], sum(c.ranks for c in self.components)
        problem = f"pools {', '.join(pools)}: one is listed twice"
        PlanError.refuse("components", (len(set(pools)) < len(pools), problem, "use one component per pool"))
        for c, pool in zip(self.components, map(self.site.pool, pools), strict=True):
            sizes = (c.nodes, pool.nodes, "nodes"), (c.gpus_per_node, pool.gpus_per_node, "GPUs per node")
            for n, limit, unit in sizes:
                problem = f"{n} {unit} needed, the site has {limit}"
                PlanError.refuse(f"component {c.pool}", (n > limit, problem, f"use at most {limit}"))
        problem = f"components hold {ranks} ranks, {self.parallel} needs {self.world_size}"
        PlanError.refuse("components", (ranks != self.world_size, problem, "make both numbers equal"))

    def _model_mistakes(self) -> Iterator[Case]:
        m, p, schedule = self.model, self.parallel, self.schedule
        for tp in p.tps:
            yield from indivisible_sizes(m, tp)
        for tp, length in {(s.tp, self.batch.split(s.cp).sequence_length // p.cp) for s in p.stages}:
            problem, place = f"TP {tp} does not divide a sequence of {length}", "parallel.sequence_parallel"
            yield p.sequence_parallel and length % tp, problem, "switch it off, or use a TP that divides it", place
        problem, has_cp = "context parallelism does not support dropout", max(s.cp for s in p.stages) > 1
        yield has_cp and m.dropout, problem, "use 0", "model.dropout"
        lengths: list[tuple[str, Sized, int]] = [("stages", self.stages, p.pp)]
        names = ("in_flight", *(("deferred", "final") if schedule.deferred else ()))
        lengths += [(f"schedule.{name}", getattr(schedule, name), p.pp) for name in names]
        lengths += [(f"stages[{s}].chunks", stage.chunks, p.virtual_stages) for s, stage in enumerate(self.stages)]
        for where, values, count in lengths:
            problem = f"{len(values)} entries, but the layout is {p}"
            yield len(values) != count, problem, f"give {count}", where
        layers = sum(s.layers for s in self.stages)
        yield layers != m.layers, f"stages hold {layers} layers, the model has {m.layers}", "make them equal"
        problem = "a virtual stage other than the first and the last has no layer"
        yield lacks_layers([stage.chunks for stage in self.stages]), problem, "use fewer stages"

    def _check_experts_and_cp(self) -> None:
        p = self.parallel
        used = {
            "per-stage TP/DP": self.is_per_stage,
            "hierarchical data parallelism": p.is_hierarchical,
            "optimizer instances": p.optimizer_instances > 1,
            "zero_bubble": self.schedule.kind == "zero_bubble",
        }
        PlanError.refuse("plan.ep", *experts_and_cp_cases(self.model, p, used))
        no_sequence_parallel = self.model.experts.count and p.tps != (1,) and not p.sequence_parallel
        message, hint = "experts do not support TP without sequence parallelism", "use sequence_parallel or TP 1"
        PlanError.refuse("plan", (no_sequence_parallel, message, hint))
        dense, first = self.model.experts.first_dense, self.stages[0]
        message = f"chunks of {abbreviated(first.chunks)} layers, but experts.first_dense is {dense}"
        hint = "give the first chunk all dense layers, and the stage one with experts"
        PlanError.refuse("stages[0]", (dense > min(first.chunks[0], first.layers - 1), message, hint))

    def _check_per_stage(self) -> None:
        p, kind = self.parallel, self.schedule.kind
        strategy = "hierarchical-dp" if p.is_hierarchical else "pipeline"
        if p.is_uniform:
            plain = Parallel(p.stages, order=p.order, sequence_parallel=p.sequence_parallel)
            if kind != PER_STAGE.name or p != plain:
                self.parts.micro_batches(p.dp)  # raises: DP does not divide the batch
        for name, value, required in (
            ("schedule.kind", kind, kind if schedule_kind(kind).per_stage else PER_STAGE.name),
            ("strategy", "pipeline" if self.strategy == "one-fabric" else self.strategy, strategy),
            ("transport_mode", self.transport_mode, "holmes"),
        ):
            problem = f"{name} is {value}, but the replicas of a stage have unequal shares of a step"
            hint = f"use {required}, or the same TP and DP in every stage and a batch divisible by them"
            PlanError.refuse(name, (value != required, problem, hint))

    def _place(self) -> None:
        """Fill in the derived fields of components and stages (partition, pool, …), and check where stages run."""
        p, first = self.parallel, 0
        components, first_pools = list[Component](), dict[int, Pool]()
        for c in self.components:
            pool = self.site.pool(c.pool)
            stages = tuple(range(p.pp))
            if not p.is_hierarchical:
                stages = tuple(range(p.coordinates(first)[0], p.coordinates(first + c.ranks - 1)[0] + 1))
            for stage in stages:
                sizes, first_pool = p.stages[stage], first_pools.setdefault(stage, pool)
                PlanError.refuse("stages", tp_across_nodes(sizes.tp, c.gpus_per_node, f"component {c.pool}"))
                is_split = self.is_per_stage and not p.is_hierarchical and sizes.ranks % c.gpus_per_node
                problem = f"stage {stage}: {sizes.sizes()} on nodes of {c.gpus_per_node} ranks"
                hint = "give a stage whole nodes: a multiple of the ranks of a node"
                PlanError.refuse("stages", (is_split, problem, hint))
                spans_fabrics = first_pool.fabric_name != pool.fabric_name and self.strategy != "hierarchical-dp"
                problem = f"stage {stage} has ranks in {first_pool.fabric_name} and {pool.fabric_name}"
                hint = "put stage boundaries on fabric boundaries, or plan again"
                PlanError.refuse(f"component {c.pool}", (spans_fabrics, problem, hint))
            components.append(
                replace(c, partition=pool.partition, constraint=pool.constraint, fabric=pool.fabric_name, stages=stages)
            )
            first += c.ranks
        object.__setattr__(self, "components", tuple(components))
        stage_pools = ((stage, first_pools[i]) for i, stage in enumerate(self.stages))
        placed_stages = tuple(replace(stage, pool=pool.name, fabric=pool.fabric_name) for stage, pool in stage_pools)
        object.__setattr__(self, "stages", placed_stages)

    def _check_fabrics(self) -> None:
        is_hierarchical = self.strategy == "hierarchical-dp"
        one_fabric_kinds = ("tp", "intra_dp", *(() if is_hierarchical else ("cp", "dp", "ep", "expt_dp")))
        fabric_of = {p.name: p.fabric_name for p in self.site.pools}
        for g in self.transports() if self.transport_mode != "single" else ():
            pools = {self.places[r].pool for r in g.ranks}
            fabrics = {fabric_of[pool] for pool in pools}
            problem = f"experts of ranks {abbreviated(g.ranks)} are shared by pools {', '.join(sorted(pools))}"
            hint = "use a smaller EP, or stages inside one pool"
            PlanError.refuse("plan", (g.kind == "ep" and len(pools) > 1, problem, hint))
            problem = f"{g.kind} group of ranks {abbreviated(g.ranks)} spans fabrics {', '.join(sorted(fabrics))}"
            hint = "put stage boundaries on fabric boundaries, or plan again"
            PlanError.refuse("plan", (g.kind in one_fabric_kinds and len(fabrics) > 1, problem, hint))

    @property
    def layout(self) -> list[dict[str, Any]]:
        """The components of the job, as in a run's record."""
        return [{k: v for k, v in asdict(c).items() if k != "stages"} for c in self.components]

    @property
    def strategy_label(self) -> str:
        """The strategy as users see it: ``one node`` if the plan has only one."""
        return "one node" if sum(c.nodes for c in self.components) == 1 else self.strategy

    @property
    def misfit(self) -> str:
        """The assumption that it does not fit in memory; empty if it fits."""
        return next((text for text in self.assumptions if text.startswith(MISFIT)), "")

    @property
    def unused(self) -> dict[str, int]:
        """{Pool: number of its nodes that the plan leaves idle}."""
        used = {c.pool: c.nodes for c in self.components}
        idle = {f.name: f.nodes - used.get(f.name, 0) for f in self.site.pools}
        return {name: nodes for name, nodes in idle.items() if nodes}

    @property
    def other_architectures(self) -> dict[str, tuple[str, str]]:
        """{Pool in use: (CPU architecture, the site's assumption on it)}, if it is not that of most nodes."""
        matches = [match for match in map(OTHER_ARCHITECTURE.match, self.site.assumptions) if match]
        pools = [self.site.pool(c.pool) for c in self.components]
        return {p.name: (m[2], m.string) for p in pools for m in matches if {*expand(m[1])} & {*p.node_names}}

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @cached_property
    def parts(self) -> Batch:
        """The batch as ranks hold it: with parts of sequences if several ranks share a sequence."""
        return self.batch.split(self.parallel.cp, self.parallel.cp_comm == "a2a")

    @cached_property
    def is_per_stage(self) -> bool:
        """True if stages differ in TP or DP, or if replicas of a stage differ in their number of micro-batches."""
        return not self.parallel.is_grid(self.parts.micro_batches(1))

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per pipeline and step or, with per-stage TP/DP, of the whole step."""
        return self.parts.micro_batches(1 if self.is_per_stage else self.parallel.dp)

    @cached_property
    def order(self) -> Order:
        """The order in which each stage (with per-stage TP/DP: each replica) computes its passes."""
        p = self.parallel
        if self.is_per_stage:
            return Order.per_stage(p.routes(self.micro_batches), **vars(self.schedule))
        schedule = {key: value for key, value in vars(self.schedule).items() if key != "kind"}
        return Order(self.schedule.kind, p.pp, self.micro_batches, p.virtual_stages, **schedule)

    @cached_property
    def places(self) -> list[Place]:
        """The place of each global rank."""
        return places(self.components)

    def component_of(self, rank: int) -> int:
        """Return the index of the component with `rank`; no two components share a pool."""
        return [c.pool for c in self.components].index(self.places[rank].pool)

    @cached_property
    def transport_rule(self) -> TransportRule:
        return TransportRule.of_job(self.site, self.transport_mode, self.components)

    def transport_of(self, ranks: Sequence[int], host_memory: bool = False) -> Transport:
        """Return the transport of a group of these ranks; `host_memory` as in :meth:`TransportRule.of`."""
        return self.transport_rule.of_members([self.places[r] for r in ranks], host_memory)

    def transports(self) -> Iterator[GroupTransport]:
        """Yield the entry of kind CONTROL, if any rank has a GPU, then one per group of :func:`groups`, in order."""
        if self.world_size > 1 and not all(self.site.pool(c.pool).gpu.is_cpu for c in self.components):
            everyone, stages = tuple(range(self.world_size)), tuple(range(self.parallel.pp))
            yield GroupTransport(CONTROL, everyone, self.transport_of(everyone, host_memory=True), stages)
        model = self.model
        for g in groups(self.parallel, self.parts.micro_batches(1), model.tied, model.experts.count > 0):
            yield GroupTransport(g.kind, g.ranks, self.transport_of(g.ranks), g.stages)

    @property
    def id(self) -> str:
        """Twelve hex digits that identify what runs. Predictions and alternatives do not change them."""
        return plan_file.digest(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data with the derived fields (`holmes plan --json`)."""
        return plan_file.to_dict(self)

    @classmethod
    def from_dict(cls, data: Any, where: str = "plan") -> Plan:
        """Return the plan in plain data of :meth:`to_dict` or a plan file. Errors name key, value and choices."""
        return plan_file.from_dict(cls, data, where)

    def to_yaml(self) -> str:
        return plan_file.to_yaml(self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write plan.yaml atomically; equal plans give equal bytes."""
        hint = "give a file in a directory that exists and has space"
        with PlanError.instead_of(RunFailed, where=path, hint=hint):
            write_whole(Path(path), self.to_yaml())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and check a plan.yaml."""
        return cls.from_dict(plan_file.read(path), where=str(path))


def early_step_of(train: TrainConfig, plan: Plan) -> str:
    """Return ``train.early_step``, by default the plan's. Raise ConfigError if the plan counts no memory for it."""
    problem = "it is stage, but the plan has no memory for it"
    hint = "plan again with train.early_step=stage, or remove it"
    is_unplanned = train.early_step == "stage" and plan.early_step != "stage"
    ConfigError.refuse("train.early_step", (is_unplanned, problem, hint))
    return train.early_step or plan.early_step or "off"
