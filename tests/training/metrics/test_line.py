"""A line of metrics has the fields that the record's schema names."""

from __future__ import annotations

import spawn

from holmes_hpc.records.metrics import FIELDS, PARTS
from holmes_hpc.training.metrics import line as metrics


def test_a_line_has_every_field_of_the_schema_and_no_other() -> None:
    plan = spawn.plan(dp=2)
    rows = [metrics.row(1.0, 1, 0.6, dict.fromkeys(PARTS, 0.1), (1, 2, 3, 4, 0), 100)] * 2
    line = {**metrics.line(plan, rows, 1, 0.0, {"grad_norm": 1.0, "learning_rate": 0.1}), "attempt": 1}
    assert set(line) == {name for name, field in FIELDS.items() if field.always}
    assert all(tuple(stage) == PARTS for stage in line["breakdown"])


def test_figures_are_not_rounded_before_they_are_recorded() -> None:
    seconds = 0.123456789123
    rows = [metrics.row(1.0, 1, seconds, dict.fromkeys(PARTS, seconds / 6), (0, 0, 0, 0, 0), 100)] * 2
    line = metrics.line(spawn.plan(dp=2), rows, 1, 0.0, {})
    assert line["step_time_s"] == seconds and line["breakdown"][0]["compute_s"] == seconds / 6
