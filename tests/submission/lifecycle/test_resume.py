"""What a run may go on with: a plan for where it runs, and a checkpoint once all its steps are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import plans
import pytest

from holmes_hpc.cli import runs
from holmes_hpc.config.composition import load
from holmes_hpc.errors import ConfigError, PlanError
from holmes_hpc.planning.spec.plan import Plan
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.submission.lifecycle.resume import continuation


@pytest.fixture
def record(tmp_path: Path) -> RunDirectory:
    """A run of two local ranks."""
    config = replace(load(["launcher=local", "train.steps=4"]), run_dir=str(tmp_path / "run"))
    return RunDirectory.create(tmp_path / "run", plans.local_plan().to_yaml(), config.to_dict())


def written(plan: Plan, path: Path) -> str:
    plan.write(path)
    return str(path)


def test_a_local_run_takes_no_plan_of_another_site(record: RunDirectory, tmp_path: Path) -> None:
    other = written(plans.plan("ib-a", "roce-a", nodes=1), tmp_path / "other.yaml")
    with pytest.raises(PlanError, match="the plan is for site holmes, whose fabric 'ib-a' is not here"):
        continuation(record, "failed", [], other)


def test_a_local_run_takes_a_plan_of_other_ranks(record: RunDirectory, tmp_path: Path) -> None:
    own = plans.local_plan()
    wide = replace(own.site, fabrics=(replace(own.site.fabrics[0], gpus_per_node=4),))
    four = plans.plan("local", nodes=1, site=wide)
    assert continuation(record, "failed", [], written(four, tmp_path / "four.yaml")).plan.world_size == 4


def test_a_run_that_kept_no_checkpoint_does_not_begin_again(
    record: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Completed:
        state = "completed"

    monkeypatch.setattr("holmes_hpc.submission.lifecycle.status.run_status", lambda _: Completed)
    with pytest.raises(ConfigError, match=r"holmes resume run train\.steps=N"):
        runs.resume(str(record.path), [], None)
    with pytest.raises(ConfigError, match="kept no checkpoint to go on from"):
        runs.resume(str(record.path), ["train.steps=8"], None)
