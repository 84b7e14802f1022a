"""Mixtures of experts: losses, gradient norms and checkpoints are equal in every layout."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spawn
import thorough

from holmes_hpc.config.model import Experts, ModelSpec
from holmes_hpc.errors import DataError
from holmes_hpc.training.checkpoint.checkpoint_directory import check_identity

MODEL = replace(spawn.MODEL, layers=4, experts=Experts(4, top_k=2, ffn=32, balance=0.01))
# loss-free balancing, groups of experts, shared experts, z-loss
BALANCED = replace(
    MODEL, experts=Experts(8, 2, 32, 0.0, "sigmoid", bias=0.01, groups=4, top_groups=2, z_loss=1e-3, shared=16)
)
FIRST_DENSE = replace(MODEL, experts=replace(MODEL.experts, first_dense=1))
PER_SEQUENCE = replace(MODEL, experts=replace(MODEL.experts, per_sequence=True))
PAIRS = replace(spawn.BATCH, micro_size=2)
TRAIN = {"steps": 4, "lr": 1e-3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 1": {"dp": 2},
    "EP 2": {"dp": 2, "ep": 2},
    "PP 2 x EP 2": {"pp": 2, "dp": 2, "ep": 2},
    "PP 2 x EP 2, eager 1F1B": {"pp": 2, "dp": 2, "ep": 2, "schedule": "ahead", "in_flight": [4, 2]},
    "TP 2 x EP 2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "PP 2 x EP 2, all-gather": {"pp": 2, "dp": 2, "ep": 2, "ep_comm": "allgather"},
    "TP 2 x EP 2, all-gather, full recomputation": {
        **{"tp": 2, "ep": 2, "ep_comm": "allgather"},
        **{"sequence_parallel": True, "recompute": "full"},
    },
    "TP 2 x EP 1": {"tp": 2, "sequence_parallel": True},
    "PP 2 x EP 2, interleaved": {"pp": 2, "dp": 2, "ep": 2, "layers": [[1, 1], [1, 1]]},
    "EP 2 without overlap": {"dp": 2, "ep": 2},
    "EP 2 without distributed optimizer": {"dp": 2, "ep": 2, "distributed_optimizer": False},
    "EP 2 with full recomputation": {"dp": 2, "ep": 2, "recompute": "full"},
    "PP 2 x ETP 2": {"pp": 2, "dp": 2, "etp": 2, "ep_comm": "allgather"},
    "EP 2 x ETP 2 of TP 2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2, "ep_comm": "allgather", "sequence_parallel": True},
    "ETP 2 of DP 4": {"dp": 4, "etp": 2, "ep_comm": "allgather"},
    "ETP 2 of TP 2": {"tp": 2, "etp": 2, "ep_comm": "allgather", "sequence_parallel": True},
}


def train(directory: Path, layout: dict[str, Any], model: ModelSpec = MODEL, **settings: Any) -> spawn.FinishedRun:
    ended = spawn.train(directory, spawn.plan(model=model, **layout), {"train": {**TRAIN, **settings}})
    assert set(ended.codes) == {0}, ended.output
    return ended


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    return train(tmp_path_factory.mktemp("one_process"), {})


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(LAYOUTS, *list(LAYOUTS)[:6]))
def test_experts_have_the_losses_and_norms_of_one_process(
    name: str, one_process: spawn.FinishedRun, tmp_path: Path
) -> None:
    overlap = "without overlap" not in name
    settings = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    ended = train(tmp_path / "run", LAYOUTS[name], **settings)
    assert all(1 <= share < 2 for share in ended.column("expert_imbalance"))
    compute_s = [max(stage["compute_s"] for stage in stages) for stages in ended.column("breakdown")]
    assert all(0 < s < limit for s, limit in zip(ended.column("expert_s"), compute_s, strict=True))
    assert ended.column("loss") == pytest.approx(one_process.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(one_process.column("grad_norm"), rel=1e-4)


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    return train(tmp_path_factory.mktemp("balanced"), {}, BALANCED)


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(LAYOUTS, "PP 2 x EP 2"))
def test_loss_free_balancing_is_equal_in_every_layout(name: str, balanced: spawn.FinishedRun, tmp_path: Path) -> None:
    ended = train(tmp_path / "run", LAYOUTS[name], BALANCED)
    assert ended.column("loss") == pytest.approx(balanced.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(balanced.column("grad_norm"), rel=1e-4)


@pytest.fixture(scope="module")
def per_sequence(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    return train(tmp_path_factory.mktemp("per_sequence"), {"batch": PAIRS}, PER_SEQUENCE)


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(LAYOUTS, "PP 2 x EP 2"))
def test_the_loss_per_sequence_is_equal_in_every_layout(
    name: str, per_sequence: spawn.FinishedRun, tmp_path: Path
) -> None:
    ended = train(tmp_path / "run", {**LAYOUTS[name], "batch": PAIRS}, PER_SEQUENCE)
    assert ended.column("loss") == pytest.approx(per_sequence.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(per_sequence.column("grad_norm"), rel=1e-4)


@pytest.mark.integration
@pytest.mark.thorough
def test_the_loss_per_sequence_differs_from_that_of_a_micro_batch(
    per_sequence: spawn.FinishedRun, tmp_path: Path
) -> None:
    ended = train(tmp_path / "run", {"batch": PAIRS})
    assert ended.column("loss")[0] == per_sequence.column("loss")[0]  # of the same weights
    assert ended.column("grad_norm")[0] != pytest.approx(per_sequence.column("grad_norm")[0], rel=1e-5)


@pytest.mark.integration
@pytest.mark.thorough
def test_a_capacity_drops_the_same_tokens_in_every_layout(one_process: spawn.FinishedRun, tmp_path: Path) -> None:
    model = replace(MODEL, experts=replace(MODEL.experts, capacity=0.75))
    layouts = ("EP 1", "EP 2", "PP 2 x EP 2", "EP 2 with full recomputation")
    runs = [train(tmp_path / name, LAYOUTS[name], model) for name in layouts]
    assert all(0.1 < share < 0.5 for share in runs[0].column("dropped_tokens"))
    for ended in runs[1:]:
        assert ended.column("loss") == pytest.approx(runs[0].column("loss"), rel=1e-5)
        assert ended.column("dropped_tokens") == pytest.approx(runs[0].column("dropped_tokens"), abs=1e-9)
    assert runs[0].column("loss")[3] != pytest.approx(one_process.column("loss")[3], rel=1e-5)


@pytest.fixture(scope="module")
def first_dense(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    return train(tmp_path_factory.mktemp("first_dense"), {}, FIRST_DENSE)


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(LAYOUTS, "PP 2 x EP 2"))
def test_first_dense_layers_are_equal_in_every_layout(
    name: str, first_dense: spawn.FinishedRun, one_process: spawn.FinishedRun, tmp_path: Path
) -> None:
    ended = train(tmp_path / "run", LAYOUTS[name], FIRST_DENSE)
    assert ended.column("loss") == pytest.approx(first_dense.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(first_dense.column("grad_norm"), rel=1e-4)
    assert ended.column("loss")[0] != pytest.approx(one_process.column("loss")[0], rel=1e-6)


@pytest.mark.integration
@pytest.mark.thorough
def test_a_checkpoint_with_first_dense_layers_moves_between_layouts(
    first_dense: spawn.FinishedRun, tmp_path: Path
) -> None:
    train(tmp_path / "saved", LAYOUTS["EP 2"], FIRST_DENSE, steps=2, checkpoint_interval=2, lr_decay_steps=4)
    saved = tmp_path / "saved" / "checkpoints" / "step-00000002"
    plan = spawn.plan(model=FIRST_DENSE, **LAYOUTS["PP 2 x EP 2"])
    ended = spawn.train(tmp_path / "run", plan, {"train": TRAIN, "checkpoint": str(saved)})
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("loss") == pytest.approx(first_dense.column("loss")[2:], rel=1e-6)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, generator = tmp_path_factory.mktemp("corpus") / "text", np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(300):
        start, stride = generator.integers(250, size=2)
        builder.add_document((start + stride * np.arange(40)) % 250, [40])
    builder.finalize(f"{prefix}.idx")
    return {"kind": "indexed", "prefix": str(prefix)}


@pytest.mark.integration
@pytest.mark.thorough
@pytest.mark.parametrize("model", [MODEL, BALANCED], ids=["loss", "bias"])
def test_thirty_steps_of_indexed_data_are_equal(model: ModelSpec, indexed: dict[str, Any], tmp_path: Path) -> None:
    runs = [
        spawn.train(
            tmp_path / name,
            spawn.plan(model=model, **LAYOUTS[name]),
            {"train": {**TRAIN, "steps": 30}, "data": indexed},
        )
        for name in list(LAYOUTS)[:5]
    ]
    assert all(set(ended.codes) == {0} for ended in runs), [ended.output for ended in runs]
    assert runs[0].column("loss")[29] < runs[0].column("loss")[0]
    for ended in runs[1:]:
        assert ended.column("loss") == pytest.approx(runs[0].column("loss"), rel=1e-5)
        assert ended.column("grad_norm") == pytest.approx(runs[0].column("grad_norm"), rel=1e-4)


@pytest.mark.integration
@pytest.mark.thorough
def test_biases_change_the_choice_of_experts_and_are_saved(balanced: spawn.FinishedRun, tmp_path: Path) -> None:
    """The biases of PP 2 x EP 2 continue on EP 1."""
    unbiased = train(tmp_path / "unbiased", {}, replace(BALANCED, experts=replace(BALANCED.experts, bias=0.0)))
    assert unbiased.column("loss")[0] == balanced.column("loss")[0]
    assert unbiased.column("loss")[3] != pytest.approx(balanced.column("loss")[3], rel=1e-5)
    train(tmp_path / "saved", LAYOUTS["PP 2 x EP 2"], BALANCED, steps=2, checkpoint_interval=2, lr_decay_steps=4)
    saved = tmp_path / "saved" / "checkpoints" / "step-00000002"
    ended = spawn.train(tmp_path / "run", spawn.plan(model=BALANCED), {"train": TRAIN, "checkpoint": str(saved)})
    assert ended.column("loss") == pytest.approx(balanced.column("loss")[2:], rel=1e-6)


@pytest.mark.integration
def test_a_checkpoint_with_experts_moves_between_layouts(one_process: spawn.FinishedRun, tmp_path: Path) -> None:
    """The checkpoint of EP 2 after two steps continues with the losses of the run without an interruption."""
    train(tmp_path / "saved", LAYOUTS["EP 2"], steps=2, checkpoint_interval=2, lr_decay_steps=4)
    saved = tmp_path / "saved" / "checkpoints" / "step-00000002"
    for name in ("EP 1", "PP 2 x EP 2", "PP 2 x ETP 2"):
        plan = spawn.plan(model=MODEL, **LAYOUTS[name])
        ended = spawn.train(tmp_path / name, plan, {"train": TRAIN, "checkpoint": str(saved)})
        assert set(ended.codes) == {0}, ended.output
        assert ended.column("step") == [3, 4]
        assert ended.column("loss") == pytest.approx(one_process.column("loss")[2:], rel=1e-6)
        assert ended.column("grad_norm") == pytest.approx(one_process.column("grad_norm")[2:], rel=1e-5)


def test_a_dense_checkpoint_is_refused_by_a_model_with_experts() -> None:
    saved = {k: v for k, v in asdict(spawn.MODEL).items() if k != "experts"}  # as older versions saved it
    check_identity(saved, spawn.MODEL, "checkpoint")
    with pytest.raises(DataError, match=r"checkpoint has experts.count=0, plan has experts.count=4"):
        check_identity(saved, replace(spawn.MODEL, experts=Experts(4)), "checkpoint")
