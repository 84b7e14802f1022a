"""Learning rates, Adam's options, and steps with non-finite losses or gradients."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import spawn
import torch
from hypothesis import given
from hypothesis import strategies as st

from holmes_hpc.config.composition import load
from holmes_hpc.config.learning_rate import learning_rate
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError, RunFailed
from holmes_hpc.training.model import optimizer
from holmes_hpc.training.rank import cpu

RATES = TrainConfig(lr=1.0, min_lr=0.1, warmup_steps=4, steps=20)


def test_the_cosine_schedule_warms_up_and_decays() -> None:
    rates = [learning_rate(step, RATES) for step in range(1, 31)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[19:] == [0.1] * 11
    assert rates[11] == pytest.approx(0.55)  # the middle of a half cosine
    assert all(a > b for a, b in pairwise(rates[3:20]))


def test_the_linear_and_wsd_schedules_decay_to_the_minimum() -> None:
    linear = [learning_rate(step, replace(RATES, lr_schedule="linear")) for step in range(1, 22)]
    assert linear[:4] == [0.25, 0.5, 0.75, 1.0] and linear[11] == pytest.approx(0.55) and linear[19:] == [0.1, 0.1]
    assert linear[7] == pytest.approx(0.775)  # a quarter down, where a cosine has fallen less
    wsd = replace(RATES, lr_schedule="wsd", wsd_decay_steps=4)
    wsd_rates = [learning_rate(step, wsd) for step in range(1, 22)]
    assert wsd_rates[3:16] == [1.0] * 13 and wsd_rates[17] == pytest.approx(0.55) and wsd_rates[19:] == [0.1, 0.1]
    assert replace(RATES, lr_schedule="wsd").decay_steps == 2


@pytest.mark.parametrize(
    "values",
    [
        {"wsd_decay_steps": 3},
        {"lr_schedule": "wsd", "wsd_decay_steps": 17},
        {"lr_schedule": "WSD"},
        {"optimizer": "moun"},
    ],
)
def test_invalid_schedules_and_optimizers_are_refused(values: dict) -> None:
    with pytest.raises(ConfigError, match=r"train\.(wsd_decay_steps|lr_schedule|optimizer)"):
        replace(RATES, **values)


def test_muon_cannot_be_sharded() -> None:
    with pytest.raises(ConfigError, match=r"cannot be sharded.*plan\.distributed_optimizer=false"):
        load(["train.optimizer=muon", "plan.distributed_optimizer=true", "model=gpt_tiny", "batch=tiny"])
    assert load(["train.optimizer=muon", "batch=tiny"]).plan.distributed_optimizer is False


@given(
    steps=st.integers(1, 50),
    warmup=st.integers(0, 50),
    end=st.none() | st.integers(1, 80),
    schedule=st.sampled_from(("cosine", "linear")),
)
def test_learning_rates_are_between_zero_and_one(steps: int, warmup: int, end: int | None, schedule: str) -> None:
    train = replace(
        RATES, steps=steps, warmup_steps=min(warmup, end or steps), lr_decay_steps=end, lr_schedule=schedule
    )
    for step in range(1, 90):
        assert 0 < learning_rate(step, train) <= 1


@pytest.mark.parametrize(
    ("losses", "updated", "norm", "scale", "pattern"),
    [
        ([2.0], True, 1.0, 8.0, None),
        ([], True, 0.0, 8.0, None),
        ([2.0], True, None, 8.0, None),
        ([2.0], True, math.nan, 8.0, "the gradient norm is nan"),
        ([2.0], True, math.inf, 8.0, "the gradient norm is inf"),
        ([2.0, math.nan], True, 1.0, 8.0, "the loss is nan"),
        ([math.inf], False, None, 8.0, "the loss is inf"),
        ([2.0], False, None, 8.0, None),
        ([2.0], False, None, 1.0, "least loss scale"),
        ([], False, None, 1.0, "least loss scale"),
    ],
)
def test_a_step_with_a_non_finite_loss_or_norm_ends_the_run(
    losses: list[float], updated: bool, norm: float | None, scale: float, pattern: str | None
) -> None:
    scaler = SimpleNamespace(scale=torch.tensor([scale]), min_scale=torch.tensor([1.0]))
    for fake_optimizer in (
        SimpleNamespace(grad_scaler=scaler),
        SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=scaler)]),
    ):
        if pattern is None:
            optimizer.check_numbers(fake_optimizer, 7, losses, updated, norm)
        else:
            with pytest.raises(RunFailed, match=f"step 7: .*{pattern}"):
                optimizer.check_numbers(fake_optimizer, 7, losses, updated, norm)


def test_an_overflow_at_the_least_loss_scale_ends_an_fp16_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    cpu.redirect_tensors(monkeypatch.setattr)
    scaler = DynamicGradScaler(2.0**6, 1.0, 2.0, 0.5, 1000, 2)
    fake_optimizer, last_step = SimpleNamespace(grad_scaler=scaler), 0
    for step in range(1, 20):
        scaler.update(found_inf=True)
        try:
            optimizer.check_numbers(fake_optimizer, step, [3.0], False, None)
        except RunFailed:
            last_step = step
            break
    assert last_step == 7  # one overflow without effect (hysteresis), then six halvings


def test_norms_and_biases_do_not_decay_and_the_options_of_the_run_win() -> None:
    groups = [{"wd_mult": 1.0, "lr": 9.0, "weight_decay": 9.0}, {"wd_mult": 0.0, "lr_mult": 2.0, "eps": 9.0}]
    optimizer.set_options(SimpleNamespace(param_groups=groups), replace(spawn.TRAIN, weight_decay=0.1, eps=1e-6), 0.5)
    assert [(g["lr"], g["weight_decay"], g["eps"]) for g in groups] == [(0.5, 0.1, 1e-6), (1.0, 0.0, 1e-6)]


def test_only_a_gather_that_is_not_finished_is_measured() -> None:
    """Every module asks in every pass, and an event for each takes time on a GPU (benchmarks/results/gpu.md)."""
    events: list[str] = []
    group = SimpleNamespace(param_gather_handle=None, param_gather_dispatched=False)
    group.finish_param_sync = lambda **options: events.append("finish")
    inner = SimpleNamespace(get_grad_norm=lambda: None)
    model = SimpleNamespace(
        bucket_groups=[group], expert_parallel_bucket_groups=[], ddp_config=SimpleNamespace(overlap_param_gather=True)
    )
    timed = SimpleNamespace(wrap=lambda *_: None, part=lambda name: events.append(name) or nullcontext())
    optimizer.time_waits(inner, [model], timed)  # type: ignore[list-item, arg-type]
    for handle, dispatched in ((None, False), (object(), True), (None, True)):
        group.param_gather_handle, group.param_gather_dispatched = handle, dispatched
        group.finish_param_sync(skip_next_bucket_dispatch=False)
    assert events == ["param_sync_s", "finish"] * 2
