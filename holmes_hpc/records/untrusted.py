"""Readers for files that other users may have written.

Text that is not YAML or JSON, or that would crash the reader or exhaust its memory, raises an ordinary error. Pipes,
devices and oversized files are refused without reading them. Nesting is limited, because libyaml and pyarrow's JSON
reader use a C stack frame for each level of nesting and crash when the stack overflows.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, if PyYAML was built with it
MAX_LEVELS = 100  # levels of nesting; files of holmes have about ten
MAX_VALUES = 500_000  # values in a YAML text; more would take many seconds to parse
MAX_ALIAS_VALUES = 100_000  # values that aliases may add when they are expanded
MAX_DIGITS = 300
MAX_LINES_BYTES = 1 << 31  # size of a JSON Lines file: about two million steps
BLOCK_BYTES = 1 << 24  # of a JSON Lines file, read at a time
MAX_TEXT_BYTES = 1 << 26  # 64 MiB; the largest tokenizer.json published has 33 MB
_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FxX_:]*")  # a long number: Python refuses to print over 4300 digits
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def open_file(path: str | os.PathLike[str], flags: int = 0, folder: int | None = None) -> BinaryIO:
    """Open the regular file at `path` for reading. `flags`: more flags of open(2); `folder`: the descriptor of the
    directory that `path` is relative to. Pipes, devices and sockets raise OSError, because reading may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder)  # a pipe without a writer does not block
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            code, reason = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "Not a file")
            raise OSError(code, reason, os.fspath(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def leaves_folder(path: Path, folder: Path) -> bool:
    """Return whether `path`, a file in `folder`, is a link to a file outside of `folder`. In a snapshot folder of
    Hugging Face's cache, links to the blobs of the same model are allowed."""
    resolved, folder = path.resolve(), folder.resolve()
    is_blob = folder.parent.name == "snapshots" and resolved.parent == folder.parent.parent / "blobs"
    return not is_blob and not resolved.is_relative_to(folder)


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of the file at `path`.
    Raise OSError as :func:`open_file` does, and for a file of more than `max_bytes`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"the file has {size:,} bytes, at most {max_bytes:,} are read")
        return file.read()


class _Loader(SAFE_LOADER):  # type: ignore[valid-type, misc]
    """PyYAML's safe loader, which also refuses a mapping with a repeated key. PyYAML would keep only its last value."""

    def get_single_node(self) -> Any:
        root = super().get_single_node()
        seen, nodes = set[int](), [root] if root is not None else []
        while nodes:
            node = nodes.pop()
            if id(node) in seen or isinstance(node, yaml.ScalarNode):
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                nodes += node.value
                continue
            keys = set[str]()
            for key, value in node.value:
                nodes += [key, value]
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if key.value in keys:
                        raise yaml.YAMLError(f"key {key.value!r} is there twice, {_position(key)}")
                    keys.add(key.value)
        return root


def from_yaml(text: str) -> Any:
    """Parse a YAML text into plain data, without running code. Raise yaml.YAMLError if that is impossible or unsafe."""
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as e:
        raise yaml.YAMLError(str(e).replace(' in "<unicode string>",', " at")) from e
    except (ValueError, OverflowError, RecursionError) as e:  # e.g. a 13th month, a number of 5000 digits
        raise yaml.YAMLError(str(e)) from e


def _check_size(text: str) -> None:
    """Raise YAMLError for a text with too deep nesting, too long a number, or too many values with those of aliases."""
    sizes: dict[str, int] = {}  # anchor -> number of values
    open_collections: list[tuple[str | None, int]] = []  # (anchor, number of values before the collection)
    values = alias_values = 0
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        if isinstance(event, yaml.ScalarEvent):
            values += 1
            if values > MAX_VALUES:
                raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, {_position(event)}")
            if event.anchor:
                sizes[event.anchor] = 1
            if len(event.value) > MAX_DIGITS and event.implicit[0] and _NUMBER.fullmatch(event.value):
                raise yaml.YAMLError(f"a number of {len(event.value)} digits, {_position(event)}")
        elif isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, values))
            values += 1
            if len(open_collections) > MAX_LEVELS:
                raise yaml.YAMLError(f"nested more than {MAX_LEVELS} levels deep, {_position(event)}")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, first_value = open_collections.pop()
            if anchor:
                sizes[anchor] = values - first_value
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise yaml.YAMLError(f"alias {event.anchor!r} has no anchor before it, {_position(event)}")
            values += sizes[event.anchor]
            alias_values += sizes[event.anchor]
            if alias_values > MAX_ALIAS_VALUES:
                raise yaml.YAMLError(f"its aliases repeat more than {MAX_ALIAS_VALUES} values, {_position(event)}")


def _position(event: Any) -> str:
    return f"line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"


def from_json(text: str | bytes) -> Any:
    """Parse a JSON text into plain data. Raise ValueError if the text is not JSON, or is nested too deeply."""
    data = text.encode("utf-8", errors="surrogatepass") if isinstance(text, str) else text
    if too_deep(data):
        raise ValueError(f"nested more than {MAX_LEVELS} levels deep")
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError(str(e)) from e


def read_object(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing, unreadable or has no JSON object."""
    try:
        data = from_json(read_file(path))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def objects_of_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a file of one object per line; skip other lines, and a file that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        for line in read_file(path).splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(data := from_json(line), dict):
                    yield data


def too_deep(text: bytes) -> bool:
    """Return whether a JSON text is nested more than MAX_LEVELS levels deep."""
    if text.count(b"[") + text.count(b"{") <= MAX_LEVELS:
        return False
    level = 0
    for bracket in re.finditer(rb"[\[\]{}]", _STRING.sub(b"", text)):
        level += 1 if bracket[0] in b"[{" else -1
        if level > MAX_LEVELS:
            return True
    return False
