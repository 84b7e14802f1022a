"""Scripts of tests that need a process of their own, such as those that replace parts of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def last_line(script: str, folder: Path) -> str:
    """Run a script with `folder` as its argument; return the last line that it prints. Functions are not compiled."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "TORCHDYNAMO_DISABLE": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()[-1]
