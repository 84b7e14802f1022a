"""The log of a rank: a copy of everything that the process prints, and lines with a time stamp."""

import contextlib
import faulthandler
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.training.rank.launch import Launch


class Tee:
    """A standard output or error stream that also writes to the log."""

    def __init__(self, stream: IO[str], log: IO[str]) -> None:
        self._stream, self._log = stream, log

    def fileno(self) -> int:
        """Return the log's descriptor, because faulthandler writes stack traces to it, and these belong in the log."""
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
    """The file logs/rank-N.txt with everything that this rank prints.

    If the launcher (srun, submitit) already redirects the rank's output to this file, the streams stay unchanged.
    Otherwise rank 0 prints to both its terminal and the file. Other ranks print only standard error to both.
    """

    def __init__(self, run: RunDirectory, launch: Launch) -> None:
        path = run.log_path(launch.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._saved_streams = sys.stdout, sys.stderr
        self._file: IO[str] | None = None
        if not _stdout_is(path):
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed at the end of the rank)
            out: Any = Tee(sys.stdout, self._file) if launch.rank == 0 else self._file
            sys.stdout, sys.stderr = out, Tee(sys.stderr, self._file)
        faulthandler.enable(self._file or sys.stderr)

    def close(self) -> None:
        """Restore the process's standard streams."""
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = self._saved_streams
        faulthandler.disable()
        if self._file is not None:
            self._file.close()


def _stdout_is(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(1), os.stat(path))
    except (OSError, ValueError):
        return False


def log_line(text: str) -> None:
    """Log one line with a time stamp. On a full disk it waits for the next line."""
    with contextlib.suppress(OSError):
        print(f"{datetime.now().strftime('%Y-%m-%d %H:%M:%S.%f')[:-3]} {text}", flush=True)


def one_line(error: BaseException) -> str:
    """Return an error as one line. Errors from outside this package start with their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, HolmesError) else f"{type(error).__name__}: {text}"[:500]
