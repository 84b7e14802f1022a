"""The git commit of this package: of its checkout, or of the source of its wheel."""

import functools
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
BUILT_FROM = PACKAGE / "COMMIT"  # hatch_build.py writes it into wheels and source distributions


@functools.cache
def git_commit() -> str | None:
    """Return the commit from which this package's wheel was built, or the commit of its checkout; None if unknown."""
    if BUILT_FROM.is_file():
        return BUILT_FROM.read_text(encoding="utf-8").strip() or None
    return checkout_commit(PACKAGE.parent)


def checkout_commit(root: Path) -> str | None:
    """Return the commit of the checkout at `root`, with + if tracked files differ; None if `root` is not its top."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
