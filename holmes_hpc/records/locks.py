"""Lock files in a run directory. A lock's owner is the command that submits the run's job, or the attempt that trains.

The owner keeps the lock file open and locked, and the file's text names the owner. When the owner's process ends for
any reason, the kernel (on NFS, the server) releases the lock. After a node failure, an NFS server may keep the lock for
a while. In that case the state of the owner's Slurm job shows that the owner has ended, and a new file replaces it.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from holmes_hpc.errors import RecordError
from holmes_hpc.records.files import file_error, locked
from holmes_hpc.records.ownership import user_name
from holmes_hpc.records.untrusted import from_json, read_file
from holmes_hpc.waiting import attempts

TRAINING_LOCK = ".training"  # in a run directory, held by the attempt that trains there
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # errors of a file system without locks
_NAMING_S = 0.5  # a new owner writes its name within this time after locking


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock file. `what`: the command or attempt that it runs, as shown in errors; `job`: its
    Slurm job's id, empty without a job; `since`: the time at which it took the lock, in Unix seconds."""

    what: str
    user: str
    host: str
    pid: int
    job: str
    since: float

    @classmethod
    def current(cls, task: str, job: str = "") -> "LockOwner":
        """Return this process as a lock owner. `task`: value of the field `what`; `job`: value of the field `job`."""
        return cls(task, user_name(os.getuid()), socket.gethostname(), os.getpid(), job, time.time())

    def __str__(self) -> str:
        age, job = max(0, time.time() - self.since), f", job {self.job}" if self.job else ""
        return f"{self.what} of {self.user} on {self.host} (process {self.pid}{job}, for {age:.0f} s)"


class _Replaced(Exception):
    """The opened lock file is no longer the one at its path."""


@contextlib.contextmanager
def hold_lock(path: Path, owner: LockOwner) -> Iterator[int]:
    """Hold the lock file `path` as `owner` during the block, and yield the file's descriptor. If another process holds
    the lock, raise a RecordError that names its owner. On a file system without locks, no process is excluded."""
    handle = take_lock(path, owner)
    try:
        yield handle
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
        os.close(handle)  # the file stays: on NFS, nodes may see a removed file for some seconds


def refuse_replaced(path: Path, handle: int, directory: Path) -> None:
    """Raise RecordError if `path` is no longer the lock file open as `handle`, because `directory` was replaced."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(handle)):
            return
    raise RecordError("it was moved meanwhile", where=str(directory), hint="nothing was changed; try again")


def has_owner(path: Path) -> bool:
    """Return whether the lock file `path` names an owner: a process that holds it, or was killed while holding it."""
    with contextlib.suppress(OSError):
        return bool(read_file(path))
    return False


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock file `path`. False on a file system without locks."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not _lock_open_file(handle)
    finally:
        os.close(handle)


def take_lock(
    path: Path, owner: LockOwner, has_ended: Callable[[LockOwner], bool] = lambda _: False, patience_s: float = 0
) -> int:
    """Take the lock as :func:`hold_lock` does. Return the descriptor of the lock file; closing it releases the lock.
    `patience_s`: seconds to wait if another process holds the lock; `has_ended`: is then called with the owner of the
    lock, and returns whether that owner has ended, so that its lock file can be removed."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if (handle := _try_lock(path, owner)) is not None:
                return handle
        except _Replaced:
            continue
        except OSError as e:
            raise file_error(path, e) from e
        if time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        other_owner = _read_owner(path)
        if other_owner is None or not has_ended(other_owner):
            problem = f"the run directory is in use by {other_owner or 'another process'}"
            hint = "wait until that process ends, `holmes cancel` the run, or end the process"
            raise RecordError(problem, where=str(path.parent), hint=hint)
        with locked(path.with_name(".lock")):  # the lock that protects the run's records
            if _read_owner(path) == other_owner:  # otherwise the file already names a new owner
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _try_lock(path: Path, owner: LockOwner) -> int | None:
    """Lock the file at `path`, write `owner` into it and return its descriptor; None if another process holds the lock.
    Raise _Replaced if another process has put a new file at `path` meanwhile."""
    handle, is_held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), False
    try:
        if not _lock_open_file(handle):
            return None
        opened = os.fstat(handle)  # on NFS, locking has just refreshed the file's status
        if not opened.st_nlink or not os.path.samestat(opened, os.stat(path)):
            raise _Replaced
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps(asdict(owner)) + "\n").encode(), 0)
        os.fsync(handle)  # without this, other NFS clients see the text only after the file is closed
        is_held = True
        return handle
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: on NFS another node removed the file
            raise _Replaced from e
        raise
    finally:
        if not is_held:
            os.close(handle)


def _lock_open_file(handle: int) -> bool:
    """Lock an open file. Return False if another process has locked it; True also on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if e.errno not in _NO_LOCKS:
            raise
    return True


def _read_owner(path: Path) -> LockOwner | None:
    """Return the owner that the lock file names; None if the file names no owner within _NAMING_S seconds."""
    for _ in attempts(_NAMING_S, 0.02):
        with contextlib.suppress(OSError, ValueError, msgspec.ValidationError):
            return msgspec.convert(from_json(read_file(path)), LockOwner)
    return None
