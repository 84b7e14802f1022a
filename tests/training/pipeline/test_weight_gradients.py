"""Weight gradients apart from the backward pass: results are those of 1F1B bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spawn
import thorough

BATCH = replace(spawn.BATCH, global_size=8)
STEPS = {"steps": 3}
LAYOUTS: dict[str, tuple[dict[str, Any], list[int], list[int], dict[str, Any]]] = {
    "two stages": ({"pp": 2, "dp": 2}, [3, 1], [2, 1], {}),
    "all at the end": ({"pp": 2}, [4, 2], [8, 8], {}),
    "three stages, uneven layers": ({"pp": 3, "layers": [[1], [3], [2]]}, [5, 3, 1], [0, 3, 1], {}),
    "tensor parallel": ({"pp": 2, "tp": 2}, [2, 1], [1, 2], {}),
    "bf16": ({"pp": 2, "dp": 2}, [3, 1], [2, 1], {"dtype": "bf16"}),
    "recomputation": ({"pp": 2, "recompute": "full"}, [3, 1], [2, 1], {}),
    "no overlap": ({"pp": 2, "dp": 2}, [3, 1], [2, 1], {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "unsharded": ({"pp": 2, "dp": 2, "distributed_optimizer": False}, [3, 1], [2, 1], {}),
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", thorough.all_but(LAYOUTS, "two stages", "three stages, uneven layers", "tensor parallel", "recomputation")
)
def test_zero_bubble_has_the_results_of_1f1b_bit_for_bit(name: str, tmp_path: Path) -> None:
    layout, in_flight, deferred, train = LAYOUTS[name]
    settings = {"train": {**STEPS, **train}}
    plain = spawn.train(tmp_path / "plain", spawn.plan(**layout, batch=BATCH), settings)
    final = [max(1, lag) for lag in deferred]
    lags = {"in_flight": in_flight, "deferred": deferred, "final": final}
    plan = spawn.plan(**layout, batch=BATCH, schedule="zero_bubble", **lags)
    split = spawn.train(tmp_path / "split", plan, settings)
    assert set(plain.codes) == set(split.codes) == {0}, split.output
    assert split.column("loss") == plain.column("loss") and split.column("grad_norm") == plain.column("grad_norm")
