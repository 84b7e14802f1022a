"""Files that are never half-written: whole-file replacement, whole-line appending, and one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from holmes_hpc.errors import ConfigError, HolmesError, RecordError, RunFailed
from holmes_hpc.records.untrusted import from_yaml

LOCK_WAIT_S = 30.0


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace `path` by `text`: a reader sees the old file or the new one. RunFailed when the disk is full; then the
    old file stays and nothing else is left. `mode`: who may read it, less what the umask forbids."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()  # of a process of this number that was killed here
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise failed(path, e) from e


def append_line(path: Path, line: str) -> None:
    """Append one line with a single write; on a full disk RunFailed, and the file ends where it ended before.

    Half a line that a killed writer left is closed first, so that it spoils only itself.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as e:
        raise failed(path, e) from e
    closed = False
    before = 0
    try:
        before = os.fstat(handle).st_size
        whole = before == 0 or os.pread(handle, 1, before - 1) == b"\n"
        data = (b"" if whole else b"\n") + line.encode("utf-8") + b"\n"
        if os.write(handle, data) != len(data):
            raise OSError(28, "No space left on device")  # a short write to a file: no room for the rest
        closed = True
        os.close(handle)  # NFS tells of a full disk only here
    except OSError as e:
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        raise failed(path, e) from e
    finally:
        if not closed:
            with contextlib.suppress(OSError):
                os.close(handle)


@contextlib.contextmanager
def locked(path: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Hold the lock file `path`; another holder, also on another node of a shared file system, is waited for."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as e:
        raise failed(path, e) from e
    try:
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as e:
                if not isinstance(e, BlockingIOError):
                    raise failed(path, e) from e
                if time.monotonic() > end:
                    raise RecordError(
                        f"another writer has held it for {wait_s:.0f} s",
                        where=str(path),
                        hint="find the process that hangs, or try again",
                    ) from e
                time.sleep(0.01)
        yield
    finally:
        os.close(handle)  # releases the lock as well


def read_yaml(
    path: str | os.PathLike[str], error: type[HolmesError] = ConfigError, hint: str = "correct it"
) -> dict[str, Any]:
    """A YAML mapping from a file, safely loaded. `error` with the file's name and `hint` where it is none."""
    try:
        data = from_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise error(e.strerror or str(e), where=str(path), hint="give an existing file") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise error(f"not YAML: {' '.join(str(e).split())}", where=str(path), hint=hint) from e
    if not isinstance(data, dict):
        raise error("not a mapping of keys to values", where=str(path), hint=hint)
    return data


def read_text(path: str | os.PathLike[str], error: type[HolmesError] = ConfigError) -> str:
    """A text file's content. `error` with the file's name where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise error(e.strerror or str(e), where=str(path), hint="give an existing file") from e
    except UnicodeDecodeError as e:
        raise error("not text", where=str(path), hint="give a text file") from e


def to_json(value: Any) -> str:
    """`value` as one line of strict JSON; NaN and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def failed(path: Path, error: OSError) -> RunFailed:
    """An error of the file system as one line."""
    full = error.errno in (28, 122)  # ENOSPC, EDQUOT
    hint = "free some space, then `holmes resume` the run" if full else "make the run directory writable from this node"
    return RunFailed(error.strerror or str(error), where=str(path), hint=hint)
