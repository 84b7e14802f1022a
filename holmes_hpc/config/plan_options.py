"""The configuration group `plan`: choices that the user fixes, and limits for the planner's choices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.config.renamed_keys import move_renamed
from holmes_hpc.errors import Case
from holmes_hpc.schema import Checked, key, keys

STRATEGIES = ("one-fabric", "pipeline", "hierarchical-dp")
RECOMPUTE = ("none", "selective", "full")
MEGATRON_SCHEDULES = ("1f1b", "interleaved")  # run by Megatron-Core's own functions
SCHEDULE_NAMES = (*MEGATRON_SCHEDULES, "ahead", "zero_bubble")  # in plan.yaml; defined in planning/schedule/kinds.py
OPTION_NAMES = {"ahead": "eager_1f1b"}  # names of plan.schedule that differ from those in plan.yaml
TRANSPORT_MODES = ("holmes", "single")
EDGE_DTYPES = ("same", "bf16", "fp16", "fp8")
PARTITIONS = ("exact", "proportional", "uniform")


def edges_ignored(transport: str, schedule: str, edge_dtype: str, edge_connections: int) -> str:
    """Return a message if `edge_dtype` or `edge_connections` is set but has no effect; an empty text otherwise."""
    is_set = edge_dtype != "same" or edge_connections != 1
    if transport != "single" or schedule not in ("auto", *MEGATRON_SCHEDULES) or not is_set:
        return ""
    setting = f"edge_dtype={edge_dtype}" if edge_dtype != "same" else f"edge_connections={edge_connections}"
    return f"{setting} has no effect with transport=single under Megatron-Core's own schedules"


@dataclass(frozen=True)
class PlanOptions(Checked, where="plan", dotted=True):
    """The configuration group `plan`. The planner chooses the values that are None or ``auto``."""

    strategy: Annotated[
        str,
        key(
            "one-fabric, pipeline (the paper's: data parallel inside a fabric, pipeline across fabrics) or "
            "hierarchical-dp (pipelines in each pool, or in each node of a single one; data parallel across them)",
            one_of=("auto", *STRATEGIES),
        ),
    ] = "auto"
    nodes: Annotated[
        Mapping[str, int | None] | None,
        key("{POOL: NODES}: use only these pools, with these numbers of nodes; null: the planner chooses", ge=1),
    ] = None
    gpus_per_node: Annotated[int | None, key("ranks on each node; null: all GPUs of a node", ge=1)] = None
    tp: Annotated[int | None, key("tensor-parallel size", ge=1)] = None
    pp: Annotated[int | None, key("pipeline-parallel size: stages", ge=1)] = None
    dp: Annotated[int | None, key("data-parallel size", ge=1)] = None
    cp: Annotated[int | None, key("ranks that share a sequence; auto: the planner chooses", ge=1, auto=True)] = None
    cp_comm: Annotated[str, key("CP's attention: ring, or all-to-all (a2a)", one_of=("auto", "ring", "a2a"))] = "auto"
    ep: Annotated[int | None, key("expert-parallel size in a stage; auto: the planner chooses", ge=1, auto=True)] = None
    ep_comm: Annotated[str, key("how EP's ranks exchange tokens", one_of=("alltoall", "allgather"))] = "alltoall"
    etp: Annotated[int | None, key("expert tensor-parallel size; auto: 1 with alltoall", ge=1, auto=True)] = None
    virtual_stages: Annotated[int | None, key("model chunks per pipeline rank; 1: not interleaved", ge=1)] = None
    layers_per_stage: Annotated[tuple[int, ...] | None, key("[26, 22]; null: see plan.partition", ge=1)] = None
    partition: Annotated[
        str,
        key(
            "how to divide layers over stages: exact (shortest simulated step), proportional "
            "(the paper's rule) or uniform",
            one_of=PARTITIONS,
        ),
    ] = "exact"
    recompute: Annotated[str, key("activations recomputed in the backward pass", one_of=("auto", *RECOMPUTE))] = "auto"
    schedule: Annotated[
        str,
        key(
            "1f1b or interleaved (Megatron-Core's), eager_1f1b (sends and receives in the background) or zero_bubble "
            "(also computes weight gradients later); `ahead`: another name of eager_1f1b",
            one_of=("auto", *SCHEDULE_NAMES, *OPTION_NAMES.values()),
        ),
    ] = "auto"
    transport: Annotated[
        str,
        key(
            "holmes (the best transport of each group) or single (plain Megatron-LM: one for all)",
            one_of=TRANSPORT_MODES,
        ),
    ] = "holmes"
    sequence_parallel: Annotated[bool | None, key("split activations outside TP regions over the TP ranks")] = None
    distributed_optimizer: Annotated[
        bool | None,
        key("shard optimizer states over data-parallel ranks; auto: unless a step is 1% shorter without", auto=True),
    ] = None
    bucket_bytes: Annotated[int | None, key("size of a gradient bucket", unit="bytes", ge=1)] = None
    edge_dtype: Annotated[
        str, key("type of activations on TCP edges between stages; same: as computed", one_of=EDGE_DTYPES)
    ] = "same"
    edge_connections: Annotated[int, key("TCP connections for each activation", ge=1)] = 1
    search_micro_size: Annotated[bool, key("the planner may change batch.micro_size")] = False
    max_memory_gib: Annotated[
        float | None, key("memory of one GPU, if less than the site's value", unit="GiB", gt=0, infinite=True)
    ] = None
    pool_order: Annotated[tuple[str, ...] | None, key("order of pools along the pipeline: [ib-a, roce-a]")] = None
    fabric_order: Annotated[tuple[str, ...] | None, key("deprecated: the former name of `pool_order`")] = None
    unequal: Annotated[
        str,
        key(
            "per-stage TP, DP and nodes: auto (if they may make a step 1% faster), true or false",
            one_of=("auto", "true", "false"),
        ),
    ] = "auto"

    @property
    def stages(self) -> int | None:
        """The number of stages, if `pp` or `layers_per_stage` sets it."""
        return self.pp or (len(self.layers_per_stage) if self.layers_per_stage else None)

    def __post_init__(self) -> None:
        if isinstance(self.unequal, bool):  # YAML reads these words as booleans
            object.__setattr__(self, "unequal", str(self.unequal).lower())
        for name in [name for name, declared in keys(type(self)).items() if declared.spec.auto]:
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, None)
        for kind, option in OPTION_NAMES.items():
            if self.schedule == option:
                object.__setattr__(self, "schedule", kind)
        super().__post_init__()
        move_renamed(self, "plan", "fabric_order", "pool_order")
        if self.nodes is not None:
            object.__setattr__(self, "nodes", {str(k): v for k, v in self.nodes.items() if v is not None} or None)

    def _mistakes(self) -> Iterator[Case]:
        ignored = edges_ignored(self.transport, self.schedule, self.edge_dtype, self.edge_connections)
        yield ignored, ignored, "remove it, or use transport=holmes or schedule=eager_1f1b", "plan"
        yield self.nodes == {}, "no pool is named", "use {POOL: NODES, …}, or null for all pools", "plan.nodes"
        stages, place = len(self.layers_per_stage or ()), "plan.layers_per_stage"
        is_odd = self.pp and stages and stages != self.pp
        yield is_odd, f"{stages} entries, pp is {self.pp}", "give one number for each stage", place
