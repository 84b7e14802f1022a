"""Processes and temporary files that a test leaves behind.

A process belongs to the tests if it is a child of this process or has the worker's mark in its environment.
:func:`exempt` exempts servers that several tests share. Processes on the testbed's nodes belong to the testbed."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from holmes_hpc.testbed.processes import DAEMONS
from holmes_hpc.testbed.processes import MARK as TESTBED_MARK

MARK = "HOLMES_TESTS_OF"  # in the environment of a test's processes: the worker's process id
PATIENCE_S = 20  # for processes that are ending on a busy machine
# Python's own helpers end with the process they belong to.
PYTHONS_OWN = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
SHARED_FOLDERS = (".git", "__pycache__", "node_modules")  # any program writes into these folders of the checkout
_exempt: set[int] = set()


def exempt(pid: int) -> None:
    """Exempt a process that serves many tests and ends with the last."""
    _exempt.add(pid)


def process_ids() -> set[int]:
    """Return the ids of all processes of this machine."""
    return set(psutil.pids())


def processes(before: set[int]) -> list[psutil.Process]:
    """Return the tests' processes that were not there before."""
    ours = []
    for pid in process_ids() - before - _exempt:
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and _is_ours(process):
                ours.append(process)
    return ours


def _is_ours(process: psutil.Process) -> bool:
    environment = process.environ()
    if TESTBED_MARK in environment or process.name() in DAEMONS:
        return False
    if os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
        return False
    if any(name in word for name in PYTHONS_OWN for word in process.cmdline()):
        return False
    return process.ppid() == os.getpid() or environment.get(MARK) == os.environ.get(MARK)


def temporary(folder: Path) -> set[Path]:
    """Return the paths in a folder, without sockets of Python's servers, which a kill leaves behind."""
    return {path for path in folder.iterdir() if not path.name.startswith("pymp-")}


def described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({' '.join(process.cmdline())[:200]})"
    return str(process.pid)


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def checkout(root: Path) -> set[Path]:
    """Return every file of the checkout except hidden ones and files of Python and Git."""
    files = set()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in SHARED_FOLDERS and not name.startswith(".") and not name.endswith(".egg-info")
        ]
        files |= {Path(folder, name) for name in names if not name.startswith(".")}
    return files


def wait_until_gone(look: Callable[[], list]) -> list:
    """Return what `look` still returns when everything had time to end."""
    end = time.monotonic() + PATIENCE_S
    while (leftovers := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return leftovers
