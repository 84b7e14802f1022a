"""The `holmes` command in the test's process."""

from __future__ import annotations

import re
import sys
from functools import partial

import pytest

from holmes_hpc import cli


@pytest.fixture
def holmes(monkeypatch, capsys, tmp_path):
    """Return a function that runs `holmes ARGS` and returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("HOLMES_RUNS", str(tmp_path / "runs"))

    return partial(run_command, monkeypatch, capsys)


def run_command(monkeypatch, capture, *args: str) -> tuple[int, str, str]:
    """Run `holmes ARGS` in this process. Return (exit code, stdout, stderr) as `capture` (capsys or capfd) has them."""
    monkeypatch.setattr(sys, "argv", ["holmes", *args])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    out = capture.readouterr()
    return int(exit_info.value.code or 0), out.out, out.err


def refused(result: tuple[int, str, str], *fragments: str) -> None:
    """Assert exit code 2, nothing on stdout, and one line on stderr that has all `fragments`."""
    code, out, err = result
    assert code == 2, (out, err)
    assert out == ""
    lines = [line for line in err.splitlines() if not re.match(r"(planning|checking the data): |plan \w{12}: ", line)]
    assert len(lines) == 1 and lines[0].startswith("holmes: "), err
    for fragment in fragments:
        assert fragment in lines[0], (fragment, err)
