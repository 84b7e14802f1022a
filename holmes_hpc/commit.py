"""Which commit this package is of: its checkout's, or the one that its wheel was built from."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BUILT_FROM = PACKAGE / "COMMIT"  # hatch_build.py puts it into wheels and source distributions


@functools.cache
def git_commit() -> str | None:
    """The commit of the checkout this package runs from, `+` when changed, or of its wheel; None: nobody knows."""
    if BUILT_FROM.is_file():
        return BUILT_FROM.read_text(encoding="utf-8").strip() or None
    return checkout_commit(PACKAGE.parent)


def checkout_commit(root: Path) -> str | None:
    """The commit of the checkout whose top is `root`; None where it is none, or lies in somebody else's."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
