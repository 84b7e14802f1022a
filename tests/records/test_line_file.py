"""Lines wait in memory while the disk is full. /dev/full is a file on a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_hpc.errors import RunFailed
from holmes_hpc.records import line_file
from holmes_hpc.records.line_file import FULL_S, MAX_WAITING, LineFile


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "lines"
    path.symlink_to("/dev/full")
    return path


def test_lines_are_written_in_order_once_the_disk_has_space(full: Path) -> None:
    file, warnings = LineFile(full), list[str]()
    for line in "ab":
        file.append(line, warn=warnings.append)
    assert file.waiting
    full.unlink()
    file.append("c", "d", warn=warnings.append)
    assert full.read_text() == "a\nb\nc\nd\n" and not file.waiting
    assert "No space left on device; lines wait in memory for at most 120 s" in warnings[0]
    assert warnings[1:] == [f"{full}: 4 lines written after 0 s"]


def test_a_disk_that_stays_full_ends_the_run(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, clock = LineFile(full), [1000.0]
    monkeypatch.setattr(line_file.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(line_file.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    file.append("a")
    clock[0] += FULL_S
    file.append("b")
    with pytest.raises(RunFailed, match="No space left on device") as caught:
        file.finish()
    assert caught.value.exit_code == 1 and clock[0] == 1000 + FULL_S + line_file.RETRY_S
    many = LineFile(full)
    many.append(*"x" * MAX_WAITING)
    with pytest.raises(RunFailed, match="No space left on device"):
        many.append("one more")


def test_other_errors_are_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="No such file"):
        LineFile(tmp_path / "missing" / "lines").append("a")
