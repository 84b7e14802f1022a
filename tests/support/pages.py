"""Fenced blocks of the documentation's pages, and a shell that runs them unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return (title, text) of a page's fenced blocks of a language, in order."""
    return [
        (m[3] or "", re.sub(rf"^{m[1]}", "", m[4], flags=re.MULTILINE))
        for m in FENCE.finditer(text_of(page))
        if m[2] == language
    ]


def run_block(text: str, directory: Path) -> str:
    """Run a page's lines unchanged and return their output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "100"}  # pytest-xdist sets the width of its own terminal
    environment.pop("HOLMES_RUNS", None)
    result = subprocess.run(
        ["bash", "-c", f"set -eux\n{text}"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout
