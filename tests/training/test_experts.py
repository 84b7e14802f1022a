"""Mixtures of experts: losses, gradient norms and checkpoints are equal in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spawn

from holmes_hpc.config.model import Experts

MODEL = replace(spawn.MODEL, layers=4, experts=Experts(4, top_k=2, ffn=32, balance=0.01))
TRAIN = {"steps": 4, "lr": 1e-3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 1": {"dp": 2},
    "EP 2": {"dp": 2, "ep": 2},
    "PP 2 x EP 2": {"pp": 2, "dp": 2, "ep": 2},
    "PP 2 x EP 2, eager 1F1B": {"pp": 2, "dp": 2, "ep": 2, "schedule": "ahead", "in_flight": [4, 2]},
    "TP 2 x EP 2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "TP 2 x EP 1": {"tp": 2, "sequence_parallel": True},
}


def train(directory: Path, layout: dict[str, Any], **settings: Any) -> spawn.FinishedRun:
    ended = spawn.train(directory, spawn.plan(model=MODEL, **layout), {"train": {**TRAIN, **settings}})
    assert set(ended.codes) == {0}, ended.output
    return ended


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    return train(tmp_path_factory.mktemp("one_process"), {})


@pytest.mark.integration
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_have_the_losses_and_norms_of_one_process(
    name: str, one_process: spawn.FinishedRun, tmp_path: Path
) -> None:
    ended = train(tmp_path / "run", LAYOUTS[name])
    print([a / b - 1 for a, b in zip(ended.column("loss"), one_process.column("loss"), strict=True)])
    print([a / b - 1 for a, b in zip(ended.column("grad_norm"), one_process.column("grad_norm"), strict=True)])
    assert ended.column("loss") == pytest.approx(one_process.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(one_process.column("grad_norm"), rel=1e-4)
