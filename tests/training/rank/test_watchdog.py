"""The watchdog, under a fake clock."""

from __future__ import annotations

import pytest
from clock import Clock

from holmes_hpc.training.rank import failure
from holmes_hpc.training.rank.launch import Launch


class FakeExit:
    rank, node = 0, "n"


def test_a_phase_over_its_limit_is_overdue() -> None:
    clock = Clock()
    watchdog = failure.Watchdog(FakeExit(), 10, logs_progress=False, clock=clock)  # type: ignore[arg-type]
    clock.pass_(99)
    assert watchdog.overdue() is None  # set-up may take ten times as long
    watchdog.start_phase("step 1")
    clock.pass_(9)
    assert watchdog.overdue() is None
    watchdog.start_phase("step 2")
    clock.pass_(9)
    assert watchdog.overdue() is None
    clock.pass_(2)
    assert watchdog.overdue() == "step 2 takes longer than 10 s"
    watchdog.start_phase("saving", failure.LONG_PHASE)
    clock.pass_(99)
    assert watchdog.overdue() is None
    clock.pass_(2)
    assert watchdog.overdue() == "saving takes longer than 100 s"


def test_a_slow_set_up_logs_its_phase_within_10_s_until_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    watchdog = failure.Watchdog(FakeExit(), 600, logs_progress=True, clock=clock)  # type: ignore[arg-type]

    def logged_in(seconds: int) -> list[str]:
        for _ in range(seconds):
            clock.pass_(1)
            watchdog.log_if_silent()
        return [line.partition(" in progress for ")[2] for line in capsys.readouterr().out.splitlines()]

    for _ in range(9):
        clock.pass_(1)
    clock.pass_(1)
    watchdog.start_phase("validation")
    watchdog.log_if_silent()
    assert " in progress for 0 s: validation" in capsys.readouterr().out
    watchdog = failure.Watchdog(FakeExit(), 600, logs_progress=True, clock=clock)  # type: ignore[arg-type]
    watchdog.start_set_up("building the model")
    assert logged_in(10) == ["9 s: building the model"]
    watchdog.start_phase("step 1")
    assert logged_in(10) == ["8 s: step 1"]
    watchdog.note_step_logged()
    watchdog.start_phase("step 2")
    assert logged_in(90) == []
    assert logged_in(20) == ["101 s: step 2"]


def test_too_many_open_files_are_reported_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_exit = failure.RankExit(None, Launch(3, 4, 0, "srun", "roce2", "slurm-1-0-0", False))  # type: ignore[arg-type]
    monkeypatch.setattr(failure.resource, "getrlimit", lambda _: (100, 100))
    cause = rank_exit._root_cause(RuntimeError("epoll_create: Too many open files"))
    assert str(cause) == "rank 3 on roce2: more than 100 open files; raise `ulimit -n`"
