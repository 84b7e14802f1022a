"""The Plan: what runs where. One schema, one version number, one reader and one writer of plan.yaml."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import EDGE_DTYPES, RECOMPUTE, STRATEGIES, TRANSPORT_MODES, edges_ignored
from holmes_hpc.errors import HolmesError, PlanError, RunFailed
from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.schedule.launches import check_launches
from holmes_hpc.planning.schedule.orders import FOR_UNEQUAL, Order
from holmes_hpc.planning.schedule.routed import RoutedOrder
from holmes_hpc.planning.spec.parallel import Parallel, groups
from holmes_hpc.planning.spec.parts import Component, GroupTransport, Predicted, Schedule, Stage
from holmes_hpc.planning.spec.transport import Place, Transport, TransportRule, refuse_unshared
from holmes_hpc.planning.spec.widths import Widths, read_widths, unequal_groups, write_widths
from holmes_hpc.records.files import write_whole
from holmes_hpc.records.foreign import from_yaml
from holmes_hpc.schema import check, key, make

VERSION = 1
UNEQUAL = 2  # the version of a plan whose stages have unequal widths; all others are written as version 1
CONTROL = "control"  # the kind of the one entry of transports that is no group of Megatron-Core's


@dataclass(frozen=True)
class _Written:
    """An entry of transports as plan.yaml has it."""

    kind: str
    ranks: Annotated[tuple[int, ...], key("global ranks", ge=0)]
    stages: Annotated[tuple[int, ...], key("pipeline stages", ge=0)]
    transport: Annotated[str, key("what its traffic uses", one_of=("local", "rdma", "tcp"))]
    nic: Annotated[str | None, key("NIC type", one_of=tuple(str(nic) for nic in NicType))] = None
    fabric: str | None = None

    def __post_init__(self) -> None:
        check(self, "transports", PlanError)


@dataclass(frozen=True)
class Plan:
    """Everything a run needs. Made by the planner, or by hand; checked here, so that inside no code asks again."""

    strategy: Annotated[str, key("how fabrics are used", one_of=STRATEGIES)]
    model: ModelSpec
    batch: Batch
    parallel: Parallel | Widths
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
    unused: dict[str, int] = field(default_factory=dict)  # fabric -> nodes the plan leaves idle
    pace_factors: Annotated[Mapping[str, float] | None, key("so many times the pace there", gt=0)] = None
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_version(self.version)
        check(self, "plan", PlanError)
        if (self.version == UNEQUAL) != isinstance(self.parallel, Widths):
            object.__setattr__(self, "version", UNEQUAL if isinstance(self.parallel, Widths) else VERSION)
        if ignored := edges_ignored(self.transport_mode, self.schedule.kind, self.edge_dtype, self.edge_connections):
            raise PlanError(ignored, where="plan", hint="leave it out, or use transport_mode holmes or schedule ahead")
        self._check_sizes()
        self._check_model()
        if isinstance(self.parallel, Widths):
            self._check_unequal(self.parallel)
        check_launches(self.order)
        self._check_fabrics()
        self._check_components()

    def _check_sizes(self) -> None:
        p = self.parallel
        if len(self.stages) != p.pp:
            raise PlanError(f"{len(self.stages)} stages for PP {p.pp}", where="stages", hint="list one per stage")
        if len(self.schedule.in_flight) != p.pp:
            raise PlanError(
                f"{len(self.schedule.in_flight)} values for PP {p.pp}",
                where="schedule.in_flight",
                hint="give one per stage",
            )
        for c in self.components:
            fabric = self.site.fabric(c.fabric)
            if c.nodes > fabric.nodes:
                raise PlanError(
                    f"{c.nodes} nodes wanted, the site has {fabric.nodes}",
                    where=f"component {c.fabric}",
                    hint=f"use at most {fabric.nodes}",
                )
            if c.gpus_per_node > fabric.gpus_per_node:
                raise PlanError(
                    f"{c.gpus_per_node} GPUs a node wanted, a node has {fabric.gpus_per_node}",
                    where=f"component {c.fabric}",
                    hint=f"use at most {fabric.gpus_per_node}",
                )
            for tp in p.tps if isinstance(p, Parallel) else {p.tp_of(s) for s in c.stages if s < p.pp}:
                if c.gpus_per_node % tp:
                    raise PlanError(
                        f"TP {tp} does not divide {c.gpus_per_node} GPUs of a node",
                        where=f"component {c.fabric}",
                        hint="keep tensor parallel inside a node",
                    )
        if sum(c.ranks for c in self.components) != p.world_size:
            raise PlanError(
                f"components hold {sum(c.ranks for c in self.components)} ranks, {p.product} needs {p.world_size}",
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
        if sum(s.layers for s in self.stages) != m.layers:
            raise PlanError(
                f"stages hold {sum(s.layers for s in self.stages)} layers, the model has {m.layers}",
                where="stages",
                hint="make them equal",
            )
        for i, stage in enumerate(self.stages):
            if len(stage.chunks) != p.virtual_stages:
                raise PlanError(
                    f"stage {i} has {len(stage.chunks)} chunks for {p.virtual_stages} virtual stages",
                    where="stages",
                    hint="give one chunk per virtual stage",
                )
            if min(stage.chunks) < 1:
                raise PlanError(f"stage {i} has a chunk without a layer", where="stages", hint="use fewer stages")
        if self.batch.sequence_length > m.max_positions:
            raise PlanError(
                f"sequence_length {self.batch.sequence_length} is above the model's {m.max_positions}",
                where="batch",
                hint="shorten the sequence or raise model.max_positions",
            )

    def _check_fabrics(self) -> None:
        if self.transport_mode == "single":
            return
        for g in self.transports():
            names = {place.fabric for place in (self.places[r] for r in g.ranks)}
            spans = len(names) > 1
            inside = ("tp", "intra_dp") if self.strategy == "hierarchical-dp" else ("tp", "intra_dp", "dp")
            if spans and g.kind in inside:
                raise PlanError(
                    f"{g.kind} group of ranks {_short(g.ranks)} spans fabrics {', '.join(sorted(names))}",
                    where="plan",
                    hint="put stage boundaries on fabric boundaries, or plan again",
                )

    def _check_components(self) -> None:
        """Components and stages say where ranks are, and the order of ranks says it too."""
        fabrics = [c.fabric for c in self.components]
        if len(set(fabrics)) < len(fabrics):
            raise PlanError(
                f"fabrics {', '.join(fabrics)}: one is there twice",
                where="components",
                hint="make one component of a fabric",
            )
        first = 0
        for c in self.components:
            held = tuple(sorted({self.parallel.coordinates(rank)[0] for rank in range(first, first + c.ranks)}))
            first += c.ranks
            if held != tuple(sorted(c.stages)):
                raise PlanError(
                    f"its ranks hold stages {_short(held)}, it says {_short(c.stages)}",
                    where=f"component {c.fabric}",
                    hint="write the stages that follow from the order",
                )
            wrong = [s for s in held if self.stages[s].fabric != c.fabric]
            if wrong and self.strategy != "hierarchical-dp":
                raise PlanError(
                    f"stage {wrong[0]} is said to be on {self.stages[wrong[0]].fabric}",
                    where=f"component {c.fabric}",
                    hint="give a stage the fabric of its component",
                )

    def _check_unequal(self, widths: Widths) -> None:
        if self.schedule.kind != FOR_UNEQUAL.name:
            raise PlanError(
                f"{self.schedule.kind} with stages of unequal widths",
                where="schedule.kind",
                hint=f"use {FOR_UNEQUAL.name}: Megatron's own schedules need one width for all stages",
            )
        if self.strategy == "hierarchical-dp" or self.transport_mode == "single":
            said = "strategy hierarchical-dp" if self.strategy == "hierarchical-dp" else "transport_mode single"
            raise PlanError(
                f"{said} with stages of unequal widths",
                where="plan",
                hint="use strategy pipeline with transport_mode holmes",
            )
        for s, (stage, width) in enumerate(zip(self.stages, widths.stages, strict=True)):
            found = next((c for c in self.components if c.fabric == stage.fabric), None)
            if found is None:
                raise PlanError(
                    f"stage {s} is on {stage.fabric}, of which there is no component",
                    where="stages",
                    hint="add it to components, or give the stage another fabric",
                )
            if width.ranks != width.nodes * found.gpus_per_node:
                raise PlanError(
                    f"stage {s}: TP {width.tp} x DP {width.dp} on {width.nodes} nodes of {found.gpus_per_node} ranks",
                    where="stages",
                    hint="a stage has whole nodes: nodes x ranks of a node = tp x dp",
                )

    @property
    def layout(self) -> list[dict[str, Any]]:
        """The components of the job, as a run's record has them."""
        return [
            {
                "partition": c.partition,
                "constraint": c.constraint,
                "fabric": c.fabric,
                "nodes": c.nodes,
                "gpus_per_node": c.gpus_per_node,
            }
            for c in self.components
        ]

    @property
    def spread(self) -> str:
        """How it lies on the nodes, for people: its strategy, or that one node has all of it."""
        return "one node" if sum(c.nodes for c in self.components) == 1 else self.strategy

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches per pipeline and step; with unequal widths of the whole step, for there are no pipelines."""
        return self.batch.micro_batches(1 if isinstance(self.parallel, Widths) else self.parallel.dp)

    @cached_property
    def order(self) -> Order | RoutedOrder:
        """What each stage (with unequal widths: each replica of it) computes in a step, one after the other."""
        p = self.parallel
        if isinstance(p, Widths):
            return RoutedOrder(p.routes(self.micro_batches), self.schedule.in_flight)
        return Order(self.schedule.kind, p.pp, self.micro_batches, p.virtual_stages, self.schedule.in_flight)

    @cached_property
    def places(self) -> list[Place]:
        """Where each global rank runs: components in order, nodes in order within, GPUs in order within a node."""
        return [
            Place(c.fabric, f"{c.fabric}[{n}]")
            for c in self.components
            for n in range(c.nodes)
            for _ in range(c.gpus_per_node)
        ]

    def component_of(self, rank: int) -> int:
        for index, c in enumerate(self.components):
            if rank < c.ranks:
                return index
            rank -= c.ranks
        raise PlanError(f"rank {rank} is beyond the plan's {self.world_size}", where="plan", hint="use the plan's size")

    @cached_property
    def transport_rule(self) -> TransportRule:
        return TransportRule(
            self.site,
            self.transport_mode,
            frozenset(c.fabric for c in self.components),
            sum(c.nodes for c in self.components) == 1,
        )

    def transport_of(self, ranks: Sequence[int], host_memory: bool = False) -> Transport:
        """Of whatever group these ranks form; `host_memory` as :meth:`TransportRule.of` has it."""
        return self.transport_rule.of_members([self.places[r] for r in ranks], host_memory)

    def transports(self) -> Iterator[GroupTransport]:
        """One entry per concrete group and per pair of an edge, in a fixed order."""
        if self.world_size > 1 and not all(self.site.fabric(c.fabric).gpu.is_cpu for c in self.components):
            everyone = tuple(range(self.world_size))
            yield GroupTransport(
                CONTROL, everyone, self.transport_of(everyone, host_memory=True), tuple(range(self.parallel.pp))
            )
        p = self.parallel
        for g in unequal_groups(p, self.micro_batches, self.model.tied) if isinstance(p, Widths) else groups(p):
            yield GroupTransport(g.kind, g.ranks, self.transport_of(g.ranks), g.stages)

    @property
    def id(self) -> str:
        """Twelve hex digits of what the plan does (not of what was predicted or considered). Without the control entry,
        which older plans do not have."""
        data = replace(self, predicted=None, assumptions=(), alternatives=()).to_dict()
        data["transports"] = _without_control(data["transports"])
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the schema of plan.yaml. Only a paced plan has a pace."""
        data: dict[str, Any] = {"version": self.version}
        for f in fields(self):
            if f.name not in ("version", "site", "alternatives", "predicted") and (
                not f.name.startswith("pace_") or getattr(self, f.name) is not None
            ):
                value = getattr(self, f.name)
                data[f.name] = asdict(value) if hasattr(value, "__dataclass_fields__") else value
        data["model"] = self.model.to_dict()
        data["components"] = [asdict(c) for c in self.components]
        data["stages"] = [asdict(s) for s in self.stages]
        data["transports"] = [
            {
                "kind": g.kind,
                "ranks": list(g.ranks),
                "stages": list(g.stages),
                "transport": g.transport.kind,
                "nic": str(g.transport.nic) if g.transport.nic else None,
                "fabric": g.transport.fabric,
            }
            for g in self.transports()
        ]
        data["predicted"] = asdict(self.predicted) if self.predicted else None
        data["alternatives"] = list(self.alternatives)
        if isinstance(self.parallel, Widths):
            write_widths(data, self.parallel)
        data["site"] = self.site.to_dict()
        return json.loads(json.dumps(data))

    @classmethod
    def from_dict(cls, data: Any, where: str = "plan") -> Plan:
        """The inverse of :meth:`to_dict`. PlanError or SiteError names the key, its value and what is allowed. A key
        that an older version did not write has its default. Transports are derived again and must be those written."""
        try:
            if isinstance(data, Mapping):
                _check_version(data.get("version", VERSION))
                read = read_widths(data) if data.get("version") == UNEQUAL else data
                plan = make(cls, {k: v for k, v in read.items() if k != "transports"}, "plan", PlanError)
                if "transports" in read:
                    plan._check_written_transports(read["transports"])
                missing = [k for k in _ALWAYS_WRITTEN if k not in data]
                return (
                    plan
                    if not missing
                    else replace(
                        plan,
                        assumptions=(
                            *plan.assumptions,
                            f"an older plan, without {', '.join(missing)}: taken as by default",
                        ),
                    )
                )
        except HolmesError as e:
            inside = e.where.removeprefix("plan").removeprefix(".")
            raise type(e)(e.what, where=f"{where}: {inside}" if inside else where, hint=e.hint) from e
        raise PlanError("not a plan", where=where, hint="make it with `holmes plan -o plan.yaml`")

    def _check_written_transports(self, written: Any) -> None:
        """They are derived: others are refused, with what is wrong with the first that could never be."""
        derived = self.to_dict()["transports"]
        if written in (derived, _without_control(derived)):
            return
        hint = "remove the key (it is derived), or set transport_mode"
        if not isinstance(written, list):
            raise PlanError(f"transports is {written!r:.60}", where="transports", hint=hint)
        for i, entry in enumerate(written):
            e = make(_Written, entry, f"transports[{i}]", PlanError)
            if any(rank >= self.world_size for rank in e.ranks):
                raise PlanError(
                    f"ranks is {_short(e.ranks)}",
                    where=f"transports[{i}]",
                    hint=f"the plan has {self.world_size} ranks, from 0",
                )
            made = Transport(e.transport, NicType(e.nic) if e.nic else None, e.fabric)
            refuse_unshared(self.site, f"{e.kind} {_short(e.ranks)}", [self.places[r] for r in e.ranks], made)
        raise PlanError("transports are not those of its groups", where="transports", hint=hint)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write plan.yaml, atomically; equal plans give equal bytes."""
        try:
            write_whole(Path(path), self.to_yaml())
        except RunFailed as e:
            raise PlanError(e.what, where=str(path), hint="give a file in a directory that exists") from e

    def to_yaml(self) -> str:
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        return str(
            yaml.dump(
                self.to_dict(), Dumper=dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
            )
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and check a plan.yaml."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            data = from_yaml(text)
        except OSError as e:
            raise PlanError(
                e.strerror or str(e), where=str(path), hint="make it with `holmes plan -o plan.yaml`"
            ) from e
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise PlanError(f"not YAML: {e}", where=str(path), hint="make it again with `holmes plan`") from e
        return cls.from_dict(data, where=str(path))


# Keys that may be missing in a plan of an older version, and that change what it does.
_ALWAYS_WRITTEN = ("bucket_bytes", "edge_dtype", "edge_connections", "transport_mode")


def _check_version(version: Any) -> None:
    if version not in (VERSION, UNEQUAL):
        raise PlanError(
            f"plan version {version}, this release reads {VERSION} and {UNEQUAL}",
            where="plan",
            hint="make the plan again with `holmes plan`",
        )


def _without_control(transports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in transports if entry["kind"] != CONTROL]


def _short(ranks: tuple[int, ...] | list[int]) -> str:
    """Ranks, or stages, in a few letters."""
    text = [str(r) for r in ranks]
    return ",".join(text if len(text) <= 6 else [*text[:3], "…", text[-1]])
