"""How local ranks ended, as their parent noted it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_hpc.submission.lifecycle.failed_rank import LocalEnds, note_ends, noted_ends


def test_only_bad_ends_are_complaints_in_their_order(tmp_path: Path) -> None:
    note_ends(tmp_path, "7", True, [(2, -11), (0, 0), (1, 3)])
    ends = noted_ends(tmp_path, "7")
    assert ends.told
    assert [(c.nodes, c.tasks, c.how, c.by_signal) for c in ends.complaints("here")] == [
        ("here", (2,), "killed by signal 11 (SIGSEGV)", True),
        ("here", (1,), "exited with exit code 3", False),
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"told": true, "codes": [1]}', '{"told": 1, "codes": [["a", 1]]}'])
def test_an_odd_note_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "7_ends.json").write_text(text)
    assert noted_ends(tmp_path, "7") == LocalEnds() == noted_ends(tmp_path, "8")
