"""The losses and gradient norms of every layout, compared with those of one process."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import spawn
import thorough
import torch

from holmes_hpc.config.plan_options import PlanOptions
from holmes_hpc.training.model import gpt

STEPS = {"steps": 4}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> spawn.FinishedRun:
    ended = spawn.train(tmp_path_factory.mktemp("one_process"), spawn.plan(), {"train": STEPS})
    assert ended.codes == [0], ended.output
    assert len(ended.column("loss")) == 4 and ended.column("loss")[-1] < ended.column("loss")[0] - 0.1  # it trains
    return ended


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp4": ({"dp": 4}, {}),
    "dp2 without distributed optimizer": ({"dp": 2, "distributed_optimizer": False}, {}),
    "dp2 without overlap": ({"dp": 2}, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "dp4 hierarchical": ({"dp": 4, "optimizer_instances": 2}, {}),
    "pp2 dp4 hierarchical": ({"pp": 2, "dp": 4, "optimizer_instances": 2}, {}),
    "pp3 uneven": ({"pp": 3, "layers": [[3], [2], [1]]}, {}),
    "pp2 eager 1F1B": ({"pp": 2, "schedule": "ahead", "in_flight": [4, 2]}, {}),
    "pp2 plain Megatron": ({"pp": 2, "transport_mode": "single"}, {}),
    "pp2 interleaved": ({"pp": 2, "layers": [[2, 1], [2, 1]]}, {}),
    "pp2 plain Megatron interleaved": ({"pp": 2, "layers": [[2, 1], [2, 1]], "transport_mode": "single"}, {}),
    "tp2 sequence parallel": ({"tp": 2, "sequence_parallel": True}, {}),
    "tp2 pp2 dp2": ({"tp": 2, "pp": 2, "dp": 2}, {}),
    "full recomputation": ({"pp": 2, "recompute": "full"}, {}),
    "selective recomputation": ({"recompute": "selective"}, {}),
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    thorough.all_but(
        LAYOUTS,
        "dp2 without distributed optimizer",
        "dp4 hierarchical",
        "pp3 uneven",
        "pp2 eager 1F1B",
        "pp2 plain Megatron interleaved",
        "tp2 sequence parallel",
        "tp2 pp2 dp2",
        "full recomputation",
    ),
)
def test_a_layout_has_the_losses_and_norms_of_one_process(
    name: str, one_process: spawn.FinishedRun, tmp_path: Path
) -> None:
    layout, train = LAYOUTS[name]
    ended = spawn.train(tmp_path / "run", spawn.plan(**layout), {"train": {**STEPS, **train}})
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("loss") == pytest.approx(one_process.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(one_process.column("grad_norm"), rel=1e-4)
    if layout.get("optimizer_instances"):  # the reduction follows the backward pass and does not interrupt it
        assert all(stage["grad_sync_s"] > 2e-4 for line in ended.run.metrics() for stage in line["breakdown"])


@pytest.mark.integration
def test_gradients_are_summed_in_bf16_if_the_plan_says_so(tmp_path: Path) -> None:
    losses = {}
    for dtype in ("fp32", "bf16"):
        train = {**STEPS, "dtype": "bf16", "grad_dtype": dtype}
        ended = spawn.train(tmp_path / dtype, spawn.plan(dp=2, grad_dtype=dtype), {"train": train})
        assert set(ended.codes) == {0}, ended.output
        losses[dtype] = ended.column("loss")
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2) and losses["bf16"][1:] != losses["fp32"][1:]
    other = spawn.train(tmp_path / "other", spawn.plan(dp=2), {"train": {**train, "steps": 2}})
    assert "the plan sums gradients in fp32" in other.log(0)


GATHERS = {
    "interleaved eager 1F1B": (spawn.plan(pp=2, dp=2, layers=[[2, 1], [2, 1]], schedule="ahead"), True),
    "per stage": (spawn.unequal((1, 2), (1, 1)), True),
    "plain Megatron": (spawn.plan(dp=2, transport_mode="single"), False),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", GATHERS)
def test_all_gathers_start_before_the_first_forward_pass_in_order_of_use(name: str, tmp_path: Path) -> None:
    """In the first step each forward pass starts the gathers that it needs. The second step follows that order."""
    plan, at_once = GATHERS[name]
    hook = {rank: {"RANK_HOOK": "print_gathers"} for rank in range(plan.world_size)}
    ended = spawn.train(tmp_path / "run", plan, {"train": {"steps": 2}}, environment=hook)
    assert set(ended.codes) == {0}, ended.output
    for rank in [rank for ranks in plan.parallel.stage_ranks if len(ranks) > 1 for rank in ranks]:
        events = [line for line in ended.log(rank).splitlines() if line.startswith("event")]
        passes = [index for index, event in enumerate(events) if event == "event forward"]
        last, first = passes[len(passes) // 2 - 1 :][:2]  # of the first and of the second step
        parts = events[:last], events[last:first], events[first:]
        needed, between, after = ([event for event in part if "gather" in event] for part in parts)
        assert needed and [between, after] == ([needed, []] if at_once else [[], needed]), (rank, events)


@pytest.mark.integration
@pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="Muon needs the package emerging-optimizers")
def test_muon_has_the_losses_of_one_process_in_every_layout_and_resumes(
    one_process: spawn.FinishedRun, tmp_path: Path
) -> None:
    losses_of = {}
    for name, layout in {"one": {}, "dp2": {"dp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}.items():
        plan = spawn.plan(**layout, distributed_optimizer=False)
        muon = {
            "plan": PlanOptions(distributed_optimizer=False),
            "train": {**STEPS, "optimizer": "muon", "lr_decay_steps": 4, "checkpoint_interval": 2},
        }
        if name == "tp2 pp2":
            spawn.train(tmp_path / name, plan, {**muon, "train": {**muon["train"], "steps": 2}})
        ended = spawn.train(tmp_path / name, plan, muon)
        assert set(ended.codes) == {0}, ended.output
        losses_of[name] = ended.column("loss")
    assert (
        losses_of["one"][0] == one_process.column("loss")[0] and losses_of["one"][3:] != one_process.column("loss")[3:]
    )  # not Adam
    for losses in losses_of.values():
        assert losses == pytest.approx(losses_of["one"], rel=1e-5)


def test_gelu_is_the_same_function_on_all_devices() -> None:
    """Megatron's fused GELU is only its tanh approximation and needs biases; its fused SwiGLU is exact."""
    plain = replace(spawn.MODEL, swiglu=False, rmsnorm=False, rope=False, bias=False)
    configs = [gpt.transformer_config(spawn.plan(model=m), torch.float32, cuda=True) for m in (plain, spawn.MODEL)]
    assert [c.bias_activation_fusion for c in configs] == [False, True]


@pytest.mark.integration
def test_a_tied_model_has_the_same_losses_on_two_stages(tmp_path: Path) -> None:
    tied = replace(spawn.MODEL, tied=True, rope=False, swiglu=False, rmsnorm=False, bias=True)
    losses = []
    for pp in (1, 2):
        ended = spawn.train(tmp_path / str(pp), spawn.plan(pp=pp, model=tied), {"train": {"steps": 3}})
        assert set(ended.codes) == {0}, ended.output
        losses.append(ended.column("loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
