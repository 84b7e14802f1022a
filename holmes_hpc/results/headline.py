"""The headline of a comparison: a sentence on hybrid against homogeneous clusters, and the values of a bar chart."""

from holmes_hpc.results.columns import has_value
from holmes_hpc.results.compare import Comparison, entries, labels
from holmes_hpc.results.tables import format_number

MAX_BARS = 12  # the table has the other cells


def headline(comparison: Comparison) -> list[str]:
    """Return a sentence that compares the fastest hybrid cell with the mean of InfiniBand and RoCE alone.

    It also has the speed-up over one transport for all groups on the same nodes, and the error of predicted step times.
    Empty unless a hybrid cell, an InfiniBand cell and a RoCE cell did the same work."""
    cells = dict(entries(comparison.cells))
    hybrid = next((cell for cell in cells.values() if has_value(cell["of_mean"])), None)
    if hybrid is None:
        return []
    claims = [f"{hybrid['of_mean']:.0%} of the mean of InfiniBand and RoCE alone"]
    base = cells.get(int(hybrid["baseline"])) if has_value(hybrid["baseline"]) else None
    if base is not None and base["transport"] == "single" and has_value(hybrid["speedup"]):
        claims.append(
            f"{format_number(hybrid['speedup'])} times plain Megatron-LM (one transport for all groups)"
            " on the same nodes"
        )
    errors = [float(cell["mape"]) for cell in cells.values() if has_value(cell["mape"])]
    accuracy = f" Step times were predicted within {max(errors):.1f}%." if errors else ""
    return [f"Hybrid ({hybrid['placement']}) is {' and '.join(claims)}.{accuracy}"]


def bars(comparison: Comparison) -> list[tuple[str, float]]:
    """Return (name, samples/s) of the first cells for a bar chart; empty if there are fewer than two cells."""
    cells = comparison.cells.head(MAX_BARS)
    return list(zip(labels(cells), cells["samples_per_s"].astype(float), strict=True)) if len(cells) > 1 else []
