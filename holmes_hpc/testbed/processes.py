"""Finding and ending the processes of one testbed, and no others.

Ours are: everything inside our network namespaces (slurmd, and the jobs below it), everything that was started with our
mark in its environment, and the servers whose command line or working directory names our state directory (a server may
overwrite its environment). Process ids are never remembered: after a crash or a reboot they would name somebody else.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from holmes_hpc.errors import TestbedError

SERVERS = ("munged", "mariadbd", "slurmdbd", "slurmctld")
DAEMONS = (*SERVERS, "slurmd")
MARK = "HOLMES_TESTBED_OF"  # in the environment of what a testbed starts: its directory


@dataclass(frozen=True)
class Found:
    """A process of ours; `program` is its executable's name, `namespace` the inode of its network namespace."""

    pid: int
    program: str
    namespace: int


def _namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def _program(executable: str) -> str:
    """``slurmctld`` for /usr/sbin/slurmctld-wlm, as Debian's alternatives call it."""
    return os.path.basename(executable.removesuffix(" (deleted)")).removesuffix("-wlm")


def _mentions(process: psutil.Process, directory: Path) -> bool:
    """Whether a path below `directory` is in its command line, or is where it works."""
    below = re.compile(rf"(^|[=,:]){re.escape(str(directory))}/")  # /bed is neither /bed2 nor /other/bed
    return any(below.search(word) for word in (*process.cmdline(), f"{process.cwd()}/"))


def find(directory: Path, namespaces: Collection[int]) -> list[Found]:
    """All living processes of the testbed in `directory`, whose namespaces have these inodes."""
    return _living(
        lambda process, namespace: (
            namespace in namespaces
            or process.environ().get(MARK) == str(directory)
            or (_program(process.exe()) in DAEMONS and _mentions(process, directory))
        )
    )


def _living(ours: Callable[[psutil.Process, int], bool]) -> list[Found]:
    """The living processes, but for this one, of which `ours(process, its network namespace's inode)` holds."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            each = Found(process.pid, _program(process.exe()), _namespace(process.pid))
            if ours(process, each.namespace):
                found.append(each)
        except (psutil.Error, OSError):
            continue
    return found


def end_all(directory: Path, namespaces: Collection[int], timeout_s: float = 15) -> None:
    """Kill until none is left: the data is thrown away, so no daemon needs to write anything more.

    :raises TestbedError: some process does not die.
    """
    _kill_until_none(lambda: find(directory, namespaces), str(directory), timeout_s)


def end_inside(namespace: int, timeout_s: float = 15) -> None:
    """Kill all that lives in the network namespace of this inode, also what is forked meanwhile: a node's power is cut.

    :raises TestbedError: some process does not die.
    """
    _kill_until_none(lambda: _living(lambda _, own: own == namespace), f"network namespace {namespace}", timeout_s)


def _kill_until_none(look: Callable[[], list[Found]], where: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while found := look():
        if time.monotonic() > deadline:
            names = ", ".join(f"{f.program} ({f.pid})" for f in found[:5])
            raise TestbedError(f"still alive after SIGKILL: {names}", where=where, hint="see dmesg, then `down` again")
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(0.05)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """A SIGTERM undoes like an interrupt does, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
