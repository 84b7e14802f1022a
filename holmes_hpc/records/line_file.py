"""A file to which one process appends lines, and which survives a disk that is full for a short time."""

import time
from collections.abc import Callable
from pathlib import Path

from holmes_hpc.errors import RunFailed
from holmes_hpc.records.files import append_line, is_disk_full

FULL_S, MAX_WAITING = 120.0, 10_000  # seconds of a full disk, and lines in memory, after which the run fails
RETRY_S = 0.5


class LineFile:
    """The lines that one process appends to the file `path`. While the disk is full, they wait in memory."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting, self._full_since = path, list[str](), 0.0

    @property
    def is_behind(self) -> bool:
        """Whether lines wait in memory."""
        return bool(self._waiting)

    def append(self, *lines: str, warn: Callable[[str], object] = str) -> None:
        """Append the waiting lines and `lines`. `warn`: what to call with a warning when the disk becomes full, and
        when it has space again. Raise RunFailed for any other error, or if the disk stays full for too long."""
        self._waiting += lines
        try:
            if self._waiting:
                append_line(self._path, "\n".join(self._waiting))
        except RunFailed as e:
            now, is_first = time.monotonic(), not self._full_since
            self._full_since = self._full_since or now
            if not is_disk_full(e) or now - self._full_since > FULL_S or len(self._waiting) > MAX_WAITING:
                raise
            if is_first:
                warn(f"warning: {e.where}: {e.what}; lines wait in memory for at most {FULL_S:.0f} s")
            return
        if self._full_since:
            warn(f"{self._path}: {len(self._waiting)} lines written after {time.monotonic() - self._full_since:.0f} s")
        self._waiting, self._full_since = [], 0.0

    def finish(self) -> None:
        """Write the waiting lines, as soon as the disk has space. Raise RunFailed as :meth:`append` does."""
        self.append()
        while self._waiting:
            time.sleep(RETRY_S)
            self.append()
