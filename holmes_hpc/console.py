"""Output of the command line: tables, messages on stderr, JSON on stdout; plain text unless on a terminal.

Tables are as wide as $COLUMNS; otherwise as the terminal, or 100 columns without one. Logs, records and names are
untrusted, so their control characters are printed escaped."""

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
from rich.table import Column, Table
from rich.text import Text

WIDTH = 100
MISTAKES = 20  # the most errors of one input that are printed
REFRESH_S = 2.0  # until a live table is drawn again (`holmes status --watch`, `holmes sweep status`)
MIN_WIDTH = 30
MIN_PROSE_WIDTH = 16  # narrower columns of prose move to the next block of the table
NONE = "–"  # a table cell without a value
# Characters that a terminal interprets or hides: control characters except tab and newline, marks that change the
# writing direction, and bytes that are not text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return `text` with control characters escaped: ESC becomes ``\x1b``."""
    return _CONTROL.sub(lambda control: control[0].encode("unicode_escape").decode("ascii"), text)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # as other streams do, for the caller; rich itself would exit with 1


def substitute_unencodable() -> None:
    """Make stdout and stderr replace unencodable characters by similar ASCII ones, instead of raising an error."""
    codecs.register_error("plain", _substitute)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")


def _substitute(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SUBSTITUTES.get(c, "?") for c in error.object[error.start : error.end]), error.end


_SUBSTITUTES = {"–": "-", "—": "-", "…": "...", "×": "x", "µ": "u", "’": "'", "→": "->", "±": "+-"}


def width(stderr: bool = False) -> int:
    """Return the columns to print in: $COLUMNS, else the terminal's width, else 100."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) >= MIN_WIDTH:
        return int(columns)
    stream = sys.stderr if stderr else sys.stdout
    with contextlib.suppress(OSError, ValueError):
        if stream.isatty():
            return max(MIN_WIDTH, os.get_terminal_size(stream.fileno()).columns)
    return WIDTH


def _console(stderr: bool = False) -> Console:
    return _Console(stderr=stderr, width=width(stderr), highlight=False, markup=False, emoji=False, soft_wrap=False)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "", *, stderr: bool = False
) -> None:
    """Print rows as a table, with numbers right-aligned and long cells folded between words.

    Columns that do not fit follow in further blocks; each block repeats the first column."""
    rows = [["" if cell is None else visible(str(cell)) for cell in row] for row in rows]
    columns, title, caption = [visible(name) for name in columns], visible(title), visible(caption)
    console = _console(stderr)
    if title:
        console.print(title, style="italic")
    for block in _blocks([columns, *rows], console.width):
        block_table = Table(box=None, pad_edge=False, header_style="bold")
        widths = _column_widths(
            [[row[i] for i in block] for row in [columns, *rows]], console.width - 2 * (len(block) - 1)
        )
        for index, column_width in zip(block, widths, strict=True):
            cells = [row[index] for row in rows if row[index] not in ("", NONE)]
            is_numeric = bool(cells) and all(_is_number(cell) for cell in cells if cell.strip())
            justify: Any = "right" if is_numeric else "left"
            block_table.add_column(columns[index], justify=justify, overflow="fold", width=column_width)
        for row in rows:
            block_table.add_row(*(row[i] for i in block))
        console.print(block_table)
    if caption:
        console.print(caption, style="dim italic")


def _is_number(cell: str) -> bool:
    """Return whether a cell starts with a number, which may have a sign and end with % or x."""
    return cell.replace(",", "").split()[0].lstrip("+-~").replace(".", "", 1).rstrip("%x").isdecimal()


def _blocks(rows: Sequence[Sequence[str]], max_width: int) -> list[list[int]]:
    """Return the indices of the columns in each block of a table. Each block repeats the first column.

    A block has the columns that fit side by side with at least their :func:`_min_width`."""
    min_widths = [_min_width(column) for column in zip(*rows, strict=True)]
    blocks = [[0]]
    for index in range(1, len(min_widths)):
        if sum(min_widths[i] + 2 for i in blocks[-1]) + min_widths[index] > max_width and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(index)
    return blocks


def _min_width(column: Sequence[str]) -> int:
    """Return the minimum width of a column, without breaking words. Its name may fold between words; its cells may fold
    only if they are longer than MIN_PROSE_WIDTH."""
    name, *cells = column
    longest = max(map(cell_len, cells), default=0)
    return max(_longest_word(name), min(longest, max(MIN_PROSE_WIDTH, *map(_longest_word, cells), 0)))


def _longest_word(cell: str) -> int:
    return max(map(cell_len, cell.split()), default=0)


def _column_widths(rows: Sequence[Sequence[str]], max_width: int) -> list[int | None]:
    """Return a width for each column, such that no word breaks. The widest columns fold first.

    If the columns fit without folding, or cannot fit at all, return None for each, so that rich chooses the widths."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(cell_len, (line for cell in column for line in cell.split("\n")))) for column in columns]
    minimums = ([_min_width(column) for column in columns], [max(map(_longest_word, column)) for column in columns])
    min_widths = next((candidate for candidate in minimums if sum(candidate) <= max_width), None)
    if sum(widths) <= max_width or min_widths is None:
        return [None] * len(columns)
    while sum(widths) > max_width:
        index = max((i for i in range(len(columns)) if widths[i] > min_widths[i]), key=lambda i: widths[i])
        widths[index] -= 1
    return list(widths)


