"""A metrics line from the rows of all ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import spawn
import torch

from holmes_hpc.config.model import Batch, Experts
from holmes_hpc.records.files import to_json
from holmes_hpc.records.metrics import FIELDS, PARTS, rounded
from holmes_hpc.training.metrics import metrics_line
from holmes_hpc.training.network.nic_bytes import sum_by_kind


def test_a_metrics_line_combines_the_rows_of_all_ranks() -> None:
    plan = spawn.plan(pp=2, dp=2)
    parts = {p: 0.1 for p in PARTS}
    rows = [
        metrics_line.rank_row(0, 0, 0.6, parts, (10, 20, 30, 40, 7, 0, 0), 100),
        metrics_line.rank_row(0, 0, 0.7, parts, (1, 2, 3, 4, 0, 0, 0), 200),
        metrics_line.rank_row(8.0, 4, 0.6, {**parts, "compute_s": 0.3}, (0, 0, 0, 0, 0, 0, 0), 300),
        metrics_line.rank_row(12.0, 4, 0.6, parts, (0, 0, 5, 6, 0, 0, 0), 400),
    ]
    matrix = torch.stack(rows).numpy()
    line = metrics_line.metrics_line(plan, matrix, 7, 123.0, {"grad_norm": 1.0}, [1.0, 3.0])
    assert (line["step"], line["time"], line["loss"], line["step_time_s"]) == (7, 123.0, 2.5, 0.6)
    assert line["samples_per_s"] == pytest.approx(8 / 0.6, rel=1e-4)
    assert line["tokens_per_s"] == pytest.approx(8 * 16 / 0.6, rel=1e-4)
    assert line["breakdown"][1]["compute_s"] == pytest.approx(0.2) and line["breakdown"][0]["compute_s"] == 0.1
    assert line["share_of_limit"] == pytest.approx((1 * 0.1 + 3 * 0.2) / 4 / 0.6)  # stage 1 is three times as fast
    assert line["nic_bytes"] == {
        "ethernet": {"tx": 11, "rx": 22},
        "ib-0": {"tx": 33, "rx": 44},
        "roce-1": {"tx": 5, "rx": 6},
    }
    assert line["peak_memory_bytes"] == [200, 400]
    assert metrics_line.part_by_rank(matrix, "compute_s") == pytest.approx([0.1, 0.1, 0.3, 0.1])
    of_ranks = metrics_line.rank_line(matrix, 7)
    assert of_ranks == {"step": 7, "compute_s": [0.1, 0.1, 0.3, 0.1], "peak_memory_bytes": [100, 200, 300, 400]}
    assert line["hardware_tflops_per_gpu"] == line["model_tflops_per_gpu"] > 0


def test_without_byte_counts_or_losses_the_line_has_none() -> None:
    plan = spawn.plan(dp=2)
    rows = [metrics_line.rank_row(0, 0, 1, dict.fromkeys(PARTS, 0.0), (0, 0, 0, 0, 0, 0, 0), 1)] * 2
    line = metrics_line.metrics_line(plan, torch.stack(rows).numpy(), 1, 0.0, {}, [1.0])
    assert line["nic_bytes"] == {} and math.isnan(line["loss"])
    assert sum_by_kind(plan, np.zeros((2, 5))) == {}


def test_a_line_has_every_field_of_the_schema_and_no_other() -> None:
    plan = spawn.plan(dp=2)
    rows = [metrics_line.rank_row(1.0, 1, 0.6, dict.fromkeys(PARTS, 0.1), (1, 2, 3, 4, 0, 0, 0), 100)] * 2
    line = {
        **metrics_line.metrics_line(
            plan, torch.stack(rows).numpy(), 1, 0.0, {"grad_norm": 1.0, "learning_rate": 0.1}, [1.0]
        ),
        "attempt": 1,
    }
    assert set(line) == {name for name, field in FIELDS.items() if field.always}
    assert all(tuple(stage) == PARTS for stage in line["breakdown"])


def test_recorded_numbers_are_not_rounded() -> None:
    seconds = 0.123456789123
    rows = [metrics_line.rank_row(1.0, 1, seconds, dict.fromkeys(PARTS, seconds / 6), (0, 0, 0, 0, 0, 0, 0), 100)] * 2
    line = metrics_line.metrics_line(spawn.plan(dp=2), torch.stack(rows).numpy(), 1, 0.0, {}, [1.0])
    assert line["step_time_s"] == seconds and line["breakdown"][0]["compute_s"] == seconds / 6


def test_a_line_does_not_grow_with_the_number_of_ranks() -> None:
    sizes = []
    for replicas in (2, 1024):
        plan = spawn.plan(pp=2, dp=replicas, batch=Batch(2 * replicas, 1, 16))
        row = metrics_line.rank_row(1.0, 1, 0.6, dict.fromkeys(PARTS, 0.1), (1e9, 2e9, 3e9, 4e9, 0, 0, 0), 10**10)
        rows = np.tile(row.numpy(), (plan.world_size, 1))
        sizes.append(len(to_json(rounded(metrics_line.metrics_line(plan, rows, 1, 0.0, {}, [1.0, 1.0])))))
    assert sizes[1] < sizes[0] + 100


def test_the_exchanges_of_experts_are_those_of_the_slowest_stage() -> None:
    plan = spawn.plan(pp=2, dp=2, model=replace(spawn.MODEL, experts=Experts(4)))
    parts = dict.fromkeys(PARTS, 0.1)
    seconds = (0.01, 0.02, 0.04, 0.05)
    rows = [metrics_line.rank_row(0, 0, 1, {**parts, "expert_s": s}, (0,) * 7, 1) for s in seconds]
    matrix = torch.stack(rows).numpy()
    assert metrics_line.metrics_line(plan, matrix, 1, 0.0, {}, [1.0, 1.0])["expert_s"] == pytest.approx(0.045)
    assert metrics_line.part_by_rank(matrix, "expert_s") == pytest.approx(seconds)
