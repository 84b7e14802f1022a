"""What `holmes calibrate` measured on real nodes: the record that it writes and the planner reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from holmes_hpc.errors import ConfigError, nearest
from holmes_hpc.planning.cost.hardware import Link
from holmes_hpc.schema import check, key, make

NETWORKS = ("local", "ib", "roce", "ethernet")
COLLECTIVES = ("reduce_scatter", "all_gather")
LINKS = (*NETWORKS, *(f"{network}.{what}" for network in NETWORKS for what in COLLECTIVES))


@dataclass(frozen=True)
class Measured:
    """Seconds of one part of a model for one micro-batch of `tokens` tokens, on one of `tp` ranks.

    `part`: layer, embedding or head. `flops`: the part's forward FLOPs (for the embedding: tokens * hidden), as
    cost/flops.py gives them for the whole micro-batch; times scale with it to other sizes. Backward: without
    recomputation.
    """

    part: Annotated[str, key("of a model", one_of=("layer", "embedding", "head"))]
    hidden: Annotated[int, key("width of the residual stream", ge=1)]
    tokens: Annotated[int, key("of a micro-batch", ge=1)]
    tp: Annotated[int, key("tensor parallel", ge=1)]
    flops: Annotated[float, key("forward, of the whole micro-batch", gt=0)]
    forward_s: Annotated[float, key("seconds of a forward pass", unit="s", ge=0)]
    backward_s: Annotated[float, key("seconds of a backward pass", unit="s", ge=0)]

    def __post_init__(self) -> None:
        check(self, "calibration.parts")


@dataclass(frozen=True)
class Calibration:
    """`device`: the GPU's name, or cpu. `pace_layer_ms`: layers waited that long. `links`: ib, roce, ethernet, local
    for messages, and `ib.reduce_scatter`, `ib.all_gather` and so on for the collectives over them. `optimizer_s`:
    seconds per parameter that a rank updates. `pass_s`: seconds of every pass of a stage that belong to none of its
    parts; `step_s`: of every step."""

    device: str = ""
    pace_layer_ms: Annotated[float | None, key("layers waited that long", unit="ms", gt=0)] = None
    parts: tuple[Measured, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)
    optimizer_s: Annotated[float | None, key("of one parameter", unit="s", ge=0)] = None
    pass_s: Annotated[float, key("of every pass", unit="s", ge=0)] = 0.0
    step_s: Annotated[float, key("of every step", unit="s", ge=0)] = 0.0
    dtype: Annotated[str | None, key("of weights", one_of=("fp32", "bf16", "fp16"))] = None
    made: str = ""  # when and where, for people

    def __post_init__(self) -> None:
        check(self, "calibration")
        for name in self.links:
            if name not in LINKS:
                raise ConfigError(f"unknown link {name!r}", where="calibration.links", hint=nearest(str(name), LINKS))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """From plain data (a file's content). ConfigError that names the key, its value and what is allowed."""
        return make(cls, data, "calibration")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, accepted back by :meth:`from_dict`."""
        return {**asdict(self), "links": {k: asdict(v) for k, v in self.links.items()},
                "parts": [asdict(p) for p in self.parts]}

    def part(self, part: str, hidden: int, tokens: int, tp: int) -> Measured | None:
        """The measurement of `part` nearest in size (hidden, then tokens, then TP); None if there is none."""
        of = [p for p in self.parts if p.part == part]
        return min(of, key=lambda p: (_apart(p.hidden, hidden), _apart(p.tokens, tokens), _apart(p.tp, tp)),
                   default=None)


def _apart(a: int, b: int) -> float:
    return max(a, b) / min(a, b)
