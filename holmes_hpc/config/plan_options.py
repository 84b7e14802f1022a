"""What the person who plans has fixed, and what the planner may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.planning.spec.plan import EDGE_DTYPES, RECOMPUTE, SCHEDULES, STRATEGIES, TRANSPORT_MODES, edges_ignored

PARTITIONS = ("exact", "proportional", "uniform")


@dataclass(frozen=True)
class PlanOptions:
    """None or ``auto``: the planner chooses. The keys are those of the configuration group `plan`.

    `nodes`: fabric -> nodes, only these fabrics, just as many. `gpus_per_node`: ranks on each node (None: all GPUs).
    `partition`: how layers are dealt out: ``exact`` (shortest simulated step), ``proportional`` (the paper's rule) or
    ``uniform``. `transport`: ``holmes`` (the best of each group) or ``single`` (plain Megatron-LM: one for all groups).
    `max_memory_gib`: of one GPU, instead of the site's. `fabric_order`: of the fabrics along the pipeline.
    """

    strategy: str = "auto"
    nodes: Mapping[str, int] | None = None
    gpus_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    virtual_stages: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    partition: str = "exact"
    recompute: str = "auto"
    schedule: str = "auto"
    transport: str = "holmes"
    sequence_parallel: bool | None = None
    distributed_optimizer: bool = True
    bucket_bytes: int | None = None
    edge_dtype: str = "same"
    edge_connections: int = 1
    search_micro_size: bool = False
    max_memory_gib: float | None = None
    fabric_order: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, known in (("strategy", ("auto", *STRATEGIES)), ("partition", PARTITIONS),
                            ("recompute", ("auto", *RECOMPUTE)), ("schedule", ("auto", *SCHEDULES)),
                            ("transport", TRANSPORT_MODES), ("edge_dtype", EDGE_DTYPES)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"unknown {name} {value!r}", where="plan", hint=nearest(str(value), known))
        for name in ("gpus_per_node", "tp", "pp", "dp", "virtual_stages", "bucket_bytes",
                     "edge_connections"):
            _whole(f"plan.{name}", getattr(self, name))
        if ignored := edges_ignored(self.transport, self.schedule, self.edge_dtype, self.edge_connections):
            raise ConfigError(ignored, where="plan", hint="leave it out, or use transport=holmes or schedule=ahead")
        for name in ("distributed_optimizer", "search_micro_size"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}", where="plan", hint="use true or false")
        if self.nodes is not None:
            if not isinstance(self.nodes, Mapping) or not self.nodes:
                raise ConfigError(f"nodes is {self.nodes!r}", where="plan.nodes", hint="use {FABRIC: NODES, …}")
            for fabric, nodes in self.nodes.items():
                _whole(f"plan.nodes.{fabric}", nodes)
            object.__setattr__(self, "nodes", {str(k): v for k, v in self.nodes.items() if v is not None} or None)
        if self.layers_per_stage is not None:
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
            for layers in self.layers_per_stage:
                _whole("plan.layers_per_stage", layers)
            if self.pp is not None and len(self.layers_per_stage) != self.pp:
                raise ConfigError(f"{len(self.layers_per_stage)} numbers of layers for PP {self.pp}",
                                  where="plan.layers_per_stage", hint="give one number for each stage")
        if self.fabric_order is not None:
            object.__setattr__(self, "fabric_order", tuple(self.fabric_order))
        if self.max_memory_gib is not None and not self.max_memory_gib > 0:
            raise ConfigError(f"max_memory_gib is {self.max_memory_gib}", where="plan", hint="use a size above 0")


def _whole(where: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{value!r} is not a whole number above 0", where=where, hint="correct it")
