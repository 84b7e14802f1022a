"""The `holmes` command in the test's process."""

from __future__ import annotations

import re
import sys

import pytest

from holmes_hpc import cli


@pytest.fixture
def holmes(monkeypatch, capsys, tmp_path):
    """Return a function that runs `holmes ARGS` and returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("HOLMES_RUNS", str(tmp_path / "runs"))

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holmes", *args])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        out = capsys.readouterr()
        return int(exit_info.value.code or 0), out.out, out.err

    return run


def refused(result: tuple[int, str, str], *fragments: str) -> None:
    """Assert exit code 2, nothing on stdout, and one line on stderr that has all `fragments`."""
    code, out, err = result
    assert code == 2, (out, err)
    assert out == ""
    lines = [line for line in err.splitlines() if not re.match(r"(planning|checking the data): |plan \w{12}: ", line)]
    assert len(lines) == 1 and lines[0].startswith("holmes: "), err
    for fragment in fragments:
        assert fragment in lines[0], (fragment, err)
