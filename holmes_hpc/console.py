"""How the command line prints: tables as wide as the terminal (or $COLUMNS, or 100), messages on stderr, JSON on
stdout. Plain text when not a terminal. Logs, records and names are other people's words: control characters in them are
shown, never sent."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

WIDTH = 100
NARROWEST = 30
LEGIBLE = 16  # a column of prose is not made narrower while it can stand below
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


def speak_plainly() -> None:
    """Let a terminal or a pipe that knows only ASCII get something like each character, and no program end for it."""
    codecs.register_error("plain", _like)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")


def _like(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_LIKE.get(c, "?") for c in error.object[error.start : error.end]), error.end


_LIKE = {"–": "-", "—": "-", "…": "...", "×": "x", "µ": "u", "’": "'", "→": "->", "±": "+-"}


def width(stderr: bool = False) -> int:
    """Columns to print in: $COLUMNS where it is a number, the terminal's, or 100 where there is none."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) >= NARROWEST:
        return int(said)
    stream = sys.stderr if stderr else sys.stdout
    with contextlib.suppress(OSError, ValueError):
        if stream.isatty():
            return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns)
    return WIDTH


def _console(stderr: bool = False) -> Console:
    return _Console(stderr=stderr, width=width(stderr), highlight=False, markup=False, emoji=False, soft_wrap=False)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", *, stderr: bool = False
) -> None:
    """Print rows as a table; numbers are right-aligned, long cells fold between words. Columns for which there is no
    room come below, each row again named by the first."""
    rows = [["" if cell is None else visible(str(cell)) for cell in row] for row in rows]
    columns, title, caption = [visible(name) for name in columns], visible(title), visible(caption)
    console = _console(stderr)
    if title:
        console.print(title, style="italic")
    for block in _blocks([columns, *rows], console.width):
        out = Table(box=None, pad_edge=False, header_style="bold")
        widths = _widths([[row[i] for i in block] for row in [columns, *rows]], console.width - 2 * (len(block) - 1))
        for index, room in zip(block, widths, strict=True):
            cells = [row[index] for row in rows if row[index] not in ("", NONE)]
            numeric = bool(cells) and all(
                c.replace(",", "").split()[0].lstrip("+-~").replace(".", "", 1).rstrip("%x").isdecimal()
                for c in cells
                if c.strip()
            )
            out.add_column(columns[index], justify="right" if numeric else "left", overflow="fold", width=room)
        for row in rows:
            out.add_row(*(row[i] for i in block))
        console.print(out)
    if caption:
        console.print(caption, style="dim italic")


def _blocks(rows: Sequence[Sequence[str]], room: int) -> list[list[int]]:
    """The columns that stand side by side without a broken word, and without a column of single words, block by block;
    the first is in all of them."""
    least = [_legible(column) for column in zip(*rows, strict=True)]
    blocks = [[0]]
    for index in range(1, len(least)):
        if sum(least[i] + 2 for i in blocks[-1]) + least[index] > room and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(index)
    return blocks


def _legible(column: Sequence[str]) -> int:
    """The least width of a column: its name folds between any words, its cells only where they are prose."""
    name, *cells = column
    longest = max(map(cell_len, cells), default=0)
    return max(_longest_word(name), min(longest, max(LEGIBLE, *map(_longest_word, cells), 0)))


def _longest_word(cell: str) -> int:
    return max(map(cell_len, cell.split()), default=0)


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int | None]:
    """A width for each column such that no word is broken, the widest columns folding first; None where they fit as
    they are, or cannot."""
    cells = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, (line for cell in column for line in cell.split("\n")))) for column in cells]
    ways = ([_legible(column) for column in cells], [max(map(_longest_word, column)) for column in cells])
    least = next((way for way in ways if sum(way) <= room), None)
    if sum(widths) <= room or least is None:
        return [None] * len(cells)
    while sum(widths) > room:
        index = max((i for i in range(len(cells)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[index] -= 1
    return list(widths)


def bars(title: str, values: Sequence[tuple[str, float]]) -> None:
    """Print named values of 0 and above as bars from 0 on, as long as the room allows; nothing for no values."""
    if not values:
        return
    console = _console()
    mark = "█" if "utf" in (console.encoding or "").lower() else "#"
    told = [f"{value:.3g}" for _, value in values]
    names = max(cell_len(visible(name)) for name, _ in values)
    room = console.width - max(map(len, told)) - 2
    above = names > room // 2  # no room beside such names: each on a line of its own
    room -= 0 if above else names + 2
    most = max(value for _, value in values) or 1.0
    console.print(f"\n{title}", soft_wrap=True)
    for (name, value), said in zip(values, told, strict=True):
        name = visible(name)
        lead = f"{name}\n" if above else f"{name}{' ' * (names - cell_len(name) + 2)}"
        console.print(f"{lead}{mark * max(1, round(room * value / most))} {said}", soft_wrap=True)


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
    with steps(what, after_s):
        yield


@contextlib.contextmanager
def steps(first: str, after_s: float = 8.0) -> Iterator[Callable[[str], None]]:
    """What is called with each step of a longer work, and says it; a step that takes long is said again, with its
    seconds. `first`: what goes on before the first call."""
    done, lock = threading.Event(), threading.Lock()
    said = [(first, time.monotonic(), time.monotonic())]  # the step, its begin, when it was said

    def say(what: str) -> None:
        with lock:
            said[0] = (what, time.monotonic(), time.monotonic())
            note(what)

    def tick() -> None:
        while not done.wait(after_s / 8):
            with lock:
                (what, began, last), now = said[0], time.monotonic()
                if now - last > after_s:
                    said[0] = (what, began, now)
                    note(f"{what}: {now - began:.0f} s")

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield say
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


def ask(question: str) -> str | None:
    """Return what is typed at a question on the terminal, in lower case; None where there is nobody to ask."""
    with contextlib.suppress(EOFError):
        return input(question).strip().lower() if sys.stdin.isatty() else None
    return None


def as_json(document: Any) -> None:
    """Print one JSON document on stdout; what a terminal would obey is escaped as JSON does, so it stays the same."""
    plain = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") != "utf8"
    written = json.dumps(document, indent=1, ensure_ascii=plain, default=str)
    sys.stdout.write(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", written) + "\n")


def outcome(result: Any, json: bool) -> None:
    """Print what a command made, a dataclass: one JSON document, or its text."""
    if json:
        as_json(asdict(result))
    else:
        text(str(result))


def output(json: bool, document: Any, *tables: Sequence[Any]) -> None:
    """Print one JSON document, or tables: the arguments of :func:`table`."""
    if json:
        as_json(document)
        return
    for arguments in tables:
        table(*arguments)


def seconds(value: float) -> str:
    """A duration for people, with four digits: 1.234 s, 45.6 ms, 19.06 us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.2g} us" if value else "0 s"


def data_size(count: float | None) -> str:
    """Bytes for people: 1.5 GB is 1.5e9 bytes; a dash where the number is not known."""
    if count is None or not math.isfinite(count):
        return NONE
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
