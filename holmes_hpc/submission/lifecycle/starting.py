"""Starting a run's job, one at a time: who looks at a run in order to submit it holds it until its job is recorded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from holmes_hpc.errors import RecordError
from holmes_hpc.records.owner import LockOwner, has_owner, hold_lock
from holmes_hpc.records.ownership import refuse_other_writers
from holmes_hpc.records.run import RunDirectory

LOCK = ".starting"


@contextlib.contextmanager
def starting(path: Path, what: str) -> Iterator[None]:
    """Hold the run directory `path`, which is made where there is none, while `what` (a verb) starts its job.
    RecordError where somebody else is starting it, or where others than its owner may write."""
    refuse_other_writers(path)
    made = not path.exists()
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as e:
        raise RecordError(
            e.strerror or str(e),
            where=str(path),
            hint="give a directory that can be made, on a file system all nodes share",
        ) from e
    refuse_other_writers(path)  # again: in a sticky folder somebody else may have been quicker
    try:
        with hold_lock(path / LOCK, LockOwner.current(what)):
            try:
                yield
            finally:
                if not RunDirectory(path).exists():  # nothing came of it
                    with contextlib.suppress(OSError):
                        os.unlink(path / LOCK)
    finally:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def is_starting(path: Path) -> bool:
    """Whether somebody starts the job of the run in `path`, or was killed at it."""
    return has_owner(path / LOCK)


def others(path: Path) -> list[str]:
    """What lies in `path` besides the lock."""
    return sorted(name for name in os.listdir(path) if name != LOCK) if path.is_dir() else []
