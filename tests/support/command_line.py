"""The `holmes` command in this process, for tests."""

from __future__ import annotations

import re
import sys

import pytest

from holmes_hpc import cli


@pytest.fixture
def holmes(monkeypatch, capsys, tmp_path):
    """Run `holmes ARGS`; (exit code, stdout, stderr) come back."""
    monkeypatch.setenv("HOLMES_RUNS", str(tmp_path / "runs"))

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holmes", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    return run


def refused(result: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that has all `words`."""
    code, out, err = result
    assert code == 2, (out, err)
    assert out == ""
    lines = [line for line in err.splitlines() if not re.match(r"(planning|looking at the data): |plan \w{12}: ", line)]
    assert len(lines) == 1 and lines[0].startswith("holmes: "), err
    for word in words:
        assert word in lines[0], (word, err)
