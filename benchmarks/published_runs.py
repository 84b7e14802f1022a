"""Read published training runs (benchmarks/published/) and predict their step times.

benchmarks/published_table.py prints the errors."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import yaml

import holmes_hpc.fabric
from holmes_hpc.config.model import Batch, ModelSpec
from holmes_hpc.fabric.site import Gpu, NicType, Pool, Site
from holmes_hpc.planning.cost.calibration import Calibration
from holmes_hpc.planning.cost.costs import Costs, Software
from holmes_hpc.planning.cost.kernels import STACK, Stack
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.planning.cost.profile import from_csv
from holmes_hpc.planning.cost.timing import step_s
from holmes_hpc.planning.plan.parallel import Parallel
from holmes_hpc.planning.plan.plan import Component, Schedule
from holmes_hpc.planning.schedule.kinds import in_flight
from holmes_hpc.planning.search.layers import chunk_layers, uniform_layers

DATA = Path(__file__).parent / "published"
KINDS = yaml.safe_load(Path(holmes_hpc.fabric.__file__).with_name("gpu_kinds.yaml").read_text())["gpus"]
GPUS = [Gpu(**{k: v for k, v in kind.items() if k != "match"}) for kind in KINDS]

GENERATIONS = {"a100": "ampere", "h100": "hopper", "gh200": "hopper", "mi250": "cdna2"}


@dataclass(frozen=True)
class Run:
    """A published run; fields that neither its row nor its set has take the default.

    `gbps`: of all RDMA NICs of a node, or of its Ethernet. `stages`: layers of each pipeline stage, if uneven.
    `attention`: flash2, flash1, softmax (a fused softmax between two batched products) or torch. `seconds`: step time,
    None if the run was out of memory (`fits` False). `memory_gib`: a GPU's peak, if reported."""

    set: str
    group: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    global_size: int
    micro_size: int
    tp: int
    pp: int
    dp: int
    gpu: str
    gbps: float
    nic: str
    kv_heads: int = 0
    ffn: int = 0
    sequence: int = 2048
    swiglu: bool = False
    rmsnorm: bool = False
    rope: bool = False
    tied: bool = False
    bias: bool = False
    dropout: float = 0.0
    cp: int = 1
    chunks: int = 1
    stages: str = ""
    recompute: str = "none"
    recompute_layers: int | None = None
    sequence_parallel: bool = False
    sharding: str = "none"
    gpus_per_node: int = 8
    dtype: str = "bf16"
    fp8: bool = False
    gradient_bytes: int = 4
    attention: str = "flash2"
    fused_norm: bool = True
    fused_elementwise: bool = True
    gathered_logits: bool = False
    all_reduced: bool = False
    wire_bytes: int | None = None
    backward_reductions: int = 2
    overlap: bool = True
    aligned_gather: bool = False
    overlap_tp: bool = False
    fused_wgrad: bool = False
    overlap_transfers: bool = True
    paired_transfers: bool = True
    scatter_transfers: bool = False
    awaited_launches: bool = False
    seconds: float | None = None
    memory_gib: float | None = None
    fits: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        if self.fits and self.seconds is None:
            raise ValueError(f"a run that fits in memory has no step time: {self}")

    @property
    def expressible(self) -> bool:
        """Return whether a plan can describe the run: its tensor parallelism stays inside a node."""
        return self.tp <= self.gpus_per_node

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def model(self) -> ModelSpec:
        return ModelSpec(
            self.group,
            self.layers,
            self.hidden,
            self.heads,
            self.vocab,
            ffn=self.ffn or 4 * self.hidden,
            kv_heads=self.kv_heads or self.heads,
            swiglu=self.swiglu,
            rmsnorm=self.rmsnorm,
            rope=self.rope,
            tied=self.tied,
            bias=self.bias,
            dropout=self.dropout,
            max_positions=self.sequence,
        )

    @property
    def batch(self) -> Batch:
        return Batch(self.global_size, self.micro_size, self.sequence).split(self.cp)


