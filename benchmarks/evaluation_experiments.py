"""Regimes, systems and environments of the evaluation, and the experiments of each of its parts.

Three regimes have targets, fixed beforehand: paper-like, light, heavy. They differ by transfer ratio: the one-way
transfer time of one micro-batch's activations over Ethernet, divided by a stage's compute time for it (forward and
backward). Within a regime all systems have the same TP 1, PP 2 (3 on three fabrics), DP, batch, emulated layer time and
nodes, and 32 micro-batches per pipeline. The planner chooses virtual stages, and whether the optimizer is sharded, for
all of them. Three regimes have no target: 12 micro-batches (also the demo's), 6, and no
emulated compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holmes_hpc.testbed.topology import read

MICRO_BATCHES, STEPS, REPEATS, PAIRS, PACE_MS = 32, 3, 3, 10, 9.0
LAYERS, SEQUENCE, ETHERNET_MBIT = 18, 16, read("evaluation").ethernet_mbit
LAYOUT = ("plan.tp=1", "plan.recompute=none")
COMMON = (
    f"batch.sequence_length={SEQUENCE}",
    f"model.max_positions={SEQUENCE}",
    f"model.layers={LAYERS}",
    "model.heads=2",
    "model.kv_heads=2",
    "model.swiglu=false",
    "model.vocab=128",
    f"train.steps={STEPS}",
    "slurm.exclusive=true",
    "data=synthetic",
)
EMULATED = f"emulated compute (except unpaced): {PACE_MS:g} ms per layer forward, twice that backward"

# Regime -> the least throughput of hybrid, as a share of the mean of InfiniBand and RoCE and as a multiple of
# Megatron-LM with its best options. In heavy, Ethernet reaches at most half of InfiniBand's throughput.
TARGETS = {"paper-like": (0.98, 1.4), "light": (0.99, None), "heavy": (None, 1.7)}
PAIRED = ("paper-like", 4)  # (regime, nodes) with ten pairs
DEMO = "paper-like-12"  # the regime of `make demo`
NOT_SLOWER = 0.98  # least lower bound of the 95% interval of ten pairs' ratios, in every environment


@dataclass(frozen=True)
class Regime:
    """The settings that decide the amount of communication.

    `hidden`: width of the model; `micro_size`: sequences per micro-batch; `micro_batches`: per pipeline; `pace_ms`:
    emulated forward time of a layer in ms, None for the real time."""

    name: str
    hidden: int
    micro_size: int
    micro_batches: int = MICRO_BATCHES
    pace_ms: float | None = PACE_MS

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            f"model.hidden={self.hidden}",
            f"model.ffn={4 * self.hidden}",
            f"model.name={self.name}",
            f"train.pace_layer_ms={self.pace_ms or 'null'}",
        )


REGIMES = {
    r.name: r
    for r in (
        Regime("paper-like", 48, 11),
        Regime("light", 24, 5),
        Regime("heavy", 60, 18),
        Regime("paper-like-12", 48, 11, micro_batches=12),
        Regime("paper-like-6", 48, 11, micro_batches=6),
        Regime("unpaced", 48, 11, pace_ms=None),
    )
}
# Overlap, and what the planner predicts to be faster: 1F1B or interleaved, the optimizer sharded or not.
BASELINE = "Megatron-LM, best options"
# Reductions inside each fabric over RDMA, then across: Megatron-Core's num_distributed_optimizer_instances.
HIERARCHICAL = "hierarchical data parallel"
SYSTEMS: dict[str, tuple[str, ...]] = {
    "holmes": (),
    "Megatron-LM without overlap": (
        "plan.transport=single",
        "plan.partition=uniform",
        "plan.schedule=1f1b",
        "train.overlap_grad_reduce=false",
        "train.overlap_param_gather=false",
    ),
    BASELINE: ("plan.transport=single", "plan.partition=uniform"),
    HIERARCHICAL: ("plan.strategy=hierarchical-dp", "plan.partition=uniform", "plan.pp=null"),
    "proportional layers": ("plan.partition=proportional", "plan.schedule=1f1b"),
    "without running ahead": ("plan.schedule=1f1b",),
    "without uneven layers": ("plan.partition=uniform",),
    "without own transports": ("plan.transport=single",),
    "without overlap": ("train.overlap_grad_reduce=false", "train.overlap_param_gather=false"),
}


def nodes_override(environment: str, nodes: int) -> str:
    """Return the value of `plan.nodes` for an environment."""
    if environment == "three":
        return f"{{ib-a: {nodes // 3}, roce-a: {nodes // 3}, eth-a: {nodes // 3}}}"
    fabrics = {
        "IB": ["ib-a"],
        "RoCE": ["roce-a"],
        "Ethernet": ["eth-a"],
        "hybrid": ["ib-a", "roce-a"],
        "two IB": ["ib-a", "ib-b"],
    }[environment]
    return "{" + ", ".join(f"{fabric}: {nodes // len(fabrics)}" for fabric in fabrics) + "}"


@dataclass(frozen=True)
class Experiment:
    """One setting of the evaluation; its runs are named after it and their repeat."""

    regime: str
    environment: str
    nodes: int
    system: str

    @property
    def stages(self) -> int:
        return 3 if self.environment == "three" else 2

    @property
    def micro_size(self) -> int:
        """Return the sequences per micro-batch: fewer with 3 stages, for the same transfer ratio."""
        return round(REGIMES[self.regime].micro_size * 2 / self.stages)

    @property
    def overrides(self) -> list[str]:
        mixed = self.environment in ("hybrid", "two IB", "three")
        regime = REGIMES[self.regime]
        batch = regime.micro_batches * self.micro_size * self.nodes // self.stages
        megatron_schedule = "1f1b" if self.regime == "heavy" else "interleaved"  # the faster one, by prediction
        layout = (f"plan.pp={self.stages}", f"plan.strategy={'pipeline' if mixed else 'one-fabric'}", *LAYOUT)
        return [
            *COMMON,
            *regime.overrides,
            f"batch.micro_size={self.micro_size}",
            f"batch.global_size={batch}",
            f"plan.nodes={nodes_override(self.environment, self.nodes)}",
            *(layout if self.system != FREE else ()),
            *SYSTEMS.get(self.system, ()),
            *((f"plan.schedule={megatron_schedule}",) if self.system == HIERARCHICAL else ()),
        ]

    @property
    def transfer_ratio(self) -> float:
        """Return the transfer ratio of even stages, with 4.4% for headers."""
        regime = REGIMES[self.regime]
        sent_bytes = 1.044 * 4 * regime.hidden * SEQUENCE * self.micro_size
        return sent_bytes * 8 / (ETHERNET_MBIT * 1e6) / (3 * (regime.pace_ms or np.nan) / 1000 * LAYERS / self.stages)

    def run_name(self, repeat: int) -> str:
        fields = (self.regime, self.environment, str(self.nodes), self.system, str(repeat))
        return "-".join(fields).lower().replace("'", "").replace(",", "").replace(" ", "-")


FREE = "the planner's free choice"  # only nodes, batch and layer time are fixed
ENVIRONMENTS = ("hybrid", "IB", "RoCE", "Ethernet")
COMPARED = ("holmes", BASELINE)  # on one fabric they differ only by schedule: the faster is the reference
MIXED = ("holmes", "proportional layers", BASELINE, HIERARCHICAL)  # in environments whose stages can differ


def environments_at(regime: str, nodes: int) -> Iterator[Experiment]:
    """Yield all environments at one regime and number of nodes; hybrid also has the paper's layer partition."""
    for environment in ENVIRONMENTS:
        for system in COMPARED if environment != "hybrid" else MIXED:
            yield Experiment(regime, environment, nodes, system)


