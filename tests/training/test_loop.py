"""The training loop around its steps: what is said when, and what it leaves behind in the process."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from holmes_hpc.config.composition import load
from holmes_hpc.errors import RunFailed
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training import loop
from holmes_hpc.training.rank.signals import AnyRank, Signals


def test_what_was_loaded_is_thrown_away_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else bindings of other packages report each of their objects as leaked, into the rank's log."""

    def fails(*_: object) -> None:
        assert gc.get_freeze_count() > 0
        raise RunFailed("as it should", where="here", hint="none")

    run = RunDirectory.create(tmp_path / "run")
    monkeypatch.setattr(loop.session.Plan, "read", fails)
    with pytest.raises(SystemExit):
        loop.train(load([f"run_dir={run.path}"]))
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(("come", "lines"), [(True, "step line step line line"), (False, "step step line")])
def test_a_step_whose_figures_have_come_has_its_line_before_the_next(come: bool, lines: str) -> None:
    trainer, done = MagicMock(), list[str]()
    trainer.step, trainer.settings.steps, trainer.trace = 0, 2, None
    trainer._one_step.return_value = [], {}
    trainer._gathering.ready.return_value = come
    trainer.control_flags.exchange.return_value = AnyRank()
    trainer._between_steps.side_effect = lambda _, ended: ended
    trainer._record.side_effect = lambda *_: done.append("step")
    trainer._finish_record.side_effect = lambda: done.append("line")
    loop.Trainer.run(trainer, Signals())
    assert " ".join(done) == lines


def test_steps_that_connect_or_follow_a_pause_are_not_compared_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "metrics_line", MagicMock())
    trainer = MagicMock(step=1)
    trainer.here.launch.rank, trainer.checkpoints.unsettled = 0, False
    for final, figures, alone in (
        ({}, {}, False),
        ({"loss": 1}, {}, True),
        ({"loss": 1}, {"pause_before_s": 1}, False),
    ):
        trainer.final = final
        loop.Trainer._record(trainer, [], figures, 1.0, {})
        assert trainer._alone is alone
