"""One holder at a time: who is starting a run's job, and which attempt trains into its directory.

A holder keeps a lock file open, locked; the kernel lets go of it when the holder's process ends, however that ends, on
NFS too (the server's lock). The file says who holds it. Where a node died the server may keep its lock for a while:
then the state of the holder's job tells that it is over, and another file takes the place of the locked one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from holmes_hpc.errors import RecordError
from holmes_hpc.records.files import failed, locked
from holmes_hpc.records.untrusted import from_json, read_file

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_TAKES_A_MOMENT_S = 0.5  # a holder that has just locked the file and not yet said who it is


@dataclass(frozen=True)
class LockOwner:
    """`what`: what it does, in words; `job`: the Slurm job it belongs to, as JOB_ID/RESTARTS; `since`: Unix seconds."""

    what: str
    user: str
    host: str
    pid: int
    job: str
    since: float

    @classmethod
    def current(cls, what: str, job: str = "") -> LockOwner:
        """This process."""
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:
            user = str(os.getuid())
        return cls(what, user, socket.gethostname(), os.getpid(), job, time.time())

    def __str__(self) -> str:
        age, job = max(0, time.time() - self.since), f", job {self.job.partition('/')[0]}" if self.job else ""
        return f"{self.what} of {self.user} on {self.host} (process {self.pid}{job}, for {age:.0f} s)"


class _Gone(Exception):
    """The file that was opened is no longer the one at its path."""


@contextlib.contextmanager
def hold_lock(path: Path, own: LockOwner, is_over: Callable[[LockOwner], bool] = lambda _: False) -> Iterator[None]:
    """Hold the lock file `path` as `own`. RecordError where somebody else holds it, who it is in it, unless `is_over`
    says that its job has ended. On a file system without locks nothing is held, and nothing refused."""
    handle = take_lock(path, own, is_over)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
        os.close(handle)  # the file stays: on NFS a node may go on seeing for seconds one that another has removed


def has_owner(path: Path) -> bool:
    """Whether somebody holds the lock file `path`, or was killed while holding it."""
    try:
        return bool(read_file(path))
    except OSError:
        return False


def take_lock(
    path: Path, own: LockOwner, is_over: Callable[[LockOwner], bool] = lambda _: False, patience_s: float = 0
) -> int:
    """As :func:`held`, for as long as this process lives: the open file comes back. `patience_s`: for a holder that
    may just be ending."""
    until = time.monotonic() + patience_s
    while True:
        try:
            if (handle := _attempt(path, own)) is not None:
                return handle
        except _Gone:
            continue
        except OSError as e:
            raise failed(path, e) from e
        if time.monotonic() < until:
            time.sleep(0.1)
            continue
        other = _said(path)
        if other is None or not is_over(other):
            raise RecordError(
                f"it is taken by {other or 'another process'}",
                where=str(path.parent),
                hint="wait for its end, `holmes cancel` the run, or end that process",
            )
        _put_away(path, other)


def _attempt(path: Path, own: LockOwner) -> int | None:
    """The file at `path`, open, locked and saying who has it; None where somebody else has it. _Gone where it is
    another file by now."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    kept = False
    try:
        if not _locked(handle):
            return None
        opened = os.fstat(handle)  # on NFS as the server has it, since it has just been locked
        if not opened.st_nlink or not os.path.samestat(opened, os.stat(path)):
            raise _Gone
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps(asdict(own)) + "\n").encode(), 0)
        os.fsync(handle)  # on NFS other nodes would not see it before the file is closed
        kept = True
        return handle
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ESTALE):  # ESTALE: what NFS says of a file that another node has removed
            raise _Gone from e
        raise
    finally:
        if not kept:
            os.close(handle)


def _put_away(path: Path, over: LockOwner) -> None:
    """Remove the lock file of a holder that is over, once: who sees it too may find another's new file there."""
    with locked(path.with_name(".lock")):  # as whoever changes the run's record
        if _said(path) == over:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _locked(handle: int) -> bool:
    """Lock an open file, if nobody else has."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if e.errno not in _NO_LOCKS:
            raise
    return True


def _said(path: Path) -> LockOwner | None:
    """Who holds the file, as it says; None where it does not say in time."""
    end = time.monotonic() + _TAKES_A_MOMENT_S
    while True:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            said = from_json(read_file(path))
            return LockOwner(
                str(said["what"]),
                str(said["user"]),
                str(said["host"]),
                int(said["pid"]),
                str(said["job"]),
                float(said["since"]),
            )
        if time.monotonic() > end:
            return None
        time.sleep(0.02)
