"""The parts that a plan is made of: its schedule, components and stages, what was predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from holmes_hpc.config.plan_options import SCHEDULES
from holmes_hpc.errors import PlanError
from holmes_hpc.schema import Checked, check, key


@dataclass(frozen=True)
class Schedule:
    """`kind`: one of SCHEDULES. `in_flight`: per stage, the most micro-batches (chunk passes when interleaved) whose
    activations it holds."""

    kind: Annotated[str, key("who waits for what", one_of=SCHEDULES)]
    in_flight: tuple[int, ...]

    def __post_init__(self) -> None:
        check(self, "schedule", PlanError)
        if any(n < 1 for n in self.in_flight):
            raise PlanError(f"in_flight is {self.in_flight}", where="schedule", hint="every stage holds at least one")


@dataclass(frozen=True)
class Component:
    """One part of the hetjob: `nodes` of one fabric, which hold the pipeline `stages` (all of them if hierarchical).
    Partition, constraint and stages are filled in by the plan."""

    partition: str
    constraint: str
    fabric: str
    nodes: Annotated[int, key("of the fabric", ge=1)]
    gpus_per_node: Annotated[int, key("ranks of a node", ge=1)]
    stages: Annotated[tuple[int, ...], key("that it holds", ge=0)] = ()

    def __post_init__(self) -> None:
        check(self, f"component {self.fabric}", PlanError)

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: `layers` transformer layers, cut into `chunks` (one per virtual stage). `fabric` is filled in
    by the plan: the first one's where a hierarchical plan has it in several."""

    fabric: str = ""
    layers: Annotated[int, key("transformer layers", ge=0)] = 0
    chunks: Annotated[tuple[int, ...], key("layers of each virtual stage", ge=0)] = ()

    def __post_init__(self) -> None:
        check(self, "stages", PlanError)
        object.__setattr__(self, "chunks", self.chunks or (self.layers,))
        object.__setattr__(self, "layers", self.layers or sum(self.chunks))
        if sum(self.chunks) != self.layers:
            raise PlanError(
                f"chunks {self.chunks} do not make {self.layers} layers", where="stages", hint="correct them"
            )


@dataclass(frozen=True)
class Predicted(Checked, where="predicted", error=PlanError):
    """What a plan should do. Times in seconds; `nic_bytes_per_step`: fabric name or ``ethernet`` -> bytes that all
    nodes together send over such NICs in one step, payload only; `breakdown`: seconds of the step by part.
    `interval_s`: (low, high), between which nine of ten runs like it were; None where nothing is known of that."""

    step_time_s: float
    samples_per_s: float
    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    memory_bytes_per_gpu: tuple[int, ...]
    nic_bytes_per_step: dict[str, float]
    breakdown: dict[str, float]
    interval_s: tuple[float, float] | None = None
