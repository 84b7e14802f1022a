"""What `holmes calibrate` measured on real nodes: the record that it writes and the planner reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from holmes_hpc.errors import ConfigError, HolmesError, nearest
from holmes_hpc.planning.cost.hardware import Link

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

    part: str
    hidden: int
    tokens: int
    tp: int
    flops: float
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if self.part not in ("layer", "embedding", "head"):
            raise ConfigError(f"unknown part {self.part!r}", where="calibration.parts",
                              hint=nearest(str(self.part), ("layer", "embedding", "head")))
        if not (self.forward_s >= 0 and self.backward_s >= 0 and self.flops > 0):
            raise ConfigError(f"{self.part}: {self.forward_s} s forward, {self.backward_s} s backward for {self.flops}"
                              " FLOPs", where="calibration.parts", hint="make it again with `holmes calibrate`")


@dataclass(frozen=True)
class Calibration:
    """`device`: the GPU's name, or cpu. `pace_layer_ms`: layers waited that long. `links`: ib, roce, ethernet, local
    for messages, and `ib.reduce_scatter`, `ib.all_gather` and so on for the collectives over them. `optimizer_s`:
    seconds per parameter that a rank updates. `pass_s`: seconds of every pass of a stage that belong to none of its
    parts; `step_s`: of every step."""

    device: str = ""
    pace_layer_ms: float | None = None
    parts: tuple[Measured, ...] = ()
    links: Mapping[str, Link] = field(default_factory=dict)
    optimizer_s: float | None = None
    pass_s: float = 0.0
    step_s: float = 0.0
    dtype: str | None = None
    made: str = ""  # when and where, for people

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """From plain data (a file's content); unknown keys and links are named."""
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                raise ConfigError(f"unknown key {key!r}", where="calibration", hint=nearest(str(key), known))
        try:
            links = {str(k): Link(**v) for k, v in (data.get("links") or {}).items()}
            parts = tuple(Measured(**v) for v in data.get("parts") or ())
        except HolmesError:
            raise
        except (TypeError, AttributeError) as e:
            raise ConfigError(str(e), where="calibration", hint="make it again with `holmes calibrate`") from e
        for name in links:
            if name not in LINKS:
                raise ConfigError(f"unknown link {name!r}", where="calibration.links", hint=nearest(name, LINKS))
        return cls(**{**data, "links": links, "parts": parts})

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
