"""A file to which one process appends lines, and which survives a disk that is full for a short time."""

import time
from collections.abc import Callable
from pathlib import Path

from holmes_hpc.errors import RunFailed
from holmes_hpc.records.files import DISK_FULL, append_line

FULL_S, MAX_WAITING = 120.0, 10_000  # seconds of a full disk, and lines in memory, after which the run fails
RETRY_S = 0.5


class LineFile:
    """The lines that one process appends to the file `path`. `waiting`: those that wait in memory for a full disk."""

    def __init__(self, path: Path) -> None:
        self._path, self.waiting, self._full_since = path, list[str](), 0.0

    def append(self, *lines: str, warn: Callable[[str], object] = str) -> None:
        """Append the waiting lines and `lines`. `warn`: what to call with a warning when the disk becomes full, and
        when it has space again. Raise RunFailed for any other error, or if the disk stays full for too long."""
        self.waiting += lines
        try:
            if self.waiting:
                append_line(self._path, "\n".join(self.waiting))
        except RunFailed as e:
            now, is_full = time.monotonic(), isinstance(e.__cause__, OSError) and e.__cause__.errno in DISK_FULL
            if not is_full or now - (self._full_since or now) > FULL_S or len(self.waiting) > MAX_WAITING:
                raise
            if not self._full_since:
                self._full_since = now
                warn(f"warning: {e.where}: {e.what}; lines wait in memory for at most {FULL_S:.0f} s")
            return
        if self._full_since:
            warn(f"{self._path}: {len(self.waiting)} lines written after {time.monotonic() - self._full_since:.0f} s")
        self.waiting, self._full_since = [], 0.0

    def finish(self) -> None:
        """Write the waiting lines, as soon as the disk has space. Raise RunFailed as :meth:`append` does."""
        self.append()
        while self.waiting:
            time.sleep(RETRY_S)
            self.append()
