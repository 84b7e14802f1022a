"""Reading what somebody else may have written: a text that is no YAML, no JSON, or that would crash or fill who reads
it, is an error like any other, and a pipe or a device in the place of a file is not waited for.

libyaml and pyarrow's JSON reader go down one level of C's stack a level of nesting, and crash where it ends.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from typing import Any, BinaryIO

import yaml

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the quick one, where it is built
MOST_LEVELS = 100  # of nesting; what holmes writes has about ten
MOST_REPEATED = 100_000  # values that aliases may add where a text is written out
MOST_DIGITS = 300
_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_:]*")  # Python writes out none of over 4300 digits
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """The file at `path`, to be read. OSError, also where it is a pipe, a device or a socket, which may never end."""
    mode = os.stat(path).st_mode  # before it is opened: that would wait for a pipe's writer
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "Not a file")
    return open(path, "rb")


def read_file(path: str | os.PathLike[str]) -> bytes:
    """What the file at `path` holds; OSError as :func:`open_file`."""
    with open_file(path) as file:
        return file.read()


def from_yaml(text: str) -> Any:
    """A YAML text as plain data, without code. yaml.YAMLError for whatever cannot be read."""
    try:
        _measure(text)
        return yaml.load(text, Loader=SAFE_LOADER)  # noqa: S506 (a safe loader)
    except (ValueError, OverflowError, RecursionError) as e:  # a 13th month, a number of 5000 digits
        raise yaml.YAMLError(str(e)) from e


def _measure(text: str) -> None:
    """YAMLError for a text that is nested too deeply to be read, or too large once its aliases are written out."""
    sizes: dict[str, int] = {}  # of what has an anchor
    open_now: list[tuple[str | None, int]] = []  # (anchor, values before it)
    values = repeated = 0
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        if isinstance(event, yaml.ScalarEvent):
            values += 1
            if event.anchor:
                sizes[event.anchor] = 1
            if len(event.value) > MOST_DIGITS and event.implicit[0] and _NUMBER.fullmatch(event.value):
                raise yaml.YAMLError(f"a number of {len(event.value)} digits, {_place(event)}")
        elif isinstance(event, yaml.CollectionStartEvent):
            open_now.append((event.anchor, values))
            values += 1
            if len(open_now) > MOST_LEVELS:
                raise yaml.YAMLError(f"nested more than {MOST_LEVELS} levels deep, {_place(event)}")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_now.pop()
            if anchor:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise yaml.YAMLError(f"alias {event.anchor!r} of nothing before it, {_place(event)}")
            values += sizes[event.anchor]
            repeated += sizes[event.anchor]
            if repeated > MOST_REPEATED:
                raise yaml.YAMLError(f"its aliases repeat more than {MOST_REPEATED} values, {_place(event)}")


def _place(event: Any) -> str:
    return f"line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"


def from_json(text: str | bytes) -> Any:
    """A JSON text as plain data. ValueError for whatever cannot be read."""
    data = text.encode("utf-8", errors="surrogatepass") if isinstance(text, str) else text
    if too_deep(data):
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep")
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError(str(e)) from e


def read_object(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where it is missing or broken: such a record says nothing."""
    try:
        data = from_json(read_file(path))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def too_deep(text: bytes) -> bool:
    """Whether a JSON text is nested more than MOST_LEVELS deep."""
    if text.count(b"[") + text.count(b"{") <= MOST_LEVELS:
        return False
    level = 0
    for mark in re.finditer(rb"[\[\]{}]", _STRING.sub(b"", text)):
        level += 1 if mark[0] in b"[{" else -1
        if level > MOST_LEVELS:
            return True
    return False
