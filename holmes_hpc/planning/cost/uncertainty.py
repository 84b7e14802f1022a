"""The 90% interval of a predicted step time, and the reasons to widen it.

The interval comes from a table (uncertainty.yaml) that benchmarks/published_spread.py writes from published runs. Each
run was predicted with constants fitted to the other sets of runs, or to the runs on other generations of GPUs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated

from holmes_hpc.planning.cost.kernels import kind
from holmes_hpc.planning.cost.layout import Layout
from holmes_hpc.schema import Checked, key, make
from holmes_hpc.tables import read_table

# Factors by which the ends of the interval widen. On known kinds, matrix products reach 0.42 to 0.86 of the peak.
ASSUMED_KIND, UNLISTED_KIND, OTHER_SCALE, OTHER_SOFTWARE = 1.15, 1.35, 1.1, 1.1
LARGER = 2  # OTHER_SCALE applies above this multiple of the number of GPUs in the largest run


@dataclass(frozen=True)
class Spread(Checked, where="uncertainty"):
    """The 90% interval of measured over predicted seconds."""

    low: Annotated[float, key("5th percentile", gt=0, le=1)]
    high: Annotated[float, key("95th percentile", ge=1)]
    runs: Annotated[int, key("number of runs", ge=1)]


@dataclass(frozen=True)
class Uncertainty(Checked, where="uncertainty"):
    """The prediction errors of published runs that were left out of the fit of the constants. `sets`, `generations`: if
    a run's set, or its generation of GPUs, was left out. `attention`: by generation, its runs' attention kernels."""

    sets: Spread
    generations: Spread
    gpus: Annotated[int, key("GPUs of the largest run", ge=1)]
    attention: Mapping[str, tuple[str, ...]] = field(hash=False)


@cache
def measured() -> Uncertainty:
    return make(Uncertainty, read_table(__file__), "uncertainty.yaml")


def _reasons(layout: Layout) -> Iterator[tuple[float, str]]:
    """Yield (factor, cause) for each reason to widen the interval; factor 0: use the wider `generations`."""
    table = measured()
    for gpu in {layout.pool(c).gpu: None for c in layout.components}:
        figures, attention = kind(gpu), layout.costs.software_on(gpu).attention
        if not figures.known:
            yield UNLISTED_KIND, f"{gpu.name} has no kernel table"
        elif "S" in figures.source.split():
            yield ASSUMED_KIND, f"kernel figures of {gpu.name} are those of a similar GPU"
        if figures.generation not in table.attention:
            yield 0.0, f"no published run on {figures.generation or gpu.name} is known"
        elif attention not in table.attention[figures.generation]:
            yield OTHER_SOFTWARE, f"no published run on {figures.generation} with attention {attention} is known"
    if layout.parallel.world_size > LARGER * table.gpus:
        yield OTHER_SCALE, f"the largest published run had {table.gpus} GPUs"


def interval_s(layout: Layout, seconds: float) -> tuple[float, float] | None:
    """Return the (low, high) seconds of a step predicted to take `seconds`.
    None for measured or emulated compute, which published runs do not cover."""
    if not _is_covered(layout):
        return None
    factors = [factor for factor, _ in _reasons(layout)]
    spread = measured().generations if 0.0 in factors else measured().sets
    factor = max((f for f in factors if f), default=1.0)
    return seconds * spread.low / factor, seconds * spread.high * factor


def interval_notes(layout: Layout) -> list[str]:
    """Return a list with the line that names the reasons for a wider interval, or an empty list without reasons."""
    causes = dict.fromkeys(cause for _, cause in _reasons(layout)) if _is_covered(layout) else {}
    return [f"the 90% interval is wider: {'; '.join(causes)}"] if causes else []


def _is_covered(layout: Layout) -> bool:
    return all(layout.costs.is_modelled(layout.pool(c)) for c in layout.components)
