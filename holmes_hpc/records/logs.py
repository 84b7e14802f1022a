"""Functions that read the last lines of a log, follow the ranks' logs, and write into the batch script's log."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holmes_hpc.errors import counted
from holmes_hpc.records.run import RunDirectory
from holmes_hpc.records.untrusted import open_file

SPARSE_STEPS, SPARSE_S = 20, 60.0  # ranks other than 0 log every 20th step, or after 60 s without a line
_PIECE = 1 << 20  # bytes per read


def tail(path: str | os.PathLike[str], lines: int = 20) -> list[str]:
    """Return up to `lines` last lines of a log; none if there is no log. Only the end of the file is read."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - max(4096, 400 * lines))
            file.seek(start)
            text = file.read(size - start).decode("utf-8", errors="replace")
    except OSError:
        return []
    tail_lines = text.splitlines()
    if start and len(tail_lines) > 1:
        tail_lines = tail_lines[1:]  # the first line may lack its start
    return tail_lines[-lines:] if lines else []


def log_batch_line(message: str) -> None:
    """Write a line into the batch script's log. Ignore a full disk or a removed log."""
    with contextlib.suppress(OSError):
        os.write(1, f"holmes: {message}\n".encode(errors="replace"))


class GrowingFile:
    """A file that another process appends to. Each call of :meth:`lines` yields the lines added since the last call.
    A file that became shorter is read again from its start. `from_now`: skip the present content."""

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        self._path, self._rest = path, b""
        self._offset = path.stat().st_size if from_now and path.exists() else 0

    def lines(self) -> Iterator[str]:
        """Yield the new complete lines; none while the file cannot be read."""
        while data := self._read():
            *complete, self._rest = (self._rest + data).split(b"\n")
            for line in complete:
                yield line.decode("utf-8", errors="replace")

    def _read(self) -> bytes:
        try:
            with open_file(self._path) as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read(min(_PIECE, size - self._offset))
        except OSError:
            return b""
        self._offset += len(data)
        return data

    @property
    def rest(self) -> str:
        """The text after the last newline: a line that is not complete yet."""
        return self._rest.decode("utf-8", errors="replace")


def follow_logs(
    run: RunDirectory, done: Callable[[], bool], rank: int | None = None, poll_s: float = 0.5
) -> Iterator[tuple[int, str]]:
    """Yield (rank, line) for each line that the ranks write into their logs, until the run has ended.

    `done`: returns whether the run has ended; `rank`: follow only the log of this rank; None: follow all logs,
    including logs that appear later. A line is yielded when it is complete, or when the run has ended."""
    files: dict[int, GrowingFile] = {}
    while True:
        has_ended = done()  # before reading, so that no line written until then is missed
        for number, path in rank_logs(run) if rank is None else [(rank, run.log_path(rank))]:
            for line in files.setdefault(number, GrowingFile(path)).lines():
                yield number, line
        if has_ended:
            for number, file in sorted(files.items()):
                if file.rest:
                    yield number, file.rest
            return
        time.sleep(poll_s)


def rank_logs(run: RunDirectory) -> list[tuple[int, Path]]:
    """Return (rank, path) of each log of a rank, in order of ranks."""
    numbers = [(p.stem.removeprefix("rank-"), p) for p in run.logs.glob("rank-*.txt")]
    return sorted((int(n), p) for n, p in numbers if n.isdecimal())


def logged_warnings(run: RunDirectory) -> str | None:
    """Return the number of warnings in the log of rank 0 and the log's path as text; None without any."""
    path, stamp = run.log_path(0), len("2026-01-01 00:00:00.000 ")
    count = sum(line[stamp:].startswith("warning: ") for line in GrowingFile(path).lines())
    return f"{counted(count, 'warning')} in {path}" if count else None
