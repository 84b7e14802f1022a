"""The Plan: what runs where. One schema, one version number, one reader and one writer of plan.yaml."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.config.plan_options import (
    EDGE_DTYPES,
    RECOMPUTE,
    SCHEDULES,
    STRATEGIES,
    TRANSPORT_MODES,
    edges_ignored,
)
from holmes_hpc.errors import HolmesError, PlanError, nearest
from holmes_hpc.fabric.site import NicType, Site
from holmes_hpc.planning.schedule.orders import Order
from holmes_hpc.planning.spec.parallel import PIPELINE_ORDER, Group, Parallel, groups
from holmes_hpc.planning.spec.transport import LOCAL, Place, Transport, check, decide

VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """`kind`: one of SCHEDULES. `in_flight`: per stage, the most micro-batches (chunk passes when interleaved) whose
    activations it holds."""

    kind: str
    in_flight: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight", tuple(self.in_flight))
        if self.kind not in SCHEDULES:
            raise PlanError(f"unknown schedule {self.kind!r}", where="schedule.kind",
                            hint=nearest(self.kind, SCHEDULES))
        if any(n < 1 for n in self.in_flight):
            raise PlanError(f"in_flight is {self.in_flight}", where="schedule", hint="every stage holds at least one")


@dataclass(frozen=True)
class Component:
    """One part of the hetjob: `nodes` of one fabric, which hold the pipeline `stages` (all of them if hierarchical)."""

    partition: str
    constraint: str
    fabric: str
    nodes: int
    gpus_per_node: int
    stages: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: `layers` transformer layers, cut into `chunks` (one per virtual stage). `fabric` is the first
    one's where a hierarchical plan has it in several."""

    fabric: str
    layers: int
    chunks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple(self.chunks) or (self.layers,))
        if sum(self.chunks) != self.layers or min(self.chunks) < 0:
            raise PlanError(f"chunks {self.chunks} do not make {self.layers} layers", where="stages",
                            hint="correct them")


