"""A stand-in for Slurm made of small scripts, which log their arguments and print given answers."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holmes_hpc.submission.executor import preflight
from holmes_hpc.submission.executor.watcher import WATCHER


class FakeSlurm:
    """Commands on PATH that log their arguments and run the sh code of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, command: str, body: str) -> None:
        """Make `command` run `body`, which is sh code. Calls are logged: one argument per line, then a blank line."""
        path = self.folder / command
        log = self.folder / f"{command}.log"
        path.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> {log}; echo >> {log}\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def calls(self, command: str) -> list[list[str]]:
        log = self.folder / f"{command}.log"
        if not log.exists():
            return []
        return [block.splitlines() for block in log.read_text().split("\n\n") if block.strip()]


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "fake-bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    preflight.clear_cache()
    fake = FakeSlurm(folder)
    for command in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "sinfo", "sacctmgr"):
        fake.answer(command, f"echo '{command}: error: nothing was said' >&2; exit 1")
    return fake


@pytest.fixture(autouse=True)
def fresh_watcher() -> Callable[[], None]:
    """Clear the watcher, because job ids repeat between tests."""

    def clear() -> None:
        WATCHER.clear()
        WATCHER._registered.clear()
        WATCHER._identities.clear()
        WATCHER._registered_at.clear()

    clear()
    return clear


@pytest.fixture
def busy_roce(testbed: object) -> Iterator[None]:
    """Occupy all RoCE nodes for ten minutes."""
    preflight.clear_cache()
    job = subprocess.run(
        ["sbatch", "--parsable", "-p", "roce", "-N4", "--exclusive", "-t10", "-o/dev/null", "--wrap", "sleep 600"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    try:
        end, ask = time.monotonic() + 60, ["squeue", "-h", "-j", job, "-o", "%T"]
        while "RUNNING" not in subprocess.run(ask, capture_output=True, text=True).stdout:
            assert time.monotonic() < end
            time.sleep(0.3)
        yield
    finally:
        subprocess.run(["scancel", job], check=False)
