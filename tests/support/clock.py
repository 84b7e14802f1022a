"""A clock for tests: time passes only when somebody sleeps, or says so."""

from __future__ import annotations

import pytest


class Clock:
    """Time that passes only when somebody sleeps, or says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.now = 1000.0
        if monkeypatch is not None:
            monkeypatch.setattr("time.perf_counter", lambda: self.now)
            monkeypatch.setattr("time.sleep", self.pass_)

    def pass_(self, seconds: float) -> None:
        self.now += max(seconds, 1e-5)

    def __call__(self) -> float:
        return self.now
