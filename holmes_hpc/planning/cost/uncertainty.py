"""How far a prediction may be off: what it was off, nine times of ten, on published runs like it.

The table (uncertainty.yaml) is made by benchmarks/published_spread.py: measured over predicted step time, its 5th and
95th percentile, by what told most of the errors apart: width of tensor parallelism, and whether attention is fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from holmes_hpc.planning.cost.kernels import Kind, kind
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.records.files import read_yaml
from holmes_hpc.schema import Checked, key, make

# A kind whose shares are supposed, or that has no table: known kinds' shares lie between 0.49 and 0.86.
SUPPOSED, UNKNOWN = 1.15, 1.35


@dataclass(frozen=True)
class Spread(Checked, where="uncertainty"):
    """Measured over predicted seconds of nine of ten runs of a class: TP up to `tp`, attention fused or not."""

    tp: Annotated[int, key("tensor parallel, at most", ge=1)]
    flash: bool
    low: Annotated[float, key("5th percentile", gt=0)]
    high: Annotated[float, key("95th percentile", gt=0)]
    rows: Annotated[int, key("runs that it was seen on", ge=1)]


@cache
def spreads() -> tuple[Spread, ...]:
    """The table's rows, narrowest TP first."""
    path = Path(__file__).with_name("uncertainty.yaml")
    return tuple(make(Spread, row, f"{path.name}: classes") for row in read_yaml(path)["classes"])


def spread(tp: int, flash: bool) -> Spread:
    """The class of a run; beyond the widest TP of the table, the last."""
    like = [s for s in spreads() if s.flash == flash]
    return next((s for s in like if tp <= s.tp), like[-1])


def widened(table: Kind) -> float:
    """How much wider an interval is for a GPU kind whose figures were not all measured."""
    return UNKNOWN if not table.known else SUPPOSED if "S" in table.source.split() else 1.0


def interval_s(layout: Layout, seconds: float) -> tuple[float, float] | None:
    """(low, high) seconds of a step predicted to take `seconds`; None where computing was measured or waits, since
    published runs say nothing of that."""
    if not all(layout.costs.modelled(layout.fabric(c)) for c in layout.components):
        return None
    gpus = {layout.fabric(c).gpu for c in layout.components}
    found = spread(layout.parallel.tp_of(0), all(layout.costs.software_on(gpu).flash for gpu in gpus))
    wider = max(widened(kind(gpu)) for gpu in gpus)
    return seconds * found.low / wider, seconds * found.high * wider
