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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
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
    """Return whether the process has the mark of `directory`, or is a daemon that names it or works below it."""
    if process.environ().get(MARK) == str(directory):
        return True
    pattern = re.compile(rf"(^|[=,:]){re.escape(str(directory))}/")  # /bed matches neither /bed2 nor /other/bed
    is_daemon = _program(process.exe()) in DAEMONS
    return is_daemon and any(pattern.search(argument) for argument in (*process.cmdline(), f"{process.cwd()}/"))


def find(directory: Path | None, namespaces: Collection[int]) -> list[TestbedProcess]:
    """Return all live processes, except this one, of the testbed in `directory`, or only those of some of its nodes.
    `directory`: None for the processes of nodes; `namespaces`: inodes of the testbed's or nodes' network namespaces."""
    matches = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            match = TestbedProcess(process.pid, _program(process.exe()), _namespace(process.pid))
            if match.namespace in namespaces or (directory and _uses_directory(process, directory)):
                matches.append(match)
        except (psutil.Error, OSError):
            continue
    return matches


def kill_all(directory: Path | None, namespaces: Collection[int]) -> None:
    """Kill the processes of :func:`find`, and their forks, by SIGKILL. TestbedError if one survives for _KILL_S.
    They are stopped before, as by a power cut: srun's helper would cancel a step whose srun is killed first."""
    where = str(directory or f"netns {', '.join(map(str, namespaces))}")
    for _ in attempts(_KILL_S, 0.05):
        if not (survivors := find(directory, namespaces)):
            return
        for number, process in product((signal.SIGSTOP, signal.SIGKILL), survivors):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
    names = ", ".join(f"{p.program} ({p.pid})" for p in survivors[:5])
    hint = "look for the cause in dmesg, then run `holmes testbed down` again"
    raise TestbedError(f"processes are alive after SIGKILL: {names}", where=where, hint=hint)


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Raise SystemExit if SIGTERM arrives in the block (in the main thread), so that it cleans up as after Ctrl-C."""
    with contextlib.ExitStack() as on_exit:
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            on_exit.callback(signal.signal, signal.SIGTERM, previous)
        yield
