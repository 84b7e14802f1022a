"""A hang is found, by a clock of the test's own."""

from __future__ import annotations

from clock import Clock

from holmes_hpc.training.rank import watchdog


class Told:
    rank, node = 0, "n"


def test_a_step_that_takes_too_long_is_a_hang() -> None:
    clock = Clock()
    dog = watchdog.Watchdog(Told(), 10, speaks=False, clock=clock)  # type: ignore[arg-type]
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
    dog.alive("saving", watchdog.LONG)
    clock.pass_(99)
    assert dog.hung() is None
    clock.pass_(2)
    assert dog.hung() == "saving takes longer than 100 s"
