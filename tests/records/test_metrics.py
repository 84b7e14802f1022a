"""The fields of a line of metrics.jsonl: documented, and rounded once, where they are recorded."""

from __future__ import annotations

from pathlib import Path

from holmes_hpc.records.metrics import BREAKDOWN, FIELDS, rounded
from holmes_hpc.records.schema import RUN_FIELDS

DOCUMENTED = (Path(__file__).resolve().parents[2] / "docs" / "records.md").read_text()


def test_every_field_of_a_line_is_in_the_documentation() -> None:
    for name, field in FIELDS.items():
        assert f"| `{name}` | {field.unit} | {field.meaning} |" in DOCUMENTED
    for name, meaning in BREAKDOWN.items():
        assert f"| `breakdown[stage].{name}` | s | {meaning} |" in DOCUMENTED


def test_every_field_of_run_yaml_is_in_the_documentation() -> None:
    for name, meaning in RUN_FIELDS.items():
        assert f"| `{name}` | {meaning} |" in DOCUMENTED


def test_rounding_again_changes_nothing_and_only_times_and_rates_are_rounded() -> None:
    third = 1 / 3
    line = {
        "step": 1,
        "step_time_s": third,
        "samples_per_s": 1e6 * third,
        "model_tflops_per_gpu": third / 1e9,
        "loss": third,
        "learning_rate": third,
        "breakdown": [{"compute_s": third}],
        "of_somebody_else_s": third,
        "pause_before_s": 2,
        "validation_loss": None,
    }
    once = rounded(line)
    assert rounded(once) == once
    assert once == {
        **line,
        "step_time_s": 0.3333333,
        "samples_per_s": 333333.3,
        "model_tflops_per_gpu": 3.333333e-10,
        "breakdown": [{"compute_s": 0.3333333}],
    }