@dataclass(frozen=True)
class GroupTransport:
    """The transport of one concrete group: Megatron-Core's `kind` of it (or `edge`), its global ranks, its stages."""

    kind: str
    ranks: tuple[int, ...]
    transport: Transport
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Predicted:
    """What a plan should do. Times in seconds; `nic_bytes_per_step`: fabric name or ``ethernet`` -> bytes that all
    nodes together send over such NICs in one step, payload only; `breakdown`: seconds of the step by part."""

    step_time_s: float
    samples_per_s: float
    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    memory_bytes_per_gpu: tuple[int, ...]
    nic_bytes_per_step: dict[str, float]
    breakdown: dict[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_bytes_per_gpu", tuple(self.memory_bytes_per_gpu))


@dataclass(frozen=True)
class Plan:
    """Everything a run needs. Made by the planner, or by hand; checked here, so that inside no code asks again."""

    strategy: str
    model: ModelSpec
    batch: Batch
    parallel: Parallel
    recompute: str
    schedule: Schedule
    components: tuple[Component, ...]
    stages: tuple[Stage, ...]
    site: Site
    bucket_bytes: int = 40_000_000
    edge_dtype: str = "same"
    edge_connections: int = 1  # of each direction of an edge on TCP: a tensor is spread over them
    transport_mode: str = "holmes"
    pace_layer_ms: float | None = None  # layers take that long forward by waiting: what was predicted, and what runs
    predicted: Predicted | None = None
    assumptions: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()
    unused: dict[str, int] = field(default_factory=dict)  # fabric -> nodes the plan leaves idle
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("components", "stages", "assumptions", "alternatives"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, known in (("strategy", STRATEGIES), ("recompute", RECOMPUTE), ("transport_mode", TRANSPORT_MODES),
                            ("edge_dtype", EDGE_DTYPES)):
            value = getattr(self, name)
            if value not in known:
                raise PlanError(f"unknown {name} {value!r}", where="plan", hint=nearest(str(value), known))
        if self.pace_layer_ms is not None and not self.pace_layer_ms > 0:
            raise PlanError(f"pace_layer_ms is {self.pace_layer_ms}", where="plan", hint="use milliseconds above 0")
        if self.version != VERSION:
            raise PlanError(f"plan version {self.version}, this release reads {VERSION}", where="plan",
                            hint="make the plan again with `holmes plan`")
        if ignored := edges_ignored(self.transport_mode, self.schedule.kind, self.edge_dtype, self.edge_connections):
            raise PlanError(ignored, where="plan", hint="leave it out, or use transport_mode holmes or schedule ahead")
        self._check_sizes()
        self._check_model()
        self._check_fabrics()
        self._check_components()

    def _check_sizes(self) -> None:
        p = self.parallel
        if len(self.stages) != p.pp:
            raise PlanError(f"{len(self.stages)} stages for PP {p.pp}", where="stages", hint="list one per stage")
        if len(self.schedule.in_flight) != p.pp:
            raise PlanError(f"{len(self.schedule.in_flight)} values for PP {p.pp}", where="schedule.in_flight",
                            hint="give one per stage")
        for name in ("bucket_bytes", "edge_connections"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", where="plan", hint="use a number above 0")
        for c in self.components:
            fabric = self.site.fabric(c.fabric)
            if c.nodes < 1 or c.gpus_per_node < 1:
                raise PlanError(f"{c.nodes} nodes x {c.gpus_per_node}", where=f"component {c.fabric}",
                                hint="use 1 or more")
            if c.nodes > fabric.nodes:
                raise PlanError(f"{c.nodes} nodes wanted, the site has {fabric.nodes}", where=f"component {c.fabric}",
                                hint=f"use at most {fabric.nodes}")
            if c.gpus_per_node > fabric.gpus_per_node:
                raise PlanError(f"{c.gpus_per_node} GPUs a node wanted, a node has {fabric.gpus_per_node}",
                                where=f"component {c.fabric}", hint=f"use at most {fabric.gpus_per_node}")
            if c.gpus_per_node % p.tp:
                raise PlanError(f"TP {p.tp} does not divide {c.gpus_per_node} GPUs of a node",
                                where=f"component {c.fabric}", hint="keep tensor parallel inside a node")
        if sum(c.ranks for c in self.components) != p.world_size:
            raise PlanError(f"components hold {sum(c.ranks for c in self.components)} ranks, TP {p.tp} x PP {p.pp} x DP"
                            f" {p.dp} needs {p.world_size}", where="components", hint="make them equal")

    def _check_model(self) -> None:
        m, p, where = self.model, self.parallel, f"model {self.model.name}"
        for name, value in (("heads", m.heads), ("kv_heads", m.kv_heads), ("ffn", m.ffn)):
            if value % p.tp:
                raise PlanError(f"{value} {name} cannot be divided by TP {p.tp}", where=where,
                                hint=f"use a TP that divides {value}")
        if p.sequence_parallel and self.batch.sequence_length % p.tp:
            raise PlanError(f"TP {p.tp} does not divide a sequence of {self.batch.sequence_length}",
                            where="parallel.sequence_parallel", hint="switch it off, or use a TP that divides it")
        if sum(s.layers for s in self.stages) != m.layers:
            raise PlanError(f"stages hold {sum(s.layers for s in self.stages)} layers, the model has {m.layers}",
                            where="stages", hint="make them equal")
        for i, stage in enumerate(self.stages):
            if len(stage.chunks) != p.virtual_stages:
                raise PlanError(f"stage {i} has {len(stage.chunks)} chunks for {p.virtual_stages} virtual stages",
                                where="stages", hint="give one chunk per virtual stage")
            if min(stage.chunks) < 1:
                raise PlanError(f"stage {i} has a chunk without a layer", where="stages", hint="use fewer stages")
        if self.batch.sequence_length > m.max_positions:
            raise PlanError(f"sequence_length {self.batch.sequence_length} is above the model's {m.max_positions}",
                            where="batch", hint="shorten the sequence or raise model.max_positions")
        Order(self.schedule.kind, p.pp, self.batch.micro_batches(p.dp), p.virtual_stages, self.schedule.in_flight)

    def _check_fabrics(self) -> None:
        if self.transport_mode == "single":
            return
        for g in self.transports():
            names = {place.fabric for place in (self.places[r] for r in g.ranks)}
            spans = len(names) > 1
            inside = ("tp", "intra_dp") if self.strategy == "hierarchical-dp" else ("tp", "intra_dp", "dp")
            if spans and g.kind in inside:
                raise PlanError(f"{g.kind} group of ranks {_short(g.ranks)} spans fabrics {', '.join(sorted(names))}",
                                where="plan", hint="put stage boundaries on fabric boundaries, or plan again")

    def _check_components(self) -> None:
        """Components and stages say where ranks are, and the order of ranks says it too."""
        fabrics = [c.fabric for c in self.components]
        if len(set(fabrics)) < len(fabrics):
            raise PlanError(f"fabrics {', '.join(fabrics)}: one is there twice", where="components",
                            hint="make one component of a fabric")
        first = 0
        for c in self.components:
            held = tuple(sorted({self.parallel.coordinates(rank)[0] for rank in range(first, first + c.ranks)}))
            first += c.ranks
            if held != tuple(sorted(c.stages)):
                raise PlanError(f"its ranks hold stages {_short(held)}, it says {_short(c.stages)}",
                                where=f"component {c.fabric}", hint="write the stages that follow from the order")
            wrong = [s for s in held if self.stages[s].fabric != c.fabric]
            if wrong and self.strategy != "hierarchical-dp":
                raise PlanError(f"stage {wrong[0]} is said to be on {self.stages[wrong[0]].fabric}",
                                where=f"component {c.fabric}", hint="give a stage the fabric of its component")

    @property
    def layout(self) -> list[dict[str, Any]]:
        """The components of the job, as a run's record has them."""
        return [{"partition": c.partition, "constraint": c.constraint, "fabric": c.fabric, "nodes": c.nodes,
                 "gpus_per_node": c.gpus_per_node} for c in self.components]

    @property
    def world_size(self) -> int:
        return self.parallel.world_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches per pipeline and step."""
        return self.batch.micro_batches(self.parallel.dp)

    @property
    def places(self) -> list[Place]:
        """Where each global rank runs: components in order, nodes in order within, GPUs in order within a node."""
        cached: list[Place] | None = self.__dict__.get("_places")
        if cached is None:
            cached = [Place(c.fabric, f"{c.fabric}[{n}]") for i, c in enumerate(self.components)
                      for n in range(c.nodes) for _ in range(c.gpus_per_node)]
            object.__setattr__(self, "_places", cached)
        return cached

    def component_of(self, rank: int) -> int:
        for index, c in enumerate(self.components):
            if rank < c.ranks:
                return index
            rank -= c.ranks
        raise PlanError(f"rank {rank} is beyond the plan's {self.world_size}", where="plan", hint="use the plan's size")

    def transport_of(self, group: Group) -> Transport:
        """`holmes`: the best its members share; `single` (plain Megatron-LM): the best that all ranks share."""
        own = decide(self.site, [self.places[r] for r in group.ranks])
        if self.transport_mode == "holmes" or own == LOCAL:
            return own
        return decide(self.site, self.places)

    def transports(self) -> Iterator[GroupTransport]:
        """One entry per concrete group and per pair of an edge, in a fixed order."""
        for g in groups(self.parallel):
            yield GroupTransport(g.kind, g.ranks, self.transport_of(g), g.stages)

    @property
    def id(self) -> str:
        """Twelve hex digits of what the plan does (not of what was predicted or considered)."""
        kept = replace(self, predicted=None, assumptions=(), alternatives=())
        return hashlib.sha256(json.dumps(kept.to_dict(), sort_keys=True).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the schema of plan.yaml. Only a paced plan has a pace."""
        data: dict[str, Any] = {"version": self.version}
        for f in fields(self):
            if f.name not in ("version", "site", "alternatives", "predicted") and (
                    f.name != "pace_layer_ms" or self.pace_layer_ms is not None):
                value = getattr(self, f.name)
                data[f.name] = asdict(value) if hasattr(value, "__dataclass_fields__") else value
        data["components"] = [asdict(c) for c in self.components]
        data["stages"] = [asdict(s) for s in self.stages]
        data["transports"] = [
            {"kind": g.kind, "ranks": list(g.ranks), "stages": list(g.stages), "transport": g.transport.kind,
             "nic": str(g.transport.nic) if g.transport.nic else None, "fabric": g.transport.fabric}
            for g in self.transports()]
        data["predicted"] = asdict(self.predicted) if self.predicted else None
        data["alternatives"] = list(self.alternatives)
        data["site"] = self.site.to_dict()
        return json.loads(json.dumps(data))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "plan") -> Plan:
        """The inverse of :meth:`to_dict`. Transports are derived again and must equal the ones written."""
        try:
            known = {f.name for f in fields(cls)} | {"transports"}
            for key in data:
                if key not in known:
                    raise PlanError(f"unknown key {key!r}", where=where, hint=nearest(key, known))
            rest = {k: data[k] for k in known & data.keys() - {"transports"}}
            rest.update(
                model=ModelSpec(**data["model"]), batch=Batch(**data["batch"]), parallel=Parallel(**data["parallel"]),
                schedule=Schedule(**data["schedule"]), components=[Component(**c) for c in data["components"]],
                stages=[Stage(**s) for s in data["stages"]], site=Site.from_dict(data["site"]),
                predicted=Predicted(**data["predicted"]) if data.get("predicted") else None)
            plan = cls(**rest)
            if "transports" in data:
                plan._check_written_transports(data["transports"])
        except HolmesError as e:
            if e.where.startswith(where):
                raise
            raise type(e)(e.what, where=f"{where}: {e.where}", hint=e.hint) from e
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise PlanError(f"not a plan: {type(e).__name__}: {e}", where=where,
                            hint="make it again with `holmes plan`") from e
        return plan

    def _check_written_transports(self, written: list[dict[str, Any]]) -> None:
        for entry in written:
            nic = NicType(entry["nic"]) if entry.get("nic") else None
            t = Transport(entry["transport"], nic, entry.get("fabric"))
            check(self.site, f"{entry['kind']} {_short(entry['ranks'])}", [self.places[r] for r in entry["ranks"]], t)
        derived = self.to_dict()["transports"]
        if written != derived:
            raise PlanError("transports are not those of its groups", where="transports",
                            hint="remove the key (it is derived), or set transport_mode")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write plan.yaml, atomically; equal plans give equal bytes."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_text(self.to_yaml(), encoding="utf-8")
            os.replace(temporary, target)
        except OSError as e:
            temporary.unlink(missing_ok=True) if target.parent.is_dir() else None
            raise PlanError(e.strerror or str(e), where=str(path), hint="give a file in a directory that exists") from e

    def to_yaml(self) -> str:
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        return str(yaml.dump(self.to_dict(), Dumper=dumper, sort_keys=False, default_flow_style=None, width=110,
                             allow_unicode=True))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and check a plan.yaml."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (a safe loader)
        except OSError as e:
            raise PlanError(e.strerror or str(e), where=str(path),
                            hint="make it with `holmes plan -o plan.yaml`") from e
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise PlanError(f"not YAML: {e}", where=str(path), hint="make it again with `holmes plan`") from e
        if not isinstance(data, dict):
            raise PlanError("not a plan", where=str(path), hint="make it with `holmes plan -o plan.yaml`")
        return cls.from_dict(data, where=str(path))


def _short(ranks: tuple[int, ...] | list[int]) -> str:
    text = [str(r) for r in ranks]
    return ",".join(text if len(text) <= 6 else [*text[:3], "…", text[-1]])


__all__ = ["PIPELINE_ORDER", "Component", "GroupTransport", "Parallel", "Plan", "Predicted", "Schedule", "Stage"]
