"""The same numbers whatever the layout: every layout's losses and gradient norms against those of one process."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import spawn
import torch

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.training.model import gpt

STEPS = {"steps": 6}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    ended = spawn.train(tmp_path_factory.mktemp("alone"), spawn.plan(), {"train": STEPS})
    assert ended.codes == [0], ended.output
    assert len(ended.column("loss")) == 6 and ended.column("loss")[-1] < ended.column("loss")[0] - 0.1  # it trains
    return ended


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "dp2 without distributed optimizer": ({"dp": 2, "distributed_optimizer": False}, {}),
    "dp2 without overlap": ({"dp": 2}, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "dp4 hierarchical": ({"dp": 4, "optimizer_instances": 2}, {}),
    "pp3 uneven": ({"pp": 3, "layers": [[3], [2], [1]]}, {}),
    "pp2 running ahead": ({"pp": 2, "schedule": "ahead", "in_flight": [4, 2]}, {}),
    "pp2 plain Megatron": ({"pp": 2, "transport_mode": "single"}, {}),
    "pp2 interleaved": ({"pp": 2, "layers": [[2, 1], [2, 1]]}, {}),
    "pp2 plain Megatron interleaved": ({"pp": 2, "layers": [[2, 1], [2, 1]], "transport_mode": "single"}, {}),
    "tp2 sequence parallel": ({"tp": 2, "sequence_parallel": True}, {}),
    "tp2 pp2 dp2": ({"tp": 2, "pp": 2, "dp": 2}, {}),
    "full recomputation": ({"pp": 2, "recompute": "full"}, {}),
    "selective recomputation": ({"recompute": "selective"}, {}),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_process(name: str, alone: spawn.FinishedRun, tmp_path: Path) -> None:
    layout, train = LAYOUTS[name]
    ended = spawn.train(tmp_path / "run", spawn.plan(**layout), {"train": {**STEPS, **train}})
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-4)
    if layout.get("optimizer_instances"):  # not bucket by bucket, in the way of the backward pass
        assert all(stage["grad_sync_s"] > 2e-4 for line in ended.run.metrics() for stage in line["breakdown"])


@pytest.mark.integration
@pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="Muon needs the package emerging-optimizers")
def test_muon_gives_the_numbers_of_one_process_and_resumes(alone: spawn.FinishedRun, tmp_path: Path) -> None:
    found = {}
    for name, layout in {"one": {}, "dp2": {"dp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}.items():
        plan = spawn.plan(**layout, distributed_optimizer=False)
        muon = {
            "plan": PlanOptions(distributed_optimizer=False),
            "train": {**STEPS, "optimizer": "muon", "lr_decay_steps": 6, "checkpoint_interval": 3},
        }
        if name == "tp2 pp2":
            spawn.train(tmp_path / name, plan, {**muon, "train": {**muon["train"], "steps": 3}})
        ended = spawn.train(tmp_path / name, plan, muon)
        assert set(ended.codes) == {0}, ended.output
        found[name] = ended.column("loss")
    assert found["one"][0] == alone.column("loss")[0] and found["one"][3:] != alone.column("loss")[3:]  # not Adam
    for losses in found.values():
        assert losses == pytest.approx(found["one"], rel=1e-5)


def test_gelu_is_one_function_on_all_devices() -> None:
    """Megatron's fused GELU is its tanh approximation, and wants biases; its fused SwiGLU is exact."""
    plain = replace(spawn.MODEL, swiglu=False, rmsnorm=False, rope=False, bias=False)
    configs = [gpt.transformer_config(spawn.plan(model=m), torch.float32, cuda=True) for m in (plain, spawn.MODEL)]
    assert [c.bias_activation_fusion for c in configs] == [False, True]


@pytest.mark.integration
def test_a_tied_model_gives_the_same_numbers_on_two_stages(tmp_path: Path) -> None:
    tied = replace(spawn.MODEL, tied=True, rope=False, swiglu=False, rmsnorm=False, bias=True)
    losses = []
    for pp in (1, 2):
        ended = spawn.train(tmp_path / str(pp), spawn.plan(pp=pp, model=tied), {"train": {"steps": 3}})
        assert set(ended.codes) == {0}, ended.output
        losses.append(ended.column("loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
