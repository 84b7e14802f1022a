"""The parts of a plan: its schedule, components, stages and prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from holmes_hpc.config.model import ModelSpec
from holmes_hpc.config.plan_options import SCHEDULE_NAMES
from holmes_hpc.errors import Case, PlanError
from holmes_hpc.schema import Checked, check, key


@dataclass(frozen=True)
class Schedule(Checked, where="schedule", error=PlanError):
    """A pipeline schedule. `kind`: one of SCHEDULE_NAMES. The others have a number per stage. `in_flight`: the most
    micro-batches whose activations it holds (chunk passes if interleaved). Only with zero_bubble: `deferred`: the
    backward passes by which weight passes lag behind; `final`: the weight passes left for the end of the step."""

    kind: Annotated[str, key("name of the pipeline schedule", one_of=SCHEDULE_NAMES)]
    in_flight: tuple[int, ...]
    deferred: tuple[int, ...] = ()
    final: tuple[int, ...] = ()

    def _mistakes(self) -> Iterator[Case]:
        is_zero_bubble = self.kind == "zero_bubble"
        for name, numbers, least in (("deferred", self.deferred, 0), ("final", self.final, 1)):
            hint = f"zero_bubble needs at least {least} for every stage, other schedules no number"
            is_wrong = bool(numbers) != is_zero_bubble or any(n < least for n in numbers)
            yield is_wrong, f"{name} is {numbers}", hint
        too_few = any(n < 1 for n in self.in_flight)
        yield too_few, f"in_flight is {self.in_flight}", "give at least 1 for every stage"


@dataclass(frozen=True)
class Component(Checked, where="component {0.pool}", error=PlanError):
    """One component of the heterogeneous job: `nodes` nodes of one pool, which hold the pipeline `stages` (all stages
    in a hierarchical plan). :class:`Plan` fills in partition, constraint, fabric and stages."""

    partition: str
    constraint: str
    pool: Annotated[str, key("name of the pool")]
    nodes: Annotated[int, key("nodes of the pool", ge=1)]
    gpus_per_node: Annotated[int, key("ranks on each node", ge=1)]
    stages: Annotated[tuple[int, ...], key("stages of the component", ge=0)] = ()
    fabric: Annotated[str, key("fabric of the pool")] = ""

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: `layers` transformer layers, divided into `chunks` (one per virtual stage). :class:`Plan` fills
    in `pool` and `fabric`. If a hierarchical plan has the stage in several pools, they are those of the first one."""

    pool: str = ""
    layers: Annotated[int, key("transformer layers", ge=0)] = 0
    chunks: Annotated[tuple[int, ...], key("layers of each virtual stage", ge=0)] = ()
    fabric: str = ""

    def __post_init__(self) -> None:
        check(self, "stages", PlanError)
        object.__setattr__(self, "chunks", self.chunks or (self.layers,))
        object.__setattr__(self, "layers", self.layers or sum(self.chunks))
        problem = f"a stage has {self.layers} layers, but its chunks hold {' + '.join(map(str, self.chunks))}"
        PlanError.refuse("stages", (sum(self.chunks) != self.layers, problem, "correct `layers` or `chunks`"))


def lacks_layers(chunks: Sequence[Sequence[int]]) -> bool:
    """Return whether a chunk has no layer. With virtual stages, the first chunk may hold only the embedding, and the
    last one only the head. `chunks`: layers of each stage's chunks, (S, C)."""
    ends = {(0, 0), (len(chunks) - 1, len(chunks[-1]) - 1)} if len(chunks) and len(chunks[0]) > 1 else set()
    return any(n < 1 and (s, c) not in ends for s, stage in enumerate(chunks) for c, n in enumerate(stage))


@dataclass(frozen=True)
class Predicted(Checked, where="predicted", error=PlanError):
    """The predicted performance of a plan. Times in seconds. `nic_bytes_per_step`: {fabric name or ``ethernet``:
    payload bytes that all nodes together send over such NICs}. `breakdown`: seconds of the step by part, for the stage
    that computes longest. `interval_s`: the 90% interval (low, high) of the step time, if known. `share_of_limit`:
    ratio of the throughput to that of a step without waiting."""

    step_time_s: float
    samples_per_s: float
    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    memory_bytes_per_gpu: tuple[int, ...]
    nic_bytes_per_step: dict[str, float]
    breakdown: dict[str, float]
    interval_s: tuple[float, float] | None = None
    share_of_limit: float | None = None


def experts_and_cp_cases(model: ModelSpec, sizes: Any, used: Mapping[str, bool]) -> Iterator[Case]:
    """Yield an error case for each setting that experts or CP do not support. `sizes`: an object with `tp`, `ep`,
    `etp`, `cp` (None means 1), `ep_comm`, `cp_comm`. `used`: {feature that neither supports: is it used}."""
    count, ep, cp = model.experts.count, sizes.ep or 1, sizes.cp or 1
    yield ep > 1 and not count, f"EP is {ep}, the model has no experts", "use 1, or a model with experts"
    yield count % ep, f"EP {ep} does not divide {count} experts", f"use a divisor of {count}"
    etp, width = sizes.etp or 1, model.ffn_width
    yield etp > 1 and not count, f"ETP is {etp}, the model has no experts", "use 1, or a model with experts", "plan.etp"
    problem = f"ETP {etp} does not divide the experts' width of {width}"
    yield count and width % etp, problem, f"use a divisor of {width}", "plan.etp"
    problem = f"ETP {etp} splits experts, but plan.ep_comm={sizes.ep_comm} exchanges tokens for whole experts"
    yield etp > 1 and sizes.ep_comm != "allgather", problem, "use plan.ep_comm=allgather, or ETP 1", "plan.etp"
    for is_given, feature in ((count, "experts do"), (cp > 1, "context parallelism does")):
        for name, is_used in used.items():
            yield is_given and is_used, f"{feature} not support {name}", "use only one of them", "plan"
    yield cp > 1 and model.dropout, "context parallelism does not support dropout", "use 0", "model.dropout"
    if cp > 1 and sizes.cp_comm == "a2a":
        heads, parts = model.kv_heads, cp * (sizes.tp or 1)
        problem = f"all-to-all attention: TP x CP {parts} does not divide {heads} heads of keys and values"
        yield heads % parts, problem, "use ring", "plan.cp_comm"