def parts() -> dict[str, list[tuple[int, Experiment]]]:
    """Return the (repeat, experiment) pairs of each part in run order: repeat by repeat."""
    headline = [*environments_at("paper-like", 4), *environments_at("paper-like", 8)]
    pairs = [
        Experiment(PAIRED[0], environment, PAIRED[1], system) for environment in ENVIRONMENTS for system in COMPARED
    ]
    settings = (("heavy", 4), ("light", 4), ("light", 8), ("paper-like", 6), ("light", 6))
    candidates = [c for setting in settings for c in environments_at(*setting)]
    targets = [c for c in candidates if c.environment != "Ethernet" or c.regime == "heavy"]  # experiments with a target
    targets += [Experiment(regime, "hybrid", nodes, FREE) for regime in ("paper-like", "light") for nodes in (4, 6, 8)]
    secondary = [
        Experiment("paper-like", where, nodes, system)
        for where, nodes in (("two IB", 4), ("two IB", 8), ("three", 6))
        for system in MIXED
    ]
    secondary += [c for c in candidates if c not in targets]
    secondary += [Experiment("paper-like", where, 4, "proportional layers") for where in ENVIRONMENTS[1:]]
    secondary += environments_at(DEMO, 4)
    for nodes in (4, 8):
        secondary += [
            Experiment("paper-like", "hybrid", nodes, system)
            for system in ("Megatron-LM without overlap", *(s for s in SYSTEMS if s.startswith("without")))
        ]
    without_target = [c for regime in ("paper-like-6", "unpaced") for c in environments_at(regime, 4)]
    demo = [Experiment(DEMO, where, 4, "holmes") for where in ENVIRONMENTS[:3]] + [
        Experiment(DEMO, "hybrid", 4, COMPARED[1])
    ]
    four_nodes = [experiment for regime in (*TARGETS, DEMO) for experiment in environments_at(regime, 4)]
    named_parts = {
        "headline": _repeat(headline, REPEATS),
        "pairs": _repeat(pairs, PAIRS),
        "demo": _repeat(demo, 1),
        "four-nodes": _repeat(four_nodes, REPEATS),
    }
    remaining = [
        *_repeat(targets, REPEATS),
        *named_parts["pairs"],
        *_repeat(secondary, REPEATS),
        *_repeat(without_target, 1),
    ]
    return {**named_parts, "full": list(dict.fromkeys([*named_parts["headline"], *remaining]))}


def _repeat(experiments: list[Experiment], repeats: int) -> list[tuple[int, Experiment]]:
    return [(repeat, experiment) for repeat in range(repeats) for experiment in experiments]
