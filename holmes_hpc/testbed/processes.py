"""Search and termination of the processes of one testbed.

A process belongs to the testbed if it runs in one of the testbed's network namespaces (slurmd and its jobs) or has the
testbed's MARK in its environment. A server may overwrite its environment. It therefore also belongs to the testbed if
its working directory, or a path in its command line, is below the state directory. Process ids are not recorded,
because other processes could have them after a crash or a reboot.
"""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from holmes_hpc.errors import TestbedError
from holmes_hpc.waiting import attempts

SERVERS = ("munged", "mariadbd", "slurmdbd", "slurmctld")
DAEMONS = (*SERVERS, "slurmd")
_KILL_S = 15
MARK = "HOLMES_TESTBED_OF"  # environment variable of the testbed's processes, with the testbed's directory


@dataclass(frozen=True)
class TestbedProcess:
    """A process of the testbed. `program`: name of its executable; `namespace`: inode of its network namespace."""

    pid: int
    program: str
    namespace: int


def _namespace(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def _program(executable: str) -> str:
    """Return the name of an executable without the suffix of Debian's: ``slurmctld`` for /usr/sbin/slurmctld-wlm."""
    return os.path.basename(executable.removesuffix(" (deleted)")).removesuffix("-wlm")


def _uses_directory(process: psutil.Process, directory: Path) -> bool:
    """Return whether the process works below `directory`, or has a path below it in its command line."""
    pattern = re.compile(rf"(^|[=,:]){re.escape(str(directory))}/")  # /bed matches neither /bed2 nor /other/bed
    return any(pattern.search(argument) for argument in (*process.cmdline(), f"{process.cwd()}/"))


def find(directory: Path, namespaces: Collection[int]) -> list[TestbedProcess]:
    """Return all live processes of the testbed in `directory`. `namespaces`: inodes of its network namespaces."""

    def belongs(process: psutil.Process, namespace: int) -> bool:
        if namespace in namespaces or process.environ().get(MARK) == str(directory):
            return True
        return _program(process.exe()) in DAEMONS and _uses_directory(process, directory)

    return _live_processes(belongs)


def _live_processes(belongs: Callable[[psutil.Process, int], bool]) -> list[TestbedProcess]:
    """Return the live processes, except this one, for which `belongs` returns true.

    `belongs` is called with a process and the inode of its network namespace."""
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


def kill_all(directory: Path, namespaces: Collection[int]) -> None:
    """Kill all processes of the testbed by SIGKILL, because its data is deleted anyway.
    Raise TestbedError if one survives for _KILL_S."""
    _kill_until_none(lambda: find(directory, namespaces), str(directory))


def kill_namespace(namespace: int) -> None:
    """Kill all processes in the network namespace with this inode by SIGKILL, even if they fork meanwhile.
    Raise TestbedError if one survives for _KILL_S."""
    _kill_until_none(lambda: _live_processes(lambda _, inode: inode == namespace), f"netns {namespace}")


def _kill_until_none(find_processes: Callable[[], list[TestbedProcess]], where: str) -> None:
    for _ in attempts(_KILL_S, 0.05):
        if not (survivors := find_processes()):
            return
        for process in survivors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    names = ", ".join(f"{p.program} ({p.pid})" for p in survivors[:5])
    hint = "look for the cause in dmesg, then run `holmes testbed down` again"
    raise TestbedError(f"processes are alive after SIGKILL: {names}", where=where, hint=hint)


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Raise SystemExit if SIGTERM arrives in the block, so that the block cleans up as it does after Ctrl-C.

    Outside the main thread, do nothing."""
    with contextlib.ExitStack() as on_exit:
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            on_exit.callback(signal.signal, signal.SIGTERM, previous)
        yield
