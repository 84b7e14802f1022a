"""What a test started or wrote and left behind: processes, and files in the folder for temporary ones.

A process is ours when it has the worker's mark in its environment or is a child of this one. Servers that several tests
share are named with :func:`stays`; what runs on the nodes of the testbed is the testbed's own business.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from holmes_hpc.testbed.processes import DAEMONS
from holmes_hpc.testbed.processes import MARK as OF_A_TESTBED

MARK = "HOLMES_TESTS_OF"  # in the environment of all that a test starts: the worker's process id
PATIENCE_S = 20  # for what is on its way out, on a machine that is busy with other things
PYTHONS_OWN = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # of one process, and end with it
NOT_OURS = (".git", "__pycache__", "node_modules")  # folders of the checkout where any program writes
_staying: set[int] = set()


def stays(pid: int) -> None:
    """This process serves many tests and ends with the last."""
    _staying.add(pid)


def process_ids() -> set[int]:
    """Of all processes of this machine that are there now."""
    return set(psutil.pids())


def processes(before: set[int]) -> list[psutil.Process]:
    """Those of ours that were not there before."""
    found = []
    for pid in process_ids() - before - _staying:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and _ours(process):
                found.append(process)
    return found


def _ours(process: psutil.Process) -> bool:
    environment = process.environ()
    if OF_A_TESTBED in environment or process.name() in DAEMONS:
        return False
    if os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
        return False
    if any(name in word for name in PYTHONS_OWN for word in process.cmdline()):
        return False
    return process.ppid() == os.getpid() or environment.get(MARK) == os.environ.get(MARK)


def temporary(folder: Path) -> set[Path]:
    """What lies there, but the sockets of Python's own servers: who is killed leaves them."""
    return {path for path in folder.iterdir() if not path.name.startswith("pymp-")}


def described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({' '.join(process.cmdline())[:200]})"
    return str(process.pid)


def kill(found: Iterable[psutil.Process]) -> None:
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def checkout(root: Path) -> set[Path]:
    """Every file of the checkout, but hidden ones and what Python and Git keep for themselves."""
    found = set()
    for folder, below, names in os.walk(root):
        below[:] = [
            name
            for name in below
            if name not in NOT_OURS and not name.startswith(".") and not name.endswith(".egg-info")
        ]
        found |= {Path(folder, name) for name in names if not name.startswith(".")}
    return found


def after_a_while(look: Callable[[], list]) -> list:
    """What `look` still finds when everything had time to go."""
    end = time.monotonic() + PATIENCE_S
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return found
