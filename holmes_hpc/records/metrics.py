"""The fields of metrics.jsonl, which has one line for each training step: units, meanings and digits.

training/metrics/metrics_line.py writes them, results/columns.py makes columns of them, docs/records.md lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DIGITS = 7  # of times and rates: finer than any clock involved

# The parts of a step's time in seconds; they add up to it. Key: field of `breakdown`.
BREAKDOWN = {
    "compute_s": "forward and backward passes",
    "pipeline_wait_s": "waiting for other stages between passes, and sending to them",
    "fill_drain_s": "waiting before the first pass and after the last one, while the pipeline fills and drains",
    "grad_sync_s": "reducing gradients",
    "param_sync_s": "gathering parameters",
    "optimizer_s": "the optimizer's own work",
    "other_s": "everything else",
}
PARTS = tuple(BREAKDOWN)
_LONG = {"grad": "gradient", "param": "parameter", "fill": "fill and"}  # in display names
PART_NAMES = {part: " ".join(_LONG.get(word, word) for word in part[: -len("_s")].split("_")) for part in PARTS}
DIRECTIONS = ("tx", "rx")  # of traffic: sent, received


@dataclass(frozen=True)
class Field:
    """A field of metrics.jsonl. `unit`: empty if it has none; `always`: whether training writes it in every line."""

    unit: str
    meaning: str
    always: bool = True


FIELDS: dict[str, Field] = {
    "step": Field("", "step number"),
    "attempt": Field("", "number of the attempt that ran it, from 1"),
    "time": Field("Unix s", "end of the step, to the millisecond"),
    "step_time_s": Field("s", "wall time"),
    "loss": Field("nats a token", "mean over the batch"),
    "validation_loss": Field("nats a token", "on the validation split, if evaluated", always=False),
    "grad_norm": Field("", "before clipping"),
    "learning_rate": Field("", "of this step"),
    "tokens_per_s": Field("tokens/s", "over all ranks"),
    "samples_per_s": Field("samples/s", "over all ranks"),
    "model_tflops_per_gpu": Field("TFLOP/s", "model FLOPs only"),
    "hardware_tflops_per_gpu": Field("TFLOP/s", "with recomputation"),
    "breakdown": Field(
        "s", f"a list with one entry per pipeline stage: {{{', '.join(PARTS)}}}, means over the stage's ranks"
    ),
    "share_of_limit": Field(
        "", "throughput over that of a step in which no rank ever waits: mean `compute_s` by speed over `step_time_s`"
    ),
    "nic_bytes": Field("bytes", "{fabric or ethernet: {tx, rx}}: traffic of all nodes' NICs during the step"),
    "fabric_bytes": Field(
        "bytes", "{sending fabric: {receiving fabric: sent}}: payload of TCP between fabrics", always=False
    ),
    "peak_memory_bytes": Field("bytes", "a list with the peak so far of each rank"),
    "skipped": Field("", "true: the optimizer skipped the step, because its gradients overflowed", always=False),
    "pause_before_s": Field("s", "pause since the previous step, for saving or validation", always=False),
}
_ROUNDED = frozenset(name for name, field in FIELDS.items() if field.unit in ("s", "tokens/s", "samples/s", "TFLOP/s"))


def rounded(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return `line` as metrics.jsonl records it: rates and durations with DIGITS significant digits, `time` rounded to
    milliseconds, other values unchanged. Recorded values are rounded only here."""
    return {name: _round_field(name, value) for name, value in line.items()}


def _round_field(name: str, value: Any) -> Any:
    if name == "time" and isinstance(value, float):
        return round(value, 3)
    return _round_digits(value) if name in _ROUNDED else value


def _round_digits(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _round_digits(part) for name, part in value.items()}
    return [_round_digits(part) for part in value] if isinstance(value, (list, tuple)) else value
