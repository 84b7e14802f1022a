"""Guard against processes in unit tests: the attempt fails, and so does a test that hides the failure."""

from __future__ import annotations

import multiprocessing.util
import sys
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.spawn", "tests.process"}
MAY_START = ("integration", "slurm", "breaking", "gpu")
FONTS = "fc-list"  # matplotlib lists fonts at its first use, in any test
_test: str | None = None  # the unit test that is running
_started: list[str] = []


def _listen(event: str, details: tuple[Any, ...]) -> None:
    if _test is not None and event in STARTS and details[:1] != (FONTS,):
        _started.append(f"{event} {str(details)[:200]}")
        raise AssertionError(f"a unit test starts a process ({event}): mark it `integration` or avoid the process")


def install() -> None:
    """Install the guard once for this process; Python cannot remove an audit hook."""
    spawn = multiprocessing.util.spawnv_passfds

    def announced(path: Any, arguments: Any, descriptors: Any) -> int:  # Python raises no audit event here
        sys.audit("tests.process", arguments)
        return spawn(path, arguments, descriptors)

    multiprocessing.util.spawnv_passfds = announced  # type: ignore[assignment]
    sys.addaudithook(_listen)


def begin(item: pytest.Item) -> None:
    global _test
    _test = None if any(item.get_closest_marker(name) for name in MAY_START) else item.nodeid
    _started.clear()


def end() -> list[str]:
    """Return the processes that the test was not allowed to start."""
    global _test
    _test = None
    return list(_started)
