"""What the ranks are saying: the end of a log, and all logs as they grow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from holmes_hpc.records.run import RunDirectory


def tail(path: str | os.PathLike[str], lines: int = 20) -> list[str]:
    """The last lines of a log, without reading all of it; empty when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - max(4096, 400 * lines))
            file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    found = text.splitlines()
    if start and found:
        found = found[1:]  # begins in the middle of a line
    return found[-lines:]


def follow(run: RunDirectory, done: Callable[[], bool], ranks: Sequence[int] | None = None,
           poll_s: float = 0.5) -> Iterator[tuple[int, str]]:
    """(rank, line) as the ranks write their logs, until `done()` says that the run has ended and all lines are out.

    `ranks`: only these (default: every log there is, also those that appear later). Lines are whole; one that a rank
    never finished comes at the end.
    """
    seen: dict[int, int] = {}
    rests: dict[int, bytes] = {}
    while True:
        ended = done()  # asked before reading: nothing written until then is missed
        for rank, path in _logs(run, ranks):
            try:
                with open(path, "rb") as file:
                    file.seek(seen.get(rank, 0))
                    new = file.read()
            except OSError:
                continue
            seen[rank] = seen.get(rank, 0) + len(new)
            *whole, rests[rank] = (rests.get(rank, b"") + new).split(b"\n")
            for line in whole:
                yield rank, line.decode("utf-8", errors="replace")
        if ended:
            for rank, rest in sorted(rests.items()):
                if rest:
                    yield rank, rest.decode("utf-8", errors="replace")
            return
        time.sleep(poll_s)


def _logs(run: RunDirectory, ranks: Sequence[int] | None) -> list[tuple[int, Path]]:
    if ranks is not None:
        return [(rank, run.log_path(rank)) for rank in ranks]
    numbers = [(p.stem.removeprefix("rank-"), p) for p in run.logs.glob("rank-*.txt")]
    return sorted((int(n), p) for n, p in numbers if n.isdigit())
