"""What the evaluation runs: regimes, systems, environments, and the cells of each of its parts.

Three regimes with targets, fixed beforehand: paper-like, light, heavy. The transfer ratio is the one-way transfer time
of one micro-batch's activations over Ethernet, over a stage's forward and backward computing for it. In each, every
system has the same TP 1, PP 2 (3 on three fabrics), DP, batch and pace on as many nodes; 32 micro-batches per pipeline.
Beside them, without a target: 12 (also the demo's) and 6 micro-batches, and no pacing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holmes_hpc.testbed.topology import read

MICRO_BATCHES, STEPS, REPEATS, PAIRS, PACE_MS = 32, 3, 3, 10, 9.0
LAYERS, SEQUENCE, ETHERNET_MBIT = 18, 16, read("evaluation").ethernet_mbit
LAYOUT = ("plan.tp=1", "plan.virtual_stages=1", "plan.recompute=none")
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
PACED = f"paced compute (but where it says unpaced): {PACE_MS:g} ms a layer forward, twice that backward"

# Regime -> at least what hybrid is to be of the mean of InfiniBand and RoCE, and over Megatron-LM with overlap: 1.4
# times, 1.7 in heavy, where Ethernet stands at half of InfiniBand or less.
TARGETS = {"paper-like": (0.98, 1.4), "light": (0.99, None), "heavy": (None, 1.7)}
PAIRED = ("paper-like", 4)  # where there are ten pairs
DEMO = "paper-like-12"  # the regime of `make demo`
NOT_SLOWER = 0.98  # in every environment: the lower end of the 95% interval of ten pairs' ratios


@dataclass(frozen=True)
class Regime:
    """How much communication there is: the model's width and the sequences of a micro-batch; micro-batches of a
    pipeline; milliseconds of a layer's forward pass, None where it takes what it takes."""

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
SYSTEMS: dict[str, tuple[str, ...]] = {
    "holmes": (),
    "Megatron-LM": (
        "plan.transport=single",
        "plan.partition=uniform",
        "plan.schedule=1f1b",
        "train.overlap_grad_reduce=false",
        "train.overlap_param_gather=false",
    ),
    "Megatron-LM, overlap": ("plan.transport=single", "plan.partition=uniform", "plan.schedule=1f1b"),
    "proportional layers": ("plan.partition=proportional", "plan.schedule=1f1b"),
    "without running ahead": ("plan.schedule=1f1b",),
    "without uneven layers": ("plan.partition=uniform",),
    "without own transports": ("plan.transport=single",),
    "without overlap": ("train.overlap_grad_reduce=false", "train.overlap_param_gather=false"),
}


def nodes_of(environment: str, nodes: int) -> str:
    """`plan.nodes` of an environment."""
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
class Cell:
    """One setting; a run of it is named after it and its repeat."""

    regime: str
    environment: str
    nodes: int
    system: str

    @property
    def stages(self) -> int:
        return 3 if self.environment == "three" else 2

    @property
    def micro_size(self) -> int:
        """The same transfer ratio with a third stage, which computes less."""
        return round(REGIMES[self.regime].micro_size * 2 / self.stages)

    @property
    def overrides(self) -> list[str]:
        mixed = self.environment in ("hybrid", "two IB", "three")
        regime = REGIMES[self.regime]
        batch = regime.micro_batches * self.micro_size * self.nodes // self.stages
        layout = (f"plan.pp={self.stages}", f"plan.strategy={'pipeline' if mixed else 'one-fabric'}", *LAYOUT)
        return [
            *COMMON,
            *regime.overrides,
            f"batch.micro_size={self.micro_size}",
            f"batch.global_size={batch}",
            f"plan.nodes={nodes_of(self.environment, self.nodes)}",
            *(layout if self.system != FREE else ()),
            *SYSTEMS.get(self.system, ()),
        ]

    @property
    def hop_ratio(self) -> float:
        """Of even stages; 4% of headers."""
        regime = REGIMES[self.regime]
        sent = 1.044 * 4 * regime.hidden * SEQUENCE * self.micro_size
        return sent * 8 / (ETHERNET_MBIT * 1e6) / (3 * (regime.pace_ms or np.nan) / 1000 * LAYERS / self.stages)

    def run_name(self, repeat: int) -> str:
        words = (self.regime, self.environment, str(self.nodes), self.system, str(repeat))
        return "-".join(words).lower().replace("'", "").replace(",", "").replace(" ", "-")


FREE = "the planner's free choice"  # of all but nodes, batch and pace
ENVIRONMENTS = ("hybrid", "IB", "RoCE", "Ethernet")
BOTH = ("holmes", "Megatron-LM, overlap")  # on one fabric they differ by the schedule: the faster one is compared with
MIXED = ("holmes", "proportional layers", "Megatron-LM, overlap")  # where stages can differ


def grid(regime: str, nodes: int) -> Iterator[Cell]:
    """The environments at one regime and number of nodes. The paper's rule is beside us where stages can differ."""
    for environment in ENVIRONMENTS:
        for system in BOTH if environment != "hybrid" else MIXED:
            yield Cell(regime, environment, nodes, system)


def parts() -> dict[str, list[tuple[int, Cell]]]:
    """Part -> its (repeat, cell), in the order in which they are run: repeat by repeat."""
    headline = [*grid("paper-like", 4), *grid("paper-like", 8)]
    pairs = [Cell(PAIRED[0], environment, PAIRED[1], system) for environment in ENVIRONMENTS for system in BOTH]
    settings = (("heavy", 4), ("light", 4), ("light", 8), ("paper-like", 6), ("light", 6))
    wanted = [c for at in settings for c in grid(*at)]
    targets = [c for c in wanted if c.environment != "Ethernet" or c.regime == "heavy"]  # what a target speaks of
    targets += [Cell(regime, "hybrid", nodes, FREE) for regime in ("paper-like", "light") for nodes in (4, 6, 8)]
    others = [
        Cell("paper-like", where, nodes, system)
        for where, nodes in (("two IB", 4), ("two IB", 8), ("three", 6))
        for system in MIXED
    ]
    others += [c for c in wanted if c not in targets]
    others += [Cell("paper-like", where, 4, "proportional layers") for where in ENVIRONMENTS[1:]]
    others += grid(DEMO, 4)
    for nodes in (4, 8):
        others += [
            Cell("paper-like", "hybrid", nodes, system)
            for system in ("Megatron-LM", *(s for s in SYSTEMS if s.startswith("without")))
        ]
    beside = [c for regime in ("paper-like-6", "unpaced") for c in grid(regime, 4)]
    demo = [Cell(DEMO, where, 4, "holmes") for where in ENVIRONMENTS[:3]] + [Cell(DEMO, "hybrid", 4, BOTH[1])]
    four_nodes = [cell for regime in (*TARGETS, DEMO) for cell in grid(regime, 4)]
    made = {
        "headline": _repeated(headline, REPEATS),
        "pairs": _repeated(pairs, PAIRS),
        "demo": _repeated(demo, 2),
        "four-nodes": _repeated(four_nodes, REPEATS),
    }
    rest = [*_repeated(targets, REPEATS), *made["pairs"], *_repeated(others, REPEATS), *_repeated(beside, 1)]
    return {**made, "full": list(dict.fromkeys([*made["headline"], *rest]))}


def _repeated(cells: list[Cell], repeats: int) -> list[tuple[int, Cell]]:
    return [(repeat, cell) for repeat in range(repeats) for cell in cells]
