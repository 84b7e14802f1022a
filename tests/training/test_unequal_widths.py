"""Stages of unequal widths train to the numbers of one process, and continue each other's checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spawn

STEPS = {"steps": 20}
TIED = replace(spawn.MODEL, tied=True, rope=False, swiglu=False, rmsnorm=False, bias=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, spawn.FinishedRun]:
    ended = {
        name: spawn.train(tmp_path_factory.mktemp(name), spawn.plan(model=model), {"train": STEPS})
        for name, model in (("plain", spawn.MODEL), ("tied", TIED))
    }
    assert all(one.codes == [0] for one in ended.values())
    return ended


def same(ended: spawn.FinishedRun, alone: spawn.FinishedRun, norm: float = 1e-4) -> None:
    assert set(ended.codes) == {0}, ended.output
    assert ended.column("loss") == pytest.approx(alone.column("loss"), rel=1e-5)
    assert ended.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=norm)


LAYOUTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "2 + 1": ([(1, 2), (1, 1)], {"layers": [4, 2]}, "plain"),
    "1 + 3 by weight": ([(1, 1), (1, 3)], {"layers": [2, 4], "weights": {1: [3, 1, 1]}}, "plain"),
    "2 + 3": ([(1, 2), (1, 3)], {}, "plain"),
    "3 + 2, tied": ([(1, 3), (1, 2)], {"model": TIED}, "tied"),
    "1 + 2 + 1": ([(1, 1), (1, 2), (1, 1)], {}, "plain"),
    "TP 2 and 1": ([(2, 1), (1, 2)], {}, "plain"),
    "TP 1 and 2, tied": ([(1, 1), (2, 2)], {"model": TIED}, "tied"),
}


@pytest.mark.integration
@pytest.mark.parametrize("name", LAYOUTS)
def test_unequal_widths_give_the_numbers_of_one_process(
    name: str, alone: dict[str, spawn.FinishedRun], tmp_path: Path
) -> None:
    widths, more, kind = LAYOUTS[name]
    norm = 1e-3 if "TP" in name and kind == "tied" else 1e-4  # with TP 2 in all stages these are 2.5e-4 apart too
    same(spawn.train(tmp_path / "run", spawn.unequal(*widths, **more), {"train": STEPS}), alone[kind], norm)


@pytest.mark.integration
def test_a_checkpoint_of_one_set_of_widths_is_continued_under_another(
    alone: dict[str, spawn.FinishedRun], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    plans = {6: spawn.unequal((1, 2), (1, 1)), 13: spawn.unequal((2, 1), (1, 2)), 20: spawn.plan(dp=2)}
    for steps, plan in plans.items():
        ended = spawn.train(
            run,
            plan,
            {"train": {"steps": steps, "lr_decay_steps": 20, "checkpoint_interval": steps if steps < 20 else 0}},
        )
        assert set(ended.codes) == {0}, ended.output
    same(ended, alone["plain"])
