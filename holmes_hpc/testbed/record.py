"""The record of everything that a testbed creates.

It is written before anything is created, so that `down` can remove everything even after a crash."""

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
from holmes_hpc.testbed.commands import run

DEFAULT_DIRECTORY = Path("/var/lib/holmes-testbed")
FILE = "testbed.json"
VERSION = 1
MAX_PATH = 60  # a socket's path has at most 107 characters, and sockets are below the directory


def state_dir() -> Path:
    """Return the testbed's directory, with links resolved: ``$HOLMES_TESTBED`` or /var/lib/holmes-testbed.
    Raise TestbedError if the path is too long or has characters that Slurm's files cannot have."""
    directory = Path(os.path.realpath(os.environ.get("HOLMES_TESTBED") or DEFAULT_DIRECTORY))
    path, hint = str(directory), "set HOLMES_TESTBED to a path of letters, digits and -_./"
    if len(path) > MAX_PATH:
        problem = f"path longer than {MAX_PATH} characters"
        raise TestbedError(problem, where=repr(path), hint="set HOLMES_TESTBED to a shorter path")
    if any(c.isspace() or c in "#\"'\\%:," for c in path) or path == "/":
        problem = "the path has characters that the testbed's files cannot have"
        raise TestbedError(problem, where=repr(path), hint=hint)
    return directory


@dataclass(frozen=True)
class Record:
    """The record of one testbed. `prefix`: prefix of the names of its namespaces and interface; `subnet`: a /16 in CIDR
    form; `password`: password of its database; `release`: Debian release of its programs; `topology`: text of its
    topology file; `made_directory`: whether `up` created the directory; `run_netns`: state of /run/netns before `up`;
    `slurm`: installation prefix of a Slurm that `make install` installed, empty for Slurm from the release's packages;
    `auth`: Slurm's auth plugin; `ready`: false while the testbed is being created or removed."""

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
    def read(cls, directory: Path) -> "Record | None":
        """Return the record in `directory`; None if there is no testbed. Raise TestbedError if it cannot be read."""
        path, errors = directory / FILE, (OSError, ValueError, KeyError, TypeError)
        hint = "restore it, or remove the testbed's namespaces and files yourself"
        damaged = TestbedError.instead_of(*errors, where=path, hint=hint, what="cannot be read:")
        private = TestbedError.instead_of(PermissionError, where=path, hint="run as root", what="cannot be read")
        with damaged, private, contextlib.suppress(FileNotFoundError, NotADirectoryError):
            data: Any = json.loads(path.read_text(encoding="utf-8"))
            is_other = not isinstance(data, dict) or data.get("version") != VERSION
            other_hint = "run `holmes testbed down` of that version"
            TestbedError.refuse(str(path), (is_other, "created by another version of holmes", other_hint))
            return cls(**{**data, "namespaces": tuple(data["namespaces"])})
        return None

    def write(self, directory: Path) -> None:
        """Replace the record. Only root can read it, because it contains the database password."""
        write_private(directory / FILE, json.dumps(asdict(self), indent=1).encode())


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically. The new file has the permissions `mode` (less the umask) from the start."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


@contextlib.contextmanager
def locked(directory: Path, create: bool) -> Iterator[bool]:
    """Lock the directory against another `up` or `down`. Yield whether this call created it. `create`: whether to
    create a missing directory; if false, raise FileNotFoundError. The lock is on the directory itself, so it needs no
    file elsewhere. If `down` removes the directory while this call waits for the lock, the call starts again."""
    while True:
        has_created = False
        if create and not directory.is_dir():
            hint = "run as root, or set HOLMES_TESTBED"
            refused = TestbedError.instead_of(OSError, where=directory, hint=hint, what="cannot be created:")
            with refused, contextlib.suppress(FileExistsError):
                directory.parent.mkdir(parents=True, exist_ok=True)
                directory.mkdir(mode=0o755)
                has_created = True
            is_file, hint = not directory.is_dir(), "set HOLMES_TESTBED to another path"
            TestbedError.refuse(str(directory), (is_file, "it is not a directory", hint))
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            is_same = False
            with contextlib.suppress(FileNotFoundError):
                is_same = os.path.samestat(os.fstat(handle), os.stat(directory))
            if is_same:
                yield has_created
                return
            if not create:
                raise FileNotFoundError(directory)
        finally:
            os.close(handle)


def remove_files(directory: Path) -> None:
    """Remove everything in `directory` except the record. Unmount what is mounted there."""
    # `up` mounts nothing there, but a mount by somebody else must not be deleted with the directory.
    for line in reversed(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()):
        if (mount_point := line.split()[4]).startswith(f"{directory}/"):
            run(["umount", "--lazy", mount_point])
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != FILE:
            path.unlink()
