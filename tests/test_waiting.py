"""Attempts with pauses."""

import time

import pytest

from holmes_hpc.waiting import attempts, wait_until


@pytest.mark.parametrize(
    ("timeout_s", "longest_pause_s", "pauses"), [(0, 0, []), (3.5, 0, [1, 1, 1]), (20, 4, [1, 2, 4, 4, 4, 4])]
)
def test_attempts_pause_until_the_limit(
    timeout_s: float, longest_pause_s: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    left = list(attempts(timeout_s, 1, longest_pause_s))
    assert slept == pauses
    assert left == [timeout_s - sum(pauses[:i]) for i in range(len(pauses) + 1)]


def test_wait_ends_when_the_condition_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 5, 0.1) and slept == [0.1, 0.1]
    assert not wait_until(lambda: False, 0, 0.1)
