"""File ownership checks: whether other users can write in a run directory.

Such users could change code that is run from the directory, for example Submitit's pickles. The checks read owners,
modes and sticky bits of a path and of all folders above it, as sshd does for a home directory. They do not read access
control lists or a file server's own rules.
"""

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path
from typing import BinaryIO

from holmes_hpc.errors import RecordError
from holmes_hpc.records.untrusted import open_file

_MAX_LINKS = 40  # Linux's own limit


def careful_umask() -> None:
    """Deny other users write access to all files that this process and its children create. Keep a stricter umask."""
    os.umask(os.umask(0o022) | 0o022)


def is_own(path: str | os.PathLike[str], mode: int = 0o777) -> bool:
    """Return whether the file at `path` is readable, belongs to this user and grants no permission outside `mode`."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_uid == os.getuid() and not status.st_mode & 0o777 & ~mode
    return False


def other_writers(path: str | os.PathLike[str]) -> str | None:
    """Return a message on which other users may write or replace the file at `path`; None if only this user and root
    may. Groups are trusted if the environment has HOLMES_TRUST_GROUP=1."""
    for depth, part in enumerate(_path_parts(Path(os.getcwd(), path))):
        try:
            status = os.lstat(part)
        except OSError:
            continue  # missing or unreadable
        if (writers := _writers(status, str(part), is_folder=depth > 0)) is not None:
            return writers
    return None


def other_owners(path: str | os.PathLike[str]) -> set[int]:
    """Return the ids of the users, except root and this user, who own the file at `path`, a folder above it, or a link
    that leads there. Each of them can choose what is found at `path`."""
    parts = [part for part in _path_parts(Path(os.getcwd(), path)) if os.path.lexists(part)]
    return {os.lstat(part).st_uid for part in parts} - {0, os.getuid()}


def _writers(status: os.stat_result, name: str, is_folder: bool = False) -> str | None:
    """Return a message on which other users may write a file, or replace files in a folder; None if no other user may.
    `status`: status of the file or folder; `name`: its path in the message."""
    # A setting in a file would not do, because the group might be able to write that file.
    trusts_groups = os.environ.get("HOLMES_TRUST_GROUP") == "1"
    if status.st_uid not in (0, os.getuid()):
        return f"{name} belongs to user {user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode) or (is_folder and status.st_mode & stat.S_ISVTX):
        return None  # a link's mode has no effect; in a sticky folder, users can replace only their own files
    if status.st_mode & stat.S_IWOTH:
        return f"{name} can be written by everybody"
    if status.st_mode & stat.S_IWGRP and not trusts_groups and not _is_private_group(status.st_gid):
        return f"{name} can be written by group {_group_name(status.st_gid)}"
    return None


def refuse_other_writers(path: str | os.PathLike[str]) -> None:
    """Raise RecordError if other users may write or replace the file or folder at `path`."""
    if (writers := other_writers(path)) is not None:
        raise _other_writers_error(writers, str(path))


def _other_writers_error(writers: str, path: str) -> RecordError:
    hint = "chmod g-w it; if you trust all members of that group, export HOLMES_TRUST_GROUP=1 instead"
    if " belongs to " in writers:
        hint = "run it as that user, or give a directory of your own"
    elif writers.endswith("everybody"):
        hint = "chmod go-w it, or use another place"
    return RecordError(f"{writers}, so other users could change the code that runs", where=path, hint=hint)


def open_own_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file whose content is run as code, such as a pickle. Raise RecordError if other users could have written
    the file, or if it is a link. The check applies to the opened file, so that nobody can swap it after the check."""
    file_path = Path(os.getcwd(), path)
    refuse_other_writers(file_path)
    folder = os.open(file_path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = open_file(file_path.name, os.O_NOFOLLOW, folder)
        folder_writers = _writers(os.fstat(folder), str(file_path.parent), is_folder=True)
        if (writers := folder_writers or _writers(os.fstat(file.fileno()), str(file_path))) is not None:
            file.close()
            raise _other_writers_error(writers, str(path))
        return file
    finally:
        os.close(folder)


def _path_parts(path: Path) -> list[Path]:
    """Return the paths of all files, folders and links that the kernel visits to resolve `path`, the last one first.
    In each of these paths, only the last component may be a link."""
    parts, folder, remaining, link_count = [Path("/")], Path("/"), list(reversed(path.parts[1:])), 0
    while remaining:
        name = remaining.pop()
        if name == "..":
            folder = folder.parent
            parts.append(folder)
            continue
        parts.append(folder / name)
        try:
            target = os.readlink(folder / name)
        except OSError:
            folder /= name  # not a link, or missing
            continue
        link_count += 1
        if link_count > _MAX_LINKS:
            break
        if os.path.isabs(target):
            folder = Path("/")
        remaining += [part for part in reversed(Path(target).parts) if part != "/"]
    return list(reversed(parts))


def _is_private_group(group: int) -> bool:
    """Return whether `group` is the private group of root or this user, as many systems create, without others."""
    try:
        user, entry = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    if group == 0:
        return set(entry.gr_mem) <= {"root", user.pw_name}
    return user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def user_name(uid: int) -> str:
    """Return the name of the user with the id `uid`; the id as text if the user has no name."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _group_name(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)
