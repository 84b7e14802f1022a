"""A test that is not marked for it may start no process: the attempt fails, and so does the test if it hides that."""

from __future__ import annotations

import multiprocessing.util
import sys
from typing import Any

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.spawn", "tests.process"}
MAY_START = ("integration", "slurm", "breaking", "gpu")
FONTS = "fc-list"  # matplotlib asks for the machine's fonts when somebody first uses it, in whichever test that is
_test: str | None = None  # the unit test under way
_started: list[str] = []


def _listen(event: str, details: tuple[Any, ...]) -> None:
    if _test is not None and event in STARTS and details[:1] != (FONTS,):
        _started.append(f"{event} {str(details)[:200]}")
        raise AssertionError(f"a unit test starts a process ({event}): mark it `integration`, or do without")


def install() -> None:
    """Once for this process; Python has no way to take such a listener away."""
    spawn = multiprocessing.util.spawnv_passfds

    def announced(path: Any, arguments: Any, descriptors: Any) -> int:  # of which Python itself says nothing
        sys.audit("tests.process", arguments)
        return spawn(path, arguments, descriptors)

    multiprocessing.util.spawnv_passfds = announced  # type: ignore[assignment]
    sys.addaudithook(_listen)


def begin(item: pytest.Item) -> None:
    global _test
    _test = None if any(item.get_closest_marker(name) for name in MAY_START) else item.nodeid
    _started.clear()


def end() -> list[str]:
    """What was started although it may not be."""
    global _test
    _test = None
    return list(_started)
