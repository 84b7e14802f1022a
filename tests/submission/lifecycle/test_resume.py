"""Continuation of a run: its plan must be for its site, and a completed run needs a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import plans
import pytest
import typer

from holmes_hpc.cli import runs
from holmes_hpc.config.composition import load
from holmes_hpc.config.learning_rate import describe_lr_change
from holmes_hpc.config.train import TrainConfig
from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.planning.plan.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.create import prepare_continuation


@pytest.fixture
def record(tmp_path: Path) -> RunDirectory:
    """Return the record of a run of two local ranks."""
    config = replace(load(["launcher=local", "train.steps=4"]), run_dir=str(tmp_path / "run"))
    return RunDirectory.create(tmp_path / "run", plans.local_plan().to_yaml(), config.to_dict())


def write_plan(plan: Plan, path: Path) -> str:
    plan.write(path)
    return str(path)


def test_a_local_run_refuses_a_plan_for_another_site(record: RunDirectory, tmp_path: Path) -> None:
    other = write_plan(plans.plan("ib-a", "roce-a", nodes=1), tmp_path / "other.yaml")
    with pytest.raises(PlanError, match="the plan needs pool 'ib-a' of site holmes; this site has"):
        prepare_continuation(record, "failed", [], other)


def test_a_local_run_accepts_a_plan_with_another_number_of_ranks(record: RunDirectory, tmp_path: Path) -> None:
    local_site = plans.local_plan().site
    wide_site = replace(local_site, pools=(replace(local_site.pools[0], gpus_per_node=4),))
    four = plans.plan("local", nodes=1, site=wide_site)
    plan, _ = prepare_continuation(record, "failed", [], write_plan(four, tmp_path / "four.yaml"))
    assert plan.world_size == 4


def test_a_completed_run_without_a_checkpoint_is_not_resumed(
    record: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Completed:
        state = "completed"

    monkeypatch.setattr("holmes_hpc.submission.lifecycle.status.run_status", lambda _: Completed)
    for overrides in ([], ["train.steps=8"]):
        with pytest.raises(ConfigError, match="has no checkpoint to continue from"):
            runs.resume(str(record.path), overrides, None)
    monkeypatch.setattr(runs.checkpoint_directory, "complete_checkpoints", lambda _: [SimpleNamespace(step=4)])
    with pytest.raises(ConfigError, match=r"holmes resume run train\.steps=N"):
        runs.resume(str(record.path), [], None)


@pytest.mark.parametrize(
    ("settings", "step", "message"),
    [
        (
            {},
            21,
            "(cosine) now ends at step 60: at step 21 it is 0.000754, was 0.000515; train.lr_decay_steps=40 keeps",
        ),
        ({}, 41, "(cosine) now ends at step 60: at step 41 it is 0.000305, was 0.0001; train.lr_decay_steps=40 keeps"),
        ({"lr_schedule": "linear"}, 20, "(linear) now ends at step 60: at step 20 it is 0.0007, was 0.00055;"),
        ({"lr_schedule": "wsd"}, 21, "(wsd) now ends at step 60, not 40; train.lr_decay_steps=40 keeps the old end"),
        ({"min_lr": 1e-3}, 21, None),
        ({"lr_decay_steps": 50}, 21, None),
    ],
)
def test_more_steps_move_the_learning_rate(settings: dict, step: int, message: str | None) -> None:
    before = TrainConfig(steps=40, **settings)
    change = describe_lr_change(before, replace(before, steps=60), step)
    assert change is None if message is None else message in str(change)
    assert (
        describe_lr_change(before, before, step) is None
        and describe_lr_change(before, replace(before, lr=2e-3), step) is None
    )
    assert describe_lr_change(before, replace(before, steps=60, lr_decay_steps=40), step) is None


def test_resume_reports_where_the_learning_rate_now_ends(
    record: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lifecycle, directory = "holmes_hpc.submission.lifecycle", "holmes_hpc.training.checkpoint.checkpoint_directory"
    monkeypatch.setattr(f"{lifecycle}.status.run_status", lambda _: SimpleNamespace(state="failed"))
    monkeypatch.setattr(f"{directory}.complete_checkpoints", lambda _: [SimpleNamespace(step=2, path="step-2")])
    monkeypatch.setattr(f"{lifecycle}.progress.report_progress", lambda *_: 2)
    monkeypatch.setattr(runs, "submit_run", lambda *_: SimpleNamespace(id="7"))
    for overrides, is_reported in (
        (["train.steps=8", "train.lr_decay_steps=4"], False),
        (["train.lr_decay_steps=null"], True),
    ):
        with pytest.raises(typer.Exit):
            runs.resume(str(record.path), overrides, None)
        assert (
            "the decay of the learning rate (cosine) now ends at step 8: at step 3" in capsys.readouterr().err
        ) == is_reported


def test_resume_names_what_another_plan_changes(
    record: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lifecycle = "holmes_hpc.submission.lifecycle"
    monkeypatch.setattr(f"{lifecycle}.status.run_status", lambda _: SimpleNamespace(state="failed"))
    monkeypatch.setattr(f"{lifecycle}.progress.report_progress", lambda *_: 2)
    monkeypatch.setattr(runs, "submit_run", lambda *_: SimpleNamespace(id="7"))
    old = Plan.read(record.plan_path)
    new = replace(old, recompute="full", bucket_bytes=50_000_000)
    with pytest.raises(typer.Exit):
        runs.resume(str(record.path), [], write_plan(new, tmp_path / "new.yaml"))
    changes = "the plan changes: recompute full (was recompute none); optimizer sharded over the data-parallel ranks,"
    assert f"{changes} gradient buckets of 50 MB (was optimizer sharded" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        runs.resume(str(record.path), ["train.steps=8"], None)
    assert "the plan changes" not in capsys.readouterr().err


def test_fp8_is_checked_before_a_run_continues(record: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="there are no FP8 figures for cpu"):
        prepare_continuation(record, "failed", ["train.fp8=delayed"], None)
