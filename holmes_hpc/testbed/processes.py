"""Search and termination of the processes of one testbed.

They are all processes in its network namespaces (slurmd and its jobs) and all with its mark in their environment. A
server may overwrite its environment, so servers are also found by a command line or working directory in the state
directory. Process ids are not stored: after a crash or a reboot they would belong to other processes.
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
MARK = "HOLMES_TESTBED_OF"  # variable with the testbed's directory, in the environment of its processes


@dataclass(frozen=True)
class TestbedProcess:
    """A process of the testbed. `program`: name of its executable; `namespace`: inode of its network namespace."""

    pid: int
    program: str
    namespace: int


def _namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def _program(executable: str) -> str:
    """Return ``slurmctld`` for /usr/sbin/slurmctld-wlm, a name of Debian's alternatives."""
    return os.path.basename(executable.removesuffix(" (deleted)")).removesuffix("-wlm")


def _uses_directory(process: psutil.Process, directory: Path) -> bool:
    """Return whether the process works below `directory`, or has a path below it in its command line."""
    pattern = re.compile(rf"(^|[=,:]){re.escape(str(directory))}/")  # /bed matches neither /bed2 nor /other/bed
    return any(pattern.search(argument) for argument in (*process.cmdline(), f"{process.cwd()}/"))


def find(directory: Path, namespaces: Collection[int]) -> list[TestbedProcess]:
    """Return all live processes of the testbed in `directory`. `namespaces`: the inodes of its namespaces."""
    return _live_processes(
        lambda process, namespace: (
            namespace in namespaces
            or process.environ().get(MARK) == str(directory)
            or (_program(process.exe()) in DAEMONS and _uses_directory(process, directory))
        )
    )


def _live_processes(belongs: Callable[[psutil.Process, int], bool]) -> list[TestbedProcess]:
    """Return the live processes, except this one, for which `belongs(process, inode of its network namespace)`."""
    matches = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            match = TestbedProcess(process.pid, _program(process.exe()), _namespace(process.pid))
            if belongs(process, match.namespace):
                matches.append(match)
        except (psutil.Error, OSError):
            continue
    return matches


def kill_all(directory: Path, namespaces: Collection[int], timeout_s: float = 15) -> None:
    """Kill the processes of the testbed until none is left, by SIGKILL: the testbed's data is deleted anyway.

    :raises TestbedError: a process survives.
    """
    _kill_until_none(lambda: find(directory, namespaces), str(directory), timeout_s)


def kill_namespace(namespace: int, timeout_s: float = 15) -> None:
    """Kill all processes in the network namespace with this inode, also those forked meanwhile, as a power cut does.

    :raises TestbedError: a process survives.
    """
    _kill_until_none(lambda: _live_processes(lambda _, inode: inode == namespace), f"netns {namespace}", timeout_s)


def _kill_until_none(find_processes: Callable[[], list[TestbedProcess]], where: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while survivors := find_processes():
        if time.monotonic() > deadline:
            names = ", ".join(f"{p.program} ({p.pid})" for p in survivors[:5])
            raise TestbedError(f"still alive after SIGKILL: {names}", where=where, hint="see dmesg, then `down` again")
        for process in survivors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.05)


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM in the block, so that it is undone as after Ctrl-C. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise SystemExit(143)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
