"""Atomic file writes, a file lock for one writer at a time, and readers of text, JSON and YAML files."""

import contextlib
import errno
import fcntl
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.errors import ConfigError, HolmesError, RecordError, RunFailed
from holmes_hpc.records.untrusted import from_json, from_yaml, read_file
from holmes_hpc.waiting import attempts

LOCK_WAIT_S = 30.0
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(path: Path, text: str, mode: int = 0o644, sync: bool = True) -> None:
    """Replace the content of `path` by `text` atomically, so that a reader sees either the old text or the new text.
    `mode`: permissions of the new file, to which the umask applies; `sync`: whether to wait until the text is on disk.
    Raise RunFailed if the file cannot be written, for example on a full disk. The old file then stays unchanged."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()  # left by a killed process with the same pid
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise file_error(path, e) from e


def append_line(path: Path, line: str) -> None:
    """Append `line` with a single write. If a killed writer left an incomplete last line, end that line first.
    Raise RunFailed if the line cannot be written, for example on a full disk. The file then keeps its old length."""
    old_size = None
    try:
        # Mode 0o644 lets only the owner write. NFS may report a full disk only on close, so `try` includes the close.
        with open(path, "ab+", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            old_size = os.fstat(file.fileno()).st_size
            ends_in_newline = old_size == 0 or os.pread(file.fileno(), 1, old_size - 1) == b"\n"
            data = (b"" if ends_in_newline else b"\n") + line.encode("utf-8") + b"\n"
            if os.write(file.fileno(), data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a short write means a full disk
    except OSError as e:
        if old_size is not None:
            with contextlib.suppress(OSError):
                os.truncate(path, old_size)
        raise file_error(path, e) from e


@contextlib.contextmanager
def locked(path: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold a lock on the file `path` during the block. Wait until no other process, on any node, holds the lock.
    Raise RecordError if another process still holds it after `wait_s` seconds."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as e:
        raise file_error(path, e) from e
    try:
        for _ in attempts(wait_s, 0.01):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                continue
            except OSError as e:
                raise file_error(path, e) from e
        else:
            hint = "try again; if this repeats, find the process that hangs and end it"
            raise RecordError(f"another writer has held the lock for {wait_s:.0f} s", where=str(path), hint=hint)
        yield
    finally:
        os.close(handle)  # also releases the lock


def read_json(path: str | os.PathLike[str], error: type[HolmesError], hint: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `error` as :func:`read_yaml` does."""
    return read_yaml(path, error, hint, "JSON", from_json)


def read_yaml(
    path: str | os.PathLike[str],
    error: type[HolmesError] = ConfigError,
    hint: str = "correct it",
    language: str = "YAML",
    parse: Callable[[str], Any] = from_yaml,
) -> dict[str, Any]:
    """Return the YAML mapping in a file. Code in the file is not run.
    `language`, `parse`: name and parser of another format. Raise `error`, which names the file, if the file cannot be
    read or is not a mapping; `hint`: how to correct a file that is not a mapping."""
    with error.instead_of(ValueError, yaml.YAMLError, where=path, hint=hint, what=f"not {language}:"):
        data = parse(read_text(path, error))
    if not isinstance(data, dict):
        raise error("not a mapping of keys to values", where=str(path), hint=hint)
    return data


def read_text(path: str | os.PathLike[str], error: type[HolmesError] = ConfigError) -> str:
    """Return the content of a UTF-8 file. Raise `error` with the file's name if it cannot be read or is not text."""
    not_text = error.instead_of(UnicodeDecodeError, where=path, hint="give a text file", what="not UTF-8 text")
    with error.instead_of(OSError, where=path, hint="give a file that exists and that you can read"), not_text:
        return read_file(path).decode("utf-8")


def map_leaves(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return nested data with ``convert(leaf)`` in place of every leaf, and with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: map_leaves(entry, convert) for key, entry in value.items()}
    return [map_leaves(entry, convert) for entry in value] if isinstance(value, (list, tuple)) else convert(value)


def to_json(value: Any) -> str:
    """Return `value` as one line of strict JSON; NaN and infinity, which JSON lacks, become null."""
    encode = partial(json.dumps, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    with contextlib.suppress(ValueError):
        return encode(value)
    return encode(map_leaves(value, lambda v: None if isinstance(v, float) and not math.isfinite(v) else v))


def file_error(path: Path, error: OSError) -> RunFailed:
    """Return a RunFailed error with the text of `error`, the path at which it occurred, and a hint on what to do."""
    hint = "make the run directory writable from this node"
    if error.errno in DISK_FULL:
        hint = "free some space, then `holmes resume` the run"
    return RunFailed(error.strerror or str(error), where=str(path), hint=hint)


def is_full(path: Path) -> bool:
    """Return whether the file system of `path` has less than 1 MiB or no inode left."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(path)
        return disk.f_bavail * disk.f_frsize < 1 << 20 or (disk.f_files > 0 and disk.f_favail == 0)
    return False
