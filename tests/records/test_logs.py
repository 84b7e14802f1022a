from __future__ import annotations

from pathlib import Path

from holmes_hpc.records import logs
from holmes_hpc.records.logs import GrowingFile, tail


def test_new_lines_of_a_growing_file_come_once_and_whole(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(logs, "_PIECE", 3)  # bytes read at once
    path = tmp_path / "log"
    log = GrowingFile(path)
    assert list(log.lines()) == []
    path.write_bytes(b"a\nb")
    assert list(log.lines()) == ["a"] and log.rest == "b"
    path.write_bytes(b"a\nb\xff c\nmore than three\n")
    assert list(log.lines()) == ["b\ufffd c", "more than three"] and log.rest == ""
    late = GrowingFile(path, from_now=True)
    path.write_bytes(b"n\n")  # begun anew
    assert list(log.lines()) == ["n"] and list(late.lines()) == ["n"]
    assert list(late.lines()) == []


def test_the_tail_of_one_very_long_line_is_its_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 20000 + "end")
    assert tail(tmp_path / "log")[0].endswith("xend")


def test_a_device_without_end_has_no_lines() -> None:
    """A full disk is played by /dev/full, which reads as zeros without end."""
    assert GrowingFile(Path("/dev/full"))._read() == b""
