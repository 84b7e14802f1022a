"""What a sweep's jobs do, while Hydra waits for them: a live table on a terminal, else a line whenever something
changes; at the end the table as it is then."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from holmes_hpc import console
from holmes_hpc.submission.sweeps.jobs import states
from holmes_hpc.submission.sweeps.manifest import Manifest
from holmes_hpc.submission.sweeps.returns import Launched
from holmes_hpc.submission.sweeps.status_table import SweepRow, live_table, on_terminal, row_of, sweep_rows

EVERY_S = 2.0  # a look at the jobs
SAID_S = 8.0  # at most so long, and EVERY_S, nothing is said
log = logging.getLogger(__name__)


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Of the jobs `launched` (others may be added to the list). Inside, :meth:`show` may be called at any rate."""

    def __init__(self, manifest: Manifest, launched: Sequence[Launched]) -> None:
        self._manifest, self._launched = manifest, launched
        self._looked = self._said = time.monotonic()
        self._told: list[tuple[str, int | None]] = []
        self._live: Any = None

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def rows(self, mode: str = "standard") -> list[SweepRow]:
        jobs = [job.entry for job in self._launched]
        return [row_of(self._manifest, job, state) for job, state in states(self._manifest, jobs, mode).items()]

    def show(self) -> None:
        now = time.monotonic()
        if now - self._looked < EVERY_S:
            return
        self._looked = now
        rows = self.rows()
        if sys.stdout.isatty():
            if self._live is None:
                self._live = on_terminal()
                self._live.start()
            self._live.update(
                live_table(str(self._manifest.path.parent), rows, self._live.console.height), refresh=True
            )
            return
        told = [(row.state, row.step) for row in rows]
        if ([t[0] for t in told] != [t[0] for t in self._told]) or now - self._said >= SAID_S:
            self._told, self._said = told, now
            log.info(in_a_line(rows))

    def conclude(self) -> None:
        """The table at the end."""
        self.__exit__(None, None, None)
        with contextlib.suppress(OSError):
            console.table(str(self._manifest.path.parent), *sweep_rows(self.rows("cache")))
            if any(job.entry.kind == "plan" for job in self._launched):
                console.note(f"`holmes report {self._manifest.path.parent} --by loss` compares them")


def in_a_line(rows: Sequence[SweepRow]) -> str:
    """``2 running, 1 pending: #0 step 5, loss 3.21; #1 step 4, loss 3.3; #2 waits (Resources)``"""
    counts = ", ".join(f"{count} {state}" for state, count in Counter(row.state for row in rows).most_common())
    said = []
    for row in rows:
        if row.why:
            said.append(f"#{row.num} waits ({row.why})")
        elif not row.ended and row.step is not None:
            said.append(f"#{row.num} step {row.step}" + ("" if row.loss is None else f", loss {row.loss:.4g}"))
    more = f"; and {len(said) - 4} more" if len(said) > 4 else ""
    return counts + (": " + "; ".join(said[:4]) + more if said else "")
