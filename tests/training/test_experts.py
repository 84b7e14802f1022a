"""Mixtures of experts: losses, gradient norms and checkpoints are equal in every layout."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import spawn
import thorough

from holmes_hpc.config.model import Experts
from holmes_hpc.errors import DataError
from holmes_hpc.training.checkpoint.checkpoint_directory import check_identity

MODEL = replace(spawn.MODEL, layers=4, experts=Experts(4, top_k=2, ffn=32, balance=0.01))
TRAIN = {"steps": 4, "lr": 1e-3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 1": {"dp": 2},
    "EP 2": {"dp": 2, "ep": 2},
    "PP 2 x EP 2": {"pp": 2, "dp": 2, "ep": 2},
    "PP 2 x EP 2, eager 1F1B": {"pp": 2, "dp": 2, "ep": 2, "schedule": "ahead", "in_flight": [4, 2]},
    "TP 2 x EP 2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "TP 2 x EP 1": {"tp": 2, "sequence_parallel": True},
    "PP 2 x EP 2, interleaved": {"pp": 2, "dp": 2, "ep": 2, "layers": [[1, 1], [1, 1]]},
    "EP 2 without overlap": {"dp": 2, "ep": 2},
    "EP 2 without distributed optimizer": {"dp": 2, "ep": 2, "distributed_optimizer": False},
    "EP 2 with full recomputation": {"dp": 2, "ep": 2, "recompute": "full"},
}


def train(directory: Path, layout: dict[str, Any], **settings: Any) -> spawn.FinishedRun:
    ended = spawn.train(directory, spawn.plan(model=MODEL, **layout), {"train": {**TRAIN, **settings}})
    assert set(ended.codes) == {0}, ended.output
    return ended


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    return train(tmp_path_factory.mktemp("one_process"), {})


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(LAYOUTS, *list(LAYOUTS)[:5]))
def test_experts_have_the_losses_and_norms_of_one_process(
    name: str, one_process: spawn.FinishedRun, tmp_path: Path
) -> None:
    overlap = "without overlap" not in name
    settings = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    ended = train(tmp_path / "run", LAYOUTS[name], **settings)
    assert ended.column("loss") == pytest.approx(one_process.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(one_process.column("grad_norm"), rel=1e-4)


@pytest.mark.integration
def test_a_checkpoint_with_experts_moves_between_layouts(one_process: spawn.FinishedRun, tmp_path: Path) -> None:
    """The checkpoint of EP 2 after two steps continues with the losses of the run without an interruption."""
    train(tmp_path / "saved", LAYOUTS["EP 2"], steps=2, checkpoint_interval=2, lr_decay_steps=4)
    saved = tmp_path / "saved" / "checkpoints" / "step-00000002"
    for name in ("EP 1", "PP 2 x EP 2"):
        plan = spawn.plan(model=MODEL, **LAYOUTS[name])
        ended = spawn.train(tmp_path / name, plan, {"train": TRAIN, "checkpoint": str(saved)})
        assert set(ended.codes) == {0}, ended.output
        assert ended.column("step") == [3, 4]
        assert ended.column("loss") == pytest.approx(one_process.column("loss")[2:], rel=1e-6)
        assert ended.column("grad_norm") == pytest.approx(one_process.column("grad_norm")[2:], rel=1e-5)


def test_a_dense_checkpoint_is_refused_by_a_model_with_experts() -> None:
    saved = {k: v for k, v in asdict(spawn.MODEL).items() if k != "experts"}  # as older versions saved it
    check_identity(saved, spawn.MODEL, "checkpoint")
    with pytest.raises(DataError, match=r"checkpoint has experts=\{'count': 0.*plan has experts=\{'count': 4"):
        check_identity(saved, replace(spawn.MODEL, experts=Experts(4)), "checkpoint")
