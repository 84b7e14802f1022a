"""A hang is found, by a clock of the test's own."""

from __future__ import annotations

import pytest
from clock import Clock

from holmes_hpc.training.rank import failure


class Told:
    rank, node = 0, "n"


def test_a_step_that_takes_too_long_is_a_hang() -> None:
    clock = Clock()
    dog = failure.Watchdog(Told(), 10, speaks=False, clock=clock)  # type: ignore[arg-type]
    clock.pass_(99)
    assert dog.hung() is None  # set-up may take ten times as long
    dog.alive("step 1")
    clock.pass_(9)
    assert dog.hung() is None
    dog.alive("step 2")
    clock.pass_(9)
    assert dog.hung() is None
    clock.pass_(2)
    assert dog.hung() == "step 2 takes longer than 10 s"
    dog.alive("saving", failure.LONG)
    clock.pass_(99)
    assert dog.hung() is None
    clock.pass_(2)
    assert dog.hung() == "saving takes longer than 100 s"


def test_a_slow_set_up_names_its_phase_within_10_s_until_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    dog = failure.Watchdog(Told(), 600, speaks=True, clock=clock)  # type: ignore[arg-type]

    def said_in(seconds: int) -> list[str]:
        for _ in range(seconds):
            clock.pass_(1)
            dog.tell()
        return [line.partition(" still at ")[2] for line in capsys.readouterr().out.splitlines()]

    for _ in range(9):
        clock.pass_(1)
    clock.pass_(1)
    dog.alive("what follows")
    dog.tell()
    assert " now at what follows" in capsys.readouterr().out
    dog = failure.Watchdog(Told(), 600, speaks=True, clock=clock)  # type: ignore[arg-type]
    dog.setting_up("building the model")
    assert said_in(10) == ["building the model, for 9 s"]
    dog.alive("step 1")
    assert said_in(10) == ["step 1, for 8 s"]
    dog.said()
    dog.alive("step 2")
    assert said_in(90) == []
    assert said_in(20) == ["step 2, for 101 s"]
