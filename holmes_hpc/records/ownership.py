"""Who else may write where a run lies: what is run from a directory (submitit's pickles are) is whoever's may write it.

Seen are owners, modes and sticky folders of a path and of all folders above it, as sshd looks at a home; not access
control lists, and not what a file server makes of them.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from holmes_hpc.errors import RecordError

_MOST_LINKS = 40  # as Linux follows


def careful_umask() -> None:
    """From now on nothing that this process makes, or those that it starts, can be written by others; a umask that
    already forbids more is kept."""
    os.umask(os.umask(0o022) | 0o022)


def is_own(path: str | os.PathLike[str], mode: int = 0o777) -> bool:
    """Whether what lies at `path` is this very user's, and gives nobody a permission that `mode` lacks; False where
    nothing lies there, or it cannot be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o777 & ~mode


def other_writers(path: str | os.PathLike[str]) -> str | None:
    """Who else may put something in the place of what lies at `path`, in words; None where nobody but this user and
    root may, or, where the site's profile sets HOLMES_TRUST_GROUP=1, the groups of folders."""
    trusted = os.environ.get("HOLMES_TRUST_GROUP") == "1"  # said by no file that such a group could write
    for number, place in enumerate(_way(Path(os.getcwd(), path))):
        try:
            found = os.lstat(place)
        except OSError:
            continue  # not made yet, or not to be seen
        if found.st_uid not in (0, os.getuid()):
            return f"{place} belongs to {_user(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode) or (number and found.st_mode & stat.S_ISVTX):
            continue  # a link's own mode says nothing; in a sticky folder above each may replace only what is their own
        if found.st_mode & stat.S_IWOTH:
            return f"{place} can be written by everybody"
        if found.st_mode & stat.S_IWGRP and not trusted and not _alone_in(found.st_gid):
            return f"{place} can be written by group {_group(found.st_gid)}"
    return None


def refuse_other_writers(path: str | os.PathLike[str]) -> None:
    """RecordError where somebody else may replace what is to be run from `path`."""
    if (who := other_writers(path)) is not None:
        hint = (
            "run it as that user, or give a directory of your own"
            if " belongs to " in who
            else "chmod go-w it, or use another place"
            if who.endswith("everybody")
            else "chmod g-w it, or where all of that group may act for you: export HOLMES_TRUST_GROUP=1"
        )
        raise RecordError(
            f"{who}, so its owner is not the only one who decides what would run", where=str(path), hint=hint
        )


def _way(path: Path) -> list[Path]:
    """What is passed on the way to `path`, its end first: folders, links, where these lead, and what lies above that.
    None of it has a link above it."""
    passed, here, left, links = [Path("/")], Path("/"), list(reversed(path.parts[1:])), 0
    while left:
        word = left.pop()
        if word == "..":
            here = here.parent
            passed.append(here)
            continue
        passed.append(here / word)
        try:
            target = os.readlink(here / word)
        except OSError:
            here /= word  # no link, or not there yet
            continue
        links += 1
        if links > _MOST_LINKS:
            break
        if os.path.isabs(target):
            here = Path("/")
        left += [part for part in reversed(Path(target).parts) if part != "/"]
    return list(reversed(passed))


def _alone_in(group: int) -> bool:
    """Whether a group is root's, or this user's private one, as many systems give everybody."""
    try:
        own, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    if group == 0:
        return set(found.gr_mem) <= {"root", own.pw_name}
    return own.pw_gid == group and found.gr_name == own.pw_name and set(found.gr_mem) <= {own.pw_name}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
