"""Heterogeneous jobs that wait in line, so that never more than n of them run: ``python -m ….line FILE JOB_ID``.

They are no arrays. Each but the first n waits for one before it (``afterany``); that holds whatever becomes of the
client and of the batch scripts. When a job ends, the last words of its batch script let the first of those that wait
take its place, and the one that waited for it waits for that one's predecessor instead: so a long job holds up nobody.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holmes_hpc.errors import HolmesError
from holmes_hpc.records.files import locked, write_whole
from holmes_hpc.slurm.commands import slurm


@dataclass
class Places:
    """`order`: the jobs as they were submitted; `waits`: which one a job waits for; `ended`: those whose batch script
    came to its end; `own`: dependencies that every job has besides."""

    order: list[str] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    own: str = ""

    def next_place(self, most: int) -> str | None:
        """The job that the next one to be submitted has to wait for; None: it need not."""
        if len(self.order) < most:
            return None
        last = [job for job in self.order if job not in self.waits.values()]  # nobody waits for these
        if any(job in self.ended for job in last):
            self.order.remove(next(job for job in last if job in self.ended))  # its place is taken
            return None
        return last[0]

    def behind(self, job: str) -> str | None:
        return next((other for other, before in self.waits.items() if before == job), None)

    def dependency(self, job: str) -> str:
        return ",".join(d for d in (self.own, f"afterany:{job}") if d)


@dataclass
class Line:
    """A file of :class:`Places` on a file system that all nodes share; `most` jobs of it run at a time."""

    path: Path
    most: int

    def enter(self, own: str | None, submit: Callable[[str | None], Any]) -> Any:
        """Return the job that `submit` makes of its dependency: `own`, and one by its place. Nobody else moves."""
        with _held(self.path) as places:
            places.own = own or ""
            before = places.next_place(self.most)
            job = submit(own if before is None else places.dependency(before))
            places.order.append(job.job_id)
            if before is not None:
                places.waits[job.job_id] = before
        return job


@contextlib.contextmanager
def _held(path: Path) -> Iterator[Places]:
    """The places in a file, to change: one process at a time, on all nodes."""
    with locked(path.with_name(f"{path.name}.lock"), wait_s=60):
        try:
            places = Places(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            places = Places()
        yield places
        write_whole(path, json.dumps(asdict(places)))


def leave(path: Path, job: str) -> None:
    """`job` is about to end: the first of those that still wait shall follow it."""
    with _held(path) as places:
        if job in places.ended:
            return
        places.ended.append(job)
        behind = places.behind(job)
        for first in places.order:
            before = places.waits.get(first)
            if first == behind:
                return  # it starts by itself
            if before is None or before in places.ended:
                continue  # it runs, or waits for nothing but nodes
            if not _let_wait(first, places.dependency(job)):
                del places.waits[first]  # it runs, or was cancelled
                continue
            places.waits[first] = job
            if behind is not None and _let_wait(behind, places.dependency(before)):
                places.waits[behind] = before
            return


def _let_wait(job: str, dependency: str) -> bool:
    return slurm("scontrol", "update", f"JobId={job}", f"Dependency={dependency}", timeout_s=10).ok


def main(words: list[str]) -> int:
    try:
        leave(Path(words[0]), words[1])
    except (HolmesError, OSError, ValueError) as e:  # the line goes on all the same, if more slowly
        print(f"holmes: {e}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