def live_table(
    title: str, caption: str, columns: Sequence[str | Column], rows: Iterable[Sequence[Any]], *, cut: bool = False
) -> Table:
    """Return a table without a frame for a live display. `cut`: cut long cells, instead of folding them."""
    style: Any = {"title_justify": "left", "caption_justify": "left", "box": None, "pad_edge": False}
    table = Table(*columns, title=visible(title), caption=visible(caption), **style)
    for row in rows:
        texts = ("" if cell is None else visible(str(cell)) for cell in row)
        table.add_row(*(Text(text, no_wrap=cut, overflow="ellipsis" if cut else "fold") for text in texts))
    return table


def bars(title: str, values: Sequence[tuple[str, float]]) -> None:
    """Print (name, value) pairs as bars that fill the available width. Values are at least 0."""
    if not values:
        return
    console = _console()
    mark = "█" if "utf" in (console.encoding or "").lower() else "#"
    value_texts = [f"{value:.3g}" for _, value in values]
    name_width = max(cell_len(visible(name)) for name, _ in values)
    bar_width = console.width - max(map(len, value_texts)) - 2
    names_above = name_width > bar_width // 2  # long names have a line of their own
    bar_width -= 0 if names_above else name_width + 2
    largest = max(value for _, value in values) or 1.0
    console.print(f"\n{title}", soft_wrap=True)
    for (name, value), value_text in zip(values, value_texts, strict=True):
        name = visible(name)
        label = f"{name}\n" if names_above else f"{name}{' ' * (name_width - cell_len(name) + 2)}"
        console.print(f"{label}{mark * max(1, round(bar_width * value / largest))} {value_text}", soft_wrap=True)


def text(*lines: str) -> None:
    """Print lines to stdout without wrapping them."""
    for line in lines:
        _console().print(visible(line), soft_wrap=True)


def paragraph(message: str) -> None:
    """Print prose to stdout, wrapped between words."""
    _console().print(visible(message))


def note(*lines: str) -> None:
    """Print lines of progress, or remarks, to stderr."""
    for line in lines:
        _console(stderr=True).print(visible(line), soft_wrap=True)


def problem(message: object) -> None:
    """Print an error and its `others` to stderr, each in a line after the program's name, but at most MISTAKES."""
    errors = (message, *getattr(message, "others", ()))
    more = [f"{len(errors) - MISTAKES} more mistakes"] if len(errors) > MISTAKES else []
    for line in (*errors[:MISTAKES], *more):
        sys.stderr.write(f"holmes: {visible(str(line))}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def waiting(activity: str, after_s: float = 5.0) -> Iterator[None]:
    """Print `activity` and its seconds to stderr every few seconds while the block runs."""
    with steps(activity, after_s):
        yield


@contextlib.contextmanager
def steps(first: str, after_s: float = 8.0) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints each step of longer work to stderr when the step begins. A longer step is printed
    again every `after_s` seconds, with its elapsed time. `first`: the step that runs before the first call."""
    done, lock = threading.Event(), threading.Lock()
    state = [(first, time.monotonic(), time.monotonic())]  # (the step, its start, its last report)

    def report(step: str) -> None:
        with lock:
            state[0] = (step, time.monotonic(), time.monotonic())
            note(step)

    def tick() -> None:
        while not done.wait(after_s / 8):
            with lock:
                (step, started, last_report), now = state[0], time.monotonic()
                if now - last_report > after_s:
                    state[0] = (step, started, now)
                    note(f"{step}: {now - started:.0f} s")

    threading.Thread(target=tick, daemon=True).start()
    try:
        yield report
    finally:
        done.set()


class Progress:
    """A callback (activity, done, total) that reports on stderr every few seconds, and at the end."""

    def __init__(self, every_s: float = 2.0) -> None:
        self._every_s, self._last_report, self._activity, self._done = every_s, time.monotonic(), "", -1.0

    def __call__(self, activity: str, done: float, total: float) -> None:
        now, is_same = time.monotonic(), activity == self._activity
        is_too_early = now - self._last_report < self._every_s and done < total
        if is_same and (is_too_early or done == self._done):
            return
        self._last_report, self._activity, self._done = now, activity, done
        note(f"{activity}: {done / total:4.0%}" if total else activity)


def ask(question: str) -> str | None:
    """Return the answer typed at the terminal, in lower case; None without a terminal."""
    with contextlib.suppress(EOFError):
        return input(question).strip().lower() if sys.stdin.isatty() else None
    return None


def as_json(document: Any) -> None:
    """Print one JSON document on stdout, with control characters escaped as JSON allows."""
    ascii_only = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") != "utf8"
    document_text = json.dumps(document, indent=1, ensure_ascii=ascii_only, default=str)
    sys.stdout.write(_CONTROL.sub(lambda control: f"\\u{ord(control[0]):04x}", document_text) + "\n")


def outcome(result: Any, json: bool) -> None:
    """Print the result of a command, a dataclass: as one JSON document if `json`, else its ``str``."""
    if json:
        as_json(asdict(result))
    else:
        text(str(result))


def output(json: bool, document: Any, *tables: Sequence[Any]) -> None:
    """Print `document` as JSON if `json`, else the tables, each given as the arguments of :func:`table`."""
    if json:
        as_json(document)
        return
    for arguments in tables:
        table(*arguments)


def seconds(value: float) -> str:
    """Format a duration with four digits: 1.234 s, 45.6 ms, 19.06 us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.2g} us" if value else "0 s"


def data_size(count: float | None) -> str:
    """Format a number of bytes, as in 1.50 GB for 1.5e9; a dash if the number is unknown."""
    if count is None or not math.isfinite(count):
        return NONE
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
