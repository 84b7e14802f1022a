"""What a testbed made, written down before it is made, so that `down` can undo it after any crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holmes_hpc.errors import TestbedError
from holmes_hpc.schema import refuse
from holmes_hpc.testbed.commands import run

DEFAULT_DIRECTORY = Path("/var/lib/holmes-testbed")
FILE = "testbed.json"
VERSION = 1
MAX_PATH = 60  # sockets lie below the directory, and a socket's path has at most 107 characters


def state_dir() -> Path:
    """Where the testbed lives: ``$HOLMES_TESTBED`` or /var/lib/holmes-testbed, without links."""
    directory = Path(os.path.realpath(os.environ.get("HOLMES_TESTBED") or DEFAULT_DIRECTORY))
    path, hint = str(directory), "set HOLMES_TESTBED to a path of letters, digits and -_./"
    is_long, is_odd = len(path) > MAX_PATH, any(c.isspace() or c in "#\"'\\%:," for c in path) or path == "/"
    refuse(
        repr(path),
        (is_long, f"path longer than {MAX_PATH} characters", "set HOLMES_TESTBED to a shorter one"),
        (is_odd, "unfit as the testbed's directory", hint),
        error=TestbedError,
    )
    return directory


@dataclass(frozen=True)
class Record:
    """One testbed. `ready` is false while it is being made or undone; `release` is that of its programs, `slurm` the
    prefix of a Slurm of another place (empty: the release's own), `auth` what its daemons trust each other by.

    `prefix` starts the name of everything that the machine shares with others; `subnet` is a /16 in CIDR form.
    """

    prefix: str
    subnet: str
    ports: dict[str, int]
    password: str
    release: str
    topology: str
    namespaces: tuple[str, ...]
    made_directory: bool
    run_netns: str
    slurm: str = ""
    auth: str = "munge"
    ready: bool = False
    version: int = VERSION

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        """The record in `directory`, or None where there is no testbed."""
        where = str(directory / FILE)
        try:
            data: Any = json.loads((directory / FILE).read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("version") != VERSION:
                hint = "take it down with that version"
                raise TestbedError("made by another version of holmes", where=where, hint=hint)
            return cls(**{**data, "namespaces": tuple(data["namespaces"])})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            raise TestbedError("cannot be read", where=where, hint="run as root") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "restore it, or remove what it made by hand"
            raise TestbedError(f"cannot be read: {error}", where=where, hint=hint) from None

    def write(self, directory: Path) -> None:
        """Replace the record; only root may ever read it, for it holds the database's password."""
        write_private(directory / FILE, json.dumps(asdict(self), indent=1).encode())


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically; it is made with its `mode`, unlike what records/files.py writes."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


@contextlib.contextmanager
def locked(directory: Path, create: bool) -> Iterator[bool]:
    """Hold the directory against another `up` or `down`; yields whether this call made it.

    The lock is on the directory itself, so nothing lies outside it. `down` removes the directory while others wait for
    it: whoever gets the lock of a directory that is no longer there tries again.
    """
    made = False
    while True:
        if create and not directory.is_dir():
            try:
                directory.parent.mkdir(parents=True, exist_ok=True)
                directory.mkdir(mode=0o755)
                made = True
            except FileExistsError:
                if not directory.is_dir():
                    raise TestbedError("is not a directory", where=str(directory), hint="set HOLMES_TESTBED") from None
            except OSError as error:
                raise TestbedError(
                    f"cannot be made: {error.strerror}", where=str(directory), hint="run as root, or set HOLMES_TESTBED"
                ) from None
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            is_same = False
            with contextlib.suppress(FileNotFoundError):
                is_same = os.path.samestat(os.fstat(handle), os.stat(directory))
            if is_same:
                yield made
                return
            if not create:
                raise FileNotFoundError(directory)
            made = False
        finally:
            os.close(handle)


def empty(directory: Path) -> None:
    """Remove all that lies in `directory` but its record."""
    # nothing of the machine may be mounted where files are about to be deleted (`up` itself mounts nothing there)
    for line in reversed(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()):
        if (point := line.split()[4]).startswith(f"{directory}/"):
            run(["umount", "--lazy", point])
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != FILE:
            path.unlink()
