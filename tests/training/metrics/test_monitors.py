"""The monitors on rank 0."""

from __future__ import annotations

import torch

from holmes_hpc.records.metrics import PARTS
from holmes_hpc.training.metrics.metrics_line import rank_row
from holmes_hpc.training.metrics.monitors import Monitors
from holmes_hpc.training.rank.stragglers import Stragglers


def test_a_node_is_slow_if_others_wait_for_it_but_not_if_its_experts_have_more_tokens() -> None:
    monitors = Monitors.__new__(Monitors)
    monitors.one_host, monitors._exporter = True, None
    monitors._stragglers = Stragglers([[0, 1]], ["a", "b"], every=1)
    parts = {**dict.fromkeys(PARTS, 0.1), "compute_s": 1.0}
    rows = torch.stack([rank_row(0, 0, 1, {**parts, "expert_s": s}, (0,) * 7, 1) for s in (0.0, 0.4)]).numpy()
    balanced, unbalanced = (list(monitors.add(rows, {"expert_imbalance": i}, True)) for i in (1.05, 1.4))
    assert "node a: rank 0 computes 1.67 times as long as the others" in str(balanced[0])
    assert unbalanced == []