def read(names: list[str] | None = None) -> list[Run]:
    """Return all runs of the sets `names` (None: all sets)."""
    sets = yaml.safe_load((DATA / "sets.yaml").read_text())
    types, runs = get_type_hints(Run), []
    for name in names or sets:
        with (DATA / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                values = sets[name] | {k: v for k, v in row.items() if v != ""}
                runs.append(Run(set=name, **{k: _parse(types[k], v) for k, v in values.items()}))
    return runs


@dataclass(frozen=True)
class LeftOut:
    """A run predicted with constants fitted without its set, or without its generation of GPUs.
    `left`: set or generation; `ratio`: predicted over measured seconds."""

    left: str
    name: str
    set: str
    ratio: float


def read_left_out() -> list[LeftOut]:
    """Return the rows of left_out.csv, which published_fit.py writes."""
    with (DATA / "left_out.csv").open() as file:
        return [LeftOut(r["left"], r["name"], r["set"], float(r["ratio"])) for r in csv.DictReader(file)]


def _parse(type_: Any, value: Any) -> Any:
    if not isinstance(value, str) or type_ is str:
        return value
    if type_ is bool:
        return value == "1"
    return int(value) if type_ in (int, int | None) else float(value)


def gpu(name: str) -> Gpu:
    """Return the GPU kind `name` of holmes_hpc/fabric/gpu_kinds.yaml."""
    return next(g for g in GPUS if name.startswith(g.name))


def generation(run: Run) -> str:
    """Return the architecture of a run's GPUs."""
    return next(name for start, name in GENERATIONS.items() if run.gpu.startswith(start))


def layout(run: Run, costs: Costs) -> Layout:
    """Return the planner's layout of a run: nodes of one fabric, stages in sequence."""
    per_node = min(run.gpus_per_node, run.gpus)
    nodes = run.gpus // per_node
    rdma = None if run.nic == "ethernet" else run.gbps
    fabric = Pool(
        "published",
        NicType(run.nic),
        "p",
        nodes,
        per_node,
        run.gbps if rdma is None else 25.0,
        gpu(run.gpu),
        rdma_gbps=rdma,
    )
    parallel = Parallel.uniform(
        run.tp,
        run.pp,
        run.dp * run.cp,
        virtual_stages=run.chunks,
        sequence_parallel=run.sequence_parallel and run.tp > 1,
        distributed_optimizer=run.sharding != "none",
    )
    schedule = Schedule(
        "interleaved" if run.chunks > 1 else "1f1b",
        in_flight(run.pp, run.batch.micro_batches(run.dp * run.cp), run.chunks),
    )
    component = Component("p", "", "published", nodes, per_node, tuple(range(run.pp)))
    ranks = run.dp * run.cp
    return Layout(
        run.model,
        run.batch,
        parallel,
        run.recompute,
        schedule,
        (component,),
        Site("published", (fabric,)),
        costs,
        bucket_bytes=max(40_000_000, 1_000_000 * ranks) * run.gradient_bytes,  # Megatron-Core's default
    )


def layers(run: Run, plan_layout: Layout) -> np.ndarray:
    """Return the layers of each stage and chunk, (1, S, C)."""
    return (
        chunk_layers([int(n) for n in run.stages.split("+")], run.chunks) if run.stages else uniform_layers(plan_layout)
    )


def software(run: Run) -> Software:
    attention = {"flash2": "flash", "torch": "unfused"}.get(run.attention, run.attention)
    return Software(
        attention=attention,
        fused_norm=run.fused_norm,
        fused_elementwise=run.fused_elementwise,
        backward_reductions=run.backward_reductions,
        gathered_logits=run.gathered_logits,
        all_reduced=run.all_reduced,
        wire_bytes=run.wire_bytes,
        overlap=run.overlap,
        aligned_gather=run.aligned_gather,
        overlap_tp=run.overlap_tp,
        fused_wgrad=run.fused_wgrad,
        fp8=run.fp8,
        recompute_layers=run.recompute_layers,
        overlap_transfers=run.overlap_transfers,
        paired_transfers=run.paired_transfers,
        scatter_transfers=run.scatter_transfers,
        awaited_launches=run.awaited_launches,
        sharding=run.sharding,
    )


def costs(run: Run, stack: Stack = STACK) -> Costs:
    """Return the costs with the run's precision and software."""
    return Costs(
        dtype=run.dtype, grad_dtype={2: "bf16", 4: "fp32"}[run.gradient_bytes], software=software(run), stack=stack
    )


def predicted_s(run: Run, stack: Stack = STACK, profile: bool = False) -> float:
    """Return the predicted step time in seconds; `profile`: from the layer profile of the run's model and GPU."""
    run_costs = replace(costs(run, stack), calibration=_profile(run)) if profile else costs(run, stack)
    run_layout = layout(run, run_costs)
    return float(step_s(run_layout, layers(run, run_layout))[0])


def has_profile(run: Run) -> bool:
    """Return whether a layer profile of the run's model and GPU exists."""
    return run.set == "sailor" and run.group == "OPT-350"


@cache
def _profile(run: Run) -> Calibration:
    return from_csv((DATA / "sailor_layers.csv").read_text(), run.model, run.batch)
