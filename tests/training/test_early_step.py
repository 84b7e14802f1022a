"""Early optimizer steps: results equal bit for bit, with and without roll-backs; their counts; resumed runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spawn
import thorough

from holmes_hpc.config.model import Experts
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError
from holmes_hpc.planning.plan.plan import early_step_of
from holmes_hpc.training.model import early_step

STEPS = 9
ZERO_BUBBLE = {"pp": 2, "schedule": "zero_bubble", "in_flight": [3, 2], "deferred": [1, 2], "final": [1, 2]}
EXPERTS = replace(spawn.MODEL, experts=Experts(4, top_k=2, ffn=32, score="sigmoid", bias=1e-2))
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero bubble": (ZERO_BUBBLE, {}),
    "dropout": ({**ZERO_BUBBLE, "model": replace(spawn.MODEL, dropout=0.1)}, {}),
    "pp2 dp2 sharded": ({"pp": 2, "dp": 2, "schedule": "ahead", "in_flight": [3, 2]}, {}),
    "pp2 dp2 bf16 unsharded": ({"pp": 2, "dp": 2, "distributed_optimizer": False}, {"dtype": "bf16"}),
    "pp2 dp2 bf16 sharded": ({"pp": 2, "dp": 2, "schedule": "ahead", "in_flight": [3, 2]}, {"dtype": "bf16"}),
    "tp2 pp2 interleaved": ({"tp": 2, "pp": 2, "layers": [[2, 1], [2, 1]]}, {}),
    "dp2 without overlap": ({"dp": 2}, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "experts": ({"pp": 2, "dp": 2, "ep": 2, "model": EXPERTS}, {}),
}


def train(folder: Path, layout: dict[str, Any], early: str, is_forced: bool = True, **options: Any) -> Any:
    """Train with or without early steps. `is_forced`: take them right below a clip that some norms exceed."""
    settings = {"steps": STEPS, "clip_grad": 1.5 if is_forced else 30, "checkpoint_interval": STEPS, **options}
    plan = spawn.plan(**layout, early_step=early)
    hook = {rank: {"RANK_HOOK": "take_early_steps"} for rank in range(plan.world_size)} if is_forced else None
    ended = spawn.train(folder, plan, {"train": settings}, environment=hook)
    assert set(ended.codes) == {0}, ended.output
    return ended


def check_equal(early: spawn.FinishedRun, exact: spawn.FinishedRun) -> None:
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert early.column(name) == exact.column(name), name
    folders = [run.run.checkpoints / f"step-{STEPS:08}" for run in (early, exact)]
    files = [json.loads((folder / "holmes.json").read_text())["files"] for folder in folders]
    checksums = [{name: value for name, value in of_run.items() if name != ".metadata"} for of_run in files]
    assert checksums[0] == checksums[1]  # .metadata has paths


@pytest.mark.integration
@pytest.mark.parametrize("name", thorough.all_but(LAYOUTS, "zero bubble"))
def test_steps_rolled_back_have_the_results_of_exact_ones_bit_for_bit(name: str, tmp_path: Path) -> None:
    layout, options = LAYOUTS[name]
    exact, early = (train(tmp_path / choice, layout, choice, **options) for choice in ("off", "stage"))
    check_equal(early, exact)
    rolled_back = early.flagged("rolled_back")
    assert rolled_back and not {*rolled_back} & {*early.flagged("early_step")} and early.flagged("early_step")
    assert all(early.column("grad_norm")[step - 1] > 1.5 for step in rolled_back)
    assert f"step {rolled_back[0]} is repeated without an early optimizer step" in early.log(0)
    assert not exact.flagged("early_step") and not exact.flagged("rolled_back")


@pytest.mark.integration
@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYOUTS)
def test_early_steps_have_the_results_of_exact_ones_bit_for_bit(name: str, tmp_path: Path) -> None:
    layout, options = LAYOUTS[name]
    exact, early = (train(tmp_path / choice, layout, choice, False, **options) for choice in ("off", "stage"))
    check_equal(early, exact)
    assert early.flagged("early_step") == [*range(early_step.RECENT + 1, STEPS)] and not early.flagged("rolled_back")


@pytest.mark.integration
@pytest.mark.thorough
def test_a_run_continues_after_a_roll_back_and_validates_exact_weights(tmp_path: Path) -> None:
    options = {"eval_interval": 3, "eval_steps": 1}
    exact = train(tmp_path / "off", ZERO_BUBBLE, "off", **options)
    for steps in (6, STEPS):
        settings = {"steps": steps, "lr_decay_steps": STEPS, "checkpoint_interval": 3}
        early = train(tmp_path / "stage", ZERO_BUBBLE, "stage", **{**options, **settings})
    check_equal(early, exact)
    assert early.flagged("rolled_back") and early.flagged("validation_loss") == [3, 6, 9]
    losses = ([line.get("validation_loss") for line in run.run.metrics()] for run in (early, exact))
    assert next(losses) == next(losses)


@pytest.mark.integration
@pytest.mark.thorough
def test_gradients_that_are_not_finite_end_the_run_as_without_early_steps(tmp_path: Path) -> None:
    logs = []
    for choice in ("off", "stage"):
        hook = {0: {"RANK_HOOK": "take_early_steps"}, 1: {"RANK_HOOK": "take_early_steps"}}
        settings = {"steps": 6, "clip_grad": 0.0, "lr": 1e30, "min_lr": 0.0, "warmup_steps": 4}
        plan = spawn.plan(**ZERO_BUBBLE, early_step=choice)
        ended = spawn.train(tmp_path / choice, plan, {"train": settings}, environment=hook)
        assert set(ended.codes) != {0}
        logs.append(re.findall(r"step \d: the gradient norm is nan; lower train.lr", ended.log(0)))
    assert logs[0] and logs[0] == logs[1]


@pytest.mark.parametrize("options", [{"optimizer": "muon"}, {"dtype": "fp16"}, {"fp8": "delayed"}])
def test_steps_that_cannot_be_undone_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainConfig(early_step="stage", **options)
    assert "steps of muon, fp16 and fp8 delayed cannot be undone; remove train.early_step" in str(refused.value)


def test_a_plan_without_memory_for_early_steps_is_refused() -> None:
    plan, train = spawn.plan(), spawn.TRAIN
    with pytest.raises(ConfigError, match=r"train\.early_step: it is stage, but the plan has no memory for it"):
        early_step_of(replace(train, early_step="stage"), plan)
    planned = replace(plan, early_step="stage")
    choices = [early_step_of(replace(train, early_step=choice), planned) for choice in (None, "off", "stage")]
    assert choices == ["stage", "off", "stage"] and early_step_of(train, plan) == "off"
