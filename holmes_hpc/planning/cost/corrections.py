"""What a site's own runs say of the planner's figures: a factor for each kind of GPU and of network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from holmes_hpc.schema import check, key


@dataclass(frozen=True)
class Corrections:
    """`compute`: how many times as long layers, embedding and head take on a kind of GPU. `rates`: how many times the
    rate a network reaches (ib, roce, ethernet). `notes`: what they were learned from, for a plan's assumptions."""

    compute: Annotated[Mapping[str, float], key("of seconds, by GPU kind", gt=0)] = field(default_factory=dict)
    rates: Annotated[Mapping[str, float], key("of rates, by network", gt=0)] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self, "corrections")


NONE = Corrections()
