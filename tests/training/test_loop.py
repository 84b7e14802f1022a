"""The training loop around its steps: when metrics are written, and the state of the process afterwards."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.errors import RunFailed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training import loop, session
from holmes_hpc.training.rank.signals import AnyRank, Signals


def test_the_garbage_collector_is_unfrozen_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise bindings of other packages report each of their objects as leaked in the rank's log."""

    def fail(*_: object) -> None:
        assert gc.get_freeze_count() > 0
        raise RunFailed("as expected", where="test", hint="none")

    run = RunDirectory.create(tmp_path / "run")
    monkeypatch.setattr(session.Plan, "read", fail)
    with pytest.raises(SystemExit):
        loop.train(load([f"run_dir={run.path}"]))
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("ready", "order"), [(True, "step line step line line"), (False, "step step line")])
def test_a_step_whose_metrics_are_gathered_is_written_before_the_next(ready: bool, order: str) -> None:
    trainer, events = MagicMock(), list[str]()
    trainer.step, trainer.settings.steps, trainer.trace = 0, 2, None
    trainer._update.return_value, trainer.early_steps.is_pending = ([], {}), False
    trainer._gathering.ready.return_value = ready
    trainer._run_passes.return_value = AnyRank()
    trainer._between_steps.side_effect = lambda _, step_end: step_end
    trainer._record.side_effect = lambda *_: events.append("step")
    trainer._finish_record.side_effect = lambda: events.append("line")
    loop.Trainer.run(trainer, Signals())
    assert " ".join(events) == order


def test_steps_that_connect_or_follow_a_pause_are_not_compared_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "metrics_line", MagicMock())
    trainer = MagicMock(step=1, copies=None)
    trainer.session.launch.rank, trainer.checkpoints.has_unfinished_save = 0, False
    for final, figures, is_quiet in (
        ({}, {}, False),
        ({"loss": 1}, {}, True),
        ({"loss": 1}, {"pause_before_s": 1}, False),
    ):
        trainer.last_metrics = final
        loop.Trainer._record(trainer, [], figures, 1.0, {})
        assert trainer._is_step_only is is_quiet
