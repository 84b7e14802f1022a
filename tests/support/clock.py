"""A clock for tests: time passes only when a test sleeps or calls `pass_`."""

from __future__ import annotations

import pytest


class Clock:
    """A clock whose time passes only when a test sleeps or calls `pass_`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.now = 1000.0
        if monkeypatch is not None:
            monkeypatch.setattr("time.perf_counter", lambda: self.now)
            monkeypatch.setattr("time.sleep", self.pass_)

    def pass_(self, seconds: float) -> None:
        self.now += max(seconds, 1e-5)

    def __call__(self) -> float:
        return self.now
