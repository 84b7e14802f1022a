"""The measured timeline of a run: trace/rank-N.jsonl under each schedule."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import spawn

from holmes_hpc.planning.schedule.kinds import in_flight as megatrons
from holmes_hpc.planning.schedule.order import Order

pytestmark = pytest.mark.integration  # ranks as processes


@pytest.mark.parametrize(
    ("schedule", "layers", "in_flight"),
    [
        ("1f1b", [[3], [3]], (2, 1)),
        ("ahead", [[3], [3]], (4, 1)),
        ("interleaved", [[2, 1], [2, 1]], (5, 3)),
        ("ahead", [[2, 1], [2, 1]], (6, 4)),
    ],
)
@pytest.mark.integration
def test_a_trace_has_every_pass_in_the_order_of_its_schedule(
    tmp_path: Path, schedule: str, layers: list[list[int]], in_flight: tuple[int, ...]
) -> None:
    plan = spawn.plan(pp=2, layers=layers, schedule=schedule, in_flight=in_flight)
    ended = spawn.train(tmp_path, plan, {"train": {"steps": 3, "trace": True, "eval_interval": 2}})
    assert ended.codes == [0, 0]
    order = Order(schedule, 2, plan.micro_batches, len(layers[0]), in_flight)
    for rank in range(2):
        lines = [json.loads(text) for text in ended.run.trace_path(rank).read_text().splitlines()]
        assert {line["step"] for line in lines} == {1, 2, 3} and {line["stage"] for line in lines} == {rank}
        for step in (1, 2, 3):
            computed: list[dict[str, Any]] = [
                line for line in lines if line["step"] == step and line["kind"] in ("forward", "backward")
            ]
            assert [(c["kind"] == "forward", c["micro_batch"], c["chunk"]) for c in computed] == order.passes(rank)
            assert all(a["end_s"] <= b["start_s"] + 1e-6 for a, b in pairwise(computed))  # no two passes overlap
            peak = max(c["held"] for c in computed)
            assert peak == order.depths[rank]
            if schedule == "ahead" and rank == 0:  # more than Megatron's own schedule holds
                assert peak > megatrons(2, plan.micro_batches, len(layers[0]))[0]
        kinds = {line["kind"] for line in lines}
        if schedule == "ahead":
            assert {"wait_forward", "wait_backward"} <= kinds
            assert {"send_forward" if rank == 0 else "receive_forward"} <= kinds
        assert all(line["start_s"] <= line["end_s"] for line in lines)
