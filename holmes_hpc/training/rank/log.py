"""A rank's log: everything that the process prints, in a file of its own as well, and lines with the time."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from datetime import datetime
from typing import IO, Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.rank.launch import Launch


class Tee:
    """Standard output or error whose text goes into the log as well."""

    def __init__(self, stream: IO[str], log: IO[str]) -> None:
        self._stream, self._log = stream, log

    def fileno(self) -> int:
        """Return the log's: what writes to a descriptor (a dump of stacks) belongs there."""
        return self._log.fileno()

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return self._log.write(text)

    def flush(self) -> None:
        for stream in (self._stream, self._log):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RankLog:
    """logs/rank-N.txt: all that this rank prints. Where the launcher (srun, submitit) already sends the rank's output
    there, nothing is doubled; else rank 0 goes on to speak to its terminal too, the others keep to their log."""

    def __init__(self, run: RunDirectory, launch: Launch) -> None:
        path = run.log_path(launch.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._saved = sys.stdout, sys.stderr
        self._file: IO[str] | None = None
        if not _same_file(path):
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed at the end of the rank)
            out: Any = Tee(sys.stdout, self._file) if launch.rank == 0 else self._file
            sys.stdout, sys.stderr = out, Tee(sys.stderr, self._file)
        faulthandler.enable(self._file or sys.stderr)

    def close(self) -> None:
        """Give the process its own streams back."""
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = self._saved
        faulthandler.disable()
        if self._file is not None:
            self._file.close()


def _same_file(path: Any) -> bool:
    try:
        return os.path.samestat(os.fstat(1), os.stat(path))
    except (OSError, ValueError):
        return False


def say(text: str) -> None:
    """Log one line with the time."""
    print(f"{datetime.now().strftime('%Y-%m-%d %H:%M:%S.%f')[:-3]} {text}", flush=True)


def one_line(error: BaseException) -> str:
    """Return an error as a line. Errors of our own tell what to do; others tell their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, HolmesError) else f"{type(error).__name__}: {text}"[:500]
