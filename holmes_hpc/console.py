"""How the command line prints: tables 100 columns wide, messages on stderr, JSON on stdout. Plain text when not a
terminal. Logs, records and names are other people's words: control characters in them are shown, never sent."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

WIDTH = 100
NONE = "–"  # in a cell of a table: no value
# What a terminal obeys or hides: control characters of both sets but tab and newline, marks that turn the direction of
# writing, and bytes that are no text.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` with what a terminal would obey written out: an escape is ``\\x1b``."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # as of any other stream; rich's own ends the program with 1


def _console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH
    return _Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "",
          *, stderr: bool = False) -> None:
    """Print rows as a table; numbers are right-aligned, long cells fold."""
    rows = [["" if cell is None else visible(str(cell)) for cell in row] for row in rows]
    columns = [visible(name) for name in columns]
    out = Table(title=visible(title) or None, caption=visible(caption) or None, title_justify="left",
                caption_justify="left", box=None, pad_edge=False, header_style="bold")
    console = _console(stderr)
    widths = _widths([columns, *rows], console.width - 2 * (len(columns) - 1))
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows if row[index]]
        numeric = bool(cells) and all(c.replace(",", "").split()[0].lstrip("+-~").replace(".", "", 1).rstrip("%x")
                                      .isdigit() for c in cells if c.strip())
        out.add_column(name, justify="right" if numeric else "left", overflow="fold", width=widths[index])
    for row in rows:
        out.add_row(*row)
    console.print(out)


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int | None]:
    """A width for each column such that no word is broken, the widest columns folding first; None where they fit as
    they are, or cannot."""
    cells = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, (line for cell in column for line in cell.split("\n")))) for column in cells]
    least = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    if sum(widths) <= room or sum(least) > room:
        return [None] * len(cells)
    while sum(widths) > room:
        index = max((i for i in range(len(cells)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[index] -= 1
    return list(widths)


def text(message: str = "") -> None:
    """Print lines to stdout as they are."""
    _console().print(visible(message), soft_wrap=True)


def paragraph(message: str) -> None:
    """Print prose to stdout, wrapped between words."""
    _console().print(visible(message))


def note(message: str) -> None:
    """Progress and remarks: stderr, one line."""
    _console(stderr=True).print(visible(message), soft_wrap=True)


def problem(message: object) -> None:
    """What went wrong, in one line: stderr, after the program's name."""
    sys.stderr.write(f"holmes: {visible(str(message))}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def waiting(what: str, after_s: float = 5.0) -> Iterator[None]:
    """Say every few seconds that `what` is still going on, when it takes long."""
    done, began = threading.Event(), time.monotonic()

    def tick() -> None:
        while not done.wait(after_s):
            note(f"{what}: {time.monotonic() - began:.0f} s")

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Progress:
    """Called with (what, done, total) as often as one likes; says so on stderr every few seconds, and at the end."""

    def __init__(self, every_s: float = 2.0) -> None:
        self._every_s, self._said, self._what = every_s, time.monotonic(), ""

    def __call__(self, what: str, done: float, total: float) -> None:
        now = time.monotonic()
        if (what == self._what and now - self._said < self._every_s and done < total) or (what, done) == self._last:
            return
        self._said, self._what, self._last = now, what, (what, done)
        note(f"{what}: {done / total:4.0%}" if total else what)

    _last: tuple[str, float] = ("", -1.0)


def as_json(document: Any) -> None:
    """Print one JSON document on stdout; what a terminal would obey is escaped as JSON does, so it stays the same."""
    written = json.dumps(document, indent=1, ensure_ascii=False, default=str)
    sys.stdout.write(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", written) + "\n")


def data_size(count: float | None) -> str:
    """Bytes for people: 1.5 GB is 1.5e9 bytes; a dash where the number is not known."""
    if count is None or not math.isfinite(count):
        return NONE
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
