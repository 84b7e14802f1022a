"""What a comparison says of the method: one sentence of hybrid against homogeneous clusters, and a chart of bars."""

from __future__ import annotations

from holmes_hpc.results.columns import known
from holmes_hpc.results.compare import Comparison, entries, labels
from holmes_hpc.results.tables import number

MOST_BARS = 12  # cells: more are in the table, not in a chart on a terminal


def headline(comparison: Comparison) -> list[str]:
    """What the fastest hybrid cell is of the mean of InfiniBand and RoCE alone and of one network for all on the same
    nodes, and how far its step time was predicted; empty where no cell has both fabrics alone beside it."""
    cells = dict(entries(comparison.cells))
    hybrid = next((cell for cell in cells.values() if known(cell["of_mean"])), None)
    if hybrid is None:
        return []
    said = [f"{hybrid['of_mean']:.0%} of the mean of InfiniBand and RoCE alone"]
    base = cells.get(int(hybrid["baseline"])) if known(hybrid["baseline"]) else None
    if base is not None and base["transport"] == "single" and known(hybrid["speedup"]):
        said.append(f"{number(hybrid['speedup'])} times plain Megatron-LM, with one network for all, on the same nodes")
    missed = [float(cell["mape"]) for cell in cells.values() if known(cell["mape"])]
    off = f" Step times were predicted within {max(missed):.1f}%." if missed else ""
    return [f"Hybrid ({hybrid['placement']}) is {' and '.join(said)}.{off}"]


def bars(comparison: Comparison) -> list[tuple[str, float]]:
    """(name, samples/s) of the fastest cells, for a chart of bars; empty for fewer than two."""
    cells = comparison.cells.head(MOST_BARS)
    return list(zip(labels(cells), cells["samples_per_s"].astype(float), strict=True)) if len(cells) > 1 else []
